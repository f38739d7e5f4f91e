//! One seed: what is simulated of it, and what was found.

use crate::coverage::Struck;
use crate::fleet::tally::Tally;
use crate::scenario::Options;
use crate::trace::Audience;
use crate::world::Violation;
use crate::{fleet, grown, paused, sides, standing};

/// What a simulation has shown.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Finding {
    /// The rule that was broken; `None` if all were kept.
    pub(crate) violation: Option<Violation>,
    /// Guest requests that were answered.
    pub(crate) operations: u64,
    /// How often a daemon was hit before it served anything.
    pub(crate) recoveries_hit: u64,
    /// Which faults struck in which phases.
    pub(crate) struck: Struck,
    /// What happened between hosts besides.
    pub(crate) tally: Tally,
    /// What happened, as a number: the same for the same seed.
    pub(crate) hash: u64,
}

/// Runs the simulation of `seed`.
pub(crate) fn simulate(seed: u64, options: &Options, audience: Audience) -> Finding {
    let finding = fleet::simulate(seed, options, audience);
    let violation = finding
        .violation
        .or_else(|| paused::play(seed))
        .or_else(|| sides::play(seed))
        .or_else(|| standing::play(seed))
        .or_else(|| grown::play(seed));
    Finding { violation, ..finding }
}
