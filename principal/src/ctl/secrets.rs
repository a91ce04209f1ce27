//! Reading and writing the Secrets of the tool.

use std::collections::BTreeMap;

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::api::{Api, ObjectMeta, PostParams};

use super::config::Place;
use crate::kube::call::explain_client;
use crate::pki::Authority;

/// What happened to a Secret that was to be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Written {
    Created,
    Updated,
}

impl Written {
    pub(super) fn word(self) -> &'static str {
        match self {
            Self::Created => "created",
            Self::Updated => "updated",
        }
    }
}

impl Place {
    pub(super) fn secrets(&self) -> Api<Secret> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// A Secret of this place, or of `namespace`.
    pub(super) async fn read(&self, namespace: &str, name: &str) -> Result<Option<Secret>, String> {
        Api::<Secret>::namespaced(self.client.clone(), namespace)
            .get_opt(name)
            .await
            .map_err(|error| format!("reading secret {namespace}/{name}: {}", explain_client(&error)))
    }

    /// Creates `secret`; where it exists, replaces it if `replace`, else says which flag would.
    pub(super) async fn write(
        &self,
        mut secret: Secret,
        replace: bool,
        flag: &str,
    ) -> Result<Written, String> {
        let api = self.secrets();
        let name = secret.metadata.name.clone().unwrap_or_default();
        let named = format!("{}/{name}", self.namespace);
        match api.create(&PostParams::default(), &secret).await {
            Ok(_) => return Ok(Written::Created),
            Err(kube::Error::Api(status)) if status.is_already_exists() => {}
            Err(error) => return Err(format!("creating secret {named}: {}", explain_client(&error))),
        }
        if !replace {
            return Err(if flag.is_empty() {
                format!("secret {named} exists already")
            } else {
                format!("secret {named} exists already: use {flag} to replace it")
            });
        }
        let existing = self.read(&self.namespace, &name).await?;
        secret.metadata.resource_version = existing.and_then(|existing| existing.metadata.resource_version);
        api.replace(&name, &PostParams::default(), &secret)
            .await
            .map(|_| Written::Updated)
            .map_err(|error| format!("updating secret {named}: {}", explain_client(&error)))
    }

    /// The signing CA.
    pub(super) async fn authority(&self) -> Result<Authority, String> {
        let named = format!("{}/{CA_SECRET}", self.namespace);
        let secret = self
            .read(&self.namespace, CA_SECRET)
            .await?
            .ok_or_else(|| format!("secret {named} not found: create the CA with \"pki init\""))?;
        if secret.type_.as_deref() != Some(TLS_TYPE) {
            return Err(format!("secret {named} is not of type {TLS_TYPE}"));
        }
        let certificate = field(&secret, &named, "tls.crt")?;
        let key = field(&secret, &named, "tls.key")?;
        Authority::from_pem(&certificate, &key).map_err(|error| format!("secret {named}: {error}"))
    }
}

/// A text field of a Secret.
pub(super) fn field(secret: &Secret, named: &str, key: &str) -> Result<String, String> {
    let value = secret
        .data
        .as_ref()
        .and_then(|data| data.get(key))
        .ok_or_else(|| format!("secret {named} has no field {key}"))?;
    String::from_utf8(value.0.clone()).map_err(|_| format!("secret {named}: field {key} is not text"))
}

/// A Secret as the tool writes them: no labels or annotations.
pub(super) fn secret(name: &str, kind: &str, data: &[(&str, &str)]) -> Secret {
    Secret {
        metadata: ObjectMeta { name: Some(name.to_owned()), ..Default::default() },
        type_: Some(kind.to_owned()),
        data: Some(bytes(data)),
        ..Default::default()
    }
}

pub(super) fn bytes(data: &[(&str, &str)]) -> BTreeMap<String, ByteString> {
    data.iter().map(|(key, value)| ((*key).to_owned(), ByteString(value.as_bytes().to_vec()))).collect()
}

pub(super) const TLS_TYPE: &str = "kubernetes.io/tls";
pub(super) const OPAQUE_TYPE: &str = "Opaque";
pub(super) const CA_SECRET: &str = "argocd-agent-ca";
