//! `argocd-agentctl`, the command line tool for set-up.

fn main() -> std::process::ExitCode {
    principal::ctl::main()
}
