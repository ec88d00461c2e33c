//! What is booked on one replica and not yet done.
//!
//! The books are a slab of entries, one for each reservation, changed only under the replica's lock. Their sums are
//! kept beside them as whole numbers in [`Figures`], which a scorer reads without the lock: a sum read in the middle of
//! a change is a moment old, never wrong for good, and [`Figures::bookings`] tells the one who books whether what
//! was scored still holds. Whole numbers, not floats: what is taken away is exactly what was added, so an idle ledger
//! is zero.

use std::sync::atomic::{AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};

/// Classes of remaining lengths: two an octave, the last from 49,152 tokens up.
pub(super) const BUCKETS: usize = 32;

/// Band weights are kept in thousandths, so that sums stay whole.
pub(super) const WEIGHT_UNIT: f64 = 1000.0;

/// Bands whose entries are told apart; those below the last of these count as it.
pub(super) const BANDS: usize = 8;

/// A spread's square stays small enough for sums of 65,000 of them.
pub(super) const SPREAD_MAX: u64 = 1 << 24;

/// The class of a remaining length.
pub(super) fn bucket(remaining: u64) -> usize {
    if remaining < 2 {
        return remaining as usize;
    }
    let octave = remaining.ilog2();
    let half = (remaining >> (octave - 1)) & 1;
    ((2 * octave as usize) + half as usize).min(BUCKETS - 1)
}

/// What one reservation holds on a replica at a moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Entry {
    /// KV tokens: the prompt and the answers at their expected length, so many of them as there will be at the end.
    pub kv: u64,
    /// How many more it may become, by the configured percentile: at most [`SPREAD_MAX`].
    pub spread: u64,
    /// Prompt tokens the replica has yet to compute.
    pub prefill: u64,
    /// The same, with attention's growth over the prompt counted in.
    pub prefill_work: u64,
    /// Output tokens expected of one sequence.
    pub remaining: u64,
    pub sequences: u32,
    /// Tokens of all sequences now in the KV cache.
    pub context: u64,
    /// The band's weight in thousandths.
    pub weight: u64,
    /// Sends no tokens before its end, so time draws it down.
    pub silent: bool,
    /// Its band, cut to what is told apart.
    pub band: u8,
}

impl Entry {
    fn decode(&self) -> u64 {
        self.remaining * u64::from(self.sequences)
    }

    /// Takes what it is now expected to become. As long as it holds no more than it was booked for, it stays within
    /// that; an answer that grew past its booking holds what it holds, and what it is expected to add is booked too.
    pub fn expect(&mut self, kv: u64) {
        if kv <= self.kv {
            return;
        }
        let most = self.kv + self.spread;
        self.kv = if self.context > most { kv } else { kv.min(most) };
        self.spread = most.saturating_sub(self.kv);
    }
}

/// Sums over a replica's entries. Written under the lock, read without it. The first cache line is all that
/// `least-tokens` and the question whether a request fits read.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub(super) struct Figures {
    /// Entries ever made: changes exactly where load was added.
    bookings: AtomicU64,
    /// When it was chosen last, on the pool's count of choices.
    chosen: AtomicU64,
    kv: AtomicU64,
    /// Σ spread².
    spread_squares: AtomicU64,
    sequences: AtomicU64,
    prefill: AtomicU64,
    decode: AtomicU64,
    requests: AtomicU64,
    context: AtomicU64,
    prefill_work: AtomicU64,
    /// Of it, what belongs to answers that come whole: when their prompts are computed nobody tells.
    silent_work: AtomicU64,
    /// Weights of all entries.
    weights: AtomicU64,
    /// By class of remaining length. Apart, so that a fleet's first lines lie close together.
    classes: Box<Classes>,
}

#[derive(Debug, Default)]
struct Classes {
    weights: [AtomicU64; BUCKETS],
    /// Weight × remaining.
    tokens: [AtomicU64; BUCKETS],
    /// Entries of each band.
    bands: [AtomicU64; BANDS],
}

fn add(sum: &AtomicU64, n: u64) {
    sum.store(sum.load(Relaxed) + n, Relaxed);
}

fn sub(sum: &AtomicU64, n: u64) {
    let before = sum.load(Relaxed);
    debug_assert!(before >= n, "a ledger's sum would fall below zero: {before} - {n}");
    sum.store(before.saturating_sub(n), Relaxed);
}

impl Figures {
    /// Read before anything that is scored.
    pub fn bookings(&self) -> u64 {
        self.bookings.load(Acquire)
    }

    pub fn chosen(&self) -> u64 {
        self.chosen.load(Relaxed)
    }

    /// KV tokens that all entries are expected to become.
    pub fn kv(&self) -> u64 {
        self.kv.load(Relaxed)
    }

    /// Σ spread² over the entries.
    pub fn spread_squares(&self) -> u64 {
        self.spread_squares.load(Relaxed)
    }

    /// KV tokens booked: what all entries together become at the percentile that each is booked at. Answers' lengths
    /// are independent, so it is their spreads' squares that add up.
    pub fn booked(&self) -> u64 {
        let squares = self.spread_squares();
        let root = squares.isqrt();
        self.kv() + root + u64::from(root * root < squares)
    }

    pub fn sequences(&self) -> u64 {
        self.sequences.load(Relaxed)
    }

    pub fn prefill(&self) -> u64 {
        self.prefill.load(Relaxed)
    }

    pub fn decode(&self) -> u64 {
        self.decode.load(Relaxed)
    }

    pub fn requests(&self) -> u64 {
        self.requests.load(Relaxed)
    }

    pub fn context(&self) -> u64 {
        self.context.load(Relaxed)
    }

    pub fn prefill_work(&self) -> u64 {
        self.prefill_work.load(Relaxed)
    }

    /// Entries of a band.
    pub fn of_band(&self, band: u8) -> u64 {
        self.classes.bands[usize::from(band) % BANDS].load(Relaxed)
    }

    /// Prompt work of answers that stream: their first tokens tell when it is done.
    pub fn streamed_prompt_work(&self) -> u64 {
        self.prefill_work().saturating_sub(self.silent_work.load(Relaxed))
    }

    /// Σ weight over the entries.
    pub fn weight_sum(&self) -> f64 {
        self.weights.load(Relaxed) as f64 / WEIGHT_UNIT
    }

    /// Σ weight × min(remaining, `output`) over the entries, by class of remaining length.
    pub fn weighted_overlap(&self, output: u64) -> f64 {
        let own = bucket(output);
        let mut sum = 0u64;
        for tokens in &self.classes.tokens[..own] {
            sum += tokens.load(Relaxed);
        }
        let mut longer = 0u64;
        for weights in &self.classes.weights[own + 1..] {
            longer += weights.load(Relaxed);
        }
        sum += self.classes.tokens[own].load(Relaxed).min(self.classes.weights[own].load(Relaxed) * output);
        (sum + longer * output) as f64 / WEIGHT_UNIT
    }

    fn add(&self, entry: &Entry) {
        add(&self.kv, entry.kv);
        add(&self.spread_squares, entry.spread * entry.spread);
        add(&self.sequences, u64::from(entry.sequences));
        add(&self.prefill, entry.prefill);
        add(&self.prefill_work, entry.prefill_work);
        add(&self.silent_work, if entry.silent { entry.prefill_work } else { 0 });
        add(&self.decode, entry.decode());
        add(&self.requests, 1);
        add(&self.context, entry.context);
        add(&self.weights, entry.weight);
        let class = bucket(entry.remaining);
        add(&self.classes.weights[class], entry.weight);
        add(&self.classes.tokens[class], entry.weight * entry.remaining);
        add(&self.classes.bands[usize::from(entry.band) % BANDS], 1);
    }

    fn sub(&self, entry: &Entry) {
        sub(&self.kv, entry.kv);
        sub(&self.spread_squares, entry.spread * entry.spread);
        sub(&self.sequences, u64::from(entry.sequences));
        sub(&self.prefill, entry.prefill);
        sub(&self.prefill_work, entry.prefill_work);
        sub(&self.silent_work, if entry.silent { entry.prefill_work } else { 0 });
        sub(&self.decode, entry.decode());
        sub(&self.requests, 1);
        sub(&self.context, entry.context);
        sub(&self.weights, entry.weight);
        let class = bucket(entry.remaining);
        sub(&self.classes.weights[class], entry.weight);
        sub(&self.classes.tokens[class], entry.weight * entry.remaining);
        sub(&self.classes.bands[usize::from(entry.band) % BANDS], 1);
    }
}

/// A replica's entries. Every change goes through here and keeps [`Figures`] equal to their sum.
#[derive(Debug, Default)]
pub(super) struct Books {
    entries: Vec<Option<Entry>>,
    free: Vec<u32>,
    /// Slots of entries that time draws down.
    silent: Vec<u32>,
}

impl Books {
    /// Enters a booking, chosen as the `chosen`th, and gives its slot.
    pub fn enter(&mut self, figures: &Figures, entry: Entry, chosen: u64) -> u32 {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.entries.push(None);
            (self.entries.len() - 1) as u32
        });
        self.entries[slot as usize] = Some(entry);
        if entry.silent {
            self.silent.push(slot);
        }
        figures.add(&entry);
        figures.chosen.store(chosen, Relaxed);
        figures.bookings.store(figures.bookings.load(Relaxed) + 1, Release);
        slot
    }

    /// An entry as it stands.
    pub fn get(&self, slot: u32) -> Option<&Entry> {
        self.entries.get(slot as usize)?.as_ref()
    }

    /// Changes an entry and the sums with it.
    pub fn change(&mut self, figures: &Figures, slot: u32, change: impl FnOnce(&mut Entry)) {
        let Some(entry) = self.entries.get_mut(slot as usize).and_then(Option::as_mut) else {
            debug_assert!(false, "a reservation's entry is gone before its release");
            return;
        };
        let before = *entry;
        change(entry);
        let after = *entry;
        debug_assert_eq!(before.silent, after.silent);
        figures.add(&after);
        figures.sub(&before);
    }

    /// Takes an entry out: exactly what it still holds leaves the sums.
    pub fn leave(&mut self, figures: &Figures, slot: u32) -> Option<Entry> {
        let entry = self.entries.get_mut(slot as usize)?.take()?;
        self.free.push(slot);
        if entry.silent {
            self.silent.retain(|&s| s != slot);
        }
        figures.sub(&entry);
        self.check_idle(figures);
        Some(entry)
    }

    /// Slots of entries that time draws down.
    pub fn silent(&self) -> &[u32] {
        &self.silent
    }

    fn check_idle(&self, figures: &Figures) {
        if figures.requests() == 0 {
            debug_assert_eq!(
                (figures.booked(), figures.sequences(), figures.prefill(), figures.decode(), figures.context()),
                (0, 0, 0, 0, 0),
                "an idle ledger is not zero"
            );
        }
    }

    /// Whether the sums are those of the entries.
    pub fn audit(&self, figures: &Figures) -> Result<(), String> {
        let fresh = Figures::default();
        for entry in self.entries.iter().flatten() {
            fresh.add(entry);
        }
        let list = |f: &Figures| {
            let mut all = vec![
                f.kv(),
                f.spread_squares(),
                f.sequences(),
                f.prefill(),
                f.prefill_work(),
                f.silent_work.load(Relaxed),
                f.decode(),
                f.requests(),
                f.context(),
                f.weights.load(Relaxed),
            ];
            all.extend(
                f.classes.weights.iter().chain(&f.classes.tokens).chain(&f.classes.bands).map(|sum| sum.load(Relaxed)),
            );
            all
        };
        let (kept, summed) = (list(figures), list(&fresh));
        if kept == summed { Ok(()) } else { Err(format!("ledger {kept:?}, sum of reservations {summed:?}")) }
    }
}
