//! The chunks in flight: claimed, waiting for earlier writes, or being copied.

use std::time::Duration;

use chronicle::BlockRange;

use crate::strategy::{ChunkId, WriteId};

#[derive(Debug)]
pub(super) struct Chunk {
    pub(super) id: ChunkId,
    pub(super) blocks: BlockRange,
    pub(super) pass: Pass,
    /// Writes to these blocks that were submitted before the claim. The chunk is read only after all of them have ended, with
    /// success or error (design §5.1, hard case 6).
    pub(super) waits_for: Vec<WriteId>,
    pub(super) state: ChunkState,
    /// The number of target restarts at its submission.
    pub(super) restarts: u32,
}

/// Whether a chunk is copied for the first time, or again right after.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pass {
    /// Writes to the chunk go to the source at once, and are copied in a second pass.
    First,
    /// Writes to the chunk wait for it, so that it is not copied for ever (design §6 "Mirroring").
    Second,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ChunkState {
    Waiting,
    Copying { since: Duration },
}

/// The chunks in flight; at most the mover's depth, and their second passes.
#[derive(Debug, Default)]
pub(super) struct Chunks {
    chunks: Vec<Chunk>,
    next: u64,
}

impl Chunks {
    pub(super) fn len(&self) -> usize {
        self.chunks.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.chunks.is_empty()
    }

    pub(super) fn blocks(&self) -> u64 {
        self.chunks.iter().map(|chunk| chunk.blocks.len()).sum()
    }

    pub(super) fn ranges(&self) -> impl Iterator<Item = BlockRange> {
        self.chunks.iter().map(|chunk| chunk.blocks)
    }

    pub(super) fn push(&mut self, blocks: BlockRange, pass: Pass, waits_for: Vec<WriteId>, restarts: u32) {
        let id = ChunkId(self.next);
        self.next += 1;
        self.chunks.push(Chunk { id, blocks, pass, waits_for, state: ChunkState::Waiting, restarts });
    }

    pub(super) fn remove(&mut self, id: ChunkId) -> Option<Chunk> {
        let index = self.chunks.iter().position(|chunk| chunk.id == id)?;
        Some(self.chunks.remove(index))
    }

    pub(super) fn touch(&self, blocks: BlockRange) -> bool {
        self.chunks.iter().any(|chunk| chunk.blocks.overlaps(&blocks))
    }

    pub(super) fn first_touching(&self, blocks: BlockRange) -> Option<BlockRange> {
        let touching =
            self.chunks.iter().map(|chunk| chunk.blocks).filter(|claimed| claimed.overlaps(&blocks));
        touching.min_by_key(|claimed| claimed.start)
    }

    pub(super) fn second_pass_touches(&self, blocks: BlockRange) -> bool {
        self.chunks.iter().any(|chunk| chunk.pass == Pass::Second && chunk.blocks.overlaps(&blocks))
    }

    pub(super) fn write_ended(&mut self, write: WriteId) {
        for chunk in &mut self.chunks {
            chunk.waits_for.retain(|waited| *waited != write);
        }
    }

    pub(super) fn start_ready(&mut self, now: Duration) -> Vec<(ChunkId, BlockRange)> {
        let waiting = self.chunks.iter_mut().filter(|chunk| chunk.state == ChunkState::Waiting);
        let ready = waiting.filter(|chunk| chunk.waits_for.is_empty());
        ready
            .map(|chunk| {
                chunk.state = ChunkState::Copying { since: now };
                (chunk.id, chunk.blocks)
            })
            .collect()
    }

    pub(super) fn is_any_waiting(&self) -> bool {
        self.chunks.iter().any(|chunk| chunk.state == ChunkState::Waiting)
    }

    pub(super) fn copying_since(&self) -> Option<Duration> {
        let copying = self.chunks.iter().filter_map(|chunk| match chunk.state {
            ChunkState::Waiting => None,
            ChunkState::Copying { since } => Some(since),
        });
        copying.min()
    }

    /// Removes the chunks that have not been read yet, and returns their blocks.
    pub(super) fn abandon_waiting(&mut self) -> Vec<BlockRange> {
        let waiting = self.chunks.iter().filter(|chunk| chunk.state == ChunkState::Waiting);
        let blocks = waiting.map(|chunk| chunk.blocks).collect();
        self.chunks.retain(|chunk| chunk.state != ChunkState::Waiting);
        blocks
    }
}
