//! `logging`: settles with the actual usage, once, and tells everybody who learns from it.

use std::sync::Arc;

use pingora_proxy::Session;

use crate::balance::Outcome;
use crate::fleet::TrafficEvent;
use crate::observe::metrics::{OTHER, status_label};
use crate::observe::{AccessRecord, Milliseconds};
use crate::running::Running;
use crate::wire::Usage;
use crate::wire::engine_error::{self, Verdict};

use super::context::{Ctx, Exchange};
use super::retry;

impl Outcome {
    /// The outcome as a label.
    pub fn label(self) -> &'static str {
        match self {
            Outcome::Completed => "completed",
            Outcome::ClientGone => "client_gone",
            Outcome::UpstreamError => "upstream_error",
            Outcome::Refused => "refused",
        }
    }
}

/// How the exchange ended, where no earlier phase has said so.
fn outcome(ctx: &Ctx, exchange: &Exchange) -> Outcome {
    if let Some(outcome) = ctx.outcome {
        return outcome;
    }
    let progress = exchange.reader.as_ref().map(|r| r.progress());
    match progress {
        Some(progress) if progress.error.is_some() => Outcome::UpstreamError,
        _ if exchange.upstream_status.is_some_and(|s| s >= 500 || s == 429) => Outcome::UpstreamError,
        _ if exchange.ended || progress.is_some_and(|p| p.done) || exchange.upstream_status.is_some() => {
            Outcome::Completed
        }
        _ => Outcome::UpstreamError,
    }
}

/// See the module's documentation.
pub fn settle(running: &Arc<Running>, session: &Session, ctx: &mut Ctx) {
    let now = running.clock.now();
    let duration = now.since(ctx.started).as_secs_f64();
    let mut exchange = ctx.exchange.take();
    let outcome = match &exchange {
        Some(exchange) => outcome(ctx, exchange),
        None => ctx.outcome.unwrap_or(Outcome::ClientGone),
    };
    let model = ctx.model.as_ref().map_or(OTHER, |m| m.name.as_str());
    let endpoint = ctx.endpoint.map_or(OTHER, |e| e.label());
    let band = match (&ctx.epoch, ctx.band) {
        (Some(epoch), Some(band)) => epoch.band(band).name.as_str(),
        _ => OTHER,
    };
    let status = match (ctx.status, outcome) {
        (0, Outcome::ClientGone) => 499,
        (0, _) => 500,
        (status, _) => status,
    };
    let mut usage = None;
    let mut from_engine = false;
    if let Some(exchange) = &mut exchange {
        ctx.exchange = None;
        (usage, from_engine) = actual(exchange);
        let learn = usage.filter(|_| outcome == Outcome::Completed && status == 200);
        tell_fleet(running, exchange, outcome);
        if let Some(reservation) = exchange.reservation.take() {
            reservation.settle(usage.as_ref().filter(|_| from_engine), outcome);
        }
        measure(running, ctx, exchange, model, learn.as_ref(), from_engine);
        if let Some(usage) = &usage {
            running.metrics.count_tokens(model, usage, from_engine);
        }
    }
    if let Some(quota) = ctx.quota.take() {
        quota.settle(usage.map_or(0, |u| u.prompt.saturating_add(u.output)));
    }
    running.metrics.requests.with_label_values(&[model, endpoint, band, status_label(status), outcome.label()]).inc();
    if ctx.exchange.is_none() && exchange.is_some() {
        running.metrics.duration.with_label_values(&[model, outcome.label()]).observe(duration);
    }
    if tracing::enabled!(target: "access", tracing::Level::INFO) {
        let x = exchange.as_deref();
        AccessRecord {
            request_id: &ctx.request_id,
            upstream_request_id: x.and_then(|x| x.upstream_request_id.as_deref()),
            client: ctx.client,
            method: session.req_header().method.as_str(),
            endpoint,
            model,
            tenant: ctx.tenant.as_ref().map(|t| t.spec.name.as_str()),
            band,
            replica: x.and_then(|x| x.replica.as_ref()).map(|r| r.as_str()),
            status,
            outcome: outcome.label(),
            error: ctx.error.as_ref().map(|e| e.code.as_str()),
            stream: x.is_some_and(|x| x.stream),
            attempts: x.map_or(0, |x| x.attempts),
            counted_prompt_tokens: x.map(|x| x.weight.prompt.tokens),
            counted_exactly: x.is_some_and(|x| x.weight.prompt.exact()),
            estimated_output_tokens: x.map(|x| x.weight.output.p50),
            task: x.map(|x| x.weight.history.task.label()),
            prompt_tokens: usage.map(|u| u.prompt),
            cached_prompt_tokens: usage.map(|u| u.cached_prompt),
            output_tokens: usage.map(|u| u.output),
            reasoning_tokens: usage.map(|u| u.reasoning),
            usage_from_engine: from_engine,
            queue_ms: Milliseconds::from_seconds(x.map_or(0.0, |x| x.queue_wait.as_secs_f64())),
            ttft_ms: x
                .and_then(|x| x.first_content_at)
                .map(|t| Milliseconds::from_seconds(t.since(ctx.started).as_secs_f64())),
            duration_ms: Milliseconds::from_seconds(duration),
        }
        .write();
    }
    ctx.in_flight = None;
}

/// What the request really cost, and whether the engine said so. `None` where nothing was answered.
fn actual(exchange: &Exchange) -> (Option<Usage>, bool) {
    let Some(reader) = &exchange.reader else { return (None, false) };
    let progress = reader.progress();
    match progress.usage {
        Some(usage) => (Some(usage), true),
        None => {
            let counted = Usage {
                prompt: exchange.weight.prompt.tokens.0,
                cached_prompt: 0,
                output: progress.output_tokens,
                reasoning: 0,
            };
            (Some(counted), false)
        }
    }
}

fn tell_fleet(running: &Arc<Running>, exchange: &Exchange, outcome: Outcome) {
    let (Some(fleet), Some(reservation)) = (running.fleet(), &exchange.reservation) else { return };
    let replica = reservation.replica();
    let event = match (outcome, exchange.upstream_status) {
        (_, Some(status)) if status >= 400 && !exchange.status_reported => Some(TrafficEvent::Status {
            status,
            retry_after: exchange.error_retry_after,
            body_is_client_fault: matches!(
                engine_error::judge(status, &exchange.error_head),
                Verdict::ClientFault | Verdict::ContextExceeded
            ),
        }),
        (Outcome::Completed, Some(200)) => Some(TrafficEvent::Completed),
        (Outcome::UpstreamError, Some(200)) if exchange.ended => Some(TrafficEvent::StreamError),
        _ => None,
    };
    if let Some(event) = event {
        retry::count_error(running, replica, &event);
        fleet.report(replica, event);
    }
}

/// Feeds histories and histograms from a completed answer.
fn measure(
    running: &Arc<Running>,
    ctx: &Ctx,
    exchange: &Exchange,
    model: &str,
    completed: Option<&Usage>,
    from_engine: bool,
) {
    if let Some(first) = exchange.first_content_at {
        running.metrics.ttft.with_label_values(&[model]).observe(first.since(ctx.started).as_secs_f64());
        if let (Some(last), true) = (exchange.last_content_at, exchange.sse)
            && exchange.output_told > 1
        {
            let per_token = last.since(first).as_secs_f64() / (exchange.output_told - 1) as f64;
            running.metrics.tpot.with_label_values(&[model]).observe(per_token);
        }
    }
    let Some(usage) = completed else { return };
    let weight = &exchange.weight;
    let sequences = u64::from(weight.sequences.max(1));
    if ctx.endpoint.is_some_and(|e| e.generates()) {
        let per_sequence = usage.output.div_ceil(sequences);
        running.histories.settle(&weight.history, &weight.output, per_sequence);
        for (quantile, predicted) in [("p50", weight.output.p50), ("p90", weight.output.p90)] {
            let covered = if per_sequence <= predicted { "yes" } else { "no" };
            running.metrics.estimate_coverage.with_label_values(&[model, quantile, covered]).inc();
        }
        let estimated = weight.prompt.tokens.0 + weight.output.p50 * sequences;
        let total = (usage.prompt + usage.output).max(1);
        running
            .metrics
            .estimation_error
            .with_label_values(&[model, weight.history.task.label(), weight.output.source.label()])
            .observe(estimated as f64 / total as f64);
    }
    if from_engine && weight.prompt.exact() && usage.prompt > 0 && usage.prompt != weight.prompt.tokens.0 {
        running.metrics.prompt_mismatch.with_label_values(&[model]).inc();
        tracing::debug!(
            request_id = ctx.request_id,
            counted = weight.prompt.tokens.0,
            engine = usage.prompt,
            "the engine counted another number of prompt tokens"
        );
    }
}
