//! Connects a driver with the volumes of its migration, on its own lane and on other lanes.
//!
//! ```text
//!   control plane:  group ─────participation─► lane of the second volume ──► takes part
//!                      │      └─participation─► lane of the third volume  ──► takes part
//!                      └────────────────────► lane of the first volume ───► driver: one participant for each
//! ```
//! The driver does not wait for an order to another lane to arrive. Where order matters, an event confirms the first step before
//! the driver orders the next one.

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

pub(crate) type Events<E> = (mpsc::UnboundedSender<E>, mpsc::UnboundedReceiver<E>);

/// The volumes that leave together with the volume of the driver's lane.
pub struct OutgoingGroup {
    pub(crate) events: Events<Event>,
    pub(crate) joined: Vec<JoinedSource>,
}

/// The volumes that arrive together with the volume of the driver's lane.
pub struct IncomingGroup {
    pub(crate) events: Events<Heard>,
    pub(crate) joined: Vec<JoinedTarget>,
}

/// Lets a volume on another lane take part with a source's driver.
pub struct SourceParticipation {
    index: VolumeIndex,
    events: mpsc::UnboundedSender<Event>,
    orders: mpsc::UnboundedReceiver<SourceOrder>,
}

/// Lets a volume on another lane take part with a target's driver.
pub struct TargetParticipation {
    index: VolumeIndex,
    events: mpsc::UnboundedSender<Heard>,
    orders: mpsc::UnboundedReceiver<TargetOrder>,
}

pub(crate) struct JoinedSource {
    pub(super) volume: VolumeId,
    pub(super) generation: Generation,
    pub(super) image: ImageLocation,
    pub(super) orders: mpsc::UnboundedSender<SourceOrder>,
}

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
    /// Adds a volume of this generation with its image; returns the participation for its lane. Volumes are added in the
    /// migration's order, whose first is the driver's own.
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
    /// Adds a volume that will arrive at `image`, in order like [`OutgoingGroup::add`].
    pub fn add(&mut self, volume: VolumeId, image: ImageLocation) -> TargetParticipation {
        let (sender, orders) = mpsc::unbounded();
        self.joined.push(JoinedTarget { volume, image, orders: sender });
        TargetParticipation { index: last_of(1 + self.joined.len()), events: self.events.0.clone(), orders }
    }
}

impl SourceParticipation {
    /// Returns the volume's position among those of its migration.
    pub fn index(&self) -> VolumeIndex {
        self.index
    }

    /// Lets the volume take part; `copying` says how it is copied, if at all. Run the future to its end, which is the
    /// migration's.
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
    /// Returns the volume's position among those of its migration.
    pub fn index(&self) -> VolumeIndex {
        self.index
    }

    /// Lets the volume take part. Its store has `trial_max` to answer the first read, and is then withdrawn from `service`. Run
    /// the future to its end, which is the migration's.
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

/// A volume of another lane that takes part with a source's driver, for its own channel to the target.
///
/// It does not keep the volume's half alive, which ends with the migration.
pub struct SourceParticipantRef(Weak<SourceVolume>);

impl SourceParticipantRef {
    /// Notes that the peer has restarted: data that was not durable there is lost.
    ///
    /// Call this before any request that is submitted to the peer's store from then on has ended.
    pub fn peer_restarted(&self) {
        if let Some(part) = self.0.upgrade() {
            part.peer_restarted();
        }
    }
}

pub(super) enum SourceParticipant {
    Here(Rc<SourceVolume>),
    Elsewhere { orders: mpsc::UnboundedSender<SourceOrder>, told: Box<VolumeProgress> },
}

impl SourceParticipant {
    pub(super) fn joined(orders: mpsc::UnboundedSender<SourceOrder>) -> Self {
        Self::Elsewhere { orders, told: Box::default() }
    }

    pub(super) fn order(&self, order: SourceOrder) {
        match self {
            Self::Here(part) => part.carry_out(order),
            Self::Elsewhere { orders, .. } => {
                // A lane that has ended has reported that.
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

pub(super) enum TargetParticipant {
    Here(Rc<TargetVolume>),
    Elsewhere(mpsc::UnboundedSender<TargetOrder>),
}

impl TargetParticipant {
    pub(super) fn order(&self, order: TargetOrder) {
        match self {
            Self::Here(part) => part.carry_out(order),
            Self::Elsewhere(orders) => {
                // A lane that has ended has reported that.
                let _ = orders.unbounded_send(order);
            }
        }
    }

    pub(super) fn is_gone(&self) -> bool {
        matches!(self, Self::Elsewhere(orders) if orders.is_closed())
    }
}

fn last_of(volumes: usize) -> VolumeIndex {
    VolumeIndex::all(volumes).last().unwrap_or(VolumeIndex(0))
}
