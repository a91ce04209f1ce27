//! The embedded Kubernetes API as a cluster of the rigs.

use std::sync::Arc;

use super::Cluster;
use crate::kube::http::{Options, Server, Tls};

/// A server of its own, which the cluster keeps alive. The server is for looking inside.
pub fn embedded_cluster(name: &str) -> Result<(Arc<Server>, Cluster), String> {
    let failed = |error: &dyn std::fmt::Display| format!("embedded API {name}: {error}");
    let tls = Tls::self_signed().map_err(|error| failed(&error))?;
    let tokens = vec![ADMIN_TOKEN.to_owned(), PEER_TOKEN.to_owned()];
    let options = Options { tls: Some(tls), tokens, ..Options::default() };
    let server = Arc::new(Server::start(options).map_err(|error| failed(&error))?);
    let ca = server.ca().unwrap_or_default().to_owned();
    // No user name: this server has no authorisation to grant.
    let cluster =
        Cluster::with_tokens(name, &server.url(), &ca, ADMIN_TOKEN, ("", PEER_TOKEN), server.clone())?;
    Ok((server, cluster))
}

const ADMIN_TOKEN: &str = "admin-token";
const PEER_TOKEN: &str = "peer-token";
