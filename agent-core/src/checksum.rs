//! Checksums of objects and of the list of tracked objects.
