//! Counts of words seen before: what most of a prompt is made of, without encoding it again.
//!
//! A text is cut before each blank that follows a printing ASCII character, and behind each safe line end. Where a
//! tokenizer's counts add up over these cuts (tested against the tokenizer itself when it is loaded), the tokens of a
//! text are the sum over its words, blank and punctuation included, and a word costs one look at one cache line.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use super::cut::is_safe_line_end;

/// Longer words are encoded each time.
const WORD_BYTES_MAX: usize = 32;
/// Words of one cache line: any of them may take any place in it.
const WAYS: usize = 8;
/// Cache lines of one tokenizer: 256 KiB for 32,768 words.
const LINES: usize = 4096;
/// Unknown words are encoded when so much of them is gathered.
const GATHERED_BYTES: usize = 8 << 10;

/// The low byte of an entry is a count, the rest a word's name.
const COUNT_BITS: u32 = 8;

/// A line of words; no entry is 0 but an empty one, since no word counts nothing.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Line([AtomicU64; WAYS]);

/// Counts by word, of one tokenizer. Shared by all threads without a lock: an entry is one number.
///
/// A word's name is its hash under seeds of the tokenizer's own: 64 bits, of which 56 are kept and the rest choose the
/// line. Two words that share it are miscounted by a token or so; at 400,000 words a second, a tenth of them new, that
/// is once in centuries.
#[derive(Debug)]
pub(super) struct Words {
    lines: Box<[Line]>,
    seeds: [u64; 3],
}

impl Words {
    pub(super) fn new() -> Words {
        Words { lines: (0..LINES).map(|_| Line::default()).collect(), seeds: rand::random() }
    }

    /// The name of the word that stands at a range of a text.
    #[inline]
    fn name(&self, text: &[u8], from: usize, to: usize) -> u64 {
        let [one, two, three] = self.seeds;
        let len = to - from;
        let (head, tail) = match len {
            0..8 => (eight(text, from) & !(u64::MAX << (8 * len)), 0),
            8 => (eight(text, from), 0),
            _ => (eight(text, from), eight(text, to - 8)),
        };
        let mut name = folded(head ^ one, tail ^ two ^ len as u64);
        if len > 16 {
            name = folded(name ^ eight(text, from + 8), eight(text, to - 16) ^ three);
        }
        folded(name ^ two, three)
    }

    #[inline]
    fn line(&self, name: u64) -> &Line {
        &self.lines[(name % LINES as u64) as usize]
    }

    #[inline]
    fn get(&self, name: u64) -> Option<u64> {
        // Where an entry's upper bits are the name's, what is left of it is its count; an empty one leaves the name.
        let upper = name >> COUNT_BITS << COUNT_BITS;
        let found = self.line(name).0.iter().map(|entry| entry.load(Ordering::Relaxed) ^ upper);
        found.into_iter().find(|left| (1..=0xff).contains(left))
    }

    fn put(&self, name: u64, count: u64) {
        if count == 0 || count > 0xff {
            return;
        }
        let line = &self.line(name).0;
        let free = line.iter().find(|entry| entry.load(Ordering::Relaxed) == 0);
        // One that is as good as any other makes room.
        let place = free.unwrap_or(&line[(name >> 32) as usize % WAYS]);
        place.store(name >> COUNT_BITS << COUNT_BITS | count, Ordering::Relaxed);
    }

    /// Tokens of a text. Words that are not known are gathered in `unknown` (empty before and after) and encoded in one
    /// piece, since encoding one alone costs as much as forty of them together: `encode` tells how many tokens a text
    /// has, and how many bytes each of them stands for.
    pub(super) fn count(
        &self,
        text: &str,
        unknown: &mut Unknown,
        encode: &mut dyn FnMut(&str, &mut Vec<u8>) -> u64,
    ) -> u64 {
        let mut total = 0;
        let (mut before, mut from) = (0, 0);
        for to in ends(text) {
            let name = if to - from <= WORD_BYTES_MAX { Some(self.name(text.as_bytes(), from, to)) } else { None };
            match name.and_then(|name| self.get(name)) {
                Some(tokens) => total += tokens,
                None => total += self.gather(text, before..from, from..to, name, unknown, encode),
            }
            (before, from) = (from, to);
        }
        total + self.learn(unknown, encode)
    }

    /// Gathers an unknown word. Returns the tokens of those that had to be encoded to make room for it.
    #[cold]
    fn gather(
        &self,
        text: &str,
        before: Range<usize>,
        word: Range<usize>,
        name: Option<u64>,
        unknown: &mut Unknown,
        encode: &mut dyn FnMut(&str, &mut Vec<u8>) -> u64,
    ) -> u64 {
        let mut settled = 0;
        if !joins(&unknown.text, &text[word.clone()]) {
            // A word at the head of a line does not go behind one that ends in a letter: the word before it goes along,
            // where that one does.
            let known = self.get(self.name(text.as_bytes(), before.start, before.end));
            match known {
                Some(tokens) if joins(&unknown.text, &text[before.clone()]) => {
                    unknown.push(&text[before], None);
                    unknown.known += tokens;
                }
                _ => settled = self.learn(unknown, encode),
            }
        }
        unknown.push(&text[word], name);
        if unknown.text.len() >= GATHERED_BYTES {
            settled += self.learn(unknown, encode);
        }
        settled
    }

    /// Encodes what was gathered and keeps what each word has of it. Returns its tokens.
    fn learn(&self, unknown: &mut Unknown, encode: &mut dyn FnMut(&str, &mut Vec<u8>) -> u64) -> u64 {
        if unknown.text.is_empty() {
            return 0;
        }
        let Unknown { text, words, known, token_bytes } = unknown;
        let total = encode(text, token_bytes).saturating_sub(*known);
        if are_the_text_s_own(token_bytes, text) {
            let (mut at, mut tokens) = (0, token_bytes.iter());
            for &(end, name) in words.iter() {
                let mut count = 0;
                while at < end
                    && let Some(bytes) = tokens.next()
                {
                    at += usize::from(*bytes);
                    count += 1;
                }
                if let Some(name) = name {
                    self.put(name, count);
                }
            }
        }
        text.clear();
        words.clear();
        token_bytes.clear();
        *known = 0;
        total
    }
}

/// Words of a text that are not known yet.
#[derive(Debug, Default)]
pub(super) struct Unknown {
    /// All of them, one behind the other.
    text: String,
    /// Where each ends in it, and its name where it is to be kept.
    words: Vec<(usize, Option<u64>)>,
    /// Tokens of those among them that were known all the same.
    known: u64,
    /// Bytes that each token stands for; 0 where that is not told.
    token_bytes: Vec<u8>,
}

impl Unknown {
    fn push(&mut self, word: &str, name: Option<u64>) {
        self.text.push_str(word);
        self.words.push((self.text.len(), name));
    }
}

/// Whether tokens of these bytes are those of this very text, one after the other: none was left out, as bytes are that a
/// vocabulary lacks, and none is of a text that a normalizer changed.
fn are_the_text_s_own(token_bytes: &[u8], text: &str) -> bool {
    let sum: usize = token_bytes.iter().map(|bytes| usize::from(*bytes)).sum();
    sum == text.len() && (text.is_ascii() || unicode_normalization::is_nfc(text))
}

/// Whether a word ends where the two meet.
fn joins(text: &str, word: &str) -> bool {
    let (Some(&last), Some(&first)) = (text.as_bytes().last(), word.as_bytes().first()) else { return true };
    match first {
        b' ' => last.is_ascii_graphic(),
        _ if last == b'\n' && text.len() > 1 => {
            let before = text.as_bytes()[text.len() - 2];
            is_safe_line_end(&[before, last, first], 1)
        }
        _ => false,
    }
}

/// Eight bytes of a text from a place on; zeros stand for what is past its end.
#[inline]
fn eight(text: &[u8], at: usize) -> u64 {
    match text.get(at..).and_then(<[u8]>::first_chunk) {
        Some(eight) => u64::from_le_bytes(*eight),
        None => last_bytes(text, at),
    }
}

#[cold]
fn last_bytes(text: &[u8], at: usize) -> u64 {
    let rest = text.get(at..).unwrap_or_default();
    rest.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte))
}

/// The two halves of a product, one on the other: every bit of it depends on every bit of both numbers.
#[inline]
fn folded(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    product as u64 ^ (product >> 64) as u64
}

/// Where a text's words end, in their order; each begins where the one before it ended.
pub(super) fn ends(text: &str) -> Ends<'_> {
    Ends { bytes: text.as_bytes(), at: 0, left: 0, end: 0 }
}

/// Whether no word ends within this text.
pub(super) fn is_one_word(bytes: &[u8]) -> bool {
    let mut ends = Ends { bytes, at: 0, left: 0, end: 0 };
    ends.next().is_none_or(|end| end == bytes.len())
}

/// See [`ends`].
#[derive(Debug)]
pub(super) struct Ends<'t> {
    bytes: &'t [u8],
    /// The eight bytes after these were looked at.
    at: usize,
    /// The high bits of those that are a blank or a newline, and are yet to be seen to.
    left: u64,
    /// The last end.
    end: usize,
}

impl Iterator for Ends<'_> {
    type Item = usize;

    #[inline]
    fn next(&mut self) -> Option<usize> {
        const ONES: u64 = 0x0101_0101_0101_0101;
        const LOWS: u64 = 0x7f7f_7f7f_7f7f_7f7f;
        // The high bit of each byte that is zero.
        let zeros = |word: u64| !(((word & LOWS) + LOWS) | word | LOWS);
        let bytes = self.bytes;
        loop {
            while self.left == 0 {
                if self.at >= bytes.len() {
                    let last = self.end < bytes.len();
                    self.end = bytes.len();
                    return last.then_some(bytes.len());
                }
                // Past the end there are no blanks.
                let eight = eight(bytes, self.at);
                self.left = zeros(eight ^ (ONES * u64::from(b' '))) | zeros(eight ^ (ONES * u64::from(b'\n')));
                self.at += 8;
            }
            let here = self.at - 8 + self.left.trailing_zeros() as usize / 8;
            self.left &= self.left - 1;
            let Some(before) = here.checked_sub(1).map(|before| bytes[before]) else { continue };
            if bytes[here] == b' ' {
                if before.is_ascii_graphic() {
                    self.end = here;
                    return Some(here);
                }
            } else if is_safe_line_end(bytes, here) {
                self.end = here + 1;
                return Some(here + 1);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(text: &str) -> Vec<&str> {
        let mut from = 0;
        ends(text).map(|to| &text[std::mem::replace(&mut from, to)..to]).collect()
    }

    #[test]
    fn texts_are_cut_before_blanks_and_behind_safe_line_ends() {
        assert_eq!(cut("The queue, (10 long)  is"), ["The", " queue,", " (10", " long)", "  is"]);
        assert_eq!(cut("one\ntwo three.\nFour\n\nfive"), ["one\n", "two", " three.\n", "Four\n\nfive"]);
        assert_eq!(cut("  let x = 1;\n  let y"), ["  let", " x", " =", " 1;\n  let", " y"]);
        assert_eq!(cut("caf\u{e9} au lait"), ["caf\u{e9} au", " lait"], "only behind what is surely no blank");
        assert_eq!(cut("x "), ["x", " "]);
        assert_eq!(cut(""), Vec::<&str>::new());
        assert_eq!(cut("a\u{a0} b"), ["a\u{a0} b"]);
        assert_eq!(cut("\na"), ["\na"]);
    }

    #[test]
    fn words_make_up_the_text_and_begin_where_the_rule_says() {
        let mut seed = 7u64;
        for _ in 0..20_000 {
            let mut text = String::new();
            for _ in 0..40 {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                text.push(['a', 'Z', ' ', ' ', '\n', '\t', '.', '\u{a0}', '\u{e9}', '1'][(seed >> 60) as usize % 10]);
            }
            let bytes = text.as_bytes();
            let cuts: Vec<usize> = (1..bytes.len())
                .filter(|&i| {
                    bytes[i] == b' ' && bytes[i - 1].is_ascii_graphic()
                        || bytes[i - 1] == b'\n' && i > 1 && is_safe_line_end(bytes, i - 1)
                })
                .collect();
            let mut found: Vec<usize> = ends(&text).collect();
            assert_eq!(found.last(), Some(&text.len()));
            found.pop();
            assert_eq!(found, cuts, "{text:?}");
        }
    }

    #[test]
    fn a_name_depends_on_every_byte_and_on_nothing_around_the_word() {
        let words = Words::new();
        let text: Vec<u8> = (0..WORD_BYTES_MAX as u8).map(|i| b'a' + i % 26).collect();
        let mut names = std::collections::HashSet::new();
        for len in 1..=WORD_BYTES_MAX {
            let name = words.name(&text, 0, len);
            assert!(names.insert(name), "{len}");
            let around = [b"xyz", &text[..len], b" and more"].concat();
            assert_eq!(words.name(&around, 3, 3 + len), name, "{len}");
            assert_eq!(words.name(&around[..3 + len], 3, 3 + len), name, "{len} at the end");
            for at in 0..len {
                let mut other = text[..len].to_vec();
                other[at] ^= 1;
                assert!(names.insert(words.name(&other, 0, len)), "{len}, {at}");
            }
        }
    }

    /// A token for each byte, which adds up over any cut, and what it was asked.
    fn counted(words: &Words, text: &str) -> (u64, Vec<String>) {
        let mut asked = Vec::new();
        let mut unknown = Unknown::default();
        let total = words.count(text, &mut unknown, &mut |stretch, bytes| {
            asked.push(stretch.to_owned());
            bytes.extend(stretch.bytes().map(|_| 1));
            stretch.len() as u64
        });
        assert!(unknown.text.is_empty() && unknown.words.is_empty() && unknown.known == 0);
        (total, asked)
    }

    #[test]
    fn a_word_is_encoded_once() {
        let words = Words::new();
        let text = "to be or not to be";
        assert_eq!(counted(&words, text), (18, vec![text.to_owned()]));
        assert_eq!(counted(&words, text), (18, Vec::new()));
        assert_eq!(counted(&words, "not to be"), (9, vec!["not".to_owned()]));
        assert_eq!(counted(&words, "to all be one"), (13, vec![" all one".to_owned()]));
    }

    #[test]
    fn long_words_are_encoded_each_time() {
        let words = Words::new();
        let text = format!("a {} b", "x".repeat(40));
        counted(&words, &text);
        assert_eq!(counted(&words, &text), (44, vec![format!(" {}", "x".repeat(40))]));
    }

    #[test]
    fn a_word_at_the_head_of_a_line_takes_the_one_before_it_along() {
        let words = Words::new();
        counted(&words, "a known.\nand");
        assert_eq!(counted(&words, "a new known.\nThen"), (17, vec![" new known.\nThen".to_owned()]));
        // Where the one before it does not go there either, what was gathered is encoded first.
        counted(&words, "known\nx known\n");
        assert_eq!(counted(&words, "some known\nknown\nNew"), (20, ["some", "New"].map(String::from).into()));
    }

    #[test]
    fn any_text_has_the_sum_of_its_words_whatever_is_known() {
        // Tokens of up to three bytes that never reach over a word's end.
        let words = Words::new();
        let per_word = |text: &str, bytes: &mut Vec<u8>| {
            let mut from = 0;
            for to in ends(text) {
                let mut left = to - std::mem::replace(&mut from, to);
                while left > 0 {
                    bytes.push(left.min(3) as u8);
                    left -= left.min(3);
                }
            }
            bytes.len() as u64
        };
        let mut seed = 11u64;
        let mut draw = |n: usize| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) as usize % n
        };
        for _ in 0..20_000 {
            let text: String =
                (0..draw(60)).map(|_| ["a", "B", " ", " ", "\n", ".", "\u{e9}", "  "][draw(8)]).collect();
            let expected = per_word(&text, &mut Vec::new());
            assert_eq!(words.count(&text, &mut Unknown::default(), &mut |t, b| per_word(t, b)), expected, "{text:?}");
        }
    }

    #[test]
    fn tokens_of_another_text_than_the_words_are_counted_and_teach_nothing() {
        // Bytes left out at the end or in the middle, a token too long to be told, and a text that is not composed.
        for (text, token_bytes) in
            [("one two", &[3, 1, 2][..]), ("one two", &[2, 1, 3]), ("one two", &[3, 0]), ("e\u{301} b", &[3, 2])]
        {
            let words = Words::new();
            for _ in 0..2 {
                let mut calls = 0;
                let total = words.count(text, &mut Unknown::default(), &mut |_, bytes| {
                    calls += 1;
                    bytes.extend(token_bytes);
                    token_bytes.len() as u64
                });
                assert_eq!((total, calls), (token_bytes.len() as u64, 1), "{text} {token_bytes:?}");
            }
        }
    }

    #[test]
    fn what_is_gathered_is_bounded() {
        let words = Words::new();
        let text: String = (0..40_000).map(|i| format!("w{i} ")).collect();
        let (total, asked) = counted(&words, &text);
        assert_eq!(total, text.len() as u64);
        assert!(asked.len() > 10 && asked.iter().all(|stretch| stretch.len() < GATHERED_BYTES + WORD_BYTES_MAX));
        assert_eq!(asked.concat(), text);
    }

    #[test]
    fn a_million_words_stay_within_the_lines_and_are_never_miscounted() {
        let words = Words::new();
        for i in 0..1_000_000u64 {
            let word = i.to_string();
            let (total, _) = counted(&words, &word);
            assert_eq!(total, word.len() as u64);
        }
        let kept = words.lines.iter().flat_map(|line| &line.0).filter(|entry| entry.load(Ordering::Relaxed) != 0);
        assert_eq!(kept.count(), LINES * WAYS, "a bound that keeps nothing is no cache");
    }
}
