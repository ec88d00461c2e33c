//! Seeding histories from a trace of requests: published ones (Azure's CSV, BurstGPT), JSON lines, and this
//! balancer's own access log.

use std::io::BufRead;

use serde_json::Value as Json;

use super::{Histories, HistoryKey, Task};
use crate::units::{ModelName, TenantName};

/// What a trace taught.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Learned {
    pub answers: u64,
    /// Lines without a usable length: errors, refusals, headers in the middle.
    pub skipped: u64,
}

/// Names of the column or member that holds the output tokens, best first.
const OUTPUT: [&str; 7] = [
    "generatedtokens",
    "response tokens",
    "output_tokens",
    "output_length",
    "completion_tokens",
    "decode_tokens",
    "output",
];
const TASK: [&str; 2] = ["task", "task_type"];
const TENANT: [&str; 1] = ["tenant"];
const MODEL: [&str; 1] = ["model"];

/// Learns a trace for one model. Lines of an access log that name another model, or a request that did not complete,
/// are skipped; a line without a task is chat.
///
/// # Errors
/// What could not be read, or a file without any column of output tokens.
pub fn learn(histories: &Histories, model: &ModelName, trace: impl BufRead) -> Result<Learned, String> {
    let mut lines = trace.lines();
    let first = match lines.next() {
        Some(line) => line.map_err(|e| e.to_string())?,
        None => return Ok(Learned::default()),
    };
    let mut learned = Learned::default();
    let columns = if first.trim_start().starts_with('{') { None } else { Some(header(&first)?) };
    let again = columns.is_none().then_some(Ok(first));
    for line in again.into_iter().chain(lines) {
        let line = line.map_err(|e| e.to_string())?;
        if line.trim().is_empty() {
            continue;
        }
        let answer = match &columns {
            None => of_json(&line, model),
            Some(columns) => columns.of_csv(&line),
        };
        match answer {
            Some((key, tokens)) => {
                histories.observe(&HistoryKey { model: model.clone(), ..key }, tokens);
                learned.answers += 1;
            }
            None => learned.skipped += 1,
        }
    }
    Ok(learned)
}

struct Columns {
    output: usize,
    task: Option<usize>,
    tenant: Option<usize>,
}

fn header(line: &str) -> Result<Columns, String> {
    let names: Vec<String> = fields(line).iter().map(|name| name.trim().to_lowercase()).collect();
    let place = |known: &[&str]| known.iter().find_map(|name| names.iter().position(|column| column == name));
    let output = place(&OUTPUT).ok_or_else(|| {
        format!("no column of output tokens; one of {} is expected, found {names:?}", OUTPUT.join(", "))
    })?;
    Ok(Columns { output, task: place(&TASK), tenant: place(&TENANT) })
}

fn fields(line: &str) -> Vec<String> {
    let mut reader = csv::ReaderBuilder::new().has_headers(false).flexible(true).from_reader(line.as_bytes());
    let record = reader.records().next().and_then(Result::ok).unwrap_or_default();
    record.iter().map(str::to_owned).collect()
}

fn key(task: Option<&str>, tenant: Option<&str>) -> HistoryKey {
    HistoryKey {
        tenant: tenant.filter(|name| !name.is_empty()).map(TenantName::from),
        model: ModelName::from(""),
        task: task.and_then(Task::from_hint).unwrap_or(Task::Chat),
    }
}

impl Columns {
    fn of_csv(&self, line: &str) -> Option<(HistoryKey, u64)> {
        let fields = fields(line);
        let tokens = fields.get(self.output)?.trim().parse::<f64>().ok()?;
        // BurstGPT writes failed requests down with no output.
        let tokens = (1.0..1e9).contains(&tokens).then_some(tokens as u64)?;
        let text = |column: Option<usize>| fields.get(column?).map(String::as_str);
        Some((key(text(self.task), text(self.tenant)), tokens))
    }
}

fn of_json(line: &str, model: &ModelName) -> Option<(HistoryKey, u64)> {
    let line: Json = serde_json::from_str(line).ok()?;
    let member = |names: &[&str]| names.iter().map(|name| &line[*name]).find(|value| !value.is_null());
    let of_model = member(&MODEL).and_then(Json::as_str).is_none_or(|name| name == model.as_str());
    let completed = line["outcome"].as_str().is_none_or(|outcome| outcome == "completed");
    if !of_model || !completed {
        return None;
    }
    let usage = &line["usage"];
    let tokens = member(&OUTPUT)
        .or_else(|| ["completion_tokens", "output_tokens"].iter().map(|n| &usage[*n]).find(|v| !v.is_null()))
        .and_then(Json::as_u64)
        .filter(|tokens| *tokens > 0)?;
    let sequences = line["sequences"].as_u64().unwrap_or(1).max(1);
    let text = |names: &[&str]| member(names).and_then(Json::as_str);
    Some((key(text(&TASK), text(&TENANT)), tokens.div_ceil(sequences)))
}
