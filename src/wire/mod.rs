//! Bytes to meaning and back: requests, splices, SSE, usage, errors. Pure: no I/O, no clock, no Pingora.

pub mod answer;
pub mod endpoint;
pub mod error;
mod json;
pub mod request;
pub mod usage;

pub use answer::{AnswerKind, AnswerReader, Progress};
pub use endpoint::Endpoint;
pub use error::{ApiError, ErrorCode};
pub use request::{ParseLimits, Request};
pub use usage::Usage;
