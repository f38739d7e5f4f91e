//! A volume leaves for another host: its store there, and the source's half of the migration.

use std::rc::Rc;
use std::time::Duration;

use block::device::ALIGNMENT;
use block::{BlockDevice, BufferPool, Geometry, Handle};
use chronicle::ReplicaOf;
use migration::journal::Stage;
use migration::message::ToTarget;
use migration::source::{Moves, Peer};
use migration::strategy::Acknowledgement;
use migration::wire::{self, Message};
use migration::{MigrationId, PacingSettings, VolumeId, VolumeIndex};
use tracing::warn;

use super::Lane;
use crate::conductor::{
    Baton, CopySettings, LeavingTogether, LeavingVolume, Post, Replica, SourceConductor, SourceFollower,
    SourceMembership, SourcePlan, TimeLimits,
};
use crate::control::Report;
use crate::handle::{LeavingLines, LeavingOrder, LeavingRole, Refused, Rest};
use crate::lending::{Borrowing, ReplicaStore, SharedImage};
use crate::peer::head::Address;
use crate::peer::{Conversation, Listener, PeerLine, PeerStore, PeerVolume, Service, Urgency};
use crate::resuming::{self, Rhythm};

/// What a link is thought to carry, in bytes a second, when it is filled: 1.25 Gbit. A faster one that is long as well is
/// not filled, a slower one has a longer queue.
const LINK_BYTES_PER_SECOND: f64 = 156e6;
/// Chunks that may be on the way at most: what the transport's window lets through of bulk.
const DEPTH_MAX: f64 = 64.0;
/// How long a write may be held whose guest may be about to be stopped: it does not come to a stand while one is held, and
/// stands still for that long (hard case 16).
const MACHINE_WAIT_MAX: Duration = Duration::from_millis(50);
/// Bytes of guest writes that may be on their way to another host: three times what fills 1 Gbit/s at 180 ms.
const BUFFER_BYTES_MAX: u64 = 64 << 20;

impl Lane {
    /// Begins a migration to another host, or goes on with one.
    pub(super) fn leave(
        self: &Rc<Self>,
        order: &LeavingOrder,
        lines: LeavingLines,
        role: LeavingRole,
    ) -> Result<(), Refused> {
        self.check_idle()?;
        let LeavingLines { replica: line, owner } = lines;
        let conversation = Conversation::new(line.line);
        let (handle, volume) = (&self.handle, self.settings.volume);
        let successor =
            owner_elsewhere(handle, self.engine.buffers(), volume, owner, self.geometry_elsewhere());
        let index = match &role {
            LeavingRole::Conducts(_) => VolumeIndex(0),
            LeavingRole::Follows(membership) => membership.index(),
        };
        let leaving = self.leaving_volume(order, index, &conversation, successor);
        let listener: Rc<dyn Listener> = match role {
            LeavingRole::Conducts(together) => {
                let baton = self.conduct_leaving(order, leaving, together, &conversation)?;
                Rc::new(FromTarget { migration: order.migration, baton })
            }
            LeavingRole::Follows(membership) => {
                Rc::new(OfFollower(self.follow_leaving(order, leaving, membership)))
            }
        };
        let nothing = Service::new(self.handle.clone(), self.engine.buffers().clone());
        self.handle.spawn(conversation.run(line.arrivals, nothing, listener));
        self.remember_progress(order);
        Ok(())
    }

    /// Conducts the migration.
    fn conduct_leaving(
        &self,
        order: &LeavingOrder,
        leaving: LeavingVolume,
        together: LeavingTogether,
        conversation: &Rc<Conversation>,
    ) -> Result<Baton, Refused> {
        let plan = SourcePlan {
            migration: order.migration,
            volumes: vec![leaving],
            together,
            keep_source: order.keep_source,
            copying: self.copy_settings(order),
            switch_over_max: order.switch_over_max,
            peer: Peer::OtherHost,
            moves: order.moves,
        };
        let control = self.begin_recording(order.migration);
        let (handle, buffers) = (self.handle.clone(), self.engine.buffers());
        let to_target = to_target(order.migration, conversation);
        let made = match &order.recorded {
            None => Some(SourceConductor::new(handle, control, buffers, plan, to_target)),
            Some(recorded) => SourceConductor::resume(handle, control, buffers, plan, to_target, recorded),
        };
        let Some((conductor, baton)) = made else {
            return Err(Refused::NotMigrating(order.migration));
        };
        let copies = order.recorded.as_ref().is_none_or(|recorded| recorded.stage == Stage::Copying);
        if order.rest == Rest::Pause && copies {
            // Before anything else is heard of it: what was paused before a restart does not go on for a moment.
            baton.pause();
        }
        self.conduct(baton.clone(), conductor.run());
        Ok(baton)
    }

    /// Lends the volume to the conductor on another lane.
    fn follow_leaving(
        &self,
        order: &LeavingOrder,
        leaving: LeavingVolume,
        membership: SourceMembership,
    ) -> SourceFollower {
        let copies = order.recorded.as_ref().is_none_or(|recorded| recorded.stage == Stage::Copying);
        let copying = copies.then(|| self.copy_settings(order));
        if copies {
            // It may have been closed for a try of a conductor that failed; this one begins with none.
            self.volume.open();
        }
        let (handle, buffers) = (&self.handle, self.engine.buffers());
        let (follower, follows) = membership.follow(handle, buffers, copying.as_ref(), leaving);
        self.migration.followed.set(Some(order.migration));
        let current = Rc::clone(&self.migration);
        self.handle.spawn(async move {
            follows.await;
            current.followed.set(None);
            current.ended.notify();
        });
        follower
    }

    /// Keeps what the copy at the other host lacks, as long as one is made.
    fn remember_progress(self: &Rc<Self>, order: &LeavingOrder) {
        let (lane, migration) = (Rc::clone(self), order.migration);
        let is_over = move || {
            let follows = lane.migration.followed.get() == Some(migration);
            !follows && lane.with_migration(migration, |_| Ok(())).is_err()
        };
        let (handle, volume, rhythm) = (self.handle.clone(), Rc::clone(&self.volume), Rhythm::default());
        let consumed = order.known.filter(|(of, _)| matches!(of, ReplicaOf::Host { .. }));
        self.handle.spawn(resuming::remember(handle, volume, migration, rhythm, consumed, is_over));
    }

    fn leaving_volume(
        &self,
        order: &LeavingOrder,
        index: VolumeIndex,
        conversation: &Rc<Conversation>,
        successor: Rc<PeerVolume>,
    ) -> LeavingVolume {
        let link = |urgency| {
            let (conversation, address) = (Rc::clone(conversation), Address::Replica(index.0));
            PeerStore::new(conversation, address, self.geometry_elsewhere(), urgency)
        };
        let borrowing = order.shared.clone().map(|shared| self.borrow(order, index, shared, conversation));
        let store = |urgency| match &borrowing {
            None => Rc::new(link(urgency)) as Rc<dyn BlockDevice>,
            Some(borrowing) => Rc::new(ReplicaStore::new(Rc::clone(borrowing), link(urgency))),
        };
        LeavingVolume {
            volume: Rc::clone(&self.volume),
            replica: Replica {
                bulk: store(Urgency::Bulk),
                mirrored: store(Urgency::Mirrored),
                content: order.content,
                known: order.known,
                zeroes: order.zeroes,
            },
            source_image: order.source.clone(),
            successor: Some(successor),
            conversation: Some(Rc::clone(conversation)),
            borrowing,
        }
    }

    /// A way into the target's image that does not lead over the link, if it is one.
    fn borrow(
        &self,
        order: &LeavingOrder,
        volume: VolumeIndex,
        shared: SharedImage,
        conversation: &Rc<Conversation>,
    ) -> Rc<Borrowing> {
        let (control, migration) = (Rc::clone(&self.control), order.migration);
        let tell = Box::new(move |way| control.report(Report::Way { migration, volume, way }));
        let (handle, engine) = (self.handle.clone(), Rc::clone(&self.engine));
        let (conversation, address) = (Rc::clone(conversation), Address::Replica(volume.0));
        Borrowing::new(handle, engine, conversation, address, shared, self.geometry_elsewhere(), tell)
    }

    fn copy_settings(&self, order: &LeavingOrder) -> CopySettings {
        CopySettings {
            pacing: pacing(order),
            limits: TimeLimits {
                mirror_wait_max: match order.moves {
                    Moves::Volumes | Moves::VolumesAfterHooks => self.settings.mirror_wait_max,
                    Moves::Machine => self.settings.mirror_wait_max.min(MACHINE_WAIT_MAX),
                },
                switch_over_max: order.switch_over_max,
                ..TimeLimits::default()
            },
            acknowledgement: Acknowledgement::Source {
                buffer_bytes_max: BUFFER_BYTES_MAX,
                drain_max: order.switch_over_max / 2,
            },
        }
    }

    /// What the volume is like on the other host: as here.
    fn geometry_elsewhere(&self) -> Geometry {
        let here = self.volume.device().geometry();
        Geometry { alignment: ALIGNMENT, read_only: false, discards: true, ..here }
    }
}

/// A volume as another host serves it, reached over `line`.
pub(super) fn owner_elsewhere(
    handle: &Handle,
    buffers: &BufferPool,
    volume: VolumeId,
    line: PeerLine,
    geometry: Geometry,
) -> Rc<PeerVolume> {
    let conversation = Conversation::new(line.line);
    let nothing = Service::new(handle.clone(), buffers.clone());
    handle.spawn(conversation.run(line.arrivals, nothing, Rc::new(Deaf)));
    PeerVolume::new(conversation, volume, geometry, handle.clone(), buffers.clone())
}

/// How much is copied at once: as on one host, and what is on the way of a long link besides.
fn pacing(order: &LeavingOrder) -> PacingSettings {
    let near = PacingSettings::default();
    let on_the_way = order.round_trip.as_secs_f64() * LINK_BYTES_PER_SECOND;
    // Rounded up; a round trip of hours is none.
    let further = (on_the_way / near.chunk_bytes as f64).ceil().min(DEPTH_MAX) as usize;
    PacingSettings {
        depth: near.depth.saturating_add(further),
        bytes_per_second: order.bandwidth_bytes_per_second,
        ..near
    }
}

/// The way to the target's half.
fn to_target(migration: MigrationId, conversation: &Rc<Conversation>) -> Post<ToTarget> {
    let conversation = Rc::clone(conversation);
    Box::new(move |message| match wire::encode(&Message::ToTarget { migration, message }) {
        Ok(message) => conversation.say(message),
        // It is repeated until it is answered, so a deadline says what has become of it.
        Err(error) => warn!(%migration, %error, "a message cannot be sent"),
    })
}

/// Hears what the target's half says.
struct FromTarget {
    migration: MigrationId,
    baton: Baton,
}

impl Listener for FromTarget {
    fn said(&self, message: &[u8]) {
        match wire::decode(message) {
            Ok(Message::ToSource { migration, message }) if migration == self.migration => {
                self.baton.deliver(message);
            }
            Ok(_) => warn!(migration = %self.migration, "a message that is not for the source is left out"),
            Err(error) => {
                warn!(migration = %self.migration, %error, "what the target said is not understood");
            }
        }
    }

    fn lost(&self, reason: &str) {
        warn!(migration = %self.migration, reason, "the way to the target is broken");
        self.baton.link_lost();
    }

    fn back(&self) {
        self.baton.link_back();
    }

    fn restarted(&self) {
        self.baton.peer_restarted();
        self.baton.link_back();
    }
}

/// Hears for a volume whose migration another lane conducts: that one hears the rest.
struct OfFollower(SourceFollower);

impl Listener for OfFollower {
    fn said(&self, _: &[u8]) {
        warn!(
            "a message of a handover came on the line of a volume that is not the migration's first; it is left out"
        );
    }

    fn lost(&self, _: &str) {}

    fn back(&self) {}

    fn restarted(&self) {
        self.0.peer_restarted();
    }
}

/// Hears nothing: of a conversation that is only calls.
struct Deaf;

impl Listener for Deaf {
    fn said(&self, _: &[u8]) {}

    fn lost(&self, _: &str) {}

    fn back(&self) {}

    fn restarted(&self) {}
}
