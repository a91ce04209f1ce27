//! A hub and a site with a principal and an agent between them, as processes.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;
use std::{io, process as std_process};

use super::{Cluster, CommandLine, Link, Process, Rights, WorkDir, free_port, wait_for, write_kubeconfig};

/// Which programs play, and how they are started.
#[derive(Clone, Debug)]
pub struct StackOptions {
    pub principal: CommandLine,
    pub agent: CommandLine,
    pub agentctl: CommandLine,
    /// A foreign half gets the rights of the reference's manifests, and a Redis.
    pub foreign_principal: bool,
    pub foreign_agent: bool,
    pub log_level: String,
    /// Appended to the agent's arguments.
    pub agent_arguments: Vec<String>,
    pub principal_arguments: Vec<String>,
    /// `None`: one is written from the clusters' credentials.
    pub kubeconfig: Option<PathBuf>,
}

/// The running system. Every part dies with it.
pub struct Stack {
    pub hub: Cluster,
    pub edge: Cluster,
    /// Between agent and principal.
    pub link: Link,
    pub kubeconfig: PathBuf,
    options: StackOptions,
    principal: Option<Process>,
    agent: Option<Process>,
    redis: Option<(Process, u16)>,
    principal_port: u16,
    principal_health: u16,
    agent_health: u16,
    dir: WorkDir,
}

impl StackOptions {
    pub fn new(principal: CommandLine, agent: CommandLine, agentctl: CommandLine) -> Self {
        Self {
            principal,
            agent,
            agentctl,
            foreign_principal: false,
            foreign_agent: false,
            log_level: "info".to_owned(),
            agent_arguments: Vec::new(),
            principal_arguments: Vec::new(),
            kubeconfig: None,
        }
    }
}

impl Stack {
    /// Prepares both clusters and the PKI; starts no peer yet.
    pub fn prepare(hub: Cluster, edge: Cluster, options: StackOptions) -> Result<Self, String> {
        let io_error = |error: io::Error| error.to_string();
        let dir = WorkDir::new("stack").map_err(io_error)?;
        let kubeconfig = match &options.kubeconfig {
            Some(path) => path.clone(),
            None => write_kubeconfig(&dir.join("kubeconfig"), &[&hub, &edge]).map_err(io_error)?,
        };
        let rights = |foreign: bool| if foreign { Rights::Reference } else { Rights::Lite };
        hub.prepare_hub(HUB_NAMESPACE, rights(options.foreign_principal))?;
        hub.ensure_namespace(AGENT)?;
        edge.prepare_edge(EDGE_NAMESPACE, rights(options.foreign_agent))?;

        let principal_port = free_port().map_err(io_error)?;
        let link = Link::start(SocketAddr::from((Ipv4Addr::LOCALHOST, principal_port))).map_err(io_error)?;
        let redis =
            (options.foreign_principal || options.foreign_agent).then(|| start_redis(&dir)).transpose()?;
        let stack = Self {
            hub,
            edge,
            link,
            kubeconfig,
            principal: None,
            agent: None,
            redis,
            principal_port,
            principal_health: free_low_port()?,
            agent_health: free_low_port()?,
            dir,
            options,
        };
        stack.make_pki()?;
        Ok(stack)
    }

    /// Prepares everything and starts both peers.
    pub fn start(hub: Cluster, edge: Cluster, options: StackOptions) -> Result<Self, String> {
        let mut stack = Self::prepare(hub, edge, options)?;
        stack.start_principal()?;
        stack.start_agent()?;
        Ok(stack)
    }

    /// Returns when the principal says it is healthy.
    pub fn start_principal(&mut self) -> Result<(), String> {
        let mut arguments = vec![
            "--listen-host=127.0.0.1".to_owned(),
            format!("--listen-port={}", self.principal_port),
            format!("--namespace={HUB_NAMESPACE}"),
            format!("--allowed-namespaces={AGENT}"),
            "--auth=mtls:CN=([^,]+)".to_owned(),
            format!("--kubeconfig={}", self.kubeconfig.display()),
            format!("--kubecontext={}", self.hub.peer_context),
            format!("--healthz-port={}", self.principal_health),
            "--metrics-port=0".to_owned(),
            "--enable-resource-proxy=false".to_owned(),
            "--disable-redis-proxy=true".to_owned(),
            format!("--log-level={}", self.options.log_level),
        ];
        arguments
            .extend(self.redis.as_ref().map(|(_, port)| format!("--redis-server-address=127.0.0.1:{port}")));
        arguments.extend(self.options.principal_arguments.iter().cloned());
        let mut process = Process::spawn(
            "principal",
            &self.options.principal,
            &arguments,
            &[],
            &self.dir.join("principal.log"),
        )
        .map_err(|error| error.to_string())?;
        let port = self.principal_health;
        process.wait_while_alive(START_LIMIT, "health", || healthy(port))?;
        self.principal = Some(process);
        Ok(())
    }

    /// Returns when the agent says it is connected.
    pub fn start_agent(&mut self) -> Result<(), String> {
        self.spawn_agent()?;
        self.await_connected(START_LIMIT)
    }

    /// Starts the agent without waiting for anything.
    pub fn spawn_agent(&mut self) -> Result<(), String> {
        let mut arguments = vec![
            "--server-address=127.0.0.1".to_owned(),
            format!("--server-port={}", self.link.address().port()),
            "--agent-mode=managed".to_owned(),
            "--creds=mtls:any".to_owned(),
            format!("--namespace={EDGE_NAMESPACE}"),
            format!("--kubeconfig={}", self.kubeconfig.display()),
            format!("--kubecontext={}", self.edge.peer_context),
            format!("--healthz-port={}", self.agent_health),
            "--metrics-port=0".to_owned(),
            format!("--log-level={}", self.options.log_level),
        ];
        arguments.extend(self.redis.as_ref().map(|(_, port)| format!("--redis-addr=127.0.0.1:{port}")));
        arguments.extend(self.options.agent_arguments.iter().cloned());
        let process =
            Process::spawn("agent", &self.options.agent, &arguments, &[], &self.dir.join("agent.log"))
                .map_err(|error| error.to_string())?;
        self.agent = Some(process);
        Ok(())
    }

    pub fn await_connected(&mut self, limit: Duration) -> Result<(), String> {
        let port = self.agent_health;
        let agent = self.agent.as_mut().ok_or("the agent is not running")?;
        agent.wait_while_alive(limit, "connection to the principal", || healthy(port))
    }

    pub fn agent(&self) -> Result<&Process, String> {
        self.agent.as_ref().ok_or_else(|| "the agent is not running".to_owned())
    }

    pub fn principal(&self) -> Result<&Process, String> {
        self.principal.as_ref().ok_or_else(|| "the principal is not running".to_owned())
    }

    /// Whether the agent says that it is connected.
    pub fn agent_is_connected(&self) -> bool {
        healthy(self.agent_health).is_some()
    }

    pub fn kill_agent(&mut self) -> Result<(), String> {
        let process = self.agent.take().ok_or("the agent is not running")?;
        process.kill().map_err(|error| error.to_string())
    }

    pub fn kill_principal(&mut self) -> Result<(), String> {
        let process = self.principal.take().ok_or("the principal is not running")?;
        process.kill().map_err(|error| error.to_string())
    }

    pub fn terminate_agent(&mut self) -> Result<ExitStatus, String> {
        let process = self.agent.take().ok_or("the agent is not running")?;
        process.terminate(STOP_LIMIT).map_err(|error| error.to_string())
    }

    pub fn terminate_principal(&mut self) -> Result<ExitStatus, String> {
        let process = self.principal.take().ok_or("the principal is not running")?;
        process.terminate(STOP_LIMIT).map_err(|error| error.to_string())
    }

    /// What both peers said last, for a person who has to find out.
    pub fn last_words(&self) -> String {
        let tail = |process: &Option<Process>| process.as_ref().map(|p| p.log_tail(8)).unwrap_or_default();
        format!("--- principal\n{}\n--- agent\n{}", tail(&self.principal), tail(&self.agent))
    }

    /// Where logs and the kubeconfig are.
    pub fn directory(&self) -> &Path {
        self.dir.path()
    }

    fn make_pki(&self) -> Result<(), String> {
        let (hub, edge) = (self.hub.context.as_str(), self.edge.context.as_str());
        // Elliptic keys: a debug build makes them at once. The JWT key is RSA 4096 in any case.
        let short = "--key-algorithm=ecdsa-p256";
        self.agentctl(&["pki", "init", short])?;
        self.agentctl(&[
            "pki",
            "issue",
            "principal",
            "--ip=127.0.0.1",
            "--dns=localhost",
            "--upsert",
            short,
        ])?;
        self.agentctl(&["jwt", "create-key", "--upsert"])?;
        self.agentctl(&["agent", "create", AGENT, "--resource-proxy-server=127.0.0.1:9090", short])?;
        let edge_context = format!("--agent-context={edge}");
        let mut issue = vec!["pki", "issue", "agent", AGENT, &edge_context, "--agent-namespace=argocd"];
        issue.extend(["--upsert", short]);
        if hub == edge {
            issue.push("--same-context");
        }
        self.agentctl(&issue)
    }

    /// Runs argocd-agentctl with the administrator's rights on both clusters.
    pub fn agentctl(&self, arguments: &[&str]) -> Result<(), String> {
        let words = self.options.agentctl.words();
        let output = Command::new(&words[0])
            .args(&words[1..])
            .args(arguments)
            .args(["--principal-context", &self.hub.context, "--principal-namespace", HUB_NAMESPACE])
            .env("KUBECONFIG", &self.kubeconfig)
            // Nobody's own symbolic names must be picked up.
            .args(["--config", &self.dir.join("no-ctl.conf").display().to_string()])
            .output()
            .map_err(|error| format!("cannot start {}: {error}", words[0]))?;
        if output.status.success() {
            return Ok(());
        }
        let said = String::from_utf8_lossy(&output.stderr);
        Err(format!("argocd-agentctl {}: {}", arguments.join(" "), said.trim()))
    }
}

fn start_redis(dir: &WorkDir) -> Result<(Process, u16), String> {
    let port = free_port().map_err(|error| error.to_string())?;
    let arguments = ["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"];
    let arguments: Vec<String> = arguments.iter().map(|&word| word.to_owned()).collect();
    let mut process = Process::spawn(
        "redis-server",
        &CommandLine::new("redis-server"),
        &arguments,
        &[],
        &dir.join("redis.log"),
    )
    .map_err(|error| error.to_string())?;
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    process.wait_while_alive(START_LIMIT, "listener", || {
        std::net::TcpStream::connect_timeout(&address, Duration::from_millis(200)).ok()
    })?;
    Ok((process, port))
}

/// `Some` when `/healthz` on the port answers 2xx.
fn healthy(port: u16) -> Option<()> {
    let agent = ureq::Agent::config_builder()
        .proxy(None)
        .timeout_global(Some(Duration::from_secs(2)))
        .build()
        .new_agent();
    agent.get(format!("http://127.0.0.1:{port}/healthz")).call().ok().map(drop)
}

/// Health ports end at 32767 for these programs, below the range that the kernel hands out.
fn free_low_port() -> Result<u16, String> {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    // Test binaries run side by side: start at different places.
    let start = (std_process::id() % 1000) as u16 * 12;
    wait_for(Duration::from_secs(5), || {
        let port = 20_000 + (start + NEXT.fetch_add(1, Ordering::Relaxed)) % 12_000;
        TcpListener::bind((Ipv4Addr::LOCALHOST, port)).ok().map(|_| port)
    })
    .ok_or_else(|| "no free port below 32768".to_owned())
}

/// The principal's namespace on the hub.
pub const HUB_NAMESPACE: &str = "argocd";
/// The agent's namespace on the site.
pub const EDGE_NAMESPACE: &str = "argocd";
/// The agent's name, which is its namespace on the hub.
pub const AGENT: &str = "agent-a";
const START_LIMIT: Duration = Duration::from_secs(60);
const STOP_LIMIT: Duration = Duration::from_secs(15);
