//! The VMs of this host: their definitions and states, and how they come and go.
//!
//! ```text
//!            add                start                       SHUTDOWN
//!   nothing ─────► Stopped ──► Starting ──► Alive ────────────────────► Stopped
//!                                  │          │ ended in any other way
//!                                  └──────────┴────────────────────────► Crashed (can be started again)
//!                  Alive ── memory in a file, QEMU ended ──► Suspended ── start ──► Starting, the file is loaded ──► Alive
//!
//!   standing:   Home ── leaving() ──► Leaving ── left() ──► nothing      stayed(): Home
//!               nothing ── prepare_arrival() ──► Arriving ── arrived() ──► Home     abandon_arrival(): nothing
//!   adopted:    nothing ── take_in() ──► Home, until it leaves or stays                 let_go(): nothing, QEMU runs on
//! ```
//!
//! QEMU is a child process that outlives the daemon. After a restart the daemon finds it by its monitor's socket, and the
//! kernel says which process that is. The state of a VM is asked of QEMU, not remembered. Migrations decide when a VM moves,
//! and call [`Vms::leaving`] and the others.

mod adoptions;
mod arrival;
mod catalogue;
mod cold;
mod definition;
mod derived;
mod error;
mod guests;
mod holds;
mod life;
mod lifelines;
pub(crate) mod looks;
mod manifest;
pub(crate) mod monitors;
pub(crate) mod moving;
mod needs;
pub(crate) mod orders;
mod own_sockets;
mod preferences;
mod probe;
pub(crate) mod process;
pub(crate) mod proof;
pub(crate) mod proved;
pub(crate) mod qemu_sockets;
mod same_files;
mod second;
pub(crate) mod starts;
pub(crate) mod suspended;
#[cfg(test)]
mod tests;
mod tpm;
mod unprivileged;
mod users;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hypervisor::qemu::{Lifeline, Qemu};
use tokio::sync::{Notify, OwnedMutexGuard};
use tokio::task::AbortHandle;

pub(crate) use self::adoptions::{
    Adopted, AdoptedDisk, Adoptions, CopyNote, FileIdentity, GivenImage, LibvirtDomain, Wanted,
};
pub(crate) use self::arrival::Scope;
pub(crate) use self::catalogue::Standing;
use self::catalogue::{Catalogue, Fate, Record};
pub(crate) use self::cold::Extent;
pub(crate) use self::definition::{Definition, DefinitionError};
pub(crate) use self::derived::{Derived, derive, launched, user_of};
pub(crate) use self::error::VmError;
pub(crate) use self::holds::{Holds, NotedReason, Ran, Reached};
pub(crate) use self::manifest::MANIFEST_BYTES_MAX;
use self::manifest::{Manifest, Reader};
pub(crate) use self::monitors::Paths;
pub(crate) use self::preferences::{Preferences, WaitFor};
use self::process::Process;
pub(crate) use self::same_files::Differences;
pub(crate) use self::second::ConsoleSearch;
pub(crate) use self::suspended::Saved;
use crate::config::MachinesConfig;
use crate::files::sockets::{Grants, SocketFolder};
use crate::journal::now_unix_ms;

/// The folder in the data folder that has a folder for each VM, with its files and its log.
const FOLDER: &str = "vms";
/// The folder with the monitors' sockets, beside that of the volumes' sockets.
const MONITORS_FOLDER: &str = "vms";
/// How long QEMU may take from its start until its monitor answers.
const START_DEADLINE: Duration = Duration::from_secs(30);
/// How long QEMU may take to end before it is killed.
const END_DEADLINE: Duration = Duration::from_secs(30);

pub(crate) struct Vms {
    folder: PathBuf,
    /// The folder with the memory of suspended VMs.
    memories: PathBuf,
    monitors: PathBuf,
    volume_sockets: PathBuf,
    /// `Err` holds why the list could not be loaded.
    catalogue: Result<Catalogue, String>,
    /// The adopted VMs; `Err` holds why the list could not be loaded.
    adoptions: Result<Adoptions, String>,
    /// Which QEMU users may connect to the volumes' sockets.
    grants: Arc<Grants>,
    /// The options and folders that other hosts' VMs may name, and the user that QEMU runs as.
    allowed: MachinesConfig,
    pub(crate) holds: Arc<Holds>,
    entries: Mutex<BTreeMap<String, Entry>>,
    /// The VMs whose disks change hands.
    turns: Arc<Mutex<BTreeSet<String>>>,
    /// Notified when a VM's state has changed.
    changed: Notify,
    /// The present start of the machine; `None`: the kernel does not say it.
    boot: Option<String>,
}

struct Entry {
    record: Record,
    definition: Arc<Definition>,
    life: Life,
    /// Held by the operation that changes the VM.
    operation: Arc<tokio::sync::Mutex<()>>,
    /// The task that watches its QEMU until the end.
    watch: Option<AbortHandle>,
    /// The second connection to its QEMU, once it was used, if the VM has one.
    lifeline: Option<Arc<Lifeline>>,
}

/// Whether a VM's QEMU runs.
#[derive(Clone)]
pub(crate) enum Life {
    Stopped,
    /// It was started, or is being searched, and has not answered yet.
    Starting,
    Alive(Alive),
    /// It has ended unexpectedly; the text is its last output.
    Crashed(String),
    /// It has ended, and its memory is in a file.
    Suspended(Box<Saved>),
}

#[derive(Clone)]
pub(crate) struct Alive {
    pub(crate) qemu: Arc<Qemu>,
    process: Arc<Process>,
}

/// The state of a VM without asking its QEMU.
pub(crate) struct Known {
    pub(crate) name: String,
    pub(crate) standing: Standing,
    /// Whether it is moving without a hypervisor.
    pub(crate) is_cold: bool,
    pub(crate) life: Life,
    pub(crate) volumes: Vec<String>,
    pub(crate) definition: String,
    pub(crate) monitor: PathBuf,
    /// QEMU's log; `None`: Sterna has not started the VM.
    pub(crate) log: Option<PathBuf>,
    pub(crate) added_unix_ms: u64,
    pub(crate) preferences: Preferences,
    /// The names of its own paths that a console may write a log to.
    pub(crate) logs: Vec<String>,
    /// Whether it is to start at a boot of the host, and has not been settled since this one.
    pub(crate) is_due_at_boot: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// Press the power button, and wait for this time.
    PowerButton(Duration),
    /// Cut the power without asking the guest.
    AtOnce,
}

/// The exclusive right to switch the disks of a VM, until it is dropped.
pub(crate) struct Turn {
    turns: Arc<Mutex<BTreeSet<String>>>,
    name: String,
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.turns.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.name);
    }
}

impl Alive {
    pub(crate) fn process_id(&self) -> i32 {
        self.process.id()
    }
}

impl Vms {
    /// Reads the list of VMs. [`Self::find_running`] then looks for those that were running. The volumes' sockets of running
    /// VMs are made for the users of their QEMUs.
    pub(crate) fn open(data_dir: &Path, sockets: &SocketFolder, allowed: &MachinesConfig) -> Arc<Self> {
        let catalogue = Catalogue::open(data_dir).map_err(|error| crate::error::with_causes(&error));
        let adoptions = Adoptions::open(data_dir).map_err(|error| crate::error::with_causes(&error));
        let mut entries = BTreeMap::new();
        for record in catalogue.iter().flat_map(Catalogue::list) {
            if record.monitor.is_some() && record.standing == Standing::Home {
                // Its move never began after it was taken in, so it is only adopted.
                continue;
            }
            match Definition::parse(&record.definition) {
                Ok(definition) => drop(entries.insert(record.name.clone(), Entry::new(record, definition))),
                // The VM stays in the file and is not shown.
                Err(error) => {
                    tracing::warn!(vm = %record.name, %error, "the definition of a VM is not valid");
                }
            }
        }
        if let Err(problem) = &catalogue {
            tracing::warn!(%problem, "VMs cannot be managed");
        }
        let vms = Self {
            folder: data_dir.join(FOLDER),
            memories: allowed.suspended.clone().unwrap_or_else(|| data_dir.join(suspended::FOLDER)),
            monitors: sockets.folder().with_file_name(MONITORS_FOLDER),
            volume_sockets: sockets.folder().to_owned(),
            grants: sockets.grants(),
            catalogue,
            adoptions,
            holds: Holds::open(data_dir),
            allowed: allowed.clone(),
            entries: Mutex::new(entries),
            turns: Arc::default(),
            changed: Notify::new(),
            boot: crate::boot::identity(),
        };
        vms.grant_all();
        Arc::new(vms)
    }

    /// Adds a VM. May block. After an error there is no such VM.
    pub(crate) fn add(&self, name: &str, text: &str) -> Result<(), VmError> {
        let definition = Definition::parse(text)?;
        let record = Record {
            name: name.to_owned(),
            definition: text.to_owned(),
            standing: Standing::Home,
            fate: Fate::Stopped,
            added_unix_ms: now_unix_ms(),
            monitor: None,
            user: None,
            stays_paused: false,
            is_cold: false,
            preferences: Preferences::default(),
            settled_boot: None,
        };
        let files = manifest::read_files(definition.files(), &Reader::Administrator)?;
        let tpm_state = definition.tpm_state().map(tpm::read_state).transpose();
        let tpm_state = tpm_state.map_err(|(path, error)| VmError::io("read", &path, error))?;
        // Refuses what could not be sent to another host.
        let manifest = Manifest {
            name: name.to_owned(),
            definition: text.to_owned(),
            files,
            needs: needs::Needs::default(),
            tpm_state: None,
            preferences: Preferences::default(),
        };
        manifest.encode()?;
        self.enter(&record, definition, &manifest.files, tpm_state.as_deref())
    }

    /// Starts a VM and returns when its QEMU answers. After an error it does not run.
    pub(crate) async fn start(self: &Arc<Self>, name: &str, sockets: &SocketFolder) -> Result<(), VmError> {
        let _operation = self.operate(name)?;
        match self.life(name)? {
            Life::Stopped | Life::Crashed(_) => {}
            Life::Suspended(_) => return Err(VmError::Suspended(name.to_owned())),
            Life::Starting | Life::Alive(_) => return Err(VmError::RunsAlready(name.to_owned())),
        }
        self.launch(name, sockets, &[]).await.map(drop)
    }

    pub(crate) async fn stop(self: &Arc<Self>, name: &str, ending: Ending) -> Result<(), VmError> {
        let _operation = self.operate(name)?;
        match (self.life(name)?, ending) {
            (Life::Starting, Ending::AtOnce) => return self.kill_silent(name).await,
            (Life::Starting, Ending::PowerButton(_)) => return Err(VmError::Silent(name.to_owned())),
            (Life::Suspended(_), Ending::AtOnce) => return self.discard_memory(name).await,
            _ => {}
        }
        let alive = self.alive(name)?;
        self.end(name, &alive, ending).await
    }

    /// Forgets a VM that does not run; its volumes stay. May block. After an error the VM is unchanged.
    pub(crate) fn remove(&self, name: &str) -> Result<(), VmError> {
        let _operation = self.operate(name)?;
        match self.life(name)? {
            Life::Stopped | Life::Crashed(_) => self.erase(name),
            Life::Suspended(saved) => {
                self.erase(name)?;
                saved.delete_with_warning(name);
                Ok(())
            }
            Life::Starting | Life::Alive(_) => Err(VmError::Running(name.to_owned())),
        }
    }

    pub(crate) fn list(&self) -> Vec<Known> {
        self.entries().values().map(|entry| self.known(entry)).collect()
    }

    pub(crate) fn get(&self, name: &str) -> Result<Known, VmError> {
        let entries = self.entries();
        let entry = entries.get(name).ok_or_else(|| VmError::NotFound(name.to_owned()))?;
        Ok(self.known(entry))
    }

    /// Returns the VMs that were moving when the daemon ended. The caller determines how each move ended, and calls
    /// [`Self::arrived`], [`Self::left`] or the others.
    pub(crate) fn unsettled(&self) -> Vec<(String, Standing)> {
        let entries = self.entries();
        let unsettled = entries.values().filter(|entry| entry.record.standing != Standing::Home);
        unsettled.map(|entry| (entry.record.name.clone(), entry.record.standing)).collect()
    }

    pub(crate) fn user_of(&self, volume: &str) -> Option<String> {
        let entries = self.entries();
        let user =
            entries.values().find(|entry| entry.definition.volumes().iter().any(|name| name == volume));
        user.map(|entry| entry.record.name.clone())
    }

    /// Returns whether a volume is a disk of a VM that runs, or that the daemon still looks for after its start.
    pub(crate) fn runs_on(&self, volume: &str) -> bool {
        let runs = |entry: &Entry| matches!(entry.life, Life::Starting | Life::Alive(_));
        let uses = |entry: &Entry| entry.definition.volumes().iter().any(|name| name == volume);
        self.entries().values().any(|entry| runs(entry) && uses(entry))
    }

    fn known(&self, entry: &Entry) -> Known {
        let name = &entry.record.name;
        Known {
            name: name.clone(),
            standing: entry.record.standing,
            is_cold: entry.record.is_cold,
            life: entry.life.clone(),
            volumes: entry.definition.volumes(),
            definition: entry.definition.text().to_owned(),
            monitor: self.monitor_of(&entry.record),
            log: entry.record.monitor.is_none().then(|| self.log(name)),
            added_unix_ms: entry.record.added_unix_ms,
            preferences: entry.record.preferences.clone(),
            logs: entry.definition.logs(),
            is_due_at_boot: self.is_due_at_boot(&entry.record),
        }
    }

    /// Lets the QEMU users of all running VMs connect to their disks.
    fn grant_all(&self) {
        for entry in self.entries().values() {
            let Some(user) = qemu_sockets::user(&self.monitor_of(&entry.record)) else { continue };
            entry.definition.volumes().iter().for_each(|volume| self.grants.give(volume, user));
        }
        for adopted in self.adoptions.iter().flat_map(Adoptions::list) {
            let Some(user) = adopted.socket_user() else { continue };
            adopted.disks.iter().for_each(|disk| self.grants.give(&disk.volume, user));
        }
    }

    /// Writes a new VM's files and the initial state of its TPM, then the list.
    fn enter(
        &self,
        record: &Record,
        definition: Definition,
        files: &[(String, Vec<u8>)],
        tpm_state: Option<&[u8]>,
    ) -> Result<(), VmError> {
        let catalogue = self.catalogue()?;
        // It was added in this boot, so nothing is to be made good.
        let record = &Record { settled_boot: self.boot.clone(), ..record.clone() };
        // Held throughout, so that each name is taken once.
        let mut entries = self.entries();
        // An adopted VM leaves under the name of its adoption.
        let is_adopted = record.monitor.is_none() && self.adoptions()?.get(&record.name).is_some();
        if entries.contains_key(&record.name) || is_adopted {
            return Err(VmError::Exists(record.name.clone()));
        }
        for volume in definition.volumes() {
            let of = |entry: &&Entry| entry.definition.volumes().contains(&volume);
            if let Some(user) = entries.values().find(of) {
                return Err(VmError::VolumeTaken { volume, vm: user.record.name.clone() });
            }
        }
        let folder = self.vm_folder(&record.name);
        let written = manifest::write_files(&folder, files)
            .and_then(|()| tpm_state.map_or(Ok(()), |state| tpm::write_state(&folder, state)))
            .map_err(|error| VmError::io("make", &folder, error));
        let entered = written.and_then(|()| Ok(catalogue.put(record)?));
        if let Err(error) = entered {
            remove_folder(&folder);
            return Err(error);
        }
        entries.insert(record.name.clone(), Entry::new(record.clone(), definition));
        Ok(())
    }

    /// Forgets a VM durably, then deletes its files.
    fn erase(&self, name: &str) -> Result<(), VmError> {
        self.forget(name)?;
        remove_folder(&self.vm_folder(name));
        Ok(())
    }

    /// Forgets a VM durably; its files stay. Its QEMU may run on without Sterna.
    fn forget(&self, name: &str) -> Result<(), VmError> {
        let mut entries = self.entries();
        self.catalogue()?.remove(name)?;
        if let Some(entry) = entries.remove(name) {
            // An adopted VM that does not leave after all keeps the sockets of its disks.
            let stays = self.adoptions.iter().any(|adoptions| adoptions.get(name).is_some());
            entry.definition.volumes().iter().filter(|_| !stays).for_each(|volume| self.grants.take(volume));
            // The watching task holds the connection to the monitor.
            entry.watch.iter().for_each(AbortHandle::abort);
        }
        drop(entries);
        // A QEMU that runs on without Sterna keeps its lifeline, and no daemon is to find it.
        self.remove_lifeline(name);
        self.changed.notify_waiters();
        Ok(())
    }

    /// Changes what is wanted of a VM durably; `is_settled`: whether this boot has been dealt with. May block.
    pub(crate) fn prefer(
        &self,
        name: &str,
        preferences: Preferences,
        is_settled: bool,
    ) -> Result<(), VmError> {
        self.record(name, |record| {
            record.preferences = preferences;
            if is_settled {
                record.settled_boot.clone_from(&self.boot);
            }
        })
    }

    /// Notes durably that this boot has been dealt with for a VM. May block.
    pub(crate) fn settle_boot(&self, name: &str) -> Result<(), VmError> {
        let is_settled = |entry: &Entry| !self.is_due_at_boot(&entry.record);
        if self.entries().get(name).is_none_or(is_settled) {
            return Ok(());
        }
        self.record(name, |record| record.settled_boot.clone_from(&self.boot))
    }

    fn is_due_at_boot(&self, record: &Record) -> bool {
        // **N.B.** If the kernel does not say which boot this is, nothing is started: a VM may have been stopped on purpose.
        record.preferences.start.at_boot && self.boot.is_some() && record.settled_boot != self.boot
    }

    /// Changes the record of a VM durably.
    fn record(&self, name: &str, change: impl FnOnce(&mut Record)) -> Result<(), VmError> {
        let mut entries = self.entries();
        let entry = entries.get_mut(name).ok_or_else(|| VmError::NotFound(name.to_owned()))?;
        let mut changed = entry.record.clone();
        change(&mut changed);
        self.catalogue()?.put(&changed)?;
        entry.record = changed;
        Ok(())
    }

    /// Returns the exclusive right to change a VM that is at home. Errors: [`VmError::NotFound`], [`VmError::Busy`].
    pub(crate) fn operate(&self, name: &str) -> Result<OwnedMutexGuard<()>, VmError> {
        let entries = self.entries();
        let entry = entries.get(name).ok_or_else(|| VmError::NotFound(name.to_owned()))?;
        if entry.record.standing != Standing::Home {
            return Err(VmError::Busy { vm: name.to_owned(), why: entry.record.standing.why() });
        }
        let operation = Arc::clone(&entry.operation).try_lock_owned();
        operation
            .map_err(|_| VmError::Busy { vm: name.to_owned(), why: "is being started, stopped or removed" })
    }

    /// Returns the exclusive right to switch the disks of a VM, managed or adopted; fails with [`VmError::Busy`].
    pub(crate) fn turn(&self, name: &str) -> Result<Turn, VmError> {
        let mut turns = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
        if !turns.insert(name.to_owned()) {
            return Err(VmError::Busy { vm: name.to_owned(), why: "is being adopted, released or resumed" });
        }
        Ok(Turn { turns: Arc::clone(&self.turns), name: name.to_owned() })
    }

    fn life(&self, name: &str) -> Result<Life, VmError> {
        let entries = self.entries();
        let entry = entries.get(name).ok_or_else(|| VmError::NotFound(name.to_owned()))?;
        Ok(entry.life.clone())
    }

    fn alive(&self, name: &str) -> Result<Alive, VmError> {
        match self.life(name)? {
            Life::Alive(alive) => Ok(alive),
            Life::Suspended(_) => Err(VmError::Suspended(name.to_owned())),
            Life::Stopped | Life::Starting | Life::Crashed(_) => Err(VmError::NotRunning(name.to_owned())),
        }
    }

    fn catalogue(&self) -> Result<&Catalogue, VmError> {
        self.catalogue.as_ref().map_err(|problem| VmError::Unusable(problem.clone()))
    }

    fn vm_folder(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Returns the adopted VMs, or [`VmError::Unusable`].
    pub(crate) fn adoptions(&self) -> Result<&Adoptions, VmError> {
        self.adoptions.as_ref().map_err(|problem| VmError::Unusable(problem.clone()))
    }

    fn monitor(&self, name: &str) -> PathBuf {
        let entries = self.entries();
        match entries.get(name) {
            Some(entry) => self.monitor_of(&entry.record),
            None => self.own_monitor(name),
        }
    }

    fn monitor_of(&self, record: &Record) -> PathBuf {
        record.monitor.clone().unwrap_or_else(|| self.own_monitor(&record.name))
    }

    /// Returns the monitor's path of a VM that Sterna starts.
    fn own_monitor(&self, name: &str) -> PathBuf {
        self.monitors.join(format!("{name}.qmp"))
    }

    /// Returns the folder of a VM that has a TPM here, and the TPM's socket.
    fn tpm(&self, name: &str) -> Option<(PathBuf, PathBuf)> {
        let entries = self.entries();
        let entry = entries.get(name)?;
        // A VM that Sterna has not started has no TPM here.
        let is_ours = entry.record.monitor.is_none() && entry.definition.has_tpm();
        is_ours.then(|| (self.vm_folder(name), tpm::socket(&self.own_monitor(name))))
    }

    fn log(&self, name: &str) -> PathBuf {
        self.vm_folder(name).join("log")
    }

    /// The map stays consistent after a panic of another holder.
    fn entries(&self) -> MutexGuard<'_, BTreeMap<String, Entry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entry {
    fn new(record: Record, definition: Definition) -> Self {
        let life = match &record.fate {
            Fate::Stopped => Life::Stopped,
            // Until it is found, or its end is.
            Fate::Started | Fate::Saved { .. } | Fate::Restoring { .. } => Life::Starting,
            Fate::Suspended { memory } => Life::Suspended(Box::new(memory.clone())),
            Fate::Crashed { message } => Life::Crashed(message.clone()),
        };
        let definition = Arc::new(definition);
        Self { record, definition, life, operation: Arc::default(), watch: None, lifeline: None }
    }
}

/// Deletes a VM's folder. Leftovers are read only if another VM gets the name.
fn remove_folder(folder: &Path) {
    match std::fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            tracing::warn!(path = %folder.display(), %error, "the folder of a VM is left over");
        }
        _ => {}
    }
}
