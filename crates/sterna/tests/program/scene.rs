//! A daemon with two stores in a temporary folder, driven through the program as a user would.

use std::io::{BufRead as _, BufReader};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use lab::nbd_client::{Address, Client, ClientOptions};
use lab::workload::{self, Content, Guest, GuestOptions};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// The program under test.
pub(crate) const PROGRAM: &str = env!("CARGO_BIN_EXE_sterna");
/// Longest that anything may take that a test waits for; nothing comes near it unless it hangs.
pub(crate) const DEADLINE: Duration = Duration::from_secs(120);
/// Size of the disk that guests work on, in bytes.
pub(crate) const DISK_BYTES: u64 = 32 << 20;
/// How much of it they fill at first.
const FILL_BYTES: u64 = 8 << 20;

/// A temporary folder with stores `a` and `b`, and a daemon if one was started.
pub(crate) struct Scene {
    folder: tempfile::TempDir,
    daemon: Option<Daemon>,
    /// Folders in which small file systems are mounted.
    mounted: Vec<PathBuf>,
}

struct Daemon {
    child: Child,
    /// Lines of its log that nobody has looked at.
    log: mpsc::Receiver<String>,
    /// Lines that were looked at, for failures.
    seen: Vec<String>,
}

/// How a command ended.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// Its exit code.
    pub(crate) code: i32,
    /// What it printed.
    pub(crate) stdout: String,
    /// What it said besides.
    pub(crate) stderr: String,
}

impl Scene {
    /// A folder without a daemon.
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let scene = Self { folder, daemon: None, mounted: Vec::new() };
        for store in ["a", "b"] {
            std::fs::create_dir(scene.path(store)).unwrap();
        }
        scene.configure("");
        scene
    }

    /// A folder with a daemon that is ready.
    pub(crate) fn started() -> Self {
        let mut scene = Self::new();
        scene.start(None);
        scene
    }

    /// Writes the configuration, with more lines at its end.
    pub(crate) fn configure(&self, more: &str) {
        let path = |name| self.path(name).display().to_string();
        let text = format!(
            "data_dir = '{}'\napi = 'unix:{}'\n[stores.a]\npath = '{}'\n[stores.b]\npath = '{}'\n{more}",
            path("data"),
            path("run/api.sock"),
            path("a"),
            path("b"),
        );
        std::fs::write(self.path("sterna.toml"), text).unwrap();
    }

    /// A path in the folder.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Mounts a small file system in a folder of the scene; false where that is not allowed.
    pub(crate) fn mount_small_disk(&mut self, folder: &str, bytes: u64) -> bool {
        let folder = self.path(folder);
        std::fs::create_dir_all(&folder).unwrap();
        let size = format!("size={bytes}");
        let mounted =
            Command::new("mount").args(["-t", "tmpfs", "-o", &size, "sterna-test"]).arg(&folder).output();
        let why = match mounted {
            Ok(output) if output.status.success() => {
                self.mounted.push(folder);
                return true;
            }
            Ok(output) => String::from_utf8_lossy(&output.stderr).into_owned(),
            Err(error) => error.to_string(),
        };
        omission::machine_lacks(&format!("root, which mounting needs: {why}"));
        false
    }

    /// Starts the daemon, with a fail point if one is named, and waits until it is ready or has ended.
    pub(crate) fn start(&mut self, fail_point: Option<&str>) {
        assert!(self.daemon.is_none());
        let mut command = Command::new(PROGRAM);
        command.arg("serve").arg("--config").arg(self.path("sterna.toml"));
        command
            .env_remove("STERNA_HOST")
            .env("STERNA_LOG", "debug")
            .stdin(Stdio::null())
            .stderr(Stdio::piped());
        match fail_point {
            Some(point) => command.env("STERNA_FAIL_POINT", point),
            None => command.env_remove("STERNA_FAIL_POINT"),
        };
        let mut child = command.spawn().unwrap();
        let (sender, log) = mpsc::channel();
        let lines = BufReader::new(child.stderr.take().unwrap()).lines();
        std::thread::spawn(move || lines.map_while(Result::ok).try_for_each(|line| sender.send(line)));
        self.daemon = Some(Daemon { child, log, seen: Vec::new() });
        self.wait_for_log(" ready ");
    }

    /// Waits until the daemon has logged a line with these words; false if it ended first.
    pub(crate) fn wait_for_log(&mut self, words: &str) -> bool {
        let daemon = self.daemon.as_mut().unwrap();
        loop {
            match daemon.log.recv_timeout(DEADLINE) {
                Ok(line) => {
                    let found = line.contains(words);
                    daemon.seen.push(line);
                    if found {
                        return true;
                    }
                }
                Err(mpsc::RecvTimeoutError::Disconnected) => return false,
                Err(mpsc::RecvTimeoutError::Timeout) => panic!("the daemon never logged \"{words}\""),
            }
        }
    }

    /// Waits for the daemon's end.
    pub(crate) fn wait(&mut self) -> ExitStatus {
        // The log ends with the process.
        while self.wait_for_log("\0") {}
        let status = self.daemon.as_mut().unwrap().child.wait().unwrap();
        self.daemon = None;
        status
    }

    /// Waits until the daemon has killed itself at a fail point.
    pub(crate) fn wait_for_death(&mut self) {
        let status = self.wait();
        assert_eq!(status.signal(), Some(9), "the daemon was to die at a fail point: {status}");
    }

    /// Ends the daemon in order.
    pub(crate) fn stop(&mut self) -> ExitStatus {
        self.signal(Signal::TERM);
        self.wait()
    }

    /// Ends the daemon as a crash would.
    pub(crate) fn kill(&mut self) {
        self.signal(Signal::KILL);
        assert_eq!(self.wait().signal(), Some(9));
    }

    /// Sends the daemon a signal.
    pub(crate) fn signal(&self, signal: Signal) {
        let process = i32::try_from(self.daemon.as_ref().unwrap().child.id()).unwrap();
        kill_process(Pid::from_raw(process).unwrap(), signal).unwrap();
    }

    /// Process number of the daemon.
    pub(crate) fn process(&self) -> u32 {
        self.daemon.as_ref().unwrap().child.id()
    }

    /// A command to this scene's daemon.
    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(PROGRAM);
        command.args(arguments).env_remove("STERNA_LOG").stdin(Stdio::null());
        command.env("STERNA_HOST", format!("unix:{}", self.path("run/api.sock").display()));
        command
    }

    /// Runs a command to its end.
    pub(crate) fn run(&self, arguments: &[&str]) -> Outcome {
        Outcome::of(self.command(arguments))
    }

    /// Runs a command that must succeed.
    pub(crate) fn succeed(&self, arguments: &[&str]) -> String {
        let outcome = self.run(arguments);
        assert_eq!(outcome.code, 0, "{arguments:?}: {outcome:?}");
        outcome.stdout
    }

    /// Runs a command with `--json`, whatever its exit code.
    pub(crate) fn json(&self, arguments: &[&str]) -> (i32, Value) {
        let outcome = self.run(&[arguments, &["--json"]].concat());
        let value = serde_json::from_str(&outcome.stdout);
        (outcome.code, value.unwrap_or_else(|error| panic!("{arguments:?}: {error}: {outcome:?}")))
    }

    /// Makes the volume `v` in store `a`.
    pub(crate) fn create_volume(&self) {
        let size = DISK_BYTES.to_string();
        self.succeed(&["volume", "create", "v", "--store", "a", "--size", &size]);
    }

    /// Connects to the volume `v`; a connection that breaks is not made again.
    pub(crate) fn connect(&self) -> Client {
        let address = Address::new(self.path("run/volumes/v.sock"), "v");
        let options = ClientOptions { reconnect_deadline: Duration::ZERO, ..ClientOptions::default() };
        Client::connect(&address, options).unwrap()
    }

    /// Lets a guest work on the volume `v`; it survives restarts of the daemon.
    pub(crate) fn start_guest(&self) -> Guest {
        let address = Address::new(self.path("run/volumes/v.sock"), "v");
        let options = ClientOptions { reconnect_deadline: DEADLINE, ..ClientOptions::default() };
        let mut client = Client::connect(&address, options).unwrap();
        let mut content = Content::new(DISK_BYTES, 4096, 1);
        workload::fill(&mut client, &mut content, FILL_BYTES, &mut |_| {}).unwrap();
        Guest::start(client, content, GuestOptions::default()).unwrap()
    }

    /// Names of the files in a store that are about volumes, sorted.
    pub(crate) fn images(&self, store: &str) -> Vec<String> {
        let entries = std::fs::read_dir(self.path(store)).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = names.filter(|name| name != ".sterna-lock").collect();
        names.sort();
        names
    }

    /// The store that the volume `v` is in, once it is served: the last writes of a killed daemon may hold its image.
    pub(crate) fn store_of_volume(&self) -> String {
        let began = Instant::now();
        loop {
            let (code, volume) = self.json(&["volume", "show", "v"]);
            match volume["state"].as_str() {
                Some("serving") => return volume["store"].as_str().unwrap().to_owned(),
                Some("waiting") if began.elapsed() < DEADLINE => {}
                _ => panic!("the volume is not served ({code}): {volume}"),
            }
        }
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        if let Some(daemon) = &mut self.daemon {
            // It may have ended by itself.
            let _ = daemon.child.kill();
            let _ = daemon.child.wait();
            if std::thread::panicking() {
                daemon.seen.extend(daemon.log.iter());
                eprintln!("the daemon's log:\n  {}", daemon.seen.join("\n  "));
            }
        }
        for folder in &self.mounted {
            // Lazily: the last writes of a killed daemon may still have files open there.
            let _ = Command::new("umount").arg("-l").arg(folder).status();
        }
    }
}

impl Outcome {
    /// Runs a command to its end.
    pub(crate) fn of(mut command: Command) -> Self {
        let output = command.output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
        let code = output.status.code().unwrap_or_else(|| 128 + output.status.signal().unwrap());
        Self { code, stdout: text(&output.stdout), stderr: text(&output.stderr) }
    }
}

/// Stops a guest and compares its whole disk with what it knows: what was acknowledged, and nothing else.
pub(crate) fn stop_and_verify(guest: Guest) {
    let mut stopped = guest.stop().unwrap();
    let mut findings = stopped.findings;
    findings.append(workload::verify_export(&mut stopped.client, &stopped.content, &mut |_| {}).unwrap());
    assert!(findings.is_empty(), "{} wrong: {:?}", findings.count(), findings.first());
    assert!(stopped.content.blocks_written() > 0);
}

/// The code of an error in JSON.
pub(crate) fn code(value: &Value) -> &str {
    value["error"]["code"].as_str().unwrap_or_else(|| panic!("no error: {value}"))
}

/// Reads a file from `start` on.
pub(crate) fn read_at(path: &Path, start: u64, length: usize) -> Vec<u8> {
    use std::os::unix::fs::FileExt as _;
    let mut bytes = vec![0; length];
    std::fs::File::open(path).unwrap().read_exact_at(&mut bytes, start).unwrap();
    bytes
}
