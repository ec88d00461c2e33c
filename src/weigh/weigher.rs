//! Weighs requests: the prompt counted, the answer estimated.

use std::sync::Arc;

use crate::config::Config;
use crate::units::{Clock, ModelName, TenantName, Tokens};
use crate::wire::{ApiError, Request};

use super::estimate::{Histories, HistoryKey, OutputEstimate};

/// How a prompt was counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CountSource {
    /// The model's own tokenizer and template.
    Tokenizer,
    /// Token ids given by the client.
    TokenIds,
    /// The engine's own `/tokenize`.
    Replica,
    /// The measured approximation: tokenizer not ready, not there, too slow, or media parts.
    Approximate,
}

/// A prompt's token count.
#[derive(Clone, Debug)]
pub struct PromptCount {
    pub tokens: Tokens,
    /// Prompts in the request (a list of texts is several); each answers `n` times.
    pub prompts: u32,
    /// The longest single prompt, which must fit the window.
    pub longest: Tokens,
    pub source: CountSource,
}

impl PromptCount {
    /// Whether the engine will report the very same number.
    pub fn exact(&self) -> bool {
        self.source != CountSource::Approximate
    }
}

/// What one request will cost.
#[derive(Clone, Debug)]
pub struct Weight {
    pub prompt: PromptCount,
    /// Of one sequence.
    pub output: OutputEstimate,
    /// Sequences the engine will run: prompts × n.
    pub sequences: u32,
    pub history: HistoryKey,
    /// Hashes of the rendered prompt's blocks, chained: the prefix that a replica may hold in its cache.
    pub prefix: Arc<[u64]>,
}

/// Weighs requests by one configuration's models.
#[derive(Debug)]
pub struct Weigher {}

/// What the weigher is told beside the request.
#[derive(Clone, Debug, Default)]
pub struct WeighHints {
    pub tenant: Option<TenantName>,
    /// `x-weighbridge-task`.
    pub task: Option<String>,
    /// The largest window of the model's replicas.
    pub window: Option<Tokens>,
}

impl Weigher {
    /// A weigher for a configuration's models. Tokenizers load in the background (call within a tokio runtime or
    /// not at all: loading uses threads of its own); those that `previous` already holds are shared.
    pub fn new(
        config: &Config,
        histories: Arc<Histories>,
        previous: Option<&Weigher>,
        clock: Arc<dyn Clock>,
    ) -> Arc<Weigher> {
        let _ = (config, histories, previous, clock);
        todo!("weigh")
    }

    /// Weighs a request. Small prompts are counted on the caller's task, large ones on the bounded pool.
    ///
    /// # Errors
    /// `invalid_request` where the template refuses the conversation; `context_length_exceeded` is decided by the
    /// caller, who knows the windows, except for bodies whose length alone proves that no window holds them.
    pub async fn weigh(&self, model: &ModelName, request: &Request, hints: &WeighHints) -> Result<Weight, ApiError> {
        let _ = (model, request, hints);
        todo!("weigh")
    }

    /// Whether every tokenizer is loaded or has failed.
    pub fn ready(&self) -> bool {
        todo!("weigh")
    }

    /// Tells each model's tokenizer state, for metrics and `check`.
    pub fn tokenizers(&self) -> Vec<(ModelName, TokenizerState)> {
        todo!("weigh")
    }
}

/// Where a tokenizer stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenizerState {
    Loading,
    Ready,
    /// With the reason; the model is weighed by approximation.
    Failed(String),
}
