//! One guest that is paused for a change of its disks or for a move. The daemon is killed between any two
//! steps. Uses the product's
//! [`Hold`] and [`Exchange`]; the hypervisor hangs, answers late or ends.
//!
//! ```text
//!   begin ─► note ─► disks change hands, or memory moves ─► resume ─► seen running ─► forgotten
//!     killed anywhere: the next daemon has the durable state, and the hypervisor's answers
//! ```
//! It has no disks and takes no part in the seed's migrations: a separate simulation.

use std::time::Duration;

use migration::vm::exchange::{Exchange, Goal, Over, SeenDisk, Step};
use migration::vm::hold::{Action, Event, Hold, Memory, Reason, Running, Seen};

use crate::random::Random;
use crate::world::Violation;

const FAULTY_TURNS_MAX: u64 = 60;
/// Turns after which all must be at rest.
const TURNS_MAX: u64 = 2000;
const DEAF_MAX: Duration = Duration::from_secs(30);
const TURN: Duration = Duration::from_millis(10);
/// Percentages of turns in which the daemon is killed, the monitor hangs, the hypervisor ends, a step fails though it is done, a
/// note is not written.
const KILLED: u64 = 6;
const DEAF: u64 = 4;
const ENDED: u64 = 1;
const ANSWER_LOST: u64 = 8;
const NOT_NOTED: u64 = 5;

pub(crate) fn play(seed: u64) -> Option<Violation> {
    let mut play = Play::new(Random::new(seed).fork());
    let faulty = play.random.below(FAULTY_TURNS_MAX);
    for turn in 0..TURNS_MAX {
        play.faults = if turn < faulty { Faults::On } else { Faults::Off };
        play.turn();
        if let Some(detail) = play.broken_rule() {
            return Some(play.violation(detail));
        }
        if play.stage == Stage::Over {
            return play.wrong_at_its_end().map(|detail| play.violation(detail));
        }
    }
    let detail = format!("it does not come to rest: {:?} {:?}", play.stage, play.hold);
    Some(play.violation(detail))
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Faults {
    On,
    Off,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Noting,
    Working,
    LettingRun,
    Over,
}

struct Hypervisor {
    runs: bool,
    has_ended: bool,
    memory: Memory,
    disks: Vec<Over>,
    deaf_until: Duration,
}

struct Play {
    random: Random,
    faults: Faults,
    now: Duration,
    reason: Reason,
    hypervisor: Hypervisor,
    /// The durable state: whether there is a note, and which volumes there are.
    is_noted: bool,
    served: Vec<bool>,
    hold: Hold,
    exchange: Option<Exchange>,
    stage: Stage,
}

impl Play {
    fn new(mut random: Random) -> Self {
        let reason = random.pick(&[Reason::Adopt, Reason::Release, Reason::Move]);
        let disks = 1 + random.index(3);
        let is_adopted = reason != Reason::Adopt;
        let over = if is_adopted { Over::Export } else { Over::File };
        let hypervisor = Hypervisor {
            runs: true,
            has_ended: false,
            memory: Memory::Still,
            disks: vec![over; disks],
            deaf_until: Duration::ZERO,
        };
        let mut hold = Hold::free();
        hold.handle_event(Duration::ZERO, Event::Hold(reason));
        Self {
            random,
            faults: Faults::On,
            now: Duration::ZERO,
            reason,
            hypervisor,
            is_noted: false,
            served: vec![is_adopted; disks],
            hold,
            exchange: Some(Exchange::towards(goal(reason))),
            stage: Stage::Noting,
        }
    }

    fn turn(&mut self) {
        self.now += TURN;
        if self.strikes(ENDED) {
            self.hypervisor.has_ended = true;
        }
        if self.strikes(DEAF) {
            self.hypervisor.deaf_until = self.now + self.random.duration(TURN, DEAF_MAX);
        }
        if self.strikes(KILLED) {
            return self.restart();
        }
        // The work continues beside the hold's actions.
        let is_working = self.stage == Stage::Working && self.random.percent(50);
        match self.hold.poll_action() {
            Some(action) if !is_working => self.act(&action),
            Some(action) => {
                self.work();
                self.act(&action);
            }
            None => match self.stage {
                Stage::Working => self.work(),
                Stage::Noting | Stage::LettingRun if self.hold.is_free() => self.stage = Stage::Over,
                Stage::Noting | Stage::LettingRun | Stage::Over => self.wait(),
            },
        }
    }

    fn restart(&mut self) {
        self.exchange = None;
        self.hold = if self.is_noted { Hold::found(self.reason) } else { Hold::free() };
        self.stage = match self.reason {
            _ if !self.is_noted => Stage::LettingRun,
            Reason::Adopt | Reason::Release => Stage::Working,
            Reason::Move | Reason::MoveAhead | Reason::Resume | Reason::Missing | Reason::Suspend => {
                self.let_run()
            }
        };
    }

    fn let_run(&mut self) -> Stage {
        self.tell(Event::LetRun);
        Stage::LettingRun
    }

    fn wait(&mut self) {
        if let Some((until, _)) = self.hold.poll_timeout() {
            self.now = self.now.max(until);
            self.hold.handle_timeout(self.now);
        }
    }

    fn act(&mut self, action: &Action) {
        let event = match action {
            Action::Note(_) if self.strikes(NOT_NOTED) => Some(Event::NotNoted),
            Action::Note(_) => {
                self.is_noted = true;
                Some(Event::Noted)
            }
            Action::MayPause => {
                self.stage = Stage::Working;
                None
            }
            Action::Forget => {
                self.is_noted = false;
                Some(Event::Forgotten)
            }
            Action::Look | Action::Abandon | Action::Continue => Some(self.ask(action)),
            Action::MustNotRun | Action::Tell(_) => None,
        };
        if let Some(event) = event {
            self.tell(event);
        }
    }

    fn ask(&mut self, action: &Action) -> Event {
        if self.hypervisor.has_ended {
            return Event::Gone;
        }
        let refused = Event::Refused("no answer".to_owned());
        if self.is_deaf() {
            return refused;
        }
        let hypervisor = &mut self.hypervisor;
        match action {
            Action::Abandon => hypervisor.memory = Memory::Still,
            Action::Continue => hypervisor.runs = true,
            _ => {
                let running = if hypervisor.runs { Running::Yes } else { Running::No };
                let is_over_nothing = hypervisor.disks.contains(&Over::Nothing);
                let seen = Seen { running, memory: hypervisor.memory, is_over_nothing };
                if hypervisor.memory == Memory::Ending {
                    hypervisor.memory = Memory::Still;
                }
                return Event::Seen(seen);
            }
        }
        if self.strikes(ANSWER_LOST) { refused } else { Event::Done }
    }

    fn work(&mut self) {
        if self.hypervisor.has_ended {
            self.tell(Event::Gone);
            self.stage = Stage::LettingRun;
            return;
        }
        match self.reason {
            Reason::Adopt | Reason::Release => self.exchange(),
            Reason::Move | Reason::MoveAhead | Reason::Resume | Reason::Missing | Reason::Suspend => {
                match self.random.below(4) {
                    0 => self.hypervisor.memory = Memory::Moving,
                    1 => self.hypervisor.runs &= self.hypervisor.memory == Memory::Still,
                    2 if self.hypervisor.memory == Memory::Moving => self.hypervisor.memory = Memory::Ending,
                    _ => self.stage = self.let_run(),
                }
            }
        }
    }

    fn exchange(&mut self) {
        let disks = self.disks();
        let goal = goal(self.reason);
        let mut exchange = self.exchange.take().unwrap_or_else(|| Exchange::after_restart(goal, &disks));
        if self.is_deaf() {
            self.now += exchange.failed();
        } else {
            let step = exchange.next_step(self.hypervisor.runs, &disks);
            match step {
                Step::Complete(_) => self.stage = self.let_run(),
                Step::Pause => self.hypervisor.runs = false,
                Step::LeadToNothing(index) => self.lead(index, Over::Nothing),
                Step::LeadToExport(index) => self.lead(index, Over::Export),
                Step::LeadToFile(index) => self.lead(index, Over::File),
                Step::Serve(index) => {
                    self.served.iter_mut().skip(index).take(1).for_each(|served| *served = true);
                }
                Step::StopServing(index) => {
                    self.served.iter_mut().skip(index).take(1).for_each(|served| *served = false);
                }
            }
            if self.strikes(ANSWER_LOST) {
                self.now += exchange.failed();
            }
        }
        self.exchange = Some(exchange);
    }

    fn lead(&mut self, index: usize, over: Over) {
        if let Some(disk) = self.hypervisor.disks.get_mut(index) {
            *disk = over;
        }
    }

    fn disks(&self) -> Vec<SeenDisk> {
        let disks = self.hypervisor.disks.iter().zip(&self.served);
        disks.map(|(over, is_served)| SeenDisk { over: *over, is_served: *is_served }).collect()
    }

    fn tell(&mut self, event: Event) {
        self.hold.handle_event(self.now, event);
    }

    fn is_deaf(&self) -> bool {
        self.faults == Faults::On && self.now < self.hypervisor.deaf_until
    }

    fn strikes(&mut self, percent: u64) -> bool {
        self.random.percent(percent) && self.faults == Faults::On
    }

    fn broken_rule(&self) -> Option<String> {
        let Hypervisor { runs, has_ended, disks, .. } = &self.hypervisor;
        if *has_ended {
            return None;
        }
        if !runs && !self.is_noted {
            return Some("the guest is paused, and no note says so".to_owned());
        }
        if *runs && disks.contains(&Over::Nothing) {
            return Some("the guest writes to nothing".to_owned());
        }
        let twice = self.disks().iter().any(|disk| disk.over == Over::File && disk.is_served);
        twice.then(|| "the hypervisor and a volume have one file open".to_owned())
    }

    fn wrong_at_its_end(&self) -> Option<String> {
        let Hypervisor { runs, has_ended, .. } = self.hypervisor;
        let sides = [Over::File, Over::Export].map(|over| SeenDisk { over, is_served: over == Over::Export });
        let disks = self.disks();
        let is_whole = sides.iter().any(|side| disks.iter().all(|disk| disk == side));
        let is_right = has_ended || runs && is_whole;
        let state = format!("{:?}: runs {runs}, noted {}, {disks:?}", self.reason, self.is_noted);
        (!is_right || self.is_noted).then_some(state)
    }

    fn violation(&self, detail: String) -> Violation {
        Violation { checker: "paused guest", at: self.now, detail }
    }
}

fn goal(reason: Reason) -> Goal {
    if reason == Reason::Adopt { Goal::Volumes } else { Goal::Files }
}
