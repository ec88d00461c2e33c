//! A real etcd (Debian's `etcd-server`), started on the loopback.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use crate::bench::{Replica, config, for_a_while, keep, run, until};

struct Etcd {
    child: Child,
    client: u16,
    peer: u16,
}

impl Drop for Etcd {
    fn drop(&mut self) {
        self.stop();
    }
}

fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn spawn(dir: &Path, client: u16, peer: u16) -> Child {
    let client = format!("http://127.0.0.1:{client}");
    let peer = format!("http://127.0.0.1:{peer}");
    Command::new("etcd")
        .args(["--name", "t", "--data-dir"])
        .arg(dir)
        .args(["--listen-client-urls", &client, "--advertise-client-urls", &client])
        .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
        .args(["--initial-cluster", &format!("t={peer}")])
        .env("ETCD_UNSUPPORTED_ARCH", std::env::consts::ARCH)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("etcd on the PATH (Debian: etcd-server); `make test` puts it there")
}

impl Etcd {
    async fn start(dir: &Path) -> Etcd {
        let (client, peer) = (free_port(), free_port());
        let etcd = Etcd { child: spawn(dir, client, peer), client, peer };
        etcd.until_up().await;
        etcd
    }

    async fn until_up(&self) {
        for _ in 0..400 {
            if self.post("/v3/maintenance/status", json!({})).await.is_some() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        panic!("etcd does not answer");
    }

    fn stop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    async fn restart(&mut self, dir: &Path) {
        self.child = spawn(dir, self.client, self.peer);
        self.until_up().await;
    }

    fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.client)
    }

    async fn post(&self, path: &str, body: Value) -> Option<Value> {
        let http = reqwest::Client::builder().no_proxy().timeout(Duration::from_secs(2)).build().unwrap();
        let answer = http.post(format!("{}{path}", self.url())).json(&body).send().await.ok()?;
        answer.error_for_status().ok()?.json().await.ok()
    }

    async fn put(&self, key: &str, value: &str, lease: Option<&str>) {
        let mut body = json!({"key": STANDARD.encode(key), "value": STANDARD.encode(value)});
        if let Some(lease) = lease {
            body["lease"] = lease.into();
        }
        self.post("/v3/kv/put", body).await.expect("a put");
    }

    async fn lease(&self, seconds: u64) -> String {
        let granted = self.post("/v3/lease/grant", json!({"TTL": seconds})).await.expect("a lease");
        granted["ID"].as_str().expect("its id").to_owned()
    }
}

fn discovery(url: &str) -> String {
    format!("discovery: {{etcd: {{endpoints: ['{url}'], prefix: /gpus/, template: {{model: m, tokens_per_sec: 5}}}}}}")
}

#[test]
fn replicas_advertise_themselves_and_vanish_with_their_lease() {
    run(async {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (Replica::vllm(&["m"]).await, Replica::vllm(&["m"]).await);
        let etcd = Etcd::start(dir.path()).await;
        etcd.put("/gpus/a", &a.url(), None).await;
        etcd.put("/other", "http://127.0.0.1:9", None).await;
        let kept = keep(&config(&discovery(&etcd.url()), ""));
        kept.until_open(&["a"]).await;
        let lease = etcd.lease(2).await;
        let advertised = json!({"url": b.url(), "tokens_per_sec": 900, "token_capacity": 5000}).to_string();
        etcd.put("/gpus/b", &advertised, Some(&lease)).await;
        kept.until_open(&["a", "b"]).await;
        let spec = kept.balancer.replica(&"b".into()).unwrap().spec();
        assert_eq!((spec.tokens_per_sec, spec.token_capacity.map(|t| t.0)), (900.0, Some(5000)));
        until(|| kept.gate("b").is_none(), || "b to vanish with its lease".to_owned()).await;
        assert_eq!(kept.open(), ["a"]);
    });
}

#[test]
fn a_damaged_advertisement_is_passed_over_and_the_others_count() {
    run(async {
        let dir = tempfile::tempdir().unwrap();
        let a = Replica::vllm(&["m"]).await;
        let etcd = Etcd::start(dir.path()).await;
        etcd.put("/gpus/bad", r#"{"url": "nonsense", "modle": "m"}"#, None).await;
        etcd.put("/gpus/a", &a.url(), None).await;
        let kept = keep(&config(&discovery(&etcd.url()), ""));
        kept.until_open(&["a"]).await;
        assert_eq!(kept.balancer.replicas().len(), 1);
    });
}

#[test]
fn etcd_stopped_and_restarted_loses_no_replica_and_is_followed_again() {
    run(async {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (Replica::vllm(&["m"]).await, Replica::vllm(&["m"]).await);
        let mut etcd = Etcd::start(dir.path()).await;
        etcd.put("/gpus/a", &a.url(), None).await;
        let kept = keep(&config(&discovery(&etcd.url()), ""));
        kept.until_open(&["a"]).await;
        etcd.stop();
        until(|| kept.fleet.discovery_states() == [("etcd:/gpus/".to_owned(), false)], || "a failure".to_owned()).await;
        for_a_while(Duration::from_secs(1), || kept.open() == ["a"], "the last good set stays").await;
        etcd.restart(dir.path()).await;
        etcd.put("/gpus/b", &b.url(), None).await;
        kept.until_open(&["a", "b"]).await;
        assert!(kept.fleet.discovery_states()[0].1);
    });
}
