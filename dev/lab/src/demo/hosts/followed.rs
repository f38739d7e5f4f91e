//! The blocks that followed a disk after its handover (`post-copy`, `three-phase`).

use std::fmt;

use api::Phase;
use serde::Serialize;

use super::travel::Way;
use crate::demo::report::{Bytes, row, seconds};

/// The time of an early handover, and the bytes that followed it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Followed {
    /// Time from the order to the handover; the longer one of several migrations.
    pub handed_over_seconds: f64,
    /// Bytes that followed the disk, in all migrations.
    pub bytes_followed: u64,
    /// The part of these bytes that the guest waited for.
    pub bytes_pulled: u64,
}

impl Followed {
    /// Returns the figures of one migration; `None` if the disk was complete at its handover.
    pub(super) fn of(way: &Way) -> Option<Self> {
        let recording = way.history.as_ref()?.recording.as_ref()?;
        let filling = recording.phases.iter().find(|entered| entered.phase == Phase::Filling)?;
        Some(Self {
            handed_over_seconds: filling.at_ms / 1000.0,
            bytes_followed: recording.decisions.bytes_followed,
            bytes_pulled: recording.decisions.bytes_pulled,
        })
    }

    pub(super) fn of_all(ways: impl IntoIterator<Item = Option<Self>>) -> Option<Self> {
        ways.into_iter().flatten().reduce(|one, other| Self {
            handed_over_seconds: one.handed_over_seconds.max(other.handed_over_seconds),
            bytes_followed: one.bytes_followed + other.bytes_followed,
            bytes_pulled: one.bytes_pulled + other.bytes_pulled,
        })
    }

    pub(super) fn write(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { handed_over_seconds, bytes_followed, bytes_pulled } = *self;
        let remark = format!(
            "after the order; {} followed, {} of it were waited for",
            Bytes(bytes_followed),
            Bytes(bytes_pulled)
        );
        row(formatter, "  handed over", &seconds(handed_over_seconds), &remark)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ways_are_put_together_and_those_without_are_left_out() {
        let way = |handed_over_seconds, bytes_pulled| {
            Some(Followed { handed_over_seconds, bytes_followed: 100, bytes_pulled })
        };
        let all = Followed::of_all([way(0.5, 1), None, way(0.2, 2)]);
        assert_eq!(all, Some(Followed { handed_over_seconds: 0.5, bytes_followed: 200, bytes_pulled: 3 }));
        assert_eq!(Followed::of_all([None, None]), None);
    }
}
