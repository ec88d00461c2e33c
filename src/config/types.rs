//! What a configuration says, after validation: plain data with the defaults written beside each field.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use serde::Serialize;

use crate::units::{Band, ModelName, ReplicaId, TenantName, Tokens};

/// A whole, validated configuration.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Config {
    pub listen: Vec<Listen>,
    pub admin: Admin,
    pub limits: Limits,
    pub shutdown: Shutdown,
    pub models: Vec<Model>,
    /// The static list, or what `replicas_file` held when the configuration was read.
    pub replicas: Vec<ReplicaSpec>,
    pub replicas_file: Option<PathBuf>,
    pub discovery: Option<Discovery>,
    pub regions: Regions,
    /// In order, the first is the highest; never empty (one whole band where the YAML has none).
    pub bands: Vec<BandSpec>,
    /// Empty: the balancer is open on its listen addresses.
    pub tenants: Vec<Tenant>,
    pub health: Health,
    pub scrape: Scrape,
    pub warmup: Warmup,
    pub retries: Retries,
    pub balance: Balance,
    /// Whether answers carry the `x-weighbridge-*` headers. Default true.
    pub answer_headers: bool,
}

/// One listening address.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Listen {
    pub address: SocketAddr,
    pub tls: Option<ListenTls>,
    /// HTTP/2 without TLS. Default false: such a listener has no header deadline of Pingora's own.
    pub h2c: bool,
}

/// TLS on a listener; certificates are reloaded with the configuration.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ListenTls {
    pub cert: PathBuf,
    pub key: PathBuf,
    /// Clients must show a certificate of this authority.
    pub client_ca: Option<PathBuf>,
}

/// The admin address: API, `/metrics`, `/healthz`, `/readyz`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Admin {
    /// Default 127.0.0.1:9090.
    pub address: SocketAddr,
    /// Required for any address that is not loopback.
    pub token_file: Option<PathBuf>,
}

impl Default for Admin {
    fn default() -> Self {
        Admin { address: SocketAddr::from(([127, 0, 0, 1], 9090)), token_file: None }
    }
}

/// A limit on everything a client can make grow.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Limits {
    /// Default 32 MiB.
    pub body_bytes: u64,
    /// From the end of the header to the end of the body. Default 30 s.
    pub body_timeout: Duration,
    /// Request line and header fields together. Default 32 KiB.
    pub header_bytes: u64,
    /// Header fields in a request. Default 100.
    pub header_count: usize,
    /// From the first byte of a request to the end of its header. Default 10 s.
    pub header_timeout: Duration,
    /// Nested arrays and objects in a body. Default 128.
    pub json_depth: usize,
    /// Open client connections in all. Default 20,000.
    pub connections: usize,
    /// Open client connections of one address; 0 is no limit, the default.
    pub connections_per_address: usize,
    /// Requests on one client connection before it is closed. Default 10,000.
    pub requests_per_connection: u32,
    /// An idle client connection is closed after this. Default 75 s.
    pub keepalive: Duration,
    /// From sending a request to a replica to its first data (not a header, not an SSE comment). Default 600 s.
    pub first_byte_timeout: Duration,
    /// Silence in the middle of an answer. Default 600 s: reasoning models pause for minutes.
    pub stream_idle_timeout: Duration,
    /// A client that takes no byte of its answer for this long is cut. Default 60 s.
    pub slow_reader_timeout: Duration,
    /// How long the requests of a replica that drains may run on; then they are ended. Default 900 s, as a stop's grace.
    pub drain_timeout: Duration,
    /// One SSE event, and a non-stream answer read for its usage. Default 10 MiB; past it bytes still pass, unread.
    pub event_bytes: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            body_bytes: 32 << 20,
            body_timeout: Duration::from_secs(30),
            header_bytes: 32 << 10,
            header_count: 100,
            header_timeout: Duration::from_secs(10),
            json_depth: 128,
            connections: 20_000,
            connections_per_address: 0,
            requests_per_connection: 10_000,
            keepalive: Duration::from_secs(75),
            first_byte_timeout: Duration::from_secs(600),
            stream_idle_timeout: Duration::from_secs(600),
            slow_reader_timeout: Duration::from_secs(60),
            drain_timeout: Duration::from_secs(900),
            event_bytes: 10 << 20,
        }
    }
}

/// How a stop goes: not ready at once, accepting for the window, then waiting for streams; exit when idle.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Shutdown {
    /// Default 2 s.
    pub drain_window: Duration,
    /// Default 900 s.
    pub grace: Duration,
}

impl Default for Shutdown {
    fn default() -> Self {
        Shutdown { drain_window: Duration::from_secs(2), grace: Duration::from_secs(900) }
    }
}

/// A model that clients may name.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Model {
    pub name: ModelName,
    pub aliases: Vec<String>,
    /// LoRA adapters served under their own names; forwarded unchanged, counted as this model.
    pub adapters: Vec<String>,
    pub tokenizer: TokenizerSource,
    /// A chat template in place of the tokenizer's own.
    pub chat_template: Option<PathBuf>,
    pub output: OutputSettings,
    /// Where no published rule of the model's family gives an image's tokens. Default 765.
    pub tokens_per_image: Tokens,
    /// How content given as a list of parts reaches the template. Default: found out per template.
    pub content_format: ContentFormat,
    /// Whether `tool_choice: none` still renders the tools (vLLM's default: yes).
    pub tools_with_choice_none: bool,
}

/// Where a model's tokenizer comes from.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum TokenizerSource {
    /// A directory with `tokenizer.json`, `tokenizer_config.json`, `chat_template.jinja`.
    Directory(PathBuf),
    /// `hub:ORG/REPO`, Hugging Face's cache first.
    Hub(String),
    /// `tiktoken:NAME`.
    Tiktoken(String),
    /// `mistral:FILE`, a tekken file.
    Mistral(PathBuf),
    /// `replica`: the engine's own `/tokenize`.
    Replica,
    /// `approximate`: the measured estimate, always marked so.
    Approximate,
}

/// How content given as a list of parts reaches the chat template.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ContentFormat {
    /// Found out from the template: a template that loops over content gets the list.
    #[default]
    Auto,
    /// Joined by newlines, as vLLM does for templates that expect text.
    String,
    /// As sent.
    Parts,
}

/// How a model's answer lengths are estimated.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OutputSettings {
    /// Percentile booked for capacity. Default 90.
    pub percentile: u8,
    /// Where the histories are kept over a restart.
    pub history: Option<PathBuf>,
}

impl Default for OutputSettings {
    fn default() -> Self {
        OutputSettings { percentile: 90, history: None }
    }
}

/// One replica as configured or discovered.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ReplicaSpec {
    pub id: ReplicaId,
    pub url: ReplicaUrl,
    /// Never empty.
    pub models: Vec<ModelName>,
    pub gpu: Option<String>,
    pub quant: Option<String>,
    /// Total decode rate at half of `max_sequences`. Default 1,000, and learned.
    pub tokens_per_sec: f64,
    /// `None`: 8 × `tokens_per_sec` until learned.
    pub prefill_tokens_per_sec: Option<f64>,
    /// The window of one request, prompt and answer together. `None`: read from the engine, else unlimited.
    pub max_context_tokens: Option<Tokens>,
    /// KV tokens in all. `None`: read from the engine, else `max_context_tokens`.
    pub token_capacity: Option<Tokens>,
    /// Default 256.
    pub max_sequences: u32,
    pub region: Option<String>,
    pub engine: Engine,
    /// Whether the band is forwarded as the engine's `priority`. Default false.
    pub priority_scheduling: bool,
    pub draining: bool,
    pub api_key_file: Option<PathBuf>,
    pub tls: Option<ReplicaTls>,
    /// Send the client's Host instead of the replica's own. Default false.
    pub preserve_host: bool,
}

/// A replica's base address, taken apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicaUrl {
    pub https: bool,
    /// HTTP/2 without TLS (`h2c://`).
    pub h2c: bool,
    /// A name or an address, without brackets or port.
    pub host: String,
    pub port: u16,
    /// A path prefix without its last slash; empty for none.
    pub base_path: String,
}

/// TLS to a replica.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ReplicaTls {
    pub ca: Option<PathBuf>,
    pub cert: Option<PathBuf>,
    pub key: Option<PathBuf>,
}

/// The kind of model server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Engine {
    /// Found out from its answers.
    #[default]
    Auto,
    Vllm,
    Sglang,
    LlamaCpp,
    Tgi,
    TrtLlm,
    /// Anything that speaks the API.
    OpenAi,
}

/// Where replicas are discovered, besides or instead of a list.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Discovery {
    Dns(DnsDiscovery),
    Etcd(EtcdDiscovery),
    Consul(ConsulDiscovery),
}

/// Replicas behind a DNS name; what DNS cannot say comes from `template`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DnsDiscovery {
    pub name: String,
    /// A and AAAA need a port; SRV brings its own.
    pub port: Option<u16>,
    pub srv: bool,
    /// Bounds on the record's TTL. Defaults 1 s and 60 s.
    pub ttl_min: Duration,
    pub ttl_max: Duration,
    /// Resolver addresses in place of the system's.
    pub resolvers: Vec<SocketAddr>,
    pub template: Box<ReplicaSpec>,
}

/// Replicas that advertise themselves under an etcd prefix, a replica spec as JSON or YAML per key.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EtcdDiscovery {
    pub endpoints: Vec<String>,
    pub prefix: String,
    /// Where etcd's authentication is on: its user, and the file with the password.
    pub user: Option<String>,
    pub password_file: Option<PathBuf>,
    pub tls: Option<ReplicaTls>,
    pub template: Box<ReplicaSpec>,
}

/// Replicas that are a Consul service.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ConsulDiscovery {
    pub address: String,
    pub service: String,
    pub token_file: Option<PathBuf>,
    pub tls: Option<ReplicaTls>,
    pub template: Box<ReplicaSpec>,
}

/// Where this balancer stands and how far other regions are.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Regions {
    pub local: Option<String>,
    pub distance: BTreeMap<String, Duration>,
}

/// A priority band.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct BandSpec {
    pub name: String,
    /// Share of a replica's capacity this band may fill, above 0 and at most 1.
    pub share: f64,
    /// What a second of this band's requests is worth to the score. Default 1.
    pub weight: f64,
    pub queue: QueueSpec,
    /// A waiting request of this band rises one band for each such span. Default 60 s.
    pub aging: Duration,
    pub default: bool,
}

impl Default for BandSpec {
    fn default() -> Self {
        BandSpec {
            name: "default".to_owned(),
            share: 1.0,
            weight: 1.0,
            queue: QueueSpec::default(),
            aging: Duration::from_secs(60),
            default: true,
        }
    }
}

/// A band's bounded queue.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct QueueSpec {
    /// Default 1,000; 0 refuses at once.
    pub requests: usize,
    /// Default 30 s.
    pub wait: Duration,
}

impl Default for QueueSpec {
    fn default() -> Self {
        QueueSpec { requests: 1000, wait: Duration::from_secs(30) }
    }
}

/// A tenant: who may ask for what.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Tenant {
    pub name: TenantName,
    /// One key (or its `sha256:` hash) a line; several keys are one tenant.
    pub key_file: PathBuf,
    /// Empty: all.
    pub models: Vec<ModelName>,
    /// Highest first; empty: the default band alone.
    pub bands: Vec<Band>,
    pub tokens_per_minute: Option<u64>,
    pub requests_per_minute: Option<u64>,
    pub concurrent: Option<u32>,
    /// A larger `max_tokens` is a 400.
    pub max_tokens: Option<u64>,
}

/// Active and passive health.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Health {
    /// Default `/health`.
    pub path: String,
    /// Default 2 s, with jitter.
    pub interval: Duration,
    /// Default 5 s, longer than the interval: engines answer between batches, so a probe that is late on a busy engine
    /// is not a death, and taking it out makes the others late as well (sgl-project/sglang#9198).
    pub timeout: Duration,
    /// Consecutive failures. Default 3.
    pub unhealthy_after: u32,
    /// Consecutive successes. Default 2.
    pub healthy_after: u32,
    /// A one-token generation every so often; `None` (off) by default.
    pub generation_probe: Option<Duration>,
    /// Share of a pool that passive health may take out. Default 0.5.
    pub ejection_cap: f64,
    /// First ejection's length, doubled each time up to `eject_max`. Default 5 s.
    pub eject: Duration,
    /// Default 300 s.
    pub eject_max: Duration,
}

impl Default for Health {
    fn default() -> Self {
        Health {
            path: "/health".to_owned(),
            interval: Duration::from_secs(2),
            timeout: Duration::from_secs(5),
            unhealthy_after: 3,
            healthy_after: 2,
            generation_probe: None,
            ejection_cap: 0.5,
            eject: Duration::from_secs(5),
            eject_max: Duration::from_secs(300),
        }
    }
}

/// Reading the engines' own metrics: gentle, since a scrape costs the engine.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Scrape {
    /// From the end of one scrape of a replica to the start of its next; longer while the replica answers slowly.
    /// `None` (off) reads no metrics. Default 2 s.
    pub interval: Option<Duration>,
    /// Default 10 s: llama-server answers between batches only.
    pub timeout: Duration,
}

impl Default for Scrape {
    fn default() -> Self {
        Scrape { interval: Some(Duration::from_secs(2)), timeout: Duration::from_secs(10) }
    }
}

/// What a replica does before it takes users, and how it takes its share.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Warmup {
    /// `None`: no warm-up request.
    pub prompt: Option<String>,
    /// Default 1 where there is a prompt.
    pub requests: u32,
    /// Default 30 s; a replica's share grows from a tenth to the whole over this span.
    pub ramp: Duration,
}

impl Default for Warmup {
    fn default() -> Self {
        Warmup { prompt: None, requests: 1, ramp: Duration::from_secs(30) }
    }
}

/// Retries on another replica, before anything reached the client.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Retries {
    /// Share of recent requests that may be retries. Default 0.1.
    pub budget: f64,
    /// Retries a second that need no traffic to stand for them. Default 10, as in Finagle's and linkerd's budgets.
    pub min_per_second: f64,
    /// Replicas that a request may be tried on beyond its first. Default 2.
    pub per_request: u32,
    /// Answers that are tried elsewhere. Default 429, 502, 503, 504, 529.
    pub statuses: Vec<u16>,
}

impl Default for Retries {
    fn default() -> Self {
        Retries { budget: 0.1, min_per_second: 10.0, per_request: 2, statuses: vec![429, 502, 503, 504, 529] }
    }
}

/// The balancing rule.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Balance {
    /// Default `token-load`.
    pub policy: PolicyName,
    /// What a second before the first token weighs against a second of decoding. Default 1.
    pub ttft_weight: f64,
    /// Prefix affinity: block length in tokens. Default 16.
    pub prefix_block: Tokens,
}

impl Default for Balance {
    fn default() -> Self {
        Balance { policy: PolicyName::TokenLoad, ttft_weight: 1.0, prefix_block: Tokens(16) }
    }
}

/// The policies a user can choose and compare.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum PolicyName {
    TokenLoad,
    LeastTokens,
    LeastRequests,
    PowerOfTwo,
    RoundRobin,
    Random,
}
