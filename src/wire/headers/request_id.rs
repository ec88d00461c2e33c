//! Request ids: the client's own comes back to it, and each attempt at a replica has one that nobody else has.
//!
//! Engines use `x-request-id` as a key: two live requests under one id broke them. Tracing wants the client's id end
//! to end. So the id that goes upstream begins with the client's and ends in something unique.

use http::HeaderMap;

/// Longest id taken from a client.
const ID_BYTES_MAX: usize = 128;

/// The ids of one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestIds {
    client: Option<String>,
    unique: u64,
}

impl RequestIds {
    /// Ids from the client's `x-request-id`, if it sent a usable one, and a number that is this request's alone
    /// (drawn at random, or counted from a random start).
    pub fn new(headers: &HeaderMap, unique: u64) -> Self {
        let client = headers.get("x-request-id").map(|value| value.as_bytes());
        let client = client
            .filter(|id| (1..=ID_BYTES_MAX).contains(&id.len()) && id.iter().all(u8::is_ascii_graphic))
            .map(|id| String::from_utf8_lossy(id).into_owned());
        RequestIds { client, unique }
    }

    /// The id in the answer and in the access log: the client's own, or a generated one.
    pub fn downstream(&self) -> String {
        match &self.client {
            Some(client) => client.clone(),
            None => {
                let mut id = String::with_capacity(4 + 16);
                id.push_str("req-");
                push_hex(&mut id, self.unique);
                id
            }
        }
    }

    /// The id sent upstream with an attempt (from 1).
    pub fn upstream(&self, attempt: u32) -> String {
        let client = self.client.as_deref().unwrap_or("req");
        let mut id = String::with_capacity(client.len() + 1 + 16 + 1 + 10);
        id.push_str(client);
        id.push('-');
        push_hex(&mut id, self.unique);
        id.push('-');
        id.push_str(itoa::Buffer::new().format(attempt));
        id
    }
}

/// Sixteen hexadecimal digits; each request has several ids, and formatting them is a tenth as fast.
fn push_hex(text: &mut String, number: u64) {
    for shift in (0..16).rev() {
        text.push(char::from(b"0123456789abcdef"[(number >> (4 * shift) & 0xf) as usize]));
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn ids(client: Option<&[u8]>, unique: u64) -> RequestIds {
        let mut headers = HeaderMap::new();
        if let Some(client) = client {
            headers.insert("x-request-id", HeaderValue::from_bytes(client).unwrap());
        }
        RequestIds::new(&headers, unique)
    }

    #[test]
    fn c127_the_client_gets_its_id_back_and_every_attempt_is_unique() {
        let (one, two) = (ids(Some(b"same"), 1), ids(Some(b"same"), 2));
        assert_eq!((one.downstream(), two.downstream()), ("same".into(), "same".into()));
        let all =
            [one.upstream(1), one.upstream(2), two.upstream(1), ids(None, 3).upstream(1), ids(None, 3).upstream(2)];
        assert_eq!(all.iter().collect::<std::collections::HashSet<_>>().len(), all.len());
        assert!(one.upstream(1).starts_with("same-"));
        assert_eq!(ids(None, 255).downstream(), "req-00000000000000ff");
        assert_eq!(ids(Some(b"a"), 0x0123_4567_89ab_cdef).upstream(1), "a-0123456789abcdef-1");
        assert_eq!(ids(None, 1).upstream(12), "req-0000000000000001-12");
    }

    #[test]
    fn an_id_that_could_do_harm_is_replaced() {
        for bad in [&b""[..], b"a b", "é".as_bytes(), &[b'a'; ID_BYTES_MAX + 1]] {
            assert_eq!(ids(Some(bad), 1).downstream(), "req-0000000000000001");
        }
    }
}
