//! That the mixes are what they say.

use super::*;
use crate::sim::engine::{Engine, Job};
use crate::units::Time;

fn traffic(mix: Mix) -> Traffic {
    Traffic { mix, requests: 4_000, seed: 7, load: 0.9, flood: None }
}

#[test]
fn the_same_seed_draws_the_same_requests_and_another_one_others() {
    let shape = EngineShape::default();
    for mix in Mix::ALL {
        let one = generate(&traffic(mix), &shape, 4.0);
        assert_eq!(one, generate(&traffic(mix), &shape, 4.0), "{mix}");
        assert_ne!(one, generate(&Traffic { seed: 8, ..traffic(mix) }, &shape, 4.0), "{mix}");
        assert!(one.is_sorted_by(|a, b| a.at <= b.at), "{mix}");
    }
}

#[test]
fn load_is_the_share_of_the_fleet_that_the_work_takes() {
    let shape = EngineShape::default();
    for mix in Mix::ALL {
        let requests = generate(&traffic(mix), &shape, 2.9);
        // Conversations are counted by their first turns: the last ones go on past the time they are spread over.
        let first = requests.iter().rev().find(|r| r.after.is_none());
        let load = work_seconds(&shape, &requests) / 2.9 / first.unwrap().at;
        assert!((load - 0.9).abs() < 0.06, "{mix}: {load}");
    }
}

/// The work that one engine with a backlog of a mix finishes in a second, in seconds.
fn finished_per_second(mix: Mix, seed: u64) -> f64 {
    let shape = EngineShape::default();
    let requests = generate(&Traffic { seed, ..traffic(mix) }, &shape, 1.0);
    let batch = saturated_batch(&shape, &requests);
    let mut engine = Engine::new(shape.clone());
    let (mut next, mut now, mut out) = (0, Time::ZERO, Vec::new());
    let (mut begun_at, mut done) = (None, 0.0);
    while next < requests.len() {
        while engine.waiting() < 4 && next < requests.len() {
            let r = &requests[next];
            let chain = r.prefix.hashes(r.prompt + r.output);
            engine.submit(Job { id: next as u64, prompt: r.prompt, output: r.output, priority: 0, chain });
            next += 1;
        }
        now = engine.begin_step(now).unwrap();
        engine.finish_step(&mut out);
        // From a quarter on: the first requests fill an empty engine.
        if begun_at.is_none() && next > requests.len() / 4 {
            begun_at = Some(now);
        }
        for token in out.drain(..) {
            if begun_at.is_some() {
                let r = &requests[token.id as usize];
                let prefill = shape.prefill_seconds(r.prefix.earlier_tokens.min(r.prompt), r.prompt);
                let whole = cost(&shape, batch, r);
                done += (whole - prefill) / f64::from(r.output) + if token.produced == 1 { prefill } else { 0.0 };
            }
        }
    }
    done / now.since(begun_at.unwrap()).as_secs_f64()
}

#[test]
fn a_busy_engine_finishes_a_seconds_work_in_a_second() {
    for mix in Mix::ALL {
        let rate = finished_per_second(mix, 7);
        println!("{mix}: {rate:.3}");
        assert!((0.85..1.15).contains(&rate), "{mix}: {rate}");
    }
}

#[test]
fn a_turn_extends_the_turn_before_it() {
    let requests = generate(&traffic(Mix::Chat), &EngineShape::default(), 4.0);
    let mut followed = 0;
    for r in &requests {
        let Some(before) = r.after else { continue };
        let before = &requests[before];
        followed += 1;
        let (mine, theirs) = (r.prefix.hashes(r.prompt), before.prefix.hashes(before.prompt + before.output));
        assert!(before.at < r.at && mine.len() >= theirs.len());
        assert_eq!(mine[..theirs.len()], theirs[..]);
        assert_eq!(r.prefix.earlier_tokens / 16, theirs.len() as u32);
    }
    assert!(followed * 10 > requests.len() * 7, "{followed}");
}

#[test]
fn the_articles_mix_is_as_described() {
    let requests = generate(&traffic(Mix::Article), &EngineShape::default(), 4.0);
    let part = |task: Task| requests.iter().filter(|r| r.task == task).count() as f64 / requests.len() as f64;
    assert!((part(Task::Classification) - 0.5).abs() < 0.03);
    assert!((part(Task::Chat) - 0.365).abs() < 0.03);
    assert!((part(Task::Code) - 0.13).abs() < 0.02);
    assert!((part(Task::Summary) - 0.005).abs() < 0.004);
    let declared = requests.iter().filter(|r| r.max_tokens == Some(4_096)).count() as f64;
    assert!((declared / requests.len() as f64 - 0.5).abs() < 0.03);
}

#[test]
fn a_flood_leaves_the_interactive_requests_as_they_were() {
    let shape = EngineShape::default();
    let calm = generate(&Traffic { flood: Some(0.0), ..traffic(Mix::Tenants) }, &shape, 4.0);
    let flooded = generate(&Traffic { flood: Some(1.5), ..traffic(Mix::Tenants) }, &shape, 4.0);
    let interactive: Vec<_> = flooded.iter().filter(|r| r.band == Band(0)).cloned().collect();
    assert_eq!(calm, interactive);
    assert!(flooded.len() > 2 * calm.len() || flooded.len() > calm.len() + 1_000);
}
