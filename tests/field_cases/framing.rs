//! sse-framing: events over any chunking, forwarded byte for byte.

use crate::harness::reply::DONE;
use crate::harness::{Act, Gate, Reply, case_bytes, ms};
use crate::runner::{Case, case};
use crate::support::*;

pub fn cases() -> Vec<Case> {
    vec![
        case!(c001, "characters cut between chunks arrive whole"),
        case!(c002, "CRLF streams are read and forwarded event by event"),
        case!(c004, "the data lines of one event are joined"),
        case!(c005, "comments pass as comments when they arrive"),
        case!(c007, "a last event without its blank line is read"),
        case!(c009, "any chunking gives the same bytes and the same books"),
    ]
}

async fn c001() {
    let (_a, _lb, answer) = faithful_stream("c001", 9, 2).await;
    assert!(!answer.body.windows(3).any(|w| w == [0xef, 0xbf, 0xbd]), "a replacement character");
}

async fn c002() {
    faithful_stream("c002", 5, 2).await;
    // The first event is here before the second is sent, CRLF, lone CR and a byte order mark included.
    let usage = r#"{"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":2}}"#;
    for end in ["\r\n", "\r", "\n"] {
        for bom in ["", "\u{feff}"] {
            let (a, lb) = one().await;
            let gate = Gate::closed();
            let first = format!("{bom}data: {{\"choices\":[{{\"delta\":{{\"content\":\"a\"}}}}]}}{end}{end}");
            let rest = format!("data:{usage}{end}{end}data:[DONE]{end}{end}");
            a.plays(
                Reply::new(200, "text/event-stream")
                    .send(first.clone())
                    .act(Act::Hold(gate.clone()))
                    .send(rest.clone()),
            );
            let mut client = lb.ask(&case_bytes("c002-request.json")).await;
            let head = client.head().await;
            same_bytes(&client.data().await, first.as_bytes());
            gate.open();
            same_bytes(&client.rest(head).await.body, rest.as_bytes());
            ended_well(&lb, 5, 2).await;
        }
    }
}

async fn c004() {
    faithful_stream("c004", 6, 3).await;
}

async fn c005() {
    let (a, lb, answer) = faithful_stream("c005", 4, 1).await;
    // Each comment is there when it was sent, not with the event after it.
    for ((_, arrived), sent) in answer.pieces.iter().zip(&a.only().sent) {
        let late = arrived.saturating_duration_since(*sent);
        assert!(late < ms(150), "a comment was held back for {late:?}");
    }
    let log = lb.log().to_lowercase();
    assert!(!log.contains("expected value") && !log.contains("invalid json"), "a comment was parsed as JSON: {log}");
    // A comment is nothing to hide either: not where the balancer hides the usage chunk.
    let (a, lb) = one().await;
    let gate = Gate::closed();
    a.plays(
        Reply::new(200, "text/event-stream")
            .send(": waiting\n\n")
            .send(":\n\n")
            .act(Act::Hold(gate.clone()))
            .send(DONE),
    );
    let mut client = lb.ask(HI_STREAM).await;
    let head = client.head().await;
    let mut got = client.data().await.to_vec();
    if got.len() < 14 {
        got.extend_from_slice(&client.data().await);
    }
    same_bytes(&got, b": waiting\n\n:\n\n");
    gate.open();
    client.rest(head).await;
    lb.books().settled().await;
}

async fn c007() {
    faithful_stream("c007", 12, 2).await;
    // The same where the balancer hides usage: with one newline, with none, and with the finish reason last.
    let usage = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":12,\"completion_tokens\":2}}";
    let finish = "data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}]}";
    for end in ["", "\n", "\r\n"] {
        let (a, lb) = one().await;
        a.plays(Reply::sse(format!("{finish}\n\n{usage}{end}")).act(Act::Fin));
        let answer = lb.chat(HI_STREAM).await;
        assert!(!answer.text().contains("usage"), "the usage chunk was not asked for: {}", answer.text());
        assert!(answer.text().starts_with(finish), "{}", answer.text());
        ended_well(&lb, 12, 2).await;
        let (a, lb) = one().await;
        a.plays(Reply::sse(format!("{finish}{end}")).act(Act::Fin));
        same_bytes(&lb.chat(HI_STREAM).await.body, format!("{finish}{end}").as_bytes());
        lb.books().settled().await;
        assert_eq!(lb.books().outcome("completed").await, 1);
    }
}

async fn c009() {
    faithful_stream("c009", 10, 4).await;
    let (a, lb) = one().await;
    a.plays(Reply::script("c009-upstream-bytewise.jsonl"));
    let body = case_bytes("c009-upstream-body.sse");
    let answer = lb.chat(&case_bytes("c009-request.json")).await;
    same_bytes(&answer.body, &body);
    ended_well(&lb, 10, 4).await;
    // Any framing, for a client that asked for usage and for one that did not.
    let mut hidden = None;
    for seed in 0..24 {
        let mut reply = Reply::new(200, "text/event-stream");
        for part in random_cuts(&body, seed, 1 + 16 * (seed as usize % 8)) {
            reply = reply.send(part);
        }
        a.plays(reply);
        same_bytes(&lb.chat(&case_bytes("c009-request.json")).await.body, &body);
        let answer = lb.chat(HI_STREAM).await;
        let hidden = hidden.get_or_insert_with(|| answer.body.clone());
        same_bytes(&answer.body, hidden);
    }
    accounted(&lb.books(), 10 * 49, 4 * 49).await;
    lb.books().settled().await;
}
