//! Active health through Pingora's own machinery: a view of the fleet's addresses, and a health check on each.
//!
//! Pingora runs the rounds and keeps its `healthy` flags, which its selectors read. Counting to thresholds stays in
//! [`Machine`](super::health::Machine), which also hears traffic; so a check answers with the machine's verdict and
//! both of Pingora's thresholds are one. Each replica's own clock, with jitter, decides whether a round probes it.

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use async_trait::async_trait;
use http::Extensions;
use pingora::lb::discovery::ServiceDiscovery;
use pingora::lb::health_check::HealthCheck;
use pingora::lb::{Backend, Backends, HealthRegistry};
use pingora::protocols::l4::socket::SocketAddr;
use tracing::debug;

use crate::units::ReplicaId;

use super::member::Member;

/// A round waits this long for its probes; one that takes longer goes on beside the next rounds, so that a frozen
/// replica does not slow the probes of the others.
const ROUND_PATIENCE: Duration = Duration::from_millis(200);

/// The replicas by id, swapped as a whole.
pub(super) type Members = Arc<ArcSwap<HashMap<ReplicaId, Arc<Member>>>>;

/// Which replica a backend of the fleet's view is.
#[derive(Clone, Debug)]
struct Of(ReplicaId);

/// The fleet's view and its checks.
pub(super) struct Checks {
    registry: Arc<HealthRegistry>,
    view: Backends,
}

impl fmt::Debug for Checks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Checks").finish_non_exhaustive()
    }
}

impl Checks {
    pub fn new(members: Members) -> Checks {
        let registry = Arc::new(HealthRegistry::new());
        registry.set_health_check(Box::new(Probe { members: members.clone() }));
        let view = Backends::new_with_health_registry(Box::new(Listed { members }), registry.clone());
        Checks { registry, view }
    }

    /// Takes the members as they are now. Calls must not overlap.
    pub async fn update(&self) {
        if let Err(e) = self.view.update(|_| {}).await {
            debug!(error = %e, "view not updated");
        }
    }

    /// One round over every replica, in parallel.
    pub async fn round(&self) {
        self.registry.run_health_check(true).await;
    }
}

/// Lists the members that have an address.
struct Listed {
    members: Members,
}

#[async_trait]
impl ServiceDiscovery for Listed {
    async fn discover(&self) -> pingora::Result<(BTreeSet<Backend>, HashMap<u64, bool>)> {
        let mut backends = BTreeSet::new();
        for member in self.members.load().values() {
            let Some(address) = member.address.load_full() else { continue };
            let mut ext = Extensions::new();
            ext.insert(Of(member.id.clone()));
            // Pingora tells backends apart by address and weight alone; a number of the member's own as its weight
            // keeps apart those that share an address, and a new replica from the old one in its place.
            backends.insert(Backend { addr: SocketAddr::Inet(*address), weight: member.number, ext });
        }
        Ok((backends, HashMap::new()))
    }
}

/// Probes a replica as its engine wants to be asked.
struct Probe {
    members: Members,
}

impl Probe {
    fn member(&self, backend: &Backend) -> Option<Arc<Member>> {
        self.members.load().get(&backend.ext.get::<Of>()?.0).cloned()
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
