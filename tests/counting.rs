//! `/tokenize` and `/v1/messages/count_tokens`, answered here with what engines were seen to answer.

mod harness;

use std::time::Duration;

use harness::{Reply, Running, Setup, Upstream, files, post, run};
use serde_json::json;

async fn smollm() -> (Upstream, Running) {
    let a = Upstream::start().await;
    let lb = Setup::new()
        .model(&format!("{{name: smollm2-135m, tokenizer: {}}}", files::path("data/smollm2").display()))
        .replica_with("a", &a.url(), "model: smollm2-135m, max_context_tokens: 2048")
        .start()
        .await;
    (a, lb)
}

#[test]
fn answers_are_those_of_vllm_and_llama_server() {
    run(async {
        let (a, lb) = smollm().await;
        // Both engines' own answers to the same bodies, captured.
        let ids = json!([19556, 216, 1, 905, 216, 33, 34, 35]);
        let body = br#"{"model": "smollm2-135m", "prompt": "Hello <|im_start|> world 123"}"#;
        let answer = post(lb.address, "/tokenize", body).await;
        assert_eq!(answer.json(), json!({"count": 8, "max_model_len": 2048, "tokens": ids, "token_strs": null}));
        let body = br#"{"model": "smollm2-135m", "content": "Hello <|im_start|> world 123"}"#;
        assert_eq!(post(lb.address, "/tokenize", body).await.json(), json!({"tokens": ids}));
        let body = br#"{"model": "smollm2-135m", "messages": [{"role": "user", "content": "Count from 1 to 5."}], "return_token_strs": true}"#;
        let chat = post(lb.address, "/tokenize", body).await.json();
        assert_eq!(chat["count"], 38);
        let first: Vec<u64> =
            chat["tokens"].as_array().expect("ids").iter().take(5).filter_map(|t| t.as_u64()).collect();
        assert_eq!(first, [1, 9690, 198, 2683, 359]);
        assert_eq!(chat["token_strs"][0], "<|im_start|>");
        let body = br#"{"model": "smollm2-135m", "messages": [{"role": "user", "content": "Count from 1 to 5."}]}"#;
        let counted = post(lb.address, "/v1/messages/count_tokens", body).await;
        assert_eq!(counted.json(), json!({"input_tokens": 38}));
        assert_eq!(a.count(), 0, "no replica was asked");
        lb.books().settled().await;
    });
}

#[test]
fn what_only_the_engine_knows_is_asked_of_it() {
    run(async {
        let (a, lb) = smollm().await;
        a.plays(Reply::json(200, r#"{"tokens":[{"id":1,"piece":"x"}]}"#));
        for (path, body) in [
            ("/tokenize", r#"{"content":"x","with_pieces":true}"#),
            ("/tokenize", r#"{"content":"<s>","parse_special":false}"#),
            ("/detokenize", r#"{"tokens":[1,2]}"#),
        ] {
            let before = a.count();
            assert_eq!(post(lb.address, path, body.as_bytes()).await.status, 200, "{path} {body}");
            assert_eq!(a.count(), before + 1, "{path} {body}");
            assert_eq!(a.seen()[before].body, body.as_bytes());
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
        lb.books().settled().await;
    });
}
