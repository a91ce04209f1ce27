//! One HTTP/2 connection to the principal.

use std::future::{pending, poll_fn};
use std::sync::Arc;

use agent_core::session::{Failure, code};
use bytes::Bytes;
use h2::client::{ResponseFuture, SendRequest};
use h2::{RecvStream, SendStream};
use http::header::{AUTHORIZATION, CONTENT_TYPE, TE, USER_AGENT};
use http::{HeaderMap, HeaderValue, Method, Request, StatusCode};
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::mpsc;
use tokio_rustls::TlsConnector;

use super::framing::{Decoder, encode};
use super::status;
use crate::net;

/// What every connection needs.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) host: String,
    pub(crate) port: u16,
    pub(crate) user_agent: String,
    /// Metadata that says who we are.
    pub(crate) peer_header: String,
    pub(crate) max_message: usize,
    pub(crate) compress: bool,
}

/// A connection.
#[derive(Clone)]
pub(crate) struct Channel {
    requests: SendRequest<Bytes>,
    settings: Arc<Settings>,
    scheme: &'static str,
}

/// An answer to a unary call.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) message: Vec<u8>,
    /// Its [`agent_core::peer::HEADER`], if any.
    pub(crate) peer: Option<String>,
}

impl Channel {
    /// Connects; without `tls` in plain text.
    pub(crate) async fn dial(
        settings: Arc<Settings>,
        tls: Option<Arc<ClientConfig>>,
    ) -> Result<Self, Failure> {
        let Settings { host, port, .. } = &*settings;
        let stream = net::connect(host, *port, &net::PRINCIPAL).await.map_err(Failure::transport)?;
        let Some(tls) = tls else { return Self::handshake(settings, stream, "http").await };
        let name = host.trim_matches(['[', ']']).to_owned();
        let server_name = ServerName::try_from(name)
            .map_err(|_| Failure::transport(format!("--server-address {host:?} is no host name")))?;
        let stream = TlsConnector::from(tls).connect(server_name, stream).await.map_err(|error| {
            let (text, clock) = net::tls_error(&error);
            Failure { clock, ..Failure::transport(format!("TLS with {host}:{port}: {text}")) }
        })?;
        if stream.get_ref().1.alpn_protocol() != Some(b"h2") {
            return Err(Failure::transport(format!(
                "{host}:{port} does not speak HTTP/2 over TLS: is something between agent and principal?"
            )));
        }
        Self::handshake(settings, stream, "https").await
    }

    async fn handshake(
        settings: Arc<Settings>,
        stream: impl AsyncRead + AsyncWrite + Unpin + 'static,
        scheme: &'static str,
    ) -> Result<Self, Failure> {
        let (requests, connection) = h2::client::Builder::new()
            .initial_window_size(WINDOW)
            .initial_connection_window_size(WINDOW)
            .max_header_list_size(MAX_HEADERS)
            .max_send_buffer_size(SEND_BUFFER)
            .enable_push(false)
            .handshake::<_, Bytes>(stream)
            .await
            .map_err(|error| status::from_h2(&error))?;
        // Its errors reach the calls.
        tokio::task::spawn_local(async move {
            let _ = connection.await;
        });
        Ok(Self { requests, settings, scheme })
    }

    /// A unary call.
    pub(crate) async fn unary(
        &self,
        path: &str,
        token: Option<&str>,
        message: &[u8],
    ) -> Result<Answer, Failure> {
        let (response, mut send) = self.start(path, token).await?;
        let frame = encode(message, self.settings.compress);
        send_all(&mut send, frame, true).await.map_err(|error| status::from_h2(&error))?;
        let (mut body, peer, mut decoder) = self.head(response).await?;
        let mut message = None;
        while let Some(chunk) = body.data().await {
            let chunk = chunk.map_err(|error| status::from_h2(&error))?;
            decoder.push(&chunk);
            release(&mut body, chunk.len());
            while let Some(next) =
                decoder.next().map_err(|e| Failure::status(code::INTERNAL, e.to_string()))?
            {
                if message.replace(next).is_some() {
                    return Err(Failure::status(code::INTERNAL, "more than one answer to a call"));
                }
            }
        }
        match (end(&mut body).await, message) {
            (Failure { code: Some(code::OK), .. }, Some(message)) => Ok(Answer { message, peer }),
            (Failure { code: Some(code::OK), .. }, None) => {
                Err(Failure::status(code::INTERNAL, "a call without an answer"))
            }
            (failure, _) => Err(failure),
        }
    }

    /// Opens a stream of messages both ways and pumps until it ends. Messages of the peer go to `incoming`, which is
    /// waited for, so that the peer is slowed down by flow control. When `outgoing` closes, the stream is half-closed.
    pub(crate) async fn stream(
        &self,
        path: &str,
        token: &str,
        mut outgoing: mpsc::Receiver<Vec<u8>>,
        incoming: impl AsyncFn(Vec<u8>),
    ) -> Failure {
        let (response, mut send) = match self.start(path, Some(token)).await {
            Ok(started) => started,
            Err(failure) => return failure,
        };
        let compress = self.settings.compress;
        let sending = async {
            while let Some(message) = outgoing.recv().await {
                if send_all(&mut send, encode(&message, compress), false).await.is_err() {
                    // The receiving half learns why.
                    return pending().await;
                }
            }
            let _ = send.send_data(Bytes::new(), true);
            pending::<()>().await;
        };
        let receiving = async {
            let (mut body, _, mut decoder) = match self.head(response).await {
                Ok(head) => head,
                Err(failure) => return failure,
            };
            while let Some(chunk) = body.data().await {
                let chunk = match chunk {
                    Ok(chunk) => chunk,
                    Err(error) => return status::from_h2(&error),
                };
                decoder.push(&chunk);
                loop {
                    match decoder.next() {
                        Ok(Some(message)) => incoming(message).await,
                        Ok(None) => break,
                        Err(error) => return Failure::status(code::RESOURCE_EXHAUSTED, error.to_string()),
                    }
                }
                release(&mut body, chunk.len());
            }
            if decoder.is_between() {
                return Failure::transport("the event stream ended inside a message");
            }
            end(&mut body).await
        };
        tokio::select! {
            failure = receiving => failure,
            () = sending => Failure::transport("the event stream ended"),
        }
    }

    async fn start(
        &self,
        path: &str,
        token: Option<&str>,
    ) -> Result<(ResponseFuture, SendStream<Bytes>), Failure> {
        let Settings { host, port, user_agent, peer_header, compress, .. } = &*self.settings;
        let unusable = |what: &str| Failure::transport(format!("{what} cannot be sent in a header"));
        let mut request = Request::new(());
        *request.method_mut() = Method::POST;
        let is_bare = host.contains(':') && !host.starts_with('[');
        let host = if is_bare { format!("[{host}]") } else { host.clone() };
        *request.uri_mut() = format!("{}://{host}:{port}{path}", self.scheme)
            .try_into()
            .map_err(|_| unusable("--server-address"))?;
        let headers = request.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
        headers.insert(TE, HeaderValue::from_static("trailers"));
        headers.insert(USER_AGENT, header(user_agent).ok_or_else(|| unusable("the User-Agent"))?);
        headers.insert("grpc-accept-encoding", HeaderValue::from_static("gzip"));
        if *compress {
            headers.insert("grpc-encoding", HeaderValue::from_static("gzip"));
        }
        headers.insert(agent_core::peer::HEADER, header(peer_header).ok_or_else(|| unusable("the version"))?);
        if let Some(token) = token {
            let mut value = header(token).ok_or_else(|| unusable("the principal's token"))?;
            value.set_sensitive(true);
            headers.insert(AUTHORIZATION, value);
        }
        let mut requests = self.requests.clone().ready().await.map_err(|error| status::from_h2(&error))?;
        requests.send_request(request, false).map_err(|error| status::from_h2(&error))
    }

    async fn head(&self, response: ResponseFuture) -> Result<(RecvStream, Option<String>, Decoder), Failure> {
        let response = response.await.map_err(|error| status::from_h2(&error))?;
        let (parts, body) = response.into_parts();
        if let Some(failure) = status::from_headers(&parts.headers).filter(|_| body.is_end_stream()) {
            return Err(failure);
        }
        let is_grpc = text(&parts.headers, "content-type").is_some_and(|t| t.starts_with("application/grpc"));
        if parts.status != StatusCode::OK || !is_grpc {
            return Err(status::from_http(parts.status));
        }
        let gzip = text(&parts.headers, "grpc-encoding") == Some("gzip");
        let peer = text(&parts.headers, agent_core::peer::HEADER).map(str::to_owned);
        Ok((body, peer, Decoder::new(self.settings.max_message, gzip)))
    }
}

/// The status in the trailers of a body that was read to its end.
async fn end(body: &mut RecvStream) -> Failure {
    match body.trailers().await {
        Ok(Some(trailers)) => status::from_headers(&trailers)
            .unwrap_or_else(|| Failure::status(code::INTERNAL, "trailers without a status")),
        Ok(None) => Failure::status(code::INTERNAL, "the stream ended without a status"),
        Err(error) => status::from_h2(&error),
    }
}

/// Sends as much as the peer's window and our buffer take, and waits for more.
async fn send_all(send: &mut SendStream<Bytes>, mut bytes: Bytes, last: bool) -> Result<(), h2::Error> {
    while !bytes.is_empty() {
        send.reserve_capacity(bytes.len().min(SEND_BUFFER));
        let capacity = match poll_fn(|context| send.poll_capacity(context)).await {
            Some(capacity) => capacity?,
            None => return Err(h2::Reason::STREAM_CLOSED.into()),
        };
        let piece = bytes.split_to(capacity.min(bytes.len()));
        let end = last && bytes.is_empty();
        send.send_data(piece, end)?;
    }
    Ok(())
}

fn release(body: &mut RecvStream, count: usize) {
    // Fails only if more is released than was received.
    let _ = body.flow_control().release_capacity(count);
}

fn header(text: &str) -> Option<HeaderValue> {
    HeaderValue::from_str(text).ok()
}

fn text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

/// Bytes that the peer may send ahead of us: enough for a link of 20 Mbit/s and 100 ms.
const WINDOW: u32 = 256 << 10;

/// Bytes of ours that wait in the connection; the rest stays where it came from.
const SEND_BUFFER: usize = 64 << 10;

const MAX_HEADERS: u32 = 16 << 10;

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;
    use std::rc::Rc;

    use h2::Reason;
    use h2::server::SendResponse;
    use http::Response;
    use tokio::io::DuplexStream;

    type Server = h2::server::Connection<DuplexStream, Bytes>;

    fn settings(max_message: usize) -> Arc<Settings> {
        Arc::new(Settings {
            host: "hub".into(),
            port: 443,
            user_agent: "test/1".into(),
            peer_header: "v=1;i=2".into(),
            max_message,
            compress: false,
        })
    }

    /// Runs `client` against a server that gives its first request to `server` and serves frames on.
    async fn pair<T>(
        max_message: usize,
        window: u32,
        server: impl AsyncFnOnce(Request<RecvStream>, SendResponse<Bytes>, Server) + 'static,
        client: impl AsyncFnOnce(Channel) -> T,
    ) -> T {
        let (near, far) = tokio::io::duplex(64 << 10);
        tokio::task::LocalSet::new()
            .run_until(async move {
                tokio::task::spawn_local(async move {
                    let mut connection = h2::server::Builder::new()
                        .initial_window_size(window)
                        .handshake::<_, Bytes>(far)
                        .await
                        .unwrap();
                    let (request, respond) = connection.accept().await.unwrap().unwrap();
                    server(request, respond, connection).await;
                });
                let channel = Channel::handshake(settings(max_message), near, "https").await.unwrap();
                client(channel).await
            })
            .await
    }

    fn head() -> Response<()> {
        Response::builder().header("content-type", "application/grpc").body(()).unwrap()
    }

    fn trailers(status: &str) -> HeaderMap {
        let mut trailers = HeaderMap::new();
        trailers.insert("grpc-status", status.parse().unwrap());
        trailers.insert("grpc-message", HeaderValue::from_static("caf%C3%A9"));
        trailers
    }

    async fn serve_on(mut connection: Server) {
        while connection.accept().await.is_some() {}
    }

    /// How an event stream ends when the server does this.
    async fn stream_end(server: impl AsyncFnOnce(SendResponse<Bytes>, &mut Server) + 'static) -> Failure {
        let client = async |channel: Channel| {
            let (_outgoing, receiver) = mpsc::channel(1);
            channel.stream("/s/S", "token", receiver, async |_| {}).await
        };
        let server = async |_: Request<RecvStream>, respond: SendResponse<Bytes>, mut connection: Server| {
            server(respond, &mut connection).await;
            serve_on(connection).await;
        };
        pair(100, 65_535, server, client).await
    }

    #[tokio::test(start_paused = true)]
    async fn every_end_is_a_failure_with_its_cause() {
        let failure = stream_end(async |mut respond, _| {
            let mut send = respond.send_response(head(), false).unwrap();
            send.send_trailers(trailers("14")).unwrap();
        })
        .await;
        assert_eq!(failure, Failure::status(code::UNAVAILABLE, "caf\u{e9}"));

        let failure = stream_end(async |mut respond, _| {
            let mut response = head();
            response.headers_mut().extend(trailers("16"));
            respond.send_response(response, true).unwrap();
        })
        .await;
        assert_eq!(failure.code, Some(code::UNAUTHENTICATED));

        let failure = stream_end(async |mut respond, _| {
            let mut send = respond.send_response(head(), false).unwrap();
            send.send_data(Bytes::new(), true).unwrap();
        })
        .await;
        assert_eq!(failure, Failure::status(code::INTERNAL, "the stream ended without a status"));

        for (reason, number) in [
            (Reason::INTERNAL_ERROR, code::INTERNAL),
            (Reason::CANCEL, code::CANCELLED),
            (Reason::REFUSED_STREAM, code::UNAVAILABLE),
            (Reason::ENHANCE_YOUR_CALM, code::RESOURCE_EXHAUSTED),
        ] {
            let failure = stream_end(async move |mut respond, _| respond.send_reset(reason)).await;
            assert_eq!(failure.code, Some(number), "{failure}");
        }

        let failure = stream_end(async |_, connection| {
            connection.abrupt_shutdown(Reason::ENHANCE_YOUR_CALM);
        })
        .await;
        // The stream was taken on before, so it ends with the connection.
        assert_eq!(failure.code, None, "{failure}");

        let failure = stream_end(async |mut respond, _| {
            let mut send = respond.send_response(head(), false).unwrap();
            send.send_data(Bytes::from_static(&[0, 0, 0, 0, 101]), false).unwrap();
            // Dropped, it would reset the stream.
            std::mem::forget(send);
        })
        .await;
        assert_eq!(failure.code, Some(code::RESOURCE_EXHAUSTED), "{failure}");

        let failure = stream_end(async |mut respond, _| {
            let response = Response::builder().status(502).body(()).unwrap();
            respond.send_response(response, true).unwrap();
        })
        .await;
        assert_eq!(failure, Failure::status(code::UNAVAILABLE, "HTTP 502 Bad Gateway instead of gRPC"));
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_that_breaks_ends_the_stream() {
        let failure = pair(
            100,
            65_535,
            async |_, _, connection| drop(connection),
            async |channel| {
                let (_outgoing, receiver) = mpsc::channel(1);
                channel.stream("/s/S", "token", receiver, async |_| {}).await
            },
        )
        .await;
        assert_eq!(failure.code, None, "{failure}");
    }

    #[tokio::test(start_paused = true)]
    async fn large_messages_pass_small_windows_both_ways() {
        let big = 300 << 10;
        let server = async move |request: Request<RecvStream>,
                                 mut respond: SendResponse<Bytes>,
                                 connection: Server| {
            assert_eq!(request.headers()["te"], "trailers");
            assert_eq!(request.headers()["authorization"], "token");
            assert_eq!(request.headers()["user-agent"], "test/1");
            assert_eq!(request.headers()[agent_core::peer::HEADER], "v=1;i=2");
            assert_eq!(request.uri().path(), "/s/S");
            tokio::task::spawn_local(serve_on(connection));
            let mut body = request.into_body();
            let mut send = respond.send_response(head(), false).unwrap();
            let mut decoder = Decoder::new(usize::MAX, false);
            while let Some(chunk) = body.data().await {
                let chunk = chunk.unwrap();
                decoder.push(&chunk);
                release(&mut body, chunk.len());
                while let Some(message) = decoder.next().unwrap() {
                    send_all(&mut send, encode(&message, false), false).await.unwrap();
                }
            }
            // The half-close is answered.
            send.send_trailers(trailers("0")).unwrap();
        };
        let got = Rc::new(RefCell::new(Vec::new()));
        let seen = Rc::clone(&got);
        let failure = pair(1 << 20, 1024, server, async move |channel| {
            let (outgoing, receiver) = mpsc::channel(1);
            let outgoing = RefCell::new(Some(outgoing));
            let first = outgoing.borrow().clone().unwrap();
            first.send(vec![7; big]).await.unwrap();
            drop(first);
            channel
                .stream("/s/S", "token", receiver, async |message| {
                    seen.borrow_mut().push(message);
                    outgoing.borrow_mut().take();
                })
                .await
        })
        .await;
        assert_eq!(failure.code, Some(code::OK), "{failure}");
        assert_eq!(*got.borrow(), [vec![7; big]]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_reader_slows_the_sender_down() {
        let server = async |_: Request<RecvStream>, mut respond: SendResponse<Bytes>, connection: Server| {
            tokio::task::spawn_local(serve_on(connection));
            let mut send = respond.send_response(head(), false).unwrap();
            let frame = encode(&[1; 1000], false);
            loop {
                if send_all(&mut send, frame.clone(), false).await.is_err() {
                    return;
                }
            }
        };
        let count = Rc::new(RefCell::new(0));
        let seen = Rc::clone(&count);
        pair(1 << 20, 65_535, server, async move |channel| {
            let (_outgoing, receiver) = mpsc::channel(1);
            let stream = channel.stream("/s/S", "token", receiver, async |_| {
                *seen.borrow_mut() += 1;
                tokio::time::sleep(std::time::Duration::from_secs(1)).await;
            });
            let limit = std::time::Duration::from_secs(100);
            assert!(tokio::time::timeout(limit, stream).await.is_err());
        })
        .await;
        assert!((90..=101).contains(&*count.borrow()), "{}", count.borrow());
    }

    #[tokio::test(start_paused = true)]
    async fn unary_answers() {
        let answer = |bytes: &'static [u8], status: &'static str| {
            pair(
                100,
                65_535,
                async move |_: Request<RecvStream>, mut respond: SendResponse<Bytes>, connection: Server| {
                    let mut response = head();
                    response.headers_mut().insert(agent_core::peer::HEADER, HeaderValue::from_static("i=9"));
                    let mut send = respond.send_response(response, false).unwrap();
                    send.send_data(Bytes::from_static(bytes), false).unwrap();
                    send.send_trailers(trailers(status)).unwrap();
                    serve_on(connection).await;
                },
                async |channel| channel.unary("/s/U", None, b"").await,
            )
        };
        let good = answer(&[0, 0, 0, 0, 2, 5, 6], "0").await.unwrap();
        assert_eq!((good.message, good.peer.as_deref()), (vec![5, 6], Some("i=9")));
        for (bytes, status, part) in [
            (&[0, 0, 0, 0, 0][..], "9", "FAILED_PRECONDITION: caf\u{e9}"),
            (&[], "0", "without an answer"),
            (&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0], "0", "more than one"),
            (&[0, 9, 9, 9, 9], "0", "--grpc-max-message-size"),
            (&[1, 0, 0, 0, 0], "0", "not gzip"),
        ] {
            let failure = answer(bytes, status).await.unwrap_err();
            assert!(failure.to_string().contains(part), "{failure}");
        }
    }
}
