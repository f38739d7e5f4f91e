//! Transfers a VM's memory and processors from one QEMU to another, over a stream that the caller carries.

mod disks;
mod post_copy;
mod progress;
mod saved;
mod source;
mod target;
mod transfer;

use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};

use super::error::QmpError;
use super::process::{ANSWER_DEADLINE, Qemu};
use crate::{HypervisorError, MemoryOptions, MemoryProgress, MemoryTransfer};

/// The capabilities that both sides need for any transfer.
///
/// - `pause-before-switchover`: the source pauses and waits before it sends the last part, so that the disks can follow.
/// - `return-path`: the target confirms that it has everything, or reports a failure, before the source completes.
/// - `late-block-activate`: the target leaves its disks alone until it is resumed.
/// - `auto-converge`: a guest that writes faster than the stream can be slowed down. Parameters set how much, and may change on
///   the way; capabilities may not.
/// - `events`: each status is reported when it is reached.
const CAPABILITIES: [&str; 5] =
    ["pause-before-switchover", "return-path", "late-block-activate", "auto-converge", "events"];

/// More than any stream carries: 1 TiB/s.
const UNLIMITED_BYTES_PER_S: u64 = 1 << 40;
/// What means "no limit" for the memory that follows after the VM runs at the target.
const POST_COPY_UNLIMITED: u64 = 0;
const DOWNTIME_LIMIT_MAX: Duration = Duration::from_secs(2000);
/// The least throttle of a guest's processors: QEMU does not accept 0.
const THROTTLE_LEAST_PERCENT: u8 = 1;
const THROTTLE_MOST_PERCENT: u8 = 99;
/// The longest path of a unix socket, without the zero byte at its end.
const SOCKET_PATH_BYTES_MAX: usize = 107;

impl Qemu {
    async fn migration_within(&self, deadline: Duration) -> Result<Option<MemoryProgress>, HypervisorError> {
        let deadline = deadline.min(ANSWER_DEADLINE);
        match self.qmp().execute("query-migrate", json!({}), deadline).await {
            Ok(answer) => Ok(Some(progress::read(&answer))),
            Err(QmpError::Silent { .. }) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Sets the capabilities of a new transfer, and clears those of an earlier attempt.
    async fn agree(&self, transfer: MemoryTransfer) -> Result<(), HypervisorError> {
        let always = CAPABILITIES.iter().map(|name| (*name, true));
        let capabilities: Vec<Value> = always
            .chain(transfer::capabilities(transfer))
            .map(|(name, state)| json!({ "capability": name, "state": state }))
            .collect();
        let capabilities = json!({ "capabilities": capabilities });
        self.tell("migrate-set-capabilities", capabilities, ANSWER_DEADLINE).await
    }
}

#[derive(Debug, thiserror::Error)]
#[error("{} cannot be given to QEMU: {reason}", path.display())]
struct PathError {
    path: PathBuf,
    reason: &'static str,
}

pub(super) fn address(socket: &Path) -> Result<String, HypervisorError> {
    let refuse = |reason| HypervisorError::Other(PathError { path: socket.to_owned(), reason }.into());
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

fn parameters(options: MemoryOptions) -> Value {
    let downtime = options.downtime_target.min(DOWNTIME_LIMIT_MAX).as_millis();
    json!({
        "max-bandwidth": options.bandwidth_max_bytes_per_s.map_or(UNLIMITED_BYTES_PER_S, NonZeroU64::get),
        // An earlier attempt may have had a limit.
        "max-postcopy-bandwidth": POST_COPY_UNLIMITED,
        // At most DOWNTIME_LIMIT_MAX, so the conversion cannot fail.
        "downtime-limit": u64::try_from(downtime).unwrap_or(u64::MAX),
        "cpu-throttle-initial": THROTTLE_LEAST_PERCENT,
        "cpu-throttle-increment": THROTTLE_LEAST_PERCENT,
        "max-cpu-throttle": THROTTLE_LEAST_PERCENT,
        "multifd-channels": transfer::channels(options.transfer),
    })
}

#[cfg(test)]
mod tests;
