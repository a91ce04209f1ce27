//! The journey on real kube-apiservers: validation, pruning, RBAC and watch caches included.

use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use harness::arguments::{Build, Peers};
use harness::demo::{self, Step};
use harness::footprint::budgets;
use harness::rig::apps::{application, await_object, edge_app, hub_app, hub_apps, is_copy};
use harness::rig::{MemoryWatch, RealKube, Stack, StackOptions, WorkDir, write_kubeconfig};
use serde_json::json;

#[test]
fn the_journey_holds_with_the_least_rights() {
    let _turn = turn();
    let (hub, edge) = RealKube::start_pair().unwrap();
    let (hub, edge) = (Arc::new(hub).into_cluster().unwrap(), Arc::new(edge).into_cluster().unwrap());
    let mut steps = Vec::new();
    let journey = demo::travel(hub, edge, options(), &mut |step| {
        print(step);
        assert!(step.outcome.is_ok(), "{}: {:?}", step.name, step.outcome);
        steps.push(step.name);
    })
    .unwrap();
    assert!(journey.held);
    // None may get lost on the way: each one stands for something that users are told.
    let all = ["connect", "deliver", "report", "update", "operate", "revert", "cut", "heal", "delete"];
    assert_eq!(steps, all);
}

/// The command's other face: clusters that it did not start, through a kubeconfig.
#[test]
fn the_journey_holds_on_clusters_of_the_users_own_and_leaves_no_secret() {
    let _turn = turn();
    let dir = WorkDir::new("own-clusters").unwrap();
    let (hub, edge) = RealKube::start_pair().unwrap();
    let (hub, edge) = (Arc::new(hub).into_cluster().unwrap(), Arc::new(edge).into_cluster().unwrap());
    let kubeconfig = write_kubeconfig(&dir.join("kubeconfig"), &[&hub, &edge]).unwrap();
    // Twice: what the first one left behind would stop the second.
    for _ in 0..2 {
        let journey = demo::on_clusters(&kubeconfig, "hub", "edge", options(), &mut print).unwrap();
        assert!(journey.held, "a step failed; see above");
        demo::clean_up(&journey.stack);
    }
}

/// An object that the site's API server refuses must not hold up the others, nor be lost without a word.
#[test]
fn an_object_that_the_site_refuses_stops_nobody() {
    let _turn = turn();
    let (hub, edge) = RealKube::start_pair().unwrap();
    let (hub, edge) = (Arc::new(hub).into_cluster().unwrap(), Arc::new(edge).into_cluster().unwrap());
    let stack = Stack::start(hub, edge, options()).unwrap();
    // The site runs another version of the custom resource: it insists on a revision.
    let definition = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/applications.argoproj.io";
    let schema = "/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties/source/required";
    stack
        .edge
        .admin
        .json_patch(
            definition,
            &json!([{"op": "add", "path": schema, "value": ["repoURL", "targetRevision"]}]),
        )
        .unwrap();
    let mut refused = application("refused");
    refused["spec"]["source"].as_object_mut().unwrap().remove("targetRevision");
    let limit = Duration::from_secs(20);
    // The new schema is in force a moment after the patch.
    let probe = {
        let mut probe = refused.clone();
        probe["metadata"]["namespace"] = json!("argocd");
        probe
    };
    let apps = "/apis/argoproj.io/v1alpha1/namespaces/argocd/applications?dryRun=All";
    harness::rig::wait_for(limit, || stack.edge.admin.create(apps, &probe).is_err().then_some(())).unwrap();

    stack.hub.admin.create(&hub_apps(), &refused).unwrap();
    let good = stack.hub.admin.create(&hub_apps(), &application("good")).unwrap();
    await_object(&stack.edge.admin, &edge_app("good"), limit, "a copy", |edge| is_copy(edge, &good)).unwrap();
    harness::rig::wait_for(limit, || stack.agent().unwrap().log_text().contains("refused").then_some(()))
        .expect("the agent names the object that was refused");

    // Once the hub's object is acceptable it arrives.
    let patch = json!({"spec": {"source": {"targetRevision": "v1"}}});
    let mended = stack.hub.admin.merge_patch(&hub_app("refused"), &patch).unwrap();
    await_object(&stack.edge.admin, &edge_app("refused"), limit, "a copy", |edge| is_copy(edge, &mended))
        .unwrap();
}

/// A quiet agent costs the site nothing but its memory, and that stays below its gate while it works.
#[test]
fn the_agent_stays_small_while_it_works() {
    let _turn = turn();
    let (hub, edge) = RealKube::start_pair().unwrap();
    let edge = Arc::new(edge);
    let (hub, edge_cluster) = (Arc::new(hub).into_cluster().unwrap(), edge.clone().into_cluster().unwrap());
    let user = edge_cluster.peer_user.clone();
    let stack = Stack::start(hub, edge_cluster, options()).unwrap();
    let watch = MemoryWatch::start(stack.agent().unwrap().pid());
    for index in 0..50 {
        let hub = stack.hub.admin.create(&hub_apps(), &application(&format!("app-{index}"))).unwrap();
        let limit = Duration::from_secs(20);
        let path = edge_app(&format!("app-{index}"));
        await_object(&stack.edge.admin, &path, limit, "a copy", |edge| is_copy(edge, &hub)).unwrap();
    }
    // Only the shipped binary is promised to be small.
    if std::env::var_os("AGENT_LITE").is_some() {
        let gate = budgets().unwrap().into_iter().find(|budget| budget.name == "rss_idle_kib").unwrap().gate;
        assert!(watch.highest_kib() <= gate, "{} KiB at the peak, the gate is {gate}", watch.highest_kib());
    }
    let verbs = edge.requests_of(&user);
    for verb in verbs.keys() {
        let known = ["get", "list", "watch", "create", "patch", "delete"];
        assert!(known.contains(&verb.as_str()), "an unexpected verb: {verbs:?}");
    }
    assert_eq!(verbs.get("create"), Some(&50), "one write for each Application: {verbs:?}");
    assert_eq!(verbs.get("patch"), None, "nothing to patch: {verbs:?}");
}

#[test]
fn the_reference_tools_can_read_what_the_rig_writes() {
    let (server, cluster) = harness::rig::embedded_cluster("embedded").unwrap();
    let dir = WorkDir::new("kubectl").unwrap();
    let kubeconfig = write_kubeconfig(&dir.join("kubeconfig"), &[&cluster]).unwrap();
    cluster.ensure_namespace("argocd").unwrap();
    let output = Command::new("kubectl")
        .args(["--kubeconfig", kubeconfig.to_str().unwrap(), "get", "namespaces", "-o", "name"])
        .output()
        .expect("kubectl is installed (tests/run does)");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(String::from_utf8_lossy(&output.stdout).contains("namespace/argocd"));
    drop(server);
}

/// One pair of API servers at a time: several starting at once starve each other, and the peers, on two cores.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    // A test that failed has told its own story.
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn options() -> StackOptions {
    Peers { build: Build::Dev, ..Peers::default() }.options().unwrap()
}

fn print(step: &Step) {
    println!("{} {:.1} s {:?}", step.name, step.seconds, step.outcome);
}
