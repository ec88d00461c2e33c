//! `weighbridge sim-replica`: one simulated replica as a server.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, ensure};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

use crate::sim::engine::{BLOCK_TOKENS, EngineShape};
use crate::sim::replica::{Faults, Flavour, Lengths, ReplicaOptions, SimReplica};

/// Serves one simulated replica: a model server's answers on the wire, with an engine's timing behind them.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Address to listen on; port 0 takes a free one, which is printed.
    #[arg(long)]
    pub listen: SocketAddr,
    /// Model served; may be given several times, or as a list with commas.
    #[arg(long = "model", value_delimiter = ',', default_value = "sim")]
    pub models: Vec<String>,
    /// A name for the log.
    #[arg(long, default_value = "sim")]
    pub id: String,
    /// Whose answers and metrics to give.
    #[arg(long, value_enum, default_value = "vllm")]
    pub engine: Flavour,
    /// How fast the default engine is: 1 decodes about 900 tokens/s in all.
    #[arg(long, default_value_t = 1.0, conflicts_with = "tokens_per_sec")]
    pub speed: f64,
    /// Total decode rate at half of --max-sequences, in place of --speed.
    #[arg(long)]
    pub tokens_per_sec: Option<f64>,
    /// Sequences in one step.
    #[arg(long, default_value_t = 48)]
    pub max_sequences: u32,
    /// KV memory in tokens.
    #[arg(long, default_value_t = 256_000)]
    pub kv_tokens: u32,
    /// The window of one request, prompt and answer together.
    #[arg(long, default_value_t = 131_072)]
    pub max_model_len: u32,
    /// Schedule by the request's priority, lower first.
    #[arg(long)]
    pub priority_scheduling: bool,
    /// Forget prompts once they are answered.
    #[arg(long)]
    pub no_prefix_cache: bool,
    /// Leave cached prompt tokens out of usage, as vLLM does by default.
    #[arg(long)]
    pub no_cached_tokens: bool,
    /// Refuse with 503 when this many sequences run and wait; 0 never refuses.
    #[arg(long, default_value_t = 0)]
    pub max_queued: usize,
    /// Median length of answers that no one gave a length to, in tokens.
    #[arg(long, default_value_t = 200.0)]
    pub output_median: f64,
    /// Spread of those lengths: the σ of their logarithm.
    #[arg(long, default_value_t = 0.6)]
    pub output_sigma: f64,
    /// Seeds the answers' lengths and words.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// A file with the key that requests must carry as bearer token.
    #[arg(long)]
    pub api_key_file: Option<PathBuf>,
    /// Faults, such as hang, slow=3, status=503, die-after=10; changed later by POST /sim/fault.
    #[arg(long, default_value = "none")]
    pub fail: Faults,
    /// Stop after so many seconds.
    #[arg(long)]
    pub exit_after: Option<f64>,
}

impl Args {
    fn options(&self) -> anyhow::Result<ReplicaOptions> {
        ensure!(self.speed > 0.0, "--speed must be above 0");
        ensure!(self.max_sequences > 0, "--max-sequences must be at least 1");
        ensure!(self.kv_tokens >= BLOCK_TOKENS, "--kv-tokens must be at least {BLOCK_TOKENS}");
        ensure!(self.max_model_len >= 2, "--max-model-len must be at least 2");
        let shape = match self.tokens_per_sec {
            Some(rate) => {
                ensure!(rate > 0.0, "--tokens-per-sec must be above 0");
                EngineShape::from_rate(rate, self.max_sequences)
            }
            None => EngineShape { speed: self.speed, ..EngineShape::default() },
        };
        let api_key = match &self.api_key_file {
            Some(file) => {
                let text = std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
                Some(text.trim().to_owned())
            }
            None => None,
        };
        Ok(ReplicaOptions {
            models: self.models.clone(),
            flavour: self.engine,
            shape: EngineShape {
                max_sequences: self.max_sequences,
                kv_blocks: self.kv_tokens / BLOCK_TOKENS,
                max_model_len: self.max_model_len,
                priority: self.priority_scheduling,
                prefix_cache: !self.no_prefix_cache,
                ..shape
            },
            lengths: Lengths { median: self.output_median.max(1.0), sigma: self.output_sigma.max(0.0) },
            seed: self.seed,
            faults: self.fail.clone(),
            api_key,
            max_queued: self.max_queued,
            cached_details: !self.no_cached_tokens,
        })
    }
}

/// Runs the command until it is interrupted or its time is over.
///
/// # Errors
/// Where an option makes no sense or the address cannot be bound.
pub fn run(args: Args) -> anyhow::Result<()> {
    let options = args.options()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async move {
        let listener =
            TcpListener::bind(args.listen).await.with_context(|| format!("cannot listen on {}", args.listen))?;
        let address = listener.local_addr()?;
        println!(
            "{} listening on http://{address} model {} at {:.0} tokens/s",
            args.id,
            options.models.join(","),
            options.shape.tokens_per_sec()
        );
        let limit = args.exit_after.map(|s| Duration::try_from_secs_f64(s).unwrap_or(Duration::MAX));
        let stop = async move {
            match limit {
                Some(limit) => tokio::time::sleep(limit).await,
                None => futures::future::pending().await,
            }
        };
        let interrupted = async {
            let mut terminate = signal(SignalKind::terminate())?;
            tokio::select! {
                result = tokio::signal::ctrl_c() => result,
                _ = terminate.recv() => Ok(()),
            }
        };
        tokio::select! {
            result = SimReplica::new(options).serve(listener, stop) => result?,
            result = interrupted => result?,
        }
        anyhow::Ok(())
    })
}
