//! Histories over a restart.
