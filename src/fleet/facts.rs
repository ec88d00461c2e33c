//! What a replica says of itself once: engine, model ids, window, KV capacity.

use serde_json::Value;

use crate::config::Engine;
use crate::units::Tokens;

/// What is known of a replica from its own answers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// `None` where nothing tells.
    pub engine: Option<Engine>,
    /// Ids of `/v1/models`, adapters included; empty where it has no such list.
    pub models: Vec<String>,
    pub window: Option<Tokens>,
    pub capacity: Option<Tokens>,
}

impl Facts {
    /// Reads a `/v1/models` answer.
    pub fn from_models(body: &[u8]) -> Option<Facts> {
        let value: Value = serde_json::from_slice(body).ok()?;
        let list = value.get("data")?.as_array()?;
        let mut facts = Facts::default();
        for model in list {
            let id = model.get("id").and_then(Value::as_str);
            facts.models.extend(id.map(str::to_owned));
            let aliases = model.get("aliases").and_then(Value::as_array).into_iter().flatten();
            facts.models.extend(aliases.filter_map(Value::as_str).filter(|a| Some(*a) != id).map(str::to_owned));
            let owner = model.get("owned_by").and_then(Value::as_str).unwrap_or_default();
            facts.engine = facts.engine.or(match owner.to_ascii_lowercase().as_str() {
                "vllm" => Some(Engine::Vllm),
                "sglang" => Some(Engine::Sglang),
                "llamacpp" | "llama.cpp" => Some(Engine::LlamaCpp),
                "tensorrt_llm" => Some(Engine::TrtLlm),
                _ => None,
            });
            // vLLM and SGLang say `max_model_len`; llama.cpp's `n_ctx` is one slot's, its `n_ctx_train` the model's.
            let window = model.get("max_model_len").or_else(|| model.get("meta")?.get("n_ctx")).and_then(Value::as_u64);
            facts.window = facts.window.max(window.filter(|w| *w > 0).map(Tokens));
        }
        Some(facts)
    }

    /// Adds what llama.cpp's `/props` says: slots times the context of each is its KV cache.
    pub fn add_props(&mut self, body: &[u8]) {
        let Ok(value) = serde_json::from_slice::<Value>(body) else { return };
        let slots = value.get("total_slots").and_then(Value::as_u64);
        let context = value.get("default_generation_settings").and_then(|s| s.get("n_ctx")).and_then(Value::as_u64);
        if let (Some(slots), Some(context)) = (slots, context)
            && slots > 0
            && context > 0
        {
            self.window = Some(Tokens(context));
            self.capacity = Some(Tokens(slots.saturating_mul(context)));
        }
    }

    /// Whether this engine refuses models that its list does not name. Others answer to any name (llama.cpp, TGI) or
    /// to more names than they list.
    pub fn strict(&self, configured: Engine) -> bool {
        let engine = if configured == Engine::Auto { self.engine.unwrap_or(Engine::Auto) } else { configured };
        engine == Engine::Vllm && !self.models.is_empty()
    }

    /// The engine by its own word, where the configuration leaves it open.
    pub fn engine_or(&self, configured: Engine) -> Engine {
        if configured == Engine::Auto { self.engine.unwrap_or(Engine::Auto) } else { configured }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The shape of llama-server b10068's answer.
    const LLAMA: &str = r#"{"models":[],"object":"list","data":[{"id":"smollm2-135m","aliases":["smollm2-135m","s"],"owned_by":"llamacpp","meta":{"n_ctx":2048,"n_ctx_train":8192}}]}"#;
    const VLLM: &str = r#"{"object":"list","data":[
        {"id":"base","owned_by":"vllm","root":"/m","parent":null,"max_model_len":2048},
        {"id":"lora","owned_by":"vllm","root":"/l","parent":"base","max_model_len":null}]}"#;

    #[test]
    fn engine_ids_and_window_come_from_the_models_list() {
        let facts = Facts::from_models(LLAMA.as_bytes()).unwrap();
        assert_eq!((facts.engine, facts.window), (Some(Engine::LlamaCpp), Some(Tokens(2048))));
        assert_eq!(facts.models, ["smollm2-135m", "s"]);
        assert!(!facts.strict(Engine::Auto), "it answers to any name");
        let facts = Facts::from_models(VLLM.as_bytes()).unwrap();
        assert_eq!((facts.engine, facts.window), (Some(Engine::Vllm), Some(Tokens(2048))));
        assert_eq!(facts.models, ["base", "lora"]);
        assert!(facts.strict(Engine::Auto) && !facts.strict(Engine::OpenAi));
    }

    #[test]
    fn llama_cpp_capacity_is_slots_times_their_context() {
        let mut facts = Facts::from_models(LLAMA.as_bytes()).unwrap();
        facts.add_props(br#"{"default_generation_settings":{"n_ctx":2048},"total_slots":4}"#);
        assert_eq!((facts.window, facts.capacity), (Some(Tokens(2048)), Some(Tokens(8192))));
    }

    #[test]
    fn other_answers_tell_nothing() {
        for body in ["", "null", "[]", "{}", r#"{"data":3}"#, r#"{"error":{"message":"no"}}"#] {
            assert_eq!(Facts::from_models(body.as_bytes()), None, "{body}");
        }
        let facts = Facts::from_models(br#"{"data":[null,{"id":7,"max_model_len":"x"},{"id":"m"}]}"#).unwrap();
        assert_eq!(facts, Facts { models: vec!["m".to_owned()], ..Facts::default() });
    }
}
