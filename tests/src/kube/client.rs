//! A plain client for API servers, embedded or real: no retries, no opinions, for tests and instruments.

use std::io;
use std::sync::Arc;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use serde_json::Value;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::Resource;

/// Where an API server is and who the client is.
#[derive(Clone, Debug, Default)]
pub struct KubeTarget {
    /// `http://host:port` or `https://host:port`.
    pub base_url: String,
    pub token: Option<String>,
    /// PEM; needed for `https`.
    pub ca: Option<String>,
    /// Certificate chain and key, PEM.
    pub identity: Option<(String, String)>,
}

/// An answer.
#[derive(Clone, Debug)]
pub struct Answer {
    pub code: u16,
    pub body: Bytes,
}

impl Answer {
    /// The body as JSON; `Null` when it is none.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }

    /// The object, or what the API server said instead.
    pub fn object(self) -> Result<Value, String> {
        if self.code < 300 { Ok(self.json()) } else { Err(self.to_string()) }
    }
}

impl core::fmt::Display for Answer {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let json = self.json();
        let text = json["message"].as_str().map_or_else(|| String::from_utf8_lossy(&self.body), Into::into);
        write!(f, "{}: {text}", self.code)
    }
}

/// The lines of an open watch.
#[derive(Debug)]
pub struct Lines {
    body: Incoming,
    buffer: Vec<u8>,
}

impl Lines {
    /// The next event; `None` when the watch has ended.
    pub async fn next(&mut self) -> io::Result<Option<Value>> {
        loop {
            if let Some(end) = self.buffer.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.buffer.drain(..=end).collect();
                return serde_json::from_slice(&line).map(Some).map_err(io::Error::other);
            }
            match self.body.frame().await {
                None => return Ok(None),
                Some(Err(error)) => return Err(io::Error::other(error)),
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        self.buffer.extend_from_slice(&data);
                    }
                }
            }
        }
    }
}

/// The path of a collection, or of an object when `name` is not empty.
pub fn path(resource: Resource, namespace: &str, name: &str) -> String {
    let definition = resource.definition();
    let mut path = match definition.group {
        "" => format!("/api/{}", definition.version),
        group => format!("/apis/{group}/{}", definition.version),
    };
    if definition.namespaced && !namespace.is_empty() {
        path.push_str("/namespaces/");
        path.push_str(namespace);
    }
    path.push('/');
    path.push_str(definition.plural);
    if !name.is_empty() {
        path.push('/');
        path.push_str(name);
    }
    path
}

impl KubeTarget {
    /// A client with a token or none.
    pub fn new(base_url: impl Into<String>, token: Option<&str>, ca: Option<&str>) -> Self {
        Self {
            base_url: base_url.into(),
            token: token.map(str::to_owned),
            ca: ca.map(str::to_owned),
            identity: None,
        }
    }

    /// One request, on a connection of its own. An empty content type sends none.
    pub async fn request(
        &self,
        method: Method,
        path_and_query: &str,
        content_type: &str,
        body: impl Into<Bytes>,
    ) -> io::Result<Answer> {
        let response = self.send(method, path_and_query, content_type, body.into()).await?;
        let code = response.status().as_u16();
        let body = response.into_body().collect().await.map_err(io::Error::other)?.to_bytes();
        Ok(Answer { code, body })
    }

    /// Opens a watch; an error answer comes back as `Err` text.
    pub async fn lines(&self, path_and_query: &str) -> io::Result<Lines> {
        let response = self.send(Method::GET, path_and_query, "", Bytes::new()).await?;
        let code = response.status().as_u16();
        if code == 200 {
            return Ok(Lines { body: response.into_body(), buffer: Vec::new() });
        }
        let body = response.into_body().collect().await.map_err(io::Error::other)?.to_bytes();
        Err(io::Error::other(Answer { code, body }.to_string()))
    }

    pub async fn get(&self, resource: Resource, namespace: &str, name: &str) -> io::Result<Answer> {
        self.request(Method::GET, &path(resource, namespace, name), "", "").await
    }

    pub async fn create(&self, resource: Resource, namespace: &str, object: &Value) -> io::Result<Answer> {
        self.request(Method::POST, &path(resource, namespace, ""), JSON, object.to_string()).await
    }

    pub async fn merge_patch(
        &self,
        resource: Resource,
        namespace: &str,
        name: &str,
        patch: &Value,
    ) -> io::Result<Answer> {
        self.request(Method::PATCH, &path(resource, namespace, name), MERGE_PATCH, patch.to_string()).await
    }

    pub async fn delete(&self, resource: Resource, namespace: &str, name: &str) -> io::Result<Answer> {
        self.request(Method::DELETE, &path(resource, namespace, name), "", "").await
    }

    async fn send(
        &self,
        method: Method,
        path_and_query: &str,
        content_type: &str,
        body: Bytes,
    ) -> io::Result<Response<Incoming>> {
        let (secure, authority) = match self.base_url.split_once("://") {
            Some(("https", authority)) => (true, authority.trim_end_matches('/')),
            Some(("http", authority)) => (false, authority.trim_end_matches('/')),
            _ => {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidInput,
                    format!("not a URL: {}", self.base_url),
                ));
            }
        };
        let mut request = Request::builder().method(method).uri(path_and_query).header("host", authority);
        if let Some(token) = &self.token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        if !content_type.is_empty() {
            request = request.header("content-type", content_type);
        }
        let request = request.header("accept", JSON).body(Full::new(body)).map_err(io::Error::other)?;
        let stream = TcpStream::connect(authority).await?;
        stream.set_nodelay(true)?;
        if !secure {
            return exchange(stream, request).await;
        }
        let host = authority.rsplit_once(':').map_or(authority, |(host, _)| host);
        let host = host.trim_matches(['[', ']']).to_owned();
        let name = ServerName::try_from(host).map_err(io::Error::other)?;
        let connector = TlsConnector::from(Arc::new(self.tls()?));
        exchange(connector.connect(name, stream).await?, request).await
    }

    fn tls(&self) -> io::Result<rustls::ClientConfig> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut roots = rustls::RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(self.ca.as_deref().unwrap_or_default().as_bytes()) {
            roots.add(certificate.map_err(io::Error::other)?).map_err(io::Error::other)?;
        }
        let builder = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(io::Error::other)?
            .with_root_certificates(roots);
        match &self.identity {
            None => Ok(builder.with_no_client_auth()),
            Some((certificate, key)) => {
                let chain = CertificateDer::pem_slice_iter(certificate.as_bytes())
                    .collect::<Result<Vec<_>, _>>()
                    .map_err(io::Error::other)?;
                let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).map_err(io::Error::other)?;
                builder.with_client_auth_cert(chain, key).map_err(io::Error::other)
            }
        }
    }
}

async fn exchange(
    stream: impl tokio::io::AsyncRead + tokio::io::AsyncWrite + Send + Unpin + 'static,
    request: Request<Full<Bytes>>,
) -> io::Result<Response<Incoming>> {
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(io::Error::other)?;
    // Ends with the response's body; its error is the request's error.
    tokio::spawn(connection);
    sender.send_request(request).await.map_err(io::Error::other)
}

pub const JSON: &str = "application/json";
pub const JSON_PATCH: &str = "application/json-patch+json";
pub const MERGE_PATCH: &str = "application/merge-patch+json";
