//! Answers of real engines, captured from vLLM 0.32.0 and llama-server b10068.

use super::tests::{kind, read, run, usage};
use super::*;

macro_rules! answer {
    ($name:literal) => {
        include_bytes!(concat!("../../../tests/data/answers/", $name)).as_slice()
    };
}

fn of(endpoint: Endpoint, body: &[u8]) -> Progress {
    let (sent, progress) = read(&AnswerKind { endpoint, ..kind(false) }, body);
    assert_eq!(sent, body);
    assert!(!progress.unread && progress.error.is_none());
    assert!(progress.done && progress.finished);
    progress
}

#[test]
fn chat_streams_give_as_many_pieces_as_tokens() {
    for body in [answer!("vllm-chat-stream-usage-true.sse"), answer!("llama-server-chat-stream-usage-true.sse")] {
        let progress = of(Endpoint::ChatCompletions, body);
        assert_eq!((progress.usage.map(|usage| usage.prompt), progress.output_tokens), (Some(38), 12));
        assert_eq!(progress.content_events, 12);
        assert!(progress.usage_final);
    }
    let ids = of(Endpoint::ChatCompletions, answer!("vllm-chat-return-token-ids-stream.sse"));
    assert_eq!((ids.usage, ids.output_tokens), (None, 12));
}

#[test]
fn a_hidden_usage_chunk_of_a_real_stream_leaves_the_rest_byte_for_byte() {
    for (body, keeps) in [
        (answer!("vllm-chat-stream-usage-true.sse"), "\"finish_reason\":\"length\""),
        (answer!("llama-server-chat-stream-usage-true.sse"), "\"finish_reason\":\"length\""),
        // The flag also puts running totals on every chunk, unasked: those have choices and stay.
        (answer!("vllm-admission-force-usage-stream.sse"), "\"completion_tokens\":1"),
    ] {
        let (sent, progress) = read(&kind(true), body);
        let text = std::str::from_utf8(body).unwrap();
        let wanted: String = text.split_inclusive("\n\n").filter(|event| !event.contains("\"choices\":[]")).collect();
        assert_eq!(String::from_utf8(sent).unwrap(), wanted);
        assert!(wanted.contains(keeps) && wanted.ends_with("data: [DONE]\n\n") && wanted.len() < text.len());
        assert!(progress.usage.is_some());
    }
}

#[test]
fn running_totals_are_followed_token_by_token() {
    let body = answer!("vllm-admission-force-usage-stream.sse");
    let mut reader = AnswerReader::new(kind(false));
    let mut seen = Vec::new();
    for event in std::str::from_utf8(body).unwrap().split_inclusive("\n\n") {
        reader.push(Bytes::from(event));
        seen.push((reader.progress().output_tokens, reader.progress().usage_final));
    }
    assert_eq!(seen, [(0, false), (1, false), (2, true), (2, true), (2, true)]);
}

#[test]
fn tool_calls_are_content() {
    let vllm = of(Endpoint::ChatCompletions, answer!("vllm-flags-tools-required-stream.sse"));
    assert_eq!(vllm.usage, usage(38, 24));
    assert!(vllm.content_events > 0);
    let llama = of(Endpoint::ChatCompletions, answer!("llama-server-chat-tools-required-stream.sse"));
    assert!(llama.content_events > 30 && llama.usage.is_none(), "{llama:?}");
}

#[test]
fn a_list_of_prompts_begins_with_null_and_counts_every_choice() {
    let progress = of(Endpoint::Completions, answer!("llama-server-cmpl-list-stream.sse"));
    assert_eq!(progress.content_events, 12);
}

#[test]
fn responses_streams_end_without_done() {
    for body in [answer!("vllm-responses-stream.sse"), answer!("llama-server-responses-stream.sse")] {
        let progress = of(Endpoint::Responses, body);
        assert_eq!((progress.content_events, progress.output_tokens), (8, 8));
        assert_eq!(progress.usage.map(|usage| (usage.prompt, usage.output)), Some((32, 8)));
        assert!(progress.usage_final);
    }
}

#[test]
fn messages_streams_give_the_prompt_first_and_the_output_last() {
    for (body, cached) in [
        (answer!("vllm-anthropic-messages-stream.sse"), 0),
        // llama-server counts 37 cached tokens beside one that is not.
        (answer!("llama-server-anthropic-messages-stream.sse"), 37),
    ] {
        let progress = of(Endpoint::Messages, body);
        assert_eq!(progress.content_events, 8);
        assert_eq!(progress.usage, Some(Usage { prompt: 38, cached_prompt: cached, output: 8, reasoning: 0 }));
        let start = body.windows(2).position(|pair| pair == b"\n\n").unwrap() + 2;
        let (_, early) = run(&AnswerKind { endpoint: Endpoint::Messages, ..kind(false) }, &body[..start], &[start]);
        assert_eq!((early.usage.map(|usage| usage.prompt), early.usage_final), (Some(38), false));
    }
}

#[test]
fn documents_of_each_api_are_read() {
    let document = |endpoint, body| {
        let (sent, progress) = read(&AnswerKind { endpoint, sse: false, ..kind(false) }, body);
        assert_eq!(sent, body);
        assert!(progress.done && progress.finished && progress.usage_final && progress.error.is_none());
        progress.usage.map(|usage| (usage.prompt, usage.cached_prompt, usage.output))
    };
    let chat = document(Endpoint::ChatCompletions, answer!("vllm-flags-prefix2.json")).unwrap();
    assert_eq!((chat.0, chat.1), (191, 128));
    assert_eq!(document(Endpoint::Responses, answer!("vllm-responses.json")), Some((32, 0, 8)));
    assert_eq!(document(Endpoint::Messages, answer!("llama-server-anthropic-messages.json")), Some((38, 24, 8)));
}
