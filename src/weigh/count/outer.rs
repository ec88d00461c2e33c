//! Word patterns that the tokenizers library has no grammar of its own for.
//!
//! It reads such a pattern from a file and then has no engine for it, though one is compiled in. So the pattern is taken
//! out of the file, words are cut here with the library's own `Split`, and each is encoded by the rest of the file.

use std::ops::Range;

use serde_json::Value as Json;
use tokenizers::SplitDelimiterBehavior;
use tokenizers::pipeline::{
    EncodeOptions, PipelineNormalizer, PipelineToken, PipelineTokenizer, PreTokenizer, PreTokenizerScratch, Segment,
    SpecialSegmentIterator, normalize_all,
};
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};

/// The patterns that cut words before anything else does, in order.
#[derive(Debug)]
pub(super) struct Outer(Vec<Split>);

impl Outer {
    /// Takes the leading patterns that no grammar covers out of a tokenizer file. `None` where there is none.
    pub fn take(canonical: &str) -> Option<(String, Outer)> {
        let mut file: Json = serde_json::from_str(canonical).ok()?;
        let sent = file.get_mut("pre_tokenizer")?;
        let mut steps = match sent.get("type")?.as_str()? {
            "Sequence" => sent.get("pretokenizers")?.as_array()?.clone(),
            _ => vec![sent.clone()],
        };
        let mut splits = Vec::new();
        while let Some(split) = steps.first().and_then(unknown) {
            splits.push(split);
            steps.remove(0);
        }
        *sent = match steps.len() {
            0 => Json::Null,
            _ => serde_json::json!({"type": "Sequence", "pretokenizers": steps}),
        };
        (!splits.is_empty()).then(|| (file.to_string(), Outer(splits)))
    }

    /// Whether the rest of the file may see words one by one: its normalizers leave them as they are.
    pub fn suits(&self, rest: &PipelineTokenizer) -> bool {
        // A part of a composed text is composed.
        rest.get_normalizers().iter().all(|normalizer| matches!(normalizer, PipelineNormalizer::NFC(_)))
    }

    /// Encodes a text whole.
    pub fn encode(
        &self,
        rest: &PipelineTokenizer,
        text: &str,
        options: &EncodeOptions,
        ids: &mut Vec<PipelineToken>,
    ) -> Result<(), String> {
        let said = |e: tokenizers::Error| e.to_string();
        let vocabulary = rest.get_added_vocabulary();
        let mut scratch = PreTokenizerScratch::default();
        for segment in SpecialSegmentIterator::new(text, vocabulary, false, options.encode_special_tokens) {
            let (chunk, at) = match segment {
                Segment::SpecialToken(id) => {
                    ids.push(PipelineToken::from(id));
                    continue;
                }
                Segment::Text { text, input_offset } => (text, input_offset),
            };
            let chunk = normalize_all(rest.get_normalizers(), chunk, at).map_err(said)?;
            let mut words: Vec<Range<usize>> = std::iter::once(0..chunk.len()).collect();
            for split in &self.0 {
                let mut finer = Vec::with_capacity(chunk.len() / 4);
                for word in words {
                    let mut spans = Vec::new();
                    split.pre_tokenize(&chunk[word.clone()], &mut scratch, &mut spans).map_err(said)?;
                    finer.extend(spans.iter().map(|s| word.start + s.start as usize..word.start + s.end as usize));
                }
                words = finer;
            }
            for word in words {
                rest.encode_into(&chunk[word], options, ids).map_err(said)?;
            }
        }
        Ok(())
    }
}

/// A step that splits by a pattern without a grammar, with an engine for it.
fn unknown(step: &Json) -> Option<Split> {
    let regex = step.get("pattern").filter(|_| step["type"] == "Split")?.get("Regex")?.as_str()?;
    let behavior = match step["behavior"].as_str().unwrap_or("Isolated") {
        "Removed" => SplitDelimiterBehavior::Removed,
        "Isolated" => SplitDelimiterBehavior::Isolated,
        "MergedWithPrevious" => SplitDelimiterBehavior::MergedWithPrevious,
        "MergedWithNext" => SplitDelimiterBehavior::MergedWithNext,
        "Contiguous" => SplitDelimiterBehavior::Contiguous,
        _ => return None,
    };
    let split = Split::new(SplitPattern::Regex(regex.to_owned()), behavior, step["invert"].as_bool().unwrap_or(false));
    split.ok().filter(|split| split.grammar().is_none())
}
