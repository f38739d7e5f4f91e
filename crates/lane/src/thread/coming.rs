//! A volume comes from another host: its store here, and the target's half of the migration. And what other hosts get of
//! volumes that are here: those that have clients left there.

use std::rc::Rc;

use block::BlockDevice;
use block::filter::FlushDebt;
use chronicle::StayId;
use migration::journal::Summary;
use migration::message::ToSource;
use migration::source::Moves;
use migration::wire::{self, Message};
use migration::{CommitFault, HostId, MigrationId, Phase, VolumeIndex};
use tracing::{info, warn};

use super::Lane;
use crate::conductor::{
    ComingTogether, ComingVolume, Post, TargetBaton, TargetConductor, TargetMembership, TargetPlan,
};
use crate::control::Report;
use crate::filter::GateMode;
use crate::handle::{ComingOrder, ComingRole, Promoted, Refused};
use crate::lending::{ArrivingStore, LentImage};
use crate::peer::head::Address;
use crate::peer::{Conversation, Listener, PeerLine, Service, Speech};

impl Lane {
    /// Takes part in a migration from another host, or goes on with one. Until the volume is this host's its gate is
    /// closed, or leads to the host that has it.
    pub(super) async fn come(
        self: &Rc<Self>,
        order: &ComingOrder,
        store: Option<ArrivingStore>,
        line: PeerLine,
        role: ComingRole,
    ) -> Result<(), Refused> {
        self.check_idle()?;
        self.migration.opening.set(Some(order.migration));
        let store = match store {
            None => Ok((self.volume.store(), self.lent.take())),
            Some(store) => store.into_device(&self.handle, &self.engine).await,
        };
        let stay = StayId::Arrived(order.migration.0);
        let begun = self.volume.begin_stay(stay, order.generation, order.left_behind).await;
        self.migration.opening.set(None);
        if let Err(error) = begun {
            warn!(migration = %order.migration, %error, "what a former daemon kept of this stay of the volume does not go");
            return Err(Refused::NotRecorded(CommitFault::NotWritten));
        }
        self.begin_coming(order, store.map_err(Refused::Target)?, line, role)
    }

    fn begin_coming(
        self: &Rc<Self>,
        order: &ComingOrder,
        (store, lent): (Rc<dyn BlockDevice>, Option<Rc<LentImage>>),
        line: PeerLine,
        role: ComingRole,
    ) -> Result<(), Refused> {
        let conversation = Conversation::new(line.line);
        if conversation.speech() >= Speech::Parts {
            self.volume.clients().expect_word(self.handle.now());
        }
        let service = Service::new(self.handle.clone(), self.engine.buffers().clone());
        let index = match &role {
            ComingRole::Conducts(_) => VolumeIndex(0),
            ComingRole::Follows(membership) => membership.index(),
        };
        let store = FlushDebt::new(store);
        service.offer(Address::Replica(index.0), Rc::clone(&store) as Rc<dyn BlockDevice>);
        if let Some(lent) = &lent {
            service.offer_to_lend(Address::Replica(index.0), Rc::clone(lent));
        }
        let coming =
            ComingVolume { volume: Rc::clone(&self.volume), store, lent, image: order.image.clone() };
        let listener: Rc<dyn Listener> = match role {
            ComingRole::Conducts(together) => {
                let baton = self.conduct_coming(order, coming, together, &service, &conversation)?;
                Rc::new(FromSource { remote: order.remote, baton })
            }
            ComingRole::Follows(membership) => {
                self.follow_coming(order, coming, membership, &service, Rc::clone(&conversation));
                Rc::new(Nobody)
            }
        };
        // A machine that waits reads its disks when it begins (design §5.10): it does so when nothing of them is missing.
        if order.moves == Moves::Machine && self.volume.gate().mode() == GateMode::Hold {
            self.volume.open_for_reading();
        }
        self.handle.spawn(conversation.run(line.arrivals, service, listener));
        Ok(())
    }

    /// Conducts the target's half.
    fn conduct_coming(
        self: &Rc<Self>,
        order: &ComingOrder,
        coming: ComingVolume,
        together: ComingTogether,
        service: &Rc<Service>,
        conversation: &Rc<Conversation>,
    ) -> Result<TargetBaton, Refused> {
        let plan = TargetPlan {
            migration: order.migration,
            volumes: vec![coming],
            together,
            trial_max: self.settings.mirror_wait_max,
            service: Some(Rc::clone(service)),
            moves: order.moves,
        };
        let (handle, buffers) = (self.handle.clone(), self.engine.buffers());
        let (control, to_source) = (Rc::clone(&self.control), to_source(order.remote, conversation));
        let made = match &order.recorded {
            None => Some(TargetConductor::new(handle, control, buffers, plan, to_source)),
            Some(recorded) => TargetConductor::resume(handle, control, buffers, plan, to_source, recorded),
        };
        let Some((conductor, baton)) = made else {
            return Err(Refused::NotMigrating(order.migration));
        };
        self.migration.coming.replace(Some((order.migration, baton.clone())));
        let (lane, migration) = (Rc::clone(self), order.migration);
        self.handle.spawn(async move {
            let outcome = conductor.run().await;
            info!(%migration, ?outcome, "nothing is left to do here of a migration from another host");
            lane.migration.coming.replace(None);
            lane.migration.ended.notify();
            lane.control.entered(migration, Phase::Ended);
            lane.control.report(Report::Ended { migration, outcome, summary: Summary::default() });
        });
        Ok(baton)
    }

    /// Lends the volume to the conductor on another lane.
    fn follow_coming(
        &self,
        order: &ComingOrder,
        coming: ComingVolume,
        membership: TargetMembership,
        service: &Rc<Service>,
        conversation: Rc<Conversation>,
    ) {
        let (handle, buffers) = (self.handle.clone(), self.engine.buffers().clone());
        let (trial_max, service) = (self.settings.mirror_wait_max, Rc::clone(service));
        let follows = membership.follow(handle, buffers, coming, trial_max, service);
        self.migration.followed.set(Some(order.migration));
        let current = Rc::clone(&self.migration);
        self.handle.spawn(async move {
            follows.await;
            // The source uses the store until then.
            drop(conversation);
            current.followed.set(None);
            current.ended.notify();
        });
    }

    /// Takes the volume over without having heard COMMIT.
    pub(super) fn promote(&self, migration: MigrationId, promoted: Promoted) -> Result<(), Refused> {
        match &*self.migration.coming.borrow() {
            Some((coming, baton)) if *coming == migration => {
                self.volume.clients().expect_no_word();
                baton.promote(promoted);
                Ok(())
            }
            _ => Err(Refused::NotMigrating(migration)),
        }
    }

    /// Lets another host use the volume for the clients that it has left.
    pub(super) fn attach(&self, line: PeerLine, peer: HostId, own: HostId) {
        self.volume.clients().are_at(own);
        let conversation = Conversation::new(line.line);
        let service = Service::new(self.handle.clone(), self.engine.buffers().clone());
        service.offer_volume(Rc::clone(&self.volume), peer);
        self.handle.spawn(conversation.run(line.arrivals, Rc::clone(&service), Rc::new(Nobody)));
        self.attached.borrow_mut().push((conversation, service));
    }
}

/// The way to the source's half.
fn to_source(remote: MigrationId, conversation: &Rc<Conversation>) -> Post<ToSource> {
    let conversation = Rc::clone(conversation);
    Box::new(move |message| {
        match wire::encode(&Message::ToSource { migration: remote, message }) {
            Ok(message) => conversation.say(message),
            // The source asks again until it is answered.
            Err(error) => warn!(%remote, %error, "a message cannot be sent"),
        }
    })
}

/// Hears what the source's half says.
struct FromSource {
    remote: MigrationId,
    baton: TargetBaton,
}

impl Listener for FromSource {
    fn said(&self, message: &[u8]) {
        match wire::decode(message) {
            Ok(Message::ToTarget { migration, message }) if migration == self.remote => {
                self.baton.deliver(message);
            }
            Ok(_) => warn!(remote = %self.remote, "a message that is not for the target is left out"),
            Err(error) => warn!(remote = %self.remote, %error, "what the source said is not understood"),
        }
    }

    fn lost(&self, reason: &str) {
        warn!(remote = %self.remote, reason, "the way to the source is broken");
    }

    fn back(&self) {
        self.baton.link_back();
    }

    fn restarted(&self) {
        self.baton.link_back();
    }
}

/// Hears nothing: another host's clients only call.
struct Nobody;

impl Listener for Nobody {
    fn said(&self, _: &[u8]) {}

    fn lost(&self, _: &str) {}

    fn back(&self) {}

    fn restarted(&self) {}
}
