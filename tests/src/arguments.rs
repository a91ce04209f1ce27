//! The command line that the instruments share.

use std::io::{self, Write as _};
use std::process::Command;
use std::{env, str::FromStr};

use serde_json::Value;

use crate::rig::{CommandLine, StackOptions};

/// `--agent CMD`, `--principal CMD`, `--agentctl CMD`, `--json`; what is not given is ours, built by cargo.
#[derive(Debug, Default)]
pub struct Peers {
    pub agent: Vec<CommandLine>,
    pub principal: Option<CommandLine>,
    pub agentctl: Option<CommandLine>,
    pub json: bool,
    pub log_level: Option<String>,
    pub build: Build,
}

/// How ours are built where no command is given.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Build {
    /// Quick to build.
    #[default]
    Dev,
    /// As users get them: what is measured.
    Shipped,
}

/// Takes further options: a name with its value, if it wants the name.
pub type Extra<'a> =
    &'a mut dyn FnMut(&str, &mut dyn FnMut() -> Result<String, String>) -> Result<bool, String>;

impl Peers {
    pub fn parse(&mut self, program: &str, extra: Extra<'_>) -> Result<(), String> {
        let mut words = env::args().skip(1);
        while let Some(word) = words.next() {
            let (name, mut inline) = match word.split_once('=') {
                Some((name, value)) => (name.to_owned(), Some(value.to_owned())),
                None => (word, None),
            };
            let mut value = || {
                inline
                    .take()
                    .or_else(|| words.next())
                    .ok_or_else(|| format!("{program}: {name} needs a value"))
            };
            match name.as_str() {
                "--agent" => self.agent.push(value()?.parse()?),
                "--principal" => self.principal = Some(value()?.parse()?),
                "--agentctl" => self.agentctl = Some(value()?.parse()?),
                "--log-level" => self.log_level = Some(value()?),
                "--json" => self.json = true,
                _ if extra(&name, &mut value)? => {}
                _ => return Err(format!("{program}: unknown option {name}")),
            }
        }
        Ok(())
    }

    /// Options of a stack with the first agent given, or ours.
    pub fn options(&self) -> Result<StackOptions, String> {
        self.options_with(self.agent.first())
    }

    /// Builds whatever of ours is needed.
    pub fn options_with(&self, agent: Option<&CommandLine>) -> Result<StackOptions, String> {
        let (principal, agentctl) = match (&self.principal, &self.agentctl) {
            (Some(principal), Some(agentctl)) => (principal.clone(), agentctl.clone()),
            (principal, agentctl) => {
                let [ours, ctl] = built_principal(self.build)?;
                (principal.clone().unwrap_or(ours), agentctl.clone().unwrap_or(ctl))
            }
        };
        let ours = match agent {
            Some(agent) => agent.clone(),
            None => built_agent(self.build)?,
        };
        let mut options = StackOptions::new(principal, ours, agentctl);
        options.foreign_principal = self.principal.is_some();
        options.foreign_agent = agent.is_some();
        if let Some(level) = &self.log_level {
            options.log_level.clone_from(level);
        }
        Ok(options)
    }
}

/// Ours: `AGENT_LITE` names a built binary (what `cross/build` made), else cargo makes one.
pub fn built_agent(how: Build) -> Result<CommandLine, String> {
    match env::var("AGENT_LITE") {
        Ok(command) => CommandLine::from_str(&command),
        Err(_) => {
            let profile = if how == Build::Shipped { "edge" } else { "dev" };
            let [agent] = build("agent-lite", profile, ["agent-lite"])?;
            Ok(agent)
        }
    }
}

/// Our principal and our argocd-agentctl.
pub fn built_principal(how: Build) -> Result<[CommandLine; 2], String> {
    let profile = if how == Build::Shipped { "release" } else { "dev" };
    build("principal", profile, ["principal", "argocd-agentctl"])
}

pub fn print_json(value: &Value) {
    // A closed pipe is the reader's choice.
    let _ = writeln!(io::stdout(), "{value:#}");
}

/// Rounded to hundredths, as figures are told.
pub fn hundredths(figure: f64) -> f64 {
    (figure * 100.0).round() / 100.0
}

/// Lets cargo build a package on its own, as it is shipped, and asks where the binaries are.
fn build<const N: usize>(
    package: &str,
    profile: &str,
    binaries: [&str; N],
) -> Result<[CommandLine; N], String> {
    let cargo = env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/../Cargo.toml");
    let output = Command::new(&cargo)
        .args(["build", "--quiet", "--locked", "--package", package, "--bins", "--profile", profile])
        .args(["--manifest-path", manifest])
        .arg("--message-format=json-render-diagnostics")
        .stderr(std::process::Stdio::inherit())
        .output()
        .map_err(|error| format!("cannot start {cargo}: {error}"))?;
    if !output.status.success() {
        return Err(format!("cargo could not build {package}"));
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let messages: Vec<Value> = text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let mut commands = Vec::with_capacity(N);
    for name in binaries {
        let path = messages
            .iter()
            .filter(|message| message["target"]["name"] == name)
            .find_map(|message| message["executable"].as_str())
            .ok_or_else(|| format!("cargo built {package} without a binary {name}"))?;
        commands.push(CommandLine::new(path));
    }
    commands.try_into().map_err(|_| format!("cargo built {package} incompletely"))
}
