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
    /// Who the test is, once authentication is on.
    token: Option<String>,
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
        let etcd = Etcd { child: spawn(dir, client, peer), client, peer, token: None };
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
        let mut request = http.post(format!("{}{path}", self.url())).json(&body);
        if let Some(token) = &self.token {
            request = request.header("authorization", token);
        }
        let answer = request.send().await.ok()?;
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

    /// Turns authentication on: `root` with the password `root`, and `lb`, who may read what begins with `prefix`.
    pub async fn authenticate(&mut self, prefix: &str, password: &str) {
        let key = STANDARD.encode(prefix);
        // The key after all that begin with it.
        let mut end = prefix.as_bytes().to_vec();
        *end.last_mut().expect("a prefix") += 1;
        let read = json!({"permType": "READ", "key": key, "range_end": STANDARD.encode(end)});
        for (path, body) in [
            ("user/add", json!({"name": "root", "password": "root"})),
            ("user/grant", json!({"user": "root", "role": "root"})),
            ("user/add", json!({"name": "lb", "password": password})),
            ("role/add", json!({"name": "reader"})),
            ("role/grant", json!({"name": "reader", "perm": read})),
            ("user/grant", json!({"user": "lb", "role": "reader"})),
            ("enable", json!({})),
        ] {
            self.post(&format!("/v3/auth/{path}"), body.clone()).await.unwrap_or_else(|| panic!("{path}: {body}"));
        }
        let told = self.post("/v3/auth/authenticate", json!({"name": "root", "password": "root"})).await;
        self.token = told.expect("a token")["token"].as_str().map(str::to_owned);
    }

    pub async fn lease(&self, seconds: u64) -> String {
        let granted = self.post("/v3/lease/grant", json!({"TTL": seconds})).await.expect("a lease");
        granted["ID"].as_str().expect("its id").to_owned()
    }
}
