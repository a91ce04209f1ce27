//! The machine: slots, outbox, and the verbs that change them.
