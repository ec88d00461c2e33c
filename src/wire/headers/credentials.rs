//! The keys that clients show.

use http::HeaderMap;

const CREDENTIALS: [&str; 3] = ["authorization", "x-api-key", "api-key"];

/// Whether a field carries a client's key.
pub(super) fn is_credential(name: &str) -> bool {
    CREDENTIALS.contains(&name)
}

/// The client's key: `Authorization: Bearer`, else `x-api-key` (Anthropic's clients), else `api-key` (Azure's).
/// A field that is given twice is ambiguous and gives none.
pub fn api_key(headers: &HeaderMap) -> Option<&[u8]> {
    let single = |name: &str| {
        let mut values = headers.get_all(name).iter();
        let first = values.next()?.as_bytes();
        (values.next().is_none() && !first.is_empty()).then_some(first)
    };
    if headers.contains_key("authorization") {
        let value = single("authorization")?;
        let scheme_end = value.iter().position(|&b| b == b' ')?;
        let key = value[scheme_end..].trim_ascii();
        let bearer = value[..scheme_end].eq_ignore_ascii_case(b"bearer");
        return (bearer && !key.is_empty()).then_some(key);
    }
    single("x-api-key").or_else(|| single("api-key"))
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn key(pairs: &[(&'static str, &'static str)]) -> Option<String> {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(*name, HeaderValue::from_static(value));
        }
        api_key(&headers).map(|key| String::from_utf8(key.to_vec()).unwrap())
    }

    #[test]
    fn keys_are_read_from_each_apis_own_field() {
        assert_eq!(key(&[("authorization", "Bearer abc")]).as_deref(), Some("abc"));
        assert_eq!(key(&[("authorization", "bearer  abc ")]).as_deref(), Some("abc"));
        assert_eq!(key(&[("x-api-key", "abc")]).as_deref(), Some("abc"));
        assert_eq!(key(&[("api-key", "abc")]).as_deref(), Some("abc"));
        assert_eq!(key(&[("authorization", "Bearer a"), ("x-api-key", "b")]).as_deref(), Some("a"));
    }

    #[test]
    fn what_is_no_key_or_two_keys_gives_none() {
        for pairs in [
            &[][..],
            &[("authorization", "Basic abc")],
            &[("authorization", "Bearer")],
            &[("authorization", "Bearer ")],
            &[("authorization", "Bearer a"), ("authorization", "Bearer b")],
            &[("authorization", "Basic a"), ("x-api-key", "b")],
            &[("x-api-key", "")],
        ] {
            assert_eq!(key(pairs), None, "{pairs:?}");
        }
    }
}
