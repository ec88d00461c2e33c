//! The demo's live table: what went where.

use std::collections::BTreeMap;
use std::io::{IsTerminal, Write};
use std::time::Duration;

use comfy_table::{CellAlignment, Table, presets};

use crate::sim::driver::Tally;
use crate::sim::stats::Spread;

/// Without a terminal a line is printed this often.
const LINE_EVERY: Duration = Duration::from_secs(5);

/// Draws the table in place on a terminal, a line now and then elsewhere, nothing where it is to be quiet.
#[derive(Debug)]
pub struct Live {
    terminal: bool,
    quiet: bool,
    drawn: usize,
    last_line: Option<Duration>,
}

impl Live {
    /// On standard output.
    pub fn new(quiet: bool) -> Live {
        Live { terminal: std::io::stdout().is_terminal(), quiet, drawn: 0, last_line: None }
    }

    /// Draws the state at `elapsed`. `booked` is each replica's projected tokens, as the balancer's metrics have it.
    pub fn draw(&mut self, policy: &str, elapsed: Duration, tally: &Tally, booked: &BTreeMap<String, f64>) {
        if self.quiet {
            return;
        }
        if self.terminal {
            let text = format!("{policy}, {:>3} s\n{}", elapsed.as_secs(), table(tally, booked));
            let mut out = std::io::stdout().lock();
            if self.drawn > 0 {
                // Up over what was drawn before, and clear from there.
                let _ = write!(out, "\x1b[{}A\x1b[J", self.drawn);
            }
            let _ = writeln!(out, "{text}");
            self.drawn = text.lines().count();
        } else if self.last_line.is_none_or(|last| elapsed - last >= LINE_EVERY) {
            self.last_line = Some(elapsed);
            let parts: Vec<String> = tally
                .replicas
                .lock()
                .iter()
                .map(|(id, r)| {
                    let booked = booked.get(id).copied().unwrap_or(0.0);
                    format!("{id}: {} requests, {booked:.0} tokens booked, {} out", r.requests, r.tokens)
                })
                .collect();
            println!("{policy} {:>3} s  {}", elapsed.as_secs(), parts.join("; "));
        }
    }

    /// The table stays; the next one is drawn below it.
    pub fn keep(&mut self, tally: &Tally) {
        if !self.quiet && !self.terminal {
            println!("{}", table(tally, &BTreeMap::new()));
        }
        self.drawn = 0;
        self.last_line = None;
    }
}

fn table(tally: &Tally, booked: &BTreeMap<String, f64>) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::UTF8_FULL_CONDENSED);
    table.set_header(["replica", "requests", "done", "tokens booked", "tokens out", "TTFT p50 ms", "TTFT p99 ms"]);
    for (id, r) in tally.replicas.lock().iter() {
        let ttft = Spread::of(r.ttft.clone());
        table.add_row([
            id.clone(),
            r.requests.to_string(),
            r.completed.to_string(),
            format!("{:.0}", booked.get(id).copied().unwrap_or(0.0)),
            r.tokens.to_string(),
            format!("{:.0}", ttft.p50 * 1e3),
            format!("{:.0}", ttft.p99 * 1e3),
        ]);
    }
    for column in 1..7 {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

/// Each replica's projected tokens, out of the balancer's metrics.
pub fn booked(metrics: &str) -> BTreeMap<String, f64> {
    let lines = metrics.lines().filter_map(|l| l.strip_prefix("weighbridge_replica_projected_tokens{"));
    lines
        .filter_map(|line| {
            let (labels, value) = line.rsplit_once("} ")?;
            let id = labels.split_once("replica=\"")?.1.split('"').next()?;
            Some((id.to_owned(), value.trim().parse().ok()?))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn projected_tokens_are_read_by_replica() {
        let text = "# TYPE weighbridge_replica_projected_tokens gauge\n\
                    weighbridge_replica_projected_tokens{model=\"demo\",replica=\"gpu-1\"} 1234\n\
                    weighbridge_replica_projected_tokens{replica=\"gpu-2\",model=\"demo\"} 0\nother 3\n";
        let booked = booked(text);
        assert_eq!(booked.len(), 2);
        assert_eq!(booked["gpu-1"], 1234.0);
    }
}
