//! Names of what a standby refers to.

use chronicle::Epoch;
use serde::{Deserialize, Serialize};

/// Identifies one standby of one group, for ever. The administrator's order draws it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct StandbyId(pub u128);

/// Identifies one unbroken history of a group's writes. It is drawn anew each time the history is forgotten.
///
/// Epochs of different lives cannot be compared: numbers begin again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct LifeId(pub u128);

/// The position of a volume in its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct VolumeIndex(pub u16);

impl VolumeIndex {
    /// Returns the position as an index into the lists of a group.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// The cut as of which a standby's image is, durably (law 27).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Watermark {
    /// The standby that has the image.
    pub standby: StandbyId,
    /// The life of the history in which the epoch counts.
    pub life: LifeId,
    /// The image holds everything that was written up to the end of this epoch.
    pub epoch: Epoch,
}
