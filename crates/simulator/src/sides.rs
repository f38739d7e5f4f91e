//! One domain whose disks change sides by copies that its hypervisor makes, and a daemon that is killed between any two steps:
//! the product's [`Copied`] against a libvirt that is not to be reached, has jobs of others, or does what it does not answer.
//!
//! ```text
//!   file ──► an empty volume ──► copied ──► caught up ──► the volume      the guest writes all the while
//!     killed anywhere: the next daemon has what is wanted, and what libvirt says
//! ```
//! Like [`crate::paused`] a story of its own, beside the migrations of the seed. What a side holds is a number: that of the last
//! write that it has.

use std::time::Duration;

use migration::vm::copied::{Copied, Goal, Image, Job, Over, SeenDisk, Step};

use crate::random::Random;
use crate::world::Violation;

/// Turns in which things go wrong, at most.
const FAULTY_TURNS_MAX: u64 = 80;
/// Turns after which all must have come to rest.
const TURNS_MAX: u64 = 2000;
/// What a turn takes.
const TURN: Duration = Duration::from_millis(250);
/// Of a hundred turns: those in which a copy catches up.
const CAUGHT_UP: u64 = 40;
/// And those in which the daemon is killed, libvirt cannot be reached, a step is refused, a step fails though it is done, a copy
/// fails, somebody else has a job, the domain is shut off, it is started, it is undefined, a disk of it is exchanged, somebody
/// wants the other side.
const KILLED: u64 = 5;
const DEAF: u64 = 5;
const REFUSED: u64 = 5;
const ANSWER_LOST: u64 = 6;
const COPY_FAILED: u64 = 4;
const FOREIGN: u64 = 3;
const SHUT_OFF: u64 = 2;
const STARTED: u64 = 20;
const UNDEFINED: u64 = 1;
const EXCHANGED: u64 = 1;
const TURNED: u64 = 2;

/// What an empty volume holds, and a copy that has not caught up: less than any write.
const NOTHING: u64 = 0;

/// Plays the story of a seed.
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
    let detail = format!("it does not come to rest: {:?}, {:?}", play.wanted, play.disks);
    Some(Violation { checker: "sides of disks", at: TURN * TURNS_MAX as u32, detail })
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Faults {
    On,
    Off,
}

/// A disk, as libvirt and the two sides have it.
#[derive(Clone, Debug)]
struct Disk {
    over: Over,
    job: Job,
    is_served: bool,
    /// The last write that was answered.
    written: u64,
    /// What is in its file, and in its volume's image; `None`: there is none.
    file: Option<u64>,
    image: Option<u64>,
    /// What is in files of before, which nobody deletes.
    aside: Option<u64>,
}

struct Play {
    random: Random,
    faults: Faults,
    is_running: bool,
    disks: Vec<Disk>,
    /// Where the disks are to be: durable.
    wanted: Goal,
    /// Of the daemon that runs: what is wanted, as far as it knows.
    under_way: (Goal, Copied),
    /// A rule that a step has broken.
    broken: Option<String>,
}

impl Play {
    fn new(mut random: Random) -> Self {
        let wanted = if random.percent(50) { Goal::Volumes } else { Goal::Files };
        let is_adopted = wanted == Goal::Files;
        let disk = Disk {
            over: if is_adopted { Over::Export } else { Over::File },
            job: Job::None,
            is_served: is_adopted,
            written: 1,
            file: (!is_adopted).then_some(1),
            image: is_adopted.then_some(1),
            aside: None,
        };
        let disks = vec![disk; 1 + random.index(3)];
        let under_way = (wanted, Copied::towards(wanted));
        Self { random, faults: Faults::On, is_running: true, disks, wanted, under_way, broken: None }
    }

    /// What happens in a turn; returns where the disks are if the change of sides has ended.
    fn turn(&mut self) -> Option<Goal> {
        self.happen();
        if self.strikes(STARTED) || self.faults == Faults::Off {
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
        let (asked, copied) = &mut self.under_way;
        if *asked != self.wanted {
            *asked = self.wanted;
            copied.turn_to(self.wanted);
        }
        let seen: Vec<_> = self.disks.iter().map(Disk::seen).collect();
        let step = copied.next_step(self.is_running, &seen);
        if let Step::Complete(goal) = step {
            return Some(goal);
        }
        let left = if copied.goal() == Goal::Volumes { Over::File } else { Over::Export };
        let lacks = |disk: &SeenDisk| disk.over == left && disk.job == Job::Copying;
        if matches!(step, Step::Pivot(_)) && seen.iter().any(lacks) {
            self.broken = Some(format!("a disk changes sides before others could: {:?}", self.disks));
        }
        // The world does not wait between the look and the step.
        if self.random.percent(30) {
            self.happen();
        }
        let done = !self.strikes(REFUSED) && self.take(step);
        let (_, copied) = &mut self.under_way;
        match step {
            Step::Copy(index) if done => copied.copy_begun(index),
            _ => {}
        }
        if !done || self.random.percent(ANSWER_LOST) && self.faults == Faults::On {
            self.under_way.1.failed(&seen);
        }
        None
    }

    /// What guests, libvirt and others do by themselves.
    fn happen(&mut self) {
        for index in 0..self.disks.len() {
            let (fails, foreign) = (self.strikes(COPY_FAILED), self.strikes(FOREIGN));
            let (exchanged, ends) = (self.strikes(EXCHANGED), self.random.percent(CAUGHT_UP));
            let is_running = self.is_running;
            let Some(disk) = self.disks.get_mut(index) else { continue };
            match disk.job {
                Job::Copying | Job::CaughtUp if fails || !disk.is_served => disk.job = Job::None,
                Job::Copying if ends => disk.catch_up(),
                Job::Foreign if ends => disk.job = Job::None,
                Job::None if foreign && is_running => disk.job = Job::Foreign,
                _ => {}
            }
            if is_running {
                disk.write();
            }
            if exchanged && !is_running {
                disk.over = Over::Elsewhere;
            }
        }
        if self.strikes(SHUT_OFF) {
            self.shut_off();
        }
        if self.strikes(UNDEFINED) {
            self.shut_off();
            self.disks.iter_mut().for_each(|disk| disk.over = Over::Gone);
        }
    }

    fn shut_off(&mut self) {
        self.is_running = false;
        self.disks.iter_mut().for_each(|disk| disk.job = Job::None);
    }

    /// Starts the domain, if its disks are there.
    fn start(&mut self) {
        let is_there = |disk: &Disk| match disk.over {
            Over::File => disk.file.is_some(),
            Over::Export => disk.is_served,
            Over::Elsewhere => true,
            Over::Gone => false,
        };
        self.is_running |= self.faults == Faults::On && self.disks.iter().all(is_there);
    }

    /// Carries a step out, as far as libvirt lets it; returns whether it was done.
    fn take(&mut self, step: Step) -> bool {
        let is_running = self.is_running;
        let (Step::Serve(index)
        | Step::Copy(index)
        | Step::Pivot(index)
        | Step::Cancel(index)
        | Step::StopServing(index, _)
        | Step::WriteDown(index)) = step
        else {
            return true;
        };
        let Some(disk) = self.disks.get_mut(index) else { return false };
        match step {
            Step::Serve(_) if !disk.is_served => {
                (disk.is_served, disk.image) = (true, Some(NOTHING));
                true
            }
            Step::Copy(_) if is_running && disk.job == Job::None && disk.is_served => disk.begin_copy(),
            Step::Pivot(_) if is_running && disk.job == Job::CaughtUp => {
                disk.job = Job::None;
                disk.over = if disk.over == Over::File { Over::Export } else { Over::File };
                true
            }
            Step::Cancel(_) if is_running && disk.job != Job::None => {
                disk.job = Job::None;
                true
            }
            Step::StopServing(_, image) if disk.is_served => {
                if is_running && disk.over == Over::Export {
                    self.broken = Some(format!("a volume is removed that a guest uses: {disk:?}"));
                }
                let left = disk.image.take();
                if image == Image::Keep {
                    // The disk's file is that image from now on; what was it before stays.
                    disk.aside = disk.aside.max(std::mem::replace(&mut disk.file, left));
                }
                disk.is_served = false;
                true
            }
            Step::WriteDown(_) if !is_running && disk.over == Over::Export => {
                disk.over = Over::File;
                true
            }
            _ => false,
        }
    }

    fn strikes(&mut self, percent: u64) -> bool {
        self.random.percent(percent) && self.faults == Faults::On
    }

    /// What must hold at any moment.
    fn broken_rule(&self) -> Option<String> {
        let wrong = self.disks.iter().find(|disk| {
            let has_all = match disk.over {
                Over::File => disk.file == Some(disk.written),
                Over::Export if disk.is_served => disk.image == Some(disk.written),
                // The definition does not say so yet.
                Over::Export => disk.file == Some(disk.written) && !self.is_running,
                Over::Elsewhere | Over::Gone => {
                    disk.file.max(disk.image).max(disk.aside) == Some(disk.written)
                }
            };
            !has_all
        });
        wrong.map(|disk| format!("what the guest wrote is lost, runs {}: {disk:?}", self.is_running))
    }

    fn wrong_at_its_end(&self, goal: Goal) -> Option<String> {
        let over = if goal == Goal::Volumes { Over::Export } else { Over::File };
        let is_right = |disk: &Disk| {
            let is_elsewhere = goal == Goal::Files && matches!(disk.over, Over::Elsewhere | Over::Gone);
            (disk.over == over || is_elsewhere) && disk.is_served == (goal == Goal::Volumes)
        };
        let state = format!("at its end, towards {goal:?}: {:?}", self.disks);
        (!self.disks.iter().all(is_right)).then_some(state)
    }
}

impl Disk {
    fn seen(&self) -> SeenDisk {
        SeenDisk { over: self.over, job: self.job, is_served: self.is_served }
    }

    /// The guest writes, to the side that the disk is over, and to the other one if that has caught up.
    fn write(&mut self) {
        let written = self.written + 1;
        let (side, copy) = match self.over {
            Over::File => (&mut self.file, &mut self.image),
            Over::Export => (&mut self.image, &mut self.file),
            Over::Elsewhere | Over::Gone => return,
        };
        let Some(side) = side else { return };
        (*side, self.written) = (written, written);
        if let (Some(copy), Job::CaughtUp) = (copy, self.job) {
            *copy = written;
        }
    }

    /// Begins to copy the disk onto its other side, or into a new file.
    fn begin_copy(&mut self) -> bool {
        match self.over {
            Over::File => self.image = Some(NOTHING),
            Over::Export => self.file = Some(NOTHING),
            Over::Elsewhere | Over::Gone => return false,
        }
        self.job = Job::Copying;
        true
    }

    fn catch_up(&mut self) {
        self.job = Job::CaughtUp;
        match self.over {
            Over::File => self.image = Some(self.written),
            Over::Export => self.file = Some(self.written),
            Over::Elsewhere | Over::Gone => {}
        }
    }
}

fn other(goal: Goal) -> Goal {
    match goal {
        Goal::Volumes => Goal::Files,
        Goal::Files => Goal::Volumes,
    }
}
