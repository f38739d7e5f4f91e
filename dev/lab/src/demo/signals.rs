//! Signals that end the demo early.

use std::future::Future;

use anyhow::Context as _;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// The error of a demo that a signal has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("ended by a signal; everything has been cleaned up")]
pub struct Interrupted {
    /// The signal's number; a shell expects the exit code 128 + this.
    pub signal: i32,
}

/// Ctrl-C, SIGTERM and SIGHUP since the creation of this. None is missed.
#[derive(Debug)]
pub(crate) struct Signals {
    interrupt: Signal,
    terminate: Signal,
    hang_up: Signal,
}

impl Signals {
    /// Takes over the signals for the lifetime of the process.
    pub(crate) fn listen() -> anyhow::Result<Self> {
        let listen = |kind| signal(kind).context("listen for signals");
        Ok(Self {
            interrupt: listen(SignalKind::interrupt())?,
            terminate: listen(SignalKind::terminate())?,
            hang_up: listen(SignalKind::hangup())?,
        })
    }

    /// Does `work`. If a signal comes first, drops the work and fails with [`Interrupted`].
    pub(crate) async fn unless<T>(
        &mut self,
        work: impl Future<Output = anyhow::Result<T>>,
    ) -> anyhow::Result<T> {
        let kind = tokio::select! {
            result = work => return result,
            _ = self.interrupt.recv() => SignalKind::interrupt(),
            _ = self.terminate.recv() => SignalKind::terminate(),
            _ = self.hang_up.recv() => SignalKind::hangup(),
        };
        Err(Interrupted { signal: kind.as_raw_value() }.into())
    }
}
