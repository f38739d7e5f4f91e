//! A host whose daemon is the program under test. Every failure fails the test.

use std::ops::{Deref, DerefMut};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use lab::workload::{self, Content, Guest, GuestOptions};
use serde_json::Value;
use testbed::file_system::SecondMount;
use testbed::nbd_client::{Address, Client, ClientOptions};
use testbed::{Host, KILLED};

pub(crate) use testbed::DEADLINE;

/// Size of the disk that guests work on, in bytes.
pub(crate) const DISK_BYTES: u64 = 32 << 20;
/// Bytes that they fill at first.
const FILL_BYTES: u64 = 8 << 20;

/// A host with stores `a` and `b`, and a daemon if one was started.
pub(crate) struct Scene {
    host: Host,
}

#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Scene {
    pub(crate) fn new() -> Self {
        Self { host: Host::new(program()).unwrap() }
    }

    /// A host with a daemon that is ready.
    pub(crate) fn started() -> Self {
        let mut scene = Self::new();
        scene.start(None);
        scene
    }

    /// Writes the configuration, with more lines at its end.
    pub(crate) fn configure(&self, more: &str) {
        self.folder().set_configuration(more).unwrap();
    }

    /// Mounts a small file system in a folder of the host; false where that is not allowed.
    pub(crate) fn mount_small_disk(&mut self, folder: &str, bytes: u64) -> bool {
        if !rustix::process::geteuid().is_root() {
            omission::machine_lacks("root, which mounting needs");
            return false;
        }
        let folder = self.path(folder);
        std::fs::create_dir_all(&folder).unwrap();
        self.keep_mounted(SecondMount::in_memory(&folder, bytes).unwrap());
        true
    }

    /// Starts the daemon, with a fail point if one is named, and waits until it answers or has ended.
    pub(crate) fn start(&mut self, fail_point: Option<&str>) {
        let fail_point = fail_point.map(|point| ("STERNA_FAIL_POINT", point));
        let environment: Vec<_> = [("STERNA_LOG", "debug")].into_iter().chain(fail_point).collect();
        if let Err(error) = self.host.start_with(&environment) {
            assert!(self.ensure_alive().is_err(), "{error:#}");
        }
    }

    /// Waits until the daemon has logged a line with these words; false if it ended first.
    pub(crate) fn wait_for_log(&mut self, words: &str) -> bool {
        self.host.wait_for_log(words).unwrap()
    }

    /// Waits for the daemon's end; returns its exit code.
    pub(crate) fn wait(&mut self) -> i32 {
        self.wait_for_end().unwrap()
    }

    /// Waits until the daemon has killed itself at a fail point.
    pub(crate) fn wait_for_death(&mut self) {
        assert_eq!(self.wait(), KILLED, "the daemon was to die at a fail point");
    }

    /// Ends the daemon in order.
    pub(crate) fn stop(&mut self) {
        self.host.stop().unwrap();
    }

    /// Ends the daemon as a crash would.
    pub(crate) fn kill(&mut self) {
        self.host.kill().unwrap();
    }

    pub(crate) fn process(&self) -> u32 {
        self.daemon().unwrap().process_id()
    }

    /// A command to this scene's daemon.
    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(program());
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

    /// Runs a command that must succeed once a daemon that was killed has ended: a slow disk may still be at its last writes.
    pub(crate) fn succeed_after_a_kill(&self, arguments: &[&str]) -> String {
        until(&format!("{arguments:?} succeeds"), || {
            let outcome = self.run(arguments);
            assert!(matches!(outcome.code, 0 | 4), "{arguments:?}: {outcome:?}");
            (outcome.code == 0).then_some(outcome.stdout)
        })
    }

    /// Waits until a volume is served: a slow disk may still be at the last writes of a daemon that was killed.
    pub(crate) fn until_served(&self, volume: &str) {
        wait_until("it is served", || self.json(&["volume", "show", volume]).1["state"] == "serving");
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

    /// Lets a guest work on the volume `v` that stops at the first break of its connection.
    pub(crate) fn start_guest_without_reconnects(&self) -> Guest {
        let mut client = self.connect();
        let mut content = Content::new(DISK_BYTES, 4096, 1);
        workload::fill(&mut client, &mut content, FILL_BYTES, &mut |_| {}).unwrap();
        Guest::start(client, content, GuestOptions::default()).unwrap()
    }

    /// Names of the files in a store that are about volumes, sorted.
    pub(crate) fn images(&self, store: &str) -> Vec<String> {
        self.host.images(store).unwrap()
    }

    /// The store that the volume `v` is in, once it is served: the last writes of a killed daemon may hold its image.
    pub(crate) fn store_of_volume(&self) -> String {
        until("the volume is served", || {
            let (code, volume) = self.json(&["volume", "show", "v"]);
            match volume["state"].as_str() {
                Some("serving") => Some(volume["store"].as_str().unwrap().to_owned()),
                Some("waiting") => None,
                _ => panic!("the volume is not served ({code}): {volume}"),
            }
        })
    }
}

impl Deref for Scene {
    type Target = Host;

    fn deref(&self) -> &Host {
        &self.host
    }
}

impl DerefMut for Scene {
    fn deref_mut(&mut self) -> &mut Host {
        &mut self.host
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

/// The program under test.
pub(crate) fn program() -> PathBuf {
    testbed::program::sterna().unwrap()
}

/// Looks until `look` finds something; `what` is what is waited for.
pub(crate) fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    testbed::until(what, || Ok(look())).unwrap()
}

/// Looks until something is so.
pub(crate) fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    until(what, || is_so().then_some(()));
}

/// Stops a guest and compares its whole disk with what it knows: what was acknowledged, and nothing else.
pub(crate) fn stop_and_verify(guest: Guest) {
    let mut stopped = guest.stop().unwrap();
    let mut findings = stopped.findings;
    findings.append(workload::verify_export(&mut stopped.client, &stopped.content, &mut |_| {}).unwrap());
    assert!(findings.is_empty(), "{} wrong: {:?}", findings.count(), findings.first());
    assert!(stopped.content.blocks_written() > 0);
}

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
