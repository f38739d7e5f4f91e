//! Volumes that have left for another host: for how long the lane that they have left here is needed.
//!
//! ```text
//!   released ──► the other host takes what it lacks from it ──► ended ──► clients that stayed are led on ──► the last has left
//!                        └─► it comes home, into the same lane
//! ```

use super::side::{Forwarding, Moved};
use super::state::{MigrationState, State};
use crate::identity::{HostId, VolumeId};
use crate::planted::{Bug, broken};

/// Who uses a volume at a host that it has left.
#[derive(Clone, Copy, Debug, Default)]
pub struct Users<'a> {
    /// Connections of clients of this host, and requests of theirs that are under way.
    pub clients: usize,
    /// Hosts that lead clients of their own through here, whether those ask for anything just now or not.
    pub led_here_by: &'a [HostId],
    /// Whether a VM of this host runs on it, which connects again whenever it is cut off.
    pub has_vm: bool,
}

/// What becomes of the lane that a volume has left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LaneLeft {
    /// The volume has come home to it, or is forgotten: it is no lane of a volume that has left.
    Over,
    /// It goes on.
    Needed,
    /// Nobody asks it for anything, and nobody will without asking for the volume first.
    Unneeded {
        /// The name by which people know the host that has the volume.
        host: String,
    },
}

impl State {
    /// What becomes of the lane by which this volume has left, while it is used so.
    pub fn lane_left(&self, volume: VolumeId, users: Users<'_>) -> LaneLeft {
        let Some(moved) = self.moved.get(&volume) else { return LaneLeft::Over };
        // One that has the volume itself leads nobody here any more.
        let is_led_here = users.led_here_by.iter().any(|host| *host != moved.host);
        let is_used = users.clients > 0 || is_led_here || users.has_vm;
        match !self.is_departure_over(moved) || moved.forwarding == Forwarding::Always || is_used {
            true => LaneLeft::Needed,
            false => LaneLeft::Unneeded { host: moved.host_name.clone() },
        }
    }

    /// Whether a start makes a lane for a volume that has left: for what comes home into it, and to lead on clients that cannot ask for
    /// it. `has_clients`: some of the daemon before have not been broken off.
    ///
    /// A departure that is under way has its lane made by whoever goes on with it.
    pub fn begins_with_lane(&self, moved: &Moved, has_clients: bool, has_vm: bool) -> bool {
        let is_led_on = moved.forwarding == Forwarding::Always || has_clients || has_vm;
        self.taken_back_by(moved.migration).is_some() || self.is_departure_over(moved) && is_led_on
    }

    /// The volume that has left has grown at its owner. What was left here has not: while it may be handed back, its size here counts.
    pub(super) fn grew_elsewhere(&mut self, volume: VolumeId, size_bytes: u64) {
        let is_over = !broken(Bug::FormerSizeOffered)
            && self.moved.get(&volume).is_some_and(|moved| self.is_departure_over(moved));
        if let Some(moved) = self.moved.get_mut(&volume).filter(|_| is_over) {
            let record = &mut moved.volume.record;
            record.size_bytes = record.size_bytes.max(size_bytes);
        }
    }

    /// Whether the other host has all of a volume that has left: nothing is fetched from here any more, and it comes home by a
    /// migration like any other.
    pub fn is_departure_over(&self, moved: &Moved) -> bool {
        // Of one that is forgotten nothing is under way.
        self.migrations.get(&moved.migration).is_none_or(MigrationState::has_ended)
    }
}
