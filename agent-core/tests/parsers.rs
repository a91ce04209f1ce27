//! No input makes a parser panic: every prefix of good input, good input with bytes changed, and noise.

use agent_core::checksum::{Subtree, subtree_checksum, value_fingerprint};
use agent_core::cloudevent::{EventView, EventWriter};
use agent_core::event::{
    ErrorBody, RequestUpdate, SyncedResource, SyncedResourceList, Target, Type, base64_decode, is_synthetic,
};
use agent_core::json::{self, Edit};
use agent_core::object::ObjectView;
use agent_core::rand::Rng;

/// Hands `input` to every parser, and what comes out to whoever reads it next.
fn feed(input: &[u8]) {
    if let Ok(view) = EventView::decode(input) {
        let ack = view.ack("agent://agent-managed");
        let ack = EventView::decode(&ack).expect("an acknowledgement of ours is readable");
        assert_eq!((ack.event_id, ack.resource_id), (view.event_id, view.resource_id));
        let _ = (view.target(), view.event_type(), view.payload(), is_synthetic(view.event_id));
    }
    if let Ok(view) = ObjectView::parse(input) {
        let _ = (view.operation_phase(), view.destination_name(), view.tracked_uid(), view.label("a"));
        let edits = [
            Edit { path: &["metadata", "annotations", "a"], value: Some(b"\"b\"") },
            Edit { path: &["spec"], value: None },
        ];
        let edited = json::edit(input, &edits).expect("an object");
        let again = ObjectView::parse(&edited).expect("still an object");
        assert!(again.spec.is_none() || view.spec.is_some());
        assert_eq!(again.annotation("a").as_deref(), Some("b"));
    }
    for subtree in [Subtree::Spec, Subtree::SecretData, Subtree::ConfigMapData] {
        let _ = subtree_checksum(subtree, input);
    }
    let _ = value_fingerprint(input);
    let _ = RequestUpdate::of_object("Application", Subtree::Spec, input, "n");
    let _ = (RequestUpdate::decode(input), SyncedResource::decode(input));
    let _ = (SyncedResourceList::decode(input), ErrorBody::decode(input));
    let _ = base64_decode(input);
    let _ = json::string(input);
}

fn good() -> Vec<Vec<u8>> {
    let object = br#"{"metadata":{"name":"g\u00fc","namespace":"n","uid":"u","resourceVersion":"1","annotations":
        {"argocd.argoproj.io/source-uid":"\ud83d\ude00"},"finalizers":["f"],"deletionTimestamp":null},
        "spec":{"destination":{"name":"x"},"a":[1,-2.5e-7,1e300,{"b":[]},true,null,"\\\"\n"]},"data":{"k":"dg=="},
        "status":{"operationState":{"phase":"Running"}},"operation":{}}"#;
    let mut event = Vec::new();
    EventWriter {
        source: "agent://agent-managed",
        r#type: Type::Create.as_str(),
        target: Target::Application,
        subject: Some(("n", "g")),
        event_id: "g_u_1_00000000",
        resource_id: "g_u",
        sent_at: Some("2026-01-02T03:04:05Z"),
        principal_uid: Some("p"),
        data: object,
    }
    .encode(&mut event);
    let body = br#"{"name":"n","namespace":"ns","uid":"u","kind":"Application","checksum":"AAEC/w=="}"#;
    vec![event, object.to_vec(), body.to_vec(), b"{\"a\":{\"b\":[[[[1]]]]}}".to_vec()]
}

#[test]
fn every_prefix() {
    for input in good() {
        feed(&input);
        for end in 0..input.len() {
            feed(&input[..end]);
        }
    }
}

#[test]
fn changed_bytes() {
    let mut rng = Rng::new(1);
    let inputs = good();
    let structural = b"{}[]\",:\\0123456789u\xff\x80\x0a\x12\x2a\x32\x00";
    for _ in 0..40_000 {
        let mut input = inputs[rng.below(inputs.len() as u64) as usize].clone();
        for _ in 0..=rng.below(4) {
            let at = rng.below(input.len() as u64) as usize;
            match rng.below(4) {
                0 => input[at] = rng.next_u64() as u8,
                1 => input[at] = structural[rng.below(structural.len() as u64) as usize],
                2 => input.insert(at, structural[rng.below(structural.len() as u64) as usize]),
                _ => {
                    let end = (at + rng.below(16) as usize + 1).min(input.len() - 1);
                    input.drain(at.min(end)..end);
                }
            }
            if input.is_empty() {
                break;
            }
        }
        feed(&input);
    }
}

#[test]
fn noise() {
    let mut rng = Rng::new(2);
    let structural = b"{}[]\",: \\u0e-.nulltruefalse\x0a\x12\x1a\x2a\x32\x01\x02\x05";
    for round in 0..40_000 {
        let length = rng.below(96);
        let input: Vec<u8> = (0..length)
            .map(|_| match round % 2 {
                0 => rng.next_u64() as u8,
                _ => structural[rng.below(structural.len() as u64) as usize],
            })
            .collect();
        feed(&input);
    }
}
