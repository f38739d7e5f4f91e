//! The history of a volume's writes: layered bitmaps, epochs, replicas and their lineage.
//!
//! Every way in which Sterna copies a volume is a policy over two structures: the *chronicle*, which says what was
//! written when, and the *replica*, a copy that knows as of when it is current and what it is missing. This crate is
//! pure: no runtime, socket, file, clock or randomness. What it is told, it remembers; it never does anything.

pub mod bitmap;
mod byte_range;
pub mod chronicle;
pub mod kept;
pub mod lineage;
pub mod replica;
mod stay;
pub mod units;

pub use bitmap::LayeredBitmap;
pub use byte_range::ByteRange;
pub use chronicle::{Chronicle, MarkPolicy, Recorded};
pub use kept::{Kept, KeptReplica, ReplicaOf};
pub use lineage::{BranchId, BranchPoint, Lineage, LineageError, LineageId, missing_after_branching};
pub use replica::{MissingPolicy, Replica};
pub use stay::{NoStay, StayId};
pub use units::{BlockCount, BlockIndex, BlockRange, BlockSize, Epoch, Generation, InvalidBlockSize};
