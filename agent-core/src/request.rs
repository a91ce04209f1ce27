//! What the core asks of the API server, and how the shell answers.
//!
//! The shells turn a [`Request`] into one HTTP call and hand the [`Outcome`] to `Core::complete`.
//! A request carries a [`Ticket`]: an answer whose ticket is stale is dropped and counted.

use alloc::boxed::Box;
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;
use core::time::Duration;

/// The object kinds that the protocol carries.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Kind {
    /// `argoproj.io/v1alpha1` Application.
    Application,
    /// `argoproj.io/v1alpha1` AppProject.
    AppProject,
    /// A Secret with a repository, or with credentials of repositories.
    Repository,
    /// The ConfigMap with GPG keys.
    GpgKey,
}

/// What is fixed about a kind.
struct Definition {
    word: &'static str,
    api_path: &'static str,
    api_version: &'static str,
    object_kind: &'static str,
    plural: &'static str,
    member: &'static str,
}

impl Kind {
    /// Every kind, in the order of the definitions.
    pub const ALL: [Self; 4] = [Self::Application, Self::AppProject, Self::Repository, Self::GpgKey];

    #[rustfmt::skip]
    const fn definition(self) -> Definition {
        const ARGO: [&str; 2] = ["/apis/argoproj.io/v1alpha1", "argoproj.io/v1alpha1"];
        const CORE: [&str; 2] = ["/api/v1", "v1"];
        let (word, [api_path, api_version], object_kind, plural, member) = match self {
            Self::Application => ("Application", ARGO, "Application", "applications", "spec"),
            Self::AppProject => ("AppProject", ARGO, "AppProject", "appprojects", "spec"),
            Self::Repository => ("Repository", CORE, "Secret", "secrets", "data"),
            Self::GpgKey => ("GPGKey", CORE, "ConfigMap", "configmaps", "data"),
        };
        Definition { word, api_path, api_version, object_kind, plural, member }
    }

    /// The word used in resync bodies and list checksums (docs/protocol.md, "Resync").
    pub const fn as_str(self) -> &'static str {
        self.definition().word
    }

    /// Inverse of [`Kind::as_str`].
    pub fn parse(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.as_str() == word)
    }

    /// `/apis/<group>/<version>` or `/api/v1`.
    pub const fn api_path(self) -> &'static str {
        self.definition().api_path
    }

    /// `apiVersion` of the kind's objects.
    pub const fn api_version(self) -> &'static str {
        self.definition().api_version
    }

    /// `kind` of the kind's objects: a repository is a Secret.
    pub const fn object_kind(self) -> &'static str {
        self.definition().object_kind
    }

    /// Plural resource name in URLs.
    pub const fn plural(self) -> &'static str {
        self.definition().plural
    }

    /// The member that is compared, and reverted where it drifts: `spec` or `data`.
    pub const fn member(self) -> &'static str {
        self.definition().member
    }
}

/// A set of kinds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Kinds(u8);

impl Kinds {
    pub(crate) fn set(&mut self, kind: Kind, present: bool) {
        if present {
            self.0 |= 1 << kind as u8;
        } else {
            self.0 &= !(1 << kind as u8);
        }
    }

    pub(crate) const fn has(self, kind: Kind) -> bool {
        self.0 & 1 << kind as u8 != 0
    }

    pub(crate) fn is_all(self) -> bool {
        Kind::ALL.into_iter().all(|kind| self.has(kind))
    }
}

/// Names one object on this side's API server.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    /// Its kind.
    pub kind: Kind,
    /// `metadata.namespace`.
    pub namespace: Box<str>,
    /// `metadata.name`.
    pub name: Box<str>,
}

impl Key {
    /// A key from its parts.
    pub fn new(kind: Kind, namespace: &str, name: &str) -> Self {
        Self { kind, namespace: namespace.into(), name: name.into() }
    }

    /// Path of the object, `/apis/…/namespaces/<ns>/<plural>/<name>`.
    ///
    /// Names come from a peer: the caller has checked them with [`is_dns_subdomain`], so no escaping is needed.
    pub fn path(&self) -> String {
        alloc::format!("{}/{}", self.collection_path(), self.name)
    }

    /// Path of the collection that the object is created in.
    pub fn collection_path(&self) -> String {
        alloc::format!("{}/namespaces/{}/{}", self.kind.api_path(), self.namespace, self.kind.plural())
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}/{}", self.kind.as_str(), self.namespace, self.name)
    }
}

/// Whether `name` is a valid Kubernetes object name (RFC 1123 subdomain, at most 253 characters).
pub fn is_dns_subdomain(name: &str) -> bool {
    let label = |label: &str| {
        let bytes = label.as_bytes();
        let edge = |b: &u8| b.is_ascii_lowercase() || b.is_ascii_digit();
        bytes.first().is_some_and(edge)
            && bytes.last().is_some_and(edge)
            && bytes.iter().all(|b| edge(b) || *b == b'-')
    };
    !name.is_empty() && name.len() <= 253 && name.split('.').all(label)
}

/// Whether `name` is a valid RFC 1123 label (at most 63 characters): a namespace, an agent.
pub fn is_dns_label(name: &str) -> bool {
    name.len() <= 63 && !name.contains('.') && is_dns_subdomain(name)
}

/// Identifies one outstanding request; opaque to the shell.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct Ticket {
    pub(crate) slot: u32,
    pub(crate) generation: u32,
}

/// One Kubernetes request. At most one per object is outstanding.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Request {
    /// To be handed back with the outcome.
    pub ticket: Ticket,
    /// The object it is about.
    pub key: Key,
    /// What to do.
    pub verb: Verb,
}

/// The verbs the core uses. Bodies are complete JSON.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Verb {
    /// GET the object, a quorum read (no `resourceVersion`).
    Get,
    /// POST to the collection, `fieldManager=argocd-agent`.
    Create(Vec<u8>),
    /// POST of a bare Namespace with the name of the key's namespace.
    CreateNamespace,
    /// PATCH the object with `application/json-patch+json`. The patch replaces `metadata.resourceVersion`
    /// by the version it was made for, so that a concurrent change ends in 409.
    JsonPatch(Vec<u8>),
    /// DELETE with `preconditions.uid` and background propagation.
    Delete {
        /// The only UID that may be deleted.
        uid: Box<str>,
    },
}

impl Verb {
    /// Body of [`Verb::CreateNamespace`].
    pub fn namespace_body(name: &str) -> Vec<u8> {
        let mut body = Vec::with_capacity(name.len() + 80);
        body.extend_from_slice(br#"{"apiVersion":"v1","kind":"Namespace","metadata":{"name":"#);
        crate::json::push_string(&mut body, name);
        body.extend_from_slice(b"}}");
        body
    }

    /// Body of the DELETE call, `DeleteOptions` with the UID precondition.
    pub fn delete_options(uid: &str) -> Vec<u8> {
        // A UID comes from an API server but is text all the same: escape it.
        let mut body = Vec::with_capacity(128);
        body.extend_from_slice(
            br#"{"kind":"DeleteOptions","apiVersion":"v1","propagationPolicy":"Background","preconditions":{"uid":"#,
        );
        crate::json::push_string(&mut body, uid);
        body.extend_from_slice(b"}}");
        body
    }
}

/// How a request ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// 2xx; the body is the object (for DELETE: the object with a deletionTimestamp, or a Status).
    Done(Vec<u8>),
    /// The API server answered with an error status.
    Status(Status),
    /// No answer: connection refused, reset, time-out. A write may have been applied.
    Unknown(String),
}

/// An error `Status` of the API server.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Status {
    /// HTTP status code.
    pub code: u16,
    /// `reason`, e.g. `Conflict`; may be empty.
    pub reason: String,
    /// `message`; may be empty. Never an object body.
    pub message: String,
    /// `Retry-After` (header or `details.retryAfterSeconds`).
    pub retry_after: Option<Duration>,
}

/// What an API server said about one object.
#[derive(Clone, Copy, Debug)]
pub enum Observation<'a> {
    /// The object as JSON, from a list, a watch event or a read.
    Present(&'a [u8]),
    /// A DELETED watch event with the object's last state.
    Gone(&'a [u8]),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        for good in ["a", "a-b", "a.b-c.d", "0"] {
            assert!(is_dns_subdomain(good), "{good}");
        }
        for bad in ["", "-a", "a-", "A", "a..b", "a/b", "..", "a_b", "a%2f"] {
            assert!(!is_dns_subdomain(bad), "{bad}");
        }
        assert!(!is_dns_label("a.b"));
        assert!(!is_dns_label(&"a".repeat(64)));
    }

    #[test]
    fn paths() {
        let key = Key::new(Kind::Application, "argocd", "guestbook");
        assert_eq!(key.path(), "/apis/argoproj.io/v1alpha1/namespaces/argocd/applications/guestbook");
    }

    #[test]
    fn kinds_are_found_by_their_word() {
        for kind in Kind::ALL {
            assert_eq!(Kind::parse(kind.as_str()), Some(kind));
        }
        assert_eq!(Kind::parse("Secret"), None);
        let key = Key::new(Kind::Repository, "argocd", "repo");
        assert_eq!(key.path(), "/api/v1/namespaces/argocd/secrets/repo");
    }
}
