//! The hub half.
