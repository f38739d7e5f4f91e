//! Measures each request right above a volume's gate, where a migration begins to matter to a guest.
//!
//! Changes of parts of one block are made one after the other. A change that waits for others is measured from the end of
//! the last of these.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use block::device::ALIGNMENT;

use block::{BlockDevice, Buffer, ByteRange, Change, Extent, Geometry, IoError, IoFuture, ZeroMode};
use lane::TimeLimits;

use crate::checker::patience::too_long;
use crate::world::World;

pub(crate) struct Probe {
    below: Rc<dyn BlockDevice>,
    world: Rc<World>,
    limits: TimeLimits,
    next: Cell<u64>,
    /// The blocks of changes in flight, and since when each may have been made.
    changes: RefCell<BTreeMap<u64, (ByteRange, Duration)>>,
}

impl Probe {
    pub(crate) fn new(below: Rc<dyn BlockDevice>, world: &Rc<World>, limits: TimeLimits) -> Self {
        let (next, changes) = (Cell::default(), RefCell::default());
        Self { below, world: Rc::clone(world), limits, next, changes }
    }

    async fn measured_change(&self, range: ByteRange, request: IoFuture<'_, ()>) -> Result<(), IoError> {
        let number = self.next.get();
        self.next.set(number + 1);
        let alignment = u64::from(ALIGNMENT);
        let start = range.offset - range.offset % alignment;
        let blocks = ByteRange::new(start, range.end().next_multiple_of(alignment) - start);
        self.changes.borrow_mut().insert(number, (blocks, self.world.now()));
        let result = request.await;
        let (now, mut changes) = (self.world.now(), self.changes.borrow_mut());
        let began = changes.remove(&number).map_or(now, |(_, began)| began);
        // Later ones may have waited for it.
        let later = changes.range_mut(number..).map(|(_, change)| change);
        later.filter(|(other, _)| other.overlaps(&blocks)).for_each(|(_, began)| *began = now);
        drop(changes);
        // The edges of an unaligned change are assembled and written one after the other, beside the rest.
        let parts = if blocks == range { 1 } else { 3 };
        self.judge(began, now, parts);
        result
    }

    fn judge(&self, began: Duration, now: Duration, parts: u32) {
        let limits = TimeLimits { mirror_wait_max: self.limits.mirror_wait_max * parts, ..self.limits };
        let wrong = too_long(&self.world.excuses.borrow(), &limits, began, now);
        if let Some(wrong) = wrong {
            self.world.violated("patience", || wrong);
        }
    }

    async fn measured<T>(&self, request: IoFuture<'_, T>) -> Result<T, IoError> {
        let began = self.world.now();
        let result = request.await;
        self.judge(began, self.world.now(), 1);
        result
    }
}

impl BlockDevice for Probe {
    fn geometry(&self) -> Geometry {
        self.below.geometry()
    }

    fn read(&self, offset: u64, buffer: Buffer) -> IoFuture<'_, Buffer> {
        Box::pin(self.measured(self.below.read(offset, buffer)))
    }

    fn change(&self, change: Change) -> IoFuture<'_, ()> {
        Box::pin(self.measured_change(change.range(), self.below.change(change)))
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        Box::pin(self.measured(self.below.flush()))
    }

    fn zeroes_fast(&self, mode: ZeroMode) -> bool {
        self.below.zeroes_fast(mode)
    }

    fn allocation(&self, range: ByteRange) -> IoFuture<'_, Vec<Extent>> {
        Box::pin(self.measured(self.below.allocation(range)))
    }
}
