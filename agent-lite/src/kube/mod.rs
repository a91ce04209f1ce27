//! The Kubernetes API: where it is, who we are, and plain requests.

pub(crate) mod client;
pub(crate) mod config;
mod yaml;
