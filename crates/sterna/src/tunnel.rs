//! Reaches a daemon on another machine by the system's own ssh: `--host ssh://user@host`.
//!
//! ```text
//!   this program ──► socket in a folder of its own ──► ssh -L ══► sshd ──► socket of the daemon there
//! ```
//! ssh and its configuration handle keys, agents, passwords, jump hosts and known hosts. One ssh serves all requests of a
//! command, and ends with it.

use std::ffi::OsString;
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::str::FromStr;
use std::time::Duration;

use api::{Address, AddressError};

use crate::remotes::RemoteAddress;

/// The socket of a daemon that was installed by a package.
const SOCKET: &str = "/run/sterna/sterna.sock";
/// Time between two checks for the socket that ssh makes once it is connected. Typing a password takes seconds.
const LOOK_INTERVAL: Duration = Duration::from_millis(10);
/// Number of folder names that are tried if some exist.
const FOLDERS_TRIED: u32 = 100;

/// Address of a daemon, as users write it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum HostAddress {
    Here(Address),
    /// A daemon on another machine, by ssh.
    Ssh(SshAddress),
    /// A daemon on another machine, over TLS.
    Https(RemoteAddress),
}

/// A daemon on another machine: `ssh://[USER@]HOST[:PORT][/PATH]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SshAddress {
    /// Argument of ssh: `USER@HOST`, or a host of its configuration.
    destination: String,
    port: Option<u16>,
    /// Path of the daemon's socket on that machine.
    socket: String,
}

/// Why a text is not an address of a daemon.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum HostAddressError {
    /// It is neither an address on this machine nor of another kind.
    #[error("{0}; for another machine: ssh://USER@HOST, or https://HOST:PORT")]
    Here(#[from] AddressError),
    /// It begins with `ssh://`, but the rest is wrong.
    #[error(
        "\"{0}\" names no machine: write ssh://USER@HOST, ssh://HOST:PORT or ssh://USER@HOST/PATH/OF/THE/SOCKET"
    )]
    Ssh(String),
    /// It begins with `https://`, but the rest is wrong.
    #[error("{0}")]
    Https(String),
}

/// Why the daemon of another machine cannot be reached.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TunnelError {
    /// There is no ssh, or no folder can be made.
    #[error("ssh cannot be started; install the package openssh-client")]
    Start(#[source] io::Error),
    /// ssh has ended before it was connected.
    #[error("ssh does not reach {destination} ({status}); try: ssh {destination} true")]
    Ended { destination: String, status: std::process::ExitStatus },
}

/// An ssh process that forwards to a daemon; it ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Tunnel {
    ssh: Child,
    folder: PathBuf,
    address: Address,
}

impl FromStr for HostAddress {
    type Err = HostAddressError;

    fn from_str(text: &str) -> Result<Self, HostAddressError> {
        if text.starts_with("https://") {
            return text.parse().map(Self::Https).map_err(HostAddressError::Https);
        }
        match text.strip_prefix("ssh://") {
            Some(rest) => parse(rest).map(Self::Ssh).ok_or_else(|| HostAddressError::Ssh(text.to_owned())),
            None => Ok(Self::Here(text.parse()?)),
        }
    }
}

fn parse(text: &str) -> Option<SshAddress> {
    let (machine, socket) = match text.find('/') {
        Some(at) => (&text[..at], &text[at..]),
        None => (text, ""),
    };
    let socket = if socket.len() > 1 { socket } else { SOCKET };
    // An IPv6 address is in brackets, and contains colons.
    let after_address = machine.rfind(']').map_or(0, |bracket| bracket + 1);
    let (destination, port) = match machine[after_address..].find(':') {
        Some(colon) => {
            let at = after_address + colon;
            (&machine[..at], Some(machine[at + 1..].parse().ok().filter(|port| *port > 0)?))
        }
        None => (machine, None),
    };
    let destination = destination.replace(['[', ']'], "");
    let (user, host) = destination.rsplit_once('@').unwrap_or(("none", &destination));
    // N.B. neither may look like an option to ssh, and no socket may end the forwarding's first half.
    let is_fine = |part: &str| {
        !part.is_empty()
            && !part.starts_with('-')
            && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-:%@+".contains(&byte))
    };
    let is_path = socket.bytes().all(|byte| byte.is_ascii_graphic() && byte != b':');
    (is_fine(user) && is_fine(host) && is_path).then(|| SshAddress {
        destination: destination.clone(),
        port,
        socket: socket.to_owned(),
    })
}

impl std::fmt::Display for SshAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} on {}", self.socket, self.destination)
    }
}

impl Tunnel {
    /// Starts ssh and waits until it is connected. ssh itself prompts for passwords and prints errors.
    pub(crate) async fn open(to: &SshAddress) -> Result<Self, TunnelError> {
        let folder = make_folder().map_err(TunnelError::Start)?;
        let socket = folder.join("daemon.sock");
        let mut command = Command::new("ssh");
        command.args(["-N", "-T", "-o", "ExitOnForwardFailure=yes", "-o", "StreamLocalBindMask=0177"]);
        if let Some(port) = to.port {
            command.arg("-p").arg(port.to_string());
        }
        let mut forwarding = OsString::from(&socket);
        forwarding.push(format!(":{}", to.socket));
        command.arg("-L").arg(forwarding).arg("--").arg(&to.destination);
        // Standard input belongs to the command, which may read an invitation from it.
        let started = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn();
        let address = Address::unix(&socket).map_err(|error| TunnelError::Start(io::Error::other(error)));
        let (ssh, address) = match (started, address) {
            (Ok(ssh), Ok(address)) => (ssh, address),
            (Ok(mut ssh), Err(error)) => {
                let _ = ssh.kill().and_then(|()| ssh.wait());
                remove(&folder);
                return Err(error);
            }
            (Err(error), _) => {
                remove(&folder);
                return Err(TunnelError::Start(error));
            }
        };
        let mut tunnel = Self { ssh, folder, address };
        while !socket.exists() {
            if let Some(status) = tunnel.ssh.try_wait().map_err(TunnelError::Start)? {
                return Err(TunnelError::Ended { destination: to.destination.clone(), status });
            }
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
        Ok(tunnel)
    }

    /// Returns the local end of the forwarding.
    pub(crate) fn address(&self) -> &Address {
        &self.address
    }
}

impl Drop for Tunnel {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.ssh.kill();
        let _ = self.ssh.wait();
        remove(&self.folder);
    }
}

/// Makes a folder that only this user can enter.
fn make_folder() -> io::Result<PathBuf> {
    let parent = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|folder| folder.is_dir());
    let parent = parent.unwrap_or_else(std::env::temp_dir);
    let mut tried = 0;
    loop {
        let folder = parent.join(format!("sterna-ssh-{}-{tried}", std::process::id()));
        match std::fs::DirBuilder::new().mode(0o700).create(&folder) {
            Ok(()) => return Ok(folder),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && tried < FOLDERS_TRIED => tried += 1,
            Err(error) => return Err(error),
        }
    }
}

fn remove(folder: &Path) {
    // At worst an empty folder is left, which only this user can use.
    let _ = std::fs::remove_dir_all(folder);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_are_read_as_people_write_them() {
        for (text, destination, port, socket) in [
            ("ssh://root@rack3", "root@rack3", None, SOCKET),
            ("ssh://rack3:2222", "rack3", Some(2222), SOCKET),
            ("ssh://a.b@10.0.0.1:22/run/x/y.sock", "a.b@10.0.0.1", Some(22), "/run/x/y.sock"),
            ("ssh://root@[fe80::1%eth0]:2222/", "root@fe80::1%eth0", Some(2222), SOCKET),
            ("ssh://[2001:db8::1]", "2001:db8::1", None, SOCKET),
        ] {
            let expected =
                SshAddress { destination: destination.to_owned(), port, socket: socket.to_owned() };
            assert_eq!(text.parse(), Ok(HostAddress::Ssh(expected)), "{text}");
        }
        assert!(matches!("unix:/run/a".parse(), Ok(HostAddress::Here(_))));
    }

    #[test]
    fn what_ssh_would_take_for_something_else_is_refused() {
        for text in [
            "ssh://",
            "ssh://-oProxyCommand=x",
            "ssh://user@-h",
            "ssh://-u@host",
            "ssh://@host",
            "ssh://host:0",
            "ssh://host:x",
            "ssh://a b",
            "ssh://host/a:b",
            "ssh://host/a b",
            "ssh://host;true",
        ] {
            assert!(matches!(text.parse::<HostAddress>(), Err(HostAddressError::Ssh(_))), "{text}");
        }
        let error = "tcp:1".parse::<HostAddress>().unwrap_err().to_string();
        assert!(error.contains("ssh://USER@HOST"), "{error}");
    }
}
