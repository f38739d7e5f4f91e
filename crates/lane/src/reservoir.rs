//! The image of a volume as it was at its handover, for its new owner: read-only, and unchanged until the new
//! owner lacks no block.
//!
//! Before the handover it shows the live volume: a VM that waits at the target reads its disks there. It lies below all filters,
//! because its reads are no guest requests here. When the volume returns into this image, only blocks are written which the owner
//! has and this image lacks; those that the owner still reads are others.

mod turns;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use block::{BlockDevice, Buffer, ByteRange, Change, Extent, Geometry, Handle, IoError, IoFuture};
use futures_util::future::{Either, select};
use migration::{Budget, MigrationId};

use self::turns::{Step, Turn, Turns};
use crate::driver::GivesWay;
use crate::handle::Rest;
use crate::signal::Signal;

/// The store that a lane offers to the new owner of its volume, one at a time. An order for the migration sets the
/// rate of background reads.
#[derive(Default)]
pub struct Reservoir {
    /// The migration by which the volume leaves, and its store; `None`: there is nothing to read.
    open: RefCell<Option<(MigrationId, Rc<dyn BlockDevice>)>>,
    /// Whether the volume has left: the target keeps what it reads from then on.
    has_left: Cell<bool>,
    served: Cell<Served>,
    /// The background reads that wait.
    turns: RefCell<Turns>,
    changed: Signal,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Served {
    pub(crate) bytes: u64,
    pub(crate) pulled: u64,
}

struct ReservoirStore {
    reservoir: Rc<Reservoir>,
    migration: MigrationId,
    geometry: Geometry,
    /// The clock of background reads; `None`: guests wait for the reads.
    paced_by: Option<Handle>,
}

impl Reservoir {
    /// Lets the target of a migration read a store.
    pub fn open(&self, migration: MigrationId, store: Rc<dyn BlockDevice>) {
        self.has_left.set(false);
        self.served.take();
        self.open.replace(Some((migration, store)));
    }

    /// Continues to let the target of a migration read a store, while the volume returns into it. Background reads wait until the
    /// migration sets their rate.
    pub fn reopen(&self, migration: MigrationId, store: Rc<dyn BlockDevice>) {
        if self.store_of(migration).is_none() {
            self.open(migration, store);
            self.leave();
            self.rest(Rest::Pause);
        }
    }

    /// Returns the store that the target of a migration reads.
    pub fn store_of(&self, migration: MigrationId) -> Option<Rc<dyn BlockDevice>> {
        let open = self.open.borrow();
        open.as_ref().filter(|(of, _)| *of == migration).map(|(_, store)| Rc::clone(store))
    }

    pub(crate) fn close(&self) {
        self.turns.borrow_mut().give_way(pacer::Mover::default());
        self.open.replace(None);
    }

    pub(crate) fn leave(&self) {
        self.has_left.set(true);
    }

    /// Returns the bytes read, since the volume has left, of the present or last store.
    pub(crate) fn served(&self) -> Served {
        self.served.get()
    }

    pub(crate) fn set_rate(&self, bytes_per_second: Option<u64>) {
        self.change_turns(|turns| turns.limit(bytes_per_second));
    }

    pub(crate) fn share(&self, budget: Budget) {
        self.change_turns(|turns| turns.share(budget));
    }

    /// Makes background reads give way to guests of the image's disk.
    pub(crate) fn give_way(&self, gives_way: &GivesWay) {
        self.change_turns(|turns| turns.give_way(gives_way.filler()));
    }

    pub(crate) fn set_impact(&self, now: Duration, impact: Option<pacer::Impact>) {
        let terms = impact.map(|impact| pacer::Terms { class: pacer::MoverClass::Filling, impact });
        self.change_turns(|turns| turns.set_terms(now, terms));
    }

    /// Ends background reads that wait for their turn, and those that arrive later: the lane ends. The target asks again.
    pub(crate) fn end_background(&self) {
        self.change_turns(Turns::end);
    }

    /// Pauses or resumes background reads.
    pub fn rest(&self, rests: Rest) {
        self.change_turns(|turns| turns.rest(rests == Rest::Pause));
    }

    /// Returns the device that the target of a migration reads for its guests. It may be made before the store is
    /// open, and outlive it.
    pub fn of(self: &Rc<Self>, migration: MigrationId, geometry: Geometry) -> Rc<dyn BlockDevice> {
        self.device(migration, geometry, None)
    }

    /// Returns the device for the target's background reads.
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

    fn change_turns<T>(&self, change: impl FnOnce(&mut Turns) -> T) -> T {
        let changed = change(&mut self.turns.borrow_mut());
        self.changed.notify();
        changed
    }

    async fn take_turn<'a>(&'a self, handle: &'a Handle, bytes: u64) -> Result<Reading<'a>, IoError> {
        let place = Place { reservoir: self, turn: self.change_turns(Turns::arrive) };
        let mut asked = Step::Wait;
        loop {
            // A pause, another rate and the end are noticed while it waits, too.
            let step = || Some(self.turns.borrow_mut().step(handle.now(), place.turn, bytes));
            let news = Box::pin(self.changed.wait_for(|| step().filter(|step| *step != asked)));
            asked = match asked {
                Step::Go => return Ok(Reading { reservoir: self, handle, bytes }),
                Step::End => return Err(IoError::Closed),
                Step::Wait => news.await,
                Step::AskAt(start) => match select(handle.sleep_until(start), news).await {
                    Either::Left(_) => Step::Wait,
                    Either::Right((step, _)) => step,
                },
            };
        }
    }
}

/// A background read that has had its turn.
struct Reading<'a> {
    reservoir: &'a Reservoir,
    handle: &'a Handle,
    bytes: u64,
}

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        self.reservoir.turns.borrow_mut().ended(self.handle.now(), self.bytes);
    }
}

/// A place in the queue of background reads; dropping it lets the next one in.
struct Place<'a> {
    reservoir: &'a Reservoir,
    turn: Turn,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.reservoir.change_turns(|turns| turns.leave(self.turn));
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
            let _reading = match &self.paced_by {
                Some(handle) => Some(self.reservoir.take_turn(handle, buffer.len() as u64).await?),
                None => None,
            };
            let read = self.store()?.read(offset, buffer).await?;
            self.reservoir.count(read.len() as u64, self.paced_by.is_none());
            Ok(read)
        })
    }

    fn change(&self, _: Change) -> IoFuture<'_, ()> {
        Box::pin(std::future::ready(Err(IoError::ReadOnly)))
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn allocation(&self, range: ByteRange) -> IoFuture<'_, Vec<Extent>> {
        Box::pin(async move { self.store()?.allocation(range).await })
    }
}
