//! Reads an answer as it passes: SSE events or one JSON document, in any chunking, beside the untouched bytes.

use bytes::Bytes;

use super::endpoint::Endpoint;
use super::usage::Usage;

/// How an answer is to be read.
#[derive(Clone, Debug)]
pub struct AnswerKind {
    pub endpoint: Endpoint,
    /// `text/event-stream`, by the answer's own content type.
    pub sse: bool,
    /// The client did not ask for the usage chunk: hide it.
    pub hide_usage: bool,
    /// The answer's `content-encoding` (`gzip`, `br`, `zstd`), read from a decoded copy; hiding is then not possible.
    pub encoding: Option<String>,
    /// Longest event or document read, in bytes; past it bytes still pass, unread.
    pub event_bytes: usize,
}

/// What has been seen of an answer so far.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Progress {
    /// Events that carried content (text, reasoning, tool-call arguments, token ids).
    pub content_events: u64,
    /// Output tokens so far: running usage where the engine gives it, else content events.
    pub output_tokens: u64,
    /// The last usage reported; running totals replace one another, they are never summed.
    pub usage: Option<Usage>,
    /// Usage in the last chunk was a final report (not a running total).
    pub usage_final: bool,
    /// The stream or document reported an error after its 200.
    pub error: Option<String>,
    /// `[DONE]`, `response.completed`, `message_stop`, or a whole JSON document was seen.
    pub done: bool,
    /// A finish reason was seen.
    pub finished: bool,
    /// Something was too large or too broken to read; counts are estimates.
    pub unread: bool,
}

/// Reads one answer.
#[derive(Debug)]
pub struct AnswerReader {
    kind: AnswerKind,
    progress: Progress,
}

impl AnswerReader {
    pub fn new(kind: AnswerKind) -> Self {
        AnswerReader { kind, progress: Progress::default() }
    }

    /// Takes the next chunk and returns what goes to the client now: the very same bytes, unless a hidden usage
    /// chunk is among them. Bytes are held back only from the start of an event that may yet prove to be a
    /// usage chunk to hide (`hide_usage`), never when there is nothing to hide.
    pub fn push(&mut self, chunk: Bytes) -> Bytes {
        let _ = &self.kind;
        let _ = chunk;
        todo!("wire")
    }

    /// The answer is over: evaluates a pending event and returns bytes still held back.
    pub fn finish(&mut self) -> Bytes {
        todo!("wire")
    }

    /// What has been seen so far.
    pub fn progress(&self) -> &Progress {
        &self.progress
    }
}
