//! The journey that `cargo demo` shows: one Application, both ways, over the real binaries.

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::controller;
use crate::rig::apps::{
    application_with_finalizer, await_equal, await_gone, await_object, edge_app, hub_app, hub_apps, is_copy,
};
use crate::rig::{Cluster, EDGE_NAMESPACE, Stack, StackOptions, embedded_cluster};

/// One step of the journey, as it ended.
#[derive(Clone, Debug)]
pub struct Step {
    pub name: &'static str,
    pub seconds: f64,
    /// What was seen, or why it failed.
    pub outcome: Result<String, String>,
}

/// A system that went through the journey and still runs.
pub struct Journey {
    pub stack: Stack,
    pub held: bool,
    _controller: controller::Driver,
}

/// Two embedded APIs, a fresh PKI, and the peers of `options`.
pub fn on_embedded(options: StackOptions, report: &mut dyn FnMut(&Step)) -> Result<Journey, String> {
    let (hub_server, hub) = embedded_cluster("hub")?;
    let (edge_server, edge) = embedded_cluster("edge")?;
    let mut journey = travel(hub, edge, options, report)?;
    if journey.held {
        // The embedded API is only as good as its tests: whatever it was asked must be among them.
        let started = Instant::now();
        let unknown: Vec<_> =
            [&hub_server, &edge_server].iter().flat_map(|server| server.closure().unknown()).collect();
        let outcome = if unknown.is_empty() {
            Ok("every request was of a shape that is tested against kube-apiserver".to_owned())
        } else {
            Err(format!("shapes without a test: {unknown:?}"))
        };
        journey.held = outcome.is_ok();
        report(&Step { name: "closure", seconds: started.elapsed().as_secs_f64(), outcome });
    }
    Ok(journey)
}

/// The same on clusters of the user's own. What it creates there it also removes, see [`clean_up`].
pub fn on_clusters(
    kubeconfig: &Path,
    hub: &str,
    edge: &str,
    mut options: StackOptions,
    report: &mut dyn FnMut(&Step),
) -> Result<Journey, String> {
    if hub == edge {
        return Err("hub and edge must be two clusters: both use the namespace argocd".to_owned());
    }
    let clusters = [Cluster::from_kubeconfig(kubeconfig, hub)?, Cluster::from_kubeconfig(kubeconfig, edge)?];
    let [hub, edge] = clusters;
    for (cluster, secrets) in [(&hub, &HUB_SECRETS[..]), (&edge, &EDGE_SECRETS[..])] {
        for secret in secrets {
            if cluster.admin.get_opt(&secret_path(secret))?.is_some() {
                return Err(format!(
                    "{}: Secret argocd/{secret} exists; the demo makes a PKI of its own and will not touch yours",
                    cluster.context
                ));
            }
        }
    }
    options.kubeconfig = Some(kubeconfig.to_owned());
    travel(hub, edge, options, report)
}

/// Removes from a user's clusters what the demo put there, apart from namespaces.
pub fn clean_up(stack: &Stack) {
    for (kube, secrets) in [(&stack.hub.admin, &HUB_SECRETS[..]), (&stack.edge.admin, &EDGE_SECRETS[..])] {
        for secret in secrets {
            let _ = kube.delete(&secret_path(secret));
        }
    }
}

/// Goes through every step; the first one that fails ends it.
pub fn travel(
    hub: Cluster,
    edge: Cluster,
    options: StackOptions,
    report: &mut dyn FnMut(&Step),
) -> Result<Journey, String> {
    let controller = controller::Driver::start(edge.target(), EDGE_NAMESPACE, CONTROLLER_PERIOD)
        .map_err(|error| format!("controller: {error}"))?;
    let mut stack = Stack::prepare(hub, edge, options)?;
    let mut held = true;
    for &(name, step) in STEPS {
        let started = Instant::now();
        let mut outcome = step(&mut stack);
        if let Err(reason) = &mut outcome {
            *reason = format!("{reason}\n{}", stack.last_words());
            held = false;
        }
        report(&Step { name, seconds: started.elapsed().as_secs_f64(), outcome });
        if !held {
            break;
        }
    }
    Ok(Journey { stack, held, _controller: controller })
}

type Action = fn(&mut Stack) -> Result<String, String>;

const STEPS: &[(&str, Action)] = &[
    ("connect", connect),
    ("deliver", deliver),
    ("report", report_back),
    ("update", update),
    ("operate", operate),
    ("revert", revert),
    ("cut", cut),
    ("heal", heal),
    ("delete", delete),
];

fn connect(stack: &mut Stack) -> Result<String, String> {
    stack.start_principal()?;
    stack.start_agent()?;
    Ok("the agent is authenticated by its certificate, the event stream is open".to_owned())
}

fn deliver(stack: &mut Stack) -> Result<String, String> {
    let hub = stack.hub.admin.create(&hub_apps(), &application_with_finalizer(SHOP))?;
    let edge = await_object(&stack.edge.admin, &edge_app(SHOP), LIMIT, "a copy of the hub's", |edge| {
        is_copy(edge, &hub)
    })?;
    Ok(format!(
        "agent-a/{SHOP} on the hub is argocd/{SHOP} at the edge; destination {} became {}",
        hub["spec"]["destination"]["name"], edge["spec"]["destination"]["name"]
    ))
}

fn report_back(stack: &mut Stack) -> Result<String, String> {
    let hub = await_object(&stack.hub.admin, &hub_app(SHOP), LIMIT, "synced and healthy", |hub| {
        hub["status"]["sync"]["status"] == "Synced" && hub["status"]["health"]["status"] == "Healthy"
    })?;
    Ok(format!("the hub shows {} at {}", hub["status"]["sync"]["status"], hub["status"]["sync"]["revision"]))
}

fn update(stack: &mut Stack) -> Result<String, String> {
    let patch = json!({"spec": {"source": {"targetRevision": "v2"}}});
    stack.hub.admin.merge_patch(&hub_app(SHOP), &patch)?;
    await_object(&stack.hub.admin, &hub_app(SHOP), LIMIT, "synced to v2", |hub| {
        hub["status"]["sync"]["revision"] == "v2"
    })?;
    Ok("v2 went out, and the status for v2 came back".to_owned())
}

fn operate(stack: &mut Stack) -> Result<String, String> {
    let patch = json!({"operation": {"sync": {"revision": "v2"}, "initiatedBy": {"username": "demo"}}});
    stack.hub.admin.merge_patch(&hub_app(SHOP), &patch)?;
    await_object(&stack.hub.admin, &hub_app(SHOP), LIMIT, "told the result", |hub| {
        hub["operation"].is_null() && hub["status"]["operationState"]["phase"] == "Succeeded"
    })?;
    Ok("a sync asked for on the hub ran at the edge; its result is on the hub".to_owned())
}

fn revert(stack: &mut Stack) -> Result<String, String> {
    let patch = json!({"spec": {"source": {"targetRevision": "local"}}});
    stack.edge.admin.merge_patch(&edge_app(SHOP), &patch)?;
    await_object(&stack.edge.admin, &edge_app(SHOP), LIMIT, "back at v2", |edge| {
        edge["spec"]["source"]["targetRevision"] == "v2"
    })?;
    Ok("a local edit of the spec was undone".to_owned())
}

fn cut(stack: &mut Stack) -> Result<String, String> {
    stack.link.cut();
    let patch = json!({"spec": {"source": {"targetRevision": "v3"}}});
    stack.hub.admin.merge_patch(&hub_app(SHOP), &patch)?;
    stack.hub.admin.create(&hub_apps(), &application_with_finalizer(TILL))?;
    let edge = &stack.edge.admin;
    let patch = json!({"spec": {"source": {"targetRevision": "local"}}});
    edge.merge_patch(&edge_app(SHOP), &patch)?;
    await_object(edge, &edge_app(SHOP), LIMIT, "back at v2 without the hub", |edge| {
        edge["spec"]["source"]["targetRevision"] == "v2"
    })?;
    if edge.get_opt(&edge_app(TILL))?.is_some() {
        return Err("something passed a link that is cut".to_owned());
    }
    Ok("the hub changes v2 to v3 and adds another; the edge goes on alone, and still undoes a local edit"
        .to_owned())
}

fn heal(stack: &mut Stack) -> Result<String, String> {
    stack.link.heal();
    let count = await_equal(&stack.hub.admin, &stack.edge.admin, LIMIT)?;
    await_object(&stack.hub.admin, &hub_app(SHOP), LIMIT, "synced to v3", |hub| {
        hub["status"]["sync"]["revision"] == "v3"
    })?;
    Ok(format!("{count} Applications are equal on both sides, status included"))
}

fn delete(stack: &mut Stack) -> Result<String, String> {
    for name in [SHOP, TILL] {
        stack.hub.admin.delete(&hub_app(name))?;
    }
    for name in [SHOP, TILL] {
        await_gone(&stack.edge.admin, &edge_app(name), LIMIT)?;
        await_gone(&stack.hub.admin, &hub_app(name), LIMIT)?;
    }
    Ok("the edge cleaned up first, then the hub let go".to_owned())
}

fn secret_path(name: &str) -> String {
    format!("/api/v1/namespaces/argocd/secrets/{name}")
}

const SHOP: &str = "shop";
const TILL: &str = "till";
const HUB_SECRETS: [&str; 4] =
    ["argocd-agent-ca", "argocd-agent-principal-tls", "argocd-agent-jwt", "cluster-agent-a"];
const EDGE_SECRETS: [&str; 2] = ["argocd-agent-ca", "argocd-agent-client-tls"];
/// A reconnect after a cut is the longest wait; a foreign peer pauses for up to a minute.
const LIMIT: Duration = Duration::from_secs(45);
/// Argo CD's own period.
const CONTROLLER_PERIOD: Duration = Duration::from_secs(180);
