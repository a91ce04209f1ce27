//! The edge half of argocd-agent: one thread, one loop, a few megabytes.

mod args;
mod grpc;
mod health;
mod io;
mod kube;
mod log;
mod material;
mod net;
mod shell;
mod tls;

use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use agent_core::core::{AdoptionPolicy, Config, Core, MismatchPolicy};
use agent_core::informer::{self, Informer};
use agent_core::peer::{Capabilities, Peer};
use agent_core::rand::Rng;
use agent_core::request::Kind;
use agent_core::session::Session;
use agent_core::transform::OnRecreate;
use tracing::{error, info, warn};

use crate::args::{ArgsError, Command, Creds, NAME, Options, VERSION};
use crate::grpc::client::Settings;
use crate::health::{Pages, Status};
use crate::kube::client::Client;
use crate::material::{Loader, MaterialError};
use crate::shell::{Clock, Identity, Parts};

fn main() -> ExitCode {
    let arguments: Vec<String> =
        std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned()).collect();
    let options = match args::parse(&arguments, &environment) {
        Ok(Command::Agent(options)) => options,
        Ok(Command::Print(text)) => {
            print(&text);
            return ExitCode::SUCCESS;
        }
        Err(ArgsError::Usage(message)) => {
            complain(&format!("Error: {message}\n{}", args::usage()));
            return ExitCode::FAILURE;
        }
        Err(ArgsError::Fatal(message)) => return fatal(&message),
    };
    match start(*options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => fatal(&message),
    }
}

fn start(options: Options) -> Result<(), String> {
    for rejected in &options.rejected {
        // The time stamp is the reference's: tools that watch for these lines find them.
        let now = log::timestamp(SystemTime::now());
        complain(&format!("{} {rejected}", now.replace('-', "/").replace('T', " ").replace('Z', "")));
    }
    let (levels, unknown) = log::Levels::parse(&options.log_level)?;
    log::install(levels, options.log_json);
    for name in unknown {
        warn!(name, "Unknown subsystem in --log-level");
    }
    if !options.without_effect.is_empty() {
        warn!(settings = options.without_effect.join(","), "These settings have no effect in this version");
    }
    if ["HTTPS_PROXY", "https_proxy"].iter().any(|name| environment(name).is_some_and(|v| !v.is_empty())) {
        warn!("HTTPS_PROXY has no effect in this version: the principal is connected to directly");
    }
    let kube_config = kube::config::load(&options.kubeconfig, &options.kubecontext, &environment)?;
    if options.tls_ciphersuites.iter().any(|name| name == "list") {
        print(&tls::suite_names().join("\n"));
        return Ok(());
    }
    // One thread. Names are resolved on a second one, the only way that the C library offers; it goes after a second.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(1)
        .thread_keep_alive(Duration::from_secs(1))
        .build()
        .map_err(|error| format!("cannot start: {error}"))?;
    let tasks = tokio::task::LocalSet::new();
    let result = tasks.block_on(&runtime, run(options, kube_config));
    // A name that is being resolved is not waited for.
    runtime.shutdown_background();
    result
}

async fn run(options: Options, kube_config: kube::config::Config) -> Result<(), String> {
    let user_agent = format!("{NAME}/{VERSION}");
    let kube = Client::new(kube_config, &user_agent)?;
    let loader = Loader::new(&options, kube.clone());
    let identity = identity(&options)?;
    let core_config = core_config(&options)?;
    info!(version = VERSION, namespace = options.namespace, api_server = kube.address(), "Starting");

    let status = Rc::new(Status::default());
    listen(options.healthz_port, Pages::Probes, &status);
    if let Some(port) = options.metrics_port {
        listen(port, Pages::Metrics, &status);
    }
    first_material(&loader).await?;

    let mut rng = Rng::new(RandomState::new().build_hasher().finish());
    let peer = Peer {
        version: VERSION.into(),
        instance: rng.uuid().into(),
        namespace: options.namespace.as_str().into(),
        mapping: Some(options.mapping),
        capabilities: Capabilities::OURS,
    };
    let settings = Settings {
        host: options.server_address.clone(),
        port: options.server_port,
        user_agent,
        peer_header: peer.format(),
        max_message: options.max_message_size,
        compress: options.enable_compression,
    };
    let label_selector = informer::selector(&options.label_selector);
    let informer = |kind| {
        Informer::new(informer::Config {
            kind,
            namespace: core_config.namespace_of(kind).map(Into::into),
            label_selector: label_selector.as_str().into(),
            page_size: PAGE_SIZE,
            streaming_lists: true,
        })
    };
    let informers = Kind::ALL.map(informer).into();
    let clock = Clock::start();
    shell::run(Parts {
        core: Core::new(core_config, Rng::new(rng.next_u64()), clock.wall),
        informers,
        session: Session::new(clock.wall),
        rng,
        clock,
        kube,
        loader,
        settings: Arc::new(settings),
        identity,
        status,
        sync_patience: options.informer_sync_timeout,
    })
    .await
}

/// Missing or wrong material ends the start; an API server that does not answer is waited for.
async fn first_material(loader: &Loader) -> Result<(), String> {
    let mut wait = Duration::from_secs(1);
    loop {
        match loader.load().await {
            Ok(_) => return Ok(()),
            Err(MaterialError::Wrong(text)) => return Err(text),
            Err(MaterialError::Later(text)) => {
                warn!(retry_seconds = wait.as_secs(), "{text}");
                tokio::time::sleep(wait).await;
                wait = (wait * 2).min(Duration::from_secs(15));
            }
        }
    }
}

fn core_config(options: &Options) -> Result<Config, String> {
    Ok(Config {
        mismatch_policy: match &*options.source_uid_mismatch_policy {
            "upsert" => MismatchPolicy::Upsert,
            _ => MismatchPolicy::Recreate,
        },
        ignore_unmanaged: options.ignore_unmanaged_apps,
        on_recreate: match &*options.on_application_recreate {
            "clear-status" => OnRecreate::ClearStatus,
            "resync" => OnRecreate::Resync,
            _ => OnRecreate::Ignore,
        },
        adoption_policy: match &*options.adoption_policy {
            "always" => AdoptionPolicy::Always,
            "never" => AdoptionPolicy::Never,
            other => return Err(format!("--adoption-policy {other:?}: must be always or never")),
        },
        mapping: options.mapping,
        allowed_namespaces: options.allowed_namespaces.clone(),
        create_namespace: options.create_namespace,
        heartbeat_interval: options.heartbeat_interval,
        status_window: options.status_window,
        ..Config::agent(&options.namespace)
    })
}

fn identity(options: &Options) -> Result<Identity, String> {
    let (method, credentials) = match &options.creds {
        Creds::Mtls => ("mtls", Vec::new()),
        Creds::Header => ("header", Vec::new()),
        Creds::UserPass(path) => ("userpass", user_and_password(Path::new(path))?),
    };
    Ok(Identity { method, credentials, mode: "managed", namespace: options.namespace.clone() })
}

/// The first line of the file, split at its first colon.
fn user_and_password(path: &Path) -> Result<Vec<(String, String)>, String> {
    let text =
        String::from_utf8(kube::config::read(path)?).map_err(|_| format!("{}: not UTF-8", path.display()))?;
    match text.lines().next().and_then(|line| line.split_once(':')) {
        Some((user, password)) => {
            Ok(vec![("clientid".into(), user.into()), ("clientsecret".into(), password.into())])
        }
        None => Err(format!("{}: the first line must be user:password", path.display())),
    }
}

fn listen(port: u16, pages: Pages, status: &Rc<Status>) {
    let status = Rc::clone(status);
    tokio::task::spawn_local(async move {
        let problem = health::serve(port, pages, status).await;
        error!(port, error = %problem, "Cannot listen: probes and metrics on this port fail");
    });
}

fn environment(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

fn fatal(message: &str) -> ExitCode {
    complain(&format!("[FATAL]: {message}"));
    ExitCode::FAILURE
}

/// Standard output or error may be closed: that is no reason to fail.
fn print(text: &str) {
    let _ = writeln!(std::io::stdout(), "{text}");
}

fn complain(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// Objects in a page, where lists cannot be streamed: a page of 12 KB objects stays near a megabyte on the server.
const PAGE_SIZE: u32 = 100;
