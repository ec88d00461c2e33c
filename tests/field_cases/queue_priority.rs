//! queues and priorities: what does not fit waits or is told when to come again; nobody promotes himself.

use std::time::{Duration, Instant};

use crate::harness::{Gate, Reply, Running, Setup, Upstream, case_bytes, client, ms, within};
use crate::runner::{Case, case};
use crate::support::*;

pub fn cases() -> Vec<Case> {
    vec![
        case!(c140, "what does not fit waits, or is refused with a time to come again"),
        case!(c141, "priority comes from the tenant; a wish can only lower it"),
        case!(c144, "pages that need no replica answer while all are full"),
        case!(c151, "a tenant's limits hold in the same instant, and count streamed tokens"),
    ]
}

fn small(queue: &str) -> Setup {
    Setup::m1().section("bands", &format!("[{{name: only, share: 1.0, queue: {queue}}}]"))
}

async fn two_small(queue: &str) -> (Upstream, Upstream, Running) {
    let (a, b) = (Upstream::start().await, Upstream::start().await);
    let lb = small(queue)
        .replica_with("a", &a.url(), "max_sequences: 2")
        .replica_with("b", &b.url(), "max_sequences: 2")
        .start()
        .await;
    (a, b, lb)
}

async fn c140() {
    // A queue: all ten succeed.
    let (a, b, lb) = two_small("{requests: 100, wait: 10s}").await;
    for up in [&a, &b] {
        up.plays(Reply::chat(3, 2).after(ms(100)));
    }
    let answers = futures::future::join_all((0..10).map(|_| lb.chat(HI))).await;
    assert!(answers.iter().all(|a| a.status == 200), "{:?}", answers.iter().map(|a| a.status).collect::<Vec<_>>());
    assert!(
        answers
            .iter()
            .any(|a| a.header("x-weighbridge-queue-ms").is_some_and(|q| q.parse::<u64>().is_ok_and(|q| q >= 50)))
    );
    assert_eq!(a.count() + b.count(), 10);
    lb.books().settled().await;
    // No queue, or a full one: at once.
    for (queue, waits) in [("{requests: 0}", 0), ("{requests: 3, wait: 10s}", 3)] {
        let (a, b, lb) = two_small(queue).await;
        let gate = Gate::closed();
        for up in [&a, &b] {
            up.plays(Reply::chat(3, 2).after_gate(&gate));
        }
        let mut held: Vec<_> = futures::future::join_all((0..4).map(|_| lb.ask(HI))).await;
        assert!(within(Duration::from_secs(2), async || a.count() + b.count() == 4).await);
        for _ in 0..waits {
            held.push(lb.ask(HI).await);
        }
        assert!(within(Duration::from_secs(2), async || lb.books().waiting().await == waits).await);
        for _ in 0..3 {
            let start = Instant::now();
            lb.chat(HI).await.is_error(503, "no_capacity");
            assert!(start.elapsed() < ms(500), "refused at once: {:?}", start.elapsed());
        }
        gate.open();
        for mut client in held {
            assert_eq!(client.answer().await.status, 200);
        }
        lb.books().settled().await;
    }
    // Waited too long: 504, with a time to come again.
    let (a, b, lb) = two_small("{requests: 10, wait: 300ms}").await;
    for up in [&a, &b] {
        up.plays(Reply::never());
    }
    let held: Vec<_> = futures::future::join_all((0..4).map(|_| lb.ask(HI))).await;
    assert!(within(Duration::from_secs(2), async || a.count() + b.count() == 4).await);
    let start = Instant::now();
    let answer = lb.chat(HI).await;
    answer.is_error(504, "queue_timeout");
    assert!((ms(290)..ms(2000)).contains(&start.elapsed()), "{:?}", start.elapsed());
    assert!(answer.header("retry-after").is_some());
    drop(held);
    lb.books().settled().await;
}

/// A balancer with two bands, a tenant of each, and one replica of one sequence.
async fn banded(scheduling: bool) -> (Upstream, Running) {
    let a = Upstream::start().await;
    let setup = Setup::m1();
    let high = setup.file("high.key", "key-high\n");
    let normal = setup.file("normal.key", "key-normal\n");
    let lb = setup
        .section("bands", "[{name: high, share: 1.0, queue: {requests: 20, wait: 20s}}, {name: normal, share: 1.0, default: true, queue: {requests: 20, wait: 20s}, aging: 60s}]")
        .section(
            "tenants",
            &format!(
                "[{{name: h, key_file: {}, bands: [high, normal]}}, {{name: n, key_file: {}, bands: [normal]}}]",
                high.display(),
                normal.display()
            ),
        )
        .replica_with("a", &a.url(), &format!("max_sequences: 1, priority_scheduling: {scheduling}"))
        .start()
        .await;
    (a, lb)
}

async fn c141() {
    let (a, lb) = banded(false).await;
    let gate = Gate::closed();
    a.then(Reply::chat(3, 2).after_gate(&gate));
    let ask = async |key: &str, headers: &[(&str, &str)], body: &[u8]| {
        let bearer = format!("Bearer {key}");
        let mut all = vec![("authorization", bearer.as_str())];
        all.extend_from_slice(headers);
        let before = lb.books().waiting().await;
        let mut client = lb.client().await;
        client.post_with("/v1/chat/completions", &all, body).await;
        within(Duration::from_secs(2), async || lb.books().waiting().await > before || a.count() == 0).await;
        client
    };
    let first = ask("key-normal", &[], HI).await;
    a.wait_for(1).await;
    let marked = |mark: &str, more: &str| chat(mark, more);
    // In the order of their coming: a normal one that shouts in every way it knows, and a quiet high one.
    let shouting =
        [("x-priority", "high"), ("x-weighbridge-priority", "high"), ("x-llm-d-inference-objective", "high")];
    let loud = ask("key-normal", &shouting, &marked("loud", r#","priority":-1000"#)).await;
    let number = ask("key-normal", &[("x-weighbridge-priority", "0")], &marked("number", "")).await;
    let lowered = ask("key-high", &[("x-weighbridge-priority", "normal")], &marked("lowered", "")).await;
    let high = ask("key-high", &[("x-weighbridge-priority", "high")], &marked("high", "")).await;
    assert_eq!(lb.books().waiting().await, 4);
    gate.open();
    for mut client in [first, loud, number, lowered, high] {
        assert_eq!(client.answer().await.status, 200);
    }
    let order: Vec<String> = a
        .seen()
        .iter()
        .skip(1)
        .map(|s| s.json()["messages"][0]["content"].as_str().expect("text").to_owned())
        .collect();
    let place = |mark: &str| order.iter().position(|o| o == mark).expect("it was sent");
    assert_eq!(place("high"), 0, "the high tenant's first: {order:?}");
    assert!(place("loud") < place("number"), "first come within a tenant: {order:?}");
    // The body's own field: gone where the replica schedules by nothing or by ours.
    let loud = a.seen().into_iter().find(|s| s.body.windows(4).any(|w| w == b"loud")).expect("sent");
    assert!(
        loud.headers.iter().all(|(n, _)| n != "x-weighbridge-priority" && n != "x-llm-d-inference-objective"),
        "hints are removed"
    );
    assert!(
        loud.json().get("priority").is_none() || loud.json()["priority"] != -1000,
        "{}",
        String::from_utf8_lossy(&loud.body)
    );
    lb.books().settled().await;
    // Where the engine schedules by priority, it gets the band's.
    let (a, lb) = banded(true).await;
    let body = case_bytes("c141-request.json");
    assert_eq!(lb.chat_with(&[("authorization", "Bearer key-normal")], &body).await.status, 200);
    assert_eq!(a.only().json()["priority"], 1, "the band, lower first: {}", String::from_utf8_lossy(&a.only().body));
    // Where priorities are off (no tenants, no bands), the body is the client's.
    let (a, lb) = one().await;
    assert_eq!(lb.chat(&body).await.status, 200);
    same_bytes(&a.only().body, &body);
}

async fn c144() {
    let a = Upstream::start().await;
    let lb = small("{requests: 1, wait: 20s}").replica_with("a", &a.url(), "max_sequences: 1").start().await;
    let gate = Gate::closed();
    a.replies({
        let gate = gate.clone();
        move |seen| {
            if seen.target.contains("tokenize") {
                Reply::json(200, r#"{"count":1,"tokens":[1]}"#)
            } else {
                Reply::chat(3, 2).after_gate(&gate)
            }
        }
    });
    let mut held = vec![lb.ask(HI).await];
    a.wait_for(1).await;
    held.push(lb.ask(HI).await);
    assert!(within(Duration::from_secs(2), async || lb.books().waiting().await == 1).await);
    lb.chat(HI).await.is_error(503, "no_capacity");
    for (to, path) in [
        (lb.address, "/v1/models"),
        (lb.admin, "/healthz"),
        (lb.admin, "/readyz"),
        (lb.admin, "/metrics"),
        (lb.admin, "/admin/replicas"),
    ] {
        let mut took = Vec::new();
        for _ in 0..5 {
            let start = Instant::now();
            let answer = client::get(to, path).await;
            took.push(start.elapsed());
            assert_eq!(answer.status, 200, "{path}: {}", answer.text());
        }
        let took = crate::harness::median(took);
        assert!(took < ms(50), "{path} took {took:?}");
    }
    assert_eq!(lb.reload().await.status, 200, "reload");
    let answer = client::post(lb.address, "/tokenize", br#"{"model":"m1","prompt":"hi"}"#).await;
    assert_eq!(answer.status, 200, "/tokenize needs no place: {}", answer.text());
    gate.open();
    for mut client in held {
        assert_eq!(client.answer().await.status, 200);
    }
    lb.books().settled().await;
}

async fn tenant(limits: &str) -> (Upstream, Running) {
    let a = Upstream::start().await;
    let setup = Setup::m1();
    let key = setup.file("t.key", "key-t\n");
    let lb = setup
        .section("tenants", &format!("[{{name: t, key_file: {}, {limits}}}]", key.display()))
        .replica("a", &a.url())
        .start()
        .await;
    (a, lb)
}

async fn c151() {
    let key = [("authorization", "Bearer key-t")];
    // Ten a minute, fifty at once.
    let (a, lb) = tenant("requests_per_minute: 10").await;
    let answers = futures::future::join_all((0..50).map(|_| lb.chat_with(&key, HI))).await;
    let admitted = answers.iter().filter(|a| a.status == 200).count();
    assert_eq!(admitted, 10, "check and take are one step");
    for refused in answers.iter().filter(|a| a.status != 200) {
        refused.is_error(429, "rate_limit_exceeded");
        assert_eq!(refused.header("x-ratelimit-limit-requests"), Some("10"));
        assert_eq!(refused.header("x-ratelimit-remaining-requests"), Some("0"));
    }
    assert_eq!(a.count(), 10);
    lb.books().settled().await;
    // Tokens: the estimate is reserved, the actual settled. With a usage chunk and without.
    let body = chat("hi", r#","stream":true,"max_tokens":300"#);
    for with_usage in [true, false] {
        let (a, lb) = tenant("tokens_per_minute: 1000").await;
        let mut stream = Reply::new(200, "text/event-stream").events(300, Duration::ZERO);
        if with_usage {
            stream = stream.send(crate::harness::reply::usage_chunk(9, 300));
        }
        a.plays(stream.send(crate::harness::reply::DONE));
        let mut good = 0;
        for _ in 0..6 {
            let answer = lb.chat_with(&key, &body).await;
            if answer.status == 200 {
                good += 1;
            } else {
                answer.is_error(429, "rate_limit_exceeded");
            }
        }
        assert!((2..=3).contains(&good), "{good} answers of 300 tokens in 1,000 a minute, usage {with_usage}");
        lb.books().settled().await;
    }
    // The case's own stream settles at what it reports: much less than what was reserved, so many more fit.
    let (a, lb) = tenant("tokens_per_minute: 5000").await;
    a.plays(Reply::script("c151-upstream.jsonl"));
    let answer = lb.chat_with(&key, &case_bytes("c151-request.json")).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    // What is refused or fails gives back what it had reserved.
    let (a, lb) = tenant("tokens_per_minute: 1000").await;
    a.plays(Reply::json(400, r#"{"error":{"message":"no","code":400}}"#));
    for n in 0..10 {
        let answer = lb.chat_with(&key, &body).await;
        assert_eq!(answer.status, 400, "failed request {n} kept its reservation: {}", answer.text());
    }
    a.plays(Reply::stream_of(10, 9));
    for n in 0..10 {
        let answer = lb.chat_with(&key, &body).await;
        assert_eq!(answer.status, 200, "short answer {n} was not settled at its actual: {}", answer.text());
    }
    lb.books().settled().await;
}
