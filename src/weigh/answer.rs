//! Answers to `POST /tokenize` and `POST /v1/messages/count_tokens`, made by the balancer itself.

use bytes::Bytes;
use serde_json::json;

use super::draft::render;
use super::prompt::{Form, form};
use super::source::Loaded;
use super::template::RenderError;
use super::weigher::{WeighHints, Weigher};
use crate::config::Model;
use crate::units::ModelName;
use crate::wire::{ApiError, ErrorCode, Request};

impl Weigher {
    /// The body of a 200 to `POST /tokenize`: vLLM's shape for `prompt` or `messages`, llama.cpp's for `content`.
    /// Takes as long as tokenizing does: for long texts, off the event loop.
    ///
    /// # Errors
    /// `invalid_request` where the request has none of these members, or the template refuses the conversation;
    /// `no_replica` while the model has no tokenizer here (the caller may let a replica answer).
    pub fn tokenize_answer(&self, model: &ModelName, request: &Request, hints: &WeighHints) -> Result<Bytes, ApiError> {
        let Some((config, loaded)) = self.loaded(model) else { return Err(no_tokenizer()) };
        let Some(tokenizer) = loaded.tokenizer() else { return Err(no_tokenizer()) };
        let (text, added) = rendered(&config, &loaded, request, hints)?;
        let ids = tokenizer
            .ids(&text, added)
            .map_err(|e| ApiError::new(ErrorCode::InvalidRequest, format!("the text cannot be tokenized: {e}")))?;
        let body = if form::raw(request, "content").is_some() {
            if form::flag(request, "with_pieces") == Some(true) {
                let pieces = tokenizer.token_texts(&ids);
                let tokens: Vec<_> =
                    ids.iter().zip(pieces).map(|(id, piece)| json!({"id": id, "piece": piece})).collect();
                json!({"tokens": tokens})
            } else {
                json!({"tokens": ids})
            }
        } else {
            let texts = (form::flag(request, "return_token_strs") == Some(true)).then(|| tokenizer.token_texts(&ids));
            json!({
                "count": ids.len(),
                "max_model_len": hints.window.map_or(0, |window| window.0),
                "tokens": ids,
                "token_strs": texts,
            })
        };
        Ok(Bytes::from(body.to_string()))
    }

    /// The text an engine makes of a request, where it is one text and its tokenizer is loaded.
    pub fn rendered(&self, model: &ModelName, request: &Request, hints: &WeighHints) -> Option<String> {
        let (config, loaded) = self.loaded(model)?;
        rendered(&config, &loaded, request, hints).ok().map(|(text, _)| text)
    }

    /// The body of a 200 to `POST /v1/messages/count_tokens`.
    ///
    /// # Errors
    /// As [`Weigher::weigh`].
    pub async fn count_tokens_answer(
        &self,
        model: &ModelName,
        request: &Request,
        hints: &WeighHints,
    ) -> Result<Bytes, ApiError> {
        // A count is asked for here, whatever its size; a window refuses nothing.
        let hints = WeighHints { window: None, ..hints.clone() };
        let weight = self.weigh(model, request, &hints).await?;
        Ok(Bytes::from(json!({"input_tokens": weight.prompt.tokens.0}).to_string()))
    }
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
