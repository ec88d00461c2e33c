//! The access log: one JSON line for each ended request, under the target `access`. Prompts and answers are never in it.

use std::cell::RefCell;
use std::time::{SystemTime, UNIX_EPOCH};

use super::lines;
use crate::units::Tokens;

/// What is told of one ended request. What does not apply is left out.
#[derive(Debug)]
pub struct AccessRecord<'a> {
    pub request_id: &'a str,
    pub upstream_request_id: Option<&'a str>,
    pub client: Option<std::net::IpAddr>,
    pub method: &'a str,
    pub endpoint: &'a str,
    pub model: &'a str,
    pub tenant: Option<&'a str>,
    pub band: &'a str,
    pub replica: Option<&'a str>,
    pub status: u16,
    pub outcome: &'a str,
    pub error: Option<&'a str>,
    pub stream: bool,
    pub attempts: u32,
    pub counted_prompt_tokens: Option<Tokens>,
    pub counted_exactly: bool,
    pub estimated_output_tokens: Option<u64>,
    pub task: Option<&'a str>,
    // The usage, where there was one.
    pub prompt_tokens: Option<u64>,
    pub cached_prompt_tokens: Option<u64>,
    pub output_tokens: Option<u64>,
    pub reasoning_tokens: Option<u64>,
    pub usage_from_engine: bool,
    pub queue_ms: Milliseconds,
    pub ttft_ms: Option<Milliseconds>,
    pub duration_ms: Milliseconds,
}

/// Milliseconds, written with three decimals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Milliseconds {
    micros: u64,
}

impl Milliseconds {
    /// From seconds; none are below zero.
    pub fn from_seconds(seconds: f64) -> Self {
        Milliseconds { micros: (seconds * 1e6).round() as u64 }
    }

    fn as_f64(self) -> f64 {
        self.micros as f64 / 1e3
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
            self.write_line(line, second, since.as_secs(), since.subsec_micros());
            lines.add(line);
        });
    }

    fn write_line(&self, line: &mut Vec<u8>, second: &mut Second, unix: u64, micros: u32) {
        if second.unix != unix || second.text.is_empty() {
            let time = chrono::DateTime::from_timestamp(i64::try_from(unix).unwrap_or(0), 0).unwrap_or_default();
            *second = Second { unix, text: time.format("%Y-%m-%dT%H:%M:%S").to_string() };
        }
        line.extend_from_slice(b"{\"timestamp\":\"");
        line.extend_from_slice(second.text.as_bytes());
        line.push(b'.');
        // Six digits: what is above a second is cut off again.
        line.extend_from_slice(&itoa::Buffer::new().format(1_000_000 + micros % 1_000_000).as_bytes()[1..]);
        line.extend_from_slice(b"Z\",\"level\":\"INFO\",\"target\":\"access\"");
        let mut object = Object(line);
        object.text("request_id", Some(self.request_id));
        object.text("upstream_request_id", self.upstream_request_id);
        object.text("client", self.client.map(|address| address.to_string()).as_deref());
        object.text("method", Some(self.method));
        object.text("endpoint", Some(self.endpoint));
        object.text("model", Some(self.model));
        object.text("tenant", self.tenant);
        object.text("band", Some(self.band));
        object.text("replica", self.replica);
        object.number("status", Some(self.status.into()));
        object.text("outcome", Some(self.outcome));
        object.text("error", self.error);
        object.flag("stream", self.stream);
        object.number("attempts", Some(self.attempts.into()));
        object.number("counted_prompt_tokens", self.counted_prompt_tokens.map(|tokens| tokens.0));
        object.flag("counted_exactly", self.counted_exactly);
        object.number("estimated_output_tokens", self.estimated_output_tokens);
        object.text("task", self.task);
        object.number("prompt_tokens", self.prompt_tokens);
        object.number("cached_prompt_tokens", self.cached_prompt_tokens);
        object.number("output_tokens", self.output_tokens);
        object.number("reasoning_tokens", self.reasoning_tokens);
        object.flag("usage_from_engine", self.usage_from_engine);
        object.milliseconds("queue_ms", Some(self.queue_ms));
        object.milliseconds("ttft_ms", self.ttft_ms);
        object.milliseconds("duration_ms", Some(self.duration_ms));
        line.extend_from_slice(b"}\n");
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
            queue_ms = self.queue_ms.as_f64(),
            ttft_ms = self.ttft_ms.map(Milliseconds::as_f64),
            duration_ms = self.duration_ms.as_f64(),
        );
    }
}

/// A JSON object that has a member already and is being written on. There is a line for every request, and a derived
/// serializer takes longer for it.
struct Object<'l>(&'l mut Vec<u8>);

impl Object<'_> {
    fn key(&mut self, name: &'static str) {
        self.0.extend_from_slice(b",\"");
        self.0.extend_from_slice(name.as_bytes());
        self.0.extend_from_slice(b"\":");
    }

    fn text(&mut self, name: &'static str, value: Option<&str>) {
        let Some(value) = value else { return };
        self.key(name);
        // Memory takes everything.
        let _ = serde_json::to_writer(&mut *self.0, value);
    }

    fn number(&mut self, name: &'static str, value: Option<u64>) {
        let Some(value) = value else { return };
        self.key(name);
        self.0.extend_from_slice(itoa::Buffer::new().format(value).as_bytes());
    }

    fn flag(&mut self, name: &'static str, value: bool) {
        self.key(name);
        self.0.extend_from_slice(if value { b"true" } else { b"false" });
    }

    fn milliseconds(&mut self, name: &'static str, value: Option<Milliseconds>) {
        let Some(Milliseconds { micros }) = value else { return };
        self.number(name, Some(micros / 1000));
        // Three digits behind the point, also where they are zeros: a store that types a field by its first line shall
        // not take it for a whole number. The leading digit of 1,xxx becomes the point.
        let at = self.0.len();
        self.0.extend_from_slice(itoa::Buffer::new().format(1000 + micros % 1000).as_bytes());
        self.0[at] = b'.';
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
        record().write_line(&mut line, &mut second, 1_764_450_000, 1_203);
        let text = String::from_utf8(line).unwrap();
        assert!(text.ends_with("}\n") && text.matches('\n').count() == 1, "{text}");
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(value["timestamp"], "2025-11-29T21:00:00.001203Z");
        assert_eq!((&value["level"], &value["target"]), (&"INFO".into(), &"access".into()));
        assert_eq!(value["request_id"], "a \"quoted\" id");
        assert_eq!(value["client"], "192.0.2.1");
        assert_eq!((&value["prompt_tokens"], &value["output_tokens"]), (&12.into(), &7.into()));
        assert_eq!(
            (&value["queue_ms"], &value["ttft_ms"], &value["duration_ms"]),
            (&0.0.into(), &12.346.into(), &1500.0.into())
        );
        assert_eq!(
            (&value["stream"], &value["usage_from_engine"], &value["status"]),
            (&true.into(), &true.into(), &200.into())
        );
        assert!(value.get("tenant").is_none() && value.get("error").is_none());
    }

    #[test]
    fn text_of_any_kind_is_written_as_json_reads_it() {
        let (mut line, mut second) = (Vec::new(), Second::default());
        let odd = "a\u{0}\u{1f}\"\\\n\u{7f}\u{e9}\u{2028}\u{1f600}";
        let record = AccessRecord { request_id: odd, tenant: Some("t\tt"), ..record() };
        record.write_line(&mut line, &mut second, 0, 999_999);
        let value: serde_json::Value = serde_json::from_slice(&line).unwrap();
        assert_eq!((&value["request_id"], &value["tenant"]), (&odd.into(), &"t\tt".into()));
        assert_eq!(value["timestamp"], "1970-01-01T00:00:00.999999Z");
    }

    #[test]
    fn milliseconds_have_three_decimals() {
        for (seconds, expected) in
            [(0.0, "0.000"), (0.000_001, "0.001"), (0.012_34, "12.340"), (1.0, "1000.000"), (2.000_5, "2000.500")]
        {
            let mut line = Vec::new();
            Object(&mut line).milliseconds("x", Some(Milliseconds::from_seconds(seconds)));
            assert_eq!(String::from_utf8(line).unwrap(), format!(",\"x\":{expected}"));
        }
    }
}
