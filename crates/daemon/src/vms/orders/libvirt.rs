//! Domains of libvirt: libvirt itself copies their disks to volumes, and back, while the domains run.
//!
//! ```text
//!   adopt      refuse what others hold ─► remember ─► volume ─► libvirt copies ─► caught up ─► libvirt pivots ─► settled
//!   release    remember ─► libvirt copies to a file ─► caught up ─► pivots ─► volume and its image gone ─► forget
//!   release of a domain that is shut off:    volume gone, image kept ─► named in the definition ─► forget
//! ```
//! [`migration::vm::copied`] chooses the steps, and [`sides`] carries them out. libvirt's definition, locks and labels stay
//! correct throughout, because libvirt makes the changes; the domain is never paused. Each operation can take as long as a
//! copy, so the answer may come before its end. After a restart the daemon resumes it.

mod files;
mod refusals;
mod seen;
mod sides;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use api::{AdoptVm, RemoveVolume, Vm, VmState, WholeMove};
use hypervisor::libvirt::{
    Definition, Disk, DiskSource, Domain, DomainState, Libvirt, LibvirtError, Presence, disks, parse_uuid,
    qemu_user, show_uuid,
};
use migration::vm::copied::{Domain as Seen, Over, Volume, obstacle_to_release};

use self::sides::Left;
use crate::error::RequestError;
use crate::files::folder_entries::with_suffix;
use crate::host::{VmOrders, blocking};
use crate::journal::now_unix_ms;
use crate::stores::{StoreKind, image_name};
use crate::vms::{Adopted, AdoptedDisk, FileIdentity, LibvirtDomain, VmError, Wanted};

/// How long a copy may take before the answer says that it continues in the background.
const ANSWER_WITHIN: Duration = Duration::from_secs(60);
/// The suffix of a disk's file where the volume's own image has the file's name.
const RELEASED: &str = ".released";

impl VmOrders {
    /// Has the disks of a domain copied to new volumes. After an error the domain has its old disks.
    pub(crate) async fn adopt_domain(
        self: Arc<Self>,
        name: String,
        wanted: String,
        order: AdoptVm,
    ) -> Result<Vm, RequestError> {
        let turn = self.vms.turn(&name)?;
        if self.vms.adoptions()?.get(&name).is_some() || self.vms.get(&name).is_ok() {
            return Err(VmError::Exists(name).into());
        }
        let socket = order.libvirt_socket.as_deref().map(Path::new);
        let failed = |source| RequestError::from(VmError::Libvirt { vm: name.clone(), source });
        let libvirt = Libvirt::connect(socket).await.map_err(failed)?;
        let domain = libvirt.domain(&wanted).await.map_err(failed)?;
        let uuid = show_uuid(&domain.uuid);
        let is_same = |vm: &Adopted| vm.libvirt.as_ref().is_some_and(|domain| domain.uuid == uuid);
        if let Some(vm) = self.vms.adoptions()?.find(is_same) {
            return Err(VmError::Adopted(vm.name).into());
        }
        match libvirt.presence(&domain).await.map_err(failed)? {
            Presence::There(DomainState::Crashed) => return Err(refusals::crashed(&name, &domain.name)),
            Presence::There(_) => {}
            Presence::Absent | Presence::ManagedSave | Presence::Saved => {
                return Err(refuse(&name, "the domain is shut off; start it first: virsh start"));
            }
            Presence::Unknown(state) => {
                let why = format!(
                    "libvirt reports its state \"{state}\", which does not show whether it has a QEMU; start it first"
                );
                return Err(refuse(&name, &why));
            }
        }
        refuse_held(&name, &libvirt, &domain, Seen::Runs).await?;
        let store = self.stores.choose(order.store.as_deref())?;
        store.require_writable()?;
        let store = store.name().to_owned();
        let definition = libvirt.definition(&domain, Definition::Current).await.map_err(failed)?;
        let chosen = choose(&name, &disks(&definition).map_err(failed)?, &order.disks)?;
        let mut adopted = Adopted {
            name: name.clone(),
            monitor: libvirt.socket().to_owned(),
            disks: Vec::new(),
            added_unix_ms: now_unix_ms(),
            libvirt: Some(LibvirtDomain {
                name: domain.name.clone(),
                uuid,
                store: Some(store.clone()),
                user: qemu_user(&definition).map_err(failed)?,
                wanted: Wanted::Volumes,
                is_settled: false,
            }),
            is_bound: false,
            monitor_user: None,
            user: None,
        };
        let is_alone = chosen.len() == 1;
        for (index, disk) in chosen.into_iter().enumerate() {
            let free = if is_alone { name.clone() } else { format!("{name}-{index}") };
            let kept = self.kept((&name, &store), &libvirt, (&domain, disk), free).await?;
            adopted.disks.push(kept);
        }
        // N.B. Before anything is made, so that a daemon that is killed from here on leaves a record of the operation.
        self.remember_adopted(adopted).await?;
        let left = self.change_sides_within(&name, turn).await?.images;
        let mut vm = self.describe_vm(&name).await?;
        if !left.is_empty() {
            let left: Vec<_> = left.iter().map(|file| file.display().to_string()).collect();
            vm.message = Some(format!("its former images are kept: {}", left.join(", ")));
        }
        Ok(vm)
    }

    /// Returns the record of a disk. A disk that is over a volume of this host keeps that volume.
    async fn kept(
        self: &Arc<Self>,
        (name, store): (&str, &str),
        libvirt: &Libvirt,
        (domain, disk): (&Domain, Disk),
        free: String,
    ) -> Result<AdoptedDisk, RequestError> {
        let target = &disk.target;
        match disk.source {
            DiskSource::File(named) => {
                // N.B. A link stands for its image, which is put aside later and restored.
                let (file, found) = blocking(move || {
                    let file = named.canonicalize().unwrap_or(named);
                    let found = FileIdentity::at(&file).ok();
                    Ok((file, found))
                })
                .await?;
                self.refuse_same_place(name, store, (target, &file), &free)?;
                if self.volumes.service(&free).is_some() {
                    return Err(RequestError::VolumeExists(free));
                }
                let size = libvirt.disk_size(domain, target).await;
                let size = size.map_err(|source| VmError::Libvirt { vm: name.to_owned(), source })?;
                let (host, store) = (Arc::clone(self), store.to_owned());
                blocking(move || host.stores.choose(Some(&store))?.require_space(size.allocated_bytes))
                    .await?;
                let kept = AdoptedDisk::of_domain(target, free, file, &disk.format, size.guest_bytes);
                Ok(AdoptedDisk { found, ..kept })
            }
            DiskSource::Nbd(source) => {
                let record = self.claims.record_named(&source.export).ok();
                let record = record.filter(|_| self.sockets.volume_socket(&source.export) == source.socket);
                let Some(record) = record else {
                    return Err(refuse(
                        name,
                        &format!("{target} is over an NBD export that is none of this host's volumes"),
                    ));
                };
                let beside = record.image.place.file().map(|file| format!("{file}{RELEASED}"));
                let file = beside.map(PathBuf::from).unwrap_or_default();
                Ok(AdoptedDisk::of_domain(target, source.export, file, "raw", record.size_bytes))
            }
            DiskSource::None | DiskSource::Other(_) => Err(refuse(name, &format!("{target} is no file"))),
        }
    }

    /// Refuses to make a volume's image at the path of the disk.
    fn refuse_same_place(
        &self,
        name: &str,
        store: &str,
        (target, file): (&str, &Path),
        volume: &str,
    ) -> Result<(), RequestError> {
        let file_name = file.file_name().and_then(|name| name.to_str()).and_then(image_name);
        let has_name = file_name.is_some_and(|(named, _)| named == volume);
        let folder = match self.stores.choose(Some(store))?.kind() {
            StoreKind::Folder { folder, .. } => folder.path().canonicalize().ok(),
            StoreKind::Single(_) => None,
        };
        if has_name && folder.is_some() && file.parent() == folder.as_deref() {
            let why = format!(
                "{target} is {}, which is where the image of the new volume would be; name another store (--store), or another name for \
                 the VM: sterna vm adopt NAME --libvirt …",
                file.display()
            );
            return Err(refuse(name, &why));
        }
        Ok(())
    }

    /// Gives a domain its disks back: copies of the volumes in files if it runs, the volumes' own images if it is shut off.
    /// Ends a running adoption. After an error the remaining disks are served as before.
    pub(crate) async fn release_domain(self: Arc<Self>, name: String) -> Result<Vm, RequestError> {
        let shown = self.describe_vm(&name).await?;
        let mut adopted = self.adoption(&name)?;
        let Some(domain) = &mut adopted.libvirt else { return Err(VmError::NotFound(name).into()) };
        domain.wanted = Wanted::Files;
        let turn = match self.vms.turn(&name) {
            Ok(turn) => turn,
            // The copying operation notices the order.
            Err(_) if !domain.is_settled => {
                self.remember_adopted(adopted).await?;
                return self.describe_vm(&name).await;
            }
            Err(error) => return Err(error.into()),
        };
        let mut note = None;
        if domain.is_settled {
            domain.is_settled = false;
            adopted = self.prove_domain_releasable(adopted).await?;
            note = self.note_of_release(&adopted).await;
        }
        // N.B. Before anything is changed, so that a daemon that is killed from here on leaves a record of the order.
        self.remember_adopted(adopted).await?;
        let left = self.change_sides_within(&name, turn).await?;
        if self.vms.adoptions()?.get(&name).is_some() {
            return self.describe_vm(&name).await;
        }
        if left.is_gone {
            let images: Vec<_> = left.images.iter().map(|file| file.display().to_string()).collect();
            let kept =
                if images.is_empty() { String::new() } else { format!("; kept: {}", images.join(", ")) };
            let message = Some(format!(
                "the domain has been removed from libvirt, so its disks were not returned{kept}"
            ));
            return Ok(Vm { state: VmState::Unknown, message, volumes: Vec::new(), ..shown });
        }
        let said: Vec<String> = left.places.into_iter().chain(note).collect();
        let message = (!said.is_empty()).then(|| said.join("; "));
        Ok(Vm { message, volumes: Vec::new(), ..shown })
    }

    /// Checks whether a domain's disks can be released. Returns where they are to be; the error names the obstacle.
    async fn prove_domain_releasable(self: &Arc<Self>, adopted: Adopted) -> Result<Adopted, RequestError> {
        let mut adopted = adopted;
        let name = adopted.name.clone();
        let look = self.look_at_domain(&adopted).await?;
        if let Some(domain) = &look.domain {
            if look.presence == Some(Presence::There(DomainState::Crashed)) {
                return Err(refusals::crashed(&name, &domain.name));
            }
            if let Some(obstacle) = obstacle_to_release(look.seen, &look.disks) {
                return Err(refusals::explain(&adopted, look.presence, obstacle));
            }
            refuse_held(&name, &look.libvirt, domain, look.seen).await?;
        }
        for (kept, seen) in adopted.disks.iter_mut().zip(&look.disks) {
            match seen.volume {
                Volume::Here => {
                    // Obstacles to removing the volume are reported now, not when the disk has left it.
                    let (claim, volume) =
                        self.claims.claim_to_remove(&kept.volume, RemoveVolume::default()).await?;
                    self.claims.require_unordered(volume, &kept.volume)?;
                    drop(claim);
                }
                // A volume at another host must return first.
                _ if look.domain.is_some() && seen.over == Over::Export => {
                    self.claims.record_named(&kept.volume)?;
                }
                _ => {}
            }
            if look.has_qemu() && seen.over == Over::Export {
                self.find_place_for_copy(&name, kept)?;
            }
        }
        Ok(adopted)
    }

    /// Checks that no file has the path for the copy of a disk. The volume may have been moved to that very path.
    fn find_place_for_copy(&self, name: &str, kept: &mut AdoptedDisk) -> Result<(), RequestError> {
        let record = self.claims.record_named(&kept.volume)?;
        if record.image.place.file().map(Path::new) == Some(&kept.file) {
            kept.file = with_suffix(&kept.file, RELEASED);
        }
        if FileIdentity::at(&kept.file).is_err_and(|error| error.kind() == std::io::ErrorKind::NotFound) {
            return Ok(());
        }
        let why = format!(
            "{} is to be at {}, and there is a file already, which may be in use; nothing was changed: move that file away if \
             nothing uses it, or release the domain while it is shut off, which needs no copy",
            kept.device,
            kept.file.display()
        );
        Err(refuse(name, &why))
    }

    /// Returns a note about other definitions that name the volumes.
    async fn note_of_release(&self, adopted: &Adopted) -> Option<String> {
        let look = self.look_at_domain(adopted).await.ok()?;
        (look.presence == Some(Presence::Saved)).then(|| {
            "its memory was saved to a file (virsh save), which names the volumes: before it is restored, change that: virsh \
             save-image-edit FILE"
                .to_owned()
        })
    }

    pub(crate) async fn resume_domain(self: Arc<Self>, name: String) -> Result<Vm, RequestError> {
        let adopted = self.adoption(&name)?;
        let failed = |source| RequestError::from(VmError::Libvirt { vm: name.clone(), source });
        let libvirt = Libvirt::connect(Some(&adopted.monitor)).await.map_err(failed)?;
        let domain = match &adopted.libvirt {
            Some(domain) => found(&libvirt, domain).await.map_err(failed)?,
            None => None,
        };
        let domain = domain.ok_or_else(|| VmError::NotRunning(name.clone()))?;
        let held = |why: &str| Err(VmError::Paused { vm: name.clone(), why: why.to_owned() }.into());
        match libvirt.presence(&domain).await.map_err(failed)? {
            Presence::There(DomainState::Paused) => libvirt.resume(&domain).await.map_err(failed)?,
            Presence::There(DomainState::Crashed) => {
                return held("its guest has crashed; to have it run again: virsh reset");
            }
            Presence::There(DomainState::Suspended) => {
                return held("its guest has suspended it; to wake it: virsh dompmwakeup");
            }
            Presence::There(_) => {}
            Presence::Unknown(state) => return held(&format!("libvirt says \"{state}\"")),
            Presence::Absent | Presence::ManagedSave | Presence::Saved => {
                return Err(VmError::NotRunning(name).into());
            }
        }
        self.describe_vm(&name).await
    }

    /// Resumes the operations of an earlier daemon.
    pub(crate) fn settle_domains(self: &Arc<Self>) {
        for adopted in self.vms.adoptions().map(crate::vms::Adoptions::list).unwrap_or_default() {
            if adopted.libvirt.as_ref().is_none_or(|domain| domain.is_settled) {
                continue;
            }
            let host = Arc::clone(self);
            tokio::spawn(async move {
                let name = adopted.name;
                tracing::info!(vm = %name, "the exchange of a domain's disks was interrupted");
                for kept in &adopted.disks {
                    host.volume_orders.until_decided(&kept.volume).await;
                }
                let done = match host.vms.turn(&name) {
                    Ok(turn) => host.change_sides(&name, turn).await,
                    Err(error) => Err(RequestError::from(error)),
                };
                if let Err(error) = done {
                    tracing::warn!(vm = %name, reason = error.message(), "the disks of a domain");
                }
            });
        }
    }

    pub(crate) fn is_domain(&self, name: &str) -> Result<bool, RequestError> {
        Ok(self.vms.adoptions()?.get(name).is_some_and(|adopted| adopted.libvirt.is_some()))
    }

    fn adoption(&self, name: &str) -> Result<Adopted, RequestError> {
        Ok(self.vms.adoptions()?.get(name).ok_or_else(|| VmError::NotFound(name.to_owned()))?)
    }

    async fn change_sides_within(
        self: &Arc<Self>,
        name: &str,
        turn: crate::vms::Turn,
    ) -> Result<Left, RequestError> {
        let (host, changing) = (Arc::clone(self), name.to_owned());
        let work = tokio::spawn(async move { host.change_sides(&changing, turn).await });
        match tokio::time::timeout(ANSWER_WITHIN, work).await {
            Ok(done) => done.unwrap_or_else(|error| Err(RequestError::Internal(error.to_string()))),
            // The operation continues; the VM's description shows its progress.
            Err(_) => Ok(Left::default()),
        }
    }

    pub(crate) async fn describe_domain(
        &self,
        adopted: &Adopted,
        domain: &LibvirtDomain,
        answer_max: Duration,
    ) -> Vm {
        let looked = tokio::time::timeout(answer_max, look(adopted, domain)).await;
        let silent = || (VmState::Unknown, Some("libvirt does not answer".to_owned()), None);
        let (state, seen, hypervisor) = match looked {
            Ok(Ok(seen)) => seen,
            Ok(Err(error)) => (VmState::Unknown, Some(error.to_string()), None),
            Err(_) => silent(),
        };
        let under_way = match (domain.is_settled, domain.wanted) {
            (true, _) => None,
            (false, Wanted::Volumes) => Some("libvirt copies its disks to volumes"),
            (false, Wanted::Files) => Some("libvirt gives it its disks back"),
        };
        let said = [under_way.map(str::to_owned), self.vms.holds.why(&adopted.name), seen];
        let said: Vec<String> = said.into_iter().flatten().collect();
        Vm {
            name: adopted.name.clone(),
            state,
            message: (!said.is_empty()).then(|| said.join("; ")),
            volumes: adopted.disks.iter().map(|disk| disk.volume.clone()).collect(),
            images: Vec::new(),
            process: None,
            hypervisor,
            monitor: adopted.monitor.display().to_string(),
            libvirt_domain: Some(domain.name.clone()),
            log: None,
            definition: None,
            whole_move: Some(WholeMove {
                obstacle: Some(memory_is_libvirts(adopted)),
                left_behind: Vec::new(),
            }),
            added_unix_ms: adopted.added_unix_ms,
            priority: api::SetVm::PRIORITY_DEFAULT,
            start: None,
            awaited_start: None,
        }
    }

    /// Refuses to move a domain as a whole, with [`RequestError::VmUnmovable`], and says what to do.
    pub(crate) fn refuse_domain(&self, adopted: &Adopted) -> Result<(), RequestError> {
        if adopted.libvirt.is_none() {
            return Ok(());
        }
        Err(RequestError::VmUnmovable { vm: adopted.name.clone(), reason: memory_is_libvirts(adopted) })
    }
}

/// Returns why a domain does not move as a whole, and what to do.
fn memory_is_libvirts(adopted: &Adopted) -> String {
    let volumes: Vec<_> = adopted.disks.iter().map(|disk| disk.volume.as_str()).collect();
    let volumes = volumes.join(" ");
    format!(
        "libvirt moves its memory, and does not let other programs decide when it changes hosts; move its disks first (sterna \
         migrate volume:NAME --to HOST --serve-here, for each of {volumes}), then its memory (virsh migrate --live): see \
         docs/libvirt.md"
    )
}

/// Returns the domain, unless libvirt has deleted it.
async fn found(libvirt: &Libvirt, domain: &LibvirtDomain) -> Result<Option<Domain>, LibvirtError> {
    let uuid = parse_uuid(&domain.uuid)
        .ok_or_else(|| LibvirtError::Definition(format!("{} is no UUID", domain.uuid)))?;
    match libvirt.domain_of(&uuid).await {
        Ok(domain) => Ok(Some(domain)),
        Err(error) if error.is_no_domain() => Ok(None),
        Err(error) => Err(error),
    }
}

/// Returns the domain's state, the progress of its copies, and the user that it runs as.
async fn look(
    adopted: &Adopted,
    domain: &LibvirtDomain,
) -> Result<(VmState, Option<String>, Option<String>), LibvirtError> {
    let libvirt = Libvirt::connect(Some(&adopted.monitor)).await?;
    let product = Some(format!("libvirt {}", libvirt.version()));
    let Some(found) = found(&libvirt, domain).await? else {
        let message = "the domain has been removed from libvirt; to end this: sterna vm release".to_owned();
        return Ok((VmState::Stopped, Some(message), product));
    };
    let (state, said) = match libvirt.presence(&found).await? {
        Presence::There(DomainState::Running | DomainState::Blocked) => (VmState::Running, None),
        Presence::There(DomainState::Paused) => {
            (VmState::Paused, Some("paused, and not by Sterna; virsh domstate --reason says why".to_owned()))
        }
        Presence::There(DomainState::Crashed) => (
            VmState::Crashed,
            Some("its guest has crashed, and its QEMU is kept: virsh reset, or virsh destroy".to_owned()),
        ),
        Presence::There(state) => (VmState::Paused, Some(format!("libvirt says: {state}"))),
        Presence::Unknown(state) => (VmState::Unknown, Some(format!("libvirt says: {state}"))),
        Presence::ManagedSave => {
            return Ok((
                VmState::Stopped,
                Some("its memory is saved (virsh managedsave)".to_owned()),
                product,
            ));
        }
        Presence::Absent | Presence::Saved => return Ok((VmState::Stopped, None, product)),
    };
    let mut progress = Vec::new();
    if !domain.is_settled {
        for kept in &adopted.disks {
            if let Some(job) = libvirt.block_job(&found, &kept.device).await? {
                let percent = job.done.saturating_mul(100).checked_div(job.end).unwrap_or(0);
                progress.push(format!("{}: {} {percent} %", kept.device, job.kind));
            }
        }
    }
    let said: Vec<String> = said.into_iter().chain(progress).collect();
    Ok((state, (!said.is_empty()).then(|| said.join(", ")), product))
}

/// Refuses a domain that another job works on, or whose snapshots or checkpoints name its disks.
async fn refuse_held(name: &str, libvirt: &Libvirt, domain: &Domain, seen: Seen) -> Result<(), RequestError> {
    let failed = |source| RequestError::from(VmError::Libvirt { vm: name.to_owned(), source });
    if seen == Seen::Runs && libvirt.has_job(domain).await.map_err(failed)? {
        let why = "a job of libvirt works on the domain (a migration, save, dump or backup): virsh domjobinfo; wait for it, or end it: \
                   virsh domjobabort";
        return Err(refuse(name, why));
    }
    let snapshots = libvirt.snapshots(domain).await.map_err(failed)?;
    if snapshots > 0 {
        let why = format!(
            "libvirt has {snapshots} snapshots of the domain, which its disks would lose: virsh snapshot-list; remove them first: virsh \
             snapshot-delete"
        );
        return Err(refuse(name, &why));
    }
    let checkpoints = libvirt.checkpoints(domain).await.map_err(failed)?;
    if checkpoints > 0 {
        let why = format!(
            "libvirt has {checkpoints} checkpoints of the domain for backups, which its disks would lose: virsh checkpoint-list; remove \
             them first: virsh checkpoint-delete"
        );
        return Err(refuse(name, &why));
    }
    if seen != Seen::Runs {
        return Ok(());
    }
    let definition = libvirt.definition(domain, Definition::Current).await.map_err(failed)?;
    for disk in disks(&definition).map_err(failed)?.iter().filter(|disk| disk.device == "disk") {
        let target = &disk.target;
        if let Some(job) = libvirt.block_job(domain, target).await.map_err(failed)? {
            let why = format!(
                "{target}: libvirt's {} job works on it: virsh blockjob; wait for it, or end it: virsh blockjob {} {target} --abort",
                job.kind, domain.name
            );
            return Err(refuse(name, &why));
        }
    }
    Ok(())
}

/// Returns the requested disks, or all writable ones; fails if one of them cannot be copied.
fn choose(name: &str, found: &[Disk], wanted: &[String]) -> Result<Vec<Disk>, RequestError> {
    if let Some(missing) = wanted.iter().find(|wanted| !found.iter().any(|disk| disk.target == **wanted)) {
        return Err(refuse(name, &format!("the domain has no disk {missing}")));
    }
    let is_meant = |disk: &&Disk| {
        if wanted.is_empty() {
            disk.device != "cdrom" && disk.device != "floppy" && !disk.is_read_only
        } else {
            wanted.contains(&disk.target)
        }
    };
    let chosen: Vec<Disk> = found.iter().filter(is_meant).cloned().collect();
    for disk in &chosen {
        let why = match (&disk.source, disk.obstacle) {
            (_, Some(obstacle)) => obstacle.to_owned(),
            _ if disk.device != "disk" || disk.is_read_only => {
                format!("it is a {} that is not written", disk.device)
            }
            (DiskSource::None, _) => "it has no medium".to_owned(),
            (DiskSource::Other(kind), _) => {
                format!("it is no file, but of libvirt's type {kind}; only files can be adopted")
            }
            (DiskSource::File(_) | DiskSource::Nbd(_), _) if !matches!(&*disk.format, "raw" | "qcow2") => {
                format!("its format is {}; only raw and qcow2 can be given back", disk.format)
            }
            (DiskSource::File(_) | DiskSource::Nbd(_), None) => continue,
        };
        return Err(refuse(name, &format!("{}: {why}", disk.target)));
    }
    if chosen.is_empty() {
        return Err(refuse(name, "the domain has no disk that could be adopted"));
    }
    Ok(chosen)
}

fn refuse(name: &str, why: &str) -> RequestError {
    VmError::Disk { vm: name.to_owned(), why: why.to_owned() }.into()
}
