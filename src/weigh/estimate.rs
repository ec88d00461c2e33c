//! How long an answer will be: learned histories, heuristics, caps, confidence, conditional remainder.

use serde::{Deserialize, Serialize};

use crate::units::{ModelName, TenantName};

/// Where an estimate came from, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
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
    pub tail: std::sync::Arc<[(u64, f64)]>,
}

impl OutputEstimate {
    /// Expected tokens still to come of one sequence that has produced `so_far`.
    pub fn remaining(&self, so_far: u64) -> f64 {
        let _ = so_far;
        todo!("weigh")
    }
}

/// What a request is for, from a hint or from its shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Task {
    Chat,
    Code,
    Summary,
    Classification,
    Extraction,
    Reasoning,
    Tools,
}

/// Which history an answer belongs to.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct HistoryKey {
    pub tenant: Option<TenantName>,
    pub model: ModelName,
    pub task: Task,
}

/// Rolling histories of answer lengths.
#[derive(Debug, Default)]
pub struct Histories {}

impl Histories {
    /// Estimates one sequence's answer.
    pub fn estimate(&self, key: &HistoryKey, caps: &OutputCaps) -> OutputEstimate {
        let _ = (key, caps);
        todo!("weigh")
    }

    /// Learns from a completed answer: output tokens of one sequence. Answers cut short by the client or by an
    /// error are not completed and must not be given.
    pub fn observe(&self, key: &HistoryKey, output_tokens: u64) {
        let _ = (key, output_tokens);
        todo!("weigh")
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
