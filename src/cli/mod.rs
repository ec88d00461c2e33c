//! A file per command.

pub mod check;
pub mod count;
pub mod demo;
mod logging;
mod notify;
pub mod serve;
pub mod sim_replica;
pub mod simulate;

mod successor;

use std::process::ExitCode;

/// A token-aware load balancer for LLM inference.
#[derive(clap::Parser, Debug)]
#[command(version, max_term_width = 100)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand, Debug)]
enum Command {
    Serve(serve::Args),
    Check(check::Args),
    Count(count::Args),

    Demo(demo::Args),
    Simulate(simulate::Args),
    SimReplica(sim_replica::Args),
}

/// Runs the command that was typed.
pub fn run(cli: Cli) -> ExitCode {
    let done = match cli.command {
        Command::Serve(args) => serve::run(args).map(|()| ExitCode::SUCCESS),
        Command::Check(args) => check::run(&args),
        Command::Count(args) => count::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Demo(args) => demo::run(args).map(|()| ExitCode::SUCCESS),
        Command::Simulate(args) => simulate::run(args).map(|()| ExitCode::SUCCESS),
        Command::SimReplica(args) => sim_replica::run(args).map(|()| ExitCode::SUCCESS),
    };
    done.unwrap_or_else(|e| {
        eprintln!("weighbridge: {e:#}");
        ExitCode::FAILURE
    })
}
