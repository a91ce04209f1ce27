//! The edge half of argocd-agent: one thread, one loop, a few megabytes.

mod args;
mod io;
mod kube;
mod log;
mod net;
mod tls;

fn main() {
    let _ = args::parse(&[], &|_| None);
}
