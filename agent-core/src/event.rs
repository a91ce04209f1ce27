//! Targets, types, ids and the bodies of control events (docs/protocol.md, "Events", "Ids", "Resync").

use alloc::borrow::Cow;
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

use crate::checksum::{self, ChecksumError, Subtree};
use crate::json::{self, ObjectWriter};
use crate::object::{NAMESPACE_REMAPPED, ObjectError, ObjectView};
use crate::request::Kind;

macro_rules! words {
    ($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $word:expr,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        pub enum $name { $($(#[$variant_doc])* $variant,)* }

        impl $name {
            /// Every value, in declaration order.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The word on the wire.
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $word,)* }
            }

            /// Inverse of `as_str`; case counts.
            pub fn parse(word: &str) -> Option<Self> {
                Self::ALL.iter().copied().find(|known| known.as_str() == word)
            }
        }
    };
}

words! {
    /// What an event is about: the CloudEvents attribute `dataschema`.
    Target {
        /// An Application.
        Application = "application",
        /// An AppProject.
        AppProject = "appproject",
        /// A repository Secret.
        Repository = "repository",
        /// The ConfigMap with GPG keys.
        GpgKey = "gpgkey",
        /// A live Kubernetes request or its response.
        Resource = "resource",
        /// A Redis request or its response.
        Redis = "redis",
        /// Resynchronisation.
        ResourceResync = "resourceResync",
        /// Counts from the cluster cache.
        ClusterCacheInfoUpdate = "clusterCacheInfoUpdate",
        /// A request for container logs.
        ContainerLog = "containerlog",
        /// A request for a terminal.
        Terminal = "terminal",
        /// A sign of life.
        Heartbeat = "heartbeat",
        /// An acknowledgement.
        EventProcessed = "eventProcessed",
        /// An ApplicationSet, on the replication stream only.
        ApplicationSet = "applicationset",
    }
}

impl Target {
    /// What an event about an object of this kind says.
    pub const fn of(kind: Kind) -> Self {
        match kind {
            Kind::Application => Self::Application,
            Kind::AppProject => Self::AppProject,
            Kind::Repository => Self::Repository,
            Kind::GpgKey => Self::GpgKey,
        }
    }

    /// Inverse of [`Target::of`]; `None`: it is not about an object that is kept equal on both sides.
    pub fn kind(self) -> Option<Kind> {
        Kind::ALL.into_iter().find(|kind| Self::of(*kind) == self)
    }
}

words! {
    /// The event types with a name of their own: the CloudEvents attribute `type`.
    Type {
        /// An object exists.
        Create = "io.argoproj.argocd-agent.event.create",
        /// An object has this spec.
        SpecUpdate = "io.argoproj.argocd-agent.event.spec-update",
        /// An object is gone.
        Delete = "io.argoproj.argocd-agent.event.delete",
        /// An object has this status.
        StatusUpdate = "io.argoproj.argocd-agent.event.status-update",
        /// An operation was asked for.
        SetOperation = "io.argoproj.argocd-agent.event.set-operation",
        /// The running operation is to end.
        TerminateOperation = "io.argoproj.argocd-agent.event.terminate-operation",
        /// Something went wrong on the agent.
        Error = "io.argoproj.argocd-agent.event.error",
        /// An acknowledgement.
        Processed = "io.argoproj.argocd-agent.event.processed",
        /// Counts from the cluster cache.
        ClusterCacheInfoUpdate = "io.argoproj.argocd-agent.event.cluster-cache-info-update",
        /// A sign of life.
        Ping = "io.argoproj.argocd-agent.event.ping",
        /// Asks the source for what it tracks.
        RequestSyncedResourceList = "io.argoproj.argocd-agent.event.request-synced-resource-list",
        /// One tracked object.
        ResponseSyncedResource = "io.argoproj.argocd-agent.event.response-synced-resource",
        /// Asks the source for an object if its checksum differs.
        RequestUpdate = "io.argoproj.argocd-agent.event.request-update",
        /// Asks the peer to check everything it has.
        RequestResourceResync = "io.argoproj.argocd-agent.event.request-resource-resync",
        /// One digest over everything that the sender has of the peer: equal digests settle a resync round. Between our halves only.
        ResyncDigest = "io.argoproj.argocd-agent.event.resync-digest",
        /// Answer to a live request.
        Response = "io.argoproj.argocd-agent.event.response",
        /// Opens a terminal.
        TerminalRequest = "io.argoproj.argocd-agent.event.terminal-request",
        /// A Redis request.
        RedisRequest = "io.argoproj.argocd-agent.event.redis-request",
        /// A Redis response.
        RedisResponse = "io.argoproj.argocd-agent.event.redis-response",
    }
}

/// A type as received.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EventType<'a> {
    /// A type with a name of its own.
    Known(Type),
    /// Anything else; live requests carry their HTTP method here.
    Other(&'a str),
}

impl<'a> EventType<'a> {
    /// Sorts a wire word.
    pub fn parse(word: &'a str) -> Self {
        Type::parse(word).map_or(Self::Other(word), Self::Known)
    }

    /// The word on the wire.
    pub const fn as_str(&self) -> &'a str {
        match self {
            Self::Known(known) => known.as_str(),
            Self::Other(word) => word,
        }
    }
}

/// `resourceid` of an event about an object: `<name>_<uid>`.
pub fn resource_id(name: &str, uid: &str) -> String {
    [name, "_", uid].concat()
}

/// `eventid` of an event about an object: `<name>_<uid>_<rv>_<n>`, with `n` from the content, so that it changes
/// when and only when the content does. The reference has no fourth part and takes ids as opaque.
pub fn event_id(name: &str, uid: &str, resource_version: &str, content: &[u8]) -> String {
    use fmt::Write;
    let hash = (checksum::fingerprint(content) >> 32) as u32;
    let mut id = String::with_capacity(name.len() + uid.len() + resource_version.len() + 11);
    // Writing to a String cannot fail.
    let _ = write!(id, "{name}_{uid}_{resource_version}_{hash:08x}");
    id
}

/// `eventid` of a resync delete, which stands for an object that no longer exists: `<name>_<uid>_`.
pub fn synthetic_event_id(name: &str, uid: &str) -> String {
    [name, "_", uid, "_"].concat()
}

/// Whether an id has an empty resourceVersion part: the event was made by resync, not by a watch.
///
/// Neither object names nor UIDs contain an underscore.
pub fn is_synthetic(event_id: &str) -> bool {
    event_id.split('_').nth(2) == Some("")
}

/// Why a body could not be read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BodyError {
    /// Not JSON, or not an object.
    Json(json::Error),
    /// A field that has the wrong type.
    Field(&'static str),
}

impl fmt::Display for BodyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Json(error) => error.fmt(f),
            Self::Field(name) => write!(f, "field {name} has the wrong type"),
        }
    }
}

impl core::error::Error for BodyError {}

impl From<json::Error> for BodyError {
    fn from(error: json::Error) -> Self {
        Self::Json(error)
    }
}

/// Body of `response-synced-resource`.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct SyncedResource<'a> {
    /// Name of the object.
    pub name: Cow<'a, str>,
    /// Its namespace; left out where empty.
    pub namespace: Cow<'a, str>,
    /// Its tracked UID.
    pub uid: Cow<'a, str>,
    /// Its kind word.
    pub kind: Cow<'a, str>,
}

impl<'a> SyncedResource<'a> {
    /// The body as JSON.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(160);
        let mut writer = ObjectWriter::new(&mut out);
        self.write(&mut writer);
        writer.end();
        out
    }

    /// Reads a body; what is absent is empty.
    pub fn decode(body: &'a [u8]) -> Result<Self, BodyError> {
        let [name, namespace, uid, kind] = strings(body, ["name", "namespace", "uid", "kind"])?;
        Ok(Self { name, namespace, uid, kind })
    }

    fn write(&self, writer: &mut ObjectWriter<'_>) {
        writer.string("name", &self.name);
        if !self.namespace.is_empty() {
            writer.string("namespace", &self.namespace);
        }
        writer.string("uid", &self.uid);
        writer.string("kind", &self.kind);
    }
}

/// Body of `request-update`.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RequestUpdate<'a> {
    /// The object.
    pub resource: SyncedResource<'a>,
    /// Checksum of what the sender has. Nothing equals `None`.
    pub checksum: Option<Vec<u8>>,
}

impl<'a> RequestUpdate<'a> {
    /// The request for an object as the API server returned it.
    ///
    /// `peer_namespace` is needed where the agent moved the object to another namespace.
    pub fn of_object(
        kind: &'a str,
        subtree: Subtree,
        object: &'a [u8],
        peer_namespace: &'a str,
    ) -> Result<Self, RequestUpdateError> {
        let view = ObjectView::parse(object)?;
        let uid = view.source_uid().ok_or(RequestUpdateError::NoSourceUid)?;
        let namespace = if view.annotation(NAMESPACE_REMAPPED).is_none() {
            view.namespace
        } else if peer_namespace.is_empty() {
            return Err(RequestUpdateError::NoPeerNamespace);
        } else {
            Cow::Borrowed(peer_namespace)
        };
        let checksum = checksum::subtree_checksum(subtree, object)?;
        Ok(Self {
            resource: SyncedResource { name: view.name, namespace, uid, kind: Cow::Borrowed(kind) },
            checksum: Some(checksum.into()),
        })
    }

    /// The body as JSON.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(224);
        let mut writer = ObjectWriter::new(&mut out);
        self.resource.write(&mut writer);
        push_bytes(writer.key("checksum"), self.checksum.as_deref());
        writer.end();
        out
    }

    /// Reads a body; what is absent is empty.
    pub fn decode(body: &'a [u8]) -> Result<Self, BodyError> {
        Ok(Self { resource: SyncedResource::decode(body)?, checksum: bytes_field(body, "checksum")? })
    }
}

/// Why no `request-update` can be made for an object.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RequestUpdateError {
    /// Not a Kubernetes object.
    Object(ObjectError),
    /// The object did not come from a source.
    NoSourceUid,
    /// The namespace was changed on the way and the peer's is not known.
    NoPeerNamespace,
    /// The object has no checksum.
    Checksum(ChecksumError),
}

impl fmt::Display for RequestUpdateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Object(error) => error.fmt(f),
            Self::NoSourceUid => f.write_str("the object has no source UID"),
            Self::NoPeerNamespace => f.write_str("the peer's namespace is not known"),
            Self::Checksum(error) => error.fmt(f),
        }
    }
}

impl core::error::Error for RequestUpdateError {}

impl From<ObjectError> for RequestUpdateError {
    fn from(error: ObjectError) -> Self {
        Self::Object(error)
    }
}

impl From<ChecksumError> for RequestUpdateError {
    fn from(error: ChecksumError) -> Self {
        Self::Checksum(error)
    }
}

/// Body of `request-synced-resource-list`.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct SyncedResourceList {
    /// Checksum of what the sender tracks. `None` says that it tracks nothing, an empty one that it keeps no
    /// list for this peer.
    pub checksum: Option<Vec<u8>>,
}

impl SyncedResourceList {
    /// The body as JSON.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(64);
        let mut writer = ObjectWriter::new(&mut out);
        push_bytes(writer.key("checksum"), self.checksum.as_deref());
        writer.end();
        out
    }

    /// Reads a body.
    pub fn decode(body: &[u8]) -> Result<Self, BodyError> {
        Ok(Self { checksum: bytes_field(body, "checksum")? })
    }
}

/// Body of `resync-digest`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ResyncDigest {
    /// Sum of the fingerprints of the objects.
    pub digest: u64,
    /// How many there are.
    pub count: usize,
}

impl ResyncDigest {
    /// Counts one object in.
    pub fn add(&mut self, fingerprint: u64) {
        self.digest = self.digest.wrapping_add(fingerprint);
        self.count += 1;
    }

    /// The body as JSON.
    pub fn encode(&self) -> Vec<u8> {
        alloc::format!(r#"{{"digest":"{:016x}","count":"{}"}}"#, self.digest, self.count).into_bytes()
    }

    /// Reads a body.
    pub fn decode(body: &[u8]) -> Result<Self, BodyError> {
        let [digest, count] = strings(body, ["digest", "count"])?;
        let digest = u64::from_str_radix(&digest, 16).map_err(|_| BodyError::Field("digest"))?;
        let count = count.parse().map_err(|_| BodyError::Field("count"))?;
        Ok(Self { digest, count })
    }
}

/// Body of `request-resource-resync`.
pub const RESOURCE_RESYNC_BODY: &[u8] = b"{}";

/// Body of `error`.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ErrorBody<'a> {
    /// Name of the object.
    pub resource_name: Cow<'a, str>,
    /// Its namespace on the agent.
    pub resource_namespace: Cow<'a, str>,
    /// What went wrong, for a person.
    pub message: Cow<'a, str>,
}

impl<'a> ErrorBody<'a> {
    /// The body as JSON.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(96 + self.message.len());
        let mut writer = ObjectWriter::new(&mut out);
        writer.string("resourceName", &self.resource_name);
        writer.string("resourceNamespace", &self.resource_namespace);
        writer.string("message", &self.message);
        writer.end();
        out
    }

    /// Reads a body; what is absent is empty.
    pub fn decode(body: &'a [u8]) -> Result<Self, BodyError> {
        let [resource_name, resource_namespace, message] =
            strings(body, ["resourceName", "resourceNamespace", "message"])?;
        Ok(Self { resource_name, resource_namespace, message })
    }
}

/// Reads string members, leniently as the reference does: case of the keys does not count, `null` is absent.
/// An empty body reads as one without members.
fn strings<'a, const N: usize>(
    body: &'a [u8],
    names: [&'static str; N],
) -> Result<[Cow<'a, str>; N], BodyError> {
    let mut values = [const { Cow::Borrowed("") }; N];
    if body.is_empty() {
        return Ok(values);
    }
    let mut outcome = Ok(());
    json::visit_members(body, &mut |key, value| {
        let Some(index) = names.iter().position(|name| key.eq_ignore_ascii_case(name)) else { return };
        let Some(value) = json::present(value) else { return };
        match json::string(value) {
            Some(text) => values[index] = text,
            None => outcome = Err(BodyError::Field(names[index])),
        }
    })?;
    outcome.map(|()| values)
}

fn bytes_field(body: &[u8], name: &'static str) -> Result<Option<Vec<u8>>, BodyError> {
    let mut found = None;
    if body.is_empty() {
        return Ok(found);
    }
    let mut outcome = Ok(());
    json::visit_members(body, &mut |key, value| {
        if !key.eq_ignore_ascii_case(name) {
            return;
        }
        match json::present(value) {
            None => found = None,
            Some(value) => match json::string(value).and_then(|text| base64_decode(text.as_bytes())) {
                Some(bytes) => found = Some(bytes),
                None => outcome = Err(BodyError::Field(name)),
            },
        }
    })?;
    outcome.map(|()| found)
}

fn push_bytes(out: &mut Vec<u8>, bytes: Option<&[u8]>) {
    match bytes {
        None => out.extend_from_slice(b"null"),
        Some(bytes) => {
            out.push(b'"');
            base64_encode(bytes, out);
            out.push(b'"');
        }
    }
}

const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// Appends standard base64 with padding.
pub fn base64_encode(bytes: &[u8], out: &mut Vec<u8>) {
    for chunk in bytes.chunks(3) {
        let bits =
            (0..3).fold(0u32, |bits, index| bits << 8 | u32::from(chunk.get(index).copied().unwrap_or(0)));
        for index in 0..4 {
            let sextet = (bits >> (18 - 6 * index) & 0x3f) as usize;
            out.push(if index <= chunk.len() { ALPHABET[sextet] } else { b'=' });
        }
    }
}

/// Reads standard base64 with padding; line breaks are skipped, as in the reference.
pub fn base64_decode(text: &[u8]) -> Option<Vec<u8>> {
    let mut out = Vec::with_capacity(text.len() / 4 * 3);
    let (mut bits, mut sextets, mut padding) = (0u32, 0, 0);
    for byte in text.iter().copied().filter(|byte| !matches!(byte, b'\r' | b'\n')) {
        let value = match byte {
            b'A'..=b'Z' => byte - b'A',
            b'a'..=b'z' => byte - b'a' + 26,
            b'0'..=b'9' => byte - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            b'=' if sextets >= 2 && padding < 2 => {
                padding += 1;
                0
            }
            _ => return None,
        };
        // Nothing may follow the padding.
        if padding > 0 && byte != b'=' {
            return None;
        }
        bits = bits << 6 | u32::from(value);
        sextets += 1;
        if sextets == 4 {
            out.extend_from_slice(&bits.to_be_bytes()[1..4 - padding]);
            (bits, sextets) = (0, 0);
        }
    }
    (sextets == 0).then_some(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rand::Rng;

    #[test]
    fn words() {
        for target in Target::ALL {
            assert_eq!(Target::parse(target.as_str()), Some(*target));
        }
        for known in Type::ALL {
            assert_eq!(EventType::parse(known.as_str()), EventType::Known(*known));
            assert!(known.as_str().starts_with("io.argoproj.argocd-agent.event."));
        }
        assert_eq!(Target::parse("Application"), None);
        assert_eq!(EventType::parse("GET"), EventType::Other("GET"));
        assert_eq!(EventType::parse("GET").as_str(), "GET");
    }

    #[test]
    fn ids() {
        assert_eq!(resource_id("guestbook", "u1"), "guestbook_u1");
        let id = event_id("guestbook", "u1", "42", b"{}");
        assert_eq!(id, "guestbook_u1_42_44136fa3");
        assert_eq!(id, event_id("guestbook", "u1", "42", b"{}"));
        assert_ne!(id, event_id("guestbook", "u1", "42", b"{ }"));
        assert!(!is_synthetic(&id));
        for synthetic in [synthetic_event_id("a", "u").as_str(), "a__", "a_u__0badcafe"] {
            assert!(is_synthetic(synthetic), "{synthetic}");
        }
        for other in ["", "a", "a_u", "a_u_1", "0d4530e2-b0b0-4b8f-afac-c5f9648c4bae"] {
            assert!(!is_synthetic(other), "{other}");
        }
    }

    #[test]
    fn base64() {
        let mut rng = Rng::new(5);
        for length in 0..64 {
            let bytes: Vec<u8> = (0..length).map(|_| rng.next_u64() as u8).collect();
            let mut text = Vec::new();
            base64_encode(&bytes, &mut text);
            assert_eq!(text.len() % 4, 0);
            assert_eq!(base64_decode(&text), Some(bytes));
        }
        assert_eq!(base64_decode(b"AAEC\r\n/w==\n"), Some(alloc::vec![0, 1, 2, 255]));
        for bad in
            ["A", "AA", "AAA", "A===", "AA=A", "AA==AAAA", "AA==A", "====", "AA=", "A-==", "AAAA=", "AA= ="]
        {
            assert_eq!(base64_decode(bad.as_bytes()), None, "{bad}");
        }
    }

    #[test]
    fn bodies() {
        let resource = SyncedResource {
            name: "a\"".into(),
            namespace: "".into(),
            uid: "u".into(),
            kind: "Application".into(),
        };
        assert_eq!(resource.encode(), br#"{"name":"a\"","uid":"u","kind":"Application"}"#);
        assert_eq!(SyncedResource::decode(&resource.encode()), Ok(resource.clone()));
        let request = RequestUpdate { resource, checksum: Some(alloc::vec![0; 32]) };
        assert_eq!(RequestUpdate::decode(&request.encode()), Ok(request.clone()));
        let none = RequestUpdate { checksum: None, ..request };
        assert!(none.encode().ends_with(br#""checksum":null}"#));
        assert_eq!(RequestUpdate::decode(&none.encode()), Ok(none.clone()));

        for checksum in [None, Some(Vec::new()), Some(alloc::vec![7; 32])] {
            let list = SyncedResourceList { checksum };
            assert_eq!(SyncedResourceList::decode(&list.encode()), Ok(list.clone()));
        }
        assert_eq!(SyncedResourceList { checksum: Some(Vec::new()) }.encode(), br#"{"checksum":""}"#);
        // Absent, null, other case, unknown keys, nothing at all.
        for lenient in ["{}", r#"{"checksum":null,"x":1}"#, ""] {
            assert_eq!(SyncedResourceList::decode(lenient.as_bytes()), Ok(SyncedResourceList::default()));
        }
        let other_case = SyncedResource::decode(br#"{"NAME":"n","uid":null}"#).expect("lenient");
        assert_eq!(other_case, SyncedResource { name: "n".into(), ..SyncedResource::default() });

        assert_eq!(SyncedResource::decode(br#"{"uid":1}"#), Err(BodyError::Field("uid")));
        assert_eq!(SyncedResourceList::decode(br#"{"checksum":"?"}"#), Err(BodyError::Field("checksum")));
        assert_eq!(RequestUpdate::decode(br#"{"checksum":[1]}"#), Err(BodyError::Field("checksum")));
        assert!(matches!(ErrorBody::decode(b"[]"), Err(BodyError::Json(_))));
        let error = ErrorBody { message: "no \u{1f}".into(), ..ErrorBody::default() };
        assert_eq!(ErrorBody::decode(&error.encode()), Ok(error.clone()));
    }

    #[test]
    fn request_update_needs_a_source() {
        let of = |object: &'static str, peer| {
            RequestUpdate::of_object("Application", Subtree::Spec, object.as_bytes(), peer)
        };
        assert_eq!(of(r#"{"spec":{}}"#, ""), Err(RequestUpdateError::NoSourceUid));
        let remapped = r#"{"metadata":{"name":"a","namespace":"n","annotations":{
            "argocd.argoproj.io/source-uid":"s","argocd.argoproj.io/namespace-remapped":"true"}},"spec":{}}"#;
        assert_eq!(of(remapped, ""), Err(RequestUpdateError::NoPeerNamespace));
        assert_eq!(of(remapped, "hub").expect("complete").resource.namespace, "hub");
    }
}
