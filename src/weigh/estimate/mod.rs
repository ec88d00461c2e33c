//! How long an answer will be: learned histories, heuristics, caps, confidence, conditional remainder.

pub mod calibration;
pub mod histories;
pub mod learn;
pub mod sketch;
pub mod state;
pub mod task;

use std::sync::Arc;

use serde::{Deserialize, Serialize};

pub use calibration::Calibration;
pub use histories::{Histories, HistoryKey};
pub use task::Task;

/// Where an estimate came from, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EstimateSource {
    /// `ignore_eos` or an endpoint without output: certain.
    Exact,
    /// Histories of (tenant class, model, task).
    TenantHistory,
    /// Histories of (model, task).
    TaskHistory,
    /// Histories of (model).
    ModelHistory,
    /// The task's constant.
    Heuristic,
}

impl EstimateSource {
    /// All sources, best first.
    pub const ALL: [EstimateSource; 5] = [
        EstimateSource::Exact,
        EstimateSource::TenantHistory,
        EstimateSource::TaskHistory,
        EstimateSource::ModelHistory,
        EstimateSource::Heuristic,
    ];

    /// A label value for metrics.
    pub fn label(self) -> &'static str {
        match self {
            EstimateSource::Exact => "exact",
            EstimateSource::TenantHistory => "tenant_history",
            EstimateSource::TaskHistory => "task_history",
            EstimateSource::ModelHistory => "model_history",
            EstimateSource::Heuristic => "heuristic",
        }
    }

    /// How far an estimate of this source is trusted, from 0 to 1.
    pub fn confidence(self) -> f32 {
        match self {
            EstimateSource::Exact => 1.0,
            EstimateSource::TenantHistory | EstimateSource::TaskHistory | EstimateSource::ModelHistory => 0.8,
            EstimateSource::Heuristic => 0.3,
        }
    }
}

/// What a request's answer is expected to be, per sequence, in tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct OutputEstimate {
    /// Expected value, for load.
    pub mean: f64,
    pub p50: u64,
    /// The configured percentile (90 by default), for capacity.
    pub p90: u64,
    pub source: EstimateSource,
    /// 0.8 from history, 0.3 from heuristics, 1 where exact.
    pub confidence: f32,
    /// E[length − n | length > n] at growing n, for streams that outlive their estimate: (n, expected remainder).
    /// The request's cap is in it: at the cap nothing remains.
    pub tail: Arc<[(u64, f64)]>,
}

impl OutputEstimate {
    /// An answer of exactly so many tokens.
    pub fn exact(tokens: u64) -> OutputEstimate {
        OutputEstimate {
            mean: tokens as f64,
            p50: tokens,
            p90: tokens,
            source: EstimateSource::Exact,
            confidence: 1.0,
            tail: Arc::from([(0, tokens as f64), (tokens, 0.0)]),
        }
    }

    /// Expected tokens still to come of one sequence that has produced `so_far`: the history's E[length − n |
    /// length > n], between its points by straight lines.
    pub fn remaining(&self, so_far: u64) -> f64 {
        let after = self.tail.partition_point(|(n, _)| *n <= so_far);
        let (Some(&(left, at_left)), right) =
            (after.checked_sub(1).and_then(|i| self.tail.get(i)), self.tail.get(after))
        else {
            // A tail that does not begin at 0, or none: what the mean leaves.
            return (self.mean - so_far as f64).max(0.0);
        };
        match right {
            Some(&(right, at_right)) => {
                let share = (so_far - left) as f64 / (right - left).max(1) as f64;
                (at_left + (at_right - at_left) * share).max(0.0)
            }
            None => at_left.max(0.0),
        }
    }
}

/// What bounds an answer's length.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct OutputCaps {
    pub max_tokens: Option<u64>,
    pub min_tokens: u64,
    pub ignore_eos: bool,
    /// The largest window of the pool less the prompt.
    pub window_left: Option<u64>,
}

impl OutputCaps {
    /// The longest the answer can be.
    pub fn cap(&self) -> Option<u64> {
        match (self.max_tokens, self.window_left) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }
}

#[cfg(test)]
mod tests;
