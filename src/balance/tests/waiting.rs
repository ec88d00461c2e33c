//! Bands and queues.
