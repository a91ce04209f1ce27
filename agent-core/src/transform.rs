//! What an object looks like on the other side: pure functions from JSON bytes to JSON bytes.
//!
//! Bodies are edited by splicing; what no rule names passes through untouched.

use alloc::borrow::Cow;
use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::vec::Vec;

use crate::json::{self, ObjectWriter, push_string};
use crate::object::{self, ObjectView};
use crate::peer::Mapping;
use crate::project;

/// The identities stamped on a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp<'a> {
    /// `source-uid`; empty: none.
    pub source_uid: &'a str,
    /// `principal-uid`; empty: none.
    pub principal_uid: &'a str,
}

/// A body could not be built because the object is not what its kind requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed;

/// The spec of a managed Application as it stands on its site: destination `in-cluster`, no server.
///
/// `destination.namespace` and every other member stay. Follows docs/protocol.md, "Rewriting".
pub fn site_spec(spec: &[u8]) -> Result<Vec<u8>, Malformed> {
    let members = json::members(spec).map_err(|_| Malformed)?;
    let mut out = Vec::with_capacity(spec.len() + 32);
    let mut object = ObjectWriter::new(&mut out);
    let mut destination_written = false;
    for (name, value) in &members {
        if name == "destination" {
            if !destination_written {
                site_destination(object.key("destination"), value)?;
                destination_written = true;
            }
        } else {
            object.raw(name, value);
        }
    }
    if !destination_written {
        site_destination(object.key("destination"), b"{}")?;
    }
    object.end();
    Ok(out)
}

fn site_destination(out: &mut Vec<u8>, destination: &[u8]) -> Result<(), Malformed> {
    let destination = json::present(destination).unwrap_or(b"{}");
    with_texts(out, destination, &[("name", IN_CLUSTER)], &["server"])
}

/// Body of the POST that brings `incoming` to its site.
///
/// Labels, finalizers, operation, status and unknown top-level members go as they are; of the metadata only what describes the
/// object itself goes, never what its own API server wrote (uid, versions, owner references, managed fields).
pub fn create_body(
    incoming: &[u8],
    api_version: &str,
    kind: &str,
    namespace: &str,
    stamp: Stamp<'_>,
) -> Result<Vec<u8>, Malformed> {
    let view = ObjectView::parse(incoming).map_err(|_| Malformed)?;
    let spec = site_spec(view.spec.map_or(b"{}", |spec| spec))?;
    let mut annotations = string_map(view.annotations)?;
    annotations.remove(object::LAST_APPLIED);
    if !stamp.principal_uid.is_empty() {
        annotations.insert(object::PRINCIPAL_UID.into(), stamp.principal_uid.into());
    }
    if annotations.get(object::SOURCE_UID).is_none_or(|uid| uid.is_empty()) {
        annotations.insert(object::SOURCE_UID.into(), stamp.source_uid.into());
    }
    copy_body(&view, incoming, api_version, kind, namespace, &annotations, &spec, CopyStatus::AsIs)
}

/// What `--on-application-recreate` does to an Application that was deleted on the site and comes back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum OnRecreate {
    /// Come back as it was.
    #[default]
    Ignore,
    /// Without `status.operationState`, so that auto-sync triggers.
    ClearStatus,
    /// With a sync operation.
    Resync,
}

/// Body of the POST that brings back a managed object which somebody deleted on the site.
///
/// `last` is its last state, `spec` the last word of the hub about its spec (`None`: as it was). The identities are put back as well;
/// where the stamp names no principal, the copy bears none.
pub fn recreate_body(
    last: &[u8],
    api_version: &str,
    kind: &str,
    spec: Option<&[u8]>,
    stamp: Stamp<'_>,
    on_recreate: OnRecreate,
) -> Result<Vec<u8>, Malformed> {
    let view = ObjectView::parse(last).map_err(|_| Malformed)?;
    let mut annotations = string_map(view.annotations)?;
    for (name, uid) in [(object::SOURCE_UID, stamp.source_uid), (object::PRINCIPAL_UID, stamp.principal_uid)]
    {
        if uid.is_empty() {
            annotations.remove(name);
        } else {
            annotations.insert(name.into(), uid.into());
        }
    }
    let spec = spec.or(view.spec).ok_or(Malformed)?;
    let status = match on_recreate {
        OnRecreate::Ignore => CopyStatus::AsIs,
        OnRecreate::ClearStatus => CopyStatus::WithoutOperationState,
        OnRecreate::Resync => CopyStatus::WithSync,
    };
    copy_body(&view, last, api_version, kind, &view.namespace, &annotations, spec, status)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum CopyStatus {
    AsIs,
    WithoutOperationState,
    WithSync,
}

#[allow(clippy::too_many_arguments)] // One body, seven independent parts; a struct would only rename them.
fn copy_body(
    view: &ObjectView<'_>,
    bytes: &[u8],
    api_version: &str,
    kind: &str,
    namespace: &str,
    annotations: &StringMap<'_>,
    spec: &[u8],
    status: CopyStatus,
) -> Result<Vec<u8>, Malformed> {
    let mut out = Vec::with_capacity(bytes.len() + 256);
    let mut object = ObjectWriter::new(&mut out);
    object.string("apiVersion", api_version);
    object.string("kind", kind);
    push_copy_metadata(object.key("metadata"), view, namespace, annotations);
    object.raw("spec", spec);
    for (name, value) in json::members(bytes).map_err(|_| Malformed)? {
        match &*name {
            "apiVersion" | "kind" | "metadata" | "spec" => {}
            "operation" if status == CopyStatus::WithSync => {}
            "status" if status == CopyStatus::WithoutOperationState => {
                let kept = json::remove_member(value, "operationState").map_err(|_| Malformed)?;
                object.raw("status", &kept);
            }
            // A null member means "absent" and may be refused by the schema.
            _ if value == b"null" => {}
            _ => object.key(&name).extend_from_slice(value),
        }
    }
    if status == CopyStatus::WithSync {
        object.raw("operation", br#"{"sync":{}}"#);
    }
    object.end();
    Ok(out)
}

/// `metadata` of a copy: what describes the object itself, nothing that its own API server wrote.
pub(crate) fn push_copy_metadata(
    out: &mut Vec<u8>,
    view: &ObjectView<'_>,
    namespace: &str,
    annotations: &StringMap<'_>,
) {
    let mut metadata = ObjectWriter::new(out);
    metadata.string("name", &view.name);
    metadata.string("namespace", namespace);
    if let Some(labels) = view.labels {
        metadata.raw("labels", labels);
    }
    if !annotations.is_empty() {
        push_string_map(metadata.key("annotations"), annotations);
    }
    if let Some(finalizers) = view.finalizers {
        metadata.raw("finalizers", finalizers);
    }
    metadata.end();
}

/// The JSON Patch that makes `existing` what the hub says, or `None` if nothing differs.
///
/// Labels, annotations and finalizers are replaced by the hub's; the local refresh request and the identities survive.
/// The status is never touched. An operation is only added, never removed, and not while the local one is Terminating.
pub fn update_patch(
    existing: &ObjectView<'_>,
    incoming: &ObjectView<'_>,
    spec: &[u8],
    stamp: Stamp<'_>,
) -> Result<Option<Vec<u8>>, Malformed> {
    let mut patch = Patch::new(&existing.resource_version);
    let current = string_map(existing.annotations)?;
    let mut desired = string_map(incoming.annotations)?;
    if let Some(refresh) = current.get(object::REFRESH) {
        desired.insert(object::REFRESH.into(), refresh.clone());
    }
    for (name, uid) in [(object::SOURCE_UID, stamp.source_uid), (object::PRINCIPAL_UID, stamp.principal_uid)]
    {
        let uid = if uid.is_empty() { current.get(name).cloned() } else { Some(uid.into()) };
        match uid {
            Some(uid) if !uid.is_empty() => desired.insert(name.into(), uid),
            _ => None,
        };
    }
    patch.string_map("/metadata/annotations", &current, &desired);
    patch.string_map("/metadata/labels", &string_map(existing.labels)?, &string_map(incoming.labels)?);
    let finalizers =
        |view: &ObjectView<'_>| view.finalizers.map(|list| list.to_vec()).filter(|list| list != b"[]");
    let (have, want) = (finalizers(existing), finalizers(incoming));
    if have != want {
        match want {
            Some(list) => patch.add("/metadata/finalizers", &list),
            None => patch.remove("/metadata/finalizers"),
        }
    }
    let same_spec = existing.spec.is_some_and(|current| json::same(current, spec));
    if !same_spec {
        patch.add("/spec", spec);
    }
    if let Some(operation) = incoming.operation
        && existing.operation_phase().as_deref() != Some(TERMINATING)
        && existing.operation.is_none_or(|current| !json::same(current, operation))
    {
        patch.add("/operation", operation);
    }
    Ok(patch.finish())
}

/// What the hub's copy has, as far as the status patch depends on it.
#[derive(Clone, Copy, Debug, Default)]
pub struct HubCopy<'a> {
    /// `metadata.resourceVersion` that the patch is made for.
    pub resource_version: &'a str,
    /// Whether `status` exists.
    pub has_status: bool,
    /// Whether `operation` exists.
    pub has_operation: bool,
    /// Whether `metadata.annotations` exists.
    pub has_annotations: bool,
    /// Whether the refresh annotation exists.
    pub has_refresh: bool,
}

/// The JSON Patch that brings a managed agent's status to the hub.
///
/// `keep_operation` and `keep_refresh` protect what a user of the hub asked for and the agent has not acknowledged.
pub fn status_patch(
    hub: HubCopy<'_>,
    status: Option<&[u8]>,
    operation: Option<&[u8]>,
    refresh: Option<&str>,
    keep_operation: bool,
    keep_refresh: bool,
) -> Vec<u8> {
    let mut patch = Patch::new(hub.resource_version);
    match status {
        Some(status) => patch.add("/status", status),
        None if hub.has_status => patch.remove("/status"),
        None => {}
    }
    if !keep_operation {
        match operation {
            Some(operation) => patch.add("/operation", operation),
            None if hub.has_operation => patch.remove("/operation"),
            None => {}
        }
    }
    if !keep_refresh {
        const PATH: &str = "/metadata/annotations/argocd.argoproj.io~1refresh";
        match refresh {
            Some(refresh) if !hub.has_refresh => {
                if !hub.has_annotations {
                    patch.add("/metadata/annotations", b"{}");
                }
                let mut value = Vec::new();
                push_string(&mut value, refresh);
                patch.add(PATH, &value);
            }
            None if hub.has_refresh => patch.remove(PATH),
            _ => {}
        }
    }
    patch.finish_always()
}

/// The status that an agent's error report becomes on the hub: Degraded, one condition of type `AgentError`.
pub fn error_status(agent: &str, message: &str) -> Vec<u8> {
    let mut out = Vec::with_capacity(message.len() + 256);
    let mut text = String::from("Error occurred on cluster managed by agent ");
    text.push_str(agent);
    text.push_str(": ");
    text.push_str(message);
    out.extend_from_slice(br#"{"conditions":[{"type":"AgentError","message":"#);
    push_string(&mut out, &text);
    // The schema requires these members of `sync` once it is there.
    out.extend_from_slice(
        br#"}],"health":{"status":"Degraded"},"sync":{"status":"","comparedTo":{"destination":{},"source":{"repoURL":""}}}}"#,
    );
    out
}

/// Which members of `metadata` and of the object a payload to the peer leaves out.
#[derive(Clone, Copy, Debug, Default)]
pub struct Strip {
    /// Drop `operation`: only its own event carries it to an agent.
    pub operation: bool,
    /// Drop `metadata.resourceVersion`: a Go agent discards updates whose number equals one of its own.
    pub resource_version: bool,
    /// Drop the refresh annotation: it has been delivered, and would be a second request.
    pub refresh: bool,
}

/// The object as a payload for the peer: as read, without `managedFields` and what `strip` names.
///
/// `operation` replaces the object's own (a captured latch).
pub fn payload(object: &[u8], strip: Strip, operation: Option<&[u8]>) -> Result<Vec<u8>, Malformed> {
    let mut out = Vec::with_capacity(object.len());
    let mut writer = ObjectWriter::new(&mut out);
    for (name, value) in json::members(object).map_err(|_| Malformed)? {
        match &*name {
            "metadata" => {
                let mut metadata = ObjectWriter::new(writer.key("metadata"));
                for (name, value) in json::members(value).map_err(|_| Malformed)? {
                    match &*name {
                        "managedFields" => {}
                        "resourceVersion" if strip.resource_version => {}
                        "annotations" if strip.refresh && value != b"null" => {
                            let kept = json::remove_member(value, object::REFRESH).map_err(|_| Malformed)?;
                            metadata.raw("annotations", &kept);
                        }
                        _ => metadata.key(&name).extend_from_slice(value),
                    }
                }
                metadata.end();
            }
            "operation" if strip.operation || operation.is_some() => {}
            _ => writer.key(&name).extend_from_slice(value),
        }
    }
    if let Some(operation) = operation {
        writer.raw("operation", operation);
    }
    writer.end();
    Ok(out)
}

/// The payload of a delete when the object itself is no longer at hand: its name and UIDs.
pub fn tombstone(namespace: &str, name: &str, uid: &str, source_uid: Option<&str>) -> Vec<u8> {
    let mut out = Vec::with_capacity(160);
    let mut object = ObjectWriter::new(&mut out);
    let mut metadata = ObjectWriter::new(object.key("metadata"));
    metadata.string("name", name);
    metadata.string("namespace", namespace);
    metadata.string("uid", uid);
    if let Some(source_uid) = source_uid {
        let mut annotations = ObjectWriter::new(metadata.key("annotations"));
        annotations.string(object::SOURCE_UID, source_uid);
        annotations.end();
    }
    metadata.end();
    object.end();
    out
}

pub(crate) type StringMap<'a> = BTreeMap<Cow<'a, str>, Cow<'a, str>>;

/// A map of strings such as labels; absent is empty. A value that is no string is malformed: the API server knows none.
pub(crate) fn string_map(raw: Option<&[u8]>) -> Result<StringMap<'_>, Malformed> {
    let Some(raw) = raw else { return Ok(BTreeMap::new()) };
    let mut map = BTreeMap::new();
    for (name, value) in json::members(raw).map_err(|_| Malformed)? {
        if value != b"null" {
            map.insert(name, json::string(value).ok_or(Malformed)?);
        }
    }
    Ok(map)
}

fn push_string_map(out: &mut Vec<u8>, map: &StringMap<'_>) {
    let mut object = ObjectWriter::new(out);
    for (name, value) in map {
        object.string(name, value);
    }
    object.end();
}

/// A JSON Patch that is made for one resourceVersion: a concurrent change ends in 409 instead of being overwritten.
pub(crate) struct Patch {
    out: Vec<u8>,
    operations: usize,
}

impl Patch {
    pub(crate) fn new(resource_version: &str) -> Self {
        let mut out = Vec::with_capacity(256);
        out.extend_from_slice(br#"[{"op":"replace","path":"/metadata/resourceVersion","value":"#);
        push_string(&mut out, resource_version);
        out.push(b'}');
        Self { out, operations: 0 }
    }

    /// RFC 6902 `add`: for an existing member it replaces.
    pub(crate) fn add(&mut self, path: &str, value: &[u8]) {
        self.operations += 1;
        self.out.extend_from_slice(br#",{"op":"add","path":"#);
        push_string(&mut self.out, path);
        self.out.extend_from_slice(br#","value":"#);
        self.out.extend_from_slice(value);
        self.out.push(b'}');
    }

    pub(crate) fn remove(&mut self, path: &str) {
        self.operations += 1;
        self.out.extend_from_slice(br#",{"op":"remove","path":"#);
        push_string(&mut self.out, path);
        self.out.push(b'}');
    }

    pub(crate) fn string_map(&mut self, path: &str, current: &StringMap<'_>, desired: &StringMap<'_>) {
        if current == desired {
            return;
        }
        if desired.is_empty() {
            self.remove(path);
        } else {
            let mut value = Vec::new();
            push_string_map(&mut value, desired);
            self.add(path, &value);
        }
    }

    pub(crate) fn finish(self) -> Option<Vec<u8>> {
        (self.operations > 0).then(|| self.finish_always())
    }

    pub(crate) fn finish_always(mut self) -> Vec<u8> {
        self.out.push(b']');
        self.out
    }
}

/// Where a managed Application lives on its site, and whether that is another namespace than the hub says.
///
/// With destination mapping namespaces are the same on both sides, except the hub's own: its Applications go to the site's own
/// namespace, and bear a mark ([`object::NAMESPACE_REMAPPED`]) so that the hub finds them again. `principal_namespace` is empty
/// while it is not known; then nothing is remapped.
pub fn site_namespace<'a>(
    mapping: Mapping,
    said: &'a str,
    principal_namespace: &str,
    own: &'a str,
) -> (&'a str, bool) {
    match mapping {
        Mapping::Namespace => (own, false),
        Mapping::Destination if !said.is_empty() && said == principal_namespace && said != own => (own, true),
        Mapping::Destination => (said, false),
    }
}

/// What the hub said, with the mark that [`site_namespace`] asks for.
pub fn remapped(application: &[u8]) -> Result<Vec<u8>, Malformed> {
    let path = &["metadata", "annotations", object::NAMESPACE_REMAPPED];
    json::edit(application, &[json::Edit { path, value: Some(br#""true""#) }]).map_err(|_| Malformed)
}

/// The object with another namespace.
pub fn in_namespace(object: &[u8], namespace: &str) -> Result<Vec<u8>, Malformed> {
    let mut value = Vec::with_capacity(namespace.len() + 2);
    push_string(&mut value, namespace);
    let edit = json::Edit { path: &["metadata", "namespace"], value: Some(&value) };
    json::edit(object, &[edit]).map_err(|_| Malformed)
}

/// Where the hub has the Application that a managed site with destination mapping calls `said`: inverse of [`site_namespace`].
pub fn hub_namespace<'a>(
    said: &'a str,
    remapped: bool,
    agent_namespace: &str,
    principal_namespace: &'a str,
) -> &'a str {
    if remapped && said == agent_namespace { principal_namespace } else { said }
}

/// An autonomous agent's Application as it stands on the hub.
///
/// It lives in the agent's namespace, in the agent's copy of its project, on the cluster mapped to the agent; so do the Applications
/// that it made. Owners of the site mean nothing on the hub.
pub fn on_hub(application: &[u8], agent: &str, cluster: &str) -> Result<Vec<u8>, Malformed> {
    let mut out = Vec::with_capacity(application.len() + 64);
    let mut object = ObjectWriter::new(&mut out);
    for (key, value) in json::members(application).map_err(|_| Malformed)? {
        match &*key {
            "metadata" => {
                with_texts(object.key("metadata"), value, &[("namespace", agent)], &["ownerReferences"])?;
            }
            "spec" => {
                let mut spec = ObjectWriter::new(object.key("spec"));
                let mut destination = &b"{}"[..];
                let mut project = Cow::Borrowed("");
                for (key, value) in json::members(value).map_err(|_| Malformed)? {
                    match &*key {
                        "project" => project = json::string(value).ok_or(Malformed)?,
                        "destination" => destination = json::present(value).unwrap_or(b"{}"),
                        key => spec.raw(key, value),
                    }
                }
                spec.string("project", &project::hub_name(agent, &project).ok_or(Malformed)?);
                with_texts(spec.key("destination"), destination, &[("name", cluster)], &["server"])?;
                spec.end();
            }
            "status" if json::is_object(value) => {
                match json::member(value, "resources").map_err(|_| Malformed)? {
                    Some(resources) => {
                        let resources = hub_resources(resources, agent)?;
                        object.raw(
                            "status",
                            &json::set_member(value, "resources", &resources).map_err(|_| Malformed)?,
                        );
                    }
                    None => object.raw("status", value),
                }
            }
            key => object.raw(key, value),
        }
    }
    object.end();
    Ok(out)
}

/// `status.resources` with the Applications among them in the agent's namespace.
fn hub_resources(resources: &[u8], agent: &str) -> Result<Vec<u8>, Malformed> {
    let mut namespace = Vec::new();
    push_string(&mut namespace, agent);
    edit_list(resources, |item, out| {
        let is = |key: &str, word: &str| {
            let value = json::member(item, key).map_err(|_| Malformed)?;
            Ok(value.and_then(json::string).as_deref() == Some(word))
        };
        if is("group", "argoproj.io")? && is("kind", "Application")? {
            out.extend(json::set_member(item, "namespace", &namespace).map_err(|_| Malformed)?);
        } else {
            out.extend_from_slice(item);
        }
        Ok(())
    })
}

/// A list with each item written anew, or left out where `edit` writes nothing; `null` is empty.
pub(crate) fn edit_list(
    list: &[u8],
    mut edit: impl FnMut(&[u8], &mut Vec<u8>) -> Result<(), Malformed>,
) -> Result<Vec<u8>, Malformed> {
    let mut out = Vec::with_capacity(list.len());
    out.push(b'[');
    for item in json::present(list).map_or(Ok(Vec::new()), json::items).map_err(|_| Malformed)? {
        let before = out.len();
        if before > 1 {
            out.push(b',');
        }
        let start = out.len();
        edit(item, &mut out)?;
        if out.len() == start {
            out.truncate(before);
        }
    }
    out.push(b']');
    Ok(out)
}

/// `object` with text members replaced or added, and some members left out.
pub(crate) fn with_texts(
    out: &mut Vec<u8>,
    object: &[u8],
    texts: &[(&str, &str)],
    without: &[&str],
) -> Result<(), Malformed> {
    let mut writer = ObjectWriter::new(out);
    for (key, text) in texts {
        writer.string(key, text);
    }
    for (key, value) in json::members(object).map_err(|_| Malformed)? {
        if !texts.iter().any(|(text, _)| key == *text) && !without.contains(&&*key) {
            writer.raw(&key, value);
        }
    }
    writer.end();
    Ok(())
}

/// How Argo CD on a site names the cluster it runs in.
pub(crate) const IN_CLUSTER: &str = "in-cluster";
/// `status.operationState.phase` of an operation that a user wants ended.
pub const TERMINATING: &str = "Terminating";
/// Annotation that releases a delete which the resync limit held; its value is the object's source UID.
pub const CONFIRM_DELETE: &str = "argocd-agent.argoproj-labs.io/confirm-delete";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn namespaces() {
        use Mapping::{Destination, Namespace};
        for (mapping, said, principal, expected) in [
            (Namespace, "agent-1", "argocd", ("own", false)),
            (Destination, "team-a", "hub", ("team-a", false)),
            (Destination, "hub", "hub", ("own", true)),
            (Destination, "own", "own", ("own", false)),
            (Destination, "hub", "", ("hub", false)),
        ] {
            assert_eq!(site_namespace(mapping, said, principal, "own"), expected, "{said}");
        }
        assert_eq!(hub_namespace("own", true, "own", "hub"), "hub");
        assert_eq!(hub_namespace("own", false, "own", "hub"), "own");
        assert_eq!(hub_namespace("team-a", true, "own", "hub"), "team-a");
        let marked = remapped(br#"{"metadata":{"name":"a"}}"#).unwrap();
        let view = ObjectView::parse(&marked).unwrap();
        assert_eq!(view.annotation(object::NAMESPACE_REMAPPED).as_deref(), Some("true"));
    }

    #[test]
    fn an_autonomous_application_on_the_hub() {
        let application = br#"{"metadata":{"name":"x","namespace":"argocd","uid":"u","ownerReferences":[{}]},
            "spec":{"destination":{"server":"https://kubernetes.default.svc","namespace":"n"},"project":"p"},
            "status":{"health":{},"resources":[{"group":"argoproj.io","kind":"Application","namespace":"argocd"},
                {"group":"argoproj.io","kind":"AppProject","namespace":"argocd"},{"kind":"Application","namespace":"argocd"}]}}"#;
        let expected = br#"{"metadata":{"name":"x","namespace":"a","uid":"u"},
            "spec":{"destination":{"name":"c","namespace":"n"},"project":"a-p"},
            "status":{"health":{},"resources":[{"group":"argoproj.io","kind":"Application","namespace":"a"},
                {"group":"argoproj.io","kind":"AppProject","namespace":"argocd"},{"kind":"Application","namespace":"argocd"}]}}"#;
        let ours = on_hub(application, "a", "c").unwrap();
        assert!(json::same(&ours, expected), "{}", String::from_utf8_lossy(&ours));
        let long = alloc::format!(r#"{{"spec":{{"project":"{}"}}}}"#, "p".repeat(252));
        assert_eq!(on_hub(long.as_bytes(), "a", "c"), Err(Malformed));
        assert!(on_hub(br#"{"spec":{},"status":null}"#, "a", "c").is_ok());
    }
}
