//! Who the client is, told to replicas (`X-Forwarded-*`, and RFC 7239's `Forwarded`).
//!
//! What a client says about itself is replaced, never appended to: the balancer does not know whom to believe.

use std::net::IpAddr;

use http::{HeaderMap, HeaderName, HeaderValue};

const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const X_FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
const X_FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");

/// The client's side of a request.
#[derive(Clone, Copy, Debug)]
pub struct ClientSide<'a> {
    pub address: IpAddr,
    /// Its `Host` or `:authority`.
    pub host: Option<&'a str>,
    pub https: bool,
}

/// Whether a client's field of this name is replaced.
pub(super) fn replaced(name: &str) -> bool {
    name == "forwarded" || name == "x-real-ip" || name.starts_with("x-forwarded-")
}

/// Sets them on a request that goes to a replica.
pub fn set_forwarded(headers: &mut HeaderMap, side: &ClientSide<'_>) {
    let proto = if side.https { "https" } else { "http" };
    let address = side.address.to_canonical();
    let node = node(address);
    let (open, close) = if address.is_ipv6() { ("\"[", "]\"") } else { ("", "") };
    let host = side.host.filter(|host| plain_host(host));
    let mut element = String::with_capacity(32 + node.len() + host.map_or(0, str::len));
    for part in ["for=", open, &node, close, ";proto=", proto] {
        element.push_str(part);
    }
    if let Some(host) = host {
        for part in [";host=\"", host, "\""] {
            element.push_str(part);
        }
    }
    let mut set = |name: HeaderName, value: Result<HeaderValue, _>| {
        // An address and a plain host are text that any field can carry.
        value.ok().and_then(|value| headers.insert(name, value))
    };
    set(http::header::FORWARDED, HeaderValue::try_from(element));
    set(X_FORWARDED_FOR, HeaderValue::try_from(node));
    set(X_FORWARDED_PROTO, Ok(HeaderValue::from_static(proto)));
    if let Some(host) = host {
        set(X_FORWARDED_HOST, HeaderValue::from_str(host));
    }
}

/// An address as text. Nearly all are IPv4, and formatting one takes longer than all the rest of this.
fn node(address: IpAddr) -> String {
    match address {
        IpAddr::V4(address) => {
            let mut text = String::with_capacity(15);
            for (i, octet) in address.octets().into_iter().enumerate() {
                if i > 0 {
                    text.push('.');
                }
                text.push_str(itoa::Buffer::new().format(octet));
            }
            text
        }
        IpAddr::V6(address) => address.to_string(),
    }
}

/// A host that may stand in a quoted string as it is.
fn plain_host(host: &str) -> bool {
    const HOST_BYTES_MAX: usize = 260;
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'_' | b':' | b'[' | b']');
    (1..=HOST_BYTES_MAX).contains(&host.len()) && host.bytes().all(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(side: &ClientSide<'_>) -> Vec<(String, String)> {
        let mut headers = HeaderMap::new();
        set_forwarded(&mut headers, side);
        let text = |value: &HeaderValue| value.to_str().unwrap().to_owned();
        let mut fields: Vec<_> = headers.iter().map(|(name, value)| (name.to_string(), text(value))).collect();
        fields.sort();
        fields
    }

    fn pairs<const N: usize>(pairs: [(&str, &str); N]) -> Vec<(String, String)> {
        pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).into()
    }

    #[test]
    fn c126_a_replica_is_told_who_asks_and_how() {
        let side = ClientSide { address: "192.0.2.1".parse().unwrap(), host: Some("lb.example:8080"), https: true };
        assert_eq!(
            fields(&side),
            pairs([
                ("forwarded", "for=192.0.2.1;proto=https;host=\"lb.example:8080\""),
                ("x-forwarded-for", "192.0.2.1"),
                ("x-forwarded-host", "lb.example:8080"),
                ("x-forwarded-proto", "https"),
            ])
        );
        let side = ClientSide { address: "2001:db8::1".parse().unwrap(), host: Some("a\"b"), https: false };
        assert_eq!(
            fields(&side),
            pairs([
                ("forwarded", "for=\"[2001:db8::1]\";proto=http"),
                ("x-forwarded-for", "2001:db8::1"),
                ("x-forwarded-proto", "http"),
            ])
        );
        let mapped = ClientSide { address: "::ffff:192.0.2.1".parse().unwrap(), host: None, https: false };
        assert_eq!(fields(&mapped)[1].1, "192.0.2.1");
    }
}
