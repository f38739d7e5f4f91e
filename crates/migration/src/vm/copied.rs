//! Which step comes next when the disks of a running VM are adopted or given back by copies that its hypervisor makes, as
//! libvirt does.
//!
//! ```text
//!   adopt:    File ──► volume served ──► copied ──► caught up ──► Export      the VM works all the while
//!   release:  Export ──────────────────► copied ──► caught up ──► File ──► volume gone
//!   release of a VM that is shut off:    volume gone, its image stays ──► the definition names the image
//! ```
//! As in [`super::exchange`] the next step depends on what is seen and on where the disks are to be, never on what was done. The
//! disks change sides when all of them have caught up, so until then a failure costs nothing but the copies.
//!
//! Two rules hold throughout: a volume whose export a disk is over is not removed while the VM runs, and an image is only
//! thrown away while the disk is over its file and nothing copies.

use std::time::Duration;

pub use super::exchange::Goal;
use crate::planted::{Bug, broken};

/// Pause before a way is tried again that has failed.
const PAUSE_LEAST: Duration = Duration::from_millis(200);
/// The longest that it becomes.
const PAUSE_MOST: Duration = Duration::from_secs(10);

/// What a disk is over, as its hypervisor says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Over {
    /// The file that it had, or is to have.
    File,
    /// Its volume's export.
    Export,
    /// Something else, by somebody else's doing.
    Elsewhere,
    /// The VM has no such disk any more, or there is no such VM.
    Gone,
}

/// What copies a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Job {
    /// Nothing.
    None,
    /// A copy to the other side, which lacks something.
    Copying,
    /// A copy to the other side that lacks nothing: the disk can be there from now on.
    CaughtUp,
    /// Somebody else's.
    Foreign,
}

/// What is seen of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SeenDisk {
    /// What it is over.
    pub over: Over,
    /// What works on it.
    pub job: Job,
    /// Whether its volume is there.
    pub is_served: bool,
}

/// What becomes of the image of a volume that is removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Image {
    /// It is a copy, and whoever made it may throw it away.
    Discard,
    /// It is, or may be, the disk.
    Keep,
}

/// What is to be done next; disks are named by their position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Make an empty volume for a disk.
    Serve(usize),
    /// Have a disk copied to the other side; [`Copied::copy_begun`] when that was begun.
    Copy(usize),
    /// Nothing for now: copies are under way.
    Wait,
    /// Have a disk be where its copy is.
    Pivot(usize),
    /// End the copy of a disk, which stays where it is.
    Cancel(usize),
    /// Remove the volume of a disk.
    StopServing(usize, Image),
    /// Write into the definition of a VM that is shut off where the disk's image is.
    WriteDown(usize),
    /// Nothing: all disks are on this side.
    Complete(Goal),
}

/// The change of sides of the disks of one VM.
#[derive(Clone, Debug)]
pub struct Copied {
    goal: Goal,
    failures: u32,
    /// Disks whose copy was begun towards this goal.
    begun: Vec<usize>,
}

impl Copied {
    /// One that is to end so, also after a restart.
    pub fn towards(goal: Goal) -> Self {
        Self { goal, failures: 0, begun: Vec::new() }
    }

    /// Where the disks are to be by now.
    pub fn goal(&self) -> Goal {
        self.goal
    }

    /// Somebody wants the disks on that side.
    pub fn turn_to(&mut self, goal: Goal) {
        if self.goal != goal {
            (self.goal, self.begun) = (goal, Vec::new());
        }
    }

    /// What comes next.
    pub fn next_step(&mut self, is_running: bool, disks: &[SeenDisk]) -> Step {
        let cannot_go_on = match self.goal {
            Goal::Volumes => {
                let lacks = |disk: &SeenDisk| match disk.over {
                    Over::File => !is_running,
                    Over::Export => !disk.is_served,
                    Over::Elsewhere | Over::Gone => true,
                };
                disks.iter().any(lacks)
            }
            Goal::Files => false,
        };
        if cannot_go_on {
            self.turn_to(Goal::Files);
        }
        let goal = self.goal;
        let has_ended = |index: &usize| {
            disks.get(*index).is_some_and(|disk| is_other_side(goal, disk.over) && disk.job == Job::None)
        };
        if is_running && self.begun.iter().any(has_ended) {
            // A copy that was begun is gone, and the disk is where it was: it has failed.
            self.begun.retain(|index| !has_ended(index));
            self.turn_back(disks);
        }
        let all_caught_up = broken(Bug::SidesChangedOneByOne)
            || disks.iter().all(|disk| !is_other_side(self.goal, disk.over) || disk.job == Job::CaughtUp);
        let steps: Vec<Step> = disks
            .iter()
            .enumerate()
            .filter_map(|(index, disk)| self.step_of(index, *disk, is_running, all_caught_up))
            .collect();
        let first = steps.iter().find(|step| **step != Step::Wait).or_else(|| steps.first());
        first.copied().unwrap_or(Step::Complete(self.goal))
    }

    fn step_of(&self, index: usize, disk: SeenDisk, is_running: bool, all_caught_up: bool) -> Option<Step> {
        match (self.goal, disk.over, disk.job) {
            (_, _, Job::Foreign) => Some(Step::Wait),
            (Goal::Volumes, Over::Export, Job::None) => None,
            (Goal::Volumes, Over::Export, _) | (Goal::Files, Over::File, Job::Copying | Job::CaughtUp) => {
                Some(Step::Cancel(index))
            }
            (Goal::Volumes, Over::File, _) if !disk.is_served => Some(Step::Serve(index)),
            (Goal::Files, Over::File, Job::None) => {
                disk.is_served.then_some(Step::StopServing(index, Image::Discard))
            }
            (Goal::Files, Over::Export, Job::None) if !is_running => Some(if disk.is_served {
                let image = if broken(Bug::ReleasedImageDiscarded) { Image::Discard } else { Image::Keep };
                Step::StopServing(index, image)
            } else {
                Step::WriteDown(index)
            }),
            (_, Over::Elsewhere | Over::Gone, _) => {
                disk.is_served.then_some(Step::StopServing(index, Image::Keep))
            }
            (_, _, Job::None) => Some(Step::Copy(index)),
            (_, _, Job::CaughtUp) if all_caught_up => Some(Step::Pivot(index)),
            (_, _, Job::Copying | Job::CaughtUp) => Some(Step::Wait),
        }
    }

    /// The copy of a disk was begun: that it is gone later is a failure.
    pub fn copy_begun(&mut self, index: usize) {
        if !self.begun.contains(&index) {
            self.begun.push(index);
        }
    }

    /// A step has failed: the other way is tried unless a disk has changed sides already; after so long a pause.
    pub fn failed(&mut self, disks: &[SeenDisk]) -> Duration {
        let pause = PAUSE_LEAST.saturating_mul(2_u32.saturating_pow(self.failures)).min(PAUSE_MOST);
        self.failures = self.failures.saturating_add(1);
        self.turn_back(disks);
        pause
    }

    fn turn_back(&mut self, disks: &[SeenDisk]) {
        let other = match self.goal {
            Goal::Volumes => Goal::Files,
            Goal::Files => Goal::Volumes,
        };
        let can_stay = |disk: &SeenDisk| {
            is_other_side(self.goal, disk.over) && (disk.is_served || disk.over == Over::File)
        };
        // What is not known is no reason to go back.
        if !disks.is_empty() && disks.iter().all(can_stay) {
            self.turn_to(other);
        }
    }
}

/// Whether a disk that is over this has yet to change sides.
fn is_other_side(goal: Goal, over: Over) -> bool {
    match goal {
        Goal::Volumes => over == Over::File,
        Goal::Files => over == Over::Export,
    }
}

#[cfg(test)]
mod tests;
