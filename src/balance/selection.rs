//! The balancer as Pingora's `BackendSelection`: the one file of this room that knows a Pingora type.
//!
//! Pingora's [`LoadBalancer`] keeps the backends and what its health checks say of them; [`Selection`] is asked for
//! backends one by one, and chooses *and books* each in the same step, in its iterator's `next`. A backend that the
//! caller does not accept (its health check fails) has its booking released before the next one is chosen. The key
//! that Pingora hands through is the number of an [`Order`], which carries the whole ask in and the reservation out.
//!
//! Pingora rebuilds the selection whenever the backends change and ignores a backend's `ext` when it compares them, so
//! nothing lives in either but a replica's id: books and limits stay in the [`Balancer`]. A backend's weight is its
//! replica's number, so that replicas which share an address stay two backends.

use std::collections::{BTreeSet, HashMap};
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Weak};

use async_trait::async_trait;
use parking_lot::{Mutex, RwLock};
use pingora_load_balancing::discovery::ServiceDiscovery;
use pingora_load_balancing::selection::{BackendIter, BackendSelection};
use pingora_load_balancing::{Backend, Backends, LoadBalancer};

use crate::units::{NameMap, ReplicaId};

use super::ask::{Ask, Refusal};
use super::balancer::{Balancer, NO_REPLICA, Placer};
use super::replica::{Gate, Replica};
use super::reservation::Reservation;

/// Pingora's load balancer over this crate's balancer.
pub type PingoraBalancer = LoadBalancer<Selection>;

/// The replica that a backend stands for; kept in its `ext`.
#[derive(Clone, Debug)]
struct Stands(ReplicaId);

/// The replica that a backend stands for; `None` for a backend that is none of [`Directory`]'s.
pub fn replica_of(backend: &Backend) -> Option<ReplicaId> {
    backend.ext.get::<Stands>().map(|stands| stands.0.clone())
}

/// One selection on its way through Pingora.
#[derive(Debug)]
struct Order {
    ask: Arc<Ask>,
    tried: Vec<ReplicaId>,
    /// What the last `next` came to.
    result: Mutex<Option<Result<Reservation, Refusal>>>,
}

/// Orders by their numbers.
type Orders = NameMap<u64, Arc<Order>>;

/// Orders are spread over so many locks by their numbers.
const ORDER_SHARDS: u64 = 64;

/// What the balancer and Pingora's side of it share: the replicas' addresses, and the orders on their way.
#[derive(Debug)]
pub struct Directory {
    balancer: Weak<Balancer>,
    addresses: RwLock<NameMap<ReplicaId, SocketAddr>>,
    orders: Box<[Mutex<Orders>]>,
    next_order: AtomicU64,
    updating: tokio::sync::Mutex<()>,
}

impl Directory {
    /// The directory of a balancer's replicas.
    pub fn new(balancer: &Arc<Balancer>) -> Arc<Directory> {
        Arc::new(Directory {
            balancer: Arc::downgrade(balancer),
            addresses: RwLock::default(),
            orders: (0..ORDER_SHARDS).map(|_| Mutex::default()).collect(),
            next_order: AtomicU64::new(0),
            updating: tokio::sync::Mutex::new(()),
        })
    }

    /// Where a replica whose URL has a name is; one whose URL has an address needs no entry. Takes effect with the
    /// next [`refresh`].
    pub fn set_address(&self, id: &ReplicaId, address: SocketAddr) {
        self.addresses.write().insert(id.clone(), address);
    }

    /// A replica's address: as set, else as its URL says.
    pub fn address(&self, replica: &Replica) -> Option<SocketAddr> {
        if let Some(address) = self.addresses.read().get(replica.id()) {
            return Some(*address);
        }
        let spec = replica.spec();
        let ip: IpAddr = spec.url.host.parse().ok()?;
        Some(SocketAddr::new(ip, spec.url.port))
    }

    /// The backend that stands for a replica; `None` while its name is not resolved.
    pub fn backend(&self, replica: &Replica) -> Option<Backend> {
        let address = self.address(replica)?;
        let mut ext = http::Extensions::new();
        ext.insert(Stands(replica.id().clone()));
        Some(Backend { addr: address.into(), weight: number_to_weight(replica.number), ext })
    }

    /// Pingora's load balancer over this directory, without backends until [`refresh`]. Health check and frequencies
    /// are the caller's to set.
    pub fn load_balancer(self: &Arc<Self>) -> PingoraBalancer {
        let backends = Backends::new(Box::new(Discovery(self.clone())));
        LoadBalancer::from_backends_with_config(backends, Some(self.clone()))
    }

    fn enter(&self, order: Arc<Order>) -> u64 {
        let number = self.next_order.fetch_add(1, Relaxed);
        self.orders[(number % ORDER_SHARDS) as usize].lock().insert(number, order);
        number
    }

    fn shard(&self, number: u64) -> &Mutex<Orders> {
        &self.orders[(number % ORDER_SHARDS) as usize]
    }
}

fn number_to_weight(number: u32) -> usize {
    number as usize + 1
}

/// Lists the balancer's replicas as backends.
#[derive(Debug)]
struct Discovery(Arc<Directory>);

#[async_trait]
impl ServiceDiscovery for Discovery {
    async fn discover(&self) -> pingora::Result<(BTreeSet<Backend>, HashMap<u64, bool>)> {
        let replicas = self.0.balancer.upgrade().map(|balancer| balancer.replicas());
        let backends = replicas.iter().flat_map(|all| all.iter()).filter_map(|replica| self.0.backend(replica));
        Ok((backends.collect(), HashMap::new()))
    }
}

/// Brings Pingora's backends up to the balancer's replicas; to be called after each [`Balancer::apply`] and each
/// change of an address. Members that stay keep their health.
///
/// # Errors
/// None that the directory itself makes.
pub async fn refresh(balancer: &PingoraBalancer, directory: &Directory) -> pingora::Result<()> {
    // Pingora's updates must not overlap.
    let _one_at_a_time = directory.updating.lock().await;
    let known: std::collections::HashSet<ReplicaId> = directory
        .balancer
        .upgrade()
        .map(|balancer| balancer.replicas().iter().map(|replica| replica.id().clone()).collect())
        .unwrap_or_default();
    directory.addresses.write().retain(|id, _| known.contains(id));
    balancer.update().await
}

/// Priority-banded token load as a `BackendSelection`.
#[derive(Debug)]
pub struct Selection {
    directory: Option<Arc<Directory>>,
    /// By weight.
    backends: Vec<Backend>,
}

impl Selection {
    fn backend(&self, replica: &Replica) -> Option<&Backend> {
        let weight = number_to_weight(replica.number);
        let found = self.backends.binary_search_by_key(&weight, |backend| backend.weight).ok()?;
        Some(&self.backends[found])
    }
}

impl BackendSelection for Selection {
    type Iter = Choices;
    type Config = Arc<Directory>;

    fn build_with_config(backends: &BTreeSet<Backend>, directory: &Arc<Directory>) -> Self {
        Selection { directory: Some(directory.clone()), ..Self::build(backends) }
    }

    /// Without a directory there is nobody to ask: such a selection chooses nothing.
    fn build(backends: &BTreeSet<Backend>) -> Self {
        let mut backends: Vec<Backend> = backends.iter().cloned().collect();
        backends.sort_by_key(|backend| backend.weight);
        Selection { directory: None, backends }
    }

    fn iter(self: &Arc<Self>, key: &[u8]) -> Choices {
        let number = key.try_into().ok().map(u64::from_le_bytes);
        let order = number
            .zip(self.directory.as_ref())
            .and_then(|(number, directory)| directory.shard(number).lock().remove(&number));
        Choices { selection: self.clone(), order, passed: Vec::new() }
    }
}

/// Replicas for one order, each chosen and booked as it comes.
#[derive(Debug)]
pub struct Choices {
    selection: Arc<Selection>,
    order: Option<Arc<Order>>,
    /// Those that came and were not accepted.
    passed: Vec<ReplicaId>,
}

impl BackendIter for Choices {
    fn next(&mut self) -> Option<&Backend> {
        let Choices { selection, order, passed } = self;
        let order = order.as_ref()?;
        let balancer = selection.directory.as_ref()?.balancer.upgrade()?;
        // The last one was not accepted: its booking is released before another is made.
        if let Some(Ok(refused)) = order.result.lock().take() {
            passed.push(refused.replica().id().clone());
            refused.give_up();
        }
        loop {
            let placed = if passed.is_empty() {
                balancer.place_directly(&order.ask, &order.tried)
            } else {
                let tried: Vec<ReplicaId> = order.tried.iter().chain(passed.iter()).cloned().collect();
                balancer.place_directly(&order.ask, &tried)
            };
            let reservation = match placed {
                Ok(reservation) => reservation,
                Err(refusal) => {
                    *order.result.lock() = Some(Err(refusal));
                    return None;
                }
            };
            if passed.contains(reservation.replica().id()) {
                // All the others are full or closed too.
                reservation.give_up();
                *order.result.lock() = Some(Err(NO_REPLICA));
                return None;
            }
            match selection.backend(reservation.replica()) {
                Some(backend) => {
                    *order.result.lock() = Some(Ok(reservation));
                    return Some(backend);
                }
                // Not among Pingora's backends yet: its address is not known, or the update is under way.
                None => {
                    passed.push(reservation.replica().id().clone());
                    reservation.give_up();
                }
            }
        }
    }
}

/// Chooses and books through Pingora's `select_with`: what its health checks call ill is not accepted, unless nothing
/// else is left.
///
/// # Errors
/// Why there is no place; nothing is booked then.
pub fn select(
    lb: &PingoraBalancer,
    directory: &Directory,
    ask: &Arc<Ask>,
    tried: &[ReplicaId],
) -> Result<Reservation, Refusal> {
    match select_where(lb, directory, ask, tried, false) {
        // Everything that the balancer would have taken is ill by Pingora's checks: the least bad is tried.
        Err(Refusal::NoReplica { .. }) => select_where(lb, directory, ask, tried, true),
        result => result,
    }
}

fn select_where(
    lb: &PingoraBalancer,
    directory: &Directory,
    ask: &Arc<Ask>,
    tried: &[ReplicaId],
    ill_too: bool,
) -> Result<Reservation, Refusal> {
    let order = Arc::new(Order { ask: ask.clone(), tried: tried.to_vec(), result: Mutex::new(None) });
    let number = directory.enter(order.clone());
    // The iterator ends by itself when every replica was passed.
    let accepted = lb.select_with(&number.to_le_bytes(), usize::MAX, |_, healthy| {
        healthy || ill_too || order.result.lock().as_ref().is_some_and(is_last_resort)
    });
    match order.result.lock().take() {
        Some(Ok(reservation)) if accepted.is_some() => Ok(reservation),
        Some(Ok(reservation)) => {
            reservation.give_up();
            Err(NO_REPLICA)
        }
        Some(Err(refusal)) => Err(refusal),
        None => Err(NO_REPLICA),
    }
}

/// The balancer chose an ill replica because all are.
fn is_last_resort(placed: &Result<Reservation, Refusal>) -> bool {
    placed.as_ref().is_ok_and(|reservation| reservation.replica().gate() == Gate::Ill)
}

/// Has the balancer make all its choices through Pingora, those for waiting requests included.
#[allow(missing_debug_implementations)]
pub struct PingoraPlacer {
    pub load_balancer: Arc<PingoraBalancer>,
    pub directory: Arc<Directory>,
}

impl Placer for PingoraPlacer {
    fn place(&self, _: &Arc<Balancer>, ask: &Arc<Ask>, tried: &[ReplicaId]) -> Result<Reservation, Refusal> {
        select(&self.load_balancer, &self.directory, ask, tried)
    }
}
