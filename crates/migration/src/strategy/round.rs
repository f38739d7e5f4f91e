//! A round of a copying, for reports.

use std::time::Duration;

/// One round of a strategy that copies in rounds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Round {
    /// Blocks that were copied in it.
    pub blocks: u64,
    /// Bytes that were written to the target for them.
    pub bytes: u64,
    /// How long it took.
    pub took: Duration,
    /// Bytes of blocks that guests wrote meanwhile: what the next round has to copy.
    pub dirtied: u64,
    /// Bytes of blocks that are written again and again, and wait for a later round.
    pub put_off: u64,
}
