//! Simulator, rigs, embedded Kubernetes.
