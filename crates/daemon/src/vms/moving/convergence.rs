//! The convergence check of a VM's memory: whether rounds become smaller, and what is done if they do not
//! (\[VM51\], stun during page send).
//!
//! ```text
//!   a round that left hardly less than the one before ──► the downtime target grows, up to the limit
//!   and then                                          ──► the guest's processors get less time, step by step
//!   at the last step, and still so after some rounds ───► the move is abandoned, with the figures of the decision
//!   if post-copy is allowed: a round that left more than half of the one before ──► the rest follows after the switch-over
//!   nothing taken for minutes: hung there, or cut off ──► it is abandoned; the VM has never stood still
//! ```

use std::time::Duration;

use hypervisor::{MemoryMode, MemoryProgress};

/// The largest share of the previous round's remainder that counts as progress.
const SHRINKS_TO: f64 = 0.8;
/// The same if the rest may follow later: then rounds that shrink slowly cost more than they gain.
const SHRINKS_TO_WITH_POST_COPY: f64 = 0.5;
/// Divisors of the downtime limit, one after the other: the downtime targets.
pub(super) const DOWNTIME_DIVISORS: [u32; 3] = [8, 2, 1];
/// The steps by which the guest's processors are slowed down, in percent of their time.
const THROTTLE_PERCENTS: [u8; 6] = [10, 25, 45, 65, 85, 99];
/// How many rounds without progress are waited for at the last step.
const PATIENCE_ROUNDS: u32 = 20;
/// How long the target may take nothing of the memory: as long as its store may leave a request unanswered.
const STALL_TIMEOUT: Duration = Duration::from_secs(300);

#[derive(Debug, Default)]
pub(super) struct Convergence {
    mode: MemoryMode,
    rounds: u64,
    /// The remaining bytes at the beginning of the last round.
    left: Option<u64>,
    downtime_steps: usize,
    throttle_steps: usize,
    in_vain: u32,
    /// The bytes that had been taken at the last check, and since when this number is unchanged.
    taken: u64,
    taken_since: Duration,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    GoOn,
    /// Raise the downtime target to the limit divided by `divisor`.
    DowntimeTarget {
        divisor: u32,
    },
    /// Slow the guest down.
    Throttle {
        percent: u8,
    },
    /// Run the VM at the target; the rest follows.
    PostCopy,
    /// The copy will not end.
    Hopeless {
        /// The reason, with the figures.
        reason: String,
    },
}

impl Convergence {
    pub(super) fn new(mode: MemoryMode) -> Self {
        Self { mode, ..Self::default() }
    }

    /// Decides what follows from the hypervisor's progress at `now`, counted from any origin. Each round is decided once.
    pub(super) fn judge(&mut self, now: Duration, progress: &MemoryProgress) -> Verdict {
        if progress.transferred_bytes != self.taken {
            (self.taken, self.taken_since) = (progress.transferred_bytes, now);
        } else if now.saturating_sub(self.taken_since) >= STALL_TIMEOUT {
            let reason = format!(
                "the other host has received none of the VM's memory for {} s. Check whether it can be reached (sterna host \
                 list), and its log; the VM has continued here meanwhile",
                STALL_TIMEOUT.as_secs()
            );
            return Verdict::Hopeless { reason };
        }
        if progress.rounds <= self.rounds {
            return Verdict::GoOn;
        }
        self.rounds = progress.rounds;
        let before = self.left.replace(progress.remaining_bytes);
        let Some(before) = before else { return Verdict::GoOn };
        let shrinks_to = match self.mode {
            MemoryMode::PreCopy => SHRINKS_TO,
            MemoryMode::PostCopy => SHRINKS_TO_WITH_POST_COPY,
        };
        if (progress.remaining_bytes as f64) <= before as f64 * shrinks_to {
            self.in_vain = 0;
            return Verdict::GoOn;
        }
        if self.mode == MemoryMode::PostCopy {
            return Verdict::PostCopy;
        }
        if let Some(divisor) = DOWNTIME_DIVISORS.get(self.downtime_steps + 1).copied() {
            self.downtime_steps += 1;
            return Verdict::DowntimeTarget { divisor };
        }
        if let Some(percent) = THROTTLE_PERCENTS.get(self.throttle_steps).copied() {
            self.throttle_steps += 1;
            return Verdict::Throttle { percent };
        }
        self.in_vain += 1;
        if self.in_vain < PATIENCE_ROUNDS {
            return Verdict::GoOn;
        }
        let reason = format!(
            "the VM makes {} MiB of memory dirty a second and the link carries {} MiB; {} MiB are left after {} rounds, although \
             its processors are slowed down by {} %. Raise --max-downtime, or move the VM when it is less busy",
            progress.dirty_bytes_per_s >> 20,
            progress.bandwidth_bytes_per_s >> 20,
            progress.remaining_bytes >> 20,
            progress.rounds,
            progress.throttle_percent,
        );
        Verdict::Hopeless { reason }
    }
}

#[cfg(test)]
mod tests {
    use hypervisor::MigrationStatus;

    use super::*;

    const NOW: Duration = Duration::from_secs(60);

    fn round(rounds: u64, remaining_bytes: u64) -> MemoryProgress {
        MemoryProgress {
            status: MigrationStatus::Active,
            total_bytes: 1 << 30,
            remaining_bytes,
            transferred_bytes: 0,
            dirty_bytes_per_s: 500 << 20,
            rounds,
            throttle_percent: 99,
            bandwidth_bytes_per_s: 100 << 20,
            expected_downtime_ms: 0,
            downtime_ms: None,
            error: None,
        }
    }

    #[test]
    fn rounds_that_leave_less_are_left_alone() {
        let mut convergence = Convergence::default();
        for (number, left) in [1000, 700, 500, 300, 100].into_iter().enumerate() {
            assert_eq!(convergence.judge(NOW, &round(number as u64 + 1, left << 20)), Verdict::GoOn);
        }
    }

    #[test]
    fn memory_that_nobody_takes_is_given_up_and_a_slow_link_is_not() {
        let mut slow = Convergence::default();
        for minute in 1..60 {
            let progress = MemoryProgress { transferred_bytes: u64::from(minute), ..round(1, 500 << 20) };
            assert_eq!(slow.judge(minute * NOW, &progress), Verdict::GoOn);
        }
        let mut hung = Convergence::default();
        let progress = MemoryProgress { transferred_bytes: 1, ..round(1, 500 << 20) };
        assert_eq!(hung.judge(NOW, &progress), Verdict::GoOn);
        assert_eq!(hung.judge(NOW + STALL_TIMEOUT - NOW / 2, &progress), Verdict::GoOn);
        assert!(matches!(hung.judge(NOW + STALL_TIMEOUT, &progress), Verdict::Hopeless { .. }));
    }

    #[test]
    fn a_guest_that_writes_too_fast_is_slowed_down_step_by_step_and_then_given_up() {
        let mut convergence = Convergence::default();
        let (mut throttle_steps, mut downtime_steps) = (Vec::new(), Vec::new());
        for number in 1.. {
            match convergence.judge(NOW, &round(number, 500 << 20)) {
                Verdict::GoOn => {}
                Verdict::DowntimeTarget { divisor } => downtime_steps.push(divisor),
                Verdict::Throttle { percent } => throttle_steps.push(percent),
                Verdict::PostCopy => panic!("it is not allowed"),
                Verdict::Hopeless { reason } => {
                    assert!(reason.contains("500 MiB of memory dirty"), "{reason}");
                    break;
                }
            }
            assert!(number < 100, "it is given up in the end");
        }
        assert_eq!(
            (throttle_steps.as_slice(), downtime_steps.as_slice()),
            (THROTTLE_PERCENTS.as_slice(), &DOWNTIME_DIVISORS[1..])
        );
    }

    #[test]
    fn where_the_rest_may_follow_the_guest_is_not_slowed_down() {
        let mut convergence = Convergence::new(MemoryMode::PostCopy);
        for (number, left) in [1000, 500, 240].into_iter().enumerate() {
            assert_eq!(convergence.judge(NOW, &round(number as u64 + 1, left << 20)), Verdict::GoOn);
        }
        assert_eq!(convergence.judge(NOW, &round(4, 130 << 20)), Verdict::PostCopy);
    }

    #[test]
    fn a_round_is_judged_once() {
        let mut convergence = Convergence::default();
        for _ in 0..100 {
            assert_eq!(convergence.judge(NOW, &round(1, 500 << 20)), Verdict::GoOn);
        }
    }
}
