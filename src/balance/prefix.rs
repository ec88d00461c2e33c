//! What each replica is expected to hold in its prefix cache.
//!
//! A prompt is a chain of block hashes, each naming the whole prefix up to its end; so "how much of this prompt does
//! that replica hold" is a search for the longest prefix known there. One index serves all replicas of a model: under
//! a block's hash stand the replicas that computed it.
//!
//! What is evicted is not simulated block by block. Each replica has a count of the tokens it newly computed, a block
//! remembers the count when it was last used, and it counts as held until as much as the cache holds was computed
//! after it: least recently used, without a list. What the engine reports as cached moves the size that is believed.
//!
//! Of long prompts every fourth block is kept past the sixteenth, so what is found may fall short by three blocks.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use parking_lot::RwLock;

use super::replica::{AtomicF64, Replica, UNLIMITED};

/// Up to here every block is kept, past it one of `STRIDE`.
const DENSE: usize = 16;
const STRIDE: usize = 4;
/// Shards by hash, so that placements of different prompts rarely meet.
const SHARDS: usize = 64;
/// Replicas under one block. A prefix that more hold is everywhere, and the rest learn of it by being chosen.
const HOLDERS_MAX: usize = 64;
/// Blocks in one shard; past it everything dead, then everything, is dropped. 64 × 32,768 entries are some 200 MB.
const SHARD_BLOCKS_MAX: usize = 32_768;
/// Where a replica's capacity is unknown, this many tokens are believed to be held.
const CAPACITY_UNKNOWN: u64 = 200_000;

/// A replica's prefix cache as believed.
#[derive(Debug)]
pub(super) struct Cache {
    /// Tokens newly computed so far; starts at 1, so that 0 is before everything.
    computed: AtomicU64,
    /// Share of the capacity that is believed to serve as cache.
    trust: AtomicF64,
    /// Whether the engine ever reported cached tokens; one that never did says nothing with a zero.
    reports: std::sync::atomic::AtomicBool,
    /// What was used before this count is gone: the engine started again.
    cold_since: AtomicU64,
}

impl Default for Cache {
    fn default() -> Self {
        Cache {
            computed: AtomicU64::new(1),
            trust: AtomicF64::new(1.0),
            reports: std::sync::atomic::AtomicBool::new(false),
            cold_since: AtomicU64::new(0),
        }
    }
}

impl Cache {
    /// The engine started again: nothing is held.
    pub fn forget(&self) {
        self.cold_since.store(self.computed.fetch_add(1, Relaxed) + 1, Relaxed);
    }

    /// Compares what was expected to be cached with what the engine reports.
    pub fn correct(&self, expected: u64, reported: u64, slack: u64) {
        if reported > 0 {
            self.reports.store(true, Relaxed);
        } else if !self.reports.load(Relaxed) {
            return;
        }
        let trust = self.trust.get();
        let trust = if expected > reported + slack {
            trust * 0.9
        } else if reported > expected + slack {
            trust * 1.1
        } else if expected > 0 {
            trust * 1.01
        } else {
            trust
        };
        self.trust.set(trust.clamp(0.01, 1.0));
    }

    /// The oldest count of use that still counts as held, of a cache of `capacity` tokens.
    fn oldest(&self, capacity: u64) -> u64 {
        let capacity = if capacity == UNLIMITED { CAPACITY_UNKNOWN } else { capacity };
        let held = (capacity as f64 * self.trust.get()) as u64;
        self.computed.load(Relaxed).saturating_sub(held).max(self.cold_since.load(Relaxed)).max(1)
    }
}

fn oldest(replica: &Replica) -> u64 {
    replica.cache.oldest(replica.traits.capacity.load(Relaxed))
}

#[derive(Clone, Copy, Debug)]
struct Holder {
    replica: u32,
    used: u64,
}

/// Who holds a block. Nearly always it is one replica, which then costs no memory of its own.
#[derive(Debug)]
struct Holders {
    first: Holder,
    others: Vec<Holder>,
}

impl Holders {
    fn iter(&self) -> impl Iterator<Item = &Holder> {
        std::iter::once(&self.first).chain(&self.others)
    }

    /// The replica uses the block now.
    fn note(&mut self, holder: Holder) {
        let known = std::iter::once(&mut self.first).chain(&mut self.others).find(|h| h.replica == holder.replica);
        if let Some(known) = known {
            known.used = holder.used;
        } else if self.others.len() < HOLDERS_MAX - 1 {
            self.others.push(holder);
        } else {
            // Which of many is forgotten hardly matters; by turns, none is kept out for good.
            self.others[(holder.used % (HOLDERS_MAX as u64 - 1)) as usize] = holder;
        }
    }

    /// Drops those of whom `keep` says no; false where nobody is left.
    fn retain(&mut self, keep: impl Fn(&Holder) -> bool) -> bool {
        self.others.retain(&keep);
        if keep(&self.first) {
            return true;
        }
        match self.others.pop() {
            Some(other) => {
                self.first = other;
                true
            }
            None => false,
        }
    }
}

/// The hashes are good already.
#[derive(Clone, Copy, Debug, Default)]
struct AsItIs(u64);

impl Hasher for AsItIs {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = (self.0 << 8) | u64::from(byte);
        }
    }

    fn write_u64(&mut self, n: u64) {
        // The shard takes the low bits, the map the high and the low ones.
        self.0 = n.rotate_right(6);
    }
}

type Shard = HashMap<u64, Holders, BuildHasherDefault<AsItIs>>;

/// One model's index.
#[derive(Debug)]
pub(super) struct PrefixIndex {
    shards: Box<[RwLock<Shard>]>,
}

impl Default for PrefixIndex {
    fn default() -> Self {
        PrefixIndex { shards: (0..SHARDS).map(|_| RwLock::default()).collect() }
    }
}

/// How many blocks end at the `index`th kept position.
fn blocks_at(index: usize) -> usize {
    if index < DENSE { index + 1 } else { DENSE + (index - DENSE + 1) * STRIDE }
}

/// How many positions are kept of a chain of `blocks`.
fn positions(blocks: usize) -> usize {
    if blocks <= DENSE { blocks } else { DENSE + (blocks - DENSE) / STRIDE }
}

impl PrefixIndex {
    fn shard(&self, hash: u64) -> &RwLock<Shard> {
        &self.shards[(hash % SHARDS as u64) as usize]
    }

    fn holds(&self, hash: u64, replica: u32, oldest: u64) -> bool {
        let shard = self.shard(hash).read();
        let Some(holders) = shard.get(&hash) else { return false };
        holders.iter().any(|holder| holder.replica == replica && holder.used >= oldest)
    }

    /// Leading blocks of `chain` that this replica is expected to hold.
    pub fn blocks_held(&self, chain: &[u64], replica: &Replica) -> usize {
        let oldest = oldest(replica);
        let held = partition(positions(chain.len()), |i| self.holds(chain[blocks_at(i) - 1], replica.number, oldest));
        held.checked_sub(1).map_or(0, blocks_at)
    }

    /// Calls `found(member, blocks)` for the members that hold some of `chain`. `members` is in the order of their
    /// numbers. Up to a few dozen members each is searched for; in a larger fleet the search is for the longest
    /// prefix that *anyone* holds and, going back in halves, for those who hold less of it, so its cost does not grow
    /// with the fleet.
    pub fn held(&self, chain: &[u64], members: &[std::sync::Arc<Replica>], mut found: impl FnMut(usize, usize)) {
        if members.len() <= SEARCH_EACH_MAX {
            for (member, replica) in members.iter().enumerate() {
                let blocks = self.blocks_held(chain, replica);
                if blocks > 0 {
                    found(member, blocks);
                }
            }
            return;
        }
        let anyone = |i: usize| {
            let hash = chain[blocks_at(i) - 1];
            self.shard(hash).read().contains_key(&hash)
        };
        let mut position = partition(positions(chain.len()), anyone);
        let mut seen: Vec<u32> = Vec::new();
        while position > 0 {
            let blocks = blocks_at(position - 1);
            let hash = chain[blocks - 1];
            let shard = self.shard(hash).read();
            for holder in shard.get(&hash).into_iter().flat_map(Holders::iter) {
                if seen.contains(&holder.replica) {
                    continue;
                }
                if let Ok(member) = members.binary_search_by_key(&holder.replica, |replica| replica.number)
                    && holder.used >= oldest(&members[member])
                {
                    seen.push(holder.replica);
                    found(member, blocks);
                }
            }
            position /= 2;
        }
    }

    /// The replica computes this prompt now, or reads it from its cache: all of it will be held and just used.
    /// `computed` tokens of it are new.
    pub fn insert(&self, chain: &[u64], replica: &Replica, computed: u64) {
        if chain.is_empty() {
            return;
        }
        let used = replica.cache.computed.fetch_add(computed, Relaxed) + computed;
        for i in 0..positions(chain.len()) {
            let hash = chain[blocks_at(i) - 1];
            let mut shard = self.shard(hash).write();
            if shard.len() >= SHARD_BLOCKS_MAX && !shard.contains_key(&hash) {
                shed(&mut shard);
            }
            let holder = Holder { replica: replica.number, used };
            match shard.entry(hash) {
                Entry::Occupied(mut known) => known.get_mut().note(holder),
                Entry::Vacant(new) => {
                    new.insert(Holders { first: holder, others: Vec::new() });
                }
            }
        }
    }

    /// Drops what no member holds any more, of one shard; called in turn.
    pub fn sweep(&self, turn: usize, members: &[std::sync::Arc<Replica>]) {
        let mut shard = self.shards[turn % SHARDS].write();
        shard.retain(|_, holders| {
            holders.retain(|holder| {
                members
                    .binary_search_by_key(&holder.replica, |replica| replica.number)
                    .is_ok_and(|member| holder.used >= oldest(&members[member]))
            })
        });
    }
}

/// In fleets up to this size each replica's prefix is searched for.
const SEARCH_EACH_MAX: usize = 32;

/// The first of `0..n` for which `is` is false, where it holds up to some point and not after.
fn partition(n: usize, is: impl Fn(usize) -> bool) -> usize {
    let (mut low, mut high) = (0, n);
    // Most prompts are new: one probe tells.
    if n > 0 && !is(0) {
        return 0;
    }
    while low < high {
        let middle = (low + high) / 2;
        if is(middle) { low = middle + 1 } else { high = middle }
    }
    low
}

/// Makes room in a full shard: every second entry goes, whichever they are. The sweep keeps a shard far below this.
fn shed(shard: &mut Shard) {
    let mut keep = false;
    shard.retain(|_, _| {
        keep = !keep;
        keep
    });
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::tests::{balancer, settings, spec};
    use super::*;
    use crate::config::{PolicyName, ReplicaSpec};
    use crate::units::Tokens;

    fn chain(root: u64, blocks: u64) -> Vec<u64> {
        (0..blocks).map(|n| (root * 1_000_003 + n + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect()
    }

    fn replicas(count: usize, capacity: u64) -> Vec<Arc<Replica>> {
        let specs: Vec<ReplicaSpec> = (0..count)
            .map(|n| ReplicaSpec { token_capacity: Some(Tokens(capacity)), ..spec(&format!("r{n}")) })
            .collect();
        balancer(settings(PolicyName::TokenLoad), &specs).0.replicas().to_vec()
    }

    #[test]
    fn the_longest_known_prefix_is_found() {
        let members = replicas(2, 100_000);
        let index = PrefixIndex::default();
        let long = chain(1, 200);
        index.insert(&long[..100], &members[0], 1600);
        assert_eq!(index.blocks_held(&long, &members[0]), 100);
        assert_eq!(index.blocks_held(&long[..7], &members[0]), 7);
        assert_eq!(index.blocks_held(&long, &members[1]), 0);
        assert_eq!(index.blocks_held(&chain(2, 200), &members[0]), 0);
        // Of an odd length, up to three blocks are not found.
        index.insert(&chain(3, 31), &members[1], 500);
        assert_eq!(index.blocks_held(&chain(3, 60), &members[1]), 28);
    }

    #[test]
    fn what_was_used_longest_ago_is_forgotten_first() {
        let members = replicas(1, 16 * 100);
        let index = PrefixIndex::default();
        let (kept, lost) = (chain(1, 40), chain(2, 40));
        index.insert(&lost, &members[0], 640);
        index.insert(&kept, &members[0], 640);
        for root in 3..8 {
            index.insert(&chain(root, 20), &members[0], 320);
            index.insert(&kept, &members[0], 0);
        }
        assert_eq!(index.blocks_held(&lost, &members[0]), 0);
        assert_eq!(index.blocks_held(&kept, &members[0]), 40, "in use, it stays");
        for turn in 0..SHARDS {
            index.sweep(turn, &members);
        }
        let left: usize = index.shards.iter().map(|shard| shard.read().len()).sum();
        assert!(left <= positions(40) + 5 * positions(20), "what is dead is swept out: {left} entries");
    }

    #[test]
    fn an_engine_that_caches_less_than_believed_is_believed_less() {
        let members = replicas(1, 100_000);
        let index = PrefixIndex::default();
        let prompt = chain(1, 100);
        index.insert(&prompt, &members[0], 1600);
        // An engine that never reports says nothing with a zero.
        for _ in 0..50 {
            members[0].cache.correct(1600, 0, 64);
        }
        assert_eq!(index.blocks_held(&prompt, &members[0]), 100);
        members[0].cache.correct(1600, 1600, 64);
        for n in 0..60 {
            index.insert(&chain(10 + n, 100), &members[0], 1600);
            members[0].cache.correct(1600, 0, 64);
        }
        assert_eq!(index.blocks_held(&prompt, &members[0]), 0);
        members[0].cache.forget();
        assert_eq!(index.blocks_held(&chain(69, 100), &members[0]), 0, "a new process holds nothing");
    }

    #[test]
    fn in_a_large_fleet_the_holders_are_found_without_asking_everyone() {
        let members = replicas(100, 1_000_000);
        let index = PrefixIndex::default();
        let prompt = chain(1, 2048);
        index.insert(&prompt[..2048], &members[70], 32_768);
        index.insert(&prompt[..600], &members[20], 9600);
        let mut found = Vec::new();
        index.held(&prompt, &members, |member, blocks| found.push((member, blocks)));
        assert_eq!(found[0], (70, 2048));
        assert_eq!(found[1].0, 20);
        assert!((300..=600).contains(&found[1].1), "{found:?}");
    }

    #[test]
    fn a_block_s_holders_are_bounded_and_those_who_lose_it_leave() {
        let members = replicas(HOLDERS_MAX + 20, 1_000_000);
        let index = PrefixIndex::default();
        let prompt = chain(1, 1);
        for member in &members {
            index.insert(&prompt, member, 16);
        }
        let held = || members.iter().filter(|member| index.blocks_held(&prompt, member) == 1).count();
        assert_eq!(held(), HOLDERS_MAX);
        for member in &members[..50] {
            member.cache.forget();
        }
        let left = held();
        assert!((1..=members.len() - 50).contains(&left), "{left}");
        (0..SHARDS).for_each(|turn| index.sweep(turn, &members));
        assert_eq!(held(), left, "sweeping takes out only what is lost");
        members.iter().for_each(|member| member.cache.forget());
        (0..SHARDS).for_each(|turn| index.sweep(turn, &members));
        assert!(index.shards.iter().all(|shard| shard.read().is_empty()));
    }

    #[test]
    fn prompts_that_begin_alike_are_spread_over_the_shards() {
        // As every chat of a model with a usual system prompt does.
        let members = replicas(1, 100_000_000);
        let index = PrefixIndex::default();
        let prompt = |n: u64| -> Vec<u64> { chain(0, 1).into_iter().chain(chain(n + 1, 12)).collect() };
        for n in 0..20_000 {
            index.insert(&prompt(n), &members[0], 208);
        }
        let sizes: Vec<usize> = index.shards.iter().map(|shard| shard.read().len()).collect();
        let mean = sizes.iter().sum::<usize>() / SHARDS;
        assert!(sizes.iter().all(|&size| size < mean + mean / 4), "{sizes:?}");
        assert!((0..20_000).all(|n| index.blocks_held(&prompt(n), &members[0]) == 13));
    }

    #[test]
    fn a_shard_is_bounded() {
        let members = replicas(1, u64::MAX - 1);
        let index = PrefixIndex::default();
        for root in 0..3000 {
            let same_shard: Vec<u64> = (0..16).map(|n| (root * 16 + n) * SHARDS as u64).collect();
            index.insert(&same_shard, &members[0], 256);
        }
        assert!(index.shards[0].read().len() <= SHARD_BLOCKS_MAX);
    }
}
