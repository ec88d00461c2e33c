//! What the black-box tests share: the real binary on free loopback ports, scripted replicas that play bytes
//! exactly, raw clients that see exactly what arrives, and readers of the balancer's books.
//!
//! Each test binary uses a part of it, hence the lint.
#![allow(dead_code, unused_imports, unreachable_pub)]

pub mod balancer;
pub mod books;
pub mod client;
pub mod consul;
pub mod etcd;
pub mod files;
pub mod h2;
pub mod ports;
pub mod reply;
pub mod sim;
pub mod tls;
pub mod upstream;

pub use balancer::{Running, Setup};
pub use books::{Books, Series};
pub use client::{Answer, Client, End, Head, Piece, get, post};
pub use files::{case_bytes, case_text, repeat_pattern};
pub use reply::{Act, Gate, Reply};
pub use sim::Sim;
pub use upstream::{Seen, Upstream};

use std::future::Future;
use std::time::{Duration, Instant};

/// Waits until `ready` says yes, looking every few milliseconds, at most `limit`; tells whether it came.
pub async fn within(limit: Duration, mut ready: impl AsyncFnMut() -> bool) -> bool {
    let deadline = Instant::now() + limit;
    loop {
        if ready().await {
            return true;
        }
        if Instant::now() >= deadline {
            return false;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Whether tests that are scaled down, or whose bounds are loosened for debug builds and busy machines, are to hold the
/// figures that were asked for: an optimised balancer (`WEIGHBRIDGE_BINARY`) on a machine with nothing else to do.
/// `make figures`.
pub fn full_figures() -> bool {
    std::env::var_os("WEIGHBRIDGE_FULL_FIGURES").is_some()
}

/// Milliseconds, for short durations in tests.
pub const fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// Runs a future to its end on a runtime of its own: for tests of the standard harness.
pub fn run<F: Future>(future: F) -> F::Output {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime starts")
        .block_on(future)
}

/// The middle of a set of durations.
pub fn median(mut of: Vec<Duration>) -> Duration {
    of.sort();
    of[of.len() / 2]
}

/// The value below which this share of a set lies.
pub fn quantile(mut of: Vec<Duration>, share: f64) -> Duration {
    of.sort();
    let at = ((of.len() as f64 * share).ceil() as usize).clamp(1, of.len());
    of[at - 1]
}
