//! A fleet on a virtual clock: the real balancer, histories and queue before simulated engines.
//!
//! Nothing of the balancer is imitated. It is asked, told of tokens and settled with exactly as the proxy does it,
//! but by a clock that jumps from event to event, so that ten minutes of a fleet take a second, and a seed replays
//! them to the microsecond. Left out: the network (no delay), and the proxy's own time.

mod faults;
mod run;
mod spec;

pub use faults::{Fault, FaultScript, Trouble};
pub use run::{Run, run};
pub use spec::{FleetSpec, MODEL, Member};

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::config::{Balance, BandSpec, PolicyName, QueueSpec, Regions};

/// A policy to simulate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SimPolicy {
    /// One that a configuration can name.
    Named(PolicyName),
    /// `token-load`, told each answer's true length.
    Oracle,
}

const POLICIES: [(&str, SimPolicy); 7] = [
    ("token-load", SimPolicy::Named(PolicyName::TokenLoad)),
    ("least-tokens", SimPolicy::Named(PolicyName::LeastTokens)),
    ("least-requests", SimPolicy::Named(PolicyName::LeastRequests)),
    ("power-of-two", SimPolicy::Named(PolicyName::PowerOfTwo)),
    ("round-robin", SimPolicy::Named(PolicyName::RoundRobin)),
    ("random", SimPolicy::Named(PolicyName::Random)),
    ("oracle", SimPolicy::Oracle),
];

impl SimPolicy {
    /// All of them, the product's own first.
    pub fn all() -> impl Iterator<Item = SimPolicy> {
        POLICIES.iter().map(|&(_, policy)| policy)
    }

    /// As written on the command line and in a configuration.
    pub fn name(self) -> &'static str {
        POLICIES.iter().find(|(_, policy)| *policy == self).map_or("?", |(name, _)| name)
    }
}

impl fmt::Display for SimPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for SimPolicy {
    type Err = String;

    fn from_str(text: &str) -> Result<SimPolicy, String> {
        POLICIES.iter().find(|(name, _)| *name == text).map(|&(_, policy)| policy).ok_or_else(|| {
            let names: Vec<&str> = POLICIES.iter().map(|(name, _)| *name).collect();
            format!("unknown policy `{text}`: expected one of {}", names.join(", "))
        })
    }
}

/// How answers' lengths are foreseen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Foresight {
    /// By the histories, as in production: learned by tenant, model and task as answers complete.
    #[default]
    Learned,
    /// By one history for all tasks.
    OneHistory,
    /// Exactly.
    True,
}

/// How a run is done.
#[derive(Clone, Debug)]
pub struct RunOptions {
    pub policy: SimPolicy,
    pub balance: Balance,
    /// In order, the first is the highest; never empty.
    pub bands: Vec<BandSpec>,
    pub regions: Regions,
    pub seed: u64,
    pub foresight: Foresight,
    pub faults: FaultScript,
    /// Whether every policy but the two that see tokens is run without knowing capacities and sequence limits, as
    /// balancers that count no tokens are.
    pub blind_baselines: bool,
}

impl RunOptions {
    /// A policy with everything as a configuration has it by default.
    pub fn new(policy: SimPolicy, seed: u64) -> RunOptions {
        RunOptions {
            policy,
            balance: Balance::default(),
            bands: two_bands(1.0, 1.0),
            regions: Regions::default(),
            seed,
            foresight: Foresight::Learned,
            faults: FaultScript::default(),
            blind_baselines: false,
        }
    }
}

/// Two bands, interactive and batch. Without more said the first differs from the second in its turn alone; an operator
/// may give the second less than the whole of each replica (`share`), and the first more weight in the score.
pub fn two_bands(batch_share: f64, interactive_weight: f64) -> Vec<BandSpec> {
    // Simulated clients are patient: a refusal would hide a policy's waiting time.
    let queue = QueueSpec { requests: 100_000, wait: Duration::from_secs(3_600) };
    vec![
        BandSpec {
            name: "interactive".to_owned(),
            weight: interactive_weight,
            queue: queue.clone(),
            ..BandSpec::default()
        },
        BandSpec { name: "batch".to_owned(), share: batch_share, queue, default: false, ..BandSpec::default() },
    ]
}

#[cfg(test)]
mod tests;
