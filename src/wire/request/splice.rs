//! Edits spliced into the client's own bytes: everything else stays as it was sent, down to the white space.

use std::ops::Range;

use bytes::{Bytes, BytesMut};

use super::{Edits, Field, Request};
use crate::wire::json::{self, Cursor, DEPTH_MAX};

/// One replacement of a range of the body.
struct Patch {
    range: Range<usize>,
    text: String,
}

pub(super) fn splice(request: &Request, edits: &Edits) -> Bytes {
    let mut patches = if request.fields.is_empty() && request.opaque_model.is_some() {
        opaque(request, edits)
    } else if request.is_json() {
        members(request, edits)
    } else {
        Vec::new()
    };
    if patches.is_empty() {
        return request.body.clone();
    }
    // Insertions at the end of the last member sort after a patch inside it, since their range starts later.
    patches.sort_by_key(|patch| (patch.range.start, patch.range.end));
    let grown: usize = patches.iter().map(|patch| patch.text.len()).sum();
    let mut out = BytesMut::with_capacity(request.body.len() + grown);
    let mut from = 0;
    for patch in &patches {
        out.extend_from_slice(&request.body[from..patch.range.start]);
        out.extend_from_slice(patch.text.as_bytes());
        from = patch.range.end;
    }
    out.extend_from_slice(&request.body[from..]);
    out.freeze()
}

/// A form field's text has no quotes; a name with a line break could end the field, so it is left alone.
fn opaque(request: &Request, edits: &Edits) -> Vec<Patch> {
    match (&edits.model, &request.opaque_model) {
        (Some(model), Some(range)) if !model.contains(['\r', '\n']) => {
            vec![Patch { range: range.clone(), text: model.clone() }]
        }
        _ => Vec::new(),
    }
}

fn members(request: &Request, edits: &Edits) -> Vec<Patch> {
    let mut patches = Vec::new();
    let mut added = Vec::new();
    let mut removed: Vec<&str> = Vec::new();

    let mut set = |name: &str, value: String| match request.field(name) {
        Some(field) => patches.push(Patch { range: field.value.clone(), text: value }),
        None => added.push(format!("\"{name}\":{value}")),
    };
    if let Some(model) = &edits.model {
        set("model", quoted(model));
    }
    match edits.set_priority {
        Some(priority) => set("priority", priority.to_string()),
        None if edits.remove_priority => removed.push("priority"),
        None => {}
    }
    if edits.include_usage && request.field("stream_options").is_none() {
        added.push("\"stream_options\":{\"include_usage\":true}".to_owned());
    }
    if edits.remove_task_type {
        removed.push("task_type");
    }
    if edits.include_usage
        && let Some(field) = request.field("stream_options")
    {
        patches.extend(include_usage(&request.body, field));
    }

    let gone = |field: &Field| removed.contains(&field.name.as_str());
    let last_kept = request.fields.iter().rposition(|field| !gone(field));
    patches.extend(removals(&request.fields, &gone, last_kept));
    if !added.is_empty() {
        let (at, comma) = match last_kept {
            Some(kept) => (request.fields[kept].member.end, ","),
            // Nothing is kept: what is added goes where the removed members ended, or behind the opening brace.
            None => (request.fields.last().map_or_else(|| request.brace() + 1, |field| field.member.end), ""),
        };
        patches.push(Patch { range: at..at, text: format!("{comma}{}", added.join(",")) });
    }
    patches
}

/// Ranges that take members out, each with exactly one comma: a member goes with the comma behind it, but those
/// behind the last kept member go with the comma before them.
fn removals<'a>(
    fields: &'a [Field],
    gone: &'a impl Fn(&Field) -> bool,
    last_kept: Option<usize>,
) -> impl Iterator<Item = Patch> + 'a {
    let inner = last_kept.unwrap_or(0);
    let leading = (0..inner)
        .filter(|&index| gone(&fields[index]))
        .map(|index| fields[index].member.start..fields[index + 1].member.start);
    let tail = match (last_kept, fields.first(), fields.last()) {
        (Some(kept), _, Some(last)) if kept + 1 < fields.len() => Some(fields[kept].member.end..last.member.end),
        (None, Some(first), Some(last)) => Some(first.member.start..last.member.end),
        _ => None,
    };
    leading.chain(tail).map(|range| Patch { range, text: String::new() })
}

/// Sets `include_usage` in a `stream_options` that is an object or null; anything else is for the engine to refuse.
fn include_usage(body: &[u8], field: &Field) -> Vec<Patch> {
    let value = &body[field.value.clone()];
    if value == b"null" {
        return vec![Patch { range: field.value.clone(), text: "{\"include_usage\":true}".to_owned() }];
    }
    if value.first() != Some(&b'{') {
        return Vec::new();
    }
    let mut cursor = Cursor::new(body, field.value.start, DEPTH_MAX);
    let mut patches = Vec::new();
    let mut first = true;
    let mut walk = || -> json::Result<()> {
        cursor.open()?;
        while let Some(key) = cursor.next_key(&mut first)? {
            let name = json::unescape(cursor.slice(&key.inner), key.escaped);
            let range = cursor.skip()?;
            if name == "include_usage" {
                patches.push(Patch { range, text: "true".to_owned() });
            }
        }
        Ok(())
    };
    // The body was validated when it was parsed.
    if walk().is_err() {
        return Vec::new();
    }
    if patches.is_empty() {
        let at = field.value.start + 1;
        let comma = if first { "" } else { "," };
        patches.push(Patch { range: at..at, text: format!("\"include_usage\":true{comma}") });
    }
    patches
}

fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

impl Request {
    fn is_json(&self) -> bool {
        !self.fields.is_empty()
    }

    /// The opening brace of the body object.
    fn brace(&self) -> usize {
        memchr::memchr(b'{', &self.body).unwrap_or(0)
    }
}
