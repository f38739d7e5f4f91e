//! Orders of administrators at any moment of a migration, in some of the simulations. They are drawn from a stream of their own,
//! so that the other simulations stay as they are.
//!
//! ```text
//!   a phase is entered ──► at once, or a little later: cancel │ pause, resume │ bandwidth │ look again │ stop │ ticket
//! ```
//! A refused order changes nothing. A paused migration hands nothing over.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use lane::Promoted;
use migration::Phase;
use migration::journal::{Promotion, Stage};
use migration::session::Event as Wish;
use migration::ticket::Ticket;

use super::Fleet;
use super::host::SimHost;
use super::link::Subject;
use super::place::Place;
use crate::coverage::{Operation, Table};
use crate::random::Random;
use crate::world::Stop;

const STREAM: u64 = 0x0AD1_0D3E;
/// The percentage of simulations with such orders, and of entries into a phase that are followed by one.
const SEEDS_PERCENT: u64 = 30;
const ENTRIES_PERCENT: u64 = 40;
/// The same of phases that few migrations enter.
const SELDOM_PERCENT: u64 = 90;
/// The percentage that come at once.
const AT_ONCE_PERCENT: u64 = 40;
/// The latest orders after the beginning of a long phase, and of a short one.
const LATE: Duration = Duration::from_millis(60);
const SOON: Duration = Duration::from_micros(400);
/// No orders come later than this.
const ORDERS_END: Duration = Duration::from_secs(6);
/// The longest pause, and the longest time of a changed bandwidth.
const PAUSED_MAX: Duration = Duration::from_millis(800);
/// How long a pause may be under way to the lanes.
const PAUSES_WITHIN: Duration = Duration::from_millis(20);
const RATES: [Option<u64>; 4] = [None, Some(1 << 20), Some(8 << 20), Some(64 << 20)];
/// How often a stop looks whether the phase has ended that it waits for, and how long apart.
const STOP_LOOKS: u32 = 200;
const STOP_LOOK: Duration = Duration::from_millis(2);

pub(super) struct Administrators(Option<RefCell<Random>>);

impl Administrators {
    pub(super) fn draw(seed: u64) -> Self {
        let mut random = Random::new(seed ^ STREAM);
        Self(random.percent(SEEDS_PERCENT).then(|| RefCell::new(random)))
    }
}

impl Fleet {
    /// Draws an order after the beginning of a phase.
    pub(super) fn perhaps_order(self: &Rc<Self>, phase: Phase) {
        let Some(random) = &self.administrators.0 else { return };
        let mut random = random.borrow_mut();
        let is_early = self.world.now() < ORDERS_END;
        let percent = match phase {
            Phase::Memory | Phase::Filling | Phase::Retiring | Phase::TakingBack | Phase::Discarding => {
                SELDOM_PERCENT
            }
            _ => ENTRIES_PERCENT,
        };
        if !is_early || phase == Phase::Ended || !random.percent(percent) {
            return;
        }
        let table = Table::of_hosts(self.hosts.len());
        let possible = Operation::ALL.into_iter().filter(|operation| operation.is_of(table));
        let operation = random.pick(&possible.collect::<Vec<_>>());
        let latest = match phase {
            Phase::Copying | Phase::Memory | Phase::Filling => LATE,
            _ => SOON,
        };
        let delay = if random.percent(AT_ONCE_PERCENT) {
            Duration::ZERO
        } else {
            random.duration(Duration::from_nanos(100), latest)
        };
        drop(random);
        // Deferred even without a delay: this is called from within a driver.
        self.order_after(delay, operation);
    }

    fn order_after(self: &Rc<Self>, delay: Duration, operation: Operation) {
        let me = Rc::downgrade(self);
        self.world.clock.after(delay, move || {
            if let Some(fleet) = me.upgrade() {
                fleet.order(operation);
            }
        });
    }

    /// Gives an order to the host whose volumes are moving, or to their target's.
    fn order(self: &Rc<Self>, operation: Operation) {
        let source = self.hosts.iter().find(|host| host.is_up() && host.phase().is_some());
        let Some((source, phase)) = source.and_then(|host| Some((host, host.phase()?))) else { return };
        let target = source.peer_of_departure();
        let is_given = match (operation, target.map(|place| self.host(place))) {
            (Operation::Cancel, _) => {
                source.wish_to_cancel();
                true
            }
            (Operation::CancelThere, Some(target)) => {
                target.cancel_incoming();
                target.is_up()
            }
            (Operation::Pause, _) => self.pause(source),
            (Operation::Resume, _) => source.resume_copying(),
            (Operation::Bandwidth, _) => self.change_bandwidth(source),
            (Operation::LookAgain, target) => {
                [Some(source), target]
                    .into_iter()
                    .flatten()
                    .for_each(|host| host.tell_sessions(&Wish::LookAgain));
                true
            }
            (Operation::Stop, _) => self.stop_at(source, phase),
            (Operation::Ticket, Some(target)) => self.redeem_a_ticket(source, target),
            (Operation::CancelThere | Operation::Ticket, None) => false,
        };
        if is_given {
            self.world.ordered(operation, phase);
        }
    }

    fn pause(self: &Rc<Self>, host: &Rc<SimHost>) -> bool {
        let is_given = host.with_source(lane::SourceHandle::pause);
        if is_given {
            if host.phase() == Some(Phase::Copying) {
                host.paused_since.set(Some(self.world.now()));
            }
            let lasts = self.draw_order(|random| random.duration(Duration::from_micros(100), PAUSED_MAX));
            self.order_later_at(host.place, lasts, Operation::Resume);
        }
        is_given
    }

    fn change_bandwidth(self: &Rc<Self>, host: &Rc<SimHost>) -> bool {
        let (rate, lasts) = self.draw_order(|random| {
            (random.pick(&RATES), random.duration(Duration::from_micros(100), PAUSED_MAX))
        });
        let is_given = host.with_source(|driver| driver.set_bandwidth(rate));
        let (me, incarnation) = (host.weak(), host.incarnation());
        self.world.clock.after(lasts, move || {
            if let Some(host) = me.upgrade().filter(|host| host.incarnation() == incarnation) {
                host.with_source(|driver| driver.set_bandwidth(None));
            }
        });
        is_given
    }

    fn order_later_at(self: &Rc<Self>, place: Place, delay: Duration, operation: Operation) {
        let (me, incarnation) = (Rc::downgrade(self), self.host(place).incarnation());
        self.world.clock.after(delay, move || {
            let Some(fleet) = me.upgrade() else { return };
            let host = fleet.host(place);
            if host.incarnation() == incarnation
                && host.resume_copying()
                && let Some(phase) = host.phase()
            {
                fleet.world.ordered(operation, phase);
            }
        });
    }

    fn draw_order<T: Default>(&self, draw: impl FnOnce(&mut Random) -> T) -> T {
        self.administrators.0.as_ref().map(|random| draw(&mut random.borrow_mut())).unwrap_or_default()
    }

    /// Stops the source's daemon in order: what holds a stop ends first, and copying rests.
    fn stop_at(self: &Rc<Self>, host: &Rc<SimHost>, phase: Phase) -> bool {
        // A VM outlives its daemon: its orderly stop is another matter.
        if self.vm.is_some() || host.is_stopping.get() {
            return false;
        }
        self.world.say(|| format!("{}: is stopped in order in {phase}", host.place));
        let (fleet, host) = (Rc::clone(self), Rc::clone(host));
        host.handle.clone().spawn(async move {
            let is_held = || host.phase().is_some_and(Phase::holds_a_stop);
            for _ in 0..STOP_LOOKS {
                if is_held() {
                    host.handle.sleep(STOP_LOOK).await;
                }
            }
            // A daemon that does not stop in time is killed.
            if !is_held() {
                host.with_source(lane::SourceHandle::pause);
                host.close_in_order().await;
            }
            fleet.crash(host.place, Stop::Kill);
        });
        true
    }

    /// Redeems the ticket that the source prints, while both hosts may hear each other.
    fn redeem_a_ticket(&self, source: &SimHost, target: &SimHost) -> bool {
        let waiting = target.serving.borrow().as_ref().and_then(|serving| serving.target.borrow().clone());
        // Nothing waits there: it is refused.
        let Some((Subject::Migration(place, number), driver)) = waiting else { return target.is_up() };
        let Some(found) = source.journal().what_is_certain().filter(|_| place == source.place) else {
            return false;
        };
        let released = found.outgoing(target.place.host(), number).map(|outgoing| outgoing.stage.clone());
        let ticket = Ticket::print(&found, source.place.host(), number);
        let ticket = match (ticket, matches!(released, Some(Stage::Released(_)))) {
            (Ok(ticket), true) => ticket,
            (Err(_), false) => return true,
            (ticket, _) => {
                self.world.violated("ticket", || format!("{ticket:?} of {number}, which is {released:?}"));
                return true;
            }
        };
        let redeemed = target.journal().look(|state, possible| {
            let redeemed = ticket.redeem(state, target.place.host());
            redeemed.ok().filter(|_| possible.is_empty()).map(|(id, _)| id)
        });
        if redeemed.is_some() {
            let (attempt, generations) = (ticket.attempt, ticket.generations);
            driver.promote(Promoted { attempt, generations, promotion: Promotion::Ticket });
        }
        true
    }
}

impl SimHost {
    fn peer_of_departure(&self) -> Option<Place> {
        let id = self.journal().look(|state, _| {
            state.unfinished().find(|(_, known)| known.side.has_source()).map(|(id, _)| id)
        })?;
        self.peer_of(id)
    }

    fn with_source(&self, tell: impl FnOnce(&lane::SourceHandle)) -> bool {
        if let Some(driver) = self.with_local(|halves| halves.driver.clone()) {
            tell(&driver);
            return true;
        }
        let serving = self.serving.borrow();
        let source = serving.as_ref().map(|serving| serving.source.borrow());
        source.and_then(|source| source.as_ref().map(|half| tell(&half.driver))).is_some()
    }

    fn resume_copying(&self) -> bool {
        self.paused_since.set(None);
        self.with_source(lane::SourceHandle::resume)
    }

    fn tell_sessions(&self, wish: &Wish) {
        self.with_serving(|serving| {
            serving.sessions.values().for_each(|session| drop(session.unbounded_send(wish.clone())));
        });
    }

    /// Checks that a paused migration closes no gate.
    pub(super) fn check_not_paused(&self) {
        let paused = self.paused_since.get().is_some_and(|since| since + PAUSES_WITHIN < self.world.now());
        if paused {
            let place = self.place;
            self.world
                .violated("orders", || format!("{place}: the gates close, and the migration is paused"));
        }
    }
}
