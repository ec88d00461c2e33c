//! The histories of all models, by tenant class and task, and the choice among them.

use std::sync::Arc;

use arc_swap::ArcSwapOption;
use parking_lot::{Mutex, RwLock};

use super::calibration::{Calibration, Calibrations};
use super::sketch::{Curve, RECENT, SAMPLES_TRUSTED, Sketch, bounded};
use super::{EstimateSource, OutputCaps, OutputEstimate, Task};
use crate::units::{ModelName, NameMap, TenantName};

/// Which history an answer belongs to.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct HistoryKey {
    pub tenant: Option<TenantName>,
    pub model: ModelName,
    pub task: Task,
}

/// Histories kept at most: the configuration bounds tenants, models and tasks, and this bounds it.
const HISTORIES_MAX: usize = 20_000;
/// A curve is drawn anew once this share of the answers behind it is new: drawing goes through every bucket, and a
/// sixteenth moves no quantile by more than its own uncertainty. Before [`SAMPLES_TRUSTED`] it is not read.
const NEW_PER_CURVE: usize = 16;
/// The percentile of models that configure none.
const PERCENTILE_DEFAULT: u8 = 90;

/// One history with what it last said.
#[derive(Debug, Default)]
pub(super) struct History {
    pub(super) sketch: Mutex<Sketch>,
    curve: ArcSwapOption<Curve>,
}

impl History {
    fn observe(&self, length: u64, percentile: u8) {
        let mut sketch = self.sketch.lock();
        sketch.observe(length);
        if sketch.len() >= SAMPLES_TRUSTED
            && (sketch.len().is_multiple_of(sketch.len().min(RECENT) / NEW_PER_CURVE) || self.curve.load().is_none())
        {
            self.curve.store(Some(Arc::new(sketch.curve(percentile))));
        }
    }

    /// Learns many answers and draws once.
    pub(super) fn fill(&self, lengths: impl Iterator<Item = u64>, percentile: u8) {
        let mut sketch = self.sketch.lock();
        lengths.for_each(|length| sketch.observe(length));
        if sketch.len() >= SAMPLES_TRUSTED {
            self.curve.store(Some(Arc::new(sketch.curve(percentile))));
        }
    }
}

/// A history's place: (tenant, model, task), (model, task) or (model).
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Place {
    pub(super) model: ModelName,
    pub(super) task: Option<Task>,
    pub(super) tenant: Option<TenantName>,
}

/// Rolling histories of answer lengths.
///
/// Reading an estimate takes a shared lock for the lookup and none for the figures; learning takes a history's own
/// lock. Safe from any thread.
#[derive(Debug, Default)]
pub struct Histories {
    pub(super) places: RwLock<NameMap<Place, Arc<History>>>,
    percentiles: RwLock<NameMap<ModelName, u8>>,
    calibrations: Calibrations,
}

impl Histories {
    /// Sets the percentile that a model's capacity is booked by (90 where nothing is set).
    pub fn set_percentile(&self, model: &ModelName, percentile: u8) {
        self.percentiles.write().insert(model.clone(), percentile);
    }

    pub(super) fn percentile(&self, model: &ModelName) -> u8 {
        self.percentiles.read().get(model).copied().unwrap_or(PERCENTILE_DEFAULT)
    }

    /// Estimates one sequence's answer: the best history that has enough answers, else the task's constant; then the
    /// request's own bounds.
    pub fn estimate(&self, key: &HistoryKey, caps: &OutputCaps) -> OutputEstimate {
        if caps.ignore_eos
            && let Some(cap) = caps.cap()
        {
            return OutputEstimate::exact(cap);
        }
        if caps.cap() == Some(0) {
            return OutputEstimate::exact(0);
        }
        let places = self.places.read();
        let levels = [
            (EstimateSource::TenantHistory, key.tenant.clone().map(|t| (Some(key.task), Some(t)))),
            (EstimateSource::TaskHistory, Some((Some(key.task), None))),
            (EstimateSource::ModelHistory, Some((None, None))),
        ];
        for (source, level) in levels {
            let Some((task, tenant)) = level else { continue };
            let place = Place { model: key.model.clone(), task, tenant };
            if let Some(history) = places.get(&place)
                && let Some(curve) = history.curve.load().as_ref()
            {
                return curve.estimate(source, caps);
            }
        }
        drop(places);
        heuristic(key.task, caps)
    }

    /// Learns from a completed answer: output tokens of one sequence. Answers cut short by the client or by an
    /// error are not completed and must not be given.
    pub fn observe(&self, key: &HistoryKey, output_tokens: u64) {
        let percentile = self.percentile(&key.model);
        if key.tenant.is_some() {
            self.history(&key.model, Some(key.task), key.tenant.clone(), |h| h.observe(output_tokens, percentile));
        }
        self.history(&key.model, Some(key.task), None, |h| h.observe(output_tokens, percentile));
        self.history(&key.model, None, None, |h| h.observe(output_tokens, percentile));
    }

    /// Compares a completed answer with what was predicted for it, and learns from it.
    pub fn settle(&self, key: &HistoryKey, predicted: &OutputEstimate, output_tokens: u64) {
        self.calibrations.note(key, predicted, output_tokens);
        self.observe(key, output_tokens);
    }

    /// How good the predictions were so far, by model, task and source.
    pub fn calibration(&self) -> Vec<Calibration> {
        self.calibrations.all()
    }

    /// Finds or makes a history. Past the bound on histories nothing new is made.
    pub(super) fn history(
        &self,
        model: &ModelName,
        task: Option<Task>,
        tenant: Option<TenantName>,
        with: impl FnOnce(&History),
    ) {
        let place = Place { model: model.clone(), task, tenant };
        let known = self.places.read().get(&place).map(Arc::clone);
        let history = match known {
            Some(history) => history,
            None => {
                let mut places = self.places.write();
                if places.len() >= HISTORIES_MAX && !places.contains_key(&place) {
                    return;
                }
                Arc::clone(places.entry(place).or_default())
            }
        };
        with(&history);
    }

    /// Answers known of a model, task and tenant.
    pub fn samples(&self, model: &ModelName, task: Option<Task>, tenant: Option<&TenantName>) -> usize {
        let place = Place { model: model.clone(), task, tenant: tenant.cloned() };
        self.places.read().get(&place).map_or(0, |history| history.sketch.lock().len())
    }
}

/// The task's constant, spread as answer lengths are: half below three quarters of the mean, a tenth above twice it,
/// and the longer a stream has lasted, the more is still to come (log-normal, σ about 0.8).
fn heuristic(task: Task, caps: &OutputCaps) -> OutputEstimate {
    let mean = task.heuristic();
    let n = mean as u64;
    let tail = Arc::from([(0, mean), (n, mean * 0.8), (2 * n, mean), (4 * n, mean * 1.6), (8 * n, mean * 2.5)]);
    bounded(
        mean.min(caps.cap().unwrap_or(u64::MAX) as f64),
        (mean * 0.72) as u64,
        (mean * 2.0) as u64,
        &tail,
        EstimateSource::Heuristic,
        caps.cap(),
        caps.min_tokens,
    )
}
