//! `weighbridge simulate`: policies compared on a virtual clock.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufReader, IsTerminal};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;

use crate::config::{self, Config};
use crate::sim::driver::{self, Tally, Target};
use crate::sim::engine::EngineShape;
use crate::sim::fleet::{self, FaultScript, FleetSpec, Foresight, Member, Run, RunOptions, SimPolicy, two_bands};
use crate::sim::mix::{self, Mix, SimRequest, Traffic};
use crate::sim::stats::{self, Objectives, Record, Summary};
use crate::sim::{plot, trace};
use crate::units::Band;

/// Policies compared on a virtual clock: the real balancer before simulated replicas.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Take replicas, bands and balance settings from this configuration.
    #[arg(long)]
    pub config: Option<PathBuf>,
    /// Without a configuration: equal (four), unequal (speeds 1, 1, 0.6, 0.3), or a list of speeds.
    #[arg(long, default_value = "equal", conflicts_with = "config")]
    pub fleet: Speeds,
    /// A trace: the Azure LLM inference trace's columns, BurstGPT's, or JSON lines.
    #[arg(long, conflicts_with = "mix")]
    pub trace: Option<PathBuf>,
    /// A built-in mix: article, chat, agents, reasoning or tenants.
    #[arg(long, default_value = "article")]
    pub mix: Mix,
    /// Share of what the fleet can finish; stretches a trace. Default 0.9, and a trace's own pace.
    #[arg(long)]
    pub load: Option<f64>,
    /// With the mix tenants: the batch tenant's load by itself.
    #[arg(long)]
    pub flood: Option<f64>,
    /// With the mix tenants: how much of each replica the batch tenant's band may fill.
    #[arg(long, default_value_t = 1.0, conflicts_with = "config")]
    pub batch_share: f64,
    /// With the mix tenants: what a second of the interactive band is worth, a second of the batch band being worth 1.
    #[arg(long, default_value_t = 1.0, conflicts_with = "config")]
    pub interactive_weight: f64,
    /// Put all requests into one band, as a balancer without `bands` does.
    #[arg(long, conflicts_with = "config")]
    pub one_band: bool,
    /// Requests; by default ten minutes' worth of a mix, or all of a trace.
    #[arg(long)]
    pub requests: Option<usize>,
    /// Seeds the mix, the random policies, and faults.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Runs with this many seeds, from --seed on, and reports their mean.
    #[arg(long, default_value_t = 1)]
    pub seeds: u64,
    /// Policies to compare; all by default.
    #[arg(long, value_delimiter = ',')]
    pub policy: Vec<SimPolicy>,
    /// How answers' lengths are foreseen: learned, one (one history for all tasks), or true.
    #[arg(long, default_value = "learned")]
    pub lengths: Lengths,
    /// Do not tell the balancer how fast each replica is.
    #[arg(long)]
    pub speeds_untold: bool,
    /// Give policies that count no tokens no limits either, as plain HTTP balancers are.
    #[arg(long)]
    pub blind_baselines: bool,
    /// Draw faults from the seed: deaths, hangs, slowdowns, refusals, lost metrics, reloads, clients that leave.
    #[arg(long)]
    pub faults: bool,
    /// What a second before the first token weighs against a second of decoding.
    #[arg(long)]
    pub ttft_weight: Option<f64>,
    /// Objectives, such as ttft_p99=2s, e2e_p99=60s, tpot_p90=80ms; goodput counts by ttft= and tpot=.
    #[arg(long, value_delimiter = ',')]
    pub slo: Vec<Slo>,
    /// How many replicas the traffic needs under each policy to meet --slo.
    #[arg(long, requires = "slo")]
    pub find_replicas: bool,
    /// Report on the requests of this band alone: 0 is the highest.
    #[arg(long)]
    pub band: Option<u8>,
    /// Play the traffic in real time against this server instead, such as http://127.0.0.1:8080. Answers have their
    /// lengths where simulated replicas give them.
    #[arg(long, value_name = "URL", conflicts_with_all = ["find_replicas", "faults", "plot", "seeds", "policy"])]
    pub live: Option<String>,
    /// With --live: play so many times faster, before replicas that are so many times faster. Times are reported in the
    /// traffic's own seconds.
    #[arg(long, default_value_t = 1.0, requires = "live")]
    pub pace: f64,
    /// With --live: the model to ask for.
    #[arg(long, default_value = "sim")]
    pub model: String,
    /// With --live: a file with the key to send.
    #[arg(long, requires = "live")]
    pub api_key_file: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
    /// Draw distributions and load over time.
    #[arg(long, value_name = "FILE.svg")]
    pub plot: Option<PathBuf>,
}

/// Replicas' speeds as written on the command line.
#[derive(Clone, Debug, PartialEq)]
pub struct Speeds(pub Vec<f64>);

impl FromStr for Speeds {
    type Err = String;

    fn from_str(text: &str) -> Result<Speeds, String> {
        let speeds = match text {
            "equal" => vec![1.0; 4],
            "unequal" => vec![1.0, 1.0, 0.6, 0.3],
            list => list
                .split(',')
                .map(|s| s.trim().parse().ok().filter(|s| *s > 0.0))
                .collect::<Option<Vec<f64>>>()
                .ok_or_else(|| format!("`{text}`: expected equal, unequal, or speeds above 0 such as 1,1,0.6"))?,
        };
        Ok(Speeds(speeds))
    }
}

/// How answers' lengths are foreseen, as written on the command line.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub enum Lengths {
    Learned,
    One,
    True,
}

/// An objective such as `ttft_p99=2s`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Slo {
    metric: Metric,
    quantile: Option<Quantile>,
    limit: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Metric {
    Ttft,
    Tpot,
    E2e,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Quantile {
    Mean,
    P50,
    P90,
    P99,
}

impl FromStr for Slo {
    type Err = String;

    fn from_str(text: &str) -> Result<Slo, String> {
        let fault =
            || format!("`{text}`: expected such as ttft_p99=2s, with ttft, tpot or e2e, and mean, p50, p90 or p99");
        let (name, limit) = text.split_once('=').ok_or_else(fault)?;
        let limit = humantime::parse_duration(limit).map_err(|_| fault())?;
        let (metric, quantile) = name.split_once('_').map_or((name, None), |(m, q)| (m, Some(q)));
        let metric = match metric {
            "ttft" => Metric::Ttft,
            "tpot" => Metric::Tpot,
            "e2e" => Metric::E2e,
            _ => return Err(fault()),
        };
        let quantile = match quantile {
            None => None,
            Some("mean") => Some(Quantile::Mean),
            Some("p50") => Some(Quantile::P50),
            Some("p90") => Some(Quantile::P90),
            Some("p99") => Some(Quantile::P99),
            Some(_) => return Err(fault()),
        };
        Ok(Slo { metric, quantile, limit })
    }
}

impl Slo {
    /// Whether a run keeps it. One without a quantile is each request's objective: 99 in 100 must keep it.
    fn kept(&self, summary: &Summary) -> bool {
        let spread = match self.metric {
            Metric::Ttft => summary.ttft,
            Metric::Tpot => summary.tpot,
            Metric::E2e => summary.e2e,
        };
        let value = match self.quantile {
            Some(Quantile::Mean) => spread.mean,
            Some(Quantile::P50) => spread.p50,
            Some(Quantile::P90) => spread.p90,
            Some(Quantile::P99) | None => spread.p99,
        };
        summary.refused + summary.failed == 0 && value <= self.limit.as_secs_f64()
    }
}

/// What is still running live this long after the last arrival is cut.
const LIVE_DRAIN: Duration = Duration::from_secs(600);
/// A fleet larger than this is not looked for.
const REPLICAS_MAX: usize = 256;

struct Plan {
    args: Args,
    config: Option<Config>,
    fleet: FleetSpec,
    policies: Vec<SimPolicy>,
    objectives: Objectives,
    trace: Option<Vec<SimRequest>>,
}

/// Runs the command.
///
/// # Errors
/// Where an option makes no sense or a file cannot be read.
pub fn run(args: Args) -> anyhow::Result<()> {
    let plan = Plan::new(args)?;
    if plan.args.find_replicas {
        return plan.find_replicas();
    }
    if let Some(url) = &plan.args.live {
        return plan.live(url);
    }
    let started = Instant::now();
    let bar = plan.bar(plan.policies.len() as u64 * plan.args.seeds);
    let mut summaries = Vec::new();
    let mut first_runs = Vec::new();
    let mut violations = Vec::new();
    let mut count = 0;
    for &policy in &plan.policies {
        let mut runs = Vec::new();
        for seed in plan.seeds() {
            bar.set_message(format!("{policy}, seed {seed}"));
            let requests = plan.requests(&plan.fleet, seed);
            count += requests.len();
            let run = fleet::run(&plan.fleet, &requests, &plan.options(policy, seed, &requests));
            violations.extend(run.violations.iter().map(|v| format!("{policy}, seed {seed}: {v}")));
            runs.push(plan.summary(policy, &run));
            if seed == plan.args.seed && plan.args.plot.is_some() {
                first_runs.push((policy, run));
            }
            bar.inc(1);
        }
        summaries.push(Summary::mean_of(&runs));
    }
    bar.finish_and_clear();
    if plan.args.json {
        println!("{:#}", stats::json(&summaries));
    } else {
        println!("{}\n{}", plan.title(), stats::table(&summaries));
        let seconds = started.elapsed().as_secs_f64();
        println!("{count} requests simulated in {seconds:.1} s ({:.0} a second)", count as f64 / seconds);
    }
    if let Some(path) = &plan.args.plot {
        plan.plot(path, &first_runs)?;
    }
    if !violations.is_empty() {
        bail!("what must never be, was:\n{}", violations.join("\n"));
    }
    Ok(())
}

impl Plan {
    fn new(args: Args) -> anyhow::Result<Plan> {
        ensure!(args.load.is_none_or(|l| l > 0.0), "--load must be above 0");
        ensure!(args.flood.is_none_or(|l| l >= 0.0), "--flood must not be below 0");
        ensure!(args.batch_share > 0.0 && args.batch_share <= 1.0, "--batch-share must be above 0 and at most 1");
        ensure!(args.interactive_weight > 0.0, "--interactive-weight must be above 0");
        ensure!(args.pace > 0.0, "--pace must be above 0");
        ensure!(args.seeds > 0, "--seeds must be at least 1");
        ensure!(args.requests != Some(0), "--requests must be at least 1");
        let config = match &args.config {
            Some(path) => match config::load(path) {
                Ok(config) => Some(config),
                Err(errors) => bail!("{errors}"),
            },
            None => None,
        };
        let mut fleet = match &config {
            Some(config) => {
                FleetSpec::of_config(config).context("the configuration lists no replica for its first model")?
            }
            None => FleetSpec::of_speeds(&EngineShape::default(), &args.fleet.0),
        };
        if args.speeds_untold {
            fleet = fleet.untold();
        }
        let policies = if args.policy.is_empty() { SimPolicy::all().collect() } else { args.policy.clone() };
        let mut objectives = Objectives::default();
        for slo in args.slo.iter().filter(|s| s.quantile.is_none()) {
            match slo.metric {
                Metric::Ttft => objectives.ttft = slo.limit.as_secs_f64(),
                Metric::Tpot => objectives.tpot = slo.limit.as_secs_f64(),
                Metric::E2e => bail!("--slo e2e needs a quantile, such as e2e_p99=60s"),
            }
        }
        let trace = match &args.trace {
            Some(path) => Some(read_trace(path, &args, &fleet)?),
            None => None,
        };
        Ok(Plan { args, config, fleet, policies, objectives, trace })
    }

    fn seeds(&self) -> std::ops::Range<u64> {
        self.args.seed..self.args.seed + self.args.seeds
    }

    fn requests(&self, fleet: &FleetSpec, seed: u64) -> Vec<SimRequest> {
        if let Some(trace) = &self.trace {
            return trace.clone();
        }
        let traffic = Traffic {
            mix: self.args.mix,
            requests: self.args.requests.unwrap_or(self.args.mix.usual_requests()),
            seed,
            load: self.args.load.unwrap_or(0.9),
            flood: self.args.flood,
        };
        let mut requests = mix::generate(&traffic, &fleet.reference(), fleet.speeds());
        if self.args.one_band {
            requests.iter_mut().for_each(|request| request.band = Band(0));
        }
        requests
    }

    fn options(&self, policy: SimPolicy, seed: u64, requests: &[SimRequest]) -> RunOptions {
        let mut options = RunOptions::new(policy, seed);
        if let Some(config) = &self.config {
            options.balance = config.balance.clone();
            options.bands = config.bands.clone();
            options.regions = config.regions.clone();
        } else {
            options.bands = two_bands(self.args.batch_share, self.args.interactive_weight);
        }
        if let Some(weight) = self.args.ttft_weight {
            options.balance.ttft_weight = weight;
        }
        options.foresight = match self.args.lengths {
            Lengths::Learned => Foresight::Learned,
            Lengths::One => Foresight::OneHistory,
            Lengths::True => Foresight::True,
        };
        options.blind_baselines = self.args.blind_baselines;
        if self.args.faults {
            let length = Duration::from_secs_f64(requests.last().map_or(0.0, |r| r.at));
            options.faults = FaultScript::drawn(seed, self.fleet.members.len(), length);
        }
        options
    }

    fn summary(&self, policy: SimPolicy, run: &Run) -> Summary {
        if let Some(band) = self.args.band {
            let records: Vec<_> = run.records.iter().filter(|r| r.band == band).copied().collect();
            return Summary::of(policy.name(), &records, self.objectives, &run.busy);
        }
        Summary::of(policy.name(), &run.records, self.objectives, &run.busy)
    }

    fn title(&self) -> String {
        let what = match &self.args.trace {
            Some(path) => format!("trace {}", path.display()),
            None => format!("mix {} at load {}", self.args.mix, self.args.load.unwrap_or(0.9)),
        };
        let speeds: Vec<String> =
            self.fleet.members.iter().map(|m| format!("{:.0}", m.shape.tokens_per_sec())).collect();
        let seeds = if self.args.seeds > 1 { format!(", mean of {} seeds", self.args.seeds) } else { String::new() };
        format!("{what}, replicas of {} tokens/s{seeds}", speeds.join(", "))
    }

    fn bar(&self, length: u64) -> ProgressBar {
        if self.args.json || !std::io::stderr().is_terminal() {
            return ProgressBar::hidden();
        }
        let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {elapsed} {msg}");
        ProgressBar::new(length).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
    }

    fn plot(&self, path: &Path, runs: &[(SimPolicy, Run)]) -> anyhow::Result<()> {
        let curves: Vec<plot::Curve<'_>> =
            runs.iter().map(|(policy, run)| plot::Curve { name: policy.name(), run }).collect();
        plot::draw(path, &self.title(), &curves)
    }

    /// The traffic in real time against a server.
    fn live(&self, url: &str) -> anyhow::Result<()> {
        let api_key = match &self.args.api_key_file {
            Some(file) => {
                let text = std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
                Some(text.trim().to_owned())
            }
            None => None,
        };
        let target = Target {
            base_url: url.trim_end_matches('/').to_owned(),
            model: self.args.model.clone(),
            api_key,
            bands: self.config.iter().flat_map(|c| &c.bands).map(|b| b.name.clone()).collect(),
            drain: LIVE_DRAIN,
        };
        let mut requests = self.requests(&self.fleet, self.args.seed);
        for request in &mut requests {
            request.at /= self.args.pace;
            request.think /= self.args.pace;
        }
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        let played = runtime.block_on(driver::play(&requests, &target, Arc::new(Tally::default())))?;
        let records: Vec<Record> = played.iter().map(|p| p.record.stretched(self.args.pace)).collect();
        let mut taken: BTreeMap<&str, f64> = BTreeMap::new();
        for played in &played {
            if let Some(replica) = &played.replica {
                *taken.entry(replica).or_default() += f64::from(played.record.output);
            }
        }
        // Not engines' busy time, which only they know: the tokens each sent.
        let tokens: Vec<f64> = taken.values().copied().collect();
        let summaries = [Summary::of("live", &records, self.objectives, &tokens)];
        if self.args.json {
            println!("{:#}", stats::json(&summaries));
        } else {
            println!("{}\n{}", self.title(), stats::table(&summaries));
        }
        if let Some(fault) = played.iter().find_map(|p| p.fault.as_deref()) {
            eprintln!("not every request was answered; the first: {fault}");
        }
        Ok(())
    }

    /// The same traffic before more and more replicas: the given fleet's, over and over.
    fn find_replicas(&self) -> anyhow::Result<()> {
        let requests = self.requests(&self.fleet, self.args.seed);
        let bar = self.bar(self.policies.len() as u64);
        let mut rows = Vec::new();
        for &policy in &self.policies {
            bar.set_message(policy.name());
            let found = self.least_fleet(policy, &requests);
            rows.push((policy, found));
            bar.inc(1);
        }
        bar.finish_and_clear();
        if self.args.json {
            let policies: Vec<_> = rows
                .iter()
                .map(|(policy, found)| match found {
                    Some((replicas, summary)) => {
                        let mut row = summary.json();
                        row["replicas"] = json!(replicas);
                        row
                    }
                    None => json!({"name": policy.name(), "replicas": null}),
                })
                .collect();
            println!("{:#}", json!({"policies": policies}));
            return Ok(());
        }
        println!("replicas needed for {}", self.title());
        for (policy, found) in rows {
            match found {
                Some((replicas, s)) => println!(
                    "{:>15}  {replicas:>3}   TTFT p99 {:.2} s, E2E p99 {:.1} s, refused {}",
                    policy.name(),
                    s.ttft.p99,
                    s.e2e.p99,
                    s.refused
                ),
                None => println!("{:>15}  more than {REPLICAS_MAX}", policy.name()),
            }
        }
        Ok(())
    }

    fn least_fleet(&self, policy: SimPolicy, requests: &[SimRequest]) -> Option<(usize, Summary)> {
        let attempt = |replicas: usize| {
            let fleet = self.repeated(replicas);
            let run = fleet::run(&fleet, requests, &self.options(policy, self.args.seed, requests));
            let summary = self.summary(policy, &run);
            self.args.slo.iter().all(|slo| slo.kept(&summary)).then_some((replicas, summary))
        };
        // Doubling finds an enough, halving the least: more replicas never make it worse by much.
        let mut enough = 1;
        let mut best = loop {
            if let Some(found) = attempt(enough) {
                break found;
            }
            enough *= 2;
            if enough > REPLICAS_MAX {
                return None;
            }
        };
        let (mut low, mut high) = (enough / 2, enough);
        while high - low > 1 {
            let middle = (low + high) / 2;
            match attempt(middle) {
                Some(found) => {
                    high = middle;
                    best = found;
                }
                None => low = middle,
            }
        }
        Some(best)
    }

    fn repeated(&self, replicas: usize) -> FleetSpec {
        let members = (0..replicas)
            .map(|i| {
                let member = &self.fleet.members[i % self.fleet.members.len()];
                let mut spec = member.spec.clone();
                spec.id = format!("r{}", i + 1).into();
                Member { spec, shape: member.shape.clone() }
            })
            .collect();
        FleetSpec { model: self.fleet.model.clone(), members }
    }
}

fn read_trace(path: &Path, args: &Args, fleet: &FleetSpec) -> anyhow::Result<Vec<SimRequest>> {
    let file = File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
    let limit = args.requests.unwrap_or(usize::MAX);
    let mut requests =
        trace::read(BufReader::new(file), limit).with_context(|| format!("{} is no trace", path.display()))?;
    if let Some(load) = args.load {
        trace::set_load(&mut requests, load, &fleet.reference(), fleet.speeds());
    }
    Ok(requests)
}
