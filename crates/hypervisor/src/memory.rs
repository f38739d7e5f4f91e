//! Options and figures for the transfer of a VM's memory, common to every hypervisor.

use std::num::{NonZeroU8, NonZeroU64};
use std::time::Duration;

use super::state::MigrationStatus;

/// The options of a source for the transfer of its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryOptions {
    /// The hypervisor pauses the VM once the rest would take at most this long, by the measured bandwidth.
    pub downtime_target: Duration,
    /// The limit of bytes per second; `None`: no limit.
    pub bandwidth_max_bytes_per_s: Option<NonZeroU64>,
    /// The way of the transfer; the target must expect the same.
    pub transfer: MemoryTransfer,
}

impl MemoryOptions {
    /// Returns options without a bandwidth limit, over one stream, until the rest takes at most `downtime_target`.
    pub fn for_downtime(downtime_target: Duration) -> Self {
        Self { downtime_target, bandwidth_max_bytes_per_s: None, transfer: MemoryTransfer::default() }
    }
}

/// The way of a transfer; both sides must use the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryTransfer {
    /// Further streams for pages beside the main one, which is connected first; `None`: only the main one.
    ///
    /// They cannot be combined with [`MemoryMode::PostCopy`], which uses the main one only.
    pub side_streams: Option<NonZeroU8>,
    /// When the VM may run at the target.
    pub mode: MemoryMode,
}

impl MemoryTransfer {
    /// Returns the number of further streams that are really used.
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
    /// Once all of its memory has arrived.
    #[default]
    PreCopy,
    /// Before that, if its source orders it during the transfer
    /// ([`Hypervisor::begin_post_copy`](crate::Hypervisor::begin_post_copy)).
    PostCopy,
}

/// The result of the order that the rest of the memory follows later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PostCopyStart {
    /// The VM is paused, and soon reaches [`MigrationStatus::PreSwitchover`]; then
    /// [`switch_over`](crate::Hypervisor::switch_over) lets it run at the target.
    Begun,
    /// It was already about to switch over with all of its memory, and continues with that.
    TooLate,
}

/// The progress of a transfer of memory. Figures that the hypervisor does not report yet are zero.
#[derive(Clone, Debug, PartialEq)]
pub struct MemoryProgress {
    /// The status of the transfer.
    pub status: MigrationStatus,
    /// All of the VM's memory, in bytes.
    pub total_bytes: u64,
    /// Known dirty memory that must still be sent, in bytes.
    pub remaining_bytes: u64,
    /// Bytes sent so far: dirty memory is sent again, and pages of zeroes take hardly any.
    pub transferred_bytes: u64,
    /// How fast the guest dirties memory, as measured in the last round.
    pub dirty_bytes_per_s: u64,
    /// How often all dirty memory was searched.
    pub rounds: u64,
    /// The part of time taken from the guest's processors, in percent.
    pub throttle_percent: u8,
    /// The measured bandwidth of the transfer.
    pub bandwidth_bytes_per_s: u64,
    /// The expected pause of the VM if it were paused now, by the hypervisor's estimate.
    pub expected_downtime_ms: u64,
    /// How long the VM was paused at the source; `None` before the transfer is complete.
    pub downtime_ms: Option<u64>,
    /// Why it has failed, in the hypervisor's words, if it gives a reason.
    pub error: Option<String>,
}

impl MemoryProgress {
    /// Returns the progress of a transfer with this status and no known figures.
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
