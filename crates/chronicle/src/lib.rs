//! The history of a volume's writes: layered bitmaps, epochs, and what replicas lack of them.
//!
//! The *chronicle* records which blocks were written in which epoch. A replica lacks what was written after the epoch as of which
//! it is current. [`Kept`] carries both across a restart. This crate is pure: no runtime, socket, file, clock or randomness.

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
