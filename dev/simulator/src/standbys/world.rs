//! Virtual time, links, guests, and what both hosts have in common.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use chronicle::{BlockCount, BlockRange};
use standby::VolumeIndex;
use standby::asking::{IfSilent, Question, Word};
use standby::owner::{self, Outcome, WriteId, WriteKind};
use standby::wire::{StreamId, ToOwner, ToStandby};

use super::met::{Fault, Met};
use super::owner::{OwnerHost, OwnerTask};
use super::receiver::{StandbyHost, StandbyTask};
use super::scattered::SCATTERED_PAUSE;
use super::truth::Truth;
use crate::random::Random;
use crate::restored::Telling;

pub(super) const EVERY: Duration = Duration::from_secs(1);
/// How much younger a standby may count than it is: messages travel.
pub(super) const AGE_SLACK: Duration = Duration::from_millis(120);
pub(super) const WAIT_MAX: Duration = Duration::from_millis(200);

/// What happens at a time.
#[derive(Debug)]
pub(super) enum Task {
    /// A message arrives, if its connection still stands.
    ToStandby {
        link: usize,
        connection: u64,
        stream: StreamId,
        message: ToStandby,
        payload: Vec<u64>,
    },
    ToOwner {
        link: usize,
        connection: u64,
        stream: StreamId,
        message: ToOwner,
    },
    /// An owner asks before it serves; and what the standby's host says, and whether it had promoted the standby.
    Question {
        link: usize,
        connection: u64,
        question: Question,
    },
    Word {
        link: usize,
        connection: u64,
        word: Word,
        was_promoted: bool,
    },
    /// Something that a process waits for; it ends with the process.
    Owner {
        host: usize,
        process: u64,
        task: OwnerTask,
    },
    Standby {
        process: u64,
        task: StandbyTask,
    },
    /// A guest asks for something.
    Guest,
    /// A fault, or an order of an administrator.
    Trouble,
    /// A fault while something is under way.
    Strike,
    /// A link is up again.
    Connect(usize),
    /// A host is up again.
    StartOwner(usize),
    StartStandby,
    /// The standby's host notices that no owner is connected.
    OwnerLost,
}

/// A link between an owner's host and the standby's.
#[derive(Debug, Default)]
pub(super) struct Link {
    /// Counts connections.
    pub(super) connection: u64,
    pub(super) is_up: bool,
    to_standby: Duration,
    to_owner: Duration,
    /// When the end of the newest epoch arrives at the standby's host.
    pub(super) seal_at: Duration,
}

/// What a seed draws.
#[derive(Clone, Debug)]
pub(super) struct Shape {
    pub(super) sizes: Vec<u64>,
    pub(super) ring_blocks: u64,
    pub(super) spool_blocks: u64,
    pub(super) extent_blocks: u64,
    /// The number of blocks that only the disk may have at a cut.
    pub(super) catch_up_blocks: u64,
    /// The most time between two requests of guests.
    pub(super) guest_pause: Duration,
    /// The most time between two faults.
    pub(super) trouble_pause: Duration,
    /// Blocks that the link carries in a hundredth of a second at most.
    pub(super) rate: u64,
    /// The number of blocks of each volume that guests write to.
    pub(super) working_set: u64,
    /// Whether guests write single blocks everywhere.
    pub(super) is_scattered: bool,
    /// What owners do if the standby's host says nothing.
    pub(super) if_silent: IfSilent,
    pub(super) hangs_percent: u64,
    /// Of a hundred steps of the standby's host, those during which something happens.
    pub(super) strikes_percent: u64,
}

#[derive(Debug)]
pub(super) struct World {
    pub(super) random: Random,
    pub(super) now: Duration,
    queue: BTreeMap<(Duration, u64), Task>,
    sequence: u64,
    telling: Telling,
    pub(super) shape: Shape,
    pub(super) owners: Vec<OwnerHost>,
    /// The owner that guests use.
    pub(super) current: usize,
    pub(super) standby: StandbyHost,
    pub(super) links: Vec<Link>,
    pub(super) truth: Truth,
    pub(super) met: Met,
    /// Cuts, promotions, points that were compared.
    pub(super) shown: super::Shown,
    pub(super) violation: Option<String>,
    /// Whether faults have ended.
    pub(super) is_calm: bool,
    pub(super) guests_run: bool,
    /// Whether a migration has taken the image of the standby.
    pub(super) is_consumed: bool,
    last_number: u64,
}

impl World {
    pub(super) fn new(mut random: Random, telling: Telling) -> Self {
        let volumes = random.pick(&[1, 1, 2, 3]);
        let sizes: Vec<u64> = (0..volumes).map(|_| random.between(16, 65)).collect();
        let shape = Shape {
            ring_blocks: random.pick(&[0, 8, 32, 1000]),
            spool_blocks: random.pick(&[0, 8, 64, 1000]),
            extent_blocks: random.pick(&[1, 4, 16]),
            catch_up_blocks: random.pick(&[0, 8, 32, 1000]),
            guest_pause: Duration::from_millis(random.pick(&[10, 40, 150, 1500])),
            trouble_pause: Duration::from_millis(random.pick(&[300, 1000, 4000])),
            rate: random.pick(&[1, 4, 30]),
            working_set: random.pick(&[4, 16, 64]),
            is_scattered: false,
            if_silent: random.pick(&[IfSilent::Wait, IfSilent::Wait, IfSilent::Serve]),
            hangs_percent: random.pick(&[0, 0, 3]),
            strikes_percent: random.pick(&[0, 2, 10]),
            sizes,
        };
        let standby = StandbyHost::new(&mut random, &shape);
        let mut world = Self::made(random, telling, 1, shape, standby);
        world.tell(|world| format!("{:?}", world.shape));
        world.order_standby();
        world.begin_to_play();
        world
    }

    /// Makes a world that follows another one, without an owner. Its numbers go on.
    pub(super) fn with(random: Random, before: &Self, shape: Shape, standby: StandbyHost) -> Self {
        Self::made(random, before.telling, before.last_number, shape, standby)
    }

    /// Guests begin to work, and faults to strike.
    pub(super) fn begin_to_play(&mut self) {
        self.in_about(Duration::from_millis(1), Task::Guest);
        let first = self.shape.trouble_pause;
        self.in_about(first, Task::Trouble);
    }

    fn made(random: Random, telling: Telling, last_number: u64, shape: Shape, standby: StandbyHost) -> Self {
        Self {
            now: Duration::ZERO,
            queue: BTreeMap::new(),
            sequence: 0,
            telling,
            owners: Vec::new(),
            current: 0,
            standby,
            links: Vec::new(),
            truth: Truth::default(),
            met: Met::default(),
            shown: super::Shown::default(),
            violation: None,
            is_calm: false,
            guests_run: true,
            is_consumed: false,
            last_number,
            random,
            shape,
        }
    }

    /// Returns a number that was not used before: of a write's content, a stream, a life.
    pub(super) fn number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }

    pub(super) fn tell(&self, what: impl FnOnce(&Self) -> String) {
        if self.telling == Telling::Printed {
            println!("{:>10.4} {}", self.now.as_secs_f64(), what(self));
        }
    }

    pub(super) fn violate(&mut self, what: impl Into<String>) {
        let what = what.into();
        self.tell(|_| format!("VIOLATION {what}"));
        self.violation.get_or_insert(what);
    }

    pub(super) fn after(&mut self, delay: Duration, task: Task) {
        self.sequence += 1;
        self.queue.insert((self.now + delay, self.sequence), task);
    }

    /// Adds a task within a time.
    pub(super) fn in_about(&mut self, most: Duration, task: Task) {
        let delay = Duration::from_micros(self.random.between(1, most.as_micros().max(2) as u64));
        self.after(delay, task);
    }

    /// Returns how long an operation of a disk takes.
    pub(super) fn disk_time(&mut self) -> Duration {
        if !self.is_calm && self.random.percent(self.shape.hangs_percent) {
            return Duration::from_millis(self.random.between(100, 700));
        }
        Duration::from_micros(self.random.between(50, 9000))
    }

    pub(super) fn meet(&mut self, fault: Fault) {
        let phase = self.standby.phase();
        self.met.add(fault, phase);
        self.tell(|_| format!("{} ({})", fault.name(), phase.name()));
    }

    /// Runs up to a time.
    pub(super) fn run_until(&mut self, until: Duration) {
        while self.violation.is_none() {
            let task = self.queue.keys().next().map(|(at, _)| *at);
            let owners = (0..self.owners.len()).filter_map(|host| Some((self.owners[host].due()?, host)));
            let owner = owners.min();
            let standby = self.standby.due();
            let due = [task, owner.map(|(at, _)| at), standby].into_iter().flatten().min();
            let Some(due) = due.filter(|due| *due <= until) else { break };
            let is_late = due < self.now;
            self.now = self.now.max(due);
            if task == Some(due) {
                if let Some((_, task)) = self.queue.pop_first() {
                    self.carry_out(task);
                }
            } else if let Some((_, host)) = owner.filter(|(at, _)| *at == due) {
                if is_late {
                    self.violate("a deadline of the owner does not move");
                }
                self.owner_timeout(host);
            } else {
                if is_late {
                    self.violate("a deadline of the standby does not move");
                }
                self.standby_timeout();
            }
        }
        self.now = self.now.max(until);
    }

    fn carry_out(&mut self, task: Task) {
        match task {
            Task::ToStandby { link, connection, stream, message, payload } => {
                if self.links[link].connection == connection && self.links[link].is_up {
                    self.standby_receives(stream, message, payload);
                }
            }
            Task::ToOwner { link, connection, stream, message } => {
                if self.links[link].connection == connection && self.links[link].is_up {
                    self.owner_receives(link, stream, message);
                }
            }
            Task::Question { link, connection, question } => {
                if self.links[link].connection == connection && self.links[link].is_up {
                    self.say(link, question);
                }
            }
            Task::Word { link, connection, word, was_promoted } => {
                if self.links[link].connection == connection && self.links[link].is_up {
                    self.owner_hears(link, word, was_promoted);
                }
            }
            Task::Owner { host, process, task } => {
                if self.owners[host].process == process && self.owners[host].is_up() {
                    self.owner_task(host, task);
                }
            }
            Task::Standby { process, task } => {
                if self.standby.process == process && self.standby.machine.is_some() {
                    self.standby_task(task);
                }
            }
            Task::Guest => {
                self.guest();
                let pause = match (self.is_calm, self.shape.is_scattered) {
                    (_, true) => SCATTERED_PAUSE,
                    (true, false) => EVERY / 4,
                    (false, false) => self.shape.guest_pause,
                };
                self.in_about(pause, Task::Guest);
            }
            Task::Trouble => {
                if !self.is_calm {
                    self.trouble();
                    let pause = self.shape.trouble_pause;
                    self.in_about(pause, Task::Trouble);
                }
            }
            Task::Strike if !self.is_calm => self.trouble(),
            Task::Strike => {}
            Task::Connect(link) => self.connect(link),
            Task::StartOwner(host) => self.start_owner(host),
            Task::StartStandby => self.start_standby(),
            Task::OwnerLost => {
                if self.links.iter().all(|link| !link.is_up) {
                    self.standby_loses_owner();
                }
            }
        }
    }

    /// Connects a link, if both sides are up.
    pub(super) fn connect(&mut self, link: usize) {
        let is_possible = self.owners[link].is_up() && self.standby.machine.is_some();
        if self.links[link].is_up || !is_possible {
            return;
        }
        let connection = self.number();
        let now = self.now;
        self.links[link] = Link { connection, is_up: true, to_standby: now, to_owner: now, seal_at: now };
        // A former owner says so as well, and is not believed.
        let _ = self.standby.whereabouts.arrived(link);
        self.begin_stream(link);
    }

    /// Breaks a link. Messages on it are lost.
    pub(super) fn disconnect(&mut self, link: usize) {
        if std::mem::take(&mut self.links[link].is_up) {
            self.tell(|_| format!("link {link} breaks"));
            self.in_about(Duration::from_millis(60), Task::OwnerLost);
            let away = if self.is_calm { Duration::from_millis(50) } else { Duration::from_secs(3) };
            self.in_about(away, Task::Connect(link));
        }
    }

    fn travel_time(&mut self) -> Duration {
        let most = if self.is_calm { 2_000 } else { 40_000 };
        Duration::from_micros(self.random.between(50, most))
    }

    pub(super) fn send_to_standby(
        &mut self,
        link: usize,
        stream: StreamId,
        message: ToStandby,
        payload: Vec<u64>,
    ) {
        self.tell(|_| format!("{link} ─► {message:?} {payload:?}"));
        let at = (self.now + self.travel_time()).max(self.links[link].to_standby);
        self.links[link].to_standby = at;
        if matches!(message, ToStandby::Seal { .. }) {
            self.links[link].seal_at = at;
        }
        let connection = self.links[link].connection;
        self.after(at - self.now, Task::ToStandby { link, connection, stream, message, payload });
    }

    pub(super) fn ask(&mut self, link: usize, question: Question) {
        let (delay, connection) = (self.travel_time(), self.links[link].connection);
        self.after(delay, Task::Question { link, connection, question });
    }

    /// The standby's host answers whether it has promoted the standby.
    fn say(&mut self, link: usize, question: Question) {
        let Some(word) = self.standby.machine.as_ref().map(|machine| machine.word(question)) else { return };
        let word = if self.standby.whereabouts.may_be_at(link) { word } else { Word::Unsure };
        let was_promoted = self.standby.owned.is_some();
        let (delay, connection) = (self.travel_time(), self.links[link].connection);
        self.after(delay, Task::Word { link, connection, word, was_promoted });
    }

    /// Sends to the owner whose connection has this stream.
    pub(super) fn send_to_owner(&mut self, stream: StreamId, message: ToOwner) {
        let Some(link) = self.owners.iter().position(|owner| owner.stream == Some(stream)) else { return };
        self.tell(|_| format!("{link} ◄─ {message:?}"));
        self.standby.heard_at = self.now;
        let at = (self.now + self.travel_time()).max(self.links[link].to_owner);
        self.links[link].to_owner = at;
        let connection = self.links[link].connection;
        self.after(at - self.now, Task::ToOwner { link, connection, stream, message });
    }

    /// A guest asks for a write, or a discard, or its volume grows.
    fn guest(&mut self) {
        let host = self.current;
        let owner = &self.owners[host];
        if !self.guests_run || !owner.is_serving || owner.machine.is_none() || owner.asked.len() > 20 {
            return;
        }
        let volume = self.random.index(owner.volumes.len());
        let size = self.owners[host].volumes[volume].len();
        if !self.is_calm && size < 80 && self.random.percent(2) {
            let grown = size + self.random.between(1, 9);
            self.meet(Fault::Grown);
            self.owners[host].grow(volume, grown);
            let volume = VolumeIndex(volume as u16);
            self.owner_event(host, owner::Event::Grown { volume, size: BlockCount(grown) });
            return;
        }
        let is_scattered = self.shape.is_scattered;
        let is_zero = !is_scattered && self.random.percent(15);
        let (set, most) = match (is_scattered, is_zero) {
            (true, _) => (size, 1),
            (false, true) => (size, size),
            (false, false) => (self.shape.working_set.min(size), 6),
        };
        let set = if self.random.percent(10) { size } else { set };
        let start = self.random.below(set);
        let end = (start + 1 + self.random.below(most)).min(size);
        let kind = if is_zero { WriteKind::Zero } else { WriteKind::Write };
        let value = self.number();
        let asked = Asked {
            at: self.now,
            volume,
            blocks: BlockRange::new(start, end),
            value: if is_zero { 0 } else { value },
            free_since: self.now,
        };
        self.tell(|_| format!("write {value} asked: {kind:?} {start}..{end} of {volume}"));
        self.owners[host].asked.insert(value, asked.clone());
        let (write, blocks) = (WriteId(value), asked.blocks);
        let volume = VolumeIndex(volume as u16);
        self.owner_event(host, owner::Event::WriteAsked { write, volume, blocks, kind });
    }
}

/// A write that a guest has asked for.
#[derive(Clone, Debug)]
pub(super) struct Asked {
    pub(super) at: Duration,
    pub(super) volume: usize,
    pub(super) blocks: BlockRange,
    pub(super) value: u64,
    /// Since when no write that overlaps, and was asked for before, is under way.
    pub(super) free_since: Duration,
}

/// A write on its way to the disk.
#[derive(Clone, Debug)]
pub(super) struct InFlight {
    pub(super) asked: Asked,
    /// What its blocks held before.
    pub(super) before: Vec<u64>,
    /// Blocks that have it already.
    pub(super) landed: BTreeSet<u64>,
    pub(super) outcome: Outcome,
}
