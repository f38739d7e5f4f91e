//! Filters: layers that any stack may have. Each is a device over a device.

pub mod align;
pub mod check;
pub mod delay;
pub mod fault;
pub mod flush_debt;

pub use align::Align;
pub use check::Check;
pub use delay::{Delay, DelaySwitch};
pub use fault::{Fault, FaultSwitch};
pub use flush_debt::FlushDebt;

/// One of the operations of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// `read`.
    Read,
    /// `write`.
    Write,
    /// `flush`.
    Flush,
    /// `discard`.
    Discard,
    /// `write_zeroes`.
    WriteZeroes,
    /// `allocation`.
    Allocation,
}

/// A set of operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operations {
    bits: u8,
}

impl Operations {
    /// All of them.
    pub const ALL: Self = Self::of(&[
        Operation::Read,
        Operation::Write,
        Operation::Flush,
        Operation::Discard,
        Operation::WriteZeroes,
        Operation::Allocation,
    ]);

    /// Those that change content.
    pub const CHANGES: Self = Self::of(&[Operation::Write, Operation::Discard, Operation::WriteZeroes]);

    /// The set of these.
    pub const fn of(operations: &[Operation]) -> Self {
        let mut bits = 0;
        let mut index = 0;
        while index < operations.len() {
            bits |= 1 << operations[index] as u8;
            index += 1;
        }
        Self { bits }
    }

    /// Tells whether `operation` is one of them.
    pub const fn contains(self, operation: Operation) -> bool {
        self.bits & 1 << operation as u8 != 0
    }
}
