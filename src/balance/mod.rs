//! Who takes a request: ledger, score, selection, bands and queue, prefix affinity.
//!
//! Pure: a clock and a seed are passed in. Only `selection` knows a Pingora type.

pub mod ask;
pub mod balancer;
pub mod replica;
pub mod reservation;

pub use ask::{Ask, Refusal};
pub use balancer::{Admission, Balancer, Settings, Ticket, Waiter};
pub use replica::{Gate, Replica, ReplicaView, Signals};
pub use reservation::{Outcome, Reservation};
