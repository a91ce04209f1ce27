//! The command line and the environment.
//!
//! Precedence as in the reference: flag, then environment, then default. A rejected environment value never stops the
//! process: it is reported and the default applies. A rejected flag does.

pub mod table;
pub mod value;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::time::Duration;

use clap::{Arg, ArgAction, ArgMatches};

use table::{ENV_ONLY, FLAGS, Flag, Shape, Support};

/// What the command line asks for.
#[derive(Debug)]
pub enum Invocation {
    /// Run the principal.
    Run(Box<Options>),
    /// Print this to stdout and exit 0: help, version, list of cipher suites.
    Print(String),
}

/// A command line that cannot be run.
#[derive(Debug)]
pub struct Usage {
    /// What is wrong.
    pub message: String,
    /// Whole text for stderr, usage included; empty if the usage would not help.
    pub usage: String,
}

impl From<String> for Usage {
    fn from(message: String) -> Self {
        Self { message, usage: String::new() }
    }
}

/// The options of this version, checked.
#[derive(Clone, Debug, Default)]
#[allow(missing_docs, reason = "each field is the flag of the same name; the table says what it does")]
pub struct Options {
    pub listen_host: String,
    pub listen_port: u16,
    pub namespace: String,
    pub allowed_namespaces: Vec<String>,
    /// Applications name their agent by destination, not by namespace.
    pub destination_based_mapping: bool,
    pub label_selector: String,
    pub event_processors: usize,
    pub kubeconfig: String,
    pub kubecontext: String,
    pub tls_secret_name: String,
    pub tls_cert: String,
    pub tls_key: String,
    pub insecure_tls_generate: bool,
    pub insecure_plaintext: bool,
    pub tls_ca_secret_name: String,
    pub root_ca_path: String,
    pub require_client_certs: bool,
    pub client_cert_subject_match: bool,
    pub tls_min_version: String,
    pub tls_max_version: String,
    pub tls_ciphersuites: Vec<String>,
    pub grpc_max_message_size: usize,
    pub jwt_secret_name: String,
    pub jwt_key: String,
    pub insecure_jwt_generate: bool,
    pub auth: String,
    pub log_level: Vec<String>,
    pub log_format: String,
    pub metrics_port: Option<u16>,
    pub healthz_port: u16,
    /// Lines for the log once there is one: values of the environment that were rejected, flags without effect.
    pub warnings: Vec<String>,
}

/// Reads arguments (the first is the program's name) and environment.
pub fn parse(
    args: impl IntoIterator<Item = OsString>,
    env: impl Fn(&str) -> Option<String>,
) -> Result<Invocation, Usage> {
    let mut args: Vec<OsString> = args.into_iter().collect();
    if args.get(1).is_some_and(|word| word == "principal") {
        args.remove(1);
    }
    let matches = match command().try_get_matches_from(args) {
        Ok(matches) => matches,
        Err(error) if error.kind() == clap::error::ErrorKind::DisplayHelp => {
            return Ok(Invocation::Print(error.to_string()));
        }
        Err(error) => {
            let text = error.to_string().replacen("error: ", "Error: ", 1);
            let first = text.lines().next().unwrap_or_default();
            let message = first.strip_prefix("Error: ").unwrap_or(first).to_owned();
            return Err(Usage { message, usage: text });
        }
    };
    if let Some(("version", version)) = matches.subcommand() {
        return print_version(version).map(Invocation::Print);
    }
    let mut values = Values::default();
    for flag in FLAGS {
        let value = values.resolve(flag, &matches, &env)?;
        values.map.insert(flag.name, value);
    }
    for (name, default, why) in ENV_ONLY {
        if env(name).is_some_and(|value| value != *default && !value.is_empty()) {
            values.warnings.push(format!("{name} has no effect: {why}"));
        }
    }
    if values.list("tls-ciphersuites") == ["list"] {
        return Ok(Invocation::Print(crate::tls::cipher_suite_names().join("\n")));
    }
    values.into_options().map(|options| Invocation::Run(Box::new(options)))
}

fn command() -> clap::Command {
    let version = clap::Command::new("version")
        .about("Print the version")
        .arg(
            Arg::new("short")
                .short('s')
                .long("short")
                .action(ArgAction::SetTrue)
                .help("Print only the version"),
        )
        .arg(Arg::new("output").short('o').long("output").default_value("text").help("text, yaml or json"));
    let mut command = clap::Command::new("principal")
        .about("The control-plane half of argocd-agent")
        .disable_help_subcommand(true)
        .args_override_self(true)
        .args_conflicts_with_subcommands(true)
        .subcommand(version);
    for flag in FLAGS {
        let mut help = flag.help.to_owned();
        if !flag.env.is_empty() {
            help.push_str(&format!(" [env: {}]", flag.env));
        }
        if !flag.default.is_empty() {
            help.push_str(&format!(" [default: {}]", flag.default));
        }
        if let Support::Refused(_) = flag.support {
            help.push_str(" (not in this version)");
        }
        if let Support::Warned(_) = flag.support {
            help.push_str(" (no effect in this version)");
        }
        let mut arg = Arg::new(flag.name).long(flag.name).help(help);
        if flag.name == "namespace" {
            arg = arg.short('n');
        }
        arg = match flag.shape {
            Shape::Bool => arg.num_args(0..=1).require_equals(true).default_missing_value("true"),
            Shape::List => arg.action(ArgAction::Append).allow_hyphen_values(true),
            _ => arg.allow_hyphen_values(true),
        };
        command = command.arg(arg.value_name(match flag.shape {
            Shape::Bool => "true|false",
            Shape::Int | Shape::Port => "NUMBER",
            Shape::Duration => "DURATION",
            Shape::List => "LIST",
            Shape::Text => "TEXT",
        }));
    }
    command
}

fn print_version(matches: &ArgMatches) -> Result<String, Usage> {
    let output = matches.get_one::<String>("output").map_or("text", String::as_str);
    Ok(match output {
        _ if matches.get_flag("short") => crate::version::VERSION.to_owned(),
        "text" => format!("{}-{}", crate::version::NAME, crate::version::VERSION),
        "json" => crate::version::json("  "),
        "yaml" => crate::version::yaml(),
        other => return Err(Usage::from(format!("unknown output format {other:?}: use text, yaml or json"))),
    })
}

/// A resolved value. Everything but lists stays text until it is asked for: it has been checked by then.
#[derive(Clone, Debug)]
enum Value {
    Text(String),
    Bool(bool),
    Int(i64),
    Duration(Duration),
    List(Vec<String>),
}

#[derive(Default)]
struct Values {
    map: BTreeMap<&'static str, Value>,
    warnings: Vec<String>,
}

impl Values {
    fn resolve(
        &mut self,
        flag: &Flag,
        matches: &ArgMatches,
        env: &impl Fn(&str) -> Option<String>,
    ) -> Result<Value, Usage> {
        let read = |word: &str| -> Result<Value, String> {
            Ok(match flag.shape {
                Shape::Text => Value::Text(word.to_owned()),
                Shape::Bool => Value::Bool(value::parse_bool(word)?),
                Shape::Int | Shape::Port => Value::Int(value::parse_int(word)?),
                Shape::Duration => Value::Duration(value::parse_duration(word)?),
                Shape::List => Value::List(value::flag_list(word)?),
            })
        };
        if let Some(words) = matches.get_many::<String>(flag.name) {
            let bad = |error: String| {
                let message = format!("invalid argument for --{}: {error}", flag.name);
                Usage { usage: format!("Error: {message}\n\n{}", command().render_usage()), message }
            };
            if flag.shape == Shape::List {
                let mut all = Vec::new();
                for word in words {
                    all.extend(value::flag_list(word).map_err(bad)?);
                }
                return Ok(Value::List(all));
            }
            if let Some(word) = words.into_iter().next_back() {
                return read(word).map_err(bad);
            }
        }
        let default = || read(flag.default).map_err(Usage::from);
        let Some(word) = (!flag.env.is_empty()).then(|| env(flag.env)).flatten() else { return default() };
        let from_env = match flag.shape {
            Shape::List => Ok(Value::List(value::env_list(&word))),
            // The reference checks ports and the width of numbers here, and not for flags.
            Shape::Int | Shape::Port => value::parse_int(&word).and_then(|number| {
                let good = if flag.shape == Shape::Port {
                    (0..=65536).contains(&number)
                } else {
                    i32::try_from(number).is_ok()
                };
                if good { Ok(Value::Int(number)) } else { Err(format!("{number} is out of range")) }
            }),
            _ => read(&word),
        };
        from_env.or_else(|error| {
            self.warnings
                .push(format!("{} is ignored and the default {:?} used: {error}", flag.env, flag.default));
            default()
        })
    }

    fn text(&self, name: &str) -> String {
        match self.map.get(name) {
            Some(Value::Text(text)) => text.clone(),
            _ => String::new(),
        }
    }

    fn bool(&self, name: &str) -> bool {
        matches!(self.map.get(name), Some(Value::Bool(true)))
    }

    fn int(&self, name: &str) -> i64 {
        match self.map.get(name) {
            Some(Value::Int(number)) => *number,
            _ => 0,
        }
    }

    /// A list without its empty elements, which ask for nothing.
    fn list(&self, name: &str) -> Vec<String> {
        match self.map.get(name) {
            Some(Value::List(list)) => list.iter().filter(|element| !element.is_empty()).cloned().collect(),
            _ => Vec::new(),
        }
    }

    /// Refusals and warnings for flags of later features.
    fn check_support(&mut self) -> Result<(), Usage> {
        for flag in FLAGS {
            let neutral = std::iter::once(&flag.default).chain(flag.neutral).any(|word| self.is(flag, word));
            if neutral {
                continue;
            }
            match flag.support {
                Support::Built => {}
                Support::Refused(why) => return Err(Usage::from(format!("--{}: {why}", flag.name))),
                Support::Warned(why) => {
                    self.warnings.push(format!("--{} has no effect: {why}", flag.name));
                }
            }
        }
        Ok(())
    }

    fn is(&self, flag: &Flag, word: &str) -> bool {
        match self.map.get(flag.name) {
            Some(Value::Text(text)) => text == word,
            Some(Value::Bool(on)) => value::parse_bool(word) == Ok(*on),
            Some(Value::Int(number)) => value::parse_int(word) == Ok(*number),
            Some(Value::Duration(duration)) => value::parse_duration(word) == Ok(*duration),
            Some(Value::List(_)) => {
                self.list(flag.name).iter().map(String::as_str).eq(word.split(',').filter(|e| !e.is_empty()))
            }
            None => false,
        }
    }

    fn into_options(mut self) -> Result<Options, Usage> {
        self.check_support()?;
        let both_or_neither = |cert: &str, key: &str| {
            if self.text(cert).is_empty() == self.text(key).is_empty() {
                Ok(())
            } else {
                Err(Usage::from(format!("--{cert} and --{key} belong together")))
            }
        };
        both_or_neither("tls-cert", "tls-key")?;
        both_or_neither("redis-proxy-server-tls-cert", "redis-proxy-server-tls-key")?;
        if !self.text("redis-creds-dir-path").is_empty() && !self.text("redis-password").is_empty() {
            return Err(Usage::from("give either --redis-creds-dir-path or --redis-password".to_owned()));
        }
        let compression = self.text("redis-compression-type");
        if !matches!(compression.as_str(), "gzip" | "none") {
            return Err(Usage::from(format!("--redis-compression-type {compression:?}: use gzip or none")));
        }
        if self.text("namespace").is_empty() {
            return Err(Usage::from(
                "--namespace must be the principal's namespace: it must not be empty".to_owned(),
            ));
        }
        let log_format = self.text("log-format");
        if !matches!(log_format.as_str(), "text" | "json") {
            return Err(Usage::from(format!("--log-format {log_format:?}: use text or json")));
        }
        let listen_port = port(self.int("listen-port"), 0, 65535, "listen-port")?;
        let healthz_port = port(self.int("healthz-port"), 1, 32767, "healthz-port")?;
        let metrics_port = match self.int("metrics-port") {
            ..=0 => None,
            number => Some(port(number, 1, 32767, "metrics-port")?),
        };
        Ok(Options {
            listen_host: self.text("listen-host"),
            listen_port,
            namespace: self.text("namespace"),
            allowed_namespaces: self.list("allowed-namespaces"),
            destination_based_mapping: self.bool("destination-based-mapping"),
            label_selector: self.text("label-selector"),
            event_processors: positive(self.int("event-processors"), "event-processors")?,
            kubeconfig: self.text("kubeconfig"),
            kubecontext: self.text("kubecontext"),
            tls_secret_name: self.text("tls-secret-name"),
            tls_cert: self.text("tls-cert"),
            tls_key: self.text("tls-key"),
            insecure_tls_generate: self.bool("insecure-tls-generate"),
            insecure_plaintext: self.bool("insecure-plaintext"),
            tls_ca_secret_name: self.text("tls-ca-secret-name"),
            root_ca_path: self.text("root-ca-path"),
            require_client_certs: self.bool("require-client-certs"),
            client_cert_subject_match: self.bool("client-cert-subject-match"),
            tls_min_version: self.text("tls-min-version"),
            tls_max_version: self.text("tls-max-version"),
            tls_ciphersuites: self.list("tls-ciphersuites"),
            grpc_max_message_size: positive(self.int("grpc-max-message-size"), "grpc-max-message-size")?,
            jwt_secret_name: self.text("jwt-secret-name"),
            jwt_key: self.text("jwt-key"),
            insecure_jwt_generate: self.bool("insecure-jwt-generate"),
            auth: self.text("auth"),
            log_level: self.list("log-level"),
            log_format,
            metrics_port,
            healthz_port,
            warnings: self.warnings,
        })
    }
}

fn port(number: i64, low: u16, high: u16, name: &str) -> Result<u16, Usage> {
    u16::try_from(number)
        .ok()
        .filter(|port| (low..=high).contains(port))
        .ok_or_else(|| Usage::from(format!("--{name} {number} is out of range: use {low} to {high}")))
}

fn positive(number: i64, name: &str) -> Result<usize, Usage> {
    usize::try_from(number)
        .ok()
        .filter(|number| *number > 0)
        .ok_or_else(|| Usage::from(format!("--{name} {number} is out of range: it must be above 0")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(line: &str, env: &[(&str, &str)]) -> Result<Options, Usage> {
        let args = std::iter::once("principal").chain(line.split(' ').filter(|word| !word.is_empty()));
        let lookup =
            |name: &str| env.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
        match parse(args.map(OsString::from), lookup)? {
            Invocation::Run(options) => Ok(*options),
            Invocation::Print(text) => panic!("printed {text}"),
        }
    }

    #[test]
    fn command_is_sound_and_help_names_everything() {
        command().debug_assert();
        let help = command().render_long_help().to_string();
        for flag in FLAGS {
            assert!(help.contains(&format!("--{}", flag.name)) && help.contains(flag.env), "{}", flag.name);
        }
    }

    #[test]
    fn flag_wins_over_environment_wins_over_default() {
        let env = [("ARGOCD_PRINCIPAL_LISTEN_PORT", "0x10"), ("ARGOCD_PRINCIPAL_NAMESPACE", "hub")];
        let options = run("", &env).unwrap();
        assert_eq!((options.listen_port, options.namespace.as_str()), (16, "hub"));
        let options = run("principal --listen-port=1 --listen-port 2 -n argocd", &env).unwrap();
        assert_eq!((options.listen_port, options.namespace.as_str()), (2, "argocd"));
        assert_eq!(options.tls_min_version, "tls1.3");
        assert_eq!(options.metrics_port, Some(8000));
    }

    #[test]
    fn empty_strings_in_the_environment_count_and_bad_values_fall_back() {
        let env = [
            ("ARGOCD_PRINCIPAL_TLS_SECRET_NAME", ""),
            ("ARGOCD_PRINCIPAL_LISTEN_PORT", "70000"),
            ("ARGOCD_PRINCIPAL_INSECURE_PLAINTEXT", "yes"),
            ("ARGOCD_PRINCIPAL_KEEP_ALIVE_MIN_INTERVAL", ""),
            ("ARGOCD_PRINCIPAL_ALLOWED_NAMESPACES", " a , b*"),
        ];
        let options = run("-n argocd", &env).unwrap();
        assert_eq!(options.tls_secret_name, "");
        assert_eq!(options.listen_port, 8443);
        assert!(!options.insecure_plaintext);
        assert_eq!(options.allowed_namespaces, ["a", "b*"]);
        assert_eq!(options.warnings.len(), 3, "{:?}", options.warnings);
    }

    #[test]
    fn later_features_refuse_or_warn() {
        assert!(run("-n a --ha-enabled=true", &[]).is_err());
        assert!(run("-n a --ha-enabled=false", &[]).unwrap().warnings.is_empty());
        let options = run("-n a --redis-server-address r:1", &[]).unwrap();
        assert!(options.warnings[0].contains("--redis-server-address"));
    }

    #[test]
    fn the_installed_configuration_warns_of_redis_only() {
        let env = [
            ("ARGOCD_PRINCIPAL_NAMESPACE", "argocd"),
            ("ARGOCD_PRINCIPAL_ALLOWED_NAMESPACES", ""),
            ("ARGOCD_PRINCIPAL_LOG_LEVEL", "info"),
            ("ARGOCD_PRINCIPAL_NAMESPACE_CREATE_LABELS", ""),
            ("ARGOCD_PRINCIPAL_TLS_CIPHERSUITES", ""),
            ("ARGOCD_PRINCIPAL_REDIS_CA_PATH", "/app/config/redis-tls/ca.crt"),
            (
                "ARGOCD_PRINCIPAL_REDIS_PROXY_SERVER_TLS_CERT_PATH",
                "/app/config/redis-proxy-server-tls/tls.crt",
            ),
            (
                "ARGOCD_PRINCIPAL_REDIS_PROXY_SERVER_TLS_KEY_PATH",
                "/app/config/redis-proxy-server-tls/tls.key",
            ),
            ("ARGOCD_PRINCIPAL_KEEP_ALIVE_MIN_INTERVAL", "0"),
            ("ARGOCD_PRINCIPAL_ENABLE_RESOURCE_PROXY", "true"),
            ("REDIS_PASSWORD", "secret"),
        ];
        let options = run("", &env).unwrap();
        assert_eq!(options.warnings.len(), 1, "{:?}", options.warnings);
        assert!(!options.warnings[0].contains("secret"));
    }

    #[test]
    fn bad_flags_are_usage_errors() {
        for bad in [
            "-n a --nonsense",
            "-n a --listen-port x",
            "",
            "-n a --healthz-port 0",
            "-n a --metrics-port 40000",
        ] {
            assert!(run(bad, &[]).is_err(), "{bad}");
        }
        assert_eq!(run("-n a --metrics-port -1", &[]).unwrap().metrics_port, None);
    }
}
