//! Chaos, seeded, over real sockets: clients that leave, reset, stall, read slowly or send garbage; replicas that refuse,
//! reset, stall, lie and vanish; reloads all the while. At the end: zero load, no descriptor kept, memory bounded, and
//! requests served as if nothing had been.
//!
//! Ten minutes of it are `make chaos`; a plain `cargo test` runs some seconds. `WEIGHBRIDGE_CHAOS_SECONDS` and
//! `WEIGHBRIDGE_CHAOS_SEED` say otherwise.

mod harness;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use harness::client::request;
use harness::reply::{DONE, Framing, usage_chunk};
use harness::{Act, Client, Piece, Reply, Running, Setup, Upstream, ms, run, within};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

const REPLICAS: usize = 4;
const CLIENTS: u64 = 24;

fn from_env(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(otherwise)
}

#[test]
fn after_chaos_nothing_is_left_and_everything_is_served() {
    run(async {
        let seconds = from_env("WEIGHBRIDGE_CHAOS_SECONDS", 15);
        let seed = from_env("WEIGHBRIDGE_CHAOS_SEED", 1);
        println!("chaos: {seconds} s, seed {seed}");
        let ups: Vec<Upstream> = futures::future::join_all((0..REPLICAS).map(|_| Upstream::start())).await;
        let storm = Arc::new(AtomicBool::new(false));
        for (n, up) in ups.iter().enumerate() {
            misbehave(up, seed * 100 + n as u64, Arc::clone(&storm));
        }
        let limits = "{first_byte_timeout: 1s, stream_idle_timeout: 1s, slow_reader_timeout: 1s, body_timeout: 1s, header_timeout: 1s, body_bytes: 256KiB}";
        let mut setup = Setup::m1()
            .section("limits", limits)
            .section("health", "{interval: 200ms, timeout: 500ms, unhealthy_after: 3, healthy_after: 1, eject: 200ms, eject_max: 1s}")
            .section("bands", "[{name: high, share: 1.0, queue: {requests: 20, wait: 1s}}, {name: low, share: 0.7, default: true, queue: {requests: 10, wait: 1s}}]");
        for (n, up) in ups.iter().enumerate() {
            setup = setup.replica_with(&format!("r{n}"), &up.url(), "max_sequences: 5");
        }
        let lb = Arc::new(setup.start().await);
        quiet(&lb).await;
        let (files, memory) = (lb.descriptors(), lb.rss());

        let stop = Arc::new(AtomicBool::new(false));
        let done = Arc::new(AtomicU64::new(0));
        let mut tasks = Vec::new();
        for n in 0..CLIENTS {
            let (address, stop, done) = (lb.address, Arc::clone(&stop), Arc::clone(&done));
            tasks.push(tokio::spawn(async move {
                let mut rng = SmallRng::seed_from_u64(seed * 1000 + n);
                while !stop.load(Ordering::Relaxed) {
                    // Whatever becomes of it, it ends: no client of the chaos waits for more than its own patience.
                    let _ = tokio::time::timeout(Duration::from_secs(8), hostile(address, &mut rng)).await;
                    done.fetch_add(1, Ordering::Relaxed);
                }
            }));
        }
        let mut rng = SmallRng::seed_from_u64(seed);
        let until = Instant::now() + Duration::from_secs(seconds);
        let good = lb.yaml();
        let (mut reloads, mut halfway) = (0, None);
        while Instant::now() < until {
            match rng.random_range(0..5) {
                0 => storm.store(rng.random_bool(0.3), Ordering::Relaxed),
                1 => {
                    let up = &ups[rng.random_range(0..REPLICAS)];
                    up.stop();
                    tokio::time::sleep(ms(rng.random_range(50..400))).await;
                    up.listen().await;
                }
                2 | 3 => {
                    let text = match rng.random_range(0..4) {
                        0 => good[..good.len() / 2].to_owned(),
                        1 => good.replace("max_sequences: 5", "max_sequences: 7"),
                        2 => without_last_replica(&good),
                        _ => good.clone(),
                    };
                    lb.write_config(text.as_bytes());
                    lb.signal("HUP");
                    reloads += 1;
                }
                _ => {}
            }
            tokio::time::sleep(ms(rng.random_range(20..200))).await;
            assert!(lb.exited().is_none(), "the balancer died:\n{}", lb.log());
            let healthy = harness::get(lb.admin, "/healthz").await.status;
            assert_eq!(healthy, 200);
            if halfway.is_none() && Instant::now() + Duration::from_secs(seconds / 2) > until {
                halfway = Some(lb.rss());
            }
        }
        stop.store(true, Ordering::Relaxed);
        for task in tasks {
            task.await.expect("a client");
        }
        // Peace.
        storm.store(false, Ordering::Relaxed);
        for up in &ups {
            up.plays(Reply::chat(3, 2));
        }
        lb.write_config(good.as_bytes());
        lb.reload().await;
        quiet(&lb).await;
        let end = lb.rss();
        let kept = within(Duration::from_secs(10), async || lb.descriptors() <= files + 8).await;
        let complaints: Vec<String> = ups.iter().flat_map(Upstream::complaints).collect();
        println!(
            "chaos: {} clients, {reloads} reloads, memory {} -> {} -> {} KiB, descriptors {files} -> {}",
            done.load(Ordering::Relaxed),
            memory / 1024,
            halfway.unwrap_or_default() / 1024,
            end / 1024,
            lb.descriptors()
        );
        assert!(kept, "{} descriptors, {files} before", lb.descriptors());
        assert!(complaints.is_empty(), "{complaints:?}");
        assert!(!lb.log().contains("panicked"), "a panic in the log");
        let half = halfway.expect("it was measured");
        assert!(end < half + half / 5 + (8 << 20), "memory went from {half} at half time to {end}");
        let all_open =
            within(Duration::from_secs(10), async || lb.books().replicas().await.iter().all(|r| r["state"] == "open"))
                .await;
        assert!(all_open, "{:?}", lb.books().replicas().await);
        for _ in 0..40 {
            assert_eq!(lb.chat(&body(false, 5)).await.status, 200);
        }
        quiet(&lb).await;
    });
}

/// Everything booked is given back, once no client is left: within the longest limit of the configuration.
async fn quiet(lb: &Running) {
    let mut left = Vec::new();
    let zero = within(Duration::from_secs(6), async || {
        left = lb.books().left_over().await;
        left.is_empty()
    })
    .await;
    assert!(zero, "still booked: {left:?}");
}

fn without_last_replica(yaml: &str) -> String {
    let mut lines: Vec<&str> = yaml.lines().collect();
    lines.pop();
    lines.join("\n") + "\n"
}

fn body(stream: bool, size: usize) -> Vec<u8> {
    format!(
        r#"{{"model":"m1","max_tokens":50,"messages":[{{"role":"user","content":"{}"}}],"stream":{stream}}}"#,
        "x".repeat(size)
    )
    .into_bytes()
}

/// A replica that does all that engines were ever seen to do.
fn misbehave(up: &Upstream, seed: u64, storm: Arc<AtomicBool>) {
    let rng = parking_lot::Mutex::new(SmallRng::seed_from_u64(seed));
    up.replies(move |seen| {
        let mut rng = rng.lock();
        if storm.load(Ordering::Relaxed) && rng.random_bool(0.8) {
            return Reply::json(503, r#"{"error":{"message":"busy","code":503}}"#);
        }
        let stream = seen.body.ends_with(b"true}") || seen.body.windows(13).any(|w| w == b"\"stream\":true");
        let events = |n, gap| Reply::new(200, "text/event-stream").events(n, gap);
        match rng.random_range(0..20) {
            0 => Reply::never(),
            1 => Reply::slam(),
            2 => Reply::reset(),
            3 => Reply::json(500, "oops"),
            4 => Reply::json(429, "{}").header("retry-after", "1"),
            5 => Reply::bare("HTTP/1.1 999\r\n\r\n").act(Act::Cut),
            6 => Reply::bare("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n").act(Act::Cut),
            7 => events(3, Duration::ZERO).act(Act::Rst),
            8 => events(3, Duration::ZERO).act(Act::Cut),
            9 => events(2, Duration::ZERO).act(Act::Hang),
            10 => events(2, Duration::ZERO).send("data: {\"error\":{\"message\":\"x\"}}\n\n").send(DONE),
            11 => events(1, Duration::ZERO).send("data: \u{1}garbage{{{\n\n\n\n:\n\ndata\n\n").send(vec![0xff; 300]),
            12 if stream => events(2000, Duration::ZERO).send(DONE),
            13 => Reply::chat(9, 3).framing(Framing::Close).act(Act::Fin),
            _ if stream => {
                events(rng.random_range(0..20), ms(rng.random_range(0..20))).send(usage_chunk(9, 3)).send(DONE)
            }
            _ => Reply::chat(9, 3).after(ms(rng.random_range(0..60))),
        }
    });
}

/// One client's visit.
async fn hostile(address: SocketAddr, rng: &mut SmallRng) {
    let Ok(mut client) = Client::try_connect(address).await else { return };
    let stream = rng.random_bool(0.6);
    let size = if rng.random_bool(0.05) { 300_000 } else { rng.random_range(1..2000) };
    let band = if rng.random_bool(0.3) { "high" } else { "low" };
    let mut bytes =
        request("POST", "/v1/chat/completions", &[("x-weighbridge-priority", band)], Some(&body(stream, size)));
    match rng.random_range(0..12) {
        // Garbage, whole or in the middle of something right.
        0 => {
            let at = rng.random_range(0..bytes.len());
            bytes[at] = rng.random();
        }
        1 => bytes = (0..rng.random_range(1..400)).map(|_| rng.random()).collect(),
        // Stops in the middle and waits, or leaves.
        2 => bytes.truncate(rng.random_range(0..bytes.len())),
        _ => {}
    }
    if client.try_send(&bytes).await.is_err() {
        return;
    }
    match rng.random_range(0..10) {
        0 => client.reset(),
        1 => {
            tokio::time::sleep(ms(rng.random_range(0..50))).await;
            client.reset();
        }
        2 => tokio::time::sleep(ms(rng.random_range(0..200))).await,
        // A reader that stops reading, or reads slowly.
        3 => {
            client.narrow();
            tokio::time::sleep(ms(rng.random_range(500..2500))).await;
        }
        4 => {
            if tokio::time::timeout(ms(2500), client.try_head()).await.is_ok_and(|h| h.is_ok()) {
                for _ in 0..10 {
                    match tokio::time::timeout(ms(1500), client.piece()).await {
                        Ok(Piece::Data(..)) => tokio::time::sleep(ms(rng.random_range(0..80))).await,
                        _ => return,
                    }
                }
            }
        }
        _ => {
            let _ = tokio::time::timeout(ms(4000), client.try_answer()).await;
        }
    }
}
