//! The principal's role for one managed agent: the hub's objects are told, the site's status is taken in.

use alloc::borrow::Cow;
use alloc::boxed::Box;

use super::outbox::{Gone, OperationLatch, Stage, Want};
use super::site::said_print;
use super::slot::{
    Applies, Asked, Compare, Observed, Phase, Present, Purpose, Seen, Slot, SlotId, StatusWord, Word,
};
use super::{Config, Core, Note, Step, take_asked};
use crate::checksum::{fingerprint, spec_checksum, value_fingerprint};
use crate::content;
use crate::object::ObjectView;
use crate::peer::Mapping;
use crate::project::{self, SiteView};
use crate::request::{Key, Kind, Verb};
use crate::time::Instant;
use crate::transform::{HubCopy, Malformed, Patch, TERMINATING, error_status, status_patch};

/// The parts of a status update that reach the hub's object.
pub(super) struct StatusParts<'a> {
    pub(super) status: Option<&'a [u8]>,
    pub(super) operation: Option<&'a [u8]>,
    pub(super) refresh: Option<&'a str>,
    pub(super) source_uid: Box<str>,
}

impl StatusParts<'_> {
    pub(super) fn into_word(self) -> Word {
        Word::Status(Box::new(StatusWord {
            status: self.status.map(<[u8]>::to_vec),
            operation: self.operation.map(<[u8]>::to_vec),
            refresh: self.refresh.map(Into::into),
            source_uid: self.source_uid,
        }))
    }
}

impl Core {
    /// Whether an object of the hub is for this agent (docs/core.md, "Routing").
    pub(super) fn is_routed(&self, key: &Key, view: &ObjectView<'_>) -> bool {
        let config = &self.config;
        if key.kind == Kind::Application {
            return config.mapping == Mapping::Namespace
                || (view.destination_name().as_deref() == Some(&*config.agent)
                    && self.admits_namespace(&key.namespace));
        }
        if view.deletion_timestamp.is_some() || content::objection(key.kind, view).is_some() {
            return false;
        }
        match key.kind {
            Kind::Application | Kind::GpgKey => true,
            // One with a source is itself the copy of an agent's.
            Kind::AppProject => view.source_uid().is_none() && self.project_is_routed(view),
            Kind::Repository => content::project_of_repository(view)
                .and_then(|project| self.index.get(&Key::new(Kind::AppProject, &key.namespace, &project)))
                .and_then(|id| self.slots[*id as usize].as_ref())
                .is_some_and(Slot::is_wanted),
        }
    }

    /// Canonical fingerprint of what this agent is told an object to be, as it stands on its site; 0: nothing.
    pub(super) fn said_print(&self, kind: Kind, view: &ObjectView<'_>) -> u64 {
        if kind != Kind::AppProject {
            return said_print(kind, view);
        }
        let spec = view.spec.unwrap_or(b"{}");
        let site = SiteView { mapping: self.config.mapping, managed: true };
        project::site_spec(spec, &self.config.agent, site).map_or(0, |spec| value_fingerprint(&spec))
    }

    fn project_is_routed(&self, view: &ObjectView<'_>) -> bool {
        let config = &self.config;
        let spec = view.spec.unwrap_or(b"{}");
        // What cannot be read goes to nobody; the hub's router tells it.
        project::goes_to(spec, &config.agent, config.mapping, &config.regex).unwrap_or(false)
    }

    /// What decides about an object has changed beside it: a repository's project.
    pub fn recheck(&mut self, now: Instant, key: &Key) {
        let id = self.slot_id(key);
        self.slot(id).must_read = true;
        self.act(now, id, None);
    }

    /// Repositories follow their project. Those that this agent has are looked at here; the router names those that it gets.
    pub(super) fn hub_project_changed(&mut self, id: SlotId, had: bool) {
        let slot = self.slot(id);
        if slot.key.kind != Kind::AppProject || slot.is_wanted() == had {
            return;
        }
        for id in self.ids_where(|slot| slot.key.kind == Kind::Repository) {
            self.slot(id).must_read = true;
            self.queue(id);
        }
    }

    /// It exists, and is another agent's or nobody's.
    fn hub_lost(&mut self, id: SlotId, present: &Present) {
        self.unwant(id, &[Want::Exists, Want::Operation, Want::Terminate, Want::Report]);
        let slot = self.slot(id);
        slot.seen = Seen::default();
        slot.out.operation = None;
        slot.out.refresh = false;
        slot.out.unconfirmed = false;
        if let Some(compare) = slot.compare.take()
            && !compare.uid.is_empty()
        {
            slot.out.peer_knows(compare.uid);
        }
        if matches!(&slot.out.stage, Stage::Sent(flight) if flight.want == Want::Gone) {
            return;
        }
        self.tell_gone(id, &present.resource_version, None);
    }

    pub(super) fn hub_changed(&mut self, id: SlotId, view: &ObjectView<'_>, own_write: bool) {
        let first_list = !self.synced.has(self.slot(id).key.kind);
        let slot = self.slot(id);
        let Some(present) = slot.observed.present().cloned() else { return };
        if !present.routed {
            return self.hub_lost(id, &present);
        }
        if slot.out.wants.has(Want::Gone)
            && slot.out.gone.as_ref().is_some_and(|gone| gone.uid == present.uid && !gone.synthetic)
        {
            // It is this agent's again, which may have dropped it meanwhile.
            slot.out.wants.remove(Want::Gone);
            slot.out.gone = None;
            slot.out.acked = 0;
        }
        if slot.out.wants.has(Want::Gone) && slot.out.gone.as_ref().is_none_or(|gone| gone.uid != present.uid)
        {
            // It exists again: what exists now is the latest word about the name.
            slot.out.wants.remove(Want::Gone);
            slot.out.gone = None;
        }
        if first_list && slot.out.known_as.is_empty() {
            // A principal before us may have told it.
            slot.out.known_as.push(present.uid.clone());
        }
        let seen = core::mem::take(&mut slot.seen);
        let seen = if seen.uid == present.uid { seen } else { Seen::default() };
        slot.seen = Seen {
            uid: present.uid.clone(),
            operation: present.operation,
            refresh: present.refresh,
            terminating: present.phase == Phase::Terminating,
            ..Seen::default()
        };
        if !own_write {
            let is_new = |now: u64, seen: u64, maybe: u64| now != 0 && now != seen && now != maybe;
            if is_new(present.operation, seen.operation, seen.maybe_operation)
                && let Some(operation) = view.operation
            {
                slot.out.operation = Some(Box::new(OperationLatch {
                    operation: operation.into(),
                    resource_version: present.resource_version.clone(),
                    over: false,
                }));
                self.want(id, Want::Operation);
            }
            // After a lost answer nobody knows whether this is the one we may have taken away: a refresh too many does no harm.
            let again = seen.maybe_refresh_removed && present.refresh != 0;
            if again || is_new(present.refresh, seen.refresh, seen.maybe_refresh) {
                self.slot(id).out.ask_refresh();
                self.want(id, Want::Exists);
            }
            if present.phase == Phase::Terminating && !seen.terminating && !seen.maybe_terminating {
                self.want(id, Want::Terminate);
            }
        }
        self.level_check(id);
    }

    /// An event that arrives while a write of ours is on its way: what it shows to be taken away is new when it appears again.
    pub(super) fn hub_saw_removal(&mut self, id: SlotId, passing: &Present) {
        let slot = self.slot(id);
        let is_later = slot.observed.present().is_some_and(|present| passing.is_newer_than(present));
        if !is_later || slot.seen.uid != passing.uid {
            return;
        }
        if passing.operation == 0 {
            slot.seen.operation = 0;
        }
        if passing.refresh == 0 {
            slot.seen.refresh = 0;
        }
        slot.seen.terminating &= passing.phase == Phase::Terminating;
    }

    pub(super) fn hub_gone(
        &mut self,
        id: SlotId,
        before: Option<Present>,
        last: Option<(&ObjectView<'_>, &[u8])>,
        version: Option<Box<str>>,
    ) {
        self.unwant(id, &[Want::Exists, Want::Operation, Want::Terminate, Want::Report]);
        let slot = self.slot(id);
        slot.seen = Seen::default();
        slot.out.operation = None;
        slot.out.refresh = false;
        slot.out.unconfirmed = false;
        let ended = |source_uid: &str| before.as_ref().is_some_and(|before| *before.uid == *source_uid);
        if matches!(&slot.word, Some(Asked { what: Word::Status(word), .. }) if ended(&word.source_uid)) {
            // Its end is told; what its copy said last matters to nobody.
            let ack = take_asked(&mut slot.word);
            self.give(id, ack);
        }
        let slot = self.slot(id);
        if let Some(compare) = slot.compare.take() {
            if slot.out.known_as.is_empty() {
                // The site has, or asks for, something that does not exist here.
                slot.out.gone = Some(Box::new(Gone {
                    uid: compare.uid,
                    resource_version: Box::default(),
                    source_uid: None,
                    synthetic: true,
                }));
                self.want(id, Want::Gone);
                return;
            }
            if !compare.uid.is_empty() {
                slot.out.peer_knows(compare.uid);
            }
        }
        let slot = self.slot(id);
        let version = version
            .or_else(|| before.map(|before| before.resource_version))
            .or_else(|| last.map(|(view, _)| Box::from(&*view.resource_version)))
            .unwrap_or_default();
        if matches!(&slot.out.stage, Stage::Sent(flight) if flight.want == Want::Gone) {
            return;
        }
        if slot.out.gone.as_ref().is_none_or(|gone| !gone.synthetic) {
            self.tell_gone(id, &version, None);
        }
    }

    /// A Go agent that has no copy of an object that is being deleted makes one, and ends it only when it is told once more.
    pub(super) fn tell_end_again(&mut self, key: &Key, source_uid: &str) {
        let Some(&id) = self.index.get(key) else { return };
        let slot = self.slot(id);
        let ends =
            slot.observed.present().is_some_and(|present| present.deleting && *present.uid == *source_uid);
        if ends && slot.out.in_hand().is_none_or(|flight| flight.want != Want::Exists) {
            slot.out.acked = 0;
            self.want(id, Want::Exists);
        }
    }

    /// A status write was refused: it put nothing on the object.
    pub(super) fn forget_maybe(&mut self, id: SlotId) {
        let seen = &mut self.slot(id).seen;
        seen.maybe_operation = 0;
        seen.maybe_refresh = 0;
        seen.maybe_refresh_removed = false;
        seen.maybe_terminating = false;
    }

    /// The agent says what it has; the next read tells whether it is what we have.
    pub(super) fn update_requested(&mut self, now: Instant, key: &Key, uid: &str, checksum: Option<&[u8]>) {
        let id = self.slot_id(key);
        let slot = self.slot(id);
        // Who asked for the whole gets the whole, also where a narrower question overtakes the answer.
        let is_blind = slot.compare.as_ref().is_some_and(|compare| compare.checksum.is_none());
        let checksum = checksum.filter(|_| !is_blind).map(<[u8]>::to_vec);
        slot.out.on_site |= !uid.is_empty();
        slot.compare = Some(Box::new(Compare { uid: uid.into(), checksum }));
        slot.must_read = true;
        self.act(now, id, None);
    }

    /// Settles a comparison with the object at hand.
    pub(super) fn compare(&mut self, id: SlotId, bytes: &[u8]) {
        let slot = self.slot(id);
        let Some(present) = slot.observed.present() else { return };
        if !present.routed {
            let present = present.clone();
            return self.hub_lost(id, &present);
        }
        let Some(compare) = slot.compare.take() else { return };
        let Some(present) = slot.observed.present() else { return };
        // A checksum knows nothing of labels and annotations, nor of deletion: what was refused, or is to go, is told again.
        let kind = slot.key.kind;
        let same_uid = compare.uid == present.uid;
        let equal = !slot.out.refused
            && !present.deleting
            && same_uid
            && as_site_gets_it(&self.config, kind, bytes)
                .ok()
                .and_then(|said| spec_checksum(kind, &said).ok())
                .is_some_and(|own| compare.checksum.as_deref() == Some(&own[..]));
        let slot = self.slot(id);
        let Some(present) = slot.observed.present() else { return };
        if same_uid {
            slot.out.confirmed = true;
            slot.out.unconfirmed = false;
        }
        if same_uid && !slot.out.known_as.contains(&compare.uid) {
            // A principal before us told it.
            slot.out.known_as.push(compare.uid.clone());
        }
        if compare.uid != present.uid {
            // What was acknowledged was refused there, or went to a former copy: what was asked for still stands.
            if present.refresh != 0 {
                slot.out.ask_refresh();
            }
            if !compare.uid.is_empty() {
                // Should ours end before the agent hears of it, the former one must still go there.
                slot.out.peer_knows(compare.uid);
            }
        }
        if !equal {
            // Also where the same is in flight: it may have been dealt with before the question was asked.
            slot.out.acked = 0;
            self.want(id, Want::Exists);
        }
    }

    pub(super) fn next_on_hub(&mut self, _now: Instant, id: SlotId) -> Step {
        let agent = self.config.agent.clone();
        let slot = self.slot(id);
        let Some(Asked { what, serial, .. }) = &slot.word else { return self.next_for_stale_operation(id) };
        let serial = *serial;
        let present = match &slot.observed {
            Observed::Unknown(_) => return Step::Read,
            Observed::Absent => {
                return match what {
                    Word::SiteGone { .. } => self.hub_done(id, None),
                    Word::Status(word) if !word.source_uid.is_empty() => {
                        // The site has a copy of what is not here. If a read confirms it, the site is told, as if it had asked.
                        let uid = word.source_uid.clone();
                        slot.compare = Some(Box::new(Compare { uid, checksum: None }));
                        slot.must_read = true;
                        self.hub_done(id, Some("there is no such Application on the hub"));
                        Step::Read
                    }
                    _ => self.hub_done(id, Some("there is no such Application on the hub")),
                };
            }
            Observed::Present(present) => present,
        };
        let keep_operation = slot.out.operation.is_some();
        let keep_refresh = slot.out.refresh;
        let hub = HubCopy {
            resource_version: &present.resource_version,
            has_status: present.has_status,
            has_operation: present.operation != 0,
            has_annotations: present.has_annotations,
            has_refresh: present.refresh != 0,
        };
        let patch = match what {
            Word::Status(word) => {
                if !word.source_uid.is_empty() && word.source_uid != present.uid {
                    let former = word.source_uid.clone();
                    slot.out.peer_knows(former);
                    return self.hub_done(id, Some("the status is of a former Application of that name"));
                }
                let print = |bytes: Option<&[u8]>| bytes.map_or(0, fingerprint);
                let refresh = print(word.refresh.as_deref().map(str::as_bytes));
                let same = print(word.status.as_deref()) == present.status
                    && (keep_operation || print(word.operation.as_deref()) == present.operation)
                    && (keep_refresh || (refresh != 0) == (present.refresh != 0));
                if word.source_uid == present.uid {
                    slot.out.confirmed = true;
                    slot.out.unconfirmed = false;
                }
                if word.operation.is_none()
                    && let Some(latch) = &mut slot.out.operation
                {
                    latch.over = true;
                }
                if same {
                    return self.hub_done(id, None);
                }
                // An echo may arrive instead of the answer.
                if !keep_operation {
                    slot.seen.maybe_operation = print(word.operation.as_deref());
                }
                if !keep_refresh {
                    slot.seen.maybe_refresh = refresh;
                    slot.seen.maybe_refresh_removed = refresh == 0 && present.refresh != 0;
                }
                slot.seen.maybe_terminating = word.status.as_deref().is_some_and(|status| {
                    let phase = crate::json::at_path(status, &["operationState", "phase"]).ok().flatten();
                    phase.and_then(crate::json::string).as_deref() == Some(TERMINATING)
                });
                status_patch(
                    hub,
                    word.status.as_deref(),
                    word.operation.as_deref(),
                    word.refresh.as_deref(),
                    keep_operation,
                    keep_refresh,
                )
            }
            Word::Error { message } => {
                let status = error_status(&agent, message);
                // Nobody has looked at the object for it.
                status_patch(hub, Some(&status), None, None, keep_operation, true)
            }
            Word::SiteGone { source_uid } => {
                if !source_uid.is_empty() && *source_uid != present.uid {
                    return self.hub_done(id, Some("the deletion is of a former Application of that name"));
                }
                if !present.deleting {
                    // It ended on the site without our word: tell it again.
                    slot.out.acked = 0;
                    let step = self.hub_done(id, Some("deleted on the site, not on the hub"));
                    self.want(id, Want::Exists);
                    return step;
                }
                if !present.has_finalizers {
                    return self.hub_done(id, None);
                }
                let mut patch = Patch::new(&present.resource_version);
                patch.remove("/metadata/finalizers");
                patch.finish_always()
            }
            Word::Exists(_) | Word::Gone(_) => return self.hub_done(id, None),
        };
        self.slot(id).applying = serial;
        Step::Write(Purpose::Write(Applies::Word), Verb::JsonPatch(patch))
    }

    /// A Go agent tells that an operation is over before it acknowledges it, and then says nothing more.
    fn next_for_stale_operation(&mut self, id: SlotId) -> Step {
        let slot = self.slot(id);
        match &slot.observed {
            _ if slot.stale_operation == 0 => Step::Idle,
            Observed::Unknown(_) => Step::Read,
            Observed::Present(present) if present.operation == slot.stale_operation => {
                let mut patch = Patch::new(&present.resource_version);
                patch.remove("/operation");
                Step::Write(Purpose::Write(Applies::Operation), Verb::JsonPatch(patch.finish_always()))
            }
            Observed::Present(_) | Observed::Absent => {
                slot.stale_operation = 0;
                Step::Idle
            }
        }
    }

    fn hub_done(&mut self, id: SlotId, reason: Option<&'static str>) -> Step {
        let slot = self.slot(id);
        let key = slot.key.clone();
        slot.failures = 0;
        let ack = take_asked(&mut slot.word);
        self.give(id, ack);
        if let Some(reason) = reason {
            self.note(Note::NotApplied { key, reason });
        }
        Step::Idle
    }

    pub(super) fn hub_written(&mut self, id: SlotId, purpose: Purpose) {
        let slot = self.slot(id);
        if purpose == Purpose::Write(Applies::Operation) {
            slot.stale_operation = 0;
            return;
        }
        if slot.word.as_ref().is_some_and(|asked| asked.serial == slot.applying) {
            let ack = take_asked(&mut slot.word);
            self.give(id, ack);
        }
    }
}

/// The hub's object as this agent gets it, operation and stamps apart.
pub(super) fn as_site_gets_it<'o>(
    config: &Config,
    kind: Kind,
    object: &'o [u8],
) -> Result<Cow<'o, [u8]>, Malformed> {
    if kind != Kind::AppProject {
        return Ok(Cow::Borrowed(object));
    }
    let view = SiteView { mapping: config.mapping, managed: true };
    project::for_agent(object, &config.agent, view).map(Cow::Owned)
}
