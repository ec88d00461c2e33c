//! Registries that fail under load: nobody who asks notices.

mod harness;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use harness::client::request;
use harness::consul::Consul;
use harness::etcd::Etcd;
use harness::tls::{TlsFront, pem};
use harness::{Client, End, Running, Setup, Sim, ms, run, within};
use parking_lot::Mutex;
use serde_json::json;

/// How long a registry is away at a time: several of its retries, and more probes than make a replica ill.
const AWAY: Duration = Duration::from_secs(3);
/// Longest wait for a change in the registry to be followed; retries come 10 s apart at most.
const FOLLOWED: Duration = Duration::from_secs(20);

async fn sims() -> Vec<Sim> {
    futures::future::join_all((0..3).map(|_| Sim::start(&["--speed", "20"]))).await
}

fn setup(discovery: String) -> Setup {
    // Each request to whoever had none the longest: every replica that may take traffic does.
    Setup::m1().section("balance", "{policy: round-robin}").section("discovery", &discovery)
}

/// Clients that ask without a pause until they are told to stop.
struct Load {
    stop: Arc<AtomicBool>,
    asked: Arc<AtomicU64>,
    failed: Arc<Mutex<Vec<String>>>,
    /// When each replica last answered.
    seen: Arc<Mutex<BTreeMap<String, Instant>>>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
}

impl Load {
    fn start(address: SocketAddr) -> Load {
        let mut load = Load {
            stop: Arc::default(),
            asked: Arc::default(),
            failed: Arc::default(),
            seen: Arc::default(),
            tasks: Vec::new(),
        };
        for n in 0..6u64 {
            let (stop, asked, failed, seen) =
                (load.stop.clone(), load.asked.clone(), load.failed.clone(), load.seen.clone());
            load.tasks.push(tokio::spawn(async move {
                let mut client = Client::connect(address).await;
                while !stop.load(Ordering::Relaxed) {
                    let count = asked.fetch_add(1, Ordering::Relaxed);
                    let body = json!({"model": "m1", "max_tokens": 2 + (n + count) % 30, "stream": count % 2 == 0,
                                      "messages": [{"role": "user", "content": format!("request {count}")}]});
                    let bytes = request("POST", "/v1/chat/completions", &[], Some(body.to_string().as_bytes()));
                    let sent = client.try_send(&bytes).await;
                    match client.try_answer().await {
                        Ok(answer) if answer.status == 200 && answer.end == End::Clean => {
                            seen.lock().insert(answer.replica().to_owned(), Instant::now());
                        }
                        other => {
                            failed.lock().push(format!("{sent:?} {other:?}"));
                            client = Client::connect(address).await;
                        }
                    }
                }
            }));
        }
        load
    }

    /// Waits until exactly these replicas answer.
    async fn served_by(&self, lb: &Running, ids: &[&str], what: &str) {
        let served = within(FOLLOWED, async || {
            let recent = Instant::now() - ms(500);
            let seen: Vec<String> =
                self.seen.lock().iter().filter(|(_, at)| **at > recent).map(|(id, _)| id.clone()).collect();
            seen == ids
        })
        .await;
        let seen = self.seen.lock().clone();
        assert!(served, "{what}: {seen:?}\n{:#?}\n{}", lb.books().replicas().await, lb.log());
    }

    async fn ends(self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        for task in self.tasks {
            task.await.expect("a client");
        }
        let failed = self.failed.lock();
        let asked = self.asked.load(Ordering::Relaxed);
        assert!(failed.is_empty(), "{} of {asked} failed: {:#?}", failed.len(), &failed[..failed.len().min(3)]);
        asked
    }
}

async fn up(lb: &Running, up: bool) {
    let told =
        within(FOLLOWED, async || lb.books().metric("weighbridge_discovery_up", &[]).await == f64::from(u8::from(up)))
            .await;
    assert!(told, "weighbridge_discovery_up should be {up}\n{}", lb.log());
}

#[test]
fn etcd_stopped_and_restarted_under_load_fails_no_request() {
    run(async {
        let dir = tempfile::tempdir().expect("a directory");
        let sims = sims().await;
        let mut etcd = Etcd::start(dir.path()).await;
        // As agents do it: under a lease that outlives the outage.
        let lease = etcd.lease(600).await;
        for n in [0, 1] {
            etcd.put(&format!("/gpus/s{n}"), &sims[n].url(), Some(&lease)).await;
        }
        let lb = setup(format!(
            "{{etcd: {{endpoints: ['{}'], prefix: /gpus/, template: {{model: m1, tokens_per_sec: 5000}}}}}}",
            etcd.url()
        ))
        .start()
        .await;
        let load = Load::start(lb.address);
        load.served_by(&lb, &["s0", "s1"], "both that are advertised").await;
        for outage in 0..2 {
            etcd.stop();
            up(&lb, false).await;
            let away = Instant::now();
            while away.elapsed() < AWAY {
                assert!(lb.books().has_replica("s0").await && lb.books().has_replica("s1").await);
                tokio::time::sleep(ms(100)).await;
            }
            load.served_by(&lb, &["s0", "s1"], "the last good set").await;
            etcd.restart(dir.path()).await;
            up(&lb, true).await;
            // Followed again: one comes, and goes.
            etcd.put("/gpus/s2", &sims[2].url(), None).await;
            load.served_by(&lb, &["s0", "s1", "s2"], &format!("the new one after outage {outage}")).await;
            etcd.delete("/gpus/s2").await;
            load.served_by(&lb, &["s0", "s1"], &format!("without it after outage {outage}")).await;
        }
        let asked = load.ends().await;
        lb.books().settled().await;
        println!("{asked} requests over two outages of etcd, none failed");
    });
}

#[test]
fn consul_failing_for_a_while_under_load_fails_no_request() {
    run(async {
        let sims = sims().await;
        let (consul, url) = Consul::start().await;
        let [a, b, c] = [0, 1, 2].map(|n| sims[n].address);
        let two = [("s0", a, "5000"), ("s1", b, "5000")];
        let three = [("s0", a, "5000"), ("s1", b, "5000"), ("s2", c, "5000")];
        consul.set(10, &two);
        let lb =
            setup(format!("{{consul: {{address: '{url}', service: llm, template: {{model: m1}}}}}}")).start().await;
        let load = Load::start(lb.address);
        load.served_by(&lb, &["s0", "s1"], "both that pass").await;
        for outage in 0..2u64 {
            *consul.broken.lock() = true;
            // The query that is held ends with it.
            consul.set(20 + outage * 10, &two);
            up(&lb, false).await;
            tokio::time::sleep(AWAY).await;
            load.served_by(&lb, &["s0", "s1"], "the last good set").await;
            *consul.broken.lock() = false;
            up(&lb, true).await;
            consul.set(21 + outage * 10, &three);
            load.served_by(&lb, &["s0", "s1", "s2"], &format!("the new one after outage {outage}")).await;
            consul.set(22 + outage * 10, &two);
            load.served_by(&lb, &["s0", "s1"], &format!("without it after outage {outage}")).await;
        }
        let asked = load.ends().await;
        lb.books().settled().await;
        println!("{asked} requests over two outages of Consul's API, none failed");
    });
}

#[test]
fn registries_behind_tls_are_shown_our_certificate_and_checked_against_their_authority() {
    run(async {
        let dir = tempfile::tempdir().expect("a directory");
        let sims = sims().await;
        let etcd = Etcd::start(dir.path()).await;
        etcd.put("/gpus/s0", &sims[0].url(), None).await;
        let (consul, url) = Consul::start().await;
        consul.set(10, &[("s0", sims[0].address, "5000")]);
        let behind = |url: &str| url.strip_prefix("http://").expect("http").parse::<SocketAddr>().expect("an address");
        let etcd_front = TlsFront::before(behind(&etcd.url()), "server", true).await;
        let consul_front = TlsFront::before(behind(&url), "server", true).await;
        let tls = |authority: &str, ours: bool| {
            let pair = format!(", cert: {}, key: {}", pem("client.pem").display(), pem("client.key").display());
            format!("{{ca: {}{}}}", pem(authority).display(), if ours { pair.as_str() } else { "" })
        };
        for (what, tls, good) in [
            ("as it should be", tls("ca.pem", true), true),
            ("without our certificate", tls("ca.pem", false), false),
            ("with another authority", tls("other.pem", true), false),
        ] {
            let (etcd, consul) = (etcd_front.address.port(), consul_front.address.port());
            for source in [
                format!(
                    "{{etcd: {{endpoints: ['https://localhost:{etcd}'], prefix: /gpus/, tls: {tls}, template: {{model: m1}}}}}}"
                ),
                format!(
                    "{{consul: {{address: 'https://localhost:{consul}', service: llm, tls: {tls}, template: {{model: m1}}}}}}"
                ),
            ] {
                let lb = setup(source.clone()).start().await;
                if good {
                    lb.books().reaches("s0", "open", FOLLOWED).await;
                } else {
                    up(&lb, false).await;
                    assert!(!lb.books().has_replica("s0").await, "{what}: {source}");
                }
            }
        }
    });
}
