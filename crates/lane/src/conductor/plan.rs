//! What a migration is to do, and within which limits.

use std::rc::Rc;
use std::time::Duration;

use block::{BlockDevice, ZeroMode};
use migration::journal::ImageLocation;
use migration::{MigrationId, PacingSettings};

use crate::volume::Volume;

/// What is to be migrated, and within which limits.
pub struct Plan {
    /// Identity of the migration; already in the journal as started.
    pub migration: MigrationId,
    /// The volumes; all move, or none.
    pub volumes: Vec<PlannedVolume>,
    /// Whether the source images are kept.
    pub keep_source: bool,
    /// How much is copied at once, for each volume.
    pub pacing: PacingSettings,
    /// Time limits.
    pub limits: TimeLimits,
}

/// One volume of a plan.
pub struct PlannedVolume {
    /// The volume.
    pub volume: Rc<Volume>,
    /// The store it goes to: as large as the volume.
    pub target: Rc<dyn BlockDevice>,
    /// What that store holds now.
    pub target_content: TargetContent,
    /// How zeroes are written to it.
    pub zeroes: ZeroMode,
    /// Where its bytes are now.
    pub source_image: ImageLocation,
    /// Where they will be.
    pub target_image: ImageLocation,
}

/// What a target store holds before anything is copied to it. Whoever made or opened it knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TargetContent {
    /// It reads as zeroes: nothing is done where the volume has holes.
    Zero,
    /// It may hold anything, as a device does that was used before: zeroes are written where the volume has holes.
    Unknown,
}

/// How long things may take.
#[derive(Clone, Copy, Debug)]
pub struct TimeLimits {
    /// How long a guest's write may be held, or wait for the target (design §5.7).
    pub mirror_wait_max: Duration,
    /// How long the gates may be closed before the commit point.
    pub switch_over_max: Duration,
    /// How long a target may leave a request unanswered before the migration fails.
    pub no_progress_max: Duration,
}

impl Default for TimeLimits {
    fn default() -> Self {
        Self {
            mirror_wait_max: Duration::from_secs(1),
            switch_over_max: Duration::from_millis(500),
            no_progress_max: Duration::from_secs(300),
        }
    }
}
