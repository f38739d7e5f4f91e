//! A host: a folder with stores, a daemon, and the commands for it.

use std::fs::File;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, bail, ensure};
use api::{Address, Migration, MigrationState, Volume, VolumeState, VolumeStatistics};
use rustix::process::Signal;
use serde::de::DeserializeOwned;

use crate::daemon::{Daemon, KILLED, with_tail};
use crate::file_system::{FileSystem, SecondMount};
use crate::folder::Folder;
use crate::nbd_client;
use crate::own_address::own_address;
use crate::program::{Outcome, Program, Running};
use crate::wait::until;

const STORES: [&str; 2] = ["a", "b"];
/// The file that fills the disk of the data folder.
const FILLER: &str = "data/filler";

/// A temporary folder with two stores, and a daemon while one runs.
///
/// Dropping it kills the daemon, unmounts its file systems and removes the folder.
#[derive(Debug)]
pub struct Host {
    daemon: Option<Daemon>,
    /// The former daemon after a take-over, until its end is seen.
    former: Option<Daemon>,
    /// Dropped after the daemon, which has files open there, and before the folder.
    file_systems: Vec<FileSystem>,
    second_mounts: Vec<SecondMount>,
    /// Whether the data folder has a disk of its own.
    has_data_disk: bool,
    folder: Folder,
    program: PathBuf,
}

impl Host {
    /// Makes the folder. Daemons will run `program`. Migrations run at full speed ([`Folder::at_full_speed`]).
    ///
    /// # Errors
    /// If the folder cannot be made.
    pub fn new(program: PathBuf) -> anyhow::Result<Self> {
        let folder = Folder::create(&std::env::temp_dir(), STORES)?.at_full_speed()?;
        let (file_systems, second_mounts) = (Vec::new(), Vec::new());
        Ok(Self {
            daemon: None,
            former: None,
            file_systems,
            second_mounts,
            has_data_disk: false,
            folder,
            program,
        })
    }

    /// Returns the host's folder.
    pub fn folder(&self) -> &Folder {
        &self.folder
    }

    /// Appends to the configuration, which a daemon reads when it starts.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn configure(&self, more: &str) -> anyhow::Result<()> {
        self.folder.configure(more)
    }

    /// Returns a path in the folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path(name)
    }

    /// Returns the address of the daemon's API.
    ///
    /// # Errors
    /// If the folder's path is too long for a socket.
    pub fn address(&self) -> anyhow::Result<Address> {
        self.folder.address()
    }

    /// Lets the daemon listen for other hosts, from its next start on, at an address that no other test uses.
    ///
    /// # Errors
    /// If the system has no free port, or the configuration cannot be written.
    pub fn listen_for_hosts(&self) -> anyhow::Result<SocketAddr> {
        let address = own_address()?;
        self.configure(&format!("[hosts]\nlisten = ['{address}']\nlinks = [{{ address = '{address}' }}]\n"))?;
        Ok(address)
    }

    /// Keeps a folder mounted until the daemon has ended for good.
    pub fn keep_mounted(&mut self, mounted: SecondMount) {
        self.second_mounts.push(mounted);
    }

    /// Keeps a file system mounted over a store's folder until the daemon has ended for good.
    ///
    /// # Errors
    /// If the daemon runs, because it would use the folder below.
    pub fn keep(&mut self, mounted: FileSystem) -> anyhow::Result<()> {
        ensure!(self.daemon.is_none(), "the daemon has begun to use the folders");
        self.file_systems.push(mounted);
        Ok(())
    }
}

// Small disks.
impl Host {
    /// Mounts a small disk in a folder of the host, which is made if there is none.
    ///
    /// # Errors
    /// If it cannot be mounted; without root it cannot.
    pub fn mount_small_disk(&mut self, folder: &str, bytes: u64) -> anyhow::Result<()> {
        let folder = self.path(folder);
        std::fs::create_dir_all(&folder).context("make a folder")?;
        self.second_mounts.push(SecondMount::in_memory(&folder, bytes)?);
        Ok(())
    }

    /// Mounts a small disk over the data folder, before a daemon has used it. Without root it does nothing.
    ///
    /// # Errors
    /// If it cannot be mounted.
    pub fn mount_data(&mut self, bytes: u64) -> anyhow::Result<()> {
        ensure!(self.daemon.is_none(), "the daemon has begun to use the folder");
        if rustix::process::geteuid().is_root() {
            self.mount_small_disk("data", bytes)?;
            self.has_data_disk = true;
        }
        Ok(())
    }

    /// Fills the disk of the data folder to its last byte. Returns false if the folder has no disk of its own.
    ///
    /// # Errors
    /// If it cannot be filled.
    pub fn fill_data(&self) -> anyhow::Result<bool> {
        if !self.has_data_disk {
            return Ok(false);
        }
        let mut filler = File::create(self.path(FILLER)).context("fill a disk")?;
        match std::io::copy(&mut std::io::repeat(1), &mut filler) {
            Err(error) if error.kind() == std::io::ErrorKind::StorageFull => Ok(true),
            Err(error) => Err(error).context("fill a disk"),
            Ok(_) => bail!("a disk without an end"),
        }
    }

    /// Frees the space that [`Self::fill_data`] has taken.
    ///
    /// # Errors
    /// If the file cannot be removed.
    pub fn free_data(&self) -> anyhow::Result<()> {
        match std::fs::remove_file(self.path(FILLER)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error).context("free a disk"),
            _ => Ok(()),
        }
    }
}

impl Host {
    /// Starts the daemon and waits until it answers.
    ///
    /// # Errors
    /// If it ends instead.
    pub fn start(&mut self) -> anyhow::Result<()> {
        self.start_with(&[])
    }

    /// Starts it as [`Host::start`], with these variables in its environment.
    ///
    /// # Errors
    /// If it ends instead.
    pub fn start_with(&mut self, environment: &[(&str, &str)]) -> anyhow::Result<()> {
        let mut command = Command::new(&self.program);
        command.env("STERNA_LOG", "info").envs(environment.iter().copied());
        ensure!(self.daemon.is_none(), "the daemon runs already");
        let daemon = Daemon::spawn(command, &self.folder)?;
        self.daemon.insert(daemon).wait_for_answer()
    }

    /// Starts another daemon that takes over from the running one. Waits until the former has ended successfully,
    /// and the new one answers.
    ///
    /// # Errors
    /// If one of them ends otherwise.
    pub fn take_over(&mut self, environment: &[(&str, &str)]) -> anyhow::Result<()> {
        self.begin_to_take_over(environment)?;
        let code = self.wait_for_former()?;
        ensure!(code == 0, "the daemon that was taken over ended with {code}");
        self.running()?.wait_for_answer()
    }

    /// Starts another daemon that takes over from the running one, and which is the daemon from here on.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn begin_to_take_over(&mut self, environment: &[(&str, &str)]) -> anyhow::Result<()> {
        let mut command = Command::new(&self.program);
        command.env("STERNA_LOG", "info").envs(environment.iter().copied());
        let next = Daemon::spawn_with(command, &self.folder, &["--take-over"])?;
        self.former = self.daemon.replace(next);
        Ok(())
    }

    /// Waits for the end of the former daemon, and returns its exit code.
    ///
    /// # Errors
    /// If it does not end in time, or there was none.
    pub fn wait_for_former(&mut self) -> anyhow::Result<i32> {
        let code = self.former.as_mut().context("no daemon was taken over")?.wait_for_end()?;
        self.former = None;
        Ok(code)
    }

    /// After the death of a daemon that should take over, waits until the former one answers or ends. If it answers, it is the
    /// daemon again. If it ends, returns its exit code.
    ///
    /// # Errors
    /// If it does neither in time.
    pub fn let_former_go_on(&mut self) -> anyhow::Result<Option<i32>> {
        let mut former = self.former.take().context("no daemon was to be taken over")?;
        // N.B. A daemon that has accepted the take-over answers no requests, and ends.
        let answered = former.wait_for_answer();
        if answered.is_ok() && former.exit_code()?.is_none() {
            self.daemon = Some(former);
            return Ok(None);
        }
        former.wait_for_end().map(Some)
    }

    /// Waits until the daemon answers.
    ///
    /// # Errors
    /// If it ends instead.
    pub fn wait_for_answer(&mut self) -> anyhow::Result<()> {
        self.running()?.wait_for_answer()
    }

    /// Returns the running daemon.
    ///
    /// # Errors
    /// If none was started, or its end was seen.
    pub fn daemon(&self) -> anyhow::Result<&Daemon> {
        self.daemon.as_ref().context("no daemon runs")
    }

    /// Sends a signal to the daemon.
    ///
    /// # Errors
    /// If there is none.
    pub fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        self.daemon()?.signal(signal)
    }

    /// Waits for the daemon's end; returns its exit code.
    ///
    /// # Errors
    /// If it does not end in time.
    pub fn wait_for_end(&mut self) -> anyhow::Result<i32> {
        let code = self.running()?.wait_for_end()?;
        self.daemon = None;
        Ok(code)
    }

    /// Returns whether a daemon was started whose end was not yet seen.
    pub fn runs(&self) -> bool {
        self.daemon.is_some()
    }

    /// Returns the exit code of the daemon; `None` while it runs.
    ///
    /// # Errors
    /// If none was started, or the system does not report it.
    pub fn take_end(&mut self) -> anyhow::Result<Option<i32>> {
        let code = self.running()?.exit_code()?;
        if code.is_some() {
            self.daemon = None;
        }
        Ok(code)
    }

    /// Ends the daemon in order.
    ///
    /// # Errors
    /// If it does not end, or not with success.
    pub fn stop(&mut self) -> anyhow::Result<()> {
        self.signal(Signal::TERM)?;
        let code = self.wait_for_end()?;
        ensure!(code == 0, "the daemon ended with {code}");
        Ok(())
    }

    /// Kills the daemon at once.
    ///
    /// # Errors
    /// If it has already ended.
    pub fn kill(&mut self) -> anyhow::Result<()> {
        self.signal(Signal::KILL)?;
        let code = self.wait_for_end()?;
        ensure!(code == KILLED, "the daemon ended with {code} before it could be killed");
        Ok(())
    }

    /// Returns the daemon's log.
    ///
    /// # Errors
    /// If the log cannot be read.
    pub fn log(&self) -> anyhow::Result<String> {
        std::fs::read_to_string(self.folder.log()).context("read the daemon's log")
    }

    /// Waits until the daemon has logged a line with these words; false if it ended first.
    ///
    /// # Errors
    /// If it does neither in time.
    pub fn wait_for_log(&mut self, words: &str) -> anyhow::Result<bool> {
        self.running()?.wait_for_log(words)
    }

    /// Checks that the daemon has not ended.
    ///
    /// # Errors
    /// If the daemon has ended.
    pub fn ensure_alive(&mut self) -> anyhow::Result<()> {
        self.running()?.ensure_alive()
    }

    /// Returns the daemon's resident memory, in bytes.
    ///
    /// # Errors
    /// If it does not run.
    pub fn resident_bytes(&self) -> anyhow::Result<u64> {
        self.daemon()?.resident_bytes()
    }

    /// Adds the end of the daemon's log to an error.
    pub fn with_log(&self, error: anyhow::Error) -> anyhow::Error {
        with_tail(error, "the daemon's log", &self.log().unwrap_or_default())
    }

    /// Returns information for debugging a standstill: the daemon's threads ([`Daemon::threads`]), its volumes,
    /// and sockets with unread data.
    pub fn standstill(&self) -> String {
        let threads = self.daemon().map(Daemon::threads).unwrap_or_default();
        let volumes = self.sterna(["volume", "list", "--json"]).map(|said| said.stdout).unwrap_or_default();
        let sockets = Program::of_package("ss", "iproute2").args(["-x", "-p"]).succeed().unwrap_or_default();
        // The words after the state are the unread and the unsent bytes.
        let is_of_interest = |line: &&str| {
            let queues: Vec<&str> = line.split_whitespace().skip(2).take(2).collect();
            line.contains(&*self.path("").to_string_lossy()) || queues != ["0", "0"]
        };
        let sockets: Vec<_> = sockets.lines().filter(is_of_interest).collect();
        format!("the daemon's threads:\n{threads}its volumes: {volumes}\nsockets:\n{}", sockets.join("\n"))
    }

    fn running(&mut self) -> anyhow::Result<&mut Daemon> {
        self.daemon.as_mut().context("no daemon runs")
    }
}

impl Host {
    /// Returns a command for the daemon.
    ///
    /// # Errors
    /// If the folder's path is too long for a socket.
    pub fn command<A: AsRef<std::ffi::OsStr>>(
        &self,
        arguments: impl IntoIterator<Item = A>,
    ) -> anyhow::Result<Program> {
        Ok(Program::at(&self.program).args(arguments).env("STERNA_HOST", self.address()?.to_string()))
    }

    /// Runs a command to its end.
    ///
    /// # Errors
    /// If it does not end.
    pub fn sterna<A: AsRef<std::ffi::OsStr>>(
        &self,
        arguments: impl IntoIterator<Item = A>,
    ) -> anyhow::Result<Outcome> {
        self.command(arguments)?.run()
    }

    /// Runs a command that must succeed, and parses its JSON.
    ///
    /// # Errors
    /// If it fails, or prints something else.
    pub fn ask<T: DeserializeOwned>(&self, arguments: &[&str]) -> anyhow::Result<T> {
        let outcome = self.sterna(arguments.iter().chain(&["--json"]))?;
        outcome.expect(0)?;
        outcome.json()
    }

    /// Makes the volume `v` of `size_bytes` in store `a`.
    ///
    /// # Errors
    /// What the daemon says.
    pub fn create_volume(&self, size_bytes: u64) -> anyhow::Result<Volume> {
        let size = size_bytes.to_string();
        self.sterna(["volume", "create", "v", "--store", "a", "--size", &size])?.success()?;
        self.volume()
    }

    /// Returns the volume `v`.
    ///
    /// # Errors
    /// What the daemon says.
    pub fn volume(&self) -> anyhow::Result<Volume> {
        self.ask(&["volume", "show", "v"])
    }

    /// Returns the statistics of the served volume `v`. On a busy machine it may ask more than once.
    ///
    /// # Errors
    /// What the daemon says.
    pub fn statistics(&self) -> anyhow::Result<VolumeStatistics> {
        until("the volume is served", || Ok(self.volume()?.statistics))
    }

    /// Runs `work` while the volume `v` moves to `store`, and waits for both.
    ///
    /// If the migration ends first, the volume moves back, and `work` runs again during a slower migration.
    ///
    /// # Errors
    /// If `work` or the migration fails.
    pub fn while_migrating<T>(
        &self,
        store: &str,
        mut work: impl FnMut() -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        let source = self.volume()?.store.context("the volume is in a store")?;
        for rate in ["12MiB/s", "4MiB/s", "1MiB/s"] {
            let begun = self.begin_to_migrate(store, Some(rate))?;
            let done = work().with_context(|| format!("during migration {}", begun.id))?;
            let state = self.migration(&begun.id)?.state;
            let ended = self.wait_for_migration(&begun.id)?;
            ensure!(ended.state == MigrationState::Moved, "{ended:?}");
            self.check_place(store)?;
            if state == MigrationState::Running {
                return Ok(done);
            }
            self.migrate(&source)?;
        }
        bail!("no migration took long enough to prove anything")
    }

    /// Returns the NBD address of the volume `v`.
    ///
    /// # Errors
    /// What the daemon says.
    pub fn export(&self) -> anyhow::Result<nbd_client::Address> {
        Ok(self.volume()?.uri.parse()?)
    }

    /// Returns the migration of this identity.
    ///
    /// # Errors
    /// What the daemon says.
    pub fn migration(&self, id: &str) -> anyhow::Result<Migration> {
        self.ask(&["migration", "show", id])
    }

    /// Moves the volume `v`, and waits until it is at the target.
    ///
    /// # Errors
    /// If it is not.
    pub fn migrate(&self, store: &str) -> anyhow::Result<Migration> {
        let ended: Migration = self.ask(&["migrate", "v", "--to", store])?;
        self.check_place(store)?;
        Ok(ended)
    }

    /// Moves the volume `v` to and fro `times` times.
    ///
    /// # Errors
    /// If one move fails.
    pub fn migrate_to_and_fro(&self, times: u32) -> anyhow::Result<()> {
        for round in 0..times {
            let store = STORES[(round as usize + 1) % STORES.len()];
            self.migrate(store).with_context(|| format!("migration {} of {times}", round + 1))?;
        }
        Ok(())
    }

    /// Begins to move the volume `v`, slowly if a rate such as `1MiB/s` is given.
    ///
    /// # Errors
    /// What the daemon says.
    pub fn begin_to_migrate(&self, store: &str, bandwidth: Option<&str>) -> anyhow::Result<Migration> {
        let bandwidth = bandwidth.map(|rate| ["--bandwidth", rate]);
        let arguments = ["migrate", "v", "--to", store, "--detach"];
        self.ask(&arguments.into_iter().chain(bandwidth.into_iter().flatten()).collect::<Vec<_>>())
    }

    /// Starts `sterna migrate v`, which ends when the migration has.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn start_migrating(&self, store: &str) -> anyhow::Result<Running> {
        self.command(["migrate", "v", "--to", store, "--json"])?.start()
    }

    /// Waits for the end of a migration.
    ///
    /// # Errors
    /// If it does not end in time.
    pub fn wait_for_migration(&self, id: &str) -> anyhow::Result<Migration> {
        self.daemon()?.wait_for_migration(id)
    }

    /// Waits until no migration from or to this host is under way.
    ///
    /// # Errors
    /// If a migration does not end in time.
    pub fn until_idle(&self) -> anyhow::Result<()> {
        until("no migration is under way", || {
            let migrations: Vec<Migration> = self.ask(&["migration", "list"])?;
            Ok(migrations.iter().all(|migration| migration.state.has_ended()).then_some(()))
        })
    }

    /// Checks that the volume `v` is served from `store`, and that no other store has a file of it.
    ///
    /// # Errors
    /// If that is not the case.
    pub fn check_place(&self, store: &str) -> anyhow::Result<()> {
        // After a kill the kernel may still hold the old daemon's locks, and the volume waits for them.
        let volume = until("the volume is served", || {
            let volume = self.volume()?;
            ensure!(volume.state != VolumeState::Failed, "{volume:?}");
            Ok((volume.state == VolumeState::Serving).then_some(volume))
        })?;
        ensure!(volume.store.as_deref() == Some(store), "it is in {:?} instead of {store}", volume.store);
        for each in STORES {
            let expected: &[&str] = if each == store { &["v.img"] } else { &[] };
            let images = self.images(each)?;
            ensure!(images == expected, "store {each} has {images:?} instead of {expected:?}");
        }
        Ok(())
    }

    /// Returns the sorted names of the volumes' files in a store.
    ///
    /// # Errors
    /// If the store cannot be read.
    pub fn images(&self, store: &str) -> anyhow::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in std::fs::read_dir(self.path(store)).context("list a store")? {
            names.push(entry?.file_name().to_string_lossy().into_owned());
        }
        // These are the daemon's lock, and files of the file system.
        names.retain(|name| !name.starts_with('.') && name != "lost+found");
        names.sort();
        Ok(names)
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{:#}", self.with_log(anyhow::anyhow!("a test has panicked")));
        }
    }
}
