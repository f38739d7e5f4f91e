//! How the image of a volume looks from outside, and what is remembered of that while nobody holds it.
//!
//! ```text
//!   opened:  InUse, with what it is            killed: it may have changed, by us; it must be the same one, no older
//!   closed:  Closed, with how it looks exactly         it must look the same
//!   failed:  Failed, whatever it looks like             it may change without anybody writing to it
//!   unseen:  Unseen, its place does not say             it may be anything
//! ```
//! Nobody may write to an image that is served: it is locked. While its daemon is stopped anybody may.

use chronicle::{Epoch, StayId};
use serde::{Deserialize, Serialize};

use super::StayKey;
use crate::identity::VolumeId;

/// What the bytes begin with; the last is the version.
const HEADER: [u8; 8] = *b"STERNAI\x01";
const PREFIX_BYTES: usize = HEADER.len() + 4;
/// Longest record that is read: many times what one has.
pub const RECORD_BYTES_MAX: u64 = 64 << 10;

/// How an image looks from outside. What is in its parts is known to whoever looks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Look {
    /// What it is: another file in its place is another one, whatever it holds.
    pub which: Vec<u8>,
    /// Changes with each change of what it holds.
    pub state: Vec<u8>,
    /// When it was changed last, as far as it says so itself; somebody who puts a former content back may put it back too.
    pub changed_at: i128,
}

/// What is remembered of an image, durably.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ImageRecord {
    /// It has been closed in order: nobody has a reason to change it.
    Closed(Look),
    /// It is in use, or was when the daemon was killed.
    InUse {
        /// How it looked when it was opened; while a volume moves between stores of a host, also how its target did.
        looks: Vec<Look>,
        /// The first epoch in which this life of the daemon can have written to it.
        since: Epoch,
    },
    /// A flush of it has failed in this stay. What it holds of what was written before may go at any time, with nobody writing
    /// to it: no copy is told by it from then on, and it is none itself when its volume has left it.
    Failed,
    /// Its place does not say how it looks; no flush of it has failed.
    Unseen,
}

#[derive(Serialize, Deserialize)]
struct Stored {
    volume: VolumeId,
    stay: StayId,
    record: ImageRecord,
}

/// Tells whether an image of which this is remembered is what its volume was when it left. One of which nothing is
/// remembered may be anything.
pub fn vouches(record: Option<&ImageRecord>) -> bool {
    matches!(record, Some(ImageRecord::Closed(_) | ImageRecord::InUse { .. } | ImageRecord::Unseen))
}

impl ImageRecord {
    /// The bytes to store, of this stay.
    pub fn encode(&self, key: StayKey) -> Vec<u8> {
        let stored = Stored { volume: key.volume, stay: key.stay, record: self.clone() };
        // A buffer that grows takes everything.
        let body = postcard::to_stdvec(&stored).unwrap_or_default();
        let mut bytes = HEADER.to_vec();
        bytes.extend(crc32c::crc32c(&body).to_le_bytes());
        bytes.extend(body);
        bytes
    }

    /// Reads what [`ImageRecord::encode`] made of this stay; `None`: nothing is known. No bytes at all are [`ImageRecord::Failed`]:
    /// that can be said where there is no room for more.
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
        let look = Look { which: vec![1, 2], state: vec![3], changed_at: -5 };
        let in_use = ImageRecord::InUse { looks: vec![look.clone()], since: Epoch(7) };
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
