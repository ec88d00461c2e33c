//! What reading costs: request bodies, splices, and answers event by event.
//!
//! `cargo bench --bench wire`. Parsing to a tree with serde_json stands beside ours as the yardstick.

use bytes::Bytes;
use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use weighbridge::wire::request::Edits;
use weighbridge::wire::{AnswerKind, AnswerReader, Endpoint, ParseLimits, Request};

const LIMITS: ParseLimits = ParseLimits { json_depth: 128 };

/// A conversation of `bytes` or a little more, with one message in four full of escapes, as code is.
fn chat(bytes: usize) -> Bytes {
    let prose = "The quick brown fox jumps over the lazy dog, and then it does so once more for good measure. ";
    let code = "    if (a[i] != \"x\") {\n\t\tprintf(\"%s\\n\", a[i]);\n    }\n";
    let mut messages = Vec::new();
    let mut size = 0;
    while size < bytes {
        let role = if messages.len() % 2 == 0 { "user" } else { "assistant" };
        let text = if messages.len() % 4 == 3 { code.repeat(16) } else { prose.repeat(8) };
        let message = serde_json::json!({"role": role, "content": text});
        size += message.to_string().len();
        messages.push(message);
    }
    let body = serde_json::json!({"model": "llama-3-70b", "messages": messages, "stream": true, "temperature": 0.7,
        "max_tokens": 1024, "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]});
    Bytes::from(body.to_string())
}

fn image(bytes: usize) -> Bytes {
    let url = format!("data:image/png;base64,{}", "iVBORw0KGgoAAAAN".repeat(bytes / 16));
    let body = serde_json::json!({"model": "m", "messages": [{"role": "user", "content": [
        {"type": "text", "text": "what is this"}, {"type": "image_url", "image_url": {"url": url}}]}]});
    Bytes::from(body.to_string())
}

fn requests(c: &mut Criterion) {
    let mut group = c.benchmark_group("request");
    let ids = format!("{{\"prompt\":{:?}}}", (0..100_000u32).collect::<Vec<_>>());
    for (name, endpoint, body) in [
        ("chat 1 KB", Endpoint::ChatCompletions, chat(500)),
        ("chat 60 KB", Endpoint::ChatCompletions, chat(60_000)),
        ("image 4 MB", Endpoint::ChatCompletions, image(4_000_000)),
        ("100k token ids", Endpoint::Completions, Bytes::from(ids)),
    ] {
        group.throughput(Throughput::Bytes(body.len() as u64));
        group.bench_function(format!("{name} ({} bytes)", body.len()), |b| {
            b.iter(|| Request::parse(endpoint, body.clone(), &LIMITS).expect("a good body"));
        });
    }
    let body = chat(60_000);
    group.throughput(Throughput::Bytes(body.len() as u64));
    group.bench_function("chat 60 KB, serde_json tree", |b| {
        b.iter(|| serde_json::from_slice::<serde_json::Value>(&body).expect("a good body"));
    });
    let request = Request::parse(Endpoint::ChatCompletions, body, &LIMITS).expect("a good body");
    let edits = Edits { include_usage: true, ..Edits::default() };
    group.bench_function("splice 60 KB", |b| b.iter(|| request.upstream_body(&edits)));
    group.finish();
}

const CHAT_EVENT: &str = "data: {\"id\":\"chatcmpl-81018530a5981658\",\"object\":\"chat.completion.chunk\",\
    \"created\":1795963645,\"model\":\"smollm2-135m\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\" token\"},\
    \"logprobs\":null,\"finish_reason\":null,\"token_ids\":null}]}\n\n";
const TOTALS_EVENT: &str = "data: {\"id\":\"chatcmpl-81018530a5981658\",\"object\":\"chat.completion.chunk\",\
    \"created\":1795963645,\"model\":\"smollm2-135m\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\" token\"},\
    \"logprobs\":null,\"finish_reason\":null}],\"usage\":{\"prompt_tokens\":31,\"total_tokens\":32,\
    \"completion_tokens\":1,\"completion_tokens_details\":null}}\n\n";
const RESPONSES_EVENT: &str = "event: response.output_text.delta\ndata: {\"content_index\":0,\"delta\":\" to\",\
    \"item_id\":\"msg_8addadc6ae24b0fa\",\"logprobs\":[],\"output_index\":0,\"sequence_number\":8,\
    \"type\":\"response.output_text.delta\"}\n\n";
const MESSAGES_EVENT: &str = "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"index\":0,\
    \"delta\":{\"type\":\"text_delta\",\"text\":\" for\"}}\n\n";

fn reader(endpoint: Endpoint, sse: bool, hide_usage: bool) -> AnswerReader {
    AnswerReader::new(AnswerKind { endpoint, sse, hide_usage, encoding: None, event_bytes: 10 << 20 })
}

fn answers(c: &mut Criterion) {
    let mut group = c.benchmark_group("event");
    for (name, endpoint, event, hide_usage) in [
        ("chat", Endpoint::ChatCompletions, CHAT_EVENT, false),
        ("chat, usage hidden", Endpoint::ChatCompletions, CHAT_EVENT, true),
        ("chat, running totals", Endpoint::ChatCompletions, TOTALS_EVENT, false),
        ("responses", Endpoint::Responses, RESPONSES_EVENT, false),
        ("messages", Endpoint::Messages, MESSAGES_EVENT, false),
    ] {
        let mut reader = reader(endpoint, true, hide_usage);
        let chunk = Bytes::from(event);
        group.throughput(Throughput::Bytes(chunk.len() as u64));
        group.bench_function(format!("{name} ({} bytes)", chunk.len()), |b| b.iter(|| reader.push(chunk.clone())));
    }
    let (head, tail) = CHAT_EVENT.split_at(150);
    let mut cut = reader(Endpoint::ChatCompletions, true, true);
    group.bench_function("chat, cut in two, usage hidden", |b| {
        b.iter(|| (cut.push(Bytes::from_static(head.as_bytes())), cut.push(Bytes::from_static(tail.as_bytes()))));
    });
    let long = format!("data: {{\"choices\":[{{\"delta\":{{\"content\":\"{}\"}}}}]}}\n\n", "x".repeat(1 << 20));
    let chunks: Vec<Bytes> = long.as_bytes().chunks(64 << 10).map(Bytes::copy_from_slice).collect();
    group.throughput(Throughput::Bytes(long.len() as u64));
    group.bench_function("1 MB in 64 KB chunks", |b| {
        b.iter(|| chunks.iter().map(|chunk| cut.push(chunk.clone()).len()).sum::<usize>());
    });
    group.finish();

    let mut group = c.benchmark_group("document");
    let list = "0.125,".repeat(50_000);
    let body = format!("{{\"data\":[{{\"embedding\":[{list}0.5]}}],\"usage\":{{\"prompt_tokens\":512}}}}");
    let chunks: Vec<Bytes> = body.as_bytes().chunks(64 << 10).map(Bytes::copy_from_slice).collect();
    group.throughput(Throughput::Bytes(body.len() as u64));
    group.bench_function("embeddings 300 KB", |b| {
        b.iter_batched_ref(
            || reader(Endpoint::Embeddings, false, false),
            |reader| chunks.iter().map(|chunk| reader.push(chunk.clone()).len()).sum::<usize>(),
            BatchSize::SmallInput,
        );
    });
    group.finish();
}

criterion_group!(benches, requests, answers);
criterion_main!(benches);
