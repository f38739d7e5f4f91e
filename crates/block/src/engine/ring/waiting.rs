//! How the thread of a ring waits: asleep in the kernel, or polling for a moment, as [`super::looking`] decides.

use std::task::Waker;
use std::time::Duration;

use super::looking::{Looking, Seen};
use super::queue::Queue;
use crate::engine::clock;

const PAUSES: u32 = 10;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Wait {
    No,
    Forever,
    /// Until one arrives, at most this long.
    AtMost(Duration),
}

impl Wait {
    fn is_longer_than(self, time: Duration) -> bool {
        match self {
            Self::No => false,
            Self::Forever => true,
            Self::AtMost(limit) => limit > time,
        }
    }

    fn less(self, time: Duration) -> Self {
        match self {
            Self::No | Self::Forever => self,
            Self::AtMost(limit) if limit > time => Self::AtMost(limit - time),
            Self::AtMost(_) => Self::No,
        }
    }
}

/// Submits, waits and collects; polls before or after sleeping where that is worthwhile. Appends the tasks to wake to `woken`.
pub(super) fn wait_and_look(queue: &mut Queue, looking: &mut Looking, wait: Wait, woken: &mut Vec<Waker>) {
    let (began, busy_since, operations) = (clock::now(), queue.busy_since(), queue.file_operations());
    let elapsed = |since| clock::now().saturating_sub(since);
    let mut seen = if wait == Wait::No { Seen::Awake } else { Seen::Asleep };
    if let Some(plan) = looking.plan(operations, began.saturating_sub(busy_since))
        && wait.is_longer_than(plan.sleep + plan.look)
    {
        let first = if plan.sleep.is_zero() { Wait::No } else { Wait::AtMost(plan.sleep) };
        queue.enter(first, woken);
        if woken.is_empty() {
            if !plan.sleep.is_zero() {
                looking.woke_up(elapsed(began).saturating_sub(plan.sleep));
            }
            let (time, found) = look(queue, plan.look);
            looking.looked(plan.expected, time, found);
            if found {
                seen = Seen::Awake;
            }
        } else if first == Wait::No {
            seen = Seen::Awake;
        }
    }
    if woken.is_empty() {
        // Collects the found completions without waiting.
        queue.enter(wait.less(elapsed(began)), woken);
    }
    let ended = queue.take_ended();
    if ended > 0 {
        looking.ended(ended, operations, queue.busy_since().saturating_sub(busy_since), seen);
    }
}

/// Polls for completions without entering the kernel; returns the time, and whether there are any.
fn look(queue: &mut Queue, limit: Duration) -> (Duration, bool) {
    let began = clock::now();
    let (time, found) = loop {
        let (found, time) = (queue.has_completions(), clock::now().saturating_sub(began));
        if found || time >= limit {
            break (time, found);
        }
        (0..PAUSES).for_each(|_| std::hint::spin_loop());
    };
    queue.note_look(time);
    (time, found)
}
