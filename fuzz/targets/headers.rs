//! Any bytes as header fields, content types, redirects, codings and error bodies: read or refused, never a panic.
//!
//! Input: lines of `name: value`; the last line is the value that is not a field.

#![no_main]

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Version};
use libfuzzer_sys::fuzz_target;
use weighbridge::wire::headers::{
    Framing, Hints, RequestIds, api_key, check_size, expects_continue, framing, not_forwarded, not_returned,
    relative_location,
};
use weighbridge::wire::{Endpoint, Request, decode_request_body, endpoint, engine_error};

fuzz_target!(|input: &[u8]| {
    let lines: Vec<&[u8]> = input.split(|&b| b == b'\n').collect();
    let Some((last, lines)) = lines.split_last() else { return };
    let mut pairs = Vec::new();
    let mut headers = HeaderMap::new();
    for line in lines.iter().take(200) {
        let at = line.iter().position(|&b| b == b':').unwrap_or(line.len());
        let (name, value) = (&line[..at], line.get(at + 1..).unwrap_or_default());
        pairs.push((name, value));
        if let (Ok(name), Ok(value)) = (HeaderName::from_bytes(name), HeaderValue::from_bytes(value)) {
            headers.append(name, value);
        }
    }
    for version in [Version::HTTP_10, Version::HTTP_11, Version::HTTP_2] {
        if let Ok(Framing::Length(_) | Framing::Chunked) = framing(version, pairs.iter().copied()) {
            let named =
                |wanted: &str| pairs.iter().filter(|(name, _)| name.eq_ignore_ascii_case(wanted.as_bytes())).count();
            assert_eq!(named("content-length") + named("transfer-encoding"), 1, "exactly one framing");
        }
    }
    let request = Request::opaque(Endpoint::ChatCompletions, Bytes::new(), None);
    let hints = Hints::read(&headers, &request);
    assert!(hints.session.is_none_or(|session| session.len() <= 256));
    assert!(hints.ttft_objective.is_none_or(|objective| objective.as_secs() <= 3600));
    let ids = RequestIds::new(&headers, 7);
    assert!(HeaderValue::from_str(&ids.downstream()).is_ok() && HeaderValue::from_str(&ids.upstream(1)).is_ok());
    assert_ne!(ids.upstream(1), ids.upstream(2));
    let _ = (api_key(&headers), expects_continue(&headers), check_size(0, &headers, 1000, 20));
    for name in not_forwarded(&headers, true) {
        headers.remove(name);
    }
    assert!(api_key(&headers).is_none(), "no key is left");
    assert!(not_returned(&headers).is_empty(), "no hop-by-hop field is left");

    if let Ok(text) = std::str::from_utf8(last) {
        if let Some(path) = relative_location(text, "10.0.0.1:8000", "/base") {
            assert!(path.starts_with('/') && !path.starts_with("//"), "a rewritten redirect stays on this host");
        }
        let _ = endpoint::model_id(text);
        let _ = Request::multipart(Endpoint::AudioTranscriptions, text, Bytes::copy_from_slice(input));
        if let Ok(body) = decode_request_body(text, Bytes::copy_from_slice(input), 1 << 16) {
            assert!(body.len() <= (1 << 16).max(input.len()));
        }
    }
    for coding in ["gzip", "br", "zstd", "deflate"] {
        let _ = decode_request_body(coding, Bytes::copy_from_slice(last), 1 << 16);
    }
    for status in [200, 400, 500] {
        let _ = engine_error::judge(status, last);
    }
});
