//! The balancer: replicas' books, the policy, the bands' queues.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use arc_swap::ArcSwap;
use parking_lot::Mutex;

use crate::config::{Balance, BandSpec, Regions, ReplicaSpec};
use crate::units::{Band, Clock, ModelName, NameMap, ReplicaId, Time, Tokens};

use super::admission;
use super::ask::{Ask, Refusal};
use super::fit::{Demand, Terms};
use super::pool::{Kept, Pool};
use super::queue::{self, Ahead};
use super::replica::{Home, Replica, ReplicaView};
use super::reservation::Reservation;

/// What a configuration says about balancing.
#[derive(Clone, Debug)]
pub struct Settings {
    pub balance: Balance,
    /// Never empty.
    pub bands: Vec<BandSpec>,
    pub regions: Regions,
}

/// Called once with what became of a waiting request. Runs on the thread that made room: it must not block.
pub type Waiter = Box<dyn FnOnce(Result<Reservation, Refusal>) + Send>;

/// What became of a request that was let in.
#[derive(Debug)]
pub enum Admission {
    /// Chosen and booked.
    Placed(Reservation),
    /// In its band's queue; dropping the ticket leaves it.
    Waiting(Ticket),
    Refused(Refusal),
}

/// A place in a queue. Dropping it gives the place up; the waiter is then never called.
#[derive(Debug)]
pub struct Ticket {
    pub(super) kept: Arc<Kept>,
    pub(super) home: Arc<Home>,
    pub(super) id: u64,
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let left = self.kept.queue.lock().remove(self.id);
        if left.is_some() {
            self.home.waiting.fetch_sub(1, Relaxed);
            // It may be the one that a replica is kept for; the next look decides that anew.
            self.kept.keep.release();
        }
        // The waiter is dropped here, outside the lock.
        drop(left);
    }
}

/// How the shell chooses and books: through Pingora's load balancer, whose health checks have a say.
pub trait Placer: Send + Sync {
    /// Chooses and books in one step, by [`Balancer::place_directly`] in the end.
    ///
    /// # Errors
    /// Why there is no place; nothing is booked then.
    fn place(&self, balancer: &Arc<Balancer>, ask: &Arc<Ask>, tried: &[ReplicaId]) -> Result<Reservation, Refusal>;
}

/// A configuration in force.
#[derive(Debug)]
pub(super) struct State {
    pub settings: Settings,
    pub replicas: Arc<[Arc<Replica>]>,
    pools: NameMap<ModelName, Arc<Pool>>,
    /// The same, by name, for whoever walks through them.
    pub pools_in_order: Vec<Arc<Pool>>,
}

impl State {
    pub fn pool(&self, model: &ModelName) -> Option<&Arc<Pool>> {
        self.pools.get(model)
    }

    /// What an ask means by these settings at this moment.
    pub fn demand<'a>(&self, ask: &'a Ask, now: Time) -> Demand<'a> {
        let band = queue::band(&self.settings.bands, usize::from(ask.band.0));
        Demand::new(ask, band, self.settings.balance.ttft_weight, now)
    }
}

/// The balancer.
pub struct Balancer {
    pub(super) home: Arc<Home>,
    pub(super) state: ArcSwap<State>,
    applying: Mutex<()>,
    placer: OnceLock<Box<dyn Placer>>,
    seed: AtomicU64,
    next_number: AtomicU32,
    ticks: AtomicUsize,
}

impl fmt::Debug for Balancer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Balancer").field("clock", &self.home.clock).finish_non_exhaustive()
    }
}

impl Balancer {
    /// A balancer without replicas. `seed` feeds the random policies.
    pub fn new(settings: Settings, clock: Arc<dyn Clock>, seed: u64) -> Arc<Balancer> {
        let state = State { settings, replicas: Arc::from([]), pools: NameMap::default(), pools_in_order: Vec::new() };
        Arc::new_cyclic(|me| Balancer {
            home: Arc::new(Home { clock, waiting: AtomicUsize::new(0), balancer: me.clone() }),
            state: ArcSwap::from_pointee(state),
            applying: Mutex::new(()),
            placer: OnceLock::new(),
            seed: AtomicU64::new(seed),
            next_number: AtomicU32::new(0),
            ticks: AtomicUsize::new(0),
        })
    }

    /// Takes a new configuration: books are kept by replica id, replicas not named drain and go. Running requests
    /// keep their reservations; what waits for a model that is gone is refused.
    pub fn apply(self: &Arc<Self>, settings: Settings, replicas: &[ReplicaSpec]) {
        {
            let _one_at_a_time = self.applying.lock();
            let before = self.state.load_full();
            let distance = |spec: &ReplicaSpec| distance(&settings.regions, spec);
            let mut all: Vec<Arc<Replica>> = Vec::with_capacity(replicas.len());
            for spec in replicas {
                if all.iter().any(|replica| replica.id() == &spec.id) {
                    continue;
                }
                let known = before.replicas.iter().find(|replica| replica.id() == &spec.id);
                let spec = Arc::new(spec.clone());
                let apart = distance(&spec);
                match known {
                    Some(replica) => {
                        replica.configure(spec, apart);
                        all.push(replica.clone());
                    }
                    None => {
                        let number = self.next_number.fetch_add(1, Relaxed);
                        all.push(Replica::new(spec, number, apart, self.home.clone()));
                    }
                }
            }
            let named = all.len();
            for replica in before.replicas.iter() {
                if !all[..named].iter().any(|kept| kept.id() == replica.id()) {
                    replica.leave();
                    if replica.figures.requests() > 0 {
                        all.push(replica.clone());
                    }
                }
            }
            self.install(settings, all, &before);
        }
        self.serve();
    }

    fn install(&self, settings: Settings, replicas: Vec<Arc<Replica>>, before: &State) {
        let mut members: HashMap<ModelName, Vec<Arc<Replica>>> = HashMap::new();
        for replica in &replicas {
            for model in &replica.spec().models {
                members.entry(model.clone()).or_default().push(replica.clone());
            }
        }
        // A model that still has somebody waiting keeps its (empty) pool until they are gone.
        for pool in &before.pools_in_order {
            if !pool.kept.queue.lock().is_empty() {
                members.entry(pool.model.clone()).or_default();
            }
        }
        let pools: NameMap<ModelName, Arc<Pool>> = members
            .into_iter()
            .map(|(model, mut members)| {
                members.sort_by_key(|replica| replica.number);
                let kept =
                    before.pool(&model).map_or_else(|| Arc::new(Kept::new(self.next_seed(&model))), |p| p.kept.clone());
                let pool =
                    Pool { model: model.clone(), members: members.into(), policy: settings.balance.policy, kept };
                (model, Arc::new(pool))
            })
            .collect();
        let mut pools_in_order: Vec<Arc<Pool>> = pools.values().cloned().collect();
        pools_in_order.sort_by(|a, b| a.model.cmp(&b.model));
        self.state.store(Arc::new(State { settings, replicas: replicas.into(), pools, pools_in_order }));
    }

    fn next_seed(&self, model: &ModelName) -> u64 {
        xxhash_rust::xxh3::xxh3_64_with_seed(model.as_str().as_bytes(), self.seed.load(Relaxed))
    }

    /// All replicas, draining ones included, in the configuration's order.
    pub fn replicas(&self) -> Arc<[Arc<Replica>]> {
        self.state.load().replicas.clone()
    }

    /// The replica with this id.
    pub fn replica(&self, id: &ReplicaId) -> Option<Arc<Replica>> {
        self.state.load().replicas.iter().find(|replica| replica.id() == id).cloned()
    }

    /// Has all choices made through `placer`, those for waiting requests included. Once; later calls change nothing.
    pub fn set_placer(&self, placer: Box<dyn Placer>) {
        let _ = self.placer.set(placer);
    }

    /// Chooses and books in one step, now or not at all; replicas in `tried` are left out while others are there.
    ///
    /// # Errors
    /// Why there is no place; nothing is booked then.
    pub fn place(self: &Arc<Self>, ask: &Arc<Ask>, tried: &[ReplicaId]) -> Result<Reservation, Refusal> {
        match self.placer.get() {
            Some(placer) => placer.place(self, ask, tried),
            None => self.place_directly(ask, tried),
        }
    }

    /// The same without a placer: the choice itself.
    ///
    /// # Errors
    /// Why there is no place; nothing is booked then.
    pub fn place_directly(&self, ask: &Arc<Ask>, tried: &[ReplicaId]) -> Result<Reservation, Refusal> {
        let state = self.state.load();
        let Some(pool) = state.pool(&ask.model) else {
            return Err(NO_REPLICA);
        };
        let terms = if tried.is_empty() { admission::terms() } else { Terms::NOW };
        let demand = state.demand(ask, self.home.clock.now()).on(terms);
        match pool.place(&demand, tried) {
            Ok(booked) => Ok(Reservation::new(booked, ask.clone())),
            Err(why) => Err(pool.refusal(&demand, why, Ahead::default())),
        }
    }

    /// Who would take it now and at which score, without booking it; `None` where it would not be placed. For
    /// explaining and measuring: by the time of a booking it may be another.
    pub fn cheapest(&self, ask: &Ask) -> Option<(Arc<Replica>, f64)> {
        let state = self.state.load();
        let demand = state.demand(ask, self.home.clock.now());
        state.pool(&ask.model)?.cheapest(&demand)
    }

    /// Serves the queues, expires waits, ages bands, decays bookings that send no tokens. Cheap; called by a timer
    /// (every 20 ms live, at event times in the simulator) and by every release.
    pub fn tick(self: &Arc<Self>) {
        let state = self.state.load_full();
        let now = self.home.clock.now();
        for replica in state.replicas.iter() {
            replica.pass_time(now);
        }
        let tick = self.ticks.fetch_add(1, Relaxed);
        if tick.is_multiple_of(SWEEP_TICKS) {
            for pool in &state.pools_in_order {
                pool.kept.prefixes.sweep(tick / SWEEP_TICKS, &pool.members);
            }
        }
        if state.replicas.iter().any(|replica| replica.is_leaving() && replica.figures.requests() == 0) {
            self.forget_gone();
        }
        if self.home.waiting.load(Relaxed) > 0 {
            self.serve();
        }
    }

    /// Drops replicas that are no longer configured and have nothing left to finish.
    fn forget_gone(&self) {
        let _one_at_a_time = self.applying.lock();
        let before = self.state.load_full();
        let stays = |replica: &&Arc<Replica>| !replica.is_leaving() || replica.figures.requests() > 0;
        let left: Vec<Arc<Replica>> = before.replicas.iter().filter(stays).cloned().collect();
        self.install(before.settings.clone(), left, &before);
    }

    /// The largest window among a model's replicas; `None` where none states one.
    pub fn window(&self, model: &ModelName) -> Option<Tokens> {
        self.state.load().pool(model)?.window()
    }

    /// What `tell` first makes of one of a model's replicas, those asked first that are there for longest.
    pub fn find_member<T>(&self, model: &ModelName, tell: impl FnMut(&Arc<Replica>) -> Option<T>) -> Option<T> {
        self.state.load().pool(model)?.members.iter().find_map(tell)
    }

    /// Every replica's books, for the admin API and metrics.
    pub fn views(&self) -> Vec<ReplicaView> {
        self.state.load().replicas.iter().map(|replica| replica.view()).collect()
    }

    /// Waiting requests by model and band.
    pub fn queue_depths(&self) -> Vec<(ModelName, Band, usize)> {
        let state = self.state.load();
        let bands = 0..state.settings.bands.len().min(256);
        let mut depths = Vec::new();
        for pool in &state.pools_in_order {
            let queue = pool.kept.queue.lock();
            depths.extend(bands.clone().map(|band| {
                let band = Band(band as u8);
                (pool.model.clone(), band, queue.depth(band))
            }));
        }
        depths
    }

    /// The priority an engine that schedules by priority is given for a band: lower is sooner, as vLLM has it.
    pub fn engine_priority(band: Band) -> i64 {
        i64::from(band.0)
    }
}

/// No replica may be chosen; a probe or two may change that.
pub(super) const NO_REPLICA: Refusal = Refusal::NoReplica { retry_after: Duration::from_secs(5) };
/// One shard of the prefix indexes is swept at every so many ticks: all of them in a minute or so, live.
const SWEEP_TICKS: usize = 50;

/// How far a replica's region is from here; nothing where either is not said.
fn distance(regions: &Regions, spec: &ReplicaSpec) -> Duration {
    match (&regions.local, &spec.region) {
        (Some(local), Some(region)) if local != region => {
            regions.distance.get(region).copied().unwrap_or(DISTANCE_UNKNOWN)
        }
        _ => Duration::ZERO,
    }
}

/// Another region whose distance nobody wrote down: a continent away.
const DISTANCE_UNKNOWN: Duration = Duration::from_millis(100);
