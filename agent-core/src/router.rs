//! Which agents an object of the hub concerns, over all agents.
//!
//! Every agent's core decides for itself whether an object is its own. The router only keeps the objects of a thousand other agents
//! away from it, and tells it what to look at again when something beside an object decides about it: a repository goes
//! where its project goes. It names an agent too often rather than too rarely.

use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

use crate::content;
use crate::object::ObjectView;
use crate::peer::Mapping;
use crate::project;
use crate::request::{Key, Kind};
use crate::transform::IN_CLUSTER;

/// The agents and what decides about their objects.
#[derive(Debug)]
pub struct Router {
    mapping: Mapping,
    regex: fn(&str, &str) -> bool,
    agents: BTreeSet<Box<str>>,
    /// Destination-based mapping: whose an Application was last.
    applications: BTreeMap<Key, Box<str>>,
    projects: BTreeMap<Box<str>, Project>,
    /// Project of each repository.
    repositories: BTreeMap<Box<str>, Box<str>>,
}

#[derive(Debug)]
struct Project {
    uid: Box<str>,
    /// `None`: it is nobody's whatever its spec says.
    spec: Option<Box<[u8]>>,
    agents: BTreeSet<Box<str>>,
}

/// Whom an event concerns.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Route {
    /// Agents to be told of the event.
    pub agents: BTreeSet<Box<str>>,
    /// Afterwards: agents that must look at this object again.
    pub recheck: Vec<(Box<str>, Key)>,
    /// What a person should know of it.
    pub note: Option<Note>,
}

/// Why an object reaches no agent.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Note {
    /// The object.
    pub key: Key,
    /// What is the matter with it.
    pub reason: String,
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}; it reaches no agent", self.key, self.reason)
    }
}

impl Router {
    /// Knows no agents and no objects. `regex`: see [`crate::core::Config::regex`].
    pub fn new(mapping: Mapping, regex: fn(&str, &str) -> bool) -> Self {
        Self {
            mapping,
            regex,
            agents: BTreeSet::new(),
            applications: BTreeMap::new(),
            projects: BTreeMap::new(),
            repositories: BTreeMap::new(),
        }
    }

    /// An agent is registered. What exists already must be listed for it.
    pub fn add_agent(&mut self, agent: &str) {
        self.agents.insert(agent.into());
        for project in self.projects.values_mut() {
            if let Some(spec) = &project.spec
                && project::goes_to(spec, agent, self.mapping, &self.regex) == Ok(true)
            {
                project.agents.insert(agent.into());
            }
        }
    }

    /// An agent is registered no longer.
    pub fn remove_agent(&mut self, agent: &str) {
        self.agents.remove(agent);
        for project in self.projects.values_mut() {
            project.agents.remove(agent);
        }
    }

    /// An object exists like this.
    pub fn present(&mut self, key: &Key, object: &[u8]) -> Route {
        let Ok(view) = ObjectView::parse(object) else {
            return self.noted(key, "it cannot be read");
        };
        match key.kind {
            Kind::Application => self.application(key, view.destination_name().as_deref()),
            Kind::AppProject => self.project(key, &view),
            Kind::Repository => self.repository(key, &view),
            Kind::GpgKey => Route { agents: self.agents.clone(), ..Route::default() },
        }
    }

    /// An object is gone.
    pub fn gone(&mut self, key: &Key) -> Route {
        let agents = match key.kind {
            Kind::Application => return self.application(key, None),
            Kind::AppProject => {
                let agents =
                    self.projects.remove(&key.name).map(|project| project.agents).unwrap_or_default();
                let recheck = self.repositories_of(key, &agents);
                return Route { agents, recheck, note: None };
            }
            Kind::Repository => {
                let project = self.repositories.remove(&key.name);
                project.map(|project| self.agents_of(&project)).unwrap_or_default()
            }
            Kind::GpgKey => self.agents.clone(),
        };
        Route { agents, ..Route::default() }
    }

    fn noted(&self, key: &Key, reason: &str) -> Route {
        let note = Note { key: key.clone(), reason: reason.into() };
        Route { note: Some(note), ..Route::default() }
    }

    fn application(&mut self, key: &Key, destination: Option<&str>) -> Route {
        let mut agents = BTreeSet::new();
        let mut add = |agent: &str| {
            if self.agents.contains(agent) {
                agents.insert(agent.into());
            }
        };
        if self.mapping == Mapping::Namespace {
            add(&key.namespace);
            return Route { agents, ..Route::default() };
        }
        let destination = destination.filter(|name| !name.is_empty() && *name != IN_CLUSTER);
        let before = match destination {
            Some(agent) => {
                add(agent);
                self.applications.insert(key.clone(), agent.into())
            }
            None => self.applications.remove(key),
        };
        if let Some(before) = before {
            add(&before);
        }
        Route { agents, ..Route::default() }
    }

    fn project(&mut self, key: &Key, view: &ObjectView<'_>) -> Route {
        let is_carried = view.deletion_timestamp.is_none() && view.source_uid().is_none();
        let spec = view.spec.filter(|_| is_carried);
        let mut after = BTreeSet::new();
        let mut reason = "no destination and no source namespace of it admits a registered agent";
        for agent in &self.agents {
            match spec.map_or(Ok(false), |spec| project::goes_to(spec, agent, self.mapping, &self.regex)) {
                Ok(true) => _ = after.insert(agent.clone()),
                Ok(false) => {}
                Err(_) => reason = "its spec cannot be read",
            }
        }
        let project = Project { uid: (&*view.uid).into(), spec: spec.map(Into::into), agents: after.clone() };
        let former = self.projects.insert(key.name.clone(), project);
        let is_same = former.as_ref().is_some_and(|former| *former.uid == *view.uid);
        let before = former.map(|former| former.agents).unwrap_or_default();
        let recheck = if is_same {
            self.repositories_of(key, &(&before ^ &after))
        } else {
            // Its predecessor may have ended unnoticed.
            self.repositories_of(key, &(&before | &after))
        };
        let is_news =
            is_carried && after.is_empty() && !self.agents.is_empty() && (!is_same || !before.is_empty());
        let note = is_news.then(|| Note { key: key.clone(), reason: reason.into() });
        Route { agents: &before | &after, recheck, note }
    }

    fn repository(&mut self, key: &Key, view: &ObjectView<'_>) -> Route {
        let objection = content::objection(Kind::Repository, view);
        let project = content::project_of_repository(view).filter(|_| objection.is_none());
        let former = match &project {
            Some(project) => self.repositories.insert(key.name.clone(), project.as_str().into()),
            None => self.repositories.remove(&key.name),
        };
        let mut agents = former.as_deref().map(|project| self.agents_of(project)).unwrap_or_default();
        let reason = match &project {
            None => objection.map_or_else(|| "it names no project".into(), String::from),
            Some(project) if !self.projects.contains_key(&**project) => {
                alloc::format!("its project {project} does not exist")
            }
            Some(project) => {
                agents.append(&mut self.agents_of(project));
                String::new()
            }
        };
        let is_news = !reason.is_empty() && former.as_deref() != project.as_deref();
        let note = is_news.then(|| Note { key: key.clone(), reason });
        Route { agents, recheck: Vec::new(), note }
    }

    fn agents_of(&self, project: &str) -> BTreeSet<Box<str>> {
        self.projects.get(project).map(|project| project.agents.clone()).unwrap_or_default()
    }

    fn repositories_of(&self, project: &Key, agents: &BTreeSet<Box<str>>) -> Vec<(Box<str>, Key)> {
        let names = self.repositories.iter().filter(|(_, of)| **of == project.name).map(|(name, _)| name);
        let keys: Vec<Key> = names.map(|name| Key::new(Kind::Repository, &project.namespace, name)).collect();
        agents.iter().flat_map(|agent| keys.iter().map(|key| (agent.clone(), key.clone()))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn router(mapping: Mapping) -> Router {
        let mut router = Router::new(mapping, |_, _| false);
        for agent in ["a-1", "a-2", "b"] {
            router.add_agent(agent);
        }
        router
    }

    fn project(uid: &str, destination: &str) -> String {
        alloc::format!(
            r#"{{"metadata":{{"name":"p","uid":"{uid}"}},"spec":{{"destinations":[{{"name":"{destination}"}}],"sourceNamespaces":["*"]}}}}"#
        )
    }

    /// `cA==`: p, `cQ==`: q.
    fn repository(project: &str) -> String {
        alloc::format!(
            r#"{{"metadata":{{"name":"r","labels":{{"argocd.argoproj.io/secret-type":"repository"}}}},"data":{{"project":"{project}"}}}}"#
        )
    }

    fn present(router: &mut Router, kind: Kind, name: &str, object: &str) -> (String, String, bool) {
        let route = router.present(&Key::new(kind, "argocd", name), object.as_bytes());
        told(&route)
    }

    fn told(route: &Route) -> (String, String, bool) {
        let join = |names: Vec<&str>| names.join(" ");
        (
            join(route.agents.iter().map(|agent| &**agent).collect()),
            join(route.recheck.iter().map(|(agent, _)| &**agent).collect()),
            route.note.is_some(),
        )
    }

    fn is(agents: &str, recheck: &str, note: bool) -> (String, String, bool) {
        (agents.into(), recheck.into(), note)
    }

    #[test]
    fn applications_go_by_namespace_or_destination() {
        let app = |destination: &str| {
            alloc::format!(
                r#"{{"metadata":{{"name":"x"}},"spec":{{"destination":{{"name":"{destination}"}}}}}}"#
            )
        };
        let mut by_namespace = router(Mapping::Namespace);
        let key = Key::new(Kind::Application, "a-1", "x");
        assert_eq!(told(&by_namespace.present(&key, app("b").as_bytes())), is("a-1", "", false));
        let mut router = router(Mapping::Destination);
        for (destination, expected) in
            [("a-1", "a-1"), ("b", "a-1 b"), ("in-cluster", "b"), ("", ""), ("nobody", ""), ("b", "b")]
        {
            assert_eq!(
                present(&mut router, Kind::Application, "x", &app(destination)),
                is(expected, "", false),
                "{destination}"
            );
        }
        assert_eq!(told(&router.gone(&Key::new(Kind::Application, "argocd", "x"))), is("b", "", false));
    }

    #[test]
    fn repositories_follow_their_project() {
        let mut router = router(Mapping::Namespace);
        // Before its project: nobody's, and said so once.
        assert_eq!(present(&mut router, Kind::Repository, "r", &repository("cA==")), is("", "", true));
        assert_eq!(present(&mut router, Kind::Repository, "r", &repository("cA==")), is("", "", false));
        assert_eq!(
            present(&mut router, Kind::AppProject, "p", &project("u", "a-*")),
            is("a-1 a-2", "a-1 a-2", false)
        );
        assert_eq!(
            present(&mut router, Kind::Repository, "r", &repository("cA==")),
            is("a-1 a-2", "", false)
        );
        // Who loses the project loses the repository.
        assert_eq!(
            present(&mut router, Kind::AppProject, "p", &project("u", "a-1")),
            is("a-1 a-2", "a-2", false)
        );
        // Made again while nobody watched.
        assert_eq!(
            present(&mut router, Kind::AppProject, "p", &project("v", "a-1")),
            is("a-1", "a-1", false)
        );
        assert_eq!(present(&mut router, Kind::Repository, "r", &repository("cQ==")), is("a-1", "", true));
        assert_eq!(present(&mut router, Kind::Repository, "r", &repository("cA==")), is("a-1", "", false));
        assert_eq!(present(&mut router, Kind::AppProject, "p", &project("v", "c")), is("a-1", "a-1", true));
        assert_eq!(present(&mut router, Kind::AppProject, "p", &project("v", "b")), is("b", "b", false));
        let gone = router.gone(&Key::new(Kind::AppProject, "argocd", "p"));
        assert_eq!(told(&gone), is("b", "b", false));
    }

    #[test]
    fn agents_come_and_go() {
        let mut router = router(Mapping::Destination);
        present(&mut router, Kind::AppProject, "p", &project("u", "*"));
        router.add_agent("c");
        router.remove_agent("b");
        assert_eq!(
            present(&mut router, Kind::Repository, "r", &repository("cA==")),
            is("a-1 a-2 c", "", false)
        );
        assert_eq!(
            present(&mut router, Kind::GpgKey, "argocd-gpg-keys-cm", "{}"),
            is("a-1 a-2 c", "", false)
        );
        assert_eq!(present(&mut router, Kind::Repository, "r", "x"), is("", "", true));
    }

    #[test]
    fn what_is_not_carried_goes_to_nobody() {
        let mut router = router(Mapping::Namespace);
        let copied = project("u", "*")
            .replace(r#""uid""#, r#""annotations":{"argocd.argoproj.io/source-uid":"s"},"uid""#);
        assert_eq!(present(&mut router, Kind::AppProject, "p", &copied), is("", "", false));
        assert_eq!(
            present(
                &mut router,
                Kind::AppProject,
                "p",
                r#"{"metadata":{"name":"p","uid":"u"},"spec":{"destinations":5}}"#
            ),
            is("", "", false)
        );
    }
}
