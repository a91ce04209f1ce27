//! The TLS material towards the principal: from files or Secrets, read again at every connection.

use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::SystemTime;

use agent_core::request::Outcome;
use http::Method;
use rustls::ClientConfig;
use serde::Deserialize;
use tracing::warn;

use crate::args::Options;
use crate::kube::client::Client;
use crate::kube::config;
use crate::tls::{self, Limits, Material};

/// Why there is no usable material.
#[derive(Debug)]
pub(crate) enum MaterialError {
    /// A person must change something.
    Wrong(String),
    /// The API server did not answer; later it may.
    Later(String),
}

impl MaterialError {
    /// What to say.
    pub(crate) fn into_text(self) -> String {
        match self {
            Self::Wrong(text) | Self::Later(text) => text,
        }
    }
}

/// Loads the material and keeps the last configuration made of it, TLS tickets included, for as long as it is the same.
#[derive(Clone)]
pub(crate) struct Loader {
    inner: Rc<Inner>,
}

struct Inner {
    source: Source,
    limits: Limits,
    kube: Client,
    last: RefCell<Option<(Material, Arc<ClientConfig>)>>,
}

struct Source {
    plaintext: bool,
    insecure: bool,
    namespace: String,
    root_ca_path: String,
    root_ca_secret: String,
    client_files: Option<(String, String)>,
    client_secret: String,
}

impl Loader {
    pub(crate) fn new(options: &Options, kube: Client) -> Self {
        let source = Source {
            plaintext: options.insecure_plaintext,
            insecure: options.insecure_tls,
            namespace: options.namespace.clone(),
            root_ca_path: options.root_ca_path.clone(),
            root_ca_secret: options.root_ca_secret_name.clone(),
            client_files: options.tls_client_files.clone(),
            client_secret: options.tls_secret_name.clone(),
        };
        let limits =
            Limits { min: options.tls_min, max: options.tls_max, suites: options.tls_ciphersuites.clone() };
        Self { inner: Rc::new(Inner { source, limits, kube, last: RefCell::default() }) }
    }

    /// The configuration for the next connection; `None` for plain text.
    pub(crate) async fn load(&self) -> Result<Option<Arc<ClientConfig>>, MaterialError> {
        if self.inner.source.plaintext {
            return Ok(None);
        }
        let material = match self.material().await {
            Ok(material) => material,
            Err(error) => {
                // A site whose API server is down can still talk to its hub.
                let last = self.inner.last.borrow();
                return match (&*last, &error) {
                    (Some((_, config)), MaterialError::Later(_)) => Ok(Some(Arc::clone(config))),
                    _ => Err(error),
                };
            }
        };
        if let Some((known, config)) = &*self.inner.last.borrow()
            && *known == material
        {
            return Ok(Some(Arc::clone(config)));
        }
        if let Some((chain, _)) = &material.client
            && let Some(problem) = tls::date_problem(chain, SystemTime::now())
        {
            warn!(
                problem,
                now = crate::log::timestamp(SystemTime::now()),
                "The client certificate's dates do not fit this machine's clock: set the clock, or renew the certificate"
            );
        }
        let config = tls::client_config(&material, &self.inner.limits, &[b"h2"])
            .map_err(|error| MaterialError::Wrong(self.locate(&error)))?;
        *self.inner.last.borrow_mut() = Some((material, Arc::clone(&config)));
        Ok(Some(config))
    }

    async fn material(&self) -> Result<Material, MaterialError> {
        let source = &self.inner.source;
        let file = |path: &str| config::read(Path::new(path)).map_err(MaterialError::Wrong);
        let roots = if source.insecure {
            None
        } else if source.root_ca_path.is_empty() {
            Some(self.ca_secret().await?)
        } else {
            Some(file(&source.root_ca_path)?)
        };
        let client = match &source.client_files {
            Some((chain, key)) => (file(chain)?, file(key)?),
            None => self.client_secret().await?,
        };
        Ok(Material { roots, client: Some(client) })
    }

    /// Every field must hold certificates: a Secret with a key in it is not meant for this.
    async fn ca_secret(&self) -> Result<Vec<u8>, MaterialError> {
        let name = &self.inner.source.root_ca_secret;
        let secret = self.secret(name, "--root-ca-secret-name").await?;
        let mut pem = Vec::new();
        for (field, content) in &secret.data {
            tls::certificates(content)
                .map_err(|error| MaterialError::Wrong(format!("Secret {name}: field {field}: {error}")))?;
            pem.extend_from_slice(content);
            pem.push(b'\n');
        }
        if pem.is_empty() {
            return Err(MaterialError::Wrong(format!(
                "Secret {name} has no data: it must hold CA certificates"
            )));
        }
        Ok(pem)
    }

    async fn client_secret(&self) -> Result<(Vec<u8>, Vec<u8>), MaterialError> {
        let name = &self.inner.source.client_secret;
        let mut secret = self.secret(name, "--tls-secret-name").await?;
        if secret.kind != "kubernetes.io/tls" {
            return Err(MaterialError::Wrong(format!(
                "Secret {name} is of type {:?}, not kubernetes.io/tls",
                secret.kind
            )));
        }
        let mut field = |field: &str| {
            secret
                .data
                .remove(field)
                .ok_or_else(|| MaterialError::Wrong(format!("Secret {name} has no field {field}")))
        };
        Ok((field("tls.crt")?, field("tls.key")?))
    }

    async fn secret(&self, name: &str, flag: &str) -> Result<Secret, MaterialError> {
        let namespace = &self.inner.source.namespace;
        if !agent_core::request::is_dns_subdomain(name) {
            return Err(MaterialError::Wrong(format!("{flag} {name:?} is not the name of a Secret")));
        }
        let path = format!("/api/v1/namespaces/{namespace}/secrets/{name}");
        let place = format!("Secret {name} in namespace {namespace} ({flag})");
        match self.inner.kube.call(Method::GET, &path, None, Vec::new()).await {
            Outcome::Done(body) => {
                Secret::parse(&body).map_err(|error| MaterialError::Wrong(format!("{place}: {error}")))
            }
            Outcome::Status(status) => {
                let text = format!("cannot read {place}: {} {}", status.code, status.message);
                Err(match status.code {
                    404 => MaterialError::Wrong(format!("{text}; create it, or name another one or a file")),
                    401 | 403 => {
                        MaterialError::Wrong(format!("{text}; the agent's Role must allow get on Secrets"))
                    }
                    _ => MaterialError::Later(text),
                })
            }
            Outcome::Unknown(reason) => Err(MaterialError::Later(format!("cannot read {place}: {reason}"))),
        }
    }

    /// Says where a wrong piece came from.
    fn locate(&self, error: &str) -> String {
        let source = &self.inner.source;
        let place = if error.starts_with("CA") {
            match &*source.root_ca_path {
                "" => format!(" (Secret {})", source.root_ca_secret),
                path => format!(" ({path})"),
            }
        } else if error.starts_with("client") {
            match &source.client_files {
                None => format!(" (Secret {})", source.client_secret),
                Some((chain, key)) => format!(" ({chain}, {key})"),
            }
        } else {
            String::new()
        };
        format!("{error}{place}")
    }
}

/// The parts of a Secret that matter here. No `Debug`: it holds keys.
struct Secret {
    kind: String,
    data: BTreeMap<String, Vec<u8>>,
}

impl Secret {
    fn parse(body: &[u8]) -> Result<Self, String> {
        #[derive(Deserialize)]
        struct Raw<'a> {
            #[serde(borrow, default)]
            r#type: Cow<'a, str>,
            #[serde(borrow)]
            data: Option<BTreeMap<Cow<'a, str>, Cow<'a, str>>>,
        }
        let raw: Raw<'_> = serde_json::from_slice(body).map_err(|_| "it is no Secret".to_owned())?;
        let mut data = BTreeMap::new();
        for (field, text) in raw.data.unwrap_or_default() {
            let content = config::base64(&text).ok_or_else(|| format!("field {field} is not base64"))?;
            data.insert(field.into_owned(), content);
        }
        Ok(Self { kind: raw.r#type.into_owned(), data })
    }
}
