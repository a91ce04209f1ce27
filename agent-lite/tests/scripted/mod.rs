//! A principal and an API server that follow a script, for the real binary.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderMap, Response};
use prost::Message;
use proto::auth::{AUTHENTICATE, AuthRequest, AuthResponse};
use proto::eventstream::SUBSCRIBE;
use proto::version::{VERSION, VersionResponse};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

/// Nothing here takes longer, however busy the machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// What the principal saw.
#[derive(Debug)]
pub(crate) enum Seen {
    Connection,
    Authenticate(AuthRequest, HeaderMap),
    Subscribe(HeaderMap),
    /// One message on the event stream, without its prefix.
    Frame(Vec<u8>),
    /// The agent closed its half.
    HalfClose,
}

/// What the principal does with the open event stream.
#[derive(Debug)]
pub(crate) enum Do {
    Send(Vec<u8>),
    /// Raw bytes instead of a framed message.
    Raw(Vec<u8>),
    End(u32),
    /// Drops the TCP connection.
    HangUp,
}

/// A principal in plain text.
pub(crate) struct Hub {
    pub(crate) port: u16,
    seen: Receiver<Seen>,
    acts: UnboundedSender<Do>,
    /// Answers to the next Authenticate calls; then they succeed.
    pub(crate) refusals: Arc<Mutex<VecDeque<(u32, &'static str)>>>,
}

impl Hub {
    pub(crate) fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let port = listener.local_addr().unwrap().port();
        let (saw, seen) = channel();
        let (acts, todo) = unbounded_channel();
        let refusals = Arc::new(Mutex::new(VecDeque::new()));
        let shared = Arc::clone(&refusals);
        thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            tokio::task::LocalSet::new().block_on(&runtime, serve(listener, saw, todo, shared));
        });
        Self { port, seen, acts, refusals }
    }

    pub(crate) fn act(&self, act: Do) {
        self.acts.send(act).unwrap();
    }

    /// The next thing seen that `pick` wants.
    pub(crate) fn wait<T>(&self, what: &str, mut pick: impl FnMut(Seen) -> Option<T>) -> T {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.seen.recv_timeout(left) {
                Ok(seen) => {
                    if let Some(found) = pick(seen) {
                        return found;
                    }
                }
                Err(_) => panic!("the principal never saw {what}"),
            }
        }
    }

    pub(crate) fn wait_subscribe(&self) -> HeaderMap {
        self.wait("Subscribe", |seen| match seen {
            Seen::Subscribe(headers) => Some(headers),
            _ => None,
        })
    }

    pub(crate) fn wait_frame(&self) -> Vec<u8> {
        self.wait("a frame", |seen| match seen {
            Seen::Frame(frame) => Some(frame),
            _ => None,
        })
    }
}

type Refusals = Arc<Mutex<VecDeque<(u32, &'static str)>>>;

async fn serve(
    listener: TcpListener,
    saw: Sender<Seen>,
    mut todo: UnboundedReceiver<Do>,
    refusals: Refusals,
) {
    let listener = tokio::net::TcpListener::from_std(listener).unwrap();
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        let _ = saw.send(Seen::Connection);
        let mut connection = h2::server::handshake(stream).await.unwrap();
        let (subscribed, mut subscription) = unbounded_channel();
        let (saw, refusals) = (saw.clone(), Arc::clone(&refusals));
        let driver = tokio::task::spawn_local(async move {
            while let Some(Ok((request, respond))) = connection.accept().await {
                let (parts, body) = request.into_parts();
                let saw = saw.clone();
                match parts.uri.path() {
                    VERSION => {
                        let version = "argocd-agent-9.9.9".into();
                        answer(respond, &VersionResponse { version }.encode_to_vec());
                    }
                    AUTHENTICATE => {
                        let refusals = Arc::clone(&refusals);
                        tokio::task::spawn_local(async move {
                            let message = read_message(body).await;
                            let request = AuthRequest::decode(&*message).unwrap();
                            let _ = saw.send(Seen::Authenticate(request, parts.headers));
                            let refusal = refusals.lock().unwrap().pop_front();
                            match refusal {
                                Some((code, message)) => refuse(respond, code, message),
                                None => answer(respond, &auth_response().encode_to_vec()),
                            }
                        });
                    }
                    SUBSCRIBE => {
                        let _ = saw.send(Seen::Subscribe(parts.headers));
                        let _ = subscribed.send(respond);
                        tokio::task::spawn_local(read_frames(body, saw));
                    }
                    other => panic!("unexpected call {other}"),
                }
            }
        });
        // One event stream for each connection, and one connection at a time.
        let Some(mut respond) = subscription.recv().await else { continue };
        let mut send = respond.send_response(grpc(), false).unwrap();
        while let Some(act) = todo.recv().await {
            match act {
                Do::Send(message) => {
                    let mut frame = vec![0];
                    frame.extend_from_slice(&(message.len() as u32).to_be_bytes());
                    frame.extend_from_slice(&message);
                    send.send_data(frame.into(), false).unwrap();
                    continue;
                }
                Do::Raw(bytes) => {
                    send.send_data(bytes.into(), false).unwrap();
                    continue;
                }
                Do::End(code) => send.send_trailers(trailers(code, "the script says so")).unwrap(),
                Do::HangUp => driver.abort(),
            }
            break;
        }
    }
}

fn grpc() -> Response<()> {
    Response::builder().header("content-type", "application/grpc").body(()).unwrap()
}

fn trailers(code: u32, message: &str) -> HeaderMap {
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", code.into());
    trailers.insert("grpc-message", message.replace(' ', "%20").try_into().unwrap());
    trailers
}

fn answer(mut respond: h2::server::SendResponse<Bytes>, message: &[u8]) {
    let mut frame = vec![0];
    frame.extend_from_slice(&(message.len() as u32).to_be_bytes());
    frame.extend_from_slice(message);
    let mut send = respond.send_response(grpc(), false).unwrap();
    send.send_data(frame.into(), false).unwrap();
    send.send_trailers(trailers(0, "")).unwrap();
}

/// As the reference does: a response of headers only.
fn refuse(mut respond: h2::server::SendResponse<Bytes>, code: u32, message: &str) {
    let mut response = grpc();
    response.headers_mut().extend(trailers(code, message));
    respond.send_response(response, true).unwrap();
}

fn auth_response() -> AuthResponse {
    AuthResponse {
        // {"exp":1300,"iat":1000,"sub":"{\"clientID\":\"agent-1\",\"mode\":\"managed\"}"}
        access_token: "e30.eyJleHAiOjEzMDAsImlhdCI6MTAwMCwic3ViIjoie1wiY2xpZW50SURcIjpcImFnZW50LTFcIixcIm1vZGVcIjpcIm1hbmFnZWRcIn0ifQ.sig".into(),
        refresh_token: "refresh".into(),
        version: "9.9.9".into(),
        principal_namespace: "argocd".into(),
    }
}

async fn read_message(mut body: h2::RecvStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    while let Some(Ok(chunk)) = body.data().await {
        bytes.extend_from_slice(&chunk);
        let _ = body.flow_control().release_capacity(chunk.len());
    }
    bytes[5..].to_vec()
}

async fn read_frames(mut body: h2::RecvStream, saw: Sender<Seen>) {
    let mut bytes: Vec<u8> = Vec::new();
    while let Some(chunk) = body.data().await {
        let Ok(chunk) = chunk else { return };
        bytes.extend_from_slice(&chunk);
        let _ = body.flow_control().release_capacity(chunk.len());
        while bytes.len() >= 5 {
            let length = u32::from_be_bytes([bytes[1], bytes[2], bytes[3], bytes[4]]) as usize;
            if bytes.len() < 5 + length {
                break;
            }
            let _ = saw.send(Seen::Frame(bytes[5..5 + length].to_vec()));
            bytes.drain(..5 + length);
        }
    }
    let _ = saw.send(Seen::HalfClose);
}

/// One request that the API server got.
#[derive(Clone, Debug)]
pub(crate) struct Asked {
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) headers: String,
    pub(crate) body: String,
}

/// What the API server says.
pub(crate) enum Say {
    /// Status code and body.
    Body(u16, String),
    /// 200 and these lines; the answer stays open until the sender is dropped.
    Lines(Receiver<String>),
}

/// An API server in plain text: `script` answers every request.
pub(crate) struct Api {
    pub(crate) port: u16,
    asked: Receiver<Asked>,
}

impl Api {
    pub(crate) fn start(script: impl Fn(&Asked) -> Say + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let (heard, asked) = channel();
        let script = Arc::new(script);
        thread::spawn(move || {
            for stream in listener.incoming() {
                let (heard, script) = (heard.clone(), Arc::clone(&script));
                thread::spawn(
                    move || while converse(stream.as_ref().unwrap(), &heard, &*script).is_some() {},
                );
            }
        });
        Self { port, asked }
    }

    pub(crate) fn wait(&self, what: &str, pick: impl Fn(&Asked) -> bool) -> Asked {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.asked.recv_timeout(left) {
                Ok(asked) if pick(&asked) => return asked,
                Ok(_) => {}
                Err(_) => panic!("the API server was never asked for {what}"),
            }
        }
    }
}

/// One request and its answer; `None` when the connection is over.
fn converse(stream: &TcpStream, heard: &Sender<Asked>, script: &dyn Fn(&Asked) -> Say) -> Option<()> {
    let mut reader = BufReader::with_capacity(1, stream);
    let mut line = String::new();
    reader.read_line(&mut line).ok().filter(|count| *count > 0)?;
    let mut words = line.split(' ');
    let (method, path) = (words.next()?.to_owned(), words.next()?.to_owned());
    let mut headers = String::new();
    while !headers.ends_with("\r\n\r\n") {
        let before = headers.len();
        reader.read_line(&mut headers).ok().filter(|count| *count > 0)?;
        if &headers[before..] == "\r\n" {
            break;
        }
    }
    let length = headers
        .lines()
        .find_map(|line| line.to_ascii_lowercase().strip_prefix("content-length:")?.trim().parse().ok())
        .unwrap_or(0);
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    let asked = Asked { method, path, headers, body: String::from_utf8(body).unwrap() };
    let _ = heard.send(asked.clone());
    let mut stream = stream;
    match script(&asked) {
        Say::Body(code, body) => {
            let head = format!("HTTP/1.1 {code} X\r\nContent-Length: {}\r\n\r\n", body.len());
            stream.write_all((head + &body).as_bytes()).ok()
        }
        Say::Lines(lines) => {
            stream.write_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n").ok()?;
            for line in lines {
                stream.write_all(format!("{:x}\r\n{line}\n\r\n", line.len() + 1).as_bytes()).ok()?;
            }
            stream.write_all(b"0\r\n\r\n").ok()
        }
    }
}

/// The binary, run with a kubeconfig for `api`.
pub(crate) struct Agent {
    child: Child,
    log: Arc<Mutex<String>>,
    pub(crate) healthz_port: u16,
    directory: PathBuf,
}

impl Agent {
    pub(crate) fn start(api: u16, hub: u16, more: &[&str]) -> Self {
        let healthz_port = free_port();
        let directory = scratch(&healthz_port.to_string());
        let kubeconfig = directory.join("kubeconfig");
        std::fs::write(&kubeconfig, kubeconfig_text(&format!("http://127.0.0.1:{api}"))).unwrap();
        let mut child = command()
            .args(["agent", "--agent-mode=managed", "--server-address", "127.0.0.1", "--insecure-plaintext"])
            .args(["--creds", "header:any", "--metrics-port", "0", "--log-level", "debug"])
            .args(["--server-port", &hub.to_string(), "--healthz-port", &healthz_port.to_string()])
            .arg("--kubeconfig")
            .arg(&kubeconfig)
            .args(more)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let log = Arc::new(Mutex::new(String::new()));
        let pipes: [Box<dyn Read + Send>; 2] =
            [Box::new(child.stdout.take().unwrap()), Box::new(child.stderr.take().unwrap())];
        for pipe in pipes {
            let log = Arc::clone(&log);
            thread::spawn(move || {
                for line in BufReader::new(pipe).lines().map_while(Result::ok) {
                    let mut log = log.lock().unwrap();
                    log.push_str(&line);
                    log.push('\n');
                }
            });
        }
        Self { child, log, healthz_port, directory }
    }

    pub(crate) fn log(&self) -> String {
        self.log.lock().unwrap().clone()
    }

    /// Waits for a line with this text.
    pub(crate) fn wait_log(&self, text: &str) {
        self.until(&format!("a log line with {text:?}"), || self.log().contains(text));
    }

    pub(crate) fn until(&self, what: &str, condition: impl Fn() -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !condition() {
            assert!(Instant::now() < deadline, "no {what}; the log:\n{}", self.log());
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// HTTP status of a probe.
    pub(crate) fn probe(&self, path: &str) -> Option<u16> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.healthz_port)).ok()?;
        stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n").as_bytes()).ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        answer.split(' ').nth(1)?.parse().ok()
    }

    pub(crate) fn terminate(&self) {
        let status = Command::new("kill").args(["-TERM", &self.child.id().to_string()]).status().unwrap();
        assert!(status.success());
    }

    pub(crate) fn wait_exit(&mut self) -> ExitStatus {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < deadline, "it does not end; the log:\n{}", self.log());
            thread::sleep(Duration::from_millis(5));
        }
    }

    pub(crate) fn open_files(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.child.id())).unwrap().count()
    }

    pub(crate) fn threads(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/task", self.child.id())).unwrap().count()
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.directory);
        if thread::panicking() {
            eprintln!("{}", self.log());
        }
    }
}

/// The binary with nothing of the caller's environment that it would read.
pub(crate) fn command() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_agent-lite"));
    command.env_clear();
    command
}

pub(crate) fn kubeconfig_text(server: &str) -> String {
    format!(
        "current-context: c\nclusters:\n- name: c\n  cluster:\n    server: {server}\ncontexts:\n- name: c\n  context:\n    cluster: c\n    user: u\nusers:\n- name: u\n  user:\n    token: t0k3n\n"
    )
}

/// A directory for one test.
pub(crate) fn scratch(name: &str) -> PathBuf {
    let directory = std::env::temp_dir().join(format!("agent-lite-{}-{name}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    directory
}

fn free_port() -> u16 {
    // Below the ephemeral range, so that no outgoing connection takes it meanwhile.
    static NEXT: Mutex<u16> = Mutex::new(0);
    let mut next = NEXT.lock().unwrap();
    loop {
        *next += 1;
        let port = 20_000 + (std::process::id() % 1000) as u16 * 10 + *next;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}
