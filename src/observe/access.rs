//! The access log: one JSON line for each ended request, under the target `access`. Prompts and answers are never in it.

use std::cell::RefCell;
use std::io::{self, Write};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;

use super::lines;
use crate::units::Tokens;

/// What is told of one ended request. What does not apply is left out.
#[derive(Debug, Serialize)]
pub struct AccessRecord<'a> {
    pub request_id: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub upstream_request_id: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client: Option<std::net::IpAddr>,
    pub method: &'a str,
    pub endpoint: &'a str,
    pub model: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tenant: Option<&'a str>,
    pub band: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replica: Option<&'a str>,
    pub status: u16,
    pub outcome: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<&'a str>,
    pub stream: bool,
    pub attempts: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub counted_prompt_tokens: Option<Tokens>,
    pub counted_exactly: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub estimated_output_tokens: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub task: Option<&'a str>,
    // The usage, where there was one; flattening a struct of its own would double what a line costs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_tokens: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cached_prompt_tokens: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub output_tokens: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_tokens: Option<u64>,
    pub usage_from_engine: bool,
    pub queue_ms: Milliseconds,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ttft_ms: Option<Milliseconds>,
    pub duration_ms: Milliseconds,
}

/// Milliseconds, written with three decimals at most.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(transparent)]
pub struct Milliseconds(f64);

impl Milliseconds {
    /// From seconds.
    pub fn from_seconds(seconds: f64) -> Self {
        Milliseconds((seconds * 1e6).round() / 1e3)
    }
}

thread_local! {
    /// One thread's line in the making, and the second that its time begins with.
    static LINE: RefCell<(Vec<u8>, Second)> = RefCell::default();
}

/// A second of UTC as text: it is the same for many lines.
#[derive(Debug, Default)]
struct Second {
    unix: u64,
    text: String,
}

impl AccessRecord<'_> {
    /// Writes the record to the log: as the line it is where the log is made of such lines, else as an event.
    pub fn write(&self) {
        let Some(lines) = lines::json_lines() else { return self.tell() };
        LINE.with_borrow_mut(|(line, second)| {
            line.clear();
            let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            if self.write_line(line, second, since.as_secs(), since.subsec_micros()).is_ok() {
                lines.add(line);
            }
        });
    }

    fn write_line(&self, line: &mut Vec<u8>, second: &mut Second, unix: u64, micros: u32) -> io::Result<()> {
        if second.unix != unix || second.text.is_empty() {
            let time = chrono::DateTime::from_timestamp(i64::try_from(unix).unwrap_or(0), 0).unwrap_or_default();
            *second = Second { unix, text: time.format("%Y-%m-%dT%H:%M:%S").to_string() };
        }
        let second = &second.text;
        write!(line, "{{\"timestamp\":\"{second}.{micros:06}Z\",\"level\":\"INFO\",\"target\":\"access\",")?;
        // The record's own brace gives way to the one above.
        let brace = line.len();
        serde_json::to_writer(&mut *line, self)?;
        line.remove(brace);
        line.push(b'\n');
        Ok(())
    }

    /// As an event, for a log that people read.
    fn tell(&self) {
        tracing::info!(
            target: "access",
            request_id = self.request_id,
            upstream_request_id = self.upstream_request_id,
            client = self.client.map(tracing::field::display),
            method = self.method,
            endpoint = self.endpoint,
            model = self.model,
            tenant = self.tenant,
            band = self.band,
            replica = self.replica,
            status = self.status,
            outcome = self.outcome,
            error = self.error,
            stream = self.stream,
            attempts = self.attempts,
            counted_prompt_tokens = self.counted_prompt_tokens.map(|t| t.0),
            counted_exactly = self.counted_exactly,
            estimated_output_tokens = self.estimated_output_tokens,
            task = self.task,
            prompt_tokens = self.prompt_tokens,
            cached_prompt_tokens = self.cached_prompt_tokens,
            output_tokens = self.output_tokens,
            reasoning_tokens = self.reasoning_tokens,
            usage_from_engine = self.usage_from_engine,
            queue_ms = self.queue_ms.0,
            ttft_ms = self.ttft_ms.map(|t| t.0),
            duration_ms = self.duration_ms.0,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> AccessRecord<'static> {
        AccessRecord {
            request_id: "a \"quoted\" id",
            upstream_request_id: None,
            client: Some("192.0.2.1".parse().unwrap()),
            method: "POST",
            endpoint: "chat",
            model: "m",
            tenant: None,
            band: "standard",
            replica: Some("gpu-1"),
            status: 200,
            outcome: "completed",
            error: None,
            stream: true,
            attempts: 1,
            counted_prompt_tokens: Some(Tokens(12)),
            counted_exactly: true,
            estimated_output_tokens: Some(500),
            task: Some("chat"),
            prompt_tokens: Some(12),
            cached_prompt_tokens: Some(4),
            output_tokens: Some(7),
            reasoning_tokens: Some(0),
            usage_from_engine: true,
            queue_ms: Milliseconds::from_seconds(0.0),
            ttft_ms: Some(Milliseconds::from_seconds(0.012_345_67)),
            duration_ms: Milliseconds::from_seconds(1.5),
        }
    }

    #[test]
    fn a_line_is_one_json_object_with_its_time() {
        let (mut line, mut second) = (Vec::new(), Second::default());
        record().write_line(&mut line, &mut second, 1_764_450_000, 1_203).unwrap();
        let text = String::from_utf8(line).unwrap();
        assert!(text.ends_with("}\n") && text.matches('\n').count() == 1, "{text}");
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(value["timestamp"], "2025-11-29T21:00:00.001203Z");
        assert_eq!((&value["level"], &value["target"]), (&"INFO".into(), &"access".into()));
        assert_eq!(value["request_id"], "a \"quoted\" id");
        assert_eq!(value["client"], "192.0.2.1");
        assert_eq!((&value["prompt_tokens"], &value["output_tokens"]), (&12.into(), &7.into()));
        assert_eq!(value["ttft_ms"], 12.346);
        assert!(value.get("tenant").is_none() && value.get("error").is_none());
    }
}
