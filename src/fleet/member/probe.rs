//! Probes: whether the server answers, and what it says of itself.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use tokio::task::JoinHandle;

use crate::config::{Engine, ReplicaSpec};
use crate::fleet::client::{Answer, Client, Failure};
use crate::fleet::facts::Facts;
use crate::fleet::health::{ProbeOutcome, State};
use crate::units::Time;

use super::{Member, list};

/// What a replica said of itself is asked again after this: models are loaded and unloaded under a running server.
const FACTS_FRESH: Duration = Duration::from_secs(60);

/// A probe's moment varies by up to this share of the interval, so that many probes do not fall together.
const PROBE_JITTER: f64 = 0.2;

impl Member {
    /// Starts a probe where one is due; whether one runs now.
    pub fn probe_if_due(self: &Arc<Self>) -> Option<JoinHandle<()>> {
        let now = self.home.clock.now();
        let due = self.kicked.load(Relaxed) || now.0 >= self.due_at.load(Relaxed);
        if !due || self.address.load().is_none() || self.probing.swap(true, Relaxed) {
            return None;
        }
        self.kicked.store(false, Relaxed);
        let interval = self.home.settings.load().health.interval;
        let jitter = 1.0 + PROBE_JITTER * (rand::random::<f64>() - 0.5);
        self.due_at.store(now.after(interval.mul_f64(jitter)).0, Relaxed);
        let member = self.clone();
        Some(self.home.runtime.spawn(async move {
            let outcome = member.probe().await;
            member.probing.store(false, Relaxed);
            let alive = Time(member.alive_at.load(Relaxed));
            if matches!(outcome, ProbeOutcome::Bad(_)) {
                // Keys and certificates are rotated in place: the next probe reads them again.
                member.client.store(None);
            }
            let on_trial = member.home.can_wait_for(&member);
            member.change(|m, now| {
                m.alive(alive);
                m.set_on_trial(on_trial);
                m.probe(&outcome, now);
            });
            member.probed_at.store(member.home.clock.now().0, Relaxed);
            member.own_requests();
        }))
    }

    async fn probe(&self) -> ProbeOutcome {
        let client = match self.client() {
            Ok(client) => client,
            Err(why) => return ProbeOutcome::Bad(why),
        };
        let settings = self.home.settings.load_full();
        let spec = self.spec.load_full();
        let timeout = settings.health.timeout;
        let mut outcome = judge(&client.get(&settings.health.path, timeout).await);
        let engine = self.facts.load().engine_or(spec.engine);
        let mut models = None;
        if outcome == ProbeOutcome::Bad(NO_SUCH_PATH.to_owned()) && matches!(engine, Engine::Auto | Engine::OpenAi) {
            // Not every server that speaks the API has a health URL; its list of models is the next best.
            let answer = client.get("/v1/models", timeout).await;
            outcome = judge(&answer);
            models = Some(answer);
        }
        if outcome != ProbeOutcome::Good {
            return outcome;
        }
        let now = self.home.clock.now();
        let read_at = Time(self.facts_at.load(Relaxed));
        let open = self.state().0 == State::Open;
        if read_at == Time::ZERO || !open || now.since(read_at) >= FACTS_FRESH {
            let models = match models {
                Some(models) => models,
                None => client.get("/v1/models", timeout).await,
            };
            self.learn(&client, &spec, models, timeout).await;
        }
        match self.unserved(&spec) {
            missing if missing.len() == spec.models.len() => {
                let served = self.facts.load().models.join(", ");
                ProbeOutcome::Bad(format!("does not serve {}; it serves {served}", list(&missing)))
            }
            _ => ProbeOutcome::Good,
        }
    }

    /// Takes in what the replica says of itself.
    async fn learn(&self, client: &Client, spec: &ReplicaSpec, models: Result<Answer, Failure>, timeout: Duration) {
        let Ok(Answer { status: 200, body }) = models else { return };
        let Some(mut facts) = Facts::from_models(&body) else { return };
        let old = self.facts.load_full();
        if facts.engine_or(spec.engine) == Engine::LlamaCpp
            && let Ok(Answer { status: 200, body }) = client.get("/props", timeout).await
        {
            facts.add_props(&body);
        }
        facts.engine = facts.engine.or(old.engine);
        facts.capacity = facts.capacity.or(old.capacity);
        self.facts_at.store(self.home.clock.now().0.max(1), Relaxed);
        self.take_facts(facts, spec);
    }
}

const NO_SUCH_PATH: &str = "status 404";

/// What an answer to a probe means.
fn judge(answer: &Result<Answer, Failure>) -> ProbeOutcome {
    match answer {
        Err(Failure::Timeout) => ProbeOutcome::Late,
        Err(Failure::Broken(why)) => ProbeOutcome::Bad(why.clone()),
        Ok(Answer { status: 200..=299, .. }) => ProbeOutcome::Good,
        // llama-server: 503 {"error":{"message":"Loading model",...}}
        Ok(Answer { status: 503, body }) if memchr::memmem::find(body, b"oading").is_some() => ProbeOutcome::Loading,
        Ok(Answer { status: 429, .. }) => ProbeOutcome::Neither,
        Ok(Answer { status, .. }) => ProbeOutcome::Bad(format!("status {status}")),
    }
}
