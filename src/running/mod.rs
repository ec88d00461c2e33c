//! A running balancer: the configuration in force, the books, the fleet, and what happens on a reload.
//!
//! The proxy and the admin API both hold one [`Running`]. An [`Epoch`] is one configuration with what was built from
//! it; a request keeps the epoch that it began with, so a reload never changes a request under way.

pub mod epoch;
pub mod reload;
pub mod tenants;
mod view;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use arc_swap::ArcSwap;
use parking_lot::Mutex;

use crate::balance::quota::Quotas;
use crate::balance::{Balancer, Settings};
use crate::config::Config;
use crate::fleet::Fleet;
use crate::observe::Metrics;
use crate::units::Clock;
use crate::weigh::{Histories, Weigher};

pub use epoch::{Epoch, ModelEntry};
pub use reload::{ReloadOutcome, Revision};

/// Everything one process shares.
pub struct Running {
    pub clock: Arc<dyn Clock>,
    pub balancer: Arc<Balancer>,
    pub metrics: Arc<Metrics>,
    pub histories: Arc<Histories>,
    /// What tenants used of their limits; kept over reloads.
    pub quotas: Quotas,
    epoch: ArcSwap<Epoch>,
    fleet: OnceLock<Arc<Fleet>>,
    config_path: PathBuf,
    revisions: Mutex<std::collections::VecDeque<Revision>>,
    reloading: Mutex<()>,
    draining: AtomicBool,
    listening: AtomicBool,
    in_flight: Arc<AtomicUsize>,
    newcomers: Arc<AtomicUsize>,
}

impl std::fmt::Debug for Running {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Running").field("config_path", &self.config_path).finish_non_exhaustive()
    }
}

/// One of those that are counted; dropping it says that it is over.
#[derive(Debug)]
pub struct Counted(Arc<AtomicUsize>);

impl Counted {
    fn among(count: &Arc<AtomicUsize>) -> Counted {
        count.fetch_add(1, Ordering::AcqRel);
        Counted(count.clone())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Running {
    /// Builds what a configuration asks for. Nothing listens yet.
    ///
    /// # Errors
    /// A tenant's key file that cannot be read.
    pub fn new(config: Config, config_path: PathBuf, clock: Arc<dyn Clock>, seed: u64) -> anyhow::Result<Arc<Running>> {
        let settings =
            Settings { balance: config.balance.clone(), bands: config.bands.clone(), regions: config.regions.clone() };
        let balancer = Balancer::new(settings.clone(), clock.clone(), seed);
        balancer.apply(settings, &config.replicas);
        let histories = Arc::new(Histories::default());
        histories.load(&config.models);
        let weigher = Weigher::new(&config, histories.clone(), None, clock.clone());
        let quotas = Quotas::new(&config.tenants, clock.now());
        let metrics = Arc::new(Metrics::new());
        let epoch = Epoch::new(1, config, weigher, None)?;
        metrics.config_revision.set(1);
        metrics.config_last_success.set(reload::unix_seconds());
        let first = Revision::of(&epoch, Vec::new());
        Ok(Arc::new(Running {
            clock,
            balancer,
            metrics,
            histories,
            quotas,
            epoch: ArcSwap::from_pointee(epoch),
            fleet: OnceLock::new(),
            config_path,
            revisions: Mutex::new(std::collections::VecDeque::from([first])),
            reloading: Mutex::new(()),
            draining: AtomicBool::new(false),
            listening: AtomicBool::new(false),
            in_flight: Arc::default(),
            newcomers: Arc::default(),
        }))
    }

    /// The configuration in force, with what was built from it.
    pub fn epoch(&self) -> Arc<Epoch> {
        self.epoch.load_full()
    }

    /// The replicas' keeper; set once, when the service starts.
    pub fn fleet(&self) -> Option<&Arc<Fleet>> {
        self.fleet.get()
    }

    /// Gives the replicas' keeper; a second one is ignored.
    pub fn set_fleet(&self, fleet: Arc<Fleet>) {
        self.epoch().weigher.set_replica_ask(fleet.clone());
        if self.fleet.set(fleet).is_err() {
            tracing::error!("a second fleet was given and ignored");
        }
    }

    /// A request begins.
    pub fn enter(&self) -> Counted {
        Counted::among(&self.in_flight)
    }

    /// Requests under way.
    pub fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::Acquire)
    }

    /// A client has connected.
    pub fn newcomer(&self) -> Counted {
        Counted::among(&self.newcomers)
    }

    /// Connections whose first request is awaited or under way.
    pub fn newcomers(&self) -> usize {
        self.newcomers.load(Ordering::Acquire)
    }

    /// Whether the process is on its way out: not ready, connections closed after their answer.
    pub fn draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }

    /// The process is on its way out.
    pub fn start_draining(&self) {
        if !self.draining.swap(true, Ordering::AcqRel) {
            tracing::info!(in_flight = self.in_flight(), "draining: not ready from now on");
        }
    }

    /// Writes what was learned of answer lengths, so that a restart does not begin anew. Blocking.
    pub fn save_histories(&self) {
        if let Err(e) = self.histories.save(&self.epoch().config.models) {
            tracing::warn!(error = %e, "histories of answer lengths were not saved");
        }
    }

    /// The process ends now: what was learned is written, and the log's last lines.
    pub fn on_exit(&self) {
        self.save_histories();
        crate::observe::lines::flush();
    }

    /// The listeners are bound.
    pub fn set_listening(&self) {
        self.listening.store(true, Ordering::Release);
    }

    /// Ready: bound, not draining, every tokenizer loaded or failed, every replica's first probe over.
    pub fn ready(&self) -> Result<(), &'static str> {
        if self.draining() {
            return Err("draining");
        }
        if !self.listening.load(Ordering::Acquire) {
            return Err("listeners are not bound yet");
        }
        if !self.epoch().weigher.ready() {
            return Err("tokenizers are loading");
        }
        match self.fleet() {
            Some(fleet) if fleet.ready() => Ok(()),
            _ => Err("replicas have not been probed yet"),
        }
    }
}
