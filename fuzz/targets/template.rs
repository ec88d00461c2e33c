//! Any template over a conversation, and any conversation over templates: rendering ends, within its bounds, without a
//! panic, and what is rendered is counted the same in one piece and by segments.
//!
//! Input: one byte of choices, then a template or a body.

#![no_main]

use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use weighbridge::config::{ContentFormat, Engine, Model, OutputSettings, TokenizerSource};
use weighbridge::units::{ModelName, Tokens};
use weighbridge::weigh::draft::render;
use weighbridge::weigh::prompt::Form;
use weighbridge::weigh::template::{Templates, local_time};
use weighbridge::wire::{Endpoint, ParseLimits, Request};

const CONVERSATION: &[u8] = br#"{"messages":[{"role":"system","content":"s"},{"role":"user","content":[{"type":"text","text":"u"}]},
{"role":"assistant","content":null,"tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":"{\"a\":[1,2.5,null]}"}}]},
{"role":"tool","tool_call_id":"1","content":"42"},{"role":"user","content":"v"}],
"tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{"a":{"type":"array"}}}}}]}"#;

const TEMPLATES: [&str; 3] = [
    include_str!("../../tests/templates/qwen3/chat_template.jinja"),
    include_str!("../../tests/templates/gpt-oss/chat_template.jinja"),
    include_str!("../../tests/templates/mistral/chat_template.jinja"),
];

fn model() -> Model {
    Model {
        name: ModelName::from("m"),
        aliases: Vec::new(),
        adapters: Vec::new(),
        tokenizer: TokenizerSource::Approximate,
        chat_template: None,
        output: OutputSettings::default(),
        tokens_per_image: Tokens(765),
        content_format: ContentFormat::Auto,
        tools_with_choice_none: true,
    }
}

fn compiled(source: &str) -> Option<Templates> {
    let specials = vec![("bos_token".to_owned(), "<s>".to_owned()), ("eos_token".to_owned(), "</s>".to_owned())];
    Templates::new(vec![("default".to_owned(), source.to_owned())], specials, local_time()).ok()
}

fuzz_target!(|input: &[u8]| {
    static KNOWN: OnceLock<Vec<Arc<Templates>>> = OnceLock::new();
    let [choice, rest @ ..] = input else { return };
    let engine = [Engine::Auto, Engine::Vllm, Engine::LlamaCpp, Engine::Sglang][usize::from(choice >> 2 & 3)];
    let (templates, body) = if choice & 3 == 3 {
        let Ok(source) = std::str::from_utf8(rest) else { return };
        let Some(templates) = compiled(source) else { return };
        (Arc::new(templates), Bytes::from_static(CONVERSATION))
    } else {
        let known = KNOWN.get_or_init(|| TEMPLATES.iter().filter_map(|t| compiled(t)).map(Arc::new).collect());
        (Arc::clone(&known[usize::from(choice & 3) % known.len()]), Bytes::copy_from_slice(rest))
    };
    let endpoint = [Endpoint::ChatCompletions, Endpoint::Messages, Endpoint::Responses][usize::from(choice >> 4) % 3];
    let Ok(request) = Request::parse(endpoint, body, &ParseLimits { json_depth: 128 }) else { return };
    let bytes = request.body.len();
    if let Ok(Form::Chat(chat)) = Form::read(&request, &model())
        && let Ok(text) = render(*chat, &templates, &model(), engine, bytes)
    {
        assert!(text.len() <= (1 << 20) + 9 * bytes, "{} bytes rendered from {bytes}", text.len());
    }
});
