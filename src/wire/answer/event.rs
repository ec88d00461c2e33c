//! What one event of a stream says: content, usage, an error, an end. Exact, but nothing is copied and no tree is built.

use std::ops::Range;

use crate::wire::endpoint::Endpoint;
use crate::wire::json::{self, Cursor, Kind};
use crate::wire::usage::Report;

/// Characters kept of an engine's error message: enough to tell what it was, too few to carry a prompt.
const ERROR_CHARS_MAX: usize = 300;

/// What one event said.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Meaning {
    /// Where the one text that it carried stands in its data, between the quotes: nothing of it is looked at but that it
    /// is not empty. `None` where there are several, or none.
    pub(super) text: Option<Range<usize>>,
    /// Choices that carried content.
    pub(super) contents: u64,
    /// Tokens they carried: their token ids where given, else one each.
    pub(super) tokens: u64,
    pub(super) report: Option<Report>,
    /// The usage is not a running total.
    pub(super) report_final: bool,
    pub(super) finished: bool,
    pub(super) done: bool,
    pub(super) error: Option<String>,
    /// Usage and an empty list of choices: the chunk that only `include_usage` asks for.
    pub(super) usage_only: bool,
    /// The data was not JSON.
    pub(super) broken: bool,
}

/// Reads the data of one event.
#[inline]
pub(super) fn read(endpoint: Endpoint, data: &[u8]) -> Meaning {
    let blanks = data.len() - data.trim_ascii_start().len();
    let data = data.trim_ascii();
    if data == b"[DONE]" {
        return Meaning { done: true, ..Meaning::default() };
    }
    if data.first() != Some(&b'{') {
        // llama.cpp sends `data: null` in some streams; nothing else than objects means anything.
        let broken = !data.is_empty() && data != b"null" && data.first() != Some(&b'[');
        return Meaning { broken, ..Meaning::default() };
    }
    let mut cursor = Cursor::lenient(data);
    let read = match endpoint {
        Endpoint::Responses => responses(&mut cursor),
        Endpoint::Messages => messages(&mut cursor),
        _ => chunk(&mut cursor),
    };
    let mut meaning = read.unwrap_or(Meaning { broken: true, ..Meaning::default() });
    meaning.text = meaning.text.map(|text| text.start + blanks..text.end + blanks);
    meaning
}

impl Meaning {
    /// It said nothing but a text.
    pub(super) fn is_text_alone(&self) -> bool {
        let Meaning { text, contents, report, finished, done, error, usage_only, broken, .. } = self;
        let text = text.is_some() && *contents == 1;
        text && report.is_none() && error.is_none() && !(*finished || *done || *usage_only || *broken)
    }
}

/// The texts, empty ones aside, that an event carried: where the only one stands.
#[derive(Debug, Default)]
struct Texts {
    only: Option<Range<usize>>,
    several: bool,
}

impl Texts {
    fn take(&mut self, text: Range<usize>) {
        self.several |= self.only.is_some();
        self.only = Some(text);
    }

    fn only(self) -> Option<Range<usize>> {
        self.only.filter(|_| !self.several)
    }
}

/// A chunk of chat or text completions.
fn chunk(cursor: &mut Cursor<'_>) -> json::Result<Meaning> {
    let mut meaning = Meaning::default();
    let mut choices = None;
    let mut object_error = false;
    let mut message = None;
    cursor.open()?;
    let mut first = true;
    while let Some(key) = cursor.next_key(&mut first)? {
        match cursor.slice(&key.inner) {
            b"choices" if cursor.kind()? == Kind::Array => {
                choices = Some(choices_of(cursor, &mut meaning)?);
            }
            b"usage" => meaning.report = usable(Report::read(cursor)?).or(meaning.report),
            b"error" => meaning.error = error_of(cursor)?.or(meaning.error),
            b"object" => {
                let span = cursor.skip()?;
                object_error = cursor.slice(&span) == b"\"error\"";
            }
            b"message" if cursor.kind()? == Kind::Text => message = Some(bounded_text(cursor)?),
            _ => {
                cursor.skip()?;
            }
        }
    }
    if object_error && meaning.error.is_none() {
        meaning.error = Some(message.unwrap_or_default());
    }
    meaning.usage_only = choices == Some(0) && meaning.report.is_some() && meaning.error.is_none();
    meaning.report_final = meaning.usage_only || meaning.finished;
    Ok(meaning)
}

/// Reads `choices` and returns how many there were.
fn choices_of(cursor: &mut Cursor<'_>, meaning: &mut Meaning) -> json::Result<usize> {
    cursor.open()?;
    let mut first = true;
    let mut choices = 0;
    let mut texts = Texts::default();
    while cursor.next_item(&mut first)? {
        choices += 1;
        if cursor.kind()? != Kind::Object {
            cursor.skip()?;
            continue;
        }
        let mut content = false;
        let mut ids = 0;
        cursor.open()?;
        let mut first = true;
        while let Some(key) = cursor.next_key(&mut first)? {
            match cursor.slice(&key.inner) {
                b"delta" if cursor.kind()? == Kind::Object => delta_of(cursor, &mut content, &mut ids, &mut texts)?,
                b"text" => content |= carries(cursor, &mut texts)?,
                b"token_ids" => ids = length(cursor)?,
                b"finish_reason" => {
                    let kind = cursor.kind()?;
                    meaning.finished |= kind != Kind::Null;
                    cursor.skip()?;
                }
                _ => {
                    cursor.skip()?;
                }
            }
        }
        if content || ids > 0 {
            meaning.contents += 1;
            meaning.tokens += ids.max(1);
        }
    }
    meaning.text = texts.only();
    Ok(choices)
}

fn delta_of(cursor: &mut Cursor<'_>, content: &mut bool, ids: &mut u64, texts: &mut Texts) -> json::Result<()> {
    cursor.open()?;
    let mut first = true;
    while let Some(key) = cursor.next_key(&mut first)? {
        match cursor.slice(&key.inner) {
            b"content" | b"reasoning_content" | b"reasoning" | b"refusal" => *content |= carries(cursor, texts)?,
            b"tool_calls" if cursor.kind()? == Kind::Array => {
                cursor.open()?;
                let mut first = true;
                while cursor.next_item(&mut first)? {
                    // A call that is not null carries its id, its name or a piece of its arguments.
                    *content |= cursor.kind()? == Kind::Object;
                    cursor.skip()?;
                }
            }
            b"function_call" => {
                *content |= cursor.kind()? == Kind::Object;
                cursor.skip()?;
            }
            b"token_ids" => *ids = length(cursor)?,
            _ => {
                cursor.skip()?;
            }
        }
    }
    Ok(())
}

/// Whether the value here is text, or a list, that is not empty.
#[inline]
fn carries(cursor: &mut Cursor<'_>, texts: &mut Texts) -> json::Result<bool> {
    match cursor.kind()? {
        Kind::Text => {
            let text = cursor.text()?.inner;
            let carries = !text.is_empty();
            if carries {
                texts.take(text);
            }
            Ok(carries)
        }
        Kind::Array => Ok(length(cursor)? > 0),
        _ => cursor.skip().map(|_| false),
    }
}

fn length(cursor: &mut Cursor<'_>) -> json::Result<u64> {
    if cursor.kind()? != Kind::Array {
        cursor.skip()?;
        return Ok(0);
    }
    cursor.open()?;
    let mut first = true;
    let mut items = 0;
    while cursor.next_item(&mut first)? {
        cursor.skip()?;
        items += 1;
    }
    Ok(items)
}

/// An event of the Responses API. Its type may come last.
fn responses(cursor: &mut Cursor<'_>) -> json::Result<Meaning> {
    let mut meaning = Meaning::default();
    let mut kind: &[u8] = b"";
    let mut delta = false;
    let mut message = None;
    cursor.open()?;
    let mut first = true;
    while let Some(key) = cursor.next_key(&mut first)? {
        match cursor.slice(&key.inner) {
            b"type" if cursor.kind()? == Kind::Text => {
                let text = cursor.text()?;
                kind = cursor.slice(&text.inner);
            }
            b"delta" => delta = carries(cursor, &mut Texts::default())?,
            b"error" => meaning.error = error_of(cursor)?.or(meaning.error),
            b"message" if cursor.kind()? == Kind::Text => message = Some(bounded_text(cursor)?),
            b"response" if cursor.kind()? == Kind::Object => {
                cursor.open()?;
                let mut first = true;
                while let Some(key) = cursor.next_key(&mut first)? {
                    match cursor.slice(&key.inner) {
                        b"usage" => meaning.report = usable(Report::read(cursor)?),
                        b"error" => meaning.error = error_of(cursor)?.or(meaning.error),
                        _ => {
                            cursor.skip()?;
                        }
                    }
                }
            }
            _ => {
                cursor.skip()?;
            }
        }
    }
    if delta && kind.ends_with(b".delta") {
        meaning.contents = 1;
        meaning.tokens = 1;
    }
    match kind {
        b"response.completed" | b"response.incomplete" => {
            meaning.done = true;
            meaning.finished = true;
        }
        b"response.failed" => {
            meaning.done = true;
            meaning.error.get_or_insert_with(|| "response.failed".to_owned());
        }
        b"error" => {
            meaning.error.get_or_insert_with(|| message.unwrap_or_default());
        }
        _ => {}
    }
    meaning.report_final = meaning.done;
    Ok(meaning)
}

/// An event of Anthropic's Messages API.
fn messages(cursor: &mut Cursor<'_>) -> json::Result<Meaning> {
    let mut meaning = Meaning::default();
    let mut kind: &[u8] = b"";
    let mut content = false;
    cursor.open()?;
    let mut first = true;
    while let Some(key) = cursor.next_key(&mut first)? {
        match cursor.slice(&key.inner) {
            b"type" if cursor.kind()? == Kind::Text => {
                let text = cursor.text()?;
                kind = cursor.slice(&text.inner);
            }
            b"usage" => meaning.report = usable(Report::read(cursor)?).or(meaning.report),
            b"error" => meaning.error = error_of(cursor)?.or(meaning.error),
            b"message" if cursor.kind()? == Kind::Object => {
                cursor.open()?;
                let mut first = true;
                while let Some(key) = cursor.next_key(&mut first)? {
                    match cursor.slice(&key.inner) {
                        b"usage" => meaning.report = usable(Report::read(cursor)?),
                        _ => {
                            cursor.skip()?;
                        }
                    }
                }
            }
            b"delta" if cursor.kind()? == Kind::Object => {
                cursor.open()?;
                let mut first = true;
                while let Some(key) = cursor.next_key(&mut first)? {
                    match cursor.slice(&key.inner) {
                        b"text" | b"thinking" | b"partial_json" => {
                            content |= carries(cursor, &mut Texts::default())?;
                        }
                        b"stop_reason" => {
                            meaning.finished |= cursor.kind()? == Kind::Text;
                            cursor.skip()?;
                        }
                        _ => {
                            cursor.skip()?;
                        }
                    }
                }
            }
            _ => {
                cursor.skip()?;
            }
        }
    }
    if content && kind == b"content_block_delta" {
        meaning.contents = 1;
        meaning.tokens = 1;
    }
    meaning.done = kind == b"message_stop";
    meaning.report_final = kind == b"message_delta";
    Ok(meaning)
}

fn usable(report: Report) -> Option<Report> {
    report.usage().map(|_| report)
}

/// The message of an `error` value; `None` for null and false. Its code is never read: engines have sent 200 there.
pub(super) fn error_of(cursor: &mut Cursor<'_>) -> json::Result<Option<String>> {
    match cursor.kind()? {
        Kind::Null => cursor.skip().map(|_| None),
        Kind::Bool => cursor.skip().map(|span| (cursor.slice(&span) == b"true").then(String::new)),
        Kind::Text => bounded_text(cursor).map(Some),
        Kind::Object => {
            let mut message = String::new();
            cursor.open()?;
            let mut first = true;
            while let Some(key) = cursor.next_key(&mut first)? {
                if cursor.slice(&key.inner) == b"message" && cursor.kind()? == Kind::Text {
                    message = bounded_text(cursor)?;
                } else {
                    cursor.skip()?;
                }
            }
            Ok(Some(message))
        }
        _ => cursor.skip().map(|_| Some(String::new())),
    }
}

fn bounded_text(cursor: &mut Cursor<'_>) -> json::Result<String> {
    let text = cursor.text()?;
    Ok(json::unescape(cursor.slice(&text.inner), text.escaped).chars().take(ERROR_CHARS_MAX).collect())
}
