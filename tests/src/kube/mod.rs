//! The embedded Kubernetes: one store with two faces.
//!
//! [`store`] is the API server's semantics without I/O; the simulator calls it directly. [`http`] serves the same
//! store to processes. What is not here: server-side apply, garbage collection, admission, schemas.

pub mod client;
pub mod closure;
pub mod http;
pub mod jsonpatch;
pub mod query;
pub mod selector;
pub mod store;

mod discovery;

use serde_json::{Value, json};

/// The resources that the embedded API server knows.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Resource {
    Namespace,
    Secret,
    ConfigMap,
    Event,
    Lease,
    Application,
    AppProject,
    ApplicationSet,
}

/// What discovery says about a resource, and what the store needs to know.
#[derive(Debug)]
pub struct Definition {
    pub group: &'static str,
    pub version: &'static str,
    pub plural: &'static str,
    pub singular: &'static str,
    pub kind: &'static str,
    pub short_names: &'static [&'static str],
    pub namespaced: bool,
    /// Defined by a CustomResourceDefinition: it has a generation, and updates need a resourceVersion.
    pub custom: bool,
}

impl Resource {
    pub const ALL: [Self; 8] = [
        Self::Namespace,
        Self::Secret,
        Self::ConfigMap,
        Self::Event,
        Self::Lease,
        Self::Application,
        Self::AppProject,
        Self::ApplicationSet,
    ];

    pub const fn definition(self) -> &'static Definition {
        match self {
            Self::Namespace => &NAMESPACE,
            Self::Secret => &SECRET,
            Self::ConfigMap => &CONFIG_MAP,
            Self::Event => &EVENT,
            Self::Lease => &LEASE,
            Self::Application => &APPLICATION,
            Self::AppProject => &APP_PROJECT,
            Self::ApplicationSet => &APPLICATION_SET,
        }
    }

    /// The resource under `/apis/<group>/<version>/…/<plural>` (`group` is empty for `/api/v1`).
    pub fn find(group: &str, version: &str, plural: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|resource| {
            let definition = resource.definition();
            definition.group == group && definition.version == version && definition.plural == plural
        })
    }

    /// `v1` or `<group>/<version>`.
    pub fn api_version(self) -> String {
        let Definition { group, version, .. } = self.definition();
        if group.is_empty() { (*version).to_owned() } else { format!("{group}/{version}") }
    }

    /// `secrets` or `applications.argoproj.io`, as messages name it.
    fn qualified(self) -> String {
        let Definition { group, plural, .. } = self.definition();
        if group.is_empty() { (*plural).to_owned() } else { format!("{plural}.{group}") }
    }
}

impl From<agent_core::request::Kind> for Resource {
    fn from(kind: agent_core::request::Kind) -> Self {
        match kind {
            agent_core::request::Kind::Application => Self::Application,
            agent_core::request::Kind::AppProject => Self::AppProject,
            agent_core::request::Kind::Repository => Self::Secret,
            agent_core::request::Kind::GpgKey => Self::ConfigMap,
        }
    }
}

/// An error answer of the API server, the `Status` object.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Status {
    pub code: u16,
    pub reason: &'static str,
    pub message: String,
    pub details: Option<Value>,
}

impl Status {
    /// A status without details.
    pub fn new(code: u16, reason: &'static str, message: impl Into<String>) -> Self {
        Self { code, reason, message: message.into(), details: None }
    }

    fn about(code: u16, reason: &'static str, resource: Resource, name: &str, message: String) -> Self {
        let Definition { group, plural, .. } = resource.definition();
        let mut details = json!({"name": name, "kind": plural});
        if !group.is_empty() {
            details["group"] = json!(group);
        }
        Self { code, reason, message, details: Some(details) }
    }

    pub fn not_found(resource: Resource, name: &str) -> Self {
        let message = format!("{} \"{name}\" not found", resource.qualified());
        Self::about(404, "NotFound", resource, name, message)
    }

    pub fn already_exists(resource: Resource, name: &str) -> Self {
        let message = format!("{} \"{name}\" already exists", resource.qualified());
        Self::about(409, "AlreadyExists", resource, name, message)
    }

    pub fn conflict(resource: Resource, name: &str, why: &str) -> Self {
        let message = format!("Operation cannot be fulfilled on {} \"{name}\": {why}", resource.qualified());
        Self::about(409, "Conflict", resource, name, message)
    }

    pub fn invalid(resource: Resource, name: &str, why: &str) -> Self {
        // Unlike the others it names the kind, not the resource.
        let Definition { group, kind, .. } = resource.definition();
        let qualified = if group.is_empty() { (*kind).to_owned() } else { format!("{kind}.{group}") };
        let mut status = Self::new(422, "Invalid", format!("{qualified} \"{name}\" is invalid: {why}"));
        status.details = Some(json!({"name": name, "group": group, "kind": kind}));
        status
    }

    pub fn bad_request(message: impl Into<String>) -> Self {
        Self::new(400, "BadRequest", message)
    }

    /// The history that the caller asks for has been compacted away.
    pub fn expired(asked: u64, oldest: u64) -> Self {
        Self::new(410, "Expired", format!("too old resource version: {asked} ({oldest})"))
    }

    /// A resourceVersion that this server has not reached.
    pub fn too_large_resource_version(asked: u64, current: u64) -> Self {
        let mut status =
            Self::new(504, "Timeout", format!("Too large resource version: {asked}, current: {current}"));
        status.details = Some(json!({
            "causes": [{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}],
            "retryAfterSeconds": 1
        }));
        status
    }

    /// The `Status` object.
    pub fn to_value(&self) -> Value {
        let mut status = json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": self.message, "code": self.code
        });
        if !self.reason.is_empty() {
            status["reason"] = json!(self.reason);
        }
        if let Some(details) = &self.details {
            status["details"] = details.clone();
        }
        status
    }

    /// The `Status` object as JSON.
    pub fn to_json(&self) -> Vec<u8> {
        self.to_value().to_string().into_bytes()
    }
}

static NAMESPACE: Definition = Definition {
    group: "",
    version: "v1",
    plural: "namespaces",
    singular: "namespace",
    kind: "Namespace",
    short_names: &["ns"],
    namespaced: false,
    custom: false,
};
static SECRET: Definition = Definition {
    group: "",
    version: "v1",
    plural: "secrets",
    singular: "secret",
    kind: "Secret",
    short_names: &[],
    namespaced: true,
    custom: false,
};
static CONFIG_MAP: Definition = Definition {
    group: "",
    version: "v1",
    plural: "configmaps",
    singular: "configmap",
    kind: "ConfigMap",
    short_names: &["cm"],
    namespaced: true,
    custom: false,
};
static EVENT: Definition = Definition {
    group: "",
    version: "v1",
    plural: "events",
    singular: "event",
    kind: "Event",
    short_names: &["ev"],
    namespaced: true,
    custom: false,
};
static LEASE: Definition = Definition {
    group: "coordination.k8s.io",
    version: "v1",
    plural: "leases",
    singular: "lease",
    kind: "Lease",
    short_names: &[],
    namespaced: true,
    custom: false,
};
static APPLICATION: Definition = Definition {
    group: "argoproj.io",
    version: "v1alpha1",
    plural: "applications",
    singular: "application",
    kind: "Application",
    short_names: &["app", "apps"],
    namespaced: true,
    custom: true,
};
static APP_PROJECT: Definition = Definition {
    group: "argoproj.io",
    version: "v1alpha1",
    plural: "appprojects",
    singular: "appproject",
    kind: "AppProject",
    short_names: &["appproj", "appprojs"],
    namespaced: true,
    custom: true,
};
static APPLICATION_SET: Definition = Definition {
    group: "argoproj.io",
    version: "v1alpha1",
    plural: "applicationsets",
    singular: "applicationset",
    kind: "ApplicationSet",
    short_names: &["appset", "appsets"],
    namespaced: true,
    custom: true,
};
