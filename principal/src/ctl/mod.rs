//! The command line tool that sets up the PKI, the token key and the agents.

mod agent;
mod config;
mod jwt;
mod pki;
mod secrets;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};

/// Runs the tool with the process's arguments.
pub fn main() -> ExitCode {
    let cli = match parse(std::env::args_os()) {
        Ok(cli) => cli,
        Err(code) => return code,
    };
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fatal(&format!("cannot start: {error}")),
    };
    match runtime.block_on(run(cli)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => fatal(&message),
    }
}

#[derive(Parser, Debug)]
#[command(
    name = "argocd-agentctl",
    about = "Set up the certificates, the token key and the agents of argocd-agent",
    disable_version_flag = true,
    arg_required_else_help = true
)]
struct Cli {
    #[command(flatten)]
    global: Global,
    #[command(subcommand)]
    command: Command,
}

#[derive(Args, Debug)]
struct Global {
    /// Kubernetes context of the principal's cluster
    #[arg(
        long,
        global = true,
        env = "ARGOCD_AGENT_PRINCIPAL_CONTEXT",
        default_value = "",
        hide_env_values = true
    )]
    principal_context: String,
    /// Namespace of the principal [default: argocd]
    #[arg(long, global = true, env = "ARGOCD_AGENT_PRINCIPAL_NAMESPACE", hide_env_values = true)]
    principal_namespace: Option<String>,
    /// Kubernetes context of the agent's cluster
    #[arg(
        long,
        global = true,
        env = "ARGOCD_AGENT_AGENT_CONTEXT",
        default_value = "",
        hide_env_values = true
    )]
    agent_context: String,
    /// Namespace of the agent [default: argocd]
    #[arg(long, global = true, env = "ARGOCD_AGENT_AGENT_NAMESPACE", hide_env_values = true)]
    agent_namespace: Option<String>,
    /// Principal of that name in the configuration file
    #[arg(long, global = true, default_value = "")]
    principal: String,
    /// Agent of that name in the configuration file
    #[arg(long, global = true, default_value = "")]
    agent: String,
    /// Configuration file [default: $HOME/.config/argocd-agent/ctl.conf]
    #[arg(long, global = true)]
    config: Option<std::path::PathBuf>,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Manage agents
    #[command(alias = "agents", subcommand_required = true, arg_required_else_help = true)]
    Agent {
        #[command(subcommand)]
        command: agent::Command,
    },
    /// Manage the PKI, for development and tests only
    #[command(subcommand_required = true, arg_required_else_help = true)]
    Pki {
        #[command(subcommand)]
        command: pki::Command,
    },
    /// Manage the key that signs the agents' tokens
    #[command(subcommand_required = true, arg_required_else_help = true)]
    Jwt {
        #[command(subcommand)]
        command: jwt::Command,
    },
    /// Print the version
    Version {
        /// Indent the output
        #[arg(short, long)]
        indent: bool,
    },
}

#[derive(Args, Debug)]
struct KeyArgs {
    /// Key algorithm: rsa, ecdsa-p256, ecdsa-p384, ecdsa-p521 or ed25519
    #[arg(long, default_value = "rsa")]
    key_algorithm: String,
    /// Key size in bits, for RSA: 2048, 3072 or 4096
    #[arg(long, default_value_t = 4096)]
    key_size: u32,
}

impl KeyArgs {
    fn algorithm(&self) -> Result<crate::pki::KeyAlgorithm, String> {
        crate::pki::KeyAlgorithm::parse(&self.key_algorithm, self.key_size)
    }
}

async fn run(cli: Cli) -> Result<(), String> {
    match cli.command {
        Command::Version { indent } => {
            say(&crate::version::json(if indent { "  " } else { "" }));
            Ok(())
        }
        Command::Agent { command } => agent::run(&cli.global, command).await,
        Command::Pki { command } => pki::run(&cli.global, command).await,
        Command::Jwt { command } => jwt::run(&cli.global, command).await,
    }
}

fn parse(args: impl IntoIterator<Item = OsString>) -> Result<Cli, ExitCode> {
    let parsed =
        Cli::command().try_get_matches_from(args).and_then(|matches| Cli::from_arg_matches(&matches));
    parsed.map_err(|error| {
        use clap::error::ErrorKind;
        match error.kind() {
            ErrorKind::DisplayHelp => {
                say(error.to_string().trim_end());
                ExitCode::SUCCESS
            }
            ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
                complain(error.to_string().trim_end());
                ExitCode::FAILURE
            }
            _ => {
                let text = error.to_string();
                let text = text.trim_end();
                complain(&text.replacen("error: ", "Error: ", 1));
                fatal(&gist(text))
            }
        }
    })
}

/// The first paragraph of a clap error as one line.
fn gist(text: &str) -> String {
    let lines: Vec<_> = text.lines().map(str::trim).take_while(|line| !line.is_empty()).collect();
    let line = lines.join(" ");
    line.strip_prefix("error: ").unwrap_or(&line).to_owned()
}

fn fatal(message: &str) -> ExitCode {
    complain(&format!("[FATAL]: {message}"));
    ExitCode::FAILURE
}

/// One line of result on stdout. A closed pipe is the reader's choice, not our failure.
fn say(line: &str) {
    use std::io::Write as _;
    let _ = writeln!(std::io::stdout(), "{line}");
}

fn complain(line: &str) {
    use std::io::Write as _;
    let _ = writeln!(std::io::stderr(), "{line}");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cli(line: &str) -> Result<Cli, ExitCode> {
        parse(line.split(' ').map(OsString::from))
    }

    #[test]
    fn command_tree_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn global_flags_go_anywhere() {
        let cli = cli("argocd-agentctl pki init --principal-context hub --days 5").unwrap();
        assert_eq!(cli.global.principal_context, "hub");
        assert!(matches!(cli.command, Command::Pki { command: pki::Command::Init { days: 5, .. } }));
    }

    #[test]
    fn a_missing_argument_is_named_in_the_last_line() {
        let error = Cli::command().try_get_matches_from(["argocd-agentctl", "agent", "create"]).unwrap_err();
        assert_eq!(
            gist(&error.to_string()),
            "the following required arguments were not provided: <AGENT_NAME>"
        );
    }

    #[test]
    fn unknown_words_are_refused() {
        assert!(cli("argocd-agentctl pki nonsense").is_err());
        assert!(cli("argocd-agentctl agent create a --resource-proxy-username x").is_err());
        assert!(cli("argocd-agentctl --nonsense version").is_err());
    }
}
