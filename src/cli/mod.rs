//! A file per command.

pub mod check;
