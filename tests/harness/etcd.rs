//! A real etcd (Debian's `etcd-server`), started on the loopback.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

/// A running etcd. Killed when dropped.
#[derive(Debug)]
pub struct Etcd {
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
    std::net::TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a free port").port()
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
    /// Starts one with its data in `dir` and waits until it answers.
    pub async fn start(dir: &Path) -> Etcd {
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

    /// SIGKILL, and the end of it.
    pub fn stop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Starts it again on the same data and ports.
    pub async fn restart(&mut self, dir: &Path) {
        self.child = spawn(dir, self.client, self.peer);
        self.until_up().await;
    }

    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.client)
    }

    pub async fn post(&self, path: &str, body: Value) -> Option<Value> {
        let http = reqwest::Client::builder().no_proxy().timeout(Duration::from_secs(2)).build().expect("a client");
        let answer = http.post(format!("{}{path}", self.url())).json(&body).send().await.ok()?;
        answer.error_for_status().ok()?.json().await.ok()
    }

    pub async fn put(&self, key: &str, value: &str, lease: Option<&str>) {
        let mut body = json!({"key": STANDARD.encode(key), "value": STANDARD.encode(value)});
        if let Some(lease) = lease {
            body["lease"] = lease.into();
        }
        self.post("/v3/kv/put", body).await.expect("a put");
    }

    pub async fn delete(&self, key: &str) {
        self.post("/v3/kv/deleterange", json!({"key": STANDARD.encode(key)})).await.expect("a deletion");
    }

    pub async fn lease(&self, seconds: u64) -> String {
        let granted = self.post("/v3/lease/grant", json!({"TTL": seconds})).await.expect("a lease");
        granted["ID"].as_str().expect("its id").to_owned()
    }
}
