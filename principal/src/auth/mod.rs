//! Who an agent is: exactly one method per process, chosen by `--auth`.

pub mod dn;
mod userpass;

use std::collections::BTreeMap;

use agent_core::request::is_dns_label;
use regex::Regex;

use userpass::Users;

/// The configured method.
#[derive(Debug)]
pub enum Method {
    /// The name is in the client certificate.
    Mtls {
        /// Which part of it.
        source: MtlsSource,
        /// Its first group is the name.
        pattern: Regex,
    },
    /// A name and a secret.
    UserPass(Users),
    /// A trusted proxy in front of us says who it is.
    Header {
        /// Lower-case name of the metadata key.
        name: String,
        /// Its first group is the name.
        pattern: Regex,
    },
}

/// Which part of a certificate names the agent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MtlsSource {
    /// The subject, in Go's rendering.
    Subject,
    /// The URI SANs; the first that matches counts.
    Uri,
}

/// What the caller showed.
#[derive(Clone, Copy, Debug)]
pub struct Evidence<'a> {
    /// DER of the verified client certificate.
    pub certificate: Option<&'a [u8]>,
    /// First value of a metadata key.
    pub header: Option<&'a str>,
    /// `AuthRequest.credentials`.
    pub credentials: &'a BTreeMap<String, String>,
}

impl Method {
    /// Parses `--auth`. The warnings are for the log.
    pub fn parse(text: &str, plaintext: bool, warnings: &mut Vec<String>) -> Result<Self, String> {
        let (kind, config) = text.split_once(':').unwrap_or((text, ""));
        match kind {
            "mtls" if plaintext => {
                Err("--auth mtls needs TLS: it cannot be used with --insecure-plaintext".to_owned())
            }
            "mtls" => {
                let (source, pattern) = if let Some(rest) = config.strip_prefix("subject:") {
                    (MtlsSource::Subject, rest)
                } else if let Some(rest) = config.strip_prefix("uri:") {
                    (MtlsSource::Uri, rest)
                } else {
                    warnings.push("--auth mtls:<regexp> is deprecated: write mtls:subject:<regexp>".to_owned());
                    (MtlsSource::Subject, config)
                };
                Ok(Self::Mtls { source, pattern: compile(pattern, "mtls", warnings)? })
            }
            "userpass" => {
                warnings.push("--auth userpass is deprecated: use mtls".to_owned());
                Users::load(config, warnings).map(Self::UserPass)
            }
            "header" if !plaintext => {
                Err("--auth header trusts whoever connects: it can only be used with --insecure-plaintext behind a proxy".to_owned())
            }
            "header" => {
                let (name, pattern) = config
                    .split_once(':')
                    .map(|(name, pattern)| (name.trim(), pattern.trim()))
                    .filter(|(name, pattern)| !name.is_empty() && !pattern.is_empty())
                    .ok_or_else(|| format!("--auth {text:?}: write header:<name>:<regexp>"))?;
                Ok(Self::Header { name: name.to_lowercase(), pattern: compile(pattern, "header", warnings)? })
            }
            _ => Err(format!(
                "--auth {text:?}: write mtls:[subject:|uri:]<regexp>, userpass:<file> or header:<name>:<regexp>"
            )),
        }
    }

    /// The word in `AuthRequest.method`.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Mtls { .. } => "mtls",
            Self::UserPass(_) => "userpass",
            Self::Header { .. } => "header",
        }
    }

    /// The metadata key that this method reads.
    pub fn header(&self) -> Option<&str> {
        match self {
            Self::Header { name, .. } => Some(name),
            _ => None,
        }
    }

    /// The agent's name, or why there is none. The reason is for our log, never for the caller.
    pub fn identify(&self, evidence: &Evidence<'_>) -> Result<String, String> {
        let name = match self {
            Self::Mtls { source, pattern } => {
                let der = evidence.certificate.ok_or("no client certificate")?;
                let names = dn::names(der).map_err(|error| format!("client certificate: {error}"))?;
                match source {
                    MtlsSource::Subject => captured(pattern, &names.subject)
                        .ok_or_else(|| format!("subject {:?} does not match --auth", names.subject))?,
                    MtlsSource::Uri => names
                        .uris
                        .iter()
                        .find_map(|uri| captured(pattern, uri))
                        .ok_or_else(|| format!("no URI of {:?} matches --auth", names.uris))?,
                }
            }
            Self::Header { name, pattern } => {
                let value = evidence.header.ok_or_else(|| format!("header {name} is missing"))?;
                captured(pattern, value).ok_or_else(|| format!("header {name} does not match --auth"))?
            }
            Self::UserPass(users) => {
                let field = |key: &str| evidence.credentials.get(key).map_or("", String::as_str);
                users.check(field("clientid"), field("clientsecret"))?
            }
        };
        if is_dns_label(&name) { Ok(name) } else { Err(format!("{name:?} is not a DNS label")) }
    }
}

/// The first group of the first match, as Go's unanchored `FindStringSubmatch` gives it. An expression without a
/// group names nobody.
fn captured(pattern: &Regex, text: &str) -> Option<String> {
    if pattern.as_str().is_empty() {
        return None;
    }
    let captures = pattern.captures(text)?;
    (captures.len() > 1).then(|| captures.get(1).map_or(String::new(), |group| group.as_str().to_owned()))
}

fn compile(pattern: &str, method: &str, warnings: &mut Vec<String>) -> Result<Regex, String> {
    let regex = Regex::new(pattern).map_err(|error| {
        format!("--auth {method}: {pattern:?} is not a regular expression: {}", one_line(&error))
    })?;
    if regex.captures_len() < 2 {
        // Accepted as the reference does; the installed configurations have `mtls:any`.
        warnings.push(format!(
            "--auth {method}:{pattern} has no group in parentheses: no agent can authenticate"
        ));
    }
    Ok(regex)
}

/// What is wrong with an expression, without the picture of where.
pub(crate) fn one_line(error: &regex::Error) -> String {
    let text = error.to_string();
    text.lines().last().unwrap_or_default().trim_start_matches("error: ").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str, plaintext: bool) -> Result<Method, String> {
        Method::parse(text, plaintext, &mut Vec::new())
    }

    #[test]
    fn pairing_rules() {
        assert!(parse("mtls:CN=([^,]+)", true).is_err());
        assert!(parse("header:x:(.*)", false).is_err());
        assert!(parse("mtls:subject:CN=([^,]+)", false).is_ok());
        assert!(parse("header:X-Id:^(.*)$", true).is_ok());
        for bad in ["", "nonsense:x", "mtls:(", "header:x", "header::(.)"] {
            assert!(parse(bad, bad.starts_with("header")).is_err(), "{bad}");
        }
        let mut warnings = Vec::new();
        Method::parse("mtls:any", false, &mut warnings).unwrap();
        assert_eq!(warnings.len(), 2);
    }

    #[test]
    fn a_header_names_the_agent() {
        let method = parse("header:X-Id:^id=(.*)$", true).unwrap();
        assert_eq!(method.header(), Some("x-id"));
        let credentials = BTreeMap::new();
        let with = |header| Evidence { certificate: None, header, credentials: &credentials };
        assert_eq!(method.identify(&with(Some("id=agent-1"))).unwrap(), "agent-1");
        assert!(method.identify(&with(Some("id=Agent"))).is_err());
        assert!(method.identify(&with(Some("x"))).is_err());
        assert!(method.identify(&with(None)).is_err());
    }
}
