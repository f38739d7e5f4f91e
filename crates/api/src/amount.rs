//! Human-readable amounts of bytes, for messages of the daemon and tables of the commands.

use std::fmt;

/// A number of bytes, shown with one digit behind the point and a unit of 1,024: `4.0 GiB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bytes(pub u64);

const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];

impl fmt::Display for Bytes {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 < 1024 {
            return write!(formatter, "{} B", self.0);
        }
        let mut value = self.0 as f64 / 1024.0;
        let mut unit = 0;
        // 1,023.95 would be printed as 1024.0.
        while value >= 1023.95 && unit + 1 < UNITS.len() {
            value /= 1024.0;
            unit += 1;
        }
        write!(formatter, "{value:.1} {}", UNITS[unit])
    }
}
