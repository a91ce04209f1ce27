//! All decisions of both roles, without I/O.
//!
//! The core opens no socket, reads no clock, spawns no task and draws no random number. A shell turns I/O into
//! facts, hands them in with `now`, asks for frames and requests as it has room for them, and sleeps until the
//! deadline that the core names. Agent and principal are two roles of the same machines.
#![no_std]

extern crate alloc;

pub mod backoff;
pub mod checksum;
pub mod cloudevent;
pub mod cluster_info;
pub mod content;
pub mod core;
pub mod event;
pub mod glob;
pub mod informer;
pub mod json;
pub mod object;
pub mod peer;
pub mod project;
pub mod rand;
pub mod request;
pub mod router;
pub mod session;
pub mod time;
pub mod transform;
