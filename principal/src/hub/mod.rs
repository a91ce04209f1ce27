//! All agents that are registered or connected, and what they share.

mod agent;
mod stream;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use agent_core::core::Counters;
use agent_core::informer::Event;
use agent_core::peer::Mapping;
use agent_core::request::{Kind, Observation};
use agent_core::router::{Route, Router};
use kube::Client;
use tokio::sync::Semaphore;

pub use agent::{Agent, Session};
pub use stream::{AgentStream, Ending, Slot};

use crate::clock::Clock;
use crate::kube::call::Selector;
use crate::namespaces::Namespaces;

/// What every agent's task needs.
pub struct Shared {
    /// To the hub's API server.
    pub client: Client,
    /// For all cores.
    pub clock: Clock,
    /// Which objects are synchronised.
    pub selector: Selector,
    /// Kubernetes requests in progress, over all agents (`--event-processors`).
    pub processors: Semaphore,
    /// Stamped on what is told to agents.
    pub principal_uid: String,
    /// Where the hub's Argo CD and this principal run.
    pub namespace: String,
    /// How Applications are mapped to agents.
    pub mapping: Mapping,
    /// `--allowed-namespaces`, for the cores.
    pub allowed_namespaces: Vec<String>,
    /// Limit of a message both ways.
    pub max_message: usize,
}

/// The agents.
pub struct Hub {
    shared: Arc<Shared>,
    allowed: Namespaces,
    agents: Mutex<State>,
    /// Held while an event is handed to agents: what one event decides must be told before the next one decides.
    router: Mutex<Router>,
}

#[derive(Default)]
struct State {
    agents: BTreeMap<String, Arc<Agent>>,
    /// Of agents that are gone, so that totals never fall.
    retired: Totals,
    /// The first list of objects of any kind is under way, or complete.
    listing_began: bool,
    draining: bool,
}

/// Sums over all agents, for the metrics.
#[derive(Clone, Copy, Default, Debug)]
pub struct Totals {
    /// Events received.
    pub received: u64,
    /// Events sent.
    pub sent: u64,
    /// Errors met while applying them.
    pub errors: u64,
}

impl Totals {
    fn add(&mut self, counters: &Counters) {
        self.received += counters.received;
        self.sent += counters.sent;
        self.errors += counters.refused + counters.trouble;
    }
}

impl Hub {
    /// No agents yet.
    pub fn new(shared: Shared, allowed: Namespaces) -> Self {
        let router = Mutex::new(Router::new(shared.mapping, crate::namespaces::regex));
        Self { shared: Arc::new(shared), allowed, agents: Mutex::default(), router }
    }

    /// The registry says which agents there are.
    pub fn registered(&self, names: &BTreeSet<String>) {
        let mut state = self.state();
        let known: Vec<Arc<Agent>> = state.agents.values().cloned().collect();
        for agent in known.iter().filter(|agent| agent.is_mapped() && !names.contains(agent.name())) {
            tracing::info!(agent = agent.name(), "agent is no longer registered");
            state.retired.add(&agent.counters());
            agent.unmap();
            state.agents.remove(agent.name());
            self.router().remove_agent(agent.name());
        }
        for name in names {
            let agent = state.agent(&self.shared, name);
            if agent.is_mapped() {
                continue;
            }
            if *name == self.shared.namespace {
                if agent.warn_once() {
                    tracing::warn!(
                        agent = name.as_str(),
                        "agent is registered under the name of the principal's namespace: it is not served, rename it"
                    );
                }
                continue;
            }
            if self.shared.mapping == Mapping::Namespace && !self.allowed.admit(name) {
                if agent.warn_once() {
                    tracing::warn!(
                        agent = name.as_str(),
                        "agent is registered, but --allowed-namespaces does not have its namespace: nothing is synchronised with it"
                    );
                }
                continue;
            }
            tracing::info!(agent = name.as_str(), "agent is registered");
            self.router().add_agent(name);
            agent.map(state.listing_began);
        }
        state.agents.retain(|name, agent| names.contains(name) || !agent.is_idle());
    }

    /// What the watch over all objects of a kind says.
    pub fn informed(&self, kind: Kind, event: &Event<'_>) {
        match event {
            Event::Present { key, object } => {
                let mut router = self.router();
                let excluded = key.kind == Kind::Application && !self.admits(&key.namespace);
                let route = if excluded { Route::default() } else { router.present(key, object) };
                self.follow(kind, event, route);
            }
            Event::Gone { key, .. } => {
                let mut router = self.router();
                let route = router.gone(key);
                self.follow(kind, event, route);
            }
            Event::ListStarted | Event::Synced => {
                let agents: Vec<_> = {
                    let mut state = self.state();
                    // From its first page on, the list may have passed what a later agent needs.
                    state.listing_began = true;
                    state.agents.values().cloned().collect()
                };
                for agent in agents {
                    agent.informed(kind, event);
                }
            }
        }
    }

    /// Destination-based mapping: whether Applications of this namespace are synchronised.
    fn admits(&self, namespace: &str) -> bool {
        self.shared.mapping == Mapping::Namespace
            || *namespace == *self.shared.namespace
            || self.allowed.admit(namespace)
    }

    fn follow(&self, kind: Kind, event: &Event<'_>, route: Route) {
        if let Some(note) = &route.note {
            tracing::warn!("{note}");
        }
        let agent = |name: &str| self.state().agents.get(name).cloned();
        for agent in route.agents.iter().filter_map(|name| agent(name)) {
            agent.informed(kind, event);
        }
        for (name, key) in &route.recheck {
            if let Some(agent) = agent(name) {
                agent.recheck(key);
            }
        }
    }

    fn router(&self) -> MutexGuard<'_, Router> {
        self.router.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The clock of all cores.
    pub fn clock(&self) -> Clock {
        self.shared.clock
    }

    /// Opens a stream for an agent; an older one of the same agent ends. `None` while the principal drains.
    pub fn connect(&self, name: &str, session: Session) -> Option<(Arc<Agent>, AgentStream)> {
        let mut state = self.state();
        if state.draining {
            return None;
        }
        let agent = state.agent(&self.shared, name);
        // Under the lock: else the agent may be forgotten in between, and its stream lead nowhere.
        let stream = agent.attach(session);
        drop(state);
        Some((agent, stream))
    }

    /// A stream ended, from whichever side. Agents that are neither registered nor connected are forgotten.
    pub fn disconnect(&self, agent: &Arc<Agent>, stream: &Slot) {
        agent.detach(stream);
        let mut state = self.state();
        if agent.is_idle() && state.agents.get(agent.name()).is_some_and(|known| Arc::ptr_eq(known, agent)) {
            state.agents.remove(agent.name());
        }
    }

    /// Ends the streams of sessions that are no longer welcome.
    pub fn end_where(&self, mut test: impl FnMut(&Session) -> bool) {
        let agents: Vec<_> = self.state().agents.values().cloned().collect();
        for agent in agents {
            agent.end_where(&mut test);
        }
    }

    /// Ends all streams and waits for the writes that are under way, for at most `limit`.
    pub async fn drain(&self, limit: Duration) {
        let agents: Vec<_> = {
            let mut state = self.state();
            state.draining = true;
            state.agents.values().cloned().collect()
        };
        for agent in &agents {
            agent.end(Ending::Draining);
        }
        let idle = async {
            for agent in &agents {
                agent.writes_done().await;
            }
        };
        if tokio::time::timeout(limit, idle).await.is_err() {
            tracing::warn!("some writes were still under way after {} s", limit.as_secs());
        }
    }

    /// Number of open streams.
    pub fn connected(&self) -> usize {
        self.state().agents.values().filter(|agent| agent.is_connected()).count()
    }

    /// Streams opened since the start, by agent.
    pub fn connections(&self) -> Vec<(String, u64)> {
        self.state().agents.values().map(|agent| (agent.name().to_owned(), agent.connections())).collect()
    }

    /// Sums over all agents.
    pub fn totals(&self) -> Totals {
        let state = self.state();
        let mut totals = state.retired;
        for agent in state.agents.values() {
            totals.add(&agent.counters());
        }
        totals
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.agents.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn agent(&mut self, shared: &Arc<Shared>, name: &str) -> Arc<Agent> {
        self.agents
            .entry(name.to_owned())
            .or_insert_with(|| Arc::new(Agent::new(shared.clone(), name)))
            .clone()
    }
}

/// The informer's event as the core's fact.
fn feed(core: &mut agent_core::core::Core, now: agent_core::time::Instant, kind: Kind, event: &Event<'_>) {
    match event {
        Event::ListStarted => core.list_started(kind),
        Event::Synced => core.synced(now, kind),
        Event::Present { key, object } => core.observe(now, key, Observation::Present(object)),
        Event::Gone { key, object } => core.observe(now, key, Observation::Gone(object)),
    }
}
