//! The arrival of a volume from another host: its store here, and the target's half of the migration. Also serves volumes of this
//! host to the remaining clients at other hosts.

use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use block::filter::FlushDebt;
use block::{BlockDevice, IoError};
use chronicle::StayId;
use futures_util::future::{Either, select};
use migration::journal::{Outcome, Summary};
use migration::message::ToSource;
use migration::source::Moves;
use migration::wire::{self, Message};
use migration::{CommitFault, HostId, MigrationId, Phase, VolumeIndex};
use tracing::{info, warn};

use super::Lane;
use crate::control::Report;
use crate::copies_elsewhere::Learner;
use crate::driver::{
    IncomingGroup, IncomingVolume, SendMessage, TargetDriver, TargetHandle, TargetParticipation, TargetPlan,
};
use crate::handle::{IncomingChannels, IncomingOrder, IncomingRole, Promoted};
use crate::peer::head::Address;
use crate::peer::{ArrivingChunks, CallsOnly, Listener, PeerChannel, RpcChannel, Service};
use crate::refused::Refused;
use crate::shared_storage::{ArrivingStore, LeasedImage};
use crate::stack::{GateMode, Home};

/// What a volume arrives in, and by.
pub struct Arriving {
    /// The store that it arrives in.
    pub store: Rc<dyn BlockDevice>,
    /// The same store, if the source's host may lease its image.
    pub leased: Option<Rc<LeasedImage>>,
    /// Leads to the blocks that may be missing after the handover; `None`: the volume arrives complete.
    pub reservoir: Option<Rc<RpcChannel>>,
    /// Leads to the source's half.
    pub rpc: Rc<RpcChannel>,
    /// Answers the source's calls.
    pub service: Rc<Service>,
}

/// The longest wait for the end of a migration whose driver has ended.
const FOLLOWER_END_MAX: Duration = Duration::from_secs(1);
/// The longest wait for writes of an earlier return: their disk may never answer.
const EARLIER_END_MAX: Duration = Duration::from_secs(5);

impl Lane {
    /// Takes part in a migration from another host, or continues it. Until this host owns the volume, its gate is closed or
    /// leads to the owner.
    pub(super) async fn come(
        self: &Rc<Self>,
        order: &IncomingOrder,
        store: Option<ArrivingStore>,
        channels: IncomingChannels,
        role: IncomingRole,
    ) -> Result<(), Refused> {
        self.check_idle()?;
        self.migration.opening.set(Some(order.migration));
        let store = match (self.left_store(order), store) {
            (Some(left), _) => Ok((left, None)),
            // N.B. a stack that leads to another host is no store for an arriving volume.
            (None, None) if matches!(self.volume.home(), Home::Elsewhere(_)) => Err(IoError::Closed),
            (None, None) => Ok((self.volume.store(), self.leased.take())),
            (None, Some(store)) => store.into_device(&self.handle, &self.engine).await,
        };
        let (store, leased) = match store {
            Ok(store) => store,
            Err(error) => {
                self.migration.opening.set(None);
                return Err(Refused::Target(error));
            }
        };
        self.prepare_arrival(order, &store).await?;
        let IncomingChannels { source: channel, reservoir } = channels;
        let rpc = RpcChannel::new(channel.channel);
        let service = Service::new(self.handle.clone(), self.engine.buffers().clone());
        let reservoir = reservoir.map(|reservoir| self.reservoir_elsewhere(reservoir));
        let arriving =
            Arriving { store, leased, reservoir, rpc: Rc::clone(&rpc), service: Rc::clone(&service) };
        let listener: Rc<dyn Listener> = match self.arrive(order, arriving, role)? {
            Some(driver) => Rc::new(FromSource { remote: order.remote, driver }),
            None => Rc::new(CallsOnly),
        };
        self.handle.spawn(rpc.run(channel.events, service, listener));
        Ok(())
    }

    /// Returns the store that the volume has left and returns into, if it is open here.
    pub fn left_store(&self, order: &IncomingOrder) -> Option<Rc<dyn BlockDevice>> {
        self.reservoir.store_of(order.takes_back?)
    }

    /// Begins the residency of an arriving volume in `store`, once nothing of an earlier return is written there.
    ///
    /// # Errors
    /// [`Refused`]; the volume does not arrive.
    pub async fn prepare_arrival(
        &self,
        order: &IncomingOrder,
        store: &Rc<dyn BlockDevice>,
    ) -> Result<(), Refused> {
        self.migration.opening.set(Some(order.migration));
        let prepared = self.prepare(order, store).await;
        self.migration.opening.set(None);
        prepared
    }

    async fn prepare(&self, order: &IncomingOrder, store: &Rc<dyn BlockDevice>) -> Result<(), Refused> {
        let before = self.came_by();
        if let Some(before) = before.filter(|_| order.takes_back.is_some()) {
            // N.B. an image into which the volume returned before: earlier writes in flight must not land on later ones. Their
            // service is kept until they end, because the return after this one has to wait for them as well.
            let late = self.handle.sleep(EARLIER_END_MAX);
            if let Either::Right(_) = select(pin!(before.end()), pin!(late)).await {
                return Err(Refused::StillWritten);
            }
        }
        if let Some(left_by) = order.takes_back {
            self.reservoir.reopen(left_by, Rc::clone(store));
        }
        let stay = StayId::Arrived(order.migration.0);
        let size_bytes = store.geometry().size;
        let begun = self.volume.begin_stay(stay, order.generation, order.left_behind, size_bytes).await;
        begun.map_err(|error| {
            warn!(migration = %order.migration, %error, "cannot delete an earlier daemon's record of this residency");
            Refused::NotRecorded(CommitFault::NotWritten)
        })
    }

    /// Returns the service for the calls of the source from which the volume last returned into the image that it had left here.
    pub fn came_by(&self) -> Option<Rc<Service>> {
        self.migration.came_by.borrow().clone()
    }

    /// Takes part in a migration from another host, after [`Self::prepare_arrival`]. Returns the driver, if this lane has it: the
    /// caller delivers the source's messages to it, and runs the channel and the service.
    ///
    /// # Errors
    /// [`Refused::NotMigrating`]: nothing is left to do.
    pub fn arrive(
        self: &Rc<Self>,
        order: &IncomingOrder,
        arriving: Arriving,
        role: IncomingRole,
    ) -> Result<Option<TargetHandle>, Refused> {
        let Arriving { store, leased, reservoir, rpc, service } = arriving;
        self.volume.clients().expect_word(self.handle.now());
        let index = match &role {
            IncomingRole::Drives(_) => VolumeIndex(0),
            IncomingRole::Joins(participation) => participation.index(),
        };
        if order.takes_back.is_some() {
            self.migration.came_by.replace(Some(Rc::clone(&service)));
        }
        let store = FlushDebt::new(store);
        service.offer(Address::Replica(index.0), Rc::clone(&store) as Rc<dyn BlockDevice>);
        service
            .offer_chunks(Address::Replica(index.0), ArrivingChunks::new(self.handle.clone(), self.disks()));
        if let Some(leased) = &leased {
            service.offer_lease(Address::Replica(index.0), Rc::clone(leased));
        }
        let learner = Learner::new(&self.volume);
        service.offer_learner(Address::Copies(index.0), Rc::clone(&learner));
        let filling = reservoir.map(|reservoir| {
            let missing = order.missing.clone().map(|missing| *missing);
            self.may_be_filled(order.migration, Rc::clone(&store), (&reservoir, index), missing)
        });
        if let Some(filling) = &filling {
            service.offer_filling(Address::Replica(index.0), Rc::clone(filling));
            if self.volume.gate().mode() == GateMode::Hold {
                // N.B. a waiting VM reads from its source: not all blocks are here when it begins.
                self.volume.wait_at(Rc::clone(filling) as Rc<dyn BlockDevice>);
            }
        }
        let volume = Rc::clone(&self.volume);
        let coming = IncomingVolume { volume, store, leased, filling, image: order.image.clone() };
        let driver = match role {
            IncomingRole::Drives(group) => {
                Some(self.drive_incoming(order, coming, group, (&service, &learner), &rpc)?)
            }
            IncomingRole::Joins(participation) => {
                self.join_incoming(order, coming, participation, (&service, learner), rpc);
                None
            }
        };
        // A waiting VM reads its disks when it begins (design §5.10), once all blocks are reachable. N.B. not for a returning
        // volume: clients that stayed here may wait as well, and would read outdated data.
        let waits = self.volume.gate().mode() == GateMode::Hold && order.takes_back.is_none();
        if order.moves == Moves::Vm && waits {
            self.volume.open_for_reading();
        }
        Ok(driver)
    }

    fn drive_incoming(
        self: &Rc<Self>,
        order: &IncomingOrder,
        coming: IncomingVolume,
        group: IncomingGroup,
        (service, learner): (&Rc<Service>, &Rc<Learner>),
        rpc: &Rc<RpcChannel>,
    ) -> Result<TargetHandle, Refused> {
        let plan = TargetPlan {
            migration: order.migration,
            volumes: vec![coming],
            group,
            trial_max: self.settings.limits.mirror_wait_max,
            service: Some(Rc::clone(service)),
            moves: order.moves,
            patience: Some(order.patience),
        };
        let (handle, buffers) = (self.handle.clone(), self.engine.buffers());
        let (control, to_source) = (Rc::clone(&self.control), to_source(order.remote, rpc));
        let made = match &order.recorded {
            None => Some(TargetDriver::new(handle, control, buffers, plan, to_source)),
            Some(recorded) => TargetDriver::resume(handle, control, buffers, plan, to_source, recorded),
        };
        let Some((driver, target)) = made else {
            return Err(Refused::NotMigrating(order.migration));
        };
        self.migration.coming.replace(Some((order.migration, target.clone())));
        let (lane, migration) = (Rc::clone(self), order.migration);
        let (learner, rpc) = (Rc::clone(learner), Rc::clone(rpc));
        self.handle.spawn(async move {
            let outcome = driver.run().await;
            lane.close_reservoir_of_owner();
            info!(%migration, ?outcome, "a migration from another host is finished here");
            lane.migration.coming.replace(None);
            lane.migration.ended.notify();
            lane.control.entered(migration, Phase::Ended);
            let has_moved = matches!(outcome, Outcome::Moved { .. });
            lane.control.report(Report::Ended { migration, outcome, summary: Summary::default() });
            if has_moved {
                learner.has_learnt(&lane.handle).await;
            }
            drop(rpc);
        });
        Ok(target)
    }

    fn join_incoming(
        self: &Rc<Self>,
        order: &IncomingOrder,
        coming: IncomingVolume,
        participation: TargetParticipation,
        (service, learner): (&Rc<Service>, Rc<Learner>),
        rpc: Rc<RpcChannel>,
    ) {
        let (handle, buffers) = (self.handle.clone(), self.engine.buffers().clone());
        let (trial_max, service) = (self.settings.limits.mirror_wait_max, Rc::clone(service));
        let follows = participation.follow(handle, buffers, coming, trial_max, service);
        self.migration.followed.set(Some(order.migration));
        let lane = Rc::clone(self);
        self.handle.spawn(async move {
            follows.await;
            lane.close_reservoir_of_owner();
            lane.migration.followed.set(None);
            lane.migration.ended.notify();
            // The source used the store until then, and may still send missing sets of copies.
            learner.has_learnt(&lane.handle).await;
            drop(rpc);
        });
    }

    /// Waits for the end of a migration that another lane drives: the driver may have ended before.
    pub(super) async fn let_arrival_end(&self) {
        let has_ended =
            self.migration.ended.wait_for(|| self.migration.followed.get().is_none().then_some(()));
        select(pin!(has_ended), self.handle.sleep(FOLLOWER_END_MAX)).await;
    }

    /// Closes the reservoir if this host owns the volume again.
    fn close_reservoir_of_owner(&self) {
        if matches!(self.volume.home(), Home::Here(_)) && self.volume.gate().mode() != GateMode::Hold {
            self.reservoir.close();
        }
    }

    pub(super) fn promote(&self, migration: MigrationId, promoted: Promoted) -> Result<(), Refused> {
        match &*self.migration.coming.borrow() {
            Some((coming, driver)) if *coming == migration => {
                self.volume.clients().expect_no_word();
                driver.promote(promoted);
                Ok(())
            }
            _ => Err(Refused::NotMigrating(migration)),
        }
    }

    /// Lets another host use the volume for its remaining clients.
    pub(super) fn attach(&self, channel: PeerChannel, peer: HostId, own: HostId) {
        self.volume.clients().are_at(own);
        let rpc = RpcChannel::new(channel.channel);
        let service = Service::new(self.handle.clone(), self.engine.buffers().clone());
        service.offer_volume(Rc::clone(&self.volume), peer);
        self.handle.spawn(rpc.run(channel.events, Rc::clone(&service), Rc::new(CallsOnly)));
        self.attached.borrow_mut().push((rpc, service));
    }
}

fn to_source(remote: MigrationId, rpc: &Rc<RpcChannel>) -> SendMessage<ToSource> {
    let rpc = Rc::clone(rpc);
    Box::new(move |message| {
        match wire::encode(&Message::ToSource { migration: remote, message }) {
            Ok(message) => rpc.send_message(message),
            // The source asks again until it is answered.
            Err(error) => warn!(%remote, %error, "a message cannot be sent"),
        }
    })
}

struct FromSource {
    remote: MigrationId,
    driver: TargetHandle,
}

impl Listener for FromSource {
    fn message(&self, message: &[u8]) {
        match wire::decode(message) {
            Ok(Message::ToTarget { migration, message }) if migration == self.remote => {
                self.driver.deliver(message);
            }
            Ok(_) => warn!(remote = %self.remote, "ignored a message that is not for the target"),
            Err(error) => warn!(remote = %self.remote, %error, "ignored an invalid message of the source"),
        }
    }

    fn link_lost(&self, reason: &str) {
        warn!(remote = %self.remote, reason, "the channel to the source is broken");
        self.driver.link_lost();
    }

    fn link_restored(&self) {
        self.driver.link_back();
    }

    fn peer_restarted(&self) {
        self.driver.link_back();
    }
}
