//! One request's entry in a ledger: drawn down while tokens stream, settled once, released on drop.

use std::sync::Arc;

use crate::wire::Usage;

use super::replica::Replica;

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    Completed,
    ClientGone,
    UpstreamError,
    Refused,
}

/// One request's booking on one replica. Dropping it releases exactly what is still booked.
#[derive(Debug)]
pub struct Reservation {}

impl Reservation {
    pub fn replica(&self) -> &Arc<Replica> {
        todo!("balance")
    }

    /// The request goes out to the replica now; learning measures from here.
    pub fn sent(&mut self) {
        todo!("balance")
    }

    /// Output tokens of all sequences so far. The first call marks the first token: the prefill is done.
    pub fn progress(&mut self, output_tokens: u64) {
        let _ = output_tokens;
        todo!("balance")
    }

    /// Settles with what really happened: feeds the coefficients and the prefix index, releases the rest.
    pub fn settle(self, usage: Option<&Usage>, outcome: Outcome) {
        let _ = (usage, outcome);
        todo!("balance")
    }
}
