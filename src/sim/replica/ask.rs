//! Reads a request the way vLLM does, and refuses it in vLLM's words.

use serde_json::{Value, json};

use super::text;

/// Which API was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Api {
    Chat,
    Completions,
}

/// A request, understood.
#[derive(Debug)]
pub struct SimAsk {
    pub api: Api,
    pub model: String,
    pub stream: bool,
    pub include_usage: bool,
    pub continuous_usage: bool,
    /// Tokens of each prompt.
    pub prompts: Vec<Vec<u32>>,
    pub n: u32,
    pub max_tokens: Option<u32>,
    pub min_tokens: u32,
    pub ignore_eos: bool,
    pub priority: i64,
    /// `sim_output_tokens`: how long the answer shall be.
    pub output_tokens: Option<u32>,
}

/// An error answer: status and body.
#[derive(Debug)]
pub struct SimError {
    pub status: u16,
    pub body: Value,
}

impl SimError {
    /// In the shape of vLLM's errors.
    pub fn new(status: u16, kind: &str, param: Option<&str>, message: impl Into<String>) -> SimError {
        let message: String = message.into();
        SimError { status, body: json!({"error": {"message": message, "type": kind, "param": param, "code": status}}) }
    }

    fn bad(param: Option<&str>, message: impl Into<String>) -> SimError {
        SimError::new(400, "BadRequestError", param, message)
    }
}

/// What the replica says about itself.
#[derive(Debug, Clone, Copy)]
pub struct Served<'a> {
    pub models: &'a [String],
    pub max_model_len: u32,
    /// llama.cpp answers to any name.
    pub any_model: bool,
}

/// Reads a body.
///
/// # Errors
/// What vLLM answers: 400 for a body that is no such request or is over the window, 404 for an unknown model.
pub fn read(api: Api, body: &[u8], served: Served<'_>) -> Result<SimAsk, SimError> {
    let body: Value = serde_json::from_slice(body).map_err(|e| {
        SimError::new(400, "Bad Request", Some("body"), format!("1 validation error:\n  JSON decode error: {e}"))
    })?;
    if !body.is_object() {
        return Err(SimError::new(
            400,
            "Bad Request",
            Some("body"),
            "1 validation error:\n  Input should be an object",
        ));
    }
    let model = read_model(&body, served)?;
    let prompts = match api {
        Api::Chat => vec![read_chat(&body, &model)?],
        Api::Completions => read_prompts(&body)?,
    };
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
    if longest >= served.max_model_len as usize {
        let window = served.max_model_len;
        return Err(SimError::bad(
            Some("input_tokens"),
            format!(
                "This model's maximum context length is {window} tokens. However, your prompt contains at least {0} \
                 input tokens, which exceeds this limit even without any output tokens. Please reduce the length of \
                 the input prompt. (parameter=input_tokens, value={0})",
                window + 1
            ),
        ));
    }
    let stream = body["stream"].as_bool().unwrap_or(false);
    let options = &body["stream_options"];
    if !options.is_null() && !stream {
        return Err(SimError::bad(
            Some("stream_options"),
            "Stream options can only be defined when `stream=True`. (parameter=stream_options)",
        ));
    }
    let max_tokens = match read_count(&body, "max_completion_tokens")? {
        Some(count) => Some(count),
        None => read_count(&body, "max_tokens")?,
    };
    if max_tokens == Some(0) {
        return Err(SimError::bad(
            Some("max_tokens"),
            "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)",
        ));
    }
    Ok(SimAsk {
        api,
        model,
        stream,
        include_usage: options["include_usage"].as_bool().unwrap_or(false),
        continuous_usage: options["continuous_usage_stats"].as_bool().unwrap_or(false),
        prompts,
        n: read_count(&body, "n")?.unwrap_or(1).clamp(1, 128),
        max_tokens,
        min_tokens: read_count(&body, "min_tokens")?.unwrap_or(0),
        ignore_eos: body["ignore_eos"].as_bool().unwrap_or(false),
        priority: body["priority"].as_i64().unwrap_or(0),
        output_tokens: read_count(&body, "sim_output_tokens")?,
    })
}

/// The model that is asked for; the first served one where none is named.
///
/// # Errors
/// 404 for a model that is not served.
pub fn read_model(body: &Value, served: Served<'_>) -> Result<String, SimError> {
    let first = served.models.first().map(String::as_str).unwrap_or_default();
    match body["model"].as_str() {
        None => Ok(first.to_owned()),
        Some(_) if served.any_model => Ok(first.to_owned()),
        Some(name) if served.models.iter().any(|m| m == name) => Ok(name.to_owned()),
        Some(name) => Err(SimError::new(
            404,
            "NotFoundError",
            Some("model"),
            format!("The model `{name}` does not exist. Valid aliases: {}.", served.models.join(", ")),
        )),
    }
}

/// The tokens of a conversation.
///
/// # Errors
/// 400 where there is none.
pub fn read_chat(body: &Value, model: &str) -> Result<Vec<u32>, SimError> {
    let Some(messages) = body["messages"].as_array() else {
        return Err(SimError::new(
            400,
            "Bad Request",
            Some("body.messages"),
            "1 validation error:\n  {'type': 'missing', 'loc': 'body.messages', 'msg': 'Field required'}",
        ));
    };
    if messages.is_empty() {
        return Err(SimError::bad(
            None,
            "Cannot apply chat template to an empty conversation. Provide at least one message.",
        ));
    }
    text::render_chat(messages, body.get("tools"), model).map_err(|message| SimError::bad(None, message))
}

fn read_prompts(body: &Value) -> Result<Vec<Vec<u32>>, SimError> {
    let prompts = match &body["prompt"] {
        Value::String(prompt) => vec![tokens(prompt)],
        Value::Array(items) if items.iter().all(Value::is_u64) && !items.is_empty() => vec![ids(items)],
        Value::Array(items) => items
            .iter()
            .map(|item| match item {
                Value::String(prompt) => Ok(tokens(prompt)),
                Value::Array(list) => Ok(ids(list)),
                _ => Err(SimError::bad(Some("prompt"), "prompt must be a string, array of strings, or token ids")),
            })
            .collect::<Result<_, _>>()?,
        _ => Vec::new(),
    };
    if prompts.is_empty() || prompts.iter().any(Vec::is_empty) {
        return Err(SimError::bad(Some("prompt"), "The decoder prompt cannot be empty (parameter=prompt)"));
    }
    Ok(prompts)
}

fn tokens(text: &str) -> Vec<u32> {
    let mut out = Vec::new();
    text::tokenize(text, &mut out);
    out
}

fn ids(items: &[Value]) -> Vec<u32> {
    items.iter().map(|id| id.as_u64().unwrap_or(0) as u32).collect()
}

/// A count as vLLM takes it: an integer, or a string of digits.
fn read_count(body: &Value, name: &str) -> Result<Option<u32>, SimError> {
    let value = &body[name];
    let count = match value {
        Value::Null => return Ok(None),
        Value::Number(n) => n.as_u64(),
        Value::String(s) => s.parse().ok(),
        _ => None,
    };
    match count {
        Some(count) => Ok(Some(u32::try_from(count).unwrap_or(u32::MAX))),
        None => Err(SimError::bad(
            Some(name),
            format!("{name} must be at least 1, got {value}. (parameter={name}, value={value})"),
        )),
    }
}
