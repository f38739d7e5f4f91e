//! Volumes come to this host from another: what the daemon does before and around the target's half.

use std::rc::Rc;

use block::BlockDevice;
use block::filter::FlushDebt;
use chronicle::{Generation, ReplicaOf, StayId};
use lane::filter::GateMode;
use lane::peer::head::Address;
use lane::{Control, Home, IncomingGroup, IncomingVolume, TargetContent, TargetDriver, TargetPlan};
use migration::journal::{MigrationState, Record, Side, Stage};
use migration::source::Moves;
use migration::wire::Message;
use migration::{MigrationId, StayKey};

use super::control::PartyControl;
use super::ear::say;
use super::link::Subject;
use super::party::Party;
use super::place::Place;
use super::serving::Resumed;
use crate::disk::Role;

/// What a target says of a volume that it takes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Accepted {
    pub(super) content: TargetContent,
    /// The replica that has become the target: by which departure it was left, and of which generation it is.
    replica: Option<(MigrationId, Generation)>,
}

impl Accepted {
    /// The replica that has become the target, as the source may know it.
    pub(super) fn replica_at(&self, place: Place) -> Option<(ReplicaOf, Generation)> {
        let (departure, generation) = self.replica?;
        Some((ReplicaOf::Host { host: place.host().0, departure: departure.0 }, generation))
    }
}

impl Party {
    /// Takes a migration, if there is room for it; tells what it has of each volume once all is ready. `None`: not yet.
    pub(super) fn takes(
        self: &Rc<Self>,
        source: &Rc<Party>,
        remote: MigrationId,
        offered: &MigrationState,
    ) -> Option<Vec<Accepted>> {
        let from = source.place;
        let subject = Subject::Migration(from, remote);
        let known = self.journal().look(|state, _| Some(state.incoming(from.host(), remote)?.1.has_ended()));
        match known {
            Some(true) => return Some(Vec::new()),
            Some(false) => {
                let is_ready = self.with_serving(|serving| serving.target_of(subject).is_some())?;
                let answer = self.answers.borrow().get(&subject).cloned();
                // Nothing: the answer was lost with a daemon.
                return is_ready.then(|| answer.unwrap_or_default());
            }
            None => {}
        }
        if !self.has_nothing_to_do() || !self.owners().1.is_empty() {
            return None;
        }
        let branch = source.journal().look(|state, _| source.branch_in(state));
        if !self.fleet().is_some_and(|fleet| fleet.may_come(branch, self.place)) {
            return None;
        }
        self.branch.set(branch);
        let there = source.journal().acknowledged();
        let records = offered.volumes.iter().filter_map(|moving| {
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
        let volumes = offered.volumes.clone();
        let started = Record::MigrationStarted { migration: id, volumes, keep_source: false, side };
        let (committed, me) = (self.journal().commit(vec![started]), Rc::clone(self));
        let keeps = offered.keep_source;
        self.handle.spawn(async move {
            if committed.await.is_ok() {
                let state = me.journal().acknowledged();
                if let Some(recorded) = state.migrations.get(&id) {
                    me.make_images(subject, recorded);
                    me.comes_from(id, (from, remote), recorded, Resumed::No, keeps).await;
                }
            }
        });
        None
    }

    /// Tells whether the source's half of a migration that a restart of its host interrupted can begin: the target's waits for
    /// it, or the journal answers for a migration that is over here, or was never begun.
    pub(super) fn can_go_on(self: &Rc<Self>, source: Place, remote: MigrationId) -> bool {
        let subject = Subject::Migration(source, remote);
        let known =
            self.journal().look(|state, _| Some(state.incoming(source.host(), remote)?.1.has_ended()));
        match known {
            Some(false) => self.with_serving(|serving| serving.target_of(subject).is_some()) == Some(true),
            Some(true) | None => self.channel(source, subject).is_some(),
        }
    }

    /// Makes the images of volumes that come, or takes those that an earlier stay has left.
    fn make_images(&self, subject: Subject, recorded: &MigrationState) {
        let make = |(index, moving): (usize, &migration::journal::MigratingVolume)| {
            let path = moving.target.place.name();
            match self.take_kept(moving.volume, path) {
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

    /// The target's half goes on after a restart.
    pub(super) fn come(
        self: &Rc<Self>,
        id: MigrationId,
        remote: (Place, MigrationId),
        recorded: &MigrationState,
        resumed: Resumed,
    ) {
        let (me, recorded) = (Rc::clone(self), recorded.clone());
        // Whether the source keeps its images is not in this journal; to remember for nobody costs little.
        self.handle.spawn(async move { me.comes_from(id, remote, &recorded, resumed, true).await });
    }

    async fn comes_from(
        self: &Rc<Self>,
        id: MigrationId,
        (from, remote): (Place, MigrationId),
        recorded: &MigrationState,
        resumed: Resumed,
        keeps: bool,
    ) {
        let stay = StayId::Arrived(id.0);
        let coming = self.wait_for_volumes(stay, recorded, resumed);
        let left_behind = keeps.then_some(ReplicaOf::Host { host: from.host().0, departure: remote.0 });
        for (coming, generation) in coming.iter().zip(generations_of(recorded)) {
            let begun = coming.volume.begin_stay(stay, generation, left_behind).await;
            if let Err(error) = begun {
                self.world.violated("chronicle", || error.to_string());
            }
        }
        self.drive_incoming(id, (from, remote), recorded, resumed, coming);
    }

    /// Makes what waits for each volume; of one that has left clients here, it is what they use.
    fn wait_for_volumes(
        &self,
        stay: StayId,
        recorded: &MigrationState,
        resumed: Resumed,
    ) -> Vec<IncomingVolume> {
        let mut waiting = Vec::new();
        for ((index, moving), generation) in recorded.volumes.iter().enumerate().zip(generations_of(recorded))
        {
            let path = moving.target.place.name();
            let is_there = self.images.borrow().contains_key(path);
            if resumed == Resumed::Yes && !is_there && recorded.stage != Stage::Copying {
                self.world.violated("owner", || format!("{path} is gone, and {:?}", recorded.stage));
            }
            let disk = self.make_image(path, index);
            disk.set_role(Role::Target);
            let store: Rc<dyn BlockDevice> = disk.clone();
            let home = self.with_serving(|serving| serving.volumes[index].clone()).flatten();
            let volume = match home {
                Some(volume) => {
                    let key = StayKey { volume: moving.volume, stay };
                    self.chronicles.note_image(key, disk.look());
                    volume
                }
                None => {
                    let (home, look) = (Home::Here(Rc::clone(&store)), Some(disk.look()));
                    let volume = self.make_volume(index, stay, generation, home, look);
                    volume.gate().set_mode(GateMode::Hold);
                    volume
                }
            };
            disk.set_volume(&volume);
            self.with_serving(|serving| serving.volumes[index] = Some(Rc::clone(&volume)));
            self.offer_to_clients(index);
            let store = FlushDebt::new(store);
            waiting.push(IncomingVolume { volume, store, leased: None, image: moving.target.clone() });
        }
        waiting
    }

    fn drive_incoming(
        self: &Rc<Self>,
        id: MigrationId,
        (from, remote): (Place, MigrationId),
        recorded: &MigrationState,
        resumed: Resumed,
        mut coming: Vec<IncomingVolume>,
    ) {
        let subject = Subject::Migration(from, remote);
        let Some(channel) = self.channel(from, subject) else { return };
        for (index, coming) in coming.iter().enumerate() {
            channel
                .service
                .offer(Address::Replica(index as u32), Rc::clone(&coming.store) as Rc<dyn BlockDevice>);
            // A VM that waits reads what it will find.
            if self.moves() == Moves::Vm && coming.volume.gate().mode() == GateMode::Hold {
                coming.volume.gate().set_mode(GateMode::ReadsOnly);
            }
        }
        let (trial_max, service) = (self.manner.limits.mirror_wait_max, &channel.service);
        let mut group = IncomingGroup::default();
        for coming in coming.split_off(1) {
            let participation = group.add(coming.image.clone());
            let (handle, buffers) = (self.handle.clone(), self.buffers.clone());
            self.handle.spawn(participation.follow(handle, buffers, coming, trial_max, Rc::clone(service)));
        }
        let plan = TargetPlan {
            migration: id,
            volumes: coming,
            group,
            trial_max,
            service: Some(Rc::clone(service)),
            moves: self.moves(),
        };
        let channel = Rc::clone(&channel.channel);
        let post = Box::new(move |message| say(&channel, &Message::ToSource { migration: remote, message }));
        let control: Rc<dyn Control> = PartyControl::new(self, from);
        let (handle, buffers) = (self.handle.clone(), &self.buffers);
        let made = match resumed {
            Resumed::No => Some(TargetDriver::new(handle, control, buffers, plan, post)),
            Resumed::Yes => TargetDriver::resume(handle, control, buffers, plan, post, recorded),
        };
        let Some((driver, target)) = made else { return };
        self.with_serving(|serving| serving.target.replace(Some((subject, target))));
        let me = Rc::clone(self);
        self.handle.spawn(async move {
            let outcome = driver.run().await;
            me.world.say(|| format!("{}: incoming {id} ended: {outcome:?}", me.place));
            me.with_serving(|serving| serving.target.replace(None));
            me.see_arrival(id);
        });
    }

    /// Once volumes have come, or have not: a lane that only waited for one that did not is of no use.
    fn see_arrival(&self, id: MigrationId) {
        let state = self.journal().acknowledged();
        let Some(recorded) = state.migrations.get(&id) else { return };
        for (index, moving) in recorded.volumes.iter().enumerate() {
            let is_known =
                state.volumes.contains_key(&moving.volume) || state.moved.contains_key(&moving.volume);
            if !is_known {
                self.with_serving(|serving| serving.volumes[index] = None);
            }
        }
    }
}

/// The generations that the volumes of an incoming migration have at its source.
fn generations_of(recorded: &MigrationState) -> Vec<Generation> {
    match &recorded.side {
        Side::Incoming { volumes, .. } => volumes.iter().map(|record| record.generation).collect(),
        Side::OneHost | Side::Outgoing { .. } => Vec::new(),
    }
}
