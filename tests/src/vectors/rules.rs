//! Files that record pure rules: patterns, projects, cluster info, and the kinds that a site takes as they come.

use std::collections::{BTreeMap, BTreeSet};

use agent_core::cluster_info::{self, ClusterInfo, Compression, Counts};
use agent_core::content::{self, Step};
use agent_core::event::{EventType, Type};
use agent_core::glob::{self, Glob};
use agent_core::object::{self, ObjectView, SOURCE_UID};
use agent_core::peer::Mapping;
use agent_core::project::{self, SiteView};
use agent_core::request::Kind;
use agent_core::time::Wall;
use agent_core::transform::{self, HubCopy, Stamp, Strip};
use regex::Regex;
use serde_json::Value;

use super::events::{parse, without_empty};
use super::transform::{
    MAY_DELETE, compare_objects, list, mismatch_policy, objects, place_existing, resource,
};
use super::{Plan, Verdict, equal, hex, text};
use crate::kube::store::{PatchType, Preconditions, Store};

/// Our engine knows fewer constructs than the recorded one, and takes a few for what the recorded one does not.
const DIALECTS: &str = "regular-expression dialects";

pub(super) fn glob_plan(sub: &str) -> Option<Plan> {
    match sub {
        "match" => Some(Plan::Run(one_pattern, &["match", "pattern", "pattern_error", "text"])),
        "list" => Some(Plan::Run(pattern_list, &["match", "list", "text", "panic"])),
        "appproject" => Some(Plan::Run(
            routed,
            &[
                "agent",
                "destinations",
                "source_namespaces",
                "match_destination_mapping",
                "match_namespace_mapping",
            ],
        )),
        "create-pattern" => Some(Plan::Run(create_pattern, &["match", "pattern", "text"])),
        _ => None,
    }
}

pub(super) fn project_plan(sub: &str, case: &Value) -> Option<Plan> {
    match sub {
        "agent-specific" => Some(Plan::Run(
            for_agent,
            &["agent", "mode", "destination_based_mapping", "input", "match", "output_json"],
        )),
        "role-line" => Some(Plan::Run(
            role_line,
            &["application_namespace", "line", "new_project", "old_project", "output", "role"],
        )),
        "prefix" => Some(Plan::Run(prefix, &["agent", "project", "output", "error"])),
        "managed" => Some(content_plan()),
        "principal-autonomous" if is_first_create(case) => {
            Some(Plan::Run(rewritten, super::transform::INBOUND))
        }
        "autonomous" | "principal-autonomous" => Some(Plan::Later("autonomous mode")),
        "principal-managed" => Some(Plan::Later("projects in the core")),
        _ => None,
    }
}

pub(super) fn redis_plan(sub: &str) -> Option<Plan> {
    match sub {
        "cluster-info" => Some(Plan::Run(cluster_info, &["compression", "entries", "server", "published"])),
        "principal-cluster-info" => {
            Some(Plan::Run(principal_cluster_info, &["compression", "server", "steps"]))
        }
        "agent-cluster-info" => Some(Plan::Run(agent_cluster_info, &["entry", "emitted"])),
        "resources-tree" | "managed-resources" | "agent-get" | "agent-subscribe" | "resp" => {
            Some(Plan::Later("Redis proxy"))
        }
        _ => None,
    }
}

fn one_pattern(case: &Value) -> Result<Verdict, String> {
    let (pattern, subject) = (text(case, "pattern"), text(case, "text"));
    let glob = Glob::parse(pattern);
    equal("pattern error", glob.is_err(), case["pattern_error"] == true)?;
    let ours = glob.is_ok_and(|glob| glob.is_match(subject));
    equal("match", Some(ours), case["match"].as_bool())?;
    Ok(Verdict::Passed)
}

fn regex(expression: &str, text: &str) -> bool {
    Regex::new(expression).is_ok_and(|regex| regex.is_match(text))
}

/// Whether an entry is an expression that the two engines may understand differently on `text`.
fn dialects_differ(entry: &str, text: &str) -> bool {
    let special =
        ["(?P<", "\\Q", "[:", "++", "*+", "?+", "\\d", "\\D", "\\w", "\\W", "\\b", "&&", "--", "~~"];
    glob::expression(entry).is_some_and(|expression| {
        Regex::new(expression).is_err()
            || special.iter().any(|construct| expression.contains(construct))
            || expression.contains('$') && text.ends_with('\n')
    })
}

fn pattern_list(case: &Value) -> Result<Verdict, String> {
    let (entries, subject) = (strings(&case["list"])?, text(case, "text"));
    let ours = glob::list_matches(entries.iter().copied(), subject, &regex);
    match case["match"].as_bool() {
        // The recorded process crashes on a single slash.
        None if case["panic"] == true => equal("match", ours, entries.contains(&"/") && subject == "/")?,
        Some(recorded) if recorded == ours => {}
        Some(_) if entries.iter().any(|entry| dialects_differ(entry, subject)) => {
            return Ok(Verdict::Deviation(DIALECTS));
        }
        recorded => return Err(format!("match: {ours} instead of {recorded:?}")),
    }
    Ok(Verdict::Passed)
}

fn create_pattern(case: &Value) -> Result<Verdict, String> {
    equal("match", Some(regex(text(case, "pattern"), text(case, "text"))), case["match"].as_bool())?;
    Ok(Verdict::Passed)
}

fn routed(case: &Value) -> Result<Verdict, String> {
    let spec = serde_json::json!({
        "destinations": case["destinations"],
        "sourceNamespaces": case["source_namespaces"],
    });
    let mut verdict = Verdict::Passed;
    for (mapping, key) in
        [(Mapping::Namespace, "match_namespace_mapping"), (Mapping::Destination, "match_destination_mapping")]
    {
        let agent = text(case, "agent");
        let ours = goes_to(&spec, agent, mapping)?;
        if Some(ours) != case[key].as_bool() {
            let mut entries = strings(&case["source_namespaces"])?.into_iter();
            if mapping == Mapping::Destination || !entries.any(|entry| dialects_differ(entry, agent)) {
                return Err(format!("{key}: {ours} instead of {}", case[key]));
            }
            verdict = Verdict::Deviation(DIALECTS);
        }
    }
    Ok(verdict)
}

fn goes_to(spec: &Value, agent: &str, mapping: Mapping) -> Result<bool, String> {
    project::goes_to(spec.to_string().as_bytes(), agent, mapping, &regex)
        .map_err(|error| format!("{error:?}"))
}

fn mapping(case: &Value) -> Mapping {
    if case["destination_based_mapping"] == true { Mapping::Destination } else { Mapping::Namespace }
}

fn for_agent(case: &Value) -> Result<Verdict, String> {
    let (input, agent, mapping) = (&case["input"], text(case, "agent"), mapping(case));
    equal("match", Some(goes_to(&input["spec"], agent, mapping)?), case["match"].as_bool())?;
    let view = SiteView { mapping, managed: case["mode"] == "managed" };
    let ours = project::for_agent(input.to_string().as_bytes(), agent, view)
        .map_err(|error| format!("{error:?}"))?;
    let recorded = parse(text(case, "output_json").as_bytes())?;
    equal("output", without_empty(&parse(&ours)?), without_empty(&recorded))?;
    Ok(Verdict::Passed)
}

fn role_line(case: &Value) -> Result<Verdict, String> {
    let ours = project::policy(
        text(case, "line"),
        text(case, "old_project"),
        text(case, "new_project"),
        text(case, "role"),
        text(case, "application_namespace"),
    );
    equal("output", &*ours, text(case, "output"))?;
    Ok(Verdict::Passed)
}

fn prefix(case: &Value) -> Result<Verdict, String> {
    let ours = project::hub_name(text(case, "agent"), text(case, "project"));
    let recorded = case["error"].is_null().then(|| text(case, "output").to_owned());
    equal("output", ours, recorded)?;
    Ok(Verdict::Passed)
}

fn compression(case: &Value) -> Result<Compression, String> {
    match text(case, "compression") {
        "gzip" => Ok(Compression::Gzip),
        "none" => Ok(Compression::None),
        other => Err(format!("unknown compression {other:?}")),
    }
}

fn read(entry: &str) -> Result<ClusterInfo<'_>, String> {
    ClusterInfo::parse(entry.as_bytes()).map_err(|error| error.to_string())
}

/// What Argo CD writes: the key is ours to find, and the value one that we read and write alike.
fn cluster_info(case: &Value) -> Result<Verdict, String> {
    let compression = compression(case)?;
    for entry in list(case, "entries") {
        equal("key", cluster_info::key("", text(case, "server"), compression).as_str(), text(entry, "key"))?;
        equal("ttl", Some(cluster_info::TTL.as_secs()), entry["ttl_seconds"].as_u64())?;
        let decoded = text(entry, "decoded_text");
        if compression == Compression::None {
            equal("value", hex(text(entry, "value_hex"))?, decoded.as_bytes().to_vec())?;
        }
        let ours = read(decoded)?.encode();
        equal("read and written", String::from_utf8_lossy(&ours).as_ref(), decoded)?;
    }
    Ok(Verdict::Passed)
}

fn principal_cluster_info(case: &Value) -> Result<Verdict, String> {
    let key = cluster_info::key("", text(case, "server"), compression(case)?);
    let mut entry: Option<Vec<u8>> = None;
    for step in list(case, "steps") {
        let (inputs, what) = (&step["inputs"], text(step, "step"));
        let agent = text(inputs, "agent");
        entry = match (inputs["at"].as_str(), inputs.get("data")) {
            (Some(at), None) => {
                let seconds = at.get(..19).ok_or("not a time")?;
                let connected = match what {
                    "agent connects" => true,
                    "agent disconnects" => false,
                    other => return Err(format!("unknown step {other:?}")),
                };
                Some(cluster_info::connection_entry(agent, connected, &format!("{seconds}Z")))
            }
            (None, Some(data)) => {
                let counts =
                    Counts::decode(data.to_string().as_bytes()).map_err(|error| error.to_string())?;
                let before = entry.filter(|_| !what.ends_with("while no entry exists"));
                let before =
                    before.map_or(Ok(String::new()), String::from_utf8).map_err(|e| e.to_string())?;
                let info = if before.is_empty() { ClusterInfo::default() } else { read(&before)? };
                Some(info.with_counts(counts).encode())
            }
            _ => return Err(format!("unknown step {what:?}")),
        };
        let ours = entry.as_ref().map(|entry| (key.as_str(), String::from_utf8_lossy(entry).into_owned()));
        let recorded = list(step, "entries_after")
            .iter()
            .map(|entry| (text(entry, "key"), text(entry, "decoded_text").to_owned()));
        equal("entries", ours.into_iter().collect::<Vec<_>>(), recorded.collect())?;
    }
    Ok(Verdict::Passed)
}

fn agent_cluster_info(case: &Value) -> Result<Verdict, String> {
    let entry = case["entry"].is_object().then(|| case["entry"].to_string());
    let ours = match &entry {
        Some(entry) => vec![String::from_utf8_lossy(&read(entry)?.counts.encode()).into_owned()],
        None => Vec::new(),
    };
    for event in list(case, "emitted") {
        equal("type", text(event, "type"), Type::ClusterCacheInfoUpdate.as_str())?;
        equal("target", text(event, "target"), agent_core::event::Target::ClusterCacheInfoUpdate.as_str())?;
    }
    let recorded = list(case, "emitted").iter().map(|event| text(event, "data").to_owned()).collect();
    equal("emitted", ours, recorded)?;
    Ok(Verdict::Passed)
}

/// A store with what was there before, and its UIDs by `KIND/NS/NAME`.
fn prepared(case: &Value) -> Result<(Store, BTreeMap<String, String>), String> {
    let mut store = Store::new(7, Wall { epoch_millis_at_zero: 1_767_323_045_000 });
    let uids = place_existing(&mut store, case)?;
    Ok((store, uids))
}

/// Events about projects, repositories and keys on a managed site.
fn taken_as_it_comes(case: &Value) -> Result<Verdict, String> {
    let (mut store, uids) = prepared(case)?;
    let namespace = text(case, "namespace");
    let policy = mismatch_policy(case)?;
    let mut managed: BTreeSet<String> = strings(&case["managed"])?.into_iter().map(str::to_owned).collect();
    let mut verdict = Verdict::Passed;
    let results = list(case, "results");
    equal("number of results", results.len(), list(case, "events").len())?;
    for (event, result) in list(case, "events").iter().zip(results) {
        let kind = match text(event, "kind") {
            "AppProject" => Kind::AppProject,
            "Secret" => Kind::Repository,
            "ConfigMap" => Kind::GpgKey,
            other => return Err(format!("unknown kind {other:?}")),
        };
        let resource = resource(kind.object_kind())?;
        let incoming = event["object"].to_string();
        let name = text(&event["object"]["metadata"], "name");
        let set_key = format!("{}:{name}", text(event, "kind"));
        let current = store.get(resource, namespace, name).ok().map(|object| object.json().to_vec());
        let view = current.as_deref().map(ObjectView::parse).transpose().map_err(|e| e.to_string())?;
        let known = managed.contains(&set_key);
        let step = match EventType::parse(text(event, "type")) {
            EventType::Known(Type::Create | Type::SpecUpdate) => {
                content::exists(kind, view.as_ref(), known, incoming.as_bytes(), namespace, policy)
                    .map_err(|error| format!("{error:?}"))?
            }
            EventType::Known(Type::Delete) => {
                content::gone(view.as_ref(), known, text(&event["object"]["metadata"], "uid"))
            }
            other => return Err(format!("unknown type {other:?}")),
        };
        let refused = step == Step::Refuse;
        let spared = step == Step::Nothing && text(event, "type") == Type::Delete.as_str() && view.is_some();
        let deleted = matches!(step, Step::Delete | Step::Recreate(_));
        if deleted {
            store
                .delete(resource, namespace, name, &Preconditions::default())
                .map_err(|status| status.message)?;
            managed.remove(&set_key);
        }
        match step {
            Step::Create(body) | Step::Recreate(body) => {
                store.create(resource, namespace, parse(&body)?).map_err(|status| status.message)?;
                managed.insert(set_key);
            }
            Step::Patch(patch) => {
                store
                    .patch(resource, namespace, name, PatchType::Json, &patch)
                    .map_err(|status| status.message)?;
                managed.insert(set_key);
            }
            Step::Delete | Step::Nothing | Step::Refuse => {}
        }
        if spared || deleted && !known {
            // Go deletes by its list of names, whatever copy stands there.
            verdict = Verdict::Deviation(MAY_DELETE);
            break;
        }
        equal("refused", refused, is_error(result)?)?;
        compare_objects(objects(&store), list(result, "objects_after"), &uids)?;
    }
    Ok(verdict)
}

/// Whether a case is one `create` of something that is not there.
pub(super) fn is_first_create(case: &Value) -> bool {
    list(case, "existing").is_empty()
        && matches!(list(case, "events"), [event]
            if event["type"] == Type::Create.as_str() && matches!(text(event, "kind"), "Application" | "AppProject"))
}

/// An autonomous agent's object as it stands on the hub. The stamps that the record has on it are not part of the rule.
pub(super) fn rewritten(case: &Value) -> Result<Verdict, String> {
    let (agent, event, result) = (text(case, "agent"), &case["events"][0], &case["results"][0]);
    let incoming = event["object"].to_string();
    let ours = match text(event, "kind") {
        "Application" => transform::on_hub(incoming.as_bytes(), agent, agent),
        _ => project::on_hub(incoming.as_bytes(), agent, text(case, "namespace")),
    };
    equal("an error", ours.is_err(), is_error(result)?)?;
    let (Ok(ours), [recorded]) = (ours, list(result, "objects_after")) else {
        equal("objects", list(result, "objects_after").len(), 0)?;
        return Ok(Verdict::Passed);
    };
    // A new copy starts without the operation.
    let strip = Strip { operation: true, ..Strip::default() };
    let ours = transform::payload(&ours, strip, None).map_err(|error| format!("{error:?}"))?;
    let (mut ours, mut recorded) = (parse(&ours)?, recorded.clone());
    for object in [&mut ours, &mut recorded] {
        for key in ["apiVersion", "kind"] {
            object.as_object_mut().ok_or("not an object")?.remove(key);
        }
        let metadata = object["metadata"].as_object_mut().ok_or("no metadata")?;
        // What the API server makes.
        for key in ["uid", "resourceVersion", "generation", "creationTimestamp"] {
            metadata.remove(key);
        }
        if let Some(annotations) = metadata.get_mut("annotations").and_then(Value::as_object_mut) {
            annotations.remove(SOURCE_UID);
            annotations.remove("argocd-agent.argoproj-labs.io/last-updated");
            annotations.remove("argocd-agent.argoproj.io/last-updated");
            annotations.remove(object::LAST_APPLIED);
        }
        // What the schema demands of a status.
        if let Some(sync) = object["status"]["sync"].as_object_mut() {
            sync.remove("comparedTo");
        }
    }
    equal("object", without_empty(&ours), without_empty(&recorded))?;
    Ok(Verdict::Passed)
}

pub(super) fn content_plan() -> Plan {
    Plan::Run(taken_as_it_comes, super::transform::INBOUND)
}

/// Events about Applications of a site with destination mapping.
pub(super) fn destination_mapping(case: &Value) -> Result<Verdict, String> {
    let (mut store, uids) = prepared(case)?;
    let application = resource("Application")?;
    let results = list(case, "results");
    equal("number of results", results.len(), list(case, "events").len())?;
    for (event, result) in list(case, "events").iter().zip(results) {
        let r#type = EventType::parse(text(event, "type"));
        let outcome = match text(case, "role") {
            "agent" => site_word(case, event, &r#type, &mut store),
            _ => hub_word(case, event, &r#type, &mut store),
        };
        equal("an error", outcome?, is_error(result)?)?;
        compare_objects(objects(&store), list(result, "objects_after"), &uids)?;
    }
    equal("only Applications", objects(&store).len(), store.iter(application).count())?;
    Ok(Verdict::Passed)
}

/// A word of the hub on the site; whether it is refused.
fn site_word(case: &Value, event: &Value, r#type: &EventType<'_>, store: &mut Store) -> Result<bool, String> {
    if !matches!(r#type, EventType::Known(Type::Create | Type::SpecUpdate)) {
        return Err(format!("unknown type {type:?}"));
    }
    let malformed = |error: transform::Malformed| format!("{error:?}");
    let incoming = event["object"].to_string().into_bytes();
    let metadata = &event["object"]["metadata"];
    let own = text(case, "namespace");
    let (namespace, remapped) = transform::site_namespace(
        mapping(case),
        text(metadata, "namespace"),
        text(case, "principal_namespace"),
        own,
    );
    let allowed = strings(&case["allowed_namespaces"])?;
    if !glob::list_matches(std::iter::once(own).chain(allowed), namespace, &regex) {
        return Ok(true);
    }
    let incoming = if remapped { transform::remapped(&incoming).map_err(malformed)? } else { incoming };
    let view = ObjectView::parse(&incoming).map_err(|error| error.to_string())?;
    let stamp = Stamp { source_uid: &view.uid, principal_uid: text(event, "principaluid") };
    let application = resource("Application")?;
    match store.get(application, namespace, &view.name) {
        Err(_) => {
            let body =
                transform::create_body(&incoming, "argoproj.io/v1alpha1", "Application", namespace, stamp);
            store
                .create(application, namespace, parse(&body.map_err(malformed)?)?)
                .map_err(|status| status.message)?;
        }
        Ok(existing) => {
            let existing = ObjectView::parse(existing.json()).map_err(|error| error.to_string())?;
            let spec = transform::site_spec(view.spec.unwrap_or(b"{}")).map_err(malformed)?;
            let patch = transform::update_patch(&existing, &view, &spec, stamp).map_err(malformed)?;
            if let Some(patch) = patch {
                store
                    .patch(application, namespace, &view.name, PatchType::Json, &patch)
                    .map_err(|status| status.message)?;
            }
        }
    }
    Ok(false)
}

/// A word of the site on the hub; whether it is refused.
fn hub_word(case: &Value, event: &Value, r#type: &EventType<'_>, store: &mut Store) -> Result<bool, String> {
    if !matches!(r#type, EventType::Known(Type::StatusUpdate)) {
        return Err(format!("unknown type {type:?}"));
    }
    let incoming = event["object"].to_string();
    let view = ObjectView::parse(incoming.as_bytes()).map_err(|error| error.to_string())?;
    let namespace = transform::hub_namespace(
        &view.namespace,
        view.annotation(object::NAMESPACE_REMAPPED).is_some(),
        text(case, "agent_namespace"),
        text(case, "namespace"),
    );
    let application = resource("Application")?;
    let Ok(existing) = store.get(application, namespace, &view.name) else { return Ok(true) };
    let existing = ObjectView::parse(existing.json()).map_err(|error| error.to_string())?;
    let hub = HubCopy {
        resource_version: &existing.resource_version,
        has_status: existing.status.is_some(),
        has_operation: existing.operation.is_some(),
        has_annotations: existing.annotations.is_some(),
        has_refresh: existing.refresh().is_some(),
    };
    let refresh = view.refresh();
    let patch = transform::status_patch(hub, view.status, view.operation, refresh.as_deref(), false, false);
    store
        .patch(application, namespace, &view.name, PatchType::Json, &patch)
        .map_err(|status| status.message)?;
    Ok(false)
}

/// Whether the recorded side refused the event.
fn is_error(result: &Value) -> Result<bool, String> {
    match text(result, "class") {
        "ok" => Ok(false),
        "error" => Ok(true),
        other => Err(format!("unknown class {other:?}")),
    }
}

/// A list of texts; `null` is empty.
fn strings(list: &Value) -> Result<Vec<&str>, String> {
    let items = list.as_array().map_or(&[][..], Vec::as_slice);
    items.iter().map(|item| item.as_str().ok_or_else(|| format!("{item} is no text"))).collect()
}
