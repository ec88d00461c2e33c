//! Consul's blocking-query API, scripted: no package of Consul itself is at hand.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Path, Query, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::{Router, routing::get};
use parking_lot::Mutex;
use tokio::sync::watch;

/// A catalog of one service with Consul's index rules.
#[derive(Debug)]
pub struct Consul {
    state: watch::Sender<(u64, Vec<serde_json::Value>)>,
    /// Every query is answered by 500.
    pub broken: Mutex<bool>,
    /// Each query's index and token.
    pub asked: Mutex<Vec<(Option<u64>, Option<String>)>>,
}

#[derive(serde::Deserialize)]
struct Ask {
    passing: Option<String>,
    index: Option<u64>,
}

async fn health(
    State(consul): State<Arc<Consul>>,
    Path(service): Path<String>,
    Query(ask): Query<Ask>,
    headers: HeaderMap,
) -> Response {
    let token = headers.get("x-consul-token").map(|v| v.to_str().expect("text").to_owned());
    consul.asked.lock().push((ask.index, token));
    if *consul.broken.lock() {
        return StatusCode::INTERNAL_SERVER_ERROR.into_response();
    }
    assert_eq!((service.as_str(), ask.passing.as_deref()), ("llm", Some("1")));
    let mut changes = consul.state.subscribe();
    if let Some(index) = ask.index {
        let _ = tokio::time::timeout(Duration::from_secs(55), changes.wait_for(|s| s.0 != index)).await;
    }
    let (index, services) = changes.borrow().clone();
    ([("x-consul-index", index.to_string())], axum::Json(services)).into_response()
}

impl Consul {
    /// Starts one without instances; its URL.
    pub async fn start() -> (Arc<Consul>, String) {
        let consul = Arc::new(Consul {
            state: watch::channel((1, Vec::new())).0,
            broken: Mutex::new(false),
            asked: Mutex::default(),
        });
        let app = Router::new().route("/v1/health/service/{service}", get(health)).with_state(consul.clone());
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        tokio::spawn(async move { axum::serve(listener, app).await });
        (consul, url)
    }

    /// The service has these instances now: id, address, `tokens_per_sec`.
    pub fn set(&self, index: u64, instances: &[(&str, SocketAddr, &str)]) {
        let services = instances.iter().map(|(id, address, rate)| {
            serde_json::json!({
                "Node": {"Node": "n1", "Address": address.ip().to_string()},
                "Service": {"ID": id, "Service": "llm", "Address": "", "Port": address.port(),
                            "Meta": {"tokens_per_sec": rate, "team": "search"}},
            })
        });
        self.state.send_replace((index, services.collect()));
    }
}
