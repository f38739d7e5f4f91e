//! A guest as the forecast sees it: how fast it writes, and how often to the same blocks.

use crate::random::Random;
use crate::writing::{Window, Written};

/// The size of a write where none is known.
const WRITE_BYTES: u64 = 16 << 10;

/// How the guests of a volume write.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Load {
    /// The bytes that they write in a second.
    pub bytes_per_second: f64,
    /// The bytes of one write.
    pub write_bytes: u64,
    /// The bytes that they write again and again.
    pub hot_bytes: u64,
    /// The part of the writes that go there; the others go to blocks that they have not written for long.
    pub hot_part: f64,
}

impl Load {
    /// Returns the load that explains what was written. Where the windows differ, as with bursts, it lies between them.
    pub(crate) fn of(written: &Written, random: &mut Random) -> Self {
        let known = || written.windows.iter().filter(|window| window.seconds > 0.0);
        let rates: Vec<f64> = known().skip(1).map(rate).collect();
        let (least, most) = rates
            .iter()
            .fold((f64::INFINITY, 0.0_f64), |(least, most), rate| (least.min(*rate), most.max(*rate)));
        if most <= 0.0 {
            return Self::default();
        }
        let bytes_per_second = least + (most - least) * random.part();
        let writes: u64 = known().map(|window| window.writes).sum();
        let bytes: u64 = known().map(|window| window.bytes).sum();
        let (cold, hot_bytes) = split(written);
        let mean: f64 = known().next_back().map_or(most, rate);
        Self {
            bytes_per_second,
            write_bytes: bytes.checked_div(writes).unwrap_or(WRITE_BYTES).clamp(4 << 10, 1 << 20),
            hot_bytes,
            hot_part: (1.0 - cold / mean.max(1.0)).clamp(0.0, 1.0),
        }
    }
}

fn rate(window: &Window) -> f64 {
    window.bytes as f64 / window.seconds
}

/// Splits what was written into the bytes a second of new blocks, and the bytes of those that are written again and again.
fn split(written: &Written) -> (f64, u64) {
    let mut windows = written.windows.iter().rev().filter(|window| window.seconds > 0.0);
    let Some(long) = windows.next() else { return (0.0, 0) };
    let Some(short) = windows.find(|window| window.seconds < long.seconds / 2.0) else {
        // A single window cannot tell them apart: all of it is new, once.
        return (long.distinct_bytes as f64 / long.seconds, 0);
    };
    let more = long.distinct_bytes.saturating_sub(short.distinct_bytes) as f64;
    let cold = more / (long.seconds - short.seconds);
    // Not negative: a float becomes at least 0.
    (cold, (short.distinct_bytes as f64 - cold * short.seconds) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn written(distinct: [u64; 4], bytes: [u64; 4]) -> Written {
        let seconds = [1.0, 10.0, 60.0, 600.0];
        let window = |index: usize| Window {
            seconds: seconds[index],
            distinct_bytes: distinct[index],
            bytes: bytes[index],
            writes: bytes[index] / (16 << 10),
        };
        Written { windows: [window(0), window(1), window(2), window(3)] }
    }

    #[test]
    fn a_working_set_is_told_from_blocks_that_are_written_once() {
        // 10 MiB a second: 9 over a set of 50 MiB, and 1 to new blocks.
        let written =
            written([10, 55, 110, 650].map(|mib| mib * MIB), [10, 100, 600, 6000].map(|mib| mib * MIB));
        let load = Load::of(&written, &mut Random::new(1));
        assert!((load.bytes_per_second / MIB as f64 - 10.0).abs() < 0.1, "{load:?}");
        assert!((0.88..0.92).contains(&load.hot_part), "{load:?}");
        assert!((45 * MIB..55 * MIB).contains(&load.hot_bytes), "{load:?}");
        assert_eq!(load.write_bytes, 16 << 10);
    }

    #[test]
    fn nobody_who_writes_is_no_load() {
        assert_eq!(Load::of(&Written::default(), &mut Random::new(1)), Load::default());
        let idle = written([0; 4], [0; 4]);
        assert_eq!(Load::of(&idle, &mut Random::new(1)), Load::default());
    }
}
