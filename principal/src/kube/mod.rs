//! Everything that speaks to the Kubernetes API.

pub mod call;
pub mod client;
pub mod material;
pub mod objects;
pub mod registry;
