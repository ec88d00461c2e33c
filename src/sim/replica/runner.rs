//! Drives an engine in real time and hands each sequence's tokens to whoever waits for them.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::sim::engine::{Counters, Emitted, Engine, EngineShape, Job};
use crate::units::{Clock, SystemClock, Time};

/// Steps that end sooner than this are not slept for: timers are no finer.
const SLEEP_MIN: Duration = Duration::from_micros(300);
/// An engine that is this far behind its own clock (a starved machine) forgives the rest.
const BEHIND_MAX: Duration = Duration::from_millis(500);
/// How often a hanging engine looks whether it still hangs.
const HANG_LOOK: Duration = Duration::from_millis(10);

#[derive(Debug)]
struct Inner {
    engine: Engine,
    streams: HashMap<u64, UnboundedSender<Emitted>>,
    next_id: u64,
    hang: bool,
}

/// An engine in real time.
#[derive(Debug)]
pub struct Runner {
    inner: Mutex<Inner>,
    wake: Notify,
    clock: SystemClock,
    speed: f64,
}

/// What an engine looks like from outside.
#[derive(Clone, Copy, Debug)]
pub struct Look {
    pub running: usize,
    pub waiting: usize,
    pub kv_usage: f64,
    pub counters: Counters,
}

/// Sequences in the engine; dropping it takes them out.
#[derive(Debug)]
pub struct Running {
    runner: Arc<Runner>,
    /// Ids are consecutive from here.
    pub first_id: u64,
    pub count: u64,
    pub tokens: UnboundedReceiver<Emitted>,
}

impl Drop for Running {
    fn drop(&mut self) {
        let mut inner = self.runner.inner.lock();
        for id in self.first_id..self.first_id + self.count {
            if inner.streams.remove(&id).is_some() {
                inner.engine.cancel(id);
            }
        }
    }
}

impl Runner {
    /// An idle engine; [`Runner::drive`] moves it.
    pub fn new(shape: EngineShape) -> Arc<Runner> {
        let speed = shape.speed;
        let inner = Inner { engine: Engine::new(shape), streams: HashMap::new(), next_id: 0, hang: false };
        Arc::new(Runner { inner: Mutex::new(inner), wake: Notify::new(), clock: SystemClock::new(), speed })
    }

    /// Submits sequences; their ids are given in order.
    pub fn submit(self: &Arc<Self>, jobs: Vec<Job>) -> Running {
        let (send, tokens) = unbounded_channel();
        let mut inner = self.inner.lock();
        let first_id = inner.next_id;
        let count = jobs.len() as u64;
        for (id, job) in (first_id..).zip(jobs) {
            inner.streams.insert(id, send.clone());
            inner.engine.submit(Job { id, ..job });
        }
        inner.next_id += count;
        drop(inner);
        self.wake.notify_one();
        Running { runner: Arc::clone(self), first_id, count, tokens }
    }

    pub fn look(&self) -> Look {
        let inner = self.inner.lock();
        Look {
            running: inner.engine.running(),
            waiting: inner.engine.waiting(),
            kv_usage: inner.engine.kv_usage(),
            counters: inner.engine.counters(),
        }
    }

    /// Makes the engine stand still, or every step `slow` times as long.
    pub fn disturb(&self, hang: bool, slow: f64) {
        let mut inner = self.inner.lock();
        inner.hang = hang;
        inner.engine.set_speed(self.speed / slow.max(1e-3));
        drop(inner);
        self.wake.notify_one();
    }

    /// Runs steps for ever.
    pub async fn drive(self: Arc<Self>) {
        let mut at = self.clock.now();
        let mut out = Vec::new();
        loop {
            let begun = {
                let mut inner = self.inner.lock();
                if inner.hang { Err(()) } else { Ok(inner.engine.begin_step(at)) }
            };
            let end = match begun {
                Err(()) => {
                    tokio::time::sleep(HANG_LOOK).await;
                    at = self.clock.now();
                    continue;
                }
                Ok(None) => {
                    self.wake.notified().await;
                    at = self.clock.now();
                    continue;
                }
                Ok(Some(end)) => end,
            };
            self.wait_until(end).await;
            let mut inner = self.inner.lock();
            inner.engine.finish_step(&mut out);
            for emitted in out.drain(..) {
                if emitted.finished {
                    if let Some(stream) = inner.streams.remove(&emitted.id) {
                        let _ = stream.send(emitted);
                    }
                } else if let Some(stream) = inner.streams.get(&emitted.id) {
                    let _ = stream.send(emitted);
                }
            }
            drop(inner);
            let now = self.clock.now();
            at = if now.since(end) > BEHIND_MAX { now } else { end };
        }
    }

    async fn wait_until(&self, end: Time) {
        let left = end.since(self.clock.now());
        if left > SLEEP_MIN {
            tokio::time::sleep(left).await;
        } else {
            tokio::task::yield_now().await;
        }
    }
}
