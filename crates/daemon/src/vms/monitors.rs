//! Connects to monitors in folders that others own. **N.B.** The daemon is root. A user could put another socket, or a link to
//! one, in the place of his QEMU's monitor, and the daemon would give orders to any QEMU of the host. So the target of a path is
//! held, must be a socket, and must have the owner that it had when the VM was adopted.

use std::io;
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
    /// To an administrator, who can read any file.
    Told,
    /// To an operator.
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
}
