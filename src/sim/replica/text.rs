//! The simulated replica's own tokenizer and its answers' words.
//!
//! Not a real model's: a fixed cut of text into pieces, about as long as English tokens are, so that `/tokenize`,
//! `usage` and the prefix cache agree with each other, and an answer sent back as history counts as what it was.

use serde_json::Value;
use xxhash_rust::xxh3::xxh3_64;

use crate::sim::engine::BLOCK_TOKENS;

/// Ids of the markers around a message, and of a line's end.
const TURN_START: u32 = 1;
const TURN_END: u32 = 2;
const LINE_END: u32 = 198;
/// Ids below this are markers.
const FIRST_WORD: u32 = 256;
const VOCABULARY: u32 = 49_152;
/// Letters in one piece.
const PIECE_LETTERS: usize = 6;

/// Words of an answer: one piece each, with the blank before it.
const WORDS: [&str; 32] = [
    " the", " of", " and", " to", " in", " is", " that", " for", " it", " as", " was", " with", " be", " by", " on",
    " not", " he", " this", " are", " or", " his", " from", " at", " which", " but", " have", " an", " had", " they",
    " you", " were", " their",
];

/// Tokens around the text of a conversation of one user's message: its markers and the answer's opening.
pub const WORD_TOKENS_OF_A_TURN: u32 = 9;

/// The word at place `n` of the answer that `seed` makes.
pub fn word(seed: u64, n: u32) -> &'static str {
    let mixed = (seed ^ u64::from(n).wrapping_mul(0x9e37_79b9_7f4a_7c15)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    WORDS[(mixed >> 59) as usize % WORDS.len()]
}

/// The token id of one piece.
fn id(piece: &str) -> u32 {
    FIRST_WORD + (xxh3_64(piece.as_bytes()) % u64::from(VOCABULARY - FIRST_WORD)) as u32
}

/// Cuts text into pieces: a blank with up to six letters, up to six more letters, one digit, one line end, or one
/// other character.
pub fn tokenize(text: &str, out: &mut Vec<u32>) {
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let mut end = first.len_utf8();
        let letters_from = if first == ' ' { end } else { 0 };
        if first == ' ' || first.is_ascii_alphabetic() {
            let letters = rest.as_bytes()[letters_from..]
                .iter()
                .take(PIECE_LETTERS)
                .take_while(|b| b.is_ascii_alphabetic())
                .count();
            end = end.max(letters_from + letters);
        }
        out.push(if first == '\n' { LINE_END } else { id(&rest[..end]) });
        rest = &rest[end..];
    }
}

/// Renders a conversation as ChatML does and returns its tokens.
///
/// # Errors
/// In vLLM's words, where a part is no text.
pub fn render_chat(messages: &[Value], tools: Option<&Value>, model: &str) -> Result<Vec<u32>, String> {
    let mut out = Vec::new();
    if let Some(tools) = tools.filter(|t| !t.is_null()) {
        out.push(TURN_START);
        tokenize(&tools.to_string(), &mut out);
        out.extend([TURN_END, LINE_END]);
    }
    for message in messages {
        out.push(TURN_START);
        tokenize(message["role"].as_str().unwrap_or("user"), &mut out);
        out.push(LINE_END);
        match &message["content"] {
            Value::String(text) => tokenize(text, &mut out),
            Value::Array(parts) => {
                for part in parts {
                    match part["text"].as_str().or_else(|| part.as_str()) {
                        Some(text) => tokenize(text, &mut out),
                        None => return Err(format!("{model} is not a multimodal model")),
                    }
                }
            }
            _ => {}
        }
        if let Some(calls) = message.get("tool_calls").filter(|c| !c.is_null()) {
            tokenize(&calls.to_string(), &mut out);
        }
        out.extend([TURN_END, LINE_END]);
    }
    out.push(TURN_START);
    tokenize("assistant", &mut out);
    out.push(LINE_END);
    Ok(out)
}

/// Chained hashes of the blocks that a prompt and the answer of `output` words fill.
pub fn chain(prompt: &[u32], seed: u64, output: u32) -> Vec<u64> {
    let answer = (0..output).map(|n| id(word(seed, n)));
    let mut hashes = Vec::with_capacity((prompt.len() + output as usize) / BLOCK_TOKENS as usize);
    let mut block = Vec::with_capacity(8 + 4 * BLOCK_TOKENS as usize);
    block.extend(0u64.to_le_bytes());
    for token in prompt.iter().copied().chain(answer) {
        block.extend(token.to_le_bytes());
        if block.len() == block.capacity() {
            let hash = xxh3_64(&block);
            hashes.push(hash);
            block.clear();
            block.extend(hash.to_le_bytes());
        }
    }
    hashes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(text: &str) -> usize {
        let mut out = Vec::new();
        tokenize(text, &mut out);
        out.len()
    }

    #[test]
    fn pieces_are_about_as_long_as_english_tokens() {
        assert_eq!(count("The quick brown fox jumps over the lazy dog."), 10);
        assert_eq!(count("internationalisation"), 4);
        assert_eq!(count("2048 ünder\n"), 7 + 1);
        assert_eq!(count(""), 0);
    }

    #[test]
    fn every_word_of_an_answer_is_one_piece() {
        let text: String = (0..500).map(|n| word(7, n)).collect();
        assert_eq!(count(&text), 500);
    }

    #[test]
    fn a_follow_up_shares_the_blocks_of_its_history() {
        let ask = serde_json::json!({"role": "user", "content": "Tell me of the sea and of the ships ".repeat(9)});
        let first = render_chat(std::slice::from_ref(&ask), None, "m").unwrap();
        let answer: String = (0..100).map(|n| word(3, n)).collect();
        let history = [ask, serde_json::json!({"role": "assistant", "content": answer})];
        let second = render_chat(&history, None, "m").unwrap();
        let (one, two) = (chain(&first, 3, 100), chain(&second, 4, 0));
        let shared = one.iter().zip(&two).take_while(|(a, b)| a == b).count();
        assert_eq!(shared, one.len());
        assert!(shared > 10);
    }
}
