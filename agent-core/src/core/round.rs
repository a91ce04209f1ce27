//! Rounds: from time to time both sides are compared as a whole, so that what was lost on a way nobody thought of is
//! found without a restart (docs/core.md, "Rounds").

use core::time::Duration;

use super::outbox::{Control, ControlStage, Want};
use super::slot::Slot;
use super::{Core, Role};
use crate::checksum::fingerprint;
use crate::event::ResyncDigest;
use crate::peer::Peer;
use crate::request::Kind;
use crate::time::Instant;

/// When the next round is due, and how the last ones ended.
#[derive(Debug, Default)]
pub(super) struct Rounds {
    at: Option<Instant>,
    /// Rounds in a row that found a difference: what cannot be mended must not be compared in full every time.
    failed: u32,
    /// The last one did, or nobody has said otherwise.
    last_failed: bool,
    /// Rounds in a row that were put off because something was on its way.
    put_off: u32,
    /// The stream is to be opened anew.
    reopen: bool,
}

impl Core {
    /// Who compares: the agent with a peer that knows digests, either half with one that does not.
    pub(super) fn rounds_with(&mut self, now: Instant, peer: &Peer) {
        if peer.is_ours() && self.config.role == Role::Principal {
            self.rounds.at = None;
            return;
        }
        self.rounds.reopen = false;
        let next = self.next_round(now);
        // An interruption does not put off what is due.
        self.rounds.at = self.rounds.at.into_iter().chain(next).min();
    }

    fn next_round(&mut self, now: Instant) -> Option<Instant> {
        let interval = self.config.round_interval;
        if interval.is_zero() {
            return None;
        }
        let has_digest = self.peer.as_ref().is_some_and(|peer| peer.has_digest);
        let interval = if has_digest {
            interval.saturating_mul(1 << self.rounds.failed.min(16)).min(DAY.max(interval))
        } else {
            DAY.max(interval)
        };
        // Sites that started together do not ask together.
        Some(now + self.rng.between(interval / 4 * 3, interval / 4 * 5))
    }

    pub(super) fn round_due(&self) -> Option<Instant> {
        self.rounds.at.filter(|_| self.peer.is_some() && self.is_synced())
    }

    pub(super) fn round_timeout(&mut self, now: Instant) {
        if self.round_due().is_none_or(|at| at > now) {
            return;
        }
        let Some(peer) = &self.peer else { return };
        let (has_digest, is_go) = (peer.has_digest, peer.is_go);
        if has_digest && !self.is_settled() && self.rounds.put_off < PUT_OFF_MAX {
            self.rounds.put_off += 1;
            self.rounds.at = Some(now + PUT_OFF);
            return;
        }
        self.rounds.put_off = 0;
        self.counters.rounds += 1;
        if has_digest {
            let failed = core::mem::take(&mut self.rounds.last_failed);
            self.rounds.failed = if failed { self.rounds.failed.saturating_add(1) } else { 0 };
            self.outbox.controls[Control::Digest as usize] = ControlStage::Wanted;
            // An answer that was lost although its question was acknowledged is asked for again.
            let asks = |slot: &Slot| slot.operation.as_ref().is_some_and(|asked| asked.what.hub_asked);
            for id in self.ids_where(asks) {
                self.want(id, Want::Verify);
            }
        } else {
            self.compare_everything();
            // A Go principal mends repositories and projects only when a stream begins.
            self.rounds.reopen = is_go && self.config.role == Role::Agent;
        }
        self.rounds.at = self.next_round(now);
    }

    /// Whether the shell should open the stream anew; once for each time.
    pub fn poll_reopen(&mut self) -> bool {
        // What was asked for is sent first.
        self.rounds.reopen && self.is_settled() && core::mem::take(&mut self.rounds.reopen)
    }

    /// The principal found a difference.
    pub(super) fn round_failed(&mut self) {
        if self.peer.as_ref().is_some_and(|peer| peer.has_digest) {
            self.rounds.last_failed = true;
            // What is here and not on our list is found by the comparisons, what is there and not here by this.
            self.outbox.controls[Control::List as usize] = ControlStage::Wanted;
        }
    }

    /// Everything that this side has of the peer, in one number.
    pub(super) fn digest(&self) -> ResyncDigest {
        let mut digest = ResyncDigest::default();
        for (key, slot) in self.iter() {
            let Some(present) = slot.observed.known() else { continue };
            let (uid, said) = match self.config.role {
                Role::Principal if !present.routed => continue,
                Role::Principal => (&*present.uid, present.said),
                Role::Agent => {
                    let Some(source_uid) = slot.known_source().filter(|_| !present.ignored) else { continue };
                    // An API server may prune what the hub said: then what it said counts.
                    let asked = slot.reference.as_ref().filter(|reference| {
                        reference.uid == present.uid
                            && reference.print == present.spec
                            && reference.asked != 0
                    });
                    (source_uid, asked.map_or(present.said, |reference| reference.asked))
                }
            };
            let told = if key.kind == Kind::Application { present.told } else { 0 };
            let flag = |is: bool, word: &'static str| if is { word } else { "" };
            let text = alloc::format!(
                "{}/{}/{uid}/{said:x}/{told:x}{}{}{}",
                key.kind.as_str(),
                key.name,
                flag(present.operation != 0, "/operation"),
                flag(present.refresh != 0, "/refresh"),
                flag(present.deleting, "/ends"),
            );
            digest.add(fingerprint(text.as_bytes()));
        }
        digest
    }

    /// The agent's digest: what differs is asked for, unless it may only be on its way.
    pub(super) fn compare_digest(&mut self, theirs: ResyncDigest) {
        if self.digest() == theirs {
            self.counters.rounds_equal += 1;
        } else if self.is_settled() || self.rounds.put_off >= PUT_OFF_MAX {
            self.rounds.put_off = 0;
            self.counters.resyncs += 1;
            self.outbox.controls[Control::Resync as usize] = ControlStage::Wanted;
        } else {
            self.rounds.put_off += 1;
        }
    }
}

/// How often a peer is compared that knows no digest: everything goes over the line.
const DAY: Duration = Duration::from_secs(24 * 3600);
/// A round that meets something on its way waits this long, and at most so often.
const PUT_OFF: Duration = Duration::from_secs(60);
const PUT_OFF_MAX: u32 = 5;
