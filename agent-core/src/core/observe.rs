//! What the API server says: list items, watch events, answers. Everything here ends in a changed `observed` and a call of `next`.

use alloc::boxed::Box;
use alloc::string::String;
use alloc::vec::Vec;
use core::time::Duration;

use super::outbox::{Stage, Want};
use super::slot::{Applies, Observed, Place, Present, Purpose, SlotId, newer};
use super::{Core, Note, Role, take_asked};
use crate::checksum::value_fingerprint;
use crate::content;
use crate::object::ObjectView;
use crate::rand::Rng;
use crate::request::{Key, Kind, Observation, Outcome, Status, Ticket};
use crate::time::Instant;

impl Core {
    /// The API server said so: a list item, a watch event.
    pub fn observe(&mut self, now: Instant, key: &Key, observation: Observation<'_>) {
        match observation {
            Observation::Present(bytes) => match ObjectView::parse(bytes) {
                Ok(view) => self.observe_present(now, key, &view, bytes),
                Err(error) => {
                    self.note(Note::BadObject { key: key.clone(), reason: alloc::format!("{error}") })
                }
            },
            Observation::Gone(bytes) => self.observe_gone(now, key, bytes),
        }
    }

    fn observe_present(&mut self, now: Instant, key: &Key, view: &ObjectView<'_>, bytes: &[u8]) {
        let id = self.slot_id(key);
        let slot = self.slot(id);
        slot.unlisted = false;
        if slot.gone_uid.as_deref() == Some(&*view.uid) {
            return;
        }
        let present = self.present(key, view);
        let slot = self.slot(id);
        if let Some(purpose) = slot.outstanding {
            slot.watch_spoke = true;
            if purpose != Purpose::Read {
                // The reply tells whether this is its echo or a change after it; until then nothing is decided on it.
                slot.spoke_version = Some(present.resource_version.clone());
                match self.config.role {
                    Role::Agent => self.site_saw_mark(id, &present, view),
                    Role::Principal => self.hub_saw_removal(id, &present),
                }
                return;
            }
        }
        let known = slot.observed.known().map(|known| &known.resource_version);
        if slot.before_list && known.is_some_and(|known| newer(known, &present.resource_version)) {
            // The list was made before what is known, or on a server that was restored from a backup: a read tells.
            slot.must_read = true;
            self.queue(id);
            return;
        }
        if self.absorb(now, id, present, view, false) {
            self.act(now, id, Some((view, bytes)));
        }
        self.reap(id);
    }

    fn observe_gone(&mut self, now: Instant, key: &Key, bytes: &[u8]) {
        let Some(&id) = self.index.get(key) else { return };
        let view = ObjectView::parse(bytes).ok();
        let slot = self.slot(id);
        slot.unlisted = false;
        if let Some(view) = &view
            && slot.gone_uid.as_deref() == Some(&*view.uid)
        {
            slot.gone_uid = None;
            self.reap(id);
            return;
        }
        if let Some(current) = slot.observed.present() {
            let stale = view.as_ref().is_some_and(|view| {
                *view.uid != *current.uid && !newer(&view.resource_version, &current.resource_version)
            });
            if stale {
                return;
            }
        }
        slot.watch_spoke = true;
        slot.spoke_version = None;
        if slot.outstanding.is_some_and(|purpose| purpose != Purpose::Read) {
            // A write is on its way: its answer is read against an unknown state, and a 404 or a reply settles it.
            slot.gone_during_write = true;
        }
        let version = view.as_ref().map(|view| Box::from(&*view.resource_version));
        self.absent(now, id, view.as_ref().map(|view| (view, bytes)), version);
        self.act(now, id, view.as_ref().map(|view| (view, bytes)));
        self.reap(id);
    }

    /// A list or relist began: objects that it does not bring are confirmed by a read, never taken for deleted.
    pub fn list_started(&mut self, kind: Kind) {
        self.listing.set(kind, true);
        for slot in self.slots.iter_mut().flatten().filter(|slot| slot.key.kind == kind) {
            slot.unlisted = matches!(slot.observed, Observed::Present(_));
            slot.gone_before_list = slot.gone_uid.is_some();
            slot.overtaken = slot.outstanding.is_some();
            slot.before_list = true;
        }
    }

    /// The list is complete.
    pub fn synced(&mut self, now: Instant, kind: Kind) {
        self.listing.set(kind, false);
        for id in self.ids_where(|slot| slot.key.kind == kind && slot.gone_before_list) {
            let slot = self.slot(id);
            slot.gone_before_list = false;
            slot.gone_uid = None;
            self.reap(id);
        }
        let missing: Vec<SlotId> = self.ids_where(|slot| slot.key.kind == kind && slot.unlisted);
        for id in missing {
            self.queue(id);
        }
        if !self.synced.has(kind) {
            self.synced.set(kind, true);
            if !self.is_synced() {
                return;
            }
            self.sweep_at = Some(now + self.config.status_interval / 4);
            if self.peer.is_some() {
                self.start_resync();
            }
        }
    }

    /// A Kubernetes request ended. An answer with a stale ticket is dropped and counted.
    pub fn complete(&mut self, now: Instant, ticket: Ticket, outcome: Outcome) {
        let id = ticket.slot;
        let slot = self.slots.get_mut(id as usize).and_then(Option::as_mut);
        let Some(slot) = slot.filter(|slot| slot.generation == ticket.generation) else {
            self.counters.stale_answers += 1;
            return;
        };
        let Some(purpose) = slot.outstanding.take() else {
            self.counters.stale_answers += 1;
            return;
        };
        self.outstanding -= 1;
        match outcome {
            Outcome::Done(bytes) => self.succeeded(now, id, purpose, &bytes),
            Outcome::Status(status) => self.failed(now, id, purpose, status),
            Outcome::Unknown(reason) => {
                if purpose != Purpose::Read {
                    self.slot(id).doubt();
                }
                self.trouble(now, id, reason, None);
            }
        }
        self.reap(id);
    }

    fn succeeded(&mut self, now: Instant, id: SlotId, purpose: Purpose, bytes: &[u8]) {
        let slot = self.slot(id);
        if purpose != Purpose::Read {
            slot.failures = 0;
        }
        if purpose == Purpose::Namespace {
            slot.place = Place::Made;
            self.act(now, id, None);
            return;
        }
        slot.unlisted = false;
        let spoke = slot.spoke_version.take();
        let overtaken = core::mem::take(&mut slot.overtaken);
        let gone = core::mem::take(&mut slot.gone_during_write);
        let view = match ObjectView::parse(bytes) {
            // A DELETE may be answered by a Status instead of the object.
            Ok(view) if !view.uid.is_empty() => view,
            Ok(_) | Err(_) if purpose == Purpose::Delete => {
                self.delete_stands(id);
                self.deleted_now(now, id);
                return;
            }
            Ok(_) | Err(_) => {
                let key = slot.key.clone();
                slot.doubt();
                self.note(Note::BadObject {
                    key,
                    reason: "the API server's answer is not the object".into(),
                });
                self.trouble(now, id, "unreadable answer".into(), None);
                return;
            }
        };
        let key = slot.key.clone();
        let present = self.present(&key, &view);
        let slot = self.slot(id);
        let version = present.resource_version.clone();
        match purpose {
            Purpose::Read => {
                let reading = matches!(slot.out.stage, Stage::Reading);
                if reading {
                    slot.out.stage = Stage::Idle;
                    self.outbox.places -= 1;
                }
                let slot = self.slot(id);
                if overtaken || (slot.watch_spoke && matches!(slot.observed, Observed::Absent)) {
                    // It ended, or may have ended, while the answer was on its way: this may be from before.
                    slot.must_read = true;
                    self.queue(id);
                    self.act(now, id, None);
                    return;
                }
                if !self.absorb(now, id, present, &view, false) {
                    // The watch has overtaken this answer: its body is not what is known.
                    let slot = self.slot(id);
                    slot.failures = slot.failures.saturating_add(1);
                    if slot.failures > CONFLICTS_BEFORE_BACKOFF {
                        self.trouble(now, id, "the API server answers with older states".into(), None);
                        return;
                    }
                    self.queue(id);
                    self.act(now, id, None);
                    return;
                }
                let slot = self.slot(id);
                if slot.word.is_none() && slot.operation.is_none() && slot.terminate.is_none() {
                    slot.failures = 0;
                }
                if reading {
                    // It was read for the peer and had its turn: queueing again would read again.
                    self.act_for_peer(now, id, (&view, bytes));
                } else {
                    self.act(now, id, Some((&view, bytes)));
                }
                return;
            }
            Purpose::Delete => {
                self.delete_stands(id);
                // Deletion is under way (finalizers), or this was its last state.
                if gone {
                    return self.act(now, id, None);
                }
                if view.deletion_timestamp.is_some() && view.finalizers.is_some_and(|list| list != b"[]") {
                    self.absorb(now, id, present, &view, true);
                    self.act(now, id, Some((&view, bytes)));
                } else {
                    self.deleted_now(now, id);
                }
                return;
            }
            Purpose::Create | Purpose::Write(_) | Purpose::Namespace => {}
        }
        if gone {
            // It was written and then deleted; the absence is known already, but not whether it has come back since.
            let slot = self.slot(id);
            slot.doubt();
            slot.must_read = true;
            self.queue(id);
            return;
        }
        self.absorb(now, id, present, &view, true);
        self.written(now, id, purpose, &view);
        if overtaken || spoke.is_some_and(|spoke| newer(&spoke, &version)) {
            // Somebody changed it after us, or may have: the event's body is gone, so read.
            self.slot(id).must_read = true;
            self.queue(id);
        }
        self.act(now, id, Some((&view, bytes)));
    }

    /// What a rule needs to know of an object of this side.
    fn present(&self, key: &Key, view: &ObjectView<'_>) -> Present {
        let present = Present::new(key.kind, view);
        match self.config.role {
            Role::Agent => {
                let said = content::part(key.kind, view).map_or(0, value_fingerprint);
                Present { said, ..present }
            }
            Role::Principal if self.is_routed(key, view) => {
                Present { said: self.said_print(key.kind, view), ..present }
            }
            Role::Principal => Present { routed: false, ..present },
        }
    }

    /// A write stands: the word it carried out is acknowledged.
    fn written(&mut self, now: Instant, id: SlotId, purpose: Purpose, view: &ObjectView<'_>) {
        match self.config.role {
            Role::Agent => self.site_written(now, id, purpose, view),
            Role::Principal => self.hub_written(id, purpose),
        }
    }

    fn deleted_now(&mut self, now: Instant, id: SlotId) {
        self.absent(now, id, None, None);
        self.act(now, id, None);
    }

    fn failed(&mut self, now: Instant, id: SlotId, purpose: Purpose, status: Status) {
        let slot = self.slot(id);
        slot.gone_during_write = false;
        slot.spoke_version = None;
        if (400..500).contains(&status.code) && status.code != 408 {
            self.forget_maybe(id);
        }
        match (purpose, status.code) {
            (Purpose::Read, 404) => {
                let slot = self.slot(id);
                slot.unlisted = false;
                slot.must_read = false;
                if matches!(slot.out.stage, Stage::Reading) {
                    slot.out.stage = Stage::Idle;
                    self.outbox.places -= 1;
                }
                // The watch may have brought a creation that this answer does not know yet.
                let slot = self.slot(id);
                if slot.watch_spoke && matches!(slot.observed, Observed::Present(_)) {
                    slot.must_read = true;
                } else {
                    self.absent(now, id, None, None);
                }
                self.act(now, id, None);
            }
            (Purpose::Namespace, 409) => {
                // Somebody was faster.
                self.slot(id).place = Place::Made;
                self.act(now, id, None);
            }
            (Purpose::Create, 404) if self.may_create_namespace(id) => {
                self.slot(id).place = Place::Missing;
                self.act(now, id, None);
            }
            (Purpose::Create, 409) | (Purpose::Write(_) | Purpose::Delete, 404 | 409) => {
                // Somebody was faster. Read and decide again; a hot loop is cut by the back-off.
                self.counters.conflicts += 1;
                let slot = self.slot(id);
                slot.doubt();
                slot.failures += 1;
                if slot.failures > CONFLICTS_BEFORE_BACKOFF {
                    self.trouble(now, id, "changed by others at every attempt".into(), None);
                } else {
                    self.queue(id);
                }
            }
            (
                Purpose::Create | Purpose::Write(_) | Purpose::Delete | Purpose::Namespace,
                400..=428 | 430..=499,
            ) if status.code != 401 && status.code != 408 && !is_quota(&status) => {
                self.refused(now, id, purpose, status);
            }
            _ => {
                if purpose != Purpose::Read {
                    self.slot(id).doubt();
                }
                let reason =
                    alloc::format!("API server: {} {} {}", status.code, status.reason, status.message);
                self.trouble(now, id, reason, status.retry_after);
            }
        }
    }

    /// The API server will not have it: acknowledge, say so, and try again rarely.
    fn refused(&mut self, now: Instant, id: SlotId, purpose: Purpose, status: Status) {
        self.counters.refused += 1;
        let failures = self.slot(id).failures;
        let delay = retry_delay(&mut self.rng, failures, REFUSED_RETRY_MIN, REFUSED_RETRY_MAX);
        let slot = self.slot(id);
        slot.place = Place::Unknown;
        slot.failures = slot.failures.saturating_add(1);
        slot.doubt();
        let key = slot.key.clone();
        let reason: Box<str> = if status.message.is_empty() {
            alloc::format!("{} {}", status.code, status.reason).into()
        } else {
            status.message.as_str().into()
        };
        let applying = slot.applying;
        let ack = match purpose {
            Purpose::Write(Applies::Operation) => take_asked(&mut slot.operation),
            Purpose::Write(Applies::Terminate) => take_asked(&mut slot.terminate),
            Purpose::Write(Applies::Revert) | Purpose::Read => None,
            Purpose::Create | Purpose::Write(Applies::Word) | Purpose::Delete | Purpose::Namespace => {
                slot.word.as_mut().filter(|word| word.serial == applying).and_then(|word| {
                    word.refused = true;
                    word.ack.take()
                })
            }
        };
        self.give(id, ack);
        if self.config.role == Role::Agent && purpose != Purpose::Write(Applies::Revert) {
            self.slot(id).out.error = Some(reason);
            self.want(id, Want::Error);
        }
        self.retry(now, id, delay);
        self.note(Note::Refused { key, status, retry: delay });
        self.offer(now, id, None);
    }

    fn trouble(&mut self, now: Instant, id: SlotId, reason: String, retry_after: Option<Duration>) {
        self.counters.trouble += 1;
        let failures = self.slot(id).failures;
        let mut delay = retry_delay(&mut self.rng, failures, TROUBLE_RETRY_MIN, TROUBLE_RETRY_MAX);
        if let Some(after) = retry_after {
            delay = delay.max(after.min(TROUBLE_RETRY_MAX));
        }
        let slot = self.slot(id);
        slot.failures = slot.failures.saturating_add(1);
        let key = slot.key.clone();
        let resting = matches!(slot.out.stage, Stage::Reading);
        if resting {
            slot.out.stage = Stage::Resting(now + delay);
            self.outbox.places -= 1;
        }
        self.retry(now, id, delay);
        self.note(Note::Trouble { key, reason, retry: delay });
    }

    fn retry(&mut self, now: Instant, id: SlotId, delay: Duration) {
        let at = now + delay;
        self.slot(id).retry_at = Some(at);
        self.timers.insert((at, id));
    }

    /// Takes in a state of the object; `false` if it is older than what is known.
    fn absorb(
        &mut self,
        now: Instant,
        id: SlotId,
        present: Present,
        view: &ObjectView<'_>,
        own_write: bool,
    ) -> bool {
        let slot = self.slot(id);
        let counts_anew = core::mem::take(&mut slot.before_list);
        if let Some(current) = slot.observed.present()
            && !present.is_newer_than(current)
        {
            let is_same = present.resource_version == current.resource_version;
            if is_same && present.routed == current.routed {
                slot.must_read = false;
                return true;
            }
            if !is_same && !counts_anew {
                return false;
            }
        }
        if let Observed::Unknown(Some(last)) = &slot.observed
            && newer(&last.resource_version, &present.resource_version)
            && !counts_anew
        {
            return false;
        }
        slot.must_read = false;
        let before = core::mem::replace(&mut slot.observed, Observed::Present(Box::new(present))).last();
        match self.config.role {
            Role::Agent => self.site_changed(now, id, before, view, own_write),
            Role::Principal => {
                let had = before.is_some_and(|before| before.routed);
                self.hub_changed(id, view, own_write);
                self.hub_project_changed(id, had);
            }
        }
        true
    }

    /// The object does not exist (any more).
    fn absent(
        &mut self,
        now: Instant,
        id: SlotId,
        last: Option<(&ObjectView<'_>, &[u8])>,
        version: Option<Box<str>>,
    ) {
        let before = core::mem::replace(&mut self.slot(id).observed, Observed::Absent).last();
        let slot = self.slot(id);
        slot.must_read = false;
        if version.is_none()
            && let Some(before) = &before
        {
            slot.gone_uid = Some(before.uid.clone());
            slot.gone_before_list = false;
        }
        match self.config.role {
            Role::Agent => self.site_gone(now, id, before, last, version),
            Role::Principal => {
                let had = before.as_ref().is_some_and(|before| before.routed);
                self.hub_gone(id, before, last, version);
                self.hub_project_changed(id, had);
            }
        }
    }
}

/// The resource-quota answers that time may mend.
fn is_quota(status: &Status) -> bool {
    status.code == 403 && status.message.contains("exceeded quota")
}

fn retry_delay(rng: &mut Rng, failures: u32, min: Duration, max: Duration) -> Duration {
    let ceiling = min.saturating_mul(1 << failures.min(16)).min(max);
    rng.between(ceiling / 2, ceiling)
}

/// Lost races in a row before the back-off starts; each costs one read.
const CONFLICTS_BEFORE_BACKOFF: u32 = 4;
/// Our own API server is in trouble: first and longest wait.
const TROUBLE_RETRY_MIN: Duration = Duration::from_secs(1);
const TROUBLE_RETRY_MAX: Duration = Duration::from_secs(300);
/// It refuses the object: a schema or a permission changes rarely.
const REFUSED_RETRY_MIN: Duration = Duration::from_secs(30);
const REFUSED_RETRY_MAX: Duration = Duration::from_secs(600);
