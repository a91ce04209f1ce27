//! The world of one run: two API servers, a link, users, a controller, and time that jumps to the next event.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::sync::Arc;
use std::time::Duration;

use agent_core::cloudevent::EventView;
use agent_core::core::Config;
use agent_core::event::{EventType, Target, Type};
use agent_core::informer::{End, parse_status};
use agent_core::peer::Mapping;
use agent_core::rand::Rng;
use agent_core::request::{Key, Outcome, Verb};
use agent_core::time::{Instant, Wall};
use serde_json::{Value, json};

use super::checker::{Checker, SOURCE_UID, Violation};
use super::half::{Answer, Ask, Call, CoreHalf, Half, Until, What};
use super::model::{AgentModel, AgentOptions};
use super::plant::{FrameKind, Plant, forged_ack, frame_kind};
use super::scenario::{Action, Fault, ListFault, Pairing, Side, Step};
use super::{AGENT, Counters, EDGE_NAMESPACE, HUB_NAMESPACE, PRINCIPAL_UID, Report, content};
use crate::controller;
use crate::kube::closure::{Route, Shape};
use crate::kube::query::Query;
use crate::kube::selector::Selector;
use crate::kube::store::{Deleted, List, Object, PatchType, Preconditions, Store, Watch, WatchOptions};
use crate::kube::{Resource, Status};

const APPLICATION: Resource = Resource::Application;

/// Everything of one run.
pub(super) struct World {
    now: Instant,
    /// How many delays were drawn at a moment.
    drawn: (Instant, u64),
    seed: u64,
    pairing: Pairing,
    mapping: Mapping,
    plant: Option<Plant>,
    heap: BinaryHeap<Entry>,
    sequence: u64,
    stations: [Station; 2],
    link: Link,
    controller: Controller,
    checker: Checker,
    counters: Counters,
    hash: TraceHash,
    last_write: Instant,
    last_frame: Instant,
    /// Delete frames seen, for the plant that drops one.
    deletes_seen: u64,
    confirmed: BTreeSet<String>,
    /// Event ids of rounds.
    rounds: BTreeSet<String>,
    /// The next object frame to each side is acknowledged and not delivered.
    swallow: [bool; 2],
    /// Nothing happens for long: the controller and the watches rest.
    calm: bool,
}

/// One cluster and the half that lives there.
struct Station {
    namespace: &'static str,
    argocd_namespace: &'static str,
    store: Store,
    half: Option<Box<dyn Half>>,
    incarnation: u32,
    faults: Vec<Fault>,
    list_fault: Option<ListFault>,
    watches: BTreeMap<Resource, OpenWatch>,
    /// The stream that this half believes in; 0: none.
    stream: u64,
    held: BTreeSet<Key>,
}

impl Station {
    /// Applications live in the agent's namespace, everything else in Argo CD's.
    fn namespace_of(&self, resource: Resource) -> &'static str {
        if resource == APPLICATION { self.namespace } else { self.argocd_namespace }
    }
}

struct OpenWatch {
    id: u64,
    watch: Watch,
    scheduled: bool,
}

/// The stream between the halves. What is under way when it is cut is lost.
#[derive(Default)]
struct Link {
    cut_until: Instant,
    /// The stream that carries; 0: none.
    stream: u64,
    streams: u64,
    /// When the last frame arrives, by receiver: frames do not overtake each other.
    arrival: [Instant; 2],
    /// Bytes that the sender still holds, by receiver.
    queued: [usize; 2],
    dialling: bool,
}

struct Controller {
    watch: Watch,
    dirty: BTreeSet<String>,
    scheduled: bool,
    degraded: BTreeSet<String>,
    /// Until when an operation runs.
    busy: BTreeMap<String, Instant>,
}

enum Due {
    Step(Action),
    Call { side: Side, incarnation: u32, call: Call },
    Outcome { side: Side, incarnation: u32, id: u64, outcome: Outcome },
    Body { side: Side, incarnation: u32, id: u64, bytes: Vec<u8>, end: Option<End> },
    WatchTurn { side: Side, incarnation: u32, id: u64 },
    WatchEnd { side: Side, incarnation: u32, id: u64 },
    Frame { to: Side, stream: u64, frame: Vec<u8> },
    StreamUp { side: Side, stream: u64 },
    StreamDown { side: Side, stream: u64 },
    Dial,
    Restart { side: Side, incarnation: u32 },
    Controller,
    ControllerPeriod,
}

struct Entry {
    at: Instant,
    sequence: u64,
    due: Due,
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}
impl Eq for Entry {}
impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Entry {
    /// The earliest is the greatest, as the heap gives out the greatest.
    fn cmp(&self, other: &Self) -> Ordering {
        (other.at, other.sequence).cmp(&(self.at, self.sequence))
    }
}

impl World {
    pub(super) fn new(seed: u64, pairing: Pairing, plant: Option<Plant>) -> Self {
        let mut rng = Rng::new(seed ^ WORLD);
        let mut station = |namespace, argocd_namespace| Station {
            namespace,
            argocd_namespace,
            store: Store::new(rng.next_u64(), WALL),
            half: None,
            incarnation: 0,
            faults: Vec::new(),
            list_fault: None,
            watches: BTreeMap::new(),
            stream: 0,
            held: BTreeSet::new(),
        };
        // One run in four of our own pair has the hub's Applications beside its Argo CD.
        let mapping = if pairing == Pairing::OursOurs && (seed / 5).is_multiple_of(4) {
            Mapping::Destination
        } else {
            Mapping::Namespace
        };
        let hub_namespace = if mapping == Mapping::Destination { HUB_NAMESPACE } else { AGENT };
        let mut stations = [station(hub_namespace, HUB_NAMESPACE), station(EDGE_NAMESPACE, EDGE_NAMESPACE)];
        // What an installation of Argo CD brings along.
        for object in content::installed() {
            let store = &mut stations[Side::Edge.index()].store;
            let created = store.create(content::resource_of(&object), EDGE_NAMESPACE, object);
            debug_assert!(created.is_ok(), "{created:?}");
        }
        let edge = &stations[Side::Edge.index()].store;
        let checker = Checker::new(pairing, hub_namespace, &stations[Side::Hub.index()].store, edge);
        let options =
            WatchOptions { resource_version: edge.revision().to_string(), ..WatchOptions::default() };
        let watch = match edge.watch(APPLICATION, None, &options) {
            Ok(watch) => watch,
            Err(status) => unreachable!("the present revision can be watched: {}", status.message),
        };
        let controller = Controller {
            watch,
            dirty: BTreeSet::new(),
            scheduled: false,
            degraded: BTreeSet::new(),
            busy: BTreeMap::new(),
        };
        let mut world = Self {
            now: Instant::from_millis(1),
            drawn: (Instant::ZERO, 0),
            seed,
            pairing,
            mapping,
            plant,
            heap: BinaryHeap::new(),
            sequence: 0,
            stations,
            link: Link::default(),
            controller,
            checker,
            counters: Counters::default(),
            hash: TraceHash::default(),
            last_write: Instant::ZERO,
            last_frame: Instant::ZERO,
            deletes_seen: 0,
            confirmed: BTreeSet::new(),
            rounds: BTreeSet::new(),
            swallow: [false; 2],
            calm: false,
        };
        for side in Side::BOTH {
            world.start(side);
        }
        world.after(CONTROLLER_PERIOD, Due::ControllerPeriod);
        world.dial_later();
        world
    }

    /// Plays the steps, heals everything, and judges.
    pub(super) fn run(mut self, steps: &[Step]) -> Report {
        let violation = self.play(steps).err();
        for side in Side::BOTH {
            self.collect_counters(side);
        }
        self.counters.add("seeds", 1);
        Report { violation, counters: self.counters, trace_hash: self.hash.0 }
    }

    fn play(&mut self, steps: &[Step]) -> Result<(), Violation> {
        for step in steps {
            self.at(Instant::from_millis(step.at), Due::Step(step.action.clone()));
        }
        let end = steps.last().map_or(Instant::ZERO, |step| Instant::from_millis(step.at));
        self.run_until(end + Duration::from_millis(1))?;
        self.heal();
        self.settle()?;
        for until in [Until::Round, Until::Restart] {
            self.mend(until)?;
        }
        self.checker.finish(&self.stations[Side::Edge.index()].store)?;
        if self.pairing != Pairing::OursOurs {
            // The reference never comes to rest: it tells what it watches again and again.
            return Ok(());
        }
        // Nothing happens any more except what the controller rewrites.
        let (frames, writes) = (self.last_frame, self.last_write);
        self.run_until(self.now + IDLE)?;
        if self.last_frame != frames {
            return Err(Violation::new("idle-frames", "a frame was sent though nothing had changed"));
        }
        if self.last_write != writes {
            return Err(Violation::new("idle-writes", "a half wrote though nothing had changed"));
        }
        self.counters.add("idle_periods", 1);
        let [hub, edge] = &self.stations;
        match self.checker.difference(&hub.store, &edge.store) {
            Some(text) => Err(Violation::new("not-equal", text)),
            None => self.checker.finish(&edge.store),
        }
    }

    /// Until everything is equal, and nobody owes anything.
    fn settle(&mut self) -> Result<(), Violation> {
        let healed = self.now;
        loop {
            self.run_until(self.now + SETTLE_SLICE)?;
            self.confirm_held()?;
            self.take_lapses();
            let [hub, edge] = &self.stations;
            let difference = self.checker.difference(&hub.store, &edge.store);
            let settled = Side::BOTH.iter().all(|side| self.is_settled(*side));
            if difference.is_none() && settled && self.now - self.last_frame >= QUIET {
                return Ok(());
            }
            if self.now - healed >= SETTLE_LIMIT {
                let (rule, text) = match difference {
                    Some(difference) => ("not-equal", difference),
                    None => ("not-settled", self.unsettled()),
                };
                return Err(Violation::new(
                    rule,
                    format!("{text} ({} s after healing)", SETTLE_LIMIT.as_secs()),
                ));
            }
        }
    }

    /// What the foreign half lost is mended, and is then equal too.
    fn mend(&mut self, until: Until) -> Result<(), Violation> {
        let Some(foreign) = self.pairing.foreign() else { return Ok(()) };
        self.take_lapses();
        if !self.checker.has_lapses(until) {
            return Ok(());
        }
        if until == Until::Round {
            self.wait_for_round(foreign.other())?;
        } else {
            self.count("model_restarts");
            self.crash(foreign, 1_000);
        }
        self.settle()
    }

    /// Until our half compares everything with the foreign one, which takes a day.
    fn wait_for_round(&mut self, side: Side) -> Result<(), Violation> {
        let rounds = |world: &Self| {
            world.stations[side.index()].half.as_ref().map_or(0, |half| half.counters().rounds)
        };
        let (before, limit) = (rounds(self), self.now + ROUND_LIMIT);
        self.calm = true;
        while rounds(self) == before {
            if self.now >= limit {
                return Err(Violation::new(
                    "no-round",
                    "our half has not compared anything for a day and a half",
                ));
            }
            self.run_until(self.now + Duration::from_secs(60))?;
        }
        self.calm = false;
        self.count("model_rounds");
        self.checker.compared();
        Ok(())
    }

    fn take_lapses(&mut self) {
        let Some(foreign) = self.pairing.foreign() else { return };
        let Some(half) = &mut self.stations[foreign.index()].half else { return };
        for lapse in half.take_lapses() {
            self.counters.add("lapses", 1);
            self.checker.lapsed(&lapse);
        }
    }

    fn is_settled(&self, side: Side) -> bool {
        let station = &self.stations[side.index()];
        station.stream != 0
            && station.half.as_ref().is_some_and(|half| {
                half.is_settled(&|kind, name| self.checker.is_excused(Resource::from(kind), name))
            })
    }

    fn unsettled(&self) -> String {
        let unsettled: Vec<Side> = Side::BOTH.into_iter().filter(|side| !self.is_settled(*side)).collect();
        let quiet = (self.now - self.last_frame).as_secs();
        format!("equal, but not settled: {unsettled:?}, the last frame {quiet} s ago")
    }

    fn at(&mut self, at: Instant, due: Due) {
        self.sequence += 1;
        self.heap.push(Entry { at, sequence: self.sequence, due });
    }

    fn after(&mut self, delay: Duration, due: Due) {
        self.at(self.now + delay, due);
    }

    /// A delay that follows from the moment, not from what was drawn before: when a step is left out, what has
    /// nothing to do with it goes on as it did.
    fn millis(&mut self, low: u64, high: u64) -> Duration {
        if self.drawn.0 != self.now {
            self.drawn = (self.now, 0);
        }
        self.drawn.1 += 1;
        let mut rng = Rng::new(self.seed ^ WORLD ^ (self.now.as_millis() << 16) ^ self.drawn.1);
        rng.next_u64();
        Duration::from_millis(low + rng.below(high - low + 1))
    }

    fn run_until(&mut self, limit: Instant) -> Result<(), Violation> {
        let mut turns = 0;
        let mut turned_at = self.now;
        loop {
            for side in Side::BOTH {
                self.drain(side)?;
            }
            let timeout =
                self.stations.iter().filter_map(|station| station.half.as_ref()?.poll_timeout()).min();
            let next = self.heap.peek().map(|entry| entry.at).into_iter().chain(timeout).min();
            let Some(next) = next.filter(|next| *next <= limit) else {
                self.now = self.now.max(limit);
                return Ok(());
            };
            self.now = self.now.max(next);
            if turned_at == self.now {
                turns += 1;
                if turns > TURNS_LIMIT {
                    return Err(Violation::new(
                        "spin",
                        "a half asks to be woken again and again at one moment",
                    ));
                }
            } else {
                (turns, turned_at) = (0, self.now);
            }
            for station in &mut self.stations {
                station.store.set_now(self.now);
                if let Some(half) = &mut station.half
                    && half.poll_timeout().is_some_and(|at| at <= self.now)
                {
                    half.handle_timeout(self.now);
                }
            }
            if self.heap.peek().is_some_and(|entry| entry.at <= self.now)
                && let Some(entry) = self.heap.pop()
            {
                self.happen(entry.due)?;
            }
        }
    }

    fn happen(&mut self, due: Due) -> Result<(), Violation> {
        match due {
            Due::Step(action) => self.step(action),
            Due::Call { side, incarnation, call } => self.serve(side, incarnation, call),
            Due::Outcome { side, incarnation, id, outcome } => {
                self.answer(side, incarnation, id, Answer::Outcome(outcome));
                Ok(())
            }
            Due::Body { side, incarnation, id, bytes, end } => {
                self.answer(side, incarnation, id, Answer::Bytes(&bytes));
                if let Some(end) = end {
                    self.answer(side, incarnation, id, Answer::End(end));
                }
                Ok(())
            }
            Due::WatchTurn { side, incarnation, id } => {
                self.watch_turn(side, incarnation, id);
                Ok(())
            }
            Due::WatchEnd { side, incarnation, id } if self.calm => {
                self.after(CONTROLLER_PERIOD, Due::WatchEnd { side, incarnation, id });
                Ok(())
            }
            Due::WatchEnd { side, incarnation, id } => {
                self.watch_end(side, incarnation, id);
                Ok(())
            }
            Due::Frame { to, stream, frame } => self.deliver(to, stream, &frame),
            Due::StreamUp { side, stream } => {
                self.stream_up(side, stream);
                Ok(())
            }
            Due::StreamDown { side, stream } => {
                let station = &mut self.stations[side.index()];
                if station.stream == stream {
                    station.stream = 0;
                    if let Some(half) = &mut station.half {
                        half.disconnected(self.now);
                    }
                    self.counters.add("disconnects_seen", 1);
                }
                self.dial_later();
                Ok(())
            }
            Due::Dial => {
                self.dial();
                Ok(())
            }
            Due::Restart { side, incarnation } => {
                if self.stations[side.index()].incarnation == incarnation {
                    self.start(side);
                    self.dial_later();
                }
                Ok(())
            }
            Due::Controller => self.control(false),
            Due::ControllerPeriod => {
                self.after(CONTROLLER_PERIOD, Due::ControllerPeriod);
                if self.calm { Ok(()) } else { self.control(true) }
            }
        }
    }

    /// Takes from a half what it wants done.
    fn drain(&mut self, side: Side) -> Result<(), Violation> {
        let now = self.now;
        while let Some(call) = self.stations[side.index()].half.as_mut().and_then(|half| half.poll_call(now))
        {
            let incarnation = self.stations[side.index()].incarnation;
            if let What::Fetch { path } = &call.what
                && let Route::Collection { resource, .. } =
                    Route::parse(path.split('?').next().unwrap_or_default())
            {
                // A new list or watch of a kind replaces the one before.
                self.stations[side.index()].watches.remove(&resource);
            }
            let delay = self.millis(1, 20);
            self.after(delay, Due::Call { side, incarnation, call });
        }
        let to = side.other();
        loop {
            let station = &mut self.stations[side.index()];
            if station.stream == 0 {
                return Ok(());
            }
            let room = SEND_BUFFER.saturating_sub(self.link.queued[to.index()]);
            if room == 0 {
                return Ok(());
            }
            let Some(frame) = station.half.as_mut().and_then(|half| half.poll_transmit(now, room)) else {
                return Ok(());
            };
            let stream = station.stream;
            self.transmit(to, stream, frame)?;
        }
    }

    fn transmit(&mut self, to: Side, stream: u64, frame: Vec<u8>) -> Result<(), Violation> {
        if !self.is_round(&frame) {
            self.last_frame = self.now;
        }
        self.hash.add(self.now, to.index() as u64, &frame);
        self.counters.add(if to == Side::Hub { "frames_to_hub" } else { "frames_to_edge" }, 1);
        self.counters.add("frame_bytes", frame.len() as u64);
        if self.swallow[to.index()] && can_be_mended(&frame) {
            self.swallow[to.index()] = false;
            self.count("swallowed");
            let name = frame_object(&frame)["metadata"]["name"].as_str().unwrap_or_default().to_owned();
            if let Some(kind) = EventView::decode(&frame).ok().and_then(|event| event.target()?.kind()) {
                self.checker.swallowed(kind, name);
            }
            if let Some(ack) = forged_ack(&frame) {
                return self.transmit_raw(to.other(), stream, ack);
            }
        }
        if self.plant.is_some() && self.swallowed(to, frame_kind(&frame), &frame) {
            // The planted fault answers in the receiver's place.
            if let Some(ack) = forged_ack(&frame) {
                return self.transmit_raw(to.other(), stream, ack);
            }
        }
        self.transmit_raw(to, stream, frame)
    }

    /// A round comes when its time is there; that it finds nothing is what matters.
    fn is_round(&mut self, frame: &[u8]) -> bool {
        let Ok(event) = EventView::decode(frame) else { return false };
        if event.event_type() == EventType::Known(Type::ResyncDigest) {
            self.rounds.insert(event.event_id.to_owned());
            return true;
        }
        event.is_ack() && self.rounds.remove(event.event_id)
    }

    fn transmit_raw(&mut self, to: Side, stream: u64, frame: Vec<u8>) -> Result<(), Violation> {
        self.link.queued[to.index()] += frame.len();
        if stream != self.link.stream {
            // Into a connection that is dead already.
            self.counters.add("frames_lost", 1);
            return Ok(());
        }
        let delay = self.millis(10, 250);
        let arrival = self.link.arrival[to.index()].max(self.now + delay);
        self.link.arrival[to.index()] = arrival;
        self.at(arrival, Due::Frame { to, stream, frame });
        Ok(())
    }

    /// Whether a planted fault takes this frame away.
    fn swallowed(&mut self, to: Side, kind: FrameKind, frame: &[u8]) -> bool {
        use agent_core::event::Type;
        match (self.plant, kind) {
            (Some(Plant::DropOneDelete), FrameKind::Application(Type::Delete)) if to == Side::Edge => {
                self.deletes_seen += 1;
                // Which one follows from the seed.
                self.deletes_seen == 1 + self.seed % 5
            }
            (Some(Plant::OperationAtSendTime), FrameKind::Application(Type::SetOperation)) => {
                let name = frame_object(frame)["metadata"]["name"].as_str().unwrap_or_default().to_owned();
                let hub = &self.stations[Side::Hub.index()].store;
                hub.get(APPLICATION, self.stations[Side::Hub.index()].namespace, &name)
                    .is_ok_and(|object| object.value().get("operation").is_none())
            }
            _ => false,
        }
    }

    fn deliver(&mut self, to: Side, stream: u64, frame: &[u8]) -> Result<(), Violation> {
        let queued = &mut self.link.queued[to.index()];
        *queued = queued.saturating_sub(frame.len());
        let station = &mut self.stations[to.index()];
        let (Some(half), true) = (&mut station.half, stream == self.link.stream && stream == station.stream)
        else {
            self.counters.add("frames_lost", 1);
            return Ok(());
        };
        let kind = frame_kind(frame);
        if kind == FrameKind::Ack {
            self.counters.add("acks", 1);
        }
        half.receive(self.now, frame).map_err(|error| {
            Violation::new("unreadable-frame", format!("{to:?} cannot read a frame: {error}"))
        })?;
        self.plant_on_arrival(to, stream, kind, frame)
    }

    fn plant_on_arrival(
        &mut self,
        to: Side,
        stream: u64,
        kind: FrameKind,
        frame: &[u8],
    ) -> Result<(), Violation> {
        use agent_core::event::Type;
        match (self.plant, to, kind) {
            (Some(Plant::AckBeforeApply), Side::Edge, FrameKind::Application(_)) => {
                if let Some(ack) = forged_ack(frame) {
                    self.transmit_raw(Side::Hub, stream, ack)?;
                }
            }
            (Some(Plant::OperationAtSendTime), Side::Hub, FrameKind::Application(Type::StatusUpdate)) => {
                let object = frame_object(frame);
                let name = object["metadata"]["name"].as_str().unwrap_or_default();
                if object.get("operation").is_none() {
                    self.write(Side::Hub, name, json!({"operation": null}))?;
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn dial_later(&mut self) {
        let agent = &self.stations[Side::Edge.index()];
        if !self.link.dialling && agent.half.is_some() && agent.stream == 0 {
            self.link.dialling = true;
            let delay = self.millis(300, 5_000);
            self.after(delay, Due::Dial);
        }
    }

    fn dial(&mut self) {
        self.link.dialling = false;
        let [hub, edge] = &self.stations;
        if edge.half.is_none() || edge.stream != 0 {
            return;
        }
        if self.link.cut_until > self.now || hub.half.is_none() {
            self.counters.add("dials_failed", 1);
            return self.dial_later();
        }
        self.link.streams += 1;
        let stream = self.link.streams;
        self.link.stream = stream;
        self.link.queued = [0, 0];
        self.counters.add("streams", 1);
        let hub_up = self.now + self.millis(20, 200);
        let edge_up = hub_up + self.millis(20, 200);
        // Nothing reaches the agent before it knows that the stream is open.
        self.link.arrival = [hub_up, edge_up];
        self.at(hub_up, Due::StreamUp { side: Side::Hub, stream });
        self.at(edge_up, Due::StreamUp { side: Side::Edge, stream });
    }

    fn stream_up(&mut self, side: Side, stream: u64) {
        let peer = self.stations[side.other().index()].half.as_ref().map(|half| half.peer());
        if stream != self.link.stream {
            if side == Side::Edge {
                self.dial_later();
            }
            return;
        }
        let station = &mut self.stations[side.index()];
        let (Some(half), Some(peer)) = (&mut station.half, peer) else { return };
        if station.stream != 0 {
            // The newest stream wins.
            half.disconnected(self.now);
        }
        station.stream = stream;
        half.connected(self.now, &peer);
    }

    /// The stream is dead; each half learns it in its own time.
    fn lose_stream(&mut self, at_hub: Duration, at_edge: Duration) {
        let stream = core::mem::take(&mut self.link.stream);
        if stream != 0 {
            self.after(at_hub, Due::StreamDown { side: Side::Hub, stream });
            self.after(at_edge, Due::StreamDown { side: Side::Edge, stream });
        }
    }

    fn start(&mut self, side: Side) {
        let round_interval = if self.plant.is_none() { ROUND_INTERVAL } else { Duration::ZERO };
        let believes = self.plant == Some(Plant::DeleteOnEmptyList) && side == Side::Hub;
        let wall = Wall { epoch_millis_at_zero: WALL.epoch_millis_at_zero };
        let incarnation = u64::from(self.stations[side.index()].incarnation);
        let half_seed = self.seed.wrapping_mul(1024) + incarnation * 2 + side.index() as u64;
        let mapping = self.mapping;
        let ours = |config| {
            Box::new(CoreHalf::new(Config { round_interval, mapping, ..config }, half_seed, wall, believes))
        };
        let mut half: Box<dyn Half> = match (side, self.pairing) {
            (Side::Edge, Pairing::OursModel(version)) => {
                let mut options = AgentOptions::new(version, EDGE_NAMESPACE);
                if self.seed.is_multiple_of(3) {
                    // A queue that overflows.
                    options.queue = 20;
                }
                Box::new(AgentModel::new(options, half_seed, wall))
            }
            (Side::Hub, _) => ours(Config::principal(AGENT, HUB_NAMESPACE, PRINCIPAL_UID)),
            (Side::Edge, _) => ours(Config::agent(EDGE_NAMESPACE)),
        };
        half.handle_timeout(self.now);
        self.stations[side.index()].half = Some(half);
    }

    fn crash(&mut self, side: Side, millis: u64) {
        if self.stations[side.index()].half.is_none() {
            return;
        }
        self.collect_counters(side);
        self.take_lapses();
        self.checker.restarts(side);
        self.counters.add(if side == Side::Hub { "crashes_hub" } else { "crashes_edge" }, 1);
        let detected = self.millis(10, 20_000);
        self.lose_stream(detected, detected);
        if side == Side::Edge {
            self.checker.agent_gone(&self.stations[side.index()].store);
        }
        let station = &mut self.stations[side.index()];
        station.half = None;
        station.stream = 0;
        station.watches.clear();
        station.list_fault = None;
        station.held.clear();
        station.incarnation += 1;
        let incarnation = station.incarnation;
        self.checker.excuse_repetition(self.now);
        self.after(Duration::from_millis(millis), Due::Restart { side, incarnation });
    }

    fn collect_counters(&mut self, side: Side) {
        let Some(half) = &self.stations[side.index()].half else { return };
        for (name, count) in half.exercised() {
            self.counters.add(name, count);
        }
        let counted = half.counters();
        for (name, count) in [
            ("resent", counted.resent),
            ("conflicts", counted.conflicts),
            ("refused", counted.refused),
            ("trouble", counted.trouble),
            ("reverted", counted.reverted),
            ("recreated", counted.recreated),
            ("held", counted.held),
            ("resyncs", counted.resyncs),
            ("late_acks", counted.late_acks),
            ("rounds", counted.rounds),
            ("rounds_equal", counted.rounds_equal),
        ] {
            self.counters.add(name, count);
        }
    }

    fn heal(&mut self) {
        self.link.cut_until = self.now;
        for side in Side::BOTH {
            let station = &mut self.stations[side.index()];
            station.faults.clear();
            station.list_fault = None;
        }
        self.counters.add("heals", 1);
    }

    fn step(&mut self, action: Action) -> Result<(), Violation> {
        match action {
            Action::Cut { millis } => {
                self.counters.add("cuts", 1);
                self.link.cut_until = self.link.cut_until.max(self.now + Duration::from_millis(millis));
                let (hub, edge) = (self.millis(0, 30_000), self.millis(0, 20_000));
                self.lose_stream(hub, edge);
            }
            Action::Crash { side, millis } => self.crash(side, millis),
            Action::Api { side, fault, calls } => {
                self.stations[side.index()].faults.extend((0..calls).map(|_| fault));
            }
            Action::List { side, fault } => {
                let station = &mut self.stations[side.index()];
                // A first list that lies cannot be told from an empty cluster.
                if station.half.as_ref().is_some_and(|half| half.has_synced()) {
                    station.list_fault = Some(fault);
                    self.forget_history(side)?;
                }
            }
            Action::Swallow { side } => self.swallow[side.index()] = true,
            Action::BreakWatch { side } => {
                if !self.stations[side.index()].watches.is_empty() {
                    self.counters.add("watches_broken", 1);
                    self.break_watch(side);
                }
            }
            Action::Compact { side } => {
                self.counters.add("compactions", 1);
                self.forget_history(side)?;
            }
            action => self.act_user(action)?,
        }
        Ok(())
    }

    /// Whoever watches has to list again.
    fn forget_history(&mut self, side: Side) -> Result<(), Violation> {
        let station = &mut self.stations[side.index()];
        // An object of another kind moves the revision on.
        let name = format!("m-{}", station.store.revision());
        let map = json!({"kind": "ConfigMap", "metadata": {"name": name}});
        // Names are never used twice.
        let _ = station.store.create(Resource::ConfigMap, station.namespace, map);
        // The simulator's own watches stay current.
        self.changed(side)?;
        self.control_read();
        self.stations[side.index()].store.compact();
        self.break_watch(side);
        Ok(())
    }

    fn break_watch(&mut self, side: Side) {
        let station = &mut self.stations[side.index()];
        let incarnation = station.incarnation;
        for open in core::mem::take(&mut station.watches).into_values() {
            self.answer(side, incarnation, open.id, Answer::End(End::Broken("connection reset".to_owned())));
        }
    }

    fn act_user(&mut self, action: Action) -> Result<(), Violation> {
        let hub = |world: &Self, app: u8| {
            let station = &world.stations[Side::Hub.index()];
            station.store.get(APPLICATION, station.namespace, &name_of(app)).ok()
        };
        let edge = |world: &Self, name: &str| {
            world.stations[Side::Edge.index()].store.get(APPLICATION, EDGE_NAMESPACE, name).ok()
        };
        match action {
            Action::Create { app, value, finalizer } => {
                if hub(self, app).is_none() {
                    self.count("creates");
                    self.create(Side::Hub, &name_of(app), hub_application(app, value, finalizer))?;
                }
            }
            Action::Update { app, value } => {
                if hub(self, app).is_some() {
                    self.count("updates");
                    let patch =
                        json!({"spec": {"source": {"path": format!("p{value}"), "targetRevision": "v2"}}});
                    self.write(Side::Hub, &name_of(app), patch)?;
                }
            }
            Action::Metadata { app, value } => {
                if hub(self, app).is_some() {
                    self.count("metadata_edits");
                    let patch = if value % 3 == 0 {
                        json!({"metadata": {"labels": null, "annotations": {"example.com/note": null}}})
                    } else {
                        json!({"metadata": {"labels": {"l": value.to_string()}, "annotations": {"example.com/note": value.to_string()}}})
                    };
                    self.write(Side::Hub, &name_of(app), patch)?;
                }
            }
            Action::Operation { app, id } => {
                // As Argo CD's API does it: one at a time, and the state of the one before is cleared.
                if let Some(object) = hub(self, app)
                    && object.value().get("operation").is_none()
                    && !object.is_terminating()
                {
                    self.count("operations");
                    let mut patch = json!({"operation": {
                        "sync": {"revision": format!("r{id}")}, "info": [{"name": "id", "value": id.to_string()}]
                    }});
                    if object.value()["status"]["operationState"].is_object() {
                        patch["status"] = json!({"operationState": null});
                    }
                    self.checker.operation_set(self.now, u64::from(id), object.uid(), object.name());
                    self.write(Side::Hub, &name_of(app), patch)?;
                }
            }
            Action::Terminate { app } => {
                // The user picks one that runs.
                let hub = &self.stations[Side::Hub.index()].store;
                let running = |object: &&Arc<Object>| {
                    object.value().get("operation").is_some()
                        && object.value()["status"]["operationState"]["phase"] == "Running"
                };
                let names: Vec<String> =
                    hub.iter(APPLICATION).filter(running).map(|object| object.name().to_owned()).collect();
                if let Some(name) = names.get(usize::from(app) % names.len().max(1)) {
                    self.count("terminates");
                    let patch = json!({"status": {"operationState": {"phase": "Terminating"}}});
                    self.write(Side::Hub, name, patch)?;
                }
            }
            Action::Refresh { app } => {
                if let Some(object) = hub(self, app)
                    && object.value()["metadata"]["annotations"].get(controller::REFRESH).is_none()
                    && !object.is_terminating()
                {
                    self.count("refreshes");
                    self.checker.refresh_set(self.now, object.uid(), object.name());
                    let patch = json!({"metadata": {"annotations": {controller::REFRESH: "normal"}}});
                    self.write(Side::Hub, &name_of(app), patch)?;
                }
            }
            Action::Delete { app } => {
                if let Some(object) = hub(self, app) {
                    let finalizer = object.value()["metadata"]["finalizers"].is_array();
                    self.count(if finalizer { "deletes_with_finalizer" } else { "deletes" });
                    self.delete(Side::Hub, &name_of(app))?;
                }
            }
            Action::Recreate { app, value } => {
                if hub(self, app).is_some() {
                    self.delete(Side::Hub, &name_of(app))?;
                    if hub(self, app).is_none() {
                        self.count("recreates");
                        self.create(Side::Hub, &name_of(app), hub_application(app, value, false))?;
                    }
                }
            }
            Action::EdgeEdit { app, value } => {
                if let Some(object) = edge(self, &name_of(app))
                    && object.value()["metadata"]["annotations"].get(SOURCE_UID).is_some()
                {
                    self.count("edge_edits");
                    let patch = json!({"spec": {"source": {"path": format!("local{value}")}}});
                    self.write(Side::Edge, &name_of(app), patch)?;
                }
            }
            Action::EdgeDelete { app } => {
                if edge(self, &name_of(app)).is_some() {
                    self.count("edge_deletes");
                    self.checker.local_gone(&name_of(app));
                    self.delete(Side::Edge, &name_of(app))?;
                }
            }
            Action::EdgeUnmark { app } => {
                if let Some(object) = edge(self, &name_of(app))
                    && object.value()["metadata"]["annotations"].get(SOURCE_UID).is_some()
                    // Before it has seen the mark, the agent cannot tell such a copy from the site's own.
                    && self.stations[Side::Edge.index()].half.as_ref().is_some_and(|half| half.has_synced())
                {
                    self.count("edge_unmarks");
                    let patch = json!({"metadata": {"annotations": {SOURCE_UID: null}}});
                    self.write(Side::Edge, &name_of(app), patch)?;
                }
            }
            Action::EdgeLocal { number } => {
                let name = format!("local-{number}");
                if edge(self, &name).is_none() {
                    self.count("edge_locals");
                    self.create_local(&name, number)?;
                }
            }
            Action::EdgeSquat { app } => {
                if edge(self, &name_of(app)).is_none() && hub(self, app).is_none() {
                    self.count("edge_squats");
                    self.create_local(&name_of(app), app)?;
                }
            }
            Action::Health { app, healthy } => {
                let name = name_of(app);
                if edge(self, &name).is_some() {
                    self.count("health_changes");
                    if healthy {
                        self.controller.degraded.remove(&name);
                    } else {
                        self.controller.degraded.insert(name.clone());
                    }
                    self.controller.dirty.insert(name);
                    self.wake_controller();
                }
            }
            Action::Move { app, away } => {
                if self.mapping == Mapping::Destination && hub(self, app).is_some() {
                    self.count("moves");
                    let name = if away { "agent-2" } else { AGENT };
                    let patch = json!({"spec": {"destination": {"name": name}}});
                    self.write(Side::Hub, &name_of(app), patch)?;
                }
            }
            Action::Content(action) => self.act_on_content(action)?,
            Action::Cut { .. }
            | Action::Crash { .. }
            | Action::Api { .. }
            | Action::List { .. }
            | Action::Swallow { .. }
            | Action::BreakWatch { .. }
            | Action::Compact { .. } => {}
        }
        Ok(())
    }

    fn count(&mut self, name: &'static str) {
        self.counters.add(name, 1);
    }

    fn create_local(&mut self, name: &str, value: u8) -> Result<(), Violation> {
        let mut object = hub_application(value, u32::from(value), false);
        object["metadata"]["name"] = json!(name);
        self.checker.local_created(name, &object["spec"]);
        self.create(Side::Edge, name, object)
    }

    fn create(&mut self, side: Side, name: &str, mut object: Value) -> Result<(), Violation> {
        object["metadata"]["name"] = json!(name);
        self.create_of(side, APPLICATION, object)
    }

    fn create_of(&mut self, side: Side, resource: Resource, object: Value) -> Result<(), Violation> {
        let station = &mut self.stations[side.index()];
        let name = object["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        station
            .store
            .create(resource, station.namespace_of(resource), object)
            .map_err(|status| Violation::new("simulator", format!("create {name}: {}", status.message)))?;
        self.changed(side)
    }

    fn write(&mut self, side: Side, name: &str, patch: Value) -> Result<(), Violation> {
        self.patch(side, APPLICATION, name, &patch)
    }

    fn patch(&mut self, side: Side, resource: Resource, name: &str, patch: &Value) -> Result<(), Violation> {
        let station = &mut self.stations[side.index()];
        let namespace = station.namespace_of(resource);
        // A name that is gone meanwhile, or a version that is not the latest: the writer comes back.
        let _ = station.store.patch_value(resource, namespace, name, PatchType::Merge, patch);
        self.changed(side)
    }

    fn delete(&mut self, side: Side, name: &str) -> Result<(), Violation> {
        self.delete_of(side, APPLICATION, name)
    }

    fn delete_of(&mut self, side: Side, resource: Resource, name: &str) -> Result<(), Violation> {
        let station = &mut self.stations[side.index()];
        let namespace = station.namespace_of(resource);
        // What is gone already is deleted.
        let _ = station.store.delete(resource, namespace, name, &Preconditions::default());
        self.changed(side)
    }

    /// Somebody on the hub writes a project, a repository or the keys as a whole.
    fn put(&mut self, object: Value) -> Result<(), Violation> {
        let resource = content::resource_of(&object);
        let name = object["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        let station = &self.stations[Side::Hub.index()];
        if station.store.get(resource, station.namespace_of(resource), &name).is_err() {
            return self.create_of(Side::Hub, resource, object);
        }
        self.patch(Side::Hub, resource, &name, &object)
    }

    fn act_on_content(&mut self, action: content::Action) -> Result<(), Violation> {
        use content::Action;
        let (resource, name) = action.object();
        match action {
            Action::Put { .. } => {
                self.count("content_written");
                self.put(action.body())
            }
            Action::Delete { .. } => {
                let station = &self.stations[Side::Hub.index()];
                if station.store.get(resource, station.namespace_of(resource), &name).is_ok() {
                    self.count("content_deleted");
                    self.delete_of(Side::Hub, resource, &name)?;
                }
                Ok(())
            }
            Action::EdgeEdit { .. } | Action::EdgeDelete { .. } => {
                let edge = &self.stations[Side::Edge.index()].store;
                let is_copy = edge
                    .get(resource, EDGE_NAMESPACE, &name)
                    .is_ok_and(|object| object.value()["metadata"]["annotations"].get(SOURCE_UID).is_some());
                if !is_copy {
                    return Ok(());
                }
                if matches!(action, Action::EdgeDelete { .. }) {
                    self.count("content_edge_deletes");
                    return self.delete_of(Side::Edge, resource, &name);
                }
                self.count("content_edge_edits");
                self.patch(Side::Edge, resource, &name, &action.body())
            }
        }
    }

    /// A store may have changed: everybody who watches it gets a turn.
    fn changed(&mut self, side: Side) -> Result<(), Violation> {
        let station = &self.stations[side.index()];
        let mut arrived = 0;
        self.checker.follow(self.now, side, &station.store, &mut arrived)?;
        self.counters.add("operations_arrived", arrived);
        if side == Side::Hub {
            let withdrawn = self.checker.follow_content(&self.stations[Side::Hub.index()].store);
            self.counters.add("content_withdrawn", withdrawn);
        }
        self.schedule_watch(side);
        if side == Side::Edge {
            self.wake_controller();
        }
        Ok(())
    }

    fn schedule_watch(&mut self, side: Side) {
        let delay = self.millis(1, 60);
        let station = &mut self.stations[side.index()];
        let incarnation = station.incarnation;
        let mut due = Vec::new();
        for open in station.watches.values_mut() {
            if !open.scheduled && !open.watch.is_current(&station.store) {
                open.scheduled = true;
                due.push(open.id);
            }
        }
        for id in due {
            self.after(delay, Due::WatchTurn { side, incarnation, id });
        }
    }

    fn watch_turn(&mut self, side: Side, incarnation: u32, id: u64) {
        let station = &mut self.stations[side.index()];
        if station.incarnation != incarnation {
            return;
        }
        let Some((&resource, open)) = station.watches.iter_mut().find(|(_, open)| open.id == id) else {
            return;
        };
        open.scheduled = false;
        let mut lines = Vec::new();
        while let Some(event) = station.store.next_event(&mut open.watch) {
            lines.extend_from_slice(&event.line());
        }
        let ended = open.watch.has_ended();
        if ended {
            station.watches.remove(&resource);
        }
        self.answer(side, incarnation, id, Answer::Bytes(&lines));
        if ended {
            self.counters.add("expired_watches", 1);
            self.answer(side, incarnation, id, Answer::End(End::Finished));
        }
    }

    fn watch_end(&mut self, side: Side, incarnation: u32, id: u64) {
        let station = &mut self.stations[side.index()];
        if station.incarnation != incarnation {
            return;
        }
        let Some((&resource, _)) = station.watches.iter().find(|(_, open)| open.id == id) else { return };
        let Some(open) = station.watches.remove(&resource) else { return };
        if let Some(event) = station.store.bookmark(&open.watch) {
            self.answer(side, incarnation, id, Answer::Bytes(&event.line()));
        }
        self.counters.add("watches_renewed", 1);
        self.answer(side, incarnation, id, Answer::End(End::Finished));
    }

    fn answer(&mut self, side: Side, incarnation: u32, id: u64, answer: Answer<'_>) {
        let station = &mut self.stations[side.index()];
        if station.incarnation == incarnation
            && let Some(half) = &mut station.half
        {
            half.answered(self.now, id, answer);
        }
    }

    /// A call arrives at its API server.
    fn serve(&mut self, side: Side, incarnation: u32, call: Call) -> Result<(), Violation> {
        let id = call.id;
        match call.what {
            What::Fetch { path } => {
                if self.stations[side.index()].incarnation == incarnation {
                    self.serve_fetch(side, incarnation, id, &path)?;
                }
                Ok(())
            }
            what => self.serve_call(side, incarnation, id, what),
        }
    }

    fn serve_call(&mut self, side: Side, incarnation: u32, id: u64, what: What) -> Result<(), Violation> {
        let faults = &mut self.stations[side.index()].faults;
        let fault = if faults.is_empty() { None } else { Some(faults.remove(0)) };
        let (is_read, name) = match &what {
            What::Object { key, ask } => (matches!(ask, Ask::Core(Verb::Get)), key.name.to_string()),
            What::List { .. } | What::Fetch { .. } => (true, String::new()),
        };
        let mut delay = self.millis(1, 40);
        let refuse = |code, reason: &str, retry_after| {
            Outcome::Status(agent_core::request::Status {
                code,
                reason: reason.to_owned(),
                message: "made by the simulator".to_owned(),
                retry_after,
            })
        };
        let outcome = match fault {
            Some(Fault::Error) => {
                self.count("api_errors");
                refuse(500, "InternalError", None)
            }
            Some(Fault::TooMany) => {
                self.count("api_too_many");
                refuse(429, "TooManyRequests", Some(Duration::from_secs(2)))
            }
            Some(Fault::Refused) if !is_read => {
                self.count("api_refusals");
                if side == Side::Edge {
                    self.checker.refused(self.now, &name);
                }
                refuse(422, "Invalid", None)
            }
            Some(Fault::LostRequest) => {
                self.count("lost_requests");
                delay = self.millis(1_000, 15_000);
                Outcome::Unknown("timed out".to_owned())
            }
            Some(Fault::LostAnswer) => {
                self.count("lost_answers");
                self.checker.excuse_repetition(self.now);
                self.execute(side, what)?;
                delay = self.millis(1, 15_000);
                Outcome::Unknown("connection reset".to_owned())
            }
            Some(Fault::Slow) => {
                self.count("slow_answers");
                delay = self.millis(2_000, 40_000);
                self.execute(side, what)?
            }
            Some(Fault::Refused) | None => self.execute(side, what)?,
        };
        self.after(delay, Due::Outcome { side, incarnation, id, outcome });
        Ok(())
    }

    fn execute(&mut self, side: Side, what: What) -> Result<Outcome, Violation> {
        let station = &mut self.stations[side.index()];
        let store = &mut station.store;
        let before = store.revision();
        let (key, ask) = match what {
            What::Object { key, ask } => (key, ask),
            What::List { path } | What::Fetch { path } => {
                return Ok(match list(store, &path) {
                    Ok(body) => Outcome::Done(body),
                    Err(status) => Outcome::Status(parse_status(status.code, &status.to_json())),
                });
            }
        };
        let resource = Resource::from(key.kind);
        let (namespace, name) = (&*key.namespace, &*key.name);
        let result: Result<Vec<u8>, Status> = match ask {
            Ask::Core(Verb::Get) => {
                self.counters.add("reads", 1);
                store.get(resource, namespace, name).map(|object| object.json().to_vec())
            }
            Ask::Core(Verb::Create(body)) => match serde_json::from_slice(&body) {
                Ok(object) => store.create(resource, namespace, object).map(|object| object.json().to_vec()),
                Err(error) => Err(Status::bad_request(error.to_string())),
            },
            Ask::Core(Verb::CreateNamespace) => Err(Status::bad_request("no namespace is missing here")),
            Ask::Core(Verb::JsonPatch(patch)) => store
                .patch(resource, namespace, name, PatchType::Json, &patch)
                .map(|object| object.json().to_vec()),
            Ask::Core(Verb::Delete { uid }) => {
                if let Ok(object) = store.get(resource, namespace, name)
                    && object.uid() == &*uid
                    && !object.is_terminating()
                {
                    self.checker.delete(side, resource, object.value())?;
                    self.counters.add("edge_deletes_by_agent", 1);
                }
                let preconditions = Preconditions { uid: Some(uid.into()), resource_version: None };
                store
                    .delete(resource, namespace, name, &preconditions)
                    .map(|deleted: Deleted| deleted.body(resource))
            }
            Ask::Replace(body) => match serde_json::from_slice(&body) {
                Ok(object) => {
                    store.update(resource, namespace, name, object).map(|object| object.json().to_vec())
                }
                Err(error) => Err(Status::bad_request(error.to_string())),
            },
            Ask::Delete { told } => {
                if let Ok(object) = store.get(resource, namespace, name)
                    && !object.is_terminating()
                {
                    if told {
                        self.checker.delete_by_model(side, resource, object.value())?;
                    }
                    self.counters.add("deletes_by_model", 1);
                }
                store
                    .delete(resource, namespace, name, &Preconditions::default())
                    .map(|deleted: Deleted| deleted.body(resource))
            }
        };
        if let Err(status) = &result
            && matches!(status.code, 400 | 415 | 501)
        {
            let text = format!("{side:?} sent what no API server takes: {}", status.message);
            return Err(Violation::new("bad-request", text));
        }
        let revision = store.revision();
        if revision != before {
            self.last_write = self.now;
            self.hash.add(self.now, 2 + side.index() as u64, name.as_bytes());
            self.count(if side == Side::Hub { "writes_hub" } else { "writes_edge" });
            self.changed(side)?;
        }
        Ok(match result {
            Ok(body) => Outcome::Done(body),
            Err(status) => Outcome::Status(parse_status(status.code, &status.to_json())),
        })
    }

    fn serve_fetch(
        &mut self,
        side: Side,
        incarnation: u32,
        id: u64,
        path_and_query: &str,
    ) -> Result<(), Violation> {
        let (path, query) = path_and_query.split_once('?').unwrap_or((path_and_query, ""));
        let query = Query::parse(query);
        let route = Route::parse(path);
        let shape = Shape::new("GET", &route, "", query.keys());
        let (Route::Collection { resource, namespace }, Some(_)) = (&route, shape.known()) else {
            return Err(Violation::new(
                "bad-request",
                format!("{side:?} asked for the unknown shape {shape}"),
            ));
        };
        let station = &mut self.stations[side.index()];
        let namespace = namespace.as_deref();
        let streamed = query.is_watch();
        let lists = !streamed || path_and_query.contains("sendInitialEvents=true");
        // The list that a fault meets is most often the longest one.
        let is_met = lists && (*resource == APPLICATION || self.now.as_millis().is_multiple_of(4));
        let fault = if is_met { station.list_fault.take() } else { None };
        let answer: Result<Vec<u8>, Status> = match fault {
            Some(ListFault::Fails) => {
                self.counters.add("failed_lists", 1);
                Err(Status::new(500, "InternalError", "made by the simulator"))
            }
            Some(ListFault::Empty) if !streamed => {
                let revision = station.store.revision();
                self.lied(side);
                Ok(List { items: Vec::new(), revision, r#continue: String::new(), remaining: None }
                    .body(*resource))
            }
            fault => {
                if streamed {
                    let opened = query.watch_options(*resource).and_then(|mut options| {
                        if fault.is_some() {
                            options.selector = nobody();
                        }
                        station.store.watch(*resource, namespace, &options)
                    });
                    let opened = opened.map(|watch| {
                        station.watches.insert(*resource, OpenWatch { id, watch, scheduled: true });
                    });
                    if fault.is_some() {
                        self.lied(side);
                    }
                    opened.map(|()| Vec::new())
                } else {
                    query
                        .list_options()
                        .and_then(|options| station.store.list(*resource, namespace, &options))
                        .map(|list| list.body(*resource))
                }
            }
        };
        let delay = self.millis(1, 40);
        match answer {
            Err(status) => {
                let end = End::Status(parse_status(status.code, &status.to_json()));
                self.after(delay, Due::Body { side, incarnation, id, bytes: Vec::new(), end: Some(end) });
            }
            Ok(body) if !streamed => {
                self.counters.add("pages", 1);
                self.after(delay, Due::Body { side, incarnation, id, bytes: body, end: Some(End::Finished) });
            }
            Ok(_) => {
                self.counters.add("watches", 1);
                self.after(delay, Due::WatchTurn { side, incarnation, id });
                // Sooner than asked for, as servers may: a run is short.
                let limit = query.watch_limit().unwrap_or(WATCH_LIMIT) / 8;
                self.after(limit, Due::WatchEnd { side, incarnation, id });
            }
        }
        Ok(())
    }

    /// An empty list was served. The truth follows: a lie that nobody takes back leaves no trace to find it by.
    fn lied(&mut self, side: Side) {
        self.count("empty_lists");
        self.after(Duration::from_secs(10), Due::Step(Action::Compact { side }));
    }

    fn wake_controller(&mut self) {
        let edge = &self.stations[Side::Edge.index()].store;
        if self.controller.scheduled
            || (self.controller.watch.is_current(edge) && self.controller.dirty.is_empty())
        {
            return;
        }
        self.controller.scheduled = true;
        let delay = self.millis(50, 1_200);
        self.after(delay, Due::Controller);
    }

    /// The controller takes in what it watches.
    fn control_read(&mut self) {
        let edge = &self.stations[Side::Edge.index()].store;
        while let Some(event) = edge.next_event(&mut self.controller.watch) {
            self.controller.dirty.insert(event.object.name().to_owned());
        }
    }

    fn control(&mut self, periodic: bool) -> Result<(), Violation> {
        if !periodic {
            self.controller.scheduled = false;
        }
        self.control_read();
        let mut dirty = core::mem::take(&mut self.controller.dirty);
        let edge = &self.stations[Side::Edge.index()].store;
        if periodic {
            dirty.extend(edge.iter(APPLICATION).map(|object| object.name().to_owned()));
        }
        let stamp = WALL.rfc3339(Instant::from_millis(self.now.as_millis() / 1000 * 1000));
        for name in dirty {
            let edge = &self.stations[Side::Edge.index()].store;
            let Ok(object) = edge.get(APPLICATION, EDGE_NAMESPACE, &name) else { continue };
            let running = object.value()["status"]["operationState"]["phase"] == "Running";
            if running && self.controller.busy.get(&name).is_some_and(|until| *until > self.now) {
                self.controller.dirty.insert(name);
                continue;
            }
            let health = if self.controller.degraded.contains(&name) { "Degraded" } else { "Healthy" };
            if let Some(change) = controller::step(object.value(), health, &stamp, periodic) {
                if change.what == controller::What::OperationStarted {
                    let until = self.now + self.millis(0, 12_000);
                    self.controller.busy.insert(name.clone(), until);
                }
                self.count(match change.what {
                    controller::What::Finalized => "controller_finalized",
                    controller::What::OperationStarted => "controller_started",
                    controller::What::OperationSucceeded => "controller_succeeded",
                    controller::What::OperationTerminated => "controller_terminated",
                    controller::What::Reconciled => "controller_reconciled",
                    controller::What::Touched => "controller_touched",
                });
                self.write(Side::Edge, &name, change.patch)?;
            }
        }
        self.wake_controller();
        Ok(())
    }

    /// A technician confirms deletes that a resync held, where the hub's user did delete.
    fn confirm_held(&mut self) -> Result<(), Violation> {
        let station = &mut self.stations[Side::Edge.index()];
        if let Some(half) = &mut station.half {
            station.held.extend(half.take_held());
        }
        for key in core::mem::take(&mut station.held) {
            let edge = &self.stations[Side::Edge.index()].store;
            let resource = Resource::from(key.kind);
            let Ok(object) = edge.get(resource, EDGE_NAMESPACE, &key.name) else { continue };
            let Some(source_uid) = object.value()["metadata"]["annotations"][SOURCE_UID].as_str() else {
                continue;
            };
            if self.checker.is_deleted(source_uid) && self.confirmed.insert(source_uid.to_owned()) {
                let patch = json!({"metadata": {"annotations": {CONFIRM_DELETE: source_uid}}});
                self.count("confirmed_deletes");
                self.patch(Side::Edge, resource, &key.name, &patch)?;
            }
        }
        Ok(())
    }
}

/// What was sent and written, in one number.
struct TraceHash(u64);

impl Default for TraceHash {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl TraceHash {
    fn add(&mut self, now: Instant, tag: u64, bytes: &[u8]) {
        let mut mix = |word: u64| {
            self.0 = (self.0 ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
        };
        mix(now.as_millis());
        mix(tag);
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            mix(u64::from_le_bytes(word));
        }
    }
}

/// A list as an API server answers it.
fn list(store: &Store, path_and_query: &str) -> Result<Vec<u8>, Status> {
    let (path, query) = path_and_query.split_once('?').unwrap_or((path_and_query, ""));
    let Route::Collection { resource, namespace } = Route::parse(path) else {
        return Err(Status::bad_request(format!("{path} is no collection")));
    };
    let options = Query::parse(query).list_options()?;
    store.list(resource, namespace.as_deref(), &options).map(|list| list.body(resource))
}

/// Whether a frame that its receiver acknowledges and does not carry out can be made good: what is gone, exists, or has a status.
fn can_be_mended(frame: &[u8]) -> bool {
    let Ok(event) = EventView::decode(frame) else { return false };
    // A request of a user's is promised to nobody who lies about having taken it.
    let asks = frame_object(frame)["metadata"]["annotations"].get(controller::REFRESH).is_some();
    !asks
        && event.target().and_then(Target::kind).is_some()
        && matches!(
            event.event_type(),
            EventType::Known(Type::Create | Type::SpecUpdate | Type::Delete | Type::StatusUpdate)
        )
}

/// Selects nothing.
fn nobody() -> Selector {
    Selector::parse("", "metadata.name=nobody").unwrap_or_default()
}

fn name_of(app: u8) -> String {
    format!("app-{app}")
}

fn hub_application(app: u8, value: u32, finalizer: bool) -> Value {
    let mut object = json!({
        "apiVersion": "argoproj.io/v1alpha1", "kind": "Application",
        "metadata": {"name": name_of(app), "labels": {"app": app.to_string()}},
        "spec": {
            "project": "default",
            "destination": {"name": AGENT, "namespace": format!("ns-{app}")},
            "source": {
                "repoURL": "https://git.example.com/a?x=1&y=<2>", "path": format!("p{value}"), "targetRevision": "v1"
            },
            "syncPolicy": {"retry": {"limit": 2}}
        }
    });
    if finalizer {
        object["metadata"]["finalizers"] = json!([controller::RESOURCES_FINALIZER]);
    }
    object
}

fn frame_object(frame: &[u8]) -> Value {
    let payload = EventView::decode(frame).ok().and_then(|event| event.payload().ok());
    payload.and_then(|payload| serde_json::from_slice(payload).ok()).unwrap_or_default()
}

const CONFIRM_DELETE: &str = "argocd-agent.argoproj-labs.io/confirm-delete";
const WALL: Wall = Wall { epoch_millis_at_zero: 1_790_000_000_000 };
/// Keeps the world's randomness apart from the scenario's.
const WORLD: u64 = 0x0a0b_0c0d_0e0f_1011;
/// As Argo CD's application resync.
const CONTROLLER_PERIOD: Duration = Duration::from_secs(180);
/// What a sender's socket and HTTP/2 window hold.
const SEND_BUFFER: usize = 64 * 1024;
/// Shorter than the product's: a run is short.
/// With a half of the reference: a day, somewhat more, and time to put it off.
const ROUND_LIMIT: Duration = Duration::from_secs(36 * 3600);
const ROUND_INTERVAL: Duration = Duration::from_secs(5 * 60);
const SETTLE_SLICE: Duration = Duration::from_secs(5);
/// Longer than the longest back-off of a refused object.
const SETTLE_LIMIT: Duration = Duration::from_secs(30 * 60);
/// Longer than any acknowledgement takes.
const QUIET: Duration = Duration::from_secs(30);
const IDLE: Duration = Duration::from_secs(10 * 60);
/// What a server chooses where a watch names no time.
const WATCH_LIMIT: Duration = Duration::from_secs(1800);
const TURNS_LIMIT: u32 = 20_000;
