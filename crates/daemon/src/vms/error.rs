//! Why something was not done with a VM, by cause; each says what to do next.

use std::io;
use std::path::{Path, PathBuf};

use api::ErrorCode;
use hypervisor::HypervisorError;
use hypervisor::libvirt::LibvirtError;
use hypervisor::qemu::command_line::understood::NotAllowed;

use super::definition::DefinitionError;
use super::manifest::ManifestError;
use crate::files::listing::ListingError;

/// Why something was not done with a VM.
#[derive(Debug, thiserror::Error)]
pub(crate) enum VmError {
    /// No VM has the name.
    #[error("there is no VM \"{0}\"; see: sterna vm list")]
    NotFound(String),
    /// The name is taken.
    #[error("a VM \"{0}\" exists; choose another name, or remove it first: sterna vm remove {0}")]
    Exists(String),
    /// A volume is the disk of another VM.
    #[error("the volume \"{volume}\" is a disk of the VM \"{vm}\" already")]
    VolumeTaken { volume: String, vm: String },
    /// Its definition is none.
    #[error("the definition cannot be used: {0}")]
    Definition(#[from] DefinitionError),
    /// It is another host's, and names what it may not.
    #[error(transparent)]
    NotAllowed(#[from] NotAllowed),
    /// What goes with it cannot.
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    #[error("the VM \"{0}\" runs; stop it first: sterna vm stop {0}")]
    Running(String),
    /// It is to be started, and runs.
    #[error("the VM \"{0}\" runs already; see: sterna vm show {0}")]
    RunsAlready(String),
    /// It does not run.
    #[error("the VM \"{0}\" does not run; start it: sterna vm start {0}")]
    NotRunning(String),
    /// It was started by an earlier daemon, and its monitor does not answer.
    #[error("the VM \"{0}\" does not answer yet; `sterna vm stop {0} --now` cuts its power")]
    Silent(String),
    /// Somebody else changes it.
    #[error("the VM \"{vm}\" {why}; try again when that is done")]
    Busy {
        vm: String,
        /// What is done with it.
        why: &'static str,
    },
    /// QEMU ended while it was started.
    #[error("QEMU ended while the VM \"{vm}\" was started: {said}")]
    Ended { vm: String, said: String },
    /// QEMU cannot be started.
    #[error("{program} cannot be started for the VM \"{vm}\" (is it installed?)")]
    Program {
        vm: String,
        program: String,
        /// What the system answered.
        source: io::Error,
    },
    /// QEMU did not do something.
    #[error("the VM \"{vm}\": {source}")]
    Qemu { vm: String, source: HypervisorError },
    /// What was given as the monitor of a VM to be adopted is none that we can use.
    #[error(
        "the VM \"{vm}\" cannot be adopted: no monitor of QEMU's (-qmp) can be used at {}: there is none, it serves another client, or \
         a link leads there through a folder that others than root may write to; the daemon's log has the reason",
        monitor.display()
    )]
    NoMonitor { vm: String, monitor: PathBuf },
    /// libvirt did not do something.
    #[error("the VM \"{vm}\": {source}")]
    Libvirt { vm: String, source: LibvirtError },
    /// The kernel does not tell what its process is.
    #[error(
        "cannot look at the process {id} of the VM \"{vm}\": {source}; the daemon must run as the same user, or as root"
    )]
    Hidden {
        vm: String,
        id: i32,
        /// What the system answered.
        source: io::Error,
    },
    /// A disk of it cannot be adopted.
    #[error("the disks of the VM \"{vm}\" stay as they are: {why}")]
    Disk { vm: String, why: String },
    /// It is paused, and does not go on yet.
    #[error(
        "the VM \"{vm}\" does not go on yet: {why}; that is tried until it does: sterna vm show {vm}, sterna vm resume {vm}"
    )]
    Paused { vm: String, why: String },
    /// It is in a state in which it cannot be let go on.
    #[error("the VM \"{vm}\" cannot be let go on: {why}")]
    CannotGoOn {
        vm: String,
        /// Why, and what to do.
        why: String,
    },
    /// It is somebody else's.
    #[error(
        "the VM \"{0}\" was started without Sterna, which serves its disks; to end that: sterna vm release {0}"
    )]
    Adopted(String),
    /// A file cannot be used.
    #[error("cannot {operation} {path}: {source}")]
    Io {
        /// What was tried, as a verb.
        operation: &'static str,
        path: PathBuf,
        /// What the system answered.
        source: io::Error,
    },
    /// The list of VMs cannot be changed.
    #[error(transparent)]
    Listing(#[from] ListingError),
    /// The list of VMs cannot be used.
    #[error("VMs cannot be managed: {0}")]
    Unusable(String),
}

impl VmError {
    /// An I/O error with the file it is about.
    pub(super) fn io(operation: &'static str, path: &Path, source: io::Error) -> Self {
        Self::Io { operation, path: path.to_owned(), source }
    }

    /// What QEMU said, with the VM it is about.
    pub(crate) fn of(vm: &str) -> impl Fn(HypervisorError) -> Self {
        move |source| Self::Qemu { vm: vm.to_owned(), source }
    }

    /// The cause, as the API calls it.
    pub(crate) fn code(&self) -> ErrorCode {
        match self {
            Self::NotFound(_) => ErrorCode::VmNotFound,
            Self::Exists(_) => ErrorCode::VmExists,
            Self::Definition(_)
            | Self::NotAllowed(_)
            | Self::Manifest(_)
            | Self::Disk { .. }
            | Self::NoMonitor { .. } => ErrorCode::VmUnsuitable,
            Self::Libvirt { source, .. } => code_of_libvirt(source),
            Self::VolumeTaken { .. } => ErrorCode::VolumeInUse,
            Self::Running(_)
            | Self::RunsAlready(_)
            | Self::NotRunning(_)
            | Self::Silent(_)
            | Self::Busy { .. }
            | Self::CannotGoOn { .. }
            | Self::Adopted(_) => ErrorCode::VmWrongState,
            Self::Paused { .. }
            | Self::Ended { .. }
            | Self::Program { .. }
            | Self::Qemu { .. }
            | Self::Hidden { .. } => ErrorCode::VmFailed,
            Self::Io { .. } | Self::Listing(_) | Self::Unusable(_) => ErrorCode::StorageFailed,
        }
    }
}

/// The cause of what libvirt did not do, as the API calls it.
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
