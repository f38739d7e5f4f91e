//! A strategy as people order it, and what that is between two stores of a host, or two hosts.

use std::time::Duration;

use super::{Recording, Strategy};

/// A strategy as it is ordered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Choice {
    /// One pass, while guest writes to what is copied go to both stores.
    #[default]
    Mirror,
    /// Rounds, while guest writes go to the source only.
    Tracking(Recording),
}

impl Choice {
    /// Its name, as it is ordered and shown.
    pub fn name(self) -> &'static str {
        match self {
            Self::Mirror => "mirror",
            Self::Tracking(_) => "tracking",
        }
    }

    /// What that is between two stores of one host; what is left may take `drain_max` to arrive behind closed gates.
    pub fn here(self, drain_max: Duration) -> Strategy {
        match self {
            Self::Mirror => Strategy::Mirror,
            Self::Tracking(recording) => Strategy::Tracking { recording, drain_max },
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
            Self::Mirror => Strategy::AsynchronousMirror { buffer_bytes_max, drain_max: switch_over_max / 2 },
            // What is sent behind the gate is on its way for as long as that.
            Self::Tracking(recording) => Strategy::Tracking { recording, drain_max: drain_max + round_trip },
        }
    }
}
