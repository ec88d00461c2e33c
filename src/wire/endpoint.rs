//! The paths that reach a replica: an allow-list, since engines also expose paths that unload models or erase caches.

use std::borrow::Cow;

use http::Method;

use super::error::{ApiError, ErrorCode};

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
    /// Every endpoint, for tables.
    pub const ALL: [Endpoint; 14] = [
        Endpoint::ChatCompletions,
        Endpoint::Completions,
        Endpoint::Embeddings,
        Endpoint::Rerank,
        Endpoint::Score,
        Endpoint::Classify,
        Endpoint::Responses,
        Endpoint::Messages,
        Endpoint::CountTokens,
        Endpoint::AudioTranscriptions,
        Endpoint::AudioTranslations,
        Endpoint::AudioSpeech,
        Endpoint::Tokenize,
        Endpoint::Detokenize,
    ];

    /// A label value for metrics, `chat_completions` and so on.
    pub fn label(self) -> &'static str {
        match self {
            Endpoint::ChatCompletions => "chat_completions",
            Endpoint::Completions => "completions",
            Endpoint::Embeddings => "embeddings",
            Endpoint::Rerank => "rerank",
            Endpoint::Score => "score",
            Endpoint::Classify => "classify",
            Endpoint::Responses => "responses",
            Endpoint::Messages => "messages",
            Endpoint::CountTokens => "count_tokens",
            Endpoint::AudioTranscriptions => "audio_transcriptions",
            Endpoint::AudioTranslations => "audio_translations",
            Endpoint::AudioSpeech => "audio_speech",
            Endpoint::Tokenize => "tokenize",
            Endpoint::Detokenize => "detokenize",
        }
    }

    /// Whether its answers carry generated tokens, so that an output length is predicted and drawn down.
    pub fn generates(self) -> bool {
        matches!(self, Endpoint::ChatCompletions | Endpoint::Completions | Endpoint::Responses | Endpoint::Messages)
    }

    /// Whether clients of this path expect errors in Anthropic's shape.
    pub fn anthropic(self) -> bool {
        matches!(self, Endpoint::Messages | Endpoint::CountTokens)
    }

    /// Whether a request's body is `multipart/form-data` and not JSON.
    pub fn multipart(self) -> bool {
        matches!(self, Endpoint::AudioTranscriptions | Endpoint::AudioTranslations)
    }
}

const POST: &str = "POST";
const GET: &str = "GET, HEAD";

/// Decides what a request line asks for. `path` is without its query.
///
/// One trailing slash is tolerated (engines answer it with a 404 or with a redirect to their own address), so what is
/// forwarded is [`canonical_path`]. `OPTIONS` is refused like any other wrong method: no cross-origin right is granted.
pub fn route(method: &Method, path: &str) -> Route {
    let path = canonical_path(path);
    if path == "/v1/models" || path.strip_prefix("/v1/models/").is_some_and(|id| !id.is_empty()) {
        return if method == Method::GET || method == Method::HEAD {
            Route::Models
        } else {
            Route::MethodNotAllowed(GET)
        };
    }
    match endpoint(path) {
        Some(endpoint) if method == Method::POST => Route::Inference(endpoint),
        Some(_) => Route::MethodNotAllowed(POST),
        None => Route::Unknown,
    }
}

/// The path as it is forwarded: without one trailing slash.
pub fn canonical_path(path: &str) -> &str {
    match path.strip_suffix('/') {
        Some(trimmed) if !trimmed.is_empty() && !trimmed.ends_with('/') => trimmed,
        _ => path,
    }
}

fn endpoint(path: &str) -> Option<Endpoint> {
    Some(match path {
        "/v1/chat/completions" => Endpoint::ChatCompletions,
        "/v1/completions" => Endpoint::Completions,
        "/v1/embeddings" => Endpoint::Embeddings,
        "/v1/rerank" | "/rerank" | "/v2/rerank" => Endpoint::Rerank,
        "/v1/score" | "/score" => Endpoint::Score,
        "/classify" | "/v1/classify" => Endpoint::Classify,
        "/v1/responses" => Endpoint::Responses,
        "/v1/messages" => Endpoint::Messages,
        "/v1/messages/count_tokens" => Endpoint::CountTokens,
        "/v1/audio/transcriptions" => Endpoint::AudioTranscriptions,
        "/v1/audio/translations" => Endpoint::AudioTranslations,
        "/v1/audio/speech" => Endpoint::AudioSpeech,
        "/tokenize" => Endpoint::Tokenize,
        "/detokenize" => Endpoint::Detokenize,
        _ => return None,
    })
}

/// The model id in `/v1/models/{id}`, percent-decoded; `None` for the list, or where the encoding is broken.
pub fn model_id(path: &str) -> Option<Cow<'_, str>> {
    let id = canonical_path(path).strip_prefix("/v1/models/")?;
    if !id.contains('%') {
        return Some(Cow::Borrowed(id));
    }
    let mut bytes = Vec::with_capacity(id.len());
    let mut rest = id.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let high = char::from(rest.next()?).to_digit(16)?;
        let low = char::from(rest.next()?).to_digit(16)?;
        bytes.push(u8::try_from(high * 16 + low).ok()?);
    }
    String::from_utf8(bytes).ok().map(Cow::Owned)
}

/// The error for [`Route::Unknown`]. The path is not repeated: it is a stranger's text.
pub fn unknown_path(path: &str) -> ApiError {
    let prefixed = format!("/v1{}", canonical_path(path));
    let hint = match endpoint(&prefixed) {
        Some(_) => format!("Did you mean {prefixed}? Set the client's base URL to end in /v1."),
        None => "Inference paths such as /v1/chat/completions, /v1/completions, /v1/embeddings and /v1/models are \
                 served; management paths of the engines are not."
            .to_owned(),
    };
    ApiError::new(ErrorCode::NotFound, format!("This path is not served here. {hint}"))
}

/// The error for [`Route::MethodNotAllowed`].
pub fn wrong_method(allow: &str) -> ApiError {
    ApiError::new(ErrorCode::MethodNotAllowed, format!("This path takes {allow}."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_inference_path_is_routed_with_post_and_refused_with_get() {
        let paths = [
            ("/v1/chat/completions", Endpoint::ChatCompletions),
            ("/v1/completions", Endpoint::Completions),
            ("/v1/embeddings", Endpoint::Embeddings),
            ("/v1/rerank", Endpoint::Rerank),
            ("/rerank", Endpoint::Rerank),
            ("/v2/rerank", Endpoint::Rerank),
            ("/v1/score", Endpoint::Score),
            ("/score", Endpoint::Score),
            ("/classify", Endpoint::Classify),
            ("/v1/responses", Endpoint::Responses),
            ("/v1/messages", Endpoint::Messages),
            ("/v1/messages/count_tokens", Endpoint::CountTokens),
            ("/v1/audio/transcriptions", Endpoint::AudioTranscriptions),
            ("/v1/audio/translations", Endpoint::AudioTranslations),
            ("/v1/audio/speech", Endpoint::AudioSpeech),
            ("/tokenize", Endpoint::Tokenize),
            ("/detokenize", Endpoint::Detokenize),
        ];
        for (path, endpoint) in paths {
            assert_eq!(route(&Method::POST, path), Route::Inference(endpoint), "{path}");
            assert_eq!(route(&Method::POST, &format!("{path}/")), Route::Inference(endpoint), "{path}/");
            assert_eq!(route(&Method::GET, path), Route::MethodNotAllowed("POST"), "{path}");
            assert_eq!(route(&Method::OPTIONS, path), Route::MethodNotAllowed("POST"), "{path}");
        }
    }

    #[test]
    fn models_are_read_only_and_their_ids_may_hold_slashes() {
        for path in ["/v1/models", "/v1/models/", "/v1/models/org/name", "/v1/models/org%2Fname"] {
            assert_eq!(route(&Method::GET, path), Route::Models, "{path}");
            assert_eq!(route(&Method::HEAD, path), Route::Models, "{path}");
            assert_eq!(route(&Method::DELETE, path), Route::MethodNotAllowed("GET, HEAD"), "{path}");
        }
        assert_eq!(model_id("/v1/models"), None);
        assert_eq!(model_id("/v1/models/"), None);
        assert_eq!(model_id("/v1/models/org/name").as_deref(), Some("org/name"));
        assert_eq!(model_id("/v1/models/org%2Fname/").as_deref(), Some("org/name"));
        assert_eq!(model_id("/v1/models/a%2"), None);
        assert_eq!(model_id("/v1/models/%ff"), None);
    }

    #[test]
    fn management_paths_and_disguised_paths_are_unknown() {
        for path in [
            "/",
            "",
            "//",
            "/metrics",
            "/health",
            "/slots/0?action=erase",
            "/models/unload",
            "/v1/load_lora_adapter",
            "/reset_prefix_cache",
            "/sleep",
            "/v1/chat/completions//",
            "//v1/chat/completions",
            "/v1/./chat/completions",
            "/v1/chat%2fcompletions",
            "/V1/chat/completions",
            "/v1/models/../../metrics/..x",
            "/chat/completions",
            "/v1/responses/resp_1",
        ] {
            let found = route(&Method::POST, path);
            let harmless = matches!(found, Route::Unknown | Route::MethodNotAllowed("GET, HEAD"));
            assert!(harmless, "{path}: {found:?}");
        }
    }

    #[test]
    fn a_forgotten_prefix_is_explained() {
        assert!(unknown_path("/chat/completions").message.contains("/v1/chat/completions"));
        assert!(!unknown_path("/secret").message.contains("secret"));
    }

    #[test]
    fn labels_are_distinct() {
        let labels: std::collections::HashSet<_> = Endpoint::ALL.iter().map(|e| e.label()).collect();
        assert_eq!(labels.len(), Endpoint::ALL.len());
    }
}
