//! A simulated replica, and a fleet of them on a virtual clock.
//!
//! - [`engine`]: continuous batching, pure, driven by explicit time.
//! - [`replica`]: a model server's manners around it, in real time.
//! - [`draw`]: distributions.

pub mod draw;
pub mod engine;
pub mod replica;
