//! How fast a replica is: what a prompt token and a decode step take it, learned from its own streams.
//!
//! A step takes `base + per_sequence · sequences + per_context · context tokens`, and longer where prompts are computed
//! in between; a prompt takes `per_prompt` for each uncached token, growing with the position (attention). Before
//! anything is seen, the shape is laid out from `tokens_per_sec` as the configuration documents it. Each stream then
//! gives observations: the time a run of its tokens took, and the time to its first token. They are fitted by least
//! squares whose old observations fade with time, drawn towards *the prior shape at the speed that was seen*: with
//! few or one-sided observations (always the same batch) only the speed moves, with many the shape does.
//!
//! Not learned: how attention grows with position, for which few streams tell enough; and nothing is learned while a
//! replica is silent, when it drifts back to its prior, so that a replica that was slow is tried again.

use crate::config::ReplicaSpec;
use crate::units::Time;

/// What a replica's time is made of. Seconds a token, seconds a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Coefficients {
    /// Seconds before any first token, whatever the prompt: the step it joins, the way there and back.
    pub overhead: f64,
    /// Seconds for an uncached prompt token at position zero.
    pub per_prompt: f64,
    /// Position at which a prompt token takes twice `per_prompt`.
    pub doubling: f64,
    /// Seconds of a decode step with nothing in it.
    pub base: f64,
    /// Seconds each sequence adds to a step.
    pub per_sequence: f64,
    /// Seconds each token of context adds to a step.
    pub per_context: f64,
}

/// Position where attention has doubled a prompt token's cost:
/// 32,768 on the engine whose shape the simulator takes.
const DOUBLING_TOKENS: f64 = 32_768.0;
/// Of a step at half of `max_sequences`: base, sequences, context (at `PRIOR_CONTEXT` tokens each).
const PRIOR_SHARES: (f64, f64, f64) = (0.6, 0.3, 0.1);
const PRIOR_CONTEXT: f64 = 1000.0;
/// A GPU computes a prompt about this many times faster than it decodes in a batch.
const PREFILL_PER_DECODE: f64 = 8.0;

impl Coefficients {
    /// The shape laid out from the configured rates.
    pub fn prior(spec: &ReplicaSpec) -> Coefficients {
        let rate = spec.tokens_per_sec.max(1e-3);
        let sequences = (f64::from(spec.max_sequences) / 2.0).max(1.0);
        let step = sequences / rate;
        let prefill = spec.prefill_tokens_per_sec.unwrap_or(PREFILL_PER_DECODE * rate).max(1e-3);
        Coefficients {
            overhead: step * PRIOR_SHARES.0,
            per_prompt: 1.0 / prefill,
            doubling: DOUBLING_TOKENS,
            base: step * PRIOR_SHARES.0,
            per_sequence: step * PRIOR_SHARES.1 / sequences,
            per_context: step * PRIOR_SHARES.2 / (sequences * PRIOR_CONTEXT),
        }
    }

    /// Prompt tokens from `cached` to `prompt`, each counted as many times as its position costs.
    pub fn prompt_work(&self, cached: u64, prompt: u64) -> f64 {
        let (from, to) = (cached.min(prompt) as f64, prompt as f64);
        (to - from) * (1.0 + (to + from) / (2.0 * self.doubling))
    }

    /// Seconds of one decode step.
    pub fn step(&self, sequences: f64, context: f64) -> f64 {
        self.base + self.per_sequence * sequences + self.per_context * context
    }

    /// Tokens a second of a batch.
    pub fn decode_rate(&self, sequences: f64, context: f64) -> f64 {
        sequences / self.step(sequences, context)
    }
}

/// Observations fade by half over this time while others come in. A replica that slows down to a third is believed
/// at 1.9 times within 6 s and at 2.75 within 18 s.
const HALF_LIFE_SECONDS: f64 = 6.0;
/// One observation fades the others by at most this many seconds' worth: after a lull the first one must not be alone.
const FADE_SECONDS_MAX: f64 = 1.0;
/// Without observations what was seen loses half of its weight in this time, so that a replica drifts back to its prior.
const DRIFT_HALF_LIFE_SECONDS: f64 = 60.0;
/// The same where it is believed slower than its prior, since what is believed slow gets nothing to show otherwise: a
/// busy one, believed at a third of its speed and left alone since, is tried again after a minute. Sooner would
/// send it requests again and again while it is slow.
const SLOW_DRIFT_HALF_LIFE_SECONDS: f64 = 10.0;
/// How many observations the prior shape (at the speed seen) counts for.
const SHAPE_WEIGHT: f64 = 4.0;
/// How many observations the prior speed counts for.
const SPEED_WEIGHT: f64 = 4.0;
/// One observation is believed at most this many times slower or faster than expected: a first request that compiles
/// kernels, a paused virtual machine.
const SURPRISE_MAX: f64 = 4.0;
/// Solved again after this many observations, or after `SOLVE_SECONDS`.
const SOLVE_EVERY: u32 = 16;
const SOLVE_SECONDS: f64 = 0.2;

/// Least squares over `K` parts of a time, in multiples of their prior.
#[derive(Clone, Debug)]
struct Fit<const K: usize> {
    /// Σ z zᵀ / (Σ z)², fading.
    squares: [[f64; K]; K],
    /// Σ z · seen / (Σ z)², fading.
    products: [f64; K],
    /// Σ 1 and Σ seen / prior's expectation, fading: the overall speed.
    seen: f64,
    slowness: f64,
    factors: [f64; K],
    at: Time,
}

impl<const K: usize> Fit<K> {
    fn new() -> Self {
        Fit { squares: [[0.0; K]; K], products: [0.0; K], seen: 0.0, slowness: 0.0, factors: [1.0; K], at: Time::ZERO }
    }

    /// Takes one observation: `parts`, each by its prior coefficient, took `seen` seconds.
    fn observe(&mut self, parts: [f64; K], seen: f64, weight: f64, now: Time) {
        let by_prior: f64 = parts.iter().sum();
        let expected: f64 = parts.iter().zip(&self.factors).map(|(part, factor)| part * factor).sum();
        if !(by_prior > 0.0 && expected > 0.0 && seen.is_finite() && seen > 0.0) {
            return;
        }
        let seen = seen.clamp(expected / SURPRISE_MAX, expected * SURPRISE_MAX);
        self.fade(HALF_LIFE_SECONDS, FADE_SECONDS_MAX, now);
        // By the prior, not by what is expected now: else the slow times of a replica would count for less than its
        // fast ones.
        let scale = weight / (by_prior * by_prior);
        for i in 0..K {
            for j in 0..K {
                self.squares[i][j] += parts[i] * parts[j] * scale;
            }
            self.products[i] += parts[i] * seen * scale;
        }
        self.seen += weight;
        self.slowness += weight * seen / by_prior;
    }

    fn fade(&mut self, half_life: f64, seconds_max: f64, now: Time) {
        let keep = (-now.since(self.at).as_secs_f64().min(seconds_max) / half_life).exp2();
        self.at = now.max(self.at);
        self.squares.iter_mut().flatten().for_each(|sum| *sum *= keep);
        self.products.iter_mut().for_each(|sum| *sum *= keep);
        self.seen *= keep;
        self.slowness *= keep;
    }

    fn drift(&mut self, now: Time) {
        let slower = self.slowness > self.seen;
        let half_life = if slower { SLOW_DRIFT_HALF_LIFE_SECONDS } else { DRIFT_HALF_LIFE_SECONDS };
        self.fade(half_life, f64::INFINITY, now);
    }

    fn solve(&mut self) {
        let speed = (self.slowness + SPEED_WEIGHT) / (self.seen + SPEED_WEIGHT);
        let mut matrix = self.squares;
        let mut right = self.products;
        // The pull towards the prior shape is as strong on each part as `SHAPE_WEIGHT` observations that this part
        // alone explained would be.
        let pull = SHAPE_WEIGHT;
        for i in 0..K {
            matrix[i][i] += pull / K as f64;
            right[i] += pull / K as f64 * speed;
        }
        if let Some(solution) = solve(matrix, right) {
            // A negative part means that another explains it better; a twentieth of the speed keeps scores sane.
            self.factors = solution.map(|factor| factor.clamp(speed / 20.0, speed * 20.0));
        }
    }
}

/// Gaussian elimination with pivoting; `None` where the matrix is singular.
fn solve<const K: usize>(mut matrix: [[f64; K]; K], mut right: [f64; K]) -> Option<[f64; K]> {
    for column in 0..K {
        let pivot = (column..K).max_by(|&a, &b| matrix[a][column].abs().total_cmp(&matrix[b][column].abs()))?;
        if matrix[pivot][column].abs() < 1e-12 {
            return None;
        }
        matrix.swap(column, pivot);
        right.swap(column, pivot);
        for row in column + 1..K {
            let by = matrix[row][column] / matrix[column][column];
            let upper = matrix[column];
            for (value, above) in matrix[row].iter_mut().zip(upper).skip(column) {
                *value -= by * above;
            }
            right[row] -= by * right[column];
        }
    }
    for row in (0..K).rev() {
        let known: f64 = (row + 1..K).map(|column| matrix[row][column] * right[column]).sum();
        right[row] = (right[row] - known) / matrix[row][row];
    }
    right.iter().all(|value| value.is_finite()).then_some(right)
}

/// A run of one stream's tokens.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    pub seconds: f64,
    /// Tokens of one sequence, so decode steps.
    pub steps: f64,
    /// Sequences and context tokens on the replica while it ran, averaged.
    pub sequences: f64,
    pub context: f64,
    /// Prompt work the replica did meanwhile, for all streams.
    pub prompt_work: f64,
}

/// Learns one replica's coefficients.
#[derive(Clone, Debug)]
pub(super) struct Learner {
    prior: Coefficients,
    /// Parts: base, sequences, context, prompts computed in between.
    decode: Fit<4>,
    /// Parts: overhead, prompt work ahead and own.
    prefill: Fit<2>,
    unsolved: u32,
    solved_at: Time,
    /// First tokens still to be passed over: the first request after a start measures the start.
    passed_over: u32,
}

impl Learner {
    pub fn new(prior: Coefficients) -> Learner {
        Learner { prior, decode: Fit::new(), prefill: Fit::new(), unsolved: 0, solved_at: Time::ZERO, passed_over: 1 }
    }

    /// The replica has started again: its first request measures the start, not the speed.
    pub fn restarted(&mut self) {
        self.passed_over = 1;
    }

    /// Takes another prior and keeps what was learned as multiples of it only where the prior is the same.
    pub fn set_prior(&mut self, prior: Coefficients) {
        if prior != self.prior {
            *self = Learner::new(prior);
        }
    }

    /// A run of tokens. Gives new coefficients where it is time for them.
    pub fn run(&mut self, run: Run, now: Time) -> Option<Coefficients> {
        if run.steps < 1.0 || run.seconds <= 0.0 {
            return None;
        }
        let parts = [
            self.prior.base,
            self.prior.per_sequence * run.sequences,
            self.prior.per_context * run.context,
            self.prior.per_prompt * run.prompt_work / run.steps,
        ];
        self.decode.observe(parts, run.seconds / run.steps, 1.0, now);
        self.solved(now)
    }

    /// A first token came after `seconds`, with this prompt work ahead of it and its own.
    pub fn first_token(&mut self, seconds: f64, prompt_work: f64, now: Time) -> Option<Coefficients> {
        if self.passed_over > 0 {
            self.passed_over -= 1;
            return None;
        }
        let parts = [self.prior.overhead, self.prior.per_prompt * prompt_work];
        self.prefill.observe(parts, seconds, 1.0, now);
        self.solved(now)
    }

    fn solved(&mut self, now: Time) -> Option<Coefficients> {
        self.unsolved += 1;
        if self.unsolved < SOLVE_EVERY && now.since(self.solved_at).as_secs_f64() < SOLVE_SECONDS {
            return None;
        }
        Some(self.solve(now))
    }

    /// Nothing may have come for a while: drifts back towards the prior.
    pub fn drift(&mut self, now: Time) -> Coefficients {
        self.decode.drift(now);
        self.prefill.drift(now);
        self.solve(now)
    }

    fn solve(&mut self, now: Time) -> Coefficients {
        self.unsolved = 0;
        self.solved_at = now;
        self.decode.solve();
        self.prefill.solve();
        self.coefficients()
    }

    pub fn coefficients(&self) -> Coefficients {
        let ([base, sequence, context, _], [overhead, prompt]) = (self.decode.factors, self.prefill.factors);
        Coefficients {
            overhead: self.prior.overhead * overhead,
            per_prompt: self.prior.per_prompt * prompt,
            doubling: self.prior.doubling,
            base: self.prior.base * base,
            per_sequence: self.prior.per_sequence * sequence,
            per_context: self.prior.per_context * context,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PRIOR: Coefficients = Coefficients {
        overhead: 0.02,
        per_prompt: 0.0001,
        doubling: 32_768.0,
        base: 0.02,
        per_sequence: 0.0003,
        per_context: 1e-7,
    };

    /// Feeds a learner for some seconds with runs of a replica whose truth is `truth`, ten a second.
    fn feed(learner: &mut Learner, truth: Coefficients, from: f64, seconds: f64) -> Coefficients {
        let mut learned = learner.coefficients();
        for i in 0..(seconds * 10.0) as u64 {
            let now = Time::from_secs_f64(from + i as f64 / 10.0);
            // Batches come and go, and measurements jitter by a tenth.
            let sequences = 8.0 + (i * 7 % 23) as f64;
            let context = sequences * (300.0 + (i * 13 % 9) as f64 * 150.0);
            let jitter = 0.9 + (i * 11 % 21) as f64 / 100.0;
            let step = truth.step(sequences, context) * jitter;
            let run = Run { seconds: step * 16.0, steps: 16.0, sequences, context, prompt_work: 0.0 };
            learned = learner.run(run, now).unwrap_or(learned);
            let work = 200.0 + (i * 17 % 31) as f64 * 100.0;
            let first = (truth.overhead + truth.per_prompt * work) * jitter;
            learned = learner.first_token(first, work, now).unwrap_or(learned);
        }
        learned
    }

    fn close(seen: f64, truth: f64, by: f64) -> bool {
        (seen / truth - 1.0).abs() < by
    }

    #[test]
    fn a_wrong_prior_is_replaced_by_what_is_seen() {
        let truth = Coefficients {
            overhead: 0.01,
            per_prompt: 0.00005,
            base: 0.018,
            per_sequence: 0.0009,
            per_context: 2e-7,
            ..PRIOR
        };
        let mut learner = Learner::new(PRIOR);
        let learned = feed(&mut learner, truth, 0.0, 30.0);
        // Where it mostly runs it is well known, at the edge less.
        for (sequences, context, by) in [(8.0, 4000.0, 0.16), (19.0, 15_000.0, 0.06), (30.0, 30_000.0, 0.1)] {
            let (seen, true_step) = (learned.step(sequences, context), truth.step(sequences, context));
            assert!(close(seen, true_step, by), "{seen} for {true_step} at {sequences}");
        }
        assert!(close(learned.per_prompt, truth.per_prompt, 0.1), "{learned:?}");
    }

    #[test]
    fn a_replica_that_slows_to_a_third_is_believed_within_thirty_seconds_and_when_it_is_back() {
        let slow = Coefficients {
            overhead: PRIOR.overhead * 3.0,
            per_prompt: PRIOR.per_prompt * 3.0,
            base: PRIOR.base * 3.0,
            per_sequence: PRIOR.per_sequence * 3.0,
            per_context: PRIOR.per_context * 3.0,
            ..PRIOR
        };
        let mut learner = Learner::new(PRIOR);
        feed(&mut learner, PRIOR, 0.0, 60.0);
        let learned = feed(&mut learner, slow, 60.0, 15.0);
        assert!(learned.step(16.0, 16_000.0) > 2.2 * PRIOR.step(16.0, 16_000.0), "half way there: {learned:?}");
        let learned = feed(&mut learner, slow, 75.0, 15.0);
        assert!(close(learned.step(16.0, 16_000.0), slow.step(16.0, 16_000.0), 0.15), "{learned:?}");
        assert!(close(learned.per_prompt, slow.per_prompt, 0.15), "{learned:?}");
        let learned = feed(&mut learner, PRIOR, 90.0, 30.0);
        assert!(close(learned.step(16.0, 16_000.0), PRIOR.step(16.0, 16_000.0), 0.15), "{learned:?}");
    }

    #[test]
    fn a_first_request_that_compiles_for_minutes_does_not_poison() {
        let mut learner = Learner::new(PRIOR);
        let seconds = Time::from_secs_f64;
        assert_eq!(learner.first_token(500.0, 300.0, seconds(500.0)), None);
        for i in 0..4 {
            let first = (PRIOR.overhead + PRIOR.per_prompt * 300.0) * 1.05;
            learner.first_token(first, 300.0, seconds(501.0 + f64::from(i)));
        }
        // Nor does a later outlier, by more than its share.
        learner.first_token(300.0, 300.0, seconds(506.0));
        let learned = learner.solve(seconds(506.0));
        assert!(learned.per_prompt < 2.0 * PRIOR.per_prompt, "{learned:?}");
    }

    #[test]
    fn a_replica_nobody_uses_drifts_back_to_its_prior() {
        let slow = Coefficients { base: PRIOR.base * 4.0, ..PRIOR };
        let mut learner = Learner::new(PRIOR);
        let learned = feed(&mut learner, slow, 0.0, 30.0);
        assert!(learned.base > 2.5 * PRIOR.base, "{learned:?}");
        let mut drifted = learned;
        for second in 30..900 {
            drifted = learner.drift(Time::from_secs_f64(f64::from(second)));
        }
        assert!(close(drifted.base, PRIOR.base, 0.1), "{drifted:?}");
    }

    #[test]
    fn the_prior_decodes_at_the_configured_rate_at_half_of_its_sequences() {
        let spec = crate::balance::tests::spec("a");
        let prior = Coefficients::prior(&spec);
        let rate = prior.decode_rate(128.0, 128_000.0);
        assert!(close(rate, spec.tokens_per_sec, 1e-9), "{rate}");
        assert!(close(1.0 / prior.per_prompt, 8000.0, 1e-9));
    }

    #[test]
    fn prompt_work_grows_with_the_position() {
        assert_eq!(PRIOR.prompt_work(0, 0), 0.0);
        assert!(close(PRIOR.prompt_work(0, 32_768), 1.5 * 32_768.0, 1e-9));
        let halves = PRIOR.prompt_work(0, 10_000) + PRIOR.prompt_work(10_000, 20_000);
        assert!(close(halves, PRIOR.prompt_work(0, 20_000), 1e-9), "a prompt in two parts is the same work");
    }
}
