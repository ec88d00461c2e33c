//! The Pingora shell: phases, peers, body, context. Thin: every decision lives in a pure module.
