//! The same choices, made through Pingora's load balancer.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use pingora_load_balancing::Backend;
use pingora_load_balancing::health_check::HealthCheck;

use super::*;
use crate::balance::selection::{Directory, PingoraBalancer, PingoraPlacer, refresh, replica_of, select};
use crate::balance::{Admission, Refusal, Reservation};
use crate::units::Tokens;

/// Finds the replicas ill that are named in `ill`.
struct Finds {
    ill: Arc<[AtomicBool; 3]>,
}

#[async_trait]
impl HealthCheck for Finds {
    async fn check(&self, target: &Backend) -> pingora::Result<()> {
        let id = replica_of(target).expect("each backend stands for a replica");
        let index = ["a", "b", "c"].iter().position(|name| *name == id.as_str()).expect("a known replica");
        if self.ill[index].load(Ordering::Relaxed) {
            return Err(pingora::Error::new(pingora::ErrorType::ConnectRefused));
        }
        Ok(())
    }

    fn health_threshold(&self, _: bool) -> usize {
        1
    }
}

struct Set {
    balancer: Arc<Balancer>,
    directory: Arc<Directory>,
    lb: Arc<PingoraBalancer>,
    ill: Arc<[AtomicBool; 3]>,
}

/// Three replicas at one address, behind Pingora.
async fn set(settings: Settings) -> Set {
    let (balancer, _) = balancer(settings, &["a", "b", "c"].map(spec));
    let directory = Directory::new(&balancer);
    let mut lb = directory.load_balancer();
    let ill: Arc<[AtomicBool; 3]> = Arc::default();
    lb.set_health_check(Box::new(Finds { ill: ill.clone() }));
    let lb = Arc::new(lb);
    refresh(&lb, &directory).await.unwrap();
    Set { balancer, directory, lb, ill }
}

impl Set {
    fn select(&self, ask: Ask, tried: &[ReplicaId]) -> Result<Reservation, Refusal> {
        select(&self.lb, &self.directory, &Arc::new(ask), tried)
    }

    async fn check(&self, ill: [bool; 3]) {
        for (flag, ill) in self.ill.iter().zip(ill) {
            flag.store(ill, Ordering::Relaxed);
        }
        self.lb.backends().run_health_check(false).await;
    }
}

fn id(reservation: &Reservation) -> &str {
    reservation.replica().id().as_str()
}

#[tokio::test]
async fn replicas_that_share_an_address_are_chosen_by_load() {
    let set = set(settings(PolicyName::LeastTokens)).await;
    let held: Vec<Reservation> = (0..6).map(|_| set.select(ask(100, 50), &[]).unwrap()).collect();
    assert_eq!(held.iter().map(id).collect::<Vec<_>>(), ["a", "b", "c", "a", "b", "c"]);
    drop(held);
    assert!(idle(&set.balancer));
}

#[tokio::test]
async fn what_pingora_finds_ill_is_not_chosen_and_leaves_nothing_booked() {
    let set = set(settings(PolicyName::TokenLoad)).await;
    set.check([true, false, true]).await;
    let held: Vec<Reservation> = (0..6).map(|_| set.select(ask(100, 50), &[]).unwrap()).collect();
    assert!(held.iter().all(|reservation| id(reservation) == "b"));
    assert_eq!(replica(&set.balancer, "a").view().requests_in_flight, 0);
    set.check([true, true, true]).await;
    assert!(set.select(ask(100, 50), &[]).is_ok(), "where all are ill, one is tried");
    set.check([false, false, false]).await;
    drop(held);
    assert!(idle(&set.balancer));
    assert_eq!(id(&set.select(ask(100, 50), &["a".into(), "b".into()]).unwrap()), "c");
}

#[tokio::test]
async fn the_one_that_is_well_but_full_is_waited_for() {
    let set = set(settings(PolicyName::TokenLoad)).await;
    set.check([true, false, true]).await;
    let mut specs = ["a", "b", "c"].map(spec);
    specs[1].max_sequences = 1;
    set.balancer.apply(settings(PolicyName::TokenLoad), &specs);
    let running = set.select(ask(100, 50), &[]).unwrap();
    assert!(matches!(set.select(ask(100, 50), &[]), Err(Refusal::NoCapacity { .. })));
    // The queue's choices are made through Pingora too.
    let placer = PingoraPlacer { load_balancer: set.lb.clone(), directory: set.directory.clone() };
    set.balancer.set_placer(Box::new(placer));
    let (tell, answer) = std::sync::mpsc::channel();
    let admission = set.balancer.admit(Arc::new(ask(100, 50)), Box::new(move |result| drop(tell.send(result))));
    assert!(matches!(admission, Admission::Waiting(_)), "{admission:?}");
    drop(running);
    assert_eq!(id(&answer.try_recv().unwrap().unwrap()), "b");
    drop(admission);
    assert!(idle(&set.balancer));
}

#[tokio::test]
async fn a_refusal_keeps_its_reason() {
    let set = set(settings(PolicyName::TokenLoad)).await;
    let specs = ["a", "b", "c"].map(|id| ReplicaSpec { max_context_tokens: Some(Tokens(512)), ..spec(id) });
    set.balancer.apply(settings(PolicyName::TokenLoad), &specs);
    let refusal = set.select(ask(600, 50), &[]).unwrap_err();
    assert_eq!(refusal, Refusal::ContextLength { prompt: Tokens(600), window: Tokens(512) });
    let elsewhere = Ask { model: "other".into(), ..ask(1, 1) };
    assert!(matches!(set.select(elsewhere, &[]), Err(Refusal::NoReplica { .. })));
    assert!(set.lb.select(b"not an order", 16).is_none(), "a key that is no order chooses nothing");
}

#[tokio::test]
async fn a_reload_changes_the_backends_and_keeps_their_health() {
    let set = set(settings(PolicyName::LeastTokens)).await;
    set.check([true, false, false]).await;
    let mut specs = vec![spec("a"), spec("b"), spec("d")];
    specs[1].tokens_per_sec = 2000.0;
    set.balancer.apply(settings(PolicyName::LeastTokens), &specs);
    open(&set.balancer);
    // Not among Pingora's backends yet, the new one is passed over.
    let before: Vec<Reservation> = (0..4).map(|_| set.select(ask(100, 50), &[]).unwrap()).collect();
    assert!(before.iter().all(|reservation| id(reservation) == "b"));
    refresh(&set.lb, &set.directory).await.unwrap();
    let after: Vec<Reservation> = (0..12).map(|_| set.select(ask(100, 50), &[]).unwrap()).collect();
    assert!(after.iter().all(|reservation| id(reservation) != "a" && id(reservation) != "c"));
    assert!(after.iter().any(|reservation| id(reservation) == "d"));
    drop((before, after));
    assert!(idle(&set.balancer));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn concurrent_equal_requests_spread_evenly_through_pingora_too() {
    let set = Arc::new(set(settings(PolicyName::LeastTokens)).await);
    let barrier = Arc::new(std::sync::Barrier::new(60));
    let threads: Vec<_> = (0..60)
        .map(|_| {
            let (set, barrier) = (set.clone(), barrier.clone());
            std::thread::spawn(move || {
                barrier.wait();
                set.select(ask(100, 50), &[]).unwrap()
            })
        })
        .collect();
    let held: Vec<Reservation> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
    for name in ["a", "b", "c"] {
        let taken = held.iter().filter(|reservation| id(reservation) == name).count();
        assert!((19..=21).contains(&taken), "{name} took {taken}");
    }
}
