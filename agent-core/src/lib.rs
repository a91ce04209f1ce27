//! All decisions of both roles, without I/O.
#![no_std]
extern crate alloc;
