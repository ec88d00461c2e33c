//! Sources of replicas beside the list: each a task that follows one registry and feeds what it finds.
//!
//! A source that fails, or that says there is nobody, keeps its last good set: an outage of a registry must not be an
//! outage of the service, and an empty answer is how many outages look (a restarted etcd before its agents return, a
//! name server that lost its zone). Whoever is really gone fails its probes. To take the last replica out, drain it.

mod consul;
mod dns;
mod etcd;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::task::JoinHandle;
use tracing::{info, warn};

use crate::config::{Discovery, ReplicaReader, ReplicaSpec, ReplicaTls};
use crate::fleet::client::with_tls;
use crate::units::ModelName;

use super::member::Home;

/// First pause after a failure, doubled up to the longest.
const RETRY: Duration = Duration::from_millis(500);
const RETRY_MAX: Duration = Duration::from_secs(10);

/// Replicas one source may name; a wrong prefix must not exhaust the balancer.
const REPLICAS_MAX: usize = 10_000;

/// Where a source stands.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize)]
pub struct SourceStatus {
    /// `dns:NAME`, `etcd:PREFIX`, `consul:SERVICE`.
    pub name: String,
    /// Whether its last answer was good.
    pub up: bool,
    /// Whether it has answered or failed at all.
    pub asked: bool,
    pub replicas: usize,
    /// What is wrong with it now; the last good set is in force all the same.
    pub error: Option<String>,
}

/// A running source; dropping it ends it.
#[derive(Debug)]
pub(super) struct Source {
    feed: Feed,
    task: JoinHandle<()>,
}

impl Drop for Source {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Source {
    /// The last good set.
    pub fn last(&self) -> Vec<ReplicaSpec> {
        self.feed.state.lock().0.clone()
    }

    pub fn status(&self) -> SourceStatus {
        self.feed.state.lock().1.clone()
    }
}

/// Where a source's task puts what it finds.
#[derive(Clone, Debug)]
struct Feed {
    state: Arc<Mutex<(Vec<ReplicaSpec>, SourceStatus)>>,
    home: Arc<Home>,
}

impl Feed {
    /// A whole answer.
    fn good(&self, mut specs: Vec<ReplicaSpec>) {
        specs.sort_by(|a, b| a.id.cmp(&b.id));
        specs.dedup_by(|a, b| a.id == b.id);
        specs.truncate(REPLICAS_MAX);
        let mut state = self.state.lock();
        if specs.is_empty() && !state.0.is_empty() {
            drop(state);
            self.failed("it names no replica");
            return;
        }
        let (last, status) = &mut *state;
        if !status.up {
            info!(source = status.name, replicas = specs.len(), "discovery answers");
        }
        (status.up, status.asked, status.error, status.replicas) = (true, true, None, specs.len());
        if *last != specs {
            info!(source = status.name, before = last.len(), now = specs.len(), "discovery has another set");
            *last = specs;
            drop(state);
            self.home.changed.notify_one();
        }
    }

    fn failed(&self, why: &str) {
        let mut state = self.state.lock();
        let kept = state.0.len();
        let status = &mut state.1;
        if status.error.as_deref() != Some(why) {
            warn!(source = status.name, why, kept, "discovery fails: the last good set stays");
        }
        (status.up, status.asked, status.error) = (false, true, Some(why.to_owned()));
    }

    /// One replica that cannot be read; the others count.
    fn passed_over(&self, id: &str, why: impl std::fmt::Display) {
        warn!(source = self.state.lock().1.name, id, %why, "a discovered replica is passed over");
    }
}

/// Pauses between tries, growing while they fail.
#[derive(Debug)]
struct Pause(Duration);

impl Pause {
    fn new() -> Pause {
        Pause(RETRY)
    }

    fn reset(&mut self) {
        self.0 = RETRY;
    }

    async fn wait(&mut self) {
        tokio::time::sleep(self.0.mul_f64(1.0 + 0.2 * rand::random::<f64>())).await;
        self.0 = (self.0 * 2).min(RETRY_MAX);
    }
}

/// Starts the source of a configuration, `last` in force until it answers.
pub(super) fn start(
    discovery: &Discovery,
    models: &BTreeSet<ModelName>,
    last: Vec<ReplicaSpec>,
    home: &Arc<Home>,
) -> Source {
    let (name, template) = match discovery {
        Discovery::Dns(d) => (format!("dns:{}", d.name), &d.template),
        Discovery::Etcd(d) => (format!("etcd:{}", d.prefix), &d.template),
        Discovery::Consul(d) => (format!("consul:{}", d.service), &d.template),
    };
    let reader = ReplicaReader::new(template, models.clone());
    let status = SourceStatus { name, replicas: last.len(), ..SourceStatus::default() };
    let feed = Feed { state: Arc::new(Mutex::new((last, status))), home: home.clone() };
    let task = match discovery.clone() {
        Discovery::Dns(d) => home.runtime.spawn(dns::follow(d, reader, feed.clone())),
        Discovery::Etcd(d) => home.runtime.spawn(etcd::follow(d, reader, feed.clone())),
        Discovery::Consul(d) => home.runtime.spawn(consul::follow(d, reader, feed.clone())),
    };
    Source { feed, task }
}

fn http_client(timeout: Option<Duration>, tls: Option<&ReplicaTls>) -> Result<reqwest::Client, String> {
    let mut builder = reqwest::Client::builder()
        .no_proxy()
        .redirect(reqwest::redirect::Policy::none())
        .connect_timeout(Duration::from_secs(3))
        .tcp_keepalive(Duration::from_secs(15));
    if let Some(timeout) = timeout {
        builder = builder.timeout(timeout);
    }
    if let Some(tls) = tls {
        builder = with_tls(builder, tls)?;
    }
    builder.build().map_err(|e| format!("cannot build a client: {e}"))
}

/// An error with its causes, outermost first.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(next) = cause {
        text.push_str(": ");
        text.push_str(&next.to_string());
        cause = next.source();
    }
    text
}
