//! Messages and service paths of the argocd-agent wire protocol. No I/O, no logic.
//!
//! `src/gen` is generated from `proto/` and committed, so that a build needs no protobuf compiler; a test of the
//! harness generates it again and compares. `docs/protocol.md` says what the messages mean.
#![no_std]

/// `authapi`: who an agent is.
pub mod auth {
    #![allow(missing_docs, clippy::all, unreachable_pub, unused_qualifications)]
    include!("gen/authapi.rs");

    /// Unary, no token.
    pub const AUTHENTICATE: &str = "/authapi.Authentication/Authenticate";
    /// Unary, no token.
    pub const REFRESH_TOKEN: &str = "/authapi.Authentication/RefreshToken";
    /// Full name of the service.
    pub const SERVICE: &str = "authapi.Authentication";
}

/// `versionapi`: what the principal runs.
pub mod version {
    #![allow(missing_docs, clippy::all, unreachable_pub, unused_qualifications)]
    include!("gen/versionapi.rs");

    /// Unary, no token needed.
    pub const VERSION: &str = "/versionapi.Version/Version";
    /// Full name of the service.
    pub const SERVICE: &str = "versionapi.Version";
}

/// `eventstreamapi`: the main channel.
pub mod eventstream {
    #![allow(missing_docs, clippy::all, unreachable_pub, unused_qualifications)]
    include!("gen/eventstreamapi.rs");

    /// Both ways a stream of `Event`; access token.
    pub const SUBSCRIBE: &str = "/eventstreamapi.EventStream/Subscribe";
    /// A stream of `Event` up; access token. No known agent calls it.
    pub const PUSH: &str = "/eventstreamapi.EventStream/Push";
    /// Unary; access token. The reference answers `UNIMPLEMENTED`.
    pub const PING: &str = "/eventstreamapi.EventStream/Ping";
    /// Full name of the service.
    pub const SERVICE: &str = "eventstreamapi.EventStream";
}

// Generated code refers to other packages by their position in this tree.

#[doc(hidden)]
pub mod io {
    pub mod cloudevents {
        pub mod v1 {
            #![allow(missing_docs, clippy::all, unreachable_pub, unused_qualifications)]
            include!("gen/io.cloudevents.v1.rs");
        }
    }
}

#[doc(hidden)]
pub mod google {
    pub mod protobuf {
        #![allow(missing_docs, clippy::all, rustdoc::all, unreachable_pub, unused_qualifications)]
        include!("gen/google.protobuf.rs");
    }
}

/// `io.cloudevents.v1`: the event inside an `Event`.
pub use io::cloudevents::v1 as cloudevents;
