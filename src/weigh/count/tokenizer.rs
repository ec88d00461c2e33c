//! One tokenizer: exact counts of whole texts, of segments between special tokens, and of chunks of long segments.
//!
//! Special tokens split a text exactly: the count of the whole is the sum over the segments and one for each special
//! token. Long segments are split again where a line that ends in no blank is followed by a letter. Both are true of
//! the model families measured, and both are tested against the tokenizer itself when it is loaded; where the test
//! fails, that split is not used for it.

use std::cell::RefCell;
use std::ops::Range;

use tokenizers::pipeline::{
    EncodeOptions, Override, PipelineModel, PipelineNormalizer, PipelineToken, PipelineTokenizer, Segment,
    SpecialSegmentIterator,
};

use super::approx::{Coefficients, SAMPLE};
use super::cache::{CountCache, SEGMENT_BYTES_MIN, Secret, SegmentKey};
use super::cut::{floor_boundary, lines, pieces, safe_cut};
use super::outer::Outer;

/// Spots of a text that are encoded to correct its estimate, and the bytes of each: measured, 2% mean error over 32 KB.
const SPOTS: usize = 8;
const SPOT_BYTES: usize = 512;
/// A correction past this says that the spots were not of the text's kind, or that somebody chose them.
const FACTOR_MAX: f64 = 4.0;

/// A loaded tokenizer. Cheap to share, safe to use from many threads at once.
#[derive(Debug)]
pub struct Tokenizer {
    inner: Inner,
    /// Ids from here on stand for bytes that the vocabulary leaves out; engines drop those bytes, and so do counts.
    stand_ins: u32,
    secret: Secret,
    /// Counts add up over special tokens.
    splits: bool,
    /// Counts add up over safe line ends.
    chunks: bool,
    /// The longest text that one token stands for, in bytes.
    token_bytes_max: usize,
    /// Tokens its post-processor puts around one text, and around a pair.
    added_single: u64,
    added_pair: u64,
    approx: Coefficients,
}

struct Inner(PipelineTokenizer, Option<Outer>);

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("PipelineTokenizer")
    }
}

thread_local! {
    static IDS: RefCell<Vec<PipelineToken>> = const { RefCell::new(Vec::new()) };
}

/// Ids kept in a thread's buffer between calls: 1 MiB.
const IDS_KEPT_MAX: usize = 256 << 10;

/// Only the text's own tokens: nothing added, nothing padded, nothing cut off.
fn plain() -> EncodeOptions {
    EncodeOptions {
        add_special_tokens: false,
        encode_special_tokens: false,
        padding: Override::Off,
        truncation: Override::Off,
    }
}

/// What is left to count of a text.
#[derive(Debug, Default)]
pub struct Plan {
    /// Tokens known already: special tokens, segments in the cache.
    pub known: u64,
    pub misses: Vec<Miss>,
    /// Bytes in the misses.
    pub miss_bytes: usize,
}

/// A segment that must be encoded.
#[derive(Debug)]
pub struct Miss {
    pub range: Range<usize>,
    /// Its name in the cache; `None` where it is too short to be kept.
    pub key: Option<SegmentKey>,
}

/// What a segment of a prompt costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentCost<'t> {
    pub text: &'t str,
    pub tokens: u64,
    /// One special token, or several next to each other.
    pub special: bool,
}

impl Tokenizer {
    /// Reads a `tokenizer.json` of any version.
    ///
    /// # Errors
    /// What is wrong with the file, as the tokenizers library says it.
    pub fn from_json(json: &str) -> Result<Tokenizer, String> {
        let canonical = tokenizers::canonicalize_str(json).map_err(|e| e.to_string())?;
        let (inner, stand_ins) = read(&canonical)?;
        Self::new(Inner(inner, None), stand_ins).or_else(|error| {
            let (rest, outer) = Outer::take(&canonical).ok_or(error)?;
            let (inner, stand_ins) = read(&rest)?;
            if !outer.suits(&inner) {
                return Err("its words are cut by a pattern that is not known, after a normalizer".to_owned());
            }
            Self::new(Inner(inner, Some(outer)), stand_ins)
        })
    }

    /// Tests and measures a tokenizer that was read.
    fn new(inner: Inner, stand_ins: u32) -> Result<Tokenizer, String> {
        let post = inner.0.get_post_processor();
        let (added_single, added_pair) = (post.single.n_special() as u64, post.pair.n_special() as u64);
        let mut tokenizer = Tokenizer {
            inner,
            stand_ins,
            secret: Secret::new(),
            splits: false,
            chunks: false,
            token_bytes_max: 1,
            added_single,
            added_pair,
            approx: Coefficients::default(),
        };
        tokenizer.token_bytes_max = tokenizer.longest_token();
        tokenizer.encode("ready?", &mut Vec::new())?;
        tokenizer.splits = tokenizer.adds_up_over_special_tokens();
        tokenizer.chunks = tokenizer.splits && tokenizer.adds_up_over_lines();
        tokenizer.approx = Coefficients::fit(SAMPLE, |text| tokenizer.count(text)).unwrap_or_default();
        Ok(tokenizer)
    }

    /// Encodes a text whole.
    fn encode(&self, text: &str, ids: &mut Vec<PipelineToken>) -> Result<(), String> {
        match &self.inner.1 {
            Some(outer) => outer.encode(&self.inner.0, text, &plain(), ids)?,
            None => self.inner.0.encode_into(text, &plain(), ids).map_err(|e| e.to_string())?,
        }
        if self.stand_ins != u32::MAX {
            ids.retain(|id| id.id() < self.stand_ins);
        }
        Ok(())
    }

    /// The token ids of a text; `added`: with what the post-processor puts around it.
    ///
    /// # Errors
    /// Where the tokenizer has no tokens for the text.
    pub fn ids(&self, text: &str, added: bool) -> Result<Vec<u32>, String> {
        let mut ids = Vec::new();
        self.encode(text, &mut ids)?;
        let template = &self.inner.0.get_post_processor().single;
        let around = |run: &[(PipelineToken, u8)]| run.iter().map(|(id, _)| id.id()).collect::<Vec<u32>>();
        let mut out = if added { around(&template.prefix) } else { Vec::new() };
        out.extend(ids.iter().map(|id| id.id()));
        if added {
            out.extend(around(&template.suffix));
        }
        Ok(out)
    }

    /// The tokens' own texts, as the vocabulary spells them.
    pub fn token_texts(&self, ids: &[u32]) -> Vec<String> {
        self.inner.0.decode_tokens(ids, false)
    }

    /// Tokens of a text, encoded whole. A text the tokenizer has no tokens for counts as one a byte.
    pub fn count(&self, text: &str) -> u64 {
        if text.is_empty() {
            return 0;
        }
        IDS.with_borrow_mut(|ids| {
            ids.clear();
            let count = match self.encode(text, ids) {
                Ok(()) => ids.len() as u64,
                Err(_) => text.len() as u64,
            };
            if ids.capacity() > IDS_KEPT_MAX {
                *ids = Vec::new();
            }
            count
        })
    }

    /// Tokens that are put around a single text (a BOS, say).
    pub fn added_single(&self) -> u64 {
        self.added_single
    }

    /// Tokens that are put around a pair of texts.
    pub fn added_pair(&self) -> u64 {
        self.added_pair
    }

    /// Whether the model judges pairs of texts: its post-processor separates them.
    pub fn joins_pairs(&self) -> bool {
        self.added_pair > self.added_single
    }

    /// A text cannot have fewer tokens than its bytes divided by this.
    pub fn token_bytes_max(&self) -> usize {
        self.token_bytes_max
    }

    /// What the self-tests found: counts add up over special tokens, and over lines.
    pub fn additive(&self) -> (bool, bool) {
        (self.splits, self.chunks)
    }

    /// The approximation fitted to this tokenizer.
    pub fn approx(&self) -> &Coefficients {
        &self.approx
    }

    /// Tokens of a text for each that the approximation makes of it, from a few spots of the text that are encoded:
    /// 4 KiB in all, for any length. 1 where there is nothing to go by.
    pub fn per_estimate<'t>(&self, texts: impl Iterator<Item = &'t str> + Clone) -> f64 {
        let total: usize = texts.clone().map(str::len).sum();
        let (mut counted, mut estimated) = (0.0, 0.0);
        let mut take = |spot: &str| {
            counted += self.count(spot) as f64;
            estimated += self.approx.weigh(spot);
        };
        if total <= SPOTS * SPOT_BYTES {
            texts.for_each(&mut take);
        } else {
            let mut spot = 0;
            let mut before = 0;
            for text in texts {
                // Spots lie in the middle of as many equal parts.
                let at = |spot: usize| (2 * spot + 1) * total / (2 * SPOTS);
                while spot < SPOTS && at(spot) < before + text.len() {
                    let from = floor_boundary(text, at(spot) - before);
                    let to = floor_boundary(text, (from + SPOT_BYTES).min(text.len()));
                    take(&text[from..to]);
                    spot += 1;
                }
                before += text.len();
            }
        }
        if counted > 0.0 && estimated > 0.0 { (counted / estimated).clamp(1.0 / FACTOR_MAX, FACTOR_MAX) } else { 1.0 }
    }

    /// Splits a text, looks its segments up, and says what is left to encode.
    pub fn plan(&self, text: &str, cache: &CountCache) -> Plan {
        let mut plan = Plan::default();
        let start = text.as_ptr() as usize;
        self.segments(text, &mut |piece| match piece {
            Piece::Special => plan.known += 1,
            Piece::Text(segment) => {
                let key = (segment.len() >= SEGMENT_BYTES_MIN).then(|| self.secret.key(segment));
                match key.and_then(|key| cache.get(key)) {
                    Some(count) => plan.known += u64::from(count),
                    None => {
                        let from = segment.as_ptr() as usize - start;
                        plan.miss_bytes += segment.len();
                        plan.misses.push(Miss { range: from..from + segment.len(), key });
                    }
                }
            }
        });
        plan
    }

    /// Encodes one miss of a plan for `text` and keeps its count.
    pub fn settle(&self, text: &str, miss: &Miss, cache: &CountCache) -> u64 {
        let count = self.count(&text[miss.range.clone()]);
        if let (Some(key), Ok(count)) = (miss.key, u32::try_from(count)) {
            cache.put(key, count);
        }
        count
    }

    /// Tokens of a text, through the cache.
    pub fn count_cached(&self, text: &str, cache: &CountCache) -> u64 {
        let plan = self.plan(text, cache);
        plan.known + plan.misses.iter().map(|miss| self.settle(text, miss, cache)).sum::<u64>()
    }

    /// A text's segments in order with their tokens, and whether each is a special token.
    pub fn costs<'t>(&self, text: &'t str) -> Vec<SegmentCost<'t>> {
        let mut costs: Vec<SegmentCost<'t>> = Vec::new();
        let mut at = 0;
        self.segments(text, &mut |piece| {
            if let Piece::Text(segment) = piece {
                let from = segment.as_ptr() as usize - text.as_ptr() as usize;
                if from > at {
                    costs.push(SegmentCost { text: &text[at..from], tokens: 0, special: true });
                }
                at = from + segment.len();
                costs.push(SegmentCost { text: segment, tokens: self.count(segment), special: false });
            }
        });
        if at < text.len() {
            costs.push(SegmentCost { text: &text[at..], tokens: 0, special: true });
        }
        for cost in costs.iter_mut().filter(|cost| cost.special) {
            cost.tokens = self.count(cost.text);
        }
        costs
    }

    /// Walks a text's segments in order.
    fn segments<'t>(&self, text: &'t str, take: &mut dyn FnMut(Piece<'t>)) {
        if !self.splits {
            if !text.is_empty() {
                take(Piece::Text(text));
            }
            return;
        }
        let vocabulary = self.inner.0.get_added_vocabulary();
        for segment in SpecialSegmentIterator::new(text, vocabulary, false, false) {
            match segment {
                Segment::SpecialToken(_) => take(Piece::Special),
                Segment::Text { text, .. } if self.chunks => lines(text, &mut |chunk| take(Piece::Text(chunk))),
                Segment::Text { text, .. } => take(Piece::Text(text)),
            }
        }
    }

    /// The longest text of one token, where nothing can stand for more bytes than its token spells: byte-level BPE,
    /// without normalizers that remove text. Composing (NFC) makes three bytes one at most. Else there is no bound.
    fn longest_token(&self) -> usize {
        let PipelineModel::BPE(model) = self.inner.0.get_model() else { return usize::MAX };
        if !model.is_byte_level() {
            return usize::MAX;
        }
        let mut growth = 1;
        for normalizer in self.inner.0.get_normalizers() {
            match normalizer {
                PipelineNormalizer::NFC(_) => growth = 3,
                PipelineNormalizer::ByteLevel(_) | PipelineNormalizer::Prepend(_) => {}
                _ => return usize::MAX,
            }
        }
        let added = self.inner.0.get_added_vocabulary().get_added_tokens_decoder();
        if added.values().any(|token| token.lstrip || token.rstrip) {
            return usize::MAX;
        }
        let mut longest = added.values().map(|token| token.content.len()).max().unwrap_or(0);
        let (mut id, mut absent) = (0, 0);
        // Ids are dense but for holes that vocabularies leave before their added tokens.
        while absent < 4096 {
            match self.inner.0.get_model().id_to_token(id) {
                Some(token) => {
                    longest = longest.max(token.len());
                    absent = 0;
                }
                None => absent += 1,
            }
            id += 1;
        }
        longest.max(1) * growth
    }

    /// The texts of its first special tokens by id, at most 8.
    pub fn special_texts(&self) -> Vec<String> {
        let added = self.inner.0.get_added_vocabulary().get_added_tokens_decoder();
        let mut texts: Vec<(u32, String)> = added.into_iter().map(|(id, token)| (id, token.content)).collect();
        texts.sort();
        texts.truncate(8);
        texts.into_iter().map(|(_, text)| text).collect()
    }

    /// Compares whole counts with sums over special tokens, on sample text with special tokens between its pieces,
    /// next to blanks, newlines, letters and each other.
    fn adds_up_over_special_tokens(&self) -> bool {
        let specials = self.special_texts();
        if specials.is_empty() {
            return true;
        }
        let pieces: Vec<&str> = pieces(SAMPLE, 160, 120).collect();
        let glue = ["", " ", "\n", "  \n\n", "a", "é", "1", ".", "天", "'s"];
        pieces.windows(2).enumerate().all(|(i, pair)| {
            let special = &specials[i % specials.len()];
            let other = &specials[(i / 3) % specials.len()];
            let (left, right) = (glue[i % glue.len()], glue[(i * 7 + 3) % glue.len()]);
            let text = format!("{special}{}{left}{special}{other}{right}{}{special}", pair[0], pair[1]);
            let vocabulary = self.inner.0.get_added_vocabulary();
            let sum: u64 = SpecialSegmentIterator::new(&text, vocabulary, false, false)
                .map(|segment| match segment {
                    Segment::SpecialToken(_) => 1,
                    Segment::Text { text, .. } => self.count(text),
                })
                .sum();
            sum == self.count(&text)
        })
    }

    /// Compares whole counts with sums over safe line ends, on each such place in the sample and on made-up ones.
    fn adds_up_over_lines(&self) -> bool {
        let made =
            ["x;\nabc", "x\n\n\nabc", "1\nb", "天\nc", ")\n\nThe", "\"\nA", "é\nz", "\u{301}\nq", "*/\nfn", "...\nI"];
        let cut = |text: &str| {
            let mut at = 0;
            while let Some(next) = safe_cut(text, at) {
                if self.count(&text[..next]) + self.count(&text[next..]) != self.count(text) {
                    return false;
                }
                at = next;
            }
            true
        };
        made.iter().all(|text| cut(text)) && pieces(SAMPLE, 600, 200).all(cut)
    }
}

/// Reads a file, with an entry for each byte its vocabulary leaves out where the library asks for them; the first such
/// id, else `u32::MAX`.
fn read(canonical: &str) -> Result<(PipelineTokenizer, u32), String> {
    match tokenizers::from_json(canonical) {
        Ok(inner) => Ok((inner, u32::MAX)),
        Err(error) => {
            // Some byte-level vocabularies leave out bytes that no text holds, and this library refuses them.
            let (whole, stand_ins) = with_every_byte(canonical).ok_or_else(|| error.to_string())?;
            Ok((tokenizers::from_json(&whole).map_err(|_| error.to_string())?, stand_ins))
        }
    }
}

/// A byte-level BPE file with an entry for each byte its vocabulary leaves out, and the first such id. No merge knows
/// the new entries, so everything else is encoded as before. `None` where it is another kind of file.
fn with_every_byte(canonical: &str) -> Option<(String, u32)> {
    let mut file: serde_json::Value = serde_json::from_str(canonical).ok()?;
    let added = file["added_tokens"].as_array().map(Vec::as_slice).unwrap_or_default();
    let added_max = added.iter().filter_map(|token| token["id"].as_u64()).max().unwrap_or(0);
    let vocabulary = file.get_mut("model")?.get_mut("vocab")?.as_object_mut()?;
    let first = vocabulary.values().filter_map(serde_json::Value::as_u64).max()?.max(added_max) + 1;
    let mut next = first;
    for byte in 0..=255 {
        let name = byte_level_char(byte).to_string();
        if !vocabulary.contains_key(&name) {
            vocabulary.insert(name, next.into());
            next += 1;
        }
    }
    Some((file.to_string(), u32::try_from(first).ok()?))
}

/// How GPT-2's byte-level vocabularies spell a byte: itself where it prints, else the next letter from U+0100 on.
pub(crate) fn byte_level_char(byte: u8) -> char {
    let prints = |b: u8| matches!(b, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    if prints(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|b| !prints(*b)).count() as u32;
    char::from_u32(0x100 + before).unwrap_or(char::REPLACEMENT_CHARACTER)
}

enum Piece<'t> {
    Special,
    Text(&'t str),
}
