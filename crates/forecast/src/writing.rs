//! Records what the guests of a volume have written in the last 1, 10, 60 and 600 seconds.
//!
//! ```text
//!   a write ──► this second ──full──► 10 seconds ──full──► a minute
//!                 the last 10           the last 6           the last 10
//! ```
//! It keeps 26 sketches of a kibibyte, whatever the volume's size, and costs a few nanoseconds a block.

use std::collections::VecDeque;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::sketch::Sketch;

/// The unit in which distinct data is counted.
const UNIT_BYTES: u64 = 4096;
/// Each level keeps this many full buckets, of this many buckets of the level below.
const KEPT: [(usize, u64); 3] = [(10, 1), (6, 10), (10, 6)];
/// After a silence of this many seconds nothing of before is in any window.
const FORGOTTEN: u64 = 660;
/// The most units of one write that are looked at: more of it tell nothing new, and cost time.
const UNITS_MAX: u64 = 4096;

/// What was written in one window of time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Window {
    /// How much of the window has been seen, in seconds.
    pub seconds: f64,
    /// The bytes of distinct blocks that were written, of 4 KiB each.
    pub distinct_bytes: u64,
    /// The bytes of all writes.
    pub bytes: u64,
    /// The number of writes.
    pub writes: u64,
}

/// What was written in the last 1, 10, 60 and 600 seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Written {
    /// The windows, the shortest first. A window that is longer than what has been seen is as the next shorter one.
    pub windows: [Window; 4],
}

impl Written {
    /// Returns the bytes written in a second, over the last ten.
    pub fn bytes_per_second(&self) -> f64 {
        let [_, ten, ..] = self.windows;
        if ten.seconds > 0.0 { ten.bytes as f64 / ten.seconds } else { 0.0 }
    }
}

/// A recorder of a volume's writes.
#[derive(Debug, Default)]
pub struct Writing {
    /// The second of the present bucket; `None` before the first write.
    second: Option<u64>,
    /// The seconds that have been seen since the first write, without long silences.
    seen: u64,
    levels: [Level; 3],
}

#[derive(Debug, Default)]
struct Level {
    present: Bucket,
    full: VecDeque<Bucket>,
}

#[derive(Clone, Debug, Default)]
struct Bucket {
    blocks: Sketch,
    bytes: u64,
    writes: u64,
}

impl Bucket {
    fn merge(&mut self, other: &Self) {
        self.blocks.merge(&other.blocks);
        self.bytes += other.bytes;
        self.writes += other.writes;
    }

    fn clear(&mut self) {
        self.blocks.clear();
        (self.bytes, self.writes) = (0, 0);
    }
}

impl Writing {
    /// Records a write, discard or zeroing of this many bytes.
    pub fn note(&mut self, now: Duration, offset: u64, bytes: u64) {
        self.advance(now);
        let [seconds, ..] = &mut self.levels;
        let first = offset / UNIT_BYTES;
        let end = offset.saturating_add(bytes).div_ceil(UNIT_BYTES).min(first.saturating_add(UNITS_MAX));
        (first..end).for_each(|unit| seconds.present.blocks.add(unit));
        seconds.present.bytes += bytes;
        seconds.present.writes += 1;
    }

    /// Returns what was written lately.
    pub fn written(&mut self, now: Duration) -> Written {
        if self.second.is_none() {
            return Written::default();
        }
        self.advance(now);
        let [seconds, tens, minutes] = &self.levels;
        let last = seconds.full.iter().take(1);
        // What is not full yet at a longer level is in full buckets of the shorter ones.
        let ten = seconds.full.iter();
        let minute = tens.full.iter().chain([&tens.present]);
        let longest = minutes.full.iter().chain([&minutes.present, &tens.present]);
        let of = |buckets: &mut dyn Iterator<Item = &Bucket>, length: u64| {
            let mut all = Bucket::default();
            buckets.for_each(|bucket| all.merge(bucket));
            Window {
                seconds: self.seen.min(length) as f64,
                distinct_bytes: (all.blocks.count() * UNIT_BYTES as f64) as u64,
                bytes: all.bytes,
                writes: all.writes,
            }
        };
        let mut windows = [
            of(&mut last.into_iter(), 1),
            of(&mut ten.into_iter(), 10),
            of(&mut minute.into_iter(), 60),
            of(&mut longest.into_iter(), 600),
        ];
        // The longer windows have a part of the present bucket as well.
        for (index, length) in [(2, 10), (3, 70)] {
            let (shorter, longer) = windows.split_at_mut(index);
            if let (Some(shorter), Some(longer)) = (shorter.last(), longer.first_mut())
                && self.seen <= length
            {
                *longer = *shorter;
            }
        }
        Written { windows }
    }

    fn advance(&mut self, now: Duration) {
        let second = now.as_secs();
        let Some(present) = self.second else {
            self.second = Some(second);
            return;
        };
        if second.saturating_sub(present) > FORGOTTEN {
            *self = Self { second: Some(second), ..Self::default() };
            return;
        }
        for passed in present..second {
            self.end_second(passed + 1);
        }
        self.second = Some(second.max(present));
    }

    /// Ends a second, and the longer buckets that are full with it.
    fn end_second(&mut self, next: u64) {
        self.seen += 1;
        let mut length = 1;
        let mut levels = self.levels.iter_mut().zip(KEPT).peekable();
        while let Some((level, (kept, times))) = levels.next() {
            length *= times;
            if !next.is_multiple_of(length) {
                break;
            }
            let oldest = if level.full.len() < kept { None } else { level.full.pop_back() };
            let mut empty = oldest.unwrap_or_default();
            empty.clear();
            let ended = std::mem::replace(&mut level.present, empty);
            if let Some((longer, _)) = levels.peek_mut() {
                longer.present.merge(&ended);
            }
            level.full.push_front(ended);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn second(number: u64) -> Duration {
        Duration::from_secs(number)
    }

    fn near(told: u64, expected: u64) -> bool {
        told.abs_diff(expected) <= expected / 8 + UNIT_BYTES
    }

    #[test]
    fn each_window_tells_what_is_distinct_in_it() {
        let mut writing = Writing::default();
        // A mebibyte a second, over eight mebibytes again and again.
        for now in 0..1000 {
            for part in 0..16 {
                writing.note(second(now), (now * MIB + part * (MIB / 16)) % (8 * MIB), MIB / 16);
            }
        }
        let Written { windows } = writing.written(second(1000));
        let distinct = windows.map(|window| window.distinct_bytes);
        for (told, expected) in distinct.into_iter().zip([MIB, 8 * MIB, 8 * MIB, 8 * MIB]) {
            assert!(near(told, expected), "{windows:?}");
        }
        assert_eq!(windows.map(|window| window.seconds), [1.0, 10.0, 60.0, 600.0]);
        let rates = windows.map(|window| window.bytes as f64 / window.seconds / MIB as f64);
        assert!(rates.iter().all(|rate| (0.8..1.2).contains(rate)), "{rates:?}");
    }

    #[test]
    fn what_is_young_tells_only_what_it_has_seen() {
        let mut writing = Writing::default();
        assert_eq!(writing.written(second(5)), Written::default());
        for now in 100..104 {
            writing.note(second(now), now * MIB, MIB);
        }
        let Written { windows } = writing.written(second(104));
        assert_eq!(windows.map(|window| window.seconds), [1.0, 4.0, 4.0, 4.0]);
        assert!(windows[1..].iter().all(|window| near(window.distinct_bytes, 4 * MIB)), "{windows:?}");
    }

    #[test]
    fn a_long_silence_ends_in_nothing() {
        let mut writing = Writing::default();
        writing.note(second(1), 0, MIB);
        assert_eq!(writing.written(second(30)).windows[1].bytes, 0);
        assert!(writing.written(second(30)).windows[2].bytes > 0);
        assert_eq!(writing.written(second(10_000)).windows[3].bytes, 0);
    }
}
