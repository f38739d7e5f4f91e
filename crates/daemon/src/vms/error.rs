//! Errors of operations on VMs, by cause. Each says what to do next.

use std::io;
use std::path::{Path, PathBuf};

use api::ErrorCode;
use hypervisor::HypervisorError;
use hypervisor::libvirt::LibvirtError;
use hypervisor::qemu::command_line::understood::NotAllowed;
use migration::MigrationId;

use super::definition::DefinitionError;
use super::manifest::ManifestError;
use crate::files::listing::ListingError;

#[derive(Debug, thiserror::Error)]
pub(crate) enum VmError {
    #[error("there is no VM \"{0}\"; see: sterna vm list")]
    NotFound(String),
    #[error("a VM \"{0}\" exists; choose another name, or remove it first: sterna vm remove {0}")]
    Exists(String),
    #[error("the volume \"{volume}\" is a disk of the VM \"{vm}\" already")]
    VolumeTaken { volume: String, vm: String },
    #[error("the definition cannot be used: {0}")]
    Definition(#[from] DefinitionError),
    /// Another host's definition names something forbidden.
    #[error(transparent)]
    NotAllowed(#[from] NotAllowed),
    /// Its files cannot move along.
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    #[error("the VM \"{0}\" runs; stop it first: sterna vm stop {0}")]
    Running(String),
    #[error("the VM \"{0}\" runs already; see: sterna vm show {0}")]
    RunsAlready(String),
    #[error("the VM \"{0}\" does not run; start it: sterna vm start {0}")]
    NotRunning(String),
    #[error(
        "VM \"{vm}\" has not shut down within {seconds} s, and runs on; ask it again and wait longer: sterna vm stop {vm} --wait \
         SECONDS; or cut its power: sterna vm stop {vm} --now"
    )]
    RunsOn { vm: String, seconds: u64 },
    /// An earlier daemon started it, and its monitor does not answer.
    #[error("the VM \"{0}\" does not answer yet; `sterna vm stop {0} --now` cuts its power")]
    Silent(String),
    /// It was stopped when its move was ordered.
    #[error("the VM \"{0}\" was started meanwhile: migrate it again, and it moves while it runs")]
    StartedMeanwhile(String),
    #[error(
        "the VM \"{0}\" has no log that a text could be found in: let its console write one (\"-serial\", \"file:{{path:console}}\"), or \
         wait for tcp:HOST:PORT"
    )]
    NoConsole(String),
    #[error("the VM \"{0}\" is stopped, and its TPM (swtpm) still runs; try again when that has ended")]
    TpmRuns(String),
    /// It is to be changed, and is on its way between two hosts.
    #[error(
        "the VM \"{vm}\" is being moved by {migration}; try again when that has ended, or cancel it: sterna migration \
        cancel {migration}"
    )]
    Moving { vm: String, migration: MigrationId },
    /// It is to be started, and one of its disks is at another host.
    #[error(
        "the disk \"{volume}\" of the VM \"{vm}\" is at host \"{host}\" ({migration}); bring it home: run there: sterna migrate \
         {volume} --to {own}. To let the VM use it over the link, move it there again with --serve-here"
    )]
    DiskElsewhere { vm: String, volume: String, host: String, migration: MigrationId, own: String },
    /// Another operation changes it.
    #[error("the VM \"{vm}\" {why}; try again when that is done")]
    Busy { vm: String, why: &'static str },
    #[error("QEMU ended while the VM \"{vm}\" was started: {said}")]
    Ended { vm: String, said: String },
    #[error("{program} cannot be started for the VM \"{vm}\" (is it installed?)")]
    Program { vm: String, program: String, source: io::Error },
    #[error("the VM \"{vm}\": {source}")]
    Qemu { vm: String, source: HypervisorError },
    #[error(
        "the VM \"{vm}\" cannot be adopted: no monitor of QEMU's (-qmp) can be used at {}: there is none, it serves another \
         client, or a link leads there through a folder that users other than root may write to; the daemon's log has the reason",
        monitor.display()
    )]
    NoMonitor { vm: String, monitor: PathBuf },
    /// The same for an administrator, with the reason.
    #[error(
        "the VM \"{vm}\" cannot be adopted: its monitor cannot be used: {reason}; QEMU needs a monitor for Sterna alone: \
         -qmp unix:PATH,server=on,wait=off"
    )]
    MonitorUnusable { vm: String, reason: String },
    #[error("the VM \"{vm}\": {source}")]
    Libvirt { vm: String, source: LibvirtError },
    /// The kernel does not say what its process is.
    #[error(
        "cannot examine the process {id} of the VM \"{vm}\": {source}; the daemon must run as the same user, or as root"
    )]
    Hidden { vm: String, id: i32, source: io::Error },
    #[error("the disks of the VM \"{vm}\" are unchanged: {why}")]
    Disk { vm: String, why: String },
    #[error(
        "the VM \"{vm}\" cannot be resumed yet: {why}; Sterna tries until it runs: sterna vm show {vm}, sterna vm resume {vm}"
    )]
    Paused { vm: String, why: String },
    #[error("cannot resume the VM \"{vm}\": {why}")]
    CannotGoOn {
        vm: String,
        /// The reason, and what to do.
        why: String,
    },
    /// It is suspended, and the operation needs its guest to run, or its memory to be given up.
    #[error(
        "the VM \"{0}\" is suspended: its memory is in a file of this host, and its disks must stay as they are; start it: sterna \
         vm start {0}; or give its memory up, as by a power cut: sterna vm stop {0} --now"
    )]
    Suspended(String),
    #[error("the VM \"{vm}\" cannot be suspended: {why}")]
    NotSuspended {
        vm: String,
        /// The reason, and what to do.
        why: String,
    },
    /// It goes on as before.
    #[error("the VM \"{vm}\" is not suspended, and goes on: {why}")]
    GoesOn { vm: String, why: String },
    /// It is suspended as before.
    #[error(
        "the VM \"{vm}\" cannot be restored, and is suspended as before: {why}; to boot it without its memory, as after a power \
         cut: sterna vm start {vm} --discard-memory"
    )]
    NotRestored { vm: String, why: String },
    /// Sterna did not start it.
    #[error(
        "the VM \"{0}\" was started without Sterna, which serves its disks; to end that: sterna vm release {0}"
    )]
    Adopted(String),
    #[error("cannot {operation} {path}: {source}")]
    Io {
        /// The failed operation, as a verb.
        operation: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    #[error(transparent)]
    Listing(#[from] ListingError),
    #[error("VMs cannot be managed: {0}")]
    Unusable(String),
}

impl VmError {
    pub(super) fn io(operation: &'static str, path: &Path, source: io::Error) -> Self {
        Self::Io { operation, path: path.to_owned(), source }
    }

    /// Returns a function that adds the VM's name to an error of its QEMU.
    pub(crate) fn of(vm: &str) -> impl Fn(HypervisorError) -> Self {
        move |source| Self::Qemu { vm: vm.to_owned(), source }
    }

    pub(crate) fn code(&self) -> ErrorCode {
        match self {
            Self::NotFound(_) => ErrorCode::VmNotFound,
            Self::Exists(_) => ErrorCode::VmExists,
            Self::Definition(_)
            | Self::NotAllowed(_)
            | Self::Manifest(_)
            | Self::Disk { .. }
            | Self::NoConsole(_)
            | Self::NoMonitor { .. }
            | Self::MonitorUnusable { .. } => ErrorCode::VmUnsuitable,
            Self::Libvirt { source, .. } => code_of_libvirt(source),
            Self::VolumeTaken { .. } => ErrorCode::VolumeInUse,
            Self::Running(_)
            | Self::RunsAlready(_)
            | Self::NotRunning(_)
            | Self::RunsOn { .. }
            | Self::Silent(_)
            | Self::Busy { .. }
            | Self::StartedMeanwhile(_)
            | Self::TpmRuns(_)
            | Self::Moving { .. }
            | Self::DiskElsewhere { .. }
            | Self::CannotGoOn { .. }
            | Self::Suspended(_)
            | Self::NotSuspended { .. }
            | Self::Adopted(_) => ErrorCode::VmWrongState,
            Self::Paused { .. }
            | Self::Ended { .. }
            | Self::GoesOn { .. }
            | Self::NotRestored { .. }
            | Self::Program { .. }
            | Self::Qemu { .. }
            | Self::Hidden { .. } => ErrorCode::VmFailed,
            Self::Io { .. } | Self::Listing(_) | Self::Unusable(_) => ErrorCode::StorageFailed,
        }
    }
}

fn code_of_libvirt(error: &LibvirtError) -> ErrorCode {
    match error {
        LibvirtError::Unreachable { source, .. } if source.kind() == io::ErrorKind::PermissionDenied => {
            ErrorCode::NotPermitted
        }
        LibvirtError::Authentication { .. } => ErrorCode::NotPermitted,
        error if error.is_no_domain() => ErrorCode::VmNotFound,
        LibvirtError::Unreachable { .. } | LibvirtError::Definition(_) => ErrorCode::VmUnsuitable,
        _ => ErrorCode::VmFailed,
    }
}
