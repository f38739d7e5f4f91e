//! Where a driver finds the volumes of its migration: on its own lane, or of other lanes, which take part.
//!
//! ```text
//!   control plane:  group ─────participation─► lane of the second volume ──► takes part
//!                      │      └─participation─► lane of the third volume  ──► takes part
//!                      └────────────────────► lane of the first volume ───► driver: one participant for each
//! ```
//! An order to a volume of another lane is on its way while the driver goes on. Nothing depends on how long that takes: whatever has
//! to be done before something else is asked for, and answered, by an event.

use std::rc::{Rc, Weak};
use std::time::Duration;

use block::{BufferPool, Handle};
use chronicle::Generation;
use futures_channel::mpsc;
use migration::journal::ImageLocation;
use migration::source::Costs;
use migration::{VolumeId, VolumeIndex, VolumeProgress};

use super::source_volume::{SourceOrder, SourceVolume};
use super::target_volume::{Heard, TargetOrder, TargetVolume};
use super::{CopySettings, Event, IncomingVolume, OutgoingVolume};
use crate::peer::Service;

/// Both ends of a driver's events.
pub(crate) type Events<E> = (mpsc::UnboundedSender<E>, mpsc::UnboundedReceiver<E>);

/// The volumes that leave together with the one of the driver's lane.
pub struct OutgoingGroup {
    pub(crate) events: Events<Event>,
    pub(crate) joined: Vec<JoinedSource>,
}

/// The volumes that come together with the one of the driver's lane.
pub struct IncomingGroup {
    pub(crate) events: Events<Heard>,
    pub(crate) joined: Vec<JoinedTarget>,
}

/// For the lane of a volume that leaves together with others: with whose driver it takes part.
pub struct SourceParticipation {
    index: VolumeIndex,
    events: mpsc::UnboundedSender<Event>,
    orders: mpsc::UnboundedReceiver<SourceOrder>,
}

/// For the lane of a volume that comes together with others: with whose driver it takes part.
pub struct TargetParticipation {
    index: VolumeIndex,
    events: mpsc::UnboundedSender<Heard>,
    orders: mpsc::UnboundedReceiver<TargetOrder>,
}

/// A volume of another lane that takes part with a source's driver.
pub(crate) struct JoinedSource {
    pub(super) volume: VolumeId,
    pub(super) generation: Generation,
    pub(super) image: ImageLocation,
    pub(super) orders: mpsc::UnboundedSender<SourceOrder>,
}

/// A volume of another lane that takes part with a target's driver.
pub(crate) struct JoinedTarget {
    pub(super) volume: VolumeId,
    pub(super) image: ImageLocation,
    pub(super) orders: mpsc::UnboundedSender<TargetOrder>,
}

impl Default for OutgoingGroup {
    fn default() -> Self {
        Self { events: mpsc::unbounded(), joined: Vec::new() }
    }
}

impl OutgoingGroup {
    /// Adds a volume of this generation, whose bytes are in `image`; what is returned is for its lane. They have the order
    /// of the migration's volumes, whose first is the driver's own.
    pub fn add(
        &mut self,
        volume: VolumeId,
        generation: Generation,
        image: ImageLocation,
    ) -> SourceParticipation {
        let (sender, orders) = mpsc::unbounded();
        self.joined.push(JoinedSource { volume, generation, image, orders: sender });
        SourceParticipation { index: last_of(1 + self.joined.len()), events: self.events.0.clone(), orders }
    }
}

impl Default for IncomingGroup {
    fn default() -> Self {
        Self { events: mpsc::unbounded(), joined: Vec::new() }
    }
}

impl IncomingGroup {
    /// Adds a volume that comes to `image`; as [`OutgoingGroup::add`].
    pub fn add(&mut self, volume: VolumeId, image: ImageLocation) -> TargetParticipation {
        let (sender, orders) = mpsc::unbounded();
        self.joined.push(JoinedTarget { volume, image, orders: sender });
        TargetParticipation { index: last_of(1 + self.joined.len()), events: self.events.0.clone(), orders }
    }
}

impl SourceParticipation {
    /// The volume's position among those of its migration.
    pub fn index(&self) -> VolumeIndex {
        self.index
    }

    /// Has the volume take part; it is copied if there are settings for that. The future is to be run to its end,
    /// which is that of the migration.
    pub fn follow(
        self,
        handle: &Handle,
        buffers: &BufferPool,
        copying: Option<&CopySettings>,
        leaving: OutgoingVolume,
    ) -> (SourceParticipantRef, impl Future<Output = ()> + use<>) {
        let part = SourceVolume::new(handle, buffers, copying, self.index, leaving, self.events);
        (SourceParticipantRef(Rc::downgrade(&part)), part.follow(self.orders))
    }
}

impl TargetParticipation {
    /// The volume's position among those of its migration.
    pub fn index(&self) -> VolumeIndex {
        self.index
    }

    /// Has the volume take part. Its store has `trial_max` to answer the first read, and is withdrawn from
    /// `service` then. The future is to be run to its end, which is that of the migration.
    pub fn follow(
        self,
        handle: Handle,
        buffers: BufferPool,
        coming: IncomingVolume,
        trial_max: Duration,
        service: Rc<Service>,
    ) -> impl Future<Output = ()> + use<> {
        let part =
            TargetVolume::new(handle, buffers, self.index, coming, trial_max, Some(service), self.events);
        part.follow(self.orders)
    }
}

/// A volume of another lane that takes part with a source's driver, seen from its own channel to the target.
///
/// It does not keep the volume's own half, which ends with the migration.
pub struct SourceParticipantRef(Weak<SourceVolume>);

impl SourceParticipantRef {
    /// Tells that the peer has restarted: what was not durable there is lost.
    ///
    /// To be called before anything that is submitted to its store from then on has ended.
    pub fn peer_restarted(&self) {
        if let Some(part) = self.0.upgrade() {
            part.peer_restarted();
        }
    }
}

/// Where a source's driver finds a volume.
pub(super) enum SourceParticipant {
    Here(Rc<SourceVolume>),
    Elsewhere {
        orders: mpsc::UnboundedSender<SourceOrder>,
        /// What it told last.
        told: Box<VolumeProgress>,
    },
}

impl SourceParticipant {
    pub(super) fn joined(orders: mpsc::UnboundedSender<SourceOrder>) -> Self {
        Self::Elsewhere { orders, told: Box::default() }
    }

    pub(super) fn order(&self, order: SourceOrder) {
        match self {
            Self::Here(part) => part.carry_out(order),
            Self::Elsewhere { orders, .. } => {
                // One that is gone has said so.
                let _ = orders.unbounded_send(order);
            }
        }
    }

    pub(super) fn progress(&self) -> VolumeProgress {
        match self {
            Self::Here(part) => part.progress(),
            Self::Elsewhere { told, .. } => (**told).clone(),
        }
    }

    pub(super) fn costs(&self) -> Costs {
        match self {
            Self::Here(part) => part.costs(),
            Self::Elsewhere { told, .. } => told.costs,
        }
    }
}

/// Where a target's driver finds a volume.
pub(super) enum TargetParticipant {
    Here(Rc<TargetVolume>),
    Elsewhere(mpsc::UnboundedSender<TargetOrder>),
}

impl TargetParticipant {
    pub(super) fn order(&self, order: TargetOrder) {
        match self {
            Self::Here(part) => part.carry_out(order),
            Self::Elsewhere(orders) => {
                // One that is gone has said so.
                let _ = orders.unbounded_send(order);
            }
        }
    }

    /// Tells whether its lane has ended.
    pub(super) fn is_gone(&self) -> bool {
        matches!(self, Self::Elsewhere(orders) if orders.is_closed())
    }
}

/// The last of so many positions.
fn last_of(volumes: usize) -> VolumeIndex {
    VolumeIndex::all(volumes).last().unwrap_or(VolumeIndex(0))
}
