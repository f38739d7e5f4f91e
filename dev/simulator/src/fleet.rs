//! One or several hosts: the product's lanes on either side of links that lose, delay and reorder messages. Each host has a
//! journal, clocks and a daemon that crashes. Volumes tour the hosts.
//!
//! ```text
//!   guests ──► volume (gate, align, tracker, mirror) ──► disks             disks ◄── volume (gate closed)
//!                │ a host: lanes, SourceDriver     another: lanes, TargetDriver │
//!                └───── PeerStore, messages ═══ link: late, out of order, broken ═══ Service
//!
//!   A ──► B ──► A ──► C ──► B …      operators: begin migrations, promote, move guests after their volumes
//! ```
//! Each host has its own executor and clocks. A daemon's tasks die with it; disks, journals, kept images and guests stay. Guests
//! stay at their host, follow their volumes, or go to any host that forwards to the owner. They leave unanswered requests behind.

mod alone;
mod attaching;
mod branch;
mod chronicles;
mod clock;
mod cold;
mod control;
mod faults;
mod filling;
mod hooks;
mod host;
mod incoming;
mod kept;
mod lanes;
mod line;
mod link;
mod listener;
mod local;
mod neighbours;
mod operators;
mod orders;
mod outgoing;
mod place;
mod planned_volume;
mod promised;
mod rogue;
mod serving;
mod session;
mod stopping;
mod taking_back;
pub(crate) mod tally;
mod vm;
mod vm_note;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use block::Executor;
use migration::journal::Stage;

use self::attaching::Attachments;
use self::branch::{Branch, Branches, TRUNK};
use self::clock::{HostClock, HostDriver};
use self::host::SimHost;
use self::link::Link;
use self::neighbours::Neighbours;
use self::operators::Operators;
use self::orders::Administrators;
use self::place::Place;
use self::tally::{Event, Tally};
use self::vm::SimVm;
use self::vm_note::VmNote;
use crate::coverage::{Given, Struck};
use crate::disk::Medium;
use crate::random::Random;
use crate::scenario::{Options, Scenario};
use crate::simulation::Finding;
use crate::trace::{Audience, Trace};
use crate::world::{Stop, World};

/// The time limit of a simulation: links that are cut for ever are mended in the end.
const TIME_MAX: Duration = Duration::from_secs(3600);
const STEPS_MAX: u64 = 5_000_000;
/// The limit of an executor's turns at one instant: beyond it a task wakes itself for ever.
const TURNS_MAX: u32 = 20_000;
const DOWN_MAX: Duration = Duration::from_secs(2);

/// The random stream that draws which starts are struck.
const RECOVERIES_STREAM: u64 = 0x4EC0_7E41;
/// The random stream that draws faults around orders, and of a target that lacks blocks.
const ORDERS_STREAM: u64 = 0x0D3E_5500;

pub(crate) struct Fleet {
    pub(crate) world: Rc<World>,
    random: RefCell<Random>,
    hosts: Vec<Rc<SimHost>>,
    links: Vec<Rc<Link>>,
    branches: Branches,
    operators: Operators,
    administrators: Administrators,
    /// How many daemons are still to be killed soon after they have durably forgotten a copy.
    kills_after_forgetting: Cell<u32>,
    neighbours: Neighbours,
    attachments: Attachments,
    vm: Option<Rc<SimVm>>,
    crashes: RefCell<Vec<(Place, Stop)>>,
    recoveries: RefCell<Random>,
    /// Draws faults around orders of administrators, and of a target that lacks blocks.
    orders: RefCell<Random>,
    recoveries_hit: Cell<u64>,
    tally: RefCell<Tally>,
}

pub(crate) fn simulate(seed: u64, options: &Options, audience: Audience) -> Finding {
    let hosts = options.hosts;
    let mut random = Random::new(seed ^ 0x5EED_0F70_B057_5000);
    let world = World::new(&mut random, Trace::new(audience));
    let mut scenario = Scenario::draw(&mut random, options);
    scenario.draw_rounds(seed, options.rounds);
    let clocks: Vec<_> =
        Place::all(usize::from(hosts)).map(|_| HostClock::draw(&world.clock, &mut random)).collect();
    let mut executors: Vec<_> = clocks.iter().map(|clock| Executor::new(HostDriver::new(clock))).collect();
    let around = executors.iter().map(Executor::handle).zip(clocks).collect();
    let vm = if hosts > 1 { SimVm::draw(&world, seed) } else { None };
    let fleet = Fleet::new(&world, (seed, &mut random), &scenario, around, vm);
    fleet.begin(&scenario);
    fleet.draw_seldom_faults(seed);
    loop {
        let mut deadline: Option<Duration> = None;
        for executor in &mut executors {
            match rest(executor, &world) {
                Ok(next) => deadline = [deadline, next].into_iter().flatten().min(),
                Err(why) => world.violated("patience", || format!("{why}: {}", fleet.unfinished())),
            }
        }
        let crashes = std::mem::take(&mut *fleet.crashes.borrow_mut());
        for (place, how) in crashes {
            if fleet.host(place).is_up() {
                executors[place.index()].drop_tasks();
                fleet.crashed(place, how);
            }
        }
        if let Some((Stop::Finished | Stop::Violated, _)) = world.take_stop() {
            break;
        }
        world.clock.step(deadline);
        if world.clock.is_dead() || world.now() > TIME_MAX || world.clock.steps() > STEPS_MAX {
            world.violated("patience", || format!("it does not end: {}", fleet.unfinished()));
            break;
        }
    }
    executors.iter_mut().for_each(Executor::drop_tasks);
    world.clock.clear();
    fleet.clear();
    fleet.finding()
}

fn rest(executor: &mut Executor<HostDriver>, world: &World) -> Result<Option<Duration>, &'static str> {
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

impl Fleet {
    fn new(
        world: &Rc<World>,
        (seed, random): (u64, &mut Random),
        scenario: &Scenario,
        around: Vec<(block::Handle, Rc<HostClock>)>,
        vm: Option<Rc<SimVm>>,
    ) -> Rc<Self> {
        let count = around.len();
        let host::Beginnings { hosts, guests, links } = host::make(world, random, scenario, around);
        let branches = Branches::default();
        branches.open(guests, Place::A);
        let operators =
            Operators::draw(random, seed, (count, scenario.migrations.len() as u32), vm.is_some());
        let neighbours = match vm {
            None => Neighbours::draw(random, seed, scenario.volumes.iter().map(|plan| plan.disk.size_bytes)),
            // A VM stops before its disks change hands, so they would have to as well.
            Some(_) => Neighbours::none(random, seed),
        };
        let fleet = Rc::new(Self {
            world: Rc::clone(world),
            random: RefCell::new(random.fork()),
            hosts,
            links,
            branches,
            operators,
            administrators: Administrators::draw(seed),
            kills_after_forgetting: Cell::default(),
            neighbours,
            attachments: Attachments::draw(seed, count),
            vm,
            crashes: RefCell::default(),
            recoveries: RefCell::new(Random::new(seed ^ RECOVERIES_STREAM)),
            orders: RefCell::new(Random::new(seed ^ ORDERS_STREAM)),
            recoveries_hit: Cell::default(),
            tally: RefCell::default(),
        });
        fleet.hosts.iter().for_each(|host| host.join(&fleet));
        if fleet.vm.is_some() {
            fleet.host(Place::A).vm_note.set(VmNote::Home);
        }
        fleet
    }

    fn begin(self: &Rc<Self>, scenario: &Scenario) {
        if self.is_alone() {
            self.plan_faults(scenario);
            self.draw_stops(&mut self.random.borrow_mut());
        } else {
            self.draw_faults();
        }
        self.hosts.iter().for_each(|host| host.boot());
        self.look_later();
    }

    fn host(&self, place: Place) -> &Rc<SimHost> {
        &self.hosts[place.index()]
    }

    fn link(&self, one: Place, other: Place) -> Option<&Rc<Link>> {
        self.links.iter().find(|link| link.connects(one, other))
    }

    fn tally(&self, event: Event) {
        self.world.say(|| format!("{event:?}"));
        self.tally.borrow_mut().add(event);
    }

    fn crash(&self, place: Place, how: Stop) {
        self.crashes.borrow_mut().push((place, how));
    }

    fn crashed(self: &Rc<Self>, place: Place, how: Stop) {
        let host = self.host(place);
        let how = if how == Stop::PowerCut && !self.may_lose_power(place) { Stop::Kill } else { how };
        self.world.note("crash", place.index() as u64, how as u64);
        self.world.say(|| format!("{place}: {how:?}"));
        let was_source = host.phase().is_some();
        if self.branches.all().len() > 1 {
            self.tally(Event::BranchKill);
        }
        self.keep_what_nobody_was_told_of(host);
        host.crashed(how);
        self.neighbours.crashed(place);
        if was_source {
            self.world.set_phase(None);
        }
        for branch in self.branches.all().iter().filter(|branch| branch.home() == place) {
            if how == Stop::PowerCut {
                branch.power_was_cut.set(true);
                self.tally(Event::OwnerPowerCut);
            }
            for guest in &branch.guests {
                if how == Stop::PowerCut { guest.power_cut() } else { guest.disconnect() }
            }
        }
        let down = {
            // Often so short that the dead daemon's requests are still in flight.
            let mut random = self.random.borrow_mut();
            let longest = random.pick(&[Duration::from_micros(300), Duration::from_millis(5), DOWN_MAX]);
            random.duration(Duration::from_micros(10), longest)
        };
        let me = Rc::downgrade(self);
        self.world.clock.after(down, move || {
            if let Some(fleet) = me.upgrade() {
                fleet.host(place).boot();
                fleet.perhaps_crash_while_recovering(place);
            }
        });
    }

    /// Makes lost data durable after all. A daemon that is killed between a failed flush and its answer takes the knowledge of
    /// the loss with it (`docs/failure-model.md`), so nothing may be lost then. The same holds for released data: it is compared
    /// with the target's, which guests have seen.
    fn keep_what_nobody_was_told_of(&self, host: &SimHost) {
        if host.may_have_released() {
            host.images.borrow().values().for_each(|disk| disk.with_medium(Medium::keep_lost));
        }
        for branch in self.branches.all().iter().filter(|branch| host.may_own(branch.number)) {
            for (index, guest) in branch.guests.iter().enumerate() {
                let Some((disk, vouches)) = host.own_disk(index) else { continue };
                let Some(lost_at) = disk.lost_at() else { continue };
                let is_told = guest.told_of_loss_at().is_some_and(|told_at| told_at >= lost_at);
                if vouches || !is_told {
                    disk.with_medium(Medium::keep_lost);
                }
            }
        }
    }

    /// Returns whether a host may lose power. Power cuts lose answered but unflushed data, even of clients at other hosts that
    /// live on; that is not simulated. So power is cut only while no guest at another host can notice.
    fn may_lose_power(&self, place: Place) -> bool {
        self.branches.all().iter().all(|branch| {
            let mut owners = self.hosts.iter().filter(|host| host.may_own(branch.number));
            match branch.home() == place {
                true => owners.all(|host| host.place == place),
                false => !self.host(place).may_own(branch.number),
            }
        })
    }

    /// Checks that at most one host has a volume in its journal, with or without commits in flight.
    fn journal_changed(self: &Rc<Self>, changed: &SimHost) {
        self.see_promotion(changed);
        let (here, perhaps_here) = changed.owners();
        for other in self.hosts.iter().filter(|other| other.place != changed.place) {
            let (there, perhaps_there) = other.owners();
            // A volume that one certainly owns must not possibly be the other's.
            for (certain, possible) in [(&here, &perhaps_there), (&there, &perhaps_here)] {
                if let Some((branch, volume)) = certain.intersection(possible).next() {
                    let (one, two) = (changed.place, other.place);
                    let detail = || format!("{one} and {two} own volume {volume} of branch {branch}");
                    self.world.violated("owner", detail);
                }
            }
        }
        self.hosts.iter().for_each(|host| host.check_released());
        for branch in self.branches.all() {
            self.excuse(&branch);
        }
    }

    /// Excuses waits past the commit point, and at other hosts: requests then take as long as the links do.
    fn excuse(&self, branch: &Branch) {
        let now = self.world.now();
        let mut excuses = self.world.excuses.borrow_mut();
        // The time for missing blocks is not the owner's fault either.
        let lacks = |host: &&Rc<SimHost>| host.journal().look(|state, _| !state.fillings.is_empty());
        let is_whole = !self.hosts.iter().any(|host| lacks(&host));
        match self.host(branch.home()).owns(branch.number) && is_whole {
            true => excuses.end(branch.number, now),
            false => excuses.begin(branch.number, now),
        }
    }

    fn content_of(&self, branch: usize, index: usize) -> Option<Vec<u64>> {
        let owner = self.hosts.iter().find(|host| host.owns(branch))?;
        owner.content_of(index)
    }

    /// Returns a volume's content at its last release, while it has no owner.
    fn left_content(&self, index: usize) -> Option<Vec<u64>> {
        let left = self.hosts.iter().filter_map(|host| host.left_content(index));
        left.max_by_key(|(generation, _)| *generation).map(|(_, content)| content)
    }

    fn check_end(&self) {
        for branch in self.branches.all() {
            let owns = |host: &&Rc<SimHost>| host.owners().0.iter().any(|(of, _)| *of == branch.number);
            let owners: Vec<_> = self.hosts.iter().filter(owns).collect();
            let [owner] = owners[..] else {
                let places: Vec<_> = owners.iter().map(|host| host.place).collect();
                let detail = || format!("branch {} is owned by {places:?}", branch.number);
                self.world.violated("owner", detail);
                continue;
            };
            for (index, guest) in branch.guests.iter().enumerate() {
                match owner.content_of(index) {
                    Some(found) => guest.check(&found),
                    None => self.world.violated("owner", || format!("volume {index} is nowhere")),
                }
            }
            if let Some(vm) = self.vm.as_ref().filter(|_| branch.number == TRUNK) {
                vm.check_end(owner.place);
                self.hosts.iter().for_each(|host| host.check_vm_note(owner.place));
            }
        }
        let ended = |host: &&Rc<SimHost>| {
            host.journal().look(|state, _| {
                state.migrations.values().all(|migration| matches!(migration.stage, Stage::Ended(_)))
            })
        };
        if !self.hosts.iter().all(|host| ended(&host)) {
            self.world.violated("journal", || "a migration is not ended".to_owned());
        }
    }

    fn finding(&self) -> Finding {
        let branches = self.branches.all();
        let guests = branches.iter().flat_map(|branch| &branch.guests);
        let mut tally = *self.tally.borrow();
        guests.clone().filter(|guest| guest.was_late()).for_each(|_| tally.add(Event::LateRead));
        // With two branches there may be two migrations at once, and the phase is ambiguous.
        let is_clear = tally.count(Event::Branch) == 0;
        Finding {
            violation: self.world.violation(),
            operations: guests.map(|guest| u64::from(guest.answered())).sum(),
            recoveries_hit: self.recoveries_hit.get(),
            struck: if is_clear { self.world.struck.borrow().clone() } else { Struck::default() },
            given: if is_clear { self.world.given.borrow().clone() } else { Given::default() },
            tally,
            hash: self.world.trace.hash(),
        }
    }

    fn unfinished(&self) -> String {
        let hosts: Vec<_> = self.hosts.iter().map(|host| host.describe()).collect();
        let branches = self.branches.all();
        let guests = branches.iter().flat_map(|branch| &branch.guests);
        let guests: Vec<_> = guests.filter(|guest| !guest.is_idle()).map(|guest| guest.waits_for()).collect();
        format!("{}; {}", hosts.join("; "), guests.join("; "))
    }

    fn clear(&self) {
        self.hosts.iter().for_each(|host| host.clear());
        self.links.iter().for_each(|link| link.clear());
        for branch in self.branches.all() {
            branch.guests.iter().for_each(|guest| guest.disconnect());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenario::Rounds;

    fn options(hosts: u8) -> Options {
        Options { operations: 200, hosts, rounds: Rounds::Drawn }
    }

    #[test]
    fn a_hundred_seeds_of_two_hosts_and_of_three_break_no_rule() {
        for hosts in [2, 3] {
            for seed in 0..100 {
                let finding = simulate(seed, &options(hosts), Audience::Nobody);
                assert_eq!(finding.violation, None, "{hosts} hosts, seed {seed}");
            }
        }
    }

    #[test]
    fn a_seed_of_several_hosts_gives_the_same_trace_every_time() {
        for seed in 0..10 {
            let hashes = [0, 1].map(|_| simulate(seed, &options(3), Audience::Nobody).hash);
            assert_eq!(hashes[0], hashes[1], "seed {seed}");
        }
    }

    #[test]
    fn a_source_that_was_away_hears_that_its_volumes_are_there_though_others_have_come_back_since() {
        for seed in [44137, 45819, 48732, 63428, 80750, 85319, 88843] {
            let finding = simulate(seed, &options(3), Audience::Nobody);
            assert_eq!(finding.violation, None, "seed {seed}");
        }
    }
}
