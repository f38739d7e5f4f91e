//! The pace of a migration: what limits it, and what that leaves to guests.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The impact of a migration that does not give way to guests, in percent.
pub const FULL_SPEED_PERCENT: u8 = 100;

/// What the pacers of a migration's disks do at present.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Pace {
    /// What limits the copying.
    pub limited_by: LimitedBy,
    /// The part of their throughput, in percent, that guests of these disks lose to copies which wait for each answer; for other
    /// guests an upper bound.
    pub guests_lose_percent: f64,
    /// The rate of all copies of the disk together while guests are active, in bytes a second.
    pub bytes_per_second: f64,
}

/// What limits the copying.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum LimitedBy {
    /// Nothing but the disks.
    Disk,
    /// Guests of the disks, which come first.
    Guests,
    /// A short pause, in which guests are measured.
    Measuring,
}
