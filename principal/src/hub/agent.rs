//! One agent: its core, the task that carries out the core's requests, and the stream it is connected with.
//!
//! The core sits behind a lock that is never held across an await. Whoever has a fact hands it in under the lock and
//! wakes the task and the stream: there is no queue of objects or events anywhere.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use agent_core::core::{Config, Core, Counters, Note};
use agent_core::informer::Event;
use agent_core::peer::Peer;
use agent_core::rand::Rng;
use agent_core::request::{Key, Kind, Request};
use tokio::sync::Notify;

use super::stream::{AgentStream, Ending, Slot};
use super::{Shared, feed};
use crate::kube::call::execute;

/// Who is at the other end of a stream.
#[derive(Clone, Debug)]
pub struct Session {
    /// What the agent said about itself.
    pub peer: Peer,
    /// Fingerprint of the client certificate; empty without one.
    pub fingerprint: String,
    /// Remote address, for the log.
    pub address: String,
}

/// One agent.
pub struct Agent {
    shared: Arc<Shared>,
    name: String,
    inner: Mutex<Inner>,
    /// The core may want something: for the task.
    work: Notify,
    /// A request ended: for the drain.
    idle: Notify,
}

#[derive(Default)]
struct Inner {
    /// While the agent is registered.
    core: Option<Core>,
    /// Tells answers to requests of an earlier core apart.
    generation: u64,
    /// The core was given up after a defect; a new one follows.
    broken: bool,
    stream: Option<Arc<Slot>>,
    session: Option<Session>,
    connections: u64,
    writes: usize,
    warned: bool,
}

impl Agent {
    pub(super) fn new(shared: Arc<Shared>, name: &str) -> Self {
        Self {
            shared,
            name: name.to_owned(),
            inner: Mutex::default(),
            work: Notify::new(),
            idle: Notify::new(),
        }
    }

    /// The agent's name, which is its namespace on the hub.
    pub fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn is_mapped(&self) -> bool {
        let inner = self.inner();
        inner.core.is_some() || inner.broken
    }

    pub(super) fn is_connected(&self) -> bool {
        self.inner().stream.is_some()
    }

    pub(super) fn is_idle(&self) -> bool {
        let inner = self.inner();
        inner.core.is_none() && !inner.broken && inner.stream.is_none()
    }

    pub(super) fn connections(&self) -> u64 {
        self.inner().connections
    }

    pub(super) fn counters(&self) -> Counters {
        self.inner().core.as_ref().map(Core::counters).unwrap_or_default()
    }

    /// Whether this is the first time that a standing complaint about this agent is due.
    pub(super) fn warn_once(&self) -> bool {
        !std::mem::replace(&mut self.inner().warned, true)
    }

    /// The agent is registered: it gets a core, and a stream that is open already is told of it. With `list`, its
    /// objects are listed for it; without, the first list over all namespaces is still to come.
    pub(super) fn map(self: &Arc<Self>, list: bool) {
        self.renew();
        tokio::spawn(self.clone().tend(list));
    }

    fn config(&self) -> Config {
        let shared = &self.shared;
        Config {
            mapping: shared.mapping,
            allowed_namespaces: shared.allowed_namespaces.clone(),
            regex: crate::namespaces::regex,
            ..Config::principal(&self.name, &shared.namespace, &shared.principal_uid)
        }
    }

    fn renew(&self) {
        let clock = self.shared.clock;
        let mut core = Core::new(self.config(), Rng::new(crate::clock::seed()), clock.wall());
        let mut inner = self.inner();
        if let Some(session) = inner.stream.as_ref().and(inner.session.as_ref()) {
            core.connected(clock.now(), &session.peer);
        }
        inner.core = Some(core);
        inner.generation += 1;
        inner.broken = false;
    }

    /// Keeps a task going for as long as the agent is registered. A defect that a panic shows costs this agent's core
    /// and connection, and nobody else anything.
    async fn tend(self: Arc<Self>, mut list: bool) {
        loop {
            let generation = self.inner().generation;
            let listing = list.then(|| tokio::spawn(self.clone().list()));
            // Its own panics end here too.
            let _ = tokio::spawn(self.clone().drive(generation)).await;
            if let Some(listing) = listing {
                listing.abort();
            }
            if !self.is_broken() {
                return;
            }
            tracing::error!(
                agent = self.name,
                "defect: what was known of the agent is given up and read again"
            );
            tokio::time::sleep(REPAIR_PAUSE).await;
            if !self.is_broken() {
                return;
            }
            self.renew();
            list = true;
        }
    }

    fn is_broken(&self) -> bool {
        self.inner().broken
    }

    /// The agent's objects, for a core that joins late: the watch tells only what changes from now on.
    async fn list(self: Arc<Self>) {
        let shared = &self.shared;
        let (selector, config) = (shared.selector.query(), self.config());
        // Projects before the repositories that follow them.
        for kind in Kind::ALL {
            let mut sink = |event: Event<'_>| self.informed(kind, &event);
            crate::kube::objects::run(
                &shared.client,
                shared.clock,
                kind,
                config.namespace_of(kind),
                &selector,
                true,
                &mut sink,
            )
            .await;
        }
    }

    /// The agent is registered no longer: nothing is owed to it, and its stream ends.
    pub(super) fn unmap(&self) {
        let mut inner = self.inner();
        inner.core = None;
        inner.broken = false;
        drop(inner);
        self.work.notify_one();
        self.end(Ending::Unregistered);
    }

    /// The API server said so.
    pub(super) fn informed(&self, kind: Kind, event: &Event<'_>) {
        let now = self.shared.clock.now();
        self.with_core(|core| feed(core, now, kind, event));
    }

    /// What decides about this object has changed.
    pub(super) fn recheck(&self, key: &Key) {
        let now = self.shared.clock.now();
        self.with_core(|core| core.recheck(now, key));
    }

    /// A message from the agent. `false`: the stream is not the current one any more.
    pub fn receive(&self, slot: &Slot, message: &[u8]) -> bool {
        let mut inner = self.inner();
        if !inner.has(slot) {
            return false;
        }
        slot.received();
        let Some(core) = inner.core.as_mut() else {
            // Not acknowledged: the agent says it again once it is registered.
            return true;
        };
        let result = core.receive(self.shared.clock.now(), message);
        drop(inner);
        if let Err(error) = result {
            tracing::warn!(target: "grpc-event", agent = self.name, "message that is no event: {error}");
        }
        self.wake();
        true
    }

    pub(super) fn transmit(&self, slot: &Slot) -> Option<Vec<u8>> {
        let mut inner = self.inner();
        if !inner.has(slot) {
            return None;
        }
        let frame = inner.core.as_mut()?.poll_transmit(self.shared.clock.now(), self.shared.max_message);
        drop(inner);
        slot.transmitted(frame.is_some());
        if let Some(frame) = &frame {
            // What was sent has a deadline, which the task must know.
            self.work.notify_one();
            if frame.len() >= self.shared.max_message / 5 * 4 {
                tracing::warn!(
                    agent = self.name,
                    bytes = frame.len(),
                    "message is close to --grpc-max-message-size"
                );
            }
        }
        frame
    }

    pub(super) fn attach(self: &Arc<Self>, session: Session) -> AgentStream {
        let slot = Arc::new(Slot::default());
        let mut inner = self.inner();
        if let Some(older) = inner.stream.replace(slot.clone()) {
            tracing::info!(agent = self.name, "a newer connection replaces the older one");
            older.end(Ending::Replaced);
        }
        inner.connections += 1;
        tracing::info!(
            agent = self.name,
            peer = if session.peer.is_ours() { "agent-lite" } else { "argocd-agent" },
            version = &*session.peer.version,
            address = session.address,
            "agent connected"
        );
        if let Some(mapping) = session.peer.mapping
            && mapping != self.shared.mapping
        {
            tracing::warn!(
                agent = self.name,
                "agent maps Applications by {}, this principal by {}: give both halves the same --destination-based-mapping",
                mapping.as_str(),
                self.shared.mapping.as_str()
            );
        }
        let now = self.shared.clock.now();
        match inner.core.as_mut() {
            Some(core) => core.connected(now, &session.peer),
            None => tracing::warn!(
                agent = self.name,
                "agent is connected but not registered: create its cluster secret with \"argocd-agentctl agent create\""
            ),
        }
        inner.session = Some(session);
        drop(inner);
        self.work.notify_one();
        AgentStream::new(self.clone(), slot)
    }

    pub(super) fn detach(&self, slot: &Slot) {
        slot.end(Ending::Over);
        let mut inner = self.inner();
        if !inner.has(slot) {
            return;
        }
        inner.stream = None;
        inner.session = None;
        let now = self.shared.clock.now();
        if let Some(core) = inner.core.as_mut() {
            core.disconnected(now);
        }
        drop(inner);
        self.work.notify_one();
        tracing::info!(agent = self.name, "agent disconnected");
    }

    /// Ends the open stream, if there is one.
    pub(super) fn end(&self, ending: Ending) {
        if let Some(slot) = &self.inner().stream {
            slot.end(ending);
        }
    }

    pub(super) fn end_where(&self, test: &mut dyn FnMut(&Session) -> bool) {
        let inner = self.inner();
        if inner.session.as_ref().is_some_and(test)
            && let Some(slot) = &inner.stream
        {
            tracing::warn!(agent = self.name, "agent's certificate is on the blocklist: disconnected");
            slot.end(Ending::Refused);
        }
    }

    pub(super) async fn writes_done(&self) {
        loop {
            let notified = self.idle.notified();
            if self.inner().writes == 0 {
                return;
            }
            notified.await;
        }
    }

    /// Carries out the core's requests and keeps its deadline, until the core of this generation is gone.
    async fn drive(self: Arc<Self>, generation: u64) {
        loop {
            let clock = self.shared.clock;
            let mut requests = Vec::new();
            let mut notes = Vec::new();
            let deadline = {
                let mut inner = self.inner();
                if inner.generation != generation {
                    return;
                }
                let Some(core) = inner.core.as_mut() else { return };
                let now = clock.now();
                if core.poll_timeout().is_some_and(|at| at <= now) {
                    core.handle_timeout(now);
                }
                requests.extend(std::iter::from_fn(|| core.poll_request(now)));
                notes.extend(std::iter::from_fn(|| core.poll_note()));
                let deadline = core.poll_timeout();
                inner.writes += requests.iter().filter(|request| is_write(request)).count();
                if let Some(slot) = &inner.stream {
                    slot.wake();
                }
                deadline
            };
            for note in &notes {
                self.tell(note);
            }
            for request in requests {
                tokio::spawn(self.clone().carry_out(generation, request));
            }
            match deadline {
                Some(at) => tokio::select! {
                    () = self.work.notified() => {}
                    () = clock.sleep_until(at) => {}
                },
                None => self.work.notified().await,
            }
        }
    }

    async fn carry_out(self: Arc<Self>, generation: u64, request: Request) {
        let outcome = {
            // The semaphore is never closed.
            let _permit = self.shared.processors.acquire().await;
            execute(&self.shared.client, &self.shared.selector, &request).await
        };
        tracing::debug!(agent = self.name, "{}: {}", request.key, describe(&request, &outcome));
        let mut inner = self.inner();
        if is_write(&request) {
            inner.writes -= 1;
        }
        if inner.generation == generation
            && let Some(core) = inner.core.as_mut()
        {
            core.complete(self.shared.clock.now(), request.ticket, outcome);
        }
        drop(inner);
        self.idle.notify_waiters();
        self.wake();
    }

    fn tell(&self, note: &Note) {
        if note.is_warning() {
            tracing::warn!(target: "grpc-event", agent = self.name, "{note}");
        } else {
            tracing::info!(target: "grpc-event", agent = self.name, "{note}");
        }
    }

    fn with_core(&self, change: impl FnOnce(&mut Core)) {
        let mut inner = self.inner();
        let Some(core) = inner.core.as_mut() else { return };
        change(core);
        drop(inner);
        self.wake();
    }

    fn wake(&self) {
        self.work.notify_one();
        if let Some(slot) = &self.inner().stream {
            slot.wake();
        }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(|poisoned| {
            // A panic with the lock held: the core may be half changed.
            self.inner.clear_poison();
            let mut inner = poisoned.into_inner();
            if inner.core.take().is_some() {
                inner.broken = true;
            }
            if let Some(slot) = &inner.stream {
                slot.end(Ending::Broken);
            }
            self.work.notify_one();
            inner
        })
    }
}

impl Inner {
    fn has(&self, slot: &Slot) -> bool {
        self.stream.as_ref().is_some_and(|current| std::ptr::eq(Arc::as_ptr(current), slot))
    }
}

fn is_write(request: &Request) -> bool {
    !matches!(request.verb, agent_core::request::Verb::Get)
}

/// For the log; never a body.
fn describe(request: &Request, outcome: &agent_core::request::Outcome) -> String {
    use agent_core::request::{Outcome, Verb};
    let verb = match &request.verb {
        Verb::Get => "get",
        Verb::Create(_) | Verb::CreateNamespace => "create",
        Verb::JsonPatch(_) => "patch",
        Verb::Delete { .. } => "delete",
    };
    match outcome {
        Outcome::Done(_) => format!("{verb} done"),
        Outcome::Status(status) => format!("{verb} answered {} {}", status.code, status.reason),
        Outcome::Unknown(reason) => format!("{verb} without answer: {reason}"),
    }
}

/// Before a core that showed a defect is made anew: the same facts may show it again.
const REPAIR_PAUSE: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Clock;
    use crate::kube::call::Selector;

    fn agent() -> Arc<Agent> {
        let service = tower::service_fn(|_: http::Request<kube::client::Body>| async {
            let list = r#"{"kind":"ApplicationList","metadata":{"resourceVersion":"1"},"items":[]}"#;
            Ok::<_, std::convert::Infallible>(http::Response::new(kube::client::Body::from(
                list.as_bytes().to_vec(),
            )))
        });
        Arc::new(Agent::new(
            Arc::new(Shared {
                client: kube::Client::new(service, "argocd"),
                clock: Clock::start(),
                selector: Selector::new(""),
                processors: tokio::sync::Semaphore::new(1),
                principal_uid: "p".into(),
                namespace: "argocd".into(),
                mapping: agent_core::peer::Mapping::Namespace,
                allowed_namespaces: Vec::new(),
                max_message: 1 << 20,
            }),
            "agent-1",
        ))
    }

    #[tokio::test(start_paused = true)]
    async fn a_defect_costs_one_core_and_its_stream() {
        let agent = agent();
        agent.map(false);
        let session =
            Session { peer: Default::default(), fingerprint: String::new(), address: String::new() };
        let stream = agent.attach(session);
        let first = agent.inner().generation;
        let panicked = tokio::spawn({
            let agent = agent.clone();
            async move { agent.with_core(|_| panic!("a defect")) }
        });
        assert!(panicked.await.is_err());
        assert!(agent.is_mapped(), "it stays registered");
        stream.slot().ended().await;
        let repaired = async {
            while !agent.inner().core.as_ref().is_some_and(Core::is_synced) {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), repaired).await.unwrap();
        assert_eq!(agent.inner().generation, first + 1);
        agent.unmap();
        assert!(!agent.is_mapped());
    }
}
