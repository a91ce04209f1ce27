//! Checksums of objects and of the list of tracked objects, byte-equal to the reference's
//! (docs/protocol.md, "Checksums").

use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

use sha2::{Digest, Sha256};

use crate::json;
use crate::request::Kind;

/// A SHA-256 digest.
pub type Checksum = [u8; 32];

/// The part of an object that its checksum covers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Subtree {
    /// `spec`, which must be there: Argo CD's own kinds.
    Spec,
    /// `data`, which must be there: Secrets.
    SecretData,
    /// `data`, `{}` where absent: ConfigMaps.
    ConfigMapData,
}

impl Subtree {
    /// The part that counts for `kind`.
    pub const fn of(kind: Kind) -> Self {
        match kind {
            Kind::Application | Kind::AppProject => Self::Spec,
            Kind::Repository => Self::SecretData,
            Kind::GpgKey => Self::ConfigMapData,
        }
    }
}

/// Why an object has no checksum.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ChecksumError {
    /// Not JSON, nested too deeply, or a number out of range.
    Json(json::Error),
    /// The part that is hashed is absent.
    Missing,
    /// The part that is hashed is not an object.
    NotAnObject,
}

impl fmt::Display for ChecksumError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Json(error) => error.fmt(f),
            Self::Missing => f.write_str("the object has no spec or data"),
            Self::NotAnObject => f.write_str("spec or data is not an object"),
        }
    }
}

impl core::error::Error for ChecksumError {}

impl From<json::Error> for ChecksumError {
    fn from(error: json::Error) -> Self {
        Self::Json(error)
    }
}

/// Checksum of an object as the API server returned it.
pub fn spec_checksum(kind: Kind, object: &[u8]) -> Result<Checksum, ChecksumError> {
    subtree_checksum(Subtree::of(kind), object)
}

/// [`spec_checksum`] by part.
pub fn subtree_checksum(subtree: Subtree, object: &[u8]) -> Result<Checksum, ChecksumError> {
    let mut hasher = Sha256::new();
    canonical_subtree(subtree, object, &mut |piece| hasher.update(piece))?;
    Ok(hasher.finalize().into())
}

/// Feeds the bytes that [`subtree_checksum`] hashes to `out`.
pub fn canonical_subtree(
    subtree: Subtree,
    object: &[u8],
    out: &mut dyn FnMut(&[u8]),
) -> Result<(), ChecksumError> {
    let key = if subtree == Subtree::Spec { "spec" } else { "data" };
    let mut part = None;
    json::visit_members(object, &mut |name, value| {
        if name == key {
            part = Some(value);
        }
    })?;
    match part {
        None if subtree == Subtree::ConfigMapData => out(b"{}"),
        None => return Err(ChecksumError::Missing),
        Some(value) if !json::is_object(value) => return Err(ChecksumError::NotAnObject),
        // The destination is rewritten on the way, so it does not count; only at the top level.
        Some(value) => json::canonical_except(value, "destination", out)?,
    }
    Ok(())
}

/// Checksum of a bare spec, the same as that of an object which has it.
pub fn bare_spec_checksum(spec: &[u8]) -> Result<Checksum, ChecksumError> {
    if !json::is_object(spec) {
        return Err(ChecksumError::NotAnObject);
    }
    let mut hasher = Sha256::new();
    json::canonical_except(spec, "destination", &mut |piece| hasher.update(piece))?;
    Ok(hasher.finalize().into())
}

/// Checksum of a set of tracked objects, given as (kind word, name, UID); `None` for an empty set.
///
/// Two objects that differ only in the namespace both count: the caller hands in each object once.
pub fn list_checksum<'a>(objects: impl IntoIterator<Item = (&'a str, &'a str, &'a str)>) -> Option<Checksum> {
    // The joined texts are sorted, not the tuples: '/' sorts after '-' and '.', which occur in names.
    let entries: Vec<String> =
        objects.into_iter().map(|(kind, name, uid)| [kind, "/", name, "/", uid].concat()).collect();
    entries_checksum(entries)
}

/// [`list_checksum`] of the joined texts, `<kind>/<name>/<uid>` each.
pub fn entries_checksum(mut entries: Vec<String>) -> Option<Checksum> {
    if entries.is_empty() {
        return None;
    }
    entries.sort_unstable();
    let mut hasher = Sha256::new();
    for entry in &entries {
        hasher.update(entry.as_bytes());
    }
    Some(hasher.finalize().into())
}

/// The first eight bytes of the SHA-256 of `bytes`: tells contents apart, proves nothing.
pub fn fingerprint(bytes: &[u8]) -> u64 {
    first_eight(&Sha256::digest(bytes).into())
}

/// [`fingerprint`] of the canonical form of a JSON text; of the bytes as they are where it is not JSON.
pub fn value_fingerprint(text: &[u8]) -> u64 {
    let mut hasher = Sha256::new();
    match json::canonical(text, &mut |piece| hasher.update(piece)) {
        Ok(()) => first_eight(&hasher.finalize().into()),
        Err(_) => fingerprint(text),
    }
}

fn first_eight(sum: &Checksum) -> u64 {
    sum[..8].iter().fold(0, |value, byte| value << 8 | u64::from(*byte))
}

#[cfg(test)]
mod tests {
    use alloc::string::ToString;

    use super::*;

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| alloc::format!("{byte:02x}")).collect()
    }

    #[test]
    fn examples_of_the_notes() {
        let object = br#"{"spec":{"destination":{"name":"agent-1"},"project":"default","source":{
            "repoURL":"https://git.example.com/a?x=1&y=<2>","path":"guestbook","targetRevision":"HEAD"},
            "syncPolicy":{"retry":{"limit":5},"automated":{"prune":true}}}}"#;
        let sum = spec_checksum(Kind::Application, object).expect("a spec");
        assert_eq!(hex(&sum), "9eaecaa126cf98301b44c9648fc74abac3c35dd1b9e708c3ecabc88b266ed506");
        let spec = json::member(object, "spec").expect("an object").expect("a spec");
        assert_eq!(bare_spec_checksum(spec), Ok(sum));

        let list = list_checksum([
            ("Repository", "repo-a", "33333333-3333-4333-8333-333333333333"),
            ("Application", "guestbook", "11111111-1111-4111-8111-111111111111"),
            ("AppProject", "default", "22222222-2222-4222-8222-222222222222"),
        ]);
        let list = list.expect("not empty");
        assert_eq!(hex(&list), "be892e7b868f8e0760dda5fe6cee46ee3d892bc6504d7913b8b8ccf76ac60c92");
        assert_eq!(list_checksum([]), None);
    }

    #[test]
    fn joined_texts_are_sorted() {
        // By tuples "a" comes before "a-b"; by texts "a-b/" comes before "a/".
        let list = list_checksum([("Application", "a", "2"), ("Application", "a-b", "1")]);
        let joined = Sha256::digest("Application/a-b/1Application/a/2");
        assert_eq!(list, Some(joined.into()));
    }

    #[test]
    fn what_has_no_checksum() {
        let sum = |text: &str| spec_checksum(Kind::Application, text.as_bytes());
        assert_eq!(sum(r#"{"status":{}}"#), Err(ChecksumError::Missing));
        assert_eq!(sum(r#"{"spec":null}"#), Err(ChecksumError::NotAnObject));
        assert_eq!(sum(r#"{"spec":[1]}"#), Err(ChecksumError::NotAnObject));
        assert!(matches!(sum(r#"{"spec":{"a":1e999}}"#), Err(ChecksumError::Json(_))));
        assert!(matches!(sum("{"), Err(ChecksumError::Json(_))));
        assert_eq!(ChecksumError::Missing.to_string(), "the object has no spec or data");
        assert!(subtree_checksum(Subtree::ConfigMapData, b"{}").is_ok());
        assert_eq!(subtree_checksum(Subtree::SecretData, b"{}"), Err(ChecksumError::Missing));
    }

    #[test]
    fn fingerprints() {
        assert_eq!(fingerprint(b"{}"), 0x4413_6fa3_55b3_678a);
        assert_eq!(value_fingerprint(b" { } "), fingerprint(b"{}"));
        assert_eq!(value_fingerprint(b"{"), fingerprint(b"{"));
    }
}
