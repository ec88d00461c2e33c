//! Answer lengths of one kind of request: counted in buckets, the recent ones apart.

use std::collections::VecDeque;
use std::sync::Arc;

use super::{EstimateSource, OutputCaps, OutputEstimate};

/// Answers that quantiles and the mean are taken from. 500 give a p90 whose own coverage is 90% ± 1.3%, and a change of
/// traffic is wholly forgotten after 500 more.
pub const RECENT: usize = 500;
/// A history that grows to this many answers is trimmed …
pub const SAMPLES_MAX: usize = 10_000;
/// … to its newest ones.
pub const SAMPLES_KEPT: usize = 5_000;
/// Answers before a history is trusted.
pub const SAMPLES_TRUSTED: usize = 100;

/// Lengths up to here have a bucket each; above, a bucket is 1/32 of its octave (3%) wide.
const EXACT: u64 = 64;
const PER_OCTAVE: u64 = 32;
/// 2^20 tokens and all above share the last bucket.
const OCTAVES: u64 = 14;
const BUCKETS: usize = (EXACT + OCTAVES * PER_OCTAVE) as usize;
/// Answers above a point that make the recent ones alone tell what remains there.
const TAIL_RECENT_MIN: u32 = 30;

fn bucket(length: u64) -> usize {
    if length < EXACT {
        return length as usize;
    }
    let octave = u64::from(length.ilog2()) - 6;
    let step = (length >> (octave + 1)) - PER_OCTAVE;
    ((EXACT + octave * PER_OCTAVE + step) as usize).min(BUCKETS - 1)
}

/// The least length of a bucket.
fn floor(bucket: usize) -> u64 {
    let bucket = bucket as u64;
    if bucket < EXACT {
        return bucket;
    }
    let (octave, step) = ((bucket - EXACT) / PER_OCTAVE, (bucket - EXACT) % PER_OCTAVE);
    (PER_OCTAVE + step) << (octave + 1)
}

/// The middle of a bucket, as a length.
fn middle(bucket: usize) -> f64 {
    if (bucket as u64) < EXACT { bucket as f64 } else { (floor(bucket) + floor(bucket + 1) - 1) as f64 / 2.0 }
}

/// Counts by bucket, with their sums.
#[derive(Clone, Debug)]
struct Counts {
    by_bucket: Box<[u32]>,
    total: u32,
}

impl Counts {
    fn new() -> Counts {
        Counts { by_bucket: vec![0; BUCKETS].into(), total: 0 }
    }

    fn add(&mut self, length: u32) {
        self.by_bucket[bucket(u64::from(length))] += 1;
        self.total += 1;
    }

    fn remove(&mut self, length: u32) {
        self.by_bucket[bucket(u64::from(length))] -= 1;
        self.total -= 1;
    }
}

/// One history.
#[derive(Debug)]
pub struct Sketch {
    samples: VecDeque<u32>,
    recent: Counts,
    all: Counts,
}

impl Default for Sketch {
    fn default() -> Self {
        Sketch { samples: VecDeque::new(), recent: Counts::new(), all: Counts::new() }
    }
}

impl Sketch {
    /// Learns one answer's length.
    pub fn observe(&mut self, length: u64) {
        let length = u32::try_from(length).unwrap_or(u32::MAX);
        self.samples.push_back(length);
        self.all.add(length);
        self.recent.add(length);
        if self.samples.len() > RECENT {
            self.recent.remove(self.samples[self.samples.len() - 1 - RECENT]);
        }
        if self.samples.len() >= SAMPLES_MAX {
            for _ in 0..SAMPLES_MAX - SAMPLES_KEPT {
                if let Some(old) = self.samples.pop_front() {
                    self.all.remove(old);
                }
            }
        }
    }

    /// Answers in it.
    pub fn len(&self) -> usize {
        self.samples.len()
    }

    /// Whether it has learned nothing.
    pub fn is_empty(&self) -> bool {
        self.samples.is_empty()
    }

    /// Its answers, oldest first.
    pub fn samples(&self) -> impl Iterator<Item = u32> {
        self.samples.iter().copied()
    }

    /// What the history says now, ready to be read many times.
    pub fn curve(&self, percentile: u8) -> Curve {
        let (recent, all) = (&self.recent, &self.all);
        // From the longest bucket down: how many are longer, and by how much in all.
        let mut points = Vec::new();
        let (mut above_recent, mut above_all) = (Above::default(), Above::default());
        for i in (0..BUCKETS).rev() {
            let (r, a) = (recent.by_bucket[i], all.by_bucket[i]);
            if r == 0 && a == 0 {
                continue;
            }
            let above = if above_recent.count >= TAIL_RECENT_MIN { above_recent } else { above_all };
            if above.count > 0 {
                let n = if (i as u64) < EXACT { i as u64 } else { floor(i + 1) - 1 };
                points.push((n, (above.sum / f64::from(above.count) - n as f64).max(1.0)));
            }
            above_recent.add(r, middle(i));
            above_all.add(a, middle(i));
        }
        let mean = above_recent.sum / f64::from(above_recent.count.max(1));
        points.push((0, mean.max(1.0)));
        points.reverse();
        points.dedup_by_key(|point| point.0);
        let mut survival = Vec::new();
        let mut longer = recent.total;
        for (i, &count) in recent.by_bucket.iter().enumerate() {
            if count > 0 {
                longer -= count;
                survival.push((i, count, longer));
            }
        }
        Curve {
            mean,
            p50: quantile(recent, 0.5),
            high: quantile(recent, f64::from(percentile.clamp(1, 99)) / 100.0),
            recent: survival.iter().map(|&(i, count, _)| (middle(i), count)).collect(),
            tail: thinned(points),
        }
    }
}

#[derive(Clone, Copy, Default)]
struct Above {
    count: u32,
    sum: f64,
}

impl Above {
    fn add(&mut self, count: u32, length: f64) {
        self.count += count;
        self.sum += f64::from(count) * length;
    }
}

/// The least length that this share of answers does not exceed: a bucket's end, since many answers may stand at one
/// length in it (a cap that clients like).
fn quantile(counts: &Counts, share: f64) -> u64 {
    let wanted = share * f64::from(counts.total);
    let mut under = 0.0;
    for (i, &count) in counts.by_bucket.iter().enumerate() {
        under += f64::from(count);
        if count > 0 && under >= wanted {
            return if (i as u64) < EXACT { i as u64 } else { floor(i + 1) - 1 };
        }
    }
    0
}

/// At most 32 of a tail's points, at growing distances.
fn thinned(points: Vec<(u64, f64)>) -> Arc<[(u64, f64)]> {
    const POINTS_MAX: usize = 32;
    if points.len() <= POINTS_MAX {
        return points.into();
    }
    let last = points.len() - 1;
    (0..POINTS_MAX).map(|i| points[i * last / (POINTS_MAX - 1)]).collect()
}

/// What a history says: read without its lock.
#[derive(Clone, Debug)]
pub struct Curve {
    mean: f64,
    p50: u64,
    high: u64,
    /// (length, answers) of the recent answers, growing.
    recent: Vec<(f64, u32)>,
    tail: Arc<[(u64, f64)]>,
}

impl Curve {
    /// The estimate for one request.
    pub fn estimate(&self, source: EstimateSource, caps: &OutputCaps) -> OutputEstimate {
        let (cap, min) = (caps.cap(), caps.min_tokens);
        let mean = match cap {
            Some(cap) if (cap as f64) < self.recent.last().map_or(0.0, |last| last.0) => self.capped_mean(cap as f64),
            _ => self.mean,
        };
        bounded(mean, self.p50, self.high, &self.tail, source, cap, min)
    }

    /// E[min(length, cap)].
    fn capped_mean(&self, cap: f64) -> f64 {
        let (sum, count) =
            self.recent.iter().fold((0.0, 0u32), |(sum, n), &(len, c)| (sum + f64::from(c) * len.min(cap), n + c));
        sum / f64::from(count.max(1))
    }
}

/// An estimate within a cap and a floor; the floor gives way where the cap is lower.
pub fn bounded(
    mean: f64,
    p50: u64,
    high: u64,
    tail: &Arc<[(u64, f64)]>,
    source: EstimateSource,
    cap: Option<u64>,
    min: u64,
) -> OutputEstimate {
    let cap = cap.unwrap_or(u64::MAX);
    let min = min.min(cap);
    let tail = if min == 0 && tail.last().is_none_or(|&(n, rest)| (n as f64 + rest) <= cap as f64) {
        Arc::clone(tail)
    } else {
        tail.iter()
            .take_while(|(n, _)| *n < cap)
            .map(|&(n, rest)| (n, rest.max(min.saturating_sub(n) as f64).min((cap - n) as f64)))
            .chain((cap < u64::MAX).then_some((cap, 0.0)))
            .collect()
    };
    OutputEstimate {
        mean: mean.clamp(min as f64, cap as f64),
        p50: p50.clamp(min, cap),
        p90: high.max(p50).clamp(min, cap),
        source,
        confidence: source.confidence(),
        tail,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_length_is_in_the_bucket_that_begins_at_or_below_it(length in 0u64..1 << 20) {
            let i = bucket(length);
            prop_assert!(floor(i) <= length);
            prop_assert!(i + 1 == BUCKETS || floor(i + 1) > length);
        }

        #[test]
        fn counts_are_those_of_the_kept_samples(lengths in proptest::collection::vec(0u64..5000, 0..1500)) {
            let mut sketch = Sketch::default();
            for &length in &lengths {
                sketch.observe(length);
            }
            prop_assert_eq!(sketch.recent.total as usize, lengths.len().min(RECENT));
            prop_assert_eq!(sketch.all.total as usize, lengths.len());
        }
    }

    #[test]
    fn a_history_is_trimmed_to_its_newest_half() {
        let mut sketch = Sketch::default();
        for i in 0..SAMPLES_MAX {
            sketch.observe(i as u64);
        }
        assert_eq!(sketch.len(), SAMPLES_KEPT);
        assert_eq!(sketch.samples().next(), Some(SAMPLES_KEPT as u32));
    }

    #[test]
    fn a_stream_that_outlives_the_short_answers_is_expected_to_be_a_long_one() {
        let mut sketch = Sketch::default();
        for i in 0..400u32 {
            sketch.observe(if i.is_multiple_of(4) { 2000 } else { 20 });
        }
        let estimate = sketch.curve(90).estimate(EstimateSource::TaskHistory, &OutputCaps::default());
        assert!((estimate.mean - 515.0).abs() < 20.0, "{}", estimate.mean);
        assert!((estimate.remaining(20) - 1980.0).abs() < 60.0, "{}", estimate.remaining(20));
        assert_eq!(estimate.p50, 20);
    }

    #[test]
    fn caps_and_floors_bound_every_figure() {
        let mut sketch = Sketch::default();
        for i in 0..500 {
            sketch.observe(10 + i);
        }
        let caps = OutputCaps { max_tokens: Some(100), min_tokens: 50, ..OutputCaps::default() };
        let estimate = sketch.curve(90).estimate(EstimateSource::TaskHistory, &caps);
        assert!(estimate.mean >= 50.0 && estimate.mean <= 100.0);
        assert_eq!((estimate.p50, estimate.p90), (100, 100));
        assert!(estimate.remaining(0) >= 50.0);
        assert_eq!(estimate.remaining(100), 0.0);
        assert!(estimate.remaining(90) <= 10.0);
    }
}
