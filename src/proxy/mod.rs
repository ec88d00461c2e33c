//! The Pingora shell: phases, peers, body, context. Thin: every decision lives in a pure module.
//!
//! A request's way: [`edge`] (connection, header) → [`admit`] (authenticate, body, parse, weigh, book) →
//! [`upstream`] (peer, header) → [`answer`] (header and chunks back) → [`finish`] (settle). [`retry`] takes it back
//! to `upstream` where an attempt failed.

mod admit;
mod answer;
mod body;
pub mod connections;
mod context;
mod edge;
mod fields;
mod finish;
mod models;
mod passthrough;
mod placeholder;
mod reply;
mod retry;
pub mod server;
mod shell;
mod stream;
mod tls;
mod upstream;
