//! Lifelines: second connections to QEMUs whose main thread may hang in missing memory. A lifeline is made with a VM that comes
//! this way, opened once by each daemon, and removed with the QEMU.

use std::path::PathBuf;
use std::sync::Arc;

use hypervisor::qemu::Lifeline;

use super::{VmError, Vms};
use crate::config::RunsAs;
use crate::vms::qemu_sockets;

impl Vms {
    /// Makes the lifeline of a VM that is to be started, and returns the words that its command needs for it.
    pub(super) fn make_lifeline(&self, name: &str) -> Result<[String; 4], VmError> {
        self.make_monitors_folder()?;
        let path = self.lifeline_path(name);
        let made = Lifeline::make(&path);
        let words = made.map_err(|error| VmError::io("make", &path, error))?;
        if let RunsAs::Other(user) = &self.allowed.runs_as {
            Lifeline::give(&path, user.user).map_err(|error| VmError::io("give to QEMU", &path, error))?;
        }
        Ok(words)
    }

    /// Opens the lifeline of a QEMU that has just been started, and negotiates its use. After an error the VM must not run
    /// before its memory is here.
    pub(super) async fn agree_on_lifeline(&self, name: &str) -> Result<(), VmError> {
        let lifeline = self.lifeline(name);
        let lifeline = lifeline.ok_or_else(|| VmError::Unusable("QEMU does not use its pipes".to_owned()))?;
        lifeline.agree().await.map_err(VmError::of(name))
    }

    /// Returns the lifeline of a VM; `None`: it was made without one, or there is no QEMU. It is opened at its first use, and
    /// held while the VM exists. Two readers would take each other's answers, and without a reader QEMU's events pile up.
    pub(crate) fn lifeline(&self, name: &str) -> Option<Arc<Lifeline>> {
        let path = self.lifeline_path(name);
        let mut entries = self.entries();
        let entry = entries.get_mut(name)?;
        if entry.lifeline.is_none() {
            // Usually there is none.
            entry.lifeline = Lifeline::open(&path).ok().map(Arc::new);
        }
        entry.lifeline.clone()
    }

    /// Removes the sockets of a QEMU that has ended.
    pub(super) fn remove_monitors(&self, name: &str) {
        let monitor = self.own_monitor(name);
        let _ = std::fs::remove_file(&monitor);
        if let Err(error) = qemu_sockets::remove_folder(&monitor) {
            tracing::warn!(vm = %name, %error, "the folder of a VM's sockets is left over");
        }
        if let Some(entry) = self.entries().get_mut(name) {
            entry.lifeline = None;
        }
        self.remove_lifeline(name);
    }

    pub(super) fn remove_lifeline(&self, name: &str) {
        let path = self.lifeline_path(name);
        if let Err(error) = Lifeline::remove(&path) {
            tracing::warn!(path = %path.display(), %error, "the pipes of a VM are left over");
        }
    }

    /// Returns the path of a VM's pipes, without their extensions.
    fn lifeline_path(&self, name: &str) -> PathBuf {
        self.monitors.join(format!("{name}.lifeline"))
    }
}
