//! The fleet against scripted replicas, name servers and registries, over real sockets of the loopback.

// Helpers of a test may end it.
#![allow(clippy::unwrap_used)]

mod bench;
mod consul;
mod dns;
mod etcd;
mod probes;
mod signals;
