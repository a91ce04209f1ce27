//! Seeded simulation in virtual time.
