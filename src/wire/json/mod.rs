//! A cursor over JSON text: validates by RFC 8259 as it goes, copies nothing, and never recurses.
//!
//! Callers descend by hand to the depth they know ([`Cursor::next_key`], [`Cursor::next_item`]) and skip the rest
//! ([`Cursor::skip`]), which keeps its own explicit stack of at most [`DEPTH_MAX`] levels. UTF-8 is not checked here.

mod text;

#[cfg(test)]
mod tests;

use std::fmt;
use std::ops::Range;

use self::text::special;
pub(crate) use self::text::{count, is_plain, unescape};

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
