//! Anthropic's `/v1/messages` as the conversation that engines make of it.

use minijinja::value::Value;

use super::form::{Chat, raw, values};
use super::message::{Content, Message, Part, read_messages};
use crate::weigh::media::Media;
use crate::weigh::template::dict::{Entries, from_json};
use crate::wire::Request;

/// Reads the request; `None` where it is not in the API's shape.
pub fn read(request: &Request) -> Option<Chat> {
    let mut messages = Vec::new();
    if let Some(system) = raw(request, "system") {
        messages.push(Message::new("system", Content::Text(Value::from(joined_text(&from_json(system).ok()?)))));
    }
    for message in read_messages(raw(request, "messages")?).ok()? {
        convert(message, &mut messages);
    }
    let tools: Option<Vec<Value>> = values(request, "tools").map(|tools| tools.iter().map(tool).collect());
    let mut kwargs = Vec::new();
    if let Some(Ok(thinking)) = raw(request, "thinking").map(from_json)
        && thinking.get_attr("type").is_ok_and(|kind| kind.as_str() == Some("disabled"))
    {
        kwargs.push((Value::from("enable_thinking"), Value::from(false)));
    }
    Some(Chat { messages, tools: tools.filter(|tools| !tools.is_empty()), kwargs, ..Chat::default() })
}

/// The text of a string or of text blocks, one after the other.
fn joined_text(value: &Value) -> String {
    if let Some(text) = value.as_str() {
        return text.to_owned();
    }
    let Ok(blocks) = value.try_iter() else { return String::new() };
    blocks.filter_map(|block| block.get_attr("text").ok()?.as_str().map(str::to_owned)).collect()
}

fn tool(sent: &Value) -> Value {
    let member = |name: &str| sent.get_attr(name).unwrap_or_default();
    let mut function = Entries::default();
    function.set("name", member("name"));
    if !member("description").is_undefined() {
        function.set("description", member("description"));
    }
    function.set("parameters", member("input_schema"));
    let mut tool = Entries::default();
    tool.set("type", Value::from("function"));
    tool.set("function", function.into_value());
    tool.into_value()
}

/// Splits a message of blocks: tool results become messages of their own before it, tool uses its tool calls.
fn convert(message: Message, out: &mut Vec<Message>) {
    let role = message.role().to_owned();
    let Content::Parts(blocks) = message.content else {
        out.push(message);
        return;
    };
    let (mut parts, mut calls, mut reasoning) = (Vec::new(), Vec::new(), String::new());
    for block in blocks {
        match block {
            Part::Text { sent, text } if kind(&sent) == "thinking" => {
                reasoning.push_str(text.as_str().unwrap_or_default())
            }
            Part::Other(block) if kind(&block) == "tool_use" => calls.push(call(&block)),
            Part::Other(block) if kind(&block) == "tool_result" => out.push(tool_result(&block)),
            other => parts.push(other),
        }
    }
    if parts.is_empty() && calls.is_empty() && reasoning.is_empty() {
        return;
    }
    let content = if parts.is_empty() { Content::Null } else { Content::Parts(parts) };
    let mut message = Message::new(&role, content);
    if !reasoning.is_empty() {
        message.entries.set("reasoning", Value::from(reasoning));
    }
    if !calls.is_empty() {
        message.entries.set("tool_calls", Value::from(calls));
    }
    out.push(message);
}

fn kind(block: &Value) -> String {
    block.get_attr("type").ok().and_then(|kind| kind.as_str().map(str::to_owned)).unwrap_or_default()
}

fn call(block: &Value) -> Value {
    let member = |name: &str| block.get_attr(name).unwrap_or_default();
    let mut function = Entries::default();
    function.set("name", member("name"));
    function.set("arguments", member("input"));
    let mut call = Entries::default();
    call.set("id", member("id"));
    call.set("type", Value::from("function"));
    call.set("function", function.into_value());
    call.into_value()
}

fn tool_result(block: &Value) -> Message {
    let content = block.get_attr("content").unwrap_or_default();
    let mut parts = Vec::new();
    if let Some(text) = content.as_str() {
        parts.push(Part::Text { text: Value::from(text), sent: Value::from(text) });
    } else if let Ok(items) = content.try_iter() {
        for item in items {
            match item.get_attr("text") {
                Ok(text) if text.as_str().is_some() => parts.push(Part::Text { text, sent: item }),
                _ => {
                    let bytes = item.get_attr("bytes").ok().and_then(|b| u64::try_from(b).ok()).unwrap_or(0);
                    parts.push(Part::Media(Media { kind: crate::weigh::media::MediaKind::Image, bytes, size: None }));
                }
            }
        }
    }
    let mut message = Message::new("tool", Content::Parts(parts));
    message.entries.set("tool_call_id", block.get_attr("tool_use_id").unwrap_or_default());
    message
}
