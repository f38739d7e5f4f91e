//! The machine of one residency: what is recorded, and what must be durable in which order, for its epochs and copies.
//!
//! ```text
//!            no copy refers to an epoch           refer: advance, keep            a copy refers to an epoch
//!     Volatile: writes wait for nothing ──────────────────────────────► Regions: the first write to a region waits
//!              ▲                                                                  for its mark in the open epoch
//!              └── forgetting is durable, no new reference ◄── forget, give_up ─────────┘
//! ```
//! Every method is one event. The caller carries the returned action out and reports its result. `Keep` and `Forget` are
//! carried out in the order in which they were requested.

use std::collections::BTreeMap;

use chronicle::{
    BeyondTheEnd, BlockRange, BlockSize, ByteRange, Chronicle, Epoch, Generation, Kept, KeptReplica,
    LayeredBitmap, MarkPolicy, Recorded, ReplicaOf, StayId,
};

use crate::identity::MigrationId;
use crate::planted::{Bug, broken};

/// The first epoch of a residency: `since` of the epoch before it can be asked for.
pub(super) const FIRST_EPOCH: Epoch = Epoch(1);

/// The parameters of a residency.
#[derive(Clone, Copy, Debug)]
pub struct Beginning {
    /// The identity of the residency.
    pub id: StayId,
    /// The size of a block.
    pub block_size: BlockSize,
    /// The volume's size in bytes.
    pub size_bytes: u64,
    /// How writes are marked while there are copies: [`MarkPolicy::regions_for`] such a volume.
    pub regions: MarkPolicy,
}

/// The reason why a volume's copies were forgotten.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GivenUp {
    /// The number of copies forgotten.
    pub copies: usize,
    /// The cause, for the administrator.
    pub reason: String,
}

/// A state to make durable, instead of the stored one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToDo {
    /// Keep this state of the chronicle.
    Keep(Kept),
    /// Forget the kept state.
    Forget(Forgetting),
}

/// An order to forget the kept state, with its marks up to an epoch; [`Stay::forgotten`] takes the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forgetting {
    /// Marks of later epochs stay, because a copy may be about to refer to them.
    pub through: Epoch,
    /// How often a state had been requested to be kept before.
    kept_before: u64,
    stay: StayId,
}

/// The actions, in order, before guests learn of a failed flush of the volume's own store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Doubt {
    /// First record the failure for the image of this residency ([`super::ImageRecord::Failed`]).
    pub stay: StayId,
    /// Then forget the kept state.
    pub forgetting: Option<Forgetting>,
}

/// Regions to mark before an epoch begins, so that writes need not wait; [`Stay::take_down`] takes the result.
#[derive(Clone, Debug)]
pub struct Premarks {
    /// The epoch that comes next.
    pub epoch: Epoch,
    /// The regions that are in use.
    pub blocks: Vec<BlockRange>,
    stay: StayId,
}

/// A copy that is about to be referred to. Its epoch has ended, and its store must be flushed before [`Stay::refer`]. Meanwhile
/// nothing that it needs is forgotten.
#[derive(Debug)]
#[must_use = "a referral ends by `refer` or `abandon`"]
pub struct Referral {
    of: ReplicaOf,
    replica: KeptReplica,
    round: (StayId, u64),
}

/// One residency of a volume at this host.
#[derive(Debug)]
pub struct Stay {
    id: StayId,
    chronicle: Chronicle,
    regions: MarkPolicy,
    /// The copies that refer to the chronicle. Empty while marks are volatile.
    replicas: BTreeMap<ReplicaOf, KeptReplica>,
    /// The number of referrals in this round …
    referring: u32,
    /// … which ends when all copies are given up, or the volume leaves.
    round: u64,
    /// Whether a restart may find a kept state, from the moment it is requested.
    restart_finds: bool,
    kept_asked: u64,
    /// Whether the volume has left, so that nothing of this residency is needed.
    is_over: bool,
    /// Whether a flush of the volume's own store has failed.
    is_doubted: bool,
    given_up: Option<GivenUp>,
}

impl Stay {
    /// Begins a residency without copies.
    pub fn begin(beginning: Beginning) -> Self {
        let Beginning { id, block_size, size_bytes, regions } = beginning;
        let chronicle = Chronicle::new(block_size, size_bytes, FIRST_EPOCH);
        Self::with(id, regions, chronicle, BTreeMap::new())
    }

    /// Resumes a residency after a restart with the state that [`super::opening::open`] trusts; without one, no copy is known.
    pub fn resume(beginning: Beginning, believed: Option<Kept>) -> Self {
        let Beginning { id, block_size, size_bytes, regions } = beginning;
        let of_use = believed.filter(|kept| kept.block_size == block_size && !kept.replicas.is_empty());
        match of_use {
            None => Self::begin(beginning),
            Some(mut kept) => {
                if broken(Bug::EpochsReservedLate) {
                    // Epochs above an outdated expectation are ignored (hard case 11).
                    kept.epochs.retain(|(epoch, _)| *epoch <= kept.through);
                }
                let Kept { known_after, through, epochs, replicas, .. } = kept;
                let chronicle = match broken(Bug::EpochReused) {
                    // Assigned numbers are assigned again (hard case 11).
                    true => Chronicle::restore(block_size, size_bytes, known_after, [], known_after),
                    false => Chronicle::restore(block_size, size_bytes, known_after, epochs, through),
                };
                let mut stay = Self::with(id, regions, chronicle.with_mark_policy(regions), replicas);
                stay.restart_finds = true;
                stay
            }
        }
    }

    /// Returns a residency that ends with the daemon: nothing of it is kept.
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

    /// Returns the identity of the residency.
    pub fn id(&self) -> StayId {
        self.id
    }

    /// Returns the chronicle of writes, to read.
    pub fn chronicle(&self) -> &Chronicle {
        &self.chronicle
    }

    /// Returns why known copies were forgotten; `None` if copies are known, or there were none.
    pub fn given_up(&self) -> Option<&GivenUp> {
        self.given_up.as_ref()
    }

    /// Freezes the open epoch, opens the next one and returns its number.
    pub fn advance(&mut self) -> Epoch {
        self.chronicle.advance()
    }

    /// Grows the chronicle with the volume.
    pub fn grow(&mut self, size_bytes: u64) {
        self.chronicle.grow(size_bytes);
    }

    /// Records a change, unless a mark must be durable first.
    ///
    /// # Errors
    /// [`BeyondTheEnd`]: the change cannot be recorded, and must not be made.
    pub fn record(&mut self, range: ByteRange) -> Result<Recorded, BeyondTheEnd> {
        let size_bytes = self.chronicle.size_bytes();
        if range.end() > size_bytes && broken(Bug::BeyondTheEndUnrecorded) {
            return self.chronicle.record(range.offset.min(size_bytes), 0);
        }
        self.chronicle.record(range.offset, range.length)
    }

    /// Returns the regions whose marks a change waits for.
    pub fn regions_to_mark(&self, range: ByteRange) -> BlockRange {
        self.chronicle.regions_to_mark(range.offset, range.length)
    }

    /// Notes that marks in an epoch of the residency `id` are durable.
    pub fn marked(&mut self, id: StayId, epoch: Epoch, regions: BlockRange) {
        if id == self.id {
            self.chronicle.regions_marked_durable(epoch, regions);
        }
    }

    /// Returns the missing set of the copy `of`, if it is known with this generation.
    pub fn lacking(&self, of: ReplicaOf, generation: Generation) -> Option<LayeredBitmap> {
        let is_it = |known: &ReplicaOf| *known == of || broken(Bug::BranchMistaken) && same_host(*known, of);
        let known = self.replicas.iter().filter(|(known, _)| is_it(known));
        let replica = known.map(|(_, replica)| replica).find(|replica| replica.generation == generation)?;
        Some(lacked_by(replica, &self.chronicle))
    }

    /// Returns the missing set of a copy at the time of keeping, without later writes.
    pub fn lacked_when_kept(&self, of: ReplicaOf) -> Option<LayeredBitmap> {
        self.replicas.get(&of).map(|replica| replica.missing.clone())
    }

    /// Returns the migrations whose copies of this generation are known.
    pub fn copies(&self, generation: Generation) -> Vec<MigrationId> {
        let known = self.replicas.iter().filter(|(_, replica)| replica.generation == generation);
        let copies = known.filter_map(|(of, _)| match of {
            ReplicaOf::Migration(migration) => Some(MigrationId(*migration)),
            ReplicaOf::Host { .. } => None,
        });
        copies.collect()
    }

    pub(super) fn known(&self) -> &BTreeMap<ReplicaOf, KeptReplica> {
        &self.replicas
    }

    /// Returns the known copies, with the generation and the number of missing blocks of each.
    pub fn replicas(&self) -> Vec<(ReplicaOf, Generation, u64)> {
        let lacks = |of, generation| self.lacking(of, generation).map_or(0, |lacking| lacking.count());
        let known = self.replicas.iter();
        known.map(|(of, replica)| (*of, replica.generation, lacks(*of, replica.generation))).collect()
    }

    /// Returns whether this copy is known, of any generation.
    pub fn knows(&self, of: ReplicaOf) -> bool {
        self.replicas.contains_key(&of)
    }

    /// Prepares a referral: returns the used regions, to be marked for the next epoch.
    pub fn premarks(&self) -> Premarks {
        let (epoch, blocks) = (self.chronicle.open_epoch().next(), self.chronicle.regions_written());
        Premarks { epoch, blocks, stay: self.id }
    }

    /// Ends the open epoch for a copy that lacks `missing` at this instant. The copy is known once the volume's store has been
    /// flushed ([`Stay::refer`]).
    ///
    /// The marks of `premarks` must be durable. `None` if the residency is over.
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

    /// Makes a copy known, and returns the state to keep. The volume's store must be durable up to the copy's epoch.
    pub fn refer(&mut self, referral: Referral) -> Option<Kept> {
        if !self.ends(&referral) {
            return None;
        }
        self.replicas.insert(referral.of, referral.replica);
        self.given_up = None;
        self.keep()
    }

    /// Abandons a referral: the copy stays unknown.
    pub fn abandon(&mut self, referral: &Referral) {
        if self.ends(referral) {
            self.unmark_if_alone();
        }
    }

    /// Ends a referral; returns whether it belongs to the current round.
    fn ends(&mut self, referral: &Referral) -> bool {
        let is_of_now = referral.round == (self.id, self.round);
        self.referring = self.referring.saturating_sub(u32::from(is_of_now));
        is_of_now
    }

    /// Forgets a copy; returns what must be durable for a restart to know that.
    pub fn forget(&mut self, of: ReplicaOf) -> Option<ToDo> {
        self.replicas.remove(&of)?;
        if self.replicas.is_empty() {
            return Some(ToDo::Forget(self.forgetting()));
        }
        self.chronicle.advance();
        let kept = self.keep()?;
        if broken(Bug::ForgetAfterRefer) {
            // No copy is assumed to need marks.
            self.chronicle.advance_under(MarkPolicy::Volatile);
        }
        Some(ToDo::Keep(kept))
    }

    /// Forgets all copies because their state cannot be made durable in time; each will be copied in full. `None` if that is so
    /// already, and the kept state is forgotten.
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

    /// Handles a failed flush of the volume's own store: it may not hold, now or later, the blocks that copies are based on.
    /// Each copy is forgotten, and lacks everything. `None` if that is so already.
    pub fn store_failed(&mut self) -> Option<Doubt> {
        if self.is_doubted || self.is_over || broken(Bug::FailedFlushForgotten) {
            return None;
        }
        self.is_doubted = true;
        let forgetting = self.give_up("a flush of its store failed, and the store may lack writes");
        Some(Doubt { stay: self.id, forgetting })
    }

    /// Notes that a kept state is durably forgotten. From now on nothing is marked, unless a copy is known by now.
    pub fn forgotten(&mut self, forgetting: Forgetting) {
        if forgetting.stay != self.id {
            return;
        }
        if forgetting.kept_before == self.kept_asked {
            // No state was requested to be kept since, however often forgetting was.
            self.restart_finds = false;
        }
        if broken(Bug::ForgetAfterRefer) {
            self.restart_finds = false;
            self.chronicle.advance_under(MarkPolicy::Volatile);
            return;
        }
        self.unmark_if_alone();
    }

    /// Returns the exact state to keep, once nothing is written to the volume.
    pub fn close(&mut self) -> Option<Kept> {
        if self.replicas.is_empty() || self.is_over {
            return None;
        }
        self.chronicle.advance();
        self.keep()
    }

    /// Ends the residency: the volume has left, and the known copies are useless.
    pub fn leave(&mut self) -> Forgetting {
        self.is_over = true;
        self.know_nobody();
        self.given_up = None;
        self.chronicle.advance_under(MarkPolicy::Volatile);
        Forgetting { through: Epoch(u64::MAX), ..self.forgetting() }
    }

    fn know_nobody(&mut self) {
        self.replicas.clear();
        self.round += 1;
        self.referring = 0;
    }

    fn forgetting(&mut self) -> Forgetting {
        let open = self.chronicle.open_epoch();
        // **N.B.** A copy that is being referred to may need the marks of the open epoch.
        let through = if broken(Bug::ForgetAfterRefer) { open } else { Epoch(open.0.saturating_sub(1)) };
        Forgetting { through, kept_before: self.kept_asked, stay: self.id }
    }

    /// Returns the state up to the last frozen epoch.
    fn keep(&mut self) -> Option<Kept> {
        let referenced: Vec<Epoch> = self.replicas.values().map(|replica| replica.as_of).collect();
        let oldest = referenced.iter().min().copied()?;
        self.kept_asked += 1;
        self.restart_finds = true;
        self.chronicle.merge_unreferenced(&referenced);
        Some(self.chronicle.keep(oldest, self.replicas.clone()))
    }

    /// Stops marking if there is no copy and no referral, and a restart finds none.
    fn unmark_if_alone(&mut self) {
        let is_alone = self.replicas.is_empty() && self.referring == 0 && !self.restart_finds;
        if is_alone && self.chronicle.mark_policy() != MarkPolicy::Volatile {
            self.chronicle.advance_under(MarkPolicy::Volatile);
        }
    }
}

/// Returns the missing set of a copy by this history.
pub(super) fn lacked_by(replica: &KeptReplica, chronicle: &Chronicle) -> LayeredBitmap {
    let mut lacking = LayeredBitmap::new(chronicle.blocks());
    lacking.union_with(&replica.missing);
    lacking.union_with(&chronicle.since(replica.as_of));
    lacking
}

/// Returns whether both are images kept by one host. Only planted bug 9 takes such images for the same.
fn same_host(one: ReplicaOf, other: ReplicaOf) -> bool {
    matches!((one, other), (ReplicaOf::Host { host, .. }, ReplicaOf::Host { host: same, .. }) if host == same)
}

#[cfg(test)]
mod tests;
