//! Actions that wait to be polled, and those that also wait for a record to become durable.

use std::collections::VecDeque;

/// What a machine gives out.
#[derive(Debug)]
pub(crate) struct Outbox<A> {
    actions: VecDeque<A>,
    /// The number of the last record that was given out.
    sequence: u64,
    /// Actions that follow once the record of that number is durable, in order.
    after: VecDeque<(u64, A)>,
}

impl<A> Outbox<A> {
    pub(crate) fn new() -> Self {
        Self { actions: VecDeque::new(), sequence: 0, after: VecDeque::new() }
    }

    pub(crate) fn push(&mut self, action: A) {
        self.actions.push_back(action);
    }

    pub(crate) fn pop(&mut self) -> Option<A> {
        self.actions.pop_front()
    }

    /// Returns the number of the next record.
    pub(crate) fn next_record(&mut self) -> u64 {
        self.sequence += 1;
        self.sequence
    }

    /// Returns whether all records that were given out are durable: those up to this number.
    pub(crate) fn is_settled(&self, durable: u64) -> bool {
        self.sequence <= durable
    }

    /// Gives an action out once the last record that was given out is durable.
    pub(crate) fn push_after_record(&mut self, action: A) {
        self.after.push_back((self.sequence, action));
    }

    /// Notes that the records up to this number are durable: one file holds them, and the last one counts.
    pub(crate) fn durable(&mut self, sequence: u64) {
        while self.after.front().is_some_and(|(number, _)| *number <= sequence) {
            self.actions.extend(self.after.pop_front().map(|(_, action)| action));
        }
    }
}
