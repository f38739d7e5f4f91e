//! Changes the side of a domain's disks, step by step. [`migration::vm::copied`] chooses the steps.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use api::{NewVolume, RemoveVolume, VolumeSource};
use hypervisor::libvirt::{
    Definition, DiskSource, Domain, Libvirt, LibvirtError, NbdSource, disk_for_export, disk_for_file, disks,
    with_export, with_file,
};
use hypervisor::qemu::RECONNECT_SECONDS;
use migration::vm::copied::{Copied, Goal, Image, Over, Step};

use super::files;
use super::refusals::{ended, explain};
use super::seen::Look;
use crate::error::RequestError;
use crate::fail_point::{self, Step as FailPoint};
use crate::host::{VmOrders, blocking};
use crate::vms::orders::exchange::name_of;
use crate::vms::{Adopted, AdoptedDisk, CopyNote, GivenImage, Turn, VmError, Wanted};

/// How often the progress of copies is checked.
const POLL: Duration = Duration::from_millis(250);
/// The pause before the next attempt to reach libvirt.
const UNREACHABLE_PAUSE: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
pub(crate) struct Left {
    pub(crate) is_gone: bool,
    /// Images that the domain has stopped using.
    pub(crate) images: Vec<PathBuf>,
    /// The places of the released disks, for messages.
    pub(crate) places: Vec<String>,
}

impl VmOrders {
    /// Brings the disks of a domain to the requested side, without a time limit, or back. The requested side may change
    /// meanwhile. Returns the images that the domain had and has left; the error says why the disks are where they were before.
    pub(crate) async fn change_sides(
        self: &Arc<Self>,
        name: &str,
        _turn: Turn,
    ) -> Result<Left, RequestError> {
        let mut under_way: Option<(Wanted, Copied)> = None;
        let mut failure = None;
        loop {
            let Some(adopted) = self.vms.adoptions()?.get(name) else { return Ok(Left::default()) };
            let wanted = adopted.libvirt.as_ref().map(|domain| domain.wanted);
            let Some(wanted) = wanted else { return Ok(Left::default()) };
            let (asked, copied) = under_way.get_or_insert_with(|| (wanted, Copied::towards(goal_of(wanted))));
            if *asked != wanted {
                *asked = wanted;
                copied.turn_to(goal_of(wanted));
            }
            let look = match self.look_at_domain(&adopted).await {
                Ok(look) => look,
                Err(error) => {
                    self.vms.holds.tell(name, Some(error.message()));
                    tokio::time::sleep(UNREACHABLE_PAUSE).await;
                    continue;
                }
            };
            let step = copied.next_step(look.seen, &look.disks);
            tracing::debug!(vm = %name, ?step, domain = ?look.seen, disks = ?look.disks, "exchanging the disks of a domain");
            if let Some(obstacle) = copied.obstacle() {
                let why = explain(&adopted, look.presence, obstacle);
                self.vms.holds.tell(name, Some(why.message()));
                failure.get_or_insert(why);
            }
            let taken = match step {
                Step::Complete(Goal::Volumes) => {
                    self.vms.holds.tell(name, None);
                    let left = self.settle_adopted(&look, adopted).await?;
                    return match wanted {
                        Wanted::Volumes => Ok(Left { images: left, ..Left::default() }),
                        Wanted::Files => Err(failure.unwrap_or_else(|| ended(name))),
                    };
                }
                Step::Complete(Goal::Files) => {
                    self.vms.holds.tell(name, None);
                    self.settle_released(&adopted).await?;
                    return match wanted {
                        Wanted::Files => Ok(left_by(&look, &adopted)),
                        Wanted::Volumes => Err(failure.unwrap_or_else(|| ended(name))),
                    };
                }
                Step::Wait => {
                    tokio::time::sleep(POLL).await;
                    Ok(())
                }
                step => self.take_side_step(&adopted, &look, step).await,
            };
            match (taken, step) {
                (Ok(()), Step::Copy(index)) => copied.copy_begun(index),
                (Ok(()), _) => {}
                (Err(error), _) => {
                    let reason = error.message();
                    tracing::warn!(vm = %name, reason, "a step of the exchange of its disks failed");
                    self.vms.holds.tell(name, Some(reason));
                    failure.get_or_insert(error);
                    let pause = copied.failed(look.seen, &look.disks);
                    tokio::time::sleep(pause).await;
                }
            }
        }
    }

    async fn take_side_step(
        self: &Arc<Self>,
        adopted: &Adopted,
        look: &Look,
        step: Step,
    ) -> Result<(), RequestError> {
        let name = &adopted.name;
        let failed = |source| RequestError::from(VmError::Libvirt { vm: name.clone(), source });
        let gone = || RequestError::from(VmError::NotRunning(name.clone()));
        let of = |index: usize| adopted.disks.get(index).ok_or_else(gone);
        let domain = || look.domain.as_ref().ok_or_else(gone);
        let libvirt = &look.libvirt;
        fail_point::before(FailPoint::Exchange);
        let taken = match step {
            Step::Serve(index) => self.serve_domain(adopted, of(index)?).await,
            Step::Copy(index) => {
                let (kept, domain) = (of(index)?, domain()?);
                let seen = look.disks.get(index).ok_or_else(gone)?;
                match seen.over {
                    Over::File => {
                        let to = disk_for_export(&self.source_of(kept));
                        // The volume exists already, and reads as zeroes.
                        libvirt.copy_disk_onto(domain, &kept.device, &to).await.map_err(failed)?;
                        self.have_copy_wait(name, libvirt, domain, kept).await;
                        Ok(())
                    }
                    _ => {
                        self.require_plain(adopted, kept, libvirt, domain).await?;
                        self.copy_to_file(adopted, index, libvirt, domain).await
                    }
                }
            }
            Step::Pivot(index) => {
                let kept = of(index)?;
                if kept.copy == CopyNote::Unused {
                    self.require_plain(adopted, kept, libvirt, domain()?).await?;
                    // N.B. Before the pivot is ordered: from here on the copy may be the disk.
                    self.note_disk(adopted, index, |kept| kept.copy = CopyNote::Pivoted).await?;
                }
                libvirt.pivot(domain()?, &kept.device).await.map_err(failed)
            }
            Step::Cancel(index) => {
                libvirt.cancel_block_job(domain()?, &of(index)?.device).await.map_err(failed)
            }
            Step::ClearFile(index, image) => self.clear_file(adopted, index, image).await,
            Step::StopServing(index, image) => self.stop_serving_disk(adopted, index, look, image).await,
            Step::WriteDown(index) => {
                let (kept, domain) = (of(index)?, domain()?);
                let definition = libvirt.definition(domain, Definition::Persistent).await.map_err(failed)?;
                let (file, format) = match &kept.given_back {
                    Some(given) if !look.has_qemu() => (&given.file, &given.format),
                    _ => (&kept.file, &kept.format),
                };
                let changed = with_file(&definition, &kept.device, &file.to_string_lossy(), format);
                libvirt.define(&changed.map_err(failed)?).await.map_err(failed)
            }
            Step::Wait | Step::Complete(_) => Ok(()),
        };
        fail_point::after(FailPoint::Exchange);
        taken
    }

    /// Makes an empty volume for a disk, to which the domain's QEMU may connect.
    async fn serve_domain(
        self: &Arc<Self>,
        adopted: &Adopted,
        kept: &AdoptedDisk,
    ) -> Result<(), RequestError> {
        let domain = adopted.libvirt.as_ref();
        let source = VolumeSource::Create {
            size_bytes: Some(kept.size_bytes),
            store: domain.and_then(|domain| domain.store.clone()),
            image: None,
            format: None,
        };
        let order = NewVolume { name: kept.volume.clone(), source, export: api::ExportSettings::default() };
        Arc::clone(&self.volume_orders).create_volume(order).await?;
        let Some(user) = domain.and_then(|domain| domain.user) else { return Ok(()) };
        let granted = self.sockets.grant(&kept.volume, user);
        granted.map_err(|error| RequestError::VolumeUnavailable {
            volume: kept.volume.clone(),
            reason: crate::error::with_causes(&error),
        })
    }

    /// Removes the volume of a disk that no QEMU uses.
    async fn stop_serving_disk(
        self: &Arc<Self>,
        adopted: &Adopted,
        index: usize,
        look: &Look,
        image: Image,
    ) -> Result<(), RequestError> {
        let Some(kept) = adopted.disks.get(index) else { return Ok(()) };
        if let Some(domain) = look.domain.as_ref().filter(|_| look.has_qemu()) {
            let failed = |source| RequestError::from(VmError::Libvirt { vm: adopted.name.clone(), source });
            // N.B. Before the server ends: QEMU flushes a node when it removes it, and stands still if that flush has to wait.
            look.libvirt.drop_waiting_nodes(domain).await.map_err(failed)?;
            let socket = self.sockets.volume_socket(&kept.volume);
            let used = look.libvirt.export_use(domain, &socket).await.map_err(failed)?;
            if let Some(node) = used.nodes.first() {
                let why = format!("{}: the node {node} of its QEMU still uses the volume", kept.device);
                return Err(VmError::Disk { vm: adopted.name.clone(), why }.into());
            }
        }
        if image == Image::Keep {
            self.remember_image(adopted, index).await?;
        }
        // N.B. Without force: a connected client uses the volume, whatever is known of the domain.
        let how = RemoveVolume { keep_image: image == Image::Keep, ..RemoveVolume::default() };
        Arc::clone(&self.volume_orders).remove_unused_volume(kept.volume.clone(), how).await.map(drop)
    }

    /// Refuses a disk if its QEMU has something between it and the volume, whatever libvirt says.
    async fn require_plain(
        &self,
        adopted: &Adopted,
        kept: &AdoptedDisk,
        libvirt: &Libvirt,
        domain: &Domain,
    ) -> Result<(), RequestError> {
        let socket = self.sockets.volume_socket(&kept.volume);
        let used = libvirt.export_use(domain, &socket).await;
        let used = used.map_err(|source| VmError::Libvirt { vm: adopted.name.clone(), source })?;
        match used.only_disk() {
            Ok(_) => Ok(()),
            Err(found) => Err(super::refusals::stands_above(adopted, kept, &found)),
        }
    }

    /// Begins to copy a disk to a new file, at a free path.
    async fn copy_to_file(
        self: &Arc<Self>,
        adopted: &Adopted,
        index: usize,
        libvirt: &Libvirt,
        domain: &Domain,
    ) -> Result<(), RequestError> {
        let Some(kept) = adopted.disks.get(index).cloned() else { return Ok(()) };
        let (file, vm, found) = (kept.file.clone(), adopted.name.clone(), kept.found);
        let custody = self.custody.clone();
        let made = blocking(move || {
            let refused = |error: std::io::Error| match error.kind() {
                std::io::ErrorKind::AlreadyExists => RequestError::TargetExists { path: file.clone() },
                _ => RequestError::storage("make", &file, &error),
            };
            // The domain's former image, of an adoption that is reversed half way. The volume has newer content.
            if found.is_some() {
                files::put_aside(&custody, &file, &vm, found).map_err(refused)?;
            }
            files::make_copy(&file).map_err(refused)
        });
        let made = made.await?;
        let noted = self.note_disk(adopted, index, |kept| {
            (kept.found, kept.copy) = (Some(made), CopyNote::Unused);
        });
        if let Err(error) = noted.await {
            let (custody, file, vm) = (self.custody.clone(), kept.file.clone(), adopted.name.clone());
            blocking(move || Ok(files::discard_copy(&custody, &file, &vm, made).ok())).await?;
            return Err(error);
        }
        let to = disk_for_file(&kept.file.to_string_lossy(), &kept.format);
        let begun = libvirt.copy_disk(domain, &kept.device, &to).await;
        begun.map_err(|source| VmError::Libvirt { vm: adopted.name.clone(), source }.into())
    }

    /// Deletes a failed copy of a disk.
    async fn clear_file(
        self: &Arc<Self>,
        adopted: &Adopted,
        index: usize,
        image: Image,
    ) -> Result<(), RequestError> {
        let Some(kept) = adopted.disks.get(index) else { return Ok(()) };
        let (file, vm, found) = (kept.file.clone(), adopted.name.clone(), kept.found);
        let Some(made) = found else { return Ok(()) };
        let custody = self.custody.clone();
        let cleared = blocking(move || {
            let cleared = match image {
                Image::Discard => files::discard_copy(&custody, &file, &vm, made),
                Image::Keep => files::put_aside(&custody, &file, &vm, found).map(drop),
            };
            cleared.map_err(|error| RequestError::storage("take away", &file, &error))
        });
        cleared.await?;
        self.note_disk(adopted, index, |kept| (kept.found, kept.copy) = (None, CopyNote::None)).await
    }

    async fn note_disk(
        self: &Arc<Self>,
        adopted: &Adopted,
        index: usize,
        change: impl FnOnce(&mut AdoptedDisk),
    ) -> Result<(), RequestError> {
        // Its order may have changed since it was read.
        let adopted = self.vms.adoptions()?.get(&adopted.name);
        let Some(mut adopted) = adopted else { return Ok(()) };
        let Some(kept) = adopted.disks.get_mut(index) else { return Ok(()) };
        change(kept);
        self.remember_adopted(adopted).await
    }

    /// Records the path of a volume's image that is about to become the disk itself, before the volume is removed.
    async fn remember_image(self: &Arc<Self>, adopted: &Adopted, index: usize) -> Result<(), RequestError> {
        let Some(kept) = adopted.disks.get(index) else { return Ok(()) };
        let record = self.claims.record_named(&kept.volume)?;
        let place = &record.image.place;
        let Some(file) = place.file() else {
            let detail = "a domain that is shut off gets its disks back as files of this host; move the volume to a folder here first";
            return Err(RequestError::ImageUnsuitable {
                path: place.name().into(),
                detail: detail.to_owned(),
            });
        };
        let given = GivenImage { file: PathBuf::from(file), format: name_of(record.image.format).to_owned() };
        self.note_disk(adopted, index, |kept| kept.given_back = Some(given)).await
    }

    /// Puts the former images aside, once all disks are over their volumes.
    async fn settle_adopted(
        self: &Arc<Self>,
        look: &Look,
        adopted: Adopted,
    ) -> Result<Vec<PathBuf>, RequestError> {
        let mut adopted = adopted;
        let name = adopted.name.clone();
        let mut left = Vec::new();
        if let Some(found) = &look.domain {
            self.keep_waiting(&name, look, found, &adopted.disks).await;
            if let Err(error) = self.check_definition(look, found, &adopted.disks).await {
                tracing::warn!(vm = %name, %error, "it is unknown which disks the domain has at its next start");
            }
        }
        for (kept, seen) in adopted.disks.iter_mut().zip(&look.disks) {
            kept.given_back = None;
            let Some(found) = kept.found.filter(|_| seen.over == Over::Export) else { continue };
            let (custody, file, vm) = (self.custody.clone(), kept.file.clone(), name.clone());
            let aside = blocking(move || Ok(files::put_aside(&custody, &file, &vm, Some(found)))).await?;
            match aside {
                Ok(aside) => {
                    (kept.found, kept.copy) = (None, CopyNote::None);
                    let Some(aside) = aside else { continue };
                    tracing::info!(vm = %name, disk = %kept.device, kept = %aside.display(), "kept the former image of the \
                        domain");
                    left.push(aside);
                }
                Err(error) => {
                    tracing::warn!(vm = %name, file = %kept.file.display(), %error, "left the former image of the domain \
                        unchanged");
                }
            }
        }
        let Some(domain) = &mut adopted.libvirt else { return Ok(left) };
        (domain.wanted, domain.is_settled) = (Wanted::Volumes, true);
        tracing::info!(vm = %name, disks = adopted.disks.len(), "the domain's disks are served");
        self.remember_adopted(adopted).await?;
        Ok(left)
    }

    /// Forgets the domain, once all its disks are in files.
    async fn settle_released(self: &Arc<Self>, adopted: &Adopted) -> Result<(), RequestError> {
        let name = &adopted.name;
        self.forget_adopted(name).await?;
        tracing::info!(vm = %name, "the domain has its disks in files");
        Ok(())
    }

    /// Configures the copy of a disk to wait while this daemon is away, if libvirt has not done so. The disk then waits too,
    /// from its first moment on the copy.
    async fn have_copy_wait(&self, name: &str, libvirt: &Libvirt, domain: &Domain, kept: &AdoptedDisk) {
        let had = async {
            let found = disks(&libvirt.definition(domain, Definition::Current).await?)?;
            let disk = found.into_iter().find(|disk| disk.target == kept.device);
            match disk.and_then(|disk| disk.mirror) {
                Some(mirror) if !waits(&mirror.to) => {
                    libvirt.have_disk_wait(domain, &self.source_of(kept)).await
                }
                _ => Ok(()),
            }
        };
        if let Err(error) = had.await {
            tracing::warn!(
                vm = %name, disk = %kept.device, %error,
                "the copy would not survive a restart of the daemon, and would begin again"
            );
        }
    }

    /// Configures disks to wait while this daemon is away, if neither libvirt nor their copies have that setting.
    async fn keep_waiting(&self, name: &str, look: &Look, domain: &Domain, kept: &[AdoptedDisk]) {
        for (kept, disk) in kept.iter().zip(&look.defined) {
            if !look.has_qemu() || disk.as_ref().is_none_or(|disk| waits(&disk.source)) {
                continue;
            }
            let export = self.source_of(kept);
            let had = match look.libvirt.has_disk_wait(domain, &export).await {
                Ok(false) => look.libvirt.have_disk_wait(domain, &export).await,
                had => had.map(drop),
            };
            if let Err(error) = had {
                tracing::warn!(
                    vm = %name, disk = %kept.device, %error,
                    "libvirt would not make the disk wait for a restarted daemon: its guest would see errors"
                );
            }
        }
    }

    /// Makes the domain's next start use these disks as well: libvirt changes the definition only if it named the same image.
    async fn check_definition(
        &self,
        look: &Look,
        domain: &Domain,
        kept: &[AdoptedDisk],
    ) -> Result<(), LibvirtError> {
        let libvirt = &look.libvirt;
        if !libvirt.is_persistent(domain).await? {
            return Ok(());
        }
        let mut definition = libvirt.definition(domain, Definition::Persistent).await?;
        let defined = disks(&definition)?;
        let mut is_changed = false;
        for kept in kept {
            let disk = defined.iter().find(|disk| disk.target == kept.device);
            if disk.is_some_and(|disk| matches!(&disk.source, DiskSource::File(file) if *file == kept.file)) {
                definition = with_export(&definition, &kept.device, &self.source_of(kept))?;
                is_changed = true;
            }
        }
        if is_changed { libvirt.define(&definition).await } else { Ok(()) }
    }

    fn source_of(&self, kept: &AdoptedDisk) -> NbdSource {
        NbdSource {
            socket: self.sockets.volume_socket(&kept.volume),
            export: kept.volume.clone(),
            reconnect_s: Some(RECONNECT_SECONDS),
        }
    }
}

/// Returns whether libvirt makes requests wait for a lost server.
fn waits(source: &DiskSource) -> bool {
    matches!(source, DiskSource::Nbd(source) if source.reconnect_s.is_some())
}

/// Returns the result of a release: the present places of the disks, or the images that a deleted domain leaves.
fn left_by(look: &Look, adopted: &Adopted) -> Left {
    let image = |kept: &AdoptedDisk| Some(kept.given_back.as_ref()?.file.clone());
    if look.domain.is_none() {
        let images = adopted.disks.iter().filter_map(image).collect();
        return Left { is_gone: true, images, places: Vec::new() };
    }
    let given = adopted.disks.iter().zip(&look.disks).filter(|(_, seen)| seen.over == Over::File);
    let place = |kept: &AdoptedDisk| {
        let file = image(kept).unwrap_or_else(|| kept.file.clone());
        format!("{} is {}", kept.device, file.display())
    };
    Left { places: given.map(|(kept, _)| place(kept)).collect(), ..Left::default() }
}

fn goal_of(wanted: Wanted) -> Goal {
    match wanted {
        Wanted::Volumes => Goal::Volumes,
        Wanted::Files => Goal::Files,
    }
}
