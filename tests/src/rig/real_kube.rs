//! etcd and kube-apiserver, started for one test and gone with it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use std::{env, fs};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use serde_json::Value;

use super::{Cluster, CommandLine, Kube, Process, WorkDir, free_port, wait_for};

/// An API server with real storage, validation, pruning and authorisation, but no controllers.
#[derive(Debug)]
pub struct RealKube {
    apiserver: Process,
    _etcd: Arc<Etcd>,
    name: String,
    url: String,
    ca: String,
    dir: WorkDir,
}

/// The directory with `etcd` and `kube-apiserver`: `KUBEBUILDER_ASSETS`, the convention of envtest, else the
/// cache that `tests/run` fills.
pub fn kube_assets() -> Result<PathBuf, String> {
    let dir = match env::var_os("KUBEBUILDER_ASSETS").filter(|dir| !dir.is_empty()) {
        Some(dir) => PathBuf::from(dir),
        None => {
            // The same name as in tests/run: the tool module pins the versions.
            let module = include_bytes!("../../tools/go.mod");
            let hash = format!("{:016x}", agent_core::checksum::fingerprint(module));
            let cache = env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
            let cache = cache.or_else(|| Some(PathBuf::from(env::var_os("HOME")?).join(".cache")));
            let cache = cache.ok_or("neither KUBEBUILDER_ASSETS nor HOME is set")?;
            cache.join("argocd-agent-lite").join(format!("kube-{}", &hash[..12]))
        }
    };
    for program in ["etcd", "kube-apiserver"] {
        if !dir.join(program).is_file() {
            return Err(format!(
                "no {program} in {}: tests/run builds it, or KUBEBUILDER_ASSETS names another directory",
                dir.display()
            ));
        }
    }
    Ok(dir)
}

impl RealKube {
    pub fn start(name: &str) -> Result<Self, String> {
        let assets = kube_assets()?;
        let etcd = Arc::new(Etcd::start(&assets)?);
        Self::start_on(&assets, &etcd, name)?.ready()
    }

    /// A hub and an edge on one etcd, starting side by side.
    pub fn start_pair() -> Result<(Self, Self), String> {
        let assets = kube_assets()?;
        let etcd = Arc::new(Etcd::start(&assets)?);
        let hub = Self::start_on(&assets, &etcd, "hub")?;
        let edge = Self::start_on(&assets, &etcd, "edge")?;
        Ok((hub.ready()?, edge.ready()?))
    }

    pub fn url(&self) -> &str {
        &self.url
    }

    /// The trust anchor of the server, PEM.
    pub fn ca(&self) -> &str {
        &self.ca
    }

    pub fn admin(&self) -> Result<Kube, String> {
        Ok(Kube::new(&self.url, Some(&self.ca), Some(ADMIN_TOKEN), None)?)
    }

    /// The token of an administrator.
    pub fn admin_token(&self) -> &'static str {
        ADMIN_TOKEN
    }

    /// As a cluster that lives as long as the server.
    pub fn into_cluster(self: Arc<Self>) -> Result<Cluster, String> {
        let (name, url, ca) = (self.name.clone(), self.url.clone(), self.ca.clone());
        Cluster::with_tokens(&name, &url, &ca, ADMIN_TOKEN, (PEER_USER, PEER_TOKEN), self)
    }

    /// Requests that a user made so far, by verb, from the audit log.
    pub fn requests_of(&self, user: &str) -> BTreeMap<String, u64> {
        let mut verbs = BTreeMap::new();
        let log = fs::read_to_string(self.dir.join("audit.log")).unwrap_or_default();
        for event in log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()) {
            if event["user"]["username"] == user {
                *verbs.entry(event["verb"].as_str().unwrap_or_default().to_owned()).or_default() += 1;
            }
        }
        verbs
    }

    fn start_on(assets: &Path, etcd: &Arc<Etcd>, name: &str) -> Result<Self, String> {
        let failed = |error: &dyn std::fmt::Display| format!("{name}: {error}");
        let dir = WorkDir::new(&format!("kube-{name}")).map_err(|e| failed(&e))?;
        let write = |file: &str, text: &str| fs::write(dir.join(file), text).map_err(|e| failed(&e));
        let identity = Identity::generate().map_err(|e| failed(&e))?;
        write("ca.pem", &identity.ca)?;
        write("server.pem", &identity.certificate)?;
        write("server.key", &identity.key)?;
        let signing = KeyPair::generate().map_err(|e| failed(&e))?;
        write("sa.key", &signing.serialize_pem())?;
        write("sa.pub", &signing.public_key_pem())?;
        write("tokens.csv", TOKENS)?;
        write("audit.yaml", AUDIT_POLICY)?;

        let port = free_port().map_err(|e| failed(&e))?;
        let file = |file: &str| dir.join(file).display().to_string();
        let arguments = [
            format!("--etcd-servers={}", etcd.url),
            format!("--etcd-prefix=/{name}"),
            "--bind-address=127.0.0.1".to_owned(),
            format!("--secure-port={port}"),
            format!("--tls-cert-file={}", file("server.pem")),
            format!("--tls-private-key-file={}", file("server.key")),
            format!("--client-ca-file={}", file("ca.pem")),
            format!("--token-auth-file={}", file("tokens.csv")),
            "--authorization-mode=RBAC".to_owned(),
            "--anonymous-auth=false".to_owned(),
            "--service-account-issuer=https://kubernetes.default.svc".to_owned(),
            format!("--service-account-key-file={}", file("sa.pub")),
            format!("--service-account-signing-key-file={}", file("sa.key")),
            "--service-cluster-ip-range=10.0.0.0/24".to_owned(),
            // Nobody routes to the Service of the API itself here, and loopback is no valid endpoint.
            "--endpoint-reconciler-type=none".to_owned(),
            // No controller manager: nobody makes the default ServiceAccount that this plugin waits for.
            "--disable-admission-plugins=ServiceAccount".to_owned(),
            // Nor a garbage collector to end foreground deletions.
            "--enable-garbage-collector=false".to_owned(),
            format!("--audit-policy-file={}", file("audit.yaml")),
            format!("--audit-log-path={}", file("audit.log")),
            "--audit-log-mode=blocking".to_owned(),
        ];
        let command = CommandLine::new(assets.join("kube-apiserver").display().to_string());
        let apiserver =
            Process::spawn(&format!("kube-apiserver {name}"), &command, &arguments, &[], &dir.join("log"))
                .map_err(|e| failed(&e))?;
        Ok(Self {
            apiserver,
            _etcd: etcd.clone(),
            name: name.to_owned(),
            url: format!("https://127.0.0.1:{port}"),
            ca: identity.ca,
            dir,
        })
    }

    fn ready(mut self) -> Result<Self, String> {
        let kube = self.admin()?;
        self.apiserver.wait_while_alive(START_LIMIT, "readiness", || kube.get_text("/readyz").ok())?;
        let definitions = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
        for yaml in CUSTOM_RESOURCES {
            kube.create_yaml(definitions, yaml)?;
        }
        for resource in ["applications", "appprojects"] {
            let path = format!("/apis/argoproj.io/v1alpha1/{resource}?limit=1");
            wait_for(START_LIMIT, || kube.get(&path).ok())
                .ok_or_else(|| format!("{}: {resource} are not served", self.name))?;
        }
        Ok(self)
    }
}

#[derive(Debug)]
struct Etcd {
    url: String,
    _process: Process,
    _dir: WorkDir,
}

impl Etcd {
    fn start(assets: &Path) -> Result<Self, String> {
        let failed = |error: &dyn std::fmt::Display| format!("etcd: {error}");
        let dir = WorkDir::new("etcd").map_err(|e| failed(&e))?;
        let url = format!("http://127.0.0.1:{}", free_port().map_err(|e| failed(&e))?);
        let peers = format!("http://127.0.0.1:{}", free_port().map_err(|e| failed(&e))?);
        let arguments = [
            format!("--data-dir={}", dir.join("data").display()),
            format!("--listen-client-urls={url}"),
            format!("--advertise-client-urls={url}"),
            format!("--listen-peer-urls={peers}"),
            // The data of a test need not survive a power cut.
            "--unsafe-no-fsync".to_owned(),
            "--log-level=warn".to_owned(),
        ];
        let command = CommandLine::new(assets.join("etcd").display().to_string());
        let mut process =
            Process::spawn("etcd", &command, &arguments, &[], &dir.join("log")).map_err(|e| failed(&e))?;
        let agent = ureq::Agent::config_builder().proxy(None).build().new_agent();
        process.wait_while_alive(START_LIMIT, "health", || agent.get(format!("{url}/health")).call().ok())?;
        Ok(Self { url, _process: process, _dir: dir })
    }
}

/// A private authority and the server's certificate for loopback.
struct Identity {
    ca: String,
    certificate: String,
    key: String,
}

impl Identity {
    fn generate() -> Result<Self, rcgen::Error> {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, "kube-ca");
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate()?)?;
        let key = KeyPair::generate()?;
        let names = ["127.0.0.1".to_owned(), "localhost".to_owned()];
        let certificate = CertificateParams::new(names)?.signed_by(&key, &issuer)?;
        Ok(Self { ca: issuer.pem(), certificate: certificate.pem(), key: key.serialize_pem() })
    }
}

const START_LIMIT: Duration = Duration::from_secs(60);
const ADMIN_TOKEN: &str = "admin-token";
const PEER_TOKEN: &str = "peer-token";
const PEER_USER: &str = "peer";
const TOKENS: &str = "admin-token,admin,1,system:masters\npeer-token,peer,2,\n";
const CUSTOM_RESOURCES: [&str; 2] = [
    include_str!("../../../manifests/crds/application.yaml"),
    include_str!("../../../manifests/crds/appproject.yaml"),
];
const AUDIT_POLICY: &str = "\
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: Metadata
  users: [peer]
- level: None
";
