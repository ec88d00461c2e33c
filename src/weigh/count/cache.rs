//! Counts of text segments seen before, in a bounded number of bytes.

use quick_cache::sync::Cache;
use rand::RngCore;
use xxhash_rust::xxh3::xxh3_128_with_secret;

/// Bytes one entry takes, measured: a 16-byte key, a 4-byte count, the cache's links and table, and its ghosts.
pub const ENTRY_BYTES: usize = 80;
/// Bytes of counts kept for all models together; 800,000 segments.
pub const CACHE_BYTES: usize = 64 << 20;
/// Shorter segments are encoded faster than they are looked up.
pub const SEGMENT_BYTES_MIN: usize = 64;

/// A segment's name: a 128-bit hash under a secret of the tokenizer's own, so that two tokenizers never share counts
/// and nobody outside the process can make two texts collide on purpose (xxh3 is not cryptographic: a collision
/// costs a wrong count, which is a worse choice of replica and nothing more).
pub type SegmentKey = u128;

/// A tokenizer's secret, new in each process.
#[derive(Clone)]
pub struct Secret(Box<[u8; 192]>);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret")
    }
}

impl Secret {
    /// A random secret.
    pub fn new() -> Secret {
        let mut bytes = Box::new([0; 192]);
        rand::rng().fill_bytes(&mut bytes[..]);
        Secret(bytes)
    }

    /// The name of a segment under this secret.
    pub fn key(&self, text: &str) -> SegmentKey {
        xxh3_128_with_secret(text.as_bytes(), &self.0[..])
    }
}

impl Default for Secret {
    fn default() -> Self {
        Self::new()
    }
}

/// Counts by segment, for all tokenizers; the least useful are forgotten when it is full.
#[derive(Debug)]
pub struct CountCache {
    counts: Cache<SegmentKey, u32>,
}

impl CountCache {
    /// A cache of at most this many bytes.
    pub fn new(bytes: usize) -> CountCache {
        // The cache rounds each of its shards up; a hundredth less keeps the whole within the bound.
        let entries = bytes / ENTRY_BYTES;
        CountCache { counts: Cache::new((entries - entries / 100).max(64)) }
    }

    /// A segment's count, if it is known.
    pub fn get(&self, key: SegmentKey) -> Option<u32> {
        self.counts.get(&key)
    }

    /// Notes a segment's count.
    pub fn put(&self, key: SegmentKey, count: u32) {
        self.counts.insert(key, count);
    }

    /// Segments known now.
    pub fn len(&self) -> usize {
        self.counts.len()
    }

    /// Whether nothing is known.
    pub fn is_empty(&self) -> bool {
        self.counts.len() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_million_distinct_segments_stay_within_the_bound() {
        let bytes = 8 << 20;
        let cache = CountCache::new(bytes);
        let secret = Secret::new();
        for i in 0..1_000_000u32 {
            cache.put(secret.key(&i.to_string()), i);
        }
        assert!(cache.len() * ENTRY_BYTES <= bytes, "{} entries", cache.len());
        assert!(cache.len() * ENTRY_BYTES > bytes / 2, "a bound that keeps nothing is no cache");
    }

    #[test]
    fn secrets_give_the_same_text_different_names() {
        assert_ne!(Secret::new().key("text"), Secret::new().key("text"));
    }
}
