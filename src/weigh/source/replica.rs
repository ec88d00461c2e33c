//! `replica`: the engine's own `/tokenize` and `/apply-template`.
//!
//! vLLM (and those that took its API) counts conversations and prompts in one call; llama.cpp renders in one and
//! tokenizes in another. Counts are cached by what was asked.

use std::sync::LazyLock;

use async_trait::async_trait;
use bytes::Bytes;

use crate::config::{Engine, Model};
use crate::units::ModelName;
use crate::weigh::count::CountCache;
use crate::weigh::count::cache::Secret;
use crate::weigh::prompt::form::raw;
use crate::wire::{Endpoint, Request};

/// Asks a replica of a model: given by the room that knows the replicas.
#[async_trait]
pub trait ReplicaAsk: Send + Sync + std::fmt::Debug {
    /// Sends `body` as JSON to `path` of a healthy replica of the model, and gives the body of its 200.
    ///
    /// # Errors
    /// What went wrong; the prompt is then estimated.
    async fn ask(&self, model: &ModelName, path: &str, body: Bytes) -> Result<Bytes, String>;
}

/// What names a question in the cache of counts.
static QUESTIONS: LazyLock<Secret> = LazyLock::new(Secret::new);

/// Members that change what a prompt is made of.
const CHAT: [&str; 8] = [
    "messages",
    "tools",
    "tool_choice",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
    "reasoning_effort",
];

/// Asks for a request's prompt tokens. `None` where no replica answers in a known shape, and for requests of a form
/// that `/tokenize` does not take.
pub async fn count(
    ask: &dyn ReplicaAsk,
    model: &Model,
    request: &Request,
    engine: Engine,
    cache: &CountCache,
) -> Option<u64> {
    let chat = matches!(request.endpoint, Endpoint::ChatCompletions | Endpoint::Tokenize)
        && raw(request, "messages").is_some();
    let prompt = raw(request, "prompt").filter(|raw| raw.first() == Some(&b'"'));
    if !chat && prompt.is_none() {
        return None;
    }
    let name = serde_json::to_string(model.name.as_str()).ok()?;
    let question = body(&name, request, if chat { &CHAT } else { &["prompt", "add_special_tokens"] });
    let key = QUESTIONS.key(std::str::from_utf8(&question).ok()?);
    if let Some(known) = cache.get(key) {
        return Some(u64::from(known));
    }
    let vllm = async {
        let answer = ask.ask(&model.name, "/tokenize", question.clone()).await.ok()?;
        let answer: serde_json::Value = serde_json::from_slice(&answer).ok()?;
        answer["count"].as_u64()
    };
    let llama = async {
        let content = match prompt {
            Some(prompt) => serde_json::from_slice(prompt).ok()?,
            None => {
                let answer = ask.ask(&model.name, "/apply-template", question.clone()).await.ok()?;
                let answer: serde_json::Value = serde_json::from_slice(&answer).ok()?;
                answer["prompt"].as_str()?.to_owned()
            }
        };
        let body = serde_json::json!({"content": content, "add_special": true, "parse_special": true});
        let answer = ask.ask(&model.name, "/tokenize", Bytes::from(body.to_string())).await.ok()?;
        let answer: serde_json::Value = serde_json::from_slice(&answer).ok()?;
        Some(answer["tokens"].as_array()?.len() as u64)
    };
    let tokens = match engine {
        Engine::LlamaCpp => llama.await,
        Engine::Vllm | Engine::Sglang | Engine::Tgi | Engine::TrtLlm => vllm.await,
        Engine::Auto | Engine::OpenAi => match vllm.await {
            Some(tokens) => Some(tokens),
            None => llama.await,
        },
    }?;
    if let Ok(tokens) = u32::try_from(tokens) {
        cache.put(key, tokens);
    }
    Some(tokens)
}

/// A body of the named members, as the client wrote them.
fn body(model: &str, request: &Request, members: &[&str]) -> Bytes {
    let mut out = format!("{{\"model\":{model}").into_bytes();
    for name in members {
        if let Some(value) = raw(request, name) {
            out.extend_from_slice(format!(",\"{name}\":").as_bytes());
            out.extend_from_slice(value);
        }
    }
    out.push(b'}');
    Bytes::from(out)
}
