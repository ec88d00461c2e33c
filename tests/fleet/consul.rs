//! Consul's blocking-query API, scripted: no package of Consul itself is at hand.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::extract::{Path, Query, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::{Router, routing::get};
use tokio::sync::watch;

use crate::bench::{Replica, config, config_at, for_a_while, keep, run, until};

/// A catalog of one service with Consul's index rules.
struct Consul {
    state: watch::Sender<(u64, Vec<serde_json::Value>)>,
    broken: Mutex<bool>,
    asked: Mutex<Vec<(Option<u64>, Option<String>)>>,
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
    let token = headers.get("x-consul-token").map(|v| v.to_str().unwrap().to_owned());
    consul.asked.lock().unwrap().push((ask.index, token));
    if *consul.broken.lock().unwrap() {
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
    async fn start() -> (Arc<Consul>, String) {
        let consul = Arc::new(Consul {
            state: watch::channel((1, Vec::new())).0,
            broken: Mutex::new(false),
            asked: Mutex::default(),
        });
        let app = Router::new().route("/v1/health/service/{service}", get(health)).with_state(consul.clone());
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move { axum::serve(listener, app).await });
        (consul, url)
    }

    fn set(&self, index: u64, replicas: &[(&str, &Replica, &str)]) {
        let services = replicas.iter().map(|(id, replica, rate)| {
            serde_json::json!({
                "Node": {"Node": "n1", "Address": replica.address.ip().to_string()},
                "Service": {"ID": id, "Service": "llm", "Address": "", "Port": replica.address.port(),
                            "Meta": {"tokens_per_sec": rate, "team": "search"}},
            })
        });
        self.state.send_replace((index, services.collect()));
    }
}

fn discovery(url: &str, more: &str) -> String {
    format!("discovery: {{consul: {{address: '{url}', service: llm, template: {{model: m}}{more}}}}}")
}

#[test]
fn passing_instances_come_and_go_with_the_blocking_query() {
    run(async {
        let (a, b) = (Replica::vllm(&["m"]).await, Replica::vllm(&["m"]).await);
        let (consul, url) = Consul::start().await;
        consul.set(10, &[("gpu-1", &a, "700")]);
        let kept = keep(&config(&discovery(&url, ""), ""));
        kept.until_open(&["gpu-1"]).await;
        assert_eq!(kept.balancer.replica(&"gpu-1".into()).unwrap().spec().tokens_per_sec, 700.0);
        consul.set(11, &[("gpu-1", &a, "700"), ("gpu-2", &b, "900")]);
        kept.until_open(&["gpu-1", "gpu-2"]).await;
        consul.set(12, &[("gpu-2", &b, "900")]);
        kept.until_open(&["gpu-2"]).await;
        let asked = consul.asked.lock().unwrap().len();
        assert!(asked <= 6, "{asked} queries for three states: they block");
    });
}

#[test]
fn a_failing_consul_and_an_empty_answer_keep_the_last_good_set() {
    run(async {
        let a = Replica::vllm(&["m"]).await;
        let b = Replica::vllm(&["m"]).await;
        let (consul, url) = Consul::start().await;
        consul.set(10, &[("gpu-1", &a, "1")]);
        let kept = keep(&config(&discovery(&url, ""), ""));
        kept.until_open(&["gpu-1"]).await;
        *consul.broken.lock().unwrap() = true;
        consul.set(11, &[("gpu-1", &a, "1")]);
        until(|| kept.fleet.discovery_states() == [("consul:llm".to_owned(), false)], || "a failure".to_owned()).await;
        for_a_while(Duration::from_millis(700), || kept.open() == ["gpu-1"], "the last good set stays").await;
        *consul.broken.lock().unwrap() = false;
        consul.set(12, &[("gpu-1", &a, "1"), ("gpu-2", &b, "1")]);
        kept.until_open(&["gpu-1", "gpu-2"]).await;
        assert_eq!(kept.fleet.discovery_states(), [("consul:llm".to_owned(), true)]);
        consul.set(13, &[]);
        until(|| !kept.fleet.discovery_states()[0].1, || "an empty answer to be told".to_owned()).await;
        assert_eq!(kept.open(), ["gpu-1", "gpu-2"]);
    });
}

#[test]
fn an_index_that_goes_back_starts_over_and_the_token_is_sent() {
    run(async {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("token"), "acl\n").unwrap();
        let (a, b) = (Replica::vllm(&["m"]).await, Replica::vllm(&["m"]).await);
        let (consul, url) = Consul::start().await;
        consul.set(100, &[("gpu-1", &a, "1")]);
        let kept = keep(&config_at(&discovery(&url, ", token_file: token"), "", dir.path()));
        kept.until_open(&["gpu-1"]).await;
        consul.set(5, &[("gpu-2", &b, "1")]);
        kept.until_open(&["gpu-2"]).await;
        let asked = || consul.asked.lock().unwrap().clone();
        let over = || asked().iter().filter(|(index, _)| index.is_none()).count();
        until(|| over() == 2, || format!("a query that starts over: {:?}", asked())).await;
        assert!(asked().iter().all(|(_, token)| token.as_deref() == Some("acl")));
    });
}
