//! VMs of this host: what they are, whether they run, and how they come and go.
//!
//! ```text
//!            add                start                       SHUTDOWN
//!   nothing ─────► Stopped ──► Starting ──► Alive ────────────────────► Stopped
//!                                  │          │ ended in any other way
//!                                  └──────────┴────────────────────────► Crashed (can be started again)
//!
//!   standing:   Home ── leaving() ──► Leaving ── left() ──► nothing      stayed(): Home
//!               nothing ── prepare_arrival() ──► Arriving ── arrived() ──► Home     abandon_arrival(): nothing
//!   adopted:    nothing ── take_in() ──► Home, until it leaves or stays                 let_go(): nothing, QEMU goes on
//! ```
//!
//! QEMU is a child that outlives the daemon: after a restart it is found again by its monitor's socket, and the kernel says
//! which process that is. What a VM does is asked of QEMU, not remembered. Who moves a VM, and when, is not
//! decided here: the migration says so by [`Vms::leaving`] and the others.

mod adoptions;
mod arrival;
mod catalogue;
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
mod probe;
pub(crate) mod process;
pub(crate) mod proof;
pub(crate) mod proved;
pub(crate) mod qemu_sockets;
mod same_files;
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
pub(crate) use self::definition::{Definition, DefinitionError};
pub(crate) use self::derived::{Derived, derive, launched, user_of};
pub(crate) use self::error::VmError;
pub(crate) use self::holds::{Holds, NotedReason, Ran, Reached};
pub(crate) use self::manifest::MANIFEST_BYTES_MAX;
use self::manifest::{Manifest, Reader};
use self::process::Process;
pub(crate) use self::same_files::Differences;
use crate::config::MachinesConfig;
use crate::files::sockets::{Grants, SocketFolder};
use crate::journal::now_unix_ms;

/// Folder in the data folder: one of each VM, with its files and its log.
const FOLDER: &str = "vms";
/// Folder beside that of the volumes' sockets, with the monitors' sockets.
const MONITORS_FOLDER: &str = "vms";
/// How long QEMU may take from its start until its monitor answers.
const START_DEADLINE: Duration = Duration::from_secs(30);
/// How long QEMU may take to end once it was told to; then it is killed.
const END_DEADLINE: Duration = Duration::from_secs(30);

/// The VMs of this host.
pub(crate) struct Vms {
    folder: PathBuf,
    monitors: PathBuf,
    /// Where the sockets of volumes are.
    volume_sockets: PathBuf,
    /// Why the list cannot be used is kept instead of it.
    catalogue: Result<Catalogue, String>,
    /// The VMs of others whose disks are served; why the list cannot be used is kept instead of it.
    adoptions: Result<Adoptions, String>,
    /// Whose QEMUs the sockets of volumes are for.
    grants: Arc<Grants>,
    /// What VMs of other hosts may name, and whom QEMU runs as.
    allowed: MachinesConfig,
    /// Those that are paused for a reason of ours.
    pub(crate) holds: Arc<Holds>,
    entries: Mutex<BTreeMap<String, Entry>>,
    /// VMs whose disks change hands.
    turns: Arc<Mutex<BTreeSet<String>>>,
    /// Told when what a VM does has changed.
    changed: Notify,
}

struct Entry {
    record: Record,
    definition: Arc<Definition>,
    life: Life,
    /// Held by whoever changes the VM.
    operation: Arc<tokio::sync::Mutex<()>>,
    /// What follows its QEMU to its end.
    watch: Option<AbortHandle>,
    /// The other way to its QEMU, once it was asked for, if it has one.
    lifeline: Option<Arc<Lifeline>>,
}

/// Whether a VM's QEMU is there.
#[derive(Clone)]
pub(crate) enum Life {
    Stopped,
    /// It has been started, or is looked for, and does not answer yet.
    Starting,
    Alive(Alive),
    /// It has ended by itself; the text says what it said last.
    Crashed(String),
}

/// A QEMU that is there.
#[derive(Clone)]
pub(crate) struct Alive {
    pub(crate) qemu: Arc<Qemu>,
    process: Arc<Process>,
}

/// What is known of a VM without asking its QEMU.
pub(crate) struct Known {
    pub(crate) name: String,
    pub(crate) standing: Standing,
    pub(crate) life: Life,
    /// Its volumes, by name.
    pub(crate) volumes: Vec<String>,
    /// Its definition, as it was written.
    pub(crate) definition: String,
    /// Its monitor's socket.
    pub(crate) monitor: PathBuf,
    /// What QEMU has said; `None`: somebody else has started it.
    pub(crate) log: Option<PathBuf>,
    pub(crate) added_unix_ms: u64,
}

/// How a VM is ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// Its power button is pressed; if it runs on until the time is over, its power is cut.
    PowerButton(Duration),
    /// Its power is cut.
    AtOnce,
}

/// How a VM has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// Its guest has shut down.
    ShutDown,
    /// Its power was cut.
    PowerCut,
}

/// The right to change what the disks of a VM are over, until it is dropped.
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
    /// QEMU's process.
    pub(crate) fn process_id(&self) -> i32 {
        self.process.id()
    }
}

impl Vms {
    /// Reads what is known. VMs that were running are looked for by [`Self::find_running`].
    ///
    /// The sockets of volumes that are disks of VMs that run are made for whom their QEMUs run as.
    pub(crate) fn open(data_dir: &Path, sockets: &SocketFolder, allowed: &MachinesConfig) -> Arc<Self> {
        let catalogue = Catalogue::open(data_dir).map_err(|error| crate::error::with_causes(&error));
        let adoptions = Adoptions::open(data_dir).map_err(|error| crate::error::with_causes(&error));
        let mut entries = BTreeMap::new();
        for record in catalogue.iter().flat_map(Catalogue::list) {
            if record.monitor.is_some() && record.standing == Standing::Home {
                // It was taken in, and its move never began: it is adopted, and no more.
                continue;
            }
            match Definition::parse(&record.definition) {
                Ok(definition) => drop(entries.insert(record.name.clone(), Entry::new(record, definition))),
                // An older version had other rules: the VM stays in the file, and is not shown.
                Err(error) => {
                    tracing::warn!(vm = %record.name, %error, "a VM's definition is no longer one");
                }
            }
        }
        if let Err(problem) = &catalogue {
            tracing::warn!(%problem, "VMs cannot be managed");
        }
        let vms = Self {
            folder: data_dir.join(FOLDER),
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
        };
        vms.grant_all();
        Arc::new(vms)
    }

    /// Adds a VM. It may sleep.
    ///
    /// # Errors
    /// [`VmError`]; there is no such VM then.
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
        };
        let files = manifest::read_files(definition.files(), &Reader::Administrator)?;
        let tpm_state = definition.tpm_state().map(tpm::read_state).transpose();
        let tpm_state = tpm_state.map_err(|(path, error)| VmError::io("read", &path, error))?;
        // What could not be sent is not taken.
        let manifest = Manifest { name: name.to_owned(), definition: text.to_owned(), files, needs: None };
        manifest.encode()?;
        self.enter(&record, definition, &manifest.files, tpm_state.as_deref())
    }

    /// Starts a VM and returns when its QEMU answers.
    ///
    /// # Errors
    /// [`VmError`]; it does not run then.
    pub(crate) async fn start(self: &Arc<Self>, name: &str, sockets: &SocketFolder) -> Result<(), VmError> {
        let _operation = self.operate(name)?;
        if !matches!(self.life(name)?, Life::Stopped | Life::Crashed(_)) {
            return Err(VmError::RunsAlready(name.to_owned()));
        }
        self.launch(name, sockets, &[]).await.map(drop)
    }

    /// Ends a VM and returns when its QEMU has ended.
    ///
    /// # Errors
    /// [`VmError`].
    pub(crate) async fn stop(self: &Arc<Self>, name: &str, ending: Ending) -> Result<Ended, VmError> {
        let _operation = self.operate(name)?;
        if let Life::Starting = self.life(name)? {
            return match ending {
                Ending::AtOnce => self.kill_silent(name).await.map(|()| Ended::PowerCut),
                Ending::PowerButton(_) => Err(VmError::Silent(name.to_owned())),
            };
        }
        let alive = self.alive(name)?;
        self.end(name, &alive, ending).await
    }

    /// Forgets a VM that does not run; its volumes stay. It may sleep.
    ///
    /// # Errors
    /// [`VmError`]; it is there as before then.
    pub(crate) fn remove(&self, name: &str) -> Result<(), VmError> {
        let _operation = self.operate(name)?;
        match self.life(name)? {
            Life::Stopped | Life::Crashed(_) => self.erase(name),
            Life::Starting | Life::Alive(_) => Err(VmError::Running(name.to_owned())),
        }
    }

    /// All VMs, by name.
    pub(crate) fn list(&self) -> Vec<Known> {
        self.entries().values().map(|entry| self.known(entry)).collect()
    }

    /// What is known of a VM.
    ///
    /// # Errors
    /// [`VmError::NotFound`].
    pub(crate) fn get(&self, name: &str) -> Result<Known, VmError> {
        let entries = self.entries();
        let entry = entries.get(name).ok_or_else(|| VmError::NotFound(name.to_owned()))?;
        Ok(self.known(entry))
    }

    /// The VMs whose move was under way when the daemon ended: whoever knows how it went says so by
    /// [`Self::arrived`], [`Self::left`] and the others.
    pub(crate) fn unsettled(&self) -> Vec<(String, Standing)> {
        let entries = self.entries();
        let unsettled = entries.values().filter(|entry| entry.record.standing != Standing::Home);
        unsettled.map(|entry| (entry.record.name.clone(), entry.record.standing)).collect()
    }

    /// The VM that has a volume among its disks.
    pub(crate) fn user_of(&self, volume: &str) -> Option<String> {
        let entries = self.entries();
        let user =
            entries.values().find(|entry| entry.definition.volumes().iter().any(|name| name == volume));
        user.map(|entry| entry.record.name.clone())
    }

    /// Tells whether a VM that runs, or is looked for after a start of the daemon, has a volume among its disks.
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
            life: entry.life.clone(),
            volumes: entry.definition.volumes(),
            definition: entry.definition.text().to_owned(),
            monitor: self.monitor_of(&entry.record),
            log: entry.record.monitor.is_none().then(|| self.log(name)),
            added_unix_ms: entry.record.added_unix_ms,
        }
    }

    /// Has the disks of VMs that an earlier daemon has started reached by whom their QEMUs run as.
    fn grant_all(&self) {
        for entry in self.entries().values() {
            let Some(user) = qemu_sockets::user(&self.monitor_of(&entry.record)) else { continue };
            entry.definition.volumes().iter().for_each(|volume| self.grants.give(volume, user));
        }
        for adopted in self.adoptions.iter().flat_map(Adoptions::list) {
            let Some(user) = adopted.libvirt.and_then(|domain| domain.user) else { continue };
            adopted.disks.iter().for_each(|disk| self.grants.give(&disk.volume, user));
        }
    }

    /// Writes a new VM's files and what its TPM begins with, then the list with it.
    fn enter(
        &self,
        record: &Record,
        definition: Definition,
        files: &[(String, Vec<u8>)],
        tpm_state: Option<&[u8]>,
    ) -> Result<(), VmError> {
        let catalogue = self.catalogue()?;
        // Held throughout: a name is taken once.
        let mut entries = self.entries();
        // An adopted VM leaves by the name that it was adopted by.
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

    /// Forgets a VM durably; its files stay, and its QEMU is nobody's if it is there.
    fn forget(&self, name: &str) -> Result<(), VmError> {
        let mut entries = self.entries();
        self.catalogue()?.remove(name)?;
        if let Some(entry) = entries.remove(name) {
            entry.definition.volumes().iter().for_each(|volume| self.grants.take(volume));
            // It is connected to the monitor.
            entry.watch.iter().for_each(AbortHandle::abort);
        }
        drop(entries);
        // One that goes on without Sterna keeps it, and nobody is to find it.
        self.remove_lifeline(name);
        self.changed.notify_waiters();
        Ok(())
    }

    /// Changes what is remembered of a VM, durably.
    fn record(&self, name: &str, change: impl FnOnce(&mut Record)) -> Result<(), VmError> {
        let mut entries = self.entries();
        let entry = entries.get_mut(name).ok_or_else(|| VmError::NotFound(name.to_owned()))?;
        let mut changed = entry.record.clone();
        change(&mut changed);
        self.catalogue()?.put(&changed)?;
        entry.record = changed;
        Ok(())
    }

    /// The right to change a VM that is at home; there is one at a time.
    ///
    /// # Errors
    /// [`VmError::NotFound`], [`VmError::Busy`].
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

    /// The right to change what the disks of a VM are over, ours or not; there is one at a time.
    ///
    /// # Errors
    /// [`VmError::Busy`].
    pub(crate) fn turn(&self, name: &str) -> Result<Turn, VmError> {
        let mut turns = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
        if !turns.insert(name.to_owned()) {
            return Err(VmError::Busy { vm: name.to_owned(), why: "is being adopted, released or let run" });
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
            Life::Stopped | Life::Starting | Life::Crashed(_) => Err(VmError::NotRunning(name.to_owned())),
        }
    }

    fn catalogue(&self) -> Result<&Catalogue, VmError> {
        self.catalogue.as_ref().map_err(|problem| VmError::Unusable(problem.clone()))
    }

    fn vm_folder(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// The VMs of others whose disks are served.
    ///
    /// # Errors
    /// [`VmError::Unusable`].
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

    /// Where a VM that Sterna starts has its monitor.
    fn own_monitor(&self, name: &str) -> PathBuf {
        self.monitors.join(format!("{name}.qmp"))
    }

    /// The folder of a VM that has a TPM here, and the TPM's socket.
    fn tpm(&self, name: &str) -> Option<(PathBuf, PathBuf)> {
        let entries = self.entries();
        let entry = entries.get(name)?;
        // Of a VM that somebody else has started nothing is here.
        let is_ours = entry.record.monitor.is_none() && entry.definition.has_tpm();
        is_ours.then(|| (self.vm_folder(name), tpm::socket(&self.own_monitor(name))))
    }

    fn log(&self, name: &str) -> PathBuf {
        self.vm_folder(name).join("log")
    }

    /// A panic elsewhere does not make the map wrong.
    fn entries(&self) -> MutexGuard<'_, BTreeMap<String, Entry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entry {
    fn new(record: Record, definition: Definition) -> Self {
        let life = match &record.fate {
            Fate::Stopped => Life::Stopped,
            // Until it is found, or not.
            Fate::Started => Life::Starting,
            Fate::Crashed { message } => Life::Crashed(message.clone()),
        };
        let definition = Arc::new(definition);
        Self { record, definition, life, operation: Arc::default(), watch: None, lifeline: None }
    }
}

/// What is left of a VM that is gone is only looked at when another gets its name.
fn remove_folder(folder: &Path) {
    match std::fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            tracing::warn!(path = %folder.display(), %error, "the folder of a VM is left over");
        }
        _ => {}
    }
}
