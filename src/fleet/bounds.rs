//! How long a draining replica's requests may run on: by hand, by configuration, or by removal from it.

use std::collections::HashMap;
use std::time::Duration;

use parking_lot::Mutex;

use crate::balance::{Gate, Replica};
use crate::units::{ReplicaId, Time};

/// When each draining replica's time is over. Pure: the time is passed in.
#[derive(Debug, Default)]
pub(super) struct Bounds {
    over_at: Mutex<HashMap<ReplicaId, Time>>,
}

impl Bounds {
    /// This drain's own bound, in place of the configured one.
    pub fn set(&self, id: &ReplicaId, over_at: Time) {
        self.over_at.lock().insert(id.clone(), over_at);
    }

    /// Marks the draining replicas whose time is over and names those that still have requests; a drain that is new is
    /// given `timeout` from `now`, and one that ended is forgotten.
    pub fn overdue<'r>(
        &self,
        replicas: impl Iterator<Item = &'r Replica>,
        timeout: Duration,
        now: Time,
    ) -> Vec<ReplicaId> {
        let mut over_at = self.over_at.lock();
        let mut overdue = Vec::new();
        let mut known = HashMap::new();
        for replica in replicas {
            let draining = replica.gate() == Gate::Draining;
            let mut over = false;
            if draining {
                let at = over_at.remove(replica.id()).unwrap_or_else(|| now.after(timeout));
                known.insert(replica.id().clone(), at);
                over = now >= at;
            }
            replica.set_overdue(over);
            if over && replica.view().requests_in_flight > 0 {
                overdue.push(replica.id().clone());
            }
        }
        *over_at = known;
        overdue
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::balance::{Balancer, Settings};
    use crate::config::{self, Balance, BandSpec, Regions};
    use crate::units::ManualClock;

    fn two() -> Arc<Balancer> {
        let text = "listen: [{address: 127.0.0.1:1}]\nmodels: [{name: m, tokenizer: approximate}]\n\
                    replicas: [{id: a, url: 'http://127.0.0.1:9', model: m}, {id: b, url: 'http://127.0.0.1:8', model: m}]";
        let config = config::parse(text, std::path::Path::new("")).unwrap();
        let settings =
            Settings { balance: Balance::default(), bands: vec![BandSpec::default()], regions: Regions::default() };
        let balancer = Balancer::new(settings.clone(), ManualClock::new(), 1);
        balancer.apply(settings, &config.replicas);
        balancer.replicas().iter().for_each(|r| r.set_gate(Gate::Open, Duration::ZERO));
        balancer
    }

    #[test]
    fn a_drain_is_over_after_its_time_and_a_new_one_begins_anew() {
        let (bounds, balancer) = (Bounds::default(), two());
        let look = |now: u64| {
            let replicas = balancer.replicas();
            bounds.overdue(replicas.iter().map(|r| &**r), Duration::from_secs(10), Time(now * 1_000_000));
            replicas.iter().map(|r| r.overdue()).collect::<Vec<_>>()
        };
        assert_eq!(look(1), [false, false]);
        balancer.replicas()[0].set_gate(Gate::Draining, Duration::ZERO);
        assert_eq!((look(2), look(11), look(12)), (vec![false, false], vec![false, false], vec![true, false]));
        balancer.replicas()[0].set_gate(Gate::Open, Duration::ZERO);
        assert_eq!(look(13), [false, false], "it is back");
        balancer.replicas()[0].set_gate(Gate::Draining, Duration::ZERO);
        assert_eq!((look(14), look(23), look(24)), (vec![false, false], vec![false, false], vec![true, false]));
    }

    #[test]
    fn a_bound_of_its_own_goes_before_the_configured_one() {
        let (bounds, balancer) = (Bounds::default(), two());
        let replicas = balancer.replicas();
        replicas[1].set_gate(Gate::Draining, Duration::ZERO);
        bounds.set(replicas[1].id(), Time(3_000_000));
        let timeout = Duration::from_secs(900);
        bounds.overdue(replicas.iter().map(|r| &**r), timeout, Time(2_000_000));
        assert!(!replicas[1].overdue());
        bounds.overdue(replicas.iter().map(|r| &**r), timeout, Time(3_000_000));
        assert!(replicas[1].overdue() && !replicas[0].overdue());
    }
}
