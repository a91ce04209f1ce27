//! Flags and environment: names, defaults and parsing rules of the reference agent.
//!
//! One table ([`FLAGS`]) names every setting once: flag, environment variable, kind, default, help, and what this
//! version does with it. Precedence: command line, environment, default. A variable that is set but empty wins over
//! the default; one that cannot be parsed is reported and the default is used, since installed manifests rely on both.
//! A wrong flag is refused.

use std::fmt::Write as _;
use std::time::Duration;

use agent_core::glob;
use agent_core::peer::Mapping;

/// Everything that `main` has to know.
#[derive(Debug)]
pub(crate) enum Command {
    /// Run the agent.
    Agent(Box<Options>),
    /// Print this and exit.
    Print(String),
}

/// Why the command line cannot be used.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ArgsError {
    /// Wrong usage: what, and the usage follows.
    Usage(String),
    /// A setting with a value that cannot be.
    Fatal(String),
}

/// Checked settings.
#[derive(Debug)]
pub(crate) struct Options {
    pub(crate) server_address: String,
    pub(crate) server_port: u16,
    pub(crate) namespace: String,
    pub(crate) creds: Creds,
    pub(crate) insecure_plaintext: bool,
    pub(crate) insecure_tls: bool,
    pub(crate) root_ca_path: String,
    pub(crate) root_ca_secret_name: String,
    /// Certificate and key file.
    pub(crate) tls_client_files: Option<(String, String)>,
    pub(crate) tls_secret_name: String,
    pub(crate) tls_min: TlsVersion,
    pub(crate) tls_max: TlsVersion,
    pub(crate) tls_ciphersuites: Vec<String>,
    pub(crate) enable_compression: bool,
    pub(crate) max_message_size: usize,
    /// `None` is off.
    pub(crate) metrics_port: Option<u16>,
    pub(crate) healthz_port: u16,
    pub(crate) log_level: Vec<String>,
    pub(crate) log_json: bool,
    pub(crate) informer_sync_timeout: Duration,
    pub(crate) heartbeat_interval: Duration,
    pub(crate) status_window: Duration,
    pub(crate) label_selector: String,
    pub(crate) source_uid_mismatch_policy: String,
    pub(crate) on_application_recreate: String,
    pub(crate) adoption_policy: String,
    pub(crate) ignore_unmanaged_apps: bool,
    pub(crate) mapping: Mapping,
    pub(crate) create_namespace: bool,
    pub(crate) allowed_namespaces: Vec<String>,
    pub(crate) kubeconfig: String,
    pub(crate) kubecontext: String,
    /// Environment values that could not be parsed.
    pub(crate) rejected: Vec<String>,
    /// Settings that have no effect in this version.
    pub(crate) without_effect: Vec<&'static str>,
}

/// How the agent proves who it is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Creds {
    /// By the client certificate.
    Mtls,
    /// By a header that a mesh injects.
    Header,
    /// By the first line of this file.
    UserPass(String),
}

/// TLS versions that can be asked for; `tls1.1` as a minimum is served by 1.2.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum TlsVersion {
    V1_2,
    V1_3,
}

/// Reads the arguments (without the program's name) and the environment.
pub(crate) fn parse(
    arguments: &[String],
    environment: &dyn Fn(&str) -> Option<String>,
) -> Result<Command, ArgsError> {
    match arguments.first().map(String::as_str) {
        Some("version") => return version(&arguments[1..]).map(Command::Print),
        Some("help" | "--help" | "-h") => return Ok(Command::Print(usage())),
        _ => {}
    }
    let skip = usize::from(arguments.first().is_some_and(|word| word == "agent"));
    let mut values = Values::from_environment(environment);
    if values.read(&arguments[skip..])? {
        return Ok(Command::Print(usage()));
    }
    values.check().map(|options| Command::Agent(Box::new(options)))
}

/// What a setting's text must look like.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Text,
    Bool,
    Int,
    List,
    Duration,
}

/// What this version does with a setting.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Support {
    Full,
    /// It has no effect, and neither security nor what is synced suffers: one warning names it.
    Ignored,
    /// Ignoring it would weaken security, change what is synced, or leave the agent without a connection.
    Refused,
}

struct Flag {
    name: &'static str,
    env: &'static str,
    kind: Kind,
    default: &'static str,
    support: Support,
    help: &'static str,
}

const fn flag(
    name: &'static str,
    env: &'static str,
    kind: Kind,
    default: &'static str,
    support: Support,
    help: &'static str,
) -> Flag {
    Flag { name, env, kind, default, support, help }
}

use Kind::{Bool, Duration as Time, Int, List, Text};
use Support::{Full, Ignored, Refused};

/// In the order of the help text. A name without a flag (`""`) is set by its variable only.
#[rustfmt::skip]
const FLAGS: &[Flag] = &[
    flag("server-address", "ARGOCD_AGENT_REMOTE_SERVER", Text, "", Full, "Host of the principal; also the name in its certificate"),
    flag("server-port", "ARGOCD_AGENT_REMOTE_PORT", Int, "443", Full, "Port of the principal"),
    flag("agent-mode", "ARGOCD_AGENT_MODE", Text, "autonomous", Full, "managed; autonomous is not built yet"),
    flag("namespace", "ARGOCD_AGENT_NAMESPACE", Text, "argocd", Full, "Namespace of Argo CD on this cluster"),
    flag("creds", "ARGOCD_AGENT_CREDS", Text, "", Full, "mtls:any, header:any, or userpass:FILE"),
    flag("insecure-plaintext", "ARGOCD_AGENT_INSECURE_PLAINTEXT", Bool, "false", Full, "No TLS to the principal (behind a service mesh)"),
    flag("insecure-tls", "ARGOCD_AGENT_TLS_INSECURE", Bool, "false", Full, "Do not verify the principal's certificate"),
    flag("root-ca-path", "ARGOCD_AGENT_TLS_ROOT_CA_PATH", Text, "", Full, "File with the CA certificates of the principal; wins over the Secret"),
    flag("root-ca-secret-name", "ARGOCD_AGENT_TLS_ROOT_CA_SECRET_NAME", Text, "argocd-agent-ca", Full, "Secret with the CA certificates of the principal"),
    flag("tls-client-cert", "ARGOCD_AGENT_TLS_CLIENT_CERT_PATH", Text, "", Full, "File with the client certificate; wins over the Secret"),
    flag("tls-client-key", "ARGOCD_AGENT_TLS_CLIENT_KEY_PATH", Text, "", Full, "File with the client certificate's key"),
    flag("tls-secret-name", "ARGOCD_AGENT_TLS_SECRET_NAME", Text, "argocd-agent-client-tls", Full, "Secret of type kubernetes.io/tls with the client certificate"),
    flag("tls-min-version", "ARGOCD_AGENT_TLS_MIN_VERSION", Text, "", Full, "tls1.1, tls1.2 or tls1.3; below 1.2 is never spoken"),
    flag("tls-max-version", "ARGOCD_AGENT_TLS_MAX_VERSION", Text, "", Full, "tls1.2 or tls1.3"),
    flag("tls-ciphersuites", "ARGOCD_AGENT_TLS_CIPHERSUITES", List, "", Full, "Cipher suites up to TLS 1.2; 'list' prints them"),
    flag("enable-websocket", "ARGOCD_AGENT_ENABLE_WEBSOCKET", Bool, "false", Refused, "gRPC over WebSocket"),
    flag("enable-compression", "ARGOCD_AGENT_ENABLE_COMPRESSION", Bool, "false", Full, "Compress messages with gzip"),
    flag("keep-alive-ping-interval", "ARGOCD_AGENT_KEEP_ALIVE_PING_INTERVAL", Time, "0", Ignored, "HTTP/2 pings; dead peers are found by TCP keepalive instead"),
    flag("heartbeat-interval", "ARGOCD_AGENT_HEARTBEAT_INTERVAL", Time, "0", Full, "Send a sign of life this often; 0 is never"),
    flag("grpc-max-message-size", "ARGOCD_AGENT_GRPC_MAX_MESSAGE_SIZE", Int, "209715200", Full, "Largest message in bytes, both ways"),
    flag("metrics-port", "ARGOCD_AGENT_METRICS_PORT", Int, "8181", Full, "Port of /metrics; 0 is off"),
    flag("healthz-port", "ARGOCD_AGENT_HEALTH_CHECK_PORT", Int, "8001", Full, "Port of /healthz, /livez and /readyz"),
    flag("pprof-port", "ARGOCD_AGENT_PPROF_PORT", Int, "0", Ignored, "Profiling of the reference agent"),
    flag("log-level", "ARGOCD_AGENT_LOG_LEVEL", List, "info", Full, "[subsystem=]level, any number; levels fatal, error, warning, info, debug, trace"),
    flag("log-format", "ARGOCD_AGENT_LOG_FORMAT", Text, "text", Full, "text or json"),
    flag("full-detail", "ARGOCD_AGENT_FULL_DETAIL", List, "", Ignored, "Object bodies in log lines"),
    flag("redis-addr", "REDIS_ADDR", Text, "argocd-redis:6379", Ignored, "Address of Argo CD's Redis"),
    flag("redis-username", "REDIS_USERNAME", Text, "", Ignored, "User for Redis"),
    flag("redis-password", "REDIS_PASSWORD", Text, "", Ignored, "Password for Redis"),
    flag("redis-creds-dir-path", "REDIS_CREDS_DIR_PATH", Text, "", Ignored, "Directory with the files auth and auth_username"),
    flag("redis-tls-enabled", "ARGOCD_AGENT_REDIS_TLS_ENABLED", Bool, "false", Ignored, "TLS to Redis"),
    flag("redis-tls-insecure", "ARGOCD_AGENT_REDIS_TLS_INSECURE", Bool, "false", Ignored, "Do not verify the certificate of Redis"),
    flag("redis-tls-ca-path", "ARGOCD_AGENT_REDIS_TLS_CA_PATH", Text, "", Ignored, "File with the CA certificates of Redis"),
    flag("redis-tls-ca-secret-name", "ARGOCD_AGENT_REDIS_TLS_CA_SECRET_NAME", Text, "argocd-redis-tls", Ignored, "Secret with the CA certificates of Redis"),
    flag("enable-resource-proxy", "ARGOCD_AGENT_ENABLE_RESOURCE_PROXY", Bool, "true", Ignored, "Answer live resource requests"),
    flag("cache-refresh-interval", "ARGOCD_AGENT_CACHE_REFRESH_INTERVAL", Time, "10s", Ignored, "Period of cluster cache information"),
    flag("informer-sync-timeout", "ARGOCD_AGENT_INFORMER_SYNC_TIMEOUT", Time, "10s", Full, "After this long without a complete list, say so"),
    flag("buffer-informer-event-interval", "ARGOCD_AGENT_BUFFER_INFORMER_EVENT_INTERVAL", Time, "0", Full, "At most one status of each Application in this time; 0 is each at once"),
    flag("destination-based-mapping", "ARGOCD_AGENT_DESTINATION_BASED_MAPPING", Bool, "false", Full, "Applications keep their namespace; the destination names the agent"),
    flag("create-namespace", "ARGOCD_AGENT_CREATE_NAMESPACE", Bool, "false", Full, "Create missing namespaces (with destination-based mapping)"),
    flag("allowed-namespaces", "ARGOCD_AGENT_ALLOWED_NAMESPACES", List, "", Full, "Patterns of further namespaces with Applications (with destination-based mapping)"),
    flag("label-selector", "ARGOCD_AGENT_LABEL_SELECTOR", Text, "", Full, "Only objects with these labels"),
    flag("ignore-unmanaged-apps", "ARGOCD_AGENT_IGNORE_UNMANAGED_APPS", Bool, "false", Full, "Applications that did not come from the principal take no part in a resync"),
    flag("source-uid-mismatch-policy", "ARGOCD_AGENT_SOURCE_UID_MISMATCH_POLICY", Text, "recreate", Full, "recreate or upsert"),
    flag("on-application-recreate", "ARGOCD_AGENT_ON_APPLICATION_RECREATE", Text, "ignore", Full, "ignore, clear-status or resync"),
    flag("adoption-policy", "ARGOCD_AGENT_ADOPTION_POLICY", Text, "always", Full, "What to do with an object that is already there"),
    flag("otlp-address", "ARGOCD_AGENT_OTLP_ADDRESS", Text, "", Ignored, "Where to send traces"),
    flag("otlp-insecure", "ARGOCD_AGENT_OTLP_INSECURE", Bool, "false", Ignored, "No TLS for traces"),
    flag("kubeconfig", "", Text, "", Full, "kubeconfig file; else KUBECONFIG, ~/.kube/config, the pod's ServiceAccount"),
    flag("kubecontext", "", Text, "", Full, "Context in the kubeconfig"),
    flag("", "ARGOCD_AGENT_KUBE_QPS", Int, "100", Ignored, ""),
    flag("", "ARGOCD_AGENT_KUBE_BURST", Int, "300", Ignored, ""),
    flag("", "ARGOCD_AGENT_SEND_QUEUE_SIZE", Int, "1000", Ignored, ""),
    flag("", "ARGOCD_AGENT_RECV_QUEUE_SIZE", Int, "1000", Ignored, ""),
];

/// Raw text of every setting, in the order of [`FLAGS`].
struct Values {
    texts: Vec<String>,
    /// On the command line: a list's first flag replaces what was there, further ones add.
    given: Vec<bool>,
    rejected: Vec<String>,
}

impl Values {
    fn from_environment(environment: &dyn Fn(&str) -> Option<String>) -> Self {
        let mut rejected = Vec::new();
        let texts = FLAGS
            .iter()
            .map(|flag| {
                let Some(text) = (!flag.env.is_empty()).then(|| environment(flag.env)).flatten() else {
                    return flag.default.to_owned();
                };
                if let Err(reason) = check_text(flag.kind, &text) {
                    rejected.push(format!("{}={text:?}: {reason}, using {:?}", flag.env, flag.default));
                    return flag.default.to_owned();
                }
                if matches!(flag.name, "metrics-port" | "pprof-port")
                    && parse_int(&text).is_ok_and(|port| !(0..=65_536).contains(&port))
                {
                    rejected.push(format!("{}={text:?}: out of range, using {}", flag.env, flag.default));
                    return flag.default.to_owned();
                }
                text
            })
            .collect();
        Self { texts, given: vec![false; FLAGS.len()], rejected }
    }

    /// Takes the flags in; `true` if help was asked for.
    fn read(&mut self, arguments: &[String]) -> Result<bool, ArgsError> {
        let mut arguments = arguments.iter();
        while let Some(argument) = arguments.next() {
            let (name, inline) = if let Some(long) = argument.strip_prefix("--") {
                match long.split_once('=') {
                    Some((name, value)) => (name, Some(value)),
                    None => (long, None),
                }
            } else if let Some(rest) = argument.strip_prefix("-n") {
                let value = rest.strip_prefix('=').unwrap_or(rest);
                ("namespace", (!rest.is_empty()).then_some(value))
            } else if argument == "-h" {
                ("help", None)
            } else {
                return Err(ArgsError::Usage(format!("unknown argument {argument:?}")));
            };
            if name == "help" {
                return Ok(true);
            }
            let Some(at) = FLAGS.iter().position(|flag| !name.is_empty() && flag.name == name) else {
                return Err(ArgsError::Usage(format!("unknown flag: --{name}")));
            };
            let kind = FLAGS[at].kind;
            let value = match inline {
                Some(value) => value,
                None if kind == Bool => "true",
                None => arguments
                    .next()
                    .ok_or_else(|| ArgsError::Usage(format!("flag needs an argument: --{name}")))?,
            };
            if let Err(reason) = check_text(kind, value) {
                return Err(ArgsError::Usage(format!("invalid argument {value:?} for --{name}: {reason}")));
            }
            if kind == List && self.given[at] {
                self.texts[at].push(',');
                self.texts[at].push_str(value);
            } else {
                self.texts[at] = value.to_owned();
            }
            self.given[at] = true;
        }
        Ok(false)
    }

    fn text(&self, name: &str) -> &str {
        FLAGS.iter().position(|flag| flag.name == name).map_or("", |at| &self.texts[at])
    }

    fn bool(&self, name: &str) -> bool {
        parse_bool(self.text(name)).unwrap_or(false)
    }

    /// Texts were checked when they were taken in.
    fn int(&self, name: &str) -> i64 {
        parse_int(self.text(name)).unwrap_or_default()
    }

    fn duration(&self, name: &str) -> i128 {
        parse_duration(self.text(name)).unwrap_or_default()
    }

    fn list(&self, name: &str) -> Vec<String> {
        parse_list(self.text(name))
    }

    fn check(self) -> Result<Options, ArgsError> {
        let fatal = |message: String| Err(ArgsError::Fatal(message));
        let namespace = self.text("namespace").to_owned();
        if !agent_core::request::is_dns_label(&namespace) {
            return fatal(format!("--namespace {namespace:?} is not the name of a namespace"));
        }
        match self.text("agent-mode") {
            "managed" => {}
            "autonomous" => {
                return fatal(
                    "autonomous mode (the default of --agent-mode) is not built yet: \
                     use --agent-mode managed, or the reference agent"
                        .into(),
                );
            }
            other => return fatal(format!("--agent-mode {other:?}: must be managed or autonomous")),
        }
        if self.text("server-address").is_empty() {
            return fatal("No remote specified: set --server-address (ARGOCD_AGENT_REMOTE_SERVER)".into());
        }
        let Some(server_port) = port(self.int("server-port")) else {
            return fatal("No remote specified: --server-port must be 1 to 65535".into());
        };
        for flag in FLAGS.iter().filter(|flag| flag.support == Refused) {
            if self.bool(flag.name) {
                return fatal(format!(
                    "--{} is not built yet, and without it this agent would not do what was asked: \
                     remove it, or use the reference agent",
                    flag.name
                ));
            }
        }
        let (tls_min, tls_max) = match (
            tls_version("tls-min-version", self.text("tls-min-version"), TlsVersion::V1_2)?,
            tls_version("tls-max-version", self.text("tls-max-version"), TlsVersion::V1_3)?,
        ) {
            (min, max) if min > max => return fatal("--tls-min-version is above --tls-max-version".into()),
            versions => versions,
        };
        if self.text("tls-max-version") == "tls1.1" {
            return fatal("--tls-max-version tls1.1: versions below 1.2 are broken and never spoken".into());
        }
        let tls_client_files = match (self.text("tls-client-cert"), self.text("tls-client-key")) {
            ("", "") => None,
            (_, "") | ("", _) => {
                return fatal("--tls-client-cert and --tls-client-key must be given together".into());
            }
            (cert, key) => Some((cert.to_owned(), key.to_owned())),
        };
        let Ok(max_message_size @ 1..) = usize::try_from(self.int("grpc-max-message-size")) else {
            return fatal("--grpc-max-message-size must be above 0".into());
        };
        let Some(healthz_port) = port(self.int("healthz-port")).filter(|port| *port <= MAX_LISTEN_PORT)
        else {
            return fatal(format!("--healthz-port must be 1 to {MAX_LISTEN_PORT}"));
        };
        let metrics_port = match self.int("metrics-port") {
            ..=0 => None,
            number => match port(number).filter(|port| *port <= MAX_LISTEN_PORT) {
                None => return fatal(format!("--metrics-port must be 0 to {MAX_LISTEN_PORT}")),
                some => some,
            },
        };
        let log_json = match self.text("log-format") {
            text if text.eq_ignore_ascii_case("json") => true,
            text if text.eq_ignore_ascii_case("text") => false,
            other => return fatal(format!("--log-format {other:?}: must be text or json")),
        };
        let informer_sync_timeout = match self.duration("informer-sync-timeout") {
            ..=0 => return fatal("--informer-sync-timeout must be above 0".into()),
            nanos => Duration::from_millis(u64::try_from(nanos / 1_000_000).unwrap_or(u64::MAX).max(1)),
        };
        if self.duration("cache-refresh-interval") <= 0 {
            return fatal("--cache-refresh-interval must be above 0".into());
        }
        if self.duration("buffer-informer-event-interval") < 0 {
            return fatal("--buffer-informer-event-interval must not be below 0".into());
        }
        let allowed_namespaces: Vec<String> =
            self.list("allowed-namespaces").into_iter().filter(|pattern| !pattern.is_empty()).collect();
        if let Some(expression) =
            allowed_namespaces.iter().find(|pattern| glob::expression(pattern).is_some())
        {
            return fatal(format!(
                "--allowed-namespaces {expression}: this agent understands patterns such as team-*, no regular expressions"
            ));
        }
        one_of(
            "source-uid-mismatch-policy",
            self.text("source-uid-mismatch-policy"),
            &["recreate", "upsert"],
        )?;
        one_of(
            "on-application-recreate",
            self.text("on-application-recreate"),
            &["ignore", "clear-status", "resync"],
        )?;
        let options = Options {
            server_address: self.text("server-address").to_owned(),
            server_port,
            creds: creds(self.text("creds"))?,
            insecure_plaintext: self.bool("insecure-plaintext"),
            insecure_tls: self.bool("insecure-tls"),
            root_ca_path: self.text("root-ca-path").to_owned(),
            root_ca_secret_name: self.text("root-ca-secret-name").to_owned(),
            tls_client_files,
            tls_secret_name: self.text("tls-secret-name").to_owned(),
            tls_min,
            tls_max,
            tls_ciphersuites: self
                .list("tls-ciphersuites")
                .into_iter()
                .filter(|name| !name.is_empty())
                .collect(),
            enable_compression: self.bool("enable-compression"),
            max_message_size,
            metrics_port,
            healthz_port,
            log_level: self.list("log-level"),
            log_json,
            informer_sync_timeout,
            heartbeat_interval: self.period("heartbeat-interval"),
            status_window: self.period("buffer-informer-event-interval"),
            label_selector: self.text("label-selector").to_owned(),
            source_uid_mismatch_policy: self.text("source-uid-mismatch-policy").to_owned(),
            on_application_recreate: self.text("on-application-recreate").to_owned(),
            adoption_policy: self.text("adoption-policy").to_owned(),
            ignore_unmanaged_apps: self.bool("ignore-unmanaged-apps"),
            mapping: if self.bool("destination-based-mapping") {
                Mapping::Destination
            } else {
                Mapping::Namespace
            },
            create_namespace: self.bool("create-namespace"),
            allowed_namespaces,
            kubeconfig: self.text("kubeconfig").to_owned(),
            kubecontext: self.text("kubecontext").to_owned(),
            without_effect: self.without_effect(),
            rejected: self.rejected,
            namespace,
        };
        Ok(options)
    }

    /// A duration to the millisecond; below 0 is 0.
    fn period(&self, name: &str) -> Duration {
        Duration::from_millis(u64::try_from(self.duration(name) / 1_000_000).unwrap_or(0))
    }

    /// Settings with a value that asks for something: neutral ones and the defaults ask for nothing.
    fn without_effect(&self) -> Vec<&'static str> {
        FLAGS
            .iter()
            .enumerate()
            .filter(|(at, flag)| {
                let text = &*self.texts[*at];
                flag.support == Ignored
                    && match flag.kind {
                        // Without the resource proxy, switching it off is what happens anyway.
                        Bool => parse_bool(text) == Some(true) && flag.default != "true",
                        Int => parse_int(text) != parse_int(flag.default) && parse_int(text) != Ok(0),
                        Time => {
                            parse_duration(text) != parse_duration(flag.default)
                                && parse_duration(text) != Ok(0)
                        }
                        Text | List => !text.is_empty() && text != flag.default,
                    }
            })
            .map(|(_, flag)| if flag.name.is_empty() { flag.env } else { flag.name })
            .collect()
    }
}

fn check_text(kind: Kind, text: &str) -> Result<(), String> {
    match kind {
        Text | List => Ok(()),
        Bool => parse_bool(text).map(drop).ok_or_else(|| "not a boolean".into()),
        Int => parse_int(text).map(drop),
        Time => parse_duration(text).map(drop),
    }
}

fn port(number: i64) -> Option<u16> {
    u16::try_from(number).ok().filter(|port| *port > 0)
}

fn one_of(name: &str, value: &str, words: &[&str]) -> Result<(), ArgsError> {
    if words.contains(&value) {
        return Ok(());
    }
    Err(ArgsError::Fatal(format!("--{name} {value:?}: must be one of {}", words.join(", "))))
}

fn tls_version(name: &str, value: &str, default: TlsVersion) -> Result<TlsVersion, ArgsError> {
    match value {
        "" => Ok(default),
        "tls1.1" | "tls1.2" => Ok(TlsVersion::V1_2),
        "tls1.3" => Ok(TlsVersion::V1_3),
        other => Err(ArgsError::Fatal(format!("--{name} {other:?}: must be tls1.1, tls1.2 or tls1.3"))),
    }
}

fn creds(text: &str) -> Result<Creds, ArgsError> {
    const HINT: &str = "must be mtls:any, header:any or userpass:FILE";
    match text.split_once(':') {
        Some(("mtls", _)) => Ok(Creds::Mtls),
        Some(("header", _)) => Ok(Creds::Header),
        Some(("userpass", path)) if !path.is_empty() => Ok(Creds::UserPass(path.to_owned())),
        // Never the text itself: somebody may have put a password there.
        _ if text.is_empty() => Err(ArgsError::Fatal(format!("--creds is not set: it {HINT}"))),
        _ => Err(ArgsError::Fatal(format!("--creds cannot be read: it {HINT}"))),
    }
}

fn parse_bool(text: &str) -> Option<bool> {
    match text {
        "1" | "t" | "T" | "TRUE" | "true" | "True" => Some(true),
        "0" | "f" | "F" | "FALSE" | "false" | "False" => Some(false),
        _ => None,
    }
}

/// Go's `ParseInt` with base 0: sign, `0x`, `0o`, leading `0`, `0b`, and `_` between digits.
fn parse_int(text: &str) -> Result<i64, String> {
    let (negative, digits) = match text.as_bytes() {
        [b'-', ..] => (true, &text[1..]),
        [b'+', ..] => (false, &text[1..]),
        _ => (false, text),
    };
    let lower = digits.to_ascii_lowercase();
    let (base, digits) = match lower.as_bytes() {
        [b'0', b'x', ..] => (16, &lower[2..]),
        [b'0', b'o', ..] => (8, &lower[2..]),
        [b'0', b'b', ..] => (2, &lower[2..]),
        [b'0', _, ..] => (8, &lower[1..]),
        _ => (10, &*lower),
    };
    let underscores = base != 10 || !digits.contains('_');
    let digits = if underscores { digits.replace('_', "") } else { digits.to_owned() };
    // A second sign would be taken by from_str_radix.
    let number = Some(digits)
        .filter(|digits| !digits.starts_with(['+', '-']))
        .and_then(|digits| i64::from_str_radix(&digits, base).ok())
        .map(|number| if negative { -number } else { number })
        .ok_or_else(|| "not a number".to_owned())?;
    if i32::try_from(number).is_err() {
        return Err("out of range".into());
    }
    Ok(number)
}

/// Go's duration syntax, in nanoseconds.
fn parse_duration(text: &str) -> Result<i128, String> {
    const UNITS: [(&str, i128); 8] = [
        ("ns", 1),
        ("us", 1_000),
        ("µs", 1_000),
        ("μs", 1_000),
        ("ms", 1_000_000),
        ("s", 1_000_000_000),
        ("m", 60_000_000_000),
        ("h", 3_600_000_000_000),
    ];
    let bad = || "not a duration like 90s or 1h30m".to_owned();
    let unsigned = text.strip_prefix(['-', '+']).unwrap_or(text);
    if unsigned == "0" {
        return Ok(0);
    }
    let mut rest = unsigned;
    let mut total: i128 = 0;
    if rest.is_empty() {
        return Err(bad());
    }
    while !rest.is_empty() {
        let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or_else(bad)?;
        let (whole, fraction) = rest[..end].split_once('.').unwrap_or((&rest[..end], ""));
        if (whole.is_empty() && fraction.is_empty()) || whole.len() > 15 || fraction.contains('.') {
            return Err(bad());
        }
        rest = &rest[end..];
        let unit_end = rest.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(rest.len());
        let unit = UNITS.iter().find(|(name, _)| *name == &rest[..unit_end]).ok_or_else(bad)?.1;
        rest = &rest[unit_end..];
        total += whole.parse::<i128>().unwrap_or(0) * unit;
        let mut scale = unit;
        for digit in fraction.bytes().take(18) {
            scale /= 10;
            total += i128::from(digit - b'0') * scale;
        }
    }
    if total > i128::from(i64::MAX) {
        return Err(bad());
    }
    Ok(if text.starts_with('-') { -total } else { total })
}

/// One line of CSV; white space around the elements is trimmed.
fn parse_list(text: &str) -> Vec<String> {
    let mut out = Vec::new();
    let mut word = String::new();
    let mut quoted = false;
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '"' if quoted && chars.peek() == Some(&'"') => {
                chars.next();
                word.push('"');
            }
            '"' => quoted = !quoted,
            ',' if !quoted => out.push(std::mem::take(&mut word).trim().to_owned()),
            c => word.push(c),
        }
    }
    if !word.is_empty() || !out.is_empty() {
        out.push(word.trim().to_owned());
    }
    out
}

fn version(arguments: &[String]) -> Result<String, ArgsError> {
    let mut output = "text";
    let mut arguments = arguments.iter().map(String::as_str);
    while let Some(argument) = arguments.next() {
        match argument {
            "-s" | "--short" => output = "short",
            "-o" | "--output" => output = arguments.next().unwrap_or_default(),
            other => match other.strip_prefix("--output=").or_else(|| other.strip_prefix("-o")) {
                Some(value) => output = value.strip_prefix('=').unwrap_or(value),
                None => return Err(ArgsError::Usage(format!("unknown flag: {other}"))),
            },
        }
    }
    let fields = [
        ("name", NAME),
        ("version", VERSION),
        ("gitRevision", option_env!("GIT_REVISION").unwrap_or("unknown")),
        ("gitStatus", option_env!("GIT_STATUS").unwrap_or("unknown")),
        // Tools that read this key expect it to be there.
        ("goVersion", "none"),
        ("buildDate", option_env!("BUILD_DATE").unwrap_or("unknown")),
    ];
    let mut out = String::new();
    match output {
        "short" => out.push_str(VERSION),
        "text" => {
            let _ = write!(out, "{NAME}-{VERSION}");
        }
        "json" => {
            for (at, (key, value)) in fields.iter().enumerate() {
                let _ = write!(out, "{}\n  \"{key}\": \"{value}\"", if at == 0 { "{" } else { "," });
            }
            out.push_str("\n}");
        }
        "yaml" => {
            for (at, (key, value)) in fields.iter().enumerate() {
                let _ = write!(out, "{}{key}: {value}", if at == 0 { "" } else { "\n" });
            }
        }
        other => return Err(ArgsError::Usage(format!("--output {other:?}: must be text, json or yaml"))),
    }
    Ok(out)
}

/// The help text.
pub(crate) fn usage() -> String {
    let mut out = String::with_capacity(8 << 10);
    out.push_str(
        "Usage:\n  agent-lite [agent] [flags]\n  agent-lite version [-s] [-o text|json|yaml]\n\nFlags (environment variable, default):\n",
    );
    for flag in FLAGS.iter().filter(|flag| !flag.name.is_empty()) {
        let short = if flag.name == "namespace" { "-n, " } else { "    " };
        let kind = match flag.kind {
            Text => " string",
            Bool => "",
            Int => " int",
            List => " strings",
            Time => " duration",
        };
        let _ = write!(out, "  {short}--{}{kind}\n          {}", flag.name, flag.help);
        match flag.support {
            Full => {}
            Ignored => out.push_str(" (no effect in this version)"),
            Refused => out.push_str(" (not built yet: refused)"),
        }
        let _ = match (flag.env, flag.default) {
            ("", "") => writeln!(out),
            (env, "") => writeln!(out, " [{env}]"),
            (env, default) => writeln!(out, " [{env}, {default}]"),
        };
    }
    out.push_str("\nEnvironment only (no effect in this version):\n");
    for flag in FLAGS.iter().filter(|flag| flag.name.is_empty()) {
        let _ = writeln!(out, "  {}", flag.env);
    }
    out
}

/// Name of the program in versions and in the User-Agent.
pub(crate) const NAME: &str = "argocd-agent-lite";

/// Our own version; what is announced to a principal is the principal's.
pub(crate) const VERSION: &str = env!("CARGO_PKG_VERSION");

const MAX_LISTEN_PORT: u16 = 32_767;

#[cfg(test)]
mod tests {
    use super::*;

    fn run(line: &str, env: &[(&str, &str)]) -> Result<Command, ArgsError> {
        let arguments: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        let lookup = |name: &str| env.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned());
        parse(&arguments, &lookup)
    }

    const GOOD: &str = "--agent-mode managed --server-address hub --creds mtls:any";

    fn options(line: &str, env: &[(&str, &str)]) -> Options {
        match run(&format!("agent {GOOD} {line}"), env) {
            Ok(Command::Agent(options)) => *options,
            other => panic!("{line}: {other:?}"),
        }
    }

    fn fatal(line: &str, env: &[(&str, &str)]) -> String {
        match run(&format!("{GOOD} {line}"), env) {
            Err(ArgsError::Fatal(message)) => message,
            other => panic!("{line}: {other:?}"),
        }
    }

    #[test]
    fn the_command_line_wins_over_the_environment_over_the_default() {
        let env = [("ARGOCD_AGENT_REMOTE_PORT", "8443"), ("ARGOCD_AGENT_NAMESPACE", "edge")];
        let from_env = options("", &env);
        assert_eq!((from_env.server_port, &*from_env.namespace), (8443, "edge"));
        let from_line = options("--server-port=0x10 -n other", &env);
        assert_eq!((from_line.server_port, &*from_line.namespace), (16, "other"));
        assert_eq!(options("-nx", &[]).namespace, "x");
        assert_eq!(options("-n=y", &[]).namespace, "y");
        let default = options("", &[]);
        assert_eq!(
            (default.server_port, default.healthz_port, default.metrics_port),
            (443, 8001, Some(8181))
        );
        assert!(default.without_effect.is_empty() && default.rejected.is_empty());
    }

    #[test]
    fn a_rejected_variable_is_reported_and_the_default_used() {
        let env = [
            ("ARGOCD_AGENT_REMOTE_PORT", "many"),
            ("ARGOCD_AGENT_TLS_INSECURE", "yes"),
            ("ARGOCD_AGENT_HEARTBEAT_INTERVAL", ""),
            ("ARGOCD_AGENT_METRICS_PORT", "-1"),
        ];
        let options = options("", &env);
        assert_eq!(
            (options.server_port, options.insecure_tls, options.metrics_port),
            (443, false, Some(8181))
        );
        assert_eq!(options.rejected.len(), 4, "{:?}", options.rejected);
        assert!(options.rejected[0].starts_with("ARGOCD_AGENT_REMOTE_PORT=\"many\": not a number"));
    }

    #[test]
    fn empty_wins() {
        assert!(fatal("", &[("ARGOCD_AGENT_NAMESPACE", "")]).contains("--namespace"));
        assert!(fatal("", &[("ARGOCD_AGENT_LOG_FORMAT", "")]).contains("--log-format"));
        assert!(fatal("", &[("ARGOCD_AGENT_SOURCE_UID_MISMATCH_POLICY", "")]).contains("mismatch"));
        let options = options("", &[("ARGOCD_AGENT_LOG_LEVEL", ""), ("ARGOCD_AGENT_ALLOWED_NAMESPACES", "")]);
        assert!(options.log_level.is_empty());
    }

    #[test]
    fn wrong_usage() {
        for (line, part) in [
            ("--nonsense", "unknown flag: --nonsense"),
            ("--server-port", "needs an argument"),
            ("--server-port x", "invalid argument \"x\" for --server-port"),
            ("--insecure-tls=maybe", "for --insecure-tls"),
            ("--", "unknown flag"),
            ("stray", "unknown argument \"stray\""),
            ("--insecure-tls true", "unknown argument \"true\""),
        ] {
            match run(&format!("{GOOD} {line}"), &[]) {
                Err(ArgsError::Usage(message)) => assert!(message.contains(part), "{line}: {message}"),
                other => panic!("{line}: {other:?}"),
            }
        }
    }

    #[test]
    fn fatal_settings_are_named_with_what_to_do() {
        for (line, part) in [
            ("--agent-mode autonomous", "--agent-mode managed"),
            ("--agent-mode other", "managed or autonomous"),
            ("--server-address=", "No remote specified"),
            ("--server-port 0", "No remote specified"),
            ("--creds=", "--creds is not set"),
            ("--creds secret", "--creds cannot be read"),
            ("--creds userpass:", "--creds cannot be read"),
            ("--healthz-port 0", "--healthz-port"),
            ("--metrics-port 40000", "--metrics-port"),
            ("--tls-min-version tls1.0", "tls1.1"),
            ("--tls-min-version tls1.3 --tls-max-version tls1.2", "above"),
            ("--tls-max-version tls1.1", "never spoken"),
            ("--tls-client-cert a", "together"),
            ("--grpc-max-message-size 0", "above 0"),
            ("--informer-sync-timeout 0", "above 0"),
            ("--cache-refresh-interval 0", "above 0"),
            ("--source-uid-mismatch-policy x", "recreate, upsert"),
            ("--allowed-namespaces a,/b.*/", "no regular expressions"),
            ("--enable-websocket", "not built yet"),
        ] {
            let message = fatal(line, &[]);
            assert!(message.contains(part), "{line}: {message}");
            assert!(!message.contains("secret"), "{message}");
        }
    }

    #[test]
    fn only_what_asks_for_something_is_warned_about() {
        // What the installed ConfigMaps set.
        let quiet = options(
            "--redis-addr argocd-redis:6379 --enable-resource-proxy=true --pprof-port 0 --keep-alive-ping-interval 0s \
             --cache-refresh-interval 10000ms --allowed-namespaces= --destination-based-mapping=false",
            &[("ARGOCD_AGENT_OTLP_ADDRESS", ""), ("ARGOCD_AGENT_KUBE_QPS", "100")],
        );
        assert!(quiet.without_effect.is_empty(), "{:?}", quiet.without_effect);
        let loud = options("--keep-alive-ping-interval 50s --full-detail all", &[("REDIS_PASSWORD", "x")]);
        assert_eq!(loud.without_effect, ["keep-alive-ping-interval", "full-detail", "redis-password"]);
    }

    #[test]
    fn numbers_durations_and_lists_of_go() {
        for (text, number) in
            [("10", 10), ("0x1F", 31), ("010", 8), ("0b11", 3), ("-7", -7), ("+7", 7), ("0", 0)]
        {
            assert_eq!(parse_int(text), Ok(number), "{text}");
        }
        for bad in ["", "-", "1.5", "0x", "--1", "+-1", "1_000", "99999999999", "ten"] {
            assert!(parse_int(bad).is_err(), "{bad}");
        }
        for (text, millis) in
            [("300ms", 300), ("1h20m10s", 4_810_000), ("0", 0), ("1.5s", 1500), ("-2s", -2000), (".5s", 500)]
        {
            assert_eq!(parse_duration(text), Ok(millis * 1_000_000), "{text}");
        }
        for bad in ["", "5", "s", "1x", "1.2.3s", ".s", "99999999999h", "1h-1m"] {
            assert!(parse_duration(bad).is_err(), "{bad}");
        }
        assert_eq!(parse_list(r#"a, "b,c" ,d"#), ["a", "b,c", "d"]);
        assert_eq!(options("--log-level debug --log-level redis-proxy=info,error", &[]).log_level.len(), 3);
    }

    #[test]
    fn help_and_versions() {
        let Ok(Command::Print(help)) = run("agent --help", &[]) else { panic!("no help") };
        for flag in FLAGS {
            assert!(help.contains(flag.name) && help.contains(flag.env), "{}", flag.name);
        }
        for (line, start) in [
            ("version", "argocd-agent-lite-"),
            ("version -s", VERSION),
            ("version -o json", "{\n  \"name\": \"argocd-agent-lite\""),
            ("version --output=yaml", "name: argocd-agent-lite\nversion: "),
        ] {
            let Ok(Command::Print(text)) = run(line, &[]) else { panic!("{line}") };
            assert!(text.starts_with(start), "{text}");
        }
        assert!(run("version -o xml", &[]).is_err());
    }
}
