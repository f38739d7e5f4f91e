//! The history of a volume's writes: layered bitmaps, epochs, and what replicas lack of them.
//!
//! The *chronicle* says what was written in which epoch; what a replica lacks is what was written since the epoch that it was
//! current as of, and [`Kept`] carries that across a restart. This crate is pure: no runtime, socket, file, clock or randomness.
//! What it is told, it remembers; it never does anything.

pub mod bitmap;
mod branch;
mod byte_range;
pub mod chronicle;
pub mod kept;
mod stay;
pub mod units;

pub use bitmap::LayeredBitmap;
pub use branch::BranchId;
pub use byte_range::ByteRange;
pub use chronicle::{BeyondTheEnd, Chronicle, MarkPolicy, Recorded};
pub use kept::{Kept, KeptReplica, ReplicaOf, coarsened};
pub use stay::{NoStay, StayId};
pub use units::{BlockCount, BlockIndex, BlockRange, BlockSize, Epoch, Generation, InvalidBlockSize};
