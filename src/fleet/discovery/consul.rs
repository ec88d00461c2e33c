//! Replicas that are a Consul service: its passing instances, followed by blocking queries.

use std::time::Duration;

use serde_json::Value;

use crate::config::{ConsulDiscovery, ReplicaReader, ReplicaSpec};

use super::{Feed, Pause, chain, http_client};

/// How long Consul may hold a query open; it adds up to a sixteenth of it.
const WAIT: Duration = Duration::from_secs(55);
/// Beyond that, the answer is late.
const LATE: Duration = Duration::from_secs(10);
/// The least time between two queries: Consul answers at once while its index moves for other reasons.
const PACE: Duration = Duration::from_millis(100);

pub(super) async fn follow(consul: ConsulDiscovery, reader: ReplicaReader, feed: Feed) {
    let mut pause = Pause::new();
    let mut index = 0;
    let mut client = None;
    loop {
        match ask(&mut client, &consul, index).await {
            Ok((next, body)) => {
                pause.reset();
                feed.good(specs(&body, &reader, &feed));
                index = next_index(index, next);
                tokio::time::sleep(PACE).await;
            }
            Err(why) => {
                feed.failed(&why);
                // After a failure the next answer must come at once, not when something changes; and certificates may
                // have been replaced.
                index = 0;
                client = None;
                pause.wait().await;
            }
        }
    }
}

/// Consul's rules: an index that goes back means that its state was restored, and one below 1 never blocks; both
/// start over.
fn next_index(last: u64, next: u64) -> u64 {
    if next < last || next == 0 { 0 } else { next }
}

async fn ask(
    kept: &mut Option<reqwest::Client>,
    consul: &ConsulDiscovery,
    index: u64,
) -> Result<(u64, Vec<Value>), String> {
    let client = match kept {
        Some(client) => client,
        None => kept.insert(http_client(Some(WAIT + WAIT / 16 + LATE), consul.tls.as_ref())?),
    };
    let mut url: reqwest::Url = consul.address.parse().map_err(|e| format!("{}: {e}", consul.address))?;
    let mut path = url.path_segments_mut().map_err(|()| format!("{} takes no path", consul.address))?;
    path.pop_if_empty().extend(["v1", "health", "service", &consul.service]);
    drop(path);
    url.query_pairs_mut().append_pair("passing", "1");
    if index > 0 {
        url.query_pairs_mut()
            .append_pair("index", &index.to_string())
            .append_pair("wait", &format!("{}s", WAIT.as_secs()));
    }
    let mut request = client.get(url);
    if let Some(file) = &consul.token_file {
        // Read each time: tokens are rotated in place.
        let token = std::fs::read_to_string(file).map_err(|e| format!("cannot read {}: {e}", file.display()))?;
        request = request.header("x-consul-token", token.trim());
    }
    let answer = request.send().await.and_then(reqwest::Response::error_for_status).map_err(|e| chain(&e))?;
    let next = answer.headers().get("x-consul-index").and_then(|v| v.to_str().ok()).and_then(|v| v.parse().ok());
    let body = answer.json().await.map_err(|e| chain(&e))?;
    Ok((next.unwrap_or(0), body))
}

fn specs(services: &[Value], reader: &ReplicaReader, feed: &Feed) -> Vec<ReplicaSpec> {
    let mut found = Vec::with_capacity(services.len());
    for entry in services {
        let service = &entry["Service"];
        let text = |value: &Value| value.as_str().filter(|t| !t.is_empty()).map(str::to_owned);
        let Some(host) = text(&service["Address"]).or_else(|| text(&entry["Node"]["Address"])) else { continue };
        let Some(port) = service["Port"].as_u64().and_then(|p| u16::try_from(p).ok()).filter(|p| *p > 0) else {
            continue;
        };
        let authority = if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
        let id = text(&service["ID"]).unwrap_or(authority);
        let meta = service["Meta"].as_object().into_iter().flatten();
        let meta = meta.filter_map(|(key, value)| Some((key.as_str(), value.as_str()?)));
        match reader.described(&id, host, port, meta, &format!("consul:{id}")) {
            Ok(spec) => found.push(spec),
            Err(errors) => feed.passed_over(&id, errors),
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_index_that_goes_back_starts_over() {
        assert_eq!(next_index(5, 9), 9);
        assert_eq!(next_index(9, 9), 9);
        assert_eq!(next_index(9, 5), 0);
        assert_eq!(next_index(9, 0), 0);
    }
}
