//! Regions, bands, tenants, and the rules of health, retries and balancing.

use std::collections::BTreeSet;

use super::super::reader::{Map, Node};
use super::super::types::{
    Balance, BandSpec, Health, Model, PolicyName, QueueSpec, Regions, Retries, Scrape, Tenant, Warmup,
};
use super::unique;
use crate::units::{Band, ModelName, Tokens};

pub(super) const REGIONS: &[&str] = &["local", "distance"];
pub(super) const BAND: &[&str] = &["name", "share", "weight", "queue", "aging", "default"];
pub(super) const QUEUE: &[&str] = &["requests", "wait"];
pub(super) const TENANT: &[&str] =
    &["name", "key_file", "models", "bands", "tokens_per_minute", "requests_per_minute", "concurrent", "max_tokens"];
pub(super) const HEALTH: &[&str] = &[
    "path",
    "interval",
    "timeout",
    "unhealthy_after",
    "healthy_after",
    "generation_probe",
    "ejection_cap",
    "eject",
    "eject_max",
];
pub(super) const SCRAPE: &[&str] = &["interval", "timeout"];
pub(super) const WARMUP: &[&str] = &["prompt", "requests", "ramp"];
pub(super) const RETRIES: &[&str] = &["budget", "min_per_second", "per_request", "statuses"];
pub(super) const BALANCE: &[&str] = &["policy", "ttft_weight", "prefix_block"];

/// Bands a configuration may hold; a score and every queue walk over them.
const BANDS_MAX: usize = 64;

const POLICIES: [(&str, PolicyName); 6] = [
    ("token-load", PolicyName::TokenLoad),
    ("least-tokens", PolicyName::LeastTokens),
    ("least-requests", PolicyName::LeastRequests),
    ("power-of-two", PolicyName::PowerOfTwo),
    ("round-robin", PolicyName::RoundRobin),
    ("random", PolicyName::Random),
];

pub(super) fn regions(top: &Map<'_>) -> Regions {
    let mut regions = Regions::default();
    let Some(map) = top.get("regions").and_then(|n| n.map(REGIONS)) else { return regions };
    regions.local = map.get("local").and_then(|n| n.text());
    if let Some(node) = map.get("distance") {
        for (name, value) in node.entries("regions and how far they are: {us-1: 90ms}") {
            if let Some(distance) = value.duration(true) {
                regions.distance.insert(name, distance);
            }
        }
        if map.get("local").is_none() {
            map.node.fail("`local` is missing", Some("local: NAME, from which distances are counted".to_owned()));
        }
    }
    regions
}

pub(super) fn bands(top: &Map<'_>) -> Vec<BandSpec> {
    let Some(node) = top.get("bands") else { return vec![BandSpec::default()] };
    let nodes = node.list("bands");
    if node.is_list() && !(1..=BANDS_MAX).contains(&nodes.len()) {
        node.fail(format!("{} bands", nodes.len()), Some(format!("1 to {BANDS_MAX} bands; leave `bands` out for one")));
    }
    let found: Vec<(BandSpec, Node<'_>)> = nodes.into_iter().filter_map(|n| band(&n).map(|b| (b, n))).collect();
    unique("band", found.iter().map(|(b, n)| (b.name.clone(), n.clone())), &mut BTreeSet::new());
    let mut bands: Vec<BandSpec> = found.into_iter().map(|(b, _)| b).collect();
    let defaults: Vec<&str> = bands.iter().filter(|b| b.default).map(|b| b.name.as_str()).collect();
    match defaults.len() {
        1 => {}
        0 if bands.len() == 1 => bands[0].default = true,
        0 if bands.is_empty() => {}
        0 => node.fail("no band has `default: true`", Some("exactly one default".to_owned())),
        _ => node.fail(format!("{} are all default", defaults.join(", ")), Some("exactly one default".to_owned())),
    }
    bands
}

fn band(node: &Node<'_>) -> Option<BandSpec> {
    let map = node.map(BAND)?;
    let mut band = BandSpec { default: false, ..BandSpec::default() };
    map.set("share", &mut band.share, |n| n.share(false));
    map.set("weight", &mut band.weight, |n| n.positive("weight"));
    map.set("aging", &mut band.aging, |n| n.duration(false));
    map.set("default", &mut band.default, Node::bool);
    if let Some(map) = map.get("queue").and_then(|n| n.map(QUEUE)) {
        let mut queue = QueueSpec::default();
        map.set("requests", &mut queue.requests, |n| n.uint(0..=10_000_000).map(|v| v as usize));
        map.set("wait", &mut queue.wait, |n| n.duration(true));
        band.queue = queue;
    }
    let name = map.required("name", "a name")?;
    band.name = name.text()?;
    if band.name.trim().parse::<i64>().is_ok() {
        name.wrong("a name that is no number: clients may give a band's number instead of its name");
    }
    Some(band)
}

pub(super) fn tenants(top: &Map<'_>, models: &[Model], bands: &[BandSpec]) -> Vec<Tenant> {
    let Some(node) = top.get("tenants") else { return Vec::new() };
    let nodes = node.list("tenants");
    if node.is_list() && nodes.is_empty() {
        // An empty list would open the balancer to everybody.
        node.fail("no tenants", Some("at least one, or no `tenants` at all to be open".to_owned()));
    }
    let found: Vec<(Tenant, Node<'_>)> =
        nodes.into_iter().filter_map(|n| tenant(&n, models, bands).map(|t| (t, n))).collect();
    unique("tenant", found.iter().map(|(t, n)| (t.name.to_string(), n.clone())), &mut BTreeSet::new());
    found.into_iter().map(|(t, _)| t).collect()
}

fn tenant(node: &Node<'_>, models: &[Model], bands: &[BandSpec]) -> Option<Tenant> {
    let map = node.map(TENANT)?;
    let mut allowed_models = Vec::new();
    for (name, n) in map.get("models").map(|n| n.texts("model names")).unwrap_or_default() {
        if models.iter().any(|m| m.name.as_str() == name) {
            allowed_models.push(ModelName::from(name));
        } else {
            n.unknown("model", &name, models.iter().map(|m| m.name.as_str()));
        }
    }
    if let Some(n) = map.get("models").filter(|n| n.is_list() && n.children().is_empty()) {
        n.fail("no models", Some("at least one, or no `models` at all to allow every one".to_owned()));
    }
    let mut allowed_bands = BTreeSet::new();
    for n in map.get("bands").map(|n| n.list("bands, by name or number")).unwrap_or_default() {
        let by_number = n.as_u64().and_then(|i| usize::try_from(i).ok()).filter(|i| *i < bands.len());
        let by_name = n.as_text().and_then(|t| bands.iter().position(|b| b.name == t));
        match by_number.or(by_name) {
            Some(i) => {
                allowed_bands.insert(Band(i as u8));
            }
            None => {
                let found = n.as_text().map(str::to_owned).or(n.as_u64().map(|i| i.to_string()));
                let found = found.unwrap_or_else(|| "that".to_owned());
                n.unknown("band", &found, bands.iter().map(|b| b.name.as_str()));
            }
        }
    }
    let limit = |key: &str, max: u64| map.get(key).and_then(|n| n.uint(1..=max));
    let tokens_per_minute = limit("tokens_per_minute", u64::MAX);
    let requests_per_minute = limit("requests_per_minute", u64::MAX);
    let concurrent = limit("concurrent", u64::from(u32::MAX)).map(|v| v as u32);
    let max_tokens = limit("max_tokens", u64::MAX);
    let key_file = map.required("key_file", "a file with one key a line").and_then(|n| n.file());
    let name = map.required("name", "a name").and_then(|n| n.text());
    Some(Tenant {
        name: name?.into(),
        key_file: key_file?,
        models: allowed_models,
        bands: allowed_bands.into_iter().collect(),
        tokens_per_minute,
        requests_per_minute,
        concurrent,
        max_tokens,
    })
}

pub(super) fn health(top: &Map<'_>) -> Health {
    let mut h = Health::default();
    let Some(map) = top.get("health").and_then(|n| n.map(HEALTH)) else { return h };
    map.set("path", &mut h.path, |n| {
        let text = n.text()?;
        let good = text.starts_with('/') && text.parse::<http::uri::PathAndQuery>().is_ok();
        if !good {
            n.wrong("a path from the root: /health");
        }
        good.then_some(text)
    });
    map.set("interval", &mut h.interval, |n| n.duration(false));
    map.set("timeout", &mut h.timeout, |n| n.duration(false));
    map.set("unhealthy_after", &mut h.unhealthy_after, |n| n.uint(1..=1000).map(|v| v as u32));
    map.set("healthy_after", &mut h.healthy_after, |n| n.uint(1..=1000).map(|v| v as u32));
    map.set("generation_probe", &mut h.generation_probe, Node::duration_or_off);
    map.set("ejection_cap", &mut h.ejection_cap, |n| n.share(true));
    map.set("eject", &mut h.eject, |n| n.duration(false));
    map.set("eject_max", &mut h.eject_max, |n| n.duration(false));
    if h.eject > h.eject_max {
        map.node.fail("`eject` is above `eject_max`", Some("eject at most eject_max".to_owned()));
    }
    h
}

pub(super) fn scrape(top: &Map<'_>) -> Scrape {
    let mut s = Scrape::default();
    let Some(map) = top.get("scrape").and_then(|n| n.map(SCRAPE)) else { return s };
    map.set("interval", &mut s.interval, Node::duration_or_off);
    map.set("timeout", &mut s.timeout, |n| n.duration(false));
    s
}

pub(super) fn warmup(top: &Map<'_>) -> Warmup {
    let mut w = Warmup::default();
    let Some(map) = top.get("warmup").and_then(|n| n.map(WARMUP)) else { return w };
    w.prompt = map.get("prompt").and_then(|n| n.text());
    map.set("requests", &mut w.requests, |n| n.uint(1..=100).map(|v| v as u32));
    map.set("ramp", &mut w.ramp, |n| n.duration(true));
    if map.get("requests").is_some() && map.get("prompt").is_none() {
        map.node.fail("`requests` without `prompt`", Some("a prompt to send, or neither".to_owned()));
    }
    w
}

pub(super) fn retries(top: &Map<'_>) -> Retries {
    let mut r = Retries::default();
    let Some(map) = top.get("retries").and_then(|n| n.map(RETRIES)) else { return r };
    map.set("budget", &mut r.budget, |n| n.share(true));
    map.set("min_per_second", &mut r.min_per_second, |n| n.not_negative("retries a second"));
    map.set("per_request", &mut r.per_request, |n| n.uint(0..=15).map(|v| v as u32));
    if let Some(node) = map.get("statuses") {
        let statuses = node.list("statuses");
        r.statuses = statuses.iter().filter_map(|n| n.uint(400..=599)).map(|v| v as u16).collect();
    }
    r
}

pub(super) fn balance(top: &Map<'_>) -> Balance {
    let mut b = Balance::default();
    let Some(map) = top.get("balance").and_then(|n| n.map(BALANCE)) else { return b };
    map.choice("policy", &mut b.policy, &POLICIES);
    map.set("ttft_weight", &mut b.ttft_weight, |n| n.positive("seconds of decoding"));
    map.set("prefix_block", &mut b.prefix_block, |n| n.uint(1..=4096).map(Tokens));
    b
}
