//! Taking over the disks of a machine that somebody else has started, and giving them back, without a restart.
//!
//! ```text
//!   adopt      remember ─► pause ─► each disk: off its file ─► volume ─► over its export ─► resume
//!   release    pause ─► each disk: volume gone ─► back to its file ─► resume ─► forget, also a machine of ours
//! ```
//!
//! The machine is paused for the moment in which an image changes hands, so that QEMU can let go of its locks before the
//! volume takes them, and the other way round: at no time can two write to it. It takes as long as making a volume does. If a
//! daemon dies in between the machine is left paused, nothing is lost, and `vm release` brings it back.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use api::{AdoptVm, NewVolume, RemoveVolume, Vm, VolumeSource};
use hypervisor::qemu::{ExportAddress, LocalDisk, Machine, RECONNECT_SECONDS, RunState};
use migration::journal::ImageFormat;

use super::{Host, adopted, blocking};
use crate::error::RequestError;
use crate::journal::now_unix_ms;
use crate::names;
use crate::vms::{Adopted, AdoptedDisk, Foreign, GivenBack, VmError};

/// How QEMU writes the address of nothing.
const NOTHING: &str = "null-co:";

impl Host {
    /// Takes over disks of a machine that runs.
    ///
    /// # Errors
    /// [`RequestError`]; the machine has its disks as before then.
    pub(crate) async fn adopt_vm(self: Arc<Self>, name: String, order: AdoptVm) -> Result<Vm, RequestError> {
        names::check(&name).map_err(|reason| {
            RequestError::Invalid(format!("\"{name}\" cannot be the name of a machine: {reason}"))
        })?;
        let adoptions = self.adoptions()?;
        if adoptions.get(&name).is_some() || self.vms.get(&name).is_ok() {
            return Err(VmError::Exists(name).into());
        }
        let monitor = PathBuf::from(&order.monitor);
        let machine = Machine::connect(&monitor).await.map_err(VmError::of(&name))?;
        let disks = choose(&name, &machine, &order.disks).await?;
        let number = |index: usize| u32::try_from(index).unwrap_or(u32::MAX);
        let volume = |index: usize| if disks.len() == 1 { name.clone() } else { format!("{name}-{index}") };
        let adopted = Adopted {
            name: name.clone(),
            monitor,
            disks: disks
                .iter()
                .enumerate()
                .map(|(index, disk)| AdoptedDisk::of(disk, volume(index), number(index)))
                .collect(),
            added_unix_ms: now_unix_ms(),
        };
        if let Some(disk) = adopted.disks.iter().find(|disk| self.volumes.service(&disk.volume).is_some()) {
            return Err(RequestError::VolumeExists(disk.volume.clone()));
        }
        // N.B. Before anything is changed in QEMU: a daemon that is killed from here on knows what to give back.
        self.remember_adopted(adopted.clone()).await?;
        let paused = Pause::begin(&name, &machine).await?;
        let mut outcome = Ok(());
        for (disk, kept) in disks.iter().zip(&adopted.disks) {
            outcome = self.take_disk(&name, &machine, disk, kept).await;
            if outcome.is_err() {
                break;
            }
        }
        if let Err(error) = outcome {
            tracing::warn!(vm = %name, reason = %error.message(), "the disks are given back");
            self.give_back(&machine, &adopted, Volumes::Untouched).await?;
            paused.end(&name, &machine).await?;
            self.forget_adopted(&name).await?;
            return Err(error);
        }
        let pause = paused.end(&name, &machine).await?;
        tracing::info!(vm = %name, disks = adopted.disks.len(), ?pause, "the machine's disks are served");
        // The monitor serves one client at a time.
        drop(machine);
        Ok(adopted::describe(&adopted, adopted::SETTLED_MAX).await)
    }

    /// Gives a machine its disks back as plain files, where they are by now; also one that Sterna has started, which goes on
    /// without Sterna from then on.
    ///
    /// # Errors
    /// [`RequestError`]; what could not be given back is served as before.
    pub(crate) async fn release_vm(self: Arc<Self>, name: String) -> Result<Vm, RequestError> {
        // Of a machine that is, or is on its way, elsewhere nothing can be given back here.
        let _operation = match self.vms.get(&name) {
            Ok(_) => Some(self.vms.operate(&name)?),
            Err(_) => None,
        };
        let mut shown = self.describe_vm(&name).await?;
        let adopted = match self.adoptions()?.get(&name) {
            Some(adopted) => adopted,
            None => self.adopt_own(&name).await?,
        };
        let images = self.images_of(&adopted);
        match self.monitor_of(&adopted).await {
            Ok(machine) => {
                let paused = Pause::begin(&name, &machine).await?;
                let given = self.give_back(&machine, &adopted, Volumes::Wherever).await;
                if let Err(error) = &given {
                    tracing::warn!(vm = %name, reason = %error.message(), "the disks are not given back");
                }
                let pause = paused.end(&name, &machine).await?;
                if given.is_err() && self.vms.get(&name).is_ok() {
                    // It is a machine of ours as before.
                    self.forget_adopted(&name).await?;
                }
                given?;
                tracing::info!(vm = %name, ?pause, "the machine has its disks back");
            }
            // Nobody reads or writes: the images are what is left to give.
            Err(error) if error.is_gone() => {
                for disk in &adopted.disks {
                    self.drop_volume(disk, Volumes::Wherever).await?;
                }
            }
            Err(error) => return Err(VmError::of(&name)(error).into()),
        }
        if self.vms.get(&name).is_ok() {
            let written = self.vms.write_script(&name, images).await;
            if let Err(error) = &written {
                tracing::warn!(vm = %name, %error, "how the machine is started without Sterna is not written down");
            }
            shown.message =
                written.ok().flatten().map(|path| format!("to start it again: {}", path.display()));
        }
        self.vms.let_go(&name).await?;
        self.forget_adopted(&name).await?;
        Ok(shown)
    }

    /// Where the images of adopted disks are.
    fn images_of(&self, adopted: &Adopted) -> Vec<GivenBack> {
        let records = adopted.disks.iter().filter_map(|disk| self.record_named(&disk.volume).ok());
        let given = records.map(|record| GivenBack {
            path: record.image.place.name().into(),
            format: name_of(record.image.format).to_owned(),
            volume: record.name,
        });
        given.collect()
    }

    /// Describes a machine that Sterna has started as one whose disks were adopted, durably: from then on a daemon that is
    /// killed knows what to give back.
    async fn adopt_own(self: &Arc<Self>, name: &str) -> Result<Adopted, RequestError> {
        let known = self.vms.get(name)?;
        let machine = self.vms.machine(name)?;
        let mut disks = Vec::new();
        for (index, volume) in known.volumes.iter().enumerate() {
            let record = self.record_named(volume)?;
            let address = self.export_named(volume);
            let disk = machine.disk_over(&address).await.map_err(VmError::of(name))?;
            let Some(disk) = disk else {
                let why = format!("QEMU has no disk that is over the volume {volume}");
                return Err(VmError::Disk { vm: name.to_owned(), why }.into());
            };
            let number = disk.number().unwrap_or_else(|| u32::try_from(index).unwrap_or(u32::MAX));
            let disk = LocalDisk {
                file: record.image.place.name().into(),
                format: name_of(record.image.format).to_owned(),
                ..disk
            };
            disks.push(AdoptedDisk::of(&disk, volume.clone(), number));
        }
        let adopted =
            Adopted { name: name.to_owned(), monitor: known.monitor, disks, added_unix_ms: now_unix_ms() };
        self.remember_adopted(adopted.clone()).await?;
        Ok(adopted)
    }

    /// The monitor of a machine whose disks are served; of one among ours there is a connection already.
    async fn monitor_of(&self, adopted: &Adopted) -> Result<Arc<Machine>, hypervisor::qemu::MachineError> {
        match self.vms.machine(&adopted.name) {
            Ok(machine) => Ok(machine),
            Err(_) => Machine::connect(&adopted.monitor).await.map(Arc::new),
        }
    }

    /// Describes the adopted machines.
    pub(super) async fn describe_adopted(&self) -> Vec<Vm> {
        let mut adopted = self.adoptions().map(crate::vms::Adoptions::list).unwrap_or_default();
        // One that leaves is among ours.
        adopted.retain(|machine| self.vms.get(&machine.name).is_err());
        futures_util::future::join_all(
            adopted.iter().map(|machine| adopted::describe(machine, adopted::ANSWER_MAX)),
        )
        .await
    }

    /// Describes an adopted machine; `None`: there is none of that name.
    pub(super) async fn describe_adopted_one(&self, name: &str) -> Option<Vm> {
        let adopted = self.adoptions().ok()?.get(name).filter(|_| self.vms.get(name).is_err())?;
        Some(adopted::describe(&adopted, adopted::ANSWER_MAX).await)
    }

    /// Takes one disk over while its machine is paused.
    async fn take_disk(
        self: &Arc<Self>,
        name: &str,
        machine: &Machine,
        disk: &LocalDisk,
        kept: &AdoptedDisk,
    ) -> Result<(), RequestError> {
        let led = machine.lead_to_nothing(disk, kept.number).await.map_err(VmError::of(name))?;
        self.serve_disk(kept, &kept.file, format_named(&kept.format)).await?;
        machine
            .lead_over_export(&led, &self.export_named(&kept.volume), kept.number)
            .await
            .map_err(VmError::of(name))?;
        Ok(())
    }

    /// Where a volume is served.
    fn export_named(&self, volume: &str) -> ExportAddress {
        ExportAddress {
            socket: self.sockets.volume_socket(volume),
            export: volume.to_owned(),
            reconnect_s: RECONNECT_SECONDS,
        }
    }

    /// Gives a paused machine back its disks. What it has back already is left so.
    async fn give_back(
        self: &Arc<Self>,
        machine: &Machine,
        adopted: &Adopted,
        volumes: Volumes,
    ) -> Result<(), RequestError> {
        let failed = |error| RequestError::from(VmError::of(&adopted.name)(error));
        let on_files = machine.local_disks().await.map_err(failed)?;
        let devices = machine.query_block().await.map_err(failed)?;
        for kept in &adopted.disks {
            let is_back = on_files.iter().flatten().any(|disk| disk.device == kept.device);
            let device = devices.iter().find(|device| device.device.as_deref() == Some(&kept.device));
            // It may be gone from the machine.
            let node = device.and_then(|device| device.node.as_ref()).filter(|_| !is_back);
            let Some(node) = node else {
                self.drop_volume(kept, volumes).await?;
                continue;
            };
            let mut disk = kept.disk(node);
            // While the volume is there: QEMU flushes what it leaves.
            if !node.file.starts_with(NOTHING) {
                disk = machine.lead_to_nothing(&disk, kept.number).await.map_err(failed)?;
            }
            if let Err(error) = self.give_disk_back(machine, &disk, kept, volumes).await {
                let export = self.export_named(&kept.volume);
                machine.lead_over_export(&disk, &export, kept.number).await.map_err(failed)?;
                return Err(error);
            }
        }
        Ok(())
    }

    /// Leads a disk that is over nothing to its image; its volume is served again if QEMU does not take that.
    async fn give_disk_back(
        self: &Arc<Self>,
        machine: &Machine,
        disk: &LocalDisk,
        kept: &AdoptedDisk,
        volumes: Volumes,
    ) -> Result<(), RequestError> {
        let (file, format) = self.drop_volume(kept, volumes).await?;
        if kept.node != disk.node {
            // A daemon that was killed while it adopted the disk may have left it, with QEMU's locks.
            machine.drop_node(&kept.node).await;
        }
        let image = kept.image(file.clone(), name_of(format).to_owned());
        let Err(error) = machine.lead_to_file(disk, &image, kept.number).await else { return Ok(()) };
        self.serve_disk(kept, &file, format).await?;
        Err(VmError::of(&kept.volume)(error).into())
    }

    /// Serves an image as an adopted disk's volume.
    async fn serve_disk(
        self: &Arc<Self>,
        kept: &AdoptedDisk,
        file: &Path,
        format: ImageFormat,
    ) -> Result<(), RequestError> {
        let text = file.to_str().ok_or_else(|| not_utf8(file))?;
        let source = VolumeSource::Add {
            image: Some(text.to_owned()),
            device: None,
            nbd: None,
            format: Some(shown(format)),
            fenced: false,
        };
        let order = NewVolume { name: kept.volume.clone(), source, export: api::ExportSettings::default() };
        Arc::clone(self).create_volume(order).await.map(drop)
    }

    /// Stops serving an adopted disk's volume, and returns where its image is and of which format.
    async fn drop_volume(
        self: &Arc<Self>,
        kept: &AdoptedDisk,
        volumes: Volumes,
    ) -> Result<(PathBuf, ImageFormat), RequestError> {
        let untouched = || Ok((kept.file.clone(), format_named(&kept.format)));
        let Ok(record) = self.record_named(&kept.volume) else { return untouched() };
        let place = record.image.place.clone();
        if volumes == Volumes::Untouched && place.file().map(Path::new) != Some(&kept.file) {
            // It is another volume, which has taken the name meanwhile.
            return untouched();
        }
        let Some(file) = place.file().map(PathBuf::from) else {
            let detail =
                "a machine gets its disks back as files of this host; move the volume to a folder here first";
            return Err(RequestError::ImageUnsuitable {
                path: place.name().into(),
                detail: detail.to_owned(),
            });
        };
        let how = RemoveVolume { force: true, keep_image: true };
        Arc::clone(self).remove_unused_volume(kept.volume.clone(), how).await?;
        Ok((file, record.image.format))
    }

    async fn remember_adopted(self: &Arc<Self>, adopted: Adopted) -> Result<(), RequestError> {
        let host = Arc::clone(self);
        blocking(move || Ok(host.adoptions()?.put(&adopted).map_err(VmError::from)?)).await
    }

    async fn forget_adopted(self: &Arc<Self>, name: &str) -> Result<(), RequestError> {
        let (host, name) = (Arc::clone(self), name.to_owned());
        blocking(move || Ok(host.adoptions()?.remove(&name).map(drop).map_err(VmError::from)?)).await
    }
}

/// Where the images of adopted disks are.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Volumes {
    /// Where they were when they were adopted.
    Untouched,
    /// Wherever their volumes are by now.
    Wherever,
}

/// A machine that is paused for a moment.
struct Pause {
    began: Instant,
    /// Whether it ran before, and is to run again.
    was_running: bool,
}

impl Pause {
    /// Pauses the machine.
    async fn begin(name: &str, machine: &Machine) -> Result<Self, RequestError> {
        let was_running = machine.status().await.map_err(VmError::of(name))? == RunState::Running;
        let began = Instant::now();
        machine.stop().await.map_err(VmError::of(name))?;
        Ok(Self { began, was_running })
    }

    /// Lets the machine go on, and says how long it has been paused.
    ///
    /// One that has a disk over nothing stays paused: what it wrote there would be lost.
    async fn end(self, name: &str, machine: &Machine) -> Result<Duration, RequestError> {
        let devices = machine.query_block().await.map_err(VmError::of(name))?;
        let mut nodes = devices.iter().filter_map(|device| device.node.as_ref());
        if nodes.any(|node| node.file.starts_with(NOTHING)) {
            let why = format!(
                "it stays paused, for a disk of it could not be led anywhere; try: sterna vm release {name}"
            );
            return Err(VmError::Disk { vm: name.to_owned(), why }.into());
        }
        if self.was_running {
            machine.resume().await.map_err(VmError::of(name))?;
        }
        Ok(self.began.elapsed())
    }
}

/// The disks that are asked for, or all that can be written; each must be one that can be adopted.
async fn choose(name: &str, machine: &Machine, wanted: &[String]) -> Result<Vec<LocalDisk>, RequestError> {
    let refuse = |why: String| RequestError::from(VmError::Disk { vm: name.to_owned(), why });
    let found = machine.local_disks().await.map_err(VmError::of(name))?;
    let seen = Foreign::of(name, machine).await?;
    let mut chosen = Vec::new();
    for disk in found {
        let (device, node) = match &disk {
            Ok(disk) => (disk.device.as_str(), disk.node.as_str()),
            Err(staying) => (staying.device.as_str(), ""),
        };
        let is_wanted = wanted.iter().any(|wanted| wanted == device || wanted == node);
        match disk {
            _ if !is_wanted && !wanted.is_empty() => {}
            Ok(disk) if wanted.is_empty() && (disk.options.is_read_only || disk.is_firmware()) => {}
            Ok(disk) => {
                let named = seen.resolve(&disk.file).ok_or_else(|| {
                    let file = disk.file.display();
                    refuse(format!(
                        "{}: where its image {file} is cannot be told; start it with absolute paths",
                        disk.device
                    ))
                })?;
                chosen.push(LocalDisk { file: named, ..disk });
            }
            // Firmware goes along with its machine as a file.
            Err(staying) if wanted.is_empty() && staying.is_firmware() => {}
            Err(staying) => return Err(refuse(staying.to_string())),
        }
    }
    match wanted
        .iter()
        .find(|wanted| !chosen.iter().any(|disk| disk.device == **wanted || disk.node == **wanted))
    {
        Some(missing) => Err(refuse(format!("QEMU has no disk {missing}"))),
        None if chosen.is_empty() => Err(refuse("it has no disk that could be adopted".to_owned())),
        None => Ok(chosen),
    }
}

/// QEMU's name of a format.
fn name_of(format: ImageFormat) -> &'static str {
    match format {
        ImageFormat::Raw => "raw",
        ImageFormat::Qcow2 => "qcow2",
    }
}

/// The format that QEMU calls so; it adopts no others.
fn format_named(name: &str) -> ImageFormat {
    if name == name_of(ImageFormat::Qcow2) { ImageFormat::Qcow2 } else { ImageFormat::Raw }
}

fn shown(format: ImageFormat) -> api::ImageFormat {
    match format {
        ImageFormat::Raw => api::ImageFormat::Raw,
        ImageFormat::Qcow2 => api::ImageFormat::Qcow2,
    }
}

fn not_utf8(path: &Path) -> RequestError {
    let detail = "its path is not UTF-8".to_owned();
    RequestError::ImageUnsuitable { path: path.to_owned(), detail }
}
