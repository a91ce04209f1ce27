//! The harness: embedded Kubernetes, simulator, rigs for real peers, and the instruments built on them.

pub mod arguments;
pub mod attribution;
pub mod controller;
pub mod demo;
pub mod footprint;
pub mod interop;
pub mod kube;
pub mod rig;
pub mod sim;
pub mod spread;
pub mod vectors;
