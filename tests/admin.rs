//! The admin address: for those who may, from where they may, without secrets.

mod harness;

use std::time::Duration;

use harness::client::request;
use harness::{Answer, Client, Running, Setup, Upstream, run};

const HI: &[u8] = br#"{"model":"m1","messages":[{"role":"user","content":"hi"}]}"#;
const PAGES: [&str; 6] = ["/metrics", "/admin/replicas", "/admin/queues", "/admin/config", "/admin/revisions", "/"];

async fn ask(lb: &Running, path: &str, headers: &[(&str, &str)]) -> Answer {
    let mut client = Client::connect(lb.admin).await;
    client.send(&request("GET", path, headers, None)).await;
    client.answer().await
}

#[test]
fn another_host_is_refused() {
    run(async {
        let a = Upstream::start().await;
        let lb = Setup::m1().replica("a", &a.url()).start().await;
        for path in PAGES {
            let ours = lb.admin.to_string();
            assert_eq!(ask(&lb, path, &[("host", &ours)]).await.status, 200, "{path}");
            assert_eq!(ask(&lb, path, &[("host", "localhost:9090")]).await.status, 200, "{path}");
            let lured = ask(&lb, path, &[("host", "evil.example")]).await;
            assert!(matches!(lured.status, 400 | 403 | 421), "{path}: {}", lured.status);
            assert!(!lured.text().contains("weighbridge_"), "{path}");
        }
    });
}

#[test]
fn a_token_is_asked_for_where_there_is_one() {
    run(async {
        let a = Upstream::start().await;
        let setup = Setup::m1();
        let token = setup.file("admin.token", "let-me-in\n");
        let yaml = format!("{{address: $ADMIN, token_file: {}}}", token.display());
        let lb = setup.section("admin", &yaml).replica("a", &a.url()).start().await;
        let host = lb.admin.to_string();
        for path in PAGES.iter().filter(|p| **p != "/") {
            for wrong in [None, Some("Bearer wrong"), Some("Bearer "), Some("let-me-in")] {
                let mut headers = vec![("host", host.as_str())];
                headers.extend(wrong.map(|w| ("authorization", w)));
                assert_eq!(ask(&lb, path, &headers).await.status, 401, "{path} {wrong:?}");
            }
            let headers = [("host", host.as_str()), ("authorization", "Bearer let-me-in")];
            assert_eq!(ask(&lb, path, &headers).await.status, 200, "{path}");
        }
        assert_eq!(ask(&lb, "/healthz", &[("host", &host)]).await.status, 200, "health is for everybody");
        assert!(!lb.log().contains("let-me-in"), "the token in the log");
    });
}

#[test]
fn a_wider_bind_without_a_token_is_no_start() {
    run(async {
        let lb = Setup::m1().section("admin", "{address: 0.0.0.0:19999}").replica("a", "http://127.0.0.1:9").spawn();
        let (status, _) = lb.exits_within(Duration::from_secs(10)).await.expect("it ends");
        assert!(!status.success());
        assert!(lb.log().contains("token"), "{}", lb.log());
    });
}

#[test]
fn prompts_answers_and_keys_are_in_no_log_and_no_admin_answer() {
    run(async {
        let a = Upstream::start().await;
        let setup = Setup::m1();
        let tenant = setup.file("t.key", "tenant-secret-1\n");
        let replica = setup.file("r.key", "replica-secret-2\n");
        a.plays(harness::Reply::json(200, r#"{"choices":[{"message":{"content":"answer-secret-3"}}],"usage":{"prompt_tokens":1,"completion_tokens":1}}"#));
        let lb = setup
            .section("tenants", &format!("[{{name: t, key_file: {}}}]", tenant.display()))
            .replica_with("a", &a.url(), &format!("api_key_file: {}", replica.display()))
            .env("RUST_LOG", "debug")
            .start()
            .await;
        let key = [("authorization", "Bearer tenant-secret-1")];
        let body = br#"{"model":"m1","messages":[{"role":"user","content":"prompt-secret-4"}]}"#;
        assert_eq!(lb.chat_with(&key, body).await.status, 200);
        lb.chat_with(&key, br#"{"model":"m1","messages":[{"role":"user","content":"prompt-secret-4"}"#).await;
        lb.chat_with(&[("authorization", "Bearer wrong-secret-5")], body).await;
        a.plays(harness::Reply::json(500, r#"{"error":{"message":"failed on answer-secret-3"}}"#));
        lb.chat_with(&key, body).await;
        a.plays(harness::Reply::bare("HTTP/1.1 nonsense answer-secret-3\r\n\r\n").act(harness::Act::Cut));
        lb.chat_with(&key, body).await;
        lb.books().settled().await;
        let host = lb.admin.to_string();
        let mut all = lb.log();
        for path in PAGES {
            all.push_str(&ask(&lb, path, &[("host", &host)]).await.text());
        }
        for secret in ["tenant-secret-1", "replica-secret-2", "answer-secret-3", "prompt-secret-4", "wrong-secret-5"] {
            assert!(!all.contains(secret), "{secret} shows");
        }
    });
}

#[test]
fn each_ended_request_is_one_line_of_the_access_log() {
    run(async {
        let a = Upstream::start().await;
        let lb = Setup::m1().replica("a", &a.url()).start().await;
        lb.chat_with(&[("x-request-id", "line-1")], HI).await;
        lb.chat_with(&[("x-request-id", "line-2")], b"{").await;
        lb.books().settled().await;
        assert!(lb.logs_line("line-2", Duration::from_secs(2)).await, "{}", lb.log());
        for (id, outcome) in [("line-1", "completed"), ("line-2", "refused")] {
            let log = lb.log();
            let lines: Vec<&str> = log.lines().filter(|l| l.contains(id)).collect();
            assert_eq!(lines.len(), 1, "{id}: {lines:?}");
            let line: serde_json::Value =
                serde_json::from_str(lines[0]).unwrap_or_else(|e| panic!("{e}: {}", lines[0]));
            let text = line.to_string();
            assert!(text.contains(outcome), "{text}");
        }
    });
}

#[test]
fn models_are_listed_with_aliases_and_windows() {
    run(async {
        let a = Upstream::start().await;
        let tokenizer = harness::files::path("data/byte-tokenizer");
        let lb = Setup::new()
            .model(&format!("{{name: m1, tokenizer: {}, aliases: [gpt-x]}}", tokenizer.display()))
            .replica_with("a", &a.url(), "max_context_tokens: 4096")
            .start()
            .await;
        let listed = harness::get(lb.address, "/v1/models").await;
        assert_eq!(listed.status, 200);
        let json = listed.json();
        let ids: Vec<&str> = json["data"].as_array().expect("data").iter().filter_map(|m| m["id"].as_str()).collect();
        assert!(ids.contains(&"m1") && ids.contains(&"gpt-x"), "{json}");
        assert!(listed.text().contains("4096"), "the window: {json}");
        assert_eq!(harness::get(lb.address, "/v1/models/m1").await.json()["id"], "m1");
        assert_eq!(harness::get(lb.address, "/v1/models/gpt-x").await.status, 200);
        harness::get(lb.address, "/v1/models/none").await.is_error(404, "model_not_found");
        // An alias is routed, and the engine is called by its own name for the model.
        let body = String::from_utf8(HI.to_vec()).expect("UTF-8").replace("m1", "gpt-x");
        assert_eq!(lb.chat(body.as_bytes()).await.status, 200);
        assert_eq!(a.only().json()["model"], "m1");
    });
}
