//! Bytes to meaning and back: requests, splices, SSE, usage, errors. Pure: no I/O, no clock, no Pingora.

pub mod answer;
pub mod coding;
pub mod endpoint;
pub mod engine_error;
pub mod error;
pub mod headers;
mod json;
pub mod request;
pub mod usage;

pub use answer::{AnswerKind, AnswerReader, Progress};
pub use coding::decode_request_body;
pub use endpoint::Endpoint;
pub use engine_error::Verdict;
pub use error::{ApiError, ErrorCode};
pub use headers::Hints;
pub use request::{ParseLimits, Request};
pub use usage::Usage;
