//! Who the peer is and what it can do.
