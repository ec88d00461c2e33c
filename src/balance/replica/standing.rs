//! Whether a replica may be chosen: its gate, its slow start, and the word of an engine that is overloaded.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use super::Replica;
use crate::units::Time;

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
    /// Tried only where every replica of a model is ill.
    Ill,
    /// Finishing what runs; no new requests.
    Draining,
}

impl Gate {
    const ALL: [Gate; 6] = [Gate::Unknown, Gate::Warming, Gate::Open, Gate::HalfOpen, Gate::Ill, Gate::Draining];
}

/// How a replica stands to being chosen, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::balance) enum Standing {
    Ready,
    /// Said that it is overloaded, not long ago.
    BackedOff,
    Ill,
    /// Not to be chosen at all.
    Closed,
}

impl Replica {
    pub(super) fn refresh_plain(&self) {
        let plain = self.gate() == Gate::Open
            && self.traits.ramp_micros.load(Relaxed) == 0
            && self.traits.back_off_until.load(Relaxed) == 0;
        self.traits.plain.store(plain, Relaxed);
    }

    /// Whether it may be chosen. `Draining` wherever the configuration says so or no longer names it.
    pub fn gate(&self) -> Gate {
        if self.is_leaving() || self.spec.load().draining {
            return Gate::Draining;
        }
        Gate::ALL[usize::from(self.traits.gate.load(Relaxed))]
    }

    /// Opens or closes the gate. Opening after `Unknown`, `Warming`, `Ill` or a trial (`HalfOpen`, which follows `Ill`)
    /// starts the slow-start ramp of this length (its share of load grows from a tenth to the whole).
    pub fn set_gate(&self, gate: Gate, ramp: Duration) {
        let index = Gate::ALL.iter().position(|&known| known == gate).unwrap_or(0) as u8;
        let before = Gate::ALL[usize::from(self.traits.gate.swap(index, Relaxed))];
        if gate == Gate::Open {
            if matches!(before, Gate::Unknown | Gate::Warming | Gate::Ill | Gate::HalfOpen) {
                self.learner.lock().restarted();
                self.traits.ramp_from.store(self.home.clock.now().0, Relaxed);
                self.traits.ramp_micros.store(u64::try_from(ramp.as_micros()).unwrap_or(0), Relaxed);
            }
        } else {
            self.traits.ramp_micros.store(0, Relaxed);
        }
        if gate == Gate::Warming {
            // It loads: whatever its cache held went with the process before.
            self.cache.forget();
        }
        self.refresh_plain();
        if matches!(gate, Gate::Open | Gate::HalfOpen) {
            self.made_room();
        }
    }

    /// An engine said it is overloaded: not chosen until then, while others are there. Load, not ill health.
    pub fn back_off_until(&self, until: Time) {
        self.traits.back_off_until.store(until.0, Relaxed);
        self.refresh_plain();
    }

    /// Whether nothing special holds.
    #[inline]
    pub(in crate::balance) fn is_plain(&self) -> bool {
        self.traits.plain.load(Relaxed)
    }

    /// How it stands to being chosen now.
    #[inline]
    pub(in crate::balance) fn standing(&self, now: Time) -> Standing {
        if self.traits.plain.load(Relaxed) { Standing::Ready } else { self.standing_in_full(now) }
    }

    #[cold]
    fn standing_in_full(&self, now: Time) -> Standing {
        match self.gate() {
            Gate::Unknown | Gate::Warming | Gate::Draining => Standing::Closed,
            Gate::Ill => Standing::Ill,
            Gate::Open | Gate::HalfOpen => {
                let until = self.traits.back_off_until.load(Relaxed);
                if until > now.0 {
                    return Standing::BackedOff;
                }
                if until != 0 && self.traits.back_off_until.compare_exchange(until, 0, Relaxed, Relaxed).is_ok() {
                    self.refresh_plain();
                }
                Standing::Ready
            }
        }
    }

    /// Its share of the load it could take: below 1 only in the slow start.
    #[inline]
    pub(in crate::balance) fn share(&self, now: Time) -> f64 {
        if self.traits.plain.load(Relaxed) { 1.0 } else { self.ramp_share(now) }
    }

    #[cold]
    fn ramp_share(&self, now: Time) -> f64 {
        let ramp = self.traits.ramp_micros.load(Relaxed);
        if ramp == 0 {
            return 1.0;
        }
        let passed = now.since(Time(self.traits.ramp_from.load(Relaxed))).as_secs_f64() * 1e6 / ramp as f64;
        if passed >= 1.0 {
            self.traits.ramp_micros.store(0, Relaxed);
            self.refresh_plain();
            return 1.0;
        }
        RAMP_FIRST_SHARE + (1.0 - RAMP_FIRST_SHARE) * passed
    }

    /// Whether only a single trial may run.
    pub(in crate::balance) fn on_trial(&self) -> bool {
        Gate::ALL[usize::from(self.traits.gate.load(Relaxed))] == Gate::HalfOpen
    }
}

/// Share of the load at the start of a slow start.
const RAMP_FIRST_SHARE: f64 = 0.1;
