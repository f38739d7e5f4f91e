//! A host whose daemon is the program under test. Every failure fails the test.

use std::ops::{Deref, DerefMut};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use e2e::{Host, Program, guest, may_mount};
use lab::workload::Guest;
use serde_json::Value;
use testbed::nbd_client::{Address, Client};
use testbed::{KILLED, LoopDevice};

pub(crate) use testbed::{DEADLINE, Outcome};

/// Size of the disk that guests work on, in bytes.
pub(crate) const DISK_BYTES: u64 = 32 << 20;
/// Bytes that they fill at first.
const FILL_BYTES: u64 = 8 << 20;

/// A host with stores `a` and `b`, and a daemon if one was started.
pub(crate) struct Scene {
    host: Host,
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
        let may = may_mount();
        if may {
            self.host.mount_small_disk(folder, bytes).unwrap();
        }
        may
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
        let mut command = self.host.command(arguments).unwrap().into_command();
        command.env_remove("STERNA_LOG").stdin(Stdio::null());
        command
    }

    pub(crate) fn run(&self, arguments: &[&str]) -> Outcome {
        outcome_of(self.command(arguments))
    }

    /// Runs a command that must succeed.
    pub(crate) fn succeed(&self, arguments: &[&str]) -> String {
        self.run(arguments).success().unwrap()
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
        (outcome.code, outcome.json().unwrap())
    }

    /// Makes the volume `v` in store `a`.
    pub(crate) fn create_volume(&self) {
        self.host.create_volume(DISK_BYTES).unwrap();
    }

    /// Connects to the volume `v`; a connection that breaks is not made again.
    pub(crate) fn connect(&self) -> Client {
        guest::connect(&self.export()).unwrap()
    }

    /// Lets a guest work on the volume `v`; it survives restarts of the daemon.
    pub(crate) fn start_guest(&self) -> Guest {
        guest::start(&self.export(), FILL_BYTES).unwrap()
    }

    /// Lets a guest work on the volume `v` that stops at the first break of its connection.
    pub(crate) fn start_guest_without_reconnects(&self) -> Guest {
        guest::start_without_reconnects(&self.export(), FILL_BYTES).unwrap()
    }

    /// The address of the volume `v`, also while its daemon does not answer.
    fn export(&self) -> Address {
        Address::new(self.path("run/volumes/v.sock"), "v")
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

pub(crate) fn outcome_of(command: Command) -> Outcome {
    Program::from(command).run().unwrap()
}

/// Attaches a file to a loop device; `None` where that is not allowed.
pub(crate) fn loop_device(file: &Path) -> Option<LoopDevice> {
    let attached = LoopDevice::attach(file);
    if let Err(error) = &attached {
        omission::machine_lacks(&format!("root, which loop devices need: {error:#}"));
    }
    attached.ok()
}

/// Runs `qemu-img`, which must succeed.
pub(crate) fn qemu_img(arguments: &[&str]) -> String {
    Program::qemu_img().args(arguments).succeed().unwrap()
}

/// Runs `qemu-io`, which must succeed.
pub(crate) fn qemu_io(arguments: &[&str]) -> String {
    Program::qemu_io().args(arguments).succeed().unwrap()
}

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
    guest::stop_and_verify(guest).unwrap();
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
