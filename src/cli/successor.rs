//! The binary that is installed now, started as this process's successor.
//!
//! The running process starts it itself, and not whoever asks for the upgrade: only so does the successor stand in the
//! same unit, user and sandbox. It is this same command line with `--upgrade`: it warms up, asks this process for the
//! listeners, and tells systemd that it is the main process now. Where it ends before that, nothing has changed.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use tokio::process::Command;
use tokio::signal::unix::{SignalKind, signal};

/// What Linux appends to the path of a running binary that has been replaced.
const DELETED: &[u8] = b" (deleted)";
const UPGRADE: &str = "--upgrade";

/// Starts a successor on each SIGUSR2, one at a time, for as long as it is polled.
pub async fn start_when_asked() {
    let Ok(mut asked) = signal(SignalKind::user_defined2()) else {
        tracing::error!("SIGUSR2 cannot be watched: upgrade by `weighbridge serve --upgrade`");
        return;
    };
    while asked.recv().await.is_some() {
        match installed_binary() {
            Ok(binary) => {
                let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
                run(&binary, arguments.into_iter()).await;
            }
            Err(error) => tracing::error!(%error, "the installed binary cannot be found: no upgrade"),
        }
    }
}

/// Runs a successor until it ends. One that takes over outlives this process, so its end is always bad news.
async fn run(binary: &Path, arguments: impl Iterator<Item = OsString>) {
    let mut successor = match command(binary, arguments).spawn() {
        Ok(successor) => successor,
        Err(error) => {
            tracing::error!(binary = %binary.display(), %error, "the successor cannot be started: going on");
            return;
        }
    };
    tracing::info!(binary = %binary.display(), pid = successor.id(), "successor started");
    match successor.wait().await {
        Ok(status) => tracing::error!(%status, "the successor ended: going on where the listeners are still here"),
        Err(error) => tracing::error!(%error, "the successor cannot be waited for"),
    }
}

fn command(binary: &Path, arguments: impl Iterator<Item = OsString>) -> Command {
    let mut command = Command::new(binary);
    command
        .args(arguments.filter(|argument| argument != UPGRADE))
        .arg(UPGRADE)
        .stdin(Stdio::null())
        // It names this process: with it the successor would not take the watchdog for its own.
        .env_remove("WATCHDOG_PID");
    command
}

/// Where the running binary was installed; after an upgrade the new one stands there.
fn installed_binary() -> io::Result<PathBuf> {
    let running = std::env::current_exe()?.into_os_string().into_vec();
    Ok(PathBuf::from(OsStr::from_bytes(without_mark(&running))))
}

fn without_mark(path: &[u8]) -> &[u8] {
    path.strip_suffix(DELETED).unwrap_or(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments(command: &Command) -> Vec<&OsStr> {
        command.as_std().get_args().collect()
    }

    #[test]
    fn a_successor_runs_the_same_command_line_with_upgrade_once() {
        let first = command(Path::new("w"), ["serve", "-c", "x.yaml"].map(OsString::from).into_iter());
        assert_eq!(arguments(&first), ["serve", "-c", "x.yaml", "--upgrade"]);
        let second = command(Path::new("w"), ["serve", "--upgrade", "-c", "x.yaml"].map(OsString::from).into_iter());
        assert_eq!(arguments(&second), ["serve", "-c", "x.yaml", "--upgrade"]);
    }

    #[test]
    fn a_successor_is_not_told_that_the_watchdog_waits_for_another_process() {
        let command = command(Path::new("w"), std::iter::empty());
        let changed: Vec<_> = command.as_std().get_envs().collect();
        assert_eq!(changed, [(OsStr::new("WATCHDOG_PID"), None)]);
    }

    #[test]
    fn a_replaced_binary_is_looked_for_where_it_was_installed() {
        assert_eq!(without_mark(b"/usr/bin/weighbridge (deleted)"), b"/usr/bin/weighbridge");
        assert_eq!(without_mark(b"/usr/bin/weighbridge"), b"/usr/bin/weighbridge");
    }

    #[tokio::test]
    async fn a_successor_that_ends_at_once_ends_the_attempt_and_nothing_else() {
        run(Path::new("/bin/false"), std::iter::empty()).await;
        run(Path::new("/nonexistent/weighbridge"), std::iter::empty()).await;
    }
}
