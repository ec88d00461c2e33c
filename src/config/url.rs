//! A replica's base address, from text and back.

use std::fmt;
use std::str::FromStr;

use serde::{Serialize, Serializer};

use super::types::ReplicaUrl;

/// What a replica's `url` may look like.
pub const URL_FORMS: &str =
    "http://HOST[:PORT][/BASE], https://…, or h2c://… (HTTP/2 without TLS); IPv6 in brackets: http://[fd00::3]:8000";

impl ReplicaUrl {
    /// `http`, `https` or `h2c`.
    pub fn scheme(&self) -> &'static str {
        match (self.https, self.h2c) {
            (true, _) => "https",
            (false, true) => "h2c",
            (false, false) => "http",
        }
    }

    /// Host and port as they stand in a `Host` header: the port is left out where it is the scheme's own, IPv6
    /// is in brackets.
    pub fn authority(&self) -> String {
        let default = if self.https { 443 } else { 80 };
        let (open, close) = if self.host.contains(':') { ("[", "]") } else { ("", "") };
        // For each request that is forwarded: room is made once, and nothing is formatted.
        let mut text = String::with_capacity(self.host.len() + 8);
        text.extend([open, &self.host, close]);
        if self.port != default {
            text.extend([":", itoa::Buffer::new().format(self.port)]);
        }
        text
    }

    /// The address for a plain HTTP client: `h2c` becomes `http`.
    pub fn http_base(&self) -> String {
        let scheme = if self.https { "https" } else { "http" };
        format!("{scheme}://{}{}", self.authority(), self.base_path)
    }
}

impl fmt::Display for ReplicaUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}{}", self.scheme(), self.authority(), self.base_path)
    }
}

impl Serialize for ReplicaUrl {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl FromStr for ReplicaUrl {
    type Err = String;

    /// # Errors
    /// What is wrong with the text, to be shown beside [`URL_FORMS`].
    fn from_str(text: &str) -> Result<ReplicaUrl, String> {
        let uri: http::Uri = text.parse().map_err(|e| format!("`{text}` is no URL: {e}"))?;
        let Some(scheme) = uri.scheme_str() else { return Err(format!("`{text}` has no scheme; try http://{text}")) };
        let (https, h2c) = match scheme {
            "http" => (false, false),
            "https" => (true, false),
            "h2c" => (false, true),
            other => return Err(format!("`{text}` has the scheme {other}")),
        };
        let authority = uri.authority().ok_or_else(|| format!("`{text}` has no host"))?;
        if authority.as_str().contains('@') {
            return Err("a user or password in the URL; an engine's key belongs into `api_key_file`".to_owned());
        }
        if uri.query().is_some() {
            return Err(format!("`{text}` has a query"));
        }
        let host = authority.host();
        let bracketed = host.strip_prefix('[').and_then(|h| h.strip_suffix(']'));
        let host = match bracketed {
            Some(inner) => {
                inner.parse::<std::net::Ipv6Addr>().map_err(|_| format!("`{inner}` is no IPv6 address"))?;
                inner.to_owned()
            }
            None if host.is_empty() => return Err(format!("`{text}` has no host")),
            None => host.to_ascii_lowercase(),
        };
        let port = match authority.as_str().rsplit_once(':').filter(|(_, p)| !p.contains(']')) {
            Some((_, port)) => match port.parse::<u16>() {
                Ok(port) if port > 0 => port,
                _ => return Err(format!("`{port}` is no port")),
            },
            None if https => 443,
            None => 80,
        };
        let base_path = uri.path().trim_end_matches('/').to_owned();
        Ok(ReplicaUrl { https, h2c, host, port, base_path })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_is_taken_apart_and_written_back() {
        for (text, host, port, base, back) in [
            ("http://10.0.0.3:8000", "10.0.0.3", 8000, "", "http://10.0.0.3:8000"),
            ("http://gpu/", "gpu", 80, "", "http://gpu"),
            ("https://B.example:8443/base/", "b.example", 8443, "/base", "https://b.example:8443/base"),
            ("https://b.example", "b.example", 443, "", "https://b.example"),
            ("h2c://[fd00::3]:9000/v", "fd00::3", 9000, "/v", "h2c://[fd00::3]:9000/v"),
            ("http://[::1]", "::1", 80, "", "http://[::1]"),
        ] {
            let url: ReplicaUrl = text.parse().unwrap();
            assert_eq!((url.host.as_str(), url.port, url.base_path.as_str()), (host, port, base), "{text}");
            assert_eq!(url.to_string(), back);
        }
    }

    #[test]
    fn what_is_no_base_address_is_refused() {
        for text in [
            "10.0.0.3:8000",
            "gpu",
            "ftp://gpu",
            "http://",
            "http://gpu:0",
            "http://gpu:99999",
            "http://me:pw@gpu",
            "http://gpu/?a=1",
            "http://[fd00::zz]:1",
            "",
            "http://a b",
        ] {
            assert!(text.parse::<ReplicaUrl>().is_err(), "{text}");
        }
    }
}
