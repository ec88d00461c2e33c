//! How long a step of a model server takes, and how much it holds.

use std::time::Duration;

/// Tokens in one KV block: vLLM's default on GPUs.
pub const BLOCK_TOKENS: u32 = 16;

/// What one simulated engine is: the cost of a step, and the limits that make requests wait.
///
/// One step computes a token for every decoding sequence and a chunk of waiting prompts, and takes
/// `base + sequence × sequences + context × context tokens + prefill × Σ (1 + position / quad)` over the chunk's
/// positions, divided by `speed`. The shape is that of continuous batching on a GPU: reading the weights costs the
/// same for one sequence as for forty, each sequence adds a little, attention adds a little more per token held,
/// and prompt tokens are compute that everybody in the batch waits for. `docs/balancing.md` says how well it fits
/// measured servers.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineShape {
    /// Milliseconds of every step.
    pub base_ms: f64,
    /// Milliseconds for each sequence in the step.
    pub sequence_ms: f64,
    /// Milliseconds for each token of context that decoding sequences attend to.
    pub context_ms: f64,
    /// Milliseconds for a prompt token at position zero.
    pub prefill_ms: f64,
    /// The position at which a prompt token costs twice as much as at position zero, in tokens.
    pub quad_tokens: f64,
    /// Sequences in one step.
    pub max_sequences: u32,
    /// KV blocks of [`BLOCK_TOKENS`] tokens.
    pub kv_blocks: u32,
    /// Tokens computed in one step, prompts and answers together; longer prompts are computed in chunks.
    pub step_tokens: u32,
    /// The window of one request, prompt and answer together, in tokens.
    pub max_model_len: u32,
    /// Whether a lower `priority` is scheduled first (vLLM's `--scheduling-policy priority`), else first come.
    pub priority: bool,
    /// Whether blocks are kept after use and found again by their prompt's prefix.
    pub prefix_cache: bool,
    /// Divides every step's time; 1 is the shape as written.
    pub speed: f64,
}

impl Default for EngineShape {
    /// A mid-sized model on one data-centre GPU: 18 ms + 0.25 ms a sequence + 0.1 µs a context token, 0.06 ms a
    /// prompt token, 48 sequences, 256,000 tokens of KV memory.
    fn default() -> Self {
        EngineShape {
            base_ms: 18.0,
            sequence_ms: 0.25,
            context_ms: 0.0001,
            prefill_ms: 0.06,
            quad_tokens: 32_768.0,
            max_sequences: 48,
            kv_blocks: 16_000,
            step_tokens: 2_048,
            max_model_len: 131_072,
            priority: false,
            prefix_cache: true,
            speed: 1.0,
        }
    }
}

impl EngineShape {
    /// A shape with this total decode rate at half of `max_sequences`, each holding 1,000 tokens: 60% of that step is
    /// base, 30% per sequence, 10% context; prompts are computed at eight times the rate.
    pub fn from_rate(tokens_per_sec: f64, max_sequences: u32) -> EngineShape {
        let half = (f64::from(max_sequences) / 2.0).max(1.0);
        let step_ms = 1000.0 * half / tokens_per_sec;
        EngineShape {
            base_ms: 0.6 * step_ms,
            sequence_ms: 0.3 * step_ms / half,
            context_ms: 0.1 * step_ms / (half * 1000.0),
            prefill_ms: 1000.0 / (8.0 * tokens_per_sec),
            max_sequences,
            ..EngineShape::default()
        }
    }

    /// Total decode rate at half of `max_sequences`, each holding 1,000 tokens, in tokens per second: what a
    /// configuration calls `tokens_per_sec`.
    pub fn tokens_per_sec(&self) -> f64 {
        let half = (f64::from(self.max_sequences) / 2.0).max(1.0);
        half / self.decode_seconds(half, half * 1000.0)
    }

    /// Prompt tokens computed in a second when nothing else runs, near position zero.
    pub fn prefill_tokens_per_sec(&self) -> f64 {
        1000.0 * self.speed / self.prefill_ms.max(1e-9)
    }

    /// Tokens of KV memory.
    pub fn kv_tokens(&self) -> u64 {
        u64::from(self.kv_blocks) * u64::from(BLOCK_TOKENS)
    }

    /// Seconds of a step that only decodes.
    pub fn decode_seconds(&self, sequences: f64, context_tokens: f64) -> f64 {
        (self.base_ms + self.sequence_ms * sequences + self.context_ms * context_tokens) / 1000.0 / self.speed
    }

    /// Seconds that computing the prompt positions `from..to` adds to a step.
    pub fn prefill_seconds(&self, from: u32, to: u32) -> f64 {
        let (from, to) = (f64::from(from), f64::from(to));
        let tokens = to - from;
        self.prefill_ms * (tokens + (to * to - from * from) / (2.0 * self.quad_tokens)) / 1000.0 / self.speed
    }

    /// How long a step takes.
    pub fn step(&self, sequences: usize, context_tokens: u64, prefill_seconds: f64) -> Duration {
        let seconds = self.decode_seconds(sequences as f64, context_tokens as f64) + prefill_seconds;
        Duration::from_micros((seconds * 1e6).round().max(1.0) as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_costs_its_base_its_sequences_and_their_context() {
        let shape = EngineShape::default();
        assert_eq!(shape.step(10, 20_000, 0.0), Duration::from_micros(18_000 + 2_500 + 2_000));
        let twice = EngineShape { speed: 2.0, ..shape };
        assert_eq!(twice.step(10, 20_000, 0.0), Duration::from_micros(11_250));
    }

    #[test]
    fn prefill_in_chunks_costs_the_same_as_at_once() {
        let shape = EngineShape::default();
        let whole = shape.prefill_seconds(0, 32_768);
        let chunks: f64 = (0..16).map(|i| shape.prefill_seconds(i * 2_048, (i + 1) * 2_048)).sum();
        assert!((whole - chunks).abs() < 1e-9);
        // 0.06 ms × 32,768 × (1 + ½): the mean position costs half as much again.
        assert!((whole - 0.06e-3 * 32_768.0 * 1.5).abs() < 1e-9);
    }

    #[test]
    fn a_shape_from_a_rate_has_that_rate() {
        for rate in [100.0, 909.0, 4_500.0] {
            let shape = EngineShape::from_rate(rate, 64);
            assert!((shape.tokens_per_sec() - rate).abs() < 1e-6 * rate);
            assert!((shape.prefill_tokens_per_sec() - 8.0 * rate).abs() < 1e-6 * rate);
        }
    }
}
