//! Bands and queues.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::Duration;

use super::*;
use crate::balance::{Admission, Refusal, Reservation, Ticket};
use crate::config::QueueSpec;
use crate::units::Tokens;

type Answer = Receiver<Result<Reservation, Refusal>>;

fn admit(balancer: &Arc<Balancer>, ask: Ask) -> (Admission, Answer) {
    let (tell, answer) = channel();
    let admission = balancer.admit(Arc::new(ask), Box::new(move |result| drop(tell.send(result))));
    (admission, answer)
}

/// Of a request that must wait: its ticket and its answer.
fn waits(balancer: &Arc<Balancer>, ask: Ask) -> (Ticket, Answer) {
    match admit(balancer, ask) {
        (Admission::Waiting(ticket), answer) => (ticket, answer),
        (other, _) => panic!("it should wait: {other:?}"),
    }
}

fn placed(balancer: &Arc<Balancer>, ask: Ask) -> Reservation {
    match admit(balancer, ask) {
        (Admission::Placed(reservation), _) => reservation,
        (other, _) => panic!("it should be placed: {other:?}"),
    }
}

fn bands() -> Settings {
    let band = |name: &str, weight| BandSpec {
        name: name.to_owned(),
        weight,
        default: false,
        queue: QueueSpec { requests: 10, wait: Duration::from_secs(300) },
        ..BandSpec::default()
    };
    Settings { bands: vec![band("high", 4.0), band("mid", 1.0), band("low", 1.0)], ..settings(PolicyName::TokenLoad) }
}

/// One replica for one request at a time.
fn single(settings: Settings) -> (Arc<Balancer>, Arc<ManualClock>) {
    balancer(settings, &[ReplicaSpec { max_sequences: 1, ..spec("1") }])
}

fn still_waits(answer: &Answer) -> bool {
    matches!(answer.try_recv(), Err(TryRecvError::Empty))
}

/// Lets what runs end, again and again, and tells in which order those who wait were placed.
fn drain(mut running: Reservation, answers: &[(&str, &Answer)]) -> Vec<String> {
    let mut order = Vec::new();
    while order.len() < answers.len() {
        drop(running);
        let next = answers.iter().find_map(|(name, answer)| Some((name, answer.try_recv().ok()?)));
        let (name, result) = next.expect("room goes to somebody");
        order.push((*name).to_owned());
        running = result.expect("it is placed");
    }
    order
}

#[test]
fn what_does_not_fit_waits_and_is_placed_by_the_release() {
    let (balancer, _) = single(bands());
    let first = placed(&balancer, ask(10, 10));
    let (_ticket, answer) = waits(&balancer, ask(10, 10));
    assert_eq!(balancer.queue_depths()[0].2, 1);
    assert!(still_waits(&answer));
    drop(first);
    assert!(answer.try_recv().unwrap().is_ok());
    assert_eq!(balancer.queue_depths()[0].2, 0);
    assert!(idle(&balancer));
}

#[test]
fn ten_at_once_on_two_replicas_of_two_are_all_served() {
    let two = |id| ReplicaSpec { max_sequences: 2, ..spec(id) };
    let (balancer, _) = balancer(bands(), &[two("1"), two("2")]);
    let (mut running, mut waiting) = (Vec::new(), Vec::new());
    for _ in 0..10 {
        match admit(&balancer, ask(10, 10)) {
            (Admission::Placed(reservation), _) => running.push(reservation),
            (Admission::Waiting(ticket), answer) => waiting.push((ticket, answer)),
            (Admission::Refused(refusal), _) => panic!("{refusal:?}"),
        }
    }
    assert_eq!((running.len(), waiting.len()), (4, 6));
    let mut served = 0;
    while let Some(done) = running.pop() {
        drop(done);
        served += 1;
        running.extend(waiting.iter().filter_map(|(_, answer)| answer.try_recv().ok()).map(Result::unwrap));
    }
    assert_eq!(served, 10);
}

#[test]
fn a_higher_band_passes_and_order_is_kept_within_a_tenant() {
    let (balancer, _) = single(bands());
    let running = placed(&balancer, ask(10, 10));
    let (_a, hobbyist) = waits(&balancer, of_tenant("hobby", 2, ask(2000, 100)));
    let (_b, second) = waits(&balancer, of_tenant("hobby", 2, ask(10, 10)));
    let (_c, paying) = waits(&balancer, of_tenant("paying", 0, ask(500, 100)));
    let order = drain(running, &[("hobbyist", &hobbyist), ("second", &second), ("paying", &paying)]);
    assert_eq!(order, ["paying", "hobbyist", "second"]);
}

#[test]
fn tenants_take_turns_by_tokens_not_requests() {
    let (balancer, _) = single(bands());
    let running = placed(&balancer, ask(10, 10));
    let big: Vec<_> = (0..3).map(|_| waits(&balancer, of_tenant("big", 0, ask(900, 100)))).collect();
    let small: Vec<_> = (0..6).map(|_| waits(&balancer, of_tenant("small", 0, ask(200, 50)))).collect();
    let answers: Vec<(&str, &Answer)> =
        big.iter().map(|(_, a)| ("big", a)).chain(small.iter().map(|(_, a)| ("small", a))).collect();
    let order = drain(running, &answers);
    // After the first big one (1,000 tokens) four small ones (250 each) are due.
    assert_eq!(order, ["big", "small", "small", "small", "small", "big", "small", "small", "big"]);
}

#[test]
fn the_lowest_band_is_served_within_its_aging() {
    let (balancer, clock) = single(bands());
    let mut running = placed(&balancer, ask(10, 10));
    let (_ticket, hobbyist) = waits(&balancer, of_tenant("hobby", 2, ask(100, 10)));
    let mut flood: Vec<_> = (0..4).map(|_| waits(&balancer, of_tenant("flood", 0, ask(100, 10)))).collect();
    // The high band never lets up. Two bands up at 60 s each, the hobbyist is due after 120 s and a few turns.
    for turn in 0.. {
        assert!(turn < 140, "served within the aging bound");
        clock.advance(Duration::from_secs(1));
        flood.push(waits(&balancer, of_tenant("flood", 0, ask(100, 10))));
        drop(running);
        if let Ok(result) = hobbyist.try_recv() {
            assert!(turn >= 119, "not before its time: {turn}");
            result.unwrap();
            break;
        }
        let (index, result) = flood
            .iter()
            .enumerate()
            .find_map(|(index, (_, answer))| Some((index, answer.try_recv().ok()?)))
            .expect("room goes to somebody");
        flood.remove(index);
        running = result.unwrap();
    }
}

#[test]
fn a_ticket_that_is_dropped_leaves_the_queue() {
    let (balancer, _) = single(bands());
    let running = placed(&balancer, ask(10, 10));
    let (gone, unanswered) = waits(&balancer, ask(10, 10));
    let (_stays, answer) = waits(&balancer, ask(10, 10));
    drop(gone);
    assert_eq!(balancer.queue_depths()[0].2, 1);
    drop(running);
    assert!(answer.try_recv().unwrap().is_ok());
    assert!(matches!(unanswered.try_recv(), Err(TryRecvError::Disconnected)), "its waiter is never called");
}

#[test]
fn a_wait_past_the_bands_limit_ends_with_a_computed_retry() {
    let (balancer, clock) = single(bands());
    let _running = placed(&balancer, ask(1000, 1000));
    let (_ticket, answer) = waits(&balancer, ask(10, 10));
    clock.advance(Duration::from_secs(299));
    balancer.tick();
    assert!(still_waits(&answer));
    clock.advance(Duration::from_secs(1));
    balancer.tick();
    let refusal = answer.try_recv().unwrap().unwrap_err();
    let Refusal::QueueTimeout { waited, retry_after } = refusal else { panic!("{refusal:?}") };
    assert_eq!(waited, Duration::from_secs(300));
    assert!(retry_after > Duration::from_millis(100), "{retry_after:?}");
}

#[test]
fn a_full_queue_displaces_the_newest_of_the_lowest_band_or_refuses() {
    let (balancer, _) = single(bands());
    let _running = placed(&balancer, ask(10, 10));
    let low: Vec<_> = (0..2).map(|_| waits(&balancer, of_tenant("l", 2, ask(10, 10)))).collect();
    let mid: Vec<_> = (0..10).map(|_| waits(&balancer, of_tenant("m", 1, ask(10, 10)))).collect();
    // The middle band is full: it takes the places of the low one, the newest first, then is refused.
    let _one = waits(&balancer, of_tenant("m", 1, ask(10, 10)));
    assert!(matches!(low[1].1.try_recv(), Ok(Err(Refusal::Displaced { .. }))));
    assert!(still_waits(&low[0].1));
    let _two = waits(&balancer, of_tenant("m", 1, ask(10, 10)));
    assert!(matches!(low[0].1.try_recv(), Ok(Err(Refusal::Displaced { .. }))));
    let (third, _) = admit(&balancer, of_tenant("m", 1, ask(10, 10)));
    assert!(matches!(third, Admission::Refused(Refusal::NoCapacity { .. })), "{third:?}");
    assert!(mid.iter().all(|(_, answer)| still_waits(answer)));
}

#[test]
fn without_a_queue_what_does_not_fit_is_refused_at_once() {
    let (balancer, _) = single(no_queue(bands()));
    let _running = placed(&balancer, ask(10, 10));
    assert!(matches!(admit(&balancer, ask(10, 10)).0, Admission::Refused(Refusal::NoCapacity { .. })));
}

#[test]
fn the_hopeless_are_refused_at_once() {
    let mut hasty = bands();
    hasty.bands[0].queue.wait = Duration::from_secs(1);
    // 20,000 tokens at 1,000 a second and less alone: no room within a second.
    let (balancer, _) = single(hasty);
    let _running = placed(&balancer, ask(1000, 20_000));
    let (admission, _) = admit(&balancer, ask(1000, 20_000));
    let Admission::Refused(Refusal::NoCapacity { retry_after }) = admission else { panic!("{admission:?}") };
    assert!(retry_after > Duration::from_secs(2), "{retry_after:?}");
}

#[test]
fn a_small_request_passes_a_large_one_for_a_while_only() {
    let (balancer, clock) =
        balancer(bands(), &[ReplicaSpec { token_capacity: Some(Tokens(1000)), max_sequences: 8, ..spec("1") }]);
    let running = placed(&balancer, ask(300, 300));
    let (_large, large) = waits(&balancer, of_tenant("large", 0, ask(800, 100)));
    let small = placed(&balancer, of_tenant("small", 0, ask(100, 50)));
    clock.advance(Duration::from_secs(3));
    let (_kept, kept_waiting) = waits(&balancer, of_tenant("small", 0, ask(100, 50)));
    drop(small);
    assert!(still_waits(&large) && still_waits(&kept_waiting), "room is kept for the large one");
    drop(running);
    assert!(large.try_recv().unwrap().is_ok());
    assert!(kept_waiting.try_recv().is_ok());
}

#[test]
fn while_one_replica_is_kept_for_a_large_request_the_others_serve() {
    let small = |id| ReplicaSpec { token_capacity: Some(Tokens(1000)), max_sequences: 8, ..spec(id) };
    let (balancer, clock) = balancer(bands(), &[small("1"), small("2")]);
    let first = [placed(&balancer, ask(200, 300)), placed(&balancer, ask(200, 200))];
    let (_large, large) = waits(&balancer, ask(800, 100));
    // Of the same tenant, and behind it: what fits is placed at once, before and after a replica is kept.
    let before = placed(&balancer, ask(50, 50));
    clock.advance(Duration::from_secs(3));
    balancer.tick();
    let after: Vec<Reservation> = (0..3).map(|_| placed(&balancer, ask(50, 50))).collect();
    let serving = after[0].replica().id().clone();
    assert!(after.iter().all(|r| *r.replica().id() == serving), "the other one is kept");
    drop(first.into_iter().chain([before]).filter(|r| *r.replica().id() != serving).collect::<Vec<_>>());
    let large = large.try_recv().unwrap().unwrap();
    assert_ne!(*large.replica().id(), serving);
    // And then it is nobody's any more.
    drop(large);
    assert_ne!(*placed(&balancer, ask(50, 50)).replica().id(), serving);
}

#[test]
fn a_replica_is_no_longer_kept_for_one_that_left() {
    let small = ReplicaSpec { token_capacity: Some(Tokens(1000)), max_sequences: 8, ..spec("1") };
    let (balancer, clock) = balancer(bands(), &[small]);
    let _running = placed(&balancer, ask(200, 300));
    let (large, _) = waits(&balancer, ask(800, 100));
    clock.advance(Duration::from_secs(3));
    balancer.tick();
    drop(large);
    let _small = placed(&balancer, ask(50, 50));
}

#[test]
fn a_band_leaves_places_as_it_leaves_memory() {
    let mut half = bands();
    half.bands[2].share = 0.5;
    let (balancer, _) = balancer(half, &[ReplicaSpec { max_sequences: 4, ..spec("1") }]);
    let _two: Vec<Reservation> = (0..2).map(|_| placed(&balancer, of_tenant("low", 2, ask(10, 10)))).collect();
    let _waits = waits(&balancer, of_tenant("low", 2, ask(10, 10)));
    let _other: Vec<Reservation> = (0..2).map(|_| placed(&balancer, of_tenant("high", 0, ask(10, 10)))).collect();
}

#[test]
fn a_lower_band_does_not_stand_behind_prompts_in_an_engine() {
    let (balancer, clock) = balancer(bands(), &[spec("1")]);
    // Where no higher band is served, nobody is kept waiting for it.
    drop((0..3).map(|_| placed(&balancer, of_tenant("low", 1, ask(2000, 10)))).collect::<Vec<_>>());
    drop(placed(&balancer, of_tenant("high", 0, ask(100, 10))));
    let mut first = placed(&balancer, of_tenant("low", 1, ask(2000, 10)));
    // 2,000 tokens at 8,000 a second are not computed yet: in the engine the second would stand before the high one.
    let (_ticket, second) = waits(&balancer, of_tenant("low", 1, ask(2000, 10)));
    let _high = placed(&balancer, of_tenant("high", 0, ask(100, 10)));
    balancer.tick();
    assert!(still_waits(&second));
    drop(_high);
    assert!(still_waits(&second));
    // The first token is what it waits for; no tick is needed.
    first.progress(1);
    let _second = second.try_recv().unwrap().unwrap();
    // Answers that come whole never tell when their prompts are computed: nobody waits for that.
    let whole = || Ask { stream: false, ..of_tenant("low", 1, ask(2000, 10)) };
    drop(_second);
    let _whole: Vec<Reservation> = (0..3).map(|_| placed(&balancer, whole())).collect();
    // The higher band comes no more.
    let _streams = placed(&balancer, of_tenant("low", 1, ask(2000, 10)));
    let (_ticket, waiting) = waits(&balancer, of_tenant("low", 1, ask(2000, 10)));
    clock.advance(Duration::from_secs(11));
    balancer.tick();
    let _placed = waiting.try_recv().unwrap().unwrap();
    // Who cannot wait is not made to.
    let _third = balancer.place(&Arc::new(of_tenant("low", 1, ask(2000, 10))), &[]).unwrap();
}

#[test]
fn nobody_is_refused_or_timed_out_for_having_waited_by_choice() {
    let mut short = bands();
    short.bands[1].queue = QueueSpec { requests: 1, wait: Duration::from_secs(5) };
    let (balancer, clock) = balancer(short, &[spec("1")]);
    let high = placed(&balancer, of_tenant("high", 0, ask(100, 10)));
    let _first = placed(&balancer, of_tenant("low", 1, ask(2000, 10)));
    let (_ticket, second) = waits(&balancer, of_tenant("low", 1, ask(2000, 10)));
    // The queue is full and the replica is not.
    let _third = placed(&balancer, of_tenant("low", 1, ask(2000, 10)));
    drop(high);
    clock.advance(Duration::from_secs(6));
    balancer.tick();
    let _second = second.try_recv().unwrap().expect("there was room all the time");
}

#[test]
fn those_who_wait_for_a_prefix_stand_before_nobody_and_not_for_ever() {
    let one = |id, max_sequences| ReplicaSpec { max_sequences, token_capacity: Some(Tokens(10_000_000)), ..spec(id) };
    let mut wide = bands();
    wide.bands.iter_mut().for_each(|band| band.queue.requests = 100);
    let (balancer, clock) = balancer(wide, &[one("1", 1), one("2", 40)]);
    let chain: Arc<[u64]> = (1..=1000u64).map(|n| n.wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect();
    let turn = || Ask { prefix: chain.clone(), prefix_block_tokens: 16, ..ask(16_000, 20) };
    let mut holder = placed(&balancer, turn());
    while holder.replica().id().as_str() != "1" {
        let next = placed(&balancer, turn());
        holder = next;
    }
    holder.progress(1);
    let waiting: Vec<_> = (0..30)
        .filter_map(|_| match admit(&balancer, turn()) {
            (Admission::Waiting(ticket), answer) => Some((ticket, answer)),
            _ => None,
        })
        .collect();
    assert!(waiting.len() <= 8 + 1, "{} wait", waiting.len());
    let _other = placed(&balancer, ask(100, 20));
    clock.advance(FOR_ITS_PREFIX);
    balancer.tick();
    assert!(waiting.iter().all(|(_, answer)| answer.try_recv().is_ok_and(|placed| placed.is_ok())));
}

/// Longer than a request waits for its prefix.
const FOR_ITS_PREFIX: Duration = Duration::from_secs(11);

#[test]
fn a_band_of_which_nothing_runs_waits_for_nobodys_prompts() {
    let (balancer, _) = balancer(bands(), &[spec("1")]);
    let _high = placed(&balancer, of_tenant("high", 0, ask(20_000, 10)));
    let _low = placed(&balancer, of_tenant("low", 1, ask(2000, 10)));
}

#[test]
fn a_band_is_served_within_its_aging_though_higher_ones_leave_nothing_of_its_share() {
    let mut half = bands();
    half.bands[2].share = 0.5;
    let (balancer, clock) = balancer(half, &[ReplicaSpec { max_sequences: 4, ..spec("1") }]);
    let mut running: Vec<Reservation> = (0..4).map(|_| placed(&balancer, of_tenant("high", 0, ask(10, 10)))).collect();
    let (_low, low) = waits(&balancer, of_tenant("low", 2, ask(10, 10)));
    // Three or four of the high band run all the time, more than half of the places.
    for turn in 0.. {
        assert!(turn < 70, "served within the aging bound");
        clock.advance(Duration::from_secs(1));
        drop(running.remove(0));
        if let Ok(result) = low.try_recv() {
            assert!(turn >= 59, "not before its time: {turn}");
            result.unwrap();
            break;
        }
        running.push(placed(&balancer, of_tenant("high", 0, ask(10, 10))));
    }
}

#[test]
fn a_replica_kept_for_a_lower_band_is_not_kept_from_a_higher_one() {
    let small = ReplicaSpec { token_capacity: Some(Tokens(1000)), max_sequences: 8, ..spec("1") };
    let (balancer, clock) = balancer(bands(), &[small]);
    let _running = placed(&balancer, ask(200, 300));
    let (_large, large) = waits(&balancer, of_tenant("low", 1, ask(800, 100)));
    let _passes = placed(&balancer, of_tenant("low", 1, ask(50, 50)));
    clock.advance(Duration::from_secs(3));
    balancer.tick();
    let (_small, small) = waits(&balancer, of_tenant("low", 1, ask(50, 50)));
    let _high = placed(&balancer, of_tenant("high", 0, ask(50, 50)));
    assert!(still_waits(&large) && still_waits(&small));
}

#[test]
fn a_request_waits_for_the_replica_that_holds_its_prompt_if_that_is_sooner() {
    let one = |id| ReplicaSpec { max_sequences: 1, ..spec(id) };
    let (balancer, _) = balancer(bands(), &[one("1"), one("2")]);
    let chain: Arc<[u64]> = (1..=1000u64).map(|n| n.wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect();
    let turn = |output| Ask { prefix: chain.clone(), prefix_block_tokens: 16, ..ask(16_000, output) };
    let mut holder = placed(&balancer, turn(20));
    holder.progress(1);
    let home = holder.replica().id().clone();
    // Full now, and soon free; elsewhere 16,000 tokens would be computed again, two seconds of prompt.
    let (_ticket, second) = waits(&balancer, turn(20));
    let other = placed(&balancer, ask(100, 20));
    assert_ne!(*other.replica().id(), home, "others go where there is room");
    drop((holder, other));
    assert_eq!(*second.try_recv().unwrap().unwrap().replica().id(), home);
    // Where the wait would be longer than computing it again, it is computed again.
    let long = placed(&balancer, turn(20_000));
    assert_eq!(*long.replica().id(), home);
    assert_ne!(*placed(&balancer, turn(20)).replica().id(), home);
}

#[test]
fn a_new_replica_serves_the_queue_and_a_lost_model_answers_it() {
    let (balancer, _) = single(bands());
    let _running = placed(&balancer, ask(10, 10));
    let (_one, first) = waits(&balancer, ask(10, 10));
    let (_two, second) = waits(&balancer, ask(10, 10));
    let one = ReplicaSpec { max_sequences: 1, ..spec("1") };
    let two = ReplicaSpec { max_sequences: 1, ..spec("2") };
    balancer.apply(bands(), &[one, two]);
    assert!(still_waits(&first), "it is not probed yet");
    replica(&balancer, "2").set_gate(Gate::Open, Duration::ZERO);
    let _held = first.try_recv().unwrap().unwrap();
    let other = ReplicaSpec { models: vec!["another".into()], ..spec("3") };
    balancer.apply(bands(), &[other]);
    drop(_running);
    assert!(matches!(second.try_recv(), Ok(Err(Refusal::NoReplica { .. }))));
}

#[test]
fn waiters_that_refuse_their_place_do_not_nest() {
    // Each waiter drops its place at once, which makes room for the next: 10,000 in a row must not be a deep stack.
    let mut long = bands();
    long.bands[0].queue = QueueSpec { requests: 10_000, wait: Duration::from_secs(100_000) };
    let (balancer, _) = single(long);
    let running = placed(&balancer, ask(10, 10));
    let tickets: Vec<_> = (0..10_000)
        .map(|_| balancer.admit(Arc::new(ask(10, 10)), Box::new(drop)))
        .filter(|admission| matches!(admission, Admission::Waiting(_)))
        .collect();
    assert_eq!(tickets.len(), 10_000);
    drop(running);
    assert!(idle(&balancer));
    assert_eq!(balancer.queue_depths()[0].2, 0);
}
