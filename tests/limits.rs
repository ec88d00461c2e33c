//! A limit on everything: each limit of the YAML, by what a client sees of it.

mod harness;

use std::time::{Duration, Instant};

use harness::{Client, Gate, Reply, Running, Setup, Upstream, ms, run, within};

const HI: &[u8] = br#"{"model":"m1","messages":[{"role":"user","content":"hi"}]}"#;

async fn limited(limits: &str) -> (Upstream, Running) {
    let a = Upstream::start().await;
    let lb = Setup::m1().section("limits", limits).replica("a", &a.url()).start().await;
    (a, lb)
}

#[test]
fn header_bytes_and_header_count() {
    run(async {
        let (a, lb) = limited("{header_bytes: 2KiB, header_count: 20}").await;
        let fits = "y".repeat(1000);
        assert_eq!(lb.chat_with(&[("x-a", &fits)], HI).await.status, 200);
        let over = "y".repeat(2100);
        lb.chat_with(&[("x-a", &over)], HI).await.is_error(431, "header_too_large");
        let many: Vec<(String, String)> = (0..25).map(|n| (format!("x-{n}"), "1".to_owned())).collect();
        let many: Vec<(&str, &str)> = many.iter().map(|(n, v)| (n.as_str(), v.as_str())).collect();
        lb.chat_with(&many, HI).await.is_error(431, "header_too_large");
        let long = format!("/v1/chat/completions?{}", "q".repeat(3000));
        let answer = harness::post(lb.address, &long, HI).await;
        assert!(matches!(answer.status, 414 | 431), "{}", answer.status);
        assert_eq!(a.count(), 1);
        lb.books().settled().await;
    });
}

#[test]
fn header_timeout_is_for_the_whole_header() {
    run(async {
        let (a, lb) = limited("{header_timeout: 500ms}").await;
        for first in [&b"P"[..], b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"] {
            let mut client = lb.client().await;
            let start = Instant::now();
            client.send(first).await;
            // A byte now and then does not help.
            let closed = within(Duration::from_secs(4), async || {
                let _ = client.try_send(b"x").await;
                client.closes_within(ms(50)).await || !client.is_silent_for(ms(1)).await
            })
            .await;
            assert!(closed, "it is cut");
            assert!((ms(400)..ms(2500)).contains(&start.elapsed()), "{:?}", start.elapsed());
        }
        // The second request on a connection has its deadline, too.
        let mut client = lb.client().await;
        client.post("/v1/chat/completions", HI).await;
        assert_eq!(client.answer().await.status, 200);
        client.send(b"POST /v1/chat").await;
        let start = Instant::now();
        let closed = within(Duration::from_secs(4), async || {
            let _ = client.try_send(b"x").await;
            client.closes_within(ms(50)).await || !client.is_silent_for(ms(1)).await
        })
        .await;
        assert!(closed && start.elapsed() < ms(2500), "{:?}", start.elapsed());
        assert_eq!(a.count(), 1);
        lb.books().settled().await;
    });
}

#[test]
fn an_idle_connection_is_closed_after_keepalive() {
    run(async {
        let (_a, lb) = limited("{keepalive: 1s}").await;
        let mut client = lb.client().await;
        client.post("/v1/chat/completions", HI).await;
        assert_eq!(client.answer().await.status, 200);
        assert!(client.is_silent_for(ms(600)).await, "not before");
        assert!(client.closes_within(Duration::from_secs(2)).await, "but then");
        // One that never says anything is closed, too.
        let mut silent = lb.client().await;
        assert!(silent.closes_within(Duration::from_secs(15)).await);
    });
}

#[test]
fn connections_in_all_and_of_one_address() {
    run(async {
        for limits in ["{connections: 10}", "{connections_per_address: 10}"] {
            let (_a, lb) = limited(limits).await;
            let mut open = Vec::new();
            for _ in 0..10 {
                let mut client = lb.client().await;
                client.post("/v1/chat/completions", HI).await;
                assert_eq!(client.answer().await.status, 200, "{limits}");
                open.push(client);
            }
            for _ in 0..3 {
                let served = match Client::try_connect(lb.address).await {
                    Ok(mut client) => {
                        let _ = client
                            .try_send(&harness::client::request("POST", "/v1/chat/completions", &[], Some(HI)))
                            .await;
                        client.try_answer().await.is_ok_and(|a| a.status == 200)
                    }
                    Err(_) => false,
                };
                assert!(!served, "{limits}: the eleventh is not served");
            }
            // The admin address has places of its own, and they come back here.
            assert_eq!(harness::get(lb.admin, "/healthz").await.status, 200);
            open.truncate(5);
            let served = within(Duration::from_secs(2), async || {
                let Ok(mut client) = Client::try_connect(lb.address).await else { return false };
                let _ = client.try_send(&harness::client::request("POST", "/v1/chat/completions", &[], Some(HI))).await;
                client.try_answer().await.is_ok_and(|a| a.status == 200)
            })
            .await;
            assert!(served, "{limits}: a place that was given up is taken again");
            let refused = lb.books().metric("weighbridge_client_connections_refused_total", &[]).await;
            assert!(refused >= 3.0, "{limits}: {refused}");
        }
    });
}

#[test]
fn requests_on_one_connection() {
    run(async {
        let (_a, lb) = limited("{requests_per_connection: 3}").await;
        let mut client = lb.client().await;
        for n in 1..=3 {
            client.post("/v1/chat/completions", HI).await;
            let answer = client.answer().await;
            assert_eq!(answer.status, 200);
            assert_eq!(answer.header("connection") == Some("close"), n == 3, "request {n}: {:?}", answer.headers);
        }
        assert!(client.closes_within(Duration::from_secs(1)).await);
    });
}

#[test]
fn json_depth() {
    run(async {
        let (a, lb) = limited("{json_depth: 10}").await;
        let deep = |n: usize| {
            format!(
                r#"{{"model":"m1","messages":[{{"role":"user","content":"hi"}}],"x":{}{}}}"#,
                "[".repeat(n),
                "]".repeat(n)
            )
        };
        assert_eq!(lb.chat(deep(8).as_bytes()).await.status, 200);
        let answer = lb.chat(deep(10).as_bytes()).await;
        answer.is_error(400, "invalid_request");
        assert!(answer.text().contains("10"), "the limit is named: {}", answer.text());
        assert_eq!(a.count(), 1);
    });
}

#[test]
fn an_event_larger_than_event_bytes_passes_unread() {
    run(async {
        let (a, lb) = limited("{event_bytes: 64KiB}").await;
        let huge = format!("data: {{\"choices\":[{{\"delta\":{{\"content\":\"{}\"}}}}]}}\n\n", "x".repeat(10 << 20));
        let usage = harness::reply::usage_chunk(3, 2);
        a.plays(Reply::sse(huge.clone()).send(usage.clone()).send(harness::reply::DONE));
        let before = lb.rss();
        let body = br#"{"model":"m1","stream":true,"stream_options":{"include_usage":true},"messages":[{"role":"user","content":"hi"}]}"#;
        let answer = lb.chat(body).await;
        assert_eq!(answer.body.len(), huge.len() + usage.len() + harness::reply::DONE.len());
        assert_eq!(&answer.body[..huge.len()], huge.as_bytes());
        assert!(lb.rss().saturating_sub(before) < 16 << 20, "bounded: {}", lb.rss() - before);
        lb.books().settled().await;
        assert_eq!(lb.books().tokens("output").await, 2, "what follows is read");
    });
}

#[test]
fn pipelined_requests_do_not_abort_the_one_that_runs() {
    run(async {
        let (a, lb) = limited("{}").await;
        let gate = Gate::closed();
        a.then(Reply::chat(3, 2).after_gate(&gate));
        let mut client = lb.client().await;
        client.post("/v1/chat/completions", HI).await;
        a.wait_for(1).await;
        // A second one while the first runs: its client is there, so the first goes on.
        client.post("/v1/chat/completions", HI).await;
        assert!(client.is_silent_for(ms(150)).await);
        gate.open();
        assert_eq!(client.answer().await.status, 200);
        let second = client.try_answer().await;
        assert!(second.is_err() || second.is_ok_and(|a| a.status == 200), "answered in order, or closed");
        lb.books().settled().await;
    });
}
