//! Editing headers that pass.
//!
//! Pingora keeps a second map beside the fields, of how each name was written, and doubles the cost of every edit with
//! it. A header that is edited here goes on without: names go out as HTTP/2 has them, but for a few that Pingora
//! writes as everybody does (`Host`, `Content-Type`, `Content-Length`).

use http::{HeaderMap, HeaderValue};
use pingora::http::{RequestHeader, ResponseHeader};
use pingora::{Error, ErrorType, Result};

/// Edits a request's fields; its target stays as it was sent.
pub fn edit_request<T>(header: &mut RequestHeader, edit: impl FnOnce(&mut HeaderMap) -> T) -> T {
    // The parts keep a path alone. A target of another form (`http://host/path`) is set again: Pingora takes the host
    // from it where the client sent no `Host`.
    let path = header.uri.path_and_query().map(|path| path.as_str().as_bytes());
    let target = (path != Some(header.raw_path())).then(|| header.raw_path().to_vec());
    let (placeholder, ()) = http::Request::new(()).into_parts();
    let mut parts: http::request::Parts = std::mem::replace(header, RequestHeader::from(placeholder)).into();
    let edited = edit(&mut parts.headers);
    *header = RequestHeader::from(parts);
    if let Some(target) = target {
        // It was a target before.
        let _ = header.set_raw_path(&target);
    }
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
    fn an_edited_request_keeps_a_target_of_any_form() {
        for target in ["/v1/models", "/v1/chat/completions?a=b", "http://lb:8080/v1/models?x", "*", "/a//b/%20"] {
            let mut header = RequestHeader::build("POST", target.as_bytes(), None).unwrap();
            let uri = header.uri.clone();
            edit_request(&mut header, |headers| headers.insert("x-new", HeaderValue::from_static("1")));
            assert_eq!((header.raw_path(), &header.uri), (target.as_bytes(), &uri));
        }
        // As HTTP/2 brings it.
        let (mut parts, ()) = http::Request::new(()).into_parts();
        parts.uri = "https://lb/v1/models".parse().unwrap();
        let mut header = RequestHeader::from(parts);
        edit_request(&mut header, |_| ());
        assert_eq!(header.uri, "https://lb/v1/models");
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
