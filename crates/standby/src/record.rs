//! The durable records of both sides. Each is one small file that is replaced as a whole.
//!
//! The first bytes name the kind of record and its version. A record of another version or with a wrong checksum is not read: its
//! standby has no rights then, and no knowledge.

use chronicle::{BlockCount, BlockRange, Epoch, Generation, LayeredBitmap, coarsened};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::identity::{LifeId, StandbyId, Watermark};

/// A type that is stored in a file of its own.
pub trait Record: Serialize + DeserializeOwned {
    /// The first bytes of the file; the last one is the version.
    const HEADER: [u8; 8];

    /// Returns the bytes of the file.
    fn encode(&self) -> Vec<u8> {
        // A growing buffer accepts everything.
        let body = postcard::to_stdvec(self).unwrap_or_default();
        let mut bytes = Self::HEADER.to_vec();
        bytes.extend(crc32c::crc32c(&body).to_le_bytes());
        bytes.extend(body);
        bytes
    }

    /// Reads the bytes of a file; `None` if they are damaged, or of another kind or version.
    fn decode(bytes: &[u8]) -> Option<Self> {
        let (header, rest) = bytes.split_at_checked(Self::HEADER.len())?;
        let (checksum, body) = rest.split_at_checked(4)?;
        let is_whole = header == Self::HEADER && checksum == crc32c::crc32c(body).to_le_bytes();
        let (record, surplus) = postcard::take_from_bytes(body).ok()?;
        (is_whole && surplus.is_empty()).then_some(record)
    }
}

/// What the owner keeps of one replication.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnerRecord {
    /// The standby.
    pub standby: StandbyId,
    /// The owner's generation: higher than that of each owner before.
    pub generation: Generation,
    /// The life of the history.
    pub life: LifeId,
    /// The newest epoch that the standby has confirmed and that the owner's own stores have flushed; `None` before the first.
    ///
    /// The chronicle keeps everything that was written since (law 27).
    pub acknowledged: Option<Epoch>,
    /// No epoch above this one has left the host. A restart begins above it.
    pub numbered_through: Epoch,
}

/// What the standby's host keeps of one standby.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StandbyRecord {
    /// The standby.
    pub standby: StandbyId,
    /// The highest generation of an owner that has spoken. Lower ones are fenced.
    pub generation: Generation,
    /// Whether the standby receives.
    pub standing: Standing,
    /// The watermark of the image; `None` before the first, and after others have changed the image.
    pub watermark: Option<Watermark>,
    /// When the watermark's epoch was cut, by this host's clock, in milliseconds since the caller's origin.
    pub as_of_ms: u64,
    /// What the image is.
    pub image: ImageState,
    /// Epochs whose spools are whole and durable, the oldest first. A restart applies them again from their beginning.
    pub sealed: Vec<Sealed>,
    /// Recovery points beside the image, the oldest first.
    pub points: Vec<Point>,
}

/// Whether a standby receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Standing {
    /// It receives from the owner.
    Receiving,
    /// It was promoted. It never receives again (law 28).
    Promoted {
        /// The cut that was promoted. What the former owner lacks is what was written here since.
        at: Watermark,
    },
    /// A migration has used its image.
    Consumed,
}

/// What an image is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ImageState {
    /// As of the watermark, or on the way from it to a sealed epoch.
    AsOfWatermark,
    /// A mixture: an epoch is, or was, written in place. Only points are recovery points.
    Torn,
}

/// A sealed epoch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sealed {
    /// The watermark that the image has once the spool is applied.
    pub watermark: Watermark,
    /// The number of blocks in the spools.
    pub blocks: u64,
    /// The sizes of the volumes at the cut.
    pub sizes: Vec<BlockCount>,
    /// When the epoch was cut, by this host's clock, in milliseconds since the caller's origin.
    pub as_of_ms: u64,
}

/// A recovery point beside the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Point {
    /// The cut.
    pub watermark: Watermark,
    /// How it is kept.
    pub kept_by: KeptBy,
    /// The number of blocks that it occupies: those that differ from the next point.
    pub blocks: u64,
    /// When its epoch was cut, by this host's clock, in milliseconds since the caller's origin.
    pub as_of_ms: u64,
}

/// How a recovery point is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum KeptBy {
    /// A reflink of the image.
    Reflink,
    /// The former content of what later epochs have overwritten. It is of no use if others change the image.
    Undo,
    /// The same, after an older point was begun to be put back: older ones need it, and it is no point any more.
    Passed,
}

impl KeptBy {
    /// Returns whether what was overwritten is kept, and not the image.
    pub fn is_undo(self) -> bool {
        matches!(self, Self::Undo | Self::Passed)
    }
}

/// The greatest number of runs of a [`Written`]: a file of some 2 MiB. A larger set is stored coarser.
const RUNS_MAX: usize = 100_000;

/// The blocks of a volume that its host has written and another one may not have received, after the host has given the volume up.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Written {
    /// The size of the volume in blocks.
    blocks: u64,
    /// First block and number of blocks of each run, in order.
    runs: Vec<(u64, u64)>,
}

impl Written {
    /// Returns the record of a set; of a larger set if this one has too many runs.
    pub fn of(set: &LayeredBitmap) -> Self {
        let coarse = coarsened(set, RUNS_MAX);
        let runs = coarse.runs().map(|run| (run.start.0, run.len())).collect();
        Self { blocks: set.blocks().0, runs }
    }

    /// Returns the set.
    pub fn set(&self) -> LayeredBitmap {
        let mut set = LayeredBitmap::new(BlockCount(self.blocks));
        for (start, count) in &self.runs {
            set.insert(BlockRange::new(*start, start.saturating_add(*count).min(self.blocks)));
        }
        set
    }
}

impl Record for Written {
    const HEADER: [u8; 8] = *b"STERNAW\x01";
}

impl Record for OwnerRecord {
    const HEADER: [u8; 8] = *b"STERNAO\x01";
}

impl Record for StandbyRecord {
    const HEADER: [u8; 8] = *b"STERNAB\x01";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_is_stored_and_never_smaller() {
        let mut set = LayeredBitmap::new(BlockCount(1 << 20));
        (0..300_000).for_each(|block| {
            set.insert(BlockRange::new(3 * block, 3 * block + 1));
        });
        let stored = Written::decode(&Written::of(&set).encode()).unwrap();
        let mut left_out = set.clone();
        left_out.subtract(&stored.set());
        assert!(left_out.is_empty() && stored.runs.len() <= RUNS_MAX);
        let few = LayeredBitmap::new(BlockCount(7));
        assert_eq!(Written::of(&few).set(), few);
        let beyond = Written { blocks: 4, runs: vec![(2, u64::MAX)] };
        assert_eq!(beyond.set().count(), 2);
    }

    #[test]
    fn damaged_records_and_those_of_the_other_side_are_not_read() {
        let record = OwnerRecord {
            standby: StandbyId(7),
            generation: Generation(3),
            life: LifeId(9),
            acknowledged: Some(Epoch(41)),
            numbered_through: Epoch(64),
        };
        let bytes = record.encode();
        assert_eq!(OwnerRecord::decode(&bytes), Some(record));
        assert_eq!(StandbyRecord::decode(&bytes), None);
        for byte in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[byte] ^= 1;
            assert_eq!(OwnerRecord::decode(&damaged), None, "byte {byte}");
            assert_eq!(OwnerRecord::decode(&bytes[..byte]), None, "{byte} bytes");
        }
    }
}
