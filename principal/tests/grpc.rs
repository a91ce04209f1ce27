//! The services over real TLS and HTTP/2, with an API server that is a function.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read as _, Write as _};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use agent_core::cloudevent::EventView;
use agent_core::informer::Event;
use agent_core::peer::{self, Mapping, Peer};
use agent_core::request::{Key, Kind};
use bytes::{Buf as _, Bytes, BytesMut};
use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::channel::Channel;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::client::conn::http2::SendRequest;
use hyper_util::rt::{TokioExecutor, TokioIo};
use principal::auth::Method;
use principal::blocklist::Blocklist;
use principal::clock::Clock;
use principal::grpc::{Services, Settings, server};
use principal::hub::{Hub, Shared};
use principal::issuer::{Audience, Issuer};
use principal::kube::call::Selector;
use principal::kube::material::Material;
use principal::namespaces::Namespaces;
use principal::options::Options;
use principal::pki::{Authority, KeyAlgorithm, Pair, Purpose, RsaBits, new_authority, rsa_key};
use principal::tls::{ServerPair, roots, server_config};
use prost::Message;
use proto::auth::{AuthRequest, AuthResponse, RefreshTokenRequest};
use rustls::ClientConfig;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// Plenty for a loaded machine; nothing waits this long when it works.
const LIMIT: Duration = Duration::from_secs(20);

struct Rig {
    address: SocketAddr,
    ca: Pair,
    hub: Arc<Hub>,
    services: Arc<Services>,
    api: Arc<Mutex<Api>>,
    _stop: watch::Sender<bool>,
}

/// What the API server holds.
#[derive(Default)]
struct Api {
    blocklist: BTreeMap<String, String>,
}

impl Rig {
    async fn start(auth: &str) -> Self {
        let plaintext = auth.starts_with("header");
        let ca = new_authority(10, KeyAlgorithm::EcdsaP256).unwrap();
        let authority = Authority::from_pem(&ca.certificate, &ca.key).unwrap();
        let purpose = Purpose::Server { ips: vec![[127, 0, 0, 1].into()], dns: vec!["localhost".into()] };
        let server_pair = authority.issue("principal", &purpose, 5, KeyAlgorithm::EcdsaP256).unwrap();
        let api = Arc::new(Mutex::new(Api::default()));
        let client = kube_client(api.clone());
        let shared = Shared {
            client: client.clone(),
            clock: Clock::start(),
            selector: Selector::new(""),
            processors: tokio::sync::Semaphore::new(10),
            namespace: "argocd".into(),
            mapping: Mapping::Namespace,
            allowed_namespaces: Vec::new(),
            principal_uid: "11111111-2222-4333-8444-555555555555".into(),
            max_message: 1 << 20,
        };
        let allowed = Namespaces::parse(&["agent-*".to_owned()], &mut Vec::new()).unwrap();
        let hub = Arc::new(Hub::new(shared, allowed));
        hub.registered(&BTreeSet::from(["agent-1".to_owned()]));
        for kind in Kind::ALL {
            hub.informed(kind, &Event::ListStarted);
            hub.informed(kind, &Event::Synced);
        }
        let method = Method::parse(auth, plaintext, &mut Vec::new()).unwrap();
        let issuer = Issuer::from_pem(&rsa_key(RsaBits::B2048).unwrap()).unwrap();
        let blocklist = Blocklist::load(Some(Material::new(client, "argocd"))).await.unwrap();
        let settings = Settings {
            namespace: "argocd".into(),
            mapping: Mapping::Namespace,
            match_subject: !plaintext,
            max_message: 1 << 20,
        };
        let services = Arc::new(Services::new(hub.clone(), method, issuer, blocklist, settings));
        let pair = ServerPair {
            origin: "test".into(),
            certificate: server_pair.certificate.into_bytes(),
            key: server_pair.key.into_bytes(),
        };
        let options = Options { tls_min_version: "tls1.3".into(), ..Options::default() };
        let trusted = roots("test", &[ca.certificate.as_bytes()]).unwrap();
        let config = (!plaintext).then(|| Arc::new(server_config(&options, &pair, Some(trusted)).unwrap()));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = watch::channel(false);
        tokio::spawn(server::serve(listener, config, services.clone(), stopped));
        Self { address, ca, hub, services, api, _stop: stop }
    }

    fn client_pair(&self, name: &str) -> Pair {
        let authority = Authority::from_pem(&self.ca.certificate, &self.ca.key).unwrap();
        authority.issue(name, &Purpose::Client, 5, KeyAlgorithm::EcdsaP256).unwrap()
    }

    async fn connect(&self, name: &str) -> Caller {
        let pair = self.client_pair(name);
        Caller::connect(self.address, &self.ca, Some(&pair)).await.unwrap()
    }

    fn observe(&self, name: &str, body: &str) {
        let key = Key::new(Kind::Application, "agent-1", name);
        self.hub.informed(Kind::Application, &Event::Present { key, object: body.as_bytes() });
    }
}

fn kube_client(api: Arc<Mutex<Api>>) -> kube::Client {
    let service = tower::service_fn(move |request: Request<kube::client::Body>| {
        let path = request.uri().path().to_owned();
        let api = api.lock().unwrap();
        let (status, body) = if path.ends_with("/configmaps/argocd-agent-tls-blocklist") {
            let map = serde_json::json!({"metadata": {"name": "argocd-agent-tls-blocklist"}, "data": api.blocklist});
            (StatusCode::OK, map)
        } else if path.ends_with("/namespaces/agent-1/applications/guestbook") {
            (StatusCode::OK, serde_json::from_str(APPLICATION).unwrap())
        } else {
            (StatusCode::NOT_FOUND, serde_json::json!({"kind": "Status", "code": 404, "reason": "NotFound"}))
        };
        let response = Response::builder()
            .status(status)
            .body(kube::client::Body::from(body.to_string().into_bytes()))
            .unwrap();
        async move { Ok::<_, std::convert::Infallible>(response) }
    });
    kube::Client::new(service, "argocd")
}

/// A gRPC client over one connection.
struct Caller(SendRequest<http_body_util::combinators::UnsyncBoxBody<Bytes, std::convert::Infallible>>);

/// What a call came to.
#[derive(Debug)]
struct Answer {
    status: u32,
    headers: HeaderMap,
    messages: Vec<Bytes>,
}

impl Caller {
    async fn connect(address: SocketAddr, ca: &Pair, pair: Option<&Pair>) -> Result<Self, String> {
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots("ca", &[ca.certificate.as_bytes()]).unwrap());
        let mut config = match pair {
            None => builder.with_no_client_auth(),
            Some(pair) => builder
                .with_client_auth_cert(
                    CertificateDer::pem_slice_iter(pair.certificate.as_bytes()).map(Result::unwrap).collect(),
                    PrivateKeyDer::from_pem_slice(pair.key.as_bytes()).unwrap(),
                )
                .unwrap(),
        };
        config.alpn_protocols = vec![b"h2".to_vec()];
        let stream = TcpStream::connect(address).await.unwrap();
        let stream = tokio_rustls::TlsConnector::from(Arc::new(config))
            .connect("localhost".try_into().unwrap(), stream)
            .await
            .map_err(|error| error.to_string())?;
        Self::over(stream).await
    }

    async fn over(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) -> Result<Self, String> {
        let (sender, connection) =
            hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream))
                .await
                .map_err(|error| error.to_string())?;
        tokio::spawn(connection);
        Ok(Self(sender))
    }

    fn request(path: &str, token: Option<&str>) -> http::request::Builder {
        let builder = Request::post(path).header("content-type", "application/grpc").header("te", "trailers");
        match token {
            Some(token) => builder.header("authorization", token),
            None => builder,
        }
    }

    async fn unary(
        &mut self,
        path: &str,
        token: Option<&str>,
        message: &impl Message,
    ) -> Result<Answer, String> {
        let body = Full::new(frame(&message.encode_to_vec(), false)).boxed_unsync();
        let request = Self::request(path, token).body(body).unwrap();
        let response = self.0.send_request(request).await.map_err(|error| error.to_string())?;
        Ok(finish(response).await)
    }

    async fn authenticate(&mut self, change: impl FnOnce(&mut AuthRequest)) -> Result<AuthResponse, u32> {
        let mut request = AuthRequest {
            method: "mtls".into(),
            mode: "managed".into(),
            version: "99.9.9-unreleased".into(),
            agent_namespace: "argocd".into(),
            ..AuthRequest::default()
        };
        change(&mut request);
        let answer = self.unary(proto::auth::AUTHENTICATE, None, &request).await.unwrap();
        if answer.status == 0 {
            Ok(AuthResponse::decode(&answer.messages[0][..]).unwrap())
        } else {
            Err(answer.status)
        }
    }

    async fn subscribe(&mut self, token: &str, compressed: bool) -> Subscription {
        let (sender, body) = Channel::new(16);
        let mut request = Self::request(proto::eventstream::SUBSCRIBE, Some(token));
        if compressed {
            request = request.header("grpc-encoding", "gzip").header("grpc-accept-encoding", "gzip");
        }
        let request = request.body(body.boxed_unsync()).unwrap();
        let response = tokio::time::timeout(LIMIT, self.0.send_request(request)).await.unwrap().unwrap();
        Subscription { sender, response, buffer: BytesMut::new(), compressed }
    }
}

struct Subscription {
    sender: http_body_util::channel::Sender<Bytes>,
    response: Response<Incoming>,
    buffer: BytesMut,
    compressed: bool,
}

impl Subscription {
    async fn send(&mut self, message: &[u8]) {
        self.sender.send_data(frame(message, self.compressed)).await.unwrap();
    }

    /// The next message, or the status that the stream ended with.
    async fn next(&mut self) -> Result<Vec<u8>, u32> {
        tokio::time::timeout(LIMIT, self.next_now()).await.expect("the stream neither speaks nor ends")
    }

    async fn next_now(&mut self) -> Result<Vec<u8>, u32> {
        if let Some(status) = self.response.headers().get("grpc-status") {
            return Err(status.to_str().unwrap().parse().unwrap());
        }
        loop {
            if let Some(message) = unframe(&mut self.buffer) {
                return Ok(message);
            }
            let part = self.response.body_mut().frame().await.expect("no trailers").expect("stream broke");
            match part.into_data() {
                Ok(data) => self.buffer.extend_from_slice(&data),
                Err(part) => {
                    let trailers = part.into_trailers().unwrap();
                    return Err(trailers["grpc-status"].to_str().unwrap().parse().unwrap());
                }
            }
        }
    }
}

fn frame(message: &[u8], compressed: bool) -> Bytes {
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    packed.write_all(message).unwrap();
    let body = if compressed { packed.finish().unwrap() } else { message.to_vec() };
    let mut out = vec![u8::from(compressed)];
    out.extend((body.len() as u32).to_be_bytes());
    out.extend(body);
    out.into()
}

fn unframe(buffer: &mut BytesMut) -> Option<Vec<u8>> {
    let length = u32::from_be_bytes(buffer.get(1..5)?.try_into().unwrap()) as usize;
    if buffer.len() < 5 + length {
        return None;
    }
    let compressed = buffer[0] == 1;
    buffer.advance(5);
    let body = buffer.split_to(length);
    if !compressed {
        return Some(body.to_vec());
    }
    let mut plain = Vec::new();
    flate2::read::GzDecoder::new(&body[..]).read_to_end(&mut plain).unwrap();
    Some(plain)
}

async fn finish(response: Response<Incoming>) -> Answer {
    let headers = response.headers().clone();
    let collected = tokio::time::timeout(LIMIT, response.into_body().collect()).await.unwrap().unwrap();
    let trailers = collected.trailers().cloned().unwrap_or_default();
    let status = headers.get("grpc-status").or_else(|| trailers.get("grpc-status"));
    let status = status.expect("no grpc-status").to_str().unwrap().parse().unwrap();
    let mut buffer = BytesMut::from(&collected.to_bytes()[..]);
    let messages = std::iter::from_fn(|| unframe(&mut buffer)).map(Bytes::from).collect();
    Answer { status, headers, messages }
}

const APPLICATION: &str = r#"{"apiVersion":"argoproj.io/v1alpha1","kind":"Application","metadata":{"name":"guestbook","namespace":"agent-1","uid":"0d8b9f6e-0000-4000-8000-000000000001","resourceVersion":"7"},"spec":{"project":"default","destination":{"name":"agent-1"}}}"#;
const SUBJECT: &str = "mtls:subject:CN=([^,]+)";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_authenticates_subscribes_and_is_told() {
    let rig = Rig::start(SUBJECT).await;
    let mut caller = rig.connect("agent-1").await;
    let version = caller
        .unary(proto::version::VERSION, Some("nonsense"), &proto::version::VersionRequest::default())
        .await
        .unwrap();
    assert_eq!(version.status, 0);
    let version = proto::version::VersionResponse::decode(&version.messages[0][..]).unwrap().version;
    assert_eq!(version, format!("argocd-agent-{}", principal::version::VERSION));

    let tokens = caller.authenticate(|_| ()).await.unwrap();
    assert_eq!(tokens.principal_namespace, "argocd");
    for compressed in [false, true] {
        rig.observe("guestbook", APPLICATION);
        let mut stream = caller.subscribe(&tokens.access_token, compressed).await;
        let introduction = stream.response.headers()[peer::HEADER].to_str().unwrap();
        assert!(Peer::parse(introduction).unwrap().is_ours());
        assert_eq!(stream.response.headers().contains_key("grpc-encoding"), compressed);
        let mut told = BTreeSet::new();
        while !told.contains("application") {
            let message = stream.next().await.unwrap();
            let event = EventView::decode(&message).unwrap();
            told.insert(event.dataschema.to_owned());
            if event.dataschema != "application" {
                let ack = event.ack("agent://agent-managed");
                stream.send(&ack).await;
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refusals_have_the_reference_s_statuses() {
    let rig = Rig::start(SUBJECT).await;
    let mut caller = rig.connect("agent-1").await;
    assert_eq!(caller.authenticate(|request| request.mode = "Managed".into()).await.unwrap_err(), 2);
    assert_eq!(caller.authenticate(|request| request.method = "userpass".into()).await.unwrap_err(), 16);
    assert_eq!(caller.authenticate(|request| request.mode = "autonomous".into()).await.unwrap_err(), 16);
    let tokens = caller.authenticate(|_| ()).await.unwrap();
    for bad in ["", "x", &tokens.refresh_token, &format!("Bearer {}", tokens.access_token)] {
        let mut stream = caller.subscribe(bad, false).await;
        assert_eq!(stream.next().await.unwrap_err(), 16, "{bad}");
    }
    let mut other = rig.connect("agent-2").await;
    let mut stream = other.subscribe(&tokens.access_token, false).await;
    assert_eq!(stream.next().await.unwrap_err(), 16, "the certificate is another agent's");

    let empty = proto::eventstream::PingRequest::default();
    let ping = caller.unary(proto::eventstream::PING, Some(&tokens.access_token), &empty).await.unwrap();
    assert_eq!(ping.status, 12);
    assert_eq!(caller.unary(proto::eventstream::PING, None, &empty).await.unwrap().status, 16);
    assert_eq!(caller.unary("/no.Such/Method", None, &empty).await.unwrap().status, 12);

    let mut named_like_the_namespace = rig.connect("argocd").await;
    assert_eq!(named_like_the_namespace.authenticate(|_| ()).await.unwrap_err(), 16);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn strangers_do_not_get_through_the_handshake() {
    let rig = Rig::start(SUBJECT).await;
    let foreign = new_authority(10, KeyAlgorithm::EcdsaP256).unwrap();
    let stranger = Authority::from_pem(&foreign.certificate, &foreign.key)
        .unwrap()
        .issue("agent-1", &Purpose::Client, 5, KeyAlgorithm::EcdsaP256)
        .unwrap();
    for pair in [None, Some(&stranger)] {
        // In TLS 1.3 the client learns of the refusal with its first read.
        let refused = match Caller::connect(rig.address, &rig.ca, pair).await {
            Err(error) => error,
            Ok(mut caller) => {
                let request = proto::version::VersionRequest::default();
                caller.unary(proto::version::VERSION, None, &request).await.unwrap_err()
            }
        };
        assert!(!refused.is_empty());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn behind_a_proxy_a_header_names_the_agent() {
    let rig = Rig::start("header:X-Agent:^spiffe://hub/(.+)$").await;
    for (header, expected) in [(Some("spiffe://hub/agent-1"), 0), (Some("agent-1"), 16), (None, 16)] {
        let mut caller = Caller::over(TcpStream::connect(rig.address).await.unwrap()).await.unwrap();
        let message = AuthRequest {
            method: "header".into(),
            mode: "managed".into(),
            version: "1".into(),
            ..AuthRequest::default()
        };
        let mut request = Caller::request(proto::auth::AUTHENTICATE, None);
        if let Some(header) = header {
            request = request.header("x-agent", header);
        }
        let body = Full::new(frame(&message.encode_to_vec(), false)).boxed_unsync();
        let response = caller.0.send_request(request.body(body).unwrap()).await.unwrap();
        let answer = finish(response).await;
        assert_eq!(answer.status, expected, "{header:?}");
        if expected == 0 {
            let token = AuthResponse::decode(&answer.messages[0][..]).unwrap().access_token;
            assert!(caller.subscribe(&token, false).await.next().await.is_ok());
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_end_only_with_what_a_go_agent_reconnects_after() {
    let rig = Rig::start(SUBJECT).await;
    let mut caller = rig.connect("agent-1").await;
    let token = caller.authenticate(|_| ()).await.unwrap().access_token;
    let ended = async |stream: &mut Subscription| loop {
        if let Err(status) = stream.next().await {
            return status;
        }
    };

    let mut older = caller.subscribe(&token, false).await;
    let mut newer = caller.subscribe(&token, false).await;
    assert_eq!(ended(&mut older).await, 1, "replaced");
    newer.send(b"this is no event").await;
    let mut large = vec![0u8; (1 << 20) + 1];
    large[0] = 1;
    newer.send(&large).await;
    assert_eq!(ended(&mut newer).await, 0, "a message above the limit");

    let mut stream = caller.subscribe(&token, false).await;
    rig.hub.registered(&BTreeSet::new());
    assert_eq!(ended(&mut stream).await, 14, "unregistered");
    let mut stream = caller.subscribe(&token, false).await;
    rig.hub.drain(Duration::from_secs(1)).await;
    assert_eq!(ended(&mut stream).await, 14, "draining");
    let mut late = caller.subscribe(&token, false).await;
    assert_eq!(late.next().await.unwrap_err(), 14, "draining");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_that_is_registered_while_connected_is_told() {
    let rig = Rig::start(SUBJECT).await;
    let mut caller = rig.connect("agent-2").await;
    let token = caller.authenticate(|_| ()).await.unwrap().access_token;
    let mut stream = caller.subscribe(&token, false).await;
    rig.hub.registered(&BTreeSet::from(["agent-2".to_owned()]));
    // The list of its own namespace comes first; the stub has none, so the core is told by hand.
    for kind in Kind::ALL {
        rig.hub.informed(kind, &Event::ListStarted);
        rig.hub.informed(kind, &Event::Synced);
    }
    let message = stream.next().await.unwrap();
    assert_eq!(EventView::decode(&message).unwrap().dataschema, "resourceResync");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_certificate_on_the_blocklist_is_refused_everywhere() {
    let rig = Rig::start(SUBJECT).await;
    let pair = rig.client_pair("agent-1");
    let der = CertificateDer::from_pem_slice(pair.certificate.as_bytes()).unwrap();
    let mut caller = Caller::connect(rig.address, &rig.ca, Some(&pair)).await.unwrap();
    let token = caller.authenticate(|_| ()).await.unwrap().access_token;
    let mut open = caller.subscribe(&token, false).await;
    rig.api.lock().unwrap().blocklist.insert(principal::tls::fingerprint(&der), String::new());
    let refused = rig.services.blocklist.refresh().await.unwrap();
    rig.hub.end_where(|session| refused.contains(&session.fingerprint));
    assert_eq!(
        loop {
            if let Err(status) = open.next().await {
                break status;
            }
        },
        16
    );
    assert_eq!(caller.authenticate(|_| ()).await.unwrap_err(), 16);
    let mut stream = caller.subscribe(&token, false).await;
    assert_eq!(stream.next().await.unwrap_err(), 16, "a token from before does not help");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_are_refreshed() {
    let rig = Rig::start(SUBJECT).await;
    let mut caller = rig.connect("agent-1").await;
    let tokens = caller.authenticate(|_| ()).await.unwrap();
    let request = RefreshTokenRequest { refresh_token: tokens.refresh_token };
    let answer = caller.unary(proto::auth::REFRESH_TOKEN, None, &request).await.unwrap();
    assert_eq!(answer.status, 0);
    let renewed = AuthResponse::decode(&answer.messages[0][..]).unwrap();
    assert_eq!((renewed.refresh_token.as_str(), renewed.version.as_str()), ("", ""));
    let mut stream = caller.subscribe(&renewed.access_token, false).await;
    assert!(stream.next().await.is_ok());

    let now = std::time::SystemTime::now();
    let soon_over = rig
        .services
        .issuer
        .issue(
            Audience::Refresh,
            "{\"clientID\":\"agent-1\",\"mode\":\"managed\"}",
            Some(Duration::from_secs(60)),
            now,
            "x",
        )
        .unwrap();
    let request = RefreshTokenRequest { refresh_token: soon_over };
    let answer = caller.unary(proto::auth::REFRESH_TOKEN, None, &request).await.unwrap();
    assert!(!AuthResponse::decode(&answer.messages[0][..]).unwrap().refresh_token.is_empty());
    let request = RefreshTokenRequest { refresh_token: tokens.access_token };
    assert_eq!(caller.unary(proto::auth::REFRESH_TOKEN, None, &request).await.unwrap().status, 16);
    assert!(answer.headers.contains_key("content-type"));
}
