//! A borrowing view over a Kubernetes object.
