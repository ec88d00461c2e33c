//! Reading a replica's metrics, gently.

use std::sync::{Arc, Weak};
use std::time::Duration;

use tracing::debug;

use crate::config::Engine;
use crate::fleet::client::Answer;
use crate::fleet::facts::Facts;
use crate::fleet::health::State;
use crate::fleet::signals;

use super::{Home, Member, Settings};

/// The longest pause between two scrapes of a replica that answers slowly.
const SCRAPE_PAUSE_MAX: Duration = Duration::from_secs(60);

impl Member {
    /// Reads the replica's metrics once; how long it took.
    async fn scrape(&self, settings: &Settings) -> Duration {
        let began = self.home.clock.now();
        let took = || self.home.clock.now().since(began);
        let Ok(client) = self.client() else { return took() };
        let spec = self.spec.load_full();
        let engine = self.facts.load().engine_or(spec.engine);
        let timeout = settings.scrape.timeout;
        let read = match client.get(signals::metrics_path(engine), timeout).await {
            Ok(Answer { status: 200, body }) => Some(signals::read(&String::from_utf8_lossy(&body))),
            Ok(answer) => {
                debug!(replica = %self.id, status = answer.status, "no metrics");
                None
            }
            Err(why) => {
                debug!(replica = %self.id, ?why, "scrape failed");
                None
            }
        };
        let took = took();
        let Some(mut reading) = read.filter(|r| !r.is_empty()) else {
            self.scraped.lock().failed += 1;
            return took;
        };
        if reading.engine == Some(Engine::Vllm)
            && let Ok(Answer { status: 200, body }) = client.get("/load", timeout).await
        {
            reading.add_load(&body);
        }
        let now = self.home.clock.now();
        if let Some(replica) = self.home.balancer.replica(&self.id) {
            replica.set_signals(reading.signals(now));
        }
        let mut facts = Facts::clone(&self.facts.load());
        facts.engine = facts.engine.or(reading.engine);
        facts.capacity = reading.kv_capacity.or(facts.capacity);
        self.take_facts(facts, &spec);
        let mut scraped = self.scraped.lock();
        scraped.ok += 1;
        (scraped.running, scraped.waiting) = (reading.running, reading.waiting);
        (scraped.kv_use, scraped.refusals) = (reading.kv_use, reading.refusals);
        took
    }
}

/// One scrape after another, never two at once; slower where the replica answers slowly, paused while it is out.
pub(super) async fn scrape_loop(member: Weak<Member>, home: Arc<Home>) {
    let mut pause = Duration::from_millis(rand::random_range(0..500));
    loop {
        tokio::time::sleep(pause).await;
        let settings = home.settings.load_full();
        let Some(member) = member.upgrade() else { return };
        let Some(interval) = settings.scrape.interval else {
            pause = Duration::from_secs(1);
            continue;
        };
        pause = interval;
        if matches!(member.state().0, State::Open | State::HalfOpen | State::Warming | State::Draining) {
            // A scrape that takes long costs the engine: the pause is at least ten times as long.
            pause = (member.scrape(&settings).await * 10).clamp(interval, interval.max(SCRAPE_PAUSE_MAX));
        }
    }
}
