//! balancing: choosing and booking are one step, ties take turns, windows are respected.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Barrier;

use crate::harness::{Client, Gate, Reply, Setup, Upstream, case_bytes, client, within};
use crate::runner::{Case, case};
use crate::support::*;

pub fn cases() -> Vec<Case> {
    vec![
        case!(c095, "requests of one instant spread evenly"),
        case!(c096, "ties take turns"),
        case!(c098, "a prompt goes only where its window is"),
    ]
}

async fn four(setup: Setup) -> (Vec<Upstream>, crate::harness::Running) {
    let ups: Vec<Upstream> = futures::future::join_all((0..4).map(|_| Upstream::start())).await;
    let mut setup = setup;
    for (n, up) in ups.iter().enumerate() {
        setup = setup.replica(&format!("r{n}"), &up.url());
    }
    let lb = setup.start().await;
    (ups, lb)
}

async fn c095() {
    for policy in ["token-load", "least-tokens"] {
        let (ups, lb) = four(Setup::m1().section("balance", &format!("{{policy: {policy}}}"))).await;
        let gate = Gate::closed();
        for up in &ups {
            up.plays(Reply::chat(3, 2).after_gate(&gate));
        }
        let barrier = Arc::new(Barrier::new(64));
        let mut clients = Vec::new();
        for _ in 0..64 {
            let barrier = Arc::clone(&barrier);
            let address = lb.address;
            clients.push(tokio::spawn(async move {
                let mut client = Client::connect(address).await;
                barrier.wait().await;
                client.post("/v1/chat/completions", HI).await;
                client.answer().await.status
            }));
        }
        let counts = || ups.iter().map(Upstream::count).collect::<Vec<_>>();
        let all = within(Duration::from_secs(5), async || counts().iter().sum::<usize>() == 64).await;
        assert!(all, "{policy}: {:?}", counts());
        assert!(counts().iter().all(|n| (15..=17).contains(n)), "{policy}: {:?}", counts());
        gate.open();
        for client in clients {
            assert_eq!(client.await.expect("an answer"), 200);
        }
        lb.books().settled().await;
    }
}

async fn c096() {
    for policy in ["token-load", "least-tokens", "least-requests"] {
        let (ups, lb) = four(Setup::m1().section("balance", &format!("{{policy: {policy}}}"))).await;
        for n in 0..100 {
            // Different prompts: what a replica has cached is no reason to go there again.
            assert_eq!(lb.chat(&chat(&format!("{n} {}", n * 7919), "")).await.status, 200);
        }
        let counts: Vec<_> = ups.iter().map(Upstream::count).collect();
        assert!(counts.iter().all(|n| (10..=45).contains(n)), "{policy}: {counts:?}");
        lb.books().settled().await;
    }
}

async fn c098() {
    let (a, b) = (Upstream::start().await, Upstream::start().await);
    let lb = Setup::m1()
        .replica_with("a", &a.url(), "max_context_tokens: 512")
        .replica_with("b", &b.url(), "max_context_tokens: 16384")
        .section("retries", "{budget: 100%}")
        .start()
        .await;
    let of = |tokens: usize, more: &str| chat(&"x".repeat(tokens - chat_tokens("") as usize), more);
    // B is loaded, A idle.
    let gate = Gate::closed();
    b.then(Reply::chat(3, 2).after_gate(&gate));
    let mut loaded = lb.ask(&of(8000, r#","max_tokens":4000"#)).await;
    b.wait_for(1).await;
    for _ in 0..4 {
        let answer = lb.chat(&of(600, r#","max_tokens":50"#)).await;
        assert_eq!((answer.status, answer.replica()), (200, "b"), "{}", answer.text());
        assert_eq!(answer.prompt_tokens(), 600);
    }
    // 400 and max_tokens 200: chosen with the case's bracket. A declared max_tokens is a cap, not a promise (c052), so
    // it does not bar A by itself; the projected output does, where it is larger than what A's window leaves.
    let answer = lb.chat(&of(400, r#","max_tokens":200"#)).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let answer = lb.chat(&of(20_000, "")).await;
    answer.is_error(400, "context_length_exceeded");
    assert!(answer.text().contains("16384"), "the largest window: {}", answer.text());
    gate.open();
    assert_eq!(loaded.answer().await.status, 200);
    // A retry never goes where the prompt does not fit.
    let before = a.count();
    b.plays(Reply::json(503, "{}"));
    let answer = client::post(lb.address, "/v1/chat/completions", &of(600, "")).await;
    assert_eq!(answer.status, 503, "{}", answer.text());
    assert_eq!(a.count(), before);
    lb.books().settled().await;
    assert_eq!(lb.chat(&case_bytes("c098-request.json")).await.status, 200);
}
