//! One replica as the fleet keeps it: its health, its client, what it said of itself, and the tasks that ask it.

mod own;
mod probe;
mod scrape;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use arc_swap::{ArcSwap, ArcSwapOption};
use parking_lot::{Mutex, ReentrantMutex};
use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use tracing::{error, info, warn};

use crate::balance::{Balancer, Gate};
use crate::config::{self, ReplicaSpec};
use crate::units::{Clock, ModelName, ReplicaId, Time};

use crate::fleet::checks::Members;
use crate::fleet::client::Client;
use crate::fleet::events::TrafficEvent;
use crate::fleet::facts::Facts;
use crate::fleet::health::{self, Effect, Machine, ProbeOutcome, Rules, State};

/// What of the configuration the members work by.
#[derive(Clone, Debug)]
pub(super) struct Settings {
    pub health: config::Health,
    pub scrape: config::Scrape,
    pub warmup: config::Warmup,
    /// Our own warm-up requests wait as long as a client's would.
    pub first_byte_timeout: Duration,
    pub drain_timeout: Duration,
}

/// What all members share.
#[derive(Debug)]
pub(super) struct Home {
    pub balancer: Arc<Balancer>,
    pub clock: Arc<dyn Clock>,
    pub runtime: Handle,
    pub settings: ArcSwap<Settings>,
    /// Everybody; emptied when the fleet ends, since members know their home.
    pub members: Members,
    /// Wakes the round of probes.
    pub kick: tokio::sync::Notify,
    /// Wakes the fleet where a member's facts change what the balancer must be told.
    pub changed: tokio::sync::Notify,
}

impl Home {
    /// Whether the pools that `member` serves can spare it.
    fn may_eject(&self, member: &Member) -> bool {
        let members = self.members.load();
        let spec = member.spec.load();
        let cap = self.settings.load().health.ejection_cap;
        spec.models.iter().all(|model| {
            let pool = members.values().filter(|m| m.spec.load().models.contains(model));
            let (size, out) =
                pool.fold((0, 0), |(size, out), m| (size + 1, out + usize::from(m.id != member.id && m.ejected())));
            health::may_eject(size, out, cap)
        })
    }

    /// Whether each pool that `member` serves has another that is open and known to work.
    fn can_wait_for(&self, member: &Member) -> bool {
        let members = self.members.load();
        let spec = member.spec.load();
        spec.models.iter().all(|model| {
            members.values().any(|other| {
                other.id != member.id
                    && other.proven.load(Relaxed)
                    && other.spec.load().models.contains(model)
                    && other.state().0 == State::Open
            })
        })
    }
}

/// A member's last scrape, for people.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize)]
pub struct ScrapeStatus {
    pub ok: u64,
    pub failed: u64,
    pub running: Option<f64>,
    pub waiting: Option<f64>,
    pub kv_use: Option<f64>,
    pub refusals: Option<f64>,
}

/// One replica.
#[derive(Debug)]
pub(super) struct Member {
    pub id: ReplicaId,
    /// As its source gives it.
    pub spec: ArcSwap<ReplicaSpec>,
    pub address: ArcSwapOption<SocketAddr>,
    client: ArcSwapOption<Client>,
    machine: Mutex<Machine>,
    /// Held while the gate is brought to where the machine stands, so that an older state is never set last.
    gates: ReentrantMutex<()>,
    /// Drained by hand, beside what its spec says.
    pub drained: AtomicBool,
    pub facts: ArcSwap<Facts>,
    facts_at: AtomicU64,
    /// When data was last seen, and whether the machine must hear of it beyond that.
    alive_at: AtomicU64,
    attentive: AtomicBool,
    /// Whether data ever came from it.
    proven: AtomicBool,
    probing: AtomicBool,
    kicked: AtomicBool,
    due_at: AtomicU64,
    probed_at: AtomicU64,
    generation_at: AtomicU64,
    warming: AtomicBool,
    pub scraped: Mutex<ScrapeStatus>,
    tasks: Mutex<Vec<JoinHandle<()>>>,
    home: Arc<Home>,
}

impl Drop for Member {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Member {
    pub fn new(spec: ReplicaSpec, home: Arc<Home>) -> Arc<Member> {
        let settings = home.settings.load();
        let seed = xxhash_rust::xxh3::xxh3_64(spec.id.as_str().as_bytes());
        let machine = Machine::new(Rules::new(&settings.health, &settings.warmup), seed);
        let member = Arc::new(Member {
            id: spec.id.clone(),
            spec: ArcSwap::from_pointee(spec),
            address: ArcSwapOption::empty(),
            client: ArcSwapOption::empty(),
            machine: Mutex::new(machine),
            gates: ReentrantMutex::new(()),
            drained: AtomicBool::new(false),
            facts: ArcSwap::default(),
            facts_at: AtomicU64::new(0),
            alive_at: AtomicU64::new(0),
            attentive: AtomicBool::new(true),
            proven: AtomicBool::new(false),
            probing: AtomicBool::new(false),
            kicked: AtomicBool::new(true),
            due_at: AtomicU64::new(0),
            probed_at: AtomicU64::new(0),
            generation_at: AtomicU64::new(home.clock.now().0),
            warming: AtomicBool::new(false),
            scraped: Mutex::default(),
            tasks: Mutex::default(),
            home: home.clone(),
        });
        let scraper = home.runtime.spawn(scrape::scrape_loop(Arc::downgrade(&member), home.clone()));
        member.tasks.lock().push(scraper);
        member
    }

    /// Ends its tasks.
    pub fn stop(&self) {
        self.tasks.lock().drain(..).for_each(|t| t.abort());
    }

    /// Takes a changed spec of the same server.
    pub fn set_spec(&self, spec: ReplicaSpec) {
        if self.spec.load().models != spec.models {
            self.facts_at.store(0, Relaxed);
        }
        self.spec.store(Arc::new(spec));
        self.client.store(None);
        self.kick();
    }

    /// Forgets what was read of its files. The client that has the old ones serves until the next request of ours.
    pub fn read_files_again(&self) {
        let spec = self.spec.load();
        if spec.tls.is_some() || spec.api_key_file.is_some() {
            self.client.store(None);
            self.kick();
        }
    }

    /// Takes new rules and says again whether it drains.
    pub fn set_rules(&self, settings: &Settings) {
        let draining = self.spec.load().draining || self.drained.load(Relaxed);
        self.change(|m, _| {
            m.set_rules(Rules::new(&settings.health, &settings.warmup));
            m.set_draining(draining);
        });
    }

    /// Takes the address its host has now. `Err` where it has none.
    pub fn set_address(&self, found: Result<SocketAddr, String>) {
        match found {
            Ok(address) => {
                let old = self.address.load();
                if old.as_deref() != Some(&address) {
                    if let Some(old) = old.as_deref() {
                        info!(replica = %self.id, %old, new = %address, "its host has another address");
                    }
                    self.address.store(Some(Arc::new(address)));
                    self.client.store(None);
                    self.kick();
                }
            }
            // An address that was good stays: the name server may be what failed.
            Err(_) if self.address.load().is_some() => {}
            Err(why) => self.change(|m, now| m.probe(&ProbeOutcome::Bad(why), now)),
        }
    }

    /// Asks for a probe now.
    pub fn kick(&self) {
        self.kicked.store(true, Relaxed);
        self.home.kick.notify_one();
    }

    pub fn state(&self) -> (State, String, bool) {
        let machine = self.machine.lock();
        (machine.state(), machine.reason().to_owned(), machine.probed())
    }

    pub fn ejected(&self) -> bool {
        self.machine.lock().ejected()
    }

    /// Whether the server answers, for Pingora's own notion of health.
    pub fn answers(&self) -> bool {
        self.machine.lock().answers()
    }

    /// When it was last probed.
    pub fn probed_at(&self) -> Option<Time> {
        Some(Time(self.probed_at.load(Relaxed))).filter(|t| t.0 > 0)
    }

    /// Changes the machine and carries the change to the balancer's gate.
    pub fn change<T>(&self, act: impl FnOnce(&mut Machine, Time) -> T) -> T {
        let now = self.home.clock.now();
        let mut machine = self.machine.lock();
        let before = machine.state();
        let result = act(&mut machine, now);
        let after = machine.state();
        // While it is open and nothing is counted, arriving data need not take the lock.
        self.attentive.store(after != State::Open || !machine.quiet(), Relaxed);
        if before != after {
            let reason = machine.reason();
            match after {
                State::Ill | State::Ejected => {
                    warn!(replica = %self.id, from = before.label(), to = after.label(), reason, "replica out")
                }
                _ => info!(replica = %self.id, from = before.label(), to = after.label(), reason, "replica state"),
            }
        }
        drop(machine);
        self.sync_gate();
        result
    }

    /// Brings the balancer's gate to where the machine stands. The machine is not locked meanwhile: an opening gate
    /// serves waiting requests on this very thread, and what they do may come back here.
    fn sync_gate(&self) {
        let _in_order = self.gates.lock();
        let Some(replica) = self.home.balancer.replica(&self.id) else { return };
        let (gate, ramp) = {
            let machine = self.machine.lock();
            (machine.gate(), machine.ramp())
        };
        if replica.gate() == gate {
            return;
        }
        if gate != Gate::Draining {
            // Said before anybody is sent there again.
            replica.set_overdue(false);
        }
        replica.set_gate(gate, ramp);
    }

    /// Takes what traffic tells.
    pub fn traffic(&self, event: &TrafficEvent) -> Effect {
        if matches!(event, TrafficEvent::Alive | TrafficEvent::Completed) {
            self.proven.store(true, Relaxed);
        }
        if *event == TrafficEvent::Alive {
            self.alive_at.store(self.home.clock.now().0, Relaxed);
            if !self.attentive.load(Relaxed) {
                return Effect::default();
            }
        }
        let may_eject = !matches!(event, TrafficEvent::Alive | TrafficEvent::Completed) && self.home.may_eject(self);
        let effect = self.change(|m, now| m.traffic(event, now, may_eject));
        if effect.probe_now {
            self.kick();
        }
        effect
    }

    pub fn client(&self) -> Result<Arc<Client>, String> {
        if let Some(client) = self.client.load_full() {
            return Ok(client);
        }
        let address = self.address.load_full().ok_or("its host has no address")?;
        let client = Arc::new(Client::new(&self.spec.load(), *address)?);
        self.client.store(Some(client.clone()));
        Ok(client)
    }

    fn take_facts(&self, facts: Facts, spec: &ReplicaSpec) {
        let old = self.facts.load_full();
        if facts == *old {
            return;
        }
        let models_changed = (facts.engine, &facts.models) != (old.engine, &old.models);
        self.facts.store(Arc::new(facts));
        self.tell_limits();
        if models_changed {
            let missing: Vec<&ModelName> = spec.models.iter().filter(|m| !self.lists(m)).collect();
            if !missing.is_empty() && !self.facts.load().models.is_empty() {
                let (served, missing) = (self.facts.load().models.join(", "), list(&missing));
                error!(replica = %self.id, %missing, %served, "a configured model is not among those the replica serves");
            }
            self.home.changed.notify_one();
        }
    }

    /// Tells the balancer the limits that the engine stated.
    pub fn tell_limits(&self) {
        let facts = self.facts.load();
        if let Some(replica) = self.home.balancer.replica(&self.id) {
            replica.set_engine_limits(facts.window, facts.capacity);
        }
    }

    fn lists(&self, model: &ModelName) -> bool {
        self.facts.load().models.iter().any(|m| m == model.as_str())
    }

    /// Configured models that the replica would refuse.
    pub fn unserved<'s>(&self, spec: &'s ReplicaSpec) -> Vec<&'s ModelName> {
        if !self.facts.load().strict(spec.engine) {
            return Vec::new();
        }
        spec.models.iter().filter(|m| !self.lists(m)).collect()
    }
}

fn list(names: &[&ModelName]) -> String {
    names.iter().map(|n| format!("`{n}`")).collect::<Vec<_>>().join(", ")
}
