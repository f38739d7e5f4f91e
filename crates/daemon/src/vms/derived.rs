//! Derives a definition for an adopted VM from the command of its running QEMU. [`hypervisor::qemu::command_line::derived`]
//! converts the command; this file asks the running VM and writes the result.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use block::held::{self, User};
use hypervisor::qemu::command_line::derived::{self, Limits, Running, VolumeDisk};
use hypervisor::qemu::{DiskOptions, Launched, Qemu};
use serde::Serialize;

use super::definition::DefinitionError;
use super::{Adopted, AdoptedDisk, Definition, VmError};

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Derived {
    pub(crate) text: String,
    /// What does not move along, for messages; the guest does not notice it.
    pub(crate) left_behind: Vec<String>,
}

/// Derives the definition of an adopted VM. A [`DefinitionError`] says what keeps the VM from moving.
pub(crate) fn derive(
    adopted: &Adopted,
    process: &Launched,
    running: &Running,
) -> Result<Derived, DefinitionError> {
    let disks: Vec<VolumeDisk> = adopted.disks.iter().map(volume_disk).collect();
    let limits =
        Limits { file_bytes_max: super::manifest::FILES_BYTES_MAX as u64, is_path_name, length, leads_to };
    let derived = derived::derive(&disks, process, running, limits)?;
    let written = Written { command: derived.command, disks: derived.disks, files: derived.files };
    let text = toml::to_string(&written)
        .map_err(|error| DefinitionError::Bounds(format!("its command cannot be written down: {error}")))?;
    Definition::parse(&text)?;
    Ok(Derived { text, left_behind: derived.left_behind })
}

/// Asks the kernel about the process of a VM. May block. Fails if the kernel refuses the answer.
pub(crate) async fn launched(vm: &str, qemu: &Qemu) -> Result<Launched, VmError> {
    let id = qemu.process();
    let id = id.ok_or_else(|| VmError::Unusable("the kernel names no process".to_owned()))?;
    let looked = tokio::task::spawn_blocking(move || Launched::of(id)).await;
    let looked = looked.map_err(|error| VmError::Unusable(error.to_string()))?;
    let looked = looked.map_err(|source| VmError::Hidden { vm: vm.to_owned(), id, source })?;
    // N.B. the kernel names the process that began to listen. If that process has ended, another user's process may have its
    // number, and the files that it has open. A QEMU that gives up its privileges itself (-runas) listens as root before.
    match qemu.user() {
        Some(user) if user != looked.owner.0 && user != 0 => {
            let why = format!(
                "the user {user} listens at its monitor, and the process {id} runs as the user {}",
                looked.owner.0
            );
            Err(VmError::Unusable(why))
        }
        _ => Ok(looked),
    }
}

/// The definition in its TOML form.
#[derive(Serialize)]
struct Written {
    command: Vec<String>,
    disks: BTreeMap<String, String>,
    files: BTreeMap<String, PathBuf>,
}

pub(crate) fn user_of(process: &Launched) -> User {
    let (user, group) = process.owner;
    User { user, groups: std::iter::once(group).chain(process.groups.iter().copied()).collect() }
}

/// Returns the size of a file, if the user of the process may read it: that user chose the command that names it.
fn length(path: &Path, process: &Launched) -> Option<u64> {
    let found = held::find(path).ok().filter(|found| found.lets_read(&user_of(process)))?;
    // The kernel keeps file sizes below 2^63.
    Some(found.status().st_size as u64)
}

fn leads_to(path: &Path, file: &Path) -> bool {
    held::find(path).is_ok_and(|found| found.path() == file)
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
