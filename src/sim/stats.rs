//! What came of a run: latencies, goodput, refusals, imbalance.

use serde_json::{Value, json};

/// What became of one request.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Record {
    /// Seconds from the start.
    pub arrived: f64,
    /// Seconds from arrival to the first token; `None` where none came.
    pub ttft: Option<f64>,
    /// Seconds from arrival to the last token; `None` where the answer was not completed.
    pub e2e: Option<f64>,
    /// Tokens of the answer.
    pub output: u32,
    pub refused: bool,
    /// The replica's place in the fleet; `None` where it was never placed.
    pub replica: Option<usize>,
    /// The band's place in the run's bands.
    pub band: u8,
}

impl Record {
    /// Seconds per token after the first.
    pub fn tpot(&self) -> Option<f64> {
        let (ttft, e2e) = (self.ttft?, self.e2e?);
        (self.output > 1).then(|| (e2e - ttft) / f64::from(self.output - 1))
    }

    /// The same with all times so many times as long: in the traffic's own seconds, where it was played faster.
    pub fn stretched(self, by: f64) -> Record {
        let stretch = |seconds: f64| seconds * by;
        Record { arrived: stretch(self.arrived), ttft: self.ttft.map(stretch), e2e: self.e2e.map(stretch), ..self }
    }
}

/// What an answer must keep to count as good.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Objectives {
    /// Seconds.
    pub ttft: f64,
    /// Seconds.
    pub tpot: f64,
}

impl Default for Objectives {
    /// Two seconds to the first token, and ten tokens a second after it: as fast as people read.
    fn default() -> Self {
        Objectives { ttft: 2.0, tpot: 0.1 }
    }
}

/// A distribution's figures, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Spread {
    pub mean: f64,
    pub p50: f64,
    pub p90: f64,
    pub p99: f64,
}

impl Spread {
    /// Of these values; all zero where there are none.
    pub fn of(mut values: Vec<f64>) -> Spread {
        values.sort_by(f64::total_cmp);
        let mean = values.iter().sum::<f64>() / values.len().max(1) as f64;
        Spread { mean, p50: quantile(&values, 0.5), p90: quantile(&values, 0.9), p99: quantile(&values, 0.99) }
    }

    /// The mean of several runs' figures.
    pub fn mean_of(spreads: impl Iterator<Item = Spread> + Clone) -> Spread {
        let count = spreads.clone().count().max(1) as f64;
        let mean = |part: fn(&Spread) -> f64| spreads.clone().map(|s| part(&s)).sum::<f64>() / count;
        Spread { mean: mean(|s| s.mean), p50: mean(|s| s.p50), p90: mean(|s| s.p90), p99: mean(|s| s.p99) }
    }

    fn json(&self) -> Value {
        let ms = |seconds: f64| (seconds * 1e6).round() / 1e3;
        json!({"p50": ms(self.p50), "p90": ms(self.p90), "p99": ms(self.p99), "mean": ms(self.mean)})
    }
}

/// The nearest-rank quantile of sorted values.
fn quantile(sorted: &[f64], q: f64) -> f64 {
    let rank = (q * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.clamp(1, sorted.len().max(1)) - 1).copied().unwrap_or(0.0)
}

/// One policy's figures over one or several runs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Summary {
    pub name: String,
    pub requests: usize,
    pub refused: usize,
    /// Neither completed nor refused: cut by a fault.
    pub failed: usize,
    /// Share of the requests that were answered within the objectives.
    pub goodput: f64,
    pub ttft: Spread,
    pub tpot: Spread,
    pub e2e: Spread,
    /// The busiest replica's busy time over the mean of all.
    pub imbalance: f64,
}

impl Summary {
    /// Figures of one run's records.
    pub fn of(name: &str, records: &[Record], objectives: Objectives, busy: &[f64]) -> Summary {
        let good = records.iter().filter(|r| {
            r.e2e.is_some()
                && r.ttft.is_some_and(|t| t <= objectives.ttft)
                && r.tpot().is_none_or(|t| t <= objectives.tpot)
        });
        let refused = records.iter().filter(|r| r.refused).count();
        let completed = records.iter().filter(|r| r.e2e.is_some()).count();
        let mean = busy.iter().sum::<f64>() / busy.len().max(1) as f64;
        Summary {
            name: name.to_owned(),
            requests: records.len(),
            refused,
            failed: records.len() - refused - completed,
            goodput: good.count() as f64 / records.len().max(1) as f64,
            ttft: Spread::of(records.iter().filter_map(|r| r.ttft).collect()),
            tpot: Spread::of(records.iter().filter_map(Record::tpot).collect()),
            e2e: Spread::of(records.iter().filter_map(|r| r.e2e).collect()),
            imbalance: if mean > 0.0 { busy.iter().copied().fold(0.0, f64::max) / mean } else { 1.0 },
        }
    }

    /// The mean over seeds: counts add up, everything else is averaged.
    pub fn mean_of(runs: &[Summary]) -> Summary {
        let count = runs.len().max(1) as f64;
        Summary {
            name: runs.first().map(|r| r.name.clone()).unwrap_or_default(),
            requests: runs.iter().map(|r| r.requests).sum(),
            refused: runs.iter().map(|r| r.refused).sum(),
            failed: runs.iter().map(|r| r.failed).sum(),
            goodput: runs.iter().map(|r| r.goodput).sum::<f64>() / count,
            ttft: Spread::mean_of(runs.iter().map(|r| r.ttft)),
            tpot: Spread::mean_of(runs.iter().map(|r| r.tpot)),
            e2e: Spread::mean_of(runs.iter().map(|r| r.e2e)),
            imbalance: runs.iter().map(|r| r.imbalance).sum::<f64>() / count,
        }
    }

    /// As `simulate --json` gives it.
    pub fn json(&self) -> Value {
        json!({
            "name": self.name, "requests": self.requests, "refused": self.refused,
            "goodput": (self.goodput * 1e4).round() / 1e4,
            "ttft_ms": self.ttft.json(), "tpot_ms": self.tpot.json(), "e2e_ms": self.e2e.json(),
            "imbalance": (self.imbalance * 1e3).round() / 1e3, "failed": self.failed,
        })
    }
}

/// All policies as one document.
pub fn json(summaries: &[Summary]) -> Value {
    json!({"policies": summaries.iter().map(Summary::json).collect::<Vec<_>>()})
}

/// All policies as a table for people.
pub fn table(summaries: &[Summary]) -> comfy_table::Table {
    let mut table = comfy_table::Table::new();
    table.load_preset(comfy_table::presets::UTF8_FULL_CONDENSED);
    table.set_header([
        "policy",
        "requests",
        "refused",
        "failed",
        "goodput",
        "TTFT p50/p90/p99 s",
        "TPOT p50/p90/p99 ms",
        "E2E mean s",
        "E2E p50/p90/p99 s",
        "imbalance",
    ]);
    for s in summaries {
        let row = [
            s.name.clone(),
            s.requests.to_string(),
            s.refused.to_string(),
            s.failed.to_string(),
            format!("{:.1}%", 100.0 * s.goodput),
            spread(&s.ttft, 1.0, 2),
            spread(&s.tpot, 1000.0, 0),
            format!("{:.2}", s.e2e.mean),
            spread(&s.e2e, 1.0, 1),
            format!("{:.2}", s.imbalance),
        ];
        table.add_row(row);
    }
    for column in 1..10 {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(comfy_table::CellAlignment::Right);
        }
    }
    table
}

fn spread(s: &Spread, by: f64, digits: usize) -> String {
    format!("{:.digits$} / {:.digits$} / {:.digits$}", s.p50 * by, s.p90 * by, s.p99 * by)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_by_nearest_rank() {
        let spread = Spread::of((1..=200).rev().map(f64::from).collect());
        assert_eq!((spread.p50, spread.p90, spread.p99, spread.mean), (100.0, 180.0, 198.0, 100.5));
        assert_eq!(Spread::of(Vec::new()), Spread::default());
        assert_eq!(Spread::of(vec![3.0]).p99, 3.0);
    }

    #[test]
    fn goodput_counts_only_answers_within_the_objectives() {
        let good = Record { ttft: Some(1.0), e2e: Some(5.0), output: 101, ..Record::default() };
        let late = Record { ttft: Some(3.0), ..good };
        let slow = Record { e2e: Some(15.0), ..good };
        let refused = Record { refused: true, ..Record::default() };
        let cut = Record { ttft: Some(1.0), ..Record::default() };
        let summary = Summary::of("x", &[good, late, slow, refused, cut], Objectives::default(), &[1.0, 3.0]);
        assert_eq!((summary.goodput, summary.refused, summary.failed), (0.2, 1, 1));
        assert_eq!(summary.imbalance, 1.5);
    }

    #[test]
    fn the_document_has_the_contracts_members() {
        let text = json(&[Summary { name: "token-load".to_owned(), ..Summary::default() }]);
        let policy = &text["policies"][0];
        for name in ["name", "requests", "refused", "goodput"] {
            assert!(policy.get(name).is_some(), "{name}");
        }
        for name in ["ttft_ms", "tpot_ms", "e2e_ms"] {
            for q in ["p50", "p90", "p99"] {
                assert!(policy[name][q].is_number(), "{name}.{q}");
            }
        }
    }
}
