//! Replicas: the static list, what a discovered one may say, and where to discover them.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use super::super::error::Errors;
use super::super::reader::{Map, Node, Sink};
use super::super::types::{
    ConsulDiscovery, Discovery, DnsDiscovery, Engine, EtcdDiscovery, Regions, ReplicaSpec, ReplicaTls, ReplicaUrl,
};
use super::super::url::URL_FORMS;
use super::unique;
use crate::units::{ModelName, ReplicaId, Tokens};

pub(super) const REPLICA: &[&str] = &[
    "id",
    "url",
    "model",
    "models",
    "gpu",
    "quant",
    "tokens_per_sec",
    "prefill_tokens_per_sec",
    "max_context_tokens",
    "token_capacity",
    "max_sequences",
    "region",
    "engine",
    "priority_scheduling",
    "draining",
    "api_key_file",
    "tls",
    "preserve_host",
];
pub(super) const TEMPLATE: &[&str] = &[
    "scheme",
    "base_path",
    "model",
    "models",
    "gpu",
    "quant",
    "tokens_per_sec",
    "prefill_tokens_per_sec",
    "max_context_tokens",
    "token_capacity",
    "max_sequences",
    "region",
    "engine",
    "priority_scheduling",
    "draining",
    "api_key_file",
    "tls",
    "preserve_host",
];
/// What an advertised replica may not say: files are the balancer's own.
const ADVERTISED: &[&str] = &[
    "id",
    "url",
    "model",
    "models",
    "gpu",
    "quant",
    "tokens_per_sec",
    "prefill_tokens_per_sec",
    "max_context_tokens",
    "token_capacity",
    "max_sequences",
    "region",
    "engine",
    "priority_scheduling",
    "draining",
];
pub(super) const TLS: &[&str] = &["ca", "cert", "key"];
pub(super) const DISCOVERY: &[&str] = &["dns", "etcd", "consul"];
pub(super) const DNS: &[&str] = &["name", "port", "srv", "ttl_min", "ttl_max", "resolvers", "template"];
pub(super) const ETCD: &[&str] = &["endpoints", "prefix", "user", "password_file", "tls", "template"];
pub(super) const CONSUL: &[&str] = &["address", "service", "token_file", "tls", "template"];

const ENGINES: [(&str, Engine); 7] = [
    ("auto", Engine::Auto),
    ("vllm", Engine::Vllm),
    ("sglang", Engine::Sglang),
    ("llamacpp", Engine::LlamaCpp),
    ("tgi", Engine::Tgi),
    ("trtllm", Engine::TrtLlm),
    ("openai", Engine::OpenAi),
];

/// A token count past any engine's memory is a slip of the pen.
const TOKENS_MAX: u64 = 1 << 40;

pub(super) fn list(node: &Node<'_>, models: &BTreeSet<ModelName>) -> Vec<ReplicaSpec> {
    let nodes = node.list("replicas");
    if node.is_list() && nodes.is_empty() {
        node.fail("no replicas", Some("a list with at least one replica".to_owned()));
    }
    let found: Vec<(ReplicaSpec, Node<'_>)> =
        nodes.into_iter().filter_map(|n| replica(&n, models).map(|r| (r, n))).collect();
    unique("replica id", found.iter().map(|(r, n)| (r.id.to_string(), n.clone())), &mut BTreeSet::new());
    // One server under two ids would have two books, each half the truth.
    unique("replica url", found.iter().map(|(r, n)| (r.url.to_string(), n.clone())), &mut BTreeSet::new());
    found.into_iter().map(|(r, _)| r).collect()
}

fn replica(node: &Node<'_>, models: &BTreeSet<ModelName>) -> Option<ReplicaSpec> {
    let map = node.map(REPLICA)?;
    let id = map.required("id", "a name of its own").and_then(|n| n.text());
    let url = map.required("url", URL_FORMS).and_then(|n| url(&n));
    let mut spec = unnamed();
    common(&map, &mut spec, models);
    spec.draining = map.get("draining").and_then(|n| n.bool()).unwrap_or(false);
    spec.id = id?.into();
    spec.url = url?;
    if spec.tls.is_some() && !spec.url.https {
        node.fail("`tls` for a replica without https", Some("url: https://...".to_owned()));
    }
    Some(spec)
}

fn url(node: &Node<'_>) -> Option<ReplicaUrl> {
    match node.text()?.parse() {
        Ok(url) => Some(url),
        Err(fault) => {
            node.fail(fault, Some(URL_FORMS.to_owned()));
            None
        }
    }
}

/// A replica of which nothing is known yet; the defaults of every field.
fn unnamed() -> ReplicaSpec {
    ReplicaSpec {
        id: ReplicaId::from(""),
        url: ReplicaUrl { https: false, h2c: false, host: String::new(), port: 0, base_path: String::new() },
        models: Vec::new(),
        gpu: None,
        quant: None,
        tokens_per_sec: 1000.0,
        prefill_tokens_per_sec: None,
        max_context_tokens: None,
        token_capacity: None,
        max_sequences: 256,
        region: None,
        engine: Engine::Auto,
        priority_scheduling: false,
        draining: false,
        api_key_file: None,
        tls: None,
        preserve_host: false,
    }
}

/// The fields that a replica, a template and an advertisement share.
fn common(map: &Map<'_>, spec: &mut ReplicaSpec, known: &BTreeSet<ModelName>) {
    let one = map.get("model").map(|n| n.text().map(|t| (t, n.clone())).into_iter().collect::<Vec<_>>());
    let many = map.get("models").map(|n| n.texts("model names"));
    let named = match (one, many) {
        (Some(_), Some(_)) => {
            map.node.fail("both `model` and `models`", Some("one of them".to_owned()));
            None
        }
        (one, many) => one.or(many),
    };
    match named {
        Some(named) => {
            spec.models.clear();
            for (name, node) in &named {
                let name = ModelName::from(name.as_str());
                if !known.contains(&name) {
                    let who = if spec.id.as_str().is_empty() { name_of(map) } else { spec.id.to_string() };
                    let names = known.iter().map(ModelName::as_str);
                    node.unknown(&format!("model, for {who},"), name.as_str(), names);
                } else if spec.models.contains(&name) {
                    node.fail(format!("the model `{name}` is given twice"), Some("each model once".to_owned()));
                } else {
                    spec.models.push(name);
                }
            }
            if named.is_empty() {
                map.node.fail("no model", Some("model: NAME, or models: [NAME, ...]".to_owned()));
            }
        }
        None if spec.models.is_empty() && map.get("models").is_none() => {
            map.node.fail("`model` is missing", Some("model: NAME, or models: [NAME, ...]".to_owned()));
        }
        None => {}
    }
    for (key, place) in [("gpu", &mut spec.gpu), ("quant", &mut spec.quant), ("region", &mut spec.region)] {
        map.set(key, place, |n| n.text().map(Some));
    }
    map.set("tokens_per_sec", &mut spec.tokens_per_sec, |n| n.positive("tokens per second"));
    map.set("prefill_tokens_per_sec", &mut spec.prefill_tokens_per_sec, |n| n.positive("tokens per second").map(Some));
    map.set("max_context_tokens", &mut spec.max_context_tokens, |n| n.uint(1..=TOKENS_MAX).map(|v| Some(Tokens(v))));
    map.set("token_capacity", &mut spec.token_capacity, |n| n.uint(1..=TOKENS_MAX).map(|v| Some(Tokens(v))));
    map.set("max_sequences", &mut spec.max_sequences, |n| n.uint(1..=1_000_000).map(|v| v as u32));
    map.choice("engine", &mut spec.engine, &ENGINES);
    map.set("priority_scheduling", &mut spec.priority_scheduling, Node::bool);
    map.set("draining", &mut spec.draining, Node::bool);
    if map.knows("api_key_file") {
        map.set("api_key_file", &mut spec.api_key_file, |n| n.file().map(Some));
        map.set("tls", &mut spec.tls, |n| tls(n).map(Some));
        map.set("preserve_host", &mut spec.preserve_host, Node::bool);
    }
}

fn name_of(map: &Map<'_>) -> String {
    if !map.knows("id") {
        return "the template".to_owned();
    }
    let id = map.get("id").and_then(|n| n.as_text().map(str::to_owned));
    id.map(|id| format!("replica `{id}`")).unwrap_or_else(|| "a replica".to_owned())
}

fn tls(node: &Node<'_>) -> Option<ReplicaTls> {
    let map = node.map(TLS)?;
    let file = |key: &str| map.get(key).and_then(|n| n.file());
    let tls = ReplicaTls { ca: file("ca"), cert: file("cert"), key: file("key") };
    if map.get("cert").is_some() != map.get("key").is_some() {
        node.fail("`cert` without `key`, or `key` without `cert`", Some("both, or neither".to_owned()));
    }
    Some(tls)
}

/// A replica's region must be the local one or have a distance, else its cost would be a guess.
pub(super) fn check_regions(top: &Map<'_>, specs: &[ReplicaSpec], regions: &Regions) {
    let mut known: Vec<&str> = regions.distance.keys().map(String::as_str).collect();
    known.extend(regions.local.as_deref());
    if known.is_empty() {
        // Without `regions` a replica's region is a note to its reader and costs nothing.
        return;
    }
    let Some(list) = top.get("replicas") else {
        for spec in specs {
            if let Some(region) = spec.region.as_deref().filter(|r| !known.contains(r)) {
                top.node.unknown(&format!("region of replica `{}`,", spec.id), region, known.iter().copied());
            }
        }
        return;
    };
    for node in list.children() {
        let Some(region) = node.map_quietly().and_then(|m| m.get("region")) else { continue };
        if let Some(name) = region.as_text().filter(|r| !known.contains(r)) {
            region.unknown("region", name, known.iter().copied());
        }
    }
}

pub(super) fn discovery(node: &Node<'_>, models: &BTreeSet<ModelName>) -> Option<Discovery> {
    let map = node.map(DISCOVERY)?;
    let given: Vec<&str> = DISCOVERY.iter().copied().filter(|k| map.get(k).is_some()).collect();
    if given.len() != 1 {
        node.fail(format!("{} sources of discovery", given.len()), Some("one of dns, etcd, consul".to_owned()));
    }
    if let Some(n) = map.get("dns") {
        return dns(&n, models).map(Discovery::Dns);
    }
    if let Some(n) = map.get("etcd") {
        return etcd(&n, models).map(Discovery::Etcd);
    }
    map.get("consul").and_then(|n| consul(&n, models)).map(Discovery::Consul)
}

fn dns(node: &Node<'_>, models: &BTreeSet<ModelName>) -> Option<DnsDiscovery> {
    let map = node.map(DNS)?;
    let name = map.required("name", "a DNS name").and_then(|n| n.text());
    let mut srv = false;
    map.set("srv", &mut srv, Node::bool);
    let port = map.get("port").and_then(|n| n.uint(1..=65_535)).map(|v| v as u16);
    match (srv, map.get("port").is_some()) {
        (true, true) => node.fail("`port` beside `srv: true`", Some("SRV records bring their own port".to_owned())),
        (false, false) => node.fail("`port` is missing", Some("port: 8000, or srv: true".to_owned())),
        _ => {}
    }
    let (mut ttl_min, mut ttl_max) = (Duration::from_secs(1), Duration::from_secs(60));
    map.set("ttl_min", &mut ttl_min, |n| n.duration(false));
    map.set("ttl_max", &mut ttl_max, |n| n.duration(false));
    if ttl_min > ttl_max {
        node.fail("`ttl_min` is above `ttl_max`", Some("ttl_min at most ttl_max".to_owned()));
    }
    let resolvers = map.get("resolvers").map(|n| n.list("addresses")).unwrap_or_default();
    let resolvers = resolvers.iter().filter_map(|n| n.address()).collect();
    let template = template(&map, models)?;
    Some(DnsDiscovery { name: name?, port, srv, ttl_min, ttl_max, resolvers, template })
}

fn etcd(node: &Node<'_>, models: &BTreeSet<ModelName>) -> Option<EtcdDiscovery> {
    let map = node.map(ETCD)?;
    let endpoints = map.required("endpoints", "a list of URLs: [http://127.0.0.1:2379]")?;
    let urls = endpoints.texts("URLs");
    if endpoints.is_list() && urls.is_empty() {
        endpoints.wrong("a list of URLs: [http://127.0.0.1:2379]");
    }
    let endpoints: Vec<String> = urls.iter().filter_map(|(_, n)| base_url(n)).collect();
    let prefix = map.required("prefix", "a key prefix: /weighbridge/replicas/").and_then(|n| n.text());
    let user = map.get("user").and_then(|n| n.text());
    let password_file = map.get("password_file").and_then(|n| n.file());
    if user.is_some() != password_file.is_some() {
        node.fail("`user` and `password_file` go together", Some("both, or neither".to_owned()));
    }
    let tls = source_tls(&map, endpoints.iter().map(String::as_str));
    let template = template(&map, models)?;
    Some(EtcdDiscovery { endpoints, prefix: prefix?, user, password_file, tls, template })
}

fn consul(node: &Node<'_>, models: &BTreeSet<ModelName>) -> Option<ConsulDiscovery> {
    let map = node.map(CONSUL)?;
    let address = map.required("address", "a URL: http://127.0.0.1:8500").and_then(|n| base_url(&n));
    let service = map.required("service", "the service's name").and_then(|n| n.text());
    let token_file = map.get("token_file").and_then(|n| n.file());
    let tls = source_tls(&map, address.as_deref());
    let template = template(&map, models)?;
    Some(ConsulDiscovery { address: address?, service: service?, token_file, tls, template })
}

/// The TLS of a registry, which only `https` URLs use.
fn source_tls<'u>(map: &Map<'_>, urls: impl IntoIterator<Item = &'u str>) -> Option<ReplicaTls> {
    let node = map.get("tls")?;
    if urls.into_iter().any(|url| !url.starts_with("https:")) {
        node.fail("`tls` for a registry without https", Some("https://HOST:PORT".to_owned()));
    }
    tls(&node)
}

fn base_url(node: &Node<'_>) -> Option<String> {
    let url = url(node)?;
    if url.h2c {
        node.wrong("http://HOST:PORT or https://HOST:PORT");
    }
    Some(url.http_base())
}

fn template(map: &Map<'_>, models: &BTreeSet<ModelName>) -> Option<Box<ReplicaSpec>> {
    let node = map.required("template", "what each replica is: {model: NAME, tokens_per_sec: ...}")?;
    let map = node.map(TEMPLATE)?;
    let mut spec = unnamed();
    if let Some(n) = map.get("scheme") {
        match n.as_text() {
            Some("http") => {}
            Some("https") => spec.url.https = true,
            Some("h2c") => spec.url.h2c = true,
            _ => n.wrong("http, https, h2c"),
        }
    }
    map.set("base_path", &mut spec.url.base_path, |n| {
        let text = n.text()?;
        if !text.starts_with('/') {
            n.wrong("a path from the root: /base");
        }
        Some(text.trim_end_matches('/').to_owned())
    });
    common(&map, &mut spec, models);
    Some(Box::new(spec))
}

/// Reads what a replica says of itself where it is discovered, the template filling what it leaves out.
#[derive(Clone, Debug)]
pub struct ReplicaReader {
    template: ReplicaSpec,
    models: BTreeSet<ModelName>,
}

impl ReplicaReader {
    /// A reader for one source: its template and the names of the configured models.
    pub fn new(template: &ReplicaSpec, models: BTreeSet<ModelName>) -> ReplicaReader {
        ReplicaReader { template: template.clone(), models }
    }

    /// The template itself at an address, for sources that say no more.
    pub fn at(&self, id: ReplicaId, host: String, port: u16) -> ReplicaSpec {
        let mut spec = self.template.clone();
        spec.id = id;
        spec.url.host = host;
        spec.url.port = port;
        spec
    }

    /// A replica at an address, described by words of its own that a registry keeps as text (Consul's `Meta`). Words
    /// that are no keys of a replica are others' and are passed over.
    ///
    /// # Errors
    /// As [`ReplicaReader::advertised`].
    pub fn described<'w>(
        &self,
        id: &str,
        host: String,
        port: u16,
        words: impl IntoIterator<Item = (&'w str, &'w str)>,
        source: &str,
    ) -> Result<ReplicaSpec, Errors> {
        let at = self.at(id.into(), host, port);
        let mut text = format!("url: \"{}\"\n", at.url);
        for (key, value) in words {
            if ADVERTISED.contains(&key) && !matches!(key, "id" | "url") && !value.contains(['\n', '\r']) {
                text.push_str(&format!("{key}: {value}\n"));
            }
        }
        self.advertised(id, &text, source)
    }

    /// An advertisement: a replica as YAML or JSON, or a bare URL. `id` stands where it names none; `source` names
    /// it in faults.
    ///
    /// # Errors
    /// Every fault, as in a configuration. Keys that name files are faults: an advertisement comes over the network.
    pub fn advertised(&self, id: &str, text: &str, source: &str) -> Result<ReplicaSpec, Errors> {
        let value = super::document(text, source)?;
        let sink = Sink::new(Path::new(""));
        let node = Node::root(&value, &sink);
        let mut spec = self.template.clone();
        spec.id = ReplicaId::from(id);
        let found = if node.is_map() {
            node.map(ADVERTISED).and_then(|map| {
                map.set("id", &mut spec.id, |n| n.text().map(ReplicaId::from));
                common(&map, &mut spec, &self.models);
                map.required("url", URL_FORMS).and_then(|n| url(&n))
            })
        } else {
            url(&node)
        };
        match (sink.errors(source, text), found) {
            (None, Some(url)) => {
                spec.url = url;
                Ok(spec)
            }
            (errors, _) => Err(errors.unwrap_or_else(|| Errors::one(source, None, "no replica".to_owned(), None))),
        }
    }
}
