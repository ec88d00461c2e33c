//! Thousands of SSE streams at once through one process: what fails, and what each costs in memory.
//!
//! Three processes on loopback: a model server that sends every stream one event a second, the real `weighbridge
//! serve` with every setting at its default but the number of threads, and this one with the clients. A stream is
//! never ended by the server: every end that a client sees is an error.
//!
//!     cargo bench --bench streams -- [--streams N] [--seconds S] [--opened-per-second N] [--binary PATH] [--json] [--check]
//!
//! Claims (`--check` exits 1 where one fails): no error, at most 120 KiB of resident memory a stream above what the
//! process had before, and nothing booked and no descriptor kept once the clients have left.
//!
//! Each stream takes two descriptors of the balancer and one of each of the others.

mod clients;
#[path = "../passthrough/process.rs"]
#[allow(dead_code, reason = "the yardstick is not measured here")]
mod process;
#[path = "../passthrough/upstream.rs"]
mod upstream;

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Parser;
use serde::Serialize;
use tokio::task::LocalSet;

use clients::Clients;
use process::Proxy;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Resident memory of one stream above the process's own.
const KIB_PER_STREAM_MAX: f64 = 120.0;
/// Descriptors that may come and go with probes and the reading of books.
const DESCRIPTORS_SLACK: usize = 8;
/// How long the books may take to empty after the clients left.
const SETTLE_WITHIN: Duration = Duration::from_secs(30);
/// How long after the last stream was asked for all of them must have begun.
const BEGIN_WITHIN: Duration = Duration::from_secs(30);
/// Events are a second apart: a stream that is silent for this long is stuck.
const SILENT_AFTER: Duration = Duration::from_secs(10);

/// Every stream fits: what is measured is the proxy.
const HOLDS: process::Holds = process::Holds { tokens: 100_000_000, sequences: 100_000 };

#[derive(Parser, Clone, Debug)]
struct Options {
    /// Streams open at once.
    #[arg(long, default_value_t = 9000)]
    streams: usize,
    /// How long all of them are kept.
    #[arg(long, default_value_t = 15.0)]
    seconds: f64,
    /// How fast they are opened.
    #[arg(long, default_value_t = 600.0)]
    opened_per_second: f64,
    /// Threads of the balancer.
    #[arg(long, default_value_t = 2)]
    threads: usize,
    /// The balancer to measure, in place of this build's.
    #[arg(long, default_value = env!("CARGO_BIN_EXE_weighbridge"), hide_default_value = true)]
    binary: PathBuf,
    /// A tokenizer directory for the weighing.
    #[arg(long, default_value = "tests/data/smollm2")]
    tokenizer: String,
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
    rlimit::increase_nofile_limit(u64::MAX)?;
    // The model server is this same binary under another first argument.
    let arguments: Vec<String> = std::env::args().collect();
    match arguments.get(1).map(String::as_str) {
        Some("upstream") => upstream::run(&arguments[2], arguments[3].parse().context("events a second")?),
        _ => {
            let options = Options::parse();
            let report = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()?
                .block_on(LocalSet::new().run_until(measure(&options)))?;
            report.print(&options)
        }
    }
}

/// What was seen; memory in KiB.
#[derive(Debug, Serialize)]
struct Report {
    streams: usize,
    threads: usize,
    /// Streams that ended, were refused or fell silent, by what happened.
    errors: Vec<String>,
    rss_before_kib: u64,
    rss_kib: u64,
    rss_after_kib: u64,
    kib_per_stream: f64,
    descriptors_before: usize,
    descriptors: usize,
    descriptors_after: usize,
    events_per_second: f64,
    /// Cores that the balancer kept busy while the streams ran.
    cores: f64,
    cpu_us_per_event: f64,
    /// The longest that any stream went without an event.
    longest_gap_ms: u128,
    /// Until nothing was booked and every descriptor was closed, after the clients had left.
    settled_after_ms: Option<u128>,
}

async fn measure(options: &Options) -> Result<Report> {
    let upstream = process::upstream(1.0)?;
    let proxy = process::weighbridge(&upstream, &options.tokenizer, &options.binary, options.threads, HOLDS)?;
    clients::wait_for_event(proxy.address).await?;
    settled(&proxy, usize::MAX).await?.context("the first stream is still booked")?;
    let (rss_before_kib, descriptors_before) = (rss_kib(&proxy)?, descriptors(&proxy)?);

    let clients = Clients::open(proxy.address, options.streams, options.opened_per_second);
    let opening = Duration::from_secs_f64(options.streams as f64 / options.opened_per_second);
    let give_up = Instant::now() + opening + BEGIN_WITHIN;
    while clients.begun() + clients.failed() < options.streams && Instant::now() < give_up {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    clients.start_watching();
    let (began, cpu, events) = (Instant::now(), proxy.cpu()?, clients.events());
    tokio::time::sleep(Duration::from_secs_f64(options.seconds)).await;
    let (span, cpu, events) = (began.elapsed(), proxy.cpu()? - cpu, clients.events() - events);
    let (rss_kib_now, descriptors_now) = (rss_kib(&proxy)?, descriptors(&proxy)?);
    let (errors, longest_gap) = (clients.errors(SILENT_AFTER), clients.longest_gap());
    drop(clients);
    let settled_after = settled(&proxy, descriptors_before + DESCRIPTORS_SLACK).await?;
    Ok(Report {
        streams: options.streams,
        threads: options.threads,
        errors,
        rss_before_kib,
        rss_kib: rss_kib_now,
        rss_after_kib: rss_kib(&proxy)?,
        kib_per_stream: rss_kib_now.saturating_sub(rss_before_kib) as f64 / options.streams as f64,
        descriptors_before,
        descriptors: descriptors_now,
        descriptors_after: descriptors(&proxy)?,
        events_per_second: events as f64 / span.as_secs_f64(),
        cores: cpu.as_secs_f64() / span.as_secs_f64(),
        cpu_us_per_event: cpu.as_secs_f64() * 1e6 / (events.max(1)) as f64,
        longest_gap_ms: longest_gap.as_millis(),
        settled_after_ms: settled_after.map(|d| d.as_millis()),
    })
}

/// Waits until the balancer has nothing booked and at most so many descriptors; how long that took.
async fn settled(proxy: &Proxy, descriptors_max: usize) -> Result<Option<Duration>> {
    let admin = proxy.admin.context("the balancer has an admin address")?;
    let start = Instant::now();
    while start.elapsed() < SETTLE_WITHIN {
        let books = clients::get_json(admin, "/admin/replicas").await?;
        let replicas = books.as_array().context("an array of replicas")?;
        let keys = ["projected_tokens", "booked_kv_tokens", "load_seconds", "active_sequences", "requests_in_flight"];
        let zero = replicas.iter().all(|replica| keys.iter().all(|key| replica[key].as_f64() == Some(0.0)));
        if zero && descriptors(proxy)? <= descriptors_max {
            return Ok(Some(start.elapsed()));
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Ok(None)
}

fn rss_kib(proxy: &Proxy) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{}/status", proxy.pid())).context("the balancer has died")?;
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).context("VmRSS")?;
    Ok(line.split_whitespace().nth(1).context("VmRSS")?.parse()?)
}

fn descriptors(proxy: &Proxy) -> Result<usize> {
    Ok(fs::read_dir(format!("/proc/{}/fd", proxy.pid())).context("the balancer has died")?.count())
}

impl Report {
    fn print(&self, options: &Options) -> Result<()> {
        if options.json {
            println!("{}", serde_json::to_string_pretty(self)?);
        } else {
            println!("{} streams through {} threads, {} failed", self.streams, self.threads, self.errors.len());
            for error in self.errors.iter().take(10) {
                println!("  {error}");
            }
            println!(
                "memory      {} KiB before, {} with the streams, {} after: {:.1} KiB a stream (at most {KIB_PER_STREAM_MAX})",
                self.rss_before_kib, self.rss_kib, self.rss_after_kib, self.kib_per_stream
            );
            println!(
                "descriptors {} before, {} with the streams, {} after",
                self.descriptors_before, self.descriptors, self.descriptors_after
            );
            println!(
                "events      {:.0} a second, {:.1} µs of CPU each ({:.2} cores), longest gap {} ms",
                self.events_per_second, self.cpu_us_per_event, self.cores, self.longest_gap_ms
            );
            match self.settled_after_ms {
                Some(ms) => println!("settled     {ms} ms after the clients left"),
                None => println!("settled     NOT within {SETTLE_WITHIN:?}"),
            }
        }
        let holds =
            self.errors.is_empty() && self.kib_per_stream <= KIB_PER_STREAM_MAX && self.settled_after_ms.is_some();
        if options.check && !holds {
            bail!("a claim does not hold");
        }
        Ok(())
    }
}
