//! The ledger's invariants, over any order and any interleaving of what happens to a reservation.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::balance::{Admission, Outcome, Reservation};
use crate::units::Tokens;
use crate::wire::Usage;

/// What may happen next.
#[derive(Clone, Debug)]
enum Step {
    Place { prompt: u64, output: u64, sequences: u32, stream: bool, blocks: u64 },
    Admit { prompt: u64, output: u64 },
    Progress { which: usize, tokens: u64 },
    Settle { which: usize, output: u64 },
    Cancel { which: usize },
    Retry { which: usize },
    Pass { millis: u64 },
    Reload { replicas: Vec<usize> },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (1..3000u64, 0..800u64, 1..4u32, any::<bool>(), 0..40u64)
            .prop_map(|(prompt, output, sequences, stream, blocks)| Step::Place { prompt, output, sequences, stream, blocks }),
        2 => (1..3000u64, 1..800u64).prop_map(|(prompt, output)| Step::Admit { prompt, output }),
        4 => (any::<usize>(), 1..2000u64).prop_map(|(which, tokens)| Step::Progress { which, tokens }),
        2 => (any::<usize>(), 0..2000u64).prop_map(|(which, output)| Step::Settle { which, output }),
        2 => any::<usize>().prop_map(|which| Step::Cancel { which }),
        1 => any::<usize>().prop_map(|which| Step::Retry { which }),
        2 => (1..5000u64).prop_map(|millis| Step::Pass { millis }),
        1 => proptest::collection::vec(0..4usize, 0..4).prop_map(|replicas| Step::Reload { replicas }),
    ]
}

fn small(index: usize) -> ReplicaSpec {
    ReplicaSpec {
        token_capacity: Some(Tokens(8000)),
        max_context_tokens: Some(Tokens(4000)),
        max_sequences: 12,
        ..spec(["a", "b", "c", "d"][index])
    }
}

fn chain(blocks: u64) -> Arc<[u64]> {
    (1..=blocks).map(|n| n.wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect()
}

/// Plays the steps; after each one the books are the sum of the reservations.
/// An answer of `mean` tokens, of at most `p90` in nine of ten cases, which in a heavy tail may be the less.
fn about(mean: u64, p90: u64) -> OutputEstimate {
    OutputEstimate { p90, source: EstimateSource::TaskHistory, confidence: 0.8, ..exactly(mean) }
}

fn play(steps: Vec<Step>) -> Result<(), TestCaseError> {
    let (balancer, clock) = balancer(settings(PolicyName::TokenLoad), &[small(0), small(1), small(2)]);
    let (placed, arrived) = std::sync::mpsc::channel();
    let mut held: Vec<(Reservation, u64)> = Vec::new();
    let mut tickets = Vec::new();
    for step in steps {
        match step {
            Step::Place { prompt, output, sequences, stream, blocks } => {
                let output = about(output, output * (blocks % 5) / 2);
                let ask =
                    Ask { sequences, stream, output, prefix: chain(blocks), prefix_block_tokens: 16, ..ask(prompt, 0) };
                if let Ok(mut reservation) = balancer.place(&Arc::new(ask), &[]) {
                    let view = reservation.replica().view();
                    prop_assert!(view.booked_kv_tokens <= Tokens(8000) || view.requests_in_flight > 1);
                    reservation.sent();
                    held.push((reservation, 0));
                }
            }
            Step::Admit { prompt, output } => {
                let placed = placed.clone();
                let waiter = Box::new(move |result| drop(placed.send(result)));
                match balancer.admit(Arc::new(ask(prompt, output)), waiter) {
                    Admission::Placed(reservation) => held.push((reservation, 0)),
                    Admission::Waiting(ticket) => tickets.push(ticket),
                    Admission::Refused(_) => {}
                }
            }
            Step::Progress { which, tokens } if !held.is_empty() => {
                let index = which % held.len();
                let (reservation, so_far) = &mut held[index];
                *so_far += tokens;
                reservation.progress(*so_far);
            }
            Step::Settle { which, output } if !held.is_empty() => {
                let (reservation, _) = held.swap_remove(which % held.len());
                let usage = Usage { prompt: 10, cached_prompt: output / 2, output, reasoning: 0 };
                reservation.settle(Some(&usage), Outcome::Completed);
            }
            Step::Cancel { which } if which % 3 == 0 && !tickets.is_empty() => {
                tickets.swap_remove(which % tickets.len());
            }
            Step::Cancel { which } if !held.is_empty() => {
                let (reservation, _) = held.swap_remove(which % held.len());
                reservation.settle(None, Outcome::ClientGone);
            }
            Step::Retry { which } if !held.is_empty() => {
                let (reservation, _) = held.swap_remove(which % held.len());
                let (ask, tried) = (reservation.ask().clone(), reservation.replica().id().clone());
                drop(reservation);
                held.extend(balancer.place(&ask, &[tried]).map(|reservation| (reservation, 0)));
            }
            Step::Pass { millis } => {
                clock.advance(Duration::from_millis(millis));
                balancer.tick();
            }
            Step::Reload { replicas } => {
                let specs: Vec<ReplicaSpec> = replicas.into_iter().map(small).collect();
                balancer.apply(settings(PolicyName::TokenLoad), &specs);
                open(&balancer);
            }
            _ => {}
        }
        held.extend(arrived.try_iter().filter_map(Result::ok).map(|reservation| (reservation, 0)));
        for replica in balancer.replicas().iter() {
            prop_assert_eq!(replica.audit(), Ok(()));
            let here = held.iter().filter(|(r, _)| Arc::ptr_eq(r.replica(), replica)).count();
            prop_assert_eq!(replica.view().requests_in_flight, here as u64);
        }
    }
    let replicas: Vec<_> = held.iter().map(|(reservation, _)| reservation.replica().clone()).collect();
    drop(tickets);
    drop(held);
    drop(arrived);
    prop_assert!(replicas.iter().all(|replica| replica.view().booked_kv_tokens == Tokens::ZERO));
    prop_assert!(idle(&balancer));
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]

    #[test]
    fn the_books_are_the_sum_of_the_reservations_in_any_order(steps in proptest::collection::vec(step(), 1..120)) {
        play(steps)?;
    }

    #[test]
    fn eight_threads_never_book_over_capacity_and_leave_nothing_behind(seed in any::<u64>(), policy in 0..6usize) {
        let policy = [PolicyName::TokenLoad, PolicyName::LeastTokens, PolicyName::LeastRequests,
            PolicyName::PowerOfTwo, PolicyName::RoundRobin, PolicyName::Random][policy];
        contend(seed, policy);
    }
}

/// Eight threads place, stream, settle, cancel and retry while another reloads and watches.
fn contend(seed: u64, policy: PolicyName) {
    let (balancer, clock) = balancer(settings(policy), &[small(0), small(1)]);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..8u64)
            .map(|worker| {
                let (balancer, clock) = (&balancer, &clock);
                scope.spawn(move || {
                    let mut random = seed ^ worker.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
                    let mut next = move |below: u64| {
                        random ^= random << 13;
                        random ^= random >> 7;
                        random ^= random << 17;
                        random % below
                    };
                    let mut held: Vec<Reservation> = Vec::new();
                    for _ in 0..200 {
                        // At least a token is booked for each, since one will have come.
                        let (stream, output) = (next(2) == 0, about(1 + next(500), 1 + next(1500)));
                        let ask = Arc::new(Ask { stream, output, ..ask(1 + next(2500), 0) });
                        if let Ok(mut reservation) = balancer.place(&ask, &[]) {
                            reservation.sent();
                            held.push(reservation);
                        }
                        if held.is_empty() {
                            continue;
                        }
                        let index = next(held.len() as u64) as usize;
                        match next(5) {
                            // Within what was booked, so that the capacity holds to the end.
                            0 => held[index].progress(1),
                            1 => held.swap_remove(index).settle(None, Outcome::Completed),
                            2 => drop(held.swap_remove(index)),
                            3 => {
                                let tried = held[index].replica().id().clone();
                                let ask = held[index].ask().clone();
                                held.swap_remove(index);
                                held.extend(balancer.place(&ask, &[tried]));
                            }
                            _ => {
                                clock.advance(Duration::from_millis(50));
                                balancer.tick();
                            }
                        }
                    }
                })
            })
            .collect();
        let watcher = scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                for replica in balancer.replicas().iter() {
                    // Read under the books' lock, so that a change half made is not taken for a fault.
                    replica.audit().expect("the books are the sum of the reservations");
                    let booked = replica.booked_exactly();
                    assert!(booked.0 <= 8000 && booked.1 <= 12, "over capacity: {booked:?}");
                }
                balancer.apply(settings(policy), &[small(0), small(1)]);
                std::thread::yield_now();
            }
        });
        for worker in workers {
            worker.join().unwrap();
        }
        done.store(true, Ordering::Relaxed);
        watcher.join().unwrap();
    });
    assert!(idle(&balancer));
}

#[test]
fn a_stream_draws_its_entry_down_and_outlives_its_estimate() {
    let (balancer, _) = balancer(settings(PolicyName::TokenLoad), &[spec("a")]);
    let mut estimate = OutputEstimate { source: EstimateSource::TaskHistory, ..exactly(100) };
    estimate.tail = Arc::from([(100, 80.0), (200, 150.0)]);
    let mut stream = balancer.place(&Arc::new(Ask { output: estimate, ..ask(1000, 0) }), &[]).unwrap();
    let projected = || replica(&balancer, "a").view().projected_tokens.0;
    assert_eq!(projected(), 1100);
    stream.progress(1);
    assert!((95..=100).contains(&projected()), "the prompt is done: {}", projected());
    stream.progress(60);
    let at_60 = projected();
    stream.progress(100);
    assert_eq!(projected(), 80, "E[length - 100 | length > 100]");
    assert!(at_60 > 40, "a stream that lives is expected to live on: {at_60}");
    stream.progress(300);
    assert_eq!(projected(), 150);
    let view = replica(&balancer, "a").view();
    assert!(view.booked_kv_tokens >= Tokens(1300), "what it holds is booked: {}", view.booked_kv_tokens);
    stream.progress(200);
    assert_eq!(replica(&balancer, "a").view().booked_kv_tokens, view.booked_kv_tokens, "a count never goes back");
    drop(stream);
    assert!(idle(&balancer));
}

#[test]
fn max_tokens_and_the_window_bound_what_remains() {
    let windowed = ReplicaSpec { max_context_tokens: Some(Tokens(1000)), ..spec("a") };
    let (balancer, _) = balancer(settings(PolicyName::TokenLoad), &[windowed]);
    let capped = Ask { max_tokens: Some(20), ..ask(100, 500) };
    let mut stream = balancer.place(&Arc::new(capped), &[]).unwrap();
    assert_eq!(replica(&balancer, "a").view().booked_kv_tokens, Tokens(120));
    stream.progress(19);
    assert_eq!(replica(&balancer, "a").view().projected_tokens, Tokens(1));
    drop(stream);
    let long = balancer.place(&Arc::new(ask(900, 500)), &[]).unwrap();
    assert_eq!(replica(&balancer, "a").view().booked_kv_tokens, Tokens(1000));
    drop(long);
}

#[test]
fn an_answer_that_sends_no_tokens_is_drawn_down_by_time() {
    let (balancer, clock) = balancer(settings(PolicyName::TokenLoad), &[spec("a")]);
    let silent = Ask { stream: false, ..ask(1000, 400) };
    let held = balancer.place(&Arc::new(silent), &[]).unwrap();
    let projected = || replica(&balancer, "a").view().projected_tokens.0;
    let mut before = projected();
    assert_eq!(before, 1400);
    for _ in 0..20 {
        clock.advance(Duration::from_millis(500));
        balancer.tick();
        assert!(projected() <= before);
        before = projected();
    }
    assert!(before < 1400 / 2 + 1, "after ten seconds: {before}");
    clock.advance(Duration::from_secs(600));
    balancer.tick();
    assert_eq!(projected(), 1, "it has not ended");
    held.settle(Some(&Usage { prompt: 1000, output: 380, ..Usage::default() }), Outcome::Completed);
    assert!(idle(&balancer));
}

#[test]
fn a_replica_that_goes_and_comes_back_keeps_what_it_runs() {
    let (balancer, _) = balancer(settings(PolicyName::LeastTokens), &[spec("a"), spec("b")]);
    replica(&balancer, "b").set_gate(Gate::Draining, Duration::ZERO);
    let old: Vec<Reservation> = (0..10).map(|_| balancer.place(&Arc::new(ask(100, 50)), &[]).unwrap()).collect();
    balancer.apply(settings(PolicyName::LeastTokens), &[spec("b")]);
    assert_eq!(replica(&balancer, "a").gate(), Gate::Draining, "it finishes what runs");
    assert!(balancer.place(&Arc::new(ask(100, 50)), &[]).is_err());
    balancer.apply(settings(PolicyName::LeastTokens), &[spec("a"), spec("b")]);
    assert_eq!(replica(&balancer, "a").gate(), Gate::Open);
    let new: Vec<Reservation> = (0..5).map(|_| balancer.place(&Arc::new(ask(100, 50)), &[]).unwrap()).collect();
    assert_eq!(replica(&balancer, "a").view().requests_in_flight, 15, "the same process still runs them");
    drop(old);
    assert_eq!(replica(&balancer, "a").view().booked_kv_tokens, Tokens(5 * 150));
    drop(new);
    balancer.apply(settings(PolicyName::LeastTokens), &[spec("b")]);
    assert!(balancer.replica(&"a".into()).is_none(), "idle, it is gone at once");
    let last = replica(&balancer, "b");
    last.set_gate(Gate::Open, Duration::ZERO);
    let held = balancer.place(&Arc::new(ask(100, 50)), &[]).unwrap();
    balancer.apply(settings(PolicyName::LeastTokens), &[]);
    assert_eq!(balancer.replicas().len(), 1);
    drop(held);
    balancer.tick();
    assert_eq!(balancer.replicas().len(), 0, "it goes when it is idle");
    assert_eq!(last.view().requests_in_flight, 0);
}

#[test]
fn other_fields_change_without_touching_the_books() {
    let (balancer, _) = balancer(settings(PolicyName::TokenLoad), &[spec("a")]);
    let held = balancer.place(&Arc::new(ask(100, 50)), &[]).unwrap();
    balancer.apply(settings(PolicyName::TokenLoad), &[ReplicaSpec { tokens_per_sec: 9000.0, ..spec("a") }]);
    let view = replica(&balancer, "a").view();
    assert_eq!((view.requests_in_flight, view.booked_kv_tokens), (1, Tokens(150)));
    assert!((8999.0..9001.0).contains(&view.decode_tokens_per_sec), "{}", view.decode_tokens_per_sec);
    drop(held);
    assert!(idle(&balancer));
}

/// An answer of 100 tokens on average, of at most 400 in nine of ten cases.
fn uncertain() -> OutputEstimate {
    let tail: Vec<(u64, f64)> = vec![(0, 100.0), (100, 150.0), (400, 200.0)];
    OutputEstimate {
        mean: 100.0,
        p50: 60,
        p90: 400,
        source: EstimateSource::TaskHistory,
        confidence: 0.8,
        tail: tail.into(),
    }
}

#[test]
fn what_many_answers_may_become_together_is_less_than_what_each_may_become_added_up() {
    let (balancer, _) = balancer(no_queue(settings(PolicyName::TokenLoad)), &[spec("1")]);
    let booked = || replica(&balancer, "1").view().booked_kv_tokens.0;
    let ask = Arc::new(Ask { output: uncertain(), ..ask(100, 0) });
    let mut held = vec![balancer.place(&ask, &[]).unwrap()];
    assert_eq!(booked(), 500, "one alone is booked at its percentile");
    while let Ok(reservation) = balancer.place(&ask, &[]) {
        held.push(reservation);
        let n = held.len() as u64;
        let (mean, spread) = (200 * n, 300.0 * (n as f64).sqrt());
        assert!(booked().abs_diff(mean + spread.ceil() as u64) <= 1, "{} of {n}", booked());
        assert!(booked() <= 100_000);
        assert!(n < 1000);
    }
    drop(held);
    assert!(idle(&balancer));
}

#[test]
fn an_answer_stays_within_its_booking_until_it_outgrows_it() {
    let (balancer, _) = balancer(settings(PolicyName::TokenLoad), &[spec("1")]);
    let booked = || replica(&balancer, "1").view().booked_kv_tokens.0;
    let mut held = balancer.place(&Arc::new(Ask { output: uncertain(), ..ask(100, 0) }), &[]).unwrap();
    for tokens in 1..=400 {
        held.progress(tokens);
        assert_eq!(booked(), 500, "at {tokens}");
    }
    held.progress(401);
    assert_eq!(booked(), 100 + 401 + 200, "what it holds and what such answers still bring");
    drop(held);
    assert!(idle(&balancer));
}
