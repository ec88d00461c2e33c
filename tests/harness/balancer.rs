//! Starts and stops the real binary.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tempfile::TempDir;

use super::books::Books;
use super::client::{self, Answer, Client};
use super::{files, ports, within};

/// What a balancer is to be started with. Everything not said is small, quick and local.
#[derive(Debug)]
pub struct Setup {
    pub dir: Arc<TempDir>,
    sections: BTreeMap<String, String>,
    models: Vec<String>,
    replicas: Vec<String>,
    env: Vec<(String, String)>,
    address: SocketAddr,
    admin: SocketAddr,
}

impl Default for Setup {
    fn default() -> Self {
        Setup::new()
    }
}

impl Setup {
    /// A setup without models: [`Setup::m1`] is the usual start.
    pub fn new() -> Setup {
        let mut setup = Setup {
            dir: Arc::new(tempfile::tempdir().expect("a temporary directory")),
            sections: BTreeMap::new(),
            models: Vec::new(),
            replicas: Vec::new(),
            env: Vec::new(),
            address: ports::free(),
            admin: ports::free(),
        };
        setup
            .sections
            .insert("health".into(), "{interval: 200ms, timeout: 2s, unhealthy_after: 3, healthy_after: 1}".into());
        setup.sections.insert("warmup".into(), "{ramp: 0s}".into());
        setup.sections.insert("shutdown".into(), "{drain_window: 100ms, grace: 20s}".into());
        setup
    }

    /// The usual start: model `m1`, in which every byte is a token.
    pub fn m1() -> Setup {
        let setup = Setup::new();
        let tokenizer = files::path("data/byte-tokenizer");
        setup.model(&format!("{{name: m1, tokenizer: {}}}", tokenizer.display()))
    }

    /// Model `m1` with this chat template, in which every byte is a token.
    pub fn template(template: &[u8]) -> Setup {
        Setup::template_with(template, "")
    }

    /// Like [`Setup::template`], with more of the model's YAML.
    pub fn template_with(template: &[u8], extra: &str) -> Setup {
        let setup = Setup::new();
        let dir = setup.path("tokenizer");
        std::fs::create_dir_all(&dir).expect("a directory");
        for file in ["tokenizer.json", "tokenizer_config.json"] {
            std::fs::copy(files::path("data/byte-tokenizer").join(file), dir.join(file)).expect("a copy");
        }
        std::fs::write(dir.join("chat_template.jinja"), template).expect("a template");
        let comma = if extra.is_empty() { "" } else { ", " };
        setup.model(&format!("{{name: m1, tokenizer: {}{comma}{extra}}}", dir.display()))
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Adds a model as a YAML flow mapping.
    pub fn model(mut self, yaml: &str) -> Setup {
        self.models.push(yaml.to_owned());
        self
    }

    /// Adds a replica of `m1` with a window of 131,072.
    pub fn replica(self, id: &str, url: &str) -> Setup {
        self.replica_with(id, url, "")
    }

    /// Adds a replica of `m1` with more (or other) of its YAML: `model` and `max_context_tokens` are given unless
    /// `extra` has them.
    pub fn replica_with(mut self, id: &str, url: &str, extra: &str) -> Setup {
        let line = replica_yaml(id, url, extra);
        self.replicas.push(line);
        self
    }

    pub fn no_replicas(mut self) -> Setup {
        self.replicas.clear();
        self
    }

    /// Sets (or replaces) a top-level section.
    pub fn section(mut self, name: &str, yaml: &str) -> Setup {
        self.sections.insert(name.to_owned(), yaml.to_owned());
        self
    }

    pub fn env(mut self, name: &str, value: &str) -> Setup {
        self.env.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Writes a file beside the configuration and returns its path.
    pub fn file(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        std::fs::write(&path, content).expect("a file is written");
        path
    }

    /// The configuration as YAML.
    pub fn yaml(&self) -> String {
        let mut out = String::new();
        if !self.sections.contains_key("listen") {
            out.push_str(&format!("listen:\n  - {{address: {}}}\n", self.address));
        }
        if !self.sections.contains_key("admin") {
            out.push_str(&format!("admin: {{address: {}}}\n", self.admin));
        }
        for (name, yaml) in &self.sections {
            let yaml = yaml.replace("$ADDRESS", &self.address.to_string()).replace("$ADMIN", &self.admin.to_string());
            out.push_str(&format!("{name}: {yaml}\n"));
        }
        out.push_str("models:\n");
        for model in &self.models {
            out.push_str(&format!("  - {model}\n"));
        }
        if !self.replicas.is_empty() {
            out.push_str("replicas:\n");
            for replica in &self.replicas {
                out.push_str(&format!("  - {replica}\n"));
            }
        }
        out
    }

    /// Starts the balancer and waits until it is ready.
    pub async fn start(self) -> Running {
        let running = self.spawn();
        running.wait_ready().await;
        running
    }

    /// Starts the balancer without waiting.
    pub fn spawn(self) -> Running {
        let config = self.path("weighbridge.yaml");
        std::fs::write(&config, self.yaml()).expect("the configuration is written");
        let logs = Arc::new(Mutex::new(Vec::new()));
        let mut command = binary();
        command.args(["serve", "--config"]).arg(&config).envs(self.env.iter().cloned());
        let child = launch(command, &logs);
        Running {
            address: self.address,
            admin: self.admin,
            config,
            child: Mutex::new(child),
            logs,
            setup: Mutex::new(self),
        }
    }
}

/// A replica's YAML, one line.
pub fn replica_yaml(id: &str, url: &str, extra: &str) -> String {
    let mut line = format!("{{id: {id}, url: \"{url}\"");
    if !extra.contains("model:") && !extra.contains("models:") {
        line.push_str(", model: m1");
    }
    if !extra.contains("max_context_tokens") {
        line.push_str(", max_context_tokens: 131072");
    }
    if !extra.is_empty() {
        line.push_str(", ");
        line.push_str(extra);
    }
    line.push('}');
    line
}

/// The binary under test: this build's, or the one that `WEIGHBRIDGE_BINARY` names.
pub fn binary() -> Command {
    let path = std::env::var_os("WEIGHBRIDGE_BINARY").unwrap_or_else(|| env!("CARGO_BIN_EXE_weighbridge").into());
    let mut command = Command::new(path);
    command.stdin(Stdio::null());
    command
}

/// Starts a command with its output kept line by line.
pub fn launch(mut command: Command, logs: &Arc<Mutex<Vec<String>>>) -> Child {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary starts");
    let stdout = child.stdout.take().expect("stdout");
    let stderr = child.stderr.take().expect("stderr");
    keep(stdout, Arc::clone(logs));
    keep(stderr, Arc::clone(logs));
    child
}

fn keep(from: impl std::io::Read + Send + 'static, into: Arc<Mutex<Vec<String>>>) {
    std::thread::spawn(move || {
        for line in BufReader::new(from).lines().map_while(Result::ok) {
            into.lock().push(line);
        }
    });
}

/// Sends a signal by its name to a process that this test started.
pub fn signal(pid: u32, name: &str) {
    signal_all(&[pid], name);
}

/// Sends a signal by its name to several at once.
pub fn signal_all(pids: &[u32], name: &str) {
    let pids = pids.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
    let sent = Command::new("sh").args(["-c", &format!("kill -{name} {pids}")]).status().expect("sh runs");
    assert!(sent.success(), "kill -{name} {pids}");
}

/// A balancer that runs. Killed when dropped.
#[derive(Debug)]
pub struct Running {
    pub address: SocketAddr,
    pub admin: SocketAddr,
    pub config: PathBuf,
    child: Mutex<Child>,
    logs: Arc<Mutex<Vec<String>>>,
    setup: Mutex<Setup>,
}

impl Drop for Running {
    fn drop(&mut self) {
        let mut child = self.child.lock();
        let _ = child.kill();
        let _ = child.wait();
        if std::thread::panicking() && std::env::var_os("WEIGHBRIDGE_TEST_LOGS").is_some() {
            eprintln!("--- the balancer's log\n{}", self.logs.lock().join("\n"));
        }
    }
}

impl Running {
    pub fn books(&self) -> Books {
        Books { admin: self.admin }
    }

    pub fn pid(&self) -> u32 {
        self.child.lock().id()
    }

    pub async fn wait_ready(&self) {
        let ready = within(Duration::from_secs(30), async || {
            assert!(self.exited().is_none(), "the balancer ended at its start:\n{}", self.log());
            match Client::try_connect(self.admin).await {
                Ok(_) => client::get(self.admin, "/readyz").await.status == 200,
                Err(_) => false,
            }
        })
        .await;
        assert!(ready, "the balancer is not ready after 30 s:\n{}", self.log());
    }

    pub fn exited(&self) -> Option<ExitStatus> {
        self.child.lock().try_wait().expect("the child can be asked")
    }

    /// Waits for the exit; how long it took.
    pub async fn exits_within(&self, limit: Duration) -> Option<(ExitStatus, Duration)> {
        let start = Instant::now();
        let mut status = None;
        within(limit, async || {
            status = self.exited();
            status.is_some()
        })
        .await;
        let took = start.elapsed();
        // Its last lines are still on their way.
        tokio::time::sleep(Duration::from_millis(100)).await;
        status.map(|s| (s, took))
    }

    pub fn signal(&self, name: &str) {
        signal(self.pid(), name);
    }

    pub fn log(&self) -> String {
        self.logs.lock().join("\n")
    }

    /// Drops the log so far: of a long run it would be all memory there is.
    pub fn forget_log(&self) {
        self.logs.lock().clear();
    }

    /// Waits until a line with this text is logged.
    pub async fn logs_line(&self, text: &str, limit: Duration) -> bool {
        within(limit, async || self.logs.lock().iter().any(|line| line.contains(text))).await
    }

    /// The access log's lines.
    pub fn access_log(&self) -> Vec<serde_json::Value> {
        self.logs
            .lock()
            .iter()
            .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
            .filter(|value| value.get("request_id").is_some())
            .collect()
    }

    /// Memory in use, in bytes.
    pub fn rss(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).expect("the process runs");
        let line = status.lines().find(|l| l.starts_with("VmRSS:")).expect("VmRSS");
        line.split_whitespace().nth(1).and_then(|kb| kb.parse::<u64>().ok()).expect("kB") * 1024
    }

    /// Open file descriptors.
    pub fn descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.pid())).expect("the process runs").count()
    }

    pub async fn chat(&self, body: &[u8]) -> Answer {
        client::post(self.address, "/v1/chat/completions", body).await
    }

    pub async fn completions(&self, body: &[u8]) -> Answer {
        client::post(self.address, "/v1/completions", body).await
    }

    pub async fn chat_with(&self, headers: &[(&str, &str)], body: &[u8]) -> Answer {
        client::post_with(self.address, "/v1/chat/completions", headers, body).await
    }

    /// A client that has sent this chat request.
    pub async fn ask(&self, body: &[u8]) -> Client {
        let mut client = Client::connect(self.address).await;
        client.post("/v1/chat/completions", body).await;
        client
    }

    pub async fn client(&self) -> Client {
        Client::connect(self.address).await
    }

    /// Changes what the configuration file says, and writes it in one rename. Nothing is told to reload.
    pub fn rewrite(&self, change: impl FnOnce(Setup) -> Setup) {
        let mut held = self.setup.lock();
        let dir = Arc::clone(&held.dir);
        let placeholder = Setup {
            dir,
            sections: BTreeMap::new(),
            models: vec![],
            replicas: vec![],
            env: vec![],
            address: held.address,
            admin: held.admin,
        };
        *held = change(std::mem::replace(&mut *held, placeholder));
        let yaml = held.yaml();
        drop(held);
        self.write_config(yaml.as_bytes());
    }

    /// Puts these bytes in place of the configuration file, in one rename.
    pub fn write_config(&self, yaml: &[u8]) {
        let next = self.config.with_extension("next");
        std::fs::write(&next, yaml).expect("the configuration is written");
        std::fs::rename(&next, &self.config).expect("the configuration is renamed");
    }

    pub fn yaml(&self) -> String {
        self.setup.lock().yaml()
    }

    pub fn dir(&self) -> PathBuf {
        self.setup.lock().dir.path().to_owned()
    }

    /// Reloads by the admin API.
    pub async fn reload(&self) -> Answer {
        self.books().post("/admin/reload").await
    }
}

/// Runs a command of the binary to its end: exit code, stdout, stderr.
pub fn command(arguments: &[&str], stdin: &[u8]) -> (Option<i32>, String, String) {
    use std::io::Write;
    let mut child = Command::new(env!("CARGO_BIN_EXE_weighbridge"))
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary starts");
    // The command may not read it.
    let _ = child.stdin.take().expect("stdin").write_all(stdin);
    let output = child.wait_with_output().expect("the binary ends");
    (
        output.status.code(),
        String::from_utf8_lossy(&output.stdout).into_owned(),
        String::from_utf8_lossy(&output.stderr).into_owned(),
    )
}
