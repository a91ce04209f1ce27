//! One record per object: what the API server last said, what the peer last said, and what the peer is owed.

use alloc::boxed::Box;
use alloc::vec::Vec;

use super::outbox::{Out, Want};
use crate::checksum::{fingerprint, value_fingerprint};
use crate::content;
use crate::json;
use crate::object::{self, ObjectView};
use crate::request::{Key, Kind};
use crate::time::Instant;
use crate::transform::TERMINATING;

/// Index of a slot.
pub(super) type SlotId = u32;

/// What the API server last said about an object.
#[derive(Debug)]
pub(super) enum Observed {
    /// Nothing yet, or this, before a write whose answer was lost or that met somebody else's.
    Unknown(Option<Box<Present>>),
    /// It does not exist.
    Absent,
    /// It exists.
    Present(Box<Present>),
}

impl Observed {
    pub(super) fn present(&self) -> Option<&Present> {
        match self {
            Self::Present(present) => Some(present),
            _ => None,
        }
    }

    /// The last state seen, if it is not known to have ended.
    pub(super) fn known(&self) -> Option<&Present> {
        match self {
            Self::Present(last) | Self::Unknown(Some(last)) => Some(last),
            Self::Unknown(None) | Self::Absent => None,
        }
    }

    /// The same, taken out.
    pub(super) fn last(self) -> Option<Present> {
        match self {
            Self::Present(last) | Self::Unknown(Some(last)) => Some(*last),
            Self::Unknown(None) | Self::Absent => None,
        }
    }
}

/// The fields of an existing object that a rule reads; fingerprints stand for content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Present {
    pub(super) uid: Box<str>,
    pub(super) resource_version: Box<str>,
    pub(super) source_uid: Option<Box<str>>,
    pub(super) principal_uid: Option<Box<str>>,
    pub(super) deleting: bool,
    pub(super) has_finalizers: bool,
    pub(super) has_status: bool,
    pub(super) has_annotations: bool,
    /// Annotation `namespace-remapped`.
    pub(super) remapped: bool,
    /// Label `ignore-sync: "true"`.
    pub(super) ignored: bool,
    /// Principal only: it is for this agent.
    pub(super) routed: bool,
    pub(super) phase: Phase,
    /// Of the raw spec or data; 0: none, or empty data.
    pub(super) spec: u64,
    /// Of the raw status.
    pub(super) status: u64,
    /// Of what a status update tells: status without `reconciledAt`, operation, refresh, source UID.
    pub(super) report: u64,
    /// Of what an update from the hub tells: UID, spec, labels, annotations without refresh, finalizers, deletion.
    pub(super) shape: u64,
    /// Canonical, of the spec or data as it stands on a site; 0: none.
    pub(super) said: u64,
    /// Canonical, of the status without `reconciledAt`; 0: none.
    pub(super) told: u64,
    /// Of `operation`; 0: none.
    pub(super) operation: u64,
    /// Of the refresh annotation's value; 0: none.
    pub(super) refresh: u64,
}

/// `status.operationState.phase`, as far as rules tell phases apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// No operation state.
    None,
    /// Running, or a word we do not know.
    Running,
    /// A user asked for its end.
    Terminating,
    /// Succeeded, Failed, Error.
    Over,
}

impl Present {
    pub(super) fn new(kind: Kind, view: &ObjectView<'_>) -> Self {
        let raw = |value: Option<&[u8]>| value.map_or(0, fingerprint);
        let refresh = view.refresh();
        let source_uid = view.source_uid();
        let operation = raw(view.operation);
        let refresh_print = refresh.as_deref().map_or(0, |value| fingerprint(value.as_bytes()));
        let spec = content::part(kind, view).map_or(0, fingerprint);
        let phase = match view.operation_phase().as_deref() {
            None => Phase::None,
            Some(TERMINATING) => Phase::Terminating,
            Some("Succeeded" | "Failed" | "Error") => Phase::Over,
            Some(_) => Phase::Running,
        };
        let mut report = Vec::with_capacity(40);
        let told = status_print(view.status);
        report.extend_from_slice(&told.to_le_bytes());
        report.extend_from_slice(&operation.to_le_bytes());
        report.extend_from_slice(&refresh_print.to_le_bytes());
        report.extend_from_slice(source_uid.as_deref().unwrap_or_default().as_bytes());
        let mut shape = Vec::with_capacity(80);
        shape.extend_from_slice(view.uid.as_bytes());
        shape.push(u8::from(view.deletion_timestamp.is_some()));
        shape.extend_from_slice(&spec.to_le_bytes());
        shape.extend_from_slice(&raw(view.labels).to_le_bytes());
        shape.extend_from_slice(&annotations_print(view.annotations).to_le_bytes());
        shape.extend_from_slice(&raw(view.finalizers).to_le_bytes());
        Self {
            uid: view.uid.as_ref().into(),
            resource_version: view.resource_version.as_ref().into(),
            source_uid: source_uid.as_deref().filter(|uid| !uid.is_empty()).map(Into::into),
            principal_uid: view.principal_uid().as_deref().filter(|uid| !uid.is_empty()).map(Into::into),
            deleting: view.deletion_timestamp.is_some(),
            has_finalizers: view.finalizers.is_some_and(|list| list != b"[]"),
            has_status: view.status.is_some(),
            has_annotations: view.annotations.is_some(),
            remapped: view.annotation(object::NAMESPACE_REMAPPED).is_some(),
            ignored: view.label(object::IGNORE_SYNC).as_deref() == Some("true"),
            routed: true,
            phase,
            spec,
            status: raw(view.status),
            report: fingerprint(&report),
            shape: fingerprint(&shape),
            said: 0,
            told,
            operation,
            refresh: refresh_print,
        }
    }

    /// No controller has touched it, nobody asks for anything.
    pub(super) fn says_nothing(&self) -> bool {
        !self.has_status && self.operation == 0 && self.refresh == 0
    }

    /// Whether `self` is later than `other`, both from the same API server.
    ///
    /// Resource versions of one server grow as integers; where they are no integers, the later arrival counts as later.
    pub(super) fn is_newer_than(&self, other: &Self) -> bool {
        newer(&self.resource_version, &other.resource_version)
    }
}

/// Of the status without `reconciledAt`, which Argo CD rewrites every few minutes whatever happens.
fn status_print(status: Option<&[u8]>) -> u64 {
    let Some(status) = status else { return 0 };
    match json::remove_member(status, "reconciledAt") {
        Ok(kept) if kept == b"{}" => 0,
        Ok(kept) => value_fingerprint(&kept),
        Err(_) => 0,
    }
}

/// Of the annotations without the refresh request, which has an entry of its own.
fn annotations_print(annotations: Option<&[u8]>) -> u64 {
    let Some(annotations) = annotations else { return 0 };
    if json::member(annotations, object::REFRESH).is_ok_and(|refresh| refresh.is_none()) {
        return fingerprint(annotations);
    }
    match json::remove_member(annotations, object::REFRESH) {
        Ok(kept) if kept == b"{}" => 0,
        Ok(kept) => fingerprint(&kept),
        Err(_) => 0,
    }
}

/// Whether resource version `a` is later than `b`, see [`Present::is_newer_than`].
pub(super) fn newer(a: &str, b: &str) -> bool {
    match (a.parse::<u64>(), b.parse::<u64>()) {
        (Ok(a), Ok(b)) => a > b,
        _ => a != b,
    }
}

/// What an outstanding request was for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// To know the object.
    Read,
    /// To have a place for it.
    Namespace,
    Create,
    /// Writes what the peer said about spec, operation, status.
    Write(Applies),
    Delete,
}

/// What is known of the namespace that an object is to be created in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// Nothing.
    Unknown,
    /// It does not exist and is to be created first.
    Missing,
    /// We created it, or somebody else did.
    Made,
}

/// Which word of the peer a write carries out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Applies {
    /// The word about the object itself.
    Word,
    Operation,
    Terminate,
    /// Nothing new: a local edit is reverted.
    Revert,
}

impl<T> Asked<T> {
    /// Replaces what was asked before. What is to be acknowledged for that one is returned: nothing if this is the same event again.
    pub(super) fn replace(place: &mut Option<Self>, mut new: Self) -> Option<Ack> {
        let old = place.take();
        let mut given = None;
        if let Some(old) = old {
            if old.event == new.event {
                new.serial = old.serial;
            } else {
                given = old.ack;
            }
        }
        *place = Some(new);
        given
    }
}

/// The acknowledgement that is owed for an event, already encoded.
#[derive(Debug)]
pub(super) struct Ack {
    pub(super) frame: Vec<u8>,
    /// When it is sent at the latest, done or not.
    pub(super) by: Instant,
}

/// A thing the peer asked for, with the acknowledgement it is owed (`None`: given already, the retry is ours).
#[derive(Debug)]
pub(super) struct Asked<T> {
    pub(super) what: T,
    pub(super) ack: Option<Ack>,
    /// The API server refused it for good, or it was held: it stays until a newer word replaces it.
    pub(super) refused: bool,
    /// Fingerprint of the event id.
    pub(super) event: u64,
    /// Tells this word from the one that replaces it; a repetition of the same event keeps it.
    pub(super) serial: u32,
}

/// The peer's last word about an object.
#[derive(Debug)]
pub(super) enum Word {
    /// To an agent: it exists like this.
    Exists(Box<Exists>),
    /// To an agent: it is gone, or no longer this agent's.
    Gone(GoneWord),
    /// To the principal: its status on the site.
    Status(Box<StatusWord>),
    /// To the principal: it is gone on the site.
    SiteGone {
        /// Source UID of the copy that is gone; empty: the peer did not say.
        source_uid: Box<str>,
    },
    /// To the principal: the site could not take it.
    Error {
        /// What went wrong there.
        message: Box<str>,
    },
}

impl Word {
    /// A delete of a resync that no person has confirmed.
    pub(super) fn is_held(&self) -> bool {
        matches!(self, Self::Gone(gone) if gone.synthetic && !gone.admitted)
    }
}

#[derive(Debug)]
pub(super) struct Exists {
    /// The incoming object as it arrived.
    pub(super) object: Vec<u8>,
    pub(super) source_uid: Box<str>,
    pub(super) principal_uid: Box<str>,
    pub(super) deleting: bool,
    pub(super) is_create: bool,
}

#[derive(Debug)]
pub(super) struct GoneWord {
    pub(super) source_uid: Box<str>,
    pub(super) principal_uid: Box<str>,
    /// The answer of a resync: no object of that name at the source.
    pub(super) synthetic: bool,
    /// A person confirmed it, or it passed the limit.
    pub(super) admitted: bool,
}

#[derive(Debug)]
pub(super) struct StatusWord {
    pub(super) status: Option<Vec<u8>>,
    pub(super) operation: Option<Vec<u8>>,
    pub(super) refresh: Option<Box<str>>,
    pub(super) source_uid: Box<str>,
}

/// What a managed site keeps to revert drift while nobody can be asked.
#[derive(Debug)]
pub(super) struct Reference {
    /// UID of the copy.
    pub(super) uid: Box<str>,
    /// Identities on the copy, put back when a local edit removes them.
    pub(super) source_uid: Box<str>,
    pub(super) principal_uid: Box<str>,
    /// It is in our namespace because the hub has it in its own; put back like the identities.
    pub(super) remapped: bool,
    /// The spec or data as our API server stored it after our last write (it may prune fields).
    pub(super) spec: Option<Box<[u8]>>,
    /// Fingerprint of `spec`; 0: none.
    pub(super) print: u64,
    /// Canonical fingerprint of the spec that the hub asked for; 0: not known.
    pub(super) asked: u64,
}

#[derive(Debug)]
pub(super) struct Slot {
    pub(super) key: Key,
    /// Bumped with every request; an answer with another one is stale.
    pub(super) generation: u32,
    pub(super) outstanding: Option<Purpose>,
    /// `serial` of the word that the outstanding write carries out.
    pub(super) applying: u32,
    pub(super) observed: Observed,
    /// The watch spoke while a request was outstanding.
    pub(super) watch_spoke: bool,
    /// Version of the last event that arrived during an outstanding write.
    pub(super) spoke_version: Option<Box<str>>,
    /// The watch said that the object is gone during an outstanding write.
    pub(super) gone_during_write: bool,
    /// A relist began after the outstanding request was made: its answer may be older than the list.
    pub(super) overtaken: bool,
    /// What is known is not the latest.
    pub(super) must_read: bool,
    /// UID that is known to be gone before the watch said so: what the watch still says about it is old.
    pub(super) gone_uid: Option<Box<str>>,
    /// `gone_uid` is older than the list under way, after which the watch starts anew.
    pub(super) gone_before_list: bool,
    /// Not seen since the relist that is under way began.
    pub(super) unlisted: bool,
    /// What is known is from before the latest list began: a server that was restored from a backup counts anew since.
    pub(super) before_list: bool,
    pub(super) seen: Seen,
    pub(super) word: Option<Asked<Word>>,
    /// Source UIDs whose end was told while `word`, about a later object, was pending.
    pub(super) former: Vec<Box<str>>,
    pub(super) operation: Option<Asked<OperationWord>>,
    pub(super) terminate: Option<Asked<Box<str>>>,
    pub(super) reference: Option<Reference>,
    /// Last state of an object that was deleted on the site and is to come back.
    pub(super) recreate: Option<Vec<u8>>,
    /// UID whose deletion we asked for.
    pub(super) expected_gone: Option<Box<str>>,
    /// Event id of the operation that was written last: its repetition is no second operation.
    pub(super) last_operation: u64,
    /// Fingerprint of that operation as it stands here; 0: none.
    pub(super) hub_operation: u64,
    /// Fingerprint of an operation that is over on the site and still stands on the hub; 0: none.
    pub(super) stale_operation: u64,
    /// What the peer has, to be compared with the next read.
    pub(super) compare: Option<Box<Compare>>,
    /// Source UID of the hub's object that waits to hear of the end.
    pub(super) report_end: Option<Box<str>>,
    pub(super) place: Place,
    /// It was being deleted when we first saw it: nobody here knows who asked.
    pub(super) unknown_deletion: bool,
    pub(super) out: Out,
    /// Consecutive failures of our own API server for this object.
    pub(super) failures: u32,
    /// Not before this.
    pub(super) retry_at: Option<Instant>,
    /// It stands in the work queue.
    pub(super) queued: bool,
}

#[derive(Debug)]
pub(super) struct OperationWord {
    pub(super) source_uid: Box<str>,
    pub(super) operation: Vec<u8>,
    /// The hub was asked about the object, since it is not here or not known to be the hub's.
    pub(super) hub_asked: bool,
}

/// A `request-update` of the peer.
#[derive(Debug)]
pub(super) struct Compare {
    /// Source UID of the peer's copy; empty: it has none.
    pub(super) uid: Box<str>,
    /// Checksum of its spec.
    pub(super) checksum: Option<Vec<u8>>,
}

/// What stood on the hub's object last, whoever wrote it: only what differs from it is a request of a user.
#[derive(Debug, Default, Clone)]
pub(super) struct Seen {
    pub(super) uid: Box<str>,
    pub(super) operation: u64,
    pub(super) refresh: u64,
    pub(super) terminating: bool,
    /// What a status write whose answer is not known yet may have put there.
    pub(super) maybe_operation: u64,
    pub(super) maybe_refresh: u64,
    /// It may have taken a refresh away.
    pub(super) maybe_refresh_removed: bool,
    pub(super) maybe_terminating: bool,
}

impl Slot {
    pub(super) fn new(key: Key) -> Self {
        Self {
            key,
            generation: 0,
            outstanding: None,
            applying: 0,
            observed: Observed::Unknown(None),
            watch_spoke: false,
            spoke_version: None,
            gone_during_write: false,
            overtaken: false,
            must_read: false,
            gone_uid: None,
            gone_before_list: false,
            unlisted: false,
            before_list: false,
            seen: Seen::default(),
            word: None,
            former: Vec::new(),
            operation: None,
            terminate: None,
            reference: None,
            recreate: None,
            expected_gone: None,
            last_operation: 0,
            hub_operation: 0,
            stale_operation: 0,
            compare: None,
            report_end: None,
            place: Place::Unknown,
            unknown_deletion: false,
            out: Out::default(),
            failures: 0,
            retry_at: None,
            queued: false,
        }
    }

    /// Source UID of the copy here, also while a local edit hides it; `None`: it is the site's own, or not known to exist now.
    pub(super) fn local_source(&self) -> Option<&str> {
        self.source_of(self.observed.present()?)
    }

    /// Whether it stands in our namespace because the hub has it in its own; `None`: nothing is known of it.
    pub(super) fn is_remapped(&self) -> Option<bool> {
        let reference = self.reference.as_ref().map(|reference| reference.remapped);
        let known = self.observed.known().map(|known| known.remapped);
        reference.filter(|is| *is).or(known).or(reference)
    }

    /// The same of what was seen last.
    pub(super) fn known_source(&self) -> Option<&str> {
        self.source_of(self.observed.known()?)
    }

    fn source_of<'a>(&'a self, present: &'a Present) -> Option<&'a str> {
        let reference = self.reference.as_ref().filter(|reference| reference.uid == present.uid);
        let recorded = reference.map(|reference| &*reference.source_uid).filter(|uid| !uid.is_empty());
        recorded.or(present.source_uid.as_deref())
    }

    /// Whether nothing need be said of the status after this word, which was carried out, of a Go hub.
    ///
    /// Such a hub sends the object whenever it has taken in a status, and a status too many takes away an operation that a
    /// user sets meanwhile. A `create` is the word of a hub that may have lost what it knew.
    pub(super) fn hub_has_status(&self, exists: &Exists) -> bool {
        let Some(present) = self.observed.present() else { return false };
        let Ok(view) = ObjectView::parse(&exists.object) else { return false };
        let word = |path: &[&str]| {
            let value = view.status.and_then(|status| json::at_path(status, path).ok().flatten());
            value.is_some_and(|value| value != b"\"\"")
        };
        let shows = word(&["sync", "status"]) || word(&["health", "status"]) || word(&["operationState"]);
        let told = self.out.in_hand().filter(|flight| flight.want == Want::Status);
        told.map_or(self.out.acked, |flight| flight.level) == present.report
            && if present.says_nothing() {
                !shows && view.operation.is_none()
            } else {
                shows && !exists.is_create
            }
    }

    /// What is known may no longer be so: the next step is a read.
    pub(super) fn doubt(&mut self) {
        self.observed = match core::mem::replace(&mut self.observed, Observed::Absent) {
            Observed::Present(last) => Observed::Unknown(Some(last)),
            Observed::Unknown(last) => Observed::Unknown(last),
            Observed::Absent => Observed::Unknown(None),
        };
    }

    /// Whether the peer is to have the object, as far as the API server of this side is concerned.
    pub(super) fn is_wanted(&self) -> bool {
        self.observed.present().is_some_and(|present| present.routed)
    }

    /// The acknowledgements that are withheld.
    pub(super) fn acks_mut(&mut self) -> impl Iterator<Item = &mut Option<Ack>> {
        let word = self.word.as_mut().map(|asked| &mut asked.ack);
        let operation = self.operation.as_mut().map(|asked| &mut asked.ack);
        let terminate = self.terminate.as_mut().map(|asked| &mut asked.ack);
        [word, operation, terminate].into_iter().flatten()
    }

    /// Whether nothing would be lost by forgetting it.
    pub(super) fn is_empty(&self) -> bool {
        // What is another agent's may be read again if it ever becomes this one's.
        let is_nothing = match &self.observed {
            Observed::Absent => true,
            Observed::Present(present) => !present.routed,
            Observed::Unknown(_) => false,
        };
        is_nothing
            && !self.must_read
            && self.outstanding.is_none()
            && self.gone_uid.is_none()
            && self.word.is_none()
            && self.operation.is_none()
            && self.terminate.is_none()
            && self.recreate.is_none()
            && self.compare.is_none()
            && self.out.is_idle()
    }
}
