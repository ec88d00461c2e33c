//! Who asks: API keys, kept as hashes.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use anyhow::Context;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use crate::config::Tenant;

type KeyHash = [u8; 32];

/// Every tenant, by key.
#[derive(Default)]
pub struct Tenants {
    /// By a hash's first eight bytes; the rest is compared in constant time.
    by_key: HashMap<u64, Vec<(KeyHash, Arc<TenantState>)>>,
    all: Vec<Arc<TenantState>>,
}

impl fmt::Debug for Tenants {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tenants").field("tenants", &self.all.len()).finish()
    }
}

/// One tenant.
#[derive(Debug)]
pub struct TenantState {
    pub spec: Tenant,
}

fn hash(key: &str) -> KeyHash {
    Sha256::digest(key.as_bytes()).into()
}

fn prefix(hash: &KeyHash) -> u64 {
    let mut first = [0u8; 8];
    first.copy_from_slice(&hash[..8]);
    u64::from_be_bytes(first)
}

/// One line of a key file: a key, or `sha256:` and its hash in hexadecimal.
fn parse_line(line: &str) -> Option<KeyHash> {
    match line.strip_prefix("sha256:") {
        None => Some(hash(line)),
        Some(hex) => {
            let hex = hex.trim();
            if hex.len() != 64 {
                return None;
            }
            let mut out = [0u8; 32];
            for (i, byte) in out.iter_mut().enumerate() {
                *byte = u8::from_str_radix(hex.get(2 * i..2 * i + 2)?, 16).ok()?;
            }
            Some(out)
        }
    }
}

impl Tenants {
    /// Reads every tenant's keys.
    ///
    /// # Errors
    /// A key file that cannot be read, has no key, or has a line that is neither a key nor a hash.
    pub fn load(specs: &[Tenant]) -> anyhow::Result<Tenants> {
        let mut tenants = Tenants::default();
        for spec in specs {
            let text = std::fs::read_to_string(&spec.key_file).with_context(|| {
                format!("tenant {}: key_file {} cannot be read", spec.name, spec.key_file.display())
            })?;
            let state = Arc::new(TenantState { spec: spec.clone() });
            let mut keys = 0;
            for (number, line) in text.lines().enumerate() {
                let line = line.trim();
                if line.is_empty() || line.starts_with('#') {
                    continue;
                }
                let key = parse_line(line).with_context(|| {
                    format!(
                        "tenant {}: {} line {}: expected a key, or sha256: and 64 hexadecimal digits",
                        spec.name,
                        spec.key_file.display(),
                        number + 1
                    )
                })?;
                tenants.by_key.entry(prefix(&key)).or_default().push((key, state.clone()));
                keys += 1;
            }
            anyhow::ensure!(keys > 0, "tenant {}: key_file {} holds no key", spec.name, spec.key_file.display());
            tenants.all.push(state);
        }
        Ok(tenants)
    }

    /// Whether anybody may ask.
    pub fn open(&self) -> bool {
        self.all.is_empty()
    }

    /// The tenant whose key this is.
    pub fn find(&self, key: &str) -> Option<&Arc<TenantState>> {
        let key = hash(key);
        let candidates = self.by_key.get(&prefix(&key))?;
        candidates.iter().find(|(known, _)| bool::from(known.ct_eq(&key))).map(|(_, tenant)| tenant)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tenant(name: &str, key_file: &std::path::Path) -> Tenant {
        Tenant {
            name: name.into(),
            key_file: key_file.to_owned(),
            models: Vec::new(),
            bands: Vec::new(),
            tokens_per_minute: None,
            requests_per_minute: None,
            concurrent: None,
            max_tokens: None,
        }
    }

    #[test]
    fn a_key_and_its_hash_open_the_same_door_and_no_other_does() {
        let dir = tempfile::tempdir().unwrap();
        let plain = dir.path().join("plain");
        let hashed = dir.path().join("hashed");
        std::fs::write(&plain, "# ours\nsk-one\nsk-two\n").unwrap();
        // echo -n sk-three | sha256sum
        let hex: String = hash("sk-three").iter().map(|b| format!("{b:02x}")).collect();
        std::fs::write(&hashed, format!("sha256:{hex}\n")).unwrap();
        let tenants = Tenants::load(&[tenant("a", &plain), tenant("b", &hashed)]).unwrap();
        assert_eq!(tenants.find("sk-one").unwrap().spec.name.as_str(), "a");
        assert_eq!(tenants.find("sk-two").unwrap().spec.name.as_str(), "a");
        assert_eq!(tenants.find("sk-three").unwrap().spec.name.as_str(), "b");
        assert!(tenants.find("sk-four").is_none());
        assert!(tenants.find("").is_none());
        assert!(!format!("{tenants:?}").contains("sk-"));
    }

    #[test]
    fn a_key_file_without_a_key_is_an_error_that_names_it() {
        let dir = tempfile::tempdir().unwrap();
        let empty = dir.path().join("empty");
        std::fs::write(&empty, "\n# nothing\n").unwrap();
        let error = Tenants::load(&[tenant("a", &empty)]).unwrap_err();
        assert!(format!("{error:#}").contains("holds no key"), "{error:#}");
    }
}
