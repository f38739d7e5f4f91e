//! Decides the next step when the disks of a running VM are adopted or given back by copies that its hypervisor makes, as
//! libvirt does.
//!
//! ```text
//!   adopt:    File ──► volume served ──► copied ──► caught up ──► Export      the VM works all the while
//!   release:  Export ──────────────────► copied ──► caught up ──► File ──► volume gone
//!   release of a VM that is shut off:    volume gone, its image stays ──► the definition names the image
//! ```
//! As in [`super::exchange`] the next step depends on the observed state and the goal, never on earlier steps. The disks change
//! sides when all of them have caught up, so until then a failure costs only the copies.
//!
//! These rules always hold:
//! - A volume is removed only if no disk uses its export, directly or indirectly, now or at the next start.
//! - An image is discarded only while the disk uses its file, and no job copies.
//! - A file is discarded only if it is a copy made here that no disk was ever to use.
//! - While anything is *unknown* no step is taken: an unrecognised state does not mean "shut off".

use std::time::Duration;

pub use super::exchange::Goal;
use crate::planted::{Bug, broken};

const PAUSE_LEAST: Duration = Duration::from_millis(200);
const PAUSE_MOST: Duration = Duration::from_secs(10);

/// The state of the VM's hypervisor process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Domain {
    /// The process exists; the guest may run, be paused, or have crashed.
    Runs,
    /// There is no process.
    Off,
    /// There is no process, but a saved memory that names the disks as they were.
    Saved,
    /// The VM does not exist.
    Gone,
    /// The state is not recognised, or was not reported.
    Unknown,
}

/// What a disk is attached to, as its hypervisor reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Over {
    /// The file that it had, or is to have.
    File,
    /// The export of its volume.
    Export,
    /// A layer above its volume's export: an overlay, a filter.
    Above,
    /// Something unrelated to the volume, by another party's action.
    Elsewhere,
    /// The VM does not have the disk, or does not exist.
    Gone,
    /// A source that is not recognised.
    Unknown,
}

/// The job that copies a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Job {
    /// No job works on the disk.
    None,
    /// An unfinished copy to the other side.
    Copying,
    /// A complete copy to the other side: the disk can switch to it at any time.
    CaughtUp,
    /// A job of another party.
    Foreign,
}

/// The state of a disk's volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Volume {
    /// The volume does not exist.
    Absent,
    /// This host has the volume.
    Here,
    /// The volume has gone to another host.
    Remote,
    /// The volume was removed, and its image is kept as the disk.
    GivenBack,
}

/// Whether this host has made a copy in the file that a disk had, or is to have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyMade {
    /// No: the file does not exist, or belongs to someone else.
    No,
    /// Yes, and the disk has never used it.
    Unused,
    /// Yes, and this host has ordered the disk to switch to it.
    Pivoted,
}

/// The observed state of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SeenDisk {
    /// The current source of the disk.
    pub over: Over,
    /// The source at the VM's next start; same as `over` if the VM is shut off or has no next start.
    pub next: Over,
    /// The job that works on the disk.
    pub job: Job,
    /// The state of its volume.
    pub volume: Volume,
    /// Whether its file is a copy that was made here.
    pub copy: CopyMade,
}

/// What happens to an image that is removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Image {
    /// The image is a copy that no disk uses, and may be deleted.
    Discard,
    /// The image is, was, or may be the disk.
    Keep,
}

/// The next step; disks are named by their position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Make an empty volume for a disk.
    Serve(usize),
    /// Copy a disk to the other side; call [`Copied::copy_begun`] at the start.
    Copy(usize),
    /// Do nothing for now: copies are under way, or [`Copied::obstacle`] names the reason.
    Wait,
    /// Switch a disk to its copy.
    Pivot(usize),
    /// End the copy of a disk, which stays where it is.
    Cancel(usize),
    /// Remove the copy that was made in a disk's file.
    ClearFile(usize, Image),
    /// Remove the volume of a disk.
    StopServing(usize, Image),
    /// Write the disk's place into the definition for the VM's next start.
    WriteDown(usize),
    /// All disks are on this side: nothing is left to do.
    Complete(Goal),
}

/// The reason why disks cannot be given back now; the number is the disk's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Obstacle {
    /// The VM's state is not recognised.
    StateUnknown,
    /// The VM's saved memory names the volumes.
    Saved,
    /// A layer stands above the disk's volume.
    Above(usize),
    /// The source of the disk is not recognised.
    DiskUnknown(usize),
    /// The VM is shut off, and the disk's volume is at another host.
    Remote(usize),
    /// The disk uses an export of a volume that this host does not have.
    NoVolume(usize),
}

/// Returns why the disks of a VM cannot be given back now; `None` if they can.
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
            // A disk that uses its file was saved with that file.
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

/// The change of sides of one VM's disks.
#[derive(Clone, Debug)]
pub struct Copied {
    goal: Goal,
    failures: u32,
    /// Disks whose copy towards this goal has begun.
    begun: Vec<usize>,
    obstacle: Option<Obstacle>,
}

impl Copied {
    /// Begins a change of sides towards this goal, also after a restart.
    pub fn towards(goal: Goal) -> Self {
        Self { goal, failures: 0, begun: Vec::new(), obstacle: None }
    }

    /// Returns the current goal.
    pub fn goal(&self) -> Goal {
        self.goal
    }

    /// Returns the obstacle to giving the disks back: the reason to turn round, or to wait.
    pub fn obstacle(&self) -> Option<Obstacle> {
        self.obstacle
    }

    /// Changes the goal to this side.
    pub fn turn_to(&mut self, goal: Goal) {
        if self.goal != goal {
            (self.goal, self.begun) = (goal, Vec::new());
        }
    }

    /// Returns the next step for the observed state.
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
            // A copy that had begun is gone, and the disk is where it was: the copy has failed.
            self.begun.retain(|index| !has_ended(index));
            self.turn_back(domain, disks);
        }
        self.step_around(domain, disks)
    }

    /// Returns a possible step for any disk; disks with an obstacle wait.
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

    /// Notes that the copy of a disk has begun. If it is gone later, it has failed.
    pub fn copy_begun(&mut self, index: usize) {
        if !self.begun.contains(&index) {
            self.begun.push(index);
        }
    }

    /// Notes that a step has failed, and returns the pause before the next. Turns round unless a disk has changed sides already.
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
        // An unknown state is no reason to turn round.
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
        // It may use its file, or its volume.
        (Over::Unknown, _) => Some(Step::Wait),
        // A layer stands above the volume, and stays.
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
        // A partial copy must not stay under the disk's name.
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
        // **N.B.** A file that a disk was to use may be the disk: for a VM that is gone this is unknown.
        (Over::Gone, _) if stale_copy(disk) == Some(Image::Discard) => {
            Some(Step::ClearFile(index, Image::Discard))
        }
        _ => is_here.then_some(Step::StopServing(index, Image::Keep)),
    }
}

/// Returns whether a disk cannot use its volume at the end.
fn lacks(domain: Domain, disk: &SeenDisk) -> bool {
    let has_volume = matches!(disk.volume, Volume::Here | Volume::Remote);
    match disk.over {
        Over::File => domain != Domain::Runs,
        Over::Export | Over::Above => !has_volume,
        Over::Unknown => false,
        Over::Elsewhere | Over::Gone => true,
    }
}

/// Returns whether a disk stays on its volume without a further step.
fn is_over_volume(over: Over) -> bool {
    matches!(over, Over::Export | Over::Above)
}

/// Returns whether a disk with this source has still to change sides.
fn is_other_side(goal: Goal, over: Over) -> bool {
    match goal {
        Goal::Volumes => over == Over::File,
        Goal::Files => over == Over::Export,
    }
}

/// Returns what may be done with a disk's file that the disk does not use, if it is a copy.
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
