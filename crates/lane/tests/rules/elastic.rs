//! A store whose growth a test can stop.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use block::{BlockDevice, Buffer, ByteRange, Change, Extent, Geometry, Growth, Handle, IoError, IoFuture};

#[derive(Default)]
pub(crate) struct GrowthSwitch {
    pub(crate) capacity: Option<u64>,
    pub(crate) fails: Option<IoError>,
    pub(crate) takes: Option<(Handle, Duration)>,
    pub(crate) undone: usize,
}

/// A device like the one below, whose growth the switch controls.
pub(crate) struct Elastic {
    below: Rc<dyn BlockDevice>,
    switch: Rc<RefCell<GrowthSwitch>>,
}

impl Elastic {
    pub(crate) fn new(below: Rc<dyn BlockDevice>) -> (Self, Rc<RefCell<GrowthSwitch>>) {
        let switch = Rc::<RefCell<GrowthSwitch>>::default();
        (Self { below, switch: Rc::clone(&switch) }, switch)
    }
}

impl BlockDevice for Elastic {
    fn geometry(&self) -> Geometry {
        self.below.geometry()
    }

    fn read(&self, offset: u64, buffer: Buffer) -> IoFuture<'_, Buffer> {
        self.below.read(offset, buffer)
    }

    fn change(&self, change: Change) -> IoFuture<'_, ()> {
        self.below.change(change)
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        self.below.flush()
    }

    fn allocation(&self, range: ByteRange) -> IoFuture<'_, Vec<Extent>> {
        self.below.allocation(range)
    }

    fn growth(&self) -> Option<&dyn Growth> {
        Some(self)
    }
}

impl Growth for Elastic {
    fn capacity(&self) -> IoFuture<'_, Option<u64>> {
        Box::pin(async { Ok(self.switch.borrow().capacity) })
    }

    fn prepare(&self, _: u64) -> IoFuture<'_, ()> {
        let takes = self.switch.borrow().takes.clone();
        Box::pin(async move {
            if let Some((clock, takes)) = takes {
                clock.sleep(takes).await;
            }
            self.switch.borrow().fails.map_or(Ok(()), Err)
        })
    }

    fn show(&self, size: u64) {
        if let Some(growth) = self.below.growth() {
            growth.show(size);
        }
    }

    fn undo(&self) -> IoFuture<'_, ()> {
        self.switch.borrow_mut().undone += 1;
        Box::pin(async { Ok(()) })
    }
}
