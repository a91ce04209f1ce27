//! What the peer says: events become words on slots, acknowledgements clear entries.

use alloc::boxed::Box;
use core::fmt;

use super::hub::StatusParts;
use super::outbox::{Control, ControlStage, Owner, Stage, Want};
use super::slot::{Ack, Asked, Exists, GoneWord, OperationWord, Slot, SlotId, Word};
use super::{ACK_WITHHELD_MAX, Core, Note, Role, event_print};
use crate::cloudevent::{AGENT_SOURCE, DecodeError, EventView};
use crate::event::is_synthetic;
use crate::event::{
    ErrorBody, EventType, RequestUpdate, ResyncDigest, SyncedResource, SyncedResourceList, Target, Type,
};
use crate::object::{NAMESPACE_REMAPPED, ObjectView};
use crate::peer::Mapping;
use crate::request::{Key, Kind, is_dns_label, is_dns_subdomain};
use crate::time::Instant;
use crate::transform::{hub_namespace, remapped, site_namespace};
use crate::{content, glob};

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
            (Some(target), EventType::Known(r#type)) if let Some(kind) = target.kind() => {
                self.object_event(now, &event, kind, r#type)
            }
            (Some(Target::ResourceResync), EventType::Known(kind)) => self.resync(now, &event, kind),
            (Some(Target::Heartbeat), _) => Ok(Answer::Ack),
            (Some(Target::ClusterCacheInfoUpdate), _) => {
                self.cluster_info_event(&event).map(|()| Answer::Ack)
            }
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

    fn object_event(
        &mut self,
        now: Instant,
        event: &EventView<'_>,
        kind: Kind,
        r#type: Type,
    ) -> Result<Answer, alloc::string::String> {
        let payload = event.payload().map_err(|error| alloc::format!("{error}"))?;
        if r#type == Type::Error {
            return self.error_event(now, event, kind, payload);
        }
        let view = ObjectView::parse(payload).map_err(|error| alloc::format!("{error}"))?;
        let remapped = view.annotation(NAMESPACE_REMAPPED).is_some();
        let key = self.key_from_peer(kind, &view.namespace, &view.name, remapped)?;
        match (self.config.role, kind) {
            (Role::Agent, Kind::Application) => {
                self.application_for_site(now, event, key, r#type, payload, &view)
            }
            (Role::Agent, _) => self.content_for_site(now, event, key, r#type, payload, &view),
            (Role::Principal, Kind::Application) => self.application_for_hub(now, event, key, r#type, &view),
            (Role::Principal, _) => Ok(self.not_for_this_side(key)),
        }
    }

    fn not_for_this_side(&mut self, key: Key) -> Answer {
        let reason = "an event of this type is not for this side of a managed site";
        self.note(Note::NotApplied { key, reason });
        Answer::Ack
    }

    fn application_for_site(
        &mut self,
        now: Instant,
        event: &EventView<'_>,
        key: Key,
        r#type: Type,
        payload: &[u8],
        view: &ObjectView<'_>,
    ) -> Result<Answer, alloc::string::String> {
        let own_uid = || Box::<str>::from(&*view.uid);
        let source_uid =
            view.source_uid().filter(|uid| !uid.is_empty()).map_or_else(own_uid, |uid| (&*uid).into());
        match r#type {
            Type::Create | Type::SpecUpdate => {
                refuse_objection(key.kind, view)?;
                if !self.admits_namespace(&key.namespace) {
                    return Err(alloc::format!(
                        "namespace {} is not among --allowed-namespaces",
                        key.namespace
                    ));
                }
                let (_, is_remapped) = self.site_namespace(&view.namespace);
                let object = if is_remapped {
                    remapped(payload).map_err(|_| "the object's annotations cannot be read")?
                } else {
                    payload.to_vec()
                };
                let word = Word::Exists(Box::new(Exists {
                    object,
                    source_uid,
                    principal_uid: event.principal_uid.into(),
                    deleting: view.deletion_timestamp.is_some(),
                    is_create: r#type == Type::Create,
                }));
                self.set_word(now, &key, word, event);
            }
            Type::Delete => return Ok(self.set_gone_word(now, &key, source_uid, event)),
            Type::SetOperation => {
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
            Type::TerminateOperation => {
                let ack = self.ack_later(now, event);
                let id = self.wanted_slot(now, &key, &ack);
                let serial = self.next_serial();
                let asked = asked(event, serial, source_uid, ack);
                let superseded = Asked::replace(&mut self.slot(id).terminate, asked);
                self.give(id, superseded);
                self.act(now, id, None);
            }
            _ => return Ok(self.not_for_this_side(key)),
        }
        Ok(Answer::Later)
    }

    /// Projects, repositories and keys: identified by the hub's UID alone, and of no principal in particular.
    fn content_for_site(
        &mut self,
        now: Instant,
        event: &EventView<'_>,
        key: Key,
        r#type: Type,
        payload: &[u8],
        view: &ObjectView<'_>,
    ) -> Result<Answer, alloc::string::String> {
        let uid = || Box::<str>::from(&*view.uid);
        match r#type {
            Type::Create | Type::SpecUpdate if view.deletion_timestamp.is_none() => {
                if view.uid.is_empty() {
                    return Err("the object has no UID".into());
                }
                refuse_objection(key.kind, view)?;
                let word = Word::Exists(Box::new(Exists {
                    object: payload.to_vec(),
                    source_uid: uid(),
                    principal_uid: Box::default(),
                    deleting: false,
                    is_create: r#type == Type::Create,
                }));
                self.set_word(now, &key, word, event);
                Ok(Answer::Later)
            }
            Type::Create | Type::SpecUpdate | Type::Delete => Ok(self.set_gone_word(now, &key, uid(), event)),
            _ => Ok(self.not_for_this_side(key)),
        }
    }

    fn application_for_hub(
        &mut self,
        now: Instant,
        event: &EventView<'_>,
        key: Key,
        r#type: Type,
        view: &ObjectView<'_>,
    ) -> Result<Answer, alloc::string::String> {
        let source_uid: Box<str> = view.source_uid().map_or_else(Box::default, |uid| Box::from(&*uid));
        if r#type == Type::StatusUpdate && view.deletion_timestamp.is_none() && self.peer_is_go() {
            self.tell_end_again(&key, &source_uid);
        }
        let word = match r#type {
            Type::StatusUpdate => StatusParts {
                status: view.status,
                operation: view.operation,
                refresh: view.refresh().as_deref(),
                source_uid,
            }
            .into_word(),
            Type::Delete => Word::SiteGone { source_uid },
            _ => return Ok(self.not_for_this_side(key)),
        };
        self.set_word(now, &key, word, event);
        Ok(Answer::Later)
    }

    fn error_event(
        &mut self,
        now: Instant,
        event: &EventView<'_>,
        kind: Kind,
        payload: &[u8],
    ) -> Result<Answer, alloc::string::String> {
        let body = ErrorBody::decode(payload).map_err(|error| alloc::format!("{error}"))?;
        let key = self.key_from_peer(kind, &body.resource_namespace, &body.resource_name, true)?;
        if self.config.role == Role::Agent {
            self.note(Note::NotApplied { key, reason: "an error report is for the principal" });
            return Ok(Answer::Ack);
        }
        if kind != Kind::Application {
            // It has no status to show it in.
            if let Some(&id) = self.index.get(&key) {
                self.slot(id).out.refused = true;
            }
            self.note(Note::RefusedOnSite { key, message: (&*body.message).into() });
            return Ok(Answer::Ack);
        }
        let id = self.slot_id(&key);
        self.slot(id).out.refused = true;
        self.set_word(now, &key, Word::Error { message: (&*body.message).into() }, event);
        Ok(Answer::Later)
    }

    fn set_gone_word(
        &mut self,
        now: Instant,
        key: &Key,
        source_uid: Box<str>,
        event: &EventView<'_>,
    ) -> Answer {
        let word = GoneWord {
            source_uid,
            principal_uid: event.principal_uid.into(),
            synthetic: is_synthetic(event.event_id),
            admitted: false,
        };
        if self.is_about_former_object(key, &word) {
            return Answer::Ack;
        }
        self.set_word(now, key, Word::Gone(word), event);
        Answer::Later
    }

    /// Where an object that the peer calls `namespace`/`name` lives on this side.
    ///
    /// With namespace-based mapping an Application lives in one namespace per side, whatever the event says; so does everything else
    /// always. `remapped`: the agent has it in its own namespace because the hub has it in its.
    fn key_from_peer(
        &self,
        kind: Kind,
        namespace: &str,
        name: &str,
        remapped: bool,
    ) -> Result<Key, alloc::string::String> {
        if !is_dns_subdomain(name) {
            return Err(alloc::format!("{name:?} is no name of an object"));
        }
        let config = &self.config;
        let here = match (kind, config.role, config.mapping) {
            (Kind::Application, Role::Principal, Mapping::Namespace) => &*config.agent,
            (Kind::Application, Role::Principal, Mapping::Destination) => {
                hub_namespace(namespace, remapped, &self.peer_namespace, &config.namespace)
            }
            (Kind::Application, Role::Agent, _) => self.site_namespace(namespace).0,
            _ => &*config.namespace,
        };
        if !is_dns_label(here) {
            return Err(alloc::format!("{here:?} is no name of a namespace"));
        }
        Ok(Key::new(kind, here, name))
    }

    fn site_namespace<'a>(&'a self, said: &'a str) -> (&'a str, bool) {
        site_namespace(self.config.mapping, said, &self.peer_namespace, &self.config.namespace)
    }

    /// What the peer calls the namespace of this object: inverse of [`Self::key_from_peer`].
    ///
    /// An Application that is in an agent's own namespace may be from the principal's own or from one of the same name; where
    /// nothing is known of it, it was asked for under the former.
    pub(super) fn namespace_for_peer<'a>(&'a self, slot: &'a Slot) -> &'a str {
        let (config, key) = (&self.config, &slot.key);
        let is_remapped = config.role == Role::Agent
            && config.mapping == Mapping::Destination
            && key.kind == Kind::Application
            && *key.namespace == *config.namespace
            && !self.peer_namespace.is_empty()
            && slot.is_remapped().unwrap_or(true);
        if is_remapped { &self.peer_namespace } else { &key.namespace }
    }

    /// Whether Applications may live in this namespace.
    pub(super) fn admits_namespace(&self, namespace: &str) -> bool {
        let config = &self.config;
        let allowed = config.allowed_namespaces.iter().map(|pattern| &**pattern);
        namespace == config.namespace
            || config.mapping == Mapping::Namespace
            || glob::list_matches(allowed, namespace, &config.regex)
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
        if !self.is_synced() {
            // Half a list would be taken for the whole.
            return Ok(Answer::Withhold);
        }
        match (self.config.role, kind) {
            (Role::Agent, Type::RequestResourceResync) => {
                self.counters.resyncs += 1;
                self.tell_all_statuses();
                self.verify_all();
                self.round_failed();
            }
            (Role::Principal, Type::ResyncDigest) => {
                let theirs = ResyncDigest::decode(payload).map_err(|error| alloc::format!("{error}"))?;
                self.compare_digest(theirs);
            }
            (Role::Agent, Type::ResponseSyncedResource) => {
                let body = SyncedResource::decode(payload).map_err(|error| alloc::format!("{error}"))?;
                if let Some(kind) = Kind::parse(&body.kind) {
                    let key = self.key_from_peer(kind, &body.namespace, &body.name, false)?;
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
                    for id in self.ids_where(|slot| slot.observed.known().is_some_and(|known| known.routed)) {
                        self.want(id, Want::Report);
                    }
                }
            }
            (Role::Principal, Type::RequestUpdate) => {
                let body = RequestUpdate::decode(payload).map_err(|error| alloc::format!("{error}"))?;
                if let Some(kind) = Kind::parse(&body.resource.kind) {
                    let (namespace, name) = (&body.resource.namespace, &body.resource.name);
                    let key = self.key_from_peer(kind, namespace, name, false)?;
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
            if control == Control::ClusterInfo {
                self.cluster_info_acknowledged();
            }
        }
    }
}

fn refuse_objection(kind: Kind, view: &ObjectView<'_>) -> Result<(), alloc::string::String> {
    content::objection(kind, view).map_or(Ok(()), |objection| Err(objection.into()))
}

fn asked<T>(event: &EventView<'_>, serial: u32, what: T, ack: Ack) -> Asked<T> {
    Asked { what, ack: Some(ack), refused: false, event: event_print(event.event_id), serial }
}

/// Ends of former objects remembered beside one pending word; what is beyond is settled by the next resync.
const FORMER_MAX: usize = 8;
