//! Requests to the API server over HTTP/1.1, each on a connection of its own from a small pool.

use std::cell::{Cell, RefCell};
use std::fmt::Write as _;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;

use agent_core::informer::parse_status;
use agent_core::request::{Outcome, Request, Status, Verb};
use bytes::Bytes;
use http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HOST, RETRY_AFTER, USER_AGENT};
use http::{HeaderValue, Method, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::{Builder, SendRequest};
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
    /// Connections without a request, and since when.
    idle: RefCell<Vec<(SendRequest<Full<Bytes>>, Instant)>>,
    /// A task closes idle connections.
    trimming: Cell<bool>,
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
        let inner = Inner {
            config,
            tls,
            host,
            user_agent,
            idle: RefCell::default(),
            trimming: Cell::new(false),
            token: RefCell::default(),
        };
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
            Verb::CreateNamespace => {
                let body = Verb::namespace_body(&key.namespace);
                self.call(
                    Method::POST,
                    &format!("/api/v1/namespaces?fieldManager={FIELD_MANAGER}"),
                    Some(JSON),
                    body,
                )
                .await
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
        while let Some((connection, _)) = idle.pop() {
            if connection.is_ready() {
                return Some(connection);
            }
        }
        None
    }

    fn give_back(&self, connection: SendRequest<Full<Bytes>>) {
        let mut idle = self.inner.idle.borrow_mut();
        if connection.is_closed() || idle.len() >= MAX_IDLE {
            return;
        }
        idle.push((connection, Instant::now()));
        if !self.inner.trimming.replace(true) {
            tokio::task::spawn_local(trim(Rc::downgrade(&self.inner)));
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

/// Closes what nobody used for a while, and ends when nothing is left: at idle there is no timer.
async fn trim(inner: Weak<Inner>) {
    loop {
        tokio::time::sleep(IDLE_LIMIT).await;
        let Some(inner) = inner.upgrade() else { return };
        let mut idle = inner.idle.borrow_mut();
        idle.retain(|(connection, since)| !connection.is_closed() && since.elapsed() < IDLE_LIMIT);
        if idle.is_empty() {
            *idle = Vec::new();
            inner.trimming.set(false);
            return;
        }
    }
}

async fn drive(
    stream: impl AsyncRead + AsyncWrite + Unpin + 'static,
) -> Result<SendRequest<Full<Bytes>>, NoAnswer> {
    // By default a buffer grows to 400 KB with the traffic and stays so.
    let (sender, connection) = Builder::new()
        .read_buf_exact_size(Some(READ_BUFFER))
        .handshake(Io::new(stream))
        .await
        .map_err(|error| NoAnswer(text(&error)))?;
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

/// Room for any head of an answer.
const READ_BUFFER: usize = 16 << 10;

/// As many as the core has requests at once: in a burst none pays for a handshake.
const MAX_IDLE: usize = 8;

/// Each holds buffers of some 40 KB, which a quiet site has no use for.
const IDLE_LIMIT: Duration = Duration::from_secs(5);

/// Objects are below 3 MiB; error pages of proxies are not worth more.
const MAX_BODY: usize = 8 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kube::config::{Config, Token};
    use std::collections::VecDeque;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};

    type Script = Rc<RefCell<VecDeque<&'static str>>>;

    /// Runs `test` with a client of a server that gives these answers, one after the other, whoever asks. An answer
    /// that ends with `!` ends the connection. Says how many connections there were and what was asked.
    async fn scripted(
        answers: &[&'static str],
        token: Token,
        test: impl AsyncFnOnce(Client),
    ) -> (usize, Vec<String>) {
        let script: Script = Rc::new(RefCell::new(answers.iter().copied().collect()));
        let asked = Rc::new(RefCell::new(Vec::new()));
        let connections = Rc::new(Cell::new(0));
        let (seen, count) = (Rc::clone(&asked), Rc::clone(&connections));
        tokio::task::LocalSet::new()
            .run_until(async move {
                let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
                let port = listener.local_addr().unwrap().port();
                tokio::task::spawn_local(async move {
                    while let Ok((stream, _)) = listener.accept().await {
                        count.set(count.get() + 1);
                        tokio::task::spawn_local(converse(stream, Rc::clone(&script), Rc::clone(&seen)));
                    }
                });
                let config = Config {
                    host: "127.0.0.1".into(),
                    port,
                    tls: None,
                    server_name: None,
                    prefix: "/prefix".into(),
                    token,
                };
                test(Client::new(config, "test/1").unwrap()).await;
            })
            .await;
        (connections.get(), asked.take())
    }

    async fn converse(mut stream: TcpStream, script: Script, asked: Rc<RefCell<Vec<String>>>) {
        let mut request = Vec::new();
        loop {
            let mut buffer = [0; 4096];
            match stream.read(&mut buffer).await {
                Ok(0) | Err(_) => return,
                Ok(count) => request.extend_from_slice(&buffer[..count]),
            }
            if !request.windows(4).any(|end| end == b"\r\n\r\n") {
                continue;
            }
            asked.borrow_mut().push(String::from_utf8(std::mem::take(&mut request)).unwrap().to_lowercase());
            let Some(answer) = script.borrow_mut().pop_front() else { return };
            let last = answer.ends_with('!');
            stream.write_all(answer.trim_end_matches('!').as_bytes()).await.unwrap();
            if last {
                return;
            }
        }
    }

    const GOOD: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}";

    async fn get(client: &Client) -> Outcome {
        client.call(Method::GET, "/x", None, Vec::new()).await
    }

    #[tokio::test]
    async fn connections_are_used_again() {
        let (connections, asked) = scripted(&[GOOD; 3], Token::Fixed("t".into()), async |client| {
            for _ in 0..3 {
                assert_eq!(get(&client).await, Outcome::Done(b"{}".to_vec()));
            }
        })
        .await;
        assert_eq!(connections, 1);
        assert!(asked[0].starts_with("get /prefix/x http/1.1\r\n"), "{}", asked[0]);
        for header in
            ["\r\nauthorization: bearer t\r\n", "\r\nuser-agent: test/1\r\n", "\r\nhost: 127.0.0.1:"]
        {
            assert!(asked[0].contains(header), "{}", asked[0]);
        }
    }

    #[tokio::test]
    async fn a_connection_that_the_server_closed_is_replaced() {
        let answers = ["HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}!", GOOD];
        let (connections, _) = scripted(&answers, Token::None, async |client| {
            for _ in 0..2 {
                assert_eq!(get(&client).await, Outcome::Done(b"{}".to_vec()));
            }
        })
        .await;
        assert_eq!(connections, 2);
    }

    #[tokio::test]
    async fn a_broken_answer_is_unknown() {
        let broken = [
            "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}!",
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n!",
            "nonsense\r\n\r\n!",
            "!",
        ];
        scripted(&broken, Token::None, async |client| {
            for _ in broken {
                assert!(matches!(get(&client).await, Outcome::Unknown(_)));
            }
        })
        .await;
    }

    #[tokio::test]
    async fn a_refusal_keeps_its_reason() {
        let answers = [
            "HTTP/1.1 429 X\r\nRetry-After: 7\r\nContent-Length: 0\r\n\r\n",
            "HTTP/1.1 422 X\r\nContent-Length: 41\r\n\r\n{\"reason\":\"Invalid\",\"message\":\"bad spec\"}",
        ];
        scripted(&answers, Token::None, async |client| {
            let Outcome::Status(status) = get(&client).await else { panic!("no status") };
            assert_eq!((status.code, status.retry_after), (429, Some(Duration::from_secs(7))));
            assert_eq!(status.reason, "Too Many Requests");
            let Outcome::Status(status) = get(&client).await else { panic!("no status") };
            assert_eq!((status.code, &*status.reason, &*status.message), (422, "Invalid", "bad spec"));
        })
        .await;
    }

    #[tokio::test]
    async fn a_replaced_token_is_read_after_a_401() {
        let path = std::env::temp_dir().join(format!("agent-lite-token-{}", std::process::id()));
        std::fs::write(&path, "old\n").unwrap();
        let answers = [GOOD, "HTTP/1.1 401 X\r\nContent-Length: 0\r\n\r\n", GOOD];
        let (_, asked) = scripted(&answers, Token::File(path.clone()), async |client| {
            get(&client).await;
            std::fs::write(&path, "new\n").unwrap();
            get(&client).await;
            get(&client).await;
        })
        .await;
        let _ = std::fs::remove_file(&path);
        assert!(asked[1].contains("bearer old") && asked[2].contains("bearer new"), "{asked:?}");
    }

    #[tokio::test]
    async fn nobody_there() {
        scripted(&[], Token::None, async |client| {
            let mut config = client.inner.config.clone();
            // A port that nobody listens on: the listener that had it is gone.
            config.port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
            let client = Client::new(config, "test/1").unwrap();
            let Outcome::Unknown(reason) = get(&client).await else { panic!("an answer") };
            assert!(reason.starts_with("cannot connect to 127.0.0.1:"), "{reason}");
        })
        .await;
    }
}
