//! `pki`: a certificate authority in a Secret, for development and tests.

use std::net::IpAddr;

use clap::{Args, Subcommand};

use super::config::{DEFAULT_NAMESPACE, Place};
use super::secrets::{CA_SECRET, OPAQUE_TYPE, TLS_TYPE, secret};
use super::{Global, KeyArgs, complain, say};
use crate::pki::Purpose;

#[derive(Subcommand, Debug)]
pub(super) enum Command {
    /// Create the certificate authority
    Init {
        /// Replace an existing CA; certificates that it issued are not touched
        #[arg(short, long)]
        force: bool,
        /// Days of validity
        #[arg(long, default_value_t = 3650)]
        days: i64,
        #[command(flatten)]
        key: KeyArgs,
    },
    /// Issue certificates
    #[command(alias = "new-cert", subcommand_required = true, arg_required_else_help = true)]
    Issue {
        #[command(subcommand)]
        command: Issue,
    },
}

#[derive(Subcommand, Debug)]
pub(super) enum Issue {
    /// Server certificate of the principal
    Principal {
        #[command(flatten)]
        leaf: LeafArgs,
        /// IP addresses in the certificate
        #[arg(long, value_delimiter = ',', default_value = "127.0.0.1")]
        ip: Vec<String>,
        /// DNS names in the certificate
        #[arg(long, value_delimiter = ',', default_value = "localhost")]
        dns: Vec<String>,
    },
    /// Server certificate of the resource proxy
    ResourceProxy {
        #[command(flatten)]
        leaf: LeafArgs,
        /// IP addresses in the certificate
        #[arg(long, value_delimiter = ',')]
        ip: Vec<String>,
        /// DNS names in the certificate
        #[arg(long, value_delimiter = ',')]
        dns: Vec<String>,
        /// Allow a certificate without any address or name
        #[arg(long)]
        no_san: bool,
    },
    /// Client certificate of an agent, written to the agent's cluster together with the CA certificate
    Agent {
        /// Name of the agent
        name: String,
        #[command(flatten)]
        leaf: LeafArgs,
        /// Allow both sides to be the same context
        #[arg(long)]
        same_context: bool,
    },
}

#[derive(Args, Debug)]
pub(super) struct LeafArgs {
    /// Replace an existing certificate
    #[arg(short, long)]
    upsert: bool,
    /// Days of validity
    #[arg(long, default_value_t = 180)]
    days: i64,
    #[command(flatten)]
    key: KeyArgs,
}

pub(super) async fn run(global: &Global, command: Command) -> Result<(), String> {
    complain("[WARN]: this PKI is for development and tests: do not use it in production");
    match command {
        Command::Init { force, days, key } => init(global, force, days, &key).await,
        Command::Issue { command: Issue::Principal { leaf, ip, dns } } => {
            let purpose = Purpose::Server { ips: addresses(&ip)?, dns: names(dns) };
            issue_server(global, "argocd-agent-principal", &purpose, &leaf).await
        }
        Command::Issue { command: Issue::ResourceProxy { leaf, ip, dns, no_san } } => {
            let (ips, dns) = (addresses(&ip)?, names(dns));
            if ips.is_empty() && dns.is_empty() && !no_san {
                return Err("a certificate without --ip and --dns fits no address: give --no-san to issue it all the same".to_owned());
            }
            issue_server(global, "argocd-agent-resource-proxy", &Purpose::Server { ips, dns }, &leaf).await
        }
        Command::Issue { command: Issue::Agent { name, leaf, same_context } } => {
            issue_agent(global, &name, &leaf, same_context).await
        }
    }
}

async fn init(global: &Global, force: bool, days: i64, key: &KeyArgs) -> Result<(), String> {
    let algorithm = key.algorithm()?;
    let place = global.principal_place().await?;
    // Looked up first: a 4096-bit key takes seconds to make.
    if !force && place.read(&place.namespace, CA_SECRET).await?.is_some() {
        return Err(format!(
            "secret {}/{CA_SECRET} exists already: use --force to replace it",
            place.namespace
        ));
    }
    say("Generating the CA and storing it in a secret");
    let ca = crate::pki::new_authority(days, algorithm)?;
    let data = [("tls.crt", ca.certificate.as_str()), ("tls.key", ca.key.as_str())];
    let written = place.write(secret(CA_SECRET, TLS_TYPE, &data), force, "--force").await?;
    say(&format!("CA {} in secret {}/{CA_SECRET}", written.word(), place.namespace));
    Ok(())
}

async fn issue_server(
    global: &Global,
    common_name: &str,
    purpose: &Purpose,
    leaf: &LeafArgs,
) -> Result<(), String> {
    let algorithm = leaf.key.algorithm()?;
    let place = global.principal_place().await?;
    let pair = place.authority().await?.issue(common_name, purpose, leaf.days, algorithm)?;
    write_pair(&place, &format!("{common_name}-tls"), &pair, leaf.upsert).await
}

async fn issue_agent(global: &Global, name: &str, leaf: &LeafArgs, same_context: bool) -> Result<(), String> {
    if !agent_core::request::is_dns_label(name) {
        // The reference issues any name here, and the principal refuses it later.
        return Err(format!("agent name {name:?} is not a DNS label: use at most 63 of a-z, 0-9 and -"));
    }
    let algorithm = leaf.key.algorithm()?;
    let (principal_context, principal_namespace) = global.principal_target()?;
    let agent_context = global.agent_context()?;
    if principal_context.is_empty() || agent_context.is_empty() {
        return Err("both sides must be known: give --principal-context and --agent-context".to_owned());
    }
    if principal_context == agent_context && !same_context {
        return Err(format!(
            "principal and agent have the same context {agent_context:?}: give --same-context if that is meant"
        ));
    }
    let namespace = global.agent_namespace.clone().unwrap_or_else(|| DEFAULT_NAMESPACE.to_owned());
    if principal_context == agent_context && principal_namespace == namespace {
        return Err(format!(
            "the agent's CA secret would overwrite {principal_namespace}/{CA_SECRET}: give the agent another namespace with --agent-namespace"
        ));
    }
    let principal = Place {
        client: crate::kube::client::connect("", &principal_context).await?,
        namespace: principal_namespace,
    };
    let agent = Place { client: crate::kube::client::connect("", &agent_context).await?, namespace };
    let authority = principal.authority().await?;
    let pair = authority.issue(name, &Purpose::Client, leaf.days, algorithm)?;
    write_pair(&agent, "argocd-agent-client-tls", &pair, leaf.upsert).await?;
    // The CA always follows the certificate that it signed, whatever --upsert says.
    let ca = secret(CA_SECRET, OPAQUE_TYPE, &[("ca.crt", authority.certificate_pem())]);
    let written = agent.write(ca, true, "").await?;
    say(&format!("CA certificate {} in secret {}/{CA_SECRET}", written.word(), agent.namespace));
    Ok(())
}

async fn write_pair(place: &Place, name: &str, pair: &crate::pki::Pair, upsert: bool) -> Result<(), String> {
    let data = [("tls.crt", pair.certificate.as_str()), ("tls.key", pair.key.as_str())];
    let written = place.write(secret(name, TLS_TYPE, &data), upsert, "--upsert").await?;
    say(&format!("Certificate {} in secret {}/{name}", written.word(), place.namespace));
    Ok(())
}

fn addresses(words: &[String]) -> Result<Vec<IpAddr>, String> {
    words
        .iter()
        .filter(|word| !word.is_empty())
        .map(|word| word.parse().map_err(|_| format!("{word:?} is not an IP address")))
        .collect()
}

fn names(words: Vec<String>) -> Vec<String> {
    words.into_iter().filter(|word| !word.is_empty()).collect()
}
