//! Which side of a migration this host is, and what it remembers of volumes that went to another host.
//!
//! ```text
//!   OneHost    one journal holds both sides:  Copying → Prepared → Released → Owned → Ended
//!   Outgoing   the source's journal:          Copying ───────────► Released ────────► Ended
//!   Incoming   the target's journal:          Copying → Prepared ────────────► Owned → Ended
//! ```
//! Either journal alone says who owns a volume as far as its own host may act on it: the source's until *released*, the
//! target's from *owned* on. Between the two nobody serves it from a store.

use chronicle::{BranchId, Generation};
use serde::{Deserialize, Serialize};

use super::record::VolumeRecord;
use super::state::VolumeState;
use crate::identity::{HostId, MigrationId, VolumeId};

/// Which side of a migration this host is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Side {
    /// Both: between stores of one host.
    #[default]
    OneHost,
    /// The source: the volumes leave.
    Outgoing {
        /// The host that they go to.
        peer: HostId,
        /// The name by which people know it here.
        peer_name: String,
        /// The store that they go to there.
        store: String,
        /// What becomes of clients that stay connected here.
        forwarding: Forwarding,
    },
    /// The target: the volumes arrive.
    Incoming {
        /// The host that they come from.
        peer: HostId,
        /// The name by which people know it here.
        peer_name: String,
        /// The migration's number there.
        remote: MigrationId,
        /// What is served here from *owned* on; the generations are those of the source until then.
        volumes: Vec<VolumeRecord>,
    },
}

/// What a host does for clients that still ask it for a volume that it has handed to another host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Forwarding {
    /// Those that are connected are forwarded until they leave; new ones are told where the volume is.
    WhileConnected,
    /// The volume goes on being offered here (`--serve-here`): its store is another host's, its clients stay.
    Always,
}

/// A volume that this host has handed to another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moved {
    /// As it was here. Its image is what was left: fenced, deleted, or about to be.
    pub volume: VolumeState,
    /// The migration that took it away.
    pub migration: MigrationId,
    /// The host that has it.
    pub host: HostId,
    /// The name by which people know that host here.
    pub host_name: String,
    /// Its generation there when it left.
    pub generation: Generation,
    /// What clients of this host get.
    pub forwarding: Forwarding,
    /// When it left, in milliseconds since 1970.
    pub at_unix_ms: u64,
}

/// Why a target took volumes over without having heard COMMIT.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Promotion {
    /// Somebody brought the ticket that the source printed after *released*: nobody else owns the volumes.
    Ticket,
    /// Somebody insisted. **N.B.** The source may own the volumes as well, so each begins a branch of its history.
    Force {
        /// The branches' names, never given before.
        branches: Vec<(VolumeId, BranchId)>,
    },
}

/// A branch that a forced promotion opened on a volume's history (design §5.16).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Branch {
    /// Its name.
    pub id: BranchId,
    /// The migration whose copy was promoted.
    pub migration: MigrationId,
    /// The generation of the volume up to which both branches are the same.
    pub from: Generation,
}

impl Side {
    /// The other host; `None` on one host.
    pub fn peer(&self) -> Option<(HostId, &str)> {
        match self {
            Self::OneHost => None,
            Self::Outgoing { peer, peer_name, .. } | Self::Incoming { peer, peer_name, .. } => {
                Some((*peer, peer_name))
            }
        }
    }

    /// Tells whether the source's images are this host's.
    pub fn has_source(&self) -> bool {
        !matches!(self, Self::Incoming { .. })
    }

    /// Tells whether the target's images are this host's.
    pub fn has_target(&self) -> bool {
        !matches!(self, Self::Outgoing { .. })
    }
}
