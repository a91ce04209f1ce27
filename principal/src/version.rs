//! What this build calls itself.

/// The version string of the `Version` RPC and of Authenticate responses.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The reference's name: the Version RPC answers `argocd-agent-<version>`, and agents cut the prefix off.
pub const NAME: &str = "argocd-agent";

/// The `version` document; an empty indent gives one line.
pub fn json(indent: &str) -> String {
    let (newline, colon) = if indent.is_empty() { ("", ":") } else { ("\n", ": ") };
    let body: Vec<String> =
        FIELDS.iter().map(|(key, value)| format!("{newline}{indent}\"{key}\"{colon}\"{value}\"")).collect();
    format!("{{{}{newline}}}", body.join(","))
}

/// The `version` document as YAML.
pub fn yaml() -> String {
    FIELDS.iter().map(|(key, value)| format!("{key}: \"{value}\"")).collect::<Vec<_>>().join("\n")
}

const FIELDS: [(&str, &str); 6] = [
    ("name", NAME),
    ("version", VERSION),
    ("gitRevision", "unknown"),
    ("gitStatus", "unknown"),
    ("rustVersion", env!("CARGO_PKG_RUST_VERSION")),
    ("argocdVersion", "unknown"),
];
