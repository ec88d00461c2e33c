//! Counts equal those that real engines reported.

use serde_json::Value as Json;

use super::*;
use crate::config::Engine;
use crate::weigh::CountSource;
use crate::weigh::count::Tokenizer;

fn lines(path: &str) -> Vec<Json> {
    let text = std::fs::read_to_string(data(path)).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn compare(path: &str, engine: Engine) {
    let weigher = smollm2();
    let hints = WeighHints { engine, ..WeighHints::default() };
    let mut compared = 0;
    for line in lines(path) {
        let Some(expected) = line["prompt_tokens"].as_u64() else { continue };
        let request = chat(&line["request"].to_string());
        let weight = weigher.weigh_here(&ModelName::from("m1"), &request, &hints).unwrap();
        assert_eq!(weight.prompt.tokens.0, expected, "{}", line["name"]);
        assert_eq!(weight.prompt.source, CountSource::Tokenizer, "{}", line["name"]);
        compared += 1;
    }
    assert_eq!(compared, 43);
}

#[test]
fn every_prompt_counts_as_llama_server_counted_it() {
    compare("data/wire/llama-server/prompt_tokens.jsonl", Engine::LlamaCpp);
}

#[test]
fn every_prompt_counts_as_vllm_counted_it() {
    compare("data/wire/vllm-flags/prompt_tokens.jsonl", Engine::Vllm);
}

#[test]
fn every_text_has_the_ids_that_llama_server_gave_it() {
    let json = std::fs::read_to_string(data("data/smollm2/tokenizer.json")).unwrap();
    let tokenizer = Tokenizer::from_json(&json).unwrap();
    let cache = crate::weigh::count::CountCache::new(1 << 20);
    for line in lines("data/smollm2/tokenize_truth.jsonl") {
        let text = line["text"].as_str().unwrap();
        let expected: Vec<u32> = line["ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
        assert_eq!(tokenizer.ids(text, false).unwrap(), expected, "{text:?}");
        assert_eq!(tokenizer.count_cached(text, &cache), expected.len() as u64, "{text:?}");
    }
    assert_eq!(tokenizer.additive(), (true, true));
}
