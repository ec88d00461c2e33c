//! Vocabularies given as ranked byte strings (tiktoken, Mistral's tekken), made into byte-level BPE.
//!
//! Such a vocabulary merges the neighbours whose union has the lowest rank. That is BPE with, for each token in order,
//! every pair of tokens that makes it up as a merge; the one tokenizer of this house then counts for all.

use std::collections::HashMap;

use serde_json::json;

use crate::weigh::count::Tokenizer;
use crate::weigh::count::tokenizer::byte_level_char;
use crate::weigh::media::decode_base64;

/// OpenAI's published patterns for splitting text into words.
const R50K: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const CL100K: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const O200K: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

/// Ranks that a vocabulary may leave out in a row before it is at its end.
const HOLE_MAX: u32 = 64;

/// A tiktoken encoding by its name.
///
/// # Errors
/// A name nobody knows, with those that are known.
pub fn tiktoken(name: &str) -> Result<Tokenizer, String> {
    let (built, pattern) = match name {
        "r50k_base" | "gpt2" => (tiktoken_rs::r50k_base(), R50K),
        "p50k_base" => (tiktoken_rs::p50k_base(), R50K),
        "p50k_edit" => (tiktoken_rs::p50k_edit(), R50K),
        "cl100k_base" => (tiktoken_rs::cl100k_base(), CL100K),
        "o200k_base" => (tiktoken_rs::o200k_base(), O200K),
        "o200k_harmony" => (tiktoken_rs::o200k_harmony(), O200K),
        _ => {
            return Err(format!(
                "tiktoken:{name} is not known; there are r50k_base, p50k_base, p50k_edit, cl100k_base, o200k_base \
                 and o200k_harmony"
            ));
        }
    };
    let (tokens, specials) = vocabulary(&built.map_err(|e| e.to_string())?);
    build(&tokens, &specials, pattern, None)
}

/// Ids with what they stand for.
type Ranked<T> = Vec<(u32, T)>;

/// An encoding's tokens in the order of their ranks, and its special tokens.
fn vocabulary(encoding: &tiktoken_rs::CoreBPE) -> (Ranked<Vec<u8>>, Ranked<String>) {
    let mut specials: Vec<(u32, String)> = encoding
        .special_tokens()
        .into_iter()
        .filter_map(|text| match encoding.encode_with_special_tokens(text).as_slice() {
            [id] => Some((*id, text.to_owned())),
            _ => None,
        })
        .collect();
    specials.sort();
    let mut tokens = Vec::new();
    let (mut id, mut hole) = (0, 0);
    while hole < HOLE_MAX {
        let special = specials.binary_search_by_key(&id, |special| special.0).is_ok();
        match encoding.decode_bytes(&[id]) {
            Ok(bytes) if !special => {
                tokens.push((id, bytes));
                hole = 0;
            }
            _ => hole += 1,
        }
        id += 1;
    }
    (tokens, specials)
}

/// Control tokens of files that do not list their own, in the order of their ids.
const TEKKEN_CONTROL: [&str; 20] = [
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
    "[IMG]",
    "<pad>",
    "[IMG_BREAK]",
    "[IMG_END]",
    "[PREFIX]",
    "[MIDDLE]",
    "[SUFFIX]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
];

#[derive(serde::Deserialize)]
struct Tekken {
    config: TekkenConfig,
    vocab: Vec<TekkenToken>,
    #[serde(default)]
    special_tokens: Option<Vec<TekkenSpecial>>,
}

#[derive(serde::Deserialize)]
struct TekkenConfig {
    pattern: String,
    default_vocab_size: usize,
    default_num_special_tokens: usize,
}

#[derive(serde::Deserialize)]
struct TekkenToken {
    rank: u32,
    token_bytes: String,
}

#[derive(serde::Deserialize)]
struct TekkenSpecial {
    rank: u32,
    token_str: String,
}

/// Mistral's tekken file. Its first ids are control tokens, the vocabulary's follow.
///
/// # Errors
/// What is wrong with the file.
pub fn tekken(json: &[u8]) -> Result<Tokenizer, String> {
    let file: Tekken = serde_json::from_slice(json).map_err(|e| e.to_string())?;
    let control = file.config.default_num_special_tokens;
    let kept = file.config.default_vocab_size.saturating_sub(control);
    let offset = u32::try_from(control).map_err(|_| "default_num_special_tokens is too large".to_owned())?;
    let specials: Vec<(u32, String)> = match file.special_tokens {
        Some(listed) => listed.into_iter().map(|token| (token.rank, token.token_str)).collect(),
        None => (0..).zip(TEKKEN_CONTROL.map(str::to_owned)).collect(),
    };
    let tokens: Vec<(u32, Vec<u8>)> = file
        .vocab
        .iter()
        .take(kept)
        .map(|token| (token.rank.saturating_add(offset), decode_base64(token.token_bytes.as_bytes())))
        .collect();
    let bos = specials.iter().find(|(_, text)| text == "<s>").cloned();
    build(&tokens, &specials, &file.config.pattern, bos)
}

/// Tokens in the order of their ranks as a tokenizer. `bos` is put before single texts.
fn build(
    tokens: &[(u32, Vec<u8>)],
    specials: &[(u32, String)],
    pattern: &str,
    bos: Option<(u32, String)>,
) -> Result<Tokenizer, String> {
    let spelled = |bytes: &[u8]| bytes.iter().map(|byte| byte_level_char(*byte)).collect::<String>();
    let ids: HashMap<&[u8], u32> = tokens.iter().map(|(id, bytes)| (bytes.as_slice(), *id)).collect();
    let mut vocabulary = serde_json::Map::new();
    let mut merges = Vec::new();
    for (id, bytes) in tokens {
        for at in 1..bytes.len() {
            let (left, right) = bytes.split_at(at);
            if ids.contains_key(left) && ids.contains_key(right) {
                merges.push(json!([spelled(left), spelled(right)]));
            }
        }
        vocabulary.insert(spelled(bytes), (*id).into());
    }
    // An added token takes its id from the vocabulary where it stands there, and the next free one elsewhere.
    for (id, text) in specials {
        vocabulary.insert(text.clone(), (*id).into());
    }
    let added: Vec<serde_json::Value> = specials
        .iter()
        .map(|(id, text)| {
            json!({"id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false,
                   "normalized": false, "special": true})
        })
        .collect();
    let post = bos.map(|(id, text)| {
        let mut special = serde_json::Map::new();
        special.insert(text.clone(), json!({"id": text, "ids": [id], "tokens": [text]}));
        json!({
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": text, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"SpecialToken": {"id": text, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
                     {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": special,
        })
    });
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let split = json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
    let file = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": post,
        "decoder": byte_level,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": true,
                  "vocab": vocabulary, "merges": merges},
    });
    Tokenizer::from_json(&file.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::weigh::count::approx::SAMPLE;

    fn sample_agrees(name: &str, truth: &tiktoken_rs::CoreBPE) {
        let tokenizer = tiktoken(name).unwrap();
        for (i, line) in SAMPLE.split_inclusive('\n').enumerate().step_by(3) {
            let text = format!("{line}<|endoftext|>{}", if i.is_multiple_of(2) { " x" } else { "\n\n y" });
            let expected: Vec<u32> = truth.encode_with_special_tokens(&text);
            assert_eq!(tokenizer.ids(&text, false).unwrap(), expected, "{name}: {text:?}");
        }
    }

    #[test]
    fn tiktoken_encodings_give_the_ids_that_tiktoken_gives() {
        sample_agrees("r50k_base", &tiktoken_rs::r50k_base().unwrap());
        sample_agrees("p50k_base", &tiktoken_rs::p50k_base().unwrap());
        sample_agrees("cl100k_base", &tiktoken_rs::cl100k_base().unwrap());
        sample_agrees("o200k_base", &tiktoken_rs::o200k_base().unwrap());
    }

    #[test]
    fn tiktoken_encodings_count_as_their_publisher_says() {
        // From OpenAI's cookbook, "How to count tokens with tiktoken".
        let texts = ["antidisestablishmentarianism", "2 + 2 = 4", "お誕生日おめでとう"];
        for (name, counts) in [("p50k_base", [5, 5, 14]), ("cl100k_base", [6, 7, 9]), ("o200k_base", [6, 7, 8])] {
            let tokenizer = tiktoken(name).unwrap();
            assert_eq!(texts.map(|text| tokenizer.count(text)), counts, "{name}");
        }
    }

    #[test]
    fn a_pattern_that_no_fast_path_knows_is_exact_all_the_same() {
        // Letters in sixes, digits in pairs and fours, blanks by a look ahead: no model's, so no grammar of the library's.
        let patterns = [
            r"\p{L}{1,6}|\p{N}{1,2}|[^\s\p{L}\p{N}]+|\s+",
            r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,4}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+",
        ];
        let (tokens, specials) = vocabulary(&tiktoken_rs::r50k_base().unwrap());
        for pattern in patterns {
            let ranks = tokens.iter().map(|(id, bytes)| (bytes.clone(), *id)).collect();
            let special = specials.iter().map(|(id, text)| (text.clone(), *id)).collect();
            let truth = tiktoken_rs::CoreBPE::new(ranks, special, pattern).unwrap();
            let tokenizer = build(&tokens, &specials, pattern, None).unwrap();
            let cache = crate::weigh::count::CountCache::new(1 << 20);
            let long = format!("{}x\nand {}", " ".repeat(5000), "1234567".repeat(800));
            for text in SAMPLE.split_inclusive('\n').step_by(3).chain([long.as_str(), SAMPLE]) {
                let text = format!("{text}<|endoftext|>\n\n y{text}");
                let expected: Vec<u32> = truth.encode_with_special_tokens(&text);
                assert_eq!(tokenizer.ids(&text, false).unwrap(), expected, "{pattern}: {text:?}");
                assert_eq!(tokenizer.count_cached(&text, &cache), expected.len() as u64, "{pattern}: {text:?}");
            }
        }
    }

    #[test]
    fn an_unknown_encoding_is_answered_with_the_known_ones() {
        assert!(tiktoken("p51k").unwrap_err().contains("cl100k_base"));
    }

    #[test]
    fn a_tekken_file_s_ids_follow_its_control_tokens() {
        let tokens = ["a", "b", "ab", "c", "never"].map(str::as_bytes);
        let base64 = ["YQ==", "Yg==", "YWI=", "Yw==", "bmV2ZXI="];
        assert_eq!(base64.map(|text| decode_base64(text.as_bytes())), tokens.map(<[u8]>::to_vec));
        let vocabulary: Vec<_> =
            base64.iter().enumerate().map(|(rank, text)| json!({"rank": rank, "token_bytes": text})).collect();
        let file = json!({
            "config": {"pattern": CL100K, "default_vocab_size": 24, "default_num_special_tokens": 20},
            "vocab": vocabulary,
        });
        let tokenizer = tekken(file.to_string().as_bytes()).unwrap();
        assert_eq!(tokenizer.ids("[INST]abc", true).unwrap(), [1, 3, 22, 23]);
        assert_eq!(tokenizer.count("abc"), 2, "the fifth token is past the vocabulary's size");
    }
}
