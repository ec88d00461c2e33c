//! `POST /tokenize` and `POST /v1/messages/count_tokens`, answered by the balancer itself where it has the model's own
//! tokenizer: they need no replica, so they answer while all replicas are full. Otherwise the engine is asked, as for
//! any other path.

use bytes::Bytes;
use serde_json::json;

use crate::config::Engine;
use crate::running::{Epoch, ModelEntry};
use crate::units::Tokens;
use crate::weigh::draft::{self, Draft, Drafted, Sources};
use crate::weigh::prompt::form;
use crate::weigh::weigher::WeighHints;
use crate::wire::{ApiError, Endpoint, Request};

/// Larger bodies go to an engine: so much text is encoded here without holding others up (some milliseconds at worst).
const BODY_BYTES_MAX: usize = 64 * 1024;

/// The answer's body; `None` where the request is to be forwarded.
///
/// # Errors
/// `invalid_request` where the template refuses the conversation.
pub fn answer(
    epoch: &Epoch,
    entry: &ModelEntry,
    request: &Request,
    engine: Engine,
    window: Option<Tokens>,
) -> Result<Option<Bytes>, ApiError> {
    let counting = matches!(request.endpoint, Endpoint::Tokenize | Endpoint::CountTokens);
    if !counting || request.body.len() > BODY_BYTES_MAX {
        return Ok(None);
    }
    let Some((model, loaded)) = epoch.weigher.loaded(&entry.model.name) else { return Ok(None) };
    let cache = epoch.weigher.cache();
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
