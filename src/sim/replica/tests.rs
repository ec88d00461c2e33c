use serde_json::{Value, json};

use super::*;

/// The bodies of a capture's chunks (or its whole body where it is not chunked).
fn capture(name: &str) -> Vec<String> {
    let path = format!("{}/tests/data/sim/{name}.bin", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(&path).unwrap();
    let (head, mut rest) = text.split_once("\r\n\r\n").unwrap();
    if !head.contains("chunked") {
        return vec![rest.to_owned()];
    }
    let mut chunks = Vec::new();
    while let Some((size, tail)) = rest.split_once("\r\n") {
        let size = usize::from_str_radix(size, 16).unwrap();
        if size == 0 {
            break;
        }
        chunks.push(tail[..size].to_owned());
        rest = &tail[size + 2..];
    }
    chunks
}

/// Names and types, without values: what a client's parser sees.
fn shape(value: &Value) -> Value {
    match value {
        Value::Object(object) => Value::Object(object.iter().map(|(k, v)| (k.clone(), shape(v))).collect()),
        Value::Array(items) => items.iter().map(shape).collect(),
        Value::String(_) => json!("text"),
        Value::Number(_) => json!(0),
        Value::Bool(_) => json!(true),
        Value::Null => Value::Null,
    }
}

fn event_shapes(chunk: &str) -> Vec<Value> {
    chunk
        .split("\n\n")
        .filter(|event| !event.is_empty())
        .map(|event| match event.strip_prefix("data: ").unwrap() {
            "[DONE]" => json!("[DONE]"),
            data => shape(&serde_json::from_str(data).unwrap()),
        })
        .collect()
}

async fn start(options: ReplicaOptions) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(SimReplica::new(options).serve(listener, std::future::pending()));
    format!("http://{address}")
}

fn fast() -> ReplicaOptions {
    let shape = crate::sim::engine::EngineShape { speed: 20.0, max_model_len: 2_048, ..Default::default() };
    ReplicaOptions { models: vec!["smollm2-135m".to_owned()], shape, cached_details: false, ..Default::default() }
}

async fn stream(base: &str, path: &str, body: &Value) -> Vec<String> {
    let mut answer = reqwest::Client::new().post(format!("{base}{path}")).json(body).send().await.unwrap();
    assert_eq!(answer.headers()["content-type"].to_str().unwrap().split(';').next(), Some("text/event-stream"));
    let mut chunks = Vec::new();
    while let Ok(Some(chunk)) = answer.chunk().await {
        chunks.push(String::from_utf8(chunk.to_vec()).unwrap());
    }
    chunks
}

fn chat(extra: Value) -> Value {
    let mut body = json!({"model": "smollm2-135m", "messages": [{"role": "user", "content": "Count from 1 to 5."}]});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

#[tokio::test]
async fn streams_have_the_events_of_a_real_vllm_in_their_order() {
    let base = start(fast()).await;
    let usage = json!({"include_usage": true});
    let running = json!({"include_usage": true, "continuous_usage_stats": true});
    let chat_path = "/v1/chat/completions";
    let prompts = json!(["The capital of France is", "One plus one is"]);
    let cases = [
        ("chat_stream_usage_true", chat_path, chat(json!({"stream": true, "max_tokens": 12, "stream_options": usage}))),
        (
            "chat_stream_continuous_usage",
            chat_path,
            chat(json!({"stream": true, "max_tokens": 12, "stream_options": running})),
        ),
        ("chat_stop_stream", chat_path, chat(json!({"stream": true, "max_tokens": 30, "sim_output_tokens": 11}))),
        (
            "cmpl_stream",
            "/v1/completions",
            json!({"prompt": "The capital of France is", "max_tokens": 6, "stream": true, "stream_options": usage}),
        ),
        (
            "cmpl_list_stream",
            "/v1/completions",
            json!({"prompt": prompts, "max_tokens": 6, "stream": true, "stream_options": usage}),
        ),
    ];
    for (name, path, body) in cases {
        let real: Vec<Value> = capture(&format!("vllm_{name}")).iter().flat_map(|c| event_shapes(c)).collect();
        let ours: Vec<Value> = stream(&base, path, &body).await.iter().flat_map(|c| event_shapes(c)).collect();
        // A stop string's reason and fingerprint are the one thing that the simulated replica never sends.
        let trim = |mut events: Vec<Value>| {
            for event in &mut events {
                if let Some(choice) = event.pointer_mut("/choices/0").and_then(Value::as_object_mut) {
                    if choice.contains_key("stop_reason") {
                        choice.insert("stop_reason".to_owned(), Value::Null);
                    }
                    if choice.get("finish_reason").is_some_and(|r| !r.is_null()) {
                        event.as_object_mut().unwrap().remove("system_fingerprint");
                    }
                }
            }
            events
        };
        assert_eq!(trim(ours), trim(real), "{name}");
    }
}

#[tokio::test]
async fn cached_tokens_are_told_in_whole_blocks_where_asked_for() {
    let base = start(ReplicaOptions { cached_details: true, ..fast() }).await;
    let body = chat(json!({"stream": true, "max_tokens": 6, "stream_options": {"include_usage": true},
        "messages": [{"role": "user", "content": "The sea is wide and blue. ".repeat(20)}]}));
    stream(&base, "/v1/chat/completions", &body).await;
    let again = stream(&base, "/v1/chat/completions", &body).await.concat();
    let real: Vec<Value> = capture("vllm_cached_stream").iter().flat_map(|c| event_shapes(c)).collect();
    let usage = event_shapes(&again).into_iter().find(|e| e.get("usage").is_some());
    assert_eq!(usage.as_ref(), real.iter().find(|e| e.get("usage").is_some()));
    let cached: Value =
        serde_json::from_str(again.split("data: ").find(|e| e.contains("cached_tokens")).unwrap()).unwrap();
    let (prompt, cached) =
        (&cached["usage"]["prompt_tokens"], &cached["usage"]["prompt_tokens_details"]["cached_tokens"]);
    let (prompt, cached) = (prompt.as_u64().unwrap(), cached.as_u64().unwrap());
    assert_eq!(cached, (prompt - 1) / 16 * 16);
}

#[tokio::test]
async fn documents_and_errors_have_the_shape_of_a_real_vllm() {
    let base = start(fast()).await;
    let client = reqwest::Client::new();
    let over = "hello world ".repeat(2_000);
    let cases = [
        ("chat_nonstream", 200, "/v1/chat/completions", chat(json!({"max_tokens": 12}))),
        ("cmpl_string", 200, "/v1/completions", json!({"prompt": "The capital of France is", "max_tokens": 6})),
        (
            "chat_over_context",
            400,
            "/v1/chat/completions",
            chat(json!({"messages": [{"role": "user", "content": over}]})),
        ),
        ("chat_unknown_model", 404, "/v1/chat/completions", chat(json!({"model": "no-such-model"}))),
    ];
    for (name, status, path, body) in cases {
        let answer = client.post(format!("{base}{path}")).json(&body).send().await.unwrap();
        assert_eq!(answer.status(), status, "{name}");
        let ours: Value = answer.json().await.unwrap();
        let real: Value = serde_json::from_str(&capture(&format!("vllm_{name}"))[0]).unwrap();
        if status != 200 {
            assert_eq!(ours["error"], real["error"], "{name}");
            continue;
        }
        assert_eq!(shape(&ours["usage"]), shape(&real["usage"]), "{name}");
        for (key, value) in shape(&ours).as_object().unwrap() {
            assert!(real.get(key).is_some(), "{name}: a real vLLM sends no {key}");
            if key == "choices" {
                let real = shape(&real["choices"][0]);
                for key in value[0].as_object().unwrap().keys() {
                    assert!(real.get(key).is_some(), "{name}: no {key} in a real choice");
                }
            }
        }
    }
}

#[tokio::test]
async fn a_llama_server_starts_with_null_content_and_ends_with_timings() {
    let base = start(ReplicaOptions { flavour: Flavour::Llamacpp, ..fast() }).await;
    let body = chat(json!({"stream": true, "max_tokens": 12, "stream_options": {"include_usage": true}}));
    let ours: Vec<Value> =
        stream(&base, "/v1/chat/completions", &body).await.iter().flat_map(|c| event_shapes(c)).collect();
    let real: Vec<Value> = capture("llama_chat_stream_usage_true").iter().flat_map(|c| event_shapes(c)).collect();
    assert_eq!(ours.len(), real.len());
    assert_eq!(ours[0], real[0]);
    assert_eq!(ours[1], real[1]);
    assert_eq!(ours[13], real[13], "the finish event");
    assert_eq!(ours[14]["usage"], real[14]["usage"]);
    assert!(ours[14]["timings"].is_object());
}

#[tokio::test]
async fn tokenize_counts_what_usage_reports() {
    let base = start(fast()).await;
    let client = reqwest::Client::new();
    let ask = chat(json!({"max_tokens": 1, "messages": [
        {"role": "system", "content": "You are a pirate. Ünïcode, 12345!\n"},
        {"role": "user", "content": [{"type": "text", "text": "Ahoy"}]}]}));
    let post = |path: &str| client.post(format!("{base}{path}")).json(&ask).send();
    let counted: Value = post("/tokenize").await.unwrap().json().await.unwrap();
    let answered: Value = post("/v1/chat/completions").await.unwrap().json().await.unwrap();
    assert_eq!(counted["count"], answered["usage"]["prompt_tokens"]);
    assert_eq!(counted["tokens"].as_array().unwrap().len() as u64, counted["count"].as_u64().unwrap());
}

#[tokio::test]
async fn a_client_that_leaves_frees_its_place() {
    let shape = crate::sim::engine::EngineShape { max_sequences: 1, ..Default::default() };
    let base = start(ReplicaOptions { shape, ..fast() }).await;
    let client = reqwest::Client::new();
    for stream in [true, false] {
        let body = chat(json!({"stream": stream, "max_tokens": 100_000, "ignore_eos": true}));
        let request = client.post(format!("{base}/v1/chat/completions")).json(&body).send();
        let left = tokio::time::timeout(std::time::Duration::from_millis(150), async {
            let mut answer = request.await.unwrap();
            while answer.chunk().await.unwrap().is_some() {}
        });
        assert!(left.await.is_err(), "the answer is far longer than that");
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(5);
        loop {
            let load: Value = client.get(format!("{base}/load")).send().await.unwrap().json().await.unwrap();
            if load["server_load"] == 0 {
                break;
            }
            assert!(std::time::Instant::now() < deadline, "still running");
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    }
}

#[tokio::test]
async fn faults_strike_as_told_and_end_when_told() {
    let base = start(fast()).await;
    let client = reqwest::Client::new();
    let fault = |text: &'static str| client.post(format!("{base}/sim/fault")).body(text).send();
    let ask = |extra: Value| client.post(format!("{base}/v1/chat/completions")).json(&chat(extra)).send();
    assert_eq!(fault("status=503,retry-after=2,times=1").await.unwrap().status(), 204);
    let refused = ask(json!({"max_tokens": 1})).await.unwrap();
    assert_eq!((refused.status().as_u16(), refused.headers()["retry-after"].to_str().unwrap()), (503, "2"));
    assert_eq!(ask(json!({"max_tokens": 1})).await.unwrap().status(), 200);

    fault("die-after=3").await.unwrap();
    let body = chat(json!({"stream": true, "max_tokens": 50, "ignore_eos": true}));
    let cut = stream(&base, "/v1/chat/completions", &body).await.concat();
    assert!(!cut.contains("[DONE]") && cut.matches("\"content\":\" ").count() == 3, "{cut}");

    fault("hang").await.unwrap();
    let hung = tokio::time::timeout(std::time::Duration::from_millis(200), ask(json!({"max_tokens": 1})));
    assert!(hung.await.is_err());
    fault("none").await.unwrap();
    assert_eq!(ask(json!({"max_tokens": 1})).await.unwrap().status(), 200);
    assert_eq!(fault("explode").await.unwrap().status(), 400);
}

#[tokio::test]
async fn metrics_carry_vllms_names() {
    let base = start(fast()).await;
    let text = reqwest::get(format!("{base}/metrics")).await.unwrap().text().await.unwrap();
    for name in [
        "vllm:num_requests_running{",
        "vllm:num_requests_waiting{",
        "vllm:kv_cache_usage_perc{",
        "vllm:prefix_cache_queries_total{",
        "vllm:prefix_cache_hits_total{",
        "vllm:generation_tokens_total{",
        "vllm:cache_config_info{block_size=\"16\"",
        "num_gpu_blocks=\"16000\"",
    ] {
        assert!(text.contains(name), "{name} in {text}");
    }
}
