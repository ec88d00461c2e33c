//! The log: text for people at a terminal, JSON lines elsewhere, written by a thread of its own.

use std::io::IsTerminal;

use tracing_appender::non_blocking::WorkerGuard;
use tracing_subscriber::EnvFilter;

/// How lines look.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    Text,
    Json,
}

/// What is logged unless `WEIGHBRIDGE_LOG` says otherwise.
/// Libraries speak up only when something is wrong.
const DEFAULT_FILTER: &str = "info,pingora_core=warn,pingora_proxy=warn,pingora_load_balancing=warn,tk_encode=warn";

/// Starts logging to standard output. The guard flushes when it is dropped.
pub fn init(format: Option<Format>) -> WorkerGuard {
    let filter = EnvFilter::try_from_env("WEIGHBRIDGE_LOG").unwrap_or_else(|_| EnvFilter::new(DEFAULT_FILTER));
    let terminal = std::io::stdout().is_terminal();
    let (writer, guard) = tracing_appender::non_blocking(std::io::stdout());
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(writer).with_ansi(terminal);
    let result = match format.unwrap_or(if terminal { Format::Text } else { Format::Json }) {
        Format::Text => builder.try_init(),
        Format::Json => builder.json().flatten_event(true).try_init(),
    };
    if let Err(e) = result {
        eprintln!("logging was already started: {e}");
    }
    guard
}
