//! This host's side of a migration, and its memory of volumes that went to another host.
//!
//! ```text
//!   OneHost    one journal holds both sides:  Copying → Prepared → Released → Owned → Ended
//!   Outgoing   the source's journal:          Copying ───────────► Released ────────► Ended
//!   Incoming   the target's journal:          Copying → Prepared ────────────► Owned → Ended
//! ```
//! Each journal alone says whether its own host may act as owner: the source's until *released*, the target's from *owned* on.
//! Between the two no host serves the volume from a store.

use chronicle::{BranchId, Generation};
use serde::{Deserialize, Serialize};

use super::record::VolumeRecord;
use super::state::VolumeState;
use crate::identity::{HostId, MigrationId, VolumeId};

/// This host's side of a migration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Side {
    /// Both sides: between stores of one host.
    #[default]
    OneHost,
    /// The source: the volumes leave.
    Outgoing {
        /// The host that they go to.
        peer: HostId,
        /// The name of that host, as configured here.
        peer_name: String,
        /// The store that they go to at that host.
        store: String,
        /// Whether clients that stay are forwarded.
        forwarding: Forwarding,
    },
    /// The target: the volumes arrive.
    Incoming {
        /// The host that they come from.
        peer: HostId,
        /// The name of that host, as configured here.
        peer_name: String,
        /// The migration's number at the source.
        remote: MigrationId,
        /// The volumes served here from *owned* on; the generations are the source's until then.
        volumes: Vec<VolumeRecord>,
    },
}

/// What a host does for clients of a volume that has left for another host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Forwarding {
    /// Connected clients are forwarded until they leave; new ones learn where the volume is.
    WhileConnected,
    /// The volume stays exported here (`--serve-here`): its store is at another host, its clients stay.
    Always,
}

/// A volume that this host has handed to another host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moved {
    /// The volume as it was here. Its former image is fenced, deleted, or about to be.
    pub volume: VolumeState,
    /// The migration by which it left.
    pub migration: MigrationId,
    /// The host that has the volume.
    pub host: HostId,
    /// The name of that host, as configured here.
    pub host_name: String,
    /// The volume's generation there after the handover.
    pub generation: Generation,
    /// How clients of this host are served.
    pub forwarding: Forwarding,
    /// The time of the departure, in milliseconds since 1970.
    pub at_unix_ms: u64,
}

/// The reason why a target took volumes over without COMMIT.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Promotion {
    /// The administrator used the ticket that the source printed after *released*: no other host owns the volumes.
    Ticket,
    /// The administrator forced it. **N.B.** The source may own the volumes as well, so each begins a branch of its history.
    Force {
        /// The identities of the new branches.
        branches: Vec<(VolumeId, BranchId)>,
    },
}

/// A branch that a forced promotion began in a volume's history (design §5.16).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Branch {
    /// The identity of the branch.
    pub id: BranchId,
    /// The migration whose copy was promoted.
    pub migration: MigrationId,
    /// The last generation that both branches share.
    pub from: Generation,
}

impl Side {
    /// Returns the other host's identity and name; `None` on one host.
    pub fn peer(&self) -> Option<(HostId, &str)> {
        match self {
            Self::OneHost => None,
            Self::Outgoing { peer, peer_name, .. } | Self::Incoming { peer, peer_name, .. } => {
                Some((*peer, peer_name))
            }
        }
    }

    /// Returns whether the source's images are this host's.
    pub fn has_source(&self) -> bool {
        !matches!(self, Self::Incoming { .. })
    }

    /// Returns whether the target's images are this host's.
    pub fn has_target(&self) -> bool {
        !matches!(self, Self::Outgoing { .. })
    }
}
