//! A device for unit tests: bytes in memory.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use block::device::{check_range, check_write};
use block::{BlockDevice, Buffer, ByteRange, Change, Extent, ExtentKind, Geometry, IoError, IoFuture};

use crate::nbd::export::{Access, Export};

pub(super) struct TestDevice {
    pub(super) geometry: Cell<Geometry>,
    pub(super) bytes: RefCell<Vec<u8>>,
    pub(super) flushes: Cell<usize>,
}

impl TestDevice {
    pub(super) fn new(size: usize) -> Rc<Self> {
        let geometry = Geometry { size: size as u64, alignment: 1, read_only: false, discards: true };
        Rc::new(Self {
            geometry: Cell::new(geometry),
            bytes: RefCell::new(vec![0; size]),
            flushes: Cell::new(0),
        })
    }

    fn fill(&self, range: ByteRange, value: u8) -> Result<(), IoError> {
        check_write(&self.geometry.get(), range)?;
        self.bytes.borrow_mut()[range.offset as usize..range.end() as usize].fill(value);
        Ok(())
    }
}

impl BlockDevice for TestDevice {
    fn geometry(&self) -> Geometry {
        self.geometry.get()
    }

    fn read(&self, offset: u64, mut buffer: Buffer) -> IoFuture<'_, Buffer> {
        Box::pin(async move {
            check_range(&self.geometry.get(), ByteRange::new(offset, buffer.len() as u64))?;
            let start = offset as usize;
            let length = buffer.len();
            buffer.fill_from(&self.bytes.borrow()[start..start + length]);
            Ok(buffer)
        })
    }

    fn change(&self, change: Change) -> IoFuture<'_, ()> {
        Box::pin(async move {
            let Change::Write(offset, data, _) = change else { return self.fill(change.range(), 0) };
            check_write(&self.geometry.get(), ByteRange::new(offset, data.len() as u64))?;
            let start = offset as usize;
            self.bytes.borrow_mut()[start..start + data.len()].copy_from_slice(data.as_slice());
            Ok(())
        })
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        self.flushes.set(self.flushes.get() + 1);
        Box::pin(async { Ok(()) })
    }

    fn allocation(&self, range: ByteRange) -> IoFuture<'_, Vec<Extent>> {
        Box::pin(async move { Ok(vec![Extent { range, kind: ExtentKind::Data }]) })
    }
}

pub(super) fn export(name: &str, device: &Rc<TestDevice>) -> Export {
    Export {
        name: name.into(),
        description: format!("the disk {name}"),
        device: Rc::clone(device) as Rc<dyn BlockDevice>,
        connect: None,
        access: Access::ReadWrite,
    }
}
