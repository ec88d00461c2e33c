//! What the demo plays on: simulated replicas in this process, and the real balancer as a child before them.

use std::fmt::Write;
use std::net::{SocketAddr, TcpListener as StdListener};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, bail};
use tokio::net::TcpListener;
use tokio::process::{Child, Command};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};

use crate::sim::engine::EngineShape;
use crate::sim::fleet::SimPolicy;
use crate::sim::replica::{ReplicaOptions, SimReplica};

/// The model that the demo's replicas serve.
pub const MODEL: &str = "demo";
/// The balancer is ready sooner than this.
const READY: Duration = Duration::from_secs(20);
/// How long the child gets to stop by itself.
const STOP: Duration = Duration::from_secs(3);

/// Replicas and the balancer, until it is taken down.
#[derive(Debug)]
pub struct Stage {
    pub base_url: String,
    pub admin_url: String,
    balancer: Child,
    log: PathBuf,
    directory: PathBuf,
    stop: watch::Sender<bool>,
}

impl Stage {
    /// Starts a replica of each speed and the balancer with this policy, and waits until it is ready.
    ///
    /// # Errors
    /// Where a port cannot be bound or the balancer does not come up; its last words are in the error.
    pub async fn set(shape: &EngineShape, speeds: &[f64], policy: SimPolicy) -> anyhow::Result<Stage> {
        let (stop, stopped) = watch::channel(false);
        let mut replicas = Vec::new();
        for (number, &speed) in (1u64..).zip(speeds) {
            let shape = EngineShape { speed, ..shape.clone() };
            let listener = TcpListener::bind("127.0.0.1:0").await.context("cannot listen on loopback")?;
            replicas.push((format!("gpu-{number}"), listener.local_addr()?, shape.clone()));
            let options =
                ReplicaOptions { models: vec![MODEL.to_owned()], shape, seed: number, ..ReplicaOptions::default() };
            let mut stopped = stopped.clone();
            tokio::spawn(SimReplica::new(options).serve(listener, async move {
                // A closed channel is a stage taken down, too.
                let _ = stopped.wait_for(|stop| *stop).await;
            }));
        }
        let directory = std::env::temp_dir().join(format!("weighbridge-demo-{}-{policy}", std::process::id()));
        std::fs::create_dir_all(&directory).with_context(|| format!("cannot make {}", directory.display()))?;
        let [listen, admin] = free_ports()?;
        let config = directory.join("weighbridge.yaml");
        std::fs::write(&config, yaml(listen, admin, &replicas, policy))?;
        let log = directory.join("weighbridge.log");
        let balancer = start(&config, &log)?;
        let mut stage = Stage {
            base_url: format!("http://{listen}"),
            admin_url: format!("http://{admin}"),
            balancer,
            log,
            directory,
            stop,
        };
        if let Err(error) = stage.ready().await {
            let words = stage.last_words();
            stage.take_down().await;
            bail!("{error:#}; its log ends:\n{words}");
        }
        Ok(stage)
    }

    async fn ready(&mut self) -> anyhow::Result<()> {
        let client = reqwest::Client::new();
        let deadline = Instant::now() + READY;
        loop {
            if let Some(status) = self.balancer.try_wait()? {
                bail!("the balancer ended with {status} before it was ready");
            }
            let answer = client.get(format!("{}/readyz", self.admin_url)).timeout(Duration::from_secs(1)).send();
            if answer.await.is_ok_and(|a| a.status().is_success()) {
                return Ok(());
            }
            if Instant::now() > deadline {
                bail!("the balancer was not ready within {} s", READY.as_secs());
            }
            sleep(Duration::from_millis(50)).await;
        }
    }

    fn last_words(&self) -> String {
        let log = std::fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(15)..].join("\n")
    }

    /// Stops the balancer and the replicas.
    pub async fn take_down(mut self) {
        if let Some(pid) = self.balancer.id() {
            let _ = Command::new("kill").args(["-TERM", &pid.to_string()]).status().await;
        }
        if timeout(STOP, self.balancer.wait()).await.is_err() {
            let _ = self.balancer.kill().await;
        }
        let _ = self.stop.send(true);
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

fn free_ports() -> anyhow::Result<[SocketAddr; 2]> {
    // Both are held until both are known, so that they differ.
    let held = [StdListener::bind("127.0.0.1:0")?, StdListener::bind("127.0.0.1:0")?];
    Ok([held[0].local_addr()?, held[1].local_addr()?])
}

fn start(config: &Path, log: &Path) -> anyhow::Result<Child> {
    let file = std::fs::File::create(log)?;
    Command::new(std::env::current_exe()?)
        .args(["serve", "--config"])
        .arg(config)
        .stdin(Stdio::null())
        .stdout(file.try_clone()?)
        .stderr(file)
        .kill_on_drop(true)
        .spawn()
        .context("cannot start the balancer")
}

fn yaml(
    listen: SocketAddr,
    admin: SocketAddr,
    replicas: &[(String, SocketAddr, EngineShape)],
    policy: SimPolicy,
) -> String {
    let mut text = format!(
        "listen: [{{address: {listen}}}]\nadmin: {{address: {admin}}}\n\
         shutdown: {{drain_window: 0s, grace: 1s}}\nwarmup: {{ramp: 0s}}\n\
         models: [{{name: {MODEL}, tokenizer: replica}}]\nbalance: {{policy: {policy}}}\nreplicas:\n"
    );
    for (id, address, shape) in replicas {
        let _ = writeln!(
            text,
            "  - {{id: {id}, url: \"http://{address}\", model: {MODEL}, engine: vllm, tokens_per_sec: {:.0}, \
             prefill_tokens_per_sec: {:.0}, max_context_tokens: {}, token_capacity: {}, max_sequences: {}}}",
            shape.tokens_per_sec(),
            shape.prefill_tokens_per_sec(),
            shape.max_model_len,
            shape.kv_tokens(),
            shape.max_sequences
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_written_configuration_is_valid() {
        let at = |port: u16| SocketAddr::from(([127, 0, 0, 1], port));
        let replicas = [(4_001, 1.0), (4_002, 0.3)]
            .map(|(port, speed)| (format!("gpu-{port}"), at(port), EngineShape { speed, ..EngineShape::default() }));
        for policy in SimPolicy::all().filter(|p| *p != SimPolicy::Oracle) {
            let text = yaml(at(4_000), at(4_100), &replicas, policy);
            let directory = tempfile::tempdir().unwrap();
            let file = directory.path().join("weighbridge.yaml");
            std::fs::write(&file, &text).unwrap();
            let config = crate::config::load(&file).unwrap();
            assert_eq!(config.replicas.len(), 2, "{text}");
        }
    }
}
