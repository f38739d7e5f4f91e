//! One residency of a volume at a host: its epochs, the copies that refer to them, and what a restart trusts of both.
//!
//! ```text
//!   Stay::begin ───► record, refer, forget ──► Stay::close      files: VOLUME.STAY.kept   what was written, known copies
//!        ▲                 killed │ closed                             VOLUME.STAY.N.marks  what may be written in epoch N
//!        └── new residency        ▼                                    VOLUME.STAY.image    the image's state at the last close
//!                         opening::open ──► Stay::resume
//! ```
//! Three rules make it safe by construction (design §5.8):
//!
//! 1. Everything durable bears its residency in name and content, and nothing of another residency is read.
//! 2. An epoch that anything refers to is durable first, and a restart continues above every number that it finds.
//! 3. A restart trusts the kept state only if the image is known to be unchanged since a daemon last held it.
//!
//! The daemon, or the simulator, owns the files and carries out the decisions.

pub mod copy;
mod elsewhere;
pub mod image;
pub mod life;
mod machine;
mod marks;
pub mod opening;

use std::fmt;

use chronicle::StayId;

pub use elsewhere::{COPIES_MAX, CopyElsewhere, Departed};
pub use image::{ImageRecord, Look, vouches};
pub use life::{Lives, Run};
pub use machine::{Beginning, Doubt, Forgetting, GivenUp, Premarks, Referral, Stay, ToDo};
pub use marks::OpenMarks;

use crate::identity::VolumeId;
use crate::planted::{Bug, broken};

/// Identifies one residency of one volume; its files begin with this key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct StayKey {
    /// The volume of the residency.
    pub volume: VolumeId,
    /// The residency of the volume at this host.
    pub stay: StayId,
}

impl StayKey {
    /// Returns the first bytes of every file of this residency, and of no other.
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

/// Returns the size of a volume that arrives in a store of `store_bytes`: the size of its store. It may have grown since it
/// left here. `known_bytes` is the size known at a host that forwarded clients meanwhile.
pub fn size_of_arrival(store_bytes: u64, known_bytes: u64) -> u64 {
    let is_former = broken(Bug::StayOfFormerSize) || broken(Bug::BeyondTheEndUnrecorded);
    if is_former { known_bytes } else { store_bytes }
}

impl fmt::Display for StayKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}.{}", self.volume, self.stay)
    }
}
