//! JSON as bytes: reading members, splicing, and the canonical form that checksums hash.
//!
//! A *raw value* is the exact text of one valid JSON value without white space around it, borrowed from its
//! document. Text is bytes, not `str`: Kubernetes objects may hold invalid UTF-8, which the reference reads as
//! U+FFFD, one per byte. Nothing here recurses over the input, and nesting is limited, so that no document can
//! exhaust the stack.

use alloc::borrow::Cow;
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

/// Where and why a text is not the JSON that was asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Error {
    /// What was expected.
    pub reason: &'static str,
    /// Byte offset in the text that was handed in.
    pub at: usize,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "invalid JSON at byte {}: {}", self.at, self.reason)
    }
}

impl core::error::Error for Error {}

/// Checks that `text` is exactly one JSON value and returns it without the white space around it.
pub fn value(text: &[u8]) -> Result<&[u8], Error> {
    let mut cursor = Cursor { text, at: 0 };
    let value = cursor.value(None)?;
    cursor.end()?;
    Ok(value)
}

/// A key and its raw value.
pub type Member<'a> = (Cow<'a, str>, &'a [u8]);

/// The members of `object` in document order. Equal keys are all listed: the last one counts.
pub fn members(object: &[u8]) -> Result<Vec<Member<'_>>, Error> {
    let mut list = Vec::new();
    visit_members(object, &mut |key, value| list.push((key, value)))?;
    Ok(list)
}

/// Calls `visit` with each member of `object` in document order.
pub fn visit_members<'a>(
    object: &'a [u8],
    visit: &mut dyn FnMut(Cow<'a, str>, &'a [u8]),
) -> Result<(), Error> {
    let mut cursor = Cursor { text: object, at: 0 };
    cursor.space();
    if cursor.peek() != Some(b'{') {
        return Err(cursor.error("expected an object"));
    }
    cursor.at += 1;
    cursor.space();
    if cursor.peek() == Some(b'}') {
        cursor.at += 1;
        return cursor.end();
    }
    loop {
        let key = cursor.key()?;
        let value = cursor.value(None)?;
        visit(decode(key), value);
        cursor.space();
        match cursor.next() {
            Some(b',') => {}
            Some(b'}') => return cursor.end(),
            _ => return Err(cursor.error("expected ',' or '}'")),
        }
    }
}

/// The member `key` of `object`; `null` counts as absent.
pub fn member<'a>(object: &'a [u8], key: &str) -> Result<Option<&'a [u8]>, Error> {
    let mut found = None;
    visit_members(object, &mut |name, value| {
        if name == key {
            found = present(value);
        }
    })?;
    Ok(found)
}

/// The value at `path`, through objects only; `null` counts as absent.
pub fn at_path<'a>(object: &'a [u8], path: &[&str]) -> Result<Option<&'a [u8]>, Error> {
    let mut current = object;
    for key in path {
        match member(current, key)? {
            Some(value) => current = value,
            None => return Ok(None),
        }
    }
    Ok(Some(current))
}

/// `None` for `null`.
pub fn present(raw: &[u8]) -> Option<&[u8]> {
    (raw != b"null").then_some(raw)
}

/// Whether a raw value is an object.
pub fn is_object(raw: &[u8]) -> bool {
    raw.first() == Some(&b'{')
}

/// The text of a raw value that is a string.
pub fn string(raw: &[u8]) -> Option<Cow<'_, str>> {
    (raw.len() >= 2 && raw[0] == b'"').then(|| decode(raw))
}

/// Appends `text` as a JSON string.
pub fn push_string(out: &mut Vec<u8>, text: &str) {
    out.push(b'"');
    for byte in text.bytes() {
        match byte {
            b'"' => out.extend_from_slice(b"\\\""),
            b'\\' => out.extend_from_slice(b"\\\\"),
            0..=0x1f => out.extend_from_slice(&unicode_escape(byte)),
            _ => out.push(byte),
        }
    }
    out.push(b'"');
}

/// Writes one JSON object member by member.
#[derive(Debug)]
pub struct ObjectWriter<'o> {
    out: &'o mut Vec<u8>,
    first: bool,
}

impl<'o> ObjectWriter<'o> {
    /// Opens an object at the end of `out`.
    pub fn new(out: &'o mut Vec<u8>) -> Self {
        out.push(b'{');
        Self { out, first: true }
    }

    /// Adds a member whose value is raw.
    pub fn raw(&mut self, key: &str, value: &[u8]) {
        self.key(key).extend_from_slice(value);
    }

    /// Adds a member whose value is a string.
    pub fn string(&mut self, key: &str, value: &str) {
        push_string(self.key(key), value);
    }

    /// Writes the key; the caller appends exactly one value to what is returned.
    pub fn key(&mut self, key: &str) -> &mut Vec<u8> {
        if !self.first {
            self.out.push(b',');
        }
        self.first = false;
        push_string(self.out, key);
        self.out.push(b':');
        self.out
    }

    /// Closes the object.
    pub fn end(self) {
        self.out.push(b'}');
    }
}

/// One change for [`edit`].
#[derive(Clone, Copy, Debug)]
pub struct Edit<'e> {
    /// Keys from the outermost object inwards; never empty.
    pub path: &'e [&'e str],
    /// The raw value to put there; `None` removes the member.
    pub value: Option<&'e [u8]>,
}

/// Copies `object` with changes. Members that no edit names stay byte for byte and in order. Missing objects on
/// the way to a new value are created; what is there and is no object is replaced. Edits must not overlap.
pub fn edit(object: &[u8], edits: &[Edit<'_>]) -> Result<Vec<u8>, Error> {
    let added: usize = edits.iter().map(|e| e.value.map_or(0, <[u8]>::len) + 64).sum();
    let mut out = Vec::with_capacity(object.len() + added);
    let edits: Vec<&Edit<'_>> = edits.iter().filter(|e| !e.path.is_empty()).collect();
    rebuild(object, &edits, 0, &mut out)?;
    Ok(out)
}

/// Copies `object` with the member `key` set to a raw value.
pub fn set_member(object: &[u8], key: &str, value: &[u8]) -> Result<Vec<u8>, Error> {
    edit(object, &[Edit { path: &[key], value: Some(value) }])
}

/// Copies `object` without the member `key`.
pub fn remove_member(object: &[u8], key: &str) -> Result<Vec<u8>, Error> {
    edit(object, &[Edit { path: &[key], value: None }])
}

/// Feeds the canonical form of `text` to `out`, piece by piece: what the reference's JSON encoder writes for the
/// decoded value (docs/protocol.md, "Checksums"). Memory is proportional to the number of values in `text`.
pub fn canonical(text: &[u8], out: &mut dyn FnMut(&[u8])) -> Result<(), Error> {
    canonical_except(text, "", out)
}

/// [`canonical`] without the top-level member `except` (none if empty).
pub(crate) fn canonical_except(text: &[u8], except: &str, out: &mut dyn FnMut(&[u8])) -> Result<(), Error> {
    let mut tape = Tape::default();
    let mut cursor = Cursor { text, at: 0 };
    cursor.value(Some(&mut tape))?;
    cursor.end()?;
    let nodes = &tape.nodes;

    let mut open: Vec<Frame<'_>> = Vec::new();
    let mut current = 0;
    loop {
        // One value begins.
        let node = nodes[current];
        let raw = &text[node.start..node.end];
        match raw[0] {
            b'{' => {
                let mut list = Vec::new();
                let mut child = current + 1;
                while child < node.next {
                    // Children of an object alternate: key, value.
                    let key = decode(&text[nodes[child].start..nodes[child].end]);
                    if !(open.is_empty() && !except.is_empty() && key == except) {
                        list.push((key, child + 1));
                    }
                    child = nodes[child + 1].next;
                }
                // Of equal keys the last one counts: it sorts first, and the others are dropped.
                list.sort_unstable_by(|a, b| a.0.as_bytes().cmp(b.0.as_bytes()).then(b.1.cmp(&a.1)));
                list.dedup_by(|later, kept| later.0 == kept.0);
                out(b"{");
                open.push(Frame { close: b"}", first: true, rest: Rest::Members(list.into_iter()) });
            }
            b'[' => {
                out(b"[");
                let rest = Rest::Elements { next: current + 1, end: node.next };
                open.push(Frame { close: b"]", first: true, rest });
            }
            b'"' => canonical_string(&decode(raw), out),
            b'-' | b'0'..=b'9' => canonical_number(raw, node.start, out)?,
            _ => out(raw),
        }
        // Find the next one.
        loop {
            let Some(frame) = open.last_mut() else { return Ok(()) };
            let (key, next) = match &mut frame.rest {
                Rest::Members(list) => match list.next() {
                    Some((key, value)) => (Some(key), Some(value)),
                    None => (None, None),
                },
                Rest::Elements { next, end } => {
                    let element = (next < end).then_some(*next);
                    if let Some(element) = element {
                        *next = nodes[element].next;
                    }
                    (None, element)
                }
            };
            let Some(next) = next else {
                out(frame.close);
                open.pop();
                continue;
            };
            if !frame.first {
                out(b",");
            }
            frame.first = false;
            if let Some(key) = key {
                canonical_string(&key, out);
                out(b":");
            }
            current = next;
            break;
        }
    }
}

/// Whether two texts hold the same value. Invalid text equals nothing that differs from it.
pub fn same(a: &[u8], b: &[u8]) -> bool {
    if a == b {
        return true;
    }
    let (mut left, mut right) = (Vec::with_capacity(a.len()), Vec::with_capacity(b.len()));
    canonical(a, &mut |piece| left.extend_from_slice(piece)).is_ok()
        && canonical(b, &mut |piece| right.extend_from_slice(piece)).is_ok()
        && left == right
}

struct Frame<'a> {
    close: &'static [u8],
    first: bool,
    rest: Rest<'a>,
}

enum Rest<'a> {
    Members(alloc::vec::IntoIter<(Cow<'a, str>, usize)>),
    Elements { next: usize, end: usize },
}

/// Values in document order; `next` is the index after the value's whole subtree, so that skipping is one step.
#[derive(Default)]
struct Tape {
    nodes: Vec<Node>,
    open: Vec<usize>,
}

#[derive(Clone, Copy)]
struct Node {
    start: usize,
    end: usize,
    next: usize,
}

impl Tape {
    fn leaf(&mut self, start: usize, end: usize) {
        let next = self.nodes.len() + 1;
        self.nodes.push(Node { start, end, next });
    }

    fn enter(&mut self, start: usize) {
        self.open.push(self.nodes.len());
        self.nodes.push(Node { start, end: start, next: 0 });
    }

    fn leave(&mut self, end: usize) {
        let next = self.nodes.len();
        if let Some(node) = self.open.pop().and_then(|index| self.nodes.get_mut(index)) {
            node.end = end;
            node.next = next;
        }
    }
}

struct Cursor<'a> {
    text: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn error(&self, reason: &'static str) -> Error {
        Error { reason, at: self.at.min(self.text.len()) }
    }

    fn peek(&self) -> Option<u8> {
        self.text.get(self.at).copied()
    }

    fn next(&mut self) -> Option<u8> {
        let byte = self.peek()?;
        self.at += 1;
        Some(byte)
    }

    fn space(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\t' | b'\n' | b'\r')) {
            self.at += 1;
        }
    }

    fn end(&mut self) -> Result<(), Error> {
        self.space();
        if self.at == self.text.len() { Ok(()) } else { Err(self.error("unexpected text after the value")) }
    }

    /// A key and its colon; the key with its quotes.
    fn key(&mut self) -> Result<&'a [u8], Error> {
        self.space();
        if self.peek() != Some(b'"') {
            return Err(self.error("expected a key"));
        }
        let key = self.string()?;
        self.space();
        if self.next() == Some(b':') { Ok(key) } else { Err(self.error("expected ':'")) }
    }

    /// The next value, whatever its kind.
    fn value(&mut self, mut tape: Option<&mut Tape>) -> Result<&'a [u8], Error> {
        self.space();
        let start = self.at;
        // The containers around the cursor, by their opening bytes.
        let mut open: Vec<u8> = Vec::new();
        loop {
            self.space();
            let value_start = self.at;
            match self.peek() {
                Some(byte @ (b'{' | b'[')) => {
                    if open.len() == MAX_DEPTH {
                        return Err(self.error("nested too deeply"));
                    }
                    self.at += 1;
                    if let Some(tape) = &mut tape {
                        tape.enter(value_start);
                    }
                    self.space();
                    // The closing bytes are two above the opening ones in ASCII.
                    if self.peek() == Some(byte + 2) {
                        self.at += 1;
                        if let Some(tape) = &mut tape {
                            tape.leave(self.at);
                        }
                    } else {
                        open.push(byte);
                        if byte == b'{' {
                            self.tape_key(tape.as_deref_mut())?;
                        }
                        continue;
                    }
                }
                _ => {
                    self.scalar()?;
                    if let Some(tape) = &mut tape {
                        tape.leaf(value_start, self.at);
                    }
                }
            }
            // A value has ended: close what ends with it.
            loop {
                let Some(&container) = open.last() else { return Ok(&self.text[start..self.at]) };
                self.space();
                match self.next() {
                    Some(b',') => {
                        if container == b'{' {
                            self.tape_key(tape.as_deref_mut())?;
                        }
                        break;
                    }
                    Some(byte) if byte == container + 2 => {
                        open.pop();
                        if let Some(tape) = &mut tape {
                            tape.leave(self.at);
                        }
                    }
                    _ => return Err(self.error("expected ',' or the end of the container")),
                }
            }
        }
    }

    fn tape_key(&mut self, tape: Option<&mut Tape>) -> Result<(), Error> {
        self.space();
        let start = self.at;
        let key = self.key()?;
        if let Some(tape) = tape {
            tape.leaf(start, start + key.len());
        }
        Ok(())
    }

    fn scalar(&mut self) -> Result<(), Error> {
        match self.peek() {
            Some(b'"') => self.string().map(|_| ()),
            Some(b'-' | b'0'..=b'9') => self.number(),
            _ => {
                for word in [&b"null"[..], b"true", b"false"] {
                    if self.text[self.at..].starts_with(word) {
                        self.at += word.len();
                        return Ok(());
                    }
                }
                Err(self.error("expected a value"))
            }
        }
    }

    fn string(&mut self) -> Result<&'a [u8], Error> {
        let start = self.at;
        self.at += 1;
        loop {
            match self.next() {
                Some(b'"') => return Ok(&self.text[start..self.at]),
                Some(b'\\') => match self.next() {
                    Some(b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => {}
                    Some(b'u') => {
                        if hex4(&self.text[self.at..]).is_none() {
                            return Err(self.error("invalid escape in a string"));
                        }
                        self.at += 4;
                    }
                    _ => return Err(self.error("invalid escape in a string")),
                },
                Some(0..=0x1f) => return Err(self.error("control character in a string")),
                Some(_) => {}
                None => return Err(self.error("unfinished string")),
            }
        }
    }

    fn number(&mut self) -> Result<(), Error> {
        if self.peek() == Some(b'-') {
            self.at += 1;
        }
        match self.peek() {
            Some(b'0') => self.at += 1,
            _ => self.digits()?,
        }
        if self.peek() == Some(b'.') {
            self.at += 1;
            self.digits()?;
        }
        if matches!(self.peek(), Some(b'e' | b'E')) {
            self.at += 1;
            if matches!(self.peek(), Some(b'+' | b'-')) {
                self.at += 1;
            }
            self.digits()?;
        }
        Ok(())
    }

    fn digits(&mut self) -> Result<(), Error> {
        let start = self.at;
        while matches!(self.peek(), Some(b'0'..=b'9')) {
            self.at += 1;
        }
        if self.at > start { Ok(()) } else { Err(self.error("expected a digit")) }
    }
}

fn rebuild(object: &[u8], edits: &[&Edit<'_>], depth: usize, out: &mut Vec<u8>) -> Result<(), Error> {
    let list = members(object)?;
    let mut writer = ObjectWriter::new(out);
    let mut done: Vec<&str> = Vec::new();
    for (index, (key, value)) in list.iter().enumerate() {
        let inner: Vec<&Edit<'_>> = edits.iter().copied().filter(|e| e.path[depth] == key).collect();
        let Some(first) = inner.first() else {
            writer.raw(key, value);
            continue;
        };
        // Of equal keys the last one counts, and the copy has only that.
        if list[index + 1..].iter().any(|(later, _)| later == key) {
            continue;
        }
        done.push(first.path[depth]);
        put(&mut writer, key, Some(value), &inner, depth)?;
    }
    for edit in edits {
        let key = edit.path[depth];
        if done.contains(&key) {
            continue;
        }
        done.push(key);
        let inner: Vec<&Edit<'_>> = edits.iter().copied().filter(|e| e.path[depth] == key).collect();
        put(&mut writer, key, None, &inner, depth)?;
    }
    writer.end();
    Ok(())
}

/// Writes the member `key` after `edits`, all of which name it at `depth`.
fn put(
    writer: &mut ObjectWriter<'_>,
    key: &str,
    value: Option<&[u8]>,
    edits: &[&Edit<'_>],
    depth: usize,
) -> Result<(), Error> {
    if let Some(edit) = edits.iter().rfind(|e| e.path.len() == depth + 1) {
        if let Some(value) = edit.value {
            writer.raw(key, value);
        }
        return Ok(());
    }
    match value.filter(|raw| is_object(raw)) {
        Some(object) => rebuild(object, edits, depth + 1, writer.key(key)),
        // Only removals inside something that is not there: nothing to do.
        None if edits.iter().all(|e| e.value.is_none()) => {
            if let Some(value) = value {
                writer.raw(key, value);
            }
            Ok(())
        }
        None => rebuild(b"{}", edits, depth + 1, writer.key(key)),
    }
}

/// The text of a checked string literal. Lone surrogates and invalid UTF-8 become U+FFFD, one per byte.
fn decode(literal: &[u8]) -> Cow<'_, str> {
    let inner = literal.get(1..literal.len().saturating_sub(1)).unwrap_or_default();
    if !inner.contains(&b'\\')
        && let Ok(text) = core::str::from_utf8(inner)
    {
        return Cow::Borrowed(text);
    }
    let mut text = String::with_capacity(inner.len());
    let mut rest = inner;
    loop {
        let plain = rest.iter().position(|b| *b == b'\\').unwrap_or(rest.len());
        push_lossy(&mut text, &rest[..plain]);
        rest = &rest[plain..];
        let Some(escape) = rest.get(1) else { return Cow::Owned(text) };
        rest = &rest[2..];
        match escape {
            b'b' => text.push('\u{8}'),
            b'f' => text.push('\u{c}'),
            b'n' => text.push('\n'),
            b'r' => text.push('\r'),
            b't' => text.push('\t'),
            b'u' => {
                let unit = hex4(rest).unwrap_or(0xfffd);
                rest = rest.get(4..).unwrap_or_default();
                let low = rest.strip_prefix(b"\\u").and_then(hex4);
                match (unit, low) {
                    (0xd800..=0xdbff, Some(low @ 0xdc00..=0xdfff)) => {
                        let code = 0x10000 + ((unit - 0xd800) << 10) + (low - 0xdc00);
                        text.push(char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER));
                        rest = rest.get(6..).unwrap_or_default();
                    }
                    _ => text.push(char::from_u32(unit).unwrap_or(char::REPLACEMENT_CHARACTER)),
                }
            }
            other => text.push(char::from(*other)),
        }
    }
}

fn push_lossy(text: &mut String, mut bytes: &[u8]) {
    loop {
        match core::str::from_utf8(bytes) {
            Ok(valid) => return text.push_str(valid),
            Err(error) => {
                let (valid, rest) = bytes.split_at(error.valid_up_to());
                // The error says that this part is valid.
                text.push_str(core::str::from_utf8(valid).unwrap_or_default());
                text.push(char::REPLACEMENT_CHARACTER);
                bytes = rest.get(1..).unwrap_or_default();
            }
        }
    }
}

fn hex4(bytes: &[u8]) -> Option<u32> {
    let digits = bytes.get(..4)?;
    digits.iter().try_fold(0, |code, digit| Some(code << 4 | char::from(*digit).to_digit(16)?))
}

fn unicode_escape(byte: u8) -> [u8; 6] {
    const HEX: &[u8; 16] = b"0123456789abcdef";
    [b'\\', b'u', b'0', b'0', HEX[usize::from(byte >> 4)], HEX[usize::from(byte & 0xf)]]
}

fn canonical_string(text: &str, out: &mut dyn FnMut(&[u8])) {
    let bytes = text.as_bytes();
    out(b"\"");
    let mut written = 0;
    let mut at = 0;
    let mut escape;
    while at < bytes.len() {
        let byte = bytes[at];
        let (replacement, length): (&[u8], usize) = match byte {
            b'"' => (b"\\\"", 1),
            b'\\' => (b"\\\\", 1),
            0x08 => (b"\\b", 1),
            0x0c => (b"\\f", 1),
            b'\n' => (b"\\n", 1),
            b'\r' => (b"\\r", 1),
            b'\t' => (b"\\t", 1),
            0..=0x1f | b'<' | b'>' | b'&' => {
                escape = unicode_escape(byte);
                (&escape[..], 1)
            }
            0xe2 if bytes[at..].starts_with(&[0xe2, 0x80, 0xa8]) => (b"\\u2028", 3),
            0xe2 if bytes[at..].starts_with(&[0xe2, 0x80, 0xa9]) => (b"\\u2029", 3),
            _ => {
                at += 1;
                continue;
            }
        };
        out(&bytes[written..at]);
        out(replacement);
        at += length;
        written = at;
    }
    out(&bytes[written..]);
    out(b"\"");
}

/// Integers that fit 64 bits stay; everything else goes through `f64`, with an exponent only below 1e-6 and from
/// 1e21 on.
fn canonical_number(raw: &[u8], at: usize, out: &mut dyn FnMut(&[u8])) -> Result<(), Error> {
    let text = core::str::from_utf8(raw).unwrap_or_default();
    if text.parse::<i64>().is_ok() {
        out(if raw == b"-0" { b"0" } else { raw });
        return Ok(());
    }
    let number: f64 = text.parse().map_err(|_| Error { reason: "expected a number", at })?;
    if !number.is_finite() {
        return Err(Error { reason: "number out of range", at });
    }
    let size = number.abs();
    let formatted = if size == 0.0 || (1e-6..1e21).contains(&size) {
        alloc::format!("{number}")
    } else {
        let mut formatted = alloc::format!("{number:e}");
        if let Some(exponent) = formatted.find('e').filter(|_| size >= 1.0) {
            formatted.insert(exponent + 1, '+');
        }
        formatted
    };
    out(formatted.as_bytes());
    Ok(())
}

/// The nesting that the reference's decoder accepts.
const MAX_DEPTH: usize = 10_000;
