//! Any bytes as an answer: what is not hidden is forwarded byte for byte, and any chunking reads the same.
//!
//! Input: one byte of choices, one of the length of chunks, then the body.

#![no_main]

use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use weighbridge::wire::{AnswerKind, AnswerReader, Endpoint, Progress};

const ENDPOINTS: [Endpoint; 4] =
    [Endpoint::ChatCompletions, Endpoint::Completions, Endpoint::Responses, Endpoint::Messages];
const ENCODINGS: [Option<&str>; 8] = [None, None, None, None, Some("gzip"), Some("br"), Some("zstd"), Some("deflate")];

fn read(kind: &AnswerKind, body: &[u8], cut: usize) -> (Vec<u8>, Progress) {
    let mut reader = AnswerReader::new(kind.clone());
    let mut sent = Vec::with_capacity(body.len());
    for chunk in body.chunks(cut.max(1)) {
        sent.extend_from_slice(&reader.push(Bytes::copy_from_slice(chunk)));
    }
    sent.extend_from_slice(&reader.finish());
    (sent, reader.progress().clone())
}

fuzz_target!(|input: &[u8]| {
    let [choice, cut, body @ ..] = input else { return };
    let kind = AnswerKind {
        endpoint: ENDPOINTS[usize::from(choice & 3)],
        sse: choice >> 2 & 1 == 0,
        hide_usage: false,
        encoding: ENCODINGS[usize::from(choice >> 3 & 7)].map(str::to_owned),
        event_bytes: 1 << 20,
    };
    let cut = usize::from(*cut);
    let (sent, progress) = read(&kind, body, cut);
    assert_eq!(sent, body, "forwarded bytes equal the input");
    if kind.encoding.is_some() {
        return;
    }
    assert_eq!(progress, read(&kind, body, body.len()).1, "any chunking reads the same");

    let hiding = AnswerKind { hide_usage: true, ..kind };
    let (shown, hidden) = read(&hiding, body, cut);
    assert_eq!(hidden, progress, "hiding changes what is sent, not what is read");
    let mut rest = body.iter();
    assert!(shown.iter().all(|byte| rest.any(|b| b == byte)), "hiding only takes out");
});
