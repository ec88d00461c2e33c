//! A file per command.
