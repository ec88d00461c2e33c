//! Who is chosen.

use std::sync::{Arc, Barrier};
use std::time::Duration;

use super::*;
use crate::balance::{Outcome, Refusal, Reservation, Signals};
use crate::units::{Time, Tokens};
use crate::wire::Usage;

fn id(reservation: &Reservation) -> &str {
    reservation.replica().id().as_str()
}

fn place(balancer: &Arc<Balancer>, ask: Ask) -> Result<Reservation, Refusal> {
    balancer.place(&Arc::new(ask), &[])
}

#[test]
fn routes_to_least_loaded() {
    let (balancer, _) = balancer(settings(PolicyName::LeastTokens), &[spec("1"), spec("2")]);
    let first = place(&balancer, ask(100, 50)).unwrap();
    let second = place(&balancer, ask(100, 50)).unwrap();
    let third = place(&balancer, ask(100, 50)).unwrap();
    assert_eq!([id(&first), id(&second), id(&third)], ["1", "2", "1"]);
}

#[test]
fn rejects_when_full() {
    let full = ReplicaSpec { token_capacity: Some(Tokens(500)), ..spec("1") };
    let (balancer, _) = balancer(settings(PolicyName::LeastTokens), &[full]);
    let first = place(&balancer, ask(200, 100)).unwrap();
    assert!(matches!(place(&balancer, ask(200, 100)), Err(Refusal::NoCapacity { .. })));
    drop(first);
    assert!(place(&balancer, ask(200, 100)).is_ok());
}

#[test]
fn release_updates_load() {
    let small = ReplicaSpec { token_capacity: Some(Tokens(1000)), ..spec("1") };
    let (balancer, _) = balancer(settings(PolicyName::LeastTokens), &[small]);
    let first = place(&balancer, ask(100, 100)).unwrap();
    let other = place(&balancer, ask(300, 100)).unwrap();
    assert!(place(&balancer, ask(400, 200)).is_err(), "600 + 200 + 400 is over 1,000");
    first.settle(Some(&Usage { prompt: 100, output: 50, ..Usage::default() }), Outcome::Completed);
    let after = place(&balancer, ask(400, 200)).unwrap();
    assert_eq!(replica(&balancer, "1").view().booked_kv_tokens, Tokens(1000));
    drop((other, after));
}

#[test]
fn what_is_released_is_what_was_booked() {
    let (balancer, _) = balancer(settings(PolicyName::LeastTokens), &[spec("1")]);
    let booked = place(&balancer, ask(100, 100)).unwrap();
    assert_eq!(replica(&balancer, "1").view().booked_kv_tokens, Tokens(200));
    booked.settle(Some(&Usage { prompt: 100, output: 50, ..Usage::default() }), Outcome::Completed);
    assert!(idle(&balancer), "nothing of the 50 that were not used remains");
}

#[test]
fn concurrent_equal_requests_spread_evenly() {
    for policy in [PolicyName::LeastTokens, PolicyName::TokenLoad, PolicyName::LeastRequests, PolicyName::RoundRobin] {
        let (balancer, _) = balancer(settings(policy), &["a", "b", "c", "d"].map(spec));
        let barrier = Barrier::new(64);
        let held: Vec<Reservation> = std::thread::scope(|scope| {
            let place = || {
                barrier.wait();
                place(&balancer, ask(100, 50)).unwrap()
            };
            let threads: Vec<_> = (0..64).map(|_| scope.spawn(place)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        for replica in balancer.replicas().iter() {
            let taken = held.iter().filter(|r| r.replica().id() == replica.id()).count();
            assert!((15..=17).contains(&taken), "{policy:?}: {} took {taken}", replica.id());
        }
    }
}

#[test]
fn one_after_another_the_idle_take_turns() {
    for policy in [PolicyName::LeastTokens, PolicyName::TokenLoad, PolicyName::LeastRequests, PolicyName::RoundRobin] {
        let (balancer, _) = balancer(settings(policy), &["a", "b", "c", "d"].map(spec));
        let taken: Vec<String> = (0..8).map(|_| id(&place(&balancer, ask(100, 50)).unwrap()).to_owned()).collect();
        assert_eq!(taken, ["a", "b", "c", "d", "a", "b", "c", "d"], "{policy:?}");
    }
}

#[test]
fn the_random_policies_spread_and_repeat_with_their_seed() {
    for policy in [PolicyName::Random, PolicyName::PowerOfTwo] {
        let run = || {
            let (balancer, _) = balancer(settings(policy), &["a", "b", "c", "d"].map(spec));
            (0..200).map(|_| id(&place(&balancer, ask(100, 50)).unwrap()).to_owned()).collect::<Vec<_>>()
        };
        let taken = run();
        assert_eq!(taken, run());
        for name in ["a", "b", "c", "d"] {
            let times = taken.iter().filter(|id| *id == name).count();
            assert!((25..=80).contains(&times), "{policy:?}: {name} {times} times");
        }
    }
}

#[test]
fn power_of_two_takes_the_less_requested_of_two() {
    let (balancer, _) = balancer(settings(PolicyName::PowerOfTwo), &["a", "b"].map(spec));
    let held: Vec<Reservation> = (0..20).map(|_| place(&balancer, ask(100, 50)).unwrap()).collect();
    assert_eq!(held.iter().filter(|r| id(r) == "a").count(), 10);
}

#[test]
fn a_faster_replica_takes_more_tokens() {
    for policy in [PolicyName::LeastTokens, PolicyName::TokenLoad] {
        let fast = ReplicaSpec { tokens_per_sec: 3000.0, ..spec("fast") };
        let (balancer, _) = balancer(settings(policy), &[fast, spec("slow")]);
        let held: Vec<Reservation> = (0..200).map(|_| place(&balancer, ask(100, 50)).unwrap()).collect();
        let taken = held.iter().filter(|r| id(r) == "fast").count();
        assert!((140..=190).contains(&taken), "{policy:?}: the fast one took {taken} of 200");
    }
}

#[test]
fn the_largest_window_is_named_where_none_holds_the_prompt() {
    let small = ReplicaSpec { max_context_tokens: Some(Tokens(512)), ..spec("small") };
    let large = ReplicaSpec { max_context_tokens: Some(Tokens(16_384)), ..spec("large") };
    let (balancer, _) = balancer(settings(PolicyName::TokenLoad), &[small, large]);
    assert_eq!(balancer.window(&MODEL.into()), Some(Tokens(16_384)));
    let busy: Vec<Reservation> = (0..20).map(|_| place(&balancer, ask(1000, 500)).unwrap()).collect();
    assert!(busy.iter().all(|r| id(r) == "large"));
    assert_eq!(id(&place(&balancer, ask(600, 50)).unwrap()), "large");
    let retried = balancer.place(&Arc::new(ask(600, 50)), &["large".into()]).unwrap();
    assert_eq!(id(&retried), "large", "a retry goes where it fits, not where it does not");
    let refusal = place(&balancer, ask(20_000, 50)).unwrap_err();
    assert_eq!(refusal, Refusal::ContextLength { prompt: Tokens(20_000), window: Tokens(16_384) });
}

#[test]
fn a_large_declared_maximum_does_not_refuse() {
    let small = ReplicaSpec { max_context_tokens: Some(Tokens(512)), ..spec("1") };
    let (balancer, _) = balancer(settings(PolicyName::TokenLoad), &[small]);
    let over = Ask { max_tokens: Some(1_000_000), output: exactly(4000), ..ask(500, 0) };
    let booked = place(&balancer, over).unwrap();
    assert_eq!(booked.replica().view().booked_kv_tokens, Tokens(512), "the answer ends with the window");
}

#[test]
fn an_empty_replica_takes_any_request_within_its_whole_capacity() {
    let mut banded = settings(PolicyName::TokenLoad);
    banded.bands[0].share = 0.5;
    let small = ReplicaSpec { token_capacity: Some(Tokens(1000)), ..spec("1") };
    let (balancer, _) = balancer(banded, &[small]);
    let whole = place(&balancer, ask(700, 200)).unwrap();
    assert!(place(&balancer, ask(10, 10)).is_err());
    drop(whole);
    let _half = place(&balancer, ask(300, 100)).unwrap();
    assert!(place(&balancer, ask(100, 20)).is_err(), "the band's share is 500");
    assert!(place(&balancer, ask(50, 50)).is_ok());
}

#[test]
fn sequences_stay_below_their_cap() {
    let two = ReplicaSpec { max_sequences: 2, ..spec("1") };
    let (balancer, _) = balancer(settings(PolicyName::TokenLoad), &[two]);
    let _first = place(&balancer, ask(10, 10)).unwrap();
    assert!(place(&balancer, Ask { sequences: 2, ..ask(10, 10) }).is_err());
    let _second = place(&balancer, ask(10, 10)).unwrap();
    assert!(place(&balancer, ask(10, 10)).is_err());
}

#[test]
fn gates_decide_who_may_be_chosen() {
    let (balancer, clock) = balancer(settings(PolicyName::TokenLoad), &["a", "b"].map(spec));
    let (a, b) = (replica(&balancer, "a"), replica(&balancer, "b"));
    for gate in [Gate::Unknown, Gate::Warming, Gate::Draining, Gate::Ill] {
        a.set_gate(gate, Duration::ZERO);
        let held: Vec<Reservation> = (0..4).map(|_| place(&balancer, ask(10, 10)).unwrap()).collect();
        assert!(held.iter().all(|r| id(r) == "b"), "{gate:?}");
    }
    b.set_gate(Gate::Ill, Duration::ZERO);
    a.set_gate(Gate::Ill, Duration::ZERO);
    assert!(place(&balancer, ask(10, 10)).is_ok(), "where all are ill, the least ill is tried");
    a.set_gate(Gate::Draining, Duration::ZERO);
    b.set_gate(Gate::Unknown, Duration::ZERO);
    assert!(matches!(place(&balancer, ask(10, 10)), Err(Refusal::NoReplica { .. })));
    // Half open: one trial at a time.
    a.set_gate(Gate::HalfOpen, Duration::ZERO);
    let trial = place(&balancer, ask(10, 10)).unwrap();
    assert!(matches!(place(&balancer, ask(10, 10)), Err(Refusal::NoCapacity { .. })));
    drop(trial);
    assert!(place(&balancer, ask(10, 10)).is_ok());
    // Overloaded by its own word: left alone while there is another, and until then.
    a.set_gate(Gate::Open, Duration::ZERO);
    b.set_gate(Gate::Open, Duration::ZERO);
    a.back_off_until(Time::from_secs_f64(1.0));
    let held: Vec<Reservation> = (0..4).map(|_| place(&balancer, ask(10, 10)).unwrap()).collect();
    assert!(held.iter().all(|r| id(r) == "b"));
    b.set_gate(Gate::Draining, Duration::ZERO);
    assert_eq!(id(&place(&balancer, ask(10, 10)).unwrap()), "a");
    b.set_gate(Gate::Open, Duration::ZERO);
    clock.advance(Duration::from_secs(1));
    assert_eq!(id(&place(&balancer, ask(10, 10)).unwrap()), "a");
}

#[test]
fn what_was_tried_is_left_out_while_others_are_there() {
    let (balancer, _) = balancer(settings(PolicyName::TokenLoad), &["a", "b"].map(spec));
    let ask = Arc::new(ask(10, 10));
    for _ in 0..4 {
        assert_eq!(id(&balancer.place(&ask, &["a".into()]).unwrap()), "b");
    }
    assert!(balancer.place(&ask, &["a".into(), "b".into()]).is_ok());
}

#[test]
fn a_replica_that_opens_takes_its_share_slowly() {
    let (balancer, clock) = balancer(settings(PolicyName::TokenLoad), &["a", "b"].map(spec));
    replica(&balancer, "a").set_gate(Gate::Warming, Duration::ZERO);
    replica(&balancer, "a").set_gate(Gate::Open, Duration::from_secs(30));
    let share = || {
        let held: Vec<Reservation> = (0..40).map(|_| place(&balancer, ask(100, 100)).unwrap()).collect();
        held.iter().filter(|r| id(r) == "a").count()
    };
    let at_once = share();
    assert!((1..=8).contains(&at_once), "{at_once} of 40 at once");
    clock.advance(Duration::from_secs(15));
    let half_way = share();
    assert!(half_way > at_once && half_way < 19, "{half_way} of 40 half way");
    clock.advance(Duration::from_secs(15));
    assert_eq!(share(), 20);
}

#[test]
fn memory_pressure_counts_until_it_is_stale() {
    let (balancer, clock) = balancer(settings(PolicyName::TokenLoad), &["a", "b"].map(spec));
    let pressed = Signals { kv_pressure: Some(0.9), read_at: clock.now(), ..Signals::default() };
    replica(&balancer, "a").set_signals(pressed);
    for _ in 0..4 {
        assert_eq!(id(&place(&balancer, ask(100, 100)).unwrap()), "b");
    }
    assert_eq!(replica(&balancer, "a").view().kv_pressure, Some(0.9));
    clock.advance(Duration::from_secs(11));
    assert_eq!(replica(&balancer, "a").view().kv_pressure, None);
    assert_eq!(id(&place(&balancer, ask(100, 100)).unwrap()), "a");
}

#[test]
fn the_local_region_is_preferred_by_its_distance() {
    let mut regional = settings(PolicyName::TokenLoad);
    regional.regions.local = Some("eu".to_owned());
    regional.regions.distance.insert("us".to_owned(), Duration::from_millis(90));
    let eu = ReplicaSpec { region: Some("eu".to_owned()), ..spec("eu") };
    let us = ReplicaSpec { region: Some("us".to_owned()), ..spec("us") };
    let (balancer, _) = balancer(regional, &[eu, us]);
    let mut held = vec![place(&balancer, ask(50, 2)).unwrap(), place(&balancer, ask(50, 2)).unwrap()];
    assert!(held.iter().all(|r| id(r) == "eu"), "idle, the near one is nearer");
    while held.iter().all(|r| id(r) == "eu") {
        assert!(held.len() < 100, "a loaded region spills over");
        held.push(place(&balancer, ask(200, 20)).unwrap());
    }
}

#[test]
fn a_held_prefix_draws_until_its_replica_is_too_loaded() {
    let (balancer, _) = balancer(settings(PolicyName::TokenLoad), &["a", "b", "c"].map(spec));
    let chain: Arc<[u64]> = (1..=250u64).map(|n| n.wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect();
    let turn = || Ask { prefix: chain.clone(), prefix_block_tokens: 16, ..ask(4000, 50) };
    let first = id(&place(&balancer, turn()).unwrap()).to_owned();
    let second = place(&balancer, turn()).unwrap();
    assert_eq!(id(&second), first, "the prefix is there");
    assert!(second.cached_tokens() >= Tokens(3900));
    let uncached = second.replica().view().projected_tokens;
    assert!(uncached.0 < 200, "load is what is left to do: {uncached}");
    assert_eq!(second.replica().view().booked_kv_tokens, Tokens(4050), "memory is the whole of it");
    let mut held = vec![second];
    while held.iter().all(|r| id(r) == first) {
        assert!(held.len() < 200, "stickiness ends");
        held.push(place(&balancer, turn()).unwrap());
    }
}

#[test]
fn a_session_breaks_ties() {
    let (balancer, _) = balancer(settings(PolicyName::TokenLoad), &["a", "b", "c", "d"].map(spec));
    let mut homes = std::collections::HashSet::new();
    for session in 0..32 {
        let of = || Ask { session: Some(session), ..ask(100, 10) };
        let home = id(&place(&balancer, of()).unwrap()).to_owned();
        assert_eq!(id(&place(&balancer, of()).unwrap()), home);
        homes.insert(home);
    }
    assert_eq!(homes.len(), 4, "sessions spread");
}

#[test]
fn a_replica_back_by_a_trial_takes_its_share_slowly_like_any_that_was_out() {
    for way in [&[Gate::Ill][..], &[Gate::Ill, Gate::HalfOpen], &[Gate::Warming]] {
        let (balancer, clock) = balancer(settings(PolicyName::LeastTokens), &[spec("1"), spec("2")]);
        let back = replica(&balancer, "2");
        for gate in way {
            back.set_gate(*gate, Duration::ZERO);
        }
        back.set_gate(Gate::Open, Duration::from_secs(10));
        let placed: Vec<_> = (0..20).map(|_| place(&balancer, ask(100, 100)).unwrap()).collect();
        let taken = placed.iter().filter(|reservation| id(reservation) == "2").count();
        assert!(taken <= 4, "{taken} of 20 went to the one that has just come back by {way:?}");
        drop(placed);
        clock.advance(Duration::from_secs(11));
        let placed: Vec<_> = (0..20).map(|_| place(&balancer, ask(100, 100)).unwrap()).collect();
        assert_eq!(placed.iter().filter(|reservation| id(reservation) == "2").count(), 10, "then its whole share");
    }
}
