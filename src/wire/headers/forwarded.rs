//! Who the client is, told to replicas (`X-Forwarded-*`, and RFC 7239's `Forwarded`).
//!
//! What a client says about itself is replaced, never appended to: the balancer does not know whom to believe.

use std::net::IpAddr;

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

/// The fields to set on a request that goes to a replica.
pub fn forwarded(side: &ClientSide<'_>) -> Vec<(&'static str, String)> {
    let proto = if side.https { "https" } else { "http" };
    let address = side.address.to_canonical();
    let node = address.to_string();
    let (open, close) = if address.is_ipv6() { ("\"[", "]\"") } else { ("", "") };
    let host = side.host.filter(|host| plain_host(host));
    let mut element = String::with_capacity(32 + node.len() + host.map_or(0, str::len));
    for part in ["for=", open, &node, close, ";proto=", proto] {
        element.push_str(part);
    }
    let mut fields = Vec::with_capacity(4);
    fields.push(("x-forwarded-for", node));
    fields.push(("x-forwarded-proto", proto.to_owned()));
    if let Some(host) = host {
        for part in [";host=\"", host, "\""] {
            element.push_str(part);
        }
        fields.push(("x-forwarded-host", host.to_owned()));
    }
    fields.push(("forwarded", element));
    fields
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

    #[test]
    fn c126_a_replica_is_told_who_asks_and_how() {
        let side = ClientSide { address: "192.0.2.1".parse().unwrap(), host: Some("lb.example:8080"), https: true };
        assert_eq!(
            forwarded(&side),
            [
                ("x-forwarded-for", "192.0.2.1".to_owned()),
                ("x-forwarded-proto", "https".to_owned()),
                ("x-forwarded-host", "lb.example:8080".to_owned()),
                ("forwarded", "for=192.0.2.1;proto=https;host=\"lb.example:8080\"".to_owned()),
            ]
        );
        let side = ClientSide { address: "2001:db8::1".parse().unwrap(), host: Some("a\"b"), https: false };
        assert_eq!(
            forwarded(&side),
            [
                ("x-forwarded-for", "2001:db8::1".to_owned()),
                ("x-forwarded-proto", "http".to_owned()),
                ("forwarded", "for=\"[2001:db8::1]\";proto=http".to_owned()),
            ]
        );
        let mapped = ClientSide { address: "::ffff:192.0.2.1".parse().unwrap(), host: None, https: false };
        assert_eq!(forwarded(&mapped)[0].1, "192.0.2.1");
    }
}
