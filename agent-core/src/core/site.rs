//! The agent's role on a managed site: the hub's word is carried out, local drift is reverted, status is told.

use alloc::boxed::Box;
use alloc::vec::Vec;

use super::outbox::Want;
use super::slot::{
    Applies, Exists, GoneWord, Observed, OperationWord, Phase, Place, Present, Purpose, Reference, Slot,
    SlotId, Word,
};
use super::{AdoptionPolicy, Core, MismatchPolicy, Note, Step, take_asked};
use crate::checksum::{fingerprint, value_fingerprint};
use crate::content;
use crate::object::{self, ObjectView};
use crate::request::{Kind, Verb};
use crate::time::Instant;
use crate::transform::{
    CONFIRM_DELETE, Patch, Stamp, TERMINATING, create_body, recreate_body, remapped, site_spec, tombstone,
    update_patch,
};

/// How an incoming object and the local one of the same name belong together (docs/core.md, "Identity").
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Identity {
    /// The copy came from this very object.
    Same,
    /// Another principal, or one that says less: same object, new stamps, in place.
    Restamp,
    /// Local object without a source; a `create` may adopt it.
    Adoptable,
    /// Local object without a source; only a `create` may touch it.
    Foreign,
    /// The copy came from a former object of that name.
    Mismatch,
}

/// First match wins; the order is part of the contract.
pub(super) fn identity(
    is_create: bool,
    incoming: (&str, &str),
    local_source: Option<&str>,
    local_principal: Option<&str>,
) -> Identity {
    let (source_uid, principal_uid) = incoming;
    let Some(local_source) = local_source else {
        return if is_create { Identity::Adoptable } else { Identity::Foreign };
    };
    match local_principal {
        Some(local) if !principal_uid.is_empty() && local != principal_uid => Identity::Restamp,
        _ if source_uid.is_empty() => Identity::Restamp,
        _ if source_uid == local_source => Identity::Same,
        None if !principal_uid.is_empty() => Identity::Restamp,
        _ => Identity::Mismatch,
    }
}

/// What to do with a word about existence, decided before anything is built.
enum Plan {
    Done,
    NotApplied(&'static str),
    /// Leave it alone and tell the hub why.
    Refuse(&'static str),
    Wait,
    Update {
        source_uid: Box<str>,
        principal_uid: Box<str>,
    },
    /// This JSON Patch makes it what the hub says.
    Patch(Vec<u8>),
    Delete,
    Hold,
}

impl Core {
    pub(super) fn site_changed(
        &mut self,
        _now: Instant,
        id: SlotId,
        before: Option<Present>,
        view: &ObjectView<'_>,
        own_write: bool,
    ) {
        let slot = self.slot(id);
        let Some(present) = slot.observed.present() else { return };
        if present.ignored {
            // Somebody took it out of our hands with the label.
            slot.reference = None;
            slot.recreate = None;
            return;
        }
        if present.source_uid.is_none()
            && slot.reference.take_if(|reference| reference.uid != present.uid).is_some()
        {
            // It stands where our copy was, and nothing here tells whether it is one: the hub says what it is to be.
            slot.recreate = None;
            slot.out.verify_blind = true;
            self.want(id, Want::Verify);
            return;
        }
        let Some(source_uid) = present.source_uid.clone() else { return };
        recognise(slot.key.kind, &mut slot.reference, present, view);
        if before.is_none()
            && !own_write
            && present.deleting
            && slot.expected_gone.as_ref() != Some(&present.uid)
        {
            slot.unknown_deletion = true;
        }
        if let Some(asked) = &mut slot.word
            && let Word::Gone(gone) = &mut asked.what
            && asked.refused
            && view.annotation(CONFIRM_DELETE).is_some_and(|value| *value == *source_uid)
        {
            gone.admitted = true;
            asked.refused = false;
        }
        let came_back = slot.recreate.take().is_some() && !own_write;
        if !present.deleting && slot.outstanding.is_none() {
            // A delete that was asked for did not happen; if it is still wanted it is asked for again.
            slot.expected_gone = None;
            slot.report_end = None;
        }
        if came_back {
            // By our write whose answer was lost, or by somebody here: the hub says what it is to be.
            slot.out.verify_blind = true;
            self.want(id, Want::Verify);
        }
        self.level_check(id);
    }

    /// An event that arrives while a write of ours is on its way: the mark that it shows may be gone when it is read.
    pub(super) fn site_saw_mark(&mut self, id: SlotId, passing: &Present, view: &ObjectView<'_>) {
        let slot = self.slot(id);
        let is_later = slot.observed.known().is_none_or(|known| passing.is_newer_than(known));
        if is_later && !passing.ignored {
            recognise(slot.key.kind, &mut slot.reference, passing, view);
        }
    }

    pub(super) fn site_gone(
        &mut self,
        _now: Instant,
        id: SlotId,
        before: Option<Present>,
        last: Option<(&ObjectView<'_>, &[u8])>,
        version: Option<Box<str>>,
    ) {
        self.unwant(id, &[Want::Status]);
        let slot = self.slot(id);
        slot.out.acked = 0;
        let Some(before) = before else {
            if slot.recreate.is_none() {
                // Of a copy that was seen in passing.
                slot.reference = None;
            }
            return;
        };
        let reference = slot.reference.take();
        let unknown_deletion = core::mem::take(&mut slot.unknown_deletion);
        let version = version.unwrap_or_else(|| before.resource_version.clone());
        let was_expected = slot.expected_gone.as_ref() == Some(&before.uid);
        if was_expected {
            slot.expected_gone = None;
            if let Some(source_uid) = slot.report_end.take() {
                slot.out.known_as = Vec::from([before.uid.clone()]);
                self.tell_gone(id, &version, Some(&source_uid));
            }
            return;
        }
        let Some(reference) = reference else { return };
        if slot.word.as_ref().is_some_and(|asked| !asked.refused) {
            // The hub's pending word decides what comes next.
            return;
        }
        if unknown_deletion {
            // Asked for before we started, by the hub or by somebody here: the hub knows.
            slot.out.verify_blind = true;
            self.want(id, Want::Verify);
            return;
        }
        let last = match last {
            Some((_, bytes)) => bytes.to_vec(),
            None => tombstone(&slot.key.namespace, &slot.key.name, &before.uid, Some(&reference.source_uid)),
        };
        slot.recreate = Some(last);
        slot.reference = Some(reference);
    }

    pub(super) fn next_on_site(&mut self, _now: Instant, id: SlotId, view: Option<&ObjectView<'_>>) -> Step {
        let slot = self.slot(id);
        if slot.word.as_ref().is_some_and(|asked| !asked.refused) {
            match self.next_for_word(id, view) {
                Step::Idle if self.slot(id).word.as_ref().is_some_and(|asked| !asked.refused) => {
                    return Step::Idle;
                }
                Step::Idle => {}
                step => return step,
            }
        }
        let slot = self.slot(id);
        if slot.recreate.is_some() && matches!(slot.observed, Observed::Absent) {
            // It comes back first; what was asked for it waits.
            return self.next_for_drift(id);
        }
        if let Some(step) = self.next_for_operation(id) {
            return step;
        }
        if let Some(step) = self.next_for_terminate(id) {
            return step;
        }
        self.next_for_drift(id)
    }

    fn next_for_word(&mut self, id: SlotId, view: Option<&ObjectView<'_>>) -> Step {
        let on_site = match &self.slot(id).observed {
            Observed::Unknown(_) => return Step::Read,
            Observed::Absent => None,
            Observed::Present(present) => Some((**present).clone()),
        };
        let Some(mut present) = on_site else { return self.next_for_word_when_absent(id) };
        let hidden = present.source_uid.is_none() && self.slot(id).local_source().is_some();
        let kind = self.slot(id).key.kind;
        let word = self.slot(id).word.as_ref().map(|asked| &asked.what);
        if hidden && (matches!(word, Some(Word::Gone(_))) || kind != Kind::Application) {
            // What carries no source is not deleted: the mark that a local edit removed is put back first.
            return self.revert(id);
        }
        present.source_uid = self.slot(id).local_source().map(Into::into);
        let view = view.filter(|view| *view.resource_version == *present.resource_version);
        let word = self.slots[id as usize].as_ref().and_then(|slot| slot.word.as_ref());
        let plan = match word.map(|asked| &asked.what) {
            Some(Word::Exists(exists)) => {
                let Some(view) = view else { return Step::Read };
                let incoming = ObjectView::parse(&exists.object).ok();
                if kind == Kind::Application {
                    self.plan_exists(exists, incoming.as_ref(), &present, view)
                } else {
                    self.plan_content(kind, exists, &present, view)
                }
            }
            Some(Word::Gone(gone)) => {
                let former = self.slots[id as usize].as_ref().map_or(&[][..], |slot| &slot.former);
                self.plan_gone(kind, gone, former, &present)
            }
            _ => Plan::Done,
        };
        match plan {
            Plan::Wait => Step::Idle,
            Plan::Done => {
                if let Some(view) = view {
                    self.remember_asked(id, view);
                }
                self.word_done(id, true);
                Step::Idle
            }
            Plan::NotApplied(reason) => {
                let slot = self.slot(id);
                if let (Some(here), Some(Word::Gone(gone))) =
                    (slot.local_source(), slot.word.as_ref().map(|asked| &asked.what))
                    && *here != *gone.source_uid
                {
                    // Nothing of that name is left on the hub, as it seems, and it has said nothing of what is here: ask.
                    self.want(id, Want::Verify);
                }
                let key = self.slot(id).key.clone();
                self.note(Note::NotApplied { key, reason });
                self.word_done(id, false);
                if self.slot(id).local_source().is_none() {
                    // The hub's word is that nothing of its own is here: neither is what an operation could be for.
                    self.drop_operation(id, reason);
                }
                Step::Idle
            }
            Plan::Refuse(reason) => {
                let slot = self.slot(id);
                let key = slot.key.clone();
                slot.out.error = Some(reason.into());
                self.want(id, Want::Error);
                self.note(Note::NotApplied { key, reason });
                self.word_done(id, false);
                self.drop_operation(id, reason);
                Step::Idle
            }
            Plan::Hold => {
                self.counters.held += 1;
                let slot = self.slot(id);
                let key = slot.key.clone();
                let ack = slot.word.as_mut().and_then(|asked| {
                    asked.refused = true;
                    asked.ack.take()
                });
                slot.failures = 0;
                self.give(id, ack);
                self.note(Note::HeldDelete { key });
                Step::Idle
            }
            Plan::Delete => {
                self.count_resync_delete(id);
                let slot = self.slot(id);
                slot.expected_gone = Some(present.uid.clone());
                if let Some(Word::Exists(exists)) = slot.word.as_ref().map(|asked| &asked.what)
                    && exists.deleting
                {
                    slot.report_end = Some(exists.source_uid.clone());
                }
                self.applying_word(id);
                Step::Write(Purpose::Delete, Verb::Delete { uid: present.uid })
            }
            Plan::Update { source_uid, principal_uid } => {
                let Some(view) = view else { return Step::Read };
                let stamp = Stamp { source_uid: &source_uid, principal_uid: &principal_uid };
                self.update(id, &present, view, stamp)
            }
            Plan::Patch(patch) => {
                self.applying_word(id);
                Step::Write(Purpose::Write(Applies::Word), Verb::JsonPatch(patch))
            }
        }
    }

    fn next_for_word_when_absent(&mut self, id: SlotId) -> Step {
        let slot = self.slot(id);
        let Some(asked) = &slot.word else { return Step::Idle };
        let Word::Exists(exists) = &asked.what else {
            self.word_done(id, true);
            self.drop_operation(id, "the Application is neither on the site nor on the hub");
            return Step::Idle;
        };
        if exists.deleting {
            // The hub's object only waits to hear that nothing is left here.
            let (uid, source_uid) = (exists.source_uid.clone(), exists.source_uid.clone());
            slot.out.known_as = Vec::from([uid]);
            self.tell_gone(id, "0", Some(&source_uid));
            self.word_done(id, true);
            return Step::Idle;
        }
        if slot.place == Place::Missing {
            slot.applying = asked.serial;
            return Step::Write(Purpose::Namespace, Verb::CreateNamespace);
        }
        let kind = slot.key.kind;
        let body = if kind == Kind::Application {
            let stamp = Stamp { source_uid: &exists.source_uid, principal_uid: &exists.principal_uid };
            let namespace = &slot.key.namespace;
            create_body(&exists.object, kind.api_version(), kind.object_kind(), namespace, stamp)
        } else {
            content::create_body(kind, &exists.object, &slot.key.namespace)
        };
        match body {
            Ok(body) => {
                slot.applying = asked.serial;
                Step::Write(Purpose::Create, Verb::Create(body))
            }
            Err(_) => {
                self.unreadable_word(id);
                Step::Idle
            }
        }
    }

    fn plan_exists(
        &self,
        exists: &Exists,
        incoming: Option<&ObjectView<'_>>,
        present: &Present,
        view: &ObjectView<'_>,
    ) -> Plan {
        let Some(incoming) = incoming else { return Plan::NotApplied("it cannot be read") };
        let local = (present.source_uid.as_deref(), present.principal_uid.as_deref());
        let principal_uid = || -> Box<str> {
            if exists.principal_uid.is_empty() {
                present.principal_uid.clone().unwrap_or_default()
            } else {
                exists.principal_uid.clone()
            }
        };
        let restamp =
            || Plan::Update { source_uid: exists.source_uid.clone(), principal_uid: principal_uid() };
        let identity =
            identity(exists.is_create, (&exists.source_uid, &exists.principal_uid), local.0, local.1);
        let plan = match identity {
            Identity::Same => Plan::Update {
                source_uid: present.source_uid.clone().unwrap_or_default(),
                principal_uid: present.principal_uid.clone().unwrap_or_else(|| exists.principal_uid.clone()),
            },
            Identity::Restamp => restamp(),
            Identity::Foreign => {
                return Plan::Refuse(
                    "an Application of that name exists on the site and did not come from the hub",
                );
            }
            Identity::Adoptable => match adoption_policy(view, self.config.adoption_policy) {
                AdoptionPolicy::Always => restamp(),
                AdoptionPolicy::Never => {
                    return Plan::Refuse(
                        "an Application of that name exists on the site and the adoption policy is never",
                    );
                }
            },
            Identity::Mismatch => match mismatch_policy(incoming, self.config.mismatch_policy) {
                MismatchPolicy::Upsert => restamp(),
                MismatchPolicy::Recreate if present.deleting => return Plan::Wait,
                MismatchPolicy::Recreate => return Plan::Delete,
            },
        };
        if present.deleting && !exists.deleting && present.has_finalizers {
            // It is ending here and the hub wants it: it is created again once it is gone.
            return Plan::Wait;
        }
        plan
    }

    fn plan_content(&self, kind: Kind, exists: &Exists, present: &Present, view: &ObjectView<'_>) -> Plan {
        let policy = self.config.mismatch_policy;
        let managed = present.source_uid.is_some();
        match content::exists(kind, Some(view), managed, &exists.object, &view.namespace, policy) {
            Ok(content::Step::Nothing) if present.deleting => Plan::Wait,
            Ok(content::Step::Nothing) => Plan::Done,
            Ok(content::Step::Patch(_)) if present.deleting => Plan::Wait,
            Ok(content::Step::Patch(patch)) => Plan::Patch(patch),
            Ok(content::Step::Recreate(_)) if present.deleting => Plan::Wait,
            Ok(content::Step::Recreate(_)) => Plan::Delete,
            Ok(content::Step::Refuse) => {
                Plan::Refuse("an object of that name exists on the site and did not come from the hub")
            }
            // An object that is there leads to neither.
            Ok(content::Step::Create(_) | content::Step::Delete) | Err(_) => {
                Plan::NotApplied("it cannot be read")
            }
        }
    }

    fn plan_gone(&self, kind: Kind, gone: &GoneWord, former: &[Box<str>], present: &Present) -> Plan {
        let Some(source_uid) = &present.source_uid else {
            return Plan::NotApplied("the object on the site did not come from the hub");
        };
        if gone.source_uid != *source_uid && !former.contains(source_uid) {
            return Plan::NotApplied("the delete is for another object of that name");
        }
        if kind == Kind::Application
            && let Some(principal_uid) = &present.principal_uid
            && !gone.principal_uid.is_empty()
            && gone.principal_uid != *principal_uid
        {
            return Plan::NotApplied("the delete comes from another principal than the Application");
        }
        if present.deleting {
            return Plan::Done;
        }
        if gone.synthetic && !gone.admitted && self.is_over_delete_limit(kind, &gone.principal_uid) {
            return Plan::Hold;
        }
        Plan::Delete
    }

    fn is_over_delete_limit(&self, kind: Kind, principal_uid: &str) -> bool {
        if kind == Kind::Repository {
            // Credentials that were withdrawn must go.
            return false;
        }
        let (counted_for, counts) = &self.resync_deletes;
        let count = if **counted_for == *principal_uid { counts[kind as usize] } else { 0 };
        let is_managed = |slot: &Slot| slot.observed.present().is_some_and(|p| p.source_uid.is_some());
        let managed = self.iter().filter(|(key, slot)| key.kind == kind && is_managed(slot)).count();
        let limit = &self.config.resync_delete_limit;
        count >= limit.count.max((managed + count) * limit.percent / 100)
    }

    fn count_resync_delete(&mut self, id: SlotId) {
        let Some(Word::Gone(gone)) = self.slot(id).word.as_ref().map(|asked| &asked.what) else { return };
        if !gone.synthetic || gone.admitted {
            return;
        }
        let principal_uid = gone.principal_uid.clone();
        let kind = self.slot(id).key.kind;
        if self.resync_deletes.0 != principal_uid {
            self.resync_deletes = (principal_uid, [0; Kind::ALL.len()]);
        }
        self.resync_deletes.1[kind as usize] += 1;
        // Counted once, however often the request must be repeated.
        if let Some(Word::Gone(gone)) = self.slot(id).word.as_mut().map(|asked| &mut asked.what) {
            gone.admitted = true;
        }
    }

    fn update(&mut self, id: SlotId, present: &Present, view: &ObjectView<'_>, stamp: Stamp<'_>) -> Step {
        let slot = self.slot(id);
        let Some(asked) = &slot.word else { return Step::Idle };
        let Word::Exists(exists) = &asked.what else { return Step::Idle };
        let (serial, deleting, source_uid) = (asked.serial, exists.deleting, exists.source_uid.clone());
        let built = ObjectView::parse(&exists.object).ok().and_then(|incoming| {
            let mut spec = site_spec(incoming.spec.unwrap_or(b"{}")).ok()?;
            let print = value_fingerprint(&spec);
            if let Some(reference) = &slot.reference
                && reference.asked == print
                && reference.print == present.spec
            {
                // The API server prunes fields of this spec: what it made of it stands already.
                spec = reference.spec.as_deref().unwrap_or(b"{}").to_vec();
            }
            update_patch(view, &incoming, &spec, stamp).ok()
        });
        match built {
            None => {
                self.unreadable_word(id);
                Step::Idle
            }
            Some(Some(patch)) if !present.deleting => {
                slot.applying = serial;
                Step::Write(Purpose::Write(Applies::Word), Verb::JsonPatch(patch))
            }
            Some(_) if deleting && !present.deleting => {
                slot.applying = serial;
                slot.expected_gone = Some(present.uid.clone());
                slot.report_end = Some(source_uid);
                Step::Write(Purpose::Delete, Verb::Delete { uid: present.uid.clone() })
            }
            Some(_) => {
                if deleting {
                    slot.expected_gone = Some(present.uid.clone());
                    slot.report_end = Some(source_uid);
                }
                self.remember_asked(id, view);
                self.word_done(id, true);
                Step::Idle
            }
        }
    }

    fn next_for_operation(&mut self, id: SlotId) -> Option<Step> {
        let slot = self.slot(id);
        let is_known = slot.local_source().is_some();
        let is_for_it =
            slot.operation.as_ref().is_some_and(|asked| slot.local_source() == Some(&*asked.what.source_uid));
        let is_repeated = slot.operation.as_ref().is_some_and(|asked| asked.event == slot.last_operation);
        let asked = slot.operation.as_mut()?;
        let present = match &slot.observed {
            Observed::Unknown(_) => return Some(Step::Read),
            Observed::Absent => None,
            Observed::Present(present) => Some(present),
        };
        let Some(present) = present.filter(|_| is_for_it || (is_known && is_repeated)) else {
            // The object may have been lost, its mark removed, or a later one refused, while nobody watched: the hub says what
            // it is, or that it is gone.
            if !core::mem::replace(&mut asked.what.hub_asked, true) {
                slot.out.verify_blind = true;
                self.want(id, Want::Verify);
            }
            // What is here stays as the hub said last.
            return if is_known { None } else { Some(Step::Idle) };
        };
        if is_repeated {
            // The acknowledgement was lost, the operation was not.
            let ack = take_asked(&mut slot.operation);
            self.give(id, ack);
            self.tell_status(id);
            return None;
        }
        if present.phase == Phase::Terminating {
            return self.drop_operation(id, "the running operation is being terminated");
        }
        let mut patch = Patch::new(&present.resource_version);
        patch.add("/operation", &asked.what.operation);
        slot.applying = asked.serial;
        Some(Step::Write(Purpose::Write(Applies::Operation), Verb::JsonPatch(patch.finish_always())))
    }

    fn drop_operation(&mut self, id: SlotId, reason: &'static str) -> Option<Step> {
        let slot = self.slot(id);
        if slot.operation.is_some() {
            let key = slot.key.clone();
            let ack = take_asked(&mut slot.operation);
            self.give(id, ack);
            self.note(Note::NotApplied { key, reason });
            self.tell_status(id);
        }
        None
    }

    fn next_for_terminate(&mut self, id: SlotId) -> Option<Step> {
        let slot = self.slot(id);
        let asked = slot.terminate.as_ref()?;
        let reason = match &slot.observed {
            Observed::Unknown(_) => return Some(Step::Read),
            Observed::Absent => Some("the Application is not on the site"),
            Observed::Present(_) if slot.local_source() != Some(&*asked.what) => {
                Some("the request to terminate is for another Application of that name")
            }
            Observed::Present(present) => match present.phase {
                Phase::None => Some("there is no operation to terminate"),
                Phase::Terminating | Phase::Over => None,
                Phase::Running => {
                    let mut patch = Patch::new(&present.resource_version);
                    let phase = alloc::format!("\"{TERMINATING}\"");
                    patch.add("/status/operationState/phase", phase.as_bytes());
                    slot.applying = asked.serial;
                    return Some(Step::Write(
                        Purpose::Write(Applies::Terminate),
                        Verb::JsonPatch(patch.finish_always()),
                    ));
                }
            },
        };
        let key = slot.key.clone();
        let ack = take_asked(&mut slot.terminate);
        self.give(id, ack);
        if let Some(reason) = reason {
            self.note(Note::NotApplied { key, reason });
        }
        None
    }

    /// Local edits and deletions of what the hub owns are undone, also off-line.
    fn next_for_drift(&mut self, id: SlotId) -> Step {
        if self.slot(id).word.as_ref().is_some_and(|asked| !asked.refused) {
            return Step::Idle;
        }
        self.revert(id)
    }

    fn revert(&mut self, id: SlotId) -> Step {
        let on_recreate = self.config.on_recreate;
        let slot = self.slot(id);
        let Some(reference) = &slot.reference else { return Step::Idle };
        match &slot.observed {
            Observed::Unknown(_) => Step::Idle,
            Observed::Absent => {
                let Some(last) = &slot.recreate else { return Step::Idle };
                let kind = slot.key.kind;
                // What lost metadata on its way out bears no principal until the hub has completed it: should this process end
                // before, the next one can tell.
                let whole = ObjectView::parse(last)
                    .is_ok_and(|view| view.spec.is_some() && view.deletion_timestamp.is_none());
                let principal_uid = if whole { &*reference.principal_uid } else { "" };
                let stamp = Stamp { source_uid: &reference.source_uid, principal_uid };
                let part = reference.spec.as_deref();
                let body = if kind == Kind::Application {
                    let (api_version, object_kind) = (kind.api_version(), kind.object_kind());
                    recreate_body(last, api_version, object_kind, part, stamp, on_recreate)
                        .and_then(|body| if reference.remapped { remapped(&body) } else { Ok(body) })
                } else {
                    content::recreate_body(kind, last, part, stamp.source_uid)
                };
                match body {
                    Ok(body) => {
                        slot.applying = 0;
                        Step::Write(Purpose::Create, Verb::Create(body))
                    }
                    Err(_) => {
                        slot.recreate = None;
                        slot.out.verify_blind = true;
                        self.want(id, Want::Verify);
                        Step::Idle
                    }
                }
            }
            Observed::Present(present) => {
                let spec = present.spec != reference.print;
                let stamp = present.source_uid.as_ref() != Some(&reference.source_uid)
                    || (!reference.principal_uid.is_empty()
                        && present.principal_uid.as_ref() != Some(&reference.principal_uid))
                    || (reference.remapped && !present.remapped);
                if present.deleting || present.ignored || !(spec || stamp) {
                    return Step::Idle;
                }
                let mut patch = Patch::new(&present.resource_version);
                if spec {
                    let path = alloc::format!("/{}", slot.key.kind.member());
                    match reference.spec.as_deref() {
                        Some(part) => patch.add(&path, part),
                        None => patch.remove(&path),
                    }
                }
                if stamp {
                    if !present.has_annotations {
                        patch.add("/metadata/annotations", b"{}");
                    }
                    if reference.remapped {
                        let path = "/metadata/annotations/argocd.argoproj.io~1namespace-remapped";
                        patch.add(path, br#""true""#);
                    }
                    for (path, uid) in [
                        ("/metadata/annotations/argocd.argoproj.io~1source-uid", &reference.source_uid),
                        ("/metadata/annotations/argocd.argoproj.io~1principal-uid", &reference.principal_uid),
                    ] {
                        if !uid.is_empty() {
                            let mut value = Vec::new();
                            crate::json::push_string(&mut value, uid);
                            patch.add(path, &value);
                        }
                    }
                }
                Step::Write(Purpose::Write(Applies::Revert), Verb::JsonPatch(patch.finish_always()))
            }
        }
    }

    pub(super) fn site_written(
        &mut self,
        _now: Instant,
        id: SlotId,
        purpose: Purpose,
        view: &ObjectView<'_>,
    ) {
        let slot = self.slot(id);
        let key = slot.key.clone();
        let is_current = |asked: u32, applying: u32| asked == applying;
        match purpose {
            Purpose::Create if slot.applying == 0 => {
                slot.recreate = None;
                self.refer_to(id, view);
                self.counters.recreated += 1;
                self.note(Note::Recreated { key });
                // Finalizers and metadata that were lost here come back from the hub.
                self.slot(id).out.verify_blind = true;
                self.want(id, Want::Verify);
                self.tell_status(id);
            }
            Purpose::Create | Purpose::Write(Applies::Word) => {
                slot.recreate = None;
                let ends = matches!(
                    slot.word.as_ref().map(|asked| &asked.what),
                    Some(Word::Exists(exists)) if exists.deleting
                );
                let current = slot.word.as_ref().is_some_and(|asked| is_current(asked.serial, slot.applying));
                self.refer_to(id, view);
                if current {
                    self.remember_asked(id, view);
                    if purpose == Purpose::Create {
                        self.skip_empty_status(id);
                    }
                    if !ends {
                        self.word_done(id, true);
                    }
                }
                let action = if purpose == Purpose::Create { "created" } else { "updated" };
                self.note(Note::Applied { key, action });
            }
            Purpose::Write(Applies::Operation) => {
                let current =
                    slot.operation.as_ref().is_some_and(|asked| is_current(asked.serial, slot.applying));
                if current {
                    slot.last_operation = slot.operation.as_ref().map_or(0, |asked| asked.event);
                    slot.hub_operation = view.operation.map_or(0, fingerprint);
                    let ack = take_asked(&mut slot.operation);
                    self.give(id, ack);
                    // Until its acknowledgement the hub keeps its operation whatever a status says: say it again after it.
                    self.tell_status(id);
                }
                self.note(Note::Applied { key, action: "operation set" });
            }
            Purpose::Write(Applies::Terminate) => {
                if slot.terminate.as_ref().is_some_and(|asked| is_current(asked.serial, slot.applying)) {
                    let ack = take_asked(&mut slot.terminate);
                    self.give(id, ack);
                }
                self.note(Note::Applied { key, action: "operation terminated" });
            }
            Purpose::Write(Applies::Revert) => {
                self.refer_to(id, view);
                self.counters.reverted += 1;
                self.note(Note::Reverted { key });
            }
            Purpose::Delete | Purpose::Read | Purpose::Namespace => {}
        }
    }

    /// Whether a missing namespace is created for this object.
    pub(super) fn may_create_namespace(&mut self, id: SlotId) -> bool {
        let creates = self.config.create_namespace && self.config.role == super::Role::Agent;
        let slot = self.slot(id);
        creates && slot.key.kind == Kind::Application && slot.applying != 0 && slot.place == Place::Unknown
    }

    /// A DELETE was accepted.
    pub(super) fn delete_stands(&mut self, id: SlotId) {
        let slot = self.slot(id);
        let key = slot.key.clone();
        let keep = match slot.word.as_ref() {
            Some(asked) if asked.serial == slot.applying => match &asked.what {
                // Recreate: the old one goes, the word waits to create the new one.
                Word::Exists(exists) => !exists.deleting,
                _ => false,
            },
            _ => true,
        };
        if !keep {
            self.word_done(id, true);
        }
        self.note(Note::Applied { key, action: "deleted" });
    }

    /// What the API server made of our write is the reference from now on.
    fn refer_to(&mut self, id: SlotId, view: &ObjectView<'_>) {
        let slot = self.slot(id);
        let spec: Option<Box<[u8]>> = content::part(slot.key.kind, view).map(Into::into);
        let asked = slot.reference.as_ref().map_or(0, |reference| reference.asked);
        let text =
            |uid: Option<alloc::borrow::Cow<'_, str>>| uid.map_or_else(Box::default, |uid| Box::from(&*uid));
        slot.reference = Some(Reference {
            print: spec.as_deref().map_or(0, fingerprint),
            spec,
            asked,
            uid: (&*view.uid).into(),
            source_uid: text(view.source_uid()),
            principal_uid: text(view.principal_uid()),
            remapped: view.annotation(object::NAMESPACE_REMAPPED).is_some(),
        });
    }

    /// Remembers which spec of the hub led to the present one.
    fn remember_asked(&mut self, id: SlotId, view: &ObjectView<'_>) {
        let slot = self.slot(id);
        let Some(Word::Exists(exists)) = slot.word.as_ref().map(|asked| &asked.what) else { return };
        let kind = slot.key.kind;
        let print = ObjectView::parse(&exists.object).map_or(0, |incoming| said_print(kind, &incoming));
        self.refer_to(id, view);
        if let Some(reference) = &mut self.slot(id).reference {
            reference.asked = print;
        }
    }

    /// The word is carried out, or never will be: acknowledge and forget it.
    fn word_done(&mut self, id: SlotId, applied: bool) {
        let is_go = self.peer_is_go();
        let slot = self.slot(id);
        let tell = match slot.word.as_ref().map(|asked| &asked.what) {
            Some(Word::Exists(exists)) if is_go && applied => !slot.hub_has_status(exists),
            word => matches!(word, Some(Word::Exists(_))),
        };
        let ends_operation = slot.operation.as_ref().is_some_and(|asked| {
            let OperationWord { source_uid, hub_asked, .. } = &asked.what;
            let is_for_another = slot.local_source() != Some(&**source_uid);
            match slot.word.as_ref().map(|asked| &asked.what) {
                Some(Word::Exists(exists)) => *hub_asked && exists.source_uid != *source_uid,
                Some(Word::Gone(gone)) => {
                    (applied || is_for_another)
                        && (gone.source_uid == *source_uid || (*hub_asked && gone.synthetic))
                }
                _ => false,
            }
        });
        let ack = take_asked(&mut slot.word);
        slot.former.clear();
        slot.failures = 0;
        if applied && slot.out.wants.has(Want::Error) {
            slot.out.error = None;
            slot.out.wants.remove(Want::Error);
        }
        self.give(id, ack);
        if tell {
            self.tell_status(id);
        }
        if ends_operation {
            self.drop_operation(id, "the operation is for an Application that the hub no longer has");
        }
    }

    /// A new copy without a status has nothing to tell a Go hub, which would answer with an update of its own.
    fn skip_empty_status(&mut self, id: SlotId) {
        if !self.peer_is_go() {
            return;
        }
        let slot = self.slot(id);
        if let Some(present) = slot.observed.present()
            && present.says_nothing()
            && slot.out.in_hand().is_none()
        {
            slot.out.acked = present.report;
            self.unwant(id, &[Want::Status]);
        }
    }

    fn tell_status(&mut self, id: SlotId) {
        let slot = self.slot(id);
        slot.out.acked = 0;
        if slot.key.kind == Kind::Application
            && slot.observed.present().is_some_and(|present| present.source_uid.is_some())
        {
            self.want(id, Want::Status);
        }
    }

    fn applying_word(&mut self, id: SlotId) {
        let slot = self.slot(id);
        slot.applying = slot.word.as_ref().map_or(0, |asked| asked.serial);
    }

    fn unreadable_word(&mut self, id: SlotId) {
        let key = self.slot(id).key.clone();
        self.note(Note::BadObject { key, reason: "the hub's object cannot be read".into() });
        self.word_done(id, false);
    }
}

/// Canonical fingerprint of what the hub says an object to be, as it stands on a site; 0: nothing, or nothing readable.
pub(super) fn said_print(kind: Kind, incoming: &ObjectView<'_>) -> u64 {
    match content::part(kind, incoming) {
        None => 0,
        Some(spec) if kind == Kind::Application => site_spec(spec).map_or(0, |spec| value_fingerprint(&spec)),
        Some(part) => value_fingerprint(part),
    }
}

/// A copy that bears its mark is the one that the reference speaks of from now on.
fn recognise(kind: Kind, reference: &mut Option<Reference>, copy: &Present, view: &ObjectView<'_>) {
    let Some(source_uid) = &copy.source_uid else { return };
    match reference {
        Some(reference) if reference.source_uid == *source_uid => reference.uid = copy.uid.clone(),
        Some(_) => {}
        None => {
            // Until the hub speaks, what stands on the site is the reference.
            *reference = Some(Reference {
                print: copy.spec,
                spec: content::part(kind, view).map(Into::into),
                asked: 0,
                uid: copy.uid.clone(),
                source_uid: source_uid.clone(),
                principal_uid: copy.principal_uid.clone().unwrap_or_default(),
                remapped: copy.remapped,
            });
        }
    }
}

fn mismatch_policy(incoming: &ObjectView<'_>, configured: MismatchPolicy) -> MismatchPolicy {
    match incoming.annotation(object::SOURCE_UID_MISMATCH_POLICY).as_deref() {
        Some("recreate") => MismatchPolicy::Recreate,
        Some("upsert") => MismatchPolicy::Upsert,
        _ => configured,
    }
}

fn adoption_policy(local: &ObjectView<'_>, configured: AdoptionPolicy) -> AdoptionPolicy {
    match local.annotation(object::ADOPTION_POLICY).as_deref() {
        Some("always") => AdoptionPolicy::Always,
        Some("never") => AdoptionPolicy::Never,
        _ => configured,
    }
}
