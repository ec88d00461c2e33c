//! The ledger's invariants.
