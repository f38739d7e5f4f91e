//! The departure of a volume for another host: its store there, and the source's half of the migration.

use std::rc::Rc;
use std::time::Duration;

use block::device::ALIGNMENT;
use block::{BlockDevice, BufferPool, Geometry, Handle};
use chronicle::ReplicaOf;
use migration::journal::Stage;
use migration::message::ToTarget;
use migration::source::{Moves, Peer};
use migration::wire::{self, Message};
use migration::{Carried, MigrationId, PacingSettings, VolumeId, VolumeIndex};
use tracing::warn;

use super::Lane;
use crate::control::Report;
use crate::driver::{
    Chunks, CopySettings, GivesWay, OutgoingGroup, OutgoingVolume, Replica, SendMessage, SourceDriver,
    SourceHandle, SourceParticipantRef, SourceParticipation, SourcePlan, TimeLimits,
};
use crate::handle::{OutgoingChannels, OutgoingOrder, OutgoingRole, Rest};
use crate::peer::head::Address;
use crate::peer::{
    CallsOnly, Listener, PeerChannel, PeerStore, PeerVolume, RequestPriority, RpcChannel, Service,
};
use crate::refused::Refused;
use crate::shared_storage::{HeldLease, ReplicaStore, SharedImage};
use crate::stack::Home;

/// The assumed capacity of a link in bytes a second: 1.25 Gbit. A faster long link is not filled, a slower one
/// has a longer queue.
const LINK_BYTES_PER_SECOND: f64 = 156e6;
/// The limit of chunks in flight: what the transport's window admits of bulk.
const DEPTH_MAX: f64 = 64.0;
/// The longest hold of a write whose guest may be about to be stopped: the VM cannot stop while a write is held (hard case 16).
const VM_WAIT_MAX: Duration = Duration::from_millis(50);

impl Lane {
    pub(super) fn leave(
        self: &Rc<Self>,
        order: &OutgoingOrder,
        channels: OutgoingChannels,
        role: OutgoingRole,
    ) -> Result<(), Refused> {
        self.check_idle()?;
        let OutgoingChannels { replica: channel, owner } = channels;
        let rpc = RpcChannel::new(channel.channel);
        let (handle, volume) = (&self.handle, self.settings.volume);
        let successor = match (owner, self.volume.home()) {
            (Some(owner), _) => {
                owner_elsewhere(handle, self.engine.buffers(), volume, owner, self.geometry_elsewhere())
            }
            (None, Home::Elsewhere(owner)) => owner,
            (None, Home::Here(_)) => return Err(Refused::NotMigrating(order.migration)),
        };
        let listener: Rc<dyn Listener> = match self.depart(order, &rpc, successor, role)? {
            Departing::Drives(driver) => Rc::new(FromTarget { migration: order.migration, driver }),
            Departing::Joins(participant) => Rc::new(OfParticipant(participant)),
        };
        let nothing = Service::new(self.handle.clone(), self.engine.buffers().clone());
        self.handle.spawn(rpc.run(channel.events, nothing, listener));
        Ok(())
    }

    /// Begins or continues a migration to another host over `rpc`, which the caller runs. `successor` is the volume at its next
    /// owner, for clients that stay.
    ///
    /// # Errors
    /// [`Refused`]: the lane has another migration, or nothing is left to do.
    pub fn depart(
        self: &Rc<Self>,
        order: &OutgoingOrder,
        rpc: &Rc<RpcChannel>,
        successor: Rc<PeerVolume>,
        role: OutgoingRole,
    ) -> Result<Departing, Refused> {
        self.check_idle()?;
        let index = match &role {
            OutgoingRole::Drives(_) => VolumeIndex(0),
            OutgoingRole::Joins(participation) => participation.index(),
        };
        let leaving = self.leaving_volume(order, index, rpc, successor);
        let departing = match role {
            OutgoingRole::Drives(group) => {
                Departing::Drives(self.drive_outgoing(order, leaving, group, rpc)?)
            }
            OutgoingRole::Joins(participation) => {
                Departing::Joins(self.join_outgoing(order, leaving, participation))
            }
        };
        self.remember_progress(order);
        Ok(departing)
    }

    fn drive_outgoing(
        &self,
        order: &OutgoingOrder,
        leaving: OutgoingVolume,
        group: OutgoingGroup,
        rpc: &Rc<RpcChannel>,
    ) -> Result<SourceHandle, Refused> {
        let plan = SourcePlan {
            migration: order.migration,
            volumes: vec![leaving],
            group,
            keep_source: order.keep_source,
            copying: self.copy_settings(order),
            switch_over_max: order.switch_over_max,
            peer: Peer::OtherHost,
            moves: order.moves,
        };
        let control = self.begin_recording(order.migration);
        let (handle, buffers) = (self.handle.clone(), self.engine.buffers());
        let to_target = to_target(order.migration, rpc);
        let made = match &order.recorded {
            None => Some(SourceDriver::new(handle, control, buffers, plan, to_target)),
            Some(recorded) => SourceDriver::resume(handle, control, buffers, plan, to_target, recorded),
        };
        let Some((driver, source)) = made else {
            return Err(Refused::NotMigrating(order.migration));
        };
        let copies = order.recorded.as_ref().is_none_or(|recorded| recorded.stage == Stage::Copying);
        if order.rest == Rest::Pause && copies {
            // First of all: a migration that was paused before a restart must not run for a moment.
            source.pause();
        }
        self.drive(source.clone(), driver.run());
        Ok(source)
    }

    fn join_outgoing(
        &self,
        order: &OutgoingOrder,
        leaving: OutgoingVolume,
        participation: SourceParticipation,
    ) -> SourceParticipantRef {
        let copies = order.recorded.as_ref().is_none_or(|recorded| recorded.stage == Stage::Copying);
        let copying = copies.then(|| self.copy_settings(order));
        if copies {
            // The gate may have been closed for an attempt of a driver that failed; this one begins without an attempt.
            self.volume.open();
        }
        let (handle, buffers) = (&self.handle, self.engine.buffers());
        let (follower, follows) = participation.follow(handle, buffers, copying.as_ref(), leaving);
        self.follow(order.migration, follows);
        follower
    }

    fn remember_progress(self: &Rc<Self>, order: &OutgoingOrder) {
        // The image at the host that the volume returns to stays, whatever the outcome.
        let goes_back = self.filling.borrow().as_ref().is_some_and(|filling| filling.lacks_blocks());
        let consumed =
            order.known.filter(|(of, _)| matches!(of, ReplicaOf::Host { .. })).filter(|_| !goes_back);
        self.remember_copy(order.migration, consumed);
    }

    fn leaving_volume(
        &self,
        order: &OutgoingOrder,
        index: VolumeIndex,
        rpc: &Rc<RpcChannel>,
        successor: Rc<PeerVolume>,
    ) -> OutgoingVolume {
        let link = |priority| {
            let address = match priority {
                RequestPriority::Bulk => Address::ReplicaInBulk(index.0),
                _ => Address::Replica(index.0),
            };
            let rpc = Rc::clone(rpc);
            PeerStore::new(rpc, address, self.geometry_elsewhere(), priority)
        };
        let lease = order.shared.clone().map(|shared| self.lease(order, index, shared, rpc));
        let store = |priority| match &lease {
            None => Rc::new(link(priority)) as Rc<dyn BlockDevice>,
            Some(lease) => Rc::new(ReplicaStore::new(Rc::clone(lease), link(priority))),
        };
        let leaves_blocks = order.strategy.leaves_blocks();
        if leaves_blocks {
            if self.reservoir.store_of(order.migration).is_none() {
                self.reservoir.open(order.migration, self.volume.store());
            }
            self.reservoir.share(order.budget.clone());
            self.reservoir.give_way(&self.gives_way(order));
            self.reservoir.rest(order.rest);
        }
        OutgoingVolume {
            volume: Rc::clone(&self.volume),
            reservoir: leaves_blocks.then(|| Rc::clone(&self.reservoir)),
            filling: self.filling.borrow().clone().filter(|filling| filling.lacks_blocks()),
            replica: Replica {
                bulk: store(RequestPriority::Bulk),
                mirrored: store(RequestPriority::Mirrored),
                content: order.content,
                known: order.known,
                carried: Carried::default(),
                zeroes: order.zeroes,
                chunks: Chunks::Copied,
                guests_there: Some(Rc::new(link(RequestPriority::Bulk))),
                manifest: leaves_blocks.then(|| Rc::new(link(RequestPriority::Mirrored))),
            },
            source_image: order.source.clone(),
            successor: Some(successor),
            channel: Some(Rc::clone(rpc)),
            to: Some(order.to),
            lease,
        }
    }

    /// Returns a lease of the target's image, if this host may be able to open it.
    fn lease(
        &self,
        order: &OutgoingOrder,
        volume: VolumeIndex,
        shared: SharedImage,
        rpc: &Rc<RpcChannel>,
    ) -> Rc<HeldLease> {
        let (control, migration) = (Rc::clone(&self.control), order.migration);
        let tell = Box::new(move |way| control.report(Report::DataPath { migration, volume, way }));
        let (handle, engine) = (self.handle.clone(), Rc::clone(&self.engine));
        let (rpc, address) = (Rc::clone(rpc), Address::Replica(volume.0));
        HeldLease::new(handle, engine, rpc, address, shared, self.geometry_elsewhere(), tell)
    }

    fn copy_settings(&self, order: &OutgoingOrder) -> CopySettings {
        let limits = self.settings.limits;
        CopySettings {
            pacing: PacingSettings {
                bytes_per_second: order.budget.rate(),
                ..pacing(&order.pacing, order.round_trip)
            },
            gives_way: self.gives_way(order),
            limits: TimeLimits {
                mirror_wait_max: match order.moves {
                    Moves::Volumes | Moves::VolumesAfterHooks => limits.mirror_wait_max,
                    Moves::Vm => limits.mirror_wait_max.min(VM_WAIT_MAX),
                },
                switch_over_max: order.switch_over_max,
                ..limits
            },
            strategy: order.strategy,
        }
    }

    fn gives_way(&self, order: &OutgoingOrder) -> GivesWay {
        GivesWay {
            disks: self.disks(),
            impact: order.impact,
            budget: Some(order.budget.clone()),
            ends_by: order.time_left.map(|left| self.handle.now() + left),
        }
    }

    /// Returns the geometry of the volume at the other host, which is the same as here.
    fn geometry_elsewhere(&self) -> Geometry {
        let here = self.volume.device().geometry();
        Geometry { alignment: ALIGNMENT, read_only: false, discards: true, ..here }
    }
}

pub(super) fn owner_elsewhere(
    handle: &Handle,
    buffers: &BufferPool,
    volume: VolumeId,
    channel: PeerChannel,
    geometry: Geometry,
) -> Rc<PeerVolume> {
    let rpc = RpcChannel::new(channel.channel);
    let nothing = Service::new(handle.clone(), buffers.clone());
    handle.spawn(rpc.run(channel.events, nothing, Rc::new(CallsOnly)));
    PeerVolume::new(rpc, volume, geometry, handle.clone())
}

/// Returns the pace: as on one host, plus what a long link holds in flight.
fn pacing(near: &PacingSettings, round_trip: Duration) -> PacingSettings {
    let on_the_way = round_trip.as_secs_f64() * LINK_BYTES_PER_SECOND;
    // Rounded up, and capped for absurd round trips.
    let further = (on_the_way / near.chunk_bytes as f64).ceil().min(DEPTH_MAX) as usize;
    PacingSettings { depth: near.depth.saturating_add(further), ..near.clone() }
}

fn to_target(migration: MigrationId, rpc: &Rc<RpcChannel>) -> SendMessage<ToTarget> {
    let rpc = Rc::clone(rpc);
    Box::new(move |message| match wire::encode(&Message::ToTarget { migration, message }) {
        Ok(message) => rpc.send_message(message),
        // The message is repeated until it is answered, so a deadline shows its fate.
        Err(error) => warn!(%migration, %error, "a message cannot be sent"),
    })
}

/// A lane's half of a migration to another host, for the messages of the target.
pub enum Departing {
    /// The lane drives the migration.
    Drives(SourceHandle),
    /// It takes part.
    Joins(SourceParticipantRef),
}

struct FromTarget {
    migration: MigrationId,
    driver: SourceHandle,
}

impl Listener for FromTarget {
    fn message(&self, message: &[u8]) {
        match wire::decode(message) {
            Ok(Message::ToSource { migration, message }) if migration == self.migration => {
                self.driver.deliver(message);
            }
            Ok(_) => warn!(migration = %self.migration, "ignored a message that is not for the source"),
            Err(error) => {
                warn!(migration = %self.migration, %error, "ignored an invalid message of the target");
            }
        }
    }

    fn link_lost(&self, reason: &str) {
        warn!(migration = %self.migration, reason, "the channel to the target is broken");
        self.driver.link_lost(reason);
    }

    fn link_restored(&self) {
        self.driver.link_back();
    }

    fn peer_restarted(&self) {
        self.driver.peer_restarted();
        self.driver.link_back();
    }
}

/// For a volume whose migration another lane drives, which gets the messages.
struct OfParticipant(SourceParticipantRef);

impl Listener for OfParticipant {
    fn message(&self, _: &[u8]) {
        warn!("ignored a handover message on the RPC of a volume that is not the migration's first");
    }

    fn link_lost(&self, _: &str) {}

    fn link_restored(&self) {}

    fn peer_restarted(&self) {
        self.0.peer_restarted();
    }
}
