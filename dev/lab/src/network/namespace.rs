//! A network namespace: the network of a host.

use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::commands::ip;
use super::error::NetworkError;

/// The largest size of a socket's buffers, in either direction.
///
/// A connection that fills 1 Gbit/s at a round trip of 180 ms has 22.5 MB in flight, and twice that while a queue of the same
/// length is full. The kernel counts twice the payload, for its own records.
const SOCKET_BUFFER_BYTES_MAX: u32 = 128 << 20;

/// Settings of each namespace, below `/proc/sys/net`. The least and the default size of buffers are the kernel's own.
const SETTINGS: [(&str, BufferSizes); 2] = [
    ("ipv4/tcp_wmem", BufferSizes { least: 4096, usual: 16 << 10 }),
    ("ipv4/tcp_rmem", BufferSizes { least: 4096, usual: 128 << 10 }),
];

/// IPv6 looks for neighbours as soon as an interface is up; without it an idle link is quiet.
const NO_IPV6: &str = "ipv6/conf/default/disable_ipv6";

struct BufferSizes {
    least: u32,
    usual: u32,
}

/// A network namespace. Clones are the same namespace; it lives as long as a clone, or a process in it.
#[derive(Clone, Debug)]
pub struct Namespace {
    name: String,
    file: Arc<File>,
}

impl Namespace {
    /// Makes a namespace with only a loopback interface; `name` is for messages.
    /// Fails with [`NetworkError::Refused`] without root.
    pub fn create(name: &str) -> Result<Self, NetworkError> {
        // On another thread, so that this one keeps its namespace.
        let made = std::thread::scope(|scope| scope.spawn(unshare).join());
        let file = made.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        let namespace = Self { name: name.to_owned(), file: Arc::new(file) };
        namespace.run(set_up)??;
        ip(&namespace, &["link", "set", "lo", "up"])?;
        Ok(namespace)
    }

    /// Returns the name for messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns a path to the namespace, valid while this process holds it: `nsenter --net=PATH` enters.
    pub fn path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd()))
    }

    /// Does `work` on a thread inside, and waits for it.
    ///
    /// Sockets and processes that it makes stay inside. A panic of `work` continues here.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T, NetworkError> {
        let inside = || {
            self.enter()?;
            Ok(work())
        };
        let done = std::thread::scope(|scope| scope.spawn(inside).join());
        done.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }

    /// Moves the calling thread into the namespace for good. Fails with [`NetworkError::Refused`] without root.
    pub fn enter(&self) -> Result<(), NetworkError> {
        let moved = move_into_link_name_space(self.file.as_fd(), Some(LinkNameSpaceType::Network));
        moved.map_err(|error| NetworkError::Refused { source: error.into() })
    }

    /// Returns a command that runs inside; the spawned process becomes the program itself.
    ///
    /// It must be spawned while this process lives. If `program` cannot be executed, `nsenter` says so on standard error.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", self.path().display())).arg("--").arg(program);
        command
    }
}

fn unshare() -> Result<File, NetworkError> {
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET)
        .map_err(|error| NetworkError::Refused { source: error.into() })?;
    File::open("/proc/thread-self/ns/net").map_err(NetworkError::system("open a new network namespace"))
}

fn set_up() -> Result<(), NetworkError> {
    for (name, BufferSizes { least, usual }) in SETTINGS {
        let sizes = format!("{least} {usual} {SOCKET_BUFFER_BYTES_MAX}");
        std::fs::write(format!("/proc/sys/net/{name}"), sizes)
            .map_err(NetworkError::system("set how large the buffers of TCP may grow in a namespace"))?;
    }
    match std::fs::write(format!("/proc/sys/net/{NO_IPV6}"), "1") {
        // This kernel has no IPv6.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        written => written.map_err(NetworkError::system("switch IPv6 off in a namespace")),
    }
}
