//! The gRPC services, one function per method path.

mod authentication;
mod codec;
mod event_stream;
pub mod server;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use agent_core::peer::{self, Capabilities, Mapping, Peer};
use agent_core::request::is_dns_label;
use http::{Request, Response};
use hyper::body::Incoming;
use tokio::sync::Semaphore;
use tonic::body::Body;
use tonic::codec::{CompressionEncoding, EnabledCompressionEncodings};
use tonic::metadata::{MetadataMap, MetadataValue};
use tonic::server::{Grpc, UnaryService};
use tonic::{Status, codec::Codec};

use crate::auth::Method;
use crate::auth::dn::CertificateNames;
use crate::blocklist::Blocklist;
use crate::hub::Hub;
use crate::issuer::{Audience, Identity, Issuer};
use codec::Messages;

/// What the services need.
pub struct Services {
    /// The agents.
    pub hub: Arc<Hub>,
    /// How they authenticate.
    pub method: Method,
    /// Their tokens.
    pub issuer: Issuer,
    /// Refused certificates.
    pub blocklist: Blocklist,
    /// The principal's own namespace.
    pub namespace: String,
    /// How Applications are mapped to agents.
    pub mapping: Mapping,
    /// Compare the certificate's common name with the agent's name at every call.
    pub match_subject: bool,
    /// Limit of a message both ways.
    pub max_message: usize,
    /// Identity of this process, for our own agents.
    pub instance: String,
    versions: Versions,
    /// Callers that are held before they are refused.
    held: Semaphore,
}

/// What is known of a connection before its first call.
#[derive(Debug, Default)]
pub struct Connection {
    /// Remote address.
    pub address: String,
    /// The verified client certificate.
    pub certificate: Option<ClientCertificate>,
}

/// A client certificate that the TLS layer has verified.
#[derive(Debug)]
pub struct ClientCertificate {
    /// DER of the leaf.
    pub der: Vec<u8>,
    /// Its fingerprint, upper-case hex.
    pub fingerprint: String,
    /// What it says, if it can be read.
    pub names: Result<CertificateNames, String>,
}

impl Connection {
    fn fingerprint(&self) -> &str {
        self.certificate.as_ref().map_or("", |certificate| &certificate.fingerprint)
    }
}

/// The options that the services keep.
#[derive(Debug)]
pub struct Settings {
    /// See [`Services`].
    pub namespace: String,
    /// How Applications are mapped to agents.
    pub mapping: Mapping,
    /// See [`Services`].
    pub match_subject: bool,
    /// See [`Services`].
    pub max_message: usize,
}

impl Services {
    /// The services of one process.
    pub fn new(
        hub: Arc<Hub>,
        method: Method,
        issuer: Issuer,
        blocklist: Blocklist,
        settings: Settings,
    ) -> Self {
        Self {
            hub,
            method,
            issuer,
            blocklist,
            namespace: settings.namespace,
            mapping: settings.mapping,
            match_subject: settings.match_subject,
            max_message: settings.max_message,
            instance: crate::clock::uuid(),
            versions: Versions::default(),
            held: Semaphore::new(HELD_MAX),
        }
    }

    /// Answers one call. Errors are gRPC statuses, never broken connections.
    pub async fn call(
        self: Arc<Self>,
        connection: Arc<Connection>,
        request: Request<Incoming>,
    ) -> Result<Response<Body>, Infallible> {
        let path = request.uri().path().to_owned();
        tracing::debug!(target: "grpc-event", address = connection.address, "{path}");
        let response = match path.as_str() {
            proto::version::VERSION => {
                self.unary(request, |_: tonic::Request<proto::version::VersionRequest>| async {
                    let version = format!("{}-{}", crate::version::NAME, crate::version::VERSION);
                    Ok(tonic::Response::new(proto::version::VersionResponse { version }))
                })
                .await
            }
            proto::auth::AUTHENTICATE => {
                self.unary(request, |request| {
                    let (services, connection) = (self.clone(), connection.clone());
                    async move { services.authenticate(&connection, request).await }
                })
                .await
            }
            proto::auth::REFRESH_TOKEN => {
                self.unary(request, |request| {
                    let answer = self.refresh(&request);
                    async move { answer }
                })
                .await
            }
            proto::eventstream::SUBSCRIBE => event_stream::subscribe(self, connection, request).await,
            proto::eventstream::PING | proto::eventstream::PUSH => {
                let metadata = MetadataMap::from_headers(request.headers().clone());
                match self.authorize(&connection, &metadata).await {
                    Err(status) => status.into_http(),
                    Ok(_) => Status::unimplemented(format!("{path} is not served: agents use Subscribe"))
                        .into_http(),
                }
            }
            _ => Status::unimplemented(format!("unknown method {path}")).into_http(),
        };
        Ok(response)
    }

    async fn unary<A, B, F, O>(&self, request: Request<Incoming>, call: F) -> Response<Body>
    where
        A: prost::Message + Default + Send + 'static,
        B: prost::Message + Send + 'static,
        F: FnMut(tonic::Request<A>) -> O + Send,
        O: Future<Output = Result<tonic::Response<B>, Status>> + Send,
    {
        let mut grpc = self.grpc(Messages::<A, B>::default(), &request, UNARY_MAX.min(self.max_message));
        grpc.unary(Call(call), request).await
    }

    /// gzip is always understood, and used for answers where the caller uses it.
    fn grpc<C: Codec>(&self, codec: C, request: &Request<Incoming>, max_message: usize) -> Grpc<C> {
        let mut accepted = EnabledCompressionEncodings::default();
        accepted.enable(CompressionEncoding::Gzip);
        let compressed = request.headers().get("grpc-encoding").is_some_and(|encoding| encoding == "gzip");
        let answers = if compressed { accepted } else { EnabledCompressionEncodings::default() };
        Grpc::new(codec)
            .apply_compression_config(accepted, answers)
            .apply_max_message_size_config(Some(max_message), Some(max_message))
    }

    /// Who calls, by access token. Every failure looks the same from outside; the log has the reason.
    async fn authorize(&self, connection: &Connection, metadata: &MetadataMap) -> Result<Identity, Status> {
        let refused = |reason: String| {
            tracing::warn!(address = connection.address, "call refused: {reason}");
            Status::unauthenticated("invalid authentication data")
        };
        let identity = self.identity_of_token(metadata).map_err(refused)?;
        if identity.client_id == self.namespace {
            return Err(refused(format!(
                "agent {:?} is named like the principal's namespace",
                identity.client_id
            )));
        }
        self.check_subject(connection, &identity.client_id).map_err(refused)?;
        if !matches!(identity.mode.as_str(), "managed" | "autonomous") {
            return Err(refused(format!(
                "agent {} has unknown mode {:?}",
                identity.client_id, identity.mode
            )));
        }
        // Its name becomes a namespace and part of URLs.
        if !is_dns_label(&identity.client_id) {
            return Err(refused(format!("agent name {:?} is not a DNS label", identity.client_id)));
        }
        match self.blocklist.has(connection.fingerprint()).await {
            Ok(false) => Ok(identity),
            Ok(true) => Err(refused(format!(
                "certificate {} of agent {} is on the blocklist",
                connection.fingerprint(),
                identity.client_id
            ))),
            Err(error) => {
                tracing::warn!("{error}");
                Err(Status::unavailable("the blocklist cannot be read"))
            }
        }
    }

    /// `--client-cert-subject-match`.
    fn check_subject(&self, connection: &Connection, agent: &str) -> Result<(), String> {
        let common_name = match &connection.certificate {
            Some(ClientCertificate { names: Ok(names), .. }) => names.common_name.as_str(),
            _ => "",
        };
        if !self.match_subject || common_name == agent {
            return Ok(());
        }
        Err(format!("the certificate's common name {common_name:?} is not the agent's name {agent:?}"))
    }

    fn identity_of_token(&self, metadata: &MetadataMap) -> Result<Identity, String> {
        let token = metadata.get("authorization").ok_or("there is no token")?;
        let token = token.to_str().map_err(|_| "the token is not text")?;
        let verified = self.issuer.verify(token, Audience::Access, SystemTime::now())?;
        Identity::parse(&verified.subject)
    }

    /// What the caller says about itself in our own metadata.
    fn peer_of(metadata: &MetadataMap) -> Option<Peer> {
        Peer::parse(metadata.get(peer::HEADER)?.to_str().ok()?)
    }

    /// What we say about ourselves, into a response's metadata.
    fn introduce(&self, metadata: &mut MetadataMap) {
        let peer = Peer {
            version: crate::version::VERSION.into(),
            instance: self.instance.as_str().into(),
            namespace: Box::default(),
            mapping: Some(self.mapping),
            capabilities: Capabilities::OURS,
        };
        if let Ok(value) = MetadataValue::try_from(peer.format()) {
            metadata.insert(peer::HEADER, value);
        }
    }

    /// Lets a caller wait that would otherwise come back ten times a second (a Go agent after these statuses).
    async fn hold(&self) {
        if let Ok(_permit) = self.held.try_acquire() {
            tokio::time::sleep(HOLD).await;
        }
    }
}

/// What agents called their version when they authenticated: a Go agent does not repeat it on its stream.
#[derive(Default)]
struct Versions(Mutex<BTreeMap<String, Peer>>);

impl Versions {
    fn remember(&self, agent: &str, version: &str, namespace: &str) {
        let mut map = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // At the cap, newcomers go without.
        if map.len() < VERSIONS_MAX || map.contains_key(agent) {
            let end = version.floor_char_boundary(VERSION_LENGTH_MAX);
            let peer = Peer { namespace: namespace.into(), ..Peer::go(&version[..end]) };
            map.insert(agent.to_owned(), peer);
        }
    }

    fn recall(&self, agent: &str) -> Option<Peer> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(agent).cloned()
    }
}

/// A closure as the service of one call.
struct Call<F>(F);

impl<F, O, A, B> UnaryService<A> for Call<F>
where
    F: FnMut(tonic::Request<A>) -> O,
    O: Future<Output = Result<tonic::Response<B>, Status>>,
{
    type Response = B;
    type Future = O;

    fn call(&mut self, request: tonic::Request<A>) -> O {
        (self.0)(request)
    }
}

/// How long a refused Go agent is held.
const HOLD: Duration = Duration::from_secs(30);
/// Callers held at the same time; each costs an idle HTTP/2 stream.
const HELD_MAX: usize = 1024;
/// Of a request by a caller that nobody knows yet; a token is under 2 KiB.
const UNARY_MAX: usize = 64 << 10;
/// Agents whose version is remembered, and how much of it.
const VERSIONS_MAX: usize = 100_000;
const VERSION_LENGTH_MAX: usize = 64;
