//! The token counts an engine reports, from every API's shape.

use super::json::{self, Cursor, Kind};

/// Actual token counts. Cached tokens are part of `prompt`, reasoning tokens part of `output`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub prompt: u64,
    pub cached_prompt: u64,
    pub output: u64,
    pub reasoning: u64,
}

/// Largest count believed: an engine's overflow must not poison the books.
const COUNT_MAX: u64 = 1 << 40;

impl Usage {
    /// Reads a `usage` object (chat, completions, embeddings, responses, messages). `null`, `{}` and values that
    /// are no counts are not usage.
    pub fn from_json(value: &serde_json::Value) -> Option<Usage> {
        Usage::from_slice(value.to_string().as_bytes())
    }

    /// Reads a `usage` object as it stands in an answer.
    pub fn from_slice(raw: &[u8]) -> Option<Usage> {
        let mut cursor = Cursor::lenient(raw);
        Report::read(&mut cursor).ok()?.usage()
    }
}

/// The counts of one `usage` object that were there and were counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Report {
    prompt: Option<u64>,
    output: Option<u64>,
    total: Option<u64>,
    cached: Option<u64>,
    reasoning: Option<u64>,
    /// Anthropic's API counts cached tokens beside `input_tokens`, all others inside.
    cache_read: Option<u64>,
    cache_creation: Option<u64>,
}

impl Report {
    /// Reads the value at the cursor; anything but an object is an empty report.
    pub(crate) fn read(cursor: &mut Cursor<'_>) -> json::Result<Report> {
        let mut report = Report::default();
        if cursor.kind()? != Kind::Object {
            cursor.skip()?;
            return Ok(report);
        }
        cursor.open()?;
        let mut first = true;
        while let Some(key) = cursor.next_key(&mut first)? {
            let slot = match cursor.slice(&key.inner) {
                b"prompt_tokens" | b"input_tokens" => &mut report.prompt,
                b"completion_tokens" | b"output_tokens" => &mut report.output,
                b"total_tokens" => &mut report.total,
                b"cache_read_input_tokens" => &mut report.cache_read,
                b"cache_creation_input_tokens" => &mut report.cache_creation,
                // DeepSeek's own name for it.
                b"prompt_cache_hit_tokens" => &mut report.cached,
                b"prompt_tokens_details" | b"input_tokens_details" => {
                    details(cursor, b"cached_tokens", &mut report.cached)?;
                    continue;
                }
                b"completion_tokens_details" | b"output_tokens_details" => {
                    details(cursor, b"reasoning_tokens", &mut report.reasoning)?;
                    continue;
                }
                _ => {
                    cursor.skip()?;
                    continue;
                }
            };
            let value = cursor.skip()?;
            *slot = believable(cursor.slice(&value)).or(*slot);
        }
        Ok(report)
    }

    /// What is known once both reports are: the later one's counts, the earlier one's where it has none. Anthropic's
    /// API gives the prompt at the start of a stream and the output at its end.
    pub(crate) fn after(self, earlier: Report) -> Report {
        Report {
            prompt: self.prompt.or(earlier.prompt),
            output: self.output.or(earlier.output),
            total: self.total.or(earlier.total),
            cached: self.cached.or(earlier.cached),
            reasoning: self.reasoning.or(earlier.reasoning),
            cache_read: self.cache_read.or(earlier.cache_read),
            cache_creation: self.cache_creation.or(earlier.cache_creation),
        }
    }

    /// The counts as usage; none where neither a prompt nor an output was counted.
    pub(crate) fn usage(self) -> Option<Usage> {
        let beside = self.cache_read.unwrap_or(0) + self.cache_creation.unwrap_or(0);
        let output = self.output.unwrap_or(0);
        let prompt = match (self.prompt, self.output, self.total) {
            (Some(prompt), _, _) => prompt + beside,
            (None, Some(output), total) => total.unwrap_or(output).saturating_sub(output) + beside,
            (None, None, Some(total)) => total,
            (None, None, None) => return None,
        };
        Some(Usage {
            prompt,
            cached_prompt: self.cached.or(self.cache_read).unwrap_or(0).min(prompt),
            output,
            reasoning: self.reasoning.unwrap_or(0).min(output),
        })
    }
}

fn believable(raw: &[u8]) -> Option<u64> {
    json::count(raw).filter(|&count| count <= COUNT_MAX)
}

fn details(cursor: &mut Cursor<'_>, name: &[u8], slot: &mut Option<u64>) -> json::Result<()> {
    if cursor.kind()? != Kind::Object {
        cursor.skip()?;
        return Ok(());
    }
    cursor.open()?;
    let mut first = true;
    while let Some(key) = cursor.next_key(&mut first)? {
        let value = cursor.skip()?;
        if cursor.slice(&key.inner) == name {
            *slot = believable(cursor.slice(&value)).or(*slot);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn usage(prompt: u64, cached_prompt: u64, output: u64, reasoning: u64) -> Option<Usage> {
        Some(Usage { prompt, cached_prompt, output, reasoning })
    }

    #[test]
    fn every_apis_shape_is_read() {
        for (value, wanted) in [
            (json!({"prompt_tokens": 14, "completion_tokens": 2, "total_tokens": 16}), usage(14, 0, 2, 0)),
            (json!({"prompt_tokens": 512, "total_tokens": 512}), usage(512, 0, 0, 0)),
            (json!({"total_tokens": 12}), usage(12, 0, 0, 0)),
            (
                json!({"input_tokens": 32, "output_tokens": 8, "total_tokens": 40,
                    "input_tokens_details": {"cached_tokens": 31, "cached_tokens_per_turn": []},
                    "output_tokens_details": {"reasoning_tokens": 3}}),
                usage(32, 31, 8, 3),
            ),
            (json!({"input_tokens": 1, "cache_read_input_tokens": 37, "output_tokens": 8}), usage(38, 37, 8, 0)),
            (
                json!({"input_tokens": 5, "cache_creation_input_tokens": 10, "cache_read_input_tokens": 0,
                    "output_tokens": 1}),
                usage(15, 0, 1, 0),
            ),
            (json!({"output_tokens": 8}), usage(0, 0, 8, 0)),
            (json!({"completion_tokens": 8, "total_tokens": 20}), usage(12, 0, 8, 0)),
        ] {
            assert_eq!(Usage::from_json(&value), wanted, "{value}");
        }
    }

    #[test]
    fn c017_cached_tokens_are_inside_the_prompt_and_null_details_are_accepted() {
        let value = json!({"prompt_tokens": 1000, "completion_tokens": 2, "total_tokens": 1002,
            "prompt_tokens_details": {"cached_tokens": 960, "audio_tokens": null}, "completion_tokens_details": null});
        assert_eq!(Usage::from_json(&value), usage(1000, 960, 2, 0));
    }

    #[test]
    fn c018_reasoning_tokens_are_inside_the_output() {
        let value = json!({"prompt_tokens": 25, "completion_tokens": 73, "total_tokens": 98,
            "completion_tokens_details": {"reasoning_tokens": 70}});
        assert_eq!(Usage::from_json(&value), usage(25, 0, 73, 70));
    }

    #[test]
    fn c011_and_c020_null_empty_and_things_that_are_no_counts_are_not_usage() {
        for value in [
            json!(null),
            json!({}),
            json!([]),
            json!("x"),
            json!({"prompt_tokens": null, "completion_tokens": "1"}),
            json!({"prompt_tokens": -5}),
            json!({"prompt_tokens": 1u64 << 50}),
            json!({"prompt_tokens_details": {"cached_tokens": 5}}),
        ] {
            assert_eq!(Usage::from_json(&value), None, "{value}");
        }
    }

    #[test]
    fn details_never_exceed_what_they_are_part_of() {
        let value = json!({"prompt_tokens": 5, "completion_tokens": 2,
            "prompt_tokens_details": {"cached_tokens": 9}, "completion_tokens_details": {"reasoning_tokens": 9}});
        assert_eq!(Usage::from_json(&value), usage(5, 5, 2, 2));
    }
}
