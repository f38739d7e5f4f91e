//! Adopts the disks of a running VM that Sterna did not start, and releases them, without a restart of the VM.
//!
//! ```text
//!   adopt      prove ─► remember ─► note ─► pause ─► each disk: off its file ─► volume ─► over its export ─► resume
//!   release    prove ─► remember ─► note ─► pause ─► each disk: volume gone ─► back to its file ─► resume ─► forget
//! ```
//! The VM is paused while an image changes hands. QEMU releases its locks before the volume takes them, and the other way
//! round, so two programs never write to the image. The pause takes as long as making a volume. QEMU itself proves beforehand
//! what can be proved ([`crate::vms::orders::prove`]). Later failures are undone ([`crate::vms::orders::exchange`]). If the daemon
//! dies meanwhile, the next one finds the note and completes the operation.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use api::{AdoptVm, Vm};
use block::held;
use hypervisor::qemu::command_line::script::GivenBack;
use hypervisor::qemu::{Launched, LocalDisk, Qemu};
use hypervisor::{HypervisorError, RunState};
use migration::vm::exchange::Goal;
use migration::vm::hold::Reason;
use tokio::time::Instant;

use crate::error::RequestError;
use crate::host::{VmOrders, blocking};
use crate::journal::now_unix_ms;
use crate::names;
use crate::vms::orders::adopted;
use crate::vms::orders::exchange::{Exchanged, IsNew, QemuEnded, name_of};
use crate::vms::proved::ProvedFile;
use crate::vms::{Adopted, AdoptedDisk, Life, NotedReason, Paths, Ran, Reached, VmError, launched, monitors};

/// How long an operation may take before its answer says that it continues in the background.
const ANSWER_WITHIN: Duration = Duration::from_secs(60);

impl VmOrders {
    /// Adopts disks of a running VM. After an error the VM has its old disks and runs, or the text says
    /// what keeps it from running.
    pub(crate) async fn adopt_vm(
        self: Arc<Self>,
        name: String,
        order: AdoptVm,
        paths: Paths,
    ) -> Result<Vm, RequestError> {
        self.draining.refuse_new()?;
        names::check(&name).map_err(|reason| {
            RequestError::Invalid(format!("\"{name}\" cannot be the name of a VM: {reason}"))
        })?;
        let monitor = match monitor_named(&order)? {
            Named::Monitor(monitor) => monitor,
            Named::Domain(domain) => return self.adopt_domain(name, domain, order).await,
        };
        let turn = self.vms.turn(&name)?;
        let adoptions = self.vms.adoptions()?;
        if adoptions.get(&name).is_some() || self.vms.get(&name).is_ok() {
            return Err(VmError::Exists(name).into());
        }
        let qemu = monitors::connect(&monitor)
            .await
            .map_err(|error| monitors::unusable(&name, &monitor, &error, paths))?;
        if let Some(disks) = self.volumes_under(&name, &qemu, &order.disks).await? {
            let user = qemu.user();
            drop(qemu);
            return self.bind_vm(name, (monitor, user), disks).await;
        }
        let mut disks = choose(&name, &qemu, &order.disks).await?;
        let mut held = Vec::new();
        for disk in &mut disks {
            let files = self.prove_files(&name, &qemu, disk).await?;
            if let Some(top) = files.first() {
                top.path().clone_into(&mut disk.file);
            }
            held.push(files);
        }
        let number = |index: usize| u32::try_from(index).unwrap_or(u32::MAX);
        let volume = |index: usize| if disks.len() == 1 { name.clone() } else { format!("{name}-{index}") };
        let adopted = Adopted {
            name: name.clone(),
            monitor,
            monitor_user: qemu.user(),
            user: socket_user(&launched(&name, &qemu).await?),
            disks: disks
                .iter()
                .zip(&held)
                .enumerate()
                .map(|(index, (disk, held))| AdoptedDisk {
                    proved: held.iter().map(|file| ProvedFile::of(file)).collect(),
                    ..AdoptedDisk::of(disk, volume(index), number(index))
                })
                .collect(),
            added_unix_ms: now_unix_ms(),
            libvirt: None,
            is_bound: false,
        };
        // N.B. From here until the disks are served, the proved files are the served files.
        let held = self.finders.proofs.hold(adopted.disks.iter().map(|disk| disk.volume.clone()).zip(held));
        if let Some(disk) = adopted.disks.iter().find(|disk| self.volumes.service(&disk.volume).is_some()) {
            return Err(RequestError::VolumeExists(disk.volume.clone()));
        }
        self.prove_adoptable(&name, &qemu, &disks, &adopted).await?;
        let was_running = runs(&name, &qemu).await?;
        // The monitor serves one client at a time.
        drop(qemu);
        // N.B. Before QEMU is changed, so that a daemon that is killed from here on leaves a record of the disks to release.
        self.remember_adopted(adopted.clone()).await?;
        if let Err(error) = self.vms.holds.hold(&name, Reason::Adopt, was_running).await {
            self.forget_adopted(&name).await?;
            return Err(error.into());
        }
        let host = Arc::clone(&self);
        let order = adopted.clone();
        let work = async move {
            let finished = host.finish_adoption(&order, IsNew::Yes, turn).await;
            drop(held);
            finished
        };
        self.answer_within(&name, work).await?;
        Ok(self.describe_thoroughly(&adopted).await)
    }

    /// Gives a VM its disks back as plain files, at their present paths. A VM that Sterna has started runs without Sterna from
    /// then on. After an error the remaining disks are served as before.
    pub(crate) async fn release_vm(self: Arc<Self>, name: String) -> Result<Vm, RequestError> {
        if self.is_domain(&name)? {
            return self.release_domain(name).await;
        }
        let turn = self.vms.turn(&name)?;
        // Disks of a VM that is at another host, or on its way, cannot be released here.
        let _operation = match self.vms.get(&name) {
            Ok(_) => Some(self.vms.operate(&name)?),
            Err(_) => None,
        };
        let mut shown = self.describe_vm(&name).await?;
        let is_ours = self.vms.get(&name).is_ok();
        if !is_ours && self.vms.adoptions()?.get(&name).is_some_and(|adopted| adopted.is_bound) {
            // The disks stay the volumes that they were before.
            self.forget_adopted(&name).await?;
            shown.images.clear();
            shown.message = Some("its disks stay volumes".to_owned());
            return Ok(shown);
        }
        let adopted = match self.vms.adoptions()?.get(&name) {
            Some(adopted) => self.where_it_is_now(adopted)?,
            None => self.describe_own(&name).await?,
        };
        let qemu = match self.monitor_of(&adopted).await {
            Ok(qemu) => qemu,
            Err(error) if self.has_ended_qemu(&adopted, &error) => {
                self.stop_serving(&adopted).await?;
                shown.message = self.end_release(&adopted).await?;
                return Ok(shown);
            }
            Err(error) => return Err(VmError::of(&name)(error).into()),
        };
        self.prove_exchangeable(&adopted, &qemu).await?;
        self.prove_releasable(&qemu, &adopted).await?;
        let was_running = runs(&name, &qemu).await?;
        drop(qemu);
        // N.B. From here on the paths of the images are known, whatever happens to the volumes.
        self.remember_adopted(adopted.clone()).await?;
        if let Err(error) = self.vms.holds.hold(&name, Reason::Release, was_running).await {
            if is_ours {
                self.forget_adopted(&name).await?;
            }
            return Err(error.into());
        }
        let host = Arc::clone(&self);
        let work = async move { host.finish_release(&adopted, IsNew::Yes, turn).await };
        shown.message = self.answer_within(&name, work).await?;
        shown.state = api::VmState::Running;
        if !was_running {
            shown.state = api::VmState::Paused;
        }
        Ok(shown)
    }

    /// Resumes a VM that is paused for any reason. The error says what keeps it from running.
    pub(crate) async fn resume_vm(self: Arc<Self>, name: String) -> Result<Vm, RequestError> {
        if self.is_domain(&name)? {
            return self.resume_domain(name).await;
        }
        let turn = self.vms.turn(&name)?;
        let adopted = self.vms.adoptions()?.get(&name);
        if self.vms.get(&name).is_ok() {
            // The migration decides whether a moving VM runs.
            drop(self.vms.operate(&name)?);
        }
        let find = self.hypervisor_of(&name, adopted.as_ref());
        match find().await {
            Reached::There(vm) => {
                let state = vm.run_state().await.map_err(VmError::of(&name))?;
                self.vms.holds.check_can_go_on(&name, &state)?;
            }
            Reached::Silent(reason) => return Err(VmError::Paused { vm: name, why: reason }.into()),
            Reached::Ended if self.vms.is_suspended(&name) => return Err(VmError::Suspended(name).into()),
            Reached::Ended if adopted.is_some() || self.vms.get(&name).is_ok() => {
                return Err(VmError::NotRunning(name).into());
            }
            Reached::Ended => return Err(VmError::NotFound(name).into()),
        }
        self.vms.holds.hold(&name, Reason::Resume, true).await?;
        let (host, resumed) = (Arc::clone(&self), name.clone());
        let work = async move {
            if let Some(adopted) = adopted {
                host.regain_disks(&adopted).await?;
            }
            host.let_it_run(&resumed).await?;
            drop(turn);
            Ok(())
        };
        self.answer_within(&name, work).await?;
        self.describe_vm(&name).await
    }

    /// Completes what a killed daemon had begun with the disks of VMs, and resumes the VMs that it had paused. Migrations
    /// settle the VMs that were on their way.
    pub(crate) fn settle_holds(self: &Arc<Self>) {
        for note in self.vms.holds.list() {
            let host = Arc::clone(self);
            tokio::spawn(async move {
                let name = note.name;
                tracing::info!(vm = %name, reason = ?note.reason, "an earlier daemon may have left the VM paused");
                if let Err(error) = host.settle_hold(&name, note.reason).await {
                    tracing::warn!(vm = %name, reason = error.message(), "cannot resume the VM that was left paused");
                }
            });
        }
    }

    async fn settle_hold(self: &Arc<Self>, name: &str, reason: NotedReason) -> Result<(), RequestError> {
        if matches!(reason, NotedReason::Missing | NotedReason::HasEnded) {
            // A VM that an error has stopped is handled as such. A VM that has shut down is not resumed.
            return Ok(());
        }
        if matches!(reason, NotedReason::Move | NotedReason::MoveAhead) {
            self.vms.until_found(name).await;
            return match self.vms.get(name) {
                Ok(known) if known.standing != crate::vms::Standing::Home => Ok(()),
                _ => self.let_it_run(name).await,
            };
        }
        if reason == NotedReason::Suspend {
            self.vms.until_found(name).await;
            if self.vms.is_suspended(name) {
                self.vms.holds.forget(name).await;
                return Ok(());
            }
        }
        let turn = self.vms.turn(name)?;
        let adopted = self.vms.adoptions()?.get(name);
        for kept in adopted.iter().flat_map(|adopted| &adopted.disks) {
            self.volume_orders.until_decided(&kept.volume).await;
        }
        match (adopted, reason) {
            (Some(adopted), NotedReason::Adopt) => self.finish_adoption(&adopted, IsNew::No, turn).await,
            (Some(adopted), NotedReason::Release) => {
                self.finish_release(&adopted, IsNew::No, turn).await.map(drop)
            }
            (adopted, _) => {
                if let Some(adopted) = adopted {
                    self.regain_disks(&adopted).await?;
                }
                self.let_it_run(name).await
            }
        }
    }

    /// Switches the disks of an adopted VM to their volumes, and resumes the VM. If that fails, releases the VM.
    async fn finish_adoption(
        self: &Arc<Self>,
        adopted: &Adopted,
        is_new: IsNew,
        _turn: crate::vms::Turn,
    ) -> Result<(), RequestError> {
        let (name, began) = (&adopted.name, Instant::now());
        let exchanged = self.exchange_disks(adopted, Goal::Volumes, is_new).await;
        let Ok(Exchanged { goal, failure }) = exchanged else {
            self.stop_serving(adopted).await?;
            self.forget_adopted(name).await?;
            self.vms.holds.forget(name).await;
            return Err(VmError::NotRunning(name.clone()).into());
        };
        self.let_it_run(name).await?;
        if goal == Goal::Volumes {
            tracing::info!(vm = %name, disks = adopted.disks.len(), pause = ?began.elapsed(), "the VM's disks are served");
            return Ok(());
        }
        self.forget_adopted(name).await?;
        tracing::warn!(vm = %name, "the VM was not adopted, and has its own disks");
        let interrupted = || VmError::Disk {
            vm: name.clone(),
            why: "another program changed its disks meanwhile, or the daemon was restarted; adopt it again"
                .to_owned(),
        };
        Err(failure.unwrap_or_else(|| interrupted().into()))
    }

    /// Switches the disks of a VM back to their files, resumes it and forgets it. If that fails, the disks are served as
    /// before. Returns a note for the user.
    async fn finish_release(
        self: &Arc<Self>,
        adopted: &Adopted,
        is_new: IsNew,
        _turn: crate::vms::Turn,
    ) -> Result<Option<String>, RequestError> {
        let (name, began) = (&adopted.name, Instant::now());
        match self.exchange_disks(adopted, Goal::Files, is_new).await {
            Ok(Exchanged { goal: Goal::Files, .. }) => {}
            Ok(Exchanged { goal: Goal::Volumes, failure }) => {
                self.let_it_run(name).await?;
                if self.vms.get(name).is_ok() {
                    // The VM is managed by Sterna as before.
                    self.forget_adopted(name).await?;
                }
                let unknown = || VmError::Disk { vm: name.clone(), why: "QEMU does not say why".to_owned() };
                return Err(failure.unwrap_or_else(|| unknown().into()));
            }
            Err(QemuEnded) => self.stop_serving(adopted).await?,
        }
        self.let_it_run(name).await?;
        tracing::info!(vm = %name, pause = ?began.elapsed(), "the VM has its disks back");
        self.end_release(adopted).await
    }

    /// Forgets a released VM. Returns how to start it without Sterna if Sterna had started it.
    async fn end_release(self: &Arc<Self>, adopted: &Adopted) -> Result<Option<String>, RequestError> {
        let name = &adopted.name;
        let mut message = None;
        if self.vms.get(name).is_ok() {
            let images = adopted.disks.iter().map(|kept| GivenBack {
                path: kept.file.clone(),
                format: kept.format.clone(),
                volume: kept.volume.clone(),
            });
            let written = self.vms.write_script(name, images.collect()).await;
            if let Err(error) = &written {
                tracing::warn!(vm = %name, %error, "cannot write the command that starts the VM without Sterna");
            }
            message = written.ok().flatten().map(|path| format!("to start it again: {}", path.display()));
        }
        self.vms.let_go(name).await?;
        self.forget_adopted(name).await?;
        self.vms.holds.forget(name).await;
        Ok(message)
    }

    /// Connects disks that have no image to their volumes again.
    async fn regain_disks(self: &Arc<Self>, adopted: &Adopted) -> Result<(), RequestError> {
        let failed = |error| RequestError::from(VmError::of(&adopted.name)(error));
        let qemu = self.monitor_of(adopted).await.map_err(failed)?;
        let has_lost_one = self.has_lost_a_disk(adopted, &qemu).await?;
        drop(qemu);
        if has_lost_one {
            let adopted = self.where_it_is_now(adopted.clone())?;
            // The caller, which resumes the VM, notices if it has ended.
            let _ = self.exchange_disks(&adopted, Goal::Volumes, IsNew::Yes).await;
        }
        Ok(())
    }

    /// Resumes a VM that Sterna has paused.
    pub(crate) async fn let_it_run(self: &Arc<Self>, name: &str) -> Result<(), RequestError> {
        let adopted = self.vms.adoptions()?.get(name);
        match self.vms.holds.let_run(name, self.hypervisor_of(name, adopted.as_ref())).await {
            Ran::Runs => Ok(()),
            Ran::Ended => Err(VmError::NotRunning(name.to_owned()).into()),
            Ran::Elsewhere => {
                let why = "it may run at the target host, and must not run at both".to_owned();
                Err(VmError::Paused { vm: name.to_owned(), why }.into())
            }
        }
    }

    /// Returns a function that finds the hypervisor of a managed or adopted VM.
    fn hypervisor_of(
        self: &Arc<Self>,
        name: &str,
        adopted: Option<&Adopted>,
    ) -> impl Fn() -> futures_util::future::BoxFuture<'static, Reached> + use<> {
        let (host, name, adopted) = (Arc::clone(self), name.to_owned(), adopted.cloned());
        move || {
            let (host, name, adopted) = (Arc::clone(&host), name.clone(), adopted.clone());
            Box::pin(async move {
                match (host.vms.get(&name), adopted) {
                    (Ok(known), _) => match known.life {
                        Life::Alive(alive) => Reached::There(alive.qemu),
                        Life::Starting => Reached::Silent("its QEMU does not answer".to_owned()),
                        Life::Stopped | Life::Crashed(_) | Life::Suspended(_) => Reached::Ended,
                    },
                    (Err(_), Some(adopted)) => match monitors::connect_to(&adopted).await {
                        Ok(qemu) => Reached::There(Arc::new(qemu)),
                        Err(error) if error.nobody_listens() => Reached::Ended,
                        Err(error) => Reached::Silent(error.to_string()),
                    },
                    (Err(_), None) => Reached::Ended,
                }
            })
        }
    }

    /// Runs work to its end. If that takes long, returns that it continues in the background.
    async fn answer_within<T: Send + 'static>(
        self: &Arc<Self>,
        name: &str,
        work: impl Future<Output = Result<T, RequestError>> + Send + 'static,
    ) -> Result<T, RequestError> {
        match tokio::time::timeout(ANSWER_WITHIN, tokio::spawn(work)).await {
            Ok(done) => done.unwrap_or_else(|error| Err(RequestError::Internal(error.to_string()))),
            Err(_) => {
                let why = self.vms.holds.why(name).unwrap_or_else(|| "QEMU does not answer".to_owned());
                Err(VmError::Paused { vm: name.to_owned(), why }.into())
            }
        }
    }

    /// Returns an adopted VM with the present paths of its images.
    fn where_it_is_now(&self, adopted: Adopted) -> Result<Adopted, RequestError> {
        let mut adopted = adopted;
        for kept in &mut adopted.disks {
            // A disk without a volume has been released, or has no image.
            let Ok(record) = self.claims.record_named(&kept.volume) else { continue };
            let place = &record.image.place;
            let Some(file) = place.file() else {
                let detail =
                    "a VM gets its disks back as files of this host; move the volume to a folder here first";
                return Err(RequestError::ImageUnsuitable {
                    path: place.name().into(),
                    detail: detail.to_owned(),
                });
            };
            kept.file = file.into();
            kept.format = name_of(record.image.format).to_owned();
            kept.size_bytes = record.size_bytes;
        }
        Ok(adopted)
    }

    /// Describes a VM that Sterna has started like an adopted one.
    async fn describe_own(self: &Arc<Self>, name: &str) -> Result<Adopted, RequestError> {
        let known = self.vms.get(name)?;
        let qemu = self.vms.qemu(name)?;
        let mut disks = Vec::new();
        for (index, volume) in known.volumes.iter().enumerate() {
            let address = self.exports.export_named(volume);
            let disk = qemu.disk_over(&address).await.map_err(VmError::of(name))?;
            let Some(disk) = disk else {
                let why = format!("QEMU has no disk that is over the volume {volume}");
                return Err(VmError::Disk { vm: name.to_owned(), why }.into());
            };
            let number = disk.number().unwrap_or_else(|| u32::try_from(index).unwrap_or(u32::MAX));
            disks.push(AdoptedDisk::of(&disk, volume.clone(), number));
        }
        let adopted = Adopted {
            name: name.to_owned(),
            monitor: known.monitor,
            monitor_user: None,
            user: socket_user(&launched(name, &qemu).await?),
            disks,
            added_unix_ms: now_unix_ms(),
            libvirt: None,
            is_bound: false,
        };
        self.where_it_is_now(adopted)
    }

    /// Returns the monitor of a VM whose disks are served; for a managed VM this is the existing connection.
    pub(crate) async fn monitor_of(&self, adopted: &Adopted) -> Result<Arc<Qemu>, HypervisorError> {
        self.vms.until_found(&adopted.name).await;
        match self.vms.qemu(&adopted.name) {
            Ok(qemu) => Ok(qemu),
            Err(_) => monitors::connect_to(adopted).await.map(Arc::new),
        }
    }

    /// Returns whether a VM's QEMU has ended, given an error of its monitor. **N.B.** A monitor whose name is gone may still be there,
    /// and its QEMU may have no connection to the volumes: it connects again at its next request.
    pub(crate) fn has_ended_qemu(&self, adopted: &Adopted, error: &HypervisorError) -> bool {
        error.nobody_listens()
            && self.vms.qemu(&adopted.name).is_err()
            && !monitors::still_listens(&adopted.monitor)
    }

    pub(crate) async fn describe_adopted(&self) -> Vec<Vm> {
        let mut adopted = self.vms.adoptions().map(crate::vms::Adoptions::list).unwrap_or_default();
        // A VM that leaves is listed among the managed VMs.
        adopted.retain(|vm| self.vms.get(&vm.name).is_err());
        futures_util::future::join_all(
            adopted.iter().map(|vm| self.describe_held(vm, adopted::ANSWER_TIMEOUT)),
        )
        .await
    }

    pub(crate) async fn describe_adopted_one(&self, name: &str) -> Option<Vm> {
        let adopted = self.vms.adoptions().ok()?.get(name).filter(|_| self.vms.get(name).is_err())?;
        Some(self.describe_held(&adopted, adopted::ANSWER_TIMEOUT).await)
    }

    async fn describe_held(&self, adopted: &Adopted, answer_max: Duration) -> Vm {
        if let Some(domain) = &adopted.libvirt {
            return self.describe_domain(adopted, domain, answer_max).await;
        }
        let mut vm = self.with_hold(self.describe_briefly(adopted).await);
        if vm.state != api::VmState::Running {
            vm.message = self.vms.holds.why(&adopted.name).or(vm.message);
        }
        vm
    }

    pub(crate) async fn remember_adopted(self: &Arc<Self>, adopted: Adopted) -> Result<(), RequestError> {
        let host = Arc::clone(self);
        blocking(move || Ok(host.vms.adoptions()?.put(&adopted).map_err(VmError::from)?)).await
    }

    /// Forgets an adopted VM. Its user does not get the sockets of later volumes that have the names of its disks.
    pub(crate) async fn forget_adopted(self: &Arc<Self>, name: &str) -> Result<(), RequestError> {
        let (host, name) = (Arc::clone(self), name.to_owned());
        blocking(move || {
            let adopted = host.vms.adoptions()?.get(&name).filter(|adopted| !adopted.is_bound);
            host.vms.adoptions()?.remove(&name).map(drop).map_err(VmError::from)?;
            let disks = adopted.iter().flat_map(|adopted| &adopted.disks);
            // A VM that Sterna has started, and whose release has failed, keeps the sockets of its disks.
            let left = disks.filter(|kept| host.vms.user_of(&kept.volume).is_none());
            left.for_each(|kept| host.sockets.grants().take(&kept.volume));
            Ok(())
        })
        .await
    }
}

enum Named {
    Monitor(PathBuf),
    Domain(String),
}

fn monitor_named(order: &AdoptVm) -> Result<Named, RequestError> {
    match (&order.monitor, &order.libvirt) {
        (Some(monitor), None) if order.store.is_none() => Ok(Named::Monitor(PathBuf::from(monitor))),
        (None, Some(domain)) => Ok(Named::Domain(domain.clone())),
        (Some(_), None) => {
            let text = "images that QEMU has open are served in their place; leave the store out, and move the volumes \
                afterwards";
            Err(RequestError::Invalid(text.to_owned()))
        }
        _ => {
            let text = "a VM is adopted by its monitor (QMP) or as a domain of libvirt: name one of them";
            Err(RequestError::Invalid(text.to_owned()))
        }
    }
}

/// Returns the user who needs the sockets of a VM's disks; `None`: QEMU can use every socket of this daemon.
/// **N.B.** The kernel names the user of the process. A monitor's answer is not asked for.
fn socket_user(process: &Launched) -> Option<u32> {
    Some(process.owner.0).filter(|user| *user != 0 && !held::is_own_user(*user))
}

async fn runs(name: &str, qemu: &Qemu) -> Result<bool, RequestError> {
    Ok(qemu.status().await.map_err(VmError::of(name))? == RunState::Running)
}

/// Returns the requested disks, or all writable ones; fails if one of them cannot be adopted.
async fn choose(name: &str, qemu: &Qemu, wanted: &[String]) -> Result<Vec<LocalDisk>, RequestError> {
    let refuse = |why: String| RequestError::from(VmError::Disk { vm: name.to_owned(), why });
    let found = qemu.local_disks().await.map_err(VmError::of(name))?;
    let seen = launched(name, qemu).await?;
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
                        "{}: the place of its image {file} is unknown; start QEMU with absolute paths",
                        disk.device
                    ))
                })?;
                chosen.push(LocalDisk { file: named, ..disk });
            }
            // Firmware moves with its VM as a file.
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
