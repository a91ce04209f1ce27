//! What the embedded API server answers is what a kube-apiserver answers: the same cases run on both.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::pin::Pin;

use harness::kube::Resource;
use harness::kube::client::{Answer, JSON, JSON_PATCH, KubeTarget, Lines, MERGE_PATCH, path};
use harness::kube::closure::KNOWN;
use harness::kube::http::{Options, Server, Tls};
use harness::rig::RealKube;
use hyper::Method;
use serde_json::{Value, json};

const APPLICATION: Resource = Resource::Application;
const TOKEN: &str = "conformance-token";

type Case = for<'a> fn(&'a KubeTarget, &'a str) -> Pin<Box<dyn Future<Output = ()> + 'a>>;

macro_rules! cases {
    ($($name:ident),* $(,)?) => {
        &[$((stringify!($name), |target, namespace| Box::pin($name(target, namespace)) as Pin<Box<_>>)),*]
    };
}

const CASES: &[(&str, Case)] = cases![
    create,
    create_refused,
    update,
    json_patch,
    merge_patch,
    delete,
    finalizers,
    list,
    selectors,
    watch,
    watch_selected,
    initial_events,
    expired,
    built_in_kinds,
    discovery,
    identity,
];

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

/// Runs every case, and only then fails: a new API server may differ in several.
fn run(target: &KubeTarget) {
    let stamp = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_millis();
    let runtime = runtime();
    let failed: Vec<&str> = CASES
        .iter()
        .filter(|(name, case)| {
            let namespace = format!("{}-{stamp}", name.replace('_', "-"));
            let case = || {
                runtime.block_on(async {
                    let object =
                        json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}});
                    expect(&target.create(Resource::Namespace, "", &object).await.unwrap(), 201, "");
                    case(target, &namespace).await;
                });
            };
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(case)).is_err()
        })
        .map(|(name, _)| *name)
        .collect();
    assert_eq!(failed, [""; 0], "on {}", target.base_url);
}

#[test]
fn on_the_embedded_api_server() {
    let tls = Tls::self_signed().unwrap();
    let options = Options { tls: Some(tls), tokens: vec![TOKEN.to_owned()], ..Options::default() };
    let server = Server::start(options).unwrap();
    run(&KubeTarget::new(server.url(), server.token(), server.ca()));

    assert_eq!(server.closure().unknown(), []);
    let mut seen: BTreeMap<_, BTreeSet<String>> = BTreeMap::new();
    for shape in server.closure().shapes().into_keys() {
        seen.entry((shape.method, shape.class, shape.content_type)).or_default().extend(shape.query_keys);
    }
    for known in KNOWN {
        let row = (known.method.to_owned(), Some(known.class), known.content_type.to_owned());
        let keys = seen.get(&row).unwrap_or_else(|| panic!("no case exercises {known:?}"));
        for key in known.query_keys {
            assert!(keys.contains(*key), "no case exercises {key} of {known:?}");
        }
    }
}

#[test]
fn on_a_real_api_server() {
    let kube = RealKube::start("conformance").unwrap();
    run(&KubeTarget::new(kube.url(), Some(kube.admin_token()), Some(kube.ca())));
}

#[test]
fn unknown_shapes_are_refused_and_named() {
    let server = Server::start(Options::default()).unwrap();
    let target = KubeTarget::new(server.url(), None, None);
    runtime().block_on(async {
        let apply = format!("{}?fieldManager=x", path(APPLICATION, "ns", "a"));
        let answer = target.request(Method::PATCH, &apply, "application/apply-patch+yaml", "{}").await.unwrap();
        expect(&answer, 501, "NotImplemented");
        let shape = "PATCH /apis/argoproj.io/v1alpha1/namespaces/{namespace}/applications/{name}?fieldManager (application/apply-patch+yaml)";
        assert!(answer.json()["message"].as_str().unwrap().contains(shape), "{answer}");
        assert_eq!(server.closure().unknown().iter().map(ToString::to_string).collect::<Vec<_>>(), [shape]);
    });
}

#[test]
fn client_certificates_let_in() {
    let ca_key = rcgen::KeyPair::generate().unwrap();
    let mut ca_parameters = rcgen::CertificateParams::default();
    ca_parameters.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let ca = ca_parameters.self_signed(&ca_key).unwrap();
    let issuer = rcgen::Issuer::new(ca_parameters, ca_key);
    let key = rcgen::KeyPair::generate().unwrap();
    let mut parameters = rcgen::CertificateParams::default();
    parameters.extended_key_usages = vec![rcgen::ExtendedKeyUsagePurpose::ClientAuth];
    let certificate = parameters.signed_by(&key, &issuer).unwrap();

    let options =
        Options { tls: Some(Tls::self_signed().unwrap()), client_ca: Some(ca.pem()), ..Options::default() };
    let server = Server::start(options).unwrap();
    let mut target = KubeTarget::new(server.url(), None, server.ca());
    runtime().block_on(async {
        expect(&target.get(Resource::Secret, "ns", "s").await.unwrap(), 401, "Unauthorized");
        target.identity = Some((certificate.pem(), key.serialize_pem()));
        expect(&target.get(Resource::Secret, "ns", "s").await.unwrap(), 404, "NotFound");
    });
}

#[test]
fn cut_watches_end() {
    let server = Server::start(Options::default()).unwrap();
    let target = KubeTarget::new(server.url(), None, None);
    runtime().block_on(async {
        let query = format!("{}?watch=true&resourceVersion=1", path(APPLICATION, "", ""));
        let mut lines = target.lines(&query).await.unwrap();
        server.store().cut_watches();
        assert_eq!(lines.next().await.unwrap(), None);
    });
}

#[track_caller]
fn expect(answer: &Answer, code: u16, reason: &str) {
    assert_eq!(answer.code, code, "{answer}");
    if code >= 300 {
        let status = answer.json();
        assert_eq!(status["kind"], "Status");
        assert_eq!(status["reason"].as_str().unwrap_or_default(), reason, "{answer}");
    }
}

fn application(name: &str) -> Value {
    json!({
        "apiVersion": "argoproj.io/v1alpha1", "kind": "Application", "metadata": {"name": name},
        "spec": {
            "project": "default",
            "destination": {"name": "in-cluster", "namespace": "guestbook"},
            "source": {"repoURL": "https://git.example.com/a", "path": "guestbook", "targetRevision": "HEAD"}
        }
    })
}

async fn create_application(target: &KubeTarget, namespace: &str, object: &Value) -> Value {
    target.create(APPLICATION, namespace, object).await.unwrap().object().unwrap()
}

async fn patch(target: &KubeTarget, namespace: &str, name: &str, r#type: &str, patch: Value) -> Answer {
    let path =
        format!("{}?fieldManager=conformance&fieldValidation=Ignore", path(APPLICATION, namespace, name));
    target.request(Method::PATCH, &path, r#type, patch.to_string()).await.unwrap()
}

async fn delete_with(target: &KubeTarget, namespace: &str, name: &str, preconditions: Value) -> Answer {
    let options = json!({
        "kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background", "preconditions": preconditions
    });
    let path = path(APPLICATION, namespace, name);
    target.request(Method::DELETE, &path, JSON, options.to_string()).await.unwrap()
}

async fn create(target: &KubeTarget, namespace: &str) {
    let mut given = application("a");
    given["metadata"]["uid"] = json!("0b5e1b1e-0000-4000-8000-000000000000");
    given["metadata"]["creationTimestamp"] = json!("2001-01-01T00:00:00Z");
    given["metadata"]["generation"] = json!(9);
    let path =
        format!("{}?fieldManager=conformance&fieldValidation=Strict", path(APPLICATION, namespace, ""));
    let created =
        target.request(Method::POST, &path, JSON, given.to_string()).await.unwrap().object().unwrap();
    let metadata = &created["metadata"];
    assert_eq!(metadata["namespace"], namespace);
    assert_eq!(metadata["generation"], 1);
    assert_eq!(metadata["uid"].as_str().unwrap().len(), 36);
    assert_ne!(metadata["uid"], given["metadata"]["uid"]);
    assert_ne!(metadata["creationTimestamp"], given["metadata"]["creationTimestamp"]);
    assert!(metadata["resourceVersion"].as_str().unwrap().parse::<u64>().unwrap() > 0);

    let read = target.get(APPLICATION, namespace, "a").await.unwrap().object().unwrap();
    assert_eq!(read, created);
    assert_eq!(read["spec"], given["spec"]);
}

async fn create_refused(target: &KubeTarget, namespace: &str) {
    create_application(target, namespace, &application("a")).await;
    let create = async |object: Value| target.create(APPLICATION, namespace, &object).await.unwrap();
    expect(&create(application("a")).await, 409, "AlreadyExists");
    expect(&create(application("A")).await, 422, "Invalid");
    expect(&create(application("")).await, 422, "Invalid");
    let mut object = application("b");
    object["metadata"]["namespace"] = json!("elsewhere");
    expect(&create(object).await, 400, "BadRequest");
    let mut object = application("b");
    object["kind"] = json!("Secret");
    expect(&create(object).await, 422, "Invalid");
    for member in ["kind", "apiVersion"] {
        let mut object = application("b");
        object.as_object_mut().unwrap().remove(member);
        expect(&create(object).await, 400, "BadRequest");
    }
    let mut object = application("b");
    object["apiVersion"] = json!("argoproj.io/v1");
    expect(&create(object).await, 400, "BadRequest");
    let mut object = application("b");
    object["metadata"]["resourceVersion"] = json!("1");
    expect(&create(object).await, 500, "");
    let path = path(APPLICATION, namespace, "");
    expect(&target.request(Method::POST, &path, JSON, "{").await.unwrap(), 400, "BadRequest");
    expect(&target.get(APPLICATION, namespace, "missing").await.unwrap(), 404, "NotFound");
}

async fn update(target: &KubeTarget, namespace: &str) {
    let created = create_application(target, namespace, &application("a")).await;
    let put = async |object: &Value| {
        let path =
            format!("{}?fieldManager=conformance&fieldValidation=Ignore", path(APPLICATION, namespace, "a"));
        target.request(Method::PUT, &path, JSON, object.to_string()).await.unwrap()
    };
    let mut next = created.clone();
    next["spec"]["project"] = json!("other");
    let updated = put(&next).await.object().unwrap();
    assert_eq!(updated["metadata"]["generation"], 2);
    assert_ne!(updated["metadata"]["resourceVersion"], created["metadata"]["resourceVersion"]);
    expect(&put(&next).await, 409, "Conflict");

    let mut object = updated.clone();
    object["metadata"]["resourceVersion"] = json!("");
    expect(&put(&object).await, 422, "Invalid");
    let mut object = updated.clone();
    object["metadata"]["uid"] = json!("0b5e1b1e-0000-4000-8000-000000000000");
    expect(&put(&object).await, 409, "Conflict");
    let mut object = updated.clone();
    object["metadata"]["name"] = json!("b");
    expect(&put(&object).await, 400, "BadRequest");

    let unchanged = put(&updated).await.object().unwrap();
    assert_eq!(unchanged["metadata"]["resourceVersion"], updated["metadata"]["resourceVersion"]);

    // The status of an Application is no sub-resource: it counts for the generation.
    let mut object = updated.clone();
    object["status"] = json!({"sync": {"status": "Synced"}});
    assert_eq!(put(&object).await.object().unwrap()["metadata"]["generation"], 3);

    let missing = path(APPLICATION, namespace, "missing");
    let mut object = application("missing");
    object["metadata"]["resourceVersion"] = json!("1");
    expect(&target.request(Method::PUT, &missing, JSON, object.to_string()).await.unwrap(), 404, "NotFound");
}

async fn json_patch(target: &KubeTarget, namespace: &str) {
    let created = create_application(target, namespace, &application("a")).await;
    let apply = async |operations: Value| patch(target, namespace, "a", JSON_PATCH, operations).await;
    let version = |object: &Value| json!({"op": "replace", "path": "/metadata/resourceVersion", "value": object["metadata"]["resourceVersion"]});
    let annotate = json!({"op": "add", "path": "/metadata/annotations", "value": {"a/b": "c"}});
    let patched = apply(json!([version(&created), annotate])).await.object().unwrap();
    assert_eq!(patched["metadata"]["annotations"], json!({"a/b": "c"}));
    assert_eq!(patched["metadata"]["generation"], 1);
    expect(
        &apply(json!([version(&created), {"op": "replace", "path": "/spec/project", "value": "x"}])).await,
        409,
        "Conflict",
    );
    let again = apply(
        json!([version(&patched), {"op": "replace", "path": "/metadata/annotations/a~1b", "value": "c"}]),
    )
    .await;
    assert_eq!(
        again.object().unwrap()["metadata"]["resourceVersion"],
        patched["metadata"]["resourceVersion"],
        "a patch without effect writes nothing"
    );

    for operations in [
        json!([{"op": "test", "path": "/spec/project", "value": "nope"}]),
        json!([{"op": "remove", "path": "/metadata/labels"}]),
        json!([{"op": "replace", "path": "/operation/sync", "value": {}}]),
        json!([{"op": "add", "path": "/metadata/labels/x", "value": "y"}]),
        json!([{"op": "replace", "path": "/metadata/uid", "value": "0b5e1b1e-0000-4000-8000-000000000000"}]),
        json!([{"op": "add", "path": "/metadata/deletionTimestamp", "value": "2026-01-01T00:00:00Z"}]),
        json!([{"op": "remove", "path": "/metadata/resourceVersion"}]),
    ] {
        let answer = apply(operations.clone()).await;
        assert_eq!(
            (answer.code, answer.json()["reason"].as_str()),
            (422, Some("Invalid")),
            "{operations}: {answer}"
        );
    }
    expect(&apply(json!({"op": "add"})).await, 400, "BadRequest");
    let set = apply(json!([{"op": "replace", "path": "/metadata/labels", "value": {"a": "b"}}])).await;
    assert_eq!(
        set.object().unwrap()["metadata"]["labels"],
        json!({"a": "b"}),
        "replacing what is absent adds it"
    );
    let same = apply(json!([{"op": "test", "path": "/operation", "value": null}])).await;
    assert_eq!(same.code, 200, "an absent member equals null: {same}");
    expect(&patch(target, namespace, "missing", JSON_PATCH, json!([])).await, 404, "NotFound");
}

async fn merge_patch(target: &KubeTarget, namespace: &str) {
    let mut object = application("a");
    object["metadata"]["annotations"] = json!({"a": "1", "b": "2"});
    let created = create_application(target, namespace, &object).await;
    let apply = async |change: Value| patch(target, namespace, "a", MERGE_PATCH, change).await;
    let patched = apply(json!({"metadata": {"annotations": {"a": null, "c": "3"}}})).await.object().unwrap();
    assert_eq!(patched["metadata"]["annotations"], json!({"b": "2", "c": "3"}));
    let stale = json!({"metadata": {"resourceVersion": created["metadata"]["resourceVersion"]}, "spec": {"project": "x"}});
    expect(&apply(stale).await, 409, "Conflict");
    expect(&apply(json!([])).await, 422, "Invalid");
    let operation = json!({"operation": {"sync": {"revision": "main"}}});
    assert_eq!(apply(operation).await.object().unwrap()["metadata"]["generation"], 2);
    let removed = apply(json!({"operation": null})).await.object().unwrap();
    assert_eq!(removed.get("operation"), None);
}

async fn delete(target: &KubeTarget, namespace: &str) {
    let created = create_application(target, namespace, &application("a")).await;
    let other = json!({"uid": "0b5e1b1e-0000-4000-8000-000000000000"});
    expect(&delete_with(target, namespace, "a", other).await, 409, "Conflict");
    let stale = json!({"resourceVersion": "1"});
    expect(&delete_with(target, namespace, "a", stale).await, 409, "Conflict");
    let right = json!({"uid": created["metadata"]["uid"]});
    let answer = delete_with(target, namespace, "a", right.clone()).await.object().unwrap();
    assert_eq!((&answer["kind"], &answer["status"]), (&json!("Status"), &json!("Success")));
    assert_eq!(
        answer["details"],
        json!({"name": "a", "group": "argoproj.io", "kind": "applications", "uid": created["metadata"]["uid"]})
    );
    expect(&delete_with(target, namespace, "a", right).await, 404, "NotFound");
    let again = create_application(target, namespace, &application("a")).await;
    assert_ne!(again["metadata"]["uid"], created["metadata"]["uid"]);
    assert_eq!(target.delete(APPLICATION, namespace, "a").await.unwrap().code, 200);
}

async fn finalizers(target: &KubeTarget, namespace: &str) {
    let mut object = application("a");
    object["metadata"]["finalizers"] =
        json!(["resources-finalizer.argocd.argoproj.io", "example.com/second"]);
    let created = create_application(target, namespace, &object).await;
    let mut lines = open(target, namespace, &created, "").await;
    let held = target.delete(APPLICATION, namespace, "a").await.unwrap().object().unwrap();
    assert_eq!(held["kind"], "Application");
    assert_eq!(held["metadata"]["deletionGracePeriodSeconds"], 0);
    assert!(held["metadata"]["deletionTimestamp"].is_string());
    assert_eq!(held["metadata"]["generation"], 2);
    let again = target.delete(APPLICATION, namespace, "a").await.unwrap().object().unwrap();
    assert_eq!(again["metadata"]["resourceVersion"], held["metadata"]["resourceVersion"]);
    expect(&target.create(APPLICATION, namespace, &application("a")).await.unwrap(), 409, "AlreadyExists");

    let apply = async |change: Value| patch(target, namespace, "a", MERGE_PATCH, change).await;
    let second = "example.com/second";
    expect(&apply(json!({"metadata": {"finalizers": [second, "example.com/third"]}})).await, 422, "Invalid");
    let fewer = apply(json!({"metadata": {"finalizers": [second], "deletionTimestamp": null}}))
        .await
        .object()
        .unwrap();
    assert!(fewer["metadata"]["deletionTimestamp"].is_string());
    let last =
        apply(json!({"metadata": {"finalizers": null, "annotations": {"a": "b"}}})).await.object().unwrap();
    assert_eq!(last["metadata"].get("finalizers"), None);
    expect(&target.get(APPLICATION, namespace, "a").await.unwrap(), 404, "NotFound");

    let events = [next(&mut lines).await, next(&mut lines).await, next(&mut lines).await];
    let types: Vec<_> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    assert_eq!(types, ["MODIFIED", "MODIFIED", "DELETED"]);
    let gone = &events[2]["object"]["metadata"];
    assert_eq!(gone["finalizers"], json!([second]), "the last stored state");
    assert_eq!(gone.get("annotations"), None);
    assert!(version(&events[2]["object"]) > version(&events[1]["object"]));
}

async fn list(target: &KubeTarget, namespace: &str) {
    for name in ["a", "b", "c", "d.e"] {
        create_application(target, namespace, &application(name)).await;
    }
    let get = async |query: &str| {
        target
            .request(Method::GET, &format!("{}?{query}", path(APPLICATION, namespace, "")), "", "")
            .await
            .unwrap()
    };
    let all = get("").await.object().unwrap();
    assert_eq!(
        (&all["kind"], &all["apiVersion"]),
        (&json!("ApplicationList"), &json!("argoproj.io/v1alpha1"))
    );
    assert_eq!(names(&all), ["a", "b", "c", "d.e"]);
    assert_eq!(all["items"][0]["kind"], "Application");
    let first = get("limit=2").await.object().unwrap();
    assert_eq!(names(&first), ["a", "b"]);
    assert_eq!(first["metadata"]["remainingItemCount"], 2);

    // The next page is of the first page's moment.
    assert_eq!(target.delete(APPLICATION, namespace, "c").await.unwrap().code, 200);
    create_application(target, namespace, &application("bb")).await;
    let token = first["metadata"]["continue"].as_str().unwrap();
    let second = get(&format!("limit=2&continue={token}")).await.object().unwrap();
    assert_eq!(names(&second), ["c", "d.e"]);
    assert_eq!(second["metadata"]["resourceVersion"], first["metadata"]["resourceVersion"]);
    assert_eq!(second["metadata"].get("continue").and_then(Value::as_str).unwrap_or_default(), "");
    expect(&get("limit=2&continue=nonsense").await, 400, "BadRequest");

    let moment = first["metadata"]["resourceVersion"].as_str().unwrap();
    let exact = get(&format!("resourceVersion={moment}&resourceVersionMatch=Exact")).await.object().unwrap();
    assert_eq!(names(&exact), ["a", "b", "c", "d.e"]);
    let newer =
        get(&format!("resourceVersion={moment}&resourceVersionMatch=NotOlderThan")).await.object().unwrap();
    assert!(version(&newer) >= version(&first));

    let wide = format!("{}?limit=500&resourceVersion=0&timeoutSeconds=5", path(APPLICATION, "", ""));
    let wide = target.request(Method::GET, &wide, "", "").await.unwrap().object().unwrap();
    assert!(wide["items"].as_array().unwrap().iter().any(|item| item["metadata"]["namespace"] == namespace));
    let first =
        target.request(Method::GET, &format!("{}?limit=1", path(APPLICATION, "", "")), "", "").await.unwrap();
    let token = first.json()["metadata"]["continue"].as_str().unwrap().to_owned();
    let query = format!("{}?limit=1&continue={token}", path(APPLICATION, "", ""));
    assert_eq!(names(&target.request(Method::GET, &query, "", "").await.unwrap().object().unwrap()).len(), 1);
}

async fn selectors(target: &KubeTarget, namespace: &str) {
    for (name, labels) in [("a", json!({"l": "1"})), ("b", json!({"l": "2", "m": ""})), ("c", json!({}))] {
        let mut object = application(name);
        object["metadata"]["labels"] = labels;
        create_application(target, namespace, &object).await;
    }
    for (query, expected) in [
        ("labelSelector=l%3D1", vec!["a"]),
        ("labelSelector=l%3D%3D1", vec!["a"]),
        ("labelSelector=l%21%3D1", vec!["b", "c"]),
        ("labelSelector=l", vec!["a", "b"]),
        ("labelSelector=%21l", vec!["c"]),
        ("labelSelector=l+in+%281%2C2%29%2Cm", vec!["b"]),
        ("labelSelector=l+notin+%281%29", vec!["b", "c"]),
        ("labelSelector=m%3D", vec!["b"]),
        ("fieldSelector=metadata.name%3Db", vec!["b"]),
        ("fieldSelector=metadata.name%21%3Db", vec!["a", "c"]),
        ("limit=1&labelSelector=l", vec!["a"]),
    ] {
        let list = format!("{}?{query}", path(APPLICATION, namespace, ""));
        let list = target.request(Method::GET, &list, "", "").await.unwrap().object().unwrap();
        assert_eq!(names(&list), expected, "{query}");
        if query.starts_with("limit") {
            assert_eq!(list["metadata"].get("remainingItemCount"), None);
        }
    }
    for bad in ["labelSelector=%3D", "fieldSelector=spec.project%3Da", "limit=x"] {
        let list = format!("{}?{bad}", path(APPLICATION, namespace, ""));
        expect(&target.request(Method::GET, &list, "", "").await.unwrap(), 400, "BadRequest");
    }
    let wide = format!(
        "{}?labelSelector=l%3D2&fieldSelector=metadata.namespace%3D{namespace}",
        path(APPLICATION, "", "")
    );
    assert_eq!(names(&target.request(Method::GET, &wide, "", "").await.unwrap().object().unwrap()), ["b"]);
}

async fn watch(target: &KubeTarget, namespace: &str) {
    let created = create_application(target, namespace, &application("a")).await;
    let mut lines = open(target, namespace, &created, "&allowWatchBookmarks=true&timeoutSeconds=60").await;
    let changed = patch(target, namespace, "a", MERGE_PATCH, json!({"spec": {"project": "x"}})).await;
    let changed = changed.object().unwrap();
    create_application(target, namespace, &application("b")).await;
    assert_eq!(target.delete(APPLICATION, namespace, "a").await.unwrap().code, 200);
    assert_eq!(next(&mut lines).await, json!({"type": "MODIFIED", "object": changed}));
    assert_eq!(next(&mut lines).await["type"], "ADDED");
    let gone = next(&mut lines).await;
    assert_eq!(gone["type"], "DELETED");
    assert_eq!(gone["object"]["spec"], changed["spec"]);
    assert!(version(&gone["object"]) > version(&changed));

    // Without a resourceVersion a watch begins with what is there.
    let query = format!("{}?watch=1&timeoutSeconds=1", path(APPLICATION, namespace, ""));
    let mut lines = target.lines(&query).await.unwrap();
    let first = next(&mut lines).await;
    assert_eq!(
        (first["type"].as_str(), first["object"]["metadata"]["name"].as_str()),
        (Some("ADDED"), Some("b"))
    );
    assert_eq!(lines.next().await.unwrap(), None, "the time is up");
}

async fn watch_selected(target: &KubeTarget, namespace: &str) {
    let created = create_application(target, namespace, &application("a")).await;
    let mut lines = open(target, namespace, &created, "&labelSelector=l%3D1").await;
    let mut named = open(target, namespace, &created, "&fieldSelector=metadata.name%3Db").await;
    let mut wide = {
        let from = created["metadata"]["resourceVersion"].as_str().unwrap();
        let query = format!(
            "{}?watch=true&allowWatchBookmarks=true&resourceVersion={from}&labelSelector=l%3D1",
            path(APPLICATION, "", "")
        );
        target.lines(&query).await.unwrap()
    };
    let label = async |value: Value| {
        patch(target, namespace, "a", MERGE_PATCH, json!({"metadata": {"labels": {"l": value}}})).await
    };
    let labelled = label(json!("1")).await.object().unwrap();
    let other = label(json!("2")).await.object().unwrap();
    create_application(target, namespace, &application("b")).await;
    let entered = next(&mut lines).await;
    assert_eq!(entered, json!({"type": "ADDED", "object": labelled}));
    assert_eq!(next(&mut wide).await, entered);
    let left = next(&mut lines).await;
    assert_eq!(left["type"], "DELETED");
    assert_eq!(left["object"]["metadata"]["labels"]["l"], "1", "the last selected state");
    assert_eq!(version(&left["object"]), version(&other), "under the version that ended it");
    let b = next(&mut named).await;
    assert_eq!((b["type"].as_str(), b["object"]["metadata"]["name"].as_str()), (Some("ADDED"), Some("b")));
}

async fn initial_events(target: &KubeTarget, namespace: &str) {
    for name in ["a", "b"] {
        create_application(target, namespace, &application(name)).await;
    }
    for namespace in [namespace, ""] {
        let query = format!(
            "{}?watch=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true&resourceVersion=&timeoutSeconds=30",
            path(APPLICATION, namespace, "")
        );
        let mut lines = target.lines(&query).await.unwrap();
        let mut count = 0;
        let bookmark = loop {
            let event = next(&mut lines).await;
            if event["type"] == "BOOKMARK" {
                break event;
            }
            assert_eq!(event["type"], "ADDED");
            count += 1;
        };
        assert!(count >= 2);
        let metadata = &bookmark["object"]["metadata"];
        assert_eq!(metadata["annotations"]["k8s.io/initial-events-end"], "true");
        assert_eq!(bookmark["object"]["kind"], "Application");
        assert!(version(&bookmark["object"]) > 0);
    }
    let query = format!("{}?watch=true&sendInitialEvents=true", path(APPLICATION, namespace, ""));
    let error = target.lines(&query).await.unwrap_err().to_string();
    assert!(error.starts_with("422: ") && error.contains("resourceVersionMatch"), "{error}");
}

async fn expired(target: &KubeTarget, namespace: &str) {
    let query = format!("{}?watch=true&resourceVersion=99999999", path(APPLICATION, namespace, ""));
    let refused = target.lines(&query).await.err().map(|error| error.to_string());
    assert!(refused.is_none_or(|error| error.starts_with("504: Too large resource version")));
    let list = format!(
        "{}?resourceVersion=99999999&resourceVersionMatch=NotOlderThan&timeoutSeconds=1",
        path(APPLICATION, namespace, "")
    );
    let answer = target.request(Method::GET, &list, "", "").await.unwrap();
    expect(&answer, 504, "Timeout");
    assert!(answer.json()["message"].as_str().unwrap().contains("Too large resource version"));
}

async fn built_in_kinds(target: &KubeTarget, namespace: &str) {
    let secret = json!({"metadata": {"name": "s"}, "data": {"k": "dg=="}});
    let secret = target.create(Resource::Secret, namespace, &secret).await.unwrap().object().unwrap();
    assert_eq!(secret["metadata"].get("generation"), None);
    let mut next = secret.clone();
    next["data"]["k"] = json!("dw==");
    next["metadata"]["resourceVersion"] = json!("");
    let put = path(Resource::Secret, namespace, "s");
    let updated = target.request(Method::PUT, &put, JSON, next.to_string()).await.unwrap();
    assert_eq!(updated.object().unwrap()["data"]["k"], "dw==", "no resourceVersion, no condition");
    assert_eq!(target.request(Method::PUT, &put, JSON, secret.to_string()).await.unwrap().code, 409);
    let patched =
        target.merge_patch(Resource::Secret, namespace, "s", &json!({"data": {"k": null}})).await.unwrap();
    assert_eq!(patched.code, 200);

    let other = json!({"kind": "ConfigMap", "metadata": {"name": "t"}});
    expect(&target.create(Resource::Secret, namespace, &other).await.unwrap(), 400, "BadRequest");
    let map = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "m"}, "data": {"k": "v"}});
    assert_eq!(target.create(Resource::ConfigMap, namespace, &map).await.unwrap().code, 201);
    let list = target.request(Method::GET, &path(Resource::ConfigMap, namespace, ""), "", "").await.unwrap();
    assert_eq!(list.json()["kind"], "ConfigMapList");

    let lease = json!({
        "apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "l"},
        "spec": {"holderIdentity": "me", "leaseDurationSeconds": 15}
    });
    assert_eq!(target.create(Resource::Lease, namespace, &lease).await.unwrap().code, 201);
    assert_eq!(target.delete(Resource::Lease, namespace, "l").await.unwrap().code, 200);

    let read = target.get(Resource::Namespace, "", namespace).await.unwrap().object().unwrap();
    assert_eq!(read["kind"], "Namespace");
    let second = format!("{namespace}-2");
    let object = json!({"metadata": {"name": second}});
    let create = format!("{}?fieldManager=x&fieldValidation=Ignore", path(Resource::Namespace, "", ""));
    let created = target.request(Method::POST, &create, JSON, object.to_string()).await.unwrap();
    assert_eq!(created.code, 201);
    let uid = json!({"preconditions": {"uid": "0b5e1b1e-0000-4000-8000-000000000000"}});
    let delete = path(Resource::Namespace, "", &second);
    let refused = target.request(Method::DELETE, &delete, JSON, uid.to_string()).await.unwrap();
    expect(&refused, 409, "Conflict");
}

async fn discovery(target: &KubeTarget, _: &str) {
    let get = async |path: &str| target.request(Method::GET, path, "", "").await.unwrap().object().unwrap();
    assert_eq!(get("/version").await["major"], "1");
    assert_eq!(get("/api?timeout=32s").await["versions"], json!(["v1"]));
    let groups = get("/apis").await;
    let group = groups["groups"]
        .as_array()
        .unwrap()
        .iter()
        .find(|group| group["name"] == "argoproj.io")
        .unwrap()
        .clone();
    assert_eq!(
        group["preferredVersion"],
        json!({"groupVersion": "argoproj.io/v1alpha1", "version": "v1alpha1"})
    );
    assert_eq!(get("/apis/argoproj.io").await["kind"], "APIGroup");
    for (path, kind) in [
        ("/api/v1", "Secret"),
        ("/apis/argoproj.io/v1alpha1", "Application"),
        ("/apis/coordination.k8s.io/v1", "Lease"),
    ] {
        let list = get(path).await;
        assert_eq!(list["kind"], "APIResourceList");
        let resource = list["resources"]
            .as_array()
            .unwrap()
            .iter()
            .find(|resource| resource["kind"] == kind)
            .unwrap()
            .clone();
        assert_eq!(resource["namespaced"], true);
        for verb in ["create", "delete", "get", "list", "patch", "update", "watch"] {
            assert!(resource["verbs"].as_array().unwrap().contains(&json!(verb)), "{verb} {kind}");
        }
    }
    assert!(get("/openapi/v3").await["paths"]["apis/argoproj.io/v1alpha1"]["serverRelativeURL"].is_string());
    for probe in ["/livez", "/readyz"] {
        let answer = target.request(Method::GET, probe, "", "").await.unwrap();
        assert_eq!((answer.code, &answer.body[..]), (200, &b"ok"[..]));
    }
    assert_eq!(target.request(Method::GET, "/apis/example.com", "", "").await.unwrap().code, 404);
}

async fn identity(target: &KubeTarget, namespace: &str) {
    let mut stranger = target.clone();
    stranger.token = Some("wrong".to_owned());
    expect(&stranger.get(APPLICATION, namespace, "a").await.unwrap(), 401, "Unauthorized");
}

async fn open(target: &KubeTarget, namespace: &str, after: &Value, more: &str) -> Lines {
    let from = after["metadata"]["resourceVersion"].as_str().unwrap();
    target
        .lines(&format!("{}?watch=true&resourceVersion={from}{more}", path(APPLICATION, namespace, "")))
        .await
        .unwrap()
}

/// The next event that is no bookmark, unless the bookmark ends the initial events.
async fn next(lines: &mut Lines) -> Value {
    loop {
        let event = lines.next().await.unwrap().expect("the watch goes on");
        if event["type"] != "BOOKMARK" || event["object"]["metadata"]["annotations"].is_object() {
            return event;
        }
    }
}

fn version(object: &Value) -> u64 {
    object["metadata"]["resourceVersion"].as_str().unwrap().parse().unwrap()
}

fn names(list: &Value) -> Vec<String> {
    let items = list["items"].as_array().unwrap();
    items.iter().map(|item| item["metadata"]["name"].as_str().unwrap().to_owned()).collect()
}
