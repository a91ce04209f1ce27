//! CloudEvents on the wire (docs/protocol.md, "CloudEvent attributes").
//!
//! Reads and writes one `eventstreamapi.Event` message: a wrapper around one `io.cloudevents.v1.CloudEvent`.
//! Written by hand over the protobuf wire format, because a view must borrow, an acknowledgement must copy
//! attributes of kinds it does not understand, and the empty payload must be written out.

use alloc::borrow::Cow;
use alloc::vec::Vec;
use core::fmt;

use crate::event::{EventType, Target, Type};

/// Why a message is not an event.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DecodeError {
    /// Not a protobuf message of this shape.
    Malformed(&'static str),
    /// An attribute without a value, or with one that the reference cannot convert either.
    Attribute(&'static str),
    /// More or larger attributes than any peer has reason to send.
    TooLarge(&'static str),
}

impl fmt::Display for DecodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Malformed(what) => write!(f, "malformed event message: {what}"),
            Self::Attribute(what) => write!(f, "unusable event attribute: {what}"),
            Self::TooLarge(what) => write!(f, "event over the limits: {what}"),
        }
    }
}

impl core::error::Error for DecodeError {}

/// Why an event has no readable payload.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PayloadError {
    /// `text_data`: the reference takes it for a JSON string, which no payload is.
    TextData,
    /// A content type that is not JSON.
    ContentType,
}

impl fmt::Display for PayloadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::TextData => "the payload is text_data, not binary_data",
            Self::ContentType => "the payload's content type is not application/json",
        })
    }
}

impl core::error::Error for PayloadError {}

/// One received event. Attributes that are absent or of another kind than the protocol's read as empty.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct EventView<'a> {
    /// `source`.
    pub source: &'a str,
    /// `type`.
    pub r#type: &'a str,
    /// Attribute `dataschema`, as `ce_uri` only.
    pub dataschema: &'a str,
    /// Attribute `datacontenttype`.
    pub content_type: &'a str,
    /// Attribute `subject`.
    pub subject: &'a str,
    /// Extension `eventid`.
    pub event_id: &'a str,
    /// Extension `resourceid`.
    pub resource_id: &'a str,
    /// Extension `sentat`.
    pub sent_at: &'a str,
    /// Extension `principaluid`.
    pub principal_uid: &'a str,
    /// The payload's bytes, whatever they are: see [`EventView::payload`].
    pub data: &'a [u8],
    text_data: bool,
    /// Extensions by name, with the encoded `CloudEventAttributeValue`.
    extensions: Vec<(Cow<'a, str>, &'a [u8])>,
}

impl<'a> EventView<'a> {
    /// Reads one message.
    pub fn decode(message: &'a [u8]) -> Result<Self, DecodeError> {
        let mut raw = RawEvent::default();
        let mut fields = Fields { rest: message };
        while let Some(field) = fields.next()? {
            // Repeated parts of one message merge.
            if let (1, Value::Bytes(event)) = field {
                raw.merge(event)?;
            }
        }
        raw.into_view()
    }

    /// What the event is about; `None` for a word that we do not know.
    pub fn target(&self) -> Option<Target> {
        Target::parse(self.dataschema)
    }

    /// The event's type.
    pub fn event_type(&self) -> EventType<'a> {
        EventType::parse(self.r#type)
    }

    /// Whether this is an acknowledgement.
    pub fn is_ack(&self) -> bool {
        self.target() == Some(Target::EventProcessed)
    }

    /// The payload if it can be JSON. Empty where the event has none.
    pub fn payload(&self) -> Result<&'a [u8], PayloadError> {
        if self.text_data {
            Err(PayloadError::TextData)
        } else if self.data.is_empty() || is_json(self.content_type) {
            Ok(self.data)
        } else {
            Err(PayloadError::ContentType)
        }
    }

    /// Names of the extensions in the order of an acknowledgement.
    pub fn extension_names(&self) -> impl Iterator<Item = &str> {
        self.extensions.iter().map(|(name, _)| name.as_ref())
    }

    /// The message that acknowledges this event: all extensions copied, no content type, an empty payload.
    pub fn ack(&self, source: &str) -> Vec<u8> {
        let schema = Attribute { name: DATASCHEMA, value: Text::Uri(Target::EventProcessed.as_str()) };
        let mut attributes: Vec<Entry<'_>> = Vec::with_capacity(self.extensions.len() + 1);
        attributes.push(Entry::Own(schema));
        attributes.extend(self.extensions.iter().map(|(name, value)| Entry::Copied { name, value }));
        attributes.sort_unstable_by(|a, b| a.name().cmp(b.name()));
        let mut out = Vec::new();
        write_event(&mut out, source, Type::Processed.as_str(), &attributes, b"");
        out
    }
}

/// One event to be sent.
#[derive(Clone, Copy, Debug)]
pub struct EventWriter<'a> {
    /// `source`; [`AGENT_SOURCE`] or empty.
    pub source: &'a str,
    /// `type`.
    pub r#type: &'a str,
    /// Attribute `dataschema`.
    pub target: Target,
    /// Namespace and name for the attribute `subject`, on events about objects.
    pub subject: Option<(&'a str, &'a str)>,
    /// Extension `eventid`.
    pub event_id: &'a str,
    /// Extension `resourceid`.
    pub resource_id: &'a str,
    /// Extension `sentat`.
    pub sent_at: Option<&'a str>,
    /// Extension `principaluid`.
    pub principal_uid: Option<&'a str>,
    /// The payload, JSON; empty for none.
    pub data: &'a [u8],
}

impl EventWriter<'_> {
    /// Appends the message. Attributes are in the order of their names.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let subject = self.subject.map(|(namespace, name)| [namespace, "/", name].concat());
        let text = |name, value| Attribute { name, value: Text::String(value) };
        let schema = Attribute { name: DATASCHEMA, value: Text::Uri(self.target.as_str()) };
        let attributes: [Option<Attribute<'_>>; 7] = [
            (!self.data.is_empty()).then(|| text(DATACONTENTTYPE, "application/json")),
            Some(schema),
            Some(text(EVENTID, self.event_id)),
            self.principal_uid.map(|uid| text(PRINCIPALUID, uid)),
            Some(text(RESOURCEID, self.resource_id)),
            self.sent_at.map(|time| text(SENTAT, time)),
            subject.as_deref().map(|subject| text(SUBJECT, subject)),
        ];
        let entries: Vec<Entry<'_>> = attributes.into_iter().flatten().map(Entry::Own).collect();
        write_event(out, self.source, self.r#type, &entries, self.data);
    }
}

/// `source` of everything that an agent sends, in both modes.
pub const AGENT_SOURCE: &str = "agent://agent-managed";

/// Most attributes of one event.
pub const MAX_ATTRIBUTES: usize = 64;

/// Longest attribute name or encoded value, and longest `source` and `type`. Ids hold an object's name (253) and
/// two short numbers; a W3C `tracestate` may have 512 and often more.
pub const MAX_ATTRIBUTE_BYTES: usize = 4096;

#[derive(Default)]
struct RawEvent<'a> {
    source: &'a str,
    r#type: &'a str,
    attributes: Vec<(&'a str, AttributeValue<'a>)>,
    data: &'a [u8],
    text_data: bool,
}

impl<'a> RawEvent<'a> {
    fn merge(&mut self, event: &'a [u8]) -> Result<(), DecodeError> {
        let mut fields = Fields { rest: event };
        while let Some((number, value)) = fields.next()? {
            let Value::Bytes(bytes) = value else { continue };
            match number {
                1 | 3 => {
                    // `id` is empty and `spec_version` 1.0; the reference reads others as if they were.
                    text(bytes)?;
                }
                2 => self.source = short(text(bytes)?)?,
                4 => self.r#type = short(text(bytes)?)?,
                5 => self.attribute(bytes)?,
                6 => (self.data, self.text_data) = (bytes, false),
                7 => {
                    text(bytes)?;
                    (self.data, self.text_data) = (bytes, true);
                }
                8 => {
                    // google.protobuf.Any: the value is field 2.
                    (self.data, self.text_data) = (b"", false);
                    let mut any = Fields { rest: bytes };
                    while let Some(field) = any.next()? {
                        if let (2, Value::Bytes(bytes)) = field {
                            self.data = bytes;
                        }
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn attribute(&mut self, entry: &'a [u8]) -> Result<(), DecodeError> {
        let mut name = "";
        let mut value = AttributeValue::default();
        let mut fields = Fields { rest: entry };
        while let Some(field) = fields.next()? {
            match field {
                (1, Value::Bytes(bytes)) => name = text(bytes)?,
                (2, Value::Bytes(bytes)) => value.read(bytes)?,
                _ => {}
            }
        }
        if name.len() > MAX_ATTRIBUTE_BYTES {
            return Err(DecodeError::TooLarge("attribute name"));
        }
        // Of equal names the last one counts.
        if let Some(known) = self.attributes.iter_mut().find(|(known, _)| *known == name) {
            known.1 = value;
        } else if self.attributes.len() == MAX_ATTRIBUTES {
            return Err(DecodeError::TooLarge("number of attributes"));
        } else {
            self.attributes.push((name, value));
        }
        Ok(())
    }

    fn into_view(self) -> Result<EventView<'a>, DecodeError> {
        let mut view = EventView {
            source: self.source,
            r#type: self.r#type,
            data: self.data,
            text_data: self.text_data,
            ..EventView::default()
        };
        for (name, value) in self.attributes {
            let string = match value.kind {
                None => return Err(DecodeError::Attribute("no value is set")),
                Some(Kind::String(text)) => text,
                Some(Kind::Uri(_) | Kind::Other) => "",
            };
            // Names of extensions are alphanumeric; the reference folds their case and forgets others.
            let is_name = !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric());
            let folded: Cow<'a, str> = if name.bytes().any(|byte| byte.is_ascii_uppercase()) {
                name.to_ascii_lowercase().into()
            } else {
                name.into()
            };
            match name {
                DATASCHEMA => {
                    if let Some(Kind::Uri(uri)) = value.kind {
                        view.dataschema = uri;
                    }
                    continue;
                }
                DATACONTENTTYPE => {
                    view.content_type = string;
                    continue;
                }
                SUBJECT => {
                    view.subject = string;
                    continue;
                }
                TIME => continue,
                _ if !is_name => continue,
                _ => {}
            }
            match folded.as_ref() {
                DATASCHEMA | DATACONTENTTYPE | SUBJECT | TIME => continue,
                EVENTID => view.event_id = string,
                RESOURCEID => view.resource_id = string,
                SENTAT => view.sent_at = string,
                PRINCIPALUID => view.principal_uid = string,
                _ => {}
            }
            view.extensions.push((folded, value.encoded));
        }
        view.extensions.sort_unstable();
        view.extensions.dedup_by(|later, kept| later.0 == kept.0);
        Ok(view)
    }
}

/// A `CloudEventAttributeValue`.
#[derive(Clone, Copy, Default)]
struct AttributeValue<'a> {
    kind: Option<Kind<'a>>,
    encoded: &'a [u8],
}

#[derive(Clone, Copy)]
enum Kind<'a> {
    String(&'a str),
    Uri(&'a str),
    Other,
}

impl<'a> AttributeValue<'a> {
    fn read(&mut self, encoded: &'a [u8]) -> Result<(), DecodeError> {
        if encoded.len() > MAX_ATTRIBUTE_BYTES {
            return Err(DecodeError::TooLarge("attribute value"));
        }
        let mut fields = Fields { rest: encoded };
        let mut kind = None;
        while let Some(field) = fields.next()? {
            kind = match field {
                (3, Value::Bytes(bytes)) => Some(Kind::String(text(bytes)?)),
                (5, Value::Bytes(bytes)) => Some(Kind::Uri(uri(bytes)?)),
                (6, Value::Bytes(bytes)) => uri(bytes).map(|_| Some(Kind::Other))?,
                (1 | 2, Value::Varint) | (4 | 7, Value::Bytes(_)) => Some(Kind::Other),
                _ => kind,
            };
        }
        // A later part without a value leaves the earlier one.
        if kind.is_some() {
            (self.kind, self.encoded) = (kind, encoded);
        }
        Ok(())
    }
}

/// What the reference's receiver takes for JSON: parameters do not count, case does.
fn is_json(content_type: &str) -> bool {
    let media_type = content_type.split(';').next().unwrap_or_default().trim();
    matches!(media_type, "" | "application/json" | "text/json") || media_type.ends_with("+json")
}

/// Whether the reference's URL parser accepts a text, as far as a peer may come near its limits.
fn is_uri(text: &str) -> bool {
    let escapes = text.split('%').skip(1);
    !text.starts_with(':')
        && !text.bytes().any(|byte| byte.is_ascii_control())
        && escapes.into_iter().all(|rest| {
            rest.as_bytes().get(..2).is_some_and(|digits| digits.iter().all(u8::is_ascii_hexdigit))
        })
}

fn text(bytes: &[u8]) -> Result<&str, DecodeError> {
    core::str::from_utf8(bytes).map_err(|_| DecodeError::Malformed("text that is not UTF-8"))
}

fn uri(bytes: &[u8]) -> Result<&str, DecodeError> {
    text(bytes).and_then(|text| is_uri(text).then_some(text).ok_or(DecodeError::Attribute("not a URI")))
}

fn short(text: &str) -> Result<&str, DecodeError> {
    if text.len() > MAX_ATTRIBUTE_BYTES { Err(DecodeError::TooLarge("source or type")) } else { Ok(text) }
}

/// The fields of one protobuf message.
struct Fields<'a> {
    rest: &'a [u8],
}

enum Value<'a> {
    Varint,
    Fixed,
    Bytes(&'a [u8]),
}

impl<'a> Fields<'a> {
    fn next(&mut self) -> Result<Option<(u32, Value<'a>)>, DecodeError> {
        if self.rest.is_empty() {
            return Ok(None);
        }
        let key = self.varint()?;
        let number = u32::try_from(key >> 3).map_err(|_| DecodeError::Malformed("field number"))?;
        if number == 0 {
            return Err(DecodeError::Malformed("field number"));
        }
        let value = match key & 7 {
            0 => {
                self.varint()?;
                Value::Varint
            }
            1 => self.take(8).map(|_| Value::Fixed)?,
            2 => {
                let length = self.varint()?;
                let length = usize::try_from(length).map_err(|_| DecodeError::Malformed("length"))?;
                Value::Bytes(self.take(length)?)
            }
            5 => self.take(4).map(|_| Value::Fixed)?,
            // Groups are not part of proto3.
            _ => return Err(DecodeError::Malformed("wire type")),
        };
        Ok(Some((number, value)))
    }

    fn varint(&mut self) -> Result<u64, DecodeError> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let (&byte, rest) = self.rest.split_first().ok_or(DecodeError::Malformed("truncated"))?;
            self.rest = rest;
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err(DecodeError::Malformed("varint"))
    }

    fn take(&mut self, length: usize) -> Result<&'a [u8], DecodeError> {
        let (taken, rest) = self.rest.split_at_checked(length).ok_or(DecodeError::Malformed("truncated"))?;
        self.rest = rest;
        Ok(taken)
    }
}

struct Attribute<'a> {
    name: &'static str,
    value: Text<'a>,
}

enum Text<'a> {
    String(&'a str),
    Uri(&'a str),
}

enum Entry<'a> {
    Own(Attribute<'a>),
    Copied { name: &'a str, value: &'a [u8] },
}

impl Entry<'_> {
    fn name(&self) -> &str {
        match self {
            Self::Own(attribute) => attribute.name,
            Self::Copied { name, .. } => name,
        }
    }

    fn value_length(&self) -> usize {
        match self {
            Self::Own(Attribute { value: Text::String(text) | Text::Uri(text), .. }) => {
                field_length(text.len())
            }
            Self::Copied { value, .. } => value.len(),
        }
    }

    fn length(&self) -> usize {
        field_length(self.name().len()) + field_length(self.value_length())
    }

    fn write(&self, out: &mut Vec<u8>) {
        put_header(out, 5, self.length());
        put(out, 1, self.name().as_bytes());
        put_header(out, 2, self.value_length());
        match self {
            Self::Own(Attribute { value: Text::String(text), .. }) => put(out, 3, text.as_bytes()),
            Self::Own(Attribute { value: Text::Uri(text), .. }) => put(out, 5, text.as_bytes()),
            Self::Copied { value, .. } => out.extend_from_slice(value),
        }
    }
}

fn write_event(out: &mut Vec<u8>, source: &str, r#type: &str, attributes: &[Entry<'_>], data: &[u8]) {
    let optional = |text: &str| if text.is_empty() { 0 } else { field_length(text.len()) };
    let length = optional(source)
        + field_length(SPEC_VERSION.len())
        + optional(r#type)
        + attributes.iter().map(|entry| field_length(entry.length())).sum::<usize>()
        + field_length(data.len());
    out.reserve(field_length(length));
    put_header(out, 1, length);
    if !source.is_empty() {
        put(out, 2, source.as_bytes());
    }
    put(out, 3, SPEC_VERSION.as_bytes());
    if !r#type.is_empty() {
        put(out, 4, r#type.as_bytes());
    }
    for entry in attributes {
        entry.write(out);
    }
    // Written out also when empty: a receiver tells "no payload" from "no data field".
    put(out, 6, data);
}

/// Length of a field with a one-byte key and `length` bytes of content.
fn field_length(length: usize) -> usize {
    let bits = usize::BITS - (length | 1).leading_zeros();
    1 + bits.div_ceil(7) as usize + length
}

fn put(out: &mut Vec<u8>, number: u8, bytes: &[u8]) {
    put_header(out, number, bytes.len());
    out.extend_from_slice(bytes);
}

fn put_header(out: &mut Vec<u8>, number: u8, length: usize) {
    out.push(number << 3 | 2);
    let mut rest = length;
    while rest >= 0x80 {
        out.push((rest & 0x7f) as u8 | 0x80);
        rest >>= 7;
    }
    out.push(rest as u8);
}

const SPEC_VERSION: &str = "1.0";
const DATACONTENTTYPE: &str = "datacontenttype";
const DATASCHEMA: &str = "dataschema";
const SUBJECT: &str = "subject";
const TIME: &str = "time";
const EVENTID: &str = "eventid";
const PRINCIPALUID: &str = "principaluid";
const RESOURCEID: &str = "resourceid";
const SENTAT: &str = "sentat";

#[cfg(test)]
mod tests {
    use alloc::string::String;

    use super::*;

    fn message(fields: &[&[u8]]) -> Vec<u8> {
        let event = fields.concat();
        let mut out = Vec::new();
        put(&mut out, 1, &event);
        out
    }

    fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        put(&mut out, number, bytes);
        out
    }

    fn attribute(name: &str, value: &[u8]) -> Vec<u8> {
        field(5, &[field(1, name.as_bytes()), field(2, value)].concat())
    }

    fn writer() -> EventWriter<'static> {
        EventWriter {
            source: "",
            r#type: Type::SpecUpdate.as_str(),
            target: Target::Application,
            subject: Some(("agent-1", "guestbook")),
            event_id: "guestbook_u1_42",
            resource_id: "guestbook_u1",
            sent_at: Some("2026-01-02T03:04:05Z"),
            principal_uid: Some("p"),
            data: b"{\"spec\":{}}",
        }
    }

    #[test]
    fn written_events_read_back() {
        let mut message = Vec::new();
        writer().encode(&mut message);
        let view = EventView::decode(&message).expect("own event");
        assert_eq!(view.target(), Some(Target::Application));
        assert_eq!(view.event_type(), EventType::Known(Type::SpecUpdate));
        assert_eq!((view.source, view.subject), ("", "agent-1/guestbook"));
        assert_eq!((view.event_id, view.resource_id), ("guestbook_u1_42", "guestbook_u1"));
        assert_eq!((view.sent_at, view.principal_uid), ("2026-01-02T03:04:05Z", "p"));
        assert_eq!(view.content_type, "application/json");
        assert_eq!(view.payload(), Ok(&b"{\"spec\":{}}"[..]));
        assert!(!view.is_ack());

        let ack = view.ack(AGENT_SOURCE);
        let ack = EventView::decode(&ack).expect("own acknowledgement");
        assert!(ack.is_ack());
        assert_eq!(ack.event_type(), EventType::Known(Type::Processed));
        assert_eq!(ack.source, AGENT_SOURCE);
        assert_eq!((ack.subject, ack.content_type, ack.data), ("", "", &b""[..]));
        assert_eq!(ack.extensions, view.extensions);
    }

    /// The lengths are computed, not patched in: try both sides of each step of a varint.
    #[test]
    fn lengths_at_varint_steps() {
        for length in [0, 1, 127, 128, 129, 16_383, 16_384, 2_097_151, 2_097_152] {
            let data = alloc::vec![b' '; length];
            let mut message = Vec::new();
            EventWriter { data: &data, ..writer() }.encode(&mut message);
            assert_eq!(EventView::decode(&message).expect("own event").data.len(), length);
        }
    }

    #[test]
    fn an_empty_payload_is_written_out() {
        let mut message = Vec::new();
        EventWriter { data: b"", target: Target::Heartbeat, ..writer() }.encode(&mut message);
        assert!(message.ends_with(&[0x32, 0]));
        assert_eq!(EventView::decode(&message).expect("own event").content_type, "");
    }

    #[test]
    fn only_the_right_kind_of_attribute_counts() {
        let view = |name: &str, value: &[u8]| {
            let message = message(&[&attribute(name, value)]);
            EventView::decode(&message)
                .map(|view| [view.dataschema, view.event_id, view.content_type].map(String::from))
        };
        assert_eq!(view("dataschema", &field(5, b"application")).expect("ce_uri")[0], "application");
        assert_eq!(view("dataschema", &field(3, b"application")).expect("ce_string")[0], "");
        assert_eq!(view("dataschema", &field(6, b"application")).expect("ce_uri_ref")[0], "");
        assert_eq!(view("eventid", &field(3, b"e")).expect("ce_string")[1], "e");
        assert_eq!(view("eventid", &field(5, b"e")).expect("ce_uri")[1], "");
        assert_eq!(view("eventid", &[0x10, 1]).expect("ce_integer")[1], "");
        assert_eq!(view("eventid", b""), Err(DecodeError::Attribute("no value is set")));
        assert_eq!(view("u", &field(5, b"https://x/%zz")), Err(DecodeError::Attribute("not a URI")));
        // A text where a number belongs is no value at all.
        assert_eq!(view("eventid", &field(2, b"1")), Err(DecodeError::Attribute("no value is set")));
    }

    #[test]
    fn last_one_counts_and_parts_merge() {
        let first = message(&[
            &field(4, b"a"),
            &attribute("eventid", &field(3, b"1")),
            &attribute("x", &field(3, b"kept")),
        ]);
        let second = message(&[&field(4, b"b"), &attribute("eventid", &field(3, b"2")), &field(6, b"d")]);
        let both = [first, second].concat();
        let view = EventView::decode(&both).expect("merged");
        assert_eq!((view.r#type, view.event_id, view.data), ("b", "2", &b"d"[..]));
        assert_eq!(view.extension_names().collect::<Vec<_>>(), ["eventid", "x"]);
    }

    #[test]
    fn acknowledgements_copy_names_as_the_reference_does() {
        let text = field(3, b"v");
        let message = message(&[
            &attribute("Upper", &text),
            &attribute("with-dash", &text),
            &attribute("", &text),
            &attribute("time", &text),
            &attribute("DataSchema", &text),
        ]);
        let view = EventView::decode(&message).expect("odd names");
        assert_eq!(view.extension_names().collect::<Vec<_>>(), ["upper"]);
        assert_eq!(view.dataschema, "");
    }

    #[test]
    fn payloads() {
        let payload = |content_type: &[u8], data: Vec<u8>| {
            let message = message(&[&attribute("datacontenttype", &field(3, content_type)), &data]);
            EventView::decode(&message).map(|view| view.payload().map(<[u8]>::to_vec)).expect("readable")
        };
        let binary = || field(6, b"{}");
        for json in ["application/json", "text/json", "application/json; charset=utf-8", "application/x+json"]
        {
            assert_eq!(payload(json.as_bytes(), binary()), Ok(b"{}".to_vec()), "{json}");
        }
        assert_eq!(payload(b"Application/JSON", binary()), Err(PayloadError::ContentType));
        assert_eq!(payload(b"text/plain", field(6, b"")), Ok(Vec::new()));
        assert_eq!(payload(b"application/json", field(7, b"{}")), Err(PayloadError::TextData));
        let any = field(8, &[field(1, b"type"), field(2, b"{}")].concat());
        assert_eq!(payload(b"application/json", any), Ok(b"{}".to_vec()));
    }

    #[test]
    fn malformed_messages() {
        for (bytes, reason) in [
            (&[0x0a][..], "truncated"),
            (&[0x0a, 5, 0], "truncated"),
            (&[0x0a, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff], "varint"),
            (&[0x00, 0], "field number"),
            (&[0x0b], "wire type"),
            (&[0x0a, 3, 0x22, 1, 0xff], "text that is not UTF-8"),
        ] {
            assert_eq!(EventView::decode(bytes), Err(DecodeError::Malformed(reason)));
        }
        assert_eq!(EventView::decode(b""), Ok(EventView::default()));
        // Fields that we do not know are passed over, whatever their type.
        let unknown =
            message(&[&[0x48, 1], &[0x51, 0, 0, 0, 0, 0, 0, 0, 0], &[0x5d, 0, 0, 0, 0], &field(4, b"t")]);
        assert_eq!(EventView::decode(&unknown).expect("unknown fields").r#type, "t");
    }

    #[test]
    fn limits() {
        let text = field(3, b"v");
        let many: Vec<u8> =
            (0..=MAX_ATTRIBUTES).flat_map(|index| attribute(&alloc::format!("a{index}"), &text)).collect();
        assert_eq!(EventView::decode(&message(&[&many])), Err(DecodeError::TooLarge("number of attributes")));
        let long = alloc::vec![b'a'; MAX_ATTRIBUTE_BYTES + 1];
        let large = |fields: &[u8]| EventView::decode(&message(&[fields])).map(|_| ());
        assert_eq!(large(&attribute("a", &field(3, &long))), Err(DecodeError::TooLarge("attribute value")));
        assert_eq!(large(&field(4, &long)), Err(DecodeError::TooLarge("source or type")));
        let name = String::from_utf8(long).expect("ASCII");
        assert_eq!(large(&attribute(&name, &text)), Err(DecodeError::TooLarge("attribute name")));
    }
}
