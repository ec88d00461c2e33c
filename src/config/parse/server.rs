//! Where the balancer listens, and what it bears.

use std::collections::BTreeSet;

use super::super::reader::{Map, Node};
use super::super::types::{Admin, Limits, Listen, ListenTls, Shutdown};
use super::unique;

pub(super) const LISTEN: &[&str] = &["address", "tls", "h2c", "proxy_protocol"];
pub(super) const LISTEN_TLS: &[&str] = &["cert", "key", "client_ca"];
pub(super) const ADMIN: &[&str] = &["address", "token_file"];
pub(super) const LIMITS: &[&str] = &[
    "body_bytes",
    "body_timeout",
    "header_bytes",
    "header_count",
    "header_timeout",
    "json_depth",
    "connections",
    "connections_per_address",
    "requests_per_connection",
    "keepalive",
    "first_byte_timeout",
    "stream_idle_timeout",
    "slow_reader_timeout",
    "drain_timeout",
    "event_bytes",
];
pub(super) const SHUTDOWN: &[&str] = &["drain_window", "grace"];

/// JSON nesting that every parser on the way bears on its stack.
const JSON_DEPTH_MAX: u64 = 1000;

pub(super) fn listen(top: &Map<'_>) -> Vec<Listen> {
    let allowed = "a list with at least one listener: [{address: 0.0.0.0:8080}]";
    let Some(node) = top.required("listen", allowed) else { return Vec::new() };
    let nodes = node.list("listeners");
    if node.is_list() && nodes.is_empty() {
        node.wrong(allowed);
    }
    let found: Vec<(Listen, Node<'_>)> = nodes.into_iter().filter_map(listener).collect();
    unique("address", found.iter().map(|(l, n)| (l.address.to_string(), n.clone())), &mut BTreeSet::new());
    found.into_iter().map(|(l, _)| l).collect()
}

fn listener(node: Node<'_>) -> Option<(Listen, Node<'_>)> {
    let map = node.map(LISTEN)?;
    let tls = map.get("tls").and_then(|n| listen_tls(&n));
    let mut h2c = false;
    map.set("h2c", &mut h2c, Node::bool);
    if h2c && map.get("tls").is_some() {
        node.fail("`h2c` on a listener with TLS", Some("h2c without tls; HTTP/2 over TLS needs no switch".to_owned()));
    }
    if let Some(n) = map.get("proxy_protocol")
        && n.bool() == Some(true)
    {
        n.fail("the PROXY protocol is not supported", Some("no".to_owned()));
    }
    let address = map.required("address", "an address with its port")?.address()?;
    Some((Listen { address, tls, h2c }, node))
}

fn listen_tls(node: &Node<'_>) -> Option<ListenTls> {
    let map = node.map(LISTEN_TLS)?;
    let cert = map.required("cert", "a PEM file").and_then(|n| n.file());
    let key = map.required("key", "a PEM file").and_then(|n| n.file());
    let client_ca = map.get("client_ca").and_then(|n| n.file());
    Some(ListenTls { cert: cert?, key: key?, client_ca })
}

pub(super) fn admin(top: &Map<'_>) -> Admin {
    let mut admin = Admin::default();
    let Some(map) = top.get("admin").and_then(|n| n.map(ADMIN)) else { return admin };
    map.set("address", &mut admin.address, Node::address);
    admin.token_file = map.get("token_file").and_then(|n| n.file());
    if !admin.address.ip().is_loopback() && map.get("token_file").is_none() {
        map.node.fail(
            format!("{} is not loopback and there is no `token_file`", admin.address),
            Some("a loopback address (127.0.0.1, [::1]), or a token_file".to_owned()),
        );
    }
    admin
}

pub(super) fn limits(top: &Map<'_>) -> Limits {
    let mut l = Limits::default();
    let Some(map) = top.get("limits").and_then(|n| n.map(LIMITS)) else { return l };
    map.set("body_bytes", &mut l.body_bytes, Node::bytes);
    map.set("body_timeout", &mut l.body_timeout, |n| n.duration(false));
    map.set("header_bytes", &mut l.header_bytes, Node::bytes);
    map.set("header_count", &mut l.header_count, |n| n.uint(1..=256).map(|v| v as usize));
    map.set("header_timeout", &mut l.header_timeout, |n| n.duration(false));
    map.set("json_depth", &mut l.json_depth, |n| n.uint(1..=JSON_DEPTH_MAX).map(|v| v as usize));
    map.set("connections", &mut l.connections, |n| n.uint(1..=10_000_000).map(|v| v as usize));
    map.set("connections_per_address", &mut l.connections_per_address, |n| n.uint(0..=10_000_000).map(|v| v as usize));
    map.set("requests_per_connection", &mut l.requests_per_connection, |n| {
        n.uint(1..=u64::from(u32::MAX)).map(|v| v as u32)
    });
    map.set("keepalive", &mut l.keepalive, |n| n.duration(false));
    map.set("first_byte_timeout", &mut l.first_byte_timeout, |n| n.duration(false));
    map.set("stream_idle_timeout", &mut l.stream_idle_timeout, |n| n.duration(false));
    map.set("drain_timeout", &mut l.drain_timeout, |n| n.duration(true));
    map.set("slow_reader_timeout", &mut l.slow_reader_timeout, |n| n.duration(false));
    map.set("event_bytes", &mut l.event_bytes, Node::bytes);
    l
}

pub(super) fn shutdown(top: &Map<'_>) -> Shutdown {
    let mut s = Shutdown::default();
    let Some(map) = top.get("shutdown").and_then(|n| n.map(SHUTDOWN)) else { return s };
    map.set("drain_window", &mut s.drain_window, |n| n.duration(true));
    map.set("grace", &mut s.grace, |n| n.duration(true));
    s
}
