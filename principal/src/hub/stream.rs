//! The way to an agent: a stream that asks the core for the next message when HTTP/2 has room for one.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use futures_util::Stream;
use tokio::sync::Notify;
use tonic::Status;

use super::agent::Agent;

/// Why a stream ends. The statuses are those that a Go agent reconnects after; any other would leave it spinning on a
/// dead stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ending {
    /// The agent hung up, or the connection broke.
    Over,
    /// The agent opened a newer one.
    Replaced,
    /// The principal stops.
    Draining,
    /// The agent's cluster Secret is gone.
    Unregistered,
    /// The agent is not welcome any more.
    Refused,
    /// A defect of ours.
    Broken,
}

impl Ending {
    fn status(self) -> Option<Status> {
        match self {
            Self::Over => None,
            Self::Replaced => Some(Status::cancelled("a newer connection of this agent replaces this one")),
            Self::Draining => Some(Status::unavailable("the principal stops")),
            Self::Unregistered => Some(Status::unavailable("the agent is no longer registered")),
            Self::Broken => Some(Status::unavailable("the principal lost its state of this agent")),
            Self::Refused => Some(Status::unauthenticated("authentication failed")),
        }
    }
}

/// What both ends of a stream share with its agent.
#[derive(Default)]
pub struct Slot {
    state: Mutex<State>,
    /// The backlog of acknowledgements shrank.
    drained: Notify,
    /// The stream ends.
    over: Notify,
}

#[derive(Default)]
struct State {
    waker: Option<Waker>,
    ending: Option<Ending>,
    /// Messages received that the way back has not caught up with.
    backlog: usize,
}

impl Slot {
    pub(super) fn end(&self, ending: Ending) {
        self.state().ending.get_or_insert(ending);
        self.drained.notify_waiters();
        self.over.notify_waiters();
        self.wake();
    }

    pub(super) fn wake(&self) {
        let waker = self.state().waker.take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    pub(super) fn received(&self) {
        self.state().backlog += 1;
    }

    pub(super) fn transmitted(&self, any: bool) {
        let mut state = self.state();
        state.backlog = if any { state.backlog.saturating_sub(1) } else { 0 };
        let drained = state.backlog < BACKLOG_MAX;
        drop(state);
        if drained {
            self.drained.notify_waiters();
        }
    }

    /// Waits until the agent has read enough of what it asked for. Only an agent that sends and never reads gets
    /// here: each message owes it an acknowledgement, and those must not pile up.
    pub async fn ready(&self) {
        loop {
            let drained = self.drained.notified();
            {
                let state = self.state();
                if state.backlog < BACKLOG_MAX || state.ending.is_some() {
                    return;
                }
            }
            drained.await;
        }
    }

    /// Waits for the end.
    pub async fn ended(&self) {
        loop {
            let over = self.over.notified();
            if self.state().ending.is_some() {
                return;
            }
            over.await;
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Messages for one agent, encoded `eventstreamapi.Event`s.
pub struct AgentStream {
    agent: Arc<Agent>,
    slot: Arc<Slot>,
    over: bool,
}

impl AgentStream {
    pub(super) fn new(agent: Arc<Agent>, slot: Arc<Slot>) -> Self {
        Self { agent, slot, over: false }
    }

    /// The part that the receiving half shares.
    pub fn slot(&self) -> Arc<Slot> {
        self.slot.clone()
    }
}

impl Stream for AgentStream {
    type Item = Result<Vec<u8>, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.over {
            return Poll::Ready(None);
        }
        // First the waker: what becomes ready from here on wakes it.
        let ending = {
            let mut state = self.slot.state();
            state.waker = Some(context.waker().clone());
            state.ending
        };
        if let Some(ending) = ending {
            self.over = true;
            return Poll::Ready(ending.status().map(Err));
        }
        match self.agent.transmit(&self.slot) {
            Some(frame) => Poll::Ready(Some(Ok(frame))),
            None => Poll::Pending,
        }
    }
}

impl Drop for AgentStream {
    /// The connection went away: the receiving half is told, whatever it waits for.
    fn drop(&mut self) {
        self.slot.end(Ending::Over);
    }
}

/// Messages received and not answered yet; an agent keeps at most one in flight per object.
const BACKLOG_MAX: usize = 10_000;
