//! The seat of one half in the simulator, and our own half in it.
//!
//! The world knows a half only by [`Half`]: frames and calls out, facts in. A model of a foreign half takes the same seat.

use std::collections::BTreeMap;

use agent_core::core::{Config, Core, Counters, Note, Role};
use agent_core::informer::{self, End, Informer};
use agent_core::peer::{Capabilities, Peer};
use agent_core::rand::Rng;
use agent_core::request::{Key, Kind, Observation, Outcome, Ticket, Verb};
use agent_core::router::{Route, Router};
use agent_core::time::{Instant, Wall};

/// One call to the half's own API server.
#[derive(Debug)]
pub struct Call {
    /// Comes back with the answer.
    pub id: u64,
    pub what: What,
}

/// What is called.
#[derive(Debug)]
pub enum What {
    Object {
        key: Key,
        ask: Ask,
    },
    /// A list or a watch. A new one replaces the one before.
    Fetch {
        path: String,
    },
    /// A list of its own, answered as a call for an object is.
    List {
        path: String,
    },
}

/// What is asked about an object.
#[derive(Debug)]
pub enum Ask {
    /// As our core asks.
    Core(Verb),
    /// PUT.
    Replace(Vec<u8>),
    /// DELETE by name alone, whatever object has it.
    Delete {
        /// The peer said so; if not, it makes room for another object of that name.
        told: bool,
    },
}

/// Something that a foreign half lost by a rule of its own: what cannot be expected of the pair until then.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Lapse {
    pub kind: Kind,
    pub name: String,
    /// Its name.
    pub rule: &'static str,
    pub until: Until,
}

/// What mends a [`Lapse`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Until {
    /// Nothing waits for it: an operation that was asked for is given up, acknowledged.
    Now,
    /// The next change on the hub; until then only labels, annotations and finalizers differ, which no checksum knows.
    Edit,
    /// A comparison of everything, which our half begins.
    Round,
    /// The foreign half starts again.
    Restart,
    /// A person.
    Never,
}

/// What an API server says to a call.
#[derive(Debug)]
pub enum Answer<'a> {
    /// To [`What::Object`].
    Outcome(Outcome),
    /// A piece of the body of a fetch.
    Bytes(&'a [u8]),
    /// The fetch has ended.
    End(End),
}

/// A principal's half for one agent, or an agent.
pub trait Half {
    /// How it introduces itself.
    fn peer(&self) -> Peer;
    fn connected(&mut self, now: Instant, peer: &Peer);
    fn disconnected(&mut self, now: Instant);
    /// One message from the stream; `Err` if it is no event at all.
    fn receive(&mut self, now: Instant, frame: &[u8]) -> Result<(), String>;
    fn poll_transmit(&mut self, now: Instant, room: usize) -> Option<Vec<u8>>;
    fn poll_call(&mut self, now: Instant) -> Option<Call>;
    fn answered(&mut self, now: Instant, id: u64, answer: Answer<'_>);
    fn handle_timeout(&mut self, now: Instant);
    fn poll_timeout(&self) -> Option<Instant>;
    /// Whether it has listed everything once.
    fn has_synced(&self) -> bool;
    /// Whether it owes nothing to anybody, objects apart of which nothing is expected.
    fn is_settled(&self, is_excused: &dyn Fn(Kind, &str) -> bool) -> bool;
    /// Objects whose deletion it holds until a person confirms it.
    fn take_held(&mut self) -> Vec<Key>;
    fn counters(&self) -> Counters;
    /// Counts of its own, for a foreign half.
    fn exercised(&self) -> BTreeMap<&'static str, u64> {
        BTreeMap::new()
    }
    /// What it has lost since the last time.
    fn take_lapses(&mut self) -> Vec<Lapse> {
        Vec::new()
    }
}

/// Our own half: the product's core behind the product's informer.
#[derive(Debug)]
pub struct CoreHalf {
    core: Core,
    informers: Vec<Informer>,
    /// On the hub: which objects are the agent's.
    router: Option<Router>,
    rng: Rng,
    calls: BTreeMap<u64, Pending>,
    next_id: u64,
    held: Vec<Key>,
    instance: String,
    /// Planted: an empty list is taken for deletions.
    believed: Option<BTreeMap<Key, Vec<u8>>>,
    listed: usize,
}

#[derive(Debug)]
enum Pending {
    Object(Ticket),
    /// Of the informer at this place.
    Fetch(usize, u32),
}

impl CoreHalf {
    pub fn new(config: Config, seed: u64, wall: Wall, believes_empty_lists: bool) -> Self {
        let mut rng = Rng::new(seed);
        let streaming_lists = rng.below(2) == 0;
        let is_hub = config.role == Role::Principal;
        let informer = |kind| {
            Informer::new(informer::Config {
                kind,
                namespace: config.namespace_of(kind).map(Into::into),
                label_selector: informer::selector("").into(),
                // Small, so that lists have several pages.
                page_size: 7,
                streaming_lists,
            })
        };
        let informers = Kind::ALL.map(informer).into();
        let router = is_hub.then(|| {
            let mut router = Router::new(config.mapping, config.regex);
            router.add_agent(&config.agent);
            router
        });
        let instance = rng.uuid();
        Self {
            core: Core::new(config, Rng::new(rng.next_u64()), wall),
            informers,
            router,
            rng,
            calls: BTreeMap::new(),
            next_id: 0,
            held: Vec::new(),
            instance,
            believed: believes_empty_lists.then(BTreeMap::new),
            listed: 0,
        }
    }

    fn feed_informer(&mut self, now: Instant, at: usize, bytes: Option<&[u8]>, end: Option<End>) {
        let Self { core, informers, router, rng, believed, listed, .. } = self;
        let informer = &mut informers[at];
        let kind = informer.kind();
        let believed = if kind == Kind::Application { believed } else { &mut None };
        let mut sink = |event: informer::Event<'_>| match event {
            informer::Event::ListStarted => {
                *listed = 0;
                core.list_started(kind);
            }
            informer::Event::Present { key, object } => {
                *listed += 1;
                let route = router.as_mut().map(|router| router.present(&key, object));
                follow(core, now, &key, Observation::Present(object), route);
                if let Some(believed) = believed {
                    believed.insert(key, object.to_vec());
                }
            }
            informer::Event::Gone { key, object } => {
                let route = router.as_mut().map(|router| router.gone(&key));
                follow(core, now, &key, Observation::Gone(object), route);
                if let Some(believed) = believed {
                    believed.remove(&key);
                }
            }
            informer::Event::Synced => {
                if let Some(believed) = believed
                    && *listed == 0
                {
                    for (key, object) in core::mem::take(believed) {
                        core.observe(now, &key, Observation::Gone(&object));
                    }
                }
                core.synced(now, kind);
            }
        };
        if let Some(bytes) = bytes {
            informer.receive(now, bytes, rng, &mut sink);
        }
        if let Some(end) = end {
            informer.end(now, end, rng, &mut sink);
        }
        // Trouble that the simulator made itself.
        while informer.poll_note().is_some() {}
    }

    fn take_notes(&mut self) {
        while let Some(note) = self.core.poll_note() {
            if let Note::HeldDelete { key } = note {
                self.held.push(key);
            }
        }
    }
}

/// On the hub an object reaches the core only if it may be the agent's, and what follows it is looked at again.
fn follow(core: &mut Core, now: Instant, key: &Key, observation: Observation<'_>, route: Option<Route>) {
    let Some(route) = route else { return core.observe(now, key, observation) };
    if !route.agents.is_empty() {
        core.observe(now, key, observation);
    }
    for (_, key) in route.recheck {
        core.recheck(now, &key);
    }
}

impl Half for CoreHalf {
    fn peer(&self) -> Peer {
        Peer {
            version: "0.0.0-sim".into(),
            instance: self.instance.as_str().into(),
            namespace: self.core.config().namespace.as_str().into(),
            mapping: Some(self.core.config().mapping),
            capabilities: Capabilities::OURS,
        }
    }

    fn connected(&mut self, now: Instant, peer: &Peer) {
        self.core.connected(now, peer);
    }

    fn disconnected(&mut self, now: Instant) {
        self.core.disconnected(now);
    }

    fn receive(&mut self, now: Instant, frame: &[u8]) -> Result<(), String> {
        let result = self.core.receive(now, frame).map_err(|error| error.to_string());
        self.take_notes();
        result
    }

    fn poll_transmit(&mut self, now: Instant, room: usize) -> Option<Vec<u8>> {
        self.core.poll_transmit(now, room)
    }

    fn poll_call(&mut self, now: Instant) -> Option<Call> {
        let Self { informers, rng, .. } = self;
        let mut fetches =
            informers.iter_mut().enumerate().filter_map(|(at, one)| Some((at, one.poll_fetch(rng)?)));
        let (pending, what) = if let Some((at, fetch)) = fetches.next() {
            // Only the latest fetch of a kind is of interest.
            self.calls.retain(|_, pending| !matches!(pending, Pending::Fetch(of, _) if *of == at));
            (Pending::Fetch(at, fetch.id), What::Fetch { path: fetch.path })
        } else {
            let request = self.core.poll_request(now)?;
            (Pending::Object(request.ticket), What::Object { key: request.key, ask: Ask::Core(request.verb) })
        };
        self.next_id += 1;
        self.calls.insert(self.next_id, pending);
        Some(Call { id: self.next_id, what })
    }

    fn answered(&mut self, now: Instant, id: u64, answer: Answer<'_>) {
        match (self.calls.get(&id), answer) {
            (Some(Pending::Object(ticket)), Answer::Outcome(outcome)) => {
                self.core.complete(now, *ticket, outcome);
                self.calls.remove(&id);
            }
            (Some(&Pending::Fetch(at, fetch)), answer) => {
                let current = self.informers[at].fetching() == Some(fetch);
                match answer {
                    Answer::Bytes(bytes) if current => self.feed_informer(now, at, Some(bytes), None),
                    Answer::End(end) => {
                        self.calls.remove(&id);
                        if current {
                            self.feed_informer(now, at, None, Some(end));
                        }
                    }
                    _ => {}
                }
            }
            _ => {}
        }
        self.take_notes();
    }

    fn handle_timeout(&mut self, now: Instant) {
        for informer in &mut self.informers {
            informer.handle_timeout(now, &mut self.rng);
            while informer.poll_note().is_some() {}
        }
        self.core.handle_timeout(now);
        self.take_notes();
    }

    fn poll_timeout(&self) -> Option<Instant> {
        let informers = self.informers.iter().filter_map(Informer::poll_timeout);
        informers.chain(self.core.poll_timeout()).min()
    }

    fn has_synced(&self) -> bool {
        self.informers.iter().all(Informer::has_synced)
    }

    fn is_settled(&self, is_excused: &dyn Fn(Kind, &str) -> bool) -> bool {
        let mut pending = self.core.snapshot().filter(|object| object.pending).peekable();
        self.core.is_settled()
            || (pending.peek().is_some()
                && pending.all(|object| is_excused(object.key.kind, &object.key.name)))
    }

    fn take_held(&mut self) -> Vec<Key> {
        core::mem::take(&mut self.held)
    }

    fn counters(&self) -> Counters {
        self.core.counters()
    }
}
