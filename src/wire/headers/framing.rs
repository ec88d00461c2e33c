//! How a request's body is framed, read strictly: what two servers could read in two ways is refused (RFC 9112,
//! section 6). An HTTP library's own reading is not asked, since it has already decided.

use http::Version;

use crate::wire::error::{ApiError, ErrorCode};

/// A request's framing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Framing {
    /// No body announced.
    None,
    /// `Content-Length`, in bytes.
    Length(u64),
    /// `Transfer-Encoding: chunked`.
    Chunked,
}

/// Reads the framing from all header fields as they came.
///
/// # Errors
/// `invalid_request` for both framings at once, a repeated or malformed `Content-Length`, any transfer coding but
/// `chunked` alone, one in a version that has none, and names or values with bytes that do not belong there. The
/// connection must then be closed: nobody knows where the next request begins.
pub fn framing<'a>(
    version: Version,
    fields: impl IntoIterator<Item = (&'a [u8], &'a [u8])>,
) -> Result<Framing, ApiError> {
    let mut length = None;
    let mut chunked = false;
    for (name, value) in fields {
        if name.is_empty() || !name.iter().all(|&b| token(b)) {
            return Err(refuse("a header field's name holds bytes that do not belong there"));
        }
        if value.iter().any(|b| matches!(b, b'\r' | b'\n' | 0)) {
            return Err(refuse("a header field's value holds a line break or NUL"));
        }
        if name.eq_ignore_ascii_case(b"content-length") {
            if length.is_some() {
                return Err(refuse("Content-Length is given more than once"));
            }
            length = Some(digits(value).ok_or_else(|| refuse("Content-Length is not a plain number"))?);
        } else if name.eq_ignore_ascii_case(b"transfer-encoding") {
            if version != Version::HTTP_11 {
                return Err(refuse("Transfer-Encoding exists only in HTTP/1.1"));
            }
            if chunked || !value.trim_ascii().eq_ignore_ascii_case(b"chunked") {
                return Err(refuse("Transfer-Encoding must be \"chunked\" alone, once"));
            }
            chunked = true;
        }
    }
    match (length, chunked) {
        (Some(_), true) => Err(refuse("Content-Length and Transfer-Encoding are given together")),
        (Some(length), false) => Ok(Framing::Length(length)),
        (None, true) => Ok(Framing::Chunked),
        (None, false) => Ok(Framing::None),
    }
}

fn refuse(what: &str) -> ApiError {
    ApiError::new(ErrorCode::InvalidRequest, format!("The request's framing is ambiguous: {what}."))
}

fn token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

/// A number of digits alone, and not more of them than fit.
fn digits(value: &[u8]) -> Option<u64> {
    let value = value.trim_ascii();
    if value.is_empty() || !value.iter().all(u8::is_ascii_digit) {
        return None;
    }
    std::str::from_utf8(value).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(version: Version, fields: &[(&str, &str)]) -> Result<Framing, ApiError> {
        framing(version, fields.iter().map(|(name, value)| (name.as_bytes(), value.as_bytes())))
    }

    #[test]
    fn one_framing_is_read() {
        let read = |fields| read(Version::HTTP_11, fields).unwrap();
        assert_eq!(read(&[("host", "lb")]), Framing::None);
        assert_eq!(read(&[("Content-Length", " 58 ")]), Framing::Length(58));
        assert_eq!(read(&[("transfer-encoding", "Chunked")]), Framing::Chunked);
    }

    #[test]
    fn c121_what_could_be_read_in_two_ways_is_refused() {
        for fields in [
            &[("Content-Length", "6"), ("Transfer-Encoding", "chunked")][..],
            &[("Transfer-Encoding", "chunked"), ("Content-Length", "4")],
            &[("Content-Length", "5"), ("Content-Length", "6")],
            &[("Content-Length", "5"), ("Content-Length", "5")],
            &[("Content-Length", "5, 5")],
            &[("Content-Length", "+5")],
            &[("Content-Length", "-5")],
            &[("Content-Length", "0x5")],
            &[("Content-Length", "")],
            &[("Content-Length", "99999999999999999999")],
            &[("Transfer-Encoding", "xchunked")],
            &[("Transfer-Encoding", "chunked, identity")],
            &[("Transfer-Encoding", "gzip, chunked")],
            &[("Transfer-Encoding", "chunked"), ("Transfer-Encoding", "chunked")],
            &[("Transfer-Encoding", "")],
            &[("Content-Length ", "5")],
            &[("", "x")],
            &[("x", "a\r\n b")],
        ] {
            assert!(read(Version::HTTP_11, fields).is_err(), "{fields:?}");
        }
        for version in [Version::HTTP_10, Version::HTTP_2] {
            assert!(read(version, &[("Transfer-Encoding", "chunked")]).is_err());
            assert_eq!(read(version, &[("content-length", "5")]), Ok(Framing::Length(5)));
        }
    }
}
