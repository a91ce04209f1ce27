//! A managed agent of the reference.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;
use std::time::Duration;

use agent_core::checksum::{list_checksum, spec_checksum};
use agent_core::cloudevent::{AGENT_SOURCE, EventView};
use agent_core::core::Counters;
use agent_core::event::{
    ErrorBody, EventType, RequestUpdate, SyncedResource, SyncedResourceList, Target, Type,
};
use agent_core::peer::Peer;
use agent_core::rand::Rng;
use agent_core::request::{Key, Kind};
use agent_core::time::{Instant, Wall};
use serde_json::{Value, json};

use super::desk::{Desk, Failure, Lock, Tasks};
use super::informer::{Informer, News};
use super::sender::{Event, Sender};
use super::value::{
    ADOPTION_POLICY, LAST_APPLIED, MISMATCH_POLICY, PRINCIPAL_UID, REFRESH, SOURCE_UID, TERMINATING,
    annotation, difference, is_terminating, name_of, phase_of, remove_annotation, set_annotation, strip,
    typed, uid_of, version_of,
};
use super::{Class, Policy, Version};
use crate::sim::half::{Answer, Call, Half, Lapse, Until};

/// Options of one run.
#[derive(Clone, Debug)]
pub struct Options {
    pub version: Version,
    /// Where its Argo CD lives, and everything that it manages.
    pub namespace: String,
    /// Most events in its queue.
    pub queue: usize,
    pub mismatch: Policy,
    /// `None`: an object that did not come from the hub is left alone.
    pub adopts: bool,
}

impl Options {
    pub fn new(version: Version, namespace: &str) -> Self {
        Self {
            version,
            namespace: namespace.to_owned(),
            queue: 1000,
            mismatch: Policy::Recreate,
            adopts: true,
        }
    }
}

/// The model in its seat.
#[derive(Debug)]
pub struct AgentModel {
    agent: Rc<Agent>,
    tasks: Tasks,
}

/// What all its tasks share.
#[derive(Debug)]
pub(super) struct Agent {
    desk: Desk,
    options: Options,
    informers: BTreeMap<Kind, Rc<Informer>>,
    /// Held by the handlers of updates, of all kinds.
    updates: Lock,
    state: RefCell<State>,
}

#[derive(Debug)]
struct State {
    managed: BTreeSet<(Kind, String)>,
    /// Version of its own last write.
    seen: BTreeMap<(Kind, String), String>,
    /// Source UIDs of what it deletes for the principal.
    expected: BTreeSet<String>,
    /// Kind, name, and source UID or UID.
    tracked: BTreeSet<(Kind, String, String)>,
    /// What the hub said last, by kind and source UID.
    source: BTreeMap<(Kind, String), Value>,
    inbox: VecDeque<Vec<u8>>,
    sender: Sender,
    connected: bool,
    started: bool,
    resynced: bool,
    busy: u32,
}

impl AgentModel {
    pub fn new(options: Options, seed: u64, wall: Wall) -> Self {
        let agent = Agent::new(options, seed, wall);
        let mut tasks = Tasks::new(agent.desk.clone());
        agent.desk.start(agent.clone().main());
        tasks.run();
        Self { agent, tasks }
    }

    fn run(&mut self, now: Instant) {
        self.agent.desk.set_now(now);
        self.agent.desk.ring();
        self.tasks.run();
        self.agent.send(now);
    }
}

impl Half for AgentModel {
    fn peer(&self) -> Peer {
        Peer {
            namespace: self.agent.options.namespace.as_str().into(),
            ..Peer::go(self.agent.options.version.as_str())
        }
    }

    fn connected(&mut self, now: Instant, _peer: &Peer) {
        {
            let mut state = self.agent.state.borrow_mut();
            state.connected = true;
            state.sender.connected(now);
        }
        self.run(now);
    }

    fn disconnected(&mut self, now: Instant) {
        {
            let mut state = self.agent.state.borrow_mut();
            state.connected = false;
            state.sender.disconnected();
            // What the stream had not handed over is lost with it.
            state.inbox.clear();
        }
        self.run(now);
    }

    fn receive(&mut self, now: Instant, frame: &[u8]) -> Result<(), String> {
        EventView::decode(frame).map_err(|error| error.to_string())?;
        self.agent.state.borrow_mut().inbox.push_back(frame.to_vec());
        self.run(now);
        Ok(())
    }

    fn poll_transmit(&mut self, _now: Instant, _room: usize) -> Option<Vec<u8>> {
        self.agent.state.borrow_mut().sender.poll_frame()
    }

    fn poll_call(&mut self, _now: Instant) -> Option<Call> {
        self.agent.desk.poll_call()
    }

    fn answered(&mut self, now: Instant, id: u64, answer: Answer<'_>) {
        self.agent.desk.answered(id, answer);
        self.run(now);
    }

    fn handle_timeout(&mut self, now: Instant) {
        self.run(now);
    }

    fn poll_timeout(&self) -> Option<Instant> {
        let sender = self.agent.state.borrow().sender.poll_timeout();
        self.agent.desk.poll_alarm().into_iter().chain(sender).min()
    }

    fn has_synced(&self) -> bool {
        self.agent.state.borrow().started
    }

    fn is_settled(&self, _is_excused: &dyn Fn(Kind, &str) -> bool) -> bool {
        let state = self.agent.state.borrow();
        state.started
            && state.busy == 0
            && state.inbox.is_empty()
            && state.sender.is_idle()
            && self.agent.informers.values().all(|informer| informer.is_idle())
    }

    fn take_held(&mut self) -> Vec<Key> {
        Vec::new()
    }

    fn counters(&self) -> Counters {
        Counters::default()
    }

    fn exercised(&self) -> BTreeMap<&'static str, u64> {
        self.agent.desk.counters()
    }

    fn take_lapses(&mut self) -> Vec<Lapse> {
        self.agent.desk.take_lapses()
    }
}

impl Agent {
    pub(super) fn new(options: Options, seed: u64, wall: Wall) -> Rc<Self> {
        let desk = Desk::new(Rng::new(seed));
        let informer = |kind| {
            let missed = ("missed-end", Until::Restart);
            (kind, Informer::new(kind, &options.namespace, false, missed))
        };
        Rc::new(Self {
            informers: Kind::ALL.map(informer).into(),
            updates: Lock::default(),
            state: RefCell::new(State {
                managed: BTreeSet::new(),
                seen: BTreeMap::new(),
                expected: BTreeSet::new(),
                tracked: BTreeSet::new(),
                source: BTreeMap::new(),
                inbox: VecDeque::new(),
                sender: Sender::new(options.version, AGENT_SOURCE, wall, options.queue),
                connected: false,
                started: false,
                resynced: false,
                busy: 0,
            }),
            desk,
            options,
        })
    }

    async fn main(self: Rc<Self>) {
        self.remember_sources().await;
        let follow = |kind: Kind| {
            let informer = self.informers[&kind].clone();
            self.desk.start(informer.clone().follow(self.desk.clone()));
            self.desk.start(self.clone().handle(kind, informer));
        };
        for kinds in [[Kind::Application, Kind::AppProject], [Kind::Repository, Kind::GpgKey]] {
            kinds.into_iter().for_each(follow);
            self.desk.wait(|| kinds.iter().all(|kind| self.informers[kind].is_synced()).then_some(())).await;
        }
        self.state.borrow_mut().started = true;
        self.desk.start(self.clone().resync_on_start());
        loop {
            let frame = self.desk.wait(|| self.state.borrow_mut().inbox.pop_front()).await;
            self.state.borrow_mut().busy += 1;
            self.handle_frame(&frame).await;
            self.state.borrow_mut().busy -= 1;
        }
    }

    /// What the copies look like when the process starts is what local edits are reverted to. Where that cannot be read, the process
    /// ends, and comes back.
    async fn remember_sources(&self) {
        while self.try_remember_sources().await.is_err() {
            self.desk.count("model_failed_starts");
            let pause = self.desk.draw(|rng| rng.between(Duration::from_secs(1), Duration::from_secs(10)));
            self.desk.sleep(pause).await;
        }
    }

    async fn try_remember_sources(&self) -> Result<(), Failure> {
        let namespace = &self.options.namespace;
        for (kind, selector) in [
            (Kind::Application, ""),
            (Kind::AppProject, ""),
            (Kind::Repository, ",argocd.argoproj.io/secret-type=repository"),
            (Kind::Repository, ",argocd.argoproj.io/secret-type=repo-creds"),
        ] {
            let path = format!(
                "{}/namespaces/{namespace}/{}?labelSelector=argocd-agent.argoproj-labs.io/ignore-sync!=true{selector}",
                kind.api_path(),
                kind.plural()
            );
            for object in self.desk.list(path).await? {
                self.remember_source(kind, &object);
            }
        }
        match self.desk.get(&self.key(Kind::GpgKey, agent_core::content::GPG_KEYS)).await {
            Ok(object) => self.remember_source(Kind::GpgKey, &object),
            Err(failure) if failure.is_not_found() => {}
            Err(failure) => return Err(failure),
        }
        Ok(())
    }

    fn remember_source(&self, kind: Kind, object: &Value) {
        if let Some(uid) = annotation(object, SOURCE_UID) {
            let part = object[kind.member()].clone();
            self.state.borrow_mut().source.insert((kind, uid.to_owned()), part);
        }
    }

    pub(super) fn key(&self, kind: Kind, name: &str) -> Key {
        Key::new(kind, &self.options.namespace, name)
    }

    /// Moves what is to be sent on.
    pub(super) fn send(&self, now: Instant) {
        let mut state = self.state.borrow_mut();
        self.desk.draw(|rng| state.sender.run(now, rng));
        for name in core::mem::take(&mut state.sender.counts) {
            self.desk.count(name);
        }
        for (rule, event) in state.sender.take_lost() {
            if let (Some(kind), Some((_, name))) = (event.target.kind(), event.subject) {
                // A status comes again with the next change, and the end of a copy never.
                self.desk.lapse(Lapse { kind, name, rule, until: Until::Restart });
            }
        }
    }

    fn enqueue(&self, event: Event) {
        self.state.borrow_mut().sender.enqueue(event);
    }

    fn is_managed(&self, kind: Kind, name: &str) -> bool {
        self.state.borrow().managed.contains(&(kind, name.to_owned()))
    }

    fn manage(&self, kind: Kind, name: &str) -> bool {
        self.state.borrow_mut().managed.insert((kind, name.to_owned()))
    }

    fn unmanage(&self, kind: Kind, name: &str) -> bool {
        self.state.borrow_mut().managed.remove(&(kind, name.to_owned()))
    }

    fn has_seen(&self, kind: Kind, object: &Value) -> bool {
        let state = self.state.borrow();
        let seen = state.seen.get(&(kind, name_of(object).to_owned()));
        seen.is_some_and(|seen| !seen.is_empty() && seen == version_of(object))
    }

    fn remember_written(&self, kind: Kind, written: &Value) {
        let key = (kind, name_of(written).to_owned());
        self.state.borrow_mut().seen.insert(key, version_of(written).to_owned());
    }

    fn cached(&self, kind: Kind, source_uid: &str) -> Option<Value> {
        self.state.borrow().source.get(&(kind, source_uid.to_owned())).cloned()
    }

    fn cache(&self, kind: Kind, source_uid: &str, object: &Value) {
        let part = object[kind.member()].clone();
        self.state.borrow_mut().source.insert((kind, source_uid.to_owned()), part);
    }

    fn track(&self, kind: Kind, object: &Value, tracked: bool) {
        let uid = annotation(object, SOURCE_UID).unwrap_or_else(|| uid_of(object));
        let entry = (kind, name_of(object).to_owned(), uid.to_owned());
        let mut state = self.state.borrow_mut();
        if tracked {
            state.tracked.insert(entry);
        } else {
            state.tracked.remove(&entry);
        }
    }

    fn lapse(&self, kind: Kind, name: &str, rule: &'static str, until: Until) {
        self.desk.lapse(Lapse { kind, name: name.to_owned(), rule, until });
    }
}

/// What the watch brings.
impl Agent {
    async fn handle(self: Rc<Self>, kind: Kind, informer: Rc<Informer>) {
        loop {
            let news = informer.news(&self.desk).await;
            self.state.borrow_mut().busy += 1;
            self.handle_news(kind, news).await;
            self.state.borrow_mut().busy -= 1;
        }
    }

    pub(super) async fn handle_news(&self, kind: Kind, news: News) {
        match (kind, news) {
            (_, News::Added(object)) => {
                self.track(kind, &object, true);
                if !self.manage(kind, name_of(&object)) && kind == Kind::Application {
                    // The agent made it itself.
                    self.application_changed(&object).await;
                }
            }
            (Kind::Application, News::Changed(object)) => self.application_changed(&object).await,
            (_, News::Changed(object)) => self.content_changed(kind, &object).await,
            (_, News::Gone(object)) => self.gone(kind, &object).await,
        }
    }

    async fn application_changed(&self, object: &Value) {
        let kind = Kind::Application;
        let name = name_of(object);
        let _held = self.updates.hold(&self.desk).await;
        if self.has_seen(kind, object) {
            self.desk.count("model_seen");
            return;
        }
        if !self.is_managed(kind, name) {
            let ends = is_terminating(object)
                || annotation(object, SOURCE_UID)
                    .is_some_and(|uid| self.state.borrow().expected.contains(uid));
            if !ends {
                self.lapse(kind, name, "unmanaged", Until::Restart);
            }
            return;
        }
        let mut told = typed(object);
        if let Some(cached) = self.drifted(kind, object) {
            self.desk.count("model_reverted");
            told["spec"] = cached;
            if self.managed_update(&told, None, true).await.is_err() {
                self.desk.count("model_failed_reverts");
            }
            if self.options.version == Version::V0_9_0 {
                return;
            }
        }
        if annotation(object, SOURCE_UID).is_some() || self.options.version == Version::V0_9_0 {
            self.enqueue(Event::of_object(Target::Application, Type::StatusUpdate, &untyped_meta(told)));
        }
    }

    /// What the hub said last, if that is not what stands there.
    fn drifted(&self, kind: Kind, object: &Value) -> Option<Value> {
        let cached = self.cached(kind, annotation(object, SOURCE_UID)?)?;
        let spec = |part: &Value| typed(&json!({"spec": part}))["spec"].clone();
        let same = match kind {
            Kind::Application => spec(&object["spec"]) == spec(&cached),
            _ => object[kind.member()] == cached || is_empty(&object[kind.member()]) && is_empty(&cached),
        };
        (!same).then_some(cached)
    }

    async fn content_changed(&self, kind: Kind, object: &Value) {
        let _held = self.updates.hold(&self.desk).await;
        if self.has_seen(kind, object) {
            self.desk.count("model_seen");
            return;
        }
        if kind == Kind::AppProject && !self.is_managed(kind, name_of(object)) {
            return;
        }
        if let Some(cached) = self.drifted(kind, object) {
            self.desk.count("model_reverted");
            let mut wanted = object.clone();
            wanted[kind.member()] = cached;
            if self.content_update(kind, &wanted, false).await.is_err() {
                self.desk.count("model_failed_reverts");
            }
        }
    }

    async fn gone(&self, kind: Kind, last: &Value) {
        let name = name_of(last);
        if let Some(source_uid) = annotation(last, SOURCE_UID) {
            let expected = self.state.borrow_mut().expected.remove(source_uid);
            if !expected {
                self.recreate(kind, last, source_uid).await;
                return;
            }
        }
        self.track(kind, last, false);
        if kind == Kind::AppProject {
            // It stays in the managed set.
            return;
        }
        if self.unmanage(kind, name) && kind == Kind::Application {
            let event = Event::of_object(Target::Application, Type::Delete, &untyped_meta(typed(last)));
            self.enqueue(event);
        }
    }

    async fn recreate(&self, kind: Kind, last: &Value, source_uid: &str) {
        let mut object = if kind == Kind::Application { typed(last) } else { last.clone() };
        strip(
            &mut object,
            &["resourceVersion", "generation", "deletionTimestamp", "deletionGracePeriodSeconds"],
        );
        set_annotation(&mut object, SOURCE_UID, source_uid);
        match self.desk.create(&self.key(kind, name_of(last)), &with_type(kind, object)).await {
            Ok(_) => {
                self.desk.count("model_recreated");
                self.manage(kind, name_of(last));
            }
            Err(failure) if failure.is_already_exists() => {}
            Err(_) => {
                // It stays in the managed set, so that no create is carried out any more.
                self.desk.count("model_failed_recreates");
                self.lapse(kind, name_of(last), "not-recreated", Until::Restart);
            }
        }
    }
}

/// What the stream brings.
impl Agent {
    async fn handle_frame(&self, frame: &[u8]) {
        let Ok(event) = EventView::decode(frame) else { return };
        if event.is_ack() {
            self.state.borrow_mut().sender.acknowledged(&event);
            return;
        }
        let Some(target) = event.target() else { return };
        let class = self.handle_event(target, &event).await;
        self.desk.count(class.counter());
        if class != Class::Retryable {
            self.enqueue(Event::ack_of(&event, AGENT_SOURCE));
        }
    }

    pub(super) async fn handle_event(&self, target: Target, event: &EventView<'_>) -> Class {
        let object: Value = serde_json::from_slice(event.data).unwrap_or_default();
        let EventType::Known(r#type) = event.event_type() else { return Class::Error };
        let result = match target.kind() {
            Some(Kind::Application) => self.application(r#type, object, event.principal_uid).await,
            Some(kind) => self.content(kind, r#type, object).await,
            None if target == Target::ResourceResync => self.resync(r#type, event.data).await,
            None => Err(Class::Error),
        };
        result.err().unwrap_or(Class::Ok)
    }

    async fn application(&self, r#type: Type, mut incoming: Value, principal_uid: &str) -> Result<(), Class> {
        let kind = Kind::Application;
        incoming["metadata"]["namespace"] = json!(self.options.namespace);
        if !principal_uid.is_empty() {
            set_annotation(&mut incoming, PRINCIPAL_UID, principal_uid);
        }
        let key = self.key(kind, name_of(&incoming));
        let existing = match self.informers[&kind].get(&key.name) {
            Some(object) => Some(object),
            None => found(self.desk.get(&key).await)?.map(Rc::new),
        };
        if let Some(existing) = &existing
            && annotation(existing, SOURCE_UID).is_none()
            && r#type != Type::Create
        {
            self.lapse(kind, &key.name, "unmarked", self.unmarked_until());
            return Err(Class::Error);
        }
        strip(&mut incoming, &["ownerReferences"]);
        match r#type {
            Type::Create | Type::SpecUpdate => {
                self.application_exists(&key, incoming, existing.as_deref(), principal_uid).await
            }
            Type::SetOperation => {
                let result = self.set_operation(&key, &incoming, existing.as_deref()).await;
                if matches!(result, Err(Class::Error)) {
                    self.lapse(kind, &key.name, "operation-refused", Until::Now);
                }
                result
            }
            Type::TerminateOperation => self.terminate(&key, existing.as_deref()).await,
            Type::Delete => self.delete(&key, true).await,
            _ => Ok(()),
        }
    }

    /// An unmarked copy is adopted when the hub says `create`; v0.9.0 never adopts.
    fn unmarked_until(&self) -> Until {
        match self.options.version {
            Version::Head => Until::Restart,
            Version::V0_9_0 => Until::Never,
        }
    }

    async fn application_exists(
        &self,
        key: &Key,
        incoming: Value,
        existing: Option<&Value>,
        principal_uid: &str,
    ) -> Result<(), Class> {
        let Some(existing) = existing else { return self.create_application(key, incoming).await };
        let source_uid = annotation(&incoming, SOURCE_UID).unwrap_or_else(|| uid_of(&incoming)).to_owned();
        let in_place = async |incoming| self.in_place(incoming, &source_uid, principal_uid).await;
        let Some(local_source) = annotation(existing, SOURCE_UID) else {
            return match (self.options.version, local_policy(existing, self.options.adopts)) {
                (Version::V0_9_0, _) => {
                    self.lapse(Kind::Application, &key.name, "unmarked", Until::Never);
                    Err(Class::Error)
                }
                (Version::Head, true) => {
                    self.desk.count("model_adopted");
                    in_place(incoming).await
                }
                (Version::Head, false) => {
                    let body = ErrorBody {
                        resource_name: (&*key.name).into(),
                        resource_namespace: (&*key.namespace).into(),
                        message: "the Application exists and may not be adopted".into(),
                    };
                    let uuid = self.desk.draw(Rng::uuid);
                    self.enqueue(Event::control(Target::Application, Type::Error, uuid, body.encode()));
                    Ok(())
                }
            };
        };
        let local_principal = annotation(existing, PRINCIPAL_UID);
        let is_transition =
            local_principal.is_some_and(|local| !principal_uid.is_empty() && local != principal_uid);
        let is_unknown = local_principal.is_none() && !principal_uid.is_empty();
        if is_transition || source_uid.is_empty() {
            return in_place(incoming).await;
        }
        if source_uid == local_source {
            if self.has_seen(Kind::Application, &incoming) {
                self.lapse(Kind::Application, &key.name, "same-version", Until::Round);
                return Err(Class::Discarded);
            }
            let mut incoming = incoming;
            to_in_cluster(&mut incoming);
            self.cache(Kind::Application, &source_uid, &incoming);
            return self.managed_update(&incoming, None, false).await;
        }
        if is_unknown {
            return in_place(incoming).await;
        }
        match incoming_policy(&incoming, self.options.mismatch) {
            Policy::Upsert => in_place(incoming).await,
            Policy::Recreate => {
                self.desk.count("model_replaced");
                self.delete(key, false).await?;
                self.create_application(key, incoming).await
            }
        }
    }

    async fn in_place(
        &self,
        mut incoming: Value,
        source_uid: &str,
        principal_uid: &str,
    ) -> Result<(), Class> {
        to_in_cluster(&mut incoming);
        self.managed_update(&incoming, Some((source_uid, principal_uid)), false).await?;
        self.cache(Kind::Application, source_uid, &incoming);
        Ok(())
    }

    async fn create_application(&self, key: &Key, mut incoming: Value) -> Result<(), Class> {
        let kind = Kind::Application;
        let source_uid = annotation(&incoming, SOURCE_UID).unwrap_or_else(|| uid_of(&incoming)).to_owned();
        if self.is_managed(kind, &key.name) {
            self.desk.count("model_discarded_creates");
            if self.cached(kind, &source_uid).is_some() {
                // Its copy was deleted here and comes back as it was.
                self.lapse(kind, &key.name, "discarded-update", Until::Round);
            }
            return Err(Class::Discarded);
        }
        remove_annotation(&mut incoming, LAST_APPLIED);
        to_in_cluster(&mut incoming);
        self.cache(kind, &source_uid, &incoming);
        self.post_application(key, incoming).await
    }

    async fn post_application(&self, key: &Key, mut incoming: Value) -> Result<(), Class> {
        let kind = Kind::Application;
        if annotation(&incoming, SOURCE_UID).is_none() {
            let uid = uid_of(&incoming).to_owned();
            set_annotation(&mut incoming, SOURCE_UID, &uid);
        }
        strip(&mut incoming, &["resourceVersion", "generation"]);
        match self.desk.create(key, &with_type(kind, typed(&incoming))).await {
            Ok(written) => {
                self.manage(kind, &key.name);
                self.remember_written(kind, &written);
                Ok(())
            }
            Err(failure) if failure.is_already_exists() => {
                self.desk.count("model_existed");
                Ok(())
            }
            Err(failure) => Err(failure.into()),
        }
    }

    /// Makes the copy what `incoming` says, its status apart.
    ///
    /// `reverts`: it is what the watch showed, with the spec of the hub. What changed since is undone with the local edit.
    async fn managed_update(
        &self,
        incoming: &Value,
        forced: Option<(&str, &str)>,
        reverts: bool,
    ) -> Result<(), Class> {
        let kind = Kind::Application;
        let key = self.key(kind, name_of(incoming));
        for attempt in 0.. {
            let existing = match self.desk.get(&key).await {
                Ok(existing) => typed(&existing),
                Err(failure) if failure.is_not_found() => {
                    return self.post_application(&key, incoming.clone()).await;
                }
                Err(failure) => return Err(failure.into()),
            };
            let incoming = typed(incoming);
            let mut wanted = incoming.clone();
            if let Some(refresh) = annotation(&existing, REFRESH) {
                set_annotation(&mut wanted, REFRESH, refresh);
            }
            for (name, forced) in [
                (SOURCE_UID, forced.map(|(source_uid, _)| source_uid)),
                (PRINCIPAL_UID, forced.map(|(_, principal_uid)| principal_uid)),
            ] {
                let forced = forced.filter(|uid| !uid.is_empty());
                let uid = forced.or(annotation(&existing, name)).or(annotation(&incoming, name));
                if let Some(uid) = uid {
                    let uid = uid.to_owned();
                    set_annotation(&mut wanted, name, &uid);
                }
            }
            let members = ["labels", "annotations", "finalizers"];
            if reverts
                && members.iter().any(|member| existing["metadata"][member] != incoming["metadata"][member])
            {
                self.desk.count("model_stale_reverts");
                self.lapse(kind, &key.name, "stale-revert", Until::Edit);
            }
            let operation = wanted_operation(&existing, &incoming);
            let patch = difference(
                &parts(&existing, &existing["operation"], &members),
                &parts(&wanted, operation, &members),
            );
            let written = match self.desk.patch(&key, &patch).await {
                Err(failure) if failure.is_conflict() && attempt < CONFLICTS => {
                    self.pause(attempt).await;
                    continue;
                }
                written => written,
            };
            if let Ok(written) = &written {
                self.remember_written(kind, written);
            }
            if is_terminating(&incoming) && !is_terminating(&existing) {
                if let (Ok(_), Some(source_uid)) = (&written, annotation(&existing, SOURCE_UID)) {
                    self.state.borrow_mut().expected.insert(source_uid.to_owned());
                }
                self.desk.count("model_ended");
                // A local deletion that was shown before the copy came back ends the new one.
                let ended = self.desk.delete(&key, !reverts).await;
                if written.is_ok() {
                    gone_is_done(ended)?;
                }
            }
            return written.map(drop).map_err(Class::from);
        }
        Ok(())
    }

    async fn pause(&self, attempt: u32) {
        self.desk.sleep(Duration::from_millis(10 * 5u64.pow(attempt))).await;
    }

    async fn set_operation(
        &self,
        key: &Key,
        incoming: &Value,
        existing: Option<&Value>,
    ) -> Result<(), Class> {
        let source_uid = annotation(incoming, SOURCE_UID).unwrap_or_else(|| uid_of(incoming));
        if existing.and_then(|existing| annotation(existing, SOURCE_UID)) != Some(source_uid) {
            return Err(Class::Error);
        }
        for attempt in 0.. {
            let existing = typed(&self.desk.get(key).await?);
            let incoming = typed(incoming);
            let wanted = wanted_operation(&existing, &incoming);
            let old = json!({"operation": existing["operation"]});
            let patch = difference(&without_null(old), &without_null(json!({"operation": wanted})));
            match self.desk.patch(key, &patch).await {
                Err(failure) if failure.is_conflict() && attempt < CONFLICTS => self.pause(attempt).await,
                Err(failure) => return Err(failure.into()),
                Ok(written) => {
                    self.desk.count("model_operations");
                    self.remember_written(Kind::Application, &written);
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    async fn terminate(&self, key: &Key, existing: Option<&Value>) -> Result<(), Class> {
        if !existing.is_some_and(|existing| existing["status"]["operationState"].is_object()) {
            return Err(Class::Error);
        }
        let path = "/status/operationState/phase";
        let patch = json!([{"op": "add", "path": path, "value": TERMINATING}]);
        self.desk.patch(key, &patch).await?;
        self.desk.count("model_terminated");
        Ok(())
    }

    /// By name: whatever managed object has it.
    async fn delete(&self, key: &Key, told: bool) -> Result<(), Class> {
        let kind = key.kind;
        let existing = match self.informers[&kind].get(&key.name).filter(|_| kind == Kind::Application) {
            Some(object) => Some(object),
            None => found(self.desk.get(key).await)?.map(Rc::new),
        };
        if !self.is_managed(kind, &key.name) {
            if existing.is_some_and(|existing| !is_terminating(&existing)) {
                self.lapse(kind, &key.name, "unmanaged", Until::Restart);
            }
            return Err(Class::Error);
        }
        let Some(existing) = existing else { return Err(Class::Error) };
        let source_uid = annotation(&existing, SOURCE_UID).unwrap_or_default().to_owned();
        self.state.borrow_mut().expected.insert(source_uid.clone());
        match self.desk.delete(key, told).await {
            Ok(()) => {
                if kind == Kind::Application {
                    self.state.borrow_mut().source.remove(&(kind, source_uid));
                }
                self.unmanage(kind, &key.name);
                Ok(())
            }
            Err(failure) if failure.is_not_found() => {
                if kind == Kind::GpgKey {
                    self.state.borrow_mut().expected.remove(&source_uid);
                    self.unmanage(kind, &key.name);
                }
                Ok(())
            }
            Err(failure) => Err(failure.into()),
        }
    }
}

/// Projects, repositories and keys.
impl Agent {
    async fn content(&self, kind: Kind, r#type: Type, mut incoming: Value) -> Result<(), Class> {
        incoming["metadata"]["namespace"] = json!(self.options.namespace);
        if kind != Kind::Repository {
            strip(&mut incoming, &["ownerReferences"]);
        }
        let key = self.key(kind, name_of(&incoming));
        let existing = found(self.desk.get(&key).await)?;
        let local_source = existing.as_ref().and_then(|existing| annotation(existing, SOURCE_UID));
        if existing.is_some() && local_source.is_none() {
            let refuses = match kind {
                Kind::Repository => true,
                Kind::AppProject => self.options.version == Version::V0_9_0,
                Kind::Application | Kind::GpgKey => false,
            };
            if refuses {
                self.lapse(kind, &key.name, "unmarked", Until::Never);
                return Err(Class::Error);
            }
        }
        match r#type {
            Type::Create | Type::SpecUpdate => {}
            Type::Delete => return self.delete(&key, true).await,
            _ => return Ok(()),
        }
        let Some(_) = &existing else { return self.content_create(&key, incoming).await };
        if local_source == Some(uid_of(&incoming)) {
            return self.content_update(kind, &incoming, true).await;
        }
        let foreign = local_source.is_none() || !self.is_managed(kind, &key.name);
        if kind == Kind::AppProject && foreign {
            self.desk.count("model_adopted");
            let uid = uid_of(&incoming).to_owned();
            set_annotation(&mut incoming, SOURCE_UID, &uid);
            return self.content_update(kind, &incoming, true).await;
        }
        self.desk.count("model_replaced");
        match incoming_policy(&incoming, self.options.mismatch) {
            Policy::Upsert => {
                let uid = uid_of(&incoming).to_owned();
                set_annotation(&mut incoming, SOURCE_UID, &uid);
                self.content_update(kind, &incoming, true).await
            }
            Policy::Recreate => {
                self.delete(&key, false).await?;
                self.content_create(&key, incoming).await
            }
        }
    }

    async fn content_create(&self, key: &Key, incoming: Value) -> Result<(), Class> {
        let kind = key.kind;
        if kind == Kind::AppProject && self.is_managed(kind, &key.name) {
            return self.content_update(kind, &incoming, true).await;
        }
        let uid = uid_of(&incoming).to_owned();
        self.cache(kind, &uid, &incoming);
        match self.content_post(key, incoming.clone()).await {
            Ok(()) => Ok(()),
            Err(failure) if failure.is_already_exists() => match kind {
                Kind::GpgKey => {
                    self.manage(kind, &key.name);
                    self.content_update(kind, &incoming, true).await
                }
                Kind::Repository => Ok(()),
                Kind::AppProject | Kind::Application => Err(Class::Error),
            },
            Err(failure) => Err(failure.into()),
        }
    }

    async fn content_post(&self, key: &Key, mut object: Value) -> Result<(), Failure> {
        let kind = key.kind;
        let uid = uid_of(&object).to_owned();
        remove_annotation(&mut object, LAST_APPLIED);
        set_annotation(&mut object, SOURCE_UID, &uid);
        strip(&mut object, &["resourceVersion", "generation"]);
        let written = self.desk.create(key, &with_type(kind, object)).await?;
        self.manage(kind, &key.name);
        self.remember_written(kind, &written);
        Ok(())
    }

    async fn content_update(&self, kind: Kind, incoming: &Value, from_hub: bool) -> Result<(), Class> {
        let key = self.key(kind, name_of(incoming));
        if from_hub {
            if self.has_seen(kind, incoming) {
                self.lapse(kind, &key.name, "same-version", Until::Round);
                return Err(Class::Discarded);
            }
            self.cache(kind, uid_of(incoming), incoming);
        }
        let added = kind == Kind::AppProject && self.manage(kind, &key.name);
        let result = if kind == Kind::GpgKey {
            self.replace_keys(&key, incoming).await
        } else {
            self.patch_content(&key, incoming).await
        };
        if result.is_err() && added {
            self.unmanage(kind, &key.name);
        }
        result
    }

    async fn patch_content(&self, key: &Key, incoming: &Value) -> Result<(), Class> {
        let kind = key.kind;
        for attempt in 0.. {
            let existing = match self.desk.get(key).await {
                Ok(existing) => existing,
                Err(failure) if failure.is_not_found() => {
                    return self.content_post(key, incoming.clone()).await.map_err(Class::from);
                }
                Err(failure) => return Err(failure.into()),
            };
            let mut wanted = incoming.clone();
            let (said, local) = (annotation(incoming, SOURCE_UID), annotation(&existing, SOURCE_UID));
            let uid = if kind == Kind::AppProject { said.or(local) } else { local.or(said) };
            if let Some(uid) = uid {
                set_annotation(&mut wanted, SOURCE_UID, uid);
            }
            let picked = |object: &Value| {
                let mut picked = parts(object, &Value::Null, &["annotations", "labels"]);
                if let Some(members) = picked.as_object_mut() {
                    members.remove("spec");
                    members.insert(kind.member().to_owned(), object[kind.member()].clone());
                }
                without_null(picked)
            };
            let patch = difference(&picked(&existing), &picked(&wanted));
            match self.desk.patch(key, &patch).await {
                Err(failure) if failure.is_conflict() && attempt < CONFLICTS => self.pause(attempt).await,
                Err(failure) => return Err(failure.into()),
                Ok(written) => {
                    self.remember_written(kind, &written);
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// Read, changed and put back; somebody else's write meanwhile loses it.
    async fn replace_keys(&self, key: &Key, incoming: &Value) -> Result<(), Class> {
        let mut object = self.desk.get(key).await?;
        let local = annotation(&object, SOURCE_UID).map(str::to_owned);
        object["data"] = incoming["data"].clone();
        object["metadata"]["annotations"] = incoming["metadata"]["annotations"].clone();
        object["metadata"]["labels"] = incoming["metadata"]["labels"].clone();
        if let Some(local) = local {
            set_annotation(&mut object, SOURCE_UID, &local);
        }
        let object = without_null(object);
        match self.desk.replace(key, &object).await {
            Ok(written) => {
                self.remember_written(Kind::GpgKey, &written);
                Ok(())
            }
            Err(failure) => {
                if failure.is_conflict() {
                    self.lapse(Kind::GpgKey, &key.name, "lost-conflict", Until::Round);
                }
                Err(failure.into())
            }
        }
    }
}

/// Comparing both sides.
impl Agent {
    /// Once per process, with the first stream.
    async fn resync_on_start(self: Rc<Self>) {
        self.desk
            .wait(|| {
                let mut state = self.state.borrow_mut();
                let first = state.connected && !core::mem::replace(&mut state.resynced, true);
                first.then_some(())
            })
            .await;
        self.desk.count("model_resyncs");
        let checksum = {
            let state = self.state.borrow();
            let entries =
                state.tracked.iter().map(|(kind, name, uid)| (kind.as_str(), name.as_str(), uid.as_str()));
            list_checksum(entries).map(|sum| sum.to_vec())
        };
        let uuid = self.desk.draw(Rng::uuid);
        let body = SyncedResourceList { checksum }.encode();
        self.enqueue(Event::control(Target::ResourceResync, Type::RequestSyncedResourceList, uuid, body));
        self.state.borrow_mut().busy += 1;
        self.ask_for_all().await;
        self.state.borrow_mut().busy -= 1;
    }

    async fn ask_for_all(&self) {
        let tracked = self.state.borrow().tracked.clone();
        for (kind, name, _) in tracked {
            match self.desk.get(&self.key(kind, &name)).await {
                Ok(object) => self.ask_for(kind, &object),
                Err(failure) if failure.is_not_found() => {}
                Err(_) => self.lapse(kind, &name, "not-compared", Until::Round),
            }
        }
    }

    fn ask_for(&self, kind: Kind, object: &Value) {
        let Some(source_uid) = annotation(object, SOURCE_UID) else { return };
        let bytes = object.to_string().into_bytes();
        let Ok(checksum) = spec_checksum(kind, &bytes) else { return };
        let resource = SyncedResource {
            name: name_of(object).into(),
            namespace: self.options.namespace.as_str().into(),
            uid: source_uid.into(),
            kind: kind.as_str().into(),
        };
        self.request_update(resource, Some(checksum.to_vec()));
    }

    fn request_update(&self, resource: SyncedResource<'_>, checksum: Option<Vec<u8>>) {
        let uuid = self.desk.draw(Rng::uuid);
        let body = RequestUpdate { resource, checksum }.encode();
        self.enqueue(Event::control(Target::ResourceResync, Type::RequestUpdate, uuid, body));
    }

    async fn resync(&self, r#type: Type, data: &[u8]) -> Result<(), Class> {
        match r#type {
            Type::RequestResourceResync => {
                self.desk.count("model_resyncs");
                self.ask_for_all().await;
                Ok(())
            }
            Type::ResponseSyncedResource => {
                let resource = SyncedResource::decode(data).map_err(|_| Class::Error)?;
                let kind = Kind::parse(&resource.kind).ok_or(Class::Error)?;
                let namespace = match kind {
                    // The hub's name for it, under which there is nothing here.
                    Kind::Application => &*resource.namespace,
                    _ => self.options.namespace.as_str(),
                };
                match found(self.desk.get(&Key::new(kind, namespace, &resource.name)).await)? {
                    Some(object) if annotation(&object, SOURCE_UID).is_some() => self.ask_for(kind, &object),
                    Some(_) => return Err(Class::Error),
                    None => self.request_update(SyncedResource { uid: "".into(), ..resource }, None),
                }
                Ok(())
            }
            _ => Err(Class::Error),
        }
    }
}

/// An answer of which "not found" is one.
fn found(answer: Result<Value, Failure>) -> Result<Option<Value>, Class> {
    match answer {
        Ok(object) => Ok(Some(object)),
        Err(failure) if failure.is_not_found() => Ok(None),
        Err(failure) => Err(failure.into()),
    }
}

fn gone_is_done(answer: Result<(), Failure>) -> Result<(), Class> {
    match answer {
        Err(failure) if !failure.is_not_found() => Err(failure.into()),
        _ => Ok(()),
    }
}

fn to_in_cluster(application: &mut Value) {
    let destination = &mut application["spec"]["destination"];
    destination["name"] = json!("in-cluster");
    if let Some(members) = destination.as_object_mut() {
        members.remove("server");
    }
}

/// The operation that stands after an update: one that runs out is not replaced, none takes nothing away.
fn wanted_operation<'a>(existing: &'a Value, incoming: &'a Value) -> &'a Value {
    if incoming["operation"].is_null() || phase_of(existing) == TERMINATING {
        &existing["operation"]
    } else {
        &incoming["operation"]
    }
}

/// What a patch is made from.
fn parts(object: &Value, operation: &Value, metadata: &[&str]) -> Value {
    let mut picked = json!({"metadata": {}, "spec": object["spec"], "operation": operation});
    for member in metadata {
        picked["metadata"][*member] = object["metadata"][*member].clone();
    }
    without_null(picked)
}

/// Without members that are null, at the top and in the metadata.
fn without_null(mut object: Value) -> Value {
    if let Some(members) = object.as_object_mut() {
        members.retain(|_, member| !member.is_null());
        if let Some(metadata) = members.get_mut("metadata").and_then(Value::as_object_mut) {
            metadata.retain(|_, member| !member.is_null());
        }
    }
    object
}

fn is_empty(part: &Value) -> bool {
    part.as_object().is_none_or(serde_json::Map::is_empty)
}

/// What an informer hands out has no type.
fn untyped_meta(mut object: Value) -> Value {
    if let Some(members) = object.as_object_mut() {
        members.remove("apiVersion");
        members.remove("kind");
    }
    object
}

fn with_type(kind: Kind, mut object: Value) -> Value {
    object["apiVersion"] = json!(kind.api_version());
    object["kind"] = json!(kind.object_kind());
    object
}

fn local_policy(existing: &Value, adopts: bool) -> bool {
    match annotation(existing, ADOPTION_POLICY) {
        Some("always") => true,
        Some("never") => false,
        _ => adopts,
    }
}

fn incoming_policy(incoming: &Value, policy: Policy) -> Policy {
    match annotation(incoming, MISMATCH_POLICY) {
        Some("recreate") => Policy::Recreate,
        Some("upsert") => Policy::Upsert,
        _ => policy,
    }
}

/// A write that met somebody else's is repeated so often.
const CONFLICTS: u32 = 4;

#[cfg(test)]
impl Agent {
    pub(super) fn desk_for_test(&self) -> Desk {
        self.desk.clone()
    }

    /// A key as the records have it, of an object of any kind.
    pub(super) fn manage_for_test(&self, key: &str) {
        let name = key.rsplit(['/', ':']).next().unwrap_or_default();
        for kind in Kind::ALL {
            self.manage(kind, name);
        }
    }

    pub(super) fn take_queue_for_test(&self) -> Vec<Event> {
        self.state.borrow_mut().sender.take_queue()
    }
}
