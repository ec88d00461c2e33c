//! The access log: one JSON line for each ended request, under the target `access`. Prompts and answers are never in it.

use crate::units::Tokens;
use crate::wire::Usage;

/// What is told of one ended request.
#[derive(Debug)]
pub struct AccessRecord<'a> {
    pub request_id: &'a str,
    pub upstream_request_id: Option<&'a str>,
    pub client: Option<std::net::IpAddr>,
    pub method: &'a str,
    pub endpoint: &'a str,
    pub model: &'a str,
    pub tenant: Option<&'a str>,
    pub band: &'a str,
    pub replica: Option<&'a str>,
    pub status: u16,
    pub outcome: &'a str,
    pub error: Option<&'a str>,
    pub stream: bool,
    pub attempts: u32,
    pub counted_prompt_tokens: Option<Tokens>,
    pub counted_exactly: bool,
    pub estimated_output_tokens: Option<u64>,
    pub task: Option<&'a str>,
    pub usage: Option<Usage>,
    pub usage_from_engine: bool,
    pub queue_ms: f64,
    pub ttft_ms: Option<f64>,
    pub duration_ms: f64,
}

impl AccessRecord<'_> {
    /// Writes the record to the log.
    pub fn write(&self) {
        let usage = self.usage.unwrap_or_default();
        tracing::info!(
            target: "access",
            request_id = self.request_id,
            upstream_request_id = self.upstream_request_id,
            client = self.client.map(tracing::field::display),
            method = self.method,
            endpoint = self.endpoint,
            model = self.model,
            tenant = self.tenant,
            band = self.band,
            replica = self.replica,
            status = self.status,
            outcome = self.outcome,
            error = self.error,
            stream = self.stream,
            attempts = self.attempts,
            counted_prompt_tokens = self.counted_prompt_tokens.map(|t| t.0),
            counted_exactly = self.counted_exactly,
            estimated_output_tokens = self.estimated_output_tokens,
            task = self.task,
            prompt_tokens = self.usage.map(|_| usage.prompt),
            cached_prompt_tokens = self.usage.map(|_| usage.cached_prompt),
            output_tokens = self.usage.map(|_| usage.output),
            reasoning_tokens = self.usage.map(|_| usage.reasoning),
            usage_from_engine = self.usage_from_engine,
            queue_ms = round(self.queue_ms),
            ttft_ms = self.ttft_ms.map(round),
            duration_ms = round(self.duration_ms),
        );
    }
}

fn round(ms: f64) -> f64 {
    (ms * 1000.0).round() / 1000.0
}
