//! A VM that runs at the target before all of its memory is there.
//!
//! ```text
//!   source                                                     target
//!   begin_post_copy: paused, for good ─► pre-switchover           inmigrate
//!   switch_over ─► postcopy-active  ═══ devices, then pages ═══►  await_loaded: paused ─► resume: runs, pages come
//!                    │      ▲                 ◄═══ wants a page    │      ▲
//!                    │ the stream has broken                       │      │
//!                    ▼      │                                      ▼      │
//!            postcopy-paused ─ resend_memory ══════► recover_memory ─ postcopy-paused: runs on what it has
//!                    ▼
//!                completed: the source is not needed any more
//! ```
//! **N.B.** from `switch_over` on the source never runs again, and the target has nothing but what has come: whichever of
//! them is lost, the VM's memory is. Until then it is a move like any other, and can be given up.

use std::path::Path;

use serde_json::json;

use super::address;
use crate::qemu::process::{ANSWER_DEADLINE, Qemu};
use crate::{HypervisorError, PostCopyStart, RunState};

/// What in QEMU reads and writes a disk's metadata by itself, so that a target may not look at the disk before it is its own.
const FORMATS: [&str; 9] = ["qcow2", "qcow", "qed", "vdi", "vhdx", "vmdk", "vpc", "parallels", "luks"];

impl Qemu {
    /// Why this VM cannot run at a target before all of its memory is there, as far as its source can tell; `None`: it
    /// can.
    ///
    /// # Errors
    /// If QEMU does not tell.
    pub async fn post_copy_hazard(&self) -> Result<Option<String>, HypervisorError> {
        let nodes = self.named_nodes().await?;
        // A target activates its disks before anybody has told it to run, and such a node would read what is not its own.
        let format = nodes.iter().find(|node| !node.is_read_only && FORMATS.contains(&node.driver.as_str()));
        Ok(format.map(|node| {
            format!(
                "QEMU itself interprets {} on the disk \"{}\", and would read it at the target before that is its owner; give \
                 the VM a raw disk, whose volume may be of any format",
                node.driver, node.name
            )
        }))
    }

    /// Brings the VM of a move that is under way to a stand, so that the rest of its memory follows later.
    ///
    /// The VM is paused first, and not by the migration: one that was paused before it was sent is not let run by QEMU
    /// when sending fails, and whoever has its disks by then decides.
    ///
    /// # Errors
    /// If QEMU refuses or does not answer. The VM may stand still.
    pub async fn begin_post_copy(&self) -> Result<PostCopyStart, HypervisorError> {
        self.stop().await?;
        if self.status().await? != RunState::Paused {
            return Ok(PostCopyStart::TooLate);
        }
        self.tell("migrate-start-postcopy", json!({}), ANSWER_DEADLINE).await?;
        Ok(PostCopyStart::Begun)
    }

    /// Makes a target whose stream has broken listen on `socket` for the rest of its memory. It runs on meanwhile, on what it
    /// has.
    ///
    /// # Errors
    /// If it does not wait for that (it takes a moment to notice that a stream has broken), or QEMU cannot listen there.
    pub async fn recover_memory(&self, socket: &Path) -> Result<(), HypervisorError> {
        let address = address(socket)?;
        self.tell("migrate-recover", json!({ "uri": address }), ANSWER_DEADLINE).await
    }

    /// Makes a source whose stream has broken send the rest of the memory to `stream`, on which somebody listens.
    ///
    /// # Errors
    /// If it does not wait for that, or QEMU refuses.
    pub async fn resend_memory(&self, stream: &Path) -> Result<(), HypervisorError> {
        let address = address(stream)?;
        self.tell("migrate", json!({ "uri": address, "resume": true }), ANSWER_DEADLINE).await
    }
}
