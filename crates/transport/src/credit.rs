//! Bounds how much a peer may send: cost, classes of priorities, windows, and the credit that a delivery holds.
//!
//! Each side grants the other a sum of bytes per class, counted from the session's beginning, and raises it as deliveries are
//! dropped. A class cannot use another's share: however long a store hangs, *abort* still gets through.

use std::fmt;
use std::sync::Weak;

use crate::message::{Message, Priority};
use crate::session::Shared;

/// Bytes that a message costs beside its own, for its bookkeeping.
pub(crate) const COST_OVERHEAD_BYTES: u64 = 256;

pub(crate) const CLASSES: usize = 4;

/// Smallest window, in which each class has room for one message of any length.
pub const WINDOW_BYTES_MIN: u64 = 32 << 20;

/// Sixteenths of the window for each class: control, requests of a guest, memory, and the background.
const SIXTEENTHS: [u64; CLASSES] = [1, 3, 4, 8];

pub(crate) fn cost(head_bytes: usize, payload_bytes: usize) -> u64 {
    COST_OVERHEAD_BYTES + head_bytes as u64 + payload_bytes as u64
}

pub(crate) fn cost_of(message: &Message) -> u64 {
    cost(message.head().len(), message.payload().len())
}

pub(crate) fn class(priority: Priority) -> usize {
    match priority {
        Priority::Control => 0,
        Priority::Pulled | Priority::Synchronous => 1,
        Priority::Memory => 2,
        Priority::Asynchronous | Priority::Bulk => 3,
    }
}

pub(crate) fn shares(window_bytes: u64) -> [u64; CLASSES] {
    SIXTEENTHS.map(|sixteenths| window_bytes / 16 * sixteenths)
}

/// Returns the credit of a delivered message to the peer when it is dropped.
pub struct Credit {
    session: Weak<Shared>,
    /// The life of the session that it belongs to: for an earlier one there is nothing to return.
    generation: u64,
    class: usize,
    cost: u64,
}

impl Credit {
    pub(crate) fn new(session: Weak<Shared>, generation: u64, class: usize, cost: u64) -> Self {
        Self { session, generation, class, cost }
    }
}

impl Drop for Credit {
    fn drop(&mut self) {
        if let Some(session) = self.session.upgrade() {
            session.return_credit(self.generation, self.class, self.cost);
        }
    }
}

impl fmt::Debug for Credit {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Credit({} bytes)", self.cost)
    }
}
