//! Targets, types, ids and the bodies of control events.
