//! A small blocking Kubernetes client for the rigs: JSON in, JSON out, no caching, no retries.

use std::fmt;
use std::io::{BufRead, BufReader};
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use ureq::http;
use ureq::tls::{Certificate, ClientCert, PrivateKey, RootCerts, TlsConfig, TlsProvider};

/// One API server seen as one user.
#[derive(Clone, Debug)]
pub struct Kube {
    url: String,
    token: Option<String>,
    agent: ureq::Agent,
}

/// Why a call failed: the server said no, or there was no answer.
#[derive(Debug)]
pub enum KubeError {
    Status { code: u16, message: String },
    Transport(String),
}

impl Kube {
    /// `ca` is PEM; `None` leaves the server unverified (only for a user's own cluster that says so).
    pub fn new(
        url: &str,
        ca: Option<&str>,
        token: Option<&str>,
        client: Option<(&str, &str)>,
    ) -> Result<Self, KubeError> {
        let transport = |error: &dyn fmt::Display| KubeError::Transport(format!("{url}: {error}"));
        let mut tls = TlsConfig::builder()
            .provider(TlsProvider::Rustls)
            .unversioned_rustls_crypto_provider(Arc::new(rustls::crypto::ring::default_provider()));
        tls = match ca {
            Some(pem) => {
                let certificate = Certificate::from_pem(pem.as_bytes()).map_err(|e| transport(&e))?;
                tls.root_certs(RootCerts::Specific(Arc::new(vec![certificate])))
            }
            None => tls.disable_verification(true),
        };
        if let Some((certificate, key)) = client {
            let certificate = Certificate::from_pem(certificate.as_bytes()).map_err(|e| transport(&e))?;
            let key = PrivateKey::from_pem(key.as_bytes()).map_err(|e| transport(&e))?;
            tls = tls.client_cert(Some(ClientCert::new_with_certs(&[certificate], key)));
        }
        let agent = ureq::Agent::config_builder()
            .tls_config(tls.build())
            .http_status_as_error(false)
            .timeout_connect(Some(Duration::from_secs(5)))
            .timeout_recv_response(Some(Duration::from_secs(20)))
            // One connection for each of the writers of a load, and no more.
            .max_idle_connections_per_host(16)
            .proxy(None)
            .user_agent("argocd-agent-harness")
            .build()
            .into();
        Ok(Self { url: url.trim_end_matches('/').to_owned(), token: token.map(str::to_owned), agent })
    }

    pub fn url(&self) -> &str {
        &self.url
    }

    /// The same server as another user.
    pub fn with_token(&self, token: &str) -> Self {
        Self { token: Some(token.to_owned()), ..self.clone() }
    }

    pub fn get(&self, path: &str) -> Result<Value, KubeError> {
        self.call("GET", path, None)
    }

    /// `None` when the server says 404.
    pub fn get_opt(&self, path: &str) -> Result<Option<Value>, KubeError> {
        match self.get(path) {
            Ok(value) => Ok(Some(value)),
            Err(KubeError::Status { code: 404, .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    pub fn get_text(&self, path: &str) -> Result<String, KubeError> {
        let body = self.send("GET", path, None)?;
        Ok(String::from_utf8_lossy(&body).into_owned())
    }

    pub fn create(&self, path: &str, object: &Value) -> Result<Value, KubeError> {
        self.call("POST", path, Some(("application/json", object.to_string().as_bytes())))
    }

    /// The API server reads YAML itself, so no parser is needed here.
    pub fn create_yaml(&self, path: &str, yaml: &str) -> Result<Value, KubeError> {
        self.call("POST", path, Some(("application/yaml", yaml.as_bytes())))
    }

    /// Creates, and is content with an object that is there already.
    pub fn ensure(&self, path: &str, object: &Value) -> Result<(), KubeError> {
        match self.create(path, object) {
            Ok(_) | Err(KubeError::Status { code: 409, .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    pub fn replace(&self, path: &str, object: &Value) -> Result<Value, KubeError> {
        self.call("PUT", path, Some(("application/json", object.to_string().as_bytes())))
    }

    pub fn merge_patch(&self, path: &str, patch: &Value) -> Result<Value, KubeError> {
        self.call("PATCH", path, Some(("application/merge-patch+json", patch.to_string().as_bytes())))
    }

    pub fn json_patch(&self, path: &str, patch: &Value) -> Result<Value, KubeError> {
        self.call("PATCH", path, Some(("application/json-patch+json", patch.to_string().as_bytes())))
    }

    pub fn delete(&self, path: &str) -> Result<Value, KubeError> {
        self.call("DELETE", path, None)
    }

    /// Events from `resource_version` on; the iterator ends with the connection.
    pub fn watch(&self, path: &str, resource_version: &str) -> Result<Watch, KubeError> {
        let separator = if path.contains('?') { '&' } else { '?' };
        let path = format!(
            "{path}{separator}watch=true&allowWatchBookmarks=true&resourceVersion={resource_version}"
        );
        let response = self.respond("GET", &path, None)?;
        let body = response.into_body();
        Ok(Watch { lines: Box::new(BufReader::new(body.into_reader())), line: String::new() })
    }

    fn call(&self, method: &str, path: &str, body: Option<(&str, &[u8])>) -> Result<Value, KubeError> {
        let bytes = self.send(method, path, body)?;
        serde_json::from_slice(&bytes)
            .map_err(|error| KubeError::Transport(format!("{method} {path}: answer is not JSON: {error}")))
    }

    fn send(&self, method: &str, path: &str, body: Option<(&str, &[u8])>) -> Result<Vec<u8>, KubeError> {
        let mut response = self.respond(method, path, body)?;
        let limit = 256 * 1024 * 1024;
        response
            .body_mut()
            .with_config()
            .limit(limit)
            .read_to_vec()
            .map_err(|error| KubeError::Transport(format!("{method} {path}: {error}")))
    }

    fn respond(
        &self,
        method: &str,
        path: &str,
        body: Option<(&str, &[u8])>,
    ) -> Result<http::Response<ureq::Body>, KubeError> {
        let transport = |error: &dyn fmt::Display| KubeError::Transport(format!("{method} {path}: {error}"));
        let mut request = http::Request::builder().method(method).uri(format!("{}{path}", self.url));
        if let Some(token) = &self.token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        let result = match body {
            Some((content_type, bytes)) => {
                let request = request.header("content-type", content_type).body(bytes);
                self.agent.run(request.map_err(|e| transport(&e))?)
            }
            None => self.agent.run(request.body(()).map_err(|e| transport(&e))?),
        };
        let mut response = result.map_err(|e| transport(&e))?;
        let code = response.status().as_u16();
        if (200..300).contains(&code) {
            return Ok(response);
        }
        let text = response.body_mut().read_to_string().unwrap_or_default();
        let message = serde_json::from_str::<Value>(&text)
            .ok()
            .and_then(|status| status["message"].as_str().map(str::to_owned))
            .unwrap_or(text);
        Err(KubeError::Status { code, message: format!("{method} {path}: {message}") })
    }
}

/// One watch connection.
pub struct Watch {
    lines: Box<dyn BufRead + Send>,
    line: String,
}

impl Iterator for Watch {
    type Item = Value;

    fn next(&mut self) -> Option<Value> {
        self.line.clear();
        match self.lines.read_line(&mut self.line) {
            Ok(0) | Err(_) => None,
            Ok(_) => serde_json::from_str(&self.line).ok(),
        }
    }
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Watch")
    }
}

impl KubeError {
    pub fn code(&self) -> Option<u16> {
        match self {
            Self::Status { code, .. } => Some(*code),
            Self::Transport(_) => None,
        }
    }
}

impl fmt::Display for KubeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Status { code, message } => write!(f, "{message} (status {code})"),
            Self::Transport(message) => f.write_str(message),
        }
    }
}

impl std::error::Error for KubeError {}

impl From<KubeError> for String {
    fn from(error: KubeError) -> Self {
        error.to_string()
    }
}
