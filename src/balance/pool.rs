//! The replicas that serve one model, and the choice among them.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use parking_lot::Mutex;

use crate::config::PolicyName;
use crate::units::{Band, ModelName, ReplicaId, Time, Tokens};

use super::ask::{Ask, Refusal};
use super::balancer::NO_REPLICA;
use super::fit::{Demand, Fit};
use super::ledger::BANDS;
use super::policy::{self, LeastRequests, LeastTokens, Policy, PowerOfTwo, Random, RoundRobin, TokenLoad};
use super::prefix::PrefixIndex;
use super::queue::{Ahead, Line, Waiting};
use super::replica::{NotBooked, Replica, Standing, UNLIMITED};

/// Scores within this share of the lowest count as equal.
const TIE: f64 = 0.01;
/// How often a choice is made again because another booking came in between. Past it, what fits is taken as scored:
/// with so many placing at once, the books are a moment old whatever one does.
const RESCANS_MAX: u32 = 16;

/// A band is served as long as one of its requests was placed within this time. Where none comes, nobody is kept waiting
/// for it.
const SERVES_FOR: Duration = Duration::from_secs(10);

/// One model's replicas.
#[derive(Debug)]
pub(super) struct Pool {
    pub model: ModelName,
    /// In the order of their numbers.
    pub members: Box<[Arc<Replica>]>,
    pub policy: PolicyName,
    /// Kept over configurations.
    pub kept: Arc<Kept>,
}

/// What a pool keeps over configurations.
#[derive(Debug)]
pub(super) struct Kept {
    pub prefixes: PrefixIndex,
    pub queue: Mutex<Line<Waiting>>,
    pub keep: Keep,
    /// When a request of each band was placed last, in microseconds; 0 is never.
    served: [AtomicU64; BANDS],
    /// State of the random policies' numbers.
    random: AtomicU64,
}

/// A replica whose room is kept for one waiting request.
#[derive(Debug, Default)]
pub(super) struct Keep {
    /// Where that request's ask lies in memory, which tells it from all others that wait; 0 for nobody.
    ask: AtomicUsize,
    replica: AtomicU32,
    /// The band in whose turn it is: bands above it do not see that anything is kept.
    level: AtomicU8,
}

impl Keep {
    fn set(&self, ask: &Ask, level: Band, replica: u32) {
        self.replica.store(replica, Relaxed);
        self.level.store(level.0, Relaxed);
        self.ask.store(address(ask), Relaxed);
    }

    /// Nothing is kept any more.
    pub fn release(&self) {
        self.ask.store(0, Relaxed);
    }

    /// The replica that is kept for this ask.
    fn kept_for(&self, ask: &Ask) -> Option<u32> {
        (self.ask.load(Relaxed) == address(ask)).then(|| self.replica.load(Relaxed))
    }

    /// The replica that is not for this ask.
    fn kept_from(&self, ask: &Ask) -> Option<u32> {
        let owner = self.ask.load(Relaxed);
        let for_others = owner != 0 && owner != address(ask) && ask.band.0 >= self.level.load(Relaxed);
        for_others.then(|| self.replica.load(Relaxed))
    }
}

fn address(ask: &Ask) -> usize {
    std::ptr::from_ref(ask).addr()
}

impl Kept {
    pub fn new(seed: u64) -> Kept {
        Kept {
            prefixes: PrefixIndex::default(),
            queue: Mutex::default(),
            keep: Keep::default(),
            served: Default::default(),
            random: AtomicU64::new(seed),
        }
    }

    /// SplitMix64: seeded, and threads share it without a lock.
    fn random(&self) -> u64 {
        mix(self.random.fetch_add(0x9e37_79b9_7f4a_7c15, Relaxed))
    }
}

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A replica that may take the request, as it was scored.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    score: f64,
    member: u32,
    bookings: u64,
}

/// Memory that one thread's choices use again and again.
#[derive(Debug, Default)]
struct Scratch {
    candidates: Vec<Candidate>,
    /// Blocks of the prompt that each member holds; empty where none is asked for.
    held: Vec<u32>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Why members were passed over, and which class of them is the best there is.
#[derive(Debug)]
struct Seen {
    /// The best class of members whose window holds the prompt; [`NO_CLASS`] where there are none.
    best: u8,
    /// The last choice of any of them.
    latest: u64,
}

const NO_CLASS: u8 = u8::MAX;

/// Classes of members, best first: those not tried, not backed off, not ill.
fn class(standing: Standing, tried: bool) -> Option<u8> {
    let tried = u8::from(tried);
    match standing {
        Standing::Ready => Some(tried * 2),
        Standing::BackedOff => Some(1 + tried * 2),
        Standing::Ill => Some(4 + tried),
        Standing::Closed => None,
    }
}

/// A choice that was booked.
#[derive(Debug)]
pub(super) struct Booked {
    pub replica: Arc<Replica>,
    pub slot: u32,
    /// Tokens of the prompt expected in its prefix cache.
    pub cached: u64,
}

/// Why nothing was booked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unbooked {
    /// Some could take it, with fewer others there.
    Full,
    /// None may be chosen.
    Closed,
    /// No window holds it; the largest is this.
    TooLong(u64),
}

/// Does something with the policy of this name, compiled for each: a fleet is scored without a call per replica.
macro_rules! with_policy {
    ($name:expr, |$policy:ident| $do:expr) => {
        match $name {
            PolicyName::TokenLoad => {
                let $policy = TokenLoad;
                $do
            }
            PolicyName::LeastTokens => {
                let $policy = LeastTokens;
                $do
            }
            PolicyName::LeastRequests => {
                let $policy = LeastRequests;
                $do
            }
            PolicyName::PowerOfTwo => {
                let $policy = PowerOfTwo;
                $do
            }
            PolicyName::RoundRobin => {
                let $policy = RoundRobin;
                $do
            }
            PolicyName::Random => {
                let $policy = Random;
                $do
            }
        }
    };
}

impl Pool {
    /// Chooses and books in one step.
    pub fn place(&self, demand: &Demand<'_>, tried: &[ReplicaId]) -> Result<Booked, Unbooked> {
        SCRATCH.with(|scratch| match scratch.try_borrow_mut() {
            Ok(mut scratch) => self.place_with(demand, tried, &mut scratch),
            Err(_) => self.place_with(demand, tried, &mut Scratch::default()),
        })
    }

    fn place_with(&self, demand: &Demand<'_>, tried: &[ReplicaId], scratch: &mut Scratch) -> Result<Booked, Unbooked> {
        let booked = with_policy!(self.policy, |policy| self.choose(policy, demand, tried, scratch))?;
        let ask = demand.ask;
        self.kept.served[usize::from(demand.band)].store(demand.now.0.max(1), Relaxed);
        if !ask.prefix.is_empty() && policy::sees_prefixes(self.policy) {
            let computed = ask.prompt.0.saturating_sub(booked.cached);
            self.kept.prefixes.insert(&ask.prefix, &booked.replica, computed);
        }
        Ok(booked)
    }

    /// Who would take it, and at which score.
    pub fn cheapest(&self, demand: &Demand<'_>) -> Option<(Arc<Replica>, f64)> {
        SCRATCH.with(|scratch| {
            let scratch = &mut *scratch.try_borrow_mut().ok()?;
            self.find_held(demand, &mut scratch.held);
            let chosen = with_policy!(self.policy, |policy| {
                self.score(&policy, demand, &[], 0, scratch);
                self.draw(&policy, &mut scratch.candidates);
                self.least(demand, &scratch.candidates)
            })?;
            Some((self.members[chosen.member as usize].clone(), chosen.score))
        })
    }

    fn choose(
        &self,
        policy: impl Policy,
        demand: &Demand<'_>,
        tried: &[ReplicaId],
        scratch: &mut Scratch,
    ) -> Result<Booked, Unbooked> {
        self.find_held(demand, &mut scratch.held);
        let mut wanted = 0;
        for attempt in 0.. {
            let seen = self.score(&policy, demand, tried, wanted, scratch);
            if seen.best == NO_CLASS {
                return Err(self.unbooked(demand));
            }
            if seen.best != wanted && attempt <= 2 * RESCANS_MAX {
                // Nothing in the wanted class; what there is instead is asked for.
                wanted = seen.best;
                continue;
            }
            self.draw(&policy, &mut scratch.candidates);
            let Some(chosen) = self.least(demand, &scratch.candidates) else { return Err(Unbooked::Full) };
            if demand.terms.seeks_its_prefix
                && policy.prices_prefixes()
                && self.worth_waiting(&policy, demand, chosen, &scratch.held)
            {
                return Err(Unbooked::Full);
            }
            let replica = &self.members[chosen.member as usize];
            let cached = self.cached(demand, chosen.member as usize, &scratch.held);
            let bookings = (attempt < RESCANS_MAX).then_some(chosen.bookings);
            match replica.book(demand, cached, bookings, seen.latest + 1) {
                Ok(slot) => return Ok(Booked { replica: replica.clone(), slot, cached }),
                // Each time another placement went through, or this one gives up the right to be exact; where a
                // replica filled up, the next scan passes it over.
                Err(NotBooked::Changed | NotBooked::Full) if attempt < 2 * RESCANS_MAX => {}
                Err(_) => return Err(Unbooked::Full),
            }
        }
        Err(Unbooked::Full)
    }

    /// Whether a replica that holds more of the prompt and has no room is worth waiting for: placed there when it has,
    /// by the books, the request adds fewer seconds than where it was chosen to go now. For a faster or less loaded
    /// replica alone nothing waits: that was measured to cost more than it brings.
    fn worth_waiting(&self, policy: &impl Policy, demand: &Demand<'_>, chosen: Candidate, held: &[u32]) -> bool {
        let Some(&there) = held.get(chosen.member as usize) else { return false };
        let kept = self.kept.keep.kept_from(demand.ask);
        held.iter().zip(&self.members).enumerate().any(|(member, (&blocks, replica))| {
            if blocks <= there
                || Some(replica.number) == kept
                // Nobody knows when a replica on trial, or in its slow start, has room.
                || !replica.is_plain()
                || demand.fit(replica) != Fit::Full
            {
                return false;
            }
            let later = policy.score(replica, demand, self.cached(demand, member, held), f64::INFINITY);
            later + demand.weight * demand.ttft_weight * demand.seconds_until_fit(replica) < chosen.score
        })
    }

    fn find_held(&self, demand: &Demand<'_>, held: &mut Vec<u32>) {
        held.clear();
        let ask = demand.ask;
        if ask.prefix.is_empty() || ask.prefix_block_tokens == 0 || !policy::sees_prefixes(self.policy) {
            return;
        }
        held.resize(self.members.len(), 0);
        self.kept.prefixes.held(&ask.prefix, &self.members, |member, blocks| held[member] = blocks as u32);
    }

    /// Tokens of the prompt that a member is expected to hold; the last one is always computed.
    #[inline(always)]
    fn cached(&self, demand: &Demand<'_>, member: usize, held: &[u32]) -> u64 {
        let blocks = held.get(member).copied().unwrap_or(0);
        if blocks == 0 {
            return 0;
        }
        (u64::from(blocks) * u64::from(demand.ask.prefix_block_tokens)).min(demand.ask.prompt.0.saturating_sub(1))
    }

    fn score(
        &self,
        policy: &impl Policy,
        demand: &Demand<'_>,
        tried: &[ReplicaId],
        wanted: u8,
        scratch: &mut Scratch,
    ) -> Seen {
        let Scratch { candidates, held } = scratch;
        candidates.clear();
        let mut seen = Seen { best: NO_CLASS, latest: 0 };
        let mut equal = f64::INFINITY;
        let all_compared = policy.sample().is_none();
        let kept = self.kept.keep.kept_from(demand.ask).unwrap_or(u32::MAX);
        for (member, replica) in self.members.iter().enumerate() {
            let bookings = replica.figures.bookings();
            seen.latest = seen.latest.max(replica.figures.chosen());
            let class = if replica.is_plain() && tried.is_empty() {
                0
            } else if let Some(class) = self.class_in_full(replica, demand, tried) {
                class
            } else {
                continue;
            };
            let score = if class == wanted {
                policy.score(replica, demand, self.cached(demand, member, held), equal)
            } else {
                f64::INFINITY
            };
            // What is worse than one that fits is not looked at further: `best` is known by then.
            if all_compared && score > equal {
                continue;
            }
            let fit = demand.fit_on_its_terms(replica);
            if fit == Fit::TooLong {
                continue;
            }
            seen.best = seen.best.min(class);
            if fit == Fit::Fits && class == wanted && replica.number != kept {
                if all_compared {
                    equal = equal.min(score + score.abs() * TIE);
                }
                candidates.push(Candidate { score, member: member as u32, bookings });
            }
        }
        seen
    }

    #[cold]
    fn class_in_full(&self, replica: &Replica, demand: &Demand<'_>, tried: &[ReplicaId]) -> Option<u8> {
        let mut standing = replica.standing(demand.now);
        if standing == Standing::Ready && !self.in_its_share(replica, demand) {
            standing = Standing::BackedOff;
        }
        class(standing, tried.contains(replica.id()))
    }

    /// Whether a replica in its slow start takes part in this choice: in its share of them, by lot.
    #[inline]
    fn in_its_share(&self, replica: &Replica, demand: &Demand<'_>) -> bool {
        let share = replica.share(demand.now);
        share >= 1.0 || ((self.kept.random() >> 11) as f64) < share * (1u64 << 53) as f64
    }

    /// Leaves as many candidates, drawn at random, as the policy compares.
    fn draw(&self, policy: &impl Policy, candidates: &mut Vec<Candidate>) {
        let Some(sample) = policy.sample() else { return };
        for i in 0..sample.min(candidates.len()) {
            let left = (candidates.len() - i) as u64;
            candidates.swap(i, i + (self.kept.random() % left) as usize);
        }
        candidates.truncate(sample);
    }

    /// The lowest score; among equals the session's own replica, else the one chosen least recently.
    fn least(&self, demand: &Demand<'_>, candidates: &[Candidate]) -> Option<Candidate> {
        let lowest = candidates.iter().map(|candidate| candidate.score).min_by(f64::total_cmp)?;
        let equal = lowest + lowest.abs() * TIE;
        let equals = candidates.iter().filter(|candidate| candidate.score <= equal);
        // Where everybody costs the same by rule, turns and lots decide: a session would pin what is to be spread.
        match demand.ask.session.filter(|_| policy::sees_prefixes(self.policy)) {
            Some(session) => {
                equals.max_by_key(|c| mix(session ^ mix(self.members[c.member as usize].identity))).copied()
            }
            None => equals.min_by_key(|c| self.members[c.member as usize].figures.chosen()).copied(),
        }
    }

    fn unbooked(&self, demand: &Demand<'_>) -> Unbooked {
        let long = demand.ask.must_hold.0;
        let windows = self.members.iter().filter(|replica| !replica.is_leaving());
        match windows.map(|replica| replica.traits.window.load(Relaxed)).max() {
            Some(largest) if largest <= long => Unbooked::TooLong(largest),
            _ => Unbooked::Closed,
        }
    }

    /// The largest window; `None` where one is unlimited or there is none.
    pub fn window(&self) -> Option<Tokens> {
        let windows = self.members.iter().filter(|replica| !replica.is_leaving());
        windows
            .map(|replica| replica.traits.window.load(Relaxed))
            .max()
            .filter(|&window| window != UNLIMITED)
            .map(Tokens)
    }

    /// The contract's refusal for what could not be booked and does not wait.
    pub fn refusal(&self, demand: &Demand<'_>, why: Unbooked, ahead: Ahead) -> Refusal {
        match why {
            Unbooked::TooLong(window) => Refusal::ContextLength { prompt: demand.ask.longest, window: Tokens(window) },
            Unbooked::Closed => NO_REPLICA,
            Unbooked::Full => Refusal::NoCapacity { retry_after: self.retry_after(demand, ahead) },
        }
    }

    /// When asking again makes sense, by the books.
    pub fn retry_after(&self, demand: &Demand<'_>, ahead: Ahead) -> Duration {
        let seconds = self.projected_wait(demand, ahead);
        Duration::from_secs_f64(seconds.clamp(RETRY_SECONDS_MIN, RETRY_SECONDS_MAX))
    }

    /// Seconds until those ahead and then this one have room, by the books: what is booked leaves at the pace at which
    /// it is worked off. Memory and sequences each make their own projection; the later one holds.
    pub fn projected_wait(&self, demand: &Demand<'_>, ahead: Ahead) -> f64 {
        let (mut kv_leaving, mut kv_free, mut sequences_leaving, mut sequences_free) = (0.0, 0.0, 0.0, 0.0);
        for replica in self.members.iter().filter(|replica| replica.standing(demand.now) == Standing::Ready) {
            let (kv, sequences) = (replica.figures.booked() as f64, replica.figures.sequences() as f64);
            let seconds = replica.load_seconds();
            if seconds > 0.0 {
                kv_leaving += kv / seconds;
                sequences_leaving += sequences / seconds;
            }
            let capacity = replica.traits.capacity.load(Relaxed);
            if capacity == UNLIMITED {
                kv_free = f64::INFINITY;
            } else if demand.fit(replica) == Fit::Fits {
                kv_free += (capacity as f64 * demand.share - kv).max(0.0);
            }
            sequences_free += replica.traits.max_sequences.load(Relaxed) as f64 - sequences;
        }
        let after = |need: f64, leaving: f64| if need > 0.0 && leaving > 0.0 { need / leaving } else { 0.0 };
        let kv = after((demand.tokens() + ahead.tokens) as f64 - kv_free, kv_leaving);
        let sequences = (ahead.requests + u64::from(demand.ask.sequences.max(1))) as f64 - sequences_free;
        kv.max(after(sequences, sequences_leaving))
    }

    /// Whether it fits some replica that is ready, on its terms.
    pub fn has_room(&self, demand: &Demand<'_>) -> bool {
        let mut ready = self.members.iter().filter(|replica| replica.standing(demand.now) == Standing::Ready);
        ready.any(|replica| demand.fit_on_its_terms(replica) == Fit::Fits)
    }

    /// Whether a request of a higher band than this was placed a moment ago.
    pub fn serves_above(&self, band: Band, now: Time) -> bool {
        let above = &self.kept.served[..usize::from(band.0).min(BANDS - 1)];
        above.iter().map(|at| at.load(Relaxed)).any(|at| at > 0 && now.since(Time(at)) <= SERVES_FOR)
    }

    /// Whether the room of a replica is kept for this ask.
    pub fn keeps_one_for(&self, ask: &Ask) -> bool {
        self.kept.keep.kept_for(ask).is_some()
    }

    /// Keeps the room of one replica for a waiting request: of the one where it should fit first, and then of that one
    /// as long as it is ready, whatever the projections say later. It is kept from the band in whose turn the request
    /// is, and from those below.
    pub fn keep_one_for(&self, demand: &Demand<'_>, level: Band) {
        let already = self.kept.keep.kept_for(demand.ask);
        if self.members.iter().any(|r| Some(r.number) == already && r.standing(demand.now) == Standing::Ready) {
            return;
        }
        let ready = self
            .members
            .iter()
            .filter(|replica| replica.standing(demand.now) == Standing::Ready && demand.fit(replica) != Fit::TooLong);
        let soonest = ready
            .map(|replica| (demand.seconds_until_fit(replica), replica.number))
            .min_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        match soonest {
            Some((_, number)) => self.kept.keep.set(demand.ask, level, number),
            None => self.kept.keep.release(),
        }
    }

    /// Whether none of its replicas is configured any more.
    pub fn is_gone(&self) -> bool {
        self.members.iter().all(|replica| replica.is_leaving())
    }
}

/// Bounds of a computed retry: sooner is hammering, later is no longer a projection.
const RETRY_SECONDS_MIN: f64 = 0.1;
const RETRY_SECONDS_MAX: f64 = 600.0;
