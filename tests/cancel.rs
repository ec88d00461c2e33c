//! Cancellation: a client gone in any phase stops the upstream, and the books end at exactly zero.

mod harness;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use harness::client::request;
use harness::reply::DONE;
use harness::{Act, Client, Reply, Setup, Upstream, median, ms, run, within};
use rand::{Rng, SeedableRng};

const WHOLE: &[u8] = br#"{"model":"m1","messages":[{"role":"user","content":"hi"}]}"#;
const STREAM: &[u8] = br#"{"model":"m1","messages":[{"role":"user","content":"hi"}],"stream":true}"#;

/// How soon the replica must see that nobody waits for its answer any more.
const SOON: Duration = Duration::from_millis(100);

#[test]
fn a_client_gone_in_any_phase_stops_the_upstream_within_a_tenth_of_a_second() {
    run(async {
        let a = Upstream::start().await;
        let lb = Setup::m1().replica("a", &a.url()).start().await;
        let events = |n| Reply::new(200, "text/event-stream").events(n, Duration::ZERO);
        let phases: [(&str, &[u8], Reply, bool); 6] = [
            ("prefill of a stream", STREAM, Reply::never(), false),
            ("non-stream", WHOLE, Reply::never(), false),
            ("after the header", STREAM, events(0).act(Act::Hang), true),
            ("in mid-stream", STREAM, events(3).act(Act::Hang), true),
            ("while events flow", STREAM, events(1).events(100_000, ms(2)), true),
            ("after [DONE]", STREAM, events(2).send(DONE).act(Act::Hang), true),
        ];
        for (phase, body, reply, head) in phases {
            let mut took = Vec::new();
            for n in 0..9 {
                let before = a.count();
                a.plays(reply.clone());
                let mut client = lb.ask(body).await;
                a.wait_for(before + 1).await;
                if head {
                    client.head().await;
                }
                tokio::time::sleep(ms(10)).await;
                let left = Instant::now();
                if n % 2 == 0 {
                    client.reset();
                } else {
                    drop(client);
                }
                let late = a.left_after(before, left, Duration::from_secs(2)).await;
                took.push(late.unwrap_or_else(|| panic!("{phase}: the upstream runs on")));
            }
            let middle = median(took.clone());
            assert!(middle < SOON, "{phase}: {middle:?} of {took:?}");
            lb.books().settled().await;
        }
    });
}

#[test]
fn ten_thousand_random_disconnects_end_at_exactly_zero() {
    run(async {
        const CLIENTS: u64 = 48;
        // One in ten waits for its answer first, and some of those get it: they are not counted.
        const EACH: u64 = 11_500 / CLIENTS;
        let ups: Vec<Upstream> = futures::future::join_all((0..4).map(|_| Upstream::start())).await;
        let mut setup = Setup::m1();
        for (n, up) in ups.iter().enumerate() {
            up.replies(|seen| {
                let n = seen.connection * 31 + seen.place * 7;
                match n % 5 {
                    0 => Reply::chat(3, 2),
                    1 => Reply::chat(3, 2).after(ms(n % 23)),
                    2 => Reply::new(200, "text/event-stream").events(n % 11, ms(n % 3)),
                    3 => Reply::new(200, "text/event-stream").events(2, Duration::ZERO).act(Act::Hang),
                    _ => Reply::stream_of(5, 3),
                }
            });
            // Few places, so that many leave while they wait.
            setup = setup.replica_with(&format!("r{n}"), &up.url(), "max_sequences: 6");
        }
        let lb = Arc::new(setup.start().await);
        let descriptors = lb.descriptors();
        let left = Arc::new(AtomicU64::new(0));
        let answered = Arc::new(AtomicU64::new(0));
        let mut tasks = Vec::new();
        for client in 0..CLIENTS {
            let (address, left, answered) = (lb.address, Arc::clone(&left), Arc::clone(&answered));
            tasks.push(tokio::spawn(async move {
                let mut rng = rand::rngs::SmallRng::seed_from_u64(client);
                for _ in 0..EACH {
                    let Ok(mut client) = Client::try_connect(address).await else { continue };
                    let body = if rng.random_bool(0.6) { STREAM } else { WHOLE };
                    let bytes = request("POST", "/v1/chat/completions", &[], Some(body));
                    let cut = if rng.random_bool(0.15) { rng.random_range(0..bytes.len()) } else { bytes.len() };
                    let _ = client.try_send(&bytes[..cut]).await;
                    let stay = Duration::from_micros(rng.random_range(0..15_000));
                    if cut == bytes.len() && rng.random_bool(0.1) {
                        if let Ok(Ok(answer)) = tokio::time::timeout(ms(40), client.try_answer()).await {
                            assert!(answer.status == 200 || answer.status == 503, "{}", answer.status);
                            answered.fetch_add(1, Ordering::Relaxed);
                        }
                    } else {
                        tokio::time::sleep(stay).await;
                    }
                    left.fetch_add(1, Ordering::Relaxed);
                    if rng.random_bool(0.5) {
                        client.reset();
                    }
                }
            }));
        }
        for task in tasks {
            task.await.expect("a client");
        }
        let (left, answered) = (left.load(Ordering::Relaxed), answered.load(Ordering::Relaxed));
        assert!(left - answered >= 10_000, "{answered} of {left} had their answer before they left");
        // What had connected and left before it was even read is still to be gone through on a busy machine.
        let mut booked = Vec::new();
        let settled = within(Duration::from_secs(30), async || {
            booked = lb.books().left_over().await;
            booked.is_empty()
        })
        .await;
        assert!(settled, "still booked: {booked:?}");
        for up in &ups {
            assert!(up.complaints().is_empty(), "{:?}", up.complaints());
        }
        let closed = within(Duration::from_secs(5), async || lb.descriptors() <= descriptors + 150).await;
        assert!(closed, "{} descriptors, {descriptors} at the start", lb.descriptors());
        assert!(!lb.log().contains("panicked"), "a panic in the log");
        // And it serves on.
        ups.iter().for_each(|up| up.plays(Reply::chat(3, 2)));
        for _ in 0..8 {
            assert_eq!(lb.chat(WHOLE).await.status, 200);
        }
        lb.books().settled().await;
    });
}
