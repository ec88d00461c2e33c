//! request-forms: every legal form is counted as what it is; odd values are the replica's to judge.

use std::time::{Duration, Instant};

use base64ish::encode;

use crate::harness::full_figures;
use crate::harness::{Act, Gate, Reply, Running, Setup, Upstream, case_bytes, client, ms};
use crate::runner::{Case, case};
use crate::support::*;

pub fn cases() -> Vec<Case> {
    vec![
        case!(c050, "null is absent everywhere, and forwarded"),
        case!(c052, "a large max_tokens is a cap, not a promise"),
        case!(c053, "an odd max_tokens is forwarded as it is and never booked"),
        case!(c055, "a prompt of token ids is counted exactly"),
        case!(c056, "a list of token-id lists is several prompts on one replica"),
        case!(c057, "a list of texts is several prompts"),
        case!(c058, "an image costs a bounded figure, never its base64 text"),
        case!(c059, "media are bounded wherever they stand, and text stays text"),
        case!(c060, "without max_tokens an answer is expected to be like others, not to fill the window"),
        case!(c062, "an adapter is routed and counted as its base model"),
    ]
}

/// Base64 of zeros, of the wanted length.
mod base64ish {
    pub fn encode(bytes: usize) -> String {
        "A".repeat(bytes.div_ceil(3) * 4)
    }
}

/// What is booked while a request is with its replica.
async fn booked(a: &Upstream, lb: &Running, path: &str, body: &[u8]) -> serde_json::Value {
    let gate = Gate::closed();
    let before = a.count();
    a.then(
        Reply::new(200, "application/json")
            .framing(crate::harness::reply::Framing::Bare)
            .act(Act::Hold(gate.clone()))
            .act(Act::Cut),
    );
    let mut client = crate::harness::Client::connect(lb.address).await;
    client.post(path, body).await;
    a.wait_for(before + 1).await;
    let view = lb.books().replica("a").await;
    drop(client);
    gate.open();
    lb.books().settled().await;
    view
}

/// A replica so slow that nothing of what is booked on it is taken as done meanwhile.
async fn slow() -> (Upstream, Running) {
    let a = Upstream::start().await;
    let lb = Setup::m1().replica_with("a", &a.url(), "tokens_per_sec: 0.01").start().await;
    (a, lb)
}

async fn c050() {
    let (a, lb) = slow().await;
    let plain = booked(&a, &lb, "/v1/chat/completions", HI).await;
    let nulls = booked(&a, &lb, "/v1/chat/completions", &case_bytes("c050-request.json")).await;
    assert_eq!(nulls["projected_tokens"], plain["projected_tokens"], "null is absent");
    same_bytes(&a.seen()[1].body, &case_bytes("c050-request.json"));
    for member in [
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "n",
        "stop",
        "tools",
        "best_of",
        "stream",
        "stream_options",
        "priority",
        "min_tokens",
        "ignore_eos",
        "tool_choice",
        "response_format",
        "chat_template_kwargs",
        "add_generation_prompt",
        "functions",
        "task_type",
    ] {
        let body = chat("hi", &format!(r#","{member}":null"#));
        let answer = lb.chat(&body).await;
        assert_eq!(answer.status, 200, "{member}: {}", answer.text());
        assert_eq!(answer.prompt_tokens(), chat_tokens("hi"), "{member}");
    }
    lb.books().settled().await;
}

async fn c052() {
    let a = Upstream::start().await;
    let lb = Setup::m1().replica_with("a", &a.url(), "max_context_tokens: 128000").start().await;
    let content = "x".repeat(62_466 - chat_tokens("") as usize);
    let body = chat(&content, r#","max_tokens":65535"#);
    // The policy is to pass: the replica decides, and the projection knows the window.
    let view = booked(&a, &lb, "/v1/chat/completions", &body).await;
    let kv = view["booked_kv_tokens"].as_u64().expect("booked_kv_tokens");
    assert!((62_466..=128_000).contains(&kv), "{view}");
    same_bytes(&a.only().body, &body);
    let answer = lb.chat(&body).await;
    assert_eq!((answer.status, answer.prompt_tokens()), (200, 62_466), "{}", answer.text());
    // As large as a number gets.
    for max in ["4294967295", "4294967296", "18446744073709551615"] {
        let answer = lb.chat(&chat("hi", &format!(r#","max_tokens":{max}"#))).await;
        assert_eq!(answer.status, 200, "{max}: {}", answer.text());
    }
    // The prompt alone over the window never touches a replica.
    let before = a.count();
    // By one token: so near the window an estimate would not do, and the count is waited for on a loaded machine too.
    let answer = lb.chat(&chat(&"x".repeat(128_001 - chat_tokens("") as usize), "")).await;
    answer.is_error(400, "context_length_exceeded");
    let message = answer.json()["error"]["message"].as_str().expect("a message").to_owned();
    // Both numbers; the second is a lower bound where counting stopped as soon as it was over the window.
    let numbers: Vec<u64> = message.split(|c: char| !c.is_ascii_digit()).filter_map(|n| n.parse().ok()).collect();
    assert!(numbers.contains(&128_000) && numbers.iter().any(|n| *n > 128_000), "{message}");
    assert_eq!(a.count(), before);
    lb.books().settled().await;
}

async fn c053() {
    // One choice for all: forwarded unchanged, the replica decides. Nothing is booked for them beyond the default.
    let (a, lb) = one().await;
    let default = booked(&a, &lb, "/v1/chat/completions", HI).await;
    let default_kv = default["booked_kv_tokens"].as_u64().expect("booked_kv_tokens");
    let mut bodies: Vec<Vec<u8>> = ["0", "neg", "float", "str", "bool", "big", "inf"]
        .iter()
        .map(|name| case_bytes(&format!("c053-request-{name}.json")))
        .collect();
    bodies.push(chat("hi", r#","max_tokens":-2147483649"#));
    bodies.push(chat("hi", r#","max_tokens":[]"#));
    bodies.push(chat("hi", r#","max_completion_tokens":-9223372036854775809"#));
    for body in bodies {
        let before = a.count();
        let view = booked(&a, &lb, "/v1/chat/completions", &body).await;
        same_bytes(&a.seen()[before].body, &body);
        let kv = view["booked_kv_tokens"].as_u64().unwrap_or_else(|| panic!("not a count: {view}"));
        assert!(kv <= default_kv && kv >= chat_tokens("hi"), "{kv}: {}", String::from_utf8_lossy(&body));
    }
    assert!(!lb.log().contains("panicked"), "{}", lb.log());
}

async fn c055() {
    let (a, lb) = one().await;
    let answer = lb.completions(&case_bytes("c055-completions.json")).await;
    assert_eq!((answer.status, answer.prompt_tokens()), (200, 3), "{}", answer.text());
    same_bytes(&a.only().body, &case_bytes("c055-completions.json"));
    a.plays(Reply::json(400, r#"{"error":{"message":"an empty prompt","type":"BadRequestError","code":400}}"#));
    assert_eq!(lb.completions(&case_bytes("c055-completions-empty.json")).await.status, 400);
    lb.books().settled().await;
}

async fn c056() {
    let (a, lb) = slow().await;
    let view = booked(&a, &lb, "/v1/completions", &case_bytes("c056-completions.json")).await;
    assert_eq!(view["active_sequences"], 4, "two prompts, two answers each");
    assert_eq!(view["projected_tokens"], 5 + 2 * 2 * 7, "five prompt tokens and four answers of at most seven");
    assert_eq!(a.count(), 1, "served by one replica");
    let answer = lb.completions(&case_bytes("c056-completions.json")).await;
    assert_eq!(answer.prompt_tokens(), 5);
    a.plays(Reply::json(400, r#"{"error":{"message":"a bad prompt","type":"BadRequestError","code":400}}"#));
    for file in ["c056-completions-emptysub.json", "c056-completions-mixed.json"] {
        assert_eq!(lb.completions(&case_bytes(file)).await.status, 400, "{file}");
    }
    for prompt in ["[-1]", "[1.5]", "[99999999999999999999]", "[[1],\"a\"]", "[[\"a\"]]", "[null]", "[[[1]]]", "7"] {
        let answer = lb.completions(format!(r#"{{"model":"m1","prompt":{prompt}}}"#).as_bytes()).await;
        assert_eq!(answer.status, 400, "{prompt}: {}", answer.text());
    }
    lb.books().settled().await;
}

async fn c057() {
    let (a, lb) = slow().await;
    let view = booked(&a, &lb, "/v1/completions", &case_bytes("c057-completions.json")).await;
    // Each text has the BOS that the tokenizer adds.
    let prompt = (7 + 1) + (5 + 1);
    assert_eq!(view["active_sequences"], 2);
    assert_eq!(view["projected_tokens"], prompt + 2 * 5);
    let answer = lb.completions(&case_bytes("c057-completions.json")).await;
    assert_eq!(answer.prompt_tokens(), prompt);
}

/// In full, once, with a release build on two busy cores: 8.9 ms for both.
async fn c058() {
    let (a, lb) = one().await;
    let small = lb.chat(&case_bytes("c058-request.json")).await;
    assert_eq!(small.status, 200, "{}", small.text());
    same_bytes(&a.only().body, &case_bytes("c058-request.json"));
    let text = chat_tokens("what is this");
    let cost = small.prompt_tokens() - text;
    assert!((64..=3000).contains(&cost), "an image costs {cost}");
    // 2.5 MB of it cost no more, pass the context check and take no tokenizer's time.
    let big = format!(
        r#"{{"model":"m1","messages":[{{"role":"user","content":[{{"type":"text","text":"what is this"}},{{"type":"image_url","image_url":{{"url":"data:image/png;base64,{}"}}}}]}}]}}"#,
        encode(2_500_000)
    );
    let answer = lb.chat(big.as_bytes()).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert!((64..=3000).contains(&(answer.prompt_tokens() - text)), "{}", answer.prompt_tokens());
    same_bytes(&a.seen()[1].body, big.as_bytes());
    // By the balancer's own clock, both requests together: the 2.5 MB are read once, as JSON. An optimised build is held
    // to the case's ten milliseconds each.
    let weighed = lb.books().metric("weighbridge_weigh_seconds_sum", &[]).await;
    let limit = if cfg!(debug_assertions) && !full_figures() { 0.5 } else { 0.02 };
    println!("       c058: both weighed in {:.1} ms", weighed * 1000.0);
    assert!(weighed < limit, "{weighed} s of weighing");
    // The figure is the model's, in the YAML.
    let setup =
        Setup::new().model(&format!("{{name: m1, tokenizer: {}, tokens_per_image: 5000}}", byte_tokenizer().display()));
    let (_a, lb) = one_with(setup).await;
    let webp = r#"{"model":"m1","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"https://x.example/a.png"}}]}]}"#;
    let answer = lb.chat(webp.as_bytes()).await;
    assert!(answer.prompt_tokens() >= 5000, "{}", answer.prompt_tokens());
    lb.books().settled().await;
}

async fn c059() {
    let (a, lb) = one().await;
    let answer = lb.chat(&case_bytes("c059-request.json")).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    same_bytes(&a.only().body, &case_bytes("c059-request.json"));
    let counted = answer.prompt_tokens();
    assert!(
        counted < 9000,
        "{counted} tokens: base64 was counted as text ({} bytes)",
        case_bytes("c059-request.json").len()
    );
    // The same with ten times the media: not a token more.
    let text = String::from_utf8(case_bytes("c059-request.json")).expect("UTF-8");
    let longest = text.split('"').max_by_key(|s| s.len()).expect("a string").to_owned();
    let grown = text.replace(&longest, &format!("{longest}{}", encode(50_000)));
    let answer = lb.chat(grown.as_bytes()).await;
    assert!(answer.prompt_tokens() < counted + 4000, "{} of {counted}", answer.prompt_tokens());
    // Text that only looks like a data URL is text.
    let plain = "data:image/png;base64,AAAA";
    let answer = lb.chat(&chat(plain, "")).await;
    assert_eq!(answer.prompt_tokens(), chat_tokens(plain));
    // Unknown parts are forwarded and cost something safe.
    let odd = br#"{"model":"m1","messages":[{"role":"user","content":[{"type":"hologram","hologram":{"url":"data:x/y;base64,AAAAAAAA"}},{"type":"text","text":"hi"},{"type":"video_url","video_url":{"url":"https://x.example/v.mp4"}}]}]}"#;
    let answer = lb.chat(odd).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert!(answer.prompt_tokens() >= chat_tokens("hi"), "{}", answer.prompt_tokens());
    lb.books().settled().await;
}

async fn c060() {
    let (a, b) = (Upstream::start().await, Upstream::start().await);
    let setup = Setup::m1().replica_with("a", &a.url(), "token_capacity: 131072").replica_with(
        "b",
        &b.url(),
        "token_capacity: 131072",
    );
    let lb = setup.start().await;
    let gate = Gate::closed();
    for up in [&a, &b] {
        let gate = gate.clone();
        up.replies(move |_| Reply::chat(20, 10).after_gate(&gate));
    }
    let mut waiting = Vec::new();
    for _ in 0..50 {
        waiting.push(lb.ask(&case_bytes("c060-request.json")).await);
    }
    let start = Instant::now();
    while a.count() + b.count() < 50 && start.elapsed() < Duration::from_secs(5) {
        tokio::time::sleep(ms(10)).await;
    }
    assert_eq!(a.count() + b.count(), 50, "all are admitted at once; {} wait", lb.books().waiting().await);
    assert!(a.count().abs_diff(b.count()) <= 2, "{} and {}", a.count(), b.count());
    gate.open();
    for mut client in waiting {
        assert_eq!(client.answer().await.status, 200);
    }
    lb.books().settled().await;
}

async fn c062() {
    let a = Upstream::start().await;
    let b = Upstream::start().await;
    a.models(&["m1", "m1-sql"]);
    b.models(&["m1", "m1-sql"]);
    let lb = Setup::new()
        .model(&format!("{{name: m1, tokenizer: {}, adapters: [m1-sql]}}", byte_tokenizer().display()))
        .replica("a", &a.url())
        .replica("b", &b.url())
        .start()
        .await;
    let answer = lb.chat(&case_bytes("c062-request.json")).await;
    assert_eq!((answer.status, answer.prompt_tokens()), (200, chat_tokens("hi")), "{}", answer.text());
    let sent = a.seen().into_iter().chain(b.seen()).next().expect("a request");
    same_bytes(&sent.body, &case_bytes("c062-request.json"));
    let listed = client::get(lb.address, "/v1/models").await.text();
    assert!(listed.contains("m1-sql"), "{listed}");
    let before = a.count() + b.count();
    lb.chat(&case_bytes("c062-request-unknown.json")).await.is_error(404, "model_not_found");
    assert_eq!(a.count() + b.count(), before, "no call for an unknown name");
    let series = lb.books().metrics().await;
    assert!(series.iter().all(|s| s.labels.values().all(|v| v != "nope")), "the name became a label");
    lb.books().settled().await;
}
