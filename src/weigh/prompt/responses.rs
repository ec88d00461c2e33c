//! OpenAI's `/v1/responses` as the conversation that engines make of it.

use minijinja::value::Value;

use super::form::{Chat, raw, text, values};
use super::message::{Content, Message, read_messages};
use crate::weigh::template::dict::{Entries, from_json};
use crate::wire::Request;

/// Reads the request; `None` where it is not in the API's shape. Earlier responses that are only named by id are the
/// engine's to know.
pub fn read(request: &Request) -> Option<Chat> {
    let mut messages = Vec::new();
    if let Some(instructions) = text(request, "instructions") {
        messages.push(Message::new("system", Content::Text(Value::from(instructions))));
    }
    let input = raw(request, "input")?;
    if input.first() == Some(&b'"') {
        messages.push(Message::new("user", Content::Text(from_json(input).ok()?)));
    } else {
        for item in read_messages(input).ok()? {
            convert(item, &mut messages);
        }
    }
    let tools: Option<Vec<Value>> = values(request, "tools").map(|tools| tools.iter().map(tool).collect());
    let mut kwargs = Vec::new();
    if let Some(Ok(reasoning)) = raw(request, "reasoning").map(from_json)
        && let Ok(effort) = reasoning.get_attr("effort")
        && effort.as_str().is_some()
    {
        kwargs.push((Value::from("reasoning_effort"), effort));
    }
    Some(Chat { messages, tools: tools.filter(|tools| !tools.is_empty()), kwargs, ..Chat::default() })
}

/// Functions stand flat in this API, and under `function` in a template.
fn tool(sent: &Value) -> Value {
    let mut entries = Entries::of(sent);
    if entries.get("function").is_some() || entries.get("name").is_none() {
        return sent.clone();
    }
    entries.remove("type");
    let mut tool = Entries::default();
    tool.set("type", Value::from("function"));
    tool.set("function", entries.into_value());
    tool.into_value()
}

fn convert(item: Message, out: &mut Vec<Message>) {
    let member = |name: &str| item.entries.get(name).cloned().unwrap_or_default();
    match member("type").as_str().unwrap_or("message") {
        "function_call" => {
            let mut function = Entries::default();
            function.set("name", member("name"));
            function.set("arguments", member("arguments"));
            let mut call = Entries::default();
            call.set("id", member("call_id"));
            call.set("type", Value::from("function"));
            call.set("function", function.into_value());
            let mut message = Message::new("assistant", Content::Null);
            message.entries.set("tool_calls", Value::from(vec![call.into_value()]));
            out.push(message);
        }
        "function_call_output" => {
            let mut message = Message::new("tool", Content::Text(member("output")));
            message.entries.set("tool_call_id", member("call_id"));
            out.push(message);
        }
        "reasoning" | "item_reference" => {}
        _ => {
            let mut message = item;
            message.entries.remove("type");
            out.push(message);
        }
    }
}
