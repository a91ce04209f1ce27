//! Counts of the cluster cache: one value, the last one wins.

use super::*;
use crate::cluster_info::Counts;

const FEW: Counts = Counts { applications: 3, apis: 120, resources: 840 };
const MORE: Counts = Counts { applications: 4, apis: 120, resources: 900 };
const MOST: Counts = Counts { applications: 5, apis: 121, resources: 950 };

/// A connected agent that owes nothing else.
fn site() -> Rig {
    let mut rig = Rig::site(&[]);
    rig.connect();
    rig.acknowledge();
    rig
}

fn said(rig: &mut Rig) -> Vec<Counts> {
    rig.frames().iter().map(|frame| Counts::decode(frame.data.as_bytes()).unwrap()).collect()
}

fn connect_to(rig: &mut Rig, instance: &str) {
    let peer = Peer { version: "1".into(), instance: instance.into(), ..Peer::default() };
    rig.core.connected(rig.now, &peer);
}

#[test]
fn counts_go_out_once_as_the_protocol_has_them() {
    let mut rig = site();
    rig.core.cluster_info(rig.now, FEW);
    let sent = rig.frames().remove(0);
    assert_eq!((&*sent.target, &*sent.r#type), ("clusterCacheInfoUpdate", "cluster-cache-info-update"));
    assert_eq!(sent.data, r#"{"applicationsCount":3,"apisCount":120,"resourcesCount":840}"#);
    assert_eq!(sent.event_id, sent.resource_id);
    assert_eq!((sent.event_id.len(), &*sent.principal_uid), (36, ""));
    rig.ack(&sent);
    assert!(rig.core.is_settled());
    rig.core.cluster_info(rig.now, FEW);
    assert_eq!(rig.frames(), vec![], "the peer has it");
    rig.core.cluster_info(rig.now, MORE);
    assert_eq!(said(&mut rig), [MORE]);
}

#[test]
fn the_last_value_wins() {
    let mut rig = site();
    rig.core.cluster_info(rig.now, FEW);
    let first = rig.frames().remove(0);
    for counts in [MORE, MOST] {
        rig.core.cluster_info(rig.now, counts);
        assert_eq!(rig.frames(), vec![], "one in flight");
    }
    rig.ack(&first);
    assert_eq!(said(&mut rig), [MOST]);
}

#[test]
fn off_line_the_last_value_waits() {
    let mut rig = Rig::site(&[]);
    for counts in [FEW, MORE, MOST] {
        rig.core.cluster_info(rig.now, counts);
        assert_eq!(rig.frames(), vec![]);
    }
    rig.connect();
    let counts: Vec<_> =
        rig.frames().into_iter().filter(|frame| frame.target == "clusterCacheInfoUpdate").collect();
    assert_eq!(counts.len(), 1);
    assert_eq!(counts[0].data.as_bytes(), MOST.encode());
}

#[test]
fn without_an_acknowledgement_it_is_repeated_later_each_time() {
    let mut rig = site();
    rig.core.cluster_info(rig.now, FEW);
    let mut times = Vec::new();
    for _ in 0..600 {
        if !said(&mut rig).is_empty() {
            times.push(rig.now);
        }
        rig.advance(Duration::from_secs(1));
    }
    let gaps: Vec<u64> = times.windows(2).map(|pair| (pair[1] - pair[0]).as_secs()).collect();
    assert!((5..=8).contains(&gaps[0]), "{gaps:?}");
    assert!(times.len() < 10, "{gaps:?}");
    rig.core.cluster_info(rig.now, MORE);
    rig.advance(Duration::from_secs(200));
    assert_eq!(said(&mut rig), [MORE], "what is repeated is the latest");
}

#[test]
fn a_value_that_may_have_arrived_is_taken_back() {
    let mut rig = site();
    rig.core.cluster_info(rig.now, FEW);
    rig.acknowledge();
    rig.core.cluster_info(rig.now, MORE);
    assert_eq!(said(&mut rig), [MORE]);
    rig.core.disconnected(rig.now);
    rig.core.cluster_info(rig.now, FEW);
    rig.connect();
    assert_eq!(said(&mut rig), [FEW]);
}

#[test]
fn who_has_forgotten_hears_it_again() {
    let mut rig = site();
    rig.core.cluster_info(rig.now, FEW);
    rig.acknowledge();
    connect_to(&mut rig, "x");
    assert_eq!(rig.frames(), vec![], "the same process");
    connect_to(&mut rig, "y");
    assert_eq!(said(&mut rig), [FEW], "another process");
    for _ in 0..2 {
        rig.connect_go();
        let sent = rig.frames().remove(0);
        assert_eq!(sent.data.as_bytes(), FEW.encode(), "a Go principal sets them to 0 at every Subscribe");
        rig.ack(&sent);
    }
    connect_to(&mut rig, "y");
    assert_eq!(said(&mut rig), [FEW], "another one wrote meanwhile");
}

#[test]
fn counts_come_after_everything_else() {
    let app = site_app("l-1", 5, "h-1", "a");
    let mut rig = Rig::site(&[&app]);
    rig.core.cluster_info(rig.now, FEW);
    rig.connect();
    rig.answer(&app);
    let types = rig.types();
    assert!(types.len() > 1, "{types:?}");
    assert_eq!(types.last().unwrap(), "cluster-cache-info-update");
    assert_eq!(types.iter().filter(|word| *word == "cluster-cache-info-update").count(), 1);
}

#[test]
fn the_hub_takes_the_last_value_and_acknowledges_each() {
    let mut rig = Rig::hub(&[]);
    rig.connect();
    rig.acknowledge();
    assert_eq!(rig.core.poll_cluster_info(), None);
    for (id, counts) in [("1", FEW), ("2", MORE)] {
        let body = String::from_utf8(counts.encode()).unwrap();
        rig.event_with(Type::ClusterCacheInfoUpdate, &body, id, "");
    }
    assert_eq!(rig.types(), words(&["processed", "processed"]));
    assert_eq!((rig.core.poll_cluster_info(), rig.core.poll_cluster_info()), (Some(MORE), None));
    assert_eq!(rig.notes(), vec![]);
}

#[test]
fn rubbish_is_named_and_acknowledged_and_keeps_the_former_value() {
    let mut rig = Rig::hub(&[]);
    rig.connect();
    rig.acknowledge();
    rig.event_with(Type::ClusterCacheInfoUpdate, r#"{"apisCount":7}"#, "1", "");
    rig.event_with(Type::ClusterCacheInfoUpdate, r#"{"apisCount":"many"}"#, "2", "");
    assert_eq!(rig.types(), words(&["processed", "processed"]));
    let [Note::BadEvent { reason }] = &rig.notes()[..] else { panic!("one note") };
    assert!(reason.contains("clusterCacheInfoUpdate") && reason.contains("apisCount"), "{reason}");
    assert_eq!(rig.core.poll_cluster_info(), Some(Counts { apis: 7, ..Counts::default() }));
}

#[test]
fn counts_are_for_the_hub_only() {
    let mut rig = site();
    rig.event_with(Type::ClusterCacheInfoUpdate, "{}", "1", "");
    assert_eq!(rig.types(), words(&["processed"]));
    assert!(matches!(&rig.notes()[..], [Note::Unsupported { .. }]));
    assert_eq!(rig.core.poll_cluster_info(), None);
}
