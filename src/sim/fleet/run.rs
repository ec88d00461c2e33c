//! One run: events in order of time, and the balancer asked at each.

mod trouble;

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use super::{FleetSpec, Foresight, RunOptions, SimPolicy};
use crate::balance::{
    Admission, Ask, Balancer, Gate, Outcome, Refusal, Replica, Reservation, Settings, Signals, Ticket,
};
use crate::config::{PolicyName, ReplicaSpec};
use crate::sim::engine::{BLOCK_TOKENS, Emitted, Engine, Job};
use crate::sim::mix::SimRequest;
use crate::sim::stats::Record;
use crate::units::{Clock, ManualClock, ReplicaId, TenantName, Time, Tokens};
use crate::weigh::estimate::{EstimateSource, Histories, HistoryKey, OutputCaps, OutputEstimate, Task};
use crate::wire::Usage;

/// The balancer's timer, as it runs live.
const TICK: Duration = Duration::from_millis(20);
/// Engines' metrics are read this often.
const SCRAPE: Duration = Duration::from_secs(1);
/// Engines' load is noted this often.
const SAMPLE: Duration = Duration::from_secs(1);
/// An engine that answered 503 without saying for how long is left alone for this long.
const BACK_OFF: Duration = Duration::from_secs(1);
/// Tries of one request in all.
const TRIES_MAX: usize = 3;
/// A run whose requests are not all answered this long after the last arrival has lost one.
const PATIENCE: Duration = Duration::from_secs(4 * 3_600);

/// What came of a run.
#[derive(Clone, Debug, Default)]
pub struct Run {
    /// In the order of the requests.
    pub records: Vec<Record>,
    /// Seconds that each replica's engine was busy.
    pub busy: Vec<f64>,
    /// Each replica's sequences, running and waiting, at each second.
    pub load: Vec<Vec<u32>>,
    /// Seconds until all was answered.
    pub seconds: f64,
    pub preemptions: u64,
    /// Prompt tokens found in prefix caches, over all prompt tokens.
    pub cached_share: f64,
    /// What must never be, and was.
    pub violations: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Arrival(u32),
    StepEnd { replica: u32, epoch: u32 },
    Leave(u32),
    Fault(u32),
    FaultEnd(u32),
    Detected { replica: u32, epoch: u32 },
    Scrape,
    Tick,
    Sample,
}

#[derive(Debug)]
struct Flight {
    ask: Arc<Ask>,
    key: HistoryKey,
    tried: Vec<ReplicaId>,
    reservation: Option<Reservation>,
    ticket: Option<Ticket>,
    replica: usize,
}

#[derive(Debug)]
struct Node {
    engine: Engine,
    handle: Arc<Replica>,
    speed: f64,
    epoch: u32,
    step_from: Time,
    busy: f64,
    /// How many faults of each kind hold it now.
    down: u32,
    hung: u32,
    refusing: u32,
    unread: u32,
    slow: Vec<f64>,
}

type Outbox = Arc<Mutex<Vec<(u32, Result<Reservation, Refusal>)>>>;

struct Fleet<'a> {
    requests: &'a [SimRequest],
    spec: &'a FleetSpec,
    options: &'a RunOptions,
    clock: Arc<ManualClock>,
    balancer: Arc<Balancer>,
    histories: Histories,
    nodes: Vec<Node>,
    flights: Vec<Option<Box<Flight>>>,
    followers: Vec<Vec<u32>>,
    events: BinaryHeap<Reverse<(Time, u64, Event)>>,
    sequence: u64,
    outbox: Outbox,
    removed: Vec<u32>,
    rng: SmallRng,
    left: usize,
    run: Run,
    emitted: Vec<Emitted>,
}

/// Runs requests through a fleet.
pub fn run(spec: &FleetSpec, requests: &[SimRequest], options: &RunOptions) -> Run {
    let mut fleet = Fleet::new(spec, requests, options);
    fleet.start();
    fleet.go();
    fleet.end()
}

impl<'a> Fleet<'a> {
    fn new(spec: &'a FleetSpec, requests: &'a [SimRequest], options: &'a RunOptions) -> Fleet<'a> {
        let clock = ManualClock::new();
        let settings = settings(options);
        let balancer = Balancer::new(settings.clone(), Arc::clone(&clock) as Arc<dyn Clock>, options.seed);
        balancer.apply(settings, &replica_specs(spec, options, &[]));
        let handles = balancer.replicas();
        let nodes = spec
            .members
            .iter()
            .zip(handles.iter())
            .map(|(member, handle)| {
                handle.set_gate(Gate::Open, Duration::ZERO);
                Node {
                    engine: Engine::new(member.shape.clone()),
                    handle: Arc::clone(handle),
                    speed: member.shape.speed,
                    epoch: 0,
                    step_from: Time::ZERO,
                    busy: 0.0,
                    down: 0,
                    hung: 0,
                    refusing: 0,
                    unread: 0,
                    slow: Vec::new(),
                }
            })
            .collect();
        let mut followers = vec![Vec::new(); requests.len()];
        for (i, r) in requests.iter().enumerate() {
            if let Some(before) = r.after {
                followers[before].push(i as u32);
            }
        }
        let removed = vec![0; spec.members.len()];
        Fleet {
            requests,
            spec,
            options,
            clock,
            balancer,
            histories: Histories::default(),
            nodes,
            flights: requests.iter().map(|_| None).collect(),
            followers,
            events: BinaryHeap::new(),
            sequence: 0,
            outbox: Outbox::default(),
            removed,
            rng: SmallRng::seed_from_u64(options.seed ^ 0x1ea7),
            left: requests.len(),
            run: Run { records: vec![Record::default(); requests.len()], ..Run::default() },
            emitted: Vec::new(),
        }
    }

    fn now(&self) -> Time {
        self.clock.now()
    }

    fn push(&mut self, at: Time, event: Event) {
        self.sequence += 1;
        self.events.push(Reverse((at, self.sequence, event)));
    }

    fn start(&mut self) {
        for (i, r) in self.requests.iter().enumerate() {
            if r.after.is_none() {
                self.push(Time::from_secs_f64(r.at), Event::Arrival(i as u32));
            }
        }
        for (i, fault) in self.options.faults.faults.iter().enumerate() {
            self.push(Time::ZERO.after(fault.at), Event::Fault(i as u32));
        }
        for event in [Event::Scrape, Event::Tick, Event::Sample] {
            self.push(Time::ZERO.after(TICK), event);
        }
    }

    fn go(&mut self) {
        let last = self.requests.iter().map(|r| r.at).fold(0.0, f64::max);
        let end = Time::from_secs_f64(last).after(PATIENCE);
        while self.left > 0 {
            let Some(Reverse((at, _, event))) = self.events.pop() else { break };
            if at > end {
                self.run.violations.push(format!("{} requests never ended", self.left));
                break;
            }
            self.clock.set(at);
            self.handle(event);
            self.drain_outbox();
        }
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Arrival(i) => self.arrive(i),
            Event::StepEnd { replica, epoch } => self.step_end(replica as usize, epoch),
            Event::Leave(i) => self.leave(i),
            Event::Fault(i) => self.fault(i as usize, true),
            Event::FaultEnd(i) => self.fault(i as usize, false),
            Event::Detected { replica, epoch } => {
                let node = &self.nodes[replica as usize];
                if node.down > 0 && node.epoch == epoch {
                    node.handle.set_gate(Gate::Ill, Duration::ZERO);
                }
            }
            Event::Scrape => {
                self.scrape();
                self.push(self.now().after(SCRAPE), Event::Scrape);
            }
            Event::Tick => {
                self.balancer.tick();
                self.push(self.now().after(TICK), Event::Tick);
            }
            Event::Sample => {
                let load = self.nodes.iter().map(|n| (n.engine.running() + n.engine.waiting()) as u32).collect();
                self.run.load.push(load);
                self.push(self.now().after(SAMPLE), Event::Sample);
            }
        }
    }

    fn scrape(&mut self) {
        let now = self.now();
        for node in self.nodes.iter().filter(|n| n.down == 0 && n.unread == 0) {
            node.handle.set_signals(Signals {
                kv_pressure: Some(node.engine.kv_usage()),
                running: Some(node.engine.running() as u64),
                waiting: Some(node.engine.waiting() as u64),
                read_at: now,
            });
        }
    }

    fn arrive(&mut self, i: u32) {
        let r = &self.requests[i as usize];
        let now = self.now();
        self.run.records[i as usize] =
            Record { arrived: now.as_secs_f64(), output: r.output, band: r.band.0, ..Record::default() };
        let task = if self.options.foresight == Foresight::OneHistory { Task::Chat } else { r.task };
        let key = HistoryKey { tenant: r.tenant.map(TenantName::from), model: self.spec.model.clone(), task };
        let output = self.estimate(r, &key);
        let ask = Arc::new(Ask {
            model: self.spec.model.clone(),
            prompt: Tokens(u64::from(r.prompt)),
            longest: Tokens(u64::from(r.prompt)),
            must_hold: Tokens(u64::from(r.prompt)),
            sequences: 1,
            output,
            max_tokens: r.max_tokens.map(u64::from),
            band: r.band,
            tenant: key.tenant.clone(),
            session: r.session,
            prefix: r.prefix.hashes(r.prompt),
            prefix_block_tokens: BLOCK_TOKENS,
            stream: true,
            ttft_objective: None,
        });
        if self.options.faults.leaving > 0.0 && self.rng.random_bool(self.options.faults.leaving) {
            let stay = Duration::from_secs_f64(self.rng.random_range(0.0..10.0));
            self.push(now.after(stay), Event::Leave(i));
        }
        let flight = Flight { ask, key, tried: Vec::new(), reservation: None, ticket: None, replica: usize::MAX };
        self.flights[i as usize] = Some(Box::new(flight));
        self.admit(i);
    }

    fn admit(&mut self, i: u32) {
        let Some(flight) = self.flights[i as usize].as_mut() else { return };
        let outbox = Arc::clone(&self.outbox);
        let waiter = Box::new(move |result| outbox.lock().push((i, result)));
        match self.balancer.admit(Arc::clone(&flight.ask), waiter) {
            Admission::Placed(reservation) => self.begin(i, reservation),
            Admission::Waiting(ticket) => flight.ticket = Some(ticket),
            Admission::Refused(_) => self.refused(i),
        }
    }

    fn estimate(&self, r: &SimRequest, key: &HistoryKey) -> OutputEstimate {
        if self.options.policy == SimPolicy::Oracle || self.options.foresight == Foresight::True {
            let length = u64::from(r.output);
            return OutputEstimate {
                mean: length as f64,
                p50: length,
                p90: length,
                source: EstimateSource::Exact,
                confidence: 1.0,
                tail: Arc::from([]),
            };
        }
        let window = self.spec.members.iter().map(|m| m.shape.max_model_len).max().unwrap_or(u32::MAX);
        let caps = OutputCaps {
            max_tokens: r.max_tokens.map(u64::from),
            window_left: Some(u64::from(window.saturating_sub(r.prompt))),
            ..OutputCaps::default()
        };
        self.histories.estimate(key, &caps)
    }

    fn drain_outbox(&mut self) {
        loop {
            let done = std::mem::take(&mut *self.outbox.lock());
            if done.is_empty() {
                return;
            }
            for (i, result) in done {
                match (self.flights[i as usize].is_some(), result) {
                    (true, Ok(reservation)) => {
                        self.flights[i as usize].as_mut().and_then(|f| f.ticket.take());
                        self.begin(i, reservation);
                    }
                    (true, Err(_)) => self.refused(i),
                    // Its client left in the same moment.
                    (false, _) => {}
                }
            }
        }
    }

    /// The request goes out to its replica, which may not take it.
    fn begin(&mut self, i: u32, mut reservation: Reservation) {
        let at = self.nodes.iter().position(|n| Arc::ptr_eq(&n.handle, reservation.replica()));
        let Some(at) = at else {
            self.run.violations.push(format!("request {i} was placed on an unknown replica"));
            return self.failed(i);
        };
        let now = self.now();
        let node = &self.nodes[at];
        if node.down > 0 || node.refusing > 0 {
            if node.down == 0 {
                node.handle.back_off_until(now.after(BACK_OFF));
            }
            let outcome = if node.down > 0 { Outcome::UpstreamError } else { Outcome::Refused };
            reservation.settle(None, outcome);
            return self.retry(i, at);
        }
        reservation.sent();
        let r = &self.requests[i as usize];
        let Some(flight) = self.flights[i as usize].as_mut() else { return };
        flight.reservation = Some(reservation);
        flight.replica = at;
        self.run.records[i as usize].replica = Some(at);
        let priority = Balancer::engine_priority(r.band);
        let chain = r.prefix.hashes(r.prompt + r.output);
        let job = Job { id: u64::from(i), prompt: r.prompt, output: r.output, priority, chain };
        self.nodes[at].engine.submit(job);
        self.begin_step(at);
    }

    fn retry(&mut self, i: u32, failed_at: usize) {
        let id = self.nodes[failed_at].handle.id().clone();
        let Some(flight) = self.flights[i as usize].as_mut() else { return };
        flight.tried.push(id);
        if flight.tried.len() >= TRIES_MAX {
            return self.failed(i);
        }
        match self.balancer.place(&flight.ask, &flight.tried) {
            Ok(reservation) => self.begin(i, reservation),
            Err(_) => self.failed(i),
        }
    }

    fn begin_step(&mut self, at: usize) {
        let now = self.now();
        let node = &mut self.nodes[at];
        if node.hung > 0 || node.down > 0 {
            return;
        }
        if let Some(end) = node.engine.begin_step(now) {
            node.step_from = now;
            let epoch = node.epoch;
            self.push(end, Event::StepEnd { replica: at as u32, epoch });
        }
    }

    fn step_end(&mut self, at: usize, epoch: u32) {
        let now = self.now();
        let node = &mut self.nodes[at];
        if node.epoch != epoch {
            return;
        }
        if node.hung > 0 {
            // The step ends when the engine moves again.
            return;
        }
        node.busy += now.since(node.step_from).as_secs_f64();
        let mut emitted = std::mem::take(&mut self.emitted);
        node.engine.finish_step(&mut emitted);
        for token in emitted.drain(..) {
            self.token(token);
        }
        self.emitted = emitted;
        self.begin_step(at);
    }

    fn token(&mut self, token: Emitted) {
        let i = token.id as usize;
        let now = self.now().as_secs_f64();
        let record = &mut self.run.records[i];
        if token.produced == 1 {
            record.ttft = Some(now - record.arrived);
        }
        let Some(flight) = self.flights[i].as_mut() else { return };
        if let Some(reservation) = flight.reservation.as_mut() {
            reservation.progress(u64::from(token.produced));
        }
        if !token.finished {
            return;
        }
        record.e2e = Some(now - record.arrived);
        let Some(flight) = self.flights[i].take() else { return };
        self.histories.observe(&flight.key, u64::from(token.produced));
        let usage = Usage {
            prompt: u64::from(self.requests[i].prompt),
            cached_prompt: u64::from(token.cached),
            output: u64::from(token.produced),
            reasoning: 0,
        };
        if let Some(reservation) = flight.reservation {
            reservation.settle(Some(&usage), Outcome::Completed);
        }
        self.ended(i);
    }

    fn refused(&mut self, i: u32) {
        self.run.records[i as usize].refused = true;
        self.flights[i as usize] = None;
        self.ended(i as usize);
    }

    fn failed(&mut self, i: u32) {
        if let Some(flight) = self.flights[i as usize].take() {
            if let Some(reservation) = flight.reservation {
                reservation.settle(None, Outcome::UpstreamError);
            }
            self.ended(i as usize);
        }
    }

    /// A client that goes away: out of the queue or out of the engine, and the booking is dropped.
    fn leave(&mut self, i: u32) {
        let Some(flight) = self.flights[i as usize].take() else { return };
        if let Some(node) = self.nodes.get_mut(flight.replica) {
            node.engine.cancel(u64::from(i));
        }
        drop(flight);
        self.ended(i as usize);
    }

    fn ended(&mut self, i: usize) {
        self.left -= 1;
        let now = self.now();
        for follower in std::mem::take(&mut self.followers[i]) {
            let r = &self.requests[follower as usize];
            let soonest = now.after(Duration::from_secs_f64(r.think));
            self.push(soonest.max(Time::from_secs_f64(r.at)), Event::Arrival(follower));
        }
    }

    fn end(mut self) -> Run {
        self.flights.clear();
        self.balancer.tick();
        self.outbox.lock().clear();
        for view in self.balancer.views() {
            let booked =
                (view.projected_tokens.0, view.booked_kv_tokens.0, view.active_sequences, view.requests_in_flight);
            if booked != (0, 0, 0, 0) {
                self.run.violations.push(format!("{} is idle and has {booked:?} booked", view.spec.id));
            }
        }
        for (model, band, depth) in self.balancer.queue_depths() {
            if depth > 0 {
                self.run.violations.push(format!("{depth} requests still wait for {model} in band {}", band.0));
            }
        }
        let (mut prompt, mut cached) = (0, 0);
        for node in &self.nodes {
            let counters = node.engine.counters();
            self.run.preemptions += counters.preemptions;
            prompt += counters.prompt_tokens;
            cached += counters.cached_tokens;
        }
        self.run.cached_share = cached as f64 / f64::max(prompt as f64, 1.0);
        self.run.busy = self.nodes.iter().map(|n| n.busy).collect();
        self.run.seconds = self.clock.now().as_secs_f64();
        self.run
    }
}

fn settings(options: &RunOptions) -> Settings {
    let policy = match options.policy {
        SimPolicy::Named(policy) => policy,
        SimPolicy::Oracle => PolicyName::TokenLoad,
    };
    let balance = crate::config::Balance { policy, ..options.balance.clone() };
    Settings { balance, bands: options.bands.clone(), regions: options.regions.clone() }
}

/// More than any engine holds: a balancer that counts no tokens knows no limit.
const BLIND: u32 = 1_000_000;

fn replica_specs(spec: &FleetSpec, options: &RunOptions, without: &[usize]) -> Vec<ReplicaSpec> {
    let sees =
        matches!(options.policy, SimPolicy::Oracle | SimPolicy::Named(PolicyName::TokenLoad | PolicyName::LeastTokens));
    let kept = spec.members.iter().enumerate().filter(|(i, _)| !without.contains(i));
    kept.map(|(_, member)| {
        let mut replica = member.spec.clone();
        if options.blind_baselines && !sees {
            replica.token_capacity = Some(Tokens(u64::from(BLIND) * u64::from(BLIND)));
            replica.max_sequences = BLIND;
        }
        replica
    })
    .collect()
}
