//! The events of a simulation: as a hash that two runs of a seed must share, and as printed lines.

use std::cell::Cell;
use std::time::Duration;

pub(crate) struct Trace {
    hash: Cell<u64>,
    audience: Audience,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Audience {
    Nobody,
    StandardOutput,
}

impl Trace {
    pub(crate) fn new(audience: Audience) -> Self {
        Self { hash: Cell::new(0xCBF2_9CE4_8422_2325), audience }
    }

    pub(crate) fn hash(&self) -> u64 {
        self.hash.get()
    }

    pub(crate) fn note(&self, at: Duration, what: &'static str, first: u64, second: u64) {
        let nanos = u64::try_from(at.as_nanos()).unwrap_or(u64::MAX);
        let name = what.bytes().fold(0u64, |sum, byte| sum.wrapping_mul(31).wrapping_add(u64::from(byte)));
        let mut hash = self.hash.get();
        for word in [nanos, name, first, second] {
            hash = (hash ^ word).wrapping_mul(0x0000_0100_0000_01B3).rotate_left(29);
        }
        self.hash.set(hash);
        self.say(at, || format!("{what} {first} {second}"));
    }

    pub(crate) fn say(&self, at: Duration, text: impl FnOnce() -> String) {
        if self.audience == Audience::StandardOutput {
            println!("{:>14.6} ms  {}", at.as_secs_f64() * 1e3, text());
        }
    }
}
