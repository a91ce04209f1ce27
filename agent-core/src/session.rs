//! The agent's side of a connection: when to dial, how to authenticate, what a failure means.
//!
//! The machine knows nothing of sockets and messages. It names one [`Action`] at a time; the shell carries it out and
//! reports a [`Fact`]. Every way in which a stream can end leads to a back-off and a new connection: the only way out
//! is [`Session::shut_down`].
//!
//! ```text
//! Waiting -> Dialing -> AskingVersion -> Authenticating [-> Refreshing] -> Open -> Waiting …
//! ```
//!
//! The principal compares the agent's version with its own as strings, so the agent asks for the principal's first
//! and announces the same (docs/protocol.md, "Connecting"). A principal of the reference implementation sends no response headers
//! on the event stream before its first event: the stream counts as open as soon as the request is out.

use alloc::boxed::Box;
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;
use core::time::Duration;

use serde::Deserialize;

use crate::backoff::{Backoff, Policy};
use crate::rand::Rng;
use crate::time::{Instant, Wall};

/// The connection machine of one agent.
#[derive(Debug)]
pub struct Session {
    wall: Wall,
    state: State,
    /// Set when the state was entered and its action not yet taken.
    pending: bool,
    retry: Backoff,
    refused: Backoff,
    tokens: Option<Tokens>,
    version: Box<str>,
    principal_namespace: Box<str>,
    opened: Option<Instant>,
    note: Option<Note>,
}

impl Session {
    /// A machine that dials at once.
    pub fn new(wall: Wall) -> Self {
        Self {
            wall,
            state: State::Waiting { until: Instant::ZERO },
            pending: false,
            retry: Backoff::new(RETRY),
            refused: Backoff::new(REFUSED),
            tokens: None,
            version: "".into(),
            principal_namespace: "".into(),
            opened: None,
            note: None,
        }
    }

    /// What to do next, if there is something new to do.
    pub fn poll_action(&mut self) -> Option<Action<'_>> {
        if !core::mem::take(&mut self.pending) {
            return None;
        }
        Some(match &self.state {
            State::Waiting { .. } | State::Closed => Action::HangUp,
            State::Dialing { .. } => Action::Dial,
            State::AskingVersion { .. } => Action::AskVersion,
            State::Authenticating { .. } => Action::Authenticate { version: &self.version },
            State::Refreshing { .. } => {
                Action::Refresh { refresh_token: self.tokens.as_ref().map_or("", |t| &t.refresh) }
            }
            State::Open => Action::Subscribe { access_token: self.tokens.as_ref().map_or("", |t| &t.access) },
            State::Draining { .. } => Action::HalfClose,
        })
    }

    /// The result of an action. A result that the state does not wait for is of an earlier connection and ignored.
    pub fn handle(&mut self, now: Instant, fact: Fact<'_>, rng: &mut Rng) {
        match (&self.state, fact) {
            (State::Dialing { .. }, Fact::Dialed) => {
                self.enter(State::AskingVersion { deadline: now + UNARY_LIMIT });
            }
            (State::AskingVersion { .. }, Fact::Version(version)) => {
                self.version = version.strip_prefix(VERSION_PREFIX).unwrap_or(version).into();
                self.enter(State::Authenticating { deadline: now + UNARY_LIMIT });
            }
            (State::Authenticating { .. }, Fact::Authenticated(answer)) => {
                match Tokens::parse(now, self.wall, answer.access_token, answer.refresh_token) {
                    Ok(tokens) => {
                        self.principal_namespace = answer.principal_namespace.into();
                        let stale = tokens.is_stale(now);
                        self.tokens = Some(tokens);
                        if stale {
                            self.enter(State::Refreshing { deadline: now + UNARY_LIMIT });
                        } else {
                            self.open(now);
                        }
                    }
                    Err(error) => self.lost(now, Loss::BadToken(error), rng),
                }
            }
            (State::Refreshing { .. }, Fact::Authenticated(answer)) => {
                let kept = self.tokens.as_ref().map_or("", |t| &t.refresh);
                let refresh = if answer.refresh_token.is_empty() { kept } else { answer.refresh_token };
                if let Ok(tokens) = Tokens::parse(now, self.wall, answer.access_token, refresh) {
                    self.tokens = Some(tokens);
                }
                self.open(now);
            }
            // The old token may still do.
            (State::Refreshing { .. }, Fact::Failed(_)) => self.open(now),
            (State::Open, Fact::Failed(failure)) => self.lost(now, Loss::Stream(failure), rng),
            (State::Draining { .. }, Fact::Failed(_)) => self.enter(State::Closed),
            (
                State::Dialing { .. } | State::AskingVersion { .. } | State::Authenticating { .. },
                Fact::Failed(failure),
            ) => self.lost(now, Loss::Connect(failure), rng),
            _ => {}
        }
    }

    /// When [`Session::handle_timeout`] wants to be called.
    pub fn poll_timeout(&self) -> Option<Instant> {
        match self.state {
            State::Waiting { until } => Some(until),
            State::Dialing { deadline }
            | State::AskingVersion { deadline }
            | State::Authenticating { deadline }
            | State::Refreshing { deadline }
            | State::Draining { deadline } => Some(deadline),
            State::Open | State::Closed => None,
        }
    }

    /// Time has passed: dial, or give up on an answer.
    pub fn handle_timeout(&mut self, now: Instant, rng: &mut Rng) {
        if self.poll_timeout().is_none_or(|deadline| now < deadline) {
            return;
        }
        match self.state {
            State::Waiting { .. } => self.enter(State::Dialing { deadline: now + DIAL_LIMIT }),
            State::Draining { .. } => self.enter(State::Closed),
            State::Refreshing { .. } => self.open(now),
            _ => {
                let stage = self.state.stage();
                let failure = Failure::transport(alloc::format!("no answer in time while {stage}"));
                self.lost(now, Loss::Connect(failure), rng);
            }
        }
    }

    /// Ends: an open stream is half-closed and its end awaited for at most five seconds.
    pub fn shut_down(&mut self, now: Instant) {
        match self.state {
            State::Open => self.enter(State::Draining { deadline: now + DRAIN_LIMIT }),
            State::Draining { .. } | State::Closed => {}
            _ => self.enter(State::Closed),
        }
    }

    /// Something that a person should see, once.
    pub fn poll_note(&mut self) -> Option<Note> {
        self.note.take()
    }

    /// Whether the event stream is open.
    pub fn is_open(&self) -> bool {
        matches!(self.state, State::Open)
    }

    /// Whether [`Session::shut_down`] is done.
    pub fn is_closed(&self) -> bool {
        matches!(self.state, State::Closed)
    }

    /// The principal's version, without prefix; empty before the first connection.
    pub fn peer_version(&self) -> &str {
        &self.version
    }

    /// The namespace of the principal, as it said; empty before the first connection.
    pub fn principal_namespace(&self) -> &str {
        &self.principal_namespace
    }

    /// The agent's name, from the token's subject.
    pub fn agent_name(&self) -> Option<&str> {
        self.tokens.as_ref().map(|tokens| &*tokens.client_id)
    }

    fn enter(&mut self, state: State) {
        self.state = state;
        self.pending = true;
    }

    fn open(&mut self, now: Instant) {
        self.opened = Some(now);
        self.enter(State::Open);
    }

    fn lost(&mut self, now: Instant, loss: Loss, rng: &mut Rng) {
        // A stream that is accepted and dropped at once is no success: only one that stood forgets the failures.
        if self.opened.take().is_some_and(|opened| now - opened >= STOOD) {
            self.retry.succeed();
            self.refused.succeed();
        }
        let refused = matches!(&loss, Loss::Connect(f) | Loss::Stream(f) if f.is_refusal());
        let mut wait = if refused { self.refused.fail(rng) } else { self.retry.fail(rng) };
        if matches!(&loss, Loss::Connect(f) | Loss::Stream(f) if f.clock) {
            wait = wait.min(CLOCK_CAP);
        }
        self.note = Some(Note { stage: self.state.stage(), loss, refused, wait });
        self.enter(State::Waiting { until: now + wait });
    }
}

/// What the shell is to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Action<'a> {
    /// Connect: DNS, TCP, TLS, HTTP/2.
    Dial,
    /// Call the version RPC, without a token.
    AskVersion,
    /// Call Authenticate.
    Authenticate {
        /// To announce as the agent's version.
        version: &'a str,
    },
    /// Call RefreshToken.
    Refresh {
        /// The refresh token.
        refresh_token: &'a str,
    },
    /// Open the event stream.
    Subscribe {
        /// Raw value of the `authorization` metadata, without `Bearer`.
        access_token: &'a str,
    },
    /// Half-close the event stream and keep reading.
    HalfClose,
    /// Drop the connection, if there is one.
    HangUp,
}

/// How an action ended.
#[derive(Clone, Debug)]
pub enum Fact<'a> {
    /// The connection stands.
    Dialed,
    /// The answer of the version RPC.
    Version(&'a str),
    /// The answer of Authenticate or RefreshToken.
    Authenticated(Answer<'a>),
    /// The action failed, or the stream ended (also with status OK).
    Failed(Failure),
}

/// An `AuthResponse`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Answer<'a> {
    /// `accessToken`.
    pub access_token: &'a str,
    /// `refreshToken`; empty in an answer to a refresh that keeps the old one.
    pub refresh_token: &'a str,
    /// `principalNamespace`.
    pub principal_namespace: &'a str,
}

/// A failed call, an ended stream, a lost connection.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Failure {
    /// gRPC status code; `None` if there was no answer.
    pub code: Option<u32>,
    /// The peer's message, or what happened to the connection.
    pub message: String,
    /// Whether a certificate was refused for its dates: the clock of either side may be wrong, and may be set right
    /// at any moment.
    pub clock: bool,
}

impl Failure {
    /// There was no answer.
    pub fn transport(message: impl Into<String>) -> Self {
        Self { code: None, message: message.into(), clock: false }
    }

    /// A gRPC status.
    pub fn status(code: u32, message: impl Into<String>) -> Self {
        Self { code: Some(code), message: message.into(), clock: false }
    }

    /// Whether the same attempt will fail again until a person changes something. Retried all the same, slowly.
    fn is_refusal(&self) -> bool {
        matches!(
            self.code,
            Some(
                code::INVALID_ARGUMENT
                    | code::PERMISSION_DENIED
                    | code::FAILED_PRECONDITION
                    | code::UNIMPLEMENTED
            )
        )
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.code {
            None => f.write_str(&self.message),
            Some(code) if self.message.is_empty() => f.write_str(code::name(code)),
            Some(code) => write!(f, "{}: {}", code::name(code), self.message),
        }
    }
}

/// gRPC status codes.
pub mod code {
    pub const OK: u32 = 0;
    pub const CANCELLED: u32 = 1;
    pub const UNKNOWN: u32 = 2;
    pub const INVALID_ARGUMENT: u32 = 3;
    pub const DEADLINE_EXCEEDED: u32 = 4;
    pub const PERMISSION_DENIED: u32 = 7;
    pub const RESOURCE_EXHAUSTED: u32 = 8;
    pub const FAILED_PRECONDITION: u32 = 9;
    pub const UNIMPLEMENTED: u32 = 12;
    pub const INTERNAL: u32 = 13;
    pub const UNAVAILABLE: u32 = 14;
    pub const UNAUTHENTICATED: u32 = 16;

    /// The code's name in the gRPC documentation.
    pub const fn name(code: u32) -> &'static str {
        const NAMES: [&str; 17] = [
            "OK",
            "CANCELLED",
            "UNKNOWN",
            "INVALID_ARGUMENT",
            "DEADLINE_EXCEEDED",
            "NOT_FOUND",
            "ALREADY_EXISTS",
            "PERMISSION_DENIED",
            "RESOURCE_EXHAUSTED",
            "FAILED_PRECONDITION",
            "ABORTED",
            "OUT_OF_RANGE",
            "UNIMPLEMENTED",
            "INTERNAL",
            "UNAVAILABLE",
            "DATA_LOSS",
            "UNAUTHENTICATED",
        ];
        if (code as usize) < NAMES.len() { NAMES[code as usize] } else { "UNKNOWN" }
    }
}

/// A lost connection, in words for a person.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Note {
    stage: &'static str,
    /// What ended it.
    pub loss: Loss,
    /// Whether only a person can help.
    pub refused: bool,
    /// The time until the next attempt.
    pub wait: Duration,
}

/// What ended a connection.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Loss {
    /// An attempt to connect failed.
    Connect(Failure),
    /// The event stream ended.
    Stream(Failure),
    /// A token could not be read.
    BadToken(TokenError),
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.loss {
            Loss::Connect(failure) => write!(f, "{} failed: {failure}", self.stage)?,
            Loss::Stream(failure) => write!(f, "event stream ended: {failure}")?,
            Loss::BadToken(error) => write!(f, "the principal issued an unusable token: {error}")?,
        }
        if let Loss::Connect(failure) | Loss::Stream(failure) = &self.loss {
            f.write_str(match failure.code {
                Some(code::FAILED_PRECONDITION) => {
                    "; the principal refuses this agent's version: check what stands between agent and principal, or upgrade either"
                }
                Some(code::INVALID_ARGUMENT | code::PERMISSION_DENIED) => {
                    "; the principal refuses this agent: compare its name, mode and --creds with the principal's configuration"
                }
                Some(code::UNIMPLEMENTED) => {
                    "; the server is no argocd-agent principal: check --server-address and --server-port"
                }
                Some(code::UNAUTHENTICATED) => {
                    "; check the client certificate, --creds, and that the principal knows this agent"
                }
                _ if failure.clock => {
                    "; compare the clock of this machine with the certificate's dates"
                }
                _ => "",
            })?;
        }
        let tenths = self.wait.as_millis() / 100;
        write!(f, "; next attempt in {}.{} s", tenths / 10, tenths % 10)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Waiting { until: Instant },
    Dialing { deadline: Instant },
    AskingVersion { deadline: Instant },
    Authenticating { deadline: Instant },
    Refreshing { deadline: Instant },
    Open,
    Draining { deadline: Instant },
    Closed,
}

impl State {
    const fn stage(self) -> &'static str {
        match self {
            Self::Dialing { .. } => "connecting to the principal",
            Self::AskingVersion { .. } => "asking the principal's version",
            Self::Authenticating { .. } => "authenticating",
            Self::Refreshing { .. } => "refreshing the token",
            Self::Waiting { .. } | Self::Open | Self::Draining { .. } | Self::Closed => "the event stream",
        }
    }
}

/// The tokens of one authentication. Signatures are the principal's to check.
struct Tokens {
    access: Box<str>,
    refresh: Box<str>,
    client_id: Box<str>,
    expires: Option<Instant>,
}

impl Tokens {
    fn parse(now: Instant, wall: Wall, access: &str, refresh: &str) -> Result<Self, TokenError> {
        let claims = Claims::parse(access)?;
        Ok(Self {
            access: access.into(),
            refresh: refresh.into(),
            client_id: claims.client_id,
            expires: claims.exp.map(|exp| {
                // The lifetime between the principal's own two times: right even if our clock is not.
                let epoch = wall.epoch_millis_at_zero.saturating_add(now.as_millis()) / 1000;
                now + Duration::from_secs(exp.saturating_sub(claims.iat.unwrap_or(epoch)))
            }),
        })
    }

    fn is_stale(&self, now: Instant) -> bool {
        self.expires.is_some_and(|expires| expires - now <= REFRESH_BELOW)
    }
}

/// A token is a secret: it never appears in a log.
impl fmt::Debug for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokens").field("client_id", &self.client_id).finish_non_exhaustive()
    }
}

struct Claims {
    exp: Option<u64>,
    iat: Option<u64>,
    client_id: Box<str>,
}

impl Claims {
    fn parse(token: &str) -> Result<Self, TokenError> {
        #[derive(Deserialize)]
        struct Raw {
            exp: Option<f64>,
            iat: Option<f64>,
            #[serde(default)]
            sub: String,
        }
        #[derive(Deserialize)]
        struct Subject {
            #[serde(rename = "clientID")]
            client_id: String,
        }
        let mut parts = token.split('.');
        let (Some(_), Some(payload), Some(_), None) =
            (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return Err(TokenError::NotThreeParts);
        };
        let payload = base64url(payload).ok_or(TokenError::BadBase64)?;
        let raw: Raw = serde_json::from_slice(&payload).map_err(|_| TokenError::BadClaims)?;
        // The agent's name is wanted for resync only: a foreign subject is no reason to stay away.
        let client_id = serde_json::from_str::<Subject>(&raw.sub).map(|s| s.client_id).unwrap_or_default();
        let seconds = |time: f64| if time > 0.0 { time as u64 } else { 0 };
        Ok(Self { exp: raw.exp.map(seconds), iat: raw.iat.map(seconds), client_id: client_id.into() })
    }
}

/// Why a token cannot be read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TokenError {
    /// Not three parts with dots between.
    NotThreeParts,
    /// The payload is not base64url.
    BadBase64,
    /// The payload is not a JSON object of claims.
    BadClaims,
}

impl fmt::Display for TokenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotThreeParts => "it does not have the three parts of a JWT",
            Self::BadBase64 => "its payload is not base64url",
            Self::BadClaims => "its payload is not a JSON object of claims",
        })
    }
}

/// base64url with or without padding.
fn base64url(text: &str) -> Option<Vec<u8>> {
    let text = text.trim_end_matches('=');
    let mut out = Vec::with_capacity(text.len() * 3 / 4);
    let (mut bits, mut count) = (0u32, 0u32);
    for byte in text.bytes() {
        let value = match byte {
            b'A'..=b'Z' => byte - b'A',
            b'a'..=b'z' => byte - b'a' + 26,
            b'0'..=b'9' => byte - b'0' + 52,
            b'-' => 62,
            b'_' => 63,
            _ => return None,
        };
        bits = bits << 6 | u32::from(value);
        count += 6;
        if count >= 8 {
            count -= 8;
            // The cast keeps the eight bits wanted.
            out.push((bits >> count) as u8);
        }
    }
    Some(out)
}

const VERSION_PREFIX: &str = "argocd-agent-";

/// As the reference: a token with at most this much left is refreshed before a stream is opened.
const REFRESH_BELOW: Duration = Duration::from_secs(30);

/// DNS, TCP and TLS over a satellite link with losses still fit.
const DIAL_LIMIT: Duration = Duration::from_secs(30);

const UNARY_LIMIT: Duration = Duration::from_secs(45);

/// A stream that stood this long was a success.
const STOOD: Duration = Duration::from_secs(20);

const DRAIN_LIMIT: Duration = Duration::from_secs(5);

const RETRY: Policy = match Policy::new(Duration::from_secs(1), 200, Duration::from_secs(60)) {
    Ok(policy) => policy,
    Err(_) => panic!("checked when compiled"),
};

const REFUSED: Policy = match Policy::new(Duration::from_secs(30), 200, Duration::from_secs(600)) {
    Ok(policy) => policy,
    Err(_) => panic!("checked when compiled"),
};

/// The longest wait while a clock seems wrong: it is set right within seconds once there is a network.
const CLOCK_CAP: Duration = Duration::from_secs(15);

#[cfg(test)]
mod tests {
    use super::*;

    const WALL: Wall = Wall { epoch_millis_at_zero: 1_790_000_000_000 };

    struct Rig {
        session: Session,
        rng: Rng,
        now: Instant,
    }

    impl Rig {
        fn new() -> Self {
            Self { session: Session::new(WALL), rng: Rng::new(5), now: Instant::ZERO }
        }

        fn fact(&mut self, fact: Fact<'_>) {
            self.session.handle(self.now, fact, &mut self.rng);
        }

        /// Lets time pass up to the next deadline; says how much that was.
        fn wait(&mut self) -> Duration {
            let deadline = self.session.poll_timeout().expect("a deadline");
            let waited = deadline - self.now;
            self.now = self.now.max(deadline);
            self.session.handle_timeout(self.now, &mut self.rng);
            waited
        }

        fn connect(&mut self) {
            self.wait();
            assert_eq!(self.session.poll_action(), Some(Action::Dial));
            assert_eq!(self.session.poll_action(), None);
            self.fact(Fact::Dialed);
            assert_eq!(self.session.poll_action(), Some(Action::AskVersion));
            self.fact(Fact::Version("argocd-agent-99.9.9-unreleased"));
            assert_eq!(
                self.session.poll_action(),
                Some(Action::Authenticate { version: "99.9.9-unreleased" })
            );
        }

        fn open(&mut self, access: &str) {
            self.connect();
            self.fact(Fact::Authenticated(Answer { access_token: access, ..answer() }));
            assert_eq!(self.session.poll_action(), Some(Action::Subscribe { access_token: access }));
            assert!(self.session.is_open());
        }
    }

    fn answer() -> Answer<'static> {
        Answer { access_token: "", refresh_token: "r", principal_namespace: "argocd" }
    }

    fn token(claims: &str) -> String {
        const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
        let mut out = String::from("e30.");
        for chunk in claims.as_bytes().chunks(3) {
            let word = chunk.iter().fold(0u32, |w, b| w << 8 | u32::from(*b)) << (8 * (3 - chunk.len()));
            for n in 0..=chunk.len() {
                out.push(char::from(ALPHABET[(word >> (18 - 6 * n) & 63) as usize]));
            }
        }
        out + ".sig"
    }

    fn good_token() -> String {
        token(r#"{"exp":1300,"iat":1000,"sub":"{\"clientID\":\"agent-1\",\"mode\":\"managed\"}"}"#)
    }

    #[test]
    fn version_first_then_the_same_version_back() {
        let mut rig = Rig::new();
        rig.open(&good_token());
        assert_eq!(rig.session.agent_name(), Some("agent-1"));
        assert_eq!(rig.session.principal_namespace(), "argocd");
        assert_eq!(rig.session.poll_timeout(), None, "an open stream needs no timer");
    }

    #[test]
    fn every_end_of_a_stream_reconnects_with_a_growing_wait() {
        let mut rig = Rig::new();
        rig.open(&good_token());
        let mut total = Duration::ZERO;
        for code in 0..=16 {
            rig.fact(Fact::Failed(Failure::status(code, "stream terminated")));
            assert_eq!(rig.session.poll_action(), Some(Action::HangUp));
            assert!(rig.session.poll_note().is_some());
            let wait = rig.session.poll_timeout().expect("a deadline") - rig.now;
            assert!(wait >= Duration::from_millis(500), "code {code} waits {wait:?}");
            total += wait;
            rig.open(&good_token());
        }
        assert!(total > Duration::from_secs(60), "{total:?}");
        rig.fact(Fact::Failed(Failure::transport("connection reset")));
        assert_eq!(rig.session.poll_action(), Some(Action::HangUp));
    }

    #[test]
    fn a_stream_that_stood_forgets_the_failures() {
        let mut rig = Rig::new();
        for _ in 0..10 {
            rig.wait();
            rig.fact(Fact::Failed(Failure::transport("connection refused")));
            rig.session.poll_action();
        }
        rig.open(&good_token());
        rig.now += STOOD;
        rig.fact(Fact::Failed(Failure::status(code::UNAVAILABLE, "")));
        assert!(rig.wait() <= Duration::from_secs(1));
    }

    #[test]
    fn a_refused_version_is_retried_slowly_and_said() {
        let mut rig = Rig::new();
        rig.connect();
        rig.fact(Fact::Failed(Failure::status(code::FAILED_PRECONDITION, "version mismatch")));
        let note = rig.session.poll_note().expect("a note");
        assert!(note.refused);
        let text = alloc::format!("{note}");
        assert!(text.starts_with("authenticating failed: FAILED_PRECONDITION: version mismatch; "), "{text}");
        assert_eq!(rig.session.poll_note(), None);
        assert!(rig.wait() >= Duration::from_secs(15));
    }

    #[test]
    fn a_wrong_clock_keeps_the_waits_short() {
        let mut rig = Rig::new();
        for _ in 0..50 {
            assert!(rig.wait() <= CLOCK_CAP);
            let mut failure = Failure::transport("certificate not valid yet");
            failure.clock = true;
            rig.fact(Fact::Failed(failure));
            assert!(alloc::format!("{}", rig.session.poll_note().expect("a note")).contains("clock"));
        }
    }

    #[test]
    fn no_answer_is_a_failure() {
        let mut rig = Rig::new();
        rig.connect();
        assert_eq!(rig.wait(), UNARY_LIMIT);
        let text = alloc::format!("{}", rig.session.poll_note().expect("a note"));
        assert!(text.starts_with("authenticating failed: no answer in time"), "{text}");
        assert_eq!(rig.session.poll_action(), Some(Action::HangUp));
    }

    #[test]
    fn a_late_answer_of_an_earlier_connection_is_ignored() {
        let mut rig = Rig::new();
        rig.connect();
        rig.wait();
        rig.session.poll_action();
        rig.fact(Fact::Authenticated(answer()));
        rig.fact(Fact::Dialed);
        assert!(!rig.session.is_open());
        assert_eq!(rig.session.poll_action(), None);
    }

    #[test]
    fn a_token_about_to_expire_is_refreshed_once_before_the_stream() {
        let stale = token(r#"{"exp":1030,"iat":1000,"sub":""}"#);
        let mut rig = Rig::new();
        rig.connect();
        rig.fact(Fact::Authenticated(Answer { access_token: &stale, ..answer() }));
        assert_eq!(rig.session.poll_action(), Some(Action::Refresh { refresh_token: "r" }));
        let fresh = good_token();
        rig.fact(Fact::Authenticated(Answer { access_token: &fresh, ..Answer::default() }));
        assert_eq!(rig.session.poll_action(), Some(Action::Subscribe { access_token: &fresh }));

        let mut rig = Rig::new();
        rig.connect();
        rig.fact(Fact::Authenticated(Answer { access_token: &stale, ..answer() }));
        rig.session.poll_action();
        rig.fact(Fact::Failed(Failure::status(code::UNAUTHENTICATED, "")));
        assert_eq!(rig.session.poll_action(), Some(Action::Subscribe { access_token: &stale }));
    }

    #[test]
    fn unusable_tokens_are_an_attempt_that_failed() {
        for bad in ["", "a.b", "a.b.c.d", "a.!.c", "a.e30x.c", "a.W10.c"] {
            let mut rig = Rig::new();
            rig.connect();
            rig.fact(Fact::Authenticated(Answer { access_token: bad, ..answer() }));
            assert!(!rig.session.is_open(), "{bad}");
            assert!(matches!(rig.session.poll_note().map(|n| n.loss), Some(Loss::BadToken(_))), "{bad}");
        }
        let mut rig = Rig::new();
        rig.open("e30.e30.");
        assert_eq!(rig.session.agent_name(), Some(""));
    }

    #[test]
    fn shutting_down_drains_an_open_stream() {
        let mut rig = Rig::new();
        rig.open(&good_token());
        rig.session.shut_down(rig.now);
        assert_eq!(rig.session.poll_action(), Some(Action::HalfClose));
        assert!(!rig.session.is_closed());
        rig.fact(Fact::Failed(Failure::status(code::OK, "")));
        assert!(rig.session.is_closed());

        let mut rig = Rig::new();
        rig.open(&good_token());
        rig.session.shut_down(rig.now);
        assert_eq!(rig.wait(), DRAIN_LIMIT);
        assert!(rig.session.is_closed());
        assert_eq!(rig.session.poll_action(), Some(Action::HangUp));

        let mut rig = Rig::new();
        rig.session.shut_down(rig.now);
        assert!(rig.session.is_closed());
    }
}
