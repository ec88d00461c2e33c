//! A file per command.

pub mod check;
pub mod sim_replica;
pub mod successor;
