//! What traffic tells about a replica's health.

use std::time::Duration;

/// One observation of a real request, reported by the proxy.
#[derive(Clone, Debug, PartialEq)]
pub enum TrafficEvent {
    ConnectFailed,
    /// The connection died before a response header.
    DiedBeforeHeader,
    /// The connection died in the middle of an answer.
    DiedMidStream,
    FirstByteTimeout,
    StreamStalled,
    /// An error object inside a 200 stream.
    StreamError,
    /// A response header with this status; `body_is_client_fault` where the engine's body says so
    /// (llama-server's 500 for malformed JSON).
    Status {
        status: u16,
        retry_after: Option<Duration>,
        body_is_client_fault: bool,
    },
    /// Data arrives: the replica lives.
    Alive,
    /// An answer completed.
    Completed,
}
