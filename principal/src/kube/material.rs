//! What the principal reads once at start: keys, certificates, its identity, the blocklist.

use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::api::{Api, ObjectMeta, PostParams};
use kube::{Client, Error};

use super::call::explain_client;
use crate::options::Options;
use crate::tls::ServerPair;

/// The principal's namespace and the client that reads it.
#[derive(Clone)]
pub struct Material {
    client: Client,
    namespace: String,
}

impl Material {
    /// Of one namespace.
    pub fn new(client: Client, namespace: &str) -> Self {
        Self { client, namespace: namespace.to_owned() }
    }

    /// Certificate and key of the gRPC listener: generated, from files, or from the Secret.
    pub async fn server_pair(&self, options: &Options) -> Result<ServerPair, String> {
        if options.insecure_tls_generate {
            let pair = crate::pki::throw_away_server()?;
            let (certificate, key) = (pair.certificate.into_bytes(), pair.key.into_bytes());
            return Ok(ServerPair { origin: "generated certificate".to_owned(), certificate, key });
        }
        if !options.tls_cert.is_empty() {
            return Ok(ServerPair {
                origin: format!("{} and {}", options.tls_cert, options.tls_key),
                certificate: read_file(&options.tls_cert, "--tls-cert")?,
                key: read_file(&options.tls_key, "--tls-key")?,
            });
        }
        let hint =
            "create it with \"argocd-agentctl pki issue principal\", or name another with --tls-secret-name";
        let (named, secret) = self.secret(&options.tls_secret_name, hint).await?;
        if secret.type_.as_deref() != Some("kubernetes.io/tls") {
            return Err(format!("{named} is not of type kubernetes.io/tls"));
        }
        Ok(ServerPair {
            certificate: field(&secret, &named, "tls.crt")?,
            key: field(&secret, &named, "tls.key")?,
            origin: named,
        })
    }

    /// The CA of the agents' certificates, and where it comes from.
    pub async fn client_ca(&self, options: &Options) -> Result<(String, Vec<Vec<u8>>), String> {
        if !options.root_ca_path.is_empty() {
            return Ok((
                options.root_ca_path.clone(),
                vec![read_file(&options.root_ca_path, "--root-ca-path")?],
            ));
        }
        let hint = "create it with \"argocd-agentctl pki init\", or name another with --tls-ca-secret-name";
        let (named, secret) = self.secret(&options.tls_ca_secret_name, hint).await?;
        // Either field, or both.
        let texts: Vec<Vec<u8>> =
            ["tls.crt", "ca.crt"].iter().filter_map(|key| field(&secret, &named, key).ok()).collect();
        if texts.is_empty() {
            return Err(format!("{named} has neither tls.crt nor ca.crt"));
        }
        Ok((named, texts))
    }

    /// PEM of the key that signs tokens, and where it comes from.
    pub async fn jwt_key(&self, options: &Options) -> Result<(String, String), String> {
        let (origin, bytes) = if !options.jwt_key.is_empty() {
            (options.jwt_key.clone(), read_file(&options.jwt_key, "--jwt-key")?)
        } else if options.insecure_jwt_generate {
            ("generated key".to_owned(), crate::pki::rsa_key(crate::pki::RsaBits::B2048)?.into_bytes())
        } else {
            let hint =
                "create it with \"argocd-agentctl jwt create-key\", or name another with --jwt-secret-name";
            let (named, secret) = self.secret(&options.jwt_secret_name, hint).await?;
            let bytes = field(&secret, &named, "jwt.key")?;
            (named, bytes)
        };
        let text = String::from_utf8(bytes).map_err(|_| format!("{origin}: jwt.key is not text"))?;
        Ok((origin, text))
    }

    /// The principal's identity, which outlives its process; made at the first start.
    pub async fn identity(&self) -> Result<String, String> {
        let api = Api::<ConfigMap>::namespaced(self.client.clone(), &self.namespace);
        let named = format!("configmap {}/{IDENTITY}", self.namespace);
        // Twice: another principal may create it between our read and our create.
        for _ in 0..2 {
            let read = api.get_opt(IDENTITY).await;
            match read.map_err(|error| format!("reading {named}: {}", explain_client(&error)))? {
                Some(map) => {
                    let uid = map.data.and_then(|data| data.get(IDENTITY_KEY).cloned()).unwrap_or_default();
                    return if uid.is_empty() {
                        Err(format!(
                            "{named} has no {IDENTITY_KEY}: delete it to give the principal a new identity"
                        ))
                    } else {
                        Ok(uid)
                    };
                }
                None => {
                    let uid = crate::clock::uuid();
                    let map = ConfigMap {
                        metadata: ObjectMeta { name: Some(IDENTITY.to_owned()), ..Default::default() },
                        data: Some([(IDENTITY_KEY.to_owned(), uid.clone())].into()),
                        ..Default::default()
                    };
                    match api.create(&PostParams::default(), &map).await {
                        Ok(_) => return Ok(uid),
                        Err(Error::Api(status)) if status.is_already_exists() => {}
                        Err(error) => return Err(format!("creating {named}: {}", explain_client(&error))),
                    }
                }
            }
        }
        Err(format!("{named} comes and goes: who deletes it?"))
    }

    /// Fingerprints of the client certificates that are refused. No ConfigMap: none.
    pub async fn blocklist(&self) -> Result<Vec<String>, String> {
        let api = Api::<ConfigMap>::namespaced(self.client.clone(), &self.namespace);
        let map = api.get_opt(BLOCKLIST).await.map_err(|error| {
            format!("reading configmap {}/{BLOCKLIST}: {}", self.namespace, explain_client(&error))
        })?;
        Ok(map.and_then(|map| map.data).map(|data| data.into_keys().collect()).unwrap_or_default())
    }

    async fn secret(&self, name: &str, hint: &str) -> Result<(String, Secret), String> {
        let named = format!("secret {}/{name}", self.namespace);
        if name.is_empty() {
            return Err(format!("{named}: the name is empty: {hint}"));
        }
        let read = Api::<Secret>::namespaced(self.client.clone(), &self.namespace).get_opt(name).await;
        let secret = read.map_err(|error| format!("reading {named}: {}", explain_client(&error)))?;
        secret.map(|secret| (named.clone(), secret)).ok_or_else(|| format!("{named} not found: {hint}"))
    }
}

fn field(secret: &Secret, named: &str, key: &str) -> Result<Vec<u8>, String> {
    secret
        .data
        .as_ref()
        .and_then(|data| data.get(key))
        .map(|value| value.0.clone())
        .ok_or_else(|| format!("{named} has no field {key}"))
}

fn read_file(path: &str, flag: &str) -> Result<Vec<u8>, String> {
    std::fs::read(path).map_err(|error| format!("{flag} {path}: {error}"))
}

const IDENTITY: &str = "argocd-agent-principal-identity";
const IDENTITY_KEY: &str = "principal-uid";
const BLOCKLIST: &str = "argocd-agent-tls-blocklist";
