//! Weighbridge: a token-aware load balancer for LLM inference.
//!
//! The map of the house, from the bytes inwards:
//!
//! - [`wire`]: bytes to meaning and back. Pure.
//! - [`weigh`]: what a request will cost, in tokens.
//! - [`balance`]: who takes it, and the books. Pure but for one file.
//! - [`fleet`]: replicas come, go, slow down and lie.
//! - [`running`]: the configuration in force, and what a reload does.
//! - [`proxy`]: the Pingora shell.
//! - [`observe`], [`admin`]: what people see.
//! - [`sim`]: a simulated replica, and a fleet on a virtual clock.
//! - [`config`], [`cli`]: what people write and type.
//!
//! `docs/architecture.md` says what each room may know, and how a request walks through.

pub mod admin;
pub mod balance;
pub mod cli;
pub mod config;
pub mod fleet;
pub mod observe;
pub mod proxy;
pub mod running;
pub mod sim;
pub mod units;
pub mod weigh;
pub mod wire;
