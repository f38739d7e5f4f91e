//! What a host keeps of volumes' chronicles: durable when it is answered for, and after a crash whatever of the rest the
//! disk had got to.
//!
//! ```text
//!   mark ─────► under way ──► durable, answered        marks in any order, the rest one after the other
//!   keep, forget ──┘  └ killed, power cut: done or not, each mark by itself
//! ```

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::{Rc, Weak};
use std::time::Duration;

use chronicle::{BlockRange, Epoch, Kept};
use futures_channel::oneshot;
use lane::{Keeper, LaneFuture, NotDurable};
use migration::VolumeId;

use crate::random::Random;
use crate::world::World;

/// How long a write takes at least.
const LATENCY_MIN: Duration = Duration::from_micros(20);
/// How long it takes at most: one of these for each host.
const LATENCIES_MAX: [Duration; 3] =
    [Duration::from_millis(1), Duration::from_millis(20), Duration::from_millis(80)];

/// The files, and what is under way to them.
pub(crate) struct SimChronicles {
    me: Weak<Self>,
    world: Rc<World>,
    random: RefCell<Random>,
    latency_max: Duration,
    files: RefCell<BTreeMap<VolumeId, Files>>,
    under_way: RefCell<BTreeMap<u64, Work>>,
    next: Cell<u64>,
    /// When the last of what is done in order will be done.
    busy_until: Cell<Duration>,
}

#[derive(Default)]
struct Files {
    kept: Option<Vec<u8>>,
    marks: Vec<(Epoch, Vec<BlockRange>)>,
}

enum Work {
    Mark(VolumeId, Epoch, Vec<BlockRange>),
    Keep(VolumeId, Box<Kept>),
    Forget(VolumeId, Epoch),
}

impl SimChronicles {
    pub(super) fn new(world: &Rc<World>, mut random: Random) -> Rc<Self> {
        let latency_max = random.pick(&LATENCIES_MAX);
        Rc::new_cyclic(|me| Self {
            latency_max,
            me: Weak::clone(me),
            world: Rc::clone(world),
            random: RefCell::new(random),
            files: RefCell::default(),
            under_way: RefCell::default(),
            next: Cell::default(),
            busy_until: Cell::default(),
        })
    }

    /// What a daemon finds at its start.
    pub(super) fn load(&self, volume: VolumeId) -> Option<Kept> {
        let files = self.files.borrow();
        let files = files.get(&volume)?;
        match Kept::decode(files.kept.as_ref()?) {
            Ok(kept) => Some(kept.with_marks(files.marks.clone())),
            Err(error) => {
                self.world.violated("chronicle", || error.to_string());
                None
            }
        }
    }

    /// Forgets a volume that has left.
    pub(super) fn forget_now(&self, volume: VolumeId) {
        self.files.borrow_mut().remove(&volume);
    }

    /// The daemon was killed, or power was cut.
    pub(super) fn crash(&self) {
        let mut in_order_goes_on = true;
        for work in self.under_way.take().into_values() {
            let is_done = self.random.borrow_mut().percent(50);
            if matches!(work, Work::Mark(..)) {
                if is_done {
                    self.apply(work);
                }
            } else {
                in_order_goes_on &= is_done;
                if in_order_goes_on {
                    self.apply(work);
                }
            }
        }
        self.busy_until.set(Duration::ZERO);
    }

    fn begin(&self, work: Work) -> LaneFuture<Result<(), NotDurable>> {
        let number = self.next.get();
        self.next.set(number + 1);
        let mut latency = self.random.borrow_mut().duration(LATENCY_MIN, self.latency_max);
        if !matches!(work, Work::Mark(..)) {
            let now = self.world.now();
            let ends = now.max(self.busy_until.get()) + latency;
            self.busy_until.set(ends);
            latency = ends - now;
        }
        self.under_way.borrow_mut().insert(number, work);
        let (done, ended) = oneshot::channel();
        let me = Weak::clone(&self.me);
        self.world.clock.after(latency, move || {
            let Some(me) = me.upgrade() else { return };
            let work = me.under_way.borrow_mut().remove(&number);
            if let Some(work) = work {
                me.apply(work);
                // The lane may be gone.
                let _ = done.send(());
            }
        });
        Box::pin(async move {
            match ended.await {
                Ok(()) => Ok(()),
                // The daemon is gone, and whoever waits here with it.
                Err(_) => std::future::pending().await,
            }
        })
    }

    fn apply(&self, work: Work) {
        let mut files = self.files.borrow_mut();
        match work {
            Work::Mark(volume, epoch, blocks) => {
                files.entry(volume).or_default().marks.push((epoch, blocks));
            }
            Work::Keep(volume, kept) => {
                self.world.note("chronicle kept", kept.through.0, kept.replicas.len() as u64);
                let files = files.entry(volume).or_default();
                files.kept = Some(kept.encode());
                files.marks.retain(|(epoch, _)| *epoch > kept.through);
            }
            Work::Forget(volume, through) => {
                let files = files.entry(volume).or_default();
                files.kept = None;
                files.marks.retain(|(epoch, _)| *epoch > through);
            }
        }
    }
}

impl Keeper for SimChronicles {
    fn mark(
        &self,
        volume: VolumeId,
        epoch: Epoch,
        blocks: Vec<BlockRange>,
    ) -> LaneFuture<Result<(), NotDurable>> {
        self.begin(Work::Mark(volume, epoch, blocks))
    }

    fn keep(&self, volume: VolumeId, kept: Kept) -> LaneFuture<Result<(), NotDurable>> {
        self.begin(Work::Keep(volume, Box::new(kept)))
    }

    fn forget(&self, volume: VolumeId, through: Epoch) -> LaneFuture<Result<(), NotDurable>> {
        self.begin(Work::Forget(volume, through))
    }
}
