//! The fleet as a whole: who belongs to it, from every source, and what is told to the balancer.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use tracing::{info, warn};

use crate::balance::{Balancer, Replica, Settings as BalanceSettings};
use crate::config::{self, Config, ReplicaSpec};
use crate::units::{Clock, ModelName, NameMap, ReplicaId};

use super::bounds::Bounds;
use super::checks::{Checks, Members};
use super::discovery::{self, Source, SourceStatus};
use super::events::TrafficEvent;
use super::health::State;
use super::member::{Home, Member, ScrapeStatus, Settings};

/// How often host names in replicas' URLs are looked up again.
const RESOLVE_EVERY: Duration = Duration::from_secs(10);

/// A round of checks looks whose probe is due so many times an interval, within bounds.
const ROUNDS_PER_INTERVAL: u32 = 8;
const ROUND_MIN: Duration = Duration::from_millis(20);
const ROUND_MAX: Duration = Duration::from_secs(1);

/// The replicas' keeper.
#[derive(Debug)]
pub struct Fleet {
    home: Arc<Home>,
    members: Members,
    checks: Checks,
    bounds: Bounds,
    sources: Mutex<Sources>,
    tasks: Mutex<Vec<JoinHandle<()>>>,
}

/// Where the replicas come from, and what each source said last.
#[derive(Debug)]
struct Sources {
    balance: BalanceSettings,
    /// The list, or what the replicas' file held when the configuration was read.
    listed: Vec<ReplicaSpec>,
    discovery: Option<Source>,
    /// What the running discovery was started with.
    begun: Option<(config::Discovery, BTreeSet<ModelName>)>,
}

/// A replica as the fleet sees it.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct ReplicaStatus {
    pub id: ReplicaId,
    pub state: State,
    /// Why it is not open; empty where it is.
    pub reason: String,
    pub address: Option<SocketAddr>,
    pub engine: config::Engine,
    /// Model ids that it lists.
    pub models: Vec<String>,
    /// Seconds since its last probe ended; `None` before the first.
    pub probed_seconds_ago: Option<f64>,
    pub scrape: ScrapeStatus,
}

/// What the fleet shows of itself.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct FleetStatus {
    pub replicas: Vec<ReplicaStatus>,
    pub sources: Vec<SourceStatus>,
}

impl Fleet {
    /// Starts keeping a configuration's replicas: probes, scrapes, discovery. Tells the balancer who is there and
    /// sets every gate from then on.
    ///
    /// # Panics
    /// Outside of a tokio runtime; its tasks run on the current one.
    pub fn start(config: &Config, balancer: Arc<Balancer>, clock: Arc<dyn Clock>) -> Arc<Fleet> {
        let members: Members = Arc::new(ArcSwap::from_pointee(NameMap::default()));
        let home = Arc::new(Home {
            members: members.clone(),
            balancer,
            clock,
            runtime: Handle::current(),
            settings: ArcSwap::from_pointee(settings(config)),
            kick: tokio::sync::Notify::new(),
            changed: tokio::sync::Notify::new(),
        });
        let fleet = Arc::new(Fleet {
            checks: Checks::new(&home.balancer, members.clone()),
            members,
            bounds: Bounds::default(),
            sources: Mutex::new(Sources {
                balance: balance_settings(config),
                listed: Vec::new(),
                discovery: None,
                begun: None,
            }),
            tasks: Mutex::default(),
            home,
        });
        fleet.apply(config, balance_settings(config));
        let tasks = [
            fleet.home.runtime.spawn(rounds(fleet.clone())),
            fleet.home.runtime.spawn(resolve_loop(fleet.clone())),
            fleet.home.runtime.spawn(follow(fleet.clone())),
        ];
        fleet.tasks.lock().extend(tasks);
        fleet
    }

    /// Takes a new configuration. Replicas that stay keep their health; those whose address is another start anew.
    pub fn apply(self: &Arc<Self>, config: &Config, balance: BalanceSettings) {
        self.home.settings.store(Arc::new(settings(config)));
        {
            let mut sources = self.sources.lock();
            sources.balance = balance;
            sources.listed = config.replicas.clone();
            let models: BTreeSet<ModelName> = config.models.iter().map(|m| m.name.clone()).collect();
            let begin = config.discovery.clone().map(|d| (d, models));
            // A source of the same configuration goes on; another starts with what the last one knew.
            if sources.begun != begin {
                let last = sources.discovery.take().map(|s| s.last()).unwrap_or_default();
                sources.discovery =
                    begin.as_ref().map(|(discovery, models)| discovery::start(discovery, models, last, &self.home));
                sources.begun = begin;
            }
        }
        self.rebuild();
    }

    /// Reads the replicas' keys and certificates again: files are rotated in place, while the YAML stays the same.
    pub fn read_files_again(&self) {
        self.members.load().values().for_each(|member| member.read_files_again());
    }

    /// Stops probing, scraping and discovering; gates stay as they are.
    pub fn shutdown(&self) {
        self.tasks.lock().drain(..).for_each(|t| t.abort());
        self.members.load().values().for_each(|m| m.stop());
        self.sources.lock().discovery = None;
    }

    /// Takes what the proxy saw of a replica.
    pub fn report(&self, replica: &Replica, event: TrafficEvent) {
        let members = self.members.load();
        let Some(member) = members.get(replica.id()) else { return };
        let effect = member.traffic(&event);
        if let Some(until) = effect.back_off_until {
            replica.back_off_until(until);
        }
    }

    /// Lets a replica finish what runs and take no more; what still runs after `timeout`, or else after
    /// `limits.drain_timeout`, is ended. `false` where there is none of this id.
    pub fn drain(&self, id: &ReplicaId, timeout: Option<Duration>) -> bool {
        if !self.set_drained(id, true) {
            return false;
        }
        let timeout = timeout.unwrap_or(self.home.settings.load().drain_timeout);
        self.bounds.set(id, self.home.clock.now().after(timeout));
        true
    }

    /// Draining replicas whose time is over although requests still run on them; to be asked every so often.
    pub fn overdue(&self) -> Vec<ReplicaId> {
        let timeout = self.home.settings.load().drain_timeout;
        let replicas = self.home.balancer.replicas();
        self.bounds.overdue(replicas.iter().map(|r| &**r), timeout, self.home.clock.now())
    }

    /// Ends a drain by hand; a replica that its configuration drains stays drained.
    pub fn undrain(&self, id: &ReplicaId) -> bool {
        self.set_drained(id, false)
    }

    fn set_drained(&self, id: &ReplicaId, drained: bool) -> bool {
        let members = self.members.load();
        let Some(member) = members.get(id) else { return false };
        member.drained.store(drained, Relaxed);
        member.set_rules(&self.home.settings.load());
        true
    }

    /// Whether the first probe of each replica has answered or failed, and each source has said something.
    pub fn ready(&self) -> bool {
        let sources = self.sources.lock();
        let said = sources.discovery.iter().all(|s| s.status().asked);
        said && self.members.load().values().all(|m| m.state().2)
    }

    /// Where a request that is booked on a replica goes; known as long as the replica has anything to finish, although
    /// a reload may have removed it since the request was booked.
    pub fn address_of(&self, replica: &Replica) -> Option<SocketAddr> {
        self.checks.directory.address(replica)
    }

    /// A replica's resolved address; `None` while its host has none.
    pub fn address(&self, id: &ReplicaId) -> Option<SocketAddr> {
        self.members.load().get(id)?.address.load().as_deref().copied()
    }

    /// The kind of a replica's server, by its own word where the configuration leaves it open.
    pub fn engine(&self, id: &ReplicaId) -> Option<crate::config::Engine> {
        let members = self.members.load();
        let member = members.get(id)?;
        Some(member.facts.load().engine_or(member.spec.load().engine))
    }

    pub(super) fn balancer(&self) -> &Arc<Balancer> {
        &self.home.balancer
    }

    pub(super) fn member(&self, id: &ReplicaId) -> Option<Arc<Member>> {
        self.members.load().get(id).cloned()
    }

    /// A replica's state by the fleet's own words, finer than the balancer's gate.
    pub fn state(&self, id: &ReplicaId) -> Option<State> {
        Some(self.members.load().get(id)?.state().0)
    }

    /// Every source of replicas beside the list, and whether it answers.
    pub fn discovery_states(&self) -> Vec<(String, bool)> {
        self.sources().into_iter().map(|s| (s.name, s.up)).collect()
    }

    fn sources(&self) -> Vec<SourceStatus> {
        let sources = self.sources.lock();
        sources.discovery.iter().map(Source::status).collect()
    }

    /// Everything at once, for the admin API.
    pub fn status(&self) -> FleetStatus {
        let now = self.home.clock.now();
        let members = self.members.load();
        let replicas = self.home.balancer.replicas();
        let replicas = replicas.iter().filter_map(|r| members.get(r.id())).map(|m| {
            let (state, reason, _) = m.state();
            let facts = m.facts.load();
            ReplicaStatus {
                id: m.id.clone(),
                state,
                reason,
                address: m.address.load().as_deref().copied(),
                engine: facts.engine_or(m.spec.load().engine),
                models: facts.models.clone(),
                probed_seconds_ago: m.probed_at().map(|at| now.since(at).as_secs_f64()),
                scrape: m.scraped.lock().clone(),
            }
        });
        FleetStatus { replicas: replicas.collect(), sources: self.sources() }
    }

    /// Merges what the sources say, brings the members up to it, and tells the balancer.
    fn rebuild(self: &Arc<Self>) {
        let sources = self.sources.lock();
        let specs = merge(&sources);
        let old = self.members.load_full();
        let settings = self.home.settings.load_full();
        let mut members = NameMap::with_capacity_and_hasher(specs.len(), Default::default());
        for spec in &specs {
            let member = match old.get(&spec.id) {
                Some(member) if member.spec.load().url == spec.url => {
                    if **member.spec.load() != *spec {
                        member.set_spec(spec.clone());
                    } else {
                        member.read_files_again();
                    }
                    member.clone()
                }
                _ => Member::new(spec.clone(), self.home.clone()),
            };
            members.insert(spec.id.clone(), member);
        }
        // The balancer first: a gate is set on a replica that it knows.
        let told: Vec<ReplicaSpec> = specs.iter().map(|spec| as_served(spec, &members[&spec.id])).collect();
        self.home.balancer.apply(sources.balance.clone(), &told);
        self.members.store(Arc::new(members));
        drop(sources);
        let now_there = self.members.load_full();
        for (id, gone) in old.iter().filter(|(id, m)| now_there.get(*id).is_none_or(|n| !Arc::ptr_eq(n, m))) {
            info!(replica = %id, "replica removed: it finishes what runs");
            gone.stop();
        }
        for (id, member) in now_there.iter() {
            if !old.get(id).is_some_and(|o| Arc::ptr_eq(o, member)) {
                info!(replica = %id, url = %member.spec.load().url, "replica added: closed until its first good probe");
            }
            if let Ok(ip) = member.spec.load().url.host.parse() {
                member.set_address(Ok(SocketAddr::new(ip, member.spec.load().url.port)));
            }
            member.set_rules(&settings);
            member.tell_limits();
        }
        let fleet = self.clone();
        self.home.runtime.spawn(async move {
            fleet.resolve().await;
            fleet.update_view().await;
        });
    }

    async fn update_view(&self) {
        for member in self.members.load().values() {
            if let Some(address) = member.address.load().as_deref() {
                self.checks.directory.set_address(&member.id, *address);
            }
        }
        self.checks.update().await;
        self.home.kick.notify_one();
    }

    /// Looks up every host that is a name; whether an address changed.
    async fn resolve(&self) -> bool {
        let members = self.members.load_full();
        let named = members.values().filter(|m| m.spec.load().url.host.parse::<std::net::IpAddr>().is_err());
        let lookups = named.map(|member| async move {
            let (host, port) = (member.spec.load().url.host.clone(), member.spec.load().url.port);
            let before = member.address.load().as_deref().copied();
            let found = match tokio::net::lookup_host((host.as_str(), port)).await {
                // An address that is still among them stays: names often answer in another order each time.
                Ok(found) => {
                    let found: Vec<SocketAddr> = found.collect();
                    let kept = before.filter(|b| found.contains(b)).or_else(|| found.first().copied());
                    kept.ok_or_else(|| format!("{host} has no address"))
                }
                Err(e) => Err(format!("cannot resolve {host}: {e}")),
            };
            member.set_address(found);
            member.address.load().as_deref().copied() != before
        });
        futures::future::join_all(lookups).await.contains(&true)
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        self.shutdown();
        self.members.store(Arc::default());
    }
}

fn settings(config: &Config) -> Settings {
    Settings {
        health: config.health.clone(),
        scrape: config.scrape.clone(),
        warmup: config.warmup.clone(),
        first_byte_timeout: config.limits.first_byte_timeout,
        drain_timeout: config.limits.drain_timeout,
    }
}

fn balance_settings(config: &Config) -> BalanceSettings {
    BalanceSettings { balance: config.balance.clone(), bands: config.bands.clone(), regions: config.regions.clone() }
}

/// Every replica once: the list first, then what is discovered. A discovered one that takes a listed id
/// or address is passed over: two books of one server would each be half the truth.
fn merge(sources: &Sources) -> Vec<ReplicaSpec> {
    let discovered = sources.discovery.as_ref().map(Source::last).unwrap_or_default();
    let (mut ids, mut urls) = (HashSet::new(), HashSet::new());
    let mut specs = Vec::with_capacity(sources.listed.len() + discovered.len());
    for spec in sources.listed.iter().cloned().chain(discovered) {
        if !ids.insert(spec.id.clone()) || !urls.insert(spec.url.to_string()) {
            warn!(replica = %spec.id, url = %spec.url, "passed over: its id or address is taken by another");
            continue;
        }
        specs.push(spec);
    }
    specs
}

/// A spec as the balancer should see it: the engine by its own word, and without models that it would refuse. One
/// that refuses them all keeps them; its probes fail and say so.
fn as_served(spec: &ReplicaSpec, member: &Member) -> ReplicaSpec {
    let mut told = spec.clone();
    told.engine = member.facts.load().engine_or(spec.engine);
    let missing = member.unserved(spec);
    if missing.len() < spec.models.len() {
        told.models.retain(|m| !missing.contains(&m));
    }
    told
}

/// The rounds of checks.
async fn rounds(fleet: Arc<Fleet>) {
    let fleet = Arc::downgrade(&{ fleet });
    loop {
        let Some(fleet) = fleet.upgrade() else { return };
        fleet.checks.round().await;
        let home = fleet.home.clone();
        drop(fleet);
        let every = (home.settings.load().health.interval / ROUNDS_PER_INTERVAL).clamp(ROUND_MIN, ROUND_MAX);
        let _ = tokio::time::timeout(every, home.kick.notified()).await;
    }
}

async fn resolve_loop(fleet: Arc<Fleet>) {
    let fleet = Arc::downgrade(&{ fleet });
    loop {
        tokio::time::sleep(RESOLVE_EVERY).await;
        let Some(fleet) = fleet.upgrade() else { return };
        if fleet.resolve().await {
            fleet.update_view().await;
        }
    }
}

/// Follows the sources and the replicas' own words.
async fn follow(fleet: Arc<Fleet>) {
    let fleet = Arc::downgrade(&{ fleet });
    loop {
        let Some(home) = fleet.upgrade().map(|f| f.home.clone()) else { return };
        home.changed.notified().await;
        let Some(fleet) = fleet.upgrade() else { return };
        fleet.rebuild();
    }
}

/// Replicas by state, for a metric; every state is there.
pub fn count_states(status: &FleetStatus) -> BTreeMap<&'static str, usize> {
    let mut counts: BTreeMap<&'static str, usize> = State::ALL.iter().map(|s| (s.label(), 0)).collect();
    for replica in &status.replicas {
        *counts.entry(replica.state.label()).or_default() += 1;
    }
    counts
}
