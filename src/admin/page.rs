//! The admin page: one file, no dependency, what an operator wants to see first.

/// The page. It asks the API beside it, once a second.
pub const HTML: &str = include_str!("page.html");
