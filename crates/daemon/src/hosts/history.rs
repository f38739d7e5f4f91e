//! The history of the list of hosts. It shows later whether the list names every host that may have received a volume.
//!
//! ```text
//!   data_dir/hosts.json           the list
//!   data_dir/hosts-history.json   since when the list has no gap │ removed hosts, and when they were removed
//!                                 the list's digest │ the inode and the birth of this very file
//! ```
//! A file that was restored from a backup is another file: its inode or its time of birth differs. This distinguishes a copy of
//! the data folder from the folder itself. A list that was changed by hand has another digest. **N.B.** If anything differs,
//! the list counts as incomplete. It also does on a file system without times of birth.

use std::collections::BTreeSet;
use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::UNIX_EPOCH;

use migration::journal::{HostList, NamedHost, Unlisted};
use ring::digest::{SHA256, digest};
use serde::{Deserialize, Serialize};
use transport::{HostId, Peer};

use super::known::{Known, id};
use crate::files::whole_file;
use crate::journal::now_unix_ms;

const FILE: &str = "hosts-history.json";
const FILE_BYTES_MAX: u64 = 16 << 20;
/// How many removed hosts are kept. When older ones are dropped, the history begins at the last of their removals.
const REMOVED_MAX: usize = 1000;

pub(super) struct History {
    path: PathBuf,
    list: PathBuf,
    content: Mutex<Content>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Content {
    version: u32,
    /// The identity of this file; `None`: its file system has no time of birth.
    file: Option<Born>,
    /// Since when the list has no gap.
    since_unix_ms: u64,
    /// The digest of the list in hexadecimal; `None`: there is no list.
    list_digest: Option<String>,
    removed: Vec<Removed>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Born {
    inode: u64,
    /// The time of birth in nanoseconds since 1970.
    at: String,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Removed {
    name: String,
    #[serde(with = "id")]
    id: HostId,
    at_unix_ms: u64,
}

impl History {
    /// Continues the history of a data folder, or begins one. May block.
    pub(super) fn open(data_dir: &Path, list: &Path) -> Self {
        let path = data_dir.join(FILE);
        let (found, begins) = match read(&path, list) {
            Ok(content) => (content, false),
            Err(_) => (Content::begun(), true),
        };
        let history = Self { path, list: list.to_owned(), content: Mutex::new(found) };
        if begins {
            history.write(|_| {});
        }
        history
    }

    /// Records a change of the list; `removed` is a host that was removed from it. May block.
    pub(super) fn list_changed(&self, removed: Option<&Peer>) {
        self.write(|content| {
            if let Some(Peer { id, name, .. }) = removed {
                content.removed.push(Removed { name: name.clone(), id: *id, at_unix_ms: now_unix_ms() });
            }
            let surplus = content.removed.len().saturating_sub(REMOVED_MAX);
            if let Some(last) = content.removed.drain(..surplus).next_back() {
                content.since_unix_ms = content.since_unix_ms.max(last.at_unix_ms + 1);
            }
        });
    }

    /// **N.B.** if the file cannot be written, it does not match the list, which a reader notices.
    fn write(&self, change: impl FnOnce(&mut Content)) {
        let mut content = self.content.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut content);
        let written = digest_of(&self.list).and_then(|digest| {
            content.list_digest = digest;
            whole_file::replace_with(&self.path, |file| {
                content.file = Born::of(&file.metadata()?);
                Ok(serde_json::to_vec_pretty(&*content)?)
            })
        });
        if let Err(error) = written {
            tracing::warn!(path = %self.path.display(), %error, "cannot record a change of the list of hosts: after a \
                restoration of the journal the list will count as unknown");
        }
    }
}

/// Returns whether the list of a data folder names every host that was paired since `since_unix_ms`, and these hosts. May block.
pub(crate) fn hosts_since(data_dir: &Path, since_unix_ms: u64) -> (HostList, BTreeSet<NamedHost>) {
    let unknown = |why| HostList::Unknown(why);
    let list = Known::list_path(data_dir);
    let mut hosts = match listed(data_dir) {
        Ok(hosts) => hosts,
        Err(_) => return (unknown(Unlisted::Unreadable), BTreeSet::new()),
    };
    let content = match read(&data_dir.join(FILE), &list) {
        Ok(content) => content,
        Err(why) => return (unknown(why), hosts),
    };
    let removed = content.removed.iter().filter(|removed| removed.at_unix_ms >= since_unix_ms);
    hosts.extend(
        removed.map(|removed| NamedHost { id: migration::HostId(removed.id.0), name: removed.name.clone() }),
    );
    // N.B. a backup from the future shows that the clock was wrong, so nothing can be compared with it.
    match (content.since_unix_ms..=now_unix_ms()).contains(&since_unix_ms) {
        true => (HostList::Complete, hosts),
        false => (unknown(Unlisted::OfAnotherTime), hosts),
    }
}

/// Returns the hosts in the list of a data folder. May block.
pub(crate) fn listed(data_dir: &Path) -> Result<BTreeSet<NamedHost>, String> {
    let known = Known::read(data_dir).map_err(|error| crate::error::with_causes(&error))?;
    Ok(known
        .into_iter()
        .map(|peer| NamedHost { id: migration::HostId(peer.id.0), name: peer.name })
        .collect())
}

impl Content {
    fn begun() -> Self {
        Self { version: 1, file: None, since_unix_ms: now_unix_ms(), list_digest: None, removed: Vec::new() }
    }
}

impl Born {
    fn of(file: &Metadata) -> Option<Self> {
        let at = file.created().ok()?.duration_since(UNIX_EPOCH).ok()?;
        Some(Self { inode: file.ino(), at: at.as_nanos().to_string() })
    }
}

/// Reads a history that matches the list beside it.
fn read(path: &Path, list: &Path) -> Result<Content, Unlisted> {
    let text = match whole_file::read(path, FILE_BYTES_MAX) {
        Ok(Some(text)) => text,
        // A list without a history may be of any time.
        Ok(None) if list.exists() => return Err(Unlisted::OfAnotherTime),
        Ok(None) => return Err(Unlisted::Missing),
        Err(_) => return Err(Unlisted::Unreadable),
    };
    let content: Content = serde_json::from_slice(&text).map_err(|_| Unlisted::Unreadable)?;
    let born = File::open(path).and_then(|file| file.metadata()).ok().and_then(|file| Born::of(&file));
    let digest = digest_of(list).map_err(|_| Unlisted::Unreadable)?;
    match (content.list_digest.is_some(), digest.is_some()) {
        (true, false) => return Err(Unlisted::Missing),
        _ if content.list_digest != digest => return Err(Unlisted::OfAnotherTime),
        _ => {}
    }
    match content.file.is_some() && content.file == born && content.version == 1 {
        true => Ok(content),
        false => Err(Unlisted::OfAnotherTime),
    }
}

fn digest_of(list: &Path) -> io::Result<Option<String>> {
    let text = whole_file::read(list, FILE_BYTES_MAX)?;
    Ok(text.map(|text| digest(&SHA256, &text).as_ref().iter().map(|byte| format!("{byte:02x}")).collect()))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// Returns an instant later than all recorded ones.
    fn later() -> u64 {
        let now = now_unix_ms();
        while now_unix_ms() == now {
            std::thread::yield_now();
        }
        now_unix_ms()
    }

    fn peer(number: u8, name: &str) -> Peer {
        Peer { id: HostId([number; 32]), name: name.to_owned(), links: Vec::new() }
    }

    fn names(hosts: &BTreeSet<NamedHost>) -> Vec<&str> {
        hosts.iter().map(|host| host.name.as_str()).collect()
    }

    #[test]
    fn a_list_that_was_kept_all_the_time_names_every_host_also_those_that_were_removed() {
        let folder = tempfile::tempdir().unwrap();
        let begun = now_unix_ms();
        let known = Known::open(folder.path()).unwrap();
        assert_eq!(
            hosts_since(folder.path(), later()),
            (HostList::Complete, BTreeSet::new()),
            "there are none"
        );
        known.add(&peer(1, "one"), None).unwrap();
        known.add(&peer(2, "two"), None).unwrap();
        known.remove("one").unwrap();
        // A later daemon continues it.
        drop(Known::open(folder.path()).unwrap());
        let (list, hosts) = hosts_since(folder.path(), later());
        assert_eq!((list, names(&hosts)), (HostList::Complete, vec!["two"]));
        assert_eq!(hosts_since(folder.path(), u64::MAX).0, HostList::default(), "the clock was wrong");
        let (list, hosts) = hosts_since(folder.path(), begun.saturating_sub(1));
        assert_eq!(list, HostList::Unknown(Unlisted::OfAnotherTime), "it began after the backup");
        assert_eq!(names(&hosts), ["one", "two"]);
    }

    #[test]
    fn a_list_that_is_gone_broken_changed_or_put_back_is_unknown() {
        let folder = tempfile::tempdir().unwrap();
        let known = Known::open(folder.path()).unwrap();
        known.add(&peer(1, "one"), None).unwrap();
        let (list, history) = (Known::list_path(folder.path()), folder.path().join(FILE));
        let before = [&list, &history].map(|path| fs::read(path).unwrap());
        known.add(&peer(2, "two"), None).unwrap();
        let now = [&list, &history].map(|path| fs::read(path).unwrap());
        let judged = || match hosts_since(folder.path(), later()).0 {
            HostList::Complete => None,
            HostList::Unknown(why) => Some(why),
        };
        assert_eq!(judged(), None);
        let put = |files: [&Vec<u8>; 2]| {
            // Restored in place: the files are the same ones.
            fs::write(&list, files[0]).unwrap();
            fs::write(&history, files[1]).unwrap();
        };
        put([&before[0], &now[1]]);
        assert_eq!(judged(), Some(Unlisted::OfAnotherTime), "a list of before");
        put([&before[0], &before[1]]);
        assert_eq!(judged(), Some(Unlisted::OfAnotherTime), "both of before");
        put([&now[0], &now[1]]);
        assert_eq!(judged(), None);
        let partial = String::from_utf8(now[0].clone()).unwrap().replace("two", "too");
        put([&partial.into_bytes(), &now[1]]);
        assert_eq!(judged(), Some(Unlisted::OfAnotherTime), "a list that was changed");
        put([&b"{".to_vec(), &now[1]]);
        assert_eq!(judged(), Some(Unlisted::Unreadable));
        fs::remove_file(&list).unwrap();
        assert_eq!(judged(), Some(Unlisted::Missing));
        // Copies, as a restore of the folder makes them.
        for (path, content) in [(&list, &now[0]), (&history, &now[1])] {
            let _ = fs::remove_file(path);
            fs::write(path, content).unwrap();
        }
        assert_eq!(judged(), Some(Unlisted::OfAnotherTime));
        fs::remove_file(&history).unwrap();
        assert_eq!(judged(), Some(Unlisted::OfAnotherTime));
        fs::remove_file(&list).unwrap();
        assert_eq!(judged(), Some(Unlisted::Missing));
        // A daemon without a history begins a new one, which covers nothing before.
        drop(Known::open(folder.path()).unwrap());
        assert_eq!(
            (hosts_since(folder.path(), later()).0, hosts_since(folder.path(), 0).0),
            (HostList::Complete, HostList::Unknown(Unlisted::OfAnotherTime))
        );
    }
}
