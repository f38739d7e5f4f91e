//! What a host remembers of standbys: files in its data folder, each replaced as a whole.
//!
//! ```text
//!   standbys/ID.source.json   what was ordered, at the source        standbys/ID.source   the record of its machine
//!   standbys/ID.replaced              at the source: the standby was promoted
//!   standbys/ID.compared              at the source: the last comparisons of everything
//!   standbys/ID.copy.json     what was asked for, at the other host  standbys/ID.copy     the record of its machine
//!   standbys/ID.NAME.vm       what starting a VM takes, at the other host
//!   standbys/ID.lent.json     which migration the images are lent to
//!   standbys/ID.test.json     its test, or the last one
//!   standbys/ID.former.json   what was given up here after a promotion
//!   standbys/ID.looks.json    how the images were left, while no daemon runs
//! ```
//! Everything here may block.

mod former;
mod testing;
mod vms;

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use standby::StandbyId;
use standby::asking::IfSilent;
use standby::record::Record;
use standby::verification::Compared;

use crate::files::folder_entries::sync_folder_of;
use crate::files::whole_file;

pub(crate) use self::former::{FormerGroup, FormerVolume, KeptDivergence, ReturnOrder};
pub(crate) use self::testing::{BootCheck, Booted, Stage, TestNetworks, TestRecord, TestVm, TestVolume, Why};
pub(crate) use self::vms::DescribedVm;

const FOLDER: &str = "standbys";
const BYTES_MAX: u64 = 4 << 20;

/// A standby whose volumes are served here.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct SourceConfig {
    /// The identity of the standby, 32 hexadecimal digits.
    pub(crate) id: String,
    pub(crate) name: String,
    /// The identity of the standby's host, 64 hexadecimal digits.
    pub(crate) host: String,
    pub(crate) store: String,
    pub(crate) volumes: Vec<NamedVolume>,
    pub(crate) every_ms: u64,
    pub(crate) rpo_ms: u64,
    pub(crate) bandwidth: Option<u64>,
    pub(crate) keep: Keep,
    pub(crate) is_paused: bool,
    /// What a start does if the standby's host says nothing; `None`: what the configuration says.
    #[serde(default)]
    pub(crate) if_silent: Option<IfSilent>,
    /// The promotion whose direction this standby turns round; `None`: it was ordered anew.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) returns: Option<Returns>,
    /// The host that volumes of the group are leaving for, or have left for; `None`: they are here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) leaving_for: Option<NamedHost>,
    /// When the volumes have come from another host with this standby, in milliseconds since 1970; `None`: it has begun here since.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) came_unix_ms: Option<u64>,
}

/// A promotion whose direction is turned round: its former owner keeps the standby.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Returns {
    /// The identity of the standby that was promoted here, 32 hexadecimal digits.
    pub(crate) former: String,
    /// The life and the epoch that were promoted.
    pub(crate) life: String,
    pub(crate) epoch: u64,
}

/// A standby that is kept here.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct CopyConfig {
    /// The identity of the standby, 32 hexadecimal digits.
    pub(crate) id: String,
    pub(crate) name: String,
    pub(crate) store: String,
    pub(crate) volumes: Vec<CopiedVolume>,
    pub(crate) keep: Keep,
    #[serde(flatten)]
    pub(crate) noted: Noted,
    /// Whether it was removed here after its promotion. Its source may not have heard of that yet.
    #[serde(default)]
    pub(crate) is_removed: bool,
    /// Whether an administrator has given up what was promoted here: the source may serve again.
    #[serde(default)]
    pub(crate) is_yielded: bool,
}

/// What changes of a standby while it is kept.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Noted {
    /// The identity of the source's host, 64 hexadecimal digits.
    pub(crate) host: String,
    /// The host that the volumes are leaving for, or have left for; `None`: they are at `host`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) leaving_for: Option<NamedHost>,
    /// Whether it was promoted, and all of its volumes were made.
    #[serde(default)]
    pub(crate) is_complete: bool,
    /// Other names that a promotion gives its volumes, by their own.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) names: BTreeMap<String, String>,
    /// Whether the source has given up its volumes after the promotion here: it needs no word about that any more.
    #[serde(default)]
    pub(crate) has_source_yielded: bool,
}

/// Another host, as a configuration names it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct NamedHost {
    /// Its identity, 64 hexadecimal digits.
    pub(crate) host: String,
    /// Its name, at the host that has named it.
    pub(crate) name: String,
}

impl Noted {
    /// Returns what is noted when a standby begins.
    pub(crate) fn of(host: String) -> Self {
        Self { host, ..Self::default() }
    }
}

/// A volume of a group, at its source.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct NamedVolume {
    /// The identity of the volume, 32 hexadecimal digits.
    pub(crate) volume: String,
    pub(crate) name: String,
}

/// A volume of a group, at the standby's host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CopiedVolume {
    pub(crate) volume: String,
    pub(crate) name: String,
    pub(crate) size_bytes: u64,
    /// The identity of the volume that a promotion makes, 32 hexadecimal digits.
    pub(crate) promoted: String,
}

/// The images of a standby that a migration to this host has begun with, and does not own yet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Lent {
    /// The number of the migration at this host.
    pub(crate) migration: u64,
    /// The time at which each image counted as written when it was lent; `None`: that was not completed.
    pub(crate) written_at: Option<Vec<(i64, i64)>>,
}

/// How many recovery points are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Keep {
    pub(crate) last: u32,
    pub(crate) hourly: u32,
    pub(crate) daily: u32,
}

/// A file about a standby that cannot be read.
#[derive(Debug)]
pub(crate) struct Unreadable {
    pub(crate) path: PathBuf,
    pub(crate) error: io::Error,
}

/// The attributes of an image when its keeper ended in order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Look {
    pub(crate) inode: u64,
    pub(crate) size_bytes: u64,
    pub(crate) mtime: (i64, i64),
    pub(crate) ctime: (i64, i64),
}

/// The role of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Source,
    Copy,
}

/// The files about standbys.
#[derive(Clone, Debug)]
pub(crate) struct Book {
    folder: PathBuf,
}

impl Book {
    pub(crate) fn open(data_dir: &Path) -> io::Result<Self> {
        let folder = data_dir.join(FOLDER);
        match std::fs::DirBuilder::new().mode(0o700).create(&folder) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => sync_folder_of(&folder)?,
        }
        Ok(Self { folder })
    }

    /// Returns what was written about all standbys of one role, and which files cannot be read: each is left alone.
    pub(crate) fn configs<T: DeserializeOwned>(&self, side: Side) -> io::Result<(Vec<T>, Vec<Unreadable>)> {
        self.files_of(&format!("{}.json", suffix(side)))
    }

    fn files_of<T: DeserializeOwned>(&self, suffix: &str) -> io::Result<(Vec<T>, Vec<Unreadable>)> {
        let (mut found, mut unreadable) = (Vec::new(), Vec::new());
        for entry in std::fs::read_dir(&self.folder)? {
            let path = entry?.path();
            if !path.to_str().is_some_and(|path| path.ends_with(suffix)) {
                continue;
            }
            let bytes = whole_file::read(&path, BYTES_MAX);
            match bytes.and_then(|bytes| Ok(bytes.map(|bytes| serde_json::from_slice(&bytes)).transpose()?)) {
                Ok(config) => found.extend(config),
                Err(error) => unreadable.push(Unreadable { path, error }),
            }
        }
        Ok((found, unreadable))
    }

    /// Returns whether there is a configuration of a standby.
    pub(crate) fn has_config(&self, side: Side, id: &str) -> io::Result<bool> {
        self.config_path(side, id).try_exists()
    }

    /// Writes the configuration of a standby that is new; returns whether it is. **N.B.** One that is known may be another host's.
    pub(crate) fn add_config(&self, side: Side, id: &str, config: &impl Serialize) -> io::Result<bool> {
        if self.has_config(side, id)? {
            return Ok(false);
        }
        self.write_config(side, id, config).map(|()| true)
    }

    pub(crate) fn write_config(&self, side: Side, id: &str, config: &impl Serialize) -> io::Result<()> {
        whole_file::replace(&self.config_path(side, id), &serde_json::to_vec_pretty(config)?)
    }

    /// Returns the record of a machine; `None`: there is none. A damaged one is an error: what it said is unknown.
    pub(crate) fn record<R: Record>(&self, side: Side, id: &str) -> io::Result<Option<R>> {
        let bytes = whole_file::read(&self.record_path(side, id), BYTES_MAX)?;
        let decode = |bytes: Vec<u8>| {
            R::decode(&bytes).ok_or_else(|| {
                io::Error::new(
                    io::ErrorKind::InvalidData,
                    "the record of the standby is damaged, or of another version",
                )
            })
        };
        bytes.map(decode).transpose()
    }

    pub(crate) fn write_record(&self, side: Side, id: &str, record: &impl Record) -> io::Result<()> {
        whole_file::replace(&self.record_path(side, id), &record.encode())
    }

    /// Returns what a standby that is kept here has lent; `None`: nothing.
    pub(crate) fn lent(&self, id: &str) -> io::Result<Option<Lent>> {
        let bytes = whole_file::read(&self.lent_path(id), BYTES_MAX)?;
        Ok(bytes.map(|bytes| serde_json::from_slice(&bytes)).transpose()?)
    }

    pub(crate) fn write_lent(&self, id: &str, lent: &Lent) -> io::Result<()> {
        whole_file::replace(&self.lent_path(id), &serde_json::to_vec_pretty(lent)?)
    }

    /// Notes durably that no migration has the images.
    pub(crate) fn end_lending(&self, id: &str) -> io::Result<()> {
        remove(&self.lent_path(id))
    }

    /// Returns how the images of a standby were left; `None`: not known, because the daemon did not end in order.
    pub(crate) fn looks(&self, id: &str) -> io::Result<Option<Vec<Look>>> {
        let bytes = whole_file::read(&self.looks_path(id), BYTES_MAX)?;
        Ok(bytes.map(|bytes| serde_json::from_slice(&bytes)).transpose()?)
    }

    pub(crate) fn write_looks(&self, id: &str, looks: &[Look]) -> io::Result<()> {
        whole_file::replace(&self.looks_path(id), &serde_json::to_vec_pretty(looks)?)
    }

    /// Notes durably that the images are being written to.
    pub(crate) fn end_looks(&self, id: &str) -> io::Result<()> {
        remove(&self.looks_path(id))
    }

    /// Deletes everything about a standby durably.
    pub(crate) fn forget(&self, side: Side, id: &str) -> io::Result<()> {
        // N.B. What was ordered goes first: a record alone is nothing.
        remove(&self.config_path(side, id))?;
        remove(&self.record_path(side, id))?;
        if side == Side::Source {
            remove(&self.replaced_path(id))?;
            remove(&self.compared_path(id))?;
        }
        if side == Side::Copy {
            self.end_lending(id)?;
            self.forget_vms(id)?;
            self.forget_test(id)?;
            self.end_looks(id)?;
        }
        Ok(())
    }

    /// Returns whether the source knows that the standby was promoted. A file that cannot be looked for says so too.
    pub(crate) fn is_replaced(&self, standby: StandbyId) -> bool {
        self.replaced_path(&hex(standby)).try_exists().unwrap_or(true)
    }

    pub(crate) fn write_replaced(&self, standby: StandbyId, is_replaced: bool) -> io::Result<()> {
        let path = self.replaced_path(&hex(standby));
        if is_replaced { whole_file::replace(&path, &[]) } else { remove(&path) }
    }

    /// Returns what was noted of the comparisons of a standby. One that cannot be read says as little as none.
    pub(crate) fn compared(&self, id: &str) -> Compared {
        let read = whole_file::read(&self.compared_path(id), BYTES_MAX);
        let decoded = read.map(|bytes| bytes.map(|bytes| Compared::decode(&bytes).ok_or("it is damaged")));
        match decoded {
            Ok(Some(Ok(compared))) => return compared,
            Ok(None) => {}
            Ok(Some(Err(error))) => {
                tracing::warn!(standby = id, error, "the note of its last comparison is lost");
            }
            Err(error) => {
                tracing::warn!(standby = id, %error, "the note of its last comparison is lost");
            }
        }
        Compared::default()
    }

    pub(crate) fn write_compared(&self, id: &str, compared: &Compared) -> io::Result<()> {
        whole_file::replace(&self.compared_path(id), &compared.encode())
    }

    fn compared_path(&self, id: &str) -> PathBuf {
        self.folder.join(format!("{id}.compared"))
    }

    fn replaced_path(&self, id: &str) -> PathBuf {
        self.folder.join(format!("{id}.replaced"))
    }

    fn looks_path(&self, id: &str) -> PathBuf {
        self.folder.join(format!("{id}.looks.json"))
    }

    fn lent_path(&self, id: &str) -> PathBuf {
        self.folder.join(format!("{id}.lent.json"))
    }

    fn config_path(&self, side: Side, id: &str) -> PathBuf {
        self.folder.join(format!("{id}{}.json", suffix(side)))
    }

    fn record_path(&self, side: Side, id: &str) -> PathBuf {
        self.folder.join(format!("{id}{}", suffix(side)))
    }
}

/// Deletes a file durably. One that is not there is a success.
fn remove(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => sync_folder_of(path),
    }
}

fn suffix(side: Side) -> &'static str {
    match side {
        Side::Source => ".source",
        Side::Copy => ".copy",
    }
}

/// Returns the text of an identity.
pub(crate) fn hex(id: StandbyId) -> String {
    format!("{:032x}", id.0)
}

/// Returns the identity in a text.
pub(crate) fn parse(id: &str) -> Option<StandbyId> {
    u128::from_str_radix(id, 16).ok().map(StandbyId)
}

#[cfg(test)]
mod tests {
    use chronicle::{Epoch, Generation};
    use standby::LifeId;
    use standby::record::OwnerRecord;

    use super::*;

    #[test]
    fn what_was_written_is_there_until_it_is_forgotten() {
        let folder = tempfile::tempdir().unwrap();
        let book = Book::open(folder.path()).unwrap();
        let id = hex(StandbyId(9));
        let config = SourceConfig {
            id: id.clone(),
            name: "web1".to_owned(),
            host: String::new(),
            store: "fast".to_owned(),
            volumes: Vec::new(),
            every_ms: 10_000,
            rpo_ms: 60_000,
            bandwidth: None,
            keep: Keep { last: 1, hourly: 0, daily: 0 },
            is_paused: false,
            if_silent: None,
            returns: None,
            leaving_for: None,
            came_unix_ms: None,
        };
        let record = OwnerRecord {
            standby: StandbyId(9),
            generation: Generation(1),
            life: LifeId(2),
            acknowledged: Some(Epoch(4)),
            numbered_through: Epoch(64),
        };
        assert!(book.add_config(Side::Source, &id, &config).unwrap());
        assert!(!book.add_config(Side::Source, &id, &"of another host").unwrap());
        book.write_replaced(StandbyId(9), true).unwrap();
        assert!(book.is_replaced(StandbyId(9)));
        book.write_record(Side::Source, &id, &record).unwrap();
        assert_eq!(book.configs::<SourceConfig>(Side::Source).unwrap().0, [config]);
        assert_eq!(book.configs::<CopyConfig>(Side::Copy).unwrap().0, []);
        assert_eq!(book.record(Side::Source, &id).unwrap(), Some(record));
        for _ in 0..2 {
            book.forget(Side::Source, &id).unwrap();
        }
        assert_eq!(book.configs::<SourceConfig>(Side::Source).unwrap().0, []);
        assert_eq!(book.record::<OwnerRecord>(Side::Source, &id).unwrap(), None);
        assert!(!book.is_replaced(StandbyId(9)));
    }
    #[test]
    fn a_file_that_cannot_be_read_is_named_and_hides_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let book = Book::open(folder.path()).unwrap();
        let keep = Keep { last: 1, hourly: 0, daily: 0 };
        let config = CopyConfig {
            id: hex(StandbyId(9)),
            name: "web1".to_owned(),
            store: "fast".to_owned(),
            volumes: Vec::new(),
            keep,
            noted: Noted::default(),
            is_removed: false,
            is_yielded: false,
        };
        book.write_config(Side::Copy, &config.id, &config).unwrap();
        let torn = folder.path().join("standbys/07.copy.json");
        std::fs::write(&torn, b"{ \"id\": \"07\",").unwrap();
        let (found, unreadable) = book.configs::<CopyConfig>(Side::Copy).unwrap();
        assert_eq!(found, [config]);
        assert_eq!(unreadable.into_iter().map(|file| file.path).collect::<Vec<_>>(), [torn]);
    }
}
