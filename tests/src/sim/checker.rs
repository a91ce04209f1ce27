//! What must always hold, and what must hold once everything is healed.

use std::collections::{BTreeMap, BTreeSet};

use agent_core::request::Kind;
use agent_core::time::Instant;
use serde_json::Value;

use super::half::{Lapse, Until};
use super::model::Version;
use super::scenario::{Pairing, Side};
use super::{AGENT, EDGE_NAMESPACE, PRINCIPAL_UID, content};
use crate::controller::REFRESH;
use crate::kube::Resource;
use crate::kube::store::{Store, Watch, WatchOptions, WatchType};
use crate::vectors::events::without_empty;

/// A rule that did not hold.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Violation {
    /// The rule, for comparing.
    pub rule: &'static str,
    pub text: String,
}

impl Violation {
    pub(super) fn new(rule: &'static str, text: impl Into<String>) -> Self {
        Self { rule, text: text.into() }
    }
}

/// Looks at both stores, never at the halves.
#[derive(Debug)]
pub(super) struct Checker {
    watches: [Watch; 2],
    /// UIDs of hub objects that a user deleted, or that are gone.
    deleted: BTreeSet<String>,
    operations: BTreeMap<u64, Operation>,
    refreshes: Vec<Refresh>,
    /// Last operation id seen on each edge object, by UID.
    edge_operations: BTreeMap<String, u64>,
    /// Source UID that each edge object last bore, by its own UID: a local user may take the mark away.
    origins: BTreeMap<String, String>,
    /// When the last thing happened that excuses a repeated operation.
    excuse: Option<Instant>,
    /// When a copy of this name went away: what it carried moves on to the next copy.
    gone: BTreeMap<String, Instant>,
    /// Objects of the site's own, with their spec.
    locals: BTreeMap<String, Value>,
    /// Names of which the site's API server refused a write: what was asked there may be given up, visibly.
    refused: BTreeMap<String, Instant>,
    /// Copies that had lost their mark of origin when the agent stopped: nothing tells them from the site's own.
    estranged: BTreeSet<String>,
    /// Names about which a frame was acknowledged and not carried out, or only half: no digest knows labels, annotations and finalizers.
    swallowed: BTreeSet<String>,
    /// Projects, repositories and keys.
    ledger: content::Ledger,
    pairing: Pairing,
    /// Where the hub keeps the agent's Applications.
    hub_namespace: &'static str,
    /// What the foreign half lost, by object, with what mends it.
    lapses: BTreeMap<(Resource, String), BTreeSet<(Until, &'static str)>>,
}

#[derive(Debug)]
struct Operation {
    hub_uid: String,
    name: String,
    set: Instant,
    reached: u32,
    /// The foreign half could not take it when it was asked for, or lost it since.
    lapsed: bool,
}

#[derive(Debug)]
struct Refresh {
    hub_uid: String,
    name: String,
    set: Instant,
    reached: bool,
}

impl Checker {
    pub(super) fn new(pairing: Pairing, hub_namespace: &'static str, hub: &Store, edge: &Store) -> Self {
        let open = |store: &Store| {
            let options =
                WatchOptions { resource_version: store.revision().to_string(), ..WatchOptions::default() };
            match store.watch(Resource::Application, None, &options) {
                Ok(watch) => watch,
                Err(status) => unreachable!("the present revision can be watched: {}", status.message),
            }
        };
        Self {
            watches: [open(hub), open(edge)],
            deleted: BTreeSet::new(),
            operations: BTreeMap::new(),
            refreshes: Vec::new(),
            edge_operations: BTreeMap::new(),
            origins: BTreeMap::new(),
            excuse: None,
            gone: BTreeMap::new(),
            locals: BTreeMap::new(),
            refused: BTreeMap::new(),
            estranged: BTreeSet::new(),
            swallowed: BTreeSet::new(),
            ledger: content::Ledger::default(),
            pairing,
            hub_namespace,
            lapses: BTreeMap::new(),
        }
    }

    pub(super) fn operation_set(&mut self, now: Instant, id: u64, hub_uid: &str, name: &str) {
        let operation = Operation {
            hub_uid: hub_uid.to_owned(),
            name: name.to_owned(),
            set: now,
            reached: 0,
            lapsed: self.is_excused(Resource::Application, name),
        };
        self.operations.insert(id, operation);
    }

    pub(super) fn refresh_set(&mut self, now: Instant, hub_uid: &str, name: &str) {
        let (hub_uid, name) = (hub_uid.to_owned(), name.to_owned());
        self.refreshes.push(Refresh { hub_uid, name, set: now, reached: false });
    }

    pub(super) fn local_created(&mut self, name: &str, spec: &Value) {
        self.locals.insert(name.to_owned(), spec.clone());
    }

    /// The site's user gave it up, or it was adopted.
    pub(super) fn local_gone(&mut self, name: &str) {
        self.locals.remove(name);
    }

    /// Something happened after which an operation may arrive twice.
    pub(super) fn excuse_repetition(&mut self, now: Instant) {
        self.excuse = Some(now);
    }

    /// The agent stops, and forgets which unmarked objects were copies.
    pub(super) fn agent_gone(&mut self, edge: &Store) {
        let unmarked = |name: &str, value: &Value| {
            value["metadata"]["annotations"][SOURCE_UID].is_null() && !self.locals.contains_key(name)
        };
        let names: Vec<String> = edge
            .iter(Resource::Application)
            .filter(|object| unmarked(object.name(), object.value()))
            .map(|object| object.name().to_owned())
            .collect();
        self.estranged.extend(names);
    }

    /// The foreign half lost something by a rule of its own.
    pub(super) fn lapsed(&mut self, lapse: &Lapse) {
        for operation in self.operations.values_mut() {
            operation.lapsed |= lapse.kind == Kind::Application && operation.name == lapse.name;
        }
        match lapse.until {
            Until::Now => return,
            Until::Edit => {
                self.swallowed.insert(lapse.name.clone());
                return;
            }
            Until::Round | Until::Restart | Until::Never => {}
        }
        let key = (Resource::from(lapse.kind), lapse.name.clone());
        self.lapses.entry(key).or_default().insert((lapse.until, lapse.rule));
    }

    /// A half starts again, and compares everything.
    pub(super) fn restarts(&mut self, side: Side) {
        self.mended(if self.pairing.foreign() == Some(side) { Until::Restart } else { Until::Round });
    }

    /// Our half compares everything.
    pub(super) fn compared(&mut self) {
        self.mended(Until::Round);
    }

    fn mended(&mut self, mended: Until) {
        for lapses in self.lapses.values_mut() {
            lapses.retain(|(until, _)| *until > mended);
        }
        self.lapses.retain(|_, lapses| !lapses.is_empty());
    }

    /// Whether something waits for this.
    pub(super) fn has_lapses(&self, until: Until) -> bool {
        self.lapses.values().flatten().any(|(of, _)| *of == until)
    }

    /// Whether nothing can be expected of this object until what its foreign half lost is mended.
    pub(super) fn is_excused(&self, resource: Resource, name: &str) -> bool {
        self.lapses.contains_key(&(resource, name.to_owned()))
    }

    /// A frame about this name was acknowledged and not carried out.
    pub(super) fn swallowed(&mut self, kind: Kind, name: String) {
        self.swallowed.insert(name.clone());
        if self.pairing != Pairing::OursOurs {
            // Between our halves the next round is near; with one of the reference it comes once a day.
            self.lapsed(&Lapse { kind, name, rule: "swallowed", until: Until::Round });
        }
    }

    /// The site's API server refuses a write to this object.
    pub(super) fn refused(&mut self, now: Instant, name: &str) {
        self.refused.insert(name.to_owned(), now);
    }

    fn may_be_given_up(&self, hub_uid: &str, name: &str, asked: Instant) -> bool {
        self.deleted.contains(hub_uid)
            || self.estranged.contains(name)
            || self.refused.get(name).is_some_and(|at| *at >= asked)
    }

    /// Takes in what changed in a store. How often operations and refreshes arrived new is counted in `arrived`.
    pub(super) fn follow(
        &mut self,
        now: Instant,
        side: Side,
        store: &Store,
        arrived: &mut u64,
    ) -> Result<(), Violation> {
        while let Some(event) = store.next_event(&mut self.watches[side.index()]) {
            let object = event.object.value();
            match (side, event.r#type) {
                (Side::Hub, WatchType::Deleted) => {
                    self.deleted.insert(event.object.uid().to_owned());
                }
                // One that is another agent's for a while is gone for this one.
                (Side::Hub, _) if event.object.is_terminating() || is_away(object) => {
                    self.deleted.insert(event.object.uid().to_owned());
                }
                (Side::Edge, WatchType::Added | WatchType::Modified) => {
                    self.edge_changed(event.object.uid(), object, arrived)?;
                }
                (Side::Edge, WatchType::Deleted) => {
                    self.edge_operations.remove(event.object.uid());
                    self.estranged.remove(event.object.name());
                    self.gone.insert(event.object.name().to_owned(), now);
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn edge_changed(&mut self, uid: &str, object: &Value, arrived: &mut u64) -> Result<(), Violation> {
        let annotations = &object["metadata"]["annotations"];
        if let Pairing::OursModel(version) = self.pairing
            && annotations[SOURCE_UID].is_null()
            && self.origins.contains_key(uid)
        {
            // The reference puts no mark back; a later `create` adopts the copy, to v0.9.0 it is the site's own for ever.
            let until = if version == Version::Head { Until::Round } else { Until::Never };
            let name = object["metadata"]["name"].as_str().unwrap_or_default().to_owned();
            self.lapsed(&Lapse { kind: Kind::Application, name, rule: "unmarked", until });
        }
        if let Some(source_uid) = annotations[SOURCE_UID].as_str() {
            self.origins.insert(uid.to_owned(), source_uid.to_owned());
            // Whatever it was, it is the hub's now.
            let name = object["metadata"]["name"].as_str().unwrap_or_default();
            self.locals.remove(name);
            self.estranged.remove(name);
        }
        if annotations[REFRESH].is_string() {
            for refresh in &mut self.refreshes {
                refresh.reached |= annotations[SOURCE_UID] == refresh.hub_uid.as_str();
            }
        }
        let Some(id) = operation_id(object) else {
            self.edge_operations.remove(uid);
            return Ok(());
        };
        if self.edge_operations.insert(uid.to_owned(), id) == Some(id) {
            return Ok(());
        }
        *arrived += 1;
        let Some(operation) = self.operations.get_mut(&id) else { return Ok(()) };
        operation.reached += 1;
        let excused = self
            .excuse
            .into_iter()
            .chain(self.gone.get(&operation.name).copied())
            .any(|at| at >= operation.set);
        if operation.reached > 1 && !excused && self.pairing == Pairing::OursOurs {
            return Err(Violation::new(
                "operation-once",
                format!(
                    "operation {id} of {} was set {} times on the site",
                    operation.name, operation.reached
                ),
            ));
        }
        Ok(())
    }

    /// The hub's projects, repositories and keys may have changed. How many were withdrawn from the site is returned.
    pub(super) fn follow_content(&mut self, hub: &Store) -> u64 {
        self.ledger.follow(hub)
    }

    /// A half is about to delete: is there a ground?
    pub(super) fn delete(&self, side: Side, resource: Resource, object: &Value) -> Result<(), Violation> {
        let name = object["metadata"]["name"].as_str().unwrap_or_default();
        if side == Side::Hub {
            return Err(Violation::new("delete-on-hub", format!("the principal deletes {name}")));
        }
        if resource != Resource::Application {
            return self.ledger.delete(object);
        }
        let uid = object["metadata"]["uid"].as_str().unwrap_or_default();
        let Some(source_uid) = self.origins.get(uid) else {
            return Err(Violation::new("delete-without-ground", format!("{name} is the site's own")));
        };
        if self.deleted.contains(source_uid) {
            return Ok(());
        }
        Err(Violation::new(
            "delete-without-ground",
            format!("{name}: nobody deleted {source_uid} on the hub"),
        ))
    }

    /// A foreign half deletes what it was told to.
    pub(super) fn delete_by_model(
        &self,
        side: Side,
        resource: Resource,
        object: &Value,
    ) -> Result<(), Violation> {
        if side == Side::Hub || (resource != Resource::Application && self.ledger.is_mismarked(object)) {
            // What the reference brings back it may mark with the UID that it had here.
            return Ok(());
        }
        self.delete(side, resource, object)
    }

    /// Whether the copy of `source_uid` may go.
    pub(super) fn is_deleted(&self, source_uid: &str) -> bool {
        self.deleted.contains(source_uid) || self.ledger.is_withdrawn(source_uid)
    }

    /// What differs between the sides; `None` when they agree.
    pub(super) fn difference(&self, hub: &Store, edge: &Store) -> Option<String> {
        let is_excused = |resource, name: &str| self.is_excused(resource, name);
        if let Some(difference) =
            content::difference(hub, edge, self.hub_namespace != AGENT, &self.swallowed, is_excused)
        {
            return Some(difference);
        }
        for object in hub.iter(Resource::Application) {
            let name = object.name();
            if self.estranged.contains(name) || is_excused(Resource::Application, name) {
                continue;
            }
            let copy = edge.get(Resource::Application, EDGE_NAMESPACE, name);
            if is_away(object.value()) {
                let source = |copy: &Value| copy["metadata"]["annotations"][SOURCE_UID] == object.uid();
                if copy.is_ok_and(|copy| source(copy.value())) {
                    return Some(format!("{name} is another agent's and on the site still"));
                }
                continue;
            }
            let Ok(copy) = copy else {
                return Some(format!("{name} is not on the site"));
            };
            let with_metadata = !self.swallowed.contains(name);
            if let Some(difference) = self.differs(object.value(), copy.value(), with_metadata) {
                return Some(format!("{name}: {difference}"));
            }
        }
        for object in edge.iter(Resource::Application) {
            let name = object.name();
            if is_excused(Resource::Application, name) {
                continue;
            }
            match object.value()["metadata"]["annotations"][SOURCE_UID].as_str() {
                Some(_) if hub.get(Resource::Application, self.hub_namespace, name).is_ok() => {}
                Some(source_uid) => return Some(format!("{name} from {source_uid} is on the site only")),
                None if self.locals.contains_key(name) || self.estranged.contains(name) => {}
                None => return Some(format!("{name} on the site has lost its origin")),
            }
        }
        None
    }

    fn differs(&self, hub: &Value, edge: &Value, with_metadata: bool) -> Option<String> {
        if self.pairing == Pairing::OursOurs {
            return difference(hub, edge, with_metadata);
        }
        // What passes through the reference's typed structs gets empty members.
        difference(&without_empty(hub), &without_empty(edge), with_metadata)
    }

    /// What must hold at the end, beside the sides being equal.
    pub(super) fn finish(&self, edge: &Store) -> Result<(), Violation> {
        for (id, operation) in &self.operations {
            if operation.reached == 0
                && !operation.lapsed
                && !self.may_be_given_up(&operation.hub_uid, &operation.name, operation.set)
            {
                let text = format!("operation {id} of {} never reached the site", operation.name);
                return Err(Violation::new("operation-lost", text));
            }
        }
        for refresh in &self.refreshes {
            if self.pairing != Pairing::OursOurs {
                break;
            }
            if !refresh.reached && !self.may_be_given_up(&refresh.hub_uid, &refresh.name, refresh.set) {
                let text = format!("a refresh of {} never reached the site", refresh.name);
                return Err(Violation::new("refresh-lost", text));
            }
        }
        for (name, spec) in &self.locals {
            let kept = edge
                .get(Resource::Application, EDGE_NAMESPACE, name)
                .is_ok_and(|object| object.value()["spec"] == *spec);
            if !kept {
                return Err(Violation::new(
                    "local-touched",
                    format!("{name} is the site's own and was changed"),
                ));
            }
        }
        Ok(())
    }
}

/// What makes the copy different from what the hub says.
fn difference(hub: &Value, edge: &Value, with_metadata: bool) -> Option<String> {
    let (wanted, found) = (&hub["metadata"], &edge["metadata"]);
    if wanted["deletionTimestamp"].is_string() || found["deletionTimestamp"].is_string() {
        return Some("it is still being deleted".to_owned());
    }
    let annotation = |object: &Value, name: &str| object["annotations"][name].as_str().map(str::to_owned);
    if annotation(found, SOURCE_UID).as_deref() != wanted["uid"].as_str() {
        return Some("the copy is of another object".to_owned());
    }
    if annotation(found, PRINCIPAL) != Some(PRINCIPAL_UID.to_owned()) {
        return Some("the copy is of another principal".to_owned());
    }
    if annotation(wanted, REFRESH).is_some() || annotation(found, REFRESH).is_some() {
        return Some("a refresh is pending".to_owned());
    }
    if hub.get("operation").is_some() || edge.get("operation").is_some() {
        return Some("an operation is pending".to_owned());
    }
    let others = |metadata: &Value| -> BTreeMap<String, Value> {
        let annotations = metadata["annotations"].as_object().cloned().unwrap_or_default();
        annotations
            .into_iter()
            .filter(|(name, _)| name != SOURCE_UID && name != PRINCIPAL && name != REMAPPED)
            .collect()
    };
    if with_metadata && others(wanted) != others(found) {
        return Some(format!("annotations {} and {}", wanted["annotations"], found["annotations"]));
    }
    let empty = |value: &Value| value.as_object().is_none_or(serde_json::Map::is_empty);
    if with_metadata
        && wanted["labels"] != found["labels"]
        && !(empty(&wanted["labels"]) && empty(&found["labels"]))
    {
        return Some(format!("labels {} and {}", wanted["labels"], found["labels"]));
    }
    let finalizers = |metadata: &Value| metadata["finalizers"].as_array().cloned().unwrap_or_default();
    if with_metadata && finalizers(wanted) != finalizers(found) {
        return Some(format!("finalizers {} and {}", wanted["finalizers"], found["finalizers"]));
    }
    let mut spec = hub["spec"].clone();
    if let Some(destination) = spec["destination"].as_object_mut() {
        destination.remove("server");
        destination.insert("name".to_owned(), "in-cluster".into());
    }
    let mut copied = edge["spec"].clone();
    if copied["destination"]["server"] == "" {
        copied["destination"].as_object_mut().and_then(|destination| destination.remove("server"));
    }
    if spec != copied {
        return Some(format!("spec {spec} and {copied}"));
    }
    let told = |object: &Value| {
        let mut status = object["status"].clone();
        if let Some(status) = status.as_object_mut() {
            // Rewritten every few minutes and not told.
            status.remove("reconciledAt");
        }
        status
    };
    let (hub_status, edge_status) = (told(hub), told(edge));
    if hub_status != edge_status {
        return Some(format!("status {hub_status} and {edge_status}"));
    }
    None
}

/// Whether an Application of the hub is another agent's.
fn is_away(object: &Value) -> bool {
    object["spec"]["destination"]["name"] != AGENT
}

/// The simulator's users number their operations.
pub(super) fn operation_id(object: &Value) -> Option<u64> {
    object["operation"]["info"][0]["value"].as_str()?.parse().ok()
}

pub(super) const SOURCE_UID: &str = "argocd.argoproj.io/source-uid";
const PRINCIPAL: &str = "argocd.argoproj.io/principal-uid";
const REMAPPED: &str = "argocd.argoproj.io/namespace-remapped";
