//! What adopting and releasing the disks of a VM needs, tried by its QEMU before anything of the VM is touched.
//!
//! ```text
//!   adopt     the file that we open is the one that QEMU has open   by its descriptors: another name space, another name
//!             QEMU can connect to the volume's socket               an export of nothing is there for that moment
//!             QEMU can open the file again                          the way back, also after a failure
//!   release   QEMU can open each image where it is by now           it is given to QEMU's user, if it must
//! ```

use std::path::Path;
use std::sync::Arc;

use hypervisor::HypervisorError;
use hypervisor::qemu::{Launched, LocalDisk, Qemu};

use crate::error::{RequestError, with_causes};
use crate::host::{Host, blocking};
use crate::vms::{Adopted, AdoptedDisk, VmError, launched, proof};

impl Host {
    /// Looks whether the disks of a VM could be adopted, and given back.
    ///
    /// # Errors
    /// [`VmError::Disk`], with what to do; nothing was changed.
    pub(in crate::host) async fn prove_adoptable(
        self: &Arc<Self>,
        name: &str,
        qemu: &Qemu,
        disks: &[LocalDisk],
        adopted: &Adopted,
    ) -> Result<(), RequestError> {
        for (disk, kept) in disks.iter().zip(&adopted.disks) {
            let process = launched(name, qemu).await?;
            let backing =
                disk.backing.iter().map(|file| process.resolve(file).unwrap_or_else(|| file.clone()));
            for file in std::iter::once(kept.file.clone()).chain(backing) {
                if process.descriptors_of(&file) == 0 {
                    return Err(refuse(name, another_file(disk, &file)));
                }
            }
            self.prove_way_back(name, qemu, (disk, kept), &process).await?;
            self.prove_socket(name, qemu, (disk, kept), &process).await?;
        }
        Ok(())
    }

    /// Looks whether a VM could have the images of its disks back, where they are by now. An image that its QEMU may not open is
    /// given to the user that it runs as, if we may do that.
    ///
    /// # Errors
    /// [`VmError::Disk`], with what to do; nothing else was changed.
    pub(in crate::host) async fn prove_releasable(
        self: &Arc<Self>,
        qemu: &Qemu,
        adopted: &Adopted,
    ) -> Result<(), RequestError> {
        let name = &adopted.name;
        let devices = qemu.query_block().await.map_err(VmError::of(name))?;
        for kept in &adopted.disks {
            let device = devices.iter().find(|device| device.device.as_deref() == Some(&kept.device));
            // It may be gone from the VM.
            let Some(node) = device.and_then(|device| device.node.as_ref()) else { continue };
            let disk = kept.disk(node);
            let process = launched(name, qemu).await?;
            let before = process.descriptors_of(&kept.file);
            if before > 0 {
                // It has it back already.
                continue;
            }
            let mut opened = qemu.prove_file(&disk, &kept.file, kept.number).await;
            if opened.is_err() {
                let (file, owner) = (kept.file.clone(), process.owner);
                if blocking(move || Ok(give_to(&file, owner).is_ok())).await? {
                    tracing::info!(vm = %name, file = %kept.file.display(), user = owner.0, "the image is given to the user that QEMU runs as");
                    opened = qemu.prove_file(&disk, &kept.file, kept.number).await;
                }
            }
            let proved = match opened {
                Ok(()) => same_file(name, qemu, &kept.file, before).await,
                Err(error) => Err(refuse(name, cannot_open(kept, &process, &error))),
            };
            qemu.end_proof(kept.number).await;
            proved?;
        }
        Ok(())
    }

    async fn prove_way_back(
        &self,
        name: &str,
        qemu: &Qemu,
        (disk, kept): (&LocalDisk, &AdoptedDisk),
        process: &Launched,
    ) -> Result<(), RequestError> {
        let before = process.descriptors_of(&kept.file);
        let opened = qemu.prove_file(disk, &kept.file, kept.number).await;
        let proved = match opened {
            Ok(()) => same_file(name, qemu, &kept.file, before).await,
            Err(error) => Err(refuse(name, cannot_open(kept, process, &error))),
        };
        qemu.end_proof(kept.number).await;
        proved
    }

    async fn prove_socket(
        &self,
        name: &str,
        qemu: &Qemu,
        (disk, kept): (&LocalDisk, &AdoptedDisk),
        process: &Launched,
    ) -> Result<(), RequestError> {
        let unavailable = |error: &dyn std::error::Error| RequestError::VolumeUnavailable {
            volume: kept.volume.clone(),
            reason: with_causes(error),
        };
        let bound = self.sockets.bind_volume(&kept.volume, &self.config.volume_sockets);
        let listener = bound.map_err(|error| unavailable(&error))?;
        let export = self.export_named(&kept.volume);
        let proved = tokio::select! {
            proved = qemu.prove_export(disk, &export, kept.number) => proved,
            error = proof::serve(listener, disk.size_bytes) => return Err(unavailable(&error)),
        };
        if let Err(error) = self.sockets.forget_volume(&kept.volume) {
            tracing::warn!(path = %export.socket.display(), %error, "a socket is left over");
        }
        proved.map_err(|error| {
            let (socket, user) = (export.socket.display(), process.owner.0);
            refuse(
                name,
                format!(
                    "its QEMU, which runs as the user {user}, cannot connect to {socket}, where its disk would be: {error}; let it: \
                     owner and mode below [volume_sockets] in the configuration, and a folder that it may pass through"
                ),
            )
        })
    }
}

/// Looks whether what QEMU has opened by a path is what we find there.
async fn same_file(name: &str, qemu: &Qemu, file: &Path, before: usize) -> Result<(), RequestError> {
    if launched(name, qemu).await?.descriptors_of(file) > before {
        return Ok(());
    }
    let file = file.display();
    Err(refuse(
        name,
        format!(
            "what its QEMU finds at {file} is another file than what is there for this daemon: QEMU runs in a name space of its own \
             (a container, a chroot); run the daemon in the same one"
        ),
    ))
}

fn another_file(disk: &LocalDisk, file: &Path) -> String {
    let (device, file) = (&disk.device, file.display());
    format!(
        "{device}: its QEMU has another file open than the one that is at {file} now: it was renamed or replaced, or QEMU runs in a \
         name space of its own (a container, a chroot); put the file back where it was (ls -l /proc/PID/fd shows what QEMU has \
         open), or run the daemon where QEMU runs"
    )
}

fn cannot_open(kept: &AdoptedDisk, process: &Launched, error: &HypervisorError) -> String {
    let (file, user) = (kept.file.display(), process.owner.0);
    format!(
        "its QEMU, which runs as the user {user}, could not open {file} when it has its disk back: {error}; let it open that file \
         (chown, chmod, and the folders above it)"
    )
}

fn refuse(name: &str, why: String) -> RequestError {
    VmError::Disk { vm: name.to_owned(), why }.into()
}

/// Gives a file to a user and its group, who may read and write it then.
fn give_to(file: &Path, (user, group): (u32, u32)) -> std::io::Result<()> {
    std::os::unix::fs::chown(file, Some(user), Some(group))
}
