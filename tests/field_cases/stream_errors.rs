//! stream-errors: a stream that breaks is seen to break, and its replica is told apart from its client.

use std::time::Duration;

use crate::harness::{Act, Client, End, Reply, Setup, case_bytes, ms};
use crate::runner::{Case, case};
use crate::support::*;

pub fn cases() -> Vec<Case> {
    vec![
        case!(c027, "an error inside a 200 stream is a failure of its replica"),
        case!(c028, "a stream without [DONE] completes at its end"),
        case!(c029, "an upstream that dies in mid-stream is a broken end for the client, at once"),
        case!(c031, "an error's own code never becomes a label"),
    ]
}

async fn c027() {
    let (a, b, lb) = two_with(Setup::m1()).await;
    a.plays(Reply::script("c027-upstream.jsonl"));
    b.plays(Reply::script("c027-upstream.jsonl"));
    let answer = lb.chat(&case_bytes("c027-request.json")).await;
    same_bytes(&answer.body, &case_bytes("c027-upstream-body.sse"));
    assert_eq!(a.count() + b.count(), 1, "no retry: bytes were sent already");
    outcomes(&lb.books(), "upstream_error", 1).await;
    lb.books().settled().await;
    assert_eq!(lb.books().tokens("output").await, 2, "what was seen is counted");
    // As a named event, and as what other engines send.
    for error in [
        "event: error\ndata: {\"error\":{\"message\":\"x\",\"type\":\"server_error\"}}\n\n",
        "data: {\"error\":\"out of memory\"}\n\n",
        "data: {\"object\":\"error\",\"message\":\"x\",\"code\":500}\n\n",
    ] {
        let (a, lb) = one().await;
        let body = format!("data: {{\"choices\":[{{\"delta\":{{\"content\":\"a\"}}}}]}}\n\n{error}data: [DONE]\n\n");
        a.plays(Reply::sse(body.clone()));
        same_bytes(&lb.chat(HI_STREAM).await.body, body.as_bytes());
        outcomes(&lb.books(), "upstream_error", 1).await;
        lb.books().settled().await;
    }
}

async fn c028() {
    let (.., answer) = faithful_stream("c028", 6, 1).await;
    assert_eq!(answer.end, End::Clean);
}

async fn c029() {
    for (how, act) in [("reset", Act::Rst), ("closed", Act::Cut)] {
        let (a, b, lb) = two_with(Setup::m1()).await;
        for up in [&a, &b] {
            let mut script = Reply::script("c029-upstream.jsonl");
            script.acts.pop();
            up.plays(script.act(act.clone()));
        }
        let answer = lb.chat(&case_bytes("c029-request.json")).await;
        assert_ne!(answer.end, End::Clean, "{how}: a clean end would be a lie");
        let died = a.seen().iter().chain(&b.seen()).filter_map(|s| s.played).next_back().expect("it was played");
        let late = answer.end_at.saturating_duration_since(died);
        assert!(late < Duration::from_secs(1), "{how}: seen after {late:?}");
        // What came before is unharmed; a last event says what happened.
        let upstream = case_bytes("c029-upstream-body.sse");
        assert!(answer.body.starts_with(&upstream), "{how}: {}", answer.text());
        let said = &answer.text()[upstream.len()..];
        assert!(said.starts_with("data: {\"error\""), "{how}: {said:?}");
        assert_eq!(a.count() + b.count(), 1, "{how}: no retry");
        outcomes(&lb.books(), "upstream_error", 1).await;
        lb.books().settled().await;
    }
    // A whole answer that stops short of its length is broken, too.
    let (a, lb) = one().await;
    let short = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{\"id\":";
    a.plays(Reply::bare(short).act(Act::Cut));
    let mut client: Client = lb.ask(HI).await;
    match client.try_answer().await {
        Ok(answer) => assert!(answer.end != End::Clean || answer.status == 502, "{answer:?}"),
        Err(end) => assert_ne!(end, End::Clean),
    }
    outcomes(&lb.books(), "upstream_error", 1).await;
    lb.books().settled().await;
}

async fn c031() {
    for code in ["200", "-1", "\"abc\"", "999999"] {
        let (a, lb) = one().await;
        let body = format!("data: {{\"error\":{{\"message\":\"boom\",\"code\":{code}}}}}\n\n");
        a.plays(Reply::sse(body.clone()).pause(ms(1)));
        same_bytes(&lb.chat(&case_bytes("c031-request.json")).await.body, body.as_bytes());
        outcomes(&lb.books(), "upstream_error", 1).await;
        for series in lb.books().metrics().await.iter().filter(|s| s.name == "weighbridge_requests_total") {
            assert_eq!(series.labels["status"], "200", "the status that was sent: {series:?}");
        }
        lb.books().settled().await;
    }
}
