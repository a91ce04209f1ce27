//! What the peer is owed: one entry per object, never a queue of events.
//!
//! A want is a bit on a slot. No body is stored: it is read when the window has room, and built into a frame just before it is sent.

use alloc::boxed::Box;
use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;
use core::time::Duration;

use super::slot::SlotId;
use crate::checksum::fingerprint;
use crate::rand::Rng;
use crate::time::Instant;

/// One thing the peer can be owed about an object. The order is the order inside one object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u16)]
pub(super) enum Want {
    /// The object with this UID is gone.
    Gone = 1,
    /// The object exists like this.
    Exists = 1 << 1,
    /// A user started an operation.
    Operation = 1 << 2,
    /// A user asked for the end of the running operation.
    Terminate = 1 << 3,
    /// Compare: `request-update`.
    Verify = 1 << 4,
    /// It is on our list: `response-synced-resource`.
    Report = 1 << 5,
    /// The site could not take it: `error`.
    Error = 1 << 6,
    /// Its status on the site.
    Status = 1 << 7,
}

impl Want {
    pub(super) const ALL: [Self; 8] = [
        Self::Gone,
        Self::Exists,
        Self::Operation,
        Self::Terminate,
        Self::Verify,
        Self::Report,
        Self::Error,
        Self::Status,
    ];

    /// Rank across objects, lower first. Acknowledgements come before all of them.
    const fn class(self) -> usize {
        match self {
            Self::Operation | Self::Terminate => 0,
            Self::Gone | Self::Exists => 1,
            Self::Verify | Self::Report | Self::Error => 2,
            Self::Status => 3,
        }
    }
}

const CLASSES: usize = 4;

/// A set of [`Want`]s.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Wants(u16);

impl Wants {
    pub(super) fn add(&mut self, want: Want) {
        self.0 |= want as u16;
    }

    pub(super) fn remove(&mut self, want: Want) {
        self.0 &= !(want as u16);
    }

    pub(super) fn has(self, want: Want) -> bool {
        self.0 & want as u16 != 0
    }

    pub(super) fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The one that goes next inside its object.
    pub(super) fn next(self) -> Option<Want> {
        Want::ALL.into_iter().find(|want| self.has(*want))
    }

    /// Rank of the most urgent one that may go next.
    fn class(self) -> Option<usize> {
        self.next().map(Want::class)
    }
}

/// The outgoing half of a slot.
#[derive(Debug, Default)]
pub(super) struct Out {
    pub(super) wants: Wants,
    pub(super) stage: Stage,
    /// Level that the peer acknowledged last (shape or report); 0: none.
    pub(super) acked: u64,
    /// When that was.
    pub(super) acked_at: Option<Instant>,
    /// When a status went last.
    pub(super) status_at: Option<Instant>,
    /// UIDs under which the peer may know the object; the last one is the latest.
    pub(super) known_as: Vec<Box<str>>,
    /// What is gone, for [`Want::Gone`].
    pub(super) gone: Option<Box<Gone>>,
    /// The operation to deliver, captured when it appeared.
    pub(super) operation: Option<Box<OperationLatch>>,
    /// Deliver the refresh annotation with the next [`Want::Exists`].
    pub(super) refresh: bool,
    /// A refused object's reason, for [`Want::Error`].
    pub(super) error: Option<Box<str>>,
    /// The peer could not take what it acknowledged, and may have forgotten that since.
    pub(super) refused: bool,
    /// [`Want::Verify`] without a checksum: the answer must be the whole object.
    pub(super) verify_blind: bool,
    /// Sends of the same content without an acknowledgement.
    pub(super) attempts: u32,
    /// The site has said that it has the object with its present UID.
    pub(super) confirmed: bool,
    /// The site has a copy of ours under this name, or had one: it acknowledged it, or asked about it.
    pub(super) on_site: bool,
    /// Towards a Go agent: an acknowledged create is repeated until a status or a question carries its UID.
    pub(super) unconfirmed: bool,
    /// How often it was repeated for that, and when it is next.
    pub(super) repeated: u32,
    pub(super) confirm_at: Option<Instant>,
}

/// How far the frame in hand is. One per object.
#[derive(Debug, Default)]
pub(super) enum Stage {
    /// None.
    #[default]
    Idle,
    /// In the class queue.
    Queued,
    /// The body is being read; it holds a place in the window.
    Reading,
    /// Built, waiting for room in the stream.
    Ready(InFlight),
    /// Sent, not acknowledged.
    Sent(InFlight),
    /// Waits before it is tried again.
    Resting(Instant),
}

#[derive(Debug, Clone)]
pub(super) struct InFlight {
    pub(super) want: Want,
    /// Fingerprint of the event id.
    pub(super) event: u64,
    pub(super) size: usize,
    /// What the acknowledgement will stand for.
    pub(super) level: u64,
    pub(super) sent_at: Instant,
    pub(super) due: Instant,
    /// The frame carries the refresh request that is asked for.
    pub(super) refresh: bool,
}

/// An operation that a user started, as it was when it appeared.
#[derive(Debug, Clone)]
pub(super) struct OperationLatch {
    pub(super) operation: Box<[u8]>,
    /// Of the object then. The event id is made from it, so that a repetition is known as one whatever happens to the object.
    pub(super) resource_version: Box<str>,
    /// A status that arrived before the acknowledgement had no operation any more.
    pub(super) over: bool,
}

impl OperationLatch {
    pub(super) fn print(&self) -> u64 {
        fingerprint(&[&*self.operation, self.resource_version.as_bytes()].concat())
    }
}

#[derive(Debug)]
pub(super) struct Gone {
    pub(super) uid: Box<str>,
    pub(super) resource_version: Box<str>,
    pub(super) source_uid: Option<Box<str>>,
    /// The answer to a `request-update` for an object that does not exist here.
    pub(super) synthetic: bool,
}

impl Gone {
    /// Tells one end from another.
    pub(super) fn print(&self) -> u64 {
        let source_uid = self.source_uid.as_deref().unwrap_or_default();
        fingerprint([&*self.uid, "/", source_uid, "/", &*self.resource_version].concat().as_bytes())
    }
}

impl Out {
    pub(super) fn is_idle(&self) -> bool {
        self.wants.is_empty()
            && self.operation.is_none()
            && matches!(self.stage, Stage::Idle)
            && !self.unconfirmed
    }

    /// A refresh is asked for. What is in flight does not carry this one.
    pub(super) fn ask_refresh(&mut self) {
        self.refresh = true;
        if let Stage::Ready(flight) | Stage::Sent(flight) = &mut self.stage {
            flight.refresh = false;
        }
    }

    /// The peer has, or may have, a copy of the object under this UID, which is not the latest.
    pub(super) fn peer_knows(&mut self, uid: Box<str>) {
        if !self.known_as.contains(&uid) && self.known_as.len() < KNOWN_MAX {
            self.known_as.insert(0, uid);
        }
    }

    /// The want whose frame is built or sent.
    pub(super) fn in_hand(&self) -> Option<&InFlight> {
        match &self.stage {
            Stage::Ready(flight) | Stage::Sent(flight) => Some(flight),
            _ => None,
        }
    }
}

/// Who is to be told of an acknowledgement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Owner {
    Slot(SlotId),
    Control(Control),
}

/// Messages about no object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Control {
    /// `request-synced-resource-list`
    List,
    /// `request-resource-resync`
    Resync,
    /// `resync-digest`
    Digest,
    /// `cluster-cache-info-update`
    ClusterInfo,
}

/// A pending [`Control`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum ControlStage {
    #[default]
    Idle,
    Wanted,
    Sent {
        event: u64,
        due: Instant,
    },
}

/// The window towards one peer and the queues in front of it.
#[derive(Debug)]
pub(super) struct Outbox {
    queues: [VecDeque<SlotId>; CLASSES],
    /// Built frames by class, oldest first.
    ready: [VecDeque<(SlotId, Vec<u8>)>; CLASSES],
    /// Acknowledgements and signs of life: fire and forget, before everything else.
    pub(super) acks: VecDeque<Vec<u8>>,
    pub(super) index: BTreeMap<u64, Owner>,
    pub(super) controls: [ControlStage; 4],
    /// Places taken: reading, ready or sent.
    pub(super) places: usize,
    /// Bytes ready or sent.
    pub(super) bytes: usize,
    max_places: usize,
    max_bytes: usize,
    smoothed_ack: Duration,
}

impl Outbox {
    pub(super) fn new(max_places: usize, max_bytes: usize) -> Self {
        Self {
            queues: Default::default(),
            ready: Default::default(),
            acks: VecDeque::new(),
            index: BTreeMap::new(),
            controls: Default::default(),
            places: 0,
            bytes: 0,
            max_places,
            max_bytes,
            smoothed_ack: Duration::ZERO,
        }
    }

    pub(super) fn has_room(&self) -> bool {
        self.places < self.max_places && self.bytes < self.max_bytes
    }

    /// Whether `id` is the next to be sent.
    pub(super) fn is_first(&self, id: SlotId) -> bool {
        self.queues.iter().find_map(VecDeque::front) == Some(&id)
    }

    /// Puts a slot with wants into the queue of its most urgent want; `stage` must be idle or resting.
    pub(super) fn enqueue(&mut self, id: SlotId, out: &mut Out) {
        if let Some(class) = out.wants.class() {
            out.stage = Stage::Queued;
            self.queues[class].push_back(id);
        }
    }

    /// A queued slot became more urgent: it is queued again, and the older place is skipped when it comes up.
    pub(super) fn promote(&mut self, id: SlotId, before: Wants, out: &Out) {
        if let (Some(old), Some(new)) = (before.class(), out.wants.class())
            && new < old
        {
            self.queues[new].push_back(id);
        }
    }

    /// The next slot whose frame may be made. The caller skips those that are no longer queued.
    pub(super) fn pop(&mut self) -> Option<SlotId> {
        self.queues.iter_mut().find_map(VecDeque::pop_front)
    }

    pub(super) fn push_ready(&mut self, id: SlotId, want: Want, frame: Vec<u8>) {
        self.ready[want.class()].push_back((id, frame));
    }

    /// The most urgent built frame, if it fits.
    pub(super) fn pop_ready(&mut self, room: usize) -> Option<(SlotId, Vec<u8>)> {
        let queue = self.ready.iter_mut().find(|queue| !queue.is_empty())?;
        let fits = queue.front().is_some_and(|(_, frame)| frame.len() <= room);
        if fits || room >= LARGE_FRAME_ROOM_MIN { queue.pop_front() } else { None }
    }

    /// Takes back a built frame that became stale.
    pub(super) fn withdraw(&mut self, id: SlotId, want: Want) {
        self.ready[want.class()].retain(|(other, _)| *other != id);
    }

    /// Drops everything that belongs to the stream that ended.
    pub(super) fn clear_stream(&mut self) {
        for queue in self.queues.iter_mut() {
            queue.clear();
        }
        for queue in self.ready.iter_mut() {
            queue.clear();
        }
        self.acks.clear();
        self.index.clear();
        self.places = 0;
        self.bytes = 0;
    }

    /// Queues an acknowledgement for a peer that may not be reading. The oldest gives way: its event comes again.
    pub(super) fn push_ack(&mut self, frame: Vec<u8>) {
        if self.acks.len() >= ACKS_MAX {
            self.acks.pop_front();
        }
        self.acks.push_back(frame);
    }

    /// An acknowledgement took this long.
    pub(super) fn learn(&mut self, took: Duration) {
        self.smoothed_ack =
            if self.smoothed_ack.is_zero() { took } else { (self.smoothed_ack * 7 + took) / 8 };
    }

    /// How long to wait for the acknowledgement of send number `attempts` (from 0).
    pub(super) fn patience(&self, attempts: u32, rng: &mut Rng) -> Duration {
        let base = RETRY_MIN.max(self.smoothed_ack * 4);
        let grown = base.saturating_mul(1 << attempts.min(5)).min(RETRY_MAX.max(base));
        grown + rng.between(Duration::ZERO, grown / 4)
    }
}

/// A Go peer has no window: it may have a thousand objects in flight at once.
const ACKS_MAX: usize = 4096;
/// With this much room a frame of any size is handed out: the transport splits it.
const LARGE_FRAME_ROOM_MIN: usize = 16 * 1024;
/// UIDs remembered for one name that the peer never acknowledged; older ones are settled by the next resync.
pub(super) const KNOWN_MAX: usize = 8;
/// An event is repeated after this at the earliest.
const RETRY_MIN: Duration = Duration::from_secs(5);
/// The back-off of repetitions ends here.
const RETRY_MAX: Duration = Duration::from_secs(120);
