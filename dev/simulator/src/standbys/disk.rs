//! A volume or an image: a number a block, below a cache that loses unflushed blocks in any subset.

use crate::random::Random;

#[derive(Clone, Copy, Debug, Default)]
struct Block {
    visible: u64,
    durable: u64,
}

/// Blocks and their content. A block that reads as zeroes has 0.
#[derive(Clone, Debug, Default)]
pub(super) struct Disk {
    blocks: Vec<Block>,
    /// Counts changes: the identity of an image.
    pub(super) version: u64,
}

/// What a flush that is under way makes durable.
pub(super) type Flush = Vec<(usize, u64)>;

impl Disk {
    pub(super) fn new(blocks: u64) -> Self {
        let mut disk = Self::default();
        disk.resize(blocks);
        disk
    }

    pub(super) fn len(&self) -> u64 {
        self.blocks.len() as u64
    }

    /// Changes the size. New blocks read as zeroes.
    pub(super) fn resize(&mut self, blocks: u64) {
        self.version += 1;
        self.blocks.resize(blocks as usize, Block::default());
    }

    pub(super) fn read(&self, block: u64) -> u64 {
        self.blocks.get(block as usize).map_or(0, |block| block.visible)
    }

    pub(super) fn write(&mut self, block: u64, value: u64) {
        self.version += 1;
        if let Some(block) = self.blocks.get_mut(block as usize) {
            block.visible = value;
        }
    }

    pub(super) fn content(&self) -> Vec<u64> {
        self.blocks.iter().map(|block| block.visible).collect()
    }

    pub(super) fn begin_flush(&self) -> Flush {
        let dirty = self.blocks.iter().enumerate().filter(|(_, block)| block.visible != block.durable);
        dirty.map(|(index, block)| (index, block.visible)).collect()
    }

    pub(super) fn end_flush(&mut self, flush: &Flush) {
        for (index, value) in flush {
            if let Some(block) = self.blocks.get_mut(*index) {
                block.durable = *value;
            }
        }
    }

    /// Some of what was to be flushed is lost, and reads as before.
    pub(super) fn fail_flush(&mut self, random: &mut Random) {
        for block in &mut self.blocks {
            if block.visible != block.durable && random.percent(50) {
                block.visible = block.durable;
            }
        }
        self.version += 1;
    }

    pub(super) fn cut_power(&mut self, random: &mut Random) {
        for block in &mut self.blocks {
            if random.percent(50) {
                block.visible = block.durable;
            }
            block.durable = block.visible;
        }
        self.version += 1;
    }

    /// All of it is durable.
    pub(super) fn sync(&mut self) {
        self.blocks.iter_mut().for_each(|block| block.durable = block.visible);
    }
}
