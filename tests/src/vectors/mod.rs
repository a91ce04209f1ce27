//! Test vectors: recorded facts about the wire format, run against our code.
//!
//! Nothing is skipped in silence. A file, sub-kind or key that no runner knows fails; a sub-kind whose feature is
//! not built yet is counted as `later` under its name; a case that one of our deliberate differences decides is
//! counted as a `deviation` under the name of the rule. `tests/vectors/README.md` describes the files.

mod checksums;
pub(crate) mod events;
mod rules;
pub(crate) mod transform;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use serde_json::Value;

/// How one case ended, if it did not fail.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// As recorded.
    Passed,
    /// As our rule says, which differs from the record; everything else as recorded.
    Deviation(&'static str),
}

/// Runs one case; the error says what differs.
type Runner = fn(&Value) -> Result<Verdict, String>;

/// What to do with a sub-kind.
#[derive(Clone, Copy)]
enum Plan {
    /// Run it; the keys that a case may have.
    Run(Runner, &'static [&'static str]),
    /// Its feature is not built yet: the feature's name.
    Later(&'static str),
}

/// Counts of one or many files.
#[derive(Clone, Default, Debug)]
pub struct Totals {
    /// Cases that ended as recorded.
    pub passed: usize,
    /// Cases that differ, each with what differs.
    pub failures: Vec<String>,
    /// Cases per rule of ours.
    pub deviations: BTreeMap<&'static str, usize>,
    /// Cases per sub-kind whose feature comes later.
    pub later: BTreeMap<String, usize>,
}

impl Totals {
    /// Adds another count.
    pub fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failures.extend(other.failures);
        for (rule, count) in other.deviations {
            *self.deviations.entry(rule).or_default() += count;
        }
        for (name, count) in other.later {
            *self.later.entry(name).or_default() += count;
        }
    }

    /// One line for a person, without the failures' texts.
    pub fn line(&self) -> String {
        let mut line = format!("{} passed, {} failed", self.passed, self.failures.len());
        let mut list = |word: &str, entries: Vec<(&str, usize)>| {
            if !entries.is_empty() {
                let total: usize = entries.iter().map(|(_, count)| count).sum();
                let names: Vec<String> =
                    entries.iter().map(|(name, count)| format!("{count} {name}")).collect();
                // Writing to a String cannot fail.
                let _ = write!(line, "; {word}: {total} ({})", names.join(", "));
            }
        };
        list("deviation", self.deviations.iter().map(|(name, count)| (*name, *count)).collect());
        list("later", self.later.iter().map(|(name, count)| (name.as_str(), *count)).collect());
        line
    }
}

/// The vector files in `path`: itself, or the `.json` files of a directory in the order of their names.
pub fn files(path: &Path) -> Result<Vec<PathBuf>, String> {
    let failed = |error: std::io::Error| format!("{}: {error}", path.display());
    if !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let mut list = Vec::new();
    for entry in std::fs::read_dir(path).map_err(failed)? {
        let file = entry.map_err(failed)?.path();
        if file.extension().is_some_and(|extension| extension == "json") {
            list.push(file);
        }
    }
    if list.is_empty() {
        return Err(format!("{}: no .json files", path.display()));
    }
    list.sort();
    Ok(list)
}

/// Runs one file.
pub fn run_file(file: &Path) -> Totals {
    let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let mut totals = match std::fs::read(file) {
        Ok(text) => run_text(&text),
        Err(error) => Totals { failures: vec![error.to_string()], ..Totals::default() },
    };
    for failure in &mut totals.failures {
        *failure = format!("{name}: {failure}");
    }
    totals
}

/// Runs the text of one file.
pub fn run_text(text: &[u8]) -> Totals {
    let mut totals = Totals::default();
    let document: Value = match serde_json::from_slice(text) {
        Ok(document) => document,
        Err(error) => {
            totals.failures.push(format!("not JSON: {error}"));
            return totals;
        }
    };
    let kind = document["kind"].as_str().unwrap_or_default().to_owned();
    let Some(cases) = document["cases"].as_array() else {
        totals.failures.push("no cases".to_owned());
        return totals;
    };
    if cases.is_empty() {
        totals.failures.push("no cases".to_owned());
    }
    for case in cases {
        let (id, sub) = (case["id"].as_str().unwrap_or("?"), case["sub"].as_str().unwrap_or_default());
        let outcome = match plan(&kind, sub, case) {
            None => Err(format!("unknown kind {kind:?} or sub-kind {sub:?}")),
            Some(Plan::Later(feature)) => {
                *totals.later.entry(format!("{sub} ({feature})")).or_default() += 1;
                continue;
            }
            Some(Plan::Run(runner, keys)) => known_keys(case, keys).and_then(|()| runner(case)),
        };
        match outcome {
            Ok(Verdict::Passed) => totals.passed += 1,
            Ok(Verdict::Deviation(rule)) => *totals.deviations.entry(rule).or_default() += 1,
            Err(what) => totals.failures.push(format!("{id}: {what}")),
        }
    }
    totals
}

fn plan(kind: &str, sub: &str, case: &Value) -> Option<Plan> {
    match kind {
        "events" => events::plan(sub),
        "spec_checksum" => checksums::spec_plan(sub),
        "list_checksum" => checksums::list_plan(sub),
        "application_transform" => transform::plan(sub, case),
        "appproject_transform" => rules::project_plan(sub, case),
        "glob" => rules::glob_plan(sub),
        "jwt" => Some(Plan::Later("tokens")),
        "dn" => Some(Plan::Later("identity from certificates")),
        "redis_values" => rules::redis_plan(sub),
        "resource_request" => Some(Plan::Later("live resources")),
        "websocket" => Some(Plan::Later("gRPC over WebSocket")),
        "live_trace" => Some(Plan::Later("recorded runs")),
        "logs" => Some(Plan::Later("container logs")),
        "terminal" => Some(Plan::Later("web terminal")),
        "periodic" => Some(Plan::Later("periodic events")),
        "replication" => Some(Plan::Later("high availability")),
        _ => None,
    }
}

fn known_keys(case: &Value, keys: &[&str]) -> Result<(), String> {
    let object = case.as_object().ok_or("not an object")?;
    let known = |key: &str| matches!(key, "id" | "sub" | "description") || keys.contains(&key);
    match object.keys().find(|key| !known(key)) {
        Some(key) => Err(format!("unknown key {key:?}")),
        None => Ok(()),
    }
}

/// The string member `key`, empty where absent or `null`.
fn text<'v>(value: &'v Value, key: &str) -> &'v str {
    value[key].as_str().unwrap_or_default()
}

fn hex(text: &str) -> Result<Vec<u8>, String> {
    let digits = text.as_bytes();
    if !digits.len().is_multiple_of(2) {
        return Err("odd number of hex digits".to_owned());
    }
    digits
        .chunks(2)
        .map(|pair| {
            let digit = |byte: u8| char::from(byte).to_digit(16);
            let value = digit(pair[0]).zip(digit(pair[1])).map(|(high, low)| high << 4 | low);
            value.and_then(|value| u8::try_from(value).ok()).ok_or_else(|| "not a hex digit".to_owned())
        })
        .collect()
}

fn base64(text: &str) -> Result<Vec<u8>, String> {
    agent_core::event::base64_decode(text.as_bytes()).ok_or_else(|| "not base64".to_owned())
}

fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        // Writing to a String cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn equal<T: PartialEq + std::fmt::Debug>(what: &str, ours: T, recorded: T) -> Result<(), String> {
    if ours == recorded { Ok(()) } else { Err(format!("{what}: {ours:?} instead of {recorded:?}")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own_directory() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("vectors")
    }

    #[test]
    fn committed_vectors_pass() {
        let mut totals = Totals::default();
        for file in files(&own_directory()).expect("committed vectors") {
            totals.add(run_file(&file));
        }
        assert!(totals.failures.is_empty(), "{:#?}", totals.failures);
        assert!(totals.passed > 0);
    }

    #[test]
    fn what_is_not_known_fails() {
        for (text, words) in [
            ("[", "not JSON"),
            ("{}", "no cases"),
            (r#"{"kind":"events","cases":[]}"#, "no cases"),
            (r#"{"kind":"nonsense","cases":[{"id":"a","sub":"b"}]}"#, "unknown kind"),
            (r#"{"kind":"events","cases":[{"id":"a","sub":"nonsense"}]}"#, "sub-kind"),
            (r#"{"kind":"list_checksum","cases":[{"id":"a","sub":"set","surprise":1}]}"#, "unknown key"),
        ] {
            let totals = run_text(text.as_bytes());
            assert_eq!(totals.passed, 0);
            assert!(totals.failures.iter().any(|failure| failure.contains(words)), "{text}: {totals:?}");
        }
    }

    /// A runner that passes whatever it is given would not be noticed otherwise.
    #[test]
    fn changed_records_fail() {
        let parts = [
            "/sha256",
            "/canonical_b64",
            "/json",
            "/entry",
            "/request_update_json",
            "/event/type",
            "/event/data_text",
            "/event/attributes/dataschema/ce_uri",
            "/received/target",
            "/received/event_id",
            "/received/ack/event/type",
            "/results/0/class",
            "/results/0/objects_after/0/spec/source/path",
            "/results/0/objects_after/0/metadata/name",
            "/results/0/emitted/0/payload/resourceName",
            "/emitted/0/type",
            "/emitted/0/payload/spec/source/path",
            "/emitted/agent-1/0/resource_id",
            "/emitted/agent-1/0/payload/spec/source/path",
            "/output",
            "/output_json",
            "/entries/0/key",
            "/entries/0/decoded_text",
            "/steps/0/entries_after/0/key",
            "/steps/0/entries_after/0/decoded_text",
            "/steps/1/entries_after/0/decoded_text",
            "/steps/2/entries_after/0/decoded_text",
            "/emitted/0/data",
        ];
        for (kind, least) in [
            ("events", 25),
            ("spec_checksum", 25),
            ("list_checksum", 25),
            ("application_transform", 25),
            ("appproject_transform", 25),
            ("redis_values", 10),
        ] {
            let path = own_directory().join(kind).with_extension("json");
            let document: Value =
                serde_json::from_slice(&std::fs::read(path).expect("vectors")).expect("JSON");
            let mut changes = 0;
            for case in document["cases"].as_array().expect("cases") {
                for part in parts {
                    let mut case = case.clone();
                    let Some(Value::String(text)) = case.pointer_mut(part) else { continue };
                    let Some(at) = text.find(|c: char| c.is_ascii_alphanumeric()) else { continue };
                    let other = if text[at..].starts_with('1') { "2" } else { "1" };
                    text.replace_range(at..=at, other);
                    let totals =
                        run_text(serde_json::json!({ "kind": kind, "cases": [case] }).to_string().as_bytes());
                    let counted = totals.passed + totals.deviations.values().sum::<usize>();
                    assert_eq!(counted, 0, "{kind} {} with another {part}", case["id"]);
                    changes += totals.failures.len();
                }
            }
            assert!(changes > least, "{kind}: {changes}");
        }
    }
}
