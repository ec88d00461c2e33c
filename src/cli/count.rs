//! `weighbridge count`: what a request body weighs, where each figure came from, and what it took to find out.

use std::io::{BufReader, Read};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use comfy_table::{CellAlignment, Table};
use serde_json::{Value, json};

use crate::config::{self, Config, Engine, Model};
use crate::units::{ModelName, SystemClock};
use crate::weigh::count::tokenizer::SegmentCost;
use crate::weigh::estimate::learn;
use crate::weigh::{CountSource, Histories, TokenizerState, WeighHints, Weigher, Weight};
use crate::wire::endpoint::{Route, route};
use crate::wire::{Endpoint, ParseLimits, Request};

/// A tokenizer from a hub is downloaded first.
const TOKENIZER_TIMEOUT: Duration = Duration::from_secs(300);
/// Segments that are printed; the longest prompts have thousands.
const SEGMENTS_SHOWN: usize = 60;
/// Characters of a segment that are printed.
const EXCERPT_CHARS: usize = 48;

/// Weighs a request body: prompt tokens, what each segment costs, the output estimate with its source, time spent.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The configuration file.
    #[arg(long, value_name = "CONFIG")]
    pub config: PathBuf,
    /// The request body; - or nothing reads standard input.
    #[arg(value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// The path the body would be posted to. Default: by its members (messages, prompt, documents, input).
    #[arg(long, value_name = "PATH")]
    pub path: Option<String>,
    /// Weigh as this model, whatever the body names. With --learn, the model whose histories learn.
    #[arg(long, value_name = "NAME")]
    pub model: Option<String>,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
    /// Learn answer lengths from a trace (CSV of Azure or BurstGPT, JSON lines, an access log) into the model's
    /// history file, instead of weighing.
    #[arg(long, value_name = "TRACE", requires = "model")]
    pub learn: Option<PathBuf>,
}

/// Runs the command.
///
/// # Errors
/// A configuration, a file or a body that cannot be read; a model that is not configured.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let config = config::load(&args.config).map_err(|errors| anyhow::anyhow!("{errors}"))?;
    match &args.learn {
        Some(trace) => learn_from(args, &config, trace),
        None => weigh(args, &config),
    }
}

fn named<'c>(config: &'c Config, name: &str) -> anyhow::Result<&'c Model> {
    let known = |model: &&Model| {
        model.name.as_str() == name || model.aliases.iter().chain(&model.adapters).any(|other| other == name)
    };
    config.models.iter().find(known).with_context(|| {
        let names: Vec<&str> = config.models.iter().map(|model| model.name.as_str()).collect();
        format!("no model is called {name:?}; the configuration has {}", names.join(", "))
    })
}

fn learn_from(args: &Args, config: &Config, trace: &PathBuf) -> anyhow::Result<()> {
    let model = named(config, args.model.as_deref().unwrap_or_default())?;
    let Some(path) = &model.output.history else {
        bail!("model {} has no history file; set output.history in the configuration", model.name);
    };
    let histories = Histories::default();
    let one = std::slice::from_ref(model);
    histories.load(one);
    let file = std::fs::File::open(trace).with_context(|| trace.display().to_string())?;
    let learned = learn::learn(&histories, &model.name, BufReader::new(file)).map_err(anyhow::Error::msg)?;
    histories.save(one).map_err(anyhow::Error::msg)?;
    if args.json {
        println!("{}", json!({"answers": learned.answers, "skipped": learned.skipped, "history": path}));
    } else {
        println!("learned {} answers, skipped {} lines; {}", learned.answers, learned.skipped, path.display());
    }
    Ok(())
}

fn read_body(args: &Args) -> anyhow::Result<Vec<u8>> {
    let mut body = Vec::new();
    match args.file.as_deref() {
        Some(file) if file.as_os_str() != "-" => {
            body = std::fs::read(file).with_context(|| file.display().to_string())?;
        }
        _ => {
            std::io::stdin().lock().read_to_end(&mut body).context("standard input")?;
        }
    }
    Ok(body)
}

/// The endpoint named, or the one whose members the body has.
fn endpoint(args: &Args, body: &[u8]) -> anyhow::Result<Endpoint> {
    if let Some(path) = &args.path {
        return match route(&http::Method::POST, path) {
            Route::Inference(endpoint) => Ok(endpoint),
            _ => bail!("{path} is no inference path"),
        };
    }
    let value: Value = serde_json::from_slice(body).context("the body is no JSON")?;
    let has = |name: &str| !value[name].is_null();
    Ok(match () {
        () if has("messages") => Endpoint::ChatCompletions,
        () if has("prompt") => Endpoint::Completions,
        () if has("documents") => Endpoint::Rerank,
        () => Endpoint::Responses,
    })
}

fn weigh(args: &Args, config: &Config) -> anyhow::Result<()> {
    let body = read_body(args)?;
    let endpoint = endpoint(args, &body)?;
    let request = Request::parse(endpoint, body.into(), &ParseLimits { json_depth: config.limits.json_depth })
        .map_err(|error| anyhow::anyhow!("{error}"))?;
    let name = args.model.clone().or_else(|| request.model.clone());
    let model = match &name {
        Some(name) => named(config, name)?,
        None => config.models.first().context("the configuration has no model")?,
    };
    let histories = Arc::new(Histories::default());
    histories.load(std::slice::from_ref(model));
    let only = Config { models: vec![model.clone()], ..config.clone() };
    let weigher = Weigher::new(&only, histories, None, Arc::new(SystemClock::new()));
    let begun = Instant::now();
    while !weigher.ready() && begun.elapsed() < TOKENIZER_TIMEOUT {
        std::thread::sleep(Duration::from_millis(5));
    }
    let loading = begun.elapsed();
    let replicas = || config.replicas.iter().filter(|replica| replica.models.contains(&model.name));
    let hints = WeighHints {
        window: replicas().filter_map(|replica| replica.max_context_tokens).max(),
        engine: replicas().map(|replica| replica.engine).next().unwrap_or(Engine::Auto),
        ..WeighHints::default()
    };
    let cold = weigher.weigh_here(&model.name, &request, &hints).map_err(|error| anyhow::anyhow!("{error}"))?;
    let warm = weigher.weigh_here(&model.name, &request, &hints).map_err(|error| anyhow::anyhow!("{error}"))?;
    let text = weigher.rendered(&model.name, &request, &hints);
    let tokenizer = weigher.loaded(&model.name).and_then(|(_, loaded)| loaded.tokenizer().cloned());
    let costs = match (&tokenizer, &text) {
        (Some(tokenizer), Some(text)) => tokenizer.costs(text),
        _ => Vec::new(),
    };
    let state = weigher.tokenizers().into_iter().next().map(|(_, state)| state);
    let report = Report { model: &model.name, state, weight: &cold, warm: warm.spent, loading, costs: &costs };
    if args.json {
        report.json()
    } else {
        report.table()
    }
    Ok(())
}

struct Report<'a> {
    model: &'a ModelName,
    state: Option<TokenizerState>,
    weight: &'a Weight,
    warm: Duration,
    loading: Duration,
    costs: &'a [SegmentCost<'a>],
}

impl Report<'_> {
    fn json(&self) {
        let w = self.weight;
        let confidence = (f64::from(w.output.confidence) * 100.0).round() / 100.0;
        let segments: Vec<Value> = self
            .costs
            .iter()
            .map(|cost| {
                json!({"tokens": cost.tokens, "bytes": cost.text.len(), "special": cost.special, "text": excerpt(cost.text)})
            })
            .collect();
        let report = json!({
            "model": self.model,
            "tokenizer": match &self.state {
                Some(TokenizerState::Failed(reason)) => json!({"failed": reason}),
                Some(TokenizerState::Loading) => json!("loading"),
                _ => json!("ready"),
            },
            "prompt": {"tokens": w.prompt.tokens, "prompts": w.prompt.prompts, "longest": w.prompt.longest,
                       "source": w.prompt.source.label(), "exact": w.prompt.exact()},
            "output": {"mean": w.output.mean, "p50": w.output.p50, "p90": w.output.p90,
                       "source": w.output.source, "confidence": confidence, "task": w.history.task},
            "sequences": w.sequences,
            "prefix_blocks": w.prefix.len(),
            "prefix_block_tokens": w.prefix_block_tokens,
            "segments": segments,
            "micros": {"cold": w.spent.as_micros() as u64, "warm": self.warm.as_micros() as u64,
                       "loading": self.loading.as_micros() as u64},
        });
        println!("{report:#}");
    }

    fn table(&self) {
        let w = self.weight;
        if let Some(TokenizerState::Failed(reason)) = &self.state {
            println!("tokenizer   failed: {reason}");
        }
        println!("model       {}", self.model);
        let how = match w.prompt.source {
            CountSource::Tokenizer => "exact, by the model's tokenizer",
            CountSource::TokenIds => "exact, given as token ids",
            CountSource::Replica => "exact, counted by the engine",
            CountSource::Approximate => "an estimate: no tokenizer or template, or media parts",
        };
        let several = match w.prompt.prompts {
            0 | 1 => String::new(),
            n => format!(", in {n} prompts of which the longest has {}", w.prompt.longest),
        };
        println!("prompt      {} tokens ({how}){several}", w.prompt.tokens);
        let times = if w.sequences > 1 { format!(", times {} sequences", w.sequences) } else { String::new() };
        println!(
            "output      {:.0} tokens expected, half of them under {}, {} booked{times}",
            w.output.mean, w.output.p50, w.output.p90
        );
        println!(
            "            source: {}, confidence {:.1}, task {}",
            w.output.source.label(),
            w.output.confidence,
            w.history.task.label()
        );
        println!(
            "spent       {} µs, {} µs once its segments are known; the tokenizer took {} ms to load",
            w.spent.as_micros(),
            self.warm.as_micros(),
            self.loading.as_millis()
        );
        if self.costs.is_empty() {
            return;
        }
        let mut table = Table::new();
        table.load_preset(comfy_table::presets::NOTHING);
        table.set_header(["tokens", "bytes", "segment"]);
        for cost in self.costs.iter().take(SEGMENTS_SHOWN) {
            table.add_row([cost.tokens.to_string(), cost.text.len().to_string(), excerpt(cost.text)]);
        }
        for column in table.column_iter_mut().take(2) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        println!("\n{table}");
        if self.costs.len() > SEGMENTS_SHOWN {
            println!("… and {} segments more", self.costs.len() - SEGMENTS_SHOWN);
        }
    }
}

/// A segment's beginning, on one line.
fn excerpt(text: &str) -> String {
    let mut chars = text.chars();
    let head: String = chars.by_ref().take(EXCERPT_CHARS).flat_map(char::escape_debug).collect();
    if chars.next().is_some() { format!("{head}…") } else { head }
}
