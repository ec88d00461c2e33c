//! The forms a request can have, read from its body's spans.

use minijinja::value::Value;

use crate::config::Model;
use crate::wire::{ApiError, Endpoint, ErrorCode, Request};

use super::message::{Message, read_messages};
use super::{anthropic, responses};
use crate::weigh::template::dict::{Entries, from_json};

/// A request, as far as it is counted.
#[derive(Debug)]
pub enum Form {
    /// Goes through the chat template.
    Chat(Box<Chat>),
    /// Counted as text; `added`: with what the tokenizer puts around a text. `suffix` is text after the answer.
    Texts { texts: Vec<String>, added: bool, suffix: Option<String> },
    /// A query with each of the documents.
    Pairs { query: String, documents: Vec<String> },
    /// Token ids: the lists' lengths, and the first list's ids as little-endian bytes.
    Ids { lengths: Vec<u64>, first: Vec<u8> },
    /// Not to be read here, though an engine may: this many bytes of it are taken for text.
    Unread { bytes: usize },
    /// Nothing that costs prompt tokens.
    Nothing,
}

/// A conversation and the switches that change its rendering.
#[derive(Debug, Default)]
pub struct Chat {
    pub messages: Vec<Message>,
    pub tools: Option<Vec<Value>>,
    pub documents: Option<Value>,
    /// `chat_template_kwargs` and the switches that engines turn into template variables.
    pub kwargs: Vec<(Value, Value)>,
    /// As sent; `None` is the API's default, true.
    pub add_generation_prompt: Option<bool>,
    pub continue_final_message: bool,
    /// Adds the tokenizer's own special tokens around the rendered prompt: never, unless asked.
    pub added: bool,
}

/// Names in `chat_template_kwargs` that do not reach the template: they are the request's own members, or the
/// tokenizer's.
const KWARGS_KEPT_OUT: [&str; 10] = [
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "bos_token",
    "eos_token",
    "pad_token",
    "unk_token",
];

/// A top-level member's JSON text; `None` where it is absent or null.
pub fn raw<'r>(request: &'r Request, name: &str) -> Option<&'r [u8]> {
    let field = request.fields.iter().rev().find(|field| field.name == name)?;
    let value = request.body.get(field.value.clone())?;
    (value != b"null").then_some(value)
}

/// A top-level member that is a boolean.
pub fn flag(request: &Request, name: &str) -> Option<bool> {
    match raw(request, name)? {
        b"true" => Some(true),
        b"false" => Some(false),
        _ => None,
    }
}

/// A top-level member that is text.
pub fn text(request: &Request, name: &str) -> Option<String> {
    serde_json::from_slice(raw(request, name)?).ok()
}

impl Form {
    /// Reads a request.
    ///
    /// # Errors
    /// `invalid_request` for switches that contradict each other. (A template sent by a client was refused when the
    /// request was parsed.)
    pub fn read(request: &Request, model: &Model) -> Result<Form, ApiError> {
        let form = match request.endpoint {
            Endpoint::ChatCompletions => Self::chat(request, model)?,
            Endpoint::Completions => Self::completion(request),
            Endpoint::Embeddings if raw(request, "messages").is_some() => Self::chat(request, model)?,
            Endpoint::Embeddings | Endpoint::Classify => input(raw(request, "input"), true),
            Endpoint::AudioSpeech => input(raw(request, "input"), false),
            Endpoint::Rerank => Self::rerank(request),
            Endpoint::Score => Self::score(request),
            Endpoint::Responses => responses::read(request).map_or_else(|| unread(request), Form::from),
            Endpoint::Messages | Endpoint::CountTokens => {
                anthropic::read(request).map_or_else(|| unread(request), Form::from)
            }
            Endpoint::Tokenize if raw(request, "messages").is_some() => Self::chat(request, model)?,
            Endpoint::Tokenize => Self::tokenize(request),
            Endpoint::AudioTranscriptions | Endpoint::AudioTranslations | Endpoint::Detokenize => Form::Nothing,
        };
        Ok(form)
    }

    fn chat(request: &Request, model: &Model) -> Result<Form, ApiError> {
        let add_generation_prompt = flag(request, "add_generation_prompt");
        let continue_final_message = flag(request, "continue_final_message").unwrap_or(false);
        if continue_final_message && add_generation_prompt == Some(true) {
            return Err(ApiError::new(
                ErrorCode::InvalidRequest,
                "continue_final_message and add_generation_prompt cannot both be true; set one of them to false",
            )
            .param("continue_final_message"));
        }
        let Some(Ok(messages)) = raw(request, "messages").map(read_messages) else { return Ok(unread(request)) };
        let no_tools = text(request, "tool_choice").as_deref() == Some("none") && !model.tools_with_choice_none;
        let tools = if no_tools { None } else { values(request, "tools") };
        let mut kwargs: Vec<(Value, Value)> = Vec::new();
        if let Some(Ok(sent)) = raw(request, "chat_template_kwargs").map(from_json) {
            for (name, value) in Entries::of(&sent).0 {
                if name.as_str().is_some_and(|name| !KWARGS_KEPT_OUT.contains(&name)) {
                    kwargs.push((name, value));
                }
            }
        }
        if let Some(Ok(effort)) = raw(request, "reasoning_effort").map(from_json) {
            kwargs.push((Value::from("reasoning_effort"), effort));
        }
        Ok(Form::Chat(Box::new(Chat {
            messages,
            tools: tools.filter(|tools| !tools.is_empty()),
            documents: raw(request, "documents").and_then(|documents| from_json(documents).ok()),
            kwargs,
            add_generation_prompt,
            continue_final_message,
            added: flag(request, "add_special_tokens").unwrap_or(false),
        })))
    }

    fn completion(request: &Request) -> Form {
        let added = flag(request, "add_special_tokens").unwrap_or(true);
        match input(raw(request, "prompt"), added) {
            Form::Texts { texts, added, .. } => Form::Texts { texts, added, suffix: text(request, "suffix") },
            other => other,
        }
    }

    fn tokenize(request: &Request) -> Form {
        match (raw(request, "prompt"), raw(request, "content")) {
            (Some(prompt), _) => input(Some(prompt), flag(request, "add_special_tokens").unwrap_or(true)),
            // llama.cpp's shape, where nothing is added unless asked.
            (None, content) => input(content, flag(request, "add_special").unwrap_or(false)),
        }
    }

    fn rerank(request: &Request) -> Form {
        let (Some(query), Some(documents)) = (text(request, "query"), texts(request, "documents")) else {
            return unread(request);
        };
        Form::Pairs { query, documents }
    }

    fn score(request: &Request) -> Form {
        let first = ["text_1", "queries", "query", "data_1"].iter().find_map(|name| texts(request, name));
        let second = ["text_2", "documents", "items", "data_2"].iter().find_map(|name| texts(request, name));
        let (Some(first), Some(second)) = (first, second) else { return unread(request) };
        match <[String; 1]>::try_from(first) {
            Ok([query]) => Form::Pairs { query, documents: second },
            // Several queries pair off with the documents: each text is read once.
            Err(first) => Form::Texts { texts: first.into_iter().chain(second).collect(), added: true, suffix: None },
        }
    }
}

impl From<Chat> for Form {
    fn from(chat: Chat) -> Self {
        Form::Chat(Box::new(chat))
    }
}

fn unread(request: &Request) -> Form {
    Form::Unread { bytes: request.body.len() }
}

/// The items of a top-level array.
pub fn values(request: &Request, name: &str) -> Option<Vec<Value>> {
    let list = from_json(raw(request, name)?).ok()?;
    Some(list.try_iter().ok()?.collect())
}

/// One text, a list of texts, or a list of objects with a `text`.
fn texts(request: &Request, name: &str) -> Option<Vec<String>> {
    let value = from_json(raw(request, name)?).ok()?;
    if let Some(one) = value.as_str() {
        return Some(vec![one.to_owned()]);
    }
    value
        .try_iter()
        .ok()?
        .map(|item| match item.as_str() {
            Some(text) => Some(text.to_owned()),
            None => item.get_attr("text").ok().and_then(|text| text.as_str().map(str::to_owned)),
        })
        .collect()
}

/// The four forms of a prompt: text, texts, token ids, lists of token ids.
fn input(raw: Option<&[u8]>, added: bool) -> Form {
    let Some(raw) = raw else { return Form::Nothing };
    let read = || -> Option<Form> {
        if raw.first() == Some(&b'"') {
            let text = serde_json::from_slice(raw).ok()?;
            return Some(Form::Texts { texts: vec![text], added, suffix: None });
        }
        let inner = raw.iter().skip(1).find(|byte| !byte.is_ascii_whitespace())?;
        match inner {
            b'"' => Some(Form::Texts { texts: serde_json::from_slice(raw).ok()?, added, suffix: None }),
            b'[' => {
                let lists: Vec<Vec<u32>> = serde_json::from_slice(raw).ok()?;
                let first = lists.first().map(|ids| id_bytes(ids)).unwrap_or_default();
                Some(Form::Ids { lengths: lists.iter().map(|ids| ids.len() as u64).collect(), first })
            }
            b'0'..=b'9' => {
                let ids: Vec<u32> = serde_json::from_slice(raw).ok()?;
                Some(Form::Ids { lengths: vec![ids.len() as u64], first: id_bytes(&ids) })
            }
            _ => None,
        }
    };
    read().unwrap_or(Form::Unread { bytes: raw.len() })
}

fn id_bytes(ids: &[u32]) -> Vec<u8> {
    ids.iter().flat_map(|id| id.to_le_bytes()).collect()
}
