//! What may be in which tree, asked of cargo itself.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use serde_json::Value;

/// Crates that have no place on a site, with the reason.
const BANNED_ON_THE_EDGE: &[(&str, &str)] = &[
    ("aws-lc-rs", "one TLS provider on the edge: ring"),
    ("aws-lc-sys", "one TLS provider on the edge: ring"),
    ("openssl", "one TLS provider on the edge: ring"),
    ("openssl-sys", "one TLS provider on the edge: ring"),
    ("native-tls", "one TLS provider on the edge: ring"),
    ("kube", "the API is spoken by hand: megabytes"),
    ("kube-client", "the API is spoken by hand: megabytes"),
    ("k8s-openapi", "objects stay raw bytes"),
    ("tonic", "gRPC is spoken by hand over h2"),
    ("tower", "no middleware"),
    ("hyper-util", "no pooled client"),
    ("reqwest", "no second HTTP client"),
    ("ureq", "no second HTTP client"),
    ("clap", "flags are parsed by hand"),
    ("regex", "an engine is 1 MB; what needs one runs on the hub"),
    ("regex-automata", "an engine is 1 MB; what needs one runs on the hub"),
    ("tracing-subscriber", "a subscriber of our own"),
    ("chrono", "times are printed by hand"),
    ("time", "times are printed by hand"),
    ("uuid", "ids come from the core"),
    ("futures-util", "few and flat futures"),
    ("parking_lot", "one thread has nothing to lock"),
    ("num_cpus", "one thread"),
    ("anyhow", "errors name their culprit"),
    ("serde_yaml", "no YAML tree in memory"),
    ("harness", "tests depend on the product, never the reverse"),
    ("principal", "the halves do not know each other"),
];

/// What the core may be built from: crates that need no std.
const CORE_TREE: &[&str] = &[
    "agent-core",
    "block-buffer",
    "bytes",
    "cfg-if",
    "cpufeatures",
    "crypto-common",
    "digest",
    "hybrid-array",
    "itoa",
    "libc",
    "memchr",
    "prost",
    "proto",
    "serde",
    "serde_core",
    "serde_json",
    "sha2",
    "typenum",
    "zmij",
];

const LICENCES: &[&str] = &[
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "CDLA-Permissive-2.0",
    "ISC",
    "MIT",
    "MIT-0",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
];

/// Which of our crates each of ours may depend on.
const DIRECTION: &[(&str, &[&str])] = &[
    ("proto", &[]),
    ("agent-core", &["proto"]),
    ("agent-lite", &["agent-core", "proto"]),
    ("principal", &["agent-core", "proto"]),
    ("harness", &["agent-core", "proto"]),
];

#[test]
fn nothing_banned_is_in_the_edge_tree() {
    let tree = shipped_tree("agent-lite");
    let banned: Vec<_> = BANNED_ON_THE_EDGE.iter().filter(|(name, _)| tree.contains_key(*name)).collect();
    assert!(banned.is_empty(), "in the tree of agent-lite: {banned:?}");
}

#[test]
fn the_edge_tree_has_one_version_of_each_crate() {
    let double: Vec<_> =
        shipped_tree("agent-lite").into_iter().filter(|(_, versions)| versions.len() > 1).collect();
    assert!(double.is_empty(), "several versions in the tree of agent-lite: {double:?}");
}

#[test]
fn the_core_is_built_from_crates_without_std() {
    let tree = shipped_tree("agent-core");
    let unknown: Vec<_> = tree.keys().filter(|name| !CORE_TREE.contains(&name.as_str())).collect();
    assert!(unknown.is_empty(), "new in the core's tree, does it build without std? {unknown:?}");
}

#[test]
fn the_core_and_proto_take_no_default_features() {
    for package in workspace_packages() {
        if !["agent-core", "proto"].contains(&name_of(&package)) {
            continue;
        }
        for dependency in array(&package["dependencies"]) {
            let ours = dependency["path"].is_string();
            let shipped = dependency["kind"].is_null();
            let defaults = dependency["uses_default_features"] == true;
            assert!(ours || !shipped || !defaults, "{} of {}", dependency["name"], package["name"]);
        }
    }
}

#[test]
fn dependencies_of_the_rooms_point_one_way() {
    let rooms: BTreeMap<_, _> = DIRECTION.iter().copied().collect();
    let packages = workspace_packages();
    assert_eq!(packages.len(), rooms.len(), "a room without a rule, or a rule without a room");
    for package in &packages {
        let allowed =
            rooms.get(name_of(package)).unwrap_or_else(|| panic!("no rule for {}", package["name"]));
        let ours = array(&package["dependencies"]).iter().filter(|dependency| dependency["path"].is_string());
        for dependency in ours {
            let name = name_of(dependency);
            assert!(allowed.contains(&name), "{} must not depend on {name}", package["name"]);
        }
    }
}

#[test]
fn every_licence_is_on_the_list() {
    let tree = cargo(&["tree", "--workspace", "--edges", "all", "--prefix", "none", "--format", "{p}|{l}"]);
    let refused: BTreeSet<&str> = tree
        .lines()
        .map(|line| line.trim_end_matches(" (*)"))
        .filter(|line| line.split_once('|').is_some_and(|(_, licence)| !is_allowed(licence)))
        .collect();
    assert!(refused.is_empty(), "licences that are not on the list: {refused:#?}");
}

#[test]
fn licence_expressions_are_understood() {
    assert!(is_allowed("MIT") && is_allowed("GPL-3.0 OR MIT") && is_allowed("Apache-2.0/MIT"));
    assert!(is_allowed("(Apache-2.0 OR GPL-2.0) AND BSD-3-Clause"));
    assert!(is_allowed("Apache-2.0 WITH LLVM-exception OR MIT"));
    assert!(!is_allowed("GPL-3.0") && !is_allowed("MIT AND GPL-3.0") && !is_allowed(""));
}

/// Crates that end up in the binary of a package built alone, with their versions. Procedural macros and build
/// scripts run on the builder's machine only.
fn shipped_tree(package: &str) -> BTreeMap<String, BTreeSet<String>> {
    let edges = ["--edges", "normal,no-proc-macro"];
    let text =
        cargo(&[&["tree", "--package", package, "--prefix", "none", "--format", "{p}"], &edges[..]].concat());
    let mut tree: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for line in text.lines() {
        let mut words = line.split_whitespace();
        if let (Some(name), Some(version)) = (words.next(), words.next()) {
            tree.entry(name.to_owned()).or_default().insert(version.to_owned());
        }
    }
    assert!(tree.contains_key(package), "cargo tree said nothing about {package}");
    tree
}

fn workspace_packages() -> Vec<Value> {
    let metadata: Value = serde_json::from_str(&cargo(&["metadata", "--format-version=1", "--no-deps"]))
        .expect("cargo speaks JSON");
    array(&metadata["packages"]).to_vec()
}

fn cargo(arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO"))
        .args(arguments)
        .arg("--locked")
        .current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("cargo speaks UTF-8")
}

/// SPDX: alternatives of conjunctions, with parentheses; a slash is the old way to say OR.
fn is_allowed(expression: &str) -> bool {
    let expression = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let words: Vec<&str> = expression.split_whitespace().collect();
    let mut rest = &words[..];
    let allowed = alternatives(&mut rest);
    allowed && rest.is_empty()
}

fn alternatives(rest: &mut &[&str]) -> bool {
    let mut allowed = conjunction(rest);
    while let Some(("OR", tail)) = split(rest) {
        *rest = tail;
        // Not `||` around the call: the words have to be consumed.
        let other = conjunction(rest);
        allowed |= other;
    }
    allowed
}

fn conjunction(rest: &mut &[&str]) -> bool {
    let mut allowed = licence(rest);
    while let Some(("AND", tail)) = split(rest) {
        *rest = tail;
        let other = licence(rest);
        allowed &= other;
    }
    allowed
}

fn licence(rest: &mut &[&str]) -> bool {
    match split(rest) {
        Some(("(", tail)) => {
            *rest = tail;
            let allowed = alternatives(rest);
            let Some((")", tail)) = split(rest) else { return false };
            *rest = tail;
            allowed
        }
        Some((name, tail)) => {
            *rest = tail;
            if let [with @ "WITH", exception, tail @ ..] = tail {
                *rest = tail;
                return LICENCES.contains(&format!("{name} {with} {exception}").as_str());
            }
            LICENCES.contains(&name)
        }
        None => false,
    }
}

fn split<'a, 'b>(words: &'b [&'a str]) -> Option<(&'a str, &'b [&'a str])> {
    words.split_first().map(|(first, tail)| (*first, tail))
}

fn array(value: &Value) -> &[Value] {
    value.as_array().map(Vec::as_slice).unwrap_or_default()
}

fn name_of(value: &Value) -> &str {
    value["name"].as_str().unwrap_or_default()
}
