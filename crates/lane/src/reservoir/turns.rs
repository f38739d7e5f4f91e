//! The order and the times of background reads of a reservoir.
//!
//! A read counts against the rate when its turn comes, not when it arrives. So a pause, another rate and the end of the lane
//! apply to every read that still waits, and an abandoned read delays no other.

use std::collections::VecDeque;
use std::time::Duration;

use migration::Budget;

/// A read that waits. Numbers are not reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Turn(u64);

/// What a waiting read does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// The read may begin at once.
    Go,
    /// The read asks again at this time, or when something has changed.
    AskAt(Duration),
    /// The read asks again when something has changed.
    Wait,
    /// The read fails, because the lane ends.
    End,
}

/// The reads that wait, and the limits that they obey.
#[derive(Debug, Default)]
pub(super) struct Turns {
    queue: VecDeque<Turn>,
    next: u64,
    /// The limit of the whole migration.
    budget: Budget,
    /// Asks the pacer of the image's disk.
    paced: pacer::Mover,
    rests: bool,
    is_over: bool,
}

impl Turns {
    pub(super) fn limit(&mut self, bytes_per_second: Option<u64>) {
        self.budget.set_rate(bytes_per_second);
    }

    /// Uses the budget of the whole migration.
    pub(super) fn share(&mut self, budget: Budget) {
        self.budget = budget;
    }

    pub(super) fn give_way(&mut self, mover: pacer::Mover) {
        self.paced = mover;
    }

    /// Changes what guests of the disk may lose to reads.
    pub(super) fn set_terms(&mut self, now: Duration, terms: Option<pacer::Terms>) {
        self.paced.set_terms(now, terms);
    }

    /// Notes the end of a read that had its turn.
    pub(super) fn ended(&mut self, now: Duration, bytes: u64) {
        self.paced.ended(now, bytes);
    }

    pub(super) fn rest(&mut self, rests: bool) {
        match rests {
            true => self.paced.rest(),
            false => self.paced.resume(),
        }
        self.rests = rests;
    }

    /// Ends every turn, also of reads that arrive later.
    pub(super) fn end(&mut self) {
        self.is_over = true;
    }

    /// Puts a read at the end of the queue.
    pub(super) fn arrive(&mut self) -> Turn {
        self.next += 1;
        self.queue.push_back(Turn(self.next));
        Turn(self.next)
    }

    /// Removes a read whose reader has left.
    pub(super) fn leave(&mut self, turn: Turn) {
        self.queue.retain(|waiting| *waiting != turn);
    }

    /// Returns what a queued read of `bytes` bytes does now. With [`Step::Go`] it is paid for, and the next one is first.
    pub(super) fn step(&mut self, now: Duration, turn: Turn, bytes: u64) -> Step {
        if self.is_over {
            return Step::End;
        }
        if self.rests || self.queue.front() != Some(&turn) {
            return Step::Wait;
        }
        let start = self.budget.next_start(now);
        if start > now {
            return Step::AskAt(start);
        }
        let start = self.paced.next_start(now, bytes);
        if start > now {
            return Step::AskAt(start);
        }
        self.budget.spend(now, bytes);
        self.paced.began(now, bytes);
        self.queue.pop_front();
        Step::Go
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
    }

    /// Returns turns at 1000 bytes a second, with three reads.
    fn three() -> (Turns, [Turn; 3]) {
        let mut turns = Turns::default();
        turns.limit(Some(1000));
        let reads = std::array::from_fn(|_| turns.arrive());
        (turns, reads)
    }

    #[test]
    fn reads_take_their_turns_in_order_at_the_rate() {
        let (mut turns, [first, second, third]) = three();
        assert_eq!(turns.step(at(0), second, 100), Step::Wait);
        assert_eq!(turns.step(at(0), first, 100), Step::Go);
        assert_eq!(turns.step(at(0), second, 200), Step::AskAt(at(80)));
        assert_eq!(turns.step(at(100), second, 200), Step::Go);
        assert_eq!(turns.step(at(100), third, 1), Step::AskAt(at(280)));
        turns.limit(None);
        assert_eq!(turns.step(at(100), third, 1), Step::Go);
    }

    #[test]
    fn a_pause_and_the_end_hold_for_every_read_that_waits() {
        let (mut turns, [first, second, third]) = three();
        assert_eq!(turns.step(at(0), first, 100), Step::Go);
        turns.rest(true);
        assert_eq!(turns.step(at(5000), second, 100), Step::Wait);
        turns.end();
        for waits in [second, third] {
            assert_eq!(turns.step(at(5000), waits, 100), Step::End);
        }
        let later = turns.arrive();
        assert_eq!(turns.step(at(5000), later, 100), Step::End);
    }

    #[test]
    fn a_read_that_is_given_up_costs_the_others_nothing() {
        let (mut turns, [first, second, third]) = three();
        assert_eq!(turns.step(at(0), first, 100), Step::Go);
        turns.leave(second);
        assert_eq!(turns.step(at(100), third, 100), Step::Go);
    }
}
