//! One replica as the balancer knows it: its ledger, its coefficients, and whether it may be chosen.

use std::sync::Arc;
use std::time::Duration;

use crate::config::ReplicaSpec;
use crate::units::{ReplicaId, Time, Tokens};

/// Whether a replica may be chosen. Set by `fleet`, read by the balancer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Gate {
    /// Not probed yet: no traffic.
    #[default]
    Unknown,
    /// Up but loading or warming: no traffic.
    Warming,
    Open,
    /// One trial request at a time.
    HalfOpen,
    Ill,
    /// Finishing what runs; no new requests.
    Draining,
}

/// What a replica's own metrics say; stale ones are ignored.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Signals {
    /// 0 to 1.
    pub kv_pressure: Option<f64>,
    pub running: Option<u64>,
    pub waiting: Option<u64>,
    pub read_at: Time,
}

/// A replica's books at one moment.
#[derive(Clone, Debug)]
pub struct ReplicaView {
    pub spec: Arc<ReplicaSpec>,
    pub gate: Gate,
    /// Remaining work: uncomputed prompt and expected output tokens.
    pub projected_tokens: Tokens,
    /// KV tokens booked.
    pub booked_kv_tokens: Tokens,
    pub token_capacity: Option<Tokens>,
    pub load_seconds: f64,
    pub active_sequences: u64,
    pub requests_in_flight: u64,
    pub kv_pressure: Option<f64>,
    /// Learned or configured: decode and prefill rates, tokens per second.
    pub decode_tokens_per_sec: f64,
    pub prefill_tokens_per_sec: f64,
}

/// One replica.
#[derive(Debug)]
pub struct Replica {}

impl Replica {
    pub fn id(&self) -> &ReplicaId {
        todo!("balance")
    }

    /// The replica as last configured or discovered.
    pub fn spec(&self) -> Arc<ReplicaSpec> {
        todo!("balance")
    }

    pub fn gate(&self) -> Gate {
        todo!("balance")
    }

    /// Opens or closes the gate. Opening after `Unknown`, `Warming` or `Ill` starts the slow-start ramp of this
    /// length (its share of load grows from a tenth to the whole).
    pub fn set_gate(&self, gate: Gate, ramp: Duration) {
        let _ = (gate, ramp);
        todo!("balance")
    }

    /// Takes the engine's own signals, at most as a correction.
    pub fn set_signals(&self, signals: Signals) {
        let _ = signals;
        todo!("balance")
    }

    /// Limits read from the engine, where the configuration leaves them out.
    pub fn set_engine_limits(&self, window: Option<Tokens>, capacity: Option<Tokens>) {
        let _ = (window, capacity);
        todo!("balance")
    }

    /// An engine said it is overloaded: not chosen until then, while others are there. Load, not ill health.
    pub fn back_off_until(&self, until: Time) {
        let _ = until;
        todo!("balance")
    }

    /// Its books now.
    pub fn view(&self) -> ReplicaView {
        todo!("balance")
    }
}
