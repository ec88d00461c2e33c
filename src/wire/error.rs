//! The contract's errors: OpenAI's shape, a message that says what to do.

use std::time::Duration;

use bytes::Bytes;
use serde_json::json;

use super::endpoint::Endpoint;

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

impl ErrorCode {
    /// Every code, for tables.
    pub const ALL: [ErrorCode; 19] = [
        ErrorCode::InvalidRequest,
        ErrorCode::ContextLengthExceeded,
        ErrorCode::InvalidApiKey,
        ErrorCode::NotAllowed,
        ErrorCode::ModelNotFound,
        ErrorCode::NotFound,
        ErrorCode::MethodNotAllowed,
        ErrorCode::RequestTimeout,
        ErrorCode::RequestTooLarge,
        ErrorCode::UnsupportedEncoding,
        ErrorCode::ExpectationFailed,
        ErrorCode::RateLimitExceeded,
        ErrorCode::HeaderTooLarge,
        ErrorCode::UpstreamError,
        ErrorCode::NoCapacity,
        ErrorCode::NoReplica,
        ErrorCode::QueueTimeout,
        ErrorCode::FirstByteTimeout,
        ErrorCode::StreamIdleTimeout,
    ];

    /// The HTTP status.
    pub fn status(self) -> u16 {
        match self {
            ErrorCode::InvalidRequest | ErrorCode::ContextLengthExceeded => 400,
            ErrorCode::InvalidApiKey => 401,
            ErrorCode::NotAllowed => 403,
            ErrorCode::ModelNotFound | ErrorCode::NotFound => 404,
            ErrorCode::MethodNotAllowed => 405,
            ErrorCode::RequestTimeout => 408,
            ErrorCode::RequestTooLarge => 413,
            ErrorCode::UnsupportedEncoding => 415,
            ErrorCode::ExpectationFailed => 417,
            ErrorCode::RateLimitExceeded => 429,
            ErrorCode::HeaderTooLarge => 431,
            ErrorCode::UpstreamError => 502,
            ErrorCode::NoCapacity | ErrorCode::NoReplica => 503,
            ErrorCode::QueueTimeout | ErrorCode::FirstByteTimeout | ErrorCode::StreamIdleTimeout => 504,
        }
    }

    /// The code as clients and metrics see it.
    pub fn as_str(self) -> &'static str {
        match self {
            ErrorCode::InvalidRequest => "invalid_request",
            ErrorCode::ContextLengthExceeded => "context_length_exceeded",
            ErrorCode::InvalidApiKey => "invalid_api_key",
            ErrorCode::NotAllowed => "not_allowed",
            ErrorCode::ModelNotFound => "model_not_found",
            ErrorCode::NotFound => "not_found",
            ErrorCode::MethodNotAllowed => "method_not_allowed",
            ErrorCode::RequestTimeout => "request_timeout",
            ErrorCode::RequestTooLarge => "request_too_large",
            ErrorCode::UnsupportedEncoding => "unsupported_encoding",
            ErrorCode::ExpectationFailed => "expectation_failed",
            ErrorCode::RateLimitExceeded => "rate_limit_exceeded",
            ErrorCode::HeaderTooLarge => "header_too_large",
            ErrorCode::UpstreamError => "upstream_error",
            ErrorCode::NoCapacity => "no_capacity",
            ErrorCode::NoReplica => "no_replica",
            ErrorCode::QueueTimeout => "queue_timeout",
            ErrorCode::FirstByteTimeout => "first_byte_timeout",
            ErrorCode::StreamIdleTimeout => "stream_idle_timeout",
        }
    }

    /// `error.type` as OpenAI's API gives it.
    pub fn openai_type(self) -> &'static str {
        match self.status() {
            403 => "permission_error",
            429 => "rate_limit_error",
            500.. => "server_error",
            _ => "invalid_request_error",
        }
    }

    /// `error.type` as Anthropic's API gives it.
    pub fn anthropic_type(self) -> &'static str {
        match self.status() {
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            413 => "request_too_large",
            429 => "rate_limit_error",
            503 => "overloaded_error",
            504 => "timeout_error",
            500.. => "api_error",
            _ => "invalid_request_error",
        }
    }
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
        self.code.status()
    }

    /// `{"error":{"message","type","param","code"}}`.
    pub fn body(&self) -> Bytes {
        let value = json!({"error": {
            "message": self.message,
            "type": self.code.openai_type(),
            "param": self.param,
            "code": self.code.as_str(),
        }});
        Bytes::from(value.to_string())
    }

    /// The body in the shape that clients of this endpoint read; OpenAI's where the path meant none.
    pub fn body_for(&self, endpoint: Option<Endpoint>) -> Bytes {
        match endpoint {
            Some(endpoint) if endpoint.anthropic() => Bytes::from(self.anthropic().to_string()),
            _ => self.body(),
        }
    }

    /// The same error as one SSE event, for a stream that already began.
    pub fn event(&self) -> Bytes {
        let body = self.body();
        Bytes::from([b"data: ", body.as_ref(), b"\n\n"].concat())
    }

    /// The event in the shape that clients of this endpoint read.
    pub fn event_for(&self, endpoint: Endpoint) -> Bytes {
        let value = match endpoint {
            Endpoint::Messages | Endpoint::CountTokens => self.anthropic(),
            Endpoint::Responses => json!({
                "type": "error",
                "code": self.code.as_str(),
                "message": self.message,
                "param": self.param,
            }),
            _ => return self.event(),
        };
        Bytes::from(format!("event: error\ndata: {value}\n\n"))
    }

    /// `Retry-After` in whole seconds, rounded up and at least one.
    pub fn retry_after_seconds(&self) -> Option<u64> {
        self.retry_after_ms().map(|ms| ms.div_ceil(1000))
    }

    /// `retry-after-ms`, rounded up and at least one. OpenAI's clients prefer it to `Retry-After`.
    pub fn retry_after_ms(&self) -> Option<u64> {
        let after = self.retry_after?;
        Some(u64::try_from(after.as_micros().div_ceil(1000)).unwrap_or(u64::MAX).max(1))
    }

    fn anthropic(&self) -> serde_json::Value {
        json!({"type": "error", "error": {"type": self.code.anthropic_type(), "message": self.message}})
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_body_has_openais_shape_with_every_key_present() {
        let error = ApiError::new(ErrorCode::InvalidRequest, "messages must not be \"empty\"\n").param("messages");
        let value: serde_json::Value = serde_json::from_slice(&error.body()).unwrap();
        assert_eq!(
            value,
            json!({"error": {
                "message": "messages must not be \"empty\"\n",
                "type": "invalid_request_error",
                "param": "messages",
                "code": "invalid_request",
            }})
        );
        let bare: serde_json::Value = serde_json::from_slice(&ApiError::new(ErrorCode::NoReplica, "x").body()).unwrap();
        assert!(bare["error"]["param"].is_null());
        assert_eq!(bare["error"]["type"], "server_error");
    }

    #[test]
    fn every_code_has_its_own_name_and_an_error_status() {
        let names: std::collections::HashSet<_> = ErrorCode::ALL.iter().map(|c| c.as_str()).collect();
        assert_eq!(names.len(), ErrorCode::ALL.len());
        assert!(ErrorCode::ALL.iter().all(|c| (400..600).contains(&c.status())));
    }

    #[test]
    fn messages_clients_get_anthropics_shape() {
        let error = ApiError::new(ErrorCode::NoCapacity, "All replicas at token capacity");
        let value: serde_json::Value = serde_json::from_slice(&error.body_for(Some(Endpoint::Messages))).unwrap();
        assert_eq!(
            value,
            json!({"type": "error", "error": {
                "type": "overloaded_error", "message": "All replicas at token capacity"}})
        );
        assert_eq!(error.body_for(Some(Endpoint::ChatCompletions)), error.body());
        assert_eq!(error.body_for(None), error.body());
    }

    #[test]
    fn an_error_event_is_one_event_that_the_reader_recognises() {
        use super::super::{AnswerKind, AnswerReader};
        for endpoint in [Endpoint::ChatCompletions, Endpoint::Messages, Endpoint::Responses] {
            let error = ApiError::new(ErrorCode::UpstreamError, "gone\nfor good");
            let event = error.event_for(endpoint);
            assert!(event.ends_with(b"\n\n"));
            assert_eq!(event.windows(2).filter(|w| w == b"\n\n").count(), 1, "{endpoint:?}");
            let mut reader = AnswerReader::new(AnswerKind {
                endpoint,
                sse: true,
                hide_usage: false,
                encoding: None,
                event_bytes: 1 << 20,
            });
            reader.push(event);
            assert_eq!(reader.progress().error.as_deref(), Some("gone\nfor good"), "{endpoint:?}");
        }
    }

    #[test]
    fn retry_after_is_rounded_up_and_never_zero() {
        let at = |ms| ApiError::new(ErrorCode::NoCapacity, "x").retry_after(Duration::from_millis(ms));
        assert_eq!(at(0).retry_after_seconds(), Some(1));
        assert_eq!(at(0).retry_after_ms(), Some(1));
        assert_eq!(at(1000).retry_after_seconds(), Some(1));
        assert_eq!(at(1001).retry_after_seconds(), Some(2));
        assert_eq!(at(1001).retry_after_ms(), Some(1001));
        assert_eq!(ApiError::new(ErrorCode::NoCapacity, "x").retry_after_seconds(), None);
    }
}
