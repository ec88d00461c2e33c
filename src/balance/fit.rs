//! Whether a request fits a replica, and what it would book there.
//!
//! Capacity is memory, load is work: the books hold the prompt and the answer as long as it may become, while load
//! counts the uncached prompt and the answer's expected length.

use std::sync::atomic::Ordering::Relaxed;

use crate::config::BandSpec;
use crate::units::Time;

use super::ask::Ask;
use super::ledger::{BANDS, Entry, SPREAD_MAX, WEIGHT_UNIT};
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

/// On which terms a place is looked for. Whoever can wait in the queue may do so by choice although there is room; the
/// default is a place now or none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Terms {
    /// It does not stand behind prompts, since a higher band is served.
    pub yields: bool,
    /// It waits for the replica that holds its prompt, where that is sooner.
    pub seeks_its_prefix: bool,
    /// It waited so long that it is served in a higher band's turn.
    pub risen: bool,
}

impl Terms {
    pub const NOW: Terms = Terms { yields: false, seeks_its_prefix: false, risen: false };
}

/// Where a higher band is served, a request of a lower one is not sent behind prompts of more than this many seconds
/// that are yet to be computed, about a decode step's time: in an engine it would stand before whatever the higher band
/// sends next, in the queue it does not.
const BEHIND_SECONDS_MAX: f64 = 0.02;

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
    pub terms: Terms,
    /// Its band, cut to what ledgers tell apart.
    pub band: u8,
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
            terms: Terms::NOW,
            band: ask.band.0.min(BANDS as u8 - 1),
            output,
            output_most,
            whole: whole(output),
            whole_most: whole(output_most),
        }
    }

    /// The same on these terms.
    pub fn on(self, terms: Terms) -> Demand<'a> {
        Demand { terms, ..self }
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

    /// KV tokens it is expected to become there, and how many more it may: together never more than the replica has, so
    /// that an empty one takes it.
    #[inline(always)]
    fn kv(&self, window: u64, capacity: u64) -> (u64, u64) {
        let left = window.saturating_sub(self.ask.longest.0);
        let (whole, most) = if left >= self.output_most.max(self.output) {
            (self.whole, self.whole_most)
        } else {
            (self.cut_short(left.min(self.output)), self.cut_short(left.min(self.output_most)))
        };
        let most = most.min(capacity);
        let whole = whole.min(most);
        (whole, (most - whole).min(SPREAD_MAX))
    }

    #[cold]
    fn cut_short(&self, output: u64) -> u64 {
        self.ask.prompt.0.saturating_add(output.saturating_mul(self.sequences())).min(TOKENS_MAX)
    }

    /// Whether it should be placed there: it fits, and does not stand behind prompts that it can wait for elsewhere.
    #[inline(always)]
    pub fn fit_on_its_terms(&self, replica: &Replica) -> Fit {
        if self.band == 0 || !(self.terms.yields || self.terms.risen) {
            self.fit(replica)
        } else {
            self.fit_of_a_lower_band(replica)
        }
    }

    fn fit_of_a_lower_band(&self, replica: &Replica) -> Fit {
        let fit = self.fit(replica);
        // Where none of its band runs nothing is asked of it: so no band starves, whatever the others do.
        let alone = replica.figures.of_band(self.band) == 0;
        match fit {
            Fit::Fits if self.terms.yields && !alone && replica.prompts_seconds() > BEHIND_SECONDS_MAX => Fit::Full,
            Fit::Full if self.terms.risen && alone => Demand { share: 1.0, ..self.clone() }.fit(replica),
            _ => fit,
        }
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
        let (kv, spread) = self.kv(window, capacity);
        // Whether Σ kv + √(Σ spread²) stays within the room, without the root.
        let Some(left) = self.room(capacity).checked_sub(figures.kv() + kv) else { return Fit::Full };
        if figures.spread_squares() + spread * spread <= left.saturating_mul(left) { Fit::Fits } else { Fit::Full }
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
            let (kv, spread) = self.kv(window, capacity);
            let squares = figures.spread_squares() + spread * spread;
            (figures.kv() + kv + squares.isqrt()).saturating_sub(self.room(capacity))
        };
        part(places, figures.sequences()).max(part(room, figures.booked()))
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
            && self.output >= other.output
            && self.output_most >= other.output_most
            && self.sequences() >= other.sequences()
    }

    /// What it books there, with `cached` tokens of its prompt expected in the replica's prefix cache.
    pub fn entry(&self, replica: &Replica, cached: u64) -> Entry {
        let window = replica.traits.window.load(Relaxed);
        let capacity = replica.traits.capacity.load(Relaxed);
        let ask = self.ask;
        let (kv, spread) = self.kv(window, capacity);
        Entry {
            kv,
            spread,
            prefill: ask.prompt.0.saturating_sub(cached),
            prefill_work: self.prompt_work(replica, cached).ceil() as u64,
            remaining: self.output(window),
            sequences: ask.sequences.max(1),
            context: ask.prompt.0,
            weight: (self.weight * WEIGHT_UNIT).round().max(0.0) as u64,
            silent: !ask.stream,
            band: self.band,
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
