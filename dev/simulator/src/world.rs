//! The shared state of one simulation: time, the trace, the drawn faults, and the verdict.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use futures_channel::oneshot;
use migration::Phase;
use migration::strategy::Strategy;

use crate::checker::patience::Excuses;
use crate::clock::Clock;
use crate::coverage::{Given, Kind, Operation, Struck};
use crate::faults::{Fault, FaultBoard};
use crate::random::Random;
use crate::trace::Trace;

pub(crate) struct World {
    pub(crate) clock: Rc<Clock>,
    pub(crate) trace: Trace,
    pub(crate) faults: FaultBoard,
    pub(crate) excuses: RefCell<Excuses>,
    pub(crate) struck: RefCell<Struck>,
    pub(crate) given: RefCell<Given>,
    /// The phase of the migration in progress; `None` between migrations and while the daemon is down.
    phase: Cell<Option<Phase>>,
    kind: Cell<Kind>,
    era: Cell<Era>,
    stop: Cell<Option<(Stop, Option<Phase>)>>,
    violation: RefCell<Option<Violation>>,
    held: RefCell<Vec<(Phase, oneshot::Sender<()>)>>,
}

/// The time of a request, as an era: requests of an earlier era have no caller.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Era {
    /// Grows with each end of a migration, and of a daemon.
    migration: u64,
    /// Grows with each abandoned attempt at the handover.
    attempt: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    Kill,
    PowerCut,
    /// All planned events have happened.
    Finished,
    Violated,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Violation {
    pub(crate) checker: &'static str,
    pub(crate) at: Duration,
    pub(crate) detail: String,
}

impl World {
    pub(crate) fn new(random: &mut Random, trace: Trace) -> Rc<Self> {
        Rc::new(Self {
            clock: Clock::new(random.fork()),
            trace,
            faults: FaultBoard::new(random.fork()),
            excuses: RefCell::default(),
            struck: RefCell::default(),
            given: RefCell::default(),
            phase: Cell::default(),
            kind: Cell::default(),
            era: Cell::default(),
            stop: Cell::default(),
            violation: RefCell::default(),
            held: RefCell::default(),
        })
    }

    pub(crate) fn now(&self) -> Duration {
        self.clock.now()
    }

    pub(crate) fn note(&self, what: &'static str, first: u64, second: u64) {
        self.trace.note(self.now(), what, first, second);
    }

    pub(crate) fn say(&self, text: impl FnOnce() -> String) {
        self.trace.say(self.now(), text);
    }

    /// Reports a violation, which ends the simulation. Only the first counts; later ones may follow from it.
    pub(crate) fn violated(&self, checker: &'static str, detail: impl FnOnce() -> String) {
        let mut violation = self.violation.borrow_mut();
        if violation.is_none() {
            let found = Violation { checker, at: self.now(), detail: detail() };
            self.trace.say(self.now(), || format!("VIOLATION ({checker}): {}", found.detail));
            *violation = Some(found);
        }
        self.stop.set(Some((Stop::Violated, self.phase())));
    }

    pub(crate) fn violation(&self) -> Option<Violation> {
        self.violation.borrow().clone()
    }

    pub(crate) fn stop(&self, why: Stop) {
        if self.stop.get().is_none() {
            self.stop.set(Some((why, self.phase())));
        }
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.stop.get().is_some()
    }

    pub(crate) fn take_stop(&self) -> Option<(Stop, Option<Phase>)> {
        self.stop.take()
    }

    pub(crate) fn copies_by(&self, strategy: Strategy) {
        self.kind.set(Kind::of(strategy));
    }

    pub(crate) fn phase(&self) -> Option<Phase> {
        self.phase.get()
    }

    pub(crate) fn set_phase(&self, phase: Option<Phase>) {
        let before = self.phase.replace(phase);
        let is_given_up = before.is_some() && phase == Some(Phase::Copying);
        let mut era = self.era.get();
        era.migration += u64::from(phase.is_none());
        era.attempt += u64::from(is_given_up);
        self.era.set(era);
        let mut held = self.held.borrow_mut();
        let (released, kept) =
            std::mem::take(&mut *held).into_iter().partition(|(until, _)| Some(*until) == phase);
        *held = kept;
        drop::<Vec<_>>(released);
    }

    pub(crate) fn hold_until(&self, phase: Phase) -> oneshot::Receiver<()> {
        let (sender, receiver) = oneshot::channel();
        self.held.borrow_mut().push((phase, sender));
        receiver
    }

    pub(crate) fn struck(&self, fault: Fault) {
        self.struck_in(fault, self.phase());
    }

    /// Returns the present era: from one end of an attempt, migration or daemon to the next.
    pub(crate) fn era(&self) -> Era {
        self.era.get()
    }

    /// Counts a fault that has struck work of `era`; if that is over, without a phase.
    pub(crate) fn struck_late(&self, fault: Fault, era: Era) {
        let phase = self.phase().filter(|_| era == self.era());
        self.struck_in(fault, phase);
    }

    /// Counts a fault of a message of `era`, which reaches the same migration, perhaps in a later attempt.
    pub(crate) fn struck_message(&self, era: Era) {
        let phase = self.phase().filter(|_| era.migration == self.era().migration);
        self.struck_in(Fault::MessageMishap, phase);
    }

    pub(crate) fn struck_in(&self, fault: Fault, phase: Option<Phase>) {
        self.note("struck", fault as u64, 0);
        self.say(|| format!("fault: {}", fault.name()));
        if let Some(phase) = phase {
            // Filling continues beside the next migration, and belongs to one strategy only.
            let kind = if phase == Phase::Filling { Kind::PostCopy } else { self.kind.get() };
            self.struck.borrow_mut().add(kind, fault, phase);
        }
    }

    /// Counts an order that comes in a phase.
    pub(crate) fn ordered(&self, operation: Operation, phase: Phase) {
        self.note("ordered", operation as u64, phase as u64);
        self.say(|| format!("order: {operation:?} in {phase}"));
        let kind = if phase == Phase::Filling { Kind::PostCopy } else { self.kind.get() };
        self.given.borrow_mut().add(kind, operation, phase);
    }

    pub(crate) fn strikes(&self, fault: Fault) -> bool {
        self.faults.take(fault, self.now())
    }
}
