//! Traces of real traffic: the Azure LLM inference trace's columns, BurstGPT's, and JSON lines.

use std::io::BufRead;

use serde::Deserialize;
use thiserror::Error;

use super::engine::{BLOCK_TOKENS, EngineShape};
use super::mix::{Prefix, SimRequest, work_seconds};
use crate::units::Band;
use crate::weigh::estimate::Task;

/// Why a trace cannot be used.
#[derive(Debug, Error)]
pub enum TraceError {
    #[error("{0}")]
    Io(#[from] std::io::Error),
    #[error("line {line}: {message}")]
    Line { line: u64, message: String },
    #[error(
        "the header `{0}` is of no known trace: expected `TIMESTAMP,ContextTokens,GeneratedTokens` (Azure), \
         `Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type` (BurstGPT), or JSON lines with \
         `at`, `prompt_tokens` and `output_tokens`"
    )]
    UnknownHeader(String),
    #[error("the trace holds no request")]
    Empty,
}

/// One line of a JSON-lines trace.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct JsonLine {
    /// Seconds.
    at: f64,
    prompt_tokens: u32,
    output_tokens: u32,
    max_tokens: Option<u32>,
    task: Option<Task>,
    #[serde(default)]
    band: u8,
    /// Turns of one session share their history.
    session: Option<u64>,
}

/// The longest prompt and answer taken; longer ones are cut, so that a window of 131,072 holds any.
const PROMPT_MAX: u32 = 100_000;
const OUTPUT_MAX: u32 = 16_384;

/// Reads at most `limit` requests, in order of time, the first at zero. Requests without an answer (BurstGPT's
/// failures) are left out.
///
/// # Errors
/// Names the line that cannot be read.
pub fn read(mut input: impl BufRead, limit: usize) -> Result<Vec<SimRequest>, TraceError> {
    let first = input.fill_buf()?.iter().find(|b| !b.is_ascii_whitespace()).copied();
    let mut requests = if first == Some(b'{') { read_json(input, limit)? } else { read_csv(input, limit)? };
    requests.sort_by(|a, b| a.at.total_cmp(&b.at));
    let start = requests.first().ok_or(TraceError::Empty)?.at;
    requests.iter_mut().for_each(|r| r.at -= start);
    link_sessions(&mut requests);
    Ok(requests)
}

fn request(at: f64, prompt: u32, output: u32, number: u64) -> SimRequest {
    SimRequest {
        at,
        after: None,
        think: 0.0,
        prompt: prompt.clamp(1, PROMPT_MAX),
        output: output.clamp(1, OUTPUT_MAX),
        max_tokens: None,
        task: Task::Chat,
        band: Band(0),
        tenant: None,
        session: None,
        prefix: Prefix { own: number | 1 << 63, ..Prefix::default() },
    }
}

fn read_json(input: impl BufRead, limit: usize) -> Result<Vec<SimRequest>, TraceError> {
    let mut requests = Vec::new();
    for (line, text) in (1u64..).zip(input.lines()) {
        let text = text?;
        if text.trim().is_empty() {
            continue;
        }
        let given: JsonLine =
            serde_json::from_str(&text).map_err(|e| TraceError::Line { line, message: e.to_string() })?;
        let mut r = request(given.at, given.prompt_tokens, given.output_tokens, line);
        r.max_tokens = given.max_tokens;
        r.task = given.task.unwrap_or(Task::Chat);
        r.band = Band(given.band);
        r.session = given.session;
        if let Some(session) = given.session {
            r.prefix.own = session;
        }
        requests.push(r);
        if requests.len() == limit {
            break;
        }
    }
    Ok(requests)
}

#[derive(Clone, Copy)]
enum Columns {
    Azure { time: usize, prompt: usize, output: usize },
    Burst { time: usize, prompt: usize, output: usize },
}

fn read_csv(input: impl BufRead, limit: usize) -> Result<Vec<SimRequest>, TraceError> {
    let mut reader = csv::ReaderBuilder::new().trim(csv::Trim::All).flexible(true).from_reader(input);
    let header = reader.headers().map_err(csv_error)?.clone();
    let find = |name: &str| header.iter().position(|h| h.trim_start_matches('\u{feff}').eq_ignore_ascii_case(name));
    let azure = (find("TIMESTAMP"), find("ContextTokens"), find("GeneratedTokens"));
    let burst = (find("Timestamp"), find("Request tokens"), find("Response tokens"));
    let columns = match (azure, burst) {
        ((Some(time), Some(prompt), Some(output)), _) => Columns::Azure { time, prompt, output },
        (_, (Some(time), Some(prompt), Some(output))) => Columns::Burst { time, prompt, output },
        _ => return Err(TraceError::UnknownHeader(header.iter().collect::<Vec<_>>().join(","))),
    };
    let mut requests = Vec::new();
    for row in reader.records() {
        let row = row.map_err(csv_error)?;
        let line = row.position().map_or(0, csv::Position::line);
        let (Columns::Azure { time, prompt, output } | Columns::Burst { time, prompt, output }) = columns;
        let cell = |column: usize| row.get(column).unwrap_or_default();
        let fault = |what: &str, cell: &str| TraceError::Line { line, message: format!("`{cell}` is no {what}") };
        let count = |column: usize| {
            let text = cell(column);
            text.parse::<f64>().ok().filter(|n| *n >= 0.0).ok_or_else(|| fault("count of tokens", text))
        };
        let at = match columns {
            Columns::Azure { .. } => azure_time(cell(time)).ok_or_else(|| fault("time", cell(time)))?,
            Columns::Burst { .. } => cell(time).parse().map_err(|_| fault("time in seconds", cell(time)))?,
        };
        let (prompt, output) = (count(prompt)? as u32, count(output)? as u32);
        if output == 0 {
            continue;
        }
        requests.push(request(at, prompt, output, line));
        if requests.len() == limit {
            break;
        }
    }
    Ok(requests)
}

fn csv_error(error: csv::Error) -> TraceError {
    let line = error.position().map_or(0, csv::Position::line);
    TraceError::Line { line, message: error.to_string() }
}

/// Seconds of a time such as `2023-11-16 18:17:03.9799600`, with or without an offset; or plain seconds.
fn azure_time(text: &str) -> Option<f64> {
    if let Ok(seconds) = text.parse::<f64>() {
        return Some(seconds);
    }
    let text = text.replace('T', " ");
    let bare = text.trim_end_matches('Z');
    let bare = bare.split_once('+').map_or(bare, |(time, _)| time);
    let time = chrono::NaiveDateTime::parse_from_str(bare, "%Y-%m-%d %H:%M:%S%.f").ok()?;
    let time = time.and_utc();
    Some(time.timestamp() as f64 + f64::from(time.timestamp_subsec_nanos()) / 1e9)
}

/// Turns of one session follow each other, and what the earlier one held is what the later one may find cached.
fn link_sessions(requests: &mut [SimRequest]) {
    let mut last = std::collections::HashMap::new();
    for i in 0..requests.len() {
        let Some(session) = requests[i].session else { continue };
        if let Some(before) = last.insert(session, i) {
            let held: u32 = requests[before].prompt + requests[before].output;
            let r = &mut requests[i];
            r.after = Some(before);
            r.prefix.earlier_tokens = held.min(r.prompt) / BLOCK_TOKENS * BLOCK_TOKENS;
        }
    }
}

/// Stretches or squeezes a trace's time until it is this load of a fleet whose speeds add up to `speeds`.
pub fn set_load(requests: &mut [SimRequest], load: f64, shape: &EngineShape, speeds: f64) {
    let length = requests.last().map_or(0.0, |r| r.at);
    let wanted = work_seconds(shape, requests) / (load * speeds);
    if length > 0.0 {
        requests.iter_mut().for_each(|r| r.at *= wanted / length);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_azure_columns_are_read() {
        let text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n\
                    2023-11-16 18:17:04.0319600,3180,8\n";
        let requests = read(text.as_bytes(), usize::MAX).unwrap();
        assert_eq!((requests[0].at, requests[0].prompt, requests[0].output), (0.0, 4_808, 10));
        assert!((requests[1].at - 0.052).abs() < 1e-6);
        // The 2024 trace writes an offset.
        let text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,2162,5\n";
        assert_eq!(read(text.as_bytes(), usize::MAX).unwrap()[0].prompt, 2_162);
    }

    #[test]
    fn burstgpts_columns_are_read_and_its_failures_left_out() {
        let text = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n\
                    5,ChatGPT,472,18,490,Conversation log\n45,ChatGPT,1087,0,1087,Conversation log\n\
                    118,GPT-4,417,276,693,Conversation log\n";
        let requests = read(text.as_bytes(), usize::MAX).unwrap();
        assert_eq!(requests.len(), 2);
        assert_eq!((requests[1].at, requests[1].prompt, requests[1].output), (113.0, 417, 276));
    }

    #[test]
    fn json_lines_are_read_and_sessions_linked() {
        let text = "{\"at\":1,\"prompt_tokens\":100,\"output_tokens\":50,\"session\":7}\n\n\
                    {\"at\":9.5,\"prompt_tokens\":200,\"output_tokens\":5,\"session\":7,\"task\":\"code\"}\n";
        let requests = read(text.as_bytes(), usize::MAX).unwrap();
        assert_eq!(requests[1].after, Some(0));
        assert_eq!((requests[1].at, requests[1].task), (8.5, Task::Code));
        assert_eq!(requests[1].prefix.earlier_tokens, 144);
    }

    #[test]
    fn a_fault_names_its_line() {
        let text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,12,1\nnever,1,1\n";
        let error = read(text.as_bytes(), usize::MAX).unwrap_err().to_string();
        assert!(error.contains("line 3") && error.contains("never"), "{error}");
        assert!(read("a,b\n1,2\n".as_bytes(), 9).unwrap_err().to_string().contains("`a,b`"));
        assert!(read("{\"at\":1}\n".as_bytes(), 9).unwrap_err().to_string().contains("prompt_tokens"));
        assert!(matches!(read("".as_bytes(), 9), Err(TraceError::UnknownHeader(_) | TraceError::Empty)));
    }

    #[test]
    fn a_trace_is_stretched_to_the_load_asked_for() {
        let text = "TIMESTAMP,ContextTokens,GeneratedTokens\n0,500,300\n1,800,100\n2,100,900\n";
        let mut requests = read(text.as_bytes(), usize::MAX).unwrap();
        let shape = EngineShape::default();
        set_load(&mut requests, 0.5, &shape, 4.0);
        let load = work_seconds(&shape, &requests) / 4.0 / requests[2].at;
        assert!((load - 0.5).abs() < 1e-9);
    }
}
