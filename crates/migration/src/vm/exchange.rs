//! Decides the next step when the disks of a running VM are adopted or given back.
//!
//! ```text
//!   adopt:    File ──► Nothing ──► volume served ──► Export        the VM is paused from the first step
//!   release:  Export ─► Nothing ──► volume gone ───► File          to the last
//! ```
//! The next step depends on the observed state and the goal, never on earlier steps: after a kill the next daemon continues
//! from observation. A failed step reverses the exchange, because a VM with its disks on either side can run. If the reverse
//! fails as well, it is reversed again, with growing pauses, until one direction succeeds.
//!
//! Three rules always hold. A file that the hypervisor has open is not served. The hypervisor opens no file that is served. A
//! volume below an unknown layer is not removed.

use std::time::Duration;

/// The pause before a direction is tried again after both have failed.
const PAUSE_LEAST: Duration = Duration::from_millis(100);
const PAUSE_MOST: Duration = Duration::from_secs(5);

/// The side on which the disks are to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Goal {
    /// On their volumes' exports.
    Volumes,
    /// On their files, without a volume.
    Files,
}

/// What a disk is attached to, as its hypervisor reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Over {
    /// A file of this host.
    File,
    /// Nothing: a write would be lost.
    Nothing,
    /// The export of its volume.
    Export,
    /// Something unrelated to the volume, by another party's action.
    Elsewhere,
    /// The VM does not have the disk, and does not use the volume.
    Gone,
    /// A layer above the volume, or an unrecognised source.
    Unknown,
}

/// The observed state of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SeenDisk {
    /// The current source of the disk.
    pub over: Over,
    /// Whether its volume exists.
    pub is_served: bool,
}

/// The next step; disks are named by their position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Pause the VM during the exchange.
    Pause,
    /// Detach a disk from its source.
    LeadToNothing(usize),
    /// Make the volume of a disk.
    Serve(usize),
    /// Attach a disk to its volume's export.
    LeadToExport(usize),
    /// Remove a disk's volume; the file stays.
    StopServing(usize),
    /// Attach a disk to its file.
    LeadToFile(usize),
    /// All disks are on this side, and the VM may run.
    Complete(Goal),
}

/// The exchange of the disks of one VM.
#[derive(Clone, Debug)]
pub struct Exchange {
    goal: Goal,
    failures: u32,
}

impl Exchange {
    /// Begins an exchange towards this goal.
    pub fn towards(goal: Goal) -> Self {
        Self { goal, failures: 0 }
    }

    /// Resumes an exchange after a restart. An adoption is completed if only the VM is left to resume, and reversed otherwise,
    /// because no client waits for it.
    pub fn after_restart(goal: Goal, disks: &[SeenDisk]) -> Self {
        let is_done = disks.iter().all(|disk| matches!(disk.over, Over::Export | Over::Gone));
        match goal {
            Goal::Volumes if is_done => Self::towards(Goal::Volumes),
            Goal::Volumes | Goal::Files => Self::towards(Goal::Files),
        }
    }

    /// Returns the current goal.
    pub fn goal(&self) -> Goal {
        self.goal
    }

    /// Returns the next step for the observed state.
    pub fn next_step(&mut self, is_running: bool, disks: &[SeenDisk]) -> Step {
        self.turn_where_it_must(disks);
        let wanted =
            disks.iter().enumerate().find_map(|(index, disk)| Some((index, self.step_of(index, *disk)?)));
        match wanted {
            None => Step::Complete(self.goal),
            // An unused volume is no reason to pause the VM.
            Some((_, step @ Step::StopServing(index)))
                if disks.get(index).is_some_and(|disk| disk.over != Over::Nothing) =>
            {
                step
            }
            Some(_) if is_running => Step::Pause,
            Some((_, step)) => step,
        }
    }

    /// Keeps a volume served below an unknown layer, and does not adopt disks that another party has exchanged.
    fn turn_where_it_must(&mut self, disks: &[SeenDisk]) {
        let is_any = |is: fn(&SeenDisk) -> bool| disks.iter().any(is);
        if is_any(|disk| disk.over == Over::Unknown && disk.is_served) {
            self.goal = Goal::Volumes;
        } else if is_any(|disk| matches!(disk.over, Over::Unknown | Over::Elsewhere) && !disk.is_served) {
            self.goal = Goal::Files;
        }
    }

    fn step_of(&self, index: usize, disk: SeenDisk) -> Option<Step> {
        match (self.goal, disk.over, disk.is_served) {
            (Goal::Volumes, Over::Export | Over::Gone | Over::Elsewhere | Over::Unknown, _)
            | (Goal::Files, Over::File | Over::Gone | Over::Elsewhere | Over::Unknown, false) => None,
            (Goal::Volumes, Over::File, _) | (Goal::Files, Over::Export, _) => {
                Some(Step::LeadToNothing(index))
            }
            (Goal::Volumes, Over::Nothing, false) => Some(Step::Serve(index)),
            (Goal::Volumes, Over::Nothing, true) => Some(Step::LeadToExport(index)),
            (Goal::Files, _, true) => Some(Step::StopServing(index)),
            (Goal::Files, Over::Nothing, false) => Some(Step::LeadToFile(index)),
        }
    }

    /// Handles a failed step: reverses the exchange, and returns the pause before the next step.
    pub fn failed(&mut self) -> Duration {
        self.goal = match self.goal {
            Goal::Volumes => Goal::Files,
            Goal::Files => Goal::Volumes,
        };
        let pause = match self.failures {
            0 => Duration::ZERO,
            more => PAUSE_LEAST.saturating_mul(2_u32.saturating_pow(more - 1)).min(PAUSE_MOST),
        };
        self.failures = self.failures.saturating_add(1);
        pause
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A VM with two disks, as its hypervisor and the journal see it.
    #[derive(Clone, Debug)]
    struct World {
        is_running: bool,
        disks: Vec<SeenDisk>,
    }

    impl World {
        fn adopted(is_adopted: bool) -> Self {
            let over = if is_adopted { Over::Export } else { Over::File };
            Self { is_running: true, disks: vec![SeenDisk { over, is_served: is_adopted }; 2] }
        }

        fn take(&mut self, step: Step) -> Option<()> {
            let is_paused = !self.is_running;
            let disks = &mut self.disks;
            match step {
                Step::Complete(_) => return None,
                Step::Pause => self.is_running = false,
                Step::LeadToNothing(index) => {
                    assert!(is_paused, "a running VM would write to nothing");
                    disks[index].over = Over::Nothing;
                }
                Step::Serve(index) => {
                    assert!(disks[index].over != Over::File, "two would have the file open");
                    disks[index].is_served = true;
                }
                Step::LeadToExport(index) => {
                    assert!(disks[index].is_served);
                    disks[index].over = Over::Export;
                }
                Step::StopServing(index) => {
                    assert!(disks[index].over != Over::Export, "its disk would be gone");
                    disks[index].is_served = false;
                }
                Step::LeadToFile(index) => {
                    assert!(!disks[index].is_served, "two would have the file open");
                    disks[index].over = Over::File;
                }
            }
            Some(())
        }

        fn check(&self, goal: Goal) {
            let over = if goal == Goal::Volumes { Over::Export } else { Over::File };
            let wanted = SeenDisk { over, is_served: goal == Goal::Volumes };
            assert!(self.disks.iter().all(|disk| *disk == wanted), "{goal:?}: {self:?}");
        }
    }

    /// Simulates an exchange. `fates` decides each step: 0 done, 1 refused, 2 done and the daemon killed, 3 killed before it.
    fn play(goal: Goal, fates: &[u8]) {
        let mut world = World::adopted(goal == Goal::Files);
        let mut exchange = Exchange::towards(goal);
        for turn in 0..200 {
            let step = exchange.next_step(world.is_running, &world.disks);
            // Every step after the last fate succeeds.
            let fate = fates.get(turn).copied().unwrap_or(0);
            if fate == 1 && !matches!(step, Step::Complete(_)) {
                exchange.failed();
                continue;
            }
            if fate != 3 && world.take(step).is_none() {
                return world.check(exchange.goal());
            }
            if fate >= 2 {
                exchange = Exchange::after_restart(goal, &world.disks);
            }
        }
        panic!("{goal:?} {fates:?} does not end: {world:?}");
    }

    #[test]
    fn whatever_is_refused_and_wherever_the_daemon_is_killed_all_disks_end_on_one_side() {
        for goal in [Goal::Volumes, Goal::Files] {
            for number in 0..4_u32.pow(9) {
                let fates: Vec<u8> = (0..9).map(|place| (number >> (2 * place) & 3) as u8).collect();
                play(goal, &fates);
            }
        }
    }

    #[test]
    fn an_adoption_that_only_had_to_let_its_machine_run_is_not_undone() {
        let disks = World::adopted(true).disks;
        let mut exchange = Exchange::after_restart(Goal::Volumes, &disks);
        assert_eq!(exchange.next_step(false, &disks), Step::Complete(Goal::Volumes));
        let mut half = disks;
        half[1] = SeenDisk { over: Over::Nothing, is_served: false };
        let mut exchange = Exchange::after_restart(Goal::Volumes, &half);
        assert_eq!(exchange.next_step(false, &half), Step::LeadToNothing(0));
    }

    #[test]
    fn a_disk_that_is_gone_keeps_nothing_up() {
        let gone = [SeenDisk { over: Over::Gone, is_served: true }];
        assert_eq!(Exchange::towards(Goal::Files).next_step(true, &gone), Step::StopServing(0));
        assert_eq!(Exchange::towards(Goal::Volumes).next_step(true, &gone), Step::Complete(Goal::Volumes));
    }

    #[test]
    fn a_volume_that_something_unknown_stands_on_stays_and_the_others_come_back() {
        let above = SeenDisk { over: Over::Unknown, is_served: true };
        let nothing = SeenDisk { over: Over::Nothing, is_served: true };
        let mut exchange = Exchange::towards(Goal::Files);
        assert_eq!(exchange.next_step(false, &[above, nothing]), Step::LeadToExport(1));
        exchange.failed();
        let export = SeenDisk { over: Over::Export, ..above };
        assert_eq!(exchange.next_step(false, &[above, export]), Step::Complete(Goal::Volumes));
    }

    #[test]
    fn what_others_have_exchanged_is_neither_adopted_nor_led_anywhere() {
        for over in [Over::Elsewhere, Over::Unknown] {
            let other = SeenDisk { over, is_served: false };
            let next = Exchange::towards(Goal::Volumes).next_step(true, &[other]);
            assert_eq!(next, Step::Complete(Goal::Files), "{over:?}");
        }
        let served = SeenDisk { over: Over::Elsewhere, is_served: true };
        assert_eq!(Exchange::towards(Goal::Files).next_step(true, &[served]), Step::StopServing(0));
    }

    #[test]
    fn both_ways_are_tried_ever_more_slowly() {
        let mut exchange = Exchange::towards(Goal::Volumes);
        assert_eq!((exchange.failed(), exchange.goal()), (Duration::ZERO, Goal::Files));
        assert_eq!((exchange.failed(), exchange.goal()), (PAUSE_LEAST, Goal::Volumes));
        let last = (0..100).map(|_| exchange.failed()).last();
        assert_eq!(last, Some(PAUSE_MOST));
    }
}
