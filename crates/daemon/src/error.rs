//! Errors of requests, by cause. Each says what to do next.

mod attachment;
mod evacuation;
mod images;
mod lacking;
mod restored;
mod retry;
mod routes;
mod snapshot;
mod standby;
mod store_files;
mod words;

use std::path::PathBuf;

use api::{Bytes, ErrorCode};
use block::store::{ImageError, Qcow2Error, RemoteError};
use chronicle::Generation;
use migration::journal::{Place, Reservation};
use migration::promotion::NotPromotable;
use migration::shares::UsedUp;
use migration::ticket::TicketError;
use migration::wire::Refusal;
use migration::{CommitFault, MigrationId};

pub(crate) use self::attachment::AttachmentError;
pub(crate) use self::evacuation::EvacuationError;
pub(crate) use self::lacking::LackingError;
pub(crate) use self::restored::RestoredError;
pub(crate) use self::retry::RetryObstacle;
pub(crate) use self::routes::RouteError;
pub(crate) use self::snapshot::SnapshotError;
pub(crate) use self::standby::StandbyError;
pub(crate) use self::store_files::{StoreFileError, StoreFileObstacle};
pub(crate) use self::words::fenced;

use self::images::{code_of_image, code_of_qcow2, code_of_remote};
use self::words::{if_kept, if_others};
use crate::grants::GrantsError;
use crate::hosts::HostsError;
use crate::images::CopyError;
use crate::images::copying::FillError;
use crate::images::growing::GrowError;
use crate::names::InvalidName;
use crate::stores::{Occupant, StoreProblem};
use crate::vms::VmError;

/// Why a request was not carried out. Nothing has changed then, unless the cause says otherwise.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RequestError {
    #[error("there is no volume \"{0}\"; see: sterna volume list")]
    VolumeNotFound(String),
    #[error("there is no volume and no VM \"{0}\"; see: sterna volume list, sterna vm list")]
    NothingToMove(String),
    #[error("there is no store \"{name}\"; there are: {known}")]
    StoreNotFound { name: String, known: String },
    #[error(
        "there is no store and no host \"{name}\"; stores: {stores}; hosts: {hosts} (write HOST or HOST:STORE)"
    )]
    DestinationNotFound { name: String, stores: String, hosts: String },
    /// The volume has no copy here that waits for a promotion.
    #[error(
        "cannot promote volume \"{0}\": it does not wait here for another host; see: sterna volume show {0}"
    )]
    NotPrepared(String),
    /// Too few descriptors are left for another volume.
    #[error(
        "this daemon has {open} files and sockets open and may have {limit}, which leaves too few for another volume; start it with \
         a higher limit: LimitNOFILE= of its systemd unit, or ulimit -n"
    )]
    TooManyFiles { open: u64, limit: u64 },
    /// The copy of the volume cannot be promoted.
    #[error("volume \"{volume}\" cannot be promoted: {reason}; see: sterna migration show {migration}")]
    NotPromotable { volume: String, migration: MigrationId, reason: NotPromotable },
    /// The image of a volume that waits for an order is gone.
    #[error(
        "cannot use the image of volume \"{volume}\": {path} is not there, or not in its folder; put it back; if it is lost, put \
         there what the volume is from now on (a backup, or an empty file of {size_bytes} bytes), then: sterna volume promote \
         {volume} --force --exchanged",
        path = .path.display()
    )]
    ImageLost { volume: String, path: PathBuf, size_bytes: u64 },
    /// A promotion has neither a ticket nor `--force`.
    #[error(
        "give the ticket that the other host prints (sterna migration show), or --force; if that host continues with the volume, \
         two branches of it exist from then on"
    )]
    NoTicket,
    #[error(transparent)]
    Ticket(#[from] TicketError),
    #[error("host \"{host}\" cannot be reached: {reason}; see: sterna host show {host}")]
    HostUnreachable {
        host: String,
        /// The attempt, and its result.
        reason: String,
    },
    #[error("host \"{host}\" cannot run the VM \"{vm}\": {reason}")]
    VmRefused { vm: String, host: String, reason: String },
    #[error("the VM \"{vm}\" cannot be moved: {reason}")]
    VmUnmovable { vm: String, reason: String },
    #[error(
        "the VM \"{vm}\" cannot be moved within --max-downtime {}: because of the distance to the other host, even an idle VM \
         pauses for {:.0} ms at least; allow {} ms or more",
        wanted.as_millis(), least.as_secs_f64() * 1000.0, crate::host::roomy(*least).as_millis()
    )]
    DowntimeUnreachable {
        vm: String,
        /// The shortest downtime of an idle VM.
        least: std::time::Duration,
        wanted: std::time::Duration,
    },
    #[error("host \"{host}\" refuses the move: {}", refusal.detail)]
    HostRefused { host: String, refusal: Refusal },
    #[error(
        "volume \"{volume}\" is at host \"{host}\" ({migration}), and clients are only forwarded from here: give this order \
         there; to bring it here, there: sterna migrate volume:{volume} --to HOST, with this host's name"
    )]
    VolumeElsewhere { volume: String, host: String, migration: MigrationId },
    /// The volume is at another host, and nothing of it is left here.
    #[error("volume \"{volume}\" has moved to host \"{host}\" ({migration}): do it there")]
    VolumeGone { volume: String, host: String, migration: MigrationId },
    #[error("cannot remove host \"{host}\": {needed}; to remove it anyway: --force")]
    HostNeeded {
        host: String,
        /// What needs it, and what to do about that.
        needed: String,
    },
    #[error(
        "there is no migration \"{0}\", nor one of a volume or VM with that name: nothing has moved under it; see: \
         sterna migration list"
    )]
    MigrationNotFound(String),
    #[error(transparent)]
    Route(#[from] RouteError),
    #[error("a volume \"{0}\" exists; choose another name, or remove it first")]
    VolumeExists(String),
    /// An offered volume is another branch of the history of one that is here. Sent to the host that offers it.
    #[error(
        "it has volume \"{volume}\" already, as another branch of the same history, with generation {here} (this one has \
         {offered}): a promotion was forced, and both may have been written to since. Decide which to keep, and remove the other \
         at its host: sterna volume remove {volume}"
    )]
    BranchPresent {
        /// The name of the other branch here.
        volume: String,
        here: Generation,
        offered: Generation,
    },
    /// Clients here use another branch of an offered volume's history. Sent to the host that offers it.
    #[error(
        "its clients of volume \"{volume}\" are forwarded to host \"{host}\", to another branch of the same history, with \
         generation {there} (this one has {offered}), and must not see other content; end the forwarding there with: sterna \
         volume remove {volume}, and try again"
    )]
    BranchLedTo {
        volume: String,
        /// The host that has the other branch, or had it last.
        host: String,
        /// The generation with which the other branch went there.
        there: Generation,
        offered: Generation,
    },
    #[error("\"{name}\" cannot be the name of a volume: {reason}")]
    Name { name: String, reason: InvalidName },
    /// The request cannot be parsed, or has a contradictory value.
    #[error("{0}")]
    Invalid(String),
    #[error("the request is larger than {} bytes", api::REQUEST_BYTES_MAX)]
    TooLarge,
    /// There are several stores, and the request names none.
    #[error("name one of the stores {known}: with --store, or as HOST:STORE if it is another host's")]
    StoreNotChosen { known: String },
    #[error("store \"{name}\" cannot be used: {problem}")]
    StoreUnusable { name: String, problem: StoreProblem },
    #[error("store \"{name}\" takes one volume, and {occupant}{}", if_kept(.name, .occupant))]
    StoreOccupied { name: String, occupant: Occupant },
    #[error("{place} is the volume \"{volume}\" already; see: sterna volume show {volume}")]
    PlaceTaken { place: Place, volume: String },
    /// The place holds what a migration left there.
    #[error("{place} holds {}; to serve that anyway: --fenced", fenced(.fence))]
    Fenced { place: Place, fence: Reservation },
    #[error(transparent)]
    StoreFile(#[from] StoreFileError),
    #[error(transparent)]
    Fill(#[from] FillError),
    #[error(
        "{path} exists already; move it away if nothing uses it, or choose another name or another store"
    )]
    TargetExists { path: PathBuf },
    #[error("{needed} bytes do not fit into {place}: {detail}")]
    TargetTooSmall { place: String, needed: u64, detail: String },
    #[error("volume \"{volume}\" is in store \"{store}\" already; choose another one")]
    SameStore { volume: String, store: String },
    #[error(
        "store \"{store}\" has {} free, and {} are needed; make room there, or choose another store", Bytes(*.free), Bytes(*.needed)
    )]
    NoSpace { store: String, free: u64, needed: u64 },
    /// An offered volume may come with blocks missing, and their records cannot be reserved.
    #[error(
        "the data folder cannot reserve {} for the records of the blocks that volume \"{volume}\" may lack ({reason}); make room \
         there, or choose a strategy that leaves no blocks, such as mirror", Bytes(*.needed)
    )]
    NoRoomForRecords { volume: String, needed: u64, reason: String },
    #[error(
        "volume \"{volume}\" is being migrated ({migration}); wait for it, or cancel it: sterna migration cancel {migration}"
    )]
    AlreadyMigrating { volume: String, migration: MigrationId },
    #[error(transparent)]
    Lacking(#[from] LackingError),
    /// The journal was restored, and the volume's owner is unknown.
    #[error(transparent)]
    Restored(#[from] RestoredError),
    #[error("migration {0} has ended; see: sterna migration show {0}")]
    NotMigrating(MigrationId),
    /// The migration was cancelled before anything was copied.
    #[error("migration {0} was cancelled before it had begun")]
    CancelledBeforehand(MigrationId),
    /// The migration can be cancelled only before its handover.
    #[error("cannot cancel migration {0}: it is being completed; see: sterna migration show {0}")]
    TooLate(MigrationId),
    /// The volumes are handed over, and wait for the other host's word.
    #[error("cannot cancel migration {migration}: {advice}")]
    TooLateLeft { migration: MigrationId, advice: String },
    /// The volume has left, and only an order by force ends that here.
    #[error("cannot promote volume \"{volume}\" without --force: {advice}")]
    Left { volume: String, advice: String },
    /// The volume has left, and the other host answers that it has it.
    #[error(
        "cannot promote volume \"{volume}\": host \"{host}\" answers that it has it ({migration}); wait until it is complete, move it \
         back from there, or remove it there first (with missing blocks: sterna volume promote {volume} --without-missing --force, \
         then sterna volume remove {volume})"
    )]
    LeftThere { volume: String, host: String, migration: MigrationId },
    #[error("migration {0} waits for its turn; until then it can be cancelled: sterna migration cancel {0}")]
    MigrationWaits(MigrationId),
    #[error("{waiting} migrations wait for their turn; order more when some of them have begun")]
    QueueFull { waiting: usize },
    #[error("{0}; try again later")]
    ShareUsedUp(UsedUp),
    #[error("cannot retry migration {migration}: {reason}")]
    CannotRetry {
        migration: MigrationId,
        /// The reason, and what to do.
        reason: RetryObstacle,
    },
    #[error("volume \"{0}\" is at this host, and not only forwarded from here; nothing was removed")]
    NotForwarded(String),
    #[error("volume \"{volume}\" is in use by {clients}; stop the guest, or disconnect it with --force")]
    VolumeInUse { volume: String, clients: crate::volumes::registry::Users },
    /// The volume's former host may forward clients here.
    #[error(
        "the host that volume \"{0}\" came from has not reported yet whether it forwards clients here; try again in a minute, or \
         disconnect them with --force"
    )]
    ClientsUnknown(String),
    #[error(
        "volume \"{0}\" is being created, copied, removed, resized or reverted, or a migration of it begins; try again when that is done"
    )]
    VolumeBusy(String),
    #[error(
        "volume \"{volume}\" is arriving here ({migration}); wait for it, or cancel it: sterna migration cancel {migration}"
    )]
    VolumeArriving { volume: String, migration: MigrationId },
    #[error("volume \"{volume}\" is not being served: {reason}")]
    VolumeUnavailable { volume: String, reason: String },
    /// No image of the volume was kept, or none by this migration.
    #[error("there is no such kept image of volume \"{volume}\"{}", if_others(.known))]
    ReplicaNotFound {
        volume: String,
        /// The migrations that left one; empty: none did.
        known: String,
    },
    #[error("the kept image of volume \"{volume}\" is in use: {user}")]
    ReplicaInUse {
        /// The volume, or the file.
        volume: String,
        /// What uses it, and what to do.
        user: String,
    },
    /// Volumes do not shrink.
    #[error(
        "volume \"{volume}\" has {} ({size} bytes), and volumes never shrink to {}, because that would cut off data of its guest: \
         check the unit of the size, or make another volume and copy the data inside of the guest",
        Bytes(*.size), Bytes(*.asked)
    )]
    Shrinks { volume: String, size: u64, asked: u64 },
    /// The new size is larger than everything that the store could ever hold.
    #[error(
        "{} for volume \"{volume}\" are more than its whole store \"{store}\" has ({}), and volumes never shrink: check the unit of \
         the size; if you mean it: sterna volume resize {volume} {asked} --beyond-store",
        Bytes(*.asked), Bytes(*.total)
    )]
    BeyondStore { volume: String, asked: u64, store: String, total: u64 },
    /// A store of the volume cannot hold the new size.
    #[error("volume \"{volume}\" cannot have {needed} bytes: {reason}")]
    CannotGrow {
        volume: String,
        needed: u64,
        /// The obstacle, and what to do.
        reason: String,
    },
    /// An interrupted resize could not be completed.
    #[error("cannot complete an interrupted resize")]
    Grow(#[from] GrowError),
    #[error(transparent)]
    Image(#[from] ImageError),
    #[error(transparent)]
    Qcow2(#[from] Qcow2Error),
    #[error(transparent)]
    Remote(#[from] RemoteError),
    #[error("{path} cannot be served: {detail}")]
    ImageUnsuitable {
        path: PathBuf,
        /// The reason, and what to do.
        detail: String,
    },
    /// Others use an image, or may use it.
    #[error("{path}: {refused}")]
    Claimed {
        path: PathBuf,
        /// Who uses it, and which step was refused.
        refused: migration::custody::Refused,
    },
    #[error(transparent)]
    Copy(#[from] CopyError),
    #[error(transparent)]
    Hosts(#[from] HostsError),
    /// An operation on access to the API failed.
    #[error(transparent)]
    Grants(#[from] GrantsError),
    /// An operation on VMs failed.
    #[error(transparent)]
    Vm(#[from] VmError),
    /// An order about an attached volume is refused.
    #[error(transparent)]
    Attachment(#[from] AttachmentError),
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    /// An order about a standby is refused.
    #[error(transparent)]
    Standby(#[from] StandbyError),
    /// An order about an evacuation is refused, or one that a drained host does not carry out.
    #[error(transparent)]
    Evacuation(#[from] EvacuationError),
    #[error("volume \"{volume}\" is a disk of the VM \"{vm}\"; remove that first: sterna vm remove {vm}")]
    VolumeOfVm { volume: String, vm: String },
    #[error("the daemon is shutting down; try again when it is back")]
    ShuttingDown,
    /// The journal did not accept a record.
    #[error("the journal could not be written: {0}; the daemon's log says why")]
    Journal(#[from] CommitFault),
    #[error("cannot {operation} {path}: {detail}")]
    Storage {
        /// The failed operation, as a verb.
        operation: &'static str,
        path: PathBuf,
        detail: String,
    },
    #[error("the daemon contradicted itself: {0}; please report this, with its log")]
    Internal(String),
}

impl RequestError {
    /// Returns an I/O error with the file that it is about.
    pub(crate) fn storage(operation: &'static str, path: &std::path::Path, error: &std::io::Error) -> Self {
        Self::Storage { operation, path: path.to_owned(), detail: error.to_string() }
    }

    pub(crate) fn code(&self) -> ErrorCode {
        match self {
            Self::VolumeNotFound(_)
            | Self::NothingToMove(_)
            | Self::VolumeElsewhere { .. }
            | Self::VolumeGone { .. } => ErrorCode::VolumeNotFound,
            Self::HostNeeded { .. } => ErrorCode::HostInUse,
            Self::StoreNotFound { .. } => ErrorCode::StoreNotFound,
            Self::DestinationNotFound { .. } => ErrorCode::StoreNotFound,
            Self::NotPrepared(_)
            | Self::NotPromotable { .. }
            | Self::Left { .. }
            | Self::LeftThere { .. } => ErrorCode::NotPrepared,
            Self::ImageLost { .. } => ErrorCode::ImageNotFound,
            Self::TooManyFiles { .. } => ErrorCode::TooManyFiles,
            Self::NoTicket => ErrorCode::InvalidRequest,
            Self::Ticket(_) => ErrorCode::TicketRefused,
            Self::HostUnreachable { .. } => ErrorCode::HostUnreachable,
            Self::HostRefused { .. } | Self::VmRefused { .. } => ErrorCode::HostRefused,
            Self::VmUnmovable { .. } | Self::DowntimeUnreachable { .. } => ErrorCode::VmUnsuitable,
            Self::MigrationNotFound(_) => ErrorCode::MigrationNotFound,
            Self::Route(error) => error.code(),
            Self::VolumeExists(_) | Self::BranchPresent { .. } | Self::BranchLedTo { .. } => {
                ErrorCode::VolumeExists
            }
            Self::Name { .. } | Self::Invalid(_) | Self::StoreNotChosen { .. } => ErrorCode::InvalidRequest,
            Self::TooLarge => ErrorCode::RequestTooLarge,
            Self::StoreUnusable { .. } | Self::Storage { .. } => ErrorCode::StorageFailed,
            Self::TargetExists { .. } => ErrorCode::TargetExists,
            Self::TargetTooSmall { .. } => ErrorCode::TargetTooSmall,
            Self::SameStore { .. } => ErrorCode::SameStore,
            Self::NoSpace { .. } | Self::NoRoomForRecords { .. } | Self::Copy(CopyError::NoSpace { .. }) => {
                ErrorCode::NoSpace
            }
            Self::AlreadyMigrating { .. } => ErrorCode::AlreadyMigrating,
            Self::NotForwarded(_) => ErrorCode::InvalidRequest,
            Self::NotMigrating(_) | Self::CancelledBeforehand(_) => ErrorCode::NotMigrating,
            Self::TooLate(_) | Self::TooLateLeft { .. } => ErrorCode::TooLate,
            Self::MigrationWaits(_) => ErrorCode::VolumeBusy,
            Self::QueueFull { .. } | Self::ShareUsedUp(_) => ErrorCode::QueueFull,
            Self::CannotRetry { .. } => ErrorCode::CannotRetry,
            Self::VolumeInUse { .. } | Self::ClientsUnknown(_) => ErrorCode::VolumeInUse,
            Self::VolumeBusy(_) | Self::VolumeArriving { .. } => ErrorCode::VolumeBusy,
            Self::VolumeUnavailable { .. } => ErrorCode::VolumeUnavailable,
            Self::Image(error) => code_of_image(error),
            Self::Qcow2(error) => code_of_qcow2(error),
            Self::Remote(error) => code_of_remote(error),
            Self::ImageUnsuitable { .. } => ErrorCode::ImageUnsuitable,
            Self::StoreOccupied { .. } => ErrorCode::StoreOccupied,
            Self::PlaceTaken { .. } | Self::Claimed { .. } => ErrorCode::ImageInUse,
            Self::Fenced { .. } => ErrorCode::PlaceFenced,
            Self::StoreFile(error) => error.code(),
            Self::Lacking(error) => error.code(),
            Self::Restored(error) => error.code(),
            Self::Copy(CopyError::Io { .. }) => ErrorCode::StorageFailed,
            Self::Fill(FillError::Target(error)) if error.is_no_space() => ErrorCode::NoSpace,
            Self::Fill(_) | Self::Grow(_) => ErrorCode::StorageFailed,
            Self::ReplicaNotFound { .. } => ErrorCode::ReplicaNotFound,
            Self::ReplicaInUse { .. } => ErrorCode::ImageInUse,
            Self::Shrinks { .. } => ErrorCode::CannotShrink,
            Self::CannotGrow { .. } | Self::BeyondStore { .. } => ErrorCode::CannotGrow,
            Self::Hosts(error) => error.code(),
            Self::Grants(error) => error.code(),
            Self::Vm(error) => error.code(),
            Self::Attachment(error) => error.code(),
            Self::Snapshot(error) => error.code(),
            Self::Standby(error) => error.code(),
            Self::Evacuation(error) => error.code(),
            Self::VolumeOfVm { .. } => ErrorCode::VolumeInUse,
            Self::ShuttingDown => ErrorCode::ShuttingDown,
            Self::Journal(_) => ErrorCode::JournalFailed,
            Self::Internal(_) => ErrorCode::Internal,
        }
    }

    /// Returns the message: the error and its causes.
    pub(crate) fn message(&self) -> String {
        with_causes(self)
    }
}

/// Returns an error and its causes in one line, with names and texts of others cleaned.
pub(crate) fn with_causes(error: &dyn std::error::Error) -> String {
    ::words::clean(&joined(error))
}

/// Does the same for an error with several lines, such as one that shows a line of a file. They stay lines.
pub(crate) fn lines_with_causes(error: &dyn std::error::Error) -> String {
    joined(error).lines().map(::words::clean).collect::<Vec<_>>().join("\n")
}

fn joined(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let detail = error.to_string();
        // Some errors contain the text of their cause.
        if !text.contains(&detail) {
            text = format!("{text}: {detail}");
        }
        cause = error.source();
    }
    text
}
