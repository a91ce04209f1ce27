//! Signs of life, for what stands between the halves and ends connections that are quiet.

use alloc::vec::Vec;

use super::{Core, Role};
use crate::cloudevent::EventWriter;
use crate::event::{Target, Type};
use crate::time::Instant;

impl Core {
    pub(super) fn start_heartbeat(&mut self, now: Instant) {
        let interval = self.config.heartbeat_interval;
        let beats = self.config.role == Role::Agent && !interval.is_zero();
        self.heartbeat_at = beats.then(|| now + interval);
    }

    /// Nobody waits for the answer: a lost one is no reason to send it again.
    pub(super) fn heartbeat_timeout(&mut self, now: Instant) {
        if self.heartbeat_at.is_none_or(|at| at > now) {
            return;
        }
        let id = self.rng.uuid();
        let mut frame = Vec::with_capacity(256);
        EventWriter {
            source: self.source(),
            r#type: Type::Ping.as_str(),
            target: Target::Heartbeat,
            subject: None,
            event_id: &id,
            resource_id: &id,
            sent_at: None,
            principal_uid: None,
            data: b"",
        }
        .encode(&mut frame);
        self.outbox.push_ack(frame);
        self.start_heartbeat(now);
    }
}
