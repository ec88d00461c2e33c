//! The balancer: replicas' books, the policy, the bands' queues.

use std::fmt;
use std::sync::Arc;

use crate::config::{Balance, BandSpec, Regions, ReplicaSpec};
use crate::units::{Clock, ModelName, ReplicaId, Tokens};

use super::ask::{Ask, Refusal};
use super::replica::{Replica, ReplicaView};
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
pub struct Ticket {}

/// The balancer.
pub struct Balancer {
    clock: Arc<dyn Clock>,
}

impl fmt::Debug for Balancer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Balancer").field("clock", &self.clock).finish_non_exhaustive()
    }
}

impl Balancer {
    /// A balancer without replicas. `seed` feeds the random policies.
    pub fn new(settings: Settings, clock: Arc<dyn Clock>, seed: u64) -> Arc<Balancer> {
        let _ = (settings, seed, &clock);
        todo!("balance")
    }

    /// Takes a new configuration: books are kept by replica id, replicas not named drain and go. Running requests
    /// keep their reservations.
    pub fn apply(&self, settings: Settings, replicas: &[ReplicaSpec]) {
        let _ = (settings, replicas);
        todo!("balance")
    }

    /// All replicas, draining ones included, in the configuration's order.
    pub fn replicas(&self) -> Arc<[Arc<Replica>]> {
        todo!("balance")
    }

    /// The replica with this id.
    pub fn replica(&self, id: &ReplicaId) -> Option<Arc<Replica>> {
        let _ = id;
        todo!("balance")
    }

    /// Chooses and books in one step, now or not at all; replicas in `tried` are left out while others are there.
    ///
    /// # Errors
    /// Why there is no place; nothing is booked then.
    pub fn place(self: &Arc<Self>, ask: &Arc<Ask>, tried: &[ReplicaId]) -> Result<Reservation, Refusal> {
        let _ = (ask, tried);
        todo!("balance")
    }

    /// Lets a request in: placed at once, put into its band's queue, or refused. `waiter` is called only where the
    /// answer is [`Admission::Waiting`], exactly once, unless the ticket is dropped first.
    pub fn admit(self: &Arc<Self>, ask: Arc<Ask>, waiter: Waiter) -> Admission {
        let _ = (ask, waiter);
        todo!("balance")
    }

    /// Serves the queues, expires waits, ages bands, decays bookings that send no tokens. Cheap; called by a timer
    /// (every 20 ms live, at event times in the simulator) and by every release.
    pub fn tick(self: &Arc<Self>) {
        todo!("balance")
    }

    /// The largest window among a model's replicas; `None` where none states one.
    pub fn window(&self, model: &ModelName) -> Option<Tokens> {
        let _ = model;
        todo!("balance")
    }

    /// Every replica's books, for the admin API and metrics.
    pub fn views(&self) -> Vec<ReplicaView> {
        todo!("balance")
    }

    /// Waiting requests by model and band.
    pub fn queue_depths(&self) -> Vec<(ModelName, crate::units::Band, usize)> {
        todo!("balance")
    }
}
