//! What befalls a simulated fleet: a script of faults, drawn from a seed.

use std::time::Duration;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

/// One kind of trouble.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Trouble {
    /// The process is gone: everything in it is cut, its cache is lost; it starts again after this long, cold.
    Death { down: Duration },
    /// The engine stands still, and its health checks still answer.
    Hang { length: Duration },
    /// Steps take this many times as long.
    Slow { factor: f64, length: Duration },
    /// New requests are answered 503.
    Refusals { length: Duration },
    /// Its metrics are not read.
    NoMetrics { length: Duration },
    /// The configuration is read again without it, and after this long with it.
    Removed { length: Duration },
}

/// Trouble for one replica at one moment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fault {
    pub at: Duration,
    /// Its place in the fleet.
    pub replica: usize,
    pub trouble: Trouble,
}

/// What goes wrong in a run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FaultScript {
    pub faults: Vec<Fault>,
    /// Share of the requests whose client goes away before the end.
    pub leaving: f64,
}

impl FaultScript {
    /// A script drawn for `replicas` over `length`: one to five faults of any kind, and some clients that leave.
    pub fn drawn(seed: u64, replicas: usize, length: Duration) -> FaultScript {
        let mut rng = SmallRng::seed_from_u64(seed ^ 0xfa17_5c21_97d0_11ed);
        let mut faults: Vec<Fault> = (0..rng.random_range(1..=5))
            .map(|_| {
                let part = |rng: &mut SmallRng| length.mul_f64(rng.random_range(0.005..0.15));
                let trouble = match rng.random_range(0..6) {
                    0 => Trouble::Death { down: part(&mut rng) },
                    1 => Trouble::Hang { length: part(&mut rng) },
                    2 => Trouble::Slow { factor: rng.random_range(1.5..8.0), length: part(&mut rng) * 3 },
                    3 => Trouble::Refusals { length: part(&mut rng) },
                    4 => Trouble::NoMetrics { length: part(&mut rng) * 3 },
                    _ => Trouble::Removed { length: part(&mut rng) },
                };
                let at = length.mul_f64(rng.random_range(0.05..0.95));
                Fault { at, replica: rng.random_range(0..replicas.max(1)), trouble }
            })
            .collect();
        faults.sort_by_key(|f| f.at);
        FaultScript { faults, leaving: rng.random_range(0.0..0.1) }
    }
}
