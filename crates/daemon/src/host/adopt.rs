//! Taking over the disks of a machine that somebody else has started, and giving them back, without a restart.
//!
//! ```text
//!   adopt      remember ─► pause ─► each disk: off its file ─► volume ─► over its export ─► resume
//!   release    pause ─► each disk: volume gone ─► back to its file ─► resume ─► forget
//! ```
//!
//! The machine is paused for the moment in which an image changes hands, so that QEMU can let go of its locks before the
//! volume takes them, and the other way round: at no time can two write to it. It takes as long as making a volume does. If a
//! daemon dies in between the machine is left paused, nothing is lost, and `vm release` brings it back.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use api::{AdoptVm, NewVolume, RemoveVolume, Vm, VmState, VolumeSource};
use hypervisor::qemu::{ExportAddress, LocalDisk, Machine, RunState};
use migration::journal::ImageFormat;

use super::{Host, blocking};
use crate::error::RequestError;
use crate::journal::now_unix_ms;
use crate::names;
use crate::vms::{Adopted, AdoptedDisk, RAW, VmError};

/// How long requests of an adopted disk wait for a daemon that is started again. For as long QEMU is deaf to commands that
/// wait for its requests.
const RECONNECT_SECONDS: u32 = 30;
/// How QEMU writes the address of nothing.
const NOTHING: &str = "null-co:";
/// How long a machine may take to say what it does.
const ANSWER_MAX: Duration = Duration::from_secs(1);

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
        self.describe_vm(&name).await
    }

    /// Gives a machine its disks back as plain files, where they are by now.
    ///
    /// # Errors
    /// [`RequestError`]; what could not be given back is served as before.
    pub(crate) async fn release_vm(self: Arc<Self>, name: String) -> Result<Vm, RequestError> {
        let Some(adopted) = self.adoptions()?.get(&name) else {
            self.vms.get(&name)?;
            let why = format!("Sterna has started \"{name}\": there is nothing to give back");
            return Err(RequestError::Invalid(why));
        };
        let shown = describe(&adopted).await;
        match Machine::connect(&adopted.monitor).await {
            Ok(machine) => {
                let paused = Pause::begin(&name, &machine).await?;
                let given = self.give_back(&machine, &adopted, Volumes::Wherever).await;
                if let Err(error) = &given {
                    tracing::warn!(vm = %name, reason = %error.message(), "the disks are not given back");
                }
                let pause = paused.end(&name, &machine).await?;
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
        self.forget_adopted(&name).await?;
        Ok(shown)
    }

    /// Describes the adopted machines.
    pub(super) async fn describe_adopted(&self) -> Vec<Vm> {
        let adopted = self.adoptions().map(crate::vms::Adoptions::list).unwrap_or_default();
        futures_util::future::join_all(adopted.iter().map(describe)).await
    }

    /// Describes an adopted machine; `None`: there is none of that name.
    pub(super) async fn describe_adopted_one(&self, name: &str) -> Option<Vm> {
        let adopted = self.adoptions().ok()?.get(name)?;
        Some(describe(&adopted).await)
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
        self.serve_disk(kept, &disk.file).await?;
        machine
            .lead_over_export(&led, &self.export_of(kept), kept.number)
            .await
            .map_err(VmError::of(name))?;
        Ok(())
    }

    /// Where an adopted disk's volume is served.
    fn export_of(&self, kept: &AdoptedDisk) -> ExportAddress {
        ExportAddress {
            socket: self.sockets.volume_socket(&kept.volume),
            export: kept.volume.clone(),
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
            let mut disk = kept.disk(node.name.clone());
            // While the volume is there: QEMU flushes what it leaves.
            if !node.file.starts_with(NOTHING) {
                disk = machine.lead_to_nothing(&disk, kept.number).await.map_err(failed)?;
            }
            if let Err(error) = self.give_disk_back(machine, &disk, kept, volumes).await {
                machine.lead_over_export(&disk, &self.export_of(kept), kept.number).await.map_err(failed)?;
                return Err(error);
            }
        }
        Ok(())
    }

    /// Leads a disk that is over nothing to its file; its volume is served again if QEMU does not take that.
    async fn give_disk_back(
        self: &Arc<Self>,
        machine: &Machine,
        disk: &LocalDisk,
        kept: &AdoptedDisk,
        volumes: Volumes,
    ) -> Result<(), RequestError> {
        let file = self.drop_volume(kept, volumes).await?;
        let there = LocalDisk { file: file.clone(), ..disk.clone() };
        let Err(error) = machine.lead_to_file(&there, kept.number).await else { return Ok(()) };
        self.serve_disk(kept, &file).await?;
        Err(VmError::of(&kept.volume)(error).into())
    }

    /// Serves an image as an adopted disk's volume.
    async fn serve_disk(self: &Arc<Self>, kept: &AdoptedDisk, file: &Path) -> Result<(), RequestError> {
        let text = file.to_str().ok_or_else(|| not_utf8(file))?;
        let source = VolumeSource::Add {
            image: Some(text.to_owned()),
            device: None,
            nbd: None,
            format: Some(api::ImageFormat::Raw),
            fenced: false,
        };
        let order = NewVolume { name: kept.volume.clone(), source, export: api::ExportSettings::default() };
        Arc::clone(self).create_volume(order).await.map(drop)
    }

    /// Stops serving an adopted disk's volume, and returns where its image is.
    async fn drop_volume(
        self: &Arc<Self>,
        kept: &AdoptedDisk,
        volumes: Volumes,
    ) -> Result<PathBuf, RequestError> {
        let Ok(record) = self.record_named(&kept.volume) else { return Ok(kept.file.clone()) };
        let place = record.image.place.clone();
        if volumes == Volumes::Untouched && place.file().map(Path::new) != Some(&kept.file) {
            // It is another volume, which has taken the name meanwhile.
            return Ok(kept.file.clone());
        }
        let Some(file) = place.file().filter(|_| record.image.format == ImageFormat::Raw).map(PathBuf::from)
        else {
            let detail =
                "a machine gets its disks back as raw files on this host; move the volume there first";
            return Err(RequestError::ImageUnsuitable {
                path: place.name().into(),
                detail: detail.to_owned(),
            });
        };
        let how = RemoveVolume { force: true, keep_image: true };
        Arc::clone(self).remove_unused_volume(kept.volume.clone(), how).await?;
        Ok(file)
    }

    async fn remember_adopted(self: &Arc<Self>, adopted: Adopted) -> Result<(), RequestError> {
        let host = Arc::clone(self);
        blocking(move || Ok(host.adoptions()?.put(&adopted).map_err(VmError::from)?)).await
    }

    async fn forget_adopted(self: &Arc<Self>, name: &str) -> Result<(), RequestError> {
        let (host, name) = (Arc::clone(self), name.to_owned());
        blocking(move || Ok(host.adoptions()?.delete(&name).map_err(VmError::from)?)).await
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
    let mut chosen = Vec::new();
    for disk in found {
        let (device, node) = match &disk {
            Ok(disk) => (disk.device.as_str(), disk.node.as_str()),
            Err(staying) => (staying.device.as_str(), ""),
        };
        let is_wanted = wanted.iter().any(|wanted| wanted == device || wanted == node);
        match disk {
            _ if !is_wanted && !wanted.is_empty() => {}
            Ok(disk) if wanted.is_empty() && disk.options.is_read_only => {}
            Ok(disk) if disk.format != RAW => {
                let why = "is a qcow2 image; only raw ones are adopted: stop the machine, and serve it with sterna volume add";
                return Err(refuse(format!("{} {why}", disk.device)));
            }
            Ok(disk) => chosen.push(disk),
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

fn not_utf8(path: &Path) -> RequestError {
    let detail = "its path is not UTF-8".to_owned();
    RequestError::ImageUnsuitable { path: path.to_owned(), detail }
}

/// Asks a machine that is somebody else's what it does, and leaves its monitor to others.
async fn describe(adopted: &Adopted) -> Vm {
    let asked = async {
        let machine = Machine::connect(&adopted.monitor).await?;
        let state = machine.status().await?;
        Ok::<_, hypervisor::qemu::MachineError>((machine.process(), machine.version().to_string(), state))
    };
    let answer = tokio::time::timeout(ANSWER_MAX, asked).await;
    let (state, message) = match &answer {
        Ok(Ok((_, _, RunState::Running))) => (VmState::Running, None),
        Ok(Ok((_, _, state))) => (VmState::Paused, Some(format!("QEMU says: {state}"))),
        Ok(Err(error)) if error.is_gone() => (VmState::Stopped, Some(error.to_string())),
        Ok(Err(error)) => (VmState::Unknown, Some(error.to_string())),
        Err(_) => (VmState::Unknown, Some("its monitor serves somebody else, or does not answer".to_owned())),
    };
    let seen = answer.ok().and_then(Result::ok);
    Vm {
        name: adopted.name.clone(),
        state,
        message,
        volumes: adopted.disks.iter().map(|disk| disk.volume.clone()).collect(),
        process: seen.as_ref().and_then(|(process, _, _)| *process).and_then(|id| u32::try_from(id).ok()),
        hypervisor: seen.map(|(_, version, _)| format!("QEMU {version}")),
        monitor: adopted.monitor.display().to_string(),
        log: None,
        definition: None,
        added_unix_ms: adopted.added_unix_ms,
    }
}
