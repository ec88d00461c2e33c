//! Replicas and pools: health, engine metrics, discovery, drain, warm-up. Uses `balance`; knows nothing of `proxy`.

pub mod events;

pub use events::TrafficEvent;
