//! The principal's half of one pair.

use super::*;
use crate::checksum::spec_checksum;
use crate::event::{ErrorBody, RequestUpdate, SyncedResource, SyncedResourceList};

/// A connected hub whose start-up frames are sent and acknowledged.
fn settled(objects: &[&str]) -> Rig {
    let mut rig = Rig::hub(objects);
    rig.connect();
    settle(&mut rig, objects);
    rig
}

fn settle(rig: &mut Rig, objects: &[&str]) {
    for _ in 0..20 {
        for request in rig.requests() {
            assert_eq!(verb(&request), "GET");
            rig.done(&request, objects.iter().find(|object| object.contains(&*request.key.name)).unwrap());
        }
        rig.acknowledge();
    }
    assert!(rig.core.is_settled());
    rig.notes();
}

/// The agent says that it has this object.
fn said(rig: &mut Rig, uid: &str, app: &str) {
    let checksum = spec_checksum(Kind::Application, app.as_bytes()).unwrap().to_vec();
    let resource = SyncedResource {
        name: "app".into(),
        namespace: "argocd".into(),
        uid: uid.into(),
        kind: "Application".into(),
    };
    let request = RequestUpdate { resource, checksum: Some(checksum) }.encode();
    rig.event_with(Type::RequestUpdate, core::str::from_utf8(&request).unwrap(), "r-1", "");
}

/// The same as [`settle`], with a Go agent that has the object.
fn settle_go(rig: &mut Rig, app: &str) {
    rig.connect_go();
    rig.answer(app);
    rig.acknowledge();
    said(rig, "h-1", app);
    settle(rig, &[app]);
}

fn status_update(source: &str, more: &str) -> String {
    site_app_with("l-1", 50, source, "a", "", more)
}

/// The site could not take the object.
fn site_error(rig: &mut Rig, message: &str) {
    let error = ErrorBody {
        resource_name: "app".into(),
        resource_namespace: "argocd".into(),
        message: message.into(),
    };
    rig.event_with(Type::Error, core::str::from_utf8(&error.encode()).unwrap(), "e-1", "");
}

#[test]
fn a_new_application_goes_as_create_without_its_operation() {
    let mut rig = settled(&[]);
    rig.see(&hub_app_with("h-1", 5, "a", "", r#","operation":{"sync":{}}"#));
    let frames = rig.frames();
    assert_eq!(frames.len(), 1);
    let create = &frames[0];
    assert_eq!((create.r#type.as_str(), create.principal_uid.as_str()), ("create", "p-1"));
    assert!(create.event_id.starts_with("app_h-1_5_"));
    assert_eq!(create.resource_id, "app_h-1");
    assert!(
        !create.data.contains("operation") && !create.data.contains("resourceVersion"),
        "{}",
        create.data
    );
    // The operation follows its spec, under an id of its own, and without the principal's identity.
    assert_eq!(rig.requests(), vec![]);
    rig.ack(create);
    let read = rig.request();
    rig.done(&read, &hub_app_with("h-1", 5, "a", "", r#","operation":{"sync":{}}"#));
    let frames = rig.frames();
    assert_eq!(frames[0].r#type, "set-operation");
    assert_ne!(frames[0].event_id, create.event_id);
    assert_eq!(frames[0].principal_uid, "");
}

#[test]
fn the_operation_is_the_one_that_appeared() {
    let app = hub_app("h-1", 5, "a");
    let mut rig = settled(&[&app]);
    rig.core.disconnected(rig.now);
    rig.see(&hub_app_with("h-1", 6, "a", "", r#","operation":{"sync":{"revision":"r"}}"#));
    // Taken away again before it could be delivered.
    rig.see(&hub_app("h-1", 7, "a"));
    rig.connect();
    let read = rig.request();
    rig.done(&read, &hub_app("h-1", 7, "a"));
    let frames = rig.frames();
    assert_eq!(frames[0].r#type, "set-operation");
    assert!(frames[0].data.ends_with(r#""operation":{"sync":{"revision":"r"}}}"#), "{}", frames[0].data);
}

#[test]
fn status_alone_is_not_sent_back() {
    let app = hub_app("h-1", 5, "a");
    let mut rig = settled(&[&app]);
    rig.see(&hub_app_with("h-1", 6, "a", "", r#","status":{"health":{}}"#));
    assert_eq!((rig.requests().len(), rig.frames().len()), (0, 0));
    rig.see(&hub_app("h-1", 7, "b"));
    assert_eq!(rig.types(), words(&["spec-update"]));
}

#[test]
fn status_update_reaches_the_hub_and_is_acknowledged_after_the_write() {
    let app = hub_app("h-1", 5, "a");
    let mut rig = settled(&[&app]);
    rig.event(Type::StatusUpdate, &status_update("h-1", r#","status":{"health":{"status":"Healthy"}}"#));
    let patch = rig.request();
    assert_eq!(
        body(&patch),
        r#"[{"op":"replace","path":"/metadata/resourceVersion","value":"5"},{"op":"add","path":"/status","value":{"health":{"status":"Healthy"}}}]"#
    );
    assert_eq!(rig.frames(), vec![]);
    rig.done(&patch, &hub_app_with("h-1", 6, "a", "", r#","status":{"health":{"status":"Healthy"}}"#));
    assert_eq!(rig.types(), words(&["processed"]));
    // The same again costs no write.
    rig.event(Type::StatusUpdate, &status_update("h-1", r#","status":{"health":{"status":"Healthy"}}"#));
    assert_eq!(rig.requests(), vec![]);
    assert_eq!(rig.types(), words(&["processed"]));
}

#[test]
fn a_status_does_not_clear_what_the_user_asked_for() {
    let app = hub_app("h-1", 5, "a");
    let mut rig = settled(&[&app]);
    let asked = hub_app_with(
        "h-1",
        6,
        "a",
        r#","annotations":{"argocd.argoproj.io/refresh":"hard"}"#,
        r#","operation":{"sync":{}}"#,
    );
    rig.see(&asked);
    let frames = rig.frames();
    assert_eq!(frames[0].r#type, "spec-update");
    assert!(frames[0].data.contains("refresh"));
    rig.event(Type::StatusUpdate, &status_update("h-1", r#","status":{"health":{}}"#));
    let patch = rig.request();
    assert!(!body(&patch).contains("operation") && !body(&patch).contains("refresh"), "{}", body(&patch));
    rig.done(&patch, &asked.replace(r#""6""#, r#""7""#));
    rig.ack(&frames[0]);
    let read = rig.request();
    rig.done(&read, &asked.replace(r#""6""#, r#""7""#));
    let frames = rig.frames();
    let operation = frames.iter().find(|frame| frame.r#type == "set-operation").unwrap();
    rig.ack(operation);
    // Delivered: now the site's word counts.
    rig.event(Type::StatusUpdate, &status_update("h-1", r#","status":{"health":{"status":"x"}}"#));
    let patch = rig.request();
    assert!(body(&patch).contains(r#""op":"remove","path":"/operation""#), "{}", body(&patch));
    assert!(
        body(&patch).contains(r#""op":"remove","path":"/metadata/annotations/argocd.argoproj.io~1refresh""#)
    );
}

#[test]
fn an_operation_of_the_site_is_no_request_of_the_hub() {
    let app = hub_app("h-1", 5, "a");
    let mut rig = settled(&[&app]);
    let operation = r#","operation":{"sync":{"revision":"site"}}"#;
    rig.event(Type::StatusUpdate, &status_update("h-1", operation));
    let patch = rig.request();
    // The echo overtakes the answer.
    rig.see(&hub_app_with("h-1", 6, "a", "", operation));
    rig.done(&patch, &hub_app_with("h-1", 6, "a", "", operation));
    assert_eq!(rig.types(), words(&["processed"]));
    assert_eq!(rig.requests(), vec![]);
    // It ends on the site; the same operation asked for on the hub later is a request.
    rig.event(Type::StatusUpdate, &status_update("h-1", ""));
    let patch = rig.request();
    rig.done(&patch, &hub_app("h-1", 7, "a"));
    rig.frames();
    rig.see(&hub_app_with("h-1", 8, "a", "", operation));
    assert_eq!(rig.types(), words(&["set-operation"]));
}

#[test]
fn refresh_travels_once() {
    let app = hub_app("h-1", 5, "a");
    let mut rig = settled(&[&app]);
    let refresh = r#","annotations":{"argocd.argoproj.io/refresh":"normal"}"#;
    rig.see(&hub_app_with("h-1", 6, "a", refresh, ""));
    let frames = rig.frames();
    assert!(frames[0].data.contains("refresh"));
    rig.ack(&frames[0]);
    // The annotation is still on the hub when the spec changes.
    rig.see(&hub_app_with("h-1", 7, "b", refresh, ""));
    let frames = rig.frames();
    assert_eq!(frames[0].r#type, "spec-update");
    assert!(!frames[0].data.contains("refresh"), "{}", frames[0].data);
}

#[test]
fn the_acknowledgement_of_one_refresh_does_not_settle_the_next() {
    let refresh = |kind: &str| format!(r#","annotations":{{"argocd.argoproj.io/refresh":"{kind}"}}"#);
    // The next one is for the same object, or for its successor.
    for uid in ["h-1", "h-2"] {
        let mut rig = settled(&[&hub_app("h-1", 5, "a")]);
        rig.see(&hub_app_with("h-1", 6, "a", &refresh("normal"), ""));
        let first = rig.frames().remove(0);
        if uid == "h-2" {
            rig.see_gone(&hub_app("h-1", 7, "a"));
        }
        let next = hub_app_with(uid, 8, "a", &refresh("hard"), "");
        rig.see(&next);
        rig.ack(&first);
        let mut told = Vec::new();
        for _ in 0..4 {
            rig.answer(&next);
            for frame in rig.frames() {
                rig.ack(&frame);
                told.extend(frame.data.contains(r#"refresh":"hard""#).then_some(frame.r#type));
            }
        }
        assert_eq!(told.len(), 1, "{uid} {told:?}");
    }
}

#[test]
fn terminate_is_sent_for_the_users_word_only() {
    let running = hub_app_with("h-1", 5, "a", "", r#","status":{"operationState":{"phase":"Running"}}"#);
    let ending = r#","status":{"operationState":{"phase":"Terminating"}}"#;
    let mut rig = settled(&[&running]);
    rig.see(&hub_app_with("h-1", 6, "a", "", ending));
    assert_eq!(rig.types(), words(&["terminate-operation"]));

    let mut rig = settled(&[&running]);
    rig.event(Type::StatusUpdate, &status_update("h-1", ending));
    let patch = rig.request();
    rig.done(&patch, &hub_app_with("h-1", 6, "a", "", ending));
    rig.see(&hub_app_with("h-1", 6, "a", "", ending));
    assert_eq!(rig.types(), words(&["processed"]));
}

#[test]
fn a_deletion_is_told_only_if_the_agent_may_know_the_object() {
    let mut rig = settled(&[]);
    rig.core.disconnected(rig.now);
    rig.see(&hub_app("h-1", 5, "a"));
    rig.see_gone(&hub_app("h-1", 6, "a"));
    assert_eq!(rig.core.depth(), (0, 0));

    let app = hub_app("h-1", 5, "a");
    let mut rig = settled(&[&app]);
    rig.core.disconnected(rig.now);
    rig.see_gone(&hub_app("h-1", 6, "a"));
    rig.connect();
    assert_eq!(rig.requests(), vec![]);
    let frames = rig.frames();
    assert_eq!(frames[0].r#type, "delete");
    assert!(frames[0].event_id.starts_with("app_h-1_6_"), "{}", frames[0].event_id);
    assert!(frames[0].data.contains(r#""uid":"h-1""#));
    rig.ack(&frames[0]);
    assert_eq!(rig.core.depth(), (0, 0));
}

#[test]
fn a_recreated_application_replaces_the_delete_that_was_not_sent() {
    let app = hub_app("h-1", 5, "a");
    let mut rig = settled(&[&app]);
    rig.core.disconnected(rig.now);
    rig.see_gone(&hub_app("h-1", 6, "a"));
    rig.see(&hub_app("h-2", 7, "b"));
    rig.connect();
    let read = rig.request();
    rig.done(&read, &hub_app("h-2", 7, "b"));
    let frames = rig.frames();
    assert_eq!(frames[0].r#type, "create");
    assert_eq!(frames[0].resource_id, "app_h-2");
    rig.ack(&frames[0]);
    assert_eq!(rig.types(), words(&[]));
}

#[test]
fn nothing_with_a_new_uid_before_the_delete_of_the_old_one_is_acknowledged() {
    let app = hub_app("h-1", 5, "a");
    let mut rig = settled(&[&app]);
    rig.see_gone(&hub_app("h-1", 6, "a"));
    let frames = rig.frames();
    assert_eq!(frames[0].r#type, "delete");
    rig.see(&hub_app("h-2", 7, "b"));
    assert_eq!((rig.requests().len(), rig.frames().len()), (0, 0));
    rig.ack(&frames[0]);
    let read = rig.request();
    rig.done(&read, &hub_app("h-2", 7, "b"));
    assert_eq!(rig.types(), words(&["create"]));
}

#[test]
fn a_go_agent_is_told_again_until_a_status_carries_the_new_uid() {
    let app = hub_app("h-1", 5, "a");
    let mut rig = Rig::hub(&[&app]);
    settle_go(&mut rig, &app);
    rig.core.disconnected(rig.now);
    rig.see_gone(&hub_app("h-1", 6, "a"));
    rig.see(&hub_app("h-2", 7, "b"));
    rig.connect_go();
    let mut creates = 0;
    for _ in 0..100 {
        rig.answer(&hub_app("h-2", 7, "b"));
        for frame in rig.frames() {
            creates += usize::from(frame.r#type == "create");
            rig.ack(&frame);
        }
        rig.advance(Duration::from_secs(1));
    }
    assert!(creates >= 3, "{creates}");
    rig.event(Type::StatusUpdate, &status_update("h-2", ""));
    for _ in 0..3 {
        rig.answer(&hub_app("h-2", 7, "b"));
        rig.acknowledge();
    }
    rig.advance(Duration::from_secs(1000));
    assert_eq!((rig.requests().len(), rig.frames().len()), (0, 0));
}

#[test]
fn what_a_go_agent_never_takes_is_repeated_less_and_less() {
    let app = hub_app("h-1", 5, "a");
    let mut rig = Rig::hub(&[&app]);
    settle_go(&mut rig, &app);
    rig.core.disconnected(rig.now);
    rig.see_gone(&hub_app("h-1", 6, "a"));
    rig.see(&hub_app("h-2", 7, "b"));
    rig.connect_go();
    let mut creates = [0; 24];
    for count in &mut creates {
        for _ in 0..360 {
            rig.answer(&hub_app("h-2", 7, "b"));
            for frame in rig.frames() {
                *count += usize::from(frame.r#type == "create");
                rig.ack(&frame);
            }
            rig.advance(Duration::from_secs(10));
        }
    }
    assert!(creates[0] >= 8, "{creates:?}");
    assert!(creates[1..].iter().all(|count| (0..=2).contains(count)), "{creates:?}");
    assert!(creates[1..].iter().sum::<usize>() >= 12, "{creates:?}");
}

#[test]
fn what_a_go_agent_says_it_has_is_not_repeated() {
    let app = hub_app("h-1", 5, "a");
    let creates = |uid: Option<&str>| {
        let mut rig = Rig::hub(&[&app]);
        rig.connect_go();
        let mut creates = 0;
        for second in 0..200 {
            rig.answer(&app);
            for frame in rig.frames() {
                creates += usize::from(frame.r#type == "create");
                rig.ack(&frame);
            }
            if let (3, Some(uid)) = (second, uid) {
                said(&mut rig, uid, &app);
            }
            rig.advance(Duration::from_secs(1));
        }
        creates
    };
    assert_eq!(creates(Some("h-1")), 1);
    assert!(creates(None) > 3, "it may have been dropped, also by a process before this one");
    assert!(creates(Some("h-0")) > 3);
}

#[test]
fn a_project_that_was_made_anew_is_told_to_a_go_agent_once() {
    let project = |uid: &str, version: u32| {
        format!(
            r#"{{"metadata":{{"name":"app","namespace":"hub","uid":"{uid}","resourceVersion":"{version}"}},"spec":{{"destinations":[{{"name":"*"}}],"sourceNamespaces":["*"]}}}}"#
        )
    };
    let key = Key::new(Kind::AppProject, "hub", "app");
    let mut rig = Rig::hub(&[]);
    let (former, latter) = (project("h-1", 5), project("h-2", 7));
    rig.core.observe(rig.now, &key, Observation::Present(former.as_bytes()));
    rig.connect_go();
    settle(&mut rig, &[&former]);
    rig.core.disconnected(rig.now);
    rig.core.observe(rig.now, &key, Observation::Gone(project("h-1", 6).as_bytes()));
    rig.core.observe(rig.now, &key, Observation::Present(latter.as_bytes()));
    rig.connect_go();
    let mut creates = 0;
    for _ in 0..100 {
        rig.answer(&latter);
        for frame in rig.frames() {
            creates += usize::from(frame.r#type == "create");
            rig.ack(&frame);
        }
        rig.advance(Duration::from_secs(1));
    }
    assert_eq!(creates, 1, "no status tells that it arrived");
    assert!(rig.core.is_settled());
}

#[test]
fn a_go_agent_that_made_a_copy_of_an_ending_object_is_told_again() {
    let ending = r#","finalizers":["f"],"deletionTimestamp":"2026-01-01T00:00:00Z""#;
    let app = hub_app_with("h-1", 5, "a", ending, "");
    let mut rig = Rig::hub(&[&app]);
    settle_go(&mut rig, &app);
    // Of another object it says nothing, and one that ends there knows.
    rig.event(Type::StatusUpdate, &status_update("h-0", ""));
    let ends = site_app_with("l-1", 50, "h-1", "a", r#","deletionTimestamp":"2026-01-01T00:00:00Z""#, "");
    rig.event(Type::StatusUpdate, &ends);
    rig.answer(&app);
    assert!(rig.types().iter().all(|r#type| r#type == "processed"));
    rig.event(Type::StatusUpdate, &status_update("h-1", ""));
    rig.answer(&app);
    assert!(rig.types().contains(&"create".to_string()));
}

#[test]
fn the_end_on_the_site_releases_the_hubs_object() {
    let ending = r#","finalizers":["f"],"deletionTimestamp":"2026-01-01T00:00:00Z""#;
    let app = hub_app_with("h-1", 5, "a", ending, "");
    let mut rig = settled(&[&app]);
    rig.event(Type::Delete, &site_app("l-1", 50, "h-1", "a"));
    let patch = rig.request();
    assert_eq!(
        body(&patch),
        r#"[{"op":"replace","path":"/metadata/resourceVersion","value":"5"},{"op":"remove","path":"/metadata/finalizers"}]"#
    );
    // Not of a former object, and not while the hub's object lives.
    let mut rig = settled(&[&app]);
    rig.event(Type::Delete, &site_app("l-1", 50, "h-0", "a"));
    assert_eq!(rig.requests(), vec![]);
    let alive = hub_app("h-1", 5, "a");
    let mut rig = settled(&[&alive]);
    rig.event(Type::Delete, &site_app("l-1", 50, "h-1", "a"));
    let requests = rig.requests();
    assert!(requests.iter().all(|request| verb(request) == "GET"), "{requests:?}");
    rig.done(&requests[0], &alive);
    assert!(rig.types().contains(&"create".to_string()), "the site is told again");
}

#[test]
fn request_update_table() {
    let app = hub_app("h-1", 5, "a");
    let sum = spec_checksum(Kind::Application, app.as_bytes()).unwrap().to_vec();
    let request = |uid: &'static str, checksum: Option<Vec<u8>>| {
        let resource = SyncedResource {
            name: "app".into(),
            namespace: "argocd".into(),
            uid: uid.into(),
            kind: "Application".into(),
        };
        String::from_utf8(RequestUpdate { resource, checksum }.encode()).unwrap()
    };
    let table = [
        ("h-1", Some(sum.clone()), true, None),
        ("h-1", Some(vec![0; 32]), true, Some("create")),
        ("h-0", Some(sum.clone()), true, Some("create")),
        ("", None, true, Some("create")),
        ("h-1", Some(sum), false, Some("delete")),
        ("", None, false, Some("delete")),
    ];
    for (uid, checksum, exists, answer) in table {
        let mut rig = if exists { settled(&[&app]) } else { settled(&[]) };
        let body = request(uid, checksum);
        rig.event_with(Type::RequestUpdate, &body, "u-1", "");
        let read = rig.request();
        assert_eq!(verb(&read), "GET", "never from a list: it may be old");
        if exists {
            rig.done(&read, &app);
        } else {
            rig.fail(&read, 404, "NotFound");
        }
        let frames = rig.frames();
        assert_eq!(frames[0].r#type, "processed");
        assert_eq!(frames.get(1).map(|frame| frame.r#type.as_str()), answer, "{uid} {exists}");
        if answer == Some("delete") {
            assert_eq!(frames[1].event_id, format!("app_{uid}_"));
        }
    }
}

#[test]
fn the_list_is_compared_only_when_it_is_complete() {
    let mut rig = Rig::new(Config::principal("agent-1", "hub", "p-1"), "agent-1");
    rig.connect();
    rig.event_with(Type::RequestSyncedResourceList, r#"{"checksum":null}"#, "u-1", "");
    assert_eq!(rig.frames(), vec![], "not acknowledged: the agent asks again");
    let app = hub_app("h-1", 5, "a");
    rig.list(&[&app]);
    settle(&mut rig, &[&app]);
    rig.event_with(Type::RequestSyncedResourceList, r#"{"checksum":null}"#, "u-1", "");
    assert_eq!(rig.requests(), vec![]);
    assert_eq!(rig.types(), words(&["processed", "response-synced-resource"]));
}

#[test]
fn error_report_becomes_a_condition() {
    let app = hub_app("h-1", 5, "a");
    let mut rig = settled(&[&app]);
    rig.event(Type::Error, r#"{"resourceName":"app","resourceNamespace":"argocd","message":"no"}"#);
    let patch = rig.request();
    assert!(body(&patch).contains(r#""message":"Error occurred on cluster managed by agent agent-1: no""#));
    assert!(body(&patch).contains(r#""status":"Degraded""#));
}

#[test]
fn a_repeated_operation_keeps_its_id_whatever_happens_to_the_object() {
    let app = hub_app("h-1", 5, "a");
    let mut rig = settled(&[&app]);
    let operation = r#","operation":{"sync":{}}"#;
    rig.see(&hub_app_with("h-1", 6, "a", "", operation));
    let first = rig.frames().remove(0);
    let later = hub_app_with("h-1", 7, "a", r#","labels":{"l":"1"}"#, operation);
    rig.core.disconnected(rig.now);
    rig.see(&later);
    rig.connect();
    let mut repeated = None;
    for _ in 0..4 {
        rig.answer(&later);
        for frame in rig.frames() {
            if frame.r#type == "set-operation" {
                repeated = Some(frame.clone());
            }
            rig.ack(&frame);
        }
    }
    assert_eq!(first.event_id, repeated.unwrap().event_id);
}

#[test]
fn a_lost_race_does_not_make_an_operation_new() {
    let app = hub_app("h-1", 5, "a");
    let mut rig = settled(&[&app]);
    let operation = r#","operation":{"sync":{}}"#;
    rig.see(&hub_app_with("h-1", 6, "a", "", operation));
    let sent = rig.frames().remove(0);
    rig.ack(&sent);
    rig.event(Type::StatusUpdate, &status_update("h-1", r#","status":{"health":{}}"#));
    let patch = rig.request();
    rig.fail(&patch, 409, "Conflict");
    let read = rig.request();
    rig.done(&read, &hub_app_with("h-1", 7, "a", "", operation));
    let patch = rig.request();
    assert!(body(&patch).contains(r#""op":"remove","path":"/operation""#));
    rig.done(&patch, &hub_app_with("h-1", 8, "a", "", r#","status":{"health":{}}"#));
    assert_eq!(rig.types(), words(&["processed"]));
}

#[test]
fn a_list_from_before_a_write_does_not_make_an_operation_new() {
    let operation = r#","operation":{"sync":{}}"#;
    let asked = hub_app_with("h-1", 6, "a", "", operation);
    let mut rig = settled(&[&hub_app("h-1", 5, "a")]);
    rig.see(&asked);
    rig.acknowledge();
    rig.event(Type::StatusUpdate, &status_update("h-1", r#","status":{"health":{}}"#));
    let patch = rig.request();
    let over = hub_app_with("h-1", 8, "a", "", r#","status":{"health":{}}"#);
    rig.done(&patch, &over);
    rig.acknowledge();
    // Asked for before the write, and here after its answer.
    rig.list(&[&asked]);
    let read = rig.request();
    rig.done(&read, &over);
    rig.see(&over);
    assert_eq!((rig.requests().len(), rig.frames().len()), (0, 0));
}

#[test]
fn what_the_site_still_has_of_an_object_that_is_being_deleted_is_never_equal() {
    let ending = r#","finalizers":["f"],"deletionTimestamp":"2026-01-01T00:00:00Z""#;
    let app = hub_app_with("h-1", 5, "a", ending, "");
    let mut rig = settled(&[&app]);
    // The deletion was acknowledged and refused, and the agent that knew has ended.
    let checksum = spec_checksum(Kind::Application, app.as_bytes()).unwrap();
    let key = Key::new(Kind::Application, "agent-1", "app");
    rig.core.update_requested(rig.now, &key, "h-1", Some(&checksum));
    let read = rig.request();
    rig.done(&read, &app);
    let frames = rig.frames();
    assert!(frames[0].r#type == "create" && frames[0].data.contains("deletionTimestamp"), "{frames:?}");
}

#[test]
fn a_comparison_does_not_turn_a_known_end_into_a_guess() {
    let app = hub_app("h-1", 5, "a");
    let mut rig = settled(&[&app]);
    let resource = SyncedResource {
        name: "app".into(),
        namespace: "argocd".into(),
        uid: "".into(),
        kind: "Application".into(),
    };
    let asked = String::from_utf8(RequestUpdate { resource, checksum: None }.encode()).unwrap();
    rig.event_with(Type::RequestUpdate, &asked, "u-1", "");
    let read = rig.request();
    rig.see_gone(&hub_app("h-1", 6, "a"));
    rig.fail(&read, 404, "NotFound");
    let frames = rig.frames();
    let end = frames.iter().find(|frame| frame.r#type == "delete").unwrap();
    assert!(end.event_id.starts_with("app_h-1_6_"), "{}", end.event_id);
}

#[test]
fn what_a_former_process_may_have_told_counts_as_known() {
    let app = hub_app("h-1", 5, "a");
    let mut rig = Rig::hub(&[&app]);
    rig.see_gone(&hub_app("h-1", 6, "a"));
    rig.connect();
    assert!(rig.requests().is_empty());
    assert!(rig.types().contains(&"delete".to_string()));
}

#[test]
fn a_read_that_failed_across_a_reconnect_is_tried_again() {
    let app = hub_app("h-1", 5, "a");
    let mut rig = settled(&[&app]);
    rig.core.disconnected(rig.now);
    rig.see(&hub_app("h-1", 6, "b"));
    rig.connect();
    let read = rig.request();
    rig.core.disconnected(rig.now);
    rig.connect();
    assert_eq!(rig.requests(), vec![]);
    rig.core.complete(rig.now, read.ticket, Outcome::Unknown("reset".into()));
    rig.advance(Duration::from_secs(2));
    let read = rig.request();
    rig.done(&read, &hub_app("h-1", 6, "b"));
    assert_eq!(rig.types(), words(&["spec-update"]));
}

#[test]
fn an_operation_that_a_go_agent_reported_over_before_its_acknowledgement_is_cleared() {
    let operation = r#","operation":{"sync":{}}"#;
    let app = hub_app("h-1", 5, "a");
    let mut rig = Rig::hub(&[&app]);
    settle_go(&mut rig, &app);
    rig.see(&hub_app_with("h-1", 6, "a", "", operation));
    let sent = rig.frames().remove(0);
    rig.event(Type::StatusUpdate, &status_update("h-1", r#","status":{"health":{}}"#));
    let patch = rig.request();
    assert!(!body(&patch).contains("operation"));
    rig.done(&patch, &hub_app_with("h-1", 7, "a", "", &format!(r#"{operation},"status":{{"health":{{}}}}"#)));
    rig.ack(&sent);
    let patch = rig.request();
    assert!(body(&patch).ends_with(r#"{"op":"remove","path":"/operation"}]"#), "{}", body(&patch));
    rig.done(&patch, &hub_app_with("h-1", 8, "a", "", r#","status":{"health":{}}"#));
    rig.frames();
    assert!(rig.core.is_settled());
}

#[test]
fn an_answer_that_the_watch_has_overtaken_is_not_sent() {
    let app = hub_app("h-1", 5, "a");
    let mut rig = settled(&[&app]);
    rig.core.disconnected(rig.now);
    rig.see(&hub_app("h-1", 6, "b"));
    rig.connect();
    let read = rig.request();
    rig.see(&hub_app("h-1", 7, "c"));
    rig.done(&read, &hub_app("h-1", 6, "b"));
    assert_eq!(rig.types(), words(&[]));
    let read = rig.request();
    rig.done(&read, &hub_app("h-1", 7, "c"));
    let frames = rig.frames();
    assert!(frames[0].data.contains(r#""path":"c""#));
    rig.ack(&frames[0]);
    assert!(rig.core.is_settled());
}

#[test]
fn an_answer_from_before_the_end_does_not_bring_the_object_back() {
    let app = hub_app("h-1", 5, "a");
    let mut rig = settled(&[&app]);
    rig.core.disconnected(rig.now);
    rig.see(&hub_app("h-1", 6, "b"));
    rig.connect();
    let read = rig.request();
    rig.see_gone(&hub_app("h-1", 7, "b"));
    rig.done(&read, &hub_app("h-1", 6, "b"));
    let again = rig.request();
    rig.fail(&again, 404, "NotFound");
    let frames = rig.frames();
    assert_eq!(frames.iter().map(|frame| frame.r#type.as_str()).collect::<Vec<_>>(), ["delete"]);
    rig.ack(&frames[0]);
    assert_eq!(rig.core.depth(), (0, 0));
}

#[test]
fn a_former_object_on_the_site_goes_when_its_successor_ends_unheard_of() {
    let app = hub_app("h-2", 5, "a");
    let mut rig = Rig::hub(&[&app]);
    rig.connect();
    rig.event(Type::StatusUpdate, &status_update("h-1", ""));
    rig.core.disconnected(rig.now);
    rig.see_gone(&hub_app("h-2", 6, "a"));
    rig.connect();
    let mut uids = Vec::new();
    for _ in 0..4 {
        rig.requests();
        for frame in rig.frames() {
            if frame.r#type == "delete" {
                uids.push(frame.resource_id.clone());
            }
            rig.ack(&frame);
        }
    }
    assert_eq!(uids, ["app_h-1", "app_h-2"]);
}

#[test]
fn an_object_in_doubt_counts_in_a_resync() {
    let app = hub_app("h-1", 5, "a");
    let mut rig = settled(&[&app]);
    rig.event(Type::StatusUpdate, &status_update("h-1", r#","status":{"health":{}}"#));
    let patch = rig.request();
    rig.core.complete(rig.now, patch.ticket, Outcome::Unknown("timed out".into()));
    // The site has nothing and asks whether that is all.
    let list = SyncedResourceList { checksum: None }.encode();
    rig.event_with(
        Type::RequestSyncedResourceList,
        core::str::from_utf8(&list).unwrap(),
        "7c1a9a0e-0000-4000-8000-000000000001",
        "",
    );
    rig.requests();
    assert!(rig.types().contains(&"response-synced-resource".to_string()));
}

#[test]
fn a_refresh_that_the_site_refused_is_asked_for_again_with_the_object() {
    let app = hub_app("h-1", 5, "a");
    let mut rig = settled(&[&app]);
    let asked = hub_app_with("h-1", 6, "a", r#","annotations":{"argocd.argoproj.io/refresh":"hard"}"#, "");
    rig.see(&asked);
    rig.acknowledge();
    // The copy has lost its mark: the site cannot tell it from its own.
    site_error(&mut rig, "not from the hub");
    let patch = rig.request();
    assert!(body(&patch).contains("AgentError") && !body(&patch).contains("refresh"), "{}", body(&patch));
    rig.done(&patch, &asked.replace(r#""6""#, r#""7""#));
    let key = Key::new(Kind::Application, "agent-1", "app");
    rig.core.update_requested(rig.now, &key, "", None);
    let read = rig.request();
    rig.done(&read, &asked.replace(r#""6""#, r#""7""#));
    let create = rig.frames().into_iter().find(|frame| frame.r#type == "create").unwrap();
    assert!(create.data.contains("refresh"), "{}", create.data);
}

#[test]
fn a_status_of_what_the_hub_does_not_have_is_answered_by_its_end() {
    let mut rig = settled(&[]);
    rig.event(Type::StatusUpdate, &status_update("h-1", r#","status":{"health":{}}"#));
    assert_eq!(rig.types(), words(&["processed"]));
    // The absence is confirmed by a read first.
    let read = rig.request();
    rig.fail(&read, 404, "NotFound");
    let frames = rig.frames();
    assert_eq!((frames[0].r#type.as_str(), frames[0].event_id.as_str()), ("delete", "app_h-1_"));
}

#[test]
fn a_refresh_set_again_while_the_removal_of_the_first_is_in_doubt_is_told() {
    let refresh = |version| {
        hub_app_with("h-1", version, "a", r#","annotations":{"argocd.argoproj.io/refresh":"normal"}"#, "")
    };
    for watch_shows_the_removal in [true, false] {
        let mut rig = settled(&[&hub_app("h-1", 5, "a")]);
        rig.see(&refresh(6));
        rig.acknowledge();
        rig.event(Type::StatusUpdate, &status_update("h-1", r#","status":{"health":{}}"#));
        let patch = rig.request();
        assert!(body(&patch).contains("refresh"));
        if watch_shows_the_removal {
            rig.see(&hub_app_with("h-1", 7, "a", "", r#","status":{"health":{}}"#));
        }
        rig.core.complete(rig.now, patch.ticket, Outcome::Unknown("timed out".into()));
        rig.advance(Duration::from_secs(5));
        let read = rig.request();
        rig.done(&read, &refresh(8));
        rig.answer(&refresh(8));
        let frames = rig.frames();
        assert!(frames.iter().any(|frame| frame.data.contains("refresh")), "{frames:?}");
    }
}

#[test]
fn what_the_site_refused_is_told_again_when_it_asks_although_the_checksum_agrees() {
    let app = hub_app("h-1", 5, "a");
    let mut rig = settled(&[&app]);
    site_error(&mut rig, "no such label");
    let patch = rig.request();
    rig.done(&patch, &hub_app("h-1", 6, "a"));
    rig.frames();
    let checksum = spec_checksum(Kind::Application, app.as_bytes()).unwrap();
    let key = Key::new(Kind::Application, "agent-1", "app");
    // Told once more, and no oftener.
    for expected in [&["create"][..], &[]] {
        rig.core.update_requested(rig.now, &key, "h-1", Some(&checksum));
        let read = rig.request();
        rig.done(&read, &hub_app("h-1", 6, "a"));
        rig.answer(&hub_app("h-1", 6, "a"));
        let frames = rig.frames();
        let types: Vec<_> = frames.iter().map(|frame| frame.r#type.as_str()).collect();
        assert_eq!(types, expected);
        for frame in frames {
            rig.ack(&frame);
        }
    }
}

#[test]
fn a_status_that_waits_ends_with_its_object() {
    let app = hub_app("h-1", 5, "a");
    let mut rig = settled(&[&app]);
    rig.event(Type::StatusUpdate, &status_update("h-1", r#","status":{"health":{}}"#));
    let patch = rig.request();
    rig.fail(&patch, 422, "Invalid");
    rig.see_gone(&hub_app("h-1", 6, "a"));
    rig.acknowledge();
    rig.advance(Duration::from_secs(1200));
    assert_eq!((rig.requests().len(), rig.frames().len()), (0, 0));
    assert!(rig.core.is_settled());
}

#[test]
fn an_object_that_came_back_while_a_write_to_the_former_was_answered_is_read() {
    let app = hub_app("h-1", 5, "a");
    let mut rig = settled(&[&app]);
    rig.event(Type::StatusUpdate, &status_update("h-1", r#","status":{"health":{}}"#));
    let patch = rig.request();
    rig.see_gone(&hub_app("h-1", 7, "a"));
    rig.see(&hub_app("h-2", 8, "a"));
    rig.done(&patch, &hub_app_with("h-1", 6, "a", "", r#","status":{"health":{}}"#));
    let read = rig.request();
    assert_eq!(verb(&read), "GET");
    rig.done(&read, &hub_app("h-2", 8, "a"));
    rig.acknowledge();
    rig.answer(&hub_app("h-2", 8, "a"));
    let created = rig.frames();
    assert_eq!(created[0].resource_id, "app_h-2", "{created:?}");
}

#[test]
fn a_question_for_the_whole_is_not_settled_by_a_narrower_one() {
    let app = hub_app("h-1", 5, "a");
    let mut rig = settled(&[&app]);
    let key = Key::new(Kind::Application, "agent-1", "app");
    let checksum = spec_checksum(Kind::Application, app.as_bytes()).unwrap();
    rig.core.update_requested(rig.now, &key, "h-1", None);
    rig.core.update_requested(rig.now, &key, "h-1", Some(&checksum));
    let read = rig.request();
    rig.done(&read, &app);
    assert_eq!(rig.types(), words(&["create"]));
}
