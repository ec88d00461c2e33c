//! Units and names shared by every room: tokens, time, ids.
//!
//! Pure: no I/O, and no wall clock except behind [`Clock`], which is passed in.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

/// A map that is looked up many times for each request, with hashes that are quick to make: for keys that no client
/// chooses, such as the names that the operator gives.
pub type NameMap<K, V> = HashMap<K, V, foldhash::fast::RandomState>;

/// A count of model tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Tokens(pub u64);

impl Tokens {
    /// No tokens.
    pub const ZERO: Tokens = Tokens(0);

    /// The count as a float, for scores.
    pub fn as_f64(self) -> f64 {
        self.0 as f64
    }

    /// `self − other`, never below zero.
    pub fn saturating_sub(self, other: Tokens) -> Tokens {
        Tokens(self.0.saturating_sub(other.0))
    }

    /// `self + other`, never past `u64::MAX`.
    pub fn saturating_add(self, other: Tokens) -> Tokens {
        Tokens(self.0.saturating_add(other.0))
    }
}

impl fmt::Display for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// A moment on a monotonic clock, in microseconds since that clock's start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(pub u64);

impl Time {
    /// The clock's start.
    pub const ZERO: Time = Time(0);

    /// A moment `seconds` after the clock's start (negative is the start).
    pub fn from_secs_f64(seconds: f64) -> Time {
        Time((seconds.max(0.0) * 1e6) as u64)
    }

    /// Seconds since the clock's start.
    pub fn as_secs_f64(self) -> f64 {
        self.0 as f64 / 1e6
    }

    /// How long after `earlier` this is; zero where it is not after it.
    pub fn since(self, earlier: Time) -> Duration {
        Duration::from_micros(self.0.saturating_sub(earlier.0))
    }

    /// This moment and `d` more.
    pub fn after(self, d: Duration) -> Time {
        Time(self.0.saturating_add(u64::try_from(d.as_micros()).unwrap_or(u64::MAX)))
    }
}

/// Where the pure rooms read the time from, so that a test or a simulation can pass its own.
pub trait Clock: Send + Sync + fmt::Debug {
    /// Now, on this clock.
    fn now(&self) -> Time;
}

/// The machine's monotonic clock.
#[derive(Debug, Clone)]
pub struct SystemClock {
    start: Instant,
}

impl SystemClock {
    /// A clock that starts now.
    pub fn new() -> Self {
        SystemClock { start: Instant::now() }
    }
}

impl Default for SystemClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Time {
        Time(u64::try_from(self.start.elapsed().as_micros()).unwrap_or(u64::MAX))
    }
}

/// A clock that moves only when told to.
#[derive(Debug, Default)]
pub struct ManualClock {
    micros: AtomicU64,
}

impl ManualClock {
    /// A clock that stands at zero.
    pub fn new() -> Arc<Self> {
        Arc::new(Self::default())
    }

    /// Moves the clock to `t`; a clock never goes back, so an earlier `t` changes nothing.
    pub fn set(&self, t: Time) {
        self.micros.fetch_max(t.0, Ordering::Relaxed);
    }

    /// Moves the clock on by `d`.
    pub fn advance(&self, d: Duration) {
        self.micros.fetch_add(u64::try_from(d.as_micros()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Time {
        Time(self.micros.load(Ordering::Relaxed))
    }
}

macro_rules! name_type {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub Arc<str>);

        impl $name {
            /// The name as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl From<&str> for $name {
            fn from(text: &str) -> Self {
                $name(Arc::from(text))
            }
        }

        impl From<String> for $name {
            fn from(text: String) -> Self {
                $name(Arc::from(text))
            }
        }
    };
}

name_type! {
    /// A replica's stable id, as the configuration or discovery gives it.
    ReplicaId
}
name_type! {
    /// A model's configured name (never an alias, never a client's text).
    ModelName
}
name_type! {
    /// A tenant's configured name.
    TenantName
}

/// A priority band by its place in the configuration; 0 is the highest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Band(pub u8);
