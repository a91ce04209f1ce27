//! `events`: CloudEvents on the wire.

use agent_core::cloudevent::{EventView, EventWriter};
use agent_core::cluster_info::Counts;
use agent_core::event::{
    self, ErrorBody, EventType, RESOURCE_RESYNC_BODY, RequestUpdate, SyncedResource, SyncedResourceList,
    Target, Type,
};
use agent_core::object::ObjectView;
use prost::Message as _;
use proto::cloudevents::cloud_event::Data;
use proto::cloudevents::cloud_event_attribute_value::Attr;
use serde_json::{Map, Value};

use super::{Plan, Verdict, equal, hex, text};

const KEYS: &[&str] = &["direction", "inputs", "event", "wire_hex", "received", "payload", "attributes"];

/// Our ids of object events have a fourth part, from the content.
const FOURTH_PART: &str = "fourth part of event ids";

pub(super) fn plan(sub: &str) -> Option<Plan> {
    match sub {
        "application" | "appproject" | "repository" | "gpgkey" | "applicationset" => {
            Some(Plan::Run(object, KEYS))
        }
        "error" | "heartbeat" | "resync" | "cluster-cache-info" => Some(Plan::Run(control, KEYS)),
        "decode" => Some(Plan::Run(received, KEYS)),
        "resource-request" | "resource-response" => Some(Plan::Later("live resources")),
        "redis-request" | "redis-response" => Some(Plan::Later("Redis proxy")),
        "container-log" => Some(Plan::Later("container logs")),
        "terminal" => Some(Plan::Later("web terminal")),
        _ => None,
    }
}

/// An event about a Kubernetes object.
fn object(case: &Value) -> Result<Verdict, String> {
    let inputs = &case["inputs"];
    known(inputs, &["source", "type", "object", "principaluid", "sentat"])?;
    let body = text(inputs, "object");
    let view = ObjectView::parse(body.as_bytes()).map_err(|error| error.to_string())?;
    let recorded_id = attribute(case, "eventid");
    let ours = if view.resource_version.is_empty() {
        event::synthetic_event_id(&view.name, &view.uid)
    } else {
        event::event_id(&view.name, &view.uid, &view.resource_version, body.as_bytes())
    };
    let verdict = if ours == recorded_id {
        Verdict::Passed
    } else {
        let hash = ours.strip_prefix(recorded_id).and_then(|rest| rest.strip_prefix('_'));
        let is_hash = |hash: &str| hash.len() == 8 && hash.bytes().all(|byte| byte.is_ascii_hexdigit());
        if !hash.is_some_and(is_hash) {
            return Err(format!("event id {ours:?} instead of {recorded_id:?}"));
        }
        Verdict::Deviation(FOURTH_PART)
    };
    equal("synthetic", event::is_synthetic(&ours), event::is_synthetic(recorded_id))?;
    sent(
        case,
        &EventWriter {
            source: text(inputs, "source"),
            r#type: text(inputs, "type"),
            target: target(case)?,
            subject: Some((&view.namespace, &view.name)),
            event_id: recorded_id,
            resource_id: &event::resource_id(&view.name, &view.uid),
            sent_at: inputs["sentat"].as_str(),
            principal_uid: inputs["principaluid"].as_str(),
            data: body.as_bytes(),
        },
    )?;
    received(case)?;
    Ok(verdict)
}

/// An event with a body of the protocol's own, or with none.
fn control(case: &Value) -> Result<Verdict, String> {
    let inputs = &case["inputs"];
    known(inputs, &["source", "type", "data", "name", "namespace", "uid", "kind", "checksum_hex"])?;
    let r#type = match text(case, "sub") {
        "error" => Type::Error.as_str(),
        "cluster-cache-info" => Type::ClusterCacheInfoUpdate.as_str(),
        _ => text(inputs, "type"),
    };
    let checksum = inputs["checksum_hex"].as_str().map(hex).transpose()?;
    let resource = SyncedResource {
        name: text(inputs, "name").into(),
        namespace: text(inputs, "namespace").into(),
        uid: text(inputs, "uid").into(),
        kind: text(inputs, "kind").into(),
    };
    let body = match EventType::parse(r#type) {
        EventType::Known(Type::Ping) => Vec::new(),
        EventType::Known(Type::Error) => ErrorBody {
            resource_name: text(&inputs["data"], "resourceName").into(),
            resource_namespace: text(&inputs["data"], "resourceNamespace").into(),
            message: text(&inputs["data"], "message").into(),
        }
        .encode(),
        EventType::Known(Type::ClusterCacheInfoUpdate) => {
            let counts =
                Counts::decode(text(inputs, "data").as_bytes()).map_err(|error| error.to_string())?;
            counts.encode()
        }
        EventType::Known(Type::RequestSyncedResourceList) => SyncedResourceList { checksum }.encode(),
        EventType::Known(Type::ResponseSyncedResource) => resource.encode(),
        EventType::Known(Type::RequestUpdate) => RequestUpdate { resource, checksum }.encode(),
        EventType::Known(Type::RequestResourceResync) => RESOURCE_RESYNC_BODY.to_vec(),
        other => return Err(format!("unknown type {other:?}")),
    };
    sent(
        case,
        &EventWriter {
            source: text(inputs, "source"),
            r#type,
            target: target(case)?,
            subject: None,
            // Drawn by the recorded constructor.
            event_id: attribute(case, "eventid"),
            resource_id: attribute(case, "resourceid"),
            sent_at: None,
            principal_uid: None,
            data: &body,
        },
    )?;
    received(case)
}

/// Compares what we send with the record.
fn sent(case: &Value, writer: &EventWriter<'_>) -> Result<(), String> {
    let mut message = Vec::new();
    writer.encode(&mut message);
    let (ours, data) = describe(&message)?;
    let recorded = &case["event"];
    known(recorded, &["id", "source", "spec_version", "type", "attributes", "data_field", "data_text"])?;
    for key in ["id", "source", "spec_version", "type", "attributes", "data_field"] {
        equal(key, &ours[key], &recorded[key])?;
    }
    let recorded_data = text(recorded, "data_text");
    if recorded_data.is_empty() || data.is_empty() {
        return equal("payload", String::from_utf8_lossy(&data).as_ref(), recorded_data);
    }
    let (ours, recorded) = (parse(&data)?, parse(recorded_data.as_bytes())?);
    if writer.subject.is_none() {
        // A body of the protocol's own, not an object that a typed encoder filled up.
        return equal("payload", ours, recorded);
    }
    equal("payload", without_empty(&ours), without_empty(&recorded))
}

/// Decodes the recorded message and compares what we make of it, and our acknowledgement.
fn received(case: &Value) -> Result<Verdict, String> {
    let message = hex(text(case, "wire_hex"))?;
    let recorded = &case["received"];
    let outcome = EventView::decode(&message);
    match recorded["from_wire_error"].as_str() {
        Some("conversion error") => {
            return match outcome {
                Err(_) => Ok(Verdict::Passed),
                Ok(view) => Err(format!("{view:?} instead of a conversion error")),
            };
        }
        Some("unknown target") => {
            let view = outcome.map_err(|error| error.to_string())?;
            equal("target", view.target(), None)?;
            return Ok(Verdict::Passed);
        }
        Some(other) => return Err(format!("unknown class of error {other:?}")),
        None => {}
    }
    let view = outcome.map_err(|error| error.to_string())?;
    known(
        recorded,
        &["target", "type", "resource_id", "event_id", "extensions", "sent_at", "principal_uid", "ack"],
    )?;
    equal("target", view.target().map(Target::as_str), recorded["target"].as_str())?;
    equal("type", view.event_type().as_str(), text(recorded, "type"))?;
    equal("resource id", view.resource_id, text(recorded, "resource_id"))?;
    equal("event id", view.event_id, text(recorded, "event_id"))?;
    equal("principal uid", view.principal_uid, text(recorded, "principal_uid"))?;
    let extensions: Map<String, Value> = recorded["extensions"].as_object().cloned().unwrap_or_default();
    let mut names: Vec<&str> = extensions.keys().map(String::as_str).collect();
    names.sort_unstable();
    equal("extensions", view.extension_names().collect(), names)?;
    match recorded["sent_at"].as_str() {
        Some(time) => equal("sentat", view.sent_at, time)?,
        // Absent, or no time at all; nothing reads it then.
        None => equal("sentat", looks_like_a_time(view.sent_at), false)?,
    }

    let ack = view.ack(text(&recorded["ack"], "source"));
    let (ours, data) = describe(&ack)?;
    for key in ["id", "source", "spec_version", "type", "attributes", "data_field"] {
        equal(&format!("ack {key}"), &ours[key], &recorded["ack"]["event"][key])?;
    }
    equal("ack payload", data, Vec::new())?;
    equal("ack bytes", describe(&hex(text(&recorded["ack"], "wire_hex"))?)?.0, ours)?;

    payload(&view, &case["payload"])?;
    Ok(Verdict::Passed)
}

/// Compares the payload as a receiver reads it.
fn payload(view: &EventView<'_>, recorded: &Value) -> Result<(), String> {
    known(recorded, &["decoded_json", "error", "note"])?;
    if recorded["note"].is_string() {
        return Ok(());
    }
    let ours = read_payload(view);
    let decoded = match (ours, recorded["error"].as_str()) {
        (Err(_), Some(_)) => return Ok(()),
        (Err(error), None) => return Err(format!("payload: {error}")),
        (Ok(decoded), Some(_)) => return Err(format!("payload {decoded} instead of an error")),
        (Ok(decoded), None) => decoded,
    };
    let recorded = parse(text(recorded, "decoded_json").as_bytes())?;
    // What the recorded receiver does not know it drops: ours may have more, never less.
    match missing(&without_empty(&recorded), &without_empty(&decoded)) {
        None => Ok(()),
        Some(path) => Err(format!("payload: {path} of {recorded} is not in {decoded}")),
    }
}

/// The payload as our reader for its target sees it, as JSON.
fn read_payload(view: &EventView<'_>) -> Result<Value, String> {
    let data = view.payload().map_err(|error| error.to_string())?;
    if data.is_empty() {
        return Ok(Value::Object(Map::new()));
    }
    let body = |error: event::BodyError| error.to_string();
    match (view.target(), view.event_type()) {
        (Some(Target::ResourceResync), EventType::Known(Type::RequestSyncedResourceList)) => {
            parse(&SyncedResourceList::decode(data).map_err(body)?.encode())
        }
        (Some(Target::ResourceResync), EventType::Known(Type::ResponseSyncedResource)) => {
            parse(&SyncedResource::decode(data).map_err(body)?.encode())
        }
        (Some(Target::ResourceResync), EventType::Known(Type::RequestUpdate)) => {
            parse(&RequestUpdate::decode(data).map_err(body)?.encode())
        }
        // Recorded through the reader of Applications, which finds nothing it knows.
        (_, EventType::Known(Type::Error)) => parse(&ErrorBody::decode(data).map_err(body)?.encode()),
        (Some(Target::ResourceResync), _) => parse(data),
        _ => {
            let object = ObjectView::parse(data).map_err(|error| error.to_string())?;
            let mut value = parse(data)?;
            // What the view reads comes from the view: it merges repeated parts.
            let raw = |part: Option<&[u8]>| part.map_or(Ok(Value::Null), parse);
            for (key, part) in [
                ("spec", raw(object.spec)?),
                ("status", raw(object.status)?),
                ("operation", raw(object.operation)?),
                ("data", raw(object.data)?),
            ] {
                value[key] = part;
            }
            if !value["metadata"].is_object() {
                value["metadata"] = Value::Object(Map::new());
            }
            for (key, part) in [
                ("name", &object.name),
                ("namespace", &object.namespace),
                ("uid", &object.uid),
                ("resourceVersion", &object.resource_version),
            ] {
                value["metadata"][key] = Value::String(part.to_string());
            }
            for (key, part) in [
                ("annotations", raw(object.annotations)?),
                ("labels", raw(object.labels)?),
                ("finalizers", raw(object.finalizers)?),
                ("ownerReferences", raw(object.owner_references)?),
            ] {
                value["metadata"][key] = part;
            }
            Ok(value)
        }
    }
}

/// The message in the terms of the files, read by the generated code, and the payload's bytes.
fn describe(message: &[u8]) -> Result<(Value, Vec<u8>), String> {
    let event = proto::eventstream::Event::decode(message)
        .map_err(|error| error.to_string())?
        .event
        .ok_or("no event in the message")?;
    let attributes: Map<String, Value> = event
        .attributes
        .into_iter()
        .map(|(name, value)| {
            let value = match value.attr {
                None => Value::Null,
                Some(Attr::CeBoolean(value)) => serde_json::json!({ "ce_boolean": value }),
                Some(Attr::CeInteger(value)) => serde_json::json!({ "ce_integer": value }),
                Some(Attr::CeString(value)) => serde_json::json!({ "ce_string": value }),
                Some(Attr::CeBytes(value)) => serde_json::json!({ "ce_bytes_hex": super::to_hex(&value) }),
                Some(Attr::CeUri(value)) => serde_json::json!({ "ce_uri": value }),
                Some(Attr::CeUriRef(value)) => serde_json::json!({ "ce_uri_ref": value }),
                Some(Attr::CeTimestamp(value)) => {
                    serde_json::json!({ "ce_timestamp": timestamp(value.seconds, value.nanos) })
                }
            };
            (name, value)
        })
        .collect();
    let (field, data) = match event.data {
        None => ("", Vec::new()),
        Some(Data::BinaryData(data)) => ("binary_data", data),
        Some(Data::TextData(text)) => ("text_data", text.into_bytes()),
        Some(Data::ProtoData(any)) => ("proto_data", any.value),
    };
    let description = serde_json::json!({
        "id": event.id,
        "source": event.source,
        "spec_version": event.spec_version,
        "type": event.r#type,
        "attributes": attributes,
        "data_field": field,
    });
    Ok((description, data))
}

fn timestamp(seconds: i64, nanos: i32) -> String {
    use agent_core::time::{Instant, Wall};
    let millis = u64::try_from(seconds).unwrap_or_default() * 1000;
    let whole = Wall { epoch_millis_at_zero: millis }.rfc3339(Instant::ZERO);
    if nanos == 0 {
        return whole;
    }
    let fraction = format!("{nanos:09}");
    format!("{}.{}Z", whole.trim_end_matches('Z'), fraction.trim_end_matches('0'))
}

fn looks_like_a_time(text: &str) -> bool {
    let bytes = text.as_bytes();
    bytes.len() >= 20
        && bytes[..19].iter().zip(b"0000-00-00T00:00:00").all(|(byte, shape)| match shape {
            b'0' => byte.is_ascii_digit(),
            shape => byte == shape,
        })
        && (text.ends_with('Z') || bytes[bytes.len() - 3] == b':')
}

fn target(case: &Value) -> Result<Target, String> {
    let word = case["event"]["attributes"]["dataschema"]["ce_uri"].as_str().unwrap_or_default();
    Target::parse(word).ok_or_else(|| format!("unknown target {word:?}"))
}

fn attribute<'v>(case: &'v Value, name: &str) -> &'v str {
    case["event"]["attributes"][name]["ce_string"].as_str().unwrap_or_default()
}

fn known(value: &Value, keys: &[&str]) -> Result<(), String> {
    match value.as_object().into_iter().flat_map(Map::keys).find(|key| !keys.contains(&key.as_str())) {
        Some(key) => Err(format!("unknown key {key:?}")),
        None => Ok(()),
    }
}

pub(super) fn parse(text: &[u8]) -> Result<Value, String> {
    serde_json::from_slice(text).map_err(|error| error.to_string())
}

/// `value` without `null`, empty strings and what holds nothing else: typed encoders add such parts.
pub(crate) fn without_empty(value: &Value) -> Value {
    match value {
        Value::Object(members) => Value::Object(
            members
                .iter()
                .map(|(key, member)| (key.clone(), without_empty(member)))
                .filter(|(_, member)| !is_empty(member))
                .collect(),
        ),
        Value::Array(elements) => Value::Array(elements.iter().map(without_empty).collect()),
        other => other.clone(),
    }
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Object(members) => members.is_empty(),
        Value::Array(elements) => elements.is_empty(),
        Value::Bool(_) | Value::Number(_) => false,
    }
}

/// The path of something in `part` that `whole` does not have. Case of keys does not count.
fn missing(part: &Value, whole: &Value) -> Option<String> {
    match (part, whole) {
        (Value::Object(part), Value::Object(whole)) => part.iter().find_map(|(key, value)| {
            let found = whole.iter().find(|(candidate, _)| candidate.eq_ignore_ascii_case(key));
            match found {
                None => Some(format!("/{key}")),
                Some((_, found)) => missing(value, found).map(|path| format!("/{key}{path}")),
            }
        }),
        (part, whole) if part == whole => None,
        _ => Some(String::new()),
    }
}
