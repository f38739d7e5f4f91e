//! Compares what a VM has with what is known of it: before it leaves, before its memory goes, and when it stands still.
//!
//! ```text
//!   the words that its QEMU was started with ──► known ──┐
//!   disks that were adopted since ───────────────►       ├─► differences, by name
//!   what its QEMU has now ───────────────────────► seen ─┘
//! ```
//! [`migration::vm::shape`] decides what counts as a difference.

use std::collections::hash_map::DefaultHasher;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{Hash as _, Hasher as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use hypervisor::qemu::command_line::made::{self, Made};
use hypervisor::qemu::{Leaf, Look, Qemu, SeenDrive};
use migration::vm::departure::Does;
use migration::vm::shape::{Device, Difference, Drive, Medium, Shape, differences};

use super::arrival::blocking;
use super::manifest::{self, Manifest, Reader};
use super::moving::{MoveFault, Witness};
use super::needs::Needs;
use super::{Adopted, Definition, VmError, Vms, launched, user_of};

/// Drivers that may always be between a device and a volume.
const PLAIN: [&str; 2] = ["raw", "nbd"];

#[derive(Clone, Debug)]
pub(crate) struct Found {
    pub(crate) does: Does,
    pub(crate) differences: BTreeSet<Difference>,
}

impl Vms {
    /// Compares a VM that runs here. Fails if its QEMU does not answer.
    pub(crate) async fn look(
        &self,
        name: &str,
        qemu: &Qemu,
        adopted: Option<&Adopted>,
    ) -> Result<Found, VmError> {
        let process = launched(name, qemu).await?;
        let made = Made::of(&process.command);
        let look = qemu.look(&made.settings()).await.map_err(VmError::of(name))?;
        let does = Does::of(look.state.as_str());
        let (known, seen) = shapes(&made, look, adopted, &self.volume_sockets);
        Ok(Found { does, differences: differences(&known, &seen, made::is_kind, made::is_setting) })
    }

    /// Returns the small files of a VM as they are now, in the form for another host.
    async fn files_now(self: &Arc<Self>, name: &str) -> Result<(u64, Vec<u8>), VmError> {
        // A QEMU that Sterna did not start uses its own files, as far as its user may read them.
        let is_somebodys = self.is_somebodys(name);
        let reader = match is_somebodys {
            true => Reader::User(user_of(&launched(name, &*self.qemu(name)?).await?)),
            false => Reader::Administrator,
        };
        let (vms, name) = (Arc::clone(self), name.to_owned());
        blocking(move || {
            let known = vms.get(&name)?;
            let definition = Definition::parse(&known.definition)?;
            let folder = vms.vm_folder(&name);
            let here = |(file, path): (&String, &PathBuf)| {
                (file.clone(), if is_somebodys { path.clone() } else { manifest::file(&folder, file) })
            };
            let files = manifest::read_files(&definition.files().iter().map(here).collect(), &reader)?;
            let sum = sum(&files);
            let (definition, needs, preferences) = (known.definition, Needs::default(), known.preferences);
            let bytes = Manifest { name, definition, files, needs, tpm_state: None, preferences }.encode()?;
            Ok((sum, bytes))
        })
        .await
    }

    /// Returns an object that makes these comparisons for a moving VM.
    pub(crate) fn witness(self: &Arc<Self>, name: &str) -> Arc<dyn Witness> {
        Arc::new(VmWitness { vms: Arc::clone(self), name: name.to_owned() })
    }
}

fn sum(files: &[(String, Vec<u8>)]) -> u64 {
    let mut hasher = DefaultHasher::new();
    let by_name: BTreeMap<_, _> = files.iter().map(|(name, content)| (name, content)).collect();
    by_name.hash(&mut hasher);
    hasher.finish()
}

struct VmWitness {
    vms: Arc<Vms>,
    name: String,
}

impl Witness for VmWitness {
    fn look(&self) -> BoxFuture<'_, Result<Found, MoveFault>> {
        async {
            let qemu = self.vms.alive(&self.name)?.qemu;
            let adopted = self.vms.adoptions()?.get(&self.name);
            Ok(self.vms.look(&self.name, &qemu, adopted.as_ref()).await?)
        }
        .boxed()
    }

    fn files(&self) -> BoxFuture<'_, Result<(u64, Vec<u8>), MoveFault>> {
        async { Ok(self.vms.files_now(&self.name).await?) }.boxed()
    }

    fn sum(&self, manifest: &[u8]) -> Result<u64, MoveFault> {
        Ok(sum(&Manifest::decode(manifest).map_err(VmError::from)?.files))
    }
}

/// Returns the known and the observed shape of a VM.
fn shapes(made: &Made, look: Look, adopted: Option<&Adopted>, sockets: &Path) -> (Shape, Shape) {
    let medium = |leaf: &Leaf| match leaf {
        Leaf::Export { socket, name } if *socket == sockets.join(format!("{name}.sock")) => {
            Medium::Volume(name.clone())
        }
        Leaf::Export { socket, name } => {
            Medium::Other(format!("the export {name:?} at {}", socket.display()))
        }
        Leaf::File(path) => Medium::Other(path.clone()),
        Leaf::Other(other) => Medium::Other(other.clone()),
    };
    let media = |leaves: &BTreeSet<Leaf>| leaves.iter().map(medium).collect::<BTreeSet<_>>();
    let is_adopted =
        |device: &str| adopted.is_some_and(|adopted| adopted.disks.iter().any(|disk| disk.device == device));
    let key = |device: &str| {
        let drive = SeenDrive { device: device.to_owned(), ..SeenDrive::default() };
        drive.device_name().or(is_adopted(device).then_some(device)).map(str::to_owned)
    };
    let seen_drives: Vec<Drive> = look
        .drives
        .iter()
        .map(|drive| {
            Drive { device: key(&drive.device), media: media(&drive.leaves), through: drive.drivers.clone() }
                .with_volumes_only()
        })
        .collect();
    let through = |drivers: &BTreeSet<String>| {
        drivers.iter().cloned().chain(PLAIN.map(str::to_owned)).collect::<BTreeSet<_>>()
    };
    let of_device = |device: &made::MadeDevice| {
        let made = device.medium.clone().unwrap_or_default();
        let (media, through) = (media(&made.leaves), through(&made.drivers));
        Drive { device: device.name.clone(), media, through }
    };
    let of_drive = |made: &made::MadeMedium| Drive {
        device: None,
        media: media(&made.leaves),
        through: through(&made.drivers),
    };
    let known_drives = match adopted {
        None => made.devices.iter().map(of_device).chain(made.drives.iter().map(of_drive)).collect(),
        Some(adopted) => {
            let disks = adopted.disks.iter().map(|disk| Drive {
                device: key(&disk.device),
                media: BTreeSet::from([Medium::Volume(disk.volume.clone())]),
                through: through(&BTreeSet::new()),
            });
            // A drive that was not adopted is one that the command names, or was ejected.
            let is_named = |drive: &&Drive| {
                drive
                    .media
                    .iter()
                    .all(|medium| matches!(medium, Medium::Other(name) if made.values.contains(name)))
            };
            let is_disk = |drive: &&Drive| {
                drive.device.as_ref().is_some_and(|device| {
                    adopted.disks.iter().any(|disk| key(&disk.device).as_ref() == Some(device))
                })
            };
            let others = seen_drives.iter().filter(|drive| !is_disk(drive)).filter(is_named).cloned();
            disks.chain(others).collect()
        }
    };
    let mut works: BTreeSet<String> = look.works.into_iter().collect();
    let limited = look.drives.iter().filter(|drive| drive.is_limited && !made.limits_drives);
    works.extend(limited.map(|drive| {
        let device = key(&drive.device).unwrap_or_else(|| drive.device.clone());
        format!("the requests of the disk {device} have been limited since the VM was started, which would be lost")
    }));
    let known = Shape {
        devices: made
            .devices
            .iter()
            .map(|device| Device {
                name: device.name.clone(),
                kind: device.kind.clone(),
                settings: device.settings.clone(),
            })
            .collect(),
        drives: known_drives,
        spare_devices: made.drives.len(),
        works: BTreeSet::new(),
    };
    let devices = look.devices.into_iter();
    let seen = Shape {
        devices: devices
            .map(|device| Device { name: device.name, kind: device.kind, settings: device.settings })
            .collect(),
        drives: seen_drives,
        spare_devices: 0,
        works,
    };
    (known, seen)
}

/// Removes filters of images without a volume below, which concern the hypervisor alone.
trait VolumesOnly {
    fn with_volumes_only(self) -> Self;
}

impl VolumesOnly for Drive {
    fn with_volumes_only(mut self) -> Self {
        if !self.media.iter().any(|medium| matches!(medium, Medium::Volume(_))) {
            self.through.clear();
        }
        self
    }
}

#[cfg(test)]
mod tests;
