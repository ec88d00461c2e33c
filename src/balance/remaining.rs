//! What is still to come of an answer that has this many tokens.

use crate::weigh::{EstimateSource, OutputEstimate};

/// Expected tokens still to come of one sequence that has produced `so_far`: E[length − n | length > n] where the
/// estimate carries a tail, else the mean drawn down and, once it is outlived, a fraction of what came already: what
/// has run for long goes on for long.
pub(super) fn at(estimate: &OutputEstimate, so_far: u64) -> u64 {
    if so_far == 0 {
        return if estimate.mean > 0.0 { whole(estimate.mean) } else { 0 };
    }
    let n = so_far as f64;
    let drawn = estimate.mean - n;
    if estimate.source == EstimateSource::Exact {
        return whole(drawn);
    }
    let tail = &estimate.tail;
    let after = tail.partition_point(|&(at, _)| at <= so_far);
    let by_tail = match (after.checked_sub(1).map(|i| tail[i]), tail.get(after)) {
        (Some((_, left)), None) => left,
        (Some((from, left)), Some(&(to, right))) => {
            let part = (so_far - from) as f64 / (to - from).max(1) as f64;
            left + (right - left) * part
        }
        (None, Some(&(to, right))) => estimate.mean + (right - estimate.mean) * n / to.max(1) as f64,
        (None, None) => drawn.max(n * OUTLIVED_SHARE),
    };
    whole(by_tail.max(drawn))
}

/// Of an answer that outlives an estimate without a tail, this share of what came is still expected.
const OUTLIVED_SHARE: f64 = 0.25;

fn whole(tokens: f64) -> u64 {
    // An answer that has not ended has at least a token to come.
    if tokens.is_finite() { tokens.ceil().clamp(1.0, 1e9) as u64 } else { 1 }
}
