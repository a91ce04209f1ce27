//! Everything that speaks to the Kubernetes API.

pub mod client;
