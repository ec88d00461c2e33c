//! The paths that reach a replica: an allow-list, since engines also expose paths that unload models or erase caches.

use http::Method;

/// An inference path of the engines that clients may call through the balancer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Endpoint {
    ChatCompletions,
    Completions,
    Embeddings,
    Rerank,
    Score,
    Classify,
    Responses,
    Messages,
    CountTokens,
    AudioTranscriptions,
    AudioTranslations,
    AudioSpeech,
    Tokenize,
    Detokenize,
}

/// What a method and a path mean to the balancer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// Weighed, booked and proxied (or, for counting endpoints, answered here).
    Inference(Endpoint),
    /// `GET /v1/models` and `GET /v1/models/{id}`, answered by the balancer.
    Models,
    /// Known path, wrong method: 405 with `Allow`.
    MethodNotAllowed(&'static str),
    /// 404.
    Unknown,
}

impl Endpoint {
    /// A label value for metrics, `chat_completions` and so on.
    pub fn label(self) -> &'static str {
        todo!("wire")
    }
}

/// Decides what a request line asks for. `path` is without its query.
pub fn route(method: &Method, path: &str) -> Route {
    let _ = (method, path);
    todo!("wire")
}
