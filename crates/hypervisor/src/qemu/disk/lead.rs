//! Switches a disk to an export, and back to a file.
//!
//! An export has the guest's view, so a disk over one is raw; the file may have any supported format. If the format stays, the
//! device's node is reopened. If it changes, or the node has no name, the device gets another node.

use std::path::Path;

use serde_json::{Value, json};

use super::{DiskOptions, ExportAddress, ImageFile, LocalDisk};
use crate::HypervisorError;
use crate::qemu::BlockNode;
use crate::qemu::error::QmpError;
use crate::qemu::process::{ANSWER_DEADLINE, DRAIN_DEADLINE, Qemu, unexpected};

/// Prefixes of the names of new nodes; names have at most 31 bytes.
pub(super) const EXPORT_NODE: &str = "sterna-nbd-";
/// The prefix where a node over an export replaces another one over it, and needs a different name.
pub(super) const OTHER_EXPORT_NODE: &str = "sterna-nbe-";
const FORMAT_NODE: &str = "sterna-fmt-";
/// The prefix where a format node replaces another one, and needs a different name.
const OTHER_FORMAT_NODE: &str = "sterna-img-";
const FILE_NODE: &str = "sterna-file-";
const NOTHING_NODE: &str = "sterna-null-";
const RAW: &str = "raw";

impl Qemu {
    /// Switches a disk to an export of the same bytes, and returns the disk's new description.
    ///
    /// `number` distinguishes the nodes of this disk from those of others of the VM. The guest continues; requests wait for about
    /// a millisecond. On return QEMU has closed the file, and holds no lock on it.
    ///
    /// # Errors
    /// If QEMU refuses or does not answer. The disk then stays where it was, unless QEMU fell silent.
    pub async fn lead_over_export(
        &self,
        disk: &LocalDisk,
        export: &ExportAddress,
        number: u32,
    ) -> Result<LocalDisk, HypervisorError> {
        let node = format!("{EXPORT_NODE}{number}");
        let options = export_options(&node, export, &disk.options);
        self.exchange(disk, &Below { node, options, format: RAW, name: None }, number).await
    }

    /// Gives a disk the size of its export, which has grown, and notifies the guest. An NBD node keeps the size that the export had
    /// when it connected, so another node takes its place. The guest continues.
    ///
    /// # Errors
    /// If the disk is not a raw node over the export's node, or if QEMU refuses or does not answer. The disk then keeps its size.
    pub async fn grow(
        &self,
        disk: &LocalDisk,
        export: &ExportAddress,
        number: u32,
        size_bytes: u64,
    ) -> Result<(), HypervisorError> {
        if !disk.is_named || disk.format != RAW || disk.file_node.is_none() {
            return Err(
                unexpected("query-block", "a raw node with a name over the NBD node of the disk").into()
            );
        }
        let names = [EXPORT_NODE, OTHER_EXPORT_NODE].map(|begin| format!("{begin}{number}"));
        let node = names.into_iter().find(|name| disk.file_node.as_ref() != Some(name)).unwrap_or_default();
        let options = export_options(&node, export, &disk.options);
        let led = self.exchange(disk, &Below { node, options, format: RAW, name: None }, number).await?;
        let size = json!({ "node-name": led.node, "size": size_bytes });
        self.tell("block_resize", size, DRAIN_DEADLINE).await
    }

    /// Detaches a disk from its file, without anything below it: QEMU closes the file, and holds no lock on it.
    ///
    /// **N.B.** The VM must be paused, and the disk be attached again before it runs: writes meanwhile would be lost.
    ///
    /// # Errors
    /// If QEMU refuses or does not answer. The disk then stays where it was, unless QEMU fell silent.
    pub async fn lead_to_nothing(&self, disk: &LocalDisk, number: u32) -> Result<LocalDisk, HypervisorError> {
        let node = format!("{NOTHING_NODE}{number}");
        let mut options = with_options(&node, "null-co", &disk.options);
        options["size"] = disk.size_bytes.into();
        options["read-zeroes"] = true.into();
        self.exchange(disk, &Below { node, options, format: RAW, name: None }, number).await
    }

    /// Switches a disk to a file, from any state.
    ///
    /// No other process may hold QEMU's locks on the file, and the disk must not be over it already. On return QEMU holds the
    /// locks, and sends nothing to an export.
    ///
    /// # Errors
    /// If QEMU refuses or does not answer. The disk then stays where it was, unless QEMU fell silent.
    pub async fn lead_to_file(
        &self,
        disk: &LocalDisk,
        image: &ImageFile,
        number: u32,
    ) -> Result<LocalDisk, HypervisorError> {
        let node = format!("{FILE_NODE}{number}");
        let options = file_options(&node, &image.path, &disk.options);
        let below = Below { node, options, format: &image.format, name: image.node.as_deref() };
        let led = self.exchange(disk, &below, number).await?;
        Ok(LocalDisk { file: image.path.clone(), ..led })
    }

    /// Deletes an unused node; a missing or used node is no error.
    pub async fn drop_node(&self, node: &str) {
        let _ = self.delete(node).await;
    }

    async fn exchange(
        &self,
        disk: &LocalDisk,
        below: &Below<'_>,
        number: u32,
    ) -> Result<LocalDisk, HypervisorError> {
        let node = below.node.as_str();
        // A killed daemon's node is unused: the disk is not over it, or it would not be switched there.
        self.drop_node(node).await;
        self.tell("blockdev-add", below.options.clone(), DRAIN_DEADLINE).await?;
        let led = if disk.is_named && disk.format == below.format {
            self.reopen(disk, node).await
        } else {
            self.set_drive(disk, below, number).await
        };
        match led {
            Ok(led) => {
                // Nodes above others first. A node without a name vanishes by itself.
                let format = Some(&disk.node).filter(|format| disk.is_named && **format != led.node);
                // The caller may not know what the disk was last over.
                let ours = [EXPORT_NODE, OTHER_EXPORT_NODE, FILE_NODE, NOTHING_NODE];
                let ours = ours.map(|begin| format!("{begin}{number}"));
                let formers = format.into_iter().chain(&disk.file_node).chain(&ours);
                for former in formers.filter(|former| *former != node) {
                    // A node made with its parent vanishes with it, and most of these do not exist.
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

    async fn reopen(&self, disk: &LocalDisk, node: &str) -> Result<LocalDisk, HypervisorError> {
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

    async fn set_drive(
        &self,
        disk: &LocalDisk,
        below: &Below<'_>,
        number: u32,
    ) -> Result<LocalDisk, HypervisorError> {
        let ours = [FORMAT_NODE, OTHER_FORMAT_NODE].map(|begin| format!("{begin}{number}"));
        let names = below.name.into_iter().chain(ours.iter().map(String::as_str));
        // Either own name is free.
        let format_node = names.into_iter().find(|name| *name != disk.node).unwrap_or_default().to_owned();
        let led = LocalDisk {
            node: format_node.clone(),
            is_named: true,
            format: below.format.to_owned(),
            file_node: Some(below.node.clone()),
            ..disk.clone()
        };
        self.drop_node(&format_node).await;
        self.tell("blockdev-add", format_options(&led, &below.node), DRAIN_DEADLINE).await?;
        // N.B. Checked before the device uses the new node: the former node vanishes for good with its last user.
        let checked = match self.check(&led).await {
            Ok(()) => self.give(&disk.device, &format_node).await,
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

    /// Gives a device another node. QEMU refuses a node that another I/O thread serves than the one of the device or of its
    /// controller, and does not say which that is: so each of them is tried.
    async fn give(&self, device: &str, node: &str) -> Result<(), HypervisorError> {
        let arguments = json!({ "path": device, "property": "drive", "value": node });
        let refused = match self.tell("qom-set", arguments.clone(), DRAIN_DEADLINE).await {
            Err(refused @ HypervisorError::Refused(_)) => refused,
            given => return given,
        };
        let threads = self.ask("query-iothreads").await?;
        for thread in threads.as_array().into_iter().flatten() {
            let moved = json!({ "node-name": node, "iothread": thread["id"] });
            self.tell("x-blockdev-set-iothread", moved, DRAIN_DEADLINE).await?;
            match self.tell("qom-set", arguments.clone(), DRAIN_DEADLINE).await {
                Err(HypervisorError::Refused(_)) => {}
                given => return given,
            }
        }
        Err(refused)
    }

    async fn check(&self, disk: &LocalDisk) -> Result<(), HypervisorError> {
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

impl BlockNode {
    /// Returns whether an exchange made this format node for the disk with `number`.
    pub fn is_of_exchange(&self, number: u32) -> bool {
        [FORMAT_NODE, OTHER_FORMAT_NODE].iter().any(|begin| self.name == format!("{begin}{number}"))
    }
}

struct Below<'a> {
    node: String,
    options: Value,
    format: &'a str,
    name: Option<&'a str>,
}

pub(super) fn export_options(node: &str, export: &ExportAddress, options: &DiskOptions) -> Value {
    let mut options = with_options(node, "nbd", options);
    options["server"] = json!({ "type": "unix", "path": export.socket });
    options["export"] = export.export.as_str().into();
    options["reconnect-delay"] = export.reconnect_s.into();
    options
}

pub(super) fn file_options(node: &str, path: &Path, options: &DiskOptions) -> Value {
    let driver = match std::fs::metadata(path) {
        Ok(found) if !found.is_file() => "host_device",
        _ => "file",
    };
    let mut options = with_options(node, driver, options);
    options["filename"] = json!(path);
    options
}

fn format_options(disk: &LocalDisk, below: &str) -> Value {
    let mut options = with_options(&disk.node, &disk.format, &disk.options);
    options["file"] = below.into();
    options["detect-zeroes"] = disk.options.detect_zeroes.as_str().into();
    options
}

fn with_options(node: &str, driver: &str, options: &DiskOptions) -> Value {
    json!({
        "driver": driver,
        "node-name": node,
        "read-only": options.is_read_only,
        "discard": "unmap",
        "cache": { "direct": options.cache_direct, "no-flush": options.cache_no_flush },
    })
}
