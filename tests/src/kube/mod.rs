//! Embedded Kubernetes: one store with two faces.
