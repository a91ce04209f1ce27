//! The machine: slots, outbox, and the verbs that change them.
//!
//! One [`Core`] is one half of one pair: an agent has one, a principal one per agent. For every object there is a slot with what the
//! API server last said (`observed`) and what the peer last said (`word`), and one function per role, `next`, that names the one
//! request to make now. Every outcome only updates `observed` and asks `next` again (docs/core.md).

mod config;
mod hub;
mod note;
mod outbox;
mod receive;
mod send;
mod site;
mod slot;
#[cfg(test)]
mod tests;

use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::string::String;
use alloc::vec::Vec;
use core::time::Duration;

pub use self::config::{AdoptionPolicy, Config, MismatchPolicy, ResyncDeleteLimit, Role};
pub use self::note::{Counters, Note};
pub use self::receive::ReceiveError;

use self::outbox::{Control, ControlStage, Outbox, Stage, Want};
use self::slot::{Ack, Applies, Asked, Observed, Present, Purpose, Slot, SlotId, newer};
use crate::checksum::fingerprint;
use crate::object::ObjectView;
use crate::peer::Peer;
use crate::rand::Rng;
use crate::request::{Key, Kind, Observation, Outcome, Request, Status, Ticket, Verb};
use crate::time::{Instant, Wall};

/// One half of one principal-agent pair.
#[derive(Debug)]
pub struct Core {
    config: Config,
    rng: Rng,
    wall: Wall,
    slots: Vec<Option<Slot>>,
    free: Vec<SlotId>,
    index: BTreeMap<Key, SlotId>,
    /// Slots for which `next` may have something to ask of the API server.
    work: VecDeque<SlotId>,
    /// Requests decided while their body was at hand.
    prepared: VecDeque<Request>,
    /// Requests made and not answered, prepared ones included.
    outstanding: usize,
    timers: BTreeSet<(Instant, SlotId)>,
    outbox: Outbox,
    /// The first list is complete.
    synced: bool,
    /// A (re)list is under way.
    listing: bool,
    peer: Option<PeerState>,
    /// The resync that a start of this process calls for has been asked for.
    resynced: bool,
    /// Principal instance whose resync deletes are being counted, and how many were let through.
    resync_deletes: (Box<str>, usize),
    sweep_at: Option<Instant>,
    generation: u32,
    serial: u32,
    notes: VecDeque<Note>,
    counters: Counters,
}

#[derive(Debug)]
struct PeerState {
    is_go: bool,
}

/// What `next` decided for a slot.
#[derive(Debug)]
enum Step {
    /// Nothing to do, or nothing until another fact arrives.
    Idle,
    /// The object must be read first.
    Read,
    /// This write.
    Write(Purpose, Verb),
}

/// What [`Core::snapshot`] tells of one managed object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// The object.
    pub key: Key,
    /// Something is owed to the peer or to the API server.
    pub pending: bool,
    /// The API server refused the peer's last word.
    pub refused: bool,
}

impl Core {
    /// A core that knows nothing yet. Same arguments and same facts: same requests and frames.
    pub fn new(config: Config, rng: Rng, wall: Wall) -> Self {
        let outbox = Outbox::new(config.max_events, config.max_event_bytes);
        Self {
            config,
            rng,
            wall,
            slots: Vec::new(),
            free: Vec::new(),
            index: BTreeMap::new(),
            work: VecDeque::new(),
            prepared: VecDeque::new(),
            outstanding: 0,
            timers: BTreeSet::new(),
            outbox,
            synced: false,
            listing: false,
            peer: None,
            resynced: false,
            resync_deletes: (Box::default(), 0),
            sweep_at: None,
            generation: 0,
            serial: 0,
            notes: VecDeque::new(),
            counters: Counters::default(),
        }
    }

    /// The options.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// What happened so far.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Whether the first list is complete.
    pub fn is_synced(&self) -> bool {
        self.synced
    }

    /// Whether the event stream is open.
    pub fn is_connected(&self) -> bool {
        self.peer.is_some()
    }

    /// Number of objects known, and of entries that are owed to the peer.
    pub fn depth(&self) -> (usize, usize) {
        let owed = self.iter().filter(|(_, slot)| !slot.out.is_idle()).count();
        (self.index.len(), owed)
    }

    /// Whether nothing is owed to anybody: no request, no frame, no word of the peer waits.
    pub fn is_settled(&self) -> bool {
        self.outstanding == 0
            && self.outbox.acks.is_empty()
            && self.outbox.controls.iter().all(|control| *control == ControlStage::Idle)
            && self.iter().all(|(_, slot)| !is_pending(slot))
    }

    /// All objects in key order.
    pub fn snapshot(&self) -> impl Iterator<Item = Snapshot> + '_ {
        self.iter().map(|(key, slot)| Snapshot {
            key: key.clone(),
            pending: is_pending(slot),
            refused: slot.word.as_ref().is_some_and(|word| word.refused),
        })
    }

    fn iter(&self) -> impl Iterator<Item = (&Key, &Slot)> {
        self.index.iter().filter_map(|(key, id)| Some((key, self.slots[*id as usize].as_ref()?)))
    }

    /// The API server said so: a list item, a watch event.
    pub fn observe(&mut self, now: Instant, key: &Key, observation: Observation<'_>) {
        match observation {
            Observation::Present(bytes) => match ObjectView::parse(bytes) {
                Ok(view) => self.observe_present(now, key, &view, bytes),
                Err(error) => {
                    self.note(Note::BadObject { key: key.clone(), reason: alloc::format!("{error}") })
                }
            },
            Observation::Gone(bytes) => self.observe_gone(now, key, bytes),
        }
    }

    fn observe_present(&mut self, now: Instant, key: &Key, view: &ObjectView<'_>, bytes: &[u8]) {
        let id = self.slot_id(key);
        let slot = self.slot(id);
        slot.unlisted = false;
        if slot.gone_uid.as_deref() == Some(&*view.uid) {
            return;
        }
        let present = Present::new(view);
        if let Some(purpose) = slot.outstanding {
            slot.watch_spoke = true;
            if purpose != Purpose::Read {
                // The reply tells whether this is its echo or a change after it; until then nothing is decided on it.
                slot.spoke_version = Some(present.resource_version);
                return;
            }
        }
        if self.absorb(now, id, present, view, false) {
            self.act(now, id, Some((view, bytes)));
        }
        self.reap(id);
    }

    fn observe_gone(&mut self, now: Instant, key: &Key, bytes: &[u8]) {
        let Some(&id) = self.index.get(key) else { return };
        let view = ObjectView::parse(bytes).ok();
        let slot = self.slot(id);
        slot.unlisted = false;
        if let Some(view) = &view
            && slot.gone_uid.as_deref() == Some(&*view.uid)
        {
            slot.gone_uid = None;
            self.reap(id);
            return;
        }
        if let Some(current) = slot.observed.present() {
            let stale = view.as_ref().is_some_and(|view| {
                *view.uid != *current.uid && !newer(&view.resource_version, &current.resource_version)
            });
            if stale {
                return;
            }
        }
        slot.watch_spoke = true;
        slot.spoke_version = None;
        if slot.outstanding.is_some_and(|purpose| purpose != Purpose::Read) {
            // A write is on its way: its answer is read against an unknown state, and a 404 or a reply settles it.
            slot.gone_during_write = true;
        }
        let version = view.as_ref().map(|view| Box::from(&*view.resource_version));
        self.absent(now, id, view.as_ref().map(|view| (view, bytes)), version);
        self.act(now, id, view.as_ref().map(|view| (view, bytes)));
        self.reap(id);
    }

    /// A list or relist began: objects that it does not bring are confirmed by a read, never taken for deleted.
    pub fn list_started(&mut self, _kind: Kind) {
        self.listing = true;
        for slot in self.slots.iter_mut().flatten() {
            slot.unlisted = matches!(slot.observed, Observed::Present(_));
            slot.gone_before_list = slot.gone_uid.is_some();
        }
    }

    /// The list is complete.
    pub fn synced(&mut self, now: Instant, _kind: Kind) {
        self.listing = false;
        for id in self.ids_where(|slot| slot.gone_before_list) {
            let slot = self.slot(id);
            slot.gone_before_list = false;
            slot.gone_uid = None;
            self.reap(id);
        }
        let missing: Vec<SlotId> = self.ids_where(|slot| slot.unlisted);
        for id in missing {
            self.queue(id);
        }
        if !self.synced {
            self.synced = true;
            self.sweep_at = Some(now + self.config.status_interval / 4);
            if self.peer.is_some() {
                self.start_resync();
            }
        }
    }

    /// A Kubernetes request ended. An answer with a stale ticket is dropped and counted.
    pub fn complete(&mut self, now: Instant, ticket: Ticket, outcome: Outcome) {
        let id = ticket.slot;
        let slot = self.slots.get_mut(id as usize).and_then(Option::as_mut);
        let Some(slot) = slot.filter(|slot| slot.generation == ticket.generation) else {
            self.counters.stale_answers += 1;
            return;
        };
        let Some(purpose) = slot.outstanding.take() else {
            self.counters.stale_answers += 1;
            return;
        };
        self.outstanding -= 1;
        match outcome {
            Outcome::Done(bytes) => self.succeeded(now, id, purpose, &bytes),
            Outcome::Status(status) => self.failed(now, id, purpose, status),
            Outcome::Unknown(reason) => {
                if purpose != Purpose::Read {
                    self.slot(id).doubt();
                }
                self.trouble(now, id, reason, None);
            }
        }
        self.reap(id);
    }

    fn succeeded(&mut self, now: Instant, id: SlotId, purpose: Purpose, bytes: &[u8]) {
        let slot = self.slot(id);
        if purpose != Purpose::Read
            || (slot.word.is_none() && slot.operation.is_none() && slot.terminate.is_none())
        {
            slot.failures = 0;
        }
        slot.unlisted = false;
        let spoke = slot.spoke_version.take();
        let gone = core::mem::take(&mut slot.gone_during_write);
        let view = match ObjectView::parse(bytes) {
            // A DELETE may be answered by a Status instead of the object.
            Ok(view) if !view.uid.is_empty() => view,
            Ok(_) | Err(_) if purpose == Purpose::Delete => {
                self.delete_stands(id);
                self.deleted_now(now, id);
                return;
            }
            Ok(_) | Err(_) => {
                let key = slot.key.clone();
                slot.doubt();
                self.note(Note::BadObject {
                    key,
                    reason: "the API server's answer is not the object".into(),
                });
                self.trouble(now, id, "unreadable answer".into(), None);
                return;
            }
        };
        let present = Present::new(&view);
        let version = present.resource_version.clone();
        match purpose {
            Purpose::Read => {
                let reading = matches!(slot.out.stage, Stage::Reading);
                if reading {
                    slot.out.stage = Stage::Idle;
                    self.outbox.places -= 1;
                }
                let slot = self.slot(id);
                if slot.watch_spoke && matches!(slot.observed, Observed::Absent) {
                    // It ended while the answer was on its way: this may be from before.
                    slot.must_read = true;
                    self.queue(id);
                    self.act(now, id, None);
                    return;
                }
                if !self.absorb(now, id, present, &view, false) {
                    // The watch has overtaken this answer: its body is not what is known.
                    self.queue(id);
                    self.act(now, id, None);
                    return;
                }
                if reading {
                    // It was read for the peer and had its turn: queueing again would read again.
                    self.act_for_peer(now, id, (&view, bytes));
                } else {
                    self.act(now, id, Some((&view, bytes)));
                }
                return;
            }
            Purpose::Delete => {
                self.delete_stands(id);
                // Deletion is under way (finalizers), or this was its last state.
                if gone {
                    return self.act(now, id, None);
                }
                if view.deletion_timestamp.is_some() && view.finalizers.is_some_and(|list| list != b"[]") {
                    self.absorb(now, id, present, &view, true);
                    self.act(now, id, Some((&view, bytes)));
                } else {
                    self.deleted_now(now, id);
                }
                return;
            }
            Purpose::Create | Purpose::Write(_) => {}
        }
        if gone {
            // It was written and then deleted; the absence is known already, but whose reply is older is not.
            self.slot(id).doubt();
            self.queue(id);
            return;
        }
        self.absorb(now, id, present, &view, true);
        self.written(now, id, purpose, &view);
        if spoke.is_some_and(|spoke| newer(&spoke, &version)) {
            // Somebody changed it after us; the event's body is gone, so read.
            self.slot(id).must_read = true;
            self.queue(id);
        }
        self.act(now, id, Some((&view, bytes)));
    }

    /// A write stands: the word it carried out is acknowledged.
    fn written(&mut self, now: Instant, id: SlotId, purpose: Purpose, view: &ObjectView<'_>) {
        match self.config.role {
            Role::Agent => self.site_written(now, id, purpose, view),
            Role::Principal => self.hub_written(id, purpose),
        }
    }

    fn deleted_now(&mut self, now: Instant, id: SlotId) {
        self.absent(now, id, None, None);
        self.act(now, id, None);
    }

    fn failed(&mut self, now: Instant, id: SlotId, purpose: Purpose, status: Status) {
        let slot = self.slot(id);
        slot.gone_during_write = false;
        slot.spoke_version = None;
        if (400..500).contains(&status.code) && status.code != 408 {
            self.forget_maybe(id);
        }
        match (purpose, status.code) {
            (Purpose::Read, 404) => {
                let slot = self.slot(id);
                slot.unlisted = false;
                slot.must_read = false;
                if matches!(slot.out.stage, Stage::Reading) {
                    slot.out.stage = Stage::Idle;
                    self.outbox.places -= 1;
                }
                // The watch may have brought a creation that this answer does not know yet.
                let slot = self.slot(id);
                if slot.watch_spoke && matches!(slot.observed, Observed::Present(_)) {
                    slot.must_read = true;
                } else {
                    self.absent(now, id, None, None);
                }
                self.act(now, id, None);
            }
            (Purpose::Create, 409) | (Purpose::Write(_) | Purpose::Delete, 404 | 409) => {
                // Somebody was faster. Read and decide again; a hot loop is cut by the back-off.
                self.counters.conflicts += 1;
                let slot = self.slot(id);
                slot.doubt();
                slot.failures += 1;
                if slot.failures > CONFLICTS_BEFORE_BACKOFF {
                    self.trouble(now, id, "changed by others at every attempt".into(), None);
                } else {
                    self.queue(id);
                }
            }
            (Purpose::Create | Purpose::Write(_) | Purpose::Delete, 400..=428 | 430..=499)
                if status.code != 401 && status.code != 408 && !is_quota(&status) =>
            {
                self.refused(now, id, purpose, status);
            }
            _ => {
                if purpose != Purpose::Read {
                    self.slot(id).doubt();
                }
                let reason =
                    alloc::format!("API server: {} {} {}", status.code, status.reason, status.message);
                self.trouble(now, id, reason, status.retry_after);
            }
        }
    }

    /// The API server will not have it: acknowledge, say so, and try again rarely.
    fn refused(&mut self, now: Instant, id: SlotId, purpose: Purpose, status: Status) {
        self.counters.refused += 1;
        let failures = self.slot(id).failures;
        let delay = retry_delay(&mut self.rng, failures, REFUSED_RETRY_MIN, REFUSED_RETRY_MAX);
        let slot = self.slot(id);
        slot.failures = slot.failures.saturating_add(1);
        slot.doubt();
        let key = slot.key.clone();
        let reason: Box<str> = if status.message.is_empty() {
            alloc::format!("{} {}", status.code, status.reason).into()
        } else {
            status.message.as_str().into()
        };
        let applying = slot.applying;
        let ack = match purpose {
            Purpose::Write(Applies::Operation) => take_asked(&mut slot.operation),
            Purpose::Write(Applies::Terminate) => take_asked(&mut slot.terminate),
            Purpose::Write(Applies::Revert) | Purpose::Read => None,
            Purpose::Create | Purpose::Write(Applies::Word) | Purpose::Delete => {
                slot.word.as_mut().filter(|word| word.serial == applying).and_then(|word| {
                    word.refused = true;
                    word.ack.take()
                })
            }
        };
        self.give(ack);
        if self.config.role == Role::Agent && purpose != Purpose::Write(Applies::Revert) {
            self.slot(id).out.error = Some(reason);
            self.want(id, Want::Error);
        }
        self.retry(now, id, delay);
        self.note(Note::Refused { key, status, retry: delay });
        self.offer(now, id, None);
    }

    fn trouble(&mut self, now: Instant, id: SlotId, reason: String, retry_after: Option<Duration>) {
        self.counters.trouble += 1;
        let failures = self.slot(id).failures;
        let mut delay = retry_delay(&mut self.rng, failures, TROUBLE_RETRY_MIN, TROUBLE_RETRY_MAX);
        if let Some(after) = retry_after {
            delay = delay.max(after.min(TROUBLE_RETRY_MAX));
        }
        let slot = self.slot(id);
        slot.failures = slot.failures.saturating_add(1);
        let key = slot.key.clone();
        let resting = matches!(slot.out.stage, Stage::Reading);
        if resting {
            slot.out.stage = Stage::Resting(now + delay);
            self.outbox.places -= 1;
        }
        self.retry(now, id, delay);
        self.note(Note::Trouble { key, reason, retry: delay });
    }

    fn retry(&mut self, now: Instant, id: SlotId, delay: Duration) {
        let at = now + delay;
        self.slot(id).retry_at = Some(at);
        self.timers.insert((at, id));
    }

    /// Takes in a state of the object; `false` if it is older than what is known.
    fn absorb(
        &mut self,
        now: Instant,
        id: SlotId,
        present: Present,
        view: &ObjectView<'_>,
        own_write: bool,
    ) -> bool {
        let slot = self.slot(id);
        if let Some(current) = slot.observed.present()
            && !present.is_newer_than(current)
        {
            if slot.must_read && present.resource_version == current.resource_version {
                slot.must_read = false;
            }
            return present.resource_version == current.resource_version;
        }
        if let Observed::Unknown(Some(last)) = &slot.observed
            && newer(&last.resource_version, &present.resource_version)
        {
            return false;
        }
        slot.must_read = false;
        let before = core::mem::replace(&mut slot.observed, Observed::Present(Box::new(present))).last();
        match self.config.role {
            Role::Agent => self.site_changed(now, id, before, view, own_write),
            Role::Principal => self.hub_changed(id, view, own_write),
        }
        true
    }

    /// The object does not exist (any more).
    fn absent(
        &mut self,
        now: Instant,
        id: SlotId,
        last: Option<(&ObjectView<'_>, &[u8])>,
        version: Option<Box<str>>,
    ) {
        let before = core::mem::replace(&mut self.slot(id).observed, Observed::Absent).last();
        let slot = self.slot(id);
        slot.must_read = false;
        if version.is_none()
            && let Some(before) = &before
        {
            slot.gone_uid = Some(before.uid.clone());
            slot.gone_before_list = false;
        }
        match self.config.role {
            Role::Agent => self.site_gone(now, id, before, last, version),
            Role::Principal => self.hub_gone(id, before, last, version),
        }
    }

    /// Asks `next` with the body at hand, and sends what the peer is owed about this object while the body is at hand.
    fn act(&mut self, now: Instant, id: SlotId, body: Option<(&ObjectView<'_>, &[u8])>) {
        self.decide(now, id, body);
        self.offer(now, id, body);
    }

    fn act_for_peer(&mut self, now: Instant, id: SlotId, body: (&ObjectView<'_>, &[u8])) {
        self.decide(now, id, Some(body));
        if self.peer.is_some()
            && let Some(Slot { out, outstanding: None, .. }) = &self.slots[id as usize]
            && matches!(out.stage, Stage::Idle | Stage::Queued)
            && let Some(want) = out.wants.next()
        {
            self.build(now, id, want, Some(body));
        } else {
            self.enqueue(id);
        }
    }

    fn decide(&mut self, now: Instant, id: SlotId, body: Option<(&ObjectView<'_>, &[u8])>) {
        if let Some((_, bytes)) = body
            && self.slot(id).compare.is_some()
            && !self.slot(id).must_read
        {
            self.compare(id, bytes);
        }
        if self.slot(id).outstanding.is_none() {
            match self.next(now, id, body.map(|(view, _)| view)) {
                Step::Write(purpose, verb) if self.outstanding < self.config.max_requests => {
                    let request = self.request(id, purpose, verb);
                    self.prepared.push_back(request);
                }
                Step::Write(..) | Step::Read => self.queue(id),
                Step::Idle => {}
            }
        }
    }

    /// What to ask of the API server about this object now.
    fn next(&mut self, now: Instant, id: SlotId, view: Option<&ObjectView<'_>>) -> Step {
        let listing = self.listing;
        let slot = self.slot(id);
        if slot.outstanding.is_some() || slot.retry_at.is_some_and(|at| at > now) {
            return Step::Idle;
        }
        slot.retry_at = None;
        if slot.must_read
            || (slot.unlisted && !listing)
            || (matches!(slot.observed, Observed::Unknown(_)) && (is_pending(slot) || slot.failures > 0))
        {
            return Step::Read;
        }
        match self.config.role {
            Role::Agent => self.next_on_site(now, id, view),
            Role::Principal => self.next_on_hub(now, id),
        }
    }

    /// The next Kubernetes request, if one is due and fewer than `max_requests` are outstanding.
    pub fn poll_request(&mut self, now: Instant) -> Option<Request> {
        if let Some(request) = self.prepared.pop_front() {
            return Some(request);
        }
        while self.outstanding < self.config.max_requests {
            let Some(id) = self.work.pop_front() else { break };
            let Some(slot) = self.slots[id as usize].as_mut() else { continue };
            slot.queued = false;
            match self.next(now, id, None) {
                Step::Idle => self.reap(id),
                Step::Read => return Some(self.request(id, Purpose::Read, Verb::Get)),
                Step::Write(purpose, verb) => return Some(self.request(id, purpose, verb)),
            }
        }
        if self.outstanding < self.config.max_requests {
            return self.read_for_peer(now);
        }
        None
    }

    fn request(&mut self, id: SlotId, purpose: Purpose, verb: Verb) -> Request {
        match &verb {
            Verb::Get => self.counters.reads += 1,
            Verb::Create(_) => self.counters.creates += 1,
            Verb::JsonPatch(_) => self.counters.patches += 1,
            Verb::Delete { .. } => self.counters.deletes += 1,
        }
        self.outstanding += 1;
        self.generation = self.generation.wrapping_add(1);
        let generation = self.generation;
        let slot = self.slot(id);
        slot.generation = generation;
        slot.outstanding = Some(purpose);
        slot.watch_spoke = false;
        slot.spoke_version = None;
        slot.gone_during_write = false;
        Request { ticket: Ticket { slot: id, generation }, key: slot.key.clone(), verb }
    }

    /// The event stream is open: who is there, what it can.
    pub fn connected(&mut self, now: Instant, peer: &Peer) {
        self.disconnected(now);
        self.peer = Some(PeerState { is_go: !peer.is_ours() });
        for id in self.ids_where(|slot| !slot.out.wants.is_empty()) {
            self.enqueue(id);
        }
        if self.synced {
            self.start_resync();
        }
    }

    /// The event stream ended: what was in flight goes again on the next one.
    pub fn disconnected(&mut self, _now: Instant) {
        self.peer = None;
        for slot in self.slots.iter_mut().flatten() {
            match core::mem::take(&mut slot.out.stage) {
                Stage::Ready(flight) | Stage::Sent(flight) => slot.out.wants.add(flight.want),
                Stage::Idle | Stage::Queued | Stage::Reading | Stage::Resting(_) => {}
            }
        }
        self.outbox.clear_stream();
        for control in &mut self.outbox.controls {
            if matches!(control, ControlStage::Sent { .. }) {
                *control = ControlStage::Wanted;
            }
        }
    }

    /// The next deadline has come, or may have: harmless at any time.
    pub fn handle_timeout(&mut self, now: Instant) {
        while let Some(&(at, id)) = self.timers.first() {
            if at > now {
                break;
            }
            self.timers.pop_first();
            self.slot_timeout(now, id);
        }
        for (index, control) in self.outbox.controls.iter_mut().enumerate() {
            if let ControlStage::Sent { event, due, .. } = *control
                && due <= now
            {
                let _ = index;
                self.outbox.index.remove(&event);
                self.counters.resent += 1;
                *control = ControlStage::Wanted;
            }
        }
        if self.sweep_at.is_some_and(|at| at <= now) {
            self.sweep(now);
        }
    }

    fn slot_timeout(&mut self, now: Instant, id: SlotId) {
        let Some(slot) = self.slots.get_mut(id as usize).and_then(Option::as_mut) else { return };
        let late = [
            slot.word.as_mut().map(|asked| &mut asked.ack),
            slot.operation.as_mut().map(|asked| &mut asked.ack),
            slot.terminate.as_mut().map(|asked| &mut asked.ack),
        ];
        let mut given = Vec::new();
        for ack in late.into_iter().flatten() {
            if ack.as_ref().is_some_and(|ack| ack.by <= now) {
                given.extend(ack.take());
            }
        }
        let retry = slot.retry_at.is_some_and(|at| at <= now);
        match &slot.out.stage {
            Stage::Resting(at) if *at <= now => {
                slot.out.stage = Stage::Idle;
                self.enqueue(id);
            }
            Stage::Sent(flight) if flight.due <= now => {
                let flight = flight.clone();
                slot.out.stage = Stage::Idle;
                slot.out.wants.add(flight.want);
                slot.out.attempts = slot.out.attempts.saturating_add(1);
                self.outbox.index.remove(&flight.event);
                self.outbox.places -= 1;
                self.outbox.bytes -= flight.size;
                self.counters.resent += 1;
                self.enqueue(id);
            }
            _ => {}
        }
        for ack in given {
            self.counters.late_acks += 1;
            self.give(Some(ack));
        }
        if retry {
            // A refused word is tried again; a held one waits for a person.
            if let Some(asked) = &mut self.slot(id).word {
                asked.refused = asked.refused && asked.what.is_held();
            }
            self.queue(id);
        }
        self.enqueue(id);
        if self.config.role == Role::Agent && self.slot(id).word.is_none() {
            self.level_check(id);
        }
        self.confirm_identity(now, id);
        self.reap(id);
    }

    /// Statuses that were told long ago are told again, spread over the interval.
    fn sweep(&mut self, now: Instant) {
        let interval = self.config.status_interval;
        self.sweep_at = Some(now + interval / 4);
        if self.config.role != Role::Agent {
            return;
        }
        let old =
            self.ids_where(|slot| slot.out.acked_at.is_some_and(|at| now.saturating_since(at) >= interval));
        for id in old {
            self.slot(id).out.acked = 0;
            self.want(id, Want::Status);
        }
    }

    /// The one deadline; `None`: sleep until the next fact.
    pub fn poll_timeout(&self) -> Option<Instant> {
        let controls = self.outbox.controls.iter().filter_map(|control| match control {
            ControlStage::Sent { due, .. } => Some(*due),
            _ => None,
        });
        self.timers.first().map(|(at, _)| *at).into_iter().chain(controls).chain(self.sweep_at).min()
    }

    /// The next thing a person should know.
    pub fn poll_note(&mut self) -> Option<Note> {
        self.notes.pop_front()
    }

    fn note(&mut self, note: Note) {
        if self.notes.len() >= NOTES_MAX {
            self.counters.notes_dropped += 1;
        } else {
            self.notes.push_back(note);
        }
    }

    /// Once per process and pair: compare everything, also what changed while nobody watched.
    fn start_resync(&mut self) {
        if self.resynced {
            return;
        }
        self.resynced = true;
        self.counters.resyncs += 1;
        match self.config.role {
            Role::Agent => {
                self.verify_all();
                self.outbox.controls[Control::List as usize] = ControlStage::Wanted;
            }
            Role::Principal => self.outbox.controls[Control::Resync as usize] = ControlStage::Wanted,
        }
    }

    fn verify_all(&mut self) {
        let asks = |slot: &Slot| slot.operation.as_ref().is_some_and(|asked| asked.what.hub_asked);
        for id in self.ids_where(|slot| slot.is_from_hub() || asks(slot)) {
            self.want(id, Want::Verify);
        }
    }

    fn slot(&mut self, id: SlotId) -> &mut Slot {
        // Ids come from `index`, `work`, `timers` and tickets, all checked or created together with the slot.
        match &mut self.slots[id as usize] {
            Some(slot) => slot,
            None => unreachable!("slot {id} is free"),
        }
    }

    fn slot_id(&mut self, key: &Key) -> SlotId {
        if let Some(id) = self.index.get(key) {
            return *id;
        }
        let mut slot = Slot::new(key.clone());
        if self.synced && !self.listing {
            // The list was complete and the watch has not brought it.
            slot.observed = Observed::Absent;
        }
        let id = match self.free.pop() {
            Some(id) => {
                self.slots[id as usize] = Some(slot);
                id
            }
            None => {
                self.slots.push(Some(slot));
                (self.slots.len() - 1) as SlotId
            }
        };
        self.index.insert(key.clone(), id);
        id
    }

    fn ids_where(&self, test: impl Fn(&Slot) -> bool) -> Vec<SlotId> {
        self.index
            .values()
            .copied()
            .filter(|id| self.slots[*id as usize].as_ref().is_some_and(&test))
            .collect()
    }

    /// Forgets a slot from which nothing is left to do.
    fn reap(&mut self, id: SlotId) {
        let Some(slot) = self.slots[id as usize].as_ref() else { return };
        if slot.is_empty() && !slot.queued {
            let key = slot.key.clone();
            if let Some(at) = slot.retry_at {
                self.timers.remove(&(at, id));
            }
            self.slots[id as usize] = None;
            self.index.remove(&key);
            self.free.push(id);
        }
    }

    fn queue(&mut self, id: SlotId) {
        let slot = self.slot(id);
        if !slot.queued {
            slot.queued = true;
            self.work.push_back(id);
        }
    }

    fn next_serial(&mut self) -> u32 {
        self.serial = self.serial.wrapping_add(1);
        self.serial
    }

    fn give(&mut self, ack: Option<Ack>) {
        if let Some(ack) = ack
            && self.peer.is_some()
        {
            self.outbox.acks.push_back(ack.frame);
        }
    }
}

/// The resource-quota answers that time may mend.
fn is_quota(status: &Status) -> bool {
    status.code == 403 && status.message.contains("exceeded quota")
}

fn take_asked<T>(asked: &mut Option<Asked<T>>) -> Option<Ack> {
    asked.take().and_then(|asked| asked.ack)
}

fn is_pending(slot: &Slot) -> bool {
    slot.outstanding.is_some()
        || slot.word.as_ref().is_some_and(|word| !word.refused)
        || slot.operation.is_some()
        || slot.terminate.is_some()
        || slot.recreate.is_some()
        || slot.compare.is_some()
        || slot.stale_operation != 0
        || slot.must_read
        || !slot.out.is_idle()
}

fn event_print(event_id: &str) -> u64 {
    fingerprint(event_id.as_bytes())
}

fn retry_delay(rng: &mut Rng, failures: u32, min: Duration, max: Duration) -> Duration {
    let ceiling = min.saturating_mul(1 << failures.min(16)).min(max);
    rng.between(ceiling / 2, ceiling)
}

/// Lost races in a row before the back-off starts; each costs one read.
const CONFLICTS_BEFORE_BACKOFF: u32 = 4;
/// Our own API server is in trouble: first and longest wait.
const TROUBLE_RETRY_MIN: Duration = Duration::from_secs(1);
const TROUBLE_RETRY_MAX: Duration = Duration::from_secs(300);
/// It refuses the object: a schema or a permission changes rarely.
const REFUSED_RETRY_MIN: Duration = Duration::from_secs(30);
const REFUSED_RETRY_MAX: Duration = Duration::from_secs(600);
/// Trouble of our own API server withholds an acknowledgement for at most this long.
const ACK_WITHHELD_MAX: Duration = Duration::from_secs(30);
/// Notes kept for a shell that does not fetch them.
const NOTES_MAX: usize = 256;
