//! Picks a command, nothing else.

use clap::Parser;
use weighbridge::cli;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> std::process::ExitCode {
    cli::run(cli::Cli::parse())
}
