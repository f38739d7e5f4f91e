//! The life of a VM's QEMU: started, found again, watched, and ended.

use std::fs::{DirBuilder, Permissions};
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use hypervisor::qemu::command_line::sandbox;
use hypervisor::qemu::{Events, Heard, Qemu};
use hypervisor::{Hypervisor, HypervisorError};
use tokio::time::{sleep, timeout};

use super::catalogue::Fate;
use super::process::{self, Process};
use super::{
    Alive, Definition, END_DEADLINE, Ending, Life, START_DEADLINE, VmError, Vms, manifest, tpm, unprivileged,
};
use crate::config::{QemuUser, RunsAs};
use crate::error::with_causes;
use crate::fail_point::{self, Step};
use crate::files::sockets::SocketFolder;
use crate::vms::{monitors, qemu_sockets};

/// The mode that lets only the daemon's user control VMs.
const MONITORS_FOLDER_MODE: u32 = 0o700;
/// A QEMU with another user passes through the folder; the mode of each socket says who may connect.
const PASSED_FOLDER_MODE: u32 = 0o711;
/// How long a process may take to end after its monitor has gone, before the monitor is searched again.
const AFTER_MONITOR_DEADLINE: Duration = Duration::from_secs(5);
const MONITOR_INTERVAL: Duration = Duration::from_secs(1);
/// QEMU's event of an orderly end: by its guest, by Sterna, or by a permitted signal.
const ORDERLY_END: &str = "SHUTDOWN";
/// QEMU's events when a guest that has shut down starts again or is resumed.
const BEGINS_ANEW: [&str; 2] = ["RESET", "RESUME"];

impl Vms {
    /// Begins to look for the VMs that were running when the daemon ended. May block.
    pub(crate) fn find_running(self: &Arc<Self>) {
        let starting = |life: &Life| matches!(life, Life::Starting);
        let names: Vec<String> = {
            let entries = self.entries();
            let lost = entries.iter().filter(|(_, entry)| starting(&entry.life));
            lost.map(|(name, _)| name.clone()).collect()
        };
        // N.B. Before any order is carried out that makes such a file.
        self.delete_left_memories();
        for name in names {
            let vms = Arc::clone(self);
            tokio::spawn(async move {
                match vms.find(&name).await {
                    Some((alive, events)) => {
                        tracing::info!(vm = %name, process = alive.process_id(), "the VM runs");
                        vms.watch(name, alive, events);
                    }
                    None => vms.ended(&name, None, false).await,
                }
            });
        }
    }

    /// Starts QEMU with further words at the end of its command, and returns when it answers.
    pub(super) async fn launch(
        self: &Arc<Self>,
        name: &str,
        sockets: &SocketFolder,
        more: &[&str],
    ) -> Result<Alive, VmError> {
        let definition = {
            let entries = self.entries();
            let entry = entries.get(name).ok_or_else(|| VmError::NotFound(name.to_owned()))?;
            Arc::clone(&entry.definition)
        };
        let (folder, monitor, log) = (self.vm_folder(name), self.monitor(name), self.log(name));
        self.make_monitors_folder()?;
        manifest::make_own_folder(&folder).map_err(|error| VmError::io("make", &folder, error))?;
        let user = self.user_for(name, &definition).await?;
        let user = user.as_ref();
        self.make_room(&definition, (&folder, &monitor), user, sockets)?;
        // A QEMU with a user of its own finds them from its working directory, because it may not pass through the folders above.
        let files = if user.is_some() { PathBuf::new() } else { folder.clone() };
        let mut command = definition.command(
            name,
            (&qemu_sockets::place(&monitor), &tpm::socket(&monitor)),
            |volume| sockets.volume_socket(volume),
            |file| manifest::file(&files, file),
            |name| manifest::own_path(&files, name),
        );
        command.extend(more.iter().map(|word| (*word).to_owned()));
        command.extend(sandbox::words(&definition.command_with_places()));
        if let Some(user) = user {
            command = user.command(command);
        }
        // Reasons of an earlier QEMU to be paused have ended.
        self.holds.forget(name).await;
        // N.B. Recorded before the process starts: if the daemon is killed in between, the next one looks for the process.
        let (during, (life, fate)) = self.fates_of_launch(name);
        self.remember(name, during).await?;
        self.set(name, None, Life::Starting);
        let launched = async {
            if let Some((folder, socket)) = self.tpm(name) {
                let vm = || name.to_owned();
                let started = tpm::start(&folder, &socket, user).await;
                let mut tpm = started.map_err(|source| VmError::Program {
                    vm: vm(),
                    program: tpm::PROGRAM.to_owned(),
                    source,
                })?;
                tokio::spawn(async move { tpm.wait().await });
            }
            let child = process::start(&command, &folder, &log);
            let program = command.first().cloned().unwrap_or_default();
            let mut child =
                child.map_err(|source| VmError::Program { vm: name.to_owned(), program, source })?;
            fail_point::after(Step::Launch);
            let process = child.id().and_then(|id| i32::try_from(id).ok());
            let connected = tokio::select! {
                connected = self.connect(name, &monitor) => connected,
                _ = child.wait() => return Err(self.last_words(name, user)),
            };
            let taken = connected.and_then(|qemu| {
                // N.B. the QEMU of another VM with the same user may have listened there before.
                if qemu.process() != process {
                    return Err(VmError::Unusable("another process has the monitor's socket".to_owned()));
                }
                self.take(name, qemu)
            });
            match taken {
                Ok(alive) => {
                    // The kernel keeps an ended process until its parent has waited for it.
                    tokio::spawn(async move { child.wait().await });
                    Ok(alive)
                }
                Err(error) => {
                    // No part of it may be left running.
                    if let Err(error) = child.kill().await {
                        tracing::warn!(vm = %name, %error, "a QEMU that does not answer is not killed");
                    }
                    Err(error)
                }
            }
        };
        match launched.await {
            Ok(alive) => {
                tracing::info!(vm = %name, process = alive.process_id(), "VM started");
                self.set(name, None, Life::Alive(alive.clone()));
                self.watch(name.to_owned(), alive.clone(), alive.qemu.events());
                Ok(alive)
            }
            Err(error) => {
                self.tpm_ended(name).await;
                self.set(name, None, life);
                self.remember(name, fate).await?;
                Err(error)
            }
        }
    }

    async fn connect(&self, name: &str, monitor: &Path) -> Result<Qemu, VmError> {
        let made = qemu_sockets::take_out_within(monitor, START_DEADLINE).await;
        made.map_err(|error| VmError::io("use QEMU's socket", monitor, error))?;
        Qemu::connect_within(monitor, START_DEADLINE).await.map_err(VmError::of(name))
    }

    /// Gives QEMU what it needs to run as `user`: its files, a folder for its sockets, and the sockets of its disks.
    fn make_room(
        &self,
        definition: &Definition,
        (folder, monitor): (&Path, &Path),
        user: Option<&QemuUser>,
        sockets: &SocketFolder,
    ) -> Result<(), VmError> {
        let refused = |error| VmError::io("give to QEMU", folder, error);
        let Some(user) = user else { return qemu_sockets::remove_folder(monitor).map_err(refused) };
        unprivileged::give_files(folder, user).map_err(refused)?;
        qemu_sockets::make_folder(monitor, user.user, user.group).map_err(refused)?;
        let granted = definition.volumes().iter().try_for_each(|volume| sockets.grant(volume, user.user));
        granted.map_err(|error| VmError::Unusable(with_causes(&error)))
    }

    /// Makes the folder of the monitors' sockets, unless it exists.
    pub(super) fn make_monitors_folder(&self) -> Result<(), VmError> {
        let mode = match self.allowed.runs_as {
            RunsAs::Other(_) => PASSED_FOLDER_MODE,
            RunsAs::Daemon | RunsAs::Root => MONITORS_FOLDER_MODE,
        };
        let made = DirBuilder::new().recursive(true).mode(mode).create(&self.monitors);
        // It may have been made while QEMU ran as another user.
        let made = made.and_then(|()| std::fs::set_permissions(&self.monitors, Permissions::from_mode(mode)));
        made.map_err(|error| VmError::io("make", &self.monitors, error))
    }

    pub(super) async fn end(&self, name: &str, alive: &Alive, ending: Ending) -> Result<(), VmError> {
        let Ending::PowerButton(patience) = ending else {
            self.cut_off(name, alive).await;
            return Ok(());
        };
        alive.qemu.power_down().await.map_err(VmError::of(name))?;
        let ended = timeout(patience, alive.process.ended()).await;
        ended.map_err(|_| VmError::RunsOn { vm: name.to_owned(), seconds: patience.as_secs() })?;
        self.until_noticed(name, alive).await;
        Ok(())
    }

    /// Ends QEMU: by its monitor, or else by a signal.
    pub(super) async fn cut_off(&self, name: &str, alive: &Alive) {
        let quit = async {
            alive.qemu.quit().await?;
            alive.process.ended().await;
            Ok::<(), HypervisorError>(())
        };
        if !matches!(timeout(END_DEADLINE, quit).await, Ok(Ok(()))) {
            tracing::warn!(vm = %name, "QEMU does not quit when ordered; it is killed");
            alive.process.kill();
            alive.process.ended().await;
        }
        self.until_noticed(name, alive).await;
    }

    /// Kills a QEMU that has nothing to lose.
    pub(super) async fn put_down(&self, name: &str, alive: &Alive) {
        // Its end need not be reported.
        if let Some(watch) = self.entries().get_mut(name).and_then(|entry| entry.watch.take()) {
            watch.abort();
        }
        alive.process.kill();
        alive.process.ended().await;
        self.tpm_ended(name).await;
        self.remove_monitors(name);
        self.set(name, Some(alive), Life::Stopped);
    }

    /// Kills a QEMU that an earlier daemon started and whose monitor does not answer.
    pub(super) async fn kill_silent(&self, name: &str) -> Result<(), VmError> {
        let process = Process::of_log(&self.log(name));
        let process = process.ok_or_else(|| VmError::NotRunning(name.to_owned()))?;
        process.kill();
        process.ended().await;
        self.until_found(name).await;
        Ok(())
    }

    /// Records the state of a VM's QEMU.
    pub(super) async fn remember(self: &Arc<Self>, name: &str, fate: Fate) -> Result<(), VmError> {
        let (vms, name) = (Arc::clone(self), name.to_owned());
        let remembered = tokio::task::spawn_blocking(move || vms.record(&name, |record| record.fate = fate));
        remembered.await.unwrap_or_else(|error| Err(VmError::Unusable(error.to_string())))
    }

    /// Opens the process behind a monitor.
    pub(super) fn take(&self, name: &str, qemu: Qemu) -> Result<Alive, VmError> {
        let monitor = self.monitor(name);
        let id = qemu.process().ok_or_else(|| VmError::Unusable("the kernel names no process".to_owned()))?;
        let process =
            Process::open(id).map_err(|error| VmError::io("find the process of", &monitor, error))?;
        Ok(Alive { qemu: Arc::new(qemu), process: Arc::new(process) })
    }

    /// Finds a VM by its monitor; `None`: no process listens there, and the VM's process has ended. Waits for a QEMU that does
    /// not answer, because its disk may wait for the daemon, and for one that does not listen yet, because the daemon may have
    /// been killed just after it had started QEMU. **N.B.** A VM wrongly taken for ended would be started a second time.
    async fn find(self: &Arc<Self>, name: &str) -> Option<(Alive, Events)> {
        // Opened so that its output is read.
        let _ = self.lifeline(name);
        let mut is_told = false;
        let monitor = self.monitor(name);
        loop {
            // The daemon that started it may have been killed before it did this.
            if let Err(error) = qemu_sockets::take_out(&monitor) {
                tracing::warn!(vm = %name, %error, "the VM's monitor cannot be used");
            }
            match monitors::connect(&monitor).await {
                Ok(qemu) => {
                    let events = qemu.events();
                    // An answer after its process was opened proves that it is the right process.
                    if let Ok(alive) = self.take(name, qemu)
                        && let Ok(state) = alive.qemu.status().await
                    {
                        if self.has_to_end(name, &state).await {
                            alive.process.kill();
                            alive.process.ended().await;
                            return None;
                        }
                        self.set(name, None, Life::Alive(alive.clone()));
                        return Some((alive, events));
                    }
                }
                Err(error) if error.is_gone() => {
                    let process = Process::of_log(&self.log(name))?;
                    if !std::mem::replace(&mut is_told, true) {
                        let process = process.id();
                        tracing::warn!(vm = %name, process, "the VM's process does not listen at its monitor; waiting until it \
                            does or has ended");
                    }
                    let _ = timeout(MONITOR_INTERVAL, process.ended()).await;
                    continue;
                }
                Err(error) => tracing::warn!(vm = %name, %error, "the VM's monitor does not answer yet"),
            }
            sleep(MONITOR_INTERVAL).await;
        }
    }

    /// Watches a VM until its end, in a task of its own.
    pub(super) fn watch(self: &Arc<Self>, name: String, mut alive: Alive, mut events: Events) {
        let (vms, watched) = (Arc::clone(self), name.clone());
        let watch = tokio::spawn(async move {
            let mut is_orderly = false;
            loop {
                match events.next().await {
                    Heard::Event(event) if event.name == ORDERLY_END => is_orderly = true,
                    // It was kept after its shutdown (`-no-shutdown`), and has been started again since.
                    Heard::Event(event) if BEGINS_ANEW.contains(&event.name.as_str()) => is_orderly = false,
                    Heard::Event(_) => {}
                    Heard::Missed(_) => {}
                    Heard::Gone => {
                        if timeout(AFTER_MONITOR_DEADLINE, alive.process.ended()).await.is_ok() {
                            break;
                        }
                        // The process exists without its monitor, whose connection was lost.
                        let Some((found, heard)) = vms.find(&name).await else {
                            alive.process.ended().await;
                            break;
                        };
                        (alive, events) = (found, heard);
                    }
                }
            }
            vms.ended(&name, Some(&alive), is_orderly).await;
        });
        if let Some(entry) = self.entries().get_mut(&watched) {
            entry.watch = Some(watch.abort_handle());
        }
    }

    async fn ended(self: &Arc<Self>, name: &str, alive: Option<&Alive>, is_orderly: bool) {
        self.tpm_ended(name).await;
        let (life, fate) = if let Some(suspended) = self.suspended_after_end(name) {
            suspended
        } else if is_orderly {
            (Life::Stopped, Fate::Stopped)
        } else {
            let message = match alive {
                Some(_) => process::last_words(&self.log(name)),
                None => {
                    format!("it ended while the daemon was away: {}", process::last_words(&self.log(name)))
                }
            };
            tracing::warn!(vm = %name, %message, "the VM has ended without an order");
            (Life::Crashed(message.clone()), Fate::Crashed { message })
        };
        // It may have been removed meanwhile.
        if let Err(error) = self.remember(name, fate).await {
            tracing::debug!(vm = %name, %error, "cannot record the end of a VM");
        }
        self.remove_monitors(name);
        self.set(name, alive, life);
    }

    /// Ends a VM whose memory is lost, if its QEMU still is `of`, and records why. `None`: it has not answered since this
    /// daemon began, or has ended.
    pub(crate) async fn lose(self: &Arc<Self>, name: &str, of: Option<&dyn Hypervisor>, message: String) {
        match self.life(name) {
            Ok(Life::Starting) if of.is_none() => {
                // If it has ended meanwhile, that is fine.
                let _ = self.kill_silent(name).await;
            }
            Ok(Life::Alive(alive)) if of.is_some_and(|of| std::ptr::addr_eq(&*alive.qemu, of)) => {
                // It may hang in a page that never comes, and would not react to a command.
                alive.process.kill();
                alive.process.ended().await;
                self.until_noticed(name, &alive).await;
            }
            _ => {}
        }
        self.lost(name, message).await;
    }

    /// Records why a VM has ended whose memory is lost, unless the VM was stopped or started again meanwhile.
    pub(crate) async fn lost(self: &Arc<Self>, name: &str, message: String) {
        if matches!(self.life(name), Ok(Life::Crashed(_))) {
            if let Err(error) = self.remember(name, Fate::Crashed { message: message.clone() }).await {
                tracing::debug!(vm = %name, %error, "cannot record the end of a VM");
            }
            self.set(name, None, Life::Crashed(message));
        }
    }

    /// Sets the state of a VM, unless it has another QEMU than `of` by now.
    pub(super) fn set(&self, name: &str, of: Option<&Alive>, life: Life) {
        if let Some(entry) = self.entries().get_mut(name) {
            let is_current = match (&entry.life, of) {
                (Life::Alive(current), Some(of)) => Arc::ptr_eq(&current.process, &of.process),
                _ => true,
            };
            if is_current {
                entry.life = life;
            }
        }
        self.changed.notify_waiters();
    }

    /// Resolves when the end of a QEMU has been recorded.
    pub(super) async fn until_noticed(&self, name: &str, alive: &Alive) {
        loop {
            let changed = self.changed.notified();
            match self.life(name) {
                Ok(Life::Alive(current)) if Arc::ptr_eq(&current.process, &alive.process) => changed.await,
                _ => return,
            }
        }
    }

    /// Resolves when it is known whether a VM's QEMU runs.
    pub(crate) async fn until_found(&self, name: &str) {
        loop {
            let changed = self.changed.notified();
            if !matches!(self.life(name), Ok(Life::Starting)) {
                return;
            }
            changed.await;
        }
    }

    /// Returns the hypervisor of a VM that an earlier daemon started, once it is known whether it runs.
    pub(crate) async fn found(&self, name: &str) -> Option<Arc<dyn Hypervisor>> {
        self.until_found(name).await;
        Some(self.qemu(name).ok()?)
    }

    /// Resolves when the TPM of a VM whose QEMU has ended has ended too.
    async fn tpm_ended(&self, name: &str) {
        if let Some((folder, socket)) = self.tpm(name) {
            tpm::ended(&folder, &socket).await;
        }
    }

    /// Returns QEMU's output before it ended at its start, and what may have kept this user's QEMU from starting.
    fn last_words(&self, name: &str, user: Option<&QemuUser>) -> VmError {
        let mut said = process::last_words(&self.log(name));
        if let Some((folder, _)) = self.tpm(name) {
            said = format!("{said}; its TPM: {}", process::last_words(&tpm::log(&folder)));
        }
        if let Some(user) = user {
            said = format!(
                "{said}; QEMU runs as a user with the number {} and the groups of \"{user}\" (machines.user), which must be able \
                 to open what its command names",
                user.user
            );
            if let Some(obstacle) = unprivileged::obstacle(&self.monitors, user) {
                said = format!("{said}; {obstacle}");
            }
        }
        VmError::Ended { vm: name.to_owned(), said }
    }
}
