//! The reasons why a lane refuses an order.

use block::IoError;
use migration::{CommitFault, MigrationId};

use crate::handle::StoreRole;

/// Why a lane refused an order.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// The volume is being migrated already.
    #[error("the volume is being migrated already ({0})")]
    Migrating(MigrationId),
    /// No such migration is in progress here.
    #[error("migration {0} is not under way")]
    NotMigrating(MigrationId),
    /// The migration is past its commit point, or has failed already.
    #[error("cannot cancel migration {0}: it is being completed")]
    TooLate(MigrationId),
    /// The target image has another size than the volume.
    #[error("the target has {target_bytes} bytes, the volume has {source_bytes}")]
    SizeDiffers {
        /// Size of the target image in bytes.
        target_bytes: u64,
        /// Size of the volume in bytes.
        source_bytes: u64,
    },
    /// The target cannot be opened or used.
    #[error("the target cannot be opened: {0}")]
    Target(IoError),
    /// Writes to the image from an earlier migration have not ended.
    #[error("writes of an earlier migration to the image are still in flight: its disk does not answer")]
    StillWritten,
    /// The missing set of the copy that a restart continues with is not known.
    #[error("it is unknown which blocks the copy of {0} lacks")]
    CopyUnknown(MigrationId),
    /// The volume is becoming larger.
    #[error("the volume is being resized; try again when that is done")]
    Growing,
    /// A volume cannot become smaller.
    #[error("the volume has {size_bytes} bytes, and volumes do not shrink")]
    Shrinks {
        /// The volume's size in bytes.
        size_bytes: u64,
    },
    /// The volume is being handed over, and that takes long.
    #[error("the volume is being handed over by {0}; try again when that has ended")]
    HandingOver(MigrationId),
    /// A store cannot become as large.
    #[error("{store} has {capacity_bytes} bytes")]
    NoRoom {
        /// The store without room.
        store: StoreRole,
        /// The store's largest possible size, in bytes.
        capacity_bytes: u64,
    },
    /// A store did not grow; both keep their former size.
    #[error("{store} cannot grow: {error}")]
    NotGrown {
        /// The store that did not grow.
        store: StoreRole,
        /// The error of the store.
        error: IoError,
    },
    /// The journal did not take the record.
    #[error("the journal could not be written: {0}")]
    NotRecorded(CommitFault),
    /// Another host owns the volume.
    #[error("the volume is at another host")]
    NotHere,
    /// Blocks of the volume still follow from another host.
    #[error("blocks of the volume still follow from another host; try again when they are here")]
    Incomplete,
    /// The volume's blocks have another size.
    #[error("the volume is recorded in blocks of {0} bytes; a standby needs blocks of 4096 bytes")]
    BlockSize(u64),
    /// The volume's store could not be read.
    #[error("the volume's store cannot be read: {0}")]
    Unread(IoError),
    /// The volume is being copied by another order.
    #[error("the volume is being cloned already; try again when that has ended")]
    Duplicating,
    /// The copy of the volume is of no use.
    #[error("{0}")]
    NotDuplicated(String),
    /// The snapshot that a volume is reverted to cannot be read.
    #[error("the snapshot cannot be read: {0}")]
    SnapshotUnread(IoError),
    /// The volume cannot be written while it is reverted.
    #[error("the volume cannot be written: {0}")]
    Unwritten(IoError),
    /// The lane has ended.
    #[error("the volume is not served")]
    Ended,
}
