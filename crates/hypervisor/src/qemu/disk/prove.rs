//! Lets QEMU itself test whether a disk could be switched, while the VM runs, and without touching it.
//!
//! QEMU may run as another user, in other namespaces, or confined: only opening shows what it can open.

use std::path::Path;

use super::lead::{export_options, file_options};
use super::{ExportAddress, LocalDisk};
use crate::HypervisorError;
use crate::qemu::process::{DRAIN_DEADLINE, Qemu};

const TRIED_NODE: &str = "sterna-try-";

impl Qemu {
    /// Lets QEMU connect to an export as a disk would, and disconnect.
    ///
    /// # Errors
    /// If QEMU cannot, in its words.
    pub async fn prove_export(
        &self,
        disk: &LocalDisk,
        export: &ExportAddress,
        number: u32,
    ) -> Result<(), HypervisorError> {
        let node = format!("{TRIED_NODE}{number}");
        // A server that hangs up at once must not be connected to again.
        let once = ExportAddress { reconnect_s: 0, ..export.clone() };
        self.open(&node, export_options(&node, &once, &disk.options)).await?;
        self.drop_node(&node).await;
        Ok(())
    }

    /// Lets QEMU open a file as a disk would, without its locks, and keep it open until [`Self::end_proof`].
    ///
    /// # Errors
    /// If QEMU cannot, in its words.
    pub async fn prove_file(
        &self,
        disk: &LocalDisk,
        path: &Path,
        number: u32,
    ) -> Result<(), HypervisorError> {
        let node = format!("{TRIED_NODE}{number}");
        // N.B. the node is unused, so it asks for no lock.
        self.open(&node, file_options(&node, path, &disk.options)).await
    }

    /// Closes the file that [`Self::prove_file`] has opened.
    pub async fn end_proof(&self, number: u32) {
        self.drop_node(&format!("{TRIED_NODE}{number}")).await;
    }

    async fn open(&self, node: &str, options: serde_json::Value) -> Result<(), HypervisorError> {
        // Left by a killed daemon, perhaps.
        self.drop_node(node).await;
        self.tell("blockdev-add", options, DRAIN_DEADLINE).await
    }
}
