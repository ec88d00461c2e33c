//! From a request's body to what an engine will count: conversations, texts, token ids.

pub mod anthropic;
pub mod form;
pub mod message;
pub mod prefix;
pub mod prepare;
pub mod responses;

pub use form::{Chat, Form};
pub use prepare::Dialect;
