//! Reads an answer as it passes: SSE events or one JSON document, in any chunking, beside the untouched bytes.

mod document;
mod encoded;
#[cfg(test)]
mod engine_tests;
mod event;
mod out;
mod sse;
mod stream;
#[cfg(test)]
mod tests;

use bytes::Bytes;

use self::document::Document;
use self::encoded::Encoded;
use self::stream::Stream;
use super::endpoint::Endpoint;
use super::usage::{Report, Usage};

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
    /// Pieces of content (text, reasoning, tool-call arguments, token ids): one for each choice in each event.
    pub content_events: u64,
    /// Output tokens so far: running usage where the engine gives it, and the pieces of content since.
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
    reader: Reader,
}

#[derive(Debug)]
enum Reader {
    Plain(Box<Plain>),
    Encoded(Box<Encoded>),
}

impl AnswerReader {
    /// A reader at an answer's first byte.
    pub fn new(kind: AnswerKind) -> Self {
        let encoding = kind.encoding.as_deref().map(str::trim).filter(|e| !e.is_empty() && !is_identity(e));
        let reader = match encoding {
            None => Reader::Plain(Box::new(Plain::new(&kind, kind.hide_usage))),
            Some(encoding) => Reader::Encoded(Box::new(Encoded::new(encoding, Plain::new(&kind, false)))),
        };
        AnswerReader { reader }
    }

    /// Takes the next chunk and returns what goes to the client now: the very same bytes, unless a hidden usage
    /// chunk is among them. Bytes are held back only from the start of an event that may yet prove to be a
    /// usage chunk to hide (`hide_usage`), never when there is nothing to hide.
    pub fn push(&mut self, chunk: Bytes) -> Bytes {
        match &mut self.reader {
            Reader::Plain(plain) => plain.push(chunk),
            Reader::Encoded(encoded) => {
                encoded.feed(&chunk);
                chunk
            }
        }
    }

    /// The answer is over: evaluates a pending event and returns bytes still held back.
    pub fn finish(&mut self) -> Bytes {
        match &mut self.reader {
            Reader::Plain(plain) => plain.finish(),
            Reader::Encoded(encoded) => {
                encoded.finish();
                Bytes::new()
            }
        }
    }

    /// What has been seen so far.
    pub fn progress(&self) -> &Progress {
        match &self.reader {
            Reader::Plain(plain) => &plain.tally.progress,
            Reader::Encoded(encoded) => encoded.progress(),
        }
    }
}

fn is_identity(encoding: &str) -> bool {
    encoding.eq_ignore_ascii_case("identity")
}

/// Reads bytes that are not encoded.
#[derive(Debug)]
struct Plain {
    form: Form,
    tally: Tally,
}

#[derive(Debug)]
enum Form {
    Stream(Stream),
    Document(Document),
}

impl Plain {
    fn new(kind: &AnswerKind, hide_usage: bool) -> Self {
        let form = match kind.sse {
            true => Form::Stream(Stream::new(kind.endpoint, hide_usage, kind.event_bytes)),
            false => Form::Document(Document::default()),
        };
        Plain { form, tally: Tally::default() }
    }

    fn push(&mut self, chunk: Bytes) -> Bytes {
        match &mut self.form {
            Form::Stream(stream) => stream.push(chunk, &mut self.tally),
            Form::Document(document) => {
                document.feed(&chunk);
                self.tally.document(document);
                chunk
            }
        }
    }

    fn finish(&mut self) -> Bytes {
        match &mut self.form {
            Form::Stream(stream) => stream.finish(&mut self.tally),
            Form::Document(document) => {
                self.tally.progress.done |= document.foreign();
                Bytes::new()
            }
        }
    }
}

/// Adds up what is seen.
#[derive(Debug, Default)]
struct Tally {
    progress: Progress,
    report: Option<Report>,
    /// Tokens of content since the last report of usage.
    since_report: u64,
}

impl Tally {
    fn event(&mut self, meaning: event::Meaning) {
        let progress = &mut self.progress;
        progress.content_events += meaning.contents;
        self.since_report += meaning.tokens;
        if let Some(report) = meaning.report {
            let report = self.report.map_or(report, |earlier| report.after(earlier));
            self.report = Some(report);
            self.since_report = 0;
            progress.usage = report.usage();
            progress.usage_final = meaning.report_final;
        }
        progress.output_tokens = progress.usage.map_or(0, |usage| usage.output) + self.since_report;
        progress.finished |= meaning.finished;
        progress.done |= meaning.done;
        progress.unread |= meaning.broken;
        if progress.error.is_none() {
            progress.error = meaning.error;
        }
    }

    fn document(&mut self, document: &Document) {
        let progress = &mut self.progress;
        if let Some(usage) = document.report.and_then(Report::usage) {
            progress.usage = Some(usage);
            progress.usage_final = true;
            progress.output_tokens = usage.output;
        }
        if progress.error.is_none() {
            progress.error.clone_from(&document.error);
        }
        progress.unread |= document.unread;
        progress.done = document.complete();
        progress.finished = progress.done && progress.error.is_none();
    }
}
