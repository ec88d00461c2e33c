//! Who takes a request: ledger, score, selection, bands and queue, prefix affinity.
//!
//! Pure: a clock and a seed are passed in. Only `selection` knows a Pingora type.
//!
//! A walk through: an [`Ask`] is let in by [`Balancer::admit`] (`admission`), which finds the model's pool (`pool`).
//! Each member that may be chosen and that it fits (`fit`) is scored (`policy`) from the sums its books keep (`ledger`),
//! what it is expected to hold of the prompt (`prefix`) and how fast it is (`speed`); the lowest is booked under
//! that replica's lock if its books are still those that were scored. What does not fit waits (`queue`). The
//! [`Reservation`] draws its entry down while tokens come (`remaining`), and gives back what is left on drop.

mod admission;
pub mod ask;
pub mod balancer;
mod fit;
mod ledger;
mod policy;
mod pool;
mod prefix;
mod queue;
pub mod quota;
mod remaining;
pub mod replica;
pub mod reservation;
pub mod selection;
mod speed;

pub use ask::{Ask, Refusal};
pub use balancer::{Admission, Balancer, Placer, Settings, Ticket, Waiter};
pub use queue::NATIVES_PER_RISEN;
pub use replica::{Gate, Replica, ReplicaView, Signals};
pub use reservation::{Outcome, Reservation};
pub use speed::Coefficients;

#[cfg(test)]
mod tests;
