//! Applications as the rigs' users write them, and what they ask about them.

use std::time::Duration;

use serde_json::{Value, json};

use super::{AGENT, EDGE_NAMESPACE, Kube, KubeError, wait_for};

/// An Application for the agent, as a user creates it on the hub.
pub fn application(name: &str) -> Value {
    json!({
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Application",
        "metadata": {
            "name": name,
            "namespace": AGENT,
            "labels": {"team": "edge"},
            "annotations": {"example.com/note": "a <b> & \u{e9}"},
        },
        "spec": {
            "project": "default",
            "source": {
                "repoURL": "https://git.example.com/shop.git",
                "path": "apps/till",
                "targetRevision": "v1",
            },
            "destination": {"name": AGENT, "namespace": "till"},
            "syncPolicy": {"automated": {"prune": true, "selfHeal": true}, "retry": {"limit": 2}},
        },
    })
}

/// The same with Argo CD's finalizer, which the site's controller has to remove.
pub fn application_with_finalizer(name: &str) -> Value {
    let mut object = application(name);
    object["metadata"]["finalizers"] = json!(["resources-finalizer.argocd.argoproj.io"]);
    object
}

pub fn hub_apps() -> String {
    apps_in(AGENT)
}

pub fn edge_apps() -> String {
    apps_in(EDGE_NAMESPACE)
}

pub fn hub_app(name: &str) -> String {
    format!("{}/{name}", hub_apps())
}

pub fn edge_app(name: &str) -> String {
    format!("{}/{name}", edge_apps())
}

fn apps_in(namespace: &str) -> String {
    format!("/apis/argoproj.io/v1alpha1/namespaces/{namespace}/applications")
}

/// Waits until the object satisfies `condition`; says what it was instead.
pub fn await_object(
    kube: &Kube,
    path: &str,
    limit: Duration,
    what: &str,
    condition: impl Fn(&Value) -> bool,
) -> Result<Value, String> {
    let mut last = String::from("it was never read");
    wait_for(limit, || match kube.get_opt(path) {
        Ok(Some(object)) if condition(&object) => Some(object),
        Ok(Some(object)) => {
            last = format!("it is {}", without_noise(&object));
            None
        }
        Ok(None) => {
            last = "it does not exist".to_owned();
            None
        }
        Err(error) => {
            last = error.to_string();
            None
        }
    })
    .ok_or_else(|| format!("{path}: not {what} within {} s; {last}", limit.as_secs()))
}

pub fn await_gone(kube: &Kube, path: &str, limit: Duration) -> Result<(), String> {
    wait_for(limit, || matches!(kube.get_opt(path), Ok(None)).then_some(()))
        .ok_or_else(|| format!("{path}: still there after {} s", limit.as_secs()))
}

/// What makes a copy on the site right: namespace, identity, destination, and everything else as on the hub.
pub fn is_copy(edge: &Value, hub: &Value) -> bool {
    let uid = &hub["metadata"]["uid"];
    let destination = &edge["spec"]["destination"];
    let server = destination.get("server").and_then(Value::as_str).unwrap_or_default();
    edge["metadata"]["annotations"]["argocd.argoproj.io/source-uid"] == *uid
        && edge["metadata"]["labels"] == hub["metadata"]["labels"]
        && destination["name"] == "in-cluster"
        && server.is_empty()
        && destination["namespace"] == hub["spec"]["destination"]["namespace"]
        && without_destination(&edge["spec"]) == without_destination(&hub["spec"])
}

/// What the site's controller says of a healthy Application.
pub fn status(revision: &str, health: &str) -> Value {
    json!({
        "status": {
            "health": {"status": health},
            "reconciledAt": "2026-01-02T03:04:05Z",
            "sync": {
                "status": "Synced",
                "revision": revision,
                "comparedTo": {"source": {"repoURL": "https://git.example.com/shop.git", "path": "apps/till"},
                               "destination": {"name": "in-cluster", "namespace": "till"}},
            },
            "resources": [{"kind": "Deployment", "group": "apps", "version": "v1", "name": "till",
                           "namespace": "till", "status": "Synced"}],
        },
    })
}

/// Plays the controller that takes an operation: gone from `.operation`, seen in `.status.operationState`.
pub fn operation_state(operation: &Value, phase: &str) -> Value {
    let mut state = json!({
        "phase": phase,
        "operation": operation,
        "startedAt": "2026-01-02T03:04:05Z",
        "message": format!("operation is {phase}"),
    });
    if phase != "Running" {
        state["finishedAt"] = json!("2026-01-02T03:05:05Z");
    }
    json!({"operation": null, "status": {"operationState": state}})
}

/// Waits until both sides hold the same Applications, the site's being right copies.
pub fn await_equal(hub: &Kube, edge: &Kube, limit: Duration) -> Result<usize, String> {
    let mut last = String::new();
    wait_for(limit, || match unequal(hub, edge) {
        Ok(Ok(count)) => Some(count),
        Ok(Err(difference)) => {
            last = difference;
            None
        }
        Err(error) => {
            last = error.to_string();
            None
        }
    })
    .ok_or_else(|| format!("hub and site differ after {} s: {last}", limit.as_secs()))
}

fn unequal(hub: &Kube, edge: &Kube) -> Result<Result<usize, String>, KubeError> {
    let items = |list: Value| list["items"].as_array().cloned().unwrap_or_default();
    let (on_hub, on_edge) = (items(hub.get(&hub_apps())?), items(edge.get(&edge_apps())?));
    let name = |object: &Value| object["metadata"]["name"].as_str().unwrap_or_default().to_owned();
    for copy in &on_edge {
        if !on_hub.iter().any(|object| name(object) == name(copy)) {
            return Ok(Err(format!("{} is only on the site", name(copy))));
        }
    }
    for object in &on_hub {
        let Some(copy) = on_edge.iter().find(|copy| name(copy) == name(object)) else {
            return Ok(Err(format!("{} is only on the hub", name(object))));
        };
        if !is_copy(copy, object) {
            return Ok(Err(format!("{} differs: {}", name(object), without_noise(copy))));
        }
        if summary(copy) != summary(object) {
            return Ok(Err(format!("{} has another status on the hub", name(object))));
        }
    }
    Ok(Ok(on_hub.len()))
}

/// The words of a status that a user sees. A peer may write empty ones where there was no status at all.
fn summary(object: &Value) -> [&str; 4] {
    let status = &object["status"];
    [
        &status["sync"]["status"],
        &status["sync"]["revision"],
        &status["health"]["status"],
        &status["operationState"]["phase"],
    ]
    .map(|word| word.as_str().unwrap_or_default())
}

fn without_destination(spec: &Value) -> Value {
    let mut spec = spec.clone();
    if let Some(members) = spec.as_object_mut() {
        members.remove("destination");
    }
    spec
}

fn without_noise(object: &Value) -> String {
    let mut object = object.clone();
    if let Some(metadata) = object["metadata"].as_object_mut() {
        metadata.remove("managedFields");
    }
    object.to_string()
}
