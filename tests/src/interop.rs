//! The scenario table against foreign peers, on real API servers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::arguments::hundredths;
use crate::rig::apps::{
    application, application_with_finalizer, await_equal, await_gone, await_object, edge_app, edge_apps,
    hub_app, hub_apps, is_copy, operation_state, status,
};
use crate::rig::{RealKube, Stack, StackOptions};

/// One line of the table.
#[derive(Clone, Debug)]
pub struct Row {
    pub name: &'static str,
    pub held: bool,
    pub seconds: f64,
    /// What was seen, or why the row failed.
    pub note: String,
    /// The peers' last words, when the row failed.
    pub detail: String,
}

impl Row {
    pub fn to_json(&self) -> Value {
        let result = if self.held { "held" } else { "failed" };
        let seconds = hundredths(self.seconds);
        json!({"name": self.name, "result": result, "seconds": seconds, "note": self.note})
    }
}

/// Runs every row in order on fresh API servers. `report` is told each row as it ends.
pub fn run(options: StackOptions, mut report: impl FnMut(&Row)) -> Result<Vec<Row>, String> {
    let (hub, edge) = RealKube::start_pair()?;
    let (hub, edge) = (Arc::new(hub).into_cluster()?, Arc::new(edge).into_cluster()?);
    let mut stack = Stack::start(hub, edge, options)?;
    let mut rows = Vec::with_capacity(SCENARIOS.len());
    for &(name, scenario) in SCENARIOS {
        let started = Instant::now();
        let outcome = scenario(&mut stack);
        let seconds = started.elapsed().as_secs_f64();
        let row = match outcome {
            Ok(note) => Row { name, held: true, seconds, note, detail: String::new() },
            Err(note) => {
                let detail = stack.last_words();
                // The next row must not fail for the sins of this one.
                restore(&mut stack);
                Row { name, held: false, seconds, note, detail }
            }
        };
        report(&row);
        rows.push(row);
    }
    Ok(rows)
}

type Scenario = fn(&mut Stack) -> Result<String, String>;

const SCENARIOS: &[(&str, Scenario)] = &[
    ("create", create),
    ("update", update),
    ("status", report_status),
    ("operation", operation),
    ("terminate", terminate),
    ("revert-edit", revert_edit),
    ("revert-delete", revert_delete),
    ("delete", delete),
    ("delete-with-finalizer", delete_with_finalizer),
    ("agent-restart", agent_restart),
    ("principal-restart", principal_restart),
    ("link-cut", link_cut),
];

fn create(stack: &mut Stack) -> Result<String, String> {
    let hub = stack.hub.admin.create(&hub_apps(), &application("create"))?;
    arrives(stack, &hub)?;
    Ok("namespace, source-uid and destination rewritten".to_owned())
}

fn update(stack: &mut Stack) -> Result<String, String> {
    place(stack, "update")?;
    let patch = json!({
        "metadata": {"labels": {"team": null, "tier": "2"}, "annotations": {"example.com/note": "changed"}},
        "spec": {"source": {"targetRevision": "v2"}, "syncPolicy": {"automated": null}},
    });
    let hub = stack.hub.admin.merge_patch(&hub_app("update"), &patch)?;
    let edge = arrives(stack, &hub)?;
    if edge["metadata"]["annotations"]["example.com/note"] != "changed" {
        return Err("the annotation did not travel".to_owned());
    }
    Ok("spec, labels and annotations follow".to_owned())
}

fn report_status(stack: &mut Stack) -> Result<String, String> {
    place(stack, "status")?;
    for (revision, health) in [("v1", "Progressing"), ("v1", "Healthy")] {
        let edge = stack.edge.admin.merge_patch(&edge_app("status"), &status(revision, health))?;
        status_arrives(stack, "status", &edge)?;
    }
    Ok("twice, the whole status".to_owned())
}

fn operation(stack: &mut Stack) -> Result<String, String> {
    place(stack, "operation")?;
    let wanted = json!({"sync": {"revision": "v1", "prune": true}, "initiatedBy": {"username": "someone"}});
    stack.hub.admin.merge_patch(&hub_app("operation"), &json!({"operation": wanted}))?;
    let edge =
        await_object(&stack.edge.admin, &edge_app("operation"), LIMIT, "given the operation", |object| {
            object["operation"]["sync"]["revision"] == "v1"
        })?;
    for phase in ["Running", "Succeeded"] {
        let patch = operation_state(&edge["operation"], phase);
        stack.edge.admin.merge_patch(&edge_app("operation"), &patch)?;
        await_object(&stack.hub.admin, &hub_app("operation"), LIMIT, "told the phase", |object| {
            object["status"]["operationState"]["phase"] == phase && object["operation"].is_null()
        })?;
    }
    let edge = stack.edge.admin.get(&edge_app("operation"))?;
    if !edge["operation"].is_null() {
        return Err("the consumed operation came back to the site".to_owned());
    }
    Ok("set, consumed, result on the hub".to_owned())
}

fn terminate(stack: &mut Stack) -> Result<String, String> {
    place(stack, "terminate")?;
    stack
        .hub
        .admin
        .merge_patch(&hub_app("terminate"), &json!({"operation": {"sync": {"revision": "v1"}}}))?;
    let edge =
        await_object(&stack.edge.admin, &edge_app("terminate"), LIMIT, "given the operation", |object| {
            !object["operation"].is_null()
        })?;
    let operation = edge["operation"].clone();
    stack.edge.admin.merge_patch(&edge_app("terminate"), &operation_state(&operation, "Running"))?;
    await_object(&stack.hub.admin, &hub_app("terminate"), LIMIT, "running", |object| {
        object["status"]["operationState"]["phase"] == "Running" && object["operation"].is_null()
    })?;
    let patch = json!({"status": {"operationState": {"phase": "Terminating"}}});
    stack.hub.admin.merge_patch(&hub_app("terminate"), &patch)?;
    await_object(&stack.edge.admin, &edge_app("terminate"), LIMIT, "terminating", |object| {
        object["status"]["operationState"]["phase"] == "Terminating"
    })?;
    stack.edge.admin.merge_patch(&edge_app("terminate"), &operation_state(&operation, "Failed"))?;
    await_object(&stack.hub.admin, &hub_app("terminate"), LIMIT, "failed", |object| {
        object["status"]["operationState"]["phase"] == "Failed"
    })?;
    Ok("the hub's word reaches a running operation".to_owned())
}

fn revert_edit(stack: &mut Stack) -> Result<String, String> {
    place(stack, "revert-edit")?;
    let hub = stack.hub.admin.get(&hub_app("revert-edit"))?;
    let patch = json!({"spec": {"source": {"targetRevision": "local"}}});
    stack.edge.admin.merge_patch(&edge_app("revert-edit"), &patch)?;
    arrives(stack, &hub)?;
    Ok("a local edit of the spec is undone".to_owned())
}

fn revert_delete(stack: &mut Stack) -> Result<String, String> {
    let before = place(stack, "revert-delete")?;
    stack.edge.admin.delete(&edge_app("revert-delete"))?;
    let after = await_object(&stack.edge.admin, &edge_app("revert-delete"), LIMIT, "made again", |object| {
        object["metadata"]["uid"] != before["metadata"]["uid"]
    })?;
    let hub = stack.hub.admin.get(&hub_app("revert-delete"))?;
    if !is_copy(&after, &hub) {
        return Err(format!("made again, but not as it was: {after}"));
    }
    Ok("a local deletion is undone".to_owned())
}

fn delete(stack: &mut Stack) -> Result<String, String> {
    place(stack, "delete")?;
    stack.hub.admin.delete(&hub_app("delete"))?;
    await_gone(&stack.edge.admin, &edge_app("delete"), LIMIT)?;
    await_gone(&stack.hub.admin, &hub_app("delete"), LIMIT)?;
    Ok("gone on both sides".to_owned())
}

fn delete_with_finalizer(stack: &mut Stack) -> Result<String, String> {
    let hub = stack.hub.admin.create(&hub_apps(), &application_with_finalizer("finalizer"))?;
    arrives(stack, &hub)?;
    stack.hub.admin.delete(&hub_app("finalizer"))?;
    let path = edge_app("finalizer");
    await_object(&stack.edge.admin, &path, LIMIT, "being deleted", |object| {
        !object["metadata"]["deletionTimestamp"].is_null()
    })?;
    if stack.hub.admin.get_opt(&hub_app("finalizer"))?.is_none() {
        return Err("the hub's object went before the site had cleaned up".to_owned());
    }
    stack.edge.admin.merge_patch(&path, &json!({"metadata": {"finalizers": null}}))?;
    await_gone(&stack.edge.admin, &path, LIMIT)?;
    await_gone(&stack.hub.admin, &hub_app("finalizer"), LIMIT)?;
    Ok("the hub waits for the site's controller".to_owned())
}

fn agent_restart(stack: &mut Stack) -> Result<String, String> {
    let names = ["agent-restart-a", "agent-restart-b", "agent-restart-c"];
    place_all(stack, &names[..2])?;
    stack.kill_agent()?;
    changes_on_the_hub(stack, names)?;
    stack.edge.admin.merge_patch(&edge_app(names[0]), &status("v1", "Degraded"))?;
    stack.start_agent()?;
    converge(stack)
}

fn principal_restart(stack: &mut Stack) -> Result<String, String> {
    let names = ["principal-restart-a", "principal-restart-b", "principal-restart-c"];
    place_all(stack, &names[..2])?;
    stack.kill_principal()?;
    changes_on_the_hub(stack, names)?;
    stack.edge.admin.merge_patch(&edge_app(names[0]), &status("v1", "Degraded"))?;
    stack.start_principal()?;
    stack.await_connected(LIMIT)?;
    converge(stack)
}

fn link_cut(stack: &mut Stack) -> Result<String, String> {
    let names = ["link-cut-a", "link-cut-b", "link-cut-c"];
    place_all(stack, &names[..2])?;
    stack.link.cut();
    changes_on_the_hub(stack, names)?;
    stack.edge.admin.merge_patch(&edge_app(names[0]), &status("v1", "Degraded"))?;
    stack.link.heal();
    converge(stack)
}

/// While the other half is away: one Application changed, one deleted, one new.
fn changes_on_the_hub(stack: &Stack, [changed, deleted, new]: [&str; 3]) -> Result<(), String> {
    let patch = json!({"spec": {"source": {"targetRevision": "v9"}}});
    stack.hub.admin.merge_patch(&hub_app(changed), &patch)?;
    stack.hub.admin.delete(&hub_app(deleted))?;
    stack.hub.admin.create(&hub_apps(), &application(new))?;
    Ok(())
}

fn converge(stack: &Stack) -> Result<String, String> {
    let count = await_equal(&stack.hub.admin, &stack.edge.admin, LIMIT)?;
    Ok(format!("{count} Applications equal on both sides, status included"))
}

/// Creates on the hub and waits for the copy, which it returns.
fn place(stack: &Stack, name: &str) -> Result<Value, String> {
    let hub = stack.hub.admin.create(&hub_apps(), &application(name))?;
    arrives(stack, &hub)
}

fn place_all(stack: &Stack, names: &[&str]) -> Result<(), String> {
    names.iter().try_for_each(|name| place(stack, name).map(drop))
}

fn arrives(stack: &Stack, hub: &Value) -> Result<Value, String> {
    let name = hub["metadata"]["name"].as_str().unwrap_or_default();
    await_object(&stack.edge.admin, &edge_app(name), LIMIT, "a copy of the hub's", |edge| is_copy(edge, hub))
}

fn status_arrives(stack: &Stack, name: &str, edge: &Value) -> Result<(), String> {
    await_object(&stack.hub.admin, &hub_app(name), LIMIT, "given the site's status", |hub| {
        ["health", "sync", "resources"].iter().all(|part| hub["status"][part] == edge["status"][part])
    })
    .map(drop)
}

/// Both halves running, the link open, no Application left.
fn restore(stack: &mut Stack) {
    stack.link.heal();
    if stack.principal().is_err() {
        let _ = stack.start_principal();
    }
    if stack.agent().is_err() {
        let _ = stack.start_agent();
    }
    let _ = stack.await_connected(LIMIT);
    for (kube, path) in [(&stack.hub.admin, hub_apps()), (&stack.edge.admin, edge_apps())] {
        let strip = json!({"metadata": {"finalizers": null}});
        let names: Vec<String> = kube
            .get(&path)
            .ok()
            .and_then(|list| {
                let items = list["items"].as_array()?;
                Some(items.iter().filter_map(|o| o["metadata"]["name"].as_str().map(str::to_owned)).collect())
            })
            .unwrap_or_default();
        for name in names {
            let _ = kube.merge_patch(&format!("{path}/{name}"), &strip);
            let _ = kube.delete(&format!("{path}/{name}"));
        }
    }
}

/// The reference's reconnect pauses grow to a minute; ours are shorter.
const LIMIT: Duration = Duration::from_secs(45);
