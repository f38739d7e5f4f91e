//! What a daemon has in memory, and how its volumes are served, leave and come.

use std::cell::RefCell;
use std::rc::{Rc, Weak};
use std::time::Duration;

use block::filter::Align;
use block::{BlockDevice, Geometry, ZeroMode};
use chronicle::{Epoch, Generation, ReplicaOf};
use lane::filter::GateMode;
use lane::peer::head::Address;
use lane::peer::{Conversation, Listener, PeerStore, Service, Urgency};
use lane::resuming;
use lane::{
    Baton, Beginning, Chronicler, ComingTogether, ComingVolume, Control, CopySettings, Keeper,
    LeavingTogether, LeavingVolume, Replica, SourceConductor, SourceFollower, SourcePlan, TargetBaton,
    TargetConductor, TargetContent, TargetPlan, Volume,
};
use migration::journal::{
    Forwarding, ImageLocation, MigratingVolume, MigrationState, Record, Side, Stage, State,
};
use migration::source::{Moves, Peer};
use migration::wire::{self, Message};
use migration::{MigrationId, recovery};

use super::control::PairControl;
use super::party::{Party, Place, volume_id};
use crate::disk::Role;
use crate::guest::Connection;

/// Epochs of one life of a daemon: as many as this is a power of two.
const EPOCHS_SHIFT: u32 = 20;
/// Pause before the other host is asked again to take a migration.
const ASK_AGAIN: Duration = Duration::from_millis(30);

/// What lives in a daemon.
pub(super) struct Serving {
    /// Those that are served here, or were until a migration that has not ended.
    volumes: Vec<Option<Rc<Volume>>>,
    /// The line of the migration, and what the other host may use over it.
    conversation: Rc<Conversation>,
    service: Rc<Service>,
    /// The line of the clients that stayed at A.
    forward: Rc<Conversation>,
    forward_service: Rc<Service>,
    pub(super) source: RefCell<Option<Baton>>,
    /// Volumes that are lent to the source's conductor, as by lanes of their own.
    followers: RefCell<Vec<SourceFollower>>,
    target: RefCell<Option<TargetBaton>>,
}

impl Party {
    /// Serves what the journal says is this host's, and goes on with migrations.
    pub(super) fn serve(self: &Rc<Self>, resumes: &[MigrationId]) {
        let state = self.journal().acknowledged();
        let [(line, arrivals), (forward, forward_arrivals)] =
            [0, 1].map(|number: usize| self.lines[number].open(self.place));
        let service = Service::new(self.handle.clone(), self.buffers.clone());
        let forward_service = Service::new(self.handle.clone(), self.buffers.clone());
        let (conversation, forwarding) = (Conversation::new(line), Conversation::new(forward));
        let ear = Rc::new(Ear { party: Weak::clone(&self.me), incarnation: self.incarnation() });
        self.handle.spawn(conversation.run(arrivals, Rc::clone(&service), ear));
        self.handle.spawn(forwarding.run(forward_arrivals, Rc::clone(&forward_service), Rc::new(Deaf)));
        let count = self.manner.block_sizes.len();
        let volumes: Vec<_> = (0..count).map(|index| self.volume(&state, index)).collect();
        *self.serving.borrow_mut() = Some(Serving {
            volumes,
            conversation,
            service,
            forward: forwarding,
            forward_service,
            source: RefCell::default(),
            followers: RefCell::default(),
            target: RefCell::default(),
        });
        match self.place {
            Place::A => self.check_and_connect_guests(),
            Place::B => (0..count).for_each(|index| self.offer_to_clients(index)),
        }
        if let (true, Some(machine)) = (!state.volumes.is_empty() && resumes.is_empty(), self.machine()) {
            machine.settle(self.place);
        }
        for id in resumes {
            let Some(recorded) = state.migrations.get(id) else { continue };
            match (&recorded.side, &recorded.stage) {
                (Side::Outgoing { .. }, Stage::Copying) => self.ask_to_take(*id),
                (Side::Outgoing { .. }, _) => self.leave(*id, Some(recorded)),
                (Side::Incoming { remote, .. }, _) => self.come(*id, *remote, recorded, Resumed::Yes),
                (Side::OneHost, _) => {}
            }
        }
    }

    /// The volume as this host has it: its own, or, past the commit point, behind a closed gate.
    fn volume(&self, state: &State, index: usize) -> Option<Rc<Volume>> {
        let id = volume_id(index);
        let (known, mode) = match (state.volumes.get(&id), state.moved.get(&id)) {
            (Some(known), _) => (known, GateMode::Open),
            (None, Some(moved)) => {
                let is_released = state.unfinished().any(|(id, _)| id == moved.migration);
                is_released.then_some((&moved.volume, GateMode::Hold))?
            }
            (None, None) => return None,
        };
        let disk = self.images.borrow().get(known.record.image.place.name()).cloned();
        // A source image that was retired before the end was recorded; nothing is read from it any more.
        let disk: Rc<dyn BlockDevice> = match disk {
            Some(disk) => disk,
            None => Rc::new(block::MemoryStore::new(self.manner.geometries[index].size)),
        };
        let kept = match mode {
            GateMode::Open => self.chronicles.load(id),
            _ => {
                self.chronicles.forget_now(id);
                None
            }
        };
        let beginning = Beginning {
            volume: id,
            block_size: self.manner.block_sizes[index],
            size_bytes: disk.geometry().size,
            // Each life of the daemon has numbers of its own, which are durable before it begins.
            reserved: Epoch(self.incarnation() << EPOCHS_SHIFT),
            regions: self.manner.regions,
        };
        let keeper: Rc<dyn Keeper> = Rc::clone(&self.chronicles) as Rc<dyn Keeper>;
        let chronicler = Chronicler::kept(beginning, kept, keeper, self.handle.clone());
        let volume = Volume::with_chronicler(id, chronicler, known.record.generation, disk);
        volume.gate().set_mode(mode);
        Some(volume)
    }

    fn offer_to_clients(&self, index: usize) {
        let serving = self.serving.borrow();
        let Some(serving) = &*serving else { return };
        if let Some(volume) = &serving.volumes[index] {
            let device = Align::new(volume.device(), self.buffers.clone(), self.handle.clone());
            serving.forward_service.offer(Address::Owner(volume_id(index).0), Rc::new(device));
        }
    }

    /// The volume at its owner on the other host.
    fn elsewhere(&self, index: usize) -> Rc<dyn BlockDevice> {
        let serving = self.serving.borrow();
        let geometry = Geometry { read_only: false, discards: true, ..self.manner.geometries[index] };
        let address = Address::Owner(volume_id(index).0);
        let conversation = serving.as_ref().map(|serving| Rc::clone(&serving.forward));
        match conversation {
            Some(forward) => Rc::new(PeerStore::new(forward, address, geometry, Urgency::Awaited)),
            None => Rc::new(block::MemoryStore::new(geometry.size)),
        }
    }

    /// Guests are checked against what is there after a power cut, and go on.
    fn check_and_connect_guests(&self) {
        let Some(pair) = self.pair() else { return };
        if pair.power_was_cut.take() {
            for (index, guest) in self.guests.iter().enumerate() {
                let found = pair.parties.iter().find_map(|party| party.content_of(index));
                if let Some(found) = found.or_else(|| self.left_content(index)) {
                    guest.check_after_power_cut(&found);
                }
            }
        }
        for (index, guest) in self.guests.iter().enumerate() {
            let volume = {
                let serving = self.serving.borrow();
                serving.as_ref().and_then(|serving| serving.volumes[index].clone())
            };
            let below = volume.map_or_else(|| self.elsewhere(index), |volume| volume.device());
            let device = Align::new(below, self.buffers.clone(), self.handle.clone());
            guest.connect(Connection { device: Rc::new(device), handle: self.handle.clone() });
        }
    }

    /// What a volume was when it was released, while nobody owns it.
    fn left_content(&self, index: usize) -> Option<Vec<u64>> {
        let state = self.journal().acknowledged();
        let image = &state.moved.get(&volume_id(index))?.volume.record.image;
        let disk = self.images.borrow().get(image.place.name()).cloned()?;
        Some(disk.with_medium(|medium| medium.current().to_vec()))
    }

    pub(super) fn has_nothing_to_do(&self) -> bool {
        let serving = self.serving.borrow();
        let Some(serving) = &*serving else { return false };
        let is_idle = serving.source.borrow().is_none() && serving.target.borrow().is_none();
        is_idle
            && self
                .journal()
                .look(|state, possible| possible.is_empty() && state.unfinished().next().is_none())
    }

    pub(super) fn cancel(&self) {
        if let Some(serving) = &*self.serving.borrow()
            && let Some(baton) = &*serving.source.borrow()
        {
            baton.cancel();
        }
    }

    /// Begins to move all volumes to the other host.
    pub(super) fn begin_migration(self: &Rc<Self>) {
        let id = self.next_migration();
        let state = self.journal().acknowledged();
        let moving = (0..self.manner.block_sizes.len()).filter_map(|index| {
            let volume = state.volumes.get(&volume_id(index))?;
            let target = ImageLocation::raw_file("b", format!("/b/{id}.{index}"));
            Some(MigratingVolume {
                volume: volume.record.volume,
                source: volume.record.image.clone(),
                target,
            })
        });
        let side = Side::Outgoing {
            peer: Self::host(self.other()),
            peer_name: "b".to_owned(),
            store: "b".to_owned(),
            forwarding: Forwarding::Always,
        };
        let started =
            Record::MigrationStarted { migration: id, volumes: moving.collect(), keep_source: false, side };
        self.world.note("migration", id.0, 0);
        let (committed, me) = (self.journal().commit(vec![started]), Rc::clone(self));
        self.handle.spawn(async move {
            if committed.await.is_ok() {
                me.ask_to_take(id);
            }
        });
    }

    /// Asks the other host to take a migration, until it has said that it does.
    fn ask_to_take(self: &Rc<Self>, id: MigrationId) {
        let (me, incarnation) = (Rc::clone(self), self.incarnation());
        self.world.clock.after(ASK_AGAIN, move || {
            let Some(pair) = me.pair().filter(|_| me.incarnation() == incarnation) else { return };
            let there = &pair.parties[me.other() as usize];
            let state = me.journal().acknowledged();
            let Some(recorded) = state.migrations.get(&id).filter(|recorded| !recorded.has_ended()) else {
                return;
            };
            if there.takes(id, recorded) {
                let handle = me.handle.clone();
                let recorded = (recorded.aborted.0 > 0).then(|| recorded.clone());
                handle.spawn(async move { me.leave(id, recorded.as_ref()) });
            } else {
                me.ask_to_take(id);
            }
        });
    }

    /// Takes a migration, if it serves; tells whether it has taken it, or knows it.
    fn takes(self: &Rc<Self>, remote: MigrationId, offered: &MigrationState) -> bool {
        if self.serving.borrow().is_none() {
            return false;
        }
        let source = Self::host(self.other());
        if self.journal().look(|state, _| state.incoming(source, remote).is_some()) {
            return true;
        }
        if !self.journal().look(|_, possible| possible.is_empty()) {
            // It may be on its way into the journal.
            return false;
        }
        let Some(pair) = self.pair() else { return false };
        let there = pair.parties[self.other() as usize].journal().acknowledged();
        let records = offered.volumes.iter().filter_map(|moving| {
            let mut record = there.volumes.get(&moving.volume)?.record.clone();
            record.image = moving.target.clone();
            Some(record)
        });
        let side =
            Side::Incoming { peer: source, peer_name: "a".to_owned(), remote, volumes: records.collect() };
        let id = self.next_migration();
        let (volumes, keep_source) = (offered.volumes.clone(), false);
        let started = Record::MigrationStarted { migration: id, volumes, keep_source, side };
        let (committed, me) = (self.journal().commit(vec![started]), Rc::clone(self));
        self.handle.spawn(async move {
            if committed.await.is_ok() {
                let state = me.journal().acknowledged();
                if let Some(recorded) = state.migrations.get(&id) {
                    me.come(id, remote, recorded, Resumed::No);
                }
            }
        });
        false
    }

    /// The target's half begins, or goes on.
    fn come(
        self: &Rc<Self>,
        id: MigrationId,
        remote: MigrationId,
        recorded: &MigrationState,
        resumed: Resumed,
    ) {
        let control: Rc<dyn Control> = PairControl::new(self);
        let mut coming = Vec::new();
        for (index, moving) in recorded.volumes.iter().enumerate() {
            let path = moving.target.place.name();
            let is_there = self.images.borrow().contains_key(path);
            if resumed == Resumed::Yes
                && !is_there
                && !matches!(recorded.stage, Stage::Copying | Stage::HandedBack)
            {
                self.world.violated("owner", || format!("{path} is gone, and promised"));
            }
            let disk = self.make_image(path, index);
            disk.set_role(Role::Target);
            let store: Rc<dyn BlockDevice> = disk.clone();
            let volume =
                Volume::new(moving.volume, self.manner.block_sizes[index], Generation(1), Rc::clone(&store));
            // A machine that waits reads what it will find.
            let waits = if self.moves() == Moves::Machine { GateMode::ReadsOnly } else { GateMode::Hold };
            volume.gate().set_mode(waits);
            disk.set_volume(&volume);
            coming.push(ComingVolume { volume, store, lent: None, image: moving.target.clone() });
        }
        let (conductor, baton) = {
            let mut serving = self.serving.borrow_mut();
            let Some(serving) = serving.as_mut() else { return };
            for (index, coming) in coming.iter().enumerate() {
                serving.service.offer(Address::Replica(index as u32), Rc::clone(&coming.store));
                serving.volumes[index] = Some(Rc::clone(&coming.volume));
            }
            let (trial_max, service) = (self.manner.limits.mirror_wait_max, &serving.service);
            let mut together = ComingTogether::default();
            for coming in coming.split_off(1) {
                let membership = together.add(coming.image.clone());
                let (handle, buffers) = (self.handle.clone(), self.buffers.clone());
                self.handle.spawn(membership.follow(handle, buffers, coming, trial_max, Rc::clone(service)));
            }
            let plan = TargetPlan {
                migration: id,
                volumes: coming,
                together,
                trial_max,
                service: Some(Rc::clone(service)),
                moves: self.moves(),
            };
            let post = {
                let conversation = Rc::clone(&serving.conversation);
                Box::new(move |message| say(&conversation, &Message::ToSource { migration: remote, message }))
            };
            let (handle, buffers) = (self.handle.clone(), &self.buffers);
            let made = match resumed {
                Resumed::No => Some(TargetConductor::new(handle, control, buffers, plan, post)),
                Resumed::Yes => TargetConductor::resume(handle, control, buffers, plan, post, recorded),
            };
            let Some(made) = made else { return };
            made
        };
        for index in 0..recorded.volumes.len() {
            self.offer_to_clients(index);
        }
        if let Some(serving) = &*self.serving.borrow() {
            serving.target.replace(Some(baton));
        }
        let me = Rc::clone(self);
        self.handle.spawn(async move {
            let outcome = conductor.run().await;
            me.world.say(|| format!("incoming {id} ended: {outcome:?}"));
            if let Some(serving) = &*me.serving.borrow() {
                serving.target.replace(None);
            }
        });
    }

    /// The source's half begins, or goes on.
    fn leave(self: &Rc<Self>, id: MigrationId, recorded: Option<&MigrationState>) {
        let state = self.journal().acknowledged();
        let Some(known) = state.migrations.get(&id) else { return };
        let control: Rc<dyn Control> = PairControl::new(self);
        let made = {
            let serving = self.serving.borrow();
            let Some(serving) = &*serving else { return };
            if serving.source.borrow().is_some() {
                return;
            }
            let mut leaving = Vec::new();
            for (index, moving) in known.volumes.iter().enumerate() {
                let Some(volume) = &serving.volumes[index] else { return };
                if let Some(disk) = self.images.borrow().get(moving.source.place.name()) {
                    disk.set_role(Role::Source);
                }
                let store = |urgency| -> Rc<dyn BlockDevice> {
                    let address = Address::Replica(index as u32);
                    let geometry =
                        Geometry { read_only: false, discards: true, ..self.manner.geometries[index] };
                    Rc::new(PeerStore::new(Rc::clone(&serving.conversation), address, geometry, urgency))
                };
                // A target that has been copied to before holds anything.
                let content = if recorded.is_some() { TargetContent::Unknown } else { TargetContent::Zero };
                let replica = Replica {
                    bulk: store(Urgency::Bulk),
                    mirrored: store(Urgency::Mirrored),
                    content,
                    known: recorded.map(|_| (ReplicaOf::Migration(id.0), volume.generation())),
                    zeroes: ZeroMode::MayUnmap,
                };
                leaving.push((index, Rc::clone(volume), replica, moving.source.clone()));
            }
            (leaving, Rc::clone(&serving.conversation))
        };
        let (leaving, conversation) = made;
        let remembered: Vec<_> = leaving.iter().map(|(_, volume, ..)| Rc::clone(volume)).collect();
        let leaving = leaving.into_iter().map(|(index, volume, replica, source_image)| LeavingVolume {
            volume,
            replica,
            source_image,
            successor: Some(self.elsewhere(index)),
            borrowing: None,
        });
        let mut volumes: Vec<_> = leaving.collect();
        let copying = CopySettings {
            pacing: self.manner.pacing.clone(),
            limits: self.manner.limits,
            acknowledgement: self.manner.acknowledgement,
        };
        let copies = recorded.is_none_or(|recorded| recorded.stage == Stage::Copying);
        let (mut together, mut followers) = (LeavingTogether::default(), Vec::new());
        for leaving in volumes.split_off(1) {
            let (id, generation) = (leaving.volume.id(), leaving.volume.generation());
            let membership = together.add(id, generation, leaving.source_image.clone());
            let copying = copies.then_some(&copying);
            let (follower, follows) = membership.follow(&self.handle, &self.buffers, copying, leaving);
            followers.push(follower);
            self.handle.spawn(follows);
        }
        let plan = SourcePlan {
            migration: id,
            volumes,
            together,
            keep_source: false,
            copying,
            switch_over_max: self.manner.limits.switch_over_max,
            peer: Peer::OtherHost,
            moves: self.moves(),
        };
        let post = Box::new(move |message| say(&conversation, &Message::ToTarget { migration: id, message }));
        let (handle, buffers) = (self.handle.clone(), &self.buffers);
        let made = match recorded {
            None => Some(SourceConductor::new(handle, control, buffers, plan, post)),
            Some(recorded) => SourceConductor::resume(handle, control, buffers, plan, post, recorded),
        };
        let Some((conductor, baton)) = made else { return };
        if recorded.is_some_and(|recorded| recorded.stage == Stage::Copying) && self.moves() == Moves::Machine
        {
            // What there was of its memory went with the daemon that carried it. Too late is as good.
            baton.cancel();
        }
        if let Some(serving) = &*self.serving.borrow() {
            serving.source.replace(Some(baton));
            serving.followers.replace(followers);
        }
        for volume in remembered {
            let (handle, me) = (self.handle.clone(), Rc::downgrade(self));
            let is_over = move || {
                let party = me.upgrade();
                let serving = party.as_ref().map(|party| party.serving.borrow());
                let source = serving.as_deref().and_then(|serving| Some(serving.as_ref()?.source.borrow()));
                source.is_none_or(|source| source.as_ref().is_none_or(|baton| baton.migration() != id))
            };
            self.handle.spawn(resuming::remember(handle, volume, id, self.manner.rhythm, None, is_over));
        }
        let me = Rc::clone(self);
        self.handle.spawn(async move {
            let outcome = conductor.run().await;
            me.world.say(|| format!("outgoing {id} ended: {outcome:?}"));
            me.world.note("migration ended", id.0, 0);
            me.world.set_phase(None);
            if let Some(serving) = &*me.serving.borrow() {
                serving.source.replace(None);
            }
        });
    }
}

/// Whether a half goes on with what a restart interrupted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Resumed {
    No,
    Yes,
}

fn say(conversation: &Conversation, message: &Message) {
    if let Ok(bytes) = wire::encode(message) {
        conversation.say(bytes);
    }
}

/// Hears what the other host says of migrations: its halves are told, or the journal answers.
struct Ear {
    party: Weak<Party>,
    incarnation: u64,
}

impl Ear {
    fn with(&self, tell: impl FnOnce(&Party, &Serving)) {
        let Some(party) = self.party.upgrade().filter(|party| party.incarnation() == self.incarnation) else {
            return;
        };
        if let Some(serving) = &*party.serving.borrow() {
            tell(&party, serving);
        }
    }
}

impl Listener for Ear {
    fn said(&self, message: &[u8]) {
        self.with(|party, serving| {
            let peer = Party::host(party.other());
            let state = party.journal().acknowledged();
            match wire::decode(message) {
                Ok(Message::ToSource { migration, message }) => match &*serving.source.borrow() {
                    Some(baton) if baton.migration() == migration => baton.deliver(message),
                    _ => {
                        if let Some(message) = recovery::answer_as_source(&state, peer, migration, &message) {
                            say(&serving.conversation, &Message::ToTarget { migration, message });
                        }
                    }
                },
                Ok(Message::ToTarget { migration, message }) => {
                    let known = state.incoming(peer, migration);
                    let under_way = known.is_some_and(|(_, recorded)| !recorded.has_ended());
                    match &*serving.target.borrow() {
                        Some(baton) if under_way => baton.deliver(message),
                        _ => {
                            let answer = recovery::answer_as_target(&state, peer, migration, &message);
                            if let Some(message) = answer {
                                say(&serving.conversation, &Message::ToSource { migration, message });
                            }
                        }
                    }
                }
                other => party.world.violated("link", || format!("a message that nobody sends: {other:?}")),
            }
        });
    }

    fn lost(&self, _: &str) {
        self.with(|_, serving| {
            if let Some(baton) = &*serving.source.borrow() {
                baton.link_lost();
            }
        });
    }

    fn back(&self) {
        self.with(|_, serving| {
            if let Some(baton) = &*serving.source.borrow() {
                baton.link_back();
            }
            if let Some(baton) = &*serving.target.borrow() {
                baton.link_back();
            }
        });
    }

    fn restarted(&self) {
        self.with(|_, serving| {
            if let Some(baton) = &*serving.source.borrow() {
                serving.followers.borrow().iter().for_each(SourceFollower::peer_restarted);
                baton.peer_restarted();
                baton.link_back();
            }
            if let Some(baton) = &*serving.target.borrow() {
                baton.link_back();
            }
        });
    }
}

/// Hears nothing: of a conversation that is only calls.
pub(super) struct Deaf;

impl Listener for Deaf {
    fn said(&self, _: &[u8]) {}

    fn lost(&self, _: &str) {}

    fn back(&self) {}

    fn restarted(&self) {}
}
