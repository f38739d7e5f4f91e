//! The move of a VM's memory, in figures and options that every hypervisor has.

use std::num::{NonZeroU8, NonZeroU64};
use std::time::Duration;

use super::state::MigrationStatus;

/// How a source moves the memory of its VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryOptions {
    /// The hypervisor pauses the VM once what is left would take no longer than this, by the bandwidth that it measures.
    pub downtime_target: Duration,
    /// The most that is sent in a second; `None` for as much as the stream takes.
    pub bandwidth_max_bytes_per_s: Option<NonZeroU64>,
    /// Which way it goes; the target must expect it the same way.
    pub transfer: MemoryTransfer,
}

impl MemoryOptions {
    /// As fast as one stream takes it, until the rest takes no longer than `downtime_target`.
    pub fn for_downtime(downtime_target: Duration) -> Self {
        Self { downtime_target, bandwidth_max_bytes_per_s: None, transfer: MemoryTransfer::default() }
    }
}

/// Which way memory goes; both sides must be told the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryTransfer {
    /// Streams for pages beside the main one, which is connected first; `None`: there is only the main one.
    ///
    /// They cannot be had together with [`MemoryMode::PostCopy`]: the main one is used alone then.
    pub side_streams: Option<NonZeroU8>,
    /// When the VM may run at the target.
    pub mode: MemoryMode,
}

impl MemoryTransfer {
    /// Streams beside the main one that are really used.
    pub fn side_streams(self) -> u8 {
        match self.mode {
            MemoryMode::PreCopy => self.side_streams.map_or(0, NonZeroU8::get),
            MemoryMode::PostCopy => 0,
        }
    }
}

/// When a VM may run at the target.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MemoryMode {
    /// When all of its memory is there.
    #[default]
    PreCopy,
    /// Before that, if its source is told so on the way ([`Hypervisor::begin_post_copy`](crate::Hypervisor::begin_post_copy)).
    PostCopy,
}

/// What has become of the wish that the rest of the memory follows later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PostCopyStart {
    /// The VM is paused, and reaches [`MigrationStatus::PreSwitchover`] soon; then
    /// [`switch_over`](crate::Hypervisor::switch_over) lets it run at the target.
    Begun,
    /// It was about to switch over already, with all of its memory: that goes on as if nothing had been wished.
    TooLate,
}

/// How far a move of memory is. What the hypervisor does not tell yet is zero.
#[derive(Clone, Debug, PartialEq)]
pub struct MemoryProgress {
    /// The status.
    pub status: MigrationStatus,
    /// All of the VM's memory, in bytes.
    pub total_bytes: u64,
    /// What must still be sent, as far as it is known to be dirty, in bytes.
    pub remaining_bytes: u64,
    /// What was sent so far, in bytes: dirty memory is sent again, and pages of zeroes are hardly sent at all.
    pub transferred_bytes: u64,
    /// How fast the guest makes memory dirty, as measured in the last round.
    pub dirty_bytes_per_s: u64,
    /// How often all dirty memory was looked for.
    pub rounds: u64,
    /// How much of their time is taken from the guest's processors, in percent.
    pub throttle_percent: u8,
    /// How fast it is sent.
    pub bandwidth_bytes_per_s: u64,
    /// How long the VM would be paused if it were paused now, in the hypervisor's judgement.
    pub expected_downtime_ms: u64,
    /// How long the VM was paused at the source; `None` before the move is completed.
    pub downtime_ms: Option<u64>,
    /// Why it has failed, in the hypervisor's words, if it has and the hypervisor knows.
    pub error: Option<String>,
}

impl MemoryProgress {
    /// A move with this status, of which no figures are known.
    pub fn with_status(status: MigrationStatus) -> Self {
        Self {
            status,
            total_bytes: 0,
            remaining_bytes: 0,
            transferred_bytes: 0,
            dirty_bytes_per_s: 0,
            rounds: 0,
            throttle_percent: 0,
            bandwidth_bytes_per_s: 0,
            expected_downtime_ms: 0,
            downtime_ms: None,
            error: None,
        }
    }
}
