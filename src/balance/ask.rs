//! What is asked of the balancer, and why it may refuse.

use std::sync::Arc;
use std::time::Duration;

use crate::units::{Band, ModelName, TenantName, Tokens};
use crate::weigh::OutputEstimate;

/// One request, as the balancer sees it.
#[derive(Clone, Debug)]
pub struct Ask {
    pub model: ModelName,
    /// Tokens of all prompts together.
    pub prompt: Tokens,
    /// The longest single prompt.
    pub longest: Tokens,
    /// What a replica's window must exceed: the longest prompt, with a margin where that is an estimate.
    pub must_hold: Tokens,
    /// Sequences the engine will run, at least 1.
    pub sequences: u32,
    /// Of one sequence.
    pub output: OutputEstimate,
    pub max_tokens: Option<u64>,
    pub band: Band,
    pub tenant: Option<TenantName>,
    /// A hash of the session's id; breaks ties.
    pub session: Option<u64>,
    /// Chained hashes of the rendered prompt's blocks.
    pub prefix: Arc<[u64]>,
    /// Tokens in one block of `prefix`; 0 where there is none.
    pub prefix_block_tokens: u32,
    /// Whether tokens will be seen as they come; else the booking decays by the replica's rate.
    pub stream: bool,
    /// The client's objective for its first token.
    pub ttft_objective: Option<Duration>,
}

/// Why a request has no place.
#[derive(Clone, Debug, PartialEq)]
pub enum Refusal {
    /// No replica's window holds the prompt.
    ContextLength { prompt: Tokens, window: Tokens },
    /// Queue full, or hopeless by the books. Carries the projected time until there is room.
    NoCapacity { retry_after: Duration },
    /// No replica of the model may be chosen now.
    NoReplica { retry_after: Duration },
    /// Waited past its band's limit.
    QueueTimeout { waited: Duration, retry_after: Duration },
    /// Displaced from a full queue by a higher band.
    Displaced { retry_after: Duration },
}
