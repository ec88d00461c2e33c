//! stream-options: usage is asked for upstream, and hidden from those who did not ask.

use crate::harness::{Act, Reply, case_bytes};
use crate::runner::{Case, case};
use crate::support::*;

pub fn cases() -> Vec<Case> {
    vec![
        case!(c021, "usage is asked for upstream and its chunk hidden"),
        case!(c022, "include_usage false is overridden upstream and honoured downstream"),
        case!(c023, "other members of stream_options survive"),
        case!(c025, "unasked usage is hidden, a chunk with choices never"),
    ]
}

async fn c021() {
    let (a, lb, answer) = replay("c021").await;
    assert_eq!(a.only().json()["stream_options"]["include_usage"], true);
    same_bytes(&answer.body, &case_bytes("c021-expected-downstream.sse"));
    ended_well(&lb, 14, 2).await;
}

async fn c022() {
    let (a, lb, answer) = replay("c022").await;
    assert_eq!(a.only().json()["stream_options"]["include_usage"], true);
    assert!(!answer.text().contains("\"choices\":[]"), "{}", answer.text());
    assert!(answer.text().ends_with("data: [DONE]\n\n"), "{}", answer.text());
    ended_well(&lb, 40, 9).await;
}

async fn c023() {
    let (a, lb) = one().await;
    let usage = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":1}}\n\n";
    let chunk = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"x\"}}]}\n\n";
    a.plays(Reply::sse(format!("{chunk}{usage}data: [DONE]\n\n")));
    for (n, shown) in [(1, false), (2, false), (3, true), (4, true)] {
        let body = case_bytes(&format!("c023-request-{n}.json"));
        let answer = lb.chat(&body).await;
        assert_eq!(answer.text().contains("usage"), shown, "request {n}: {}", answer.text());
        let sent = a.seen().pop().expect("a request");
        match n {
            1 => assert_eq!(sent.json()["stream_options"], serde_json::json!({"include_usage": true})),
            2 => assert_eq!(
                sent.json()["stream_options"],
                serde_json::json!({"continuous_usage_stats": false, "include_usage": true})
            ),
            _ => same_bytes(&sent.body, &body),
        }
    }
    // Other wrong types are the server's to refuse, too.
    for odd in ["1", "[]", "true", "{\"include_usage\":\"yes\"}", "{\"include_usage\":null}", "{}"] {
        let body = chat("hi", &format!(r#","stream":true,"stream_options":{odd}"#));
        let answer = lb.chat(&body).await;
        assert_eq!(answer.status, 200, "{odd}: {}", answer.text());
    }
    lb.books().settled().await;
}

async fn c025() {
    for (file, prompt, output) in [("c025-upstream-a.sse", 75, 31), ("c025-upstream-b.sse", 20, 6)] {
        let (a, lb) = one().await;
        a.plays(Reply::sse(case_bytes(file)).act(Act::Fin));
        let answer = lb.chat(&case_bytes("c025-request.json")).await;
        let chunks: Vec<serde_json::Value> = answer
            .text()
            .lines()
            .filter_map(|line| line.strip_prefix("data: "))
            .filter(|data| *data != "[DONE]")
            .map(|data| serde_json::from_str(data).expect("JSON"))
            .collect();
        assert!(chunks.iter().all(|c| c["choices"].as_array().is_some_and(|c| !c.is_empty())), "{}", answer.text());
        if file.ends_with("b.sse") {
            // The usage may stay where there is content: never is a chunk with choices dropped or rewritten.
            same_bytes(&answer.body, &case_bytes(file));
            assert!(answer.text().contains("end"), "{}", answer.text());
        }
        ended_well(&lb, prompt, output).await;
    }
}
