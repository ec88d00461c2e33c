//! Redirects: engines answer with absolute addresses of their own (vLLM's 307 for a trailing slash).

/// The `Location` to give to a client in place of one that points at the replica itself: a path, which the client
/// resolves against the address it used. `None` where the value is to stay as it is.
///
/// `authority` is the replica's `host:port` as its URL gives it (the port may be absent), `base` that URL's path.
pub fn relative_location(location: &str, authority: &str, base: &str) -> Option<String> {
    let (scheme, rest) = match location.split_once("://") {
        Some((scheme, rest)) => (scheme, rest),
        None => ("http", location.strip_prefix("//")?),
    };
    let default_port = match scheme.to_ascii_lowercase().as_str() {
        "http" => ":80",
        "https" => ":443",
        _ => return None,
    };
    let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    let (host, path) = rest.split_at(end);
    let bare = |host: &str| host.strip_suffix(default_port).unwrap_or(host).to_ascii_lowercase();
    if bare(host) != bare(authority) {
        return None;
    }
    let base = base.trim_end_matches('/');
    let inner = match path.strip_prefix(base) {
        Some(inner) if inner.is_empty() || inner.starts_with(['/', '?', '#']) => inner,
        _ => path,
    };
    // A path that begins with two slashes would name another host.
    let inner = inner.trim_start_matches('/');
    Some(format!("/{inner}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_redirect_to_the_replica_becomes_one_to_the_balancer() {
        let at = |location| relative_location(location, "127.0.0.1:18090", "");
        assert_eq!(at("http://127.0.0.1:18090/v1/chat/completions").as_deref(), Some("/v1/chat/completions"));
        assert_eq!(at("//127.0.0.1:18090/a?b=c#d").as_deref(), Some("/a?b=c#d"));
        assert_eq!(at("http://127.0.0.1:18090").as_deref(), Some("/"));
        assert_eq!(at("http://127.0.0.1:18090//evil.example/").as_deref(), Some("/evil.example/"));
        let based = |location| relative_location(location, "B.example", "/base/");
        assert_eq!(based("https://b.example:443/base/v1/x").as_deref(), Some("/v1/x"));
        assert_eq!(based("https://b.example/basement").as_deref(), Some("/basement"));
    }

    #[test]
    fn other_redirects_stay_as_they_are() {
        for location in
            ["/v1/x", "v1/x", "http://other.example/x", "ftp://127.0.0.1:18090/", "http://127.0.0.1:1/x", ""]
        {
            assert_eq!(relative_location(location, "127.0.0.1:18090", ""), None, "{location}");
        }
    }
}
