//! Hub-to-edge time.
