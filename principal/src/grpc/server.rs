//! The listener: TCP, TLS, HTTP/2.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use rustls::ServerConfig;
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio_rustls::TlsAcceptor;

use super::{ClientCertificate, Connection, Services};
use crate::auth::dn;

/// Binds `--listen-host` and `--listen-port`; no host: all interfaces, of both address families where there are two.
pub async fn bind(host: &str, port: u16) -> Result<TcpListener, String> {
    if host.is_empty() {
        let both = TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)).await;
        let listener = match both {
            Ok(listener) => Ok(listener),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => Err(error),
            // No IPv6 on this machine.
            Err(_) => TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).await,
        };
        return listener.map_err(|error| format!("cannot listen on port {port}: {error}"));
    }
    let address = format!("{host}:{port}");
    TcpListener::bind(&address).await.map_err(|error| format!("cannot listen on {address}: {error}"))
}

/// Accepts until `stop` says so; then each connection takes no new calls and closes when its calls are done.
pub async fn serve(
    listener: TcpListener,
    tls: Option<Arc<ServerConfig>>,
    services: Arc<Services>,
    mut stop: watch::Receiver<bool>,
) {
    let handshakes = Arc::new(Semaphore::new(HANDSHAKES_MAX));
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = stopping(&mut stop) => return,
        };
        let (stream, address) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                // Out of file descriptors, mostly: others must close first.
                tracing::warn!("cannot accept a connection: {error}");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        if let Err(error) = prepare(&stream) {
            tracing::debug!(%address, "socket options: {error}");
        }
        // The semaphore is never closed.
        let Ok(permit) = handshakes.clone().acquire_owned().await else { return };
        let (tls, services, stop) = (tls.clone(), services.clone(), stop.clone());
        tokio::spawn(async move {
            let Some(config) = tls else {
                drop(permit);
                let connection = Connection { address: address.to_string(), certificate: None };
                return http(stream, connection, services, stop).await;
            };
            let handshake =
                tokio::time::timeout(HANDSHAKE_LIMIT, TlsAcceptor::from(config).accept(stream)).await;
            drop(permit);
            match handshake {
                Ok(Ok(stream)) => {
                    let session = stream.get_ref().1;
                    if session.alpn_protocol() != Some(b"h2") {
                        tracing::warn!(%address, "connection refused: the client does not negotiate h2 (ALPN)");
                        return;
                    }
                    let certificate =
                        session.peer_certificates().and_then(|chain| chain.first()).map(|leaf| {
                            let der = leaf.as_ref().to_vec();
                            let (fingerprint, names) = (crate::tls::fingerprint(&der), dn::names(&der));
                            ClientCertificate { der, fingerprint, names }
                        });
                    let connection = Connection { address: address.to_string(), certificate };
                    http(stream, connection, services, stop).await;
                }
                Ok(Err(error)) => tracing::warn!(%address, "TLS handshake failed: {error}{}", hint(&error)),
                Err(_) => {
                    tracing::warn!(%address, "TLS handshake took longer than {} s", HANDSHAKE_LIMIT.as_secs())
                }
            }
        });
    }
}

async fn http(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    connection: Connection,
    services: Arc<Services>,
    mut stop: watch::Receiver<bool>,
) {
    let connection = Arc::new(connection);
    let service = {
        let connection = connection.clone();
        service_fn(move |request| services.clone().call(connection.clone(), request))
    };
    let mut builder = http2::Builder::new(TokioExecutor::new());
    builder
        .timer(TokioTimer::new())
        // One stream per agent and a few unary calls.
        .max_concurrent_streams(64)
        .keep_alive_interval(Some(KEEPALIVE_INTERVAL))
        .keep_alive_timeout(KEEPALIVE_TIMEOUT);
    let served = builder.serve_connection(TokioIo::new(stream), service);
    let mut served = std::pin::pin!(served);
    let result = tokio::select! {
        result = served.as_mut() => result,
        () = stopping(&mut stop) => {
            served.as_mut().graceful_shutdown();
            served.await
        }
    };
    if let Err(error) = result {
        tracing::debug!(address = connection.address, "connection ended: {error}");
    }
}

/// Returns when the principal stops.
async fn stopping(stop: &mut watch::Receiver<bool>) {
    // A sender that is gone has stopped too. The guard must not live across an await.
    let _ = stop.wait_for(|stop| *stop).await.map(|_| ());
}

/// A site that loses power leaves a dead connection behind: the kernel finds out, without a byte while all is well
/// but one probe every five minutes.
fn prepare(stream: &TcpStream) -> io::Result<()> {
    let socket = SockRef::from(stream);
    socket.set_tcp_nodelay(true)?;
    socket.set_tcp_keepalive(
        &TcpKeepalive::new()
            .with_time(Duration::from_secs(300))
            .with_interval(Duration::from_secs(30))
            .with_retries(4),
    )?;
    #[cfg(target_os = "linux")]
    socket.set_tcp_user_timeout(Some(Duration::from_secs(120)))?;
    Ok(())
}

fn hint(error: &io::Error) -> &'static str {
    use rustls::{CertificateError, Error, PeerIncompatible};
    match error.get_ref().and_then(|inner| inner.downcast_ref::<Error>()) {
        Some(Error::NoCertificatesPresented) => "; the agent must show a client certificate",
        Some(Error::InvalidCertificate(CertificateError::UnknownIssuer)) => {
            "; the client certificate is not from the CA in --tls-ca-secret-name or --root-ca-path"
        }
        Some(Error::InvalidCertificate(
            CertificateError::Expired | CertificateError::ExpiredContext { .. },
        )) => "; the client certificate has expired: issue a new one",
        Some(Error::InvalidCertificate(
            CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. },
        )) => "; the client certificate is not valid yet: check the clock on both sides",
        Some(Error::PeerIncompatible(PeerIncompatible::Tls13RequiredForQuic))
        | Some(Error::PeerIncompatible(PeerIncompatible::SupportedVersionsExtensionRequired)) => {
            "; the agent does not speak the TLS version that --tls-min-version asks for"
        }
        Some(Error::AlertReceived(_)) => {
            "; the agent refuses our certificate: it must trust the CA, and the name it dials must be in the certificate"
        }
        _ => "",
    }
}

/// Handshakes in progress: each costs memory and processor time before anybody is known.
const HANDSHAKES_MAX: usize = 256;
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(20);
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// As grpc-go's server: rare enough not to wake a metered link.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(2 * 3600);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(20);

/// The address a listener got, for the log.
pub fn local(listener: &TcpListener) -> String {
    listener.local_addr().as_ref().map_or_else(|_| String::new(), SocketAddr::to_string)
}
