//! A strategy as people order it, and what that is between two stores of a host, or two hosts.

use std::time::Duration;

use super::{Distance, HotBlocks, Recording, Strategy};

/// A strategy as it is ordered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    /// One pass, while guest writes to what is copied go to both stores; towards another host those to hot blocks perhaps
    /// later.
    Mirror(HotBlocks),
    /// Rounds, while guest writes go to the source only.
    Tracking(Recording, HotBlocks),
    /// Rounds, at most so many, and the rest follows the volume. Only towards another host.
    PostCopy {
        /// Rounds at most; 0: nothing is copied beforehand.
        rounds_max: u32,
    },
}

impl Default for Choice {
    fn default() -> Self {
        Self::Mirror(HotBlocks::default())
    }
}

impl Choice {
    /// Its name, as it is ordered and shown.
    pub fn name(self) -> &'static str {
        match self {
            Self::Mirror(_) => "mirror",
            Self::Tracking(..) => "tracking",
            Self::PostCopy { rounds_max: 0 } => "post-copy",
            Self::PostCopy { .. } => "three-phase",
        }
    }

    /// Tells whether volumes are handed over with blocks missing.
    pub fn leaves_blocks(self) -> bool {
        matches!(self, Self::PostCopy { .. })
    }

    /// What that is between two stores of one host; what is left may take `drain_max` to arrive behind closed gates.
    pub fn here(self, drain_max: Duration) -> Strategy {
        match self {
            Self::Mirror(_) => Strategy::Mirror,
            Self::Tracking(recording, hot) => {
                Strategy::Tracking { recording, hot, distance: Distance::Near, drain_max }
            }
            // Nobody offers it: on one host nothing is gained by leaving first.
            Self::PostCopy { .. } => Strategy::Mirror,
        }
    }

    /// What that is towards another host: guests do not wait for it. `round_trip` is the way there and back,
    /// `switch_over_max` how long gates may be closed.
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
            // What is sent behind the gate is on its way for as long as that.
            Self::Tracking(recording, hot) => {
                let drain_max = drain_max + round_trip;
                Strategy::Tracking { recording, hot, distance: Distance::Far, drain_max }
            }
            Self::PostCopy { rounds_max } => Strategy::PostCopy { rounds_max },
        }
    }
}
