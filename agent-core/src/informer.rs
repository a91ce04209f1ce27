//! List, then watch: what one kind's objects are, and every change after.
//!
//! The machine names one GET at a time ([`Informer::poll_fetch`]) and is fed the bytes of its answer as they come.
//! Lists are streamed by the server where it can (`sendInitialEvents`), else read in pages; either way one object is
//! held at a time, whatever the size of the answer. A watch resumes from the last `resourceVersion`, which bookmarks
//! keep fresh; `410` lists again.
//!
//! The machine never says that an object is gone unless the API server said `DELETED`. A list that ends says
//! [`Event::Synced`]; what it did not contain is for the core to confirm by reading. A list that failed says nothing.

use alloc::borrow::Cow;
use alloc::boxed::Box;
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt::{self, Write};
use core::ops::Range;
use core::time::Duration;

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::backoff::{Backoff, Policy};
use crate::content::GPG_KEYS;
use crate::rand::Rng;
use crate::request::{Key, Kind, Status, is_dns_subdomain};
use crate::time::Instant;

/// What to list and watch.
#[derive(Clone, Debug)]
pub struct Config {
    /// The kind.
    pub kind: Kind,
    /// One namespace, or all.
    pub namespace: Option<Box<str>>,
    /// Label selector, not encoded; may be empty. See [`selector`]. What a kind requires is added.
    pub label_selector: Box<str>,
    /// Objects in a page of a list.
    pub page_size: u32,
    /// Whether to ask for streamed lists.
    pub streaming_lists: bool,
}

/// The label selector of everything that either half lists: what a user excluded is left out, and what a further selector of
/// the user's, which may be empty, does not admit.
pub fn selector(user: &str) -> String {
    let mut selector = String::from(NOT_IGNORED);
    if !user.is_empty() {
        selector.push(',');
        selector.push_str(user);
    }
    selector
}

const NOT_IGNORED: &str = "argocd-agent.argoproj-labs.io/ignore-sync!=true";
/// Of all Secrets only these: nobody else's credentials pass through either half.
const REPOSITORY_SECRETS: &str = "argocd.argoproj.io/secret-type in (repository,repo-creds)";

/// The machine for one kind.
#[derive(Debug)]
pub struct Informer {
    config: Config,
    state: State,
    pending: bool,
    fetch: u32,
    resource_version: String,
    synced: bool,
    backoff: Backoff,
    page: PageReader,
    line: Vec<u8>,
    note: Option<Note>,
}

impl Informer {
    /// A machine that lists at once.
    pub fn new(config: Config) -> Self {
        Self {
            state: State::Waiting { until: Instant::ZERO, then: Stage::Start },
            pending: false,
            fetch: 0,
            resource_version: String::new(),
            synced: false,
            backoff: Backoff::new(BACKOFF),
            page: PageReader::default(),
            line: Vec::new(),
            note: None,
            config,
        }
    }

    /// The next GET, if one is due. Whatever GET was running before is of no interest any more.
    pub fn poll_fetch(&mut self, rng: &mut Rng) -> Option<Fetch> {
        let State::Fetching { stage, .. } = &self.state else { return None };
        if !core::mem::take(&mut self.pending) {
            return None;
        }
        let mut path = String::with_capacity(256);
        path.push_str(self.config.kind.api_path());
        if let Some(namespace) = &self.config.namespace {
            path.push_str("/namespaces/");
            push_encoded(&mut path, namespace);
        }
        path.push('/');
        path.push_str(self.config.kind.plural());
        path.push('?');
        let secrets = if self.config.kind == Kind::Repository { REPOSITORY_SECRETS } else { "" };
        if !(self.config.label_selector.is_empty() && secrets.is_empty()) {
            path.push_str("labelSelector=");
            push_encoded(&mut path, &self.config.label_selector);
            if !self.config.label_selector.is_empty() && !secrets.is_empty() {
                push_encoded(&mut path, ",");
            }
            push_encoded(&mut path, secrets);
            path.push('&');
        }
        if self.config.kind == Kind::GpgKey {
            path.push_str("fieldSelector=");
            push_encoded(&mut path, "metadata.name=");
            push_encoded(&mut path, GPG_KEYS);
            path.push('&');
        }
        let timeout = WATCH_SECONDS + rng.below(WATCH_SECONDS);
        // Writing to a String cannot fail.
        let _ = match stage {
            Stage::Start | Stage::Page { token: None } => write!(path, "limit={}", self.config.page_size),
            Stage::Page { token: Some(token) } => {
                path.push_str("continue=");
                push_encoded(&mut path, token);
                write!(path, "&limit={}", self.config.page_size)
            }
            Stage::Initial => write!(
                path,
                "watch=true&allowWatchBookmarks=true&sendInitialEvents=true\
                 &resourceVersionMatch=NotOlderThan&timeoutSeconds={timeout}"
            ),
            Stage::Watch => write!(
                path,
                "watch=true&allowWatchBookmarks=true&resourceVersion={}&timeoutSeconds={timeout}",
                self.resource_version
            ),
        };
        Some(Fetch { id: self.fetch, path })
    }

    /// The GET whose bytes are wanted; any other is to be dropped.
    pub fn fetching(&self) -> Option<u32> {
        matches!(self.state, State::Fetching { .. }).then_some(self.fetch)
    }

    /// Bytes of a 200 answer to the current GET, in any pieces.
    pub fn receive(&mut self, now: Instant, bytes: &[u8], rng: &mut Rng, sink: &mut dyn FnMut(Event<'_>)) {
        let State::Fetching { stage, silent_until, started, announced } = &mut self.state else { return };
        if matches!(stage, Stage::Page { .. } | Stage::Initial) && !core::mem::replace(announced, true) {
            sink(Event::ListStarted);
        }
        match stage {
            Stage::Watch => *silent_until = *started + watch_limit(),
            _ => *silent_until = now + LIST_SILENCE,
        }
        if matches!(stage, Stage::Page { .. }) {
            let (kind, note) = (self.config.kind, &mut self.note);
            self.page.feed(bytes, &mut |item| match Head::parse(kind, item) {
                Ok(head) => sink(Event::Present { key: head.key, object: item }),
                Err(reason) => *note = Some(Note::Unreadable { kind, reason }),
            });
            if self.page.oversized() {
                self.fail(now, Problem::TooLarge, rng);
            }
            return;
        }
        let mut rest = bytes;
        while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
            let (line, after) = (&rest[..end], &rest[end + 1..]);
            if self.line.is_empty() {
                self.watch_line(now, line, rng, sink);
            } else {
                let mut whole = core::mem::take(&mut self.line);
                whole.extend_from_slice(line);
                self.watch_line(now, &whole, rng, sink);
                // Kept for the next line in pieces, unless it was an unusually large one.
                if whole.capacity() <= KEPT_BUFFER {
                    whole.clear();
                    self.line = whole;
                }
            }
            if self.fetching().is_none() {
                return;
            }
            rest = after;
        }
        if self.line.len() + rest.len() > MAX_OBJECT {
            self.fail(now, Problem::TooLarge, rng);
        } else {
            self.line.extend_from_slice(rest);
        }
    }

    /// The answer to the current GET ended, or there was none.
    pub fn end(&mut self, now: Instant, end: End, rng: &mut Rng, sink: &mut dyn FnMut(Event<'_>)) {
        let State::Fetching { stage, started, .. } = &self.state else { return };
        match (end, stage) {
            (End::Status(status), Stage::Initial) if refuses_streaming(&status) => {
                self.config.streaming_lists = false;
                self.fetch(now, Stage::Page { token: None });
            }
            (End::Status(status), _) => self.fail(now, Problem::Status(status), rng),
            (End::Broken(reason), _) => self.fail(now, Problem::Broken(reason), rng),
            (End::Finished, Stage::Page { .. } | Stage::Start) => self.page_end(now, rng, sink),
            (End::Finished, Stage::Watch) if now - *started >= WATCH_STOOD => {
                self.backoff.succeed();
                self.fetch(now, Stage::Watch);
            }
            (End::Finished, Stage::Watch) => {
                let until = now + self.backoff.fail(rng);
                self.state = State::Waiting { until, then: Stage::Watch };
            }
            (End::Finished, Stage::Initial) => {
                self.fail(now, Problem::Broken("the streamed list ended before its end mark".into()), rng);
            }
        }
    }

    /// When [`Informer::handle_timeout`] wants to be called.
    pub fn poll_timeout(&self) -> Option<Instant> {
        Some(match self.state {
            State::Waiting { until, .. } => until,
            State::Fetching { silent_until, .. } => silent_until,
        })
    }

    /// Time has passed: fetch again, or give up on an answer.
    pub fn handle_timeout(&mut self, now: Instant, rng: &mut Rng) {
        match &mut self.state {
            State::Waiting { until, then } if *until <= now => {
                let stage = core::mem::replace(then, Stage::Start);
                self.fetch(now, stage);
            }
            State::Fetching { silent_until, stage, .. } if *silent_until <= now => {
                if matches!(stage, Stage::Initial) {
                    // A server that takes the parameters and does not know them waits for ever.
                    self.config.streaming_lists = false;
                }
                self.fail(now, Problem::Broken("no answer in time".into()), rng);
            }
            _ => {}
        }
    }

    /// Something that a person should see, once.
    pub fn poll_note(&mut self) -> Option<Note> {
        self.note.take()
    }

    /// Whether a list was complete since the start.
    pub fn has_synced(&self) -> bool {
        self.synced
    }

    /// The kind.
    pub fn kind(&self) -> Kind {
        self.config.kind
    }

    fn fetch(&mut self, now: Instant, stage: Stage) {
        let stage = match stage {
            Stage::Start if self.config.streaming_lists => Stage::Initial,
            Stage::Start => Stage::Page { token: None },
            stage => stage,
        };
        let silent_until = now + if matches!(stage, Stage::Watch) { watch_limit() } else { LIST_SILENCE };
        // Only the first page starts a list.
        let announced = matches!(stage, Stage::Page { token: Some(_) });
        self.page.reset();
        self.line = Vec::new();
        self.fetch = self.fetch.wrapping_add(1);
        self.pending = true;
        self.state = State::Fetching { stage, silent_until, started: now, announced };
    }

    fn fail(&mut self, now: Instant, problem: Problem, rng: &mut Rng) {
        let State::Fetching { stage, .. } = &self.state else { return };
        let watching = matches!(stage, Stage::Watch);
        let expired = matches!(&problem, Problem::Status(status) if status.code == 410);
        let mut wait = self.backoff.fail(rng);
        if let Problem::Status(Status { retry_after: Some(at_least), .. }) = &problem {
            wait = wait.max((*at_least).min(RETRY_AFTER_MAX));
        }
        // A server restored from a backup refuses the version for ever, with codes other than 410.
        let stuck = self.backoff.failures() > WATCH_TRIES && matches!(problem, Problem::Status(_));
        let then = if watching && !expired && !stuck { Stage::Watch } else { Stage::Start };
        self.page.reset();
        self.line = Vec::new();
        self.state = State::Waiting { until: now + wait, then };
        self.note = Some(Note::Failed {
            kind: self.config.kind,
            namespace: self.config.namespace.clone(),
            watching,
            problem,
            wait,
        });
    }

    fn page_end(&mut self, now: Instant, rng: &mut Rng, sink: &mut dyn FnMut(Event<'_>)) {
        let head = match self.page.finish() {
            Ok(head) => head,
            Err(reason) => return self.fail(now, Problem::Broken(reason.into()), rng),
        };
        match head.token {
            Some(token) => self.fetch(now, Stage::Page { token: Some(token) }),
            None => {
                self.resource_version = head.resource_version;
                self.synced = true;
                sink(Event::Synced);
                self.fetch(now, Stage::Watch);
            }
        }
    }

    fn watch_line(&mut self, now: Instant, line: &[u8], rng: &mut Rng, sink: &mut dyn FnMut(Event<'_>)) {
        #[derive(Deserialize)]
        struct WatchEvent<'a> {
            #[serde(borrow)]
            r#type: Cow<'a, str>,
            #[serde(borrow)]
            object: &'a RawValue,
        }
        if line.iter().all(u8::is_ascii_whitespace) {
            return;
        }
        let Ok(event) = serde_json::from_slice::<WatchEvent<'_>>(line) else {
            return self.fail(now, Problem::Broken("a watch event that is not JSON".into()), rng);
        };
        let kind = self.config.kind;
        let object = event.object.get().as_bytes();
        match &*event.r#type {
            "ERROR" => {
                let status = parse_status(0, object);
                return self.fail(now, Problem::Status(status), rng);
            }
            "BOOKMARK" => {
                let Ok(bookmark) = serde_json::from_slice::<Bookmark<'_>>(object) else {
                    return self.fail(now, Problem::Broken("an unreadable bookmark".into()), rng);
                };
                self.advance(&bookmark.metadata.resource_version);
                let ended = bookmark
                    .metadata
                    .annotations
                    .is_some_and(|a| a.initial_events_end == Some("true".into()));
                if let State::Fetching { stage, started, silent_until, .. } = &mut self.state
                    && matches!(stage, Stage::Initial)
                    && ended
                {
                    *stage = Stage::Watch;
                    *started = now;
                    *silent_until = now + watch_limit();
                    self.synced = true;
                    sink(Event::Synced);
                    return;
                }
            }
            word @ ("ADDED" | "MODIFIED" | "DELETED") => match Head::parse(kind, object) {
                Ok(head) => {
                    self.advance(&head.resource_version);
                    sink(match word {
                        "DELETED" => Event::Gone { key: head.key, object },
                        _ => Event::Present { key: head.key, object },
                    });
                }
                Err(reason) => self.note = Some(Note::Unreadable { kind, reason }),
            },
            // A later server may have more to say.
            _ => return,
        }
        if matches!(self.state, State::Fetching { stage: Stage::Watch, .. }) {
            self.backoff.succeed();
        }
    }

    fn advance(&mut self, resource_version: &str) {
        // It goes into a URL, and is a number on every server there is.
        if !resource_version.is_empty() && resource_version.bytes().all(|b| b.is_ascii_alphanumeric()) {
            self.resource_version.clear();
            self.resource_version.push_str(resource_version);
        }
    }
}

/// A GET.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Fetch {
    /// To compare with [`Informer::fetching`].
    pub id: u32,
    /// Path and query.
    pub path: String,
}

/// What the API server said, in its order.
#[derive(PartialEq, Eq, Debug)]
pub enum Event<'a> {
    /// A list begins.
    ListStarted,
    /// The object as JSON.
    Present {
        /// Its name.
        key: Key,
        /// Its bytes.
        object: &'a [u8],
    },
    /// A DELETED watch event with the object's last state.
    Gone {
        /// Its name.
        key: Key,
        /// Its bytes.
        object: &'a [u8],
    },
    /// The list is complete.
    Synced,
}

/// How a GET ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum End {
    /// The body of a 200 answer is complete.
    Finished,
    /// Any other answer.
    Status(Status),
    /// The connection failed.
    Broken(String),
}

/// Trouble, in words for a person.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Note {
    /// A list or a watch failed and will be tried again.
    Failed {
        /// Of this kind.
        kind: Kind,
        /// In this namespace; `None` for all.
        namespace: Option<Box<str>>,
        /// A watch, or else a list.
        watching: bool,
        /// What happened.
        problem: Problem,
        /// Time until the next try.
        wait: Duration,
    },
    /// One object cannot be read and is left alone.
    Unreadable {
        /// Of this kind.
        kind: Kind,
        /// Why.
        reason: &'static str,
    },
}

impl Note {
    /// Whether this is daily business: a watch that the server ended or has forgotten.
    pub fn is_routine(&self) -> bool {
        matches!(self, Self::Failed { problem: Problem::Status(Status { code: 410, .. }), .. })
    }
}

/// Why a list or a watch failed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Problem {
    /// The API server refused.
    Status(Status),
    /// The answer broke off or made no sense.
    Broken(String),
    /// One object is larger than any API server stores.
    TooLarge,
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreadable { kind, reason } => {
                write!(f, "left out an object of kind {} that cannot be read: {reason}", kind.as_str())
            }
            Self::Failed { kind, namespace, watching, problem, wait } => {
                let verb = if *watching { "watch" } else { "list" };
                let plural = kind.plural();
                write!(f, "cannot {verb} {plural}")?;
                if let Some(namespace) = namespace {
                    write!(f, " in namespace {namespace}")?;
                }
                match problem {
                    Problem::Status(status) => {
                        write!(f, ": {} {}: {}", status.code, status.reason, status.message)?;
                        f.write_str(match status.code {
                            400 => "; check --label-selector",
                            401 => "; the API server does not accept this identity: check the token or client certificate",
                            403 => "; the Role must allow get, list and watch",
                            404 => "; is Argo CD's CustomResourceDefinition installed?",
                            _ => "",
                        })?;
                    }
                    Problem::Broken(reason) => write!(f, ": {reason}")?,
                    Problem::TooLarge => write!(f, ": an object above {} MiB", MAX_OBJECT >> 20)?,
                }
                let tenths = wait.as_millis() / 100;
                write!(f, "; next attempt in {}.{} s", tenths / 10, tenths % 10)
            }
        }
    }
}

/// Reads an API server's `Status`; `code` is the HTTP status, or 0 to take the body's word.
pub fn parse_status(code: u16, body: &[u8]) -> Status {
    #[derive(Deserialize, Default)]
    struct Raw<'a> {
        code: Option<u16>,
        #[serde(borrow)]
        reason: Option<Cow<'a, str>>,
        #[serde(borrow)]
        message: Option<Cow<'a, str>>,
        details: Option<Details>,
    }
    #[derive(Deserialize)]
    struct Details {
        #[serde(rename = "retryAfterSeconds")]
        retry_after: Option<u32>,
    }
    let raw: Raw<'_> = serde_json::from_slice(body).unwrap_or_default();
    let mut message = raw.message.map_or_else(String::new, Cow::into_owned);
    if message.len() > MAX_MESSAGE {
        message.truncate(message.floor_char_boundary(MAX_MESSAGE));
    }
    Status {
        code: if code == 0 { raw.code.unwrap_or(500) } else { code },
        reason: raw.reason.map_or_else(String::new, Cow::into_owned),
        message,
        retry_after: raw.details.and_then(|d| d.retry_after).map(|s| Duration::from_secs(s.into())),
    }
}

#[derive(Debug)]
enum State {
    Waiting {
        until: Instant,
        then: Stage,
    },
    Fetching {
        stage: Stage,
        silent_until: Instant,
        started: Instant,
        /// Whether [`Event::ListStarted`] was said.
        announced: bool,
    },
}

#[derive(Debug)]
enum Stage {
    /// A list, in whichever way the server can.
    Start,
    Page {
        token: Option<String>,
    },
    /// A streamed list; it becomes a watch.
    Initial,
    Watch,
}

/// The part of an object that names it.
struct Head<'a> {
    key: Key,
    resource_version: Cow<'a, str>,
}

impl<'a> Head<'a> {
    fn parse(kind: Kind, object: &'a [u8]) -> Result<Self, &'static str> {
        #[derive(Deserialize)]
        struct Object<'a> {
            #[serde(borrow)]
            metadata: Metadata<'a>,
        }
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Metadata<'a> {
            #[serde(borrow)]
            name: Cow<'a, str>,
            #[serde(borrow)]
            namespace: Cow<'a, str>,
            #[serde(borrow, default)]
            resource_version: Cow<'a, str>,
        }
        let Ok(Object { metadata }) = serde_json::from_slice(object) else {
            return Err("it is no JSON object with metadata.name and metadata.namespace");
        };
        if !is_dns_subdomain(&metadata.name) || !is_dns_subdomain(&metadata.namespace) {
            return Err("its name or namespace is not a DNS name");
        }
        Ok(Self {
            key: Key::new(kind, &metadata.namespace, &metadata.name),
            resource_version: metadata.resource_version,
        })
    }
}

#[derive(Deserialize)]
struct Bookmark<'a> {
    #[serde(borrow)]
    metadata: BookmarkMetadata<'a>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct BookmarkMetadata<'a> {
    #[serde(borrow)]
    resource_version: Cow<'a, str>,
    #[serde(borrow)]
    annotations: Option<BookmarkAnnotations<'a>>,
}

#[derive(Deserialize)]
struct BookmarkAnnotations<'a> {
    #[serde(borrow, rename = "k8s.io/initial-events-end")]
    initial_events_end: Option<Cow<'a, str>>,
}

/// Splits a list into its items as the bytes come; holds one item at most.
#[derive(Debug, Default)]
struct PageReader {
    /// Open objects and arrays.
    depth: u32,
    in_string: bool,
    escaped: bool,
    /// At depth 1: a value comes next, not a key.
    after_colon: bool,
    /// Inside the array `items`.
    in_items: bool,
    key: Vec<u8>,
    capture: Capture,
    /// What was captured in earlier pieces.
    held: Vec<u8>,
    metadata: Vec<u8>,
    kind: Vec<u8>,
    done: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Capture {
    #[default]
    Nothing,
    Key,
    Item,
    Metadata,
    Kind,
}

struct PageHead {
    resource_version: String,
    token: Option<String>,
}

impl PageReader {
    fn reset(&mut self) {
        *self = Self::default();
    }

    fn oversized(&self) -> bool {
        self.held.len() > MAX_OBJECT
    }

    fn feed(&mut self, bytes: &[u8], item: &mut dyn FnMut(&[u8])) {
        // Where the current capture began in these bytes.
        let mut start = 0;
        for (at, &byte) in bytes.iter().enumerate() {
            if self.in_string {
                if self.escaped {
                    self.escaped = false;
                } else if byte == b'\\' {
                    self.escaped = true;
                } else if byte == b'"' {
                    self.in_string = false;
                    if self.capture == Capture::Key {
                        self.take(bytes, start..at, item);
                    } else if self.depth == 1 {
                        self.take(bytes, start..at + 1, item);
                    }
                }
                continue;
            }
            match byte {
                b'"' => {
                    self.in_string = true;
                    if self.depth == 1 {
                        if self.after_colon {
                            self.begin_value(at, &mut start);
                        } else {
                            self.key.clear();
                            self.capture = Capture::Key;
                            start = at + 1;
                        }
                    }
                }
                b'{' | b'[' => {
                    if self.depth == 1 && self.after_colon {
                        if byte == b'[' && self.key == b"items" {
                            self.in_items = true;
                        } else {
                            self.begin_value(at, &mut start);
                        }
                    } else if self.depth == 2 && self.in_items && byte == b'{' {
                        self.capture = Capture::Item;
                        start = at;
                    }
                    self.depth += 1;
                }
                b'}' | b']' => {
                    self.depth = self.depth.saturating_sub(1);
                    match self.depth {
                        0 => self.done = true,
                        1 => {
                            self.take(bytes, start..at + 1, item);
                            self.in_items = false;
                        }
                        2 if self.capture == Capture::Item => self.take(bytes, start..at + 1, item),
                        _ => {}
                    }
                }
                b':' if self.depth == 1 => self.after_colon = true,
                b',' if self.depth == 1 => self.after_colon = false,
                _ => {}
            }
        }
        if self.capture != Capture::Nothing {
            self.held.extend_from_slice(&bytes[start.min(bytes.len())..]);
        }
    }

    fn begin_value(&mut self, at: usize, start: &mut usize) {
        self.capture = match &*self.key {
            b"metadata" => Capture::Metadata,
            b"kind" => Capture::Kind,
            _ => Capture::Nothing,
        };
        *start = at;
    }

    /// A captured value is complete: its last piece is `range` of `bytes`.
    fn take(&mut self, bytes: &[u8], range: Range<usize>, item: &mut dyn FnMut(&[u8])) {
        let capture = core::mem::take(&mut self.capture);
        // Begun in an earlier piece: `held` has the start, and `range` starts at 0.
        let whole: Cow<'_, [u8]> = if self.held.is_empty() {
            Cow::Borrowed(&bytes[range])
        } else {
            let mut held = core::mem::take(&mut self.held);
            held.extend_from_slice(&bytes[range]);
            Cow::Owned(held)
        };
        match capture {
            Capture::Nothing => {}
            Capture::Key => self.key = whole.into_owned(),
            Capture::Metadata => self.metadata = whole.into_owned(),
            Capture::Kind => self.kind = whole.into_owned(),
            Capture::Item => {
                item(&whole);
                if let Cow::Owned(mut held) = whole
                    && held.capacity() <= KEPT_BUFFER
                {
                    held.clear();
                    self.held = held;
                }
            }
        }
    }

    /// The page is over: was it a whole list?
    fn finish(&mut self) -> Result<PageHead, &'static str> {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Metadata<'a> {
            #[serde(borrow)]
            resource_version: Cow<'a, str>,
            #[serde(borrow, default)]
            r#continue: Cow<'a, str>,
        }
        let page = core::mem::take(self);
        if !page.done {
            return Err("the list broke off");
        }
        if !page.kind.ends_with(b"List\"") {
            return Err("the answer is not a list");
        }
        match serde_json::from_slice::<Metadata<'_>>(&page.metadata) {
            Ok(metadata) if !metadata.resource_version.is_empty() => Ok(PageHead {
                resource_version: metadata.resource_version.into_owned(),
                token: Some(metadata.r#continue.into_owned()).filter(|token| !token.is_empty()),
            }),
            _ => Err("the list has no resourceVersion"),
        }
    }
}

/// Servers before 1.27, and later ones with the feature switched off, refuse the parameters of a streamed list.
fn refuses_streaming(status: &Status) -> bool {
    matches!(status.code, 400 | 405 | 406 | 422 | 501)
}

/// The longest that a watch may stand without a byte: the server ends it itself before that.
fn watch_limit() -> Duration {
    Duration::from_secs(2 * WATCH_SECONDS + 60)
}

fn push_encoded(out: &mut String, text: &str) {
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.' | b'~') {
            out.push(char::from(byte));
        } else {
            // Writing to a String cannot fail.
            let _ = write!(out, "%{byte:02X}");
        }
    }
}

/// A watch lasts between this and twice this: servers close idle ones after half an hour at the earliest, and a
/// fleet must not come back in the same second.
const WATCH_SECONDS: u64 = 29 * 60;

/// A watch that was refused this often in a row lists again.
const WATCH_TRIES: u32 = 4;
/// A server, or a proxy before it, that asks for more patience than this is asked again all the same.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(300);

/// A watch that ended sooner counts as a failure, so that a server that closes at once causes no hot loop.
const WATCH_STOOD: Duration = Duration::from_secs(5);

/// A slow API server may take a minute before the first byte of a list.
const LIST_SILENCE: Duration = Duration::from_secs(120);

/// etcd takes 1.5 MiB by default and API servers refuse bodies above 3 MiB; a watch event adds a frame.
const MAX_OBJECT: usize = 8 << 20;

/// Larger buffers are given back after use.
const KEPT_BUFFER: usize = 32 << 10;

const MAX_MESSAGE: usize = 1024;

const BACKOFF: Policy = match Policy::new(Duration::from_secs(1), 200, Duration::from_secs(30)) {
    Ok(policy) => policy,
    Err(_) => panic!("checked when compiled"),
};

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::format;
    use alloc::string::ToString;
    use alloc::vec;

    struct Rig {
        informer: Informer,
        rng: Rng,
        now: Instant,
        events: Vec<String>,
    }

    impl Rig {
        fn new(streaming_lists: bool) -> Self {
            let informer = Informer::new(Config {
                kind: Kind::Application,
                namespace: Some("argocd".into()),
                label_selector: "a!=true".into(),
                page_size: 2,
                streaming_lists,
            });
            Self { informer, rng: Rng::new(9), now: Instant::ZERO, events: Vec::new() }
        }

        fn wait(&mut self) -> Duration {
            let deadline = self.informer.poll_timeout().expect("a deadline");
            let waited = deadline - self.now;
            self.now = self.now.max(deadline);
            self.informer.handle_timeout(self.now, &mut self.rng);
            waited
        }

        fn path(&mut self) -> String {
            let fetch = self.informer.poll_fetch(&mut self.rng).expect("a fetch");
            assert_eq!(self.informer.fetching(), Some(fetch.id));
            assert_eq!(self.informer.poll_fetch(&mut self.rng), None);
            let path = fetch.path.strip_prefix("/apis/argoproj.io/v1alpha1/namespaces/argocd/applications?");
            path.expect("the collection")
                .strip_prefix("labelSelector=a%21%3Dtrue&")
                .expect("the selector")
                .into()
        }

        fn bytes(&mut self, bytes: &[u8]) {
            let events = &mut self.events;
            self.informer.receive(self.now, bytes, &mut self.rng, &mut |event| events.push(word(&event)));
        }

        fn end(&mut self, end: End) {
            let events = &mut self.events;
            self.informer.end(self.now, end, &mut self.rng, &mut |event| events.push(word(&event)));
        }

        fn take(&mut self) -> String {
            core::mem::take(&mut self.events).join(" ")
        }

        fn status(&mut self, code: u16) {
            self.end(End::Status(Status { code, ..Status::default() }));
        }

        /// A machine whose watch from version 10 runs.
        fn watching() -> Self {
            let mut rig = Self::new(false);
            rig.wait();
            rig.path();
            rig.bytes(list(&["a"], "10", "").as_bytes());
            rig.end(End::Finished);
            assert_eq!(rig.take(), "list +a synced");
            assert!(
                rig.path()
                    .starts_with("watch=true&allowWatchBookmarks=true&resourceVersion=10&timeoutSeconds=")
            );
            rig
        }
    }

    fn word(event: &Event<'_>) -> String {
        match event {
            Event::ListStarted => "list".into(),
            Event::Present { key, object } => {
                assert_eq!(Head::parse(key.kind, object).map(|h| h.key), Ok(key.clone()));
                format!("+{}", key.name)
            }
            Event::Gone { key, .. } => format!("-{}", key.name),
            Event::Synced => "synced".into(),
        }
    }

    fn object(name: &str, version: &str) -> String {
        format!(
            r#"{{"kind":"Application","metadata":{{"name":"{name}","namespace":"argocd","resourceVersion":"{version}"}},"items":[{{}}],"spec":{{"x":"}}]\"{{"}}}}"#
        )
    }

    fn list(names: &[&str], version: &str, token: &str) -> String {
        let items: Vec<String> = names.iter().map(|name| object(name, "1")).collect();
        format!(
            "{{\"apiVersion\":\"argoproj.io/v1alpha1\",\"items\":[{}],\"kind\":\"ApplicationList\",\"metadata\":{{\"continue\":\"{token}\",\"resourceVersion\":\"{version}\"}}}}\n",
            items.join(",")
        )
    }

    fn event(kind: &str, object: &str) -> String {
        format!("{{\"type\":\"{kind}\",\"object\":{object}}}\n")
    }

    fn bookmark(version: &str, end: bool) -> String {
        let annotations = if end { r#","annotations":{"k8s.io/initial-events-end":"true"}"# } else { "" };
        event("BOOKMARK", &format!(r#"{{"metadata":{{"resourceVersion":"{version}"{annotations}}}}}"#))
    }

    #[test]
    fn each_kind_is_asked_for_no_more_than_it_is() {
        for (kind, expected) in [
            (Kind::AppProject, "/apis/argoproj.io/v1alpha1/namespaces/n/appprojects?labelSelector=a&limit=2"),
            (
                Kind::Repository,
                "/api/v1/namespaces/n/secrets?labelSelector=a%2Cargocd.argoproj.io%2Fsecret-type%20in%20%28repository%2Crepo-creds%29&limit=2",
            ),
            (
                Kind::GpgKey,
                "/api/v1/namespaces/n/configmaps?labelSelector=a&fieldSelector=metadata.name%3Dargocd-gpg-keys-cm&limit=2",
            ),
        ] {
            let mut informer = Informer::new(Config {
                kind,
                namespace: Some("n".into()),
                label_selector: "a".into(),
                page_size: 2,
                streaming_lists: false,
            });
            informer.handle_timeout(Instant::ZERO, &mut Rng::new(1));
            assert_eq!(informer.poll_fetch(&mut Rng::new(1)).expect("a list").path, expected);
        }
        assert_eq!(selector("x=y"), "argocd-agent.argoproj-labs.io/ignore-sync!=true,x=y");
    }

    #[test]
    fn pages_then_a_watch() {
        let mut rig = Rig::new(false);
        rig.wait();
        assert_eq!(rig.path(), "limit=2");
        rig.bytes(list(&["a", "b"], "10", "to/ken=").as_bytes());
        rig.end(End::Finished);
        assert_eq!(rig.take(), "list +a +b");
        assert_eq!(rig.path(), "continue=to%2Fken%3D&limit=2");
        rig.bytes(list(&["c"], "10", "").as_bytes());
        assert!(!rig.informer.has_synced());
        rig.end(End::Finished);
        assert_eq!(rig.take(), "+c synced");
        assert!(rig.informer.has_synced());
        assert!(rig.path().starts_with("watch=true&allowWatchBookmarks=true&resourceVersion=10&"));
        rig.bytes(event("MODIFIED", &object("a", "11")).as_bytes());
        rig.bytes(event("DELETED", &object("b", "12")).as_bytes());
        rig.bytes(bookmark("40", false).as_bytes());
        assert_eq!(rig.take(), "+a -b");
        rig.now += Duration::from_secs(1800);
        rig.end(End::Finished);
        assert!(rig.path().contains("resourceVersion=40&"), "resumes from the bookmark");
        assert_eq!(rig.take(), "");
    }

    #[test]
    fn any_cut_of_the_bytes_gives_the_same() {
        let page = list(&["a", "b"], "10", "");
        let lines = [
            event("ADDED", &object("c", "11")),
            "\n".into(),
            bookmark("12", false),
            event("DELETED", &object("a", "13")),
        ]
        .concat();
        for size in 1..40 {
            let mut rig = Rig::new(false);
            rig.wait();
            rig.path();
            page.as_bytes().chunks(size).for_each(|chunk| rig.bytes(chunk));
            rig.end(End::Finished);
            assert_eq!(rig.take(), "list +a +b synced", "pieces of {size}");
            rig.path();
            lines.as_bytes().chunks(size).for_each(|chunk| rig.bytes(chunk));
            assert_eq!(rig.take(), "+c -a", "pieces of {size}");
            assert_eq!(rig.informer.resource_version, "13");
        }
    }

    #[test]
    fn an_empty_list_is_a_list() {
        for items in ["[]", "null"] {
            let mut rig = Rig::new(false);
            rig.wait();
            rig.bytes(
                format!(
                    r#"{{"kind":"ApplicationList","items":{items},"metadata":{{"resourceVersion":"3"}}}}"#
                )
                .as_bytes(),
            );
            rig.end(End::Finished);
            assert_eq!(rig.take(), "list synced");
        }
    }

    #[test]
    fn a_list_that_failed_says_nothing() {
        let bodies = [
            r#"{"kind":"Status","status":"Failure","metadata":{},"code":500}"#.to_string(),
            r#"{"kind":"ApplicationList","items":[],"metadata":{}}"#.into(),
            r#"{"items":[],"metadata":{"resourceVersion":"3"}}"#.into(),
            list(&["a", "b"], "10", "").replace("\"kind\":\"ApplicationList\"", "\"kind\":\"Application"),
            list(&["a", "b"], "10", "")[..200].into(),
            String::new(),
            "]]]}}}".into(),
            "null".into(),
        ];
        for body in bodies {
            let mut rig = Rig::new(false);
            rig.wait();
            rig.path();
            rig.bytes(body.as_bytes());
            rig.end(End::Finished);
            let said = rig.take();
            assert!(!said.contains("synced") && !said.contains('-'), "{body}: {said}");
            assert!(!rig.informer.has_synced());
            assert!(rig.informer.poll_note().is_some(), "{body}");
            assert!(rig.wait() >= Duration::from_millis(500));
            assert_eq!(rig.path(), "limit=2");
        }
    }

    #[test]
    fn a_streamed_list_becomes_a_watch() {
        let mut rig = Rig::new(true);
        rig.wait();
        let path = rig.path();
        assert!(path.starts_with("watch=true&allowWatchBookmarks=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&timeoutSeconds="), "{path}");
        rig.bytes(event("ADDED", &object("a", "7")).as_bytes());
        rig.bytes(event("ADDED", &object("b", "5")).as_bytes());
        assert_eq!(rig.take(), "list +a +b");
        rig.bytes(bookmark("9", true).as_bytes());
        assert_eq!(rig.take(), "synced");
        assert!(rig.informer.poll_timeout().expect("a deadline") - rig.now > Duration::from_secs(3000));
        rig.bytes(event("MODIFIED", &object("b", "11")).as_bytes());
        assert_eq!(rig.take(), "+b");
        rig.now += Duration::from_secs(1800);
        rig.end(End::Finished);
        assert!(rig.path().contains("&resourceVersion=11&"));
    }

    #[test]
    fn a_server_without_streamed_lists_is_asked_for_pages() {
        for code in [400, 422, 501] {
            let mut rig = Rig::new(true);
            rig.wait();
            rig.path();
            rig.status(code);
            assert_eq!(rig.path(), "limit=2", "{code}: at once");
        }
        // One that takes the parameters without knowing them.
        let mut rig = Rig::new(true);
        rig.wait();
        rig.path();
        rig.bytes(event("ADDED", &object("a", "7")).as_bytes());
        assert_eq!(rig.wait(), LIST_SILENCE);
        rig.wait();
        assert_eq!(rig.path(), "limit=2");
    }

    #[test]
    fn a_streamed_list_that_breaks_off_starts_again() {
        for code in [401, 403, 404, 410, 429, 500] {
            let mut rig = Rig::new(true);
            rig.wait();
            rig.path();
            rig.bytes(event("ADDED", &object("a", "7")).as_bytes());
            rig.status(code);
            assert_eq!(rig.take(), "list +a");
            rig.wait();
            assert!(rig.path().contains("sendInitialEvents"), "{code}");
        }
    }

    #[test]
    fn gone_lists_again_after_a_wait_and_without_a_tight_loop() {
        let error = event("ERROR", r#"{"kind":"Status","code":410,"reason":"Expired","message":"too old"}"#);
        let mut rig = Rig::watching();
        let mut rounds = 0;
        while rig.now < Instant::from_millis(60_000) {
            if rounds % 2 == 0 {
                rig.bytes(error.as_bytes())
            } else {
                rig.status(410)
            }
            assert_eq!(rig.informer.fetching(), None);
            rig.bytes(event("DELETED", &object("a", "11")).as_bytes());
            assert_eq!(rig.take(), "", "nothing counts after the error");
            assert!(rig.informer.poll_note().expect("a note").is_routine());
            rig.wait();
            assert_eq!(rig.path(), "limit=2");
            rig.bytes(list(&[], "20", "").as_bytes());
            rig.end(End::Finished);
            assert_eq!(rig.take(), "list synced");
            rig.path();
            rounds += 1;
        }
        assert!(rounds <= 20, "{rounds} rounds in a minute");
    }

    #[test]
    fn a_broken_watch_resumes() {
        let mut rig = Rig::watching();
        rig.bytes(event("ADDED", &object("b", "12")).as_bytes());
        rig.end(End::Broken("connection reset".into()));
        assert!(rig.wait() >= Duration::from_millis(500));
        assert!(rig.path().contains("&resourceVersion=12&"));
        rig.status(500);
        rig.wait();
        assert!(rig.path().contains("&resourceVersion=12&"));
    }

    #[test]
    fn a_version_that_is_refused_for_ever_lists_again() {
        let mut rig = Rig::watching();
        let mut paths = vec![];
        for _ in 0..6 {
            rig.status(504);
            rig.wait();
            paths.push(rig.path() == "limit=2");
            if paths.ends_with(&[true]) {
                break;
            }
        }
        assert!(paths.len() > 2 && paths.ends_with(&[true]), "{paths:?}");
    }

    #[test]
    fn a_watch_that_ends_at_once_is_no_hot_loop() {
        let mut rig = Rig::watching();
        for _ in 0..10 {
            rig.end(End::Finished);
            assert!(rig.wait() >= Duration::from_millis(500));
            rig.path();
        }
        assert!(rig.now > Instant::from_millis(20_000));
    }

    #[test]
    fn retry_after_is_obeyed() {
        let mut rig = Rig::watching();
        let body = br#"{"code":429,"reason":"TooManyRequests","message":"slow down","details":{"retryAfterSeconds":90}}"#;
        rig.end(End::Status(parse_status(429, body)));
        assert!(rig.wait() >= Duration::from_secs(90));
    }

    #[test]
    fn one_unreadable_object_stops_nothing() {
        let mut rig = Rig::watching();
        for bad in [r#"{"metadata":{"name":"x"}}"#, r#"{"metadata":{"name":"../x","namespace":"n"}}"#, "7"] {
            rig.bytes(event("ADDED", bad).as_bytes());
            let note = rig.informer.poll_note().expect("a note");
            assert!(matches!(note, Note::Unreadable { .. }), "{note}");
        }
        rig.bytes(event("ADDED", &object("b", "12")).as_bytes());
        rig.bytes(event("NOVELTY", "{}").as_bytes());
        assert_eq!(rig.take(), "+b");
    }

    #[test]
    fn endless_lines_and_items_are_cut() {
        let mut rig = Rig::watching();
        for _ in 0..=MAX_OBJECT / 65_536 {
            rig.bytes(&[b'x'; 65_536]);
        }
        assert_eq!(rig.informer.fetching(), None);
        assert_eq!(rig.informer.line.capacity(), 0);

        let mut rig = Rig::new(false);
        rig.wait();
        rig.bytes(br#"{"items":[{"x":""#);
        for _ in 0..=MAX_OBJECT / 65_536 {
            rig.bytes(&[b'x'; 65_536]);
        }
        assert_eq!(rig.informer.fetching(), None);
        assert_eq!(rig.informer.page.held.capacity(), 0);
    }

    #[test]
    fn garbage_never_panics() {
        let mut rng = Rng::new(77);
        let alphabet = br#"{}[]",:\ item"kind":"metadata"1n"#;
        for _ in 0..3000 {
            let mut rig = Rig::new(rng.below(2) == 0);
            rig.wait();
            for _ in 0..rng.below(6) {
                let piece: Vec<u8> = (0..rng.below(60))
                    .map(|_| alphabet[rng.below(alphabet.len() as u64) as usize])
                    .chain(*b"\n")
                    .collect();
                rig.bytes(&piece);
            }
            rig.end(End::Finished);
            assert!(!rig.take().contains("synced"));
        }
    }

    #[test]
    fn notes_say_what_to_do() {
        let mut rig = Rig::new(false);
        rig.wait();
        rig.end(End::Status(parse_status(
            403,
            br#"{"kind":"Status","reason":"Forbidden","message":"no","code":403}"#,
        )));
        let text = rig.informer.poll_note().expect("a note").to_string();
        assert!(
            text.starts_with(
                "cannot list applications in namespace argocd: 403 Forbidden: no; the Role must allow get, list and watch; next attempt in "
            ),
            "{text}"
        );
    }
}
