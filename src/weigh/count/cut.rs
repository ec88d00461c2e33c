//! Where texts may be cut, and which are slow to encode.

/// Long segments are cut at the first safe place after this many bytes.
const CHUNK_BYTES: usize = 8 << 10;

/// Pieces of some `bytes` each, cut at characters, at most `max` of them.
pub(super) fn pieces(text: &str, bytes: usize, max: usize) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let mut at = bytes.min(rest.len());
        while !rest.is_char_boundary(at) {
            at += 1;
        }
        let (piece, after) = rest.split_at(at);
        rest = after;
        Some(piece)
    })
    .take(max)
}

/// The last place up to `at`, which is within the text, where a character begins.
pub(super) fn floor_boundary(text: &str, mut at: usize) -> usize {
    while !text.is_char_boundary(at) {
        at -= 1;
    }
    at
}

/// The next place after `from` where a text can be cut: behind a newline that follows no blank and is followed by an
/// ASCII letter.
pub(super) fn safe_cut(text: &str, from: usize) -> Option<usize> {
    let bytes = text.as_bytes();
    let mut at = from.max(1);
    while let Some(found) = memchr::memchr(b'\n', bytes.get(at..)?) {
        let newline = at + found;
        let before = bytes[newline - 1];
        if bytes.get(newline + 1)?.is_ascii_alphabetic()
            && !before.is_ascii_whitespace()
            && before != 0x85
            && before != 0xa0
        {
            return Some(newline + 1);
        }
        at = newline + 1;
    }
    None
}

/// Cuts a long segment into chunks; a short one stays whole.
pub(super) fn lines<'t>(text: &'t str, take: &mut dyn FnMut(&'t str)) {
    let mut rest = text;
    while rest.len() > 2 * CHUNK_BYTES
        && let Some(at) = safe_cut(rest, CHUNK_BYTES)
    {
        let (chunk, after) = rest.split_at(at);
        take(chunk);
        rest = after;
    }
    if !rest.is_empty() {
        take(rest);
    }
}

/// Whether text holds a stretch that makes merging slow: more than 256 bytes without an ASCII blank, or a run of one
/// byte as long (measured: 0.1 to 0.3 µs a byte against 0.01).
pub fn has_long_run(text: &str) -> bool {
    const RUN_MAX: usize = 256;
    let bytes = text.as_bytes();
    let mut from = 0;
    let mut same = 0;
    for i in 0..bytes.len() {
        let byte = bytes[i];
        same = if i > 0 && bytes[i - 1] == byte { same + 1 } else { 0 };
        if byte == b' ' || byte == b'\n' || byte == b'\t' || byte == b'\r' {
            from = i + 1;
        }
        if i - from.min(i) > RUN_MAX || same > RUN_MAX {
            return true;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_segments_are_cut_only_where_a_letter_begins_a_line() {
        let line = "A line that ends in a full stop.\n";
        let text = line.repeat(2000);
        let mut chunks = Vec::new();
        lines(&text, &mut |chunk| chunks.push(chunk));
        assert_eq!(chunks.concat(), text);
        assert!(chunks.len() > 4);
        assert!(chunks.iter().all(|chunk| chunk.starts_with('A') && chunk.len() <= 2 * CHUNK_BYTES));
        assert_eq!(safe_cut("x \ny", 0), None, "a blank before the newline");
        assert_eq!(safe_cut("x\n y", 0), None, "no letter after it");
        assert_eq!(safe_cut("x\ny", 0), Some(2));
    }

    #[test]
    fn stretches_without_blanks_are_found() {
        assert!(has_long_run(&"a".repeat(300)));
        assert!(has_long_run(&format!("words {} words", " ".repeat(300))));
        assert!(has_long_run(&"汉".repeat(100)));
        assert!(!has_long_run(&"word ".repeat(1000)));
    }
}
