//! Models of the reference's halves, so that ours are run against what they will meet, its defects included.
//!
//! They are written from docs/protocol.md and held to the recorded vectors, never from anybody's code. They
//! take the seat of a half: the simulator does not know the difference.

mod agent;
mod desk;
mod informer;
mod sender;
#[cfg(test)]
mod tests;
mod value;

pub use agent::{AgentModel, Options as AgentOptions};

use desk::Failure;

/// A release of the reference.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Version {
    Head,
    V0_9_0,
}

impl Version {
    /// As a peer says it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Head => "99.9.9-unreleased",
            Self::V0_9_0 => "0.9.0",
        }
    }
}

/// What happens to a copy of another object of that name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Policy {
    Recreate,
    Upsert,
}

/// How the handling of an event ended. All but the last one are acknowledged.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Class {
    Ok,
    Discarded,
    Error,
    Retryable,
}

impl Class {
    const fn counter(self) -> &'static str {
        match self {
            Self::Ok => "model_done",
            Self::Discarded => "model_discarded",
            Self::Error => "model_acked_failures",
            Self::Retryable => "model_unacked_failures",
        }
    }
}

impl From<Failure> for Class {
    fn from(failure: Failure) -> Self {
        if failure.is_retryable() { Self::Retryable } else { Self::Error }
    }
}
