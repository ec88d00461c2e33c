//! What header fields mean, and which of them may pass. Pure functions over [`http::HeaderMap`] or raw pairs.

mod credentials;
mod forwarded;
mod framing;
mod hints;
mod hop;
mod limits;
mod location;
mod request_id;

use http::{HeaderMap, HeaderName};

pub use credentials::api_key;
pub use forwarded::{ClientSide, set_forwarded};
pub use framing::{Framing, framing};
pub use hints::{Hints, PriorityHint};
pub use hop::hop_by_hop;
pub use limits::{check_size, expects_continue};
pub use location::relative_location;
pub use request_id::RequestIds;

/// The fields of a client's request that do not go to a replica: those of the connection, hints and identities that
/// the balancer replaces, and (with `own_keys`) the client's credentials.
///
/// `own_keys` is true where the balancer authenticates clients or a replica has a key of its own; the client's key
/// then never leaves the balancer. Framing (`content-length`, `content-encoding`) is set by the caller, who knows the
/// body, and so is `accept-encoding: identity`, without which usage could not be hidden.
pub fn not_forwarded(headers: &HeaderMap, own_keys: bool) -> Vec<HeaderName> {
    let mut names = hop_by_hop(headers);
    let others = headers.keys().filter(|name| {
        let text = name.as_str();
        text == "expect"
            || forwarded::replaced(text)
            || hints::stripped(text)
            || (own_keys && credentials::is_credential(text))
    });
    names.extend(others.cloned());
    names
}

/// The fields of a replica's answer that do not go to the client.
pub fn not_returned(headers: &HeaderMap) -> Vec<HeaderName> {
    hop_by_hop(headers)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut map = HeaderMap::new();
        for (name, value) in pairs {
            map.append(*name, http::HeaderValue::from_static(value));
        }
        map
    }

    fn left(pairs: &[(&'static str, &'static str)], own_keys: bool) -> Vec<String> {
        let mut map = headers(pairs);
        for name in not_forwarded(&map, own_keys) {
            map.remove(name);
        }
        map.keys().map(|name| name.to_string()).collect()
    }

    #[test]
    fn c123_fields_of_the_connection_stay_on_it() {
        let pairs = [
            ("connection", "close, X-Drop"),
            ("x-drop", "1"),
            ("keep-alive", "timeout=5"),
            ("te", "trailers"),
            ("proxy-authorization", "Basic eA=="),
            ("trailer", "x"),
            ("upgrade", "h2c"),
            ("content-type", "application/json"),
        ];
        assert_eq!(left(&pairs, false), ["content-type"]);
    }

    #[test]
    fn c124_a_clients_key_leaves_only_where_nobody_else_has_one() {
        let pairs = [("authorization", "Bearer lb-secret"), ("x-api-key", "k"), ("api-key", "k"), ("accept", "*/*")];
        assert_eq!(left(&pairs, true), ["accept"]);
        assert_eq!(left(&pairs, false).len(), 4);
    }

    #[test]
    fn hints_and_spoofed_addresses_are_taken_out() {
        let pairs = [
            ("x-weighbridge-priority", "high"),
            ("x-weighbridge-anything", "1"),
            ("x-llm-d-inference-objective", "high"),
            ("x-request-priority", "9"),
            ("x-session-id", "s"),
            ("x-forwarded-for", "1.2.3.4"),
            ("forwarded", "for=1.2.3.4"),
            ("x-real-ip", "1.2.3.4"),
            ("expect", "100-continue"),
            ("x-data-parallel-rank", "1"),
        ];
        assert_eq!(left(&pairs, false), ["x-data-parallel-rank"]);
    }
}
