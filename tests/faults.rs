//! Faults of whole replicas: killed, frozen, refusing, in the middle of traffic.

mod harness;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use harness::{Client, End, Reply, Setup, Sim, Upstream, ms, run, within};
use parking_lot::Mutex;

fn chat(n: u64, stream: bool) -> Vec<u8> {
    format!(
        r#"{{"model":"m1","max_tokens":{},"stream":{stream},"messages":[{{"role":"user","content":"request {n}"}}]}}"#,
        10 + n % 40
    )
    .into_bytes()
}

/// What became of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Fate {
    Whole,
    /// A stream that was under way ended visibly broken.
    Broken,
    /// An error in place of an answer.
    Error(u16),
}

#[test]
fn two_of_four_replicas_killed_in_mid_traffic_cost_only_what_had_begun() {
    run(async {
        // Some eight on each replica: more than a tenth of what was asked in the seconds before, so that the floor of the
        // retries' budget is what carries those that had not begun.
        const CLIENTS: u64 = 32;
        let sims: Vec<Sim> = futures::future::join_all((0..4).map(|_| Sim::start(&["--tokens-per-sec", "600"]))).await;
        let mut setup = Setup::m1()
            .section("health", "{interval: 300ms, timeout: 1s, unhealthy_after: 3, healthy_after: 1}")
            // The plain rule gives an idle replica work however slow it was learned to be; here it is the health that is
            // looked at.
            .section("balance", "{policy: least-tokens}")
            .section("warmup", "{ramp: 3s}");
        for (n, sim) in sims.iter().enumerate() {
            setup = setup.replica_with(&format!("s{n}"), &sim.url(), "tokens_per_sec: 600");
        }
        let lb = Arc::new(setup.start().await);
        let stop = Arc::new(AtomicBool::new(false));
        let fates = Arc::new(Mutex::new(Vec::<(Instant, Fate, Option<String>)>::new()));
        let asking: Vec<_> = (0..CLIENTS)
            .map(|n| {
                let (address, stop, fates) = (lb.address, Arc::clone(&stop), Arc::clone(&fates));
                tokio::spawn(async move {
                    let mut count = n;
                    while !stop.load(Ordering::Relaxed) {
                        count += CLIENTS;
                        let mut client = Client::connect(address).await;
                        client.post("/v1/chat/completions", &chat(count, count % 3 != 0)).await;
                        let (fate, replica) = match client.try_answer().await {
                            Ok(answer) => {
                                let replica = answer.header("x-weighbridge-replica").map(str::to_owned);
                                let fate = match (answer.status, answer.end) {
                                    (200, End::Clean) => Fate::Whole,
                                    (200, _) => {
                                        // A stream says what happened before it breaks off.
                                        if answer
                                            .header("content-type")
                                            .is_some_and(|c| c.starts_with("text/event-stream"))
                                        {
                                            assert!(
                                                answer.text().contains("\"error\""),
                                                "no error event: {}",
                                                answer.text()
                                            );
                                        }
                                        Fate::Broken
                                    }
                                    (status, _) => Fate::Error(status),
                                };
                                (fate, replica)
                            }
                            Err(_) => (Fate::Error(0), None),
                        };
                        fates.lock().push((Instant::now(), fate, replica));
                    }
                })
            })
            .collect();
        tokio::time::sleep(Duration::from_secs(2)).await;
        let running = (lb.books().in_flight("s0").await + lb.books().in_flight("s1").await) as usize;
        let killed = Instant::now();
        // In the same instant: what moves from the one finds the other gone, and moves on.
        harness::balancer::signal_all(&[sims[0].pid(), sims[1].pid()], "KILL");
        sims[0].kill();
        sims[1].kill();
        // Three probe intervals, and one for a busy machine.
        tokio::time::sleep(ms(1200)).await;
        let out = Instant::now();
        for dead in ["s0", "s1"] {
            assert_ne!(lb.books().state(dead).await, "open", "{dead} is out");
        }
        let errors = async || lb.books().metric("weighbridge_upstream_errors_total", &[]).await;
        let tried = errors().await;
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert_eq!(errors().await, tried, "the dead are not tried again");
        let fates_so_far = fates.lock().clone();
        let mut tally = BTreeMap::new();
        for (_, fate, _) in &fates_so_far {
            *tally.entry(*fate).or_insert(0) += 1;
        }
        let broken = tally.get(&Fate::Broken).copied().unwrap_or(0);
        assert!(broken <= running + 2 * CLIENTS as usize / 4, "{broken} broken, {running} were running: {tally:?}");
        // The only request that may be lost is one that both had taken: a process that is being killed accepts
        // connections until its sockets are closed, and a death before the header is repeated once, for the engine may
        // have begun. Each such loss is two deaths in the balancer's own count.
        let twice = tally.get(&Fate::Error(502)).copied().unwrap_or(0);
        let deaths = lb.books().metric("weighbridge_upstream_errors_total", &[("kind", "died_before_header")]).await;
        assert!(twice <= 2 && 2.0 * twice as f64 <= deaths, "{twice} died with both, {deaths} deaths: {tally:?}");
        let lost = tally.keys().any(|f| matches!(f, Fate::Error(status) if *status != 502));
        assert!(!lost, "what had not begun succeeds elsewhere: {tally:?}");
        let late = fates_so_far
            .iter()
            .filter(|(_, f, _)| *f == Fate::Broken)
            .map(|(at, ..)| at.saturating_duration_since(killed))
            .max();
        assert!(late.is_none_or(|l| l < Duration::from_secs(2)), "broken streams end promptly: {late:?}");
        assert!(
            fates_so_far.iter().all(|(at, _, replica)| *at < out || !matches!(replica.as_deref(), Some("s0" | "s1"))),
            "the dead get no traffic"
        );
        // Back up: they are taken in again, by a ramp.
        sims[0].restart().await;
        sims[1].restart().await;
        for dead in ["s0", "s1"] {
            lb.books().reaches(dead, "open", Duration::from_secs(10)).await;
        }
        let back = within(Duration::from_secs(10), async || {
            fates.lock().iter().rev().take(30).any(|(_, _, replica)| replica.as_deref() == Some("s0"))
        })
        .await;
        let mut shares = BTreeMap::<Option<String>, usize>::new();
        fates
            .lock()
            .iter()
            .rev()
            .take(200)
            .for_each(|(_, _, replica)| *shares.entry(replica.clone()).or_default() += 1);
        assert!(back, "they take traffic again: {shares:?} of the last 200, {:#?}", lb.books().replicas().await);
        stop.store(true, Ordering::Relaxed);
        for task in asking {
            task.await.expect("an asker");
        }
        lb.books().settled().await;
        println!(
            "two of four killed under load: {tally:?}, {running} were running on them; broken streams ended within {late:?}"
        );
    });
}

/// Three replicas, by turns.
async fn three() -> (Upstream, Upstream, Upstream, harness::Running) {
    let (a, b, c) = (Upstream::start().await, Upstream::start().await, Upstream::start().await);
    let lb = Setup::m1()
        // No probe comes between: what is known of them is what their traffic tells.
        .section("health", "{interval: 60s, unhealthy_after: 100, healthy_after: 1}")
        .section("balance", "{policy: round-robin}")
        .replica("a", &a.url())
        .replica("b", &b.url())
        .replica("c", &c.url())
        .start()
        .await;
    (a, b, c, lb)
}

#[test]
fn a_request_whose_second_choice_refuses_the_connection_goes_on_to_a_third() {
    run(async {
        for dying in [Reply::slam(), Reply::reset()] {
            let (a, b, c, lb) = three().await;
            // One dies with the request in its hands, one is gone already: by turns, with and without kept connections.
            for round in 0..6 {
                let (taker, gone) = if round % 2 == 0 { (&a, &b) } else { (&b, &a) };
                taker.plays(dying.clone());
                gone.stop();
                for n in 0..3 {
                    let answer = lb.chat(&chat(n, false)).await;
                    assert_eq!((answer.status, answer.replica()), (200, "c"), "{round}: {}", answer.text());
                }
                gone.listen().await;
                gone.plays(Reply::chat(3, 2));
                taker.plays(Reply::chat(3, 2));
                // Past the moment in which they are passed over, both have connections again.
                let both = within(Duration::from_secs(5), async || {
                    let answers = [lb.chat(&chat(7, false)).await, lb.chat(&chat(8, false)).await];
                    answers.iter().all(|answer| answer.status == 200 && answer.replica() != "c")
                })
                .await;
                assert!(both, "they are back: {:?}", lb.books().replicas().await);
            }
            assert!(c.count() > 0);
            lb.books().settled().await;
        }
    });
}

#[test]
fn a_request_that_two_replicas_died_of_is_given_to_no_third() {
    run(async {
        let (a, b, c, lb) = three().await;
        for up in [&a, &b, &c] {
            up.plays(Reply::slam());
        }
        lb.chat(&chat(1, false)).await.is_error(502, "upstream_error");
        assert_eq!(a.count() + b.count() + c.count(), 2, "the engine may have begun: once more, not twice");
        lb.books().settled().await;
    });
}

#[test]
fn a_frozen_replica_is_taken_out_and_nobody_waits_beyond_the_first_byte_limit() {
    run(async {
        let (a, b) = (Sim::start(&["--tokens-per-sec", "600"]).await, Sim::start(&["--tokens-per-sec", "600"]).await);
        let lb = Setup::m1()
            .section("limits", "{first_byte_timeout: 1s}")
            .section("health", "{interval: 200ms, timeout: 400ms, unhealthy_after: 3, healthy_after: 1, eject: 500ms}")
            .replica("a", &a.url())
            .replica("b", &b.url())
            .start()
            .await;
        for n in 0..6 {
            assert_eq!(lb.chat(&chat(n, true)).await.status, 200);
        }
        a.signal("STOP");
        let frozen = Instant::now();
        let mut longest = Duration::ZERO;
        let mut failed = 0;
        while frozen.elapsed() < Duration::from_secs(6) {
            let start = Instant::now();
            let answer = lb.chat(&chat(7, true)).await;
            longest = longest.max(start.elapsed());
            if answer.status != 200 {
                answer.is_error(504, "first_byte_timeout");
                failed += 1;
            }
        }
        assert!(longest < Duration::from_secs(2), "a request waited {longest:?}");
        assert!(failed <= 4, "{failed} requests went to a frozen replica");
        println!("frozen: {failed} requests met it, the longest wait was {longest:?}");
        assert_ne!(lb.books().state("a").await, "open");
        a.signal("CONT");
        // Back by its probes, it is tried with one request at a time, and open once that was answered.
        let back = within(Duration::from_secs(15), async || {
            assert_eq!(lb.chat(&chat(8, true)).await.status, 200);
            lb.books().state("a").await == "open"
        })
        .await;
        assert!(back, "it is taken back: {}", lb.books().replica("a").await);
        lb.books().settled().await;
    });
}

#[test]
fn a_clients_fault_never_counts_against_a_replica() {
    run(async {
        let a = Upstream::start().await;
        let lb = Setup::m1().replica("a", &a.url()).start().await;
        // llama-server answers 500 to what is the client's fault.
        let faults = [
            Reply::json(400, r#"{"error":{"message":"bad","type":"BadRequestError","code":400}}"#),
            Reply::json(404, r#"{"error":{"message":"The model does not exist","type":"NotFoundError","code":404}}"#),
            Reply::json(422, r#"{"detail":[]}"#),
            Reply::json(
                500,
                r#"{"error":{"code":500,"message":"[json.exception.parse_error.101] parse error","type":"server_error"}}"#,
            ),
        ];
        for fault in faults {
            a.plays(fault);
            for n in 0..12 {
                lb.chat(&chat(n, false)).await;
                assert_eq!(lb.books().state("a").await, "open");
            }
        }
        lb.books().settled().await;
    });
}

#[test]
fn when_every_replica_is_ill_the_least_ill_is_tried() {
    run(async {
        let (a, b) = (Upstream::start().await, Upstream::start().await);
        let lb = Setup::m1().replica("a", &a.url()).replica("b", &b.url()).start().await;
        for up in [&a, &b] {
            up.plays(Reply::slam());
        }
        for n in 0..12 {
            lb.chat(&chat(n, false)).await;
        }
        for up in [&a, &b] {
            up.plays(Reply::chat(3, 2));
        }
        let served = within(Duration::from_secs(3), async || lb.chat(&chat(1, false)).await.status == 200).await;
        assert!(served, "rather than nothing: {:?}", lb.books().replicas().await);
        lb.books().settled().await;
    });
}

#[test]
fn without_any_live_replica_the_answer_is_a_prompt_503() {
    run(async {
        let dead = harness::ports::free();
        let lb = Setup::m1().replica("a", &format!("http://{dead}")).start().await;
        let start = Instant::now();
        let answer = lb.chat(&chat(1, false)).await;
        assert!(matches!(answer.status, 502 | 503), "{} {}", answer.status, answer.text());
        assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
        tokio::time::sleep(ms(10)).await;
        lb.books().settled().await;
    });
}
