//! load-accounting: what was booked is given back, once, whatever happens.

use std::time::{Duration, Instant};

use rand::{Rng, SeedableRng};

use crate::harness::full_figures;
use crate::harness::reply::Framing;
use crate::harness::{Act, Client, End, Gate, Reply, Setup, Upstream, case_bytes, ms, within};
use crate::runner::{Case, case};
use crate::support::*;

pub fn cases() -> Vec<Case> {
    vec![
        case!(c085, "a client that leaves in any phase leaves nothing booked"),
        case!(c086, "no booking expires under a long request, and none goes below zero"),
        case!(c087, "a replica that goes and returns under its name keeps its books straight"),
        case!(c089, "no orphan booking can exist"),
        case!(c090, "a failure at any stage leaves nothing booked"),
        case!(c091, "a silent stream holds neither its client's place nor its own"),
        case!(c092, "an aborted answer's tokens are counted"),
        case!(c094, "many short requests leave no memory behind", alone),
    ]
}

async fn c085() {
    let (a, b, lb) =
        two_with(Setup::m1().section("bands", "[{name: only, share: 1.0, queue: {requests: 1000, wait: 30s}}]")).await;
    // Before the header, half of them by a reset: the case's own steps.
    for up in [&a, &b] {
        up.plays(Reply::never());
    }
    let mut leaving = Vec::new();
    for n in 0..200 {
        let mut client = lb.ask(&case_bytes("c091-request.json")).await;
        leaving.push(tokio::spawn(async move {
            tokio::time::sleep(ms(50)).await;
            if n % 2 == 0 {
                client.reset();
            } else {
                drop(client.try_send(b"").await);
            }
        }));
    }
    for task in leaving {
        task.await.expect("a client leaves");
    }
    lb.books().settled().await;
    let counted = lb.books().outcome("client_gone").await;
    assert_eq!(counted, 200, "each is counted once: {:?}", requests(&lb.books()).await);
    // At the first token, in mid-stream, after [DONE] but before the end.
    for reply in [
        Reply::new(200, "text/event-stream").events(1, Duration::ZERO).act(Act::Hang),
        Reply::new(200, "text/event-stream").events(100_000, ms(1)),
        Reply::new(200, "text/event-stream").events(3, Duration::ZERO).send(crate::harness::reply::DONE).act(Act::Hang),
    ] {
        for up in [&a, &b] {
            up.plays(reply.clone());
        }
        for _ in 0..10 {
            let mut client = lb.ask(HI_STREAM).await;
            client.head().await;
            client.data().await;
        }
        lb.books().settled().await;
    }
    // During the upload: nothing was booked, nothing is sent on.
    let before = a.count() + b.count();
    for _ in 0..10 {
        let mut client = Client::connect(lb.address).await;
        client.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 500\r\n\r\n{\"model\"").await;
        tokio::time::sleep(ms(5)).await;
    }
    lb.books().settled().await;
    assert_eq!(a.count() + b.count(), before);
    // In the queue: both replicas full, the third waits and leaves.
    let a = Upstream::start().await;
    let lb = Setup::m1().replica_with("a", &a.url(), "max_sequences: 1").start().await;
    let gate = Gate::closed();
    a.plays(Reply::chat(3, 2).after_gate(&gate));
    let mut first = lb.ask(HI).await;
    a.wait_for(1).await;
    let waiting: Vec<Client> = futures::future::join_all((0..5).map(|_| lb.ask(HI))).await;
    assert!(within(ms(1000), async || lb.books().waiting().await == 5).await, "five wait");
    drop(waiting);
    assert!(within(ms(1000), async || lb.books().waiting().await == 0).await, "they left the queue");
    gate.open();
    assert_eq!(first.answer().await.status, 200);
    lb.books().settled().await;
    assert_eq!(a.count(), 1, "those that left were never sent");
}

/// In full, once: 661 s, still booked at their end.
async fn c086() {
    let ups: Vec<Upstream> = futures::future::join_all((0..4).map(|_| Upstream::start())).await;
    let mut setup = Setup::m1();
    for (n, up) in ups.iter().enumerate() {
        setup = setup.replica(&format!("r{n}"), &up.url());
    }
    let lb = setup.section("limits", "{stream_idle_timeout: 3600s}").start().await;
    let gate = Gate::closed();
    for up in &ups {
        up.then(
            Reply::new(200, "text/event-stream")
                .events(1, Duration::ZERO)
                .act(Act::Hold(gate.clone()))
                .events(1, Duration::ZERO),
        );
    }
    let mut long = lb.ask(HI_STREAM).await;
    let head = long.head().await;
    let on = head.header("x-weighbridge-replica").expect("a replica").to_owned();
    // Nothing in the balancer has a life of its own to expire: after many ticks of every timer it is still booked. In
    // full for longer than the ten minutes of the counter in the case.
    let until = Instant::now() + Duration::from_secs(if full_figures() { 660 } else { 4 });
    while Instant::now() < until {
        assert_eq!(lb.books().in_flight(&on).await, 1, "it is still booked");
        tokio::time::sleep(ms(200)).await;
    }
    gate.open();
    assert_eq!(long.rest(head).await.end, End::Clean);
    lb.books().settled().await;
    for up in &ups {
        up.replies(crate::harness::upstream::ordinary);
    }
    // The other three still have a one-time answer queued up that is never used: plain requests take it.
    let mut spread = std::collections::BTreeMap::new();
    for _ in 0..100 {
        let answer = lb.chat(HI).await;
        *spread.entry(answer.replica().to_owned()).or_insert(0) += 1;
    }
    assert!(spread.len() == 4 && spread.values().all(|n| (10..=45).contains(n)), "{spread:?}");
    lb.books().settled().await;
}

async fn c087() {
    let (a, b, lb) = two_with(Setup::m1()).await;
    let _ = &b;
    let gate = Gate::closed();
    a.plays(
        Reply::new(200, "text/event-stream")
            .events(2, Duration::ZERO)
            .act(Act::Hold(gate.clone()))
            .events(1, Duration::ZERO),
    );
    b.plays(
        Reply::new(200, "text/event-stream")
            .events(2, Duration::ZERO)
            .act(Act::Hold(gate.clone()))
            .events(1, Duration::ZERO),
    );
    lb.books().post("/admin/replicas/b/drain").await;
    lb.books().reaches("b", "draining", Duration::from_secs(2)).await;
    let mut old = Vec::new();
    for _ in 0..10 {
        let mut client = lb.ask(HI_STREAM).await;
        let head = client.head().await;
        assert_eq!(head.header("x-weighbridge-replica"), Some("a"));
        old.push((client, head));
    }
    assert_eq!(lb.books().in_flight("a").await, 10);
    // A goes and comes back under the same name and address.
    let (a_url, b_url) = (a.url(), b.url());
    lb.rewrite(|s| s.no_replicas().replica("b", &b_url));
    assert_eq!(lb.reload().await.status, 200);
    lb.rewrite(|s| s.no_replicas().replica("a", &a_url).replica("b", &b_url));
    assert_eq!(lb.reload().await.status, 200);
    assert!(
        within(Duration::from_secs(3), async || {
            lb.books().has_replica("a").await && lb.books().state("a").await == "open"
        })
        .await,
        "a is back: {:?}",
        lb.books().replicas().await
    );
    lb.books().post("/admin/replicas/b/drain").await;
    lb.books().reaches("b", "draining", Duration::from_secs(2)).await;
    let second = Gate::closed();
    a.plays(
        Reply::new(200, "text/event-stream")
            .events(2, Duration::ZERO)
            .act(Act::Hold(second.clone()))
            .events(1, Duration::ZERO),
    );
    let mut new = Vec::new();
    for _ in 0..5 {
        let mut client = lb.ask(HI_STREAM).await;
        let head = client.head().await;
        assert_eq!(head.header("x-weighbridge-replica"), Some("a"));
        new.push((client, head));
    }
    let both = lb.books().in_flight("a").await;
    assert!(both == 15 || both == 5, "the old ones count or they do not: {both}");
    gate.open();
    for (mut client, head) in old {
        assert_eq!(client.rest(head).await.end, End::Clean, "a removed replica's streams finish");
    }
    let five = within(Duration::from_secs(2), async || lb.books().in_flight("a").await == 5).await;
    assert!(five, "exactly the five new ones: {}", lb.books().replica("a").await);
    assert!(lb.books().projected("a").await > 0);
    second.open();
    for (mut client, head) in new {
        assert_eq!(client.rest(head).await.end, End::Clean);
    }
    lb.books().settled().await;
}

async fn c089() {
    // Preferred by the case: no orphan can exist. A booking is a value whose drop gives it back; there is no call
    // that books and leaves nothing to drop. Shown on the core: placed, moved into a task that panics, and gone.
    use std::sync::Arc;
    use weighbridge::balance::{Ask, Balancer, Gate as ReplicaGate, Settings};
    use weighbridge::config::{Balance, BandSpec, Regions};
    use weighbridge::units::{Band, ManualClock, ModelName, Tokens};
    use weighbridge::weigh::{EstimateSource, OutputEstimate};

    let spec = {
        let yaml = Setup::m1().replica("a", "http://127.0.0.1:1").yaml();
        weighbridge_config(&yaml).replicas.remove(0)
    };
    let settings =
        Settings { balance: Balance::default(), bands: vec![BandSpec::default()], regions: Regions::default() };
    let clock = ManualClock::new();
    let balancer = Balancer::new(settings.clone(), clock.clone(), 1);
    balancer.apply(settings, &[spec]);
    balancer.replicas()[0].set_gate(ReplicaGate::Open, Duration::ZERO);
    let ask = Arc::new(Ask {
        model: ModelName::from("m1"),
        prompt: Tokens(100),
        longest: Tokens(100),
        must_hold: Tokens(100),
        sequences: 1,
        output: OutputEstimate {
            mean: 50.0,
            p50: 50,
            p90: 80,
            source: EstimateSource::Heuristic,
            confidence: 0.3,
            tail: Arc::new([]),
        },
        max_tokens: None,
        band: Band(0),
        tenant: None,
        session: None,
        prefix: Arc::new([]),
        prefix_block_tokens: 0,
        stream: true,
        ttft_objective: None,
    });
    let kept = balancer.place(&ask, &[]).expect("there is room");
    let orphan = balancer.place(&ask, &[]).expect("there is room");
    assert_eq!(balancer.views()[0].requests_in_flight, 2);
    let died = std::thread::spawn(move || {
        let _orphan = orphan;
        std::panic::resume_unwind(Box::new("the task dies"));
    })
    .join();
    assert!(died.is_err());
    // Busy meanwhile, or not: the orphan is gone at once and the other stays however long it takes.
    for _ in 0..10 {
        clock.advance(Duration::from_secs(60));
        drop(balancer.place(&ask, &[]).expect("there is room"));
        balancer.tick();
        assert_eq!(balancer.views()[0].requests_in_flight, 1);
    }
    drop(kept);
    let view = &balancer.views()[0];
    assert_eq!((view.requests_in_flight, view.projected_tokens, view.booked_kv_tokens), (0, Tokens(0), Tokens(0)));
}

/// A configuration read by the library.
fn weighbridge_config(yaml: &str) -> weighbridge::config::Config {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("weighbridge.yaml");
    std::fs::write(&path, yaml).expect("a file");
    weighbridge::config::load(&path).expect("a valid configuration")
}

async fn c090() {
    let limit = "{first_byte_timeout: 300ms, stream_idle_timeout: 300ms}";
    let setup = || Setup::m1().section("limits", limit);
    // A replica that answers anything, in any broken way.
    let (a, lb) = one_with(setup()).await;
    let big_head = format!("HTTP/1.1 200 OK\r\nx: {}\r\n\r\n", "y".repeat(2 << 20));
    let mut stages: Vec<(String, Reply)> =
        [400u16, 401, 404, 408, 413, 422, 429, 500, 502, 503, 504, 529, 599, 204, 301]
            .iter()
            .map(|&status| (format!("status {status}"), Reply::json(status, r#"{"error":{"message":"no","code":1}}"#)))
            .collect();
    stages.extend([
        ("no JSON".to_owned(), Reply::json(200, "not json")),
        ("an empty 200".to_owned(), Reply::json(200, "")),
        ("an empty stream".to_owned(), Reply::sse("")),
        ("closed at once".to_owned(), Reply::slam()),
        ("reset at once".to_owned(), Reply::reset()),
        ("a bad status line".to_owned(), Reply::bare("HELLO\r\n\r\n").act(Act::Cut)),
        ("a bad status".to_owned(), Reply::bare("HTTP/1.1 9x9 ?\r\n\r\n").act(Act::Cut)),
        ("too large a header".to_owned(), Reply::bare(big_head).act(Act::Cut)),
        (
            "a bad chunk".to_owned(),
            Reply::bare("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n").act(Act::Cut),
        ),
        ("half a header".to_owned(), Reply::bare("HTTP/1.1 200 OK\r\ncontent-ty").act(Act::Cut)),
        ("cut in mid-body".to_owned(), Reply::json(200, "{").framing(Framing::Chunked).act(Act::Rst)),
        ("silence".to_owned(), Reply::never()),
        ("silence after the header".to_owned(), Reply::new(200, "text/event-stream").act(Act::Hang)),
        (
            "silence in mid-stream".to_owned(),
            Reply::new(200, "text/event-stream").events(1, Duration::ZERO).act(Act::Hang),
        ),
    ]);
    for (stage, reply) in stages {
        a.plays(reply);
        for body in [HI, HI_STREAM] {
            let mut client = lb.ask(body).await;
            if let Ok(answer) = client.try_answer().await {
                assert!(answer.status >= 200, "{stage}");
            }
        }
        let left = within(Duration::from_secs(2), async || lb.books().left_over().await.is_empty()).await;
        assert!(left, "{stage}: {:?}", lb.books().left_over().await);
        // The next stage meets a replica that is in favour again.
        let _ = lb.books().post("/admin/replicas/a/undrain").await;
    }
    // A replica that is not there, whose name does not resolve, that speaks no TLS.
    let dead = crate::harness::ports::free();
    for url in [format!("http://{dead}"), "http://no-such-host.invalid:80".to_owned(), format!("https://{}", a.address)]
    {
        let lb = setup().replica("a", &url).start().await;
        let answer = lb.chat(HI).await;
        assert!(answer.status == 502 || answer.status == 503, "{url}: {} {}", answer.status, answer.text());
        assert!(answer.json()["error"]["code"].is_string(), "{}", answer.text());
        lb.books().settled().await;
    }
    // Failures of our own: a template that refuses, a prompt over every window, unknown model, a bad body.
    let a = Upstream::start().await;
    let lb = Setup::template(&case_bytes("c073-template.jinja"))
        .replica_with("a", &a.url(), "max_context_tokens: 100")
        .start()
        .await;
    for (body, status) in [
        (case_bytes("c073-request-system.json"), 400),
        (chat(&"x".repeat(500), ""), 400),
        (case_bytes("c062-request-unknown.json"), 404),
        (b"{".to_vec(), 400),
    ] {
        assert_eq!(lb.chat(&body).await.status, status);
        lb.books().settled().await;
    }
    assert_eq!(a.count(), 0);
}

async fn c091() {
    let (a, lb) = one().await;
    a.plays(Reply::script("c091-upstream.jsonl"));
    let mut client = lb.ask(&case_bytes("c091-request.json")).await;
    client.head().await;
    same_bytes(&client.data().await, &case_bytes("c091-upstream-body.sse"));
    let left = Instant::now();
    drop(client);
    let late = a.left_after(0, left, Duration::from_secs(2)).await.expect("the upstream is closed");
    assert!(late < Duration::from_secs(1), "{late:?}");
    lb.books().settled().await;
    // For a client that stays, the stream's idle limit ends it.
    let (a, lb) = one_with(Setup::m1().section("limits", "{stream_idle_timeout: 400ms}")).await;
    a.plays(Reply::script("c091-upstream.jsonl"));
    let start = Instant::now();
    let answer = lb.chat(&case_bytes("c091-request.json")).await;
    assert_ne!(answer.end, End::Clean);
    assert!((ms(350)..ms(2500)).contains(&start.elapsed()), "{:?}", start.elapsed());
    assert!(a.left_after(0, start, Duration::from_secs(2)).await.is_some());
    lb.books().settled().await;
}

async fn c092() {
    let (a, lb) = one().await;
    let mut script = Reply::script("c092-upstream.jsonl");
    script.acts.retain(|act| matches!(act, Act::Send(_)));
    script.acts.truncate(40);
    a.plays(script.act(Act::Hang));
    let mut client = lb.ask(&case_bytes("c092-request.json")).await;
    let head = client.head().await;
    let prompt: u64 = head.header("x-weighbridge-prompt-tokens").expect("a count").parse().expect("a number");
    let mut got = String::new();
    while got.matches("\n\n").count() < 40 {
        got.push_str(&String::from_utf8_lossy(&client.data().await));
    }
    drop(client);
    outcomes(&lb.books(), "client_gone", 1).await;
    lb.books().settled().await;
    assert_eq!(lb.books().tokens("prompt").await, prompt);
    let output = lb.books().tokens("output").await;
    assert!((38..=41).contains(&output), "{output} output tokens");
}

/// The case says a million, and 20 MB. In full it is a million; else as many as a debug build does in some seconds, with
/// the same share of aborts: what grows per request would be seen, for 20 MB over a million are 20 bytes a request, over
/// these it is kilobytes. In full, once, with a release build on two busy cores: 10.6 MiB over 990,000 requests at 2,413 a
/// second.
async fn c094() {
    let (first, then, bound) = if full_figures() { (10_000, 990_000, 20 << 20) } else { (1000, 3000, 4 << 20) };
    let (a, lb) = one().await;
    a.plays(Reply::chat(3, 2));
    let round = async |requests: usize, seed: u64| {
        let work = (0..4u64).map(|n| {
            let (address, a, lb) = (lb.address, &a, &lb);
            async move {
                let mut rng = rand::rngs::SmallRng::seed_from_u64(seed * 10 + n);
                let mut client = Client::connect(address).await;
                for asked in 0..requests / 4 {
                    let id = format!("{:032x}", rng.random::<u128>());
                    client.post_with("/v1/chat/completions", &[("x-request-id", &id)], HI).await;
                    if rng.random_bool(0.05) {
                        client = Client::connect(address).await;
                    } else {
                        assert_eq!(client.answer().await.status, 200);
                    }
                    if asked % 1000 == 999 {
                        // What the test itself remembers of a million requests would be all memory there is.
                        a.forget();
                        lb.forget_log();
                    }
                }
            }
        });
        futures::future::join_all(work).await;
        a.forget();
    };
    round(first, 1).await;
    lb.books().settled().await;
    let before = lb.rss();
    let files = lb.descriptors();
    let started = Instant::now();
    round(then, 2).await;
    let rate = then as f64 / started.elapsed().as_secs_f64();
    lb.books().settled().await;
    let grown = lb.rss().saturating_sub(before);
    println!("       c094: {} KiB over {then} requests at {rate:.0}/s", grown >> 10);
    assert!(grown < bound, "{grown} bytes over {then} requests");
    assert!(lb.descriptors() <= files + 8, "{} descriptors, {files} before", lb.descriptors());
}
