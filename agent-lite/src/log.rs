//! Log lines: a `tracing` subscriber that writes logfmt or JSON and nothing else.
//!
//! Up to info to stdout, warnings and errors to stderr, one write for each line. Levels can be set for the subsystems
//! that the reference agent knows; they are our events' targets. Events of libraries are dropped: they describe
//! frames, not the product.

use std::fmt::{self, Write as _};
use std::io::Write as _;
use std::time::{SystemTime, UNIX_EPOCH};

use agent_core::time::{Instant, Wall};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// Which lines are written. The order of the subsystems is [`SUBSYSTEMS`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Levels {
    global: Level,
    /// Nothing below an error: `--log-level fatal`.
    silent: bool,
    subsystems: [Option<Level>; SUBSYSTEMS.len()],
}

impl Levels {
    /// Reads `--log-level`; the second value names unknown subsystems.
    pub(crate) fn parse(entries: &[String]) -> Result<(Self, Vec<String>), String> {
        let mut levels = Self { global: Level::INFO, silent: false, subsystems: [None; SUBSYSTEMS.len()] };
        let mut unknown = Vec::new();
        for entry in entries {
            let (subsystem, word) = match entry.split_once('=') {
                Some((subsystem, word)) => (Some(subsystem), word),
                None => (None, &**entry),
            };
            let level = match word {
                "" | "info" => Level::INFO,
                "fatal" | "error" => Level::ERROR,
                "warning" | "warn" => Level::WARN,
                "debug" => Level::DEBUG,
                "trace" => Level::TRACE,
                other => {
                    return Err(format!(
                        "--log-level {other:?}: must be fatal, error, warning, info, debug or trace"
                    ));
                }
            };
            match subsystem {
                None => {
                    levels.global = level;
                    levels.silent = word == "fatal";
                }
                Some(name) => match SUBSYSTEMS.iter().position(|known| *known == name) {
                    Some(at) => levels.subsystems[at] = Some(level),
                    None => unknown.push(name.to_owned()),
                },
            }
        }
        Ok((levels, unknown))
    }

    fn admits(&self, target: &str, level: Level) -> bool {
        if let Some(at) = SUBSYSTEMS.iter().position(|known| *known == target) {
            return level <= self.subsystems[at].unwrap_or(self.global) && !self.silent;
        }
        let ours = target.starts_with("agent_lite") || target.starts_with("agent_core");
        ours && level <= self.global && !self.silent
    }
}

/// Starts logging for the process.
pub(crate) fn install(levels: Levels, json: bool) {
    // A second call is a bug of `main`; the first subscriber stays.
    let _ = tracing::subscriber::set_global_default(Lines { levels, json });
}

/// The subsystems that can have a level of their own.
const SUBSYSTEMS: [&str; 4] = ["resource-proxy", "redis-proxy", "grpc-event", "informer-event-buffer"];

/// Target of events about what the peer says and is told.
pub(crate) const GRPC_EVENT: &str = "grpc-event";

struct Lines {
    levels: Levels,
    json: bool,
}

impl Subscriber for Lines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event() && self.levels.admits(metadata.target(), *metadata.level())
    }

    fn event(&self, event: &Event<'_>) {
        let mut fields = Fields { message: String::new(), rest: Vec::new() };
        event.record(&mut fields);
        fields.rest.sort_unstable_by_key(|(name, _)| *name);
        let level = *event.metadata().level();
        let word = match level {
            Level::ERROR => "error",
            Level::WARN => "warning",
            Level::INFO => "info",
            Level::DEBUG => "debug",
            Level::TRACE => "trace",
        };
        let time = timestamp(SystemTime::now());
        let line = if self.json { json_line(&time, word, &fields) } else { text_line(&time, word, &fields) };
        // A log that cannot be written is no reason to stop.
        let _ = if level <= Level::WARN {
            std::io::stderr().lock().write_all(line.as_bytes())
        } else {
            std::io::stdout().lock().write_all(line.as_bytes())
        };
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

struct Fields {
    message: String,
    rest: Vec<(&'static str, String)>,
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let mut text = String::new();
        // Writing to a String cannot fail.
        let _ = write!(text, "{value:?}");
        self.push(field.name(), text);
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.push(field.name(), value.to_owned());
    }
}

impl Fields {
    fn push(&mut self, name: &'static str, text: String) {
        if name == "message" {
            self.message = text;
        } else {
            self.rest.push((name, text));
        }
    }
}

fn text_line(time: &str, level: &str, fields: &Fields) -> String {
    let mut line = String::with_capacity(160);
    let _ = write!(line, "time=\"{time}\" level={level} msg=");
    push_quoted(&mut line, &fields.message);
    for (name, value) in &fields.rest {
        let _ = write!(line, " {name}=");
        let plain = |c: char| c.is_ascii_alphanumeric() || "-._/@^+:,".contains(c);
        if value.is_empty() || !value.chars().all(plain) {
            push_quoted(&mut line, value);
        } else {
            line.push_str(value);
        }
    }
    line.push('\n');
    line
}

fn json_line(time: &str, level: &str, fields: &Fields) -> String {
    let mut line = String::with_capacity(160);
    let _ = write!(line, "{{\"level\":\"{level}\",\"msg\":");
    push_quoted(&mut line, &fields.message);
    let _ = write!(line, ",\"time\":\"{time}\"");
    for (name, value) in &fields.rest {
        let _ = write!(line, ",\"{name}\":");
        push_quoted(&mut line, value);
    }
    line.push_str("}\n");
    line
}

/// A JSON string; logfmt readers take it too. A line never holds a control character of somebody's message.
fn push_quoted(line: &mut String, text: &str) {
    line.push('"');
    for c in text.chars() {
        match c {
            '"' => line.push_str("\\\""),
            '\\' => line.push_str("\\\\"),
            '\n' => line.push_str("\\n"),
            c if c.is_control() => {
                let _ = write!(line, "\\u{:04x}", u32::from(c));
            }
            c => line.push(c),
        }
    }
    line.push('"');
}

/// RFC 3339 in UTC, whole seconds.
pub(crate) fn timestamp(time: SystemTime) -> String {
    let seconds = time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    Wall { epoch_millis_at_zero: seconds.saturating_mul(1000) }.rfc3339(Instant::ZERO)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<(Levels, Vec<String>), String> {
        Levels::parse(&text.split(',').map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn levels_from_left_to_right() {
        let (levels, unknown) = parse("grpc-event=debug,error,nobody=info").unwrap();
        assert_eq!(unknown, ["nobody"]);
        assert!(levels.admits("grpc-event", Level::DEBUG));
        assert!(!levels.admits("redis-proxy", Level::WARN));
        assert!(levels.admits("agent_lite::shell", Level::ERROR));
        assert!(!levels.admits("h2::client", Level::ERROR));
        assert!(!parse("fatal").unwrap().0.admits("agent_lite", Level::ERROR));
        assert!(parse("").unwrap().0.admits("agent_lite", Level::INFO));
        assert!(parse("warn").unwrap().0.admits("agent_lite", Level::WARN));
        assert!(parse("panic").unwrap_err().contains("fatal, error"));
    }

    #[test]
    fn lines() {
        let fields = Fields {
            message: "say \"hi\"\n".into(),
            rest: vec![("a", "x/y".into()), ("b", "two words\u{1b}".into()), ("c", String::new())],
        };
        assert_eq!(
            text_line("T", "info", &fields),
            "time=\"T\" level=info msg=\"say \\\"hi\\\"\\n\" a=x/y b=\"two words\\u001b\" c=\"\"\n"
        );
        assert_eq!(
            json_line("T", "info", &fields),
            "{\"level\":\"info\",\"msg\":\"say \\\"hi\\\"\\n\",\"time\":\"T\",\"a\":\"x/y\",\"b\":\"two words\\u001b\",\"c\":\"\"}\n"
        );
    }
}
