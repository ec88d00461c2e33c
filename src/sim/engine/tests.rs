use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

fn job(id: u64, prompt: u32, output: u32) -> Job {
    Job { id, prompt, output, priority: 0, chain: Arc::from([]) }
}

fn chained(id: u64, prompt: u32, output: u32, seed: u64) -> Job {
    let chain: Vec<u64> = (0..u64::from((prompt + output) / BLOCK_TOKENS))
        .map(|i| (seed << 32 | i).wrapping_mul(0x9e37_79b9_7f4a_7c15))
        .collect();
    Job { chain: chain.into(), ..job(id, prompt, output) }
}

/// Runs until idle; returns each job's first and last token's time.
fn run(engine: &mut Engine, mut now: Time) -> BTreeMap<u64, (Time, Time, u32)> {
    let mut ends = BTreeMap::new();
    let mut out = Vec::new();
    for _ in 0..1_000_000 {
        let Some(end) = engine.begin_step(now) else { break };
        now = end;
        engine.finish_step(&mut out);
        for emitted in out.drain(..) {
            let entry = ends.entry(emitted.id).or_insert((now, now, 0));
            assert_eq!(emitted.produced, entry.2 + 1, "one token at a time");
            entry.1 = now;
            entry.2 = emitted.produced;
        }
    }
    ends
}

#[test]
fn a_lone_request_takes_its_prefill_and_a_step_per_token() {
    let mut engine = Engine::new(EngineShape::default());
    engine.submit(job(1, 1_000, 11));
    let ends = run(&mut engine, Time::ZERO);
    let (first, last, produced) = ends[&1];
    assert_eq!(produced, 11);
    // 18 + 0.25 + 0.06 × 1,000 × (1 + 1,000 / 65,536)
    assert!((first.as_secs_f64() - 0.079_165).abs() < 1e-4, "{first:?}");
    assert!((last.since(first).as_secs_f64() - 10.0 * 0.018_35).abs() < 2e-4);
    assert_eq!(engine.kv_usage(), 0.0);
}

#[test]
fn a_batch_shares_the_engine_and_a_prompt_delays_those_who_decode() {
    let mut engine = Engine::new(EngineShape::default());
    for id in 0..20 {
        engine.submit(job(id, 10, 1_000));
    }
    let mut now = Time::ZERO;
    let mut out = Vec::new();
    for _ in 0..5 {
        now = engine.begin_step(now).unwrap();
        engine.finish_step(&mut out);
    }
    assert_eq!(out.len(), 100);
    engine.submit(job(99, 2_000, 5));
    let end = engine.begin_step(now).unwrap();
    let gap = end.since(now).as_secs_f64();
    assert!(gap > 0.120, "2,000 prompt tokens take 120 ms of everybody's time, not {gap}");
}

#[test]
fn a_long_prompt_is_computed_in_chunks_within_the_step_budget() {
    let mut engine = Engine::new(EngineShape::default());
    engine.submit(job(1, 10_000, 2));
    let ends = run(&mut engine, Time::ZERO);
    assert_eq!(engine.counters().steps, 6, "five chunks and one more token");
    assert_eq!(ends[&1].2, 2);
}

#[test]
fn the_forty_ninth_sequence_waits() {
    let mut engine = Engine::new(EngineShape::default());
    for id in 0..49 {
        engine.submit(job(id, 1, 10));
    }
    engine.begin_step(Time::ZERO).unwrap();
    assert_eq!((engine.running(), engine.waiting()), (48, 1));
}

#[test]
fn a_shared_prefix_is_computed_once_in_whole_blocks() {
    let mut engine = Engine::new(EngineShape::default());
    engine.submit(chained(1, 191, 6, 5));
    run(&mut engine, Time::ZERO);
    engine.submit(chained(2, 191, 6, 5));
    engine.begin_step(Time::ZERO).unwrap();
    let mut out = Vec::new();
    engine.finish_step(&mut out);
    assert_eq!(out[0].cached, 176);
    let other = chained(3, 191, 6, 6);
    engine.submit(other);
    engine.begin_step(Time::ZERO).unwrap();
    engine.finish_step(&mut out);
    assert_eq!(out.iter().find(|e| e.id == 3).map(|e| e.cached), Some(0));
}

#[test]
fn short_memory_preempts_the_last_and_it_still_finishes() {
    let shape = EngineShape { kv_blocks: 40, ..EngineShape::default() };
    let mut engine = Engine::new(shape);
    for id in 0..4 {
        engine.submit(job(id, 150, 200));
    }
    let ends = run(&mut engine, Time::ZERO);
    assert!(engine.counters().preemptions > 0);
    assert!(ends.values().all(|&(_, _, produced)| produced == 200));
    assert!(ends[&0].1 <= ends[&3].1);
    assert_eq!(engine.kv_usage(), 0.0);
}

#[test]
fn priority_overtakes_those_who_wait_but_not_those_who_run() {
    let shape = EngineShape { max_sequences: 1, priority: true, ..EngineShape::default() };
    let mut engine = Engine::new(shape);
    engine.submit(job(1, 10, 5));
    engine.begin_step(Time::ZERO).unwrap();
    engine.submit(Job { priority: 3, ..job(2, 10, 5) });
    engine.submit(Job { priority: 0, ..job(3, 10, 5) });
    let mut out = Vec::new();
    engine.finish_step(&mut out);
    let ends = run_from(&mut engine, out);
    assert!(ends[&1] < ends[&3] && ends[&3] < ends[&2]);
}

fn run_from(engine: &mut Engine, first: Vec<Emitted>) -> BTreeMap<u64, usize> {
    let mut order = BTreeMap::new();
    let mut count = first.len();
    let mut out = first;
    let mut now = Time::ZERO;
    loop {
        for emitted in out.drain(..) {
            count += 1;
            if emitted.finished {
                order.insert(emitted.id, count);
            }
        }
        let Some(end) = engine.begin_step(now) else { break };
        now = end;
        engine.finish_step(&mut out);
    }
    order
}

#[test]
fn cancelling_frees_the_place_at_once() {
    let shape = EngineShape { max_sequences: 1, ..EngineShape::default() };
    let mut engine = Engine::new(shape);
    engine.submit(job(1, 100, 1_000));
    engine.submit(job(2, 100, 3));
    let now = engine.begin_step(Time::ZERO).unwrap();
    assert!(engine.cancel(1));
    assert!(!engine.cancel(1));
    let mut out = Vec::new();
    engine.finish_step(&mut out);
    assert!(out.is_empty());
    let ends = run(&mut engine, now);
    assert_eq!(ends[&2].2, 3);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn every_job_ends_or_is_cancelled_and_memory_is_never_exceeded(
        jobs in prop::collection::vec((1u32..600, 1u32..80, 0u64..4, any::<bool>()), 1..40),
        blocks in 45u32..120,
        sequences in 1u32..8,
        priority in any::<bool>(),
    ) {
        let shape = EngineShape {
            kv_blocks: blocks, max_sequences: sequences, step_tokens: 256, priority, ..EngineShape::default()
        };
        let mut engine = Engine::new(shape);
        let mut wanted = BTreeMap::new();
        let mut cancelled = Vec::new();
        let mut now = Time::ZERO;
        let mut out = Vec::new();
        let mut produced: BTreeMap<u64, u32> = BTreeMap::new();
        for (id, (prompt, output, seed, cancel)) in (0u64..).zip(jobs) {
            prop_assert!(engine.fits(prompt, output));
            engine.submit(Job { priority: seed as i64, ..chained(id, prompt, output, seed) });
            wanted.insert(id, output);
            if let Some(end) = engine.begin_step(now) {
                now = end;
            }
            prop_assert!(engine.kv_usage() <= 1.0 && engine.running() <= sequences as usize);
            if cancel && engine.cancel(id / 2) {
                cancelled.push(id / 2);
            }
            engine.finish_step(&mut out);
            for e in out.drain(..) { produced.insert(e.id, e.produced); }
        }
        run_more(&mut engine, now, &mut produced);
        for (id, output) in wanted {
            if !cancelled.contains(&id) {
                prop_assert_eq!(produced.get(&id).copied(), Some(output));
            }
        }
        prop_assert!(engine.is_idle());
        prop_assert_eq!(engine.kv_usage(), 0.0);
    }
}

fn run_more(engine: &mut Engine, mut now: Time, produced: &mut BTreeMap<u64, u32>) {
    let mut out = Vec::new();
    for _ in 0..1_000_000 {
        let Some(end) = engine.begin_step(now) else { break };
        now = end;
        engine.finish_step(&mut out);
        for e in out.drain(..) {
            produced.insert(e.id, e.produced);
        }
    }
}
