//! Metrics, access log, traces.
