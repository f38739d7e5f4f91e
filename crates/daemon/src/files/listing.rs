//! Lists of named entries, each in a file of its own, which is replaced as a whole.
//! They are not in the journal, because no volume and no ownership depends on them. Users may read the files and back them up,
//! and a broken file keeps no volume from being served.
//!
//! ```text
//!   vms.json       {"version": 1, "vms":      [ … ]}    VMs            vms/catalogue.rs
//!   adopted.json   {"version": 1, "VMs": [ … ]}    adopted VMs    vms/adoptions.rs
//!   hosts.json     {"version": 1, "hosts":    [ … ]}    paired hosts        hosts/known.rs, and what happened to it: hosts/history.rs
//!   access.json    {"version": 1, "grants":   [ … ]}    keys of the API     grants.rs
//! ```

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::files::whole_file;

/// The largest file size: hundreds of VMs with the longest definitions, thousands of hosts.
const FILE_BYTES_MAX: u64 = 16 << 20;

pub(crate) trait Listed: Clone + Serialize + DeserializeOwned {
    /// The name of the file in the data folder.
    const FILE: &'static str;
    /// The version of its format; other versions are not read.
    const VERSION: u32;
    const KEY: &'static str;
    /// For a file that cannot be read: what it is not, and how to get a valid one.
    const OTHERWISE: &'static str;

    /// Returns the entry's name, unique in the list.
    fn name(&self) -> &str;
}

/// A list, as it is in its file.
pub(crate) struct Listing<T> {
    path: PathBuf,
    entries: Mutex<BTreeMap<String, T>>,
}

/// Why a file cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ListingError {
    #[error("the file {path} cannot be {done}")]
    Io { path: PathBuf, done: &'static str, source: io::Error },
    /// The file has another content.
    #[error("the file {path} is {otherwise}")]
    Malformed { path: PathBuf, otherwise: &'static str, source: serde_json::Error },
    /// Another version of the program wrote the file.
    #[error("the file {path} has version {version}; this program knows {known}")]
    Version { path: PathBuf, version: u32, known: u32 },
}

#[derive(Serialize, Deserialize)]
struct Content {
    version: u32,
    #[serde(flatten)]
    lists: Map<String, Value>,
}

impl<T: Listed> Listing<T> {
    /// Reads the file, if it exists. May block, like everything that reads or writes the file.
    pub(crate) fn open(data_dir: &Path) -> Result<Self, ListingError> {
        let path = data_dir.join(T::FILE);
        let failed = |source| ListingError::Io { path: path.clone(), done: "read", source };
        let entries = match whole_file::believe(&*path, FILE_BYTES_MAX).map_err(failed)? {
            None => BTreeMap::new(),
            Some(text) => decode::<T>(&path, &text)?,
        };
        Ok(Self { path, entries: Mutex::new(entries) })
    }

    /// Returns all entries, by name.
    pub(crate) fn list(&self) -> Vec<T> {
        self.lock().values().cloned().collect()
    }

    pub(crate) fn get(&self, name: &str) -> Option<T> {
        self.lock().get(name).cloned()
    }

    /// Returns the first entry for which `wanted` is true.
    pub(crate) fn find(&self, wanted: impl Fn(&T) -> bool) -> Option<T> {
        self.lock().values().find(|entry| wanted(entry)).cloned()
    }

    /// Adds an entry durably, or replaces the one with its name.
    pub(crate) fn put(&self, entry: &T) -> Result<(), ListingError> {
        self.change(|entries| drop(entries.insert(entry.name().to_owned(), entry.clone())))
    }

    /// Removes an entry durably; returns it, if it existed.
    pub(crate) fn remove(&self, name: &str) -> Result<Option<T>, ListingError> {
        self.change(|entries| entries.remove(name))
    }

    /// Changes the list durably; if that fails, nothing is changed.
    pub(crate) fn change<R>(
        &self,
        change: impl FnOnce(&mut BTreeMap<String, T>) -> R,
    ) -> Result<R, ListingError> {
        let mut entries = self.lock();
        let mut changed = entries.clone();
        let result = change(&mut changed);
        let failed = |source| ListingError::Io { path: self.path.clone(), done: "written", source };
        let text = encode(changed.values()).map_err(|error| failed(error.into()))?;
        whole_file::replace(&self.path, &text).map_err(failed)?;
        *entries = changed;
        Ok(result)
    }

    /// The map stays consistent after a panic of another holder.
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, T>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn encode<'a, T: Listed + 'a>(entries: impl Iterator<Item = &'a T>) -> serde_json::Result<Vec<u8>> {
    let list = entries.map(serde_json::to_value).collect::<serde_json::Result<_>>()?;
    let lists = Map::from_iter([(T::KEY.to_owned(), Value::Array(list))]);
    serde_json::to_vec_pretty(&Content { version: T::VERSION, lists })
}

fn decode<T: Listed>(path: &Path, text: &[u8]) -> Result<BTreeMap<String, T>, ListingError> {
    let malformed = |source| {
        let otherwise = T::OTHERWISE;
        ListingError::Malformed { path: path.to_owned(), otherwise, source }
    };
    let mut content: Content = serde_json::from_slice(text).map_err(malformed)?;
    if content.version != T::VERSION {
        let (version, known) = (content.version, T::VERSION);
        return Err(ListingError::Version { path: path.to_owned(), version, known });
    }
    let list = content.lists.remove(T::KEY).unwrap_or_default();
    let list: Vec<T> = serde_json::from_value(list).map_err(malformed)?;
    Ok(list.into_iter().map(|entry| (entry.name().to_owned(), entry)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
    struct Thing {
        name: String,
        number: u32,
    }

    impl Listed for Thing {
        const FILE: &'static str = "things.json";
        const VERSION: u32 = 1;
        const KEY: &'static str = "things";
        const OTHERWISE: &'static str = "no list of things: begin anew";

        fn name(&self) -> &str {
            &self.name
        }
    }

    fn thing(name: &str, number: u32) -> Thing {
        Thing { name: name.to_owned(), number }
    }

    #[test]
    fn things_are_kept_changed_and_forgotten() {
        let folder = tempfile::tempdir().unwrap();
        let listing = Listing::open(folder.path()).unwrap();
        for entry in [thing("a", 1), thing("b", 2), thing("a", 3)] {
            listing.put(&entry).unwrap();
        }
        let again = Listing::<Thing>::open(folder.path()).unwrap();
        assert_eq!(again.list(), [thing("a", 3), thing("b", 2)]);
        assert_eq!(again.find(|thing| thing.number == 2), again.get("b"));
        assert_eq!(again.remove("a").unwrap(), Some(thing("a", 3)));
        assert_eq!(again.remove("a").unwrap(), None);
        assert_eq!(Listing::<Thing>::open(folder.path()).unwrap().list(), [thing("b", 2)]);
    }

    #[test]
    fn what_cannot_be_written_is_not_changed() {
        let folder = tempfile::tempdir().unwrap();
        let listing = Listing::open(folder.path()).unwrap();
        listing.put(&thing("a", 1)).unwrap();
        drop(folder);
        assert!(matches!(listing.put(&thing("a", 2)), Err(ListingError::Io { done: "written", .. })));
        assert_eq!(listing.list(), [thing("a", 1)]);
    }

    #[test]
    fn a_file_that_is_none_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let check = |text: &str| {
            std::fs::write(folder.path().join(Thing::FILE), text).unwrap();
            Listing::<Thing>::open(folder.path()).err().unwrap()
        };
        for text in ["{", "{}", r#"{"version":1}"#, r#"{"version":1,"things":[{"name":"a"}]}"#] {
            assert!(matches!(check(text), ListingError::Malformed { .. }), "{text}");
        }
        assert!(matches!(check(r#"{"version":2,"things":[]}"#), ListingError::Version { version: 2, .. }));
        let large = vec![b' '; FILE_BYTES_MAX as usize + 1];
        std::fs::write(folder.path().join(Thing::FILE), large).unwrap();
        assert!(matches!(Listing::<Thing>::open(folder.path()), Err(ListingError::Io { done: "read", .. })));
    }
}
