//! The paired hosts by name, and what each of them is trusted with.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use serde::{Deserialize, Serialize};
use transport::{HostId, InvitationId, Link, Peer, Peers};

use super::history::History;
use crate::audit::{self, Audit, By};
use crate::files::listing::{Listed, Listing, ListingError};

/// The number of invitations with terms: as many as can be open.
const TERMS_MAX: usize = 1000;

pub(crate) struct Known {
    listing: Listing<Entry>,
    history: History,
    /// What each invitation gives to the host that redeems it. Like the invitations, it does not outlast the daemon.
    terms: Mutex<BTreeMap<InvitationId, Trust>>,
    /// This host's own name, which no other host may have.
    own_name: OnceLock<String>,
    audit: Option<Audit>,
}

/// What another host is trusted with, besides the volumes that it gets or brings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Trust {
    /// It may bring VMs, which run here.
    pub(crate) machines: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Acquaintance {
    /// The host, by its name here.
    pub(crate) peer: Peer,
    pub(crate) trust: Trust,
    /// Its own name, if another host had that name when it came.
    pub(crate) calls_itself: Option<String>,
}

#[derive(Clone, Serialize, Deserialize)]
struct Entry {
    name: String,
    #[serde(with = "id")]
    id: HostId,
    links: Vec<Link>,
    #[serde(flatten)]
    trust: Trust,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    calls_itself: Option<String>,
}

impl Known {
    /// Reads the file, if it exists.
    pub(crate) fn open(data_dir: &Path) -> Result<Self, ListingError> {
        let listing = Listing::open(data_dir)?;
        let history = History::open(data_dir, &Self::list_path(data_dir));
        Ok(Self { listing, history, terms: Mutex::default(), own_name: OnceLock::new(), audit: None })
    }

    pub(super) fn read(data_dir: &Path) -> Result<Vec<Peer>, ListingError> {
        let listing = Listing::<Entry>::open(data_dir)?;
        Ok(listing.list().into_iter().map(Peer::from).collect())
    }

    pub(super) fn list_path(data_dir: &Path) -> PathBuf {
        data_dir.join(Entry::FILE)
    }

    /// Logs hosts that join from now on.
    pub(crate) fn audited(self, audit: Audit) -> Self {
        Self { audit: Some(audit), ..self }
    }

    /// Sets this host's own name.
    pub(crate) fn is_called(&self, own_name: &str) {
        // An error means that the name is set already, and it never changes.
        let _ = self.own_name.set(own_name.to_owned());
    }

    pub(crate) fn list(&self) -> Vec<Peer> {
        self.listing.list().into_iter().map(Peer::from).collect()
    }

    pub(crate) fn get(&self, name: &str) -> Option<Peer> {
        self.listing.get(name).map(Peer::from)
    }

    pub(crate) fn acquaintances(&self) -> Vec<Acquaintance> {
        self.listing.list().into_iter().map(Acquaintance::from).collect()
    }

    pub(crate) fn acquaintance(&self, name: &str) -> Option<Acquaintance> {
        self.listing.get(name).map(Acquaintance::from)
    }

    /// Returns the permissions of a host; an unknown host has none.
    pub(crate) fn trust(&self, id: HostId) -> Trust {
        self.listing.find(|known| known.id == id).map(|known| known.trust).unwrap_or_default()
    }

    /// Keeps what an invitation gives.
    pub(crate) fn agree(&self, invitation: InvitationId, trust: Trust) {
        let mut terms = lock(&self.terms);
        if terms.len() >= TERMS_MAX {
            // A host that redeems one of these is trusted with less than promised, never with more.
            terms.clear();
        }
        terms.insert(invitation, trust);
    }

    /// Changes the permissions and the links of a host durably, where they are given; `None`: there is no such host.
    pub(crate) fn set(
        &self,
        name: &str,
        trust: Option<Trust>,
        links: Option<Vec<Link>>,
    ) -> Result<Option<Acquaintance>, ListingError> {
        let changed = self.listing.change(|hosts| {
            let entry = hosts.get_mut(name)?;
            entry.trust = trust.unwrap_or(entry.trust);
            entry.links = links.unwrap_or_else(|| entry.links.clone());
            Some(Acquaintance::from(entry.clone()))
        })?;
        self.history.list_changed(None);
        Ok(changed)
    }

    /// Adds a host durably, or replaces its record. It gets another name if another host, or this one, has its name. Without
    /// terms it keeps its former trust, or gets none.
    pub(crate) fn add(&self, peer: &Peer, trust: Option<Trust>) -> Result<Acquaintance, ListingError> {
        let own_name = self.own_name.get().map(String::as_str);
        let added = self.listing.change(|hosts| {
            // A host that is paired again keeps its name here.
            let before = hosts.values().find(|known| known.id == peer.id).cloned();
            let trust = trust.or_else(|| Some(before.as_ref()?.trust)).unwrap_or_default();
            let name = before.map_or_else(|| free_name(hosts, own_name, &peer.name), |before| before.name);
            let calls_itself = Some(peer.name.clone()).filter(|own| *own != name);
            let Peer { id, links, .. } = peer.clone();
            let added = Entry { name: name.clone(), id, links, trust, calls_itself };
            hosts.insert(name, added.clone());
            Acquaintance::from(added)
        })?;
        self.history.list_changed(None);
        Ok(added)
    }

    pub(crate) fn remove(&self, name: &str) -> Result<Option<Peer>, ListingError> {
        let removed = self.listing.remove(name)?.map(Peer::from);
        self.history.list_changed(removed.as_ref());
        Ok(removed)
    }
}

impl Peers for Known {
    fn find(&self, id: HostId) -> Option<Peer> {
        self.listing.find(|known| known.id == id).map(Peer::from)
    }

    fn is_at(&self, address: IpAddr) -> bool {
        let is_there = |link: &Link| link.address.parse().is_ok_and(|link: SocketAddr| link.ip() == address);
        self.listing.find(|known| known.links.iter().any(is_there)).is_some()
    }

    fn joined(&self, peer: &Peer, by: InvitationId) -> Result<(), String> {
        let trust = lock(&self.terms).get(&by).copied();
        let added = self.add(peer, trust).map_err(|error| crate::error::with_causes(&error))?;
        // N.B. The terms apply once: a host that redeems the invitation again keeps its present trust.
        lock(&self.terms).remove(&by);
        let (Acquaintance { peer, trust, calls_itself }, calls) = (added, peer.name.as_str());
        if let Some(audit) = &self.audit {
            audit.note(&joined(&peer, trust));
        }
        tracing::info!(host = %peer.name, id = %peer.id, machines = trust.machines, "a host has joined by an invitation");
        if calls_itself.is_some() {
            tracing::warn!(host = %peer.name, calls_itself = calls, "another host, or this one, has the name of the host that \
                joined; it gets another name here");
        }
        Ok(())
    }
}

fn joined(peer: &Peer, trust: Trust) -> audit::Entry {
    let details = serde_json::json!({ "name": peer.name, "allow_machines": trust.machines });
    audit::Entry {
        by: Some(By::Host { id: migration::HostId(peer.id.0) }),
        order: "join".to_owned(),
        path: None,
        details: details.as_object().cloned().unwrap_or_default(),
        status: None,
        outcome: "done".to_owned(),
        seconds: 0.0,
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

fn free_name(hosts: &BTreeMap<String, Entry>, own_name: Option<&str>, name: &str) -> String {
    let numbered = (2..).map(|number: u32| format!("{name}-{number}"));
    let mut names = std::iter::once(name.to_owned()).chain(numbered);
    let is_free = |name: &String| !hosts.contains_key(name) && own_name != Some(name);
    names.find(is_free).unwrap_or_else(|| name.to_owned())
}

/// Stores identities in the form that users see.
pub(crate) mod id {
    use serde::{Deserialize as _, Deserializer, Serializer};
    use transport::HostId;

    pub(crate) fn serialize<S: Serializer>(id: &HostId, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(id)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<HostId, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

impl From<Entry> for Peer {
    fn from(Entry { name, id, links, .. }: Entry) -> Self {
        Self { id, name, links }
    }
}

impl From<Entry> for Acquaintance {
    fn from(entry: Entry) -> Self {
        let (trust, calls_itself) = (entry.trust, entry.calls_itself.clone());
        Self { peer: Peer::from(entry), trust, calls_itself }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use transport::{HostId, InvitationId, Link, Peer, Peers as _};

    use super::{Known, Trust};

    const TRUSTED: Trust = Trust { machines: true };

    fn peer(byte: u8, name: &str) -> Peer {
        Peer { id: HostId([byte; 32]), name: name.into(), links: vec![Link::new("10.0.0.1:7423")] }
    }

    #[test]
    fn hosts_are_kept_and_forgotten() {
        let folder = tempfile::tempdir().unwrap();
        let known = Known::open(folder.path()).unwrap();
        known.add(&peer(1, "b"), None).unwrap();
        assert_eq!(known.add(&peer(2, "b"), None).unwrap().peer.name, "b-2");
        assert_eq!(known.add(&peer(1, "renamed"), None).unwrap().peer.name, "b");
        let again = Known::open(folder.path()).unwrap();
        assert_eq!(again.list(), [peer(1, "b"), peer(2, "b-2")]);
        assert_eq!(again.find(HostId([2; 32])), again.get("b-2"));
        assert_eq!(again.remove("b").unwrap(), Some(peer(1, "b")));
        assert_eq!(again.remove("b").unwrap(), None);
        assert_eq!(Known::open(folder.path()).unwrap().list(), [peer(2, "b-2")]);
    }

    #[test]
    fn a_name_that_is_taken_is_not_had_by_another_host_and_that_is_said() {
        let folder = tempfile::tempdir().unwrap();
        let known = Known::open(folder.path()).unwrap();
        known.is_called("a");
        assert_eq!(known.add(&peer(1, "b"), None).unwrap().calls_itself, None);
        for (byte, name, here) in [(2, "b", "b-2"), (3, "a", "a-2")] {
            let added = known.add(&peer(byte, name), None).unwrap();
            assert_eq!((added.peer.name.as_str(), added.calls_itself.as_deref()), (here, Some(name)));
        }
        let again = Known::open(folder.path()).unwrap().acquaintance("a-2").unwrap();
        assert_eq!(again.calls_itself.as_deref(), Some("a"));
    }

    #[test]
    fn a_host_is_trusted_with_machines_only_if_that_was_said_and_as_long_as_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let known = Known::open(folder.path()).unwrap();
        let [plain, trusting] = [InvitationId([1; 16]), InvitationId([2; 16])];
        known.agree(trusting, TRUSTED);
        known.joined(&peer(1, "b"), plain).unwrap();
        known.joined(&peer(2, "c"), trusting).unwrap();
        let trust = |byte| Known::open(folder.path()).unwrap().trust(HostId([byte; 32]));
        assert_eq!([1, 2, 3].map(trust), [Trust::default(), TRUSTED, Trust::default()]);
        // A host that redeems it again keeps its reduced trust.
        assert_eq!(known.set("c", Some(Trust::default()), None).unwrap().unwrap().trust, Trust::default());
        known.joined(&peer(2, "c"), trusting).unwrap();
        assert_eq!(trust(2), Trust::default());
        known.set("b", Some(TRUSTED), None).unwrap().unwrap();
        known.joined(&peer(1, "b"), plain).unwrap();
        assert_eq!(trust(1), TRUSTED);
        assert_eq!(known.set("nobody", Some(TRUSTED), None).unwrap(), None);
    }
}
