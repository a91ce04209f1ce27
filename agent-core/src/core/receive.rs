//! What the peer says: events become words on slots, acknowledgements clear entries.

use alloc::boxed::Box;
use core::fmt;

use super::hub::StatusParts;
use super::outbox::{Control, ControlStage, Owner, Stage, Want};
use super::slot::{Ack, Asked, Exists, GoneWord, OperationWord, SlotId, Word};
use super::{ACK_WITHHELD_MAX, Core, Note, Role, event_print};
use crate::cloudevent::{AGENT_SOURCE, DecodeError, EventView};
use crate::event::is_synthetic;
use crate::event::{ErrorBody, EventType, RequestUpdate, SyncedResource, SyncedResourceList, Target, Type};
use crate::object::ObjectView;
use crate::request::{Key, Kind, is_dns_subdomain};
use crate::time::Instant;

/// A message that is no event. The stream is intact; the message is lost, and its sender repeats it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReceiveError(pub DecodeError);

impl fmt::Display for ReceiveError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl core::error::Error for ReceiveError {}

/// How an event is answered now.
enum Answer {
    /// Dealt with, or never to be.
    Ack,
    /// Later, when the write stands.
    Later,
    /// Not at all: the peer repeats it when we can deal with it.
    Withhold,
}

impl Core {
    /// One event from the peer: an `eventstreamapi.Event` message. Acknowledgements are handled inside.
    pub fn receive(&mut self, now: Instant, message: &[u8]) -> Result<(), ReceiveError> {
        self.counters.received += 1;
        let event = EventView::decode(message).map_err(ReceiveError)?;
        if event.is_ack() {
            self.acknowledged(now, &event);
            return Ok(());
        }
        let answer = match (event.target(), event.event_type()) {
            (Some(Target::Application), EventType::Known(kind)) => self.application(now, &event, kind),
            (Some(Target::ResourceResync), EventType::Known(kind)) => self.resync(now, &event, kind),
            (Some(Target::Heartbeat), _) => Ok(Answer::Ack),
            _ => {
                self.note(Note::Unsupported { target: event.dataschema.into(), r#type: event.r#type.into() });
                Ok(Answer::Ack)
            }
        };
        match answer {
            Ok(Answer::Ack) => self.ack_now(&event),
            Ok(Answer::Later | Answer::Withhold) => {}
            Err(reason) => {
                self.note(Note::BadEvent {
                    reason: alloc::format!(
                        "{} {} ({}): {reason}",
                        event.dataschema,
                        event.r#type,
                        event.event_id
                    ),
                });
                self.ack_now(&event);
            }
        }
        Ok(())
    }

    fn ack_now(&mut self, event: &EventView<'_>) {
        if self.peer.is_some() {
            let frame = event.ack(self.source());
            self.outbox.push_ack(frame);
        }
    }

    pub(super) fn source(&self) -> &'static str {
        match self.config.role {
            Role::Agent => AGENT_SOURCE,
            Role::Principal => "",
        }
    }

    fn ack_later(&self, now: Instant, event: &EventView<'_>) -> Ack {
        Ack { frame: event.ack(self.source()), by: now + ACK_WITHHELD_MAX }
    }

    fn application(
        &mut self,
        now: Instant,
        event: &EventView<'_>,
        kind: Type,
    ) -> Result<Answer, alloc::string::String> {
        let payload = event.payload().map_err(|error| alloc::format!("{error}"))?;
        if kind == Type::Error {
            return self.error_event(now, event, payload);
        }
        let view = ObjectView::parse(payload).map_err(|error| alloc::format!("{error}"))?;
        let key = self.application_key(&view.name)?;
        let own_uid = || Box::<str>::from(&*view.uid);
        let source_uid =
            view.source_uid().filter(|uid| !uid.is_empty()).map_or_else(own_uid, |uid| (&*uid).into());
        match (self.config.role, kind) {
            (Role::Agent, Type::Create | Type::SpecUpdate) => {
                if view.spec.is_none() {
                    return Err("the object has no spec".into());
                }
                let word = Word::Exists(Box::new(Exists {
                    object: payload.to_vec(),
                    source_uid,
                    principal_uid: event.principal_uid.into(),
                    deleting: view.deletion_timestamp.is_some(),
                    is_create: kind == Type::Create,
                }));
                self.set_word(now, &key, word, event);
            }
            (Role::Agent, Type::Delete) => {
                let word = GoneWord {
                    source_uid,
                    principal_uid: event.principal_uid.into(),
                    synthetic: is_synthetic(event.event_id),
                    admitted: false,
                };
                if self.is_about_former_object(&key, &word) {
                    return Ok(Answer::Ack);
                }
                self.set_word(now, &key, Word::Gone(word), event);
            }
            (Role::Agent, Type::SetOperation) => {
                let Some(operation) = view.operation else {
                    return Err("the object has no operation".into());
                };
                let word = OperationWord { source_uid, operation: operation.to_vec(), hub_asked: false };
                let ack = self.ack_later(now, event);
                let id = self.wanted_slot(now, &key, &ack);
                let serial = self.next_serial();
                let asked = asked(event, serial, word, ack);
                let superseded = Asked::replace(&mut self.slot(id).operation, asked);
                self.give(id, superseded);
                self.act(now, id, None);
            }
            (Role::Agent, Type::TerminateOperation) => {
                let ack = self.ack_later(now, event);
                let id = self.wanted_slot(now, &key, &ack);
                let serial = self.next_serial();
                let asked = asked(event, serial, source_uid, ack);
                let superseded = Asked::replace(&mut self.slot(id).terminate, asked);
                self.give(id, superseded);
                self.act(now, id, None);
            }
            (Role::Principal, Type::StatusUpdate) => {
                let source_uid = view.source_uid().map_or_else(Box::default, |uid| Box::from(&*uid));
                let word = StatusParts {
                    status: view.status,
                    operation: view.operation,
                    refresh: view.refresh().as_deref(),
                    source_uid,
                }
                .into_word();
                self.set_word(now, &key, word, event);
            }
            (Role::Principal, Type::Delete) => {
                let source_uid = view.source_uid().map_or_else(Box::default, |uid| Box::from(&*uid));
                self.set_word(now, &key, Word::SiteGone { source_uid }, event);
            }
            _ => {
                self.note(Note::NotApplied {
                    key,
                    reason: "an event of this type is not for this side of a managed site",
                });
                return Ok(Answer::Ack);
            }
        }
        Ok(Answer::Later)
    }

    fn error_event(
        &mut self,
        now: Instant,
        event: &EventView<'_>,
        payload: &[u8],
    ) -> Result<Answer, alloc::string::String> {
        let body = ErrorBody::decode(payload).map_err(|error| alloc::format!("{error}"))?;
        let key = self.application_key(&body.resource_name)?;
        if self.config.role == Role::Agent {
            self.note(Note::NotApplied { key, reason: "an error report is for the principal" });
            return Ok(Answer::Ack);
        }
        let id = self.slot_id(&key);
        self.slot(id).out.refused = true;
        self.set_word(now, &key, Word::Error { message: (&*body.message).into() }, event);
        Ok(Answer::Later)
    }

    /// With namespace-based mapping an Application lives in one namespace per side, whatever the event says.
    fn application_key(&self, name: &str) -> Result<Key, alloc::string::String> {
        if !is_dns_subdomain(name) {
            return Err(alloc::format!("{name:?} is no name of an object"));
        }
        Ok(Key::new(Kind::Application, &self.config.namespace, name))
    }

    /// A delete for a UID that the pending word has replaced already: senders order nothing across UIDs.
    ///
    /// It is remembered: should the pending word be taken back, the former object must still go.
    fn is_about_former_object(&mut self, key: &Key, word: &GoneWord) -> bool {
        let Some(&id) = self.index.get(key) else { return false };
        let slot = self.slot(id);
        let Some(Asked { what: Word::Exists(exists), .. }) = &slot.word else { return false };
        let is_former = exists.source_uid != word.source_uid;
        // One principal's word is no ground together with another's.
        let counts = !word.synthetic && exists.principal_uid == word.principal_uid;
        if is_former && counts && slot.former.len() < FORMER_MAX {
            slot.former.push(word.source_uid.clone());
        }
        is_former
    }

    fn wanted_slot(&mut self, _now: Instant, key: &Key, ack: &Ack) -> SlotId {
        let id = self.slot_id(key);
        self.timers.insert((ack.by, id));
        let slot = self.slot(id);
        if let Some(word) = &mut slot.word
            && word.refused
            && !word.what.is_held()
        {
            // News about a refused object is worth an attempt at once.
            word.refused = false;
            slot.retry_at = None;
        }
        id
    }

    fn set_word(&mut self, now: Instant, key: &Key, word: Word, event: &EventView<'_>) {
        let ack = self.ack_later(now, event);
        let id = self.wanted_slot(now, key, &ack);
        let serial = self.next_serial();
        let slot = self.slot(id);
        slot.retry_at = None;
        slot.recreate = None;
        let superseded = Asked::replace(&mut slot.word, asked(event, serial, word, ack));
        self.give(id, superseded);
        self.act(now, id, None);
        self.reap(id);
    }

    fn resync(
        &mut self,
        now: Instant,
        event: &EventView<'_>,
        kind: Type,
    ) -> Result<Answer, alloc::string::String> {
        let payload = event.payload().map_err(|error| alloc::format!("{error}"))?;
        if !self.synced {
            // Half a list would be taken for the whole.
            return Ok(Answer::Withhold);
        }
        match (self.config.role, kind) {
            (Role::Agent, Type::RequestResourceResync) => {
                self.counters.resyncs += 1;
                self.tell_all_statuses();
                self.verify_all();
            }
            (Role::Agent, Type::ResponseSyncedResource) => {
                let body = SyncedResource::decode(payload).map_err(|error| alloc::format!("{error}"))?;
                if Kind::parse(&body.kind) == Some(Kind::Application) {
                    let key = self.application_key(&body.name)?;
                    let id = self.slot_id(&key);
                    let slot = self.slot(id);
                    let is_unmanaged = slot.observed.known().is_some() && slot.known_source().is_none();
                    if !(is_unmanaged && self.config.ignore_unmanaged) {
                        self.want(id, Want::Verify);
                        self.act(now, id, None);
                    }
                }
            }
            (Role::Principal, Type::RequestSyncedResourceList) => {
                let body = SyncedResourceList::decode(payload).map_err(|error| alloc::format!("{error}"))?;
                let own = self.list_checksum();
                if own.is_some_and(|own| body.checksum.as_deref() != Some(&own[..])) {
                    self.counters.resyncs += 1;
                    for id in self.ids_where(|slot| slot.observed.known().is_some()) {
                        self.want(id, Want::Report);
                    }
                }
            }
            (Role::Principal, Type::RequestUpdate) => {
                let body = RequestUpdate::decode(payload).map_err(|error| alloc::format!("{error}"))?;
                if Kind::parse(&body.resource.kind) == Some(Kind::Application) {
                    let key = self.application_key(&body.resource.name)?;
                    self.update_requested(now, &key, &body.resource.uid, body.checksum.as_deref());
                }
            }
            _ => {
                self.note(Note::Unsupported { target: event.dataschema.into(), r#type: event.r#type.into() });
            }
        }
        Ok(Answer::Ack)
    }

    /// The peer dealt with an event: only the latest one about an object clears its entry.
    fn acknowledged(&mut self, now: Instant, event: &EventView<'_>) {
        let print = event_print(event.event_id);
        match self.outbox.index.remove(&print) {
            None => self.counters.unmatched_acks += 1,
            Some(Owner::Control(control)) => {
                self.counters.acknowledged += 1;
                self.control_acknowledged(control, print);
            }
            Some(Owner::Slot(id)) => {
                let Some(slot) = self.slots.get_mut(id as usize).and_then(Option::as_mut) else { return };
                let Stage::Sent(flight) = &slot.out.stage else { return };
                if flight.event != print {
                    return;
                }
                let flight = flight.clone();
                slot.out.stage = Stage::Idle;
                slot.out.attempts = 0;
                self.timers.remove(&(flight.due, id));
                self.outbox.places -= 1;
                self.outbox.bytes -= flight.size;
                self.outbox.learn(now.saturating_since(flight.sent_at));
                self.counters.acknowledged += 1;
                self.delivered(now, id, &flight);
                self.enqueue(id);
                self.reap(id);
            }
        }
    }

    fn control_acknowledged(&mut self, control: Control, print: u64) {
        let stage = &mut self.outbox.controls[control as usize];
        if matches!(stage, ControlStage::Sent { event, .. } if *event == print) {
            *stage = ControlStage::Idle;
        }
    }
}

fn asked<T>(event: &EventView<'_>, serial: u32, what: T, ack: Ack) -> Asked<T> {
    Asked { what, ack: Some(ack), refused: false, event: event_print(event.event_id), serial }
}

/// Ends of former objects remembered beside one pending word; what is beyond is settled by the next resync.
const FORMER_MAX: usize = 8;
