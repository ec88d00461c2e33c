//! Replicas that advertise themselves in etcd: a key each under a prefix, kept alive by a lease.
//!
//! Through etcd's own JSON gateway (part of the server since 3.4) rather than gRPC: the same range and watch, without
//! a protocol compiler in everybody's build. The set is read whole at a revision and then followed from there; a
//! watch that is silent for long is replaced by another read, since a dead connection is silent too.

use std::collections::BTreeMap;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use reqwest::header::AUTHORIZATION;
use serde_json::{Value, json};

use crate::config::{EtcdDiscovery, ReplicaReader};

use super::{Feed, Pause, chain, http_client};

/// Silence on a watch after which the set is read again.
const SILENCE: Duration = Duration::from_secs(30);
const READ_TIMEOUT: Duration = Duration::from_secs(5);
/// One line of a watch: events of many keys come together.
const LINE_MAX: usize = 64 << 20;

/// Keys and their values.
type Entries = BTreeMap<String, String>;

pub(super) async fn follow(etcd: EtcdDiscovery, reader: ReplicaReader, feed: Feed) {
    let mut pause = Pause::new();
    for endpoint in etcd.endpoints.iter().cycle() {
        let endpoint = endpoint.trim_end_matches('/');
        match follow_one(&etcd, endpoint, &reader, &feed, &mut pause).await {
            // Silent: read again, at once.
            Ok(()) => continue,
            Err(why) => feed.failed(&format!("{endpoint}: {why}")),
        }
        pause.wait().await;
    }
}

/// Reads the set at one endpoint and follows it until it is silent (`Ok`) or fails. Certificates, password and token are
/// taken anew each time: the former are replaced in place, the latter expires.
async fn follow_one(
    etcd: &EtcdDiscovery,
    endpoint: &str,
    reader: &ReplicaReader,
    feed: &Feed,
    pause: &mut Pause,
) -> Result<(), String> {
    let http = http_client(None, etcd.tls.as_ref())?;
    let mut member = Endpoint { http, url: endpoint, token: None };
    member.authenticate(etcd).await?;
    let (mut entries, revision) = read(&member, &etcd.prefix).await?;
    pause.reset();
    give(&entries, etcd, reader, feed);
    let changed = |entries: &Entries| give(entries, etcd, reader, feed);
    watch(&member, &etcd.prefix, revision + 1, &mut entries, changed).await
}

/// One member of the cluster, and who we are to it.
struct Endpoint<'a> {
    http: reqwest::Client,
    url: &'a str,
    token: Option<String>,
}

impl Endpoint<'_> {
    fn post(&self, path: &str, body: &Value) -> reqwest::RequestBuilder {
        let request = self.http.post(format!("{}{path}", self.url)).json(body);
        match &self.token {
            Some(token) => request.header(AUTHORIZATION, token),
            None => request,
        }
    }

    /// Takes a token where the configuration names a user.
    async fn authenticate(&mut self, etcd: &EtcdDiscovery) -> Result<(), String> {
        let (Some(user), Some(file)) = (&etcd.user, &etcd.password_file) else { return Ok(()) };
        let password = std::fs::read_to_string(file).map_err(|e| format!("cannot read {}: {e}", file.display()))?;
        let body = json!({"name": user, "password": password.trim()});
        let answer = self.post("/v3/auth/authenticate", &body).timeout(READ_TIMEOUT).send().await;
        let answer = answer.and_then(reqwest::Response::error_for_status);
        let body: Value = match answer {
            Ok(answer) => answer.json().await.map_err(|e| chain(&e))?,
            Err(e) => return Err(format!("user `{user}` is not let in: {}", chain(&e))),
        };
        let token = body["token"].as_str().ok_or_else(|| format!("no token for user `{user}`"))?;
        self.token = Some(token.to_owned());
        Ok(())
    }
}

fn give(entries: &Entries, etcd: &EtcdDiscovery, reader: &ReplicaReader, feed: &Feed) {
    let mut specs = Vec::with_capacity(entries.len());
    for (key, value) in entries {
        let id = key.strip_prefix(&etcd.prefix).unwrap_or(key).trim_start_matches('/');
        match reader.advertised(id, value, &format!("etcd:{key}")) {
            Ok(spec) => specs.push(spec),
            Err(errors) => feed.passed_over(id, errors),
        }
    }
    feed.good(specs);
}

fn range(prefix: &str) -> Value {
    json!({"key": STANDARD.encode(prefix), "range_end": STANDARD.encode(prefix_end(prefix.as_bytes()))})
}

/// The key after all that begin with `prefix`.
fn prefix_end(prefix: &[u8]) -> Vec<u8> {
    let mut end = prefix.to_vec();
    while let Some(last) = end.pop() {
        if last < 0xff {
            end.push(last + 1);
            return end;
        }
    }
    vec![0]
}

async fn read(member: &Endpoint<'_>, prefix: &str) -> Result<(Entries, i64), String> {
    let answer = member.post("/v3/kv/range", &range(prefix)).timeout(READ_TIMEOUT).send().await;
    let answer = answer.and_then(reqwest::Response::error_for_status).map_err(|e| chain(&e))?;
    let body: Value = answer.json().await.map_err(|e| chain(&e))?;
    let revision = number(&body["header"]["revision"]).ok_or("no revision in its answer")?;
    let kvs = body["kvs"].as_array().map(Vec::as_slice).unwrap_or_default();
    Ok((kvs.iter().filter_map(entry).collect(), revision))
}

/// The gateway writes 64-bit numbers as text.
fn number(value: &Value) -> Option<i64> {
    value.as_i64().or_else(|| value.as_str()?.parse().ok())
}

fn entry(kv: &Value) -> Option<(String, String)> {
    let text = |field: &str| {
        let bytes = STANDARD.decode(kv[field].as_str().unwrap_or_default()).ok()?;
        String::from_utf8(bytes).ok()
    };
    Some((text("key")?, text("value")?))
}

/// Follows the prefix from a revision. `Ok` where it fell silent.
async fn watch(
    member: &Endpoint<'_>,
    prefix: &str,
    revision: i64,
    entries: &mut Entries,
    mut changed: impl FnMut(&Entries),
) -> Result<(), String> {
    let mut request = range(prefix);
    request["start_revision"] = revision.to_string().into();
    let body = json!({"create_request": request});
    let sent = member.post("/v3/watch", &body).send();
    let answer = tokio::time::timeout(READ_TIMEOUT, sent).await.map_err(|_| "no answer to a watch")?;
    let mut answer = answer.and_then(reqwest::Response::error_for_status).map_err(|e| chain(&e))?;
    let mut buffer = Vec::new();
    loop {
        let chunk = match tokio::time::timeout(SILENCE, answer.chunk()).await {
            Err(_) => return Ok(()),
            Ok(chunk) => chunk.map_err(|e| chain(&e))?.ok_or("the watch ended")?,
        };
        buffer.extend_from_slice(&chunk);
        if buffer.len() > LINE_MAX {
            return Err("a line of the watch is too long".to_owned());
        }
        while let Some(end) = memchr::memchr(b'\n', &buffer) {
            let line: Vec<u8> = buffer.drain(..=end).collect();
            if line.trim_ascii().is_empty() {
                continue;
            }
            let message: Value = serde_json::from_slice(&line).map_err(|e| format!("the watch sent no JSON: {e}"))?;
            if let Some(error) = message.get("error") {
                return Err(format!("the watch failed: {error}"));
            }
            let result = &message["result"];
            if result["canceled"].as_bool() == Some(true) {
                return Err(format!("the watch was cancelled: {}", result["cancel_reason"]));
            }
            let events = result["events"].as_array().map(Vec::as_slice).unwrap_or_default();
            for event in events {
                let Some((key, value)) = entry(&event["kv"]) else { continue };
                if event["type"] == "DELETE" {
                    entries.remove(&key);
                } else {
                    entries.insert(key, value);
                }
            }
            if !events.is_empty() {
                changed(entries);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_ends_before_the_next_key_that_does_not_have_it() {
        assert_eq!(prefix_end(b"/r/"), b"/r0");
        assert_eq!(prefix_end(b"a\xff"), b"b");
        assert_eq!(prefix_end(b"\xff"), [0]);
        assert_eq!(prefix_end(b""), [0]);
    }
}
