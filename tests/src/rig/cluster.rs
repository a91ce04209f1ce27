//! A Kubernetes API as the rigs see it, whatever serves it.

use std::any::Any;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{fs, io};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde_json::{Value, json};

use super::Kube;
use crate::kube::client::KubeTarget;

/// One cluster, its administrator, and the restricted user that a peer process gets.
pub struct Cluster {
    pub admin: Kube,
    /// The context in the rig's kubeconfig of the administrator.
    pub context: String,
    /// The context of the peer process.
    pub peer_context: String,
    /// The user name of the peer process, as an audit log shows it.
    pub peer_user: String,
    target: KubeTarget,
    /// Of a server of the rig; a user's own cluster has its own kubeconfig.
    credentials: Option<Credentials>,
    /// Whatever must live as long as the cluster is used.
    _server: Box<dyn Any + Send + Sync>,
}

/// How much a peer process may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rights {
    /// Ours, the least that works.
    Lite,
    /// What the reference's manifests grant, for a foreign peer.
    Reference,
}

struct Credentials {
    ca: String,
    admin_token: String,
    peer_token: String,
}

impl Cluster {
    /// A server of the rig: two bearer tokens, one trust anchor.
    pub fn with_tokens(
        name: &str,
        url: &str,
        ca: &str,
        admin_token: &str,
        peer: (&str, &str),
        server: impl Any + Send + Sync,
    ) -> Result<Self, String> {
        let (peer_user, peer_token) = peer;
        Ok(Self {
            admin: Kube::new(url, Some(ca), Some(admin_token), None)?,
            context: name.to_owned(),
            peer_context: format!("{name}-peer"),
            peer_user: peer_user.to_owned(),
            target: KubeTarget::new(url, Some(admin_token), Some(ca)),
            credentials: Some(Credentials {
                ca: ca.to_owned(),
                admin_token: admin_token.to_owned(),
                peer_token: peer_token.to_owned(),
            }),
            _server: Box::new(server),
        })
    }

    /// A context of the user's own kubeconfig, for everybody. `kubectl` does the reading: it knows every form.
    pub fn from_kubeconfig(kubeconfig: &Path, context: &str) -> Result<Self, String> {
        let output = Command::new("kubectl")
            .arg("--kubeconfig")
            .arg(kubeconfig)
            .args(["--context", context, "config", "view", "--raw", "--minify", "--flatten", "-o", "json"])
            .output()
            .map_err(|error| format!("kubectl is needed to read {}: {error}", kubeconfig.display()))?;
        if !output.status.success() {
            let reason = String::from_utf8_lossy(&output.stderr);
            return Err(format!("context {context} of {}: {}", kubeconfig.display(), reason.trim()));
        }
        let config: Value = serde_json::from_slice(&output.stdout)
            .map_err(|error| format!("context {context} of {}: {error}", kubeconfig.display()))?;
        let (cluster, user) = (&config["clusters"][0]["cluster"], &config["users"][0]["user"]);
        let pem = |value: &Value| -> Result<Option<String>, String> {
            let Some(text) = value.as_str() else { return Ok(None) };
            let bytes = BASE64.decode(text).map_err(|error| format!("context {context}: {error}"))?;
            Ok(Some(String::from_utf8_lossy(&bytes).into_owned()))
        };
        let ca = pem(&cluster["certificate-authority-data"])?;
        if ca.is_none() && cluster["insecure-skip-tls-verify"] != true {
            return Err(format!(
                "context {context}: neither certificate-authority nor insecure-skip-tls-verify"
            ));
        }
        let certificate = pem(&user["client-certificate-data"])?;
        let key = pem(&user["client-key-data"])?;
        let token = user["token"].as_str();
        if token.is_none() && certificate.is_none() {
            return Err(format!(
                "context {context}: only tokens and client certificates are understood here"
            ));
        }
        let url = cluster["server"].as_str().unwrap_or_default();
        let admin = Kube::new(url, ca.as_deref(), token, certificate.as_deref().zip(key.as_deref()))?;
        let mut target = KubeTarget::new(url, token, ca.as_deref());
        target.identity = certificate.zip(key);
        Ok(Self {
            admin,
            target,
            context: context.to_owned(),
            peer_context: context.to_owned(),
            peer_user: String::new(),
            credentials: None,
            _server: Box::new(()),
        })
    }

    /// Namespace, custom resources and rights that a hub needs.
    pub fn prepare_hub(&self, namespace: &str, rights: Rights) -> Result<(), String> {
        self.ensure_namespace(namespace)?;
        let mut cluster_rules = vec![argoproj_rule(&["applications"], EVERY_VERB)];
        let mut rules = vec![
            core_rule(&["secrets"], &["get", "list", "watch"]),
            core_rule(&["configmaps"], &["get", "create", "list", "watch"]),
            argoproj_rule(&["appprojects"], &["get", "list", "watch"]),
        ];
        if rights == Rights::Reference {
            cluster_rules = vec![
                argoproj_rule(&["applications", "appprojects", "applicationsets"], EVERY_VERB),
                core_rule(&["namespaces"], &["create", "get", "list", "watch"]),
            ];
            rules = vec![
                core_rule(&["secrets", "configmaps"], EVERY_VERB),
                core_rule(&["events"], &["create", "list"]),
            ];
        }
        self.grant(namespace, &rules, &cluster_rules)
    }

    /// Namespace, custom resources and rights that a site needs.
    pub fn prepare_edge(&self, namespace: &str, rights: Rights) -> Result<(), String> {
        self.ensure_namespace(namespace)?;
        let (rules, cluster_rules) = match rights {
            Rights::Lite => (
                vec![
                    argoproj_rule(&["applications", "appprojects"], EVERY_VERB),
                    core_rule(&["secrets", "configmaps"], EVERY_VERB),
                ],
                Vec::new(),
            ),
            Rights::Reference => (
                vec![
                    argoproj_rule(&["applications", "appprojects", "applicationsets"], EVERY_VERB),
                    core_rule(&["secrets", "configmaps"], EVERY_VERB),
                    core_rule(&["events"], &["create", "list"]),
                ],
                vec![
                    argoproj_rule(&["applications"], EVERY_VERB),
                    core_rule(&["namespaces"], &["create", "get", "list", "watch"]),
                ],
            ),
        };
        self.grant(namespace, &rules, &cluster_rules)
    }

    /// The administrator's way in, for the harness's asynchronous clients.
    pub fn target(&self) -> KubeTarget {
        self.target.clone()
    }

    pub fn ensure_namespace(&self, namespace: &str) -> Result<(), String> {
        let object = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}});
        Ok(self.admin.ensure("/api/v1/namespaces", &object)?)
    }

    /// Users of a cluster that is not ours have the rights that they have.
    fn grant(&self, namespace: &str, rules: &[Value], cluster_rules: &[Value]) -> Result<(), String> {
        if self.credentials.is_none() || self.peer_user.is_empty() {
            return Ok(());
        }
        let api = "/apis/rbac.authorization.k8s.io/v1";
        let subject =
            json!([{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": self.peer_user}]);
        let role =
            |kind: &str| json!({"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": "peer"});
        let in_namespace = format!("{api}/namespaces/{namespace}");
        self.admin.ensure(
            &format!("{in_namespace}/roles"),
            &json!({"metadata": {"name": "peer", "namespace": namespace}, "rules": rules}),
        )?;
        self.admin.ensure(
            &format!("{in_namespace}/rolebindings"),
            &json!({"metadata": {"name": "peer", "namespace": namespace},
                    "roleRef": role("Role"), "subjects": subject}),
        )?;
        self.admin.ensure(
            &format!("{api}/clusterroles"),
            &json!({"metadata": {"name": "peer"}, "rules": cluster_rules}),
        )?;
        self.admin.ensure(
            &format!("{api}/clusterrolebindings"),
            &json!({"metadata": {"name": "peer"}, "roleRef": role("ClusterRole"), "subjects": subject}),
        )?;
        Ok(())
    }
}

/// Writes one file with the administrator's and the peer's context of each cluster.
pub fn write_kubeconfig(path: &Path, clusters: &[&Cluster]) -> io::Result<PathBuf> {
    let mut text = String::from("apiVersion: v1\nkind: Config\npreferences: {}\n");
    let (mut entries, mut users, mut contexts) = (String::new(), String::new(), String::new());
    for cluster in clusters {
        let Some(credentials) = &cluster.credentials else {
            return Err(io::Error::other(format!("{} has a kubeconfig of its own", cluster.context)));
        };
        let (name, ca) = (&cluster.context, BASE64.encode(&credentials.ca));
        let _ = write!(
            entries,
            "- name: {name}\n  cluster:\n    server: {}\n    certificate-authority-data: {ca}\n",
            cluster.admin.url()
        );
        for (context, token) in
            [(&cluster.context, &credentials.admin_token), (&cluster.peer_context, &credentials.peer_token)]
        {
            let _ = write!(users, "- name: {context}\n  user:\n    token: {token}\n");
            let _ =
                write!(contexts, "- name: {context}\n  context:\n    cluster: {name}\n    user: {context}\n");
        }
    }
    let _ = write!(text, "clusters:\n{entries}users:\n{users}contexts:\n{contexts}");
    if let Some(first) = clusters.first() {
        let _ = writeln!(text, "current-context: {}", first.context);
    }
    fs::write(path, text)?;
    Ok(path.to_owned())
}

fn argoproj_rule(resources: &[&str], verbs: &[&str]) -> Value {
    json!({"apiGroups": ["argoproj.io"], "resources": resources, "verbs": verbs})
}

fn core_rule(resources: &[&str], verbs: &[&str]) -> Value {
    json!({"apiGroups": [""], "resources": resources, "verbs": verbs})
}

const EVERY_VERB: &[&str] = &["create", "get", "list", "watch", "update", "patch", "delete"];
