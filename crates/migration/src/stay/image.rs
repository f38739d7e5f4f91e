//! The outward state of a volume's image, and its record while no daemon holds the image.
//!
//! ```text
//!   opened:  InUse, with its identity           killed: Sterna may have changed it; it must be the same one, no older,
//!                                                    and not changed after the last sign of life
//!   closed:  Closed, with its exact state               it must be in the same state
//!   failed:  Failed, in any state                       it may change without a write
//!   unseen:  Unseen, its kind shows no state            it may be anything
//! ```
//! A served image is locked against other writers. While its daemon is stopped, any program may write to it.

use chronicle::{Epoch, StayId};
use serde::{Deserialize, Serialize};

use super::StayKey;
use super::life::Run;
use crate::identity::VolumeId;

/// The first bytes of a record; the last one is the version.
const HEADER: [u8; 8] = *b"STERNAI\x02";
const PREFIX_BYTES: usize = HEADER.len() + 4;
/// The longest record that is read: many times the length of a real one.
pub const RECORD_BYTES_MAX: u64 = 64 << 10;

/// The outward state of an image. The code that inspects the image defines the parts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Look {
    /// The identity of the image: another file in its place differs, whatever its content.
    pub which: Vec<u8>,
    /// Changes whenever the content of the image changes.
    pub state: Vec<u8>,
    /// The time of the last change, as the image reports it; restoring earlier content may restore it too.
    pub changed_at: i128,
    /// The time of the last change of any kind, in nanoseconds since 1970: restoring content or attributes does not restore it.
    /// `None`: the place does not report it.
    #[serde(default)]
    pub touched_at: Option<i128>,
}

/// The durable record of an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ImageRecord {
    /// The image was closed in order: no program has a reason to change it.
    Closed(Look),
    /// The image is in use, or was when the daemon was killed.
    InUse {
        /// Its state when it was opened; during a move between stores, also the target's.
        looks: Vec<Look>,
        /// The first epoch in which this run of the daemon may have written to it.
        since: Epoch,
        /// The run of the daemon that has it in use.
        #[serde(default)]
        run: Run,
    },
    /// A flush of the image failed in this residency. Earlier writes may vanish at any time, without another writer. From then
    /// on no copy is based on it, and after its volume's departure it is no copy itself.
    Failed,
    /// The place does not report the image's state; no flush has failed.
    Unseen,
}

#[derive(Serialize, Deserialize)]
struct Stored {
    volume: VolumeId,
    stay: StayId,
    record: ImageRecord,
}

/// Returns whether an image with this record is unchanged since its volume left. Without a record it may be anything.
pub fn vouches(record: Option<&ImageRecord>) -> bool {
    matches!(record, Some(ImageRecord::Closed(_) | ImageRecord::InUse { .. } | ImageRecord::Unseen))
}

impl ImageRecord {
    /// Returns the bytes to store for this residency.
    pub fn encode(&self, key: StayKey) -> Vec<u8> {
        let stored = Stored { volume: key.volume, stay: key.stay, record: self.clone() };
        // A growing buffer accepts everything.
        let body = postcard::to_stdvec(&stored).unwrap_or_default();
        let mut bytes = HEADER.to_vec();
        bytes.extend(crc32c::crc32c(&body).to_le_bytes());
        bytes.extend(body);
        bytes
    }

    /// Parses the output of [`ImageRecord::encode`] for this residency; `None` if nothing is known. An empty file means
    /// [`ImageRecord::Failed`], which can be stored even without free space.
    pub fn decode(bytes: &[u8], key: StayKey) -> Option<Self> {
        if bytes.is_empty() {
            return Some(Self::Failed);
        }
        let (prefix, body) = bytes.split_at_checked(PREFIX_BYTES)?;
        let (header, checksum) = prefix.split_at_checked(HEADER.len())?;
        if *header != HEADER || *checksum != crc32c::crc32c(body).to_le_bytes() {
            return None;
        }
        let stored: Stored = postcard::from_bytes(body).ok()?;
        (StayKey { volume: stored.volume, stay: stored.stay } == key).then_some(stored.record)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_comes_back_and_only_for_its_stay() {
        let key = StayKey { volume: VolumeId([3; 16]), stay: StayId::Arrived(4) };
        let look = Look { which: vec![1, 2], state: vec![3], changed_at: -5, touched_at: Some(8) };
        let in_use = ImageRecord::InUse { looks: vec![look.clone()], since: Epoch(7), run: Run(9) };
        for record in [ImageRecord::Closed(look), in_use, ImageRecord::Failed, ImageRecord::Unseen] {
            let bytes = record.encode(key);
            assert_eq!(ImageRecord::decode(&bytes, key), Some(record));
            assert_eq!(ImageRecord::decode(&bytes, StayKey { stay: StayId::Made, ..key }), None);
            for index in 0..bytes.len() {
                let mut changed = bytes.clone();
                changed[index] ^= 1;
                assert_eq!(ImageRecord::decode(&changed, key), None, "byte {index}");
                let nothing = (index == 0).then_some(ImageRecord::Failed);
                assert_eq!(ImageRecord::decode(&bytes[..index], key), nothing);
            }
        }
    }
}
