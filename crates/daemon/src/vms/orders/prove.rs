//! Has QEMU prove that the disks of a VM can be adopted or released, before anything of the VM is changed.
//!
//! ```text
//!   adopt     QEMU has the file open that we hold                   by descriptor: names may differ here and there
//!             QEMU can connect to the volume's socket               an empty export exists there for that moment
//!             QEMU can open the file again                          the way back, also after a failure
//!   release   QEMU can open each image at its present path          in a folder of ours its owner is restored if needed
//! ```
//! The volume's lane opens the files that are held here ([`crate::vms::proved`]).

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::Arc;

use block::held::{self, Finder as _, Held, Reach, Unfit};
use hypervisor::HypervisorError;
use hypervisor::qemu::{Launched, LocalDisk, Qemu, Use};
use rustix::fs::FileType;

use crate::error::{RequestError, with_causes};
use crate::host::{VmOrders, blocking};
use crate::vms::{Adopted, AdoptedDisk, VmError, launched, proof};

impl VmOrders {
    /// Holds the files of a disk that its QEMU has open, the top first. If QEMU writes, it must have the top open for writing,
    /// and the others for reading. Errors: [`VmError::Disk`]. **N.B.** the answer is the same for a missing file and for one that
    /// this QEMU does not have open, so that an operator does not learn which files exist.
    pub(crate) async fn prove_files(
        &self,
        name: &str,
        qemu: &Qemu,
        disk: &LocalDisk,
    ) -> Result<Vec<Arc<Held>>, RequestError> {
        let process = launched(name, qemu).await?;
        let (name, disk) = (name.to_owned(), disk.clone());
        blocking(move || {
            let below = disk.backing.iter().map(|file| process.resolve(file).unwrap_or_else(|| file.clone()));
            let files = std::iter::once(disk.file.clone()).chain(below);
            let held = files.enumerate().map(|(depth, file)| {
                // N.B. the monitor's read-only flag is ignored: the volume can be written to.
                let used = if depth == 0 { Use::ReadWrite } else { Use::Read };
                let found = held::find(&file).ok();
                let found = found.filter(|found| process.descriptors_of(numbers(found), used) > 0);
                let found = found.ok_or_else(|| refuse(&name, another_file(&disk, &file)))?;
                let unfit = |unfit: Unfit| refuse(&name, format!("{}: {unfit}", disk.device));
                found.require_image().map_err(unfit)?;
                Ok(Arc::new(found))
            });
            held.collect()
        })
        .await
    }

    /// Checks whether the disks of a VM can be adopted, and released again. [`VmError::Disk`] says what to do.
    pub(crate) async fn prove_adoptable(
        self: &Arc<Self>,
        name: &str,
        qemu: &Qemu,
        disks: &[LocalDisk],
        adopted: &Adopted,
    ) -> Result<(), RequestError> {
        for (disk, kept) in disks.iter().zip(&adopted.disks) {
            let process = launched(name, qemu).await?;
            self.prove_way_back(name, qemu, (disk, kept), &process).await?;
            self.prove_socket(name, qemu, (disk, kept), adopted.user).await?;
        }
        Ok(())
    }

    /// Checks whether a VM can have the images of its disks back, at their present paths. Restores the owner of an
    /// image that its QEMU may not open, if only Sterna can put another file in its place. [`VmError::Disk`] says what
    /// to do; nothing else is changed.
    pub(crate) async fn prove_releasable(
        self: &Arc<Self>,
        qemu: &Qemu,
        adopted: &Adopted,
    ) -> Result<(), RequestError> {
        let name = &adopted.name;
        let devices = qemu.query_block().await.map_err(VmError::of(name))?;
        for kept in &adopted.disks {
            let device = devices.iter().find(|device| device.device.as_deref() == Some(&kept.device));
            // The VM may have lost the device.
            let Some(node) = device.and_then(|device| device.node.as_ref()) else { continue };
            let disk = kept.disk(node);
            let process = launched(name, qemu).await?;
            let image = self.image_of(kept).await?;
            let before = process.descriptors_of(numbers(&image), kept.used());
            if before > 0 {
                // QEMU has its own image open again: this disk is done.
                continue;
            }
            let mut opened = qemu.prove_file(&disk, &kept.file, kept.number).await;
            if opened.is_err() && self.give_back(&image, kept, &process).await? {
                opened = qemu.prove_file(&disk, &kept.file, kept.number).await;
            }
            let proved = match opened {
                Ok(()) => same_file(name, qemu, (&image, kept), before).await,
                Err(error) => Err(refuse(name, cannot_open(kept, &process, &error))),
            };
            qemu.end_proof(kept.number).await;
            proved?;
        }
        Ok(())
    }

    async fn image_of(&self, kept: &AdoptedDisk) -> Result<Arc<Held>, RequestError> {
        let (finder, file) = (self.finders.of(&kept.volume), kept.file.clone());
        blocking(move || {
            let found = finder.find(&file, None);
            found.map(Arc::new).map_err(|error| RequestError::storage("find", &file, &error))
        })
        .await
    }

    /// Restores the owner that an image had when its disk was adopted, or makes QEMU's user the owner if it never was adopted.
    /// Returns whether that was possible.
    /// **N.B.** In a folder that others own this changes nothing: a file there has its owner, or is not ours to give away.
    async fn give_back(
        &self,
        image: &Arc<Held>,
        kept: &AdoptedDisk,
        process: &Launched,
    ) -> Result<bool, RequestError> {
        if image.reach() == Reach::Others || image.kind() != FileType::RegularFile {
            return Ok(false);
        }
        let (image, former, (user, group)) = (Arc::clone(image), kept.proved.first().cloned(), process.owner);
        blocking(move || {
            let given = match &former {
                Some(former) => {
                    image.give(former.user, former.group).and_then(|()| image.set_mode(former.mode))
                }
                None => image.give(user, group),
            };
            if given.is_ok() {
                let owner = former.map_or(user, |former| former.user);
                tracing::info!(file = %image.path().display(), user = owner, "gave the image to its owner");
            }
            Ok(given.is_ok())
        })
        .await
    }

    async fn prove_way_back(
        &self,
        name: &str,
        qemu: &Qemu,
        (disk, kept): (&LocalDisk, &AdoptedDisk),
        process: &Launched,
    ) -> Result<(), RequestError> {
        let image = self.image_of(kept).await?;
        let before = process.descriptors_of(numbers(&image), kept.used());
        let opened = qemu.prove_file(disk, &kept.file, kept.number).await;
        let proved = match opened {
            Ok(()) => same_file(name, qemu, (&image, kept), before).await,
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
        user: Option<u32>,
    ) -> Result<(), RequestError> {
        let unavailable = |error: &dyn std::error::Error| RequestError::VolumeUnavailable {
            volume: kept.volume.clone(),
            reason: with_causes(error),
        };
        if let Some(user) = user {
            self.sockets.grants().give(&kept.volume, user);
        }
        let bound = self.sockets.bind_volume(&kept.volume, &self.config.volume_sockets);
        self.sockets.grants().take(&kept.volume);
        let listener = bound.map_err(|error| unavailable(&error))?;
        let export = self.exports.export_named(&kept.volume);
        let proved = tokio::select! {
            proved = qemu.prove_export(disk, &export, kept.number) => proved,
            error = proof::serve(listener, disk.size_bytes) => return Err(unavailable(&error)),
        };
        if let Err(error) = self.sockets.forget_volume(&kept.volume) {
            tracing::warn!(path = %export.socket.display(), %error, "a socket is left over");
        }
        proved.map_err(|error| refuse(name, cannot_connect(&export.socket, user, &error)))
    }
}

/// Checks whether the file that QEMU has opened by a path is the one that we hold.
async fn same_file(
    name: &str,
    qemu: &Qemu,
    (image, kept): (&Held, &AdoptedDisk),
    before: usize,
) -> Result<(), RequestError> {
    if launched(name, qemu).await?.descriptors_of(numbers(image), kept.used()) > before {
        return Ok(());
    }
    let file = kept.file.display();
    Err(refuse(
        name,
        format!(
            "at {file} its QEMU finds another file than this daemon: QEMU runs in a namespace of its own (a container, a \
             chroot); run the daemon in the same one"
        ),
    ))
}

/// Returns the device and inode numbers of a file.
fn numbers(held: &Held) -> (u64, u64) {
    (held.identity().device, held.identity().inode)
}

fn another_file(disk: &LocalDisk, file: &Path) -> String {
    let (device, file) = (&disk.device, file.display());
    format!(
        "{device}: its QEMU does not have the file open that {file} leads to: it was renamed or replaced, the path leads through \
         a link in a folder that users other than root may write to, or QEMU runs in a name space of its own (a container, a \
         chroot); put the file back where it was (ls -l /proc/PID/fd shows what QEMU has open), or run the daemon where QEMU runs"
    )
}

fn cannot_connect(socket: &Path, user: Option<u32>, error: &HypervisorError) -> String {
    let who = user.map_or("the daemon's user".to_owned(), |user| format!("the user {user}"));
    let what = match user.and_then(|_| closed_folder(socket)) {
        Some(folder) => {
            let folder = folder.display();
            format!("other users cannot pass through the folder {folder}; permit it: chmod o+x {folder}")
        }
        None => "that user may use the socket, so something else forbids it: SELinux, AppArmor, or a namespace of QEMU's own (a \
                 container, a chroot)"
            .to_owned(),
    };
    let socket = socket.display();
    format!(
        "its QEMU, which runs as {who}, cannot connect to the socket of its disk, {socket}: {error}; {what}"
    )
}

/// Returns the topmost folder above a socket through which other users cannot pass.
fn closed_folder(socket: &Path) -> Option<&Path> {
    let above: Vec<&Path> = socket.ancestors().skip(1).collect();
    let is_closed = |folder: &Path| std::fs::metadata(folder).is_ok_and(|found| found.mode() & 0o001 == 0);
    above.into_iter().rev().find(|folder| is_closed(folder))
}

fn cannot_open(kept: &AdoptedDisk, process: &Launched, error: &HypervisorError) -> String {
    let (file, user) = (kept.file.display(), process.owner.0);
    format!(
        "its QEMU, which runs as the user {user}, could not open {file} when it has its disk back: {error}; permit it to open \
         that file (chown, chmod, and the folders above it)"
    )
}

fn refuse(name: &str, why: String) -> RequestError {
    VmError::Disk { vm: name.to_owned(), why }.into()
}
