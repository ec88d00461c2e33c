//! health and cold starts: one late probe is no death, a green probe no proof of life.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::harness::{Reply, Setup, case_bytes, ms, within};
use crate::runner::{Case, case};
use crate::support::*;

pub fn cases() -> Vec<Case> {
    vec![
        case!(c105, "a replica is out only after several failures in a row, and real answers count for it"),
        case!(c106, "a replica whose requests hang is taken out in spite of green probes"),
        case!(c108, "a slow first byte is waited for within its own limit, which the error names"),
        case!(c109, "a replica that has just come takes few requests until it has answered one"),
    ]
}

async fn c105() {
    let quick = "{interval: 150ms, timeout: 150ms, unhealthy_after: 3, healthy_after: 2}";
    let (a, _b, lb) = two_with(Setup::m1().section("health", quick)).await;
    // One and two failures in a row change nothing.
    let failing = Arc::new(AtomicUsize::new(0));
    for failures in [1, 2] {
        let probes = a.all().iter().filter(|s| s.target == "/health").count();
        a.health(Some(Reply::never()));
        let failed = within(Duration::from_secs(3), async || {
            a.all().iter().filter(|s| s.target == "/health").count() >= probes + failures
        })
        .await;
        assert!(failed, "probes go on");
        a.health(None);
        failing.fetch_add(failures, Ordering::Relaxed);
        for _ in 0..10 {
            assert_eq!(lb.books().state("a").await, "open", "after {failures} failed probes");
            tokio::time::sleep(ms(40)).await;
        }
    }
    // Probes that time out while requests succeed: the engine is busy, not dead.
    a.health(Some(Reply::never()));
    let until = Instant::now() + ms(1500);
    while Instant::now() < until {
        assert_eq!(lb.chat(HI).await.status, 200);
        assert_eq!(lb.books().state("a").await, "open", "real answers are evidence of life");
        tokio::time::sleep(ms(20)).await;
    }
    // Without traffic, it is out after three; then back after two good ones.
    lb.books().reaches("a", "ill", Duration::from_secs(5)).await;
    assert_eq!(lb.chat(HI).await.replica(), "b");
    a.health(None);
    let back = within(Duration::from_secs(5), async || {
        assert_eq!(lb.chat(HI).await.status, 200);
        lb.books().state("a").await == "open"
    })
    .await;
    assert!(back, "it is back: {}", lb.books().replica("a").await);
    // The defaults are the generous ones that the case asks for.
    let health = weighbridge::config::Health::default();
    assert!(health.timeout >= Duration::from_secs(5) && health.unhealthy_after == 3 && health.healthy_after == 2);
}

async fn c106() {
    let setup = Setup::m1()
        .section("limits", "{first_byte_timeout: 300ms}")
        .section("health", "{interval: 200ms, unhealthy_after: 3, healthy_after: 1, eject: 1s}");
    let (a, b, lb) = two_with(setup).await;
    a.plays(Reply::never());
    let mut failed = 0;
    let end = Instant::now() + Duration::from_secs(5);
    let mut asked = 0;
    while Instant::now() < end {
        let answers = futures::future::join_all((0..3).map(|_| lb.chat(HI))).await;
        asked += answers.len();
        for answer in answers {
            if answer.status != 200 {
                answer.is_error(504, "first_byte_timeout");
                failed += 1;
            }
        }
        tokio::time::sleep(ms(20)).await;
    }
    // K is three; what was on its way when the third fell, and a trial each growing while, come on top.
    assert!(a.count() <= 10, "{} of {asked} requests went to the frozen replica", a.count());
    assert!(failed <= 10 && b.count() > asked / 2, "{failed} failed of {asked}");
    assert_ne!(lb.books().state("a").await, "open");
    assert!(a.all().iter().any(|s| s.target == "/health"), "its probes are green");
    lb.books().settled().await;
    // When it thaws, a trial brings it back.
    a.plays(Reply::chat(3, 2));
    let back = within(Duration::from_secs(15), async || {
        lb.chat(HI).await;
        lb.books().state("a").await == "open"
    })
    .await;
    assert!(back, "a trial brings it back: {}", lb.books().replica("a").await);
    // A long prefill that shows signs of life does not count against it.
    let setup = Setup::m1().section("limits", "{first_byte_timeout: 2s}");
    let (a, lb) = one_with(setup).await;
    let mut slow = Reply::new(200, "text/event-stream");
    for _ in 0..10 {
        slow = slow.send(": working\n\n").pause(ms(80));
    }
    a.plays(slow.events(1, Duration::ZERO));
    for _ in 0..4 {
        assert_eq!(lb.chat(HI_STREAM).await.status, 200);
    }
    assert_eq!(lb.books().state("a").await, "open");
}

async fn c108() {
    // By default a first byte may take ten minutes.
    assert!(weighbridge::config::Limits::default().first_byte_timeout >= Duration::from_secs(600));
    // Scaled: 48 s of 600 s become 480 ms of 6 s; a limit that fires says which one it was.
    let (a, lb) = one_with(Setup::m1().section("limits", "{first_byte_timeout: 6s}")).await;
    a.plays(Reply::script("c108-upstream.jsonl").after(ms(480)));
    let answer = lb.chat(&case_bytes("c108-request.json")).await;
    assert_eq!(answer.status, 200);
    same_bytes(&answer.body, &case_bytes("c108-upstream-body.sse"));
    assert_eq!(lb.books().state("a").await, "open");
    lb.books().settled().await;
    let (a, lb) =
        one_with(Setup::m1().section("limits", "{first_byte_timeout: 400ms, stream_idle_timeout: 200ms}")).await;
    a.plays(Reply::script("c108-upstream.jsonl").after(Duration::from_secs(5)));
    let start = Instant::now();
    let answer = lb.chat(&case_bytes("c108-request.json")).await;
    answer.is_error(504, "first_byte_timeout");
    assert!(start.elapsed() >= ms(390), "its own limit, not the shorter one: {:?}", start.elapsed());
    assert!(answer.text().contains("first_byte_timeout"), "{}", answer.text());
    lb.books().settled().await;
}

async fn c109() {
    let cold = Arc::new(AtomicUsize::new(0));
    let (a, b, c) = (
        crate::harness::Upstream::start().await,
        crate::harness::Upstream::start().await,
        crate::harness::Upstream::start().await,
    );
    a.health(Some(Reply::whole(503, "text/plain", "")));
    let first = Arc::clone(&cold);
    a.replies(move |_| {
        let n = first.fetch_add(1, Ordering::SeqCst);
        Reply::chat(3, 2).after(if n == 0 { Duration::from_secs(3) } else { ms(5) })
    });
    let lb = Setup::m1()
        .replica("a", &a.url())
        .replica("b", &b.url())
        .replica("c", &c.url())
        .section("warmup", "{prompt: Hi, requests: 1, ramp: 2s}")
        .start()
        .await;
    assert_ne!(lb.books().state("a").await, "open");
    a.health(None);
    let came = Instant::now();
    // Users ask all the while; none waits for the first answer of A.
    let mut worst = Duration::ZERO;
    while came.elapsed() < Duration::from_secs(2) {
        let start = Instant::now();
        let answers = futures::future::join_all((0..5).map(|_| lb.chat(HI))).await;
        worst = worst.max(start.elapsed());
        assert!(answers.iter().all(|a| a.status == 200));
    }
    assert!(a.count() <= 2, "{} requests wait on the cold replica", a.count());
    assert!(worst < Duration::from_secs(2), "a user waited {worst:?}");
    lb.books().reaches("a", "open", Duration::from_secs(10)).await;
    let takes = within(Duration::from_secs(10), async || {
        lb.chat(HI).await;
        a.count() > 3
    })
    .await;
    assert!(takes, "it takes its share once warm");
    lb.books().settled().await;
}
