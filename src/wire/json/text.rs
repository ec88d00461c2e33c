//! The inside of strings and numbers.

use std::borrow::Cow;

use memchr::memchr2;

/// The first quote, backslash or control character at or after `from`; the text's length if there is none.
///
/// Eight bytes a step for what is near (keys, short strings), then memchr for what is far (prompts, images).
#[inline]
pub(super) fn special(bytes: &[u8], from: usize) -> usize {
    const NEAR_BYTES: usize = 64;
    let near = bytes.len().min(from + NEAR_BYTES);
    let mut at = from;
    while let Some(word) = bytes.get(at..at + 8).and_then(|b| b.try_into().ok()) {
        let found = special_in_word(u64::from_le_bytes(word));
        if found != 0 {
            return at + found.trailing_zeros() as usize / 8;
        }
        at += 8;
        if at >= near {
            return far_special(bytes, at);
        }
    }
    while at < bytes.len() && !matches!(bytes[at], b'"' | b'\\' | 0..=0x1F) {
        at += 1;
    }
    at
}

/// The high bit of each byte that is a quote, a backslash or below 0x20; exact for the lowest one found.
#[inline]
fn special_in_word(word: u64) -> u64 {
    const ONES: u64 = 0x0101_0101_0101_0101;
    const HIGH: u64 = 0x8080_8080_8080_8080;
    let quote = word ^ (ONES * b'"' as u64);
    let slash = word ^ (ONES * b'\\' as u64);
    let found = (quote.wrapping_sub(ONES) & !quote)
        | (slash.wrapping_sub(ONES) & !slash)
        | (word.wrapping_sub(ONES * 0x20) & !word);
    found & HIGH
}

/// Whether these bytes between quotes stand for themselves: no quote, no backslash, no control character is among them.
pub(crate) fn is_plain(inner: &[u8]) -> bool {
    special(inner, 0) == inner.len()
}

fn far_special(bytes: &[u8], from: usize) -> usize {
    let rest = &bytes[from..];
    let stop = memchr2(b'"', b'\\', rest).unwrap_or(rest.len());
    for (index, block) in rest[..stop].chunks(256).enumerate() {
        // No early exit inside a block, so that it compiles to vector code.
        if block.iter().fold(false, |found, &byte| found | (byte < 0x20)) {
            let inside = block.iter().position(|&byte| byte < 0x20).unwrap_or(0);
            return from + index * 256 + inside;
        }
    }
    from + stop
}

/// The characters of a string, given the bytes between its quotes.
pub(crate) fn unescape(inner: &[u8], escaped: bool) -> Cow<'_, str> {
    if !escaped {
        // A request's body was found to be UTF-8 before it is read; of an engine's answer nobody knows.
        return std::str::from_utf8(inner).map_or_else(|_| String::from_utf8_lossy(inner), Cow::Borrowed);
    }
    let quoted = [b"\"", inner, b"\""].concat();
    match serde_json::from_slice::<String>(&quoted) {
        Ok(text) => Cow::Owned(text),
        Err(_) => String::from_utf8_lossy(inner),
    }
}

/// A number that is a count: a non-negative whole number (`12`, `12.0`) within u64. Nothing else is one.
pub(crate) fn count(raw: &[u8]) -> Option<u64> {
    // Nineteen digits always fit; lists of token ids are long.
    if (1..=19).contains(&raw.len()) && raw.iter().all(u8::is_ascii_digit) {
        return Some(raw.iter().fold(0, |sum, digit| sum * 10 + u64::from(digit - b'0')));
    }
    let text = std::str::from_utf8(raw).ok()?;
    let whole = match text.split_once('.') {
        Some((whole, fraction)) if !fraction.is_empty() && fraction.bytes().all(|b| b == b'0') => whole,
        Some(_) => return None,
        None => text,
    };
    if whole.is_empty() || !whole.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    whole.parse().ok()
}
