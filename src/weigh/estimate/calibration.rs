//! How good the predictions were: coverage of p50 and p90, and the ratio of estimate to actual.

use parking_lot::Mutex;

use super::{EstimateSource, HistoryKey, OutputEstimate, Task};
use crate::units::{ModelName, NameMap};

/// Upper bounds of the error ratio's buckets (estimated / actual output tokens); above the last is one more.
pub const RATIO_BOUNDS: [f64; 12] = [0.1, 0.25, 0.5, 0.7, 0.8, 0.9, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0];

/// What became of the predictions of one source for one kind of request.
#[derive(Clone, Debug, PartialEq)]
pub struct Calibration {
    pub model: ModelName,
    pub task: Task,
    pub source: EstimateSource,
    /// Answers compared.
    pub answers: u64,
    /// Answers not longer than the predicted p50, and than the predicted high percentile.
    pub under_p50: u64,
    pub under_p90: u64,
    /// Sum of estimated mean / actual, and its histogram by [`RATIO_BOUNDS`].
    pub ratio_sum: f64,
    pub ratios: [u64; RATIO_BOUNDS.len() + 1],
}

impl Calibration {
    /// Share of answers under the predicted p50; about 0.5 where predictions are good.
    pub fn coverage_p50(&self) -> f64 {
        self.under_p50 as f64 / self.answers.max(1) as f64
    }

    /// Share of answers under the predicted high percentile; about 0.9 for 90.
    pub fn coverage_p90(&self) -> f64 {
        self.under_p90 as f64 / self.answers.max(1) as f64
    }
}

/// All calibrations; as many as models × tasks × sources.
#[derive(Debug, Default)]
pub(super) struct Calibrations {
    by_kind: Mutex<NameMap<(ModelName, Task, EstimateSource), Calibration>>,
}

impl Calibrations {
    pub(super) fn note(&self, key: &HistoryKey, predicted: &OutputEstimate, actual: u64) {
        let mut by_kind = self.by_kind.lock();
        let entry = by_kind.entry((key.model.clone(), key.task, predicted.source)).or_insert_with(|| Calibration {
            model: key.model.clone(),
            task: key.task,
            source: predicted.source,
            answers: 0,
            under_p50: 0,
            under_p90: 0,
            ratio_sum: 0.0,
            ratios: [0; RATIO_BOUNDS.len() + 1],
        });
        entry.answers += 1;
        entry.under_p50 += u64::from(actual <= predicted.p50);
        entry.under_p90 += u64::from(actual <= predicted.p90);
        let ratio = predicted.mean / actual.max(1) as f64;
        entry.ratio_sum += ratio;
        entry.ratios[RATIO_BOUNDS.partition_point(|bound| *bound < ratio)] += 1;
    }

    pub(super) fn all(&self) -> Vec<Calibration> {
        let mut all: Vec<Calibration> = self.by_kind.lock().values().cloned().collect();
        all.sort_by(|a, b| (&a.model, a.task, a.source).cmp(&(&b.model, b.task, b.source)));
        all
    }
}
