//! Waiting times between attempts.
