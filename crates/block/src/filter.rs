//! Filters: layers that any stack may have. Each is a device over a device.

pub mod align;
pub mod check;
pub mod delay;
pub mod fault;
pub mod flush_debt;
pub mod impairment;

pub use align::{Align, Aligner};
pub use check::Check;
pub use delay::{Delay, DelaySwitch};
pub use fault::{Fault, FaultSwitch};
pub use flush_debt::FlushDebt;
pub use impairment::Impairment;

use crate::change::Change;

/// An operation of a block device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// The device's `read` operation.
    Read,
    /// The device's `write` operation.
    Write,
    /// The device's `flush` operation.
    Flush,
    /// The device's `discard` operation.
    Discard,
    /// The device's `write_zeroes` operation.
    WriteZeroes,
    /// The device's `allocation` operation.
    Allocation,
}

impl Operation {
    pub(crate) const COUNT: usize = Self::EACH.len();

    pub(crate) const EACH: [Self; 6] =
        [Self::Read, Self::Write, Self::Flush, Self::Discard, Self::WriteZeroes, Self::Allocation];

    /// Returns the operation of a change.
    pub const fn of(change: &Change) -> Self {
        match change {
            Change::Write(..) => Self::Write,
            Change::Discard(_) => Self::Discard,
            Change::Zero(..) => Self::WriteZeroes,
        }
    }
}

/// A set of operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operations {
    bits: u8,
}

impl Operations {
    /// The set of all operations.
    pub const ALL: Self = Self::of(&[
        Operation::Read,
        Operation::Write,
        Operation::Flush,
        Operation::Discard,
        Operation::WriteZeroes,
        Operation::Allocation,
    ]);

    /// The set of operations that change content.
    pub const CHANGES: Self = Self::of(&[Operation::Write, Operation::Discard, Operation::WriteZeroes]);

    /// Makes the set of `operations`.
    pub const fn of(operations: &[Operation]) -> Self {
        let mut bits = 0;
        let mut index = 0;
        while index < operations.len() {
            bits |= 1 << operations[index] as u8;
            index += 1;
        }
        Self { bits }
    }

    /// Returns whether `operation` is in the set.
    pub const fn contains(self, operation: Operation) -> bool {
        self.bits & 1 << operation as u8 != 0
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use futures_util::FutureExt;

    use super::*;
    use crate::device::{BlockDevice, ByteRange, Extent, ExtentKind, Geometry, IoFuture, ZeroMode};
    use crate::engine::{self, EngineChoice, EngineDriver};
    use crate::{Buffer, Executor, MemoryStore};

    struct OverSomething(MemoryStore);

    impl BlockDevice for OverSomething {
        fn geometry(&self) -> Geometry {
            self.0.geometry()
        }

        fn read(&self, offset: u64, buffer: Buffer) -> IoFuture<'_, Buffer> {
            self.0.read(offset, buffer)
        }

        fn change(&self, change: Change) -> IoFuture<'_, ()> {
            self.0.change(change)
        }

        fn flush(&self) -> IoFuture<'_, ()> {
            self.0.flush()
        }

        fn zeroes_fast(&self, _: ZeroMode) -> bool {
            true
        }

        fn allocation(&self, range: ByteRange) -> IoFuture<'_, Vec<Extent>> {
            self.0.allocation(range)
        }

        fn own_allocation(&self, range: ByteRange) -> IoFuture<'_, Vec<Extent>> {
            Box::pin(async move { Ok(vec![Extent { range, kind: ExtentKind::Hole }]) })
        }

        fn growth(&self) -> Option<&dyn crate::Growth> {
            self.0.growth()
        }
    }

    #[test]
    fn filters_hide_nothing_that_the_device_below_can_tell_or_do() {
        let (driver, engine) = engine::open(EngineChoice::Threads).unwrap();
        let executor: Executor<EngineDriver> = Executor::new(driver);
        let below = || Rc::new(OverSomething(MemoryStore::new(1 << 20))) as Rc<dyn BlockDevice>;
        let filters: [(&str, Rc<dyn BlockDevice>); 4] = [
            ("align", Rc::new(Align::new(below(), engine.buffers().clone(), executor.handle()))),
            ("check", Rc::new(Check::new(below(), check::Requests::Any))),
            ("delay", Rc::new(Delay::new(below(), executor.handle()).0)),
            ("fault", Rc::new(Fault::new(below(), 1).0)),
        ];
        for (name, filter) in filters {
            // A volume grows below the claims on its blocks.
            assert_eq!(filter.growth().is_some(), name != "align", "{name}");
            assert!(filter.zeroes_fast(ZeroMode::MayUnmap), "{name}");
            let range = ByteRange::new(4096, 8192);
            let told = filter.own_allocation(range).now_or_never().unwrap();
            assert_eq!(told, Ok(vec![Extent { range, kind: ExtentKind::Hole }]), "{name}");
        }
    }
}
