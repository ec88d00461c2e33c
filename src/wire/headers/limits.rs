//! Bounds on a request's header, and what it expects before its body.

use http::HeaderMap;

use crate::wire::error::{ApiError, ErrorCode};

/// Refuses a header that is larger than the limits: `line_bytes` of request line, and all fields with their
/// separators.
///
/// # Errors
/// `header_too_large`, naming the limit.
pub fn check_size(line_bytes: usize, headers: &HeaderMap, bytes_max: u64, count_max: usize) -> Result<(), ApiError> {
    let count = headers.len();
    if count > count_max {
        let message =
            format!("The request has {count} header fields, more than the {count_max} of limits.header_count.");
        return Err(ApiError::new(ErrorCode::HeaderTooLarge, message));
    }
    // A name, ": ", a value, and a line break.
    let fields: usize = headers.iter().map(|(name, value)| name.as_str().len() + value.len() + 4).sum();
    let bytes = (line_bytes + fields) as u64;
    if bytes > bytes_max {
        let message =
            format!("The request's header has {bytes} bytes, more than the {bytes_max} of limits.header_bytes.");
        return Err(ApiError::new(ErrorCode::HeaderTooLarge, message));
    }
    Ok(())
}

/// Whether the client waits for `100 Continue` before it sends its body.
///
/// # Errors
/// `expectation_failed` for any other expectation.
pub fn expects_continue(headers: &HeaderMap) -> Result<bool, ApiError> {
    let mut expects = false;
    for value in headers.get_all("expect") {
        if !value.as_bytes().trim_ascii().eq_ignore_ascii_case(b"100-continue") {
            return Err(ApiError::new(ErrorCode::ExpectationFailed, "Only Expect: 100-continue can be met."));
        }
        expects = true;
    }
    Ok(expects)
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn headers_are_bounded_in_bytes_and_in_number() {
        let mut headers = HeaderMap::new();
        headers.insert("a", HeaderValue::from_static("12345"));
        assert!(check_size(20, &headers, 30, 1).is_ok());
        assert!(check_size(21, &headers, 30, 1).unwrap_err().message.contains("header_bytes"));
        headers.append("a", HeaderValue::from_static("1"));
        assert!(check_size(0, &headers, 30, 1).unwrap_err().message.contains("header_count"));
    }

    #[test]
    fn c129_only_100_continue_is_met() {
        let mut headers = HeaderMap::new();
        assert_eq!(expects_continue(&headers), Ok(false));
        headers.insert("expect", HeaderValue::from_static("100-Continue"));
        assert_eq!(expects_continue(&headers), Ok(true));
        headers.append("expect", HeaderValue::from_static("200-ok"));
        assert_eq!(expects_continue(&headers).unwrap_err().code, ErrorCode::ExpectationFailed);
    }
}
