//! What Weighbridge costs above a bare Pingora pass-through, in CPU time of the proxy's process.
//!
//! Three processes on loopback: a model server that computes nothing, and before it in turn a proxy that does nothing
//! but pass (the yardstick) and the real `weighbridge serve`, both of this build profile, one thread and this
//! allocator. Rounds alternate between the two, so that a noisy machine is noisy for both. CPU time and not throughput
//! is compared: it barely moves when the machine is shared.
//!
//!     cargo bench --bench passthrough -- [--rounds N] [--seconds S] [--rate N] [--streams N] [--events-per-second N] [--noise] [--json] [--check]
//!
//! Requests come in two ways: each connection sends its next one when it has its answer (the proxy never waits, so
//! that its system calls find many connections ready), and at a rate that leaves the proxy idle most of the time, as
//! a balancer before model servers is.
//!
//! Claims (`--check` exits 1 where one fails): a 1 KB chat request, weighing included, at most 1.4 times the bare
//! proxy; a paced SSE event at most 1.15 times.

mod bare;
mod driver;
mod process;
mod upstream;

use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Parser;
use comfy_table::Table;
use serde::Serialize;

use driver::{Requests, Streams};
use process::Proxy;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Limits on Weighbridge's cost as a multiple of the bare proxy's.
const REQUEST_RATIO_MAX: f64 = 1.4;
const EVENT_RATIO_MAX: f64 = 1.15;

/// A replica as the example configuration has it, with room for every stream of the SSE rounds.
const HOLDS: process::Holds = process::Holds { tokens: 400_000, sequences: 512 };

#[derive(Parser, Clone, Debug)]
struct Options {
    /// Rounds of each measurement; medians are reported.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Length of a round.
    #[arg(long, default_value_t = 5.0)]
    seconds: f64,
    /// Connections that send one request after another.
    #[arg(long, default_value_t = 64)]
    connections: usize,
    /// Requests a second in the paced rounds.
    #[arg(long, default_value_t = 2000.0)]
    rate: f64,
    /// Streams open at once in the SSE rounds.
    #[arg(long, default_value_t = 400)]
    streams: usize,
    /// Events of one stream a second.
    #[arg(long, default_value_t = 20.0)]
    events_per_second: f64,
    /// A tokenizer directory for the weighing; `approximate`: nothing is rendered or tokenized.
    #[arg(long, default_value = "tests/data/smollm2")]
    tokenizer: String,
    /// What is measured: both, or `requests`, or `events`.
    #[arg(long, default_value = "both")]
    only: String,
    /// Puts a second bare proxy in Weighbridge's place: what comes out is noise.
    #[arg(long)]
    noise: bool,
    #[arg(long)]
    json: bool,
    /// Exit 1 where a claim fails.
    #[arg(long)]
    check: bool,
    /// Cargo passes this to every benchmark.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> Result<()> {
    // The helper processes are this same binary under another first argument.
    let arguments: Vec<String> = std::env::args().collect();
    match arguments.get(1).map(String::as_str) {
        Some("bare") => bare::run(&arguments[2], &arguments[3]),
        Some("upstream") => upstream::run(&arguments[2], arguments[3].parse().context("events a second")?),
        _ => compare(&Options::parse()),
    }
}

/// CPU time per unit of work of the two proxies: medians over the rounds, in microseconds.
#[derive(Serialize)]
struct Row {
    name: &'static str,
    bare_us: f64,
    weighbridge_us: f64,
    ratio: f64,
    /// The lowest and highest ratio of any round.
    ratio_range: [f64; 2],
    ratio_max: f64,
}

fn compare(options: &Options) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let upstream = process::upstream(options.events_per_second)?;
    let ours = if options.noise {
        process::bare(&upstream)?
    } else {
        process::weighbridge(&upstream, &options.tokenizer, env!("CARGO_BIN_EXE_weighbridge").as_ref(), 1, HOLDS)?
    };
    let proxies = [process::bare(&upstream)?, ours];
    for proxy in &proxies {
        runtime.block_on(driver::wait_for_answer(proxy.address))?;
    }

    let span = Duration::from_secs_f64(options.seconds);
    let mut rows = Vec::new();
    if options.only != "events" {
        rows.push(measure("1 KB chat request", REQUEST_RATIO_MAX, options.rounds, &proxies, |proxy| {
            let load = Requests { address: proxy.address, connections: options.connections, rate: None, span };
            runtime.block_on(driver::cpu_per_request(&load, proxy))
        })?);
        rows.push(measure("1 KB chat request, paced", REQUEST_RATIO_MAX, options.rounds, &proxies, |proxy| {
            let rate = Some(options.rate);
            let load = Requests { address: proxy.address, connections: options.connections, rate, span };
            runtime.block_on(driver::cpu_per_request(&load, proxy))
        })?);
    }
    if options.only != "requests" {
        rows.push(measure("paced SSE event", EVENT_RATIO_MAX, options.rounds, &proxies, |proxy| {
            let load = Streams { address: proxy.address, streams: options.streams, span };
            runtime.block_on(driver::cpu_per_event(&load, proxy))
        })?);
    }
    report(&rows, options)
}

/// Measures both proxies in alternation, the first of a round being the second of the next.
fn measure(
    name: &'static str,
    ratio_max: f64,
    rounds: usize,
    proxies: &[Proxy; 2],
    once: impl Fn(&Proxy) -> Result<f64>,
) -> Result<Row> {
    for proxy in proxies {
        once(proxy).with_context(|| format!("{name}, warm-up of {}", proxy.name))?;
    }
    let mut costs = [Vec::new(), Vec::new()];
    for round in 0..rounds {
        for turn in 0..2 {
            let which = (round + turn) % 2;
            let proxy = &proxies[which];
            let micros = once(proxy).with_context(|| format!("{name} through {}", proxy.name))?;
            eprintln!("{name}: round {}, {}: {micros:.1} µs", round + 1, proxy.name);
            costs[which].push(micros);
        }
    }
    let ratios: Vec<f64> = costs[0].iter().zip(&costs[1]).map(|(bare, ours)| ours / bare).collect();
    let [bare_us, weighbridge_us] = [median(&costs[0]), median(&costs[1])];
    Ok(Row {
        name,
        bare_us,
        weighbridge_us,
        ratio: weighbridge_us / bare_us,
        ratio_range: [
            ratios.iter().copied().fold(f64::INFINITY, f64::min),
            ratios.iter().copied().fold(f64::NEG_INFINITY, f64::max),
        ],
        ratio_max,
    })
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

fn report(rows: &[Row], options: &Options) -> Result<()> {
    if options.json {
        println!("{}", serde_json::to_string_pretty(rows)?);
    } else {
        let mut table = Table::new();
        table.set_header(["CPU of the proxy, one thread", "bare Pingora", "weighbridge", "ratio", "claimed"]);
        for row in rows {
            table.add_row([
                row.name.to_owned(),
                format!("{:.1} µs", row.bare_us),
                format!("{:.1} µs", row.weighbridge_us),
                format!("{:.2} ({:.2} to {:.2})", row.ratio, row.ratio_range[0], row.ratio_range[1]),
                format!("≤ {:.2}", row.ratio_max),
            ]);
        }
        println!("{table}");
    }
    let failed: Vec<&str> = rows.iter().filter(|row| row.ratio > row.ratio_max).map(|row| row.name).collect();
    if options.check && !failed.is_empty() {
        bail!("costs more than is claimed: {}", failed.join(", "));
    }
    Ok(())
}
