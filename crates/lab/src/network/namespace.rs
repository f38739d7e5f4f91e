//! A network namespace: a host, as far as its network goes.

use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::commands::ip;
use super::error::NetworkError;

/// The most that a socket's buffers may grow to, in either direction.
///
/// A connection that fills 1 Gbit/s at a round trip of 180 ms has 22.5 MB on the way, and twice that while a queue of
/// the same length is full; the kernel reckons with twice the payload for its own bookkeeping.
const SOCKET_BUFFER_BYTES_MAX: u32 = 128 << 20;

/// What is set in each namespace, below `/proc/sys/net`. The least and the usual size of buffers are the kernel's own.
const SETTINGS: [(&str, BufferSizes); 2] = [
    ("ipv4/tcp_wmem", BufferSizes { least: 4096, usual: 16 << 10 }),
    ("ipv4/tcp_rmem", BufferSizes { least: 4096, usual: 128 << 10 }),
];

/// Neighbours are asked for by IPv6 as soon as an interface is up; without it a quiet link is quiet.
const NO_IPV6: &str = "ipv6/conf/default/disable_ipv6";

struct BufferSizes {
    least: u32,
    usual: u32,
}

/// A network namespace. Clones are the same namespace; it lives as long as one of them, or a process in it.
#[derive(Clone, Debug)]
pub struct Namespace {
    name: String,
    file: Arc<File>,
}

impl Namespace {
    /// Makes a namespace with nothing but a loopback interface. `name` is for people.
    ///
    /// # Errors
    /// [`NetworkError::Refused`] without root; otherwise what the system says.
    pub fn create(name: &str) -> Result<Self, NetworkError> {
        // A thread of its own: this one stays where it is.
        let made = std::thread::scope(|scope| scope.spawn(unshare).join());
        let file = made.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        let namespace = Self { name: name.to_owned(), file: Arc::new(file) };
        namespace.run(set_up)??;
        ip(&namespace, &["link", "set", "lo", "up"])?;
        Ok(namespace)
    }

    /// What people call it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Where it can be found as long as this process keeps it: `nsenter --net=PATH` looks inside.
    pub fn path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd()))
    }

    /// Does `work` on a thread inside, and waits for it.
    ///
    /// Sockets and processes that it makes stay inside. A panic of `work` goes on here.
    ///
    /// # Errors
    /// If the namespace cannot be entered.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T, NetworkError> {
        let inside = || {
            self.enter()?;
            Ok(work())
        };
        let done = std::thread::scope(|scope| scope.spawn(inside).join());
        done.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }

    /// Moves the calling thread in, for good.
    ///
    /// # Errors
    /// What the kernel says; [`NetworkError::Refused`] without root.
    pub fn enter(&self) -> Result<(), NetworkError> {
        let moved = move_into_link_name_space(self.file.as_fd(), Some(LinkNameSpaceType::Network));
        moved.map_err(|error| NetworkError::Refused { source: error.into() })
    }

    /// A command that will run inside; the process that is spawned becomes the program itself.
    ///
    /// It must be spawned while this process lives. `nsenter` is what enters: if `program` cannot be executed, it says so
    /// on its standard error.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", self.path().display())).arg("--").arg(program);
        command
    }
}

/// Takes the calling thread into a new namespace.
fn unshare() -> Result<File, NetworkError> {
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET)
        .map_err(|error| NetworkError::Refused { source: error.into() })?;
    File::open("/proc/thread-self/ns/net").map_err(NetworkError::system("open a new network namespace"))
}

/// Writes the settings of the namespace that the calling thread is in.
fn set_up() -> Result<(), NetworkError> {
    for (name, BufferSizes { least, usual }) in SETTINGS {
        let sizes = format!("{least} {usual} {SOCKET_BUFFER_BYTES_MAX}");
        std::fs::write(format!("/proc/sys/net/{name}"), sizes)
            .map_err(NetworkError::system("set how large the buffers of TCP may grow in a namespace"))?;
    }
    match std::fs::write(format!("/proc/sys/net/{NO_IPV6}"), "1") {
        // A kernel without IPv6.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        written => written.map_err(NetworkError::system("switch IPv6 off in a namespace")),
    }
}
