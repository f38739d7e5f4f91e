//! Decides how long the lane of a volume that has left for another host is needed.
//!
//! ```text
//!   released ──► the other host fetches its missing blocks ──► ended ──► clients that stayed are forwarded ──► the last has left
//!                        └─► the volume returns, into the same lane
//! ```

use super::side::{Forwarding, Moved};
use super::state::{MigrationState, State};
use crate::identity::{HostId, VolumeId};
use crate::planted::{Bug, broken};

/// The users of a volume at a host that it has left.
#[derive(Clone, Copy, Debug, Default)]
pub struct Users<'a> {
    /// The connections of this host's clients, plus their requests in progress.
    pub clients: usize,
    /// The hosts that forward clients through this host, even without current requests.
    pub led_here_by: &'a [HostId],
    /// Whether a VM of this host runs on the volume; it reconnects after every disconnection.
    pub has_vm: bool,
}

/// The state of a lane whose volume has left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LaneLeft {
    /// The volume has returned to the lane, or is forgotten.
    Over,
    /// The lane is still needed.
    Needed,
    /// No client uses the lane, and none will before it asks where the volume is.
    Unneeded {
        /// The name of the host that has the volume, as configured here.
        host: String,
    },
}

impl State {
    /// Returns the state of the lane by which this volume has left, given its users.
    pub fn lane_left(&self, volume: VolumeId, users: Users<'_>) -> LaneLeft {
        let Some(moved) = self.moved.get(&volume) else { return LaneLeft::Over };
        // A host that has the volume itself does not forward clients to this host.
        let is_led_here = users.led_here_by.iter().any(|host| *host != moved.host);
        let is_used = users.clients > 0 || is_led_here || users.has_vm;
        let is_used = is_used && !broken(Bug::LaneEndsUnderClients);
        let is_under_way = !self.is_departure_over(moved) && !broken(Bug::LaneEndsUnderWay);
        match is_under_way || moved.forwarding == Forwarding::Always || is_used {
            true => LaneLeft::Needed,
            false => LaneLeft::Unneeded { host: moved.host_name.clone() },
        }
    }

    /// Returns whether a start makes a lane for a volume that has left. The volume may return to it, or clients that cannot ask
    /// need forwarding. `has_clients` says that connections of the earlier daemon persist.
    ///
    /// The lane of an unfinished departure is made by the code that resumes it.
    pub fn begins_with_lane(&self, moved: &Moved, has_clients: bool, has_vm: bool) -> bool {
        let is_led_on = moved.forwarding == Forwarding::Always || has_clients || has_vm;
        self.taken_back_by(moved.migration).is_some() || self.is_departure_over(moved) && is_led_on
    }

    /// Handles the growth of a volume at its new owner. The former image has not grown, and its size counts while the volume
    /// may be handed back.
    pub(super) fn grew_elsewhere(&mut self, volume: VolumeId, size_bytes: u64) {
        let is_over = !broken(Bug::FormerSizeOffered)
            && self.moved.get(&volume).is_some_and(|moved| self.is_departure_over(moved));
        if let Some(moved) = self.moved.get_mut(&volume).filter(|_| is_over) {
            let record = &mut moved.volume.record;
            record.size_bytes = record.size_bytes.max(size_bytes);
        }
    }

    /// Returns whether the other host has all of a volume that has left. Then it fetches nothing from here, and the volume
    /// returns by an ordinary migration.
    pub fn is_departure_over(&self, moved: &Moved) -> bool {
        // A forgotten migration has nothing under way.
        self.migrations.get(&moved.migration).is_none_or(MigrationState::has_ended)
    }
}
