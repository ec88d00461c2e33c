//! Reads the few top-level members that matter out of one JSON document of any size, in any chunking, without keeping it.

use memchr::memchr2;

use super::event::error_of;
use crate::wire::json::Cursor;
use crate::wire::usage::Report;

/// Longest top-level key that could matter; longer ones are skipped.
const KEY_BYTES_MAX: usize = 16;
/// Longest value kept (`usage`, `error`); engines send a few hundred bytes.
const VALUE_BYTES_MAX: usize = 64 << 10;

/// The bytes that matter below the top: a look in a table is faster than five comparisons.
const STRUCTURE: [bool; 256] = {
    let mut table = [false; 256];
    let marks = b"\"{}[]";
    let mut i = 0;
    while i < marks.len() {
        table[marks[i] as usize] = true;
        i += 1;
    }
    table
};

/// A scanner that stands anywhere in a document.
#[derive(Debug, Default)]
pub(super) struct Document {
    place: Place,
    /// Open containers; 1 is inside the document's own.
    depth: u64,
    /// The document is an object: its members have keys.
    object: bool,
    in_string: bool,
    escaped: bool,
    /// In the string that is a top-level key.
    in_key: bool,
    /// The next top-level string is a key.
    key_next: bool,
    key: Vec<u8>,
    /// The value being kept.
    keeping: bool,
    value: Vec<u8>,
    pub(super) report: Option<Report>,
    pub(super) error: Option<String>,
    message: Option<String>,
    error_object: bool,
    /// A value that matters was too long to keep.
    pub(super) unread: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Place {
    #[default]
    Before,
    Inside,
    After,
    /// Not an object or array: audio, plain text.
    NotJson,
}

impl Document {
    /// The whole document was seen.
    pub(super) fn complete(&self) -> bool {
        self.place == Place::After
    }

    /// What came is no JSON document.
    pub(super) fn foreign(&self) -> bool {
        self.place == Place::NotJson
    }

    pub(super) fn feed(&mut self, chunk: &[u8]) {
        let mut at = 0;
        if self.place == Place::Before {
            at = self.begin(chunk);
        }
        if self.place != Place::Inside {
            return;
        }
        let mut kept_from = at;
        while at < chunk.len() {
            if self.in_string {
                at = self.string(chunk, at);
                continue;
            }
            if self.depth > 1 {
                let Some(offset) = chunk[at..].iter().position(|byte| STRUCTURE[usize::from(*byte)]) else {
                    break;
                };
                at += offset;
            }
            let byte = chunk[at];
            match byte {
                b'"' => {
                    self.in_string = true;
                    if self.depth == 1 && self.key_next {
                        self.in_key = true;
                        self.key.clear();
                    }
                }
                b'{' | b'[' => self.depth += 1,
                b'}' | b']' => {
                    self.depth -= 1;
                    if self.depth == 0 {
                        self.keep(&chunk[kept_from..at]);
                        self.end_value();
                        self.place = Place::After;
                        self.conclude();
                        return;
                    }
                }
                b':' if self.depth == 1 && self.object && self.key_next => {
                    self.key_next = false;
                    self.keeping = matters(&self.key);
                    self.value.clear();
                    kept_from = at + 1;
                }
                b',' if self.depth == 1 => {
                    self.keep(&chunk[kept_from..at]);
                    self.end_value();
                    self.key_next = self.object;
                }
                _ => {}
            }
            at += 1;
        }
        self.keep(&chunk[kept_from.min(chunk.len())..]);
    }

    /// Finds the document's first byte and returns the position after it.
    fn begin(&mut self, chunk: &[u8]) -> usize {
        let blank = |b: &u8| matches!(b, b' ' | b'\t' | b'\r' | b'\n' | 0xEF | 0xBB | 0xBF);
        let Some(at) = chunk.iter().position(|b| !blank(b)) else { return chunk.len() };
        self.object = chunk[at] == b'{';
        self.place = if self.object || chunk[at] == b'[' { Place::Inside } else { Place::NotJson };
        self.key_next = self.object;
        self.depth = 1;
        at + 1
    }

    /// Moves through a string to its end or the chunk's.
    fn string(&mut self, chunk: &[u8], at: usize) -> usize {
        if self.escaped {
            self.escaped = false;
            return at + 1;
        }
        let stop = memchr2(b'"', b'\\', &chunk[at..]).map_or(chunk.len(), |offset| at + offset);
        if self.in_key {
            let room = (KEY_BYTES_MAX + 1).saturating_sub(self.key.len());
            self.key.extend(chunk[at..stop].iter().take(room));
        }
        match chunk.get(stop) {
            Some(b'"') => {
                self.in_string = false;
                self.in_key = false;
            }
            Some(_) => self.escaped = true,
            None => return stop,
        }
        stop + 1
    }

    fn keep(&mut self, bytes: &[u8]) {
        if !self.keeping {
            return;
        }
        if self.value.len() + bytes.len() > VALUE_BYTES_MAX {
            self.keeping = false;
            self.unread = true;
            return;
        }
        self.value.extend_from_slice(bytes);
    }

    fn end_value(&mut self) {
        if !std::mem::take(&mut self.keeping) {
            return;
        }
        let mut cursor = Cursor::lenient(&self.value);
        match self.key.as_slice() {
            b"usage" => {
                let report = Report::read(&mut cursor).ok().filter(|report| report.usage().is_some());
                self.report = report.or(self.report);
            }
            b"error" if self.error.is_none() => self.error = error_of(&mut cursor).ok().flatten(),
            b"object" => self.error_object = self.value.trim_ascii() == b"\"error\"",
            b"message" => self.message = error_of(&mut cursor).ok().flatten(),
            _ => {}
        }
    }

    /// vLLM's older error is the document itself: `{"object":"error","message":…}`.
    fn conclude(&mut self) {
        if self.error_object && self.error.is_none() {
            self.error = Some(self.message.take().unwrap_or_default());
        }
        self.value = Vec::new();
    }
}

fn matters(key: &[u8]) -> bool {
    matches!(key, b"usage" | b"error" | b"object" | b"message")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Usage;

    fn read(document: &[u8], cut: usize) -> Document {
        let mut scanner = Document::default();
        for chunk in document.chunks(cut.max(1)) {
            scanner.feed(chunk);
        }
        scanner
    }

    #[test]
    fn usage_is_found_in_every_chunking_and_only_at_the_top() {
        let text = br#" {"a":{"usage":{"prompt_tokens":9}},"s":"\"usage\":{\"prompt_tokens\":8}\\",
            "usage" : {"prompt_tokens":5,"completion_tokens":2,"x":"}"} ,"z":[1,[2,{"usage":1}]],"error":null}  "#;
        for cut in 1..=text.len() {
            let scanner = read(text, cut);
            assert!(scanner.complete(), "cut {cut}");
            let usage = scanner.report.and_then(Report::usage);
            assert_eq!(usage, Some(Usage { prompt: 5, output: 2, ..Usage::default() }), "cut {cut}");
            assert_eq!(scanner.error, None);
        }
    }

    #[test]
    fn errors_are_found_in_every_shape() {
        for (text, message) in [
            (r#"{"error":{"message":"no \"m\"","code":404}}"#, "no \"m\""),
            (r#"{"object":"error","message":"bad","code":400}"#, "bad"),
            (r#"{"message":"bad","object":"error"}"#, "bad"),
            (r#"{"error":"Input validation error"}"#, "Input validation error"),
        ] {
            for cut in [1, 7, text.len()] {
                let scanner = read(text.as_bytes(), cut);
                assert_eq!(scanner.error.as_deref(), Some(message), "{text} cut {cut}");
            }
        }
        assert_eq!(read(br#"{"message":"hi","object":"chat.completion"}"#, 9).error, None);
    }

    #[test]
    fn a_truncated_document_is_not_complete_and_foreign_bytes_are_told() {
        assert!(!read(br#"{"usage":{"prompt_tokens":5}"#, 4).complete());
        assert!(read(b"RIFF....", 3).foreign());
        assert!(read(b"", 1).place == Place::Before);
        assert!(read(b"[]", 1).complete());
    }

    #[test]
    fn memory_is_bounded_whatever_the_document() {
        let key = format!("{{\"{}\":1,\"usage\":\"{}\"}}", "k".repeat(1 << 20), "v".repeat(1 << 20));
        let scanner = read(key.as_bytes(), 1000);
        assert!(scanner.complete() && scanner.unread);
        assert!(scanner.key.capacity() <= 64 && scanner.value.capacity() <= VALUE_BYTES_MAX * 2);
    }
}
