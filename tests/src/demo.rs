//! The journey that `cargo demo` shows.
