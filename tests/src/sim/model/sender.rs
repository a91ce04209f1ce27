//! The way out: a bounded queue, and behind it the event writer.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use agent_core::cloudevent::{EventView, EventWriter};
use agent_core::event::{Target, Type};
use agent_core::rand::Rng;
use agent_core::time::{Instant, Wall};
use serde_json::Value;

use super::Version;
use super::value::{name_of, uid_of, version_of};

/// An event, as it waits to be sent.
#[derive(Clone, Debug)]
pub(super) struct Event {
    pub(super) r#type: Type,
    pub(super) target: Target,
    /// Namespace and name.
    pub(super) subject: Option<(String, String)>,
    pub(super) event_id: String,
    pub(super) resource_id: String,
    pub(super) principal_uid: Option<String>,
    pub(super) data: Vec<u8>,
    sent_at: Option<String>,
    /// An acknowledgement, encoded.
    ack: Option<Vec<u8>>,
}

impl Event {
    /// An event about an object, with the ids made of it.
    pub(super) fn of_object(target: Target, r#type: Type, object: &Value) -> Self {
        let (name, uid) = (name_of(object), uid_of(object));
        let namespace = object["metadata"]["namespace"].as_str().unwrap_or_default();
        Self {
            r#type,
            target,
            subject: Some((namespace.to_owned(), name.to_owned())),
            event_id: format!("{name}_{uid}_{}", version_of(object)),
            resource_id: format!("{name}_{uid}"),
            principal_uid: None,
            data: object.to_string().into_bytes(),
            sent_at: None,
            ack: None,
        }
    }

    /// An event with an id of its own.
    pub(super) fn control(target: Target, r#type: Type, uuid: String, data: Vec<u8>) -> Self {
        Self {
            r#type,
            target,
            subject: None,
            event_id: uuid.clone(),
            resource_id: uuid,
            principal_uid: None,
            data,
            sent_at: None,
            ack: None,
        }
    }

    pub(super) fn ack_of(event: &EventView<'_>, source: &str) -> Self {
        Self {
            r#type: Type::Processed,
            target: Target::EventProcessed,
            subject: None,
            event_id: event.event_id.to_owned(),
            resource_id: event.resource_id.to_owned(),
            principal_uid: None,
            data: Vec::new(),
            sent_at: None,
            ack: Some(event.ack(source)),
        }
    }

    pub(super) fn is_ack(&self) -> bool {
        self.ack.is_some()
    }

    fn encode(&self, source: &str) -> Vec<u8> {
        if let Some(ack) = &self.ack {
            return ack.clone();
        }
        let mut frame = Vec::with_capacity(self.data.len() + 512);
        EventWriter {
            source,
            r#type: self.r#type.as_str(),
            target: self.target,
            subject: self.subject.as_ref().map(|(namespace, name)| (namespace.as_str(), name.as_str())),
            event_id: &self.event_id,
            resource_id: &self.resource_id,
            sent_at: self.sent_at.as_deref(),
            principal_uid: self.principal_uid.as_deref(),
            data: &self.data,
        }
        .encode(&mut frame);
        frame
    }
}

/// What is under way for one resource id.
#[derive(Debug, Default)]
struct Lane {
    unsent: VecDeque<Event>,
    sent: Option<Flight>,
}

#[derive(Debug)]
struct Flight {
    event: Event,
    due: Instant,
    retries: u32,
}

/// Queue and writer towards one peer. They outlive streams.
#[derive(Debug)]
pub(super) struct Sender {
    version: Version,
    source: &'static str,
    wall: Wall,
    capacity: usize,
    queue: VecDeque<Event>,
    lanes: BTreeMap<String, Lane>,
    /// Frames for the stream.
    frames: VecDeque<Vec<u8>>,
    /// When the stream opened: the writer looks every [`TICK`] from then on. `None`: there is none.
    opened: Option<Instant>,
    /// When it looked last.
    looked: Option<Instant>,
    ran: Instant,
    /// What was given up or pushed out, to be told.
    lost: Vec<(&'static str, Event)>,
    pub(super) counts: Vec<&'static str>,
}

impl Sender {
    pub(super) fn new(version: Version, source: &'static str, wall: Wall, capacity: usize) -> Self {
        Self {
            version,
            source,
            wall,
            capacity,
            queue: VecDeque::new(),
            lanes: BTreeMap::new(),
            frames: VecDeque::new(),
            opened: None,
            looked: None,
            ran: Instant::ZERO,
            lost: Vec::new(),
            counts: Vec::new(),
        }
    }

    pub(super) fn connected(&mut self, now: Instant) {
        self.opened = Some(now);
        self.looked = None;
        self.ran = now;
        self.frames.clear();
        for lane in self.lanes.values_mut() {
            if let Some(flight) = &mut lane.sent {
                flight.due = now;
            }
        }
    }

    pub(super) fn disconnected(&mut self) {
        self.opened = None;
        self.frames.clear();
    }

    /// Puts an event into the queue; a full one drops its oldest.
    pub(super) fn enqueue(&mut self, event: Event) {
        if self.queue.len() >= self.capacity
            && let Some(oldest) = self.queue.pop_front()
        {
            self.counts.push("model_overflows");
            self.lost.push((OVERFLOW, oldest));
        }
        self.queue.push_back(event);
    }

    /// Straight to the writer, past the queue.
    pub(super) fn add(&mut self, event: Event) {
        let lane = self.lanes.entry(event.resource_id.clone()).or_default();
        if event.r#type == Type::Delete {
            *lane = Lane::default();
        } else {
            let before = lane.unsent.len();
            match self.version {
                Version::Head if matches!(event.r#type, Type::SpecUpdate | Type::StatusUpdate) => {
                    lane.unsent.retain(|waiting| waiting.r#type != event.r#type);
                }
                Version::V0_9_0 => {
                    lane.unsent.pop_back_if(|waiting| waiting.r#type == event.r#type);
                }
                Version::Head => {}
            }
            if lane.unsent.len() < before {
                self.counts.push("model_merged");
            }
        }
        lane.unsent.push_back(event);
    }

    pub(super) fn acknowledged(&mut self, event: &EventView<'_>) {
        let Some(lane) = self.lanes.get_mut(event.resource_id) else { return };
        if lane.sent.as_ref().is_some_and(|flight| flight.event.event_id == event.event_id) {
            lane.sent = None;
        } else if let Some(head) = lane.unsent.pop_front_if(|head| head.event_id == event.event_id)
            && !head.is_ack()
        {
            // The same ids were sent before, and were acknowledged twice.
            self.counts.push("model_dropped_unsent");
            self.lost.push((DOUBLE_ACK, head));
        }
    }

    /// Moves on: from the queue to the writer, from the writer to the stream.
    pub(super) fn run(&mut self, now: Instant, rng: &mut Rng) {
        let Some(opened) = self.opened else { return };
        self.ran = now;
        for event in core::mem::take(&mut self.queue) {
            self.add(event);
        }
        if next_tick(opened, now) != now || self.looked == Some(now) {
            return;
        }
        self.looked = Some(now);
        let mut lanes: Vec<String> = self.lanes.keys().cloned().collect();
        while !lanes.is_empty() {
            let id = lanes.swap_remove(rng.below(lanes.len() as u64) as usize);
            self.visit(&id, now, rng);
        }
        self.lanes.retain(|_, lane| lane.sent.is_some() || !lane.unsent.is_empty());
    }

    fn visit(&mut self, id: &str, now: Instant, rng: &mut Rng) {
        let Some(lane) = self.lanes.get_mut(id) else { return };
        if let Some(flight) = &mut lane.sent {
            if flight.due > now {
                return;
            }
            if self.version == Version::V0_9_0 && flight.retries >= RETRIES_V0_9_0 {
                self.counts.push("model_given_up");
                if let Some(flight) = lane.sent.take() {
                    self.lost.push((GIVEN_UP, flight.event));
                }
                return;
            }
            flight.retries += 1;
            flight.due = now + self.version.patience(flight.retries, rng);
            self.counts.push("model_resent");
            self.frames.push_back(flight.event.encode(self.source));
            return;
        }
        let Some(mut event) = lane.unsent.pop_front() else { return };
        if event.is_ack() {
            self.frames.push_back(event.encode(self.source));
            return;
        }
        event.sent_at = Some(self.wall.rfc3339(now));
        self.frames.push_back(event.encode(self.source));
        lane.sent = Some(Flight { event, due: now + self.version.patience(0, rng), retries: 0 });
    }

    pub(super) fn poll_frame(&mut self) -> Option<Vec<u8>> {
        self.frames.pop_front()
    }

    /// The next tick at which the writer has something to do.
    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        let opened = self.opened?;
        let next = match self.looked {
            Some(looked) => next_tick(opened, self.ran.max(looked + Duration::from_millis(1))),
            None => next_tick(opened, self.ran),
        };
        if !self.queue.is_empty() || self.lanes.values().any(|lane| lane.sent.is_none()) {
            return Some(next);
        }
        let due = self.lanes.values().filter_map(|lane| Some(lane.sent.as_ref()?.due)).min()?;
        Some(next_tick(opened, due).max(next))
    }

    pub(super) fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.lanes.is_empty() && self.frames.is_empty()
    }

    #[cfg(test)]
    pub(super) fn take_queue(&mut self) -> Vec<Event> {
        core::mem::take(&mut self.queue).into()
    }

    pub(super) fn take_lost(&mut self) -> Vec<(&'static str, Event)> {
        core::mem::take(&mut self.lost)
    }
}

impl Version {
    /// How long the writer waits after the first sending (`retries` 0) or after a repetition.
    fn patience(self, retries: u32, rng: &mut Rng) -> Duration {
        let (base, jitter) = match self {
            Self::Head => {
                let base = Duration::from_secs(5 * 4u64.pow(retries.min(4))).min(Duration::from_secs(120));
                (base, base)
            }
            Self::V0_9_0 => {
                let base = Duration::from_millis((1000.0 * 1.5f64.powi(retries.min(20) as i32)) as u64);
                (base, base / 10)
            }
        };
        base + rng.between(Duration::ZERO, jitter)
    }
}

/// The first tick that is not before `now`.
fn next_tick(opened: Instant, now: Instant) -> Instant {
    let millis = now.saturating_since(opened).as_millis() as u64;
    opened + Duration::from_millis(millis.next_multiple_of(TICK.as_millis() as u64))
}

const TICK: Duration = Duration::from_millis(100);
const RETRIES_V0_9_0: u32 = 12;

/// Names of what loses events, for the checker.
pub(super) const OVERFLOW: &str = "overflow";
pub(super) const DOUBLE_ACK: &str = "double-ack";
pub(super) const GIVEN_UP: &str = "given-up";
