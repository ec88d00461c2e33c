//! Seeding histories from a trace.
