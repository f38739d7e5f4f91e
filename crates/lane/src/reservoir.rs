//! What a volume was when it left, for its new owner: read-only, and unchanged until that lacks nothing.
//!
//! Before the handover it is what the volume is: a VM that waits at the target reads its disks there. It lies below all filters:
//! what is read here is no guest's request.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use block::{BlockDevice, Buffer, ByteRange, Change, Extent, Geometry, IoError, IoFuture};
use migration::MigrationId;

/// What a lane has for the new owner of its volume: one store at a time.
#[derive(Default)]
pub struct Reservoir {
    /// The migration that the volume leaves by, and its store; `None`: there is nothing to be read.
    open: RefCell<Option<(MigrationId, Rc<dyn BlockDevice>)>>,
    /// Bytes that were read of it.
    served: Cell<u64>,
}

/// What one migration's target reads.
struct ReservoirStore {
    reservoir: Rc<Reservoir>,
    migration: MigrationId,
    geometry: Geometry,
}

impl Reservoir {
    /// Lets the target of a migration read a store.
    pub fn open(&self, migration: MigrationId, store: Rc<dyn BlockDevice>) {
        self.served.set(0);
        self.open.replace(Some((migration, store)));
    }

    /// Lets go of the store: what is asked for late finds nothing.
    pub(crate) fn close(&self) {
        self.open.replace(None);
    }

    /// Bytes that were read of the store that is open, or was last.
    pub(crate) fn bytes_served(&self) -> u64 {
        self.served.get()
    }

    /// What the target of a migration reads, as long as it may: a device that is there also before and after.
    pub fn of(self: &Rc<Self>, migration: MigrationId, geometry: Geometry) -> Rc<dyn BlockDevice> {
        let geometry = Geometry { read_only: true, ..geometry };
        Rc::new(ReservoirStore { reservoir: Rc::clone(self), migration, geometry })
    }
}

impl ReservoirStore {
    fn store(&self) -> Result<Rc<dyn BlockDevice>, IoError> {
        match &*self.reservoir.open.borrow() {
            Some((migration, store)) if *migration == self.migration => Ok(Rc::clone(store)),
            _ => Err(IoError::Closed),
        }
    }
}

impl BlockDevice for ReservoirStore {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn read(&self, offset: u64, buffer: Buffer) -> IoFuture<'_, Buffer> {
        Box::pin(async move {
            let read = self.store()?.read(offset, buffer).await?;
            let served = &self.reservoir.served;
            served.set(served.get() + read.len() as u64);
            Ok(read)
        })
    }

    /// Nobody changes it.
    fn change(&self, _: Change) -> IoFuture<'_, ()> {
        Box::pin(std::future::ready(Err(IoError::ReadOnly)))
    }

    /// Nothing is to be made durable.
    fn flush(&self) -> IoFuture<'_, ()> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn allocation(&self, range: ByteRange) -> IoFuture<'_, Vec<Extent>> {
        Box::pin(async move { self.store()?.allocation(range).await })
    }
}
