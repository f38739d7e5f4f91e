//! Chooses the user of each VM's QEMU: a number that no other VM has, so that no VM can open another's files.
//!
//! ```text
//!   [machines] users ── a number ── recorded of the VM, durably ─► its QEMU and its TPM, its files, the sockets of its disks
//! ```
//! **N.B.** A released VM keeps its number, and is in no list: a number that a process has is never given away.

use std::collections::BTreeSet;
use std::hash::{BuildHasher as _, RandomState};
use std::ops::RangeInclusive;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::arrival::blocking;
use super::{Definition, VmError, Vms, own_sockets, qemu_sockets, tpm};
use crate::config::{QemuUser, RunsAs, VmUsers};
use hypervisor::qemu::command_line::sandbox;

impl Vms {
    /// Returns the user of a VM's QEMU; `None`: the daemon's user. Fails if no number is left, or it cannot be recorded.
    pub(super) async fn user_for(
        self: &Arc<Self>,
        name: &str,
        definition: &Definition,
    ) -> Result<Option<QemuUser>, VmError> {
        let user = match &self.allowed.runs_as {
            // A QEMU whose command changes its user must be started as root.
            RunsAs::Other(user) if !sandbox::becomes_others(&definition.command_with_places()) => user,
            _ => return Ok(None),
        };
        let VmUsers::Each(numbers) = &self.allowed.users else { return Ok(Some(user.clone())) };
        let (vms, name, numbers) = (Arc::clone(self), name.to_owned(), numbers.clone());
        let number = blocking(move || vms.number_for(&name, &numbers)).await?;
        Ok(Some(user.of_vm(number)))
    }

    /// Returns which sockets of a VM would have too long a path here.
    pub(super) fn long_sockets(&self, name: &str, definition: &Definition) -> Vec<String> {
        // A QEMU with a user of its own finds its files from its working directory.
        let is_relative = matches!(&self.allowed.runs_as, RunsAs::Other(_))
            && !sandbox::becomes_others(&definition.command_with_places());
        let files = if is_relative { PathBuf::new() } else { self.vm_folder(name) };
        let monitor = self.monitor(name);
        own_sockets::faults(definition, &files, (&qemu_sockets::place(&monitor), &tpm::socket(&monitor)))
    }

    /// Returns the number of a VM's user: its former one, or a free one. May block.
    fn number_for(&self, name: &str, numbers: &RangeInclusive<u32>) -> Result<u32, VmError> {
        // A volume's socket may still belong to a VM that has left.
        let mut in_use = numbers_of_processes();
        in_use.extend(self.monitors.parent().into_iter().flat_map(numbers_of_sockets));
        // Held throughout, so that each number is given once.
        let mut entries = self.entries();
        let others = entries.iter().filter(|(other, _)| *other != name);
        let of_others: BTreeSet<u32> = others.filter_map(|(_, entry)| entry.record.user).collect();
        let entry = entries.get_mut(name).ok_or_else(|| VmError::NotFound(name.to_owned()))?;
        let own = entry.record.user.filter(|own| numbers.contains(own) && !of_others.contains(own));
        let is_free = |number: &u32| !of_others.contains(number) && !in_use.contains(number);
        let chosen = own.or_else(|| choose(numbers, RandomState::new().hash_one(name), is_free));
        let chosen = chosen.ok_or_else(|| {
            let (first, last) = (numbers.start(), numbers.end());
            VmError::Unusable(format!(
                "each VM runs as a user of its own, and the numbers {first} to {last} are all taken: give it more (users = \
                 \"FIRST-LAST\" below [machines])"
            ))
        })?;
        if entry.record.user != Some(chosen) {
            let mut record = entry.record.clone();
            record.user = Some(chosen);
            self.catalogue()?.put(&record)?;
            entry.record = record;
        }
        Ok(chosen)
    }
}

/// Returns a free number, searching from a random one on, so that a released number is not reused next.
fn choose(numbers: &RangeInclusive<u32>, random: u64, is_free: impl Fn(&u32) -> bool) -> Option<u32> {
    let (first, last) = (u64::from(*numbers.start()), u64::from(*numbers.end()));
    let count = last.checked_sub(first)? + 1;
    let nth = |step: u64| u32::try_from(first + (random % count + step) % count).ok();
    (0..count).filter_map(nth).find(|number| is_free(number))
}

fn numbers_of_processes() -> BTreeSet<u32> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let processes = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    processes.filter_map(qemu_sockets::user_of_process).collect()
}

/// Returns the owners of sockets in the folders below this one.
fn numbers_of_sockets(above: &Path) -> Vec<u32> {
    let folders = std::fs::read_dir(above).into_iter().flatten().flatten();
    let sockets = folders.flat_map(|folder| std::fs::read_dir(folder.path()).into_iter().flatten().flatten());
    sockets.filter_map(|socket| Some(socket.metadata().ok()?.uid())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_one_that_nobody_has() {
        let numbers = 10..=12;
        let free = |taken: &'static [u32]| move |number: &u32| !taken.contains(number);
        assert_eq!(choose(&numbers, 0, free(&[])), Some(10));
        assert_eq!(choose(&numbers, u64::MAX, free(&[])), Some(10));
        assert_eq!(choose(&numbers, 2, free(&[12])), Some(10));
        assert_eq!(choose(&numbers, 7, free(&[11, 12])), Some(10));
        assert_eq!(choose(&numbers, 0, free(&[10, 11, 12])), None);
        let all = 0..=u32::MAX;
        assert_eq!(choose(&all, u64::from(u32::MAX), free(&[u32::MAX])), Some(0));
    }

    #[test]
    fn the_users_of_processes_and_of_sockets_are_taken() {
        let own = rustix::process::geteuid().as_raw();
        assert!(numbers_of_processes().contains(&own));
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("volumes")).unwrap();
        assert_eq!(numbers_of_sockets(folder.path()), [0; 0]);
        std::fs::write(folder.path().join("volumes/a.sock"), "").unwrap();
        assert_eq!(numbers_of_sockets(folder.path()), [own]);
    }
}
