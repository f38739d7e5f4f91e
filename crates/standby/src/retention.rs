//! Which recovery points are kept: `--keep last=6,hourly=24,daily=7`.

use crate::record::Point;

/// What an administrator keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keep {
    /// The newest points.
    pub last: usize,
    /// The newest point of each of the last hours that have one.
    pub hourly: usize,
    /// The newest point of each of the last days that have one.
    pub daily: usize,
}

impl Keep {
    /// What is kept if the order says nothing.
    pub const DEFAULT: Self = Self { last: 6, hourly: 24, daily: 7 };
    /// None beside the image: `--points none`.
    pub const NONE: Self = Self { last: 0, hourly: 0, daily: 0 };
}

const HOUR_MS: u64 = 3_600_000;
const DAY_MS: u64 = 24 * HOUR_MS;

/// Returns the points that are not kept, the oldest first. `points` is in order of time.
pub fn surplus(points: &[Point], keep: Keep) -> Vec<Point> {
    let mut kept = vec![false; points.len()];
    kept.iter_mut().rev().take(keep.last).for_each(|kept| *kept = true);
    for (length, count) in [(HOUR_MS, keep.hourly), (DAY_MS, keep.daily)] {
        let mut last = None;
        let newest_of_each = (0..points.len()).rev().filter(|index| {
            let period = points[*index].as_of_ms / length;
            last.replace(period) != Some(period)
        });
        newest_of_each.take(count).collect::<Vec<_>>().into_iter().for_each(|index| kept[index] = true);
    }
    points.iter().zip(kept).filter(|(_, kept)| !kept).map(|(point, _)| *point).collect()
}

#[cfg(test)]
mod tests {
    use chronicle::Epoch;

    use super::*;
    use crate::identity::{LifeId, StandbyId, Watermark};
    use crate::record::KeptBy;

    fn kept(minutes: &[u64], keep: Keep) -> Vec<u64> {
        let point = |minute: &u64| Point {
            watermark: Watermark { standby: StandbyId(1), life: LifeId(1), epoch: Epoch(*minute) },
            kept_by: KeptBy::Reflink,
            blocks: 1,
            as_of_ms: minute * 60_000,
        };
        let points: Vec<_> = minutes.iter().map(point).collect();
        let gone = surplus(&points, keep);
        points.iter().filter(|point| !gone.contains(point)).map(|point| point.watermark.epoch.0).collect()
    }

    #[test]
    fn the_newest_of_each_period_is_kept() {
        let minutes = [5, 50, 61, 119, 121, 122, 123];
        assert_eq!(kept(&minutes, Keep { last: 2, hourly: 0, daily: 0 }), [122, 123]);
        assert_eq!(kept(&minutes, Keep { last: 0, hourly: 3, daily: 0 }), [50, 119, 123]);
        assert_eq!(kept(&minutes, Keep { last: 2, hourly: 2, daily: 1 }), [119, 122, 123]);
        assert_eq!(kept(&[1, 2000, 4000], Keep { last: 0, hourly: 0, daily: 2 }), [2000, 4000]);
        assert_eq!(kept(&minutes, Keep::DEFAULT), [50, 61, 119, 121, 122, 123]);
        assert_eq!(kept(&minutes, Keep::NONE), [0; 0]);
    }
}
