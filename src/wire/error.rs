//! The contract's errors: OpenAI's shape, a message that says what to do.

use std::time::Duration;

use bytes::Bytes;

/// The contract's error codes, each with its one status.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorCode {
    /// 400
    InvalidRequest,
    /// 400
    ContextLengthExceeded,
    /// 401
    InvalidApiKey,
    /// 403
    NotAllowed,
    /// 404
    ModelNotFound,
    /// 404, for a path that is not on the allow-list
    NotFound,
    /// 405
    MethodNotAllowed,
    /// 408
    RequestTimeout,
    /// 413
    RequestTooLarge,
    /// 415
    UnsupportedEncoding,
    /// 417
    ExpectationFailed,
    /// 429
    RateLimitExceeded,
    /// 431
    HeaderTooLarge,
    /// 502
    UpstreamError,
    /// 503
    NoCapacity,
    /// 503
    NoReplica,
    /// 504
    QueueTimeout,
    /// 504
    FirstByteTimeout,
    /// 504
    StreamIdleTimeout,
}

/// An error for a client.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    pub code: ErrorCode,
    /// What was expected, what was found, and what to do.
    pub message: String,
    /// The field at fault, `messages[2].content`.
    pub param: Option<String>,
    /// 429 and 503: when asking again makes sense, computed.
    pub retry_after: Option<Duration>,
}

impl ApiError {
    /// An error with this code and message.
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        ApiError { code, message: message.into(), param: None, retry_after: None }
    }

    /// Names the field at fault.
    pub fn param(mut self, param: impl Into<String>) -> Self {
        self.param = Some(param.into());
        self
    }

    /// Says when asking again makes sense.
    pub fn retry_after(mut self, after: Duration) -> Self {
        self.retry_after = Some(after);
        self
    }

    /// The HTTP status.
    pub fn status(&self) -> u16 {
        todo!("wire")
    }

    /// `{"error":{"message","type","param","code"}}`.
    pub fn body(&self) -> Bytes {
        todo!("wire")
    }

    /// The same error as one SSE event, for a stream that already began.
    pub fn event(&self) -> Bytes {
        todo!("wire")
    }
}
