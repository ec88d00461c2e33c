//! Stops and upgrades under load: no request fails, no stream is cut.

mod harness;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use harness::balancer::{binary, launch, signal};
use harness::{Client, End, Reply, Setup, Upstream, ms, run, within};
use parking_lot::Mutex;

const HI: &[u8] = br#"{"model":"m1","messages":[{"role":"user","content":"hi"}]}"#;
const STREAM: &[u8] = br#"{"model":"m1","messages":[{"role":"user","content":"stream"}],"stream":true}"#;

#[test]
fn sigterm_cuts_no_running_stream_and_the_process_ends_with_the_last() {
    run(async {
        let a = Upstream::start().await;
        a.plays(Reply::new(200, "text/event-stream").events(60, ms(50)).send(harness::reply::DONE));
        let lb =
            Setup::m1().section("shutdown", "{drain_window: 300ms, grace: 30s}").replica("a", &a.url()).start().await;
        let mut streams = Vec::new();
        for _ in 0..40 {
            let mut client = lb.ask(STREAM).await;
            let head = client.head().await;
            streams.push(tokio::spawn(async move { client.rest(head).await }));
        }
        lb.signal("TERM");
        // A second signal is no reason to cut anything.
        tokio::time::sleep(ms(400)).await;
        lb.signal("TERM");
        let mut last = Instant::now();
        for stream in streams {
            let answer = stream.await.expect("a stream");
            assert_eq!(answer.end, End::Clean);
            assert!(answer.text().ends_with("data: [DONE]\n\n"));
            last = last.max(answer.end_at);
        }
        let (status, _) = lb.exits_within(Duration::from_secs(5)).await.expect("it ends");
        assert!(status.success(), "{status}");
        // Its log is waited for another 100 ms before this is looked at.
        let after = last.elapsed();
        println!("40 streams over a SIGTERM, none cut; ended within {after:?} of the last");
        assert!(after < Duration::from_secs(1), "{after:?} after the last stream");
    });
}

#[test]
fn who_has_just_connected_when_it_stops_is_answered_all_the_same() {
    run(async {
        let a = Upstream::start().await;
        a.replies(|_| Reply::chat(3, 2));
        let lb = Setup::m1().section("shutdown", "{drain_window: 0s, grace: 30s}").replica("a", &a.url()).start().await;
        let mut client = lb.client().await;
        // Accepted, and nothing sent yet.
        tokio::time::sleep(ms(100)).await;
        lb.signal("TERM");
        tokio::time::sleep(ms(150)).await;
        client.post("/v1/chat/completions", HI).await;
        let answer = client.answer().await;
        assert_eq!((answer.status, answer.end), (200, End::Clean));
        let (status, _) = lb.exits_within(Duration::from_secs(5)).await.expect("it ends");
        assert!(status.success(), "{status}");
    });
}

#[test]
fn an_upgrade_under_load_fails_no_request_and_cuts_no_stream() {
    run(async {
        const REQUESTS: u64 = 10_000;
        let a = Upstream::start().await;
        a.replies(|seen| {
            if seen.json()["stream"] == true {
                Reply::new(200, "text/event-stream").events(150, ms(100)).send(harness::reply::DONE)
            } else {
                Reply::chat(3, 2)
            }
        });
        let lb = Arc::new(
            Setup::m1().section("shutdown", "{drain_window: 300ms, grace: 60s}").replica("a", &a.url()).start().await,
        );
        let mut streams = Vec::new();
        for _ in 0..10 {
            let mut client = lb.ask(STREAM).await;
            let head = client.head().await;
            streams.push(tokio::spawn(async move { client.rest(head).await }));
        }
        let asked = Arc::new(AtomicU64::new(0));
        let upgraded = Arc::new(AtomicBool::new(false));
        let failed = Arc::new(Mutex::new(Vec::new()));
        let asking: Vec<_> = (0..8)
            .map(|kind| {
                let (address, asked, failed, upgraded) =
                    (lb.address, Arc::clone(&asked), Arc::clone(&failed), Arc::clone(&upgraded));
                tokio::spawn(async move {
                    let mut kept: Option<Client> = None;
                    while asked.fetch_add(1, Ordering::Relaxed) < REQUESTS || !upgraded.load(Ordering::Relaxed) {
                        let mut client = match kept.take() {
                            Some(client) => client,
                            None => match Client::try_connect(address).await {
                                Ok(client) => client,
                                Err(e) => {
                                    failed.lock().push(format!("connecting: {e}"));
                                    continue;
                                }
                            },
                        };
                        let sent = client
                            .try_send(&harness::client::request("POST", "/v1/chat/completions", &[], Some(HI)))
                            .await;
                        match client.try_answer().await {
                            Ok(answer) if answer.status == 200 && answer.end == End::Clean => {
                                // Half of the clients keep their connections for as long as they are let.
                                if kind % 2 == 0 && answer.header("connection") != Some("close") {
                                    kept = Some(client);
                                }
                            }
                            other => failed.lock().push(format!("{sent:?} {other:?}")),
                        }
                    }
                })
            })
            .collect();
        tokio::time::sleep(ms(500)).await;
        // The new one takes the listeners over, the old one drains by itself.
        let logs = Arc::new(Mutex::new(Vec::new()));
        let mut command = binary();
        command.args(["serve", "--upgrade", "--config"]).arg(&lb.config);
        let child = Mutex::new(launch(command, &logs));
        struct Kill<'a>(&'a Mutex<std::process::Child>);
        impl Drop for Kill<'_> {
            fn drop(&mut self) {
                let mut child = self.0.lock();
                let _ = child.kill();
                let _ = child.wait();
            }
        }
        let _kill = Kill(&child);
        for stream in streams {
            let answer = stream.await.expect("a stream");
            assert_eq!(answer.end, End::Clean, "a stream was cut");
            assert!(answer.text().ends_with("data: [DONE]\n\n"));
        }
        let old_ends = lb.exits_within(Duration::from_secs(20)).await;
        assert!(old_ends.is_some(), "the old process ends by itself:\n{}\n---\n{}", lb.log(), logs.lock().join("\n"));
        upgraded.store(true, Ordering::Relaxed);
        for task in asking {
            task.await.expect("an asker");
        }
        assert!(child.lock().try_wait().expect("asked").is_none(), "the new one serves: {}", logs.lock().join("\n"));
        let failed = failed.lock().clone();
        let total = asked.load(Ordering::Relaxed);
        assert!(failed.is_empty(), "{} of {total} requests failed: {:?}", failed.len(), &failed[..failed.len().min(5)]);
        assert!(total >= REQUESTS);
        assert_eq!(lb.chat(HI).await.status, 200);
        println!("{total} requests over an upgrade, none failed; 10 streams of 15 s complete");
        signal(child.lock().id(), "TERM");
        assert!(within(Duration::from_secs(5), async || child.lock().try_wait().expect("asked").is_some()).await);
    });
}
