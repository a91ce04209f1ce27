//! `jwt`: the key that signs the agents' tokens.

use clap::Subcommand;

use super::secrets::{OPAQUE_TYPE, secret};
use super::{Global, say};
use crate::pki::RsaBits;

#[derive(Subcommand, Debug)]
pub(super) enum Command {
    /// Create the signing key, RSA 4096
    CreateKey {
        /// Replace an existing key; the principal must be restarted then
        #[arg(short, long)]
        upsert: bool,
    },
}

pub(super) async fn run(global: &Global, command: Command) -> Result<(), String> {
    let Command::CreateKey { upsert } = command;
    let place = global.principal_place().await?;
    let key = crate::pki::rsa_key(RsaBits::B4096)?;
    let written =
        place.write(secret(JWT_SECRET, OPAQUE_TYPE, &[("jwt.key", &key)]), upsert, "--upsert").await?;
    say(&format!("JWT signing key {} in secret {}/{JWT_SECRET}", written.word(), place.namespace));
    Ok(())
}

const JWT_SECRET: &str = "argocd-agent-jwt";
