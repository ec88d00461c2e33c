//! Simulated replicas as processes of their own, so that they can be killed, stopped and started.

use std::net::SocketAddr;
use std::process::Child;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::balancer::{binary, launch, signal};
use super::client::{self, Client};
use super::{ports, within};

/// A `sim-replica` process. Killed when dropped.
#[derive(Debug)]
pub struct Sim {
    pub address: SocketAddr,
    arguments: Vec<String>,
    child: Mutex<Child>,
    logs: Arc<Mutex<Vec<String>>>,
}

impl Drop for Sim {
    fn drop(&mut self) {
        self.kill();
    }
}

impl Sim {
    /// Starts one that serves `m1`, with more arguments, and waits until it answers.
    pub async fn start(arguments: &[&str]) -> Sim {
        let address = ports::free();
        let arguments: Vec<String> = arguments.iter().map(|&a| a.to_owned()).collect();
        let logs = Arc::new(Mutex::new(Vec::new()));
        let child = Mutex::new(spawn(address, &arguments, &logs));
        let sim = Sim { address, arguments, child, logs };
        sim.wait_ready().await;
        sim
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub fn pid(&self) -> u32 {
        self.child.lock().id()
    }

    pub fn signal(&self, name: &str) {
        signal(self.pid(), name);
    }

    /// SIGKILL, and the end of it.
    pub fn kill(&self) {
        let mut child = self.child.lock();
        let _ = child.kill();
        let _ = child.wait();
    }

    /// Starts anew after [`Sim::kill`].
    pub async fn restart(&self) {
        *self.child.lock() = spawn(self.address, &self.arguments, &self.logs);
        self.wait_ready().await;
    }

    async fn wait_ready(&self) {
        let up = within(Duration::from_secs(20), async || match Client::try_connect(self.address).await {
            Ok(_) => client::get(self.address, "/health").await.status == 200,
            Err(_) => false,
        })
        .await;
        assert!(up, "the simulated replica does not answer: {}", self.logs.lock().join("\n"));
    }
}

fn spawn(address: SocketAddr, arguments: &[String], logs: &Arc<Mutex<Vec<String>>>) -> Child {
    let mut command = binary();
    command.args(["sim-replica", "--model", "m1", "--listen", &address.to_string()]).args(arguments);
    launch(command, logs)
}
