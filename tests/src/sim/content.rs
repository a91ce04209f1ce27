//! Projects, repositories and keys: what users do with them, and how their copies must look.

use std::collections::{BTreeMap, BTreeSet};

use agent_core::rand::Rng;
use serde_json::{Value, json};

use super::checker::{SOURCE_UID, Violation};
use super::{EDGE_NAMESPACE, HUB_NAMESPACE};
use crate::kube::Resource;
use crate::kube::store::{Object, Store};

/// Which object.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum What {
    Project(u8),
    Repository(u8),
    Keys,
}

/// Something that somebody does to one of them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Action {
    /// On the hub: creates it, or replaces what it says.
    Put {
        what: What,
        value: u32,
    },
    Delete {
        what: What,
    },
    /// On the site, to a copy.
    EdgeEdit {
        what: What,
        value: u32,
    },
    EdgeDelete {
        what: What,
    },
}

impl Action {
    pub(super) fn draw(rng: &mut Rng, value: u32) -> Self {
        let what = match rng.below(7) {
            0..=2 => What::Project(rng.below(PROJECTS) as u8),
            3..=5 => What::Repository(rng.below(REPOSITORIES) as u8),
            _ => What::Keys,
        };
        match rng.below(10) {
            0..=5 => Self::Put { what, value: value * 16 + rng.below(16) as u32 },
            6 => Self::Delete { what },
            7..=8 => Self::EdgeEdit { what, value },
            _ => Self::EdgeDelete { what },
        }
    }

    pub(super) fn object(&self) -> (Resource, String) {
        let (Self::Put { what, .. }
        | Self::Delete { what }
        | Self::EdgeEdit { what, .. }
        | Self::EdgeDelete { what }) = self;
        match what {
            What::Project(number) => (Resource::AppProject, project(*number)),
            What::Repository(number) => (Resource::Secret, format!("repo-{number}")),
            What::Keys => (Resource::ConfigMap, KEYS.to_owned()),
        }
    }

    /// What is written: the whole object on the hub, a change on the site.
    pub(super) fn body(&self) -> Value {
        match *self {
            Self::Put { what: What::Project(number), value } => {
                // One in four belongs to somebody else.
                let name = if value % 4 == 0 { "other-*" } else { "agent-*" };
                json!({
                    "apiVersion": "argoproj.io/v1alpha1", "kind": "AppProject",
                    "metadata": {"name": project(number), "labels": {"v": (value % 3).to_string()}},
                    "spec": {
                        "description": value.to_string(), "sourceRepos": ["*"], "sourceNamespaces": ["agent-?"],
                        "destinations": [{"name": name, "namespace": "x"}, {"name": "!none", "namespace": "*"}],
                        "roles": [{"name": "r", "policies": ["p"]}]
                    }
                })
            }
            Self::Put { what: What::Repository(number), value } => json!({
                "apiVersion": "v1", "kind": "Secret", "type": "Opaque",
                "metadata": {"name": format!("repo-{number}"), "labels": {
                    SECRET_TYPE: if number % 2 == 0 { "repository" } else { "repo-creds" }
                }},
                "data": {"project": base64(&project((value % PROJECTS as u32) as u8)), "password": base64(&value.to_string())}
            }),
            Self::Put { what: What::Keys, value } => json!({
                "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": KEYS},
                "data": {"key": value.to_string()}
            }),
            Self::EdgeEdit { what: What::Project(_), value } => {
                json!({"spec": {"description": format!("local {value}")}})
            }
            Self::EdgeEdit { what: What::Repository(_), value } => {
                json!({"data": {"password": base64(&format!("local {value}"))}})
            }
            Self::EdgeEdit { what: What::Keys, value } => json!({"data": {"local": value.to_string()}}),
            Self::Delete { .. } | Self::EdgeDelete { .. } => json!({}),
        }
    }
}

/// What an installation of Argo CD brings along on a site.
pub(super) fn installed() -> [Value; 2] {
    [
        json!({
            "apiVersion": "argoproj.io/v1alpha1", "kind": "AppProject", "metadata": {"name": project(0)},
            "spec": {"sourceRepos": ["*"], "destinations": [{"server": "*", "namespace": "*"}]}
        }),
        json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": KEYS}}),
    ]
}

pub(super) fn resource_of(object: &Value) -> Resource {
    match object["kind"].as_str() {
        Some("AppProject") => Resource::AppProject,
        Some("Secret") => Resource::Secret,
        _ => Resource::ConfigMap,
    }
}

fn project(number: u8) -> String {
    if number == 0 { "default".to_owned() } else { format!("project-{number}") }
}

fn base64(text: &str) -> String {
    let mut out = Vec::new();
    agent_core::event::base64_encode(text.as_bytes(), &mut out);
    String::from_utf8(out).unwrap_or_default()
}

/// What the hub has had of them, and whether it was ever none of the site's.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    /// By UID: whether the site is to have it.
    wanted: BTreeMap<String, bool>,
    /// Project of each repository, by UID.
    projects: BTreeMap<String, Value>,
    /// Deleted, or withdrawn from the site at some time.
    withdrawn: BTreeSet<String>,
    /// Every UID that the hub has ever had.
    known: BTreeSet<String>,
}

impl Ledger {
    /// Takes in the hub. How many were withdrawn is returned.
    pub(super) fn follow(&mut self, hub: &Store) -> u64 {
        let now: BTreeMap<String, bool> =
            all(hub).map(|object| (object.uid().to_owned(), is_wanted(hub, object))).collect();
        self.known.extend(now.keys().cloned());
        let mut count = 0;
        for (uid, wanted) in &self.wanted {
            if *wanted && now.get(uid) != Some(&true) {
                count += 1;
            }
            if now.get(uid) != Some(&true) {
                self.withdrawn.insert(uid.clone());
            }
        }
        // A repository that changes its project may be told of before the project is: it goes and comes back.
        let projects = repositories(hub);
        for (uid, project) in &self.projects {
            if projects.get(uid).is_some_and(|now| now != project) {
                self.withdrawn.insert(uid.clone());
            }
        }
        self.projects = projects;
        let unwanted = now.iter().filter(|(_, wanted)| !**wanted).map(|(uid, _)| uid.clone());
        self.withdrawn.extend(unwanted);
        self.wanted = now;
        count
    }

    /// Whether there is a ground for deleting the copy.
    pub(super) fn delete(&self, object: &Value) -> Result<(), Violation> {
        let metadata = &object["metadata"];
        let name = metadata["name"].as_str().unwrap_or_default();
        match metadata["annotations"][SOURCE_UID].as_str() {
            Some(source_uid) if self.withdrawn.contains(source_uid) => Ok(()),
            Some(source_uid) => Err(Violation::new(
                "delete-without-ground",
                format!("{name}: {source_uid} was never taken away from the site"),
            )),
            None => Err(Violation::new("delete-without-ground", format!("{name} is the site's own"))),
        }
    }

    /// Whether it bears the mark of something that the hub never had.
    pub(super) fn is_mismarked(&self, object: &Value) -> bool {
        let source_uid = object["metadata"]["annotations"][SOURCE_UID].as_str();
        source_uid.is_some_and(|source_uid| !self.known.contains(source_uid))
    }

    pub(super) fn is_withdrawn(&self, source_uid: &str) -> bool {
        self.withdrawn.contains(source_uid)
    }
}

fn all(store: &Store) -> impl Iterator<Item = &Object> {
    [Resource::AppProject, Resource::Secret, Resource::ConfigMap]
        .into_iter()
        .flat_map(|resource| store.iter(resource))
        .map(|object| &**object)
        .filter(|object| resource_of(object.value()) != Resource::ConfigMap || object.name() == KEYS)
}

fn repositories(hub: &Store) -> BTreeMap<String, Value> {
    let project = |object: &Object| object.value()["data"]["project"].clone();
    let secrets = hub.iter(Resource::Secret);
    secrets.map(|object| (object.uid().to_owned(), project(object))).collect()
}

/// Whether the site is to have this object of the hub.
fn is_wanted(hub: &Store, object: &Object) -> bool {
    if object.is_terminating() {
        return false;
    }
    let value = object.value();
    match resource_of(value) {
        Resource::AppProject => value["spec"]["destinations"][0]["name"] == "agent-*",
        Resource::Secret => {
            let of = |number: u64| project(number as u8);
            let project = (0..PROJECTS).map(of).find(|name| value["data"]["project"] == base64(name));
            project.is_some_and(|name| {
                let project = hub.get(Resource::AppProject, HUB_NAMESPACE, &name);
                project.is_ok_and(|project| is_wanted(hub, &project))
            })
        }
        _ => true,
    }
}

/// What differs between the sides; `None` when they agree.
pub(super) fn difference(
    hub: &Store,
    edge: &Store,
    keeps_namespaces: bool,
    swallowed: &BTreeSet<String>,
    is_excused: impl Fn(Resource, &str) -> bool,
) -> Option<String> {
    for object in all(hub) {
        let (name, resource) = (object.name(), resource_of(object.value()));
        if is_excused(resource, name) {
            continue;
        }
        let copy = edge.get(resource, EDGE_NAMESPACE, name).ok();
        let source =
            copy.as_ref().and_then(|copy| copy.value()["metadata"]["annotations"][SOURCE_UID].as_str());
        match (is_wanted(hub, object), copy.as_ref()) {
            (true, None) => return Some(format!("{name} is not on the site")),
            (true, Some(copy)) => {
                if source != Some(object.uid()) {
                    return Some(format!("{name}: the copy is of another object"));
                }
                let with_metadata = !swallowed.contains(name);
                if let Some(difference) =
                    copy_differs(resource, object.value(), copy.value(), with_metadata, keeps_namespaces)
                {
                    return Some(format!("{name}: {difference}"));
                }
            }
            (false, _) if source.is_some() => return Some(format!("{name} is on the site still")),
            (false, _) => {}
        }
    }
    let left = all(edge).find(|object| {
        object.value()["metadata"]["annotations"].get(SOURCE_UID).is_some()
            && !is_excused(resource_of(object.value()), object.name())
            && hub.get(resource_of(object.value()), HUB_NAMESPACE, object.name()).is_err()
    });
    left.map(|object| format!("{} is on the site only", object.name()))
}

fn copy_differs(
    resource: Resource,
    hub: &Value,
    edge: &Value,
    with_metadata: bool,
    keeps_namespaces: bool,
) -> Option<String> {
    if with_metadata && hub["metadata"]["labels"] != edge["metadata"]["labels"] {
        return Some("labels".to_owned());
    }
    if resource != Resource::AppProject {
        return (hub["data"] != edge["data"]).then(|| format!("data {} and {}", hub["data"], edge["data"]));
    }
    let mut spec = hub["spec"].clone();
    if let Some(spec) = spec.as_object_mut() {
        if !keeps_namespaces {
            spec.remove("sourceNamespaces");
        }
        spec.remove("roles");
        spec.insert(
            "destinations".to_owned(),
            json!([{"name": "in-cluster", "server": "https://kubernetes.default.svc", "namespace": "x"}]),
        );
    }
    (spec != edge["spec"]).then(|| format!("spec {spec} and {}", edge["spec"]))
}

const PROJECTS: u64 = 4;
const REPOSITORIES: u64 = 5;
const KEYS: &str = agent_core::content::GPG_KEYS;
const SECRET_TYPE: &str = agent_core::content::SECRET_TYPE;
