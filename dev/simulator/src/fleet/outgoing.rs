//! Leaving volumes: the work of the daemon before and around the source's half.

use std::rc::Rc;
use std::time::Duration;

use ::host::Work;
use block::{BlockDevice, Geometry, ZeroMode};
use chronicle::{Generation, ReplicaOf, StayId};
use futures_channel::oneshot;
use futures_util::future::{Either, select};
use lane::peer::head::Address;
use lane::peer::{CallsOnly, PeerStore, RequestPriority, RpcChannel, Service};
use lane::reservoir::Reservoir;
use lane::resuming;
use lane::{
    Control, CopySettings, GivesWay, Home, OutgoingGroup, OutgoingVolume, Replica, Rest, SourceDriver,
    SourcePlan, TargetContent,
};
use migration::journal::{
    FailureCode, Forwarding, ImageLocation, MigratingVolume, MigrationState, Outcome, Record, Side, Stage,
};
use migration::message::ToTarget;
use migration::session::{MigrationSession, Role, Step, Undo, VmPlace};
use migration::source::{Moves, Peer};
use migration::vm::cold::{Form, Purpose};
use migration::wire::Message;
use migration::{Attempt, Carried, CommitFault, Failure, HostId, MigrationId, Phase};

use super::control::HostControl;
use super::host::{SimHost, volume_id};
use super::incoming::{Accepted, Taken};
use super::link::Subject;
use super::listener::send;
use super::place::Place;
use super::serving::{Channel, SourceHalf};
use super::session::{Ends, PATIENCE, driver_ends};
use super::taking_back::{GOES_BACK, SetAside, goes_back};
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
        let mut volumes = self.leaving_volumes(known, recorded, accepted, peer, &channel)?;
        let remembered: Vec<_> =
            volumes.iter().map(|leaving| (Rc::clone(&leaving.volume), leaving.replica.known)).collect();
        self.world.copies_by(self.strategy_of(known));
        let strategy = self.strategy_of(known);
        let copying = CopySettings {
            pacing: self.manner.pacing.clone(),
            gives_way: GivesWay::default(),
            limits: self.manner.limits,
            strategy,
        };
        let copies = recorded.is_none_or(|recorded| recorded.stage == Stage::Copying);
        let (mut group, mut followers) = (OutgoingGroup::default(), Vec::new());
        for leaving in volumes.split_off(1) {
            let (id, generation) = (leaving.volume.id(), leaving.volume.generation());
            let participation = group.add(id, generation, leaving.source_image.clone());
            let copying = copies.then_some(&copying);
            let (follower, follows) = participation.follow(&self.handle, &self.buffers, copying, leaving);
            followers.push(follower);
            self.handle.spawn(follows);
        }
        let plan = SourcePlan {
            migration: id,
            volumes,
            group,
            keep_source: known.keep_source,
            copying,
            switch_over_max: self.manner.limits.switch_over_max,
            peer: Peer::OtherHost,
            moves,
        };
        let (subject, channel) = (channel.subject, Rc::clone(&channel.channel));
        let post = Box::new(move |message| send(&channel, &Message::ToTarget { migration: id, message }));
        let (handle, buffers) = (self.handle.clone(), &self.buffers);
        let control: Rc<dyn Control> = HostControl::new(self, self.place);
        let made = match recorded {
            None => Some(SourceDriver::new(handle, control, buffers, plan, post)),
            Some(recorded) => SourceDriver::resume(handle, control, buffers, plan, post, recorded),
        };
        let (driver, source) = made?;
        let (set_aside, is_set_aside) = oneshot::channel::<oneshot::Sender<SetAside>>();
        let handle = source.clone();
        let half = SourceHalf { subject, driver: source, followers, set_aside: Some(set_aside) };
        self.with_serving(|serving| serving.source.replace(Some(half)));
        if copies {
            self.enter_copying();
        }
        remembered.into_iter().for_each(|(volume, known)| self.remember(id, volume, known));
        let (me, (ended, ends)) = (Rc::clone(self), oneshot::channel());
        self.handle.spawn(async move {
            let (outcome, asked) = match select(Box::pin(driver.run()), is_set_aside).await {
                Either::Left((outcome, _)) => (Some(outcome), None),
                // N.B. as in the lane: the driver may have learned at this very instant that nothing is missing.
                Either::Right((Ok(asked), run)) if handle.phase() != Phase::Filling => {
                    drop(asked);
                    (Some(run.await), None)
                }
                Either::Right((Ok(asked), run)) => {
                    drop(run);
                    (None, Some(asked))
                }
                Either::Right((Err(_), run)) => (Some(run.await), None),
            };
            me.world.say(|| format!("{}: outgoing {id} ended: {outcome:?}", me.place));
            me.world.note("migration ended", id.0, 0);
            me.world.set_phase(None);
            me.set_phase(None);
            me.with_serving(|serving| serving.source.replace(None));
            if let Some(fleet) = me.fleet() {
                fleet.draw_kill_after_end(me.place);
            }
            match asked {
                Some(asked) => drop(asked.send(SetAside::new(ended))),
                None => drop(ended.send(outcome)),
            }
        });
        Some(ends)
    }

    fn enter_copying(&self) {
        self.world.set_phase(Some(Phase::Copying));
        self.set_phase(Some(Phase::Copying));
        if let Some(fleet) = self.fleet() {
            fleet.phase_entered(Phase::Copying);
        }
    }

    fn leaving_volumes(
        &self,
        known: &MigrationState,
        recorded: Option<&MigrationState>,
        accepted: &[Accepted],
        peer: Place,
        channel: &Channel,
    ) -> Option<Vec<OutgoingVolume>> {
        let id = match channel.subject {
            Subject::Migration(_, id) => id,
            Subject::Clients(..) | Subject::Reservoir(..) => return None,
        };
        let mut leaving = Vec::new();
        for (index, moving) in known.volumes.iter().enumerate() {
            let volume = {
                let serving = self.serving.borrow();
                let serving = serving.as_ref()?;
                if serving.source.borrow().is_some() {
                    return None;
                }
                serving.volumes[index].clone()?
            };
            if let Some(disk) = self.images.borrow().get(moving.source.place.name()) {
                disk.set_role(disk::Role::Source);
            }
            let store = |priority| -> Rc<dyn BlockDevice> {
                let address = Address::Replica(index as u32);
                let geometry = Geometry { read_only: false, discards: true, ..self.manner.geometries[index] };
                Rc::new(PeerStore::new(Rc::clone(&channel.channel), address, geometry, priority))
            };
            let (content, replica) = match (recorded, accepted.get(index)) {
                // A target that was copied to before may hold anything.
                (Some(_), _) | (None, None) => (
                    TargetContent::Unknown,
                    recorded.map(|_| (ReplicaOf::Migration(id.0), volume.generation())),
                ),
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
            let leaves_blocks = self.manner.leaves_blocks() && !goes_back(known);
            let filling = self.filling_of(index);
            let replica = Replica {
                bulk: store(RequestPriority::Bulk),
                mirrored: store(RequestPriority::Mirrored),
                content,
                known: replica,
                carried: Carried::default(),
                zeroes: ZeroMode::MayUnmap,
                guests_there: None,
                manifest: leaves_blocks.then(|| {
                    let address = Address::Replica(index as u32);
                    let geometry =
                        Geometry { read_only: false, discards: true, ..self.manner.geometries[index] };
                    let channel = Rc::clone(&channel.channel);
                    Rc::new(PeerStore::new(channel, address, geometry, RequestPriority::Mirrored))
                }),
            };
            let reservoir = match leaves_blocks {
                true => self.with_serving(|serving| serving.reservoir_of(index)),
                false => None,
            };
            // An open reservoir stays: the volume may be forwarded to its owner since.
            if let Some(reservoir) = reservoir.as_ref().filter(|reservoir| reservoir.store_of(id).is_none()) {
                reservoir.open(id, volume.store());
            }
            if let Some(reservoir) = &reservoir {
                reservoir.rest(Rest::Resume);
            }
            let source_image = moving.source.clone();
            let successor = match volume.home() {
                Home::Elsewhere(owner) => Some(owner),
                Home::Here(_) => self.elsewhere(index, peer, id),
            };
            let channel = Some(Rc::clone(&channel.channel));
            let lease = None;
            leaving.push(OutgoingVolume {
                volume,
                replica,
                source_image,
                successor,
                channel,
                to: Some(peer.host()),
                lease,
                reservoir,
                filling,
            });
        }
        self.offer_reservoirs(peer, id, &leaving);
        Some(leaving)
    }

    fn came_from(&self, stay: StayId) -> Option<HostId> {
        let StayId::Arrived(id) = stay else { return None };
        self.journal().look(|state, _| Some(state.migrations.get(&MigrationId(id))?.side.peer()?.0))
    }

    fn offer_reservoirs(&self, peer: Place, id: MigrationId, leaving: &[OutgoingVolume]) {
        let reservoirs: Vec<_> = leaving.iter().filter_map(|leaving| leaving.reservoir.clone()).collect();
        self.offer_reservoirs_of(peer, id, &reservoirs);
    }

    pub(super) fn offer_reservoirs_of(&self, peer: Place, id: MigrationId, reservoirs: &[Rc<Reservoir>]) {
        let subject = Subject::Reservoir(self.place, id);
        let is_offered = self.with_serving(|serving| serving.reservoirs.contains_key(&subject));
        if reservoirs.is_empty() || is_offered == Some(true) {
            return;
        }
        let Some(link) = self.link_to(peer) else { return };
        let line = link.line(subject);
        // The other host learns of it, now or when it is up again.
        line.is_known_to(peer);
        let Some((line, arrivals)) = line.open(self.place, self.guard(subject, peer)) else { return };
        let service = Service::new(self.handle.clone(), self.buffers.clone());
        for (index, reservoir) in reservoirs.iter().enumerate() {
            let store = reservoir.of(id, self.manner.geometries[index]);
            let (geometry, handle) = (self.manner.geometries[index], self.handle.clone());
            let background = reservoir.in_background(id, geometry, handle);
            service.offer(Address::Reservoir(index as u32), store);
            service.offer(Address::ReservoirInBackground(index as u32), background);
        }
        let channel = RpcChannel::new(line);
        self.handle.spawn(channel.run(arrivals, service, Rc::new(CallsOnly)));
        self.with_serving(|serving| serving.reservoirs.insert(subject, channel));
    }

    fn remember(
        self: &Rc<Self>,
        id: MigrationId,
        volume: Rc<lane::Volume>,
        known: Option<(ReplicaOf, Generation)>,
    ) {
        let (handle, me) = (self.handle.clone(), self.weak());
        let subject = Subject::Migration(self.place, id);
        let is_over = move || {
            let host = me.upgrade();
            let serving = host.as_ref().map(|host| host.serving.borrow());
            let serving = serving.as_ref().and_then(|serving| serving.as_ref());
            serving.is_none_or(|serving| serving.source_of(subject).is_none())
        };
        // The image at the host that the volume returns to stays, whatever the outcome.
        let consumed = known.filter(|(of, _)| matches!(of, ReplicaOf::Host { .. }) && !self.lacks_blocks());
        self.handle.spawn(resuming::remember(handle, volume, id, self.manner.rhythm, consumed, is_over));
    }
}
