//! Requests to the API server over HTTP/1.1, each on a connection of its own from a small pool.

use std::cell::RefCell;
use std::fmt::Write as _;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use agent_core::informer::parse_status;
use agent_core::request::{Outcome, Request, Status, Verb};
use bytes::Bytes;
use http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HOST, RETRY_AFTER, USER_AGENT};
use http::{HeaderValue, Method, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::{SendRequest, handshake};
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::{Instant, timeout};
use tokio_rustls::TlsConnector;

use super::config::{Config, Token};
use crate::io::Io;
use crate::net;
use crate::tls::{self, Limits};

/// A handle; clones share the pool.
#[derive(Clone)]
pub(crate) struct Client {
    inner: Rc<Inner>,
}

struct Inner {
    config: Config,
    tls: Option<Arc<ClientConfig>>,
    host: HeaderValue,
    user_agent: HeaderValue,
    idle: RefCell<Vec<SendRequest<Full<Bytes>>>>,
    token: RefCell<CachedToken>,
}

#[derive(Default)]
struct CachedToken {
    value: Option<HeaderValue>,
    read: Option<Instant>,
}

/// A request that got no answer.
#[derive(Debug)]
pub(crate) struct NoAnswer(pub(crate) String);

/// An answer's body, and the connection to give back when it was read to the end.
pub(crate) struct Body {
    incoming: Incoming,
    connection: Option<SendRequest<Full<Bytes>>>,
    client: Client,
}

impl Client {
    /// A client; nothing is connected yet.
    pub(crate) fn new(config: Config, user_agent: &str) -> Result<Self, String> {
        let tls = config
            .tls
            .as_ref()
            .map(|material| tls::client_config(material, &Limits::none(), &[b"http/1.1"]))
            .transpose()?;
        let host = HeaderValue::try_from(format!("{}:{}", config.host, config.port))
            .map_err(|_| format!("the API server's host {:?} is no host", config.host))?;
        let user_agent = HeaderValue::try_from(user_agent).map_err(|_| "User-Agent".to_owned())?;
        let inner =
            Inner { config, tls, host, user_agent, idle: RefCell::default(), token: RefCell::default() };
        Ok(Self { inner: Rc::new(inner) })
    }

    /// `host:port`, for log lines.
    pub(crate) fn address(&self) -> &str {
        self.inner.host.to_str().unwrap_or_default()
    }

    /// Sends a request and waits for the head of the answer.
    pub(crate) async fn send(
        &self,
        method: Method,
        path: &str,
        content_type: Option<&'static str>,
        body: Vec<u8>,
    ) -> Result<(StatusCode, Option<Duration>, Body), NoAnswer> {
        let body = Bytes::from(body);
        loop {
            let (mut connection, reused) = match self.take_idle() {
                Some(connection) => (connection, true),
                None => (self.connect().await?, false),
            };
            let request = self.request(&method, path, content_type, body.clone())?;
            match connection.try_send_request(request).await {
                Ok(response) => {
                    let status = response.status();
                    if status == StatusCode::UNAUTHORIZED {
                        // The token may have been replaced: read it before the next request.
                        *self.inner.token.borrow_mut() = CachedToken::default();
                    }
                    let retry_after = response
                        .headers()
                        .get(RETRY_AFTER)
                        .and_then(|value| value.to_str().ok()?.parse().ok())
                        .map(Duration::from_secs);
                    let incoming = response.into_body();
                    let body = Body { incoming, connection: Some(connection), client: self.clone() };
                    return Ok((status, retry_after, body));
                }
                Err(mut error) => {
                    // With the message in hand, nothing was sent: the server had closed an idle connection.
                    if !reused || error.take_message().is_none() {
                        return Err(NoAnswer(text(error.error())));
                    }
                }
            }
        }
    }

    /// A request with a short answer: complete, or `Unknown` after a time limit.
    pub(crate) async fn call(
        &self,
        method: Method,
        path: &str,
        content_type: Option<&'static str>,
        body: Vec<u8>,
    ) -> Outcome {
        let call = async {
            let (status, retry_after, body) = self.send(method, path, content_type, body).await?;
            let bytes = body.collect(MAX_BODY).await?;
            Ok::<_, NoAnswer>(if status.is_success() {
                Outcome::Done(bytes)
            } else {
                Outcome::Status(status_of(status, retry_after, &bytes))
            })
        };
        match timeout(CALL_LIMIT, call).await {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(NoAnswer(reason))) => Outcome::Unknown(reason),
            Err(_) => Outcome::Unknown(format!("no answer within {} s", CALL_LIMIT.as_secs())),
        }
    }

    /// Carries out a request of the core.
    pub(crate) async fn execute(&self, request: Request) -> Outcome {
        let Request { key, verb, .. } = request;
        match verb {
            Verb::Get => self.call(Method::GET, &key.path(), None, Vec::new()).await,
            Verb::Create(object) => {
                let path = format!("{}?fieldManager={FIELD_MANAGER}", key.collection_path());
                self.call(Method::POST, &path, Some(JSON), object).await
            }
            Verb::JsonPatch(patch) => {
                let path = format!("{}?fieldManager={FIELD_MANAGER}", key.path());
                self.call(Method::PATCH, &path, Some("application/json-patch+json"), patch).await
            }
            Verb::Delete { uid } => {
                self.call(Method::DELETE, &key.path(), Some(JSON), Verb::delete_options(&uid)).await
            }
        }
    }

    fn request(
        &self,
        method: &Method,
        path: &str,
        content_type: Option<&'static str>,
        body: Bytes,
    ) -> Result<http::Request<Full<Bytes>>, NoAnswer> {
        let mut uri = String::with_capacity(self.inner.config.prefix.len() + path.len());
        let _ = write!(uri, "{}{path}", self.inner.config.prefix);
        let mut request = http::Request::new(Full::new(body));
        *request.method_mut() = method.clone();
        *request.uri_mut() = uri.try_into().map_err(|_| NoAnswer(format!("{path:?} is no path")))?;
        let headers = request.headers_mut();
        headers.insert(HOST, self.inner.host.clone());
        headers.insert(USER_AGENT, self.inner.user_agent.clone());
        headers.insert(ACCEPT, HeaderValue::from_static(JSON));
        if let Some(content_type) = content_type {
            headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
        }
        if let Some(token) = self.authorization()? {
            headers.insert(AUTHORIZATION, token);
        }
        Ok(request)
    }

    fn authorization(&self) -> Result<Option<HeaderValue>, NoAnswer> {
        let mut cached = self.inner.token.borrow_mut();
        let text = match &self.inner.config.token {
            Token::None => return Ok(None),
            _ if cached.value.is_some() && cached.read.is_some_and(|read| read.elapsed() < TOKEN_AGE) => {
                return Ok(cached.value.clone());
            }
            Token::Fixed(token) => token.clone(),
            Token::File(path) => match std::fs::read_to_string(path) {
                Ok(token) => token,
                // Between two versions of a mounted file: the old one may still do.
                Err(_) if cached.value.is_some() => return Ok(cached.value.clone()),
                Err(error) => {
                    return Err(NoAnswer(format!("cannot read the token {}: {error}", path.display())));
                }
            },
        };
        let mut value = HeaderValue::try_from(format!("Bearer {}", text.trim()))
            .map_err(|_| NoAnswer("the token has characters that no token has".into()))?;
        value.set_sensitive(true);
        *cached = CachedToken { value: Some(value.clone()), read: Some(Instant::now()) };
        Ok(Some(value))
    }

    fn take_idle(&self) -> Option<SendRequest<Full<Bytes>>> {
        let mut idle = self.inner.idle.borrow_mut();
        while let Some(connection) = idle.pop() {
            if connection.is_ready() {
                return Some(connection);
            }
        }
        None
    }

    fn give_back(&self, connection: SendRequest<Full<Bytes>>) {
        let mut idle = self.inner.idle.borrow_mut();
        idle.retain(|connection| !connection.is_closed());
        if idle.len() < MAX_IDLE && !connection.is_closed() {
            idle.push(connection);
        }
    }

    async fn connect(&self) -> Result<SendRequest<Full<Bytes>>, NoAnswer> {
        let Inner { config, tls, .. } = &*self.inner;
        let connect = async {
            let stream = net::connect(&config.host, config.port, &net::API_SERVER).await.map_err(NoAnswer)?;
            let Some(tls) = tls else { return drive(stream).await };
            let name = config.server_name.as_deref().unwrap_or(&config.host);
            let name = name.trim_matches(['[', ']']);
            let server_name = ServerName::try_from(name.to_owned())
                .map_err(|_| NoAnswer(format!("{name:?} is no host name")))?;
            let stream =
                TlsConnector::from(Arc::clone(tls)).connect(server_name, stream).await.map_err(|error| {
                    NoAnswer(format!("TLS with the API server: {}", net::tls_error(&error).0))
                })?;
            drive(stream).await
        };
        match timeout(CONNECT_LIMIT, connect).await {
            Ok(result) => result,
            Err(_) => Err(NoAnswer(format!("no connection to {} in time", self.address()))),
        }
    }
}

async fn drive(
    stream: impl AsyncRead + AsyncWrite + Unpin + 'static,
) -> Result<SendRequest<Full<Bytes>>, NoAnswer> {
    let (sender, connection) = handshake(Io::new(stream)).await.map_err(|error| NoAnswer(text(&error)))?;
    // Its errors reach the request that waits.
    tokio::task::spawn_local(async move {
        let _ = connection.await;
    });
    Ok(sender)
}

impl Body {
    /// The next bytes; `None` at the end, when the connection goes back to the pool.
    pub(crate) async fn chunk(&mut self) -> Result<Option<Bytes>, NoAnswer> {
        loop {
            match self.incoming.frame().await {
                None => {
                    if let Some(connection) = self.connection.take() {
                        self.client.give_back(connection);
                    }
                    return Ok(None);
                }
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        return Ok(Some(data));
                    }
                }
                Some(Err(error)) => return Err(NoAnswer(text(&error))),
            }
        }
    }

    /// The whole body, at most `limit` bytes.
    pub(crate) async fn collect(mut self, limit: usize) -> Result<Vec<u8>, NoAnswer> {
        let mut out = Vec::new();
        while let Some(chunk) = self.chunk().await? {
            if out.len() + chunk.len() > limit {
                return Err(NoAnswer(format!("an answer above {} KiB", limit >> 10)));
            }
            out.extend_from_slice(&chunk);
        }
        Ok(out)
    }
}

/// The `Status` of an answer that is not 2xx.
pub(crate) fn status_of(code: StatusCode, retry_after: Option<Duration>, body: &[u8]) -> Status {
    let mut status = parse_status(code.as_u16(), body);
    status.retry_after = retry_after.or(status.retry_after);
    if status.reason.is_empty() {
        status.reason = code.canonical_reason().unwrap_or_default().to_owned();
    }
    status
}

/// An error and its causes in one line.
fn text(error: &dyn std::error::Error) -> String {
    let mut out = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let _ = write!(out, ": {error}");
        cause = error.source();
    }
    out
}

const JSON: &str = "application/json";

/// docs/protocol.md: one manager for everything this agent writes.
const FIELD_MANAGER: &str = "argocd-agent";

/// The API server ends a request after a minute; on a loaded site half of that is long.
const CALL_LIMIT: Duration = Duration::from_secs(30);

const CONNECT_LIMIT: Duration = Duration::from_secs(15);

/// As other clients do: kubelet replaces a mounted token long before it expires.
const TOKEN_AGE: Duration = Duration::from_secs(60);

/// Each holds TLS buffers of some 40 KB.
const MAX_IDLE: usize = 2;

/// Objects are below 3 MiB; error pages of proxies are not worth more.
const MAX_BODY: usize = 8 << 20;
