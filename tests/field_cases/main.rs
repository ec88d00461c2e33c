//! The field cases: 102 faults and odd inputs that people met in public, each played against the real binary.
//!
//! `data/` has the entries (`INDEX.md` first) and their inputs, byte for byte. Every entry has one test here; a test
//! covers the whole kind that its entry names. Run some with `cargo test --test field_cases -- c029 template`.

#[path = "../harness/mod.rs"]
mod harness;

mod balancing;
mod cancellation;
mod drain_reload;
mod forwarding;
mod framing;
mod headers;
mod health;
mod load_accounting;
mod metrics;
mod non_stream;
mod queue_priority;
mod request_forms;
mod request_parsing;
mod retries;
mod runner;
mod stream_errors;
mod stream_options;
mod stream_usage;
mod support;
mod template_count;
mod transport;

fn main() {
    let table = [
        framing::cases(),
        stream_usage::cases(),
        stream_options::cases(),
        stream_errors::cases(),
        non_stream::cases(),
        request_parsing::cases(),
        request_forms::cases(),
        forwarding::cases(),
        template_count::cases(),
        load_accounting::cases(),
        balancing::cases(),
        retries::cases(),
        health::cases(),
        drain_reload::cases(),
        cancellation::cases(),
        headers::cases(),
        transport::cases(),
        queue_priority::cases(),
        metrics::cases(),
    ];
    runner::run(table.into_iter().flatten().collect());
}
