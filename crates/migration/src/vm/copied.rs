//! Decides which step comes next when the disks of a running VM are adopted or given back by copies that its hypervisor makes,
//! as libvirt does.
//!
//! ```text
//!   adopt:    File ──► volume served ──► copied ──► caught up ──► Export      the VM works all the while
//!   release:  Export ──────────────────► copied ──► caught up ──► File ──► volume gone
//!   release of a VM that is shut off:    volume gone, its image stays ──► the definition names the image
//! ```
//! As in [`super::exchange`] the next step depends on what is seen and on where the disks are to be, never on what was done. The
//! disks change sides when all of them have caught up, so until then a failure costs nothing but the copies.
//!
//! These rules hold throughout:
//! - A volume is removed only if no disk is over its export, stands on it, or is there at the next start.
//! - An image is discarded only while the disk is over its file, and no job copies.
//! - A file is discarded only if it is a copy that was made here, and no disk was ever to be over it.
//! - While something is *unknown* no step is taken: a state that is not recognised is not "shut off".

use std::time::Duration;

pub use super::exchange::Goal;
use crate::planted::{Bug, broken};

/// Pause before a way is tried again that has failed.
const PAUSE_LEAST: Duration = Duration::from_millis(200);
/// The longest that it becomes.
const PAUSE_MOST: Duration = Duration::from_secs(10);

/// What is known of the VM's hypervisor process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Domain {
    /// The process is there, whatever its guest does: it may be paused, or have crashed.
    Runs,
    /// There is no process.
    Off,
    /// There is no process, but a saved memory that names the disks as they were.
    Saved,
    /// There is no such VM any more.
    Gone,
    /// Its state is not recognised, or was not told.
    Unknown,
}

/// What a disk is over, as its hypervisor says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Over {
    /// The file that it had, or is to have.
    File,
    /// Its volume's export.
    Export,
    /// Something that stands on its volume's export: an overlay, a filter.
    Above,
    /// Something that has nothing to do with the volume, by somebody else's doing.
    Elsewhere,
    /// The VM has no such disk any more, or there is no such VM.
    Gone,
    /// Something that is not recognised.
    Unknown,
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

/// What has become of a disk's volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Volume {
    /// There is none.
    Absent,
    /// This host has it.
    Here,
    /// It has gone to another host.
    Remote,
    /// It was removed, and its image kept to be the disk.
    GivenBack,
}

/// Whether this host has made a copy in the file that a disk had, or is to have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyMade {
    /// It has not: the file is not there, or is somebody else's.
    No,
    /// It has, and the disk was never over it.
    Unused,
    /// It has, and has ordered that the disk be over it.
    Pivoted,
}

/// What is seen of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SeenDisk {
    /// What it is over.
    pub over: Over,
    /// What it is over at the VM's next start; the same as `over` for a VM that is shut off or has no next start.
    pub next: Over,
    /// What works on it.
    pub job: Job,
    /// What has become of its volume.
    pub volume: Volume,
    /// Whether its file is a copy that was made here.
    pub copy: CopyMade,
}

/// What becomes of an image that is taken away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Image {
    /// It is a copy that no disk is over, and may be deleted.
    Discard,
    /// It is, was, or may be the disk.
    Keep,
}

/// What is to be done next; disks are named by their position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Make an empty volume for a disk.
    Serve(usize),
    /// Have a disk copied to the other side; [`Copied::copy_begun`] when that was begun.
    Copy(usize),
    /// Nothing for now: copies are under way, or [`Copied::obstacle`] says what is waited for.
    Wait,
    /// Have a disk be where its copy is.
    Pivot(usize),
    /// End the copy of a disk, which stays where it is.
    Cancel(usize),
    /// Take the copy away that was made in a disk's file.
    ClearFile(usize, Image),
    /// Remove the volume of a disk.
    StopServing(usize, Image),
    /// Write into the definition for the VM's next start where the disk is.
    WriteDown(usize),
    /// Nothing: all disks are on this side.
    Complete(Goal),
}

/// Why disks cannot be given back as things are; the number names the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Obstacle {
    /// The VM's state is not recognised.
    StateUnknown,
    /// Its memory was saved, and names the volumes.
    Saved,
    /// Something stands on the disk's volume.
    Above(usize),
    /// What the disk is over is not recognised.
    DiskUnknown(usize),
    /// The volume of a disk of a VM that is shut off is at another host.
    Remote(usize),
    /// The disk is over an export of a volume that this host does not have.
    NoVolume(usize),
}

/// Says why the disks of a VM cannot be given back as they are; `None`: they can.
pub fn obstacle_to_release(domain: Domain, disks: &[SeenDisk]) -> Option<Obstacle> {
    if domain == Domain::Unknown && !broken(Bug::UnknownDomainIsOff) {
        return Some(Obstacle::StateUnknown);
    }
    let is_saved = domain == Domain::Saved && !broken(Bug::SavedMemoryForgotten);
    let obstacle_of = |(index, disk): (usize, &SeenDisk)| {
        let has_volume = matches!(disk.volume, Volume::Here | Volume::Remote);
        let is_any = |over: Over| disk.over == over || disk.next == over && !broken(Bug::NextStartForgotten);
        let stands_above = is_any(Over::Above) && !broken(Bug::OverlayIsElsewhere);
        match disk.over {
            _ if is_any(Over::Unknown) && has_volume => Some(Obstacle::DiskUnknown(index)),
            _ if stands_above && has_volume => Some(Obstacle::Above(index)),
            // A disk that is over its file already was saved as such.
            over if is_saved && has_volume && over != Over::File => Some(Obstacle::Saved),
            Over::Export if domain == Domain::Runs || disk.volume == Volume::Here => None,
            Over::Export if disk.volume == Volume::Remote && !broken(Bug::RemoteVolumeIsGivenBack) => {
                Some(Obstacle::Remote(index))
            }
            Over::Export if disk.volume == Volume::Absent => Some(Obstacle::NoVolume(index)),
            _ => None,
        }
    };
    disks.iter().enumerate().find_map(obstacle_of)
}

/// The change of sides of the disks of one VM.
#[derive(Clone, Debug)]
pub struct Copied {
    goal: Goal,
    failures: u32,
    /// Disks whose copy was begun towards this goal.
    begun: Vec<usize>,
    /// What was in the way at the last look.
    obstacle: Option<Obstacle>,
}

impl Copied {
    /// Begins a change of sides that is to end so, also after a restart.
    pub fn towards(goal: Goal) -> Self {
        Self { goal, failures: 0, begun: Vec::new(), obstacle: None }
    }

    /// Where the disks are to be by now.
    pub fn goal(&self) -> Goal {
        self.goal
    }

    /// What keeps the disks from being given back: the reason to turn back, or what is waited for.
    pub fn obstacle(&self) -> Option<Obstacle> {
        self.obstacle
    }

    /// Takes another order: the disks are to be on that side.
    pub fn turn_to(&mut self, goal: Goal) {
        if self.goal != goal {
            (self.goal, self.begun) = (goal, Vec::new());
        }
    }

    /// Returns what comes next.
    pub fn next_step(&mut self, domain: Domain, disks: &[SeenDisk]) -> Step {
        if domain == Domain::Unknown && !broken(Bug::UnknownDomainIsOff) {
            self.obstacle = Some(Obstacle::StateUnknown);
            return Step::Wait;
        }
        if self.goal == Goal::Volumes && disks.iter().any(|disk| lacks(domain, disk)) {
            self.turn_to(Goal::Files);
        }
        if self.goal == Goal::Files {
            let obstacle = obstacle_to_release(domain, disks);
            self.obstacle = obstacle.or(self.obstacle);
            if obstacle.is_some() {
                self.turn_back(domain, disks);
                if self.goal == Goal::Files {
                    return self.step_around(domain, disks);
                }
            }
        }
        let goal = self.goal;
        let has_ended = |index: &usize| {
            disks.get(*index).is_some_and(|disk| is_other_side(goal, disk.over) && disk.job == Job::None)
        };
        if domain == Domain::Runs && self.begun.iter().any(has_ended) {
            // A copy that was begun is gone, and the disk is where it was: it has failed.
            self.begun.retain(|index| !has_ended(index));
            self.turn_back(domain, disks);
        }
        self.step_around(domain, disks)
    }

    /// What can be done for any disk; those with an obstacle wait.
    fn step_around(&self, domain: Domain, disks: &[SeenDisk]) -> Step {
        let all_caught_up = broken(Bug::SidesChangedOneByOne)
            || disks.iter().all(|disk| !is_other_side(self.goal, disk.over) || disk.job == Job::CaughtUp);
        let steps: Vec<Step> = disks
            .iter()
            .enumerate()
            .filter_map(|(index, disk)| self.step_of(index, *disk, domain, all_caught_up))
            .collect();
        let first = steps.iter().find(|step| **step != Step::Wait).or_else(|| steps.first());
        first.copied().unwrap_or(Step::Complete(self.goal))
    }

    fn step_of(&self, index: usize, disk: SeenDisk, domain: Domain, all_caught_up: bool) -> Option<Step> {
        if disk.job == Job::Foreign {
            return Some(Step::Wait);
        }
        match self.goal {
            Goal::Volumes => step_to_volume(index, disk, all_caught_up),
            Goal::Files => step_to_file(index, disk, domain, all_caught_up),
        }
    }

    /// Notes that the copy of a disk was begun: that it is gone later is a failure.
    pub fn copy_begun(&mut self, index: usize) {
        if !self.begun.contains(&index) {
            self.begun.push(index);
        }
    }

    /// Notes that a step has failed: the other way is tried unless a disk has changed sides already; after so long a pause.
    pub fn failed(&mut self, domain: Domain, disks: &[SeenDisk]) -> Duration {
        let pause = PAUSE_LEAST.saturating_mul(2_u32.saturating_pow(self.failures)).min(PAUSE_MOST);
        self.failures = self.failures.saturating_add(1);
        self.turn_back(domain, disks);
        pause
    }

    fn turn_back(&mut self, domain: Domain, disks: &[SeenDisk]) {
        let (other, can_stay): (Goal, fn(Domain, &SeenDisk) -> bool) = match self.goal {
            Goal::Volumes => (Goal::Files, |_, disk| disk.over == Over::File),
            Goal::Files => (Goal::Volumes, |domain, disk| is_over_volume(disk.over) && !lacks(domain, disk)),
        };
        // What is not known is no reason to go back.
        if !disks.is_empty() && disks.iter().all(|disk| can_stay(domain, disk)) {
            self.turn_to(other);
        }
    }
}

fn step_to_volume(index: usize, disk: SeenDisk, all_caught_up: bool) -> Option<Step> {
    match (disk.over, disk.job) {
        (Over::Export, Job::None) => stale_copy(disk).map(|image| Step::ClearFile(index, image)),
        (Over::Export, _) => Some(Step::Cancel(index)),
        (Over::File, _) if disk.volume != Volume::Here => Some(Step::Serve(index)),
        (Over::File, Job::None) => Some(Step::Copy(index)),
        (Over::File, Job::CaughtUp) if all_caught_up => Some(Step::Pivot(index)),
        (Over::File, _) => Some(Step::Wait),
        // It may be over its file, or over its volume.
        (Over::Unknown, _) => Some(Step::Wait),
        // Something stands on the volume, and is left there.
        (Over::Above | Over::Elsewhere | Over::Gone, _) => None,
    }
}

fn step_to_file(index: usize, disk: SeenDisk, domain: Domain, all_caught_up: bool) -> Option<Step> {
    if obstacle_to_release(domain, &[disk]).is_some() {
        return Some(Step::Wait);
    }
    let is_here = disk.volume == Volume::Here;
    match (disk.over, disk.job) {
        (Over::File, Job::Copying | Job::CaughtUp) => Some(Step::Cancel(index)),
        (Over::File, _) if disk.next == Over::Export && !broken(Bug::NextStartForgotten) => {
            Some(Step::WriteDown(index))
        }
        (Over::File, _) => is_here.then_some(Step::StopServing(index, Image::Discard)),
        // Half of a disk must not stay under the disk's name.
        (Over::Export, Job::None) if stale_copy(disk).is_some() => {
            stale_copy(disk).map(|image| Step::ClearFile(index, image))
        }
        (Over::Export, Job::None) if domain == Domain::Runs => Some(Step::Copy(index)),
        (Over::Export, Job::None) if is_here => {
            let image = if broken(Bug::ReleasedImageDiscarded) { Image::Discard } else { Image::Keep };
            Some(Step::StopServing(index, image))
        }
        (Over::Export, Job::None) => Some(Step::WriteDown(index)),
        (Over::Export, Job::CaughtUp) if all_caught_up => Some(Step::Pivot(index)),
        (Over::Export, _) => Some(Step::Wait),
        // N.B. What a disk was to be over may be the disk: of a VM that is gone nobody knows.
        (Over::Gone, _) if stale_copy(disk) == Some(Image::Discard) => {
            Some(Step::ClearFile(index, Image::Discard))
        }
        _ => is_here.then_some(Step::StopServing(index, Image::Keep)),
    }
}

/// Whether a disk cannot be over its volume at the end.
fn lacks(domain: Domain, disk: &SeenDisk) -> bool {
    let has_volume = matches!(disk.volume, Volume::Here | Volume::Remote);
    match disk.over {
        Over::File => domain != Domain::Runs,
        Over::Export | Over::Above => !has_volume,
        Over::Unknown => false,
        Over::Elsewhere | Over::Gone => true,
    }
}

/// Whether a disk stays over its volume if nothing is done.
fn is_over_volume(over: Over) -> bool {
    matches!(over, Over::Export | Over::Above)
}

/// Whether a disk that is over this has yet to change sides.
fn is_other_side(goal: Goal, over: Over) -> bool {
    match goal {
        Goal::Volumes => over == Over::File,
        Goal::Files => over == Over::Export,
    }
}

/// What may be done with the file of a disk that is elsewhere, if that is a copy.
fn stale_copy(disk: SeenDisk) -> Option<Image> {
    match disk.copy {
        _ if broken(Bug::HalfCopyLeft) => None,
        CopyMade::No => broken(Bug::AnyFileIsACopy).then_some(Image::Discard),
        CopyMade::Pivoted if !broken(Bug::PivotedCopyDiscarded) => Some(Image::Keep),
        CopyMade::Unused | CopyMade::Pivoted => Some(Image::Discard),
    }
}

#[cfg(test)]
mod tests;
