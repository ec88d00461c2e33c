//! non-stream and compression: whole answers in any pieces and codings.

use std::io::{Read, Write};
use std::time::Duration;

use crate::harness::reply::Framing;
use crate::harness::{Act, Answer, Gate, Piece, Reply, Setup, case_bytes, case_text, repeat_pattern};
use crate::runner::{Case, case};
use crate::support::*;

pub fn cases() -> Vec<Case> {
    vec![
        case!(c032, "usage at the end of a large answer in many chunks is found, and nothing waits for it"),
        case!(c033, "a replica's error is retried elsewhere, else passed on or named, never a parser's message"),
        case!(c036, "usage is found in compressed answers, and the client can decode what it gets"),
        case!(c038, "compressed requests are decoded within bounds"),
        case!(c152, "the engine's usage reaches the client untouched"),
    ]
}

async fn c032() {
    let (a, lb) = one().await;
    let body = repeat_pattern(&case_text("c032-upstream-pattern.txt"), 50_000);
    for framing in [Framing::Chunked, Framing::Length] {
        let gate = Gate::closed();
        let mut reply = Reply::new(200, "application/json").framing(framing);
        let parts: Vec<&[u8]> = body.as_bytes().chunks(1000).collect();
        for (n, part) in parts.iter().enumerate() {
            if n == parts.len() - 1 {
                reply = reply.act(Act::Hold(gate.clone()));
            }
            reply = reply.send(part.to_vec());
        }
        a.then(reply);
        let mut client = lb.ask(&case_bytes("c032-request.json")).await;
        let head = client.head().await;
        // All but the last thousand bytes are here before the last are sent.
        let mut got = Vec::new();
        while got.len() < (parts.len() - 1) * 1000 {
            match client.piece().await {
                Piece::Data(data, _) => got.extend_from_slice(&data),
                Piece::End(end, _) => panic!("{end:?} after {} bytes", got.len()),
            }
        }
        gate.open();
        got.extend_from_slice(&client.rest(head).await.body);
        same_bytes(&got, body.as_bytes());
    }
    accounted(&lb.books(), 2 * 512, 0).await;
    lb.books().settled().await;
}

async fn c033() {
    let html = Reply::whole(502, "text/html", "<html><body>Bad Gateway</body></html>");
    let empty = Reply::whole(500, "text/plain", "");
    for (status, reply) in [(503, Reply::script("c033-upstream.jsonl")), (502, html), (500, empty)] {
        // Alone: the status stays; the body is the replica's, or an error of OpenAI's shape that names the status.
        let (a, lb) = one().await;
        a.plays(reply.clone());
        let answer = lb.chat(&case_bytes("c033-request.json")).await;
        assert_eq!(answer.status, status, "{}", answer.text());
        if answer.body != reply.body() {
            let message = answer.json()["error"]["message"].as_str().expect("a message").to_owned();
            assert!(message.contains(&status.to_string()), "{message}");
            assert!(!message.contains("expected value") && !message.contains("column"), "a parser's words: {message}");
        }
        lb.books().settled().await;
        // With another replica: 503 and 502 are tried there. 500 is not: the engine may have generated.
        if status != 500 {
            let (a, b, lb) = two_with(Setup::m1().section("retries", "{budget: 100%}")).await;
            a.plays(reply.clone());
            for _ in 0..4 {
                let answer = lb.chat(&case_bytes("c033-request.json")).await;
                assert_eq!(answer.status, 200, "{}", answer.text());
                assert_eq!(answer.replica(), "b");
            }
            assert!(a.count() > 0 && b.count() == 4, "{} to a, {} to b", a.count(), b.count());
            lb.books().settled().await;
        }
    }
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(bytes).expect("memory");
    encoder.finish().expect("memory")
}

fn brotli(bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    brotli::CompressorWriter::new(&mut out, 4096, 5, 20).write_all(bytes).expect("memory");
    out
}

fn decode(answer: &Answer) -> Vec<u8> {
    let mut out = Vec::new();
    match answer.header("content-encoding") {
        None | Some("identity") => out = answer.body.to_vec(),
        Some("gzip") => {
            flate2::read::GzDecoder::new(&answer.body[..]).read_to_end(&mut out).expect("gzip");
        }
        Some("br") => {
            brotli::Decompressor::new(&answer.body[..], 4096).read_to_end(&mut out).expect("brotli");
        }
        Some("zstd") => out = zstd::decode_all(&answer.body[..]).expect("zstd"),
        Some("deflate") => {
            flate2::read::ZlibDecoder::new(&answer.body[..]).read_to_end(&mut out).expect("deflate");
        }
        Some(other) => panic!("unknown coding {other}"),
    }
    out
}

async fn c036() {
    let gz = case_bytes("c036-upstream.sse.gz");
    let mut plain = Vec::new();
    flate2::read::GzDecoder::new(&gz[..]).read_to_end(&mut plain).expect("gzip");
    let accept = [("accept-encoding", "gzip, deflate, br, zstd")];
    // An engine that compresses whatever it was asked: the bytes pass, a decoded copy is read.
    let whole = br#"{"choices":[],"usage":{"prompt_tokens":33,"completion_tokens":1,"total_tokens":34}}"#;
    for (coding, stream, document) in [
        ("gzip", gz.clone(), gzip(whole)),
        ("br", brotli(&plain), brotli(whole)),
        ("zstd", zstd::encode_all(&plain[..], 3).expect("zstd"), zstd::encode_all(&whole[..], 3).expect("zstd")),
    ] {
        let (a, lb) = one().await;
        let mut reply = Reply::new(200, "text/event-stream").header("content-encoding", coding);
        for part in random_cuts(&stream, 7, 40) {
            reply = reply.send(part);
        }
        a.then(reply);
        let answer = lb.chat_with(&accept, &case_bytes("c036-request.json")).await;
        same_bytes(&decode(&answer), &plain);
        a.then(Reply::json(200, document).header("content-encoding", coding));
        let answer = lb.chat_with(&accept, HI).await;
        same_bytes(&decode(&answer), whole);
        accounted(&lb.books(), 66, 2).await;
        lb.books().settled().await;
    }
    // One that does as asked is asked for plain text where the answer must be read.
    let (a, lb) = one().await;
    let zipped = gz.clone();
    let (zip, unzipped) = (zipped.clone(), plain.clone());
    a.replies(move |seen| {
        if seen.header("accept-encoding").is_some_and(|v| v.contains("gzip")) {
            Reply::sse(zip.clone()).header("content-encoding", "gzip")
        } else {
            Reply::sse(unzipped.clone())
        }
    });
    let answer = lb.chat_with(&accept, &case_bytes("c036-request.json")).await;
    same_bytes(&decode(&answer), &plain);
    accounted(&lb.books(), 33, 1).await;
}

async fn c038() {
    let (a, lb) = one_with(Setup::m1().section("limits", "{body_bytes: 1MiB}")).await;
    let gz = case_bytes("c038-request.json.gz");
    let zst = case_bytes("c038-request.json.zst");
    let mut plain = Vec::new();
    flate2::read::GzDecoder::new(&gz[..]).read_to_end(&mut plain).expect("gzip");
    let br = brotli(&plain);
    let mut count = 0;
    for (coding, body) in
        [("gzip", &gz), ("x-gzip", &gz), ("GZIP", &gz), ("zstd", &zst), ("br", &br), ("identity", &plain)]
    {
        let answer = lb.chat_with(&[("content-encoding", coding)], body).await;
        if answer.status == 415 {
            answer.is_error(415, "unsupported_encoding");
            panic!("{coding} should be decoded");
        }
        assert_eq!(answer.status, 200, "{coding}: {}", answer.text());
        count += 1;
        let sent = &a.seen()[count - 1];
        // Decoded, with the one splice of a stream that did not ask for usage.
        let mut expected: serde_json::Value = serde_json::from_slice(&plain).expect("JSON");
        expected["stream_options"] = serde_json::json!({"include_usage": true});
        assert_eq!(sent.json(), expected, "{coding}");
        assert_eq!(sent.header("content-length"), Some(sent.body.len().to_string().as_str()));
        assert_eq!(sent.header("content-encoding"), None, "{coding}");
    }
    // What cannot be decoded says so.
    for coding in ["snappy", "compress", "gzip, snappy"] {
        lb.chat_with(&[("content-encoding", coding)], &gz).await.is_error(415, "unsupported_encoding");
    }
    for (coding, body) in [("gzip", &b"not gzip at all"[..]), ("zstd", &b"nor zstd"[..]), ("gzip", &gz[..gz.len() - 9])]
    {
        lb.chat_with(&[("content-encoding", coding)], body).await.is_error(400, "invalid_request");
    }
    // A bomb: 64 MiB in some kilobytes.
    let bomb = gzip(&vec![b' '; 64 << 20]);
    let before = lb.rss();
    lb.chat_with(&[("content-encoding", "gzip")], &bomb).await.is_error(413, "request_too_large");
    let bomb = zstd::encode_all(&vec![b' '; 64 << 20][..], 3).expect("zstd");
    lb.chat_with(&[("content-encoding", "zstd")], &bomb).await.is_error(413, "request_too_large");
    let grown = lb.rss().saturating_sub(before);
    assert!(grown < 32 << 20, "{grown} bytes for a bomb");
    assert_eq!(a.count(), count, "none of these reached the replica");
    lb.books().settled().await;
    tokio::time::sleep(Duration::ZERO).await;
}

async fn c152() {
    let (_a, lb, answer) = replay("c152").await;
    same_bytes(&answer.body, &case_bytes("c152-upstream-body.json"));
    ended_well(&lb, 41, 7).await;
    assert_eq!(lb.books().tokens("cached_prompt").await, 32);
    // The balancer's own count is told beside it, and is not what is accounted.
    assert_eq!(answer.prompt_tokens(), chat_tokens("hi"));
}
