//! Real NBD servers, each in a process of its own, and a test's engine and executor.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::rc::Rc;
use std::time::{Duration, Instant};

use block::engine::{self, Engine, EngineChoice};
use block::store::remote::{NbdUri, RemoteError, RemoteImage, RemoteOptions};
use block::{Access, Executor, Handle, RemoteStore};
use rustix::process::Signal;

const START_TIMEOUT: Duration = Duration::from_secs(60);

/// Options of tests that do not test waiting.
pub(crate) const OPTIONS: RemoteOptions = RemoteOptions {
    connect_timeout: Duration::from_secs(30),
    answer_deadline: Duration::from_secs(60),
    connections_max: 4,
};

pub(crate) struct Server {
    command: Vec<String>,
    uri: NbdUri,
    child: Child,
    folder: tempfile::TempDir,
}

impl Server {
    pub(crate) fn nbdkit(arguments: &[&str]) -> Self {
        let command = ["nbdkit", "--foreground", "--exit-with-parent", "--unix", "{folder}/socket"];
        Self::start(&[&command, arguments].concat())
    }

    pub(crate) fn qemu_nbd(format: &str, size: u64, arguments: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let disk = folder.path().join("disk");
        let made = Command::new("qemu-img")
            .args(["create", "-q", "-f", format, disk.to_str().unwrap(), &size.to_string()])
            .status();
        assert!(made.unwrap().success());
        let command = ["qemu-nbd", "--persistent", "--format", format, "--socket", "{folder}/socket"];
        Self::start_in(folder, &[&command, arguments, &["{folder}/disk"]].concat())
    }

    pub(crate) fn qemu_storage_daemon(size: u64) -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::File::create(folder.path().join("disk")).unwrap().set_len(size).unwrap();
        let uri = NbdUri::unix(folder.path().join("socket"), "disk");
        let command = [
            "qemu-storage-daemon",
            "--blockdev=file,node-name=file,filename={folder}/disk,discard=unmap,cache.direct=on,aio=threads",
            "--blockdev=raw,node-name=disk,file=file,discard=unmap",
            "--nbd-server=addr.type=unix,addr.path={folder}/socket",
            "--export=nbd,id=export,node-name=disk,name=disk,writable=on",
        ];
        Self::spawn(folder, uri, &command)
    }

    pub(crate) fn start(command: &[&str]) -> Self {
        Self::start_in(tempfile::tempdir().unwrap(), command)
    }

    pub(crate) fn start_at(uri: NbdUri, command: &[&str]) -> Self {
        Self::spawn(tempfile::tempdir().unwrap(), uri, command)
    }

    fn start_in(folder: tempfile::TempDir, command: &[&str]) -> Self {
        let uri = NbdUri::unix(folder.path().join("socket"), "");
        Self::spawn(folder, uri, command)
    }

    fn spawn(folder: tempfile::TempDir, uri: NbdUri, command: &[&str]) -> Self {
        let place = folder.path().to_str().unwrap();
        let command: Vec<String> = command.iter().map(|word| word.replace("{folder}", place)).collect();
        let child = spawn(&command, folder.path());
        let server = Self { command, uri, child, folder };
        server.wait_until_it_listens();
        server
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        let _ = std::fs::remove_file(self.folder.path().join("socket"));
    }

    pub(crate) fn change_argument(&mut self, from: &str, to: &str) {
        let argument = self.command.iter_mut().find(|argument| *argument == from).unwrap();
        to.clone_into(argument);
    }

    pub(crate) fn restart(&mut self) {
        self.child = spawn(&self.command, self.folder.path());
        self.wait_until_it_listens();
    }

    /// Stops it; returns when all its threads stand still.
    pub(crate) fn hang(&self) {
        self.signal(Signal::STOP);
        let threads = format!("/proc/{}/task", self.child.id());
        let stands = |thread: std::fs::DirEntry| {
            let told = std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
            // The state follows the name, which is in parentheses.
            told.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('T'))
        };
        while !std::fs::read_dir(&threads).unwrap().flatten().all(stands) {
            std::thread::yield_now();
        }
    }

    pub(crate) fn go_on(&self) {
        self.signal(Signal::CONT);
    }

    fn signal(&self, signal: Signal) {
        let process = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(process, signal).unwrap();
    }

    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }

    pub(crate) fn uri(&self) -> NbdUri {
        self.uri.clone()
    }

    pub(crate) fn connect(&self) -> RemoteImage {
        self.connect_with(OPTIONS)
    }

    pub(crate) fn connect_with(&self, options: RemoteOptions) -> RemoteImage {
        RemoteImage::connect_with(&self.uri(), Access::ReadWrite, options).unwrap()
    }

    fn wait_until_it_listens(&self) {
        let deadline = Instant::now() + START_TIMEOUT;
        loop {
            let error = match RemoteImage::connect(&self.uri(), Access::ReadOnly) {
                Err(error @ RemoteError::Unreachable { .. }) => error,
                // A server that listens may not have all its exports yet.
                Err(error @ RemoteError::Refused { .. }) if !self.uri.export.is_empty() => error,
                _ => return,
            };
            assert!(Instant::now() < deadline, "{:?}: {error:?}", self.command);
            // The other process gives no other sign that it is ready.
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts a program with its temporary files in `folder`: it is killed, and leaves them behind.
fn spawn(command: &[String], folder: &Path) -> Child {
    let mut process = Command::new(&command[0]);
    process.args(&command[1..]).env("TMPDIR", folder).stdin(Stdio::null()).stdout(Stdio::null());
    process.spawn().unwrap_or_else(|error| panic!("install {}: {error}", command[0]))
}

pub(crate) fn on_both<F: Future<Output = ()> + 'static>(body: impl Fn(Rc<dyn Engine>, Handle) -> F) {
    for choice in [EngineChoice::Ring, EngineChoice::Threads] {
        let Ok((driver, engine)) = engine::open(choice) else {
            omission::kernel_lacks("io_uring");
            continue;
        };
        let mut executor = Executor::new(driver);
        let handle = executor.handle();
        executor.run(body(engine, handle));
    }
}

pub(crate) fn store(image: RemoteImage, engine: &Rc<dyn Engine>, handle: &Handle) -> Rc<RemoteStore> {
    Rc::new(RemoteStore::new(image, Rc::clone(engine), handle.clone()))
}
