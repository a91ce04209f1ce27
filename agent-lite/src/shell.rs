//! The loop: facts in, requests and frames out, one deadline.
//!
//! Everything that decides is in the core's machines. The tasks spawned here each carry out one thing (a GET, a
//! request, a dial, the stream) and report over one bounded channel; the loop never waits for any of them.

use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use agent_core::core::Core;
use agent_core::informer::{End, Event, Fetch, Informer};
use agent_core::peer::Peer;
use agent_core::rand::Rng;
use agent_core::request::{Kind, Observation, Outcome, Ticket};
use agent_core::session::{self, Action, Answer, Failure, Loss, Session};
use agent_core::time::{Instant, Wall};
use bytes::Bytes;
use http::Method;
use prost::Message;
use proto::auth::{AUTHENTICATE, AuthRequest, AuthResponse, REFRESH_TOKEN, RefreshTokenRequest};
use proto::eventstream::SUBSCRIBE;
use proto::version::{VERSION, VersionRequest, VersionResponse};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use tokio::task::AbortHandle;
use tracing::{debug, info, warn};

use crate::grpc::client::{Channel, Settings};
use crate::health::Status;
use crate::kube::client::{Client, NoAnswer, status_of};
use crate::log::GRPC_EVENT;
use crate::material::Loader;

/// What the loop is made of.
pub(crate) struct Parts {
    pub(crate) core: Core,
    pub(crate) informers: Vec<Informer>,
    pub(crate) session: Session,
    pub(crate) rng: Rng,
    pub(crate) clock: Clock,
    pub(crate) kube: Client,
    pub(crate) loader: Loader,
    pub(crate) settings: Arc<Settings>,
    pub(crate) identity: Identity,
    pub(crate) status: Rc<Status>,
    pub(crate) sync_patience: Duration,
}

/// What Authenticate says about this agent.
pub(crate) struct Identity {
    pub(crate) method: &'static str,
    pub(crate) credentials: Vec<(String, String)>,
    pub(crate) mode: &'static str,
    pub(crate) namespace: String,
}

/// Both clocks.
#[derive(Clone, Copy)]
pub(crate) struct Clock {
    start: tokio::time::Instant,
    pub(crate) wall: Wall,
}

impl Clock {
    /// Starts now.
    pub(crate) fn start() -> Self {
        let epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let epoch_millis_at_zero = u64::try_from(epoch.as_millis()).unwrap_or(u64::MAX);
        Self { start: tokio::time::Instant::now(), wall: Wall { epoch_millis_at_zero } }
    }

    fn now(&self) -> Instant {
        Instant::from_millis(u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX))
    }

    fn at(&self, instant: Instant) -> tokio::time::Instant {
        self.start + Duration::from_millis(instant.as_millis())
    }
}

/// Runs until a signal, then half-closes the stream and returns.
pub(crate) async fn run(parts: Parts) -> Result<(), String> {
    let mut signals = Signals::new().map_err(|error| format!("cannot wait for signals: {error}"))?;
    let (facts, mut inbox) = mpsc::channel(INBOX);
    let mut shell = Shell::new(parts, facts);
    loop {
        shell.drain();
        if shell.is_done() {
            return Ok(());
        }
        let deadline = shell.deadline();
        let outgoing = shell.link.blocked();
        tokio::select! {
            Some(fact) = inbox.recv() => {
                shell.take(fact);
                // What has arrived meanwhile is one batch: the core is asked once.
                for _ in 0..INBOX {
                    match inbox.try_recv() {
                        Ok(fact) => shell.take(fact),
                        Err(_) => break,
                    }
                }
            }
            () = sleep_until(deadline) => {}
            // The stream has room again.
            _ = room(outgoing) => {}
            () = signals.next() => shell.shut_down(),
        }
        shell.handle_timeout();
    }
}

struct Shell {
    core: Core,
    watches: Vec<Watch>,
    session: Session,
    rng: Rng,
    clock: Clock,
    kube: Client,
    loader: Loader,
    settings: Arc<Settings>,
    identity: Rc<Identity>,
    status: Rc<Status>,
    link: Link,
    facts: mpsc::Sender<Fact>,
    heard: Heard,
    /// Kubernetes requests that run.
    running: u32,
    /// When to say that the first list takes long.
    sync_by: Option<Instant>,
    closing_by: Option<Instant>,
}

/// When the principal was last heard.
#[derive(Default)]
struct Heard {
    at: Instant,
    /// Events received until then, and events sent again.
    received: u64,
    resent: u64,
}

impl Heard {
    /// Whether events were sent again and again with no word of the principal.
    ///
    /// A proxy or NAT whose other side is gone takes our bytes and keeps the connection: TCP sees nothing wrong.
    /// Sending again happens on the core's timers, so no timer is needed here, and a quiet link is left alone.
    fn is_deaf(&mut self, now: Instant, received: u64, resent: u64) -> bool {
        if received != self.received {
            *self = Self { at: now, received, resent };
        }
        resent - self.resent >= DEAF_RESENT && now - self.at >= DEAF_AFTER
    }
}

struct Watch {
    informer: Informer,
    task: Option<Task>,
}

/// The connection to the principal.
#[derive(Default)]
struct Link {
    /// Facts of earlier connections carry another number.
    serial: u32,
    channel: Option<Channel>,
    task: Option<Task>,
    outgoing: Option<mpsc::Sender<Vec<u8>>>,
    /// The core had to wait for room.
    full: bool,
    peer: Option<Peer>,
}

impl Link {
    /// The channel to wait for, if the core waits.
    fn blocked(&self) -> Option<mpsc::Sender<Vec<u8>>> {
        self.outgoing.clone().filter(|_| self.full)
    }
}

/// Ends its task when dropped.
pub(crate) struct Task(AbortHandle);

impl Task {
    pub(crate) fn spawn(future: impl Future<Output = ()> + 'static) -> Self {
        Self(tokio::task::spawn_local(future).abort_handle())
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

enum Fact {
    WatchBytes { watch: usize, fetch: u32, bytes: Bytes },
    WatchEnd { watch: usize, fetch: u32, end: End },
    Completed(Ticket, Outcome),
    Link(u32, LinkFact),
}

enum LinkFact {
    Dialed(Channel),
    Version(String),
    Authenticated(AuthResponse, Option<String>),
    Refreshed(AuthResponse),
    Frame(Vec<u8>),
    Failed(Failure),
}

impl Shell {
    fn new(parts: Parts, facts: mpsc::Sender<Fact>) -> Self {
        let sync_by = Some(parts.clock.now() + parts.sync_patience);
        Self {
            core: parts.core,
            watches: parts.informers.into_iter().map(|informer| Watch { informer, task: None }).collect(),
            session: parts.session,
            rng: parts.rng,
            clock: parts.clock,
            kube: parts.kube,
            loader: parts.loader,
            settings: parts.settings,
            identity: Rc::new(parts.identity),
            status: parts.status,
            link: Link::default(),
            facts,
            heard: Heard::default(),
            running: 0,
            sync_by,
            closing_by: None,
        }
    }

    fn take(&mut self, fact: Fact) {
        let now = self.clock.now();
        let Self { core, watches, rng, .. } = self;
        match fact {
            Fact::WatchBytes { watch, fetch, bytes } => {
                let informer = &mut watches[watch].informer;
                let kind = informer.kind();
                if informer.fetching() == Some(fetch) {
                    informer.receive(now, &bytes, rng, &mut |event| observe(core, now, kind, event));
                }
            }
            Fact::WatchEnd { watch, fetch, end } => {
                let informer = &mut watches[watch].informer;
                let kind = informer.kind();
                if informer.fetching() == Some(fetch) {
                    informer.end(now, end, rng, &mut |event| observe(core, now, kind, event));
                }
            }
            Fact::Completed(ticket, outcome) => {
                self.running -= 1;
                core.complete(now, ticket, outcome);
            }
            Fact::Link(serial, fact) if serial == self.link.serial => self.take_link(now, fact),
            Fact::Link(..) => {}
        }
    }

    fn take_link(&mut self, now: Instant, fact: LinkFact) {
        let fact = match fact {
            LinkFact::Frame(frame) => {
                if let Err(error) = self.core.receive(now, &frame) {
                    warn!(target: GRPC_EVENT, error = %error, "Left out a message from the principal that is no event");
                }
                return;
            }
            LinkFact::Dialed(channel) => {
                self.link.channel = Some(channel);
                session::Fact::Dialed
            }
            LinkFact::Version(version) => {
                self.session.handle(now, session::Fact::Version(&version), &mut self.rng);
                return;
            }
            LinkFact::Authenticated(answer, header) => {
                let peer = header.as_deref().and_then(Peer::parse);
                self.link.peer = Some(peer.unwrap_or_else(|| Peer::go(self.session.peer_version())));
                self.session.handle(now, session::Fact::Authenticated(answer_of(&answer)), &mut self.rng);
                return;
            }
            LinkFact::Refreshed(answer) => {
                self.session.handle(now, session::Fact::Authenticated(answer_of(&answer)), &mut self.rng);
                return;
            }
            LinkFact::Failed(failure) => session::Fact::Failed(failure),
        };
        self.session.handle(now, fact, &mut self.rng);
    }

    fn handle_timeout(&mut self) {
        let now = self.clock.now();
        self.core.handle_timeout(now);
        self.session.handle_timeout(now, &mut self.rng);
        for watch in &mut self.watches {
            watch.informer.handle_timeout(now, &mut self.rng);
        }
        if self.sync_by.is_some_and(|by| by <= now) {
            self.sync_by = None;
            if !self.status.synced.get() {
                warn!(api_server = self.kube.address(), "Still waiting for the first complete lists");
            }
        }
    }

    /// Carries out what the machines ask for, until they ask for nothing more.
    fn drain(&mut self) {
        let now = self.clock.now();
        self.drain_watches();
        self.drain_session(now);
        self.drain_core(now);
        self.status.synced.set(self.watches.iter().all(|watch| watch.informer.has_synced()));
        let counters = self.core.counters();
        if self.session.is_open() && self.heard.is_deaf(now, counters.received, counters.resent) {
            let failure = Failure::transport(format!(
                "no word of the principal for {} s, although events wait for its acknowledgement",
                (now - self.heard.at).as_secs()
            ));
            self.session.handle(now, session::Fact::Failed(failure), &mut self.rng);
            self.drain_session(now);
        }
        if self.session.is_open() && self.core.poll_reopen() {
            info!(
                "Opening the stream anew: only then does this principal tell its projects and repositories"
            );
            self.session.handle(
                now,
                session::Fact::Failed(Failure::transport("opened anew, as once a day")),
                &mut self.rng,
            );
            self.drain_session(now);
        }
        self.status.events_received.set(counters.received);
        self.status.events_sent.set(counters.sent);
    }

    fn drain_watches(&mut self) {
        for (at, watch) in self.watches.iter_mut().enumerate() {
            if let Some(fetch) = watch.informer.poll_fetch(&mut self.rng) {
                let (kube, facts) = (self.kube.clone(), self.facts.clone());
                watch.task = Some(Task::spawn(get(kube, facts, at, fetch)));
            } else if watch.informer.fetching().is_none() {
                watch.task = None;
            }
            if let Some(note) = watch.informer.poll_note() {
                if note.is_routine() {
                    info!("{note}");
                } else {
                    warn!("{note}");
                }
            }
        }
    }

    fn drain_session(&mut self, now: Instant) {
        if let Some(note) = self.session.poll_note() {
            let authenticating = matches!(&note.loss, Loss::Connect(failure) if failure.code.is_some());
            if authenticating {
                self.status.auth_failures.set(self.status.auth_failures.get() + 1);
            }
            warn!("{note}");
        }
        while let Some(action) = self.session.poll_action() {
            match action {
                Action::HangUp => {
                    self.status.connected.set(false);
                    self.core.disconnected(now);
                    self.link = Link { serial: self.link.serial.wrapping_add(1), ..Link::default() };
                    continue;
                }
                Action::HalfClose => {
                    self.link.outgoing = None;
                    continue;
                }
                _ => {}
            }
            let (facts, serial) = (self.facts.clone(), self.link.serial);
            let channel = self.link.channel.clone();
            let task = match (action, channel) {
                (Action::Dial, _) => {
                    info!(
                        server = self.settings.host,
                        port = self.settings.port,
                        "Connecting to the principal"
                    );
                    Task::spawn(report(facts, serial, dial(self.loader.clone(), Arc::clone(&self.settings))))
                }
                (Action::AskVersion, Some(channel)) => {
                    Task::spawn(report(facts, serial, ask_version(channel)))
                }
                (Action::Authenticate { version }, Some(channel)) => {
                    let request = self.identity.request(version);
                    Task::spawn(report(facts, serial, authenticate(channel, request)))
                }
                (Action::Refresh { refresh_token }, Some(channel)) => {
                    let request = RefreshTokenRequest { refresh_token: refresh_token.to_owned() };
                    Task::spawn(report(facts, serial, refresh(channel, request)))
                }
                (Action::Subscribe { access_token }, Some(channel)) => {
                    let token = access_token.to_owned();
                    let (sender, receiver) = mpsc::channel(1);
                    self.link.outgoing = Some(sender);
                    let peer = self.link.peer.get_or_insert_with(Peer::default);
                    info!(
                        agent = self.session.agent_name().unwrap_or_default(),
                        peer = if peer.is_ours() { "argocd-agent-lite" } else { "argocd-agent" },
                        version = self.session.peer_version(),
                        "Connected to the principal"
                    );
                    let counters = self.core.counters();
                    self.heard = Heard { at: now, received: counters.received, resent: counters.resent };
                    peer.namespace = self.session.principal_namespace().into();
                    self.core.connected(now, peer);
                    self.status.connected.set(true);
                    self.status.connections.set(self.status.connections.get() + 1);
                    let unix =
                        SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
                    self.status.connected_since.set(unix);
                    Task::spawn(subscribe(channel, token, receiver, facts, serial))
                }
                (_, None) | (Action::HangUp | Action::HalfClose, _) => continue,
            };
            self.link.task = Some(task);
        }
    }

    fn drain_core(&mut self, now: Instant) {
        loop {
            let mut idle = true;
            while self.closing_by.is_none()
                && let Some(request) = self.core.poll_request(now)
            {
                idle = false;
                self.running += 1;
                let (kube, facts) = (self.kube.clone(), self.facts.clone());
                debug!(key = %request.key, verb = verb_name(&request.verb), "Asking the API server");
                tokio::task::spawn_local(async move {
                    let ticket = request.ticket;
                    let outcome = kube.execute(request).await;
                    // The loop ended: nobody waits for it.
                    let _ = facts.send(Fact::Completed(ticket, outcome)).await;
                });
            }
            self.link.full = false;
            if let Some(outgoing) = &self.link.outgoing {
                loop {
                    match outgoing.try_reserve() {
                        Ok(permit) => match self.core.poll_transmit(now, self.settings.max_message) {
                            Some(frame) => {
                                idle = false;
                                permit.send(frame);
                            }
                            None => break,
                        },
                        Err(_) => {
                            self.link.full = true;
                            break;
                        }
                    }
                }
            }
            while let Some(note) = self.core.poll_note() {
                if note.is_warning() {
                    warn!(target: GRPC_EVENT, "{note}");
                } else {
                    info!(target: GRPC_EVENT, "{note}");
                }
            }
            if idle {
                return;
            }
        }
    }

    /// The next time at which something is due, rounded so that what is far away comes together.
    fn deadline(&self) -> Option<tokio::time::Instant> {
        let now = self.clock.now();
        let informers = self.watches.iter().filter_map(|watch| watch.informer.poll_timeout());
        informers
            .chain(self.core.poll_timeout())
            .chain(self.session.poll_timeout())
            .chain(self.sync_by)
            .chain(self.closing_by)
            .min()
            .map(|due| {
                let far = due.saturating_since(now) > Duration::from_secs(5);
                let due = if far {
                    Instant::from_millis(due.as_millis().div_ceil(1000).saturating_mul(1000))
                } else {
                    due
                };
                self.clock.at(due)
            })
    }

    fn shut_down(&mut self) {
        if self.closing_by.is_some() {
            info!("Second signal: leaving at once");
            self.closing_by = Some(Instant::ZERO);
            return;
        }
        info!("Shutting down");
        let now = self.clock.now();
        self.session.shut_down(now);
        self.closing_by = Some(now + SHUTDOWN_LIMIT);
    }

    fn is_done(&self) -> bool {
        self.closing_by
            .is_some_and(|by| by <= self.clock.now() || (self.session.is_closed() && self.running == 0))
    }
}

impl Identity {
    fn request(&self, version: &str) -> AuthRequest {
        AuthRequest {
            method: self.method.to_owned(),
            credentials: self.credentials.iter().cloned().collect(),
            mode: self.mode.to_owned(),
            version: version.to_owned(),
            agent_namespace: self.namespace.clone(),
        }
    }
}

fn observe(core: &mut Core, now: Instant, kind: Kind, event: Event<'_>) {
    match event {
        Event::ListStarted => core.list_started(kind),
        Event::Present { key, object } => core.observe(now, &key, Observation::Present(object)),
        Event::Gone { key, object } => core.observe(now, &key, Observation::Gone(object)),
        Event::Synced => core.synced(now, kind),
    }
}

fn verb_name(verb: &agent_core::request::Verb) -> &'static str {
    use agent_core::request::Verb;
    match verb {
        Verb::Get => "get",
        Verb::Create(_) | Verb::CreateNamespace => "create",
        Verb::JsonPatch(_) => "patch",
        Verb::Delete { .. } => "delete",
    }
}

fn answer_of(answer: &AuthResponse) -> Answer<'_> {
    Answer {
        access_token: &answer.access_token,
        refresh_token: &answer.refresh_token,
        principal_namespace: &answer.principal_namespace,
    }
}

/// A list page or a watch: its bytes go to the loop, which sets the pace.
async fn get(kube: Client, facts: mpsc::Sender<Fact>, watch: usize, fetch: Fetch) {
    let id = fetch.id;
    let end = match kube.send(Method::GET, &fetch.path, None, Vec::new()).await {
        Ok((code, retry_after, body)) if !code.is_success() => match body.collect(MAX_ERROR).await {
            Ok(text) => End::Status(status_of(code, retry_after, &text)),
            Err(_) => End::Status(status_of(code, retry_after, &[])),
        },
        Ok((_, _, mut body)) => loop {
            match body.chunk().await {
                Ok(Some(bytes)) => {
                    if facts.send(Fact::WatchBytes { watch, fetch: id, bytes }).await.is_err() {
                        return;
                    }
                }
                Ok(None) => break End::Finished,
                Err(NoAnswer(reason)) => break End::Broken(reason),
            }
        },
        Err(NoAnswer(reason)) => End::Broken(reason),
    };
    // The loop ended: nobody waits for it.
    let _ = facts.send(Fact::WatchEnd { watch, fetch: id, end }).await;
}

/// Reports how a step of connecting ended.
async fn report(
    facts: mpsc::Sender<Fact>,
    serial: u32,
    step: impl Future<Output = Result<LinkFact, Failure>>,
) {
    let fact = step.await.unwrap_or_else(LinkFact::Failed);
    let _ = facts.send(Fact::Link(serial, fact)).await;
}

async fn dial(loader: Loader, settings: Arc<Settings>) -> Result<LinkFact, Failure> {
    let tls = loader.load().await.map_err(|error| Failure::transport(error.into_text()))?;
    Channel::dial(settings, tls).await.map(LinkFact::Dialed)
}

async fn ask_version(channel: Channel) -> Result<LinkFact, Failure> {
    let answer = channel.unary(VERSION, None, &VersionRequest {}.encode_to_vec()).await?;
    let response = VersionResponse::decode(&*answer.message).map_err(|_| malformed("VersionResponse"))?;
    Ok(LinkFact::Version(response.version))
}

async fn authenticate(channel: Channel, request: AuthRequest) -> Result<LinkFact, Failure> {
    let answer = channel.unary(AUTHENTICATE, None, &request.encode_to_vec()).await?;
    let response = AuthResponse::decode(&*answer.message).map_err(|_| malformed("AuthResponse"))?;
    Ok(LinkFact::Authenticated(response, answer.peer))
}

async fn refresh(channel: Channel, request: RefreshTokenRequest) -> Result<LinkFact, Failure> {
    let answer = channel.unary(REFRESH_TOKEN, None, &request.encode_to_vec()).await?;
    let response = AuthResponse::decode(&*answer.message).map_err(|_| malformed("AuthResponse"))?;
    Ok(LinkFact::Refreshed(response))
}

fn malformed(what: &str) -> Failure {
    Failure::transport(format!("the principal's {what} cannot be read"))
}

/// The event stream, from opening it to its end.
async fn subscribe(
    channel: Channel,
    token: String,
    outgoing: mpsc::Receiver<Vec<u8>>,
    facts: mpsc::Sender<Fact>,
    serial: u32,
) {
    let failure = channel
        .stream(SUBSCRIBE, &token, outgoing, async |frame| {
            let _ = facts.send(Fact::Link(serial, LinkFact::Frame(frame))).await;
        })
        .await;
    let _ = facts.send(Fact::Link(serial, LinkFact::Failed(failure))).await;
}

async fn sleep_until(deadline: Option<tokio::time::Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

async fn room(outgoing: Option<mpsc::Sender<Vec<u8>>>) {
    match outgoing {
        Some(outgoing) => drop(outgoing.reserve().await),
        None => std::future::pending().await,
    }
}

struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> std::io::Result<Self> {
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

/// Facts that wait for the loop: few, so that a fast sender is slowed down and memory stays flat.
const INBOX: usize = 16;

const MAX_ERROR: usize = 64 << 10;

/// A principal under load acknowledges late, but it acknowledges something.
const DEAF_AFTER: Duration = Duration::from_secs(90);

const DEAF_RESENT: u64 = 3;

/// Beyond the five seconds that the session gives an open stream.
const SHUTDOWN_LIMIT: Duration = Duration::from_secs(6);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_principal_that_hears_nothing_is_left() {
        let mut heard = Heard::default();
        let at = |seconds: u64| Instant::from_millis(seconds * 1000);
        assert!(!heard.is_deaf(at(10), 5, 0), "heard");
        assert!(!heard.is_deaf(at(1000), 5, 0), "quiet is not deaf");
        assert!(!heard.is_deaf(at(1000), 5, 2));
        assert!(!heard.is_deaf(at(1001), 6, 3), "heard again");
        assert!(!heard.is_deaf(at(1050), 6, 9), "not for long");
        assert!(heard.is_deaf(at(1091), 6, 9));
    }
}
