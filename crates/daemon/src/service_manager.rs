//! Messages to the service manager that has started the daemon: systemd, or another one that speaks sd_notify(3).
//!
//! ```text
//!   READY=1 ─► WATCHDOG=1, again and again ─► STOPPING=1
//!                  RELOADING=1 ─► READY=1
//! ```
//! Without `NOTIFY_SOCKET` in the environment these functions do nothing. Nothing relies on their reception.
//! The service manager keeps descriptors for the next daemon (`FileDescriptorStoreMax=`). It has listening sockets from the
//! moment they are made, so that no client is refused while there is no daemon, however it ended. It has connections only
//! between an orderly end and the next start ([`crate::take_over`]).

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sd_notify::NotifyState;

use crate::take_over::ServiceManager;

/// How often the watchdog is fed within its period, so that one late message does not kill the daemon.
const WORDS_PER_PERIOD: u32 = 3;
/// How long the daemon waits for the reception of its last message, in seconds. Guests wait meanwhile.
const HEARD_WAIT_MAX_S: i64 = 2;

/// Reports that volumes are served, and that the API answers.
pub(crate) fn tell_ready(volumes: usize) {
    let status = format!("serving {volumes} volumes");
    tell(&[NotifyState::Ready, NotifyState::Status(&status)]);
}

/// Reports that the configuration is being read again.
pub(crate) fn tell_reloading() {
    // Current service managers match the reload by its time.
    match NotifyState::monotonic_usec_now() {
        Ok(now) => tell(&[NotifyState::Reloading, now]),
        Err(error) => tracing::debug!(%error, "cannot notify the service manager of a reload"),
    }
}

pub(crate) fn tell_reloaded() {
    tell(&[NotifyState::Ready]);
}

pub(crate) fn tell_stopping() {
    tell(&[NotifyState::Stopping, NotifyState::Status("waiting for what is under way")]);
}

/// Feeds the watchdog while `is_alive` answers in time; returns at once if there is none.
pub(crate) async fn feed_watchdog<A: Future<Output = bool>>(is_alive: impl Fn() -> A) {
    let Some(period) = sd_notify::watchdog_enabled().filter(|period| *period > Duration::ZERO) else {
        return;
    };
    loop {
        // A daemon that does not answer is not waited for here: the service manager does that.
        if is_alive().await {
            tell(&[NotifyState::Watchdog]);
        }
        tokio::time::sleep(period / WORDS_PER_PERIOD).await;
    }
}

pub(crate) fn presence() -> ServiceManager {
    if std::env::var_os("NOTIFY_SOCKET").is_some() { ServiceManager::Present } else { ServiceManager::Absent }
}

/// Passes a descriptor to the service manager, for the next daemon. Blocks while it is behind. Success does not prove that it
/// keeps the descriptor: it may have too many.
pub(crate) fn keep(name: &str, descriptor: BorrowedFd<'_>) -> io::Result<()> {
    sd_notify::notify_with_fds(&[NotifyState::FdStore, NotifyState::FdName(name)], &[descriptor])
}

/// Makes it close the descriptors of this name.
pub(crate) fn keep_no_longer(name: &str) {
    tell(&[NotifyState::FdStoreRemove, NotifyState::FdName(name)]);
}

/// Blocks until it has processed all earlier messages, up to a limit: messages of an ended process may be lost.
pub(crate) fn wait_until_heard() -> io::Result<()> {
    let (ours, theirs) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    sd_notify::notify_with_fds(&[NotifyState::Custom("BARRIER=1")], &[theirs.as_fd()])?;
    drop(theirs);
    // It closes its end when it processes this message.
    let limit = Timespec { tv_sec: HEARD_WAIT_MAX_S, tv_nsec: 0 };
    match poll(&mut [PollFd::new(&ours, PollFlags::HUP)], Some(&limit))? {
        0 => Err(io::ErrorKind::TimedOut.into()),
        _ => Ok(()),
    }
}

/// Returns the kept descriptors by name. Call this once, before anything is opened.
pub(crate) fn kept() -> Vec<(String, OwnedFd)> {
    let listed = match sd_notify::listen_fds_with_names() {
        Ok(listed) => listed,
        Err(error) => {
            tracing::warn!(%error, "cannot identify the descriptors that the service manager kept");
            return Vec::new();
        }
    };
    listed.filter_map(|(number, name)| Some((name, block::inherited::take(number)?))).collect()
}

fn tell(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::warn!(?states, %error, "cannot notify the service manager");
    }
}
