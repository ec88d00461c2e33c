//! `/metrics` by the names that vLLM and llama.cpp use.

use std::fmt::Write;

use super::answer::Flavour;
use super::runner::Look;
use crate::sim::engine::{BLOCK_TOKENS, EngineShape};

/// Buckets of vLLM's time to first token, in seconds.
const TTFT_BUCKETS: [f64; 16] =
    [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 60.0];

/// What the server counts beside the engine.
#[derive(Debug, Default)]
pub struct Served {
    pub stopped: u64,
    pub length: u64,
    pub aborted: u64,
    pub rejected: u64,
    ttft: [u64; TTFT_BUCKETS.len()],
    ttft_count: u64,
    ttft_sum: f64,
}

impl Served {
    /// Notes one time to first token.
    pub fn first_token(&mut self, seconds: f64) {
        self.ttft_count += 1;
        self.ttft_sum += seconds;
        for (bucket, bound) in self.ttft.iter_mut().zip(TTFT_BUCKETS) {
            *bucket += u64::from(seconds <= bound);
        }
    }
}

/// The exposition text.
pub fn render(flavour: Flavour, model: &str, shape: &EngineShape, look: Look, served: &Served) -> String {
    match flavour {
        Flavour::Vllm => vllm(model, shape, look, served),
        Flavour::Llamacpp => llamacpp(look),
    }
}

fn line(out: &mut String, kind: &str, name: &str, labels: &str, value: f64) {
    let _ = writeln!(out, "# TYPE {name} {kind}\n{name}{{{labels}}} {value:?}");
}

fn vllm(model: &str, shape: &EngineShape, look: Look, served: &Served) -> String {
    let model = model.replace('\\', "\\\\").replace('"', "\\\"");
    let l = format!("engine=\"0\",model_name=\"{model}\"");
    let c = look.counters;
    let mut out = String::with_capacity(4096);
    line(&mut out, "gauge", "vllm:num_requests_running", &l, look.running as f64);
    line(&mut out, "gauge", "vllm:num_requests_waiting", &l, look.waiting as f64);
    let name = "vllm:num_requests_waiting_by_reason";
    let _ = writeln!(out, "# TYPE {name} gauge\n{name}{{{l},reason=\"capacity\"}} {:?}", look.waiting as f64);
    let _ = writeln!(out, "{name}{{{l},reason=\"deferred\"}} 0.0");
    line(&mut out, "gauge", "vllm:kv_cache_usage_perc", &l, look.kv_usage);
    line(&mut out, "counter", "vllm:prefix_cache_queries_total", &l, c.prompt_tokens as f64);
    line(&mut out, "counter", "vllm:prefix_cache_hits_total", &l, c.cached_tokens as f64);
    line(&mut out, "counter", "vllm:num_preemptions_total", &l, c.preemptions as f64);
    line(&mut out, "counter", "vllm:prompt_tokens_total", &l, c.prompt_tokens as f64);
    line(&mut out, "counter", "vllm:generation_tokens_total", &l, c.generated_tokens as f64);
    let name = "vllm:request_success_total";
    let _ = writeln!(out, "# TYPE {name} counter");
    for (reason, count) in [("stop", served.stopped), ("length", served.length), ("abort", served.aborted)] {
        let _ = writeln!(out, "{name}{{{l},finished_reason=\"{reason}\"}} {:?}", count as f64);
    }
    let name = "vllm:admission_rejections_total";
    let labels = format!("model_name=\"{model}\",reason=\"max_num_queued_reqs\"");
    line(&mut out, "counter", name, &labels, served.rejected as f64);
    let name = "vllm:time_to_first_token_seconds";
    let _ = writeln!(out, "# TYPE {name} histogram");
    for (bound, count) in TTFT_BUCKETS.iter().zip(served.ttft) {
        let _ = writeln!(out, "{name}_bucket{{{l},le=\"{bound:?}\"}} {:?}", count as f64);
    }
    let _ = writeln!(out, "{name}_bucket{{{l},le=\"+Inf\"}} {:?}", served.ttft_count as f64);
    let _ =
        writeln!(out, "{name}_count{{{l}}} {:?}\n{name}_sum{{{l}}} {:?}", served.ttft_count as f64, served.ttft_sum);
    let labels = format!(
        "block_size=\"{BLOCK_TOKENS}\",enable_prefix_caching=\"{}\",engine=\"0\",kv_cache_size_tokens=\"{}\",\
         num_gpu_blocks=\"{}\"",
        if shape.prefix_cache { "True" } else { "False" },
        shape.kv_tokens(),
        shape.kv_blocks
    );
    line(&mut out, "gauge", "vllm:cache_config_info", &labels, 1.0);
    out
}

fn llamacpp(look: Look) -> String {
    let c = look.counters;
    let mut out = String::new();
    for (kind, name, value) in [
        ("counter", "prompt_tokens_total", c.prompt_tokens as f64),
        ("counter", "tokens_predicted_total", c.generated_tokens as f64),
        ("counter", "n_decode_total", c.steps as f64),
        ("gauge", "requests_processing", look.running as f64),
        ("gauge", "requests_deferred", look.waiting as f64),
    ] {
        let _ = writeln!(out, "# TYPE llamacpp:{name} {kind}\nllamacpp:{name} {value}");
    }
    out
}
