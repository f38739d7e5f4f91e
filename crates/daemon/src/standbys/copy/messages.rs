//! What the source sends, before the machine gets it; and what the machine's refusals mean to administrators.

use bytes::Bytes;
use chronicle::BlockCount;
use lane::capture::BLOCK_BYTES;
use standby::receiver::{Grown, Refusal};
use standby::wire::{Content, ToStandby};

use super::files::Room;

/// The largest number of blocks of a volume: 4 PiB.
const VOLUME_BLOCKS_MAX: u64 = 1 << 40;

/// Checks a message of another host before the machine gets it.
pub(super) fn check(message: &ToStandby, payload: &Bytes, sizes: &[BlockCount]) -> Result<(), &'static str> {
    match message {
        ToStandby::Extent { volume, blocks, content } => {
            let Some(size) = sizes.get(volume.index()) else {
                return Err("it names a volume that is not there");
            };
            if blocks.start >= blocks.end || blocks.end.0 > size.0 {
                return Err("its blocks are not in the volume");
            }
            let bytes = match content {
                Content::Payload => blocks.len() * BLOCK_BYTES,
                Content::Zeroes => 0,
            };
            if payload.len() as u64 == bytes { Ok(()) } else { Err("its payload has another length") }
        }
        ToStandby::Begin { sizes: new_sizes, .. } => {
            let is_valid = new_sizes.len() == sizes.len()
                && new_sizes.iter().zip(sizes).all(|(new, old)| new >= old && new.0 <= VOLUME_BLOCKS_MAX);
            if is_valid { Ok(()) } else { Err("its sizes are not those of the volumes") }
        }
        ToStandby::Offer { .. } | ToStandby::Seal { .. } | ToStandby::StillCurrent => {
            if payload.is_empty() {
                Ok(())
            } else {
                Err("it has a payload")
            }
        }
    }
}

pub(super) fn bytes_of(content: Content, payload: &Bytes) -> Option<&[u8]> {
    match content {
        Content::Payload => Some(payload),
        Content::Zeroes => None,
    }
}

pub(super) fn grown(room: Room) -> Grown {
    match room {
        Room::Enough => Grown::Yes,
        Room::TooLittle => Grown::No,
    }
}

/// Returns why an order was refused, for an administrator.
pub(in crate::standbys) fn words_of(refusal: Refusal) -> String {
    match refusal {
        Refusal::OwnerReachable => {
            "the host that has the volumes can be reached: move them here with sterna migrate there, or disconnect that host".to_owned()
        }
        Refusal::ForceNeeded => {
            "the host that has the volumes is silent, but it may still serve them".to_owned()
        }
        Refusal::TooOld(age) => {
            let seconds = age.as_secs();
            format!("the standby is {seconds} s old: what was written since would be lost; to accept that: --older-than-ok {seconds}s")
        }
        Refusal::NoRecoveryPoint => "the standby has no recovery point: it never had everything, or has lost it".to_owned(),
        Refusal::NoSuchPoint => "the standby has no such recovery point; list them with: sterna standby show".to_owned(),
        Refusal::Unsure => "this host's journal was restored, and the source has not confirmed the standby yet; if the source is lost: sterna standby promote".to_owned(),
        Refusal::Ended => "the standby was promoted already, or a migration uses it".to_owned(),
    }
}
