//! A configuration as JSON, to show and to compare: what runs, and what a reload would change.
//!
//! It names files and never holds what is in them, so it may be shown to whoever may see the admin API.

use std::fmt;

use serde_json::{Map, Value};

use super::types::Config;

/// The configuration as JSON with every default filled in: times as people write them, lists of named things as
/// objects under their names, keys in a fixed order. No secrets: files are named, not read.
pub fn digest(config: &Config) -> Value {
    let mut value = serde_json::to_value(config).unwrap_or_else(|e| Value::String(e.to_string()));
    write_times(&mut value);
    if let Value::Object(top) = &mut value {
        for (list, name) in
            [("models", "name"), ("replicas", "id"), ("bands", "name"), ("tenants", "name"), ("listen", "address")]
        {
            if let Some(items) = top.get_mut(list) {
                by_name(items, name, list == "bands");
            }
        }
        // Each band by its name: the numbers are places in a list that may have moved.
        let bands: Vec<Value> = config.bands.iter().map(|b| Value::String(b.name.clone())).collect();
        if let Some(Value::Object(tenants)) = top.get_mut("tenants") {
            for tenant in tenants.values_mut() {
                if let Some(Value::Array(numbers)) = tenant.get_mut("bands") {
                    for n in numbers {
                        *n = n.as_u64().and_then(|i| bands.get(i as usize).cloned()).unwrap_or(Value::Null);
                    }
                }
            }
        }
    }
    value
}

/// Serde's `{secs, nanos}` becomes `1m 30s`.
fn write_times(value: &mut Value) {
    match value {
        Value::Object(map) => {
            let time = match (map.len(), map.get("secs"), map.get("nanos")) {
                (2, Some(secs), Some(nanos)) => secs.as_u64().zip(nanos.as_u64()),
                _ => None,
            };
            if let Some((secs, nanos)) = time {
                let span = std::time::Duration::new(secs, u32::try_from(nanos).unwrap_or(0));
                *value = Value::String(humantime::format_duration(span).to_string());
                return;
            }
            map.values_mut().for_each(write_times);
        }
        Value::Array(items) => items.iter_mut().for_each(write_times),
        _ => {}
    }
}

fn by_name(items: &mut Value, name: &str, ordered: bool) {
    let Value::Array(list) = items.take() else { return };
    let mut named = Map::new();
    for (place, mut item) in list.into_iter().enumerate() {
        let Some(fields) = item.as_object_mut() else { continue };
        let Some(Value::String(key)) = fields.shift_remove(name) else { continue };
        if ordered {
            fields.insert("place".to_owned(), place.into());
        }
        named.insert(key, item);
    }
    *items = Value::Object(named);
}

/// One difference between two configurations.
#[derive(Clone, Debug, PartialEq)]
pub struct Change {
    /// `replicas.gpu-3.tokens_per_sec`.
    pub path: String,
    /// `None`: it is new.
    pub old: Option<Value>,
    /// `None`: it is gone.
    pub new: Option<Value>,
}

impl Change {
    /// Whether a reload leaves this as it is: sockets are bound, and the length of a stop is fixed, at the start.
    pub fn waits_for_start(&self) -> bool {
        let certificate = |key: &str| [".tls.cert", ".tls.key"].iter().any(|end| key.ends_with(end));
        match self.path.split_once('.') {
            Some(("listen", key)) => !certificate(key),
            Some(("admin", _)) => true,
            _ => self.path == "shutdown.grace",
        }
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.old, &self.new) {
            (None, Some(new)) => write!(f, "+ {}: {new}", self.path),
            (Some(old), None) => write!(f, "- {}: {old}", self.path),
            (Some(old), Some(new)) => write!(f, "~ {}: {old} -> {new}", self.path),
            (None, None) => write!(f, "  {}", self.path),
        }?;
        if self.waits_for_start() { f.write_str(" (at the next start or upgrade)") } else { Ok(()) }
    }
}

/// What differs between two digests, in the order of the new one, what is gone last.
pub fn diff(old: &Value, new: &Value) -> Vec<Change> {
    let mut changes = Vec::new();
    walk("", old, new, &mut changes);
    changes
}

fn walk(path: &str, old: &Value, new: &Value, changes: &mut Vec<Change>) {
    let (Value::Object(before), Value::Object(after)) = (old, new) else {
        if old != new {
            changes.push(Change { path: path.to_owned(), old: Some(old.clone()), new: Some(new.clone()) });
        }
        return;
    };
    let below = |key: &str| if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") };
    for (key, value) in after {
        match before.get(key) {
            Some(earlier) => walk(&below(key), earlier, value, changes),
            None => changes.push(Change { path: below(key), old: None, new: Some(value.clone()) }),
        }
    }
    for (key, value) in before.iter().filter(|(key, _)| !after.contains_key(*key)) {
        changes.push(Change { path: below(key), old: Some(value.clone()), new: None });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change(path: &str) -> Change {
        Change { path: path.to_owned(), old: Some(1.into()), new: Some(2.into()) }
    }

    #[test]
    fn what_only_a_start_can_change_is_told_apart() {
        for path in [
            "listen.0.0.0.0:8080",
            "listen.0.0.0.0:8080.h2c",
            "listen.a.tls.client_ca",
            "admin.address",
            "shutdown.grace",
        ] {
            assert!(change(path).waits_for_start(), "{path}");
        }
        for path in
            ["listen.0.0.0.0:8443.tls.cert", "listen.0.0.0.0:8443.tls.key", "limits.keepalive", "replicas.a.url"]
        {
            assert!(!change(path).waits_for_start(), "{path}");
        }
        assert_eq!(change("admin.address").to_string(), "~ admin.address: 1 -> 2 (at the next start or upgrade)");
    }
}
