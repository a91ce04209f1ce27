//! TCP connections that notice when the other end is gone.

use std::io;
use std::net::IpAddr;
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::net::TcpStream;

/// Connects to the first address of `host` that answers.
///
/// An address needs no resolver; a name is resolved on a helper thread that lives for a second (the C library has no
/// other way). Every error names the host.
pub(crate) async fn connect(host: &str, port: u16, keepalive: &Keepalive) -> Result<TcpStream, String> {
    let name = host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(host);
    let stream = match name.parse::<IpAddr>() {
        Ok(address) => TcpStream::connect((address, port)).await,
        Err(_) => {
            let addresses = tokio::net::lookup_host((name, port))
                .await
                .map_err(|error| format!("cannot resolve {name}: {error}"))?;
            let mut last = Err(io::Error::new(io::ErrorKind::NotFound, "no addresses"));
            for address in addresses {
                last = match tokio::time::timeout(ADDRESS_LIMIT, TcpStream::connect(address)).await {
                    Ok(outcome) => {
                        outcome.map_err(|error| io::Error::new(error.kind(), format!("{address}: {error}")))
                    }
                    Err(_) => {
                        Err(io::Error::new(io::ErrorKind::TimedOut, format!("{address} does not answer")))
                    }
                };
                if last.is_ok() {
                    break;
                }
            }
            last
        }
    }
    .map_err(|error| format!("cannot connect to {host}:{port}: {error}"))?;
    // Options that the kernel refuses make a worse connection, not a useless one.
    let _ = stream.set_nodelay(true);
    let socket = SockRef::from(&stream);
    let _ = socket.set_tcp_keepalive(
        &TcpKeepalive::new().with_time(keepalive.idle).with_interval(keepalive.interval).with_retries(3),
    );
    let _ = socket.set_tcp_user_timeout(Some(keepalive.unacknowledged));
    Ok(stream)
}

/// For one of several addresses: below the limits of every caller, so that the next one has its turn, as where IPv6 is announced
/// and does not work.
const ADDRESS_LIMIT: Duration = Duration::from_secs(6);

/// When a silent peer counts as dead.
pub(crate) struct Keepalive {
    idle: Duration,
    interval: Duration,
    unacknowledged: Duration,
}

/// Towards the principal, often over a radio link where each probe costs energy. HTTP/2 pings are no choice: the
/// reference principal hangs up on clients that send one more often than every five minutes.
pub(crate) const PRINCIPAL: Keepalive = Keepalive {
    idle: Duration::from_secs(120),
    interval: Duration::from_secs(20),
    unacknowledged: Duration::from_secs(60),
};

/// Towards the API server, most often on the same machine.
pub(crate) const API_SERVER: Keepalive = Keepalive {
    idle: Duration::from_secs(30),
    interval: Duration::from_secs(10),
    unacknowledged: Duration::from_secs(30),
};

/// A failed TLS connection in words, and whether a clock may be to blame.
pub(crate) fn tls_error(error: &io::Error) -> (String, bool) {
    match error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
        Some(error) => (crate::tls::explain(error), crate::tls::is_clock_problem(error)),
        None => (error.to_string(), false),
    }
}
