//! The simulation of one seed, and its result.

use crate::coverage::{Given, Struck};
use crate::fleet::tally::Tally;
use crate::scenario::Options;
use crate::trace::Audience;
use crate::world::Violation;
use crate::{fleet, grown, paused, sides, standing};

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Finding {
    pub(crate) violation: Option<Violation>,
    pub(crate) operations: u64,
    pub(crate) recoveries_hit: u64,
    pub(crate) struck: Struck,
    pub(crate) given: Given,
    pub(crate) tally: Tally,
    /// A hash of the events: the same for the same seed.
    pub(crate) hash: u64,
}

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
