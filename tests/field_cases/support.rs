//! What many cases share: one replica behind one balancer, a script played, the books compared.

use std::time::Duration;

use crate::harness::books::sum;
use crate::harness::{Answer, Books, Reply, Running, Setup, Upstream, case_bytes, files, within};

/// Something like every case's small request.
pub const HI: &[u8] = br#"{"model":"m1","messages":[{"role":"user","content":"hi"}]}"#;
pub const HI_STREAM: &[u8] = br#"{"model":"m1","messages":[{"role":"user","content":"hi"}],"stream":true}"#;

/// A balancer of `m1` before one scripted replica `a`.
pub async fn one() -> (Upstream, Running) {
    one_with(Setup::m1()).await
}

pub async fn one_with(setup: Setup) -> (Upstream, Running) {
    let a = Upstream::start().await;
    let lb = setup.replica("a", &a.url()).start().await;
    (a, lb)
}

/// A balancer of `m1` before two scripted replicas `a` and `b`.
pub async fn two_with(setup: Setup) -> (Upstream, Upstream, Running) {
    let (a, b) = (Upstream::start().await, Upstream::start().await);
    let lb = setup.replica("a", &a.url()).replica("b", &b.url()).start().await;
    (a, b, lb)
}

/// Plays `cNNN-upstream.jsonl` to `cNNN-request.json`.
pub async fn replay(id: &str) -> (Upstream, Running, Answer) {
    let (a, lb) = one().await;
    a.plays(Reply::script(&format!("{id}-upstream.jsonl")));
    let answer = lb.chat(&case_bytes(&format!("{id}-request.json"))).await;
    (a, lb, answer)
}

/// Plays a case's stream and checks the whole of what most of them say: bytes unchanged, usage as told, nothing
/// left booked.
pub async fn faithful_stream(id: &str, prompt: u64, output: u64) -> (Upstream, Running, Answer) {
    let (a, lb, answer) = replay(id).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    same_bytes(&answer.body, &case_bytes(&format!("{id}-upstream-body.sse")));
    ended_well(&lb, prompt, output).await;
    (a, lb, answer)
}

/// The one request completed with these tokens, and nothing is left.
pub async fn ended_well(lb: &Running, prompt: u64, output: u64) {
    accounted(&lb.books(), prompt, output).await;
    assert_eq!(lb.books().outcome("completed").await, 1, "one request completed");
    lb.books().settled().await;
}

/// Waits (the books follow the last byte) until exactly these tokens are counted.
pub async fn accounted(books: &Books, prompt: u64, output: u64) {
    let mut found = (0, 0);
    within(Duration::from_secs(2), async || {
        let series = books.metrics().await;
        let of = |kind| sum(&series, "weighbridge_tokens_total", &[("kind", kind)]) as u64;
        found = (of("prompt"), of("output"));
        found == (prompt, output)
    })
    .await;
    assert_eq!(found, (prompt, output), "prompt and output tokens accounted");
}

/// Waits until this many requests are counted with this outcome.
pub async fn outcomes(books: &Books, outcome: &str, count: u64) {
    let mut found = 0;
    within(Duration::from_secs(2), async || {
        found = books.outcome(outcome).await;
        found == count
    })
    .await;
    assert_eq!(found, count, "requests with outcome {outcome}: {:?}", requests(books).await);
}

/// All request counters, for messages.
pub async fn requests(books: &Books) -> Vec<String> {
    let series = books.metrics().await;
    series
        .iter()
        .filter(|s| s.name == "weighbridge_requests_total")
        .map(|s| format!("{:?} {}", s.labels, s.value))
        .collect()
}

/// Compares bodies, telling the first difference as text.
#[track_caller]
pub fn same_bytes(found: &[u8], expected: &[u8]) {
    if found == expected {
        return;
    }
    let at = found.iter().zip(expected).take_while(|(a, b)| a == b).count();
    let around = |bytes: &[u8]| {
        let from = at.saturating_sub(40);
        String::from_utf8_lossy(&bytes[from..bytes.len().min(at + 80)]).into_owned()
    };
    panic!(
        "bodies differ at byte {at} ({} bytes found, {} expected):\n found    {:?}\n expected {:?}",
        found.len(),
        expected.len(),
        around(found),
        around(expected)
    );
}

/// Tokens of a text under the tests' tokenizer: its bytes, special tokens being one each.
pub fn byte_tokens(text: &str) -> u64 {
    let mut specials = 0;
    let mut rest = text.to_owned();
    for special in ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>"] {
        specials += rest.matches(special).count();
        rest = rest.replace(special, "");
    }
    (specials + rest.len()) as u64
}

/// The prompt's length under the tests' own template, for one user message.
pub fn chat_tokens(content: &str) -> u64 {
    byte_tokens(&format!("<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"))
}

/// A chat request with one user message, and more members.
pub fn chat(content: &str, more: &str) -> Vec<u8> {
    let content = serde_json::to_string(content).expect("text is JSON");
    format!(r#"{{"model":"m1","messages":[{{"role":"user","content":{content}}}]{more}}}"#).into_bytes()
}

/// Splits bytes at pseudo-random places, seeded.
pub fn random_cuts(bytes: &[u8], seed: u64, longest: usize) -> Vec<Vec<u8>> {
    use rand::{Rng, SeedableRng};
    let mut rng = rand::rngs::SmallRng::seed_from_u64(seed);
    let mut rest = bytes;
    let mut parts = Vec::new();
    while !rest.is_empty() {
        let n = rng.random_range(1..=longest).min(rest.len());
        parts.push(rest[..n].to_vec());
        rest = &rest[n..];
    }
    parts
}

/// The tests' tokenizer directory.
pub fn byte_tokenizer() -> std::path::PathBuf {
    files::path("data/byte-tokenizer")
}
