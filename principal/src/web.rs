//! Health checks and metrics: plain HTTP/1.1.

use std::convert::Infallible;
use std::fmt::Write as _;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::{Response, StatusCode};
use http_body_util::Full;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;

use crate::hub::Hub;

/// How far the process is.
#[derive(Default)]
pub struct Phase(AtomicU8);

impl Phase {
    /// Agents can connect.
    pub fn serving(&self) {
        self.0.store(SERVING, Ordering::Relaxed);
    }

    /// No new work.
    pub fn draining(&self) {
        self.0.store(DRAINING, Ordering::Relaxed);
    }
}

/// Answers `/healthz`, `/livez` and `/readyz`.
pub fn health(phase: &Phase, path: &str) -> (StatusCode, String) {
    let phase = phase.0.load(Ordering::Relaxed);
    let good = match path {
        "/livez" => true,
        // The reference answers from the end of its start on, whatever happens later.
        "/healthz" => phase != STARTING,
        "/readyz" => phase == SERVING,
        _ => return (StatusCode::NOT_FOUND, String::new()),
    };
    (if good { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }, String::new())
}

/// Answers `/metrics`.
pub fn metrics(hub: &Hub, path: &str) -> (StatusCode, String) {
    if path != "/metrics" {
        return (StatusCode::NOT_FOUND, String::new());
    }
    let mut out = String::new();
    let mut metric = |name: &str, kind: &str, help: &str, samples: &[(String, u64)]| {
        // Writing to a String cannot fail.
        let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
        for (labels, value) in samples {
            let _ = writeln!(out, "{name}{labels} {value}");
        }
    };
    let plain = |value: u64| [(String::new(), value)];
    let build = format!("{{version=\"{}\",git_revision=\"unknown\"}}", crate::version::VERSION);
    metric("argocd_agent_build_info", "gauge", "Build of this process", &[(build, 1)]);
    let connected = hub.connected() as u64;
    metric("argocd_principal_connected_agents", "gauge", "Open event streams", &plain(connected));
    // Agent names are DNS labels: nothing in them needs escaping.
    let connections: Vec<_> = hub
        .connections()
        .into_iter()
        .map(|(name, count)| (format!("{{agent_name=\"{name}\"}}"), count))
        .collect();
    metric("argocd_principal_agent_connections_total", "counter", "Event streams opened", &connections);
    let totals = hub.totals();
    metric("principal_events_received", "counter", "Events received from agents", &plain(totals.received));
    metric("principal_events_sent", "counter", "Events sent to agents", &plain(totals.sent));
    let errors = [("{resource_type=\"application\"}".to_owned(), totals.errors)];
    metric("principal_errors", "counter", "Events that could not be applied at once", &errors);
    (StatusCode::OK, out)
}

/// Serves one of the above on all interfaces.
pub async fn listen(
    port: u16,
    what: &str,
    answer: impl Fn(&str) -> (StatusCode, String) + Send + Sync + 'static,
) -> Result<(), String> {
    let listener = match TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)).await {
        Ok(listener) => listener,
        // No IPv6 on this machine, or the port is taken: the second attempt tells.
        Err(_) => TcpListener::bind((Ipv4Addr::UNSPECIFIED, port))
            .await
            .map_err(|error| format!("cannot listen on --{what} {port}: {error}"))?,
    };
    let answer = Arc::new(answer);
    let connections = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    tokio::spawn(async move {
        loop {
            // The semaphore is never closed.
            let Ok(permit) = connections.clone().acquire_owned().await else { return };
            let Ok((stream, _)) = listener.accept().await else {
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            };
            let answer = answer.clone();
            tokio::spawn(async move {
                let service = service_fn(move |request: http::Request<hyper::body::Incoming>| {
                    let (status, text) = answer(request.uri().path());
                    async move {
                        let mut response = Response::new(Full::new(Bytes::from(text)));
                        *response.status_mut() = status;
                        let plain = http::HeaderValue::from_static("text/plain");
                        response.headers_mut().insert(http::header::CONTENT_TYPE, plain);
                        Ok::<_, Infallible>(response)
                    }
                });
                let serve = http1::Builder::new()
                    .timer(TokioTimer::new())
                    .header_read_timeout(HEADER_LIMIT)
                    .serve_connection(TokioIo::new(stream), service);
                // Whoever asked has gone: nothing to tell anybody.
                let _ = serve.await;
                drop(permit);
            });
        }
    });
    Ok(())
}

const STARTING: u8 = 0;
const SERVING: u8 = 1;
const DRAINING: u8 = 2;
const CONNECTIONS_MAX: usize = 64;
const HEADER_LIMIT: Duration = Duration::from_secs(30);
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn health_follows_the_phase() {
        let phase = Phase::default();
        let codes =
            |phase: &Phase| ["/livez", "/healthz", "/readyz"].map(|path| health(phase, path).0.as_u16());
        assert_eq!(codes(&phase), [200, 503, 503]);
        phase.serving();
        assert_eq!(codes(&phase), [200, 200, 200]);
        phase.draining();
        assert_eq!(codes(&phase), [200, 200, 503]);
        assert_eq!(health(&phase, "/debug/pprof").0, StatusCode::NOT_FOUND);
    }
}
