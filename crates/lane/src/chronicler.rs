//! Carries out the decisions of a volume's [`Stay`]: makes records durable, and lets writes wait for them.
//!
//! ```text
//!   a write ──► record() ──► its region is marked in the open epoch ──────────────────► submitted
//!                  └─ not yet: Keeper::mark(), off the lane, for each writer ─ durable ─┘
//!                       └─ not in time: Keeper::forget(): no copy is known, nothing is marked ──► submitted
//!
//!   refer_to(copy): the epoch is frozen ──► Keeper::keep(): what was written, exactly, and what each copy lacks
//! ```
//! Without a copy on another host nothing is marked: the chronicle is in memory only. With a copy, each region is marked once per
//! epoch. Regions in use at the end of an epoch are marked for the next one beforehand, so that a steady guest does not wait
//! (design §5.8, §6 "Journal").
//!
//! **N.B.** A restart trusts the kept chronicle. It is therefore deleted durably before the first write that is not marked.

use std::cell::{Cell, RefCell};
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use block::{BlockDevice, Handle};
use chronicle::{
    BeyondTheEnd, BlockRange, BlockSize, ByteRange, Chronicle, Epoch, Generation, Kept, LayeredBitmap,
    Recorded, ReplicaOf, StayId,
};
use futures_util::future::{Either, select};
use migration::filling::LogEntry;
use migration::planted::{Bug, broken};
use migration::stay::{Beginning, Departed, Doubt, Forgetting, GivenUp, Stay, ToDo};
use migration::{HostId, MigrationId, StayKey, VolumeId};
use tracing::warn;

use crate::control::LaneFuture;
use crate::stack::Untold;

/// Pause before a failed mark is tried again.
const MARK_RETRY: Duration = Duration::from_millis(200);

/// Makes the records of chronicles durable. A method begins its work when it is called, and completes it even if the future is
/// dropped. The calls for one residency are carried out in their order.
pub trait Keeper {
    /// Makes durable that these blocks may be written in `epoch` of a residency. Without blocks, proves that the file of
    /// marks can be written.
    fn mark(&self, key: StayKey, epoch: Epoch, blocks: Vec<BlockRange>)
    -> LaneFuture<Result<(), NotDurable>>;

    /// Durably replaces the kept chronicle of a residency by `kept`. Marks of epochs up to [`Kept::through`] become obsolete.
    fn keep(&self, key: StayKey, kept: Kept) -> LaneFuture<Result<(), NotDurable>>;

    /// Durably deletes the kept chronicle of a residency, with its marks of epochs up to `through`. Works even if the
    /// data folder is full.
    fn forget(&self, key: StayKey, through: Epoch) -> LaneFuture<Result<(), NotDurable>>;

    /// Durably records that a flush of the image failed in this residency ([`migration::stay::ImageRecord::Failed`]), or deletes
    /// the image record if that cannot be written. Works even if the data folder is full.
    fn doubt(&self, key: StayKey) -> LaneFuture<Result<(), NotDurable>>;

    /// Durably starts a new presence file for the blocks that a volume of this size in bytes lacks ([`migration::filling`]),
    /// with this entry only.
    fn begin_presence(
        &self,
        key: StayKey,
        size_bytes: u64,
        entry: LogEntry,
    ) -> LaneFuture<Result<(), NotDurable>>;

    /// Durably adds an entry to the presence file.
    fn add_presence(
        &self,
        key: StayKey,
        size_bytes: u64,
        entry: LogEntry,
    ) -> LaneFuture<Result<(), NotDurable>>;

    /// Notes that guests have written these units, for the next daemon if this one is killed. The note need not survive a
    /// restart of the host.
    fn note_presence(
        &self,
        key: StayKey,
        size_bytes: u64,
        units: Vec<BlockRange>,
    ) -> LaneFuture<Result<(), NotDurable>>;

    /// Deletes the presence file: no block is missing.
    fn forget_presence(&self, key: StayKey) -> LaneFuture<Result<(), NotDurable>>;
}

/// The error when the data folder cannot take a record.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{detail}")]
pub struct NotDurable {
    /// The reason, for the administrator.
    pub detail: String,
}

/// The means of keeping a chronicle durably.
#[derive(Clone)]
pub struct Keeping {
    /// Makes the chronicle's records durable.
    pub keeper: Rc<dyn Keeper>,
    /// The executor, for the time and for timers.
    pub handle: Handle,
    /// The longest time that a guest's write waits for a mark (design §5.7).
    pub wait_max: Duration,
}

/// The chronicle of one volume on its lane.
pub struct Chronicler {
    volume: VolumeId,
    stay: RefCell<Stay>,
    /// Settings common to every residency of the volume on this lane, except identity and size.
    beginning: Beginning,
    /// `None` if the chronicle ends with the daemon.
    keeping: Option<Keeping>,
    waits: Cell<u64>,
    untold: Untold,
}

impl Chronicler {
    /// Makes a chronicle that ends with the daemon.
    pub fn volatile(volume: VolumeId, chronicle: Chronicle) -> Rc<Self> {
        let (block_size, size_bytes) = (chronicle.block_size(), chronicle.size_bytes());
        let regions = chronicle.mark_policy();
        let beginning = Beginning { id: StayId::Made, block_size, size_bytes, regions };
        let stay = RefCell::new(Stay::volatile(chronicle));
        Rc::new(Self {
            volume,
            stay,
            beginning,
            keeping: None,
            waits: Cell::default(),
            untold: Untold::default(),
        })
    }

    /// Makes a chronicle that continues a residency as [`migration::stay::opening::open`] has restored it.
    pub fn kept(
        volume: VolumeId,
        beginning: Beginning,
        believed: Option<Kept>,
        keeping: Keeping,
    ) -> Rc<Self> {
        let stay = RefCell::new(Stay::resume(beginning, believed));
        Rc::new(Self {
            volume,
            stay,
            beginning,
            keeping: Some(keeping),
            waits: Cell::default(),
            untold: Untold::default(),
        })
    }

    /// Returns the size of a block.
    pub fn block_size(&self) -> BlockSize {
        self.beginning.block_size
    }

    /// Returns the residency that is recorded.
    pub fn stay(&self) -> StayId {
        self.stay.borrow().id()
    }

    /// Returns the epoch that is open.
    pub fn open_epoch(&self) -> Epoch {
        self.stay.borrow().chronicle().open_epoch()
    }

    /// Returns how many blocks may have been written since an epoch.
    pub fn blocks_since(&self, epoch: Epoch) -> u64 {
        self.stay.borrow().chronicle().blocks_since(epoch)
    }

    /// Freezes the open epoch, and opens the next.
    pub fn advance(&self) -> Epoch {
        self.stay.borrow_mut().advance()
    }

    /// Returns how many writes had to wait for a mark so far.
    pub fn waits(&self) -> u64 {
        self.waits.get()
    }

    /// Returns why known copies were given up.
    pub fn given_up(&self) -> Option<GivenUp> {
        self.stay.borrow().given_up().cloned()
    }

    pub(crate) fn grow(&self, size_bytes: u64) {
        self.stay.borrow_mut().grow(size_bytes);
    }

    pub(crate) fn size_bytes(&self) -> u64 {
        self.stay.borrow().chronicle().size_bytes()
    }

    /// Begins another residency of the volume, or continues this one after a restart. Forgets everything of other residencies.
    /// The volume then has `size_bytes`, whatever its size here was before. Fails with [`NotDurable`]: a restart may find records
    /// that an earlier daemon kept of this residency.
    pub(crate) async fn begin_stay(&self, id: StayId, size_bytes: u64) -> Result<(), NotDurable> {
        if self.stay() == id {
            self.grow(size_bytes);
            return Ok(());
        }
        if let Some(Keeping { keeper, .. }) = &self.keeping {
            keeper.forget(StayKey { volume: self.volume, stay: id }, Epoch(u64::MAX)).await?;
        }
        self.stay.replace(Stay::begin(Beginning { id, size_bytes, ..self.beginning }));
        Ok(())
    }

    pub(crate) fn end_stay(&self) {
        let forgetting = self.stay.borrow_mut().leave();
        if let Some(keeping) = &self.keeping {
            // No daemon reads the records again, so a failure does not matter.
            drop(keeping.keeper.forget(self.key(), forgetting.through));
        }
    }

    /// Records a change to a range, once its mark is durable as far as needed; returns the epoch.
    ///
    /// If the data folder takes no mark, the write waits at most [`Keeping::wait_max`]. Then the kept chronicle is deleted, which
    /// works even in a full folder. If that fails too, the write keeps waiting: an unrecorded change must not happen. Fails with
    /// [`BeyondTheEnd`]: the range cannot be recorded, and must not be written.
    pub(crate) async fn record(&self, range: ByteRange) -> Result<Epoch, BeyondTheEnd> {
        let mut began = None;
        loop {
            let recorded = self.stay.borrow_mut().record(range)?;
            let epoch = match recorded {
                Recorded::Marked(epoch) => return Ok(epoch),
                Recorded::WaitForMark(epoch) => epoch,
            };
            let regions = self.stay.borrow().regions_to_mark(range);
            let Some(keeping) = &self.keeping else {
                // Unreachable: without a keeper, marks stay volatile. The write must not wait for nothing.
                self.stay.borrow_mut().marked(self.stay(), epoch, regions);
                continue;
            };
            let now = keeping.handle.now();
            let began = *began.get_or_insert_with(|| {
                self.waits.set(self.waits.get() + 1);
                now
            });
            let left = keeping.wait_max.saturating_sub(now - began);
            if left.is_zero() {
                self.give_up(keeping).await;
                continue;
            }
            let key = self.key();
            let marking = keeping.keeper.mark(key, epoch, vec![regions]);
            if broken(Bug::MarkNotAwaited) {
                self.stay.borrow_mut().marked(key.stay, epoch, regions);
                continue;
            }
            match select(marking, keeping.handle.sleep(left)).await {
                Either::Left((Ok(()), _)) => self.stay.borrow_mut().marked(key.stay, epoch, regions),
                Either::Left((Err(_), _)) => {
                    let left = keeping.wait_max.saturating_sub(keeping.handle.now() - began);
                    keeping.handle.sleep(MARK_RETRY.min(left)).await;
                }
                // The loop checks again, and gives the copies up.
                Either::Right(_) => {}
            }
        }
    }

    /// Returns the blocks that copy `of` of this generation lacks; `None` if no such copy is known.
    pub fn lacking(&self, of: ReplicaOf, generation: Generation) -> Option<LayeredBitmap> {
        self.stay.borrow().lacking(of, generation)
    }

    /// Returns the blocks that a copy lacked when its record was kept, without later writes. Only a planted bug takes this
    /// for the whole set.
    pub(crate) fn lacked_when_kept(&self, of: ReplicaOf) -> Option<LayeredBitmap> {
        self.stay.borrow().lacked_when_kept(of)
    }

    /// Returns the migrations whose copies of this generation are known.
    pub fn copies(&self, generation: Generation) -> Vec<MigrationId> {
        self.stay.borrow().copies(generation)
    }

    /// Returns the known copies, and how many blocks each lacks.
    pub fn replicas(&self) -> Vec<(ReplicaOf, Generation, u64)> {
        self.stay.borrow().replicas()
    }

    pub(crate) fn departs(&self, to: HostId) -> Option<Departed> {
        self.stay.borrow().departs(to.0)
    }

    /// Returns the blocks that a copy lacks at this instant, given the blocks that it lacked when the volume left for this host
    /// ([`Stay::lacking_since_arrival`]).
    pub(crate) fn lacking_since_arrival(&self, at_departure: &LayeredBitmap) -> Option<LayeredBitmap> {
        self.stay.borrow().lacking_since_arrival(at_departure)
    }

    /// Remembers a copy. `missing` returns the blocks that it lacks at this instant, and is called between two
    /// requests. `None` changes nothing.
    ///
    /// `store` returns the volume's own store at the same instant. The store is flushed before the copy is kept. Otherwise a
    /// power cut could take back earlier writes that the copy already has, and the difference would go unnoticed. `None`: the
    /// volume is about to arrive, and is flushed before this host owns it.
    ///
    /// **N.B.** Writes in flight at this instant have to be in `missing`, unless the copy will be asked for as
    /// of an earlier epoch.
    ///
    /// # Errors
    /// [`NotDurable`]: a restart may not know the copy, or know an earlier state of it.
    pub async fn refer_to(
        &self,
        of: ReplicaOf,
        generation: Generation,
        store: impl FnOnce() -> Option<Rc<dyn BlockDevice>>,
        missing: impl FnOnce() -> Option<LayeredBitmap>,
    ) -> Result<(), NotDurable> {
        let Some(Keeping { keeper, .. }) = &self.keeping else { return Ok(()) };
        let premarks = self.stay.borrow().premarks();
        // Even if there is nothing to mark: this shows early whether the folder takes a record at all.
        keeper.mark(self.key(), premarks.epoch, premarks.blocks.clone()).await?;
        let Some(missing) = missing() else { return Ok(()) };
        let referral = self.stay.borrow_mut().take_down(&premarks, of, generation, missing);
        let Some(referral) = referral else { return Ok(()) };
        // N.B. the volume's present store: the volume may have moved to another one meanwhile.
        if let Some(store) = store()
            && let Err(error) = store.flush().await
        {
            self.stay.borrow_mut().abandon(&referral);
            self.store_failed().await;
            return Err(NotDurable { detail: error.to_string() });
        }
        let key = self.key();
        let kept = self.stay.borrow_mut().refer(referral);
        match kept {
            Some(kept) => keeper.keep(key, kept).await,
            None => Ok(()),
        }
    }

    /// Forgets a copy. When none is left, nothing is marked.
    ///
    /// # Errors
    /// [`NotDurable`]: a restart may still know the copy.
    pub async fn forget(&self, of: ReplicaOf) -> Result<(), NotDurable> {
        let Some(Keeping { keeper, .. }) = &self.keeping else { return Ok(()) };
        let key = self.key();
        let to_do = self.stay.borrow_mut().forget(of);
        match to_do {
            None => Ok(()),
            Some(ToDo::Keep(kept)) => keeper.keep(key, kept).await,
            Some(ToDo::Forget(forgetting)) => self.make_forgotten(keeper, key, forgetting).await,
        }
    }

    /// Keeps the exact chronicle. No write to the volume may follow.
    ///
    /// # Errors
    /// [`NotDurable`]: the kept chronicle is only as exact as its marks.
    pub async fn close(&self) -> Result<(), NotDurable> {
        let Some(Keeping { keeper, .. }) = &self.keeping else { return Ok(()) };
        let kept = self.stay.borrow_mut().close();
        match kept {
            Some(kept) => keeper.keep(self.key(), kept).await,
            None => Ok(()),
        }
    }

    pub(crate) fn untold(&self) -> &Untold {
        &self.untold
    }

    /// Records that a flush of the volume's own store has failed: copies can then not be trusted to match the store. Resolves
    /// when the record is durable, or took longer than the limit.
    pub async fn store_failed(&self) {
        let Some(Keeping { keeper, handle, wait_max }) = &self.keeping else { return };
        let doubt = self.stay.borrow_mut().store_failed();
        let Some(Doubt { stay, forgetting }) = doubt else { return };
        let (volume, key) = (self.volume, StayKey { volume: self.volume, stay });
        warn!(%volume, "a flush failed: copies at other hosts count as empty, and this image will not be kept when the volume \
            leaves it");
        let doubted = keeper.doubt(key);
        let forgotten = forgetting.map(|forgetting| (forgetting, keeper.forget(key, forgetting.through)));
        let durably = pin!(async {
            if let Err(error) = doubted.await {
                warn!(%volume, %error, "cannot record that a flush has failed; a restart will not know it");
            }
            if let Some((forgetting, forgotten)) = forgotten {
                match forgotten.await {
                    Ok(()) => self.stay.borrow_mut().forgotten(forgetting),
                    Err(error) => {
                        warn!(%volume, %error, "the record of the volume's copies cannot be deleted");
                    }
                }
            }
        });
        // The askers get an answer in both cases.
        let _ = select(durably, handle.sleep(*wait_max)).await;
    }

    async fn give_up(&self, keeping: &Keeping) {
        let volume = self.volume;
        let reason = "the data folder could not record writes in time";
        let (key, known) = (self.key(), self.stay.borrow().replicas().len());
        let forgetting = self.stay.borrow_mut().give_up(reason);
        if known > 0 {
            warn!(%volume, copies = known, "{reason}: a return, or a restarted migration, will copy everything; check the space \
                in the data folder");
        }
        let Some(forgetting) = forgetting else { return };
        if let Err(error) = self.make_forgotten(&keeping.keeper, key, forgetting).await {
            warn!(%volume, %error, "guests wait: the record of the volume's copies can be neither written nor deleted");
            keeping.handle.sleep(MARK_RETRY).await;
        }
    }

    async fn make_forgotten(
        &self,
        keeper: &Rc<dyn Keeper>,
        key: StayKey,
        forgetting: Forgetting,
    ) -> Result<(), NotDurable> {
        keeper.forget(key, forgetting.through).await?;
        self.stay.borrow_mut().forgotten(forgetting);
        Ok(())
    }

    fn key(&self) -> StayKey {
        StayKey { volume: self.volume, stay: self.stay() }
    }
}
