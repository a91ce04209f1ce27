//! Patterns of names: the reference's glob dialect, without separators, anchored at both ends.
//!
//! `*` and `**` any run of characters, `?` one, `[abc]`, `[a-z]`, `[!…]` one of a class, `{a,b}` alternatives, `\` takes the
//! next character literally. The dialect has oddities that decide which site gets what, so they are kept:
//!
//! - `[^a]` is no negation. A class is either one range `[x-y]` or a list; a list takes `-` literally when it does not come second.
//! - `[]`, `[!]`, `[a-]`, `[z-a]` and an unclosed `[` are no patterns. An unclosed `{a` is `{a}`; a `\` at the end is dropped.
//! - A lone `?` or negated class also matches the empty text.
//! - `a*b` alone asks for the two ends only, which may overlap: `ab*ba` matches `aba`.
//! - A run of literals and one-character matchers compares the first *byte* of what each one-character matcher takes,
//!   so that it fails where the text is not ASCII.
//!
//! Not kept: an empty alternative beside other parts, with which the reference crashes or never matches.
//!
//! A pattern comes from a person with rights on the hub, the text from names: matching takes time proportional to
//! pattern times text, whatever the pattern.

use alloc::vec;
use alloc::vec::Vec;

/// A compiled pattern.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Glob(Vec<Part>);

#[derive(Clone, PartialEq, Eq, Debug)]
enum Part {
    /// Any run of characters.
    Run,
    One(One),
    Text(Vec<u8>),
    Either(Vec<Vec<Self>>),
    /// Neighbours of known length, among them a one-character matcher.
    Row(Vec<Self>),
}

/// Matches one character.
#[derive(Clone, PartialEq, Eq, Debug)]
enum One {
    Any,
    List { chars: Vec<char>, not: bool },
    Range { low: char, high: char, not: bool },
}

/// The text is no pattern, and matches nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NotAPattern;

impl core::fmt::Display for NotAPattern {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("not a pattern")
    }
}

impl core::error::Error for NotAPattern {}

/// Whether `pattern` is one and matches the whole of `text`.
pub fn matches(pattern: &str, text: &str) -> bool {
    Glob::parse(pattern).is_ok_and(|glob| glob.is_match(text))
}

/// Whether an entry of `list` matches `text`: `--allowed-namespaces`, and `sourceNamespaces` of a project.
///
/// An entry between slashes is a regular expression, which `regex` decides (`false` also for what it does not
/// understand); where that does not match, the entry is tried as a glob as well.
pub fn list_matches<'p>(
    list: impl IntoIterator<Item = &'p str>,
    text: &str,
    regex: &dyn Fn(&str, &str) -> bool,
) -> bool {
    list.into_iter().any(|entry| {
        expression(entry).is_some_and(|expression| regex(expression, text)) || matches(entry, text)
    })
}

/// The regular expression of an entry between slashes. A single slash is a glob.
pub fn expression(entry: &str) -> Option<&str> {
    entry.strip_prefix('/')?.strip_suffix('/')
}

impl Glob {
    /// Compiles a pattern.
    pub fn parse(pattern: &str) -> Result<Self, NotAPattern> {
        let mut parser = Parser { rest: pattern, depth: 0 };
        let parts = parser.sequence()?;
        Ok(Self(with_rows(parts)))
    }

    /// Whether the pattern matches the whole of `text`.
    pub fn is_match(&self, text: &str) -> bool {
        matches_alone(&self.0, text.as_bytes())
    }
}

struct Parser<'p> {
    rest: &'p str,
    depth: usize,
}

impl Parser<'_> {
    fn next(&mut self) -> Option<char> {
        let mut chars = self.rest.chars();
        let next = chars.next();
        self.rest = chars.as_str();
        next
    }

    fn peek(&self) -> Option<char> {
        self.rest.chars().next()
    }

    fn next_if(&mut self, wanted: char) -> bool {
        let found = self.peek() == Some(wanted);
        if found {
            self.next();
        }
        found
    }

    /// Parts up to the end, or inside braces up to `,` or `}`, which stays.
    fn sequence(&mut self) -> Result<Vec<Part>, NotAPattern> {
        let mut parts = Vec::new();
        loop {
            match self.peek() {
                None => return Ok(parts),
                Some(',' | '}') if self.depth > 0 => return Ok(parts),
                Some('*') => {
                    self.next();
                    // A run after a run adds nothing.
                    if parts.last() != Some(&Part::Run) {
                        parts.push(Part::Run);
                    }
                }
                Some('?') => {
                    self.next();
                    parts.push(Part::One(One::Any));
                }
                Some('[') => {
                    self.next();
                    parts.push(Part::One(self.class()?));
                }
                Some('{') => {
                    self.next();
                    parts.push(Part::Either(self.alternatives()?));
                }
                Some(_) => {
                    let text = self.literal(if self.depth > 0 { "?*[{},".chars() } else { "?*[{".chars() });
                    if !text.is_empty() {
                        parts.push(Part::Text(text.into_bytes()));
                    }
                }
            }
        }
    }

    fn alternatives(&mut self) -> Result<Vec<Vec<Part>>, NotAPattern> {
        if self.depth == DEPTH {
            return Err(NotAPattern);
        }
        self.depth += 1;
        let mut list = vec![self.sequence()?];
        while self.next_if(',') {
            list.push(self.sequence()?);
        }
        // Absent at the end of the pattern, which closes the braces too.
        self.next_if('}');
        self.depth -= 1;
        Ok(list)
    }

    /// Text up to one of `ends`, with escapes resolved.
    fn literal(&mut self, ends: core::str::Chars<'_>) -> alloc::string::String {
        let mut text = alloc::string::String::new();
        while let Some(next) = self.peek() {
            if ends.clone().any(|end| end == next) {
                break;
            }
            self.next();
            match next {
                '\\' => text.extend(self.next()),
                next => text.push(next),
            }
        }
        text
    }

    /// What follows `[`.
    fn class(&mut self) -> Result<One, NotAPattern> {
        let not = self.next_if('!');
        let mut chars = self.rest.chars();
        let (low, dash) = (chars.next(), chars.next());
        let one = match (low, dash) {
            (Some(low), Some('-')) => {
                let high = chars.next().ok_or(NotAPattern)?;
                self.rest = chars.as_str();
                if high < low {
                    return Err(NotAPattern);
                }
                One::Range { low, high, not }
            }
            _ => {
                let chars: Vec<char> = self.literal("]".chars()).chars().collect();
                if chars.is_empty() {
                    return Err(NotAPattern);
                }
                One::List { chars, not }
            }
        };
        if self.next_if(']') { Ok(one) } else { Err(NotAPattern) }
    }
}

/// Joins neighbours of known length into rows, where that makes a difference.
fn with_rows(parts: Vec<Part>) -> Vec<Part> {
    let mut out = Vec::with_capacity(parts.len());
    let mut run: Vec<Part> = Vec::new();
    for part in parts {
        let part = match part {
            Part::Either(list) => Part::Either(list.into_iter().map(with_rows).collect()),
            part => part,
        };
        if length(&part).is_some() {
            run.push(part);
        } else {
            close_run(&mut out, &mut run);
            out.push(part);
        }
    }
    close_run(&mut out, &mut run);
    out
}

fn close_run(out: &mut Vec<Part>, run: &mut Vec<Part>) {
    let has_one = run.iter().any(|part| !matches!(part, Part::Text(_)));
    // Equal ones are counted by the reference instead, character by character.
    let uniform = run.iter().all(|part| {
        Some(part) == run.first() && matches!(part, Part::One(One::Any | One::List { not: true, .. }))
    });
    if run.len() > 1 && has_one && !uniform {
        out.push(Part::Row(core::mem::take(run)));
    } else {
        out.append(run);
    }
}

/// How many characters a part takes, if that is known and not none.
fn length(part: &Part) -> Option<usize> {
    match part {
        Part::Run => None,
        Part::One(_) => Some(1),
        Part::Text(text) => Some(chars(text).count()),
        Part::Row(parts) => total(parts),
        Part::Either(list) => {
            let mut lengths = list.iter().map(|parts| total(parts));
            let first = lengths.next()??;
            lengths.all(|length| length == Some(first)).then_some(first)
        }
    }
    .filter(|length| *length > 0)
}

fn total(parts: &[Part]) -> Option<usize> {
    parts.iter().try_fold(0, |sum, part| Some(sum + length(part)?))
}

/// Whether `parts` match the whole of `text`, where nothing stands beside them.
fn matches_alone(parts: &[Part], text: &[u8]) -> bool {
    match parts {
        // The reference reads U+FFFD from an empty text, which a negated class does not list.
        [Part::One(one)] if text.is_empty() => one.takes(char::REPLACEMENT_CHARACTER),
        [Part::Text(start), Part::Run, Part::Text(end)] => text.starts_with(start) && text.ends_with(end),
        [Part::Either(list)] => list.iter().any(|parts| matches_alone(parts, text)),
        parts => {
            let mut ends = vec![false; text.len() + 1];
            ends[0] = true;
            for part in parts {
                ends = step(part, text, &ends);
            }
            ends[text.len()]
        }
    }
}

/// Where in `text` a part can end that starts at one of `starts`.
fn step(part: &Part, text: &[u8], starts: &[bool]) -> Vec<bool> {
    let mut ends = vec![false; text.len() + 1];
    let each = starts.iter().enumerate().filter(|(_, start)| **start).map(|(at, _)| at);
    match part {
        Part::Run => {
            if let Some(first) = starts.iter().position(|start| *start) {
                let mut at = first;
                ends[at] = true;
                for (_, width) in chars(&text[first..]) {
                    at += width;
                    ends[at] = true;
                }
            }
        }
        Part::One(one) => {
            for at in each {
                if let Some((char, width)) = chars(&text[at..]).next()
                    && one.takes(char)
                {
                    ends[at + width] = true;
                }
            }
        }
        Part::Text(literal) => {
            for at in each {
                if text[at..].starts_with(literal) {
                    ends[at + literal.len()] = true;
                }
            }
        }
        Part::Either(list) => {
            for parts in list {
                let mut of_one = starts.to_vec();
                for part in parts {
                    of_one = step(part, text, &of_one);
                }
                for (end, of_one) in ends.iter_mut().zip(of_one) {
                    *end |= of_one;
                }
            }
        }
        Part::Row(parts) => {
            let length = total(parts).unwrap_or_default();
            for at in each {
                let taken = chars(&text[at..]).take(length);
                let (count, width) = taken.fold((0, 0), |(count, sum), (_, width)| (count + 1, sum + width));
                if count == length && row(parts, &text[at..at + width]) {
                    ends[at + width] = true;
                }
            }
        }
    }
    ends
}

/// A row as the reference compares it: each part gets its characters, the last of them by its first byte only.
fn row(parts: &[Part], text: &[u8]) -> bool {
    let mut at = 0;
    for part in parts {
        let length = length(part).unwrap_or_default();
        let before: usize = chars(&text[at..]).take(length - 1).map(|(_, width)| width).sum();
        let end = at + before + 1;
        if end > text.len() || !matches_alone(core::slice::from_ref(part), &text[at..end]) {
            return false;
        }
        at = end;
    }
    true
}

impl One {
    fn takes(&self, char: char) -> bool {
        match self {
            Self::Any => true,
            Self::List { chars, not } => chars.contains(&char) != *not,
            Self::Range { low, high, not } => (*low..=*high).contains(&char) != *not,
        }
    }
}

/// The characters of `text` and their widths. What is no UTF-8 is U+FFFD, one per byte.
fn chars(text: &[u8]) -> impl Iterator<Item = (char, usize)> + '_ {
    let mut at = 0;
    core::iter::from_fn(move || {
        let rest = text.get(at..).filter(|rest| !rest.is_empty())?;
        let head = &rest[..rest.len().min(4)];
        let valid = match core::str::from_utf8(head) {
            Ok(text) => text,
            Err(error) => core::str::from_utf8(&head[..error.valid_up_to()]).unwrap_or_default(),
        };
        let (char, width) =
            valid.chars().next().map_or((char::REPLACEMENT_CHARACTER, 1), |char| (char, char.len_utf8()));
        at += width;
        Some((char, width))
    })
}

/// Braces in braces beyond this are no pattern: nesting is what parsing and matching recurse over.
const DEPTH: usize = 32;

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::String;

    #[test]
    fn one_pattern() {
        for (pattern, text, expected) in [
            ("", "", true),
            ("", "a", false),
            ("*", "", true),
            ("**", "a/b", true),
            ("agent-*", "agent-", true),
            ("agent-*", "Agent-1", false),
            ("a*b*c", "aXbYc", true),
            ("a*b*c", "acb", false),
            ("agent-?", "agent-", false),
            ("agent-?", "agent-12", false),
            ("agent-[0-3]", "agent-2", true),
            ("agent-[!0-3]", "agent-2", false),
            ("agent-[!0-3]", "agent-x", true),
            ("{shop,turbine}-*", "turbine-9", true),
            ("{shop,turbine-{a,b}}?", "turbine-bx", true),
            ("{shop", "shop", true),
            ("{}", "", true),
            ("{,x}", "", true),
            ("a}", "a}", true),
            ("a,b", "a,b", true),
            ("{a\\,b,c}", "a,b", true),
            ("a\\*", "a*", true),
            ("a\\", "a", true),
            ("!a", "a", false),
            ("!a", "!a", true),
            // Oddities of the dialect.
            ("[^a-c]", "^", true),
            ("[^a-c]", "x", false),
            ("[abc-e]", "d", false),
            ("[-a]", "-", true),
            ("[]-a]", "_", true),
            ("[\\]]", "]", true),
            ("[!!a]", "!", false),
            ("?", "", true),
            ("[!1]", "", true),
            ("{[!a-c],b}", "", true),
            ("a[!1]", "a", false),
            ("ab*ba", "aba", true),
            ("?x", "öx", false),
            ("[ä-ü]x", "öx", false),
            ("x[ä-ü]", "xö", false),
            ("x[!a]", "xö", true),
            ("???", "äöü", true),
            ("ü*", "über", true),
        ] {
            assert_eq!(matches(pattern, text), expected, "{pattern} {text}");
        }
    }

    #[test]
    fn no_patterns() {
        for pattern in ["[", "[a", "[]", "[!]", "[a-", "[a-]", "[z-a]", "x[a-bc]", "{a,[}"] {
            assert_eq!(Glob::parse(pattern), Err(NotAPattern), "{pattern}");
        }
        assert!(Glob::parse(&"{".repeat(32)).is_ok());
        assert!(Glob::parse(&"{".repeat(33)).is_err());
    }

    #[test]
    fn a_hostile_pattern_takes_no_time() {
        let pattern = "*a{*a,*b}".repeat(20);
        let text: String = "a".repeat(250);
        assert!(!matches(&(pattern + "c"), &text));
    }

    #[test]
    fn lists() {
        let exactly = |expression: &str, text: &str| expression == text;
        let admits = |list: &[&str], text: &str| list_matches(list.iter().copied(), text, &exactly);
        assert!(!admits(&[], ""));
        assert!(admits(&["a", "b*"], "bc"));
        assert!(admits(&["/a/"], "a"));
        assert!(admits(&["/a/"], "/a/"));
        assert!(admits(&["[", " a", "a"], "a"));
        assert!(admits(&["/"], "/"));
        assert!(!admits(&["/"], ""));
        assert!(admits(&["//"], ""));
        // Not a denial here.
        assert!(admits(&["!a", "*"], "a"));
    }
}
