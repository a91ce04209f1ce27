//! `/healthz`, `/livez`, `/readyz` and `/metrics`: what probes and Prometheus ask.
//!
//! By hand: an answer is one line and the server side of an HTTP library costs more than the rest of this file.

use std::cell::Cell;
use std::fmt::Write as _;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::rc::Rc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

use crate::args::VERSION;

/// What the loop knows and probes ask.
#[derive(Debug, Default)]
pub(crate) struct Status {
    pub(crate) connected: Cell<bool>,
    pub(crate) synced: Cell<bool>,
    /// Unix time of the last connect.
    pub(crate) connected_since: Cell<u64>,
    pub(crate) connections: Cell<u64>,
    pub(crate) auth_failures: Cell<u64>,
    pub(crate) events_received: Cell<u64>,
    pub(crate) events_sent: Cell<u64>,
    open: Cell<u32>,
}

/// Which paths a listener answers.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pages {
    Probes,
    Metrics,
}

/// Listens on all addresses and answers for ever.
pub(crate) async fn serve(port: u16, pages: Pages, status: Rc<Status>) -> std::io::Error {
    let listener = match TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)).await {
        Ok(listener) => listener,
        // No IPv6 on this machine, or the port is taken, which this says again.
        Err(_) => match TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).await {
            Ok(listener) => listener,
            Err(error) => return error,
        },
    };
    loop {
        match listener.accept().await {
            // Nobody who may ask needs more at once; the rest is dropped.
            Ok((stream, _)) if status.open.get() < MAX_OPEN => {
                let status = Rc::clone(&status);
                tokio::task::spawn_local(async move {
                    status.open.set(status.open.get() + 1);
                    let _ = timeout(LIMIT, answer(stream, pages, &status)).await;
                    status.open.set(status.open.get() - 1);
                });
            }
            Ok(_) => {}
            // Out of file descriptors, for example: it passes.
            Err(_) => tokio::time::sleep(Duration::from_secs(1)).await,
        }
    }
}

async fn answer(mut stream: TcpStream, pages: Pages, status: &Status) -> std::io::Result<()> {
    let mut request = [0; 1024];
    let mut filled = 0;
    loop {
        let count = stream.read(&mut request[filled..]).await?;
        filled += count;
        let head = &request[..filled];
        // Large heads are read no further: the first line is all that counts.
        if head.windows(4).any(|end| end == b"\r\n\r\n") || filled == request.len() {
            break;
        }
        if count == 0 {
            return Ok(());
        }
    }
    let line = request[..filled].split(|byte| *byte == b'\r').next().unwrap_or_default();
    let mut words = line.split(|byte| *byte == b' ').skip(1);
    let path = words.next().unwrap_or_default().split(|byte| *byte == b'?').next().unwrap_or_default();
    let (code, body) = match (pages, path) {
        (Pages::Probes, b"/healthz") => (if status.connected.get() { 200 } else { 503 }, String::new()),
        (Pages::Probes, b"/readyz") => (if status.synced.get() { 200 } else { 503 }, String::new()),
        (Pages::Probes, b"/livez") => (200, String::new()),
        (Pages::Metrics, b"/metrics") => (200, metrics(status)),
        _ => (404, String::new()),
    };
    let reason = match code {
        200 => "OK",
        503 => "Service Unavailable",
        _ => "Not Found",
    };
    let answer = format!(
        "HTTP/1.1 {code} {reason}\r\nContent-Type: text/plain\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(answer.as_bytes()).await?;
    stream.shutdown().await
}

/// The reference's names, as far as there is something to tell.
fn metrics(status: &Status) -> String {
    let connected = u64::from(status.connected.get());
    let values = [
        ("agent_events_received", "counter", status.events_received.get()),
        ("agent_events_sent", "counter", status.events_sent.get()),
        ("argocd_agent_connection_status", "gauge", connected),
        (
            "argocd_agent_connection_start_timestamp_seconds",
            "gauge",
            connected * status.connected_since.get(),
        ),
        ("argocd_agent_connections_total", "counter", status.connections.get()),
        ("argocd_agent_auth_failures_total", "counter", status.auth_failures.get()),
    ];
    let mut out = String::with_capacity(1024);
    for (name, kind, value) in values {
        // Writing to a String cannot fail.
        let _ = writeln!(out, "# TYPE {name} {kind}\n{name} {value}");
    }
    let _ = writeln!(
        out,
        "# TYPE argocd_agent_build_info gauge\nargocd_agent_build_info{{version=\"{VERSION}\",git_revision=\"{}\"}} 1",
        option_env!("GIT_REVISION").unwrap_or("unknown")
    );
    out
}

const MAX_OPEN: u32 = 8;

const LIMIT: Duration = Duration::from_secs(5);
