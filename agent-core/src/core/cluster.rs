//! Counts of the site's cluster cache, for Argo CD's UI on the hub: one value, the last one wins.

use alloc::boxed::Box;
use alloc::string::String;
use alloc::vec::Vec;

use super::outbox::{Control, ControlStage};
use super::{Core, Note, Role};
use crate::cloudevent::EventView;
use crate::cluster_info::Counts;
use crate::event::{Target, Type};
use crate::peer::Peer;
use crate::time::Instant;

/// What is known of the counts.
#[derive(Debug, Default)]
pub(super) struct Cluster {
    /// Agent: what the site's cache said last. Principal: what the agent said, until the shell takes it.
    latest: Option<Counts>,
    /// What the peer has for sure.
    told: Option<Counts>,
    /// What is in flight.
    sent: Counts,
    /// The process that was told; empty for a Go peer.
    told_to: Box<str>,
    /// Sends without an acknowledgement.
    attempts: u32,
}

impl Core {
    /// Agent: the cluster cache of the site says so. It is sent when it is not what the peer acknowledged last.
    pub fn cluster_info(&mut self, _now: Instant, counts: Counts) {
        self.cluster.latest = Some(counts);
        self.want_cluster_info();
    }

    /// Principal: the latest counts of the agent, once for each time that it sent some.
    pub fn poll_cluster_info(&mut self) -> Option<Counts> {
        match self.config.role {
            Role::Agent => None,
            Role::Principal => self.cluster.latest.take(),
        }
    }

    fn want_cluster_info(&mut self) {
        // One at a time: a newer value goes when the one in flight is acknowledged.
        let stage = &mut self.outbox.controls[Control::ClusterInfo as usize];
        if *stage == ControlStage::Idle
            && self.cluster.latest.is_some_and(|_| self.cluster.latest != self.cluster.told)
        {
            *stage = ControlStage::Wanted;
        }
    }

    /// A Go principal sets the counts to 0 at every Subscribe, and another process of ours may never have had them.
    pub(super) fn cluster_info_for(&mut self, peer: &Peer) {
        self.cluster.attempts = 0;
        if !peer.is_ours() || peer.instance != self.cluster.told_to {
            self.cluster.told = None;
            self.cluster.told_to = peer.instance.clone();
        }
        if self.config.role == Role::Agent {
            self.want_cluster_info();
        }
    }

    /// The event, if it is due.
    pub(super) fn cluster_info_frame(&mut self, now: Instant) -> Option<Vec<u8>> {
        let counts = self.cluster.latest?;
        if self.outbox.controls[Control::ClusterInfo as usize] != ControlStage::Wanted {
            return None;
        }
        self.cluster.sent = counts;
        // Until it is acknowledged, the peer may have this or the former value.
        self.cluster.told = None;
        let attempts = self.cluster.attempts;
        self.cluster.attempts = attempts.saturating_add(1);
        self.counters.sent += 1;
        let r#type = Type::ClusterCacheInfoUpdate;
        let target = Target::ClusterCacheInfoUpdate;
        Some(self.send_control(now, Control::ClusterInfo, target, r#type, &counts.encode(), attempts))
    }

    pub(super) fn cluster_info_acknowledged(&mut self) {
        self.cluster.told = Some(self.cluster.sent);
        self.cluster.attempts = 0;
        self.want_cluster_info();
    }

    /// Principal: takes the counts in. The type of the event says nothing, as in the reference.
    pub(super) fn cluster_info_event(&mut self, event: &EventView<'_>) -> Result<(), String> {
        if self.config.role == Role::Agent {
            self.note(Note::Unsupported { target: event.dataschema.into(), r#type: event.r#type.into() });
            return Ok(());
        }
        let payload = event.payload().map_err(|error| alloc::format!("{error}"))?;
        let counts = Counts::decode(payload).map_err(|error| alloc::format!("{error}"))?;
        self.cluster.latest = Some(counts);
        Ok(())
    }
}
