//! The operators: they begin migrations, move guests after their volumes, and promote volumes whose source is out of reach.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use chronicle::{BranchId, Generation};
use lane::{Promoted, TargetHandle};
use migration::journal::{MigrationState, Outcome, Promotion, Record, Side, Stage, State};
use migration::promotion::{Waits, promotable, waiting};
use migration::recovery::next_of_incoming;
use migration::ticket::Ticket;
use migration::{MigrationId, Phase, VolumeId};

use super::Fleet;
use super::branch::{Branch, TRUNK};
use super::host::SimHost;
use super::link::Subject;
use super::place::Place;
use super::tally::Event;
use crate::random::Random;
use crate::world::Stop;

/// The pause between two looks at what is left to do; the second when only slow work is left.
const LOOK: Duration = Duration::from_millis(2);
const LOOK_LATER: Duration = Duration::from_millis(25);
const LATER: Duration = Duration::from_secs(8);
/// The percentage of looks at which a possible action is taken.
const BEGINS_PERCENT: [u64; 3] = [30, 30, 4];
/// The percentage of looks at which incomplete volumes are sent back.
const GOES_BACK_PERCENT: u64 = 4;
const PROMOTES_PERCENT: [u64; 3] = [4, 4, 40];
/// Between hosts: the number of migrations to another store of the same host …
const WITHIN: [u32; 5] = [0, 0, 0, 1, 3];
/// … and the percentage in which the next one is such a migration.
const WITHIN_PERCENT: u64 = 40;
const WITHIN_STREAM: u64 = 0x0057_04E5;
/// The percentage of starts at which a complete copy with an unreachable source is promoted at once.
const PROMOTES_AT_START_PERCENT: u64 = 30;

pub(super) struct Operators {
    migrations_left: Cell<u32>,
    begins_percent: u64,
    follow_percent: u64,
    wander_percent: u64,
    promotes_percent: u64,
    may_force: bool,
    within_left: Cell<u32>,
    /// Draws whether the next one is such a migration; separate, so that other simulations stay as they are.
    within: RefCell<Random>,
    /// Guests make no more requests: the end is near.
    is_settling: Cell<bool>,
    /// A single host's daemon was started to check the durable state.
    pub(super) is_last_start: Cell<bool>,
}

impl Operators {
    pub(super) fn draw(random: &mut Random, seed: u64, (hosts, planned): (usize, u32), has_vm: bool) -> Self {
        let mut within = Random::new(seed ^ WITHIN_STREAM);
        // A VM has one source and one target; forced promotions with VMs are not simulated.
        let may_force = random.percent(if hosts > 2 { 40 } else { 10 }) && !has_vm && hosts > 1;
        let migrations: &[u32] = match (hosts, may_force) {
            (1, _) => &[0],
            (2, _) => &[1, 1, 2, 3, 4],
            (_, false) => &[1, 2, 3, 4, 6, 8],
            (_, true) => &[4, 6, 9, 12],
        };
        Self {
            migrations_left: Cell::new(random.pick(migrations)),
            begins_percent: random.pick(&BEGINS_PERCENT),
            follow_percent: random.pick(&[0, 30, 70]),
            // One host at a time runs a VM; and guests of the source must not reach a forced copy.
            wander_percent: if has_vm || may_force { 0 } else { random.pick(&[0, 0, 1, 5, 20]) },
            promotes_percent: random.pick(&PROMOTES_PERCENT),
            may_force,
            within_left: Cell::new(if hosts > 1 { within.pick(&WITHIN) } else { planned }),
            within: RefCell::new(within),
            is_settling: Cell::default(),
            is_last_start: Cell::default(),
        }
    }

    fn are_left(&self) -> bool {
        self.migrations_left.get() + self.within_left.get() > 0
    }

    fn take_one_within(&self) -> bool {
        let left = self.within_left.get();
        let is_next =
            left > 0 && (self.migrations_left.get() == 0 || self.within.borrow_mut().percent(WITHIN_PERCENT));
        if is_next {
            self.within_left.set(left - 1);
        }
        is_next
    }

    pub(super) fn may_force(&self) -> bool {
        self.may_force
    }
}

impl Fleet {
    /// Checks from time to time what can be done, and whether all has ended.
    pub(super) fn look_later(self: &Rc<Self>) {
        let me = Rc::downgrade(self);
        let pause = if self.world.now() < LATER { LOOK } else { LOOK_LATER };
        self.world.clock.after(pause, move || {
            if let Some(fleet) = me.upgrade() {
                fleet.look();
                fleet.look_later();
            }
        });
    }

    fn look(self: &Rc<Self>) {
        self.hosts.iter().for_each(|host| self.perhaps_promote(host));
        self.hosts.iter().for_each(|host| self.perhaps_end_lanes(host));
        self.neighbours.look(self);
        let branches = self.branches.all();
        if let [branch] = &branches[..] {
            self.perhaps_go_rogue();
            self.perhaps_attach();
            self.perhaps_wander(branch);
        }
        branches.iter().for_each(|branch| self.see_to(branch, &branches));
        let is_idle = self.hosts.iter().all(|host| host.is_up() && host.has_nothing_to_do());
        let mut guests = branches.iter().flat_map(|branch| &branch.guests);
        let are_done = guests.all(|guest| guest.has_done_its_work());
        if !is_idle || !are_done || self.operators.are_left() {
            return;
        }
        if !self.operators.is_settling.replace(true) {
            branches.iter().flat_map(|branch| &branch.guests).for_each(|guest| guest.be_quiet());
        }
        if branches.iter().all(|branch| branch.is_idle()) && self.has_started_a_last_time() {
            self.check_end();
            self.world.stop(Stop::Finished);
        }
    }

    /// Handles a branch whose volumes are at rest: they, or its guests, move.
    fn see_to(self: &Rc<Self>, branch: &Branch, branches: &[Rc<Branch>]) {
        let Some(owner) = self.hosts.iter().find(|host| host.owns(branch.number)) else { return };
        self.perhaps_go_back(branch, owner);
        if !owner.is_up() || !owner.has_nothing_to_do() || self.attachments.are_changing() {
            return;
        }
        if branch.goes.get().is_some() {
            self.move_home(branch, owner);
            return;
        }
        let (mut random, is_away) = (self.random.borrow_mut(), branch.home() != owner.place);
        if branch.seen_at.replace(Some(owner.place)) != Some(owner.place) {
            drop(random);
            self.tally_arrival(branch, owner.place);
            random = self.random.borrow_mut();
            // Guests of one branch must not reach the volumes of the other one.
            if is_away && (branches.len() > 1 || random.percent(self.operators.follow_percent)) {
                self.begin_to_follow(branch, owner.place);
                return;
            }
        }
        if !self.operators.are_left() || !random.percent(self.operators.begins_percent) {
            return;
        }
        if is_away && branches.len() > 1 {
            self.begin_to_follow(branch, owner.place);
            return;
        }
        if self.operators.take_one_within() {
            drop(random);
            owner.begin_local();
            return;
        }
        let fits = |host: &&Rc<SimHost>| {
            host.place != owner.place
                && host.owners().1.is_empty()
                && host.journal().look(|state, _| state.unfinished().next().is_none())
                && self.may_come(branch.number, host.place)
        };
        let targets: Vec<_> = self.hosts.iter().filter(fits).map(|host| host.place).collect();
        if targets.is_empty() {
            if branches.len() >= self.hosts.len() {
                // Each host has a branch, so no volume can move.
                self.operators.migrations_left.set(0);
            }
            return;
        }
        let target = random.pick(&targets);
        drop(random);
        self.operators.migrations_left.set(self.operators.migrations_left.get() - 1);
        if let Some(vm) = self.vm.as_ref().filter(|_| branch.number == TRUNK) {
            vm.settle(owner.place);
        }
        owner.begin_migration(target);
    }

    fn perhaps_go_back(&self, branch: &Branch, owner: &Rc<SimHost>) {
        // With two branches, one would wait for ever for blocks that the other has overwritten.
        let may = owner.is_up() && !self.operators.may_force() && branch.goes.get().is_none();
        let left = self.operators.migrations_left.get();
        let may = may && !self.attachments.are_changing();
        let Some(target) = owner.may_go_back_to().filter(|_| may && left > 0) else { return };
        if !self.hears(owner, target) || !self.random.borrow_mut().percent(GOES_BACK_PERCENT) {
            return;
        }
        self.operators.migrations_left.set(left - 1);
        self.tally(Event::GoesBack);
        if let Some(vm) = &self.vm {
            self.tally(Event::GoesBackWithVm);
            vm.settle(owner.place);
        }
        owner.begin_migration(target);
    }

    /// Returns whether volumes of a branch may come to a host: guests of another branch must not reach them.
    pub(super) fn may_come(&self, number: usize, place: Place) -> bool {
        self.branches.all().iter().filter(|other| other.number != number).all(|other| {
            other.home() != place && self.host(other.home()).owns(other.number) && other.goes.get().is_none()
        })
    }

    fn tally_arrival(self: &Rc<Self>, branch: &Branch, place: Place) {
        branch.arrivals.set(branch.arrivals.get() + 1);
        if branch.arrivals.get() > 1 {
            self.tally(Event::Handover);
            self.draw_stop_after_arrival();
        }
        if branch.arrivals.get() > 3 {
            self.tally(Event::Tour);
        }
        if !branch.been_at.borrow_mut().insert(place) {
            self.tally(Event::Return);
        }
        if self.branches.all().len() > 1 && branch.arrivals.get() > 1 {
            self.tally(Event::BranchMoves);
        }
    }

    fn begin_to_follow(&self, branch: &Branch, place: Place) {
        branch.goes.set(Some(place));
        branch.guests.iter().for_each(|guest| guest.be_quiet());
    }

    fn move_home(&self, branch: &Branch, owner: &SimHost) {
        if !branch.is_idle() {
            return;
        }
        branch.goes.set(None);
        branch.move_home(owner.place);
        self.tally(Event::HomeMoves);
        let power_was_cut = branch.power_was_cut.take();
        for (index, guest) in branch.guests.iter().enumerate() {
            guest.disconnect();
            if let Some(found) = owner.content_of(index).filter(|_| power_was_cut) {
                // The host that it was connected to is still down.
                guest.check_after_power_cut(&found);
            }
            if !self.operators.is_settling.get() {
                guest.be_busy();
            }
        }
        self.excuse(branch);
        owner.connect(branch);
    }

    fn perhaps_wander(&self, branch: &Branch) {
        let mut random = self.random.borrow_mut();
        if self.operators.wander_percent == 0 || !random.percent(self.operators.wander_percent) {
            return;
        }
        let fits = |host: &&Rc<SimHost>| host.place != branch.home() && host.welcomes_clients();
        let targets: Vec<_> = self.hosts.iter().filter(fits).collect();
        // A host takes no clients while its attachment ends.
        let is_changing = self.attachments.are_changing();
        if targets.is_empty() || branch.goes.get().is_some() || branch.power_was_cut.get() || is_changing {
            return;
        }
        let target = random.pick(&targets);
        drop(random);
        self.tally(Event::Wander);
        self.world.say(|| format!("guests go from {} to {}", branch.home(), target.place));
        branch.guests.iter().for_each(|guest| guest.disconnect());
        branch.move_home(target.place);
        self.excuse(branch);
        target.connect(branch);
    }
}

impl SimHost {
    /// Lets operators promote copies before any lane waits; returns the migrations that continue, unless the journal failed.
    pub(super) async fn promote_before_serving(
        self: &Rc<Self>,
        resumes: Vec<MigrationId>,
    ) -> Option<Vec<MigrationId>> {
        let mut waiting = Vec::new();
        for migration in resumes {
            match self.fleet().and_then(|fleet| fleet.promotes_at_start(self, migration)) {
                None => waiting.push(migration),
                Some(records) => self.journal().commit(records).await.ok()?,
            }
        }
        Some(waiting)
    }
}

impl Fleet {
    fn perhaps_promote(&self, host: &Rc<SimHost>) {
        let waiting = {
            let serving = host.serving.borrow();
            let target = serving.as_ref().and_then(|serving| serving.target.borrow().clone());
            let Some((Subject::Migration(source, number), driver)) = target else { return };
            host.journal().look(|state, possible| {
                let (id, recorded) = state.incoming(source.host(), number)?;
                let Stage::Prepared(attempt) = recorded.stage else { return None };
                possible.is_empty().then(|| Waiting {
                    source,
                    number,
                    id,
                    attempt,
                    recorded: recorded.clone(),
                    driver,
                })
            })
        };
        let Some(waiting) = waiting else { return };
        let source = self.host(waiting.source);
        if self.hears(host, source.place)
            || !self.random.borrow_mut().percent(self.operators.promotes_percent)
        {
            return;
        }
        let Some(found) = source.journal().what_is_certain() else { return };
        let stage = found.outgoing(host.place.host(), waiting.number).map(|outgoing| &outgoing.stage);
        match stage {
            Some(Stage::Released(_)) => self.promote_released(host, &waiting, &found),
            Some(Stage::Copying) if self.operators.may_force() && self.branches.all().len() == 1 => {
                // Guests that the target's host forwards would reach the other branch.
                let are_with_source =
                    self.branches.all().iter().all(|branch| branch.home() == waiting.source);
                if cannot_release(source) && are_with_source {
                    self.force(host, &waiting);
                }
            }
            _ => {}
        }
    }

    /// Promotes a copy that was handed back: the daemon first ends its waiting lanes, here by a restart.
    fn perhaps_end_lanes(&self, host: &Rc<SimHost>) {
        if !self.operators.may_force() || !host.is_up() || host.serving.borrow().is_none() {
            return;
        }
        let waits_for = host.journal().look(|state, possible| {
            let (copy, recorded) = waiting(state).find(|(copy, _)| copy.waits == Waits::ForDiscard)?;
            let (peer, _) = recorded.side.peer()?;
            possible.is_empty().then_some((copy.migration, Place::of(peer)))
        });
        let Some((migration, source)) = waits_for else { return };
        if self.hears(host, source) || !self.random.borrow_mut().percent(self.operators.promotes_percent) {
            return;
        }
        self.world.say(|| format!("{}: {migration} was handed back, and is to be promoted", host.place));
        self.crash(host.place, Stop::Kill);
    }

    fn hears(&self, host: &SimHost, other: Place) -> bool {
        self.host(other).is_up() && self.link(other, host.place).is_some_and(|link| link.is_up())
    }

    /// Returns the records of a promotion at a host that was just started, before any lane waits: its source is out of reach, for
    /// all that it knows for ever.
    pub(super) fn promotes_at_start(&self, host: &Rc<SimHost>, id: MigrationId) -> Option<Vec<Record>> {
        let recorded = host.journal().look(|state, _| state.migrations.get(&id).cloned())?;
        let waiting = promotable(id, &recorded).ok()?;
        let Side::Incoming { peer, remote, .. } = &recorded.side else { return None };
        let source = self.host(Place::of(*peer));
        let may_force = self.operators.may_force() && self.branches.all().len() == 1;
        if self.hears(host, source.place)
            || !may_force
            || !self.random.borrow_mut().percent(PROMOTES_AT_START_PERCENT)
        {
            return None;
        }
        let found = source.journal().what_is_certain()?;
        let stage = found.outgoing(host.place.host(), *remote).map(|outgoing| &outgoing.stage)?;
        let are_with_source = self.branches.all().iter().all(|branch| branch.home() == source.place);
        let fits = match stage {
            // A source that knows of the hand-back continues with the volumes as soon as its journal says so.
            Stage::Released(_) => source.phase() != Some(Phase::TakingBack),
            Stage::Copying => cannot_release(source) && are_with_source,
            Stage::HandedBack | Stage::Ended(Outcome::HandedBack { .. }) => are_with_source,
            _ => false,
        };
        if !fits {
            return None;
        }
        self.world.say(|| format!("{}: force {id} before anything waits for it", host.place));
        if waiting.waits == Waits::ForDiscard {
            self.tally(Event::HandedBackPromoted);
        }
        Some(waiting.records(self.branching(&waiting.generations)))
    }

    fn branching(&self, generations: &[(VolumeId, Generation)]) -> Promotion {
        let branches = generations.iter().map(|(volume, _)| {
            let mut name = [0; 16];
            name[..8].copy_from_slice(&self.random.borrow_mut().next().to_le_bytes());
            (*volume, BranchId(name))
        });
        Promotion::Force { branches: branches.collect() }
    }

    fn promote_released(&self, host: &SimHost, waiting: &Waiting, found: &State) {
        if self.operators.may_force() && self.random.borrow_mut().percent(50) {
            self.force(host, waiting);
            return;
        }
        let ticket = Ticket::print(found, waiting.source.host(), waiting.number);
        let ticket = ticket.and_then(|ticket| Ticket::parse(&ticket.to_string()));
        let redeemed = ticket.and_then(|ticket| {
            let redeemed = host
                .journal()
                .look(|state, _| ticket.redeem(state, host.place.host()).map(|(migration, _)| migration))?;
            Ok((ticket, redeemed))
        });
        match redeemed {
            Ok((ticket, id)) if id == waiting.id => {
                self.tally(Event::Ticket);
                let (attempt, generations) = (ticket.attempt, ticket.generations);
                waiting.driver.promote(Promoted { attempt, generations, promotion: Promotion::Ticket });
            }
            other => self.world.violated("ticket", || format!("{other:?} for {}", waiting.id)),
        }
    }

    fn force(&self, host: &SimHost, waiting: &Waiting) {
        self.world.say(|| format!("{}: force {}", host.place, waiting.id));
        let generations = next_of_incoming(&waiting.recorded);
        let promotion = self.branching(&generations);
        waiting.driver.promote(Promoted { attempt: waiting.attempt, generations, promotion });
    }

    /// Handles a forced promotion in a host's journal: if its source has not released the volumes, there are two
    /// branches from here on.
    pub(super) fn see_promotion(self: &Rc<Self>, host: &SimHost) {
        let state = host.journal().acknowledged();
        self.see_branches_end(host, &state);
        let forced = state.migrations.iter().rev().find(|(id, migration)| {
            matches!(migration.promotion, Some(Promotion::Force { .. }))
                && matches!(migration.stage, Stage::Owned(_) | Stage::Ended(Outcome::Moved { .. }))
                && !host.forced.borrow().contains_key(id)
        });
        let Some((id, recorded)) = forced else { return };
        let Side::Incoming { peer, remote, .. } = &recorded.side else { return };
        let source = self.host(Place::of(*peer));
        let released = source.journal().what_is_certain().is_some_and(|found| {
            let outgoing = found.outgoing(host.place.host(), *remote);
            outgoing.is_some_and(|outgoing| {
                matches!(outgoing.stage, Stage::Released(_) | Stage::Ended(Outcome::Moved { .. }))
            })
        });
        if released {
            self.tally(Event::ForceInstead);
            host.forced.borrow_mut().insert(*id, host.branch.get());
            return;
        }
        self.tally(Event::Branch);
        let found = host.content_at(recorded, |moving| &moving.target);
        if host.promised(*id).is_none_or(|promised| promised != found) {
            let detail = || format!("what {} promised of {id} is not what was promoted", host.place);
            self.world.violated("content", detail);
        }
        let Some(former) = self.branches.get(host.branch.get()) else { return };
        let mut random = self.random.borrow_mut();
        let guests = former.guests.iter().zip(&found);
        let guests = guests.map(|(guest, found)| guest.begin_anew(random.fork(), found)).collect();
        drop(random);
        let number = self.branches.open(guests, host.place);
        host.forced.borrow_mut().insert(*id, number);
        let (me, place) = (Rc::downgrade(self), host.place);
        // Deferred, because this is called from within the journal.
        self.world.clock.after(Duration::ZERO, move || {
            let Some(fleet) = me.upgrade() else { return };
            let host = fleet.host(place);
            let branch = fleet.branches.all().into_iter().find(|branch| branch.number == number);
            if let Some(branch) = branch.filter(|_| host.serving.borrow().is_some()) {
                host.connect(&branch);
            }
        });
    }
}

impl Fleet {
    /// Ends the branch of a forced copy that does not answer and is handed back: it has never begun.
    fn see_branches_end(&self, host: &SimHost, state: &State) {
        host.forced.borrow_mut().retain(|id, number| {
            let stage = state.migrations.get(id).map(|migration| &migration.stage);
            let is_over = matches!(stage, Some(Stage::HandedBack | Stage::Ended(Outcome::HandedBack { .. })));
            if let Some(branch) = self.branches.get(*number).filter(|_| is_over && *number != TRUNK) {
                branch.end();
            }
            // It may be promoted once more.
            !is_over
        });
    }
}

/// Returns whether an unreleased source cannot release by the promise that it has: it is down, or has aborted the attempt. It may
/// continue with the volumes.
fn cannot_release(source: &SimHost) -> bool {
    !source.is_up() || matches!(source.phase(), Some(Phase::Copying | Phase::Discarding))
}

struct Waiting {
    source: Place,
    number: MigrationId,
    id: MigrationId,
    attempt: migration::Attempt,
    recorded: MigrationState,
    driver: TargetHandle,
}
