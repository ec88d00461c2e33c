//! Picks a command, nothing else.

use clap::Parser;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[derive(Parser)]
enum Command {
    SimReplica(weighbridge::cli::sim_replica::Args),
}

fn main() -> anyhow::Result<()> {
    match Command::parse() {
        Command::SimReplica(args) => weighbridge::cli::sim_replica::run(args),
    }
}
