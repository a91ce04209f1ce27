//! What a person should know: the shells log it and count it.

use alloc::boxed::Box;
use alloc::string::String;
use core::fmt;
use core::time::Duration;

use crate::request::{Key, Status};

/// Something worth a log line. Never holds an object body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Note {
    /// The API server refused what the peer asked for; it is tried again after `retry`.
    Refused {
        /// The object.
        key: Key,
        /// What the API server said.
        status: Status,
        /// When it is tried again.
        retry: Duration,
    },
    /// The API server is in trouble; it is tried again after `retry`.
    Trouble {
        /// The object.
        key: Key,
        /// What went wrong.
        reason: String,
        /// When it is tried again.
        retry: Duration,
    },
    /// The peer's word was not carried out, for a reason that time does not change.
    NotApplied {
        /// The object.
        key: Key,
        /// Why.
        reason: &'static str,
    },
    /// The site could not take an object that has no status to show it in.
    RefusedOnSite {
        /// The object.
        key: Key,
        /// What the agent said.
        message: Box<str>,
    },
    /// A delete of a resync was held: too many at once.
    HeldDelete {
        /// The object.
        key: Key,
    },
    /// A local edit was reverted.
    Reverted {
        /// The object.
        key: Key,
    },
    /// A local deletion was undone.
    Recreated {
        /// The object.
        key: Key,
    },
    /// The object was changed to what the peer said.
    Applied {
        /// The object.
        key: Key,
        /// Which write it was.
        action: &'static str,
    },
    /// An event of a kind that this version does not carry; acknowledged, not applied.
    Unsupported {
        /// `dataschema` of the event.
        target: Box<str>,
        /// `type` of the event.
        r#type: Box<str>,
    },
    /// An event that cannot be read; acknowledged if it had ids.
    BadEvent {
        /// What is wrong with it.
        reason: String,
    },
    /// An object of our own API server cannot be read; it is left alone.
    BadObject {
        /// The object.
        key: Key,
        /// What is wrong with it.
        reason: String,
    },
}

impl Note {
    /// Whether it is worth a warning rather than an informational line.
    pub fn is_warning(&self) -> bool {
        !matches!(self, Self::Reverted { .. } | Self::Recreated { .. } | Self::Applied { .. })
    }
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused { key, status, retry } => write!(
                f,
                "{key}: the API server refuses it with {} {}: {}; other objects go on, next try in {} s",
                status.code,
                status.reason,
                status.message,
                retry.as_secs()
            ),
            Self::Trouble { key, reason, retry } => {
                write!(f, "{key}: {reason}; next try in {} s", retry.as_secs())
            }
            Self::NotApplied { key, reason } => write!(f, "{key}: not applied: {reason}"),
            Self::RefusedOnSite { key, message } => write!(f, "{key}: the agent cannot take it: {message}"),
            Self::HeldDelete { key } => write!(
                f,
                "{key}: held: a resync asks for more deletes than the limit allows; delete it on the hub or annotate it with {}",
                crate::transform::CONFIRM_DELETE
            ),
            Self::Reverted { key } => write!(f, "{key}: local edit reverted"),
            Self::Recreated { key } => write!(f, "{key}: deleted locally, created again"),
            Self::Applied { key, action } => write!(f, "{key}: {action}"),
            Self::Unsupported { target, r#type } => {
                write!(f, "event {type} for {target} is not supported by this version and was not applied")
            }
            Self::BadEvent { reason } => write!(f, "event from the peer cannot be read: {reason}"),
            Self::BadObject { key, reason } => write!(f, "{key}: object cannot be read: {reason}"),
        }
    }
}

/// Counted events of one core instance; they only grow.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Events received, acknowledgements included.
    pub received: u64,
    /// Events handed to the stream, acknowledgements included.
    pub sent: u64,
    /// Acknowledgements received that matched.
    pub acknowledged: u64,
    /// Acknowledgements received that matched nothing in flight.
    pub unmatched_acks: u64,
    /// Events sent again for want of an acknowledgement.
    pub resent: u64,
    /// Kubernetes requests asked for, by kind.
    pub reads: u64,
    /// See `reads`.
    pub creates: u64,
    /// See `reads`.
    pub patches: u64,
    /// See `reads`.
    pub deletes: u64,
    /// Writes that met a concurrent change and were made again.
    pub conflicts: u64,
    /// Answers whose ticket was stale.
    pub stale_answers: u64,
    /// Objects refused by the API server.
    pub refused: u64,
    /// Requests that failed in a way that time may mend.
    pub trouble: u64,
    /// Local edits reverted.
    pub reverted: u64,
    /// Local deletions undone.
    pub recreated: u64,
    /// Deletes held by the resync limit.
    pub held: u64,
    /// Resyncs started or answered.
    pub resyncs: u64,
    /// Rounds begun: a digest sent, or everything compared with a peer that knows none.
    pub rounds: u64,
    /// Digests of the peer that were equal to ours.
    pub rounds_equal: u64,
    /// Acknowledgements given before the write stood, because our API server was in trouble too long.
    pub late_acks: u64,
    /// Notes dropped because nobody fetched them.
    pub notes_dropped: u64,
}
