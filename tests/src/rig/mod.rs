//! Real peers as processes.
