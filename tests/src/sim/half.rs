//! The seat of one half in the simulator, and our own half in it.
//!
//! The world knows a half only by [`Half`]: frames and calls out, facts in. A model of a foreign half takes the same seat.

use std::collections::BTreeMap;

use agent_core::core::{Config, Core, Counters, Note};
use agent_core::informer::{self, End, Informer};
use agent_core::peer::{Capabilities, Mapping, Peer};
use agent_core::rand::Rng;
use agent_core::request::{Key, Kind, Observation, Outcome, Ticket, Verb};
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
        verb: Verb,
    },
    /// A list or a watch. A new one replaces the one before.
    Fetch {
        path: String,
    },
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
    /// Whether it owes nothing to anybody.
    fn is_settled(&self) -> bool;
    /// Objects whose deletion it holds until a person confirms it.
    fn take_held(&mut self) -> Vec<Key>;
    fn counters(&self) -> Counters;
}

/// Our own half: the product's core behind the product's informer.
#[derive(Debug)]
pub struct CoreHalf {
    core: Core,
    informer: Informer,
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
    Fetch(u32),
}

impl CoreHalf {
    pub fn new(config: Config, seed: u64, wall: Wall, believes_empty_lists: bool) -> Self {
        let mut rng = Rng::new(seed);
        let fetch = informer::Config {
            kind: Kind::Application,
            namespace: Some(config.namespace.as_str().into()),
            label_selector: "argocd-agent.argoproj-labs.io/ignore-sync!=true".into(),
            // Small, so that lists have several pages.
            page_size: 7,
            streaming_lists: rng.below(2) == 0,
        };
        let instance = rng.uuid();
        Self {
            core: Core::new(config, Rng::new(rng.next_u64()), wall),
            informer: Informer::new(fetch),
            rng,
            calls: BTreeMap::new(),
            next_id: 0,
            held: Vec::new(),
            instance,
            believed: believes_empty_lists.then(BTreeMap::new),
            listed: 0,
        }
    }

    fn feed_informer(&mut self, now: Instant, bytes: Option<&[u8]>, end: Option<End>) {
        let Self { core, informer, rng, believed, listed, .. } = self;
        let mut sink = |event: informer::Event<'_>| match event {
            informer::Event::ListStarted => {
                *listed = 0;
                core.list_started(Kind::Application);
            }
            informer::Event::Present { key, object } => {
                *listed += 1;
                core.observe(now, &key, Observation::Present(object));
                if let Some(believed) = believed {
                    believed.insert(key, object.to_vec());
                }
            }
            informer::Event::Gone { key, object } => {
                core.observe(now, &key, Observation::Gone(object));
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
                core.synced(now, Kind::Application);
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

impl Half for CoreHalf {
    fn peer(&self) -> Peer {
        Peer {
            version: "0.0.0-sim".into(),
            instance: self.instance.as_str().into(),
            mapping: Some(Mapping::Namespace),
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
        let (pending, what) = if let Some(fetch) = self.informer.poll_fetch(&mut self.rng) {
            // Only the latest fetch is of interest.
            self.calls.retain(|_, pending| !matches!(pending, Pending::Fetch(_)));
            (Pending::Fetch(fetch.id), What::Fetch { path: fetch.path })
        } else {
            let request = self.core.poll_request(now)?;
            (Pending::Object(request.ticket), What::Object { key: request.key, verb: request.verb })
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
            (Some(Pending::Fetch(fetch)), answer) => {
                let current = self.informer.fetching() == Some(*fetch);
                match answer {
                    Answer::Bytes(bytes) if current => self.feed_informer(now, Some(bytes), None),
                    Answer::End(end) => {
                        self.calls.remove(&id);
                        if current {
                            self.feed_informer(now, None, Some(end));
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
        self.informer.handle_timeout(now, &mut self.rng);
        while self.informer.poll_note().is_some() {}
        self.core.handle_timeout(now);
        self.take_notes();
    }

    fn poll_timeout(&self) -> Option<Instant> {
        self.informer.poll_timeout().into_iter().chain(self.core.poll_timeout()).min()
    }

    fn has_synced(&self) -> bool {
        self.informer.has_synced()
    }

    fn is_settled(&self) -> bool {
        self.core.is_settled()
    }

    fn take_held(&mut self) -> Vec<Key> {
        core::mem::take(&mut self.held)
    }

    fn counters(&self) -> Counters {
        self.core.counters()
    }
}
