//! The hosts that this one is paired with, by name.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};
use transport::{HostId, Link, Peer, Peers};

use crate::listing::{Listed, Listing, ListingError};

/// The hosts that this one is paired with.
pub(crate) struct Known(Listing<Entry>);

/// What is remembered of a host.
#[derive(Clone, Serialize, Deserialize)]
struct Entry {
    name: String,
    #[serde(with = "id")]
    id: HostId,
    links: Vec<Link>,
}

impl Known {
    /// Reads the file, if there is one.
    pub(crate) fn open(data_dir: &Path) -> Result<Self, ListingError> {
        Listing::open(data_dir).map(Self)
    }

    pub(crate) fn list(&self) -> Vec<Peer> {
        self.0.list().into_iter().map(Peer::from).collect()
    }

    pub(crate) fn get(&self, name: &str) -> Option<Peer> {
        self.0.get(name).map(Peer::from)
    }

    /// Adds a host durably, or replaces what is known of it; it gets another name if its own is another host's.
    pub(crate) fn add(&self, peer: &Peer) -> Result<Peer, ListingError> {
        self.0.change(|hosts| {
            // A host that is paired again keeps the name that people know it by.
            let before = hosts.values().find(|known| known.id == peer.id).map(|known| known.name.clone());
            let name = before.unwrap_or_else(|| free_name(hosts, &peer.name));
            let added = Peer { name: name.clone(), ..peer.clone() };
            hosts.insert(name, Entry::from(&added));
            added
        })
    }

    /// Forgets a host durably.
    pub(crate) fn remove(&self, name: &str) -> Result<Option<Peer>, ListingError> {
        Ok(self.0.remove(name)?.map(Peer::from))
    }
}

impl Peers for Known {
    fn find(&self, id: HostId) -> Option<Peer> {
        self.0.find(|known| known.id == id).map(Peer::from)
    }

    fn joined(&self, peer: &Peer) -> Result<(), String> {
        let added = self.add(peer).map_err(|error| crate::error::with_causes(&error))?;
        tracing::info!(host = %added.name, id = %added.id, "a host has joined by an invitation");
        Ok(())
    }
}

impl Listed for Entry {
    const FILE: &'static str = "hosts.json";
    const VERSION: u32 = 1;
    const KEY: &'static str = "hosts";
    const OTHERWISE: &'static str = "no list of hosts: restore it, or remove it and pair the hosts again";

    fn name(&self) -> &str {
        &self.name
    }
}

fn free_name(hosts: &BTreeMap<String, Entry>, name: &str) -> String {
    let numbered = (2..).map(|number: u32| format!("{name}-{number}"));
    let mut names = std::iter::once(name.to_owned()).chain(numbered);
    names.find(|name| !hosts.contains_key(name)).unwrap_or_else(|| name.to_owned())
}

/// Identifiers are written as people see them elsewhere.
mod id {
    use serde::{Deserialize as _, Deserializer, Serializer};
    use transport::HostId;

    pub(super) fn serialize<S: Serializer>(id: &HostId, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(id)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<HostId, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

impl From<&Peer> for Entry {
    fn from(peer: &Peer) -> Self {
        let Peer { id, name, links } = peer.clone();
        Self { name, id, links }
    }
}

impl From<Entry> for Peer {
    fn from(Entry { name, id, links }: Entry) -> Self {
        Self { id, name, links }
    }
}

#[cfg(test)]
mod tests {
    use transport::{HostId, Link, Peer, Peers as _};

    use super::Known;

    fn peer(byte: u8, name: &str) -> Peer {
        Peer { id: HostId([byte; 32]), name: name.into(), links: vec![Link::new("10.0.0.1:7423")] }
    }

    #[test]
    fn hosts_are_kept_and_forgotten() {
        let folder = tempfile::tempdir().unwrap();
        let known = Known::open(folder.path()).unwrap();
        known.add(&peer(1, "b")).unwrap();
        assert_eq!(known.add(&peer(2, "b")).unwrap().name, "b-2");
        assert_eq!(known.add(&peer(1, "renamed")).unwrap().name, "b");
        let again = Known::open(folder.path()).unwrap();
        assert_eq!(again.list(), [peer(1, "b"), peer(2, "b-2")]);
        assert_eq!(again.find(HostId([2; 32])), again.get("b-2"));
        assert_eq!(again.remove("b").unwrap(), Some(peer(1, "b")));
        assert_eq!(again.remove("b").unwrap(), None);
        assert_eq!(Known::open(folder.path()).unwrap().list(), [peer(2, "b-2")]);
    }
}
