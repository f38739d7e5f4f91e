//! The hosts that this one is paired with, by name, and the file that keeps them.
//!
//! They are in a file of their own, not in the journal: nothing that must happen together with a volume's change
//! depends on them, people may read and back the file up, and a broken one keeps no volume from being served. It is
//! replaced as a whole: written beside, synced, renamed.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};
use transport::{HostId, Link, Peer, Peers};

use crate::whole_file;

/// Name of the file in the data folder.
const FILE: &str = "hosts.json";
/// Version of its format.
const VERSION: u32 = 1;
/// Its largest size: thousands of hosts.
const FILE_BYTES_MAX: u64 = 4 << 20;

/// The hosts that this one is paired with.
pub(crate) struct Known {
    path: PathBuf,
    /// By name.
    hosts: Mutex<BTreeMap<String, Peer>>,
}

/// Why the file cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum KnownError {
    /// The system refused.
    #[error("the file {path} cannot be {done}")]
    Io {
        path: PathBuf,
        done: &'static str,
        #[source]
        source: io::Error,
    },
    /// It holds something else.
    #[error("the file {path} is no list of hosts: restore it, or remove it and pair the hosts again")]
    Malformed {
        path: PathBuf,
        #[source]
        source: serde_json::Error,
    },
    /// It is from a newer version, or too large.
    #[error("the file {path} cannot be used: {reason}")]
    Unsuitable { path: PathBuf, reason: String },
}

impl Known {
    /// Reads the file, if there is one.
    pub(crate) fn open(data_dir: &Path) -> Result<Self, KnownError> {
        let path = data_dir.join(FILE);
        let hosts = match read(&path)? {
            None => BTreeMap::new(),
            Some(content) => content.hosts.into_iter().map(|host| (host.name.clone(), host.into())).collect(),
        };
        Ok(Self { path, hosts: Mutex::new(hosts) })
    }

    pub(crate) fn list(&self) -> Vec<Peer> {
        self.lock().values().cloned().collect()
    }

    pub(crate) fn get(&self, name: &str) -> Option<Peer> {
        self.lock().get(name).cloned()
    }

    /// Adds a host durably, or replaces what is known of it; it gets another name if its own is another host's.
    pub(crate) fn add(&self, peer: &Peer) -> Result<Peer, KnownError> {
        let mut hosts = self.lock();
        let mut changed = hosts.clone();
        // A host that is paired again keeps the name that people know it by.
        let before = changed.values().find(|known| known.id == peer.id).map(|known| known.name.clone());
        let name = before.unwrap_or_else(|| free_name(&changed, &peer.name));
        let added = Peer { name: name.clone(), ..peer.clone() };
        changed.insert(name, added.clone());
        self.write(&changed)?;
        *hosts = changed;
        Ok(added)
    }

    /// Forgets a host durably.
    pub(crate) fn remove(&self, name: &str) -> Result<Option<Peer>, KnownError> {
        let mut hosts = self.lock();
        let mut changed = hosts.clone();
        let Some(removed) = changed.remove(name) else { return Ok(None) };
        self.write(&changed)?;
        *hosts = changed;
        Ok(Some(removed))
    }

    fn write(&self, hosts: &BTreeMap<String, Peer>) -> Result<(), KnownError> {
        let content = Content { version: VERSION, hosts: hosts.values().map(Entry::from).collect() };
        let failed = |source| KnownError::Io { path: self.path.clone(), done: "written", source };
        let text = serde_json::to_vec_pretty(&content).map_err(|error| failed(error.into()))?;
        whole_file::replace(&self.path, &text).map_err(failed)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Peer>> {
        self.hosts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Peers for Known {
    fn find(&self, id: HostId) -> Option<Peer> {
        self.lock().values().find(|peer| peer.id == id).cloned()
    }

    fn joined(&self, peer: &Peer) -> Result<(), String> {
        let added = self.add(peer).map_err(|error| crate::error::with_causes(&error))?;
        tracing::info!(host = %added.name, id = %added.id, "a host has joined by an invitation");
        Ok(())
    }
}

fn free_name(hosts: &BTreeMap<String, Peer>, name: &str) -> String {
    let numbered = (2..).map(|number: u32| format!("{name}-{number}"));
    let mut names = std::iter::once(name.to_owned()).chain(numbered);
    names.find(|name| !hosts.contains_key(name)).unwrap_or_else(|| name.to_owned())
}

#[derive(Serialize, Deserialize)]
struct Content {
    version: u32,
    hosts: Vec<Entry>,
}

#[derive(Serialize, Deserialize)]
struct Entry {
    name: String,
    #[serde(with = "id")]
    id: HostId,
    links: Vec<Link>,
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

fn read(path: &Path) -> Result<Option<Content>, KnownError> {
    let failed = |source| KnownError::Io { path: path.to_owned(), done: "read", source };
    let unsuitable = |reason: String| KnownError::Unsuitable { path: path.to_owned(), reason };
    match fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(error)),
        Ok(metadata) if metadata.len() > FILE_BYTES_MAX => {
            return Err(unsuitable(format!(
                "it has {} bytes, at most {FILE_BYTES_MAX} are read",
                metadata.len()
            )));
        }
        Ok(_) => {}
    }
    let text = fs::read(path).map_err(failed)?;
    let content: Content = serde_json::from_slice(&text)
        .map_err(|source| KnownError::Malformed { path: path.to_owned(), source })?;
    if content.version != VERSION {
        return Err(unsuitable(format!("its version is {}, this program knows {VERSION}", content.version)));
    }
    Ok(Some(content))
}

#[cfg(test)]
mod tests {
    use transport::{HostId, Link, Peer, Peers as _};

    use super::{FILE, Known, KnownError};

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

    #[test]
    fn a_file_that_is_none_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let check = |text: &str| {
            std::fs::write(folder.path().join(FILE), text).unwrap();
            Known::open(folder.path()).err().unwrap()
        };
        assert!(matches!(check("{"), KnownError::Malformed { .. }));
        assert!(matches!(check(r#"{"version":2,"hosts":[]}"#), KnownError::Unsuitable { .. }));
    }
}
