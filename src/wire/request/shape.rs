//! What each endpoint's prompt must look like: the checks that every engine would make, made before anything is booked.
//!
//! Only the outer shape is checked (a list, not empty, of objects with a role). What engines disagree about is left to
//! them: the request is forwarded as it is.

use super::Field;
use super::read::{Stop, invalid};
use crate::wire::endpoint::Endpoint;
use crate::wire::error::ApiError;
use crate::wire::json::{self, Cursor, Kind};

/// Reads a top-level member that is not one of the scalars, checking it where the endpoint gives it a meaning.
pub(super) fn member(endpoint: Endpoint, name: &str, cursor: &mut Cursor<'_>) -> Result<(), Stop> {
    match (endpoint, name) {
        (_, "messages") => messages(cursor),
        (Endpoint::Completions, "prompt") => prompts(cursor, name),
        (Endpoint::Embeddings | Endpoint::Classify, "input") => inputs(cursor, name),
        (Endpoint::Responses, "input") => text_or_list(cursor, name),
        (Endpoint::Rerank, "documents") => list(cursor, name),
        (_, "chat_template") => refused(cursor, name),
        (_, "chat_template_kwargs") => template_arguments(cursor, name),
        _ => cursor.skip().map(|_| ()).map_err(Stop::Json),
    }
}

/// Checks that the endpoint's prompt is there, in one of the forms that its engines know.
pub(super) fn required(endpoint: Endpoint, body: &[u8], fields: &[Field]) -> Result<(), ApiError> {
    let given =
        |name: &str| fields.iter().any(|field| field.name == name && &body[field.value.clone()] != b"null".as_slice());
    let one_of = |names: &[&str]| match names.iter().any(|name| given(name)) {
        true => Ok(()),
        false => Err(invalid(names[0], format!("The field \"{}\" is missing or null.", names[0]))),
    };
    match endpoint {
        Endpoint::ChatCompletions | Endpoint::Messages | Endpoint::CountTokens => one_of(&["messages"]),
        Endpoint::Completions => one_of(&["prompt", "prompt_embeds"]),
        Endpoint::Embeddings => one_of(&["input", "messages"]),
        Endpoint::Classify => one_of(&["input", "inputs", "messages"]),
        Endpoint::Responses => one_of(&["input", "prompt"]),
        Endpoint::Rerank => one_of(&["query"]).and_then(|()| one_of(&["documents", "texts"])),
        Endpoint::Score => one_of(&["text_1", "queries", "query", "data_1"])
            .and_then(|()| one_of(&["text_2", "documents", "data_2", "items", "texts"])),
        Endpoint::Tokenize => one_of(&["prompt", "messages", "content", "text"]),
        Endpoint::Detokenize => one_of(&["tokens"]),
        Endpoint::AudioSpeech => one_of(&["input"]),
        Endpoint::AudioTranscriptions | Endpoint::AudioTranslations => Ok(()),
    }
}

fn wrong(name: impl Into<String>, wanted: &str, found: Kind) -> Stop {
    let name = name.into();
    let message = format!("{name} must be {wanted}, found {}.", found.name());
    invalid(name, message).into()
}

fn empty(name: &str) -> Stop {
    invalid(name, format!("{name} must not be empty.")).into()
}

/// A client's chat template could loop or allocate without end while it renders, in the engine and here.
fn refused(cursor: &mut Cursor<'_>, name: &str) -> Result<(), Stop> {
    if cursor.kind()? == Kind::Null {
        return cursor.skip().map(|_| ()).map_err(Stop::Json);
    }
    let message = format!("{name} is not accepted from clients: the model's own template is used. Remove the field.");
    Err(invalid(name, message).into())
}

/// Template arguments pass, except those by which engines were talked into another template.
fn template_arguments(cursor: &mut Cursor<'_>, name: &str) -> Result<(), Stop> {
    match cursor.kind()? {
        Kind::Object => {}
        Kind::Null => return cursor.skip().map(|_| ()).map_err(Stop::Json),
        kind => return Err(wrong(name, "an object", kind)),
    }
    cursor.open()?;
    let mut first = true;
    while let Some(key) = cursor.next_key(&mut first)? {
        let argument = json::unescape(cursor.slice(&key.inner), key.escaped);
        if matches!(argument.as_ref(), "chat_template" | "tokenize") {
            let argument = format!("{name}.{argument}");
            let message = format!("{argument} is not accepted from clients. Remove the field.");
            return Err(invalid(argument, message).into());
        }
        cursor.skip()?;
    }
    Ok(())
}

fn messages(cursor: &mut Cursor<'_>) -> Result<(), Stop> {
    match cursor.kind()? {
        Kind::Array => cursor.open()?,
        Kind::Null => return cursor.skip().map(|_| ()).map_err(Stop::Json),
        kind => return Err(wrong("messages", "a list of messages", kind)),
    }
    let mut first = true;
    let mut index = 0usize;
    while cursor.next_item(&mut first)? {
        match cursor.kind()? {
            Kind::Object => message(cursor, index)?,
            kind => return Err(wrong(format!("messages[{index}]"), "an object", kind)),
        }
        index += 1;
    }
    if index == 0 { Err(empty("messages")) } else { Ok(()) }
}

fn message(cursor: &mut Cursor<'_>, index: usize) -> Result<(), Stop> {
    cursor.open()?;
    let mut role = false;
    let mut first = true;
    while let Some(key) = cursor.next_key(&mut first)? {
        match json::unescape(cursor.slice(&key.inner), key.escaped).as_ref() {
            "role" => match cursor.kind()? {
                Kind::Text => role = true,
                kind => return Err(wrong(format!("messages[{index}].role"), "a string", kind)),
            },
            "content" => match cursor.kind()? {
                Kind::Text | Kind::Array | Kind::Null => {}
                kind => return Err(wrong(format!("messages[{index}].content"), "a string or a list of parts", kind)),
            },
            _ => {}
        }
        cursor.skip().map_err(|error| located(error, index))?;
    }
    if role {
        return Ok(());
    }
    let name = format!("messages[{index}].role");
    let message = format!("{name} is missing: every message has a role, such as \"user\".");
    Err(invalid(name, message).into())
}

/// A lone surrogate is named with its message: clients send them from consoles and file names, deep in long bodies.
fn located(error: json::JsonError, index: usize) -> Stop {
    match error.fault {
        json::Fault::Surrogate => {
            let message =
                format!("The body is not valid JSON: {} at byte {}. Replace it before sending.", error.fault, error.at);
            invalid(format!("messages[{index}]"), message).into()
        }
        _ => error.into(),
    }
}

/// A completion's prompt: text, a list of texts, a list of token ids, or a list of such lists.
fn prompts(cursor: &mut Cursor<'_>, name: &str) -> Result<(), Stop> {
    const WANTED: &str = "a string, a list of strings, a list of token ids, or a list of lists of token ids";
    match cursor.kind()? {
        Kind::Text => {
            if cursor.text()?.inner.is_empty() {
                return Err(empty(name));
            }
            return Ok(());
        }
        Kind::Null => return cursor.skip().map(|_| ()).map_err(Stop::Json),
        Kind::Array => cursor.open()?,
        kind => return Err(wrong(name, WANTED, kind)),
    }
    let mut first = true;
    let mut index = 0usize;
    let mut form = None;
    while cursor.next_item(&mut first)? {
        let kind = cursor.kind()?;
        if *form.get_or_insert(kind) != kind || matches!(kind, Kind::Object | Kind::Bool | Kind::Null) {
            let item = format!("{name}[{index}]");
            return Err(wrong(item, &format!("of one kind with the others ({name} is {WANTED})"), kind));
        }
        match kind {
            Kind::Array => token_ids(cursor, &format!("{name}[{index}]"))?,
            Kind::Number => token_id(cursor, name, index)?,
            _ => {
                cursor.skip()?;
            }
        }
        index += 1;
    }
    if index == 0 { Err(empty(name)) } else { Ok(()) }
}

fn token_ids(cursor: &mut Cursor<'_>, name: &str) -> Result<(), Stop> {
    cursor.open()?;
    let mut first = true;
    let mut index = 0usize;
    while cursor.next_item(&mut first)? {
        match cursor.kind()? {
            Kind::Number => token_id(cursor, name, index)?,
            kind => return Err(wrong(format!("{name}[{index}]"), "a token id", kind)),
        }
        index += 1;
    }
    if index == 0 { Err(empty(name)) } else { Ok(()) }
}

fn token_id(cursor: &mut Cursor<'_>, name: &str, index: usize) -> Result<(), Stop> {
    let span = cursor.skip()?;
    if json::count(cursor.slice(&span)).is_some() {
        return Ok(());
    }
    let item = format!("{name}[{index}]");
    let message = format!("{item} must be a token id: a whole number, not negative.");
    Err(invalid(item, message).into())
}

/// Input to be embedded or classified: as prompts, or objects (multimodal parts) that only some engines know.
fn inputs(cursor: &mut Cursor<'_>, name: &str) -> Result<(), Stop> {
    let mut ahead = cursor.clone();
    if ahead.kind()? == Kind::Array {
        ahead.open()?;
        if ahead.next_item(&mut true)? && ahead.kind()? == Kind::Object {
            return cursor.skip().map(|_| ()).map_err(Stop::Json);
        }
    }
    prompts(cursor, name)
}

fn text_or_list(cursor: &mut Cursor<'_>, name: &str) -> Result<(), Stop> {
    match cursor.kind()? {
        Kind::Text | Kind::Null => cursor.skip().map(|_| ()).map_err(Stop::Json),
        Kind::Array => list(cursor, name),
        kind => Err(wrong(name, "a string or a list", kind)),
    }
}

fn list(cursor: &mut Cursor<'_>, name: &str) -> Result<(), Stop> {
    match cursor.kind()? {
        Kind::Array => cursor.open()?,
        // vLLM takes an object of parts in place of a list of documents.
        Kind::Null | Kind::Object | Kind::Text => return cursor.skip().map(|_| ()).map_err(Stop::Json),
        kind => return Err(wrong(name, "a list", kind)),
    }
    let mut first = true;
    let mut items = 0usize;
    while cursor.next_item(&mut first)? {
        cursor.skip()?;
        items += 1;
    }
    if items == 0 { Err(empty(name)) } else { Ok(()) }
}
