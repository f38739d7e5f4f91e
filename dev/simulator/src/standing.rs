//! One VM that moves, while others change it and daemons are killed. Uses the product's [`Departure`] and [`Hold`]; devices, run
//! state, jobs and files of the hypervisor are changed at any moment.
//!
//! ```text
//!   order ─► check ─► copy ─► check, note ─► memory ─► stopped ─► check, files, state ─► loaded ─► handed over ─► there
//!     others: exchange a device, begin a job, pause, resume, shut down, write a file         at any moment until it stops
//!     killed: the next daemon has the note, and the hypervisor's answers; or the source's hypervisor is lost with the rest of the memory
//! ```
//! The VM must finally have the state in which it was stopped. A separate simulation, like [`crate::paused`].

use std::collections::BTreeSet;
use std::time::Duration;

use migration::vm::departure::{
    Departure, Does, Files, Last, Rest, SourceHas, Step, Then, rest_after_restart,
};
use migration::vm::hold::{Action, Event, Hold, Memory, Reason, Running, Seen};
use migration::vm::shape::{Difference, Drive, Medium, Shape, differences};

use crate::random::Random;
use crate::world::Violation;

const TURNS_MAX: u64 = 6;
/// Turns within which a guest is resumed.
const SETTLING_TURNS_MAX: u32 = 1000;
/// The percentages of turns in which others change something, and in which the daemon is killed.
const OTHERS: u64 = 25;
const KILLED: u64 = 8;
/// The percentage of moves in which the rest of the memory follows later and the source's host is lost before.
const HOST_LOST: u64 = 15;

pub(crate) fn play(seed: u64) -> Option<Violation> {
    let mut random = Random::new(seed).fork();
    let vm = Vm::new(&mut random);
    let wanted = vm.does;
    let mut play = Play { vm, wanted, random, note: None, now: Duration::ZERO };
    play.tell().map(|detail| Violation { checker: "what a VM is", at: play.now, detail })
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Vm {
    does: StandingState,
    disks: Vec<u64>,
    has_job: bool,
    file: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StandingState {
    Runs,
    Paused,
    ShutDown,
    Stands,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Note {
    is_to_run: bool,
}

enum Moved {
    There(Vm),
    Stays,
}

impl Vm {
    fn new(random: &mut Random) -> Self {
        let does = if random.percent(20) { StandingState::Paused } else { StandingState::Runs };
        Self { does, disks: vec![1, 2], has_job: random.percent(10), file: 0 }
    }

    fn shape(&self) -> Shape {
        let drives = self.disks.iter().zip(0..).map(|(volume, index)| Drive {
            device: Some(format!("disk{index}")),
            media: BTreeSet::from([Medium::Volume(volume.to_string())]),
            through: BTreeSet::new(),
        });
        let works = self.has_job.then(|| "a job works on its disks".to_owned());
        Shape { drives: drives.collect(), works: works.into_iter().collect(), ..Shape::default() }
    }

    fn differences(&self) -> BTreeSet<Difference> {
        let known = Self { disks: vec![1, 2], has_job: false, ..self.clone() };
        differences(&known.shape(), &self.shape(), |_, _| true, |_, _, _| true)
    }

    fn says(&self) -> Does {
        Does::of(match self.does {
            StandingState::Runs => "running",
            StandingState::Paused => "paused",
            StandingState::ShutDown => "shutdown",
            StandingState::Stands => "finish-migrate",
        })
    }
}

struct Play {
    random: Random,
    vm: Vm,
    /// The last state that others have ordered.
    wanted: StandingState,
    note: Option<Note>,
    now: Duration,
}

impl Play {
    fn tell(&mut self) -> Option<String> {
        let before = self.vm.clone();
        let Ok(mut leaves) = Departure::begin(&self.vm.says(), &self.vm.differences(), self.vm.file) else {
            return (self.vm != before).then(|| "an order that was refused has changed the VM".to_owned());
        };
        let mut sent = self.vm.file;
        match self.go(&mut leaves, &mut sent) {
            Moved::Stays => self.wrong_here(),
            Moved::There(there) => self.wrong_there(&there),
        }
    }

    fn go(&mut self, leaves: &mut Departure, sent: &mut u64) -> Moved {
        for _ in 0..self.random.below(TURNS_MAX) {
            self.others();
            if self.random.percent(KILLED) {
                // The move has not paused anything yet.
                return Moved::Stays;
            }
        }
        let Ok(then) = leaves.before_memory(&self.vm.says(), &self.vm.differences()) else {
            return Moved::Stays;
        };
        self.note = Some(Note { is_to_run: then == Then::Runs });
        for _ in 0..self.random.below(TURNS_MAX) {
            if self.others() {
                if self.random.percent(KILLED) {
                    // Before the note.
                    return self.stay(Memory::Moving);
                }
                for step in leaves.changed(&self.vm.says()) {
                    match step {
                        Step::Note(then) => self.note = Some(Note { is_to_run: then == Then::Runs }),
                        Step::Stay(_) => return self.stay(Memory::Moving),
                    }
                }
            }
            if self.random.percent(KILLED) {
                return self.stay(Memory::Moving);
            }
        }
        let had = self.vm.clone();
        if self.vm.does != StandingState::ShutDown {
            self.vm.does = StandingState::Stands;
        }
        leaves.changed(&self.vm.says());
        let last = leaves.stopped(&self.vm.differences(), self.vm.file);
        let Ok(Last { then, files }) = last else { return self.stay(Memory::Moving) };
        if files == Files::Changed {
            *sent = self.vm.file;
        }
        if self.random.percent(KILLED) {
            return self.stay(Memory::Still);
        }
        // It must be as it was when it stopped.
        self.vm.does = had.does;
        let does = if then == Then::Runs { StandingState::Runs } else { StandingState::Paused };
        Moved::There(Vm { does, disks: vec![1, 2], has_job: false, file: *sent })
    }

    /// Changes something as another program; returns whether that stopped or resumed the VM.
    fn others(&mut self) -> bool {
        self.now += Duration::from_millis(10);
        if !self.random.percent(OTHERS) {
            return false;
        }
        let before = self.vm.does;
        match self.random.below(7) {
            0 => self.vm.does = StandingState::Paused,
            1 if self.vm.does == StandingState::Paused => self.vm.does = StandingState::Runs,
            2 if self.vm.does == StandingState::Runs => self.vm.does = StandingState::ShutDown,
            3 => self.vm.disks = vec![1, 3],
            4 => self.vm.disks = vec![1, 2],
            5 => self.vm.has_job = !self.vm.has_job,
            _ => self.vm.file += 1,
        }
        if before == StandingState::ShutDown {
            self.vm.does = before;
        }
        self.wanted = self.vm.does;
        self.vm.does != before
    }

    /// Lets it stay: the daemon, or the next one, resumes it by its note.
    fn stay(&mut self, memory: Memory) -> Moved {
        let Some(note) = self.note else { return Moved::Stays };
        let (mut hold, mut memory) = (Hold::found(Reason::Move), memory);
        hold.handle_event(self.now, if note.is_to_run { Event::LetRun } else { Event::LetStay });
        for _ in 0..SETTLING_TURNS_MAX {
            let event = match hold.poll_action() {
                Some(Action::Look) => {
                    let running = match self.vm.does {
                        StandingState::Runs => Running::Yes,
                        StandingState::Paused => Running::Paused,
                        StandingState::ShutDown => Running::Ended,
                        StandingState::Stands => Running::No,
                    };
                    Event::Seen(Seen { running, memory, is_over_nothing: false })
                }
                Some(Action::Abandon) => {
                    memory = Memory::Still;
                    Event::Done
                }
                Some(Action::Continue) => {
                    self.vm.does = StandingState::Runs;
                    Event::Done
                }
                Some(Action::Forget) => Event::Forgotten,
                Some(_) => continue,
                None if hold.is_free() => break,
                None => {
                    if let Some((until, _)) = hold.poll_timeout() {
                        self.now = self.now.max(until);
                    }
                    hold.handle_timeout(self.now);
                    continue;
                }
            };
            hold.handle_event(self.now, event);
        }
        // A VM stopped by the move is resumed only if it ran before: otherwise it stays stopped, which equals paused.
        if self.vm.does == StandingState::Stands && !note.is_to_run {
            self.vm.does = StandingState::Paused;
        }
        self.note = None;
        Moved::Stays
    }

    fn wrong_here(&self) -> Option<String> {
        match (self.wanted, self.vm.does) {
            (was, is) if was == is => None,
            (was, is) => Some(format!("others had it {was:?} last, and it stays {is:?}")),
        }
    }

    fn wrong_there(&mut self, there: &Vm) -> Option<String> {
        if self.vm != *there {
            return Some(format!("it was {:?}, and is {there:?} at the target", self.vm));
        }
        if !self.random.percent(HOST_LOST) {
            return None;
        }
        // It lacks memory that only its source's hypervisor had.
        match rest_after_restart(SourceHas::Nothing) {
            Rest::TellLost => None,
            Rest::Send => {
                Some("its source has lost the rest of its memory, and it waits for ever".to_owned())
            }
        }
    }
}
