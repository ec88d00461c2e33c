//! Bad input: the contract's error, nothing booked afterwards, the connection still usable where HTTP allows it.

mod harness;

use std::time::{Duration, Instant};

use harness::client::request;
use harness::{Act, Client, Gate, Reply, Running, Setup, Upstream, ms, run, within};

const GOOD: &[u8] = br#"{"model":"m1","messages":[{"role":"user","content":"hi"}]}"#;

async fn one(setup: Setup) -> (Upstream, Running) {
    let a = Upstream::start().await;
    let lb = setup.replica("a", &a.url()).start().await;
    (a, lb)
}

#[test]
fn every_malformed_body_is_a_400_and_the_connection_serves_on() {
    run(async {
        let (a, lb) = one(Setup::m1()).await;
        let mut client = lb.client().await;
        for body in [
            "",
            " ",
            "{",
            "}",
            "null",
            "1",
            "\"text\"",
            "[]",
            "{}",
            "{\"model\":\"m1\"",
            "{\"model\":\"m1\",}",
            "{'model':'m1'}",
            "{\"model\":\"m1\",\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]} trailing",
            "{\"model\":\"m1\",\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]}{}",
            "{\"model\":\"m1\",\"messages\":\"hi\"}",
            "{\"model\":\"m1\",\"messages\":7}",
            "{\"model\":\"m1\",\"messages\":[]}",
            "{\"model\":\"m1\",\"messages\":[1]}",
            "{\"model\":7,\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]}",
            "{\"model\":null,\"messages\":[{\"role\":\"user\",\"content\":7}]}",
            "{\"model\":[\"m1\"],\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]}",
            "{\"model\":\"m1\",\"messages\":[{\"role\":\"user\",\"content\":\"\t\"}]}",
            "{\"model\":\"m1\",\"messages\":[{\"role\":\"user\",\"content\":\"\\x\"}]}",
            "{\"model\":\"m1\",\"n\":01,\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]}",
            "{\"model\":\"m1\",\"n\":NaN,\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]}",
        ] {
            client.post("/v1/chat/completions", body.as_bytes()).await;
            client.answer().await.is_error(400, "invalid_request");
            client.post("/v1/chat/completions", GOOD).await;
            let answer = client.answer().await;
            assert_eq!(answer.status, 200, "after {body:?} the connection serves on: {}", answer.text());
        }
        assert_eq!(a.count(), 25, "only the good ones were sent on");
        lb.books().settled().await;
    });
}

#[test]
fn wrong_types_name_the_field_at_fault() {
    run(async {
        let (_a, lb) = one(Setup::m1()).await;
        for (body, param) in [
            (r#"{"model":"m1","messages":"hi"}"#, "messages"),
            (r#"{"model":"m1"}"#, "messages"),
            (r#"{"model":7,"messages":[{"role":"user","content":"hi"}]}"#, "model"),
        ] {
            let answer = lb.chat(body.as_bytes()).await;
            answer.is_error(400, "invalid_request");
            let found = answer.json()["error"]["param"].as_str().unwrap_or_default().to_owned();
            assert!(found.starts_with(param), "{body}: {found}");
        }
        let answer = lb.completions(br#"{"model":"m1","prompt":{"a":1}}"#).await;
        assert_eq!(answer.is_error(400, "invalid_request").json()["error"]["param"], "prompt");
        lb.books().settled().await;
    });
}

#[test]
fn an_unknown_or_missing_model_is_told_apart() {
    run(async {
        let a = Upstream::start().await;
        let two = Setup::m1().model("{name: m2, tokenizer: approximate}");
        let lb = two.replica_with("a", &a.url(), "models: [m1, m2]").start().await;
        lb.chat(br#"{"model":"m9","messages":[{"role":"user","content":"hi"}]}"#)
            .await
            .is_error(404, "model_not_found");
        let missing = lb.chat(br#"{"messages":[{"role":"user","content":"hi"}]}"#).await;
        missing.is_error(400, "invalid_request");
        assert_eq!(missing.json()["error"]["param"], "model");
        assert_eq!(a.count(), 0);
        lb.books().settled().await;
    });
}

#[test]
fn unknown_paths_are_404_and_wrong_methods_405() {
    run(async {
        let (a, lb) = one(Setup::m1()).await;
        for path in [
            "/",
            "/v1",
            "/v1/chat",
            "/v1/chat/completionsx",
            "/v1/load_lora_adapter",
            "/reset_prefix_cache",
            "/sleep",
            "/slots/0",
            "/models/unload",
            "/metrics",
            "/health",
            "/admin/replicas",
            "/v1/../metrics",
            "//metrics",
            "/v1/chat/completions/..%2f..%2fsleep",
            "/%76%31/chat/completions",
        ] {
            let answer = harness::post(lb.address, path, GOOD).await;
            assert!(answer.status == 404 || answer.status == 405, "{path}: {} {}", answer.status, answer.text());
            let error = answer.json();
            assert!(error["error"]["message"].is_string(), "{path}: {error}");
        }
        for method in ["GET", "PUT", "DELETE", "PATCH"] {
            let mut client = lb.client().await;
            client.send(&request(method, "/v1/chat/completions", &[], None)).await;
            let answer = client.answer().await;
            assert_eq!(answer.status, 405, "{method}");
            assert_eq!(answer.header("allow"), Some("POST"));
        }
        assert_eq!(a.count(), 0);
        lb.books().settled().await;
    });
}

#[test]
fn a_body_over_the_limit_is_a_413_that_the_client_can_read() {
    run(async {
        let (a, lb) = one(Setup::m1().section("limits", "{body_bytes: 64KiB}")).await;
        // Over it by a little and by a lot, with and without a length; the client reads its answer although it is
        // still sending.
        for size in [70 << 10, 5 << 20] {
            let mut body = br#"{"model":"m1","messages":[{"role":"user","content":""#.to_vec();
            body.resize(size, b'x');
            let mut client = lb.client().await;
            let _ = client.try_send(&request("POST", "/v1/chat/completions", &[], Some(&body))).await;
            client.answer().await.is_error(413, "request_too_large");
            let mut client = lb.client().await;
            client.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n").await;
            for part in body.chunks(16 << 10) {
                if client.try_send(format!("{:x}\r\n", part.len()).as_bytes()).await.is_err()
                    || client.try_send(part).await.is_err()
                    || client.try_send(b"\r\n").await.is_err()
                {
                    break;
                }
            }
            client.answer().await.is_error(413, "request_too_large");
        }
        assert_eq!(a.count(), 0);
        lb.books().settled().await;
    });
}

#[test]
fn a_client_that_stalls_in_its_body_gets_a_408() {
    run(async {
        let (a, lb) = one(Setup::m1().section("limits", "{body_timeout: 400ms}")).await;
        for sent in [&b""[..], b"{\"model\":", &GOOD[..GOOD.len() - 1]] {
            let mut client = lb.client().await;
            let start = Instant::now();
            client
                .send(
                    format!("POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", GOOD.len())
                        .as_bytes(),
                )
                .await;
            client.send(sent).await;
            client.answer().await.is_error(408, "request_timeout");
            assert!((ms(380)..ms(2000)).contains(&start.elapsed()), "{:?}", start.elapsed());
            assert!(client.closes_within(Duration::from_secs(3)).await, "what would follow cannot be told apart");
        }
        // One byte now and then does not help: the deadline is for the whole body.
        let mut client = lb.client().await;
        let start = Instant::now();
        client.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n").await;
        for _ in 0..30 {
            if client.try_send(b"1\r\n \r\n").await.is_err() || !client.is_silent_for(ms(50)).await {
                break;
            }
        }
        client.answer().await.is_error(408, "request_timeout");
        assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
        assert_eq!(a.count(), 0);
        lb.books().settled().await;
    });
}

#[test]
fn a_client_that_hangs_up_in_any_phase_leaves_nothing() {
    run(async {
        let a = Upstream::start().await;
        let lb = Setup::m1().replica_with("a", &a.url(), "max_sequences: 1").start().await;
        let whole = request("POST", "/v1/chat/completions", &[], Some(GOOD));
        let head_end = whole.len() - GOOD.len();
        // Nothing sent, half a request line, half a header, the header, half a body.
        for cut in [0, 5, 30, head_end, head_end + 10] {
            for reset in [false, true] {
                let mut client = lb.client().await;
                client.send(&whole[..cut]).await;
                tokio::time::sleep(ms(5)).await;
                if reset {
                    client.reset();
                }
            }
        }
        assert_eq!(a.count(), 0);
        lb.books().settled().await;
        // Waiting in the queue, in the prefill, in the answer.
        let gate = Gate::closed();
        a.then(Reply::chat(3, 2).after_gate(&gate));
        let mut first = lb.ask(GOOD).await;
        a.wait_for(1).await;
        let queued = lb.ask(GOOD).await;
        assert!(within(ms(1000), async || lb.books().waiting().await == 1).await);
        drop(queued);
        assert!(within(ms(1000), async || lb.books().waiting().await == 0).await, "it left the queue");
        gate.open();
        assert_eq!(first.answer().await.status, 200);
        lb.books().settled().await;
        a.plays(Reply::new(200, "text/event-stream").events(1, Duration::ZERO).act(Act::Hang));
        let mut client = lb.ask(br#"{"model":"m1","stream":true,"messages":[{"role":"user","content":"hi"}]}"#).await;
        client.head().await;
        client.data().await;
        drop(client);
        lb.books().settled().await;
        assert_eq!(a.count(), 2, "the one in the queue was never sent");
    });
}

#[test]
fn garbage_instead_of_http_harms_nobody() {
    run(async {
        let (a, lb) = one(Setup::m1()).await;
        for garbage in [
            &b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"[..],
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"\0\0\0\0\0\0\0\0\r\n\r\n",
            b"GET\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            b"POST /v1/chat/completions HTTP/1.1\r\n\r\n",
            b"CONNECT x:80 HTTP/1.1\r\nhost: x:80\r\n\r\n",
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\nhost: b\r\ncontent-length: 0\r\n\r\n",
            b"POST http://elsewhere.example/v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n",
        ] {
            let mut client = Client::connect(lb.address).await;
            let _ = client.try_send(garbage).await;
            let answered = tokio::time::timeout(Duration::from_secs(3), client.try_answer()).await;
            if let Ok(Ok(answer)) = answered {
                assert!((400..=505).contains(&answer.status), "{garbage:?}: {}", answer.status);
            }
        }
        assert_eq!(lb.chat(GOOD).await.status, 200);
        assert_eq!(a.count(), 1);
        assert!(!lb.log().contains("panicked"), "{}", lb.log());
        lb.books().settled().await;
    });
}
