//! What engines tell of their load: Prometheus text under each engine's own names, vLLM's `/load`, ORCA headers.
//!
//! Only a correction to the balancer's own books: gauges lag by an engine step, and a scrape may wait for a batch.

use http::HeaderMap;
use serde_json::Value;

use crate::balance::Signals;
use crate::config::Engine;
use crate::units::{Time, Tokens};

/// The header in which an engine reports its load on an answer (ORCA).
pub const ORCA_HEADER: &str = "endpoint-load-metrics";

/// What one scrape told.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Reading {
    pub engine: Option<Engine>,
    pub running: Option<f64>,
    pub waiting: Option<f64>,
    /// 0 to 1, the mean over an engine's ranks.
    pub kv_use: Option<f64>,
    pub kv_capacity: Option<Tokens>,
    /// Requests refused because a queue was full, since the start of the process.
    pub refusals: Option<f64>,
}

impl Reading {
    /// The part the balancer takes.
    pub fn signals(&self, now: Time) -> Signals {
        let count = |v: Option<f64>| v.map(|n| n.max(0.0).round() as u64);
        Signals {
            kv_pressure: self.kv_use.map(|u| u.clamp(0.0, 1.0)),
            running: count(self.running),
            waiting: count(self.waiting),
            read_at: now,
        }
    }

    /// Whether it told anything.
    pub fn is_empty(&self) -> bool {
        *self == Reading { engine: self.engine, ..Reading::default() }
    }

    /// Takes vLLM's `/load` in: it counts at once, where the gauges lag by a step. What it counts beyond them waits.
    pub fn add_load(&mut self, body: &[u8]) {
        let load = serde_json::from_slice::<Value>(body).ok().and_then(|v| v.get("server_load")?.as_f64());
        let Some(load) = load.filter(|l| l.is_finite() && *l >= 0.0) else { return };
        let running = self.running.unwrap_or(0.0);
        self.waiting = Some(self.waiting.unwrap_or(0.0).max(load - running));
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Meaning {
    Running,
    Waiting,
    /// Summed only where the plain gauge is absent.
    WaitingByReason,
    KvUse,
    /// KV size in the labels of an info metric: blocks and tokens per block.
    KvInfo(&'static str, &'static str),
    KvBlocks,
    KvBlockTokens,
    Refusals,
}

/// Names without their engine's prefix, which is followed by `:` or `_` (SGLang appears with either).
const NAMES: &[(&str, Engine, &str, Meaning)] = &[
    ("vllm", Engine::Vllm, "num_requests_running", Meaning::Running),
    ("vllm", Engine::Vllm, "num_requests_waiting", Meaning::Waiting),
    ("vllm", Engine::Vllm, "num_requests_waiting_by_reason", Meaning::WaitingByReason),
    ("vllm", Engine::Vllm, "kv_cache_usage_perc", Meaning::KvUse),
    ("vllm", Engine::Vllm, "gpu_cache_usage_perc", Meaning::KvUse),
    ("vllm", Engine::Vllm, "cache_config_info", Meaning::KvInfo("num_gpu_blocks", "block_size")),
    ("vllm", Engine::Vllm, "admission_rejections_total", Meaning::Refusals),
    ("sglang", Engine::Sglang, "num_running_reqs", Meaning::Running),
    ("sglang", Engine::Sglang, "num_queue_reqs", Meaning::Waiting),
    ("sglang", Engine::Sglang, "token_usage", Meaning::KvUse),
    ("sglang", Engine::Sglang, "cache_config_info", Meaning::KvInfo("num_pages", "page_size")),
    ("trtllm", Engine::TrtLlm, "num_requests_running", Meaning::Running),
    ("trtllm", Engine::TrtLlm, "num_requests_waiting", Meaning::Waiting),
    ("trtllm", Engine::TrtLlm, "kv_cache_utilization", Meaning::KvUse),
    ("trtllm", Engine::TrtLlm, "kv_cache_max_blocks", Meaning::KvBlocks),
    ("trtllm", Engine::TrtLlm, "kv_cache_tokens_per_block", Meaning::KvBlockTokens),
    ("llamacpp", Engine::LlamaCpp, "requests_processing", Meaning::Running),
    ("llamacpp", Engine::LlamaCpp, "requests_deferred", Meaning::Waiting),
    ("llamacpp", Engine::LlamaCpp, "kv_cache_usage_ratio", Meaning::KvUse),
    ("tgi", Engine::Tgi, "batch_current_size", Meaning::Running),
    ("tgi", Engine::Tgi, "queue_size", Meaning::Waiting),
];

/// Where an engine keeps its Prometheus text.
pub fn metrics_path(engine: Engine) -> &'static str {
    if engine == Engine::TrtLlm { "/prometheus/metrics" } else { "/metrics" }
}

/// Reads Prometheus text. Lines that are not understood are passed over; data-parallel ranks of one server are summed.
pub fn read(text: &str) -> Reading {
    let mut reading = Reading::default();
    let (mut kv_uses, mut by_reason) = (Vec::new(), None);
    let (mut blocks, mut block_tokens): (Option<f64>, Option<f64>) = (None, None);
    let add = |sum: &mut Option<f64>, value: f64| *sum = Some(sum.unwrap_or(0.0) + value);
    for line in text.lines() {
        let Some((name, labels, value)) = sample(line) else { continue };
        let Some((engine, meaning)) = meaning(name) else { continue };
        reading.engine = reading.engine.or(Some(engine));
        match meaning {
            Meaning::Running => add(&mut reading.running, value),
            Meaning::Waiting => add(&mut reading.waiting, value),
            Meaning::WaitingByReason => add(&mut by_reason, value),
            Meaning::KvUse => kv_uses.push(value),
            Meaning::KvBlocks => blocks = Some(value),
            Meaning::KvBlockTokens => block_tokens = Some(value),
            Meaning::Refusals => add(&mut reading.refusals, value),
            Meaning::KvInfo(count, size) => {
                let number = |key: &str| label(labels, key).and_then(|v| v.parse::<u64>().ok());
                let tokens = number("kv_cache_size_tokens")
                    .or_else(|| Some(number(count)?.saturating_mul(number(size)?)))
                    .filter(|t| *t > 0);
                if let Some(tokens) = tokens {
                    let so_far = reading.kv_capacity.unwrap_or(Tokens::ZERO);
                    reading.kv_capacity = Some(so_far.saturating_add(Tokens(tokens)));
                }
            }
        }
    }
    reading.waiting = reading.waiting.or(by_reason);
    if !kv_uses.is_empty() {
        reading.kv_use = Some(kv_uses.iter().sum::<f64>() / kv_uses.len() as f64);
    }
    if let (Some(blocks), Some(tokens)) = (blocks, block_tokens) {
        reading.kv_capacity = Some(Tokens((blocks * tokens) as u64)).filter(|t| t.0 > 0);
    }
    reading
}

/// A sample line's name, labels and value; `None` for comments and what is no finite number.
fn sample(line: &str) -> Option<(&str, &str, f64)> {
    if line.starts_with('#') {
        return None;
    }
    let (name, labels, rest) = match line.find('{') {
        Some(open) => {
            let close = line.rfind('}').filter(|c| *c > open)?;
            (&line[..open], &line[open + 1..close], &line[close + 1..])
        }
        None => {
            let (name, rest) = line.split_once(' ')?;
            (name, "", rest)
        }
    };
    let value: f64 = rest.split_ascii_whitespace().next()?.parse().ok()?;
    value.is_finite().then_some((name.trim(), labels, value))
}

fn meaning(name: &str) -> Option<(Engine, Meaning)> {
    NAMES.iter().find_map(|(prefix, engine, rest, meaning)| {
        let found = name.strip_prefix(prefix)?.strip_prefix([':', '_'])?;
        (found == *rest).then_some((*engine, *meaning))
    })
}

/// A label's value, where its name is exactly `key`.
fn label<'l>(labels: &'l str, key: &str) -> Option<&'l str> {
    let mut from = 0;
    while let Some(at) = labels[from..].find(key) {
        let start = from + at;
        let whole = start == 0 || labels[..start].ends_with([',', ' ']);
        let after = &labels[start + key.len()..];
        if whole && let Some(value) = after.strip_prefix("=\"") {
            return value.split('"').next();
        }
        from = start + key.len();
    }
    None
}

/// Reads the load that an engine reports with an answer, as `JSON {...}` or `TEXT name=value, ...`.
pub fn orca(headers: &HeaderMap, now: Time) -> Option<Signals> {
    let text = headers.get(ORCA_HEADER)?.to_str().ok()?.trim();
    let mut reading = Reading::default();
    let mut take = |name: &str, value: f64| {
        if !value.is_finite() {
            return;
        }
        match name.rsplit('.').next().unwrap_or(name) {
            "num_requests_running" => reading.running = Some(value),
            "num_requests_waiting" => reading.waiting = Some(value),
            "kv_cache_usage_perc" | "kv_cache_utilization" => reading.kv_use = Some(value),
            _ => {}
        }
    };
    if let Some(json) = text.strip_prefix("JSON").map(str::trim_start) {
        let value: Value = serde_json::from_str(json).ok()?;
        let fields = value.as_object()?;
        let named = fields.get("named_metrics").and_then(Value::as_object);
        for (name, value) in fields.iter().chain(named.into_iter().flatten()) {
            value.as_f64().into_iter().for_each(|v| take(name, v));
        }
    } else {
        let text = text.strip_prefix("TEXT").unwrap_or(text);
        for pair in text.split(',') {
            if let Some((name, value)) = pair.trim().split_once('=') {
                value.trim().parse().into_iter().for_each(|v| take(name.trim(), v));
            }
        }
    }
    (!reading.is_empty()).then(|| reading.signals(now))
}

#[cfg(test)]
mod tests {
    use super::*;

    const VLLM: &str = include_str!("../../tests/data/fleet/vllm-0.32-busy.prom");
    const LLAMA: &str = include_str!("../../tests/data/fleet/llama-server-b10068.prom");

    #[test]
    fn a_busy_vllm_is_read_by_its_own_names() {
        let reading = read(VLLM);
        assert_eq!(reading.engine, Some(Engine::Vllm));
        assert_eq!((reading.running, reading.waiting), (Some(8.0), Some(6.0)));
        assert_eq!(reading.kv_use, Some(0.04419889502762431));
        assert_eq!(reading.kv_capacity, Some(Tokens(182 * 128)));
        assert_eq!(reading.refusals, Some(0.0));
    }

    #[test]
    fn a_llama_server_tells_running_and_deferred_only() {
        let reading = read(LLAMA);
        assert_eq!((reading.engine, reading.running, reading.waiting), (Some(Engine::LlamaCpp), Some(0.0), Some(0.0)));
        assert_eq!((reading.kv_use, reading.kv_capacity), (None, None));
    }

    #[test]
    fn every_engine_and_alias_is_read() {
        let sglang = read(
            "sglang:num_running_reqs{tp_rank=\"0\"} 3\nsglang_num_queue_reqs 2.0\nsglang:token_usage 0.5\nsglang:cache_config_info{page_size=\"64\",num_pages=\"100\"} 1.0\n",
        );
        assert_eq!((sglang.running, sglang.waiting, sglang.kv_use), (Some(3.0), Some(2.0), Some(0.5)));
        assert_eq!(sglang.kv_capacity, Some(Tokens(6400)));
        let trt = read(
            "trtllm_num_requests_running 4\ntrtllm_num_requests_waiting 1\ntrtllm_kv_cache_utilization 0.25\ntrtllm_kv_cache_max_blocks 10\ntrtllm_kv_cache_tokens_per_block 32\n",
        );
        assert_eq!((trt.engine, trt.kv_capacity, trt.kv_use), (Some(Engine::TrtLlm), Some(Tokens(320)), Some(0.25)));
        let tgi = read("tgi_queue_size 7\ntgi_batch_current_size 2\n");
        assert_eq!((tgi.engine, tgi.waiting, tgi.running), (Some(Engine::Tgi), Some(7.0), Some(2.0)));
        let old = read(
            "vllm:gpu_cache_usage_perc 0.75\nvllm:num_requests_waiting_by_reason{reason=\"a\"} 2\nvllm:num_requests_waiting_by_reason{reason=\"b\"} 3\n",
        );
        assert_eq!((old.kv_use, old.waiting), (Some(0.75), Some(5.0)));
    }

    #[test]
    fn ranks_of_one_server_are_summed_and_their_use_averaged() {
        let reading = read(
            "vllm:num_requests_running{engine=\"0\"} 3\nvllm:num_requests_running{engine=\"1\"} 4\nvllm:kv_cache_usage_perc{engine=\"0\"} 0.2\nvllm:kv_cache_usage_perc{engine=\"1\"} 0.6\n",
        );
        assert_eq!(reading.running, Some(7.0));
        assert!((reading.kv_use.unwrap() - 0.4).abs() < 1e-9);
    }

    #[test]
    fn odd_lines_are_passed_over() {
        let reading = read(
            "vllm:num_requests_running NaN\nvllm:cache_config_info{num_gpu_blocks=\"None\",block_size=\"16\"} 1\nvllm:num_requests_waiting\n}{ 1\n\n",
        );
        assert!(reading.is_empty(), "{reading:?}");
    }

    #[test]
    fn vllm_load_counts_what_the_gauges_do_not_show_yet() {
        let mut reading = read("vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n");
        reading.add_load(br#"{"server_load":14}"#);
        assert_eq!(reading.waiting, Some(14.0));
        reading.add_load(br#"{"detail":"Not Found"}"#);
        assert_eq!(reading.waiting, Some(14.0));
    }

    #[test]
    fn orca_is_read_in_both_spellings() {
        let said = |text: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(ORCA_HEADER, text.parse().unwrap());
            orca(&headers, Time(5))
        };
        let json =
            said(r#"JSON {"named_metrics": {"num_requests_waiting": 1.0, "kv_cache_usage_perc": 0.5}}"#).unwrap();
        assert_eq!((json.waiting, json.running, json.kv_pressure, json.read_at), (Some(1), None, Some(0.5), Time(5)));
        let text = said("TEXT named_metrics.num_requests_waiting=2.0, named_metrics.kv_cache_usage_perc=0.25").unwrap();
        assert_eq!((text.waiting, text.kv_pressure), (Some(2), Some(0.25)));
        for odd in [
            "JSON {",
            "JSON 3",
            "TEXT",
            "TEXT a=b",
            "BIN xxxx",
            "JSON {\"named_metrics\":{\"kv_cache_usage_perc\":\"x\"}}",
        ] {
            assert_eq!(said(odd), None, "{odd}");
        }
        assert_eq!(orca(&HeaderMap::new(), Time(0)), None);
    }
}
