//! The binary between a scripted principal and a scripted API server.

mod scripted;

use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};

use agent_core::cloudevent::EventView;
use scripted::{Agent, Api, Asked, Do, Hub, Say, Seen, command, kubeconfig_text, scratch};

const LIST: &str = r#"{"kind":"ApplicationList","apiVersion":"argoproj.io/v1alpha1","items":[],"metadata":{"resourceVersion":"10"}}"#;

const CREATE: &str = r#"{"apiVersion":"argoproj.io/v1alpha1","kind":"Application","metadata":{"name":"guestbook","namespace":"agent-1","uid":"u-1","resourceVersion":"7"},"spec":{"project":"default","destination":{"name":"agent-1","namespace":"x"}},"status":{}}"#;

/// A list of Applications.
fn is_list(asked: &Asked) -> bool {
    asked.path.contains("/applications?") && asked.path.contains("limit=")
}

/// Watches of a site without objects; their senders keep them open.
fn quiet(watches: Arc<Mutex<Vec<Sender<String>>>>) -> impl Fn(&Asked) -> Say + Send + Sync {
    move |asked| {
        if asked.path.contains("sendInitialEvents") {
            return Say::Body(
                422,
                r#"{"kind":"Status","reason":"Invalid","message":"no such option"}"#.into(),
            );
        }
        if asked.path.contains("watch=true") {
            let (sender, lines) = channel();
            watches.lock().unwrap().push(sender);
            return Say::Lines(lines);
        }
        if asked.method == "GET" && asked.path.contains("limit=") {
            return Say::Body(200, LIST.into());
        }
        if asked.method == "POST" {
            let stored = asked.body.replacen(
                "\"metadata\":{",
                "\"metadata\":{\"uid\":\"e-1\",\"resourceVersion\":\"11\",",
                1,
            );
            return Say::Body(201, stored);
        }
        Say::Body(404, r#"{"kind":"Status","reason":"NotFound","message":"not found","code":404}"#.into())
    }
}

fn quiet_api() -> Api {
    Api::start(quiet(Arc::default()))
}

fn create_event() -> Vec<u8> {
    let mut frame = Vec::new();
    agent_core::cloudevent::EventWriter {
        source: "argocd-agent-principal",
        r#type: "io.argoproj.argocd-agent.event.create",
        target: agent_core::event::Target::Application,
        subject: None,
        event_id: "guestbook_u-1_7_1",
        resource_id: "guestbook_u-1",
        sent_at: None,
        principal_uid: None,
        data: CREATE.as_bytes(),
    }
    .encode(&mut frame);
    frame
}

#[test]
fn an_application_arrives() {
    let (hub, api) = (Hub::start(), quiet_api());
    let mut agent = Agent::start(api.port, hub.port, &[]);
    let (request, headers) = hub.wait("Authenticate", |seen| match seen {
        Seen::Authenticate(request, headers) => Some((request, headers)),
        _ => None,
    });
    assert_eq!((&*request.version, &*request.mode, &*request.method), ("9.9.9", "managed", "header"));
    assert_eq!(request.agent_namespace, "argocd");
    let ours = headers[agent_core::peer::HEADER].to_str().unwrap().to_owned();
    assert!(ours.starts_with("v=0.") && ours.contains(";m=namespace;c="), "{ours}");
    assert!(!headers.contains_key("authorization"));

    let headers = hub.wait_subscribe();
    assert!(headers["authorization"].to_str().unwrap().starts_with("e30."), "the raw token");
    assert_eq!(headers[agent_core::peer::HEADER], ours);
    assert!(headers["user-agent"].to_str().unwrap().starts_with("argocd-agent-lite/"));

    let list = api.wait("a list", is_list);
    assert_eq!(
        list.path,
        "/apis/argoproj.io/v1alpha1/namespaces/argocd/applications?labelSelector=argocd-agent.argoproj-labs.io%2Fignore-sync%21%3Dtrue&limit=100"
    );
    assert!(list.headers.to_ascii_lowercase().contains("authorization: bearer t0k3n\r\n"));
    api.wait("a watch", |asked| {
        asked.path.contains("/applications?")
            && asked.path.contains("watch=true")
            && asked.path.contains("resourceVersion=10&")
    });

    hub.act(Do::Send(create_event()));
    let post = api.wait("the creation", |asked| asked.method == "POST");
    assert_eq!(
        post.path,
        "/apis/argoproj.io/v1alpha1/namespaces/argocd/applications?fieldManager=argocd-agent"
    );
    assert!(post.body.contains(r#""argocd.argoproj.io/source-uid":"u-1""#), "{}", post.body);
    // The acknowledgement, among what else there is to say.
    while EventView::decode(&hub.wait_frame()).unwrap().event_id != "guestbook_u-1_7_1" {}

    assert_eq!(
        ["/healthz", "/livez", "/readyz", "/nonsense"].map(|path| agent.probe(path)),
        [Some(200), Some(200), Some(200), Some(404)]
    );
    assert_eq!(agent.threads(), 1);

    agent.terminate();
    hub.wait("a half-close", |seen| matches!(seen, Seen::HalfClose).then_some(()));
    hub.act(Do::End(0));
    assert_eq!(agent.wait_exit().code(), Some(0));
}

#[test]
fn every_end_of_the_stream_reconnects() {
    let (hub, api) = (Hub::start(), quiet_api());
    let agent = Agent::start(api.port, hub.port, &["--grpc-max-message-size", "1000"]);
    let ends = [
        (Do::End(14), "UNAVAILABLE"),
        (Do::Raw(vec![0, 0xff, 0, 0, 0]), "--grpc-max-message-size"),
        (Do::HangUp, "connection lost"),
    ];
    for (end, word) in ends {
        hub.wait_subscribe();
        hub.act(end);
        agent.wait_log(word);
        // What ended by our own doing leaves the script's stream open.
        hub.act(Do::HangUp);
    }
    hub.wait_subscribe();
    agent.until("connected again", || agent.probe("/healthz") == Some(200));
    assert!(agent.open_files() < 20, "{} open files", agent.open_files());
}

#[test]
fn a_refused_version_is_said_once_and_not_hammered() {
    let (hub, api) = (Hub::start(), quiet_api());
    hub.refusals.lock().unwrap().push_back((9, "version mismatch"));
    let agent = Agent::start(api.port, hub.port, &[]);
    agent.wait_log("authenticating failed: FAILED_PRECONDITION: version mismatch; ");
    assert_eq!(agent.probe("/healthz"), Some(503));
    assert_eq!(agent.probe("/livez"), Some(200));
}

#[test]
fn a_slow_list_keeps_the_process_alive_and_not_ready() {
    let (go, gate) = channel::<()>();
    let gate = Mutex::new(gate);
    let quiet = quiet(Arc::default());
    let api = Api::start(move |asked| {
        if is_list(asked) {
            let _ = gate.lock().unwrap().recv();
        }
        quiet(asked)
    });
    let hub = Hub::start();
    let agent = Agent::start(api.port, hub.port, &["--informer-sync-timeout", "100ms"]);
    agent.wait_log("Still waiting for the first complete list");
    assert_eq!((agent.probe("/livez"), agent.probe("/readyz")), (Some(200), Some(503)));
    go.send(()).unwrap();
    agent.until("ready", || agent.probe("/readyz") == Some(200));
}

#[test]
fn rubbish_from_the_principal_is_named_and_survived() {
    let (hub, api) = (Hub::start(), quiet_api());
    let agent = Agent::start(api.port, hub.port, &[]);
    hub.wait_subscribe();
    hub.act(Do::Send(vec![0xff; 40]));
    agent.wait_log("Left out a message from the principal that is no event");
    hub.act(Do::Send(create_event()));
    api.wait("the creation", |asked| asked.method == "POST");
    assert_eq!(agent.probe("/healthz"), Some(200));
}

#[test]
fn an_api_server_that_refuses_is_named() {
    let api = Api::start(|_| {
        Say::Body(403, r#"{"kind":"Status","reason":"Forbidden","message":"no way","code":403}"#.into())
    });
    let hub = Hub::start();
    let agent = Agent::start(api.port, hub.port, &[]);
    agent
        .wait_log("cannot list applications in namespace argocd: 403 Forbidden: no way; the Role must allow");
}

/// Runs the binary to its end: exit code and standard error.
fn ends(more: &[&str]) -> (Option<i32>, String) {
    let output = command().args(more).output().unwrap();
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

#[test]
fn what_cannot_work_ends_with_one_line_that_names_it() {
    let api = quiet_api();
    let directory = scratch("bad-input");
    let good = directory.join("good");
    std::fs::write(&good, kubeconfig_text(&format!("http://127.0.0.1:{}", api.port))).unwrap();
    let exec = directory.join("exec");
    std::fs::write(&exec, kubeconfig_text("http://x").replace("token: t0k3n", "exec:\n      command: aws"))
        .unwrap();
    let broken = directory.join("broken");
    std::fs::write(&broken, "a: [1\n").unwrap();
    let (good, exec, broken) = (good.to_str().unwrap(), exec.to_str().unwrap(), broken.to_str().unwrap());
    let base = [
        "--agent-mode",
        "managed",
        "--server-address",
        "127.0.0.1",
        "--creds",
        "mtls:any",
        "--healthz-port",
        "1",
    ];
    for (more, part) in [
        (&["--kubeconfig", "/does/not/exist"][..], "cannot read /does/not/exist"),
        (&["--kubeconfig", broken], "line 1"),
        (&["--kubeconfig", exec], "has exec"),
        (&[], "--kubeconfig"),
        (&["--kubeconfig", good], "Secret argocd-agent-ca in namespace argocd (--root-ca-secret-name)"),
        (&["--kubeconfig", good, "--insecure-tls"], "Secret argocd-agent-client-tls in namespace argocd"),
        (&["--kubeconfig", good, "--root-ca-path", "/no/ca"], "cannot read /no/ca"),
        (
            &[
                "--kubeconfig",
                good,
                "--root-ca-path",
                good,
                "--tls-client-cert",
                good,
                "--tls-client-key",
                good,
            ],
            good,
        ),
        (&["--kubeconfig", good, "--log-level", "loud"], "--log-level"),
        (&["--kubeconfig", good, "--adoption-policy", "maybe"], "--adoption-policy"),
        (
            &["--kubeconfig", good, "--creds", "userpass:/no/file", "--insecure-plaintext"],
            "cannot read /no/file",
        ),
    ] {
        let (code, stderr) = ends(&[&base[..], more].concat());
        let last = stderr.lines().last().unwrap_or_default();
        assert_eq!(code, Some(1), "{more:?}: {stderr}");
        assert!(last.starts_with("[FATAL]: ") && last.contains(part), "{more:?}: {stderr}");
    }
    let (code, stderr) = ends(&["agent", "--no-such-flag"]);
    assert_eq!(code, Some(1));
    assert!(stderr.starts_with("Error: unknown flag: --no-such-flag\nUsage:"), "{stderr}");
    let (code, stderr) = ends(&["--server-address", "x"]);
    assert_eq!(code, Some(1));
    assert!(stderr.contains("--agent-mode managed"), "{stderr}");
    let _ = std::fs::remove_dir_all(directory);
}
