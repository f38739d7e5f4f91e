//! What a volume was when it left, for its new owner: read-only, and unchanged until that lacks nothing.
//!
//! Before the handover it is what the volume is: a VM that waits at the target reads its disks there. It lies below all filters:
//! what is read here is no guest's request. While the volume comes back to it, other blocks of it are written than those that are
//! read: its owner has these, and lacks those.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use block::{BlockDevice, Buffer, ByteRange, Change, Extent, Geometry, Handle, IoError, IoFuture};
use futures_util::future::select;
use migration::MigrationId;

use crate::handle::Rest;
use crate::signal::Signal;

/// What a lane has for the new owner of its volume: one store at a time. It decides how fast what no guest waits for is read, as an
/// order for the migration says.
#[derive(Default)]
pub struct Reservoir {
    /// The migration that the volume leaves by, and its store; `None`: there is nothing to be read.
    open: RefCell<Option<(MigrationId, Rc<dyn BlockDevice>)>>,
    /// Whether the volume has left: what is read from here on stays there.
    has_left: Cell<bool>,
    /// Bytes that were read of it since then.
    served: Cell<Served>,
    /// Bytes a second that are read although no guest waits for them; `None`: as fast as it goes.
    rate: Cell<Option<u64>>,
    /// When all that was read of these is carried at that rate.
    carried_at: Cell<Duration>,
    /// Nothing is read that no guest waits for.
    rests: Cell<bool>,
    changed: Signal,
}

/// What a reservoir has given, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Served {
    pub(crate) bytes: u64,
    /// Of this, what guests waited for.
    pub(crate) pulled: u64,
}

/// What one migration's target reads.
struct ReservoirStore {
    reservoir: Rc<Reservoir>,
    migration: MigrationId,
    geometry: Geometry,
    /// What tells the time of reads that no guest waits for; `None`: one does.
    paced_by: Option<Handle>,
}

impl Reservoir {
    /// Lets the target of a migration read a store.
    pub fn open(&self, migration: MigrationId, store: Rc<dyn BlockDevice>) {
        self.has_left.set(false);
        self.served.take();
        self.open.replace(Some((migration, store)));
    }

    /// Goes on to let the target of a migration read a store, in which the volume comes back meanwhile. What no guest waits for
    /// is not read before the migration goes on: it says how fast.
    pub fn reopen(&self, migration: MigrationId, store: Rc<dyn BlockDevice>) {
        if self.store_of(migration).is_none() {
            self.open(migration, store);
            self.leave();
            self.rest(Rest::Pause);
        }
    }

    /// The store that the target of a migration reads.
    pub fn store_of(&self, migration: MigrationId) -> Option<Rc<dyn BlockDevice>> {
        let open = self.open.borrow();
        open.as_ref().filter(|(of, _)| *of == migration).map(|(_, store)| Rc::clone(store))
    }

    /// Lets go of the store: what is asked for late finds nothing.
    pub(crate) fn close(&self) {
        self.open.replace(None);
    }

    /// The volume leaves: what is read from here on is counted.
    pub(crate) fn leave(&self) {
        self.has_left.set(true);
    }

    /// What was read, since the volume has left, of the store that is open, or was last.
    pub(crate) fn served(&self) -> Served {
        self.served.get()
    }

    /// Limits how fast is read what no guest waits for.
    pub(crate) fn set_rate(&self, bytes_per_second: Option<u64>) {
        self.rate.set(bytes_per_second);
        self.carried_at.set(Duration::ZERO);
        self.changed.notify();
    }

    /// Has nothing read that no guest waits for, or goes on.
    pub fn rest(&self, rests: Rest) {
        self.rests.set(rests == Rest::Pause);
        self.changed.notify();
    }

    /// What the target of a migration reads for its guests, as long as it may: a device that is there also before and after.
    pub fn of(self: &Rc<Self>, migration: MigrationId, geometry: Geometry) -> Rc<dyn BlockDevice> {
        self.device(migration, geometry, None)
    }

    /// The same for what no guest waits for.
    pub fn in_background(
        self: &Rc<Self>,
        migration: MigrationId,
        geometry: Geometry,
        handle: Handle,
    ) -> Rc<dyn BlockDevice> {
        self.device(migration, geometry, Some(handle))
    }

    fn count(&self, bytes: u64, is_awaited: bool) {
        if self.has_left.get() {
            let Served { bytes: all, pulled } = self.served.get();
            self.served
                .set(Served { bytes: all + bytes, pulled: pulled + if is_awaited { bytes } else { 0 } });
        }
    }

    fn device(
        self: &Rc<Self>,
        migration: MigrationId,
        geometry: Geometry,
        paced_by: Option<Handle>,
    ) -> Rc<dyn BlockDevice> {
        let geometry = Geometry { read_only: true, ..geometry };
        Rc::new(ReservoirStore { reservoir: Rc::clone(self), migration, geometry, paced_by })
    }

    /// Waits until so many bytes more may be read that no guest waits for.
    async fn take_turn(&self, handle: &Handle, bytes: u64) {
        self.changed.wait_for(|| (!self.rests.get()).then_some(())).await;
        let Some(rate) = self.rate.get() else { return };
        let start = self.carried_at.get().max(handle.now());
        let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(rate.max(1));
        self.carried_at.set(start + Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX)));
        // What waits at a limit that is changed waits no longer: what comes after it has the new one.
        let changed = self.changed.wait_for(|| (self.rate.get() != Some(rate)).then_some(()));
        select(handle.sleep_until(start), Box::pin(changed)).await;
    }
}

impl ReservoirStore {
    fn store(&self) -> Result<Rc<dyn BlockDevice>, IoError> {
        self.reservoir.store_of(self.migration).ok_or(IoError::Closed)
    }
}

impl BlockDevice for ReservoirStore {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn read(&self, offset: u64, buffer: Buffer) -> IoFuture<'_, Buffer> {
        Box::pin(async move {
            if let Some(handle) = &self.paced_by {
                self.reservoir.take_turn(handle, buffer.len() as u64).await;
            }
            let read = self.store()?.read(offset, buffer).await?;
            self.reservoir.count(read.len() as u64, self.paced_by.is_none());
            Ok(read)
        })
    }

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
