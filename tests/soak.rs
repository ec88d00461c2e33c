//! A day of ordinary traffic in a quarter of an hour: requests and streams, clients that leave, reloads that change limits
//! and take replicas out and in. Every answer that a client waits for is whole; memory is flat in the second half; at
//! the end nothing is booked and no descriptor is kept.
//!
//! Fifteen minutes of it are `make soak`; a plain `cargo test` runs some seconds. `WEIGHBRIDGE_SOAK_SECONDS` and
//! `WEIGHBRIDGE_SOAK_SEED` say otherwise, `WEIGHBRIDGE_BINARY` names another build. Nothing here is out of order: that
//! is what `tests/chaos.rs` is for.

mod harness;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use harness::client::End;
use harness::{Act, Client, Piece, Reply, Running, Setup, Sim, Upstream, ms, run, within};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

const REPLICAS: usize = 3;
const CLIENTS: u64 = 16;
/// Requests that a client sends before it takes a new connection.
const REQUESTS_PER_CONNECTION: usize = 20;
/// Distinct prompts: people ask again, and what is remembered of a prompt must not be what grows.
const PROMPTS: usize = 500;
/// Memory may grow by so much in the second half.
const GROWTH_MAX: f64 = 0.05;
/// In a run too short to fill what is meant to fill (histories, counts, the allocator's own), this much more.
const SHORT: Duration = Duration::from_secs(120);
const SHORT_SLACK_BYTES: f64 = (16 << 20) as f64;
/// Descriptors that come and go with probes and the reading of books.
const DESCRIPTORS_SLACK: usize = 8;

fn from_env(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(otherwise)
}

/// What the clients did.
#[derive(Default)]
struct Tally {
    whole: AtomicU64,
    streams: AtomicU64,
    left: AtomicU64,
}

#[test]
fn a_day_of_churn_leaves_memory_flat_and_nothing_booked() {
    run(async {
        let span = Duration::from_secs(from_env("WEIGHBRIDGE_SOAK_SECONDS", 12));
        let seed = from_env("WEIGHBRIDGE_SOAK_SEED", 1);
        println!("soak: {} s, seed {seed}", span.as_secs());
        let sims = futures::future::join_all((0..REPLICAS).map(|_| Sim::start(&["--tokens-per-sec", "20000"]))).await;
        let mut setup = Setup::m1();
        for (n, sim) in sims.iter().enumerate() {
            setup = setup.replica(&format!("r{n}"), &sim.url());
        }
        let lb = Arc::new(setup.start().await);
        quiet(&lb).await;
        let (descriptors, at_start) = (lb.descriptors(), lb.rss());

        let stop = Arc::new(AtomicBool::new(false));
        let tally = Arc::new(Tally::default());
        let clients: Vec<_> = (0..CLIENTS)
            .map(|n| {
                let (address, stop, tally) = (lb.address, Arc::clone(&stop), Arc::clone(&tally));
                tokio::spawn(async move {
                    let mut rng = SmallRng::seed_from_u64(seed * 1000 + n);
                    while !stop.load(Ordering::Relaxed) {
                        visit(address, &mut rng, &tally, &stop).await;
                    }
                })
            })
            .collect();

        let mut rng = SmallRng::seed_from_u64(seed);
        let (begun, mut samples, mut reloads) = (Instant::now(), Vec::new(), 0u64);
        let good = lb.yaml();
        while begun.elapsed() < span {
            tokio::time::sleep(ms(500)).await;
            samples.push(lb.rss() as f64);
            if rng.random_bool(0.5) {
                lb.write_config(edited(&good, &mut rng).as_bytes());
                assert_eq!(lb.reload().await.status, 200, "{}", lb.log());
                reloads += 1;
            }
            assert!(lb.exited().is_none(), "the balancer died:\n{}", lb.log());
            assert!(!lb.log().contains("panicked"), "a panic:\n{}", lb.log());
            lb.forget_log();
        }
        stop.store(true, Ordering::Relaxed);
        for client in clients {
            client.await.expect("every answer that was waited for is whole");
        }
        lb.write_config(good.as_bytes());
        lb.reload().await;
        quiet(&lb).await;

        let second_half = &samples[samples.len() / 2..];
        let quarter = (second_half.len() / 4).max(1);
        let (from, to) = (median(&second_half[..quarter]), median(&second_half[second_half.len() - quarter..]));
        println!(
            "soak: {} answers, {} streams, {} left early, {reloads} reloads; memory {} KiB at the start, {:.0} at half time, \
             {:.0} at the end ({:+.2} %)",
            tally.whole.load(Ordering::Relaxed),
            tally.streams.load(Ordering::Relaxed),
            tally.left.load(Ordering::Relaxed),
            at_start / 1024,
            from / 1024.0,
            to / 1024.0,
            (to / from - 1.0) * 100.0
        );
        let slack = if span < SHORT { SHORT_SLACK_BYTES } else { 0.0 };
        assert!(to <= from * (1.0 + GROWTH_MAX) + slack, "memory grew from {from} to {to} bytes in the second half");
        let closed =
            within(Duration::from_secs(15), async || lb.descriptors() <= descriptors + DESCRIPTORS_SLACK).await;
        assert!(closed, "{} descriptors, {descriptors} at the start", lb.descriptors());
    });
}

#[test]
fn a_large_request_is_not_kept_while_its_answer_streams() {
    const STREAMS: u64 = 60;
    const BODY_BYTES: u64 = 1 << 20;
    run(async {
        let replica = Upstream::start().await;
        replica.plays(Reply::new(200, "text/event-stream").events(2, Duration::ZERO).act(Act::Hang));
        let lb = Setup::m1().replica("r0", &replica.url()).start().await;
        // No tokens, but bytes that have to be forwarded.
        let body = format!(
            r#"{{"model":"m1","stream":true,"messages":[{{"role":"user","content":"hi"}}],"unknown":"{}"}}"#,
            "x".repeat(BODY_BYTES as usize)
        );
        let mut open = Vec::new();
        let mut before = 0;
        for n in 0..STREAMS + 1 {
            let mut client = lb.ask(body.as_bytes()).await;
            assert_eq!(client.head().await.status, 200);
            client.data().await;
            open.push(client);
            if n == 0 {
                before = lb.rss();
            }
        }
        let grown = lb.rss().saturating_sub(before);
        assert!(grown < STREAMS * BODY_BYTES / 2, "{STREAMS} streams keep {grown} bytes");
    });
}

/// Everything booked is given back once no client is left.
async fn quiet(lb: &Running) {
    let mut left = Vec::new();
    let zero = within(Duration::from_secs(5), async || {
        left = lb.books().left_over().await;
        left.is_empty()
    })
    .await;
    assert!(zero, "still booked: {left:?}");
}

/// The configuration with another limit, another cap, or without its last replica.
fn edited(good: &str, rng: &mut SmallRng) -> String {
    match rng.random_range(0..4) {
        0 => format!("{good}limits: {{json_depth: {}}}\n", rng.random_range(60..120)),
        1 => good.replacen("max_context_tokens: 131072", "max_context_tokens: 131072, max_sequences: 40", 1),
        2 => {
            let mut lines: Vec<&str> = good.lines().collect();
            lines.pop();
            lines.join("\n") + "\n"
        }
        _ => good.to_owned(),
    }
}

/// One connection's worth of requests.
async fn visit(address: SocketAddr, rng: &mut SmallRng, tally: &Tally, stop: &AtomicBool) {
    let mut client = Client::connect(address).await;
    for _ in 0..REQUESTS_PER_CONNECTION {
        if stop.load(Ordering::Relaxed) {
            return;
        }
        tokio::time::sleep(ms(rng.random_range(0..30))).await;
        let stream = rng.random_bool(0.5);
        client.post("/v1/chat/completions", &body(stream, rng)).await;
        match rng.random_range(0..20) {
            // Leaves before the answer, or in its midst, kindly or not.
            0 => {
                tokio::time::sleep(ms(rng.random_range(0..40))).await;
                tally.left.fetch_add(1, Ordering::Relaxed);
                return;
            }
            1 | 2 if stream => {
                let head = client.head().await;
                assert_eq!(head.status, 200);
                for _ in 0..rng.random_range(1..5) {
                    if matches!(client.piece().await, Piece::End(..)) {
                        break;
                    }
                }
                if rng.random_bool(0.5) {
                    client.reset();
                }
                tally.left.fetch_add(1, Ordering::Relaxed);
                return;
            }
            _ => {
                let answer = client.answer().await;
                assert_eq!(answer.status, 200, "{}", answer.text());
                assert_eq!(answer.end, End::Clean, "{}", answer.text());
                let counter = if stream { &tally.streams } else { &tally.whole };
                counter.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}

fn body(stream: bool, rng: &mut SmallRng) -> Vec<u8> {
    let prompt = rng.random_range(0..PROMPTS);
    let text = format!("Prompt {prompt}. ").repeat(1 + prompt * prompt % 97);
    let cap = rng.random_range(1..60);
    format!(
        r#"{{"model":"m1","max_tokens":{cap},"messages":[{{"role":"user","content":"{text}"}}],"stream":{stream}}}"#
    )
    .into_bytes()
}

fn median(of: &[f64]) -> f64 {
    let mut sorted = of.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}
