//! The way through the pool, its bounds, and what is shared over a reload.

use super::*;
use crate::config::Engine;
use crate::weigh::{CountSource, ReplicaAsk, TokenizerState};
use crate::wire::ErrorCode;

fn long_body(paragraphs: usize) -> String {
    let text = "A paragraph of plain text that goes on for a while, as documents do.\n".repeat(paragraphs);
    serde_json::json!({"messages": [{"role": "user", "content": text}]}).to_string()
}

fn name() -> ModelName {
    ModelName::from("m1")
}

#[tokio::test]
async fn prompts_of_every_size_count_the_same_here_and_on_the_pool() {
    for paragraphs in [1, 100, 1000, 8000] {
        let request = chat(&long_body(paragraphs));
        let hints = WeighHints::default();
        let pooled = smollm2().weigh(&name(), &request, &hints).await.unwrap();
        let here = smollm2().weigh_here(&name(), &request, &hints).unwrap();
        assert_eq!(pooled.prompt, here.prompt);
        assert_eq!(pooled.prefix, here.prefix);
        assert_eq!(pooled.prompt.source, CountSource::Tokenizer);
    }
}

#[tokio::test]
async fn a_prompt_that_misses_its_deadline_is_estimated_and_says_so() {
    let limits =
        WeighLimits { deadline: Duration::from_millis(1), deadline_per_byte: Duration::ZERO, ..WeighLimits::default() };
    let models = vec![model("m1", TokenizerSource::Directory(data("data/smollm2")))];
    let histories = Arc::new(Histories::default());
    let weigher = Weigher::with_limits(
        &config(models.clone()),
        Arc::clone(&histories),
        None,
        Arc::new(SystemClock::new()),
        limits,
    );
    wait(&weigher);
    // Every thread of the pool is busy until the gate opens.
    let (open, gate) = std::sync::mpsc::channel::<()>();
    let gate = Arc::new(std::sync::Mutex::new(gate));
    for _ in 0..weigher.pool().threads() {
        let gate = Arc::clone(&gate);
        assert!(weigher.pool().run(move || {
            let _ = gate.lock().unwrap().recv();
        }));
    }
    for paragraphs in [600, 8000] {
        let request = chat(&long_body(paragraphs));
        let weight = weigher.weigh(&name(), &request, &WeighHints::default()).await.unwrap();
        let exact = smollm2().weigh_here(&name(), &request, &WeighHints::default()).unwrap().prompt.tokens.0 as f64;
        let ratio = weight.prompt.tokens.0 as f64 / exact;
        assert_eq!(weight.prompt.source, CountSource::Approximate);
        assert!((0.95..1.05).contains(&ratio), "{ratio}");
    }
    // Where the estimate leaves open whether the prompt fits, the count is waited for.
    let request = chat(&long_body(600));
    let exact = smollm2().weigh_here(&name(), &request, &WeighHints::default()).unwrap().prompt;
    let hints = WeighHints { window: Some(exact.longest), ..WeighHints::default() };
    let opened = tokio::spawn(async move {
        tokio::time::sleep(Duration::from_millis(10)).await;
        drop(open);
    });
    let limits =
        WeighLimits { deadline: Duration::from_millis(1), deadline_per_byte: Duration::from_micros(20), ..limits };
    let patient =
        Weigher::with_limits(&config(models), histories, Some(&weigher), Arc::new(SystemClock::new()), limits);
    assert_eq!(patient.weigh(&name(), &request, &hints).await.unwrap().prompt, exact);
    opened.await.unwrap();
}

#[tokio::test]
async fn small_prompts_do_not_wait_while_a_megabyte_is_tokenized() {
    let weigher = smollm2();
    // One letter without end is what this kind of tokenizer is slowest at.
    let large = chat(&serde_json::json!({"messages": [{"role": "user", "content": "a".repeat(1 << 20)}]}).to_string());
    let begun = std::time::Instant::now();
    let counted = tokio::spawn({
        let weigher = Arc::clone(&weigher);
        async move { weigher.weigh(&name(), &large, &WeighHints::default()).await.map(|weight| weight.prompt) }
    });
    tokio::task::yield_now().await;
    let mut took = Vec::new();
    while !counted.is_finished() {
        let small = chat(&format!(r#"{{"messages":[{{"role":"user","content":"Number {} of many."}}]}}"#, took.len()));
        let begun = std::time::Instant::now();
        let weight = weigher.weigh(&name(), &small, &WeighHints::default()).await.unwrap();
        took.push(begun.elapsed());
        assert!(weight.prompt.exact());
        tokio::task::yield_now().await;
    }
    let whole = begun.elapsed();
    assert!(counted.await.unwrap().unwrap().exact());
    took.sort();
    let (median, p99) = (took[took.len() / 2], took[took.len() * 99 / 100]);
    println!("1 MB in {whole:?}; meanwhile {} small prompts: median {median:?}, p99 {p99:?}", took.len());
    assert!(took.len() > 20 && p99 < whole / 4, "{} small ones, p99 {p99:?} of {whole:?}", took.len());
}

#[test]
fn what_no_window_holds_is_refused_by_its_length_or_as_soon_as_it_is_counted() {
    let weigher = smollm2();
    let request = chat(&long_body(3000));
    let refused = |window: u64| {
        let hints = WeighHints { window: Some(Tokens(window)), ..WeighHints::default() };
        weigher.weigh_here(&name(), &request, &hints).map(|weight| weight.prompt.tokens).map_err(|e| e.code)
    };
    assert_eq!(refused(10), Err(ErrorCode::ContextLengthExceeded));
    assert_eq!(refused(8192), Err(ErrorCode::ContextLengthExceeded));
    assert!(refused(100_000).is_ok());
}

#[test]
fn turns_seen_before_are_not_encoded_again() {
    let weigher = smollm2();
    let turn = |i: usize| {
        let text = format!("Turn {i}. {}", "Some words that were said before. ".repeat(20));
        serde_json::json!({"role": if i.is_multiple_of(2) { "user" } else { "assistant" }, "content": text})
    };
    let body = |turns: usize| serde_json::json!({"messages": (0..turns).map(turn).collect::<Vec<_>>()}).to_string();
    let first = weigh(&weigher, &chat(&body(9))).unwrap();
    let known = weigher.cache().len();
    let second = weigh(&weigher, &chat(&body(11))).unwrap();
    assert_eq!(weigher.cache().len(), known + 2, "two new turns, two new segments");
    let shared = first.prefix.iter().zip(second.prefix.iter()).take_while(|(a, b)| a == b).count();
    assert!(shared + 2 >= first.prefix.len(), "{shared} of {} blocks are shared", first.prefix.len());
}

#[test]
fn models_with_one_tokenizer_share_it_and_a_reload_keeps_it() {
    let dir = data("data/smollm2");
    let models =
        vec![model("m1", TokenizerSource::Directory(dir.clone())), model("m2", TokenizerSource::Directory(dir))];
    let first = weigher(models.clone());
    let tokenizer = |weigher: &Weigher, name: &str| {
        Arc::clone(weigher.loaded(&ModelName::from(name)).unwrap().1.tokenizer().unwrap())
    };
    assert!(Arc::ptr_eq(&tokenizer(&first, "m1"), &tokenizer(&first, "m2")));
    let again =
        Weigher::new(&config(models), Arc::clone(first.histories()), Some(&first), Arc::new(SystemClock::new()));
    assert!(again.ready(), "nothing is loaded anew");
    assert!(Arc::ptr_eq(&tokenizer(&first, "m1"), &tokenizer(&again, "m1")));
}

#[test]
fn a_tokenizer_that_fails_is_a_reason_and_its_model_is_estimated() {
    let weigher = weigher(vec![model("m1", TokenizerSource::Directory("/nonexistent".into()))]);
    assert!(matches!(&weigher.tokenizers()[0].1, TokenizerState::Failed(reason) if reason.contains("tokenizer.json")));
    let weight = weigh(&weigher, &chat(r#"{"messages":[{"role":"user","content":"one two three"}]}"#)).unwrap();
    assert_eq!(weight.prompt.source, CountSource::Approximate);
    assert!((5..20).contains(&weight.prompt.tokens.0));
}

#[derive(Debug)]
struct Engines;

#[async_trait::async_trait]
impl ReplicaAsk for Engines {
    async fn ask(&self, _: &ModelName, path: &str, body: Bytes) -> Result<Bytes, String> {
        let body: serde_json::Value = serde_json::from_slice(&body).unwrap();
        match path {
            "/tokenize" if body["messages"].is_array() => {
                Ok(Bytes::from(r#"{"count":31,"tokens":[],"max_model_len":1}"#))
            }
            "/apply-template" => Ok(Bytes::from(r#"{"prompt":"rendered"}"#)),
            "/tokenize" if body["content"] == "rendered" => Ok(Bytes::from(r#"{"tokens":[1,2,3]}"#)),
            _ => Err("404".to_owned()),
        }
    }
}

#[tokio::test]
async fn a_replica_counts_in_its_engine_s_own_way() {
    let weigher = weigher(vec![model("m1", TokenizerSource::Replica)]);
    let body = r#"{"messages":[{"role":"user","content":"Hi"}]}"#;
    let hints = |engine| WeighHints { engine, ..WeighHints::default() };
    let before = weigher.weigh(&name(), &chat(body), &hints(Engine::Vllm)).await.unwrap();
    assert_eq!(before.prompt.source, CountSource::Approximate);
    weigher.set_replica_ask(Arc::new(Engines));
    let vllm = weigher.weigh(&name(), &chat(body), &hints(Engine::Vllm)).await.unwrap();
    assert_eq!((vllm.prompt.tokens.0, vllm.prompt.source), (31, CountSource::Replica));
    let other = r#"{"messages":[{"role":"user","content":"Ho"}]}"#;
    let llama = weigher.weigh(&name(), &chat(other), &hints(Engine::LlamaCpp)).await.unwrap();
    assert_eq!((llama.prompt.tokens.0, llama.prompt.source), (3, CountSource::Replica));
}

#[test]
fn hostile_text_is_counted_and_nothing_panics() {
    let weigher = smollm2();
    let size = 60_000;
    for text in [
        "a".repeat(size),
        " ".repeat(size),
        "\n".repeat(size),
        "汉字".repeat(size / 6),
        "e\u{301}\u{302}".repeat(size / 5),
        "\u{0}\u{1}\u{4}".repeat(100),
        "<|im_start|>".repeat(size / 12),
        "\u{10ffff}😀\u{200d}".repeat(size / 11),
    ] {
        let body = serde_json::json!({"messages": [{"role": "user", "content": text}]}).to_string();
        assert!(weigh(&weigher, &chat(&body)).unwrap().prompt.tokens.0 > 10);
    }
}

/// CPU time of this thread in nanoseconds, by Linux's scheduler: others on the machine do not move it.
fn cpu_nanoseconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    stat.split(' ').next().unwrap().parse().unwrap()
}

#[test]
fn hostile_text_takes_time_as_it_has_bytes_and_no_more() {
    let weigher = smollm2();
    let spent = |text: &str, bytes: usize| {
        let text = text.repeat(bytes / text.len());
        let request = chat(&serde_json::json!({"messages": [{"role": "user", "content": text}]}).to_string());
        let begun = cpu_nanoseconds();
        let weight = weigher.weigh_here(&name(), &request, &WeighHints::default()).unwrap();
        assert_eq!(weight.prompt.source, CountSource::Tokenizer);
        cpu_nanoseconds() - begun
    };
    for text in
        ["a", " ", "\n", "0", "汉字系统测试内容", "e\u{301}\u{302}", "<|im_start|>", "<|im_", "\u{10ffff}😀\u{200d}"]
    {
        // Four times the bytes: four times the time, and room for caches that no longer hold it. Were it quadratic, it
        // would be sixteen times.
        let (quarter, whole) = (spent(text, 1 << 18), spent(text, 1 << 20));
        assert!(whole < 9.0 * quarter.max(2e6), "{text:?}: {quarter} ns for a quarter, {whole} ns for 1 MB");
        assert!(whole < 5e9, "{text:?}: 5 µs a byte would be slow even without optimisation: {whole} ns");
    }
}
