//! One stay of a volume at a host: its epochs, the copies that refer to them, and what a restart believes of both.
//!
//! ```text
//!   Stay::begin ───► record, refer, forget ──► Stay::close      files: VOLUME.STAY.kept   what was written, known copies
//!        ▲                 killed │ closed                             VOLUME.STAY.N.marks  what may be written in epoch N
//!        └── another stay         ▼                                    VOLUME.STAY.image    how the image looked
//!                         opening::open ──► Stay::resume
//! ```
//! Three rules make it safe by construction (design §5.8):
//!
//! 1. Everything durable bears its stay in name and content, and nothing of another stay is read.
//! 2. What refers to an epoch is durable first, and a restart goes on above every number that it finds.
//! 3. A restart trusts what was kept only if the image is known not to have changed while nobody held it.
//!
//! Whoever owns the files and carries out what is decided here is the daemon, or the simulator.

pub mod copy;
mod elsewhere;
pub mod image;
mod machine;
mod marks;
pub mod opening;

use std::fmt;

use chronicle::StayId;

pub use elsewhere::{COPIES_MAX, CopyElsewhere, Departed};
pub use image::{ImageRecord, Look, vouches};
pub use machine::{Beginning, Doubt, Forgetting, GivenUp, Premarks, Referral, Stay, ToDo};
pub use marks::OpenMarks;

use crate::identity::VolumeId;
use crate::planted::{Bug, broken};

/// Names one stay of one volume; files that belong to it begin with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct StayKey {
    /// Whose stay.
    pub volume: VolumeId,
    /// Which of its stays at this host.
    pub stay: StayId,
}

impl StayKey {
    /// What files begin with that belong to this stay of the volume, and to no other.
    pub fn bytes(&self) -> [u8; 32] {
        let mut bytes = [0; 32];
        bytes[..16].copy_from_slice(&self.volume.0);
        if let StayId::Arrived(migration) = self.stay {
            bytes[16] = 1;
            bytes[24..].copy_from_slice(&migration.to_le_bytes());
        }
        bytes
    }
}

/// How large a volume is that comes to a store of `store_bytes`, at a host that may have led clients to it meanwhile, and knows it by
/// the size of `known_bytes`: as large as its store. It may have grown since it left.
pub fn size_of_arrival(store_bytes: u64, known_bytes: u64) -> u64 {
    let is_former = broken(Bug::StayOfFormerSize) || broken(Bug::BeyondTheEndUnrecorded);
    if is_former { known_bytes } else { store_bytes }
}

impl fmt::Display for StayKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}.{}", self.volume, self.stay)
    }
}
