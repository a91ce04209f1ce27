//! `agent`: an agent is a cluster Secret on the principal's side.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use agent_core::request::{is_dns_label, is_dns_subdomain};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use clap::{ArgMatches, Args, FromArgMatches, Subcommand, parser::ValueSource};
use k8s_openapi::api::core::v1::Secret;
use kube::api::ObjectMeta;

use super::config::Place;
use super::secrets::{bytes, field};
use super::{Global, KeyArgs, say};
use crate::pki::Purpose;

#[derive(Subcommand, Debug)]
pub(super) enum Command {
    /// Register an agent
    Create(Explicit<CreateArgs>),
}

#[derive(Args, Debug)]
pub(super) struct CreateArgs {
    /// Name of the agent
    agent_name: String,
    /// Address of the resource proxy as Argo CD reaches it, host:port
    #[arg(long, default_value = "argocd-agent-resource-proxy:9090")]
    resource_proxy_server: String,
    /// Label of the cluster secret, key=value; repeatable
    #[arg(short, long, value_delimiter = ',')]
    label: Vec<String>,
    /// Secret with an existing client certificate, [namespace/]name
    #[arg(long, default_value = "")]
    tls_from_secret: String,
    /// Secret with the CA certificate that goes with it, [namespace/]name
    #[arg(long, default_value = "")]
    ca_from_secret: String,
    /// Days of validity of a generated certificate
    #[arg(long, default_value_t = 180)]
    days: i64,
    #[command(flatten)]
    key: KeyArgs,
}

/// Arguments, and whether a key flag was given on the command line.
#[derive(Debug)]
pub(super) struct Explicit<T> {
    args: T,
    key_flags: bool,
}

impl<T: FromArgMatches> FromArgMatches for Explicit<T> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let given = |id| matches.value_source(id) == Some(ValueSource::CommandLine);
        let key_flags = given("key_algorithm") || given("key_size");
        Ok(Self { args: T::from_arg_matches(matches)?, key_flags })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl<T: Args> Args for Explicit<T> {
    fn augment_args(command: clap::Command) -> clap::Command {
        T::augment_args(command)
    }

    fn augment_args_for_update(command: clap::Command) -> clap::Command {
        T::augment_args_for_update(command)
    }
}

pub(super) async fn run(global: &Global, command: Command) -> Result<(), String> {
    let Command::Create(Explicit { args, key_flags }) = command;
    let existing_tls = match (args.tls_from_secret.is_empty(), args.ca_from_secret.is_empty()) {
        (true, true) => false,
        (false, false) => true,
        _ => return Err("--tls-from-secret and --ca-from-secret belong together".to_owned()),
    };
    if existing_tls && key_flags {
        return Err("--key-algorithm and --key-size make no sense with an existing certificate".to_owned());
    }
    let labels = labels(&args.label)?;
    check_address(&args.resource_proxy_server)?;
    // The reference allows dots here, but principal and resource proxy then refuse the name.
    if !is_dns_label(&args.agent_name) {
        return Err(format!(
            "agent name {:?} is not a DNS label: use at most 63 of a-z, 0-9 and -",
            args.agent_name
        ));
    }
    let place = global.principal_place().await?;
    if args.agent_name == place.namespace {
        return Err(format!(
            "an agent must not be named like the principal's namespace {:?}: its applications live in a namespace of its own",
            place.namespace
        ));
    }
    let secret_name = format!("cluster-{}", args.agent_name);
    if place.read(&place.namespace, &secret_name).await?.is_some() {
        return Err(format!(
            "agent {} exists already (secret {}/{secret_name})",
            args.agent_name, place.namespace
        ));
    }
    let credentials = if existing_tls {
        existing(&place, &args.tls_from_secret, &args.ca_from_secret).await?
    } else {
        let authority = place.authority().await?;
        let pair = authority.issue(&args.agent_name, &Purpose::Client, args.days, args.key.algorithm()?)?;
        Credentials {
            certificate: pair.certificate,
            key: pair.key,
            ca: authority.certificate_pem().to_owned(),
        }
    };
    let secret = cluster_secret(&args.agent_name, &args.resource_proxy_server, labels, &credentials);
    place.write(secret, false, "").await?;
    say(&format!("Agent {} created with cluster secret {}/{secret_name}", args.agent_name, place.namespace));
    Ok(())
}

struct Credentials {
    certificate: String,
    key: String,
    ca: String,
}

async fn existing(place: &Place, tls: &str, ca: &str) -> Result<Credentials, String> {
    let load = async |reference: &str| {
        let (namespace, name) = match reference.split_once('/') {
            Some(("", name)) => (place.namespace.as_str(), name),
            Some((namespace, name)) => (namespace, name),
            None => (place.namespace.as_str(), reference),
        };
        let named = format!("{namespace}/{name}");
        match place.read(namespace, name).await? {
            Some(secret) => Ok((secret, named)),
            None => Err(format!("secret {named} not found")),
        }
    };
    let (tls_secret, tls_named) = load(tls).await?;
    let certificate = field(&tls_secret, &tls_named, "tls.crt")?;
    let key = field(&tls_secret, &tls_named, "tls.key")?;
    crate::pki::check_key_pair(&certificate, &key).map_err(|error| format!("secret {tls_named}: {error}"))?;
    let (ca_secret, ca_named) = load(ca).await?;
    let ca = field(&ca_secret, &ca_named, "ca.crt")?;
    Ok(Credentials { certificate, key, ca })
}

fn cluster_secret(
    agent: &str,
    address: &str,
    mut labels: BTreeMap<String, String>,
    credentials: &Credentials,
) -> Secret {
    labels.insert(LABEL_AGENT_NAME.to_owned(), agent.to_owned());
    labels.insert("argocd.argoproj.io/secret-type".to_owned(), "cluster".to_owned());
    let annotations = BTreeMap::from([
        ("argocd.argoproj.io/skip-reconcile".to_owned(), "true".to_owned()),
        ("managed-by".to_owned(), "argocd-agent".to_owned()),
    ]);
    // Base64 needs no JSON escaping.
    let config = format!(
        r#"{{"tlsClientConfig":{{"insecure":false,"certData":"{}","keyData":"{}","caData":"{}"}}}}"#,
        STANDARD.encode(&credentials.certificate),
        STANDARD.encode(&credentials.key),
        STANDARD.encode(&credentials.ca)
    );
    let server = format!("https://{address}?agentName={agent}");
    Secret {
        metadata: ObjectMeta {
            name: Some(format!("cluster-{agent}")),
            labels: Some(labels),
            annotations: Some(annotations),
            ..Default::default()
        },
        data: Some(bytes(&[("name", agent), ("server", &server), ("config", &config)])),
        ..Default::default()
    }
}

fn labels(words: &[String]) -> Result<BTreeMap<String, String>, String> {
    let mut labels = BTreeMap::new();
    for word in words {
        let (key, value) =
            word.split_once('=').ok_or_else(|| format!("label {word:?} is not of the form key=value"))?;
        if labels.insert(key.to_owned(), value.to_owned()).is_some() {
            return Err(format!("label {key:?} is given twice"));
        }
    }
    Ok(labels)
}

/// An IP address with a port, or a DNS name with a port.
fn check_address(address: &str) -> Result<(), String> {
    if address.parse::<SocketAddr>().is_ok() {
        return Ok(());
    }
    let good = address
        .split_once(':')
        .is_some_and(|(host, port)| is_dns_subdomain(host) && port.parse::<u16>().is_ok());
    if good { Ok(()) } else { Err(format!("{address:?} is not an address of the form host:port")) }
}

const LABEL_AGENT_NAME: &str = "argocd-agent.argoproj-labs.io/agent-name";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses() {
        for good in ["argocd-agent-resource-proxy:9090", "127.0.0.1:1", "[::1]:9090", "a.b:0"] {
            assert!(check_address(good).is_ok(), "{good}");
        }
        for bad in ["", "host", "host:", "host:65536", "HOST:1", "::1:9090", "a:b:1"] {
            assert!(check_address(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn user_labels_never_win() {
        let credentials = Credentials { certificate: "c".into(), key: "k".into(), ca: "a".into() };
        let user = labels(&["argocd.argoproj.io/secret-type=x".into(), "site=shop".into()]).unwrap();
        let secret = cluster_secret("a1", "h:1", user, &credentials);
        let labels = secret.metadata.labels.unwrap();
        assert_eq!(labels["argocd.argoproj.io/secret-type"], "cluster");
        assert_eq!(labels["site"], "shop");
        assert_eq!(secret.data.unwrap()["server"].0, b"https://h:1?agentName=a1");
        assert!(super::labels(&["a".into()]).is_err());
        assert!(super::labels(&["a=1".into(), "a=2".into()]).is_err());
    }
}
