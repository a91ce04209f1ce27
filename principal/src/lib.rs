//! The hub half: `principal`, and the library of `argocd-agentctl`.

pub mod ctl;
pub mod kube;
pub mod pki;
pub mod version;
