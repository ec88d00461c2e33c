//! `weighbridge demo`: the main job with nothing to set up.

mod stage;
mod table;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{bail, ensure};
use parking_lot::Mutex;
use serde_json::json;
use tokio::time::{Instant, interval};

use super::simulate::Speeds;
use crate::sim::driver::{Played, Tally, Target, play};
use crate::sim::engine::EngineShape;
use crate::sim::fleet::SimPolicy;
use crate::sim::mix::{self, Mix, SimRequest, Traffic};
use crate::sim::stats::{self, Objectives, Record, Summary};

use stage::{MODEL, Stage};
use table::Live;

/// Four simulated replicas of unequal speed, the balancer before them, mixed traffic, and a table of what went where;
/// then the same traffic under round robin.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Seconds of traffic in all, shared by the policies.
    #[arg(long, default_value_t = 40.0)]
    pub seconds: f64,
    /// Policies to run, one after the other, on the same traffic.
    #[arg(long, value_delimiter = ',', default_value = "token-load,round-robin")]
    pub policy: Vec<SimPolicy>,
    /// Replicas' speeds: equal, unequal, or a list; 1 decodes about 900 tokens/s.
    #[arg(long, default_value = "1.4,1.4,0.84,0.42")]
    pub fleet: Speeds,
    /// The traffic: demo, article, chat, agents, reasoning or tenants.
    #[arg(long, default_value = "demo")]
    pub mix: Mix,
    /// Share of what the fleet can finish.
    #[arg(long, default_value_t = 0.85)]
    pub load: f64,
    /// Seeds the traffic.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Print JSON at the end, and nothing else.
    #[arg(long)]
    pub json: bool,
}

/// What is still running this long after the last arrival is cut.
const DRAIN: Duration = Duration::from_secs(60);
/// The live table is drawn this often.
const DRAW: Duration = Duration::from_millis(500);

/// Runs the command.
///
/// # Errors
/// Where the stage cannot be set, or requests failed.
pub fn run(args: Args) -> anyhow::Result<()> {
    ensure!(args.seconds > 0.0, "--seconds must be above 0");
    ensure!(args.load > 0.0, "--load must be above 0");
    if args.policy.contains(&SimPolicy::Oracle) {
        bail!("an oracle only exists on a virtual clock: see `weighbridge simulate`");
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let result = runtime.block_on(async {
        tokio::select! {
            result = perform(&args) => result,
            _ = tokio::signal::ctrl_c() => Err(anyhow::anyhow!("interrupted")),
        }
    });
    // Replicas' connections need no goodbye.
    runtime.shutdown_background();
    result
}

async fn perform(args: &Args) -> anyhow::Result<()> {
    let shape = EngineShape::default();
    let seconds = args.seconds / args.policy.len().max(1) as f64;
    let requests = traffic(args, &shape, seconds);
    if !args.json {
        println!(
            "{} requests over {seconds:.0} s before {} replicas, {:.0}% of what they can finish",
            requests.len(),
            args.fleet.0.len(),
            100.0 * args.load
        );
    }
    let mut live = Live::new(args.json);
    let mut summaries = Vec::new();
    let mut rows = Vec::new();
    let mut faults = BTreeMap::new();
    for &policy in &args.policy {
        let stage = Stage::set(&shape, &args.fleet.0, policy).await?;
        let tally = Arc::new(Tally::default());
        let played = one(&stage, policy, &requests, Arc::clone(&tally), &mut live).await;
        stage.take_down().await;
        let played = played?;
        live.keep(&tally);
        for fault in played.iter().filter_map(|p| p.fault.as_deref()) {
            *faults.entry(format!("{policy}: {fault}")).or_insert(0) += 1;
        }
        rows.push(json!({"policy": policy.name(), "replicas": replicas_json(&tally)}));
        summaries.push(summary(policy, &played, &tally, &args.fleet.0));
    }
    if args.json {
        let mut document = stats::json(&summaries);
        document["replicas"] = json!(rows);
        println!("{document:#}");
    } else {
        println!("\nthe same traffic under each policy:\n{}", stats::table(&summaries));
    }
    for (fault, count) in &faults {
        eprintln!("{count} × {fault}");
    }
    ensure!(faults.is_empty(), "some requests were not answered");
    Ok(())
}

/// The mix's requests of the first `seconds` of a steady run, so that it begins and ends busy.
fn traffic(args: &Args, shape: &EngineShape, seconds: f64) -> Vec<SimRequest> {
    let speeds = args.fleet.0.iter().sum();
    let of = |requests| {
        let traffic = Traffic { mix: args.mix, requests, seed: args.seed, load: args.load, flood: None };
        mix::generate(&traffic, shape, speeds)
    };
    let sample = of(2_000);
    let length = sample.last().map_or(1.0, |r| r.at).max(1e-3);
    of(((2_000.0 * seconds / length).round() as usize).max(1))
}

async fn one(
    stage: &Stage,
    policy: SimPolicy,
    requests: &[SimRequest],
    tally: Arc<Tally>,
    live: &mut Live,
) -> anyhow::Result<Vec<Played>> {
    let target = Target {
        base_url: stage.base_url.clone(),
        model: MODEL.to_owned(),
        api_key: None,
        bands: Vec::new(),
        drain: DRAIN,
    };
    let started = Instant::now();
    let booked = Arc::new(Mutex::new(BTreeMap::new()));
    let watch = tokio::spawn(watch_books(format!("{}/metrics", stage.admin_url), Arc::clone(&booked)));
    let playing = play(requests, &target, Arc::clone(&tally));
    tokio::pin!(playing);
    let mut draw = interval(DRAW);
    let played = loop {
        tokio::select! {
            played = &mut playing => break played,
            _ = draw.tick() => live.draw(policy.name(), started.elapsed(), &tally, &booked.lock().clone()),
        }
    };
    watch.abort();
    live.draw(policy.name(), started.elapsed(), &tally, &BTreeMap::new());
    played
}

async fn watch_books(url: String, booked: Arc<Mutex<BTreeMap<String, f64>>>) {
    let client = reqwest::Client::new();
    let mut every = interval(DRAW);
    loop {
        every.tick().await;
        let Ok(answer) = client.get(&url).timeout(Duration::from_secs(2)).send().await else { continue };
        if let Ok(text) = answer.text().await {
            *booked.lock() = table::booked(&text);
        }
    }
}

fn summary(policy: SimPolicy, played: &[Played], tally: &Tally, speeds: &[f64]) -> Summary {
    let records: Vec<Record> = played.iter().map(|p| p.record).collect();
    // Not engines' busy time, which is theirs alone: the tokens they sent, by their speed.
    let replicas = tally.replicas.lock();
    let busy: Vec<f64> = (1..)
        .zip(speeds)
        .map(|(n, speed)| replicas.get(&format!("gpu-{n}")).map_or(0.0, |r| r.tokens as f64 / speed))
        .collect();
    Summary::of(policy.name(), &records, Objectives::default(), &busy)
}

fn replicas_json(tally: &Tally) -> serde_json::Value {
    tally
        .replicas
        .lock()
        .iter()
        .map(|(id, r)| {
            let ttft = stats::Spread::of(r.ttft.clone());
            json!({"id": id, "requests": r.requests, "completed": r.completed, "tokens": r.tokens,
                "ttft_ms": {"p50": ttft.p50 * 1e3, "p99": ttft.p99 * 1e3}})
        })
        .collect()
}
