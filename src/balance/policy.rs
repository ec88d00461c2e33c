//! The policies: what a replica costs a request. The lowest score of those it fits takes it.

use std::fmt;

use crate::config::PolicyName;

use super::fit::Demand;
use super::replica::Replica;

/// A rule that scores one replica for one request, lower being better, from the booked tokens alone.
pub(super) trait Policy: fmt::Debug + Send + Sync {
    /// The score; never negative, never NaN. What is sure to be above `bound` may be given as infinite.
    fn score(&self, replica: &Replica, demand: &Demand<'_>, cached: u64, bound: f64) -> f64;

    /// Whether its scores are seconds in which a prompt that is computed elsewhere counts, so that waiting can be weighed
    /// against them.
    fn prices_prefixes(&self) -> bool {
        false
    }

    /// Of how many replicas, drawn at random, the best is taken; `None` for all.
    fn sample(&self) -> Option<usize> {
        None
    }
}

/// Seconds this placement adds, to the request and to everyone booked there.
#[derive(Clone, Copy, Debug)]
pub(super) struct TokenLoad;

impl Policy for TokenLoad {
    fn prices_prefixes(&self) -> bool {
        true
    }

    #[inline(always)]
    fn score(&self, replica: &Replica, demand: &Demand<'_>, cached: u64, bound: f64) -> f64 {
        let (traits, figures) = (&replica.traits, &replica.figures);
        let window = traits.window.load(std::sync::atomic::Ordering::Relaxed);
        let output = demand.output(window);
        let per_prompt = traits.per_prompt.get();
        let (per_sequence, per_context) = (traits.per_sequence.get(), traits.per_context.get());
        let sequences = figures.sequences() as f64 + f64::from(demand.ask.sequences.max(1));
        let prompt = demand.ask.prompt.as_f64();
        let context = figures.context() as f64 + prompt;

        let prefill = per_prompt * demand.prompt_work(replica, cached);
        let wait = per_prompt * figures.prefill_work() as f64;
        let step = traits.base.get() + per_sequence * sequences + per_context * context;
        let first = wait + prefill;
        let late = demand.ask.ttft_objective.map_or(0.0, |objective| (first - objective.as_secs_f64()).max(0.0));
        let own = demand.ttft_weight * (first + LATE_WEIGHT * late) + output as f64 * step;

        // Harm only adds, and is what takes time to sum up.
        if demand.weight * own > bound {
            return f64::INFINITY;
        }
        let slower = per_sequence * f64::from(demand.ask.sequences.max(1)) + per_context * prompt;
        let harm = figures.weight_sum() * prefill + figures.weighted_overlap(output) * slower;

        (demand.weight * own + harm) * replica.pressure_factor(demand.now) + traits.distance.get()
    }
}

/// A second past a client's objective for its first token counts this many times more.
const LATE_WEIGHT: f64 = 3.0;

/// Projected tokens by speed.
#[derive(Clone, Copy, Debug)]
pub(super) struct LeastTokens;

impl Policy for LeastTokens {
    #[inline(always)]
    fn score(&self, replica: &Replica, demand: &Demand<'_>, cached: u64, _: f64) -> f64 {
        let (traits, figures) = (&replica.traits, &replica.figures);
        let window = traits.window.load(std::sync::atomic::Ordering::Relaxed);
        let own =
            demand.ask.prompt.0.saturating_sub(cached) + demand.output(window) * u64::from(demand.ask.sequences.max(1));
        let tokens = (figures.prefill() + figures.decode() + own) as f64;
        tokens * traits.seconds_per_token.get() * replica.pressure_factor(demand.now) + traits.distance.get()
    }
}

/// Requests in flight.
#[derive(Clone, Copy, Debug)]
pub(super) struct LeastRequests;

impl Policy for LeastRequests {
    #[inline(always)]
    fn score(&self, replica: &Replica, _: &Demand<'_>, _: u64, _: f64) -> f64 {
        replica.figures.requests() as f64
    }
}

/// The less requested of two drawn at random.
#[derive(Clone, Copy, Debug)]
pub(super) struct PowerOfTwo;

impl Policy for PowerOfTwo {
    fn score(&self, replica: &Replica, demand: &Demand<'_>, cached: u64, bound: f64) -> f64 {
        LeastRequests.score(replica, demand, cached, bound)
    }

    fn sample(&self) -> Option<usize> {
        Some(2)
    }
}

/// In turn: all cost the same, and the one chosen least recently takes it.
#[derive(Clone, Copy, Debug)]
pub(super) struct RoundRobin;

impl Policy for RoundRobin {
    #[inline(always)]
    fn score(&self, _: &Replica, _: &Demand<'_>, _: u64, _: f64) -> f64 {
        0.0
    }
}

/// One drawn at random.
#[derive(Clone, Copy, Debug)]
pub(super) struct Random;

impl Policy for Random {
    #[inline(always)]
    fn score(&self, _: &Replica, _: &Demand<'_>, _: u64, _: f64) -> f64 {
        0.0
    }

    fn sample(&self) -> Option<usize> {
        Some(1)
    }
}

/// Whether a policy looks at what replicas hold in their prefix caches.
pub(super) fn sees_prefixes(policy: PolicyName) -> bool {
    matches!(policy, PolicyName::TokenLoad | PolicyName::LeastTokens)
}
