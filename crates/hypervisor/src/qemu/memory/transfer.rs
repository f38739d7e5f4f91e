//! The way of a VM's memory: the number of streams, and whether the VM may run before all of it has arrived.

use serde_json::json;

use crate::qemu::process::{ANSWER_DEADLINE, Qemu, unexpected};
use crate::{HypervisorError, MemoryMode, MemoryTransfer};

const CHANNELS: &str = "multifd";
const POST_COPY: &str = "postcopy-ram";

/// QEMU's number of channels, which is at least one even where they are not used.
pub(super) fn channels(transfer: MemoryTransfer) -> u8 {
    transfer.side_streams().max(1)
}

pub(super) fn capabilities(transfer: MemoryTransfer) -> impl Iterator<Item = (&'static str, bool)> {
    [(CHANNELS, transfer.side_streams() > 0), (POST_COPY, transfer.mode == MemoryMode::PostCopy)].into_iter()
}

impl Qemu {
    /// Returns whether this QEMU supports further streams beside the main one.
    pub async fn knows_side_streams(&self) -> Result<bool, HypervisorError> {
        self.knows_capability(CHANNELS).await
    }

    /// Returns why this QEMU, or its kernel, cannot run a VM before its memory has arrived; `None`: it can.
    ///
    /// A QEMU that waits for memory (`-incoming defer`) checks the kernel as well. Nothing else is changed.
    pub async fn post_copy_obstacle(&self) -> Result<Option<String>, HypervisorError> {
        if !self.knows_capability(POST_COPY).await? {
            return Ok(Some(format!("QEMU {} has no post-copy", self.version())));
        }
        let set = |state: bool| json!({ "capabilities": [{ "capability": POST_COPY, "state": state }] });
        match self.tell("migrate-set-capabilities", set(true), ANSWER_DEADLINE).await {
            Err(error @ HypervisorError::Refused(_)) => Ok(Some(error.to_string())),
            Err(error) => Err(error),
            Ok(()) => {
                self.tell("migrate-set-capabilities", set(false), ANSWER_DEADLINE).await?;
                Ok(None)
            }
        }
    }

    async fn knows_capability(&self, name: &str) -> Result<bool, HypervisorError> {
        const COMMAND: &str = "query-migrate-capabilities";
        let answer = self.ask(COMMAND).await?;
        let known = answer.as_array().ok_or_else(|| unexpected(COMMAND, "a list of capabilities"))?;
        Ok(known.iter().any(|capability| capability["capability"].as_str() == Some(name)))
    }
}
