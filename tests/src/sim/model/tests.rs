//! The models against what was recorded of the reference.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use agent_core::cloudevent::{EventView, EventWriter};
use agent_core::event::Target;
use agent_core::request::{Kind, Outcome, Status, Verb};
use agent_core::time::{Instant, Wall};
use serde_json::Value;

use super::agent::{Agent, Options};
use super::desk::{Desk, Tasks};
use super::{Class, Policy, Version};
use crate::kube::Resource;
use crate::kube::store::{PatchType, Preconditions, Store};
use crate::sim::half::{Answer, Ask, What};
use crate::vectors::events::without_empty;
use crate::vectors::transform::{compare_objects, objects, place_existing};

const WALL: Wall = Wall { epoch_millis_at_zero: 1_767_323_045_000 };
const APPLICATIONS: &str = include_str!("../../../vectors/application_transform.json");
const PROJECTS: &str = include_str!("../../../vectors/appproject_transform.json");

/// Runs `work` to its end, with an API server that answers at once.
fn carry_out<T: 'static>(desk: &Desk, store: &mut Store, work: impl Future<Output = T> + 'static) -> T {
    let result = Rc::new(RefCell::new(None));
    let place = result.clone();
    desk.start(async move {
        let value = work.await;
        *place.borrow_mut() = Some(value);
    });
    let mut tasks = Tasks::new(desk.clone());
    let mut now = Instant::from_millis(1);
    loop {
        desk.set_now(now);
        tasks.run();
        if let Some(result) = result.borrow_mut().take() {
            return result;
        }
        match desk.poll_call() {
            Some(call) => {
                let outcome = match answer(store, call.what) {
                    Ok(body) => Outcome::Done(body),
                    Err(status) => Outcome::Status(status),
                };
                desk.answered(call.id, Answer::Outcome(outcome));
            }
            None => now = desk.poll_alarm().expect("somebody waits for something"),
        }
    }
}

fn answer(store: &mut Store, what: What) -> Result<Vec<u8>, Status> {
    let status = |status: crate::kube::Status| Status {
        code: status.code,
        reason: status.reason.to_owned(),
        message: status.message,
        retry_after: None,
    };
    let What::Object { key, ask } = what else { unreachable!("no lists here") };
    let resource = Resource::from(key.kind);
    let (namespace, name) = (&*key.namespace, &*key.name);
    let parsed = |body: &[u8]| serde_json::from_slice(body).expect("JSON");
    match ask {
        Ask::Core(Verb::Get) => store.get(resource, namespace, name).map(|object| object.json().to_vec()),
        Ask::Core(Verb::Create(body)) => {
            store.create(resource, namespace, parsed(&body)).map(|object| object.json().to_vec())
        }
        Ask::Core(Verb::JsonPatch(body)) => store
            .patch(resource, namespace, name, PatchType::Json, &body)
            .map(|object| object.json().to_vec()),
        Ask::Replace(body) => {
            store.update(resource, namespace, name, parsed(&body)).map(|object| object.json().to_vec())
        }
        Ask::Delete { .. } => store
            .delete(resource, namespace, name, &Preconditions::default())
            .map(|deleted| deleted.body(resource)),
        Ask::Core(other) => unreachable!("{other:?}"),
    }
    .map_err(status)
}

fn cases(text: &str, subs: &[&str]) -> Vec<Value> {
    let document: Value = serde_json::from_str(text).expect("JSON");
    let cases = document["cases"].as_array().expect("cases");
    let wanted = |case: &&Value| subs.iter().any(|sub| case["sub"] == *sub);
    cases.iter().filter(wanted).cloned().collect()
}

fn frame(event: &Value, index: usize) -> Vec<u8> {
    let object = &event["object"];
    let text = |name: &str| object["metadata"][name].as_str().unwrap_or_default().to_owned();
    let target = match event["kind"].as_str() {
        Some("AppProject") => Target::AppProject,
        Some("Secret") => Target::Repository,
        Some("ConfigMap") => Target::GpgKey,
        _ => Target::Application,
    };
    let resource_id = format!("{}_{}", text("name"), text("uid"));
    let mut frame = Vec::new();
    EventWriter {
        source: "",
        r#type: event["type"].as_str().unwrap_or_default(),
        target,
        subject: None,
        event_id: &format!("{resource_id}_{index}"),
        resource_id: &resource_id,
        sent_at: None,
        principal_uid: event["principaluid"].as_str(),
        data: object.to_string().as_bytes(),
    }
    .encode(&mut frame);
    frame
}

fn class(word: &Value) -> Class {
    match word.as_str() {
        Some("ok") => Class::Ok,
        Some("discarded") => Class::Discarded,
        Some("not-allowed") => Class::Error,
        Some("error") => Class::Error,
        Some("retryable") => Class::Retryable,
        other => panic!("unknown class {other:?}"),
    }
}

/// The embedded API server does not wait for dependents.
fn in_background(objects: &Value) -> Vec<Value> {
    let mut objects = objects.as_array().cloned().unwrap_or_default();
    for object in &mut objects {
        if let Some(finalizers) = object["metadata"]["finalizers"].as_array_mut() {
            finalizers.retain(|finalizer| finalizer != "foregroundDeletion");
        }
    }
    objects
}

fn agent_of(case: &Value) -> Rc<Agent> {
    let mut options = Options::new(Version::Head, "argocd");
    if case["source_uid_mismatch_policy"] == "upsert" {
        options.mismatch = Policy::Upsert;
    }
    options.adopts = case["adoption_policy"] != "never";
    Agent::new(options, 1, WALL)
}

fn agent_case(case: &Value) -> Result<(), String> {
    let agent = agent_of(case);
    let mut store = Store::new(7, WALL);
    let uids = place_existing(&mut store, case)?;
    for key in case["managed"].as_array().into_iter().flatten().filter_map(Value::as_str) {
        agent.manage_for_test(key);
    }
    let events = case["events"].as_array().into_iter().flatten();
    for (index, (event, result)) in events.zip(case["results"].as_array().into_iter().flatten()).enumerate() {
        let frame = frame(event, index);
        let handler = agent.clone();
        let ended = carry_out(&agent.desk_for_test(), &mut store, async move {
            let event = EventView::decode(&frame).expect("an event");
            handler.handle_event(event.target().expect("a target"), &event).await
        });
        if ended != class(&result["class"]) {
            return Err(format!("event {index}: {ended:?} instead of {}", result["class"]));
        }
        compare_objects(objects(&store), &in_background(&result["objects_after"]), &uids)
            .map_err(|difference| format!("event {index}: {difference}"))?;
        let sent = agent.take_queue_for_test();
        compare_sent(&sent, result["emitted"].as_array().map(Vec::as_slice).unwrap_or_default())?;
    }
    Ok(())
}

/// What was sent, against the record: (type, ids, payload).
fn compare_sent(sent: &[super::sender::Event], recorded: &[Value]) -> Result<(), String> {
    if sent.len() != recorded.len() {
        return Err(format!("{sent:?} sent instead of {recorded:?}"));
    }
    for (ours, recorded) in sent.iter().zip(recorded) {
        if recorded["type"] != ours.r#type.as_str() {
            return Err(format!("{:?} instead of {}", ours.r#type, recorded["type"]));
        }
        for (id, name) in [(&ours.event_id, "event_id"), (&ours.resource_id, "resource_id")] {
            let wanted = recorded[name].as_str().filter(|wanted| !wanted.contains('<'));
            if wanted.is_some_and(|wanted| wanted != id) {
                return Err(format!("{name} {id} instead of {}", recorded[name]));
            }
        }
        let principal_uid = recorded["principaluid"].as_str().filter(|uid| !uid.is_empty());
        if recorded.get("principaluid").is_some() && ours.principal_uid.as_deref() != principal_uid {
            return Err(format!("principaluid {:?} instead of {principal_uid:?}", ours.principal_uid));
        }
        let payload: Value = serde_json::from_slice(&ours.data).map_err(|error| error.to_string())?;
        let (mut payload, mut wanted) = (without_empty(&payload), without_empty(&recorded["payload"]));
        for payload in [&mut payload, &mut wanted] {
            if payload["message"].is_string() {
                // A text for a person.
                payload["message"] = Value::from("text");
            }
        }
        if payload != wanted {
            return Err(format!("payload {payload} instead of {wanted}"));
        }
    }
    Ok(())
}

fn run_all(cases: &[Value], run: fn(&Value) -> Result<(), String>, expected: usize) {
    let failures: Vec<String> = cases
        .iter()
        .filter_map(|case| run(case).err().map(|difference| format!("{}: {difference}", case["id"])))
        .collect();
    assert!(failures.is_empty(), "{} of {}:\n{}", failures.len(), cases.len(), failures.join("\n"));
    assert_eq!(cases.len(), expected);
}

#[test]
fn the_agent_does_with_events_what_was_recorded() {
    let subs = [
        "managed-create",
        "managed-update",
        "managed-adopt",
        "managed-operation",
        "managed-delete",
        "managed-other",
        "managed-repository",
        "managed-gpgkey",
    ];
    run_all(&cases(APPLICATIONS, &subs), agent_case, 39);
    run_all(&cases(PROJECTS, &["managed"]), agent_case, 6);
}

#[test]
fn the_agent_tells_what_was_recorded() {
    let managed: Vec<Value> = cases(APPLICATIONS, &["agent-outbound"])
        .into_iter()
        .filter(|case| case["mode"] == "managed")
        .collect();
    run_all(&managed, agent_callback, 4);
}

fn agent_callback(case: &Value) -> Result<(), String> {
    use super::informer::News;
    let agent = agent_of(case);
    let mut store = Store::new(7, WALL);
    let new = Rc::new(case["new"].clone());
    if case["managed"] == true {
        agent.manage_for_test(case["new"]["metadata"]["name"].as_str().unwrap_or_default());
    }
    let news = match case["informer"].as_str() {
        Some("add") => News::Added(new),
        Some("update") => News::Changed(new),
        _ => News::Gone(new),
    };
    let handler = agent.clone();
    carry_out(&agent.desk_for_test(), &mut store, async move {
        handler.handle_news(Kind::Application, news).await;
    });
    compare_sent(
        &agent.take_queue_for_test(),
        case["emitted"].as_array().map(Vec::as_slice).unwrap_or_default(),
    )?;
    compare_objects(objects(&store), &in_background(&case["objects_after"]), &BTreeMap::new())
}
