//! Log lines in the reference's two formats: `trace` to `info` on stdout, `warning` and above on stderr.

use std::fmt::{self, Write as _};
use std::io::Write as _;
use std::time::SystemTime;

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, SubscriberExt as _};
use tracing_subscriber::registry::Registry;
use tracing_subscriber::{Layer, filter::LevelFilter, filter::Targets};

/// Subsystems that can have a level of their own; each is also the target of its events.
const SUBSYSTEMS: [&str; 4] = ["resource-proxy", "redis-proxy", "grpc-event", "informer-event-buffer"];

/// Installs the subscriber. Returns warnings for the log.
pub fn init(levels: &[String], format: &str) -> Result<Vec<String>, String> {
    let (targets, warnings) = targets(levels)?;
    let subscriber = Registry::default().with(Lines { json: format == "json" }.with_filter(targets));
    tracing::subscriber::set_global_default(subscriber).map_err(|error| error.to_string())?;
    Ok(warnings)
}

/// An entry without `=` sets the default and each subsystem that no earlier entry named.
fn targets(levels: &[String]) -> Result<(Targets, Vec<String>), String> {
    let mut warnings = Vec::new();
    let mut default = LevelFilter::INFO;
    let mut named: Vec<(&str, LevelFilter)> = Vec::new();
    for entry in levels {
        let mut parts = entry.split('=');
        match (parts.next(), parts.next(), parts.next()) {
            (Some(word), None, _) => default = level(word)?,
            (Some(subsystem), Some(word), None) => {
                let filter = level(word)?;
                match SUBSYSTEMS.iter().find(|known| **known == subsystem) {
                    Some(known) => named.push((known, filter)),
                    None => {
                        warnings.push(format!("--log-level {entry}: there is no subsystem {subsystem:?}"))
                    }
                }
            }
            _ => warnings.push(format!("--log-level {entry} is skipped: it has more than one \"=\"")),
        }
    }
    // Libraries speak up only when they are asked to in general, and never below debug: their traces hold bodies.
    let libraries = if default >= LevelFilter::DEBUG { LevelFilter::INFO } else { LevelFilter::WARN };
    let mut targets = Targets::new()
        .with_default(libraries.min(default))
        .with_target("principal", default)
        // Says without a name what the callers say with one.
        .with_target("kube_client::client::builder", LevelFilter::OFF);
    for subsystem in SUBSYSTEMS {
        targets = targets.with_target(subsystem, default);
    }
    for (subsystem, filter) in named {
        targets = targets.with_target(subsystem, filter);
    }
    Ok((targets, warnings))
}

fn level(word: &str) -> Result<LevelFilter, String> {
    Ok(match word.to_ascii_lowercase().as_str() {
        "trace" => LevelFilter::TRACE,
        "debug" => LevelFilter::DEBUG,
        "info" | "" => LevelFilter::INFO,
        // `warn` is what everyone types; the reference wants `warning`.
        "warning" | "warn" => LevelFilter::WARN,
        "error" | "fatal" => LevelFilter::ERROR,
        _ => return Err(format!("--log-level {word:?}: use trace, debug, info, warning, error or fatal")),
    })
}

struct Lines {
    json: bool,
}

impl<S: Subscriber> Layer<S> for Lines {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let level = event.metadata().level();
        let word = match *level {
            Level::TRACE => "trace",
            Level::DEBUG => "debug",
            Level::INFO => "info",
            Level::WARN => "warning",
            Level::ERROR => "error",
        };
        let mut fields = Fields::default();
        event.record(&mut fields);
        let line = render(self.json, &timestamp(SystemTime::now()), word, fields);
        // Nobody reads the log any more: not a reason to stop serving agents.
        let _ = if *level <= Level::WARN {
            std::io::stderr().write_all(line.as_bytes())
        } else {
            std::io::stdout().write_all(line.as_bytes())
        };
    }
}

#[derive(Default)]
struct Fields {
    message: String,
    others: Vec<(&'static str, String)>,
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.push(field, format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.push(field, value.to_owned());
    }
}

impl Fields {
    fn push(&mut self, field: &Field, value: String) {
        if field.name() == "message" {
            self.message = value;
        } else {
            self.others.push((field.name(), value));
        }
    }
}

fn render(json: bool, time: &str, level: &str, mut fields: Fields) -> String {
    fields.others.sort();
    let mut out = String::with_capacity(160);
    // Writing to a String cannot fail.
    if json {
        let _ = write!(out, "{{\"level\":\"{level}\",\"msg\":{},\"time\":\"{time}\"", quote(&fields.message));
        for (key, value) in &fields.others {
            let _ = write!(out, ",{}:{}", quote(key), quote(value));
        }
        out.push_str("}\n");
    } else {
        let _ = write!(out, "time=\"{time}\" level={level} msg={}", quote(&fields.message));
        for (key, value) in &fields.others {
            let plain = !value.is_empty()
                && value.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._/@^+".contains(&b));
            if plain {
                let _ = write!(out, " {key}={value}");
            } else {
                let _ = write!(out, " {key}={}", quote(value));
            }
        }
        out.push('\n');
    }
    out
}

/// A JSON string: it keeps a line a line, whatever a peer put into it.
fn quote(text: &str) -> String {
    // A string cannot fail to encode.
    serde_json::to_string(text).unwrap_or_default()
}

fn timestamp(now: SystemTime) -> String {
    let seconds = now.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let wall = agent_core::time::Wall { epoch_millis_at_zero: seconds * 1000 };
    wall.rfc3339(agent_core::time::Instant::ZERO)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_formats() {
        let fields = || Fields {
            message: "a \"b\"\nc".into(),
            others: vec![("name", "x y".into()), ("agent", "agent-1".into())],
        };
        assert_eq!(
            render(false, "T", "info", fields()),
            "time=\"T\" level=info msg=\"a \\\"b\\\"\\nc\" agent=agent-1 name=\"x y\"\n"
        );
        let json: serde_json::Value = serde_json::from_str(&render(true, "T", "warning", fields())).unwrap();
        assert_eq!(json["msg"], "a \"b\"\nc");
        assert_eq!(json["level"], "warning");
    }

    #[test]
    fn levels() {
        let list = |words: &[&str]| targets(&words.iter().map(|w| (*w).to_owned()).collect::<Vec<_>>());
        let (targets, warnings) = list(&["grpc-event=trace", "Warning", "nobody=info", "a=b=c"]).unwrap();
        assert_eq!(warnings.len(), 2);
        assert!(targets.would_enable("grpc-event", &Level::TRACE));
        assert!(!targets.would_enable("principal::hub", &Level::INFO));
        assert!(!targets.would_enable("redis-proxy", &Level::INFO));
        assert!(list(&["panic"]).is_err());
    }
}
