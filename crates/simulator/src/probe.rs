//! Sits right above a volume's gate, where a migration begins to matter to a guest, and measures each request.

use std::rc::Rc;

use block::{BlockDevice, Buffer, ByteRange, Durability, Extent, Geometry, IoError, IoFuture, ZeroMode};
use lane::TimeLimits;

use crate::checker::patience::too_long;
use crate::world::World;

/// Measures requests.
pub(crate) struct Probe {
    below: Rc<dyn BlockDevice>,
    world: Rc<World>,
    limits: TimeLimits,
}

impl Probe {
    /// Measures what goes to `below`; `limits` are those of the migrations.
    pub(crate) fn new(below: Rc<dyn BlockDevice>, world: &Rc<World>, limits: TimeLimits) -> Self {
        Self { below, world: Rc::clone(world), limits }
    }

    async fn measured<T>(&self, request: IoFuture<'_, T>) -> Result<T, IoError> {
        let began = self.world.now();
        let result = request.await;
        let now = self.world.now();
        let wrong = too_long(&self.world.excuses.borrow(), &self.limits, began, now);
        if let Some(wrong) = wrong {
            self.world.violated("patience", || wrong);
        }
        result
    }
}

impl BlockDevice for Probe {
    /// Passthrough.
    fn geometry(&self) -> Geometry {
        self.below.geometry()
    }

    fn read(&self, offset: u64, buffer: Buffer) -> IoFuture<'_, Buffer> {
        Box::pin(self.measured(self.below.read(offset, buffer)))
    }

    fn write(&self, offset: u64, data: Buffer, durability: Durability) -> IoFuture<'_, ()> {
        Box::pin(self.measured(self.below.write(offset, data, durability)))
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        Box::pin(self.measured(self.below.flush()))
    }

    fn discard(&self, range: ByteRange) -> IoFuture<'_, ()> {
        Box::pin(self.measured(self.below.discard(range)))
    }

    fn write_zeroes(&self, range: ByteRange, mode: ZeroMode, durability: Durability) -> IoFuture<'_, ()> {
        Box::pin(self.measured(self.below.write_zeroes(range, mode, durability)))
    }

    /// Passthrough.
    fn zeroes_fast(&self, mode: ZeroMode) -> bool {
        self.below.zeroes_fast(mode)
    }

    fn allocation(&self, range: ByteRange) -> IoFuture<'_, Vec<Extent>> {
        Box::pin(self.measured(self.below.allocation(range)))
    }
}
