//! The agent of a managed site.

use super::*;
use crate::core::{AdoptionPolicy, MismatchPolicy, ResyncDeleteLimit};
use crate::event::SyncedResource;
use crate::transform::OnRecreate;

/// A connected site whose start-up frames are sent and acknowledged.
fn settled(objects: &[&str]) -> Rig {
    settled_with(Config::agent("argocd"), objects)
}

fn settled_with(config: Config, objects: &[&str]) -> Rig {
    let mut rig = Rig::site_with(config, objects);
    rig.connect();
    for _ in 0..20 {
        for request in rig.requests() {
            assert_eq!(verb(&request), "GET");
            rig.done(&request, objects.iter().find(|object| object.contains(&*request.key.name)).unwrap());
        }
        rig.acknowledge();
    }
    assert!(rig.core.is_settled());
    rig.notes();
    rig
}

#[test]
fn create_is_rewritten_stamped_and_acknowledged_after_the_write() {
    let mut rig = settled(&[]);
    rig.event(
        Type::Create,
        &hub_app_with(
            "h-1",
            7,
            "a",
            r#","labels":{"l":"1"},"finalizers":["f"],"ownerReferences":[{"uid":"o"}],"annotations":{"kubectl.kubernetes.io/last-applied-configuration":"{}","k":"v"}"#,
            "",
        ),
    );
    assert_eq!(rig.frames(), vec![]);
    let create = rig.request();
    assert_eq!(
        body(&create),
        r#"{"apiVersion":"argoproj.io/v1alpha1","kind":"Application","metadata":{"name":"app","namespace":"argocd","labels":{"l":"1"},"annotations":{"argocd.argoproj.io/principal-uid":"p-1","argocd.argoproj.io/source-uid":"h-1","k":"v"},"finalizers":["f"]},"spec":{"destination":{"name":"in-cluster","namespace":"x"},"project":"default","source":{"path":"a"}}}"#
    );
    rig.done(&create, &site_app("l-1", 9, "h-1", "a"));
    assert_eq!(rig.types(), words(&["processed", "status-update"]));
}

#[test]
fn a_repeated_event_writes_nothing_and_is_acknowledged() {
    let mut rig = settled(&[&site_app("l-1", 5, "h-1", "a")]);
    rig.event(Type::SpecUpdate, &hub_app("h-1", 7, "a"));
    let read = rig.request();
    assert_eq!(verb(&read), "GET");
    rig.done(&read, &site_app("l-1", 5, "h-1", "a"));
    assert_eq!(rig.requests(), vec![]);
    assert!(rig.types().contains(&"processed".to_string()));
}

#[test]
fn update_replaces_the_spec_for_one_version_only() {
    let mut rig = settled(&[&site_app("l-1", 5, "h-1", "a")]);
    rig.event(Type::SpecUpdate, &hub_app("h-1", 7, "b"));
    let read = rig.request();
    rig.done(&read, &site_app("l-1", 6, "h-1", "a"));
    let patch = rig.request();
    assert_eq!(
        body(&patch),
        r#"[{"op":"replace","path":"/metadata/resourceVersion","value":"6"},{"op":"add","path":"/spec","value":{"destination":{"name":"in-cluster","namespace":"x"},"project":"default","source":{"path":"b"}}}]"#
    );
    // Lost the race: read and decide again, no acknowledgement yet.
    rig.fail(&patch, 409, "Conflict");
    assert_eq!(rig.frames(), vec![]);
    let read = rig.request();
    assert_eq!(verb(&read), "GET");
    rig.done(&read, &site_app("l-1", 8, "h-1", "a"));
    let patch = rig.request();
    assert!(body(&patch).contains(r#""value":"8""#));
    rig.done(&patch, &site_app("l-1", 9, "h-1", "b"));
    assert_eq!(rig.types(), words(&["processed", "status-update"]));
}

#[test]
fn identity_table() {
    use crate::core::site::{Identity, identity};
    // (create?, incoming source, incoming principal, local source, local principal) -> identity
    let table = [
        (true, "h-1", "p-1", None, None, Identity::Adoptable),
        (false, "h-1", "p-1", None, None, Identity::Foreign),
        (false, "h-2", "p-2", Some("h-1"), Some("p-1"), Identity::Restamp),
        (false, "", "p-1", Some("h-1"), Some("p-1"), Identity::Restamp),
        (false, "h-1", "p-1", Some("h-1"), Some("p-1"), Identity::Same),
        (false, "h-1", "", Some("h-1"), Some("p-1"), Identity::Same),
        (false, "h-2", "p-1", Some("h-1"), None, Identity::Restamp),
        (false, "h-2", "p-1", Some("h-1"), Some("p-1"), Identity::Mismatch),
        (true, "h-2", "", Some("h-1"), Some("p-1"), Identity::Mismatch),
        (false, "h-2", "", Some("h-1"), None, Identity::Mismatch),
    ];
    for (create, source, principal, local_source, local_principal, expected) in table {
        assert_eq!(
            identity(create, (source, principal), local_source, local_principal),
            expected,
            "{create} {source} {principal} {local_source:?} {local_principal:?}"
        );
    }
}

#[test]
fn mismatch_recreates_with_the_uid_as_precondition() {
    let mut rig = settled(&[&site_app("l-1", 5, "h-1", "a")]);
    rig.event(Type::Create, &hub_app("h-2", 7, "b"));
    let read = rig.request();
    rig.done(&read, &site_app("l-1", 5, "h-1", "a"));
    let delete = rig.request();
    assert_eq!((verb(&delete), body(&delete).as_str()), ("DELETE", "l-1"));
    rig.done(&delete, r#"{"kind":"Status","status":"Success"}"#);
    let create = rig.request();
    assert_eq!(verb(&create), "POST");
    assert!(body(&create).contains(r#""argocd.argoproj.io/source-uid":"h-2""#));
    rig.done(&create, &site_app("l-2", 9, "h-2", "b"));
    rig.see_gone(&site_app("l-1", 8, "h-1", "a"));
    assert_eq!(rig.requests(), vec![], "the old object's end is no local deletion");
    assert_eq!(rig.types(), words(&["processed", "status-update"]));
}

#[test]
fn mismatch_waits_for_finalizers() {
    let finalizers = r#","finalizers":["f"]"#;
    let mut rig = settled(&[&site_app_with("l-1", 5, "h-1", "a", finalizers, "")]);
    rig.event(Type::Create, &hub_app("h-2", 7, "b"));
    let read = rig.request();
    rig.done(&read, &site_app_with("l-1", 5, "h-1", "a", finalizers, ""));
    let delete = rig.request();
    let ending = site_app_with(
        "l-1",
        6,
        "h-1",
        "a",
        r#","finalizers":["f"],"deletionTimestamp":"2026-01-01T00:00:00Z""#,
        "",
    );
    rig.done(&delete, &ending);
    assert_eq!(rig.requests(), vec![]);
    rig.see_gone(&ending.replace(r#""6""#, r#""7""#));
    let create = rig.request();
    assert_eq!(verb(&create), "POST");
}

#[test]
fn mismatch_upserts_by_flag_or_annotation() {
    let config = Config { mismatch_policy: MismatchPolicy::Upsert, ..Config::agent("argocd") };
    let mut rig = settled_with(config, &[&site_app("l-1", 5, "h-1", "a")]);
    rig.event(Type::Create, &hub_app("h-2", 7, "b"));
    let read = rig.request();
    rig.done(&read, &site_app("l-1", 5, "h-1", "a"));
    let patch = rig.request();
    assert!(body(&patch).contains(r#""argocd.argoproj.io/source-uid":"h-2""#), "{}", body(&patch));

    let mut rig = settled(&[&site_app("l-1", 5, "h-1", "a")]);
    let upsert = r#","annotations":{"argocd.argoproj.io/source-uid-mismatch-policy":"upsert"}"#;
    rig.event(Type::SpecUpdate, &hub_app_with("h-2", 7, "b", upsert, ""));
    let read = rig.request();
    rig.done(&read, &site_app("l-1", 5, "h-1", "a"));
    assert_eq!(verb(&rig.request()), "PATCH");
}

#[test]
fn another_principal_restamps_in_place() {
    let mut rig = settled(&[&site_app("l-1", 5, "h-1", "a")]);
    rig.event_with(Type::Create, &hub_app("h-9", 7, "a"), "app_h-9_7_x", "p-2");
    let read = rig.request();
    rig.done(&read, &site_app("l-1", 5, "h-1", "a"));
    let patch = rig.request();
    assert_eq!(
        body(&patch),
        r#"[{"op":"replace","path":"/metadata/resourceVersion","value":"5"},{"op":"add","path":"/metadata/annotations","value":{"argocd.argoproj.io/principal-uid":"p-2","argocd.argoproj.io/source-uid":"h-9"}}]"#
    );
}

#[test]
fn adoption_by_policy() {
    let foreign = site_app("l-1", 5, "", "a");
    let mut rig = settled(&[&foreign]);
    rig.event(Type::Create, &hub_app("h-1", 7, "b"));
    let read = rig.request();
    rig.done(&read, &foreign);
    assert_eq!(verb(&rig.request()), "PATCH");

    let config = Config { adoption_policy: AdoptionPolicy::Never, ..Config::agent("argocd") };
    let mut rig = settled_with(config, &[&foreign]);
    rig.event(Type::Create, &hub_app("h-1", 7, "b"));
    let read = rig.request();
    rig.done(&read, &foreign);
    assert_eq!(rig.requests(), vec![]);
    assert_eq!(rig.types(), words(&["processed", "error"]));

    // Anything but a create never touches it.
    let mut rig = settled(&[&foreign]);
    rig.event(Type::SpecUpdate, &hub_app("h-1", 7, "b"));
    let read = rig.request();
    rig.done(&read, &foreign);
    assert_eq!(rig.requests(), vec![]);
    rig.event(Type::Delete, &hub_app("h-1", 7, "b"));
    assert_eq!(rig.requests(), vec![]);
}

#[test]
fn delete_needs_the_recorded_uid() {
    let local = site_app("l-1", 5, "h-1", "a");
    let mut rig = settled(&[&local]);
    rig.event(Type::Delete, &hub_app("h-other", 7, "a"));
    rig.answer(&local);
    let frames = rig.frames();
    assert_eq!((frames.len(), &*frames[0].r#type, &*frames[1].r#type), (2, "processed", "request-update"));
    rig.ack(&frames[1]);
    assert!(matches!(rig.notes()[0], Note::NotApplied { .. }));
    rig.event_with(Type::Delete, &hub_app("h-1", 7, "a"), "app_h-1_7_x", "p-other");
    assert_eq!(rig.requests(), vec![], "another principal's word");
    rig.event(Type::Delete, &hub_app("h-1", 8, "a"));
    let delete = rig.request();
    assert_eq!((verb(&delete), body(&delete).as_str()), ("DELETE", "l-1"));
    rig.frames();
    rig.done(&delete, r#"{"kind":"Status","status":"Success"}"#);
    assert_eq!(rig.types(), words(&["processed"]));
    rig.see_gone(&site_app("l-1", 6, "h-1", "a"));
    assert_eq!(rig.requests(), vec![]);
    assert_eq!(rig.core.depth(), (0, 0));
}

#[test]
fn deletion_of_the_hub_object_is_reported_back_at_its_end() {
    let local = site_app_with("l-1", 5, "h-1", "a", r#","finalizers":["f"]"#, "");
    let mut rig = settled(&[&local]);
    let ending = r#","finalizers":["f"],"deletionTimestamp":"2026-01-01T00:00:00Z""#;
    rig.event(Type::SpecUpdate, &hub_app_with("h-1", 7, "a", ending, ""));
    let read = rig.request();
    rig.done(&read, &local);
    let delete = rig.request();
    assert_eq!(verb(&delete), "DELETE");
    rig.done(&delete, &site_app_with("l-1", 6, "h-1", "a", ending, ""));
    let frames = rig.frames();
    assert!(frames.iter().any(|frame| frame.r#type == "processed"));
    for frame in frames {
        rig.ack(&frame);
    }
    rig.see_gone(&site_app_with("l-1", 7, "h-1", "a", ending, ""));
    let frames = rig.frames();
    let end = frames.iter().find(|frame| frame.r#type == "delete").unwrap();
    assert!(end.data.contains(r#""argocd.argoproj.io/source-uid":"h-1""#));
    assert_eq!(rig.requests(), vec![]);
}

#[test]
fn a_local_edit_is_reverted_off_line_once() {
    let local = site_app("l-1", 5, "h-1", "a");
    let mut rig = settled(&[&local]);
    rig.core.disconnected(rig.now);
    rig.see(&site_app("l-1", 6, "h-1", "edited"));
    let patch = rig.request();
    assert_eq!(
        body(&patch),
        r#"[{"op":"replace","path":"/metadata/resourceVersion","value":"6"},{"op":"add","path":"/spec","value":{"destination":{"name":"in-cluster","namespace":"x"},"project":"default","source":{"path":"a"}}}]"#
    );
    rig.see(&site_app("l-1", 7, "h-1", "a"));
    rig.done(&patch, &site_app("l-1", 7, "h-1", "a"));
    assert_eq!(rig.requests(), vec![]);
    rig.see(&site_app("l-1", 7, "h-1", "a"));
    assert_eq!(rig.requests(), vec![]);
    assert_eq!(rig.core.counters().reverted, 1);
}

#[test]
fn pruned_fields_cause_no_revert_loop() {
    let mut rig = settled(&[]);
    rig.event(Type::Create, &hub_app("h-1", 7, "a"));
    let create = rig.request();
    // The site's API server knows less than the hub's.
    let pruned = site_app("l-1", 9, "h-1", "a").replace(r#","source":{"path":"a"}"#, "");
    rig.done(&create, &pruned);
    rig.see(&pruned.replace(r#""9""#, r#""10""#));
    assert_eq!(rig.requests(), vec![]);
    // The same word again is no reason to write either.
    rig.frames();
    rig.event(Type::SpecUpdate, &hub_app("h-1", 8, "a"));
    let read = rig.request();
    rig.done(&read, &pruned.replace(r#""9""#, r#""10""#));
    assert_eq!(rig.requests(), vec![]);
}

#[test]
fn a_local_deletion_is_undone_off_line() {
    for (on_recreate, expected) in [
        (OnRecreate::Ignore, r#""status":{"operationState":{"phase":"Succeeded"}}}"#),
        (OnRecreate::ClearStatus, r#""status":{}}"#),
        (OnRecreate::Resync, r#""status":{"operationState":{"phase":"Succeeded"}},"operation":{"sync":{}}}"#),
    ] {
        let more = r#","status":{"operationState":{"phase":"Succeeded"}}"#;
        let local = site_app_with("l-1", 5, "h-1", "a", "", more);
        let config = Config { on_recreate, ..Config::agent("argocd") };
        let mut rig = settled_with(config, &[&local]);
        rig.core.disconnected(rig.now);
        rig.see_gone(&site_app_with("l-1", 6, "h-1", "a", "", more));
        let create = rig.request();
        assert_eq!(verb(&create), "POST");
        assert!(body(&create).contains(r#""argocd.argoproj.io/source-uid":"h-1""#));
        assert!(body(&create).ends_with(expected), "{}", body(&create));
        rig.done(&create, &site_app_with("l-2", 7, "h-1", "a", "", more));
        assert_eq!(rig.requests(), vec![]);
        assert_eq!(rig.core.counters().recreated, 1);
        rig.connect();
        assert!(rig.requests().len() <= 1);
    }
}

#[test]
fn absence_from_a_relist_is_confirmed_by_a_read() {
    let local = site_app("l-1", 5, "h-1", "a");
    let mut rig = settled(&[&local]);
    rig.list(&[]);
    let read = rig.request();
    assert_eq!(verb(&read), "GET");
    rig.done(&read, &local);
    assert_eq!(rig.requests(), vec![], "it is there: nothing happened");
    rig.list(&[]);
    let read = rig.request();
    rig.fail(&read, 404, "NotFound");
    let create = rig.request();
    assert_eq!(verb(&create), "POST");
    assert!(body(&create).contains(r#""argocd.argoproj.io/source-uid":"h-1""#));
}

#[test]
fn resync_deletes_are_limited_and_released_by_a_person() {
    let names = ["a", "b", "c", "d"];
    let app = |name: &str| {
        site_app(&format!("l-{name}"), 5, &format!("h-{name}"), "p")
            .replace(r#""name":"app""#, &format!(r#""name":"{name}""#))
    };
    let objects: Vec<String> = names.iter().map(|name| app(name)).collect();
    let config =
        Config { resync_delete_limit: ResyncDeleteLimit { count: 2, percent: 0 }, ..Config::agent("argocd") };
    let mut rig = Rig::site_with(config, &objects.iter().map(String::as_str).collect::<Vec<_>>());
    rig.connect();
    for name in names {
        let object = format!(r#"{{"metadata":{{"name":"{name}","uid":"h-{name}"}}}}"#);
        rig.event_with(Type::Delete, &object, &format!("{name}_h-{name}_"), "p-1");
    }
    let requests = rig.requests();
    assert_eq!(requests.iter().filter(|request| verb(request) == "DELETE").count(), 2);
    for request in requests.iter().filter(|request| verb(request) == "GET") {
        rig.done(request, &app(&request.key.name));
    }
    assert_eq!(rig.core.counters().held, 2);
    assert_eq!(rig.notes().iter().filter(|note| matches!(note, Note::HeldDelete { .. })).count(), 2);
    let confirmed = app("d").replace(r#""5""#, r#""6""#).replace(
        r#""annotations":{"#,
        r#""annotations":{"argocd-agent.argoproj-labs.io/confirm-delete":"h-d","#,
    );
    rig.see(&confirmed);
    let requests = rig.requests();
    assert!(
        requests.iter().any(|request| verb(request) == "DELETE" && &*request.key.name == "d"),
        "{requests:?}"
    );
}

#[test]
fn the_end_of_another_object_than_the_copy_here_makes_the_hub_say_what_it_has_of_it() {
    let local = site_app("l-1", 5, "h-1", "a");
    let limit = ResyncDeleteLimit { count: 0, percent: 0 };
    let mut rig = settled_with(Config { resync_delete_limit: limit, ..Config::agent("argocd") }, &[&local]);
    rig.event_with(Type::Delete, &hub_app("h-1", 7, "a"), "app_h-1_", "p-1");
    assert_eq!((rig.requests(), rig.core.counters().held), (vec![], 1));
    // It came and went on the hub before the site heard of it.
    rig.event(Type::Delete, &hub_app("h-2", 9, "a"));
    rig.answer(&local);
    assert_eq!(rig.types(), words(&["processed", "processed", "request-update"]));
    rig.event_with(Type::Delete, &hub_app("h-1", 7, "a"), "app_h-1_", "p-1");
    assert_eq!((rig.requests(), rig.core.counters().held), (vec![], 2));
    rig.see(&site_app("l-1", 6, "h-1", "a").replace(
        r#""annotations":{"#,
        r#""annotations":{"argocd-agent.argoproj-labs.io/confirm-delete":"h-1","#,
    ));
    let delete = rig.request();
    assert_eq!((verb(&delete), body(&delete).as_str()), ("DELETE", "l-1"));
}

#[test]
fn operation_is_set_once_and_a_lost_acknowledgement_is_no_second_one() {
    let local = site_app("l-1", 5, "h-1", "a");
    let mut rig = settled(&[&local]);
    let with_operation = hub_app_with("h-1", 7, "a", "", r#","operation":{"sync":{"revision":"r"}}"#);
    rig.event(Type::SetOperation, &with_operation);
    let patch = rig.request();
    assert_eq!(
        body(&patch),
        r#"[{"op":"replace","path":"/metadata/resourceVersion","value":"5"},{"op":"add","path":"/operation","value":{"sync":{"revision":"r"}}}]"#
    );
    rig.done(&patch, &site_app_with("l-1", 6, "h-1", "a", "", r#","operation":{"sync":{"revision":"r"}}"#));
    assert_eq!(rig.types()[0], "processed");
    rig.see(&site_app("l-1", 7, "h-1", "a"));
    rig.event(Type::SetOperation, &with_operation);
    assert!(rig.requests().iter().all(|request| verb(request) == "GET"));
    assert!(rig.types().contains(&"processed".to_string()));
}

/// Towards a Go hub, which says nothing that the site would have to answer; every frame owed after the start is settled.
fn settled_with_go(objects: &[&str]) -> Rig {
    let mut rig = Rig::site(objects);
    rig.connect_go();
    for _ in 0..4 {
        rig.acknowledge();
        for request in rig.requests() {
            rig.done(&request, objects[0]);
        }
    }
    rig
}

#[test]
fn a_go_hub_that_echoes_a_status_is_not_told_it_again() {
    let status = r#","status":{"health":{"status":"Healthy"}}"#;
    let echo = |uid: &str, status: &str| hub_app_with(uid, 8, "a", "", status);
    // (event, status on the hub, told again)
    let table = [
        (Type::SpecUpdate, status, false),
        (Type::SpecUpdate, r#","status":{"health":{},"sync":{"status":""}}"#, true),
        (Type::SpecUpdate, "", true),
        (Type::Create, status, true),
    ];
    for (r#type, on_hub, told) in table {
        let local = site_app_with("l-1", 5, "h-1", "a", "", status);
        let mut rig = settled_with_go(&[&local]);
        rig.event(r#type, &echo("h-1", on_hub));
        let mut types = rig.types();
        for request in rig.requests() {
            rig.done(&request, &local);
            types.extend(rig.types());
        }
        for request in rig.requests() {
            rig.done(&request, &local);
            types.extend(rig.types());
        }
        assert!(types.contains(&"processed".to_string()));
        assert_eq!(types.contains(&"status-update".to_string()), told, "{type:?} {on_hub}");
    }
}

#[test]
fn a_go_hub_hears_nothing_of_a_new_copy_that_no_controller_has_touched() {
    let mut rig = settled_with_go(&[]);
    rig.event(Type::Create, &hub_app("h-1", 7, "a"));
    let create = rig.request();
    rig.done(&create, &site_app("l-1", 9, "h-1", "a"));
    assert_eq!(rig.types(), words(&["processed"]));
    assert_eq!(rig.requests(), vec![]);
    rig.see(&site_app_with("l-1", 10, "h-1", "a", "", r#","status":{"health":{"status":"Healthy"}}"#));
    assert_eq!(rig.types(), words(&["status-update"]));
}

#[test]
fn operation_table() {
    // (local source, local status, expected verb)
    let running = r#","status":{"operationState":{"phase":"Running"}}"#;
    let ending = r#","status":{"operationState":{"phase":"Terminating"}}"#;
    let over = r#","status":{"operationState":{"phase":"Succeeded"}}"#;
    let table = [
        (Type::SetOperation, "h-1", "", true),
        (Type::SetOperation, "h-1", running, true),
        (Type::SetOperation, "h-1", ending, false),
        (Type::TerminateOperation, "h-1", running, true),
        (Type::TerminateOperation, "h-1", ending, false),
        (Type::TerminateOperation, "h-1", over, false),
        (Type::TerminateOperation, "h-1", "", false),
        (Type::TerminateOperation, "h-9", running, false),
    ];
    for (r#type, source, status, writes) in table {
        let mut rig = settled(&[&site_app_with("l-1", 5, source, "a", "", status)]);
        rig.event(r#type, &hub_app_with("h-1", 7, "a", "", r#","operation":{"sync":{}}"#));
        let patches = rig.requests().iter().filter(|request| verb(request) == "PATCH").count();
        assert_eq!(patches == 1, writes, "{type:?} {source} {status}");
        if !writes {
            assert!(rig.types().contains(&"processed".to_string()), "{type:?} {source} {status}");
        }
    }
}

#[test]
fn an_operation_for_another_object_than_the_one_here_waits_for_the_hub_to_say_which_stands() {
    let local = site_app("l-1", 5, "h-1", "a");
    let operation = r#","operation":{"sync":{}}"#;
    // (the hub's answer, set)
    let table = [
        (Type::Create, hub_app("h-2", 8, "a"), true),
        (Type::Create, hub_app("h-1", 8, "a"), false),
        (Type::Delete, hub_app("h-2", 8, "a"), false),
    ];
    for (r#type, answer, is_set) in table {
        let mut rig = settled(&[&local]);
        rig.event(Type::SetOperation, &hub_app_with("h-2", 7, "a", "", operation));
        let frames = rig.frames();
        assert_eq!(frames.len(), 1);
        assert!(frames[0].r#type == "request-update" && frames[0].data.contains(r#""checksum":null"#));
        assert_eq!(rig.requests(), vec![]);
        rig.ack(&frames[0]);
        // Meanwhile the copy stays as it was asked for.
        rig.see(&site_app("l-1", 6, "h-1", "edited"));
        let revert = rig.request();
        assert!(verb(&revert) == "PATCH" && !body(&revert).contains("/operation"));
        let local = site_app("l-1", 7, "h-1", "a");
        rig.done(&revert, &local);
        rig.event(r#type, &answer);
        let (mut stands, mut types, mut sets) = (local.clone(), Vec::new(), 0);
        for _ in 0..8 {
            for request in rig.requests() {
                match verb(&request) {
                    "GET" => rig.done(&request, &stands),
                    "DELETE" => rig.done(&request, GONE),
                    word => {
                        sets += usize::from(word == "PATCH" && body(&request).contains("/operation"));
                        stands = site_app("l-2", 9 + sets as u32, "h-2", "a");
                        rig.done(&request, &stands);
                    }
                }
            }
            for frame in rig.frames() {
                rig.ack(&frame);
                types.push(frame.r#type);
            }
        }
        assert_eq!(sets, usize::from(is_set), "{type:?} {answer}");
        // Of the operation and of the answer.
        assert_eq!(types.iter().filter(|word| *word == "processed").count(), 2, "{type:?} {answer}");
        assert!(rig.core.is_settled());
    }
}

#[test]
fn status_ignores_reconciled_at() {
    let status = |at: &str| format!(r#","status":{{"health":{{}},"reconciledAt":"{at}"}}"#);
    let mut rig = settled(&[&site_app_with("l-1", 5, "h-1", "a", "", &status("1"))]);
    rig.see(&site_app_with("l-1", 6, "h-1", "a", "", &status("2")));
    assert_eq!((rig.requests().len(), rig.frames().len()), (0, 0));
    rig.see(&site_app_with("l-1", 7, "h-1", "a", "", r#","status":{"health":{"status":"Degraded"}}"#));
    let frames = rig.frames();
    assert_eq!(frames.len(), 1);
    assert!(frames[0].data.contains("Degraded") && frames[0].data.contains(r#""spec""#));
    assert!(frames[0].event_id.starts_with("app_l-1_7_"));
}

#[test]
fn refused_objects_block_nothing_and_are_reported() {
    let mut rig = settled(&[]);
    rig.event(Type::Create, &hub_app("h-1", 7, "bad"));
    let create = rig.request();
    rig.fail(&create, 422, "Invalid");
    let frames = rig.frames();
    assert_eq!(frames.iter().map(|frame| frame.r#type.as_str()).collect::<Vec<_>>(), ["processed", "error"]);
    assert!(frames[1].data.contains("Invalid!"));
    assert!(matches!(rig.notes()[..], [Note::Refused { .. }]));
    assert_eq!(rig.requests(), vec![]);
    // A newer word is tried at once and clears it.
    rig.event(Type::SpecUpdate, &hub_app("h-1", 8, "good"));
    let read = rig.request();
    rig.fail(&read, 404, "NotFound");
    let create = rig.request();
    assert!(body(&create).contains("good"));
    rig.done(&create, &site_app("l-1", 9, "h-1", "good"));
    assert!(rig.types().contains(&"processed".to_string()));
}

#[test]
fn a_refused_object_is_tried_again() {
    let mut rig = settled(&[]);
    rig.event(Type::Create, &hub_app("h-1", 7, "a"));
    let create = rig.request();
    rig.fail(&create, 403, "Forbidden");
    rig.advance(Duration::from_secs(60));
    let read = rig.request();
    assert_eq!(verb(&read), "GET");
    rig.fail(&read, 404, "NotFound");
    assert_eq!(verb(&rig.request()), "POST");
}

#[test]
fn trouble_withholds_the_acknowledgement_for_thirty_seconds() {
    let mut rig = settled(&[]);
    rig.event(Type::Create, &hub_app("h-1", 7, "a"));
    let mut creates = 0;
    let start = rig.now;
    let mut acknowledged_after = None;
    for _ in 0..200 {
        for request in rig.requests() {
            creates += usize::from(verb(&request) == "POST");
            if verb(&request) == "GET" {
                rig.fail(&request, 404, "NotFound");
            } else {
                rig.fail(&request, 503, "ServiceUnavailable");
            }
        }
        if rig.types().contains(&"processed".to_string()) && acknowledged_after.is_none() {
            acknowledged_after = Some(rig.now - start);
        }
        rig.advance(Duration::from_millis(500));
    }
    assert!(creates > 3 && creates < 40, "{creates}");
    let after = acknowledged_after.unwrap();
    assert!(after >= Duration::from_secs(30) && after < Duration::from_secs(32), "{after:?}");
    // The retry is ours now.
    rig.advance(Duration::from_secs(301));
    let request = rig.request();
    if verb(&request) == "GET" {
        rig.fail(&request, 404, "NotFound");
        assert_eq!(verb(&rig.request()), "POST");
    }
}

#[test]
fn a_lost_answer_is_read_back() {
    let mut rig = settled(&[]);
    rig.event(Type::Create, &hub_app("h-1", 7, "a"));
    let create = rig.request();
    rig.core.complete(rig.now, create.ticket, Outcome::Unknown("connection reset".into()));
    assert_eq!(rig.requests(), vec![]);
    rig.advance(Duration::from_secs(2));
    let read = rig.request();
    assert_eq!(verb(&read), "GET");
    rig.done(&read, &site_app("l-1", 9, "h-1", "a"));
    assert_eq!(rig.requests(), vec![]);
    assert!(rig.types().contains(&"processed".to_string()));
}

#[test]
fn start_verifies_everything_once_per_process() {
    let local = site_app("l-1", 5, "h-1", "a");
    let mut rig = Rig::site(&[&local]);
    rig.connect();
    let mut types = Vec::new();
    for round in 0..2 {
        for _ in 0..6 {
            rig.answer(&local);
            for frame in rig.frames() {
                types.push((round, frame.r#type.clone()));
                rig.ack(&frame);
            }
        }
        rig.core.disconnected(rig.now);
        rig.connect();
    }
    types.sort();
    let types: Vec<_> = types.iter().map(|(round, word)| (*round, word.as_str())).collect();
    assert_eq!(types, [(0, "request-synced-resource-list"), (0, "request-update"), (0, "status-update")]);
}

const GONE: &str = r#"{"kind":"Status","status":"Success"}"#;

#[test]
fn old_news_about_a_deleted_object_does_not_bring_it_back() {
    let local = site_app("l-1", 5, "h-1", "a");
    let mut rig = settled(&[&local]);
    rig.event(Type::Delete, &hub_app("h-1", 7, "a"));
    let delete = rig.request();
    rig.done(&delete, GONE);
    // The watch is behind the answer.
    rig.see(&site_app("l-1", 6, "h-1", "changed"));
    rig.see_gone(&site_app("l-1", 7, "h-1", "changed"));
    assert_eq!(rig.requests(), vec![]);
    assert_eq!(rig.core.depth().0, 0);
}

#[test]
fn a_deletion_that_meets_a_write_is_undone_and_what_was_asked_for_follows() {
    let local = site_app("l-1", 5, "h-1", "a");
    let mut rig = settled(&[&local]);
    rig.event(Type::SetOperation, &hub_app_with("h-1", 7, "a", "", r#","operation":{"sync":{}}"#));
    let patch = rig.request();
    rig.see_gone(&site_app("l-1", 6, "h-1", "a"));
    rig.fail(&patch, 404, "NotFound");
    let read = rig.request();
    rig.fail(&read, 404, "NotFound");
    let create = rig.request();
    assert_eq!(verb(&create), "POST");
    rig.done(&create, &site_app("l-2", 8, "h-1", "a"));
    let patch = rig.requests().into_iter().find(|request| verb(request) == "PATCH").unwrap();
    assert!(body(&patch).contains("/operation"));
}

#[test]
fn a_delete_that_did_not_happen_is_no_reason_to_accept_a_local_deletion() {
    let local = site_app("l-1", 5, "h-1", "a");
    let mut rig = settled(&[&local]);
    rig.event(Type::Create, &hub_app("h-2", 7, "a"));
    let read = rig.request();
    rig.done(&read, &local);
    let delete = rig.request();
    rig.fail(&delete, 503, "ServiceUnavailable");
    // The hub takes its word back before the delete is tried again.
    rig.event(Type::SpecUpdate, &hub_app("h-1", 8, "a"));
    let read = rig.request();
    rig.done(&read, &local);
    rig.see_gone(&site_app("l-1", 6, "h-1", "a"));
    let requests = rig.requests();
    assert!(requests.iter().any(|request| verb(request) == "POST"), "{requests:?}");
}

#[test]
fn the_end_is_reported_under_the_uid_of_the_object_that_waits_for_it() {
    let local = site_app("l-1", 5, "h-1", "a");
    let mut rig = settled(&[&local]);
    let ending = r#","finalizers":["f"],"deletionTimestamp":"2026-01-01T00:00:00Z""#;
    rig.event(Type::Create, &hub_app_with("h-2", 7, "a", ending, ""));
    let read = rig.request();
    rig.done(&read, &local);
    let delete = rig.request();
    assert_eq!(verb(&delete), "DELETE");
    rig.done(&delete, GONE);
    let frames = rig.frames();
    let end = frames.iter().find(|frame| frame.r#type == "delete").unwrap();
    assert!(end.data.contains(r#""argocd.argoproj.io/source-uid":"h-2""#), "{}", end.data);
}

#[test]
fn a_second_end_is_told_after_the_first() {
    let ending = r#","finalizers":["f"],"deletionTimestamp":"2026-01-01T00:00:00Z""#;
    let mut rig = settled(&[]);
    rig.event(Type::SpecUpdate, &hub_app_with("h-1", 7, "a", ending, ""));
    let first = rig.frames().into_iter().find(|frame| frame.r#type == "delete").unwrap();
    rig.event(Type::SpecUpdate, &hub_app_with("h-2", 9, "a", ending, ""));
    rig.frames();
    rig.ack(&first);
    rig.requests();
    let second = rig.frames().into_iter().find(|frame| frame.r#type == "delete").unwrap();
    assert!(second.data.contains("h-2"));
    rig.ack(&second);
    assert_eq!(rig.core.depth(), (0, 0));
}

#[test]
fn a_former_object_goes_although_the_word_that_replaced_it_was_taken_back() {
    let local = site_app("l-1", 5, "h-1", "a");
    let mut rig = settled(&[&local]);
    rig.event(Type::Create, &hub_app("h-2", 7, "a"));
    let read = rig.request();
    rig.fail(&read, 503, "ServiceUnavailable");
    rig.event(Type::Delete, &hub_app("h-1", 8, "a"));
    rig.event(Type::Delete, &hub_app("h-2", 9, "a"));
    let delete = rig.request();
    assert_eq!((verb(&delete), body(&delete).as_str()), ("DELETE", "l-1"));
    // Not so where another principal told its end.
    let mut rig = settled(&[&local]);
    rig.event(Type::Create, &hub_app("h-2", 7, "a"));
    let read = rig.request();
    rig.fail(&read, 503, "ServiceUnavailable");
    rig.event_with(Type::Delete, &hub_app("h-1", 8, "a"), "app_h-1_8_x", "p-2");
    rig.event(Type::Delete, &hub_app("h-2", 9, "a"));
    assert!(rig.requests().iter().all(|request| verb(request) == "GET"));
}

#[test]
fn the_hub_hears_the_status_again_after_its_operation_was_settled() {
    let local = site_app("l-1", 5, "h-1", "a");
    let mut rig = settled(&[&local]);
    let asked = hub_app_with("h-1", 7, "a", "", r#","operation":{"sync":{}}"#);
    rig.event(Type::SetOperation, &asked);
    let patch = rig.request();
    rig.done(&patch, &site_app_with("l-1", 6, "h-1", "a", "", r#","operation":{"sync":{}}"#));
    rig.see(&site_app("l-1", 7, "h-1", "a"));
    for _ in 0..4 {
        rig.answer(&site_app("l-1", 7, "h-1", "a"));
        rig.acknowledge();
    }
    // The acknowledgement was lost: the hub repeats it, and kept its operation until now.
    rig.event(Type::SetOperation, &asked);
    let read = rig.request();
    rig.done(&read, &site_app("l-1", 7, "h-1", "a"));
    assert_eq!(rig.types(), words(&["processed", "status-update"]));
}

#[test]
fn a_blind_comparison_is_not_settled_by_an_ordinary_one() {
    let local = site_app("l-1", 5, "h-1", "a");
    let mut rig = Rig::site(&[&local]);
    rig.connect();
    // The start-up comparison is on its way when the object is deleted here and comes back.
    let read = rig.request();
    rig.done(&read, &local);
    let ordinary = rig.frames().into_iter().find(|frame| frame.r#type == "request-update").unwrap();
    rig.see_gone(&site_app("l-1", 6, "h-1", "a"));
    let create = rig.request();
    rig.done(&create, &site_app("l-2", 7, "h-1", "a"));
    rig.ack(&ordinary);
    let mut blind = false;
    for _ in 0..4 {
        rig.answer(&site_app("l-2", 7, "h-1", "a"));
        for frame in rig.frames() {
            blind |= frame.data.contains(r#""checksum":null"#) && frame.data.contains("h-1");
            rig.ack(&frame);
        }
    }
    assert!(blind);
}

#[test]
fn what_comes_back_from_less_than_the_whole_bears_no_principal_until_the_hub_has_completed_it() {
    let local = site_app("l-1", 5, "h-1", "a");
    let mut rig = Rig::site(&[&local]);
    // A write of ours meets nothing: there is no last state but the spec.
    rig.see(&site_app("l-1", 6, "h-1", "b"));
    let revert = rig.request();
    rig.fail(&revert, 404, "NotFound");
    let read = rig.request();
    rig.fail(&read, 404, "NotFound");
    let create = rig.request();
    assert_eq!(verb(&create), "POST");
    assert!(body(&create).contains("source-uid") && !body(&create).contains("principal-uid"));
    // The watch, however, brings the whole.
    let mut rig = Rig::site(&[&local]);
    rig.see_gone(&site_app("l-1", 6, "h-1", "a"));
    assert!(body(&rig.request()).contains("principal-uid"));
}

#[test]
fn a_copy_without_a_principal_is_asked_for_whole_after_a_start() {
    let local =
        site_app_with("l-1", 5, "", "a", r#","annotations":{"argocd.argoproj.io/source-uid":"h-1"}"#, "");
    let mut rig = Rig::site(&[&local]);
    rig.connect();
    rig.answer(&local);
    let asked = rig.frames().into_iter().find(|frame| frame.r#type == "request-update").unwrap();
    assert!(asked.data.contains(r#""checksum":null"#), "{}", asked.data);
    rig.event(Type::SpecUpdate, &hub_app_with("h-1", 7, "a", r#","labels":{"x":"y"}"#, ""));
    let patch = loop {
        let request = rig.request();
        if verb(&request) != "GET" {
            break request;
        }
        rig.done(&request, &local);
    };
    assert!(body(&patch).contains("principal-uid") && body(&patch).contains(r#""x":"y""#));
}

#[test]
fn a_copy_whose_mark_was_removed_is_compared_all_the_same() {
    let local = site_app("l-1", 5, "h-1", "a");
    let mut rig = settled(&[&local]);
    // The mark goes, and it cannot be put back yet.
    rig.see(&site_app("l-1", 6, "", "a"));
    let revert = rig.request();
    rig.fail(&revert, 422, "Invalid");
    rig.event_with(Type::RequestResourceResync, "", "7c1a9a0e-0000-4000-8000-000000000002", "");
    rig.advance(Duration::from_secs(1200));
    for _ in 0..4 {
        for request in rig.requests() {
            match verb(&request) {
                "GET" => rig.done(&request, &site_app("l-1", 6, "", "a")),
                _ => rig.fail(&request, 422, "Invalid"),
            }
        }
        rig.advance(Duration::from_secs(1200));
    }
    let asked = rig.frames().into_iter().find(|frame| frame.r#type == "request-update").unwrap();
    assert!(asked.data.contains("h-1"), "{}", asked.data);
}

#[test]
fn what_stands_unmarked_in_place_of_a_copy_is_for_the_hub_to_name() {
    let local = site_app("l-1", 5, "h-1", "a");
    let ending = r#","finalizers":["f"],"deletionTimestamp":"2026-01-01T00:00:00Z""#;
    let mut rig = settled(&[&local]);
    rig.see_gone(&site_app("l-1", 6, "h-1", "a"));
    let create = rig.request();
    assert_eq!(verb(&create), "POST");
    rig.core.complete(rig.now, create.ticket, Outcome::Unknown("connection reset".into()));
    rig.event(Type::SpecUpdate, &hub_app_with("h-1", 8, "a", ending, ""));
    // Ours without its mark, or another: nothing here tells.
    let unmarked = site_app("l-2", 8, "", "a");
    let read = rig.request();
    rig.done(&read, &unmarked);
    let requests = rig.requests();
    assert!(requests.iter().all(|request| verb(request) == "GET"), "{requests:?}");
    let frames = rig.frames();
    let asked = frames.iter().find(|frame| frame.r#type == "request-update").unwrap();
    assert!(asked.data.contains(r#""checksum":null"#), "{}", asked.data);
    rig.ack(asked);
    // The answer may adopt it.
    rig.event(Type::Create, &hub_app_with("h-1", 9, "a", ending, ""));
    let read = rig.request();
    rig.done(&read, &unmarked);
    let stamp = rig.request();
    assert!(body(&stamp).contains("source-uid"), "{}", body(&stamp));
    rig.done(&stamp, &site_app_with("l-2", 9, "h-1", "a", r#","finalizers":["f"]"#, ""));
    let delete = rig.request();
    assert_eq!((verb(&delete), body(&delete).as_str()), ("DELETE", "l-2"));
    rig.done(&delete, GONE);
    let frames = rig.frames();
    let end = frames.iter().find(|frame| frame.r#type == "delete").unwrap();
    assert!(end.data.contains(r#""argocd.argoproj.io/source-uid":"h-1""#), "{}", end.data);
}

#[test]
fn an_object_of_the_site_in_place_of_a_copy_is_not_overwritten_by_a_revert() {
    let config = Config { adoption_policy: AdoptionPolicy::Never, ..Config::agent("argocd") };
    let mut rig = settled_with(config, &[&site_app("l-1", 5, "h-1", "a")]);
    rig.see_gone(&site_app("l-1", 6, "h-1", "a"));
    let create = rig.request();
    // Somebody here was faster.
    rig.fail(&create, 409, "AlreadyExists");
    let own = site_app("l-2", 7, "", "own");
    let read = rig.request();
    rig.done(&read, &own);
    let mut types = Vec::new();
    for round in 0..4 {
        if round == 1 {
            rig.event(Type::Create, &hub_app("h-1", 9, "a"));
        }
        for request in rig.requests() {
            assert_eq!(verb(&request), "GET");
            rig.done(&request, &own);
        }
        for frame in rig.frames() {
            rig.ack(&frame);
            types.push(frame.r#type);
        }
    }
    assert_eq!(types, words(&["request-update", "processed", "error"]));
}

#[test]
fn a_copy_whose_making_was_not_answered_is_known_once_its_mark_was_seen() {
    // (made again after a local deletion, seen before the answer was given up)
    for (again, in_passing) in [(true, true), (true, false), (false, true), (false, false)] {
        let local = site_app("l-1", 5, "h-1", "a");
        let objects: &[&str] = if again { &[&local] } else { &[] };
        let mut rig = settled(objects);
        if again {
            rig.see_gone(&site_app("l-1", 6, "h-1", "a"));
        } else {
            rig.event(Type::SpecUpdate, &hub_app("h-1", 7, "a"));
        }
        let create = rig.request();
        assert_eq!(verb(&create), "POST");
        let marked = site_app("l-2", 7, "h-1", "a");
        if in_passing {
            rig.see(&marked);
        }
        rig.core.complete(rig.now, create.ticket, Outcome::Unknown("connection reset".into()));
        if !in_passing {
            rig.see(&marked);
        }
        // The mark goes, and is not missed before the hub speaks.
        let unmarked = site_app("l-2", 8, "", "a");
        rig.event(Type::SpecUpdate, &hub_app("h-1", 8, "b"));
        let read = rig.request();
        rig.done(&read, &unmarked);
        let update = rig.request();
        let patch = body(&update);
        assert!(
            patch.contains("source-uid") && patch.contains(r#""path":"b""#),
            "{again} {in_passing} {patch}"
        );
    }
}

#[test]
fn a_copy_that_went_while_its_making_was_not_answered_is_no_reference() {
    let mut rig = settled(&[]);
    rig.event(Type::Create, &hub_app("h-1", 7, "a"));
    let create = rig.request();
    rig.see(&site_app("l-1", 7, "h-1", "a"));
    rig.see_gone(&site_app("l-1", 8, "h-1", "a"));
    rig.core.complete(rig.now, create.ticket, Outcome::Unknown("connection reset".into()));
    rig.event(Type::Delete, &hub_app("h-1", 8, "a"));
    let read = rig.request();
    // Somebody put a copy of another object there, which is not to become one of the former.
    rig.done(&read, &site_app("l-2", 9, "h-9", "b"));
    let requests = rig.requests();
    assert!(requests.iter().all(|request| verb(request) == "GET"), "{requests:?}");
}

#[test]
fn a_go_principal_is_not_told_its_own_operation() {
    for is_go in [true, false] {
        let local = site_app("l-1", 5, "h-1", "a");
        let mut rig = Rig::site(&[&local]);
        if is_go {
            rig.connect_go()
        } else {
            rig.connect()
        }
        let operation = r#","operation":{"sync":{}}"#;
        rig.event(Type::SetOperation, &hub_app_with("h-1", 7, "a", "", operation));
        let asked = site_app_with("l-1", 6, "h-1", "a", "", operation);
        let mut told = None;
        for _ in 0..6 {
            for request in rig.requests() {
                let stands = if told.is_none() && verb(&request) == "GET" { &local } else { &asked };
                let stands = if verb(&request) == "PATCH" { &asked } else { stands };
                rig.done(&request, stands);
            }
            for frame in rig.frames() {
                if frame.r#type == "status-update" && frame.event_id.contains("_6_") {
                    told = Some(frame.data.contains("operation"));
                }
                rig.ack(&frame);
            }
            rig.see(&asked);
        }
        assert_eq!(told, Some(!is_go));
        // One that somebody here asked for is told to everybody.
        let own = site_app_with("l-1", 8, "h-1", "a", "", r#","operation":{"sync":{"revision":"x"}}"#);
        rig.see(&own);
        rig.answer(&own);
        assert!(rig.frames().iter().any(|frame| frame.data.contains(r#""revision":"x""#)));
    }
}

#[test]
fn an_answer_that_a_relist_has_overtaken_is_confirmed_by_a_read() {
    let local = site_app("l-1", 5, "h-1", "a");
    for is_write in [true, false] {
        let mut rig = settled(&[&local]);
        if is_write {
            rig.see(&site_app("l-1", 6, "h-1", "b"));
        } else {
            rig.event(Type::SpecUpdate, &hub_app("h-1", 7, "a"));
        }
        let slow = rig.request();
        assert_eq!(verb(&slow), if is_write { "PATCH" } else { "GET" });
        // Deleted here meanwhile; the watch was down.
        rig.list(&[]);
        rig.done(&slow, &site_app("l-1", 7, "h-1", "a"));
        let read = rig.request();
        assert_eq!(verb(&read), "GET");
        rig.fail(&read, 404, "NotFound");
        assert_eq!(verb(&rig.request()), "POST");
    }
}

#[test]
fn unmanaged_applications_take_no_part_in_a_resync_where_the_flag_says_so() {
    let own = site_app("l-1", 5, "", "a");
    let body = SyncedResource {
        name: "app".into(),
        namespace: "agent-1".into(),
        uid: "h-1".into(),
        kind: "Application".into(),
    }
    .encode();
    let body = core::str::from_utf8(&body).unwrap();
    for ignored in [false, true] {
        let config = Config { ignore_unmanaged: ignored, ..Config::agent("argocd") };
        let mut rig = Rig::site_with(config, &[&own]);
        rig.connect();
        let list =
            rig.frames().into_iter().find(|sent| sent.r#type == "request-synced-resource-list").unwrap();
        assert_eq!(list.data.contains("null"), ignored, "{}", list.data);
        rig.event_with(Type::ResponseSyncedResource, body, "7c1a9a0e-0000-4000-8000-000000000003", "");
        rig.answer(&own);
        assert_eq!(rig.types().contains(&"request-update".to_string()), !ignored);
    }
}

#[test]
fn a_server_that_was_restored_from_a_backup_counts_anew() {
    let mut rig = settled(&[&site_app("l-1", 10_000, "h-1", "a")]);
    let restored = site_app("l-1", 500, "h-1", "old");
    rig.list(&[&restored]);
    // A list may be from before what is known: a read tells.
    let read = rig.request();
    assert_eq!(verb(&read), "GET");
    rig.done(&read, &restored);
    let revert = rig.request();
    assert_eq!(verb(&revert), "PATCH");
    assert!(body(&revert).contains(r#""value":"500""#), "{}", body(&revert));
    rig.done(&revert, &site_app("l-1", 501, "h-1", "a"));
    rig.event(Type::SpecUpdate, &hub_app("h-1", 7, "b"));
    let read = rig.request();
    rig.done(&read, &site_app("l-1", 501, "h-1", "a"));
    assert_eq!(verb(&rig.request()), "PATCH");
}

#[test]
fn older_answers_are_no_reason_for_a_hot_loop() {
    let mut rig = settled(&[&site_app("l-1", 10_000, "h-1", "a")]);
    rig.event(Type::SpecUpdate, &hub_app("h-1", 7, "b"));
    let mut reads = 0;
    while let Some(request) = rig.requests().first() {
        assert_eq!(verb(request), "GET");
        rig.done(request, &site_app("l-1", 500, "h-1", "a"));
        reads += 1;
        assert!(reads < 20);
    }
    assert!(rig.notes().iter().any(|note| matches!(note, Note::Trouble { .. })));
    rig.advance(Duration::from_secs(300));
    assert_eq!(verb(&rig.request()), "GET");
}
