//! The fleet against scripted replicas, name servers and registries, over real sockets of the loopback.

// Helpers of a test may end it.
#![allow(clippy::unwrap_used)]

mod bench;
mod consul;
#[path = "../harness/consul.rs"]
mod consul_server;
mod dns;
mod etcd;
#[allow(dead_code)]
#[path = "../harness/etcd.rs"]
mod etcd_server;
mod probes;
mod signals;
