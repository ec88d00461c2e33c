//! A scripted replica, and a fleet that keeps some of them.

use std::collections::HashMap;
use std::future::Future;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use weighbridge::balance::{Balancer, Gate, Settings};
use weighbridge::config::{self, Config};
use weighbridge::fleet::{Fleet, State as ReplicaState};
use weighbridge::units::{ReplicaId, SystemClock};

/// Longest wait for anything that should happen.
const PATIENCE: Duration = Duration::from_secs(20);

/// How a path is answered.
#[derive(Clone, Debug)]
pub enum Reply {
    Say(u16, String),
    /// Takes the request and never answers.
    Hang,
    /// Answers after a while.
    Late(Duration, String),
}

/// What a replica was asked.
#[derive(Clone, Debug)]
pub struct Asked {
    pub path: String,
    pub headers: HeaderMap,
    pub body: String,
}

#[derive(Default)]
struct Script {
    replies: Mutex<HashMap<String, Reply>>,
    asked: Mutex<Vec<Asked>>,
}

/// A server that answers by script; 404 for what is not in it.
pub struct Replica {
    script: Arc<Script>,
    pub address: SocketAddr,
    server: Option<tokio::task::JoinHandle<()>>,
}

impl Drop for Replica {
    fn drop(&mut self) {
        self.kill();
    }
}

impl Replica {
    /// A healthy replica that lists `models` as vLLM does.
    pub async fn vllm(models: &[&str]) -> Replica {
        let replica = Replica::bare().await;
        let list: Vec<String> = models
            .iter()
            .map(|m| format!(r#"{{"id":"{m}","object":"model","owned_by":"vllm","max_model_len":2048}}"#))
            .collect();
        replica.say("/health", 200, "");
        replica.say("/v1/models", 200, &format!(r#"{{"object":"list","data":[{}]}}"#, list.join(",")));
        replica.say("/v1/chat/completions", 200, r#"{"choices":[{"message":{"content":"x"}}]}"#);
        replica
    }

    /// A server that knows no path.
    pub async fn bare() -> Replica {
        let script = Arc::new(Script::default());
        let (address, server) = serve(script.clone(), SocketAddr::from(([127, 0, 0, 1], 0))).await;
        Replica { script, address, server: Some(server) }
    }

    pub fn on(&self, path: &str, reply: Reply) {
        self.script.replies.lock().unwrap().insert(path.to_owned(), reply);
    }

    pub fn say(&self, path: &str, status: u16, body: &str) {
        self.on(path, Reply::Say(status, body.to_owned()));
    }

    pub fn asked(&self, path: &str) -> Vec<Asked> {
        self.script.asked.lock().unwrap().iter().filter(|a| a.path == path).cloned().collect()
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Closes its door; connections under way are dropped.
    pub fn kill(&mut self) {
        if let Some(server) = self.server.take() {
            server.abort();
        }
    }

    /// Opens it again at the same address.
    pub async fn revive(&mut self) {
        self.server = Some(serve(self.script.clone(), self.address).await.1);
    }
}

async fn serve(script: Arc<Script>, address: SocketAddr) -> (SocketAddr, tokio::task::JoinHandle<()>) {
    let listener = loop {
        match tokio::net::TcpListener::bind(address).await {
            Ok(listener) => break listener,
            Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    };
    let address = listener.local_addr().unwrap();
    let app = Router::new().fallback(answer).with_state(script);
    let server = tokio::spawn(async move {
        let _ = axum::serve(listener, app).await;
    });
    (address, server)
}

async fn answer(State(script): State<Arc<Script>>, uri: Uri, headers: HeaderMap, body: Bytes) -> Response {
    let path = uri.path().to_owned();
    let body = String::from_utf8_lossy(&body).into_owned();
    script.asked.lock().unwrap().push(Asked { path: path.clone(), headers, body });
    let reply = script.replies.lock().unwrap().get(&path).cloned();
    let say = |status: u16, body: String| (StatusCode::from_u16(status).unwrap(), body).into_response();
    match reply {
        None => say(404, r#"{"detail":"Not Found"}"#.to_owned()),
        Some(Reply::Say(status, body)) => say(status, body),
        Some(Reply::Late(after, body)) => {
            tokio::time::sleep(after).await;
            say(200, body)
        }
        Some(Reply::Hang) => std::future::pending().await,
    }
}

/// A configuration of one model `m` and these replicas, probed fast.
pub fn config(replicas: &str, more: &str) -> Config {
    config_at(replicas, more, Path::new(""))
}

pub fn config_at(replicas: &str, more: &str, base: &Path) -> Config {
    let health = if more.contains("health:") {
        String::new()
    } else {
        "health: {interval: 100ms, timeout: 400ms, eject: 300ms, eject_max: 1s}\n".to_owned()
    };
    let text = format!(
        "listen: [{{address: 127.0.0.1:1}}]\nmodels: [{{name: m, tokenizer: approximate}}]\n{health}{replicas}\n{more}\n"
    );
    config::parse(&text, base).unwrap_or_else(|e| panic!("{e}\n{text}"))
}

/// A list of replicas `r0`, `r1`, … of model `m`.
pub fn list(urls: &[&str]) -> String {
    let items: Vec<String> =
        urls.iter().enumerate().map(|(i, url)| format!("{{id: r{i}, url: '{url}', model: m}}")).collect();
    format!("replicas: [{}]", items.join(", "))
}

pub fn settings(config: &Config) -> Settings {
    Settings { balance: config.balance.clone(), bands: config.bands.clone(), regions: config.regions.clone() }
}

/// A fleet and its balancer.
pub struct Kept {
    pub fleet: Arc<Fleet>,
    pub balancer: Arc<Balancer>,
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.fleet.shutdown();
    }
}

pub fn keep(config: &Config) -> Kept {
    let clock = Arc::new(SystemClock::new());
    let balancer = Balancer::new(settings(config), clock.clone(), 1);
    let fleet = Fleet::start(config, balancer.clone(), clock);
    Kept { fleet, balancer }
}

impl Kept {
    pub fn apply(&self, config: &Config) {
        self.fleet.apply(config, settings(config));
    }

    pub fn gate(&self, id: &str) -> Option<Gate> {
        self.balancer.replica(&ReplicaId::from(id)).map(|r| r.gate())
    }

    pub fn reason(&self, id: &str) -> String {
        let status = self.fleet.status();
        status.replicas.iter().find(|r| r.id.as_str() == id).map(|r| r.reason.clone()).unwrap_or_default()
    }

    pub async fn until_gate(&self, id: &str, gate: Gate) {
        until(
            || self.gate(id) == Some(gate),
            || format!("{id} to be {gate:?}, but it is {:?} ({})", self.gate(id), self.reason(id)),
        )
        .await;
    }

    pub async fn until_state(&self, id: &str, state: ReplicaState) {
        let now = || self.fleet.state(&ReplicaId::from(id));
        until(|| now() == Some(state), || format!("{id} to be {state:?}, but it is {:?}", now())).await;
    }

    /// Ids that may be chosen, sorted.
    pub fn open(&self) -> Vec<String> {
        let replicas = self.balancer.replicas();
        let mut ids: Vec<String> =
            replicas.iter().filter(|r| r.gate() == Gate::Open).map(|r| r.id().to_string()).collect();
        ids.sort();
        ids
    }

    pub async fn until_open(&self, ids: &[&str]) {
        until(|| self.open() == ids, || format!("{ids:?} to be open, but {:?} are", self.open())).await;
    }
}

pub async fn until(mut met: impl FnMut() -> bool, what: impl Fn() -> String) {
    let end = Instant::now() + PATIENCE;
    while !met() {
        assert!(Instant::now() < end, "waited in vain for {}", what());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Whether something stays true for a while.
pub async fn for_a_while(span: Duration, mut holds: impl FnMut() -> bool, what: &str) {
    let end = Instant::now() + span;
    while Instant::now() < end {
        assert!(holds(), "{what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Runs a test on a runtime of its own.
pub fn run<F: Future>(test: F) -> F::Output {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let result = runtime.block_on(test);
    runtime.shutdown_timeout(Duration::from_millis(100));
    result
}
