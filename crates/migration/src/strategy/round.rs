//! A round of a copying, for reports.

use std::time::Duration;

/// One round of a strategy that copies in rounds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Round {
    /// The number of blocks copied.
    pub blocks: u64,
    /// The bytes written to the target for them.
    pub bytes: u64,
    /// The duration of the round.
    pub took: Duration,
    /// The bytes of blocks written by guests meanwhile, for the next round.
    pub dirtied: u64,
    /// The bytes of hot blocks that wait for a later round.
    pub put_off: u64,
}
