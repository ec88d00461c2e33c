//! `GET /v1/models` and `GET /v1/models/{id}`, answered by the balancer: all models, aliases and windows.

use bytes::Bytes;
use serde_json::{Value, json};

use crate::running::tenants::TenantState;
use crate::running::{Epoch, Running};
use crate::wire::{ApiError, ErrorCode};

/// The answer's body: one model where `id` names one, else all that the tenant may use.
pub fn answer(
    running: &Running,
    epoch: &Epoch,
    tenant: Option<&TenantState>,
    id: Option<&str>,
) -> Result<Bytes, ApiError> {
    let mut all = Vec::new();
    for model in &epoch.config.models {
        if tenant.is_some_and(|t| !t.spec.models.is_empty() && !t.spec.models.contains(&model.name)) {
            continue;
        }
        let window = running.balancer.window(&model.name).map(|t| t.0);
        let name = model.name.as_str();
        all.push(entry(name, name, window));
        all.extend(model.aliases.iter().map(|alias| entry(alias, name, window)));
        all.extend(model.adapters.iter().map(|adapter| entry(adapter, name, window)));
    }
    let answer = match id {
        None => json!({"object": "list", "data": all}),
        Some(id) => all.into_iter().find(|entry| entry["id"] == id).ok_or_else(|| {
            ApiError::new(ErrorCode::ModelNotFound, "No such model; GET /v1/models lists those that are served here.")
                .param("model")
        })?,
    };
    Ok(Bytes::from(answer.to_string()))
}

fn entry(id: &str, root: &str, window: Option<u64>) -> Value {
    // vLLM's fields, so that a client of vLLM finds the window where it looks for it.
    json!({
        "id": id,
        "object": "model",
        "created": 0,
        "owned_by": "weighbridge",
        "root": root,
        "parent": if id == root { Value::Null } else { Value::from(root) },
        "max_model_len": window,
    })
}
