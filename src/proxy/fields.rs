//! Editing headers that pass.
//!
//! Pingora keeps a second map beside the fields, of how each name was written, and doubles the cost of every edit with
//! it. A header that is edited here goes on without: names go out as HTTP/2 has them, but for a few that Pingora
//! writes as everybody does (`Host`, `Content-Type`, `Content-Length`).

use http::{HeaderMap, HeaderValue};
use pingora::http::{RequestHeader, ResponseHeader};
use pingora::{Error, ErrorType, Result};

/// Edits a request's fields.
pub fn edit_request<T>(header: &mut RequestHeader, edit: impl FnOnce(&mut HeaderMap) -> T) -> T {
    let (placeholder, ()) = http::Request::new(()).into_parts();
    let mut parts: http::request::Parts = std::mem::replace(header, RequestHeader::from(placeholder)).into();
    let edited = edit(&mut parts.headers);
    *header = RequestHeader::from(parts);
    edited
}

/// Edits an answer's fields; its reason phrase stays.
pub fn edit_answer<T>(header: &mut ResponseHeader, edit: impl FnOnce(&mut HeaderMap) -> T) -> T {
    let usual = header.status.canonical_reason();
    let reason = header.get_reason_phrase().filter(|reason| Some(*reason) != usual).map(str::to_owned);
    let (placeholder, ()) = http::Response::new(()).into_parts();
    let mut parts: http::response::Parts = std::mem::replace(header, ResponseHeader::from(placeholder)).into();
    let edited = edit(&mut parts.headers);
    *header = ResponseHeader::from(parts);
    if let Some(reason) = &reason {
        // It was a reason phrase before; a failure leaves the usual one.
        let _ = header.set_reason_phrase(Some(reason));
    }
    edited
}

/// A text as a field's value.
pub fn value(text: impl TryInto<HeaderValue>) -> Result<HeaderValue> {
    text.try_into().map_err(|_| Error::explain(ErrorType::InvalidHTTPHeader, "a text that no header field can carry"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_edited_request_keeps_its_line_and_its_other_fields() {
        let mut header = RequestHeader::build("POST", b"/v1/chat/completions?a=b", None).unwrap();
        header.insert_header("X-Own", "1").unwrap();
        header.append_header("X-Twice", "a").unwrap();
        header.append_header("X-Twice", "b").unwrap();
        header.insert_header("Host", "lb").unwrap();
        edit_request(&mut header, |headers| {
            headers.remove("x-own");
            headers.insert("host", HeaderValue::from_static("replica"));
        });
        let mut wire = Vec::new();
        header.header_to_h1_wire(&mut wire);
        assert_eq!((header.method.as_str(), header.raw_path()), ("POST", &b"/v1/chat/completions?a=b"[..]));
        let text = String::from_utf8(wire).unwrap();
        let mut fields: Vec<&str> = text.lines().collect();
        fields.sort_unstable();
        assert_eq!(fields, ["Host: replica", "x-twice: a", "x-twice: b"]);
    }

    #[test]
    fn an_edited_answer_keeps_its_status_and_a_reason_of_its_own() {
        let mut header = ResponseHeader::build(503, None).unwrap();
        header.set_reason_phrase(Some("Model Asleep")).unwrap();
        header.insert_header("Content-Type", "text/plain").unwrap();
        edit_answer(&mut header, |headers| headers.insert("x-new", HeaderValue::from_static("1")));
        assert_eq!((header.status.as_u16(), header.get_reason_phrase()), (503, Some("Model Asleep")));
        assert_eq!(header.headers.len(), 2);
        let mut header = ResponseHeader::build(200, None).unwrap();
        edit_answer(&mut header, |_| ());
        assert_eq!(header.get_reason_phrase(), Some("OK"));
    }
}
