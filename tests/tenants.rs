//! Tenants: who may ask for what, and how much of it.

mod harness;

use std::time::Duration;

use harness::{Gate, Reply, Running, Setup, Upstream, run, within};

const HI: &[u8] = br#"{"model":"m1","messages":[{"role":"user","content":"hi"}]}"#;
const KEY: [(&str, &str); 1] = [("authorization", "Bearer key-t")];

async fn with(limits: &str) -> (Upstream, Running) {
    let a = Upstream::start().await;
    a.models(&["m1", "m2"]);
    let setup = Setup::m1().model("{name: m2, tokenizer: approximate}");
    let key = setup.file("t.key", "key-t\n");
    let lb = setup
        .section("tenants", &format!("[{{name: t, key_file: {}{limits}}}]", key.display()))
        .replica_with("a", &a.url(), "models: [m1, m2]")
        .start()
        .await;
    (a, lb)
}

fn ask(more: &str) -> Vec<u8> {
    format!(r#"{{"model":"m1","messages":[{{"role":"user","content":"hi"}}]{more}}}"#).into_bytes()
}

#[test]
fn a_model_outside_the_tenants_list_is_a_403_and_not_listed() {
    run(async {
        let (a, lb) = with(", models: [m1]").await;
        assert_eq!(lb.chat_with(&KEY, HI).await.status, 200);
        let other = String::from_utf8(HI.to_vec()).expect("UTF-8").replace("m1", "m2");
        lb.chat_with(&KEY, other.as_bytes()).await.is_error(403, "not_allowed");
        assert_eq!(a.count(), 1);
        lb.books().settled().await;
    });
}

#[test]
fn a_larger_max_tokens_than_allowed_is_a_400() {
    run(async {
        let (a, lb) = with(", max_tokens: 100").await;
        assert_eq!(lb.chat_with(&KEY, &ask(r#","max_tokens":100"#)).await.status, 200);
        lb.chat_with(&KEY, &ask(r#","max_tokens":101"#)).await.is_error(400, "invalid_request");
        lb.chat_with(&KEY, &ask(r#","max_completion_tokens":1000000"#)).await.is_error(400, "invalid_request");
        assert_eq!(a.count(), 1);
        lb.books().settled().await;
    });
}

#[test]
fn concurrent_requests_are_counted_as_they_come_and_go() {
    run(async {
        let (a, lb) = with(", concurrent: 2").await;
        let gate = Gate::closed();
        a.plays(Reply::chat(3, 2).after_gate(&gate));
        let mut held = Vec::new();
        for _ in 0..2 {
            let mut client = lb.client().await;
            client.post_with("/v1/chat/completions", &KEY, HI).await;
            held.push(client);
        }
        a.wait_for(2).await;
        lb.chat_with(&KEY, HI).await.is_error(429, "rate_limit_exceeded");
        // One leaves without an answer: its place is free again.
        held.pop();
        let freed = within(Duration::from_secs(2), async || lb.books().in_flight("a").await == 1).await;
        assert!(freed);
        let mut third = lb.client().await;
        third.post_with("/v1/chat/completions", &KEY, HI).await;
        a.wait_for(3).await;
        gate.open();
        assert_eq!(third.answer().await.status, 200);
        assert_eq!(held.pop().expect("one").answer().await.status, 200);
        for _ in 0..5 {
            assert_eq!(lb.chat_with(&KEY, HI).await.status, 200);
        }
        lb.books().settled().await;
    });
}

#[test]
fn limits_are_told_as_openai_tells_them() {
    run(async {
        let (_a, lb) = with(", requests_per_minute: 100, tokens_per_minute: 50000").await;
        let answer = lb.chat_with(&KEY, &ask(r#","max_tokens":50"#)).await;
        assert_eq!(answer.status, 200);
        for (name, least, most) in [
            ("x-ratelimit-limit-requests", 100, 100),
            ("x-ratelimit-remaining-requests", 98, 99),
            ("x-ratelimit-limit-tokens", 50_000, 50_000),
            ("x-ratelimit-remaining-tokens", 49_000, 49_999),
        ] {
            let value: u64 = answer
                .header(name)
                .unwrap_or_else(|| panic!("{name} in {:?}", answer.headers))
                .parse()
                .expect("a number");
            assert!((least..=most).contains(&value), "{name}: {value}");
        }
        for name in ["x-ratelimit-reset-requests", "x-ratelimit-reset-tokens"] {
            assert!(answer.header(name).is_some_and(|v| v.ends_with('s')), "{name} in {:?}", answer.headers);
        }
        lb.books().settled().await;
    });
}

#[test]
fn one_request_larger_than_the_whole_minute_takes_it_all() {
    run(async {
        // Refusing it for ever would be no limit but a ban: it waits for a full minute's worth, and takes it.
        let (a, lb) = with(", tokens_per_minute: 1000").await;
        a.plays(Reply::chat(5000, 2));
        let long = "x".repeat(5000);
        let body = format!(r#"{{"model":"m1","messages":[{{"role":"user","content":"{long}"}}]}}"#);
        assert_eq!(lb.chat_with(&KEY, body.as_bytes()).await.status, 200);
        lb.chat_with(&KEY, HI).await.is_error(429, "rate_limit_exceeded");
        assert_eq!(a.count(), 1);
        lb.books().settled().await;
    });
}

#[test]
fn a_hash_of_a_key_serves_as_well_as_the_key() {
    run(async {
        let a = Upstream::start().await;
        let setup = Setup::m1();
        // sha256 of "key-t", as `printf key-t | sha256sum` tells it.
        let hash = {
            use std::fmt::Write;
            let mut hex = String::new();
            for byte in <sha2::Sha256 as sha2::Digest>::digest(b"key-t") {
                write!(hex, "{byte:02x}").expect("memory");
            }
            hex
        };
        let key = setup.file("t.key", format!("sha256:{hash}\nsecond-key\n"));
        let lb = setup
            .section("tenants", &format!("[{{name: t, key_file: {}}}]", key.display()))
            .replica("a", &a.url())
            .start()
            .await;
        assert_eq!(lb.chat_with(&KEY, HI).await.status, 200);
        assert_eq!(lb.chat_with(&[("authorization", "Bearer second-key")], HI).await.status, 200);
        let as_hash = format!("Bearer {hash}");
        lb.chat_with(&[("authorization", &as_hash)], HI).await.is_error(401, "invalid_api_key");
        lb.books().settled().await;
    });
}
