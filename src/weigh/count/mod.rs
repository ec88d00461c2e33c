//! Counting: tokenizers, the approximation, the cache of counts, and the pool that large prompts are counted on.

pub mod approx;
pub mod cache;
pub mod cut;
mod families;
mod outer;
pub mod pool;
pub mod tokenizer;

pub use approx::Coefficients;
pub use cache::CountCache;
pub use pool::Pool;
pub use tokenizer::Tokenizer;
