//! `replica`: the engine's own `/tokenize` and `/apply-template`.

use async_trait::async_trait;
use bytes::Bytes;

use crate::units::ModelName;

/// Asks a replica of a model: given by the room that knows the replicas.
#[async_trait]
pub trait ReplicaAsk: Send + Sync + std::fmt::Debug {
    /// Sends `body` as JSON to `path` of a healthy replica of the model, and gives the body of its 200.
    ///
    /// # Errors
    /// What went wrong; the prompt is then estimated.
    async fn ask(&self, model: &ModelName, path: &str, body: Bytes) -> Result<Bytes, String>;
}

use crate::config::{Engine, Model};
use crate::weigh::count::CountCache;
use crate::wire::Request;

/// Asks for a request's prompt tokens. `None` where no replica answers in a known shape.
pub async fn count(
    ask: &dyn ReplicaAsk,
    model: &Model,
    request: &Request,
    engine: Engine,
    cache: &CountCache,
) -> Option<u64> {
    let _ = (ask, model, request, engine, cache);
    None
}
