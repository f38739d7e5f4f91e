//! A VM that leaves with its volumes: whether it may, what it does meanwhile, and what goes with it at the end.
//!
//! ```text
//!   order ── look ──► memory ── look ──► … paused, let run, shut down by others … ──► stands ── look ──► last: files, what it does
//!              │                 │                     │                                          │
//!              └─ refused        └─ stays              └─ noted, before anything else             └─ stays
//! ```
//! The state that a VM has is the state that is moved (design §5.35). At the target it is made from what is known, runs only if it ran
//! here, and has the files that it had when it stood still. **N.B.** What it does is durable here before anything is done on it: a
//! daemon that is killed lets no VM run that somebody else has paused.

use std::collections::BTreeSet;

use super::shape::{Difference, sentence};
use crate::planted::{Bug, broken};

/// What a VM does, as its hypervisor says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Does {
    /// Its processors run.
    Runs,
    /// Somebody has paused it, or it was never let run.
    Paused,
    /// It stands for the move.
    Stands,
    /// It cannot move as it is, and can be let go on: the text says why it was stopped.
    Halted(&'static str),
    /// It cannot move as it is, nor be let go on: the text says why, and what to do.
    Cannot(&'static str),
}

impl Does {
    /// What a state means, by the hypervisor's name of it. One that is not known cannot move.
    pub fn of(state: &str) -> Self {
        match state {
            "running" => Self::Runs,
            "paused" | "prelaunch" => Self::Paused,
            "finish-migrate" => Self::Stands,
            "shutdown" => Self::Cannot(
                "its guest has shut down, and only its hypervisor is left (-no-shutdown): stop it with --now, and start it again",
            ),
            "postmigrate" => Self::Halted(
                "its memory has gone elsewhere and it came back: let it go on first (sterna vm resume)",
            ),
            "io-error" => {
                Self::Halted("a disk's error has stopped it: let it go on first (sterna vm resume)")
            }
            "suspended" => {
                Self::Cannot("its guest sleeps, and a move would wake it: wake it first (QMP: system_wakeup)")
            }
            "watchdog" => {
                Self::Halted("its watchdog has stopped it: let it go on (sterna vm resume), or restart it")
            }
            "guest-panicked" => Self::Cannot("its guest has crashed: restart it"),
            "internal-error" => {
                Self::Cannot("its hypervisor has met an error that it does not get over: restart it")
            }
            "inmigrate" => Self::Cannot("it waits for its memory from another host"),
            "preconfig" => Self::Cannot("it is still being made: let it begin first (QMP: x-exit-preconfig)"),
            "save-vm" | "restore-vm" => {
                Self::Cannot("a snapshot of it is being made or loaded: wait until that has ended")
            }
            "debug" => Self::Halted("a debugger has stopped it: let it go on there"),
            "colo" => Self::Cannot("it is one of two that run at the same time (COLO)"),
            _ => Self::Cannot("its hypervisor names a state that is not known here"),
        }
    }
}

/// Whether a VM in this state, by the hypervisor's name of it, can be let go on.
///
/// # Errors
/// Why not, and what to do.
pub fn check_can_go_on(state: &str) -> Result<(), &'static str> {
    match Does::of(state) {
        Does::Cannot(why) => Err(why),
        Does::Runs | Does::Paused | Does::Stands | Does::Halted(_) => Ok(()),
    }
}

/// Whether a VM that has moved is to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    /// It ran, and runs.
    Runs,
    /// It was paused by somebody else, and stays so.
    StaysPaused,
    /// It has ended here: nothing is let run.
    HasEnded,
}

/// When it is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// The order has come.
    Ordered,
    /// Its disks are copied, and nothing of its memory is.
    BeforeMemory,
    /// It stands still, and nothing has changed hands.
    Stopped,
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Make durable what is to become of it, before anything else.
    Note(Then),
    /// It does not move, for this reason.
    Stay(String),
}

/// What goes at the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Last {
    /// Whether it is to run there.
    pub then: Then,
    /// Whether its files are others than those that went before.
    pub files: Files,
}

/// What of its files is at the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Files {
    /// What it has.
    AreThere,
    /// What it had before: they go once more.
    Changed,
}

/// A VM that leaves.
#[derive(Clone, Debug)]
pub struct Departure {
    then: Then,
    /// Of the files that have gone.
    sent: u64,
}

impl Departure {
    /// One that is looked at when the order comes. `files`: a sum of the files that go first.
    ///
    /// # Errors
    /// Why it does not move.
    pub fn begin(does: &Does, found: &BTreeSet<Difference>, files: u64) -> Result<Self, String> {
        let then = then(does)?;
        refuse(found)?;
        Ok(Self { then, sent: files })
    }

    /// What is to become of it, as far as is known.
    pub fn then(&self) -> Then {
        self.then
    }

    /// Its disks are copied: it is looked at once more. What it does is to be noted before its memory goes.
    ///
    /// # Errors
    /// Why it does not move.
    pub fn before_memory(&mut self, does: &Does, found: &BTreeSet<Difference>) -> Result<Then, String> {
        self.then = then(does)?;
        if !broken(Bug::LookedAtOrderOnly) {
            refuse(found)?;
        }
        Ok(self.then)
    }

    /// It has stopped, or runs again, while its memory goes.
    pub fn changed(&mut self, does: &Does) -> Vec<Step> {
        let now = match does {
            Does::Runs => Then::Runs,
            Does::Paused if broken(Bug::PauseOfOthersPassedOver) => return Vec::new(),
            Does::Paused | Does::Halted(_) => Then::StaysPaused,
            // That is the move's own doing.
            Does::Stands => return Vec::new(),
            Does::Cannot(_) => Then::HasEnded,
        };
        let mut steps = Vec::new();
        if now != self.then && !broken(Bug::PauseOfOthersNotNoted) {
            steps.push(Step::Note(now));
        }
        self.then = now;
        if let Does::Halted(why) | Does::Cannot(why) = does {
            steps.push(Step::Stay((*why).to_owned()));
        }
        steps
    }

    /// It stands still: what goes with it, before anything changes hands. `files`: a sum of the files that it has now.
    ///
    /// # Errors
    /// Why it does not move after all.
    pub fn stopped(&mut self, found: &BTreeSet<Difference>, files: u64) -> Result<Last, String> {
        if self.then == Then::HasEnded {
            return Err("its guest has ended while it moved".to_owned());
        }
        if !broken(Bug::LookedAtOrderOnly) && !broken(Bug::NotLookedAtAfterStop) {
            refuse(found)?;
        }
        let is_changed = std::mem::replace(&mut self.sent, files) != files && !broken(Bug::FilesOfTheOrder);
        Ok(Last { then: self.then, files: if is_changed { Files::Changed } else { Files::AreThere } })
    }
}

fn then(does: &Does) -> Result<Then, String> {
    match does {
        Does::Runs => Ok(Then::Runs),
        Does::Paused => Ok(Then::StaysPaused),
        Does::Stands => Err("its memory is being sent by somebody else".to_owned()),
        Does::Halted(why) | Does::Cannot(why) => Err((*why).to_owned()),
    }
}

fn refuse(found: &BTreeSet<Difference>) -> Result<(), String> {
    let counts = |difference: &&Difference| {
        !(matches!(difference, Difference::Work(_)) && broken(Bug::JobsPassedOver))
    };
    let found: BTreeSet<Difference> = found.iter().filter(counts).cloned().collect();
    if found.is_empty() { Ok(()) } else { Err(sentence(&found)) }
}

/// What is known, after a restart of the source's daemon, of a VM whose volumes have been released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceHas {
    /// Its hypervisor, which may have memory that the target lacks.
    Hypervisor,
    /// Nothing: it has ended, as when the host was lost.
    Nothing,
}

/// What a source does for the memory of a VM whose volumes it has released, after a restart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rest {
    /// Sees to it that the rest goes.
    Send,
    /// Says that no more of it will ever come: the target knows whether it needs any.
    TellLost,
}

/// What becomes of the rest of a VM's memory. **N.B.** A target that lacks some waits for as long as nobody says that there is none.
pub fn rest_after_restart(source: SourceHas) -> Rest {
    match source {
        SourceHas::Hypervisor => Rest::Send,
        SourceHas::Nothing if broken(Bug::LostMemoryUntold) => Rest::Send,
        SourceHas::Nothing => Rest::TellLost,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn none() -> BTreeSet<Difference> {
        BTreeSet::new()
    }

    fn job() -> BTreeSet<Difference> {
        BTreeSet::from([Difference::Work("QEMU's job \"j\" (mirror) works on its disks".to_owned())])
    }

    #[test]
    fn what_is_not_known_does_not_move() {
        for state in ["shutdown", "io-error", "suspended", "guest-panicked", "a-new-state", ""] {
            assert!(Departure::begin(&Does::of(state), &none(), 0).is_err(), "{state}");
        }
        assert!(Departure::begin(&Does::of("running"), &job(), 0).unwrap_err().contains("mirror"));
    }

    #[test]
    fn what_somebody_pauses_stays_paused_and_that_is_noted_first() {
        let mut leaves = Departure::begin(&Does::Runs, &none(), 0).unwrap();
        assert_eq!(leaves.before_memory(&Does::Runs, &none()), Ok(Then::Runs));
        assert_eq!(leaves.changed(&Does::Paused), [Step::Note(Then::StaysPaused)]);
        assert_eq!(leaves.changed(&Does::Stands), []);
        assert_eq!(leaves.stopped(&none(), 0).unwrap().then, Then::StaysPaused);
        assert_eq!(leaves.changed(&Does::Runs), [Step::Note(Then::Runs)]);
    }

    #[test]
    fn what_shuts_down_while_it_moves_stays_and_is_not_let_run() {
        let mut leaves = Departure::begin(&Does::Runs, &none(), 0).unwrap();
        let steps = leaves.changed(&Does::of("shutdown"));
        assert!(matches!(&steps[..], [Step::Note(Then::HasEnded), Step::Stay(_)]), "{steps:?}");
        assert!(leaves.stopped(&none(), 0).is_err());
    }

    #[test]
    fn what_is_stopped_by_an_error_while_it_moves_stays_and_can_be_let_go_on() {
        let mut leaves = Departure::begin(&Does::Runs, &none(), 0).unwrap();
        let steps = leaves.changed(&Does::of("io-error"));
        assert!(matches!(&steps[..], [Step::Note(Then::StaysPaused), Step::Stay(_)]), "{steps:?}");
        for (state, can_go_on) in
            [("io-error", true), ("paused", true), ("shutdown", false), ("suspended", false), ("x", false)]
        {
            assert_eq!(check_can_go_on(state).is_ok(), can_go_on, "{state}");
        }
    }

    #[test]
    fn what_changes_later_than_the_order_is_found_at_each_look() {
        let mut leaves = Departure::begin(&Does::Runs, &none(), 7).unwrap();
        assert!(leaves.clone().before_memory(&Does::Runs, &job()).is_err());
        assert!(leaves.clone().stopped(&job(), 7).is_err());
        assert_eq!(leaves.stopped(&none(), 8).unwrap().files, Files::Changed);
        assert_eq!(leaves.stopped(&none(), 8).unwrap().files, Files::AreThere);
    }

    #[test]
    fn a_source_that_has_lost_the_rest_says_so() {
        assert_eq!(rest_after_restart(SourceHas::Nothing), Rest::TellLost);
        assert_eq!(rest_after_restart(SourceHas::Hypervisor), Rest::Send);
    }
}
