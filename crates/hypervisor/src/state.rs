//! The states of a VM and of its migration.
//!
//! They have QEMU's names; other hypervisors use some of them.

use std::fmt;

/// The run state of a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RunState {
    /// Its processors are running.
    Running,
    /// It was stopped, or has loaded its memory and was not ordered to run.
    Paused,
    /// It waits for memory from another process.
    InMigrate,
    /// It was started stopped and has never run.
    PreLaunch,
    /// Its memory was sent to another process; it can be resumed, unless it runs there.
    PostMigrate,
    /// It is stopped while the last of its memory is sent.
    FinishMigrate,
    /// A disk answered with an error, and the VM is stopped until it is resumed.
    IoError,
    /// Its guest has shut down.
    Shutdown,
    /// Another state, by the hypervisor's name.
    Other(String),
}

impl RunState {
    /// Returns the state of that name.
    pub fn of(name: &str) -> Self {
        match name {
            "running" => Self::Running,
            "paused" => Self::Paused,
            "inmigrate" => Self::InMigrate,
            "prelaunch" => Self::PreLaunch,
            "postmigrate" => Self::PostMigrate,
            "finish-migrate" => Self::FinishMigrate,
            "io-error" => Self::IoError,
            "shutdown" => Self::Shutdown,
            other => Self::Other(other.to_owned()),
        }
    }

    /// Returns the name of the state.
    pub fn as_str(&self) -> &str {
        match self {
            Self::Running => "running",
            Self::Paused => "paused",
            Self::InMigrate => "inmigrate",
            Self::PreLaunch => "prelaunch",
            Self::PostMigrate => "postmigrate",
            Self::FinishMigrate => "finish-migrate",
            Self::IoError => "io-error",
            Self::Shutdown => "shutdown",
            Self::Other(name) => name,
        }
    }
}

impl fmt::Display for RunState {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.as_str())
    }
}

/// The status of a transfer of memory, on either side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MigrationStatus {
    /// There was none in this process.
    None,
    /// It is being set up.
    Setup,
    /// Memory is being sent.
    Active,
    /// Only the last part is missing, and the VM is paused: it continues on an order.
    PreSwitchover,
    /// The last of the memory and the devices' states are being sent.
    Device,
    /// The VM runs at the target while memory is missing there.
    PostcopyActive,
    /// The same, and the stream has broken.
    PostcopyPaused,
    /// The same, and another stream is awaited; versions before 9.1 have no name for it.
    PostcopyRecoverSetup,
    /// The same, and the stream is being restored.
    PostcopyRecover,
    /// It is being cancelled.
    Cancelling,
    /// It was cancelled; the source continues.
    Cancelled,
    /// It has failed; the source continues.
    Failed,
    /// All of the memory has arrived.
    Completed,
    /// Another status, by the hypervisor's name.
    Other(String),
}

impl MigrationStatus {
    /// Returns the status of that name.
    pub fn of(name: &str) -> Self {
        match name {
            "none" => Self::None,
            "setup" => Self::Setup,
            "active" => Self::Active,
            "pre-switchover" => Self::PreSwitchover,
            "device" => Self::Device,
            "postcopy-active" => Self::PostcopyActive,
            "postcopy-paused" => Self::PostcopyPaused,
            "postcopy-recover-setup" => Self::PostcopyRecoverSetup,
            "postcopy-recover" => Self::PostcopyRecover,
            "cancelling" => Self::Cancelling,
            "cancelled" => Self::Cancelled,
            "failed" => Self::Failed,
            "completed" => Self::Completed,
            other => Self::Other(other.to_owned()),
        }
    }

    /// Returns the name of the status.
    pub fn as_str(&self) -> &str {
        match self {
            Self::None => "none",
            Self::Setup => "setup",
            Self::Active => "active",
            Self::PreSwitchover => "pre-switchover",
            Self::Device => "device",
            Self::PostcopyActive => "postcopy-active",
            Self::PostcopyPaused => "postcopy-paused",
            Self::PostcopyRecoverSetup => "postcopy-recover-setup",
            Self::PostcopyRecover => "postcopy-recover",
            Self::Cancelling => "cancelling",
            Self::Cancelled => "cancelled",
            Self::Failed => "failed",
            Self::Completed => "completed",
            Self::Other(name) => name,
        }
    }

    /// Returns whether the VM runs, or has run, at the target while memory is missing there.
    pub fn is_post_copy(&self) -> bool {
        matches!(
            self,
            Self::PostcopyActive | Self::PostcopyPaused | Self::PostcopyRecoverSetup | Self::PostcopyRecover
        )
    }

    /// Returns whether the status is final.
    pub fn is_end(&self) -> bool {
        matches!(self, Self::Cancelled | Self::Failed | Self::Completed)
    }
}

impl fmt::Display for MigrationStatus {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_keep_their_names_whether_they_are_known_or_not() {
        for name in ["running", "paused", "inmigrate", "finish-migrate", "io-error", "guest-panicked", ""] {
            assert_eq!(RunState::of(name).to_string(), name);
        }
        for name in [
            "none",
            "active",
            "pre-switchover",
            "device",
            "completed",
            "postcopy-recover-setup",
            "colo",
            "wait-unplug",
        ] {
            assert_eq!(MigrationStatus::of(name).to_string(), name);
        }
        assert!(matches!(RunState::of("guest-panicked"), RunState::Other(_)));
    }
}
