//! Fields that belong to one connection (RFC 9110, section 7.6.1).

use http::header::CONNECTION;
use http::{HeaderMap, HeaderName};

/// Fields that are hop-by-hop whether or not `Connection` names them.
const HOP_BY_HOP: [&str; 9] = [
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

/// Fields that `Connection` may not take out: without them a request would change its meaning on the way.
const NEVER_NAMED: [&str; 6] =
    ["host", "content-length", "content-type", "content-encoding", "authorization", "cookie"];

/// The hop-by-hop fields that are there: the standard ones and those that `Connection` names.
pub fn hop_by_hop(headers: &HeaderMap) -> Vec<HeaderName> {
    let mut names: Vec<HeaderName> =
        headers.keys().filter(|name| HOP_BY_HOP.contains(&name.as_str())).cloned().collect();
    if !names.contains(&CONNECTION) {
        return names;
    }
    for value in headers.get_all(CONNECTION) {
        let options = value.to_str().unwrap_or("").split(',').map(str::trim);
        for option in options.filter(|option| !NEVER_NAMED.iter().any(|name| name.eq_ignore_ascii_case(option))) {
            if let Ok(name) = HeaderName::try_from(option)
                && headers.contains_key(&name)
                && !names.contains(&name)
            {
                names.push(name);
            }
        }
    }
    names
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn connection_cannot_take_out_what_carries_the_request() {
        let mut headers = HeaderMap::new();
        headers.insert("connection", HeaderValue::from_static("Content-Type, AUTHORIZATION, x-a, , b@d, x-absent"));
        for name in ["content-type", "authorization", "x-a"] {
            headers.insert(name, HeaderValue::from_static("v"));
        }
        assert_eq!(hop_by_hop(&headers), ["connection", "x-a"]);
    }
}
