//! gRPC over HTTP/2 by hand: two unary calls and one stream need no framework.

pub(crate) mod client;
mod framing;
mod gzip;
mod status;
