//! What systemd is told: ready, reloading, alive. Does nothing where there is no notify socket.

use std::time::Duration;

use sd_notify::NotifyState;

fn tell(states: &[NotifyState<'_>]) {
    if let Err(e) = sd_notify::notify(false, states) {
        tracing::debug!(error = %e, "systemd was not told");
    }
}

/// The service is up (again). The main process is named, for after an upgrade it is another.
pub fn ready() {
    tell(&[NotifyState::MainPid(std::process::id()), NotifyState::Ready]);
}

/// A reload begins; [`ready`] ends it.
pub fn reloading() {
    if let Ok(now) = NotifyState::monotonic_usec_now() {
        tell(&[NotifyState::Reloading, now]);
    }
}

/// The service stops: from here on no watchdog is waited for.
pub fn stopping() {
    tell(&[NotifyState::Stopping]);
}

/// Says at half of systemd's interval that the process lives; returns at once where no watchdog is set.
pub async fn watchdog(leaving: impl Fn() -> bool) {
    let Some(micros) = std::env::var("WATCHDOG_USEC").ok().and_then(|v| v.parse::<u64>().ok()) else { return };
    let mut interval = tokio::time::interval(Duration::from_micros((micros / 2).max(1000)));
    loop {
        interval.tick().await;
        // An upgrade's old process must not speak for the new one; a stop says so once.
        if !leaving() {
            tell(&[NotifyState::Watchdog]);
        }
    }
}
