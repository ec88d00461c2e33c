//! What a request will cost: tokenizers, chat templates, the count cache, tasks and answer-length estimates.
//!
//! Knows nothing of Pingora or sockets, except that a `hub:` tokenizer is downloaded and a `replica` one asked for
//! over HTTP, each in a file of its own.

pub mod answer;
pub mod count;
pub mod counted;
pub mod draft;
pub mod estimate;
pub mod loader;
pub mod media;
pub mod prompt;
pub mod source;
pub mod template;
pub mod weigher;

pub use counted::{CountSource, PromptCount};
pub use estimate::{EstimateSource, Histories, OutputEstimate};
pub use source::replica::ReplicaAsk;
pub use weigher::{TokenizerState, WeighHints, Weigher, Weight};

#[cfg(test)]
mod tests;
