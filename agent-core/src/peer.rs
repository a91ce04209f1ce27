//! Who the peer is and what it can.
//!
//! The protocol negotiates nothing. Our halves add one piece of gRPC metadata that a Go peer ignores; without it the
//! peer is a Go one, and we behave as it expects.

use alloc::boxed::Box;
use alloc::string::String;

/// gRPC metadata key, on Authenticate and Subscribe, request and response.
pub const HEADER: &str = "x-argocd-agent-lite";

/// What the other half said about itself.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Peer {
    /// Its version as in the version RPC, without the `argocd-agent-` prefix; may be empty.
    pub version: Box<str>,
    /// Identity of the process; empty for a Go peer.
    pub instance: Box<str>,
    /// Namespace of its Argo CD, as Authenticate said; empty if it did not. Not part of [`HEADER`].
    pub namespace: Box<str>,
    /// How Applications are mapped to agents; `None` if the peer did not say.
    pub mapping: Option<Mapping>,
    /// What it can do that a Go peer cannot.
    pub capabilities: Capabilities,
}

impl Peer {
    /// A peer that sent no [`HEADER`].
    pub fn go(version: &str) -> Self {
        Self { version: version.into(), ..Self::default() }
    }

    /// Whether the other half is of this family.
    pub fn is_ours(&self) -> bool {
        !self.instance.is_empty()
    }

    /// Reads the value of [`HEADER`].
    ///
    /// Unknown keys and capabilities are of later versions and ignored; what is missing stays at its default.
    /// `None` if there is no usable instance, or if the value is longer than any we send: such a peer is treated as
    /// a Go one.
    pub fn parse(value: &str) -> Option<Self> {
        if value.len() > MAX_LENGTH {
            return None;
        }
        let mut peer = Self::default();
        for (key, word) in value.split(';').filter_map(|pair| pair.split_once('=')) {
            let word = word.trim();
            match key.trim() {
                "v" => peer.version = word.into(),
                "i" => peer.instance = word.into(),
                "m" => peer.mapping = Mapping::parse(word),
                "c" => peer.capabilities = Capabilities::parse(word),
                _ => {}
            }
        }
        peer.is_ours().then_some(peer)
    }

    /// The value of [`HEADER`] that describes this half.
    pub fn format(&self) -> String {
        let mut out = String::with_capacity(96);
        out.push_str("v=");
        push_word(&mut out, &self.version);
        out.push_str(";i=");
        push_word(&mut out, &self.instance);
        if let Some(mapping) = self.mapping {
            out.push_str(";m=");
            out.push_str(mapping.as_str());
        }
        out.push_str(";c=");
        let mut first = true;
        for capability in self.capabilities.iter() {
            if !first {
                out.push(',');
            }
            first = false;
            out.push_str(capability.as_str());
        }
        out
    }
}

/// How the hub maps Applications to agents.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mapping {
    /// The agent's name is the namespace on the hub.
    Namespace,
    /// The agent's name is `spec.destination.name`.
    Destination,
}

impl Mapping {
    /// The word in [`HEADER`].
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Namespace => "namespace",
            Self::Destination => "destination",
        }
    }

    /// Inverse of [`Mapping::as_str`].
    pub fn parse(word: &str) -> Option<Self> {
        [Self::Namespace, Self::Destination].into_iter().find(|mapping| mapping.as_str() == word)
    }
}

/// A behaviour that a Go peer would not understand.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Capability {
    /// One digest settles a resync round.
    O1Resync,
    /// Subscribe again with a valid token of the same principal process.
    SkipAuth,
    /// Live replies carry status, headers and error bodies.
    Bodies,
    /// The content type of a PATCH is forwarded.
    PatchTypes,
    /// On connect only what differs from the last acknowledged digest is sent.
    GatedPush,
}

impl Capability {
    const ALL: [Self; 5] = [Self::O1Resync, Self::SkipAuth, Self::Bodies, Self::PatchTypes, Self::GatedPush];

    /// The word in [`HEADER`].
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::O1Resync => "o1-resync",
            Self::SkipAuth => "skip-auth",
            Self::Bodies => "bodies",
            Self::PatchTypes => "patch-types",
            Self::GatedPush => "gated-push",
        }
    }
}

/// A set of [`Capability`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Capabilities(u8);

impl Capabilities {
    /// What this half has and may say: only what is built.
    pub const OURS: Self = Self(1 << Capability::O1Resync as u8);

    /// The same set and `capability`.
    pub const fn with(self, capability: Capability) -> Self {
        Self(self.0 | 1 << capability as u8)
    }

    /// Whether `capability` is in the set.
    pub const fn has(self, capability: Capability) -> bool {
        self.0 & (1 << capability as u8) != 0
    }

    fn iter(self) -> impl Iterator<Item = Capability> {
        Capability::ALL.into_iter().filter(move |capability| self.has(*capability))
    }

    fn parse(list: &str) -> Self {
        list.split(',')
            .filter_map(|word| Capability::ALL.into_iter().find(|c| c.as_str() == word.trim()))
            .fold(Self::default(), Self::with)
    }
}

/// Appends what may stand in a metadata value between our separators.
fn push_word(out: &mut String, word: &str) {
    out.extend(word.chars().filter(|c| c.is_ascii_graphic() && !matches!(c, ';' | ',' | '=')).take(MAX_WORD));
}

const MAX_LENGTH: usize = 1024;
const MAX_WORD: usize = 128;

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::format;

    #[test]
    fn what_is_written_is_read() {
        let peer = Peer {
            version: "0.1.0".into(),
            instance: "7c9e6679-7425-40de-944b-e07fc1f90ae7".into(),
            namespace: "".into(),
            mapping: Some(Mapping::Destination),
            capabilities: Capabilities::default().with(Capability::Bodies).with(Capability::O1Resync),
        };
        let text = peer.format();
        assert_eq!(text, "v=0.1.0;i=7c9e6679-7425-40de-944b-e07fc1f90ae7;m=destination;c=o1-resync,bodies");
        assert_eq!(Peer::parse(&text), Some(peer));
    }

    #[test]
    fn a_newer_peer_is_understood() {
        let peer = Peer::parse("v=9.9 ; i=abc;x=y;;junk;m=hexagonal;c=teleport, skip-auth").unwrap();
        assert_eq!((&*peer.version, &*peer.instance, peer.mapping), ("9.9", "abc", None));
        assert!(peer.capabilities.has(Capability::SkipAuth));
        assert!(!peer.capabilities.has(Capability::Bodies));
    }

    #[test]
    fn without_an_instance_it_is_a_go_peer() {
        for value in ["", "v=1", "nonsense", "i=", &format!("i={}", "x".repeat(2000))] {
            assert_eq!(Peer::parse(value), None, "{value}");
        }
        assert!(!Peer::go("0.9.0").is_ours());
    }

    #[test]
    fn a_value_never_breaks_the_header() {
        let peer = Peer { version: "1\r\n;i=2 ü,=".into(), instance: "x".into(), ..Peer::default() };
        assert_eq!(peer.format(), "v=1i2;i=x;c=");
    }
}
