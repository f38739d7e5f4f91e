//! A strategy as users order it, and its form on one host or between two hosts.

use std::time::Duration;

use super::{Distance, HotBlocks, Otherwise, Recording, Strategy};

/// A strategy as it is ordered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    /// One pass, while guest writes to copied blocks go to both stores; towards another host, writes to hot blocks may follow.
    Mirror(HotBlocks),
    /// Rounds, while guest writes go to the source only.
    Tracking(Recording, HotBlocks, Diverging),
    /// A limited number of rounds; the rest follows the volume. Only towards another host.
    PostCopy {
        /// The most rounds; 0: nothing is copied beforehand.
        rounds_max: u32,
    },
}

/// What happens to rounds that do not converge.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Diverging {
    /// The migration fails, and the volume stays.
    #[default]
    Fails,
    /// The volume is mirrored from then on.
    IsMirrored,
}

impl Default for Choice {
    fn default() -> Self {
        Self::Mirror(HotBlocks::default())
    }
}

impl Choice {
    /// Returns the name for orders and reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Mirror(_) => "mirror",
            Self::Tracking(..) => "tracking",
            Self::PostCopy { rounds_max: 0 } => "post-copy",
            Self::PostCopy { .. } => "three-phase",
        }
    }

    /// Returns whether volumes are handed over incomplete.
    pub fn leaves_blocks(self) -> bool {
        matches!(self, Self::PostCopy { .. })
    }

    /// Returns the strategy between two stores of one host. The rest may take `drain_max` to arrive behind closed gates.
    pub fn here(self, drain_max: Duration) -> Strategy {
        match self {
            Self::Mirror(_) => Strategy::Mirror,
            Self::Tracking(recording, hot, diverging) => {
                let otherwise = match diverging {
                    Diverging::Fails => Otherwise::Fail,
                    Diverging::IsMirrored => Otherwise::Mirror,
                };
                Strategy::Tracking { recording, hot, distance: Distance::Near, drain_max, otherwise }
            }
            // Never offered: on one host an early handover gains nothing.
            Self::PostCopy { .. } => Strategy::Mirror,
        }
    }

    /// Returns the strategy towards another host, where guests do not wait for the target. `round_trip` is the time there and
    /// back, `switch_over_max` the limit for closed gates.
    pub fn away(
        self,
        buffer_bytes_max: u64,
        drain_max: Duration,
        round_trip: Duration,
        switch_over_max: Duration,
    ) -> Strategy {
        match self {
            Self::Mirror(hot) => {
                Strategy::AsynchronousMirror { buffer_bytes_max, drain_max: switch_over_max / 2, hot }
            }
            // Data sent behind the gate needs that long to arrive.
            Self::Tracking(recording, hot, diverging) => {
                let otherwise = match diverging {
                    Diverging::Fails => Otherwise::Fail,
                    Diverging::IsMirrored => {
                        Otherwise::AsynchronousMirror { buffer_bytes_max, drain_max: switch_over_max / 2 }
                    }
                };
                let (distance, drain_max) = (Distance::Far, drain_max + round_trip);
                Strategy::Tracking { recording, hot, distance, drain_max, otherwise }
            }
            Self::PostCopy { rounds_max } => Strategy::PostCopy { rounds_max },
        }
    }
}
