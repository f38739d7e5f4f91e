//! Two hosts: the halves of the product's conductor on either side of a link that loses, delays and reorders, two
//! journals, and two daemons that crash, each by itself.
//!
//! ```text
//!   guests ──► align ──► volume (gate, tracker, mirror) ──► disks          disks ◄── volume (gate closed)
//!                │ host A: SourceConductor                         host B: TargetConductor │
//!                └───── PeerStore, messages ═══ line: late, out of order, broken ═══ Service
//!   journal of A                                                                journal of B
//! ```
//! Each host has an executor of its own; both go by one clock. What a host's daemon does dies with it; disks, journals
//! and guests stay. Guests stay at A: once B owns their volumes their requests are forwarded.

mod chronicles;
mod control;
mod line;
mod machine;
mod party;
mod serving;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use block::executor::Unpark;
use block::{Driver, Executor};
use migration::Phase;
use migration::journal::Stage;

use self::line::Line;
use self::machine::SimMachine;
use self::party::{Party, Place};
use crate::coverage::Struck;
use crate::driver::Clock;
use crate::faults::{Fault, Planned};
use crate::guest::Guest;
use crate::random::Random;
use crate::scenario::{Options, Scenario};
use crate::simulation::Finding;
use crate::trace::{Audience, Trace};
use crate::world::{Stop, World};

/// A simulation that has not ended by then never will: all faults pass within seconds.
const TIME_MAX: Duration = Duration::from_secs(600);
/// Steps of both executors and the clock.
const STEPS_MAX: u64 = 3_000_000;
/// Turns of one executor at one instant: beyond it a task wakes itself for ever.
const TURNS_MAX: u32 = 20_000;
/// How long faults go on happening at most.
const FAULTS_END: Duration = Duration::from_secs(6);
/// How long a daemon is down at most.
const DOWN_MAX: Duration = Duration::from_secs(2);
/// Pause between two looks at what is left to do.
const LOOK: Duration = Duration::from_millis(2);
/// How long a link is away at most; longer than what a guest's write may be held.
const AWAY_MAX: Duration = Duration::from_secs(4);

/// Both hosts and what is between them.
pub(crate) struct Pair {
    pub(crate) world: Rc<World>,
    random: RefCell<Random>,
    parties: [Rc<Party>; 2],
    guests: Vec<Rc<Guest>>,
    /// The machine that goes along, if one does.
    machine: Option<Rc<SimMachine>>,
    /// For the migration, and for what clients that stayed at A ask of B.
    lines: [Rc<Line>; 2],
    crashes: RefCell<Vec<(Place, Stop)>>,
    /// A power cut has been survived whose losses have yet to be looked at.
    power_was_cut: Cell<bool>,
    migrations_left: Cell<u32>,
    /// Guests ask for nothing more: the end is near.
    is_settling: Cell<bool>,
}

/// Runs the simulation of `seed` with two hosts.
pub(crate) fn simulate(seed: u64, options: &Options, audience: Audience) -> Finding {
    let mut random = Random::new(seed ^ 0x5EED_0F70_B057_5000);
    let world = World::new(&mut random, Trace::new(audience));
    let scenario = Scenario::draw(&mut random, options);
    let mut executors = [0, 1].map(|_| Executor::new(PairDriver::new(&world.clock)));
    let handles = [executors[0].handle(), executors[1].handle()];
    let machine = SimMachine::draw(&world, seed);
    let pair = Pair::new(&world, &mut random, &scenario, handles, machine);
    pair.begin();
    loop {
        let mut deadline: Option<Duration> = None;
        for executor in &mut executors {
            match rest(executor, &world) {
                Ok(next) => deadline = [deadline, next].into_iter().flatten().min(),
                Err(why) => world.violated("patience", || format!("{why}: {}", pair.unfinished())),
            }
        }
        let crashes = std::mem::take(&mut *pair.crashes.borrow_mut());
        for (place, how) in crashes {
            executors[place as usize].drop_tasks();
            pair.crashed(place, how);
        }
        if let Some((Stop::Finished | Stop::Violated, _)) = world.take_stop() {
            break;
        }
        world.clock.step(deadline);
        if world.clock.is_dead() || world.now() > TIME_MAX || world.clock.steps() > STEPS_MAX {
            world.violated("patience", || format!("it does not end: {}", pair.unfinished()));
            break;
        }
    }
    executors.iter_mut().for_each(Executor::drop_tasks);
    world.clock.clear();
    pair.clear();
    Finding {
        violation: world.violation(),
        operations: pair.guests.iter().map(|guest| u64::from(guest.answered())).sum(),
        recoveries_hit: 0,
        struck: Struck::default(),
        hash: world.trace.hash(),
    }
}

/// Runs a host's tasks until all of them wait; tells for when at the latest.
fn rest(executor: &mut Executor<PairDriver>, world: &World) -> Result<Option<Duration>, &'static str> {
    for _ in 0..TURNS_MAX {
        executor.driver().idle = None;
        executor.turn();
        if let Some(deadline) = executor.driver().idle {
            return Ok(deadline);
        }
        if world.is_stopped() {
            return Ok(None);
        }
    }
    Err("it runs in circles")
}

impl Pair {
    fn new(
        world: &Rc<World>,
        random: &mut Random,
        scenario: &Scenario,
        handles: [block::Handle; 2],
        machine: Option<Rc<SimMachine>>,
    ) -> Rc<Self> {
        let lines = [0, 1].map(|number| Line::new(world, random.fork(), number));
        let (parties, guests) = party::make(world, random, scenario, handles, &lines);
        let pair = Rc::new(Self {
            world: Rc::clone(world),
            random: RefCell::new(random.fork()),
            parties,
            guests,
            machine,
            lines,
            crashes: RefCell::default(),
            power_was_cut: Cell::default(),
            migrations_left: Cell::new(1 + random.below(3) as u32),
            is_settling: Cell::default(),
        });
        pair.parties.iter().for_each(|party| party.join(&pair));
        pair
    }

    fn begin(self: &Rc<Self>) {
        self.parties.iter().for_each(|party| party.boot());
        self.draw_faults();
        self.look_later();
    }

    /// Draws what goes wrong and when: crashes of either host, breaks of the link, and faults of the disks and journals.
    fn draw_faults(self: &Rc<Self>) {
        let mut random = self.random.borrow_mut();
        for _ in 0..random.pick(&[0, 1, 2, 3, 4, 6, 9]) {
            let latest = random.pick(&[
                Duration::from_millis(5),
                Duration::from_millis(20),
                Duration::from_millis(80),
                Duration::from_millis(400),
                FAULTS_END,
            ]);
            let at = random.duration(Duration::from_micros(10), latest);
            let what = random.below(9);
            let (place, how) =
                (random.pick(&[Place::A, Place::B]), random.pick(&[Stop::Kill, Stop::Kill, Stop::PowerCut]));
            let away = random.duration(Duration::from_micros(100), AWAY_MAX);
            let fault = random.pick(&[
                Fault::SourceSlow,
                Fault::TargetError,
                Fault::TargetSlow,
                Fault::TargetSlow,
                Fault::TargetHang,
                Fault::JournalError,
                Fault::JournalSlow,
                Fault::HandBack,
            ]);
            let strikes_max = random.pick(&[1, 2, 5, 20]);
            let pair = Rc::downgrade(self);
            let entered = random.percent(50).then(|| random.pick(&HANDOVER));
            let entered = if self.machine.is_some() { entered.map(with_memory) } else { entered };
            let event = move || {
                let Some(pair) = pair.upgrade() else { return };
                match what {
                    0..=3 => pair.crashes.borrow_mut().push((place, how)),
                    4..=5 => pair.break_link(away),
                    6 => pair.parties[0].cancel(),
                    _ => pair.world.faults.open(
                        &Planned {
                            fault,
                            phase: Phase::Copying,
                            skip: 0,
                            delay: Duration::ZERO,
                            window: away,
                            strikes_max,
                            percent: 60,
                        },
                        pair.world.now(),
                    ),
                }
            };
            match entered {
                // Most of what can go wrong does so in the few moments of a handover.
                Some(phase) => {
                    let (world, delay) = (Rc::clone(&self.world), at / 200);
                    let reached = self.world.hold_until(phase);
                    self.parties[0].when(reached, move || world.clock.after(delay, event));
                }
                None => self.world.clock.at(at, event),
            }
        }
    }

    fn break_link(self: &Rc<Self>, away: Duration) {
        self.world.note("link", 0, 0);
        self.lines.iter().for_each(|line| line.break_it());
        let pair = Rc::downgrade(self);
        self.world.clock.after(away, move || {
            if let Some(pair) = pair.upgrade() {
                pair.world.note("link", 1, 0);
                pair.lines.iter().for_each(Line::mend);
            }
        });
    }

    fn crashed(self: &Rc<Self>, place: Place, how: Stop) {
        let party = &self.parties[place as usize];
        if !party.is_up() {
            return;
        }
        // A server that loses power loses what it has answered and not flushed, also to clients elsewhere that live on;
        // they are no part of this. So a host loses power only while no guest can notice that at the other.
        let how = if self.parties[1].may_own() { Stop::Kill } else { how };
        self.world.note("crash", place as u64, how as u64);
        self.world.say(|| format!("host {place:?}: {how:?}"));
        party.crashed(how);
        if place == Place::A {
            self.world.set_phase(None);
            let takes_guests = how == Stop::PowerCut;
            self.power_was_cut.set(self.power_was_cut.get() || takes_guests);
            self.guests
                .iter()
                .for_each(|guest| if takes_guests { guest.power_cut() } else { guest.disconnect() });
        }
        let down = {
            // Often so short that what the dead daemon had asked for is still under way.
            let mut random = self.random.borrow_mut();
            let longest = random.pick(&[Duration::from_micros(300), Duration::from_millis(5), DOWN_MAX]);
            random.duration(Duration::from_micros(10), longest)
        };
        let me = Rc::downgrade(self);
        self.world.clock.after(down, move || {
            if let Some(pair) = me.upgrade() {
                pair.parties[place as usize].boot();
            }
        });
    }

    /// At most one host has a volume in its books, also if what is on its way to either journal is found there.
    fn journal_changed(&self) {
        let owners = |party: &Party| party.owners();
        let (here, there) = (owners(&self.parties[0]), owners(&self.parties[1]));
        // What is certain of one must not be possible of the other.
        for (certain, possible) in [(&here.0, &there.1), (&there.0, &here.1)] {
            if let Some(volume) = certain.intersection(possible).next() {
                self.world.violated("owner", || format!("both hosts own volume {volume}"));
            }
        }
        self.parties[0].check_released(&self.parties[1]);
    }

    /// Looks from time to time whether everything has come to its end.
    fn look_later(self: &Rc<Self>) {
        let me = Rc::downgrade(self);
        self.world.clock.after(LOOK, move || {
            if let Some(pair) = me.upgrade() {
                pair.look();
                pair.look_later();
            }
        });
    }

    fn look(self: &Rc<Self>) {
        let idle = self.parties.iter().all(|party| party.is_up() && party.has_nothing_to_do());
        if !idle || !self.guests.iter().all(|guest| guest.has_done_its_work()) {
            if idle && self.parties[0].owners().0.len() == self.guests.len() && self.migrations_left.get() > 0
            {
                self.migrations_left.set(self.migrations_left.get() - 1);
                self.parties[0].begin_migration();
            }
            return;
        }
        if !self.is_settling.replace(true) {
            self.guests.iter().for_each(|guest| guest.be_quiet());
        }
        if self.guests.iter().all(|guest| guest.is_idle()) {
            self.check_end();
            self.world.stop(Stop::Finished);
        }
    }

    fn check_end(&self) {
        let owners: Vec<_> = self.parties.iter().filter(|party| !party.owners().0.is_empty()).collect();
        match owners[..] {
            [owner] => {
                for (index, guest) in self.guests.iter().enumerate() {
                    if let Some(found) = owner.content_of(index) {
                        guest.check(&found);
                    } else {
                        self.world.violated("owner", || format!("volume {index} is nowhere"));
                    }
                }
                if let Some(machine) = &self.machine {
                    machine.check_end(owner.place);
                }
            }
            _ => self.world.violated("owner", || format!("{} hosts own the volumes", owners.len())),
        }
        let ended = |party: &&Rc<Party>| {
            party.journal().acknowledged().migrations.values().all(|m| matches!(m.stage, Stage::Ended(_)))
        };
        if !self.parties.iter().all(|party| ended(&party)) {
            self.world.violated("journal", || "a migration is not ended".to_owned());
        }
    }

    fn unfinished(&self) -> String {
        let parties: Vec<_> = self.parties.iter().map(|party| party.describe()).collect();
        let guests: Vec<_> =
            self.guests.iter().filter(|guest| !guest.is_idle()).map(|guest| guest.waits_for()).collect();
        format!("{}; {}", parties.join("; "), guests.join("; "))
    }

    /// Takes apart what holds each other.
    fn clear(&self) {
        self.parties.iter().for_each(|party| party.clear());
        self.lines.iter().for_each(|line| line.clear());
        self.guests.iter().for_each(|guest| guest.disconnect());
    }
}

/// The phases in which the hosts talk.
const HANDOVER: [Phase; 6] = [
    Phase::Closing,
    Phase::Preparing,
    Phase::Releasing,
    Phase::Committing,
    Phase::Retiring,
    Phase::Discarding,
];

/// With a machine, some of what would happen while the gates close happens while its memory is copied.
fn with_memory(phase: Phase) -> Phase {
    if phase == Phase::Closing { Phase::Memory } else { phase }
}

/// What one host's executor parks on: it only says that it has nothing to do.
pub(crate) struct PairDriver {
    clock: Rc<Clock>,
    /// Set by a park that would wait: until when.
    idle: Option<Option<Duration>>,
}

struct Nobody;

impl PairDriver {
    fn new(clock: &Rc<Clock>) -> Self {
        Self { clock: Rc::clone(clock), idle: None }
    }
}

impl Driver for PairDriver {
    fn now(&self) -> Duration {
        self.clock.now()
    }

    fn park(&mut self, deadline: Option<Duration>) {
        if deadline.is_none_or(|deadline| deadline > self.clock.now()) {
            self.idle = Some(deadline);
        }
    }

    fn unparker(&self) -> std::sync::Arc<dyn Unpark> {
        std::sync::Arc::new(Nobody)
    }
}

impl Unpark for Nobody {
    fn unpark(&self) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenario::Hosts;

    const OPTIONS: Options = Options { operations: 200, hosts: Hosts::Two };

    #[test]
    fn a_hundred_seeds_of_two_hosts_break_no_rule() {
        for seed in 0..100 {
            let finding = simulate(seed, &OPTIONS, Audience::Nobody);
            assert_eq!(finding.violation, None, "seed {seed}");
        }
    }

    #[test]
    fn a_seed_of_two_hosts_gives_the_same_trace_every_time() {
        for seed in 0..10 {
            let hashes = [0, 1].map(|_| simulate(seed, &OPTIONS, Audience::Nobody).hash);
            assert_eq!(hashes[0], hashes[1], "seed {seed}");
        }
    }
}
