//! The metric families, by the contract's names.
//!
//! Gauges that mirror the books are not kept up to date as traffic flows: they are written when somebody reads
//! `/metrics`, from the same views that the admin API shows.

use prometheus::{
    Encoder, Gauge, GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec,
    Opts, Registry, TextEncoder,
};

use crate::wire::{ApiError, Usage};

/// The model label of a request whose model is not configured.
pub const OTHER: &str = "other";

/// OpenTelemetry's recommended boundaries for `gen_ai.server.time_to_first_token`, seconds, and 30 s beyond: a queue
/// may hold a request that long.
const TTFT_BUCKETS: &[f64] =
    &[0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0];
/// OpenTelemetry's for `gen_ai.server.time_per_output_token`, seconds.
const TPOT_BUCKETS: &[f64] = &[0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5];
/// OpenTelemetry's for `gen_ai.server.request.duration`, seconds, and beyond for long reasoning.
const DURATION_BUCKETS: &[f64] =
    &[0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92, 327.68];
/// The balancer's own work: microseconds to a tenth of a second.
const OWN_BUCKETS: &[f64] =
    &[1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2, 0.1, 1.0];
const WAIT_BUCKETS: &[f64] = &[0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 600.0];
/// Estimated total / actual total.
const RATIO_BUCKETS: &[f64] = &[0.1, 0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0];

/// Every family of the balancer.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    pub requests: IntCounterVec,
    pub tokens: IntCounterVec,
    pub ttft: HistogramVec,
    pub tpot: HistogramVec,
    pub duration: HistogramVec,
    pub estimation_error: HistogramVec,
    pub estimate_coverage: IntCounterVec,
    pub prompt_mismatch: IntCounterVec,
    pub weigh_seconds: HistogramVec,
    pub select_seconds: Histogram,
    pub overhead_seconds: Histogram,
    pub queue_wait: HistogramVec,
    pub queue_depth: IntGaugeVec,
    pub replica_projected: GaugeVec,
    pub replica_utilization: GaugeVec,
    pub replica_load_seconds: GaugeVec,
    pub replica_sequences: GaugeVec,
    pub replica_kv_pressure: GaugeVec,
    pub replica_rate: GaugeVec,
    pub replica_state: IntGaugeVec,
    pub desired_replicas: GaugeVec,
    pub retries: IntCounterVec,
    pub upstream_errors: IntCounterVec,
    pub tokenizer_state: IntGaugeVec,
    pub reloads: IntCounterVec,
    pub config_revision: IntGauge,
    pub config_last_success: Gauge,
    pub config_reload_failed: IntGauge,
    pub in_flight: IntGauge,
    pub connections: IntGauge,
    pub connections_refused: IntCounter,
    pub discovery_state: IntGaugeVec,
    pub rate_limited: IntCounterVec,
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// Families without samples, in a registry of their own.
    ///
    /// # Panics
    /// Never: names are constants that a test registers.
    pub fn new() -> Metrics {
        let registry = Registry::new();
        let counters = |name: &str, help: &str, labels: &[&str]| {
            let family = IntCounterVec::new(Opts::new(name, help), labels).expect("metric names are constants");
            registry.register(Box::new(family.clone())).expect("metric names are unique");
            family
        };
        let gauges = |name: &str, help: &str, labels: &[&str]| {
            let family = GaugeVec::new(Opts::new(name, help), labels).expect("metric names are constants");
            registry.register(Box::new(family.clone())).expect("metric names are unique");
            family
        };
        let int_gauges = |name: &str, help: &str, labels: &[&str]| {
            let family = IntGaugeVec::new(Opts::new(name, help), labels).expect("metric names are constants");
            registry.register(Box::new(family.clone())).expect("metric names are unique");
            family
        };
        let histograms = |name: &str, help: &str, buckets: &[f64], labels: &[&str]| {
            let opts = HistogramOpts::new(name, help).buckets(buckets.to_vec());
            let family = HistogramVec::new(opts, labels).expect("metric names are constants");
            registry.register(Box::new(family.clone())).expect("metric names are unique");
            family
        };
        let histogram = |name: &str, help: &str, buckets: &[f64]| {
            let family = Histogram::with_opts(HistogramOpts::new(name, help).buckets(buckets.to_vec()))
                .expect("metric names are constants");
            registry.register(Box::new(family.clone())).expect("metric names are unique");
            family
        };
        let int_gauge = |name: &str, help: &str| {
            let family = IntGauge::new(name, help).expect("metric names are constants");
            registry.register(Box::new(family.clone())).expect("metric names are unique");
            family
        };
        let counter = |name: &str, help: &str| {
            let family = IntCounter::new(name, help).expect("metric names are constants");
            registry.register(Box::new(family.clone())).expect("metric names are unique");
            family
        };
        let gauge = |name: &str, help: &str| {
            let family = Gauge::new(name, help).expect("metric names are constants");
            registry.register(Box::new(family.clone())).expect("metric names are unique");
            family
        };
        Metrics {
            requests: counters(
                "weighbridge_requests_total",
                "Requests that ended, by how.",
                &["model", "endpoint", "band", "status", "outcome"],
            ),
            tokens: counters(
                "weighbridge_tokens_total",
                "Tokens of ended requests: kind prompt, cached_prompt (part of prompt), output, reasoning (part of output); source engine or estimate.",
                &["model", "kind", "source"],
            ),
            ttft: histograms(
                "gen_ai_server_time_to_first_token_seconds",
                "From a request's header to its first content event.",
                TTFT_BUCKETS,
                &["gen_ai_request_model"],
            ),
            tpot: histograms(
                "gen_ai_server_time_per_output_token_seconds",
                "Time per output token after the first, of streamed answers.",
                TPOT_BUCKETS,
                &["gen_ai_request_model"],
            ),
            duration: histograms(
                "gen_ai_server_request_duration_seconds",
                "From a request's header to the end of its answer.",
                DURATION_BUCKETS,
                &["gen_ai_request_model", "outcome"],
            ),
            estimation_error: histograms(
                "weighbridge_estimation_error_ratio",
                "Estimated total tokens / actual total tokens.",
                RATIO_BUCKETS,
                &["model", "task", "source"],
            ),
            estimate_coverage: counters(
                "weighbridge_estimate_coverage_total",
                "Completed answers that were at most as long as the predicted quantile (covered yes), or longer (no).",
                &["model", "quantile", "covered"],
            ),
            prompt_mismatch: counters(
                "weighbridge_prompt_count_mismatch_total",
                "Requests whose engine reported another number of prompt tokens than was counted as exact.",
                &["model"],
            ),
            weigh_seconds: histograms(
                "weighbridge_weigh_seconds",
                "Time to weigh a request: parse, template, count, estimate.",
                OWN_BUCKETS,
                &["model"],
            ),
            select_seconds: histogram(
                "weighbridge_select_seconds",
                "Time to choose a replica and book, without waiting.",
                OWN_BUCKETS,
            ),
            overhead_seconds: histogram(
                "weighbridge_overhead_seconds",
                "From a body read whole to its request going upstream, without waiting in a queue.",
                OWN_BUCKETS,
            ),
            queue_wait: histograms(
                "weighbridge_queue_wait_seconds",
                "Time in a band's queue.",
                WAIT_BUCKETS,
                &["model", "band"],
            ),
            queue_depth: int_gauges("weighbridge_queue_depth", "Requests waiting.", &["model", "band"]),
            replica_projected: gauges(
                "weighbridge_replica_projected_tokens",
                "Work booked and not yet done: uncomputed prompt and expected output tokens.",
                &["replica", "model"],
            ),
            replica_utilization: gauges(
                "weighbridge_replica_token_utilization",
                "Booked KV tokens / token_capacity.",
                &["replica", "model"],
            ),
            replica_load_seconds: gauges(
                "weighbridge_replica_load_seconds",
                "Work booked and not yet done, in seconds of this replica.",
                &["replica", "model"],
            ),
            replica_sequences: gauges(
                "weighbridge_replica_active_sequences",
                "Sequences booked.",
                &["replica", "model"],
            ),
            replica_kv_pressure: gauges(
                "weighbridge_replica_kv_cache_pressure",
                "KV cache use the engine reported, 0 to 1; absent where unknown or stale.",
                &["replica", "model"],
            ),
            replica_rate: gauges(
                "weighbridge_replica_tokens_per_second",
                "Learned (at first configured) rate.",
                &["replica", "model", "phase"],
            ),
            replica_state: int_gauges(
                "weighbridge_replica_state",
                "1 for the state a replica is in.",
                &["replica", "model", "state"],
            ),
            desired_replicas: gauges(
                "weighbridge_desired_replicas",
                "Replicas that the load of the moment asks for, for an autoscaler.",
                &["model"],
            ),
            retries: counters("weighbridge_retries_total", "Attempts after the first, by cause.", &["model", "cause"]),
            upstream_errors: counters(
                "weighbridge_upstream_errors_total",
                "What went wrong at a replica, by kind.",
                &["replica", "kind"],
            ),
            tokenizer_state: int_gauges(
                "weighbridge_tokenizer_state",
                "1 for the state a model's tokenizer is in: loading, ready, failed.",
                &["model", "state"],
            ),
            reloads: counters(
                "weighbridge_config_reloads_total",
                "Reloads by result: applied, unchanged, failed.",
                &["result"],
            ),
            config_revision: int_gauge("weighbridge_config_revision", "Revision of the configuration in force."),
            config_last_success: gauge(
                "weighbridge_config_last_success_timestamp_seconds",
                "When a configuration was last taken, in Unix seconds.",
            ),
            config_reload_failed: int_gauge(
                "weighbridge_config_reload_failed",
                "1 while the newest attempt to reload was refused.",
            ),
            in_flight: int_gauge("weighbridge_requests_in_flight", "Requests between header and end of answer."),
            connections: int_gauge("weighbridge_client_connections", "Open client connections."),
            connections_refused: counter(
                "weighbridge_client_connections_refused_total",
                "Client connections refused by limits.connections or limits.connections_per_address.",
            ),
            discovery_state: int_gauges(
                "weighbridge_discovery_up",
                "1 where a discovery source answered last time it was asked.",
                &["source"],
            ),
            rate_limited: counters(
                "weighbridge_rate_limited_total",
                "Requests refused by a tenant's limit.",
                &["tenant", "limit"],
            ),
            registry,
        }
    }

    /// A request that was refused before it had a model.
    pub fn refused_at_edge(&self, error: &ApiError) {
        self.requests.with_label_values(&[OTHER, OTHER, OTHER, status_label(error.status()), "refused"]).inc();
    }

    /// Counts an ended request's tokens. `from_engine`: the engine reported them.
    pub fn count_tokens(&self, model: &str, usage: &Usage, from_engine: bool) {
        let source = if from_engine { "engine" } else { "estimate" };
        for (kind, n) in [
            ("prompt", usage.prompt),
            ("cached_prompt", usage.cached_prompt),
            ("output", usage.output),
            ("reasoning", usage.reasoning),
        ] {
            if n > 0 {
                self.tokens.with_label_values(&[model, kind, source]).inc_by(n);
            }
        }
    }

    /// All samples in Prometheus' text format.
    pub fn text(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(16 * 1024);
        if let Err(e) = TextEncoder::new().encode(&self.registry.gather(), &mut out) {
            tracing::error!(error = %e, "metrics could not be written");
        }
        out
    }
}

/// A status as a label: the fixed set of statuses that a balancer or an engine answers with.
pub fn status_label(status: u16) -> &'static str {
    match status {
        200 => "200",
        400 => "400",
        401 => "401",
        403 => "403",
        404 => "404",
        405 => "405",
        408 => "408",
        413 => "413",
        415 => "415",
        417 => "417",
        422 => "422",
        429 => "429",
        431 => "431",
        499 => "499",
        500 => "500",
        501 => "501",
        502 => "502",
        503 => "503",
        504 => "504",
        529 => "529",
        s if s / 100 == 2 => "2xx",
        s if s / 100 == 3 => "3xx",
        s if s / 100 == 4 => "4xx",
        s if s / 100 == 5 => "5xx",
        _ => "other",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::ErrorCode;

    #[test]
    fn every_family_registers_and_is_written() {
        let metrics = Metrics::new();
        metrics.count_tokens("m", &Usage { prompt: 5, cached_prompt: 0, output: 2, reasoning: 0 }, true);
        let text = String::from_utf8(metrics.text()).unwrap();
        assert!(text.contains("weighbridge_tokens_total{kind=\"prompt\",model=\"m\",source=\"engine\"} 5"), "{text}");
        assert!(!text.contains("kind=\"reasoning\""), "no sample without tokens: {text}");
    }

    #[test]
    fn statuses_come_from_a_fixed_set() {
        let labels: std::collections::BTreeSet<_> = (0..=u16::MAX).map(status_label).collect();
        assert!(labels.len() < 30);
        let metrics = Metrics::new();
        metrics.refused_at_edge(&ApiError::new(ErrorCode::HeaderTooLarge, "x"));
        assert!(String::from_utf8(metrics.text()).unwrap().contains("outcome=\"refused\""));
    }
}
