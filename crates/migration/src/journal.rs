//! The journal: the state of volumes and migrations that a host keeps across a `kill -9` or a power cut.
//!
//! ```text
//!   Record ──encode──► frame (length, checksum, sequence) ──► appended durably by the owner of the file
//!                                                                     │ restart
//!   State  ◄──apply── Record ◄──decode── frames up to the first that is torn
//! ```
//!
//! This module is pure: it encodes and decodes records, and folds them into a [`State`]. The daemon appends them durably to a
//! preallocated file; the simulator uses a file that tears. A commit is one frame, however many records it contains: after a
//! crash all of them are there, or none.

mod attached;
mod codec;
mod filling;
pub(crate) mod framing;
mod image;
mod left;
mod moves;
mod origin;
mod record;
mod restored;
mod side;
mod snapshots;
mod stage;
mod state;

pub use attached::{AttachedVolume, GivenAttachment};
pub use codec::{CodecError, Ending, FRAME_BYTES_MAX, Frames, HEADER, HEADER_BYTES, VERSION, encode};
pub use filling::{Hollow, VolumeFilling, Way};
pub use image::{ImageFormat, ImageLocation, Place, Reservation, ReservedContent};
pub use left::{LaneLeft, Users};
pub use origin::{ImageFate, ImageWish, Origin};
pub use record::{
    Entry, ExportAccess, ExportSettings, FailureCode, MigratingVolume, Outcome, Record, Summary, VolumeRecord,
};
pub use restored::{Doubt, HostList, NamedHost, Restored, RestoredMore, RestoredVolume, Unlisted};
pub use side::{Branch, Forwarding, Moved, Promotion, Side};
pub use snapshots::SnapshotOf;
pub use stage::Stage;
pub use state::{Inconsistent, MigrationState, State, VolumeState};
