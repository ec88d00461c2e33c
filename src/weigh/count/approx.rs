//! Counts without encoding: a linear model over classes of characters.
//!
//! Words, letters, digits, blanks, newlines, scripts, punctuation and a few ways they meet say how many tokens a text
//! has, where characters / 3.5 is off by 27%. Ready-made coefficients serve while there is no tokenizer (5 to 9% mean
//! error on text by other authors, by family); each tokenizer gets its own when it is loaded, and corrects them for the
//! text at hand by encoding a few spots of it ([`super::Tokenizer::per_estimate`], 2%).

use super::families;

/// Features of a text.
pub const FEATURES: usize = 18;

/// Sample text: prose in several languages, code, JSON, logs, base64. Written for this purpose.
pub const SAMPLE: &str = include_str!("../data/sample.txt");

/// Bytes of sample that one equation of the fit takes: windows that mix kinds of text keep rare ones from ruling.
const WINDOW_BYTES: usize = 1200;
/// Pull of every coefficient towards the default one, as a share of what the windows say about it.
const RIDGE: f64 = 0.01;

/// What a text's tokens are taken to be per feature.
#[derive(Clone, Debug, PartialEq)]
pub struct Coefficients(pub [f64; FEATURES]);

impl Default for Coefficients {
    /// For models nobody knows anything of: fitted to six families together.
    fn default() -> Self {
        families::GENERIC
    }
}

impl Coefficients {
    /// The ready-made set of a family, by what a model or its tokenizer is called.
    pub fn of_family(name: &str) -> Option<Coefficients> {
        let name = name.to_lowercase();
        let any = |parts: &[&str]| parts.iter().any(|part| name.contains(part));
        // Distilled models are called by both families, and have the tokenizer of the smaller.
        Some(if any(&["llama-4", "llama4", "gpt-oss", "gpt-4o", "gpt-4.1", "gpt-5", "o200k"]) {
            families::GPT
        } else if any(&["llama-3", "llama3", "cl100k"]) {
            families::LLAMA3
        } else if any(&["qwen", "qwq"]) {
            families::QWEN
        } else if any(&["deepseek"]) {
            families::DEEPSEEK
        } else if any(&["gemma"]) {
            families::GEMMA
        } else if any(&["mistral", "mixtral", "pixtral", "ministral", "devstral", "magistral", "tekken"]) {
            families::MISTRAL
        } else {
            return None;
        })
    }

    /// Fits to a tokenizer. `None` where the sample gives nothing to fit.
    pub fn fit(sample: &str, count: impl Fn(&str) -> u64) -> Option<Coefficients> {
        let prior = Coefficients::default();
        let mut normal = [[0.0; FEATURES]; FEATURES];
        let mut right = [0.0; FEATURES];
        let mut rest = sample;
        while !rest.is_empty() {
            let mut at = WINDOW_BYTES.min(rest.len());
            while !rest.is_char_boundary(at) {
                at += 1;
            }
            let (window, after) = rest.split_at(at);
            rest = after;
            let tokens = count(window) as f64;
            if tokens == 0.0 {
                continue;
            }
            // Dividing by the count makes the fit minimise relative errors.
            let row = features(window).map(|x| x / tokens);
            for i in 0..FEATURES {
                for j in 0..FEATURES {
                    normal[i][j] += row[i] * row[j];
                }
                right[i] += row[i];
            }
        }
        for i in 0..FEATURES {
            let pull = RIDGE * normal[i][i] + 1e-9;
            normal[i][i] += pull;
            right[i] += pull * prior.0[i];
        }
        // No kind of character takes tokens away: what comes out below zero is left out, and the rest fitted again.
        let mut kept = [true; FEATURES];
        loop {
            let (mut a, mut b) = (normal, right);
            for i in (0..FEATURES).filter(|&i| !kept[i]) {
                a[i] = [0.0; FEATURES];
                a.iter_mut().for_each(|row| row[i] = 0.0);
                (a[i][i], b[i]) = (1.0, 0.0);
            }
            let solved = solve(a, b)?;
            if solved.iter().all(|c| *c >= 0.0) {
                return Some(Coefficients(solved));
            }
            (0..FEATURES).filter(|&i| solved[i] < 0.0).for_each(|i| kept[i] = false);
        }
    }

    /// Tokens of a text, at least 1 for any text, never more than its bytes.
    pub fn count(&self, text: &str) -> u64 {
        if text.is_empty() {
            return 0;
        }
        (self.weigh(text).round().max(1.0) as u64).min(text.len() as u64)
    }

    /// Tokens of a text, not rounded.
    pub fn weigh(&self, text: &str) -> f64 {
        features(text).iter().zip(self.0).map(|(x, c)| x * c).sum()
    }
}

/// Solves a symmetric system by elimination with pivots.
fn solve(mut a: [[f64; FEATURES]; FEATURES], mut b: [f64; FEATURES]) -> Option<[f64; FEATURES]> {
    for column in 0..FEATURES {
        let pivot = (column..FEATURES).max_by(|&i, &j| a[i][column].abs().total_cmp(&a[j][column].abs()))?;
        if a[pivot][column].abs() < 1e-12 {
            return None;
        }
        a.swap(column, pivot);
        b.swap(column, pivot);
        let head = a[column];
        for row in column + 1..FEATURES {
            let factor = a[row][column] / head[column];
            for k in column..FEATURES {
                a[row][k] -= factor * head[k];
            }
            b[row] -= factor * b[column];
        }
    }
    let mut x = [0.0; FEATURES];
    for row in (0..FEATURES).rev() {
        let sum: f64 = (row + 1..FEATURES).map(|k| a[row][k] * x[k]).sum();
        x[row] = (b[row] - sum) / a[row][row];
    }
    x.iter().all(|v| v.is_finite()).then_some(x)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Class {
    Lower,
    Upper,
    Digit,
    Blank,
    Newline,
    Punctuation,
    Han,
    Kana,
    Other,
    /// A byte inside a character.
    Inside,
}

const CLASSES: [Class; 256] = {
    let mut classes = [Class::Other; 256];
    let mut i = 0;
    while i < 256 {
        classes[i] = match i as u8 {
            b'a'..=b'z' => Class::Lower,
            b'A'..=b'Z' => Class::Upper,
            b'0'..=b'9' => Class::Digit,
            b'\n' | b'\r' => Class::Newline,
            b' ' | b'\t' | 0x0b | 0x0c => Class::Blank,
            0..=0x7f => Class::Punctuation,
            0x80..=0xbf => Class::Inside,
            0xe4..=0xe9 => Class::Han,
            _ => Class::Other,
        };
        i += 1;
    }
    classes
};

/// One pass over a text's bytes.
fn features(text: &str) -> [f64; FEATURES] {
    let bytes = text.as_bytes();
    let mut n = [0u64; FEATURES];
    let mut before = Class::Newline;
    for (i, &byte) in bytes.iter().enumerate() {
        let mut class = CLASSES[byte as usize];
        if class == Class::Inside {
            continue;
        }
        if byte == 0xe3 {
            class = match bytes.get(i + 1) {
                // U+3040 to U+30FF; ideographic punctuation comes before it, Han from U+3400 on.
                Some(0x81..=0x83) => Class::Kana,
                Some(0x90..) => Class::Han,
                _ => Class::Punctuation,
            };
        }
        let letter = |class: Class| matches!(class, Class::Lower | Class::Upper);
        match class {
            Class::Lower | Class::Upper => {
                n[1] += 1;
                if !letter(before) {
                    n[0] += 1;
                }
                n[11] += u64::from(class == Class::Upper && before == Class::Lower);
                n[12] += u64::from(before == Class::Digit);
            }
            Class::Digit => {
                n[2] += 1;
                n[3] += u64::from(before != Class::Digit);
                n[12] += u64::from(letter(before));
            }
            Class::Blank => n[4] += u64::from(before == Class::Blank || before == Class::Newline),
            Class::Newline => n[5] += u64::from(before != Class::Newline),
            Class::Han => n[6] += 1,
            Class::Kana => n[7] += 1,
            Class::Other => {
                // Latin with accents and Greek; Cyrillic; Hebrew and Arabic; Hangul; all the rest.
                let script = match byte {
                    ..=0xcf => 14,
                    0xd0..=0xd3 => 15,
                    0xd4..=0xdf => 17,
                    0xea..=0xed => 16,
                    _ => 8,
                };
                n[script] += 1;
                n[13] += u64::from(before != Class::Other);
            }
            Class::Punctuation => {
                n[9] += 1;
                n[10] += u64::from(before != Class::Punctuation);
            }
            Class::Inside => {}
        }
        before = class;
    }
    n.map(|count| count as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fit_finds_a_linear_tokenizer_again() {
        let truth = |text: &str| {
            let f = features(text);
            (f[0] + 0.5 * f[2] + 0.4 * f[10] + f[6] + 0.9 * f[7] + 0.6 * f[8] + f[5]).round() as u64
        };
        let fitted = Coefficients::fit(SAMPLE, truth).unwrap();
        for text in ["The quick brown fox, 2026.", "let x = foo(bar, 12);\n", "今天天气很好，我们去公园。"]
        {
            let text = text.repeat(20);
            let (found, expected) = (fitted.count(&text) as f64, truth(&text) as f64);
            assert!((found / expected - 1.0).abs() < 0.12, "{text}: {found} {expected}");
        }
    }

    #[test]
    fn families_are_known_by_name() {
        let of = Coefficients::of_family;
        assert_eq!(of("meta-llama/Llama-3.1-8B-Instruct"), Some(families::LLAMA3));
        assert_eq!(of("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"), Some(families::QWEN));
        assert_eq!(of("openai/gpt-oss-120b"), Some(families::GPT));
        assert_eq!(of("a-model-of-our-own"), None);
    }

    #[test]
    fn no_text_is_estimated_at_nothing_or_at_more_than_its_bytes() {
        for text in [" ", "a", "\n\n\n", "\u{301}\u{301}", "😀"] {
            let count = Coefficients::default().count(text);
            assert!(count >= 1 && count <= text.len() as u64, "{text:?}: {count}");
        }
        assert_eq!(Coefficients::default().count(""), 0);
    }
}
