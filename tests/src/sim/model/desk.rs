//! The desk that the tasks of a model work at: calls to the API server, time, and who runs when.
//!
//! The reference is written as goroutines that block. So is a model: its rules are `async` functions that wait for an
//! answer of the API server, and one loop without threads runs them in a fixed order.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use agent_core::informer::End;
use agent_core::rand::Rng;
use agent_core::request::{Key, Outcome, Verb};
use agent_core::time::Instant;
use serde_json::Value;

use crate::sim::half::{Answer, Ask, Call, Lapse, What};

/// Why a call to the API server did not do what was asked.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Failure {
    /// HTTP status; 0: no answer.
    pub(super) code: u16,
    pub(super) reason: String,
}

impl Failure {
    pub(super) fn is_not_found(&self) -> bool {
        self.code == 404
    }

    pub(super) fn is_already_exists(&self) -> bool {
        self.reason == "AlreadyExists"
    }

    pub(super) fn is_conflict(&self) -> bool {
        self.reason == "Conflict"
    }

    /// Whether an event that ended so is left without an acknowledgement.
    pub(super) fn is_retryable(&self) -> bool {
        self.code == 0
            || matches!(
                self.reason.as_str(),
                "InternalError"
                    | "Invalid"
                    | "TooManyRequests"
                    | "ServerTimeout"
                    | "ServiceUnavailable"
                    | "Timeout"
            )
    }
}

/// A piece of the answer to a list or a watch.
#[derive(Debug)]
pub(super) enum Piece {
    Bytes(Vec<u8>),
    End(End),
}

/// Shared by all tasks of one model.
#[derive(Clone, Debug)]
pub(super) struct Desk(Rc<RefCell<Inner>>);

struct Inner {
    now: Instant,
    rng: Rng,
    next_id: u64,
    calls: VecDeque<Call>,
    outcomes: BTreeMap<u64, Outcome>,
    pieces: BTreeMap<u64, VecDeque<Piece>>,
    alarms: BTreeSet<Instant>,
    started: Vec<Task>,
    /// Something that was waited for has come.
    moved: bool,
    counters: BTreeMap<&'static str, u64>,
    lapses: Vec<Lapse>,
}

type Task = Pin<Box<dyn Future<Output = ()>>>;

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inner")
            .field("now", &self.now)
            .field("calls", &self.calls.len())
            .finish_non_exhaustive()
    }
}

impl Desk {
    pub(super) fn new(rng: Rng) -> Self {
        Self(Rc::new(RefCell::new(Inner {
            now: Instant::ZERO,
            rng,
            next_id: 0,
            calls: VecDeque::new(),
            outcomes: BTreeMap::new(),
            pieces: BTreeMap::new(),
            alarms: BTreeSet::new(),
            started: Vec::new(),
            moved: false,
            counters: BTreeMap::new(),
            lapses: Vec::new(),
        })))
    }

    pub(super) fn now(&self) -> Instant {
        self.0.borrow().now
    }

    pub(super) fn set_now(&self, now: Instant) {
        self.0.borrow_mut().now = now;
    }

    /// Draws from the model's own randomness.
    pub(super) fn draw<T>(&self, draw: impl FnOnce(&mut Rng) -> T) -> T {
        draw(&mut self.0.borrow_mut().rng)
    }

    pub(super) fn count(&self, name: &'static str) {
        *self.0.borrow_mut().counters.entry(name).or_default() += 1;
    }

    pub(super) fn counters(&self) -> BTreeMap<&'static str, u64> {
        self.0.borrow().counters.clone()
    }

    pub(super) fn lapse(&self, lapse: Lapse) {
        self.0.borrow_mut().lapses.push(lapse);
    }

    pub(super) fn take_lapses(&self) -> Vec<Lapse> {
        core::mem::take(&mut self.0.borrow_mut().lapses)
    }

    /// Starts a task beside those that run.
    pub(super) fn start(&self, task: impl Future<Output = ()> + 'static) {
        let mut inner = self.0.borrow_mut();
        inner.started.push(Box::pin(task));
        inner.moved = true;
    }

    /// Waits until `ready` has something.
    pub(super) async fn wait<T>(&self, mut ready: impl FnMut() -> Option<T>) -> T {
        poll_fn(|_| match ready() {
            Some(value) => {
                self.0.borrow_mut().moved = true;
                Poll::Ready(value)
            }
            None => Poll::Pending,
        })
        .await
    }

    pub(super) async fn sleep(&self, delay: Duration) {
        let until = self.now() + delay;
        self.0.borrow_mut().alarms.insert(until);
        self.wait(|| (self.now() >= until).then_some(())).await;
    }

    pub(super) fn poll_alarm(&self) -> Option<Instant> {
        self.0.borrow().alarms.first().copied()
    }

    /// Forgets alarms that are over.
    pub(super) fn ring(&self) {
        let mut inner = self.0.borrow_mut();
        let now = inner.now;
        inner.alarms.retain(|at| *at > now);
    }

    fn issue(&self, what: What) -> u64 {
        let mut inner = self.0.borrow_mut();
        inner.next_id += 1;
        let id = inner.next_id;
        inner.calls.push_back(Call { id, what });
        id
    }

    async fn call(&self, what: What) -> Result<Vec<u8>, Failure> {
        let id = self.issue(what);
        let outcome = self.wait(|| self.0.borrow_mut().outcomes.remove(&id)).await;
        match outcome {
            Outcome::Done(body) => Ok(body),
            Outcome::Status(status) => Err(Failure { code: status.code, reason: status.reason }),
            Outcome::Unknown(reason) => Err(Failure { code: 0, reason }),
        }
    }

    async fn object(&self, key: &Key, ask: Ask) -> Result<Value, Failure> {
        let body = self.call(What::Object { key: key.clone(), ask }).await?;
        Ok(serde_json::from_slice(&body).unwrap_or_default())
    }

    pub(super) async fn get(&self, key: &Key) -> Result<Value, Failure> {
        self.object(key, Ask::Core(Verb::Get)).await
    }

    pub(super) async fn create(&self, key: &Key, object: &Value) -> Result<Value, Failure> {
        self.object(key, Ask::Core(Verb::Create(object.to_string().into_bytes()))).await
    }

    pub(super) async fn patch(&self, key: &Key, patch: &Value) -> Result<Value, Failure> {
        self.object(key, Ask::Core(Verb::JsonPatch(patch.to_string().into_bytes()))).await
    }

    pub(super) async fn replace(&self, key: &Key, object: &Value) -> Result<Value, Failure> {
        self.object(key, Ask::Replace(object.to_string().into_bytes())).await
    }

    /// By name alone: whatever object has it.
    pub(super) async fn delete(&self, key: &Key, told: bool) -> Result<(), Failure> {
        self.call(What::Object { key: key.clone(), ask: Ask::Delete { told } }).await.map(drop)
    }

    /// The items of a list of its own, beside the watches.
    pub(super) async fn list(&self, path: String) -> Result<Vec<Value>, Failure> {
        let body = self.call(What::List { path }).await?;
        let mut list: Value = serde_json::from_slice(&body).unwrap_or_default();
        Ok(list["items"].as_array_mut().map(core::mem::take).unwrap_or_default())
    }

    /// Begins a list or a watch, whose pieces [`Self::piece`] gives out.
    pub(super) fn fetch(&self, path: String) -> u64 {
        let id = self.issue(What::Fetch { path });
        self.0.borrow_mut().pieces.insert(id, VecDeque::new());
        id
    }

    /// The next piece; after the last one the fetch is forgotten.
    pub(super) async fn piece(&self, id: u64) -> Piece {
        let piece = self.wait(|| self.0.borrow_mut().pieces.get_mut(&id).and_then(VecDeque::pop_front)).await;
        if matches!(piece, Piece::End(_)) {
            self.0.borrow_mut().pieces.remove(&id);
        }
        piece
    }

    pub(super) fn poll_call(&self) -> Option<Call> {
        self.0.borrow_mut().calls.pop_front()
    }

    pub(super) fn answered(&self, id: u64, answer: Answer<'_>) {
        let mut inner = self.0.borrow_mut();
        match answer {
            Answer::Outcome(outcome) => {
                inner.outcomes.insert(id, outcome);
            }
            Answer::Bytes(bytes) => {
                if let Some(pieces) = inner.pieces.get_mut(&id) {
                    pieces.push_back(Piece::Bytes(bytes.to_vec()));
                }
            }
            Answer::End(end) => {
                if let Some(pieces) = inner.pieces.get_mut(&id) {
                    pieces.push_back(Piece::End(end));
                }
            }
        }
    }
}

/// The tasks of one model.
pub(super) struct Tasks {
    desk: Desk,
    tasks: Vec<Option<Task>>,
}

impl std::fmt::Debug for Tasks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tasks").field("tasks", &self.tasks.len()).finish_non_exhaustive()
    }
}

impl Tasks {
    pub(super) fn new(desk: Desk) -> Self {
        Self { desk, tasks: Vec::new() }
    }

    /// Runs until everybody waits for something that is not there.
    pub(super) fn run(&mut self) {
        let mut context = Context::from_waker(Waker::noop());
        loop {
            let started = {
                let mut inner = self.desk.0.borrow_mut();
                inner.moved = false;
                core::mem::take(&mut inner.started)
            };
            self.tasks.retain(Option::is_some);
            self.tasks.extend(started.into_iter().map(Some));
            for slot in &mut self.tasks {
                if let Some(task) = slot
                    && task.as_mut().poll(&mut context).is_ready()
                {
                    *slot = None;
                }
            }
            if !self.desk.0.borrow().moved {
                return;
            }
        }
    }
}

/// One at a time.
#[derive(Clone, Debug, Default)]
pub(super) struct Lock(Rc<RefCell<bool>>);

impl Lock {
    pub(super) async fn hold(&self, desk: &Desk) -> Held {
        desk.wait(|| (!self.0.replace(true)).then_some(())).await;
        Held(self.clone())
    }
}

/// Gives the lock back when dropped.
#[derive(Debug)]
pub(super) struct Held(Lock);

impl Drop for Held {
    fn drop(&mut self) {
        self.0.0.replace(false);
    }
}
