//! Whether a request fits a replica, and what it would book there.
//!
//! Capacity is memory, load is work: the books hold the prompt and the answer as long as it may become, while load
//! counts the uncached prompt and the answer's expected length.

use std::sync::atomic::Ordering::Relaxed;

use crate::config::BandSpec;
use crate::units::Time;

use super::ask::Ask;
use super::ledger::{Entry, WEIGHT_UNIT};
use super::remaining;
use super::replica::{Replica, UNLIMITED};

/// Whether a request fits a replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fit {
    Fits,
    /// It would, with fewer others there.
    Full,
    /// Its prompt fills the window.
    TooLong,
}

/// A request, with what its band and the moment make of it.
#[derive(Clone, Debug)]
pub(super) struct Demand<'a> {
    pub ask: &'a Ask,
    pub now: Time,
    /// Share of a replica's capacity its band may fill.
    pub share: f64,
    /// What a second of it is worth.
    pub weight: f64,
    pub ttft_weight: f64,
    /// Output tokens of one sequence: expected, and as many as it may become by the percentile.
    output: u64,
    output_most: u64,
    /// Prompt and answers together, where the window does not cut the answer short.
    whole: u64,
    whole_most: u64,
}

/// Counts are cut here, so that sums of a few of them cannot pass `u64`. No window comes near.
const TOKENS_MAX: u64 = 1 << 40;

impl<'a> Demand<'a> {
    pub fn new(ask: &'a Ask, band: &BandSpec, ttft_weight: f64, now: Time) -> Demand<'a> {
        let most = ask.max_tokens.unwrap_or(UNLIMITED);
        let sequences = u64::from(ask.sequences.max(1));
        let whole = |output: u64| ask.prompt.0.saturating_add(output.saturating_mul(sequences)).min(TOKENS_MAX);
        let output = remaining::at(&ask.output, 0).min(most);
        let output_most = ask.output.p90.min(most);
        Demand {
            ask,
            now,
            share: band.share,
            weight: band.weight,
            ttft_weight,
            output,
            output_most,
            whole: whole(output),
            whole_most: whole(output_most),
        }
    }

    /// Output tokens of one sequence there, for load.
    #[inline(always)]
    pub fn output(&self, window: u64) -> u64 {
        self.output.min(window.saturating_sub(self.ask.longest.0))
    }

    #[inline]
    fn sequences(&self) -> u64 {
        u64::from(self.ask.sequences.max(1))
    }

    /// KV tokens it books there: never more than the replica has, so that an empty one takes it.
    #[inline(always)]
    fn kv(&self, window: u64, capacity: u64) -> u64 {
        let left = window.saturating_sub(self.ask.longest.0);
        let whole = if left >= self.output_most { self.whole_most } else { self.cut_short(left) };
        whole.min(capacity)
    }

    #[cold]
    fn cut_short(&self, output: u64) -> u64 {
        self.ask.prompt.0.saturating_add(output.saturating_mul(self.sequences())).min(TOKENS_MAX)
    }

    /// Whether it fits by the replica's books. A statement about this moment, unless the books are locked.
    #[inline(always)]
    pub fn fit(&self, replica: &Replica) -> Fit {
        let (traits, figures) = (&replica.traits, &replica.figures);
        let window = traits.window.load(Relaxed);
        if self.ask.must_hold.0 >= window {
            return Fit::TooLong;
        }
        let sequences = figures.sequences();
        if sequences == 0 {
            return Fit::Fits;
        }
        if !replica.is_plain() && replica.on_trial() {
            return Fit::Full;
        }
        if sequences + self.sequences() > self.places(replica) {
            return Fit::Full;
        }
        let capacity = traits.capacity.load(Relaxed);
        if capacity == UNLIMITED {
            return Fit::Fits;
        }
        if figures.kv() + self.kv(window, capacity) <= self.room(capacity) { Fit::Fits } else { Fit::Full }
    }

    /// Sequences that this band may fill there. Places are shared as memory is: a band that may fill half of a replica
    /// leaves half of its places, too.
    #[inline(always)]
    fn places(&self, replica: &Replica) -> u64 {
        let mut most = replica.traits.max_sequences.load(Relaxed);
        if !replica.is_plain() {
            most = (most as f64 * replica.share(self.now)).ceil() as u64;
        }
        if self.share < 1.0 {
            most = ((most as f64 * self.share) as u64).max(1);
        }
        most
    }

    /// KV tokens that this band may fill there.
    #[inline(always)]
    fn room(&self, capacity: u64) -> u64 {
        if self.share < 1.0 { (capacity as f64 * self.share) as u64 } else { capacity }
    }

    /// Seconds until it should fit there, if nothing else came: what is booked leaves at the pace of its work.
    pub fn seconds_until_fit(&self, replica: &Replica) -> f64 {
        let (traits, figures) = (&replica.traits, &replica.figures);
        let (window, capacity) = (traits.window.load(Relaxed), traits.capacity.load(Relaxed));
        let seconds = replica.load_seconds();
        let part = |over: u64, booked: u64| if over == 0 { 0.0 } else { seconds * over as f64 / booked.max(1) as f64 };
        let places = (figures.sequences() + self.sequences()).saturating_sub(self.places(replica));
        let room = if capacity == UNLIMITED {
            0
        } else {
            (figures.kv() + self.kv(window, capacity)).saturating_sub(self.room(capacity))
        };
        part(places, figures.sequences()).max(part(room, figures.kv()))
    }

    /// What it weighs where tenants take turns and waits are projected.
    pub fn tokens(&self) -> u64 {
        self.whole
    }

    /// Whether whatever refuses `other` for want of room refuses this one too.
    pub fn no_smaller_than(&self, other: &Demand<'_>) -> bool {
        self.share <= other.share
            && self.ask.prompt >= other.ask.prompt
            && self.ask.longest >= other.ask.longest
            && self.ask.must_hold >= other.ask.must_hold
            && self.output_most >= other.output_most
            && self.sequences() >= other.sequences()
    }

    /// What it books there, with `cached` tokens of its prompt expected in the replica's prefix cache.
    pub fn entry(&self, replica: &Replica, cached: u64) -> Entry {
        let window = replica.traits.window.load(Relaxed);
        let capacity = replica.traits.capacity.load(Relaxed);
        let ask = self.ask;
        Entry {
            kv: self.kv(window, capacity),
            prefill: ask.prompt.0.saturating_sub(cached),
            prefill_work: self.prompt_work(replica, cached).ceil() as u64,
            remaining: self.output(window),
            sequences: ask.sequences.max(1),
            context: ask.prompt.0,
            weight: (self.weight * WEIGHT_UNIT).round().max(0.0) as u64,
            silent: !ask.stream,
        }
    }

    /// Prompt work there: several prompts count as that many of the longest's length.
    #[inline]
    pub fn prompt_work(&self, replica: &Replica, cached: u64) -> f64 {
        let (prompt, longest) = (self.ask.prompt.0, self.ask.longest.0.min(self.ask.prompt.0));
        if longest == 0 {
            return 0.0;
        }
        let doubled = 2.0 * replica.traits.doubling.get();
        let (from, to) = (cached.min(longest) as f64, longest as f64);
        (to - from) * (1.0 + (to + from) / doubled) * (prompt as f64 / to)
    }
}
