//! What the daemon tells the service manager that has started it: systemd, or whoever else speaks sd_notify(3).
//!
//! ```text
//!   READY=1 ─► WATCHDOG=1, again and again ─► STOPPING=1
//!                  RELOADING=1 ─► READY=1
//! ```
//! Without `NOTIFY_SOCKET` in the environment all of it does nothing. Nothing relies on being heard.

use std::time::Duration;

use sd_notify::NotifyState;

/// How often the watchdog is fed within its time: one word that is late is no reason to be killed.
const WORDS_PER_PERIOD: u32 = 3;

/// Volumes are served, and the API answers.
pub(crate) fn tell_ready(volumes: usize) {
    let status = format!("serving {volumes} volumes");
    tell(&[NotifyState::Ready, NotifyState::Status(&status)]);
}

/// What can be read again without a restart is being read.
pub(crate) fn tell_reloading() {
    // Service managers of today tell by the time which order to reload is meant.
    match NotifyState::monotonic_usec_now() {
        Ok(now) => tell(&[NotifyState::Reloading, now]),
        Err(error) => tracing::debug!(%error, "a reload is not told"),
    }
}

/// It has been read.
pub(crate) fn tell_reloaded() {
    tell(&[NotifyState::Ready]);
}

/// The daemon is about to end.
pub(crate) fn tell_stopping() {
    tell(&[NotifyState::Stopping, NotifyState::Status("waiting for what is under way")]);
}

/// Feeds the watchdog for as long as `is_alive` says so in time; returns at once if there is none.
pub(crate) async fn feed_watchdog<A: Future<Output = bool>>(is_alive: impl Fn() -> A) {
    let Some(period) = sd_notify::watchdog_enabled().filter(|period| *period > Duration::ZERO) else {
        return;
    };
    loop {
        // Whoever does not answer is not waited for here: the service manager does that.
        if is_alive().await {
            tell(&[NotifyState::Watchdog]);
        }
        tokio::time::sleep(period / WORDS_PER_PERIOD).await;
    }
}

fn tell(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::warn!(?states, %error, "the service manager cannot be told");
    }
}
