//! Objects as the reference's typed structs show them, and the patches between two of them.

use serde_json::{Map, Value, json};

pub(super) fn name_of(object: &Value) -> &str {
    object["metadata"]["name"].as_str().unwrap_or_default()
}

pub(super) fn uid_of(object: &Value) -> &str {
    object["metadata"]["uid"].as_str().unwrap_or_default()
}

pub(super) fn version_of(object: &Value) -> &str {
    object["metadata"]["resourceVersion"].as_str().unwrap_or_default()
}

pub(super) fn is_terminating(object: &Value) -> bool {
    object["metadata"]["deletionTimestamp"].is_string()
}

/// The annotation's value, unless it is absent or empty.
pub(super) fn annotation<'a>(object: &'a Value, name: &str) -> Option<&'a str> {
    object["metadata"]["annotations"][name].as_str().filter(|value| !value.is_empty())
}

pub(super) fn set_annotation(object: &mut Value, name: &str, value: &str) {
    let annotations = &mut object["metadata"]["annotations"];
    if !annotations.is_object() {
        *annotations = json!({});
    }
    annotations[name] = json!(value);
}

pub(super) fn remove_annotation(object: &mut Value, name: &str) {
    if let Some(annotations) = object["metadata"]["annotations"].as_object_mut() {
        annotations.remove(name);
    }
}

/// Takes members of the metadata away.
pub(super) fn strip(object: &mut Value, members: &[&str]) {
    if let Some(metadata) = object["metadata"].as_object_mut() {
        for member in members {
            metadata.remove(*member);
        }
    }
}

pub(super) fn phase_of(application: &Value) -> &str {
    application["status"]["operationState"]["phase"].as_str().unwrap_or_default()
}

/// An Application as the typed struct has it: what is a struct there is always present, what is an empty map or list never is.
pub(super) fn typed(application: &Value) -> Value {
    let mut object = application.clone();
    for member in ["labels", "annotations", "finalizers", "ownerReferences"] {
        let is_empty = match &object["metadata"][member] {
            Value::Object(members) => members.is_empty(),
            Value::Array(items) => items.is_empty(),
            _ => true,
        };
        if is_empty {
            strip(&mut object, &[member]);
        }
    }
    fill(
        &mut object,
        json!({"metadata": {}, "spec": {"destination": {}, "project": ""}, "status": zero_status()}),
    );
    let operation = || json!({"initiatedBy": {}, "retry": {}});
    if object["operation"].is_object() {
        fill(&mut object["operation"], operation());
    } else if let Some(members) = object.as_object_mut() {
        members.remove("operation");
    }
    if object["status"]["operationState"].is_object() {
        fill(&mut object["status"]["operationState"], json!({"operation": operation(), "phase": ""}));
    } else if let Some(status) = object["status"].as_object_mut() {
        status.remove("operationState");
    }
    object
}

/// The status of which nothing is set.
pub(super) fn zero_status() -> Value {
    json!({
        "health": {}, "sourceHydrator": {}, "summary": {},
        "sync": {"comparedTo": {"destination": {}, "source": {"repoURL": ""}}, "status": ""}
    })
}

/// Adds what is missing.
fn fill(value: &mut Value, defaults: Value) {
    if value.is_null() {
        *value = defaults;
        return;
    }
    if let (Value::Object(members), Value::Object(defaults)) = (value, defaults) {
        for (name, default) in defaults {
            fill(members.entry(name).or_insert(Value::Null), default);
        }
    }
}

/// The JSON Patch from `old` to `new`, made as the reference makes it: members by name, items by place.
pub(super) fn difference(old: &Value, new: &Value) -> Value {
    let mut patch = Vec::new();
    compare("", old, new, &mut patch);
    Value::Array(patch)
}

fn compare(path: &str, old: &Value, new: &Value, patch: &mut Vec<Value>) {
    match (old, new) {
        _ if old == new => {}
        (Value::Object(before), Value::Object(after)) => compare_members(path, before, after, patch),
        (Value::Array(before), Value::Array(after)) => compare_items(path, before, after, patch),
        _ => patch.push(json!({"op": "replace", "path": path, "value": new})),
    }
}

fn compare_members(
    path: &str,
    before: &Map<String, Value>,
    after: &Map<String, Value>,
    patch: &mut Vec<Value>,
) {
    let mut names: Vec<&String> =
        before.keys().chain(after.keys().filter(|name| !before.contains_key(*name))).collect();
    names.sort();
    for name in names {
        let path = format!("{path}/{}", name.replace('~', "~0").replace('/', "~1"));
        match (before.get(name), after.get(name)) {
            (Some(old), Some(new)) => compare(&path, old, new, patch),
            (Some(_), None) => patch.push(json!({"op": "remove", "path": path})),
            (None, Some(new)) => patch.push(json!({"op": "add", "path": path, "value": new})),
            (None, None) => {}
        }
    }
}

fn compare_items(path: &str, before: &[Value], after: &[Value], patch: &mut Vec<Value>) {
    let common = before.len().min(after.len());
    for index in 0..common {
        compare(&format!("{path}/{index}"), &before[index], &after[index], patch);
    }
    for _ in common..before.len() {
        patch.push(json!({"op": "remove", "path": format!("{path}/{common}")}));
    }
    for item in &after[common..] {
        patch.push(json!({"op": "add", "path": format!("{path}/-"), "value": item}));
    }
}

pub(super) const SOURCE_UID: &str = "argocd.argoproj.io/source-uid";
pub(super) const PRINCIPAL_UID: &str = "argocd.argoproj.io/principal-uid";
pub(super) const REFRESH: &str = "argocd.argoproj.io/refresh";
pub(super) const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";
pub(super) const ADOPTION_POLICY: &str = "argocd.argoproj.io/adoption-policy";
pub(super) const MISMATCH_POLICY: &str = "argocd.argoproj.io/source-uid-mismatch-policy";
pub(super) const TERMINATING: &str = "Terminating";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kube::jsonpatch;

    #[test]
    fn a_patch_leads_from_one_to_the_other() {
        let old = json!({"a": [1, 2, 3], "b": {"x/y": 1, "z~": 2}, "c": "same", "d": [1]});
        let new = json!({"a": [1, 4], "b": {"x/y": 2, "n": [0]}, "c": "same", "d": [1, 2, 3], "e": null});
        let patch = difference(&old, &new);
        assert_eq!(jsonpatch::apply(&old, &patch).unwrap(), new);
        assert_eq!(difference(&new, &new), json!([]));
        assert_eq!(
            difference(&json!({"l": [1, 2, 3]}), &json!({"l": [1]})),
            json!([{"op": "remove", "path": "/l/1"}, {"op": "remove", "path": "/l/1"}])
        );
    }

    #[test]
    fn what_is_a_struct_is_always_there() {
        let object = typed(&json!({"metadata": {"name": "a", "labels": {}}, "operation": {"sync": {}}}));
        assert_eq!(object["metadata"], json!({"name": "a"}));
        assert_eq!(object["spec"], json!({"destination": {}, "project": ""}));
        assert_eq!(object["operation"], json!({"sync": {}, "initiatedBy": {}, "retry": {}}));
        assert_eq!(object["status"]["sync"]["comparedTo"]["source"]["repoURL"], "");
        assert!(object["status"].get("operationState").is_none());
    }
}
