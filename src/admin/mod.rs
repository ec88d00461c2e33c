//! The admin address: API, metrics, health, and one page.
//!
//! Loopback by default. A request must name the address by an IP, `localhost`, or the configured address itself: a web
//! page that a browser on the same machine was lured to has another Host (DNS rebinding) and is refused. Where a
//! token is configured it is asked for on everything but `/healthz` and `/readyz`.

mod page;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::{Value, json};
use subtle::ConstantTimeEq;

use crate::observe::Metrics;
use crate::running::Running;
use crate::units::ReplicaId;
use crate::weigh::weigher::TokenizerState;

type ReloadHook = Arc<dyn Fn() -> crate::running::ReloadOutcome + Send + Sync>;

/// What the admin API needs.
#[derive(Clone)]
pub struct Admin {
    pub running: Arc<Running>,
    pub address: SocketAddr,
    pub token: Option<Arc<str>>,
    /// Reloads as SIGHUP does, certificates included.
    pub reload: ReloadHook,
    pub connections: Arc<dyn Fn() -> usize + Send + Sync>,
}

impl std::fmt::Debug for Admin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Admin").field("address", &self.address).finish_non_exhaustive()
    }
}

/// The routes.
pub fn router(admin: Admin) -> Router {
    let guarded = Router::new()
        .route("/", get(|| async { Html(page::HTML) }))
        .route("/metrics", get(metrics))
        .route("/admin/replicas", get(replicas))
        .route("/admin/replicas/{id}/drain", post(drain))
        .route("/admin/replicas/{id}/undrain", post(undrain))
        .route("/admin/queues", get(queues))
        .route("/admin/config", get(config))
        .route("/admin/revisions", get(revisions))
        .route("/admin/reload", post(reload))
        .layer(middleware::from_fn_with_state(admin.clone(), token));
    Router::new()
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(ready))
        .merge(guarded)
        .layer(middleware::from_fn_with_state(admin.clone(), host))
        .with_state(admin)
}

fn problem(status: StatusCode, message: &str) -> Response {
    (status, Json(json!({"error": {"message": message, "type": "admin_error", "code": status.as_u16()}})))
        .into_response()
}

async fn host(State(admin): State<Admin>, request: Request<Body>, next: Next) -> Response {
    let host = request.headers().get(header::HOST).and_then(|h| h.to_str().ok()).unwrap_or_default();
    if host_is_ours(host, admin.address) {
        next.run(request).await
    } else {
        problem(StatusCode::MISDIRECTED_REQUEST, "the Host header names neither an IP address nor localhost")
    }
}

fn host_is_ours(host: &str, address: SocketAddr) -> bool {
    if host == address.to_string() {
        return true;
    }
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.rsplit_once(':').map_or(host, |(name, _)| name),
    };
    name.eq_ignore_ascii_case("localhost") || name.parse::<std::net::IpAddr>().is_ok()
}

async fn token(State(admin): State<Admin>, request: Request<Body>, next: Next) -> Response {
    let Some(expected) = &admin.token else { return next.run(request).await };
    if bearer(request.headers()).is_some_and(|given| bool::from(given.as_bytes().ct_eq(expected.as_bytes()))) {
        next.run(request).await
    } else {
        problem(StatusCode::UNAUTHORIZED, "send the admin token as `Authorization: Bearer TOKEN`")
    }
}

fn bearer(headers: &HeaderMap) -> Option<&str> {
    headers.get(header::AUTHORIZATION)?.to_str().ok()?.strip_prefix("Bearer ").map(str::trim)
}

async fn ready(State(admin): State<Admin>) -> Response {
    match admin.running.ready() {
        Ok(()) => "ready\n".into_response(),
        Err(why) => (StatusCode::SERVICE_UNAVAILABLE, format!("not ready: {why}\n")).into_response(),
    }
}

async fn metrics(State(admin): State<Admin>) -> Response {
    refresh(&admin.running, &admin.running.metrics, (admin.connections)());
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], admin.running.metrics.text()).into_response()
}

/// Writes the gauges that mirror the books.
fn refresh(running: &Running, metrics: &Metrics, connections: usize) {
    let epoch = running.epoch();
    metrics.in_flight.set(i64::try_from(running.in_flight()).unwrap_or(i64::MAX));
    metrics.connections.set(i64::try_from(connections).unwrap_or(i64::MAX));
    for family in [
        &metrics.replica_projected,
        &metrics.replica_utilization,
        &metrics.replica_load_seconds,
        &metrics.replica_sequences,
        &metrics.replica_kv_pressure,
        &metrics.replica_rate,
        &metrics.desired_replicas,
    ] {
        // Replicas that went must not stay in the figures.
        family.reset();
    }
    metrics.replica_state.reset();
    metrics.queue_depth.reset();
    metrics.tokenizer_state.reset();
    for view in running.balancer.views() {
        let id = view.spec.id.as_str();
        for model in &view.spec.models {
            let labels = [id, model.as_str()];
            metrics.replica_projected.with_label_values(&labels).set(view.projected_tokens.as_f64());
            if let Some(capacity) = view.token_capacity.filter(|c| c.0 > 0) {
                let used = view.booked_kv_tokens.as_f64() / capacity.as_f64();
                metrics.replica_utilization.with_label_values(&labels).set(used);
            }
            metrics.replica_load_seconds.with_label_values(&labels).set(view.load_seconds);
            metrics.replica_sequences.with_label_values(&labels).set(view.active_sequences as f64);
            if let Some(pressure) = view.kv_pressure {
                metrics.replica_kv_pressure.with_label_values(&labels).set(pressure);
            }
            metrics.replica_rate.with_label_values(&[id, model.as_str(), "decode"]).set(view.decode_tokens_per_sec);
            metrics.replica_rate.with_label_values(&[id, model.as_str(), "prefill"]).set(view.prefill_tokens_per_sec);
            metrics.replica_state.with_label_values(&[id, model.as_str(), running.state_label(&view)]).set(1);
        }
    }
    for model in &epoch.config.models {
        let desired = running.desired_replicas(&model.name);
        metrics.desired_replicas.with_label_values(&[model.name.as_str()]).set(desired);
        for band in &epoch.config.bands {
            metrics.queue_depth.with_label_values(&[model.name.as_str(), &band.name]).set(0);
        }
    }
    for (model, band, depth) in running.balancer.queue_depths() {
        let band = epoch.band(band).name.as_str();
        metrics.queue_depth.with_label_values(&[model.as_str(), band]).set(i64::try_from(depth).unwrap_or(i64::MAX));
    }
    for (model, state) in epoch.weigher.tokenizers() {
        metrics.tokenizer_state.with_label_values(&[model.as_str(), tokenizer_label(&state)]).set(1);
    }
    if let Some(fleet) = running.fleet() {
        for (source, up) in fleet.discovery_states() {
            metrics.discovery_state.with_label_values(&[&source]).set(i64::from(up));
        }
    }
}

fn tokenizer_label(state: &TokenizerState) -> &'static str {
    match state {
        TokenizerState::Loading => "loading",
        TokenizerState::Ready => "ready",
        TokenizerState::Failed(_) => "failed",
    }
}

async fn replicas(State(admin): State<Admin>) -> Json<Value> {
    let all: Vec<Value> = admin
        .running
        .balancer
        .views()
        .iter()
        .map(|view| {
            json!({
                "id": view.spec.id,
                "url": view.spec.url.to_string(),
                "models": view.spec.models,
                "gpu": view.spec.gpu,
                "quant": view.spec.quant,
                "region": view.spec.region,
                "state": admin.running.state_label(view),
                "projected_tokens": view.projected_tokens,
                "booked_kv_tokens": view.booked_kv_tokens,
                "token_capacity": view.token_capacity,
                "load_seconds": view.load_seconds,
                "active_sequences": view.active_sequences,
                "requests_in_flight": view.requests_in_flight,
                "kv_pressure": view.kv_pressure,
                "decode_tokens_per_sec": view.decode_tokens_per_sec,
                "prefill_tokens_per_sec": view.prefill_tokens_per_sec,
            })
        })
        .collect();
    Json(Value::from(all))
}

async fn queues(State(admin): State<Admin>) -> Json<Value> {
    let epoch = admin.running.epoch();
    let all: Vec<Value> = admin
        .running
        .balancer
        .queue_depths()
        .iter()
        .map(|(model, band, waiting)| json!({"model": model, "band": epoch.band(*band).name, "waiting": waiting}))
        .collect();
    Json(Value::from(all))
}

async fn config(State(admin): State<Admin>) -> Json<Value> {
    Json(crate::config::digest(&admin.running.epoch().config))
}

async fn revisions(State(admin): State<Admin>) -> Response {
    Json(admin.running.revisions()).into_response()
}

async fn reload(State(admin): State<Admin>) -> Response {
    let hook = admin.reload.clone();
    let outcome = match tokio::task::spawn_blocking(move || hook()).await {
        Ok(outcome) => outcome,
        Err(e) => return problem(StatusCode::INTERNAL_SERVER_ERROR, &format!("the reload broke off: {e}")),
    };
    let status = match outcome {
        crate::running::ReloadOutcome::Failed { .. } => StatusCode::UNPROCESSABLE_ENTITY,
        _ => StatusCode::OK,
    };
    (status, Json(outcome)).into_response()
}

/// What a drain may say.
#[derive(Debug, serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct DrainOptions {
    timeout: Option<String>,
}

async fn drain(
    State(admin): State<Admin>,
    Path(id): Path<String>,
    options: Result<Query<DrainOptions>, QueryRejection>,
) -> Response {
    let Ok(options) = options else {
        return problem(
            StatusCode::BAD_REQUEST,
            "a drain takes timeout=DURATION and nothing else, such as timeout=10m",
        );
    };
    let timeout = match options.0.timeout.as_deref().map(humantime::parse_duration).transpose() {
        Ok(timeout) => timeout.unwrap_or(admin.running.epoch().config.limits.drain_timeout),
        Err(_) => return problem(StatusCode::BAD_REQUEST, "timeout is a duration such as 90s or 10m"),
    };
    set_drain(&admin, &id, Some(timeout))
}

async fn undrain(State(admin): State<Admin>, Path(id): Path<String>) -> Response {
    set_drain(&admin, &id, None)
}

/// Drains within this time, or ends a drain.
fn set_drain(admin: &Admin, id: &str, within: Option<Duration>) -> Response {
    let replica = ReplicaId::from(id);
    let known = match (admin.running.fleet(), within) {
        (Some(fleet), Some(_)) => fleet.drain(&replica, within),
        (Some(fleet), None) => fleet.undrain(&replica),
        (None, _) => false,
    };
    if known {
        tracing::info!(replica = id, drain = within.is_some(), ?within, "drain set through the admin API");
        let seconds = within.map(|timeout| timeout.as_secs_f64());
        Json(json!({"id": id, "draining": within.is_some(), "timeout_seconds": seconds})).into_response()
    } else {
        problem(StatusCode::NOT_FOUND, "no such replica; GET /admin/replicas lists them")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_that_a_web_page_could_have_is_refused() {
        let here: SocketAddr = "127.0.0.1:9090".parse().unwrap();
        for ours in ["127.0.0.1:9090", "127.0.0.1", "localhost:9090", "LOCALHOST", "[::1]:9090", "10.0.0.3:1"] {
            assert!(host_is_ours(ours, here), "{ours}");
        }
        for other in ["evil.example", "evil.example:9090", "127.0.0.1.evil.example", "localhost.evil", ""] {
            assert!(!host_is_ours(other, here), "{other}");
        }
    }
}
