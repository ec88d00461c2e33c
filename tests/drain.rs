//! A replica that is taken out: what runs there finishes, within its time.

mod harness;

use std::time::{Duration, Instant};

use harness::h2::{Ending, H2Client};
use harness::{Act, End, Reply, Setup, Upstream, ms, run, within};

const STREAM: &[u8] = br#"{"model":"m1","messages":[{"role":"user","content":"hi"}],"stream":true}"#;

#[test]
fn a_drain_ends_what_still_runs_when_its_time_is_over() {
    run(async {
        let (a, b) = (Upstream::start().await, Upstream::start().await);
        let lb = Setup::m1()
            .section("limits", "{drain_timeout: 1s}")
            .section("balance", "{policy: round-robin}")
            .replica("a", &a.url())
            .replica("b", &b.url())
            .start()
            .await;
        // One that flows, one that is silent in mid-stream, one of which nothing has come yet.
        let flowing = || Reply::new(200, "text/event-stream").events(10_000, ms(20));
        let silent = || Reply::new(200, "text/event-stream").events(1, Duration::ZERO).act(Act::Hang);
        for how in ["by hand, with its own bound", "by hand", "by configuration", "by removal"] {
            let before = a.count();
            let mut running = Vec::new();
            for reply in [flowing(), silent(), Reply::never()] {
                let head = reply.acts.len() > 1;
                a.plays(reply.clone());
                b.plays(Reply::chat(3, 2));
                // Round and round until `a` has it.
                let count = a.count();
                loop {
                    let mut client = lb.ask(STREAM).await;
                    if within(ms(200), async || a.count() > count).await {
                        let head = if head { Some(client.head().await) } else { None };
                        running.push((client, head));
                        break;
                    }
                    assert_eq!(client.answer().await.status, 200);
                }
            }
            assert_eq!(lb.books().in_flight("a").await, 3, "{how}");
            let started = Instant::now();
            let (a_url, b_url) = (a.url(), b.url());
            match how {
                "by hand" => assert_eq!(lb.books().post("/admin/replicas/a/drain").await.status, 200),
                "by hand, with its own bound" => {
                    let answer = lb.books().post("/admin/replicas/a/drain?timeout=500ms").await;
                    assert_eq!((answer.status, &answer.json()["timeout_seconds"]), (200, &0.5.into()));
                }
                "by configuration" => {
                    lb.rewrite(|s| s.no_replicas().replica_with("a", &a_url, "draining: true").replica("b", &b_url));
                    assert_eq!(lb.reload().await.status, 200);
                }
                _ => {
                    lb.rewrite(|s| s.no_replicas().replica("b", &b_url));
                    assert_eq!(lb.reload().await.status, 200);
                }
            }
            let bound = if how.ends_with("bound") { ms(500) } else { ms(1000) };
            for (n, (mut client, head)) in running.into_iter().enumerate() {
                let answer = match head {
                    Some(head) => client.rest(head).await,
                    None => client.answer().await,
                };
                let took = started.elapsed();
                assert!(took >= bound - ms(50) && took < bound + ms(1500), "{how}, {n}: after {took:?}");
                if answer.status == 200 {
                    assert_ne!(answer.end, End::Clean, "{how}, {n}: it is visibly broken");
                    assert!(answer.text().contains("taken out of service"), "{how}, {n}: {}", answer.text());
                } else {
                    answer.is_error(502, "upstream_error");
                }
            }
            for n in before..before + 3 {
                assert!(
                    a.left_after(n, started, Duration::from_secs(2)).await.is_some(),
                    "{how}: the engine is let go"
                );
            }
            lb.books().settled().await;
            a.plays(Reply::chat(3, 2));
            lb.rewrite(|s| s.no_replicas().replica("a", &a_url).replica("b", &b_url));
            assert_eq!(lb.reload().await.status, 200);
            lb.books().post("/admin/replicas/a/undrain").await;
            let back = within(Duration::from_secs(3), async || {
                lb.books().has_replica("a").await && lb.books().state("a").await == "open"
            })
            .await;
            assert!(back, "{how}: {:?}", lb.books().replicas().await);
            // And it is whole again: nothing of the bound is left.
            for _ in 0..4 {
                assert_eq!(lb.chat(STREAM).await.status, 200);
            }
        }
        assert_eq!(lb.books().post("/admin/replicas/a/drain?timeout=soon").await.status, 400);
        let failures = lb.books().metric("weighbridge_upstream_errors_total", &[]).await;
        assert_eq!(failures, 0.0, "nothing of this is held against the replica");
    });
}

#[test]
fn a_stream_over_http_2_ends_with_its_drain_as_well() {
    run(async {
        let a = Upstream::start().await;
        let listen = "\n  - {address: $ADDRESS, h2c: true}";
        let lb = Setup::m1().section("listen", listen).replica("a", &a.url()).start().await;
        a.plays(Reply::new(200, "text/event-stream").events(10_000, ms(20)));
        let mut client = H2Client::connect(lb.address).await;
        let pending = client.ask(STREAM, Ending::OnLastData).await;
        a.wait_for(1).await;
        let started = Instant::now();
        assert_eq!(lb.books().post("/admin/replicas/a/drain?timeout=500ms").await.status, 200);
        let answer = pending.answer().await;
        let took = started.elapsed();
        assert!(took >= ms(450) && took < ms(2000), "after {took:?}");
        assert_eq!(answer.status, 200);
        assert!(answer.reset.is_some(), "it is visibly broken");
        lb.books().settled().await;
    });
}
