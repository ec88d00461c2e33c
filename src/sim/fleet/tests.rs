use std::time::Duration;

use super::*;
use crate::sim::engine::EngineShape;
use crate::sim::mix::{self, Mix, SimRequest, Traffic};
use crate::sim::stats::{Objectives, Summary};

fn traffic(mix: Mix, requests: usize, seed: u64, spec: &FleetSpec) -> Vec<SimRequest> {
    let traffic = Traffic { mix, requests, seed, load: 0.9, flood: None };
    mix::generate(&traffic, &spec.reference(), spec.speeds())
}

fn unequal() -> FleetSpec {
    FleetSpec::of_speeds(&EngineShape::default(), &[1.0, 1.0, 0.6, 0.3])
}

fn summary(run: &Run) -> Summary {
    Summary::of("", &run.records, Objectives::default(), &run.busy)
}

#[test]
fn the_same_seed_gives_the_same_run() {
    let spec = unequal();
    let requests = traffic(Mix::Article, 150, 5, &spec);
    for policy in SimPolicy::all() {
        let options = RunOptions::new(policy, 5);
        let (one, two) = (run(&spec, &requests, &options), run(&spec, &requests, &options));
        assert_eq!(one.records, two.records, "{policy}");
        assert_eq!(one.violations, Vec::<String>::new(), "{policy}");
    }
}

#[test]
fn every_request_is_answered_whole_where_nothing_fails() {
    let spec = unequal();
    for mix in Mix::ALL {
        let requests = traffic(mix, 120, 2, &spec);
        let run = run(&spec, &requests, &RunOptions::new(SimPolicy::all().next().unwrap(), 2));
        assert_eq!(run.violations, Vec::<String>::new(), "{mix}");
        assert!(run.records.iter().all(|r| r.e2e.is_some() && r.ttft <= r.e2e), "{mix}");
        for (i, r) in requests.iter().enumerate() {
            let record = run.records[i];
            assert!(record.arrived >= r.at - 1e-5);
            if let Some(before) = r.after {
                let before = run.records[before];
                assert!(record.arrived + 1e-5 >= before.arrived + before.e2e.unwrap() + r.think.min(0.0));
            }
        }
    }
}

#[test]
fn tokens_beat_turns_on_an_unequal_fleet() {
    let spec = unequal();
    let requests = traffic(Mix::Article, 1_200, 1, &spec);
    let of = |name: &str| summary(&run(&spec, &requests, &RunOptions::new(name.parse().unwrap(), 1)));
    let (ours, turns) = (of("token-load"), of("round-robin"));
    assert!(ours.ttft.p99 < turns.ttft.p99, "{ours:?} {turns:?}");
    assert!(ours.e2e.mean < 0.75 * turns.e2e.mean, "{ours:?} {turns:?}");
}

#[test]
fn a_busy_fleet_is_busy_for_its_load() {
    // What the mixes call a load of 0.5 keeps the engines busy for at least half of the time, and they keep up.
    let spec = FleetSpec::of_speeds(&EngineShape::default(), &[1.0; 4]);
    let traffic = Traffic { mix: Mix::Article, requests: 1_000, seed: 3, load: 1.0, flood: None };
    let requests = mix::generate(&traffic, &spec.reference(), spec.speeds());
    let run = run(&spec, &requests, &RunOptions::new("oracle".parse().unwrap(), 3));
    let last = requests.last().unwrap().at;
    assert!(run.seconds > last && run.seconds < last + 600.0, "{} of {last}", run.seconds);
}

/// Runs of faults, each checked for what must never be. `WEIGHBRIDGE_SIM_RUNS` asks for more.
#[test]
fn whatever_befalls_a_fleet_the_books_are_empty_at_the_end() {
    let runs: u64 = std::env::var("WEIGHBRIDGE_SIM_RUNS").ok().and_then(|n| n.parse().ok()).unwrap_or(60);
    let first: u64 = std::env::var("WEIGHBRIDGE_SIM_SEED").ok().and_then(|n| n.parse().ok()).unwrap_or(0);
    for seed in first..first + runs {
        let spec = if seed % 2 == 0 { unequal() } else { FleetSpec::of_speeds(&small(), &[1.0, 1.0, 0.6]) };
        let mix = Mix::ALL[(seed / 2) as usize % Mix::ALL.len()];
        let policy = SimPolicy::all().nth(seed as usize % 7).unwrap();
        let requests = traffic(mix, 120, seed, &spec);
        let mut options = RunOptions::new(policy, seed);
        let length = Duration::from_secs_f64(requests.last().unwrap().at);
        options.faults = FaultScript::drawn(seed, spec.members.len(), length);
        let run = std::panic::catch_unwind(|| run(&spec, &requests, &options));
        let replay =
            format!("replay with WEIGHBRIDGE_SIM_SEED={seed} WEIGHBRIDGE_SIM_RUNS=1; {mix}, {policy}, {options:?}");
        let run = run.unwrap_or_else(|_| panic!("seed {seed} panicked; {replay}"));
        assert!(run.violations.is_empty(), "seed {seed}: {:?}; {replay}", run.violations);
    }
}

/// An engine with little memory and few places, so that queues, preemption and refusals happen.
fn small() -> EngineShape {
    EngineShape { max_sequences: 8, kv_blocks: 8_000, ..EngineShape::default() }
}
