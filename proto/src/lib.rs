//! Messages and service paths of the argocd-agent wire protocol. No I/O, no logic.
#![no_std]
