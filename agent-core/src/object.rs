//! A borrowing view over a Kubernetes object.
//!
//! Only the fields that a rule names are read; everything else stays in the bytes. Field names match without
//! regard to ASCII case and repeated `metadata` parts merge, as in the reference's decoder.

use alloc::borrow::Cow;
use core::fmt;

use crate::json;

/// Annotation with the UID of the object on the side that is the source of truth.
pub const SOURCE_UID: &str = "argocd.argoproj.io/source-uid";
/// Annotation with the identity of the principal that an Application came from.
pub const PRINCIPAL_UID: &str = "argocd.argoproj.io/principal-uid";
/// Annotation that asks Argo CD for a comparison.
pub const REFRESH: &str = "argocd.argoproj.io/refresh";
/// Annotation on an Application whose namespace was changed on the agent.
pub const NAMESPACE_REMAPPED: &str = "argocd.argoproj.io/namespace-remapped";
/// Policy for an existing object without a source UID, on the existing object.
pub const ADOPTION_POLICY: &str = "argocd.argoproj.io/adoption-policy";
/// Policy for an existing object with another source UID, on the incoming object.
pub const SOURCE_UID_MISMATCH_POLICY: &str = "argocd.argoproj.io/source-uid-mismatch-policy";
/// Annotation that kubectl keeps for its own merges.
pub const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";
/// Label of objects that are none of our business when `true`.
pub const IGNORE_SYNC: &str = "argocd-agent.argoproj-labs.io/ignore-sync";

/// Why a payload is not a Kubernetes object.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ObjectError {
    /// Not JSON, or not an object.
    Json(json::Error),
    /// A field that has the wrong JSON type.
    Field(&'static str),
}

impl fmt::Display for ObjectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Json(error) => error.fmt(f),
            Self::Field(name) => write!(f, "field {name} has the wrong type"),
        }
    }
}

impl core::error::Error for ObjectError {}

impl From<json::Error> for ObjectError {
    fn from(error: json::Error) -> Self {
        Self::Json(error)
    }
}

/// The fields of one object. Strings are empty and raw values `None` where absent or `null`.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ObjectView<'a> {
    /// `metadata.name`.
    pub name: Cow<'a, str>,
    /// `metadata.namespace`.
    pub namespace: Cow<'a, str>,
    /// `metadata.uid`.
    pub uid: Cow<'a, str>,
    /// `metadata.resourceVersion`.
    pub resource_version: Cow<'a, str>,
    /// `metadata.deletionTimestamp`.
    pub deletion_timestamp: Option<Cow<'a, str>>,
    /// `metadata.annotations`, an object.
    pub annotations: Option<&'a [u8]>,
    /// `metadata.labels`, an object.
    pub labels: Option<&'a [u8]>,
    /// `metadata.finalizers`, an array.
    pub finalizers: Option<&'a [u8]>,
    /// `metadata.ownerReferences`, an array.
    pub owner_references: Option<&'a [u8]>,
    /// `spec`, an object.
    pub spec: Option<&'a [u8]>,
    /// `status`, an object.
    pub status: Option<&'a [u8]>,
    /// `operation`, an object.
    pub operation: Option<&'a [u8]>,
    /// `data` of a Secret or ConfigMap, an object.
    pub data: Option<&'a [u8]>,
}

impl<'a> ObjectView<'a> {
    /// Reads one object. The text is checked as a whole.
    pub fn parse(object: &'a [u8]) -> Result<Self, ObjectError> {
        let mut view = Self::default();
        let mut outcome = Ok(());
        json::visit_members(object, &mut |key, value| {
            if outcome.is_ok() {
                outcome = view.top_level(&key, value);
            }
        })?;
        outcome.map(|()| view)
    }

    fn top_level(&mut self, key: &str, value: &'a [u8]) -> Result<(), ObjectError> {
        const METADATA: &str = "metadata";
        let slot = if key.eq_ignore_ascii_case(METADATA) {
            return match container(METADATA, b'{', value)? {
                Some(metadata) => self.metadata(metadata),
                None => Ok(()),
            };
        } else if key.eq_ignore_ascii_case("spec") {
            (&mut self.spec, "spec")
        } else if key.eq_ignore_ascii_case("status") {
            (&mut self.status, "status")
        } else if key.eq_ignore_ascii_case("operation") {
            (&mut self.operation, "operation")
        } else if key.eq_ignore_ascii_case("data") {
            (&mut self.data, "data")
        } else {
            return Ok(());
        };
        *slot.0 = container(slot.1, b'{', value)?;
        Ok(())
    }

    fn metadata(&mut self, metadata: &'a [u8]) -> Result<(), ObjectError> {
        let mut outcome = Ok(());
        json::visit_members(metadata, &mut |key, value| {
            if outcome.is_ok() {
                outcome = self.metadata_field(&key, value);
            }
        })?;
        outcome
    }

    fn metadata_field(&mut self, key: &str, value: &'a [u8]) -> Result<(), ObjectError> {
        for (name, slot) in [
            ("name", &mut self.name),
            ("namespace", &mut self.namespace),
            ("uid", &mut self.uid),
            ("resourceVersion", &mut self.resource_version),
        ] {
            if key.eq_ignore_ascii_case(name) {
                // `null` leaves what an earlier part said.
                if let Some(value) = json::present(value) {
                    *slot = json::string(value).ok_or(ObjectError::Field(name))?;
                }
                return Ok(());
            }
        }
        for (name, open, slot) in [
            ("annotations", b'{', &mut self.annotations),
            ("labels", b'{', &mut self.labels),
            ("finalizers", b'[', &mut self.finalizers),
            ("ownerReferences", b'[', &mut self.owner_references),
        ] {
            if key.eq_ignore_ascii_case(name) {
                *slot = container(name, open, value)?;
                return Ok(());
            }
        }
        const DELETION_TIMESTAMP: &str = "deletionTimestamp";
        if key.eq_ignore_ascii_case(DELETION_TIMESTAMP) {
            self.deletion_timestamp = match json::present(value) {
                Some(value) => Some(json::string(value).ok_or(ObjectError::Field(DELETION_TIMESTAMP))?),
                None => None,
            };
        }
        Ok(())
    }

    /// The value of an annotation.
    pub fn annotation(&self, key: &str) -> Option<Cow<'a, str>> {
        lookup(self.annotations?, key)
    }

    /// The value of a label.
    pub fn label(&self, key: &str) -> Option<Cow<'a, str>> {
        lookup(self.labels?, key)
    }

    /// The annotation [`SOURCE_UID`], also where it is empty.
    pub fn source_uid(&self) -> Option<Cow<'a, str>> {
        self.annotation(SOURCE_UID)
    }

    /// The annotation [`PRINCIPAL_UID`].
    pub fn principal_uid(&self) -> Option<Cow<'a, str>> {
        self.annotation(PRINCIPAL_UID)
    }

    /// The annotation [`REFRESH`].
    pub fn refresh(&self) -> Option<Cow<'a, str>> {
        self.annotation(REFRESH)
    }

    /// The UID under which resynchronisation knows the object: the annotation where there is one, else its own.
    pub fn tracked_uid(&self) -> Cow<'a, str> {
        self.source_uid().unwrap_or_else(|| self.uid.clone())
    }

    /// `status.operationState.phase`.
    pub fn operation_phase(&self) -> Option<Cow<'a, str>> {
        text_at(self.status?, &["operationState", "phase"])
    }

    /// `status.reconciledAt`.
    pub fn reconciled_at(&self) -> Option<Cow<'a, str>> {
        text_at(self.status?, &["reconciledAt"])
    }

    /// `spec.destination.name`.
    pub fn destination_name(&self) -> Option<Cow<'a, str>> {
        text_at(self.spec?, &["destination", "name"])
    }
}

/// A raw value that must begin with `open`; `null` counts as absent.
fn container<'a>(name: &'static str, open: u8, raw: &'a [u8]) -> Result<Option<&'a [u8]>, ObjectError> {
    match json::present(raw) {
        Some(value) if value.first() != Some(&open) => Err(ObjectError::Field(name)),
        value => Ok(value),
    }
}

fn lookup<'a>(map: &'a [u8], key: &str) -> Option<Cow<'a, str>> {
    // Part of a document that was checked when the view was made.
    json::member(map, key).ok().flatten().and_then(json::string)
}

fn text_at<'a>(object: &'a [u8], path: &[&str]) -> Option<Cow<'a, str>> {
    json::at_path(object, path).ok().flatten().and_then(json::string)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields() {
        let text = br#"{"apiVersion":"argoproj.io/v1alpha1","metadata":{"name":"g\u0075estbook","namespace":"argocd",
            "uid":"u","resourceVersion":"7","deletionTimestamp":"2026-01-02T03:04:05Z","annotations":
            {"argocd.argoproj.io/source-uid":"s","argocd.argoproj.io/refresh":"hard","x":"\"q\""},
            "labels":{"l":"1"},"finalizers":["f"],"ownerReferences":[]},
            "spec":{"destination":{"name":"in-cluster"}},"unknown":[1],
            "status":{"operationState":{"phase":"Running"},"reconciledAt":"t"},"operation":{"sync":{}}}"#;
        let view = ObjectView::parse(text).expect("an object");
        assert_eq!((view.name.as_ref(), view.namespace.as_ref()), ("guestbook", "argocd"));
        assert_eq!((view.uid.as_ref(), view.resource_version.as_ref()), ("u", "7"));
        assert_eq!(view.deletion_timestamp.as_deref(), Some("2026-01-02T03:04:05Z"));
        assert_eq!(view.source_uid().as_deref(), Some("s"));
        assert_eq!(view.tracked_uid(), "s");
        assert_eq!(view.principal_uid(), None);
        assert_eq!(view.refresh().as_deref(), Some("hard"));
        assert_eq!(view.annotation("x").as_deref(), Some("\"q\""));
        assert_eq!(view.label("l").as_deref(), Some("1"));
        assert_eq!(view.finalizers, Some(&br#"["f"]"#[..]));
        assert_eq!(view.owner_references, Some(&b"[]"[..]));
        assert_eq!(view.operation, Some(&br#"{"sync":{}}"#[..]));
        assert_eq!(view.operation_phase().as_deref(), Some("Running"));
        assert_eq!(view.reconciled_at().as_deref(), Some("t"));
        assert_eq!(view.destination_name().as_deref(), Some("in-cluster"));
    }

    #[test]
    fn null_is_absent() {
        let text = br#"{"metadata":{"name":null,"annotations":null,"deletionTimestamp":null,"uid":"u"},
            "operation":null,"status":{"operationState":null}}"#;
        let view = ObjectView::parse(text).expect("an object");
        assert_eq!(view, ObjectView { uid: "u".into(), status: view.status, ..ObjectView::default() });
        assert_eq!(view.operation_phase(), None);
        assert_eq!(view.tracked_uid(), "u");
        assert_eq!(ObjectView::parse(b"{\"metadata\":null}"), Ok(ObjectView::default()));
    }

    #[test]
    fn an_empty_source_uid_is_still_one() {
        let text = br#"{"metadata":{"uid":"own","annotations":{"argocd.argoproj.io/source-uid":""}}}"#;
        assert_eq!(ObjectView::parse(text).expect("an object").tracked_uid(), "");
    }

    #[test]
    fn reads_as_leniently_as_the_reference() {
        let text = br#"{"METADATA":{"Name":"a"},"metadata":{"namespace":"b"},"Spec":{}}"#;
        let view = ObjectView::parse(text).expect("an object");
        assert_eq!((view.name.as_ref(), view.namespace.as_ref()), ("a", "b"));
        assert_eq!(view.spec, Some(&b"{}"[..]));
    }

    #[test]
    fn wrong_types_name_the_field() {
        for (text, field) in [
            (&br#"{"metadata":[]}"#[..], "metadata"),
            (br#"{"metadata":{"name":5}}"#, "name"),
            (br#"{"metadata":{"annotations":"x"}}"#, "annotations"),
            (br#"{"metadata":{"finalizers":{}}}"#, "finalizers"),
            (br#"{"metadata":{"deletionTimestamp":1}}"#, "deletionTimestamp"),
            (br#"{"spec":5}"#, "spec"),
            (br#"{"operation":[]}"#, "operation"),
        ] {
            assert_eq!(ObjectView::parse(text), Err(ObjectError::Field(field)));
        }
        assert!(matches!(ObjectView::parse(b"[]"), Err(ObjectError::Json(_))));
        assert!(matches!(ObjectView::parse(br#"{"metadata":{"name":"n""#), Err(ObjectError::Json(_))));
    }
}
