//! Where the API server is and how we prove who we are: kubeconfig, or the pod's ServiceAccount.

use std::path::{Path, PathBuf};

use super::yaml::{self, Node};
use crate::tls::Material;

/// An API server and an identity.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Config {
    pub(crate) host: String,
    pub(crate) port: u16,
    /// `None` is plain HTTP.
    pub(crate) tls: Option<Material>,
    /// Name to verify instead of the host's.
    pub(crate) server_name: Option<String>,
    /// Path before every request's, without a slash at its end.
    pub(crate) prefix: String,
    pub(crate) token: Token,
}

/// A bearer token.
#[derive(Clone, PartialEq, Eq)]
pub(crate) enum Token {
    None,
    Fixed(String),
    /// Read again when it is old, since it is replaced.
    File(PathBuf),
}

/// A token is a secret.
impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::None => f.write_str("None"),
            Self::Fixed(_) => f.write_str("Fixed(..)"),
            Self::File(path) => f.debug_tuple("File").field(path).finish(),
        }
    }
}

/// Finds the configuration: `path` if given, `KUBECONFIG`, `~/.kube/config`, the pod's.
pub(crate) fn load(
    path: &str,
    context: &str,
    environment: &dyn Fn(&str) -> Option<String>,
) -> Result<Config, String> {
    if !path.is_empty() {
        return from_file(Path::new(path), context);
    }
    if let Some(list) = environment("KUBECONFIG").filter(|list| !list.is_empty()) {
        let files: Vec<&str> = list.split(':').filter(|file| Path::new(file).exists()).collect();
        match &files[..] {
            [] if in_cluster_address(environment).is_none() => {
                return Err(format!("KUBECONFIG names no file that exists: {list}"));
            }
            [] => {}
            [file] => return from_file(Path::new(file), context),
            _ => return Err("KUBECONFIG names several files; this agent reads one: use --kubeconfig".into()),
        }
    } else if let Some(home) = environment("HOME").filter(|home| !home.is_empty()) {
        let file = Path::new(&home).join(".kube/config");
        if file.exists() {
            return from_file(&file, context);
        }
    }
    let Some((host, port)) = in_cluster_address(environment) else {
        return Err(
            "no Kubernetes API: not in a pod (KUBERNETES_SERVICE_HOST is not set) and no kubeconfig; \
             use --kubeconfig or KUBECONFIG"
                .into(),
        );
    };
    let directory = Path::new(SERVICE_ACCOUNT);
    Ok(Config {
        host,
        port: port.parse().map_err(|_| format!("KUBERNETES_SERVICE_PORT is no port: {port}"))?,
        tls: Some(Material { roots: Some(read(&directory.join("ca.crt"))?), client: None }),
        server_name: None,
        prefix: String::new(),
        token: Token::File(directory.join("token")),
    })
}

fn in_cluster_address(environment: &dyn Fn(&str) -> Option<String>) -> Option<(String, String)> {
    let host = environment("KUBERNETES_SERVICE_HOST").filter(|host| !host.is_empty())?;
    Some((host, environment("KUBERNETES_SERVICE_PORT").unwrap_or_else(|| "443".into())))
}

fn from_file(path: &Path, context: &str) -> Result<Config, String> {
    let text = String::from_utf8(read(path)?).map_err(|_| format!("{}: not UTF-8", path.display()))?;
    parse(&text, context, path.parent().unwrap_or(Path::new(".")))
        .map_err(|error| format!("kubeconfig {}: {error}", path.display()))
}

/// Reads a kubeconfig; relative paths in it are relative to `directory`.
fn parse(text: &str, context: &str, directory: &Path) -> Result<Config, String> {
    let root = yaml::parse(text)?;
    let context = match context {
        "" => root.text("current-context").ok_or("no current-context; use --kubecontext")?,
        name => name,
    };
    let find = |list: &str, member: &str, name: &str| -> Result<Node, String> {
        root.list(list)
            .iter()
            .find(|entry| entry.text("name") == Some(name))
            .and_then(|entry| entry.at(member))
            .cloned()
            .ok_or_else(|| format!("no {member} {name:?}"))
    };
    let chosen = find("contexts", "context", context)?;
    let cluster = find("clusters", "cluster", chosen.text("cluster").unwrap_or_default())?;
    let user = match chosen.text("user") {
        Some(name) => find("users", "user", name)?,
        None => Node::Null,
    };
    for member in ["exec", "auth-provider"] {
        if matches!(user.at(member), Some(Node::Map(members)) if !members.is_empty()) {
            return Err(format!(
                "user {:?} has {member}, which this agent cannot run: give it a token, a tokenFile, or a client certificate",
                chosen.text("user").unwrap_or_default()
            ));
        }
    }
    for member in ["username", "password", "as"] {
        if user.text(member).is_some() {
            return Err(format!(
                "user {:?}: {member} is not supported",
                chosen.text("user").unwrap_or_default()
            ));
        }
    }
    if cluster.text("proxy-url").is_some() {
        return Err("proxy-url is not supported".into());
    }
    let server = cluster.text("server").ok_or("the cluster has no server")?;
    let (scheme, rest) = server.split_once("://").ok_or_else(|| format!("server {server:?} is no URL"))?;
    let (authority, prefix) = match rest.split_once('/') {
        Some((authority, path)) => (authority, path.trim_end_matches('/')),
        None => (rest, ""),
    };
    let secure = match scheme {
        "https" => true,
        "http" => false,
        other => return Err(format!("server {server:?}: {other} is not http or https")),
    };
    let (host, port) = match authority.rsplit_once(':') {
        Some((host, port)) if !port.contains(']') => {
            (host, port.parse().map_err(|_| format!("server {server:?}: {port:?} is no port"))?)
        }
        _ => (authority, if secure { 443 } else { 80 }),
    };
    if host.is_empty() {
        return Err(format!("server {server:?} has no host"));
    }
    let material = |node: &Node, name: &str| -> Result<Option<Vec<u8>>, String> {
        if let Some(data) = node.text(&format!("{name}-data")) {
            return base64(data).map(Some).ok_or_else(|| format!("{name}-data is not base64"));
        }
        node.text(name).map(|path| read(&directory.join(path))).transpose()
    };
    let roots = match (cluster.text("insecure-skip-tls-verify"), material(&cluster, "certificate-authority")?)
    {
        (Some("true"), _) => None,
        (_, Some(pem)) => Some(pem),
        (_, None) if !secure => None,
        (_, None) => {
            return Err("the cluster has neither certificate-authority nor insecure-skip-tls-verify".into());
        }
    };
    let client = match (material(&user, "client-certificate")?, material(&user, "client-key")?) {
        (Some(chain), Some(key)) => Some((chain, key)),
        (None, None) => None,
        _ => return Err("client-certificate and client-key must be given together".into()),
    };
    let token = match (user.text("token"), user.text("tokenFile")) {
        (_, Some(path)) => Token::File(directory.join(path)),
        (Some(token), None) => Token::Fixed(token.to_owned()),
        (None, None) => Token::None,
    };
    Ok(Config {
        host: host.to_owned(),
        port,
        tls: secure.then_some(Material { roots, client }),
        server_name: cluster.text("tls-server-name").map(str::to_owned),
        prefix: if prefix.is_empty() { String::new() } else { format!("/{prefix}") },
        token,
    })
}

/// Reads a file; an error names it.
pub(crate) fn read(path: &Path) -> Result<Vec<u8>, String> {
    std::fs::read(path).map_err(|error| format!("cannot read {}: {error}", path.display()))
}

/// Standard base64; white space is skipped.
pub(crate) fn base64(text: &str) -> Option<Vec<u8>> {
    let mut out = Vec::with_capacity(text.len() * 3 / 4);
    let (mut bits, mut count, mut padding) = (0u32, 0u32, 0);
    for byte in text.bytes().filter(|byte| !byte.is_ascii_whitespace()) {
        let value = match byte {
            b'A'..=b'Z' => byte - b'A',
            b'a'..=b'z' => byte - b'a' + 26,
            b'0'..=b'9' => byte - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            b'=' => {
                padding += 1;
                continue;
            }
            _ => return None,
        };
        if padding > 0 {
            return None;
        }
        bits = bits << 6 | u32::from(value);
        count += 6;
        if count >= 8 {
            count -= 8;
            // The cast keeps the eight bits wanted.
            out.push((bits >> count) as u8);
        }
    }
    (padding <= 2).then_some(out)
}

const SERVICE_ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "apiVersion: v1
kind: Config
current-context: site
clusters:
- cluster:
    certificate-authority-data: Q0E=
    server: https://[::1]:6443/k8s/
  name: c
- cluster:
    server: http://10.0.0.1
  name: plain
contexts:
- context:
    cluster: c
    user: u
  name: site
- context:
    cluster: plain
    user: t
  name: other
users:
- name: u
  user:
    client-certificate-data: Q0VSVA==
    client-key-data: S0VZ
- name: t
  user:
    tokenFile: token
preferences: {}
";

    fn load_text(text: &str, context: &str) -> Result<Config, String> {
        parse(text, context, Path::new("/etc/site"))
    }

    #[test]
    fn contexts() {
        let site = load_text(FILE, "").unwrap();
        assert_eq!((&*site.host, site.port, &*site.prefix), ("[::1]", 6443, "/k8s"));
        let tls = site.tls.unwrap();
        assert_eq!(tls.roots.as_deref(), Some(&b"CA"[..]));
        assert_eq!(tls.client, Some((b"CERT".to_vec(), b"KEY".to_vec())));
        let other = load_text(FILE, "other").unwrap();
        assert_eq!((&*other.host, other.port, other.tls), ("10.0.0.1", 80, None));
        assert_eq!(other.token, Token::File("/etc/site/token".into()));
    }

    #[test]
    fn errors_name_the_culprit() {
        for (from, to, part) in [
            ("current-context: site", "", "--kubecontext"),
            ("current-context: site", "current-context: x", "no context \"x\""),
            ("    user: u", "    user: x", "no user \"x\""),
            ("    client-key-data: S0VZ\n", "", "together"),
            ("Q0E=", "*", "line 6"),
            ("Q0E=", "?", "line 6"),
            ("Q0E=", "Q-E=", "certificate-authority-data"),
            ("    certificate-authority-data: Q0E=\n", "", "insecure-skip-tls-verify"),
            (
                "    certificate-authority-data: Q0E=\n",
                "    certificate-authority: gone.pem\n",
                "/etc/site/gone.pem",
            ),
            ("https://[::1]:6443/k8s/", "ftp://x", "http or https"),
            ("https://[::1]:6443/k8s/", "https://x:port", "\"port\" is no port"),
            (
                "    client-key-data: S0VZ\n",
                "    client-key-data: S0VZ\n    exec:\n      command: aws\n",
                "has exec",
            ),
        ] {
            let error = load_text(&FILE.replacen(from, to, 1), "").unwrap_err();
            assert!(error.contains(part), "{to}: {error}");
        }
        let nothing = load("", "", &|_| None).unwrap_err();
        assert!(nothing.contains("--kubeconfig"), "{nothing}");
        assert!(load("/does/not/exist", "", &|_| None).unwrap_err().contains("/does/not/exist"));
    }

    #[test]
    fn base64_of_files() {
        assert_eq!(base64("aGk=\n").as_deref(), Some(&b"hi"[..]));
        assert_eq!(base64("a=b"), None);
        assert_eq!(base64(""), Some(vec![]));
    }
}
