//! `weighbridge check CONFIG`: whether a configuration is right, what it comes to, what a reload would change.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use comfy_table::Table;
use serde_json::{Value, json};

use crate::balance::Coefficients;
use crate::config::{self, Config};
use crate::units::SystemClock;
use crate::weigh::{TokenizerState, Weigher};

/// A tokenizer from a hub is downloaded first, some hundred megabytes at the worst.
const TOKENIZER_TIMEOUT: Duration = Duration::from_secs(300);

/// A running balancer on the same machine or network answers within this.
const ADMIN_TIMEOUT: Duration = Duration::from_secs(10);

/// Validates a configuration: exit 0, or 1 with every fault.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The configuration file.
    pub config: PathBuf,
    /// Print what a reload of the balancer with this admin address would change.
    #[arg(long, value_name = "ADMIN_URL")]
    pub against: Option<String>,
    /// A file with the admin API's token, where it has one.
    #[arg(long, value_name = "FILE", requires = "against")]
    pub token_file: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

/// Runs the command: what is right goes to standard output, faults to standard error (with `--json`, both to
/// standard output).
///
/// # Errors
/// The running balancer could not be asked.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let config = match config::load(&args.config) {
        Ok(config) => config,
        Err(errors) => {
            report(args, &errors.0);
            return Ok(ExitCode::FAILURE);
        }
    };
    let faults = tokenizer_faults(args, &config);
    if !faults.is_empty() {
        report(args, &faults);
        return Ok(ExitCode::FAILURE);
    }
    match &args.against {
        Some(url) => against(args, &config, url)?,
        None if args.json => {
            println!(
                "{:#}",
                json!({"ok": true, "config": config::digest(&config), "coefficients": coefficients(&config)})
            );
        }
        None => print!("{}", summary(&config)),
    }
    Ok(ExitCode::SUCCESS)
}

fn report(args: &Args, errors: &[config::ConfigError]) {
    if args.json {
        let errors: Vec<Value> = errors
            .iter()
            .map(|e| {
                json!({"file": e.file, "line": e.line, "path": e.path, "problem": e.problem, "allowed": e.allowed,
                       "message": e.to_string()})
            })
            .collect();
        println!("{:#}", json!({"ok": false, "errors": errors}));
        return;
    }
    for error in errors {
        eprintln!("{error}");
    }
    let n = errors.len();
    eprintln!("{n} {}", if n == 1 { "fault" } else { "faults" });
}

/// Loads every tokenizer and template as `serve` would. `replica` and `approximate` have nothing to load.
fn tokenizer_faults(args: &Args, config: &Config) -> Vec<config::ConfigError> {
    let weigher = Weigher::new(config, Arc::default(), None, Arc::new(SystemClock::new()));
    let begun = Instant::now();
    while !weigher.ready() && begun.elapsed() < TOKENIZER_TIMEOUT {
        std::thread::sleep(Duration::from_millis(20));
    }
    let states = weigher.tokenizers();
    let mut faults = Vec::new();
    for (i, model) in config.models.iter().enumerate() {
        let mut fault = |key: &str, problem: String| faults.push(config::model_fault(&args.config, i, key, problem));
        match states.iter().find(|(name, _)| *name == model.name).map(|(_, state)| state) {
            Some(TokenizerState::Failed(why)) => fault("tokenizer", format!("`{}` does not load: {why}", model.name)),
            Some(TokenizerState::Loading) => fault("tokenizer", format!("`{}` is not loaded in time", model.name)),
            _ => {}
        }
        let template = weigher.loaded(&model.name).and_then(|(_, loaded)| loaded.template_error.clone());
        if let Some(why) = template.filter(|_| model.chat_template.is_some()) {
            fault("chat_template", why);
        }
    }
    faults
}

fn against(args: &Args, config: &Config, url: &str) -> anyhow::Result<()> {
    let token = match &args.token_file {
        Some(file) => Some(std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?),
        None => None,
    };
    let running = running_digest(url, token.as_deref().map(str::trim))?;
    let changes = config::diff(&running, &config::digest(config));
    if args.json {
        let changes: Vec<Value> = changes.iter().map(|c| json!({"path": c.path, "old": c.old, "new": c.new})).collect();
        println!("{:#}", json!({"ok": true, "changes": changes}));
    } else if changes.is_empty() {
        println!("A reload would change nothing. (Keys, certificates and tokenizers are read again all the same.)");
    } else {
        for change in changes {
            println!("{change}");
        }
    }
    Ok(())
}

fn running_digest(url: &str, token: Option<&str>) -> anyhow::Result<Value> {
    let url = format!("{}/admin/config", url.trim_end_matches('/'));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let client = reqwest::Client::builder().timeout(ADMIN_TIMEOUT).build()?;
        let mut request = client.get(&url);
        if let Some(token) = token {
            request = request.bearer_auth(token);
        }
        let answer = request.send().await.with_context(|| format!("cannot reach {url}"))?;
        if !answer.status().is_success() {
            bail!("{url} answered {}", answer.status());
        }
        answer.json().await.with_context(|| format!("{url} answered no JSON"))
    })
}

/// What a configuration comes to, as tables.
fn summary(config: &Config) -> String {
    let or = |v: Option<String>, d: &str| v.unwrap_or_else(|| d.to_owned());
    let mut models = table(&["model", "also called", "tokenizer", "replicas"]);
    for model in &config.models {
        let also = [model.aliases.as_slice(), model.adapters.as_slice()].concat().join(", ");
        let replicas = config.replicas.iter().filter(|r| r.models.contains(&model.name)).count();
        models.add_row([model.name.to_string(), also, model.tokenizer.to_string(), replicas.to_string()]);
    }
    let mut replicas = table(&["replica", "url", "models", "tokens/s", "window", "capacity", "sequences", "region"]);
    for r in &config.replicas {
        replicas.add_row([
            r.id.to_string(),
            r.url.to_string(),
            r.models.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
            r.tokens_per_sec.to_string(),
            or(r.max_context_tokens.map(|t| t.to_string()), "from the engine"),
            or(r.token_capacity.map(|t| t.to_string()), "from the engine"),
            r.max_sequences.to_string(),
            or(r.region.clone(), ""),
        ]);
    }
    let mut speeds = table(&["replica", "a µs/token", "base ms/step", "b ms/sequence", "c ns/context token"]);
    for r in &config.replicas {
        let c = Coefficients::prior(r);
        speeds.add_row([
            r.id.to_string(),
            format!("{:.1}", c.per_prompt * 1e6),
            format!("{:.2}", c.base * 1e3),
            format!("{:.4}", c.per_sequence * 1e3),
            format!("{:.2}", c.per_context * 1e9),
        ]);
    }
    let mut bands = table(&["band", "share", "weight", "queue", "wait", "aging", "default"]);
    for b in &config.bands {
        bands.add_row([
            b.name.clone(),
            format!("{}%", b.share * 100.0),
            b.weight.to_string(),
            b.queue.requests.to_string(),
            humantime::format_duration(b.queue.wait).to_string(),
            humantime::format_duration(b.aging).to_string(),
            (if b.default { "yes" } else { "" }).to_owned(),
        ]);
    }
    let mut text = format!("{models}\n\n{replicas}\n");
    if config.replicas.is_empty() {
        text.push_str("(discovered)\n");
    } else {
        text.push_str(&format!("\nWhere the score starts, until it has learned:\n{speeds}\n"));
    }
    text.push_str(&format!("\n{bands}\n"));
    if config.tenants.is_empty() {
        text.push_str("\nNo tenants: open to whoever reaches the listeners.\n");
    } else {
        let mut tenants = table(&["tenant", "models", "bands", "tokens/min", "requests/min", "concurrent"]);
        for t in &config.tenants {
            let models = t.models.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
            let bands: Vec<&str> =
                t.bands.iter().filter_map(|b| config.bands.get(usize::from(b.0))).map(|b| b.name.as_str()).collect();
            tenants.add_row([
                t.name.to_string(),
                if models.is_empty() { "all".to_owned() } else { models },
                if bands.is_empty() { "the default".to_owned() } else { bands.join(", ") },
                or(t.tokens_per_minute.map(|v| v.to_string()), "no limit"),
                or(t.requests_per_minute.map(|v| v.to_string()), "no limit"),
                or(t.concurrent.map(|v| v.to_string()), "no limit"),
            ]);
        }
        text.push_str(&format!("\n{tenants}\n"));
    }
    text
}

/// The coefficients each replica's score starts with, in seconds.
fn coefficients(config: &Config) -> Value {
    let of = |r: &config::ReplicaSpec| {
        let c = Coefficients::prior(r);
        json!({"a": c.per_prompt, "base": c.base, "b": c.per_sequence, "c": c.per_context})
    };
    config.replicas.iter().map(|r| (r.id.to_string(), of(r))).collect::<serde_json::Map<_, _>>().into()
}

fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_preset(comfy_table::presets::UTF8_HORIZONTAL_ONLY).set_header(header);
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    const TEXT: &str = "\
listen: [{address: 127.0.0.1:8080}]
models: [{name: m, tokenizer: approximate, aliases: [gpt]}]
replicas: [{id: gpu-3, url: 'http://10.0.0.3:8000', model: m, tokens_per_sec: 4500}]
";

    fn config(text: &str) -> Config {
        config::parse(text, Path::new("")).unwrap()
    }

    #[test]
    fn the_summary_names_models_replicas_bands_and_where_the_score_starts() {
        let text = summary(&config(TEXT));
        for part in
            ["gpt", "gpu-3", "http://10.0.0.3:8000", "from the engine", "27.8", "17.07", "default", "No tenants"]
        {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
        let a = coefficients(&config(TEXT))["gpu-3"]["a"].as_f64().unwrap();
        assert!((a - 1.0 / 36_000.0).abs() < 1e-9, "an eighth of a decode token's time: {a}");
    }

    #[test]
    fn a_tokenizer_or_template_that_does_not_load_is_a_fault_on_its_line() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("tok")).unwrap();
        std::fs::write(dir.path().join("tok/tokenizer.json"), "{}").unwrap();
        std::fs::write(dir.path().join("t.jinja"), "{% if %}").unwrap();
        let path = dir.path().join("c.yaml");
        let text = TEXT
            .replace("tokenizer: approximate,", "tokenizer: tok,")
            .replace("[{name", "[{name: n, tokenizer: approximate, chat_template: t.jinja},\n  {name");
        std::fs::write(&path, &text).unwrap();
        let config = config::load(&path).unwrap();
        let args = Args { config: path, against: None, token_file: None, json: false };
        let faults = tokenizer_faults(&args, &config);
        let places: Vec<(Option<usize>, &str)> = faults.iter().map(|f| (f.line, f.path.as_str())).collect();
        assert_eq!(places, [(Some(2), "models[0].chat_template"), (Some(3), "models[1].tokenizer")], "{faults:#?}");
    }

    #[test]
    fn a_running_balancer_is_asked_with_its_token_and_compared() {
        use axum::http::{HeaderMap, StatusCode};
        let running = config::digest(&config(&TEXT.replace("4500", "4000")));
        let server = tokio::runtime::Runtime::new().unwrap();
        let listener = server.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
        let url = format!("http://{}/", listener.local_addr().unwrap());
        let answer = move |headers: HeaderMap| async move {
            match headers.get("authorization").map(|v| v.as_bytes() == b"Bearer t") {
                Some(true) => Ok(axum::Json(running)),
                _ => Err(StatusCode::UNAUTHORIZED),
            }
        };
        let app = axum::Router::new().route("/admin/config", axum::routing::get(answer));
        server.spawn(async move { axum::serve(listener, app).await });
        assert!(running_digest(&url, None).unwrap_err().to_string().contains("401"));
        let running = running_digest(&url, Some("t")).unwrap();
        let changes = config::diff(&running, &config::digest(&config(TEXT)));
        let shown: Vec<String> = changes.iter().map(ToString::to_string).collect();
        assert_eq!(shown, ["~ replicas.gpu-3.tokens_per_sec: 4000.0 -> 4500.0"]);
        assert!(running_digest("http://127.0.0.1:9", None).is_err());
    }
}
