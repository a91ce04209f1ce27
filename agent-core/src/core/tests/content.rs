//! Projects, repositories and keys, on either side.

use super::*;
use crate::event::{RequestUpdate, SyncedResource};

const PROJECT: Kind = Kind::AppProject;
const REPOSITORY: Kind = Kind::Repository;

fn project(uid: &str, version: u32, destination: &str) -> String {
    format!(
        r#"{{"metadata":{{"name":"p","namespace":"hub","uid":"{uid}","resourceVersion":"{version}"}},"spec":{{"destinations":[{{"name":"{destination}","namespace":"x"}}],"sourceNamespaces":["*"],"roles":[{{"name":"r"}}]}}}}"#
    )
}

/// Of project p.
fn repository(uid: &str, version: u32, password: &str) -> String {
    format!(
        r#"{{"metadata":{{"name":"r","namespace":"hub","uid":"{uid}","resourceVersion":"{version}","labels":{{"argocd.argoproj.io/secret-type":"repository"}}}},"data":{{"project":"cA==","password":"{password}"}},"type":"Opaque"}}"#
    )
}

/// Its copy on a site.
fn repository_copy(uid: &str, version: u32, source: &str, password: &str) -> String {
    let mark = format!(r#""annotations":{{"argocd.argoproj.io/source-uid":"{source}"}},"labels""#);
    repository(uid, version, password).replace(r#""labels""#, &mark).replace("hub", "argocd")
}

fn see(rig: &mut Rig, kind: Kind, name: &str, object: &str) {
    let key = Key::new(kind, "hub", name);
    rig.core.observe(rig.now, &key, Observation::Present(object.as_bytes()));
}

fn send(rig: &mut Rig, target: Target, r#type: Type, event_id: &str, object: &str) {
    let mut frame = Vec::new();
    EventWriter {
        source: "",
        r#type: r#type.as_str(),
        target,
        subject: None,
        event_id,
        resource_id: "x",
        sent_at: None,
        principal_uid: None,
        data: object.as_bytes(),
    }
    .encode(&mut frame);
    rig.core.receive(rig.now, &frame).unwrap();
}

/// Connected, with nothing left to say.
fn quiet(mut rig: Rig) -> Rig {
    rig.connect();
    for _ in 0..4 {
        rig.acknowledge();
    }
    rig.notes();
    rig
}

fn told(frames: &[Sent]) -> Vec<(String, String)> {
    frames.iter().map(|frame| (frame.target.clone(), frame.r#type.clone())).collect()
}

fn pair(target: &str, r#type: &str) -> (String, String) {
    (target.into(), r#type.into())
}

#[test]
fn a_go_agent_is_told_only_of_ends_of_what_it_has() {
    // It deletes by name alone, also what is the site's own.
    let end = |rig: &mut Rig| {
        see(rig, PROJECT, "p", &project("u", 2, "other-*"));
        told(&rig.frames())
    };
    let mut rig = Rig::hub(&[]);
    see(&mut rig, PROJECT, "p", &project("u", 1, "agent-*"));
    rig.connect_go();
    rig.answer(&project("u", 1, "agent-*"));
    assert!(told(&rig.frames()).contains(&pair("appproject", "create")));
    rig.core.disconnected(rig.now);
    rig.connect_go();
    // Sent, but not known to have arrived: it is asked what it has.
    assert_eq!(end(&mut rig), [pair("resourceResync", "request-resource-resync")]);
    let resource = SyncedResource {
        name: "p".into(),
        namespace: "argocd".into(),
        uid: "u".into(),
        kind: "AppProject".into(),
    };
    let request = RequestUpdate { resource, checksum: Some(vec![1]) }.encode();
    let request = core::str::from_utf8(&request).unwrap();
    send(&mut rig, Target::ResourceResync, Type::RequestUpdate, "r-1", request);
    rig.answer(&project("u", 2, "other-*"));
    let frames = rig.frames();
    assert!(told(&frames).contains(&pair("appproject", "delete")), "{frames:?}");

    // What it has acknowledged goes at once; to ours, which knows its own, everything does.
    let mut rig = Rig::hub(&[]);
    see(&mut rig, PROJECT, "p", &project("u", 1, "agent-*"));
    rig.connect_go();
    rig.answer(&project("u", 1, "agent-*"));
    rig.acknowledge();
    assert_eq!(end(&mut rig), [pair("appproject", "delete")]);
    let mut rig = Rig::hub(&[]);
    see(&mut rig, PROJECT, "p", &project("u", 1, "agent-*"));
    rig.connect();
    rig.answer(&project("u", 1, "agent-*"));
    rig.frames();
    rig.core.disconnected(rig.now);
    rig.connect();
    assert!(end(&mut rig).contains(&pair("appproject", "delete")));
}

#[test]
fn a_project_goes_to_whom_it_admits_as_that_site_needs_it() {
    let mut rig = quiet(Rig::hub(&[]));
    see(&mut rig, PROJECT, "p", &project("u", 1, "other-*"));
    assert_eq!((rig.frames(), rig.requests()), (vec![], vec![]));
    see(&mut rig, PROJECT, "p", &project("u", 2, "agent-*"));
    let frames = rig.frames();
    assert_eq!(told(&frames), [pair("appproject", "create")]);
    let data = &frames[0].data;
    assert!(
        data.contains(r#""name":"in-cluster""#) && data.contains("https://kubernetes.default.svc"),
        "{data}"
    );
    assert!(!data.contains("sourceNamespaces") && !data.contains("roles"), "{data}");
    rig.ack(&frames[0]);
    // Taken away: the site hears it with the object's own version, which no resync limit holds up.
    see(&mut rig, PROJECT, "p", &project("u", 3, "other-*"));
    let frames = rig.frames();
    assert_eq!(told(&frames), [pair("appproject", "delete")]);
    assert!(frames[0].event_id.starts_with("p_u_3_"), "{}", frames[0].event_id);
    // And given back before the site has answered.
    see(&mut rig, PROJECT, "p", &project("u", 4, "agent-1"));
    rig.ack(&frames[0]);
    rig.answer(&project("u", 4, "agent-1"));
    assert_eq!(told(&rig.frames()), [pair("appproject", "create")]);
}

#[test]
fn a_repository_goes_where_its_project_goes() {
    let mut rig = quiet(Rig::hub(&[]));
    see(&mut rig, REPOSITORY, "r", &repository("s", 1, "YQ=="));
    assert_eq!((rig.frames(), rig.requests()), (vec![], vec![]));
    see(&mut rig, PROJECT, "p", &project("u", 2, "agent-1"));
    rig.acknowledge();
    // The router says so.
    rig.core.recheck(rig.now, &Key::new(REPOSITORY, "hub", "r"));
    rig.answer(&repository("s", 1, "YQ=="));
    let frames = rig.frames();
    assert_eq!(told(&frames), [pair("repository", "create")]);
    assert!(frames[0].data.contains("YQ=="));
    rig.ack(&frames[0]);
    // Withdrawn with its project, and without its contents.
    see(&mut rig, PROJECT, "p", &project("u", 3, "other"));
    rig.answer(&repository("s", 1, "YQ=="));
    let frames = rig.frames();
    assert_eq!(told(&frames), [pair("appproject", "delete"), pair("repository", "delete")]);
    assert!(!frames[1].data.contains("YQ=="), "{}", frames[1].data);
}

#[test]
fn what_was_withdrawn_while_nobody_watched_is_told_when_the_site_asks() {
    let mut rig = Rig::hub(&[]);
    see(&mut rig, PROJECT, "p", &project("u", 2, "other"));
    let mut rig = quiet(rig);
    let resource = SyncedResource {
        name: "r".into(),
        namespace: "argocd".into(),
        uid: "s".into(),
        kind: "Repository".into(),
    };
    let body = RequestUpdate { resource, checksum: None }.encode();
    send(&mut rig, Target::ResourceResync, Type::RequestUpdate, "q", core::str::from_utf8(&body).unwrap());
    let read = rig.request();
    rig.done(&read, &repository("s", 1, "YQ=="));
    let frames = rig.frames();
    assert_eq!(told(&frames), [pair("eventProcessed", "processed"), pair("repository", "delete")]);
    assert!(frames[1].event_id.starts_with("r_s_1_"), "{}", frames[1].event_id);
}

#[test]
fn a_repository_is_written_stamped_and_acknowledged() {
    let mut rig = quiet(Rig::site(&[]));
    send(&mut rig, Target::Repository, Type::Create, "r_s_1_x", &repository("s", 1, "YQ=="));
    let create = rig.request();
    assert_eq!((verb(&create), create.key.path()), ("POST", "/api/v1/namespaces/argocd/secrets/r".into()));
    assert!(body(&create).contains(r#""argocd.argoproj.io/source-uid":"s""#), "{}", body(&create));
    rig.done(&create, &repository_copy("l", 5, "s", "YQ=="));
    // Neither a status nor anything else is told of it.
    assert_eq!(rig.types(), words(&["processed"]));
    // Drift is undone off-line.
    rig.core.disconnected(rig.now);
    let key = Key::new(REPOSITORY, "argocd", "r");
    let edited = repository_copy("l", 6, "s", "Yg==");
    rig.core.observe(rig.now, &key, Observation::Present(edited.as_bytes()));
    let patch = rig.request();
    assert_eq!(
        body(&patch),
        r#"[{"op":"replace","path":"/metadata/resourceVersion","value":"6"},{"op":"add","path":"/data","value":{"project":"cA==","password":"YQ=="}}]"#
    );
    rig.done(&patch, &repository_copy("l", 7, "s", "YQ=="));
    // So is a deletion.
    rig.core.observe(rig.now, &key, Observation::Gone(repository_copy("l", 8, "s", "YQ==").as_bytes()));
    let create = rig.request();
    assert_eq!(verb(&create), "POST");
    assert!(body(&create).contains("YQ==") && body(&create).contains(r#"source-uid":"s""#));
    assert_eq!(rig.core.counters().recreated, 0);
    rig.done(&create, &repository_copy("m", 9, "s", "YQ=="));
    assert_eq!(rig.core.counters().recreated, 1);
    assert_eq!(rig.requests(), vec![]);
}

#[test]
fn the_sites_own_credentials_are_neither_taken_over_nor_deleted() {
    let mut rig = quiet(Rig::site(&[]));
    let own = repository("l", 5, "YQ==").replace("hub", "argocd");
    rig.core.observe(rig.now, &Key::new(REPOSITORY, "argocd", "r"), Observation::Present(own.as_bytes()));
    for (r#type, id) in [(Type::Create, "r_s_1_x"), (Type::Delete, "r_s_2_x")] {
        send(&mut rig, Target::Repository, r#type, id, &repository("s", 1, "Yg=="));
        rig.answer(&own);
        assert_eq!(rig.requests(), vec![]);
        assert!(rig.types().contains(&"processed".to_string()));
        assert!(matches!(&rig.notes()[..], [Note::NotApplied { .. }]));
    }
}

#[test]
fn only_what_is_carried_is_written() {
    let plain = repository("s", 1, "YQ==").replace("secret-type", "other");
    let keys = r#"{"metadata":{"name":"kube-root-ca.crt","uid":"k"},"data":{"a":"b"}}"#;
    let empty = repository("s", 1, "YQ==").replace(r#"{"project":"cA==","password":"YQ=="}"#, "{}");
    for (target, object, reason) in [
        (Target::Repository, &*plain, "not labelled"),
        (Target::Repository, &*empty, "no data"),
        (Target::GpgKey, keys, "GPG keys"),
        (Target::AppProject, r#"{"metadata":{"name":"p","uid":"u"}}"#, "no spec"),
    ] {
        let mut rig = quiet(Rig::site(&[]));
        send(&mut rig, target, Type::Create, "e", object);
        assert_eq!((rig.requests(), rig.types()), (vec![], words(&["processed"])), "{reason}");
        assert!(
            matches!(&rig.notes()[..], [Note::BadEvent { reason: said }] if said.contains(reason)),
            "{reason}"
        );
    }
}

#[test]
fn what_a_site_cannot_take_is_told_where_there_is_no_status() {
    let mut rig = quiet(Rig::hub(&[]));
    let body = crate::event::ErrorBody {
        resource_name: "p".into(),
        resource_namespace: "argocd".into(),
        message: "too strange".into(),
    };
    send(&mut rig, Target::AppProject, Type::Error, "e", core::str::from_utf8(&body.encode()).unwrap());
    assert!(matches!(&rig.notes()[..], [Note::RefusedOnSite { message, .. }] if &**message == "too strange"));
    assert_eq!((rig.requests(), rig.types()), (vec![], words(&["processed"])));
}

#[test]
fn equal_digests_settle_a_round_and_others_ask_for_everything() {
    let (mut hub, mut site) = (quiet(Rig::hub(&[])), quiet(Rig::site(&[])));
    see(&mut hub, PROJECT, "p", &project("u", 2, "agent-1"));
    let create = hub.frames().remove(0);
    hub.ack(&create);
    send(&mut site, Target::AppProject, Type::Create, &create.event_id, &create.data);
    let request = site.request();
    let stored =
        body(&request).replacen(r#""metadata":{"#, r#""metadata":{"uid":"l","resourceVersion":"5","#, 1);
    site.done(&request, &stored);
    site.acknowledge();

    site.advance(Duration::from_secs(1200));
    let digest = site.frames().remove(0);
    assert_eq!((&*digest.target, &*digest.r#type), ("resourceResync", "resync-digest"));
    site.ack(&digest);
    send(&mut hub, Target::ResourceResync, Type::ResyncDigest, "d-1", &digest.data);
    assert_eq!((hub.core.counters().rounds_equal, hub.types()), (1, words(&["processed"])));

    // A change that the site acknowledges and does not carry out.
    see(&mut hub, PROJECT, "p", &project("u", 3, "agent-?"));
    let changed = project("u", 4, "agent-1").replace(r#""roles""#, r#""description":"x","roles""#);
    see(&mut hub, PROJECT, "p", &changed);
    for _ in 0..3 {
        hub.answer(&changed);
        hub.acknowledge();
    }
    send(&mut hub, Target::ResourceResync, Type::ResyncDigest, "d-2", &digest.data);
    assert_eq!(hub.types(), words(&["processed", "request-resource-resync"]));
    // The site then says what it has, and what it may not have is asked for.
    send(&mut site, Target::ResourceResync, Type::RequestResourceResync, "q", "{}");
    site.answer(&stored);
    let types = site.types();
    assert!(types.contains(&"request-update".to_string()), "{types:?}");
    assert!(types.contains(&"request-synced-resource-list".to_string()), "{types:?}");
    // What cannot be mended is compared more and more rarely.
    let first = site.core.poll_timeout().unwrap() - site.now;
    site.advance(first);
    assert!(site.core.counters().rounds <= 2);
}

#[test]
fn a_go_principal_is_compared_daily_over_a_new_stream() {
    let mut site = Rig::site(&[]);
    site.connect_go();
    site.acknowledge();
    assert!(!site.core.poll_reopen());
    site.advance(Duration::from_secs(17 * 3600));
    assert_eq!((site.core.poll_reopen(), site.types()), (false, vec![]));
    site.advance(Duration::from_secs(15 * 3600));
    let frames = site.frames();
    assert_eq!(told(&frames), [pair("resourceResync", "request-synced-resource-list")]);
    assert!(!site.core.poll_reopen(), "what was asked for is still on its way");
    site.ack(&frames[0]);
    assert!(site.core.poll_reopen() && !site.core.poll_reopen());
}
