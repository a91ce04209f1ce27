//! `cargo demo [--once] [--kubeconfig F --hub CONTEXT --edge CONTEXT]`: see one Application travel.

use std::io::{self, BufRead as _, Write as _};
use std::process::ExitCode;

use harness::arguments::Peers;
use harness::demo::{self, Journey, Step};
use harness::rig::Stack;

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            say(&format!("[FATAL]: {error}"));
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<bool, String> {
    let mut peers = Peers::default();
    let (mut once, mut kubeconfig, mut hub, mut edge) = (false, None, None, None);
    peers.parse("demo", &mut |name, value| {
        match name {
            "--once" => once = true,
            "--kubeconfig" => kubeconfig = Some(value()?),
            "--hub" => hub = Some(value()?),
            "--edge" => edge = Some(value()?),
            _ => return Ok(false),
        }
        Ok(true)
    })?;
    say("building the binaries ...");
    let options = peers.options()?;
    let own = kubeconfig.is_some();
    let journey = match (kubeconfig, hub, edge) {
        (None, None, None) => {
            say(
                "two embedded Kubernetes APIs, a fresh PKI, the real principal and agent-lite over TLS on loopback\n",
            );
            demo::on_embedded(options, &mut print)?
        }
        (Some(kubeconfig), Some(hub), Some(edge)) => {
            demo::on_clusters(kubeconfig.as_ref(), &hub, &edge, options, &mut print)?
        }
        _ => return Err("--kubeconfig, --hub and --edge belong together".to_owned()),
    };
    let Journey { stack, held, .. } = &journey;
    if *held {
        say(&format!("\nevery step held{}", footprint(stack)));
    }
    if !once && *held {
        stay(stack);
    }
    if own {
        demo::clean_up(stack);
    }
    Ok(*held)
}

/// Until the user has seen enough. Ctrl-C ends everything: the children die with this process.
fn stay(stack: &Stack) {
    let (file, hub, edge) = (stack.kubeconfig.display(), &stack.hub.context, &stack.edge.context);
    say(&format!(
        "\nit keeps running; in another terminal:\n\
         \n  export KUBECONFIG={file}\
         \n  kubectl --context {hub} -n agent-a get applications -w\
         \n  kubectl --context {edge} -n argocd get applications -w\n\
         \nlogs: {}\nEnter or Ctrl-C ends it.",
        stack.directory().display()
    ));
    let _ = io::stdin().lock().read_line(&mut String::new());
}

fn footprint(stack: &Stack) -> String {
    stack.agent().ok().and_then(|agent| agent.memory().ok()).map_or_else(String::new, |memory| {
        format!("; the agent uses {} KiB of memory in {} thread(s)", memory.rss_kib, memory.threads)
    })
}

fn print(step: &Step) {
    let (word, text) = match &step.outcome {
        Ok(text) => ("held  ", text),
        Err(text) => ("FAILED", text),
    };
    say(&format!("{word} {:<8} {:>5.1} s  {text}", step.name, step.seconds));
}

fn say(line: &str) {
    // A closed pipe is the reader's choice.
    let _ = writeln!(io::stdout(), "{line}");
}
