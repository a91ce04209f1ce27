//! The hub half: `principal`, and the library of `argocd-agentctl`.

pub mod auth;
pub mod ctl;
pub mod issuer;
pub mod kube;
pub mod logging;
pub mod options;
pub mod pki;
pub mod tls;
pub mod version;
