//! The two programs as an operator meets them: wrong input, signals, a link that dies.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use harness::arguments::{Build, Peers};
use harness::rig::apps::{application, await_equal, await_object, edge_app, hub_app, hub_apps, is_copy};
use harness::rig::{Stack, StackOptions, WorkDir, embedded_cluster, wait_for};
use serde_json::json;

#[test]
fn a_wrong_flag_ends_either_program_with_usage() {
    let options = options();
    for program in [options.agent.program(), options.principal.program()] {
        let output = run(program, &["--no-such-flag"]);
        assert_eq!(output.status.code(), Some(1), "{program}");
        let text = text(&output);
        assert!(
            text.contains("--no-such-flag") && text.to_lowercase().contains("usage"),
            "{program}: {text}"
        );
    }
}

#[test]
fn every_start_up_error_is_one_line_that_names_the_culprit() {
    let options = options();
    let dir = WorkDir::new("start-up").unwrap();
    let broken = dir.join("broken-kubeconfig");
    fs::write(&broken, "clusters: [").unwrap();
    let (_server, cluster) = embedded_cluster("edge").unwrap();
    let good = harness::rig::write_kubeconfig(&dir.join("kubeconfig"), &[&cluster]).unwrap();
    let missing = dir.join("no-such-file");
    let kubeconfig = |path: &Path| format!("--kubeconfig={}", path.display());
    let agent =
        ["--agent-mode=managed", "--creds=mtls:any", "--server-address=127.0.0.1", "--metrics-port=0"];
    let principal = ["--namespace=argocd", "--auth=mtls:CN=([^,]+)", "--metrics-port=0"];
    let cases: &[(&str, &[&str], String, &str)] = &[
        (options.agent.program(), &agent, kubeconfig(&missing), "no-such-file"),
        (options.agent.program(), &agent, kubeconfig(&broken), "broken-kubeconfig"),
        // The cluster is there, the Secrets are not.
        (options.agent.program(), &agent, kubeconfig(&good), "argocd-agent-"),
        (options.agent.program(), &agent[1..], kubeconfig(&good), "managed"),
        (options.principal.program(), &principal, kubeconfig(&missing), "no-such-file"),
        (options.principal.program(), &principal, kubeconfig(&broken), "broken-kubeconfig"),
        (options.principal.program(), &principal, kubeconfig(&good), "argocd-agent-"),
        (options.principal.program(), &principal[..1], kubeconfig(&good), "auth"),
    ];
    for (program, arguments, kubeconfig, culprit) in cases {
        let arguments = [arguments, &[kubeconfig.as_str()][..]].concat();
        let output = run(program, &arguments);
        let text = text(&output);
        assert_eq!(output.status.code(), Some(1), "{program} {arguments:?}: {text}");
        let fatal: Vec<&str> = text.lines().filter(|line| line.starts_with("[FATAL]: ")).collect();
        assert_eq!(fatal.len(), 1, "{program} {arguments:?}: {text}");
        assert!(fatal[0].contains(culprit), "{program} {arguments:?} should name {culprit}: {text}");
    }
}

#[test]
fn both_end_cleanly_on_sigterm_and_come_back() {
    let mut stack = stack();
    deliver(&stack, "before");
    let agent = stack.terminate_agent().unwrap();
    assert_eq!((agent.code(), agent.signal()), (Some(0), None), "the agent on SIGTERM");
    let principal = stack.terminate_principal().unwrap();
    assert_eq!((principal.code(), principal.signal()), (Some(0), None), "the principal on SIGTERM");
    stack.start_principal().unwrap();
    stack.start_agent().unwrap();
    deliver(&stack, "after");
}

/// The certificate on the site is of another authority: nothing is synced, nothing is deleted, and both say why.
#[test]
fn a_foreign_certificate_is_refused_and_nothing_is_lost() {
    let mut stack = stack();
    deliver(&stack, "kept");
    stack.terminate_agent().unwrap();
    stack.terminate_principal().unwrap();
    // A new authority on the hub; the site still has the old one's certificates.
    stack.agentctl(&["pki", "init", "--force", "--key-algorithm=ecdsa-p256"]).unwrap();
    let issue = ["pki", "issue", "principal", "--ip=127.0.0.1", "--dns=localhost", "--upsert"];
    stack.agentctl(&[&issue[..], &["--key-algorithm=ecdsa-p256"]].concat()).unwrap();
    stack.start_principal().unwrap();
    stack.spawn_agent().unwrap();
    stack.hub.admin.delete(&hub_app("kept")).unwrap();
    wait_for(LIMIT, || {
        stack.agent().unwrap().log_text().to_lowercase().contains("certificate").then_some(())
    })
    .expect("the agent names the certificate");
    assert!(!stack.agent_is_connected(), "an agent that trusts another authority is not connected");
    let kept = stack.edge.admin.get_opt(&edge_app("kept")).unwrap();
    assert!(kept.is_some(), "the site keeps what it has while the hub is unknown");
}

/// No byte passes and nobody is told: the agent goes on alone, and both are equal after healing.
#[test]
fn a_link_that_hangs_is_survived() {
    let stack = stack();
    deliver(&stack, "hang");
    stack.link.hang();
    let patch = json!({"spec": {"source": {"targetRevision": "v2"}}});
    stack.hub.admin.merge_patch(&hub_app("hang"), &patch).unwrap();
    let local = json!({"spec": {"source": {"targetRevision": "local"}}});
    stack.edge.admin.merge_patch(&edge_app("hang"), &local).unwrap();
    await_object(&stack.edge.admin, &edge_app("hang"), LIMIT, "reverted alone", |edge| {
        edge["spec"]["source"]["targetRevision"] == "v1"
    })
    .unwrap();
    stack.link.heal();
    await_equal(&stack.hub.admin, &stack.edge.admin, LIMIT).unwrap();
}

/// Crashes of either half, one after the other, in the middle of a stream of changes.
#[test]
fn crashes_lose_nothing() {
    let mut stack = stack();
    for round in 0..6 {
        for index in 0..5 {
            stack.hub.admin.create(&hub_apps(), &application(&format!("app-{round}-{index}"))).unwrap();
        }
        if round % 2 == 0 {
            stack.kill_agent().unwrap();
        } else {
            stack.kill_principal().unwrap();
        }
        if round > 0 {
            stack.hub.admin.delete(&hub_app(&format!("app-{}-0", round - 1))).unwrap();
        }
        if round % 2 == 0 {
            stack.start_agent().unwrap();
        } else {
            stack.start_principal().unwrap();
            stack.await_connected(LIMIT).unwrap();
        }
    }
    let count = await_equal(&stack.hub.admin, &stack.edge.admin, LIMIT).unwrap();
    assert_eq!(count, 6 * 5 - 5);
}

fn stack() -> Stack {
    let (_, hub) = embedded_cluster("hub").unwrap();
    let (_, edge) = embedded_cluster("edge").unwrap();
    Stack::start(hub, edge, options()).unwrap()
}

fn deliver(stack: &Stack, name: &str) {
    let hub = stack.hub.admin.create(&hub_apps(), &application(name)).unwrap();
    await_object(&stack.edge.admin, &edge_app(name), LIMIT, "a copy", |edge| is_copy(edge, &hub)).unwrap();
}

fn options() -> StackOptions {
    Peers { build: Build::Dev, ..Peers::default() }.options().unwrap()
}

/// Without the environment of a developer's shell, and not for ever.
fn run(program: &str, arguments: &[&str]) -> Output {
    Command::new("timeout")
        .args(["20", program])
        .args(arguments)
        .env_remove("KUBECONFIG")
        .env("HOME", "/nonexistent")
        .output()
        .unwrap()
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

const LIMIT: Duration = Duration::from_secs(20);
