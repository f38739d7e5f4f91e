//! One volume's live stack, and the operations of a migration on it.
//!
//! ```text
//!    export ────► gate ─┬──► align ──► tracker ──► [capture] ──► [mirror] ──► flush debt ──► store
//!    other hosts ──┘    └──► the volume at the host that owns it
//!                  └ the part below is replaced as a whole
//! ```
//! Blocks are claimed below the gate, at the volume's owner: changes to parts of a block have one order, for the clients of all
//! hosts. A request with a claim goes no further than to the stores of this host.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::pin::pin;
use std::rc::{Rc, Weak};

use block::BlockDevice;
use block::filter::{Aligner, FlushDebt};
use chronicle::{BlockSize, Chronicle, Epoch, Generation, LayeredBitmap, ReplicaOf, StayId};
use futures_util::future::{Either, select};
use migration::VolumeId;
use migration::planted::{Bug, broken};
use migration::stay::size_of_arrival;
use tracing::warn;

use crate::capture::Member;
use crate::chronicler::{Chronicler, NotDurable};
use crate::clients::Clients;
use crate::copy::VolumeCopy;
use crate::fencing::FencingTokens;
use crate::peer::PeerVolume;
use crate::signal::Signal;
use crate::stack::capture::Capture;
use crate::stack::{Gate, GateMode, MirrorFilter, Tracker};

/// The first epoch of a volume's life, so that "since the epoch before" is defined.
const FIRST_EPOCH: Epoch = Epoch(1);

/// A volume that is served by this lane.
pub struct Volume {
    id: VolumeId,
    block_size: BlockSize,
    generation: Cell<Generation>,
    chronicler: Rc<Chronicler>,
    /// Claims on its blocks, for requests in any of its stacks.
    aligner: Aligner,
    gate: Rc<Gate>,
    fencing: FencingTokens,
    clients: Rc<Clients>,
    home: RefCell<Home>,
    /// The store that owns it, for flushes without a guest; `None`: another host owns it.
    ours: RefCell<Option<Rc<dyn BlockDevice>>>,
    /// The copying that the mirror in the stack belongs to; `None`: there is no mirror.
    copy: RefCell<Option<Rc<VolumeCopy>>>,
    /// Its place in the group that has a standby; `None`: it has none.
    member: RefCell<Option<Member>>,
    /// The sizes that other hosts know which offer the volume to clients.
    followers: RefCell<Vec<Weak<Cell<u64>>>>,
    /// Notified when the volume has grown, or a host has learned of that.
    grown: Signal,
}

/// The location of a volume.
#[derive(Clone)]
pub enum Home {
    /// On this host, in the store that owns it.
    Here(Rc<dyn BlockDevice>),
    /// On another host, reached through this.
    Elsewhere(Rc<PeerVolume>),
}

impl Home {
    /// Returns the device that requests go to.
    pub fn device(&self) -> Rc<dyn BlockDevice> {
        match self {
            Self::Here(store) => Rc::clone(store),
            Self::Elsewhere(owner) => Rc::clone(owner) as Rc<dyn BlockDevice>,
        }
    }
}

impl Volume {
    /// Makes the stack of a volume without replicas; its bytes are in `store`, and its gate is open.
    pub fn new(
        id: VolumeId,
        block_size: BlockSize,
        generation: Generation,
        store: Rc<dyn BlockDevice>,
        aligner: Aligner,
    ) -> Rc<Self> {
        let chronicle = Chronicle::new(block_size, store.geometry().size, FIRST_EPOCH);
        let chronicler = Chronicler::volatile(id, chronicle);
        Self::with_chronicler(id, chronicler, generation, Home::Here(store), aligner)
    }

    /// Makes the stack of a volume with an existing history; it is at `home`, and its gate is open.
    pub fn with_chronicler(
        id: VolumeId,
        chronicler: Rc<Chronicler>,
        generation: Generation,
        home: Home,
        aligner: Aligner,
    ) -> Rc<Self> {
        let (home, ours) = settled(home);
        let tracker = Tracker::new(home.device(), Rc::clone(&chronicler));
        let volume = Self {
            id,
            block_size: chronicler.block_size(),
            generation: Cell::new(generation),
            chronicler,
            aligner,
            gate: Rc::new(Gate::new(Rc::new(tracker))),
            fencing: FencingTokens::default(),
            clients: Rc::default(),
            home: RefCell::new(home),
            ours: RefCell::new(ours),
            copy: RefCell::default(),
            member: RefCell::default(),
            followers: RefCell::default(),
            grown: Signal::default(),
        };
        volume.lead_home();
        Rc::new(volume)
    }

    /// Returns the device that the export serves.
    pub fn device(&self) -> Rc<dyn BlockDevice> {
        Rc::clone(&self.gate) as Rc<dyn BlockDevice>
    }

    /// Returns the device below the gate, for changes of our own while no guest's request is admitted: they are claimed, tracked and
    /// shown to the volume's group as a guest's are. `None`: the volume is not here, or is being copied.
    pub(crate) fn below_the_gate(&self) -> Option<Rc<dyn BlockDevice>> {
        let home = self.is_here() && self.copy().is_none();
        home.then(|| self.aligned(self.tracked(self.store())))
    }

    /// Returns the identity of the volume.
    pub fn id(&self) -> VolumeId {
        self.id
    }

    /// Returns the bytes per block of its chronicle and of migrations.
    pub fn block_size(&self) -> BlockSize {
        self.block_size
    }

    /// Returns its chronicle, with the copies that refer to it.
    pub fn chronicler(&self) -> &Rc<Chronicler> {
        &self.chronicler
    }

    /// Returns how often the volume has changed hands.
    pub fn generation(&self) -> Generation {
        self.generation.get()
    }

    /// Begins a possible residency of the volume on this host, or continues it after a restart. `generation` is the volume's at
    /// its source. The chronicle begins to record what the source's remaining replica lacks. The volume has `size_bytes`: it may
    /// have grown since it left here.
    ///
    /// **N.B.** Call this before any guest of this host can write. Copied blocks bypass the chronicle.
    ///
    /// # Errors
    /// [`NotDurable`]: an earlier daemon may have begun the same residency, and a restart would wrongly trust its records. The
    /// volume must not arrive.
    pub async fn begin_stay(
        &self,
        stay: StayId,
        generation: Generation,
        left_behind: Option<ReplicaOf>,
        size_bytes: u64,
    ) -> Result<(), NotDurable> {
        let size_bytes = size_of_arrival(size_bytes, self.size());
        self.chronicler.begin_stay(stay, size_bytes).await?;
        self.generation.set(generation);
        let Some(of) = left_behind else { return Ok(()) };
        let complete = LayeredBitmap::new(self.block_size.blocks_of(size_bytes));
        if let Err(error) = self.chronicler.refer_to(of, generation, || None, || Some(complete)).await {
            warn!(volume = %self.id, %error, "the return will copy everything");
        }
        Ok(())
    }

    /// Returns the gate of the volume.
    pub fn gate(&self) -> &Gate {
        &self.gate
    }

    /// Returns the fencing tokens, which separate the requests before and after a client's arrival.
    pub fn fencing(&self) -> &FencingTokens {
        &self.fencing
    }

    /// Returns its clients at all hosts.
    pub fn clients(&self) -> &Rc<Clients> {
        &self.clients
    }

    /// Returns the location of the volume.
    pub fn home(&self) -> Home {
        self.home.borrow().clone()
    }

    /// Returns whether a store of this host owns it.
    pub(crate) fn is_here(&self) -> bool {
        matches!(&*self.home.borrow(), Home::Here(_))
    }

    /// Returns the store that owns the volume.
    pub fn store(&self) -> Rc<dyn BlockDevice> {
        self.home.borrow().device()
    }

    /// Returns the same store for flushes without a guest: a failure is owed to the guest's next flush.
    pub fn store_for_us(&self) -> Rc<dyn BlockDevice> {
        self.ours.borrow().clone().unwrap_or_else(|| self.store())
    }

    /// Returns the size in bytes, as guests see it.
    pub fn size(&self) -> u64 {
        self.store().geometry().size
    }

    pub(crate) fn copy(&self) -> Option<Rc<VolumeCopy>> {
        self.copy.borrow().clone()
    }

    /// Shows the larger size, for which the store is prepared.
    pub(crate) fn show_growth(&self, size: u64) {
        // Before a guest can write to the new part.
        self.chronicler.grow(size);
        if let Some(member) = &*self.member.borrow() {
            member.grown(self.block_size.blocks_of(size));
        }
        if let Some(growth) = self.store().growth() {
            growth.show(size);
        }
        self.grown.notify();
    }

    /// Takes the larger size that the owning host reports: clients are offered it from here on.
    pub fn grew_elsewhere(&self, owner: &PeerVolume, size: u64) {
        owner.show_size(size);
        self.grown.notify();
    }

    pub(crate) async fn leaves(&self) {
        self.grown.wait_for(|| matches!(self.home(), Home::Elsewhere(_)).then_some(())).await;
    }

    pub(crate) async fn while_at<T>(
        &self,
        owner: &Rc<PeerVolume>,
        said: impl Future<Output = T>,
    ) -> Option<T> {
        let is_there = || matches!(&*self.home.borrow(), Home::Elsewhere(now) if Rc::ptr_eq(now, owner));
        let has_gone = self.grown.wait_for(|| (!is_there()).then_some(()));
        match select(pin!(said), pin!(has_gone)).await {
            Either::Left((said, _)) => Some(said),
            Either::Right(_) => None,
        }
    }

    pub(crate) fn is_followed_by(&self, follower: &Rc<Cell<u64>>) {
        let mut followers = self.followers.borrow_mut();
        followers.retain(|known| known.strong_count() > 0);
        followers.push(Rc::downgrade(follower));
        drop(followers);
        self.grown.notify();
    }

    /// Resolves to the volume's size once that exceeds the follower's.
    pub(crate) async fn larger_than(&self, follower: &Cell<u64>) -> u64 {
        self.grown.wait_for(|| Some(self.size()).filter(|size| *size > follower.get())).await
    }

    /// Resolves when every host that offers the volume to clients knows its size.
    pub(crate) async fn is_known_everywhere(&self) {
        let is_known = || {
            let followers = self.followers.borrow();
            let known = followers.iter().filter_map(Weak::upgrade).map(|known| known.get());
            known.min().is_none_or(|known| known >= self.size()).then_some(())
        };
        self.grown.wait_for(is_known).await;
    }

    /// Puts the mirror into the live stack; resolves when every write that passed it by has ended.
    pub(crate) fn insert_mirror(&self, copy: Rc<VolumeCopy>) -> impl Future<Output = ()> + use<> {
        self.copy.replace(Some(Rc::clone(&copy)));
        let mirror: Rc<dyn BlockDevice> = Rc::new(MirrorFilter::new(copy));
        // The planted bug relies on the copy's missing set for all writes (hard case 10).
        let tracked =
            if broken(Bug::ChronicleIsMissingSet) { Rc::clone(&mirror) } else { self.tracked(mirror) };
        self.gate.replace(self.aligned(tracked))
    }

    pub(crate) fn remove_mirror(&self) {
        self.copy.replace(None);
        self.lead_home();
    }

    /// Shows all changes from now on to a group, or to none; resolves when every change that passed it by has ended.
    pub(crate) fn set_member(&self, member: Option<Member>) -> impl Future<Output = ()> + use<> {
        self.member.replace(member);
        let below = match (self.copy(), self.home()) {
            (Some(copy), _) => Rc::new(MirrorFilter::new(copy)) as Rc<dyn BlockDevice>,
            (None, home) => home.device(),
        };
        let replaced = self.is_here().then(|| self.gate.replace(self.aligned(self.tracked(below))));
        async move {
            if let Some(replaced) = replaced {
                replaced.await;
            }
        }
    }

    /// Returns its place in the group that has a standby.
    pub(crate) fn member(&self) -> Option<Member> {
        self.member.borrow().clone()
    }

    /// Holds all requests; resolves when none is below the gate.
    pub(crate) fn close(&self) -> impl Future<Output = ()> + use<> {
        self.gate.set_mode(GateMode::Hold);
        self.gate.drained()
    }

    /// Resolves to true when a request waits at the closed gate, or to false once the gate is not closed.
    pub(crate) fn holds_a_request(&self) -> impl Future<Output = bool> + use<> {
        self.gate.holds_a_request()
    }

    pub(crate) fn open_for_reading(&self) {
        self.gate.set_mode(GateMode::ReadsOnly);
    }

    pub(crate) fn open(&self) {
        self.gate.set_mode(GateMode::Open);
    }

    /// Serves the volume, of this generation, from `home`. The gate keeps its mode.
    ///
    /// **N.B.** Call this only when the journal says that `home` owns the volume, with the gate closed and drained. If the
    /// present stack leads to another host, draining is not needed: the requests there come back through the host that has
    /// given the volume away.
    pub fn change_hands(&self, home: Home, generation: Generation) {
        self.fencing.changes_hands();
        self.generation.set(generation);
        self.copy.replace(None);
        if matches!(home, Home::Elsewhere(_)) {
            self.chronicler.end_stay();
            if let Some(member) = self.member.take() {
                member.left();
            }
        }
        let (home, ours) = settled(home);
        if let Home::Elsewhere(owner) = self.home.replace(home) {
            owner.tell_no_more();
        }
        self.ours.replace(ours);
        self.lead_home();
        self.grown.notify();
    }

    /// Lets waiting clients read `store` until the volume changes hands: this host does not own it yet, and the
    /// gate admits no change.
    pub fn wait_at(&self, store: Rc<dyn BlockDevice>) {
        self.home.replace(Home::Here(store));
        self.lead_home();
    }

    fn lead_home(&self) {
        // Requests below the gate end where they are.
        match self.home() {
            Home::Here(store) => drop(self.gate.replace(self.aligned(self.tracked(store)))),
            // Its owner keeps the chronicle, and knows its clients.
            Home::Elsewhere(owner) => {
                owner.tell_of(&self.clients);
                drop(self.gate.lead_to(owner));
            }
        }
    }

    fn tracked(&self, below: Rc<dyn BlockDevice>) -> Rc<dyn BlockDevice> {
        let below = match self.member() {
            Some(member) => Rc::new(Capture::new(below, member, self.block_size)),
            None => below,
        };
        Rc::new(Tracker::new(below, Rc::clone(&self.chronicler)))
    }

    fn aligned(&self, below: Rc<dyn BlockDevice>) -> Rc<dyn BlockDevice> {
        Rc::new(self.aligner.over(below))
    }
}

/// Returns a home whose store owes failed flushes to guests, and the store for flushes without a guest.
fn settled(home: Home) -> (Home, Option<Rc<dyn BlockDevice>>) {
    match home {
        Home::Here(store) => {
            let store = FlushDebt::new(store);
            let ours = store.ours();
            (Home::Here(store), Some(ours))
        }
        Home::Elsewhere(owner) => (Home::Elsewhere(owner), None),
    }
}
