//! The state of the volume's gate, and how long it has kept guests waiting.

use std::time::Duration;

/// How long requests take to arrive from a gate after it has opened.
const EMPTIES_WITHIN: Duration = Duration::from_millis(5);

#[derive(Debug, Default)]
pub(super) struct Gate {
    position: Position,
    closed: Duration,
    /// When it opened again; `None` if it is closed, or never was.
    opened: Option<Duration>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Position {
    #[default]
    Open,
    /// Closing, or closed.
    Closing,
    /// Closed, and the target is about to promise: nothing is sent to it.
    Frozen,
}

impl Gate {
    pub(super) fn is_open(&self) -> bool {
        self.position == Position::Open
    }

    pub(super) fn is_frozen(&self) -> bool {
        self.position == Position::Frozen
    }

    pub(super) fn close(&mut self, now: Duration) {
        if self.position == Position::Open {
            (self.closed, self.opened) = (now, None);
        }
        self.position = Position::Closing;
    }

    pub(super) fn freeze(&mut self) {
        if self.position == Position::Closing {
            self.position = Position::Frozen;
        }
    }

    pub(super) fn open(&mut self, now: Duration) {
        self.position = Position::Open;
        self.opened = Some(now);
    }

    /// Returns how long a write that arrives now may have waited at the gate.
    pub(super) fn held_for(&self, now: Duration) -> Duration {
        let was_held = self.opened.is_some_and(|opened| now <= opened + EMPTIES_WITHIN);
        if was_held { now.saturating_sub(self.closed) } else { Duration::ZERO }
    }
}
