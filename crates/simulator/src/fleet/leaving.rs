//! Volumes leave this host for another: what the daemon does before and around the source's half.

use std::rc::Rc;
use std::time::Duration;

use block::{BlockDevice, Geometry, ZeroMode};
use chronicle::{Generation, ReplicaOf};
use lane::peer::head::Address;
use lane::peer::{PeerStore, RequestPriority};
use lane::resuming;
use lane::{
    Control, CopySettings, OutgoingGroup, OutgoingVolume, Replica, SourceDriver, SourcePlan, TargetContent,
};
use migration::journal::{
    FailureCode, Forwarding, ImageLocation, MigratingVolume, MigrationState, Outcome, Record, Side, Stage,
    Summary,
};
use migration::message::ToTarget;
use migration::source::{Moves, Peer};
use migration::wire::Message;
use migration::{Attempt, MigrationId, Phase};

use super::coming::Accepted;
use super::control::PartyControl;
use super::ear::say;
use super::link::Subject;
use super::party::{Party, volume_id};
use super::place::Place;
use super::serving::{Channel, SourceHalf};
use crate::disk::Role;

/// Pause before the other host is asked again to take a migration.
const ASK_AGAIN: Duration = Duration::from_millis(30);
/// How often it is asked.
const ASKS_MAX: u32 = 200;

impl Party {
    /// Begins to move all volumes to another host.
    pub(super) fn begin_migration(self: &Rc<Self>, target: Place) {
        let id = self.next_migration();
        let state = self.journal().acknowledged();
        let keep_source = self.random.borrow_mut().percent(self.manner.keep_percent);
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
            store: there.to_string(),
            forwarding: Forwarding::Always,
        };
        let volumes = moving.collect();
        let started = Record::MigrationStarted { migration: id, volumes, keep_source, side };
        self.world.note("migration", id.0, target.index() as u64);
        self.world.say(|| format!("{}: {id} to {target}, kept: {keep_source}", self.place));
        let (committed, me) = (self.journal().commit(vec![started]), Rc::clone(self));
        self.handle.spawn(async move {
            if committed.await.is_ok() {
                me.ask_to_take(id);
            }
        });
    }

    /// Asks the other host to take a migration, until it has said that it does, or for long enough.
    pub(super) fn ask_to_take(self: &Rc<Self>, id: MigrationId) {
        let (me, handle) = (Rc::clone(self), self.handle.clone());
        self.handle.spawn(async move {
            for _ in 0..ASKS_MAX {
                handle.sleep(ASK_AGAIN).await;
                let Some((peer, recorded)) = me.still_copies(id) else { return };
                if let Some(accepted) = me.asks_once(id, &peer, &recorded) {
                    me.leave(id, None, &accepted);
                    return;
                }
            }
            me.end_refused(id).await;
        });
    }

    /// Goes on with a migration that a restart interrupted, when the other host can be heard. It is not offered again: a
    /// host that knows nothing of it says so.
    pub(super) fn go_on_leaving(self: &Rc<Self>, id: MigrationId) {
        let (me, handle) = (Rc::clone(self), self.handle.clone());
        self.handle.spawn(async move {
            loop {
                handle.sleep(ASK_AGAIN).await;
                let Some((peer, recorded)) = me.still_copies(id) else { return };
                if me.can_hear(&peer) && peer.can_go_on(me.place, id) {
                    me.leave(id, Some(&recorded), &[]);
                    me.knock(id, peer.place);
                    return;
                }
            }
        });
    }

    /// Stands in for the calls on a store that is not there, which the daemon answers from its journal: of a migration that is
    /// over at the other host, or was never begun, its source is told so. Whoever goes on takes it for a try long past.
    fn knock(self: &Rc<Self>, id: MigrationId, peer: Place) {
        if let Some(channel) = self.channel(peer, Subject::Migration(self.place, id)) {
            let message = ToTarget::Prepare(Attempt::NONE);
            say(&channel.channel, &Message::ToTarget { migration: id, message });
        }
    }

    /// A migration that goes out from here and has not ended, with the host that it goes to.
    fn still_copies(&self, id: MigrationId) -> Option<(Rc<Self>, MigrationState)> {
        let state = self.journal().acknowledged();
        let recorded = state.migrations.get(&id).filter(|recorded| !recorded.has_ended())?.clone();
        let target = Place::of(recorded.side.peer()?.0);
        Some((Rc::clone(self.fleet()?.party(target)), recorded))
    }

    fn can_hear(&self, peer: &Self) -> bool {
        self.link_to(peer.place).is_some_and(|link| link.is_up())
    }

    fn asks_once(
        self: &Rc<Self>,
        id: MigrationId,
        peer: &Rc<Self>,
        recorded: &MigrationState,
    ) -> Option<Vec<Accepted>> {
        if self.can_hear(peer) { peer.takes(self, id, recorded) } else { None }
    }

    /// Ends a migration that the other host did not take. If it did after all, it asks, and is told that there is none.
    async fn end_refused(self: &Rc<Self>, id: MigrationId) {
        let outcome = Outcome::Failed { code: FailureCode::HostRefused, detail: "no answer".to_owned() };
        let ended = || Record::MigrationEnded {
            migration: id,
            outcome: outcome.clone(),
            summary: Summary::default(),
        };
        while self.journal().commit(vec![ended()]).await.is_err() {
            self.handle.sleep(ASK_AGAIN).await;
        }
        if let Some(peer) = self.peer_of(id) {
            self.channel(peer, Subject::Migration(self.place, id));
        }
    }

    /// The source's half begins, or goes on.
    pub(super) fn leave(
        self: &Rc<Self>,
        id: MigrationId,
        recorded: Option<&MigrationState>,
        accepted: &[Accepted],
    ) {
        let state = self.journal().acknowledged();
        let Some(known) = state.migrations.get(&id) else { return };
        let Some(peer) = known.side.peer().map(|(peer, _)| Place::of(peer)) else { return };
        let Some(channel) = self.channel(peer, Subject::Migration(self.place, id)) else { return };
        let Some(mut volumes) = self.leaving_volumes(known, recorded, accepted, peer, &channel) else {
            return;
        };
        let remembered: Vec<_> =
            volumes.iter().map(|leaving| (Rc::clone(&leaving.volume), leaving.replica.known)).collect();
        let copying = CopySettings {
            pacing: self.manner.pacing.clone(),
            limits: self.manner.limits,
            acknowledgement: self.manner.acknowledgement,
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
            moves: self.moves(),
        };
        let (subject, channel) = (channel.subject, Rc::clone(&channel.channel));
        let post = Box::new(move |message| say(&channel, &Message::ToTarget { migration: id, message }));
        let (handle, buffers) = (self.handle.clone(), &self.buffers);
        let control: Rc<dyn Control> = PartyControl::new(self, self.place);
        let made = match recorded {
            None => Some(SourceDriver::new(handle, control, buffers, plan, post)),
            Some(recorded) => SourceDriver::resume(handle, control, buffers, plan, post, recorded),
        };
        let Some((driver, source)) = made else { return };
        if recorded.is_some_and(|recorded| recorded.stage == Stage::Copying) && self.moves() == Moves::Vm {
            // What there was of its memory went with the daemon that carried it. Too late is as good.
            source.cancel();
        }
        let half = SourceHalf { subject, driver: source, followers };
        self.with_serving(|serving| serving.source.replace(Some(half)));
        if copies {
            self.enter_copying();
        }
        remembered.into_iter().for_each(|(volume, known)| self.remember(id, volume, known));
        let me = Rc::clone(self);
        self.handle.spawn(async move {
            let outcome = driver.run().await;
            me.world.say(|| format!("{}: outgoing {id} ended: {outcome:?}", me.place));
            me.world.note("migration ended", id.0, 0);
            me.world.set_phase(None);
            me.set_phase(None);
            me.with_serving(|serving| serving.source.replace(None));
            if let Some(fleet) = me.fleet() {
                fleet.draw_kill_after_end(me.place);
            }
        });
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
            Subject::Clients(..) => return None,
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
                disk.set_role(Role::Source);
            }
            let store = |priority| -> Rc<dyn BlockDevice> {
                let address = Address::Replica(index as u32);
                let geometry = Geometry { read_only: false, discards: true, ..self.manner.geometries[index] };
                Rc::new(PeerStore::new(Rc::clone(&channel.channel), address, geometry, priority))
            };
            let (content, replica) = match (recorded, accepted.get(index)) {
                // A target that has been copied to before holds anything.
                (Some(_), _) | (None, None) => (
                    TargetContent::Unknown,
                    recorded.map(|_| (ReplicaOf::Migration(id.0), volume.generation())),
                ),
                (None, Some(accepted)) => (accepted.content, accepted.replica_at(peer)),
            };
            if let Some((of @ ReplicaOf::Host { .. }, generation)) = replica
                && volume.chronicler().lacking(of, generation).is_some()
                && let Some(fleet) = self.fleet()
            {
                fleet.tally(super::tally::Event::IncrementalReturn);
            }
            let replica = Replica {
                bulk: store(RequestPriority::Bulk),
                mirrored: store(RequestPriority::Mirrored),
                content,
                known: replica,
                zeroes: ZeroMode::MayUnmap,
            };
            let source_image = moving.source.clone();
            let successor = self.elsewhere(index, peer, id);
            let channel = Some(Rc::clone(&channel.channel));
            let lease = None;
            leaving.push(OutgoingVolume { volume, replica, source_image, successor, channel, lease });
        }
        Some(leaving)
    }

    /// Remembers how far the copying of a volume is.
    fn remember(
        self: &Rc<Self>,
        id: MigrationId,
        volume: Rc<lane::Volume>,
        known: Option<(ReplicaOf, Generation)>,
    ) {
        let (handle, me) = (self.handle.clone(), self.weak());
        let subject = Subject::Migration(self.place, id);
        let is_over = move || {
            let party = me.upgrade();
            let serving = party.as_ref().map(|party| party.serving.borrow());
            let serving = serving.as_ref().and_then(|serving| serving.as_ref());
            serving.is_none_or(|serving| serving.source_of(subject).is_none())
        };
        let consumed = known.filter(|(of, _)| matches!(of, ReplicaOf::Host { .. }));
        self.handle.spawn(resuming::remember(handle, volume, id, self.manner.rhythm, consumed, is_over));
    }
}
