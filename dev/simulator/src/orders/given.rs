//! The orders of administrators, carried out as a daemon does, by the product's decisions; and what their answers must be.

use chronicle::{BranchId, Generation};
use migration::journal::{Entry, ImageLocation, MigratingVolume, Promotion, Record, Side, Stage};
use migration::orders;
use migration::promotion::{self, LeftImages, NotPromotable, Removal, Waits};
use migration::restoration::{Knowledge, knowledge};
use migration::source::SourceEvent;
use migration::target::TargetEvent;
use migration::ticket::Ticket;
use migration::{MigrationId, Phase, Source, Target, VolumeId};

use super::host::{FIRST, NAME, VOLUME, comes, leaves};
use super::world::World;

/// The percentage of migrations that leave blocks behind.
const HOLLOW: u64 = 50;
/// The percentage of orders to remove a volume that is whole and served that are given: they end the simulation of it.
const REMOVED: u64 = 10;
/// The percentage of orders to give up blocks of a host that answers, which come with --force.
const FORCED: u64 = 40;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    Migrate,
    Cancel,
    CancelThere,
    Ticket,
    Force,
    TakeBack,
    GiveUp,
    Remove,
    Forget,
    RemoveHost,
}

impl Order {
    pub(crate) const ALL: [Self; 10] = [
        Self::Migrate,
        Self::Cancel,
        Self::CancelThere,
        Self::Ticket,
        Self::Force,
        Self::TakeBack,
        Self::GiveUp,
        Self::Remove,
        Self::Forget,
        Self::RemoveHost,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Migrate => "migrate",
            Self::Cancel => "cancel",
            Self::CancelThere => "cancel there",
            Self::Ticket => "promote --ticket",
            Self::Force => "promote --force",
            Self::TakeBack => "take back by force",
            Self::GiveUp => "--without-missing",
            Self::Remove => "remove",
            Self::Forget => "forget where it is",
            Self::RemoveHost => "host remove --force",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    Done,
    Refused,
    /// The daemon has something else to do first.
    NotNow,
}

impl World {
    /// Draws an order to the daemon of a host.
    pub(super) fn order(&mut self, at: usize) {
        let order = self.random.pick(&Order::ALL);
        if self.hosts[at].is_up {
            self.give(at, order);
        }
    }

    pub(super) fn give(&mut self, at: usize, order: Order) -> Answer {
        let (phase, is_hollow) = self.phase();
        let answer = match order {
            Order::Migrate => self.migrate(at),
            Order::Cancel => self.cancel(at, false),
            Order::CancelThere => self.cancel(at, true),
            Order::Ticket => self.redeem(at),
            Order::Force => self.force(at),
            Order::TakeBack => self.take_back(at),
            Order::GiveUp => self.give_up(at),
            Order::Remove => self.remove(at),
            Order::Forget => self.forget(at),
            Order::RemoveHost => self.remove_host(at),
        };
        self.say(|| format!("host {at}: {} in {phase}: {answer:?}", order.name()));
        match answer {
            Answer::Done => self.shown.done += 1,
            Answer::Refused => self.shown.refused += 1,
            Answer::NotNow => return answer,
        }
        self.met.add(order, phase, is_hollow);
        answer
    }

    /// Returns the phase of the migration under way, by its source or its journal; and whether it leaves blocks behind.
    fn phase(&self) -> (Phase, bool) {
        let of = |at: usize| {
            let host = &self.hosts[at];
            let outgoing = |known: &Side| matches!(known, Side::Outgoing { .. });
            let (id, recorded) = host.state.unfinished().filter(|(_, known)| outgoing(&known.side)).last()?;
            let by_journal = match &recorded.stage {
                Stage::Released(_) if self.hosts[1 - at].lacks_blocks() => Phase::Filling,
                Stage::Released(_) => Phase::Committing,
                Stage::HandedBack => Phase::Discarding,
                _ => Phase::Copying,
            };
            let driven = host.source.as_ref().filter(|(driven, _)| *driven == id);
            let phase = driven.map_or(by_journal, |(_, source)| source.phase());
            Some((phase, self.is_hollow.get(&(at, id)) == Some(&true)))
        };
        // Of two, the volume is coming back.
        let phases = [of(0), of(1)].into_iter().flatten();
        let phases = phases.filter(|(phase, _)| *phase != Phase::Ended);
        phases.min_by_key(|(phase, _)| *phase == Phase::Filling).unwrap_or((Phase::Ended, false))
    }

    fn hears(&self, at: usize) -> bool {
        self.hosts[1 - at].is_up && self.hears_each_other()
    }

    /// Returns what the other host answers about the volume: nothing if it is silent.
    fn word_of_other(&self, at: usize) -> Option<Option<Knowledge>> {
        let there = &self.hosts[1 - at];
        let known = || {
            let known = knowledge(&there.state, self.hosts[at].id, VOLUME)?;
            Some(if there.cannot_serve() { known.unsure() } else { known })
        };
        self.hears(at).then(known)
    }

    fn migrate(&mut self, at: usize) -> Answer {
        let (host, there) = (&self.hosts[at], &self.hosts[1 - at]);
        let has_migration = |known: &Side| !matches!(known, Side::Outgoing { .. });
        let is_moving = host.source.is_some() || host.target.is_some();
        let comes_here = host.state.unfinished().any(|(_, known)| has_migration(&known.side));
        if !host.serves() || is_moving || comes_here || host.state.unfinished().next().is_some() {
            return Answer::Refused;
        }
        if !self.hears(at) {
            return Answer::NotNow;
        }
        let goes_back = host.state.fillings.get(&VOLUME).map(|filling| filling.remote);
        let is_free = match goes_back {
            Some(left_by) => {
                let reads_here = there.state.reservoir_for(host.id, &[VOLUME]) == Some(left_by);
                reads_here && there.phase() == Some(Phase::Filling) && there.commits.is_empty()
            }
            None => there.state.unfinished().next().is_none() && !there.owns() && there.target.is_none(),
        };
        let given_up = host.state.fillings.get(&VOLUME).is_some_and(|filling| filling.is_given_up);
        if !is_free || given_up || there.source.is_some() && goes_back.is_none() {
            return Answer::Refused;
        }
        self.begin(at, goes_back)
    }

    fn begin(&mut self, at: usize, goes_back: Option<MigrationId>) -> Answer {
        let there = 1 - at;
        self.images_made += 1;
        let Some(volume) = self.hosts[at].state.volumes.get(&VOLUME).map(|known| known.record.clone()) else {
            return Answer::Refused;
        };
        let left = goes_back.and_then(|left| self.hosts[there].state.migrations.get(&left));
        let target = match left {
            Some(left) => left.volumes[0].source.clone(),
            None => ImageLocation::raw_file("b", format!("/{there}/{}", self.images_made)),
        };
        let moving = MigratingVolume { volume: VOLUME, source: volume.image.clone(), target };
        let [id, coming] = [at, there].map(|at| MigrationId(self.hosts[at].state.next_migration));
        self.is_hollow.insert((at, id), goes_back.is_none() && self.random.percent(HOLLOW));
        self.branch_of.insert((at, id), self.hosts[at].branch);
        self.hosts[there].source = None;
        self.commit(at, &[leaves(self.hosts[there].id, &moving, id)]);
        self.commit(there, &[comes((self.hosts[at].id, id), &moving, &volume, coming)]);
        let settings = self.hosts[at].settings(id);
        self.hosts[at].source = settings.map(|settings| (id, Source::new(self.now, settings)));
        let target = Target::between_hosts(coming, 1).of_volumes(vec![VOLUME]);
        self.hosts[there].target = Some((coming, target));
        Answer::Done
    }

    fn cancel(&mut self, at: usize, comes: bool) -> Answer {
        let is_it = |side: &Side| matches!(side, Side::Incoming { .. }) == comes;
        let state = &self.hosts[at].state;
        let Some((id, recorded)) = state.unfinished().filter(|(_, known)| is_it(&known.side)).last() else {
            return Answer::Refused;
        };
        let may = matches!(recorded.stage, Stage::Copying)
            || comes && matches!(recorded.stage, Stage::Discarding(_));
        let records = match orders::cancel(state, id) {
            Err(_) if may => {
                self.violated(|| format!("host {at}: {id} only copies, and is not cancelled"));
                return Answer::Refused;
            }
            Err(_) => return Answer::Refused,
            Ok(records) => records,
        };
        if !self.commit(at, &records) {
            return Answer::Refused;
        }
        self.cancelled.insert((at, id));
        match comes {
            true => self.tell_target(at, id, TargetEvent::Cancel),
            false => self.tell_source(at, id, SourceEvent::Cancel),
        }
        Answer::Done
    }

    /// Redeems the ticket that the other host prints for the migration that comes from there.
    fn redeem(&mut self, at: usize) -> Answer {
        let (host, there) = (&self.hosts[at], &self.hosts[1 - at]);
        let comes = host.state.migrations.iter().rev().find_map(|(id, _)| host.remote_of(*id));
        let Some((_, remote)) = comes else { return Answer::Refused };
        let released = there.state.migrations.get(&remote).map(|known| known.stage.clone());
        let stage = host.state.incoming(there.id, remote).map(|(_, known)| known.stage.clone());
        let fits = matches!((&released, &stage), (Some(Stage::Released(one)), Some(Stage::Prepared(other))) if one == other);
        let ticket = Ticket::print(&there.state, there.id, remote)
            .and_then(|ticket| Ticket::parse(&ticket.to_string()));
        let redeemed = ticket.and_then(|ticket| {
            let (id, _) = ticket.redeem(&host.state, host.id)?;
            Ok((id, ticket))
        });
        let Ok((id, ticket)) = redeemed else {
            if fits {
                self.violated(|| {
                    format!("host {at}: the ticket of {remote} is refused: {released:?}, {stage:?}")
                });
            }
            return Answer::Refused;
        };
        if !fits {
            self.violated(|| format!("host {at}: a ticket of {remote} is redeemed: {released:?}, {stage:?}"));
        }
        let (attempt, generations, promotion) = (ticket.attempt, ticket.generations, Promotion::Ticket);
        self.tell_target(at, id, TargetEvent::Promote { attempt, generations, promotion });
        Answer::Done
    }

    fn force(&mut self, at: usize) -> Answer {
        let host = &self.hosts[at];
        let is_it = |side: &Side| matches!(side, Side::Incoming { .. });
        let Some((id, recorded)) = host.state.unfinished().filter(|(_, known)| is_it(&known.side)).last()
        else {
            return Answer::Refused;
        };
        let expected = match recorded.stage {
            Stage::Copying => Some(NotPromotable::Incomplete),
            Stage::Prepared(attempt)
                if recorded.hollow.as_ref().is_some_and(|hollow| hollow.attempt == attempt) =>
            {
                Some(NotPromotable::Hollow)
            }
            Stage::HandedBack if recorded.hollow.is_some() => Some(NotPromotable::Hollow),
            Stage::Prepared(_) | Stage::HandedBack => None,
            Stage::Owned(_) => Some(NotPromotable::Owned),
            _ => Some(NotPromotable::Over),
        };
        let found = promotion::promotable(id, recorded);
        if found.as_ref().err() != expected.as_ref() {
            self.violated(|| format!("host {at}: {id} may be promoted: {found:?}, and should: {expected:?}"));
        }
        let Ok(waiting) = found else { return Answer::Refused };
        let promotion = branching(&waiting.generations);
        let is_driven = self.hosts[at].target.as_ref().is_some_and(|(driven, _)| *driven == id);
        if waiting.waits == Waits::ForRelease && is_driven {
            let (attempt, generations) = (waiting.attempt, waiting.generations);
            self.tell_target(at, id, TargetEvent::Promote { attempt, generations, promotion });
            return Answer::Done;
        }
        if !self.hosts[at].commits.is_empty() {
            return Answer::NotNow;
        }
        self.hosts[at].target = None;
        self.commit(at, &waiting.records(promotion));
        self.hosts[at].is_open = true;
        Answer::Done
    }

    /// Serves the volume again where it left from, as it was then.
    fn take_back(&mut self, at: usize) -> Answer {
        let host = &self.hosts[at];
        let Some(departed) = promotion::departed_named(&host.state, NAME) else {
            return Answer::Refused;
        };
        let word = self.word_of_other(at);
        let Some(left) = departed.volumes.first() else { return Answer::Refused };
        let path = left.image.place.name().to_owned();
        let kept = host.images.get(&path).copied();
        // The target has everything, so the image is deleted. If that host is then lost before the end is recorded, the order
        // names what somebody has put in its place (`--exchanged`).
        let is_exchanged = kept.is_none() && self.hosts[1 - at].is_lost;
        let image = kept.or(is_exchanged.then_some([None; 2]));
        let Some(image) = image.filter(|_| !promotion::is_owned_there(word)) else { return Answer::Refused };
        let waits = host.phase().is_none_or(|phase| matches!(phase, Phase::Committing | Phase::Filling));
        if !waits || !host.commits.is_empty() {
            return Answer::NotNow;
        }
        let there = &self.hosts[1 - at];
        if word.is_some() && there.owns() && !there.cannot_serve() {
            self.violated(|| format!("host {at}: takes back what the other host answers that it has"));
        }
        self.hosts[at].source = None;
        self.hosts[at].images.insert(path, image);
        let records = departed.records(branching(&departed.generations));
        self.commit(at, &records);
        if departed.images == LeftImages::Mixed || is_exchanged {
            // Somebody has said --without-missing, or --exchanged.
            self.branches[self.hosts[at].branch] = image;
        }
        self.hosts[at].is_open = true;
        Answer::Done
    }

    fn give_up(&mut self, at: usize) -> Answer {
        let host = &self.hosts[at];
        let Some(filling) = host.state.fillings.get(&VOLUME).filter(|_| host.owns()) else {
            return Answer::Refused;
        };
        let is_moving = host.source.is_some() || host.under_way().is_some();
        if is_moving || !host.serves() || !host.commits.is_empty() {
            return Answer::NotNow;
        }
        let role = migration::authority::Role::Filler { migration: filling.remote, volume: FIRST };
        let request = migration::authority::Request::Reservoir(FIRST);
        let answers = self.hears(at)
            && migration::authority::judge(&self.hosts[1 - at].state, host.id, role, request).is_ok();
        if answers && !filling.is_given_up && !self.random.percent(FORCED) {
            return Answer::Refused;
        }
        self.commit(at, &[Record::MissingGivenUp { volume: VOLUME }]);
        Answer::Done
    }

    fn remove(&mut self, at: usize) -> Answer {
        let host = &self.hosts[at];
        let Some(generation) = host.generation() else { return Answer::Refused };
        if host.under_way().is_some() || host.lacks_blocks() && !host.cannot_serve() {
            return Answer::Refused;
        }
        let word = self.word_of_other(at);
        if host.cannot_serve() && promotion::removable(generation, word, Removal::Forced).is_err() {
            return Answer::Refused;
        }
        let is_there = self.hosts[1 - at].owns();
        let is_needed = self.has_faults && !host.cannot_serve() && !is_there;
        let is_left_to_nobody = host.cannot_serve() && word.is_some() && !is_there;
        if is_needed && !self.random.percent(REMOVED) || !host.commits.is_empty() {
            return Answer::NotNow;
        }
        let (branch, image) = (host.branch, host.own_image());
        if is_left_to_nobody {
            let detail = "removes what the other host has not taken back, so that no host serves it";
            self.violated(|| format!("host {at}: {detail}"));
        }
        let host = &self.hosts[at];
        let given_up = host.state.fillings.contains_key(&VOLUME);
        let given_up = given_up.then_some(Record::MissingGivenUp { volume: VOLUME });
        let records: Vec<_> =
            given_up.into_iter().chain([Record::VolumeRemoved { volume: VOLUME }]).collect();
        self.commit(at, &records);
        self.removed.insert(branch);
        image.into_iter().for_each(|image| self.delete(at, &image));
        Answer::Done
    }

    /// Forgets where the volume has gone, and ends the forwarding of its clients.
    fn forget(&mut self, at: usize) -> Answer {
        let state = &self.hosts[at].state;
        let Some(moved) = state.moved.get(&VOLUME) else { return Answer::Refused };
        let is_over =
            state.migrations.get(&moved.migration).is_none_or(migration::journal::MigrationState::has_ended);
        let records = vec![Record::MovedForgotten { volume: VOLUME }];
        let is_taken = state.clone().apply(&Entry { at_unix_ms: 1, records: records.clone() }).is_ok();
        if is_taken != is_over {
            self.violated(|| {
                format!("host {at}: the departure is over: {is_over}, and may be forgotten: {is_taken}")
            });
        }
        if !is_taken {
            return Answer::Refused;
        }
        self.commit(at, &records);
        Answer::Done
    }

    /// Removes the other host by force: what loses nothing is ended.
    fn remove_host(&mut self, at: usize) -> Answer {
        if !std::mem::take(&mut self.is_paired[at]) {
            return Answer::NotNow;
        }
        let state = &self.hosts[at].state;
        for (id, side) in state.unfinished().map(|(id, known)| (id, known.side.clone())).collect::<Vec<_>>() {
            let state = &self.hosts[at].state;
            let cancel = orders::cancel(state, id).ok();
            let is_cancelled = cancel.is_some();
            let Some(records) = cancel.or_else(|| orders::give_up(state, id)) else { continue };
            if !self.commit(at, &records) {
                continue;
            }
            if is_cancelled {
                self.cancelled.insert((at, id));
            }
            match side {
                Side::Incoming { .. } => self.tell_target(at, id, TargetEvent::Cancel),
                _ => self.tell_source(at, id, SourceEvent::Cancel),
            }
        }
        Answer::Done
    }
}

fn branching(generations: &[(VolumeId, Generation)]) -> Promotion {
    let branches =
        generations.iter().map(|(volume, generation)| (*volume, BranchId([generation.0 as u8; 16])));
    Promotion::Force { branches: branches.collect() }
}
