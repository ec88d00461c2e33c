//! One simulated replica as a server: a model server's manners on the wire, an engine's timing behind it.
//!
//! Its events, documents, errors and metrics look like vLLM's (or llama.cpp's), captured from real servers; its
//! tokens come from [`super::engine`] in real time. It exists so that tests, the demo and load runs have replicas of
//! known speed that can fail on command.

mod answer;
mod ask;
mod faults;
mod generation;
mod metrics;
mod runner;
mod server;
mod text;

pub use answer::Flavour;
pub use faults::Faults;
pub use server::{Lengths, ReplicaOptions, SimReplica};
pub use text::{WORD_TOKENS_OF_A_TURN, word};

#[cfg(test)]
mod tests;
