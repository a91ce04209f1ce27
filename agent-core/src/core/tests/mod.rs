//! Tables of facts in, requests and frames out: one test per rule of docs/core.md.

mod cluster;
mod content;
mod hub;
mod outbox;
mod site;

use alloc::string::{String, ToString};
use alloc::vec::Vec;
use alloc::{format, vec};
use core::time::Duration;

use crate::cloudevent::EventView;
use crate::cloudevent::EventWriter;
use crate::core::{Config, Core, Note};
use crate::event::{Target, Type};
use crate::object::ObjectView;
use crate::peer::{Capabilities, Mapping, Peer};
use crate::rand::Rng;
use crate::request::{Key, Kind, Observation, Outcome, Request, Status, Verb};
use crate::time::{Instant, Wall};

/// A core with its clock.
struct Rig {
    core: Core,
    now: Instant,
    namespace: &'static str,
}

/// A frame that the core sent.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Sent {
    target: String,
    r#type: String,
    event_id: String,
    resource_id: String,
    principal_uid: String,
    data: String,
}

impl Rig {
    fn new(config: Config, namespace: &'static str) -> Self {
        let core = Core::new(config, Rng::new(1), Wall { epoch_millis_at_zero: 0 });
        Self { core, now: Instant::from_millis(1), namespace }
    }

    /// An agent that has listed `objects`.
    fn site(objects: &[&str]) -> Self {
        Self::site_with(Config::agent("argocd"), objects)
    }

    fn site_with(config: Config, objects: &[&str]) -> Self {
        let mut rig = Self::new(config, "argocd");
        rig.list(objects);
        rig
    }

    /// A principal's half for `agent-1` that has listed `objects`.
    fn hub(objects: &[&str]) -> Self {
        let mut rig = Self::new(Config::principal("agent-1", "hub", "p-1"), "agent-1");
        rig.list(objects);
        rig
    }

    fn list(&mut self, objects: &[&str]) {
        for kind in Kind::ALL {
            self.core.list_started(kind);
        }
        for object in objects {
            self.see(object);
        }
        for kind in Kind::ALL {
            self.core.synced(self.now, kind);
        }
    }

    fn key(&self, object: &str) -> Key {
        let view = ObjectView::parse(object.as_bytes()).unwrap();
        Key::new(Kind::Application, self.namespace, &view.name)
    }

    fn see(&mut self, object: &str) {
        let key = self.key(object);
        self.core.observe(self.now, &key, Observation::Present(object.as_bytes()));
    }

    fn see_gone(&mut self, object: &str) {
        let key = self.key(object);
        self.core.observe(self.now, &key, Observation::Gone(object.as_bytes()));
    }

    fn connect(&mut self) {
        let peer = Peer {
            version: "1".into(),
            instance: "x".into(),
            namespace: "".into(),
            mapping: Some(Mapping::Namespace),
            capabilities: Capabilities::OURS,
        };
        self.core.connected(self.now, &peer);
    }

    fn connect_go(&mut self) {
        self.core.connected(self.now, &Peer::go("0.9.0"));
    }

    fn requests(&mut self) -> Vec<Request> {
        core::iter::from_fn(|| self.core.poll_request(self.now)).collect()
    }

    /// The only request that is due.
    fn request(&mut self) -> Request {
        let mut requests = self.requests();
        assert_eq!(requests.len(), 1, "{requests:?}");
        requests.remove(0)
    }

    fn done(&mut self, request: &Request, object: &str) {
        self.core.complete(self.now, request.ticket, Outcome::Done(object.as_bytes().to_vec()));
    }

    fn fail(&mut self, request: &Request, code: u16, reason: &str) {
        let status = Status { code, reason: reason.into(), message: format!("{reason}!"), retry_after: None };
        self.core.complete(self.now, request.ticket, Outcome::Status(status));
    }

    fn frames(&mut self) -> Vec<Sent> {
        core::iter::from_fn(|| self.core.poll_transmit(self.now, usize::MAX))
            .map(|frame| {
                let event = EventView::decode(&frame).unwrap();
                Sent {
                    target: event.dataschema.into(),
                    r#type: event.r#type.rsplit('.').next().unwrap().into(),
                    event_id: event.event_id.into(),
                    resource_id: event.resource_id.into(),
                    principal_uid: event.principal_uid.into(),
                    data: String::from_utf8(event.data.to_vec()).unwrap(),
                }
            })
            .collect()
    }

    fn types(&mut self) -> Vec<String> {
        self.frames().into_iter().map(|frame| frame.r#type).collect()
    }

    fn event(&mut self, r#type: Type, object: &str) {
        let uid = ObjectView::parse(object.as_bytes()).unwrap().uid.to_string();
        self.event_with(r#type, object, &format!("app_{uid}_7_{}", object.len()), "p-1");
    }

    fn event_with(&mut self, r#type: Type, object: &str, event_id: &str, principal_uid: &str) {
        let target = match r#type {
            Type::RequestUpdate
            | Type::RequestResourceResync
            | Type::ResponseSyncedResource
            | Type::RequestSyncedResourceList => Target::ResourceResync,
            Type::Processed => Target::EventProcessed,
            Type::ClusterCacheInfoUpdate => Target::ClusterCacheInfoUpdate,
            _ => Target::Application,
        };
        let mut frame = Vec::new();
        EventWriter {
            source: "",
            r#type: r#type.as_str(),
            target,
            subject: None,
            event_id,
            resource_id: "app_x",
            sent_at: None,
            principal_uid: Some(principal_uid).filter(|uid| !uid.is_empty()),
            data: object.as_bytes(),
        }
        .encode(&mut frame);
        self.core.receive(self.now, &frame).unwrap();
    }

    fn ack(&mut self, sent: &Sent) {
        self.event_with(Type::Processed, "", &sent.event_id, "");
    }

    /// Every request that is due finds this object.
    fn answer(&mut self, object: &str) {
        for request in self.requests() {
            self.done(&request, object);
        }
    }

    /// The peer has dealt with every frame that is due.
    fn acknowledge(&mut self) {
        for frame in self.frames() {
            self.ack(&frame);
        }
    }

    fn advance(&mut self, by: Duration) {
        self.now += by;
        self.core.handle_timeout(self.now);
    }

    fn notes(&mut self) -> Vec<Note> {
        core::iter::from_fn(|| self.core.poll_note()).collect()
    }
}

fn verb(request: &Request) -> &'static str {
    match request.verb {
        Verb::Get => "GET",
        Verb::CreateNamespace => "POST namespace",
        Verb::Create(_) => "POST",
        Verb::JsonPatch(_) => "PATCH",
        Verb::Delete { .. } => "DELETE",
    }
}

fn body(request: &Request) -> String {
    match &request.verb {
        Verb::Create(body) | Verb::JsonPatch(body) => String::from_utf8(body.clone()).unwrap(),
        Verb::Delete { uid } => uid.to_string(),
        Verb::Get | Verb::CreateNamespace => String::new(),
    }
}

/// An Application on the hub.
fn hub_app(uid: &str, version: u32, path: &str) -> String {
    hub_app_with(uid, version, path, "", "")
}

/// With more metadata members and more top-level members, each beginning with a comma.
fn hub_app_with(uid: &str, version: u32, path: &str, metadata: &str, more: &str) -> String {
    format!(
        r#"{{"metadata":{{"name":"app","namespace":"agent-1","uid":"{uid}","resourceVersion":"{version}"{metadata}}},"spec":{{"destination":{{"name":"agent-1","namespace":"x"}},"project":"default","source":{{"path":"{path}"}}}}{more}}}"#
    )
}

/// Its copy on the site.
fn site_app(uid: &str, version: u32, source: &str, path: &str) -> String {
    site_app_with(uid, version, source, path, "", "")
}

fn site_app_with(uid: &str, version: u32, source: &str, path: &str, metadata: &str, more: &str) -> String {
    let annotations = if source.is_empty() {
        String::new()
    } else {
        format!(
            r#","annotations":{{"argocd.argoproj.io/principal-uid":"p-1","argocd.argoproj.io/source-uid":"{source}"}}"#
        )
    };
    format!(
        r#"{{"metadata":{{"name":"app","namespace":"argocd","uid":"{uid}","resourceVersion":"{version}"{annotations}{metadata}}},"spec":{{"destination":{{"name":"in-cluster","namespace":"x"}},"project":"default","source":{{"path":"{path}"}}}}{more}}}"#
    )
}

fn words(types: &[&str]) -> Vec<String> {
    types.iter().map(ToString::to_string).collect()
}

#[test]
fn an_unknown_target_is_acknowledged_and_named() {
    let mut rig = Rig::site(&[]);
    rig.connect();
    rig.frames();
    let mut frame = Vec::new();
    EventWriter {
        source: "",
        r#type: Type::Create.as_str(),
        target: Target::ApplicationSet,
        subject: None,
        event_id: "e",
        resource_id: "r",
        sent_at: None,
        principal_uid: None,
        data: b"{}",
    }
    .encode(&mut frame);
    rig.core.receive(rig.now, &frame).unwrap();
    assert_eq!(rig.types(), words(&["processed"]));
    assert!(matches!(&rig.notes()[..], [Note::Unsupported { target, .. }] if &**target == "applicationset"));
}

#[test]
fn garbage_is_an_error_and_changes_nothing() {
    let mut rig = Rig::site(&[&site_app("l-1", 5, "h-1", "a")]);
    rig.connect();
    rig.frames();
    assert!(rig.core.receive(rig.now, &[0xff; 40]).is_err());
    rig.event(Type::SpecUpdate, r#"{"metadata":{"name":"../x","uid":"u"},"spec":{}}"#);
    rig.event(Type::SpecUpdate, r#"{"metadata":{"name":"app","uid":"u"}}"#);
    assert_eq!(rig.types(), words(&["processed", "processed"]));
    assert!(rig.notes().iter().all(|note| matches!(note, Note::BadEvent { .. })));
    assert!(rig.requests().iter().all(|request| verb(request) == "GET"));
}

#[test]
fn a_stale_answer_is_dropped_and_counted() {
    let mut rig = Rig::site(&[]);
    rig.connect();
    rig.event(Type::Create, &hub_app("h-1", 7, "a"));
    let create = rig.request();
    rig.done(&create, &site_app("l-1", 9, "h-1", "a"));
    rig.done(&create, &site_app("l-1", 9, "h-1", "a"));
    assert_eq!(rig.core.counters().stale_answers, 1);
}

#[test]
fn no_tick_when_nothing_is_owed() {
    let mut rig = Rig::site(&[]);
    rig.connect();
    rig.event(Type::Create, &hub_app("h-1", 7, "a"));
    for _ in 0..4 {
        rig.answer(&site_app("l-1", 9, "h-1", "a"));
        rig.acknowledge();
    }
    let next = rig.core.poll_timeout().unwrap();
    assert!(
        next - rig.now >= Duration::from_secs(600),
        "only the next round and the status sweep may be left"
    );
    assert_eq!(vec![0; 0], rig.frames().iter().map(|_| 0).collect::<Vec<_>>());
}

#[test]
fn acknowledgements_for_a_peer_that_does_not_read_are_bounded() {
    let mut rig = Rig::site(&[]);
    rig.connect();
    rig.frames();
    for number in 0..10_000 {
        rig.event_with(Type::Delete, &hub_app("h-1", 7, "a"), &format!("app_h-1_{number}_x"), "p-1");
    }
    let frames = rig.frames();
    assert!((1000..5000).contains(&frames.len()), "{}", frames.len());
    assert!(frames.last().unwrap().event_id.contains("_9999_"));
}
