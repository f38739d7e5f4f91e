//! What all parts of one simulation share: time, the trace, the faults drawn for it, and the verdict.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use futures_channel::oneshot;
use migration::Phase;
use migration::strategy::Strategy;

use crate::checker::patience::Excuses;
use crate::clock::Clock;
use crate::coverage::{Kind, Struck};
use crate::faults::{Fault, FaultBoard};
use crate::random::Random;
use crate::trace::Trace;

/// What all parts of a simulation share.
pub(crate) struct World {
    pub(crate) clock: Rc<Clock>,
    pub(crate) trace: Trace,
    pub(crate) faults: FaultBoard,
    pub(crate) excuses: RefCell<Excuses>,
    pub(crate) struck: RefCell<Struck>,
    /// The phase of the migration under way; `None` between migrations and while the daemon is down.
    phase: Cell<Option<Phase>>,
    /// How the migration under way copies, or the last one.
    kind: Cell<Kind>,
    era: Cell<Era>,
    /// Why to stop, and the phase in which that was asked for.
    stop: Cell<Option<(Stop, Option<Phase>)>>,
    violation: RefCell<Option<Violation>>,
    /// Messages that are held until a phase is entered.
    held: RefCell<Vec<(Phase, oneshot::Sender<()>)>>,
}

/// When something was asked for: nobody waits any more for what was asked for in another era.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Era {
    /// Grows with each end of a migration, and of a daemon.
    migration: u64,
    /// Grows with each try at the handover that is given up.
    attempt: u64,
}

/// Why the executor is to stop for a moment, or for good.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    /// The daemon is killed.
    Kill,
    /// The host loses power.
    PowerCut,
    /// Everything that was to happen has happened.
    Finished,
    /// A rule has been broken.
    Violated,
}

/// A rule that was broken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Violation {
    /// Which checker found it.
    pub(crate) checker: &'static str,
    /// When, in virtual time.
    pub(crate) at: Duration,
    /// What was found, for people.
    pub(crate) detail: String,
}

impl World {
    /// The world of a simulation that has not begun.
    pub(crate) fn new(random: &mut Random, trace: Trace) -> Rc<Self> {
        Rc::new(Self {
            clock: Clock::new(random.fork()),
            trace,
            faults: FaultBoard::new(random.fork()),
            excuses: RefCell::default(),
            struck: RefCell::default(),
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

    /// Takes note of something that happened, for the hash and for people.
    pub(crate) fn note(&self, what: &'static str, first: u64, second: u64) {
        self.trace.note(self.now(), what, first, second);
    }

    /// Says something to whoever reads the trace.
    pub(crate) fn say(&self, text: impl FnOnce() -> String) {
        self.trace.say(self.now(), text);
    }

    /// A rule was broken: the simulation ends. The first violation counts; later ones may follow from it.
    pub(crate) fn violated(&self, checker: &'static str, detail: impl FnOnce() -> String) {
        let mut violation = self.violation.borrow_mut();
        if violation.is_none() {
            let found = Violation { checker, at: self.now(), detail: detail() };
            self.trace.say(self.now(), || format!("VIOLATION ({checker}): {}", found.detail));
            *violation = Some(found);
        }
        self.stop.set(Some((Stop::Violated, self.phase())));
    }

    /// The violation, if there was one.
    pub(crate) fn violation(&self) -> Option<Violation> {
        self.violation.borrow().clone()
    }

    /// Asks the executor to stop; what was asked for first holds, except that a violation overrules.
    pub(crate) fn stop(&self, why: Stop) {
        if self.stop.get().is_none() {
            self.stop.set(Some((why, self.phase())));
        }
    }

    /// Tells whether the executor is to stop.
    pub(crate) fn is_stopped(&self) -> bool {
        self.stop.get().is_some()
    }

    /// Takes the reason to stop, and the phase in which that was asked for.
    pub(crate) fn take_stop(&self) -> Option<(Stop, Option<Phase>)> {
        self.stop.take()
    }

    /// The migration that begins copies so.
    pub(crate) fn copies_by(&self, strategy: Strategy) {
        self.kind.set(Kind::of(strategy));
    }

    /// The phase of the migration under way.
    pub(crate) fn phase(&self) -> Option<Phase> {
        self.phase.get()
    }

    /// Takes note of the phase; `None` when no migration is under way any more.
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

    /// Holds something until a phase is entered; the future ends then.
    pub(crate) fn hold_until(&self, phase: Phase) -> oneshot::Receiver<()> {
        let (sender, receiver) = oneshot::channel();
        self.held.borrow_mut().push((phase, sender));
        receiver
    }

    /// A fault has really struck something, in the phase of now.
    pub(crate) fn struck(&self, fault: Fault) {
        self.struck_in(fault, self.phase());
    }

    /// The era of now: from the end of one try at the handover, migration or daemon to the next.
    pub(crate) fn era(&self) -> Era {
        self.era.get()
    }

    /// A fault has really struck work that was asked for in `era`; if that is over, no phase is said to have met it.
    pub(crate) fn struck_late(&self, fault: Fault, era: Era) {
        let phase = self.phase().filter(|_| era == self.era());
        self.struck_in(fault, phase);
    }

    /// A message that was sent in `era` arrives with trouble: at the same migration, perhaps in a later try of it.
    pub(crate) fn struck_message(&self, era: Era) {
        let phase = self.phase().filter(|_| era.migration == self.era().migration);
        self.struck_in(Fault::MessageMishap, phase);
    }

    /// A fault has really struck something.
    pub(crate) fn struck_in(&self, fault: Fault, phase: Option<Phase>) {
        self.note("struck", fault as u64, 0);
        self.say(|| format!("fault: {}", fault.name()));
        if let Some(phase) = phase {
            // What fills a volume goes on beside the next migration, and by one strategy only.
            let kind = if phase == Phase::Filling { Kind::PostCopy } else { self.kind.get() };
            self.struck.borrow_mut().add(kind, fault, phase);
        }
    }

    /// Tells whether a fault of this kind strikes now, and takes note of it if so.
    pub(crate) fn strikes(&self, fault: Fault) -> bool {
        self.faults.take(fault, self.now())
    }
}
