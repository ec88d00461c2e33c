//! A request rendered and split, with what the cache knows of it: all of weighing but the encoding.

use std::sync::Arc;

use minijinja::value::Value;

use super::count::tokenizer::Plan;
use super::count::{Coefficients, CountCache, Tokenizer};
use super::counted::{CountSource, PromptCount};
use super::media::Media;
use super::prompt::message::{Content, Part};
use super::prompt::prepare::{message_value, vllm_tool};
use super::prompt::{Chat, Dialect, Form, form, prefix};
use super::source::Loaded;
use super::template::{RenderError, Templates};
use super::weigher::WeighHints;
use crate::config::{Engine, Model, TokenizerSource};
use crate::units::Tokens;
use crate::wire::{ApiError, ErrorCode, Request};

/// Tokens that a template puts around a message, where nobody knows the template.
const TOKENS_PER_MESSAGE: u64 = 5;
/// Tokens that start the answer, where nobody knows the template.
const TOKENS_TO_ANSWER: u64 = 3;
/// What `transformers` puts behind the final message to find its end again.
const CONTINUE_TAG: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

/// One prompt of a request.
#[derive(Debug)]
pub struct DraftPrompt {
    pub text: String,
    /// Tokens beside the text's own: a BOS, the query of a pair.
    pub added: u64,
    pub plan: Plan,
}

/// A request ready to be counted.
#[derive(Debug)]
pub struct Draft {
    pub prompts: Vec<DraftPrompt>,
    /// What media parts cost, all together; they are taken to stand in the first prompt.
    pub media_tokens: u64,
    pub source: CountSource,
    /// The client's `truncate_prompt_tokens`.
    pub truncate: Option<u64>,
    /// The largest window, where one is known.
    pub window: Option<u64>,
    pub tokenizer: Arc<Tokenizer>,
}

/// A request on its way to a count.
#[derive(Debug)]
pub enum Drafted {
    /// To be counted.
    Draft(Draft),
    /// Counted already: ids, approximations, nothing at all. With the bytes that the prefix is chained over.
    Count(PromptCount, Vec<u8>),
}

/// Everything a draft is made from.
#[derive(Clone, Copy, Debug)]
pub struct Sources<'a> {
    pub model: &'a Model,
    /// `None` while the tokenizer loads, or where it failed.
    pub loaded: Option<&'a Loaded>,
    pub cache: &'a CountCache,
}

impl Draft {
    /// Bytes that must still be encoded.
    pub fn miss_bytes(&self) -> usize {
        self.prompts.iter().map(|prompt| prompt.plan.miss_bytes).sum()
    }

    /// Texts that must still be encoded.
    pub fn misses(&self) -> impl Iterator<Item = &str> + Clone {
        self.prompts.iter().flat_map(|p| p.plan.misses.iter().map(|miss| &p.text[miss.range.clone()]))
    }

    /// Refuses a prompt whose length alone proves that no window holds it.
    ///
    /// # Errors
    /// `context_length_exceeded`.
    pub fn refuse_by_length(&self) -> Result<(), ApiError> {
        let (Some(window), None) = (self.window, self.truncate) else { return Ok(()) };
        for prompt in &self.prompts {
            let least = (prompt.text.len() / self.tokenizer.token_bytes_max()) as u64;
            if least > window {
                return Err(too_long(window, least));
            }
        }
        Ok(())
    }

    /// Encodes what is left, one prompt after the other.
    ///
    /// # Errors
    /// `context_length_exceeded` as soon as a prompt has more tokens than the window.
    pub fn count(&self, cache: &CountCache) -> Result<PromptCount, ApiError> {
        let mut counts = Vec::with_capacity(self.prompts.len());
        for prompt in &self.prompts {
            let mut tokens = prompt.plan.known + prompt.added;
            for miss in &prompt.plan.misses {
                tokens += self.tokenizer.settle(&prompt.text, miss, cache);
                self.refuse_by_count(tokens)?;
            }
            counts.push(tokens);
        }
        Ok(self.total(counts.into_iter(), self.source))
    }

    /// Refuses a prompt that has so many tokens already.
    ///
    /// # Errors
    /// `context_length_exceeded`.
    pub fn refuse_by_count(&self, tokens: u64) -> Result<(), ApiError> {
        match (self.window, self.truncate, self.source) {
            // Whether a count with an estimate in it fits is decided with that in mind, by the caller.
            (_, _, CountSource::Approximate) => Ok(()),
            (Some(window), None, _) if tokens > window => Err(too_long(window, tokens)),
            _ => Ok(()),
        }
    }

    /// Estimates what is left, corrected by a few spots of it.
    pub fn approximate(&self) -> PromptCount {
        let approx = self.tokenizer.approx();
        let factor = self.tokenizer.per_estimate(self.misses());
        let counts = self.prompts.iter().map(|prompt| {
            let left = prompt.plan.misses.iter().map(|miss| {
                let text = &prompt.text[miss.range.clone()];
                // A token has a byte at least.
                (approx.weigh(text) * factor).clamp(0.0, text.len() as f64)
            });
            prompt.plan.known + prompt.added + left.sum::<f64>().round() as u64
        });
        self.total(counts, CountSource::Approximate)
    }

    /// The count of a request from its prompts' counts.
    pub fn total(&self, counts: impl Iterator<Item = u64>, source: CountSource) -> PromptCount {
        let mut total = total(counts, self.truncate, source);
        if self.media_tokens > 0 {
            total.tokens = Tokens(total.tokens.0 + self.media_tokens);
            total.longest = Tokens(total.longest.0 + self.media_tokens);
            total.source = CountSource::Approximate;
        }
        total
    }
}

fn total(counts: impl Iterator<Item = u64>, truncate: Option<u64>, source: CountSource) -> PromptCount {
    let (mut tokens, mut prompts, mut longest) = (0u64, 0u32, 0u64);
    for count in counts {
        let count = count.min(truncate.unwrap_or(u64::MAX));
        tokens += count;
        longest = longest.max(count);
        prompts = prompts.saturating_add(1);
    }
    PromptCount { tokens: Tokens(tokens), prompts: prompts.max(1), longest: Tokens(longest), source }
}

fn counted((count, bytes): (PromptCount, Vec<u8>)) -> Drafted {
    Drafted::Count(count, bytes)
}

fn too_long(window: u64, tokens: u64) -> ApiError {
    ApiError::new(
        ErrorCode::ContextLengthExceeded,
        format!(
            "The longest context of this model is {window} tokens, and the prompt has at least {tokens}; shorten it."
        ),
    )
    .param("messages")
}

/// Reads, renders and splits a request.
///
/// # Errors
/// `invalid_request` where the template refuses the conversation or the request contradicts itself;
/// `context_length_exceeded` where the prompt's length in bytes proves it.
pub fn draft(sources: &Sources<'_>, request: &Request, hints: &WeighHints) -> Result<Drafted, ApiError> {
    let read = Form::read(request, sources.model)?;
    let truncate = form::raw(request, "truncate_prompt_tokens").and_then(|raw| serde_json::from_slice(raw).ok());
    let read = match read {
        Form::Ids { lengths, first } => {
            return Ok(Drafted::Count(total(lengths.into_iter(), truncate, CountSource::TokenIds), first));
        }
        Form::Nothing => {
            return Ok(Drafted::Count(total(std::iter::once(0), None, CountSource::Tokenizer), Vec::new()));
        }
        read => read,
    };
    let tokenizer = sources.loaded.and_then(|loaded| Some((loaded, loaded.tokenizer()?)));
    let Some((loaded, tokenizer)) = tokenizer else { return Ok(counted(rough(sources, read, truncate))) };
    let new = |prompts: Vec<(String, u64)>, media_tokens| {
        let prompts = prompts
            .into_iter()
            .map(|(text, added)| DraftPrompt { plan: tokenizer.plan(&text, sources.cache), text, added })
            .collect();
        Draft {
            prompts,
            media_tokens,
            source: CountSource::Tokenizer,
            truncate,
            window: hints.window.map(|window| window.0),
            tokenizer: Arc::clone(tokenizer),
        }
    };
    let draft = match read {
        Form::Chat(chat) => {
            let Some(templates) = &loaded.templates else {
                return Ok(counted(rough(sources, Form::Chat(chat), truncate)));
            };
            let media_tokens = media_tokens(&chat, sources);
            let added = if chat.added { tokenizer.added_single() } else { 0 };
            match render(*chat, templates, sources.model, hints.engine, request.body.len()) {
                Ok(text) => new(vec![(text, added)], media_tokens),
                Err(RenderError::Raised(message)) => {
                    return Err(ApiError::new(
                        ErrorCode::InvalidRequest,
                        format!("the model's chat template refuses this conversation: {message}"),
                    )
                    .param("messages"));
                }
                Err(RenderError::Failed(_)) => {
                    return Ok(counted(rough(sources, Form::read(request, sources.model)?, truncate)));
                }
            }
        }
        Form::Texts { texts, added, suffix } => {
            let added = if added { tokenizer.added_single() } else { 0 };
            let mut draft = new(texts.into_iter().map(|text| (text, added)).collect(), 0);
            if let Some(suffix) = suffix {
                // Engines that fill in the middle put both texts into a form of their own.
                let suffix = tokenizer.count_cached(&suffix, sources.cache) + TOKENS_TO_ANSWER;
                draft.prompts.iter_mut().for_each(|prompt| prompt.added += suffix);
                draft.source = CountSource::Approximate;
            }
            draft
        }
        Form::Pairs { query, documents } if tokenizer.joins_pairs() => {
            let added = tokenizer.count_cached(&query, sources.cache) + tokenizer.added_pair();
            new(documents.into_iter().map(|text| (text, added)).collect(), 0)
        }
        Form::Pairs { query, documents } => {
            let texts = std::iter::once(query).chain(documents);
            new(texts.map(|text| (text, tokenizer.added_single())).collect(), 0)
        }
        other @ (Form::Unread { .. } | Form::Ids { .. } | Form::Nothing) => {
            return Ok(counted(rough(sources, other, truncate)));
        }
    };
    draft.refuse_by_length()?;
    Ok(Drafted::Draft(draft))
}

fn media_tokens(chat: &Chat, sources: &Sources<'_>) -> u64 {
    let per_image = sources.model.tokens_per_image.0;
    let default = super::media::MediaRules::default();
    let rules = sources.loaded.map_or(&default, |loaded| &loaded.media);
    let media = chat.messages.iter().flat_map(|message| message.media());
    media.map(|media: &Media| rules.tokens(media, per_image)).sum()
}

/// The prompt that an engine makes of a conversation.
///
/// # Errors
/// As [`Templates::render`].
pub fn render(
    mut chat: Chat,
    templates: &Templates,
    model: &Model,
    engine: Engine,
    bytes: usize,
) -> Result<String, RenderError> {
    render_as(&mut chat, templates, model, Dialect::from(engine), engine, bytes)
}

/// As [`render`], in a dialect.
///
/// # Errors
/// As [`Templates::render`].
pub fn render_as(
    chat: &mut Chat,
    templates: &Templates,
    model: &Model,
    dialect: Dialect,
    engine: Engine,
    bytes: usize,
) -> Result<String, RenderError> {
    let has_tools = chat.tools.is_some();
    let parts = templates.takes_parts(model.content_format, has_tools);
    let mut messages = std::mem::take(&mut chat.messages);
    let mut generate = chat.add_generation_prompt.unwrap_or(!chat.continue_final_message);
    let mut behind = None;
    if chat.continue_final_message {
        generate = false;
        if let Some(last) = messages.last_mut() {
            tag(&mut last.content);
        }
    } else if dialect == Dialect::LlamaCpp
        && chat.add_generation_prompt.is_none()
        && messages
            .last()
            .is_some_and(|message| message.role() == "assistant" && message.entries.get("tool_calls").is_none())
        && let Some(last) = messages.pop()
    {
        // llama.cpp's server opens the answer and puts the message's text behind it.
        let mut text = String::new();
        last.texts(&mut |part| text.push_str(part));
        behind = Some(text);
        generate = true;
    }
    let messages: Vec<Value> = messages.into_iter().map(|message| message_value(message, parts, dialect)).collect();
    let tools = chat.tools.as_ref().map(|tools| match engine {
        Engine::Vllm => Value::from(tools.iter().map(vllm_tool).collect::<Vec<_>>()),
        _ => Value::from(tools.clone()),
    });
    let mut variables: Vec<(Value, Value)> = vec![
        (Value::from("messages"), Value::from(messages)),
        (Value::from("tools"), tools.unwrap_or(Value::from(()))),
        (Value::from("documents"), chat.documents.clone().unwrap_or(Value::from(()))),
        (Value::from("add_generation_prompt"), Value::from(generate)),
    ];
    variables.append(&mut chat.kwargs);
    let mut text = templates.render(has_tools, variables, bytes)?;
    if chat.continue_final_message {
        let marker = CONTINUE_TAG.trim_end();
        let at = text
            .rfind(marker)
            .ok_or_else(|| RenderError::Failed("the template leaves the final message out".to_owned()))?;
        let kept = text[at..].starts_with(CONTINUE_TAG);
        text.truncate(at);
        if !kept {
            text.truncate(text.trim_end().len());
        }
    }
    if let Some(behind) = behind {
        text.push_str(&behind);
    }
    Ok(text)
}

/// Puts the tag behind a message's last text.
fn tag(content: &mut Content) {
    let tagged = |text: &Value| Value::from(format!("{}{CONTINUE_TAG}", text.as_str().unwrap_or_default()));
    match content {
        Content::Text(text) => *text = tagged(text),
        Content::Parts(parts) => {
            for part in parts.iter_mut().rev() {
                if let Part::Text { text, sent } = part {
                    *text = tagged(text);
                    let mut entries = super::template::dict::Entries::of(sent);
                    entries.set("text", text.clone());
                    *sent = entries.into_value();
                    return;
                }
            }
        }
        Content::Absent | Content::Null | Content::Other(_) => {}
    }
}

/// Estimates a request without rendering it. For what takes too long to count.
///
/// # Errors
/// As [`draft`], for a request that contradicts itself.
pub fn estimated(sources: &Sources<'_>, request: &Request) -> Result<(PromptCount, Vec<u8>), ApiError> {
    let truncate = form::raw(request, "truncate_prompt_tokens").and_then(|raw| serde_json::from_slice(raw).ok());
    Ok(rough(sources, Form::read(request, sources.model)?, truncate))
}

/// The approximation's coefficients where no tokenizer is loaded: of the family that the names tell of.
fn ready_made(model: &Model) -> Coefficients {
    let family = match &model.tokenizer {
        TokenizerSource::Mistral(_) => Coefficients::of_family("mistral"),
        TokenizerSource::Hub(name) | TokenizerSource::Tiktoken(name) => Coefficients::of_family(name),
        TokenizerSource::Directory(dir) => {
            dir.file_name().and_then(|name| Coefficients::of_family(&name.to_string_lossy()))
        }
        TokenizerSource::Replica | TokenizerSource::Approximate => None,
    };
    family.or_else(|| Coefficients::of_family(model.name.as_str())).unwrap_or_default()
}

/// An estimate without a template, and without a tokenizer where there is none; with the bytes that the prefix is
/// chained over.
fn rough(sources: &Sources<'_>, read: Form, truncate: Option<u64>) -> (PromptCount, Vec<u8>) {
    let tokenizer = sources.loaded.and_then(|loaded| loaded.tokenizer());
    let approx = tokenizer.map_or_else(|| ready_made(sources.model), |t| t.approx().clone());
    let tokens = |texts: &[String]| -> Vec<f64> {
        let factor = tokenizer.map_or(1.0, |t| t.per_estimate(texts.iter().map(String::as_str)));
        texts.iter().map(|text| (approx.weigh(text) * factor).clamp(0.0, text.len() as f64)).collect()
    };
    let mut bytes = String::new();
    let counts: Vec<u64> = match read {
        Form::Chat(chat) => {
            let mut texts = Vec::with_capacity(chat.messages.len() + 1);
            let mut around = media_tokens(&chat, sources) + TOKENS_TO_ANSWER;
            if let Some(tools) = &chat.tools {
                let text = tools.iter().map(|tool| tool.to_string()).collect::<Vec<_>>().join("\n");
                bytes.push_str(&text);
                texts.push(text);
            }
            for message in &chat.messages {
                around += TOKENS_PER_MESSAGE;
                bytes.push_str(message.role());
                message.texts(&mut |text| {
                    bytes.push_str(text);
                    texts.push(text.to_owned());
                });
            }
            vec![around + tokens(&texts).iter().sum::<f64>().round() as u64]
        }
        Form::Texts { texts, suffix, .. } => {
            let suffix = suffix.map_or(0.0, |text| tokens(&[text])[0]);
            bytes.push_str(texts.first().map_or("", String::as_str));
            tokens(&texts).iter().map(|count| (count + suffix).round() as u64 + 1).collect()
        }
        Form::Pairs { query, documents } => {
            let query = tokens(&[query])[0];
            tokens(&documents).iter().map(|count| (query + count).round() as u64 + TOKENS_TO_ANSWER).collect()
        }
        Form::Unread { bytes } => vec![(bytes as u64 / 4).max(1)],
        Form::Ids { lengths, first } => {
            return (total(lengths.into_iter(), truncate, CountSource::TokenIds), first);
        }
        Form::Nothing => vec![0],
    };
    (total(counts.into_iter(), truncate, CountSource::Approximate), bytes.into_bytes())
}

/// The chain over a request's first prompt, and the tokens in a block of it.
pub fn chained(model: &Model, text: &[u8], count: &PromptCount, block: Tokens) -> (Arc<[u64]>, u32) {
    let bytes = prefix::block_bytes(block);
    let first = if count.prompts > 1 { Tokens(count.tokens.0 / u64::from(count.prompts)) } else { count.tokens };
    (prefix::chain(model.name.as_str(), text, bytes), prefix::block_tokens(first, text.len(), bytes))
}
