//! Exit codes for scripts. `docs/exit-codes.md` documents them for users.

use std::process::ExitCode;

use api::{ClientError, ErrorCode, Evacuation, EvacuationState, Migration, MigrationState};
use daemon::JournalError;

use crate::commands::{CommandError, LibvirtError, Obstacle};
use crate::remotes::RemoteError;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    /// The command succeeded. `migrate` and `migration watch`: the volume is at the target.
    Success = 0,
    /// An error without a code of its own: an I/O error, a defect. `config check`, `journal check` and
    /// `store scan`: there is a mistake.
    Unexpected = 1,
    /// The command line or the configuration is wrong; nothing was done. (clap uses the same number.)
    Usage = 2,
    /// A named object does not exist.
    NotFound = 3,
    /// The daemon refused; nothing has changed.
    Refused = 4,
    /// The migration failed; the output says where the volume is. `evacuate`: something has not left.
    MigrationFailed = 5,
    /// The migration was cancelled; the volume is at the source. `evacuate`: it was aborted.
    Cancelled = 6,
    Unreachable = 7,
    /// The daemon could not start, or had to stop.
    ServeFailed = 8,
    /// This user may not use the daemon, or the daemon may not read a named file.
    NotPermitted = 9,
    /// `health`: the daemon has problems. `standby check`: a standby is too old. `standby test`: its VM has not booted. `notices
    /// test`: a destination has not taken the notice.
    NotReady = 10,
    /// Interrupted a second time before the end.
    Interrupted = 130,
}

pub(crate) const HELP: &str = "\
Exit codes:
    0  success; of `migrate` and `migration watch`: the volume is at the target
    1  something unexpected: an I/O error or a defect; of `config check`, `journal check`, `store scan`: something is wrong
    2  the command line or the configuration is wrong
    3  what was named does not exist
    4  the daemon refused; nothing has changed
    5  the migration failed; what was printed says where the volume is; of `evacuate`: something has not left
    6  the migration was cancelled; the volume is at the source; of `evacuate`: it was aborted
    7  no daemon answers
    8  the daemon could not start, or had to stop
    9  not permitted: this user may not ask the daemon, or the daemon may not read an image
   10  of `health`: the daemon answers, but does not do all that it is to do; of `standby check`: a standby is too old; of
       `standby test --boot-check`: the text has not appeared in time; of `notices test`: a notice was not taken
  130  interrupted a second time: nobody waited for the end";

impl Exit {
    pub(crate) fn of(error: &CommandError) -> Self {
        match error {
            CommandError::Client(error) => Self::of_client(error),
            CommandError::Lost { .. } | CommandError::Tunnel(_) | CommandError::NoDaemonThere { .. } => {
                Self::Unreachable
            }
            CommandError::NotFenced { .. } => Self::Refused,
            CommandError::Libvirt(error) => Self::of_libvirt(error),
            CommandError::Config(_) | CommandError::File { .. } | CommandError::NoTerminal => Self::Usage,
            CommandError::NoJournal { .. } | CommandError::Remote(RemoteError::Unknown(_)) => Self::NotFound,
            CommandError::Remote(RemoteError::Token(_) | RemoteError::Key) => Self::Usage,
            CommandError::Journal(JournalError::Io { source, .. })
                if source.kind() == std::io::ErrorKind::PermissionDenied =>
            {
                Self::NotPermitted
            }
            CommandError::Serve(_) => Self::ServeFailed,
            CommandError::Journal(_)
            | CommandError::NoLab { .. }
            | CommandError::Lab { .. }
            | CommandError::Remote(_)
            | CommandError::Restore(_)
            | CommandError::Generate { .. }
            | CommandError::Program(_)
            | CommandError::Signals(_)
            | CommandError::Unwritten(_)
            | CommandError::Report { .. }
            | CommandError::Divergence { .. }
            | CommandError::Path { .. } => Self::Unexpected,
        }
    }

    fn of_libvirt(error: &LibvirtError) -> Self {
        match error {
            LibvirtError::Obstacle { obstacle: Obstacle::NoDomain, .. } => Self::NotFound,
            LibvirtError::Obstacle { .. }
            | LibvirtError::NoVolume { .. }
            | LibvirtError::NoVolumes { .. }
            | LibvirtError::Elsewhere { .. }
            | LibvirtError::ReadOnly { .. }
            | LibvirtError::Job { .. }
            | LibvirtError::SameLibvirt { .. }
            | LibvirtError::DisksStay { .. }
            | LibvirtError::NotServed { .. }
            | LibvirtError::State { .. } => Self::Refused,
            LibvirtError::NoAddress { .. } | LibvirtError::Option { .. } => Self::Usage,
            LibvirtError::NotMoved { .. } | LibvirtError::Unseen { .. } => Self::MigrationFailed,
            LibvirtError::NoVirsh(_)
            | LibvirtError::Virsh { .. }
            | LibvirtError::Definition { .. }
            | LibvirtError::NoProgress { .. } => Self::Unexpected,
        }
    }

    /// Returns the code of a command that has waited for an evacuation.
    pub(crate) fn of_evacuation(evacuation: &Evacuation) -> Self {
        match (evacuation.leaves_nothing(), evacuation.state) {
            (true, _) => Self::Success,
            (false, EvacuationState::Planned) => Self::Refused,
            (false, _) if evacuation.aborted => Self::Cancelled,
            (false, EvacuationState::Ended) => Self::MigrationFailed,
            // The wait ends before the end of an evacuation only by an interrupt.
            (false, _) => Self::Interrupted,
        }
    }

    /// Returns the code of a command that has waited for `migration`.
    pub(crate) fn of_migration(migration: &Migration) -> Self {
        match migration.state {
            MigrationState::Moved => Self::Success,
            MigrationState::Cancelled => Self::Cancelled,
            MigrationState::Failed | MigrationState::HandedBack => Self::MigrationFailed,
            // The wait ends before the end of a migration only by an interrupt.
            MigrationState::Queued | MigrationState::Running | MigrationState::Paused => Self::Interrupted,
        }
    }

    fn of_client(error: &ClientError) -> Self {
        let code = match error {
            ClientError::Unreachable { source, .. }
                if source.kind() == std::io::ErrorKind::PermissionDenied =>
            {
                return Self::NotPermitted;
            }
            ClientError::Unreachable { .. } => return Self::Unreachable,
            ClientError::Broken(_) | ClientError::TooLarge | ClientError::Malformed { .. } => {
                return Self::Unexpected;
            }
            ClientError::Refused(detail) => detail.code,
        };
        match code {
            ErrorCode::VolumeNotFound
            | ErrorCode::StoreNotFound
            | ErrorCode::MigrationNotFound
            | ErrorCode::HostNotFound
            | ErrorCode::VmNotFound
            | ErrorCode::ReplicaNotFound
            | ErrorCode::GrantNotFound
            | ErrorCode::StandbyNotFound
            | ErrorCode::EvacuationNotFound
            | ErrorCode::ImageNotFound => Self::NotFound,
            ErrorCode::InvalidRequest => Self::Usage,
            ErrorCode::NotPermitted => Self::NotPermitted,
            ErrorCode::VolumeExists
            | ErrorCode::StandbyExists
            | ErrorCode::StandbyRefused
            | ErrorCode::StandbyMayBeServed
            | ErrorCode::VmExists
            | ErrorCode::VmWrongState
            | ErrorCode::VmUnsuitable
            | ErrorCode::TargetExists
            | ErrorCode::TargetTooSmall
            | ErrorCode::CannotShrink
            | ErrorCode::CannotGrow
            | ErrorCode::SameStore
            | ErrorCode::NoSpace
            | ErrorCode::TooManyFiles
            | ErrorCode::AlreadyMigrating
            | ErrorCode::NotMigrating
            | ErrorCode::TooLate
            | ErrorCode::CannotRetry
            | ErrorCode::QueueFull
            | ErrorCode::VolumeInUse
            | ErrorCode::VolumeBusy
            | ErrorCode::VolumeUnavailable
            | ErrorCode::ImageInUse
            | ErrorCode::StoreOccupied
            | ErrorCode::PlaceFenced
            | ErrorCode::NotHalfMade
            | ErrorCode::ImageUnsuitable
            | ErrorCode::GrantExists
            | ErrorCode::EvacuationRuns
            | ErrorCode::HostDrained
            | ErrorCode::IdentityExists
            | ErrorCode::NoIdentity
            | ErrorCode::InvitationRefused
            | ErrorCode::HostUnreachable
            | ErrorCode::HostRefused
            | ErrorCode::HostInUse
            | ErrorCode::NotPrepared
            | ErrorCode::TicketRefused
            | ErrorCode::ShuttingDown => Self::Refused,
            ErrorCode::RouteNotFound
            | ErrorCode::MethodNotAllowed
            | ErrorCode::VmFailed
            | ErrorCode::RequestTooLarge
            | ErrorCode::JournalFailed
            | ErrorCode::StorageFailed
            | ErrorCode::Internal
            | ErrorCode::Unknown => Self::Unexpected,
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

#[cfg(test)]
mod tests {
    use super::{Exit, HELP};

    #[test]
    fn help_and_documentation_list_every_code() {
        use Exit::{
            Cancelled, Interrupted, MigrationFailed, NotFound, NotPermitted, NotReady, Refused, ServeFailed,
            Success, Unexpected, Unreachable, Usage,
        };
        let page = include_str!("../../../docs/exit-codes.md");
        let all = [
            Success,
            Unexpected,
            Usage,
            NotFound,
            Refused,
            MigrationFailed,
            Cancelled,
            Unreachable,
            ServeFailed,
            NotPermitted,
            NotReady,
            Interrupted,
        ];
        for exit in all {
            let code = (exit as u8).to_string();
            assert!(HELP.lines().any(|line| line.trim_start().starts_with(&format!("{code}  "))), "{code}");
            assert!(page.contains(&format!("| {code} |")), "{code}");
        }
    }
}
