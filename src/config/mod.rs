//! YAML to a validated [`Config`].
//!
//! Every default lives here, with its unit. Nothing else in the house reads YAML. A `Config` that exists is
//! valid: other rooms trust it without checking again.

mod digest;
mod error;
mod locate;
mod parse;
mod reader;
mod types;
mod url;
pub mod watch;

pub use digest::{Change, diff, digest};
pub use error::{ConfigError, Errors};
pub use parse::{ReplicaReader, TABLES, load, load_replicas, model_fault, parse};
pub use types::*;
pub use url::URL_FORMS;

#[cfg(test)]
mod tests;
