//! What a running balancer says of its replicas: states, engines, how many the load asks for.

use crate::balance::{Gate, ReplicaView};
use crate::config::Engine;
use crate::units::ModelName;

use super::Running;

/// Share of a pool's capacity that an autoscaler should aim at: above it, tails grow faster than load.
const TARGET_UTILIZATION: f64 = 0.7;

impl Running {
    /// The kind of a model's replicas, by the one that tells and is there for longest; pools of mixed engines are counted
    /// by that one.
    pub fn engine(&self, model: &ModelName) -> Engine {
        let told = self.balancer.find_member(model, |replica| {
            let known = self.fleet().and_then(|fleet| fleet.engine(replica.id()));
            Some(known.unwrap_or(replica.spec().engine)).filter(|engine| *engine != Engine::Auto)
        });
        told.unwrap_or_default()
    }

    /// A replica's state as a label: the fleet's word where it keeps the replica, the gate's otherwise.
    pub fn state_label(&self, view: &ReplicaView) -> &'static str {
        match self.fleet().and_then(|fleet| fleet.state(&view.spec.id)) {
            Some(state) => state.label(),
            None => gate_label(view.gate),
        }
    }

    /// Replicas of a model that the load of the moment asks for.
    pub fn desired_replicas(&self, model: &ModelName) -> f64 {
        let views = self.balancer.views();
        let of_model: Vec<&ReplicaView> = views.iter().filter(|v| v.spec.models.contains(model)).collect();
        let waiting: usize =
            self.balancer.queue_depths().iter().filter(|(of, _, _)| of == model).map(|(_, _, n)| n).sum();
        desired(&of_model, waiting)
    }
}

fn gate_label(gate: Gate) -> &'static str {
    match gate {
        Gate::Unknown => "unknown",
        Gate::Warming => "warming",
        Gate::Open => "open",
        Gate::HalfOpen => "half_open",
        Gate::Ill => "ill",
        Gate::Draining => "draining",
    }
}

/// How much of itself a replica is using: memory or sequences, whichever is scarcer.
fn used(view: &ReplicaView) -> f64 {
    let memory = view
        .token_capacity
        .filter(|capacity| capacity.0 > 0)
        .map_or(0.0, |capacity| view.booked_kv_tokens.as_f64() / capacity.as_f64());
    let sequences = view.active_sequences as f64 / f64::from(view.spec.max_sequences.max(1));
    memory.max(sequences)
}

fn desired(views: &[&ReplicaView], waiting: usize) -> f64 {
    if views.is_empty() {
        return 0.0;
    }
    let busy: f64 = views.iter().map(|view| used(view)).sum();
    let sequences = views.iter().map(|v| f64::from(v.spec.max_sequences)).sum::<f64>() / views.len() as f64;
    // A request that waits would fill a sequence somewhere.
    let wanted = busy + waiting as f64 / sequences.max(1.0);
    (wanted / TARGET_UTILIZATION).ceil().max(1.0)
}
