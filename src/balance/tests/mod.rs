//! What the balancer promises, told through its public face.

mod books;
mod choice;
mod through_pingora;
mod waiting;

use std::sync::Arc;
use std::time::Duration;

use crate::config::{Balance, BandSpec, Engine, PolicyName, QueueSpec, Regions, ReplicaSpec, ReplicaUrl};
use crate::units::{Band, Clock, ManualClock, ModelName, ReplicaId, TenantName, Tokens};
use crate::weigh::{EstimateSource, OutputEstimate};

use super::{Ask, Balancer, Gate, Settings};

pub(super) const MODEL: &str = "m";

pub(super) fn spec(id: &str) -> ReplicaSpec {
    ReplicaSpec {
        id: id.into(),
        url: ReplicaUrl { https: false, h2c: false, host: "127.0.0.1".to_owned(), port: 9, base_path: String::new() },
        models: vec![MODEL.into()],
        gpu: None,
        quant: None,
        tokens_per_sec: 1000.0,
        prefill_tokens_per_sec: None,
        max_context_tokens: None,
        token_capacity: Some(Tokens(100_000)),
        max_sequences: 256,
        region: None,
        engine: Engine::Auto,
        priority_scheduling: false,
        draining: false,
        api_key_file: None,
        tls: None,
        preserve_host: false,
    }
}

pub(super) fn settings(policy: PolicyName) -> Settings {
    Settings {
        balance: Balance { policy, ..Balance::default() },
        bands: vec![BandSpec::default()],
        regions: Regions::default(),
    }
}

pub(super) fn no_queue(mut settings: Settings) -> Settings {
    for band in &mut settings.bands {
        band.queue = QueueSpec { requests: 0, ..QueueSpec::default() };
    }
    settings
}

/// An answer of exactly this length.
pub(super) fn exactly(tokens: u64) -> OutputEstimate {
    OutputEstimate {
        mean: tokens as f64,
        p50: tokens,
        p90: tokens,
        source: EstimateSource::Exact,
        confidence: 1.0,
        tail: Arc::from([]),
    }
}

pub(super) fn ask(prompt: u64, output: u64) -> Ask {
    Ask {
        model: ModelName::from(MODEL),
        prompt: Tokens(prompt),
        longest: Tokens(prompt),
        must_hold: Tokens(prompt),
        sequences: 1,
        output: exactly(output),
        max_tokens: None,
        band: Band(0),
        tenant: None,
        session: None,
        prefix: Arc::from([]),
        prefix_block_tokens: 0,
        stream: true,
        ttft_objective: None,
    }
}

pub(super) fn of_tenant(name: &str, band: u8, mut ask: Ask) -> Ask {
    ask.tenant = Some(TenantName::from(name));
    ask.band = Band(band);
    ask
}

pub(super) fn open(balancer: &Arc<Balancer>) {
    for replica in balancer.replicas().iter() {
        replica.set_gate(Gate::Open, Duration::ZERO);
    }
}

/// A balancer on a clock that stands, with these replicas open.
pub(super) fn balancer(settings: Settings, specs: &[ReplicaSpec]) -> (Arc<Balancer>, Arc<ManualClock>) {
    let clock = ManualClock::new();
    let balancer = Balancer::new(settings.clone(), clock.clone() as Arc<dyn Clock>, 7);
    balancer.apply(settings, specs);
    open(&balancer);
    (balancer, clock)
}

pub(super) fn replica(balancer: &Balancer, id: &str) -> Arc<super::Replica> {
    balancer.replica(&ReplicaId::from(id)).expect("the replica is configured")
}

/// Whether every replica's books hold nothing.
pub(super) fn idle(balancer: &Balancer) -> bool {
    balancer.replicas().iter().all(|replica| {
        let view = replica.view();
        replica.audit().is_ok()
            && view.projected_tokens == Tokens::ZERO
            && view.booked_kv_tokens == Tokens::ZERO
            && view.active_sequences == 0
            && view.requests_in_flight == 0
    })
}
