//! The one field of a `multipart/form-data` body that the balancer needs. Nothing is copied and the body is not decoded.

use std::ops::Range;

use memchr::memmem;

use crate::wire::error::{ApiError, ErrorCode};

/// Parts looked at before the search is given up: audio forms have about ten.
const PARTS_MAX: usize = 64;
/// Longest header of a part.
const PART_HEADER_BYTES_MAX: usize = 4096;
/// Longest value of a text field.
const VALUE_BYTES_MAX: usize = 512;

/// Finds the value of a text field; `None` where it is absent, too long, or not UTF-8.
///
/// # Errors
/// `invalid_request` where the content type is not a form with a boundary.
pub fn find_field(content_type: &str, body: &[u8], name: &str) -> Result<Option<Range<usize>>, ApiError> {
    let Some(boundary) = boundary(content_type) else {
        return Err(ApiError::new(
            ErrorCode::InvalidRequest,
            "This path takes multipart/form-data with a boundary in its content-type.",
        )
        .param("content-type"));
    };
    let delimiter = format!("--{boundary}");
    let finder = memmem::Finder::new(delimiter.as_bytes());
    let Some(first) = finder.find(body) else { return Ok(None) };
    let mut at = first + delimiter.len();
    for _ in 0..PARTS_MAX {
        // `--` behind the delimiter ends the form; else a line break leads to the part's header.
        if body[at..].starts_with(b"--") {
            return Ok(None);
        }
        let Some(break_at) = memmem::find(&body[at..], b"\r\n").map(|found| at + found) else { return Ok(None) };
        let header_start = break_at + 2;
        let header_room = &body[header_start..body.len().min(header_start + PART_HEADER_BYTES_MAX)];
        let Some(header_bytes) = memmem::find(header_room, b"\r\n\r\n") else { return Ok(None) };
        let value_start = header_start + header_bytes + 4;
        let Some(next) = finder.find(&body[value_start..]).map(|found| value_start + found) else { return Ok(None) };
        let value = value_start..next.saturating_sub(2).max(value_start);
        if names(&header_room[..header_bytes], name) {
            let fits = value.len() <= VALUE_BYTES_MAX && std::str::from_utf8(&body[value.clone()]).is_ok();
            return Ok(fits.then_some(value));
        }
        at = next + delimiter.len();
    }
    Ok(None)
}

fn boundary(content_type: &str) -> Option<&str> {
    let (kind, parameters) = content_type.split_once(';')?;
    if !kind.trim().eq_ignore_ascii_case("multipart/form-data") {
        return None;
    }
    let value = parameters.split(';').find_map(|parameter| {
        let (key, value) = parameter.split_once('=')?;
        key.trim().eq_ignore_ascii_case("boundary").then_some(value.trim())
    })?;
    let value = value.strip_prefix('"').and_then(|v| v.strip_suffix('"')).unwrap_or(value);
    // RFC 2046, section 5.1.1: 1 to 70 characters.
    (1..=70).contains(&value.len()).then_some(value)
}

/// Whether a part's header names this field, and no file.
fn names(header: &[u8], name: &str) -> bool {
    let Ok(header) = std::str::from_utf8(header) else { return false };
    header.split("\r\n").any(|line| {
        let Some((key, value)) = line.split_once(':') else { return false };
        if !key.trim().eq_ignore_ascii_case("content-disposition") {
            return false;
        }
        let mut found = false;
        for parameter in value.split(';').skip(1) {
            let Some((key, value)) = parameter.split_once('=') else { continue };
            match key.trim().to_ascii_lowercase().as_str() {
                "name" => found = value.trim().trim_matches('"') == name,
                "filename" | "filename*" => return false,
                _ => {}
            }
        }
        found
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TYPE: &str = "multipart/form-data; boundary=X7";

    fn form(parts: &[(&str, &str)]) -> Vec<u8> {
        let mut body = String::new();
        for (header, value) in parts {
            body += &format!("--X7\r\nContent-Disposition: form-data; {header}\r\n\r\n{value}\r\n");
        }
        (body + "--X7--\r\n").into_bytes()
    }

    fn model(body: &[u8]) -> Option<String> {
        let span = find_field(TYPE, body, "model").unwrap()?;
        Some(String::from_utf8(body[span].to_vec()).unwrap())
    }

    #[test]
    fn the_model_is_found_before_and_behind_the_file() {
        let file = ("name=\"file\"; filename=\"a.wav\"", "RIFF\r\n\r\nname=\"model\"");
        let field = ("name=\"model\"", "whisper-1");
        assert_eq!(model(&form(&[file, field])).as_deref(), Some("whisper-1"));
        assert_eq!(model(&form(&[field, file])).as_deref(), Some("whisper-1"));
        assert_eq!(model(&form(&[file])), None);
        assert_eq!(model(&form(&[("name=\"model\"; filename=\"m\"", "whisper-1")])), None);
    }

    #[test]
    fn broken_forms_have_no_model_and_never_panic() {
        let whole = form(&[("name=\"a\"", "b"), ("name=\"model\"", "m")]);
        for cut in 0..whole.len() {
            let _ = model(&whole[..cut]);
        }
        assert_eq!(model(&form(&[("name=\"model\"", &"m".repeat(VALUE_BYTES_MAX + 1))])), None);
        assert_eq!(model(&form(&[("name=\"a\"", "b"); PARTS_MAX + 1])), None);
        assert_eq!(model(b"--X7--"), None);
    }

    #[test]
    fn a_content_type_without_boundary_is_refused() {
        for bad in
            ["application/json", "multipart/form-data", "multipart/form-data; boundary=", "multipart/mixed; boundary=x"]
        {
            assert!(find_field(bad, b"", "model").is_err(), "{bad}");
        }
        assert!(find_field("Multipart/Form-Data; charset=utf-8; Boundary=\"X7\"", b"", "model").unwrap().is_none());
    }
}
