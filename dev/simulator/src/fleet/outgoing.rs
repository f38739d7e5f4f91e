//! Leaving volumes: the work of the daemon before and around the source's half.

use std::rc::Rc;
use std::time::Duration;

use ::host::Work;
use block::ZeroMode;
use chronicle::{Generation, ReplicaOf, StayId};
use futures_channel::oneshot;
use lane::peer::{CallsOnly, RpcChannel, Service};
use lane::{Departing, Home, OutgoingGroup, OutgoingOrder, OutgoingRole, Rest, TargetContent, Volume};
use migration::journal::{
    FailureCode, Forwarding, ImageLocation, MigratingVolume, MigrationState, Outcome, Record, Side, Stage,
};
use migration::message::ToTarget;
use migration::session::{MigrationSession, Role, Step, Undo, VmPlace};
use migration::source::Moves;
use migration::vm::cold::{Form, Purpose};
use migration::wire::Message;
use migration::{Attempt, Budget, CommitFault, Failure, HostId, MigrationId, Phase, VolumeIndex};

use super::host::{SimHost, volume_id};
use super::incoming::{Accepted, Taken};
use super::link::Subject;
use super::listener::send;
use super::place::Place;
use super::serving::SourceHalf;
use super::session::{Ends, PATIENCE, driver_ends};
use super::taking_back::GOES_BACK;
use super::vm_note::VmNote;
use crate::disk;

/// Pause before the other host is asked again to take a migration.
const ASK_AGAIN: Duration = Duration::from_millis(30);
const HOOKS_PERCENT: u64 = 30;
/// The percentage of starts at which the image of a released migration is not available at once.
const MISSING_PERCENT: u64 = 10;
const EXAMINED_PERCENT: u64 = 4;
const REFUSED_PERCENT: u64 = 3;

struct OutgoingMigration {
    host: Rc<SimHost>,
    id: Option<MigrationId>,
    target: Place,
    has_vm: bool,
    form: Form,
    has_hooks: bool,
    accepted: Vec<Accepted>,
    /// Whether it had a driver before, or a restart continues it by the journal.
    is_resumed: bool,
    ends: Option<Ends>,
}

impl Work for OutgoingMigration {
    fn migration(&self) -> Option<MigrationId> {
        self.id
    }

    async fn record(&mut self) -> Result<(), CommitFault> {
        let (id, started) = self.host.started(self.target);
        let committed = self.host.journal().commit(vec![started]).await;
        self.id = Some(id);
        committed
    }

    async fn perform(&mut self, step: Step) -> Result<(), Failure> {
        let Some(id) = self.id else { return Ok(()) };
        match step {
            Step::Offer => {
                self.accepted = self.host.offer(id).await?;
                Ok(())
            }
            Step::LetVmLeave => self.host.note_vm(VmNote::Leaving).await.map_err(internal),
            Step::ExamineVm if self.form == Form::Cold => {
                self.host.ask_to_keep(id, self.target, Purpose::Copying).await.map_err(internal)
            }
            Step::ExamineVm => self.host.examine_vm(id, self.target).await,
            Step::Begin => {
                let recorded = self.is_resumed.then(|| self.host.recorded(id)).flatten();
                self.host.can_begin(id, recorded.as_ref())?;
                let moves = self.moves(recorded.as_ref());
                self.host.hooks.expect(id, moves);
                let begun = self.host.leave(id, moves, recorded.as_ref(), &self.accepted);
                let ends = begun.ok_or_else(|| internal("no lane takes it".to_owned()))?;
                if recorded.is_some() {
                    self.host.knock(id, self.target);
                }
                (self.ends, self.is_resumed) = (Some(ends), true);
                Ok(())
            }
            Step::MakeRoom | Step::MakeImages | Step::Record => Ok(()),
        }
    }

    async fn undo(&mut self, _: Undo) -> String {
        if let Some(id) = self.id {
            self.host.tell_to_discard(id, self.target);
        }
        String::new()
    }

    async fn driver_ends(&mut self) -> Option<Outcome> {
        driver_ends(&mut self.ends).await
    }

    async fn cancel(&mut self) {
        self.host.cancel_driver();
    }

    async fn keep_vm(&mut self) {
        self.host.cancel_driver();
    }

    async fn note(&mut self, place: VmPlace) -> Result<(), String> {
        self.host.note_vm_at(place).await
    }

    async fn conclude(&mut self, outcome: Outcome) {
        if outcome == Outcome::TakenBack {
            self.host.tally(super::tally::Event::TakenBack);
        }
        if let Some(id) = self.id {
            self.host.check_concluded(id);
        }
    }
}

impl OutgoingMigration {
    /// Returns what moves. Only the daemon that has asked the other host knows of its hooks.
    fn moves(&self, recorded: Option<&MigrationState>) -> Moves {
        match recorded {
            _ if self.has_vm && self.form == Form::Live => Moves::Vm,
            None if self.has_vm => Moves::VolumesAfterHooks,
            None if self.has_hooks => Moves::VolumesAfterHooks,
            Some(recorded) if recorded.stage == Stage::Copying => Moves::VolumesAfterHooks,
            None | Some(_) => Moves::Volumes,
        }
    }
}

fn internal(detail: String) -> Failure {
    Failure { code: FailureCode::Internal, detail }
}

impl SimHost {
    pub(super) fn begin_migration(self: &Rc<Self>, target: Place) {
        let has_vm = self.vm().is_some();
        let work = OutgoingMigration {
            host: Rc::clone(self),
            id: None,
            target,
            has_vm,
            form: self.form(),
            has_hooks: self.random.borrow_mut().percent(HOOKS_PERCENT),
            accepted: Vec::new(),
            is_resumed: false,
            ends: None,
        };
        let session = MigrationSession::new(Role::Source, has_vm, PATIENCE).with_form(work.form);
        self.run_session(session, work);
    }

    pub(super) fn resume_outgoing(self: &Rc<Self>, id: MigrationId, recorded: &MigrationState) {
        let Some((peer, _)) = recorded.side.peer() else { return };
        // N.B. a daemon killed between the records of the migration and of its VM does not know that the VM leaves.
        let has_vm = match (self.vm_note.get(), &recorded.stage) {
            (VmNote::Leaving, _) | (VmNote::Home, Stage::Copying) => true,
            (VmNote::Home | VmNote::Arriving | VmNote::Nothing, _) => false,
        };
        let form = if self.vm_note.get() == VmNote::Leaving { self.form() } else { Form::Live };
        let work = OutgoingMigration {
            host: Rc::clone(self),
            id: Some(id),
            target: Place::of(peer),
            has_vm,
            form,
            has_hooks: true,
            accepted: Vec::new(),
            is_resumed: true,
            ends: None,
        };
        let session = MigrationSession::resume(Role::Source, has_vm, PATIENCE).with_form(form);
        let session = session.with_orders(recorded);
        self.run_session(session, work);
    }

    fn started(&self, target: Place) -> (MigrationId, Record) {
        let id = self.next_migration();
        let state = self.journal().acknowledged();
        let goes_back = state.fillings.values().any(|filling| filling.peer == target.host());
        // N.B. an incomplete image is useless once its volume has left.
        let is_wanted = self.random.borrow_mut().percent(self.manner.keep_percent);
        let keep_source = state.keeps_source(is_wanted, state.volumes.keys().copied());
        let (here, there) = (self.place.letter(), target.letter());
        let moving = (0..self.manner.block_sizes.len()).filter_map(|index| {
            let volume = state.volumes.get(&volume_id(index))?;
            let target = ImageLocation::raw_file(there, format!("/{there}/{here}{}.{index}", id.0));
            Some(MigratingVolume {
                volume: volume.record.volume,
                source: volume.record.image.clone(),
                target,
            })
        });
        let side = Side::Outgoing {
            peer: target.host(),
            peer_name: there.to_string(),
            store: if goes_back { GOES_BACK.to_owned() } else { there.to_string() },
            forwarding: Forwarding::Always,
        };
        let volumes = moving.collect();
        self.world.note("migration", id.0, target.index() as u64);
        self.world.say(|| format!("{}: {id} to {target}, kept: {keep_source}", self.place));
        (id, Record::MigrationStarted { migration: id, volumes, keep_source, side })
    }

    async fn offer(self: &Rc<Self>, id: MigrationId) -> Result<Vec<Accepted>, Failure> {
        loop {
            self.handle.sleep(ASK_AGAIN).await;
            let Some((peer, recorded)) = self.still_copies(id) else {
                return Err(internal("it has ended".to_owned()));
            };
            if !self.can_hear(&peer) {
                continue;
            }
            match peer.takes(self, id, &recorded) {
                Taken::NotYet => {}
                Taken::Accepted(accepted) => return Ok(accepted),
                Taken::Refused => {
                    let detail = "it was taken back there".to_owned();
                    return Err(Failure { code: FailureCode::HostRefused, detail });
                }
            }
        }
    }

    async fn examine_vm(&self, id: MigrationId, target: Place) -> Result<(), Failure> {
        self.handle.sleep(ASK_AGAIN).await;
        let peer = self.fleet().map(|fleet| Rc::clone(fleet.host(target)));
        let Some(peer) = peer.filter(|peer| peer.is_up() && self.can_hear(peer)) else {
            return Err(internal("the other host is not heard".to_owned()));
        };
        if peer.vm_expected.get() != Some(Subject::Migration(self.place, id)) {
            return Err(internal("the other host was started again, and expects no VM".to_owned()));
        }
        self.perhaps_fails(EXAMINED_PERCENT, "the VM cannot run there")?;
        self.vm_examined_by.set(Some((target, peer.incarnation())));
        Ok(())
    }

    fn recorded(&self, id: MigrationId) -> Option<MigrationState> {
        self.journal().look(|state, _| state.migrations.get(&id).cloned())
    }

    fn can_begin(self: &Rc<Self>, id: MigrationId, recorded: Option<&MigrationState>) -> Result<(), Failure> {
        if self.journal().look(|state, _| state.taken_back_by(id).is_some()) {
            return Err(internal("its volumes are coming back".to_owned()));
        }
        let Some(recorded) = recorded else {
            return self.perhaps_fails(REFUSED_PERCENT, "a lane has something else to do");
        };
        if recorded.stage != Stage::Copying {
            return self.perhaps_fails(MISSING_PERCENT, "its image is not to be had");
        }
        match self.still_copies(id) {
            Some((peer, _)) if self.can_hear(&peer) && peer.can_go_on(self.place, id) => Ok(()),
            _ => Err(internal("the other host is not heard".to_owned())),
        }
    }

    fn tell_to_discard(self: &Rc<Self>, id: MigrationId, target: Place) {
        if let Some(channel) = self.channel(target, Subject::Migration(self.place, id)) {
            send(&channel.channel, &Message::ToTarget { migration: id, message: ToTarget::Discard });
        }
    }

    /// Asks the other host about a migration, in place of the calls on a missing store, which the daemon answers from its
    /// journal. A migration that has ended there, or never begun, is then reported to its source. Others take the message for one
    /// of an old attempt.
    fn knock(self: &Rc<Self>, id: MigrationId, peer: Place) {
        if let Some(channel) = self.channel(peer, Subject::Migration(self.place, id)) {
            let message = ToTarget::Prepare(Attempt::NONE);
            send(&channel.channel, &Message::ToTarget { migration: id, message });
        }
    }

    fn still_copies(&self, id: MigrationId) -> Option<(Rc<Self>, MigrationState)> {
        let state = self.journal().acknowledged();
        let recorded = state.migrations.get(&id).filter(|recorded| !recorded.has_ended())?.clone();
        let target = Place::of(recorded.side.peer()?.0);
        Some((Rc::clone(self.fleet()?.host(target)), recorded))
    }

    pub(super) fn can_hear(&self, peer: &Self) -> bool {
        self.link_to(peer.place).is_some_and(|link| link.is_up())
    }

    /// Has the lanes of the volumes drive the source's half; returns its end, or `None` if they do not.
    fn leave(
        self: &Rc<Self>,
        id: MigrationId,
        moves: Moves,
        recorded: Option<&MigrationState>,
        accepted: &[Accepted],
    ) -> Option<Ends> {
        let state = self.journal().acknowledged();
        let known = state.migrations.get(&id)?;
        let peer = known.side.peer().map(|(peer, _)| Place::of(peer))?;
        let channel = self.channel(peer, Subject::Migration(self.place, id))?;
        let strategy = self.strategy_of(known);
        self.world.copies_by(strategy);
        let copies = recorded.is_none_or(|recorded| recorded.stage == Stage::Copying);
        let (mut group, mut departures) = (OutgoingGroup::default(), Vec::new());
        for (index, moving) in known.volumes.iter().enumerate() {
            let lane = self.lane(index)?;
            if self.with_serving(|serving| serving.source.borrow().is_some()) != Some(false) {
                return None;
            }
            if let Some(disk) = self.images.borrow().get(moving.source.place.name()) {
                disk.set_role(disk::Role::Source);
            }
            let volume = lane.volume();
            let (content, known_there) =
                self.target_of_departure(id, volume, recorded, accepted.get(index), peer);
            let order = OutgoingOrder {
                migration: id,
                to: peer.host(),
                source: moving.source.clone(),
                keep_source: known.keep_source,
                budget: Budget::of(self.manner.pacing.bytes_per_second),
                pacing: self.manner.pacing.clone(),
                impact: None,
                time_left: None,
                strategy,
                content,
                known: known_there,
                zeroes: ZeroMode::MayUnmap,
                shared: None,
                switch_over_max: self.manner.limits.switch_over_max,
                round_trip: Duration::ZERO,
                moves,
                rest: Rest::Resume,
                recorded: recorded.cloned().map(Box::new),
            };
            let successor = match volume.home() {
                Home::Elsewhere(owner) => owner,
                Home::Here(_) => self.elsewhere(index, peer, id)?,
            };
            let participation =
                (index > 0).then(|| group.add(volume.id(), volume.generation(), moving.source.clone()));
            departures.push((lane, order, successor, participation));
        }
        if strategy.leaves_blocks() {
            self.offer_reservoirs(peer, id);
        }
        let mut followers = Vec::new();
        for (lane, order, successor, participation) in departures.split_off(1) {
            let role = OutgoingRole::Joins(participation?);
            match lane.lane.depart(&order, &channel.channel, successor, role).ok()? {
                Departing::Joins(follower) => followers.push(follower),
                Departing::Drives(_) => return None,
            }
        }
        let (lane, order, successor, _) = departures.pop()?;
        lane.control.begins(None);
        let role = OutgoingRole::Drives(group);
        let Departing::Drives(driver) = lane.lane.depart(&order, &channel.channel, successor, role).ok()?
        else {
            return None;
        };
        let half = SourceHalf { subject: channel.subject, driver, followers };
        let (ended, ends) = oneshot::channel();
        self.with_serving(|serving| {
            serving.source.replace(Some(half));
            serving.ends.insert(id, ended);
        });
        if copies {
            self.enter_copying();
        }
        Some(ends)
    }

    /// Notes the end of a source's half; `None`: it was set aside.
    pub(super) fn departure_ended(&self, id: MigrationId, outcome: Option<&Outcome>) {
        self.world.say(|| format!("{}: outgoing {id} ended: {outcome:?}", self.place));
        self.world.note("migration ended", id.0, 0);
        self.world.set_phase(None);
        self.set_phase(None);
        self.with_serving(|serving| serving.source.replace(None));
        if let Some(fleet) = self.fleet() {
            fleet.draw_kill_after_end(self.place);
        }
    }

    fn enter_copying(&self) {
        self.world.set_phase(Some(Phase::Copying));
        self.set_phase(Some(Phase::Copying));
        if let Some(fleet) = self.fleet() {
            fleet.phase_entered(Phase::Copying);
        }
    }

    /// Returns what the target's store of a volume holds when the migration begins.
    fn target_of_departure(
        &self,
        id: MigrationId,
        volume: &Volume,
        recorded: Option<&MigrationState>,
        accepted: Option<&Accepted>,
        peer: Place,
    ) -> (TargetContent, Option<(ReplicaOf, Generation)>) {
        let (content, replica) = match (recorded, accepted) {
            // A target that was copied to before may hold anything.
            (Some(_), _) | (None, None) => {
                (TargetContent::Unknown, recorded.map(|_| (ReplicaOf::Migration(id.0), volume.generation())))
            }
            (None, Some(accepted)) => (accepted.content, accepted.replica_at(peer)),
        };
        if let Some((of @ ReplicaOf::Host { .. }, generation)) = replica
            && volume.chronicler().lacking(of, generation).is_some()
        {
            self.tally(super::tally::Event::IncrementalReturn);
            if self.local.has_moved.get() {
                self.tally(super::tally::Event::ReturnAfterWithin);
            }
            if self.came_from(volume.chronicler().stay()) != Some(peer.host()) {
                self.tally(super::tally::Event::ReturnFromFurther);
            }
        }
        (content, replica)
    }

    fn came_from(&self, stay: StayId) -> Option<HostId> {
        let StayId::Arrived(id) = stay else { return None };
        self.journal().look(|state, _| Some(state.migrations.get(&MigrationId(id))?.side.peer()?.0))
    }

    /// Lets the target of a migration read the blocks that its volumes lack, if it does not already.
    pub(super) fn offer_reservoirs(&self, peer: Place, id: MigrationId) {
        let subject = Subject::Reservoir(self.place, id);
        if self.with_serving(|serving| serving.reservoirs.contains_key(&subject)) != Some(false) {
            return;
        }
        let Some(link) = self.link_to(peer) else { return };
        let line = link.line(subject);
        // The other host learns of it, now or when it is up again.
        line.is_known_to(peer);
        let Some((line, arrivals)) = line.open(self.place, self.guard(subject, peer)) else { return };
        let service = Service::new(self.handle.clone(), self.buffers.clone());
        for (index, lane) in self.lanes().into_iter().enumerate() {
            if let Some(lane) = lane {
                lane.lane.offer_reservoir(&service, id, VolumeIndex(index as u32));
            }
        }
        let channel = RpcChannel::new(line);
        self.handle.spawn(channel.run(arrivals, service, Rc::new(CallsOnly)));
        self.with_serving(|serving| serving.reservoirs.insert(subject, channel));
    }
}
