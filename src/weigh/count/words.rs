//! Counts of words seen before: what most of a prompt is made of, without encoding it again.
//!
//! A text is cut before each blank that follows a printing ASCII character, and behind each safe line end. Where a
//! tokenizer's counts add up over these cuts (tested against the tokenizer itself when it is loaded), the tokens of a
//! text are the sum over its words, blank and punctuation included, and a word costs one look at one cache line.

use std::sync::atomic::{AtomicU64, Ordering};

use super::cut::is_safe_line_end;

/// Longer words are encoded each time.
const WORD_BYTES_MAX: usize = 32;
/// Words of one cache line: any of them may take any place in it.
const WAYS: usize = 8;
/// Cache lines of one tokenizer: 256 KiB for 32,768 words.
const LINES: usize = 4096;
/// Words that are encoded on their own, to be known next time: so many in any text …
const NEW_WORDS_FREE: u32 = 64;
/// … and one more for so many that were known. The rest of a text of new words is encoded in one piece, which takes
/// a third of the time.
const KNOWN_FOR_ONE_NEW: u32 = 8;
/// Known words between unknown ones: so many must follow each other, or encoding them along is cheaper.
const KNOWN_RUN_MIN: u32 = 8;

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

    /// Tokens of a text; `encode` counts a stretch of it.
    pub(super) fn count(&self, text: &str, encode: &mut dyn FnMut(&str) -> u64) -> u64 {
        let mut total = 0;
        let mut known = 0;
        let mut doubt = Doubt::default();
        let mut from = 0;
        for to in ends(text) {
            let name = if to - from <= WORD_BYTES_MAX { Some(self.name(text.as_bytes(), from, to)) } else { None };
            match name.and_then(|name| self.get(name)) {
                Some(tokens) => {
                    known += 1;
                    total += if doubt.from.is_none() { tokens } else { doubt.known(text, from, tokens, encode) };
                }
                None => total += doubt.unknown(self, text, (from, to), name, known, encode),
            }
            from = to;
        }
        total + doubt.end(text, encode)
    }
}

/// What is not known yet of a text: the stretch that is to be encoded in one piece.
#[derive(Debug, Default)]
struct Doubt {
    /// Where it began, if it did.
    from: Option<usize>,
    /// Words encoded on their own so far.
    new: u32,
    /// The known words since the stretch's last unknown one, their tokens, and where they began.
    run: u32,
    run_tokens: u64,
    run_from: usize,
}

impl Doubt {
    /// A known word behind the stretch. Returns the tokens that are sure now.
    #[cold]
    fn known(&mut self, text: &str, from: usize, tokens: u64, encode: &mut dyn FnMut(&str) -> u64) -> u64 {
        if self.run == 0 {
            self.run_from = from;
        }
        self.run += 1;
        self.run_tokens += tokens;
        if self.run < KNOWN_RUN_MIN {
            return 0;
        }
        let begun = self.from.take().unwrap_or(self.run_from);
        self.run = 0;
        encode(&text[begun..self.run_from]) + std::mem::take(&mut self.run_tokens)
    }

    /// A word that is not known: encoded on its own and kept, or the stretch goes on with it. Returns the tokens that
    /// are sure now.
    #[cold]
    fn unknown(
        &mut self,
        words: &Words,
        text: &str,
        (from, to): (usize, usize),
        name: Option<u64>,
        known: u32,
        encode: &mut dyn FnMut(&str) -> u64,
    ) -> u64 {
        if let (Some(name), None) = (name, self.from)
            && self.new < NEW_WORDS_FREE + known / KNOWN_FOR_ONE_NEW
        {
            self.new += 1;
            let tokens = encode(&text[from..to]);
            words.put(name, tokens);
            return tokens;
        }
        self.from.get_or_insert(from);
        (self.run, self.run_tokens) = (0, 0);
        0
    }

    /// The text is over.
    fn end(self, text: &str, encode: &mut dyn FnMut(&str) -> u64) -> u64 {
        self.from.map_or(0, |from| encode(&text[from..]))
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

    /// Counts a byte as a token, which adds up over any cut, and what it was asked.
    fn counted(words: &Words, text: &str) -> (u64, Vec<String>) {
        let mut asked = Vec::new();
        let total = words.count(text, &mut |stretch| {
            asked.push(stretch.to_owned());
            stretch.len() as u64
        });
        (total, asked)
    }

    #[test]
    fn a_word_is_encoded_once() {
        let words = Words::new();
        let text = "to be or not to be";
        assert_eq!(counted(&words, text), (18, ["to", " be", " or", " not", " to"].map(String::from).into()));
        assert_eq!(counted(&words, text), (18, Vec::new()));
        assert_eq!(counted(&words, "not to be"), (9, vec!["not".to_owned()]));
    }

    #[test]
    fn a_text_of_new_words_is_encoded_in_one_piece_after_the_first() {
        let words = Words::new();
        let text: String = (0..1000).map(|i| format!("w{i} ")).collect();
        let (total, asked) = counted(&words, &text);
        assert_eq!(total, text.len() as u64);
        assert_eq!(asked.len(), NEW_WORDS_FREE as usize + 1);
        assert_eq!(asked.concat(), text);
    }

    #[test]
    fn few_known_words_between_long_ones_are_encoded_along() {
        let words = Words::new();
        let long = "x".repeat(40);
        counted(&words, "a b");
        counted(&words, " b");
        let text = format!("a b {long} b b {long} b{} {long} b", " b".repeat(7));
        let (total, asked) = counted(&words, &text);
        assert_eq!(total, text.len() as u64);
        assert_eq!(asked, [format!(" {long} b b {long}"), format!(" {long} b")]);
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
