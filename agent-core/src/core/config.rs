//! Options of one core instance. The shells parse flags; the core reads no environment.

use alloc::string::String;
use alloc::vec::Vec;
use core::time::Duration;

use crate::peer::Mapping;
use crate::request::Kind;
use crate::transform::OnRecreate;

/// Which half this core is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// On the site: the API server at hand is the site's.
    Agent,
    /// On the hub, for one agent: the API server at hand is the hub's.
    Principal,
}

/// What to do when the hub's object has another UID than the one that the site's copy came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MismatchPolicy {
    /// Delete the copy and create it anew.
    #[default]
    Recreate,
    /// Update the copy in place and restamp it.
    Upsert,
}

/// What to do when a `create` meets an object on the site that did not come from the hub.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AdoptionPolicy {
    /// Overwrite in place and stamp it.
    #[default]
    Always,
    /// Leave it alone and report the refusal to the hub.
    Never,
}

/// How many deletes a resync may cause without a person's word, per principal instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResyncDeleteLimit {
    /// At least this many.
    pub count: usize,
    /// Or this share of the managed objects of the kind, in percent (0..=100), whichever is more.
    pub percent: usize,
}

impl Default for ResyncDeleteLimit {
    fn default() -> Self {
        Self { count: 5, percent: 20 }
    }
}

/// Options of one core instance.
#[derive(Debug, Clone)]
pub struct Config {
    /// Which half.
    pub role: Role,
    /// Name of the agent (principal: its identity; agent: unused).
    pub agent: String,
    /// Namespace of this side's Argo CD: of everything that is no Application, and on a site of Applications too.
    ///
    /// On the hub Applications live in the namespace that is called like the agent, or with destination-based mapping anywhere.
    pub namespace: String,
    /// How Applications are mapped to agents.
    pub mapping: Mapping,
    /// Destination-based mapping only: patterns of namespaces, beside its own, that Applications may live in.
    pub allowed_namespaces: Vec<String>,
    /// Agent with destination-based mapping only: a namespace that is missing is created.
    pub create_namespace: bool,
    /// Decides regular expressions in lists of namespaces: (expression, text). A function, as the core has no engine for them.
    pub regex: fn(&str, &str) -> bool,
    /// Principal only: its persistent identity, stamped as `principaluid`.
    pub principal_uid: String,
    /// Agent only.
    pub mismatch_policy: MismatchPolicy,
    /// Agent only.
    pub adoption_policy: AdoptionPolicy,
    /// Agent only: Applications without a source take no part in a resync.
    pub ignore_unmanaged: bool,
    /// Agent only.
    pub on_recreate: OnRecreate,
    /// Agent only.
    pub resync_delete_limit: ResyncDeleteLimit,
    /// Kubernetes requests outstanding at once, at least 1.
    pub max_requests: usize,
    /// Events in flight towards the peer, at least 1.
    pub max_events: usize,
    /// Bytes in flight towards the peer; one larger event is let through.
    pub max_event_bytes: usize,
    /// How often both sides are compared as a whole, on average; a peer that knows no digest is compared daily. Zero: never.
    pub round_interval: Duration,
    /// Agent only: a sign of life is sent this often while the stream is open. Zero: never.
    pub heartbeat_interval: Duration,
    /// Agent only: of each Application a status goes at once, and then at most one in this time. Zero: each goes at once.
    pub status_window: Duration,
    /// A status is repeated when it was acknowledged this long ago.
    pub status_interval: Duration,
}

impl Config {
    /// The agent of a managed site.
    pub fn agent(namespace: &str) -> Self {
        Self {
            role: Role::Agent,
            agent: String::new(),
            namespace: namespace.into(),
            mapping: Mapping::Namespace,
            allowed_namespaces: Vec::new(),
            create_namespace: false,
            regex: |_, _| false,
            principal_uid: String::new(),
            mismatch_policy: MismatchPolicy::default(),
            adoption_policy: AdoptionPolicy::default(),
            ignore_unmanaged: false,
            on_recreate: OnRecreate::default(),
            resync_delete_limit: ResyncDeleteLimit::default(),
            max_requests: 8,
            max_events: 64,
            max_event_bytes: 512 * 1024,
            round_interval: Duration::from_secs(15 * 60),
            heartbeat_interval: Duration::ZERO,
            status_window: Duration::ZERO,
            status_interval: Duration::from_secs(6 * 3600),
        }
    }

    /// Namespace whose objects of this kind this half is about; `None`: all.
    pub fn namespace_of(&self, kind: Kind) -> Option<&str> {
        match (kind, self.mapping, self.role) {
            (Kind::Application, Mapping::Destination, _) => None,
            (Kind::Application, Mapping::Namespace, Role::Principal) => Some(&self.agent),
            _ => Some(&self.namespace),
        }
    }

    /// The principal's half for the managed agent `agent`, namespace-based mapping; the hub's Argo CD runs in `namespace`.
    pub fn principal(agent: &str, namespace: &str, principal_uid: &str) -> Self {
        Self {
            role: Role::Principal,
            agent: agent.into(),
            principal_uid: principal_uid.into(),
            max_requests: 16,
            ..Self::agent(namespace)
        }
    }
}
