//! KV memory in blocks: what is held, what is kept for a prompt that may come again, what is evicted.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// Block hashes are already well mixed: they are their own hash.
#[derive(Debug, Default, Clone, Copy)]
pub struct Mixed(u64);

impl Hasher for Mixed {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = value;
    }
}

const NONE: u32 = u32::MAX;

#[derive(Debug, Clone, Copy)]
struct Slot {
    hash: u64,
    refs: u32,
    prev: u32,
    next: u32,
}

/// The blocks of one engine. A block is free, anonymous (held, its content of no use to others), or registered
/// under its hash; a registered block that nobody holds is idle, still found by its hash, and evicted in the
/// order of its last use when memory is short.
#[derive(Debug)]
pub struct Blocks {
    total: u32,
    anonymous: u32,
    /// Registered and held by somebody.
    held: u32,
    /// Registered and idle.
    idle: u32,
    slots: Vec<Slot>,
    free_slots: Vec<u32>,
    by_hash: HashMap<u64, u32, BuildHasherDefault<Mixed>>,
    oldest: u32,
    newest: u32,
}

impl Blocks {
    /// `total` free blocks.
    pub fn new(total: u32) -> Blocks {
        Blocks {
            total,
            anonymous: 0,
            held: 0,
            idle: 0,
            slots: Vec::new(),
            free_slots: Vec::new(),
            by_hash: HashMap::default(),
            oldest: NONE,
            newest: NONE,
        }
    }

    /// Blocks that could be taken now, idle ones included.
    pub fn available(&self) -> u32 {
        self.total - self.anonymous - self.held
    }

    /// All blocks.
    pub fn total(&self) -> u32 {
        self.total
    }

    /// Held blocks over all blocks, 0 to 1. Idle blocks are free room, as in vLLM's gauge.
    pub fn usage(&self) -> f64 {
        f64::from(self.anonymous + self.held) / f64::from(self.total.max(1))
    }

    /// How many leading blocks of `chain` are registered, and how many of those are idle.
    pub fn find(&self, chain: &[u64]) -> (u32, u32) {
        let (mut found, mut idle) = (0, 0);
        for hash in chain {
            let Some(&slot) = self.by_hash.get(hash) else { break };
            found += 1;
            idle += u32::from(self.slots[slot as usize].refs == 0);
        }
        (found, idle)
    }

    /// Takes hold of a registered block.
    pub fn hold(&mut self, hash: u64) -> Option<u32> {
        let slot = *self.by_hash.get(&hash)?;
        if self.slots[slot as usize].refs == 0 {
            self.unlink(slot);
            self.idle -= 1;
            self.held += 1;
        }
        self.slots[slot as usize].refs += 1;
        Some(slot)
    }

    /// Takes `count` anonymous blocks, evicting idle ones as needed. Takes nothing and says no where there are fewer.
    pub fn take(&mut self, count: u32) -> bool {
        if count > self.available() {
            return false;
        }
        while self.total - self.anonymous - self.held - self.idle < count {
            self.evict();
        }
        self.anonymous += count;
        true
    }

    /// Turns one anonymous block into a registered, held one. `None` where another block has that hash already:
    /// then it stays anonymous.
    pub fn register(&mut self, hash: u64) -> Option<u32> {
        if self.by_hash.contains_key(&hash) {
            return None;
        }
        let slot = Slot { hash, refs: 1, prev: NONE, next: NONE };
        let index = match self.free_slots.pop() {
            Some(index) => {
                self.slots[index as usize] = slot;
                index
            }
            None => {
                self.slots.push(slot);
                (self.slots.len() - 1) as u32
            }
        };
        self.by_hash.insert(hash, index);
        self.anonymous -= 1;
        self.held += 1;
        Some(index)
    }

    /// Gives back anonymous blocks and lets go of registered ones. The last block of a chain goes first, so that it
    /// is evicted before the blocks that it builds upon.
    pub fn give_back(&mut self, anonymous: u32, registered: &[u32]) {
        self.anonymous -= anonymous;
        for &slot in registered.iter().rev() {
            let entry = &mut self.slots[slot as usize];
            entry.refs -= 1;
            if entry.refs == 0 {
                self.held -= 1;
                self.idle += 1;
                self.link(slot);
            }
        }
    }

    /// Forgets everything that nobody holds: a cache gone cold.
    pub fn clear_idle(&mut self) {
        while self.idle > 0 {
            self.evict();
        }
    }

    fn evict(&mut self) {
        let slot = self.oldest;
        debug_assert_ne!(slot, NONE, "idle blocks are linked");
        self.unlink(slot);
        self.by_hash.remove(&self.slots[slot as usize].hash);
        self.free_slots.push(slot);
        self.idle -= 1;
    }

    fn link(&mut self, slot: u32) {
        let newest = self.newest;
        self.slots[slot as usize].prev = newest;
        self.slots[slot as usize].next = NONE;
        match newest {
            NONE => self.oldest = slot,
            _ => self.slots[newest as usize].next = slot,
        }
        self.newest = slot;
    }

    fn unlink(&mut self, slot: u32) {
        let Slot { prev, next, .. } = self.slots[slot as usize];
        match prev {
            NONE => self.oldest = next,
            _ => self.slots[prev as usize].next = next,
        }
        match next {
            NONE => self.newest = prev,
            _ => self.slots[next as usize].prev = prev,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_idle_block_is_found_again_until_memory_is_short() {
        let mut blocks = Blocks::new(4);
        assert!(blocks.take(3));
        let held: Vec<u32> = [11, 22, 33].iter().map(|&h| blocks.register(h).unwrap()).collect();
        blocks.give_back(0, &held);
        assert_eq!(blocks.available(), 4);
        assert_eq!(blocks.find(&[11, 22, 33, 44]), (3, 3));
        // Two blocks are wanted, one is free: the chain's end is evicted first.
        assert!(blocks.take(2));
        assert_eq!(blocks.find(&[11, 22, 33]), (2, 2));
        assert_eq!(blocks.usage(), 0.5);
    }

    #[test]
    fn a_shared_block_is_counted_once_and_freed_by_its_last_holder() {
        let mut blocks = Blocks::new(4);
        assert!(blocks.take(1));
        let slot = blocks.register(7).unwrap();
        assert_eq!(blocks.hold(7), Some(slot));
        assert_eq!(blocks.available(), 3);
        blocks.give_back(0, &[slot]);
        assert_eq!(blocks.available(), 3);
        blocks.give_back(0, &[slot]);
        assert_eq!(blocks.available(), 4);
        blocks.clear_idle();
        assert_eq!(blocks.find(&[7]), (0, 0));
    }

    #[test]
    fn more_than_there_is_is_refused_whole() {
        let mut blocks = Blocks::new(2);
        assert!(!blocks.take(3));
        assert_eq!(blocks.available(), 2);
        assert!(blocks.take(2));
        assert!(!blocks.take(1));
    }
}
