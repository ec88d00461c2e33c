//! request-parsing: odd and hostile bodies get a clear refusal, and nothing else notices.

use std::time::{Duration, Instant};

use crate::harness::{Client, Reply, Setup, case_bytes, case_text, client, ms, repeat_pattern};
use crate::runner::{Case, case};
use crate::support::*;

pub fn cases() -> Vec<Case> {
    vec![
        case!(c040, "a lone surrogate is a 400, a pair is one character"),
        case!(c042, "a repeated key is refused before anything is decided by it"),
        case!(c044, "deep nesting is refused at once, and other streams go on", alone),
        case!(c046, "nothing to answer is a 400"),
        case!(c047, "a client's template is never run, and a runaway one is bounded", alone),
        case!(c048, "large prompts pass, larger ones get a 413 that names the limit", alone),
    ]
}

async fn c040() {
    let (a, lb) = one().await;
    let in_key = br#"{"model":"m1","messages":[{"role":"user","content":"hi"}],"x\ud800":1}"#;
    let half = br#"{"model":"m1","messages":[{"role":"user","content":"\ud83d and \ude00"}]}"#;
    let stream = br#"{"model":"m1","stream":true,"messages":[{"role":"user","content":"\udfff"}]}"#;
    for body in [&case_bytes("c040-request.json")[..], &case_bytes("c040-request-tool.json"), in_key, half, stream] {
        lb.chat(body).await.is_error(400, "invalid_request");
    }
    lb.completions(br#"{"model":"m1","prompt":"\ud800"}"#).await.is_error(400, "invalid_request");
    // Bytes that are no UTF-8 are the same fault.
    lb.chat(b"{\"model\":\"m1\",\"messages\":[{\"role\":\"user\",\"content\":\"\xff\"}]}")
        .await
        .is_error(400, "invalid_request");
    assert_eq!(a.count(), 0);
    let answer = lb.chat(&case_bytes("c040-request-good.json")).await;
    assert_eq!(answer.status, 200);
    assert_eq!(answer.prompt_tokens(), chat_tokens("\u{1f600}"), "the pair is one character of four bytes");
    same_bytes(&a.only().body, &case_bytes("c040-request-good.json"));
    lb.books().settled().await;
}

async fn c042() {
    let (a, lb) = one().await;
    let escaped = br#"{"model":"m1","messages":[{"role":"user","content":"hi"}],"mod\u0065l":"m2"}"#;
    let messages = br#"{"model":"m1","messages":[{"role":"user","content":"a"}],"messages":[]}"#;
    let limit = br#"{"model":"m1","max_tokens":1,"messages":[{"role":"user","content":"a"}],"max_tokens":100000}"#;
    for body in
        [&case_bytes("c042-request.json")[..], &case_bytes("c042-request-stream.json"), escaped, messages, limit]
    {
        let answer = lb.chat(body).await;
        answer.is_error(400, "invalid_request");
    }
    assert_eq!(a.count(), 0, "nothing was sent on");
    lb.books().settled().await;
}

async fn c044() {
    let (a, lb) = one().await;
    a.plays(Reply::new(200, "text/event-stream").events(60, ms(20)));
    let mut stream = lb.ask(HI_STREAM).await;
    let head = stream.head().await;
    let objects = |depth: usize| {
        format!(
            r#"{{"model":"m1","messages":[{{"role":"user","content":"hi"}}],"x":{}1{}}}"#,
            r#"{"a":"#.repeat(depth),
            "}".repeat(depth)
        )
        .into_bytes()
    };
    let tools =
        format!(r#"{{"model":"m1","messages":[],"tools":{}{}}}"#, "[".repeat(5000), "]".repeat(5000)).into_bytes();
    let open = format!(r#"{{"model":"m1","x":{}"#, "[".repeat(100_000)).into_bytes();
    for body in [
        case_bytes("c044-request-3000.json"),
        case_bytes("c044-request-100k.json"),
        objects(3000),
        objects(100_000),
        tools,
        open,
    ] {
        let mut took = Vec::new();
        for _ in 0..3 {
            let start = Instant::now();
            let answer = lb.chat(&body).await;
            took.push(start.elapsed());
            answer.is_error(400, "invalid_request");
        }
        let took = crate::harness::median(took);
        assert!(took < ms(100), "{} bytes took {took:?}", body.len());
    }
    let answer = stream.rest(head).await;
    assert_eq!(answer.end, crate::harness::End::Clean, "the other stream went on");
    assert!(lb.exited().is_none());
    lb.books().settled().await;
}

async fn c046() {
    let (a, lb) = one().await;
    // What an engine says to what it gets; most never reaches it.
    let refusal =
        br#"{"error":{"message":"messages[0].role is missing","type":"BadRequestError","param":null,"code":400}}"#;
    a.plays(Reply::json(400, &refusal[..]));
    for file in [1, 2, 3, 4, 5, 7, 8] {
        let answer = lb.chat(&case_bytes(&format!("c046-request-{file}.json"))).await;
        assert_eq!(answer.status, 400, "{file}: {}", answer.text());
        assert!(answer.json()["error"]["message"].is_string(), "{file}: {}", answer.text());
        if file != 5 {
            answer.is_error(400, "invalid_request");
        }
    }
    let answer = lb.completions(&case_bytes("c046-completions-6.json")).await;
    assert_eq!(answer.status, 400, "{}", answer.text());
    for body in ["{\"model\":\"m1\",\"prompt\":null}", "{\"model\":\"m1\"}", "{\"model\":\"m1\",\"prompt\":{}}"] {
        lb.completions(body.as_bytes()).await.is_error(400, "invalid_request");
    }
    lb.books().settled().await;
}

async fn c047() {
    // The client's own template is not run: the count is that of the model's template.
    let (a, lb) = one().await;
    let start = Instant::now();
    let answer = lb.chat(&case_bytes("c047-request.json")).await;
    assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
    if answer.status == 200 {
        assert_eq!(answer.prompt_tokens(), chat_tokens("hi"));
        same_bytes(&a.only().body, &case_bytes("c047-request.json"));
    } else {
        answer.is_error(400, "invalid_request");
    }
    lb.books().settled().await;
    // A template of the model's own that a client's arguments make run away: an estimate within a second, and
    // nobody else waits.
    let (_a, lb) = one_with(Setup::template(&case_bytes("c047-template.jinja"))).await;
    let address = lb.address;
    let beside = tokio::spawn(async move {
        let mut worst = Duration::ZERO;
        let body = br#"{"model":"m1","messages":[{"role":"user","content":"hi"}],"chat_template_kwargs":{"n":3}}"#;
        for _ in 0..20 {
            let start = Instant::now();
            assert_eq!(client::post(address, "/v1/chat/completions", body).await.status, 200);
            worst = worst.max(start.elapsed());
            tokio::time::sleep(ms(20)).await;
        }
        worst
    });
    let long = format!(
        r#"{{"model":"m1","messages":[{{"role":"user","content":"hi"}}],"chat_template_kwargs":{{"n":1,"x":"{}"}}}}"#,
        "y".repeat(20 << 20)
    );
    for body in [&case_bytes("c047-request-kwargs.json")[..], long.as_bytes()] {
        let start = Instant::now();
        let answer = lb.chat(body).await;
        assert!(answer.status == 200 || answer.status == 400, "{} {}", answer.status, answer.text());
        // A debug build parses 20 MB slowly; the render is what is bounded.
        let limit = if body.len() < 1000 { 1 } else { 4 };
        assert!(start.elapsed() < Duration::from_secs(limit), "{} bytes took {:?}", body.len(), start.elapsed());
    }
    let worst = beside.await.expect("the other requests");
    assert!(worst < ms(500), "another request waited {worst:?}");
    lb.books().settled().await;
}

async fn c048() {
    let setup = Setup::m1().model("{name: big, tokenizer: approximate}");
    let a = crate::harness::Upstream::start().await;
    a.models(&["m1", "big"]);
    let lb = setup.replica_with("a", &a.url(), "models: [m1, big], max_context_tokens: 100000000").start().await;
    for times in [8_000, 600_000, 4_000_000] {
        let body = repeat_pattern(&case_text("c048-request-pattern.txt"), times).replace("\"m1\"", "\"big\"");
        let answer = lb.chat(body.as_bytes()).await;
        assert_eq!(answer.status, 200, "{} bytes: {}", body.len(), answer.text());
        same_bytes(&a.seen().pop().expect("a request").body, body.as_bytes());
    }
    lb.books().settled().await;
    // Over the one limit: 413 that names it, by a length and without one.
    let (a, lb) = one_with(Setup::m1().section("limits", "{body_bytes: 100KiB}")).await;
    let body = chat(&"x".repeat(200 << 10), "");
    let answer = lb.chat(&body).await;
    answer.is_error(413, "request_too_large");
    assert!(answer.text().contains("body_bytes") || answer.text().contains("102400"), "{}", answer.text());
    let mut client = Client::connect(lb.address).await;
    client.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n").await;
    let _ = client.try_send(format!("{:x}\r\n", body.len()).as_bytes()).await;
    let _ = client.try_send(&body).await;
    let _ = client.try_send(b"\r\n0\r\n\r\n").await;
    client.answer().await.is_error(413, "request_too_large");
    assert_eq!(a.count(), 0);
    lb.books().settled().await;
    // An upload on a route that needs no counting is streamed, not held: far over the limit, in little memory, and the
    // replica has its beginning before the client has sent its end.
    let (a, lb) = one().await;
    let head = "--b\r\ncontent-disposition: form-data; name=\"model\"\r\n\r\nm1\r\n--b\r\ncontent-disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\ncontent-type: audio/wav\r\n\r\n";
    let (size, part) = (200 << 20, vec![0xffu8; 1 << 20]);
    let before = lb.rss();
    let mut client = Client::connect(lb.address).await;
    let length = head.len() + size + "\r\n--b--\r\n".len();
    client.send(format!("POST /v1/audio/transcriptions HTTP/1.1\r\nhost: x\r\ncontent-type: multipart/form-data; boundary=b\r\ncontent-length: {length}\r\n\r\n{head}").as_bytes()).await;
    let mut worst = 0;
    for n in 0..size / part.len() {
        client.send(&part).await;
        if n % 20 == 0 {
            worst = worst.max(lb.rss().saturating_sub(before));
        }
    }
    client.send(b"\r\n--b--\r\n").await;
    let answer = client.answer().await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(a.only().body.len(), length);
    assert!(worst < 8 << 20, "{worst} bytes for an upload of {length}");
    lb.books().settled().await;
}
