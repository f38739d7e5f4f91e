//! A VM that moves with the volumes, in some of the simulations. It outlives the daemons, and checks itself: it runs at one host
//! at most, and in the end where its volumes are.
//!
//! ```text
//!   runs at the source ──memory sent, stopped──► stopped, loaded at the target ──run──► runs there
//!       ▲                                         │
//!       └────── discarding, handed back, or ◄─────┘
//!               settled after a restart
//! ```
//! Some VMs are stopped, and stay so: they are where the hosts' notes say.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};
use std::time::Duration;

use futures_channel::oneshot;
use lane::{LaneFuture, VmFault};
use migration::vm::cold::Form;

use super::host::SimHost;
use super::place::Place;
use crate::random::Random;
use crate::world::World;

const SEEDS_PERCENT: u64 = 40;
/// The percentage of VMs that are stopped.
const COLD_PERCENT: u64 = 30;
const MEMORY_MAX: Duration = Duration::from_millis(200);
const START_MAX: Duration = Duration::from_millis(10);
/// The percentage of attempts that report the pause, before the memory has arrived or too late.
const PAUSE_IS_TOLD_PERCENT: u64 = 80;
/// The percentage of attempts whose memory arrives and whose VM starts at the target.
const SUCCEEDS_PERCENT: u64 = 85;

pub(crate) struct SimVm {
    world: Rc<World>,
    random: RefCell<Random>,
    form: Form,
    at: Cell<At>,
    /// How often it was resumed at the source: earlier operations are then void.
    given_up: Cell<u64>,
    /// It did not run at the target, after it had written there.
    is_broken_there: Cell<bool>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    Runs(Place),
    /// Stopped at its source, and loaded at its target.
    Stands {
        source: Place,
        target: Place,
    },
}

impl SimVm {
    pub(super) fn draw(world: &Rc<World>, seed: u64) -> Option<Rc<Self>> {
        // From a separate stream: simulations without a VM stay as they are.
        let mut random = Random::new(seed ^ 0x3AC4_14E0);
        let is_cold = Random::new(seed ^ 0x00C0_1DC0).percent(COLD_PERCENT);
        random.percent(SEEDS_PERCENT).then(|| {
            Rc::new(Self {
                world: Rc::clone(world),
                random: RefCell::new(random),
                form: if is_cold { Form::Cold } else { Form::Live },
                at: Cell::new(At::Runs(Place::A)),
                given_up: Cell::default(),
                is_broken_there: Cell::default(),
            })
        })
    }

    pub(super) fn form(&self) -> Form {
        self.form
    }

    /// Copies its memory and stops it, unless the daemon ends before. Its hypervisor has paused it some time earlier,
    /// and may report that.
    pub(super) fn stop(
        self: &Rc<Self>,
        daemon: &Weak<SimHost>,
        (source, target): (Place, Place),
        paused: oneshot::Sender<()>,
    ) -> LaneFuture<Result<(), VmFault>> {
        let at = {
            let mut random = self.random.borrow_mut();
            let at = random.duration(Duration::from_micros(50), MEMORY_MAX);
            random.percent(PAUSE_IS_TOLD_PERCENT).then_some(at)
        };
        if let Some(at) = at {
            self.world.clock.after(at, move || {
                let _ = paused.send(());
            });
        }
        self.after(MEMORY_MAX, daemon, move |vm, succeeds| {
            if vm.at.get() != At::Runs(source) {
                let at = vm.at.get();
                vm.world.violated("VM", || format!("it leaves, and is not there: {at:?}"));
            }
            if succeeds {
                vm.at.set(At::Stands { source, target });
                Ok(())
            } else {
                Err(VmFault::new("its memory does not arrive"))
            }
        })
    }

    pub(super) fn given_up(&self) -> u64 {
        self.given_up.get()
    }

    pub(super) fn run_there(self: &Rc<Self>, daemon: &Weak<SimHost>) -> LaneFuture<Result<(), VmFault>> {
        let place = daemon.upgrade().map(|daemon| daemon.place);
        self.after(START_MAX, daemon, move |vm, succeeds| {
            let target = match vm.at.get() {
                At::Stands { target, .. } if place == Some(target) => target,
                at => {
                    let detail =
                        || format!("it is told to run at {place:?}, and does not stand there: {at:?}");
                    vm.world.violated("VM", detail);
                    return Ok(());
                }
            };
            if succeeds {
                vm.at.set(At::Runs(target));
                Ok(())
            } else {
                vm.is_broken_there.set(true);
                Err(VmFault::new("it does not start"))
            }
        })
    }

    pub(super) fn go_on(&self, source: Place) {
        if self.form == Form::Cold {
            return;
        }
        let at = self.at.replace(At::Runs(source));
        if matches!(at, At::Runs(place) if place != source) {
            self.world.violated("VM", || format!("it goes on at {source}, and is elsewhere: {at:?}"));
        }
        self.is_broken_there.set(false);
        self.given_up.set(self.given_up.get() + 1);
    }

    pub(super) fn settle(&self, place: Place) {
        match (place, self.at.get()) {
            (place, At::Stands { source, .. }) if place == source => self.go_on(source),
            (place, At::Stands { target, .. }) if place == target => self.at.set(At::Runs(target)),
            (_, At::Stands { .. } | At::Runs(_)) => {}
        }
    }

    pub(super) fn check_end(&self, owner: Place) {
        if self.form == Form::Cold {
            return;
        }
        let is_broken = matches!(self.at.get(), At::Stands { target, .. } if target == owner)
            && self.is_broken_there.get();
        let at = self.at.get();
        if at != At::Runs(owner) && !is_broken {
            self.world.violated("VM", || format!("the volumes are at {owner}, and it is not: {at:?}"));
        }
    }

    fn after(
        self: &Rc<Self>,
        longest: Duration,
        daemon: &Weak<SimHost>,
        what: impl FnOnce(&Self, bool) -> Result<(), VmFault> + 'static,
    ) -> LaneFuture<Result<(), VmFault>> {
        let (delay, succeeds) = {
            let mut random = self.random.borrow_mut();
            (random.duration(Duration::from_micros(50), longest), random.percent(SUCCEEDS_PERCENT))
        };
        let incarnation = daemon.upgrade().map(|daemon| daemon.incarnation());
        let given_up = self.given_up.get();
        let (done, result) = oneshot::channel();
        let (vm, daemon) = (Rc::clone(self), Weak::clone(daemon));
        self.world.clock.after(delay, move || {
            let lives = daemon.upgrade().is_some_and(|daemon| Some(daemon.incarnation()) == incarnation);
            if lives && vm.given_up.get() == given_up {
                let _ = done.send(what(&vm, succeeds));
            }
        });
        Box::pin(async move {
            match result.await {
                Ok(result) => result,
                // The daemon is gone, and with it the waiting task.
                Err(_) => std::future::pending().await,
            }
        })
    }
}
