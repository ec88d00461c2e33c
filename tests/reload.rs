//! Reload under load: the configuration changes fifty times, bad files among them, and nobody notices.

mod harness;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use harness::client::request;
use harness::{Client, End, Reply, Setup, Upstream, ms, run, within};

const HI: &[u8] = br#"{"model":"m1","messages":[{"role":"user","content":"hi"}]}"#;
const STREAM: &[u8] = br#"{"model":"m1","messages":[{"role":"user","content":"stream"}],"stream":true}"#;

/// Requests a second beside the streams. `WEIGHBRIDGE_RELOAD_RATE` asks for more, or for less of a machine that is busy.
const RATE: f64 = 500.0;
/// The least share of that rate that a busy machine with a debug build must reach for the test to say anything.
const RATE_SHARE_MIN: f64 = 0.2;

fn rate() -> f64 {
    let given = std::env::var("WEIGHBRIDGE_RELOAD_RATE").ok();
    given.map_or(RATE, |text| text.parse().expect("WEIGHBRIDGE_RELOAD_RATE is a number of requests a second"))
}

/// Asks on one kept connection, `every` so often, catching up where it fell behind; each answer must be whole.
async fn ask_steadily(
    address: SocketAddr,
    every: Duration,
    stop: Arc<AtomicBool>,
    served: Arc<AtomicU64>,
) -> Vec<String> {
    let bytes = request("POST", "/v1/chat/completions", &[], Some(HI));
    let mut client = Client::connect(address).await;
    let mut failed = Vec::new();
    let mut pace = tokio::time::interval(every);
    pace.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Burst);
    while !stop.load(Ordering::Relaxed) {
        pace.tick().await;
        let sent = client.try_send(&bytes).await;
        match client.try_answer().await {
            Ok(answer) if answer.status == 200 && answer.end == End::Clean => {
                served.fetch_add(1, Ordering::Relaxed);
            }
            // Whatever it was, this connection is not to be trusted any more.
            other => {
                failed.push(format!("{sent:?} {other:?}"));
                client = Client::connect(address).await;
            }
        }
    }
    failed
}

#[test]
fn fifty_reloads_under_load_fail_no_request_and_cut_no_stream() {
    run(async {
        const STREAMS: usize = 200;
        const CLIENTS: usize = 16;
        const RELOADS: u64 = 50;
        let ups: Vec<Upstream> = futures::future::join_all((0..4).map(|_| Upstream::start())).await;
        for up in &ups {
            up.replies(|seen| {
                if seen.json()["stream"] == true {
                    // Longer than all the reloads together.
                    Reply::new(200, "text/event-stream").events(60, ms(500)).send(harness::reply::DONE)
                } else {
                    Reply::chat(3, 2)
                }
            });
        }
        let urls: Vec<String> = ups.iter().map(Upstream::url).collect();
        let mut setup = Setup::m1();
        for (n, url) in urls.iter().enumerate() {
            setup = setup.replica(&format!("r{n}"), url);
        }
        let lb = Arc::new(setup.start().await);

        let mut streams = Vec::new();
        for _ in 0..STREAMS {
            let mut client = lb.ask(STREAM).await;
            let head = client.head().await;
            assert_eq!(head.status, 200);
            streams.push(tokio::spawn(async move { client.rest(head).await }));
        }
        let stop = Arc::new(AtomicBool::new(false));
        let served = Arc::new(AtomicU64::new(0));
        let started = Instant::now();
        let rate = rate();
        let every = Duration::from_secs_f64(CLIENTS as f64 / rate);
        let asking: Vec<_> = (0..CLIENTS)
            .map(|_| tokio::spawn(ask_steadily(lb.address, every, Arc::clone(&stop), Arc::clone(&served))))
            .collect();

        let good = |n: u64| {
            // Replicas come, go and change; two are always there.
            let mut yaml = String::new();
            for (i, url) in urls.iter().enumerate() {
                if i < 2 || !(n + i as u64).is_multiple_of(3) {
                    let rate = 1000 + 100 * ((n + i as u64) % 5);
                    yaml.push_str(&format!("  - {{id: r{i}, url: \"{url}\", model: m1, max_context_tokens: 131072, tokens_per_sec: {rate}}}\n"));
                }
            }
            let base = lb.yaml();
            format!("{}replicas:\n{yaml}", base.split("replicas:").next().expect("a part"))
        };
        let mut bad = 0;
        for n in 0..RELOADS {
            let text = match n % 5 {
                3 => {
                    bad += 1;
                    good(n).replace("model: m1", "model: nobody")
                }
                4 => {
                    bad += 1;
                    good(n)[..200].to_owned()
                }
                _ => good(n),
            };
            lb.write_config(text.as_bytes());
            if n % 2 == 0 {
                lb.signal("HUP");
            } else {
                lb.reload().await;
            }
            tokio::time::sleep(ms(100)).await;
        }
        stop.store(true, Ordering::Relaxed);
        let seconds = started.elapsed().as_secs_f64();
        for task in asking {
            let failed = task.await.expect("an asker");
            assert!(failed.is_empty(), "failed requests: {failed:?}");
        }
        let served = served.load(Ordering::Relaxed);
        let reached = served as f64 / seconds;
        println!(
            "{RELOADS} reloads ({bad} bad) in {seconds:.1} s: {served} requests ({reached:.0}/s of {rate:.0}/s), {STREAMS} streams"
        );
        assert!(reached >= RATE_SHARE_MIN * rate, "{reached:.0} requests/s are no load");
        // The streams outlasted every reload.
        assert!(streams.iter().all(|stream| !stream.is_finished()), "streams ended before the last reload");
        for stream in streams {
            let answer = stream.await.expect("a stream");
            assert_eq!(answer.end, End::Clean, "a stream was cut");
            assert!(answer.text().ends_with("data: [DONE]\n\n"));
        }
        let refused = lb.books().metric("weighbridge_config_reloads_total", &[("result", "failed")]).await;
        assert!(refused >= bad as f64 / 2.0, "{refused} of {bad} bad files were refused");
        lb.books().settled().await;
    });
}

#[test]
fn a_file_that_changes_is_taken_without_being_told() {
    run(async {
        let (a, b) = (Upstream::start().await, Upstream::start().await);
        let setup = Setup::m1();
        let file = setup.path("replicas.yaml");
        let of = |ups: &[(&str, &Upstream)]| {
            let mut yaml = "replicas:\n".to_owned();
            for (id, up) in ups {
                yaml.push_str(&format!(
                    "  - {{id: {id}, url: \"{}\", model: m1, max_context_tokens: 4096}}\n",
                    up.url()
                ));
            }
            yaml
        };
        std::fs::write(&file, of(&[("a", &a)])).expect("a file");
        let lb = setup.section("replicas_file", &file.display().to_string()).start().await;
        assert_eq!(lb.chat(HI).await.replica(), "a");
        // By rename, by a swapped symlink, in place; a broken one changes nothing.
        let next = file.with_extension("next");
        std::fs::write(&next, of(&[("a", &a), ("b", &b)])).expect("a file");
        std::fs::rename(&next, &file).expect("a rename");
        let came = within(Duration::from_secs(5), async || lb.books().has_replica("b").await).await;
        assert!(came, "b comes: {}", lb.log());
        std::fs::write(&file, "replicas: [").expect("a file");
        tokio::time::sleep(ms(700)).await;
        assert!(lb.books().has_replica("a").await && lb.books().has_replica("b").await, "the last good set stays");
        assert_eq!(lb.chat(HI).await.status, 200);
        let target = file.with_extension("target");
        std::fs::write(&target, of(&[("b", &b)])).expect("a file");
        std::os::unix::fs::symlink(&target, &next).expect("a link");
        std::fs::rename(&next, &file).expect("a swap");
        let went = within(Duration::from_secs(5), async || !lb.books().has_replica("a").await).await;
        assert!(went, "a goes: {:?}", lb.books().replicas().await);
        assert_eq!(lb.chat(HI).await.replica(), "b");
        lb.books().settled().await;
    });
}

#[test]
fn tenants_limits_and_keys_are_reloaded_too() {
    run(async {
        let a = Upstream::start().await;
        let setup = Setup::m1();
        let key = setup.file("t.key", "first-key\n");
        let lb = setup
            .section("tenants", &format!("[{{name: t, key_file: {}}}]", key.display()))
            .replica("a", &a.url())
            .start()
            .await;
        let with = |key: &str| [("authorization", format!("Bearer {key}"))];
        let status = async |key: &str| {
            let [(name, value)] = with(key);
            lb.chat_with(&[(name, &value)], HI).await.status
        };
        assert_eq!((status("first-key").await, status("second-key").await), (200, 401));
        std::fs::write(&key, "second-key\n").expect("a file");
        assert_eq!(lb.reload().await.status, 200);
        assert_eq!((status("first-key").await, status("second-key").await), (401, 200));
        lb.rewrite(|s| s.section("limits", "{body_bytes: 100B}"));
        assert_eq!(lb.reload().await.status, 200);
        let long = format!(r#"{{"model":"m1","messages":[{{"role":"user","content":"{}"}}]}}"#, "x".repeat(200));
        lb.chat_with(&[("authorization", "Bearer second-key")], long.as_bytes())
            .await
            .is_error(413, "request_too_large");
        lb.books().settled().await;
    });
}

#[test]
fn a_key_that_is_rotated_in_place_is_used_after_a_reload_of_the_same_yaml() {
    run(async {
        let a = Upstream::start().await;
        let setup = Setup::m1();
        let key = setup.file("engine.key", "first-key\n");
        let lb = setup.replica_with("a", &a.url(), &format!("api_key_file: {}", key.display())).start().await;
        let last = |target: &str| {
            let seen = a.all();
            let last = seen.iter().rev().find(|s| s.target == target);
            last.and_then(|s| s.header("authorization").map(str::to_owned))
        };
        lb.chat(HI).await;
        assert_eq!(last("/v1/chat/completions").as_deref(), Some("Bearer first-key"));
        assert_eq!(last("/health").as_deref(), Some("Bearer first-key"));
        // The replica takes both for a while, so no refusal tells that the old one is out.
        std::fs::write(&key, "second-key\n").expect("a file");
        tokio::time::sleep(ms(500)).await;
        assert_eq!(last("/health").as_deref(), Some("Bearer first-key"), "nobody asked to read it again");
        let answer = lb.reload().await;
        assert_eq!((answer.status, &answer.json()["result"]), (200, &"unchanged".into()));
        lb.chat(HI).await;
        assert_eq!(last("/v1/chat/completions").as_deref(), Some("Bearer second-key"));
        let probed =
            within(Duration::from_secs(3), async || last("/health").as_deref() == Some("Bearer second-key")).await;
        assert!(probed, "probes carry it, too");
        lb.books().settled().await;
    });
}
