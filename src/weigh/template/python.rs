//! Values as Python prints them: `str()`, `repr()` and `json.dumps`, which Hugging Face's templates rely on.

use std::fmt::Write;

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Error, ErrorKind};

/// Deepest nesting printed; a request's own nesting is bounded by its parser.
const DEPTH_MAX: usize = 256;

/// Appends `str(value)`: text as it is, everything else as Python would write it.
pub fn write_str(out: &mut String, value: &Value) -> Result<(), Error> {
    match value.as_str() {
        Some(text) => {
            out.push_str(text);
            Ok(())
        }
        None => write_repr(out, value, 0),
    }
}

/// `str(value)`.
pub fn str_of(value: &Value) -> Result<String, Error> {
    let mut out = String::new();
    write_str(&mut out, value)?;
    Ok(out)
}

fn too_deep() -> Error {
    Error::new(ErrorKind::InvalidOperation, "value is nested too deeply to print")
}

fn write_repr(out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
    if depth > DEPTH_MAX {
        return Err(too_deep());
    }
    match value.kind() {
        ValueKind::Undefined => {}
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => write_number(out, value, false),
        ValueKind::String => repr_text(out, value.as_str().unwrap_or_default()),
        ValueKind::Map if value.as_object().is_some() => {
            out.push('{');
            for (i, (key, item)) in pairs(value).enumerate() {
                if i > 0 {
                    out.push_str(", ");
                }
                write_repr(out, &key, depth + 1)?;
                out.push_str(": ");
                write_repr(out, &item, depth + 1)?;
            }
            out.push('}');
        }
        ValueKind::Seq => {
            let (open, close) = if value.is_tuple() { ('(', ')') } else { ('[', ']') };
            out.push(open);
            let mut items = 0;
            for item in value.try_iter()? {
                if items > 0 {
                    out.push_str(", ");
                }
                write_repr(out, &item, depth + 1)?;
                items += 1;
            }
            if items == 1 && value.is_tuple() {
                out.push(',');
            }
            out.push(close);
        }
        _ => {
            let _ = write!(out, "{value}");
        }
    }
    Ok(())
}

fn pairs(value: &Value) -> Box<dyn Iterator<Item = (Value, Value)> + '_> {
    match value.as_object().and_then(|object| object.try_iter_pairs()) {
        Some(pairs) => pairs,
        None => Box::new(std::iter::empty()),
    }
}

/// A string as `repr` writes it: single quotes unless only single quotes are inside; what does not print, escaped.
fn repr_text(out: &mut String, text: &str) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => {
                out.push('\\');
                out.push(c);
            }
            c if prints(c) => out.push(c),
            c => {
                let code = u32::from(c);
                let _ = match code {
                    0..=0xff => write!(out, "\\x{code:02x}"),
                    0x100..=0xffff => write!(out, "\\u{code:04x}"),
                    _ => write!(out, "\\U{code:08x}"),
                };
            }
        }
    }
    out.push(quote);
}

/// Python's `str.isprintable` for the characters that text carries: no controls, no separators but the space, no
/// format characters, nothing for private use.
fn prints(c: char) -> bool {
    if c == ' ' {
        return true;
    }
    let code = u32::from(c);
    !(c.is_control()
        || c.is_whitespace()
        || matches!(code, 0xad | 0x600..=0x605 | 0x61c | 0x6dd | 0x70f | 0x180e | 0x200b..=0x200f | 0x202a..=0x202e)
        || matches!(code, 0x2060..=0x206f | 0xfeff | 0xfff9..=0xfffb | 0xe000..=0xf8ff | 0xe0000..=0xe0fff | 0xf0000..))
}

/// A number as Python writes it; `json` spells the values JSON has no word for as `json.dumps` does.
fn write_number(out: &mut String, value: &Value, json: bool) {
    if value.is_integer() {
        let _ = write!(out, "{value}");
        return;
    }
    match f64::try_from(value.clone()) {
        Ok(number) => write_float(out, number, json),
        Err(_) => {
            let _ = write!(out, "{value}");
        }
    }
}

/// `repr(float)`: the shortest digits that read back the same, exponents below 1e-4 and from 1e16.
fn write_float(out: &mut String, number: f64, json: bool) {
    if number.is_nan() {
        out.push_str(if json { "NaN" } else { "nan" });
        return;
    }
    if number.is_infinite() {
        out.push_str(match (number > 0.0, json) {
            (true, true) => "Infinity",
            (false, true) => "-Infinity",
            (true, false) => "inf",
            (false, false) => "-inf",
        });
        return;
    }
    let scientific = format!("{number:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if number != 0.0 && !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        let _ = write!(out, "{digits}e{sign}{:02}", exponent.abs());
    } else {
        let plain = format!("{number}");
        out.push_str(&plain);
        if !plain.contains('.') {
            out.push_str(".0");
        }
    }
}

/// How `json.dumps` lays a value out.
struct Dump {
    ascii: bool,
    indent: Option<String>,
    item: String,
    key: String,
    sorted: bool,
}

/// The `tojson` filter as Hugging Face sets it up: `json.dumps(value, ensure_ascii=False)` with insertion order, no
/// HTML escaping, and `ensure_ascii`, `indent`, `separators` and `sort_keys` as keywords.
pub fn tojson(value: &Value, indent: Option<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    let ascii = kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    let sorted = kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    let indent = match indent {
        Some(indent) => Some(indent),
        None => kwargs.get::<Option<Value>>("indent")?,
    };
    let indent = match indent {
        None => None,
        Some(value) if value.is_none() || value.is_undefined() => None,
        Some(value) => Some(match value.as_str() {
            Some(text) => text.to_owned(),
            None => " ".repeat(usize::try_from(value).unwrap_or(0).min(64)),
        }),
    };
    let separators = kwargs.get::<Option<Value>>("separators")?.filter(|v| !v.is_none() && !v.is_undefined());
    kwargs.assert_all_used()?;
    let (item, key) = match separators {
        Some(pair) => (str_of(&pair.get_item_by_index(0)?)?, str_of(&pair.get_item_by_index(1)?)?),
        // With an indent, Python's default item separator loses its blank.
        None => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
    };
    let dump = Dump { ascii, indent, item, key, sorted };
    let mut out = String::new();
    dump.write(&mut out, value, 0)?;
    Ok(Value::from(out))
}

impl Dump {
    fn write(&self, out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > DEPTH_MAX {
            return Err(too_deep());
        }
        match value.kind() {
            ValueKind::None | ValueKind::Undefined => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => write_number(out, value, true),
            ValueKind::String => self.text(out, value.as_str().unwrap_or_default()),
            ValueKind::Map if value.as_object().is_some() => {
                let mut entries: Vec<(Value, Value)> = pairs(value).collect();
                if self.sorted {
                    entries.sort_by(|a, b| a.0.cmp(&b.0));
                }
                self.block(out, '{', '}', depth, entries.into_iter(), |out, (key, item)| {
                    match key.as_str() {
                        Some(key) => self.text(out, key),
                        None => {
                            out.push('"');
                            self.write(out, &key, depth + 1)?;
                            out.push('"');
                        }
                    }
                    out.push_str(&self.key);
                    self.write(out, &item, depth + 1)
                })?;
            }
            ValueKind::Seq | ValueKind::Iterable => {
                self.block(out, '[', ']', depth, value.try_iter()?, |out, item| self.write(out, &item, depth + 1))?;
            }
            other => {
                return Err(Error::new(
                    ErrorKind::InvalidOperation,
                    format!("Object of type {other} is not JSON serializable"),
                ));
            }
        }
        Ok(())
    }

    fn block<T>(
        &self,
        out: &mut String,
        open: char,
        close: char,
        depth: usize,
        items: impl Iterator<Item = T>,
        mut write: impl FnMut(&mut String, T) -> Result<(), Error>,
    ) -> Result<(), Error> {
        out.push(open);
        let mut empty = true;
        for item in items {
            if !empty {
                out.push_str(&self.item);
            }
            empty = false;
            self.line(out, depth + 1);
            write(out, item)?;
        }
        if !empty {
            self.line(out, depth);
        }
        out.push(close);
        Ok(())
    }

    fn line(&self, out: &mut String, depth: usize) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            for _ in 0..depth {
                out.push_str(indent);
            }
        }
    }

    fn text(&self, out: &mut String, text: &str) {
        out.push('"');
        let mut from = 0;
        for (i, byte) in text.bytes().enumerate() {
            let escape = match byte {
                b'"' => "\\\"",
                b'\\' => "\\\\",
                b'\n' => "\\n",
                b'\r' => "\\r",
                b'\t' => "\\t",
                0x08 => "\\b",
                0x0c => "\\f",
                0..=0x1f => "",
                0x7f.. if self.ascii => "",
                _ => continue,
            };
            if self.ascii && byte >= 0x80 && !text.is_char_boundary(i) {
                continue;
            }
            out.push_str(&text[from..i]);
            from = i + 1;
            if !escape.is_empty() {
                out.push_str(escape);
            } else if byte < 0x80 {
                if byte == 0x7f {
                    out.push('\u{7f}');
                } else {
                    let _ = write!(out, "\\u{byte:04x}");
                }
            } else if let Some(c) = text[i..].chars().next() {
                from = i + c.len_utf8();
                for unit in c.encode_utf16(&mut [0; 2]) {
                    let _ = write!(out, "\\u{unit:04x}");
                }
            }
        }
        out.push_str(&text[from..]);
        out.push('"');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn json(text: &str) -> Value {
        serde_json::from_str(text).unwrap()
    }

    fn dumped(text: &str) -> String {
        tojson(&json(text), None, Kwargs::from_iter(std::iter::empty::<(String, Value)>())).unwrap().to_string()
    }

    #[test]
    fn floats_are_written_as_python_repr_writes_them() {
        for (number, text) in [
            (1.0, "1.0"),
            (1e-7, "1e-07"),
            (2.5e20, "2.5e+20"),
            (1e16, "1e+16"),
            (123456789012345.0, "123456789012345.0"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (-0.0, "-0.0"),
        ] {
            let mut out = String::new();
            write_float(&mut out, number, false);
            assert_eq!(out, text);
        }
    }

    #[test]
    fn tojson_keeps_order_and_escapes_only_what_json_must() {
        assert_eq!(
            dumped(r#"{"b": [1, 2.0, null], "a": "< > & ' / \u5929 \" \n \u007f \u0001"}"#),
            "{\"b\": [1, 2.0, null], \"a\": \"< > & ' / 天 \\\" \\n \u{7f} \\u0001\"}"
        );
    }

    #[test]
    fn values_inside_containers_are_written_as_repr() {
        let value = json(r#"{"a": [true, null, "it's", "x\u00a0\u2028"], "n": 1}"#);
        assert_eq!(str_of(&value).unwrap(), r#"{'a': [True, None, "it's", 'x\xa0\u2028'], 'n': 1}"#);
    }

    #[test]
    fn ascii_only_json_escapes_pairs_of_surrogates() {
        let dump = Dump { ascii: true, indent: None, item: ", ".into(), key: ": ".into(), sorted: false };
        let mut out = String::new();
        dump.text(&mut out, "é😀x");
        assert_eq!(out, r#""\u00e9\ud83d\ude00x""#);
    }
}
