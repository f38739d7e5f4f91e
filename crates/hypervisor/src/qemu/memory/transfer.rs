//! Which way a VM's memory goes: over how many streams, and whether the VM may run before all of it has come.

use serde_json::json;

use crate::qemu::process::{ANSWER_DEADLINE, Qemu, unexpected};
use crate::{HypervisorError, MemoryMode, MemoryTransfer};

/// QEMU's name of several streams.
const CHANNELS: &str = "multifd";
/// And of running before all of it has come.
const POST_COPY: &str = "postcopy-ram";

/// QEMU's number of channels, which is at least one also where they are not used.
pub(super) fn channels(transfer: MemoryTransfer) -> u8 {
    transfer.side_streams().max(1)
}

/// What QEMU must be able to do for it, or must not do.
pub(super) fn capabilities(transfer: MemoryTransfer) -> impl Iterator<Item = (&'static str, bool)> {
    [(CHANNELS, transfer.side_streams() > 0), (POST_COPY, transfer.mode == MemoryMode::PostCopy)].into_iter()
}

impl Qemu {
    /// Whether this QEMU knows of streams beside the main one.
    ///
    /// # Errors
    /// If QEMU does not tell.
    pub async fn knows_side_streams(&self) -> Result<bool, HypervisorError> {
        self.knows_capability(CHANNELS).await
    }

    /// Why this QEMU, or its kernel, cannot let a VM run before its memory has come; `None`: it can.
    ///
    /// Only a QEMU that waits for memory (`-incoming defer`) looks at the kernel as well; nothing else is changed by it.
    ///
    /// # Errors
    /// If QEMU does not answer.
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
