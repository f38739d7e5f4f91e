//! The epochs of one stay and the copies that refer to them: what is recorded, what has to be durable, in which order.
//!
//! ```text
//!            nobody has a copy                    refer: advance, keep            somebody has a copy
//!     Volatile: writes wait for nothing ──────────────────────────────► Regions: the first write to a region waits
//!              ▲                                                                  for its mark in the open epoch
//!              └── forgetting is durable, nobody refers meanwhile ◄── forget, give_up ──┘
//! ```
//! Every method is one event; what is returned is to be carried out, and its result told. What is asked to be kept and
//! to be forgotten is carried out in the order in which it was asked for.

use std::collections::BTreeMap;

use chronicle::{
    BeyondTheEnd, BlockRange, BlockSize, ByteRange, Chronicle, Epoch, Generation, Kept, KeptReplica,
    LayeredBitmap, MarkPolicy, Recorded, ReplicaOf, StayId,
};

use crate::identity::MigrationId;
use crate::planted::{Bug, broken};

/// The first epoch of a stay: "since the epoch before" can be asked for.
pub(super) const FIRST_EPOCH: Epoch = Epoch(1);

/// What a stay begins with.
#[derive(Clone, Copy, Debug)]
pub struct Beginning {
    /// Its identity.
    pub id: StayId,
    /// Bytes of a block.
    pub block_size: BlockSize,
    /// Size of the volume in bytes.
    pub size_bytes: u64,
    /// How writes are marked while there are copies: [`MarkPolicy::regions_for`] such a volume.
    pub regions: MarkPolicy,
}

/// Why the copies of a volume are known no more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GivenUp {
    /// How many were known.
    pub copies: usize,
    /// The cause, for people.
    pub reason: String,
}

/// What has to be durable next, in the place of what is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToDo {
    /// To be kept.
    Keep(Kept),
    /// What was kept is to be forgotten.
    Forget(Forgetting),
}

/// What was kept is to be forgotten, with its marks up to an epoch; [`Stay::forgotten`] takes the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forgetting {
    /// Marks of later epochs stay: somebody may be about to refer to them.
    pub through: Epoch,
    /// How often something had been asked to be kept before.
    kept_before: u64,
    stay: StayId,
}

/// What has to be done, in this order, before a failed flush of the volume's own store is told to whoever writes to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Doubt {
    /// It is to be remembered durably of the image ([`super::ImageRecord::Failed`]), of this stay.
    pub stay: StayId,
    /// Then what was kept is to be forgotten.
    pub forgetting: Option<Forgetting>,
}

/// What may be marked before an epoch begins, so that writes wait for nothing; [`Stay::take_down`] takes the result.
#[derive(Clone, Debug)]
pub struct Premarks {
    /// The epoch that comes next.
    pub epoch: Epoch,
    /// The regions that are in use.
    pub blocks: Vec<BlockRange>,
    stay: StayId,
}

/// A copy that is about to be referred to: its epoch has ended, and its store is to be flushed before
/// [`Stay::refer`]. Nothing is forgotten of what it needs meanwhile.
#[derive(Debug)]
#[must_use = "a referral ends by `refer` or `abandon`"]
pub struct Referral {
    of: ReplicaOf,
    replica: KeptReplica,
    round: (StayId, u64),
}

/// One stay of a volume.
#[derive(Debug)]
pub struct Stay {
    id: StayId,
    chronicle: Chronicle,
    regions: MarkPolicy,
    /// The copies that refer to the chronicle. Empty while marks are volatile.
    replicas: BTreeMap<ReplicaOf, KeptReplica>,
    /// Copies that are being referred to, of this round …
    referring: u32,
    /// … which ends when all copies are given up, or the volume leaves.
    round: u64,
    /// Whether a restart may find something: from the moment that it is asked for.
    restart_finds: bool,
    /// How often something was asked to be kept.
    kept_asked: u64,
    /// The volume has left: nothing of this stay is needed any more.
    is_over: bool,
    /// A flush of the volume's own store has failed.
    is_doubted: bool,
    given_up: Option<GivenUp>,
}

impl Stay {
    /// A stay that begins: nobody has a copy.
    pub fn begin(beginning: Beginning) -> Self {
        let Beginning { id, block_size, size_bytes, regions } = beginning;
        let chronicle = Chronicle::new(block_size, size_bytes, FIRST_EPOCH);
        Self::with(id, regions, chronicle, BTreeMap::new())
    }

    /// A stay that goes on after a restart with what [`super::opening::open`] believes of it. If that is nothing, nobody
    /// is known to have a copy.
    pub fn resume(beginning: Beginning, believed: Option<Kept>) -> Self {
        let Beginning { id, block_size, size_bytes, regions } = beginning;
        let of_use = believed.filter(|kept| kept.block_size == block_size && !kept.replicas.is_empty());
        match of_use {
            None => Self::begin(beginning),
            Some(mut kept) => {
                if broken(Bug::EpochsReservedLate) {
                    // What is above an expectation that nobody kept up to date is passed over (hard case 11).
                    kept.epochs.retain(|(epoch, _)| *epoch <= kept.through);
                }
                let Kept { known_after, through, epochs, replicas, .. } = kept;
                let chronicle = match broken(Bug::EpochReused) {
                    // Numbers that have been given out are given out again (hard case 11).
                    true => Chronicle::restore(block_size, size_bytes, known_after, [], known_after),
                    false => Chronicle::restore(block_size, size_bytes, known_after, epochs, through),
                };
                let mut stay = Self::with(id, regions, chronicle.with_mark_policy(regions), replicas);
                stay.restart_finds = true;
                stay
            }
        }
    }

    /// A stay that ends with the daemon: nobody keeps anything of it.
    pub fn volatile(chronicle: Chronicle) -> Self {
        Self::with(StayId::Made, MarkPolicy::Volatile, chronicle, BTreeMap::new())
    }

    fn with(
        id: StayId,
        regions: MarkPolicy,
        chronicle: Chronicle,
        replicas: BTreeMap<ReplicaOf, KeptReplica>,
    ) -> Self {
        Self {
            id,
            chronicle,
            regions,
            replicas,
            referring: 0,
            round: 0,
            restart_finds: false,
            kept_asked: 0,
            is_over: false,
            is_doubted: false,
            given_up: None,
        }
    }

    /// Its identity.
    pub fn id(&self) -> StayId {
        self.id
    }

    /// What was written, to look at.
    pub fn chronicle(&self) -> &Chronicle {
        &self.chronicle
    }

    /// Why no copy is known any more that was; `None`: copies are known, or there were none.
    pub fn given_up(&self) -> Option<&GivenUp> {
        self.given_up.as_ref()
    }

    /// Freezes the open epoch, and opens the next.
    pub fn advance(&mut self) -> Epoch {
        self.chronicle.advance()
    }

    /// Goes on with a volume that has grown.
    pub fn grow(&mut self, size_bytes: u64) {
        self.chronicle.grow(size_bytes);
    }

    /// Records a change, unless a mark has to be durable first.
    ///
    /// # Errors
    /// [`BeyondTheEnd`]: it cannot be recorded, and must not be made.
    pub fn record(&mut self, range: ByteRange) -> Result<Recorded, BeyondTheEnd> {
        let size_bytes = self.chronicle.size_bytes();
        if range.end() > size_bytes && broken(Bug::BeyondTheEndUnrecorded) {
            return self.chronicle.record(range.offset.min(size_bytes), 0);
        }
        self.chronicle.record(range.offset, range.length)
    }

    /// The regions whose marks a change waits for.
    pub fn regions_to_mark(&self, range: ByteRange) -> BlockRange {
        self.chronicle.regions_to_mark(range.offset, range.length)
    }

    /// The marks of regions are durable in an epoch of the stay `id`.
    pub fn marked(&mut self, id: StayId, epoch: Epoch, regions: BlockRange) {
        if id == self.id {
            self.chronicle.regions_marked_durable(epoch, regions);
        }
    }

    /// What a copy lacks: the one that is told by `of`, if it is of this generation; `None`: no such copy is known.
    pub fn lacking(&self, of: ReplicaOf, generation: Generation) -> Option<LayeredBitmap> {
        let is_it = |known: &ReplicaOf| *known == of || broken(Bug::BranchMistaken) && same_host(*known, of);
        let known = self.replicas.iter().filter(|(known, _)| is_it(known));
        let replica = known.map(|(_, replica)| replica).find(|replica| replica.generation == generation)?;
        Some(lacked_by(replica, &self.chronicle))
    }

    /// What a copy lacked when that was kept, whatever was written since.
    pub fn lacked_when_kept(&self, of: ReplicaOf) -> Option<LayeredBitmap> {
        self.replicas.get(&of).map(|replica| replica.missing.clone())
    }

    /// The migrations whose copies of this generation are known.
    pub fn copies(&self, generation: Generation) -> Vec<MigrationId> {
        let known = self.replicas.iter().filter(|(_, replica)| replica.generation == generation);
        let copies = known.filter_map(|(of, _)| match of {
            ReplicaOf::Migration(migration) => Some(MigrationId(*migration)),
            ReplicaOf::Host { .. } => None,
        });
        copies.collect()
    }

    /// The copies that are known.
    pub(super) fn known(&self) -> &BTreeMap<ReplicaOf, KeptReplica> {
        &self.replicas
    }

    /// The copies that are known, of which generation, and how many blocks each lacks.
    pub fn replicas(&self) -> Vec<(ReplicaOf, Generation, u64)> {
        let lacks = |of, generation| self.lacking(of, generation).map_or(0, |lacking| lacking.count());
        let known = self.replicas.iter();
        known.map(|(of, replica)| (*of, replica.generation, lacks(*of, replica.generation))).collect()
    }

    /// Whether a copy of this name is known, of whatever generation.
    pub fn knows(&self, of: ReplicaOf) -> bool {
        self.replicas.contains_key(&of)
    }

    /// A copy is about to be referred to: what is in use is marked for the epoch that comes next.
    pub fn premarks(&self) -> Premarks {
        let (epoch, blocks) = (self.chronicle.open_epoch().next(), self.chronicle.regions_written());
        Premarks { epoch, blocks, stay: self.id }
    }

    /// `missing` says what the copy lacks at this instant; the open epoch ends with it. The copy is known when the
    /// volume's store has been flushed ([`Stay::refer`]).
    ///
    /// The marks of `premarks` are durable. `None`: the stay is over.
    pub fn take_down(
        &mut self,
        premarks: &Premarks,
        of: ReplicaOf,
        generation: Generation,
        missing: LayeredBitmap,
    ) -> Option<Referral> {
        if self.is_over || premarks.stay != self.id {
            return None;
        }
        let as_of = self.chronicle.open_epoch();
        self.chronicle.advance_under(self.regions);
        premarks.blocks.iter().for_each(|blocks| {
            self.chronicle.regions_marked_durable(premarks.epoch, *blocks);
        });
        self.referring += 1;
        Some(Referral {
            of,
            replica: KeptReplica { generation, as_of, missing },
            round: (self.id, self.round),
        })
    }

    /// Everything up to the copy's epoch is durable in the volume's store: the copy is known from now on, and is to be
    /// kept.
    pub fn refer(&mut self, referral: Referral) -> Option<Kept> {
        if !self.ends(&referral) {
            return None;
        }
        self.replicas.insert(referral.of, referral.replica);
        self.given_up = None;
        self.keep()
    }

    /// The copy is not to be known after all.
    pub fn abandon(&mut self, referral: &Referral) {
        if self.ends(referral) {
            self.unmark_if_alone();
        }
    }

    /// A referral of this stay is under way no more.
    fn ends(&mut self, referral: &Referral) -> bool {
        let is_of_now = referral.round == (self.id, self.round);
        self.referring = self.referring.saturating_sub(u32::from(is_of_now));
        is_of_now
    }

    /// Forgets a copy; says what has to be durable for a restart to know that.
    pub fn forget(&mut self, of: ReplicaOf) -> Option<ToDo> {
        self.replicas.remove(&of)?;
        if self.replicas.is_empty() {
            return Some(ToDo::Forget(self.forgetting()));
        }
        self.chronicle.advance();
        let kept = self.keep()?;
        if broken(Bug::ForgetAfterRefer) {
            // Nobody is thought to need marks any more.
            self.chronicle.advance_under(MarkPolicy::Volatile);
        }
        Some(ToDo::Keep(kept))
    }

    /// Knows no copy any more, because what they need cannot be made durable in time: every one will be made whole
    /// again. `None`: that is so already, and what was kept is forgotten.
    pub fn give_up(&mut self, reason: &str) -> Option<Forgetting> {
        if !self.replicas.is_empty() {
            let copies = self.replicas.len();
            self.given_up = Some(GivenUp { copies, reason: reason.to_owned() });
        }
        self.know_nobody();
        match self.restart_finds {
            true => Some(self.forgetting()),
            false => {
                self.unmark_if_alone();
                None
            }
        }
    }

    /// A flush of the volume's own store has failed: what copies were told by may not be what it holds, now or later. Each is
    /// forgotten, and lacks everything. `None`: that is so already.
    pub fn store_failed(&mut self) -> Option<Doubt> {
        if self.is_doubted || self.is_over || broken(Bug::FailedFlushForgotten) {
            return None;
        }
        self.is_doubted = true;
        let forgetting =
            self.give_up("a flush of its store failed, and what that holds may not be what was written");
        Some(Doubt { stay: self.id, forgetting })
    }

    /// What was kept is forgotten durably. Nothing is marked from now on, unless somebody has a copy by now.
    pub fn forgotten(&mut self, forgetting: Forgetting) {
        if forgetting.stay != self.id {
            return;
        }
        if forgetting.kept_before == self.kept_asked {
            // Nothing has been asked to be kept since, however often it was asked to forget.
            self.restart_finds = false;
        }
        if broken(Bug::ForgetAfterRefer) {
            self.restart_finds = false;
            self.chronicle.advance_under(MarkPolicy::Volatile);
            return;
        }
        self.unmark_if_alone();
    }

    /// Nothing is written to the volume any more: all of it is to be kept, exactly.
    pub fn close(&mut self) -> Option<Kept> {
        if self.replicas.is_empty() || self.is_over {
            return None;
        }
        self.chronicle.advance();
        self.keep()
    }

    /// The volume has left: nothing that was known is of any use any more.
    pub fn leave(&mut self) -> Forgetting {
        self.is_over = true;
        self.know_nobody();
        self.given_up = None;
        self.chronicle.advance_under(MarkPolicy::Volatile);
        Forgetting { through: Epoch(u64::MAX), ..self.forgetting() }
    }

    /// Knows no copy, and lets none become known that was being referred to.
    fn know_nobody(&mut self) {
        self.replicas.clear();
        self.round += 1;
        self.referring = 0;
    }

    fn forgetting(&mut self) -> Forgetting {
        let open = self.chronicle.open_epoch();
        // N.B. what is marked in the open epoch may be needed by a copy that is being referred to.
        let through = if broken(Bug::ForgetAfterRefer) { open } else { Epoch(open.0.saturating_sub(1)) };
        Forgetting { through, kept_before: self.kept_asked, stay: self.id }
    }

    /// What there is up to the last frozen epoch.
    fn keep(&mut self) -> Option<Kept> {
        let referenced: Vec<Epoch> = self.replicas.values().map(|replica| replica.as_of).collect();
        let oldest = referenced.iter().min().copied()?;
        self.kept_asked += 1;
        self.restart_finds = true;
        self.chronicle.merge_unreferenced(&referenced);
        Some(self.chronicle.keep(oldest, self.replicas.clone()))
    }

    /// Marks nothing any more if nobody has a copy, or is about to, and a restart finds none.
    fn unmark_if_alone(&mut self) {
        let is_alone = self.replicas.is_empty() && self.referring == 0 && !self.restart_finds;
        if is_alone && self.chronicle.mark_policy() != MarkPolicy::Volatile {
            self.chronicle.advance_under(MarkPolicy::Volatile);
        }
    }
}

/// What a copy lacks of a volume of this history.
pub(super) fn lacked_by(replica: &KeptReplica, chronicle: &Chronicle) -> LayeredBitmap {
    let mut lacking = LayeredBitmap::new(chronicle.blocks());
    lacking.union_with(&replica.missing);
    lacking.union_with(&chronicle.since(replica.as_of));
    lacking
}

/// Tells whether both are images that one host has kept, whichever: only the planted bug 9 takes them for the same.
fn same_host(one: ReplicaOf, other: ReplicaOf) -> bool {
    matches!((one, other), (ReplicaOf::Host { host, .. }, ReplicaOf::Host { host: same, .. }) if host == same)
}

#[cfg(test)]
mod tests;
