//! Every form of request, and the endpoints that the balancer answers itself.

use super::*;
use crate::config::Engine;
use crate::weigh::{CountSource, EstimateSource};

fn case(name: &str) -> String {
    std::fs::read_to_string(data("field_cases/data").join(name)).unwrap()
}

fn completion(body: impl Into<String>) -> Request {
    request(Endpoint::Completions, body.into())
}

#[test]
fn c055_c056_token_ids_count_as_they_are() {
    let weigher = smollm2();
    let one = weigh(&weigher, &completion(case("c055-completions.json"))).unwrap();
    assert_eq!((one.prompt.tokens.0, one.prompt.source), (3, CountSource::TokenIds));
    let lists = weigh(&weigher, &completion(case("c056-completions.json"))).unwrap();
    assert_eq!((lists.prompt.tokens.0, lists.prompt.longest.0, lists.sequences), (5, 3, 4));
    for odd in ["c055-completions-empty.json", "c056-completions-emptysub.json", "c056-completions-mixed.json"] {
        let body = Bytes::from(case(odd));
        if let Ok(request) = Request::parse(Endpoint::Completions, body, &ParseLimits { json_depth: 128 }) {
            assert!(weigh(&weigher, &request).unwrap().prompt.tokens.0 < 100, "{odd}");
        }
    }
}

#[test]
fn c057_a_list_of_texts_is_the_sum_of_its_texts() {
    let weight = weigh(&smollm2(), &completion(case("c057-completions.json"))).unwrap();
    assert_eq!((weight.prompt.tokens.0, weight.prompt.longest.0, weight.sequences), (3, 2, 2));
    assert!(weight.output.p90 <= 5);
}

#[test]
fn c060_an_answer_without_a_cap_is_the_task_s_figure_and_not_the_window() {
    let hints = WeighHints { window: Some(Tokens(131_072)), ..WeighHints::default() };
    let weight = smollm2().weigh_here(&ModelName::from("m1"), &chat(&case("c060-request.json")), &hints).unwrap();
    assert!(weight.output.p90 <= 2000 && weight.output.source == EstimateSource::Heuristic);
}

#[test]
fn embeddings_and_pairs_have_prompts_and_no_answers() {
    let weigher = smollm2();
    let embeddings = request(Endpoint::Embeddings, r#"{"input":["one two","three"]}"#);
    let weight = weigh(&weigher, &embeddings).unwrap();
    assert_eq!((weight.prompt.tokens.0, weight.sequences, weight.output.p90), (3, 2, 0));
    assert_eq!(weight.output.source, EstimateSource::Exact);
    let rerank = request(Endpoint::Rerank, r#"{"query":"one","documents":["one two",{"text":"three"}]}"#);
    assert_eq!(weigh(&weigher, &rerank).unwrap().prompt.tokens.0, 4);
    let score = request(Endpoint::Score, r#"{"text_1":"one","text_2":["one two","three"]}"#);
    assert_eq!(weigh(&weigher, &score).unwrap().prompt.tokens.0, 4);
}

#[test]
fn one_conversation_costs_the_same_through_each_api() {
    let weigher = smollm2();
    let chat = chat(
        r#"{"messages":[{"role":"system","content":"Be brief."},{"role":"user","content":"Weather in Paris?"},
            {"role":"assistant","content":"Let me look."},{"role":"user","content":"Yes?"}]}"#,
    );
    let messages = request(
        Endpoint::Messages,
        r#"{"max_tokens":50,"system":[{"type":"text","text":"Be brief."}],"messages":[{"role":"user","content":[{"type":"text","text":"Weather in Paris?"}]},
            {"role":"assistant","content":"Let me look."},{"role":"user","content":"Yes?"}]}"#,
    );
    let responses = request(
        Endpoint::Responses,
        r#"{"instructions":"Be brief.","input":[{"role":"user","content":[{"type":"input_text","text":"Weather in Paris?"}]},
            {"type":"message","role":"assistant","content":[{"type":"output_text","text":"Let me look."}]},{"role":"user","content":"Yes?"}]}"#,
    );
    let expected = weigh(&weigher, &chat).unwrap().prompt;
    assert!(expected.exact());
    assert_eq!(weigh(&weigher, &messages).unwrap().prompt, expected);
    assert_eq!(weigh(&weigher, &responses).unwrap().prompt, expected);
}

#[test]
fn tool_uses_and_results_of_messages_become_tool_turns() {
    let weigher = smollm2();
    let anthropic = request(
        Endpoint::Messages,
        r#"{"max_tokens":9,"messages":[{"role":"user","content":"hi"},
            {"role":"assistant","content":[{"type":"tool_use","id":"1","name":"f","input":{"a":1}}]},
            {"role":"user","content":[{"type":"tool_result","tool_use_id":"1","content":[{"type":"text","text":"42"}]},{"type":"text","text":"and?"}]}]}"#,
    );
    let openai = chat(
        r#"{"messages":[{"role":"user","content":"hi"},{"role":"assistant","content":null,"tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":"{\"a\":1}"}}]},
            {"role":"tool","tool_call_id":"1","content":"42"},{"role":"user","content":"and?"}]}"#,
    );
    assert_eq!(weigh(&weigher, &anthropic).unwrap().prompt, weigh(&weigher, &openai).unwrap().prompt);
}

#[test]
fn max_tokens_of_any_kind_never_make_a_negative_or_huge_estimate() {
    let weigher = smollm2();
    for name in ["0", "neg", "float", "str", "bool", "big", "inf"] {
        let body = Bytes::from(case(&format!("c053-request-{name}.json")));
        let Ok(request) = Request::parse(Endpoint::ChatCompletions, body, &ParseLimits { json_depth: 128 }) else {
            continue;
        };
        let weight = weigh(&weigher, &request).unwrap();
        assert!(weight.output.mean >= 0.0 && weight.output.p90 <= 10_000, "{name}");
    }
}

#[test]
fn truncation_that_the_client_asks_for_bounds_the_prompt() {
    let weight = weigh(&smollm2(), &completion(r#"{"prompt":"one two three four five","truncate_prompt_tokens":2}"#));
    assert_eq!(weight.unwrap().prompt.tokens.0, 2);
}

#[test]
fn tokenize_and_count_tokens_are_answered_in_each_engine_s_shape() {
    let weigher = smollm2();
    let name = ModelName::from("m1");
    let here = |request: &Request| weigher.answer_here(&name, request, Engine::Vllm, Some(Tokens(2048))).unwrap();
    let answer = |body: &'static str| -> serde_json::Value {
        serde_json::from_slice(&here(&request(Endpoint::Tokenize, body)).unwrap()).unwrap()
    };
    let vllm = answer(r#"{"model":"m1","prompt":"Hi","return_token_strs":true}"#);
    assert_eq!(vllm, serde_json::json!({"count": 1, "max_model_len": 2048, "tokens": [26843], "token_strs": ["Hi"]}));
    assert_eq!(answer(r#"{"content":"Hi"}"#), serde_json::json!({"tokens": [26843]}));
    assert_eq!(answer(r#"{"messages":[{"role":"user","content":"Hi"}]}"#)["count"], 31);
    let count = request(Endpoint::CountTokens, r#"{"messages":[{"role":"user","content":"Hi"}]}"#);
    assert_eq!(&here(&count).unwrap()[..], br#"{"input_tokens":31}"#);
}
