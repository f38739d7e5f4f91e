//! What a host must remember of its volumes and migrations across a `kill -9` or a power cut.
//!
//! ```text
//!   Record ──encode──► frame (length, checksum, sequence) ──► appended durably by the owner of the file
//!                                                                     │ restart
//!   State  ◄──apply── Record ◄──decode── frames up to the first that is torn
//! ```
//!
//! This module is pure: it turns records into bytes and back, and folds them into a [`State`]. Who appends them
//! durably is the daemon (a preallocated file) or the simulator (a file that tears). A commit is one frame, whatever
//! number of records is in it: all of them are there after a crash, or none.

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
mod stage;
mod state;
mod version_3;

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
pub use stage::Stage;
pub use state::{Inconsistent, MigrationState, State, VolumeState};
