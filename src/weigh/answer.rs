//! Answers to `POST /tokenize` and `POST /v1/messages/count_tokens`, made by the balancer itself where it has the model's
//! own tokenizer: they need no replica, so they answer while all replicas are full. Otherwise the engine is asked, as for
//! any other path.

use bytes::Bytes;
use serde_json::json;

use super::draft::{self, Draft, Drafted, Sources, render};
use super::prompt::{Form, form};
use super::source::Loaded;
use super::template::RenderError;
use super::weigher::{WeighHints, Weigher};
use crate::config::{Engine, Model};
use crate::units::{ModelName, Tokens};
use crate::wire::{ApiError, Endpoint, ErrorCode, Request};

/// Larger bodies go to an engine: so much text is encoded here without holding others up (some milliseconds at worst).
const BODY_BYTES_MAX: usize = 64 * 1024;

impl Weigher {
    /// The answer's body; `None` where the request is to be forwarded.
    ///
    /// # Errors
    /// `invalid_request` where the template refuses the conversation.
    pub fn answer_here(
        &self,
        name: &ModelName,
        request: &Request,
        engine: Engine,
        window: Option<Tokens>,
    ) -> Result<Option<Bytes>, ApiError> {
        let counting = matches!(request.endpoint, Endpoint::Tokenize | Endpoint::CountTokens);
        if !counting || request.body.len() > BODY_BYTES_MAX {
            return Ok(None);
        }
        let Some((model, loaded)) = self.loaded(name) else { return Ok(None) };
        let cache = self.cache();
        let sources = Sources { model: &model, loaded: Some(&loaded), cache };
        let hints = WeighHints { engine, ..WeighHints::default() };
        let Drafted::Draft(draft) = draft::draft(&sources, request, &hints)? else { return Ok(None) };
        // What pictures cost is known exactly by the engine alone.
        if draft.media_tokens > 0 {
            return Ok(None);
        }
        let answer = match request.endpoint {
            Endpoint::CountTokens => Some(json!({"input_tokens": draft.count(cache)?.tokens})),
            _ => tokens(&draft, request, window),
        };
        Ok(answer.map(|answer| Bytes::from(answer.to_string())))
    }

    /// The text an engine makes of a request, where it is one text and its tokenizer is loaded.
    pub fn rendered(&self, model: &ModelName, request: &Request, hints: &WeighHints) -> Option<String> {
        let (config, loaded) = self.loaded(model)?;
        rendered(&config, &loaded, request, hints).ok().map(|(text, _)| text)
    }
}

/// A text's token ids, in the shape of the engine that the request's own shape is of.
fn tokens(draft: &Draft, request: &Request, window: Option<Tokens>) -> Option<serde_json::Value> {
    let [prompt] = draft.prompts.as_slice() else { return None };
    let ids = draft.tokenizer.ids(&prompt.text, prompt.added > 0).ok()?;
    if form::raw(request, "prompt").is_none() && form::raw(request, "messages").is_none() {
        // llama.cpp's: the text is in `content`. Its pieces, and special tokens read as plain text, are its own affair.
        let own =
            form::flag(request, "with_pieces") == Some(true) || form::flag(request, "parse_special") == Some(false);
        return (!own).then(|| json!({"tokens": ids}));
    }
    let texts = (form::flag(request, "return_token_strs") == Some(true)).then(|| draft.tokenizer.token_texts(&ids));
    Some(json!({"count": ids.len(), "max_model_len": window, "tokens": ids, "token_strs": texts}))
}

/// The one text of a request as the engine sees it, and whether the tokenizer's own tokens go around it.
///
/// # Errors
/// `invalid_request` where there is no such text.
fn rendered(
    config: &Model,
    loaded: &Loaded,
    request: &Request,
    hints: &WeighHints,
) -> Result<(String, bool), ApiError> {
    match Form::read(request, config)? {
        Form::Chat(chat) => {
            let Some(templates) = &loaded.templates else { return Err(no_tokenizer()) };
            let added = chat.added;
            match render(*chat, templates, config, hints.engine, request.body.len()) {
                Ok(text) => Ok((text, added)),
                Err(RenderError::Raised(text) | RenderError::Failed(text)) => {
                    Err(ApiError::new(ErrorCode::InvalidRequest, text).param("messages"))
                }
            }
        }
        Form::Texts { mut texts, added, .. } if texts.len() == 1 => Ok((texts.remove(0), added)),
        _ => Err(ApiError::new(
            ErrorCode::InvalidRequest,
            "tokenize takes one text as \"prompt\" or \"content\", or a conversation as \"messages\"",
        )
        .param("prompt")),
    }
}

fn no_tokenizer() -> ApiError {
    ApiError::new(
        ErrorCode::NoReplica,
        "this model's tokenizer is not loaded here; ask again later, or give the model one in the configuration",
    )
}
