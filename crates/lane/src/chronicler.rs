//! Keeps a volume's chronicle, and of which copies it is asked for, across restarts of the daemon.
//!
//! ```text
//!   a write ──► record() ──► its region is marked in the open epoch ──────────────────► submitted
//!                  └─ not yet: Keeper::mark(), off the lane, for whoever waits ─ durable ─┘
//!
//!   refer_to(copy): the epoch is frozen ──► Keeper::keep(): what was written, exactly, and what each copy lacks
//! ```
//! A volume of which nobody has a copy is not marked at all: its chronicle is in memory only, and costs a look at a
//! bitmap. With a copy a region is marked once an epoch; regions that are in use when an epoch ends are marked for the
//! next one beforehand, so that a steady guest waits for nothing (design §5.8, §6 "Journal").
//!
//! **N.B.** What is kept is trusted after a restart. So it goes, durably, before the first write that is not marked.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use block::{BlockDevice, Handle};
use chronicle::{
    BlockRange, BlockSize, ByteRange, Chronicle, Epoch, Generation, Kept, KeptReplica, LayeredBitmap,
    MarkPolicy, Recorded, ReplicaOf,
};
use migration::VolumeId;
use migration::planted::{Bug, broken};
use tracing::warn;

use crate::control::LaneFuture;

/// Pause before a mark that could not be made is tried again.
const MARK_RETRY: Duration = Duration::from_millis(200);

/// Makes durable what has to outlast a daemon. Each thing is asked for when the method is called, and is done also if
/// nobody waits for it.
pub trait Keeper {
    /// Makes durable that these blocks of a volume may be written in `epoch`.
    fn mark(
        &self,
        volume: VolumeId,
        epoch: Epoch,
        blocks: Vec<BlockRange>,
    ) -> LaneFuture<Result<(), NotDurable>>;

    /// Puts `kept` durably in the place of what was kept of a volume; marks of epochs up to [`Kept::through`] are of no
    /// use any more then.
    fn keep(&self, volume: VolumeId, kept: Kept) -> LaneFuture<Result<(), NotDurable>>;

    /// Forgets durably what was kept of a volume, with its marks of epochs up to `through`.
    fn forget(&self, volume: VolumeId, through: Epoch) -> LaneFuture<Result<(), NotDurable>>;
}

/// The data folder did not take it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{detail}")]
pub struct NotDurable {
    /// Why, for people.
    pub detail: String,
}

/// What a chronicle that is kept begins with.
#[derive(Clone, Copy, Debug)]
pub struct Beginning {
    /// Whose it is.
    pub volume: VolumeId,
    /// Bytes of a block.
    pub block_size: BlockSize,
    /// Size of the volume in bytes.
    pub size_bytes: u64,
    /// Epochs up to this one may have been used: it goes on with the next.
    pub reserved: Epoch,
    /// What is marked at once when there are copies: [`MarkPolicy::regions_for`] such a volume.
    pub regions: MarkPolicy,
}

/// The chronicle of one volume on its lane.
pub struct Chronicler {
    volume: VolumeId,
    chronicle: RefCell<Chronicle>,
    /// How writes are marked while there are copies.
    regions: MarkPolicy,
    /// Who keeps it; `None`: nobody, it ends with the daemon.
    keeper: Option<(Rc<dyn Keeper>, Handle)>,
    /// The copies that refer to it. Empty while marks are volatile.
    replicas: RefCell<BTreeMap<ReplicaOf, KeptReplica>>,
    /// Whether a restart may find anything of it: from the moment that it is asked for.
    is_kept: Cell<bool>,
    /// Writes that had to wait for a mark.
    waits: Cell<u64>,
}

impl Chronicler {
    /// A chronicle that ends with the daemon.
    pub fn volatile(volume: VolumeId, chronicle: Chronicle) -> Rc<Self> {
        Rc::new(Self {
            volume,
            chronicle: RefCell::new(chronicle),
            regions: MarkPolicy::Volatile,
            keeper: None,
            replicas: RefCell::default(),
            is_kept: Cell::default(),
            waits: Cell::default(),
        })
    }

    /// A chronicle that goes on with what was kept of it, if anything was.
    ///
    /// `kept` has the epochs that were kept whole, and those of later marks.
    pub fn kept(
        beginning: Beginning,
        kept: Option<Kept>,
        keeper: Rc<dyn Keeper>,
        handle: Handle,
    ) -> Rc<Self> {
        let Beginning { volume, block_size, size_bytes, reserved, regions } = beginning;
        let of_use = kept.filter(|kept| kept.block_size == block_size && !kept.replicas.is_empty());
        let (chronicle, replicas) = match of_use {
            None => (Chronicle::resume(block_size, size_bytes, reserved), BTreeMap::new()),
            Some(kept) => {
                // The planted bug goes on with numbers that have been given out (hard case 11).
                let reserved = if broken(Bug::EpochReused) { kept.known_after } else { reserved };
                let (known_after, epochs) = (kept.known_after, kept.epochs);
                let restored = Chronicle::restore(block_size, size_bytes, known_after, epochs, reserved);
                (restored.with_mark_policy(regions), kept.replicas)
            }
        };
        Rc::new(Self {
            volume,
            chronicle: RefCell::new(chronicle),
            regions: beginning.regions,
            keeper: Some((keeper, handle)),
            is_kept: Cell::new(!replicas.is_empty()),
            replicas: RefCell::new(replicas),
            waits: Cell::default(),
        })
    }

    /// Bytes of a block.
    pub fn block_size(&self) -> BlockSize {
        self.chronicle.borrow().block_size()
    }

    /// The epoch that records.
    pub fn open_epoch(&self) -> Epoch {
        self.chronicle.borrow().open_epoch()
    }

    /// How many blocks may have been written since an epoch.
    pub fn blocks_since(&self, epoch: Epoch) -> u64 {
        self.chronicle.borrow().blocks_since(epoch)
    }

    /// Freezes the open epoch, and opens the next.
    pub fn advance(&self) -> Epoch {
        self.chronicle.borrow_mut().advance()
    }

    /// Writes so far that had to wait for a mark.
    pub fn waits(&self) -> u64 {
        self.waits.get()
    }

    /// Goes on with a volume that has grown.
    pub(crate) fn grow(&self, size_bytes: u64) {
        self.chronicle.borrow_mut().grow(size_bytes);
    }

    /// Records a change to a range, once that is durable as far as anybody needs it; returns the epoch.
    ///
    /// A data folder that takes no mark holds the write: what nobody would know after a crash must not happen.
    pub(crate) async fn record(&self, range: ByteRange) -> Epoch {
        let mut has_waited = false;
        loop {
            let recorded = self.chronicle.borrow_mut().record(range.offset, range.length);
            let epoch = match recorded {
                Recorded::Marked(epoch) => return epoch,
                Recorded::WaitForMark(epoch) => epoch,
            };
            let regions = self.chronicle.borrow().regions_to_mark(range.offset, range.length);
            let Some((keeper, handle)) = &self.keeper else {
                // Unreachable: without a keeper marks stay volatile. Whoever asks is never held for nothing.
                self.chronicle.borrow_mut().regions_marked_durable(epoch, regions);
                continue;
            };
            self.waits.set(self.waits.get() + u64::from(!has_waited));
            has_waited = true;
            let marked = keeper.mark(self.volume, epoch, vec![regions]);
            if broken(Bug::MarkNotAwaited) {
                self.chronicle.borrow_mut().regions_marked_durable(epoch, regions);
                continue;
            }
            match marked.await {
                Ok(()) => self.chronicle.borrow_mut().regions_marked_durable(epoch, regions),
                Err(error) => {
                    let volume = self.volume;
                    warn!(%volume, %error, "guests wait: what they write cannot be marked in the data folder");
                    handle.sleep(MARK_RETRY).await;
                }
            }
        }
    }

    /// What a copy lacks: the one that is told by `of`, if it is of this generation; `None`: no such copy is known.
    pub fn lacking(&self, of: ReplicaOf, generation: Generation) -> Option<LayeredBitmap> {
        let replicas = self.replicas.borrow();
        let is_it = |known: &ReplicaOf| *known == of || broken(Bug::BranchMistaken) && same_host(*known, of);
        let known = replicas.iter().filter(|(known, _)| is_it(known));
        let replica = known.map(|(_, replica)| replica).find(|replica| replica.generation == generation)?;
        let chronicle = self.chronicle.borrow();
        let mut lacking = LayeredBitmap::new(chronicle.blocks());
        lacking.union_with(&replica.missing);
        lacking.union_with(&chronicle.since(replica.as_of));
        Some(lacking)
    }

    /// The copies that are known, and how many blocks each lacks.
    pub fn replicas(&self) -> Vec<(ReplicaOf, Generation, u64)> {
        let known: Vec<_> = {
            let replicas = self.replicas.borrow();
            replicas.iter().map(|(of, replica)| (*of, replica.generation)).collect()
        };
        let blocks = |of, generation| self.lacking(of, generation).map_or(0, |lacking| lacking.count());
        known.into_iter().map(|(of, generation)| (of, generation, blocks(of, generation))).collect()
    }

    /// Remembers a copy from now on: `missing` says what it lacks at this instant, and is asked between two requests.
    /// `None` changes nothing.
    ///
    /// `store` is the volume's own: it is flushed before the copy is kept. A power cut could otherwise take back what was
    /// written before this instant and is at the copy already, and nobody would know that they differ. `None`: the volume
    /// is only about to come, and what comes is flushed before it is this host's.
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
        store: Option<&dyn BlockDevice>,
        missing: impl FnOnce() -> Option<LayeredBitmap>,
    ) -> Result<(), NotDurable> {
        let Some((keeper, _)) = &self.keeper else { return Ok(()) };
        let (next, in_use) = {
            let chronicle = self.chronicle.borrow();
            (chronicle.open_epoch().next(), chronicle.regions_written())
        };
        // If this fails, or comes late, the first write to each region waits.
        let premarked = match in_use.is_empty() {
            true => Ok(()),
            false => keeper.mark(self.volume, next, in_use.clone()).await,
        };
        let Some(missing) = missing() else { return Ok(()) };
        let as_of = {
            let mut chronicle = self.chronicle.borrow_mut();
            let as_of = chronicle.open_epoch();
            chronicle.advance_under(self.regions);
            if premarked.is_ok() {
                in_use.iter().for_each(|regions| chronicle.regions_marked_durable(next, *regions));
            }
            as_of
        };
        if let Some(store) = store
            && let Err(error) = store.flush().await
        {
            self.unmark_if_alone();
            return Err(NotDurable { detail: error.to_string() });
        }
        self.replicas.borrow_mut().insert(of, KeptReplica { generation, as_of, missing });
        self.keep(keeper).await
    }

    /// Marks nothing any more if nobody has a copy, and a restart finds none.
    fn unmark_if_alone(&self) {
        if self.replicas.borrow().is_empty() && !self.is_kept.get() {
            self.chronicle.borrow_mut().advance_under(MarkPolicy::Volatile);
        }
    }

    /// Forgets a copy. When none is left nothing is marked any more.
    ///
    /// # Errors
    /// [`NotDurable`]: a restart may still know it.
    pub async fn forget(&self, of: ReplicaOf) -> Result<(), NotDurable> {
        let Some((keeper, _)) = &self.keeper else { return Ok(()) };
        if self.replicas.borrow_mut().remove(&of).is_none() {
            return Ok(());
        }
        if !self.replicas.borrow().is_empty() {
            self.chronicle.borrow_mut().advance();
            return self.keep(keeper).await;
        }
        let through = self.open_epoch();
        keeper.forget(self.volume, through).await?;
        // Somebody may have been remembered meanwhile.
        self.is_kept.set(!self.replicas.borrow().is_empty());
        self.unmark_if_alone();
        Ok(())
    }

    /// Forgets all copies: the volume has been elsewhere, and what was written there is not known here.
    ///
    /// # Errors
    /// [`NotDurable`]: a restart would still know them, and trust them wrongly.
    pub(crate) async fn forget_all(&self) -> Result<(), NotDurable> {
        let known: Vec<ReplicaOf> = self.replicas.borrow().keys().copied().collect();
        for of in known {
            self.forget(of).await?;
        }
        Ok(())
    }

    /// Keeps all of it exactly: nothing is written to the volume any more.
    pub(crate) async fn close(&self) -> Result<(), NotDurable> {
        let Some((keeper, _)) = &self.keeper else { return Ok(()) };
        if self.replicas.borrow().is_empty() {
            return Ok(());
        }
        self.chronicle.borrow_mut().advance();
        self.keep(keeper).await
    }

    /// Keeps what there is up to the last frozen epoch.
    async fn keep(&self, keeper: &Rc<dyn Keeper>) -> Result<(), NotDurable> {
        let kept = {
            let replicas = self.replicas.borrow();
            let referenced: Vec<Epoch> = replicas.values().map(|replica| replica.as_of).collect();
            let Some(oldest) = referenced.iter().min().copied() else { return Ok(()) };
            let mut chronicle = self.chronicle.borrow_mut();
            chronicle.merge_unreferenced(&referenced);
            chronicle.keep(oldest, replicas.clone())
        };
        self.is_kept.set(true);
        keeper.keep(self.volume, kept).await
    }
}

/// Tells whether both are images that one host has kept, whichever: only the planted bug 9 takes them for the same.
fn same_host(one: ReplicaOf, other: ReplicaOf) -> bool {
    matches!((one, other), (ReplicaOf::Host { host, .. }, ReplicaOf::Host { host: same, .. }) if host == same)
}
