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

/// The raw values of an array, in order.
pub fn items(array: &[u8]) -> Result<Vec<&[u8]>, Error> {
    let mut list = Vec::new();
    let mut cursor = Cursor { text: array, at: 0 };
    cursor.space();
    if cursor.next() != Some(b'[') {
        return Err(cursor.error("expected an array"));
    }
    cursor.space();
    if cursor.peek() == Some(b']') {
        cursor.at += 1;
        return cursor.end().map(|()| list);
    }
    loop {
        list.push(cursor.value(None)?);
        cursor.space();
        match cursor.next() {
            Some(b',') => {}
            Some(b']') => return cursor.end().map(|()| list),
            _ => return Err(cursor.error("expected ',' or ']'")),
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
    if u32::try_from(text.len()).is_err() {
        return Err(Error { reason: "text too long", at: 0 });
    }
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
        let raw = node.text(text);
        match raw[0] {
            b'{' => {
                let mut list = Vec::new();
                let mut child = current + 1;
                while child < node.next() {
                    // Children of an object alternate: key, value.
                    let key = decode(nodes[child].text(text));
                    if !(open.is_empty() && !except.is_empty() && key == except) {
                        list.push((key, child + 1));
                    }
                    child = nodes[child + 1].next();
                }
                // Of equal keys the last one counts: it sorts first, and the others are dropped.
                list.sort_unstable_by(|a, b| a.0.as_bytes().cmp(b.0.as_bytes()).then(b.1.cmp(&a.1)));
                list.dedup_by(|later, kept| later.0 == kept.0);
                out(b"{");
                open.push(Frame { close: b"}", first: true, rest: Rest::Members(list.into_iter()) });
            }
            b'[' => {
                out(b"[");
                let rest = Rest::Elements { next: current + 1, end: node.next() };
                open.push(Frame { close: b"]", first: true, rest });
            }
            b'"' => canonical_string(&decode(raw), out),
            b'-' | b'0'..=b'9' => canonical_number(raw, node.start as usize, out)?,
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
                        *next = nodes[element].next();
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

/// Twelve bytes per value, since a document may hold little else; the text is known to be shorter than 4 GiB, and
/// so is the number of its values.
#[derive(Clone, Copy)]
struct Node {
    start: u32,
    end: u32,
    next: u32,
}

impl Node {
    const fn text<'a>(&self, document: &'a [u8]) -> &'a [u8] {
        let (_, from_start) = document.split_at(self.start as usize);
        from_start.split_at((self.end - self.start) as usize).0
    }

    const fn next(&self) -> usize {
        self.next as usize
    }
}

impl Tape {
    fn leaf(&mut self, start: usize, end: usize) {
        let next = self.nodes.len() as u32 + 1;
        self.nodes.push(Node { start: start as u32, end: end as u32, next });
    }

    fn enter(&mut self, start: usize) {
        self.open.push(self.nodes.len());
        self.nodes.push(Node { start: start as u32, end: start as u32, next: 0 });
    }

    fn leave(&mut self, end: usize) {
        let next = self.nodes.len() as u32;
        if let Some(node) = self.open.pop().and_then(|index| self.nodes.get_mut(index)) {
            node.end = end as u32;
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
            // Nearly all of a document is plain bytes of strings.
            let rest = self.text.get(self.at..).unwrap_or_default();
            let is_special = |byte: &u8| matches!(byte, b'"' | b'\\' | 0..=0x1f);
            self.at += rest.iter().position(is_special).unwrap_or(rest.len());
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

#[cfg(test)]
mod tests {
    use alloc::string::ToString;
    use alloc::vec;

    use super::*;
    use crate::rand::Rng;

    fn canon(text: &str) -> Result<String, Error> {
        let mut out = Vec::new();
        canonical(text.as_bytes(), &mut |piece| out.extend_from_slice(piece))?;
        Ok(String::from_utf8(out).expect("UTF-8"))
    }

    fn edited(text: &str, edits: &[(&[&str], Option<&str>)]) -> String {
        let edits: Vec<Edit<'_>> =
            edits.iter().map(|(path, value)| Edit { path, value: value.map(str::as_bytes) }).collect();
        String::from_utf8(edit(text.as_bytes(), &edits).expect("an object")).expect("UTF-8")
    }

    #[test]
    fn values_are_checked() {
        for good in ["1", "-0.5e+7", " null ", "[]", "{}", "[1,{\"a\":[[]]}]", "\"\\ud83d\"", "true"] {
            assert_eq!(value(good.as_bytes()), Ok(good.trim().as_bytes()), "{good}");
        }
        for bad in [
            "",
            " ",
            "nul",
            "01",
            "1.",
            "-",
            "1e",
            "+1",
            "[1,]",
            "[1 2]",
            "{\"a\"}",
            "{\"a\":}",
            "{a:1}",
            "{\"a\":1,}",
            "[}",
            "{]",
            "\"",
            "\"\\x\"",
            "\"\\u12g4\"",
            "\"\t\"",
            "1 1",
            "]",
            "{\"a\":1]",
            "NaN",
        ] {
            assert!(value(bad.as_bytes()).is_err(), "{bad}");
            assert!(canon(bad).is_err(), "{bad}");
        }
        let error = value(b"{\"a\":tru}").expect_err("no word");
        assert_eq!(error.to_string(), "invalid JSON at byte 5: expected a value");
    }

    #[test]
    fn nesting_is_limited_and_costs_no_stack() {
        let nested = |depth: usize| ["[".repeat(depth), "]".repeat(depth)].concat();
        assert!(canon(&nested(MAX_DEPTH)).is_ok());
        assert_eq!(canon(&nested(MAX_DEPTH + 1)).expect_err("too deep").reason, "nested too deeply");
        assert!(value(nested(1_000_000).as_bytes()).is_err());
        // Skipping a subtree is one step: this would take minutes if each level read its rest again.
        let wide = "1,".repeat(500_000);
        let deep = ["{\"a\":[".repeat(4_000), wide, "1".into(), "]}".repeat(4_000)].concat();
        assert_eq!(canon(&deep).expect("valid"), deep);
    }

    #[test]
    fn members_keep_order_and_the_last_counts() {
        let object = br#" { "b" : 1 , "a\u0062" : "x", "b":{"c":null} } "#;
        let list = members(object).expect("an object");
        let keys: Vec<&str> = list.iter().map(|(key, _)| key.as_ref()).collect();
        assert_eq!(keys, ["b", "ab", "b"]);
        assert_eq!(member(object, "b"), Ok(Some(&br#"{"c":null}"#[..])));
        assert_eq!(at_path(object, &["b", "c"]), Ok(None));
        assert_eq!(at_path(object, &["b"]), Ok(Some(&br#"{"c":null}"#[..])));
        assert!(members(b"[]").is_err());
        assert!(members(b"{} x").is_err());
        assert!(members(b"{\"a\":1").is_err());
    }

    #[test]
    fn strings_decode() {
        let decoded = |literal: &[u8]| string(literal).map(Cow::into_owned);
        assert_eq!(decoded(br#""a\"\\\/\b\f\n\r\t\u00e4""#).as_deref(), Some("a\"\\/\u{8}\u{c}\n\r\tä"));
        assert_eq!(decoded(br#""\ud83d\ude00\ud83dx\ude00""#).as_deref(), Some("😀\u{fffd}x\u{fffd}"));
        assert_eq!(decoded(b"\"a\xe2\x82b\""), Some("a\u{fffd}\u{fffd}b".to_string()));
        assert!(matches!(string(b"\"plain\""), Some(Cow::Borrowed("plain"))));
        assert_eq!(string(b"1"), None);
        let mut out = Vec::new();
        push_string(&mut out, "a\"\\\u{1}\nä</\u{2028}");
        assert_eq!(string(&out).as_deref(), Some("a\"\\\u{1}\nä</\u{2028}"));
        assert_eq!(value(&out), Ok(&out[..]));
    }

    #[test]
    fn edits_keep_the_rest() {
        let object = r#"{"a": 1, "m":{"x":1.0,"y":"\u00e4"},"z":[ 1 ]}"#;
        assert_eq!(
            edited(object, &[(&["m", "x"], Some("2")), (&["m", "n", "o"], Some("{}")), (&["a"], None)]),
            r#"{"m":{"x":2,"y":"\u00e4","n":{"o":{}}},"z":[ 1 ]}"#
        );
        assert_eq!(
            edited("{}", &[(&["a", "b"], Some("1")), (&["a", "c"], Some("2"))]),
            r#"{"a":{"b":1,"c":2}}"#
        );
        assert_eq!(edited(r#"{"a":5}"#, &[(&["a", "b"], None)]), r#"{"a":5}"#);
        assert_eq!(edited(r#"{"a":null}"#, &[(&["a", "b"], Some("1"))]), r#"{"a":{"b":1}}"#);
        // Removing what is not there leaves no trace; of repeated keys the last one is edited.
        assert_eq!(edited("{}", &[(&["a"], None)]), "{}");
        assert_eq!(
            edited(r#"{"a":{"x":1},"a":{"y":2}}"#, &[(&["a", "z"], Some("3"))]),
            r#"{"a":{"y":2,"z":3}}"#
        );
        assert_eq!(set_member(b"{}", "a\"", b"1").as_deref(), Ok(&br#"{"a\"":1}"#[..]));
        assert_eq!(remove_member(br#"{"a":1,"b":2}"#, "a").as_deref(), Ok(&br#"{"b":2}"#[..]));
        assert!(set_member(b"[]", "a", b"1").is_err());
    }

    #[test]
    fn canonical_numbers() {
        for (text, expected) in [
            ("-0", "0"),
            ("-0.0", "-0"),
            ("1E2", "100"),
            ("9223372036854775808", "9223372036854776000"),
            ("0.000001", "0.000001"),
            ("0.00000099", "9.9e-7"),
            ("1e21", "1e+21"),
            ("123456789e-15", "1.23456789e-7"),
            ("5e-324", "5e-324"),
        ] {
            assert_eq!(canon(text).as_deref(), Ok(expected), "{text}");
        }
        assert!(canon("[1e999]").is_err());
    }

    #[test]
    fn items_of_arrays() {
        let list: &[&[u8]] = &[b"1", b"[2, 3]", br#"{"a":[]}"#];
        assert_eq!(items(br#" [1 ,[2, 3],{"a":[]}] "#).unwrap(), list);
        assert!(items(b"[ ]").unwrap().is_empty());
        for text in ["", "{}", "[1", "[1,]", "[1 2]", "[1] x", "[,1]"] {
            assert!(items(text.as_bytes()).is_err(), "{text}");
        }
    }

    #[test]
    fn same_is_by_value() {
        assert!(same(br#"{"a":1,"b":[1.0]}"#, br#"{ "b":[1],"a":1 }"#));
        assert!(!same(br#"{"a":[1,2]}"#, br#"{"a":[2,1]}"#));
        assert!(!same(b"{", b"["));
        assert!(same(b"{", b"{"));
    }

    /// Writes a random value with random white space and escapes.
    fn random_value(rng: &mut Rng, depth: u64, out: &mut String) {
        let space = |rng: &mut Rng, out: &mut String| out.push_str(["", " ", "\n\t"][rng.below(3) as usize]);
        let text = |rng: &mut Rng, out: &mut String| {
            out.push('"');
            for _ in 0..rng.below(4) {
                out.push_str(
                    ["a", "b", "<", "\\u0041", "\\n", "ä", "\u{2028}", "\\\""][rng.below(8) as usize],
                );
            }
            out.push('"');
        };
        space(rng, out);
        match rng.below(if depth == 0 { 4 } else { 7 }) {
            0 => out.push_str(["null", "true", "false"][rng.below(3) as usize]),
            1 => out.push_str(&(rng.next_u64() as i32).to_string()),
            2 => out.push_str(["0.5", "1e3", "-2.50", "7e-9", "1e30"][rng.below(5) as usize]),
            3 => text(rng, out),
            4 => {
                out.push('[');
                for index in 0..rng.below(4) {
                    if index > 0 {
                        out.push(',');
                    }
                    random_value(rng, depth - 1, out);
                }
                out.push(']');
            }
            _ => {
                out.push('{');
                for index in 0..rng.below(5) {
                    if index > 0 {
                        out.push(',');
                    }
                    space(rng, out);
                    text(rng, out);
                    space(rng, out);
                    out.push(':');
                    random_value(rng, depth - 1, out);
                }
                out.push('}');
            }
        }
        space(rng, out);
    }

    /// A second reader agrees on the value, and the form is stable.
    #[test]
    fn canonical_keeps_the_value() {
        let mut rng = Rng::new(11);
        for _ in 0..5_000 {
            let mut text = String::new();
            random_value(&mut rng, 4, &mut text);
            let canonical = canon(&text).expect("valid");
            assert_eq!(canon(&canonical).as_deref(), Ok(canonical.as_str()), "{text}");
            assert!(same(text.as_bytes(), canonical.as_bytes()));
            let numbers_as_text = |text: &str| {
                serde_json::from_str::<serde_json::Value>(text).map(as_floats).expect("the other reader")
            };
            assert_eq!(numbers_as_text(&text), numbers_as_text(&canonical), "{text}");
        }
    }

    /// The other reader tells 1000 from 1e3, the reference does not.
    fn as_floats(value: serde_json::Value) -> serde_json::Value {
        use serde_json::Value;
        match value {
            Value::Number(number) => Value::from(number.as_f64()),
            Value::Array(list) => list.into_iter().map(as_floats).collect(),
            Value::Object(map) => {
                Value::Object(map.into_iter().map(|(key, value)| (key, as_floats(value))).collect())
            }
            other => other,
        }
    }

    #[test]
    fn edits_agree_with_another_implementation() {
        let mut rng = Rng::new(12);
        let keys = ["a", "b", "A"];
        for _ in 0..5_000 {
            let mut text = String::new();
            random_value(&mut rng, 3, &mut text);
            let Ok(mut expected) = serde_json::from_str::<serde_json::Map<_, _>>(&text) else { continue };
            let key = keys[rng.below(3) as usize];
            let ours = if rng.below(2) == 0 {
                expected.remove(key);
                remove_member(text.as_bytes(), key)
            } else {
                expected.insert(key.to_string(), serde_json::Value::from(vec![1]));
                set_member(text.as_bytes(), key, b"[1]")
            };
            let ours: serde_json::Map<_, _> =
                serde_json::from_slice(&ours.expect("an object")).expect("valid");
            assert_eq!(ours, expected, "{text}");
        }
    }
}
