//! What all recorded migrations have moved and waited for since the daemon began.

use std::collections::BTreeMap;
use std::time::Duration;

use lane::{Recorded, Sample};

/// Sums over all samples.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tallies {
    /// Bytes that movers wrote to targets.
    pub(crate) bytes_copied: u64,
    /// Bytes of guest writes that targets took.
    pub(crate) bytes_mirrored: u64,
    /// Bytes that were found to be zero.
    pub(crate) bytes_zero: u64,
    /// How long migrations have stood still, by what they waited for.
    pub(crate) waits: BTreeMap<&'static str, Duration>,
}

impl Tallies {
    pub(super) fn add(&mut self, recorded: &Recorded) {
        for sample in &recorded.samples {
            self.bytes_copied += sample.bytes_copied;
            self.bytes_mirrored += sample.bytes_mirrored;
            self.bytes_zero += sample.bytes_zero;
            if let Some(reason) = stood_still_for(sample) {
                *self.waits.entry(reason).or_default() += sample.guest.length;
            }
        }
    }
}

/// What the migration waited for while nothing of it went on.
pub(super) fn stood_still_for(sample: &Sample) -> Option<&'static str> {
    let stood_still = sample.bytes_copied + sample.bytes_mirrored + sample.bytes_zero == 0;
    sample.waits_for.filter(|_| stood_still)
}
