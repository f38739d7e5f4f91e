//! Sums of what all recorded migrations have moved since the daemon began, and how long they waited.

use std::collections::BTreeMap;
use std::time::Duration;

use lane::{Recorded, Sample};

#[derive(Clone, Debug, Default)]
pub(crate) struct Tallies {
    pub(crate) bytes_copied: u64,
    /// Bytes of guest writes that were mirrored to targets.
    pub(crate) bytes_mirrored: u64,
    pub(crate) bytes_zero: u64,
    /// How long migrations made no progress, by reason.
    pub(crate) waits: BTreeMap<&'static str, Duration>,
}

impl Tallies {
    pub(crate) fn add(&mut self, recorded: &Recorded) {
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

/// Returns what a migration waited for during a sample without progress.
pub(crate) fn stood_still_for(sample: &Sample) -> Option<&'static str> {
    let stood_still = sample.bytes_copied + sample.bytes_mirrored + sample.bytes_zero == 0;
    sample.waits_for.filter(|_| stood_still)
}
