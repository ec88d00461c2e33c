//! Asking a replica to count a prompt, for models whose tokenizer is the engine's own.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;

use crate::balance::Gate;
use crate::units::ModelName;
use crate::weigh::source::replica::ReplicaAsk;

use super::client::{Answer, Failure};
use super::keeper::Fleet;
use super::member::Member;

/// A request waits for this count: later than this, an estimate serves it better.
const TIMEOUT: Duration = Duration::from_secs(1);

impl Fleet {
    /// One of the replicas of a model that take requests; any of them, since each counts the same.
    fn open_member(&self, model: &ModelName) -> Option<Arc<Member>> {
        let replicas = self.balancer().replicas();
        let open = |r: &&Arc<crate::balance::Replica>| r.gate() == Gate::Open && r.spec().models.contains(model);
        let count = replicas.iter().filter(open).count();
        let chosen = replicas.iter().filter(open).nth(rand::random_range(0..count.max(1)))?;
        self.member(chosen.id())
    }
}

#[async_trait]
impl ReplicaAsk for Fleet {
    async fn ask(&self, model: &ModelName, path: &str, body: Bytes) -> Result<Bytes, String> {
        let member = self.open_member(model).ok_or_else(|| format!("no replica of {model} is open"))?;
        match member.client()?.ask(path, body, TIMEOUT).await {
            Ok(Answer { status: 200, body }) => Ok(body.into()),
            Ok(Answer { status, .. }) => Err(format!("replica {} answers {status} to {path}", member.id)),
            Err(Failure::Timeout) => Err(format!("replica {} does not answer {path} in time", member.id)),
            Err(Failure::Broken(why)) => Err(format!("replica {}: {path}: {why}", member.id)),
        }
    }
}
