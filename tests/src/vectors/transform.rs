//! `application_transform`: events handed to a core that writes to an API server, and informer callbacks.
//!
//! A case runs against the core in its own role, with the embedded store as API server and a peer that acknowledges
//! everything. Time stands still: what the core would try again later counts as not done.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use agent_core::cloudevent::{EventView, EventWriter};
use agent_core::core::{AdoptionPolicy, Config, Core, MismatchPolicy};
use agent_core::event::{self, EventType, Target, Type};
use agent_core::object::SOURCE_UID;
use agent_core::peer::Peer;
use agent_core::rand::Rng;
use agent_core::request::{self, Key, Kind, Observation, Outcome, Request, Verb};
use agent_core::time::{Instant, Wall};
use serde_json::{Value, json};

use super::events::{parse, without_empty};
use super::{Plan, Verdict, equal, rules, text};
use crate::kube::store::{Object, PatchType, Preconditions, Store};
use crate::kube::{Resource, Status};

pub(super) const INBOUND: &[&str] = &[
    "role",
    "mode",
    "agent",
    "namespace",
    "destination_based_mapping",
    "create_namespace",
    "allowed_namespaces",
    "source_uid_mismatch_policy",
    "adoption_policy",
    "principal_namespace",
    "agent_namespace",
    "existing",
    "managed",
    "events",
    "results",
];
const OUTBOUND: &[&str] = &[
    "role",
    "mode",
    "destination_based_mapping",
    "principal_uid",
    "managed",
    "informer",
    "old",
    "new",
    "emitted",
    "objects_after",
];

/// Our DELETEs do not wait for dependents.
const BACKGROUND: &str = "background deletion";
/// A copy belongs to the hub by its annotation, also where no list in memory says so.
pub(super) const MAY_DELETE: &str = "what may delete";
/// A status of another object than the hub's, by UID, changes nothing.
const MAY_CLEAR: &str = "what a status may clear";
/// What is acknowledged, and who tries again.
const ACKNOWLEDGED: &str = "who retries and what is acknowledged";
/// Our ids of object events have a fourth part, from the content.
const FOURTH_PART: &str = "fourth part of event ids";
/// What the peer has acknowledged is not sent again beside an operation.
const UNCHANGED: &str = "an unchanged spec is not sent again";

pub(super) fn plan(sub: &str, case: &Value) -> Option<Plan> {
    match sub {
        "managed-create" | "managed-update" | "managed-adopt" | "managed-operation" | "managed-delete"
        | "managed-other" | "principal-managed" => Some(Plan::Run(inbound, INBOUND)),
        "agent-outbound" | "principal-outbound" if case["mode"] == "autonomous" => {
            Some(Plan::Later("autonomous mode"))
        }
        "principal-outbound" if case["destination_based_mapping"] == true => {
            Some(Plan::Later("destination mapping"))
        }
        "agent-outbound" | "principal-outbound" => Some(Plan::Run(outbound, OUTBOUND)),
        "principal-autonomous" if rules::is_first_create(case) => Some(Plan::Run(rules::rewritten, INBOUND)),
        "autonomous-agent" | "principal-autonomous" => Some(Plan::Later("autonomous mode")),
        "managed-destination-mapping" | "principal-managed-destination-mapping" => {
            Some(Plan::Run(rules::destination_mapping, INBOUND))
        }
        "managed-repository" | "managed-gpgkey" => Some(rules::content_plan()),
        _ => None,
    }
}

/// A frame that the core sent, acknowledgements apart.
#[derive(Debug)]
struct Sent {
    r#type: String,
    event_id: String,
    resource_id: String,
    principal_uid: String,
    data: Vec<u8>,
}

/// A core between a store and a peer.
struct Rig {
    core: Core,
    store: Store,
    now: Instant,
    /// What the core has seen, by name.
    seen: BTreeMap<String, Arc<Object>>,
    sent: Vec<Sent>,
    /// Event ids that the core acknowledged.
    acknowledged: Vec<String>,
    /// The API server's last refusal.
    refusal: Option<String>,
}

impl Rig {
    fn new(config: Config) -> Self {
        let wall = Wall { epoch_millis_at_zero: 1_767_323_045_000 };
        Self {
            core: Core::new(config, Rng::new(1), wall),
            store: Store::new(7, wall),
            now: Instant::from_millis(1),
            seen: BTreeMap::new(),
            sent: Vec::new(),
            acknowledged: Vec::new(),
            refusal: None,
        }
    }

    /// Lists, connects to a Go peer, and carries out what that leads to.
    fn start(&mut self) -> Result<(), String> {
        Kind::ALL.into_iter().for_each(|kind| self.core.list_started(kind));
        self.look();
        Kind::ALL.into_iter().for_each(|kind| self.core.synced(self.now, kind));
        self.core.connected(self.now, &Peer::go("0.9.0"));
        self.settle()?;
        self.sent.clear();
        self.acknowledged.clear();
        self.refusal = None;
        Ok(())
    }

    /// Tells the core what changed in its namespace.
    fn look(&mut self) {
        let namespace = self.core.config().namespace_of(Kind::Application).unwrap_or_default().to_owned();
        let objects: Vec<Arc<Object>> = self
            .store
            .iter(Resource::Application)
            .filter(|object| object.namespace() == namespace)
            .cloned()
            .collect();
        let key = |name: &str| Key::new(Kind::Application, &namespace, name);
        for object in &objects {
            let known = self.seen.get(object.name());
            if known.is_none_or(|known| known.resource_version() != object.resource_version()) {
                self.core.observe(self.now, &key(object.name()), Observation::Present(object.json()));
                self.seen.insert(object.name().to_owned(), object.clone());
            }
        }
        let gone: Vec<Arc<Object>> = self
            .seen
            .values()
            .filter(|known| !objects.iter().any(|object| object.name() == known.name()))
            .cloned()
            .collect();
        for object in gone {
            self.core.observe(self.now, &key(object.name()), Observation::Gone(object.json()));
            self.seen.remove(object.name());
        }
    }

    /// Carries out requests and delivers frames until the core has nothing to do at this instant.
    fn settle(&mut self) -> Result<(), String> {
        for _ in 0..200 {
            let mut busy = false;
            while let Some(request) = self.core.poll_request(self.now) {
                busy = true;
                let outcome = self.carry_out(&request);
                self.core.complete(self.now, request.ticket, outcome);
                self.look();
            }
            while let Some(frame) = self.core.poll_transmit(self.now, usize::MAX) {
                busy = true;
                self.deliver(&frame)?;
            }
            while self.core.poll_note().is_some() {}
            if !busy {
                return Ok(());
            }
        }
        Err("the core does not come to rest".to_owned())
    }

    fn carry_out(&mut self, request: &Request) -> Outcome {
        let (resource, key) = (Resource::from(request.key.kind), &request.key);
        let parsed =
            |body: &[u8]| serde_json::from_slice(body).map_err(|e| Status::bad_request(e.to_string()));
        let result = match &request.verb {
            Verb::Get => {
                self.store.get(resource, &key.namespace, &key.name).map(|object| object.json().to_vec())
            }
            Verb::Create(body) => parsed(body)
                .and_then(|object| self.store.create(resource, &key.namespace, object))
                .map(|object| object.json().to_vec()),
            Verb::CreateNamespace => {
                let namespace = parsed(&Verb::namespace_body(&key.namespace));
                let created = namespace.and_then(|object| self.store.create(Resource::Namespace, "", object));
                created.map(|object| object.json().to_vec())
            }
            Verb::JsonPatch(body) => self
                .store
                .patch(resource, &key.namespace, &key.name, PatchType::Json, body)
                .map(|object| object.json().to_vec()),
            Verb::Delete { uid } => {
                let preconditions = Preconditions { uid: Some(uid.to_string()), ..Preconditions::default() };
                self.store
                    .delete(resource, &key.namespace, &key.name, &preconditions)
                    .map(|deleted| deleted.body(resource))
            }
        };
        match result {
            Ok(body) => Outcome::Done(body),
            Err(status) => {
                self.refusal = Some(format!("{:?}: {}", request.verb, status.message));
                Outcome::Status(request::Status {
                    code: status.code,
                    reason: status.reason.to_owned(),
                    message: status.message,
                    retry_after: None,
                })
            }
        }
    }

    /// Records a frame, and acknowledges it as a peer does.
    fn deliver(&mut self, frame: &[u8]) -> Result<(), String> {
        let view = EventView::decode(frame).map_err(|error| error.to_string())?;
        if view.is_ack() {
            self.acknowledged.push(view.event_id.to_owned());
            return Ok(());
        }
        self.sent.push(Sent {
            r#type: view.r#type.to_owned(),
            event_id: view.event_id.to_owned(),
            resource_id: view.resource_id.to_owned(),
            principal_uid: view.principal_uid.to_owned(),
            data: view.data.to_vec(),
        });
        self.core.receive(self.now, &view.ack("")).map_err(|error| format!("{error:?}"))
    }
}

/// Events, one after the other.
fn inbound(case: &Value) -> Result<Verdict, String> {
    let agent = text(case, "agent");
    let config = match text(case, "role") {
        "agent" => Config {
            mismatch_policy: mismatch_policy(case)?,
            adoption_policy: match text(case, "adoption_policy") {
                "never" => AdoptionPolicy::Never,
                "" | "always" => AdoptionPolicy::Always,
                other => return Err(format!("unknown adoption policy {other:?}")),
            },
            ..Config::agent(text(case, "namespace"))
        },
        "principal" => Config::principal(agent, "argocd", "aaaaaaaa-aaaa-4aaa-8aaa-aaaaaaaaaaaa"),
        other => return Err(format!("unknown role {other:?}")),
    };
    let (events, results) = (list(case, "events"), list(case, "results"));
    equal("number of results", results.len(), events.len())?;
    let mut verdict = Verdict::Passed;
    let mut rig = Rig::new(config);
    let uids = place_existing(&mut rig.store, case)?;
    rig.start()?;

    for (index, (event, result)) in events.iter().zip(results).enumerate() {
        let mut object = event["object"].clone();
        if let Some(rule) = align(case, event, &uids, &mut object, &mut rig, index)? {
            verdict = Verdict::Deviation(rule);
        }
        let before = objects(&rig.store);
        let id = receive(&mut rig, event, &object, index)?;
        let acknowledged = rig.acknowledged.contains(&id);
        let refused = match text(result, "class") {
            "ok" | "discarded" | "not-allowed" | "error" => false,
            "retryable" => true,
            other => return Err(format!("unknown class {other:?}")),
        };
        let recorded: Vec<Value> = list(result, "objects_after").to_vec();
        if refused && acknowledged {
            // Go's write was refused and comes again for ever; ours stands, so the record is what was there before,
            // with what the event asked for.
            verdict = Verdict::Deviation(ACKNOWLEDGED);
            let wanted: Vec<Value> = recorded
                .into_iter()
                .map(|mut object_after| {
                    object_after["operation"] = object["operation"].clone();
                    object_after
                })
                .collect();
            compare_objects(objects(&rig.store), &wanted, &uids)?;
        } else {
            equal("acknowledged", acknowledged, !refused).map_err(|what| {
                format!("{what} ({})", rig.refusal.as_deref().unwrap_or("nothing was refused"))
            })?;
            if let Some(rule) =
                compare_after(case, event, result, [before, objects(&rig.store)], &recorded, &uids)?
            {
                verdict = Verdict::Deviation(rule);
            }
        }
        if let Some(rule) = emitted(result, &rig)? {
            verdict = Verdict::Deviation(rule);
        }
        rig.sent.clear();
    }
    Ok(verdict)
}

/// A status or an end from another copy than that of the hub's object is not the hub's concern, while Go goes by the
/// name alone. Where an event names another UID, it must change nothing; then the event is made one of the copy, and
/// the record applies.
fn align(
    case: &Value,
    event: &Value,
    uids: &BTreeMap<String, String>,
    object: &mut Value,
    rig: &mut Rig,
    index: usize,
) -> Result<Option<&'static str>, String> {
    if case["role"] != "principal" {
        return Ok(None);
    }
    let named = object["metadata"]["annotations"][SOURCE_UID].as_str().unwrap_or_default().to_owned();
    let name = format!("Application/{}/{}", text(case, "agent"), text(&object["metadata"], "name"));
    let Some(uid) = uids.get(&name).filter(|uid| !named.is_empty() && **uid != named) else {
        return Ok(None);
    };
    let before = objects(&rig.store);
    receive(rig, event, object, index + 1000)?;
    equal("objects after a word about another UID", objects(&rig.store), before)?;
    object["metadata"]["annotations"][SOURCE_UID] = json!(uid);
    Ok(Some(MAY_CLEAR))
}

/// Hands one event in and settles; returns its id.
fn receive(rig: &mut Rig, event: &Value, object: &Value, index: usize) -> Result<String, String> {
    let body = object.to_string();
    let r#type = text(event, "type");
    match text(event, "kind") {
        "Application" | "Error" => {}
        other => return Err(format!("unknown kind {other:?}")),
    }
    if matches!(EventType::parse(r#type), EventType::Other(_)) {
        return Err(format!("unknown type {:?}", r#type));
    }
    let metadata = &object["metadata"];
    let (name, uid) = (text(metadata, "name"), text(metadata, "uid"));
    // Recorded without a resource version, an event would look like one that a resync made up.
    let version = match text(metadata, "resourceVersion") {
        "" => (100 + index).to_string(),
        version => version.to_owned(),
    };
    let event_id = event::event_id(name, uid, &version, format!("{index}{body}").as_bytes());
    let mut message = Vec::new();
    EventWriter {
        source: "",
        r#type,
        target: Target::Application,
        subject: None,
        event_id: &event_id,
        resource_id: &event::resource_id(name, uid),
        sent_at: None,
        principal_uid: event["principaluid"].as_str(),
        data: body.as_bytes(),
    }
    .encode(&mut message);
    rig.core.receive(rig.now, &message).map_err(|error| format!("{error:?}"))?;
    rig.settle()?;
    if !rig.acknowledged.contains(&event_id) {
        // The core may ask the hub first; it withholds an acknowledgement for at most 30 s.
        rig.now += Duration::from_secs(31);
        rig.core.handle_timeout(rig.now);
        rig.settle()?;
    }
    Ok(event_id)
}

pub(super) fn mismatch_policy(case: &Value) -> Result<MismatchPolicy, String> {
    match text(case, "source_uid_mismatch_policy") {
        "upsert" => Ok(MismatchPolicy::Upsert),
        "" | "recreate" => Ok(MismatchPolicy::Recreate),
        other => Err(format!("unknown mismatch policy {other:?}")),
    }
}

/// Puts what was there before into the store; returns the UIDs by `KIND/NS/NAME`.
pub(crate) fn place_existing(store: &mut Store, case: &Value) -> Result<BTreeMap<String, String>, String> {
    let mut uids = BTreeMap::new();
    for existing in list(case, "existing") {
        let uid = place(store, existing)?;
        let metadata = &existing["object"]["metadata"];
        let name =
            format!("{}/{}/{}", text(existing, "kind"), text(metadata, "namespace"), text(metadata, "name"));
        uids.insert(name, uid);
    }
    Ok(uids)
}

/// Puts an object that was there before into the store; returns its UID.
fn place(store: &mut Store, existing: &Value) -> Result<String, String> {
    let resource = resource(text(existing, "kind"))?;
    let mut object = existing["object"].clone();
    let definition = resource.definition();
    object["apiVersion"] = json!(resource.api_version());
    object["kind"] = json!(definition.kind);
    let metadata = object["metadata"].as_object_mut().ok_or("no metadata")?;
    metadata.remove("resourceVersion");
    let namespace = metadata["namespace"].as_str().unwrap_or_default().to_owned();
    let created = store.create(resource, &namespace, object).map_err(|status| status.message)?;
    if existing["deletion_pending"] == true {
        store
            .delete(resource, &namespace, created.name(), &Preconditions::default())
            .map_err(|status| status.message)?;
    }
    Ok(created.uid().to_owned())
}

/// Compares the objects before and after an event with the record; the rule that explains a difference, if one does.
fn compare_after(
    case: &Value,
    event: &Value,
    result: &Value,
    [before, after]: [Vec<Value>; 2],
    recorded: &[Value],
    uids: &BTreeMap<String, String>,
) -> Result<Option<&'static str>, String> {
    let Err(difference) = compare_objects(after.clone(), recorded, uids) else { return Ok(None) };
    // Go waits for dependents in the foreground, which adds a finalizer.
    let in_background: Vec<Value> = recorded
        .iter()
        .map(|object| {
            let mut object = object.clone();
            if let Some(finalizers) = object["metadata"]["finalizers"].as_array_mut() {
                finalizers.retain(|finalizer| finalizer != "foregroundDeletion");
            }
            object
        })
        .collect();
    if in_background != recorded && compare_objects(after.clone(), &in_background, uids).is_ok() {
        return Ok(Some(BACKGROUND));
    }
    // Go refused because its list in memory lacks the object, which carries the event's UID all the same.
    let of_the_event = |object: &Value| {
        object["metadata"]["annotations"][SOURCE_UID] == event["object"]["metadata"]["uid"]
            && object["metadata"]["name"] == event["object"]["metadata"]["name"]
    };
    let listed = case["managed"].as_array().is_some_and(|managed| !managed.is_empty());
    if EventType::parse(text(event, "type")) == EventType::Known(Type::Delete)
        && text(result, "class") == "error"
        && !listed
        && recorded.iter().any(of_the_event)
        && compare_objects(before, recorded, uids).is_ok()
    {
        let without: Vec<Value> = recorded.iter().filter(|object| !of_the_event(object)).cloned().collect();
        if compare_objects(after, &without, uids).is_ok() {
            return Ok(Some(MAY_DELETE));
        }
    }
    Err(difference)
}

/// Every recorded event must be among ours. The record has only what the handler sent: ours may have more of what
/// its watch causes, or what asks and tells again.
fn emitted(result: &Value, rig: &Rig) -> Result<Option<&'static str>, String> {
    let mut rest: Vec<&Sent> = rig.sent.iter().collect();
    for event in list(result, "emitted") {
        let r#type = text(event, "type");
        let found = rest.iter().position(|sent| sent.r#type == r#type);
        let ours = found.map(|at| rest.remove(at)).ok_or_else(|| format!("{} was not sent", r#type))?;
        let (ours, mut payload) = (parse(&ours.data)?, event["payload"].clone());
        if r#type == Type::Error.as_str() {
            // A text for a person: that there is one counts.
            equal("no message", text(&ours, "message").is_empty(), false)?;
            payload["message"] = ours["message"].clone();
        }
        equal("payload", without_empty(&ours), without_empty(&payload))?;
    }
    let mut rule = None;
    for sent in rest {
        let EventType::Known(kind) = EventType::parse(&sent.r#type) else {
            return Err(format!("{} was sent", sent.r#type));
        };
        let told_again =
            matches!(kind, Type::StatusUpdate | Type::RequestUpdate | Type::SpecUpdate | Type::Create);
        // The watch saw the object's end.
        let ended =
            kind == Type::Delete && !rig.seen.contains_key(text(&parse(&sent.data)?["metadata"], "name"));
        if kind == Type::Error && text(result, "class") == "error" {
            // Go acknowledges a refusal and logs it on the site; ours says so on the hub.
            rule = Some(ACKNOWLEDGED);
        } else if !told_again && !ended {
            return Err(format!("{} was sent, which the record does not have", sent.r#type));
        }
    }
    Ok(rule)
}

/// An informer callback: what it makes the core send.
fn outbound(case: &Value) -> Result<Verdict, String> {
    let principal = case["role"] == "principal";
    let config = if principal {
        Config::principal("agent-1", "argocd", text(case, "principal_uid"))
    } else {
        Config::agent("argocd")
    };
    let namespace = config.namespace_of(Kind::Application).unwrap_or_default().to_owned();
    let mut site = Outbound { rig: Rig::new(config), current: None, created: None, namespace };
    let new = &case["new"];
    let informer = text(case, "informer");
    // Recorded with equal resource versions; a core tells changes by them.
    let before = match informer {
        "add" => None,
        "update" => Some(with_version(&case["old"], "4")),
        "delete" => Some(with_version(new, "4")),
        other => return Err(format!("unknown callback {other:?}")),
    };
    site.start(before.as_ref())?;
    let version = match text(&new["metadata"], "resourceVersion") {
        "" => "5",
        version => version,
    };
    let after = with_version(new, version);
    site.change(&after, informer == "delete")?;

    let recorded: &[Value] =
        if principal { list(&case["emitted"], "agent-1") } else { list(case, "emitted") };
    let mut verdict = Verdict::Passed;
    let mut sent: Vec<&Sent> = site.rig.sent.iter().collect();
    let mut recorded: Vec<&Value> = recorded.iter().collect();
    if site.created.is_some() {
        // The record ends before the watch shows the object that was made again; ours tells and asks about it.
        sent.retain(|sent| {
            !matches!(
                EventType::parse(&sent.r#type),
                EventType::Known(Type::StatusUpdate | Type::RequestUpdate)
            )
        });
    }
    if unchanged_spec(case, &recorded) && sent.len() + 1 == recorded.len() {
        recorded.remove(0);
        verdict = Verdict::Deviation(UNCHANGED);
    }
    equal(
        "types",
        sent.iter().map(|sent| sent.r#type.as_str()).collect::<Vec<_>>(),
        recorded.iter().map(|event| text(event, "type")).collect(),
    )?;
    for (ours, event) in sent.into_iter().zip(recorded) {
        equal("resource id", ours.resource_id.as_str(), text(event, "resource_id"))?;
        equal("principal uid", ours.principal_uid.as_str(), text(event, "principaluid"))?;
        if ours.event_id != text(event, "event_id") {
            let rest = ours.event_id.strip_prefix(text(event, "event_id"));
            let hash = rest.and_then(|rest| rest.strip_prefix('_'));
            if hash.is_none_or(|hash| hash.len() != 8) {
                return Err(format!("event id {:?} instead of {}", ours.event_id, event["event_id"]));
            }
            if verdict == Verdict::Passed {
                verdict = Verdict::Deviation(FOURTH_PART);
            }
        }
        let (mut payload, mut recorded_payload) = (parse(&ours.data)?, event["payload"].clone());
        for payload in [&mut payload, &mut recorded_payload] {
            if let Some(metadata) = payload["metadata"].as_object_mut().filter(|_| principal) {
                metadata.remove("resourceVersion");
            }
            if let Some(payload) = payload.as_object_mut() {
                payload.remove("apiVersion");
                payload.remove("kind");
            }
        }
        equal("payload", without_empty(&payload), without_empty(&recorded_payload))?;
    }
    match (&site.created, list(case, "objects_after")) {
        (None, []) => {}
        (Some(created), [recorded]) => {
            compare_object(&parse(created)?, recorded, &BTreeMap::new())
                .map_err(|what| format!("created object: {what}: {}", String::from_utf8_lossy(created)))?;
        }
        (created, recorded) => return Err(format!("{created:?} instead of {recorded:?}")),
    }
    Ok(verdict)
}

/// Whether the record begins with a spec-update that says what the peer already had, before a set-operation.
fn unchanged_spec(case: &Value, recorded: &[&Value]) -> bool {
    let types: Vec<&str> = recorded.iter().map(|event| text(event, "type")).collect();
    if types != [Type::SpecUpdate.as_str(), Type::SetOperation.as_str()] {
        return false;
    }
    let (old, new) = (&case["old"], &recorded[0]["payload"]);
    let same = |old: &Value, new: &Value| without_empty(old) == without_empty(new);
    recorded[0]["resource_id"] == recorded[1]["resource_id"]
        && same(&old["spec"], &new["spec"])
        && ["labels", "annotations", "finalizers", "deletionTimestamp", "ownerReferences"]
            .iter()
            .all(|key| same(&old["metadata"][key], &new["metadata"][key]))
}

/// A core whose API server holds at most one object, under the identity that the record gives it.
struct Outbound {
    rig: Rig,
    current: Option<Vec<u8>>,
    created: Option<Vec<u8>>,
    namespace: String,
}

impl Outbound {
    fn start(&mut self, before: Option<&Value>) -> Result<(), String> {
        Kind::ALL.into_iter().for_each(|kind| self.rig.core.list_started(kind));
        if let Some(before) = before {
            self.observe(before, false);
        }
        Kind::ALL.into_iter().for_each(|kind| self.rig.core.synced(self.rig.now, kind));
        self.rig.core.connected(self.rig.now, &Peer::go("0.9.0"));
        self.settle()?;
        self.rig.sent.clear();
        Ok(())
    }

    fn change(&mut self, object: &Value, gone: bool) -> Result<(), String> {
        self.observe(object, gone);
        self.settle()
    }

    fn observe(&mut self, object: &Value, gone: bool) {
        let bytes = object.to_string().into_bytes();
        let key = Key::new(Kind::Application, &self.namespace, text(&object["metadata"], "name"));
        let observation = if gone { Observation::Gone(&bytes) } else { Observation::Present(&bytes) };
        self.rig.core.observe(self.rig.now, &key, observation);
        self.current = (!gone).then_some(bytes);
    }

    fn settle(&mut self) -> Result<(), String> {
        for _ in 0..200 {
            let mut busy = false;
            while let Some(request) = self.rig.core.poll_request(self.rig.now) {
                busy = true;
                let outcome = match request.verb {
                    Verb::Get => match &self.current {
                        Some(object) => Outcome::Done(object.clone()),
                        None => Outcome::Status(request::Status {
                            code: 404,
                            reason: "NotFound".to_owned(),
                            ..request::Status::default()
                        }),
                    },
                    Verb::Create(body) => {
                        let mut stored = parse(&body)?;
                        stored["metadata"]["uid"] = json!("made-by-the-api-server");
                        stored["metadata"]["resourceVersion"] = json!("9");
                        let stored = stored.to_string().into_bytes();
                        self.created = Some(stored.clone());
                        self.current = Some(stored.clone());
                        Outcome::Done(stored)
                    }
                    verb => return Err(format!("{verb:?}, which the record does not have")),
                };
                self.rig.core.complete(self.rig.now, request.ticket, outcome);
            }
            while let Some(frame) = self.rig.core.poll_transmit(self.rig.now, usize::MAX) {
                busy = true;
                self.rig.deliver(&frame)?;
            }
            if !busy {
                return Ok(());
            }
        }
        Err("the core does not come to rest".to_owned())
    }
}

fn with_version(object: &Value, version: &str) -> Value {
    let mut object = object.clone();
    object["metadata"]["resourceVersion"] = json!(version);
    object
}

const KINDS: [Resource; 4] =
    [Resource::Application, Resource::AppProject, Resource::Secret, Resource::ConfigMap];

pub(crate) fn resource(kind: &str) -> Result<Resource, String> {
    KINDS
        .into_iter()
        .find(|resource| resource.definition().kind == kind)
        .ok_or_else(|| format!("unknown kind {kind:?}"))
}

/// Everything in the store.
pub(crate) fn objects(store: &Store) -> Vec<Value> {
    KINDS.into_iter().flat_map(|resource| store.iter(resource)).map(|object| object.value().clone()).collect()
}

pub(crate) fn compare_objects(
    mut ours: Vec<Value>,
    recorded: &[Value],
    uids: &BTreeMap<String, String>,
) -> Result<(), String> {
    let name = |object: &Value| {
        let metadata = &object["metadata"];
        [text(object, "kind"), text(metadata, "namespace"), text(metadata, "name")].map(str::to_owned)
    };
    ours.sort_by_key(name);
    let mut recorded = recorded.to_vec();
    recorded.sort_by_key(name);
    equal("objects", ours.iter().map(name).collect::<Vec<_>>(), recorded.iter().map(name).collect())?;
    ours.iter().zip(&recorded).try_for_each(|(ours, recorded)| {
        compare_object(ours, recorded, uids).map_err(|what| format!("{what}: {ours} instead of {recorded}"))
    })
}

/// Compares one object, with placeholders in the record.
pub(crate) fn compare_object(
    ours: &Value,
    recorded: &Value,
    uids: &BTreeMap<String, String>,
) -> Result<(), String> {
    // What an API server adds and the record leaves out.
    let mut ours = ours.clone();
    if let Some(metadata) = ours["metadata"].as_object_mut() {
        for key in ["managedFields", "creationTimestamp", "generation", "resourceVersion"] {
            metadata.remove(key);
        }
    }
    matches(&without_empty(&ours), &without_empty(recorded), uids).map_err(|path| format!("at {path}"))
}

/// The path of the first difference.
fn matches(ours: &Value, recorded: &Value, uids: &BTreeMap<String, String>) -> Result<(), String> {
    match (ours, recorded) {
        (Value::Object(ours), Value::Object(recorded)) => {
            if let Some(key) = ours.keys().find(|key| !recorded.contains_key(*key)) {
                return Err(format!("/{key}"));
            }
            recorded.iter().try_for_each(|(key, recorded)| {
                let ours = ours.get(key).ok_or_else(|| format!("/{key}"))?;
                matches(ours, recorded, uids).map_err(|path| format!("/{key}{path}"))
            })
        }
        (Value::Array(ours), Value::Array(recorded)) if ours.len() == recorded.len() => {
            ours.iter().zip(recorded).enumerate().try_for_each(|(index, (ours, recorded))| {
                matches(ours, recorded, uids).map_err(|path| format!("/{index}{path}"))
            })
        }
        (Value::String(ours), Value::String(recorded)) if recorded.starts_with('<') => {
            let holds = match recorded.trim_matches(['<', '>']) {
                "now" | "any" | "uuid" => !ours.is_empty(),
                "new-uid" => !ours.is_empty() && !uids.values().any(|uid| uid == ours),
                other => match other.strip_prefix("uid-of:") {
                    Some(name) => uids.get(name) == Some(ours),
                    None => ours == recorded,
                },
            };
            if holds { Ok(()) } else { Err(String::new()) }
        }
        _ if ours == recorded => Ok(()),
        _ => Err(String::new()),
    }
}

pub(super) fn list<'v>(value: &'v Value, key: &str) -> &'v [Value] {
    value[key].as_array().map_or(&[], Vec::as_slice)
}
