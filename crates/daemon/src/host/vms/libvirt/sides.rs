//! Disks of a domain change sides, step by step: [`migration::vm::copied`] says which, here it is carried out.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use api::{NewVolume, RemoveVolume, VolumeSource};
use hypervisor::libvirt::{
    Definition, Disk, DiskSource, Domain, DomainState, Libvirt, LibvirtError, NbdSource, disk_for_export,
    disk_for_file, disks, with_export, with_file,
};
use hypervisor::qemu::RECONNECT_SECONDS;
use migration::vm::copied::{Copied, Goal, Image, Job, Over, SeenDisk, Step};

use super::found;
use crate::error::RequestError;
use crate::fail_point::{self, Step as FailPoint};
use crate::files::folder_entries::rename_without_replacing;
use crate::host::vms::exchange::name_of;
use crate::host::{Host, blocking};
use crate::vms::{Adopted, AdoptedDisk, LibvirtDomain, Turn, VmError, Wanted};

/// How often copies are looked at.
const POLL: Duration = Duration::from_millis(250);
/// Pause before a libvirt that cannot be reached is tried again.
const UNREACHABLE_PAUSE: Duration = Duration::from_secs(1);
/// Names that are tried for an image that is put aside.
const ASIDE_MAX: u32 = 100;

/// What is seen of a domain.
struct Look {
    libvirt: Libvirt,
    /// Absent: libvirt has no such domain any more.
    domain: Option<Domain>,
    is_running: bool,
    disks: Vec<SeenDisk>,
    /// Of each adopted disk, what the definition says.
    defined: Vec<Option<Disk>>,
}

impl Host {
    /// Brings the disks of a domain to the side that is wanted, however long that takes, or back; what is wanted may change
    /// meanwhile. Returns the images that it had and has left.
    ///
    /// # Errors
    /// Why they are where they were before.
    pub(super) async fn change_sides(
        self: &Arc<Self>,
        name: &str,
        _turn: Turn,
    ) -> Result<Vec<PathBuf>, RequestError> {
        let mut under_way: Option<(Wanted, Copied)> = None;
        let mut failure = None;
        loop {
            let Some(adopted) = self.adoptions()?.get(name) else { return Ok(Vec::new()) };
            let wanted = adopted.libvirt.as_ref().map(|domain| domain.wanted);
            let Some(wanted) = wanted else { return Ok(Vec::new()) };
            let (asked, copied) = under_way.get_or_insert_with(|| (wanted, Copied::towards(goal_of(wanted))));
            if *asked != wanted {
                *asked = wanted;
                copied.turn_to(goal_of(wanted));
            }
            let look = match self.look_at_domain(&adopted).await {
                Ok(look) => look,
                Err(error) => {
                    self.vms.holds.tell(name, Some(error.to_string()));
                    tokio::time::sleep(UNREACHABLE_PAUSE).await;
                    continue;
                }
            };
            let step = copied.next_step(look.is_running, &look.disks);
            tracing::debug!(vm = %name, ?step, disks = ?look.disks, "the disks of a domain change sides");
            let taken = match step {
                Step::Complete(Goal::Volumes) => {
                    self.vms.holds.tell(name, None);
                    let left = self.settle_adopted(&look, adopted).await?;
                    return match wanted {
                        Wanted::Volumes => Ok(left),
                        Wanted::Files => Err(failure.unwrap_or_else(|| ended(name))),
                    };
                }
                Step::Complete(Goal::Files) => {
                    self.vms.holds.tell(name, None);
                    self.settle_released(&adopted).await?;
                    return match wanted {
                        Wanted::Files => Ok(Vec::new()),
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
                    tracing::warn!(vm = %name, reason, "a step of the change of sides of its disks failed");
                    self.vms.holds.tell(name, Some(reason));
                    failure.get_or_insert(error);
                    let pause = copied.failed(&look.disks);
                    tokio::time::sleep(pause).await;
                }
            }
        }
    }

    async fn look_at_domain(&self, adopted: &Adopted) -> Result<Look, LibvirtError> {
        let libvirt = Libvirt::connect(Some(&adopted.monitor)).await?;
        let domain = match &adopted.libvirt {
            Some(domain) => found(&libvirt, domain).await?,
            None => None,
        };
        let Some(domain) = domain else {
            let gone = |kept: &AdoptedDisk| SeenDisk {
                over: Over::Gone,
                job: Job::None,
                is_served: self.record_named(&kept.volume).is_ok(),
            };
            let disks = adopted.disks.iter().map(gone).collect();
            let defined = vec![None; adopted.disks.len()];
            return Ok(Look { libvirt, domain: None, is_running: false, disks, defined });
        };
        let is_running = libvirt.state(&domain).await? != DomainState::ShutOff;
        let found = disks(&libvirt.definition(&domain, Definition::Current).await?)?;
        let (mut seen, mut defined) = (Vec::new(), Vec::new());
        for kept in &adopted.disks {
            let disk = found.iter().find(|disk| disk.target == kept.device).cloned();
            let job = match &disk {
                Some(disk) if is_running => self.job_of(&libvirt, &domain, kept, disk).await?,
                _ => Job::None,
            };
            let over = disk.as_ref().map_or(Over::Gone, |disk| self.over_of(kept, &disk.source));
            seen.push(SeenDisk { over, job, is_served: self.record_named(&kept.volume).is_ok() });
            defined.push(disk);
        }
        Ok(Look { libvirt, domain: Some(domain), is_running, disks: seen, defined })
    }

    async fn job_of(
        &self,
        libvirt: &Libvirt,
        domain: &Domain,
        kept: &AdoptedDisk,
        disk: &Disk,
    ) -> Result<Job, LibvirtError> {
        let Some(mirror) = &disk.mirror else {
            let job = libvirt.block_job(domain, &kept.device).await?;
            return Ok(if job.is_some() { Job::Foreign } else { Job::None });
        };
        let to = self.over_of(kept, &mirror.to);
        let is_ours = matches!(
            (self.over_of(kept, &disk.source), to),
            (Over::File, Over::Export) | (Over::Export, Over::File)
        );
        Ok(match (is_ours, mirror.is_ready) {
            (false, _) => Job::Foreign,
            (true, true) => Job::CaughtUp,
            (true, false) => Job::Copying,
        })
    }

    fn over_of(&self, kept: &AdoptedDisk, source: &DiskSource) -> Over {
        match source {
            DiskSource::File(file) if *file == kept.file => Over::File,
            DiskSource::Nbd(source) if source.socket == self.sockets.volume_socket(&kept.volume) => {
                Over::Export
            }
            _ => Over::Elsewhere,
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
                        // It is there, and reads as zeroes.
                        libvirt.copy_disk_onto(domain, &kept.device, &to).await.map_err(failed)?;
                        self.have_copy_wait(name, libvirt, domain, kept).await;
                        Ok(())
                    }
                    _ => copy_to_file(adopted, kept, libvirt, domain).await,
                }
            }
            Step::Pivot(index) => libvirt.pivot(domain()?, &of(index)?.device).await.map_err(failed),
            Step::Cancel(index) => {
                libvirt.cancel_block_job(domain()?, &of(index)?.device).await.map_err(failed)
            }
            Step::StopServing(index, image) => {
                let kept = of(index)?;
                // N.B. Before its server is gone: QEMU flushes a node that it removes, and stands still for as long as that waits.
                if let Some(domain) = look.domain.as_ref().filter(|_| look.is_running) {
                    libvirt.drop_waiting_nodes(domain).await.map_err(failed)?;
                }
                if image == Image::Keep {
                    self.remember_image(adopted, index).await?;
                }
                let how = RemoveVolume { force: true, keep_image: image == Image::Keep, delete_image: false };
                Arc::clone(self).remove_unused_volume(kept.volume.clone(), how).await.map(drop)
            }
            Step::WriteDown(index) => {
                let (kept, domain) = (of(index)?, domain()?);
                let definition = libvirt.definition(domain, Definition::Persistent).await.map_err(failed)?;
                let file = kept.file.to_string_lossy();
                let changed = with_file(&definition, &kept.device, &file, &kept.format).map_err(failed)?;
                libvirt.define(&changed).await.map_err(failed)
            }
            Step::Wait | Step::Complete(_) => Ok(()),
        };
        fail_point::after(FailPoint::Exchange);
        taken
    }

    /// Makes an empty volume for a disk, that the domain's QEMU may connect to.
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
        Arc::clone(self).create_volume(order).await?;
        let Some(user) = domain.and_then(|domain| domain.user) else { return Ok(()) };
        let granted = self.sockets.grant(&kept.volume, user);
        granted.map_err(|error| RequestError::VolumeUnavailable {
            volume: kept.volume.clone(),
            reason: crate::error::with_causes(&error),
        })
    }

    /// Remembers where the image of a volume is that is about to be the disk itself, before the volume is removed.
    async fn remember_image(self: &Arc<Self>, adopted: &Adopted, index: usize) -> Result<(), RequestError> {
        let mut adopted = adopted.clone();
        let Some(kept) = adopted.disks.get_mut(index) else { return Ok(()) };
        let record = self.record_named(&kept.volume)?;
        let place = &record.image.place;
        let Some(file) = place.file() else {
            let detail = "a domain that is shut off gets its disks back as files of this host; move the volume to a folder here first";
            return Err(RequestError::ImageUnsuitable {
                path: place.name().into(),
                detail: detail.to_owned(),
            });
        };
        kept.file = file.into();
        kept.format = name_of(record.image.format).to_owned();
        self.remember_adopted(adopted).await
    }

    /// All disks are over their volumes: what they were in is put aside.
    async fn settle_adopted(
        self: &Arc<Self>,
        look: &Look,
        adopted: Adopted,
    ) -> Result<Vec<PathBuf>, RequestError> {
        let mut adopted = adopted;
        let name = adopted.name.clone();
        let mut left = Vec::new();
        let Some(domain) = &mut adopted.libvirt else { return Ok(left) };
        if let Some(found) = &look.domain {
            self.keep_waiting(&name, look, found, &adopted.disks).await;
            if let Err(error) = self.check_definition(look, found, &adopted.disks).await {
                tracing::warn!(vm = %name, %error, "what the domain has at its next start is not known");
            }
        }
        for kept in &adopted.disks {
            let (file, vm, owns) = (kept.file.clone(), name.clone(), domain.owns_files);
            let put = move || if owns { delete_copy(&file) } else { put_aside(&file, &vm) };
            let aside = blocking(move || Ok(put())).await?;
            match aside {
                Ok(Some(aside)) => {
                    tracing::info!(vm = %name, disk = %kept.device, kept = %aside.display(), "the image that the domain had is kept");
                    left.push(aside);
                }
                Ok(None) => {}
                Err(error) => {
                    tracing::warn!(vm = %name, file = %kept.file.display(), %error, "an image that the domain had is left as it was");
                }
            }
        }
        domain.wanted = Wanted::Volumes;
        (domain.is_settled, domain.owns_files) = (true, false);
        tracing::info!(vm = %name, disks = adopted.disks.len(), "the domain's disks are served");
        self.remember_adopted(adopted).await?;
        Ok(left)
    }

    /// All disks are in files: nothing of the domain is ours any more.
    async fn settle_released(self: &Arc<Self>, adopted: &Adopted) -> Result<(), RequestError> {
        let name = &adopted.name;
        adopted.disks.iter().for_each(|kept| self.sockets.grants().take(&kept.volume));
        self.forget_adopted(name).await?;
        tracing::info!(vm = %name, "the domain has its disks in files");
        Ok(())
    }

    /// Has the copy of a disk wait for this daemon when it is away, where libvirt has not seen to that: the disk waits then, too,
    /// from its first moment there.
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
                "the copy does not wait for a daemon that is killed: it would begin anew"
            );
        }
    }

    /// Has disks wait for this daemon when it is away, where neither libvirt nor their copies have seen to that.
    async fn keep_waiting(&self, name: &str, look: &Look, domain: &Domain, kept: &[AdoptedDisk]) {
        for (kept, disk) in kept.iter().zip(&look.defined) {
            if !look.is_running || disk.as_ref().is_none_or(|disk| waits(&disk.source)) {
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
                    "libvirt does not have the disk wait for a daemon that is killed: its guest would see errors"
                );
            }
        }
    }

    /// Sees that the domain's next start has its disks here as well: libvirt changes that only if it named the same image.
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

/// Whether libvirt has requests wait for a server that has gone.
fn waits(source: &DiskSource) -> bool {
    matches!(source, DiskSource::Nbd(source) if source.reconnect_s.is_some())
}

/// Begins to copy a disk to its file.
async fn copy_to_file(
    adopted: &Adopted,
    kept: &AdoptedDisk,
    libvirt: &Libvirt,
    domain: &Domain,
) -> Result<(), RequestError> {
    let failed = |source| RequestError::from(VmError::Libvirt { vm: adopted.name.clone(), source });
    let owns_files = adopted.libvirt.as_ref().is_some_and(|domain: &LibvirtDomain| domain.owns_files);
    let file = kept.file.clone();
    let is_there = blocking(move || {
        // What an attempt before has left.
        let deleted = if owns_files { delete_copy(&file).map(drop) } else { Ok(()) };
        deleted.map_err(|error| RequestError::storage("delete", &file, &error))?;
        Ok(file.exists())
    });
    let is_there = is_there.await?;
    let to = disk_for_file(&kept.file.to_string_lossy(), &kept.format);
    let begun = if is_there {
        // The disk's own file, which it has not left for long: an adoption is turned back half way.
        libvirt.copy_disk_onto(domain, &kept.device, &to).await
    } else {
        libvirt.copy_disk(domain, &kept.device, &to).await
    };
    begun.map_err(failed)
}

/// Deletes a copy that came to nothing.
fn delete_copy(file: &Path) -> std::io::Result<Option<PathBuf>> {
    match std::fs::remove_file(file) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        _ => Ok(None),
    }
}

/// Puts aside what a disk was in. Returns its new name.
fn put_aside(file: &Path, vm: &str) -> std::io::Result<Option<PathBuf>> {
    if !file.exists() {
        return Ok(None);
    }
    for number in 0..ASIDE_MAX {
        let suffix = if number == 0 { format!(".moved-{vm}") } else { format!(".moved-{vm}-{number}") };
        let mut aside = file.as_os_str().to_owned();
        aside.push(suffix);
        let aside = PathBuf::from(aside);
        match rename_without_replacing(file, &aside) {
            Ok(()) => return Ok(Some(aside)),
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    Err(std::io::ErrorKind::AlreadyExists.into())
}

fn goal_of(wanted: Wanted) -> Goal {
    match wanted {
        Wanted::Volumes => Goal::Volumes,
        Wanted::Files => Goal::Files,
    }
}

/// Why a change of sides came to nothing of which no step failed.
fn ended(name: &str) -> RequestError {
    let why = "the copy ended before it was whole: the store may be full, or the domain was shut off; this daemon's log, or libvirt's, says why";
    VmError::Disk { vm: name.to_owned(), why: why.to_owned() }.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_disk_was_in_is_kept_under_a_name_that_nothing_starts_from() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("web1.qcow2");
        for suffix in [".moved-web1", ".moved-web1-1"] {
            std::fs::write(&file, suffix).unwrap();
            let aside = put_aside(&file, "web1").unwrap().unwrap();
            assert!(aside.to_string_lossy().ends_with(suffix) && !file.exists(), "{aside:?}");
            assert_eq!(std::fs::read_to_string(&aside).unwrap(), suffix);
        }
        assert_eq!(put_aside(&file, "web1").unwrap(), None);
        std::fs::write(&file, "half a copy").unwrap();
        for _ in 0..2 {
            assert_eq!(delete_copy(&file).unwrap(), None);
            assert!(!file.exists());
        }
    }
}
