//! The log: text for people at a terminal, JSON lines elsewhere, written by a thread of its own.

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;

use crate::observe::lines::{Flush, Lines};

/// How lines look.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    Text,
    Json,
}

/// What is logged unless `WEIGHBRIDGE_LOG` says otherwise.
/// Libraries speak up only when something is wrong.
const DEFAULT_FILTER: &str = "info,pingora_core=warn,pingora_proxy=warn,pingora_load_balancing=warn,tk_encode=warn";

/// Starts logging to standard output. What is still held is written when the guard is dropped.
///
/// # Errors
/// A thread that cannot be started.
pub fn init(format: Option<Format>) -> std::io::Result<Flush> {
    let filter = EnvFilter::try_from_env("WEIGHBRIDGE_LOG").unwrap_or_else(|_| EnvFilter::new(DEFAULT_FILTER));
    let terminal = std::io::stdout().is_terminal();
    let (lines, flush) = Lines::start(std::io::stdout())?;
    let format = format.unwrap_or(if terminal { Format::Text } else { Format::Json });
    lines.is_the_process_s(format == Format::Json);
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(lines.clone()).with_ansi(terminal);
    let result = match format {
        Format::Text => builder.try_init(),
        Format::Json => builder.json().flatten_event(true).try_init(),
    };
    if let Err(e) = result {
        eprintln!("logging was already started: {e}");
    }
    Ok(flush)
}
