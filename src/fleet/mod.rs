//! Replicas and pools: health, engine metrics, discovery, drain, warm-up. Uses `balance`; knows nothing of `proxy`.
//!
//! - [`health`]: one replica's health, a pure state machine; [`retry_budget`]: pure as well.
//! - [`signals`], [`facts`]: what engines tell of their load and of themselves; pure readers.
//! - `ask`: counting a prompt by the engine's own tokenizer.
//! - `member`: one replica's client and tasks; `checks`: Pingora's rounds of health checks.
//! - `bounds`: how long a draining replica's requests may run on; pure.
//! - [`discovery`]: where replicas come from beside the list.
//! - [`keeper`]: the [`Fleet`], who ties them together and tells the balancer.

mod ask;
mod bounds;
mod checks;
pub mod client;
pub mod discovery;
pub mod events;
pub mod facts;
pub mod health;
pub mod keeper;
mod member;
pub mod retry_budget;
pub mod signals;
mod state;

pub use discovery::SourceStatus;
pub use events::TrafficEvent;
pub use keeper::{Fleet, FleetStatus, ReplicaStatus, count_states};
pub use member::ScrapeStatus;
pub use retry_budget::RetryBudget;
pub use state::State;
