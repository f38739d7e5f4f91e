//! Suspends VMs to disk, and restores them: carries out the steps that [`migration::vm::suspend`] has in order.

use std::sync::Arc;
use std::time::Duration;

use api::{StartVm, SuspendVm, Vm};
use hypervisor::RunState;
use hypervisor::qemu::memory_socket;
use migration::vm::hold::Reason;
use migration::vm::suspend::{RESTORE, RestoreStep, SAVE, SaveStep};

use crate::error::RequestError;
use crate::fail_point::{self, Step as FailPoint};
use crate::host::{VmOrders, blocking};
use crate::journal::now_unix_ms;
use crate::vms::catalogue::Fate;
use crate::vms::orders::manage::SHUT_DOWN_TIMEOUT;
use crate::vms::suspended::{DiskMark, Written};
use crate::vms::{Alive, Life, Saved, VmError, qemu_sockets};
use crate::volumes::registry::Claim;

impl VmOrders {
    /// Suspends a VM to disk. Answers when its QEMU has ended. After an error the VM is as before.
    pub(crate) async fn suspend_vm(
        self: Arc<Self>,
        name: String,
        how: SuspendVm,
    ) -> Result<Vm, RequestError> {
        let limit = Duration::from_secs(how.timeout_s.unwrap_or(SuspendVm::TIMEOUT_S_DEFAULT));
        if limit.is_zero() || limit > SHUT_DOWN_TIMEOUT {
            let text = "timeout_s is out of range: from a second to an hour".to_owned();
            return Err(RequestError::Invalid(text));
        }
        self.refuse_adopted(&name)?;
        self.refuse_moving(&name)?;
        let _operation = self.vms.operate(&name)?;
        let _turn = self.vms.turn(&name)?;
        let alive = self.vms.alive(&name)?;
        let was_running = self.runs_or_is_paused(&name, &alive).await?;
        // N.B. No disk moves, grows or is reverted meanwhile, and all of each is here.
        let _claims = self.claim_disks(&name).await?;
        let memory_bytes = alive.qemu.memory_bytes().await.map_err(VmError::of(&name))?;
        let (host, of, process) = (Arc::clone(&self), name.clone(), alive.process_id());
        blocking(move || Ok(host.vms.check_memory_fits(&of, process, memory_bytes)?)).await?;
        if let Err(error) = self.save(&name, &alive, limit, was_running).await {
            let reason = error.message();
            tracing::warn!(vm = %name, reason, "the VM is not suspended, and goes on");
            self.go_on(&name).await;
            return Err(match error {
                RequestError::Vm(VmError::GoesOn { .. }) => error,
                _ if matches!(self.vms.life(&name), Ok(Life::Alive(_))) => {
                    VmError::GoesOn { vm: name, why: reason }.into()
                }
                // Its QEMU has ended by itself.
                error => error,
            });
        }
        self.vms.holds.forget(&name).await;
        self.describe_vm(&name).await
    }

    /// Starts a VM whose volumes are served: restores it if it is suspended, unless its memory is to be given up.
    pub(crate) async fn start_vm(self: Arc<Self>, name: String, how: StartVm) -> Result<Vm, RequestError> {
        self.refuse_adopted(&name)?;
        self.refuse_moving(&name)?;
        for volume in self.vms.get(&name)?.volumes {
            self.refuse_disk_elsewhere(&name, &volume)?;
            self.volumes.lane(&volume).await?;
        }
        if self.vms.is_suspended(&name) && !how.discard_memory {
            self.restore_vm(&name).await?;
            return self.has_started(&name).await;
        }
        if self.vms.is_suspended(&name) {
            let _operation = self.vms.operate(&name)?;
            self.vms.discard_memory(&name).await?;
            tracing::info!(vm = %name, "the memory of the suspended VM is given up");
        }
        self.vms.start(&name, &self.sockets).await?;
        self.has_started(&name).await
    }

    /// Returns whether the guest runs; fails if it neither runs nor is paused by an order.
    async fn runs_or_is_paused(&self, name: &str, alive: &Alive) -> Result<bool, RequestError> {
        let why = match alive.qemu.status().await.map_err(VmError::of(name))? {
            RunState::Running => return Ok(true),
            RunState::Paused | RunState::PreLaunch => return Ok(false),
            RunState::IoError => {
                format!("a disk answered with an error; repair it, and first: sterna vm resume {name}")
            }
            RunState::Shutdown => format!("its guest has shut down; end it: sterna vm stop {name} --now"),
            RunState::PostMigrate => format!("it is paused since a move; first: sterna vm resume {name}"),
            RunState::Other(state) if state == "suspended" => {
                "its guest sleeps (ACPI S3); wake it first (QMP: system_wakeup)".to_owned()
            }
            other => format!("QEMU says: {other}; see: sterna vm show {name}"),
        };
        Err(VmError::NotSuspended { vm: name.to_owned(), why }.into())
    }

    async fn claim_disks(&self, name: &str) -> Result<Vec<Claim>, RequestError> {
        let mut claims = Vec::new();
        for volume in self.vms.get(name)?.volumes {
            claims.push(self.claims.claim_to_clone(&volume).await?.0);
        }
        Ok(claims)
    }

    async fn save(
        self: &Arc<Self>,
        name: &str,
        alive: &Alive,
        limit: Duration,
        was_running: bool,
    ) -> Result<(), RequestError> {
        let mut written = Written { bytes: 0, checksum: 0 };
        let mut disks = Vec::new();
        let mut file = self.vms.memory_file(name);
        for step in SAVE {
            fail_point::before(FailPoint::Suspend);
            match step {
                SaveStep::Note => self.vms.holds.hold(name, Reason::Suspend, was_running).await?,
                SaveStep::Pause => alive.qemu.stop().await.map_err(VmError::of(name))?,
                SaveStep::Write => written = self.vms.write_memory(name, alive, limit).await?,
                SaveStep::Flush => disks = self.marks_of_disks(name).await?,
                SaveStep::Keep => {
                    let (host, of) = (Arc::clone(self), name.to_owned());
                    file = blocking(move || Ok(host.vms.keep_memory_file(&of)?)).await?;
                }
                SaveStep::RecordSaved => {
                    let memory = Saved {
                        file: file.clone(),
                        bytes: written.bytes,
                        checksum: written.checksum,
                        hypervisor: format!("QEMU {}", alive.qemu.version()),
                        was_running,
                        since_unix_ms: now_unix_ms(),
                        disks: std::mem::take(&mut disks),
                    };
                    self.vms.remember(name, Fate::Saved { memory }).await?;
                }
                // Its end is recorded by whoever watches it.
                SaveStep::End => self.vms.cut_off(name, alive).await,
                SaveStep::RecordSuspended => {
                    if !self.vms.is_suspended(name) {
                        return Err(VmError::NotRunning(name.to_owned()).into());
                    }
                }
            }
        }
        Ok(())
    }

    /// Lets a VM go on that is not suspended after all.
    async fn go_on(self: &Arc<Self>, name: &str) {
        // N.B. Before the guest runs: its memory must not be used once its disks have changed.
        self.vms.invalidate_memory(name).await;
        if let Err(error) = self.let_it_run(name).await {
            let reason = error.message();
            tracing::warn!(vm = %name, reason, "cannot resume the VM that was not suspended");
        }
    }

    /// Makes the disks of a VM durable, and returns how they are.
    async fn marks_of_disks(&self, name: &str) -> Result<Vec<DiskMark>, RequestError> {
        for volume in self.vms.get(name)?.volumes {
            if !self.volumes.lane(&volume).await?.flush_for_standby().await {
                let why = format!(
                    "its disk {volume} cannot be made durable; the daemon's log says why (sterna volume show {volume})"
                );
                return Err(VmError::GoesOn { vm: name.to_owned(), why }.into());
            }
        }
        self.present_marks(name).await
    }

    /// Returns how the disks of a VM are, as far as they are files.
    async fn present_marks(&self, name: &str) -> Result<Vec<DiskMark>, RequestError> {
        let mut images = Vec::new();
        for volume in self.vms.get(name)?.volumes {
            let record = self.claims.record_named(&volume)?;
            images.extend(record.image.place.file().map(|file| (volume, std::path::PathBuf::from(file))));
        }
        blocking(move || {
            let marks = images.iter().map(|(volume, image)| {
                DiskMark::of(volume, image).map_err(|error| VmError::io("examine", image, error))
            });
            Ok(marks.collect::<Result<Vec<_>, _>>()?)
        })
        .await
    }

    /// Restores a suspended VM. After an error it is suspended as before.
    async fn restore_vm(self: &Arc<Self>, name: &str) -> Result<(), RequestError> {
        let _operation = self.vms.operate(name)?;
        let _turn = self.vms.turn(name)?;
        let saved = self.vms.saved(name)?;
        self.check_restorable(name, &saved).await?;
        let mut alive = None;
        for step in RESTORE {
            fail_point::before(FailPoint::Restore);
            let done = self.restore_step(step, name, &saved, &mut alive).await;
            if let Err(error) = done {
                if matches!(self.vms.life(name), Ok(Life::Alive(_))) && self.vms.suspended_of(name) {
                    self.give_up_restore(name, alive.as_ref()).await;
                }
                return Err(error);
            }
        }
        Ok(())
    }

    async fn restore_step(
        self: &Arc<Self>,
        step: RestoreStep,
        name: &str,
        saved: &Saved,
        alive: &mut Option<Alive>,
    ) -> Result<(), RequestError> {
        match step {
            RestoreStep::Launch => *alive = Some(self.vms.launch_to_restore(name, &self.sockets).await?),
            RestoreStep::Load => {
                if let Some(alive) = alive {
                    let loaded = self.vms.load_memory(name, alive, saved).await;
                    loaded.map_err(|why| VmError::NotRestored { vm: name.to_owned(), why })?;
                }
            }
            // A VM that was paused stays so, and needs no note.
            RestoreStep::Note if saved.was_running => {
                self.vms.holds.hold(name, Reason::Resume, true).await?;
            }
            // N.B. From here on the file is invalid, and the guest may run.
            RestoreStep::RecordNothing => self.vms.remember(name, Fate::Started).await?,
            RestoreStep::Run if saved.was_running => self.let_it_run(name).await?,
            RestoreStep::Run => {
                if let Some(alive) = alive {
                    let socket = memory_socket(alive.qemu.socket());
                    let taken = alive.qemu.take_disks(&qemu_sockets::place(&socket)).await;
                    taken.map_err(VmError::of(name))?;
                }
            }
            RestoreStep::Note => {}
            RestoreStep::Delete => {
                if let Some(alive) = alive {
                    // The network learns its place from the guest's next packet otherwise.
                    let _ = alive.qemu.announce().await;
                }
                tracing::info!(vm = %name, "the suspended VM is restored");
                let (saved, of) = (saved.clone(), name.to_owned());
                blocking(move || {
                    saved.delete_with_warning(&of);
                    Ok(())
                })
                .await?;
            }
        }
        Ok(())
    }

    /// Ends a QEMU that has not run, so that its VM is suspended as before.
    async fn give_up_restore(self: &Arc<Self>, name: &str, alive: Option<&Alive>) {
        if let Some(alive) = alive {
            self.vms.kill_loading(name, alive).await;
        }
        self.vms.holds.forget(name).await;
    }

    /// Fails if the memory of a suspended VM cannot be used: its file is not as it was, or somebody has written to its disks.
    async fn check_restorable(&self, name: &str, saved: &Saved) -> Result<(), RequestError> {
        let refused = |why: String| RequestError::from(VmError::NotRestored { vm: name.to_owned(), why });
        let of = saved.clone();
        let opened = blocking(move || Ok(of.open().map(drop))).await?;
        opened.map_err(|error| {
            refused(format!("the file with its memory, {}: {error}", saved.file.display()))
        })?;
        let present = self.present_marks(name).await?;
        let known = |mark: &&DiskMark| saved.disks.iter().any(|disk| disk.volume == mark.volume);
        let is_other = |mark: &&DiskMark| known(mark) && !saved.disks.contains(mark);
        match present.iter().find(is_other) {
            None => Ok(()),
            Some(mark) => Err(refused(format!(
                "its disk {} was written since, by a client of the volume or by hand: what the guest remembers of the disk is wrong, \
                 and going on would destroy it",
                mark.volume
            ))),
        }
    }
}
