//! Which way a machine's memory goes: over how many streams, and whether the machine may run before all of it has come.

use std::num::NonZeroU8;

use serde_json::json;

use crate::qemu::error::MachineError;
use crate::qemu::machine::{ANSWER_DEADLINE, Machine, unexpected};

/// QEMU's name of several streams.
const CHANNELS: &str = "multifd";
/// And of running before all of it has come.
const POST_COPY: &str = "postcopy-ram";

/// Which way memory goes; both sides must be told the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryTransfer {
    /// Streams for pages beside the main one, which is connected first; `None`: there is only the main one.
    ///
    /// They cannot be had together with [`MemoryMode::PostCopy`]: the main one is used alone then.
    pub side_streams: Option<NonZeroU8>,
    /// When the machine may run at the target.
    pub mode: MemoryMode,
}

/// When a machine may run at the target.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MemoryMode {
    /// When all of its memory is there.
    #[default]
    PreCopy,
    /// Before that, if it is told so on the way ([`Machine::begin_post_copy`]).
    PostCopy,
}

impl MemoryTransfer {
    /// Streams beside the main one that are really used.
    pub fn side_streams(self) -> u8 {
        match self.mode {
            MemoryMode::PreCopy => self.side_streams.map_or(0, NonZeroU8::get),
            MemoryMode::PostCopy => 0,
        }
    }

    /// QEMU's number of channels, which is at least one also where they are not used.
    pub(super) fn channels(self) -> u8 {
        self.side_streams().max(1)
    }

    /// What QEMU must be able to do for it, or must not do.
    pub(super) fn capabilities(self) -> impl Iterator<Item = (&'static str, bool)> {
        [(CHANNELS, self.side_streams() > 0), (POST_COPY, self.mode == MemoryMode::PostCopy)].into_iter()
    }
}

impl Machine {
    /// Whether this QEMU knows of streams beside the main one.
    ///
    /// # Errors
    /// If QEMU does not tell.
    pub async fn knows_side_streams(&self) -> Result<bool, MachineError> {
        self.knows_capability(CHANNELS).await
    }

    /// Why this QEMU, or its kernel, cannot let a machine run before its memory has come; `None`: it can.
    ///
    /// Only a QEMU that waits for memory (`-incoming defer`) looks at the kernel as well; nothing else is changed by it.
    ///
    /// # Errors
    /// If QEMU does not answer.
    pub async fn post_copy_obstacle(&self) -> Result<Option<String>, MachineError> {
        if !self.knows_capability(POST_COPY).await? {
            return Ok(Some(format!("QEMU {} has no post-copy", self.version())));
        }
        let set = |state: bool| json!({ "capabilities": [{ "capability": POST_COPY, "state": state }] });
        match self.tell("migrate-set-capabilities", set(true), ANSWER_DEADLINE).await {
            Err(error) if error.is_refusal() => Ok(Some(error.to_string())),
            Err(error) => Err(error),
            Ok(()) => {
                self.tell("migrate-set-capabilities", set(false), ANSWER_DEADLINE).await?;
                Ok(None)
            }
        }
    }

    async fn knows_capability(&self, name: &str) -> Result<bool, MachineError> {
        const COMMAND: &str = "query-migrate-capabilities";
        let answer = self.ask(COMMAND).await?;
        let known = answer.as_array().ok_or_else(|| unexpected(COMMAND, "a list of capabilities"))?;
        Ok(known.iter().any(|capability| capability["capability"].as_str() == Some(name)))
    }
}
