//! The store behind HTTP: routes, identity, chunked watches.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;
use std::{io, thread};

use agent_core::time::{Instant, Wall};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use http_body_util::{BodyExt, Limited};
use hyper::body::{Frame, Incoming};
use hyper::header::{AUTHORIZATION, CONTENT_TYPE};
use hyper::service::service_fn;
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;

use super::closure::{Closure, Route, Shape};
use super::query::Query;
use super::store::{Deleted, PatchType, Preconditions, Store, Watch};
use super::{Resource, Status, discovery};

/// How the server listens, and whom it lets in.
#[derive(Debug, Default)]
pub struct Options {
    /// Default: a free port on 127.0.0.1.
    pub listen: Option<SocketAddr>,
    /// Default: plain text.
    pub tls: Option<Tls>,
    /// Bearer tokens that are let in.
    pub tokens: Vec<String>,
    /// Client certificates of this CA (PEM) are let in; needs TLS.
    pub client_ca: Option<String>,
}

/// The server's certificate and key, PEM.
#[derive(Debug)]
pub struct Tls {
    pub certificate: String,
    pub key: String,
}

impl Tls {
    /// A self-signed certificate for loopback; it is its own CA.
    pub fn self_signed() -> io::Result<Self> {
        let names = vec!["localhost".to_owned(), "127.0.0.1".to_owned(), "::1".to_owned()];
        let issued = rcgen::generate_simple_self_signed(names).map_err(io::Error::other)?;
        Ok(Self { certificate: issued.cert.pem(), key: issued.signing_key.serialize_pem() })
    }
}

/// A store that tasks share; watches wake when it changes.
#[derive(Clone, Debug)]
pub struct SharedStore(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    store: Mutex<Store>,
    started: tokio::time::Instant,
    /// The revision, and how often all watches were cut.
    changed: watch::Sender<(u64, u64)>,
}

impl SharedStore {
    fn new() -> Self {
        let epoch = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        let epoch_millis_at_zero = u64::try_from(epoch.as_millis()).unwrap_or_default();
        // UIDs have to differ between the two servers of a test and between runs.
        let seed = u64::try_from(epoch.as_nanos() & u128::from(u64::MAX)).unwrap_or_default();
        let store = Store::new(seed, Wall { epoch_millis_at_zero });
        let changed = watch::Sender::new((store.revision(), 0));
        Self(Arc::new(Shared { store: Mutex::new(store), started: tokio::time::Instant::now(), changed }))
    }

    /// Runs `change` on the store and wakes the watches it concerns.
    pub fn with<R>(&self, change: impl FnOnce(&mut Store) -> R) -> R {
        let mut store = self.0.store.lock().unwrap_or_else(PoisonError::into_inner);
        let millis = u64::try_from(self.0.started.elapsed().as_millis()).unwrap_or(u64::MAX);
        store.set_now(Instant::from_millis(millis));
        let result = change(&mut store);
        let revision = store.revision();
        self.0.changed.send_if_modified(|(last, _)| core::mem::replace(last, revision) != revision);
        result
    }

    /// Ends every open watch, as a restarting API server does.
    pub fn cut_watches(&self) {
        self.0.changed.send_modify(|(_, cuts)| *cuts += 1);
    }
}

/// A running server; it stops when dropped.
#[derive(Debug)]
pub struct Server {
    address: SocketAddr,
    certificate: Option<String>,
    token: Option<String>,
    store: SharedStore,
    closure: Closure,
    stop: watch::Sender<bool>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Server {
    /// Starts a server on a thread of its own.
    pub fn start(options: Options) -> io::Result<Self> {
        let listen = options.listen.unwrap_or_else(|| SocketAddr::from(([127, 0, 0, 1], 0)));
        let listener = std::net::TcpListener::bind(listen)?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let acceptor =
            options.tls.as_ref().map(|tls| acceptor(tls, options.client_ca.as_deref())).transpose()?;
        let (stop, stopped) = watch::channel(false);
        let store = SharedStore::new();
        let closure = Closure::default();
        let face = Arc::new(Face {
            store: store.clone(),
            closure: closure.clone(),
            open: options.tokens.is_empty() && options.client_ca.is_none(),
            tokens: options.tokens.clone(),
        });
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let thread = thread::Builder::new()
            .name("embedded-kube".to_owned())
            .spawn(move || runtime.block_on(serve(listener, acceptor, face, stopped)))?;
        Ok(Self {
            address,
            certificate: options.tls.map(|tls| tls.certificate),
            token: options.tokens.into_iter().next(),
            store,
            closure,
            stop,
            thread: Some(thread),
        })
    }

    /// `http://…` or `https://…`, without a trailing slash.
    pub fn url(&self) -> String {
        let scheme = if self.certificate.is_some() { "https" } else { "http" };
        format!("{scheme}://{}", self.address)
    }

    /// What clients trust (PEM), when TLS is on.
    pub fn ca(&self) -> Option<&str> {
        self.certificate.as_deref()
    }

    /// The first token, if there are any.
    pub fn token(&self) -> Option<&str> {
        self.token.as_deref()
    }

    pub fn store(&self) -> &SharedStore {
        &self.store
    }

    pub fn closure(&self) -> &Closure {
        &self.closure
    }

    /// A kubeconfig with one context of this `name`.
    pub fn kubeconfig(&self, name: &str) -> String {
        let mut cluster = json!({"server": self.url()});
        if let Some(certificate) = &self.certificate {
            cluster["certificate-authority-data"] = json!(BASE64_STANDARD.encode(certificate.as_bytes()));
        }
        let user = self.token.as_ref().map_or_else(|| json!({}), |token| json!({"token": token}));
        // JSON is YAML.
        json!({
            "apiVersion": "v1", "kind": "Config", "current-context": name,
            "clusters": [{"name": name, "cluster": cluster}],
            "users": [{"name": name, "user": user}],
            "contexts": [{"name": name, "context": {"cluster": name, "user": name}}]
        })
        .to_string()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.send_replace(true);
        if let Some(thread) = self.thread.take() {
            // A panic in the server has been printed by its thread already.
            let _ = thread.join();
        }
    }
}

/// What the connections share.
struct Face {
    store: SharedStore,
    closure: Closure,
    open: bool,
    tokens: Vec<String>,
}

fn acceptor(tls: &Tls, client_ca: Option<&str>) -> io::Result<TlsAcceptor> {
    let bad = |error: &dyn std::fmt::Display| io::Error::new(io::ErrorKind::InvalidInput, error.to_string());
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = rustls::ServerConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .map_err(|error| bad(&error))?;
    let builder = match client_ca {
        None => builder.with_no_client_auth(),
        Some(pem) => {
            let mut roots = rustls::RootCertStore::empty();
            for certificate in CertificateDer::pem_slice_iter(pem.as_bytes()) {
                roots.add(certificate.map_err(|error| bad(&error))?).map_err(|error| bad(&error))?;
            }
            let verifier =
                rustls::server::WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
                    .allow_unauthenticated()
                    .build()
                    .map_err(|error| bad(&error))?;
            builder.with_client_cert_verifier(verifier)
        }
    };
    let chain = CertificateDer::pem_slice_iter(tls.certificate.as_bytes())
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| bad(&error))?;
    let key = PrivateKeyDer::from_pem_slice(tls.key.as_bytes()).map_err(|error| bad(&error))?;
    let mut config = builder.with_single_cert(chain, key).map_err(|error| bad(&error))?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

async fn serve(
    listener: std::net::TcpListener,
    acceptor: Option<TlsAcceptor>,
    face: Arc<Face>,
    mut stopped: watch::Receiver<bool>,
) {
    let Ok(listener) = TcpListener::from_std(listener) else { return };
    // Dropped, and with it every connection, when the server stops.
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            _ = stopped.changed() => return,
            Some(_) = connections.join_next() => {}
            accepted = listener.accept() => {
                // Out of descriptors, or the client left already: the next one may do better.
                let Ok((stream, _)) = accepted else { continue };
                connections.spawn(connection(stream, acceptor.clone(), face.clone()));
            }
        }
    }
}

async fn connection(stream: TcpStream, acceptor: Option<TlsAcceptor>, face: Arc<Face>) {
    // Failures of one connection are the client's to see.
    let _ = stream.set_nodelay(true);
    match acceptor {
        None => requests(stream, false, face).await,
        Some(acceptor) => {
            if let Ok(stream) = acceptor.accept(stream).await {
                let certified = stream.get_ref().1.peer_certificates().is_some_and(|chain| !chain.is_empty());
                requests(stream, certified, face).await;
            }
        }
    }
}

async fn requests(stream: impl AsyncRead + AsyncWrite + Unpin, certified: bool, face: Arc<Face>) {
    let service = service_fn(|request| {
        let face = face.clone();
        async move { Ok::<_, Infallible>(face.answer(request, certified).await) }
    });
    // Failures of one connection are the client's to see.
    let _ = hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
}

impl Face {
    async fn answer(&self, request: Request<Incoming>, certified: bool) -> Response<Body> {
        match self.try_answer(request, certified).await {
            Ok(response) => response,
            Err(status) => respond(status.code, Body::full(status.to_json())),
        }
    }

    async fn try_answer(
        &self,
        request: Request<Incoming>,
        certified: bool,
    ) -> Result<Response<Body>, Status> {
        let path = request.uri().path().to_owned();
        // Probes and version are open to everyone, as with the default roles of Kubernetes.
        if matches!(path.as_str(), "/livez" | "/readyz" | "/healthz") {
            return Ok(respond(200, Body::full("ok")));
        }
        if path != "/version" && !self.knows(&request, certified) {
            return Err(Status::new(401, "Unauthorized", "Unauthorized"));
        }
        let query = Query::parse(request.uri().query().unwrap_or_default());
        let route = Route::parse(&path);
        let content_type = header(&request, CONTENT_TYPE.as_str()).to_owned();
        let method = request.method().clone();
        let has_body = !matches!(method, Method::GET);
        let shape_type = if has_body { content_type.as_str() } else { "" };
        let shape = Shape::new(method.as_str(), &route, shape_type, query.keys());
        let known = shape.known().is_some();
        self.closure.record(shape.clone());
        if !known {
            let message = format!("the embedded API server does not know the request shape {shape}");
            return Err(Status::new(501, "NotImplemented", message));
        }
        let body = if has_body { read_body(request.into_body()).await? } else { Bytes::new() };
        match route {
            Route::Fixed(path) => match discovery::document(&path) {
                Some(document) => Ok(respond(200, Body::full(document.to_string()))),
                None => Err(Status::new(404, "NotFound", "the server could not find the requested resource")),
            },
            Route::Collection { resource, namespace } => {
                self.collection(&method, resource, namespace.as_deref(), &query, &body)
            }
            Route::Object { resource, namespace, name } => {
                self.object(&method, &shape.content_type, resource, &namespace, &name, &body)
            }
            // Not in the table of known shapes.
            Route::Unknown(path) => Err(Status::new(501, "NotImplemented", path)),
        }
    }

    fn knows(&self, request: &Request<Incoming>, certified: bool) -> bool {
        let token = header(request, AUTHORIZATION.as_str()).strip_prefix("Bearer ").map(str::trim);
        match token {
            // A wrong token is refused even beside a good certificate.
            Some(token) if !self.tokens.is_empty() => self.tokens.iter().any(|known| known == token),
            _ => self.open || certified,
        }
    }

    fn collection(
        &self,
        method: &Method,
        resource: Resource,
        namespace: Option<&str>,
        query: &Query,
        body: &[u8],
    ) -> Result<Response<Body>, Status> {
        if method == Method::POST {
            let object = parse_object(body)?;
            let created =
                self.store.with(|store| store.create(resource, namespace.unwrap_or_default(), object))?;
            return Ok(respond(201, Body::full(created.json().to_vec())));
        }
        if query.is_watch() {
            return self.watch(resource, namespace, query);
        }
        let options = query.list_options()?;
        let list = self.store.with(|store| store.list(resource, namespace, &options))?;
        Ok(respond(200, Body::full(list.body(resource))))
    }

    fn watch(
        &self,
        resource: Resource,
        namespace: Option<&str>,
        query: &Query,
    ) -> Result<Response<Body>, Status> {
        let options = query.watch_options(resource)?;
        let watch = self.store.with(|store| store.watch(resource, namespace, &options))?;
        let limit = query.watch_limit().unwrap_or(WATCH_LIMIT);
        let (lines, body) = mpsc::channel(WATCH_BUFFER);
        // Before the answer: a cut after it must be seen, however late the task starts.
        let changed = self.store.0.changed.subscribe();
        let cuts = changed.borrow().1;
        let pump = Pump { store: self.store.clone(), watch, changed, cuts };
        tokio::spawn(pump.run(limit, lines));
        Ok(respond(200, Body::Watch(body)))
    }

    fn object(
        &self,
        method: &Method,
        content_type: &str,
        resource: Resource,
        namespace: &str,
        name: &str,
        body: &[u8],
    ) -> Result<Response<Body>, Status> {
        let object = match *method {
            Method::PUT => {
                let object = parse_object(body)?;
                self.store.with(|store| store.update(resource, namespace, name, object))?
            }
            Method::PATCH => {
                let r#type = match content_type {
                    "application/json-patch+json" => PatchType::Json,
                    _ => PatchType::Merge,
                };
                self.store.with(|store| store.patch(resource, namespace, name, r#type, body))?
            }
            Method::DELETE => {
                let preconditions = parse_preconditions(body)?;
                let deleted: Deleted =
                    self.store.with(|store| store.delete(resource, namespace, name, &preconditions))?;
                return Ok(respond(200, Body::full(deleted.body(resource))));
            }
            _ => self.store.with(|store| store.get(resource, namespace, name))?,
        };
        Ok(respond(200, Body::full(object.json().to_vec())))
    }
}

/// Carries events from the store to one response, until the time is up, the client leaves, or watches are cut.
struct Pump {
    store: SharedStore,
    watch: Watch,
    changed: watch::Receiver<(u64, u64)>,
    /// How often watches had been cut when this one was opened.
    cuts: u64,
}

impl Pump {
    async fn run(self, limit: Duration, lines: mpsc::Sender<Bytes>) {
        let Self { store, mut watch, mut changed, cuts } = self;
        let deadline = tokio::time::Instant::now() + limit;
        let mut bookmark = tokio::time::Instant::now() + BOOKMARK_PERIOD;
        loop {
            if changed.borrow_and_update().1 != cuts {
                return;
            }
            loop {
                let (chunk, ended) = next_chunk(&store, &mut watch);
                if !chunk.is_empty() && lines.send(chunk).await.is_err() || ended {
                    return;
                }
                if store.with(|store| watch.is_current(store)) {
                    break;
                }
            }
            tokio::select! {
                _ = changed.changed() => {}
                () = lines.closed() => return,
                () = tokio::time::sleep_until(deadline) => return,
                () = tokio::time::sleep_until(bookmark) => {
                    bookmark += BOOKMARK_PERIOD;
                    if let Some(event) = store.with(|store| store.bookmark(&watch))
                        && lines.send(event.line().into()).await.is_err()
                    {
                        return;
                    }
                }
            }
        }
    }
}

/// The events that are there, up to a size; whether the watch has ended.
fn next_chunk(store: &SharedStore, watch: &mut Watch) -> (Bytes, bool) {
    let mut chunk = Vec::new();
    store.with(|store| {
        while chunk.len() < CHUNK_BYTES
            && let Some(event) = store.next_event(watch)
        {
            chunk.extend_from_slice(&event.line());
        }
    });
    (chunk.into(), watch.has_ended())
}

/// A whole answer, or a watch.
enum Body {
    Full(Option<Bytes>),
    Watch(mpsc::Receiver<Bytes>),
}

impl Body {
    fn full(bytes: impl Into<Bytes>) -> Self {
        Self::Full(Some(bytes.into()))
    }
}

impl hyper::body::Body for Body {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match self.get_mut() {
            Self::Full(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Self::Watch(lines) => lines.poll_recv(context).map(|line| line.map(|line| Ok(Frame::data(line)))),
        }
    }

    fn size_hint(&self) -> hyper::body::SizeHint {
        match self {
            Self::Full(bytes) => {
                hyper::body::SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64))
            }
            Self::Watch(_) => hyper::body::SizeHint::default(),
        }
    }
}

fn respond(code: u16, body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    *response.status_mut() =
        hyper::StatusCode::from_u16(code).unwrap_or(hyper::StatusCode::INTERNAL_SERVER_ERROR);
    response.headers_mut().insert(CONTENT_TYPE, hyper::header::HeaderValue::from_static("application/json"));
    response
}

async fn read_body(body: Incoming) -> Result<Bytes, Status> {
    match Limited::new(body, BODY_LIMIT).collect().await {
        Ok(body) => Ok(body.to_bytes()),
        Err(error) => Err(Status::new(413, "RequestEntityTooLarge", error.to_string())),
    }
}

fn header<'a>(request: &'a Request<Incoming>, name: &str) -> &'a str {
    request.headers().get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
}

fn parse_object(body: &[u8]) -> Result<Value, Status> {
    serde_json::from_slice(body)
        .map_err(|error| Status::bad_request(format!("the object provided is unrecognized: {error}")))
}

fn parse_preconditions(body: &[u8]) -> Result<Preconditions, Status> {
    if body.is_empty() {
        return Ok(Preconditions::default());
    }
    let options = parse_object(body)?;
    let text = |member: &str| options["preconditions"][member].as_str().map(str::to_owned);
    Ok(Preconditions { uid: text("uid"), resource_version: text("resourceVersion") })
}

/// What the API server chooses itself when a watch names no time.
const WATCH_LIMIT: Duration = Duration::from_secs(1800);
/// As the API server's watch cache.
const BOOKMARK_PERIOD: Duration = Duration::from_secs(60);
const WATCH_BUFFER: usize = 16;
const CHUNK_BYTES: usize = 64 * 1024;
/// The API server's limit is 3 MiB as well.
const BODY_LIMIT: usize = 3 * 1024 * 1024;
