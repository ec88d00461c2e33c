//! Metrics and the access log: what people see of a running balancer.
//!
//! A metric's name lives here and nowhere else. Label values come from the configuration or from the fixed sets below,
//! never from a client's text.

pub mod access;
pub mod lines;
pub mod metrics;

pub use access::{AccessRecord, Milliseconds};
pub use metrics::Metrics;
