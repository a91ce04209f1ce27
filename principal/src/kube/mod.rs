//! Everything that speaks to the Kubernetes API.

pub mod applications;
pub mod call;
pub mod client;
pub mod material;
pub mod registry;
