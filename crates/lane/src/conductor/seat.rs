//! Where a conductor finds the volumes of its migration: on its own lane, or lent by others.
//!
//! ```text
//!   control plane:  Together ──membership──► lane of the second volume ──► part, which follows
//!                      │      └─membership──► lane of the third volume  ──► part, which follows
//!                      └────────────────────► lane of the first volume ───► conductor: one seat for each
//! ```
//! An order to a lent volume is on its way while the conductor goes on. Nothing depends on how long that takes: whatever has
//! to be done before something else is asked for, and answered, by an event.

use std::rc::{Rc, Weak};
use std::time::Duration;

use block::{BufferPool, Handle};
use chronicle::Generation;
use futures_channel::mpsc;
use migration::journal::ImageLocation;
use migration::source::Costs;
use migration::{VolumeId, VolumeIndex};

use super::source_part::{PartProgress, SourceOrder, SourcePart};
use super::target_part::{Heard, TargetOrder, TargetPart};
use super::{ComingVolume, CopySettings, Event, LeavingVolume};
use crate::peer::Service;

/// Both ends of what a conductor is told.
pub(crate) type Events<E> = (mpsc::UnboundedSender<E>, mpsc::UnboundedReceiver<E>);

/// The volumes that leave together with the one of the conductor's lane.
pub struct LeavingTogether {
    pub(crate) events: Events<Event>,
    pub(crate) lent: Vec<LentSource>,
}

/// The volumes that come together with the one of the conductor's lane.
pub struct ComingTogether {
    pub(crate) events: Events<Heard>,
    pub(crate) lent: Vec<LentTarget>,
}

/// For the lane of a volume that leaves together with others: whose conductor it follows.
pub struct SourceMembership {
    index: VolumeIndex,
    events: mpsc::UnboundedSender<Event>,
    orders: mpsc::UnboundedReceiver<SourceOrder>,
}

/// For the lane of a volume that comes together with others: whose conductor it follows.
pub struct TargetMembership {
    index: VolumeIndex,
    events: mpsc::UnboundedSender<Heard>,
    orders: mpsc::UnboundedReceiver<TargetOrder>,
}

/// A volume that another lane lends to a source's conductor.
pub(crate) struct LentSource {
    pub(super) volume: VolumeId,
    pub(super) generation: Generation,
    pub(super) image: ImageLocation,
    pub(super) orders: mpsc::UnboundedSender<SourceOrder>,
}

/// A volume that another lane lends to a target's conductor.
pub(crate) struct LentTarget {
    pub(super) image: ImageLocation,
    pub(super) orders: mpsc::UnboundedSender<TargetOrder>,
}

impl Default for LeavingTogether {
    fn default() -> Self {
        Self { events: mpsc::unbounded(), lent: Vec::new() }
    }
}

impl LeavingTogether {
    /// Adds a volume of this generation, whose bytes are in `image`; what is returned is for its lane. They have the order
    /// of the migration's volumes, whose first is the conductor's own.
    pub fn add(
        &mut self,
        volume: VolumeId,
        generation: Generation,
        image: ImageLocation,
    ) -> SourceMembership {
        let (sender, orders) = mpsc::unbounded();
        self.lent.push(LentSource { volume, generation, image, orders: sender });
        SourceMembership { index: last_of(1 + self.lent.len()), events: self.events.0.clone(), orders }
    }
}

impl Default for ComingTogether {
    fn default() -> Self {
        Self { events: mpsc::unbounded(), lent: Vec::new() }
    }
}

impl ComingTogether {
    /// Adds a volume that comes to `image`; as [`LeavingTogether::add`].
    pub fn add(&mut self, image: ImageLocation) -> TargetMembership {
        let (sender, orders) = mpsc::unbounded();
        self.lent.push(LentTarget { image, orders: sender });
        TargetMembership { index: last_of(1 + self.lent.len()), events: self.events.0.clone(), orders }
    }
}

impl SourceMembership {
    /// The volume's position among those of its migration.
    pub fn index(&self) -> VolumeIndex {
        self.index
    }

    /// Lends the volume to the conductor; it is copied if there are settings for that. The future is to be run to its end,
    /// which is that of the migration.
    pub fn follow(
        self,
        handle: &Handle,
        buffers: &BufferPool,
        copying: Option<&CopySettings>,
        leaving: LeavingVolume,
    ) -> (SourceFollower, impl Future<Output = ()> + use<>) {
        let part = SourcePart::new(handle, buffers, copying, self.index, leaving, self.events);
        (SourceFollower(Rc::downgrade(&part)), part.follow(self.orders))
    }
}

impl TargetMembership {
    /// The volume's position among those of its migration.
    pub fn index(&self) -> VolumeIndex {
        self.index
    }

    /// Lends the volume to the conductor. Its store has `trial_max` to answer the first read, and is withdrawn from
    /// `service` then. The future is to be run to its end, which is that of the migration.
    pub fn follow(
        self,
        handle: Handle,
        buffers: BufferPool,
        coming: ComingVolume,
        trial_max: Duration,
        service: Rc<Service>,
    ) -> impl Future<Output = ()> + use<> {
        let part =
            TargetPart::new(handle, buffers, self.index, coming, trial_max, Some(service), self.events);
        part.follow(self.orders)
    }
}

/// A volume that is lent to a source's conductor, seen from its own line to the target.
///
/// It does not keep the volume's part, which ends with the migration.
pub struct SourceFollower(Weak<SourcePart>);

impl SourceFollower {
    /// Tells that the peer has restarted: what was not durable there is lost.
    ///
    /// To be called before anything that is submitted to its store from then on has ended.
    pub fn peer_restarted(&self) {
        if let Some(part) = self.0.upgrade() {
            part.peer_restarted();
        }
    }
}

/// Where a source's conductor finds a volume.
pub(super) enum SourceSeat {
    Here(Rc<SourcePart>),
    Lent {
        orders: mpsc::UnboundedSender<SourceOrder>,
        /// What it told last.
        told: Box<PartProgress>,
    },
}

impl SourceSeat {
    pub(super) fn lent(orders: mpsc::UnboundedSender<SourceOrder>) -> Self {
        Self::Lent { orders, told: Box::default() }
    }

    pub(super) fn order(&self, order: SourceOrder) {
        match self {
            Self::Here(part) => part.carry_out(order),
            Self::Lent { orders, .. } => {
                // One that is gone has said so.
                let _ = orders.unbounded_send(order);
            }
        }
    }

    pub(super) fn progress(&self) -> PartProgress {
        match self {
            Self::Here(part) => part.progress(),
            Self::Lent { told, .. } => (**told).clone(),
        }
    }

    pub(super) fn costs(&self) -> Costs {
        match self {
            Self::Here(part) => part.costs(),
            Self::Lent { told, .. } => told.costs,
        }
    }
}

/// Where a target's conductor finds a volume.
pub(super) enum TargetSeat {
    Here(Rc<TargetPart>),
    Lent(mpsc::UnboundedSender<TargetOrder>),
}

impl TargetSeat {
    pub(super) fn order(&self, order: TargetOrder) {
        match self {
            Self::Here(part) => part.carry_out(order),
            Self::Lent(orders) => {
                // One that is gone has said so.
                let _ = orders.unbounded_send(order);
            }
        }
    }

    /// Tells whether its lane has ended.
    pub(super) fn is_gone(&self) -> bool {
        matches!(self, Self::Lent(orders) if orders.is_closed())
    }
}

/// The last of so many positions.
fn last_of(volumes: usize) -> VolumeIndex {
    VolumeIndex::all(volumes).last().unwrap_or(VolumeIndex(0))
}
