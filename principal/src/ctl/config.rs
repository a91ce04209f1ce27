//! Which cluster and namespace a command is about.

use std::collections::BTreeMap;
use std::path::PathBuf;

use kube::Client;
use serde::Deserialize;

use super::Global;

/// A cluster and the namespace in it.
pub(super) struct Place {
    pub(super) client: Client,
    pub(super) namespace: String,
}

impl Global {
    /// The principal's side: `--principal-context`, else `--principal` or the default of the configuration file,
    /// else the current context. (The reference leaves the namespace empty in the last case, and then fails.)
    pub(super) async fn principal_place(&self) -> Result<Place, String> {
        let (context, namespace) = self.principal_target()?;
        let client = crate::kube::client::connect("", &context).await?;
        Ok(Place { client, namespace })
    }

    /// The context and namespace of the principal.
    pub(super) fn principal_target(&self) -> Result<(String, String), String> {
        let namespace = || self.principal_namespace.clone().unwrap_or_else(|| DEFAULT_NAMESPACE.to_owned());
        if !self.principal_context.is_empty() {
            return Ok((self.principal_context.clone(), namespace()));
        }
        let file = self.file()?;
        let name = if self.principal.is_empty() { &file.default_principal } else { &self.principal };
        if name.is_empty() {
            return Ok((String::new(), namespace()));
        }
        let entry = file.contexts.principals.get(name).ok_or_else(|| {
            format!("no principal {name:?} in {}: give --principal-context instead", self.describe_path())
        })?;
        Ok((entry.kube_context.clone(), entry.namespace.clone()))
    }

    /// The context of the agent's cluster: `--agent-context`, else `--agent` of the configuration file.
    pub(super) fn agent_context(&self) -> Result<String, String> {
        if !self.agent_context.is_empty() || self.agent.is_empty() {
            return Ok(self.agent_context.clone());
        }
        let file = self.file()?;
        let entry = file.contexts.agents.get(&self.agent).ok_or_else(|| {
            format!("no agent {:?} in {}: give --agent-context instead", self.agent, self.describe_path())
        })?;
        Ok(entry.kube_context.clone())
    }

    fn file(&self) -> Result<File, String> {
        let Some(path) = self.path() else { return Ok(File::default()) };
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(File::default()),
            Err(error) => return Err(format!("{}: {error}", path.display())),
        };
        if text.trim().is_empty() {
            return Ok(File::default());
        }
        serde_saphyr::from_str(&text).map_err(|error| format!("{}: {error}", path.display()))
    }

    fn path(&self) -> Option<PathBuf> {
        self.config
            .clone()
            .or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".config/argocd-agent/ctl.conf")))
    }

    fn describe_path(&self) -> String {
        self.path().map_or_else(|| "the configuration file".to_owned(), |path| path.display().to_string())
    }
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct File {
    contexts: Contexts,
    #[serde(rename = "default-principal")]
    default_principal: String,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Contexts {
    principals: BTreeMap<String, Entry>,
    agents: BTreeMap<String, Entry>,
}

#[derive(Deserialize)]
struct Entry {
    #[serde(rename = "kube-context")]
    kube_context: String,
    namespace: String,
}

pub(super) const DEFAULT_NAMESPACE: &str = "argocd";
