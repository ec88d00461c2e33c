//! A request body, parsed once at the edge: what the balancer needs to know, and where in the bytes it stands.
//!
//! The body itself is never re-encoded. One pass validates the JSON (depth, UTF-8, surrogates, repeated
//! top-level keys) and notes the spans of top-level values; later rooms parse the spans they need, and
//! [`Request::upstream_body`] splices the few edits into the client's own bytes.

mod multipart;
mod read;
mod shape;
mod splice;
#[cfg(test)]
mod tests;

use std::ops::Range;

use bytes::Bytes;

use super::endpoint::Endpoint;
use super::error::ApiError;

pub use multipart::find_field as form_field;
pub use read::{SEQUENCES_MAX, TOP_LEVEL_MEMBERS_MAX};

/// Limits on parsing.
#[derive(Clone, Copy, Debug)]
pub struct ParseLimits {
    /// Nested arrays and objects.
    pub json_depth: usize,
}

/// What the client said about usage in its stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UsageAsk {
    /// `include_usage: true`: the usage chunk belongs to the client.
    Asked,
    /// Absent, null or false: the balancer asks for it and hides it.
    NotAsked,
    /// Not a stream, or `stream_options` of a wrong type: nothing is changed.
    Untouched,
}

/// A parsed request. Spans are byte ranges of values (quotes included) in `body`.
#[derive(Clone, Debug)]
pub struct Request {
    pub endpoint: Endpoint,
    /// As sent, decoded from its content coding.
    pub body: Bytes,
    /// The model the client named, unescaped; `None` where absent.
    pub model: Option<String>,
    pub stream: bool,
    pub usage_ask: UsageAsk,
    /// `max_completion_tokens`, else `max_tokens` (`max_output_tokens` for responses); `None` for absent, null,
    /// or a value that is no count (the replica decides on those).
    pub max_tokens: Option<u64>,
    pub min_tokens: Option<u64>,
    pub ignore_eos: bool,
    /// Answers per prompt: max(`n`, `best_of`), from 1 to [`SEQUENCES_MAX`].
    pub n: u32,
    pub echo: bool,
    /// Body `priority`.
    pub priority: Option<i64>,
    /// Body `task_type`.
    pub task_type: Option<String>,
    /// Content parts' text is never copied here: the weighing room reads these spans.
    pub fields: Vec<Field>,
    /// For a body that is not JSON: where its model's name stands, to be replaced by [`Edits::model`].
    pub opaque_model: Option<Range<usize>>,
}

/// A top-level member of the body object.
#[derive(Clone, Debug)]
pub struct Field {
    pub name: String,
    /// From the key's opening quote to the value's last byte.
    pub member: Range<usize>,
    pub value: Range<usize>,
}

/// The edits made to the client's bytes before they go to a replica.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Edits {
    /// Splice `stream_options.include_usage: true`.
    pub include_usage: bool,
    /// Replace or add `priority`.
    pub set_priority: Option<i64>,
    /// Remove a client's `priority`.
    pub remove_priority: bool,
    /// Remove `task_type`.
    pub remove_task_type: bool,
    /// Replace the model's name (an alias that the engine does not know).
    pub model: Option<String>,
}

impl Request {
    /// Parses `body` as a JSON request to `endpoint`.
    ///
    /// # Errors
    /// `invalid_request` naming the field, for malformed JSON, too deep nesting, a repeated top-level key, a lone
    /// surrogate, a body that is no object, a missing or empty `messages`/`prompt`/`input`, or a wrong type there;
    /// for a chat template of the client's own, and for more than [`SEQUENCES_MAX`] answers.
    pub fn parse(endpoint: Endpoint, body: Bytes, limits: &ParseLimits) -> Result<Request, ApiError> {
        read::read(endpoint, body, limits)
    }

    /// A `multipart/form-data` request (audio), of which only the `model` field is read.
    ///
    /// # Errors
    /// `invalid_request` where the content type names no boundary.
    pub fn multipart(endpoint: Endpoint, content_type: &str, body: Bytes) -> Result<Request, ApiError> {
        let span = multipart::find_field(content_type, &body, "model")?;
        let model = span.clone().map(|span| String::from_utf8_lossy(&body[span]).into_owned());
        Ok(Request { opaque_model: span, ..Request::opaque(endpoint, body, model) })
    }

    /// A request whose body is not read at all.
    pub fn opaque(endpoint: Endpoint, body: Bytes, model: Option<String>) -> Request {
        Request {
            endpoint,
            body,
            model,
            stream: false,
            usage_ask: UsageAsk::Untouched,
            max_tokens: None,
            min_tokens: None,
            ignore_eos: false,
            n: 1,
            echo: false,
            priority: None,
            task_type: None,
            fields: Vec::new(),
            opaque_model: None,
        }
    }

    /// The value of a top-level member as it stands in the body, `null` included.
    pub fn raw(&self, name: &str) -> Option<&[u8]> {
        self.field(name).map(|field| &self.body[field.value.clone()])
    }

    /// The value of a top-level member, unless it is absent or null.
    pub fn given(&self, name: &str) -> Option<&[u8]> {
        self.raw(name).filter(|raw| raw != b"null")
    }

    /// The client's bytes with these edits spliced in; the very same bytes where there are none.
    pub fn upstream_body(&self, edits: &Edits) -> Bytes {
        splice::splice(self, edits)
    }

    fn field(&self, name: &str) -> Option<&Field> {
        self.fields.iter().find(|field| field.name == name)
    }
}
