//! The token counts an engine reports, from every API's shape.

/// Actual token counts. Cached tokens are part of `prompt`, reasoning tokens part of `output`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub prompt: u64,
    pub cached_prompt: u64,
    pub output: u64,
    pub reasoning: u64,
}

impl Usage {
    /// Reads a `usage` object (chat, completions, embeddings, responses, messages). `null`, `{}` and values that
    /// are no counts are not usage.
    pub fn from_json(value: &serde_json::Value) -> Option<Usage> {
        let _ = value;
        todo!("wire")
    }
}
