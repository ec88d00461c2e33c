//! The prefix chain: what tells the balancer which replica may hold the beginning of a prompt in its cache.
//!
//! A rendered prompt is cut into blocks of bytes, and each block's hash is chained to the one before it: two prompts
//! share their first n hashes exactly if they share their first n blocks. It needs no tokens, so it costs the same
//! whether or not the prompt was counted. Hashes are the same in every process, so that instances can tell each other.

use std::sync::Arc;

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::units::Tokens;

/// Bytes that a token is taken to stand for: English and code have 3.5 to 4.5.
const BYTES_PER_TOKEN: u64 = 4;
/// Blocks in one chain, at most: 8,192 blocks of 16 tokens cover a prompt of 128k tokens.
const BLOCKS_MAX: usize = 8192;

/// Bytes in a block of about `block` tokens: a multiple of 64.
pub fn block_bytes(block: Tokens) -> usize {
    let bytes = block.0.saturating_mul(BYTES_PER_TOKEN).clamp(64, 1 << 20);
    (bytes as usize).next_multiple_of(64)
}

/// The chain of a prompt's whole blocks, for one model.
pub fn chain(model: &str, prompt: &[u8], block_bytes: usize) -> Arc<[u64]> {
    let mut link = xxh3_64_with_seed(model.as_bytes(), 0);
    prompt
        .chunks_exact(block_bytes)
        .take(BLOCKS_MAX)
        .map(|block| {
            link = xxh3_64_with_seed(block, link);
            link
        })
        .collect()
}

/// Tokens in one block of a prompt of so many tokens and bytes, at least 1.
pub fn block_tokens(tokens: Tokens, bytes: usize, block_bytes: usize) -> u32 {
    if bytes == 0 {
        return (block_bytes as u64 / BYTES_PER_TOKEN) as u32;
    }
    let tokens = tokens.0 as f64 * block_bytes as f64 / bytes as f64;
    (tokens.round() as u32).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn prompts_share_as_many_hashes_as_they_share_whole_blocks(
            shared in proptest::collection::vec(any::<u8>(), 0..700),
            left in proptest::collection::vec(any::<u8>(), 0..300),
            right in proptest::collection::vec(any::<u8>(), 0..300),
        ) {
            let a = [&shared[..], &[1], &left[..]].concat();
            let b = [&shared[..], &[2], &right[..]].concat();
            let (a, b) = (chain("m", &a, 64), chain("m", &b, 64));
            let common = a.iter().zip(b.iter()).take_while(|(x, y)| x == y).count();
            prop_assert_eq!(common, shared.len() / 64);
        }
    }

    #[test]
    fn models_never_share_a_prefix() {
        let text = [b'x'; 256];
        assert_ne!(chain("a", &text, 64)[0], chain("b", &text, 64)[0]);
    }
}
