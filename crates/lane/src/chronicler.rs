//! Carries out what a volume's [`Stay`] decides: what has to outlast the daemon is made durable, and writes wait for it.
//!
//! ```text
//!   a write ──► record() ──► its region is marked in the open epoch ──────────────────► submitted
//!                  └─ not yet: Keeper::mark(), off the lane, for whoever waits ─ durable ─┘
//!                       └─ not in time: Keeper::forget(): nobody has a copy, nothing is marked ──► submitted
//!
//!   refer_to(copy): the epoch is frozen ──► Keeper::keep(): what was written, exactly, and what each copy lacks
//! ```
//! A volume of which nobody has a copy is not marked at all: its chronicle is in memory only, and costs a look at a
//! bitmap. With a copy a region is marked once an epoch; regions that are in use when an epoch ends are marked for the
//! next one beforehand, so that a steady guest waits for nothing (design §5.8, §6 "Journal").
//!
//! **N.B.** What is kept is trusted after a restart. So it goes, durably, before the first write that is not marked.

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

/// Pause before a mark that could not be made is tried again.
const MARK_RETRY: Duration = Duration::from_millis(200);

/// Makes durable what has to outlast a daemon. Each thing is asked for when the method is called, and is done also if
/// nobody waits for it. What is kept and forgotten of a stay is done in the order in which it was asked for.
pub trait Keeper {
    /// Makes durable that these blocks of a volume may be written in `epoch` of a stay; that its file of marks can be
    /// written, if there are none.
    fn mark(&self, key: StayKey, epoch: Epoch, blocks: Vec<BlockRange>)
    -> LaneFuture<Result<(), NotDurable>>;

    /// Puts `kept` durably in the place of what was kept of a stay; marks of epochs up to [`Kept::through`] are of no
    /// use any more then.
    fn keep(&self, key: StayKey, kept: Kept) -> LaneFuture<Result<(), NotDurable>>;

    /// Forgets durably what was kept of a stay, with its marks of epochs up to `through`. A full data folder is no
    /// hindrance.
    fn forget(&self, key: StayKey, through: Epoch) -> LaneFuture<Result<(), NotDurable>>;

    /// Remembers durably that a flush of the image has failed in this stay ([`migration::stay::ImageRecord::Failed`]), or nothing
    /// of the image if nothing could be remembered before. A full data folder is no hindrance.
    fn doubt(&self, key: StayKey) -> LaneFuture<Result<(), NotDurable>>;

    /// Begins anew, durably, what is kept of the units that a volume of this size in bytes lacks in a stay
    /// ([`migration::filling`]): with this entry, and nothing of before.
    fn begin_presence(
        &self,
        key: StayKey,
        size_bytes: u64,
        entry: LogEntry,
    ) -> LaneFuture<Result<(), NotDurable>>;

    /// Adds an entry to that, durably.
    fn add_presence(
        &self,
        key: StayKey,
        size_bytes: u64,
        entry: LogEntry,
    ) -> LaneFuture<Result<(), NotDurable>>;

    /// Notes besides that guests have written these units: for a daemon that begins after this one was killed, as long as the host
    /// is not started again. It need not be durable.
    fn note_presence(
        &self,
        key: StayKey,
        size_bytes: u64,
        units: Vec<BlockRange>,
    ) -> LaneFuture<Result<(), NotDurable>>;

    /// Forgets all of that: nothing is missing any more.
    fn forget_presence(&self, key: StayKey) -> LaneFuture<Result<(), NotDurable>>;
}

/// The data folder did not take it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{detail}")]
pub struct NotDurable {
    /// Why, for people.
    pub detail: String,
}

/// Who keeps a chronicle.
#[derive(Clone)]
pub struct Keeping {
    /// Makes durable what has to be.
    pub keeper: Rc<dyn Keeper>,
    /// Tells the time.
    pub handle: Handle,
    /// How long a guest's write waits for a mark at most (design §5.7).
    pub wait_max: Duration,
}

/// The chronicle of one volume on its lane.
pub struct Chronicler {
    volume: VolumeId,
    stay: RefCell<Stay>,
    /// What every stay of the volume on this lane begins with, but for its identity and the volume's size.
    beginning: Beginning,
    /// `None`: nobody keeps it, it ends with the daemon.
    keeping: Option<Keeping>,
    /// Writes that had to wait for a mark.
    waits: Cell<u64>,
    /// Failed flushes that copies are not told of yet.
    untold: Untold,
}

impl Chronicler {
    /// A chronicle that ends with the daemon.
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

    /// A chronicle of a stay that goes on with what a start believes of it: [`migration::stay::opening::open`].
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

    /// Bytes of a block.
    pub fn block_size(&self) -> BlockSize {
        self.beginning.block_size
    }

    /// The stay of the volume that it records.
    pub fn stay(&self) -> StayId {
        self.stay.borrow().id()
    }

    /// The epoch that records.
    pub fn open_epoch(&self) -> Epoch {
        self.stay.borrow().chronicle().open_epoch()
    }

    /// How many blocks may have been written since an epoch.
    pub fn blocks_since(&self, epoch: Epoch) -> u64 {
        self.stay.borrow().chronicle().blocks_since(epoch)
    }

    /// Freezes the open epoch, and opens the next.
    pub fn advance(&self) -> Epoch {
        self.stay.borrow_mut().advance()
    }

    /// Writes so far that had to wait for a mark.
    pub fn waits(&self) -> u64 {
        self.waits.get()
    }

    /// Why copies are known no more that were.
    pub fn given_up(&self) -> Option<GivenUp> {
        self.stay.borrow().given_up().cloned()
    }

    /// Goes on with a volume that has grown.
    pub(crate) fn grow(&self, size_bytes: u64) {
        self.stay.borrow_mut().grow(size_bytes);
    }

    /// How large the volume is that it records, in bytes.
    pub(crate) fn size_bytes(&self) -> u64 {
        self.stay.borrow().chronicle().size_bytes()
    }

    /// Begins another stay of the volume, or goes on with this one if that is it: after a restart, say. Nothing that
    /// belongs to another stay is known from here on. The volume is as large as what it comes to, whatever it was here before.
    ///
    /// # Errors
    /// [`NotDurable`]: a restart may find what a daemon before this one kept of this stay.
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

    /// The volume has left for good: what was known of its stay is of no use any more.
    pub(crate) fn end_stay(&self) {
        let forgetting = self.stay.borrow_mut().leave();
        if let Some(keeping) = &self.keeping {
            // Nothing reads it again, whether or not it goes.
            drop(keeping.keeper.forget(self.key(), forgetting.through));
        }
    }

    /// Records a change to a range, once that is durable as far as anybody needs it; returns the epoch.
    ///
    /// A data folder that takes no mark holds the write no longer than [`Keeping::wait_max`]: then what is kept is
    /// forgotten, which a full one can do. Only if it cannot do even that the write is held on: what nobody would know
    /// after a crash must not happen.
    ///
    /// # Errors
    /// [`BeyondTheEnd`]: it cannot be recorded, and must not be made.
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
                // Unreachable: without a keeper marks stay volatile. Whoever asks is never held for nothing.
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
                // It is looked again, and given up.
                Either::Right(_) => {}
            }
        }
    }

    /// What a copy lacks: the one that is told by `of`, if it is of this generation; `None`: no such copy is known.
    pub fn lacking(&self, of: ReplicaOf, generation: Generation) -> Option<LayeredBitmap> {
        self.stay.borrow().lacking(of, generation)
    }

    /// What a copy lacked when that was kept, and not what was written since: only a planted bug takes that for all.
    pub(crate) fn lacked_when_kept(&self, of: ReplicaOf) -> Option<LayeredBitmap> {
        self.stay.borrow().lacked_when_kept(of)
    }

    /// The migrations whose copies of this generation of the volume are known.
    pub fn copies(&self, generation: Generation) -> Vec<MigrationId> {
        self.stay.borrow().copies(generation)
    }

    /// The copies that are known, and how many blocks each lacks.
    pub fn replicas(&self) -> Vec<(ReplicaOf, Generation, u64)> {
        self.stay.borrow().replicas()
    }

    /// What is known of copies elsewhere, for the host that the volume leaves for ([`Stay::departs`]).
    pub(crate) fn departs(&self, to: HostId) -> Option<Departed> {
        self.stay.borrow().departs(to.0)
    }

    /// What a copy lacks at this instant that lacked so much when the volume left for here ([`Stay::lacking_since_arrival`]).
    pub(crate) fn lacking_since_arrival(&self, at_departure: &LayeredBitmap) -> Option<LayeredBitmap> {
        self.stay.borrow().lacking_since_arrival(at_departure)
    }

    /// Remembers a copy from now on: `missing` says what it lacks at this instant, and is asked between two requests.
    /// `None` changes nothing.
    ///
    /// `store` is the volume's own at the same instant: it is flushed before the copy is kept. A power cut could otherwise take
    /// back what was written before this instant and is at the copy already, and nobody would know that they differ.
    /// `None`: the volume is only about to come, and what comes is flushed before it is this host's.
    ///
    /// **N.B.** What is being written at this instant is to be in `missing`, unless the copy is to be asked for as of an
    /// earlier epoch than this one.
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
        // Also when there is nothing to mark: a folder that takes nothing shows it before anybody has to wait for it.
        keeper.mark(self.key(), premarks.epoch, premarks.blocks.clone()).await?;
        let Some(missing) = missing() else { return Ok(()) };
        let referral = self.stay.borrow_mut().take_down(&premarks, of, generation, missing);
        let Some(referral) = referral else { return Ok(()) };
        // N.B. the one that it has at this instant: it may have gone to another since this began.
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

    /// Forgets a copy. When none is left nothing is marked any more.
    ///
    /// # Errors
    /// [`NotDurable`]: a restart may still know it.
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

    /// Keeps all of it exactly: nothing is written to the volume any more.
    ///
    /// # Errors
    /// [`NotDurable`]: it is kept as the marks tell it.
    pub async fn close(&self) -> Result<(), NotDurable> {
        let Some(Keeping { keeper, .. }) = &self.keeping else { return Ok(()) };
        let kept = self.stay.borrow_mut().close();
        match kept {
            Some(kept) => keeper.keep(self.key(), kept).await,
            None => Ok(()),
        }
    }

    /// Failed flushes whose askers are not told yet.
    pub(crate) fn untold(&self) -> &Untold {
        &self.untold
    }

    /// A flush of the volume's own store has failed. Resolves when it is durable that copies are not told by what that holds
    /// any more, or has taken too long; then that is done all the same.
    pub async fn store_failed(&self) {
        let Some(Keeping { keeper, handle, wait_max }) = &self.keeping else { return };
        let doubt = self.stay.borrow_mut().store_failed();
        let Some(Doubt { stay, forgetting }) = doubt else { return };
        let (volume, key) = (self.volume, StayKey { volume: self.volume, stay });
        warn!(%volume, "a flush failed: copies elsewhere count as ones that lack everything, and the image will be none when the volume leaves it");
        let doubted = keeper.doubt(key);
        let forgotten = forgetting.map(|forgetting| (forgetting, keeper.forget(key, forgetting.through)));
        let durably = pin!(async {
            if let Err(error) = doubted.await {
                warn!(%volume, %error, "after a restart it is not known that a flush has failed");
            }
            if let Some((forgetting, forgotten)) = forgotten {
                match forgotten.await {
                    Ok(()) => self.stay.borrow_mut().forgotten(forgetting),
                    Err(error) => warn!(%volume, %error, "what is kept of the volume's copies stays"),
                }
            }
        });
        // Whichever it is, whoever waits is told.
        let _ = select(durably, handle.sleep(*wait_max)).await;
    }

    /// Gives every copy up, so that no guest waits any longer.
    async fn give_up(&self, keeping: &Keeping) {
        let volume = self.volume;
        let reason = "the data folder could not record in time what is written";
        let (key, known) = (self.key(), self.stay.borrow().replicas().len());
        let forgetting = self.stay.borrow_mut().give_up(reason);
        if known > 0 {
            warn!(%volume, copies = known, "{reason}: coming home, or going on after a restart, will be a whole copy; look at the space in the data folder");
        }
        let Some(forgetting) = forgetting else { return };
        if let Err(error) = self.make_forgotten(&keeping.keeper, key, forgetting).await {
            warn!(%volume, %error, "guests wait: what is kept of the volume's copies can neither be recorded nor deleted");
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
