//! Arriving volumes: the work of the daemon before and around the target's half.

use std::rc::Rc;
use std::time::Duration;

use ::host::Work;
use chronicle::{Generation, ReplicaOf, StayId};
use futures_channel::oneshot;
use lane::{Arriving, IncomingGroup, IncomingOrder, IncomingRole, Opening, Refused, TargetContent};
use migration::journal::{FailureCode, MigrationState, Outcome, Record, Side, Stage, State};
use migration::session::{MigrationSession, Role, Step, Undo, VmPlace};
use migration::source::Moves;
use migration::target::SourcePatience;
use migration::vm::cold::Form;
use migration::{CommitFault, Failure, MigrationId, StayKey};

use super::host::SimHost;
use super::lanes::{Beginning, SimLane};
use super::link::Subject;
use super::place::Place;
use super::serving::Resumed;
use super::session::{Ends, PATIENCE, driver_ends};
use super::taking_back::SetAside;
use super::vm_note::VmNote;
use crate::disk::{self, SimDisk};

const FAILS_PERCENT: u64 = 3;
/// The source's longest silence before anything is promised: as in the product.
const SOURCE_PATIENCE: SourcePatience =
    SourcePatience { silent_max: Duration::from_secs(600), away_max: Duration::from_secs(86_400) };

#[derive(Clone, Copy, Debug)]
pub(super) struct Accepted {
    pub(super) content: TargetContent,
    /// The departure that left the replica which became the target, and its generation.
    replica: Option<(MigrationId, Generation)>,
}

impl Accepted {
    pub(super) fn replica_at(&self, place: Place) -> Option<(ReplicaOf, Generation)> {
        let (departure, generation) = self.replica?;
        Some((ReplicaOf::Host { host: place.host().0, departure: departure.0 }, generation))
    }
}

pub(super) enum Taken {
    NotYet,
    /// Its lanes wait for the volumes.
    Accepted(Vec<Accepted>),
    Refused,
}

struct IncomingMigration {
    host: Rc<SimHost>,
    from: Place,
    /// Its number at its source.
    remote: MigrationId,
    /// The offer; `None`: a restart continues it, by the journal.
    offered: Option<(MigrationState, State)>,
    has_vm: bool,
    id: Option<MigrationId>,
    /// Whether it had a driver before, or a restart continues it.
    is_resumed: bool,
    takes_back: Option<MigrationId>,
    /// The driver of that one, which its session still has to give up.
    set_aside: Option<SetAside>,
    ends: Option<Ends>,
}

impl Work for IncomingMigration {
    fn migration(&self) -> Option<MigrationId> {
        self.id
    }

    async fn record(&mut self) -> Result<(), CommitFault> {
        let Some((offered, there)) = &self.offered else { return Ok(()) };
        let (id, started) = self.host.arrives((self.from, self.remote), offered, there, self.takes_back);
        let committed = self.host.journal().commit(vec![started]).await;
        drop(self.set_aside.take());
        self.id = Some(id);
        committed
    }

    async fn perform(&mut self, step: Step) -> Result<(), Failure> {
        if let (Step::MakeRoom, Some(left_by)) = (step, self.takes_back) {
            self.set_aside = Some(self.host.set_aside(left_by).await?);
            self.host.let_vm_come_again().await?;
        }
        let Some(id) = self.id else { return Ok(()) };
        let recorded = self.host.journal().look(|state, _| state.migrations.get(&id).cloned());
        let Some(recorded) = recorded else { return Ok(()) };
        let subject = Subject::Migration(self.from, self.remote);
        match step {
            Step::MakeImages => {
                self.host.make_images(subject, &recorded);
                self.host.perhaps_fails(FAILS_PERCENT, "the store is full")
            }
            Step::Begin => {
                self.host.perhaps_fails(FAILS_PERCENT, "an image is not to be had")?;
                let resumed = if self.is_resumed { Resumed::Yes } else { Resumed::No };
                // This journal does not say whether the source keeps its images; recording for none costs little.
                let keeps = self.offered.as_ref().is_none_or(|(offered, _)| offered.keep_source);
                let is_live = self.has_vm && self.host.form() == Form::Live;
                let moves = if is_live { Moves::Vm } else { Moves::Volumes };
                self.host.vm_expected.set(self.has_vm.then_some(subject));
                let numbers = (id, (self.from, self.remote));
                let begun = self.host.comes_from(numbers, &recorded, resumed, keeps, moves).await;
                let not_begun =
                    || Failure { code: FailureCode::Internal, detail: "no lane takes it".to_owned() };
                (self.ends, self.is_resumed) = (Some(begun.ok_or_else(not_begun)?), true);
                Ok(())
            }
            Step::MakeRoom | Step::Record | Step::Offer | Step::LetVmLeave | Step::ExamineVm => Ok(()),
        }
    }

    async fn undo(&mut self, undo: Undo) -> String {
        if let (Undo::Images, Some(id)) = (undo, self.id) {
            self.host.discard_images(id);
        }
        String::new()
    }

    async fn driver_ends(&mut self) -> Option<Outcome> {
        driver_ends(&mut self.ends).await
    }

    async fn cancel(&mut self) {}

    async fn place_volumes(&mut self, _: Outcome) {
        if let Some(id) = self.id {
            self.host.see_arrival(id);
        }
    }

    async fn note(&mut self, place: VmPlace) -> Result<(), String> {
        self.host.note_vm_at(place).await
    }

    async fn conclude(&mut self, _: Outcome) {
        let Some(id) = self.id else { return };
        self.host.check_concluded(id);
        // N.B. the VM's memory may still be sent by a source that does not know yet.
        self.host.vm_expected.set(None);
    }
}

impl SimHost {
    pub(super) fn takes(
        self: &Rc<Self>,
        source: &Rc<SimHost>,
        remote: MigrationId,
        offered: &MigrationState,
    ) -> Taken {
        let from = source.place;
        let subject = Subject::Migration(from, remote);
        let known = self.journal().look(|state, _| Some(state.incoming(from.host(), remote)?.1.has_ended()));
        match known {
            Some(true) => return Taken::Refused,
            Some(false) => {
                let is_ready = self.with_serving(|serving| serving.target_of(subject).is_some());
                let answer = self.answers.borrow().get(&subject).cloned();
                return match is_ready {
                    // An empty one: the answer was lost with a daemon.
                    Some(true) => Taken::Accepted(answer.unwrap_or_default()),
                    _ => Taken::NotYet,
                };
            }
            None => {}
        }
        let takes_back = self.may_take_back(from, offered);
        if takes_back.is_none() && (!self.has_nothing_to_do() || !self.owners().1.is_empty()) {
            return Taken::NotYet;
        }
        let branch = source.journal().look(|state, _| source.branch_in(state));
        if !self.fleet().is_some_and(|fleet| fleet.may_come(branch, self.place)) {
            return Taken::NotYet;
        }
        self.branch.set(branch);
        let has_vm = self.vm().is_some();
        let work = IncomingMigration {
            host: Rc::clone(self),
            from,
            remote,
            offered: Some((offered.clone(), source.journal().acknowledged())),
            has_vm,
            id: None,
            is_resumed: false,
            takes_back,
            set_aside: None,
            ends: None,
        };
        let session = MigrationSession::new(Role::Target, has_vm, PATIENCE).with_form(self.form());
        self.run_session(session, work);
        Taken::NotYet
    }

    pub(super) fn resume_incoming(self: &Rc<Self>, id: MigrationId, (from, remote): (Place, MigrationId)) {
        let has_vm = self.vm_note.get() == VmNote::Arriving;
        let work = IncomingMigration {
            host: Rc::clone(self),
            from,
            remote,
            offered: None,
            has_vm,
            id: Some(id),
            is_resumed: true,
            takes_back: None,
            set_aside: None,
            ends: None,
        };
        let session = MigrationSession::resume(Role::Target, has_vm, PATIENCE);
        let mut session = session.with_form(self.form());
        if let Some(recorded) = self.journal().acknowledged().migrations.get(&id) {
            session = session.with_orders(recorded);
        }
        self.run_session(session, work);
    }

    fn arrives(
        &self,
        (from, remote): (Place, MigrationId),
        offered: &MigrationState,
        there: &State,
        takes_back: Option<MigrationId>,
    ) -> (MigrationId, Record) {
        let volumes = self.places_for(&offered.volumes, takes_back);
        let records = volumes.iter().filter_map(|moving| {
            let mut record = there.volumes.get(&moving.volume)?.record.clone();
            record.image = moving.target.clone();
            Some(record)
        });
        let side = Side::Incoming {
            peer: from.host(),
            peer_name: from.letter().to_string(),
            remote,
            volumes: records.collect(),
        };
        let id = self.next_migration();
        (id, Record::MigrationStarted { migration: id, volumes, keep_source: false, side })
    }

    fn discard_images(&self, id: MigrationId) {
        let volumes =
            self.journal().look(|state, _| state.migrations.get(&id).map(|known| known.volumes.clone()));
        for moving in volumes.into_iter().flatten() {
            self.discard_image(moving.target.place.name());
        }
    }

    /// Returns whether an interrupted source's half can continue: the target's half waits for it, or the journal answers for a
    /// migration that has ended or never begun.
    pub(super) fn can_go_on(self: &Rc<Self>, source: Place, remote: MigrationId) -> bool {
        let subject = Subject::Migration(source, remote);
        let known =
            self.journal().look(|state, _| Some(state.incoming(source.host(), remote)?.1.has_ended()));
        match known {
            Some(false) => self.with_serving(|serving| serving.target_of(subject).is_some()) == Some(true),
            Some(true) | None => self.channel(source, subject).is_some(),
        }
    }

    fn make_images(&self, subject: Subject, recorded: &MigrationState) {
        let left = self.left_in_place(recorded);
        let make = |(index, moving): (usize, &migration::journal::MigratingVolume)| {
            let path = moving.target.place.name();
            match left.or_else(|| self.take_kept(moving.volume, path)) {
                Some(left) => Accepted { content: TargetContent::Unknown, replica: Some(left) },
                None => {
                    self.make_image(path, index);
                    Accepted { content: TargetContent::Zero, replica: None }
                }
            }
        };
        let accepted = recorded.volumes.iter().enumerate().map(make).collect();
        self.answers.borrow_mut().insert(subject, accepted);
    }

    /// Lets lanes wait for the volumes; returns the end of the target's half, or `None` if it does not begin.
    async fn comes_from(
        self: &Rc<Self>,
        (id, (from, remote)): (MigrationId, (Place, MigrationId)),
        recorded: &MigrationState,
        resumed: Resumed,
        keeps: bool,
        moves: Moves,
    ) -> Option<Ends> {
        let subject = Subject::Migration(from, remote);
        let takes_back = self.journal().look(|state, _| state.takes_back(id));
        let before = self.lanes().into_iter().flatten().find_map(|lane| lane.lane.came_by());
        if let Some(before) = before.filter(|_| takes_back.is_some()) {
            // N.B. no lane receives later messages of its line: the journal answers, as a daemon's does.
            self.hear_anew(&before);
        }
        if let Some(left_by) = takes_back {
            self.offer_reservoirs_again(from, left_by, recorded);
        }
        let stay = StayId::Arrived(id.0);
        let left_behind = keeps.then_some(ReplicaOf::Host { host: from.host().0, departure: remote.0 });
        let mut arrivals = Vec::new();
        for ((index, moving), generation) in recorded.volumes.iter().enumerate().zip(generations_of(recorded))
        {
            let (lane, disk) = self.waiting_lane(index, (stay, generation), recorded, resumed);
            let key = StayKey { volume: moving.volume, stay };
            let order = IncomingOrder {
                migration: id,
                remote,
                generation,
                left_behind,
                image: moving.target.clone(),
                moves,
                patience: SOURCE_PATIENCE,
                recorded: (resumed == Resumed::Yes).then(|| Box::new(recorded.clone())),
                missing: (resumed == Resumed::Yes)
                    .then(|| self.chronicles.missing(key).map(Box::new))
                    .flatten(),
                takes_back,
            };
            let store = lane.lane.left_store(&order).unwrap_or(disk);
            arrivals.push((lane, order, store));
        }
        for (lane, order, store) in &arrivals {
            match lane.lane.prepare_arrival(order, store).await {
                Ok(()) => {}
                Err(Refused::StillWritten) => {
                    self.world.say(|| format!("{}: {id}: an earlier way back still writes", self.place));
                    return None;
                }
                Err(error) => self.world.violated("chronicle", || error.to_string()),
            }
        }
        let reservoir = match self.manner.leaves_blocks() && takes_back.is_none() {
            true => Some(self.way_to_reservoir(from, remote)?),
            false => None,
        };
        let channel = self.channel(from, subject)?;
        let (mut group, mut first, mut driven) = (IncomingGroup::default(), None, None);
        for (index, (lane, order, store)) in arrivals.into_iter().enumerate() {
            let arriving = Arriving {
                store,
                leased: None,
                reservoir: reservoir.clone(),
                rpc: Rc::clone(&channel.channel),
                service: Rc::clone(&channel.service),
            };
            if index == 0 {
                first = Some((lane, order, arriving));
                continue;
            }
            let role = IncomingRole::Joins(group.add(lane.volume().id(), order.image.clone()));
            lane.lane.arrive(&order, arriving, role).ok()?;
            self.limit_waits(&lane);
        }
        if let Some((lane, order, arriving)) = first {
            lane.control.begins(None);
            driven = lane.lane.arrive(&order, arriving, IncomingRole::Drives(group)).ok()?;
            self.limit_waits(&lane);
        }
        let (ended, ends) = oneshot::channel();
        self.with_serving(|serving| {
            serving.target.replace(driven.map(|driver| (subject, driver)));
            serving.ends.insert(id, ended);
        });
        Some(ends)
    }

    fn limit_waits(&self, lane: &SimLane) {
        if let Some(filling) = lane.filling() {
            filling.limit_waits(self.manner.wait_max);
        }
    }

    /// Returns the lane that an arriving volume waits in, and its store; the lane of remaining clients, if there are any.
    fn waiting_lane(
        self: &Rc<Self>,
        index: usize,
        (stay, generation): (StayId, Generation),
        recorded: &MigrationState,
        resumed: Resumed,
    ) -> (SimLane, Rc<SimDisk>) {
        let moving = &recorded.volumes[index];
        let path = moving.target.place.name();
        let is_there = self.images.borrow().contains_key(path);
        if resumed == Resumed::Yes && !is_there && recorded.stage != Stage::Copying {
            self.world.violated("owner", || format!("{path} is gone, and {:?}", recorded.stage));
        }
        let disk = self.make_image(path, index);
        disk.set_role(disk::Role::Target);
        let lane = match self.lane(index) {
            Some(lane) => {
                self.chronicles.note_image(StayKey { volume: moving.volume, stay }, disk.look());
                lane
            }
            None => {
                let beginning = Beginning::Here(disk.clone());
                self.begin_lane(index, (stay, generation), beginning, Some(disk.look()), Opening::Waiting)
            }
        };
        disk.set_volume(lane.volume());
        self.with_serving(|serving| serving.lanes[index] = Some(lane.clone()));
        self.offer_to_clients(index);
        (lane, disk)
    }

    /// Notes the end of a target's half.
    pub(super) fn arrival_ended(&self, id: MigrationId, outcome: &Outcome) {
        self.world.say(|| format!("{}: incoming {id} ended: {outcome:?}", self.place));
        self.with_serving(|serving| serving.target.replace(None));
    }

    /// Checks lanes after an arrival: a lane that waited for a volume that did not arrive is dropped.
    fn see_arrival(&self, id: MigrationId) {
        let state = self.journal().acknowledged();
        let Some(recorded) = state.migrations.get(&id) else { return };
        for (index, moving) in recorded.volumes.iter().enumerate() {
            let is_known =
                state.volumes.contains_key(&moving.volume) || state.moved.contains_key(&moving.volume);
            if !is_known {
                self.with_serving(|serving| serving.lanes[index] = None);
            }
        }
    }
}

fn generations_of(recorded: &MigrationState) -> Vec<Generation> {
    match &recorded.side {
        Side::Incoming { volumes, .. } => volumes.iter().map(|record| record.generation).collect(),
        Side::OneHost | Side::Outgoing { .. } => Vec::new(),
    }
}
