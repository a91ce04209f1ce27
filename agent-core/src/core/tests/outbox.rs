//! The window, the order, and what happens when acknowledgements do not come.

use super::*;

fn named(name: &str, version: u32) -> String {
    hub_app(&format!("h-{name}"), version, "a").replace(r#""name":"app""#, &format!(r#""name":"{name}""#))
}

#[test]
fn at_most_64_events_are_in_flight_and_the_rest_follows() {
    let apps: Vec<String> = (0..200).map(|index| named(&format!("a{index}"), 5)).collect();
    let mut rig = Rig::hub(&apps.iter().map(String::as_str).collect::<Vec<_>>());
    rig.connect();
    let mut seen = 0;
    let mut window = Vec::new();
    for _ in 0..100 {
        for request in rig.requests() {
            let object =
                apps.iter().find(|app| app.contains(&format!(r#""name":"{}""#, request.key.name))).unwrap();
            rig.done(&request, object);
        }
        window.extend(rig.frames().into_iter().filter(|frame| frame.target == "application"));
        assert!(window.len() <= 64, "{}", window.len());
        if let Some(frame) = window.pop() {
            rig.ack(&frame);
            seen += 1;
        }
    }
    assert!(seen >= 100);
}

#[test]
fn an_unacknowledged_event_is_repeated_with_the_same_id_and_later_each_time() {
    let app = hub_app("h-1", 5, "a");
    let mut rig = Rig::hub(&[]);
    rig.connect();
    rig.acknowledge();
    rig.see(&app);
    let first = rig.frames().remove(0);
    let mut times = vec![rig.now];
    for _ in 0..600 {
        rig.advance(Duration::from_secs(1));
        rig.answer(&app);
        for frame in rig.frames() {
            assert_eq!(frame.event_id, first.event_id);
            times.push(rig.now);
        }
    }
    let gaps: Vec<u64> = times.windows(2).map(|pair| (pair[1] - pair[0]).as_secs()).collect();
    assert!((5..=8).contains(&gaps[0]), "{gaps:?}");
    assert!(gaps.windows(2).all(|pair| pair[1] + 1 >= pair[0] || pair[0] >= 120), "{gaps:?}");
    assert!(gaps.iter().all(|gap| *gap <= 151), "{gaps:?}");
    rig.ack(&first);
    rig.advance(Duration::from_secs(600));
    assert_eq!((rig.requests().len(), rig.frames().len()), (0, 0));
}

#[test]
fn only_the_latest_event_clears_the_entry() {
    let mut rig = Rig::hub(&[]);
    rig.connect();
    rig.acknowledge();
    rig.see(&hub_app("h-1", 5, "a"));
    let old = rig.frames().remove(0);
    rig.see(&hub_app("h-1", 6, "b"));
    assert_eq!(rig.frames(), vec![], "one in flight per object");
    rig.core.disconnected(rig.now);
    rig.connect();
    let read = rig.request();
    rig.done(&read, &hub_app("h-1", 6, "b"));
    let new = rig.frames().remove(0);
    assert_ne!(old.event_id, new.event_id);
    rig.ack(&old);
    assert!(!rig.core.is_settled());
    rig.ack(&new);
    assert!(rig.core.is_settled());
}

#[test]
fn acknowledgements_and_operations_overtake_specs() {
    let apps: Vec<String> = (0..100).map(|index| named(&format!("a{index}"), 5)).collect();
    let mut rig = Rig::hub(&apps.iter().map(String::as_str).collect::<Vec<_>>());
    rig.connect();
    for _ in 0..40 {
        for request in rig.requests() {
            let object =
                apps.iter().find(|app| app.contains(&format!(r#""name":"{}""#, request.key.name))).unwrap();
            rig.done(&request, object);
        }
        rig.acknowledge();
    }
    assert!(rig.core.is_settled());
    rig.core.disconnected(rig.now);
    for app in &apps[..99] {
        rig.see(&app.replace(r#""5""#, r#""6""#).replace(r#""path":"a""#, r#""path":"b""#));
    }
    let operated =
        apps[99].replace(r#""5""#, r#""6""#).replace(r#","spec""#, r#","operation":{"sync":{}},"spec""#);
    rig.see(&operated);
    rig.connect();
    let requests = rig.requests();
    assert_eq!(&*requests[0].key.name, "a99", "the operation leads");
    rig.event(Type::StatusUpdate, &hub_app("h-none", 5, "a"));
    rig.done(&requests[0], &operated);
    assert_eq!(rig.types(), words(&["processed", "set-operation"]));
}

#[test]
fn c_10_statuses_that_follow_closely_are_told_once_in_a_window() {
    let config = Config { status_window: Duration::from_secs(10), ..Config::agent("argocd") };
    let copy = |number: u32| {
        site_app_with("l-1", 5 + number, "h-1", "a", "", &format!(r#","status":{{"n":{number}}}"#))
    };
    let mut rig = Rig::site_with(config, &[&copy(0)]);
    rig.connect();
    for _ in 0..6 {
        rig.answer(&copy(0));
        rig.acknowledge();
    }
    rig.advance(Duration::from_secs(20));
    let mut told = Vec::new();
    for number in 1..=100 {
        rig.see(&copy(number));
        for _ in 0..2 {
            rig.answer(&copy(number));
            for frame in rig.frames() {
                rig.ack(&frame);
                if frame.r#type == "status-update" {
                    told.push((number, frame.data));
                }
            }
        }
        rig.advance(Duration::from_millis(200));
    }
    rig.advance(Duration::from_secs(10));
    rig.answer(&copy(100));
    told.extend(rig.frames().into_iter().map(|frame| (100, frame.data)));
    assert!((2..=4).contains(&told.len()), "{}", told.len());
    assert_eq!(told[0].0, 1, "the first goes at once");
    assert!(told.last().unwrap().1.contains(r#""n":100"#), "the last is what it came to");
}

#[test]
fn what_waits_for_its_window_holds_nothing_else_up() {
    let config = Config { status_window: Duration::from_secs(10), ..Config::agent("argocd") };
    let copy = |number: u32| {
        site_app_with("l-1", 5 + number, "h-1", "a", "", &format!(r#","status":{{"n":{number}}}"#))
    };
    let mut rig = Rig::site_with(config, &[&copy(0)]);
    rig.connect();
    for _ in 0..6 {
        rig.answer(&copy(0));
        rig.acknowledge();
    }
    rig.see(&copy(1));
    rig.answer(&copy(1));
    assert_eq!(rig.frames(), vec![], "its window is not over");
    // The hub asks for a comparison: it goes at once.
    rig.event(Type::RequestResourceResync, "{}");
    rig.answer(&copy(1));
    assert!(rig.types().contains(&"request-update".to_string()));
}

#[test]
fn signs_of_life_are_sent_while_the_stream_is_open() {
    let config = Config { heartbeat_interval: Duration::from_secs(30), ..Config::agent("argocd") };
    let mut rig = Rig::site_with(config, &[]);
    rig.advance(Duration::from_secs(60));
    rig.connect();
    rig.acknowledge();
    for _ in 0..3 {
        rig.advance(Duration::from_secs(30));
        let frames = rig.frames();
        assert_eq!(frames.len(), 1);
        assert_eq!((&*frames[0].target, &*frames[0].r#type, &*frames[0].data), ("heartbeat", "ping", ""));
    }
    assert_eq!(rig.core.poll_timeout(), Some(rig.now + Duration::from_secs(30)));
    rig.core.disconnected(rig.now);
    rig.advance(Duration::from_secs(30));
    assert_eq!(rig.frames(), vec![]);
}
