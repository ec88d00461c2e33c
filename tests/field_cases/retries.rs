//! retries: another replica where nothing was sent or generated, bounded; never after a byte.

use std::time::{Duration, Instant};

use crate::harness::h2::{H2Upstream, Manner};
use crate::harness::{End, Reply, Setup, Upstream, case_bytes, client, ms, within};
use crate::runner::{Case, case};
use crate::support::*;

pub fn cases() -> Vec<Case> {
    vec![
        case!(c100, "no retry once a byte reached the client"),
        case!(c101, "a request that was sent is generated at most once"),
        case!(c102, "a storm of 503 is not answered by a storm of retries"),
        case!(c104, "overload statuses are tried elsewhere, others pass"),
    ]
}

async fn c100() {
    let (a, b, lb) = two_with(Setup::m1().section("retries", "{budget: 100%}")).await;
    a.plays(Reply::script("c100-upstream.jsonl"));
    b.plays(Reply::script("c100-upstream.jsonl"));
    let answer = lb.chat(&case_bytes("c100-request.json")).await;
    assert_ne!(answer.end, End::Clean);
    assert!(answer.body.starts_with(&case_bytes("c100-upstream-body.sse")));
    assert_eq!(a.count() + b.count(), 1, "nobody else was asked");
    // Not even where only the header went out.
    let (a, b, lb) = two_with(Setup::m1().section("retries", "{budget: 100%}")).await;
    let only_head = Reply::new(200, "text/event-stream").pause(ms(100)).act(crate::harness::Act::Rst);
    a.plays(only_head.clone());
    b.plays(only_head);
    let answer = lb.chat(HI_STREAM).await;
    assert_ne!(answer.end, End::Clean);
    assert_eq!(a.count() + b.count(), 1);
    lb.books().settled().await;
}

async fn c101() {
    use h2::Reason;
    for manner in [Manner::GoAway, Manner::Reset(Reason::PROTOCOL_ERROR), Manner::Reset(Reason::INTERNAL_ERROR)] {
        let bad = H2Upstream::start(manner).await;
        let good = H2Upstream::start(manner).await;
        let lb = Setup::m1()
            .replica("a", &bad.url())
            .replica("b", &good.url())
            .section("retries", "{budget: 100%}")
            .start()
            .await;
        let answer = lb.chat(HI).await;
        assert!(answer.status >= 500, "{manner:?}: {} {}", answer.status, answer.text());
        let started = bad.count() + good.count();
        // Chosen against the case in one point: a connection that *died* before the answer's header is sent once more,
        // to another replica, since replicas that are killed must cost nobody a request; what ran there died with it.
        // A GOAWAY that takes the connection with it is such a death. An engine that lives and answers with an error
        // frame may be generating: never again.
        let most = if manner == Manner::GoAway { 2 } else { 1 };
        assert!(started <= most, "{manner:?}: {started} generations for one request");
        lb.books().settled().await;
    }
    // What is known not to have been processed may be sent again: REFUSED_STREAM says so.
    let refusing = H2Upstream::start(Manner::Answer).await;
    let lb = Setup::m1().replica("a", &refusing.url()).start().await;
    for _ in 0..3 {
        let answer = lb.chat(HI).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
    }
    assert_eq!(refusing.count(), 3);
    lb.books().settled().await;
    // A connection that was refused outright costs nobody a generation: another replica answers.
    let a = Upstream::start().await;
    let b = Upstream::start().await;
    let lb = Setup::m1()
        .replica("a", &a.url())
        .replica("b", &b.url())
        .section("retries", "{budget: 100%}")
        .section("health", "{interval: 30s}")
        .start()
        .await;
    a.stop();
    for _ in 0..4 {
        assert_eq!(lb.chat(HI).await.status, 200);
    }
    assert_eq!(b.count(), 4);
    lb.books().settled().await;
}

async fn c102() {
    let ups: Vec<Upstream> = futures::future::join_all((0..3).map(|_| Upstream::start())).await;
    for up in &ups {
        up.plays(Reply::json(503, r#"{"error":{"message":"busy","code":503}}"#));
    }
    // The case's example, a fifth of the requests, with the least floor; then the defaults, whose floor is ten a second
    // and may be spent in one go for a whole window of ten seconds.
    storm(&ups, "{budget: 20%, min_per_second: 1, per_request: 2}", |asked| asked * 12 / 10 + 10).await;
    storm(&ups, "{}", |asked| asked * 11 / 10 + 100).await;
    // Never the same replica twice while another is untried.
    let (a, b, lb) = two_with(Setup::m1().section("retries", "{budget: 100%, per_request: 2}")).await;
    a.plays(Reply::json(503, "{}"));
    b.plays(Reply::json(503, "{}"));
    lb.chat(HI).await;
    assert!(a.count() >= 1 && b.count() >= 1 && a.count() + b.count() <= 3, "{} and {}", a.count(), b.count());
    lb.books().settled().await;
}

/// Twenty clients, five times each, to replicas that all answer 503.
async fn storm(ups: &[Upstream], retries: &str, bound: impl Fn(usize) -> usize) {
    let mut setup = Setup::m1().section("retries", retries);
    for (n, up) in ups.iter().enumerate() {
        setup = setup.replica(&format!("r{n}"), &up.url());
    }
    let lb = setup.start().await;
    let attempts = || ups.iter().map(Upstream::count).sum::<usize>();
    let before = attempts();
    let mut asked = 0;
    let mut worst = Duration::ZERO;
    for _ in 0..5 {
        let clients = (0..20).map(|_| async {
            let start = Instant::now();
            let answer = lb.chat(HI).await;
            assert_eq!(answer.status, 503, "{}", answer.text());
            assert!(answer.header("retry-after").is_some(), "{:?}", answer.headers);
            start.elapsed()
        });
        worst = worst.max(futures::future::join_all(clients).await.into_iter().max().expect("twenty"));
        asked += 20;
        tokio::time::sleep(ms(100)).await;
    }
    let sent = attempts() - before;
    assert!(sent <= bound(asked), "{sent} attempts for {asked} requests, {retries}");
    assert!(worst < Duration::from_secs(35), "{worst:?}");
    lb.books().settled().await;
}

async fn c104() {
    for (status, retried) in [
        (529, true),
        (429, true),
        (503, true),
        (502, true),
        (504, true),
        (408, false),
        (425, false),
        (499, false),
        (520, false),
        (524, false),
        (599, false),
        (500, false),
        (400, false),
    ] {
        let (a, b, lb) = two_with(Setup::m1().section("retries", "{budget: 100%}")).await;
        a.plays(Reply::json(status, r#"{"error":{"message":"no","code":1}}"#).header("retry-after", "7"));
        let mut from_a = 0;
        for _ in 0..4 {
            let answer = client::post(lb.address, "/v1/chat/completions", HI).await;
            if answer.status == status {
                from_a += 1;
            } else {
                assert_eq!(answer.status, 200, "{status}: {}", answer.text());
            }
        }
        if retried {
            assert_eq!((from_a, b.count()), (0, 4), "{status} is tried elsewhere");
            if matches!(status, 429 | 503 | 529) {
                // Its Retry-After keeps that one replica out, and it is no illness. A gateway's 502 and 504 are: they
                // count against the replica, and a Retry-After of theirs is nobody's promise.
                assert_eq!(a.count(), 1, "{status}: asked again within its Retry-After");
                assert_eq!(lb.books().state("a").await, "open", "{status} is load, not illness");
            }
        } else {
            assert!(from_a >= 1, "{status} passes through; {} to a", a.count());
        }
        lb.books().settled().await;
    }
    // The set is the user's.
    let (a, b, lb) = two_with(Setup::m1().section("retries", "{budget: 100%, statuses: [418]}")).await;
    a.plays(Reply::json(418, "{}"));
    for _ in 0..3 {
        assert_eq!(lb.chat(HI).await.status, 200);
    }
    assert_eq!(b.count(), 3);
    let served = within(ms(500), async || lb.books().left_over().await.is_empty()).await;
    assert!(served);
}
