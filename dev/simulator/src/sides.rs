//! One domain whose disks are copied to and from volumes by its hypervisor. The daemon is killed between any two steps. Uses the
//! product's [`Copied`]. libvirt is out of reach, has foreign jobs, or does what it does not confirm. Administrators save the
//! domain, put overlays over its disks, or move its volumes meanwhile.
//!
//! ```text
//!   file ──► an empty volume ──► copied ──► caught up ──► the volume      the guest writes all the while
//!     killed anywhere: the next daemon has the requested setting, and libvirt's answers
//! ```
//! A separate simulation, like [`crate::paused`]. The content of a side is a number: its last write.

use std::time::Duration;

use migration::vm::copied::{Copied, CopyMade, Domain, Goal, Image, Job, Over, SeenDisk, Step, Volume};

use crate::random::Random;
use crate::world::Violation;

const FAULTY_TURNS_MAX: u64 = 80;
/// Turns after which all must be at rest.
const TURNS_MAX: u64 = 2000;
const TURN: Duration = Duration::from_millis(250);
const CAUGHT_UP: u64 = 40;
/// The percentages of turns in which the daemon is killed, libvirt is out of reach, its answer is not understood, a step is
/// refused, a step fails though it is done, a copy fails, another program has a job.
const KILLED: u64 = 5;
const DEAF: u64 = 5;
const UNCLEAR: u64 = 5;
const REFUSED: u64 = 5;
const ANSWER_LOST: u64 = 6;
const COPY_FAILED: u64 = 4;
const FOREIGN: u64 = 3;
/// The percentages of turns in which the domain is shut off, saved, started or undefined, and the administrator wants the other side.
const SHUT_OFF: u64 = 2;
const SAVED: u64 = 2;
const STARTED: u64 = 20;
const UNDEFINED: u64 = 1;
const TURNED: u64 = 2;
/// The percentages of turns in which a disk is exchanged, gets an overlay, or an unknown filter; its volume begins to move, or leaves.
const EXCHANGED: u64 = 1;
const OVERLAID: u64 = 2;
const FILTERED: u64 = 2;
const BUSY: u64 = 3;
const LEFT: u64 = 1;
/// The percentage of turns in which any of these ends.
const ENDED: u64 = 15;
/// The percentage of pivots that leave the definition for the next start as it was.
const NOT_WRITTEN: u64 = 20;

/// The content of an empty volume, or of a copy that has not caught up: less than any write.
const NOTHING: u64 = 0;

pub(crate) fn play(seed: u64) -> Option<Violation> {
    let mut play = Play::new(Random::new(seed).fork());
    let faulty = play.random.below(FAULTY_TURNS_MAX);
    for turn in 0..TURNS_MAX {
        play.faults = if turn < faulty { Faults::On } else { Faults::Off };
        let at = TURN * u32::try_from(turn).unwrap_or(u32::MAX);
        let is_over = play.turn();
        let wrong = play.broken.take().or_else(|| play.broken_rule());
        let wrong = wrong.or_else(|| is_over.and_then(|goal| play.wrong_at_its_end(goal)));
        if let Some(detail) = wrong {
            return Some(Violation { checker: "sides of disks", at, detail });
        }
        if is_over.is_some() {
            return None;
        }
    }
    let detail = format!("it does not come to rest: {:?}, {:?}, {:?}", play.wanted, play.domain, play.disks);
    Some(Violation { checker: "sides of disks", at: TURN * TURNS_MAX as u32, detail })
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Faults {
    On,
    Off,
}

#[derive(Clone, Debug)]
struct Disk {
    over: Over,
    next: Over,
    is_filtered: bool,
    job: Job,
    volume: Volume,
    /// Whether its volume migrates, so that it cannot be removed.
    is_busy: bool,
    copy: CopyMade,
    written: u64,
    /// The content of its file, and of its volume's image; `None`: there is none.
    file: Option<u64>,
    image: Option<u64>,
    /// The content of earlier files, which are never deleted.
    aside: Option<u64>,
    base: u64,
}

struct Play {
    random: Random,
    faults: Faults,
    domain: Domain,
    disks: Vec<Disk>,
    /// The requested side of the disks: durable.
    wanted: Goal,
    /// The running daemon's work, and the setting that it is for.
    under_way: (Goal, Copied),
    broken: Option<String>,
}

impl Play {
    fn new(mut random: Random) -> Self {
        let wanted = if random.percent(50) { Goal::Volumes } else { Goal::Files };
        let is_adopted = wanted == Goal::Files;
        let over = if is_adopted { Over::Export } else { Over::File };
        let disk = Disk {
            over,
            next: over,
            is_filtered: false,
            job: Job::None,
            volume: if is_adopted { Volume::Here } else { Volume::Absent },
            is_busy: false,
            copy: CopyMade::No,
            written: 1,
            file: (!is_adopted).then_some(1),
            image: is_adopted.then_some(1),
            aside: None,
            base: NOTHING,
        };
        let disks = vec![disk; 1 + random.index(3)];
        let under_way = (wanted, Copied::towards(wanted));
        Self { random, faults: Faults::On, domain: Domain::Runs, disks, wanted, under_way, broken: None }
    }

    fn turn(&mut self) -> Option<Goal> {
        self.happen();
        if self.strikes(STARTED) {
            self.start();
        }
        if self.strikes(TURNED) {
            self.wanted = other(self.wanted);
        }
        if self.strikes(KILLED) {
            self.under_way = (self.wanted, Copied::towards(self.wanted));
        }
        if self.strikes(DEAF) {
            return None;
        }
        let domain = if self.strikes(UNCLEAR) { Domain::Unknown } else { self.domain };
        let (asked, copied) = &mut self.under_way;
        if *asked != self.wanted {
            *asked = self.wanted;
            copied.turn_to(self.wanted);
        }
        let seen: Vec<_> = self.disks.iter().map(Disk::seen).collect();
        let step = copied.next_step(domain, &seen);
        if let Step::Complete(goal) = step {
            return Some(goal);
        }
        let left = if copied.goal() == Goal::Volumes { Over::File } else { Over::Export };
        let lacks = |disk: &SeenDisk| disk.over == left && disk.job == Job::Copying;
        if matches!(step, Step::Pivot(_)) && seen.iter().any(lacks) {
            self.broken = Some(format!("a disk changes sides before others could: {:?}", self.disks));
        }
        // Other changes may come between the check and the step.
        if self.random.percent(30) {
            self.happen_unseen();
        }
        let done = !self.strikes(REFUSED) && self.take(step);
        let (_, copied) = &mut self.under_way;
        match step {
            Step::Copy(index) if done => copied.copy_begun(index),
            _ => {}
        }
        if !done || self.random.percent(ANSWER_LOST) && self.faults == Faults::On {
            self.under_way.1.failed(domain, &seen);
        }
        None
    }

    fn happen(&mut self) {
        self.happen_unseen();
        for index in 0..self.disks.len() {
            let (exchanged, ended) = (self.strikes(EXCHANGED), self.calm_or(ENDED));
            let (overlaid, filtered) = (self.strikes(OVERLAID), self.strikes(FILTERED));
            let (busy, left) = (self.strikes(BUSY), self.strikes(LEFT));
            let runs = self.domain == Domain::Runs;
            let Some(disk) = self.disks.get_mut(index) else { continue };
            if ended {
                disk.end_what_others_did();
            } else if exchanged && self.domain == Domain::Off {
                (disk.over, disk.next) = (Over::Elsewhere, Over::Elsewhere);
            } else if runs && disk.job == Job::None && overlaid && disk.over == Over::Export {
                (disk.over, disk.next, disk.base) = (Over::Above, Over::Above, disk.written);
            } else if runs && filtered {
                disk.is_filtered = true;
            } else if disk.volume == Volume::Here && disk.copy == CopyMade::No && disk.over == Over::Export {
                (disk.is_busy, disk.volume) =
                    (busy || disk.is_busy, if left { Volume::Remote } else { Volume::Here });
            }
        }
        let is_idle = self.disks.iter().all(|disk| disk.job == Job::None);
        if self.domain == Domain::Runs && is_idle && self.strikes(SAVED) {
            self.shut_off(Domain::Saved);
        }
        if self.domain == Domain::Saved && self.calm_or(ENDED) {
            // The administrator discards the saved memory, as the message advises.
            self.domain = Domain::Off;
        }
    }

    /// The same, limited to what can come between the check and the step. The daemon checks other manual changes again,
    /// or libvirt refuses them.
    fn happen_unseen(&mut self) {
        for index in 0..self.disks.len() {
            let (fails, foreign) = (self.strikes(COPY_FAILED), self.strikes(FOREIGN));
            let ends = self.random.percent(CAUGHT_UP);
            let runs = self.domain == Domain::Runs;
            let Some(disk) = self.disks.get_mut(index) else { continue };
            match disk.job {
                Job::Copying | Job::CaughtUp if fails || !disk.is_served() => disk.job = Job::None,
                Job::Copying if ends => disk.catch_up(),
                Job::Foreign if ends => disk.job = Job::None,
                Job::None if foreign && runs => disk.job = Job::Foreign,
                _ => {}
            }
            if runs {
                disk.write();
            }
        }
        if self.strikes(SHUT_OFF) && self.domain == Domain::Runs {
            self.shut_off(Domain::Off);
        }
        if self.strikes(UNDEFINED) {
            self.shut_off(Domain::Gone);
            self.disks.iter_mut().for_each(|disk| (disk.over, disk.next) = (Over::Gone, Over::Gone));
        }
    }

    fn shut_off(&mut self, domain: Domain) {
        self.domain = domain;
        for disk in &mut self.disks {
            (disk.job, disk.is_filtered) = (Job::None, false);
            // Between a pivot and the update of the definition only libvirt can act.
            disk.next = disk.over;
        }
    }

    fn start(&mut self) {
        let is_there = |disk: &Disk| match disk.over {
            Over::File => disk.file.is_some(),
            Over::Export | Over::Above => disk.is_served(),
            Over::Elsewhere => true,
            Over::Gone | Over::Unknown => false,
        };
        if matches!(self.domain, Domain::Off | Domain::Saved) && self.disks.iter().all(is_there) {
            self.domain = Domain::Runs;
        }
    }

    fn take(&mut self, step: Step) -> bool {
        let runs = self.domain == Domain::Runs;
        let is_written = !self.random.percent(NOT_WRITTEN);
        let (Step::Serve(index)
        | Step::Copy(index)
        | Step::Pivot(index)
        | Step::Cancel(index)
        | Step::ClearFile(index, _)
        | Step::StopServing(index, _)
        | Step::WriteDown(index)) = step
        else {
            return true;
        };
        let Some(disk) = self.disks.get_mut(index) else { return false };
        match step {
            Step::Serve(_) if disk.volume == Volume::Absent => {
                (disk.volume, disk.image) = (Volume::Here, Some(NOTHING));
                true
            }
            Step::Copy(_) if runs && disk.job == Job::None && disk.is_served() => disk.begin_copy(),
            Step::Pivot(_) if runs && disk.job == Job::CaughtUp => {
                disk.pivot(is_written);
                true
            }
            Step::Cancel(_) if runs && disk.job != Job::None => {
                disk.job = Job::None;
                true
            }
            Step::ClearFile(_, image) => {
                self.broken = disk.clear_file(image);
                true
            }
            Step::StopServing(_, image) if disk.volume == Volume::Here && !disk.is_busy => {
                self.broken = disk.stop_serving(image, self.domain);
                true
            }
            Step::WriteDown(_) if runs && disk.over == Over::File => {
                disk.next = Over::File;
                true
            }
            Step::WriteDown(_) if self.domain == Domain::Off && disk.over == Over::Export => {
                (disk.over, disk.next) = (Over::File, Over::File);
                if disk.volume == Volume::GivenBack {
                    disk.volume = Volume::Absent;
                }
                true
            }
            _ => false,
        }
    }

    fn strikes(&mut self, percent: u64) -> bool {
        self.random.percent(percent) && self.faults == Faults::On
    }

    fn calm_or(&mut self, percent: u64) -> bool {
        self.random.percent(percent) || self.faults == Faults::Off
    }

    fn broken_rule(&self) -> Option<String> {
        let wrong = self.disks.iter().find(|disk| {
            let has_all = match disk.over {
                Over::File => disk.file == Some(disk.written),
                Over::Export if disk.is_served() => disk.image == Some(disk.written),
                // The definition is not updated yet.
                Over::Export => disk.file == Some(disk.written) && self.domain == Domain::Off,
                Over::Above => disk.is_served() && disk.image == Some(disk.base),
                Over::Elsewhere | Over::Gone | Over::Unknown => {
                    disk.file.max(disk.image).max(disk.aside) >= Some(disk.written)
                }
            };
            !has_all
        });
        wrong.map(|disk| format!("what the guest wrote is lost, {:?}: {disk:?}", self.domain))
    }

    fn wrong_at_its_end(&self, goal: Goal) -> Option<String> {
        let is_right = |disk: &Disk| match (goal, disk.over) {
            (Goal::Files, Over::File | Over::Elsewhere | Over::Gone) => disk.volume != Volume::Here,
            (Goal::Volumes, Over::Above) => disk.is_served(),
            (Goal::Volumes, Over::Export) => disk.is_served() && disk.copy == CopyMade::No,
            _ => false,
        };
        let state = format!("at its end, towards {goal:?}, {:?}: {:?}", self.domain, self.disks);
        (!self.disks.iter().all(is_right)).then_some(state)
    }
}

impl Disk {
    fn seen(&self) -> SeenDisk {
        let over = if self.is_filtered { Over::Unknown } else { self.over };
        SeenDisk { over, next: self.next, job: self.job, volume: self.volume, copy: self.copy }
    }

    fn is_served(&self) -> bool {
        matches!(self.volume, Volume::Here | Volume::Remote)
    }

    fn write(&mut self) {
        let written = self.written + 1;
        let (side, copy) = match self.over {
            Over::File => (&mut self.file, &mut self.image),
            Over::Export => (&mut self.image, &mut self.file),
            Over::Above | Over::Elsewhere | Over::Gone | Over::Unknown => return,
        };
        let Some(side) = side else { return };
        (*side, self.written) = (written, written);
        if let (Some(copy), Job::CaughtUp) = (copy, self.job) {
            *copy = written;
        }
    }

    fn end_what_others_did(&mut self) {
        (self.is_filtered, self.is_busy) = (false, false);
        if self.over == Over::Above {
            (self.over, self.next) = (Over::Export, Over::Export);
        }
        if self.volume == Volume::Remote {
            self.volume = Volume::Here;
        }
    }

    fn begin_copy(&mut self) -> bool {
        match self.over {
            Over::File => self.image = Some(NOTHING),
            Over::Export if self.copy == CopyMade::No => {
                self.aside = self.aside.max(self.file);
                (self.file, self.copy) = (Some(NOTHING), CopyMade::Unused);
            }
            _ => return false,
        }
        self.job = Job::Copying;
        true
    }

    fn catch_up(&mut self) {
        self.job = Job::CaughtUp;
        match self.over {
            Over::File => self.image = Some(self.written),
            Over::Export => self.file = Some(self.written),
            _ => {}
        }
    }

    fn pivot(&mut self, is_written: bool) {
        self.job = Job::None;
        if self.over == Over::File {
            (self.over, self.next) = (Over::Export, Over::Export);
            return;
        }
        self.over = Over::File;
        self.copy = CopyMade::Pivoted;
        if is_written {
            self.next = Over::File;
        }
    }

    /// Deletes a copy; returns what is wrong with that.
    fn clear_file(&mut self, image: Image) -> Option<String> {
        let wrong = (self.copy == CopyMade::No).then(|| format!("a file goes that is no copy: {self:?}"));
        let left = self.file.take();
        if image == Image::Keep {
            self.aside = self.aside.max(left);
        }
        self.copy = CopyMade::No;
        wrong
    }

    fn stop_serving(&mut self, image: Image, domain: Domain) -> Option<String> {
        let is_used = match self.over {
            Over::Export => domain != Domain::Off,
            Over::Above => true,
            _ => self.next == Over::Export && domain != Domain::Gone,
        };
        let wrong = is_used.then(|| format!("a volume is removed that is used, {domain:?}: {self:?}"));
        let left = self.image.take();
        self.volume = Volume::Absent;
        if image == Image::Keep && self.over == Over::Export {
            // The disk's file is that image from now on; the former file stays.
            self.aside = self.aside.max(std::mem::replace(&mut self.file, left));
            self.volume = Volume::GivenBack;
        } else if image == Image::Keep {
            self.aside = self.aside.max(left);
        }
        wrong
    }
}

fn other(goal: Goal) -> Goal {
    match goal {
        Goal::Volumes => Goal::Files,
        Goal::Files => Goal::Volumes,
    }
}
