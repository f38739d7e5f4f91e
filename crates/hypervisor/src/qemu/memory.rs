//! The move of a machine's memory and processors from one QEMU to another, over a stream that the caller carries.

mod post_copy;
mod progress;
mod source;
mod target;
mod transfer;

use std::num::NonZeroU64;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

use super::error::{MachineError, QmpError};
use super::machine::{ANSWER_DEADLINE, Machine};

pub use post_copy::PostCopyStart;
pub use progress::MemoryProgress;
pub use transfer::{MemoryMode, MemoryTransfer};

/// What both sides must agree on, whichever way the memory goes.
///
/// - `pause-before-switchover`: the source pauses and waits before it sends the last, so that the disks can follow.
/// - `return-path`: the target says that it has everything, or that it cannot load it, before the source completes.
/// - `late-block-activate`: the target leaves its disks alone until it is resumed.
/// - `auto-converge`: a guest that writes faster than the stream carries can be slowed down; how much is settled by
///   parameters, which may change on the way, while capabilities may not.
/// - `events`: each status is told when it is reached.
const CAPABILITIES: [&str; 5] =
    ["pause-before-switchover", "return-path", "late-block-activate", "auto-converge", "events"];

/// More than any stream carries: 1 TiB/s.
const UNLIMITED_BYTES_PER_S: u64 = 1 << 40;
/// QEMU's own limit for the downtime that it aims at.
const DOWNTIME_LIMIT_MAX: Duration = Duration::from_secs(2000);
/// The least share of time that can be taken from a guest's processors: 0 is not a value that QEMU accepts.
const THROTTLE_LEAST_PERCENT: u8 = 1;
/// The most.
const THROTTLE_MOST_PERCENT: u8 = 99;
/// The longest path of a unix socket, without the zero byte at its end.
const SOCKET_PATH_BYTES_MAX: usize = 107;

/// How the memory is to be moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryOptions {
    /// QEMU pauses the machine once what is left would take no longer than this, by the bandwidth that it measures.
    pub downtime_limit: Duration,
    /// The most that is sent in a second; `None` for as much as the stream takes.
    pub bandwidth_max_bytes_per_s: Option<NonZeroU64>,
    /// Which way it goes; the target must expect it the same way.
    pub transfer: MemoryTransfer,
}

impl MemoryOptions {
    /// As fast as one stream takes it, until the rest takes no longer than `downtime_limit`.
    pub fn for_downtime(downtime_limit: Duration) -> Self {
        Self { downtime_limit, bandwidth_max_bytes_per_s: None, transfer: MemoryTransfer::default() }
    }

    /// The parameters with which a move begins.
    fn parameters(self) -> Value {
        let downtime = self.downtime_limit.min(DOWNTIME_LIMIT_MAX).as_millis();
        json!({
            "max-bandwidth": self.bandwidth_max_bytes_per_s.map_or(UNLIMITED_BYTES_PER_S, NonZeroU64::get),
            // It is at most two million.
            "downtime-limit": u64::try_from(downtime).unwrap_or(u64::MAX),
            "cpu-throttle-initial": THROTTLE_LEAST_PERCENT,
            "cpu-throttle-increment": THROTTLE_LEAST_PERCENT,
            "max-cpu-throttle": THROTTLE_LEAST_PERCENT,
            "multifd-channels": self.transfer.channels(),
        })
    }
}

impl Machine {
    /// How far the move is; nothing if QEMU does not answer in time.
    async fn migration_within(&self, deadline: Duration) -> Result<Option<MemoryProgress>, MachineError> {
        let deadline = deadline.min(ANSWER_DEADLINE);
        match self.qmp().execute("query-migrate", json!({}), deadline).await {
            Ok(answer) => Ok(Some(MemoryProgress::read(&answer))),
            Err(QmpError::Silent { .. }) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Sets the capabilities of a move that has not begun; those of an earlier try are taken back.
    async fn agree(&self, transfer: MemoryTransfer) -> Result<(), MachineError> {
        let always = CAPABILITIES.iter().map(|name| (*name, true));
        let capabilities: Vec<Value> = always
            .chain(transfer.capabilities())
            .map(|(name, state)| json!({ "capability": name, "state": state }))
            .collect();
        let capabilities = json!({ "capabilities": capabilities });
        self.tell("migrate-set-capabilities", capabilities, ANSWER_DEADLINE).await
    }
}

/// QEMU's name of a stream through a unix socket.
pub(super) fn address(socket: &Path) -> Result<String, MachineError> {
    let refuse = |reason| MachineError::Path { path: socket.to_owned(), reason };
    let path = socket.to_str().ok_or_else(|| refuse("it is not UTF-8"))?;
    if path.len() > SOCKET_PATH_BYTES_MAX {
        return Err(refuse("the path of a unix socket has at most 107 bytes"));
    }
    // QEMU reads options behind a comma.
    if path.contains(',') {
        return Err(refuse("it contains a comma"));
    }
    Ok(format!("unix:{path}"))
}

#[cfg(test)]
mod tests;
