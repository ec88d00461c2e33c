//! A cursor over JSON text: validates by RFC 8259 as it goes, copies nothing, and never recurses.
//!
//! Callers descend by hand to the depth they know ([`Cursor::next_key`], [`Cursor::next_item`]) and skip the rest
//! ([`Cursor::skip`]), which keeps its own explicit stack of at most [`DEPTH_MAX`] levels. UTF-8 is not checked here.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;

use memchr::memchr2;

/// Deepest nesting that can be followed, whatever a configuration asks for: one bit a level on the stack.
pub(crate) const DEPTH_MAX: usize = 1024;

/// What is wrong with a JSON text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The text ends inside a value.
    End,
    /// Something else was expected here.
    Expected(&'static str),
    /// A raw control character in a string.
    Control,
    /// An escape that JSON does not know.
    Escape,
    /// Half of a surrogate pair.
    Surrogate,
    /// Nested deeper than the limit.
    Depth(usize),
    /// More text after the value.
    Trailing,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fault::End => f.write_str("the text ends in the middle of a value"),
            Fault::Expected(what) => write!(f, "expected {what}"),
            Fault::Control => f.write_str("a control character in a string must be escaped"),
            Fault::Escape => f.write_str("unknown escape in a string"),
            Fault::Surrogate => f.write_str("a \\u escape is half of a surrogate pair, which is no character"),
            Fault::Depth(limit) => write!(f, "nested deeper than {limit} levels (limits.json_depth)"),
            Fault::Trailing => f.write_str("more text after the end of the value"),
        }
    }
}

/// A fault and the byte it stands at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct JsonError {
    pub(crate) at: usize,
    pub(crate) fault: Fault,
}

pub(crate) type Result<T> = std::result::Result<T, JsonError>;

/// The kind of a value, by its first byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Object,
    Array,
    Text,
    Number,
    Bool,
    Null,
}

impl Kind {
    /// The kind with its article, for messages.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Kind::Object => "an object",
            Kind::Array => "an array",
            Kind::Text => "a string",
            Kind::Number => "a number",
            Kind::Bool => "a boolean",
            Kind::Null => "null",
        }
    }
}

/// A string in the text: the range between its quotes, and whether it holds escapes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Text {
    pub(crate) inner: Range<usize>,
    pub(crate) escaped: bool,
}

/// Walks JSON text.
#[derive(Clone, Debug)]
pub(crate) struct Cursor<'a> {
    bytes: &'a [u8],
    pos: usize,
    /// Levels still allowed below the current one.
    depth_left: usize,
    depth_limit: usize,
    /// Half surrogate pairs pass: engines cut characters in two between the events of a stream.
    halves: bool,
}

impl<'a> Cursor<'a> {
    /// A cursor at `start`, allowing `depth` nested containers.
    pub(crate) fn new(bytes: &'a [u8], start: usize, depth: usize) -> Self {
        let depth = depth.min(DEPTH_MAX);
        Cursor { bytes, pos: start, depth_left: depth, depth_limit: depth, halves: false }
    }

    /// A cursor over an engine's answer, which is read as far as it can be: half surrogate pairs pass.
    pub(crate) fn lenient(bytes: &'a [u8]) -> Self {
        Cursor { halves: true, ..Cursor::new(bytes, 0, DEPTH_MAX) }
    }

    pub(crate) fn pos(&self) -> usize {
        self.pos
    }

    fn fail<T>(&self, fault: Fault) -> Result<T> {
        let fault =
            if self.pos >= self.bytes.len() && matches!(fault, Fault::Expected(_)) { Fault::End } else { fault };
        Err(JsonError { at: self.pos, fault })
    }

    /// Skips white space and looks at the next byte.
    #[inline]
    pub(crate) fn peek(&mut self) -> Option<u8> {
        while let Some(&byte) = self.bytes.get(self.pos) {
            if !matches!(byte, b' ' | b'\n' | b'\r' | b'\t') {
                return Some(byte);
            }
            self.pos += 1;
        }
        None
    }

    /// The kind of the value that begins here.
    #[inline]
    pub(crate) fn kind(&mut self) -> Result<Kind> {
        match self.peek() {
            Some(b'{') => Ok(Kind::Object),
            Some(b'[') => Ok(Kind::Array),
            Some(b'"') => Ok(Kind::Text),
            Some(b'-' | b'0'..=b'9') => Ok(Kind::Number),
            Some(b't' | b'f') => Ok(Kind::Bool),
            Some(b'n') => Ok(Kind::Null),
            _ => self.fail(Fault::Expected("a value")),
        }
    }

    /// Steps into the object or array that begins here.
    #[inline]
    pub(crate) fn open(&mut self) -> Result<()> {
        if self.depth_left == 0 {
            return self.fail(Fault::Depth(self.depth_limit));
        }
        self.depth_left -= 1;
        self.pos += 1;
        Ok(())
    }

    #[inline]
    fn close(&mut self) {
        self.depth_left += 1;
        self.pos += 1;
    }

    /// In an object: the next key, with the cursor then at its value; `None` past the closing brace.
    #[inline]
    pub(crate) fn next_key(&mut self, first: &mut bool) -> Result<Option<Text>> {
        match self.peek() {
            Some(b'}') => {
                self.close();
                return Ok(None);
            }
            Some(b',') if !*first => {
                self.pos += 1;
                self.peek();
            }
            _ if *first => {}
            _ => return self.fail(Fault::Expected("',' or '}'")),
        }
        *first = false;
        self.key().map(Some)
    }

    #[inline]
    fn key(&mut self) -> Result<Text> {
        if self.peek() != Some(b'"') {
            return self.fail(Fault::Expected("a key in double quotes"));
        }
        let key = self.text()?;
        if self.peek() != Some(b':') {
            return self.fail(Fault::Expected("':'"));
        }
        self.pos += 1;
        self.peek();
        Ok(key)
    }

    /// In an array: whether there is another item, with the cursor then at it.
    #[inline]
    pub(crate) fn next_item(&mut self, first: &mut bool) -> Result<bool> {
        match self.peek() {
            Some(b']') => {
                // `[1,]` is refused where its next value is missed, since the comma was passed before.
                self.close();
                return Ok(false);
            }
            Some(b',') if !*first => {
                self.pos += 1;
                if self.peek() == Some(b']') {
                    return self.fail(Fault::Expected("a value"));
                }
            }
            _ if *first => {}
            _ => return self.fail(Fault::Expected("',' or ']'")),
        }
        *first = false;
        Ok(true)
    }

    /// Reads the string that begins here.
    #[inline]
    pub(crate) fn text(&mut self) -> Result<Text> {
        let start = self.pos + 1;
        let mut escaped = false;
        let mut at = start;
        loop {
            at = special(self.bytes, at);
            match self.bytes.get(at) {
                Some(b'"') => {
                    self.pos = at + 1;
                    return Ok(Text { inner: start..at, escaped });
                }
                Some(b'\\') => {
                    escaped = true;
                    at = self.escape(at)?;
                }
                Some(_) => return Err(JsonError { at, fault: Fault::Control }),
                None => return Err(JsonError { at, fault: Fault::End }),
            }
        }
    }

    /// Validates the escape at `at` and returns the position after it.
    fn escape(&self, at: usize) -> Result<usize> {
        let fail = |fault| Err(JsonError { at, fault });
        match self.bytes.get(at + 1) {
            Some(b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => Ok(at + 2),
            Some(b'u') => match self.hex(at + 2) {
                Some(_) if self.halves => Ok(at + 6),
                Some(0xD800..=0xDBFF) => match (self.bytes.get(at + 6..at + 8), self.hex(at + 8)) {
                    (Some(b"\\u"), Some(0xDC00..=0xDFFF)) => Ok(at + 12),
                    _ => fail(Fault::Surrogate),
                },
                Some(0xDC00..=0xDFFF) => fail(Fault::Surrogate),
                Some(_) => Ok(at + 6),
                None => fail(Fault::Escape),
            },
            Some(_) => fail(Fault::Escape),
            None => fail(Fault::End),
        }
    }

    fn hex(&self, at: usize) -> Option<u32> {
        let digits = self.bytes.get(at..at + 4)?;
        digits.iter().try_fold(0, |sum, &digit| Some(sum * 16 + char::from(digit).to_digit(16)?))
    }

    /// Skips the value that begins here, validating it, and returns its span.
    #[inline]
    pub(crate) fn skip(&mut self) -> Result<Range<usize>> {
        self.peek();
        let start = self.pos;
        if !self.scalar()? {
            self.skip_container()?;
        }
        Ok(start..self.pos)
    }

    /// Skips a scalar; false (and nothing skipped) at a container.
    #[inline]
    fn scalar(&mut self) -> Result<bool> {
        match self.bytes.get(self.pos) {
            Some(b'"') => self.text().map(|_| ())?,
            Some(b'{' | b'[') => return Ok(false),
            Some(b'-' | b'0'..=b'9') => self.number()?,
            Some(b't') => self.literal(b"true")?,
            Some(b'f') => self.literal(b"false")?,
            Some(b'n') => self.literal(b"null")?,
            _ => self.fail(Fault::Expected("a value"))?,
        }
        Ok(true)
    }

    fn skip_container(&mut self) -> Result<()> {
        // One bit a level: set for an object. `level` counts from the container the skip began at.
        let mut objects = [0u64; DEPTH_MAX / 64];
        let mut level = 0usize;
        loop {
            if !self.scalar()? {
                let object = self.bytes.get(self.pos) == Some(&b'{');
                self.open()?;
                let bit = 1u64 << (level % 64);
                let word = &mut objects[level / 64];
                *word = if object { *word | bit } else { *word & !bit };
                level += 1;
                match self.peek() {
                    Some(b'}') if object => {}
                    Some(b']') if !object => {}
                    _ if object => {
                        self.key()?;
                        continue;
                    }
                    _ => continue,
                }
                self.close();
                level -= 1;
            }
            loop {
                if level == 0 {
                    return Ok(());
                }
                let object = objects[(level - 1) / 64] >> ((level - 1) % 64) & 1 == 1;
                match self.peek() {
                    Some(b',') => {
                        self.pos += 1;
                        if object {
                            self.key()?;
                        } else {
                            self.peek();
                        }
                        break;
                    }
                    Some(b'}') if object => {}
                    Some(b']') if !object => {}
                    _ if object => return self.fail(Fault::Expected("',' or '}'")),
                    _ => return self.fail(Fault::Expected("',' or ']'")),
                }
                self.close();
                level -= 1;
            }
        }
    }

    fn literal(&mut self, word: &'static [u8]) -> Result<()> {
        if self.bytes[self.pos..].starts_with(word) {
            self.pos += word.len();
            return Ok(());
        }
        self.fail(Fault::Expected("true, false or null"))
    }

    fn digits(&mut self) -> Result<()> {
        let start = self.pos;
        while self.bytes.get(self.pos).is_some_and(u8::is_ascii_digit) {
            self.pos += 1;
        }
        if self.pos == start { self.fail(Fault::Expected("a digit")) } else { Ok(()) }
    }

    fn number(&mut self) -> Result<()> {
        if self.bytes.get(self.pos) == Some(&b'-') {
            self.pos += 1;
        }
        if self.bytes.get(self.pos) == Some(&b'0') {
            self.pos += 1;
        } else {
            self.digits()?;
        }
        if self.bytes.get(self.pos) == Some(&b'.') {
            self.pos += 1;
            self.digits()?;
        }
        if matches!(self.bytes.get(self.pos), Some(b'e' | b'E')) {
            self.pos += 1;
            if matches!(self.bytes.get(self.pos), Some(b'+' | b'-')) {
                self.pos += 1;
            }
            self.digits()?;
        }
        Ok(())
    }

    /// Nothing but white space may follow.
    pub(crate) fn end(&mut self) -> Result<()> {
        if self.peek().is_some() { self.fail(Fault::Trailing) } else { Ok(()) }
    }

    /// The bytes of a span.
    pub(crate) fn slice(&self, span: &Range<usize>) -> &'a [u8] {
        &self.bytes[span.clone()]
    }
}

/// The first quote, backslash or control character at or after `from`; the text's length if there is none.
///
/// Eight bytes a step for what is near (keys, short strings), then memchr for what is far (prompts, images).
#[inline]
fn special(bytes: &[u8], from: usize) -> usize {
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
        return String::from_utf8_lossy(inner);
    }
    let quoted = [b"\"", inner, b"\""].concat();
    match serde_json::from_slice::<String>(&quoted) {
        Ok(text) => Cow::Owned(text),
        Err(_) => String::from_utf8_lossy(inner),
    }
}

/// A number that is a count: a non-negative whole number (`12`, `12.0`) within u64. Nothing else is one.
pub(crate) fn count(raw: &[u8]) -> Option<u64> {
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn check(text: &[u8]) -> Result<()> {
        let mut cursor = Cursor::new(text, 0, 128);
        cursor.skip()?;
        cursor.end()
    }

    #[test]
    fn it_accepts_and_refuses_what_rfc_8259_does() {
        for good in [
            "{}",
            "[]",
            " [ ] ",
            "0",
            "-0",
            "1.5e+10",
            "1E5",
            "\"\"",
            "\"\\u00e9\\n\"",
            "\"\\ud83d\\ude00\"",
            "null",
            "[1,2,[3,{\"a\":{}}]]",
            "{\"a\":1,\"b\":[true,false,null]}\r\n\t ",
            "\"\u{7f}é漢\"",
            "1e309",
        ] {
            assert_eq!(check(good.as_bytes()), Ok(()), "{good}");
        }
        for bad in [
            "",
            " ",
            "{",
            "[",
            "[1,]",
            "[,1]",
            "{,}",
            "{\"a\":1,}",
            "{\"a\"}",
            "{\"a\":}",
            "{a:1}",
            "01",
            "1.",
            ".5",
            "+1",
            "-",
            "1e",
            "1e+",
            "tru",
            "nul",
            "NaN",
            "Infinity",
            "\"",
            "\"\\x\"",
            "\"\\u12\"",
            "\"\\u12g4\"",
            "\"\n\"",
            "\"\u{1}\"",
            "[1 2]",
            "{\"a\":1 \"b\":2}",
            "[}",
            "{]",
            "[1}",
            "{\"a\":1]",
            "1 2",
            "{}}",
            "\"\\ud800\"",
            "\"\\udc00\\ud800\"",
            "\"\\ud800\\ud800\"",
            "'a'",
            "// c\n1",
            "\"\\",
        ] {
            assert!(check(bad.as_bytes()).is_err(), "{bad}");
        }
    }

    #[test]
    fn depth_is_counted_exactly_and_never_recurses() {
        let nested = |n: usize| [vec![b'['; n], vec![b']'; n]].concat();
        assert!(check(&nested(128)).is_ok());
        assert_eq!(check(&nested(129)).unwrap_err(), JsonError { at: 128, fault: Fault::Depth(128) });
        assert!(check(&nested(1_000_000)).is_err());
        let objects = |n: usize| ["{\"a\":".repeat(n).as_bytes(), b"1", "}".repeat(n).as_bytes()].concat();
        assert!(check(&objects(128)).is_ok());
        assert!(check(&objects(129)).is_err());
        let mut deep = Cursor::new(b"", 0, usize::MAX);
        assert_eq!(deep.depth_left, DEPTH_MAX);
        assert!(deep.skip().is_err());
    }

    #[test]
    fn a_control_character_far_into_a_long_string_is_found() {
        for at in [0, 7, 8, 63, 64, 65, 300, 1000] {
            let mut text = vec![b'a'; 1001];
            text[at] = b'\n';
            let quoted = [b"\"".as_slice(), &text, b"\""].concat();
            assert_eq!(check(&quoted).unwrap_err(), JsonError { at: at + 1, fault: Fault::Control });
        }
    }

    #[test]
    fn counts_are_whole_numbers_only() {
        assert_eq!(count(b"12"), Some(12));
        assert_eq!(count(b"12.0"), Some(12));
        assert_eq!(count(b"0"), Some(0));
        assert_eq!(count(b"18446744073709551615"), Some(u64::MAX));
        for not in ["18446744073709551616", "-1", "1.5", "\"10\"", "true", "1e309", "1e3", "null", "", "1."] {
            assert_eq!(count(not.as_bytes()), None, "{not}");
        }
    }

    proptest! {
        #[test]
        fn it_agrees_with_serde_json_on_any_text(text in r#"[\[\]{}",:0-9eE.+\-truefalsn\\ u]{0,40}"#) {
            // serde_json refuses numbers past f64's range where the grammar does not.
            let theirs = serde_json::from_str::<Box<serde_json::value::RawValue>>(&text);
            prop_assert_eq!(check(text.as_bytes()).is_ok(), theirs.is_ok(), "{}", text);
        }

        #[test]
        fn it_accepts_every_string_that_serde_json_writes(text in any::<String>(), pad in 0usize..200) {
            let padded = format!("{}{text}", "x".repeat(pad));
            let json = serde_json::to_string(&padded).unwrap();
            let mut cursor = Cursor::new(json.as_bytes(), 0, 1);
            let found = cursor.text().unwrap();
            prop_assert_eq!(cursor.pos(), json.len());
            prop_assert_eq!(unescape(cursor.slice(&found.inner), found.escaped), padded);
        }

        #[test]
        fn the_word_test_agrees_with_a_byte_loop(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let slow = bytes.iter().position(|&b| b == b'"' || b == b'\\' || b < 0x20).unwrap_or(bytes.len());
            prop_assert_eq!(special(&bytes, 0), slow);
        }
    }
}
