//! Why a lane does not do what it is asked for.

use block::IoError;
use migration::{CommitFault, MigrationId};

use crate::handle::StoreRole;

/// Why a lane did not do what it was asked for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// The volume is being migrated already.
    #[error("the volume is being migrated already ({0})")]
    Migrating(MigrationId),
    /// No such migration is under way here.
    #[error("migration {0} is not under way")]
    NotMigrating(MigrationId),
    /// The migration is past its commit point, or has failed already.
    #[error("migration {0} can no longer be cancelled: it is being completed")]
    TooLate(MigrationId),
    /// The target image does not fit.
    #[error("the target has {target_bytes} bytes, the volume has {source_bytes}")]
    SizeDiffers {
        /// Size of the target image in bytes.
        target_bytes: u64,
        /// Size of the volume in bytes.
        source_bytes: u64,
    },
    /// The target cannot be used.
    #[error("the target cannot be opened: {0}")]
    Target(IoError),
    /// What was written into the image when the volume came back to it before has not ended.
    #[error("what an earlier migration writes to the image has not ended: its disk does not answer")]
    StillWritten,
    /// What the copy lacks that is to be gone on with is not known.
    #[error("what the copy of {0} lacks is not known")]
    CopyUnknown(MigrationId),
    /// The volume is becoming larger.
    #[error("the volume is being resized; try again when that is done")]
    Growing,
    /// A volume does not become smaller.
    #[error("the volume has {size_bytes} bytes, and volumes do not shrink")]
    Shrinks {
        /// Its size in bytes.
        size_bytes: u64,
    },
    /// The volume is changing hands, and that takes long.
    #[error("the volume is being handed over by {0}; try again when that has ended")]
    HandingOver(MigrationId),
    /// A store cannot become as large.
    #[error("{store} has {capacity_bytes} bytes")]
    NoRoom {
        /// Which one.
        store: StoreRole,
        /// What it could have at most, in bytes.
        capacity_bytes: u64,
    },
    /// A store did not become larger; both have the size that they had.
    #[error("{store} cannot grow: {error}")]
    NotGrown {
        /// Which one.
        store: StoreRole,
        /// Why.
        error: IoError,
    },
    /// The journal did not take it.
    #[error("the journal could not be written: {0}")]
    NotRecorded(CommitFault),
    /// The lane has ended.
    #[error("the volume is no longer served")]
    Ended,
}
