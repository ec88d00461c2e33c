//! One replica's health, as a pure state machine: probes and traffic in, a gate out.
//!
//! Two kinds of evidence meet here. *Probes* say whether the server answers; *traffic* says whether it works. Either
//! may be wrong alone: a health URL stays green on a frozen engine, and a busy engine answers its health URL late.
//! So a late probe does not count while data flows, and a replica that traffic put out comes back only through a
//! real request that succeeds, whatever the probes say.
//!
//! What this does not do: choose (the balancer does), or tell overload from illness by itself for odd statuses; a
//! 503, 429 or 529 is always load.

use std::time::Duration;

use crate::balance::Gate;
use crate::config;
use crate::units::Time;

use super::events::TrafficEvent;
pub use super::state::State;

/// Back-off after an overload answer that names no time, or a connection that failed: long enough for a queue to move, short enough to miss little.
const BACK_OFF: Duration = Duration::from_secs(1);

/// The longest back-off an engine may ask for; past it its own restart is likelier than its patience.
const BACK_OFF_MAX: Duration = Duration::from_secs(60);

/// Outcomes looked at for the share of failures: consecutive counts miss a replica that fails every other request.
const WINDOW: u32 = 32;
/// Outcomes before the share says anything.
const WINDOW_MIN: u32 = 10;
/// Failed share of the window that puts a replica out.
const FAILED_SHARE: f64 = 0.5;

/// Ejection lengths vary by up to this share, by replica, so that those ejected together do not return together.
const EJECT_JITTER: f64 = 0.25;

/// The numbers a machine works by.
#[derive(Clone, Debug, PartialEq)]
pub struct Rules {
    pub unhealthy_after: u32,
    pub healthy_after: u32,
    /// Data that arrived within this time excuses a late probe.
    pub alive_for: Duration,
    pub eject: Duration,
    pub eject_max: Duration,
    /// Whether requests of our own go first when a replica opens, or is tried again.
    pub warm_up: bool,
    pub ramp: Duration,
}

impl Rules {
    /// The rules of a configuration.
    pub fn new(health: &config::Health, warmup: &config::Warmup) -> Rules {
        Rules {
            unhealthy_after: health.unhealthy_after,
            healthy_after: health.healthy_after,
            alive_for: health.timeout + health.interval,
            eject: health.eject,
            eject_max: health.eject_max,
            warm_up: warmup.prompt.is_some(),
            ramp: warmup.ramp,
        }
    }
}

/// What a probe found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProbeOutcome {
    Good,
    /// It is up and says that its model is not loaded yet.
    Loading,
    /// It answers, but not to the question (429 from something in between).
    Neither,
    /// Refused, reset, an error status.
    Bad(String),
    /// No answer within the timeout.
    Late,
}

/// What a traffic event asks of the fleet beside the state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Effect {
    /// Do not choose this replica until then, while others are there.
    pub back_off_until: Option<Time>,
    /// Look at it now rather than at the next round.
    pub probe_now: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Phase {
    Unknown,
    Loading,
    Warming,
    Open {
        since: Time,
    },
    HalfOpen {
        since: Time,
    },
    /// By probes; `late` where they only timed out.
    Ill {
        late: bool,
    },
    Ejected {
        until: Time,
    },
}

/// One replica's health.
#[derive(Clone, Debug)]
pub struct Machine {
    rules: Rules,
    /// Spreads the lengths of ejections over replicas.
    seed: u64,
    phase: Phase,
    probed: bool,
    goods: u32,
    bads: u32,
    all_late: bool,
    /// Requests in a row that brought no data.
    silent: u32,
    /// Requests in a row that broke after data came.
    broken: u32,
    /// Outcomes of the last requests, newest in the lowest bit, failures set.
    outcomes: u32,
    outcomes_seen: u32,
    ejections: u32,
    alive_at: Option<Time>,
    draining: bool,
    /// Whether it may take users one at a time first, since others of its pool are known to work.
    on_trial: bool,
    reason: String,
}

impl Machine {
    /// A replica of which nothing is known: closed until its first good probe.
    pub fn new(rules: Rules, seed: u64) -> Machine {
        Machine {
            rules,
            seed,
            phase: Phase::Unknown,
            probed: false,
            goods: 0,
            bads: 0,
            all_late: true,
            silent: 0,
            broken: 0,
            outcomes: 0,
            outcomes_seen: 0,
            ejections: 0,
            alive_at: None,
            draining: false,
            on_trial: false,
            reason: String::new(),
        }
    }

    /// Takes new rules; what was learned stays.
    pub fn set_rules(&mut self, rules: Rules) {
        self.rules = rules;
    }

    /// Lets running requests finish and takes no more, or takes them again.
    pub fn set_draining(&mut self, draining: bool) {
        self.draining = draining;
    }

    /// Whether a start goes through a trial: one request at a time until data comes. A server whose health URL has
    /// just turned green may take minutes over its first request, and one user is enough to find out, as long as
    /// others of its pool are known to work.
    pub fn set_on_trial(&mut self, on_trial: bool) {
        self.on_trial = on_trial;
    }

    /// Whether a first probe has answered or failed.
    pub fn probed(&self) -> bool {
        self.probed
    }

    /// Why it stands where it stands; empty where all is well.
    pub fn reason(&self) -> &str {
        &self.reason
    }

    pub fn state(&self) -> State {
        match self.phase {
            _ if self.draining => State::Draining,
            Phase::Unknown => State::Unknown,
            Phase::Loading => State::Loading,
            Phase::Warming => State::Warming,
            Phase::Open { .. } => State::Open,
            Phase::HalfOpen { .. } => State::HalfOpen,
            Phase::Ill { .. } => State::Ill,
            Phase::Ejected { .. } => State::Ejected,
        }
    }

    pub fn gate(&self) -> Gate {
        match self.state() {
            State::Unknown => Gate::Unknown,
            State::Loading | State::Warming => Gate::Warming,
            State::Open => Gate::Open,
            State::HalfOpen => Gate::HalfOpen,
            State::Ill | State::Ejected => Gate::Ill,
            State::Draining => Gate::Draining,
        }
    }

    /// Whether nothing is being counted against it: then arriving data changes nothing but the time of its last.
    pub fn quiet(&self) -> bool {
        self.silent == 0
    }

    /// Data was seen at `at`; told before a probe is judged, where data is not reported one by one.
    pub fn alive(&mut self, at: Time) {
        if at > Time::ZERO {
            self.alive_at = self.alive_at.max(Some(at));
        }
    }

    /// Whether the server answers as far as probes know: Pingora's own notion of health.
    pub fn answers(&self) -> bool {
        !matches!(self.phase, Phase::Unknown | Phase::Ill { .. })
    }

    /// Whether it is out by traffic, for the cap on how much of a pool may be.
    pub fn ejected(&self) -> bool {
        matches!(self.phase, Phase::Ejected { .. } | Phase::HalfOpen { .. })
    }

    /// Whether a request of our own should be sent now.
    pub fn wants_warm_up(&self) -> bool {
        matches!(self.phase, Phase::Warming)
    }

    /// How long a trial has stood open, where one does. Without traffic nobody would take it; then a request of our
    /// own must.
    pub fn on_trial_for(&self, now: Time) -> Option<Duration> {
        match self.phase {
            Phase::HalfOpen { since } => Some(now.since(since)),
            _ => None,
        }
    }

    /// The length of the slow start when the gate opens.
    pub fn ramp(&self) -> Duration {
        self.rules.ramp
    }

    /// A probe has ended.
    pub fn probe(&mut self, outcome: &ProbeOutcome, now: Time) {
        self.probed = true;
        match outcome {
            ProbeOutcome::Good => {
                self.goods = self.goods.saturating_add(1);
                self.bads = 0;
                self.all_late = true;
                match self.phase {
                    Phase::Unknown | Phase::Loading => self.start(now),
                    Phase::Ill { .. } if self.goods >= self.rules.healthy_after => self.start(now),
                    _ => {}
                }
                self.tick(now);
            }
            ProbeOutcome::Loading => {
                // Said plainly: the process is new and its model is not there, so there is nothing to count up to.
                self.goods = 0;
                self.bads = 0;
                if !matches!(self.phase, Phase::Loading) {
                    self.forget();
                    self.phase = Phase::Loading;
                }
                self.reason = "loading its model".to_owned();
            }
            ProbeOutcome::Neither => {}
            ProbeOutcome::Late if self.alive_within(self.rules.alive_for, now) => {}
            ProbeOutcome::Late => self.bad("no answer to the probe in time", true),
            ProbeOutcome::Bad(why) => self.bad(why, false),
        }
    }

    fn bad(&mut self, why: &str, late: bool) {
        self.goods = 0;
        self.all_late &= late;
        self.bads = self.bads.saturating_add(1);
        if self.bads >= self.rules.unhealthy_after || matches!(self.phase, Phase::Unknown) {
            self.reason = why.to_owned();
        }
        let out = self.bads >= self.rules.unhealthy_after;
        match self.phase {
            Phase::Ill { .. } => self.phase = Phase::Ill { late: self.all_late },
            _ if out => self.phase = Phase::Ill { late: self.all_late },
            _ => {}
        }
    }

    /// A server that answers again, or for the first time.
    fn start(&mut self, now: Time) {
        if self.rules.warm_up {
            self.phase = Phase::Warming;
            self.reason = "warming up".to_owned();
        } else if self.ejections > 0 || self.on_trial {
            self.phase = Phase::HalfOpen { since: now };
            self.reason = "on trial".to_owned();
        } else {
            self.open(now);
        }
    }

    fn open(&mut self, now: Time) {
        self.phase = Phase::Open { since: now };
        self.reason.clear();
        self.silent = 0;
        self.broken = 0;
        self.outcomes = 0;
        self.outcomes_seen = 0;
    }

    fn forget(&mut self) {
        self.silent = 0;
        self.broken = 0;
        self.outcomes_seen = 0;
        self.ejections = 0;
        self.alive_at = None;
    }

    /// Our own requests have been answered, or have failed with this reason. An answer that blames the request is an
    /// answer.
    pub fn warmed(&mut self, result: Result<(), String>, now: Time) {
        if !matches!(self.phase, Phase::Warming) {
            return;
        }
        match result {
            Ok(()) => self.open(now),
            Err(why) => self.eject(&format!("its warm-up request failed: {why}"), now),
        }
    }

    /// The periodic generation probe ended. It is a real request, so it counts like traffic.
    pub fn generated(&mut self, result: Result<(), String>, now: Time, may_eject: bool) -> Effect {
        match result {
            Ok(()) => self.traffic(&TrafficEvent::Completed, now, may_eject),
            Err(_) if self.alive_within(self.rules.alive_for, now) => Effect::default(),
            Err(_) => self.traffic(&TrafficEvent::FirstByteTimeout, now, may_eject),
        }
    }

    /// What real traffic met. `may_eject` is the pool's leave to put this replica out; a trial needs none.
    pub fn traffic(&mut self, event: &TrafficEvent, now: Time, may_eject: bool) -> Effect {
        let mut effect = Effect::default();
        match event {
            TrafficEvent::Alive => {
                self.alive_at = Some(now);
                self.silent = 0;
                self.lives(now);
            }
            TrafficEvent::Completed => {
                self.alive_at = Some(now);
                self.silent = 0;
                self.broken = 0;
                self.outcome(false);
                self.lives(now);
            }
            TrafficEvent::Status { status: status @ (503 | 429 | 529), retry_after, .. } => {
                let wait = retry_after.unwrap_or(BACK_OFF).min(BACK_OFF_MAX);
                effect.back_off_until = Some(now.after(wait));
                // A 503 is also how a server says that it is loading or shutting down; a probe can tell.
                effect.probe_now = *status == 503;
            }
            TrafficEvent::Status { body_is_client_fault: true, .. } => {}
            TrafficEvent::Status { status, .. } if *status < 500 || *status == 501 => {}
            TrafficEvent::Status { status, .. } => {
                self.silent = self.silent.saturating_add(1);
                self.failed(&format!("answers {status}"), now, may_eject);
            }
            TrafficEvent::ConnectFailed | TrafficEvent::DiedBeforeHeader => {
                effect.probe_now = true;
                // Until that probe has told, others are the better choice; a refused connection is rarely the last.
                if *event == TrafficEvent::ConnectFailed {
                    effect.back_off_until = Some(now.after(BACK_OFF));
                }
                self.silent = self.silent.saturating_add(1);
                self.failed("connections fail", now, may_eject);
            }
            TrafficEvent::FirstByteTimeout => {
                self.silent = self.silent.saturating_add(1);
                self.failed("no first byte within its limit", now, may_eject);
            }
            TrafficEvent::DiedMidStream | TrafficEvent::StreamStalled | TrafficEvent::StreamError => {
                if *event == TrafficEvent::DiedMidStream {
                    effect.probe_now = true;
                    effect.back_off_until = Some(now.after(BACK_OFF));
                }
                self.broken = self.broken.saturating_add(1);
                self.failed("answers break off", now, may_eject);
            }
        }
        effect
    }

    /// Data came: a trial has succeeded, and a replica that only answered its probes late is not dead.
    fn lives(&mut self, now: Time) {
        if matches!(self.phase, Phase::HalfOpen { .. } | Phase::Ill { late: true }) {
            self.bads = 0;
            self.open(now);
        }
    }

    fn outcome(&mut self, failed: bool) {
        self.outcomes = self.outcomes << 1 | u32::from(failed);
        self.outcomes_seen = (self.outcomes_seen + 1).min(WINDOW);
    }

    fn failed(&mut self, why: &str, now: Time, may_eject: bool) {
        self.outcome(true);
        let seen = self.outcomes_seen;
        let mask = if seen >= WINDOW { u32::MAX } else { (1 << seen) - 1 };
        let share = f64::from((self.outcomes & mask).count_ones()) / f64::from(seen.max(1));
        let often = seen >= WINDOW_MIN && share >= FAILED_SHARE;
        let row = self.silent.max(self.broken) >= self.rules.unhealthy_after;
        match self.phase {
            Phase::HalfOpen { .. } => self.eject(why, now),
            Phase::Open { .. } if may_eject && (row || often) => self.eject(why, now),
            _ => {}
        }
    }

    fn eject(&mut self, why: &str, now: Time) {
        let factor = 2f64.powi(self.ejections.min(30) as i32);
        let jitter = 1.0 + EJECT_JITTER * spread(self.seed, self.ejections);
        let length = self.rules.eject.mul_f64(factor * jitter).min(self.rules.eject_max);
        self.ejections = self.ejections.saturating_add(1);
        self.reason = why.to_owned();
        self.phase = Phase::Ejected { until: now.after(length) };
    }

    /// Lets time pass: an ejection that is over becomes a trial, once probes are good; good conduct is remembered.
    pub fn tick(&mut self, now: Time) {
        match self.phase {
            Phase::Ejected { until } if now >= until && self.bads == 0 => {
                if self.rules.warm_up {
                    self.phase = Phase::Warming;
                } else {
                    self.phase = Phase::HalfOpen { since: now };
                }
            }
            Phase::Open { since } if self.ejections > 0 && now.since(since) >= self.rules.eject_max => {
                self.ejections = 0;
            }
            _ => {}
        }
    }

    fn alive_within(&self, span: Duration, now: Time) -> bool {
        self.alive_at.is_some_and(|at| now.since(at) <= span)
    }
}

/// A number from 0 to 1 that depends on nothing but its arguments.
fn spread(seed: u64, round: u32) -> f64 {
    let mixed = xxhash_rust::xxh3::xxh3_64_with_seed(&round.to_le_bytes(), seed);
    (mixed >> 11) as f64 / (1u64 << 53) as f64
}

/// Whether one more of `size` replicas may be put out by traffic when `out` are out: at most `cap` of the pool, so
/// that a bad minute (a client's poison, a network's hiccup) cannot empty it.
pub fn may_eject(size: usize, out: usize, cap: f64) -> bool {
    (out + 1) as f64 <= cap * size as f64
}

#[cfg(test)]
#[path = "health_tests.rs"]
mod tests;
