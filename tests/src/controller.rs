//! A stand-in for Argo CD's application controller: it deploys nothing, but treats Applications as the real one does.
//!
//! [`step`] is the whole behaviour, pure; [`Driver`] plays it against an API server over HTTP.

use std::time::{Duration, SystemTime, UNIX_EPOCH};
use std::{io, thread};

use agent_core::time::{Instant, Wall};
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::kube::Resource;
use crate::kube::client::{KubeTarget, path};

/// One write of the controller.
#[derive(Clone, Debug, PartialEq)]
pub struct Change {
    pub what: What,
    /// A merge patch that holds only for the version it was made from.
    pub patch: Value,
}

/// What a write is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// The application's resources are gone: its finalizer is removed.
    Finalized,
    /// An operation begins; `operation` stays until its end.
    OperationStarted,
    OperationSucceeded,
    /// A user asked for its end.
    OperationTerminated,
    /// Sync, health and `reconciledAt`; a refresh request is removed.
    Reconciled,
    /// `reconciledAt` alone.
    Touched,
}

/// What the controller does about this Application now; at most one write, the next one follows from its result.
///
/// `health` is what it finds in the cluster; `periodic` is set when the resync period is over.
pub fn step(application: &Value, health: &str, now: &str, periodic: bool) -> Option<Change> {
    let metadata = &application["metadata"];
    let status = &application["status"];
    let change = |what, mut patch: Value| {
        patch["metadata"]["resourceVersion"] = metadata["resourceVersion"].clone();
        Some(Change { what, patch })
    };
    if metadata["deletionTimestamp"].is_string() {
        let finalizers = metadata["finalizers"].as_array()?;
        let is_ours = |finalizer: &&Value| {
            finalizer.as_str().is_some_and(|finalizer| finalizer.starts_with(RESOURCES_FINALIZER))
        };
        if !finalizers.iter().any(|finalizer| is_ours(&finalizer)) {
            return None;
        }
        let kept: Vec<&Value> = finalizers.iter().filter(|finalizer| !is_ours(finalizer)).collect();
        return change(What::Finalized, json!({"metadata": {"finalizers": kept}}));
    }
    let revision = &application["spec"]["source"]["targetRevision"];
    let state = &status["operationState"];
    match state["phase"].as_str() {
        Some("Running") => {
            let result = json!({"revision": revision, "source": application["spec"]["source"]});
            let state = json!({
                "phase": "Succeeded", "finishedAt": now, "message": "successfully synced", "syncResult": result
            });
            return change(
                What::OperationSucceeded,
                json!({"operation": null, "status": {"operationState": state}}),
            );
        }
        Some("Terminating") => {
            let state = json!({"phase": "Failed", "finishedAt": now, "message": "Operation terminated"});
            return change(
                What::OperationTerminated,
                json!({"operation": null, "status": {"operationState": state}}),
            );
        }
        _ => {}
    }
    if application["operation"].is_object() {
        // What the operation before left would survive a merge.
        let state = json!({
            "phase": "Running", "operation": replacing(&state["operation"], &application["operation"]),
            "startedAt": now, "finishedAt": null, "message": "waiting", "syncResult": null
        });
        return change(What::OperationStarted, json!({"status": {"operationState": state}}));
    }
    let refresh = metadata["annotations"][REFRESH].is_string();
    let compared =
        json!({"source": application["spec"]["source"], "destination": application["spec"]["destination"]});
    let settled = status["sync"]["comparedTo"] == compared
        && status["sync"]["status"] == "Synced"
        && status["health"]["status"] == health;
    if refresh || !settled {
        let before = &status["sync"]["comparedTo"];
        let mut patch = json!({"status": {
            "health": {"status": health},
            "reconciledAt": now,
            "sync": {"status": "Synced", "revision": revision, "comparedTo": replacing(before, &compared)}
        }});
        if refresh {
            patch["metadata"]["annotations"][REFRESH] = Value::Null;
        }
        return change(What::Reconciled, patch);
    }
    if periodic && status["reconciledAt"] != now {
        return change(What::Touched, json!({"status": {"reconciledAt": now}}));
    }
    None
}

/// A merge patch that turns `before` into `after`: members that `after` lacks are removed.
fn replacing(before: &Value, after: &Value) -> Value {
    let (Some(old), Some(new)) = (before.as_object(), after.as_object()) else { return after.clone() };
    let mut patch = serde_json::Map::new();
    for (name, value) in new {
        patch.insert(name.clone(), replacing(old.get(name).unwrap_or(&Value::Null), value));
    }
    for name in old.keys().filter(|name| !new.contains_key(*name)) {
        patch.insert(name.clone(), Value::Null);
    }
    Value::Object(patch)
}

/// The controller of one namespace on a thread of its own; it stops when dropped.
#[derive(Debug)]
pub struct Driver {
    stop: watch::Sender<bool>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Driver {
    /// `period` is how often `reconciledAt` is rewritten; Argo CD's default is 3 minutes.
    pub fn start(target: KubeTarget, namespace: &str, period: Duration) -> io::Result<Self> {
        let (stop, mut stopped) = watch::channel(false);
        let namespace = namespace.to_owned();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let thread = thread::Builder::new().name("controller-double".to_owned()).spawn(move || {
            runtime.block_on(async {
                tokio::select! {
                    () = drive(&target, &namespace, period) => {}
                    _ = stopped.changed() => {}
                }
            });
        })?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.stop.send_replace(true);
        if let Some(thread) = self.thread.take() {
            // A panic has been printed by its thread already.
            let _ = thread.join();
        }
    }
}

async fn drive(target: &KubeTarget, namespace: &str, period: Duration) {
    let mut periodic = tokio::time::Instant::now() + period;
    loop {
        // An API server that is away is waited for: this is a test double without a voice of its own.
        let _ = watch_once(target, namespace, &mut periodic, period).await;
        tokio::time::sleep(RETRY).await;
    }
}

/// Lists, then follows one watch to its end.
async fn watch_once(
    target: &KubeTarget,
    namespace: &str,
    periodic: &mut tokio::time::Instant,
    period: Duration,
) -> io::Result<()> {
    let collection = path(Resource::Application, namespace, "");
    let list =
        async || target.request(hyper::Method::GET, &collection, "", "").await.map(|answer| answer.json());
    let mut listed = list().await?;
    for item in listed["items"].as_array().into_iter().flatten() {
        reconcile(target, namespace, item, false).await?;
    }
    let from = listed["metadata"]["resourceVersion"].as_str().unwrap_or_default();
    let mut lines = target.lines(&format!("{collection}?watch=true&resourceVersion={from}")).await?;
    loop {
        tokio::select! {
            event = lines.next() => {
                let Some(event) = event? else { return Ok(()) };
                match event["type"].as_str() {
                    Some("ADDED" | "MODIFIED") => reconcile(target, namespace, &event["object"], false).await?,
                    Some("ERROR") => return Ok(()),
                    _ => {}
                }
            }
            () = tokio::time::sleep_until(*periodic) => {
                *periodic += period;
                listed = list().await?;
                for item in listed["items"].as_array().into_iter().flatten() {
                    reconcile(target, namespace, item, true).await?;
                }
            }
        }
    }
}

/// At most one write: what follows comes by the watch. So does the newer version after a conflict.
async fn reconcile(
    target: &KubeTarget,
    namespace: &str,
    application: &Value,
    periodic: bool,
) -> io::Result<()> {
    let epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    // Kubernetes times have whole seconds.
    let wall = Wall { epoch_millis_at_zero: epoch.as_secs() * 1000 };
    if let Some(change) = step(application, "Healthy", &wall.rfc3339(Instant::ZERO), periodic) {
        let name = application["metadata"]["name"].as_str().unwrap_or_default();
        target.merge_patch(Resource::Application, namespace, name, &change.patch).await?;
    }
    Ok(())
}

/// Argo CD's finalizer; its variants carry a propagation policy after a slash.
pub const RESOURCES_FINALIZER: &str = "resources-finalizer.argocd.argoproj.io";
/// The annotation by which a user asks for a reconciliation.
pub const REFRESH: &str = "argocd.argoproj.io/refresh";

const RETRY: Duration = Duration::from_millis(200);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kube::store::{Deleted, PatchType, Preconditions, Store};

    const NOW: &str = "2026-01-02T03:04:05Z";

    struct Site {
        store: Store,
    }

    impl Site {
        fn new(metadata: Value) -> Self {
            let mut store = Store::new(1, Wall { epoch_millis_at_zero: 0 });
            let mut object = json!({
                "apiVersion": "argoproj.io/v1alpha1", "kind": "Application", "metadata": metadata,
                "spec": {"source": {"path": "p", "targetRevision": "v1"}, "destination": {"name": "in-cluster"}}
            });
            object["metadata"]["name"] = json!("a");
            store.create(Resource::Application, "argocd", object).unwrap();
            Self { store }
        }

        fn object(&self) -> Value {
            self.store.get(Resource::Application, "argocd", "a").unwrap().value().clone()
        }

        fn patch(&mut self, patch: Value) {
            let patch = patch.to_string();
            self.store
                .patch(Resource::Application, "argocd", "a", PatchType::Merge, patch.as_bytes())
                .unwrap();
        }

        fn run(&mut self) -> Vec<What> {
            let mut done = Vec::new();
            while let Ok(object) = self.store.get(Resource::Application, "argocd", "a")
                && let Some(change) = step(object.value(), "Healthy", NOW, false)
            {
                self.patch(change.patch);
                done.push(change.what);
            }
            done
        }
    }

    #[test]
    fn a_new_application_is_reconciled_once() {
        let mut site = Site::new(json!({}));
        assert_eq!(site.run(), [What::Reconciled]);
        let object = site.object();
        assert_eq!(object["status"]["sync"]["status"], "Synced");
        assert_eq!(object["status"]["health"]["status"], "Healthy");
        assert_eq!(step(&object, "Healthy", NOW, true), None, "the same second");
        let later = step(&object, "Healthy", "2026-01-02T03:07:05Z", true).unwrap();
        assert_eq!(later.what, What::Touched);
        assert_eq!(step(&object, "Degraded", NOW, false).unwrap().what, What::Reconciled);

        site.patch(json!({"spec": {"source": {"path": null, "chart": "c"}}}));
        assert_eq!(site.run(), [What::Reconciled]);
        assert_eq!(
            site.object()["status"]["sync"]["comparedTo"]["source"],
            json!({"chart": "c", "targetRevision": "v1"})
        );
    }

    #[test]
    fn operations_are_consumed_at_their_end() {
        let mut site = Site::new(json!({}));
        site.run();
        site.patch(
            json!({"operation": {"sync": {"revision": "r1"}, "info": [{"name": "id", "value": "1"}]}}),
        );
        let started = step(&site.object(), "Healthy", NOW, false).unwrap();
        assert_eq!(started.what, What::OperationStarted);
        site.patch(started.patch);
        let running = site.object();
        assert_eq!(running["status"]["operationState"]["phase"], "Running");
        assert!(running["operation"].is_object(), "as long as it runs");
        assert_eq!(site.run(), [What::OperationSucceeded]);

        site.patch(json!({"operation": {"sync": {"prune": true}}}));
        assert_eq!(site.run(), [What::OperationStarted, What::OperationSucceeded]);
        let object = site.object();
        assert_eq!(object.get("operation"), None);
        let state = &object["status"]["operationState"];
        assert_eq!((&state["phase"], &state["finishedAt"]), (&json!("Succeeded"), &json!(NOW)));
        assert_eq!(state["operation"], json!({"sync": {"prune": true}}), "nothing of the one before");
    }

    #[test]
    fn a_terminated_operation_fails() {
        let mut site = Site::new(json!({}));
        site.patch(json!({"operation": {"sync": {}}}));
        let started = step(&site.object(), "Healthy", NOW, false).unwrap();
        site.patch(started.patch);
        site.patch(json!({"status": {"operationState": {"phase": "Terminating"}}}));
        assert_eq!(site.run()[0], What::OperationTerminated);
        let object = site.object();
        assert_eq!(object["status"]["operationState"]["phase"], "Failed");
        assert_eq!(object.get("operation"), None);
    }

    #[test]
    fn a_refresh_is_answered_and_removed() {
        let mut site = Site::new(json!({"annotations": {"a": "b"}}));
        site.run();
        site.patch(json!({"metadata": {"annotations": {REFRESH: "hard"}}}));
        assert_eq!(site.run(), [What::Reconciled]);
        assert_eq!(site.object()["metadata"]["annotations"], json!({"a": "b"}));
    }

    #[test]
    fn its_finalizer_and_no_other_is_removed() {
        let mut site = Site::new(json!({"finalizers": [format!("{RESOURCES_FINALIZER}/background"), "x/y"]}));
        let deleted = site.store.delete(Resource::Application, "argocd", "a", &Preconditions::default());
        assert!(matches!(deleted, Ok(Deleted::Terminating(_))));
        assert_eq!(site.run(), [What::Finalized]);
        assert_eq!(site.object()["metadata"]["finalizers"], json!(["x/y"]));
    }

    #[test]
    fn over_http() {
        use crate::kube::http::{Options, Server};
        let server = Server::start(Options::default()).unwrap();
        let target = KubeTarget::new(server.url(), None, None);
        let _driver = Driver::start(target.clone(), "argocd", Duration::from_secs(3600)).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let query = format!("{}?watch=true&resourceVersion=1", path(Resource::Application, "argocd", ""));
            let mut lines = target.lines(&query).await.unwrap();
            let object = json!({
                "apiVersion": "argoproj.io/v1alpha1", "kind": "Application", "metadata": {"name": "a"},
                "spec": {"source": {"path": "p"}}, "operation": {"sync": {}}
            });
            assert_eq!(target.create(Resource::Application, "argocd", &object).await.unwrap().code, 201);
            let mut phases = Vec::new();
            loop {
                let event = lines.next().await.unwrap().unwrap();
                let object = &event["object"];
                if let Some(phase) = object["status"]["operationState"]["phase"].as_str() {
                    phases.push(phase.to_owned());
                }
                if object["status"]["sync"]["status"] == "Synced" {
                    break;
                }
            }
            assert_eq!(phases, ["Running", "Succeeded", "Succeeded"]);
        });
        assert_eq!(server.closure().unknown(), []);
    }
}
