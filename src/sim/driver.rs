//! A load driver: mixes played in real time against a server, streaming, with every token's time taken.
//!
//! For what general HTTP load generators cannot express: request sizes of a mix, turns that follow each other,
//! shared prefixes, and the time to the first token rather than to the first byte.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout_at};

use super::mix::SimRequest;
use super::replica::{WORD_TOKENS_OF_A_TURN, word};
use super::stats::Record;

/// Where and how a mix is played.
#[derive(Clone, Debug)]
pub struct Target {
    /// Such as `http://127.0.0.1:8080`.
    pub base_url: String,
    pub model: String,
    pub api_key: Option<String>,
    /// The bands' names, for requests of other than the default band; empty where the server knows none.
    pub bands: Vec<String>,
    /// What is still running this long after the last arrival is cut.
    pub drain: Duration,
}

/// What is known of one replica while a mix is played.
#[derive(Clone, Debug, Default)]
pub struct ReplicaTally {
    pub requests: u64,
    pub completed: u64,
    pub tokens: u64,
    pub ttft: Vec<f64>,
}

/// What is known while a mix is played, by the name that answers give their replica.
#[derive(Debug, Default)]
pub struct Tally {
    pub replicas: Mutex<BTreeMap<String, ReplicaTally>>,
}

/// The result of one request.
#[derive(Clone, Debug, Default)]
pub struct Played {
    pub record: Record,
    /// As the answer's `x-weighbridge-replica` has it.
    pub replica: Option<String>,
    /// Why it was not completed.
    pub fault: Option<String>,
}

/// Prompt text of this many tokens of the simulated replica's tokenizer, about as many of others'.
fn prompt_text(r: &SimRequest) -> String {
    let tokens = r.prompt.saturating_sub(WORD_TOKENS_OF_A_TURN).max(1);
    let shared = r.prefix.shared_tokens;
    (0..tokens).map(|i| word(if i < shared { r.prefix.shared } else { r.prefix.own }, i)).collect()
}

fn body(r: &SimRequest, model: &str) -> Value {
    let mut body = json!({
        "model": model,
        "messages": [{"role": "user", "content": prompt_text(r)}],
        "stream": true,
        "stream_options": {"include_usage": true},
        "task_type": r.task,
        "sim_output_tokens": r.output,
    });
    if let Some(max) = r.max_tokens {
        body["max_tokens"] = json!(max);
    }
    body
}

/// Plays requests at their times and returns what became of each, in their order.
pub async fn play(requests: &[SimRequest], target: &Target, tally: Arc<Tally>) -> anyhow::Result<Vec<Played>> {
    let client = reqwest::Client::builder().tcp_nodelay(true).pool_max_idle_per_host(1_024).build()?;
    let start = Instant::now();
    let last = requests.iter().map(|r| r.at).fold(0.0, f64::max);
    let deadline = start + Duration::from_secs_f64(last) + target.drain;
    // Closed when its request has ended; nobody ever gets a permit.
    let ended: Arc<Vec<Semaphore>> = Arc::new(requests.iter().map(|_| Semaphore::new(0)).collect());
    let mut tasks = JoinSet::new();
    for (i, r) in requests.iter().enumerate() {
        let (client, target, r, ended, tally) =
            (client.clone(), target.clone(), r.clone(), Arc::clone(&ended), Arc::clone(&tally));
        tasks.spawn(async move {
            let due = start + Duration::from_secs_f64(r.at);
            sleep_until(due).await;
            if let Some(before) = r.after {
                let waited = timeout_at(deadline, ended[before].acquire()).await;
                if waited.is_ok() && Instant::now() > due {
                    sleep_until((Instant::now() + Duration::from_secs_f64(r.think)).min(deadline)).await;
                }
            }
            let mut played = Played::default();
            let arrived = Instant::now();
            played.record = Record { arrived: (arrived - start).as_secs_f64(), band: r.band.0, ..Record::default() };
            match timeout_at(deadline, send(&client, &target, &r, arrived, &tally, &mut played)).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => played.fault = Some(format!("{error:#}")),
                Err(_) => played.fault = Some("not answered in time".to_owned()),
            }
            ended[i].close();
            (i, played)
        });
    }
    let mut all = vec![Played::default(); requests.len()];
    while let Some(done) = tasks.join_next().await {
        let (i, played) = done?;
        all[i] = played;
    }
    Ok(all)
}

async fn send(
    client: &reqwest::Client,
    target: &Target,
    r: &SimRequest,
    arrived: Instant,
    tally: &Tally,
    played: &mut Played,
) -> anyhow::Result<()> {
    let mut request = client.post(format!("{}/v1/chat/completions", target.base_url)).json(&body(r, &target.model));
    if let Some(key) = &target.api_key {
        request = request.bearer_auth(key);
    }
    if let Some(session) = r.session {
        request = request.header("x-session-id", format!("{session:016x}"));
    }
    if let Some(band) = target.bands.get(usize::from(r.band.0)) {
        request = request.header("x-weighbridge-priority", band);
    }
    let mut answer = request.send().await?;
    let status = answer.status();
    played.replica = answer.headers().get("x-weighbridge-replica").and_then(|v| v.to_str().ok()).map(str::to_owned);
    if !status.is_success() {
        played.record.refused = matches!(status.as_u16(), 429 | 503 | 504);
        let text = answer.text().await.unwrap_or_default();
        anyhow::bail!("{status}: {}", text.chars().take(200).collect::<String>());
    }
    let replica = played.replica.clone().unwrap_or_else(|| "-".to_owned());
    tally.replicas.lock().entry(replica.clone()).or_default().requests += 1;
    let mut events = Events::default();
    while let Some(chunk) = answer.chunk().await? {
        let tokens = events.push(&chunk);
        if tokens == 0 {
            continue;
        }
        let mut replicas = tally.replicas.lock();
        let entry = replicas.entry(replica.clone()).or_default();
        entry.tokens += u64::from(tokens);
        if played.record.ttft.is_none() {
            let ttft = arrived.elapsed().as_secs_f64();
            played.record.ttft = Some(ttft);
            entry.ttft.push(ttft);
        }
        played.record.output += tokens;
    }
    // Events may carry several tokens each; the usage at the end has them all.
    if let Some(output) = events.output {
        played.record.output = output;
    }
    anyhow::ensure!(events.done, "the stream ended before its end");
    played.record.e2e = Some(arrived.elapsed().as_secs_f64());
    tally.replicas.lock().entry(replica).or_default().completed += 1;
    Ok(())
}

/// Reads just enough of an SSE stream: how many events carry a token, the usage at its end, and whether that was seen.
#[derive(Debug, Default)]
struct Events {
    rest: Vec<u8>,
    done: bool,
    /// Output tokens, as usage has them.
    output: Option<u32>,
}

impl Events {
    fn push(&mut self, chunk: &[u8]) -> u32 {
        self.rest.extend_from_slice(chunk);
        let mut tokens = 0;
        let mut from = 0;
        while let Some(length) = memchr::memchr(b'\n', &self.rest[from..]) {
            let line = &self.rest[from..from + length];
            from += length + 1;
            let Some(data) = line.strip_prefix(b"data:") else { continue };
            let data = data.trim_ascii();
            if data == b"[DONE]" {
                self.done = true;
            } else if let Ok(event) = serde_json::from_slice::<Value>(data) {
                tokens += u32::from(carries_token(&event));
                let reported = event["usage"]["completion_tokens"].as_u64();
                self.output = reported.and_then(|tokens| u32::try_from(tokens).ok()).or(self.output);
            }
        }
        self.rest.drain(..from);
        tokens
    }
}

fn carries_token(event: &Value) -> bool {
    let choice = &event["choices"][0];
    let texts = [&choice["delta"]["content"], &choice["delta"]["reasoning_content"], &choice["text"]];
    // An answer that stopped by itself ends in a token without text.
    texts.iter().any(|t| t.as_str().is_some_and(|t| !t.is_empty())) || choice["finish_reason"].as_str() == Some("stop")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::engine::EngineShape;
    use crate::sim::mix::{self, Mix, Traffic};
    use crate::sim::replica::{ReplicaOptions, SimReplica};

    #[test]
    fn tokens_are_counted_whatever_the_chunks() {
        let stream = "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"finish_reason\":null}]}\n\n\
                      data: {\"choices\":[{\"delta\":{\"content\":\" a\"},\"finish_reason\":null}]}\n\n\
                      data: {\"choices\":[{\"delta\":{\"content\":\"\"},\"finish_reason\":\"stop\"}]}\n\n\
                      data: {\"choices\":[],\"usage\":{\"completion_tokens\":9}}\n\ndata: [DONE]\n\n";
        for size in [1, 7, 64, stream.len()] {
            let mut events = Events::default();
            let tokens: u32 = stream.as_bytes().chunks(size).map(|chunk| events.push(chunk)).sum();
            assert_eq!((tokens, events.output, events.done), (2, Some(9), true));
        }
    }

    #[tokio::test]
    async fn a_mix_is_played_with_its_own_sizes() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let base_url = format!("http://{}", listener.local_addr().unwrap());
        let shape = EngineShape { speed: 50.0, ..EngineShape::default() };
        let replica = SimReplica::new(ReplicaOptions { shape: shape.clone(), ..ReplicaOptions::default() });
        tokio::spawn(Arc::clone(&replica).serve(listener, std::future::pending()));
        let traffic = Traffic { mix: Mix::Chat, requests: 40, seed: 3, load: 0.5, flood: None };
        let mut requests = mix::generate(&traffic, &EngineShape::default(), 1.0);
        let last = requests.last().unwrap().at;
        for r in &mut requests {
            r.at /= last;
            r.think = 0.0;
            r.output = r.output.min(50);
        }
        let target = Target {
            base_url: base_url.clone(),
            model: "sim".to_owned(),
            api_key: None,
            bands: Vec::new(),
            drain: Duration::from_secs(30),
        };
        let tally = Arc::new(Tally::default());
        let played = play(&requests, &target, Arc::clone(&tally)).await.unwrap();
        for (played, r) in played.iter().zip(&requests) {
            assert_eq!(played.fault, None);
            assert_eq!(played.record.output, r.output);
            assert!(played.record.ttft.unwrap() <= played.record.e2e.unwrap());
        }
        let metrics = reqwest::get(format!("{base_url}/metrics")).await.unwrap().text().await.unwrap();
        let line = metrics.lines().find(|l| l.starts_with("vllm:prompt_tokens_total{")).unwrap();
        let counted: f64 = line.rsplit(' ').next().unwrap().parse().unwrap();
        assert_eq!(counted, requests.iter().map(|r| f64::from(r.prompt)).sum::<f64>(), "prompts have their sizes");
        let hits = metrics.lines().find(|l| l.starts_with("vllm:prefix_cache_hits_total{")).unwrap();
        assert!(hits.rsplit(' ').next().unwrap().parse::<f64>().unwrap() > counted / 4.0, "{hits} of {counted}");
    }
}
