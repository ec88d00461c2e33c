//! A simulated replica, and a fleet of them on a virtual clock.
//!
//! - [`engine`] — continuous batching, pure, driven by explicit time.
//! - [`replica`] — a model server's manners around it, in real time.
//! - [`fleet`] — the real balancer before many engines, on a virtual clock.
//! - [`mix`], [`trace`] — traffic, drawn or recorded.
//! - [`stats`] — what came of a run.
//! - [`driver`] — traffic played in real time against a server.
//! - [`draw`] — distributions.

pub mod draw;
pub mod driver;
pub mod engine;
pub mod fleet;
pub mod mix;
pub mod plot;
pub mod replica;
pub mod stats;
pub mod trace;
