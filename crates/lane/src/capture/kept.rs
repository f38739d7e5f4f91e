//! Payloads of guests' writes that are kept in memory, newest per block, by epoch.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use chronicle::{BlockRange, Epoch};
use standby::VolumeIndex;

use super::BLOCK_BYTES;

type Blocks = HashMap<(VolumeIndex, u64), Arc<[u8]>>;

/// The payloads. The machine limits how many there are.
#[derive(Default)]
pub(super) struct Kept(BTreeMap<Epoch, Blocks>);

impl Kept {
    /// Keeps blocks of a payload whose first byte is that of block `first`. They replace what is kept of the epoch there.
    pub(super) fn keep(
        &mut self,
        epoch: Epoch,
        volume: VolumeIndex,
        blocks: BlockRange,
        bytes: &[u8],
        first: u64,
    ) {
        let kept = self.0.entry(epoch).or_default();
        for block in blocks.iter() {
            let start = (block.0.saturating_sub(first) * BLOCK_BYTES) as usize;
            if let Some(bytes) = bytes.get(start..start + BLOCK_BYTES as usize) {
                kept.insert((volume, block.0), bytes.into());
            }
        }
    }

    /// Moves what is kept of an epoch to a later one, except for blocks that are kept there.
    pub(super) fn merge(&mut self, from: Epoch, into: Epoch) {
        let Some(older) = self.0.remove(&from) else { return };
        let newer = self.0.entry(into).or_default();
        for (block, bytes) in older {
            newer.entry(block).or_insert(bytes);
        }
    }

    /// Drops what is kept of blocks that are about to change in the open epoch.
    pub(super) fn drop_changing(&mut self, open: Epoch, volume: VolumeIndex, blocks: BlockRange) {
        let Some(kept) = self.0.get_mut(&open) else { return };
        if blocks.len() > kept.len() as u64 {
            kept.retain(|(other, block), _| {
                *other != volume || *block < blocks.start.0 || *block >= blocks.end.0
            });
            return;
        }
        for block in blocks.iter() {
            kept.remove(&(volume, block.0));
        }
    }

    pub(super) fn release(&mut self, epoch: Epoch) {
        self.0.remove(&epoch);
    }

    /// Returns the payload of blocks that are kept.
    pub(super) fn payload(&self, epoch: Epoch, volume: VolumeIndex, blocks: BlockRange) -> Vec<u8> {
        let kept = self.0.get(&epoch);
        let mut payload = Vec::with_capacity((blocks.len() * BLOCK_BYTES) as usize);
        for block in blocks.iter() {
            match kept.and_then(|kept| kept.get(&(volume, block.0))) {
                Some(bytes) => payload.extend_from_slice(bytes),
                None => debug_assert!(false, "the machine orders only what is kept"),
            }
        }
        payload
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_payload_of_a_block_is_kept_and_an_older_epoch_does_not_replace_it() {
        let (mut kept, volume) = (Kept::default(), VolumeIndex(0));
        let bytes = |value: u8, blocks: usize| vec![value; blocks * BLOCK_BYTES as usize];
        kept.keep(Epoch(1), volume, BlockRange::new(4, 6), &bytes(1, 2), 4);
        kept.keep(Epoch(2), volume, BlockRange::new(5, 6), &bytes(2, 3), 3);
        kept.merge(Epoch(1), Epoch(2));
        assert_eq!(
            kept.payload(Epoch(2), volume, BlockRange::new(4, 6)),
            [bytes(1, 1), bytes(2, 1)].concat()
        );
        kept.drop_changing(Epoch(2), volume, BlockRange::new(5, 100));
        kept.drop_changing(Epoch(2), VolumeIndex(1), BlockRange::new(4, 5));
        assert_eq!(kept.payload(Epoch(2), volume, BlockRange::new(4, 5)), bytes(1, 1));
        kept.drop_changing(Epoch(2), volume, BlockRange::new(4, 5));
        assert!(kept.0[&Epoch(2)].is_empty());
        kept.release(Epoch(2));
        assert!(kept.0.is_empty());
    }
}
