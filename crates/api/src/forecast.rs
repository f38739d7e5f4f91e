//! What to expect of a migration, and how sure that is.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The expected course of a migration.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Forecast {
    /// Its duration in seconds, without waits for its turn.
    pub seconds: Expected,
    /// The bytes that it sends: disks, memory, and what guests write meanwhile.
    pub bytes: Expected,
    /// How long guests are held at its end, in milliseconds.
    pub downtime_ms: Expected,
    /// How many of a hundred such migrations end by themselves. Below 100 guests may write faster than it copies.
    pub ends_percent: u8,
    /// The number of earlier migrations of the same way that it was learned from; 0: it rests on a rate alone.
    pub learned_from: u32,
    /// Whether that rate was measured just now, by reading and writing for a moment.
    #[serde(default)]
    pub probed: bool,
}

/// A figure that is not known exactly: of ten outcomes one lies below `least`, and one above `most`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Expected {
    /// A tenth of the outcomes lies below it.
    pub least: f64,
    /// Half of the outcomes lie below it.
    pub middle: f64,
    /// A tenth of the outcomes lies above it.
    pub most: f64,
}
