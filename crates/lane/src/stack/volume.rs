//! One volume's live stack, and what a migration may do to it.
//!
//! ```text
//!    export ────► gate ─┬──► align ──► tracker ──► [mirror] ──► flush debt ──► store
//!    other hosts ──┘    └──► the volume at the host that owns it
//!                  └ what is below it is replaced as a whole
//! ```
//! Blocks are claimed below the gate, at the volume's owner: all clients, whichever host they are at, have one order of what
//! they do to parts of a block. Whoever has a claim goes no further than to the stores of this host.

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

use crate::chronicler::{Chronicler, NotDurable};
use crate::clients::Clients;
use crate::copy::VolumeCopy;
use crate::fencing::FencingTokens;
use crate::peer::PeerVolume;
use crate::signal::Signal;
use crate::stack::{Gate, GateMode, MirrorFilter, Tracker};

/// The first epoch of a volume's life: "since the epoch before" can be asked for.
const FIRST_EPOCH: Epoch = Epoch(1);

/// A volume that is served by this lane.
pub struct Volume {
    id: VolumeId,
    block_size: BlockSize,
    generation: Cell<Generation>,
    chronicler: Rc<Chronicler>,
    /// Claims on its blocks, in whichever of its stacks a request is.
    aligner: Aligner,
    gate: Rc<Gate>,
    fencing: FencingTokens,
    clients: Rc<Clients>,
    home: RefCell<Home>,
    /// The store that owns it, for flushes that no guest has asked for; `None`: it is at another host.
    ours: RefCell<Option<Rc<dyn BlockDevice>>>,
    /// The copying that the mirror in the stack belongs to; `None` while there is no mirror.
    copy: RefCell<Option<Rc<VolumeCopy>>>,
    /// How large other hosts know it to be, which offer it to clients.
    followers: RefCell<Vec<Weak<Cell<u64>>>>,
    /// Told when it is larger, or a host has heard of that.
    grown: Signal,
}

/// Where a volume is.
#[derive(Clone)]
pub enum Home {
    /// On this host: what owns it.
    Here(Rc<dyn BlockDevice>),
    /// On another one: the way there.
    Elsewhere(Rc<PeerVolume>),
}

impl Home {
    /// What requests go to.
    pub fn device(&self) -> Rc<dyn BlockDevice> {
        match self {
            Self::Here(store) => Rc::clone(store),
            Self::Elsewhere(owner) => Rc::clone(owner) as Rc<dyn BlockDevice>,
        }
    }
}

impl Volume {
    /// Makes the stack of a volume that nobody has a replica of yet; its bytes are in `store`, its gate is open.
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

    /// Makes the stack of a volume whose history goes on; it is at `home`, its gate is open.
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
            followers: RefCell::default(),
            grown: Signal::default(),
        };
        volume.lead_home();
        Rc::new(volume)
    }

    /// What the export serves.
    pub fn device(&self) -> Rc<dyn BlockDevice> {
        Rc::clone(&self.gate) as Rc<dyn BlockDevice>
    }

    /// Identity of the volume.
    pub fn id(&self) -> VolumeId {
        self.id
    }

    /// Bytes per block of its chronicle and of migrations.
    pub fn block_size(&self) -> BlockSize {
        self.block_size
    }

    /// Its chronicle, and the copies that refer to it.
    pub fn chronicler(&self) -> &Rc<Chronicler> {
        &self.chronicler
    }

    /// How often it has changed hands.
    pub fn generation(&self) -> Generation {
        self.generation.get()
    }

    /// Begins what may become a stay of the volume on this host, or goes on with it after a restart; it has this
    /// generation where it comes from. It lets the chronicle tell, from here on, what the replica lacks that the source
    /// keeps. It comes to a store of `size_bytes`: the volume may have grown since it left, and what this host knew of it then is
    /// of no account.
    ///
    /// **N.B.** before any guest of this host can write. What is copied passes the chronicle by.
    ///
    /// # Errors
    /// [`NotDurable`]: a daemon before this one may have begun the same stay, and a restart would still find what that
    /// kept, and trust it wrongly. The volume must not come.
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
            warn!(volume = %self.id, %error, "the way home will be a whole copy");
        }
        Ok(())
    }

    /// The gate, to look at.
    pub fn gate(&self) -> &Gate {
        &self.gate
    }

    /// What tells requests apart that came before and after a client.
    pub fn fencing(&self) -> &FencingTokens {
        &self.fencing
    }

    /// Its clients, wherever they are.
    pub fn clients(&self) -> &Rc<Clients> {
        &self.clients
    }

    /// Where the volume is.
    pub fn home(&self) -> Home {
        self.home.borrow().clone()
    }

    /// The store that owns the volume now.
    pub fn store(&self) -> Rc<dyn BlockDevice> {
        self.home.borrow().device()
    }

    /// The same store, to be flushed when no guest has asked for that: a failure is owed to the guest's next flush.
    pub fn store_for_us(&self) -> Rc<dyn BlockDevice> {
        self.ours.borrow().clone().unwrap_or_else(|| self.store())
    }

    /// Size in bytes, as guests see it.
    pub fn size(&self) -> u64 {
        self.store().geometry().size
    }

    /// The copying under way, if there is a mirror in the stack.
    pub(crate) fn copy(&self) -> Option<Rc<VolumeCopy>> {
        self.copy.borrow().clone()
    }

    /// Shows everybody the larger size that the store was prepared for.
    pub(crate) fn show_growth(&self, size: u64) {
        // Before a guest can write to what is new.
        self.chronicler.grow(size);
        if let Some(growth) = self.store().growth() {
            growth.show(size);
        }
        self.grown.notify();
    }

    /// The host that owns the volume says that it is larger: clients are offered that from here on.
    pub fn grew_elsewhere(&self, owner: &PeerVolume, size: u64) {
        owner.show_size(size);
        self.grown.notify();
    }

    /// Resolves when the volume is at another host.
    pub(crate) async fn leaves(&self) {
        self.grown.wait_for(|| matches!(self.home(), Home::Elsewhere(_)).then_some(())).await;
    }

    /// What the volume's owner says; `None`: it is at another host now, or here.
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

    /// Another host offers the volume to clients, of this size.
    pub(crate) fn is_followed_by(&self, follower: &Rc<Cell<u64>>) {
        let mut followers = self.followers.borrow_mut();
        followers.retain(|known| known.strong_count() > 0);
        followers.push(Rc::downgrade(follower));
        drop(followers);
        self.grown.notify();
    }

    /// Resolves when the volume is larger than such a host knows, to its size.
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
        // The planted bug trusts the copy's missing set to know what is written (hard case 10).
        let tracked =
            if broken(Bug::ChronicleIsMissingSet) { Rc::clone(&mirror) } else { self.tracked(mirror) };
        self.gate.replace(self.aligned(tracked))
    }

    /// Takes the mirror out of the live stack; requests that are in it go on.
    pub(crate) fn remove_mirror(&self) {
        self.copy.replace(None);
        self.lead_home();
    }

    /// Holds all requests; resolves when none is below the gate.
    pub(crate) fn close(&self) -> impl Future<Output = ()> + use<> {
        self.gate.set_mode(GateMode::Hold);
        self.gate.drained()
    }

    /// Resolves to true when a request waits at the closed gate, and to false when the gate is no longer closed.
    pub(crate) fn holds_a_request(&self) -> impl Future<Output = bool> + use<> {
        self.gate.holds_a_request()
    }

    /// Lets reads through, and holds whatever changes the volume.
    pub(crate) fn open_for_reading(&self) {
        self.gate.set_mode(GateMode::ReadsOnly);
    }

    /// Lets all requests through.
    pub(crate) fn open(&self) {
        self.gate.set_mode(GateMode::Open);
    }

    /// Serves the volume from `home` from now on, which has the generation that is given. The gate stays as it is.
    ///
    /// **N.B.** Only when the journal says that `home` owns the volume, and with the gate closed and drained, unless what
    /// is below leads to another host: requests that are there come back by the host that has given the volume away.
    pub fn change_hands(&self, home: Home, generation: Generation) {
        self.fencing.changes_hands();
        self.generation.set(generation);
        self.copy.replace(None);
        if matches!(home, Home::Elsewhere(_)) {
            self.chronicler.end_stay();
        }
        let (home, ours) = settled(home);
        if let Home::Elsewhere(owner) = self.home.replace(home) {
            owner.tell_no_more();
        }
        self.ours.replace(ours);
        self.lead_home();
        self.grown.notify();
    }

    /// Has who waits read `store` until the volume changes hands: it is not this host's yet, and the gate lets no change through.
    pub fn wait_at(&self, store: Rc<dyn BlockDevice>) {
        self.home.replace(Home::Here(store));
        self.lead_home();
    }

    fn lead_home(&self) {
        // What is below the gate ends where it is.
        match self.home() {
            Home::Here(store) => drop(self.gate.replace(self.aligned(self.tracked(store)))),
            // Its owner keeps the chronicle, and knows who its clients are.
            Home::Elsewhere(owner) => {
                owner.tell_of(&self.clients);
                drop(self.gate.lead_to(owner));
            }
        }
    }

    fn tracked(&self, below_tracker: Rc<dyn BlockDevice>) -> Rc<dyn BlockDevice> {
        Rc::new(Tracker::new(below_tracker, Rc::clone(&self.chronicler)))
    }

    fn aligned(&self, below: Rc<dyn BlockDevice>) -> Rc<dyn BlockDevice> {
        Rc::new(self.aligner.over(below))
    }
}

/// A home whose store owes failed flushes to guests, whoever asked for them; and the store for whoever is not a guest.
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
