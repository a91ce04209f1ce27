//! The machine: slots, outbox, and the verbs that change them.
//!
//! One [`Core`] is one half of one pair: an agent has one, a principal one per agent. For every object there is a slot with what the
//! API server last said (`observed`) and what the peer last said (`word`), and one function per role, `next`, that names the one
//! request to make now. Every outcome only updates `observed` and asks `next` again (docs/core.md).

mod cluster;
mod config;
mod heartbeat;
mod hub;
mod note;
mod observe;
mod outbox;
mod receive;
mod round;
mod send;
mod site;
mod slot;
#[cfg(test)]
mod tests;

use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::vec::Vec;
use core::time::Duration;

pub use self::config::{AdoptionPolicy, Config, MismatchPolicy, ResyncDeleteLimit, Role};
pub use self::note::{Counters, Note};
pub use self::receive::ReceiveError;

use self::cluster::Cluster;
use self::outbox::{Control, ControlStage, Outbox, Stage, Want};
use self::round::Rounds;
use self::slot::{Ack, Asked, Observed, Purpose, Slot, SlotId};
use crate::checksum::fingerprint;
use crate::object::ObjectView;
use crate::peer::{Capability, Peer};
use crate::rand::Rng;
use crate::request::{Key, Kind, Kinds, Request, Ticket, Verb};
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
    cluster: Cluster,
    /// Kinds of which the first list is complete.
    synced: Kinds,
    /// Kinds of which a (re)list is under way.
    listing: Kinds,
    peer: Option<PeerState>,
    /// Namespace of the peer's Argo CD, as it said last; empty: not known yet.
    peer_namespace: Box<str>,
    /// The resync that a start of this process calls for has been asked for.
    resynced: bool,
    /// Principal instance whose resync deletes are being counted, and how many of each kind were let through.
    resync_deletes: (Box<str>, [usize; Kind::ALL.len()]),
    sweep_at: Option<Instant>,
    rounds: Rounds,
    heartbeat_at: Option<Instant>,
    generation: u32,
    serial: u32,
    notes: VecDeque<Note>,
    counters: Counters,
}

#[derive(Debug)]
struct PeerState {
    is_go: bool,
    /// It settles a round by one digest.
    has_digest: bool,
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
            cluster: Cluster::default(),
            synced: Kinds::default(),
            listing: Kinds::default(),
            peer: None,
            peer_namespace: Box::default(),
            resynced: false,
            resync_deletes: (Box::default(), [0; Kind::ALL.len()]),
            sweep_at: None,
            rounds: Rounds::default(),
            heartbeat_at: None,
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

    /// Whether the first list of every kind is complete.
    pub fn is_synced(&self) -> bool {
        self.synced.is_all()
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

    /// Whether nothing is owed to anybody: no request, no frame, no word of the peer waits, not even for another attempt.
    pub fn is_settled(&self) -> bool {
        self.outstanding == 0
            && self.outbox.acks.is_empty()
            && self.outbox.controls.iter().all(|control| *control == ControlStage::Idle)
            && self.iter().all(|(_, slot)| !is_pending(slot) && slot.retry_at.is_none())
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
        let listing = listing.has(slot.key.kind);
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
            Verb::Create(_) | Verb::CreateNamespace => self.counters.creates += 1,
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
        slot.overtaken = false;
        Request { ticket: Ticket { slot: id, generation }, key: slot.key.clone(), verb }
    }

    /// The event stream is open: who is there, what it can.
    pub fn connected(&mut self, now: Instant, peer: &Peer) {
        self.disconnected(now);
        let has_digest = peer.is_ours() && peer.capabilities.has(Capability::O1Resync);
        self.peer = Some(PeerState { is_go: !peer.is_ours(), has_digest });
        if !peer.namespace.is_empty() {
            self.peer_namespace = peer.namespace.clone();
        }
        self.cluster_info_for(peer);
        for id in self.ids_where(|slot| !slot.out.wants.is_empty()) {
            self.enqueue(id);
        }
        if self.is_synced() {
            self.start_resync();
        }
        self.rounds_with(now, peer);
        self.start_heartbeat(now);
    }

    /// The event stream ended: what was in flight goes again on the next one.
    pub fn disconnected(&mut self, _now: Instant) {
        self.peer = None;
        self.heartbeat_at = None;
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
        for control in &mut self.outbox.controls {
            if let ControlStage::Sent { event, due, .. } = *control
                && due <= now
            {
                self.outbox.index.remove(&event);
                self.counters.resent += 1;
                *control = ControlStage::Wanted;
            }
        }
        if self.sweep_at.is_some_and(|at| at <= now) {
            self.sweep(now);
        }
        self.round_timeout(now);
        self.heartbeat_timeout(now);
    }

    fn slot_timeout(&mut self, now: Instant, id: SlotId) {
        let Some(slot) = self.slots.get_mut(id as usize).and_then(Option::as_mut) else { return };
        let given: Vec<Ack> = slot.acks_mut().filter_map(|ack| ack.take_if(|ack| ack.by <= now)).collect();
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
            self.give(id, Some(ack));
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
        let old = self.ids_where(|slot| {
            slot.key.kind == Kind::Application
                && slot.out.acked_at.is_some_and(|at| now.saturating_since(at) >= interval)
        });
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
        self.timers
            .first()
            .map(|(at, _)| *at)
            .into_iter()
            .chain(controls)
            .chain(self.sweep_at)
            .chain(self.round_due())
            .chain(self.heartbeat_at)
            .min()
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
        self.compare_everything();
    }

    fn compare_everything(&mut self) {
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
        for id in self.ids_where(|slot| slot.known_source().is_some() || asks(slot)) {
            let slot = self.slot(id);
            // It was made again from less than the whole, or by an agent that knew no principals.
            slot.out.verify_blind |= slot.key.kind == Kind::Application
                && slot.observed.known().is_some_and(|copy| copy.principal_uid.is_none());
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
        if self.synced.has(key.kind) && !self.listing.has(key.kind) {
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

    fn peer_is_go(&self) -> bool {
        self.peer.as_ref().is_some_and(|peer| peer.is_go)
    }

    fn next_serial(&mut self) -> u32 {
        self.serial = self.serial.wrapping_add(1);
        self.serial
    }

    fn give(&mut self, id: SlotId, ack: Option<Ack>) {
        let Some(ack) = ack else { return };
        if self.slot(id).acks_mut().flatten().all(|other| other.by != ack.by) {
            // It is not late: nobody needs to wake up for it.
            self.timers.remove(&(ack.by, id));
        }
        if self.peer.is_some() {
            self.outbox.push_ack(ack.frame);
        }
    }
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

/// Trouble of our own API server withholds an acknowledgement for at most this long.
const ACK_WITHHELD_MAX: Duration = Duration::from_secs(30);
/// Notes kept for a shell that does not fetch them.
const NOTES_MAX: usize = 256;
