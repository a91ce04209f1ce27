//! `spec_checksum` and `list_checksum`.

use std::collections::BTreeSet;

use agent_core::checksum::{self, ChecksumError, Subtree};
use agent_core::event::{RequestUpdate, SyncedResourceList};
use agent_core::json;
use agent_core::object::ObjectView;
use serde_json::Value;

use super::{Plan, Verdict, base64, equal, text, to_hex};

pub(super) fn spec_plan(sub: &str) -> Option<Plan> {
    const KEYS: &[&str] = &["object_b64", "canonical_b64", "sha256", "error", "decode_error"];
    match sub {
        "application" | "appproject" | "secret" | "configmap" | "destination" | "key-order" | "string"
        | "number" | "empty" => Some(Plan::Run(spec, KEYS)),
        _ => None,
    }
}

pub(super) fn list_plan(sub: &str) -> Option<Plan> {
    match sub {
        "set" => Some(Plan::Run(set, &["resources", "sha256", "json"])),
        "removal" => Some(Plan::Run(removal, &["operations", "sha256", "json"])),
        "key" => {
            Some(Plan::Run(key, &["name", "namespace", "uid", "annotations", "object_kind", "key", "entry"]))
        }
        "request-update" => Some(Plan::Run(
            request_update,
            &["object", "kind", "peer_namespace", "request_update_json", "error"],
        )),
        _ => None,
    }
}

fn spec(case: &Value) -> Result<Verdict, String> {
    let object = base64(text(case, "object_b64"))?;
    let mut canonical = Vec::new();
    let subtree = match json::member(&object, "kind").ok().flatten().and_then(json::string).as_deref() {
        Some("Secret") => Subtree::SecretData,
        Some("ConfigMap") => Subtree::ConfigMapData,
        _ => Subtree::Spec,
    };
    let outcome = checksum::canonical_subtree(subtree, &object, &mut |piece| {
        canonical.extend_from_slice(piece);
    });
    match (outcome, case.get("sha256"), case.get("error"), case.get("decode_error")) {
        (Ok(()), Some(digest), None, None) => {
            equal("canonical form", canonical, base64(text(case, "canonical_b64"))?)?;
            let sum = checksum::subtree_checksum(subtree, &object).map_err(|error| error.to_string())?;
            equal("digest", to_hex(&sum).as_str(), digest.as_str().unwrap_or_default())?;
        }
        (Err(ChecksumError::Missing | ChecksumError::NotAnObject), None, Some(Value::String(_)), None)
        | (Err(ChecksumError::Json(_)), None, None, Some(Value::String(_))) => {}
        (outcome, ..) => return Err(format!("{outcome:?}, which the record does not say")),
    }
    Ok(Verdict::Passed)
}

/// What a side tracks: each object once, whatever is said about it.
type Tracked = BTreeSet<(String, String, String, String)>;

fn compare_tracked(tracked: &Tracked, case: &Value) -> Result<Verdict, String> {
    let sum = checksum::list_checksum(
        tracked.iter().map(|(kind, _, name, uid)| (kind.as_str(), name.as_str(), uid.as_str())),
    );
    let body = SyncedResourceList { checksum: sum.map(Vec::from) }.encode();
    match case["sha256"].as_str() {
        // The recorded side keeps no list for the peer; ours is the caller's to decide.
        Some("") => {
            equal("body without a list", SyncedResourceList { checksum: Some(Vec::new()) }.encode(), {
                br#"{"checksum":""}"#.to_vec()
            })?
        }
        recorded => {
            equal("digest", sum.map(|sum| to_hex(&sum)), recorded.map(str::to_owned))?;
            equal("body", String::from_utf8_lossy(&body).as_ref(), text(case, "json"))?;
        }
    }
    Ok(Verdict::Passed)
}

fn set(case: &Value) -> Result<Verdict, String> {
    let resources = case["resources"].as_array().ok_or("no resources")?;
    let tracked = resources
        .iter()
        .map(|entry| ["kind", "namespace", "name", "uid"].map(|key| text(entry, key).to_owned()))
        .map(|[kind, namespace, name, uid]| (kind, namespace, name, uid))
        .collect();
    compare_tracked(&tracked, case)
}

fn removal(case: &Value) -> Result<Verdict, String> {
    let mut tracked = Tracked::new();
    for operation in case["operations"].as_array().ok_or("no operations")? {
        let entry = &operation["resource"];
        let [kind, namespace, name, uid] =
            ["Kind", "Namespace", "Name", "UID"].map(|key| text(entry, key).to_owned());
        match text(operation, "op") {
            "add" => {
                tracked.insert((kind, namespace, name, uid));
            }
            "remove" => {
                tracked.remove(&(kind, namespace, name, uid));
            }
            other => return Err(format!("unknown operation {other:?}")),
        }
    }
    compare_tracked(&tracked, case)
}

fn key(case: &Value) -> Result<Verdict, String> {
    let object = serde_json::json!({
        "metadata": {
            "name": case["name"],
            "namespace": case["namespace"],
            "uid": case["uid"],
            "annotations": case["annotations"],
        }
    })
    .to_string();
    let view = ObjectView::parse(object.as_bytes()).map_err(|error| error.to_string())?;
    let kind = match text(case, "object_kind") {
        "Secret" => "Repository",
        "ConfigMap" => "GPGKey",
        kind => kind,
    };
    let uid = view.tracked_uid();
    let ours = serde_json::json!({
        "kind": kind, "name": view.name, "namespace": view.namespace, "uid": uid,
    });
    equal("key", &ours, &case["key"])?;
    let one = checksum::list_checksum([(kind, view.name.as_ref(), uid.as_ref())]);
    let hashed = checksum::entries_checksum(vec![text(case, "entry").to_owned()]);
    equal("digest of the entry", one, hashed)?;
    Ok(Verdict::Passed)
}

fn request_update(case: &Value) -> Result<Verdict, String> {
    let kind = text(case, "kind");
    let subtree = match kind {
        "Repository" => Subtree::SecretData,
        "GPGKey" => Subtree::ConfigMapData,
        _ => Subtree::Spec,
    };
    let object = text(case, "object").as_bytes();
    let outcome = RequestUpdate::of_object(kind, subtree, object, text(case, "peer_namespace"));
    match (outcome, case["error"].as_str()) {
        (Err(_), Some(_)) => {}
        (Ok(request), None) => {
            let body = request.encode();
            let ours: Value = serde_json::from_slice(&body).map_err(|error| error.to_string())?;
            let recorded: Value =
                serde_json::from_str(text(case, "request_update_json")).map_err(|error| error.to_string())?;
            equal("body", ours, recorded)?;
            let again = RequestUpdate::decode(&body).map_err(|error| error.to_string())?;
            equal("body read again", again, request)?;
        }
        (outcome, recorded) => return Err(format!("{outcome:?} instead of error {recorded:?}")),
    }
    Ok(Verdict::Passed)
}
