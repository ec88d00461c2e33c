//! From a conversation as sent to the variables an engine gives its template.
//!
//! Engines change messages before they render them: content lists become text, null content becomes empty, tool-call
//! arguments given as JSON text become objects, reasoning is repeated under the names that templates read. vLLM's
//! steps (its `chat_utils`) are taken for every engine but where another is known to differ.

use minijinja::value::Value;

use crate::config::Engine;
use crate::weigh::template::dict::{Entries, from_json};

use super::message::{Content, Message, Part};

/// Whose steps are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// vLLM, and whoever is not known to differ.
    Vllm,
    /// llama.cpp's server: a final assistant message is continued.
    LlamaCpp,
    /// `transformers` itself, as the exactness tests compare with it: messages as sent, but for lists of parts where a
    /// template prints text, which no engine hands on.
    Transformers,
}

impl From<Engine> for Dialect {
    fn from(engine: Engine) -> Self {
        match engine {
            Engine::LlamaCpp => Dialect::LlamaCpp,
            Engine::Auto | Engine::Vllm | Engine::Sglang | Engine::Tgi | Engine::TrtLlm | Engine::OpenAi => {
                Dialect::Vllm
            }
        }
    }
}

/// Names under which reasoning travels, in the order that wins.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// Makes one message into a template value. `parts`: the template takes content as a list.
pub fn message_value(mut message: Message, parts: bool, dialect: Dialect) -> Value {
    let role = message.role().to_owned();
    let content = content_value(message.content, parts, &role, dialect);
    match content {
        Some(content) => message.entries.set("content", content),
        None => message.entries.remove("content"),
    }
    message.entries.0.retain(|(_, value)| !value.is_none());
    if dialect != Dialect::Transformers && role == "assistant" {
        tool_calls(&mut message.entries);
    }
    let reasoning = REASONING.iter().find_map(|name| message.entries.get(name).cloned());
    if let Some(reasoning) = reasoning {
        if message.entries.get("thinking").is_none() {
            message.entries.0.insert(0, (Value::from("thinking"), reasoning.clone()));
        }
        message.entries.set("reasoning_content", reasoning);
    }
    message.entries.into_value()
}

fn content_value(content: Content, parts: bool, role: &str, dialect: Dialect) -> Option<Value> {
    let as_sent = dialect == Dialect::Transformers;
    // vLLM wraps text for templates that take lists, and joins lists of text for tools all the same.
    let wraps = parts && dialect == Dialect::Vllm;
    match content {
        Content::Absent | Content::Null if as_sent => None,
        Content::Absent | Content::Null if wraps && role != "tool" => Some(Value::from(Vec::<Value>::new())),
        Content::Absent | Content::Null => Some(Value::from("")),
        Content::Text(text) if wraps && role != "tool" => Some(Value::from(vec![text_part(text)])),
        Content::Text(text) => Some(text),
        Content::Other(value) => Some(value),
        Content::Parts(list) if as_sent && parts && !list.iter().any(|part| matches!(part, Part::Media(_))) => {
            Some(Value::from(list.into_iter().map(sent_part).collect::<Vec<_>>()))
        }
        Content::Parts(list) => {
            let only_text = list.iter().all(|part| matches!(part, Part::Text { .. }));
            if parts && !(role == "tool" && only_text) {
                Some(Value::from(list.into_iter().map(listed_part).collect::<Vec<_>>()))
            } else {
                let texts: Vec<Value> = list
                    .into_iter()
                    .filter_map(|part| match part {
                        Part::Text { text, .. } => Some(text),
                        Part::Media(_) | Part::Other(_) => None,
                    })
                    .collect();
                Some(joined(texts))
            }
        }
    }
}

/// Texts joined by newlines, as vLLM joins them; one alone is not copied.
fn joined(texts: Vec<Value>) -> Value {
    if let [only] = texts.as_slice() {
        return only.clone();
    }
    let mut all = String::new();
    for (i, text) in texts.iter().enumerate() {
        if i > 0 {
            all.push('\n');
        }
        all.push_str(text.as_str().unwrap_or_default());
    }
    Value::from(all)
}

fn text_part(text: Value) -> Value {
    Entries(vec![(Value::from("type"), Value::from("text")), (Value::from("text"), text)]).into_value()
}

fn sent_part(part: Part) -> Value {
    match part {
        Part::Text { sent, .. } | Part::Other(sent) => sent,
        Part::Media(media) => media_part(media.kind),
    }
}

fn listed_part(part: Part) -> Value {
    match part {
        Part::Text { text, .. } => text_part(text),
        Part::Other(sent) => sent,
        Part::Media(media) => media_part(media.kind),
    }
}

fn media_part(kind: crate::weigh::media::MediaKind) -> Value {
    use crate::weigh::media::MediaKind;
    let name = match kind {
        MediaKind::Image => "image",
        MediaKind::Audio => "audio",
        MediaKind::Video => "video",
        MediaKind::File | MediaKind::Unknown => "file",
    };
    Entries(vec![(Value::from("type"), Value::from(name))]).into_value()
}

/// Tool-call arguments as objects; no tool calls at all where the list is empty.
fn tool_calls(entries: &mut Entries) {
    let Some(calls) = entries.get("tool_calls").cloned() else { return };
    let Ok(items) = calls.try_iter() else { return };
    let items: Vec<Value> = items.map(call_value).collect();
    if items.is_empty() {
        entries.remove("tool_calls");
    } else {
        entries.set("tool_calls", Value::from(items));
    }
}

fn call_value(call: Value) -> Value {
    let Ok(function) = call.get_attr("function") else { return call };
    if function.as_object().is_none() {
        return call;
    }
    let arguments = function.get_attr("arguments").unwrap_or_default();
    let parsed = match arguments.as_str() {
        Some(text) => from_json(text.as_bytes()).unwrap_or_else(|_| Entries::default().into_value()),
        None if arguments.as_object().is_some() => return call,
        None => Entries::default().into_value(),
    };
    let mut function = Entries::of(&function);
    function.set("arguments", parsed);
    let mut call = Entries::of(&call);
    call.set("function", function.into_value());
    call.into_value()
}

/// Tools as vLLM's types print them: `type` and `function` first, `name`, `description` and `parameters` in this
/// order and always there, whatever else was sent after them.
pub fn vllm_tool(tool: &Value) -> Value {
    let sent = Entries::of(tool);
    let Some(function) = sent.get("function").filter(|f| f.as_object().is_some()) else { return tool.clone() };
    let function = ordered(Entries::of(function), &["name", "description", "parameters"]);
    let mut out = ordered(sent, &["type", "function"]);
    if out.get("type").is_none_or(Value::is_none) {
        out.set("type", Value::from("function"));
    }
    out.set("function", function.into_value());
    out.into_value()
}

fn ordered(mut entries: Entries, first: &[&str]) -> Entries {
    let mut out = Entries::default();
    for name in first {
        let value = entries.get(name).cloned().unwrap_or(Value::from(()));
        out.0.push((Value::from(*name), value));
        entries.remove(name);
    }
    out.0.append(&mut entries.0);
    out
}

#[cfg(test)]
mod tests {
    use super::super::message::read_messages;
    use super::*;
    use crate::weigh::template::python::str_of;

    fn prepared(raw: &str, parts: bool, dialect: Dialect) -> String {
        let messages = read_messages(raw.as_bytes()).unwrap();
        messages.into_iter().map(|m| str_of(&message_value(m, parts, dialect)).unwrap()).collect()
    }

    #[test]
    fn null_content_is_empty_and_string_arguments_become_objects() {
        let raw = r#"[{"role":"assistant","content":null,"tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":"{\"a\": 1}"}}]}]"#;
        assert_eq!(
            prepared(raw, false, Dialect::Vllm),
            "{'role': 'assistant', 'content': '', 'tool_calls': [{'id': '1', 'type': 'function', 'function': {'name': 'f', 'arguments': {'a': 1}}}]}"
        );
    }

    #[test]
    fn parts_are_joined_by_newlines_for_templates_that_print_text() {
        let raw = r#"[{"role":"user","content":[{"type":"text","text":"one"},{"type":"text","text":"two"}]}]"#;
        assert_eq!(prepared(raw, false, Dialect::Vllm), "{'role': 'user', 'content': 'one\\ntwo'}");
        assert_eq!(
            prepared(raw, true, Dialect::Vllm),
            "{'role': 'user', 'content': [{'type': 'text', 'text': 'one'}, {'type': 'text', 'text': 'two'}]}"
        );
    }

    #[test]
    fn reasoning_is_repeated_under_the_names_that_templates_read() {
        let raw = r#"[{"role":"assistant","content":"x","reasoning":"hm"}]"#;
        assert_eq!(
            prepared(raw, false, Dialect::Vllm),
            "{'thinking': 'hm', 'role': 'assistant', 'content': 'x', 'reasoning': 'hm', 'reasoning_content': 'hm'}"
        );
    }

    #[test]
    fn tools_are_printed_with_the_members_vllm_always_writes() {
        let tool =
            from_json(br#"{"function":{"strict":true,"parameters":{"b":1,"a":2},"name":"f"},"type":"function"}"#)
                .unwrap();
        assert_eq!(
            str_of(&vllm_tool(&tool)).unwrap(),
            "{'type': 'function', 'function': {'name': 'f', 'description': None, 'parameters': {'b': 1, 'a': 2}, 'strict': True}}"
        );
    }
}
