//! What an engine's refusal means: whose fault it is, and whether another replica should be asked.
//!
//! Status alone does not tell. llama-server answers a client's malformed request with 500; vLLM's full queue is a 503
//! without `Retry-After`; both are captured from live servers.

use super::json::{Cursor, Kind};

/// What an answer's status and the beginning of its body say about the replica and the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// Not an error.
    Fine,
    /// The request is at fault: pass the answer on, never retry, never count it against the replica.
    ClientFault,
    /// The prompt exceeds this engine's window: the request's fault, and the window in the books is wrong.
    ContextExceeded,
    /// The engine is full or still loading: another replica may take it; this one is backed off, not ill.
    Load,
    /// The engine does not have this model, path or feature: a mistake in the configuration, of no health.
    Misrouted,
    /// The engine failed: counts against its health.
    Ill,
}

impl Verdict {
    /// Whether another replica may be asked, as long as nothing was sent to the client. An engine that failed may
    /// have been generating, so its failure is passed on.
    pub fn retry_elsewhere(self) -> bool {
        self == Verdict::Load
    }

    /// Whether it counts against the replica's health.
    pub fn ill(self) -> bool {
        self == Verdict::Ill
    }
}

/// What is read of an error's body.
const BODY_BYTES_MAX: usize = 16 << 10;

/// Judges an answer by its status and, as far as it was read, its body (which may be empty or not JSON).
pub fn judge(status: u16, body: &[u8]) -> Verdict {
    let said = Said::read(&body[..body.len().min(BODY_BYTES_MAX)]);
    match status {
        0..400 => Verdict::Fine,
        // vLLM, SGLang, llama.cpp; 422 is TGI's.
        400 | 413 | 422 if said.context_exceeded() => Verdict::ContextExceeded,
        // The balancer routed it: a replica that does not know the model or path is configured wrongly.
        404 | 501 => Verdict::Misrouted,
        429 | 503 | 529 => Verdict::Load,
        400..500 => Verdict::ClientFault,
        500 if said.context_exceeded() => Verdict::ContextExceeded,
        500 if said.client_fault() => Verdict::ClientFault,
        _ => Verdict::Ill,
    }
}

/// What an error's body says.
#[derive(Default)]
struct Said {
    kind: String,
    code: String,
    message: String,
}

impl Said {
    /// Reads `{"error":{…}}`, or vLLM's older form with the same members at the top. What is cut off is not needed.
    fn read(body: &[u8]) -> Said {
        let mut said = Said::default();
        let mut cursor = Cursor::lenient(body);
        // A body that is cut or no JSON has said what came before the fault.
        let _ = said.object(&mut cursor, true);
        said
    }

    fn object(&mut self, cursor: &mut Cursor<'_>, top: bool) -> super::json::Result<()> {
        if cursor.kind()? != Kind::Object {
            return Ok(());
        }
        cursor.open()?;
        let mut first = true;
        while let Some(key) = cursor.next_key(&mut first)? {
            match cursor.slice(&key.inner) {
                b"error" if top && cursor.kind()? == Kind::Object => self.object(cursor, false)?,
                b"error" | b"message" if cursor.kind()? == Kind::Text => self.message = text(cursor)?,
                b"type" | b"error_type" if cursor.kind()? == Kind::Text => self.kind = text(cursor)?,
                b"code" if cursor.kind()? == Kind::Text => self.code = text(cursor)?,
                _ => {
                    cursor.skip()?;
                }
            }
        }
        Ok(())
    }

    fn context_exceeded(&self) -> bool {
        self.kind == "exceed_context_size_error"
            || self.code == "context_length_exceeded"
            || CONTEXT_PHRASES.iter().any(|phrase| self.message.contains(phrase))
    }

    /// llama-server's 500 for what the client sent: its JSON library's errors, and inputs it has no part for.
    fn client_fault(&self) -> bool {
        self.kind == "invalid_request_error" || CLIENT_PHRASES.iter().any(|phrase| self.message.contains(phrase))
    }
}

fn text(cursor: &mut Cursor<'_>) -> super::json::Result<String> {
    let text = cursor.text()?;
    Ok(super::json::unescape(cursor.slice(&text.inner), text.escaped).into_owned())
}

const CONTEXT_PHRASES: [&str; 5] = [
    // vLLM
    "maximum context length is",
    "longer than the maximum model length",
    // SGLang
    "longer than the model's context length",
    // llama.cpp
    "exceeds the available context size",
    // TGI: `inputs` tokens + `max_new_tokens` must be <= N
    "`inputs` tokens + `max_new_tokens` must be",
];

const CLIENT_PHRASES: [&str; 5] = [
    "[json.exception.parse_error",
    "[json.exception.type_error",
    "[json.exception.out_of_range",
    "input is not supported - hint",
    "is not supported by this model",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn llama_servers_500_for_a_clients_fault_is_no_illness() {
        for message in [
            "[json.exception.parse_error.101] parse error at line 1, column 15: syntax error",
            "image input is not supported - hint: if this is unexpected, you may need to provide the mmproj",
        ] {
            let body = format!(r#"{{"error":{{"code":500,"message":"{message}","type":"server_error"}}}}"#);
            assert_eq!(judge(500, body.as_bytes()), Verdict::ClientFault, "{message}");
        }
        assert_eq!(
            judge(500, br#"{"error":{"code":500,"message":"failed to decode","type":"server_error"}}"#),
            Verdict::Ill
        );
        assert_eq!(judge(500, b""), Verdict::Ill);
        assert_eq!(judge(502, b"<html>bad gateway</html>"), Verdict::Ill);
    }

    #[test]
    fn a_full_or_loading_engine_is_load() {
        let vllm = br#"{"error":{"message":"The engine is currently busy and cannot accept new requests. Please try again later or on a different instance.","type":"Service Unavailable","param":null,"code":503}}"#;
        let llama = br#"{"error":{"message":"Loading model","type":"unavailable_error","code":503}}"#;
        for (status, body) in
            [(503, vllm.as_slice()), (503, llama), (503, b"upstream connect error"), (429, b""), (529, b"")]
        {
            let verdict = judge(status, body);
            assert_eq!(verdict, Verdict::Load);
            assert!(verdict.retry_elsewhere() && !verdict.ill());
        }
    }

    #[test]
    fn a_prompt_past_the_window_is_known_in_every_engines_words() {
        let llama = br#"{"error":{"code":400,"message":"request (4127 tokens) exceeds the available context size (2048 tokens), try increasing it","type":"exceed_context_size_error","n_prompt_tokens":4127,"n_ctx":2048}}"#;
        let vllm = br#"{"error":{"message":"This model's maximum context length is 2048 tokens. However, your prompt contains at least 2049 input tokens","type":"BadRequestError","param":"input_tokens","code":400}}"#;
        let old = br#"{"object":"error","message":"This model's maximum context length is 2048 tokens.","code":400}"#;
        let sglang = br#"{"error":{"message":"The input (9 tokens) is longer than the model's context length (8 tokens).","code":400}}"#;
        let openai = br#"{"error":{"message":"x","code":"context_length_exceeded"}}"#;
        let tgi = br#"{"error":"Input validation error: `inputs` tokens + `max_new_tokens` must be <= 8","error_type":"validation"}"#;
        for (status, body) in
            [(400, llama.as_slice()), (400, vllm), (400, old), (400, sglang), (400, openai), (422, tgi)]
        {
            assert_eq!(judge(status, body), Verdict::ContextExceeded, "{}", String::from_utf8_lossy(body));
        }
    }

    #[test]
    fn other_answers_are_judged_by_their_status() {
        assert_eq!(judge(200, b""), Verdict::Fine);
        assert_eq!(judge(307, b""), Verdict::Fine);
        assert_eq!(judge(400, br#"{"detail":"There was an error parsing the body"}"#), Verdict::ClientFault);
        assert_eq!(judge(401, b""), Verdict::ClientFault);
        assert_eq!(judge(404, br#"{"error":{"message":"The model `x` does not exist."}}"#), Verdict::Misrouted);
        assert_eq!(judge(501, b""), Verdict::Misrouted);
        assert_eq!(judge(504, b""), Verdict::Ill);
        assert!(!judge(400, b"").retry_elsewhere());
    }

    #[test]
    fn a_body_that_is_cut_or_huge_is_judged_by_what_is_there() {
        let head = br#"{"error":{"type":"exceed_context_size_error","message":"cut"#;
        assert_eq!(judge(400, head), Verdict::ContextExceeded);
        let huge = [b"{\"error\":{\"message\":\"".as_slice(), &vec![b'x'; 1 << 20]].concat();
        assert_eq!(judge(500, &huge), Verdict::Ill);
    }
}
