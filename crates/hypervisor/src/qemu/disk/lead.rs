//! Leads a disk over an export, and back to a file.
//!
//! An export is of what the guest sees, so a disk over one is raw; the file may be of any format that can be led. Where the
//! format stays, the node that the device has is reopened; where it changes, or nobody gave that node its name, the device
//! gets another one.

use std::path::Path;

use serde_json::{Value, json};

use super::{DiskOptions, ExportAddress, ImageFile, LocalDisk};
use crate::HypervisorError;
use crate::qemu::error::QmpError;
use crate::qemu::process::{ANSWER_DEADLINE, DRAIN_DEADLINE, Qemu, unexpected};

/// Beginnings of the names of the nodes that are made here; names of nodes have at most 31 bytes.
pub(super) const EXPORT_NODE: &str = "sterna-nbd-";
const FORMAT_NODE: &str = "sterna-fmt-";
/// Where a format node gives way to another one, they must not be called the same.
const OTHER_FORMAT_NODE: &str = "sterna-img-";
const FILE_NODE: &str = "sterna-file-";
const NOTHING_NODE: &str = "sterna-null-";
/// What a disk over an export, or over nothing, is driven by.
const RAW: &str = "raw";

impl Qemu {
    /// Leads a disk over an export of the same bytes, and returns the disk as it is then.
    ///
    /// `number` tells the nodes of this disk from those of others of the VM. The guest works on; requests wait for
    /// about a millisecond. When this returns QEMU has closed the file, and holds no lock on it.
    ///
    /// # Errors
    /// If QEMU refuses or does not answer. The disk is where it was then, unless QEMU fell silent.
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

    /// Takes a disk off its file, with nothing below it instead: QEMU closes the file, and holds no lock on it.
    ///
    /// **N.B.** The VM must be paused, and lead elsewhere before it runs again: what it would write is lost.
    ///
    /// # Errors
    /// If QEMU refuses or does not answer. The disk is where it was then, unless QEMU fell silent.
    pub async fn lead_to_nothing(&self, disk: &LocalDisk, number: u32) -> Result<LocalDisk, HypervisorError> {
        let node = format!("{NOTHING_NODE}{number}");
        let mut options = with_options(&node, "null-co", &disk.options);
        options["size"] = disk.size_bytes.into();
        options["read-zeroes"] = true.into();
        self.exchange(disk, &Below { node, options, format: RAW, name: None }, number).await
    }

    /// Leads a disk to a file, whatever it is over.
    ///
    /// Nobody else may hold QEMU's locks on the file when this is called, nor may the disk be over it already. When this
    /// returns, QEMU does, and nothing is sent to an export any more.
    ///
    /// # Errors
    /// If QEMU refuses or does not answer. The disk is where it was then, unless QEMU fell silent.
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

    /// Deletes a node that nothing uses; that it is not there, or is in use, is no error.
    pub async fn drop_node(&self, node: &str) {
        let _ = self.delete(node).await;
    }

    /// Puts another node below a disk's format, or below another format.
    async fn exchange(
        &self,
        disk: &LocalDisk,
        below: &Below<'_>,
        number: u32,
    ) -> Result<LocalDisk, HypervisorError> {
        let node = below.node.as_str();
        // A node that a killed daemon left is used by nothing: the disk is not over it, or nobody would lead it there.
        self.drop_node(node).await;
        self.tell("blockdev-add", below.options.clone(), DRAIN_DEADLINE).await?;
        let led = if disk.is_named && disk.format == below.format {
            self.reopen(disk, node).await
        } else {
            self.set_drive(disk, below, number).await
        };
        match led {
            Ok(led) => {
                // First what stands on the others. A node that nobody named goes by itself.
                let format = Some(&disk.node).filter(|format| disk.is_named && **format != led.node);
                // Whoever gives a disk back may not know what it was over last.
                let ours = [EXPORT_NODE, FILE_NODE, NOTHING_NODE].map(|begin| format!("{begin}{number}"));
                let formers = format.into_iter().chain(&disk.file_node).chain(&ours);
                for former in formers.filter(|former| *former != node) {
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

    /// Gives the device another format node, which has a name from then on.
    async fn set_drive(
        &self,
        disk: &LocalDisk,
        below: &Below<'_>,
        number: u32,
    ) -> Result<LocalDisk, HypervisorError> {
        let ours = [FORMAT_NODE, OTHER_FORMAT_NODE].map(|begin| format!("{begin}{number}"));
        let names = below.name.into_iter().chain(ours.iter().map(String::as_str));
        // Two of ours are two names: one of them is free.
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

/// What a disk is led over.
struct Below<'a> {
    /// The node's name.
    node: String,
    options: Value,
    /// What drives the disk over it.
    format: &'a str,
    /// What that node is to be called, if it is another one.
    name: Option<&'a str>,
}

/// A node over an export.
pub(super) fn export_options(node: &str, export: &ExportAddress, options: &DiskOptions) -> Value {
    let mut options = with_options(node, "nbd", options);
    options["server"] = json!({ "type": "unix", "path": export.socket });
    options["export"] = export.export.as_str().into();
    options["reconnect-delay"] = export.reconnect_s.into();
    options
}

/// A node over a file, or a device.
pub(super) fn file_options(node: &str, path: &Path, options: &DiskOptions) -> Value {
    let driver = match std::fs::metadata(path) {
        Ok(found) if !found.is_file() => "host_device",
        _ => "file",
    };
    let mut options = with_options(node, driver, options);
    options["filename"] = json!(path);
    options
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
