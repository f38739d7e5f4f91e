//! Leads a disk over an export, and back to its file.

use serde_json::{Value, json};

use super::{DiskOptions, ExportAddress, LocalDisk};
use crate::qemu::error::{MachineError, QmpError};
use crate::qemu::machine::{ANSWER_DEADLINE, DRAIN_DEADLINE, Machine, unexpected};

/// Beginnings of the names of the nodes that are made here; names of nodes have at most 31 bytes.
const EXPORT_NODE: &str = "sterna-nbd-";
const FORMAT_NODE: &str = "sterna-fmt-";
const FILE_NODE: &str = "sterna-file-";
const NOTHING_NODE: &str = "sterna-null-";

impl Machine {
    /// Leads a disk over an export of the same bytes, and returns the disk as it is then.
    ///
    /// `number` tells the nodes of this disk from those of others of the machine. The guest works on; requests wait for
    /// about a millisecond. When this returns QEMU has closed the file, and holds no lock on it.
    ///
    /// # Errors
    /// If QEMU refuses or does not answer. The disk is where it was then, unless QEMU fell silent.
    pub async fn lead_over_export(
        &self,
        disk: &LocalDisk,
        export: &ExportAddress,
        number: u32,
    ) -> Result<LocalDisk, MachineError> {
        let node = format!("{EXPORT_NODE}{number}");
        let mut options = with_options(&node, "nbd", &disk.options);
        options["server"] = json!({ "type": "unix", "path": export.socket });
        options["export"] = export.export.as_str().into();
        options["reconnect-delay"] = export.reconnect_s.into();
        self.exchange(disk, &node, options, number).await
    }

    /// Takes a disk off its file, with nothing below it instead: QEMU closes the file, and holds no lock on it.
    ///
    /// **N.B.** The machine must be paused, and lead elsewhere before it runs again: what it would write is lost.
    ///
    /// # Errors
    /// If QEMU refuses or does not answer. The disk is where it was then, unless QEMU fell silent.
    pub async fn lead_to_nothing(&self, disk: &LocalDisk, number: u32) -> Result<LocalDisk, MachineError> {
        let node = format!("{NOTHING_NODE}{number}");
        let mut options = with_options(&node, "null-co", &disk.options);
        options["size"] = disk.size_bytes.into();
        options["read-zeroes"] = true.into();
        self.exchange(disk, &node, options, number).await
    }

    /// Leads a disk back to its file, whatever it is over.
    ///
    /// Nobody else may hold QEMU's locks on the file when this is called, nor may the disk be over it already. When this
    /// returns, QEMU does, and nothing is sent to an export any more.
    ///
    /// # Errors
    /// If QEMU refuses or does not answer. The disk is where it was then, unless QEMU fell silent.
    pub async fn lead_to_file(&self, disk: &LocalDisk, number: u32) -> Result<LocalDisk, MachineError> {
        let node = format!("{FILE_NODE}{number}");
        let driver = match std::fs::metadata(&disk.file) {
            Ok(found) if !found.is_file() => "host_device",
            _ => "file",
        };
        let mut options = with_options(&node, driver, &disk.options);
        options["filename"] = json!(disk.file);
        self.exchange(disk, &node, options, number).await
    }

    /// Puts another node below a disk's format.
    async fn exchange(
        &self,
        disk: &LocalDisk,
        node: &str,
        options: Value,
        number: u32,
    ) -> Result<LocalDisk, MachineError> {
        self.tell("blockdev-add", options, DRAIN_DEADLINE).await?;
        let led = if disk.is_named {
            self.reopen(disk, node).await
        } else {
            self.set_drive(disk, node, number).await
        };
        match led {
            Ok(led) => {
                // Whoever gives a disk back may not know what it was over last.
                let ours = [EXPORT_NODE, FILE_NODE, NOTHING_NODE].map(|begin| format!("{begin}{number}"));
                for former in disk.file_node.iter().chain(&ours).filter(|former| *former != node) {
                    // A node that was made with its parent goes with it, and most of these are not there.
                    let _ = self.delete(former).await;
                }
                Ok(led)
            }
            Err(error) => {
                if let Err(left) = self.delete(node).await {
                    tracing::warn!(%node, error = %left, "a node is left over in QEMU");
                }
                Err(error)
            }
        }
    }

    /// Exchanges the child of a format node that has a name.
    async fn reopen(&self, disk: &LocalDisk, node: &str) -> Result<LocalDisk, MachineError> {
        let before = format_options(disk, disk.file_node.as_deref().unwrap_or_default());
        let after = format_options(disk, node);
        self.tell("blockdev-reopen", json!({ "options": [after] }), DRAIN_DEADLINE).await?;
        let led = LocalDisk { file_node: Some(node.to_owned()), ..disk.clone() };
        if let Err(error) = self.check(&led).await {
            self.tell("blockdev-reopen", json!({ "options": [before] }), DRAIN_DEADLINE).await?;
            return Err(error);
        }
        Ok(led)
    }

    /// Gives the device a format node of its own, which has a name from then on.
    async fn set_drive(&self, disk: &LocalDisk, node: &str, number: u32) -> Result<LocalDisk, MachineError> {
        let format_node = format!("{FORMAT_NODE}{number}");
        let led = LocalDisk {
            node: format_node.clone(),
            is_named: true,
            file_node: Some(node.to_owned()),
            ..disk.clone()
        };
        self.tell("blockdev-add", format_options(&led, node), DRAIN_DEADLINE).await?;
        // N.B. Before the device has it: its former node goes with the last that uses it, and does not come back.
        let checked = match self.check(&led).await {
            Ok(()) => {
                let arguments = json!({ "path": disk.device, "property": "drive", "value": format_node });
                self.tell("qom-set", arguments, DRAIN_DEADLINE).await
            }
            Err(error) => Err(error),
        };
        if let Err(error) = checked {
            if let Err(left) = self.delete(&format_node).await {
                tracing::warn!(node = %format_node, error = %left, "a node is left over in QEMU");
            }
            return Err(error);
        }
        Ok(led)
    }

    /// Reads back what QEMU has made of a disk's options.
    async fn check(&self, disk: &LocalDisk) -> Result<(), MachineError> {
        const COMMAND: &str = "query-named-block-nodes";
        let nodes = self.ask(COMMAND).await?;
        let nodes = nodes.as_array().ok_or_else(|| unexpected(COMMAND, "a list of nodes"))?;
        let wanted = &disk.options;
        let is_so = |name: &str| {
            nodes.iter().find(|node| node["node-name"] == name).is_some_and(|node| {
                node["ro"] == wanted.is_read_only
                    && node["cache"]["direct"] == wanted.cache_direct
                    && node["cache"]["no-flush"] == wanted.cache_no_flush
                    && node["detect_zeroes"] == wanted.detect_zeroes.as_str()
            })
        };
        if is_so(&disk.node) {
            return Ok(());
        }
        Err(unexpected("query-named-block-nodes", "the disk's options as they were before").into())
    }

    async fn delete(&self, node: &str) -> Result<(), QmpError> {
        self.qmp().execute("blockdev-del", json!({ "node-name": node }), ANSWER_DEADLINE).await.map(drop)
    }
}

/// A disk's format node over another one.
fn format_options(disk: &LocalDisk, below: &str) -> Value {
    let mut options = with_options(&disk.node, &disk.format, &disk.options);
    options["file"] = below.into();
    options["detect-zeroes"] = disk.options.detect_zeroes.as_str().into();
    options
}

/// A node with all the options that every driver has.
fn with_options(node: &str, driver: &str, options: &DiskOptions) -> Value {
    json!({
        "driver": driver,
        "node-name": node,
        "read-only": options.is_read_only,
        "discard": "unmap",
        "cache": { "direct": options.cache_direct, "no-flush": options.cache_no_flush },
    })
}
