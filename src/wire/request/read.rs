//! The one pass over a body: validates, notes top-level spans, and reads the few scalars the balancer decides by.

use bytes::Bytes;

use super::shape;
use super::{Field, ParseLimits, Request, UsageAsk};
use crate::wire::endpoint::Endpoint;
use crate::wire::error::{ApiError, ErrorCode};
use crate::wire::json::{self, Cursor, Fault, JsonError, Kind, Text};

/// Members of the top-level object; engines know about 80.
pub const TOP_LEVEL_MEMBERS_MAX: usize = 1024;

/// Answers to one prompt (`n`, `best_of`). OpenAI allows 128; more than this is a mistake or an attack, and would be
/// booked as that many sequences.
pub const SEQUENCES_MAX: u32 = 1024;

/// An `invalid_request` that names its field.
pub(super) fn invalid(param: impl Into<String>, message: impl Into<String>) -> ApiError {
    ApiError::new(ErrorCode::InvalidRequest, message).param(param)
}

/// The error for a fault in the text, naming the field it was found in.
fn malformed(body: &[u8], error: JsonError, param: Option<&str>) -> ApiError {
    let before = &body[..error.at.min(body.len())];
    let line = memchr::memchr_iter(b'\n', before).count() + 1;
    let column = before.len() - memchr::memrchr(b'\n', before).map_or(0, |at| at + 1) + 1;
    let message = match error.fault {
        Fault::Depth(_) => format!("The body is {} at byte {}.", error.fault, error.at),
        fault => format!("The body is not valid JSON: {fault} at line {line}, column {column} (byte {}).", error.at),
    };
    let built = ApiError::new(ErrorCode::InvalidRequest, message);
    match param {
        Some(param) => built.param(param),
        None => built,
    }
}

/// Where a read stopped: at broken JSON, or at a value that is not what the field takes.
pub(super) enum Stop {
    Json(JsonError),
    Api(ApiError),
}

impl From<JsonError> for Stop {
    fn from(error: JsonError) -> Self {
        Stop::Json(error)
    }
}

impl From<ApiError> for Stop {
    fn from(error: ApiError) -> Self {
        Stop::Api(error)
    }
}

/// What was read while passing, before it is put together.
#[derive(Default)]
struct Scalars {
    model: Option<String>,
    stream: bool,
    stream_options: Option<UsageAsk>,
    max_completion_tokens: Option<u64>,
    max_tokens: Option<u64>,
    max_output_tokens: Option<u64>,
    min_tokens: Option<u64>,
    ignore_eos: bool,
    n: u32,
    echo: bool,
    priority: Option<i64>,
    task_type: Option<String>,
}

pub(super) fn read(endpoint: Endpoint, body: Bytes, limits: &ParseLimits) -> Result<Request, ApiError> {
    if let Err(error) = std::str::from_utf8(&body) {
        let at = error.valid_up_to();
        return Err(ApiError::new(ErrorCode::InvalidRequest, format!("The body is not valid UTF-8 at byte {at}.")));
    }
    // A byte order mark is accepted, as vLLM and llama.cpp accept it.
    let start = if body.starts_with(b"\xEF\xBB\xBF") { 3 } else { 0 };
    let mut cursor = Cursor::new(&body, start, limits.json_depth);
    let mut fields = Vec::with_capacity(16);
    let mut scalars = Scalars::default();
    let outcome = members(endpoint, &mut cursor, &mut fields, &mut scalars);
    if let Err((stop, param)) = outcome {
        return Err(match stop {
            Stop::Json(error) => malformed(&body, error, param.as_deref()),
            Stop::Api(error) => error,
        });
    }
    refuse_repeated(&fields)?;
    shape::required(endpoint, &body, &fields)?;
    let streams = scalars.stream && matches!(endpoint, Endpoint::ChatCompletions | Endpoint::Completions);
    let usage_ask = if streams { scalars.stream_options.unwrap_or(UsageAsk::NotAsked) } else { UsageAsk::Untouched };
    let max_tokens = match endpoint {
        Endpoint::Responses => scalars.max_output_tokens.or(scalars.max_tokens),
        _ => scalars.max_completion_tokens.or(scalars.max_tokens),
    };
    Ok(Request {
        model: scalars.model,
        stream: scalars.stream,
        usage_ask,
        max_tokens,
        min_tokens: scalars.min_tokens,
        ignore_eos: scalars.ignore_eos,
        n: scalars.n.max(1),
        echo: scalars.echo,
        priority: scalars.priority,
        task_type: scalars.task_type,
        fields,
        ..Request::opaque(endpoint, body, None)
    })
}

/// Reads the top-level object; a stop carries the name of the member it happened in.
fn members(
    endpoint: Endpoint,
    cursor: &mut Cursor<'_>,
    fields: &mut Vec<Field>,
    scalars: &mut Scalars,
) -> Result<(), (Stop, Option<String>)> {
    let outside = |error: JsonError| (Stop::Json(error), None);
    if cursor.peek().is_none() {
        let error = ApiError::new(ErrorCode::InvalidRequest, "The body is empty: send a JSON object.");
        return Err((Stop::Api(error), None));
    }
    let kind = cursor.kind().map_err(outside)?;
    if kind != Kind::Object {
        let message = format!("The body must be a JSON object, found {}.", kind.name());
        return Err((Stop::Api(ApiError::new(ErrorCode::InvalidRequest, message)), None));
    }
    cursor.open().map_err(outside)?;
    let mut first = true;
    while let Some(key) = cursor.next_key(&mut first).map_err(outside)? {
        if fields.len() >= TOP_LEVEL_MEMBERS_MAX {
            let message = format!("The body has more than {TOP_LEVEL_MEMBERS_MAX} top-level fields.");
            return Err((Stop::Api(ApiError::new(ErrorCode::InvalidRequest, message)), None));
        }
        let name = json::unescape(cursor.slice(&key.inner), key.escaped).into_owned();
        let start = cursor.pos();
        match member(endpoint, &name, cursor, scalars) {
            Ok(()) => {}
            Err(stop) => return Err((stop, Some(shown(&name)))),
        }
        fields.push(Field { name, member: key.inner.start - 1..cursor.pos(), value: start..cursor.pos() });
    }
    cursor.end().map_err(outside)
}

/// A client's key as it may stand in an error: bounded.
fn shown(name: &str) -> String {
    const SHOWN_CHARS_MAX: usize = 64;
    name.chars().take(SHOWN_CHARS_MAX).collect()
}

fn member(endpoint: Endpoint, name: &str, cursor: &mut Cursor<'_>, scalars: &mut Scalars) -> Result<(), Stop> {
    match name {
        "model" => scalars.model = text_or_null(cursor, name)?,
        "task_type" => scalars.task_type = text_or_null(cursor, name)?,
        "stream" => scalars.stream = is_true(cursor)?,
        "ignore_eos" => scalars.ignore_eos = is_true(cursor)?,
        "echo" => scalars.echo = is_true(cursor)?,
        "stream_options" => scalars.stream_options = Some(stream_options(cursor)?),
        "max_tokens" => scalars.max_tokens = count(cursor)?,
        "max_completion_tokens" => scalars.max_completion_tokens = count(cursor)?,
        "max_output_tokens" => scalars.max_output_tokens = count(cursor)?,
        "min_tokens" => scalars.min_tokens = count(cursor)?,
        "n" | "best_of" => scalars.n = scalars.n.max(sequences(cursor, name)?),
        "priority" => {
            let span = cursor.skip()?;
            scalars.priority = std::str::from_utf8(cursor.slice(&span)).ok().and_then(|text| text.parse().ok());
        }
        _ => shape::member(endpoint, name, cursor)?,
    }
    Ok(())
}

fn is_true(cursor: &mut Cursor<'_>) -> Result<bool, Stop> {
    let span = cursor.skip()?;
    Ok(cursor.slice(&span) == b"true")
}

fn count(cursor: &mut Cursor<'_>) -> Result<Option<u64>, Stop> {
    let span = cursor.skip()?;
    Ok(json::count(cursor.slice(&span)))
}

/// `n` or `best_of`. A value that is no count is left for the replica to refuse.
fn sequences(cursor: &mut Cursor<'_>, name: &str) -> Result<u32, Stop> {
    match count(cursor)? {
        Some(n) if n > u64::from(SEQUENCES_MAX) => {
            Err(invalid(name, format!("{name} must be at most {SEQUENCES_MAX}, found {n}.")).into())
        }
        Some(n) => Ok(u32::try_from(n).unwrap_or(SEQUENCES_MAX)),
        None => Ok(1),
    }
}

fn text_or_null(cursor: &mut Cursor<'_>, name: &str) -> Result<Option<String>, Stop> {
    match cursor.kind()? {
        Kind::Text => {
            let Text { inner, escaped } = cursor.text()?;
            Ok(Some(json::unescape(cursor.slice(&inner), escaped).into_owned()))
        }
        Kind::Null => {
            cursor.skip()?;
            Ok(None)
        }
        kind => Err(invalid(name, format!("{name} must be a string, found {}.", kind.name())).into()),
    }
}

/// Reads `stream_options`. Of a repeated `include_usage` the last one counts, as it does in the engines.
fn stream_options(cursor: &mut Cursor<'_>) -> Result<UsageAsk, Stop> {
    match cursor.kind()? {
        Kind::Null => {
            cursor.skip()?;
            return Ok(UsageAsk::NotAsked);
        }
        Kind::Object => {}
        _ => {
            cursor.skip()?;
            return Ok(UsageAsk::Untouched);
        }
    }
    cursor.open()?;
    let mut ask = UsageAsk::NotAsked;
    let mut first = true;
    while let Some(key) = cursor.next_key(&mut first)? {
        let name = json::unescape(cursor.slice(&key.inner), key.escaped);
        let value = cursor.skip()?;
        if name == "include_usage" {
            ask = match cursor.slice(&value) {
                b"true" => UsageAsk::Asked,
                b"false" | b"null" => UsageAsk::NotAsked,
                _ => UsageAsk::Untouched,
            };
        }
    }
    Ok(ask)
}

/// With a repeated key, the balancer would decide by one value and the engine run another.
fn refuse_repeated(fields: &[Field]) -> Result<(), ApiError> {
    let mut names: Vec<&str> = fields.iter().map(|field| field.name.as_str()).collect();
    names.sort_unstable();
    match names.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => {
            let name = shown(pair[0]);
            Err(invalid(name.clone(), format!("The field \"{name}\" is given more than once: send it once.")))
        }
        None => Ok(()),
    }
}
