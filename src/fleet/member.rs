//! One replica as the fleet keeps it: its health, its client, what it said of itself, and the tasks that ask it.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Weak};
use std::time::Duration;

use arc_swap::{ArcSwap, ArcSwapOption};
use parking_lot::{Mutex, ReentrantMutex};
use serde_json::json;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use tracing::{debug, error, info, warn};

use crate::balance::{Balancer, Gate};
use crate::config::{self, Engine, ReplicaSpec};
use crate::units::{Clock, ModelName, ReplicaId, Time};

use super::checks::Members;
use super::client::{Answer, Client, Failure};
use super::events::TrafficEvent;
use super::facts::Facts;
use super::health::{Effect, Machine, ProbeOutcome, Rules, State};
use super::signals;

/// What a replica said of itself is asked again after this: models are loaded and unloaded under a running server.
const FACTS_FRESH: Duration = Duration::from_secs(60);

/// A one-token generation is given this many probe timeouts: it queues behind the engine's own work.
const GENERATION_PATIENCE: u32 = 6;

/// Wait before a warm-up request that met an overloaded engine is sent again.
const WARM_UP_PAUSE: Duration = Duration::from_secs(1);

/// A probe's moment varies by up to this share of the interval, so that many probes do not fall together.
const PROBE_JITTER: f64 = 0.2;

/// The longest pause between two scrapes of a replica that answers slowly.
const SCRAPE_PAUSE_MAX: Duration = Duration::from_secs(60);

/// What of the configuration the members work by.
#[derive(Clone, Debug)]
pub(super) struct Settings {
    pub health: config::Health,
    pub scrape: config::Scrape,
    pub warmup: config::Warmup,
    /// Our own warm-up requests wait as long as a client's would.
    pub first_byte_timeout: Duration,
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
        let scraper = home.runtime.spawn(scrape_loop(Arc::downgrade(&member), home.clone()));
        member.tasks.lock().push(scraper);
        member
    }

    /// Ends its tasks.
    pub fn stop(&self) {
        self.tasks.lock().drain(..).for_each(|t| t.abort());
    }

    /// Takes a changed spec of the same server.
    pub fn set_spec(&self, spec: ReplicaSpec) {
        let old = self.spec.load();
        let client_changed = (&old.tls, &old.api_key_file) != (&spec.tls, &spec.api_key_file);
        if old.models != spec.models {
            self.facts_at.store(0, Relaxed);
        }
        self.spec.store(Arc::new(spec));
        // Files are read again with every configuration: keys and certificates are rotated in place.
        if client_changed || self.spec.load().tls.is_some() || self.spec.load().api_key_file.is_some() {
            self.client.store(None);
        }
        self.kick();
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
        if (replica.gate(), gate) == (Gate::HalfOpen, Gate::Open) {
            // A trial that succeeded is an opening from illness: the slow start belongs to it.
            replica.set_gate(Gate::Ill, ramp);
        }
        replica.set_gate(gate, ramp);
    }

    /// Takes what traffic tells.
    pub fn traffic(&self, event: &TrafficEvent, may_eject: impl FnOnce() -> bool) -> Effect {
        if matches!(event, TrafficEvent::Alive | TrafficEvent::Completed) {
            self.proven.store(true, Relaxed);
        }
        if *event == TrafficEvent::Alive {
            self.alive_at.store(self.home.clock.now().0, Relaxed);
            if !self.attentive.load(Relaxed) {
                return Effect::default();
            }
        }
        let may_eject = !matches!(event, TrafficEvent::Alive | TrafficEvent::Completed) && may_eject();
        let effect = self.change(|m, now| m.traffic(event, now, may_eject));
        if effect.probe_now {
            self.kick();
        }
        effect
    }

    /// Starts a probe where one is due; whether one runs now.
    pub fn probe_if_due(self: &Arc<Self>) -> Option<JoinHandle<()>> {
        let now = self.home.clock.now();
        let due = self.kicked.load(Relaxed) || now.0 >= self.due_at.load(Relaxed);
        if !due || self.address.load().is_none() || self.probing.swap(true, Relaxed) {
            return None;
        }
        self.kicked.store(false, Relaxed);
        let interval = self.home.settings.load().health.interval;
        let jitter = 1.0 + PROBE_JITTER * (rand::random::<f64>() - 0.5);
        self.due_at.store(now.after(interval.mul_f64(jitter)).0, Relaxed);
        let member = self.clone();
        Some(self.home.runtime.spawn(async move {
            let outcome = member.probe().await;
            member.probing.store(false, Relaxed);
            let alive = Time(member.alive_at.load(Relaxed));
            let on_trial = member.home.can_wait_for(&member);
            member.change(|m, now| {
                m.alive(alive);
                m.set_on_trial(on_trial);
                m.probe(&outcome, now);
            });
            member.probed_at.store(member.home.clock.now().0, Relaxed);
            member.own_requests();
        }))
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

    async fn probe(&self) -> ProbeOutcome {
        let client = match self.client() {
            Ok(client) => client,
            Err(why) => return ProbeOutcome::Bad(why),
        };
        let settings = self.home.settings.load_full();
        let spec = self.spec.load_full();
        let timeout = settings.health.timeout;
        let mut outcome = judge(&client.get(&settings.health.path, timeout).await);
        let engine = self.facts.load().engine_or(spec.engine);
        let mut models = None;
        if outcome == ProbeOutcome::Bad(NO_SUCH_PATH.to_owned()) && matches!(engine, Engine::Auto | Engine::OpenAi) {
            // Not every server that speaks the API has a health URL; its list of models is the next best.
            let answer = client.get("/v1/models", timeout).await;
            outcome = judge(&answer);
            models = Some(answer);
        }
        if outcome != ProbeOutcome::Good {
            return outcome;
        }
        let now = self.home.clock.now();
        let read_at = Time(self.facts_at.load(Relaxed));
        let open = self.state().0 == State::Open;
        if read_at == Time::ZERO || !open || now.since(read_at) >= FACTS_FRESH {
            let models = match models {
                Some(models) => models,
                None => client.get("/v1/models", timeout).await,
            };
            self.learn(&client, &spec, models, timeout).await;
        }
        match self.unserved(&spec) {
            missing if missing.len() == spec.models.len() => {
                let served = self.facts.load().models.join(", ");
                ProbeOutcome::Bad(format!("does not serve {}; it serves {served}", list(&missing)))
            }
            _ => ProbeOutcome::Good,
        }
    }

    /// Takes in what the replica says of itself.
    async fn learn(&self, client: &Client, spec: &ReplicaSpec, models: Result<Answer, Failure>, timeout: Duration) {
        let Ok(Answer { status: 200, body }) = models else { return };
        let Some(mut facts) = Facts::from_models(&body) else { return };
        let old = self.facts.load_full();
        if facts.engine_or(spec.engine) == Engine::LlamaCpp
            && let Ok(Answer { status: 200, body }) = client.get("/props", timeout).await
        {
            facts.add_props(&body);
        }
        facts.engine = facts.engine.or(old.engine);
        facts.capacity = facts.capacity.or(old.capacity);
        self.facts_at.store(self.home.clock.now().0.max(1), Relaxed);
        self.take_facts(facts, spec);
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

    /// Starts the requests of our own that are due: warm-up before the gate opens, the generation probe.
    fn own_requests(self: &Arc<Self>) {
        let settings = self.home.settings.load_full();
        let warm = self.machine.lock().wants_warm_up();
        if warm && !self.warming.swap(true, Relaxed) {
            let member = self.clone();
            self.home.runtime.spawn(async move {
                let result = member.warm_up(&settings).await;
                member.warming.store(false, Relaxed);
                member.change(|m, now| m.warmed(result, now));
            });
            return;
        }
        let Some(every) = settings.health.generation_probe else { return };
        let now = self.home.clock.now();
        let alive = Time(self.alive_at.load(Relaxed));
        let last = Time(self.generation_at.load(Relaxed)).max(alive);
        // Real traffic that brings data proves as much and costs nothing.
        if warm || self.state().0 != State::Open || now.since(last) < every || self.warming.swap(true, Relaxed) {
            return;
        }
        self.generation_at.store(now.0, Relaxed);
        let member = self.clone();
        self.home.runtime.spawn(async move {
            let timeout = settings.health.timeout * GENERATION_PATIENCE;
            let result = match member.client() {
                Ok(client) => member.generate(&client, "Hi", timeout).await,
                Err(why) => Err(why),
            };
            member.warming.store(false, Relaxed);
            member.change(|m, now| m.generated(result, now, true));
        });
    }

    async fn warm_up(&self, settings: &Settings) -> Result<(), String> {
        let prompt = settings.warmup.prompt.as_deref().unwrap_or("Hi");
        let client = self.client()?;
        for _ in 0..settings.warmup.requests {
            self.generate(&client, prompt, settings.first_byte_timeout).await?;
        }
        Ok(())
    }

    /// Generates one token with each model, by chat or, where there is no chat, by completion. An answer that blames
    /// the request is an answer: an embedding server generates nothing and is well.
    async fn generate(&self, client: &Client, prompt: &str, timeout: Duration) -> Result<(), String> {
        let spec = self.spec.load_full();
        for model in spec.models.iter().filter(|m| !self.unserved(&spec).contains(m)) {
            let name = model.as_str();
            let chat = json!({"model": name, "messages": [{"role": "user", "content": prompt}], "max_tokens": 1});
            let plain = json!({"model": name, "prompt": prompt, "max_tokens": 1});
            let mut status = self.answered(client, "/v1/chat/completions", &chat, timeout).await?;
            if matches!(status, 400 | 404 | 405 | 501) {
                status = self.answered(client, "/v1/completions", &plain, timeout).await?;
            }
            if status >= 500 && status != 501 {
                return Err(format!("status {status}"));
            }
        }
        Ok(())
    }

    async fn answered(
        &self,
        client: &Client,
        path: &str,
        body: &serde_json::Value,
        timeout: Duration,
    ) -> Result<u16, String> {
        let started = self.home.clock.now();
        loop {
            match client.post(path, body, timeout).await {
                Ok(answer) if matches!(answer.status, 429 | 503 | 529) => {
                    if self.home.clock.now().since(started) >= timeout {
                        return Ok(answer.status);
                    }
                    tokio::time::sleep(WARM_UP_PAUSE).await;
                }
                Ok(answer) => return Ok(answer.status),
                Err(Failure::Timeout) => {
                    return Err(format!("no answer within {}", humantime::format_duration(timeout)));
                }
                Err(Failure::Broken(why)) => return Err(why),
            }
        }
    }

    /// Reads the replica's metrics once; how long it took.
    async fn scrape(&self, settings: &Settings) -> Duration {
        let began = self.home.clock.now();
        let took = || self.home.clock.now().since(began);
        let Ok(client) = self.client() else { return took() };
        let spec = self.spec.load_full();
        let engine = self.facts.load().engine_or(spec.engine);
        let timeout = settings.scrape.timeout;
        let read = match client.get(signals::metrics_path(engine), timeout).await {
            Ok(Answer { status: 200, body }) => Some(signals::read(&String::from_utf8_lossy(&body))),
            Ok(answer) => {
                debug!(replica = %self.id, status = answer.status, "no metrics");
                None
            }
            Err(why) => {
                debug!(replica = %self.id, ?why, "scrape failed");
                None
            }
        };
        let took = took();
        let Some(mut reading) = read.filter(|r| !r.is_empty()) else {
            self.scraped.lock().failed += 1;
            return took;
        };
        if reading.engine == Some(Engine::Vllm)
            && let Ok(Answer { status: 200, body }) = client.get("/load", timeout).await
        {
            reading.add_load(&body);
        }
        let now = self.home.clock.now();
        if let Some(replica) = self.home.balancer.replica(&self.id) {
            replica.set_signals(reading.signals(now));
        }
        let mut facts = Facts::clone(&self.facts.load());
        facts.engine = facts.engine.or(reading.engine);
        facts.capacity = reading.kv_capacity.or(facts.capacity);
        self.take_facts(facts, &spec);
        let mut scraped = self.scraped.lock();
        scraped.ok += 1;
        (scraped.running, scraped.waiting) = (reading.running, reading.waiting);
        (scraped.kv_use, scraped.refusals) = (reading.kv_use, reading.refusals);
        took
    }
}

const NO_SUCH_PATH: &str = "status 404";

/// What an answer to a probe means.
fn judge(answer: &Result<Answer, Failure>) -> ProbeOutcome {
    match answer {
        Err(Failure::Timeout) => ProbeOutcome::Late,
        Err(Failure::Broken(why)) => ProbeOutcome::Bad(why.clone()),
        Ok(Answer { status: 200..=299, .. }) => ProbeOutcome::Good,
        // llama-server: 503 {"error":{"message":"Loading model",...}}
        Ok(Answer { status: 503, body }) if memchr::memmem::find(body, b"oading").is_some() => ProbeOutcome::Loading,
        Ok(Answer { status: 429, .. }) => ProbeOutcome::Neither,
        Ok(Answer { status, .. }) => ProbeOutcome::Bad(format!("status {status}")),
    }
}

fn list(names: &[&ModelName]) -> String {
    names.iter().map(|n| format!("`{n}`")).collect::<Vec<_>>().join(", ")
}

/// One scrape after another, never two at once; slower where the replica answers slowly, paused while it is out.
async fn scrape_loop(member: Weak<Member>, home: Arc<Home>) {
    let mut pause = Duration::from_millis(rand::random_range(0..500));
    loop {
        tokio::time::sleep(pause).await;
        let settings = home.settings.load_full();
        let Some(member) = member.upgrade() else { return };
        let Some(interval) = settings.scrape.interval else {
            pause = Duration::from_secs(1);
            continue;
        };
        pause = interval;
        if matches!(member.state().0, State::Open | State::HalfOpen | State::Warming | State::Draining) {
            // A scrape that takes long costs the engine: the pause is at least ten times as long.
            pause = (member.scrape(&settings).await * 10).clamp(interval, interval.max(SCRAPE_PAUSE_MAX));
        }
    }
}
