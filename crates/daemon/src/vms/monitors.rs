//! Connects to monitors in folders that others own. **N.B.** The daemon is root. A user could put another socket, or a link to
//! one, in the place of his QEMU's monitor, and the daemon would give orders to any QEMU of the host. So the target of a path is
//! held, must be a socket, and must have the owner that it had when the VM was adopted.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use block::held;
use hypervisor::HypervisorError;
use hypervisor::qemu::{Qemu, QmpError};
use tokio::net::UnixStream;

use super::{Adopted, VmError};
use crate::error::with_causes;

/// Connects to the monitor of an adopted VM. Fails like [`Qemu::connect`], and if another user listens there.
pub(crate) async fn connect_to(adopted: &Adopted) -> Result<Qemu, HypervisorError> {
    let qemu = connect(&adopted.monitor).await?;
    match adopted.monitor_user {
        Some(user) if qemu.user() != Some(user) => {
            let other =
                qemu.user().map_or_else(|| "an unknown user".to_owned(), |other| format!("the user {other}"));
            let text = format!("{other} listens there, and the user {user} did when the VM was adopted");
            Err(unreachable(&adopted.monitor, io::Error::other(text)))
        }
        _ => Ok(qemu),
    }
}

/// Connects to a monitor of any owner, without following others' links.
pub(crate) async fn connect(path: &Path) -> Result<Qemu, HypervisorError> {
    let failed = |error| unreachable(path, error);
    let found = held::find(path).map_err(failed)?;
    found.require_socket().map_err(|unfit| failed(unfit.into()))?;
    let stream = UnixStream::connect(found.own_link()).await.map_err(failed)?;
    Qemu::over(stream, path).await
}

/// Whether an answer may say what exists at a path of this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Paths {
    /// It may: an administrator can read any file.
    Told,
    /// It may not: an operator asks.
    Hidden,
}

/// Returns the error for a monitor that cannot be used. Operators must not learn which files exist: for them it is the same
/// whatever exists at the path. The log has the reason.
pub(crate) fn unusable(name: &str, monitor: &Path, error: &HypervisorError, paths: Paths) -> VmError {
    tracing::info!(vm = %name, monitor = %monitor.display(), reason = with_causes(error), "a monitor cannot be used");
    match paths {
        Paths::Told => VmError::MonitorUnusable { vm: name.to_owned(), reason: with_causes(error) },
        Paths::Hidden => VmError::NoMonitor { vm: name.to_owned(), monitor: monitor.to_owned() },
    }
}

fn unreachable(path: &Path, source: io::Error) -> HypervisorError {
    QmpError::Connect { socket: path.to_owned(), source }.into()
}

/// The sockets of this network namespace, with the names to which they were bound.
const SOCKETS: &str = "/proc/net/unix";
/// The flag of a socket that listens.
const LISTENS: &[u8] = b"00010000";

/// Returns whether a socket listens that was bound to `path`, or may have been: the name may lead elsewhere by now, or nowhere.
pub(crate) fn still_listens(path: &Path) -> bool {
    // An unreadable list does not prove that nothing listens.
    std::fs::read(SOCKETS).map_or(true, |sockets| is_bound(&sockets, path))
}

/// Returns whether a list of sockets has one that listens and was bound to `path`.
fn is_bound(sockets: &[u8], path: &Path) -> bool {
    sockets.split(|byte| *byte == b'\n').skip(1).any(|line| {
        let (mut flags, mut rest) = (&b""[..], line);
        for column in 0..7 {
            rest = rest.trim_ascii_start();
            let end = rest.iter().position(|byte| *byte == b' ').unwrap_or(rest.len());
            let (field, after) = rest.split_at(end);
            if column == 3 {
                flags = field;
            }
            rest = after;
        }
        let name = Path::new(OsStr::from_bytes(rest.strip_prefix(b" ").unwrap_or(rest)));
        let is_meant = name == path || name.is_relative() && path.ends_with(name);
        flags == LISTENS && !name.as_os_str().is_empty() && is_meant
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{chown, symlink};

    use super::*;

    #[tokio::test]
    async fn no_monitor_is_reached_through_a_link_of_others() {
        if !rustix::process::geteuid().is_root() {
            return omission::machine_lacks("root, to give a folder away");
        }
        let folder = tempfile::tempdir().unwrap();
        let (theirs, roots) = (folder.path().join("user"), folder.path().join("roots.qmp"));
        std::fs::create_dir(&theirs).unwrap();
        chown(&theirs, Some(24_005), None).unwrap();
        let _listener = std::os::unix::net::UnixListener::bind(&roots).unwrap();
        symlink(&roots, theirs.join("qmp")).unwrap();
        let refused = connect(&theirs.join("qmp")).await.unwrap_err();
        assert!(!refused.nobody_listens() && format!("{refused:?}").contains("Link"), "{refused:?}");
        std::fs::write(theirs.join("file"), "").unwrap();
        let refused = connect(&theirs.join("file")).await.unwrap_err();
        assert!(format!("{refused:?}").contains("NotASocket"), "{refused:?}");
        assert!(connect(&theirs.join("none")).await.unwrap_err().nobody_listens());
    }

    #[test]
    fn a_monitor_that_was_renamed_or_deleted_still_listens_until_its_process_lets_it_go() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a monitor");
        assert!(!still_listens(&path));
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        assert!(still_listens(&path));
        std::fs::rename(&path, folder.path().join("elsewhere")).unwrap();
        assert!(still_listens(&path));
        drop(listener);
        assert!(!still_listens(&path));
    }

    #[test]
    fn a_relative_name_may_be_the_monitor_and_a_connection_is_none() {
        let sockets = b"Num       RefCount Protocol Flags    Type St Inode Path\n\
            0000000000000000: 00000002 00000000 00010000 0001 01 12345 run/q.sock\n\
            0000000000000000: 00000003 00000000 00000000 0001 03   777 /u/other.sock\n\
            0000000000000000: 00000002 00000000 00010000 0001 01   778\n";
        assert!(is_bound(sockets, Path::new("/u/run/q.sock")));
        assert!(!is_bound(sockets, Path::new("/u/other.sock")));
        assert!(!is_bound(sockets, Path::new("/u/q.sock")));
    }
}
