//! A VM that leaves with its volumes: whether it may, its state meanwhile, and what moves with it at the end.
//!
//! ```text
//!   order ── check ──► memory ── check ──► … paused, resumed, shut down … ──► paused ── check ──► last: files, run state
//!              │                 │                      │                                 │
//!              └─ refused        └─ stays               └─ noted, before anything else    └─ stays
//! ```
//! A VM moves in its current state (design §5.35). At the target it is created from its description, with the files that it had
//! when it was paused. It runs there only if it ran here. **N.B.** Its run state is durable here before anything depends on it: a
//! killed daemon resumes no VM that another party has paused.

use std::collections::BTreeSet;

use super::shape::{Difference, sentence};
use crate::planted::{Bug, broken};

/// The run state of a VM, as its hypervisor reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Does {
    /// The VM's processors run.
    Runs,
    /// Another party has paused it, or it was never started.
    Paused,
    /// It is paused for the move.
    Stands,
    /// It cannot move in this state, but can be resumed; the text says why it was stopped.
    Halted(&'static str),
    /// It can neither move nor be resumed; the text says why, and what to do.
    Cannot(&'static str),
}

impl Does {
    /// Returns the meaning of a state by the hypervisor's name. A VM in an unknown state cannot move.
    pub fn of(state: &str) -> Self {
        match state {
            "running" => Self::Runs,
            "paused" | "prelaunch" => Self::Paused,
            "finish-migrate" => Self::Stands,
            "shutdown" => Self::Cannot(
                "its guest has shut down, and only its hypervisor is left (-no-shutdown): stop it with --now, and start it again",
            ),
            "postmigrate" => Self::Halted(
                "its memory was sent to another host, and it came back: resume it first (sterna vm resume)",
            ),
            "io-error" => Self::Halted("a disk's error has stopped it: resume it first (sterna vm resume)"),
            "suspended" => {
                Self::Cannot("its guest sleeps, and a move would wake it: wake it first (QMP: system_wakeup)")
            }
            "watchdog" => {
                Self::Halted("its watchdog has stopped it: resume it (sterna vm resume), or restart it")
            }
            "guest-panicked" => Self::Cannot("its guest has crashed: restart it"),
            "internal-error" => {
                Self::Cannot("its hypervisor has met an error from which it cannot recover: restart it")
            }
            "inmigrate" => Self::Cannot("it waits for its memory from another host"),
            "preconfig" => {
                Self::Cannot("it is not configured yet: let it start first (QMP: x-exit-preconfig)")
            }
            "save-vm" | "restore-vm" => {
                Self::Cannot("a snapshot of it is being made or loaded: wait until that has ended")
            }
            "debug" => Self::Halted("a debugger has stopped it: resume it in the debugger"),
            "colo" => Self::Cannot("it is one of two that run at the same time (COLO)"),
            _ => Self::Cannot("its hypervisor reports a state that Sterna does not know"),
        }
    }
}

/// Checks whether a VM in this state, by the hypervisor's name, can be resumed.
///
/// # Errors
/// The reason why not, and what to do.
pub fn check_can_go_on(state: &str) -> Result<(), &'static str> {
    match Does::of(state) {
        Does::Cannot(why) => Err(why),
        Does::Runs | Does::Paused | Does::Stands | Does::Halted(_) => Ok(()),
    }
}

/// Whether a VM that has moved is to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    /// It ran, and is to run.
    Runs,
    /// Another party had paused it, and it stays paused.
    StaysPaused,
    /// It has ended here: nothing is resumed.
    HasEnded,
}

/// The time of a preflight check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// The migration has been ordered.
    Ordered,
    /// The VM's disks are copied, but none of its memory.
    BeforeMemory,
    /// The VM is paused, and nothing has changed hands.
    Stopped,
}

/// A step for a leaving VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Make its future run state durable, before anything else.
    Note(Then),
    /// Keep the VM here, for this reason.
    Stay(String),
}

/// The last part of a VM's description.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Last {
    /// Whether it is to run at the target.
    pub then: Then,
    /// Whether its files have changed since they were sent.
    pub files: Files,
}

/// The state of a VM's files at the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Files {
    /// The target has the current files.
    AreThere,
    /// The target has older files: they are sent again.
    Changed,
}

/// A VM that leaves.
#[derive(Clone, Debug)]
pub struct Departure {
    then: Then,
    /// The checksum of the files that were sent.
    sent: u64,
}

impl Departure {
    /// Begins a departure with the preflight check at the order. `files` is a checksum of the files that are sent first.
    ///
    /// # Errors
    /// The reason why the VM does not move.
    pub fn begin(does: &Does, found: &BTreeSet<Difference>, files: u64) -> Result<Self, String> {
        let then = then(does)?;
        refuse(found)?;
        Ok(Self { then, sent: files })
    }

    /// Returns the VM's future run state, as far as it is known.
    pub fn then(&self) -> Then {
        self.then
    }

    /// Makes the preflight check after the disks are copied. The returned run state must be durable before memory is sent.
    ///
    /// # Errors
    /// The reason why the VM does not move.
    pub fn before_memory(&mut self, does: &Does, found: &BTreeSet<Difference>) -> Result<Then, String> {
        self.then = then(does)?;
        if !broken(Bug::LookedAtOrderOnly) {
            refuse(found)?;
        }
        Ok(self.then)
    }

    /// Handles a change of the run state while the memory is sent.
    pub fn changed(&mut self, does: &Does) -> Vec<Step> {
        let now = match does {
            Does::Runs => Then::Runs,
            Does::Paused if broken(Bug::PauseOfOthersPassedOver) => return Vec::new(),
            Does::Paused | Does::Halted(_) => Then::StaysPaused,
            // The move itself causes this state.
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

    /// Makes the preflight check of the paused VM, before anything changes hands. `files` is a checksum of its current files.
    ///
    /// # Errors
    /// The reason why the VM does not move after all.
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
        Does::Stands => Err("another program is sending its memory".to_owned()),
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

/// The state of a source's VM after a restart of its daemon, once its volumes are released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceHas {
    /// Its hypervisor exists, perhaps with memory that the target lacks.
    Hypervisor,
    /// Its hypervisor has ended, for example with the host.
    Nothing,
}

/// A source's action for the memory of a VM whose volumes it has released, after a restart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rest {
    /// Send the rest of the memory.
    Send,
    /// Report that no more memory will come; the target knows whether it needs any.
    TellLost,
}

/// Decides about the rest of a VM's memory. **N.B.** A target that lacks some waits until it learns that there is none.
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
