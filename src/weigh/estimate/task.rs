//! What a request is for, from the client's hint or from its shape.

use std::sync::LazyLock;

use aho_corasick::AhoCorasick;
use memchr::memmem::Finder;
use serde::{Deserialize, Serialize};

/// What a request is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Task {
    Chat,
    Code,
    Summary,
    Classification,
    Extraction,
    Reasoning,
    Tools,
}

impl Task {
    /// All tasks.
    pub const ALL: [Task; 7] =
        [Task::Chat, Task::Code, Task::Summary, Task::Classification, Task::Extraction, Task::Reasoning, Task::Tools];

    /// A label value for metrics, and the name a hint gives.
    pub fn label(self) -> &'static str {
        match self {
            Task::Chat => "chat",
            Task::Code => "code",
            Task::Summary => "summary",
            Task::Classification => "classification",
            Task::Extraction => "extraction",
            Task::Reasoning => "reasoning",
            Task::Tools => "tools",
        }
    }

    /// The task a client names; names nobody knows are no hint.
    pub fn from_hint(hint: &str) -> Option<Task> {
        let hint = hint.trim().to_ascii_lowercase();
        Some(match hint.as_str() {
            "chat" | "conversation" | "assistant" | "qa" => Task::Chat,
            "code" | "coding" | "code_generation" | "completion" => Task::Code,
            "summary" | "summarization" | "summarisation" | "summarize" => Task::Summary,
            "classification" | "classify" | "moderation" | "label" => Task::Classification,
            "extraction" | "extract" | "json" | "structured" => Task::Extraction,
            "reasoning" | "thinking" | "math" => Task::Reasoning,
            "tools" | "tool_use" | "agent" | "function_calling" => Task::Tools,
            _ => return None,
        })
    }

    /// Tokens an answer is taken to have before anything is learned. Chat to extraction are the contract's figures;
    /// a call of a tool is some lines of JSON, reasoning writes its thoughts down as well.
    pub fn heuristic(self) -> f64 {
        match self {
            Task::Chat => 500.0,
            Task::Code => 800.0,
            Task::Summary => 300.0,
            Task::Classification => 20.0,
            Task::Extraction => 100.0,
            Task::Reasoning => 2000.0,
            Task::Tools => 200.0,
        }
    }
}

/// An answer this short by its cap is a label.
const CLASSIFICATION_TOKENS_MAX: u64 = 32;

/// What is seen of a request's shape.
#[derive(Clone, Copy, Debug, Default)]
pub struct Shape<'a> {
    pub tools: bool,
    /// `response_format` or a grammar asks for JSON or another fixed form.
    pub structured: bool,
    pub max_tokens: Option<u64>,
    /// The client or the template switches reasoning on.
    pub reasoning: bool,
    /// The conversation as sent, JSON or text.
    pub text: &'a [u8],
}

/// The task of a request without a hint. Signs that change the length most come first.
pub fn detect(shape: &Shape<'_>) -> Task {
    if shape.max_tokens.is_some_and(|max| max <= CLASSIFICATION_TOKENS_MAX) {
        return Task::Classification;
    }
    if shape.reasoning {
        return Task::Reasoning;
    }
    if shape.tools {
        return Task::Tools;
    }
    if shape.structured {
        return Task::Extraction;
    }
    if asks_for_summary(shape.text) {
        return Task::Summary;
    }
    if CODE.find(shape.text).is_some() {
        return Task::Code;
    }
    Task::Chat
}

/// Searchers are made once: making one costs as much as it then takes over a kilobyte.
static CODE: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("```"));
/// Parts of words that ask for a summary, in English, German, French, Spanish and Chinese.
const SUMMARY: [&str; 7] = ["esum", "ummar", "tl;dr", "TL;DR", "usammenfass", "\u{e9}sum", "\u{603b}\u{7ed3}"];

/// Looks for all of them in one walk.
static ANY_SUMMARY: LazyLock<AhoCorasick> = LazyLock::new(|| {
    AhoCorasick::new(SUMMARY).unwrap_or_else(|error| unreachable!("seven short patterns make a searcher: {error}"))
});

/// Whether the beginning or the end of a conversation asks for a summary.
fn asks_for_summary(text: &[u8]) -> bool {
    const EDGE_BYTES: usize = 600;
    let asks = |edge: &[u8]| ANY_SUMMARY.is_match(edge);
    if text.len() <= 2 * EDGE_BYTES {
        return asks(text);
    }
    asks(&text[..EDGE_BYTES]) || asks(&text[text.len() - EDGE_BYTES..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_s_shape_tells_its_task() {
        let plain = Shape { text: b"Hello there", ..Shape::default() };
        assert_eq!(detect(&plain), Task::Chat);
        assert_eq!(detect(&Shape { max_tokens: Some(5), tools: true, ..plain }), Task::Classification);
        assert_eq!(detect(&Shape { tools: true, structured: true, ..plain }), Task::Tools);
        assert_eq!(detect(&Shape { structured: true, ..plain }), Task::Extraction);
        assert_eq!(detect(&Shape { reasoning: true, tools: true, ..plain }), Task::Reasoning);
        assert_eq!(detect(&Shape { text: b"fix this: ```rust\nfn main() {}```", ..plain }), Task::Code);
        for sign in SUMMARY {
            let text = format!("Please: {sign}. Thank you.");
            assert_eq!(detect(&Shape { text: text.as_bytes(), ..plain }), Task::Summary, "{sign}");
        }
    }

    #[test]
    fn every_label_is_a_hint_for_its_task() {
        for task in Task::ALL {
            assert_eq!(Task::from_hint(task.label()), Some(task));
        }
        assert_eq!(Task::from_hint("poetry"), None);
    }
}
