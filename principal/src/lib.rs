//! The hub half: `principal`, and the library of `argocd-agentctl`.

pub mod auth;
pub mod blocklist;
pub mod clock;
pub mod ctl;
pub mod grpc;
pub mod hub;
pub mod issuer;
pub mod kube;
pub mod logging;
pub mod namespaces;
pub mod options;
pub mod pki;
pub mod run;
pub mod tls;
pub mod version;
pub mod web;
