//! The test data in the tree.

use std::path::PathBuf;

/// A path under `tests/`.
pub fn path(relative: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests").join(relative)
}

/// A field case's file, byte for byte.
pub fn case_bytes(name: &str) -> Vec<u8> {
    let path = path("field_cases/data").join(name);
    std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// A field case's file as text.
pub fn case_text(name: &str) -> String {
    String::from_utf8(case_bytes(name)).unwrap_or_else(|e| panic!("{name} is no UTF-8: {e}"))
}

/// Expands the one `<REPEAT "x" N TIMES>` of a pattern file with `times`.
pub fn repeat_pattern(pattern: &str, times: usize) -> String {
    let start = pattern.find("<REPEAT \"").expect("a pattern");
    let text = &pattern[start + 9..];
    let text_end = text.find('"').expect("the end of the repeated text");
    let end = start + pattern[start..].find('>').expect("the end of the pattern");
    format!("{}{}{}", &pattern[..start], text[..text_end].repeat(times), &pattern[end + 1..])
}
