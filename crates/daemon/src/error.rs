//! Why a request was not carried out, by cause; each says what to do next.

mod images;
mod lacking;
mod restored;
mod retry;
mod routes;
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

pub(crate) use self::lacking::LackingError;
pub(crate) use self::restored::RestoredError;
pub(crate) use self::retry::RetryObstacle;
pub(crate) use self::routes::RouteError;
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

/// Why a request was not carried out.
///
/// Nothing has changed then, unless the cause says otherwise.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RequestError {
    /// No volume has the name.
    #[error("there is no volume \"{0}\"; see: sterna volume list")]
    VolumeNotFound(String),
    /// Nothing that could be moved has the name.
    #[error("there is no volume and no VM \"{0}\"; see: sterna volume list, sterna vm list")]
    NothingToMove(String),
    /// No store has the name.
    #[error("there is no store \"{name}\"; there are: {known}")]
    StoreNotFound {
        /// What was asked for.
        name: String,
        /// The names there are.
        known: String,
    },
    /// Neither a store nor a host has the name.
    #[error(
        "there is no store and no host \"{name}\"; stores: {stores}; hosts: {hosts} (write HOST or HOST:STORE)"
    )]
    DestinationNotFound {
        /// What was asked for.
        name: String,
        /// The stores there are.
        stores: String,
        /// The hosts that are known.
        hosts: String,
    },
    /// Nothing of the volume waits for a promotion.
    #[error(
        "volume \"{0}\" does not wait here for another host's word, so there is nothing to promote; see: sterna volume show {0}"
    )]
    NotPrepared(String),
    /// The descriptors that another volume needs are not left.
    #[error(
        "this daemon has {open} files and sockets open and may have {limit}, which leaves too few for another volume; start it with \
         a higher limit: LimitNOFILE= of its systemd unit, or ulimit -n"
    )]
    TooManyFiles {
        /// How many it has.
        open: u64,
        /// How many it may have.
        limit: u64,
    },
    /// What has come of the volume cannot be promoted.
    #[error("volume \"{volume}\" cannot be promoted: {reason}; see: sterna migration show {migration}")]
    NotPromotable {
        volume: String,
        /// The migration by which it comes.
        migration: MigrationId,
        reason: NotPromotable,
    },
    /// A promotion is founded on nothing.
    #[error(
        "give the ticket that the other host prints (sterna migration show), or --force: if that host goes on with the \
         volume, there are two of it from then on"
    )]
    NoTicket,
    /// The ticket does not fit.
    #[error(transparent)]
    Ticket(#[from] TicketError),
    /// Another host cannot be reached.
    #[error("host \"{host}\" cannot be reached: {reason}; see: sterna host show {host}")]
    HostUnreachable {
        host: String,
        /// What was tried, and what came of it.
        reason: String,
    },
    /// Another host cannot run a VM.
    #[error("host \"{host}\" cannot run the VM \"{vm}\": {reason}")]
    VmRefused { vm: String, host: String, reason: String },
    /// A VM cannot be moved as it is.
    #[error("the VM \"{vm}\" cannot be moved: {reason}")]
    VmUnmovable { vm: String, reason: String },
    /// A VM cannot stand still for as short as it is to.
    #[error(
        "the VM \"{vm}\" cannot be moved within --max-downtime {}: the way to the other host is so long that an idle \
         one stands still for {:.0} ms at least; allow {} ms, or more",
        wanted.as_millis(), least.as_secs_f64() * 1000.0, crate::host::roomy(*least).as_millis()
    )]
    DowntimeUnreachable {
        vm: String,
        /// How long an idle one would stand still.
        least: std::time::Duration,
        /// How long it may.
        wanted: std::time::Duration,
    },
    /// Another host does not take a volume.
    #[error("host \"{host}\" does not take the volume: {}", refusal.detail)]
    HostRefused { host: String, refusal: Refusal },
    /// A volume has gone to another host.
    #[error(
        "volume \"{volume}\" is at host \"{host}\" ({migration}), and only forwarded here: do it there, or end the forwarding \
         with: sterna volume remove {volume}"
    )]
    VolumeElsewhere {
        volume: String,
        /// Which host has it.
        host: String,
        /// The migration that took it there.
        migration: MigrationId,
    },
    /// A volume has gone to another host, and nothing of it is left here.
    #[error("volume \"{volume}\" has gone to host \"{host}\" ({migration}): do it there")]
    VolumeGone {
        volume: String,
        /// Which host it went to.
        host: String,
        /// The migration that took it there.
        migration: MigrationId,
    },
    /// Something depends on another host that was to be forgotten.
    #[error("host \"{host}\" is needed: {needed}; to forget it all the same: --force")]
    HostNeeded {
        host: String,
        /// By what, and what to do about it.
        needed: String,
    },
    /// No migration has the identity.
    #[error("there is no migration \"{0}\"; see: sterna migration list")]
    MigrationNotFound(String),
    /// The API has no such path, or not for this method.
    #[error(transparent)]
    Route(#[from] RouteError),
    /// The name is taken.
    #[error("a volume \"{0}\" exists; choose another name, or remove it first")]
    VolumeExists(String),
    /// A volume that is offered is a branch of the history of one that is here. Said to the host that offers it.
    #[error(
        "it has volume \"{volume}\" already, as another branch of the same history, with generation {here} (this one has \
         {offered}): a promotion was forced, and both may have been written to since. Decide which is to stay, and remove the \
         other at its host: sterna volume remove {volume}"
    )]
    BranchPresent {
        /// What the other branch is called here.
        volume: String,
        here: Generation,
        /// That of the branch that is offered.
        offered: Generation,
    },
    /// Clients here use another branch of the history of a volume that is offered. Said to the host that offers it.
    #[error(
        "its clients of volume \"{volume}\" are led to host \"{host}\", to another branch of the same history, with generation \
         {there} (this one has {offered}), and must not find another content; end that there with: sterna volume remove \
         {volume}, and try again"
    )]
    BranchLedTo {
        /// What it is called here.
        volume: String,
        /// The host that has the other branch, or had it last.
        host: String,
        /// The generation with which the other branch went there.
        there: Generation,
        /// That of the branch that is offered.
        offered: Generation,
    },
    /// The name cannot be one.
    #[error("\"{name}\" cannot be the name of a volume: {reason}")]
    Name {
        name: String,
        /// What is wrong with it.
        reason: InvalidName,
    },
    /// The request cannot be understood or has a value that cannot be meant.
    #[error("{0}")]
    Invalid(String),
    /// The body is too large.
    #[error("the request is larger than {} bytes", api::REQUEST_BYTES_MAX)]
    TooLarge,
    /// There are several stores.
    #[error("say in which store: --store with one of {known}")]
    StoreNotChosen {
        /// The names there are.
        known: String,
    },
    /// A store cannot be used.
    #[error("store \"{name}\" cannot be used: {problem}")]
    StoreUnusable { name: String, problem: StoreProblem },
    /// A store that holds one volume has one.
    #[error("store \"{name}\" takes one volume, and {occupant}{}", if_kept(.name, .occupant))]
    StoreOccupied { name: String, occupant: Occupant },
    /// A place is another volume's.
    #[error("{place} is the volume \"{volume}\" already; see: sterna volume show {volume}")]
    PlaceTaken { place: Place, volume: String },
    /// A place holds what a migration left there.
    #[error("{place} holds {}; to serve that all the same: --fenced", fenced(.fence))]
    Fenced { place: Place, fence: Reservation },
    /// A file in a store is left as it is.
    #[error(transparent)]
    StoreFile(#[from] StoreFileError),
    /// A new volume could not be filled.
    #[error(transparent)]
    Fill(#[from] FillError),
    /// A file is where the image would be.
    #[error("{path} exists already; move it away if nothing uses it, or take another name or another store")]
    TargetExists { path: PathBuf },
    /// The place cannot take as many bytes.
    #[error("{needed} bytes do not fit into {place}: {detail}")]
    TargetTooSmall {
        place: String,
        /// What is needed, in bytes.
        needed: u64,
        /// What is in the way.
        detail: String,
    },
    /// The volume is there already.
    #[error("volume \"{volume}\" is in store \"{store}\" already; choose another one")]
    SameStore { volume: String, store: String },
    /// The store is too full.
    #[error(
        "store \"{store}\" has {} free, and {} are needed; make room there, or choose another store", Bytes(*.free), Bytes(*.needed)
    )]
    NoSpace {
        store: String,
        /// What is free, in bytes.
        free: u64,
        /// What is needed, in bytes.
        needed: u64,
    },
    /// The volume is being migrated.
    #[error(
        "volume \"{volume}\" is being migrated ({migration}); wait for it, or cancel it: sterna migration cancel {migration}"
    )]
    AlreadyMigrating { volume: String, migration: MigrationId },
    /// The volume lacks blocks.
    #[error(transparent)]
    Lacking(#[from] LackingError),
    /// The journal was put back, and it is not known whose the volume is.
    #[error(transparent)]
    Restored(#[from] RestoredError),
    /// The migration is not under way.
    #[error("migration {0} has ended; see: sterna migration show {0}")]
    NotMigrating(MigrationId),
    /// The migration was cancelled before anything was copied.
    #[error("migration {0} was cancelled before it had begun")]
    CancelledBeforehand(MigrationId),
    /// The migration cannot be cancelled any more.
    #[error("migration {0} can no longer be cancelled: it is being completed")]
    TooLate(MigrationId),
    /// The migration has not begun.
    #[error("migration {0} waits for its turn; until then it can be cancelled: sterna migration cancel {0}")]
    MigrationWaits(MigrationId),
    /// As many migrations wait as may.
    #[error("{waiting} migrations wait for their turn; order more when some of them have begun")]
    QueueFull { waiting: usize },
    /// Another host has as much as it may have here.
    #[error("{0}; try again later")]
    ShareUsedUp(UsedUp),
    /// There is nothing to do once more.
    #[error("migration {migration} cannot be done once more: {reason}")]
    CannotRetry {
        migration: MigrationId,
        /// Why, and what to do.
        reason: RetryObstacle,
    },
    #[error("volume \"{volume}\" is in use by {clients}; stop the guest, or cut it off with --force")]
    VolumeInUse { volume: String, clients: crate::volumes::registry::Users },
    /// Clients may have been left at the host that it came from.
    #[error(
        "the host that volume \"{0}\" came from has not said yet whether it leads clients here; try again in a minute, or cut \
         them off with --force"
    )]
    ClientsUnknown(String),
    /// Something else is being done with the volume.
    #[error(
        "volume \"{0}\" is being created, removed, resized or begins to migrate; try again when that is done"
    )]
    VolumeBusy(String),
    /// The volume is on its way from another host.
    #[error(
        "volume \"{volume}\" is on its way here ({migration}); wait for it, or cancel it: sterna migration cancel {migration}"
    )]
    VolumeArriving { volume: String, migration: MigrationId },
    /// The volume is not served.
    #[error("volume \"{volume}\" is not being served: {reason}")]
    VolumeUnavailable { volume: String, reason: String },
    /// No image of the volume was kept, or none by this migration.
    #[error("no such image of \"{volume}\" was kept{}", if_others(.known))]
    ReplicaNotFound {
        volume: String,
        /// The migrations that left one, for people; empty: none did.
        known: String,
    },
    /// An image that was kept is in use.
    #[error("the image that was kept of \"{volume}\" is in use: {user}")]
    ReplicaInUse {
        /// Which volume, or which file.
        volume: String,
        /// Who uses it, and what to do.
        user: String,
    },
    /// Volumes do not shrink.
    #[error(
        "volume \"{volume}\" has {size} bytes, and volumes never shrink, because that would cut off what its guest has \
         there: to have {asked} bytes, make another volume and copy inside of the guest"
    )]
    Shrinks {
        volume: String,
        /// Its size in bytes.
        size: u64,
        /// What was asked for.
        asked: u64,
    },
    /// A store in which the volume must fit cannot hold as much.
    #[error("volume \"{volume}\" cannot have {needed} bytes: {reason}")]
    CannotGrow {
        volume: String,
        /// What was asked for, in bytes.
        needed: u64,
        /// What is in the way, and what to do.
        reason: String,
    },
    /// A resize that was interrupted could not be ended.
    #[error("a resize that was interrupted cannot be ended")]
    Grow(#[from] GrowError),
    /// An image cannot be used.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// A qcow2 image cannot be used.
    #[error(transparent)]
    Qcow2(#[from] Qcow2Error),
    /// The export of another server cannot be used.
    #[error(transparent)]
    Remote(#[from] RemoteError),
    /// An image is none that can be served.
    #[error("{path} cannot be served: {detail}")]
    ImageUnsuitable {
        path: PathBuf,
        /// Why, and what to do.
        detail: String,
    },
    /// Others use an image, or may.
    #[error("{path}: {refused}")]
    Claimed {
        path: PathBuf,
        /// Who, and what was not done.
        refused: migration::custody::Refused,
    },
    /// An image could not be copied.
    #[error(transparent)]
    Copy(#[from] CopyError),
    /// Something about other hosts was not done.
    #[error(transparent)]
    Hosts(#[from] HostsError),
    /// Something about who may use the API was not done.
    #[error(transparent)]
    Grants(#[from] GrantsError),
    /// Something about VMs was not done.
    #[error(transparent)]
    Vm(#[from] VmError),
    /// The volume is a disk of a VM.
    #[error("volume \"{volume}\" is a disk of the VM \"{vm}\"; remove that first: sterna vm remove {vm}")]
    VolumeOfVm { volume: String, vm: String },
    /// The daemon is going down.
    #[error("the daemon is shutting down; try again when it is back")]
    ShuttingDown,
    /// The journal did not take what must be remembered.
    #[error("the journal could not be written: {0}; the daemon's log says why")]
    Journal(#[from] CommitFault),
    /// A store answered with an error.
    #[error("cannot {operation} {path}: {detail}")]
    Storage {
        /// What was tried, as a verb.
        operation: &'static str,
        path: PathBuf,
        /// What the system answered.
        detail: String,
    },
    #[error("the daemon contradicted itself: {0}; please report this, with its log")]
    Internal(String),
}

impl RequestError {
    /// An I/O error with the file it is about.
    pub(crate) fn storage(operation: &'static str, path: &std::path::Path, error: &std::io::Error) -> Self {
        Self::Storage { operation, path: path.to_owned(), detail: error.to_string() }
    }

    /// The cause, as the API calls it.
    pub(crate) fn code(&self) -> ErrorCode {
        match self {
            Self::VolumeNotFound(_)
            | Self::NothingToMove(_)
            | Self::VolumeElsewhere { .. }
            | Self::VolumeGone { .. } => ErrorCode::VolumeNotFound,
            Self::HostNeeded { .. } => ErrorCode::HostInUse,
            Self::StoreNotFound { .. } => ErrorCode::StoreNotFound,
            Self::DestinationNotFound { .. } => ErrorCode::StoreNotFound,
            Self::NotPrepared(_) | Self::NotPromotable { .. } => ErrorCode::NotPrepared,
            Self::TooManyFiles { .. } => ErrorCode::TooManyFiles,
            Self::NoTicket => ErrorCode::InvalidRequest,
            Self::Ticket(_) => ErrorCode::TicketRefused,
            Self::HostUnreachable { .. } => ErrorCode::HostUnreachable,
            Self::HostRefused { .. } | Self::VmRefused { .. } => ErrorCode::HostRefused,
            Self::VmUnmovable { .. } | Self::DowntimeUnreachable { .. } => ErrorCode::InvalidRequest,
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
            Self::NoSpace { .. } | Self::Copy(CopyError::NoSpace { .. }) => ErrorCode::NoSpace,
            Self::AlreadyMigrating { .. } => ErrorCode::AlreadyMigrating,
            Self::NotMigrating(_) | Self::CancelledBeforehand(_) => ErrorCode::NotMigrating,
            Self::TooLate(_) => ErrorCode::TooLate,
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
            Self::CannotGrow { .. } => ErrorCode::CannotGrow,
            Self::Hosts(error) => error.code(),
            Self::Grants(error) => error.code(),
            Self::Vm(error) => error.code(),
            Self::VolumeOfVm { .. } => ErrorCode::VolumeInUse,
            Self::ShuttingDown => ErrorCode::ShuttingDown,
            Self::Journal(_) => ErrorCode::JournalFailed,
            Self::Internal(_) => ErrorCode::Internal,
        }
    }

    /// The sentence for people: the error and its causes.
    pub(crate) fn message(&self) -> String {
        with_causes(self)
    }
}

/// An error and its causes, in one line: names and answers of others that are in it are cleaned.
pub(crate) fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let detail = error.to_string();
        // Some errors have their cause's text in their own.
        if !text.contains(&detail) {
            text = format!("{text}: {detail}");
        }
        cause = error.source();
    }
    ::words::clean(&text)
}
