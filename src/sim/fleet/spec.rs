//! Which replicas a simulated fleet has.

use crate::config::{Config, Engine, ReplicaSpec, ReplicaUrl};
use crate::sim::engine::{BLOCK_TOKENS, EngineShape};
use crate::units::{ModelName, ReplicaId, Tokens};

/// The model that simulated fleets serve where no configuration names one.
pub const MODEL: &str = "sim";

/// One replica: what the balancer is told of it, and what it is.
#[derive(Clone, Debug)]
pub struct Member {
    pub spec: ReplicaSpec,
    pub shape: EngineShape,
}

/// A fleet.
#[derive(Clone, Debug)]
pub struct FleetSpec {
    pub model: ModelName,
    pub members: Vec<Member>,
}

impl FleetSpec {
    /// Replicas of one shape at these speeds, which the balancer is told.
    pub fn of_speeds(shape: &EngineShape, speeds: &[f64]) -> FleetSpec {
        let members = (1..)
            .zip(speeds)
            .map(|(number, &speed)| {
                let shape = EngineShape { speed, ..shape.clone() };
                Member { spec: spec(&format!("r{number}"), &shape), shape }
            })
            .collect();
        FleetSpec { model: ModelName::from(MODEL), members }
    }

    /// The replicas that a configuration lists for its first model.
    pub fn of_config(config: &Config) -> Option<FleetSpec> {
        let model = config.models.first()?.name.clone();
        let members: Vec<Member> = config
            .replicas
            .iter()
            .filter(|r| r.models.contains(&model) && !r.draining)
            .map(|r| {
                let usual = EngineShape::from_rate(r.tokens_per_sec, r.max_sequences);
                let window = r.max_context_tokens.unwrap_or(Tokens(u64::from(usual.max_model_len)));
                let capacity = r.token_capacity.unwrap_or(window);
                let clip = |tokens: Tokens| u32::try_from(tokens.0).unwrap_or(u32::MAX);
                let prefill_ms = r.prefill_tokens_per_sec.map_or(usual.prefill_ms, |rate| 1000.0 / rate);
                let shape = EngineShape {
                    prefill_ms,
                    max_model_len: clip(window),
                    kv_blocks: (clip(capacity) / BLOCK_TOKENS).max(1),
                    priority: r.priority_scheduling,
                    ..usual
                };
                Member { spec: r.clone(), shape }
            })
            .collect();
        (!members.is_empty()).then_some(FleetSpec { model, members })
    }

    /// The shape that loads are reckoned in: the first replica's, at speed 1.
    pub fn reference(&self) -> EngineShape {
        self.members.first().map(|m| EngineShape { speed: 1.0, ..m.shape.clone() }).unwrap_or_default()
    }

    /// The replicas' speeds added up, in multiples of the reference.
    pub fn speeds(&self) -> f64 {
        let reference = self.reference().tokens_per_sec();
        self.members.iter().map(|m| m.shape.tokens_per_sec() / reference).sum()
    }

    /// The same replicas, with the balancer told that all are as fast as their mean.
    pub fn untold(mut self) -> FleetSpec {
        let mean = self.members.iter().map(|m| m.shape.tokens_per_sec()).sum::<f64>() / self.members.len() as f64;
        for member in &mut self.members {
            member.spec.tokens_per_sec = mean;
            member.spec.prefill_tokens_per_sec = None;
        }
        self
    }
}

fn spec(id: &str, shape: &EngineShape) -> ReplicaSpec {
    ReplicaSpec {
        id: ReplicaId::from(id),
        url: ReplicaUrl { https: false, h2c: false, host: "127.0.0.1".to_owned(), port: 1, base_path: String::new() },
        models: vec![ModelName::from(MODEL)],
        gpu: None,
        quant: None,
        tokens_per_sec: shape.tokens_per_sec(),
        prefill_tokens_per_sec: Some(shape.prefill_tokens_per_sec()),
        max_context_tokens: Some(Tokens(u64::from(shape.max_model_len))),
        token_capacity: Some(Tokens(shape.kv_tokens())),
        max_sequences: shape.max_sequences,
        region: None,
        engine: Engine::Vllm,
        priority_scheduling: shape.priority,
        draining: false,
        api_key_file: None,
        tls: None,
        preserve_host: false,
    }
}
