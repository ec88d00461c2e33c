//! Active health through Pingora's own machinery: a health check on each of its load balancer's backends.
//!
//! Pingora runs the rounds and keeps its `healthy` flags, which its selectors read. Counting to thresholds stays in
//! [`Machine`](super::health::Machine), which also hears traffic; so a check answers with the machine's verdict and
//! both of Pingora's thresholds are one. Each replica's own clock, with jitter, decides whether a round probes it.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use async_trait::async_trait;
use pingora::lb::Backend;
use pingora::lb::health_check::HealthCheck;
use tracing::debug;

use crate::balance::Balancer;
use crate::balance::selection::{self, Directory, PingoraBalancer, PingoraPlacer};
use crate::units::{NameMap, ReplicaId};

use super::member::Member;

/// A round waits this long for its probes; one that takes longer goes on beside the next rounds, so that a frozen
/// replica does not slow the probes of the others.
const ROUND_PATIENCE: Duration = Duration::from_millis(200);

/// The replicas by id, swapped as a whole.
pub(super) type Members = Arc<ArcSwap<NameMap<ReplicaId, Arc<Member>>>>;

/// Pingora's load balancer over the fleet, with the fleet's checks.
pub(super) struct Checks {
    lb: Arc<PingoraBalancer>,
    pub directory: Arc<Directory>,
}

impl fmt::Debug for Checks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Checks").field("directory", &self.directory).finish_non_exhaustive()
    }
}

impl Checks {
    /// Puts Pingora's load balancer before the balancer: from now on every choice goes through it, and what its
    /// checks call ill is left out.
    pub fn new(balancer: &Arc<Balancer>, members: Members) -> Checks {
        let directory = Directory::new(balancer);
        let mut lb = directory.load_balancer();
        lb.set_health_check(Box::new(Probe { members }));
        let lb = Arc::new(lb);
        balancer.set_placer(Box::new(PingoraPlacer { load_balancer: lb.clone(), directory: directory.clone() }));
        Checks { lb, directory }
    }

    /// Takes the replicas and addresses as they are now.
    pub async fn update(&self) {
        if let Err(e) = selection::refresh(&self.lb, &self.directory).await {
            debug!(error = %e, "Pingora's backends not updated");
        }
    }

    /// One round over every replica, in parallel.
    pub async fn round(&self) {
        self.lb.backends().run_health_check(true).await;
    }
}

/// Probes a replica as its engine wants to be asked.
struct Probe {
    members: Members,
}

impl Probe {
    fn member(&self, backend: &Backend) -> Option<Arc<Member>> {
        self.members.load().get(&selection::replica_of(backend)?).cloned()
    }
}

#[async_trait]
impl HealthCheck for Probe {
    async fn check(&self, target: &Backend) -> pingora::Result<()> {
        let Some(member) = self.member(target) else { return Ok(()) };
        if let Some(probe) = member.probe_if_due() {
            let _ = tokio::time::timeout(ROUND_PATIENCE, probe).await;
        }
        member.change(|m, now| m.tick(now));
        if member.answers() {
            return Ok(());
        }
        pingora::Error::e_explain(pingora::ErrorType::ConnectError, member.state().1)
    }

    async fn health_status_change(&self, target: &Backend, healthy: bool) {
        // The gate follows the machine at once; by now it already stands where Pingora's flag goes.
        if let Some(member) = self.member(target) {
            debug!(replica = %member.id, healthy, "answers to probes changed");
            member.change(|_, _| ());
        }
    }

    fn backend_summary(&self, target: &Backend) -> String {
        self.member(target).map_or_else(|| format!("{target:?}"), |m| m.id.to_string())
    }

    fn health_threshold(&self, _success: bool) -> usize {
        1
    }
}
