//! The scenario table against foreign peers.
