//! CloudEvents on the wire.
