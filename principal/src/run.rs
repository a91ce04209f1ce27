//! Start, serve, stop.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use agent_core::peer::Mapping;
use agent_core::request::Kind;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Semaphore, oneshot, watch};

use crate::auth::Method;
use crate::blocklist::Blocklist;
use crate::clock::Clock;
use crate::grpc::{Services, Settings, server};
use crate::hub::{Hub, Shared};
use crate::issuer::Issuer;
use crate::kube::call::Selector;
use crate::kube::material::Material;
use crate::namespaces::Namespaces;
use crate::options::{self, Invocation, Options};
use crate::web::{self, Phase};

/// Runs the principal with the process's arguments and environment.
pub fn main() -> ExitCode {
    let env = |name: &str| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
    let options = match options::parse(std::env::args_os(), env) {
        Ok(Invocation::Run(options)) => options,
        Ok(Invocation::Print(text)) => {
            print(std::io::stdout(), text.trim_end());
            return ExitCode::SUCCESS;
        }
        Err(usage) => {
            if !usage.usage.is_empty() {
                print(std::io::stderr(), usage.usage.trim_end());
            }
            return fatal(&usage.message);
        }
    };
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fatal(&format!("cannot start: {error}")),
    };
    let result = runtime.block_on(run(*options));
    // Connections that do not end by themselves are cut here.
    runtime.shutdown_timeout(Duration::from_millis(100));
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => fatal(&message),
    }
}

async fn run(options: Options) -> Result<(), String> {
    let mut warnings = options.warnings.clone();
    warnings.extend(crate::logging::init(&options.log_level, &options.log_format)?);
    // Before anything can take long: a stop during the start is a stop.
    let mut stopped = stop_signal()?;
    let start = start(&options, warnings);
    let principal = tokio::select! {
        started = start => started?,
        _ = &mut stopped => return Ok(()),
    };
    // The sender is dropped only after it has sent.
    let _ = stopped.await;
    principal.stop().await;
    Ok(())
}

struct Principal {
    hub: Arc<Hub>,
    phase: Arc<Phase>,
    stop: watch::Sender<bool>,
}

impl Principal {
    async fn stop(self) {
        tracing::info!("stopping: no new connections, writes under way are finished");
        self.phase.draining();
        // Streams first, so that agents hear why.
        let drain = self.hub.drain(DRAIN_LIMIT);
        self.stop.send_replace(true);
        drain.await;
        // The last frames of the streams are in the connections' buffers.
        let gone = async {
            while self.stop.receiver_count() > 0 {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        let _ = tokio::time::timeout(GOODBYE_LIMIT, gone).await;
        tracing::info!("stopped");
    }
}

async fn start(options: &Options, mut warnings: Vec<String>) -> Result<Principal, String> {
    let method = Method::parse(&options.auth, options.insecure_plaintext, &mut warnings)?;
    let allowed = Namespaces::parse(&options.allowed_namespaces, &mut warnings)?;
    if options.allowed_namespaces.is_empty() {
        warnings.push(
            "--allowed-namespaces is empty: nothing is synchronised; \"*\" allows all agents".to_owned(),
        );
    }
    for warning in &warnings {
        tracing::warn!("{warning}");
    }
    tracing::info!(
        version = crate::version::VERSION,
        namespace = options.namespace,
        allowed = options.allowed_namespaces.join(","),
        "principal starts"
    );
    let phase = Arc::new(Phase::default());
    let for_health = phase.clone();
    web::listen(options.healthz_port, "healthz-port", move |path| web::health(&for_health, path)).await?;

    let client = crate::kube::client::connect(&options.kubeconfig, &options.kubecontext).await?;
    let material = Material::new(client.clone(), &options.namespace);
    let is_mtls = matches!(method, Method::Mtls { .. });
    let tls = if options.insecure_plaintext {
        tracing::warn!("--insecure-plaintext: connections are not encrypted");
        None
    } else {
        let pair = material.server_pair(options).await?;
        // The CA is read even where certificates are not required: a missing one is found now, not when it matters.
        let (origin, texts) = material.client_ca(options).await?;
        let texts: Vec<&[u8]> = texts.iter().map(Vec::as_slice).collect();
        let roots = crate::tls::roots(&origin, &texts)?;
        let required = is_mtls || options.require_client_certs;
        Some(Arc::new(crate::tls::server_config(options, &pair, required.then_some(roots))?))
    };
    let (origin, key) = material.jwt_key(options).await?;
    let issuer = Issuer::from_pem(&key).map_err(|error| format!("{origin}: {error}"))?;
    let blocklist = Blocklist::load(is_mtls.then(|| material.clone())).await?;
    let principal_uid = material.identity().await?;

    let mapping = if options.destination_based_mapping { Mapping::Destination } else { Mapping::Namespace };
    let shared = Shared {
        client: client.clone(),
        clock: Clock::start(),
        selector: Selector::new(&options.label_selector),
        processors: Semaphore::new(options.event_processors),
        principal_uid,
        namespace: options.namespace.clone(),
        mapping,
        allowed_namespaces: options.allowed_namespaces.clone(),
        max_message: options.grpc_max_message_size,
    };
    let hub = Arc::new(Hub::new(shared, allowed));
    within(REGISTRY_LIMIT, watch_registry(&client, options, &hub), "the list of cluster secrets").await?;
    // Projects before the repositories that follow them.
    for kind in Kind::ALL {
        let what = format!("the list of {}", kind.plural());
        within(OBJECTS_LIMIT, watch_objects(&client, options, &hub, kind), &what).await?;
    }

    if let Some(port) = options.metrics_port {
        let for_metrics = hub.clone();
        web::listen(port, "metrics-port", move |path| web::metrics(&for_metrics, path)).await?;
    }
    let settings = Settings {
        namespace: options.namespace.clone(),
        mapping,
        match_subject: options.client_cert_subject_match && (is_mtls || options.require_client_certs),
        max_message: options.grpc_max_message_size,
    };
    let services = Arc::new(Services::new(hub.clone(), method, issuer, blocklist, settings));
    let listener = server::bind(&options.listen_host, options.listen_port).await?;
    tracing::info!("listening on {}", server::local(&listener));
    let (stop, stopped) = watch::channel(false);
    tokio::spawn(server::serve(listener, tls, services.clone(), stopped));
    if services.blocklist.is_used() {
        tokio::spawn(enforce_blocklist(services));
    }
    phase.serving();
    Ok(Principal { hub, phase, stop })
}

/// Starts the watch and returns when the first list is complete.
async fn watch_registry(client: &kube::Client, options: &Options, hub: &Arc<Hub>) {
    let (listed, first) = oneshot::channel();
    let mut listed = Some(listed);
    let hub = hub.clone();
    tokio::spawn(crate::kube::registry::run(client.clone(), options.namespace.clone(), move |names| {
        hub.registered(names);
        if let Some(listed) = listed.take() {
            // The start has given up waiting: then nobody listens.
            let _ = listed.send(());
        }
    }));
    let _ = first.await;
}

/// Starts the watch and returns when the first list is complete.
async fn watch_objects(client: &kube::Client, options: &Options, hub: &Arc<Hub>, kind: Kind) {
    let (listed, first) = oneshot::channel();
    let mut listed = Some(listed);
    let (client, hub, namespace) = (client.clone(), hub.clone(), options.namespace.clone());
    let selector = Selector::new(&options.label_selector).query();
    let clock = hub.clock();
    tokio::spawn(async move {
        let mut sink = move |event: agent_core::informer::Event<'_>| {
            hub.informed(kind, &event);
            if matches!(event, agent_core::informer::Event::Synced)
                && let Some(listed) = listed.take()
            {
                let _ = listed.send(());
            }
        };
        let namespace = (kind != Kind::Application).then_some(&*namespace);
        crate::kube::objects::run(&client, clock, kind, namespace, &selector, false, &mut sink).await;
    });
    let _ = first.await;
}

/// Ends the streams of certificates that come onto the blocklist.
async fn enforce_blocklist(services: Arc<Services>) {
    loop {
        tokio::time::sleep(BLOCKLIST_INTERVAL).await;
        if services.hub.connected() == 0 {
            continue;
        }
        match services.blocklist.refresh().await {
            Ok(refused) => services.hub.end_where(|session| refused.contains(&session.fingerprint)),
            Err(error) => tracing::warn!("{error}"),
        }
    }
}

async fn within(limit: Duration, wait: impl Future<Output = ()>, what: &str) -> Result<(), String> {
    tokio::time::timeout(limit, wait).await.map_err(|_| {
        format!("{what} was not complete after {} s: the log says why it could not be read", limit.as_secs())
    })
}

fn stop_signal() -> Result<oneshot::Receiver<()>, String> {
    let listen = |kind| signal(kind).map_err(|error| format!("cannot handle signals: {error}"));
    let (mut terminate, mut interrupt) = (listen(SignalKind::terminate())?, listen(SignalKind::interrupt())?);
    let (stop, stopped) = oneshot::channel();
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        let _ = stop.send(());
    });
    Ok(stopped)
}

fn fatal(message: &str) -> ExitCode {
    print(std::io::stderr(), &format!("[FATAL]: {message}"));
    ExitCode::FAILURE
}

/// A closed pipe is the reader's choice, not our failure.
fn print(mut to: impl std::io::Write, text: &str) {
    let _ = writeln!(to, "{text}");
}

/// How long the reference waits for its caches.
const REGISTRY_LIMIT: Duration = Duration::from_secs(30);
const OBJECTS_LIMIT: Duration = Duration::from_secs(60);
/// Kubernetes kills 30 s after SIGTERM.
const DRAIN_LIMIT: Duration = Duration::from_secs(10);
const GOODBYE_LIMIT: Duration = Duration::from_secs(1);
const BLOCKLIST_INTERVAL: Duration = Duration::from_secs(30);
