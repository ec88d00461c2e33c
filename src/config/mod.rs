//! YAML to a validated [`Config`].
//!
//! Every default lives here, with its unit. Nothing else in the house reads YAML. A `Config` that exists is
//! valid: other rooms trust it without checking again.

mod types;

pub use types::*;
