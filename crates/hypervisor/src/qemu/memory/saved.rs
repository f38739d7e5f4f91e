//! A VM's memory for a file: sent by a VM that does not run, to whoever writes the file, and received from whoever reads it.
//!
//! A file does not answer, so there is no return path, and nothing is negotiated. Whoever carries the stream knows whether it was
//! carried whole.

use std::path::Path;

use serde_json::{Value, json};

use super::{CAPABILITIES, POST_COPY_UNLIMITED, UNLIMITED_BYTES_PER_S, address, transfer};
use crate::qemu::error::PRODUCT;
use crate::qemu::process::{ANSWER_DEADLINE, Qemu};
use crate::{HypervisorError, MemoryTransfer, RunState};

/// The capabilities that need no answer from the other side.
///
/// - `late-block-activate`: the restored VM leaves its disks alone until it is resumed.
/// - `events`: each status is reported when it is reached.
const ONE_WAY: [&str; 2] = ["late-block-activate", "events"];

impl Qemu {
    /// Begins to send the memory and the devices of a VM that does not run to `stream`, a listening unix socket.
    ///
    /// Wait for [`MigrationStatus::Completed`](crate::MigrationStatus::Completed). The VM is then in state *postmigrate*: its disks
    /// are flushed and left alone. It may be resumed, unless what was sent is restored.
    ///
    /// # Errors
    /// If the VM runs, or cannot be migrated, or QEMU refuses. Nothing is then sent.
    pub async fn save_memory(&self, stream: &Path) -> Result<(), HypervisorError> {
        let address = address(stream)?;
        let found = self.status().await?;
        if !matches!(found, RunState::Paused | RunState::PreLaunch) {
            return Err(HypervisorError::State { expected: RunState::Paused, found });
        }
        let reasons = self.migration_blockers().await?;
        if !reasons.is_empty() {
            return Err(HypervisorError::Blocked { product: PRODUCT, reasons });
        }
        self.need_no_answers().await?;
        let limits = json!({
            "max-bandwidth": UNLIMITED_BYTES_PER_S,
            "max-postcopy-bandwidth": POST_COPY_UNLIMITED,
        });
        self.tell("migrate-set-parameters", limits, ANSWER_DEADLINE).await?;
        self.tell("migrate", json!({ "uri": address }), ANSWER_DEADLINE).await
    }

    /// Lets a VM that was started with `-incoming defer` listen on the unix socket `socket` for what [`Self::save_memory`] has sent.
    /// Then wait for [`Self::await_loaded`].
    ///
    /// # Errors
    /// If the VM does not wait for memory, or QEMU cannot listen there.
    pub async fn expect_saved_memory(&self, socket: &Path) -> Result<(), HypervisorError> {
        let address = address(socket)?;
        let found = self.status().await?;
        if found != RunState::InMigrate {
            return Err(HypervisorError::State { expected: RunState::InMigrate, found });
        }
        self.stop().await?;
        self.need_no_answers().await?;
        self.tell("migrate-incoming", json!({ "uri": address }), ANSWER_DEADLINE).await
    }

    /// Sets the capabilities of a one-way transfer, and clears those of an earlier attempt to move.
    async fn need_no_answers(&self) -> Result<(), HypervisorError> {
        let others = transfer::capabilities(MemoryTransfer::default()).map(|(name, _)| name);
        let capabilities: Vec<Value> = CAPABILITIES
            .into_iter()
            .chain(others)
            .map(|name| json!({ "capability": name, "state": ONE_WAY.contains(&name) }))
            .collect();
        self.tell("migrate-set-capabilities", json!({ "capabilities": capabilities }), ANSWER_DEADLINE).await
    }
}
