//! Requests of our own: warm-up before users, the generation probe, a trial where no user comes.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use serde_json::json;

use crate::fleet::client::{Client, Failure};
use crate::fleet::health::State;
use crate::units::Time;

use super::{Member, Settings};

/// A one-token generation is given this many probe timeouts: it queues behind the engine's own work.
const GENERATION_PATIENCE: u32 = 6;

/// Wait before a warm-up request that met an overloaded engine is sent again.
const WARM_UP_PAUSE: Duration = Duration::from_secs(1);

impl Member {
    /// Starts the requests of our own that are due: warm-up before the gate opens, the generation probe.
    pub(super) fn own_requests(self: &Arc<Self>) {
        let settings = self.home.settings.load_full();
        let warm = self.machine.lock().wants_warm_up();
        if warm && !self.warming.swap(true, Relaxed) {
            let member = self.clone();
            self.home.runtime.spawn(async move {
                let result = member.warm_up(&settings).await;
                member.warming.store(false, Relaxed);
                member.change(|m, now| m.warmed(result, now));
            });
            return;
        }
        let now = self.home.clock.now();
        let trial = self.machine.lock().on_trial_for(now).is_some_and(|d| d >= settings.health.interval);
        let timeout = if trial {
            let idle = self.home.balancer.replica(&self.id).is_some_and(|r| r.view().requests_in_flight == 0);
            // A user's request is on trial already, or may come yet; without traffic it is ours to send.
            if !idle {
                return;
            }
            settings.first_byte_timeout
        } else {
            let Some(every) = settings.health.generation_probe else { return };
            // Real traffic that brings data proves as much and costs nothing.
            let last = Time(self.generation_at.load(Relaxed)).max(Time(self.alive_at.load(Relaxed)));
            if warm || self.state().0 != State::Open || now.since(last) < every {
                return;
            }
            settings.health.timeout * GENERATION_PATIENCE
        };
        if self.warming.swap(true, Relaxed) {
            return;
        }
        self.generation_at.store(now.0, Relaxed);
        let member = self.clone();
        self.home.runtime.spawn(async move {
            let result = match member.client() {
                Ok(client) => member.generate(&client, "Hi", timeout).await,
                Err(why) => Err(why),
            };
            member.warming.store(false, Relaxed);
            let may_eject = member.home.may_eject(&member);
            member.change(|m, now| m.generated(result, now, may_eject));
        });
    }

    async fn warm_up(&self, settings: &Settings) -> Result<(), String> {
        let prompt = settings.warmup.prompt.as_deref().unwrap_or("Hi");
        let client = self.client()?;
        for _ in 0..settings.warmup.requests {
            self.generate(&client, prompt, settings.first_byte_timeout).await?;
        }
        Ok(())
    }

    /// Generates one token with each model, by chat or, where there is no chat, by completion. An answer that blames
    /// the request is an answer: an embedding server generates nothing and is well.
    async fn generate(&self, client: &Client, prompt: &str, timeout: Duration) -> Result<(), String> {
        let spec = self.spec.load_full();
        for model in spec.models.iter().filter(|m| !self.unserved(&spec).contains(m)) {
            let name = model.as_str();
            let chat = json!({"model": name, "messages": [{"role": "user", "content": prompt}], "max_tokens": 1});
            let plain = json!({"model": name, "prompt": prompt, "max_tokens": 1});
            let mut status = self.answered(client, "/v1/chat/completions", &chat, timeout).await?;
            if matches!(status, 400 | 404 | 405 | 501) {
                status = self.answered(client, "/v1/completions", &plain, timeout).await?;
            }
            if status >= 500 && status != 501 {
                return Err(format!("status {status}"));
            }
        }
        Ok(())
    }

    async fn answered(
        &self,
        client: &Client,
        path: &str,
        body: &serde_json::Value,
        timeout: Duration,
    ) -> Result<u16, String> {
        let started = self.home.clock.now();
        loop {
            match client.post(path, body, timeout).await {
                Ok(answer) if matches!(answer.status, 429 | 503 | 529) => {
                    if self.home.clock.now().since(started) >= timeout {
                        return Ok(answer.status);
                    }
                    tokio::time::sleep(WARM_UP_PAUSE).await;
                }
                Ok(answer) => return Ok(answer.status),
                Err(Failure::Timeout) => {
                    return Err(format!("no answer within {}", humantime::format_duration(timeout)));
                }
                Err(Failure::Broken(why)) => return Err(why),
            }
        }
    }
}
