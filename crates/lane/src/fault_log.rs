//! Logs the store failures that guests received, at a readable rate.
//!
//! A failing disk fails thousands of requests a second, and guests repeat them. The first failure is logged at once, then one
//! line each [`INTERVAL`], with the number of failures in between.

use std::cell::Cell;
use std::time::Duration;

use block::{ByteRange, IoError};

/// The time between two lines about one volume: short enough to follow an administrator's repair.
const INTERVAL: Duration = Duration::from_secs(10);

pub(crate) struct FaultLog {
    volume: String,
    /// When the latest line was written, by the lane's clock; `None`: never.
    said: Cell<Option<Duration>>,
    unsaid: Cell<u64>,
}

impl FaultLog {
    pub(crate) fn new(volume: String) -> Self {
        Self { volume, said: Cell::new(None), unsaid: Cell::new(0) }
    }

    /// Notes that a guest's request has failed; a flush concerns the whole volume. A client's own mistakes are not logged.
    pub(crate) fn note(&self, now: Duration, range: ByteRange, error: IoError) {
        let IoError::Os { .. } = error else { return };
        let Some(unsaid) = self.due(now) else { return };
        let ByteRange { offset, length } = range;
        tracing::warn!(volume = %self.volume, offset, length, %error, unsaid, "a guest's request failed in its store");
    }

    fn due(&self, now: Duration) -> Option<u64> {
        if self.said.get().is_some_and(|said| now.saturating_sub(said) < INTERVAL) {
            self.unsaid.set(self.unsaid.get() + 1);
            return None;
        }
        self.said.set(Some(now));
        Some(self.unsaid.take())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_fault_is_said_at_once_and_the_others_are_counted() {
        let log = FaultLog::new("v".to_owned());
        assert_eq!(log.due(Duration::from_secs(1)), Some(0));
        assert_eq!(log.due(Duration::from_secs(1)), None);
        assert_eq!(log.due(Duration::from_secs(10)), None);
        assert_eq!(log.due(Duration::from_secs(11)), Some(2));
        assert_eq!(log.due(Duration::from_secs(100)), Some(0));
    }
}
