//! The pace of a migration: what limits it, and what that leaves to guests.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The impact of a migration that does not give way to guests, in percent.
pub const FULL_SPEED_PERCENT: u8 = 100;

/// Changes a migration that is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SetMigration {
    /// New limit of the copying in bytes a second, of volumes and memory together; an explicit `null` removes the
    /// limit, and without the field it stays.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "present")]
    #[schema(value_type = Option<u64>, minimum = 1)]
    pub bandwidth_bytes_per_second: Option<Option<u64>>,
    /// New impact on guests, as in [`crate::MigrateVolume::impact_percent`]; without it, it stays.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 100)]
    pub impact_percent: Option<u8>,
}

/// Tells a `null` from a missing field.
fn present<'de, D: serde::Deserializer<'de>>(field: D) -> Result<Option<Option<u64>>, D::Error> {
    Option::deserialize(field).map(Some)
}

/// What the pacers of a migration's disks do at present.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Pace {
    /// The part of their throughput, in percent, that guests of these disks lose to copies which wait for each answer; for other
    /// guests an upper bound.
    pub guests_lose_percent: f64,
    /// The rate of all copies of the disk together while guests are active, in bytes a second.
    pub bytes_per_second: f64,
}

/// The deadline of a migration, and what it demands of guests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Deadline {
    /// When it is to end, in milliseconds since 1970.
    pub unix_ms: u64,
    /// What guests may lose at present because of it, in percent, if that is more than was ordered; 100: it copies at full
    /// speed. `None`: what was ordered suffices.
    #[serde(default)]
    pub raised_to_percent: Option<u8>,
    /// Whether the copying is expected to end later, although nothing is left that would make it faster.
    #[serde(default)]
    pub late: bool,
}

/// What limits the copying.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum LimitedBy {
    /// The source's disk.
    SourceDisk,
    /// The target's disk.
    TargetDisk,
    /// Guests of the source's disk, which come first.
    SourceGuests,
    /// Guests of the target's disk, which come first.
    TargetGuests,
    /// The link to the other host.
    Link,
    /// Its limit, as ordered.
    Bandwidth,
    /// A short pause, in which guests are measured.
    Measuring,
}

impl LimitedBy {
    /// Returns it in words, for "limited by …".
    pub fn words(self) -> &'static str {
        match self {
            Self::SourceDisk => "the source's disk",
            Self::TargetDisk => "the target's disk",
            Self::SourceGuests => "the source's guests",
            Self::TargetGuests => "the target's guests",
            Self::Link => "the link",
            Self::Bandwidth => "its limit",
            Self::Measuring => "a pause to measure guests",
        }
    }
}
