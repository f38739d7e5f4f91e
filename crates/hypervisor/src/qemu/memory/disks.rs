//! The disks of a VM that has loaded its memory and stays paused.
//!
//! A target leaves its disks alone until it is resumed. A target that stays paused would leave them so: QEMU before 10 then ends
//! itself (`bdrv_inactivate_recurse`) when the VM moves on, or when a backup is made. It has no command to take the disks. An
//! export does so, and is removed at once.

use std::path::Path;

use serde_json::json;

use super::address;
use crate::HypervisorError;
use crate::qemu::process::{DRAIN_DEADLINE, Qemu};

const COMMAND_FROM: u64 = 10;
const EXPORT: &str = "sterna-takes-disks";

impl Qemu {
    /// Takes the disks of a VM that stays paused, from another process. `socket`: a path where QEMU may listen for a moment.
    pub async fn take_disks(&self, socket: &Path) -> Result<(), HypervisorError> {
        if self.version().major >= COMMAND_FROM {
            return self.tell("blockdev-set-active", json!({ "active": true }), DRAIN_DEADLINE).await;
        }
        let devices = self.query_block().await?;
        let nodes: Vec<_> = devices.into_iter().filter_map(|device| Some(device.node?.name)).collect();
        if nodes.is_empty() {
            return Ok(());
        }
        // This refuses a path that QEMU would misread, too.
        address(socket)?;
        let listens = json!({ "addr": { "type": "unix", "data": { "path": socket } }, "max-connections": 1 });
        self.tell("nbd-server-start", listens, DRAIN_DEADLINE).await?;
        let mut taken = Ok(());
        for node in nodes {
            let export = json!({ "type": "nbd", "id": EXPORT, "node-name": node, "writable": false });
            taken = self.tell("block-export-add", export, DRAIN_DEADLINE).await;
            if taken.is_ok() {
                taken = self.tell("block-export-del", json!({ "id": EXPORT }), DRAIN_DEADLINE).await;
            }
            if taken.is_err() {
                break;
            }
        }
        self.tell("nbd-server-stop", json!({}), DRAIN_DEADLINE).await?;
        taken
    }
}
