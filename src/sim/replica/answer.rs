//! Answers as vLLM and llama.cpp put them on the wire: events, documents, usage.

use serde_json::{Value, json};

use super::ask::{Api, SimAsk};

/// Whose wire format is spoken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Flavour {
    #[default]
    Vllm,
    Llamacpp,
}

/// Why a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    Stop,
    Length,
}

impl Finish {
    /// As on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Finish::Stop => "stop",
            Finish::Length => "length",
        }
    }
}

/// What the events of one answer have in common.
#[derive(Debug)]
pub struct Writer {
    pub flavour: Flavour,
    pub api: Api,
    pub id: String,
    pub created: u64,
    pub model: String,
    pub continuous: bool,
    /// Whether usage tells cached tokens.
    pub details: bool,
}

/// The counts of one answer so far.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    pub prompt: u64,
    pub completion: u64,
    pub cached: u64,
}

const FINGERPRINT: &str = "vllm-0.32.0-weighbridge-sim";

impl Writer {
    /// A writer for one request's answer; `number` makes its id.
    pub fn new(flavour: Flavour, ask: &SimAsk, request_id: Option<&str>, number: u64, details: bool) -> Writer {
        let prefix = if ask.api == Api::Chat { "chatcmpl" } else { "cmpl" };
        let id = match request_id {
            Some(id) => format!("{prefix}-{id}"),
            None => format!("{prefix}-{:016x}", (number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)),
        };
        Writer {
            flavour,
            api: ask.api,
            id,
            created: chrono::Utc::now().timestamp().unsigned_abs(),
            model: ask.model.clone(),
            continuous: ask.continuous_usage && ask.include_usage && flavour == Flavour::Vllm,
            details,
        }
    }

    fn object(&self, stream: bool) -> &'static str {
        match (self.api, stream) {
            (Api::Chat, true) => "chat.completion.chunk",
            (Api::Chat, false) => "chat.completion",
            (Api::Completions, _) => "text_completion",
        }
    }

    fn event(&self, choices: &str, tail: &str) -> String {
        let Writer { id, created, model, .. } = self;
        let object = self.object(true);
        let model = json!(model);
        match self.flavour {
            Flavour::Vllm => format!(
                "data: {{\"id\":\"{id}\",\"object\":\"{object}\",\"created\":{created},\"model\":{model},\
                 \"choices\":[{choices}]{tail}}}\n\n"
            ),
            Flavour::Llamacpp => format!(
                "data: {{\"choices\":[{choices}],\"created\":{created},\"id\":\"{id}\",\"model\":{model},\
                 \"system_fingerprint\":\"b1-weighbridge-sim\",\"object\":\"{object}\"{tail}}}\n\n"
            ),
        }
    }

    fn running_usage(&self, counts: Counts) -> String {
        if !self.continuous {
            return String::new();
        }
        format!(
            ",\"usage\":{{\"prompt_tokens\":{},\"total_tokens\":{},\"completion_tokens\":{},\
             \"completion_tokens_details\":null}}",
            counts.prompt,
            counts.prompt + counts.completion,
            counts.completion
        )
    }

    /// The first event of a chat choice: the role, no content.
    pub fn role(&self, index: u32, counts: Counts) -> Option<String> {
        if self.api == Api::Completions {
            return None;
        }
        Some(match self.flavour {
            Flavour::Vllm => {
                let choice = format!(
                    "{{\"index\":{index},\"delta\":{{\"role\":\"assistant\",\"content\":\"\"}},\"logprobs\":null,\
                     \"finish_reason\":null}}"
                );
                let tail = format!("{},\"prompt_token_ids\":null,\"prompt_text\":null", self.running_usage(counts));
                self.event(&choice, &tail)
            }
            Flavour::Llamacpp => self.event(
                &format!(
                    "{{\"finish_reason\":null,\"index\":{index},\"delta\":{{\"role\":\"assistant\",\
                     \"content\":null}}}}"
                ),
                "",
            ),
        })
    }

    /// One token. An answer that stopped by itself ends in a token without text.
    pub fn token(&self, index: u32, word: &str, finish: Option<Finish>, counts: Counts) -> String {
        let word = if finish == Some(Finish::Stop) { "" } else { word };
        let reason = finish.map_or("null".to_owned(), |f| format!("\"{}\"", f.as_str()));
        match (self.flavour, self.api) {
            (Flavour::Vllm, Api::Chat) => {
                let stop = if finish.is_some() { ",\"stop_reason\":null" } else { "" };
                self.event(
                    &format!(
                        "{{\"index\":{index},\"delta\":{{\"content\":\"{word}\"}},\"logprobs\":null,\
                         \"finish_reason\":{reason}{stop},\"token_ids\":null}}"
                    ),
                    &self.running_usage(counts),
                )
            }
            (Flavour::Vllm, Api::Completions) => self.event(
                &format!(
                    "{{\"index\":{index},\"text\":\"{word}\",\"logprobs\":null,\"finish_reason\":{reason},\
                     \"stop_reason\":null,\"prompt_token_ids\":null,\"token_ids\":null}}"
                ),
                &self.running_usage(counts),
            ),
            (Flavour::Llamacpp, Api::Chat) => {
                let content =
                    format!("{{\"finish_reason\":null,\"index\":{index},\"delta\":{{\"content\":\"{word}\"}}}}");
                let mut text = if word.is_empty() { String::new() } else { self.event(&content, "") };
                if finish.is_some() {
                    let last = format!("{{\"finish_reason\":{reason},\"index\":{index},\"delta\":{{}}}}");
                    text.push_str(&self.event(&last, ""));
                }
                text
            }
            (Flavour::Llamacpp, Api::Completions) => self.event(
                &format!("{{\"text\":\"{word}\",\"index\":{index},\"logprobs\":null,\"finish_reason\":{reason}}}"),
                "",
            ),
        }
    }

    /// The usage event, the last before `[DONE]`.
    pub fn usage_event(&self, counts: Counts) -> String {
        let mut usage = self.usage(counts);
        let fingerprint = match self.flavour {
            Flavour::Vllm => {
                // A stream's usage leaves out what is null.
                drop_nulls(&mut usage);
                format!(",\"system_fingerprint\":\"{FINGERPRINT}\"")
            }
            Flavour::Llamacpp => format!(",\"timings\":{}", self.timings(counts)),
        };
        self.event("", &format!(",\"usage\":{usage}{fingerprint}"))
    }

    fn timings(&self, counts: Counts) -> Value {
        json!({"cache_n": counts.cached, "prompt_n": counts.prompt - counts.cached, "predicted_n": counts.completion})
    }

    fn usage(&self, counts: Counts) -> Value {
        let total = counts.prompt + counts.completion;
        match self.flavour {
            Flavour::Vllm => json!({
                "prompt_tokens": counts.prompt, "total_tokens": total, "completion_tokens": counts.completion,
                "prompt_tokens_details": self.details.then(|| json!({
                    "cached_tokens": counts.cached, "created_cache_tokens": 0, "multimodal_tokens": null})),
                "completion_tokens_details": null,
            }),
            Flavour::Llamacpp => json!({
                "completion_tokens": counts.completion, "prompt_tokens": counts.prompt, "total_tokens": total,
                "prompt_tokens_details": {"cached_tokens": counts.cached},
            }),
        }
    }

    /// An error in the middle of a stream, as vLLM sends it after its 200.
    pub fn stream_error(&self) -> String {
        let error = json!({"error": {"message": "EngineCore encountered an issue. See stack trace (above) for the \
            root cause.", "type": "InternalServerError", "param": null, "code": 500}});
        format!("data: {error}\n\n")
    }

    /// A whole answer as one document.
    pub fn document(&self, texts: &[(String, Finish)], counts: Counts, usage: bool) -> Value {
        let choices: Vec<Value> = texts
            .iter()
            .enumerate()
            .map(|(index, (text, finish))| match self.api {
                Api::Chat => json!({
                    "index": index,
                    "message": {"role": "assistant", "content": text, "refusal": null, "annotations": null,
                        "audio": null, "function_call": null, "reasoning": null},
                    "logprobs": null, "finish_reason": finish.as_str(), "stop_reason": null, "token_ids": null,
                }),
                Api::Completions => json!({
                    "index": index, "text": text, "logprobs": null, "finish_reason": finish.as_str(),
                    "stop_reason": null, "token_ids": null, "prompt_logprobs": null, "prompt_token_ids": null,
                }),
            })
            .collect();
        let mut document = json!({
            "id": self.id, "object": self.object(false), "created": self.created, "model": self.model,
            "choices": choices, "service_tier": null, "system_fingerprint": FINGERPRINT,
        });
        if usage {
            document["usage"] = self.usage(counts);
        }
        if self.flavour == Flavour::Llamacpp {
            document["timings"] = self.timings(counts);
        }
        document
    }
}

fn drop_nulls(value: &mut Value) {
    if let Some(object) = value.as_object_mut() {
        object.retain(|_, value| !value.is_null());
        object.values_mut().for_each(drop_nulls);
    }
}
