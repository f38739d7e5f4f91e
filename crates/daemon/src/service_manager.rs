//! What the daemon tells the service manager that has started it: systemd, or whoever else speaks sd_notify(3).
//!
//! ```text
//!   READY=1 ─► WATCHDOG=1, again and again ─► STOPPING=1
//!                  RELOADING=1 ─► READY=1
//! ```
//! Without `NOTIFY_SOCKET` in the environment all of it does nothing. Nothing relies on being heard.
//!
//! It keeps descriptors for the next daemon (`FileDescriptorStoreMax=`): listening sockets from when they are made, so that
//! nobody is refused while there is no daemon, however it ended; connections only while one has ended in order and the next
//! has not begun ([`crate::take_over`]).

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sd_notify::NotifyState;

use crate::take_over::ServiceManager;

/// How often the watchdog is fed within its time: one word that is late is no reason to be killed.
const WORDS_PER_PERIOD: u32 = 3;
/// How long it may take to hear the last word, in seconds: guests wait meanwhile, and reconnect if it was not heard.
const HEARD_WAIT_MAX_S: i64 = 2;

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

/// Whether one may keep descriptors.
pub(crate) fn presence() -> ServiceManager {
    if std::env::var_os("NOTIFY_SOCKET").is_some() { ServiceManager::Present } else { ServiceManager::Absent }
}

/// Has it keep a descriptor, for the next daemon that it starts. Sleeps while it is behind.
///
/// # Errors
/// What the system answers. That it does keep it, nobody knows: there may be too many.
pub(crate) fn keep(name: &str, descriptor: BorrowedFd<'_>) -> io::Result<()> {
    sd_notify::notify_with_fds(&[NotifyState::FdStore, NotifyState::FdName(name)], &[descriptor])
}

/// Has it close the descriptors of this name.
pub(crate) fn keep_no_longer(name: &str) {
    tell(&[NotifyState::FdStoreRemove, NotifyState::FdName(name)]);
}

/// Sleeps until it has done what it was told before, for a while at most: what is told by a process that has ended may not
/// be heard.
///
/// # Errors
/// What the system answers; [`io::ErrorKind::TimedOut`].
pub(crate) fn wait_until_heard() -> io::Result<()> {
    let (ours, theirs) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    sd_notify::notify_with_fds(&[NotifyState::Custom("BARRIER=1")], &[theirs.as_fd()])?;
    drop(theirs);
    // It closes its end when it comes to this word.
    let limit = Timespec { tv_sec: HEARD_WAIT_MAX_S, tv_nsec: 0 };
    match poll(&mut [PollFd::new(&ours, PollFlags::HUP)], Some(&limit))? {
        0 => Err(io::ErrorKind::TimedOut.into()),
        _ => Ok(()),
    }
}

/// What it has kept, by the names that it was given. To be called once, before anything is opened.
pub(crate) fn kept() -> Vec<(String, OwnedFd)> {
    let listed = match sd_notify::listen_fds_with_names() {
        Ok(listed) => listed,
        Err(error) => {
            tracing::warn!(%error, "what the service manager has kept cannot be told apart");
            return Vec::new();
        }
    };
    listed.filter_map(|(number, name)| Some((name, block::inherited::take(number)?))).collect()
}

fn tell(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::warn!(?states, %error, "the service manager cannot be told");
    }
}
