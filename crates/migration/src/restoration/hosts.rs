//! Which hosts must be asked after a journal was restored, and whether all of them are known.
//!
//! ```text
//!   found after the restoration                             the list of hosts is   hosts that must be asked
//!   this data folder's list, since before the backup        complete               those of the list, those removed since the
//!                                                                                  backup, peers of migrations under way
//!   no list, an unreadable one, one of another time         unknown                all that the journal and the export name
//! ```
//! **N.B.** Unknown is not "no": a host that is not in the list may have every volume. Then nothing is served automatically,
//! and an order begins a branch. A host that is named here gains no access by it.

use std::collections::{BTreeMap, BTreeSet};

use crate::identity::{HostId, VolumeId};
use crate::journal::{Doubt, HostList, NamedHost, RestoredVolume, State, Unlisted};
use crate::planted::{Bug, broken};

/// The facts found where a journal is restored.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Surroundings {
    /// The time of the backup's last commit, in milliseconds since 1970.
    pub backup_unix_ms: u64,
    /// The current time, in milliseconds since 1970.
    pub at_unix_ms: u64,
    /// Whether this host's list names every host that was paired since [`since`].
    pub list: HostList,
    /// Who vouches for the list.
    pub known_by: KnownBy,
    /// The listed hosts, those removed since the backup, and those that the export names.
    pub hosts: BTreeSet<NamedHost>,
    /// The sizes of volumes in a later journal of this host, which is replaced.
    pub sizes: BTreeMap<VolumeId, u64>,
}

/// Who vouches for the completeness of a list.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KnownBy {
    /// The data folder shows it.
    #[default]
    Look,
    /// The administrator says so.
    People,
}

/// Returns the time since which hosts may have taken volumes of a backup made at `backup_unix_ms`. Volumes that waited at that
/// time have waited since an earlier restoration, and are as old as that backup.
pub fn since(backup: &State, backup_unix_ms: u64) -> u64 {
    match &backup.restored {
        Some(earlier) if backup.in_question().next().is_some() => backup_unix_ms.min(earlier.backup_unix_ms),
        _ => backup_unix_ms,
    }
}

pub(super) fn list(found: &Surroundings, backup: &State) -> HostList {
    let earlier = backup.restored.as_ref().filter(|_| backup.in_question().next().is_some());
    match (found.list, earlier.map(|earlier| earlier.more.list)) {
        (HostList::Complete, Some(unknown @ HostList::Unknown(_))) if found.known_by == KnownBy::Look => {
            unknown
        }
        (found, _) => found,
    }
}

/// The hosts that can be asked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hosts {
    /// The hosts that are paired with this host.
    pub paired: BTreeSet<HostId>,
    /// The hosts that are unknown or unavailable.
    pub lacks: Lacks,
}

/// The hosts that cannot be asked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Lacks {
    /// All hosts can be asked.
    #[default]
    Nothing,
    /// These hosts must be asked, but are not paired with this host.
    These(Vec<HostId>),
    /// The hosts that must be asked are not known.
    Unknown(Unlisted),
}

impl Hosts {
    /// Returns a set of hosts in which none is lacking.
    pub fn all(paired: BTreeSet<HostId>) -> Self {
        Self { paired, lacks: Lacks::Nothing }
    }
}

/// Returns the hosts to ask about a journal's volumes. `paired` holds the hosts of the list; `Err` if it cannot be read.
pub fn hosts_to_ask(state: &State, paired: Result<BTreeSet<HostId>, Unlisted>) -> Hosts {
    let Some(restored) = &state.restored else { return Hosts::default() };
    let paired = match paired {
        Ok(paired) => paired,
        Err(unlisted) => return Hosts { paired: BTreeSet::new(), lacks: Lacks::Unknown(unlisted) },
    };
    let lacking = || {
        let named = restored.more.hosts.iter().map(|host| host.id);
        named.filter(|host| !paired.contains(host)).collect::<Vec<_>>()
    };
    let lacks = match restored.more.list {
        HostList::Unknown(unlisted) if !broken(Bug::RestoredListLost) => Lacks::Unknown(unlisted),
        _ if broken(Bug::RestoredHostRemoved) => Lacks::Nothing,
        HostList::Unknown(_) | HostList::Complete => match lacking() {
            lacking if lacking.is_empty() => Lacks::Nothing,
            lacking => Lacks::These(lacking),
        },
    };
    Hosts { paired, lacks }
}

pub(super) fn named(found: &Surroundings, backup: &State, waiting: &[RestoredVolume]) -> BTreeSet<NamedHost> {
    let mut hosts = found.hosts.clone();
    let earlier = backup.restored.iter().filter(|_| found.known_by == KnownBy::Look);
    let mut name = |id: HostId, name: &str| {
        if !hosts.iter().any(|known| known.id == id) {
            hosts.insert(NamedHost { id, name: name.to_owned() });
        }
    };
    earlier.flat_map(|earlier| &earlier.more.hosts).for_each(|host| name(host.id, &host.name));
    backup.fillings.values().for_each(|filling| name(filling.peer, &filling.peer_name));
    let peers = |is_wanted: fn(bool) -> bool| {
        backup
            .migrations
            .values()
            .filter(move |known| is_wanted(known.has_ended()))
            .filter_map(|known| known.side.peer())
    };
    peers(|has_ended| !has_ended).for_each(|(id, peer_name)| name(id, peer_name));
    for copy in waiting {
        if let Some(Doubt::Copy { peer, peer_name }) = &copy.doubt {
            name(*peer, peer_name);
        }
    }
    if let HostList::Unknown(_) = list(found, backup) {
        // The administrator sees these hosts: pairing with them helps.
        peers(|has_ended| has_ended).for_each(|(id, peer_name)| name(id, peer_name));
        backup.moved.values().for_each(|moved| name(moved.host, &moved.host_name));
    }
    hosts
}
