//! From wants to frames: what is read for the peer, how a frame is built, what an acknowledgement settles.

use alloc::borrow::Cow;
use alloc::boxed::Box;
use alloc::string::String;
use alloc::vec::Vec;
use core::time::Duration;

use super::hub::as_site_gets_it;
use super::outbox::{Control, ControlStage, InFlight, KNOWN_MAX, Owner, Stage, Want};
use super::slot::{Observed, Purpose, SlotId};
use super::{Core, Note, Role, event_print};
use crate::checksum::{Checksum, Subtree, list_checksum};
use crate::cloudevent::EventWriter;
use crate::event::{
    ErrorBody, RESOURCE_RESYNC_BODY, RequestUpdate, SyncedResource, SyncedResourceList, Target, Type,
    event_id, resource_id, synthetic_event_id,
};
use crate::object::ObjectView;
use crate::request::{Key, Kind, Request, Verb};
use crate::time::Instant;
use crate::transform::{Strip, in_namespace, payload, tombstone};

/// An event about to be encoded.
struct Draft {
    target: Target,
    r#type: Type,
    event_id: String,
    resource_id: String,
    subject: bool,
    principal_uid: bool,
    data: Vec<u8>,
    level: u64,
}

impl Core {
    /// The peer is owed this about the object.
    pub(super) fn want(&mut self, id: SlotId, want: Want) {
        self.withdraw(id);
        let connected = self.peer.is_some();
        let slot = match &mut self.slots[id as usize] {
            Some(slot) => slot,
            None => return,
        };
        let before = slot.out.wants;
        slot.out.wants.add(want);
        match slot.out.stage {
            Stage::Idle if connected => self.outbox.enqueue(id, &mut slot.out),
            // It may only wait for the time of its next status.
            Stage::Resting(_) if connected && want != Want::Status => self.outbox.enqueue(id, &mut slot.out),
            Stage::Queued => self.outbox.promote(id, before, &slot.out),
            _ => {}
        }
    }

    pub(super) fn unwant(&mut self, id: SlotId, wants: &[Want]) {
        self.withdraw(id);
        for want in wants {
            self.slot(id).out.wants.remove(*want);
        }
    }

    /// A frame that is built but not sent goes back to being a want: by now its content may be stale.
    fn withdraw(&mut self, id: SlotId) {
        let connected = self.peer.is_some();
        let Some(slot) = &mut self.slots[id as usize] else { return };
        if let Stage::Ready(flight) = &slot.out.stage {
            let flight = flight.clone();
            slot.out.stage = Stage::Idle;
            slot.out.wants.add(flight.want);
            self.outbox.withdraw(id, flight.want);
            self.outbox.places -= 1;
            self.outbox.bytes -= flight.size;
            if connected {
                self.outbox.enqueue(id, &mut slot.out);
            }
        }
    }

    pub(super) fn enqueue(&mut self, id: SlotId) {
        if self.peer.is_none() {
            return;
        }
        if let Some(slot) = &mut self.slots[id as usize]
            && matches!(slot.out.stage, Stage::Idle)
            && !slot.out.wants.is_empty()
        {
            self.outbox.enqueue(id, &mut slot.out);
        }
    }

    /// Sends what is owed about this object while its body is at hand, if it is its turn.
    pub(super) fn offer(&mut self, now: Instant, id: SlotId, body: Option<(&ObjectView<'_>, &[u8])>) {
        self.enqueue(id);
        let Some(slot) = &self.slots[id as usize] else { return };
        let Some(want) = slot.out.wants.next() else { return };
        let at_hand = body.is_some() || !self.needs_body(id, want);
        let Some(slot) = &self.slots[id as usize] else { return };
        if at_hand
            && slot.outstanding.is_none()
            && matches!(slot.out.stage, Stage::Queued)
            && self.outbox.has_room()
            && self.outbox.is_first(id)
        {
            self.build(now, id, want, body);
        }
    }

    /// Reads, or builds without reading, for the most urgent object that the window has room for.
    pub(super) fn read_for_peer(&mut self, now: Instant) -> Option<Request> {
        while self.peer.is_some() && self.outbox.has_room() {
            let id = self.outbox.pop()?;
            let Some(slot) = self.slots[id as usize].as_mut() else { continue };
            if !matches!(slot.out.stage, Stage::Queued) {
                continue;
            }
            let Some(want) = slot.out.wants.next() else {
                slot.out.stage = Stage::Idle;
                continue;
            };
            if self.rests(now, id, want) {
                continue;
            }
            if !self.needs_body(id, want) {
                self.build(now, id, want, None);
                continue;
            }
            let slot = self.slot(id);
            if slot.outstanding.is_some() || slot.retry_at.is_some_and(|at| at > now) {
                // Its answer, or its timer, offers the object again.
                slot.out.stage = match slot.retry_at {
                    Some(at) if slot.outstanding.is_none() => Stage::Resting(at),
                    _ => Stage::Idle,
                };
                continue;
            }
            slot.out.stage = Stage::Reading;
            self.outbox.places += 1;
            return Some(self.request(id, Purpose::Read, Verb::Get));
        }
        None
    }

    /// Whether a status waits because another one went a short while ago.
    fn rests(&mut self, now: Instant, id: SlotId, want: Want) -> bool {
        let window = self.config.status_window;
        let slot = self.slot(id);
        let Some(at) = slot.out.status_at.filter(|_| want == Want::Status).map(|at| at + window) else {
            return false;
        };
        if at <= now {
            return false;
        }
        slot.out.stage = Stage::Resting(at);
        self.timers.insert((at, id));
        true
    }

    fn needs_body(&mut self, id: SlotId, want: Want) -> bool {
        match want {
            Want::Gone | Want::Report | Want::Error => false,
            Want::Verify => {
                let slot = self.slot(id);
                match slot.observed {
                    Observed::Absent => false,
                    Observed::Present(_) => !slot.out.verify_blind,
                    Observed::Unknown(_) => true,
                }
            }
            Want::Exists | Want::Operation | Want::Terminate | Want::Status => true,
        }
    }

    /// Builds the frame for `want`; the slot is queued.
    pub(super) fn build(
        &mut self,
        now: Instant,
        id: SlotId,
        want: Want,
        body: Option<(&ObjectView<'_>, &[u8])>,
    ) {
        if self.rests(now, id, want) {
            return;
        }
        let slot = self.slot(id);
        slot.out.wants.remove(want);
        slot.out.stage = Stage::Idle;
        let refresh = want == Want::Exists && slot.out.refresh;
        let Some(draft) = self.draft(id, want, body) else {
            // Nothing to tell (any more); the next want, if there is one, takes its turn.
            self.enqueue(id);
            return;
        };
        let slot = self.slot(id);
        let key = slot.key.clone();
        let sent_at = self.wall.rfc3339(now);
        let mut frame = Vec::with_capacity(draft.data.len() + 512);
        EventWriter {
            source: self.source(),
            r#type: draft.r#type.as_str(),
            target: draft.target,
            subject: draft.subject.then_some((&*key.namespace, &*key.name)),
            event_id: &draft.event_id,
            resource_id: &draft.resource_id,
            sent_at: Some(&sent_at),
            principal_uid: (draft.principal_uid && !self.config.principal_uid.is_empty())
                .then_some(self.config.principal_uid.as_str()),
            data: &draft.data,
        }
        .encode(&mut frame);
        let flight = InFlight {
            want,
            event: event_print(&draft.event_id),
            size: frame.len(),
            level: draft.level,
            sent_at: now,
            due: now,
            refresh,
        };
        self.outbox.places += 1;
        self.outbox.bytes += frame.len();
        self.outbox.push_ready(id, want, frame);
        let slot = self.slot(id);
        if want == Want::Status {
            slot.out.status_at = Some(now);
        }
        slot.out.stage = Stage::Ready(flight);
    }

    fn draft(&mut self, id: SlotId, want: Want, body: Option<(&ObjectView<'_>, &[u8])>) -> Option<Draft> {
        let is_go = self.peer_is_go();
        let role = self.config.role;
        let uuid = self.rng.uuid();
        let key = self.slot(id).key.clone();
        let target = Target::of(key.kind);
        let namespace = match &self.slots[id as usize] {
            Some(slot) => String::from(self.namespace_for_peer(slot)),
            None => return None,
        };
        let slot = self.slot(id);
        let control = |r#type, data| Draft {
            target: Target::ResourceResync,
            r#type,
            event_id: uuid.clone(),
            resource_id: uuid.clone(),
            subject: false,
            principal_uid: false,
            data,
            level: 0,
        };
        match want {
            Want::Gone => {
                let gone = slot.out.gone.as_ref()?;
                if is_go && key.kind != Kind::Application && !gone.synthetic && !slot.out.on_site {
                    // A Go agent deletes by name alone, also what is the site's own. What it has of ours it says when it is asked.
                    slot.out.gone = None;
                    slot.out.known_as.clear();
                    self.outbox.controls[Control::Resync as usize] = ControlStage::Wanted;
                    return None;
                }
                let level = gone.print();
                if gone.synthetic {
                    let data = tombstone(&key.namespace, &key.name, &gone.uid, None);
                    return Some(Draft {
                        target,
                        r#type: Type::Delete,
                        event_id: synthetic_event_id(&key.name, &gone.uid),
                        resource_id: resource_id(&key.name, &gone.uid),
                        subject: true,
                        principal_uid: true,
                        data,
                        level,
                    });
                }
                let source_uid = gone.source_uid.as_deref();
                // Of credentials no more goes than is needed to name them.
                let at_hand = body.filter(|(view, _)| {
                    key.kind == Kind::Application
                        && *view.uid == *gone.uid
                        && (source_uid.is_none() || view.source_uid().as_deref() == source_uid)
                });
                let strip = strip_for(role);
                let data =
                    at_hand.and_then(|(_, bytes)| payload(bytes, strip, None).ok()).unwrap_or_else(|| {
                        tombstone(&namespace, &key.name, &gone.uid, gone.source_uid.as_deref())
                    });
                Some(Draft {
                    target,
                    r#type: Type::Delete,
                    event_id: event_id(&key.name, &gone.uid, &gone.resource_version, &data),
                    resource_id: resource_id(&key.name, &gone.uid),
                    subject: true,
                    principal_uid: true,
                    data,
                    level,
                })
            }
            Want::Exists | Want::Operation | Want::Terminate | Want::Status => {
                let (view, bytes) = body?;
                let present = slot.observed.present()?;
                if *present.uid != *view.uid
                    || !present.routed
                    || (want == Want::Status && present.source_uid.is_none())
                {
                    return None;
                }
                let mut strip = strip_for(role);
                let (level, operation) = match want {
                    Want::Exists => (present.shape, None),
                    Want::Operation => (0, Some(slot.out.operation.clone()?)),
                    Want::Status => (present.report, None),
                    _ => (0, None),
                };
                let r#type = match want {
                    Want::Operation => Type::SetOperation,
                    Want::Terminate => Type::TerminateOperation,
                    Want::Status => {
                        // A Go principal may have cleared it, and would take our telling it for a user's new request.
                        strip.operation = is_go && present.operation == slot.hub_operation;
                        Type::StatusUpdate
                    }
                    _ => {
                        strip.operation = true;
                        strip.refresh = !slot.out.refresh;
                        let is_known = slot.out.known_as.iter().any(|uid| **uid == *view.uid);
                        if !is_known {
                            slot.out.confirmed = false;
                            if slot.out.known_as.len() >= KNOWN_MAX {
                                slot.out.known_as.remove(0);
                            }
                            slot.out.known_as.push((&*view.uid).into());
                        }
                        // A Go agent acknowledges a create that it drops, as while the former object still ends. Of other kinds no
                        // status ever tells.
                        let unconfirmed = is_go && key.kind == Kind::Application && !slot.out.confirmed;
                        if unconfirmed && !slot.out.unconfirmed {
                            slot.out.repeated = 0;
                        }
                        slot.out.unconfirmed = unconfirmed;
                        if is_known && slot.out.acked != 0 { Type::SpecUpdate } else { Type::Create }
                    }
                };
                if want == Want::Operation {
                    strip.refresh = true;
                }
                let level = operation.as_ref().map_or(level, |latch| latch.print());
                let said = as_site_gets_it(&self.config, key.kind, bytes);
                let operation_bytes = operation.as_ref().map(|latch| &*latch.operation);
                let said = said.and_then(|said| {
                    if *namespace == *key.namespace {
                        return Ok(said);
                    }
                    in_namespace(&said, &namespace).map(Cow::Owned)
                });
                let data = match said.and_then(|said| payload(&said, strip, operation_bytes)) {
                    Ok(data) => data,
                    Err(_) => {
                        self.note(Note::BadObject { key, reason: "it has no readable body".into() });
                        return None;
                    }
                };
                Some(Draft {
                    target,
                    r#type,
                    event_id: match &operation {
                        Some(latch) => {
                            event_id(&view.name, &view.uid, &latch.resource_version, &latch.operation)
                        }
                        None => event_id(&view.name, &view.uid, &view.resource_version, &data),
                    },
                    resource_id: resource_id(&view.name, &view.uid),
                    subject: true,
                    principal_uid: role == Role::Principal && want != Want::Operation,
                    data,
                    level,
                })
            }
            Want::Verify => {
                let blind = slot.out.verify_blind || matches!(slot.observed, Observed::Absent);
                let checked = body.filter(|_| !blind).and_then(|(_, bytes)| {
                    let mut body =
                        RequestUpdate::of_object(key.kind.as_str(), Subtree::of(key.kind), bytes, &namespace)
                            .ok()?;
                    // A local edit may have removed the mark that tells where the hub has it.
                    body.resource.namespace = (&*namespace).into();
                    Some(body)
                });
                // Without a checksum the answer is the whole object, which is what a copy without a source needs too.
                let body = checked.unwrap_or_else(|| RequestUpdate {
                    resource: synced_resource(&key, &namespace, slot.local_source().unwrap_or_default()),
                    checksum: None,
                });
                let body = body.encode();
                Some(Draft { level: if blind { BLIND } else { 0 }, ..control(Type::RequestUpdate, body) })
            }
            Want::Report => {
                let present = slot.observed.known()?;
                let resource = synced_resource(&key, &key.namespace, &present.uid);
                Some(control(Type::ResponseSyncedResource, resource.encode()))
            }
            Want::Error => {
                let message = slot.out.error.as_deref()?;
                let data = ErrorBody {
                    resource_name: (&*key.name).into(),
                    resource_namespace: (&*key.namespace).into(),
                    message: message.into(),
                }
                .encode();
                Some(Draft { target, ..control(Type::Error, data) })
            }
        }
    }

    /// The next event for the stream, asked for only when it can take `room` bytes.
    pub fn poll_transmit(&mut self, now: Instant, room: usize) -> Option<Vec<u8>> {
        self.peer.as_ref()?;
        if let Some(frame) = self.outbox.acks.pop_front() {
            self.counters.sent += 1;
            return Some(frame);
        }
        if self.is_synced()
            && let Some(frame) = self.control_frame(now)
        {
            self.counters.sent += 1;
            return Some(frame);
        }
        let Some((id, frame)) = self.outbox.pop_ready(room) else { return self.cluster_info_frame(now) };
        let attempts = self.slot(id).out.attempts;
        let patience = self.outbox.patience(attempts, &mut self.rng);
        let slot = self.slot(id);
        if let Stage::Ready(flight) = core::mem::take(&mut slot.out.stage) {
            let flight = InFlight { sent_at: now, due: now + patience, ..flight };
            let (event, due) = (flight.event, flight.due);
            slot.out.stage = Stage::Sent(flight);
            self.outbox.index.insert(event, Owner::Slot(id));
            self.timers.insert((due, id));
        }
        self.counters.sent += 1;
        Some(frame)
    }

    fn control_frame(&mut self, now: Instant) -> Option<Vec<u8>> {
        let control = [Control::List, Control::Resync, Control::Digest]
            .into_iter()
            .find(|control| self.outbox.controls[*control as usize] == ControlStage::Wanted)?;
        let (r#type, data) = match control {
            Control::List => {
                let checksum = self.list_checksum().map(|sum| sum.to_vec());
                (Type::RequestSyncedResourceList, SyncedResourceList { checksum }.encode())
            }
            Control::Digest => (Type::ResyncDigest, self.digest().encode()),
            _ => (Type::RequestResourceResync, RESOURCE_RESYNC_BODY.to_vec()),
        };
        Some(self.send_control(now, control, Target::ResourceResync, r#type, &data, 1))
    }

    /// The frame of a message about no object; it is in flight from now on.
    pub(super) fn send_control(
        &mut self,
        now: Instant,
        control: Control,
        target: Target,
        r#type: Type,
        data: &[u8],
        attempts: u32,
    ) -> Vec<u8> {
        let id = self.rng.uuid();
        let sent_at = self.wall.rfc3339(now);
        let mut frame = Vec::with_capacity(data.len() + 512);
        EventWriter {
            source: self.source(),
            r#type: r#type.as_str(),
            target,
            subject: None,
            event_id: &id,
            resource_id: &id,
            sent_at: Some(&sent_at),
            principal_uid: None,
            data,
        }
        .encode(&mut frame);
        let event = event_print(&id);
        let due = now + self.outbox.patience(attempts, &mut self.rng);
        self.outbox.index.insert(event, Owner::Control(control));
        self.outbox.controls[control as usize] = ControlStage::Sent { event, due };
        frame
    }

    /// The checksum over everything that this side tracks for the peer; `None`: nothing.
    pub(super) fn list_checksum(&self) -> Option<Checksum> {
        list_checksum(self.iter().filter_map(|(key, slot)| {
            let present = slot.observed.known()?;
            let source = slot.known_source();
            if !present.routed || (self.config.ignore_unmanaged && source.is_none()) {
                return None;
            }
            Some((key.kind.as_str(), &*key.name, source.unwrap_or(&present.uid)))
        }))
    }

    pub(super) fn tell_all_statuses(&mut self) {
        for id in self.ids_where(|slot| slot.key.kind == Kind::Application && slot.known_source().is_some()) {
            self.slot(id).out.acked = 0;
            self.want(id, Want::Status);
        }
    }

    /// An acknowledgement settled what was in flight.
    pub(super) fn delivered(&mut self, now: Instant, id: SlotId, flight: &InFlight) {
        let slot = self.slot(id);
        slot.out.acked_at = Some(now);
        match flight.want {
            Want::Exists => {
                slot.out.on_site = true;
                slot.out.acked = flight.level;
                slot.out.refused = false;
                if flight.refresh {
                    slot.out.refresh = false;
                }
                let latest = slot.out.known_as.pop();
                slot.out.known_as.clear();
                slot.out.known_as.extend(latest);
                if slot.out.unconfirmed {
                    // What the agent takes for the site's own it never takes, and says nothing.
                    let doublings = slot.out.repeated.saturating_sub(UNCONFIRMED_SOON).min(16);
                    slot.out.repeated = slot.out.repeated.saturating_add(1);
                    let patience = self.outbox.patience(2, &mut self.rng).saturating_mul(1 << doublings);
                    let at = now + patience.min(UNCONFIRMED_MAX);
                    self.slot(id).out.confirm_at = Some(at);
                    self.timers.insert((at, id));
                }
                self.level_check(id);
            }
            Want::Status => {
                slot.out.acked = flight.level;
                self.level_check(id);
            }
            Want::Gone => {
                // Another end may have come meanwhile, which is told next.
                let told = slot.out.gone.take_if(|gone| gone.print() == flight.level);
                if let Some(gone) = told {
                    slot.out.known_as.retain(|uid| *uid != gone.uid);
                    slot.out.on_site &= !slot.out.known_as.is_empty();
                    slot.out.acked = 0;
                    if slot.is_wanted() {
                        // It came back while its end was on the way.
                        self.level_check(id);
                    } else if !matches!(slot.observed, Observed::Unknown(_)) && !gone.synthetic {
                        self.tell_gone(id, &gone.resource_version, None);
                    }
                }
            }
            Want::Operation => {
                let same = slot.out.operation.as_ref().is_some_and(|latch| latch.print() == flight.level);
                if same && let Some(latch) = slot.out.operation.take() {
                    // Our agents tell the status once more after this acknowledgement.
                    if latch.over && self.peer_is_go() {
                        self.slot(id).stale_operation = crate::checksum::fingerprint(&latch.operation);
                        self.queue(id);
                    }
                }
            }
            Want::Error => {
                slot.out.error = None;
                // The report stands in place of the status on the hub; once nothing is refused any more the status is told again.
                slot.out.acked = 0;
                if slot.word.is_none() {
                    self.timers.insert((now + ERROR_STANDS, id));
                }
            }
            Want::Verify if flight.level == BLIND => slot.out.verify_blind = false,
            Want::Verify | Want::Terminate | Want::Report => {}
        }
    }

    /// If the object is not what the peer acknowledged or is being told, it is to be told.
    pub(super) fn level_check(&mut self, id: SlotId) {
        let role = self.config.role;
        let slot = self.slot(id);
        let Some(present) = slot.observed.present() else { return };
        let (want, level) = match role {
            Role::Agent
                if slot.key.kind != Kind::Application || present.source_uid.is_none() || present.ignored =>
            {
                return;
            }
            Role::Agent => (Want::Status, present.report),
            Role::Principal if !present.routed => return,
            Role::Principal => (Want::Exists, present.shape),
        };
        let told = match slot.out.in_hand() {
            Some(flight) if flight.want == want => flight.level,
            _ => slot.out.acked,
        };
        if told != level {
            self.want(id, want);
        }
    }

    /// Towards a Go agent: repeats an acknowledged create until a status carries the new UID.
    pub(super) fn confirm_identity(&mut self, now: Instant, id: SlotId) {
        let Some(slot) = self.slots[id as usize].as_mut() else { return };
        if slot.out.unconfirmed
            && matches!(slot.out.stage, Stage::Idle)
            && slot.out.confirm_at.take_if(|at| *at <= now).is_some()
        {
            slot.out.acked = 0;
            self.want(id, Want::Exists);
        }
    }

    /// The object is gone for every UID under which the peer may know it, one after the other.
    pub(super) fn tell_gone(&mut self, id: SlotId, version: &str, source_uid: Option<&str>) {
        let slot = self.slot(id);
        let Some(uid) = slot.out.known_as.first().cloned() else { return };
        if slot
            .out
            .gone
            .as_ref()
            .is_some_and(|gone| gone.uid == uid && gone.source_uid.as_deref() == source_uid)
        {
            // It is being told already, with what was known then.
            return;
        }
        let version = if version.is_empty() { "0" } else { version };
        slot.out.gone = Some(Box::new(super::outbox::Gone {
            uid,
            resource_version: version.into(),
            source_uid: source_uid.map(Into::into),
            synthetic: false,
        }));
        self.want(id, Want::Gone);
    }
}

const fn strip_for(role: Role) -> Strip {
    Strip {
        operation: false,
        // A Go agent discards an update whose number equals one of its own writes.
        resource_version: matches!(role, Role::Principal),
        refresh: false,
    }
}

fn synced_resource<'a>(key: &'a Key, namespace: &'a str, uid: &'a str) -> SyncedResource<'a> {
    SyncedResource {
        name: (&*key.name).into(),
        namespace: namespace.into(),
        uid: uid.into(),
        kind: key.kind.as_str().into(),
    }
}

/// A create that nothing confirms is repeated so often before the waits grow, and how long they get.
const UNCONFIRMED_SOON: u32 = 5;
const UNCONFIRMED_MAX: Duration = Duration::from_secs(3600);
/// A refusal that does not last is shown on the hub for this long.
const ERROR_STANDS: Duration = Duration::from_secs(60);
/// Level of a comparison without a checksum.
const BLIND: u64 = 1;
