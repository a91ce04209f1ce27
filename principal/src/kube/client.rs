//! Where the API server is and who we are to it.

use std::path::Path;

use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};

/// A client for a kubeconfig path and context; both empty means the usual search order: `KUBECONFIG`,
/// `~/.kube/config`, then the pod's own service account.
pub async fn connect(kubeconfig: &str, context: &str) -> Result<Client, String> {
    let options = KubeConfigOptions {
        context: (!context.is_empty()).then(|| context.to_owned()),
        ..Default::default()
    };
    let named = |error: &dyn std::fmt::Display| {
        let of_context = if context.is_empty() { String::new() } else { format!(", context {context:?}") };
        let of_file = if kubeconfig.is_empty() { "kubeconfig" } else { kubeconfig };
        format!("{of_file}{of_context}: {error}")
    };
    let mut config = if kubeconfig.is_empty() {
        match Config::from_kubeconfig(&options).await {
            Ok(config) => config,
            Err(error) if context.is_empty() => match Config::incluster() {
                Ok(config) => config,
                // Outside a cluster the kubeconfig is what the user has to mend.
                Err(_) => return Err(named(&error)),
            },
            Err(error) => return Err(named(&error)),
        }
    } else {
        let file = Kubeconfig::read_from(Path::new(kubeconfig)).map_err(|error| named(&error))?;
        Config::from_custom_kubeconfig(file, &options).await.map_err(|error| named(&error))?
    };
    // A watch is silent for as long as nothing changes: its time-out is in its request, and each
    // other call has one of its own.
    config.read_timeout = None;
    Client::try_from(config).map_err(|error| named(&error))
}
