//! The registry of agents: cluster Secrets with the agent's name as a label.

use std::collections::{BTreeMap, BTreeSet};

use agent_core::request::is_dns_label;
use futures_util::{StreamExt as _, pin_mut};
use k8s_openapi::api::core::v1::Secret;
use kube::runtime::watcher::{self, watcher};
use kube::{Api, Client};

use super::call::{explain, explain_client};

/// Watches the Secrets for ever and calls `changed` with all registered agents: once when the first list is
/// complete, then after every change.
pub async fn run(client: Client, namespace: String, mut changed: impl FnMut(&BTreeSet<String>)) {
    let api = Api::<Secret>::namespaced(client, &namespace);
    let config = watcher::Config::default().labels(&format!("{TYPE_LABEL}=cluster,{NAME_LABEL}"));
    let events = watcher(api, config);
    pin_mut!(events);
    let mut registry = Registry::new(&namespace);
    let mut failures: u32 = 0;
    while let Some(event) = events.next().await {
        match event {
            Ok(event) => {
                failures = 0;
                if registry.apply(event) {
                    changed(&registry.agents());
                }
            }
            Err(error) => {
                let wait = std::time::Duration::from_secs(1 << failures.min(5));
                failures = failures.saturating_add(1);
                let source = std::error::Error::source(&error).and_then(|source| source.downcast_ref());
                let reason = source.map_or_else(|| explain(&error), explain_client);
                let seconds = wait.as_secs();
                tracing::warn!(
                    "cannot watch secrets in namespace {namespace}: {reason}; next attempt in {seconds} s"
                );
                tokio::time::sleep(wait).await;
            }
        }
    }
}

#[derive(Debug)]
struct Registry {
    namespace: String,
    /// Agent by name of its Secret.
    secrets: BTreeMap<String, String>,
    /// The list under way.
    listed: BTreeMap<String, String>,
}

impl Registry {
    fn new(namespace: &str) -> Self {
        Self { namespace: namespace.to_owned(), secrets: BTreeMap::new(), listed: BTreeMap::new() }
    }

    /// Two Secrets of one agent count as one: while either stands, the agent is registered.
    fn agents(&self) -> BTreeSet<String> {
        self.secrets.values().cloned().collect()
    }

    /// Takes in an event; whether the set of agents may have changed.
    fn apply(&mut self, event: watcher::Event<Secret>) -> bool {
        match event {
            watcher::Event::Init => {
                self.listed.clear();
                false
            }
            watcher::Event::InitApply(secret) => {
                let name = secret.metadata.name.clone().unwrap_or_default();
                // As with a change: a typing error keeps its agent.
                let known = self.secrets.get(&name).cloned();
                if let Some(agent) = self.read(&secret).map(|(_, agent)| agent).or(known) {
                    self.listed.insert(name, agent);
                }
                false
            }
            watcher::Event::InitDone => {
                self.secrets = std::mem::take(&mut self.listed);
                true
            }
            watcher::Event::Apply(secret) => match self.read(&secret) {
                Some((name, agent)) => self.secrets.insert(name, agent.clone()) != Some(agent),
                // A Secret that no longer makes sense keeps its agent: a typing error must not disconnect a site.
                None => false,
            },
            watcher::Event::Delete(secret) => {
                self.secrets.remove(secret.metadata.name.as_deref().unwrap_or_default()).is_some()
            }
        }
    }

    fn read(&self, secret: &Secret) -> Option<(String, String)> {
        let name = secret.metadata.name.clone().unwrap_or_default();
        match self.check(secret) {
            Ok(agent) => {
                if self.secrets.iter().any(|(other, known)| *known == agent && *other != name) {
                    let namespace = &self.namespace;
                    tracing::warn!(
                        "secret {namespace}/{name}: agent {agent} has another cluster secret too: delete one"
                    );
                }
                Some((name, agent))
            }
            Err(reason) => {
                tracing::warn!("secret {}/{name} is ignored: {reason}", self.namespace);
                None
            }
        }
    }

    fn check(&self, secret: &Secret) -> Result<String, String> {
        let labels = secret.metadata.labels.as_ref();
        let agent = labels.and_then(|labels| labels.get(NAME_LABEL)).map(String::as_str).unwrap_or_default();
        if !is_dns_label(agent) {
            return Err(format!("label {NAME_LABEL}: {agent:?} is not a DNS label"));
        }
        if agent == self.namespace {
            return Err(format!(
                "agent {agent:?} is named like the principal's own namespace: give it another name"
            ));
        }
        let config = secret.data.as_ref().and_then(|data| data.get("config"));
        if let Some(config) = config {
            serde_json::from_slice::<serde_json::Map<String, serde_json::Value>>(&config.0)
                .map_err(|_| "field config is not a JSON object".to_owned())?;
        }
        Ok(agent.to_owned())
    }
}

const TYPE_LABEL: &str = "argocd.argoproj.io/secret-type";
const NAME_LABEL: &str = "argocd-agent.argoproj-labs.io/agent-name";

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::ByteString;
    use watcher::Event;

    fn secret(name: &str, agent: &str, config: &str) -> Secret {
        let mut secret = Secret::default();
        secret.metadata.name = Some(name.into());
        secret.metadata.labels = Some([(NAME_LABEL.to_owned(), agent.to_owned())].into());
        secret.data = Some([("config".to_owned(), ByteString(config.into()))].into());
        secret
    }

    fn names(registry: &Registry) -> Vec<String> {
        registry.agents().into_iter().collect()
    }

    #[test]
    fn added_changed_deleted() {
        let mut registry = Registry::new("argocd");
        assert!(!registry.apply(Event::Init));
        registry.apply(Event::InitApply(secret("cluster-a", "a", "{}")));
        assert!(names(&registry).is_empty(), "half a list is no list");
        assert!(registry.apply(Event::InitDone));
        assert_eq!(names(&registry), ["a"]);
        assert!(registry.apply(Event::Apply(secret("cluster-b", "b", "{}"))));
        assert!(!registry.apply(Event::Apply(secret("cluster-b", "b", "{\"x\":1}"))));
        assert!(registry.apply(Event::Apply(secret("cluster-b", "c", "{}"))));
        assert_eq!(names(&registry), ["a", "c"]);
        assert!(registry.apply(Event::Delete(secret("cluster-a", "a", "{}"))));
        assert_eq!(names(&registry), ["c"]);
        assert!(!registry.apply(Event::Delete(secret("unknown", "c", "{}"))));
    }

    #[test]
    fn a_typing_error_outlives_a_relist() {
        let mut registry = Registry::new("argocd");
        registry.apply(Event::Apply(secret("cluster-a", "a", "{}")));
        for config in ["{", "{}"] {
            registry.apply(Event::Init);
            registry.apply(Event::InitApply(secret("cluster-a", "a", config)));
            registry.apply(Event::InitApply(secret("cluster-b", "b", "{")));
            registry.apply(Event::InitDone);
            assert_eq!(names(&registry), ["a"], "{config}");
        }
        registry.apply(Event::Init);
        registry.apply(Event::InitDone);
        assert!(names(&registry).is_empty());
    }

    #[test]
    fn malformed_ones_are_ignored_and_known_agents_stay() {
        let mut registry = Registry::new("argocd");
        for (agent, config) in
            [("", "{}"), ("A", "{}"), ("a.b", "{}"), ("argocd", "{}"), ("a", "{"), ("a", "[]")]
        {
            assert!(!registry.apply(Event::Apply(secret("s", agent, config))), "{agent} {config}");
        }
        registry.apply(Event::Apply(secret("s", "a", "{}")));
        registry.apply(Event::Apply(secret("s", "a", "{")));
        assert_eq!(names(&registry), ["a"]);
    }

    #[test]
    fn the_second_of_two_secrets_keeps_the_agent() {
        let mut registry = Registry::new("argocd");
        registry.apply(Event::Apply(secret("one", "a", "{}")));
        registry.apply(Event::Apply(secret("two", "a", "{}")));
        registry.apply(Event::Delete(secret("one", "a", "{}")));
        assert_eq!(names(&registry), ["a"]);
    }
}
