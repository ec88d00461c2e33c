//! The HTTP side of a simulated replica.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::serve::ListenerExt;
use parking_lot::Mutex;
use rand::SeedableRng;
use rand::rngs::StdRng;
use serde_json::{Value, json};
use tokio::net::TcpListener;

use super::answer::{Counts, Finish, Flavour, Writer};
use super::ask::{self, Api, Served, SimAsk, SimError};
use super::faults::Faults;
use super::generation::{Generation, Plan};
use super::metrics;
use super::runner::Runner;
use super::text;
use crate::sim::engine::{EngineShape, Job};

/// Longest body taken, in bytes.
const BODY_BYTES_MAX: usize = 64 << 20;

/// How long answers are that nobody gave a length to: a lognormal.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lengths {
    /// Tokens.
    pub median: f64,
    /// Of the logarithm.
    pub sigma: f64,
}

/// What one simulated replica is.
#[derive(Clone, Debug)]
pub struct ReplicaOptions {
    /// Names it answers to; the first is its own.
    pub models: Vec<String>,
    pub flavour: Flavour,
    pub shape: EngineShape,
    pub lengths: Lengths,
    pub seed: u64,
    pub faults: Faults,
    /// Requests are refused without this bearer token.
    pub api_key: Option<String>,
    /// Running and waiting sequences together; one more gets 503. 0 is no limit.
    pub max_queued: usize,
    /// Whether usage tells cached prompt tokens (vLLM's `--enable-prompt-tokens-details`).
    pub cached_details: bool,
}

impl Default for ReplicaOptions {
    fn default() -> Self {
        ReplicaOptions {
            models: vec!["sim".to_owned()],
            flavour: Flavour::Vllm,
            shape: EngineShape::default(),
            lengths: Lengths { median: 200.0, sigma: 0.6 },
            seed: 1,
            faults: Faults::default(),
            api_key: None,
            max_queued: 0,
            cached_details: true,
        }
    }
}

/// A simulated replica.
#[derive(Debug)]
pub struct SimReplica {
    options: ReplicaOptions,
    runner: Arc<Runner>,
    faults: Mutex<Faults>,
    served: Arc<Mutex<metrics::Served>>,
    requests: AtomicU64,
    started: Instant,
}

type App = State<Arc<SimReplica>>;

impl SimReplica {
    /// A replica, not yet listening. Its window is bounded by its KV memory.
    pub fn new(mut options: ReplicaOptions) -> Arc<SimReplica> {
        let kv = u32::try_from(options.shape.kv_tokens()).unwrap_or(u32::MAX);
        options.shape.max_model_len = options.shape.max_model_len.min(kv);
        let runner = Runner::new(options.shape.clone());
        let replica = SimReplica {
            runner,
            faults: Mutex::default(),
            served: Arc::default(),
            requests: AtomicU64::new(0),
            started: Instant::now(),
            options,
        };
        replica.set_faults(replica.options.faults.clone());
        Arc::new(replica)
    }

    /// Replaces the faults in force.
    pub fn set_faults(&self, faults: Faults) {
        self.runner.disturb(faults.hang, faults.slow.unwrap_or(1.0));
        *self.faults.lock() = faults;
    }

    /// Serves on `listener` until `stop` resolves; connections are dropped then.
    ///
    /// # Errors
    /// Where accepting fails for good.
    pub async fn serve(
        self: Arc<Self>,
        listener: TcpListener,
        stop: impl Future<Output = ()> + Send + 'static,
    ) -> io::Result<()> {
        let drive = tokio::spawn(Arc::clone(&self.runner).drive());
        let listener = listener.tap_io(|tcp| {
            let _ = tcp.set_nodelay(true);
        });
        let app = self.router();
        let result = tokio::select! {
            result = axum::serve(listener, app).into_future() => result,
            () = stop => Ok(()),
        };
        drive.abort();
        result
    }

    fn router(self: Arc<Self>) -> Router {
        let routes = Router::new()
            .route("/v1/chat/completions", post(chat))
            .route("/v1/completions", post(completions))
            .route("/v1/models", get(models))
            .route("/tokenize", post(tokenize))
            .route("/health", get(health))
            .route("/metrics", get(render_metrics))
            .route("/load", get(load))
            .route("/version", get(|| async { json_response(200, &json!({"version": "0.32.0"})) }))
            .route("/ping", get(|| async { StatusCode::OK }))
            .route("/sim/fault", post(set_fault));
        let routes = match self.options.flavour {
            Flavour::Vllm => routes,
            Flavour::Llamacpp => routes.route("/props", get(props)),
        };
        routes
            .method_not_allowed_fallback(|| async { json_response(405, &json!({"detail": "Method Not Allowed"})) })
            .fallback(|| async { json_response(404, &json!({"detail": "Not Found"})) })
            .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
            .with_state(self)
    }

    fn describe(&self) -> Served<'_> {
        Served {
            models: &self.options.models,
            max_model_len: self.options.shape.max_model_len,
            any_model: self.options.flavour == Flavour::Llamacpp,
        }
    }

    fn name(&self) -> &str {
        self.options.models.first().map(String::as_str).unwrap_or_default()
    }

    /// How long one sequence's answer will be, and how it will end.
    fn length(&self, ask: &SimAsk, asked: Option<u32>, seed: u64, prompt: usize) -> (u32, Finish) {
        let shape = &self.options.shape;
        let room = shape.max_model_len - prompt as u32;
        let cap = ask.max_tokens.unwrap_or(u32::MAX).min(room).max(1);
        let wanted = match asked {
            Some(tokens) => tokens.max(1),
            None if ask.ignore_eos => cap,
            None => self.draw(seed).max(ask.min_tokens),
        };
        if wanted >= cap { (cap, Finish::Length) } else { (wanted, Finish::Stop) }
    }

    fn draw(&self, seed: u64) -> u32 {
        let mut rng = StdRng::seed_from_u64(seed);
        let Lengths { median, sigma } = self.options.lengths;
        (median * (sigma * crate::sim::draw::normal(&mut rng)).exp()).round().clamp(1.0, 1e6) as u32
    }

    /// The status fault, if it strikes this request.
    fn refusal(&self, faults: &Faults) -> Option<Response> {
        let status = faults.status?;
        let mut own = self.faults.lock();
        if let Some(times) = own.times.as_mut() {
            if *times == 0 {
                return None;
            }
            *times -= 1;
        }
        drop(own);
        let kind = if status == 503 { "Service Unavailable" } else { "InternalServerError" };
        let error = SimError::new(status, kind, None, "Refused on purpose by the simulated replica.");
        let mut response = json_response(error.status, &error.body);
        if let Some(seconds) = faults.retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        Some(response)
    }

    fn unauthorized(&self, headers: &HeaderMap) -> Option<Response> {
        let key = self.options.api_key.as_deref()?;
        let given = headers.get(header::AUTHORIZATION).and_then(|v| v.to_str().ok());
        let matches = given.and_then(|v| v.strip_prefix("Bearer ")) == Some(key);
        (!matches).then(|| json_response(401, &json!({"error": "Unauthorized"})))
    }

    async fn generate(self: Arc<Self>, api: Api, headers: HeaderMap, body: Bytes) -> Response {
        if let Some(response) = self.unauthorized(&headers) {
            return response;
        }
        let text = |name: &str| headers.get(name).and_then(|v| v.to_str().ok());
        let faults = match text("x-sim-fault").map(str::parse::<Faults>).transpose() {
            Ok(request) => self.faults.lock().with(request.unwrap_or_default()),
            Err(message) => return json_response(400, &json!({"error": {"message": message}})),
        };
        if let Some(delay) = faults.delay {
            tokio::time::sleep(delay).await;
        }
        if let Some(response) = self.refusal(&faults) {
            return response;
        }
        let ask = match ask::read(api, &body, self.describe()) {
            Ok(ask) => ask,
            Err(error) => return json_response(error.status, &error.body),
        };
        let asked = text("x-sim-output-tokens").and_then(|v| v.parse().ok()).or(ask.output_tokens);
        let number = self.requests.fetch_add(1, Ordering::Relaxed);
        let count = ask.prompts.len() * ask.n as usize;
        let look = self.runner.look();
        if self.options.max_queued > 0 && look.running + look.waiting + count > self.options.max_queued {
            self.served.lock().rejected += 1;
            let message = "The engine is currently busy and cannot accept new requests. Please try again later or on \
                           a different instance.";
            return json_response(503, &SimError::new(503, "Service Unavailable", None, message).body);
        }
        let mut plans = Vec::with_capacity(count);
        let mut jobs = Vec::with_capacity(count);
        for prompt in &ask.prompts {
            for _ in 0..ask.n {
                let seed = self.options.seed.wrapping_mul(1 << 20).wrapping_add(number << 8) + plans.len() as u64;
                let (output, finish) = self.length(&ask, asked, seed, prompt.len());
                let chain = text::chain(prompt, seed, output).into();
                let prompt = prompt.len() as u32;
                jobs.push(Job { id: 0, prompt, output, priority: ask.priority, chain });
                plans.push(Plan { seed, finish });
            }
        }
        let writer = Writer::new(
            self.options.flavour,
            &ask,
            text("x-request-id"),
            self.options.seed.wrapping_mul(1 << 32).wrapping_add(number),
            self.options.cached_details,
        );
        let counts = Counts { prompt: ask.prompts.iter().map(|p| p.len() as u64).sum(), ..Counts::default() };
        let generation = Generation {
            running: self.runner.submit(jobs),
            writer,
            plans,
            counts,
            faults,
            usage: ask.include_usage,
            served: Arc::clone(&self.served),
            started: Instant::now(),
            cached_seen: Vec::new(),
            pending: VecDeque::new(),
            ended: false,
        };
        if ask.stream { generation.stream() } else { generation.whole().await }
    }
}

pub(super) fn json_response(status: u16, body: &Value) -> Response {
    let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    (status, [(header::CONTENT_TYPE, "application/json")], body.to_string()).into_response()
}

async fn chat(State(replica): App, headers: HeaderMap, body: Bytes) -> Response {
    replica.generate(Api::Chat, headers, body).await
}

async fn completions(State(replica): App, headers: HeaderMap, body: Bytes) -> Response {
    replica.generate(Api::Completions, headers, body).await
}

async fn models(State(replica): App, headers: HeaderMap) -> Response {
    if let Some(response) = replica.unauthorized(&headers) {
        return response;
    }
    let window = replica.options.shape.max_model_len;
    let data: Vec<Value> = replica
        .options
        .models
        .iter()
        .map(|name| match replica.options.flavour {
            Flavour::Vllm => json!({"id": name, "object": "model", "created": 1_795_963_637, "owned_by": "vllm",
                "root": replica.name(), "parent": null, "max_model_len": window}),
            Flavour::Llamacpp => json!({"id": name, "object": "model", "created": 1_795_963_637,
                "owned_by": "llamacpp", "meta": {"n_ctx": window, "n_ctx_train": window}}),
        })
        .collect();
    json_response(200, &json!({"object": "list", "data": data}))
}

async fn tokenize(State(replica): App, headers: HeaderMap, body: Bytes) -> Response {
    if let Some(response) = replica.unauthorized(&headers) {
        return response;
    }
    let Ok(body) = serde_json::from_slice::<Value>(&body) else {
        return json_response(400, &SimError::new(400, "Bad Request", Some("body"), "JSON decode error").body);
    };
    let tokens = ask::read_model(&body, replica.describe()).and_then(|model| {
        match body["prompt"].as_str().or_else(|| body["content"].as_str()) {
            Some(prompt) => {
                let mut tokens = Vec::new();
                text::tokenize(prompt, &mut tokens);
                Ok(tokens)
            }
            None => ask::read_chat(&body, &model),
        }
    });
    match (tokens, replica.options.flavour) {
        (Err(error), _) => json_response(error.status, &error.body),
        (Ok(tokens), Flavour::Llamacpp) => json_response(200, &json!({"tokens": tokens})),
        (Ok(tokens), Flavour::Vllm) => json_response(
            200,
            &json!({"count": tokens.len(), "max_model_len": replica.options.shape.max_model_len, "tokens": tokens,
                "token_strs": null}),
        ),
    }
}

async fn health(State(replica): App) -> Response {
    let faults = replica.faults.lock().clone();
    if faults.health_hang {
        tokio::time::sleep(Duration::from_secs(3600)).await;
    }
    match (faults.health, replica.options.flavour) {
        (Some(status), _) => json_response(status, &json!({"error": {"message": "unhealthy on purpose"}})),
        (None, Flavour::Vllm) => StatusCode::OK.into_response(),
        (None, Flavour::Llamacpp) => json_response(200, &json!({"status": "ok"})),
    }
}

async fn render_metrics(State(replica): App) -> Response {
    if let Some(status) = replica.faults.lock().metrics {
        return json_response(status, &json!({"detail": "no metrics on purpose"}));
    }
    let (options, look) = (&replica.options, replica.runner.look());
    let text = metrics::render(options.flavour, replica.name(), &options.shape, look, &replica.served.lock());
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
}

async fn load(State(replica): App) -> Response {
    let look = replica.runner.look();
    json_response(200, &json!({"server_load": look.running + look.waiting}))
}

async fn props(State(replica): App) -> Response {
    let shape = &replica.options.shape;
    json_response(
        200,
        &json!({"default_generation_settings": {"n_ctx": shape.max_model_len}, "total_slots": shape.max_sequences,
            "model_alias": replica.name(), "uptime_seconds": replica.started.elapsed().as_secs()}),
    )
}

async fn set_fault(State(replica): App, body: String) -> Response {
    match body.parse::<Faults>() {
        Ok(faults) => {
            replica.set_faults(faults);
            StatusCode::NO_CONTENT.into_response()
        }
        Err(message) => json_response(400, &json!({"error": {"message": message}})),
    }
}
