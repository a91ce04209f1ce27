//! The kinds that a managed site takes as they come: AppProjects, repository Secrets, the ConfigMap with GPG keys.
//!
//! The hub made them for this site; here they are only stamped with the identity of their source. What goes:
//!
//! | part | create | update |
//! |---|---|---|
//! | labels | as said | as said |
//! | annotations | as said, without `last-applied-configuration`, with `source-uid` | the same |
//! | finalizers | as said | added, never removed |
//! | owner references | never: they name objects of the hub, and a garbage collector would delete the copy | never |
//! | `spec`, or `data` | as said | as said |
//! | `status` | never | untouched |
//! | other members (`type` of a Secret) | as said | untouched |

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use crate::core::MismatchPolicy;
use crate::json::{self, ObjectWriter};
use crate::object::{LAST_APPLIED, ObjectView, SOURCE_UID};
use crate::request::Kind;
use crate::transform::{Malformed, Patch, StringMap, push_copy_metadata, string_map};

/// Whether a local object of nobody may become the copy. Credentials are never taken over; the ConfigMap is installed empty
/// with Argo CD, and must be, or a site would never get its keys.
fn adopts(kind: Kind, existing: &ObjectView<'_>) -> bool {
    match kind {
        Kind::AppProject => true,
        Kind::GpgKey => existing.data.is_none_or(|data| json::same(data, b"{}")),
        Kind::Repository | Kind::Application => false,
    }
}

/// What a word of the hub leads to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Step {
    /// Create the object from this body.
    Create(Vec<u8>),
    /// Apply this JSON Patch to what is there.
    Patch(Vec<u8>),
    /// Delete what is there, a copy of another source, and create the object from this body.
    Recreate(Vec<u8>),
    /// Delete what is there.
    Delete,
    /// Nothing to do.
    Nothing,
    /// A local object, which is not ours to touch.
    Refuse,
}

/// What "this object exists" leads to, said as `create` or `spec-update`.
///
/// `managed`: whether what is there is known to be a copy. Where a project is not, it is taken over in place, whatever its annotation says.
pub fn exists(
    kind: Kind,
    existing: Option<&ObjectView<'_>>,
    managed: bool,
    incoming: &[u8],
    namespace: &str,
    policy: MismatchPolicy,
) -> Result<Step, Malformed> {
    let view = ObjectView::parse(incoming).map_err(|_| Malformed)?;
    let Some(existing) = existing else {
        return create_body(kind, incoming, namespace).map(Step::Create);
    };
    let in_place = match existing.source_uid() {
        Some(uid) if uid == view.uid => true,
        Some(_) if kind == Kind::AppProject && !managed => true,
        Some(uid) if !uid.is_empty() => policy == MismatchPolicy::Upsert,
        _ if adopts(kind, existing) => true,
        _ => return Ok(Step::Refuse),
    };
    if in_place {
        Ok(update_patch(kind, existing, &view)?.map_or(Step::Nothing, Step::Patch))
    } else {
        create_body(kind, incoming, namespace).map(Step::Recreate)
    }
}

/// What "this object is gone" leads to: the copy of that very source is deleted, and nothing else.
pub fn gone(existing: Option<&ObjectView<'_>>, managed: bool, source_uid: &str) -> Step {
    match existing.map(|existing| existing.source_uid()) {
        None => Step::Nothing,
        Some(Some(uid)) if managed && uid == source_uid => Step::Delete,
        Some(Some(uid)) if managed && !uid.is_empty() => Step::Nothing,
        Some(_) => Step::Refuse,
    }
}

/// Body of the POST that brings the hub's object to its site.
pub(crate) fn create_body(kind: Kind, incoming: &[u8], namespace: &str) -> Result<Vec<u8>, Malformed> {
    let view = ObjectView::parse(incoming).map_err(|_| Malformed)?;
    copy_body(kind, incoming, &view, namespace, &annotations(&view)?)
}

fn copy_body(
    kind: Kind,
    object: &[u8],
    view: &ObjectView<'_>,
    namespace: &str,
    annotations: &StringMap<'_>,
) -> Result<Vec<u8>, Malformed> {
    let mut out = Vec::with_capacity(object.len() + 128);
    let mut writer = ObjectWriter::new(&mut out);
    writer.string("apiVersion", kind.api_version());
    writer.string("kind", kind.object_kind());
    push_copy_metadata(writer.key("metadata"), view, namespace, annotations);
    for (name, value) in json::members(object).map_err(|_| Malformed)? {
        let ours = matches!(&*name, "apiVersion" | "kind" | "metadata" | "status");
        // A null member means "absent" and may be refused by the schema.
        if !ours && value != b"null" {
            writer.raw(&name, value);
        }
    }
    writer.end();
    Ok(out)
}

fn annotations<'v>(incoming: &'v ObjectView<'_>) -> Result<StringMap<'v>, Malformed> {
    let mut annotations = string_map(incoming.annotations)?;
    annotations.remove(LAST_APPLIED);
    annotations.insert(SOURCE_UID.into(), (*incoming.uid).into());
    Ok(annotations)
}

fn update_patch(
    kind: Kind,
    existing: &ObjectView<'_>,
    incoming: &ObjectView<'_>,
) -> Result<Option<Vec<u8>>, Malformed> {
    let mut patch = Patch::new(&existing.resource_version);
    patch.string_map("/metadata/annotations", &string_map(existing.annotations)?, &annotations(incoming)?);
    patch.string_map("/metadata/labels", &string_map(existing.labels)?, &string_map(incoming.labels)?);
    let (have, want) = (finalizers(existing)?, finalizers(incoming)?);
    if want.iter().any(|finalizer| !have.contains(finalizer)) {
        let mut list = Vec::from(*b"[");
        let added = want.iter().filter(|finalizer| !have.contains(finalizer));
        for (index, finalizer) in have.iter().chain(added).enumerate() {
            if index > 0 {
                list.push(b',');
            }
            json::push_string(&mut list, finalizer);
        }
        list.push(b']');
        patch.add("/metadata/finalizers", &list);
    }
    match (part(kind, existing), part(kind, incoming)) {
        (Some(have), Some(want)) if json::same(have, want) => {}
        (_, Some(want)) => patch.add(&alloc::format!("/{}", kind.member()), want),
        (Some(_), None) => patch.remove(&alloc::format!("/{}", kind.member())),
        (None, None) => {}
    }
    Ok(patch.finish())
}

/// The member that [`Kind::member`] names. Empty data is none: an API server does not keep it.
pub(crate) fn part<'a>(kind: Kind, view: &ObjectView<'a>) -> Option<&'a [u8]> {
    match kind {
        Kind::Application | Kind::AppProject => view.spec,
        Kind::Repository | Kind::GpgKey => view.data.filter(|data| !json::same(data, b"{}")),
    }
}

/// Why an object of this kind is none that either half carries; `None`: it is one.
///
/// It guards both ways: what the hub may send, and what a site takes, so that no event can write any other Secret or ConfigMap.
pub fn objection(kind: Kind, object: &ObjectView<'_>) -> Option<&'static str> {
    match kind {
        Kind::Application | Kind::AppProject if object.spec.is_none() => Some("the object has no spec"),
        Kind::Repository
            if !matches!(object.label(SECRET_TYPE).as_deref(), Some("repository" | "repo-creds")) =>
        {
            Some("the Secret is not labelled as a repository")
        }
        Kind::Repository if part(kind, object).is_none() => Some("the Secret has no data"),
        Kind::GpgKey if object.name != GPG_KEYS => Some("the ConfigMap is not the one with GPG keys"),
        _ => None,
    }
}

/// Body of the POST that brings back a copy which somebody deleted on the site: its last state, with what the hub said last.
pub(crate) fn recreate_body(
    kind: Kind,
    last: &[u8],
    hub_part: Option<&[u8]>,
    source_uid: &str,
) -> Result<Vec<u8>, Malformed> {
    let view = ObjectView::parse(last).map_err(|_| Malformed)?;
    let mut annotations = string_map(view.annotations)?;
    annotations.insert(SOURCE_UID.into(), source_uid.into());
    let last = match hub_part {
        Some(part) => json::set_member(last, kind.member(), part),
        None => json::remove_member(last, kind.member()),
    }
    .map_err(|_| Malformed)?;
    copy_body(kind, &last, &view, &view.namespace, &annotations)
}

fn finalizers<'a>(view: &ObjectView<'a>) -> Result<Vec<alloc::borrow::Cow<'a, str>>, Malformed> {
    let items = view.finalizers.map_or(Ok(Vec::new()), json::items).map_err(|_| Malformed)?;
    items.into_iter().map(|item| json::string(item).ok_or(Malformed)).collect()
}

/// The project that a repository Secret belongs to (`data.project`, base64): it goes where the project goes. `None`: the Secret
/// never leaves the hub.
pub fn project_of_repository(secret: &ObjectView<'_>) -> Option<alloc::string::String> {
    let project = json::string(json::member(secret.data?, "project").ok()??)?;
    let project = crate::event::base64_decode(project.as_bytes())?;
    let project = alloc::string::String::from_utf8(project).ok()?;
    (!project.is_empty()).then_some(project)
}

/// Which agents get a word about an object that moves between them, as when a project changes its rules, or a
/// repository its project: (those that lose it, those that have it now). Both lists are sorted by name.
pub fn moves<'a>(before: &[&'a str], after: &[&'a str]) -> (Vec<&'a str>, Vec<&'a str>) {
    let now: BTreeMap<&str, ()> = after.iter().map(|agent| (*agent, ())).collect();
    let lost: BTreeMap<&str, ()> =
        before.iter().filter(|agent| !now.contains_key(*agent)).map(|agent| (*agent, ())).collect();
    (lost.into_keys().collect(), now.into_keys().collect())
}

/// Label that tells what a Secret of Argo CD's is for.
pub const SECRET_TYPE: &str = "argocd.argoproj.io/secret-type";
/// Name of the ConfigMap with GPG keys.
pub const GPG_KEYS: &str = "argocd-gpg-keys-cm";

#[cfg(test)]
mod tests {
    use super::*;

    const REPOSITORY: &[u8] = br#"{"metadata":{"name":"r","uid":"u","labels":{"l":"1"},"ownerReferences":[{}],"finalizers":["f"],
        "annotations":{"kubectl.kubernetes.io/last-applied-configuration":"{}","argocd.argoproj.io/source-uid":"of-the-hub"}},
        "data":{"project":"cA=="},"type":"Opaque","status":{}}"#;

    fn step(kind: Kind, existing: &str, managed: bool, policy: MismatchPolicy) -> Step {
        let view = ObjectView::parse(existing.as_bytes()).unwrap();
        exists(kind, Some(&view), managed, REPOSITORY, "argocd", policy).unwrap()
    }

    #[test]
    fn created() {
        let step =
            exists(Kind::Repository, None, false, REPOSITORY, "argocd", MismatchPolicy::Recreate).unwrap();
        let Step::Create(body) = step else { panic!("{step:?}") };
        let expected = br#"{"apiVersion":"v1","kind":"Secret","metadata":{"name":"r","namespace":"argocd","labels":{"l":"1"},
            "annotations":{"argocd.argoproj.io/source-uid":"u"},"finalizers":["f"]},"data":{"project":"cA=="},"type":"Opaque"}"#;
        assert!(json::same(&body, expected));
    }

    #[test]
    fn what_is_there_decides() {
        use MismatchPolicy::{Recreate, Upsert};
        let of = |uid: &str| {
            alloc::format!(
                r#"{{"metadata":{{"name":"r","resourceVersion":"3","annotations":{{"argocd.argoproj.io/source-uid":"{uid}"}}}}}}"#
            )
        };
        let foreign = r#"{"metadata":{"name":"r","resourceVersion":"3"},"data":{"a":"b"}}"#;
        for kind in [Kind::AppProject, Kind::Repository, Kind::GpgKey] {
            assert!(matches!(step(kind, &of("u"), true, Recreate), Step::Patch(_)));
            assert!(matches!(step(kind, &of("v"), true, Recreate), Step::Recreate(_)));
            assert!(matches!(step(kind, &of("v"), true, Upsert), Step::Patch(_)));
        }
        assert!(matches!(step(Kind::AppProject, &of("v"), false, Recreate), Step::Patch(_)));
        assert!(matches!(step(Kind::AppProject, foreign, false, Recreate), Step::Patch(_)));
        assert_eq!(step(Kind::Repository, foreign, false, Recreate), Step::Refuse);
        assert_eq!(step(Kind::GpgKey, foreign, false, Recreate), Step::Refuse);
        assert!(matches!(step(Kind::GpgKey, r#"{"metadata":{}}"#, false, Recreate), Step::Patch(_)));
    }

    #[test]
    fn patched_once() {
        let existing = r#"{"metadata":{"name":"r","resourceVersion":"3","finalizers":["local"],
            "annotations":{"argocd.argoproj.io/source-uid":"u"},"labels":{"l":"1"}},"data":{"project":"cA=="}}"#;
        let Step::Patch(patch) = step(Kind::Repository, existing, true, MismatchPolicy::Recreate) else {
            panic!("no patch");
        };
        let expected = br#"[{"op":"replace","path":"/metadata/resourceVersion","value":"3"},
            {"op":"add","path":"/metadata/finalizers","value":["local","f"]}]"#;
        assert!(json::same(&patch, expected), "{}", alloc::string::String::from_utf8_lossy(&patch));
        let done = existing.replace(r#"["local"]"#, r#"["local","f"]"#);
        assert_eq!(step(Kind::Repository, &done, true, MismatchPolicy::Recreate), Step::Nothing);
    }

    #[test]
    fn deleted_only_where_the_source_is_meant() {
        let copy = br#"{"metadata":{"annotations":{"argocd.argoproj.io/source-uid":"u"}}}"#;
        let (copy, foreign) = (ObjectView::parse(copy).unwrap(), ObjectView::parse(b"{}").unwrap());
        assert_eq!(gone(Some(&copy), true, "u"), Step::Delete);
        assert_eq!(gone(Some(&copy), true, "v"), Step::Nothing);
        assert_eq!(gone(Some(&copy), false, "u"), Step::Refuse);
        assert_eq!(gone(Some(&foreign), true, "u"), Step::Refuse);
        assert_eq!(gone(None, true, "u"), Step::Nothing);
    }

    #[test]
    fn projects_of_repositories() {
        for (data, project) in [
            (r#"{"project":"cA=="}"#, Some("p")),
            (r#"{"project":""}"#, None),
            (r#"{"project":"?"}"#, None),
            (r#"{"project":"/w=="}"#, None),
            ("{}", None),
        ] {
            let secret = alloc::format!(r#"{{"metadata":{{"name":"r"}},"data":{data}}}"#);
            let view = ObjectView::parse(secret.as_bytes()).unwrap();
            assert_eq!(project_of_repository(&view).as_deref(), project, "{data}");
        }
        assert_eq!(project_of_repository(&ObjectView::parse(b"{}").unwrap()), None);
    }

    #[test]
    fn agents_lose_and_get() {
        assert_eq!(moves(&["c", "a", "b"], &["b", "d"]), (["a", "c"].to_vec(), ["b", "d"].to_vec()));
    }
}
