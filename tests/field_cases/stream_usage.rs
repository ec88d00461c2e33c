//! stream-usage: what an engine reports, read once and right; what it does not report, estimated and marked.

use std::time::Duration;

use crate::harness::{Reply, case_bytes, ms, within};
use crate::runner::{Case, case};
use crate::support::*;

pub fn cases() -> Vec<Case> {
    vec![
        case!(c011, "usage null and usage {} are not usage"),
        case!(c012, "running totals replace one another"),
        case!(c014, "usage after the finish reason is read, and the load stays booked until then"),
        case!(c015, "a stream without usage is counted by its content events and marked estimated"),
        case!(c017, "cached tokens are a part of the prompt"),
        case!(c018, "reasoning tokens are a part of the output"),
        case!(c020, "nulls where objects should be change nothing"),
    ]
}

async fn c011() {
    faithful_stream("c011", 21, 3).await;
}

async fn c012() {
    let (a, ..) = faithful_stream("c012", 100, 3).await;
    same_bytes(&a.only().body, &case_bytes("c012-request.json"));
}

async fn c014() {
    let (a, lb) = one().await;
    a.plays(Reply::script("c014-upstream.jsonl"));
    let mut client = lb.ask(&case_bytes("c014-request.json")).await;
    let head = client.head().await;
    let mut so_far = Vec::new();
    while !String::from_utf8_lossy(&so_far).contains("\"finish_reason\":\"") {
        so_far.extend_from_slice(&client.data().await);
    }
    assert_eq!(lb.books().in_flight("a").await, 1, "booked until the end of the stream");
    assert!(lb.books().replica("a").await["booked_kv_tokens"].as_u64() > Some(0), "its memory is still taken");
    let rest = client.rest(head).await;
    so_far.extend_from_slice(&rest.body);
    same_bytes(&so_far, &case_bytes("c014-upstream-body.sse"));
    ended_well(&lb, 30, 4).await;
}

async fn c015() {
    let (_a, lb, answer) = replay("c015").await;
    same_bytes(&answer.body, &case_bytes("c015-upstream-body.sse"));
    lb.books().settled().await;
    let prompt = answer.prompt_tokens();
    assert_eq!(prompt, chat_tokens("hi"));
    let mut output = 0;
    within(Duration::from_secs(2), async || {
        output = lb.books().tokens("output").await;
        output > 0
    })
    .await;
    // Reasoning, content, a function's name and its arguments: all of them are tokens.
    let body = answer.text();
    let events = ["\"reasoning_content\":\"", "\"reasoning\":\"", "\"content\":\"", "\"arguments\":\""];
    let expected = events.iter().filter(|e| body.contains(*e)).count() as u64;
    assert!(output >= expected, "{output} output tokens of {expected} kinds of content");
    assert_eq!(lb.books().tokens("prompt").await, prompt, "the balancer's own count");
    let reported = lb.books().metric("weighbridge_tokens_total", &[("kind", "output"), ("source", "engine")]).await;
    assert_eq!(reported, 0.0, "nothing was reported");
    let estimated = lb.books().metric("weighbridge_tokens_total", &[("kind", "output"), ("source", "estimate")]).await;
    assert_eq!(estimated as u64, output, "marked as estimated");
}

async fn c017() {
    let (_a, lb, _) = faithful_stream("c017", 1000, 2).await;
    assert_eq!(lb.books().tokens("cached_prompt").await, 960);
}

async fn c018() {
    let (_a, lb, answer) = replay("c018").await;
    same_bytes(&answer.body, &case_bytes("c018-upstream-body.json"));
    ended_well(&lb, 25, 73).await;
    assert_eq!(lb.books().tokens("reasoning").await, 70);
}

async fn c020() {
    let (_a, lb, _) = faithful_stream("c020", 5, 2).await;
    assert!(!lb.log().contains("panicked"), "{}", lb.log());
    // Whatever stands where something else should: read on, forward unchanged.
    for odd in [
        "[]",
        "null",
        "1",
        "\"x\"",
        "{}",
        "{\"choices\":null}",
        "{\"choices\":1}",
        "{\"choices\":[1]}",
        "{\"choices\":[{\"delta\":null}]}",
        "{\"choices\":[{\"delta\":[]}]}",
        "{\"choices\":[],\"usage\":[]}",
        "{\"choices\":[],\"usage\":{\"prompt_tokens\":-1,\"completion_tokens\":1e99}}",
        "{\"usage\":7}",
        "{",
        "{\"choices\":[{\"delta\":{\"tool_calls\":[{\"function\":null}]}}]}",
    ] {
        let (a, lb) = one().await;
        let good = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":5,\"completion_tokens\":2}}\n\n";
        let body = format!("data: {odd}\n\n{good}data: [DONE]\n\n");
        a.plays(Reply::sse(body.clone()).pause(ms(1)));
        same_bytes(&lb.chat(&case_bytes("c020-request.json")).await.body, body.as_bytes());
        ended_well(&lb, 5, 2).await;
    }
}
