//! A VM that runs at the target before all of its memory has arrived.
//!
//! ```text
//!   source                                                     target
//!   begin_post_copy: paused, for good ─► pre-switchover           inmigrate
//!   switch_over ─► postcopy-active  ═══ devices, then pages ═══►  await_loaded: paused ─► resume: runs, pages come
//!                    │      ▲                 ◄═══ wants a page    │      ▲
//!                    │ the stream has broken                       │      │
//!                    ▼      │                                      ▼      │
//!            postcopy-paused ─ resend_memory ══════► recover_memory ─ postcopy-paused: runs on partial memory
//!                    ▼
//!                completed: the source is not needed
//! ```
//! **N.B.** From `switch_over` on the source never runs again, and the target has only the memory that has arrived: if either is
//! lost, so is the VM's memory. Until then the transfer can be abandoned like any other.

use std::path::Path;

use serde_json::json;

use super::address;
use crate::qemu::process::{ANSWER_DEADLINE, Qemu};
use crate::{HypervisorError, PostCopyStart, RunState};

/// Drivers in QEMU that read and write a disk's metadata by themselves, so that a target must not open the disk
/// before it owns it.
const FORMATS: [&str; 9] = ["qcow2", "qcow", "qed", "vdi", "vhdx", "vmdk", "vpc", "parallels", "luks"];

impl Qemu {
    /// Returns why this VM cannot run at a target before all of its memory has arrived, as far as its source can
    /// tell; `None`: it can.
    pub async fn post_copy_hazard(&self) -> Result<Option<String>, HypervisorError> {
        let nodes = self.named_nodes().await?;
        // A target activates its disks before it is ordered to run, and such a node would read a foreign disk.
        let format = nodes.iter().find(|node| !node.is_read_only && FORMATS.contains(&node.driver.as_str()));
        Ok(format.map(|node| {
            format!(
                "QEMU itself interprets {} on the disk \"{}\", and would read it at the target before the target owns it; give \
                 the VM a raw disk (the volume's image may have any format)",
                node.driver, node.name
            )
        }))
    }

    /// Stops the VM of a transfer in progress, so that the rest of its memory follows later.
    ///
    /// The VM is paused first, and not by the migration. QEMU does not resume a VM that was paused before, even if sending fails:
    /// the owner of the disks then decides.
    ///
    /// # Errors
    /// If QEMU refuses or does not answer. The VM may be paused.
    pub async fn begin_post_copy(&self) -> Result<PostCopyStart, HypervisorError> {
        self.stop().await?;
        if self.status().await? != RunState::Paused {
            return Ok(PostCopyStart::TooLate);
        }
        self.tell("migrate-start-postcopy", json!({}), ANSWER_DEADLINE).await?;
        Ok(PostCopyStart::Begun)
    }

    /// Lets a target whose stream has broken listen on `socket` for the rest of its memory. It continues meanwhile, with the
    /// memory that it has.
    ///
    /// # Errors
    /// If it does not wait for that (it takes a moment to notice that a stream has broken), or QEMU cannot listen there.
    pub async fn recover_memory(&self, socket: &Path) -> Result<(), HypervisorError> {
        let address = address(socket)?;
        self.tell("migrate-recover", json!({ "uri": address }), ANSWER_DEADLINE).await
    }

    /// Lets a source whose stream has broken send the rest of the memory to `stream`, a listening socket.
    ///
    /// # Errors
    /// If it does not wait for that, or QEMU refuses.
    pub async fn resend_memory(&self, stream: &Path) -> Result<(), HypervisorError> {
        let address = address(stream)?;
        self.tell("migrate", json!({ "uri": address, "resume": true }), ANSWER_DEADLINE).await
    }
}
