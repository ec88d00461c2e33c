//! One replica as the balancer knows it: its ledger, its coefficients, and (in `standing`) whether it may be chosen.

mod standing;

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering::Acquire, Ordering::Relaxed};
use std::sync::{Arc, Weak};
use std::time::Duration;

use arc_swap::ArcSwap;
use parking_lot::Mutex;

use crate::config::ReplicaSpec;
use crate::units::{Clock, ReplicaId, Time, Tokens};

use super::ask::Ask;
use super::balancer::Balancer;
use super::fit::{Demand, Fit};
use super::ledger::{Books, Entry, Figures};
use super::prefix::Cache;
use super::speed::{Coefficients, Learner, Run};

pub use standing::Gate;
pub(super) use standing::Standing;

/// What a replica's own metrics say; stale ones are ignored.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Signals {
    /// 0 to 1.
    pub kv_pressure: Option<f64>,
    pub running: Option<u64>,
    pub waiting: Option<u64>,
    pub read_at: Time,
}

/// Signals older than this are ignored: a few scrapes' time.
pub const SIGNALS_FRESH: Duration = Duration::from_secs(10);

/// A replica's books at one moment.
#[derive(Clone, Debug)]
pub struct ReplicaView {
    pub spec: Arc<ReplicaSpec>,
    pub gate: Gate,
    /// Remaining work: uncomputed prompt and expected output tokens.
    pub projected_tokens: Tokens,
    /// KV tokens booked.
    pub booked_kv_tokens: Tokens,
    pub token_capacity: Option<Tokens>,
    /// Seconds until all that is booked is done, were nothing added.
    pub load_seconds: f64,
    pub active_sequences: u64,
    pub requests_in_flight: u64,
    /// `None` where it is unknown or stale.
    pub kv_pressure: Option<f64>,
    /// Learned or configured: decode and prefill rates, tokens per second.
    pub decode_tokens_per_sec: f64,
    pub prefill_tokens_per_sec: f64,
}

/// What all replicas of a balancer share.
#[derive(Debug)]
pub(super) struct Home {
    pub clock: Arc<dyn Clock>,
    /// Requests waiting in any queue; a release with nobody waiting has nothing more to do.
    pub waiting: AtomicUsize,
    pub balancer: Weak<Balancer>,
}

/// No limit.
pub(super) const UNLIMITED: u64 = u64::MAX;

/// An `f64` that is read and written whole.
#[derive(Debug, Default)]
pub(super) struct AtomicF64(AtomicU64);

impl AtomicF64 {
    pub fn new(value: f64) -> Self {
        AtomicF64(AtomicU64::new(value.to_bits()))
    }

    #[inline]
    pub fn get(&self) -> f64 {
        f64::from_bits(self.0.load(Relaxed))
    }

    pub fn set(&self, value: f64) {
        self.0.store(value.to_bits(), Relaxed);
    }
}

/// What the scorers read beside the books; rarely written. The first cache line is all that `least-tokens` and the
/// question whether a request fits read.
#[derive(Debug)]
#[repr(C, align(64))]
pub(super) struct Traits {
    /// Whether nothing special holds: gate open, staying, no ramp, no back-off. Then nothing else need be asked.
    plain: AtomicBool,
    /// A [`Gate`]'s index.
    gate: AtomicU8,
    pub window: AtomicU64,
    pub capacity: AtomicU64,
    pub max_sequences: AtomicU64,
    /// Of decoding, at half of the sequences.
    pub seconds_per_token: AtomicF64,
    pub kv_pressure: AtomicF64,
    /// The pressure counts until then.
    pub signals_until: AtomicU64,
    /// Seconds to its region.
    pub distance: AtomicF64,
    pub overhead: AtomicF64,
    pub per_prompt: AtomicF64,
    pub doubling: AtomicF64,
    pub base: AtomicF64,
    pub per_sequence: AtomicF64,
    pub per_context: AtomicF64,
    ramp_from: AtomicU64,
    ramp_micros: AtomicU64,
    back_off_until: AtomicU64,
}

/// One replica.
#[derive(Debug)]
#[repr(C)]
pub struct Replica {
    pub(super) figures: Figures,
    pub(super) traits: Traits,
    id: ReplicaId,
    /// Never given twice in a balancer's life.
    pub(super) number: u32,
    /// A hash of the id, the same in every process.
    pub(super) identity: u64,
    pub(super) cache: Cache,
    spec: ArcSwap<ReplicaSpec>,
    /// No longer configured: finishes what runs.
    leaving: AtomicBool,
    /// It drains, and the time for what still runs is over.
    overdue: AtomicBool,
    books: Mutex<Books>,
    learner: Mutex<Box<Learner>>,
    /// Prompt work done for all its streams.
    prompt_work_done: AtomicU64,
    drawn_at: AtomicU64,
    learned_at: AtomicU64,
    engine_window: AtomicU64,
    engine_capacity: AtomicU64,
    pub(super) home: Arc<Home>,
}

impl Replica {
    pub(super) fn new(spec: Arc<ReplicaSpec>, number: u32, distance: Duration, home: Arc<Home>) -> Arc<Replica> {
        let prior = Coefficients::prior(&spec);
        let replica = Arc::new(Replica {
            figures: Figures::default(),
            traits: Traits {
                gate: AtomicU8::new(0),
                plain: AtomicBool::new(false),
                window: AtomicU64::new(UNLIMITED),
                capacity: AtomicU64::new(UNLIMITED),
                max_sequences: AtomicU64::new(UNLIMITED),
                seconds_per_token: AtomicF64::new(1.0),
                kv_pressure: AtomicF64::default(),
                signals_until: AtomicU64::new(0),
                overhead: AtomicF64::default(),
                per_prompt: AtomicF64::default(),
                doubling: AtomicF64::new(1.0),
                base: AtomicF64::default(),
                per_sequence: AtomicF64::default(),
                per_context: AtomicF64::default(),
                distance: AtomicF64::default(),
                ramp_from: AtomicU64::new(0),
                ramp_micros: AtomicU64::new(0),
                back_off_until: AtomicU64::new(0),
            },
            id: spec.id.clone(),
            number,
            identity: xxhash_rust::xxh3::xxh3_64(spec.id.as_str().as_bytes()),
            cache: Cache::default(),
            spec: ArcSwap::new(spec.clone()),
            leaving: AtomicBool::new(false),
            overdue: AtomicBool::new(false),
            books: Mutex::default(),
            learner: Mutex::new(Box::new(Learner::new(prior))),
            prompt_work_done: AtomicU64::new(0),
            drawn_at: AtomicU64::new(0),
            learned_at: AtomicU64::new(0),
            engine_window: AtomicU64::new(UNLIMITED),
            engine_capacity: AtomicU64::new(UNLIMITED),
            home,
        });
        replica.configure(spec, distance);
        replica
    }

    /// Takes a changed configuration; the books and, for the same rates, what was learned stay.
    pub(super) fn configure(&self, spec: Arc<ReplicaSpec>, distance: Duration) {
        self.traits.distance.set(distance.as_secs_f64());
        self.traits.max_sequences.store(u64::from(spec.max_sequences.max(1)), Relaxed);
        {
            let mut learner = self.learner.lock();
            learner.set_prior(Coefficients::prior(&spec));
            let coefficients = learner.coefficients();
            self.spec.store(spec);
            self.publish(coefficients);
        }
        self.leaving.store(false, Relaxed);
        self.refresh_limits();
        self.refresh_plain();
    }

    /// It is no longer configured.
    pub(super) fn leave(&self) {
        self.leaving.store(true, Relaxed);
        self.refresh_plain();
    }

    /// Whether it is no longer configured.
    pub(super) fn is_leaving(&self) -> bool {
        self.leaving.load(Relaxed)
    }

    /// Whether it drains and the time for what still runs is over. Set by `fleet`; whoever forwards an answer asks.
    #[inline]
    pub fn overdue(&self) -> bool {
        self.overdue.load(Relaxed)
    }

    /// Sets what [`Replica::overdue`] tells.
    pub fn set_overdue(&self, overdue: bool) {
        self.overdue.store(overdue, Relaxed);
    }

    fn refresh_limits(&self) {
        let spec = self.spec.load();
        let engine = |limit: &AtomicU64| Some(limit.load(Relaxed)).filter(|&tokens| tokens != UNLIMITED);
        let window = spec.max_context_tokens.map(|tokens| tokens.0).or_else(|| engine(&self.engine_window));
        let capacity = spec.token_capacity.map(|tokens| tokens.0).or_else(|| engine(&self.engine_capacity)).or(window);
        let capacity = capacity.unwrap_or(UNLIMITED);
        self.traits.capacity.store(capacity, Relaxed);
        // What cannot be held cannot be served, whatever window is declared.
        self.traits.window.store(window.unwrap_or(UNLIMITED).min(capacity), Relaxed);
    }

    fn publish(&self, c: Coefficients) {
        let t = &self.traits;
        t.overhead.set(c.overhead);
        t.per_prompt.set(c.per_prompt);
        t.doubling.set(c.doubling);
        t.base.set(c.base);
        t.per_sequence.set(c.per_sequence);
        t.per_context.set(c.per_context);
        let sequences = (t.max_sequences.load(Relaxed) as f64 / 2.0).max(1.0);
        t.seconds_per_token.set(1.0 / c.decode_rate(sequences, sequences * 1000.0));
        self.learned_at.store(self.home.clock.now().0, Relaxed);
    }

    pub(super) fn coefficients(&self) -> Coefficients {
        let t = &self.traits;
        Coefficients {
            overhead: t.overhead.get(),
            per_prompt: t.per_prompt.get(),
            doubling: t.doubling.get(),
            base: t.base.get(),
            per_sequence: t.per_sequence.get(),
            per_context: t.per_context.get(),
        }
    }

    /// Its stable id.
    pub fn id(&self) -> &ReplicaId {
        &self.id
    }

    /// The replica as last configured or discovered.
    pub fn spec(&self) -> Arc<ReplicaSpec> {
        self.spec.load_full()
    }

    /// Takes the engine's own signals, at most as a correction.
    pub fn set_signals(&self, signals: Signals) {
        self.traits.kv_pressure.set(signals.kv_pressure.unwrap_or(0.0).clamp(0.0, 1.0));
        let until = if signals.kv_pressure.is_some() { signals.read_at.after(SIGNALS_FRESH) } else { Time::ZERO };
        self.traits.signals_until.store(until.0, Relaxed);
    }

    /// Limits read from the engine, where the configuration leaves them out.
    pub fn set_engine_limits(&self, window: Option<Tokens>, capacity: Option<Tokens>) {
        self.engine_window.store(window.map_or(UNLIMITED, |tokens| tokens.0), Relaxed);
        self.engine_capacity.store(capacity.map_or(UNLIMITED, |tokens| tokens.0), Relaxed);
        self.refresh_limits();
    }

    /// Its books now.
    pub fn view(&self) -> ReplicaView {
        let (figures, now) = (&self.figures, self.home.clock.now());
        let c = self.coefficients();
        ReplicaView {
            spec: self.spec(),
            gate: self.gate(),
            projected_tokens: Tokens(figures.prefill() + figures.decode()),
            booked_kv_tokens: Tokens(figures.booked()),
            token_capacity: Some(self.traits.capacity.load(Relaxed)).filter(|&c| c != UNLIMITED).map(Tokens),
            load_seconds: self.load_seconds(),
            active_sequences: figures.sequences(),
            requests_in_flight: figures.requests(),
            kv_pressure: (self.traits.signals_until.load(Relaxed) > now.0).then(|| self.traits.kv_pressure.get()),
            decode_tokens_per_sec: 1.0 / self.traits.seconds_per_token.get(),
            prefill_tokens_per_sec: 1.0 / c.per_prompt,
        }
    }

    /// Seconds until all that is booked is done, were nothing added: the prompts, then the answers side by side.
    pub(super) fn load_seconds(&self) -> f64 {
        let (f, c) = (&self.figures, self.coefficients());
        let sequences = f.sequences() as f64;
        if sequences == 0.0 {
            return 0.0;
        }
        let rate = c.decode_rate(sequences, f.context() as f64);
        f.prefill_work() as f64 * c.per_prompt + f.decode() as f64 / rate
    }

    /// Seconds until the prompts of the streams sent there are computed.
    #[inline]
    pub(super) fn prompts_seconds(&self) -> f64 {
        self.traits.per_prompt.get() * self.figures.streamed_prompt_work() as f64
    }

    /// The factor of memory pressure the engine reports, 1 where it is unknown or stale.
    #[inline]
    pub(super) fn pressure_factor(&self, now: Time) -> f64 {
        let pressure = self.traits.kv_pressure.get();
        if pressure > 0.0 && self.traits.signals_until.load(Relaxed) > now.0 { 1.0 + 0.5 * pressure } else { 1.0 }
    }

    /// Books `demand` if the books are still those of `bookings` (any, where `None`) and it still fits.
    pub(super) fn book(
        &self,
        demand: &Demand<'_>,
        cached: u64,
        bookings: Option<u64>,
        chosen: u64,
    ) -> Result<u32, NotBooked> {
        let mut books = self.books.lock();
        if bookings.is_some_and(|seen| seen != self.figures.bookings()) {
            return Err(NotBooked::Changed);
        }
        if self.standing(demand.now) == Standing::Closed || demand.fit_on_its_terms(self) != Fit::Fits {
            return Err(NotBooked::Full);
        }
        let entry = demand.entry(self, cached);
        Ok(books.enter(&self.figures, entry, chosen))
    }

    /// Prompt work an entry still has before it.
    pub(super) fn work_of(&self, slot: u32) -> u64 {
        self.books.lock().get(slot).map_or(0, |entry| entry.prefill_work)
    }

    /// Output tokens a sequence may have at most, by what was asked and by the window.
    pub(super) fn window_left(&self, ask: &Ask) -> u64 {
        let window = self.traits.window.load(Relaxed).saturating_sub(ask.longest.0);
        ask.max_tokens.unwrap_or(UNLIMITED).min(window)
    }

    /// Changes a reservation's entry.
    pub(super) fn change(&self, slot: u32, change: impl FnOnce(&mut Entry)) {
        self.books.lock().change(&self.figures, slot, change);
    }

    /// A first token came: the prompt of this entry is computed.
    pub(super) fn prompt_done(&self, slot: u32) {
        let mut books = self.books.lock();
        let work = books.get(slot).map_or(0, |entry| entry.prefill_work);
        books.change(&self.figures, slot, |entry| {
            entry.prefill = 0;
            entry.prefill_work = 0;
        });
        self.prompt_work_done.fetch_add(work, Relaxed);
    }

    /// Prompt work done for all streams so far.
    pub(super) fn prompt_work_done(&self) -> u64 {
        self.prompt_work_done.load(Relaxed)
    }

    /// Releases exactly what an entry still holds.
    pub(super) fn release(&self, slot: u32) {
        let left = self.books.lock().leave(&self.figures, slot);
        debug_assert!(left.is_some(), "a reservation is released once");
    }

    /// Has the queues looked at, if anybody waits.
    pub(super) fn made_room(&self) {
        if self.home.waiting.load(Acquire) > 0
            && let Some(balancer) = self.home.balancer.upgrade()
        {
            balancer.serve();
        }
    }

    /// Learns from a run of tokens.
    pub(super) fn learn_run(&self, run: Run, now: Time) {
        let mut learner = self.learner.lock();
        if let Some(coefficients) = learner.run(run, now) {
            self.publish(coefficients);
        }
    }

    /// Learns from a time to first token.
    pub(super) fn learn_first_token(&self, seconds: f64, prompt_work: f64, now: Time) {
        let mut learner = self.learner.lock();
        if let Some(coefficients) = learner.first_token(seconds, prompt_work, now) {
            self.publish(coefficients);
        }
    }

    /// Draws down by time what sends no tokens, and lets coefficients nobody confirms drift to their prior.
    pub(super) fn pass_time(&self, now: Time) {
        let last = Time(self.drawn_at.load(Relaxed));
        let passed = now.since(last);
        // Whole tokens are drawn, so on a slow replica not before there is one.
        if passed >= DRAW_EVERY && passed.as_secs_f64() >= self.step_now() {
            self.drawn_at.store(now.0, Relaxed);
            self.draw_silent(passed.as_secs_f64());
        }
        if now.since(Time(self.learned_at.load(Relaxed))) >= DRIFT_EVERY {
            let mut learner = self.learner.lock();
            let coefficients = learner.drift(now);
            self.publish(coefficients);
        }
    }

    /// Seconds of a decode step as things are.
    fn step_now(&self) -> f64 {
        self.coefficients().step(self.figures.sequences() as f64, self.figures.context() as f64)
    }

    fn draw_silent(&self, seconds: f64) {
        let c = self.coefficients();
        let step = self.step_now();
        let mut books = self.books.lock();
        let silent: Vec<u32> = books.silent().to_vec();
        // Prompts are computed one after another, so the silent ones share what the engine computes in this time.
        let mut prompt_work = (seconds / c.per_prompt) as u64;
        for slot in silent {
            let before = prompt_work;
            books.change(&self.figures, slot, |entry| {
                if entry.prefill_work > prompt_work {
                    let left = entry.prefill_work - prompt_work;
                    entry.prefill = (entry.prefill as f64 * left as f64 / entry.prefill_work as f64).ceil() as u64;
                    entry.prefill_work = left;
                    prompt_work = 0;
                    return;
                }
                prompt_work -= entry.prefill_work;
                entry.prefill = 0;
                entry.prefill_work = 0;
                let tokens = ((seconds / step) as u64).min(entry.remaining.saturating_sub(1));
                entry.remaining -= tokens;
                entry.context += tokens * u64::from(entry.sequences);
            });
            self.prompt_work_done.fetch_add(before - prompt_work, Relaxed);
        }
    }

    /// KV tokens and sequences booked, read while nothing changes them.
    #[cfg(test)]
    pub(super) fn booked_exactly(&self) -> (u64, u64) {
        let _books = self.books.lock();
        (self.figures.booked(), self.figures.sequences())
    }

    /// Whether the sums equal the reservations: an invariant for tests and the simulator.
    ///
    /// # Errors
    /// Both, where they differ.
    pub fn audit(&self) -> Result<(), String> {
        self.books.lock().audit(&self.figures)
    }
}

/// Bookings that send no tokens are drawn down this often.
const DRAW_EVERY: Duration = Duration::from_millis(100);
/// A replica without observations drifts this often.
const DRIFT_EVERY: Duration = Duration::from_secs(1);

/// Why a booking was not made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NotBooked {
    /// Another booking came in between: score again.
    Changed,
    /// No room any more.
    Full,
}
