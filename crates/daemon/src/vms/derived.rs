//! A definition for a VM that somebody else has started, made of the command of its running QEMU.
//!
//! What becomes of the command is decided in [`hypervisor::qemu::command_line::derived`]; here it is asked of the running VM,
//! and written down as a definition.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::PathBuf;

use hypervisor::qemu::command_line::derived::{self, Limits, Running, VolumeDisk};
use hypervisor::qemu::{DiskOptions, Launched, Qemu};
use serde::Serialize;

use super::definition::DefinitionError;
use super::{Adopted, AdoptedDisk, Definition, VmError};

/// A VM's definition that was derived.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Derived {
    /// The definition.
    pub(crate) text: String,
    /// What does not go along, for people; the guest sees nothing of it.
    pub(crate) left_behind: Vec<String>,
}

/// Derives the definition of a VM whose disks were adopted.
///
/// # Errors
/// [`DefinitionError`]: what keeps it from moving as a whole.
pub(crate) fn derive(
    adopted: &Adopted,
    process: &Launched,
    running: &Running,
) -> Result<Derived, DefinitionError> {
    let disks: Vec<VolumeDisk> = adopted.disks.iter().map(volume_disk).collect();
    let limits = Limits { file_bytes_max: super::manifest::FILES_BYTES_MAX as u64, is_path_name };
    let derived = derived::derive(&disks, process, running, limits)?;
    let written = Written { command: derived.command, disks: derived.disks, files: derived.files };
    let text = toml::to_string(&written)
        .map_err(|error| DefinitionError::Bounds(format!("its command cannot be written down: {error}")))?;
    Definition::parse(&text)?;
    Ok(Derived { text, left_behind: derived.left_behind })
}

/// Asks the kernel about the process of a VM. It may sleep.
///
/// # Errors
/// [`VmError`]: the kernel does not tell, or not to this user.
pub(crate) async fn launched(vm: &str, qemu: &Qemu) -> Result<Launched, VmError> {
    let id = qemu.process();
    let id = id.ok_or_else(|| VmError::Unusable("the kernel names no process".to_owned()))?;
    let looked = tokio::task::spawn_blocking(move || Launched::of(id)).await;
    let looked = looked.map_err(|error| VmError::Unusable(error.to_string()))?;
    looked.map_err(|source| VmError::Hidden { vm: vm.to_owned(), id, source })
}

/// As it is written.
#[derive(Serialize)]
struct Written {
    command: Vec<String>,
    disks: BTreeMap<String, String>,
    files: BTreeMap<String, PathBuf>,
}

fn volume_disk(disk: &AdoptedDisk) -> VolumeDisk {
    VolumeDisk {
        volume: disk.volume.clone(),
        number: disk.number,
        device: disk.device.clone(),
        drive: disk.drive.clone(),
        node: disk.node.clone(),
        file: disk.file.clone(),
        options: DiskOptions {
            is_read_only: disk.is_read_only,
            cache_direct: disk.cache_direct,
            cache_no_flush: disk.cache_no_flush,
            detect_zeroes: disk.detect_zeroes.clone(),
        },
    }
}

fn is_path_name(name: &str) -> bool {
    crate::names::check(name).is_ok() && !name.contains('.')
}
