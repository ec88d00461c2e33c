//! Admin API and page.
